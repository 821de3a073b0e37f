"""Grammars: allowed tokens, forced tokens, error messages, the cache."""

import json
import random
import re
import subprocess
import sys

import numpy as np
import pytest
from tokenizers import Tokenizer

from jax_attn.serve._grammar import grammar
from jax_attn.serve._grammar.grammar import GrammarError, Grammars

VOCAB = 4096 + 37  # logits may be wider than the tokenizer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{2,6}$"},
        "unit": {"const": "kilograms of feathers"},
        "weight": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "unit", "weight"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def grammars(tokenizer) -> Grammars:
    return Grammars(tokenizer, VOCAB, [0])


def allowed(matcher) -> list[int]:
    mask = np.zeros(-(-VOCAB // 32), np.int32)
    matcher.fill_mask(mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    assert not bits[4096:].any()  # no token there
    return np.flatnonzero(bits).tolist()


def wander(matcher, rng, *, jump: bool, choose=None) -> tuple[list[int], int]:
    """A random text of the grammar: its tokens, and how many of them were chosen."""
    tokens, num_chosen = [], 0
    while not matcher.is_stopped:
        if jump and (forced := matcher.take_forced()):
            tokens += forced
            continue
        token = (choose or rng.choice)(allowed(matcher))
        matcher.advance(token)
        tokens.append(token)
        num_chosen += 1
        assert len(tokens) < 500
    return tokens, num_chosen


@pytest.mark.parametrize("jump", [True, False])
def test_json_schema(grammars, tokenizer, jump):
    rng = random.Random(0)
    for _ in range(20):
        tokens, num_chosen = wander(
            grammars.matcher(grammar.from_json_schema(PERSON)), rng, jump=jump
        )
        value = json.loads(tokenizer.decode(tokens))
        assert list(value) == ["name", "unit", "weight"]
        assert re.fullmatch("[a-z]{2,6}", value["name"]) and 0 <= value["weight"] <= 99
        assert value["unit"] == "kilograms of feathers"
        assert (num_chosen < len(tokens) - 4) == jump


def test_regex(grammars, tokenizer):
    pattern = r"(\+[1-9]{1,3}|0) [0-9]{3}-(east|west)"
    for seed in range(20):
        matcher = grammars.matcher(grammar.from_regex(pattern))
        tokens, _ = wander(matcher, random.Random(seed), jump=seed % 2 == 0)
        assert re.fullmatch(pattern, tokenizer.decode(tokens))


def test_lark(grammars, tokenizer):
    text = """
        start: sum
        sum: item ("+" item)*
        item: NUMBER | "(" sum ")"
        NUMBER: /[1-9][0-9]?/
    """
    for seed in range(10):
        rng = random.Random(seed)
        choose = lambda tokens, rng=rng: 0 if 0 in tokens else rng.choice(tokens)  # noqa: E731
        matcher = grammars.matcher(grammar.from_lark(text))
        tokens, _ = wander(matcher, rng, jump=False, choose=choose)
        assert isinstance(eval(tokenizer.decode(tokens)), int)  # of digits, plus and brackets


def test_a_forced_text_needs_no_choice(grammars, tokenizer):
    """Forced tokens are the tokenizer's own; the last may be missing, as later text may join it."""
    text = "def main():\n    return 'naïve'"
    matcher = grammars.matcher(grammar.from_regex(re.escape(text).replace("\\\n", "\n")))
    forced = matcher.take_forced()
    assert forced == tokenizer.encode(text).ids[: len(forced)] and len(forced) > 5
    assert matcher.take_forced() == []
    rest, _ = wander(matcher, random.Random(0), jump=True)
    assert tokenizer.decode(forced + rest) == text


TEXT_WITHOUT_END = """
import sys
import numpy as np
from tokenizers import Tokenizer
from jax_attn.serve._grammar.grammar import Grammars, from_lark

tokenizer = Tokenizer.from_file(sys.argv[1])
matcher = Grammars(tokenizer, 4096, [0]).matcher(from_lark(sys.argv[2]))
mask = np.empty(128, np.int32)
for _ in range(20):
    assert matcher.take_forced() == []
    matcher.fill_mask(mask)
    (allowed,) = np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()
    matcher.advance(int(allowed[0]))
"""


@pytest.mark.parametrize(
    "text",
    [
        'start: "{" /a+/ "a"',
        '%llguidance {"no_forcing": false}\nstart: /[xy]/ /a+/ "a"',
        'start: x\nx: %lark {\n%llguidance {"no_forcing": false}\nstart: /a+/ "a"\n}',
    ],
)
def test_a_text_without_an_end(directory, text):
    """All that may follow is another a: a mask says so, and nobody looks for the end. In a process
    of its own, because it was looked for in a loop that nothing interrupts."""
    command = [sys.executable, "-c", TEXT_WITHOUT_END, str(directory / "tokenizer.json"), text]
    subprocess.run(command, check=True, timeout=300)


@pytest.mark.parametrize("part", ["key_separator", "item_separator", "whitespace_pattern"])
def test_a_schema_does_not_choose_separators(grammars, tokenizer, part):
    """They are regular expressions: behind a key, quotes would follow each other without an end."""
    integer = {"type": "integer"}
    schema = {
        "type": "object",
        "properties": {"k": integer, "l": integer},
        "required": ["k", "l"],
    }
    asked = schema | {"x-guidance": {part: '"+'}}
    plain, matcher = (grammars.matcher(grammar.from_json_schema(x)) for x in (schema, asked))
    for token in tokenizer.encode('{"k":1,"l":2}').ids:
        assert allowed(matcher) == allowed(plain)
        matcher.advance(token)
        plain.advance(token)


def test_truncation_does_not_reach_forced_text(grammars, tokenizer):
    """Some directories' tokenizer.json asks for truncation, for prompts."""
    short = Tokenizer.from_str(tokenizer.to_str())
    short.enable_truncation(3)
    short.enable_padding(length=50)
    text = grammar.from_regex("import collections, itertools, json")
    forced = Grammars(short, VOCAB, [0]).matcher(text).take_forced()
    assert forced == grammars.matcher(text).take_forced() and len(forced) > 3
    assert short.truncation is not None


def test_token_boundaries(grammars, tokenizer):
    """If text is forced but not its tokens, the mask offers every token that begins with it."""
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    matcher = grammars.matcher(grammar.from_json_schema(schema))
    assert tokenizer.decode(matcher.take_forced()) == '{"name":'
    texts = {tokenizer.id_to_token(token) for token in allowed(matcher)}
    assert len(texts) > 1 and '"' in texts and all(text.startswith('"') for text in texts)


def test_any_json(grammars, tokenizer):
    matcher = grammars.matcher(grammar.from_json_schema(True))
    for token in tokenizer.encode('{"a":[1,true,null,{"b":"c"}]}').ids:
        matcher.advance(token)
    assert 0 in allowed(matcher)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (lambda: grammar.from_regex("(ab"), "unclosed group"),
        (lambda: grammar.from_lark("start: nothing"), 'unknown name: "nothing"'),
        (lambda: grammar.from_json_schema({"type": 5}), "type must be a string"),
        (lambda: grammar.from_json_schema({"not": {"type": "null"}}), "Unimplemented keys"),
        (lambda: grammar.from_json_schema({"$ref": "http://localhost/x"}), "does not fetch"),
        (lambda: grammar.from_json_schema("{"), "JSON schema"),
        (lambda: "nonsense", "Expected token"),
        (lambda: grammar.from_regex("a" * 100_001), "at most 100000 characters"),
    ],
)
def test_bad_grammars(grammars, text, message):
    """One sentence each, without a parser's state and without the grammar."""
    with pytest.raises(GrammarError, match=message) as error:
        grammars.matcher(text())
    assert "\n" not in str(error.value) and len(str(error.value)) < 200
    assert str(error.value).endswith(".")


def test_a_wrong_token_is_an_error(grammars, tokenizer):
    matcher = grammars.matcher(grammar.from_regex("[0-9]+"))
    with pytest.raises(GrammarError, match="grammar: "):
        matcher.advance(tokenizer.token_to_id("x"))


def test_matchers_are_independent(grammars, tokenizer):
    text = grammar.from_regex("a*b")
    first, second = grammars.matcher(text), grammars.matcher(text)
    first.advance(tokenizer.token_to_id("b"))
    assert first.is_stopped and not second.is_stopped


def test_cache(tokenizer):
    grammars = Grammars(tokenizer, VOCAB, [0], max_entries=3, max_bytes=4000)
    texts = [grammar.from_regex(f"a{{{n}}}") for n in range(1, 5)]
    for text in texts[:3] + texts[:1]:  # texts[1] is the least recently used
        grammars.matcher(text)
    assert grammars.num_compiled == 3
    grammars.matcher(texts[3])
    for text in (texts[0], texts[2], texts[3]):
        grammars.matcher(text)
    assert (len(grammars), grammars.num_compiled) == (3, 4)
    grammars.matcher(texts[1])
    assert grammars.num_compiled == 5

    big = grammar.from_regex("b" * 800)
    grammars.matcher(big)
    assert len(grammars) <= 2  # those that fit beside it
    grammars.matcher(big)
    assert grammars.num_compiled == 6


def test_masks_are_checked(grammars):
    matcher = grammars.matcher(grammar.from_regex("a"))
    with pytest.raises(ValueError, match="row_mask"):
        matcher.fill_mask(np.zeros(2 * -(-VOCAB // 32), np.int32)[::2])
