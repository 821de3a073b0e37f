"""What the next step computes: admission, token budget, preemption, deadlines. Pure Python.

One step mixes a token of every running decode with chunks of prompts, in one call of attention.
Steps run on the device in the order in which they were launched, and the host schedules the next
one before it knows what the last one sampled. Two rules follow:

- A page may be shared, or freed and given away, as soon as the step that writes it is launched.
- The token that a running sequence continues with may be known to the device only. The sequence is
  scheduled as if it were known, but cached only as far as the host knows its tokens.

Tenants take turns (see `tenants`): tokens of prompts and the right to get in go to the tenant that
has had the fewest tokens. Priority, arrival and the prefix cache order the sequences of one tenant.

Cache-aware order is that of RadixAttention: longest matched prefix first. A sequence also waits
while another computes pages that it could share, such as its sibling of n > 1.
"""

from __future__ import annotations

import heapq
import itertools
import math
from array import array
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from jax_attn.serve.pages import PageAllocator
from jax_attn.serve.prefix_cache import Node, RadixCache
from jax_attn.serve.request import FinishReason, Sequence, Status
from jax_attn.serve.tenants import Tenant, TenantLimits, Tenants, in_turn, rank, waiting_rank

# Waiting sequences, from the heads of the queues, that are looked up in the prefix cache for a
# step: a lookup takes some microseconds, and there may be thousands. They are of so many tenants.
_LOOKUPS = 128
_LOOKUP_TENANTS = 16
# In how many steps the prompts that wait should be read, as far as max_prefill_chunk lets them.
_READ_STEPS = 8


