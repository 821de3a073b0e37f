"""Turns tokens into text, one at a time: whole characters only, and no part of a stop string."""

from __future__ import annotations

import codecs
import functools
from collections.abc import Callable, Sequence
from typing import Protocol

from jax_attn.models._weights.protocols import Tokenizer
from jax_attn.serve._text.stop_strings import StopString
from jax_attn.serve._text.token_bytes import TokenBytes

_REPLACEMENT = "\ufffd"  # the decoder's output for an incomplete character


class _Text(Protocol):
    """The text of one sequence: the joined results of `push` and `flush`."""

    def push(self, token: int) -> str: ...

    def flush(self) -> str: ...


class Texts:
    """Creates the texts of one tokenizer's tokens."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer, token_bytes = tokenizer, TokenBytes(tokenizer)
        self._are_bytes = token_bytes.joined_are_text
        self._byte_of = {} if self._are_bytes else token_bytes.byte_tokens()

        @functools.cache
        def shown_bytes(token: int) -> bytes:
            return b"" if token in token_bytes.special else token_bytes(token)

        self._bytes_of = token_bytes, shown_bytes
        self._special = token_bytes.special
        self._word = None if self._are_bytes else token_bytes.word()

    def begin(self, skip_special_tokens: bool, before: Sequence[int] = ()) -> _Text:
        """before: tokens from whose text the new one goes on; without any it is a text's begin."""
        if self._are_bytes:
            return _Bytes(self._bytes_of[skip_special_tokens])
        hidden = self._special if skip_special_tokens else ()
        goes_on = any(token not in hidden for token in reversed(before))
        context = [self._word] if goes_on and self._word is not None else []
        return _Window(self._tokenizer, skip_special_tokens, self._byte_of, context)


class _Bytes:
    """Text of a byte-level tokenizer: a table and UTF-8, in a tenth of its decoder's time."""

    __slots__ = ("_bytes_of", "_decode")

    def __init__(self, bytes_of: Callable[[int], bytes]):
        self._bytes_of = bytes_of
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token: int) -> str:
        return self._decode(self._bytes_of(token))

    def flush(self) -> str:
        return self._decode(b"", True)


class _Window:
    """Text of any tokenizer.

    New tokens are decoded after some known ones, because decoders treat the beginning of a text
    differently (SentencePiece strips a space). At first a word stands for the text before: its own
    last tokens may be a part of a character.

    SentencePiece's bytes are decoded in runs; in a run that is not UTF-8 each becomes U+FFFD.
    """

    __slots__ = ("_tokenizer", "_skip", "_byte_of", "_known", "_new", "_run_is_broken")

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool,
        byte_of: dict[int, bytes],
        context: list[int],
    ):
        """byte_of: the tokens that stand for one byte each. context: tokens before the text."""
        self._tokenizer, self._skip, self._byte_of = tokenizer, skip_special_tokens, byte_of
        self._known = context
        self._new: list[int] = []
        self._run_is_broken = False

    def push(self, token: int) -> str:
        if self._run_is_broken and token in self._byte_of:
            return _REPLACEMENT
        self._run_is_broken = False
        self._new.append(token)
        return self._new_text(at_end=False)

    def flush(self) -> str:
        return self._new_text(at_end=True)

    def _new_text(self, at_end: bool) -> str:
        known, new = self._decode(self._known), self._new
        text = self._decode(self._known + new)
        may_change = text.endswith(_REPLACEMENT) and not at_end
        if may_change and all(token in self._byte_of for token in new):
            raw = b"".join(self._byte_of[token] for token in new)
            may_change, self._run_is_broken = _is_cut_off(raw)
        if may_change and len(new) < _MOST_NEW:
            return ""
        if len(text) > len(known):
            self._known, self._new = new, []
        elif len(new) >= _MOST_NEW:
            self._new = []  # tokens without text are no use as context
        return text[len(known) :]

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=self._skip) if tokens else ""


# Tokens that are decoded again with each new one. A character has at most four.
_MOST_NEW = 16


def _is_cut_off(raw: bytes) -> tuple[bool, bool]:
    """Returns whether more bytes may make `raw` UTF-8, and whether it already is."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        decoder.decode(raw)
    except UnicodeDecodeError:
        return False, True
    return bool(decoder.getstate()[0]), False


class Detokenizer:
    """The text of one sequence: the joined results of `push` and `flush`.

    Without a stop string it equals tokenizer.decode of all tokens, or what that adds to the text of
    those before. A character is returned with its last token. Text that may begin a stop string is
    held until it proves not to.
    """

    def __init__(
        self,
        texts: Texts,
        stop: Sequence[str] = (),
        skip_special_tokens: bool = True,
        include_stop: bool = False,
        before: Sequence[int] = (),
    ):
        """stop: the text ends before the first stop string; with include_stop, after it.

        before: the tokens from whose text this one goes on.
        """
        if any(not text for text in stop):
            raise ValueError("stop: expected strings that are not empty, got ''.")
        self._text = texts.begin(skip_special_tokens, before)
        self._stops = [StopString(text) for text in stop]
        self._include_stop = include_stop
        self._held = ""  # decoded text that may begin a stop string
        self.stopped = False

    def push(self, token: int, *, may_stop: bool = True) -> str:
        """Returns the text that `token` completes. Sets `stopped` once a stop string is complete.

        may_stop: whether stop strings that end in this token count.
        """
        if not self._stops:
            return self._text.push(token)
        if self.stopped:
            return ""
        new = self._text.push(token)
        found = [
            (begin, stop.length) for stop in self._stops if (begin := stop.push(new)) is not None
        ]
        text = self._held + new
        if found and may_stop:
            self.stopped = True
            begin, length = min(found)
            end = len(self._held) + begin + (length if self._include_stop else 0)
            self._held = ""
            return text[:end]
        border = len(text) - max(stop.num_matched for stop in self._stops)
        self._held = text[border:]
        return text[:border]

    def flush(self) -> str:
        """Returns the rest; an incomplete character becomes U+FFFD. No push may follow."""
        if self.stopped:
            return ""
        text = self._held + self._text.flush()
        self._held = ""
        return text
