"""Tool calls in the format of Gemma: call:name{key:<escape>text<escape>,other:[1,true]}.

`quote` is the delimiter around strings. Nothing is escaped inside a string. Keys are bare.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from jax_attn.serve._chat import strict_json
from jax_attn.serve._chat.growing_calls import MOST_NESTED, GrowingCalls, Steps, Write, scalar
from jax_attn.serve._text.stop_strings import overlap

_HEAD = re.compile(r"\s*call:\s*([\w.-]+)\s*(?=\{)")
_KEY = re.compile(r"\s*([^\s:{}\[\],]+)\s*:\s*")
_BARE = re.compile(r"[^,\]}\s]+")
_END_OF_BARE = re.compile(r"[,\]}\s]")
_SPACE = re.compile(r"\s*")


class CannotDemand(ValueError):
    """No grammar can be made for the schema. The message is one sentence."""


# ---- reading -----------------------------------------------------------------------------------


def parse(raw: str, quote: str) -> list[tuple[str, str]]:
    """Parses the names and arguments of the calls in `raw`; [] unless all of it is a call.

    Returns (name, arguments as JSON).
    """
    head = _HEAD.match(raw)
    if head is None:
        return []
    try:
        value, end = _value(raw, head.end(), quote, 0)
    except (ValueError, IndexError):
        return []
    return [] if raw[end:].strip() else [(head[1], value)]


def _value(raw: str, at: int, quote: str, depth: int) -> tuple[str, int]:
    """Parses the value at `at`. Returns its JSON and its end. Raises ValueError or IndexError."""
    if depth > MOST_NESTED:
        raise ValueError
    if raw.startswith(quote, at):
        begin = at + len(quote)
        end = raw.index(quote, begin)
        return strict_json.string(raw[begin:end]), end + len(quote)
    if raw[at] == "{":
        pairs, end = _items(raw, at + 1, "}", quote, depth)
        return f"{{{', '.join(pairs)}}}", end
    if raw[at] == "[":
        items, end = _items(raw, at + 1, "]", quote, depth)
        return f"[{', '.join(items)}]", end
    bare = _BARE.match(raw, at)
    if bare is not None and bare[0] == "None":  # a template of Gemma's writes it
        return "null", bare.end()
    if bare is None or strict_json.end_of_value(bare[0], 0) < len(bare[0]):
        raise ValueError
    return bare[0], bare.end()


def _items(raw: str, at: int, closing: str, quote: str, depth: int) -> tuple[list[str], int]:
    items: list[str] = []
    at = _skip(raw, at)
    while raw[at] != closing:
        if items:
            if raw[at] != ",":
                raise ValueError
            at = _skip(raw, at + 1)
        name = ""
        if closing == "}":
            key, at = _key(raw, at, quote)
            name = f"{strict_json.string(key)}: "
        value, at = _value(raw, at, quote, depth + 1)
        items.append(name + value)
        at = _skip(raw, at)
    return items, at + 1


def _key(raw: str, at: int, quote: str) -> tuple[str, int]:
    """Parses the key at `at`, which models sometimes quote, and the colon behind it."""
    if raw.startswith(quote, at):
        end = raw.index(quote, at + len(quote))
        colon = _skip(raw, end + len(quote))
        if raw[colon] != ":":
            raise ValueError
        return raw[at + len(quote) : end], _skip(raw, colon + 1)
    if (key := _KEY.match(raw, at)) is None:
        raise ValueError
    return key[1], key.end()


def _skip(raw: str, at: int) -> int:
    found = _SPACE.match(raw, at)
    return found.end() if found else at


# ---- reading what grows -------------------------------------------------------------------------


def grow(calls: GrowingCalls, quote: str) -> Steps[None]:
    """Reads a call while it is written. Its pieces are JSON, as `parse` makes it."""
    head = yield from calls.head(_HEAD)
    call = calls.begin(head[1])
    yield from _grow_value(calls, quote, call.new.append, 0)
    call.is_whole = True


def _grow_value(calls: GrowingCalls, quote: str, write: Write, depth: int) -> Steps[None]:
    if depth > MOST_NESTED:
        raise ValueError
    if (yield from calls.is_mark(quote)):
        write('"')
        yield from _grow_text(calls, quote, lambda text: write(strict_json.string(text)[1:-1]))
        write('"')
    elif (yield from calls.is_next("{", str.isspace)):
        write("{")
        yield from _grow_items(calls, quote, write, "}", depth)
    elif (yield from calls.is_next("[", str.isspace)):
        write("[")
        yield from _grow_items(calls, quote, write, "]", depth)
    else:
        found = yield from calls.until(_END_OF_BARE)
        write("null" if found == "None" else scalar(found))


def _grow_items(
    calls: GrowingCalls, quote: str, write: Write, closing: str, depth: int
) -> Steps[None]:
    if not (yield from calls.is_next(closing, str.isspace)):
        while True:
            yield from calls.next_character(str.isspace)
            if closing == "}":
                key = yield from _grow_key(calls, quote)
                write(f"{strict_json.string(key)}: ")
            yield from _grow_value(calls, quote, write, depth + 1)
            if (yield from calls.is_next(closing, str.isspace)):
                break
            if not (yield from calls.is_next(",", str.isspace)):
                raise ValueError
            write(", ")
    write(closing)


def _grow_key(calls: GrowingCalls, quote: str) -> Steps[str]:
    if not (yield from calls.is_mark(quote)):
        return (yield from calls.head(_KEY))[1]
    key = yield from calls.collected(lambda write: _grow_text(calls, quote, write))
    if not (yield from calls.is_next(":", str.isspace)):
        raise ValueError
    yield from calls.next_character(str.isspace)
    return key


def _grow_text(calls: GrowingCalls, quote: str, write: Write) -> Steps[None]:
    """Reads a text up to the quote that ends it."""
    while (end := calls.text.find(quote, calls.at)) < 0:
        rest = calls.text[calls.at :]
        sure = len(rest) - overlap(rest, quote)
        write(rest[:sure])
        calls.at += sure
        yield
    write(calls.text[calls.at : end])
    calls.at = end + len(quote)


# ---- demanding ---------------------------------------------------------------------------------

_KNOWN = {
    "type", "properties", "required", "items", "enum", "const", "description", "title", "default",
    "additionalProperties", "examples", "$schema",
}  # fmt: skip
_PLAIN = {
    "integer": r"/-?(0|[1-9][0-9]*)/",
    "number": r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?/",
    "boolean": '("true" | "false")',
    "null": '"null"',
}


def rules(name: str, schema: dict[str, Any], delimiter: str, quote: str) -> list[str]:
    """Lark rules for an object that follows the schema: the rule `name` and those that it needs.

    delimiter: around strings. quote: the same as a Lark terminal.

    Raises:
      CannotDemand: the schema has no grammar in this format.
    """
    made: list[str] = []
    made.append(f"{name}: {_Rules(name, delimiter, quote, made).object(schema, 0)}")
    return made


class _Rules:
    def __init__(self, prefix: str, delimiter: str, quote: str, made: list[str]):
        self._prefix, self._made = prefix, made
        self._delimiter, self._quote = delimiter, quote

    def object(self, schema: dict[str, Any], depth: int) -> str:
        """A rule for an object: required and optional properties, in their order."""
        self._check(schema, depth)
        required = schema.get("required") or []
        properties = schema.get("properties") or {}
        if missing := [name for name in required if name not in properties]:
            raise CannotDemand(f"'{missing[0]}' is required, and no property")
        pairs = [
            (self._key(key) + " " + self._value(value, depth + 1), key in required)
            for key, value in properties.items()
        ]
        # Built from the end: `rest` is what may follow a pair, `first` what may come first.
        rest, first = '""', '""'
        for pair, is_required in reversed(pairs):
            begun = self._rule(f"{pair} {rest}")
            first = begun if is_required else self._rule(f"{begun} | {first}")
            rest = self._rule(f'"," {begun}' if is_required else f'"," {begun} | {rest}')
        return f'"{{" {first} "}}"'

    def _value(self, schema: Any, depth: int) -> str:
        if not isinstance(schema, dict):
            raise CannotDemand("expected a schema that is an object")
        self._check(schema, depth)
        if (values := self._constants(schema)) is not None:
            return f"({' | '.join(values)})"
        kinds = schema.get("type")
        if isinstance(kinds, str):
            kinds = [kinds]
        if not isinstance(kinds, Sequence) or not kinds:
            raise CannotDemand("a value without a type")
        return f"({' | '.join(self._of_kind(kind, schema, depth) for kind in kinds)})"

    def _of_kind(self, kind: Any, schema: dict[str, Any], depth: int) -> str:
        if kind == "string":
            return f"{self._quote} /[^<]*/ {self._quote}"
        if kind == "object":
            return self.object(schema, depth)
        if kind == "array":
            item = self._rule(self._value(schema.get("items"), depth + 1))
            return f'"[" ({item} ("," {item})*)? "]"'
        if kind not in _PLAIN:
            raise CannotDemand(f"type {str(kind)[:40]!r}")
        return _PLAIN[kind]

    def _constants(self, schema: dict[str, Any]) -> list[str] | None:
        if "const" not in schema and "enum" not in schema:
            return None
        values = [schema["const"]] if "const" in schema else schema["enum"]
        if not isinstance(values, list) or not values:
            raise CannotDemand("an enum without values")
        return [self._constant(value) for value in values]

    def _constant(self, value: Any) -> str:
        if isinstance(value, str):
            if self._delimiter in value:
                raise CannotDemand(f"a text with {self._delimiter} in it")
            return f"{self._quote} {json.dumps(value)} {self._quote}"
        if isinstance(value, dict):
            pairs = (f"{self._key(key)} {self._constant(each)}" for key, each in value.items())
            return f'"{{" {_joined(pairs)} "}}"'
        if isinstance(value, list):
            return f'"[" {_joined(map(self._constant, value))} "]"'
        if isinstance(value, float) and not math.isfinite(value):
            raise CannotDemand("a number beyond 64-bit floats")
        return json.dumps(json.dumps(value))

    def _key(self, key: str) -> str:
        if not _KEY.fullmatch(f"{key}:"):
            raise CannotDemand(f"the key {key[:40]!r}")
        return json.dumps(f"{key}:")

    def _check(self, schema: dict[str, Any], depth: int) -> None:
        if unknown := schema.keys() - _KNOWN:
            raise CannotDemand(f"'{min(unknown)[:40]}'")
        if depth > MOST_NESTED:
            raise CannotDemand(f"more than {MOST_NESTED} levels")

    def _rule(self, text: str) -> str:
        name = f"{self._prefix}_{len(self._made)}"
        self._made.append(f"{name}: {text}")
        return name


def _joined(terminals: Iterable[str]) -> str:
    return ' "," '.join(terminals)
