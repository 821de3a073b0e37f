"""Events: new tokens and text of sequences, and the numbers of each step. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from jax_attn.serve._scheduling.request import FinishReason

PHASES = ("schedule", "draft", "plan", "dispatch", "wait", "retire")


class TokenLogprob(NamedTuple):
    """Natural logarithms of probabilities under the model's own logits."""

    token: int
    logprob: float | None  # None: of the first token of a prompt
    top: tuple[tuple[int, float], ...]  # (token, logprob), the likeliest first


@dataclass(slots=True)
class TokenEvent:
    """What is new of one sequence since its last event."""

    seq_id: str
    tokens: list[int] = field(default_factory=list)  # the one that ends the text included
    text: str = ""  # what may be shown by now: whole characters, nothing of a stop string
    # Of each of `tokens`, if asked for; in the first event those of the prompt before, likewise.
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None  # this is the last event
    num_cached_tokens: int | None = None  # of the prompt; in the first event that has tokens
    # When it first ran, on the clock of `arrival`; there, and in the last event.
    admitted: float | None = None
    error: str | None = None  # a sentence, with finish_reason 'error'
    is_clients_fault: bool = False  # the error: the request cannot be served, here or elsewhere

    def extend(self, later: TokenEvent) -> None:
        """Joins a later event of the sequence to this one."""
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


@dataclass(slots=True)
class StepStats:
    """One call of Engine.step.

    seconds: of the engine's thread, in each of PHASES. "wait" is for the device, and the device
      works during all others; "draft" is all that a draft model takes, waiting included; "retire"
      holds everything between the tokens and their events.
    """

    index: int
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    bucket: str = ""  # "": nothing was launched
    num_tokens: int = 0  # query tokens launched
    num_sequences: int = 0  # that they belong to
    num_decodes: int = 0  # of these, those with one token
    num_sampled: int = 0  # tokens known by now of the step launched before
    num_forced: int = 0  # tokens that grammars forced
    num_admitted: int = 0
    num_preempted: int = 0
