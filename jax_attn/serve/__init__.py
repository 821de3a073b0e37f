"""The inference server: continuous batching over a radix prefix cache, OpenAI-compatible.

    python -m jax_attn.serve --model DIR --host 127.0.0.1 --port 8000

| module | holds |
| --- | --- |
| `request` | what a client asked for, and the state of one stream of tokens |
| `pages`, `prefix_cache` | who owns a page of the kv cache; which pages hold which tokens |
| `scheduler` | what the next step computes; admission, preemption, deadlines |
| `engine`, `sampling`, `grammar`, `detokenizer` | the step on the device, and what becomes of it |
| `async_engine` | the thread that runs the engine, for asyncio |
| `server`, `schemas`, `chat`, `metrics` | HTTP |

`request`, `pages`, `prefix_cache` and `scheduler` are pure Python and do not import jax.
"""
