"""Events: new tokens and text of sequences, and the numbers of each step. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from jax_attn.serve._scheduling.request import FinishReason

PHASES = ("schedule", "draft", "plan", "dispatch", "wait", "retire")


class TokenLogprob(NamedTuple):
    """Natural logarithms of probabilities under the model's own logits."""

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

    def extend(self, later: TokenEvent) -> None:
        """Appends a later event of the same sequence."""
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

    seconds: of the engine's thread, for each of PHASES. "wait" is the time for the device, which
    works during all other phases too. "draft" is all the time of a draft model, including waiting.
    "retire" is everything between the tokens and their events.
    """

    index: int
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    bucket: str = ""  # "": nothing was launched
    num_tokens: int = 0  # query tokens launched
    num_sequences: int = 0  # sequences with query tokens
    num_decodes: int = 0  # sequences with one token
    num_sampled: int = 0  # sampled tokens of the step launched before, known by now
    num_forced: int = 0  # tokens that grammars forced
    num_admitted: int = 0
    num_preempted: int = 0
