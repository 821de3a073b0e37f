"""Requests with use_beam_search: the engine runs the steps of searches, answers get their texts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from jax_attn.serve._openai import schemas
from jax_attn.serve._openai.errors import bad_field
from jax_attn.serve._scheduling.admission import QueueFull
from jax_attn.serve._scheduling.beam_search import MAX_WIDTH, BeamSearch, TextOf, unsupported
from jax_attn.serve._scheduling.events import TokenEvent
from jax_attn.serve._scheduling.protocols import ServedEngine
from jax_attn.serve._scheduling.request import Sequence

_RETRY_SECONDS = 0.05  # if the queue has no room for the next step of a running search


def check(body: schemas.SamplingBody) -> None:
    """Raises ApiError for fields that beam search does not honour, and for its own without it."""
    if not body.use_beam_search:
        if body.length_penalty != 1:
            raise bad_field("length_penalty", "needs use_beam_search: true")
        return
    if body.n > MAX_WIDTH:
        raise bad_field("n", f"at most {MAX_WIDTH} with use_beam_search, got {body.n}")
    if isinstance(body, schemas.CompletionRequest) and body.max_tokens == 0:
        raise bad_field("max_tokens", "at least 1 with use_beam_search")
    constraint = body.constraint
    given = {name: getattr(body, name) for name in body.model_fields_set}
    field = constraint.field if constraint is not None else unsupported(given)
    for name in ("stream", "best_of", "echo", "tools", "prediction"):
        field = field or (name if given.get(name) else None)
    if field is not None:
        raise bad_field(field, "not supported with use_beam_search")


@dataclass(frozen=True)
class Beams:
    """What a request asks of its searches, and what their texts are made with."""

    length_penalty: float
    eos_tokens: Collection[int]
    text_of: TextOf

    async def events(
        self, engine: ServedEngine, sequences: Seq[Sequence], width: int
    ) -> AsyncGenerator[TokenEvent]:
        """The texts as the output of `sequences`, `width` for each prompt, the best first.

        Raises as engine.generate.
        """
        window = engine.limits.max_waiting // engine.limits.num_replicas
        for begin in range(0, len(sequences), width):
            of_prompt = sequences[begin : begin + width]
            search = BeamSearch(of_prompt[0], width, self.length_penalty, self.eos_tokens)
            has_begun = begin > 0
            while not search.is_done:
                step, found = search.sequences(), []
                for first in range(0, len(step), window):
                    group = step[first : first + window]
                    found += await _run(engine, group, may_wait=has_begun)
                    has_begun = True
                search.take(found)
            for event in search.events(of_prompt, self.text_of):
                yield event
                await asyncio.sleep(0)  # lets other requests run


async def _run(engine: ServedEngine, group: list[Sequence], may_wait: bool) -> list[TokenEvent]:
    """All events of each sequence as one. may_wait: for room in the engine's queue."""
    while True:
        found = {seq.id: TokenEvent(seq.id) for seq in group}
        try:
            async with contextlib.aclosing(engine.generate(group)) as events:
                async for event in events:
                    found[event.seq_id].extend(event)
            return list(found.values())
        except QueueFull:
            if not may_wait:
                raise
        await asyncio.sleep(_RETRY_SECONDS)
