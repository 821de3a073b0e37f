"""Fields of request bodies: strict types, null for absent fields, and unknown fields.

Types are strict: a string is not a number. 5.0 is an integer, as JavaScript writes it. A null field
counts as absent. A field described as "not supported" is accepted only if it asks for nothing. An
unknown field is ignored, with a warning in the log (see UnknownFields); with --strict it is an
error that names the field.

The number of errors of a body is bounded: an object with more fields than exist is refused at once,
and every list ends at its first error.
"""

from __future__ import annotations

import logging
import typing
from typing import Annotated, Any, ClassVar, TypeAlias

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainValidator,
    ValidationInfo,
    model_validator,
)
from pydantic.json_schema import WithJsonSchema
from pydantic_core import PydanticCustomError

log = logging.getLogger("jax_attn.serve")


class UnknownFields:
    """Warns once of each ignored field, up to a limit, because clients choose the names."""

    MOST, MAX_CHARS = 256, 64

    def __init__(self) -> None:
        self._seen: set[tuple[str, str]] = set()

    def see(self, owner: str, name: str) -> None:
        """owner: the kind of object that has the field."""
        entry = (owner, name[: self.MAX_CHARS])
        if entry not in self._seen and len(self._seen) < self.MOST:
            self._seen.add(entry)
            log.warning("unknown field %r of a %s is ignored; --strict refuses it", *entry[::-1])


def _refuse(value: Any) -> None:
    if value not in (None, False, [], {}, "", "none", "auto"):
        raise PydanticCustomError("unsupported", "not supported by this server")


# "Asks for nothing" is null, false, empty, "none" or "auto".
Unsupported: TypeAlias = Annotated[
    None, BeforeValidator(_refuse), WithJsonSchema({"type": "null", "description": "not supported"})
]
# Fields that cannot change the answer; clients send them for OpenAI's book-keeping.
ToolName: TypeAlias = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
Ignored: TypeAlias = Annotated[Any, Field(default=None, description="accepted, and ignored")]


def _refuse_type(value: Any) -> None:
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str):
        raise PydanticCustomError("missing", "expected an object with a type", {"inside": "type"})
    raise PydanticCustomError(
        "unsupported",
        "{type} is not supported by this server",
        {"type": repr(kind[:64]), "inside": "type"},
    )


# Objects of a protocol that this server does not support: the error has the type's name.
OtherType: TypeAlias = Annotated[
    None, BeforeValidator(_refuse_type), WithJsonSchema({"not": {}, "description": "not supported"})
]


def by_type(*known: str, default: str | None = None) -> Discriminator:
    """Selects a type by its "type" field. default: for objects without one."""

    def kind(value: Any) -> str:
        found = value.get("type", default) if isinstance(value, dict) else None
        return found if found in known else "other"

    return Discriminator(kind)


def at_most(limit: int) -> BeforeValidator:
    """Limits the number of entries before any of them is checked."""

    def check(value: Any) -> Any:
        if isinstance(value, dict | list) and len(value) > limit:
            raise PydanticCustomError(
                "too_long",
                "expected at most {limit} entries, got {length}",
                {"limit": limit, "length": len(value)},
            )
        return value

    return BeforeValidator(check)


_TOKENS_AT_A_TIME = 1 << 16


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def check_tokens(value: Any) -> list[int]:
    """Checks tokens as pydantic would, but lets other threads run at intervals."""
    if not isinstance(value, list):
        raise PydanticCustomError("tokens", "expected a list of tokens")
    for begin in range(0, len(value), _TOKENS_AT_A_TIME):
        part = value[begin : begin + _TOKENS_AT_A_TIME]
        types = set(map(type, part))
        if types == {int, float} or types == {float}:
            part = value[begin : begin + _TOKENS_AT_A_TIME] = list(map(_whole, part))
            types = set(map(type, part))
        if types == {int} and 0 <= min(part) and max(part) < 2**31:
            continue
        bad = next(i for i, x in enumerate(part) if type(x) is not int or not 0 <= x < 2**31)
        raise PydanticCustomError(
            "tokens", "expected a token, an integer from 0 to 2**31 - 1", {"inside": begin + bad}
        )
    return value


def tokens_schema(**more: int) -> WithJsonSchema:
    token = {"type": "integer", "minimum": 0, "exclusiveMaximum": 2**31}
    return WithJsonSchema({"type": "array", "items": token, **more})


Tokens: TypeAlias = Annotated[list[int], PlainValidator(check_tokens), tokens_schema()]
PromptTokens: TypeAlias = Annotated[
    list[int], PlainValidator(check_tokens), tokens_schema(minItems=1)
]


class RequestBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    # Names of the fields, as clients write them, and of the integer fields.
    _names: ClassVar[frozenset[str]]
    _integers: ClassVar[frozenset[str]]

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        types = {field.alias or name: field.annotation for name, field in cls.model_fields.items()}
        cls._names = frozenset(types)
        cls._integers = frozenset(
            name for name, type in types.items() if int in (type, *typing.get_args(type))
        )

    @model_validator(mode="before")
    @classmethod
    def _normalised(cls, body: Any, info: ValidationInfo) -> Any:
        """Removes nulls and converts whole floats of integer fields.

        If the context is an UnknownFields, also removes unknown fields.
        """
        if not isinstance(body, dict):
            return body
        body = {key: value for key, value in body.items() if value is not None}
        for name in cls._integers & body.keys():
            body[name] = _whole(body[name])
        unknown = [key for key in body if key not in cls._names]
        if isinstance(info.context, UnknownFields):
            for name in unknown:
                info.context.see(cls.__name__, name)
                del body[name]
        elif len(body) > len(cls._names):  # else pydantic reports it, together with other errors
            raise PydanticCustomError("unknown_field", "unknown field", {"inside": unknown[0]})
        return body
