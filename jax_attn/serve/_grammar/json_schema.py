"""JSON Schemas as llguidance takes them: without annotations, and with numbers that it can hold.

`uniqueItems`, and a `format` that llguidance does not know, are annotations here: the output need
not follow them. Other keywords that it does not know are its to refuse.

It counts in 64-bit floats and, for integers, 64 bits. A bound at the ends of these or beyond is
moved inwards: the output follows it, and leaves out some numbers near the ends. Other numbers that
it would change are refused.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Any

# Formats that llguidance enforces.
FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
     "unknown")
)  # fmt: skip

# Keywords whose value is data, those whose data is never used, and those whose value has a schema
# for each of its keys.
_DATA = frozenset(("const", "enum"))
_EXAMPLES = frozenset(("default", "examples", "example"))
_NAMED_SCHEMAS = frozenset(
    ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
)
_MOST_NESTED = 200
_MOST_DIGITS = 64  # hundreds of digits can end llguidance's process
_INT64_MAX = 2**63 - 1
_HIGHEST = 2**63 - 1024  # the largest float below
_BOUNDS = frozenset(("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "multipleOf"))


class CannotHold(ValueError):
    """The schema has a number that the output could not follow. The message is one sentence."""


def usable(schema: Any, check_numbers: bool) -> Any:
    """The schema without annotations; what is nested too deeply stays.

    check_numbers: also move bounds inwards, and refuse numbers.

    Raises:
      CannotHold: a number would be changed.
    """
    return _walk(schema, check_numbers, 0)


def _cannot_hold(keyword: str, number: int | float) -> CannotHold:
    text = repr(number)
    shown = text if len(text) <= 40 else f"{text[:40]}..."
    return CannotHold(
        f"{keyword}: {shown} cannot be held: grammars count in 64-bit floats and write all digits; "
        f"expected a number that a float holds exactly, of at most {_MOST_DIGITS} digits"
    )


def _walk(schema: Any, check_numbers: bool, depth: int) -> Any:
    if depth > _MOST_NESTED:
        return schema
    if isinstance(schema, list):
        return [_walk(each, check_numbers, depth + 1) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {}
    for keyword, value in schema.items():
        if _is_annotation(keyword, value):
            continue
        if check_numbers:
            value = _checked(keyword, value, schema.get("type") == "integer")
        if keyword in _NAMED_SCHEMAS and isinstance(value, dict):
            value = {name: _walk(each, check_numbers, depth + 1) for name, each in value.items()}
        elif keyword not in _DATA:
            value = _walk(value, check_numbers, depth + 1)
        found[keyword] = value
    return found


def _checked(keyword: str, value: Any, is_integer: bool) -> Any:
    """The value of a keyword; a bound is moved inwards if need be. Raises CannotHold."""
    if keyword in ("const", "enum"):
        numbers = _numbers(value)
    elif keyword in _BOUNDS and isinstance(value, int | float) and not isinstance(value, bool):
        most = _INT64_MAX if is_integer else _HIGHEST
        if keyword in ("minimum", "exclusiveMinimum") and value < -_HIGHEST:
            return -_HIGHEST
        if keyword in ("maximum", "exclusiveMaximum") and value > most:
            return most
        numbers = [value]
        if abs(value) > most:
            raise _cannot_hold(keyword, value)
    else:
        return value
    for number in numbers:
        if not _is_held(number):
            raise _cannot_hold(keyword, number)
    return value


def _is_annotation(keyword: str, value: Any) -> bool:
    if keyword == "format":
        return isinstance(value, str) and value not in FORMATS
    if keyword in _EXAMPLES:  # an object could be a schema that a $ref names
        return not isinstance(value, dict)
    return keyword == "uniqueItems" and isinstance(value, bool)


def _numbers(value: Any) -> list[int | float]:
    """The numbers in a JSON value."""
    found: list[int | float] = []
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, dict):
            left += each.values()
        elif isinstance(each, list):
            left += each
        elif isinstance(each, int | float) and not isinstance(each, bool):
            found.append(each)
    return found


def _is_held(number: int | float) -> bool:
    """Whether a constant is the same as a 64-bit float, read and written as llguidance does."""
    if isinstance(number, float):
        is_short = number == 0 or 10.0**-_MOST_DIGITS < abs(number) < 10.0**_MOST_DIGITS
        return is_short and _as_read(number) == number
    if -_INT64_MAX <= number <= _INT64_MAX:
        return float(number) == number or number == _INT64_MAX
    if abs(number) >= 10**_MOST_DIGITS:
        return False
    # Written with the fewest digits, then zeros.
    return int(Decimal(repr(float(number)))) == number


def _as_read(number: float) -> float:
    """The float that serde_json reads from its digits: those that need 54 bits may be one off."""
    try:
        _, digits, exponent = Decimal(repr(number)).as_tuple()
        whole = float(int("".join(map(str, digits))))
        assert isinstance(exponent, int)
        scale = float(f"1e{abs(exponent)}")
        return (whole * scale if exponent >= 0 else whole / scale) * (1 if number >= 0 else -1)
    except (AssertionError, ValueError, ZeroDivisionError):
        return float("nan")
