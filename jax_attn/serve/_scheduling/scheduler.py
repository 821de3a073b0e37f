"""Chooses the next step: its tokens, its prompt chunks, and the sequences to preempt. Pure Python.

One step combines a token of every running decode with chunks of prompts, in one call of attention.
Steps run on the device in launch order, and the host schedules the next one before it knows the
samples of the last. Two rules follow:

- A page may be shared, or freed and given away, as soon as the step that writes it is launched.
- The next input token of a running sequence may be known only to the device. The sequence is
  scheduled as if it were known, but cached only as far as the host knows its tokens.

`admission` decides which sequences enter; `kv_memory` assigns pages and slots.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from jax_attn.serve._scheduling.admission import Admission
from jax_attn.serve._scheduling.kv_memory import KvMemory
from jax_attn.serve._scheduling.request import FinishReason, Sequence, Status
from jax_attn.serve._scheduling.step_plan import ScheduledSequence, SchedulerConfig, StepPlan
from jax_attn.serve._scheduling.tenants import Tenants, in_turn

# Steps in which the waiting prompts should be read, as far as max_prefill_chunk allows.
_READ_STEPS = 8


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Gauges, and totals since the start. Pages that are neither free nor cached are private."""

    num_waiting: int
    num_running: int
    num_free_pages: int
    num_cached_pages: int
    num_preemptions: int
    num_dropped_pages: int | None  # by the kv policy; None: there is none
    num_prompt_tokens: int  # of admitted sequences
    num_prompt_tokens_cached: int  # the part of them found in the prefix cache
    states: dict[str, int] | None  # slots of recurrent states: free, cached and used; None: no such
    host: dict[str, int] | None  # pages of the host: free, cached; totals stored, returned
    host_states: dict[str, int] | None  # slots of states there: free, cached
    files: dict[str, int] | None  # see FileTier.counts


