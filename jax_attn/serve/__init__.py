"""The inference server: continuous batching over a radix prefix cache, OpenAI-compatible.

    python -m jax_attn.serve --model DIR --host 127.0.0.1 --port 8000

| folder | holds | imports of the server |
| --- | --- | --- |
| `_scheduling` | which sequence computes what in a step; its pages | |
| `_text` | from tokens to text and bytes; stop strings | |
| `_chat` | the parts that depend on a model's chat template | `_text` |
| `_grammar` | constrained decoding: compiled grammars, token masks | |
| `_engine` | the life of a step: device, sampling, drafts, outputs | `_grammar _scheduling _text` |
| `_openai` | OpenAI's protocol: bodies, answers, errors, limits | `_chat _grammar _scheduling` |
| `_ipc` | messages between the HTTP process and the engine's | `_engine _scheduling` |
| `_http` | routes, connections, keys; the HTTP process | `_engine _ipc _openai _scheduling _text` |

`__main__` and `_options` are the command line, and `_sizing` computes how many pages fit.
A folder imports only those above it; tests/project/test_layout.py has the table of all folders.
`_scheduling` is pure Python: none of its modules imports JAX or numpy.

The modules of each folder:

| folder | module | holds |
| --- | --- | --- |
| `_scheduling` | `request`, `events`, `step_plan` | a sequence; its events; a scheduled step |
| | `scheduler` | the tokens of the next step, and the sequences that it preempts |
| | `admission`, `tenants` | which waiting sequences are admitted; tenants' fair shares |
| | `kv_memory`, `pages`, `prefix_cache` | page owners; free pages; shared prefixes |
| | `drafts` | speculative decoding: drafts from a sequence's own text |
| | `streams`, `protocols` | events until they are read; what HTTP needs of an engine |
| `_text` | `detokenizer`, `stop_strings`, `token_bytes` | from tokens to text and bytes |
| `_chat` | `chat`, `tools`, `reasoning` | chat templates; tool calls; thoughts before the answer |
| | `harmony`, `gemma_tool_calls` | the formats of gpt-oss and of Gemma |
| `_grammar` | `grammar`, `token_masks` | compiled grammars; masks, made by other threads |
| | `compiler`, `trial` | compiles clients' grammars; a process that tries each first |
| `_engine` | `engine`, `engine_config` | the life of a step, its timeline; configuration |
| | `outputs` | from tokens to events: stop strings and tokens; logprobs |
| | `constrained_decoding` | grammars of a step: masks, forced tokens, late masks |
| | `speculation`, `draft_model` | accepts right drafts; a smaller model that makes them |
| | `counters`, `records`, `snapshot` | numbers; plain data; a snapshot for people |
| | `device`, `buckets`, `sampling` | the device half of a step, in static shapes |
| | `async_engine`, `embedder` | the threads of the engine and of an embedding model |
| | `processes`, `leading_device` | several processes that form one server |
| `_openai` | `schemas`, `response_schemas`, `fields` | bodies, and rules for their fields |
| | `prepare`, `messages`, `text_encoder` | from a body to sequences |
| | `answers`, `response_format`, `logprobs` | from events to answers |
| | `responses_api`, `response_store` | /v1/responses, and its stored responses |
| | `embeddings`, `served_models` | /v1/embeddings; what HTTP needs of models |
| | `limits`, `errors`, `metrics`, `access_log` | a key's limits; parts common to all routes |
| `_ipc` | `wire`, `remote_engine` | messages; the engine's two ends |
| `_http` | `server`, `openapi`, `debug_state` | routes; /openapi.json; /debug/state |
| | `bodies`, `body_threads` | from bytes to a checked body; threads for it |
| | `auth`, `connection` | API keys; a connection and its limits |
| | `http_server`, `http_process` | uvicorn; the HTTP process |
"""
