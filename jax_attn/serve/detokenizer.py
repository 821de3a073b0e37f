"""From tokens to text, a token at a time: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_REPLACEMENT = "\ufffd"  # what decoding makes of a character that is not complete yet


class Detokenizer:
    """The text of one sequence. What `push` and `flush` return, joined, is the text so far.

    Without a stop string in it, that is tokenizer.decode of all tokens. A character comes when its
    last token has, and what may be the beginning of a stop string when it has proved not to be.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()):
        """tokenizer: tokenizers.Tokenizer. stop: text ends before the first of them that occurs."""
        if any(not text for text in stop):
            raise ValueError("stop: expected strings that are not empty, got ''.")
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        # tokens[begin:read] are decoded and known; they stay as context, for decoders that treat
        # the beginning of a text in a special way (SentencePiece strips a space there).
        self._tokens: list[int] = []
        self._begin = self._read = 0
        self._held = ""  # decoded, but maybe the beginning of a stop string
        self.stopped = False

    def push(self, token: int, *, may_stop: bool = True) -> str:
        """The text that `token` completes. Sets `stopped` once a stop string is complete.

        may_stop: whether stop strings that end in this token count.
        """
        if self.stopped:
            return ""
        self._tokens.append(token)
        self._held += self._new_text(at_end=False)
        return self._release(may_stop)

    def flush(self) -> str:
        """The rest of the text; an incomplete character becomes U+FFFD. No push after it."""
        if self.stopped:
            return ""
        text = self._held + self._new_text(at_end=True)
        self._held = ""
        return text

    def _new_text(self, at_end: bool) -> str:
        known = self._decode(self._tokens[self._begin : self._read])
        text = self._decode(self._tokens[self._begin :])
        if text.endswith(_REPLACEMENT) and not at_end:
            return ""
        if len(text) > len(known):  # a token without text would be no context
            self._begin, self._read = self._read, len(self._tokens)
        return text[len(known) :]

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True) if tokens else ""

    def _release(self, may_stop: bool) -> str:
        """Takes from the held text what is safe to show."""
        found = [i for i in (self._held.find(stop) for stop in self._stop) if i >= 0]
        if found and may_stop:
            text, self._held = self._held[: min(found)], ""
            self.stopped = True
            return text
        keep = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        text, self._held = (
            self._held[: len(self._held) - keep],
            self._held[len(self._held) - keep :],
        )
        return text


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a beginning of `stop`, and not all of it."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((n for n in lengths if text.endswith(stop[:n])), 0)
