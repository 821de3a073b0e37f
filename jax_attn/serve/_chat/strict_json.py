"""Reads the JSON that models write, without a change of its values.

Numbers keep all their digits, and half a surrogate pair stays an escape. NaN and Infinity are no
JSON. Functions that read raise ValueError for what is none, or RecursionError for what is nested
too deeply.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

_SPACE = re.compile(r"[ \t\n\r]*")


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


_DECODER = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=_refuse)


def skip_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def end_of_value(text: str, at: int) -> int:
    """The end of the value that begins at `at`."""
    return _DECODER.raw_decode(text, at)[1]


def loads(text: str) -> Any:
    """The value that all of the text is; a number beyond 64-bit floats is infinite."""
    return json.loads(text, parse_float=_float, parse_constant=_refuse)


class _Infinite(float):
    """A number beyond 64-bit floats; templates that print it write JSON."""

    def __str__(self) -> str:
        return "1e999" if self > 0 else "-1e999"


def _float(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _Infinite(number)


def is_object(text: str) -> bool:
    """Whether all of the text is an object. Never raises."""
    begin = skip_space(text, 0)
    try:
        return text[begin : begin + 1] == "{" and not text[end_of_value(text, begin) :].strip()
    except (ValueError, RecursionError):
        return False


def items(text: str, at: int) -> tuple[list[str], int]:
    """The items of the list that begins at `at`, and its end."""
    end, found = end_of_value(text, at), []
    at = skip_space(text, at + 1)
    while text[at] != "]":
        at = skip_space(text, at + 1) if text[at] == "," else at
        behind = end_of_value(text, at)
        found.append(text[at:behind])
        at = skip_space(text, behind)
    return found, end


def members(text: str, at: int) -> tuple[dict[str, str], int]:
    """The members of the object that begins at `at`, and its end."""
    if text[at : at + 1] != "{":
        raise ValueError("no object")
    end, found = end_of_value(text, at), {}
    at = skip_space(text, at + 1)
    while text[at] != "}":
        at = skip_space(text, at + 1) if text[at] == "," else at
        key, at = _DECODER.raw_decode(text, at)
        at = skip_space(text, skip_space(text, at) + 1)  # behind the colon
        behind = end_of_value(text, at)
        found[key] = text[at:behind]
        at = skip_space(text, behind)
    return found, end


def rewritten(text: str) -> str:
    """The JSON text with the white space and the escapes of json.dumps(ensure_ascii=False)."""
    return _PARTS.sub(_rewritten, text)


def string(text: str) -> str:
    """The text as a JSON string."""
    return sendable(json.dumps(text, ensure_ascii=False))


def sendable(text: str) -> str:
    """The JSON text of json.dumps with half surrogate pairs escaped, and infinite numbers as such.

    The first could not be sent, and the second are no JSON.
    """
    if "Infinity" in text:
        text = _INFINITE.sub(lambda part: part[1] or "1e999", text)
    return _HALVES.sub(lambda half: f"\\u{ord(half[0]):04x}", text)


_INFINITE = re.compile(r'("(?:[^"\\]|\\.)*")|Infinity')
_PARTS = re.compile(r'"(?:[^"\\]|\\.)*"|[,:]|[ \t\n\r]+')
_HALVES = re.compile("[\ud800-\udfff]")


def _rewritten(part: re.Match[str]) -> str:
    text = part[0]
    if text[0] == '"':
        return string(json.loads(text)) if "\\" in text else text
    return f"{text} " if text in (",", ":") else ""


class StringScan:
    """Tells whether a place in a growing text is inside a string of a JSON object.

    is_broken: a line end, or another control character, showed that a string is none. What was told
    before may be wrong, and no string follows.
    """

    _OUTSIDE = re.compile(r'[{}"]')
    _INSIDE = re.compile(r'"|\\.|[\x00-\x1f]', re.DOTALL)

    def __init__(self) -> None:
        self._at = self._depth = 0
        self._is_inside = self.is_broken = False

    def is_inside(self, text: str, at: int) -> bool:
        """Whether `at` is. No call may be about an earlier place than the one before."""
        while not self.is_broken:
            parts = self._INSIDE if self._is_inside else self._OUTSIDE
            found = parts.search(text, self._at, at + 1)
            if found is None or found.start() >= at:
                self._at = max(self._at, at)
                return self._is_inside
            self._at = found.end()
            if found[0] == '"':
                self._is_inside = not self._is_inside and self._depth > 0
            elif not self._is_inside:
                self._depth = max(0, self._depth + (1 if found[0] == "{" else -1))
            elif len(found[0]) == 1:
                self.is_broken = True
        return False


class QuoteScan:
    """The same for strings between two equal quotes, without escapes."""

    is_broken = False

    def __init__(self, quote: str):
        self._quote, self._at, self._is_inside = quote, 0, False

    def is_inside(self, text: str, at: int) -> bool:
        while (found := text.find(self._quote, self._at, at)) >= 0:
            self._at, self._is_inside = found + len(self._quote), not self._is_inside
        self._at = max(self._at, at - len(self._quote) + 1)
        return self._is_inside
