"""The inference server: continuous batching over a radix prefix cache, OpenAI-compatible.

    python -m jax_attn.serve --model DIR --host 127.0.0.1 --port 8000

| module | holds |
| --- | --- |
| `request`, `events` | one stream of tokens, as asked for and as answered; plain data |
| `pages`, `prefix_cache` | who owns a page of the kv cache; which pages hold which tokens |
| `kv_memory`, `tenants` | who of the running has which pages and slots; whose turn it is |
| `scheduler`, `admission` | what the next step computes; who gets in, in fair shares |
| `engine` | the step: admit, schedule, plan, forward, sample, retire |
| `device`, `buckets`, `sampling` | its half on the device, in static shapes |
| `grammar`, `detokenizer` | constrained decoding; from tokens to text |
| `async_engine`, `live_view` | the thread that steps the engine, for asyncio; a picture of it |
| `server`, `schemas`, `prepare`, `responses` | requests and answers, HTTP |
| `chat`, `tools`, `token_bytes` | what of these depends on the model directory |
| `auth`, `connection`, `errors`, `openapi`, `metrics` | what every route has in common |

Arrows only go down: HTTP knows `async_engine`, the engine knows the scheduler, and `request`,
`pages`, `prefix_cache` and `scheduler` are pure Python that does not import jax.
"""
