"""The exact bytes of each token, for log-probabilities: a token may be part of a character."""

from __future__ import annotations

import functools
import json
import re

from jax_attn.models._weights.protocols import Tokenizer


class TokenBytes:
    """The bytes of one tokenizer's tokens: byte-level BPE, or SentencePiece with byte fallback."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        description = json.loads(tokenizer.to_str())
        decoder, added = description["decoder"], description["added_tokens"]
        self._is_byte_level = '"ByteLevel"' in json.dumps(decoder)
        self._added = {entry["id"]: entry["content"] for entry in added}
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

    def _bytes(self, token: int) -> bytes:
        if token in self._added:
            text = self._added[token]
            return _from_alphabet(text) if self._is_byte_level else text.encode()
        text = self._tokenizer.id_to_token(token)
        if text is None:
            return b""
        if self._is_byte_level:
            return _from_alphabet(text)
        if match := re.fullmatch(r"<0x([0-9A-F]{2})>", text):
            return bytes([int(match[1], 16)])
        return text.replace("\u2581", " ").encode()


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
