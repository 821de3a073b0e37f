import pytest

tokenizers = pytest.importorskip("tokenizers", reason="needs the extra `models`")

from jax_attn import models  # noqa: E402
from jax_attn.serve._text.token_bytes import TokenBytes  # noqa: E402

TOKENIZER = models.BUNDLED / "tokenizer.json"


def test_byte_level():
    """The joined bytes of any text's tokens are the text's, also inside a character."""
    tokenizer = tokenizers.Tokenizer.from_file(str(TOKENIZER))
    token_bytes = TokenBytes(tokenizer)
    text = "def f():\n\treturn 'é 漢字 🙂 \x00\x7f\xad'"
    tokens = tokenizer.encode(text).ids
    assert b"".join(map(token_bytes, tokens)) == text.encode()
    assert any(
        b"\xf0" == token_bytes(token)[:1] and len(token_bytes(token)) < 4 for token in tokens
    )
    assert token_bytes(0) == b"<|endoftext|>"
    assert token_bytes(10**6) == b""  # padding of a model's vocabulary
    every = {token_bytes(token) for token in range(tokenizer.get_vocab_size())}
    assert len(every) == tokenizer.get_vocab_size()


def test_sentence_piece():
    vocab = {"<unk>": 0, "<0x0A>": 1, "<0xE6>": 2, "\u2581hi": 3, "é": 4}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], byte_fallback=True))
    tokenizer.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("\u2581", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
        ]
    )
    token_bytes = TokenBytes(tokenizer)
    assert [token_bytes(token) for token in range(1, 5)] == [b"\n", b"\xe6", b" hi", "é".encode()]


def test_a_word():
    """An added token is none, even if its text is of letters."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({"12": 0, "\u2581be": 1}, []))
    tokenizer.add_tokens(["added"])
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    assert TokenBytes(tokenizer).word() == 1
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({"12": 0}, []))
    tokenizer.add_tokens(["added"])
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    assert TokenBytes(tokenizer).word() is None
