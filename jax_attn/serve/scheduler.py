"""What the next step computes: admission, token budget, preemption, deadlines. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass, field

from jax_attn.serve.pages import PageAllocator
from jax_attn.serve.prefix_cache import RadixCache
from jax_attn.serve.request import FinishReason, Sequence


class QueueFull(Exception):
    """As many sequences wait as `max_waiting` allows. Try again later."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    page_size: int
    num_pages: int
    max_running: int  # sequences that run at once; slots 0 .. max_running - 1
    max_step_tokens: int  # query tokens of a step
    prefill_chunk: int  # of them, prompt tokens (of all sequences) in a step that also decodes
    max_waiting: int  # sequences that have never run
    max_kv_pages_step: int  # entries of a step's page table, shared pages counted for each sequence
    starvation_steps: int = 16  # a sequence overtaken in that many steps is overtaken no more
    prefix_cache: bool = True


@dataclass(slots=True)
class ScheduledSequence:
    """seq.tokens[num_computed : num_computed + num_tokens] go through the model, in seq.pages.

    An index that seq.tokens does not have yet is the sample in flight, to be read from the device.
    """

    seq: Sequence
    num_tokens: int
    samples: bool  # the last token's logits are sampled


@dataclass(slots=True)
class StepPlan:
    entries: list[ScheduledSequence]
    admitted: list[Sequence] = field(default_factory=list)  # of the entries, new in their slots
    preempted: list[Sequence] = field(default_factory=list)  # lost their slots and pages
    expired: list[Sequence] = field(default_factory=list)  # finished: 'deadline'


class Scheduler:
    """Owns the pages, the prefix cache, and every sequence from `add` to `finish`."""

    def __init__(self, config: SchedulerConfig):
        self.config = config
        self.allocator = PageAllocator(config.num_pages)
        self.cache = RadixCache(self.allocator, config.page_size)

    @property
    def waiting(self) -> list[Sequence]:
        """In order of priority and arrival."""
        raise NotImplementedError

    @property
    def running(self) -> list[Sequence]:
        """In order of priority and arrival."""
        raise NotImplementedError

    @property
    def max_sequence_tokens(self) -> int:
        """Prompt and max_tokens together, at most."""
        raise NotImplementedError

    def add(self, *seqs: Sequence) -> None:
        """Takes sequences in, all or none (give the n of a request together).

        Raises:
          QueueFull: there is no room for all of them.
          ValueError: a sequence that could never run (no prompt, longer than max_sequence_tokens),
            or an id in use.
        """
        raise NotImplementedError

    def abort(self, seq_id: str) -> Sequence | None:
        """Finishes a sequence in any state; None if there is none of that id (any more)."""
        raise NotImplementedError

    def schedule(self, now: float) -> StepPlan | None:
        """The next step, or None if there is nothing to do or report until something changes.

        `entries` may be empty: then there is only something to report. Each step with entries is to
        be followed by `launched` once the device has it, before the next `schedule`; a step that is
        never launched is simply scheduled again.
        """
        raise NotImplementedError

    def launched(self, step: StepPlan) -> None:
        """The device will run `step`, after all steps launched before."""
        raise NotImplementedError

    def append(self, seq: Sequence, tokens: list[int], num_sampled: int = 1) -> None:
        """The host knows the next tokens: a sample, forced ones, or a sample and what it forces.

        num_sampled: samples in flight that are settled by this, known or not to be used. Forced
          tokens after a sample void one already launched behind it: settle both here, and ignore
          the second when it arrives.

        Of a sequence that is finished by now, tokens are ignored.
        """
        raise NotImplementedError

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """Ends a sequence in any state. Its full pages stay cached, unless `reason` is ERROR."""
        raise NotImplementedError

    def check_integrity(self) -> None:
        """Raises AssertionError unless every page, lock, slot and counter is accounted for."""
        raise NotImplementedError
