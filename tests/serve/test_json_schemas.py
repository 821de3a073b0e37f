"""JSON Schemas: annotations, numbers that grammars cannot hold, and properties by pattern."""

import json
import random

import pytest

from helpers.serve.made_texts import made_text
from jax_attn.serve._grammar import grammar, json_schema
from jax_attn.serve._grammar.grammar import GrammarError, Grammars

BIG = 2**53 + 1


@pytest.fixture(scope="module")
def grammars(tokenizer) -> Grammars:
    return Grammars(tokenizer, 4096, [0])


def made(grammars, tokenizer, schema, seed: int = 0):
    text = grammar.from_json_schema(schema)
    rng = random.Random(seed)
    return made_text(tokenizer, grammars, text, rng, jump=True)


def fits(grammars, tokenizer, schema, text: str) -> bool:
    matcher = grammars.matcher(grammar.from_json_schema(schema))
    tokens = tokenizer.encode(text).ids
    try:
        for i, token in enumerate([*tokens, 0]):
            if matcher.is_stopped:
                return i == len(tokens)
            matcher.advance(token)
    except GrammarError:
        return False
    return matcher.is_stopped


@pytest.mark.parametrize("format", ["path", "password", "int64", "regex", "uri-reference", "x"])
def test_unknown_formats_are_annotations(grammars, tokenizer, format):
    schema = {"type": "string", "format": format, "maxLength": 3}
    assert fits(grammars, tokenizer, schema, '"a b"')
    assert not fits(grammars, tokenizer, schema, '"abcd"')
    assert fits(grammars, tokenizer, {"format": format}, "5")


def test_known_formats_are_followed(grammars, tokenizer):
    for format in sorted(json_schema.FORMATS - {"unknown"}):
        assert not fits(grammars, tokenizer, {"type": "string", "format": format}, '"?"'), format


def test_unique_items_is_an_annotation(grammars, tokenizer):
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    assert fits(grammars, tokenizer, schema, "[1,1]")
    assert not fits(grammars, tokenizer, schema, '["a"]')


def test_annotations_anywhere_but_no_data_and_no_names(grammars, tokenizer):
    """Names of properties, and data in a const, are not keywords."""
    inner = {"type": "string", "format": "password"}
    names = {"format": inner, "uniqueItems": {"type": "integer"}, "enum": inner, "const": inner}
    schema = {
        "type": "object",
        "properties": names | {"data": {"const": {"format": "path", "uniqueItems": True}}},
        "patternProperties": {"^p-": {"items": inner, "uniqueItems": True}},
        "required": [*names, "data"],
        "$defs": {"format": inner},
        "components": {"schemas": {"format": inner}},
        "additionalProperties": {"anyOf": [{"$ref": "#/components/schemas/format"}]},
    }
    value = {"format": "a", "uniqueItems": 1, "enum": "b", "const": "c"}
    value |= {"data": {"format": "path", "uniqueItems": True}, "p-x": ["d", "d"], "z": "e"}
    text = json.dumps(value, separators=(",", ":"))
    assert fits(grammars, tokenizer, schema, text)
    assert not fits(grammars, tokenizer, schema, text.replace('"path"', '"x"'))


HELD = [
    0, 1, -1, 2**53, -(2**53), 2**53 + 2, 2**62, -(2**62), 2**63 - 1, 10**22, 0.1, 1.5, 1e-7, 1e22,
    1e60, 123456.75, -0.25, 3.141592653589793,
]  # fmt: skip
CHANGED = [
    BIG, -BIG, 2**60 + 1, 2**63, 2**64, 2**64 - 1, -(2**63), -(2**63) - 1, 2**70,
    123456789.12345679, 10**400, 1e300, 5e-324,
]  # fmt: skip


@pytest.mark.parametrize("number", HELD)
def test_numbers_are_written_as_they_are(grammars, tokenizer, number):
    for schema in ({"const": number}, {"enum": [number]}, {"const": [{"a": number}]}):
        value = json.loads(made(grammars, tokenizer, schema))
        value = value[0]["a"] if isinstance(value, list) else value
        assert type(number)(value) == number and isinstance(value, type(number) | int)


