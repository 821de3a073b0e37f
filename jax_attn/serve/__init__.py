"""The inference server: continuous batching over a radix prefix cache, OpenAI-compatible.

    python -m jax_attn.serve --model DIR --host 127.0.0.1 --port 8000

| folder | holds |
| --- | --- |
| `_http` | routes, connections, keys, limits on bytes; the HTTP process |
| `_openai` | bodies of the OpenAI protocol, their fields and limits; answers |
| `_chat` | what depends on a model's chat template: messages, tool calls, reasoning |
| `_ipc` | messages between the HTTP process and the engine's process |
| `_engine` | the life of a step: arrays on the device, sampling, drafts, several processes |
| `_grammar` | grammars, their compilation, token masks |
| `_text` | from tokens to text, and the bytes of a token |
| `_scheduling` | what the next step computes, which sequence has which pages, whose turn it is |

`_options` and `_sizing` have the command line and the number of pages. A folder imports only those
further down, or beside it (docs/development.md has the picture): HTTP sees the engine as
`_scheduling.protocols` describes it, and `_scheduling` is pure Python that does not import jax.
"""
