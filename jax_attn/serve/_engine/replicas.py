"""Several engines of one model, each on its own devices, behind one queue.

A request goes to the replica that has the longest part of its prompt, cached or about to be. If
that one has too many requests more than the least busy, it goes to the least busy. A replica that
fails ends its own requests; the others go on, and new requests are theirs.

All engines are threads of one process, so their parts in Python take turns.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

from jax_attn import models
from jax_attn.serve._engine.async_engine import AsyncEngine, Recipient
from jax_attn.serve._grammar.grammar import CompiledGrammar
from jax_attn.serve._scheduling.admission import QueueFull
from jax_attn.serve._scheduling.cache_events import CacheEvent, SharedEvents
from jax_attn.serve._scheduling.events import TokenEvent
from jax_attn.serve._scheduling.pictures import PictureNumbers
from jax_attn.serve._scheduling.prefix_cache import num_common
from jax_attn.serve._scheduling.protocols import EngineStopped, Limits
from jax_attn.serve._scheduling.request import Sequence
from jax_attn.serve._scheduling.streams import Inboxes, stream

log = logging.getLogger("jax_attn.serve")

Result = TypeVar("Result")

# Requests by which a replica may be ahead of the least busy one: this part of those that run at
# once, and not fewer than a few, or an idle server would spread the requests of one prompt.
_AHEAD_SHARE, _AHEAD_LEAST = 0.25, 4
_MOST_COMPARED = 16  # newest requests of a replica whose prompts a new one is compared with


class _Prompt(NamedTuple):
    """The prompt of a sequence that has not ended. The sequence itself is its engine's."""

    namespace: str
    adapter_name: str
    key: bytes  # the packed tokens


@dataclass(frozen=True)
class _Delivery:
    """Passes a replica's events on, and notes which of its sequences have ended."""

    replicas: Replicas
    index: int
    recipient: Recipient

    def deliver(self, events: list[TokenEvent]) -> None:
        ended = {event.seq_id for event in events if event.finish_reason is not None}
        self.replicas.forget(self.index, ended)
        try:
            self.recipient.deliver(events)
        except RuntimeError:  # nobody reads them: the engine aborts all of these
            self.replicas.forget(self.index, {event.seq_id for event in events})
            raise


