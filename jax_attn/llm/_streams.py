"""The chunks of a prompt's completions, from the engine's thread to a reader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax_attn.llm._batch import Run
from jax_attn.llm._outputs import Chunk
from jax_attn.serve._engine.async_engine import AsyncEngine
from jax_attn.serve._grammar.compiler import Closed
from jax_attn.serve._scheduling.events import TokenEvent
from jax_attn.serve._scheduling.protocols import EngineStopped


class ChunkQueue:
    """Events of some sequences, in order, for one reader.

    put: gets what `take` turns into chunks, from any thread.
    """

    def __init__(self, engine: AsyncEngine, runs: list[Run], put: Callable[[Any], None]):
        self._engine, self._runs, self._put = engine, {run.seq.id: run for run in runs}, put
        self._left = set(self._runs)

    @property
    def is_done(self) -> bool:
        return not self._left

    def start(self) -> None:
        """Gives the sequences to the engine, once their grammar is compiled.

        Raises EngineStopped, TooManyGrammars.
        """
        seqs = [run.seq for run in self._runs.values()]
        text, tenant = seqs[0].params.grammar, seqs[0].tenant
        if text is None:
            self._engine.enqueue(seqs, {}, self).add_done_callback(self._put_error)
            return

        def submit(done: Any) -> None:
            try:
                compiled = {(tenant, text): done.result()}
                self._engine.enqueue(seqs, compiled, self).add_done_callback(self._put_error)
            except Exception as error:
                self._put(error)

        self._engine.compile(text, tenant).add_done_callback(submit)

    def _put_error(self, submitted: Any) -> None:
        if (error := submitted.exception()) is not None:
            self._put(error)

    def deliver(self, events: list[TokenEvent]) -> None:
        """Receives events in the engine's thread."""
        self._put(events)

    def take(self, arrived: Any) -> list[Chunk]:
        """The chunks of what `put` has got. Raises what the engine raised."""
        if isinstance(arrived, Closed):
            raise EngineStopped("The engine does not run.") from None
        if isinstance(arrived, BaseException):
            raise arrived
        return [chunk for event in arrived if (chunk := self._chunk(event)) is not None]

    def _chunk(self, event: TokenEvent) -> Chunk | None:
        run = self._runs[event.seq_id]
        if event.finish_reason is not None:
            self._left.discard(event.seq_id)
        elif not (event.tokens or event.text):
            return None
        logprobs = event.logprobs
        if logprobs is not None:
            logprobs = logprobs[-len(event.tokens) :] if event.tokens else []
        reason = None if event.finish_reason is None else event.finish_reason.value
        return Chunk(
            run.completion.index,
            event.text,
            event.tokens,
            logprobs,
            event.all_versions(),
            reason,
            event.error,
        )

    def abort(self) -> None:
        if self._left:
            self._engine.abort(self._left)
