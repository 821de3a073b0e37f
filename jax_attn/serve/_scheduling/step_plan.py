"""A step as it is scheduled, and the capacities that bound it. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from jax_attn.serve._scheduling.request import Sequence
from jax_attn.serve._scheduling.tenants import TenantLimits


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


@dataclass(slots=True)
class StepPlan:
    entries: list[ScheduledSequence] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)  # of the entries, new in their slots
    preempted: list[Sequence] = field(default_factory=list)  # lost their slots and pages
    expired: list[Sequence] = field(default_factory=list)  # finished: 'deadline'
    num_more_rows: int = 0  # of all entries
    is_closed: bool = False  # nobody gets in any more: one that may not be overtaken has no room