class Scheduler:
    """Owns the pages, the prefix cache, and every sequence from `add` to `finish`.

    Deterministic: the same calls with the same clock give the same steps. Sequences of one tenant
    are ordered by priority, then by arrival; priorities are strict. For one thread at a time.
    """

    def __init__(self, config: SchedulerConfig):
        self.config = config
        self._tenants = Tenants()
        self.memory = KvMemory(config, self._tenants)
        self.allocator, self.cache = self.memory.allocator, self.memory.cache
        self.admission = Admission(config, self.memory, self._tenants)
        self._seqs: dict[str, Sequence] = {}
        # A heap; may contain finished sequences.
        self._deadlines: list[tuple[float, int, Sequence]] = []
        self._arrivals = itertools.count()
        self._num_preemptions = 0

    @property
    def waiting(self) -> list[Sequence]:
        """See Admission.waiting."""
        return self.admission.waiting

    @property
    def running(self) -> list[Sequence]:
        """All running sequences, by tenant in turn, then by priority and arrival."""
        tenants = in_turn(tenant for tenant in self._tenants if tenant.running)
        return [seq for tenant in tenants for seq in tenant.running]

    @property
    def max_sequence_tokens(self) -> int:
        """The limit on prompt and max_tokens together."""
        config = self.config
        if config.streaming is not None:
            return config.streaming.policy.max_tokens
        num_pages = min(config.num_pages, config.max_kv_pages_step)
        return config.page_size * (num_pages - config.num_kept_pages)

    def _end_of_chunk(self, seq: Sequence) -> int:
        """The index that the tokens of `seq` in the next step end at, at most."""
        end = seq.num_computed + seq.num_pending
        if self.memory.streaming is not None:
            return min(end, self.memory.streaming.block_end(seq.num_computed))
        if seq.num_computed < seq.num_prompt < end and self.memory.keeps_some(seq):
            return seq.num_prompt
        return end

    # ---- what happens to a sequence ----

    def add(self, *seqs: Sequence) -> None:
        """Adds new sequences, all or none (pass the n of a request together).

        Raises:
          QueueFull: there is no room for all of them.
          ValueError: a sequence that could never run (no prompt, longer than max_sequence_tokens, a
            deadline or a priority that is not a number), or an id in use.
        """
        for seq in seqs:
            num_tokens = seq.num_prompt + seq.params.max_tokens
            if not 1 <= seq.num_prompt <= len(seq.tokens):  # with output: from another engine
                raise ValueError(f"{seq.id}: tokens: expected a prompt, got {len(seq.tokens)}")
            if num_tokens > self.max_sequence_tokens:
                raise ValueError(
                    f"{seq.id}: prompt and max_tokens: expected at most {self.max_sequence_tokens} "
                    f"tokens together, got {num_tokens}"
                )
            if seq.deadline is not None and math.isnan(seq.deadline):
                raise ValueError(f"{seq.id}: deadline: expected seconds, got {seq.deadline}")
            if not isinstance(seq.priority, int):  # values that are not numbers cannot be ordered
                raise ValueError(f"{seq.id}: priority: expected an integer, got {seq.priority}")
        if len(self._seqs.keys() | {seq.id for seq in seqs}) < len(self._seqs) + len(seqs):
            raise ValueError(f"{[seq.id for seq in seqs]}: expected ids that are not in use")
        self.admission.check(Counter(seq.tenant for seq in seqs))
        for seq in seqs:
            seq.order = next(self._arrivals)
            self._seqs[seq.id] = seq
            self.admission.join(seq)
            if seq.deadline is not None:
                heapq.heappush(self._deadlines, (seq.deadline, seq.order, seq))

    def abort(self, seq_id: str) -> Sequence | None:
        """Finishes a sequence in any state. Returns None for an unknown or finished id."""
        seq = self._seqs.get(seq_id)
        if seq is not None:
            self.finish(seq, FinishReason.ABORT)
        return seq

    def append(
        self, seq: Sequence, tokens: list[int], num_sampled: int = 1, num_taken: int = 0
    ) -> None:
        """Appends tokens that the host now knows: a sample, forced tokens, or both.

        num_sampled: samples in flight that this call settles: tokens[0], and any launched after it,
        which are void. Forced tokens after a sample make those void: settle all of them here, and
        ignore them when they arrive.
        num_taken: accepted drafts: the leading tokens that are already computed.

        For a finished sequence, tokens are ignored.

        Raises:
          ValueError: more samples than are in flight, or tokens that leave nothing to continue
          with.
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
        if num_sampled > 1:  # results that follow a void sample do not count
            num_computed = min(num_computed, len(seq.tokens) + 1)
        if seq.status is Status.RUNNING:
            num_computed += num_taken
        if len(seq.tokens) + len(tokens) + num_in_flight <= num_computed:
            raise ValueError(
                f"{seq.id}: tokens: expected one that is not computed yet, got {len(tokens)} for "
                f"{num_sampled} samples"
            )
        seq.tokens += tokens
        goes_back = num_computed < seq.num_computed and self.memory.states is not None
        seq.num_computed, seq.num_in_flight = num_computed, num_in_flight
        if seq.status is Status.RUNNING and self.memory.states is not None:
            seq.num_behind += num_taken
        if not num_in_flight:
            seq.is_drafting = False
        if goes_back and seq.status is Status.RUNNING:
            self._preempt(seq, StepPlan())  # its states are those after void tokens
        if seq.status is Status.WAITING:
            self.admission.on_tokens_changed()

    def retract(self, seq: Sequence) -> None:
        """Makes the sample in flight void, as the tokens that are allowed are not known in time.

        No token is scheduled until `resume`. Then the token before goes through the model again.

        Only for sequences that `may_retract`. Has no effect on a finished one.

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
        if self.memory.states is not None:
            # Its states are those after the token. It begins again from its last checkpoint.
            if seq.status is Status.RUNNING:
                self._preempt(seq, StepPlan())
            return
        seq.num_computed = min(seq.num_computed, len(seq.tokens) - 1)

    def resume(self, seq: Sequence) -> None:
        """Undoes `retract`."""
        seq.is_held = False

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """Ends a sequence in any state. Its full pages stay cached, unless `reason` is ERROR.

        Its launched work may still write its private pages. That happens before any work launched
        from now on, so before anyone else uses them.

        After a failed step, pages hold undefined data and samples never come: finish all running
        sequences, settle the samples in flight of waiting ones (`append(seq, [],
        seq.num_in_flight)`: they are sampled again), and empty the cache by `cache.clear()`.

        Raises:
          ValueError: the sequence was never added.
        """
        if seq.status is Status.FINISHED:
            return
        if self._seqs.get(seq.id) is not seq:
            raise ValueError(f"{seq.id}: finish: expected a sequence that was added")
        if seq.status is Status.RUNNING:
            self.memory.release(seq, keep=reason is not FinishReason.ERROR)
        else:
            self.admission.leave(seq)
        del self._seqs[seq.id]
        self._tenants.remove_if_idle(seq.tenant)
        seq.status, seq.finish_reason = Status.FINISHED, reason

    # ---- the step ----

    def schedule(self, now: float) -> StepPlan | None:
        """Returns the next step; None: there is nothing to do or report until something changes.

        If `entries` is empty there is only something to report. Call `launched` for each step with
        entries once the device has it, before the next `schedule`. A step that is never launched is
        scheduled again.
        """
        step = StepPlan()
        self.memory.take_files(now)
        self._expire(now, step)
        if (seq := self.admission.beyond_its_share()) is not None:
            self._preempt(seq, step)
        self._secure_pages(step)
        num_left, reading = self._schedule_decodes(step)
        if not self._schedule_prompts(step, num_left, reading, now):
            self._add_drafts(step)
            if self.config.burst_steps > 1 and not reading:
                self._make_burst(step)
        if self.memory.states is not None:
            num_left = self.config.step_checkpoints
            for entry in step.entries:
                num_left -= self.memory.states.plan(entry, num_left)
        for seq in step.admitted:
            seq.admitted = now if seq.admitted is None else seq.admitted
        return step if step.entries or step.preempted or step.expired else None

    def launched(self, step: StepPlan) -> None:
        """Records that the device will run `step`, after all steps launched before."""
        for entry in step.entries:
            seq = entry.seq
            if seq.status is not Status.RUNNING:
                continue  # aborted since; its pages are not reused yet
            was_prompt = seq.num_computed < seq.num_prompt
            seq.num_computed += entry.num_launched - len(entry.drafts) - entry.num_again
            seq.num_behind -= entry.num_again
            seq.is_drafting = bool(entry.drafts)
            seq.num_in_flight += entry.samples * entry.num_steps
            if self.memory.states is not None:
                self.memory.states.launched(entry)
            if was_prompt:
                # Tokens that may be computed again are not shared yet.
                num_final = seq.num_prompt - seq.may_retract
                self.memory.share(seq, min(seq.num_computed, num_final) // self.config.page_size)
        self._tenants.charge(
            ((entry.seq, entry.num_launched) for entry in step.entries), self.config.max_step_tokens
        )

    def _expire(self, now: float, step: StepPlan) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, seq = heapq.heappop(self._deadlines)
            if seq.status is not Status.FINISHED:
                self.finish(seq, FinishReason.DEADLINE)
                step.expired.append(seq)
        if len(self._deadlines) > 2 * len(self._seqs) + 64:  # mostly finished sequences
            self._deadlines = [d for d in self._deadlines if d[2].status is not Status.FINISHED]
            heapq.heapify(self._deadlines)

    # ---- those that run ----

    def _secure_pages(self, step: StepPlan) -> None:
        """Gives running sequences pages for their pending tokens, after a kv policy took some.

        Preempts the youngest sequence of the tenant with the most pages, but a borrower last.
        """
        page_size = self.config.page_size
        for seq in self.running:
            while seq.status is Status.RUNNING and not self.memory.drop(seq):
                self._preempt(self.admission.last_of_largest(), step)
            num_room = seq.num_dropped + len(seq.pages) * page_size
            if len(seq.tokens) + seq.num_in_flight <= num_room:
                continue  # the common case
            num_new = -(-(self._end_of_chunk(seq) - num_room) // page_size)
            # `seq` itself may be preempted: for an earlier one, or as the youngest.
            while (
                num_new > 0 and seq.status is Status.RUNNING and not self.memory.grow(seq, num_new)
            ):
                self._preempt(self.admission.last_of_largest(), step)

    def _schedule_decodes(self, step: StepPlan) -> tuple[int, list[Sequence]]:
        """Schedules sequences whose prompts are read.

        Returns the number of tokens left, and the sequences that still read their prompts.
        """
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
            if num_pending == 1 and not seq.num_behind:
                step.entries.append(ScheduledSequence(seq, seq.num_computed, 1, True))
                num_left -= 1
            elif num_pending:
                several.append(seq)
        # A decode with several tokens (forced, lost in a preemption, or drafts that its state
        # lacks) has a client in the middle of a text: it comes before prompts.
        for seq in several:
            num_left -= self._schedule_chunk(step, seq, num_left)
        return num_left, reading

    def _add_drafts(self, step: StepPlan) -> None:
        """Gives decodes drafts, as many as fit in the size that the step is padded to."""
        drafting = [
            entry
            for entry in step.entries
            if entry.seq.drafter and entry.samples and entry.num_tokens - entry.num_again == 1
        ]
        if not drafting:
            return
        num_tokens = sum(entry.num_tokens for entry in step.entries)
        sizes = self.config.step_sizes or (self.config.max_step_tokens,)
        num_left = min((size for size in sizes if size >= num_tokens), default=0) - num_tokens
        num_left = min(num_left, self._num_spare_rows(step))
        for i, entry in enumerate(drafting):
            seq = entry.seq
            most = min(num_left // (len(drafting) - i), seq.max_drafts)
            if self.memory.streaming is not None:
                end = self.memory.streaming.block_end(seq.num_computed)
                most = min(most, end - seq.num_computed - 1)
            if seq.num_computed < seq.num_prompt and self.memory.keeps_some(seq):
                continue  # what follows the prompt is written beside the kept keys
            if most <= 0 or seq.drafter is None or seq.num_output < seq.params.min_tokens:
                continue
            # Drafts use only pages that the sequence has, or that nobody else needs.
            page_size = self.config.page_size
            num_room = seq.num_dropped + len(seq.pages) * page_size
            num_new = -(-(seq.num_computed + 1 + most - num_room) // page_size)
            has_pages = num_new <= 0 or (
                self.memory.has_room(num_new, num_new) and self.memory.grow(seq, num_new)
            )
            if not has_pages:
                most = num_room - seq.num_computed - 1
            entry.drafts = tuple(seq.drafter.propose(seq, most))
            entry.num_tokens += len(entry.drafts)
            entry.num_more_rows = len(entry.drafts)
            step.num_more_rows += len(entry.drafts)
            num_left -= len(entry.drafts)

    def _make_burst(self, step: StepPlan) -> None:
        """Makes a step of decodes a burst, if each can go on without the host, and has the pages.

        A sequence that waits may enter before the next burst, so while any could, or could after
        an end that is known, there is no longer one.
        """
        entries, page_size = step.entries, self.config.page_size
        if self.admission.may_admit or not all(map(_goes_on_alone, entries)):
            return
        if any(seq.is_held for seq in self.running):
            return  # it goes on once its mask is there
        lefts = [entry.seq.num_left for entry in entries]
        num_steps = min(self.config.burst_steps, max(lefts, default=1))
        if self.admission.num_waiting:
            num_steps = min(num_steps, *lefts)
        if num_steps == 1:
            return
        growing = []
        for entry, num_left in zip(entries, lefts, strict=True):
            seq = entry.seq
            end = seq.num_computed + min(num_steps, num_left)
            if (num_new := -(-end // page_size) - len(seq.pages)) > 0:
                growing.append((seq, num_new))
        num_new = sum(num for _, num in growing)
        if num_new and not self.memory.has_room(num_new, num_new):
            return
        for seq, num in growing:
            self.memory.grow(seq, num)
        step.num_steps = num_steps
        for entry, num_left in zip(entries, lefts, strict=True):
            entry.num_steps = min(num_steps, num_left)
        entries.sort(key=lambda entry: -entry.num_steps)

    def _schedule_prompts(
        self, step: StepPlan, num_left: int, reading: list[Sequence], now: float
    ) -> bool:
        """Schedules chunks of prompts, tenants in turn.

        A tenant's running sequences come first, then newly admitted ones. Returns whether there are
        any.

        reading: running sequences that still read their prompts, tenant by tenant.
        """
        if not (reading or self.admission.may_admit):
            return False
        num_entries = len(step.entries)
        if step.entries:
            chunk = self._wanted_chunk(reading)
            num_others = self.config.max_step_tokens - num_left
            num_left = min(num_left, self._chunk_beside(num_others, chunk))
        # A sequence is not preempted and admitted again within a step.
        may_enter = num_left > 0 and not step.preempted
        candidates = self.admission.candidates(now) if may_enter else {}
        if self.memory.states is not None:
            self.admission.want_parts(reading, candidates)
        coming = [self.admission.coming(seq) for seq in reading] if candidates else []
        mine: dict[str, list[Sequence]] = {}
        for seq in reading:
            mine.setdefault(seq.tenant, []).append(seq)
        prompts: dict[int, Iterator[Sequence]] = {}
        turns = []
        for name in mine.keys() | candidates.keys():
            tenant = self._tenants[name]
            waiting = candidates.get(name, [])
            entering = self.admission.entering(step, tenant, waiting, coming)
            prompts[tenant.serial] = itertools.chain(mine.get(name, []), entering)
            turns.append((self.admission.turn(tenant), tenant))
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
        return len(step.entries) > num_entries

    def _wanted_chunk(self, reading: list[Sequence]) -> int:
        """Prompt tokens beside decodes that read all waiting prompts in _READ_STEPS steps."""
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
        """Prompt tokens in a step with num_others other tokens.

        About a chunk, such that the step fills one of step_sizes.

        If five eighths of a chunk fit into the size below, uses that size: in the size above all
        decodes would wait for the padding. Otherwise uses the size above, which takes the same time
        half empty (docs/notes/server.md).
        """
        sizes = self.config.step_sizes
        wanted = num_others + chunk
        fits = max((size for size in sizes if size <= wanted), default=0) - num_others
        if 8 * fits >= 5 * chunk:
            return fits
        return min((size for size in sizes if size >= wanted), default=wanted) - num_others

    def _schedule_chunk(self, step: StepPlan, seq: Sequence, max_tokens: int) -> int:
        num_pending, num_scored = seq.num_pending + seq.num_behind, 0
        num_tokens = min(self._end_of_chunk(seq) - seq.num_computed + seq.num_behind, max_tokens)
        if self.config.whole_pictures and seq.pictures:
            num_tokens = self._with_whole_pictures(step, seq, num_tokens)
        if seq.params.prompt_logprobs:
            # Half of the rows stay for waiting sequences, which enter while this one reads.
            num_spare = self._num_spare_rows(step) // (2 if self.admission.num_waiting else 1)
            num_tokens = min(num_tokens, 1 + num_spare)
            num_scored = max(0, min(num_tokens, seq.num_prompt - 1 - seq.num_computed))
        if num_tokens:
            samples = num_tokens == num_pending
            num_more_rows = min(num_scored, num_tokens - 1)
            begin = seq.num_computed - seq.num_behind
            entry = ScheduledSequence(seq, begin, num_tokens, samples, num_scored, num_more_rows)
            entry.num_again = min(num_tokens, seq.num_behind)
            step.entries.append(entry)
            step.num_more_rows += num_more_rows
        return num_tokens

    def _with_whole_pictures(self, step: StepPlan, seq: Sequence, num_tokens: int) -> int:
        """Returns the length of a chunk of about num_tokens that ends within no picture.

        It may be longer if the step has room: else a chunk could be too short for any picture.
        """
        begin, end = seq.num_computed, seq.num_computed + num_tokens
        cut = next((x for x in seq.pictures if x.begin < end < x.end), None)
        if cut is None:
            return num_tokens
        if cut.begin > begin:
            return cut.begin - begin
        num_others = sum(entry.num_tokens for entry in step.entries)
        rest = cut.end - begin
        return rest if num_others + rest <= self.config.max_step_tokens else 0

    def _num_spare_rows(self, step: StepPlan) -> int:
        """Rows of the step's logits that are left after one for each running sequence."""
        return self.memory.num_free_slots - step.num_more_rows

    def _preempt(self, seq: Sequence, step: StepPlan) -> None:
        """Moves a sequence back to the queue without pages; all its tokens will be computed again.

        A sample in flight stays so: the sequence waits at least until its token is known.
        """
        self.memory.release(seq, keep=True)
        seq.status = Status.WAITING
        seq.has_asked_files = False  # its pages may go there
        seq.num_preempted += 1
        self._num_preemptions += 1
        self.admission.join(seq)
        step.preempted.append(seq)

    def suspend(self) -> None:
        """Moves all running sequences to the queue, where they wait without pages.

        Call it when no sample is in flight. The sequences read all their tokens again.
        """
        for seq in self.running:
            self._preempt(seq, StepPlan())

    def begin_version(self, version: str, keep_prefixes: bool) -> None:
        """See KvMemory.begin_version. Running sequences are suspended first."""
        self.suspend()
        self.memory.begin_version(version, keep_prefixes)

    # ---- looking in from outside ----

    def stats(self) -> SchedulerStats:
        admission, memory = self.admission, self.memory
        return SchedulerStats(
            num_waiting=admission.num_waiting,
            num_running=memory.num_running,
            num_free_pages=memory.allocator.num_free,
            num_cached_pages=memory.cache.num_cached,
            num_preemptions=self._num_preemptions,
            num_dropped_pages=None if self.config.kv_policy is None else memory.num_dropped_pages,
            num_prompt_tokens=admission.num_prompt_tokens,
            num_prompt_tokens_cached=admission.num_prompt_tokens_cached,
            states=None if memory.states is None else memory.states.counts(),
            host=None if memory.host is None else memory.host.counts(),
            host_states=None if memory.host is None else memory.host.counts_of_states(),
            files=None if memory.files is None else memory.files.counts(),
        )

    def check_integrity(self) -> None:
        """Raises AssertionError unless every page, lock, slot and counter is accounted for."""
        self.memory.check_integrity()
        self.admission.check_integrity()
        running, waiting = self.running, self.waiting
        assert all(seq.status is Status.RUNNING for seq in running)
        assert all(self._seqs[seq.id] is seq for seq in (*running, *waiting))
        assert len(self._seqs) == len(waiting) + len(running)


def _goes_on_alone(entry: ScheduledSequence) -> bool:
    """Whether a sequence needs nothing of the host between two samples.

    That is a mask, of a grammar or as it may not end yet, drafts, or a token not sampled before.
    """
    seq = entry.seq
    return (
        entry.num_tokens == 1
        and entry.samples
        and seq.params.grammar is None
        and seq.num_known - seq.num_prompt >= seq.params.min_tokens
    )
