"""Encodes texts to tokens, in bounded time and memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax_attn.models._weights.protocols import Tokenizer
from jax_attn.serve._openai.errors import overflow

_PIECE = 1 << 16  # characters


class TextEncoder:
    def __init__(self, tokenizer: Tokenizer):
        # Texts that are too long are refused, not truncated.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer

    def encode(
        self,
        text: str,
        field: str,
        max_tokens: int,
        add_special_tokens: bool = True,
        most: int | None = None,
    ) -> list[int]:
        """Encodes a text. Raises ApiError about `field` if it has far too many tokens.

        max_tokens: the model's limit. most: number of tokens of use; None: max_tokens.
        """
        self.refuse_long(text, field, max_tokens, most)
        return self._ids(text, add_special_tokens)

    def encode_beginning(self, text: str, max_tokens: int) -> list[int]:
        """Encodes as much of a text as fits with special tokens, which are not cut."""
        num_chars = _PIECE
        plain = self._ids(text[:num_chars], False)
        while num_chars < len(text) and len(plain) <= max_tokens:
            num_chars *= 2
            plain = self._ids(text[:num_chars], False)
        whole = self._ids(text[:num_chars], True)
        if len(whole) <= max_tokens:
            return whole
        n = len(plain)
        begin = next(i for i in range(len(whole)) if whole[i : i + n] == plain)
        end = begin + n - (len(whole) - max_tokens)
        return whole[:end] + whole[begin + n :]

    def refuse_long(self, text: str, field: str, max_tokens: int, most: int | None = None) -> None:
        """Raises ApiError about `field` if a text has far too many tokens. See `encode`."""
        # A token of text takes a hundred bytes and a microsecond. Splitting the text changes the
        # number of tokens by a few, so a text with twice as many tokens as are of use is refused
        # early.
        num_tokens, limit = 0, 2 * (most or max_tokens)
        for begin in range(0, len(text) if len(text) > _PIECE else 0, _PIECE):
            num_tokens += len(self._ids(text[begin : begin + _PIECE], False))
            if num_tokens > limit:
                raise overflow(field, max_tokens, f"over {limit}")

    def encode_typed(
        self, texts: Sequence[str] | Sequence[tuple[str, str]]
    ) -> list[tuple[list[int], int]]:
        """Encodes texts or pairs with special tokens. Checks no lengths.

        Returns the tokens of each, and where those of type 1 begin, as in a pair's second text.
        """
        return [(each.ids, _second(each.type_ids)) for each in self._batch(texts, True)]

    def encode_all(self, texts: list[str]) -> list[list[int]]:
        """Encodes texts with special tokens, as a batch. Checks no lengths."""
        return [encoding.ids for encoding in self._batch(texts, True)]

    def encode_plain(self, texts: list[str]) -> list[list[int]]:
        """Encodes texts without special tokens around them. Checks no lengths."""
        return [encoding.ids for encoding in self._batch(texts, False)]

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        # As a batch, which lets other threads run meanwhile.
        (encoding,) = self._batch([text], add_special_tokens)
        return encoding.ids

    def _batch(
        self, texts: Sequence[str] | Sequence[tuple[str, str]], add_special_tokens: bool
    ) -> Sequence[Any]:
        return self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)


def _second(type_ids: list[int]) -> int:
    """Returns where the type ids 1 begin, which are behind all 0."""
    second = type_ids.index(1) if 1 in type_ids else len(type_ids)
    if set(type_ids[second:]) - {1} or set(type_ids[:second]) - {0}:
        raise ValueError(f"tokenizer: expected type ids 0, then 1, got {type_ids[:64]}")
    return second