class Replicas:
    """Has the interface of an AsyncEngine as far as a server uses it. See AsyncEngine."""

    def __init__(self, engines: Seq[AsyncEngine]):
        """engines: not started, and of one configuration but for the devices."""
        self._engines = engines
        each = engines[0].limits
        num = len(engines)
        self.limits = Limits(
            each.max_model_len, num * each.max_running, num * each.max_waiting, num
        )
        self.on_ready: Callable[[], None] = lambda: None
        self.on_stats: Callable[[dict[str, Any]], None] = lambda stats: None
        self.on_failure: Callable[[], None] = lambda: None
        self.on_cache_events: Callable[[list[CacheEvent]], None] = lambda events: None
        self._cache_lock = threading.Lock()
        self._cache_events: SharedEvents | None = None  # guarded by _cache_lock
        self._lock = threading.Lock()
        # Guarded by _lock. By replica: of sequences that have not ended, the oldest first.
        self._unfinished: list[dict[str, _Prompt]] = [{} for _ in engines]
        self._num_left = num  # replicas that are neither ready nor failed
        self._most_ahead = max(_AHEAD_LEAST, int(_AHEAD_SHARE * each.max_running))
        self._inboxes = Inboxes()
        self._picture_numbers = PictureNumbers()
        for index, engine in enumerate(engines):
            engine.share_picture_numbers(self._picture_numbers)
            engine.on_ready = self._begin
            engine.on_failure = partial(self._fail, index)
            engine.on_stats = lambda _: self.on_stats(self.stats())
            engine.on_cache_events = partial(self._see_cache, index)

    @property
    def failure(self) -> BaseException | None:
        """The first replica's failure, once all have failed."""
        failures = [engine.failure for engine in self._engines]
        return failures[0] if all(failures) else None

    @property
    def ready(self) -> bool:
        """Whether all replicas that have not failed are compiled and take requests."""
        alive = self._alive
        return bool(alive) and all(self._engines[i].ready for i in alive)

    @property
    def _alive(self) -> list[int]:
        return [i for i, engine in enumerate(self._engines) if engine.failure is None]

    def start(self) -> None:
        for engine in self._engines:
            engine.start()

    async def stop(self, drain: bool) -> None:
        await asyncio.gather(*(engine.stop(drain) for engine in self._engines))

    def preload_lora(self, name: str, weights: models.LoraWeights) -> None:
        for engine in self._engines:
            engine.preload_lora(name, weights)

    # ---- requests ------------------------------------------------------------------------------

    def generate(self, seqs: Seq[Sequence]) -> AsyncGenerator[TokenEvent]:
        return stream(seqs, self._inboxes.here, self.submit, self.abort)

    async def submit(self, seqs: Seq[Sequence], recipient: Recipient) -> None:
        """See AsyncEngine.submit. Raises QueueFull if no replica has room."""
        compiled: dict[tuple[str, str], CompiledGrammar] | None = None

        async def submit_to(index: int) -> None:
            nonlocal compiled
            engine = self._engines[index]
            # Grammars of one replica's compiler serve all.
            compiled = await engine.compile_all(seqs) if compiled is None else compiled
            delivery = _Delivery(self, index, recipient)
            await asyncio.wrap_future(engine.enqueue(seqs, compiled, delivery))

        await self._give(seqs, submit_to)

    async def hand_over(self, seq: Sequence, num_tokens: int, so_far: dict[str, Any]) -> bytes:
        """See AsyncEngine.hand_over."""

        async def run_on(index: int) -> bytes:
            # A replica that stops leaves it to the next one, as it was.
            own = dataclasses.replace(seq, tokens=list(seq.tokens))
            try:
                return await self._engines[index].hand_over(own, num_tokens, so_far)
            finally:
                self.forget(index, {seq.id})

        return await self._give([seq], run_on)

    def go_on(self, data: bytes, seq: Sequence) -> AsyncGenerator[TokenEvent]:
        """See AsyncEngine.go_on."""
        return stream([seq], self._inboxes.here, partial(self.submit_handed, data), self.abort)

    async def submit_handed(self, data: bytes, seqs: Seq[Sequence], recipient: Recipient) -> None:
        """See AsyncEngine.submit_handed."""

        async def submit_to(index: int) -> None:
            delivery = _Delivery(self, index, recipient)
            await self._engines[index].submit_handed(data, seqs, delivery)

        await self._give(seqs, submit_to)

    async def _give(
        self, seqs: Seq[Sequence], give_to: Callable[[int], Awaitable[Result]]
    ) -> Result:
        """Gives sequences to the first replica that takes them. give_to: its index -> result."""
        refusal: Exception = EngineStopped("The engine does not run.")
        for seq in seqs:  # prompts with other pictures have nothing in common
            seq.number_pictures(self._picture_numbers.of)
        prompts = {seq.id: _prompt(seq) for seq in seqs}
        for index in self.order(seqs[0]):
            try:
                with self._lock:
                    self._unfinished[index] |= prompts
                return await give_to(index)
            except (QueueFull, EngineStopped) as error:
                self.forget(index, {seq.id for seq in seqs})
                if not isinstance(refusal, QueueFull):
                    refusal = error
            except BaseException:
                self.forget(index, {seq.id for seq in seqs})
                raise
        raise refusal

    def abort(self, seq_ids: set[str]) -> None:
        for index, engine in enumerate(self._engines):
            self.forget(index, seq_ids)
            engine.abort(seq_ids)  # a replica ignores the ids of others

    def order(self, seq: Sequence) -> list[int]:
        """The replicas that have not failed, the one for a new sequence first."""
        with self._lock:
            unfinished = [[*of_one.values()] for of_one in self._unfinished]
        alive = self._alive
        least = min((len(unfinished[i]) for i in alive), default=0)
        page_size, own = self._engines[0].page_size, _prompt(seq)

        def rank(index: int) -> tuple[bool, int, int, int]:
            others = unfinished[index][-_MOST_COMPARED:]
            # The last token is always computed.
            most = seq.num_prompt - 1
            has = self._engines[index].num_cached_tokens(seq)
            for other in others:
                if other[:2] == own[:2]:
                    both = min(most, len(other.key) // 4)
                    has = max(has, num_common(own.key, other.key, both))
            num = len(unfinished[index])
            return num - least > self._most_ahead, -(has // page_size), num, index

        return sorted(alive, key=rank)

    def forget(self, index: int, seq_ids: set[str]) -> None:
        """Notes that sequences of a replica have ended."""
        with self._lock:
            for seq_id in seq_ids:
                self._unfinished[index].pop(seq_id, None)

    # ---- the replicas' threads -----------------------------------------------------------------

    def _begin(self) -> None:
        with self._lock:
            self._num_left -= 1
            is_last = not self._num_left
        if is_last:
            for engine in self._engines:
                engine.forget_compilations()  # those of the others are not its own
            self.on_ready()

    def _fail(self, index: int) -> None:
        engine = self._engines[index]
        log.error("replica %d has failed: %s", index, engine.failure)
        with self._lock:
            self._unfinished[index] = {}
        self._tell_cache(lambda events: events.remove(index))
        if self.failure is not None:
            self.on_failure()
        elif not engine.has_begun:
            self._begin()

    def watch_cache(self, on: bool) -> None:
        """See AsyncEngine.watch_cache. A page is cached as long as one replica has it."""
        with self._cache_lock:
            self._cache_events = SharedEvents() if on else None
            if on:
                self.on_cache_events([CacheEvent("cleared")])
        for engine in self._engines:
            engine.watch_cache(on)

    def _see_cache(self, index: int, events: list[CacheEvent]) -> None:
        self._tell_cache(lambda shared: shared.add(index, events))

    def _tell_cache(self, change: Callable[[SharedEvents], list[CacheEvent]]) -> None:
        with self._cache_lock:
            if self._cache_events is not None and (events := change(self._cache_events)):
                self.on_cache_events(events)

    # ---- numbers and control -------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Sums of those of the replicas, and "replicas": each one's, with "failed"."""
        each = [engine.stats() | {"failed": engine.failure is not None} for engine in self._engines]
        return {name: _total([one[name] for one in each]) for name in each[0]} | {"replicas": each}

    async def snapshot(self) -> dict[str, Any]:
        """One snapshot: requests, pages and trees one after the other; the step of the first."""
        first, *others = [await engine.snapshot() for engine in self._engines]
        pages, tree, requests = dict(first["pages"]), [*first["tree"]], [*first["requests"]]
        for other in others:
            pages["total"] += other["pages"]["total"]
            pages["states"] += other["pages"]["states"]
            requests += other["requests"]
            begin = len(tree)
            for node in other["tree"]:
                parent = node["parent"]
                tree.append(node | {"parent": None if parent is None else parent + begin})
        return first | {"pages": pages, "tree": tree, "requests": requests}

    async def control(self, name: str, **options: Any) -> str:
        """See AsyncEngine.control: of all replicas, one after the other."""
        version = ""
        for index in self._alive:
            version = await self._engines[index].control(name, **options)
        return version


def _prompt(seq: Sequence) -> _Prompt:
    return _Prompt(seq.namespace, seq.adapter_name, seq.key(seq.num_prompt))


def _total(values: list[Any]) -> Any:
    """The sum of numbers; of dictionaries, that of each entry; None: there are none."""
    if isinstance(values[0], dict):
        names = dict.fromkeys(itertools.chain(*values))
        return {name: _total([each[name] for each in values if name in each]) for name in names}
    return None if values[0] is None else sum(values)
