"""Items of conversations as clients read them back: with identifiers, and in pages."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

from jax_attn.serve._openai import response_schemas as rs
from jax_attn.serve._openai.errors import bad_field

_MAX_ID_CHARS = 256
_DEFAULT_LIMIT, _MAX_LIMIT = 20, 100
_PREFIXES = {
    "message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs",
    "custom_tool_call": "ctc", "custom_tool_call_output": "ctco",
}  # fmt: skip


# An identifier of an output's item has that of the response in it, so that the item can be found.
_OF_OUTPUT = re.compile(r"[a-z]+_([0-9a-f]{24})[0-9a-f]{2,}")


def output_id(prefix: str, response_id: str, index: int) -> str:
    """Makes the identifier of an item of a response's output."""
    return f"{prefix}_{response_id.removeprefix('resp_')}{index:02x}"


def response_of(item_id: str) -> str:
    """The response whose output may have the item; "": no output has it."""
    found = _OF_OUTPUT.fullmatch(item_id)
    return f"resp_{found[1]}" if found else ""


def shown(given: str | list[Any]) -> list[dict[str, Any]]:
    """A request's input as items that have identifiers."""
    if isinstance(given, str):
        given = [rs.MessageItem(type="message", role="user", content=given, id=None, status=None,
                                phase=None)]  # fmt: skip
    return list(map(_shown, given))


def _shown(item: Any) -> dict[str, Any]:
    known = isinstance(item.id, str) and 0 < len(item.id) <= _MAX_ID_CHARS
    id = item.id if known else f"{_PREFIXES[item.type]}_{secrets.token_hex(12)}"
    head = {"id": id, "type": item.type}
    if isinstance(item, rs.ReasoningItem):
        parts = {name: [each.model_dump() for each in getattr(item, name)] for name in _PARTS}
        return head | parts
    head["status"] = "completed"
    if isinstance(item, rs.MessageItem):
        kind = "output_text" if item.role == "assistant" else "input_text"
        return head | {"role": item.role, "content": _parts(item.content, kind)}
    if isinstance(item, rs.FunctionCallItem):
        return head | {"call_id": item.call_id, "name": item.name, "arguments": item.arguments}
    if isinstance(item, rs.CustomCallItem):
        return head | {"call_id": item.call_id, "name": item.name, "input": item.input}
    output = item.output if isinstance(item.output, str) else _parts(item.output, "input_text")
    return head | {"call_id": item.call_id, "output": output}


_PARTS = ("summary", "content")


def _parts(content: Any, kind: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [_text(kind, content)]
    return [_part(part, kind) for part in content]


def _part(part: Any, kind: str) -> dict[str, Any]:
    if isinstance(part, rs.PictureItemPart):
        return {"type": part.type, "image_url": part.image_url, "detail": "auto"}
    if part.type == "refusal":
        return {"type": "refusal", "refusal": part.text}
    return _text(kind, part.text)


def _text(kind: str, text: str) -> dict[str, Any]:
    more: dict[str, Any] = {"annotations": [], "logprobs": []} if kind == "output_text" else {}
    return {"type": kind, "text": text} | more


def page(
    items: Iterable[dict[str, Any]], query: Mapping[str, str], most: int = _MAX_LIMIT
) -> bytes:
    """A part of a list, as JSON. Raises ApiError.

    query: after, limit and order. most: the largest limit.
    """
    found = list(items)
    if (order := query.get("order", "desc")) not in ("asc", "desc"):
        raise bad_field("order", f"expected asc or desc, got {order[:64]!r}")
    if order == "desc":
        found.reverse()
    limit = query.get("limit", str(_DEFAULT_LIMIT))
    # int refuses thousands of digits with an error of its own.
    if not (limit.isdecimal() and len(limit) <= 6 and 1 <= int(limit) <= most):
        raise bad_field("limit", f"expected a number from 1 to {most}, got {limit[:64]!r}")
    if (after := query.get("after")) is not None:
        at = next((i for i, item in enumerate(found) if item["id"] == after), None)
        if at is None:
            raise bad_field("after", f"no item has this identifier: {after[:64]!r}")
        found = found[at + 1 :]
    part = found[: int(limit)]
    return json.dumps(
        {
            "object": "list",
            "data": part,
            "first_id": part[0]["id"] if part else None,
            "last_id": part[-1]["id"] if part else None,
            "has_more": len(part) < len(found),
        }
    ).encode()
