"""Encodes texts to tokens, in bounded time and memory."""

from __future__ import annotations

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
        # A token of text takes a hundred bytes and a microsecond. Splitting the text changes the
        # number of tokens by a few, so a text with twice as many tokens as are of use is refused
        # early.
        num_tokens, limit = 0, 2 * (most or max_tokens)
        for begin in range(0, len(text) if len(text) > _PIECE else 0, _PIECE):
            num_tokens += len(self._ids(text[begin : begin + _PIECE], False))
            if num_tokens > limit:
                raise overflow(field, max_tokens, f"over {limit}")
        return self._ids(text, add_special_tokens)

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        # As a batch, which lets other threads run meanwhile.
        (encoding,) = self._tokenizer.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )
        return encoding.ids
