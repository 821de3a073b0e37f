"""An engine and a device without a model, to run the scheduler and to check its promises.

A page slot holds the digest of all tokens up to it, because a real kv slot depends on all of them.
A step reads the digests of a sequence's whole context back from its pages. A wrong, stale or
overwritten page therefore changes the output or is found at once. A page that becomes free is
poisoned, and each page knows the namespace that wrote it. A slot of recurrent states holds the
digest of all tokens that went into it, so a stale or a foreign state is found in the same way.
"""

from __future__ import annotations

import random
import struct
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future

from jax_attn.serve._scheduling.file_tier import (
    FileTier,
    Values,
    names,
    page_name,
    state_name,
)
from jax_attn.serve._scheduling.host_tier import FromFile, PageCopy, ToFiles
from jax_attn.serve._scheduling.prefix_cache import Node, RadixCache
from jax_attn.serve._scheduling.prompt_policy import KeptKeys
from jax_attn.serve._scheduling.request import FinishReason, Sequence, Status
from jax_attn.serve._scheduling.scheduler import Scheduler
from jax_attn.serve._scheduling.step_plan import ScheduledSequence, StepPlan

POISON = -1
EOS = 0
VOCAB = 50


def digest(previous: int, token: int) -> int:
    return zlib.crc32(token.to_bytes(4, "little"), previous)


def next_token(context: int) -> int:
    return context % VOCAB


def forced_after(token: int, context: int) -> list[int]:
    """Tokens that a grammar would force after a sampled token: sometimes, up to three."""
    if token % 5 != 4:
        return []
    return [1 + (context >> shift) % (VOCAB - 1) for shift in range(1 + context % 3)]


def salt(namespace: str) -> int:
    return zlib.crc32(namespace.encode())


def reference_output(seq: Sequence, forces: bool) -> tuple[list[int], FinishReason]:
    """The output of a sequence that runs alone."""
    context = salt(seq.namespace)
    for token in seq.tokens[: seq.num_prompt]:
        context = digest(context, token)
    output: list[int] = []
    while True:
        token = next_token(context)
        tokens = [token] + (forced_after(token, context) if forces else [])
        for token in tokens:
            output.append(token)
            context = digest(context, token)
            if token == EOS and not seq.params.ignore_eos:
                return output, FinishReason.STOP
            if len(output) == seq.params.max_tokens:
                return output, FinishReason.LENGTH


def nodes(cache: RadixCache) -> Iterator[Node]:
    stack = [cache._root]
    while stack:
        node = stack.pop()
        yield node
        stack += node.children.values()


