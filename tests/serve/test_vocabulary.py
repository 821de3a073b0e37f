"""Grammars over every kind of tokenizer: text with added tokens in it, and numbers of tokens."""

import itertools
import json
import random
import re

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from helpers.serve.made_texts import made_text
from helpers.serve.tokenizer_kinds import (
    FLAGS,
    KINDS,
    byte_level,
    end_token,
    gemma,
    llama,
    with_added,
)
from jax_attn.serve._grammar import grammar
from jax_attn.serve._grammar.compiler import GrammarCompiler
from jax_attn.serve._grammar.grammar import GrammarError, Grammars

TEXT = " the <tool_call> is\n<|im_end|>here</tool_call>, <|x|>é[TOOL_CALLS]"
ADDED = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|x|>")
SPECIAL = {"<|im_end|>": ("special",)}


def written(tokenizer, text: str, vocab_size: int | None = None, *, jump: bool = True) -> str:
    vocab_size = vocab_size or tokenizer.get_vocab_size()
    grammars = Grammars(tokenizer, vocab_size, [end_token(tokenizer)])
    return made_text(tokenizer, grammars, text, random.Random(0), jump=jump)


def grammars_of(text: str) -> dict[str, str]:
    return {
        "const": grammar.from_json_schema({"const": text}),
        "choice": grammar.from_choices([text]),
        "regex": grammar.from_regex(re.escape(text).replace("\\\n", "\n")),
        "grammar": grammar.from_lark(f"start: {json.dumps(text)}"),
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("flags", [(), ("lstrip", "rstrip"), ("single_word",), ("normalized",)])
@pytest.mark.parametrize("jump", [True, False])
def test_text_with_added_tokens_in_it(kind, flags, jump):
    """Whether they are special or not, the text comes out as it was demanded."""
    tokenizer = with_added(KINDS[kind](), dict.fromkeys(ADDED, flags) | SPECIAL)
    for name, text in grammars_of(TEXT).items():
        shown = written(tokenizer, text, jump=jump)
        assert (json.loads(shown) if name == "const" else shown) == TEXT, name


@pytest.mark.parametrize("kind", ["byte_level", "llama"])
def test_added_tokens_of_all_flags(kind):
    """Sixteen tokens in one text, one for each set of flags."""
    sets = [tuple(itertools.compress(FLAGS[1:], s)) for s in itertools.product((0, 1), repeat=4)]
    added = {f"<{i}>": flags for i, flags in enumerate(sets)}
    added |= {f"<s{i}>": ("special", *flags) for i, flags in enumerate(sets)}
    tokenizer = with_added(KINDS[kind](), added)
    text = "".join(f"a{mark} {mark}{mark}é  " for mark in added)
    assert written(tokenizer, grammar.from_choices([text])) == text


def test_an_added_token_is_itself_where_the_tokenizer_says_so():
    """Forced text has the tokens that the model was trained with."""
    tokenizer = with_added(byte_level(), {"<tool_call>": ()})
    (token,) = tokenizer.encode("<tool_call>").ids
    matcher = Grammars(tokenizer, 4097, [0]).matcher(grammar.from_regex("<tool_call>\nabc"))
    assert matcher.take_forced()[0] == token


def test_forced_text_is_split_as_the_model_was_trained():
    """As in the midst of a text, and the text of special tokens as any other."""
    text = "name<|im_end|> the <s>"
    for tokenizer, plain in ((llama(), gemma()), (byte_level(), byte_level())):
        with_added(tokenizer, SPECIAL)
        plain.encode_special_tokens = True
        eos = end_token(tokenizer)
        grammars = Grammars(tokenizer, tokenizer.get_vocab_size(), [eos])
        forced = grammars.matcher(grammar.from_choices([text])).take_forced()
        assert forced == plain.encode(text).ids[: len(forced)] and len(forced) > 8


def test_the_end_is_no_text_though_it_is_not_flagged():
    tokenizer = with_added(byte_level(), {"<eos>": ()})
    end = tokenizer.token_to_id("<eos>")
    grammars = Grammars(tokenizer, 4097, [end])
    matcher = grammars.matcher(grammar.from_json_schema({"type": "string"}))
    matcher.advance(tokenizer.token_to_id('"'))
    with pytest.raises(GrammarError):
        matcher.advance(end)
    matcher = grammars.matcher(grammar.from_choices(["a<eos>b"]))
    assert end not in matcher.take_forced()


def test_a_free_text_may_contain_an_added_token_but_no_special_one():
    tokenizer = with_added(byte_level(), {"<tool_call>": ()} | SPECIAL)
    text = grammar.from_json_schema({"type": "string"})
    for name, fits in (("<tool_call>", True), ("<|im_end|>", False)):
        matcher = Grammars(tokenizer, 4098, [0]).matcher(text)
        matcher.advance(tokenizer.token_to_id('"'))
        if fits:
            matcher.advance(tokenizer.token_to_id(name))
        else:
            with pytest.raises(GrammarError):
                matcher.advance(tokenizer.token_to_id(name))


def test_a_lark_grammar_may_name_any_added_token():
    tokenizer = with_added(byte_level(), {"<tool_call>": ()} | SPECIAL)
    ids = {name: tokenizer.token_to_id(name) for name in ("<tool_call>", "<|im_end|>")}
    text = 'start: <tool_call> "<tool_call>" /<tool_call>/ <|im_end|> // <tool_call>'
    matcher = Grammars(tokenizer, 4098, [0]).matcher(grammar.from_lark(text, ids))
    call = ids["<tool_call>"]
    for token in (call, call, *tokenizer.encode("<tool").ids, *tokenizer.encode("_call>").ids):
        matcher.advance(token)
    matcher.advance(ids["<|im_end|>"])
    assert matcher.is_stopped


@pytest.mark.parametrize("more", [-7, -1, 0, 1, 40])
def test_a_tokenizer_may_have_more_tokens_than_the_model_or_fewer(more):
    """Gemma 3 1B has one more, and most models fewer."""
    tokenizer = with_added(llama(), {"<tool_call>": (), "<image>": ()})
    text = grammar.from_choices(["a <tool_call> the <image>"])
    vocab_size = tokenizer.get_vocab_size() + more
    assert written(tokenizer, text, vocab_size) == "a <tool_call> the <image>"


def test_grammars_are_tried_with_the_same_tokens():
    tokenizer = with_added(byte_level(), {"<tool_call>": ()} | SPECIAL)
    compiler = GrammarCompiler(Grammars(tokenizer, 4098, [0]), num_threads=1)
    try:
        text = grammar.from_lark('start: "<tool_call>" <|im_end|>')
        assert compiler.compile(text, "").result(timeout=60).text == text
    finally:
        compiler.close()


def test_unknown_tokens_are_refused_in_one_sentence():
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(ValueError, match=r"^tokenizer\.json: decoder: expected .*\.$"):
        Grammars(tokenizer, 2, [0])
