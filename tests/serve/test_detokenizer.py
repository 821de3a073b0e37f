"""Incremental text: joined it is the decoding of all tokens, or what precedes a stop string."""

import functools
import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jax_attn.serve.detokenizer import Detokenizer, Texts

REPLACEMENT = "\ufffd"


texts_of = functools.cache(Texts)  # it looks at all tokens


def pieces(tokenizer, tokens, stop=(), **options) -> list[str]:
    """A piece for each token, then the rest; nothing after a stop string."""
    detokenizer = Detokenizer(texts_of(tokenizer), stop, **options)
    out = []
    for token in tokens:
        out.append(detokenizer.push(token))
        if detokenizer.stopped:
            break
    return [*out, detokenizer.flush()]


TEXTS = [
    "def f(x):\n    return x + 1\n",
    "naïve café, 東京 ☃ 🎉🎊 👩‍👩‍👧 Ωmega",
    "🎉" * 9,
    "",
    "\ufffd is a character too: \ufffd\ufffd",
]


@pytest.mark.parametrize("text", TEXTS)
def test_whole_text(tokenizer, text):
    tokens = tokenizer.encode(text).ids
    out = pieces(tokenizer, tokens)
    assert "".join(out) == tokenizer.decode(tokens) == text
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in piece for piece in out)


def test_text_comes_at_once(tokenizer):
    """A token that completes a character shows it; nothing is held without a reason."""
    tokens = tokenizer.encode("import os\nimport sys  # 🎉\n").ids
    detokenizer = Detokenizer(texts_of(tokenizer), stop=["zebra"])
    shown = ""
    for i, token in enumerate(tokens):
        shown += detokenizer.push(token)
        assert shown == tokenizer.decode(tokens[: i + 1]).rstrip(REPLACEMENT)


def test_random_tokens(tokenizer):
    """Any bytes, most of them no UTF-8."""
    rng = random.Random(0)
    for _ in range(300):
        tokens = [rng.randrange(300) for _ in range(rng.randrange(40))]
        assert "".join(pieces(tokenizer, tokens)) == tokenizer.decode(tokens)


def test_special_tokens_have_no_text_unless_asked_for(tokenizer):
    tokens = [0, *tokenizer.encode("a b").ids, 0, *tokenizer.encode(" c").ids]
    assert "".join(pieces(tokenizer, tokens)) == "a b c"
    shown = pieces(tokenizer, tokens, skip_special_tokens=False)
    assert "".join(shown) == "<|endoftext|>a b<|endoftext|> c"


def test_decoder_that_strips_a_leading_space():
    """SentencePiece's way: the first word of a text loses its space, and no other."""
    vocab = {"<s>": 0, "▁a": 1, "▁b": 2, "c": 3}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<s>"))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    for tokens in ([1, 2, 3, 2, 1], [0, 1, 0, 2, 2, 0, 0, 1, 3], [1, 0, 2]):
        assert "".join(pieces(tokenizer, tokens)) == tokenizer.decode(tokens)
        shown = "".join(pieces(tokenizer, tokens, skip_special_tokens=False))
        assert shown == tokenizer.decode(tokens, skip_special_tokens=False)


def test_stop_string_across_tokens(tokenizer):
    text = "one two three four"
    tokens = tokenizer.encode(text).ids
    for begin in range(len(text)):
        for end in range(begin + 1, min(begin + 8, len(text) + 1)):
            stop = text[begin:end]
            out = pieces(tokenizer, tokens, [stop])
            assert "".join(out) == text[: text.index(stop)]


def test_the_first_stop_string_counts(tokenizer):
    tokens = tokenizer.encode("abcdefgh").ids
    assert "".join(pieces(tokenizer, tokens, ["gh", "cd", "def"])) == "ab"


def test_random_stops(tokenizer):
    """Texts of two letters, where a stop string is nearly always about to begin."""
    rng = random.Random(1)
    letters = [tokenizer.token_to_id(c) for c in "ab"]
    for _ in range(2000):
        tokens = [rng.choice(letters) for _ in range(rng.randrange(1, 30))]
        stops = ["".join(rng.choices("ab", k=rng.randrange(2, 7))) for _ in range(2)]
        text = tokenizer.decode(tokens)
        # The oracle: what is there when the first stop string is complete.
        ends = [n for n in range(len(text) + 1) if any(text[:n].endswith(stop) for stop in stops)]
        if ends:
            text = text[: ends[0]]
            text = text[: min(text.index(stop) for stop in stops if stop in text)]
        detokenizer, shown = Detokenizer(texts_of(tokenizer), stops), ""
        for token in tokens:
            shown += detokenizer.push(token)
            assert text.startswith(shown)
        assert detokenizer.stopped == bool(ends)
        assert shown + detokenizer.flush() == text


def test_what_cannot_stop_is_not_held(tokenizer):
    detokenizer = Detokenizer(texts_of(tokenizer), ["</end>"])
    a, less, slash = (tokenizer.token_to_id(c) for c in "a</")
    assert [detokenizer.push(t) for t in (a, less, slash, a)] == ["a", "", "", "</a"]


def test_a_stop_that_does_not_count_yet(tokenizer):
    tokens = tokenizer.encode("xyz xyz").ids
    detokenizer = Detokenizer(texts_of(tokenizer), ["yz"])
    out = [detokenizer.push(t, may_stop=i >= len(tokens) - 1) for i, t in enumerate(tokens)]
    assert detokenizer.stopped and "".join(out).startswith("xyz")


def test_an_empty_stop_string_is_refused(tokenizer):
    with pytest.raises(ValueError, match="stop: expected strings that are not empty"):
        Detokenizer(texts_of(tokenizer), ["a", ""])
