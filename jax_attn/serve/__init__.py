"""The inference server: continuous batching over a radix prefix cache, OpenAI-compatible.

    python -m jax_attn.serve --model DIR --host 127.0.0.1 --port 8000

| folder | holds | imports of the server |
| --- | --- | --- |
| `_scheduling` | which sequence computes what in a step; its pages | |
| `_text` | from tokens to text and bytes; stop strings | |
| `_chat` | the parts that depend on a model's chat template | `_text` |
| `_grammar` | constrained decoding: compiled grammars, token masks | `_text` |
| `_engine` | the life of a step: device, sampling, drafts, outputs | `_grammar _scheduling _text` |
| `_openai` | OpenAI's protocol: bodies, answers, limits | `_chat _grammar _scheduling _text` |
| `_anthropic` | Anthropic's protocol, as a translation | `_openai _scheduling` |
| `_ollama` | Ollama's protocol, as a translation | `_chat _openai _scheduling` |
| `_ipc` | messages between the HTTP process and the engine's | `_engine _scheduling` |
| `_http` | routes, keys | `_anthropic _engine _ipc _ollama _openai _scheduling _text` |

`__main__`, `_command` and `_options` are the command line, `_batch` runs a file of requests, and
`_one_process` serves embedding models, without the HTTP process. `_loading` loads models, `_sizing`
computes how many pages fit, and `_executable_cache` keeps XLA's executables on disk.
A folder imports only those above it; tests/project/test_layout.py has the table of all folders.
`_scheduling` is pure Python: none of its modules imports JAX or numpy.

The modules of each folder:

| folder | module | holds |
| --- | --- | --- |
| `_scheduling` | `request`, `events`, `step_plan` | a sequence; its events; a scheduled step |
| | `scheduler` | the tokens of the next step, and the sequences that it preempts |
| | `admission`, `tenants` | which waiting sequences are admitted; tenants' fair shares |
| | `kv_memory`, `pages`, `prefix_cache` | page owners; free pages; shared prefixes |
| | `kv_policies` | the kv policies by their names |
| | `streaming` | the kv policy of long texts: which pages they keep |
| | `prompt_policy` | kv policies of prompts: how many keys their heads keep |
| | `quest` | what tokens of outputs read of the cache |
| | `host_tier` | pages of the prefix cache in the host's memory |
| | `file_tier` | and in files: their names, what is read, and whether that is worth it |
| | `states` | slots of recurrent states; checkpoints |
| | `cache_events` | what the prefix cache stores and evicts |
| | `drafts` | speculative decoding: drafts from a sequence's own text |
| | `pictures` | pictures in prompts, and their numbers in the prefix cache |
| | `beam_search` | the texts of beams: what a step reads, and when a search ends |
| | `streams`, `protocols` | events until they are read; what HTTP needs of an engine |
| `_text` | `detokenizer`, `stop_strings`, `token_bytes` | from tokens to text and bytes |
| | `memory` | gives memory that long texts took back to the system |
| `_chat` | `chat`, `tools`, `reasoning` | chat templates; tool calls; thoughts before the answer |
| | `growing_calls` | tool calls while they are written |
| | `custom_tools` | tools whose input is a text, and the grammar of that text as a JSON string |
| | `harmony`, `gemma_tool_calls` | the formats of gpt-oss and of Gemma |
| | `strict_json` | reads JSON that models write, without a change of its values |
| `_grammar` | `grammar`, `token_masks` | compiled grammars; masks, made by other threads |
| | `compiler`, `trial` | compiles clients' grammars; a process that tries each first |
| | `vocabulary`, `json_schema` | tokens and schemas as llguidance takes them |
| `_engine` | `engine`, `engine_config` | the life of a step, its timeline; configuration |
| | `outputs` | from tokens to events: stop strings and tokens; logprobs |
| | `constrained_decoding` | grammars of a step: masks, forced tokens, late masks |
| | `speculation`, `draft_model` | accepts right drafts; a smaller model that makes them |
| | `mtp_drafts` | drafts of the model's own layer for multi-token prediction |
| | `picture_encoder` | runs the vision tower for the pictures of a step |
| | `counters`, `records`, `snapshot` | numbers; plain data; a snapshot for people |
| | `progress` | progress of long work: a bar, or lines of the log |
| | `adapters` | LoRA adapters by name, and their places on the device |
| | `device`, `buckets`, `sampling` | the device half of a step, in static shapes |
| | `compilations` | counts compilations that nobody expected |
| | `prompt_keys` | chooses the keys that heads keep, and copies them |
| | `selected_rows` | which rows of a step read selected pages, and their plan |
| | `pool_copies` | copies of pages and states out of the device's pools, and into them |
| | `file_store`, `file_copies` | files of the prefix cache; the threads that write and read them |
| | `hand_over`, `leaving` | a request that leaves one engine and goes on in another |
| | `plain_types` | checks what became of JSON against annotations |
| | `async_engine`, `embedder` | the threads of the engine and of an embedding model |
| | `replicas` | several engines of one model behind one queue |
| | `expert_group` | engines that share the experts of a model: one forward pass for all |
| | `processes`, `leading_device` | several processes that form one server |
| `_openai` | `schemas`, `response_schemas`, `fields` | bodies, and rules for their fields |
| | `batch_schemas` | bodies of /v1/files and /v1/batches |
| | `prepare`, `messages`, `text_encoder` | from a body to sequences |
| | `beams` | requests with use_beam_search |
| | `fill_in_middle` | prompts of a prefix and a suffix |
| | `answers`, `response_format`, `logprobs` | from events to answers |
| | `pictures` | from URLs to pixels, and to places in a prompt |
| | `responses_api`, `response_store` | /v1/responses, and its stored responses |
| | `background`, `conversations` | responses without a connection; /v1/conversations |
| | `response_items` | items as clients read them back |
| | `embeddings`, `scores` | /v1/embeddings; /v1/rerank, /v1/score and /classify |
| | `vector_answers` | what those two share |
| | `served_models`, `model_facts` | what HTTP needs of models, and says about them |
| | `bounds`, `limits` | what requests may ask for and hold, in numbers; a key's limits |
| | `errors`, `metrics`, `access_log` | parts common to all routes |
| `_anthropic` | `messages_api` | /v1/messages: from a body to a chat, from events to blocks |
| | `message_schemas`, `message_errors` | its bodies; its errors |
| `_ollama` | `ollama_api`, `ollama_schemas` | /api/: from a body to a chat, to lines; its bodies |
| | `ollama_embeddings` | /api/embed and /api/embeddings |
| `_ipc` | `wire` | messages |
| | `remote_engine`, `engine_host` | the engine's two ends: for HTTP, in the engine's process |
| `_http` | `server`, `openapi`, `debug_state` | routes; /openapi.json; /debug/state |
| | `bodies`, `body_threads` | from bytes to a checked body; threads for it |
| | `error_shapes` | errors in the shape of a route's protocol |
| | `keys`, `auth` | API keys; their middleware |
| | `connection`, `framing` | a connection and its limits; HTTP's messages |
| | `files`, `batches`, `batch_run` | /v1/files; /v1/batches; runs a file of requests |
| | `picture_urls` | pictures by http(s) URLs |
| | `cache_watch` | /debug/cache_events |
| | `tracing` | OpenTelemetry's spans of requests |
| | `http_server` | uvicorn |
| | `http_process`, `http_main` | the HTTP process, for the one that starts it; what it runs |
| | `settings` | what it is told, and whether it can listen |
| | `fair_loop` | an event loop with few connections at a time |
| | `spare_collector` | full garbage collections that look only at what is new |
| | `log_format` | the log, as text or JSON |
"""
