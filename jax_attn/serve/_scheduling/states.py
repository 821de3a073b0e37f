"""Recurrent states of running sequences, and the checkpoints from which others go on.

A layer without keys and values has one state for each sequence. A slot holds the states of all
these layers after some number of tokens. Slots are the second memory beside pages: a running
sequence has one slot of its own, and the prefix cache has checkpoints, each at the end of a node.

- A sequence begins with the deepest checkpoint of its prefix. It reads the checkpoint's slot in its
  first step and writes its own, so nothing is copied, and any number of sequences can do so.
- A step writes a checkpoint beside the sequence's own states. Checkpoints are at ends of pages: the
  last one of a prompt, where two requests part, every checkpoint_tokens tokens of a long prompt,
  and the last of every 64 tokens of the output, for the next turn of a chat.
- A preempted sequence keeps its checkpoints in the cache and loses its own states.
- A step with drafts writes the states after the token before them, so refused drafts leave no
  trace. Accepted ones go through the model again, in front of the sequence's next token: this costs
  rows of a step, and no slots. (The alternative is a slot for each draft.)

A running sequence has at most two slots between steps: its own, and the checkpoint of its output.
All others go to the cache when their step is launched, and the cache gives them back when they are
needed. So with two slots for each sequence nobody waits for one.
"""

from __future__ import annotations

from collections import Counter

from jax_attn.serve._scheduling.pages import PageAllocator
from jax_attn.serve._scheduling.prefix_cache import Node, RadixCache, num_common
from jax_attn.serve._scheduling.request import Sequence
from jax_attn.serve._scheduling.step_plan import ScheduledSequence, SchedulerConfig

_OUTPUT_TOKENS = 64  # between checkpoints of an output, which has the last one only
_MOST_COMPARED = 16  # waiting sequences that a prompt is compared with, to find where they part


