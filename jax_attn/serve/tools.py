"""Tool calls: the grammar of those that a request demands, and finding them in a text.

How a model writes a call is what its chat template taught it. `format_of` knows two ways.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax_attn.serve.detokenizer import overlap


@dataclass(frozen=True)
class ToolFormat:
    """A call is begin + {"name": ..., arguments_key: {...}} + end."""

    begin: str
    end: str
    arguments_key: str


# Of Hermes and Qwen: any number of calls, behind a text or none.
TAGGED = ToolFormat("<tool_call>\n", "\n</tool_call>", "arguments")
# Of Llama 3: the whole answer is a call, or none of it.
BARE = ToolFormat("", "", "parameters")


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: str  # a JSON object


def format_of(template: str) -> ToolFormat | None:
    """How the chat template has the model write calls; None if it is neither of the known ways."""
    # Others have XML or something of their own between these tags.
    if "<tool_call>" in template and re.search(r'\\?"arguments\\?": ', template):
        return TAGGED
    return BARE if '"parameters": dictionary of argument name' in template else None


def grammar_of(
    format: ToolFormat,
    functions: Sequence[dict[str, Any]],
    parallel: bool,
    answer: dict[str, Any] | None = None,
) -> str:
    """A Lark grammar of calls of the functions, at least one; `parallel`: or several.

    functions: {"name": ..., "parameters": JSON schema of an object}, as clients send them.
    answer: a JSON schema of what may come instead of calls.
    """
    names = [f"f{i}" for i in range(len(functions))]
    several = parallel and bool(format.begin)
    lines = [
        "start: calls" if answer is None else "start: calls | answer",
        f"calls: call ({_quoted(chr(10))} call)*" if several else "calls: call",
        f"call: {_quoted(format.begin)} ({' | '.join(names)}) {_quoted(format.end)}"
        if format.begin
        else f"call: {' | '.join(names)}",
    ]
    if answer is not None:
        compact = {"x-guidance": {"whitespace_flexible": False}}
        lines.append(f"answer: %json {json.dumps(answer | compact)}")
    for rule, function in zip(names, functions, strict=True):
        head = f'{{"name": {_quoted(function["name"])}, "{format.arguments_key}": '
        # The white space that models are trained on.
        schema = {
            "type": "object",
            **(function.get("parameters") or {"properties": {}, "additionalProperties": False}),
            "x-guidance": {
                "whitespace_flexible": False,
                "item_separator": ", ",
                "key_separator": ": ",
            },
        }
        lines += [
            f"{rule}: {_quoted(head)} {rule}_arguments {_quoted('}')}",
            f"{rule}_arguments: %json {json.dumps(schema)}",
        ]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return json.dumps(text)


class ToolParser:
    """Separates the calls in one text from what is said around them, while the text grows.

    What looks like a call and is none stays text. White space around calls is dropped.
    """

    def __init__(self, format: ToolFormat):
        self._begin, self._end = format.begin.strip(), format.end.strip()
        self._held = ""  # not given out yet
        self._is_inside = False  # a call, whose end did not come yet
        self._is_behind = False  # a call, and nothing but white space came since
        self._is_plain = False  # without tags: it did not begin as a call does

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """The text that is known not to be of a call, and the calls that are complete."""
        self._held += text
        shown, calls = "", list[ToolCall]()
        if not self._begin:
            if not self._is_plain:
                start = self._held.lstrip()[:1]
                self._is_inside, self._is_plain = start == "{", start not in ("", "{")
            if self._is_plain:
                shown, self._held = self._held, ""
            return shown, calls
        while True:
            if not self._is_inside:
                before, tag, behind = self._held.partition(self._begin)
                if not tag:
                    keep = overlap(before, self._begin)
                    sure = before[: len(before) - keep].rstrip()
                    shown += self._text(sure)
                    self._held = before[len(sure) :]
                    return shown, calls
                shown += self._text(before.rstrip())
                self._held, self._is_inside = behind, True
            raw, tag, behind = self._held.partition(self._end)
            if not tag:
                return shown, calls
            self._held, self._is_inside = behind, False
            if (call := _parse(raw)) is not None:
                calls.append(call)
                self._is_behind = True
            else:
                shown += self._text(self._begin + raw + self._end)

    def flush(self) -> tuple[str, list[ToolCall]]:
        """What is left at the end of the text."""
        held, self._held = self._held, ""
        if not self._is_inside:
            return self._text(held), []
        self._is_inside = False
        if not self._begin and (call := _parse(held)) is not None:
            return "", [call]
        return self._begin + held, []

    def _text(self, text: str) -> str:
        if self._is_behind:
            text = text.lstrip()
            self._is_behind = not text
        return text


def _parse(raw: str) -> ToolCall | None:
    try:
        call = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not (isinstance(call, dict) and isinstance(call.get("name"), str)):
        return None
    # Models of either format are seen to use the other's word.
    arguments = call.get("arguments", call.get("parameters", {}))
    if not isinstance(arguments, dict):
        return None
    return ToolCall(call["name"], json.dumps(arguments, ensure_ascii=False))
