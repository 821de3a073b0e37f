"""Tool calls in the format of Gemma: call:name{key:<escape>text<escape>,other:[1,true]}.

`quote` is the delimiter around strings. Nothing is escaped inside a string. Keys are bare.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

_HEAD = re.compile(r"\s*call:\s*([\w.-]+)\s*(?=\{)")
_KEY = re.compile(r"\s*([^\s:{}\[\],]+)\s*:\s*")
_BARE = re.compile(r"[^,\]}\s]+")
_SPACE = re.compile(r"\s*")
_MOST_NESTED = 64


class CannotDemand(ValueError):
    """No grammar can be made for the schema. The message is one sentence."""


# ---- reading -----------------------------------------------------------------------------------


def parse(raw: str, quote: str) -> list[tuple[str, dict[str, Any]]]:
    """Parses the names and arguments of the calls in `raw`; [] unless all of it is a call."""
    head = _HEAD.match(raw)
    if head is None:
        return []
    try:
        value, end = _value(raw, head.end(), quote, 0)
    except (ValueError, IndexError):
        return []
    return [] if raw[end:].strip() else [(head[1], value)]


def _value(raw: str, at: int, quote: str, depth: int) -> tuple[Any, int]:
    """Parses the value at `at`. Returns it and its end. Raises ValueError or IndexError."""
    if depth > _MOST_NESTED:
        raise ValueError
    if raw.startswith(quote, at):
        begin = at + len(quote)
        end = raw.index(quote, begin)
        return raw[begin:end], end + len(quote)
    if raw[at] == "{":
        pairs, end = _items(raw, at + 1, "}", quote, depth)
        return dict(pairs), end
    if raw[at] == "[":
        return _items(raw, at + 1, "]", quote, depth)
    bare = _BARE.match(raw, at)
    if bare is None:
        raise ValueError
    return json.loads(bare[0]), bare.end()


def _items(raw: str, at: int, closing: str, quote: str, depth: int) -> tuple[list[Any], int]:
    items: list[Any] = []
    at = _skip(raw, at)
    while raw[at] != closing:
        if items:
            if raw[at] != ",":
                raise ValueError
            at = _skip(raw, at + 1)
        key = _KEY.match(raw, at) if closing == "}" else None
        if closing == "}" and key is None:
            raise ValueError
        value, at = _value(raw, key.end() if key else at, quote, depth + 1)
        items.append((key[1], value) if key else value)
        at = _skip(raw, at)
    return items, at + 1


def _skip(raw: str, at: int) -> int:
    found = _SPACE.match(raw, at)
    return found.end() if found else at


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


def rules(name: str, schema: dict[str, Any], quote: str) -> list[str]:
    """Lark rules for an object that follows the schema: the rule `name` and those that it needs.

    quote: the delimiter as a Lark terminal.

    Raises:
      CannotDemand: the schema has no grammar in this format.
    """
    made: list[str] = []
    made.append(f"{name}: {_Rules(name, quote, made).object(schema, 0)}")
    return made


class _Rules:
    def __init__(self, prefix: str, quote: str, made: list[str]):
        self._prefix, self._quote, self._made = prefix, quote, made

    def object(self, schema: dict[str, Any], depth: int) -> str:
        """A rule for an object: required and optional properties, in their order."""
        self._check(schema, depth)
        required = schema.get("required") or []
        properties = schema.get("properties") or {}
        if missing := [name for name in required if name not in properties]:
            raise CannotDemand(f"'{missing[0]}' is required, and no property")
        pairs = [
            (json.dumps(f"{key}:") + " " + self._value(value, depth + 1), key in required)
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
        return [
            f"{self._quote} {json.dumps(value)} {self._quote}"
            if isinstance(value, str)
            else json.dumps(json.dumps(value))
            for value in values
        ]

    def _check(self, schema: dict[str, Any], depth: int) -> None:
        if unknown := schema.keys() - _KNOWN:
            raise CannotDemand(f"'{min(unknown)[:40]}'")
        if depth > _MOST_NESTED:
            raise CannotDemand(f"more than {_MOST_NESTED} levels")

    def _rule(self, text: str) -> str:
        name = f"{self._prefix}_{len(self._made)}"
        self._made.append(f"{name}: {text}")
        return name
