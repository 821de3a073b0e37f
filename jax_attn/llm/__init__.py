"""The engine in Python: batches without HTTP, for scripts, evaluation and on-policy training.

    import jax_attn

    llm = jax_attn.LLM("ORG/NAME")
    for output in llm.generate(["def main(", "class "], jax_attn.SamplingParams(max_tokens=32)):
        print(output.text)

`LLM` is for threads, `AsyncLLM` for asyncio. Both run one engine in a thread of its own.
docs/llm.md describes them, and docs/rl.md weights that change while the engine runs.

Needs the packages of the extra `serve`: pip install 'jax_attn[serve]'.
"""

try:
    import tqdm  # noqa: F401
except ModuleNotFoundError:
    raise ModuleNotFoundError(
        "jax_attn.LLM needs more packages: pip install 'jax_attn[serve]'"
    ) from None

from jax_attn.llm._async_llm import AsyncLLM
from jax_attn.llm._llm import LLM
from jax_attn.llm._outputs import Chunk, Completion, Output, Scores
from jax_attn.llm._params import SamplingParams
from jax_attn.serve._engine.hand_over import HandedOver
from jax_attn.serve._engine.sampling import BATCH_INVARIANT, token_logprobs
from jax_attn.serve._scheduling.events import TokenLogprob
from jax_attn.serve._scheduling.protocols import EngineStopped

__all__ = [
    "BATCH_INVARIANT",
    "LLM",
    "AsyncLLM",
    "Chunk",
    "Completion",
    "EngineStopped",
    "HandedOver",
    "Output",
    "SamplingParams",
    "Scores",
    "TokenLogprob",
    "token_logprobs",
]