class FakeFiles:
    """Files that lose entries, and whose reads take some steps and end early, by chance."""

    def __init__(self, scheduler: Scheduler, seed: int):
        self._rng = random.Random(seed)
        self._page_size = scheduler.config.page_size
        self._values: dict[str, object] = {}  # by name
        self.num_read = 0
        tier = FileTier(self, scheduler.memory.host, self._page_size, {})
        scheduler.memory.open_files(tier)

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def __len__(self) -> int:
        return len(self._values)

    def counts(self) -> dict[str, int]:
        return {}

    def write(self, owner: str, key: bytes, values: list, is_state: bool) -> None:
        begin = len(key) // (4 * self._page_size) - len(values)
        name_of = state_name if is_state else page_name
        made = map(name_of, names(owner, key, begin, self._page_size))
        for name, value in zip(made, values, strict=True):
            assert self._values.setdefault(name, value) == value, "one name for two"
        for name in self._rng.sample([*self._values], len(self._values) // 100):
            del self._values[name]

    def read(self, pages: list[str], states: str | None) -> Future[Values]:
        num = self._rng.choice([len(pages)] * 3 + [self._rng.randrange(9)])
        found = [self._values[name] for name in pages[:num]]
        of_states = self._values[states] if states is not None and num >= len(pages) else None
        self.num_read += len(found) + (of_states is not None)
        return _Late(Values(found, of_states), self._rng.randrange(4))


class _Late(Future[Values]):
    """Done after some questions."""

    def __init__(self, values: Values, num_steps: int):
        super().__init__()
        self.set_result(values)
        self._num_left = num_steps

    def done(self) -> bool:
        self._num_left -= 1
        return self._num_left < 0


class FakeDevice:
    """Runs steps at once and checks each against the scheduler's promises."""

    def __init__(self, scheduler: Scheduler):
        self.scheduler = scheduler
        self.page_size = scheduler.config.page_size
        self.slots: dict[tuple[int, int], int] = {}  # (page, offset) -> digest
        self.last_tokens: dict[int, int] = {}  # by slot of the sequence
        self.owners: dict[int, Sequence] = {}  # by slot
        self.num_computed: dict[str, int] = {}  # tokens computed since the admission
        self.num_tokens_run = 0
        self.writers: dict[int, str] = {}  # page -> namespace; free pages have none
        self.states: dict[int, int] = {}  # slot -> digest
        self.rotated: dict[int, int] = {}  # copy of a page of sinks -> by how many tokens
        self.host_states: dict[int, int] = {}  # slot of the host -> digest
        self.freed: dict[int, int] = {}  # page, since the last step -> moves decided before
        self.num_copies = 0  # of pages that began like a prompt's
        self.num_prompts_cut = 0  # that kept some of their keys
        self.host: dict[int, tuple[str | None, list[int]]] = {}  # host page -> writer, digests
        self.files: FakeFiles | None = None
        free = scheduler.allocator.free
        scheduler.allocator.free = lambda pages: free(self._note_freed(pages))

    def _note_freed(self, pages: Iterable[int]) -> list[int]:
        pages = list(pages)
        self.freed |= dict.fromkeys(pages, len(self.scheduler.memory.moves))
        return pages

    def _move(self) -> None:
        """Runs the moves of pages in their order, then poisons pages that were freed.

        What was in them lasts until the next step, and the moves come before it.
        """
        offsets, arrived = range(self.page_size), dict[int, int]()
        for i, move in enumerate(self.scheduler.memory.moves.take()):
            if isinstance(move, PageCopy):
                source, page = move
                assert self.slots[source, 0] != POISON, "a page that is free is copied"
                self.writers[page] = self.writers[source]
                self.slots |= {(page, offset): self.slots[source, offset] for offset in offsets}
                arrived[page] = i
                self.num_copies += 1
                continue
            if isinstance(move, ToFiles | FromFile):
                self._move_files(move)
                continue
            if isinstance(move, KeptKeys):
                self._keep(move)
                arrived |= dict.fromkeys(move.targets, i)
                continue
            to_host, page, host_page, is_state = move
            if is_state and to_host:
                self.host_states[host_page] = self.states[page]
            elif is_state:
                self.states[page] = self.host_states[host_page]
            elif to_host:
                digests = [self.slots[page, offset] for offset in offsets]
                assert POISON not in digests, "a page that is free is stored"
                self.host[host_page] = self.writers[page], digests
            else:
                self.writers[page], digests = self.host[host_page]
                self.slots |= {(page, offset): digests[offset] for offset in offsets}
                arrived[page] = i
        for page, num_moves in self.freed.items():
            if arrived.get(page, -1) < num_moves:
                self.writers.pop(page, None)
                self.slots |= {(page, offset): POISON for offset in offsets}
        self.freed = {}
        for source, target, distance in self.scheduler.memory.take_rotations():
            self.writers[target], self.rotated[target] = self.writers[source], distance
            self.slots |= {(target, offset): self.slots[source, offset] for offset in offsets}

    def _move_files(self, move: ToFiles | FromFile) -> None:
        held = self.host_states if move.is_state else self.host
        if isinstance(move, FromFile):
            held[move.host_page] = move.value
            return
        values = [held[page] for page in move.host_pages]
        contexts = [salt(move.owner)]
        for (token,) in struct.iter_unpack("i", move.key):
            contexts.append(digest(contexts[-1], token))
        if move.is_state:
            assert values == contexts[-1:], "a state of other tokens is stored"
        else:
            assert {writer for writer, _ in values} == {move.owner}, "a foreign page is stored"
            digests = [x for _, of_page in values for x in of_page]
            assert digests == contexts[-len(digests) :], "a page of other tokens is stored"
        self.files.write(move.owner, move.key, values, move.is_state)

    def _keep(self, move: KeptKeys) -> None:
        """Keeps the last keys of a prompt: which ones does not matter to the scheduler."""
        policy, size = self.scheduler.config.prompt_policy, self.page_size
        prompt = len(move.tokens)
        assert policy is not None and prompt > policy.keep
        assert len(move.sources) == -(-prompt // size)
        assert len(move.targets) == policy.num_pages(size)
        assert not {*move.sources} & {*move.targets}
        for i, position in enumerate(range(prompt - policy.keep, prompt)):
            source, target = move.sources[position // size], move.targets[i // size]
            value = self.slots[source, position % size]
            assert value != POISON, "a page that is free is kept"
            self.slots[target, i % size] = value
            self.writers[target] = self.writers[source]
        self.num_prompts_cut += 1

    def run(self, step: StepPlan) -> list[list[tuple[Sequence, int | None, int]]]:
        """Returns (sequence, sampled token or None, digest of its context) for each entry of each
        step of a burst."""
        self._move()
        self._check(step)
        for seq in step.preempted:
            self.num_computed.pop(seq.id)
        for seq in step.admitted:
            assert not (seq.params.prompt_logprobs and seq.num_computed), "not all can be scored"
            self.num_computed[seq.id] = seq.num_computed
            self.owners[seq.slot] = seq
            self.last_tokens.pop(seq.slot, None)
        on_device = (node for node in nodes(self.scheduler.cache) if not node.on_host)
        cached = {page for node in on_device for page in node.pages}
        written: dict[int, str] = {}
        steps = []
        for i in range(step.num_steps):
            entries = [entry for entry in step.entries if entry.num_steps > i]
            assert entries == step.entries[: len(entries)], "entries with fewer steps are not last"
            steps.append([self._run_entry(entry, cached, written, i) for entry in entries])
            for seq, token, _ in steps[-1]:
                if token is not None:
                    self.last_tokens[seq.slot] = token
        if self.scheduler.config.num_states:
            self._run_states(step)
        return steps

    def _run_entry(
        self, entry: ScheduledSequence, cached: set[int], written: dict[int, str], step: int
    ) -> tuple[Sequence, int | None, int]:
        """step: of a burst."""
        seq, page_size = entry.seq, self.page_size
        num_computed, num_in_flight = seq.num_computed + step, seq.num_in_flight + step
        assert self.num_computed[seq.id] == num_computed, "computed twice, or skipped"
        assert self.owners[seq.slot] is seq
        begin, end = num_computed, num_computed + entry.num_tokens
        self.num_computed[seq.id] = end
        self.num_tokens_run += entry.num_tokens
        assert end <= seq.num_dropped + len(seq.pages) * page_size
        streaming = self.scheduler.memory.streaming
        if streaming is not None:
            assert end <= streaming.block_end(begin), "a chunk is of two blocks"
            # More, if the token was void before.
            assert seq.num_dropped >= streaming.num_dropped(begin), "more is seen than the window"
        policy = self.scheduler.config.prompt_policy
        if policy is not None and seq.num_prompt > policy.keep and seq.params.max_tokens > 1:
            assert end <= seq.num_prompt or begin >= seq.num_prompt, "a chunk crosses the cut"
            expected = seq.num_prompt - policy.keep if begin >= seq.num_prompt else 0
            assert seq.num_dropped == expected, "other keys are seen than the policy keeps"
        assert (begin // page_size) >= seq.num_shared

        context = salt(seq.namespace)
        for position in range(begin):  # computed before, maybe not yet known
            if position < len(seq.tokens):
                context = digest(context, seq.tokens[position])
            else:
                context = self._read(seq, position)
            if streaming and 0 <= position - streaming.sinks < seq.num_dropped:
                continue
            if not streaming and position < seq.num_dropped:
                continue
            assert self._read(seq, position) == context, "a page does not hold the context"
        for position in range(begin, end):
            if position < len(seq.tokens):
                token = seq.tokens[position]
            else:
                assert position == len(seq.tokens) + num_in_flight - 1
                token = self.last_tokens[seq.slot]
            context = digest(context, token)
            page = seq.pages[(position - seq.num_dropped) // page_size]
            assert page not in cached, "a shared page is written"
            assert written.setdefault(page, seq.id) == seq.id, "a page is written by two"
            assert self.writers.setdefault(page, seq.namespace) == seq.namespace, "a foreign page"
            self.slots[page, (position - seq.num_dropped) % page_size] = context
        complete = end == len(seq.tokens) + num_in_flight
        assert entry.samples == complete
        return seq, next_token(context) if entry.samples else None, context

    def _run_states(self, step: StepPlan) -> None:
        """Reads all states of a step, then writes: no slot may be of two entries."""
        written: dict[int, int] = {}
        writers: dict[int, str] = {}
        for entry in step.entries:
            seq, begin, end = entry.seq, entry.begin, entry.begin + entry.num_tokens
            if begin:
                state = self.states[entry.reads_state]
                assert state == self._read(seq, begin - 1), "a state of other tokens"
            else:
                assert entry.reads_state == -1
            assert entry.writes_state >= 0
            for at, slot in {*entry.checkpoints, (end, entry.writes_state)}:
                assert begin < at <= end and slot not in written, "a state is written by two"
                assert at == end or at % self.page_size == 0
                written[slot], writers[slot] = self._read(seq, at - 1), seq.id
        for entry in step.entries:
            writer = writers.get(entry.reads_state, entry.seq.id)
            assert writer == entry.seq.id, "a state that another sequence reads is written"
        self.states |= written

    def _read(self, seq: Sequence, position: int) -> int:
        streaming = self.scheduler.memory.streaming
        if streaming and position < streaming.sinks and seq.num_dropped:
            page = seq.pages[position // self.page_size]
            assert self.rotated[page] == seq.num_dropped, "sinks at other positions"
        else:
            page = seq.pages[(position - seq.num_dropped) // self.page_size]
        value = self.slots[page, (position - seq.num_dropped) % self.page_size]
        assert value != POISON, "a page that is free is read"
        assert self.writers[page] == seq.namespace, "a foreign page is read"
        return value

    def _check(self, step: StepPlan) -> None:
        config = self.scheduler.config
        seqs = [entry.seq for entry in step.entries]
        assert len({seq.id for seq in seqs}) == len(seqs)
        assert len({seq.slot for seq in seqs}) == len(seqs) <= config.max_running
        assert all(seq.status is Status.RUNNING and seq.slot >= 0 for seq in seqs)
        assert all(entry.num_tokens > 0 for entry in step.entries)
        assert sum(entry.num_tokens for entry in step.entries) <= config.max_step_tokens
        assert len(seqs) + step.num_more_rows <= config.max_running
        steps = [entry.num_steps for entry in step.entries]
        assert step.num_steps == max(steps, default=1) <= config.burst_steps
        if step.num_steps > 1:
            assert not (step.admitted or self.scheduler.admission.may_admit), "one could enter"
            alone = (e.num_tokens == 1 and e.seq.params.grammar is None for e in step.entries)
            assert all(alone), "the host is needed between the steps"
        assert step.num_more_rows == sum(entry.num_more_rows for entry in step.entries)
        for seq, entry in zip(seqs, step.entries, strict=True):
            end = min(seq.num_computed + entry.num_tokens, seq.num_prompt - 1)
            num_scored = max(0, end - seq.num_computed) if seq.params.prompt_logprobs else 0
            assert entry.num_scored == num_scored, "a token of a prompt that nobody scores"
            assert entry.num_more_rows == min(num_scored, entry.num_tokens - 1)
        assert sum(len(seq.pages) for seq in seqs) <= config.max_kv_pages_step
        assert set(step.admitted) <= set(seqs), "admitted into nothing"
        assert not set(step.admitted) & set(step.preempted), "out and in again"
        decodes = {seq.id for seq in seqs if seq.num_computed >= seq.num_prompt}
        decodes -= {seq.id for seq in step.admitted}
        prefill = sum(e.num_tokens for e in step.entries if e.seq.id not in decodes)
        chunk = max(config.prefill_chunk, config.max_prefill_chunk, *config.step_sizes)
        assert prefill <= chunk or not decodes
        for seq in self.scheduler.running:
            is_decode = seq.num_computed >= seq.num_prompt and seq.num_pending == 1
            if is_decode and not seq.is_held:
                assert seq in seqs, "a running decode was left out"


class FakeEngine:
    """Retires a step `depth` steps after its launch, as an engine that overlaps steps does."""

    def __init__(
        self,
        scheduler: Scheduler,
        depth: int = 1,
        forces: bool = False,
        files: FakeFiles | None = None,
    ):
        self.scheduler = scheduler
        self.device = FakeDevice(scheduler)
        self.device.files = files
        self.depth = depth
        self.forces = forces
        self.flying: deque[list[list[tuple[Sequence, int | None, int]]]] = deque()
        self.voided: set[tuple[int, str]] = set()  # (index of the step, sequence)
        self.num_launched = 0  # steps; a burst is several
        self.num_retired = 0
        self.num_bursts = 0
        self.log: list[tuple] = []

    @property
    def has_work(self) -> bool:
        return bool(self.flying or self.scheduler.waiting or self.scheduler.running)

    def step(self, now: float) -> StepPlan | None:
        plan = self.scheduler.schedule(now)
        if plan is not None:
            self.log.append(
                (
                    [(e.seq.id, e.num_tokens, e.samples, e.seq.slot) for e in plan.entries],
                    [list(e.seq.pages) for e in plan.entries],
                    [[seq.id for seq in seqs] for seqs in (plan.preempted, plan.expired)],
                )
            )
            self.flying.append(self.device.run(plan))
            self.scheduler.launched(plan)
            self.num_launched += plan.num_steps
            self.num_bursts += plan.num_steps > 1
        while self.flying and (len(self.flying) > self.depth or plan is None):
            for results in self.flying.popleft():
                self._retire(results)
        return plan

    def _retire(self, results: list[tuple[Sequence, int | None, int]]) -> None:
        index = self.num_retired
        self.num_retired += 1
        for seq, token, context in results:
            if token is None or (index, seq.id) in self.voided:
                continue
            tokens = [token] + (forced_after(token, context) if self.forces else [])
            reason = None
            for i, token in enumerate(tokens):
                num_output = seq.num_output + i + 1
                if token == EOS and not seq.params.ignore_eos:
                    reason = FinishReason.STOP
                elif num_output == seq.params.max_tokens:
                    reason = FinishReason.LENGTH
                if reason is not None:
                    tokens = tokens[: i + 1]
                    break
            num_sampled = 1
            if len(tokens) > 1 and seq.status is not Status.FINISHED:
                num_sampled = seq.num_in_flight
                computed = self.device.num_computed
                if seq.status is Status.RUNNING:
                    computed[seq.id] = min(computed[seq.id], len(seq.tokens) + 1)
                later = range(index + 1, self.num_launched)
                self.voided.update((i, seq.id) for i in later)
            self.scheduler.append(seq, tokens, num_sampled)
            if reason is not None:
                self.scheduler.finish(seq, reason)