class States:
    """Gives slots to running sequences and to checkpoints, and takes them back."""

    def __init__(self, config: SchedulerConfig, allocator: PageAllocator, cache: RadixCache):
        self._config, self._allocator, self._cache = config, allocator, cache
        page_size = config.page_size
        self._every_prompt = -(-config.checkpoint_tokens // page_size) * page_size
        every = min(_OUTPUT_TOKENS, config.checkpoint_tokens)
        self._every_output = -(-every // page_size) * page_size

    @property
    def num_available(self) -> int:
        """Slots that are free, or checkpoints that nobody is about to read."""
        return self._allocator.num_free + self._cache.num_evictable_states

    def counts(self) -> dict[str, int]:
        """Slots that are free, checkpoints of the cache, and used by running sequences."""
        free, cached = self._allocator.num_free, len(self._cache.nodes_with_state)
        return {"free": free, "cached": cached, "used": self._config.num_states - free - cached}

    # ---- a sequence ----

    def may_enter(self, has_checkpoint: bool) -> bool:
        """Whether there are slots for a sequence and for the checkpoint that it begins with."""
        return self.num_available >= 1 + has_checkpoint

    def enter(self, seq: Sequence, node: Node | None, num_cached_tokens: int) -> None:
        """Gives `seq` its slot and the checkpoint of a node, which `seq` has locked; None: zeros.

        num_cached_tokens: that the cache has pages of. There it parts from an earlier sequence.
        """
        if node is not None:
            seq.state_node = node
            self._cache.hold_state(node)
        slot = self._allocate()
        assert slot is not None
        seq.state = slot
        if not self._config.prefix_cache:
            return
        end = (seq.num_prompt - 1) // self._config.page_size * self._config.page_size
        seq.wanted_states = set(range(self._every_prompt, end, self._every_prompt))
        seq.wanted_states |= {end, num_cached_tokens}

    def release(self, seq: Sequence) -> None:
        """Takes all slots of `seq` that the cache did not get."""
        if seq.state_node is not None:
            self._cache.release_state(seq.state_node)
        self._allocator.free([seq.state, *seq.checkpoints.values(), *seq.spare_states])
        seq.state, seq.read_state, seq.state_node, seq.num_behind = -1, -1, None, 0
        seq.wanted_states, seq.checkpoints, seq.spare_states = set(), {}, []

    def adopt(self, node: Node) -> list[int]:
        """Gives a node a slot for states from elsewhere. [] if it has states, or none is left."""
        if node.state >= 0 or (slot := self._allocate()) is None:
            return []
        self._cache.put_state(node, slot)
        return [slot]

    def take_checkpoints(self, seq: Sequence, num_tokens: int) -> list[tuple[int, int]]:
        """Takes from `seq` its checkpoints up to num_tokens: (tokens, slot), ascending."""
        taken = [(at, seq.checkpoints[at]) for at in sorted(seq.checkpoints) if at <= num_tokens]
        for at, _ in taken:
            del seq.checkpoints[at]
        return taken

    def put(self, seq: Sequence, slot: int) -> None:
        """Puts a checkpoint at the end of what `seq` shares."""
        assert seq.node is not None
        if not self._cache.put_state(seq.node, slot):
            self._allocator.free([slot])

    def want_part(self, seq: Sequence, others: list[tuple[Sequence, int]]) -> None:
        """Wants a checkpoint where most of the others, which wait, part from `seq`.

        others: with the number of cached tokens of each.
        """
        if not self._config.prefix_cache or seq.params.prompt_logprobs:
            return
        page_size = self._config.page_size
        saved: Counter[int] = Counter()
        for other, num_cached in others[:_MOST_COMPARED]:
            if other is seq or other.namespace != seq.namespace:
                continue
            most = min(seq.num_prompt, len(other.tokens)) - 1
            at = num_common(seq.packed(most), other.packed(most), most) // page_size * page_size
            if at > max(num_cached, seq.num_computed):
                saved[at] += at - num_cached
        if saved:
            seq.wanted_states.add(max(saved, key=lambda at: (saved[at], at)))

    # ---- a step ----

    def plan(self, entry: ScheduledSequence, most: int) -> int:
        """Says which slots a scheduled sequence reads and writes.

        most: checkpoints to write beside the sequence's own states. Returns how many it writes.
        """
        seq, begin = entry.seq, entry.begin
        end = begin + entry.num_certain
        if seq.state_node is not None:
            entry.reads_state = seq.state_node.state
        elif begin:
            entry.reads_state = seq.state if seq.read_state < 0 else seq.read_state
        entry.writes_state = seq.state
        if not self._config.prefix_cache:
            return 0
        spare, checkpoints = list(seq.spare_states), []
        wanted = sorted(at for at in seq.wanted_states if begin < at <= end)
        for at in wanted[max(0, len(wanted) - most) :]:
            if (slot := self._spare(seq, spare)) is not None:
                checkpoints.append((at, slot))
        at = end // self._every_output * self._every_output
        if at > max(begin, seq.num_prompt) and at not in seq.wanted_states:
            old = next((p for p in seq.checkpoints if p > seq.num_prompt), None)
            own = self._spare(seq, spare) if old is None else seq.checkpoints[old]
            if own is not None and at == end:
                # The sequence goes on from its checkpoint: nothing more is written.
                entry.writes_state = own
                checkpoints.append((at, own))
            elif own is not None and len(checkpoints) < most:
                checkpoints.append((at, own))
        entry.checkpoints = tuple(checkpoints)
        return sum(slot != entry.writes_state for _, slot in checkpoints)

    def launched(self, entry: ScheduledSequence) -> None:
        """Records that the device will write the slots of `entry`."""
        seq = entry.seq
        if seq.state_node is not None:
            self._cache.release_state(seq.state_node)
            seq.state_node = None
        seq.read_state = entry.writes_state
        for at, slot in entry.checkpoints:
            if slot in seq.spare_states:
                seq.spare_states.remove(slot)
            else:  # that of an earlier place
                seq.checkpoints = {p: s for p, s in seq.checkpoints.items() if s != slot}
            seq.checkpoints[at] = slot

    def _spare(self, seq: Sequence, spare: list[int]) -> int | None:
        """A slot for a checkpoint, which stays the sequence's own until the step is launched."""
        if spare:
            return spare.pop()
        slot = self._allocate()
        if slot is not None:
            seq.spare_states.append(slot)
        return slot

    def _allocate(self) -> int | None:
        if not self._allocator.num_free and not self._cache.evict_state():
            return None
        slots = self._allocator.allocate(1)
        return slots[0] if slots else None

    def check_integrity(self, running: list[Sequence]) -> None:
        """Raises AssertionError unless every slot is free, a checkpoint, or one sequence's."""
        self._allocator.check_integrity()
        owned = [
            slot
            for seq in running
            for slot in (seq.state, *seq.checkpoints.values(), *seq.spare_states)
        ]
        cached = [node.state for node in self._cache.nodes_with_state]
        assert len({*owned, *cached}) == len(owned) + len(cached), "a state has two owners"
        assert all(map(self._allocator.is_allocated, owned + cached)), "a state in use is free"
        num_owned = self._allocator.num_free + len(owned) + len(cached)
        assert num_owned == self._config.num_states, f"{num_owned} of {self._config.num_states}"
        holders: dict[int, int] = {}
        for seq in running:
            if seq.state_node is not None:
                serial = seq.state_node.serial
                holders[serial] = holders.get(serial, 0) + 1
        for node in self._cache.nodes_with_state:
            assert node.state_holders == holders.get(node.serial, 0), f"node {node.serial}: holds"
