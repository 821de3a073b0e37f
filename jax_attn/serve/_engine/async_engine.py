"""The engine for asyncio: a thread that steps it, and an iterator of events for each request."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from typing import Any, Protocol

from jax_attn import models
from jax_attn.serve._engine.engine import Engine
from jax_attn.serve._engine.engine_config import EngineConfig
from jax_attn.serve._engine.processes import Processes
from jax_attn.serve._grammar.compiler import Closed, GrammarCompiler, TooManyGrammars
from jax_attn.serve._grammar.grammar import CompiledGrammar
from jax_attn.serve._scheduling.admission import QueueFull
from jax_attn.serve._scheduling.events import TokenEvent
from jax_attn.serve._scheduling.protocols import EngineStopped, Limits
from jax_attn.serve._scheduling.request import FinishReason, Sequence
from jax_attn.serve._scheduling.streams import Inbox, stream

log = logging.getLogger("jax_attn.serve")

# Consecutive steps that raise before the engine gives up: no single request is the cause.
_MAX_FAILURES = 3


class _Stopped(Exception):
    """Leaves the warm-up."""


class Recipient(Protocol):
    """Receives the events of sequences."""

    def deliver(self, events: list[TokenEvent]) -> None:
        """Called by the engine's thread.

        Raises RuntimeError if nobody reads the events any more.
        """
        ...


class AsyncEngine:
    """Runs an Engine in a thread. Only that thread uses it.

    A request that fails gets an event that says so. A step that raises ends the running sequences,
    and the engine goes on. After several failures in a row it gives up: `failure` is set and
    `ready` is false.

    on_ready: called once by the engine's thread, before its first step.
    on_stats: called by that thread with the new value of `stats`, after the events of each step and
    when the engine becomes idle.
    on_failure: called by that thread when it gives up, after all waiting requests have been told.
    """

    def __init__(
        self,
        model: models.Model,
        config: EngineConfig,
        processes: Processes | None = None,
        draft_model: models.Model | None = None,
    ):
        """See Engine."""
        self._engine = Engine(model, config, processes, draft_model)
        self.limits = Limits(
            self._engine.max_sequence_tokens, config.max_running, config.max_waiting
        )
        self.failure: BaseException | None = None
        self.on_ready: Callable[[], None] = lambda: None
        self.on_stats: Callable[[dict[str, Any]], None] = lambda stats: None
        self.on_failure: Callable[[], None] = lambda: None
        self._compiler = GrammarCompiler(self._engine.grammars)
        self._thread = threading.Thread(target=self._run, name="jax_attn engine", daemon=True)
        self._wake = threading.Condition()
        # Guarded by _wake, like the fields below.
        self._commands: deque[Callable[[], None]] = deque()
        self._accepts = True
        self._stopping = self._draining = False
        # By sequence id. Used only by the engine's thread.
        self._recipients: dict[str, Recipient] = {}
        self._inboxes: dict[asyncio.AbstractEventLoop, Inbox] = {}
        self._num_failures = 0
        self._is_warm = self._has_ended = False
        self._is_at_rest = False  # the thread waits; guarded by _wake
        self._stats, self._snapshot = self._engine.stats(), self._engine.snapshot()
        self._wants_snapshot = False

    # ---- for asyncio ---------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether the engine is compiled and takes requests."""
        return self._is_warm and self._accepts and self.failure is None

    def start(self) -> None:
        """Starts the thread and returns; requests wait until it has compiled."""
        self._thread.start()

    async def stop(self, drain: bool) -> None:
        """Ends the thread. drain: after all requests are done; otherwise they are aborted."""
        with self._wake:
            self._accepts = False
            self._draining, self._stopping = drain, True
            self._wake.notify()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)

    def generate(self, seqs: Seq[Sequence]) -> AsyncGenerator[TokenEvent]:
        """The events of the sequences, interleaved, until each has had its finish_reason.

        If the caller reads slower than the engine works, one event holds several tokens.

        Closing or cancelling the iterator aborts what is left, before the next step.

        Raises:
          QueueFull, ValueError, EngineStopped: as `submit`, at the first event.
        """
        return stream(seqs, self._inbox_here, self.submit, self.abort)

    def _inbox_here(self) -> Inbox:
        loop = asyncio.get_running_loop()
        if loop not in self._inboxes:
            inboxes = self._inboxes.items()
            self._inboxes = {each: inbox for each, inbox in inboxes if not each.is_closed()}
            self._inboxes[loop] = Inbox(loop)
        return self._inboxes[loop]

    async def submit(self, seqs: Seq[Sequence], recipient: Recipient) -> None:
        """Returns once the sequences are in the queue; their events go to `recipient`.

        Raises:
          QueueFull, ValueError: as Engine.submit. GrammarError is one.
          EngineStopped.
        """
        compiled = await self._compile(seqs)
        submitted: Future[None] = Future()
        self._command(lambda: self._submit(seqs, compiled, recipient, submitted))
        await asyncio.wrap_future(submitted)

    def abort(self, seq_ids: set[str]) -> None:
        """Aborts sequences before the next step.

        They get no more events; unknown ids do nothing.
        """
        self._command(lambda: self._abort(seq_ids), must=False)

    async def _compile(self, seqs: Seq[Sequence]) -> dict[tuple[str, str], CompiledGrammar]:
        """Compiles the grammars, within the limits of one grammar. Returns them by tenant and text.

        Raises: QueueFull, GrammarError, EngineStopped.
        """
        try:
            return {
                (tenant, grammar): await asyncio.wrap_future(
                    self._compiler.compile(grammar, tenant)
                )
                for tenant, grammar in {(s.tenant, s.params.grammar) for s in seqs}
                if grammar is not None
            }
        except Closed:
            raise EngineStopped("The engine does not run.") from None
        except TooManyGrammars as error:
            raise QueueFull(str(error)) from None

    def stats(self) -> dict[str, Any]:
        """See Engine.stats. The values are those after the last step."""
        return self._stats

    async def snapshot(self) -> dict[str, Any]:
        """See Engine.snapshot. While steps run: the last one taken; at rest: the current one."""
        with self._wake:
            # The thread needs the lock to go on, so the engine may be read here.
            if self._is_at_rest:
                return self._engine.snapshot()
        self._wants_snapshot = True
        return self._snapshot

    def _command(self, command: Callable[[], None], must: bool = True) -> None:
        """Has the thread run `command` before its next step.

        must: raise EngineStopped if it cannot.
        """
        with self._wake:
            if not self._accepts and must:
                raise EngineStopped("The engine does not run.")
            self._commands.append(command)
            self._wake.notify()

    # ---- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            names = self._engine.warm_up(self._check_stop)
            self.on_ready()
            self._is_warm = True
            log.info("ready; compiled %d executables: %s", len(names), "; ".join(names))
            while self._turn():
                pass
        except _Stopped:
            pass
        except BaseException as error:
            log.exception("the engine has stopped")
            self.failure = error
        with self._wake:
            self._accepts = False
        self._end()
        if self.failure is not None:
            self.on_failure()

    def _check_stop(self, *progress: object) -> None:
        """Ends a warm-up between two executables: all of them take minutes for a large model."""
        if self._stopping and not self._draining:
            raise _Stopped

    def _turn(self) -> bool:
        """Runs commands, then a step. Returns False when it is time to stop."""
        with self._wake:
            while not (self._commands or self._engine.has_work or self._stopping):
                self._publish()
                self._is_at_rest = True
                self._wake.wait()
            self._is_at_rest = False
            commands, self._commands = self._commands, deque()
        for command in commands:
            command()
        if self._stopping and not (self._draining and self._engine.has_work):
            return False
        if self._engine.has_work:
            self._step()
        return True

    def _step(self) -> None:
        try:
            events = self._engine.step()
            self._num_failures = 0
        except Exception as error:
            self._num_failures += 1
            if self._num_failures >= _MAX_FAILURES:
                raise
            log.exception("a step failed; what was running ends with an error")
            events = self._engine.recover(f"The engine failed: {type(error).__name__}.")
        self._deliver(events)
        self._publish()

    def _submit(
        self,
        seqs: Seq[Sequence],
        compiled: dict[tuple[str, str], CompiledGrammar],
        recipient: Recipient,
        submitted: Future[None],
    ) -> None:
        if not submitted.set_running_or_notify_cancel():
            return  # the client left before this command ran
        try:
            if self._has_ended:
                raise EngineStopped("The engine does not run.")
            self._engine.submit(seqs, compiled)
        except Exception as error:
            submitted.set_exception(error)
            return
        self._recipients |= {seq.id: recipient for seq in seqs}
        submitted.set_result(None)

    def _abort(self, seq_ids: set[str]) -> None:
        for seq_id in seq_ids:
            self._recipients.pop(seq_id, None)
            self._engine.abort(seq_id)

    def _deliver(self, events: list[TokenEvent]) -> None:
        """Gives each recipient its events in one call."""
        batches: dict[Recipient, list[TokenEvent]] = {}
        for event in events:
            recipient = self._recipients.get(event.seq_id)
            if recipient is None:
                continue  # aborted
            batches.setdefault(recipient, []).append(event)
            if event.finish_reason is not None:
                del self._recipients[event.seq_id]
        for recipient, batch in batches.items():
            try:
                recipient.deliver(batch)
            except RuntimeError:
                self._abort({event.seq_id for event in batch})

    def _publish(self) -> None:
        self._stats = self._engine.stats()
        self.on_stats(self._stats)
        if self._wants_snapshot:  # takes some milliseconds, so a waiting request goes first
            self._wants_snapshot = False
            self._snapshot = self._engine.snapshot()

    def _end(self) -> None:
        """Tells all who still wait."""
        self._has_ended = True
        self._compiler.close()
        with self._wake:  # later commands are refused or are aborts that have no effect
            commands, self._commands = self._commands, deque()
        for command in commands:
            command()
        reason, message = FinishReason.ABORT, None
        if self.failure is not None:
            reason, message = FinishReason.ERROR, "The engine failed."
        left = list(self._recipients)
        self._deliver([TokenEvent(id, finish_reason=reason, error=message) for id in left])
        if self.failure is None:
            self._abort(set(left))
            self._wants_snapshot = True
            self._publish()
