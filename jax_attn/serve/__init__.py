"""The inference server: continuous batching over a radix prefix cache, OpenAI-compatible.

    python -m jax_attn.serve --model DIR --host 127.0.0.1 --port 8000

| module | holds |
| --- | --- |
| `request`, `events`, `step_plan` | a sequence, what is new of it, a scheduled step; plain data |
| `pages`, `prefix_cache`, `kv_memory` | free pages; which hold which tokens; who has which |
| `tenants`, `admission` | whose turn it is; which waiting sequences get in |
| `scheduler` | what the next step computes, and whom it preempts |
| `engine`, `engine_config` | the life of a step; what it is configured by |
| `device`, `buckets`, `sampling` | its half on the device, in static shapes |
| `draft_model`, `drafts` | speculative decoding |
| `grammar`, `masks`, `detokenizer` | constrained decoding; from tokens to text |
| `async_engine`, `live_view` | the thread that steps the engine, for asyncio; a picture of it |
| `streams` | events of sequences until their readers take them |
| `wire`, `remote_engine` | messages between processes; the engine in one, HTTP in another |
| `protocols` | what HTTP needs of an engine and a model |
| `server`, `gate`, `lanes`, `bodies` | routes; limits of a key; from bytes to a checked body |
| `schemas`, `fields`, `prepare` | bodies; how fields are read; from a body to sequences |
| `answers`, `styles`, `scores` | from events to answers |
| `responses_api`, `embeddings` | /v1/responses; /v1/embeddings |
| `chat`, `messages`, `tools`, `reasoning` | what of these depends on the model's chat template |
| `text_encoder`, `token_bytes` | from texts to tokens; the bytes of a token |
| `auth`, `connection`, `errors`, `openapi`, `metrics` | what every route has in common |
| `http_server`, `http_process` | uvicorn and its limits; the process that it has to itself |
| `options`, `sizing` | the command line; how many pages the memory holds |
| `processes`, `replay` | several processes that are one server |

Arrows only go down: HTTP knows `protocols`, the engine knows the scheduler, and the scheduler with
all that it imports is pure Python that does not import jax.
"""