class QueueFull(Exception):
    """As many sequences wait as the limit that the message names. Try again later."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Capacities of a step, and policy.

    Raises:
      ValueError: a capacity below 1, or max_step_tokens too small for all decodes.
    """

    page_size: int
    num_pages: int
    max_running: int  # sequences that run at once, and rows of a step's logits
    max_step_tokens: int  # query tokens of a step
    # Of them, prompt tokens (of all sequences) in a step that also decodes, about, as there may be
    # step_sizes to fill. Where many wait it grows, up to max_prefill_chunk.
    prefill_chunk: int
    # Sequences; the preempted count, but are never refused. A tenant that has less than its share
    # of the queue gets in though others have filled it.
    max_waiting: int
    max_kv_pages_step: int  # entries of a step's page table, shared pages counted for each sequence
    max_prefill_chunk: int = 0  # less than prefill_chunk: that one, however many wait
    starvation_steps: int = 16  # a sequence overtaken in that many steps is overtaken no more
    prefix_cache: bool = True
    step_sizes: tuple[int, ...] = ()  # tokens that a step is padded to, where it has fewer
    tenant_limits: TenantLimits = TenantLimits()  # of each

    def __post_init__(self) -> None:
        for name in (
            "page_size", "num_pages", "max_running", "max_step_tokens", "prefill_chunk",
            "max_waiting", "max_kv_pages_step", "starvation_steps",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.max_step_tokens < self.max_running:
            raise ValueError(
                f"max_step_tokens: expected at least max_running {self.max_running}, so that every "
                f"decode fits in a step, got {self.max_step_tokens}"
            )


@dataclass(slots=True)
class ScheduledSequence:
    """seq.tokens[begin : begin + num_tokens] go through the model, in seq.pages.

    An index that seq.tokens does not have yet is the sample in flight, to be read from the device.
    """

    seq: Sequence
    begin: int
    num_tokens: int
    samples: bool  # the last token's logits are sampled
    # Of the tokens, from the first, those whose logits tell the logprob of the prompt's next.
    num_scored: int = 0
    num_more_rows: int = 0  # of logits than the last token's: of the scored or drafts before it
    # The last of the tokens, each of which counts if it is what the token before it gives.
    drafts: tuple[int, ...] = ()


class _Candidate(NamedTuple):
    """A waiting sequence that was looked up in the prefix cache."""

    seq: Sequence
    key: bytes
    num_cached_pages: int
    may_be_overtaken: bool  # by others of its tenant


@dataclass(slots=True)
class StepPlan:
    entries: list[ScheduledSequence] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)  # of the entries, new in their slots
    preempted: list[Sequence] = field(default_factory=list)  # lost their slots and pages
    expired: list[Sequence] = field(default_factory=list)  # finished: 'deadline'
    num_more_rows: int = 0  # of all entries
    is_closed: bool = False  # nobody gets in any more: one that may not be overtaken has no room


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Gauges, and totals since the start. Pages that are neither free nor cached are private."""

    num_waiting: int
    num_running: int
    num_free_pages: int
    num_cached_pages: int
    num_evictable_pages: int
    num_admissions: int  # re-admissions after a preemption not included
    num_preemptions: int
    num_prompt_tokens: int  # of the sequences admitted
    num_prompt_tokens_cached: int  # of them, found in the prefix cache


class Scheduler:
    """Owns the pages, the prefix cache, and every sequence from `add` to `finish`.

    Deterministic: the same calls with the same clock give the same steps. Sequences of one tenant
    are ordered by priority, then by arrival; priorities are strict. One thread at a time.
    """

    def __init__(self, config: SchedulerConfig):
        self.config = config
        self.allocator = PageAllocator(config.num_pages)
        self.cache = RadixCache(self.allocator, config.page_size)
        self._seqs: dict[str, Sequence] = {}
        self._tenants = Tenants()
        self._num_waiting = 0
        self._num_table_pages = 0  # sum of len(seq.pages) over the running
        self._free_slots = list(range(config.max_running))  # a heap
        self._deadlines: list[tuple[float, int, Sequence]] = []  # a heap; finished ones linger
        # Fewer new pages, or entries of the table, let nobody in: what `_admit` found out when it
        # last looked the queues up. None: since then somebody may need fewer.
        self._least_need: tuple[int, int] | None = None
        self._arrivals = itertools.count()
        self._num_admissions = 0
        self._num_preemptions = 0
        self._num_prompt_tokens = 0
        self._num_prompt_tokens_cached = 0

    @property
    def waiting(self) -> list[Sequence]:
        """Tenant by tenant, in turn. By priority; the preempted before those that have never run;
        by arrival."""
        return [seq for tenant in in_turn(self._tenants) for seq in tenant.waiting]

    @property
    def running(self) -> list[Sequence]:
        """Tenant by tenant, in turn. By priority, then by arrival."""
        tenants = in_turn(tenant for tenant in self._tenants if tenant.running)
        return [seq for tenant in tenants for seq in tenant.running]

    @property
    def max_sequence_tokens(self) -> int:
        """Prompt and max_tokens together, at most."""
        return self.config.page_size * min(self.config.num_pages, self.config.max_kv_pages_step)

    # ---- what happens to a sequence ----

    def add(self, *seqs: Sequence) -> None:
        """Takes new sequences in, all or none (give the n of a request together).

        Raises:
          QueueFull: there is no room for all of them.
          ValueError: a sequence that could never run (no prompt, longer than max_sequence_tokens, a
            deadline or a priority that is no number), or an id in use.
        """
        for seq in seqs:
            num_tokens = seq.num_prompt + seq.params.max_tokens
            if not 1 <= seq.num_prompt == len(seq.tokens):
                raise ValueError(f"{seq.id}: tokens: expected a prompt, got {len(seq.tokens)}")
            if num_tokens > self.max_sequence_tokens:
                raise ValueError(
                    f"{seq.id}: prompt and max_tokens: expected at most {self.max_sequence_tokens} "
                    f"tokens together, got {num_tokens}"
                )
            if seq.deadline is not None and math.isnan(seq.deadline):
                raise ValueError(f"{seq.id}: deadline: expected seconds, got {seq.deadline}")
            if not isinstance(seq.priority, int):  # the order of what is no number is none
                raise ValueError(f"{seq.id}: priority: expected an integer, got {seq.priority}")
        if len(self._seqs.keys() | {seq.id for seq in seqs}) < len(self._seqs) + len(seqs):
            raise ValueError(f"{[seq.id for seq in seqs]}: expected ids that are not in use")
        self._check_queue(Counter(seq.tenant for seq in seqs))
        for seq in seqs:
            seq.order = next(self._arrivals)
            self._seqs[seq.id] = seq
            self._join_queue(seq)
            if seq.deadline is not None:
                heapq.heappush(self._deadlines, (seq.deadline, seq.order, seq))

    def _check_queue(self, num_new: Counter[str]) -> None:
        """Raises QueueFull unless each tenant may add so many.

        Whoever is alone has the whole queue. Others cannot fill it so that a tenant is refused its
        share: with T tenants it holds at most max_waiting * (1 + 1/2 + ... + 1/T).
        """
        num_tenants = len(self._tenants) + sum(name not in self._tenants for name in num_new)
        share = self.config.max_waiting // max(num_tenants, 1)
        is_full = self._num_waiting + num_new.total() > self.config.max_waiting
        most = self.config.tenant_limits.max_waiting
        for name, num in num_new.items():
            num_mine = len(self._tenants[name].waiting) if name in self._tenants else 0
            if most is not None and num_mine + num > most:
                raise QueueFull(
                    f"{num_mine} of your sequences are waiting; with {num} more it would be more "
                    f"than the {most} that a key may have in the queue"
                )
            if is_full and num_mine + num > share:
                raise QueueFull(
                    f"the queue is full: {self._num_waiting} of {self.config.max_waiting} are "
                    f"waiting, and your share of it is {share}"
                )

    def abort(self, seq_id: str) -> Sequence | None:
        """Finishes a sequence in any state; None if there is none of that id (any more)."""
        seq = self._seqs.get(seq_id)
        if seq is not None:
            self.finish(seq, FinishReason.ABORT)
        return seq

    def append(
        self, seq: Sequence, tokens: list[int], num_sampled: int = 1, num_taken: int = 0
    ) -> None:
        """The host knows the next tokens: a sample, forced ones, or a sample and what it forces.

        num_sampled: samples in flight that are settled by this: tokens[0], and any launched behind
          it, which are void. Forced tokens after a sample void those: settle all of them here, and
          ignore them when they arrive.
        num_taken: drafts that were right: of the tokens, from the first, those computed already.

        Of a sequence that is finished by now, tokens are ignored.

        Raises:
          ValueError: more samples than are in flight, or tokens that leave nothing to go on with.
        """
        if seq.status is Status.FINISHED:
            return
        num_in_flight = seq.num_in_flight - num_sampled
        if num_sampled < 0 or num_in_flight < 0:
            raise ValueError(
                f"{seq.id}: num_sampled: expected 0 to {seq.num_in_flight}, got {num_sampled}"
            )
        if num_in_flight and len(tokens) > num_sampled:
            raise ValueError(
                f"{seq.id}: tokens: expected at most {num_sampled} in front of a sample in flight, "
                f"got {len(tokens)}"
            )
        num_computed = seq.num_computed
        if num_sampled > 1:  # what followed from a void sample does not count
            num_computed = min(num_computed, len(seq.tokens) + 1)
        if seq.status is Status.RUNNING:
            num_computed += num_taken
        if len(seq.tokens) + len(tokens) + num_in_flight <= num_computed:
            raise ValueError(
                f"{seq.id}: tokens: expected one that is not computed yet, got {len(tokens)} for "
                f"{num_sampled} samples"
            )
        seq.tokens += tokens
        seq.num_computed, seq.num_in_flight = num_computed, num_in_flight
        if not num_in_flight:
            seq.is_drafting = False
        if seq.status is Status.WAITING:
            self._least_need = None

    def retract(self, seq: Sequence) -> None:
        """What the next token may be is not known in time: its sample in flight is void, and none
        is scheduled until `resume`. The token before goes through the model again then.

        Only for sequences that `may_retract`. Of one that is finished by now, nothing happens.

        Raises:
          ValueError: not exactly one sample is in flight.
        """
        if seq.status is Status.FINISHED:
            return
        if seq.num_in_flight != 1 or not seq.may_retract:
            raise ValueError(
                f"{seq.id}: retract: expected one sample in flight, got {seq.num_in_flight}"
            )
        seq.num_in_flight, seq.is_held, seq.is_drafting = 0, True, False
        seq.num_computed = min(seq.num_computed, len(seq.tokens) - 1)

    def resume(self, seq: Sequence) -> None:
        """Undoes `retract`."""
        seq.is_held = False

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """Ends a sequence in any state. Its full pages stay cached, unless `reason` is ERROR.

        What is in flight for it may still write its private pages: that is before anything that is
        launched from now on, so before anyone else uses them.

        After a failed step, whose pages hold anything and whose samples never come: finish all that
        run, settle what the waiting have in flight (`append(seq, [], seq.num_in_flight)`: it is
        sampled again), and empty the cache by `cache.evict(cache.num_cached)`.

        Raises:
          ValueError: the sequence was never added.
        """
        if seq.status is Status.FINISHED:
            return
        if self._seqs.get(seq.id) is not seq:
            raise ValueError(f"{seq.id}: finish: expected a sequence that was added")
        if seq.status is Status.RUNNING:
            self._release(seq, keep=reason is not FinishReason.ERROR)
        else:
            self._leave_queue(seq)
        del self._seqs[seq.id]
        self._tenants.remove_if_idle(seq.tenant)
        seq.status, seq.finish_reason = Status.FINISHED, reason

    # ---- the step ----

    def schedule(self, now: float) -> StepPlan | None:
        """The next step, or None if there is nothing to do or report until something changes.

        `entries` may be empty: then there is only something to report. Each step with entries is to
        be followed by `launched` once the device has it, before the next `schedule`; a step that is
        never launched is simply scheduled again.
        """
        step = StepPlan()
        self._expire(now, step)
        self._return_share(step)
        self._secure_pages(step)
        num_left, reading = self._schedule_decodes(step)
        if not self._schedule_prompts(step, num_left, reading):
            self._add_drafts(step)
        for seq in step.admitted:
            seq.admitted = now if seq.admitted is None else seq.admitted
        return step if step.entries or step.preempted or step.expired else None

    def launched(self, step: StepPlan) -> None:
        """The device will run `step`, after all steps launched before."""
        for entry in step.entries:
            seq = entry.seq
            if seq.status is not Status.RUNNING:
                continue  # aborted since; its pages went to nobody yet
            was_prompt = seq.num_computed < seq.num_prompt
            seq.num_computed += entry.num_tokens - len(entry.drafts)
            seq.is_drafting = bool(entry.drafts)
            seq.num_in_flight += entry.samples
            if was_prompt:
                # What may be computed again is not shared yet.
                num_final = seq.num_prompt - seq.may_retract
                self._share(seq, min(seq.num_computed, num_final) // self.config.page_size)
        self._tenants.charge(
            ((entry.seq, entry.num_tokens) for entry in step.entries), self.config.max_step_tokens
        )

    def _expire(self, now: float, step: StepPlan) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, seq = heapq.heappop(self._deadlines)
            if seq.status is not Status.FINISHED:
                self.finish(seq, FinishReason.DEADLINE)
                step.expired.append(seq)
        if len(self._deadlines) > 2 * len(self._seqs) + 64:  # mostly of finished sequences
            self._deadlines = [d for d in self._deadlines if d[2].status is not Status.FINISHED]
            heapq.heapify(self._deadlines)

    # ---- shares of tenants ----

    def _claimants(self) -> list[Tenant]:
        """The tenants that wait and have less than their share of slots and of pages.

        While there are any, nobody else gets in.
        """
        if len(self._tenants) < 2 or not self._num_waiting:
            return []
        num_slots, num_pages = self._share_of_slots, self._share_of_pages
        return [
            tenant
            for tenant in self._tenants
            if self._may_run(tenant)
            and len(tenant.running) < num_slots
            and tenant.num_pages + self._num_pages(tenant.waiting[0]) <= num_pages
        ]

    @property
    def _share_of_slots(self) -> int:
        return self.config.max_running // len(self._tenants)

    @property
    def _share_of_pages(self) -> int:
        return self.config.num_pages // len(self._tenants)

    def _may_run(self, tenant: Tenant) -> bool:
        """Whether one more of its sequences may."""
        most = self.config.tenant_limits.max_running
        return bool(tenant.waiting) and (most is None or len(tenant.running) < most)

    def _return_share(self, step: StepPlan) -> None:
        """Preempts a sequence of a tenant that has more than its share, if a claimant lacks that.

        Whoever is preempted is no claimant, so it does not get in before the one it made room for.
        """
        claimants = self._claimants()
        if not claimants:
            return
        if not self._free_slots:
            most = self._tenants.with_most(lambda tenant: len(tenant.running))
            exceeds = len(most.running) > self._share_of_slots
        elif not self._fits(min(claimants, key=lambda tenant: tenant.turn).waiting[0]):
            most = self._tenants.with_most(lambda tenant: tenant.num_pages)
            exceeds = most.num_pages > self._share_of_pages
        else:
            return
        if exceeds:
            self._preempt(most.running[-1], step)

    def _fits(self, seq: Sequence) -> bool:
        num_pages = self._num_pages(seq)
        num_cached_pages = self.cache.peek(seq.namespace, self._lookup_key(seq))
        return self._has_room(num_pages - num_cached_pages, num_pages)

    # ---- those that run ----

    def _secure_pages(self, step: StepPlan) -> None:
        """Gives the running pages for their pending tokens, preempting from the youngest of the
        tenant that has most pages."""
        page_size = self.config.page_size
        for seq in self.running:
            if len(seq.tokens) + seq.num_in_flight <= len(seq.pages) * page_size:
                continue  # as most do
            num_new = -(-(seq.num_computed + seq.num_pending) // page_size) - len(seq.pages)
            # `seq` may be preempted itself: for one before it, or as the youngest.
            while num_new > 0 and seq.status is Status.RUNNING and not self._grow(seq, num_new):
                largest = self._tenants.with_most(lambda tenant: tenant.num_pages)
                self._preempt(largest.running[-1], step)

    def _schedule_decodes(self, step: StepPlan) -> tuple[int, list[Sequence]]:
        """Schedules those that have read their prompts. Returns how many tokens are left, and those
        that have not."""
        num_left = self.config.max_step_tokens
        several: list[Sequence] = []
        reading: list[Sequence] = []
        for seq in self.running:
            if seq.is_held or seq.is_drafting:
                continue
            if seq.num_computed < seq.num_prompt:
                reading.append(seq)
                continue
            num_pending = seq.num_pending
            if num_pending == 1:
                step.entries.append(ScheduledSequence(seq, seq.num_computed, 1, True))
                num_left -= 1
            elif num_pending:
                several.append(seq)
        # Several tokens of a sequence that decodes (forced, or output lost to a preemption) are
        # somebody waiting in the middle of a text: before prompts.
        for seq in several:
            num_left -= self._schedule_chunk(step, seq, num_left)
        return num_left, reading

    def _add_drafts(self, step: StepPlan) -> None:
        """Gives decodes drafts, as many as fill the size that the step is padded to anyway."""
        drafting = [e for e in step.entries if e.seq.drafter and e.samples and e.num_tokens == 1]
        if not drafting:
            return
        num_tokens = sum(entry.num_tokens for entry in step.entries)
        sizes = self.config.step_sizes or (self.config.max_step_tokens,)
        num_left = min((size for size in sizes if size >= num_tokens), default=0) - num_tokens
        num_left = min(num_left, self._num_spare_rows(step))
        for i, entry in enumerate(drafting):
            seq = entry.seq
            most = min(num_left // (len(drafting) - i), seq.max_drafts)
            if most <= 0 or seq.drafter is None or seq.num_output < seq.params.min_tokens:
                continue
            # Into pages that it has or that nobody else wants.
            page_size = self.config.page_size
            num_new = -(-(seq.num_computed + 1 + most) // page_size) - len(seq.pages)
            if num_new > 0 and not (self._has_room(num_new, num_new) and self._grow(seq, num_new)):
                most = len(seq.pages) * page_size - seq.num_computed - 1
            entry.drafts = tuple(seq.drafter.propose(seq, most))
            entry.num_tokens += len(entry.drafts)
            entry.num_more_rows = len(entry.drafts)
            step.num_more_rows += len(entry.drafts)
            num_left -= len(entry.drafts)

    def _schedule_prompts(self, step: StepPlan, num_left: int, reading: list[Sequence]) -> bool:
        """Schedules chunks of prompts: each time of the tenant whose turn it is, the next of those
        that run, and then of those that get in. Whether there are any.

        reading: those that run, tenant by tenant.
        """
        if not (reading or self._may_admit):
            return False
        num_entries = len(step.entries)
        if step.entries:
            chunk = self._wanted_chunk(reading)
            num_others = self.config.max_step_tokens - num_left
            num_left = min(num_left, self._chunk_beside(num_others, chunk))
        # Nobody goes out and in again within a step.
        candidates = self._candidates() if num_left > 0 and not step.preempted else {}
        coming = [self._coming(seq) for seq in reading] if candidates else []
        mine: dict[str, list[Sequence]] = {}
        for seq in reading:
            mine.setdefault(seq.tenant, []).append(seq)
        prompts: dict[int, Iterator[Sequence]] = {}
        turns = []
        for name in mine.keys() | candidates.keys():
            tenant = self._tenants[name]
            entering = self._admit(step, tenant, candidates.get(name, []), coming)
            prompts[tenant.serial] = itertools.chain(mine.get(name, []), entering)
            turns.append((tenant.turn, tenant))
        heapq.heapify(turns)
        while turns and num_left > 0:
            (num_had, _, serial), tenant = turns[0]
            first = next(prompts[serial], None)
            if first is None:
                heapq.heappop(turns)
                continue
            num_tokens = self._schedule_chunk(step, first, num_left)
            num_left -= num_tokens
            turn = num_had + num_tokens, len(tenant.running), serial
            heapq.heapreplace(turns, (turn, tenant))
        self._count_overtaken(step.admitted)
        return len(step.entries) > num_entries

    def _wanted_chunk(self, reading: list[Sequence]) -> int:
        """Tokens of prompts beside decodes: what reads all that wait in _READ_STEPS steps."""
        most = self.config.max_prefill_chunk
        chunk = num_waiting = 0
        waiting = (seq for tenant in self._tenants for seq in tenant.waiting)
        for seq in itertools.chain(reading, waiting):
            if chunk >= most:
                break
            num_waiting += len(seq.tokens) - seq.num_computed
            chunk = num_waiting // _READ_STEPS
        return max(self.config.prefill_chunk, min(chunk, most))

    def _chunk_beside(self, num_others: int, chunk: int) -> int:
        """Tokens of prompts in a step of so many others: about a chunk, as fill a size.

        The size below, where five eighths of a chunk fit: all who decode wait for the padding of
        the one above. Else that one: half empty it takes as long (docs/notes/server.md).
        """
        sizes = self.config.step_sizes
        wanted = num_others + chunk
        fits = max((size for size in sizes if size <= wanted), default=0) - num_others
        if 8 * fits >= 5 * chunk:
            return fits
        return min((size for size in sizes if size >= wanted), default=wanted) - num_others

    def _schedule_chunk(self, step: StepPlan, seq: Sequence, max_tokens: int) -> int:
        num_pending, num_scored = seq.num_pending, 0
        num_tokens = min(num_pending, max_tokens)
        if seq.params.prompt_logprobs:
            # Half of the rows stay for whoever waits, so that others get in while this one reads.
            num_spare = self._num_spare_rows(step) // (2 if self._num_waiting else 1)
            num_tokens = min(num_tokens, 1 + num_spare)
            num_scored = max(0, min(num_tokens, seq.num_prompt - 1 - seq.num_computed))
        if num_tokens:
            samples = num_tokens == num_pending
            num_more_rows = min(num_scored, num_tokens - 1)
            begin = seq.num_computed
            step.entries.append(
                ScheduledSequence(seq, begin, num_tokens, samples, num_scored, num_more_rows)
            )
            step.num_more_rows += num_more_rows
        return num_tokens

    def _num_spare_rows(self, step: StepPlan) -> int:
        """Of the step's logits: what is left when each that runs has one."""
        return len(self._free_slots) - step.num_more_rows

    # ---- admission ----

    @property
    def _may_admit(self) -> bool:
        return bool(self._num_waiting and self._free_slots)

    def _candidates(self) -> dict[str, list[_Candidate]]:
        """Those that might get in now, by the tenant's name, each tenant's in order.

        In each priority: the preempted and the starved in the order of arrival, then by longest
        cached prefix.
        """
        if not self._may_admit:
            return {}
        if self._least_need is not None and not self._has_room(*self._least_need):
            return {}
        tenants = self._claimants() or [t for t in self._tenants if self._may_run(t)]
        tenants = heapq.nsmallest(_LOOKUP_TENANTS, tenants, key=lambda tenant: tenant.turn)
        candidates = {
            tenant.name: self._look_up(tenant.waiting[: _LOOKUPS // len(tenants)])
            for tenant in tenants
        }
        # With several tenants, which of them are looked up changes from step to step.
        is_alone = len(self._tenants) == 1 and candidates
        self._least_need = self._need_of_any(*candidates.values()) if is_alone else None
        return candidates

    def _look_up(self, seqs: list[Sequence]) -> list[_Candidate]:
        ranked = []
        for seq in seqs:
            key = self._lookup_key(seq)
            num_cached_pages = self.cache.peek(seq.namespace, key)
            may_be_overtaken = not (
                seq.num_preempted or seq.num_overtaken >= self.config.starvation_steps
            )
            order = (
                seq.priority,
                may_be_overtaken,
                -num_cached_pages if may_be_overtaken else 0,
                seq.order,
            )
            ranked.append((order, _Candidate(seq, key, num_cached_pages, may_be_overtaken)))
        ranked.sort(key=lambda item: item[0])
        return [candidate for _, candidate in ranked]

    def _admit(
        self,
        step: StepPlan,
        tenant: Tenant,
        candidates: list[_Candidate],
        coming: list[tuple[str, bytes]],
    ) -> Iterator[Sequence]:
        """Lets a tenant's candidates in, one each time that the next is asked for, while slots and
        pages last.

        coming: what the cache is about to get; those who get in are added.
        """
        for seq, key, num_cached_pages, may_be_overtaken in candidates:
            if step.is_closed or not (self._num_spare_rows(step) and self._may_run(tenant)):
                return
            if seq.is_held:
                continue
            if may_be_overtaken and self._gains_by_waiting(seq, key, num_cached_pages, coming):
                continue
            if seq.num_in_flight or not self._enter(seq, key, num_cached_pages):
                step.is_closed = not may_be_overtaken
                continue
            step.admitted.append(seq)
            coming.append(self._coming(seq))
            yield seq

    def _count_overtaken(self, admitted: list[Sequence]) -> None:
        last_ranks: dict[str, tuple[int, int]] = {}
        for seq in admitted:
            last_ranks[seq.tenant] = max(last_ranks.get(seq.tenant, rank(seq)), rank(seq))
        for name, last_rank in last_ranks.items():
            for seq in self._tenants[name].waiting[:_LOOKUPS]:  # nobody overtakes from further back
                seq.num_overtaken += rank(seq) < last_rank

    def _need_of_any(self, candidates: list[_Candidate]) -> tuple[int, int]:
        """The fewest new pages and table entries with which one of them could enter.

        Until the cache gets more pages or the head of the queue changes, no candidate needs fewer:
        evictions only add to what they need.
        """
        new, entries = [], []
        for seq, _, num_cached_pages, may_be_overtaken in candidates:
            num_pages = self._num_pages(seq)
            new.append(num_pages - num_cached_pages)
            entries.append(num_pages)
            if not may_be_overtaken:
                break  # if it stays out, so do all that follow
        return min(new), min(entries)

    def _lookup_key(self, seq: Sequence) -> bytes:
        """The tokens that may come from the cache: full pages, and never the last token, whose
        logits are wanted, or any where the logits of all are."""
        if not self.config.prefix_cache or seq.params.prompt_logprobs:
            return b""
        page_size = self.config.page_size
        return seq.key((len(seq.tokens) - 1) // page_size * page_size)

    def _coming(self, seq: Sequence) -> tuple[str, bytes]:
        """The namespace and the tokens that the cache gets from `seq` while it reads its prompt."""
        return seq.namespace, seq.key(seq.num_prompt)

    def _gains_by_waiting(
        self, seq: Sequence, key: bytes, num_cached_pages: int, coming: list[tuple[str, bytes]]
    ) -> bool:
        """Whether the page that `seq` would begin with is about to be computed for another."""
        end = 4 * (num_cached_pages + 1) * self.config.page_size
        if end > len(key) or not coming:
            return False
        head = key[:end]
        return any(
            namespace == seq.namespace and prompt.startswith(head) for namespace, prompt in coming
        )

    def _enter(self, seq: Sequence, key: bytes, num_cached_pages: int) -> bool:
        """Gives `seq` a slot, its cached prefix and pages for the rest, if there is room."""
        num_pages = self._num_pages(seq)
        if not self._has_room(num_pages - num_cached_pages, num_pages):
            return False
        match = self.cache.match(seq.namespace, key)
        self.cache.lock(match.node)
        if not self._has_room(num_pages - len(match.pages), num_pages):
            self.cache.unlock(match.node)
            return False

        self._leave_queue(seq)
        seq.node, seq.num_shared = match.node, len(match.pages)
        seq.pages, seq.num_computed = array("i", match.pages), match.num_tokens
        tenant = self._tenants[seq.tenant]
        tenant.num_pages += len(seq.pages)
        self._num_table_pages += len(seq.pages)
        grown = self._grow(seq, num_pages - len(seq.pages))
        assert grown
        seq.slot = heapq.heappop(self._free_slots)
        seq.status = Status.RUNNING
        insort(tenant.running, seq, key=rank)
        if not seq.num_preempted:
            seq.num_cached = match.num_tokens
            self._num_admissions += 1
            self._num_prompt_tokens += seq.num_prompt
            self._num_prompt_tokens_cached += seq.num_cached
        return True

    def _has_room(self, num_new: int, num_pages: int) -> bool:
        """Whether somebody may enter who needs so many pages, and of them so many new ones.

        A page for each of the running and a hundredth of the pool stay in reserve: all can go on
        for page_size steps before one is preempted, and whoever gave its pages to others has to
        wait until others give theirs back. So no two sequences preempt each other in turns.
        """
        config = self.config
        num_running = config.max_running - len(self._free_slots)
        num_reserved = num_running + 1 + config.num_pages // 100 if num_running else 0
        if self._num_table_pages + num_pages + num_reserved > config.max_kv_pages_step:
            return False
        return num_new + num_reserved <= self._num_available

    def _num_pages(self, seq: Sequence) -> int:
        """For all tokens that are known."""
        return -(-len(seq.tokens) // self.config.page_size)

    def _join_queue(self, seq: Sequence) -> None:
        waiting = self._tenants.get_or_add(seq.tenant).waiting
        place = bisect_left(waiting, waiting_rank(seq), key=waiting_rank)
        waiting.insert(place, seq)
        self._num_waiting += 1
        self._on_queue_changed(place)

    def _leave_queue(self, seq: Sequence) -> None:
        waiting = self._tenants[seq.tenant].waiting
        place = bisect_left(waiting, waiting_rank(seq), key=waiting_rank)
        del waiting[place]
        self._num_waiting -= 1
        self._on_queue_changed(place)

    def _on_queue_changed(self, place: int) -> None:
        if place < _LOOKUPS:
            self._least_need = None

    # ---- pages ----

    @property
    def _num_available(self) -> int:
        return self.allocator.num_free + self.cache.num_evictable

    def _grow(self, seq: Sequence, num_pages: int) -> bool:
        """Appends pages to a sequence, or none if they are not to be had."""
        if self._num_table_pages + num_pages > self.config.max_kv_pages_step:
            return False
        if num_pages > self._num_available:
            return False
        self.cache.evict(num_pages - self.allocator.num_free)
        pages = self.allocator.allocate(num_pages)
        assert pages is not None
        seq.pages.extend(pages)
        self._tenants[seq.tenant].num_pages += num_pages
        self._num_table_pages += num_pages
        return True

    def _share(self, seq: Sequence, num_pages: int) -> None:
        """Hands the first pages of `seq`, all of them full, to the cache, and locks them there.

        Where the cache has the same tokens already, `seq` goes on with the cache's pages.
        """
        if num_pages <= seq.num_shared or not self.config.prefix_cache:
            return
        assert seq.node is not None
        key = seq.key(num_pages * self.config.page_size)
        inserted = self.cache.insert(seq.namespace, key, seq.pages[:num_pages].tolist())
        self._least_need = None
        self.cache.lock(inserted.node)
        self.cache.unlock(seq.node)
        self.allocator.free(inserted.duplicates)
        seq.pages[:num_pages] = array("i", inserted.pages)
        seq.node, seq.num_shared = inserted.node, num_pages

    def _release(self, seq: Sequence, keep: bool) -> None:
        """Takes slot and pages from a running sequence; `keep`: full pages go to the cache."""
        if keep:
            num_known = min(seq.num_computed, len(seq.tokens))
            self._share(seq, num_known // self.config.page_size)
        assert seq.node is not None
        self.cache.unlock(seq.node)
        self.allocator.free(seq.pages[seq.num_shared :])
        tenant = self._tenants[seq.tenant]
        del tenant.running[bisect_left(tenant.running, rank(seq), key=rank)]
        tenant.num_pages -= len(seq.pages)
        self._num_table_pages -= len(seq.pages)
        heapq.heappush(self._free_slots, seq.slot)
        seq.pages, seq.num_computed, seq.slot = array("i"), 0, -1
        seq.node, seq.num_shared = None, 0

    def _preempt(self, seq: Sequence, step: StepPlan) -> None:
        """Back to the queue without pages; prompt and output will be computed again.

        A sample in flight stays in flight: the sequence waits at least until its token is known.
        """
        self._release(seq, keep=True)
        seq.status = Status.WAITING
        seq.num_preempted += 1
        self._num_preemptions += 1
        self._join_queue(seq)
        step.preempted.append(seq)

    # ---- looking in from outside ----

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_waiting=self._num_waiting,
            num_running=self.config.max_running - len(self._free_slots),
            num_free_pages=self.allocator.num_free,
            num_cached_pages=self.cache.num_cached,
            num_evictable_pages=self.cache.num_evictable,
            num_admissions=self._num_admissions,
            num_preemptions=self._num_preemptions,
            num_prompt_tokens=self._num_prompt_tokens,
            num_prompt_tokens_cached=self._num_prompt_tokens_cached,
        )

    def check_integrity(self) -> None:
        """Raises AssertionError unless every page, lock, slot and counter is accounted for."""
        self.allocator.check_integrity()
        self.cache.check_integrity()
        holders: dict[int, int] = {}
        private: list[int] = []
        running, waiting = self.running, self.waiting
        for seq in running:
            assert seq.status is Status.RUNNING and self._seqs[seq.id] is seq, seq.id
            assert seq.node is not None, f"{seq.id}: no lock"
            holders[seq.node.serial] = holders.get(seq.node.serial, 0) + 1
            shared: list[int] = []
            node: Node | None = seq.node
            while node is not None:
                shared[:0] = node.pages
                node = node.parent
            assert shared == seq.pages[: seq.num_shared].tolist(), f"{seq.id}: shared pages"
            private += seq.pages[seq.num_shared :]
            num_computed = len(seq.pages) * self.config.page_size
            assert 0 <= seq.num_computed <= num_computed, f"{seq.id}: computed beyond its pages"
        assert len(set(private)) == len(private), "a private page has two owners"
        assert all(map(self.allocator.is_allocated, private)), "a private page is free"
        num_owned = self.allocator.num_free + self.cache.num_cached + len(private)
        assert num_owned == self.config.num_pages, f"{num_owned} of {self.config.num_pages} pages"
        for view in self.cache.walk():
            num_holders = holders.get(view.id, 0)
            assert view.holders == num_holders, f"node {view.id}: {view.holders} != {num_holders}"
        for seq in waiting:
            assert seq.status is Status.WAITING and self._seqs[seq.id] is seq, seq.id
            assert not seq.pages and seq.node is None and seq.num_computed == 0, seq.id
        assert len(self._seqs) == len(waiting) + len(running)
        assert self._num_waiting == len(waiting)
        for tenant in self._tenants:
            assert tenant.waiting or tenant.running, "an idle tenant"
            assert tenant.waiting == sorted(tenant.waiting, key=waiting_rank)
            assert tenant.running == sorted(tenant.running, key=rank)
            assert tenant.num_pages == sum(len(seq.pages) for seq in tenant.running)
            names = {seq.tenant for seq in (*tenant.waiting, *tenant.running)}
            assert [self._tenants[name] for name in names] == [tenant], names
        slots = self._free_slots + [seq.slot for seq in running]
        assert sorted(slots) == list(range(self.config.max_running)), "slots"
        assert self._num_table_pages == sum(tenant.num_pages for tenant in self._tenants)
        assert self._num_table_pages <= self.config.max_kv_pages_step
