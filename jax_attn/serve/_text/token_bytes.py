"""The exact bytes of each token, for log-probabilities: a token may be part of a character."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

from jax_attn.models._weights.protocols import Tokenizer


class TokenBytes:
    """The bytes of one tokenizer's tokens: byte-level BPE, or SentencePiece with byte fallback."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        description = json.loads(tokenizer.to_str())
        decoder, added = description["decoder"], description["added_tokens"]
        kinds = {part["type"] for part in _parts(decoder)}
        self._is_byte_level = "ByteLevel" in kinds
        # Whether it is known how tokens join to text.
        self.are_known = bool(kinds & {"ByteLevel", "ByteFallback", "Metaspace", "Replace"})
        self._added = frozenset(entry["id"] for entry in added)
        self.special = frozenset(entry["id"] for entry in added if entry["special"])
        # Whether the joined bytes of tokens equal the text that they decode to.
        self.joined_are_text = bool(decoder) and decoder["type"] == "ByteLevel"
        self._known = functools.cache(self._bytes)

    def __call__(self, token: int) -> bytes:
        """The token's bytes; empty for ids beyond the tokenizer (padding of a vocabulary)."""
        return self._known(token)

    def byte_tokens(self) -> dict[int, bytes]:
        """SentencePiece's single-byte tokens, for unknown characters."""
        tokens = (
            (self._tokenizer.token_to_id(f"<0x{byte:02X}>"), bytes([byte])) for byte in range(256)
        )
        return {token: byte for token, byte in tokens if token is not None}

    def word(self) -> int | None:
        """A token that is a word in any place of a text."""
        words = (self._tokenizer.token_to_id(text) for text in ("a", "\u2581a"))
        found = next((token for token in words if token is not None), None)
        if found is not None:
            return found
        of_letters = (
            token
            for text, token in self._tokenizer.get_vocab().items()
            if token not in self._added and text.lstrip("\u2581").isalpha()
        )
        return next(of_letters, None)

    def strips_first_space(self) -> bool:
        """Whether the space that a text's first word begins with is not in its text."""
        begun = (
            token
            for text, token in self._tokenizer.get_vocab().items()
            if text[:1] == "\u2581" and text[1:].isalpha() and token not in self._added
        )
        token = next(begun, None)
        if token is None:
            return False
        return not self._tokenizer.decode([token], skip_special_tokens=True).startswith(" ")

    def _bytes(self, token: int) -> bytes:
        # An added token's text, normalized as the text in which it is looked for.
        text = self._tokenizer.id_to_token(token)
        if text is None:
            return b""
        if self._is_byte_level:
            return _from_alphabet(text)
        if match := re.fullmatch(r"<0x([0-9A-F]{2})>", text):
            return bytes([int(match[1], 16)])
        return text.replace("\u2581", " ").encode()


def _parts(decoder: Any) -> list[dict[str, Any]]:
    """The decoders in a sequence of them, or in a sequence inside it."""
    if decoder is None:
        return []
    return [part for each in decoder.get("decoders", ()) for part in _parts(each)] or [decoder]


def _byte_of() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table |= {chr(0x100 + i): byte for i, byte in enumerate(others)}
    return table


_BYTE_OF = _byte_of()


def _from_alphabet(text: str) -> bytes:
    """The bytes of a token in the alphabet; else its text in UTF-8 (it may be an added token)."""
    try:
        return bytes(_BYTE_OF[character] for character in text)
    except KeyError:
        return text.encode()
