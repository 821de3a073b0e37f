"""The engine and HTTP in two processes, so that they do not share Python's lock.

HTTP uses `RemoteEngine`. `EngineHost` is at the other end of the wire, in the engine's process.
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
import signal
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from collections.abc import Sequence as Seq
from dataclasses import fields
from functools import partial
from operator import attrgetter
from typing import Any

from jax_attn.serve._engine.async_engine import AsyncEngine
from jax_attn.serve._engine.replicas import Replicas
from jax_attn.serve._ipc.wire import Wire
from jax_attn.serve._scheduling.admission import QueueFull
from jax_attn.serve._scheduling.cache_events import CacheEvent
from jax_attn.serve._scheduling.events import TokenEvent
from jax_attn.serve._scheduling.protocols import EngineStopped, Limits
from jax_attn.serve._scheduling.request import FinishReason, Sequence
from jax_attn.serve._scheduling.streams import Inbox, stream

log = logging.getLogger("jax_attn.serve")

# Tuples take a quarter of the time of pickled events.
_row = attrgetter(*(field.name for field in fields(TokenEvent)))


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


class EngineHost:
    """Runs an engine (not started) for a RemoteEngine at the other end of a wire."""

    def __init__(self, engine: AsyncEngine | Replicas, wire: Wire):
        self._engine, self._wire = engine, wire
        self._tasks: set[asyncio.Task[None]] = set()
        # Sequence id -> its task, until it is in the queue.
        self._submissions: dict[str, asyncio.Task[None]] = {}
        self._lock = threading.Lock()  # replicas are several threads
        self._rows: list[tuple[Any, ...]] = []  # guarded by _lock

    async def run(self, setup: Any, *, signals: bool = True) -> None:
        """Returns when the other side is gone and the engine's thread has ended.

        setup: the first message, for `wire.receive`. signals: pass on SIGTERM and SIGINT.
        """
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        self._wire.attach(lambda message: self._on_message(*message), ended.set)
        self._wire.send(setup)
        on_ready = self._engine.on_ready

        def tell_ready() -> None:
            on_ready()
            self._wire.send(("ready",))

        self._engine.on_ready, self._engine.on_failure = tell_ready, self._tell_failure
        self._engine.on_stats = self._tell_step
        self._engine.on_cache_events = lambda events: self._wire.send(("cache", events))
        for number in (signal.SIGTERM, signal.SIGINT) if signals else ():
            loop.add_signal_handler(number, self._wire.send, ("signal",))
        self._engine.start()  # it compiles while the other side still imports modules
        try:
            await ended.wait()
            await self._engine.stop(drain=False)
        finally:
            for task in self._tasks:
                task.cancel()
            self._wire.close()

    def leave(self) -> None:
        """Has HTTP drain, unless it does already. From any thread."""
        self._wire.send(("leave",))

    # ---- the engine's thread -------------------------------------------------------------------

    def deliver(self, events: list[TokenEvent]) -> None:
        """Receives all events; a call of `_tell_step` follows."""
        with self._lock:
            self._rows += map(_row, events)

    def _tell_step(self, stats: dict[str, Any]) -> None:
        with self._lock:
            rows, self._rows = self._rows, []
            self._wire.send(("step", rows, stats))

    def _tell_failure(self) -> None:
        self._tell_step(self._engine.stats())
        self._wire.send(("failed", str(self._engine.failure)))

    # ---- messages ------------------------------------------------------------------------------

    def _on_message(self, name: str, *plain: Any) -> None:
        getattr(self, f"_on_{name}")(*plain)

    def _on_submit(self, number: int, seqs: list[Sequence]) -> None:
        self._keep(self._answer(number, lambda: self._engine.submit(seqs, self)), seqs)

    def _on_hand_over(
        self, number: int, seq: Sequence, num_tokens: int, so_far: dict[str, Any]
    ) -> None:
        run = partial(self._engine.hand_over, seq, num_tokens, so_far)
        self._keep(self._answer(number, run), [seq])

    def _on_go_on(self, number: int, data: bytes, seq: Sequence) -> None:
        submit = partial(self._engine.submit_handed, data, [seq], self)
        self._keep(self._answer(number, submit), [seq])

    def _keep(self, task: asyncio.Task[None], seqs: list[Sequence]) -> None:
        """Has an abort of the sequences cancel the task, as long as it runs."""
        self._submissions |= {seq.id: task for seq in seqs}

        def forget(_: asyncio.Task[None]) -> None:
            for seq in seqs:
                self._submissions.pop(seq.id, None)

        task.add_done_callback(forget)

    def _on_abort(self, seq_ids: set[str]) -> None:
        for task in {self._submissions[i] for i in seq_ids if i in self._submissions}:
            task.cancel()  # a request runs as a whole or not at all
        self._engine.abort(seq_ids)

    def _on_watch(self, on: bool) -> None:
        self._engine.watch_cache(on)

    def _on_snapshot(self, number: int) -> None:
        self._answer(number, self._engine.snapshot)

    def _on_control(self, number: int, name: str, options: dict[str, Any]) -> None:
        self._answer(number, lambda: self._engine.control(name, **options))

    def _on_stop(self, number: int, drain: bool) -> None:
        self._answer(number, lambda: self._engine.stop(drain))

    def _answer(self, number: int, work: Callable[[], Awaitable[Any]]) -> asyncio.Task[None]:
        """Sends the result or exception of `work` as the answer."""

        async def run() -> None:
            result, error = None, None
            try:
                result = await work()
            except Exception as raised:
                error = _as_sent(raised)
            self._wire.send(("answer", number, error, result))

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _as_sent(error: Exception) -> Exception:
    """Keeps the exceptions with which `submit` refuses; others are bugs, sent as RuntimeError."""
    if isinstance(error, (QueueFull, ValueError, EngineStopped)):
        return error
    log.error("a request failed in the engine", exc_info=error)
    return RuntimeError(f"{type(error).__name__}: {error}")
