"""Checks that values of JSON have the types of the dataclass that they became."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def check_types(made: Any) -> None:
    """Raises ValueError unless each field of a dataclass has a value of its annotation's type."""
    hints = _hints(type(made))
    for field in dataclasses.fields(made):
        value = getattr(made, field.name)
        if not _fits(value, hints[field.name]):
            raise ValueError(f"{field.name}: expected {field.type}, got {repr(value)[:100]}")


_hints: Callable[[Any], dict[str, Any]] = functools.cache(get_type_hints)


def _fits(value: Any, hint: Any) -> bool:
    if hint is Any:
        return True
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, each) for each in args)
    if origin is Literal:
        return value in args
    if origin is dict:
        return isinstance(value, dict)
    if origin is list or (origin is tuple and args[-1] is ...):
        if args[0] in (int, str):  # tokens, of which there are many
            return isinstance(value, origin) and all(type(each) is args[0] for each in value)
        return isinstance(value, origin) and all(_fits(each, args[0]) for each in value)
    if origin is tuple:
        return isinstance(value, tuple) and len(value) == len(args) and all(map(_fits, value, args))
    if hint is float:
        return type(value) in (float, int)
    if hasattr(hint, "_fields"):  # a NamedTuple
        return type(value) is hint and all(map(_fits, value, _hints(hint).values()))
    return type(value) is hint  # so that True is no int
