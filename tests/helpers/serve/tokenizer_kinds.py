"""Small tokenizers of every kind that models have, with added tokens of any flags."""

from __future__ import annotations

import functools
import string
from collections.abc import Iterable, Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from jax_attn.models import BUNDLED

FLAGS = ("special", "normalized", "lstrip", "rstrip", "single_word")
_WORDS = ("the", "▁the", "▁a", "▁b", "name", "▁name", "arguments", '":', '▁"', "▁▁", "▁▁▁▁", "call")
_SPACE = "▁"


def byte_level() -> Tokenizer:
    """The bundled model's, as in Llama 3, Qwen and GPT."""
    return Tokenizer.from_str(_bundled())


def llama() -> Tokenizer:
    """SentencePiece's BPE: a space before the text, bytes for unknown characters."""
    tokenizer = _bpe()
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)]
    )
    tokenizer.decoder = decoders.Sequence([*_parts(), decoders.Strip(" ", 1, 0)])
    return tokenizer


def mistral() -> Tokenizer:
    """As llama, with the space put by the pre-tokenizer."""
    tokenizer = _bpe()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence([*_parts(), decoders.Strip(" ", 1, 0)])
    return tokenizer


def gemma() -> Tokenizer:
    """As llama, without a space before the text."""
    tokenizer = _bpe()
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.decoder = decoders.Sequence(_parts())
    return tokenizer


def unigram() -> Tokenizer:
    """SentencePiece's other model, with bytes for unknown characters."""
    tokenizer = _unigram(byte_fallback=True)
    tokenizer.decoder = decoders.Sequence([*_parts(), decoders.Strip(" ", 1, 0)])
    return tokenizer


def metaspace() -> Tokenizer:
    """The same without bytes: unknown characters are lost."""
    tokenizer = _unigram(byte_fallback=False)
    tokenizer.decoder = decoders.Metaspace(_SPACE, prepend_scheme="always")
    return tokenizer


# Those that every text can be written with.
KINDS = {each.__name__: each for each in (byte_level, llama, mistral, gemma, unigram)}


def with_added(tokenizer: Tokenizer, added: Mapping[str, Iterable[str]]) -> Tokenizer:
    """Adds tokens. added: text -> those of FLAGS that it has."""
    for text, flags in added.items():
        token = AddedToken(text, **{flag: flag in flags for flag in FLAGS})
        if "special" in flags:
            tokenizer.add_special_tokens([token])
        else:
            tokenizer.add_tokens([token])
    return tokenizer


def end_token(tokenizer: Tokenizer) -> int:
    ends = map(tokenizer.token_to_id, ("</s>", "<|endoftext|>"))
    return next(token for token in ends if token is not None)


def _unigram(byte_fallback: bool) -> Tokenizer:
    pieces = [(text, -10.0) for text in _pieces()] + [(text, -2.0) for text in _WORDS]
    known = [("<unk>", -20.0), ("<s>", 0.0), ("</s>", 0.0)]
    model = models.Unigram(known + pieces, unk_id=0, byte_fallback=byte_fallback)
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme="always")
    return tokenizer


@functools.cache
def _bundled() -> str:
    return (BUNDLED / "tokenizer.json").read_text(encoding="utf-8")


def _pieces() -> list[str]:
    letters = [c for c in string.printable if c.isprintable() and c != " "]
    return [f"<0x{byte:02X}>" for byte in range(256)] + [_SPACE, *letters, "é", "漢"]


def _bpe() -> Tokenizer:
    vocab: dict[str, int] = {}
    for text in ("<unk>", "<s>", "</s>", *_pieces()):
        vocab[text] = len(vocab)
    merges: list[tuple[str, str]] = []
    for word in _WORDS:
        left = word[0]
        for right in word[1:]:
            if left + right not in vocab:
                vocab[left + right] = len(vocab)
            if (left, right) not in merges:
                merges.append((left, right))
            left += right
    model = models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def _parts() -> list[Any]:
    return [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
