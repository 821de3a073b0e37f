"""The engine and HTTP in two processes, so that they do not share Python's lock.

HTTP uses `RemoteEngine`. `engine_host` is at the other end of the wire, in the engine's process.
Messages are tuples of a name and arguments:

| to the host | |
| --- | --- |
| submit, number, sequences | is answered; then their events come |
| hand_over, number, sequence, num_tokens, so_far | is answered with the sequence's bytes |
| go_on, number, bytes, sequence | is answered; then its events come |
| abort, ids | no more events of them |
| snapshot, number | is answered with the snapshot |
| control, number, name, options | is answered with the weights' version: see AsyncEngine |
| watch, on | whether `cache` messages come |
| stop, number, drain | is answered once the engine's thread has ended |

| from the host | |
| --- | --- |
| answer, number, error or None, result | |
| step, events, stats | events: rows of the fields of TokenEvent |
| cache, events | what the prefix cache has stored and evicted |
| ready | the engine is compiled |
| failed, sentence | the engine has given up |
| signal | SIGTERM or SIGINT |
| leave | another process of the server was told to end |
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Callable
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any

from jax_attn.serve._ipc.wire import Wire
from jax_attn.serve._scheduling.cache_events import CacheEvent
from jax_attn.serve._scheduling.events import TokenEvent
from jax_attn.serve._scheduling.protocols import EngineStopped, Limits
from jax_attn.serve._scheduling.request import FinishReason, Sequence
from jax_attn.serve._scheduling.streams import Inbox, stream

log = logging.getLogger("jax_attn.serve")


class EngineFailed(RuntimeError):
    """The engine or its process ended before it was told to."""


class RemoteEngine:
    """An AsyncEngine in another process, used in the event loop that starts it.

    on_ready, on_failure, on_cache_events: see AsyncEngine, but called in the event loop.
    on_signal, on_leave: called in it when the engine's process is told to end.
    """

    def __init__(self, wire: Wire, limits: Limits, stats: dict[str, Any]):
        """stats: the values until the first step."""
        self.limits = limits
        self.failure: BaseException | None = None
        self.on_ready: Callable[[], None] = lambda: None
        self.on_failure: Callable[[], None] = lambda: None
        self.on_signal: Callable[[], None] = lambda: None
        self.on_leave: Callable[[], None] = lambda: None
        self.on_cache_events: Callable[[list[CacheEvent]], None] = lambda events: None
        self._wire, self._stats = wire, stats
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._is_warm = self._is_stopping = False

    @property
    def ready(self) -> bool:
        """Whether the engine is compiled and takes requests."""
        return self._is_warm and not self._is_stopping and self.failure is None

    def start(self) -> None:
        """Listens to the engine, which its host has started."""
        self._inbox = Inbox(asyncio.get_running_loop())
        self._wire.attach(lambda message: self._on_message(*message), self._on_end)

    async def stop(self, drain: bool) -> None:
        """See AsyncEngine.stop. A second call does nothing."""
        was_stopping, self._is_stopping = self._is_stopping, True
        if was_stopping:
            return
        if self.failure is None:
            try:
                await self._ask("stop", drain)
            except EngineStopped:
                pass  # it has ended by itself
        self._wire.close()

    def generate(self, seqs: Seq[Sequence]) -> AsyncGenerator[TokenEvent]:
        """See AsyncEngine.generate."""
        return stream(seqs, lambda: self._inbox, self._submit, self._abort)

    async def hand_over(self, seq: Sequence, num_tokens: int, so_far: dict[str, Any]) -> bytes:
        """See AsyncEngine.hand_over."""
        try:
            data: bytes = await self._ask_for_work("hand_over", seq, num_tokens, so_far)
            return data
        except asyncio.CancelledError:
            self._abort({seq.id})
            raise

    def go_on(self, data: bytes, seq: Sequence) -> AsyncGenerator[TokenEvent]:
        """See AsyncEngine.go_on."""
        return stream([seq], lambda: self._inbox, partial(self._go_on, data), self._abort)

    async def _go_on(self, data: bytes, seqs: Seq[Sequence], _: Inbox) -> None:
        await self._ask_for_work("go_on", data, seqs[0])

    def stats(self) -> dict[str, Any]:
        """See AsyncEngine.stats."""
        return self._stats

    async def snapshot(self) -> dict[str, Any]:
        """See AsyncEngine.snapshot. Raises EngineStopped."""
        snapshot: dict[str, Any] = await self._ask("snapshot")
        return snapshot

    async def control(self, name: str, **options: Any) -> str:
        """See AsyncEngine.control."""
        version: str = await self._ask("control", name, options)
        return version

    def watch_cache(self, on: bool) -> None:
        """See AsyncEngine.watch_cache."""
        self._wire.send(("watch", on))

    async def _submit(self, seqs: Seq[Sequence], _: Inbox) -> None:
        await self._ask_for_work("submit", list(seqs))

    def _abort(self, seq_ids: set[str]) -> None:
        self._wire.send(("abort", seq_ids))

    async def _ask_for_work(self, name: str, *plain: Any) -> Any:
        if self._is_stopping:
            raise EngineStopped("The engine does not run.")
        return await self._ask(name, *plain)

    async def _ask(self, name: str, *plain: Any) -> Any:
        if self.failure is not None:
            raise EngineStopped("The engine does not run.")
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        self._wire.send((name, number, *plain))
        try:
            return await answer
        finally:
            self._answers.pop(number, None)

    # ---- messages ------------------------------------------------------------------------------

    def _on_message(self, name: str, *plain: Any) -> None:
        getattr(self, f"_on_{name}")(*plain)

    def _on_step(self, rows: list[tuple[Any, ...]], stats: dict[str, Any]) -> None:
        self._stats = stats
        self._inbox.put([TokenEvent(*row) for row in rows])

    def _on_answer(self, number: int, error: Exception | None, result: Any) -> None:
        answer = self._answers.get(number)
        if answer is None or answer.done():
            return  # nobody waits for this answer any more
        if error is None:
            answer.set_result(result)
        else:
            answer.set_exception(error)

    def _on_ready(self) -> None:
        self.on_ready()
        self._is_warm = True

    def _on_failed(self, sentence: str) -> None:
        if self.failure is not None:
            return
        self.failure = EngineFailed(sentence)
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(EngineStopped("The engine does not run."))
        self._inbox.put(
            [
                TokenEvent(seq_id, finish_reason=FinishReason.ERROR, error="The engine failed.")
                for seq_id in self._inbox.sequences
            ]
        )
        self.on_failure()

    def _on_end(self) -> None:
        if self.failure is None:
            log.error("the process of the engine has ended")
        self._on_failed("its process has ended")

    def _on_cache(self, events: list[CacheEvent]) -> None:
        self.on_cache_events(events)

    def _on_signal(self) -> None:
        self.on_signal()

    def _on_leave(self) -> None:
        self.on_leave()
