"""Incremental text: joined, it decodes all tokens, or the text before a stop string."""

import functools
import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jax_attn.serve._text.detokenizer import Detokenizer, Texts, _is_cut_off

REPLACEMENT = "\ufffd"


texts_of = functools.cache(Texts)  # slow: it reads all tokens


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
    """A token that completes a character shows it; nothing is held back without a reason."""
    tokens = tokenizer.encode("import os\nimport sys  # 🎉\n").ids
    detokenizer = Detokenizer(texts_of(tokenizer), stop=["zebra"])
    shown = ""
    for i, token in enumerate(tokens):
        shown += detokenizer.push(token)
        assert shown == tokenizer.decode(tokens[: i + 1]).rstrip(REPLACEMENT)


def test_random_tokens(tokenizer):
    """Random bytes, mostly invalid UTF-8."""
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
    """SentencePiece drops the space of a text's first word, and of no other word."""
    vocab = {"<s>": 0, "▁a": 1, "▁b": 2, "c": 3}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<s>"))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    for tokens in ([1, 2, 3, 2, 1], [0, 1, 0, 2, 2, 0, 0, 1, 3], [1, 0, 2]):
        assert "".join(pieces(tokenizer, tokens)) == tokenizer.decode(tokens)
        shown = "".join(pieces(tokenizer, tokens, skip_special_tokens=False))
        assert shown == tokenizer.decode(tokens, skip_special_tokens=False)


def sentence_piece() -> Tokenizer:
    """Words, and byte tokens for other text, as in Llama 2 and Gemma."""
    vocab = {"<s>": 0, "<unk>": 1, "▁a": 2, "b": 3, "▁": 4}
    vocab |= {f"<0x{byte:02X}>": 5 + byte for byte in range(256)} | {REPLACEMENT: 261}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def as_bytes(raw: bytes) -> list[int]:
    return [5 + byte for byte in raw]


class Counted:
    """A tokenizer that counts what it decodes."""

    def __init__(self, tokenizer):
        self._tokenizer, self.num_tokens = tokenizer, 0

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def decode(self, tokens, **kwargs):
        self.num_tokens += len(tokens)
        return self._tokenizer.decode(tokens, **kwargs)


@pytest.mark.parametrize(
    "tokens",
    [
        as_bytes(b"\xe2") * 500,  # never complete
        as_bytes(b"\x80") * 500,
        [2, *as_bytes(b"\xf0\x9f\xe2") * 200, 2, 3],
        [2, *as_bytes(b"\xe2\x82" * 100 + b"\xac"), 2, 3, *as_bytes("東京 🎉".encode()), 2],
        [2] + [0] * 500 + [3],  # no text
        as_bytes("\ufffd".encode()) * 200,  # complete, but the replacement character itself
        [2, 261, 3, *as_bytes(b"\xe2"), 261, 2] * 20,  # a word of the vocabulary
    ],
    ids=["begun", "never begun", "begun anew", "ended", "special", "replacement", "word"],
)
def test_nothing_is_held_for_ever_nor_decoded_again_and_again(tokens):
    counted = Counted(sentence_piece())
    detokenizer, shown = Detokenizer(Texts(counted)), ""
    for token in tokens:
        shown += detokenizer.push(token)
        assert len(detokenizer._text._new) <= 16
    assert len(shown) > len(counted._tokenizer.decode(tokens)) - 4
    assert shown + detokenizer.flush() == counted._tokenizer.decode(tokens)
    assert counted.num_tokens <= 50 * len(tokens)


def test_whole_characters_of_bytes():
    text = "東京 ☃ 🎉🎊 naïve"
    tokens = [2, *as_bytes(text.encode()), 3, *as_bytes("é".encode()), 2]
    out = pieces(sentence_piece(), tokens)
    assert "".join(out) == f"a{text}bé a"
    assert not any(REPLACEMENT in piece for piece in out)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"a", (False, False)),
        ("☃".encode(), (False, False)),
        ("☃".encode()[:2], (True, False)),
        (b"a\xf0\x9f", (True, False)),
        (b"\xff", (False, True)),
        (b"\xe2\x98a", (False, True)),
    ],
)
def test_bytes_wait_only_while_more_of_them_can_make_a_character(raw, expected):
    assert _is_cut_off(raw) == expected


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
        # The oracle: the text at which the first stop string is complete.
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


def test_a_stop_string_may_be_shown(tokenizer):
    text = "one two three"
    tokens = tokenizer.encode(text).ids
    for stops, shown in ((["two"], "one two"), (["wo thr", "two"], "one two"), (["x"], text)):
        assert "".join(pieces(tokenizer, tokens, stops, include_stop=True)) == shown


def test_stop_strings_cost_no_more_where_they_nearly_match(tokenizer, monkeypatch):
    """16 strings of 256 characters, and a text that nearly matches all of them.

    Matching takes two steps for each character and string.
    """
    stops = ["a" * (127 + i) + "b" + "a" * (128 - i) for i in range(16)]
    num_steps = 0

    class Text(str):
        def __getitem__(self, index):
            nonlocal num_steps
            num_steps += 1
            return str.__getitem__(self, index)

    detokenizer = Detokenizer(texts_of(tokenizer), stops)
    for stop in detokenizer._stops:
        stop._text = Text(stop._text)
    shown, a = "", tokenizer.token_to_id("a")
    for _ in range(1000):
        shown += detokenizer.push(a)
    assert shown + detokenizer.flush() == "a" * 1000
    assert num_steps <= 16 * 1000 * 4


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
