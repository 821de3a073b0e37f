"""Runs an engine, step by step, until it has no work."""

import itertools
import time
from typing import Any, NamedTuple

from jax_attn.serve._engine.engine import Engine
from jax_attn.serve._scheduling.request import FinishReason, SamplingParams, Sequence

_ids = itertools.count()


class Result(NamedTuple):
    tokens: list[int]
    logprobs: list[Any]
    num_cached: int
    reason: FinishReason | None


def run(engine: Engine, *prompts: list[int], num_tokens: int = 4, **fields: Any) -> list[Result]:
    """Samples so many tokens of each prompt, all at once. fields: of the sequences."""
    params = SamplingParams(num_tokens, temperature=1.0, seed=3, ignore_eos=True, logprobs=1)
    names = [f"run{next(_ids)}" for _ in prompts]
    seqs = [Sequence(x, x, list(y), params, **fields) for x, y in zip(names, prompts, strict=True)]
    found = {name: Result([], [], 0, None) for name in names}
    engine.submit(seqs)
    deadline = time.monotonic() + 240
    while engine.has_work:
        assert time.monotonic() < deadline, engine.stats()
        for event in engine.step():
            before = found[event.seq_id]
            before.tokens.extend(event.tokens)
            before.logprobs.extend(event.logprobs or [])
            found[event.seq_id] = before._replace(reason=event.finish_reason)
        engine.scheduler.check_integrity()
    return [found[seq.id]._replace(num_cached=seq.num_cached) for seq in seqs]
