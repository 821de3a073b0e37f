"""Events: new tokens and text of sequences, and the numbers of each step. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from jax_attn.serve._scheduling.request import FinishReason

PHASES = ("schedule", "draft", "pictures", "plan", "dispatch", "wait", "retire")


FIRST_VERSION = "0"  # of the weights that an engine is made with


class TokenLogprob(NamedTuple):
    """Natural logarithms of probabilities: of the model's own logits, or of the distribution
    sampled from (SamplingParams.logprobs_of)."""

    token: int
    logprob: float | None  # None: the first token of a prompt
    top: tuple[tuple[int, float], ...]  # (token, logprob), the likeliest first


@dataclass(slots=True)
class TokenEvent:
    """The new output of one sequence since its last event."""

    seq_id: str
    tokens: list[int] = field(default_factory=list)  # including the token that ends the text
    text: str = ""  # text that may be shown: whole characters, no part of a stop string
    # For each of `tokens`, if requested. In the first event the prompt's tokens come before.
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None  # this is the last event
    num_cached_tokens: int | None = None  # of the prompt; in the first event that has tokens
    # When it first ran, on the clock of `arrival`; in that event and in the last one.
    admitted: float | None = None
    error: str | None = None  # a sentence, with finish_reason 'error'
    is_clients_fault: bool = False  # the request can never be served, here or elsewhere
    # The version of the weights that made each of `tokens`. None: the engine's first weights.
    versions: list[str] | None = None

    def extend(self, later: TokenEvent) -> None:
        """Appends a later event of the same sequence."""
        if self.versions is not None or later.versions is not None:
            self.versions = [*self.all_versions(), *later.all_versions()]
        self.tokens += later.tokens
        self.text += later.text
        if later.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *later.logprobs]
        self.finish_reason, self.error = later.finish_reason, later.error
        self.is_clients_fault = later.is_clients_fault
        if later.num_cached_tokens is not None:
            self.num_cached_tokens = later.num_cached_tokens
        if later.admitted is not None:
            self.admitted = later.admitted

    def all_versions(self) -> list[str]:
        """The version of each token."""
        return [FIRST_VERSION] * len(self.tokens) if self.versions is None else self.versions


@dataclass(slots=True)
class StepStats:
    """One call of Engine.step.

    seconds: of the engine's thread, for each of PHASES. "wait" is the time for the device, which
    works during all other phases too. "draft" is all the time of a draft model, including waiting,
    and "pictures" that of a vision tower.
    "retire" is everything between the tokens and their events.
    """

    index: int
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    bucket: str = ""  # "": nothing was launched
    num_steps: int = 1  # more: a burst, see StepPlan
    num_tokens: int = 0  # query tokens launched, in the first step of a burst
    num_decodes: int = 0  # sequences with one token