@pytest.mark.parametrize("number", CHANGED)
def test_numbers_that_would_be_changed_are_refused(number):
    for schema in (
        {"const": number},
        {"enum": ["a", number]},
        {"properties": {"minimum": {"anyOf": [{"const": {"x": [number]}}]}}},
        json.dumps({"items": {"const": number}}),
    ):
        with pytest.raises(GrammarError, match=r"^JSON schema: .* cannot be held.*\.$") as error:
            grammar.from_json_schema(schema)
        assert len(str(error.value)) < 300
    grammar.from_json_schema({"default": number, "examples": [number], "minLength": 2})


@pytest.mark.parametrize(
    ("bounds", "inside", "outside"),
    [
        ({"minimum": 2**53}, [2**53, 2**60 + 1], [2**53 - 1]),
        ({"maximum": 2**63 - 1}, [BIG, 2**63 - 1], [2**63]),
        ({"minimum": -(2**63)}, [2 - 2**62, 0, -BIG, 2**64], [-(2**63) - 1, -(2**64)]),
        ({"minimum": -(2**63), "maximum": 2**63 - 1}, [-BIG, 0, 2**63 - 1], [2**63, -(2**64)]),
        ({"exclusiveMinimum": -(2**63) - 1}, [-BIG], [-(2**64)]),
        ({"maximum": 2**64 - 1, "minimum": 0}, [0, BIG], [-1, 2**64]),
        ({"exclusiveMaximum": 2**53}, [2**53 - 1], [2**53]),
    ],
)
def test_bounds_of_integers(grammars, tokenizer, bounds, inside, outside):
    for number in inside:
        assert fits(grammars, tokenizer, {"type": "integer"} | bounds, str(number)), number
    for number in outside:
        assert not fits(grammars, tokenizer, {"type": "integer"} | bounds, str(number)), number


@pytest.mark.parametrize("highest", [2**63 - 1, 2**64, 1e19, 1e300, 10**400])
def test_bounds_of_numbers(grammars, tokenizer, highest):
    schema = {"type": "number", "minimum": -highest, "maximum": highest}
    for text, inside in (("0.5", True), ("-1.5", True), (str(2**62), True), (f"{2**63}.5", False)):
        assert fits(grammars, tokenizer, schema, text) == inside, text


@pytest.mark.parametrize("name", ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
@pytest.mark.parametrize("number", [BIG, -BIG, 2**60 - 1])
def test_bounds_that_would_be_changed_are_refused(name, number):
    with pytest.raises(GrammarError, match=f"^JSON schema: {name}: .* cannot be held"):
        grammar.from_json_schema({"type": "integer", name: number})


def test_bounds_beyond_64_bits_on_the_wrong_side_are_refused():
    for name, number in (("minimum", 2**64), ("maximum", -(2**64)), ("exclusiveMinimum", 2**63)):
        with pytest.raises(GrammarError, match="cannot be held"):
            grammar.from_json_schema({"type": "integer", name: number})


def test_multiples():
    grammar.from_json_schema({"type": "integer", "multipleOf": 5})
    with pytest.raises(GrammarError, match="multipleOf: .* cannot be held"):
        grammar.from_json_schema({"type": "integer", "multipleOf": BIG})


@pytest.mark.parametrize("rest", [{}, {"additionalProperties": False}, {"required": ["name"]}])
@pytest.mark.parametrize("seed", range(8))
def test_properties_beside_those_by_pattern(grammars, tokenizer, rest, seed):
    schema = {
        "type": "object",
        "properties": {"name": {"type": "boolean"}, "x-b": {"type": "integer", "maximum": 9}},
        "patternProperties": {"^x-.?$": {"type": "integer", "minimum": 0}},
    }
    schema |= rest or {"additionalProperties": {"type": "null"}}
    if "required" in rest:
        schema["additionalProperties"] = False
    value = json.loads(made(grammars, tokenizer, schema, seed))
    for name, each in value.items():
        if name == "name":
            assert isinstance(each, bool)
        elif name.startswith("x-"):
            assert each >= 0 and (name != "x-b" or each <= 9)
        else:
            assert each is None and not rest
    assert "required" not in rest or "name" in value


def test_a_schema_nested_too_deeply_stays(grammars, tokenizer):
    schema = {"type": "string", "format": "path"}
    for _ in range(300):
        schema = {"items": schema}
    assert json_schema.usable(schema, True) == schema
