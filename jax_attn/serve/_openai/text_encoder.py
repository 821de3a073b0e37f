"""From texts to tokens, in bounded time and memory."""

from __future__ import annotations

from jax_attn.models._weights.protocols import Tokenizer
from jax_attn.serve._openai.errors import overflow

_PIECE = 1 << 16  # characters


class TextEncoder:
    def __init__(self, tokenizer: Tokenizer):
        # A text that is too long is refused, not cut.
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
        """max_tokens: of the model. most: tokens that are of use; None: those.

        Raises ApiError, about `field`, for a text that has far more.
        """
        # A token of text takes a hundred bytes and a microsecond. Where a text is cut changes the
        # number of its tokens by a few, so what has twice as many as are of use is known early.
        num_tokens, limit = 0, 2 * (most or max_tokens)
        for begin in range(0, len(text) if len(text) > _PIECE else 0, _PIECE):
            num_tokens += len(self._ids(text[begin : begin + _PIECE], False))
            if num_tokens > limit:
                raise overflow(field, max_tokens, f"over {limit}")
        return self._ids(text, add_special_tokens)

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        # Of a batch, as that lets other threads run meanwhile.
        (encoding,) = self._tokenizer.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )
        return encoding.ids
