"""From tokens to text, a token at a time: whole characters only, and nothing of a stop string."""

from __future__ import annotations

import codecs
import functools
from collections.abc import Sequence
from typing import Any, Protocol

from jax_attn.serve.token_bytes import TokenBytes

_REPLACEMENT = "\ufffd"  # what decoding makes of a character that is not complete yet


class _Text(Protocol):
    """The text of one sequence; what `push` and `flush` return, joined, is what its tokens decode
    to."""

    def push(self, token: int) -> str: ...

    def flush(self) -> str: ...


class Texts:
    """Begins the texts of one tokenizer's tokens."""

    def __init__(self, tokenizer: Any):
        """tokenizer: tokenizers.Tokenizer."""
        self._tokenizer, token_bytes = tokenizer, TokenBytes(tokenizer)
        self._are_bytes = token_bytes.joined_are_text

        @functools.cache
        def shown_bytes(token: int) -> bytes:
            return b"" if token in token_bytes.special else token_bytes(token)

        self._bytes_of = token_bytes, shown_bytes

    def begin(self, skip_special_tokens: bool) -> _Text:
        if self._are_bytes:
            return _Bytes(self._bytes_of[skip_special_tokens])
        return _Window(self._tokenizer, skip_special_tokens)


class _Bytes:
    """Of a byte-level tokenizer: a table and UTF-8, a tenth of the time of its decoder."""

    __slots__ = ("_bytes_of", "_decode")

    def __init__(self, bytes_of: Any):
        self._bytes_of = bytes_of
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token: int) -> str:
        return self._decode(self._bytes_of(token))

    def flush(self) -> str:
        return self._decode(b"", True)


class _Window:
    """Of any tokenizer. tokens[begin:read] are decoded and known; they stay as context, for
    decoders that treat the beginning of a text in a special way (SentencePiece strips a space)."""

    __slots__ = ("_tokenizer", "_skip", "_tokens", "_begin", "_read")

    def __init__(self, tokenizer: Any, skip_special_tokens: bool):
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._tokens: list[int] = []
        self._begin = self._read = 0

    def push(self, token: int) -> str:
        self._tokens.append(token)
        return self._new_text(at_end=False)

    def flush(self) -> str:
        return self._new_text(at_end=True)

    def _new_text(self, at_end: bool) -> str:
        known = self._decode(self._tokens[self._begin : self._read])
        text = self._decode(self._tokens[self._begin :])
        if text.endswith(_REPLACEMENT) and not at_end:
            return ""
        if len(text) > len(known):  # a token without text would be no context
            self._begin, self._read = self._read, len(self._tokens)
        return text[len(known) :]

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=self._skip) if tokens else ""


class Detokenizer:
    """The text of one sequence. What `push` and `flush` return, joined, is the text so far.

    Without a stop string in it, that is tokenizer.decode of all tokens. A character comes when its
    last token has, and what may be the beginning of a stop string when it has proved not to be.
    """

    def __init__(self, texts: Texts, stop: Sequence[str] = (), skip_special_tokens: bool = True):
        """stop: text ends before the first of them that occurs."""
        if any(not text for text in stop):
            raise ValueError("stop: expected strings that are not empty, got ''.")
        self._text, self._stop = texts.begin(skip_special_tokens), tuple(stop)
        self._held = ""  # decoded, but maybe the beginning of a stop string
        self.stopped = False

    def push(self, token: int, *, may_stop: bool = True) -> str:
        """The text that `token` completes. Sets `stopped` once a stop string is complete.

        may_stop: whether stop strings that end in this token count.
        """
        if not self._stop:
            return self._text.push(token)
        if self.stopped:
            return ""
        self._held += self._text.push(token)
        return self._release(may_stop)

    def flush(self) -> str:
        """The rest of the text; an incomplete character becomes U+FFFD. No push after it."""
        if self.stopped:
            return ""
        text = self._held + self._text.flush()
        self._held = ""
        return text

    def _release(self, may_stop: bool) -> str:
        """Takes from the held text what is safe to show."""
        found = [i for i in (self._held.find(stop) for stop in self._stop) if i >= 0]
        if found and may_stop:
            text, self._held = self._held[: min(found)], ""
            self.stopped = True
            return text
        keep = max((overlap(self._held, stop) for stop in self._stop), default=0)
        text, self._held = (
            self._held[: len(self._held) - keep],
            self._held[len(self._held) - keep :],
        )
        return text


def overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a beginning of `stop`, and not all of it."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((n for n in lengths if text.endswith(stop[:n])), 0)
