"""The engine for asyncio: a thread that steps it, and an iterator of events for each request."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import jax

from jax_attn import models
from jax_attn.serve._engine.engine import Engine
from jax_attn.serve._engine.engine_config import EngineConfig
from jax_attn.serve._engine.hand_over import HandedOver
from jax_attn.serve._engine.leaving import Leaving
from jax_attn.serve._engine.processes import Processes
from jax_attn.serve._grammar.compiler import Closed, GrammarCompiler, TooManyGrammars
from jax_attn.serve._grammar.grammar import CompiledGrammar
from jax_attn.serve._scheduling.admission import QueueFull
from jax_attn.serve._scheduling.cache_events import CacheEvent
from jax_attn.serve._scheduling.events import TokenEvent
from jax_attn.serve._scheduling.pictures import PictureNumbers
from jax_attn.serve._scheduling.protocols import EngineStopped, Limits
from jax_attn.serve._scheduling.request import FinishReason, Sequence
from jax_attn.serve._scheduling.streams import Inboxes, stream

log = logging.getLogger("jax_attn.serve")

# Consecutive steps that raise before the engine gives up: no single request is the cause.
_MAX_FAILURES = 3

# Seconds between two executables that are compiled while requests run. Compiling one takes both of
# two processors for 0.3 to 1 s, in which a stream goes at half its speed.
_SECONDS_BESIDE_STEPS = 5.0
# Seconds after the start in which a first request may come, before the rest is compiled: tracing
# holds Python's lock, so that its first token came after 0.18 s.
_SECONDS_UNTIL_STEPS = 0.5


Result = TypeVar("Result")


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
    on_cache_events: called by it with what the prefix cache has stored and evicted, if
    `watch_cache` asks for that.
    on_failure: called by that thread when it gives up, after all waiting requests have been told.
    """

    def __init__(
        self,
        model: models.Model,
        config: EngineConfig,
        processes: Processes | None = None,
        draft_model: models.Model | None = None,
        vision: models.VisionModel | None = None,
    ):
        """See Engine."""
        self._engine = Engine(model, config, processes, draft_model, vision)
        self.limits = Limits(
            self._engine.max_sequence_tokens, config.max_running, config.max_waiting
        )
        self.failure: BaseException | None = None
        # False: all shapes are compiled before the first step, so that runs of a program do not
        # differ by when a shape was there.
        self.serves_early = True
        self.seconds_beside_steps = _SECONDS_BESIDE_STEPS
        self.seconds_until_steps = _SECONDS_UNTIL_STEPS
        self.on_ready: Callable[[], None] = lambda: None
        self.on_stats: Callable[[dict[str, Any]], None] = lambda stats: None
        self.on_failure: Callable[[], None] = lambda: None
        self.on_cache_events: Callable[[list[CacheEvent]], None] = lambda events: None
        self._compiler = GrammarCompiler(self._engine.grammars)
        self._thread = threading.Thread(target=self._run, name="jax_attn engine", daemon=True)
        self._compiling = threading.Thread(
            target=self._compile_later, name="jax_attn compiler", daemon=True
        )
        self._wake = threading.Condition()
        # Guarded by _wake, like the fields below.
        self._commands: deque[Callable[[], None]] = deque()
        self._accepts = True
        self._stopping = self._draining = False
        self._is_paused = False
        self._lacks: set[str] = set()  # "pages", "weights": what sleep or a failed update took
        # By sequence id. Used only by the engine's thread.
        self._recipients: dict[str, Recipient] = {}
        self._inboxes = Inboxes()
        self._num_failures = 0
        self._is_warm = self._has_ended = False
        self._is_at_rest = False  # the thread waits; guarded by _wake
        self._is_calm = threading.Event()  # set while it does, and when it has ended
        self._has_begun = threading.Event()  # set by the first command, and when it has ended
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
        """Ends the thread. drain: after all requests are done; otherwise they are aborted.

        Draining ends a pause. Requests that wait for `wake` are aborted.
        """
        self.begin_stop(drain)
        await asyncio.to_thread(self.join)

    def begin_stop(self, drain: bool) -> None:
        """Begins `stop`. From any thread."""
        with self._wake:
            self._accepts = False
            self._draining, self._stopping = drain, True
            self._is_paused = self._is_paused and not drain
            self._wake.notify()

    def join(self) -> None:
        """Waits until the thread has ended."""
        if self._thread.is_alive():
            self._thread.join()

    def generate(self, seqs: Seq[Sequence]) -> AsyncGenerator[TokenEvent]:
        """The events of the sequences, interleaved, until each has had its finish_reason.

        If the caller reads slower than the engine works, one event holds several tokens.

        Closing or cancelling the iterator aborts what is left, before the next step.

        Raises:
          QueueFull, ValueError, EngineStopped: as `submit`, at the first event.
        """
        return stream(seqs, self._inboxes.here, self.submit, self.abort)

    async def submit(self, seqs: Seq[Sequence], recipient: Recipient) -> None:
        """Returns once the sequences are in the queue; their events go to `recipient`.

        Raises:
          QueueFull, ValueError: as Engine.submit. GrammarError is one.
          EngineStopped.
        """
        compiled = await self.compile_all(seqs)
        await asyncio.wrap_future(self.enqueue(seqs, compiled, recipient))

    async def hand_over(self, seq: Sequence, num_tokens: int, so_far: dict[str, Any]) -> bytes:
        """Runs a sequence until it has num_tokens tokens, or ends. Returns what `go_on` of another
        server's engine goes on with. so_far: what it passes on, of plain values.

        Raises as `submit`, and RuntimeError: the sequence has failed.
        """
        compiled = await self.compile_all([seq])

        def ended(seq: Sequence) -> HandedOver:
            return HandedOver.ended(seq, self.version, self.page_size)

        leaving = Leaving(seq, num_tokens, self.export_request, ended)
        try:
            await asyncio.wrap_future(self.enqueue([seq], compiled, leaving))
            handed = await asyncio.wrap_future(leaving.handed)
        except BaseException:
            self.abort({seq.id})
            raise
        handed.so_far = so_far | {"event": dataclasses.asdict(leaving.event)}
        return await asyncio.to_thread(handed.to_bytes)

    def go_on(self, data: bytes, seq: Sequence) -> AsyncGenerator[TokenEvent]:
        """`generate` for a sequence of which another server's engine has computed a part.

        data: of `hand_over`. seq: the same request, read again. The first event has the output of
        the other engine.

        Raises as `generate`; ValueError also for bytes of another request, model or version.
        """
        return stream([seq], self._inboxes.here, partial(self.submit_handed, data), self.abort)

    async def submit_handed(self, data: bytes, seqs: Seq[Sequence], recipient: Recipient) -> None:
        """`submit` for one sequence of `go_on`."""
        (seq,) = seqs
        handed = await asyncio.to_thread(HandedOver.from_bytes, data)
        handed.go_on_as(seq)
        first = handed.event(seq.id)

        def work() -> None:
            if first.finish_reason is None:
                self._engine.import_request(handed, seq.id)
                self._recipients[seq.id] = recipient
            recipient.deliver([first])

        await asyncio.wrap_future(self._between_steps(work))

    # ---- for any thread ------------------------------------------------------------------------

    def num_cached_tokens(self, seq: Sequence) -> int:
        """See Engine.num_cached_tokens."""
        return self._engine.num_cached_tokens(seq)

    def share_picture_numbers(self, numbers: PictureNumbers) -> None:
        """Has equal pictures numbered as in other engines. Before `start`."""
        self._engine.picture_numbers = numbers

    @property
    def page_size(self) -> int:
        return self._engine.config.page_size

    @property
    def num_pages(self) -> int:
        return self._engine.config.num_pages

    @property
    def has_begun(self) -> bool:
        """Whether it is, or was, compiled."""
        return self._is_warm

    def forget_compilations(self) -> None:
        """Counts the compilations after the warm-up from now on."""
        self._engine.device.forget_compilations()

    def enqueue(
        self,
        seqs: Seq[Sequence],
        compiled: dict[tuple[str, str], CompiledGrammar],
        recipient: Recipient,
    ) -> Future[None]:
        """As `submit`, for grammars that are compiled. The future raises what `submit` does.

        Raises EngineStopped.
        """
        submitted: Future[None] = Future()
        self._command(lambda: self._submit(seqs, compiled, recipient, submitted))
        return submitted

    def compile(self, grammar: str, tenant: str) -> Future[CompiledGrammar]:
        """See GrammarCompiler.compile."""
        return self._compiler.compile(grammar, tenant)

    def abort(self, seq_ids: set[str]) -> None:
        """Aborts sequences before the next step.

        They get no more events; unknown ids do nothing.
        """
        self._command(lambda: self._abort(seq_ids), must=False)

    async def compile_all(self, seqs: Seq[Sequence]) -> dict[tuple[str, str], CompiledGrammar]:
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

    def export_request(self, seq_id: str) -> Future[HandedOver]:
        """Takes a request out between two steps: see Engine.export_request."""

        def work() -> HandedOver:
            self._deliver(self._engine.settle())
            handed = self._engine.export_request(seq_id)
            self._recipients.pop(seq_id, None)
            return handed

        return self._between_steps(work)

    def import_request(self, handed: HandedOver, seq_id: str, recipient: Recipient) -> Future[None]:
        """Takes a request of another engine: see Engine.import_request."""

        def work() -> None:
            self._engine.import_request(handed, seq_id)
            self._recipients[seq_id] = recipient

        return self._between_steps(work)

    def watch_cache(self, on: bool) -> None:
        """Begins, or ends, calls of on_cache_events. The first has all that is cached."""
        self._command(lambda: self._engine.scheduler.cache.watch(on), must=False)

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

    def pause(self, *, end: bool) -> Future[None]:
        """Takes no step until `resume`, once the one in flight is done. Requests queue meanwhile.

        end: end the requests that are running or waiting, with finish reason 'abort'.
        """

        def work() -> None:
            self._is_paused = True
            self._deliver(self._engine.settle())
            if end:
                for seq_id in list(self._recipients):
                    self._engine.abort(seq_id)
                self._deliver(self._engine.settle())

        return self._between_steps(work)

    def resume(self) -> Future[None]:
        """Undoes `pause`. Without a pause it does nothing."""

        def work() -> None:
            self._is_paused = False

        return self._between_steps(work)

    @property
    def version(self) -> str:
        """The name of the weights' version."""
        return self._engine.version

    def update_params(
        self, params: Any, version: str | None = None, **options: bool
    ) -> Future[str]:
        """Replaces weights between two steps: see Engine.update_params. Returns their version.

        It wakes an engine that sleeps without weights, but not the pages.
        """

        def work() -> str:
            self._deliver(self._engine.settle())
            try:
                self._engine.update_params(params, version, **options)
            finally:
                self._lacks.discard("weights")
                if not self._engine.device.has_weights:
                    self._lacks.add("weights")
            return self._engine.version

        return self._between_steps(work)

    def preload_lora(self, name: str, weights: models.LoraWeights) -> None:
        """Loads an adapter before `start`. Raises ValueError."""
        self._engine.load_lora(name, weights)

    def load_lora(self, name: str, weights: models.LoraWeights) -> Future[None]:
        """Loads an adapter between two steps: see LoadedAdapters.load."""

        def work() -> None:
            self._deliver(self._engine.settle())
            self._engine.load_lora(name, weights)

        return self._between_steps(work)

    def unload_lora(self, name: str) -> Future[None]:
        """See LoadedAdapters.unload."""
        return self._between_steps(lambda: self._engine.unload_lora(name))

    @property
    def lora_names(self) -> list[str]:
        """The adapters that requests may name."""
        return self._engine.lora_names

    @property
    def kv_split(self) -> int | None:
        """See LLM.kv_split."""
        return next((spec.kv_split for spec in self._engine.device.buckets[0].specs), None)

    async def control(self, name: str, **options: Any) -> str:
        """What an operator may do: "weights" (see load_weights), "pause" (end), "resume", "lora"
        (adapter, directory) or "unload" (adapter).

        Returns the weights' version after it. Raises ValueError, EngineStopped.
        """
        match name:
            case "weights":
                return await self.load_weights(**options)
            case "pause":
                await asyncio.wrap_future(self.pause(**options))
            case "resume":
                await asyncio.wrap_future(self.resume())
            case "lora":
                adapter, directory = options["adapter"], options["directory"]
                config = self._engine.model.config
                weights = await asyncio.to_thread(models.load_lora, directory, config)
                await asyncio.wrap_future(self.load_lora(adapter, weights))
            case "unload":
                await asyncio.wrap_future(self.unload_lora(options["adapter"]))
        return self.version

    async def load_weights(
        self, directory: Path, version: str | None, *, keep_prefixes: bool
    ) -> str:
        """Replaces the weights by those of a model directory. Returns their version.

        Steps go on while it is read. Raises ValueError for files that do not fit, EngineStopped.
        """
        config, dtype = self._engine.model.config, self._engine.device.dtype

        def read() -> models.Params:
            with jax.default_device(jax.local_devices(backend="cpu")[0]):
                return models.load_params(directory, config, dtype)

        params = await asyncio.to_thread(read)
        update = self.update_params(params, version, donate=True, keep_prefixes=keep_prefixes)
        return await asyncio.wrap_future(update)

    def sleep(self, *, weights: bool) -> Future[None]:
        """Frees memory: see Engine.sleep. No step is taken until `wake`; requests queue."""

        def work() -> None:
            if "pages" not in self._lacks:
                self._deliver(self._engine.settle())
                self._engine.sleep(weights=weights)
                self._lacks |= {"pages", *(["weights"] if weights else [])}

        return self._between_steps(work)

    def wake(self) -> Future[None]:
        """Undoes `sleep`. The future raises ValueError without weights, or if pages do not fit."""

        def work() -> None:
            if "weights" in self._lacks:
                raise ValueError(
                    "wake: expected weights, which sleep has freed; call update_params first."
                )
            if "pages" in self._lacks:
                try:
                    self._engine.wake()
                except jax.errors.JaxRuntimeError as error:
                    if "RESOURCE_EXHAUSTED" not in str(error):
                        raise
                    raise ValueError(
                        "wake: expected room for the kv cache in the device's memory; free some."
                    ) from None
                self._lacks = set()

        return self._between_steps(work)

    @property
    def lacks(self) -> frozenset[str]:
        """What it needs before the next step: "pages", "weights"."""
        return frozenset(self._lacks)

    def _between_steps(self, work: Callable[[], Result]) -> Future[Result]:
        """Has the thread run `work` before its next step. Raises EngineStopped."""
        done: Future[Result] = Future()

        def command() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                if self._has_ended:
                    raise EngineStopped("The engine does not run.")
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)

        self._command(command)
        return done

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
            engine = self._engine
            warm_up = engine.warm_up_first if self.serves_early else engine.warm_up
            names = warm_up(self._check_stop)
            self.on_ready()
            self._is_warm = True
            log.info("ready; compiled %d executables: %s", len(names), "; ".join(names))
            self._compiling.start()
            while self._turn():
                pass
        except _Stopped:
            pass
        except BaseException as error:
            log.exception("the engine has stopped")
            self.failure = error
        with self._wake:
            self._accepts = False
        self._is_calm.set()
        self._has_begun.set()
        self._end()
        if self._compiling.is_alive():
            self._compiling.join()
        if self.failure is not None:
            self.on_failure()

    def _compile_later(self) -> None:
        """Compiles what is left: at once without requests, else now and then.

        A step that needs one of the shapes is padded to a larger one until then.
        """
        device = self._engine.device
        if device.is_complete:
            return
        self._has_begun.wait(self.seconds_until_steps)
        try:
            device.compile_later(self._await_turn)
        except _Stopped:
            pass
        except Exception:
            log.exception(
                "%d shapes of a step are not compiled; steps are padded to larger ones",
                device.num_buckets_left,
            )
        else:
            log.info("compiled the shapes that were left")
        self._command(lambda: None, must=False)  # so that `stats` of an idle engine are new

    def _await_turn(self) -> None:
        """Called before each executable. Raises _Stopped."""
        self._is_calm.wait(self.seconds_beside_steps)
        if self._stopping or self.failure is not None:
            raise _Stopped

    def _check_stop(self, *progress: object) -> None:
        """Ends a warm-up between two executables: all of them take minutes for a large model."""
        if self._stopping and not self._draining:
            raise _Stopped

    def _turn(self) -> bool:
        """Runs commands, then a step. Returns False when it is time to stop."""
        with self._wake:
            while not (self._commands or self._can_step or self._stopping):
                self._publish()
                self._engine.device.rest()
                self._is_at_rest = True
                self._is_calm.set()
                self._wake.wait()
            self._is_at_rest = False
            self._is_calm.clear()
            self._has_begun.set()
            commands, self._commands = self._commands, deque()
        for command in commands:
            command()
        if self._stopping and not (self._draining and self._can_step):
            return False
        if self._can_step:
            self._step()
        return True

    @property
    def _can_step(self) -> bool:
        return self._engine.has_work and not self._is_paused and not self._lacks

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
        if events := self._engine.scheduler.cache.take_events():
            self.on_cache_events(events)
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
        self._engine.close(keep=self.failure is None)
