"""Converts the messages of a request to those that chat templates expect."""

from __future__ import annotations

import json
from typing import Any

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
    content = message.content
    if not isinstance(content, str):
        content = "\n".join(part.text for part in content)
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


def _arguments(call: schemas.ToolCall, where: str) -> dict[str, Any]:
    """Parses a call's arguments, as templates write the JSON themselves."""
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise bad_field(where, "not a JSON object")
    return arguments


def _with_thinking(message: dict[str, Any]) -> dict[str, Any]:
    """Adds the message's thoughts as gpt-oss's template expects: without content beside calls."""
    if "reasoning_content" not in message:
        return message
    calls = {"content": ""} if message.get("tool_calls") else {}
    return {**message, "thinking": message["reasoning_content"], **calls}
