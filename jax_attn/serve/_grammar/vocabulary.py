"""A tokenizer in the form that llguidance needs: the bytes of its tokens, and text as tokens.

llguidance's own reader of tokenizer.json treats every added token in <...> as special: no text
could contain it. Here only flagged tokens and the end of the text are.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import llguidance

from jax_attn.models._weights.protocols import Tokenizer
from jax_attn.serve._text.token_bytes import TokenBytes


class Vocabulary(llguidance.TokenizerWrapper):
    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_tokens: Sequence[int]):
        """vocab_size: of the model. Tokens beyond it, and beyond the tokenizer, have no text.

        Raises:
          ValueError: it is unknown how the tokenizer's tokens join to text.
        """
        token_bytes = TokenBytes(tokenizer)
        if not token_bytes.are_known:
            raise ValueError(
                "tokenizer.json: decoder: expected one of a byte-level or a SentencePiece-like "
                "tokenizer, for grammars need the bytes of each token."
            )
        self.tokens = [token_bytes(token) for token in range(vocab_size)]
        self.eos_token_id, self.bos_token_id = eos_tokens[0], None
        self.is_tokenizer_wrapper = True
        special = token_bytes.special | set(eos_tokens)
        self.special_token_ids = sorted(token for token in special if token < vocab_size)
        self._texts = {
            token: raw for token, raw in enumerate(self.tokens) if raw and token not in special
        }
        description = json.loads(tokenizer.to_str()) | {"truncation": None, "padding": None}
        for name in ("normalizer", "pre_tokenizer"):
            description[name] = _without_first_space(description.get(name))
        self._tokenizer: Any = type(tokenizer).from_str(json.dumps(description))  # type: ignore[attr-defined]
        # The text of a special token is text like any other.
        self._tokenizer.encode_special_tokens = True

    def __call__(self, text: str) -> list[int]:
        """Tokens whose bytes join to `text`: the tokenizer's own if possible; [] without any.

        The tokenizer's own do not where it changes the text, or an added token takes space beside.
        """
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        raw = text.encode()
        if b"".join([self._texts.get(token, _NO_TEXT) for token in tokens]) == raw:
            return tokens
        return self._greedy(raw)

    def _greedy(self, raw: bytes) -> list[int]:
        """The longest token each time."""
        tokens: list[int] = []
        at, by_bytes = 0, self._by_bytes
        longest = max(map(len, by_bytes), default=0)
        while at < len(raw):
            for end in range(min(len(raw), at + longest), at, -1):
                if (token := by_bytes.get(raw[at:end])) is not None:
                    break
            else:
                return []
            tokens.append(token)
            at = end
        return tokens

    @cached_property
    def _by_bytes(self) -> dict[bytes, int]:
        return {raw: token for token, raw in self._texts.items()}


_NO_TEXT = b"\xff"  # in no UTF-8


def _without_first_space(part: Any) -> Any:
    """A normalizer or pre-tokenizer that puts no space before the text: it may go on from other."""
    if not isinstance(part, dict):
        return part
    for inner in ("normalizers", "pretokenizers"):
        if inner in part:
            kept = [_without_first_space(each) for each in part[inner]]
            return part | {inner: [each for each in kept if each is not None]}
    if part["type"] == "Prepend":
        return None
    if part["type"] == "Metaspace":
        return part | {"prepend_scheme": "never"}
    return part | {"add_prefix_space": False} if part["type"] == "ByteLevel" else part
