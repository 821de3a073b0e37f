"""Calls as a client of a stream puts them together."""

from __future__ import annotations

import json
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from pydantic_core import from_json

from jax_attn.serve._chat.harmony import HarmonySplitter
from jax_attn.serve._chat.tools import HARMONY, ToolFormat
from jax_attn.serve._openai.response_format import CallPart, SplitText


class Joined:
    """Joins the parts of calls, and checks each."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.ended: set[int] = set()

    def add(self, part: CallPart) -> None:
        call = part.call
        if part.is_first:
            assert call.index == len(self.calls) and not part.arguments and not part.is_last
            self.calls.append({"id": call.id, "name": call.name, "arguments": ""})
            return
        assert call.index not in self.ended
        self.ended |= {call.index} if part.is_last else set()
        joined = self.calls[call.index]
        joined["arguments"] += part.arguments
        # Whoever reads as it comes gets the beginning of an object. Pydantic's reader knows no half
        # surrogate pairs.
        text = joined["arguments"]
        if part.arguments and "\\ud" not in text:
            assert isinstance(from_json(text, allow_partial="trailing-strings"), dict), text


def split(format: ToolFormat, names: Iterable[str], most: int | None = None) -> SplitText:
    is_harmony = format == HARMONY
    return SplitText(
        SimpleNamespace(  # type: ignore[arg-type]
            tool_format=None if is_harmony else format,
            tool_names=frozenset(names),
            custom_tools=frozenset(),
            splitter=HarmonySplitter if is_harmony else None,
            shows_reasoning=True,
            max_tool_calls=most,
        )
    )


def streamed(
    format: ToolFormat, names: Iterable[str], pieces: Iterable[str], finish: str = "stop"
) -> tuple[str, list[tuple[str, str]], SplitText]:
    """The text and the calls of a stream, and what split it."""
    splitter, joined, content = split(format, names), Joined(), ""
    for piece, reason in [*((piece, None) for piece in pieces), ("", finish)]:
        content += splitter.push(piece, reason, streams=True)[1]
        for part in (*splitter.continued, *splitter.begun):
            joined.add(part)
    return content, [(call["name"], call["arguments"]) for call in joined.calls], splitter


def calls_of_chunks(chunks: Iterable[str], choice: int = 0) -> list[dict[str, Any]]:
    """The calls of a choice in the events of a chat completion, as in its message."""
    calls: list[dict[str, Any]] = []
    for chunk in map(json.loads, chunks):
        for each in chunk["choices"]:
            for part in (each["delta"]["tool_calls"] or ()) if each["index"] == choice else ():
                if part["index"] == len(calls):
                    assert part["function"]["arguments"] == ""
                    calls.append({key: part[key] for key in ("id", "type", "function")})
                else:
                    assert part.keys() == {"index", "function"}
                    assert part["function"].keys() == {"arguments"}
                    calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    return calls
