"""Decides which waiting sequences get slots and pages, by shares, priorities and cached prefixes.

Tenants take turns (see `tenants`): prompt tokens and admission go to the tenant that has had the
fewest tokens. Priority, arrival and the prefix cache order the sequences of one tenant.

The cache-aware order is that of RadixAttention: longest matched prefix first, which is a
depth-first order of the tree. A sequence also waits while another one computes pages that it could
share, such as its sibling of n > 1. Neither lasts longer than starvation_seconds, counted from the
first time that it might have entered: then it goes by arrival.

Shares alone would let a request wait for ever: one that needs more pages than its tenant's share,
while others keep the pool full. So a tenant that has waited twice its fair time is *overdue*: its
first sequence enters before any other. See `_overdue`.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from jax_attn.serve._scheduling.kv_memory import KvMemory
from jax_attn.serve._scheduling.request import Sequence, Status
from jax_attn.serve._scheduling.step_plan import SchedulerConfig, StepPlan
from jax_attn.serve._scheduling.tenants import Tenant, Tenants, in_turn, rank, waiting_rank

# Waiting sequences, from the heads of the queues, that are looked up in the prefix cache for a
# step: a lookup takes some microseconds, and thousands may wait. The same limit holds for their
# tenants.
_LOOKUPS = 128
_LOOKUP_TENANTS = 16
# A tenant without running sequences is overdue when the others have been given this many times the
# pages that its first sequence needs, each of them on average. 1 would be a fair turn.
_FAIR_TURNS = 2
# So many preemptions make a sequence overdue, too: without the prefix cache, each costs it all.
_MAX_PREEMPTIONS = 4


class QueueFull(Exception):
    """The queue is at the limit that the message names. Try again later."""


class Candidate(NamedTuple):
    """A waiting sequence that was looked up in the prefix cache."""

    seq: Sequence
    key: bytes
    num_cached_pages: int
    may_be_overtaken: bool  # by other sequences of its tenant


class Coming(NamedTuple):
    """What the cache will soon get from a sequence that reads its prompt."""

    namespace: str
    prompt: bytes
    # With recurrent states, the numbers of tokens after which others can go on; None: any.
    checkpoints: frozenset[int] | None


class _Need(NamedTuple):
    """The least capacity with which any candidate could enter, at the last lookup of the queues."""

    num_new: int  # new pages
    num_pages: int  # entries of the page table
    # KvMemory.num_insertions at that time: after more, a candidate may need less
    num_insertions: int


class Admission:
    """The queues of all tenants, and the rules for admitting their sequences to a step."""

    def __init__(self, config: SchedulerConfig, memory: KvMemory, tenants: Tenants):
        self._config, self._memory, self._tenants = config, memory, tenants
        self.num_waiting = 0
        # With less capacity nobody can enter: found by the last `candidates` that looked the queues
        # up. None: a candidate may need less since then.
        self._least_need: _Need | None = None
        self.num_pages_given = 0  # to sequences as they entered: a clock of `_overdue`
        # The tenant whose first sequence enters before any other in this step.
        self._first: Tenant | None = None
        self._borrower: Sequence | None = None  # the last one: see `borrower`
        # Totals since the start, without re-admissions after a preemption.
        self.num_prompt_tokens = 0
        self.num_prompt_tokens_cached = 0

    @property
    def waiting(self) -> list[Sequence]:
        """All waiting sequences, by tenant in turn, then by priority.

        Within a priority, preempted ones come before those that have never run; then by arrival.
        """
        return [seq for tenant in in_turn(self._tenants) for seq in tenant.waiting]

    # ---- the queue ----

    def check(self, num_new: Counter[str]) -> None:
        """Raises QueueFull unless each tenant may add that many sequences.

        A tenant alone may use the whole queue. Others cannot fill it so that a tenant is refused
        its share: with T tenants it holds at most max_waiting * (1 + 1/2 + ... + 1/T).
        """
        num_tenants = len(self._tenants) + sum(name not in self._tenants for name in num_new)
        share = self._config.max_waiting // max(num_tenants, 1)
        is_full = self.num_waiting + num_new.total() > self._config.max_waiting
        most = self._config.tenant_limits.max_waiting
        for name, num in num_new.items():
            num_mine = len(self._tenants[name].waiting) if name in self._tenants else 0
            if most is not None and num_mine + num > most:
                raise QueueFull(
                    f"{num_mine} of your sequences are waiting; with {num} more it would be more "
                    f"than the {most} that a key may have in the queue"
                )
            if is_full and num_mine + num > share:
                raise QueueFull(
                    f"the queue is full: {self.num_waiting} of {self._config.max_waiting} are "
                    f"waiting, and your share of it is {share}"
                )

    def join(self, seq: Sequence) -> None:
        tenant = self._tenants.get_or_add(seq.tenant)
        waiting = tenant.waiting
        if not waiting:
            tenant.given_at_entry = self.num_pages_given
        place = bisect_left(waiting, waiting_rank(seq), key=waiting_rank)
        waiting.insert(place, seq)
        self.num_waiting += 1
        self._on_queue_changed(place)

    def leave(self, seq: Sequence) -> None:
        waiting = self._tenants[seq.tenant].waiting
        place = bisect_left(waiting, waiting_rank(seq), key=waiting_rank)
        del waiting[place]
        self.num_waiting -= 1
        self._on_queue_changed(place)

    def _on_queue_changed(self, place: int) -> None:
        if place < _LOOKUPS:
            self._least_need = None

    def on_tokens_changed(self) -> None:
        """Notes that a waiting sequence has more tokens, or fewer samples in flight."""
        self._least_need = None

    # ---- shares of tenants ----

    def _claimants(self) -> list[Tenant]:
        """Tenants with waiting sequences and less than their share of slots and of pages.

        While there are any, only their sequences are admitted.
        """
        if len(self._tenants) < 2 or not self.num_waiting:
            return []
        num_slots, num_pages = self._share_of_slots, self._share_of_pages
        return [
            tenant
            for tenant in self._tenants
            if self._may_run(tenant)
            and len(tenant.running) < num_slots
            and tenant.num_pages + self._memory.pages_of(tenant.waiting[0]) <= num_pages
        ]

    @property
    def _share_of_slots(self) -> int:
        return self._config.max_running // len(self._tenants)

    @property
    def _share_of_pages(self) -> int:
        return self._config.num_pages // len(self._tenants)

    def _may_run(self, tenant: Tenant) -> bool:
        """Whether the tenant may run one more sequence."""
        most = self._config.tenant_limits.max_running
        return bool(tenant.waiting) and (most is None or len(tenant.running) < most)

    def _overdue(self) -> Tenant | None:
        """The tenant whose first sequence enters before any other, if one has waited too long.

        It has nothing that runs, and since its last sequence entered, the other tenants have been
        given _FAIR_TURNS times the pages that its first sequence needs, each on average. So over
        time it has no more than its share, though it has more while the sequence runs.

        Among several it is the one that waits longest. There is none while a sequence borrows:
        the room that is left belongs to the others.
        """
        if len(self._tenants) < 2 or not self.num_waiting or self.borrower is not None:
            return None
        overdue = (tenant for tenant in self._tenants if self._waits_too_long(tenant))
        return min(overdue, key=lambda t: (t.given_at_entry, t.serial), default=None)

    def _waits_too_long(self, tenant: Tenant) -> bool:
        if tenant.running or not tenant.waiting:
            return False
        seq = tenant.waiting[0]
        if seq.is_held or seq.num_in_flight:
            return False  # it cannot enter now
        if seq.num_preempted >= _MAX_PREEMPTIONS:
            return True
        num_given = self.num_pages_given - tenant.given_at_entry
        num_others = len(self._tenants) - 1
        return num_given >= _FAIR_TURNS * num_others * self._memory.pages_of(seq)

    @property
    def borrower(self) -> Sequence | None:
        """The running sequence that entered as overdue with more pages than its tenant's share.

        It keeps them to its end: nothing is preempted in its place or for the share of another.
        """
        seq = self._borrower
        return seq if seq is not None and seq.status is Status.RUNNING else None

    def beyond_its_share(self) -> Sequence | None:
        """The sequence to preempt if a claimant, or an overdue tenant, lacks capacity.

        It is the last running one of a tenant that has more than its share.

        Its tenant is neither, so it is not admitted again before the claimant's sequence.
        """
        overdue = self._overdue()
        claimants = [overdue] if overdue is not None else self._claimants()
        if not claimants:
            return None
        if not self._memory.num_free_slots:
            most = self._tenants.with_most(lambda tenant: len(tenant.running))
            return self._last_of(most) if len(most.running) > self._share_of_slots else None
        if not self._fits(min(claimants, key=lambda tenant: tenant.turn).waiting[0]):
            most = self._tenants.with_most(self._pages_to_take)
            exceeds = self._pages_to_take(most) > self._share_of_pages
            return self._last_of(most) if exceeds else None
        return None

    def last_of_largest(self) -> Sequence:
        """The sequence to preempt if the running ones need more pages than there are."""
        return self._last_of(self._tenants.with_most(self._pages_to_take))

    def _pages_to_take(self, tenant: Tenant) -> int:
        """A tenant's pages, without those of the borrower."""
        seq = self.borrower
        is_mine = seq is not None and seq.tenant == tenant.name
        return tenant.num_pages - (self._memory.num_held(seq) if seq is not None and is_mine else 0)

    def _last_of(self, tenant: Tenant) -> Sequence:
        """The tenant's running sequence to preempt: the last, and the borrower after all others."""
        borrower = self.borrower
        others = (seq for seq in reversed(tenant.running) if seq is not borrower)
        return next(others, tenant.running[-1])

    def _fits(self, seq: Sequence) -> bool:
        memory = self._memory
        num_pages = memory.pages_of(seq)
        num_cached_pages = memory.num_cached_pages(seq, memory.lookup_key(seq))
        return memory.has_room(num_pages - num_cached_pages, num_pages)

    # ---- the step ----

    @property
    def may_admit(self) -> bool:
        """Whether a sequence waits and a slot is free."""
        return bool(self.num_waiting and self._memory.num_free_slots)

    def candidates(self, now: float) -> dict[str, list[Candidate]]:
        """Sequences that might be admitted now, by tenant name, in the order of admission.

        Within a priority: preempted and starved ones by arrival, then the others by longest cached
        prefix. now: on the clock of `Scheduler.schedule`.
        """
        self._first = None
        if not self.may_admit:
            return {}
        need, num_insertions = self._least_need, self._memory.num_insertions
        if need is not None and need.num_insertions == num_insertions:
            if not self._memory.has_room(need.num_new, need.num_pages):
                return {}
        self._first = self._overdue()
        tenants = self._claimants() or [t for t in self._tenants if self._may_run(t)]
        if self._first is not None and self._first not in tenants:
            tenants.append(self._first)
        tenants = heapq.nsmallest(_LOOKUP_TENANTS, tenants, key=self.turn)
        num_lookups = _LOOKUPS // max(len(tenants), 1)
        candidates = {
            tenant.name: self._look_up(
                tenant.waiting[: 1 if tenant is self._first else num_lookups], now
            )
            for tenant in tenants
        }
        # With several tenants, the sequences that are looked up change from step to step.
        is_alone = len(self._tenants) == 1 and candidates
        self._least_need = self._need_of_any(*candidates.values()) if is_alone else None
        return candidates

    def turn(self, tenant: Tenant) -> tuple[int, int, int]:
        """The tenant's rank in this step: `Tenant.turn`, except that an overdue one goes first."""
        return (-1, 0, tenant.serial) if tenant is self._first else tenant.turn

    def _look_up(self, seqs: list[Sequence], now: float) -> list[Candidate]:
        ranked = []
        for seq in seqs:
            key = self._memory.lookup_key(seq)
            num_cached_pages = self._memory.num_cached_pages(seq, key)
            seq.looked_up = now if seq.looked_up is None else seq.looked_up
            is_starved = now - seq.looked_up >= self._config.starvation_seconds
            may_be_overtaken = not (seq.num_preempted or is_starved)
            order = (
                seq.priority,
                may_be_overtaken,
                -num_cached_pages if may_be_overtaken else 0,
                seq.order,
            )
            ranked.append((order, Candidate(seq, key, num_cached_pages, may_be_overtaken)))
        ranked.sort(key=lambda item: item[0])
        return [candidate for _, candidate in ranked]

    def _need_of_any(self, candidates: list[Candidate]) -> _Need:
        """The least capacity with which one of the candidates could enter.

        It holds until the cache gets more pages or the head of the queue changes: evictions only
        add to what candidates need.
        """
        new, entries = [], []
        for seq, _, num_cached_pages, may_be_overtaken in candidates:
            num_pages = self._memory.pages_of(seq)
            new.append(num_pages - num_cached_pages)
            entries.append(num_pages)
            if not may_be_overtaken:
                break  # if it is not admitted, neither are those after it
        return _Need(min(new), min(entries), self._memory.num_insertions)

    def coming(self, seq: Sequence) -> Coming:
        """What `seq` adds to the cache while it reads its prompt."""
        has_states = self._memory.states is not None
        checkpoints = frozenset(seq.wanted_states) if has_states else None
        return Coming(self._memory.namespace(seq), self._memory.prompt_key(seq), checkpoints)

    def want_parts(self, reading: list[Sequence], candidates: dict[str, list[Candidate]]) -> None:
        """With recurrent states: running prompts get checkpoints where waiting ones part."""
        for seq in reading:
            self._want_part(seq, itertools.chain.from_iterable(candidates.values()))

    def _want_part(self, seq: Sequence, candidates: Iterable[Candidate]) -> None:
        if self._memory.states is not None:
            page_size = self._config.page_size
            others = [(each.seq, each.num_cached_pages * page_size) for each in candidates]
            self._memory.states.want_part(seq, others)

    def entering(
        self,
        step: StepPlan,
        tenant: Tenant,
        candidates: list[Candidate],
        coming: list[Coming],
    ) -> Iterator[Sequence]:
        """Admits a tenant's candidates, one per iteration, while slots and pages last.

        coming: tokens the cache will soon get; the prompts of admitted sequences are added.
        """
        for seq, key, num_cached_pages, may_be_overtaken in candidates:
            has_row = self._memory.num_free_slots > step.num_more_rows
            if step.is_closed or not (has_row and self._may_run(tenant)):
                return
            if self._first is not None and self._first is not tenant:
                return  # an overdue sequence has no room yet
            if seq.is_held:
                continue
            if may_be_overtaken and self._gains_by_waiting(seq, key, num_cached_pages, coming):
                continue
            if self._memory.awaits_files(seq, key):
                continue
            if seq.num_in_flight or not self._enter(seq, key, num_cached_pages):
                step.is_closed = not may_be_overtaken
                continue
            step.admitted.append(seq)
            self._want_part(seq, candidates)
            coming.append(self.coming(seq))
            yield seq

    def _gains_by_waiting(
        self, seq: Sequence, key: bytes, num_cached_pages: int, coming: list[Coming]
    ) -> bool:
        """Whether the first page that `seq` needs is about to be computed for another sequence.

        With recurrent states: whether a checkpoint that it can go on from is.
        """
        page_size = self._config.page_size
        end = 4 * (num_cached_pages + 1) * page_size
        if end > len(key) or not coming:
            return False
        head, own = key[:end], self._memory.namespace(seq)
        for namespace, prompt, checkpoints in coming:
            if namespace != own or not prompt.startswith(head):
                continue
            if checkpoints is None or any(
                num_cached_pages * page_size < at <= len(key) // 4
                and prompt.startswith(key[: 4 * at])
                for at in checkpoints
            ):
                return True
        return False

    def _enter(self, seq: Sequence, key: bytes, num_cached_pages: int) -> bool:
        """Moves a sequence from the queue to the running ones, if there is room."""
        if not self._memory.enter(seq, key, num_cached_pages):
            return False
        self.leave(seq)
        tenant = self._tenants[seq.tenant]
        self.num_pages_given += len(seq.pages)
        tenant.given_at_entry = self.num_pages_given
        if tenant is self._first:
            self._first = None
            if len(seq.pages) > self._share_of_pages:
                self._borrower = seq
        if not seq.num_preempted:
            seq.num_cached = seq.num_computed
            self.num_prompt_tokens += seq.num_prompt
            self.num_prompt_tokens_cached += seq.num_cached
        return True

    def check_integrity(self) -> None:
        """Raises AssertionError unless queues are in order and no waiting sequence has pages."""
        waiting = [seq for tenant in self._tenants for seq in tenant.waiting]
        assert self.num_waiting == len(waiting)
        for seq in waiting:
            assert seq.status is Status.WAITING, seq.id
            assert not seq.pages and seq.node is None and seq.num_computed == 0, seq.id
        for tenant in self._tenants:
            assert tenant.waiting or tenant.running, "an idle tenant"
            assert tenant.waiting == sorted(tenant.waiting, key=waiting_rank)
            assert tenant.running == sorted(tenant.running, key=rank)
            names = {seq.tenant for seq in (*tenant.waiting, *tenant.running)}
            assert [self._tenants[name] for name in names] == [tenant], names
