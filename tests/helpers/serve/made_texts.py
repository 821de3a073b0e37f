"""Texts that grammars make, token by token, as the engine makes and shows them."""

from __future__ import annotations

import random

import numpy as np
from tokenizers import Tokenizer

from jax_attn.serve._grammar.grammar import Grammars
from jax_attn.serve._text.detokenizer import Detokenizer, Texts

from .tokenizer_kinds import end_token


def made_text(
    tokenizer: Tokenizer, grammars: Grammars, text: str, rng: random.Random, *, jump: bool
) -> str:
    """A random text of the grammar. jump: take forced tokens. Raises GrammarError."""
    end = end_token(tokenizer)
    mask = np.zeros(-(-len(grammars._vocabulary.tokens) // 32), np.int32)
    matcher = grammars.matcher(text)
    before = tokenizer.encode("a", add_special_tokens=False).ids
    detokenizer = Detokenizer(Texts(tokenizer), skip_special_tokens=False, before=before)
    shown, num_tokens = "", 0
    while not matcher.is_stopped:
        tokens = matcher.take_forced() if jump else []
        if not tokens:
            matcher.fill_mask(mask)
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits).tolist()
            tokens = [end if end in allowed else rng.choice(allowed)]
            matcher.advance(tokens[0])
        shown += "".join(detokenizer.push(token) for token in tokens if token != end)
        num_tokens += len(tokens)
        assert num_tokens < 3000, shown
    return shown + detokenizer.flush()
