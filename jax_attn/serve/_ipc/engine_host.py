"""The engine's end of the wire; see `remote_engine` for the messages."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Awaitable, Callable
from dataclasses import fields
from functools import partial
from operator import attrgetter
from typing import Any

from jax_attn.serve._engine.async_engine import AsyncEngine
from jax_attn.serve._engine.replicas import Replicas
from jax_attn.serve._ipc.wire import Wire
from jax_attn.serve._scheduling.admission import QueueFull
from jax_attn.serve._scheduling.events import TokenEvent
from jax_attn.serve._scheduling.protocols import EngineStopped
from jax_attn.serve._scheduling.request import Sequence

log = logging.getLogger("jax_attn.serve")

# Tuples take a quarter of the time of pickled events.
_row = attrgetter(*(field.name for field in fields(TokenEvent)))


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
