"""Converts the messages of a request to those that chat templates expect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax_attn.serve._chat import strict_json
from jax_attn.serve._openai import schemas
from jax_attn.serve._openai.errors import bad_field


def for_template(message: schemas.Message, where: str, writes_channels: bool) -> dict[str, Any]:
    """Converts one message. Raises ApiError.

    where: names the message in an error.
    writes_channels: see ChatTemplate.
    """
    plain = _plain(message, where)
    return _with_thinking(plain) if writes_channels else plain


def _plain(message: schemas.Message, where: str) -> dict[str, Any]:
    content: Any = message.content
    if not isinstance(content, str):
        content = _parts(content)
    # Templates use the older name.
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": content}
    if isinstance(message, schemas.ToolMessage):
        plain |= {"tool_call_id": message.tool_call_id, "name": message.name}
    if isinstance(message, schemas.PastAnswer):
        thoughts = message.reasoning_content or message.reasoning
        if thoughts is not None:
            plain["reasoning_content"] = thoughts
    if isinstance(message, schemas.PastAnswer) and message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(call, f"{where}.tool_calls[{i}].function.arguments"),
                },
            }
            for i, call in enumerate(message.tool_calls)
        ]
    return plain


def _parts(parts: Sequence[Any]) -> str | list[dict[str, str]]:
    """A text; with pictures, the parts as templates expect them."""
    if not any(isinstance(part, schemas.PicturePart) for part in parts):
        return "\n".join(part.text for part in parts)
    return [
        {"type": "image"}
        if isinstance(part, schemas.PicturePart)
        else {"type": "text", "text": part.text}
        for part in parts
    ]


class Arguments(dict[str, Any]):
    """The arguments of a call: an object, or in a template that joins texts, its JSON."""

    def __init__(self, text: str):
        super().__init__(strict_json.loads(text))
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, behind: str) -> str:
        return self._text + behind

    def __radd__(self, before: str) -> str:
        return before + self._text


def _arguments(call: schemas.PastToolCall | schemas.PastCustomToolCall, where: str) -> Arguments:
    """Parses a call's arguments, as templates write the JSON themselves."""
    text = call.function.arguments.strip() or "{}"
    if not strict_json.is_object(text):
        raise bad_field(where, "not a JSON object")
    try:
        return Arguments(text)
    except (ValueError, RecursionError):  # such as too long a number
        raise bad_field(where, "not a JSON object") from None


def _with_thinking(message: dict[str, Any]) -> dict[str, Any]:
    """Adds the message's thoughts as gpt-oss's template expects: without content beside calls."""
    if "reasoning_content" not in message:
        return message
    calls = {"content": ""} if message.get("tool_calls") else {}
    return {**message, "thinking": message["reasoning_content"], **calls}
