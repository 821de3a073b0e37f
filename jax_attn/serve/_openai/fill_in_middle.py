"""Prompts for the text between a prefix and a suffix, for models that were trained on such."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass


@dataclass(frozen=True)
class FillInMiddle:
    """marks: what comes before the prefix, before the suffix, and behind them; "": nothing does."""

    prefix: str
    suffix: str
    middle: str
    suffix_is_first: bool = False
    ends: tuple[str, ...] = ()  # further tokens that end the text, where the model has them

    def prompt(self, prefix: str, suffix: str) -> str:
        parts = [self.prefix + prefix, self.suffix + suffix]
        if self.suffix_is_first:
            parts.reverse()
        return "".join(parts) + self.middle

    @property
    def stops(self) -> tuple[str, ...]:
        """The tokens that end the text."""
        marks = (self.prefix, self.suffix, self.middle, *self.ends)
        return tuple(mark for mark in marks if mark)


# The model cards and the code of Qwen2.5-Coder and CodeGemma, of StarCoder2 and Granite, of
# DeepSeek-Coder and DeepSeek-V3, and of Codestral (mistral_common, encode_fim) have these.
_FORMATS = (
    FillInMiddle(
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ends=("<|fim_pad|>", "<|file_sep|>", "<|file_separator|>", "<|repo_name|>"),
    ),
    FillInMiddle("<fim_prefix>", "<fim_suffix>", "<fim_middle>", ends=("<fim_pad>", "<file_sep>")),
    FillInMiddle("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    FillInMiddle("[PREFIX]", "[SUFFIX]", "", suffix_is_first=True, ends=("[MIDDLE]",)),
)


def format_of(tokens: Container[str]) -> FillInMiddle | None:
    """The format whose marks are all tokens of the model; None: there is none."""
    for format in _FORMATS:
        if all(mark in tokens for mark in (format.prefix, format.suffix, format.middle) if mark):
            return format
    return None
