"""A scheduled step, and the capacities that limit it. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from jax_attn.serve._scheduling.kv_policies import KvPolicy, num_pages_needed
from jax_attn.serve._scheduling.pictures import Picture
from jax_attn.serve._scheduling.prompt_policy import PromptPolicy
from jax_attn.serve._scheduling.request import Sequence
from jax_attn.serve._scheduling.streaming import Streaming, StreamingPages
from jax_attn.serve._scheduling.tenants import TenantLimits

STARVATION_SECONDS = 10


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Capacities of a step, and scheduling policy.

    Raises:
      ValueError: a capacity is below 1, or max_step_tokens is too small for all decodes.
    """

    page_size: int
    num_pages: int
    max_running: int  # running sequences, and rows of a step's logits
    max_step_tokens: int  # query tokens of a step
    # About how many are prompt tokens (of all sequences) in a step that also decodes; not exact, as
    # steps fill one of step_sizes. It grows up to max_prefill_chunk if many wait.
    prefill_chunk: int
    # Sequences. Preempted ones count, but are never refused. A tenant with less than its share of
    # the queue may enter even if others have filled it.
    max_waiting: int
    max_kv_pages_step: int  # entries of a step's page table; shared pages count once per sequence
    max_prefill_chunk: int = 0  # below prefill_chunk: chunks do not grow
    # A sequence that has waited so long since it might have entered is not overtaken any more.
    starvation_seconds: float = STARVATION_SECONDS
    prefix_cache: bool = True
    step_sizes: tuple[int, ...] = ()  # sizes, in tokens, that steps are padded to
    # Slots of recurrent states, of running sequences and checkpoints; 0: the model has no states.
    num_states: int = 0
    checkpoint_tokens: int = 2048  # between the checkpoints of a long prompt
    num_host_pages: int = 0  # of the prefix cache in the host's memory
    num_host_states: int = 0  # and slots of states
    # Tokens of a picture see each other, so a step has all of them that are not computed, or none.
    whole_pictures: bool = False
    step_checkpoints: int = 16  # checkpoints that a step writes; others are left out
    tenant_limits: TenantLimits = TenantLimits()  # of each tenant
    kv_policy: KvPolicy | None = None  # None: a sequence keeps all its pages; not with states
    burst_steps: int = 1  # the most steps that are scheduled at once, see StepPlan.num_steps

    def __post_init__(self) -> None:
        for name in (
            "page_size", "num_pages", "max_running", "max_step_tokens", "prefill_chunk",
            "max_waiting", "max_kv_pages_step", "burst_steps",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if not self.starvation_seconds >= 0:
            raise ValueError(
                f"starvation_seconds: expected at least 0, got {self.starvation_seconds}"
            )
        if self.max_step_tokens < self.max_running:
            raise ValueError(
                f"max_step_tokens: expected at least max_running {self.max_running}, so that every "
                f"decode fits in a step, got {self.max_step_tokens}"
            )
        if self.num_states and self.num_states < 2 * self.max_running:
            raise ValueError(
                f"num_states: expected at least 2 for each of max_running {self.max_running} "
                f"sequences, got {self.num_states}"
            )
        if self.burst_steps > 1 and (self.num_states or self.kv_policy is not None):
            raise ValueError(
                "burst_steps: expected 1 with recurrent states or a kv_policy, got"
                f" {self.burst_steps}"
            )
        if self.kv_policy is not None:
            self._check_kv_policy()

    def _check_kv_policy(self) -> None:
        assert not self.num_states
        assert self.kv_policy is not None
        fewest = num_pages_needed(self.kv_policy, self.page_size)
        for name in ("num_pages", "max_kv_pages_step"):
            if getattr(self, name) < fewest:
                raise ValueError(
                    f"{name}: expected at least {fewest}, which a sequence needs"
                    f" with kv_policy {self.kv_policy}, got {getattr(self, name)}"
                )

    @property
    def streaming(self) -> StreamingPages | None:
        """kv_policy in pages, if it is for texts without an end."""
        if not isinstance(self.kv_policy, Streaming):
            return None
        return StreamingPages(self.kv_policy, self.page_size)

    @property
    def prompt_policy(self) -> PromptPolicy | None:
        """kv_policy, if it is for prompts that have been read."""
        return self.kv_policy if isinstance(self.kv_policy, PromptPolicy) else None

    @property
    def num_kept_pages(self) -> int:
        """Pages of what a prompt keeps, which a sequence holds beside those of the prompt."""
        return 0 if self.prompt_policy is None else self.prompt_policy.num_pages(self.page_size)


@dataclass(slots=True)
class ScheduledSequence:
    """seq.tokens[begin : begin + num_tokens] go through the model, in seq.pages.

    With a kv policy they are the last of those pages, see Sequence.num_dropped.

    An index beyond seq.tokens is the sample in flight, which is read from the device.
    """

    seq: Sequence
    begin: int
    num_tokens: int
    samples: bool  # whether the last token's logits are sampled
    # Leading tokens whose logits give the logprob of the prompt's next token.
    num_scored: int = 0
    num_more_rows: int = 0  # rows of logits besides the last token's: for scored tokens or drafts
    # The last of the tokens. Each is accepted if it equals the sample before it.
    drafts: tuple[int, ...] = ()
    num_again: int = 0  # leading tokens that were computed before, for the states alone
    # The tokens that go through the model are so many behind those of the positions: 1 for
    # multi-token prediction.
    num_ahead: int = 0
    num_steps: int = 1  # of a burst in which it takes part: the first ones
    # Slots of recurrent states: the one to begin with (-1: zeros), the one that gets the states
    # after the last token, and those of checkpoints by their number of tokens. One of them may be
    # the one that is written anyway.
    reads_state: int = -1
    writes_state: int = -1
    checkpoints: tuple[tuple[int, int], ...] = ()

    @property
    def num_certain(self) -> int:
        """Tokens before the drafts: the states that are written are those after them."""
        return self.num_tokens - len(self.drafts)

    @property
    def num_launched(self) -> int:
        """Tokens that go through the model: in a burst one more in each further step."""
        return self.num_tokens + self.num_steps - 1

    @property
    def pictures(self) -> list[Picture]:
        """The pictures that some of the tokens show."""
        end = self.begin + self.num_tokens
        return [x for x in self.seq.pictures if x.begin < end and self.begin < x.end]


@dataclass(slots=True)
class StepPlan:
    """A step, or a burst: several steps of the same decodes, scheduled and launched at once.

    Each later step has the samples of the one before. Entries with fewer steps are last.
    """

    entries: list[ScheduledSequence] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)  # entries with new slots
    # Sequences that lost their slots and pages.
    preempted: list[Sequence] = field(default_factory=list)
    expired: list[Sequence] = field(default_factory=list)  # finished: 'deadline'
    num_more_rows: int = 0  # of all entries
    num_steps: int = 1  # more: a burst
    is_closed: bool = False  # no more admissions: a sequence that may not be overtaken has no room
