"""What the engine returns. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from jax_attn.serve._scheduling.events import TokenLogprob


@dataclass(slots=True)
class Completion:
    """One text.

    tokens: including the one that ended the text. text: without stop strings.
    logprobs: one of each token, if asked for. TokenLogprob: token, logprob, and `top`, pairs of the
      likeliest tokens.
    versions: for each token the name of the weights that made it; "0": the first.
    finish_reason: "stop", "length", "deadline", "abort" (paused with end=True) or "error".
    error: a sentence, with finish_reason "error".
    """

    index: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    versions: list[str] = field(default_factory=list)
    finish_reason: str = ""
    error: str | None = None

    def token_logprobs(self) -> np.ndarray:
        """The logprobs of the tokens, [number of tokens] f32. Raises ValueError without any."""
        if self.logprobs is None:
            raise ValueError("token_logprobs: expected SamplingParams(logprobs=True), got none.")
        return np.array([each.logprob for each in self.logprobs], np.float32)


@dataclass(slots=True)
class Output:
    """The completions of one prompt.

    prompt: the text, if it was one; of messages what the chat template made of them.
    prompt_logprobs: of each prompt token, if asked for; that of the first is None.
    num_cached_tokens: of the prompt, found in the prefix cache by the first completion.
    """

    prompt: str | None
    prompt_tokens: list[int]
    completions: list[Completion]
    prompt_logprobs: list[TokenLogprob] | None = None
    num_cached_tokens: int = 0

    @property
    def text(self) -> str:
        """The text of the first completion."""
        return self.completions[0].text

    @property
    def tokens(self) -> list[int]:
        """The tokens of the first completion."""
        return self.completions[0].tokens


@dataclass(slots=True)
class Chunk:
    """A part of a text, as a stream brings it. index: of the completion."""

    index: int
    text: str
    tokens: list[int]
    logprobs: list[TokenLogprob] | None = None
    versions: list[str] = field(default_factory=list)
    finish_reason: str | None = None  # in the last chunk of a completion
    error: str | None = None


@dataclass(slots=True)
class Scores:
    """The log-probabilities of given tokens.

    logprobs: [number of tokens - 1] f32. logprobs[i] is that of tokens[i + 1] after those before.
    version: of the weights when the scores were complete.
    """

    tokens: list[int]
    logprobs: np.ndarray
    version: str
