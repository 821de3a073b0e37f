"""Tool calls: the grammar for calls that a request demands, and a parser for calls in a text.

The format of a call comes from the chat template: see `format_of`.
"""

from __future__ import annotations

import dataclasses
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from jax_attn.serve._chat import gemma_tool_calls
from jax_attn.serve._text.stop_strings import overlap


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: str  # a JSON object
    id: str | None = None  # if the model gave one


@dataclass(frozen=True)
class ToolFormat:
    """A format: opening + call (between + call)* + closing, where a call is
    before_name + its name + before_arguments + a JSON object + behind.
    """

    before_name: str
    before_arguments: str
    behind: str
    between: str | None  # None: at most one call
    opening: str = ""
    closing: str = ""
    # Marks around one or several calls. begin "": the whole text is calls, or none of it is. end
    # "": calls end at the next `begin` or at the end of the text.
    begin: str = ""
    end: str = ""
    short_ids: bool = False  # the template accepts only identifiers of 9 letters and digits
    parse: Callable[[str], list[ToolCall]] = lambda raw: _json_calls(raw)
    # Delimiter of strings where arguments are in Gemma's format instead of JSON.
    quote: str = ""

    def new_id(self) -> str:
        return secrets.token_hex(5)[:9] if self.short_ids else f"call_{secrets.token_hex(12)}"


# Hermes and Qwen: after a text or without one.
TAGGED = ToolFormat(
    '<tool_call>\n{"name": "',
    '", "arguments": ',
    "}\n</tool_call>",
    between="\n",
    begin="<tool_call>",
    end="</tool_call>",
)
# Llama 3: the whole answer is the call.
BARE = ToolFormat('{"name": "', '", "parameters": ', "}", between=None)


_mistral = partial(ToolFormat, begin="[TOOL_CALLS]", short_ids=True)

# Mistral: after a text or without one; words in brackets are special tokens. Older models write one
# list, some with a space before it. Newer ones write each call separately, some with an identifier
# (here any digit).
LISTED = _mistral(
    '{"name": "', '", "arguments": ', "}", between=", ", opening="[TOOL_CALLS][", closing="]"
)
LISTED_SPACE = dataclasses.replace(LISTED, opening="[TOOL_CALLS] [")
NAMED = _mistral("[TOOL_CALLS]", "[ARGS]", "", between="")
NAMED_ID = _mistral("[TOOL_CALLS]", "[CALL_ID]#########[ARGS]", "", between="")


def _deepseek(raw: str) -> list[ToolCall]:
    """The formats of DeepSeek V3 and R1, with arguments in a fence, and of V3.1."""
    calls = []
    for one in raw.split(_DEEPSEEK_CALL)[1:]:
        found = _DEEPSEEK_PARTS.fullmatch(one)
        if raw.lstrip()[: len(_DEEPSEEK_CALL)] != _DEEPSEEK_CALL or found is None:
            return []
        try:
            call = _call({"name": found["name"], "arguments": json.loads(found["arguments"])})
        except (ValueError, RecursionError):
            return []
        if call is None:
            return []
        calls.append(call)
    return calls


_DEEPSEEK_CALL = "<｜tool▁call▁begin｜>"
_DEEPSEEK_PARTS = re.compile(
    r"(function<｜tool▁sep｜>)?(?P<name>[\w.-]+)\s*(<｜tool▁sep｜>|```json)\s*"
    r"(?P<arguments>\{.*\})\s*(```)?\s*<｜tool▁call▁end｜>\s*",
    re.DOTALL,
)
_of_deepseek = partial(
    ToolFormat,
    opening="<｜tool▁calls▁begin｜>",
    closing="<｜tool▁calls▁end｜>",
    begin="<｜tool▁calls▁begin｜>",
    end="<｜tool▁calls▁end｜>",
    parse=_deepseek,
)
DEEPSEEK_V3 = _of_deepseek(
    f"{_DEEPSEEK_CALL}function<｜tool▁sep｜>",
    "\n```json\n",
    "\n```<｜tool▁call▁end｜>",
    between="\n",
)
DEEPSEEK = _of_deepseek(_DEEPSEEK_CALL, "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", between="")


def _gemma(begin: str, end: str, quote: str) -> ToolFormat:
    def parse(raw: str) -> list[ToolCall]:
        calls = gemma_tool_calls.parse(raw, quote)
        return [ToolCall(name, json.dumps(found, ensure_ascii=False)) for name, found in calls]

    return ToolFormat(
        f"{begin}call:", "", end, between="", begin=begin, end=end, quote=quote, parse=parse
    )


FUNCTION_GEMMA = _gemma("<start_function_call>", "<end_function_call>", "<escape>")
GEMMA_4 = _gemma("<|tool_call>", "<tool_call|>", '<|"|>')
# gpt-oss, whose answers `harmony` reads. `begin` is the special token that must be decoded.
HARMONY = ToolFormat(
    "<|channel|>commentary to=functions.",
    " <|constrain|>json<|message|>",
    "",
    between=None,
    begin="<|channel|>",
)


def format_of(template: str) -> ToolFormat | None:
    """The format that the chat template has the model write calls in; None: unknown."""
    if "[TOOL_CALLS]" in template:
        if "[ARGS]" in template:
            return NAMED_ID if "[CALL_ID]" in template else NAMED
        return LISTED_SPACE if "[TOOL_CALLS] [" in template else LISTED
    if "<|channel|>" in template and "functions" in template:
        return HARMONY
    if DEEPSEEK.begin in template:
        return DEEPSEEK_V3 if "```json" in template else DEEPSEEK
    for format in (FUNCTION_GEMMA, GEMMA_4):
        if format.begin in template:
            return format
    # Other models write XML or another format between these tags.
    if "<tool_call>" in template and re.search(r'\\?"arguments\\?": ', template):
        return TAGGED
    return BARE if '"parameters": dictionary of argument name' in template else None


def grammar_of(
    format: ToolFormat,
    functions: Sequence[dict[str, Any]],
    parallel: bool,
    answer: dict[str, Any] | None = None,
    special_tokens: Mapping[str, int] | None = None,
) -> str:
    """A Lark grammar for calls of the functions: one or, if `parallel`, one or more.

    functions: {"name": ..., "parameters": JSON schema of an object}, as clients send them.
    answer: a JSON schema for an answer that is allowed instead of calls.
    special_tokens: token ids of the tokenizer, by text.

    Raises:
      gemma_tool_calls.CannotDemand: a schema has no grammar in this format.
    """

    def literal(text: str) -> str:
        return _literal(text, special_tokens or {})

    names = [f"f{i}" for i in range(len(functions))]
    more = f"({literal(format.between)} call)*" if parallel and format.between is not None else ""
    lines = [
        "start: calls" if answer is None else "start: calls | answer",
        f"calls: {literal(format.opening)} call {more} {literal(format.closing)}",
        f"call: {' | '.join(names)}",
    ]
    if answer is not None:
        compact = {"x-guidance": {"whitespace_flexible": False}}
        lines.append(f"answer: %json {json.dumps(answer | compact)}")
    for rule, function in zip(names, functions, strict=True):
        head = literal(format.before_name + function["name"] + format.before_arguments)
        lines.append(f"{rule}: {head} {rule}_arguments {literal(format.behind)}")
        if format.quote:
            schema = function.get("parameters") or {}
            lines += gemma_tool_calls.rules(f"{rule}_arguments", schema, literal(format.quote))
            continue
        # The white space that models are trained with.
        schema = {
            "type": "object",
            **(function.get("parameters") or {"properties": {}, "additionalProperties": False}),
            "x-guidance": {
                "whitespace_flexible": False,
                "item_separator": ", ",
                "key_separator": ": ",
            },
        }
        lines.append(f"{rule}_arguments: %json {json.dumps(schema)}")
    return "\n".join(lines) + "\n"


def _literal(text: str, special_tokens: Mapping[str, int]) -> str:
    """`text` as a Lark literal. A # in `text` stands for a digit of an identifier."""
    parts = []
    for part in re.split(r"(\[[A-Z_]+\]|<[^<>]+>|#+)", text):
        if part in special_tokens:
            parts.append(f"<[{special_tokens[part]}]>")
        elif part.startswith("#"):
            parts.append(f"/[a-zA-Z0-9]{{{len(part)}}}/")
        elif part:
            parts.append(json.dumps(part))
    return " ".join(parts)


class ToolParser:
    """Separates tool calls in one text from the text around them, while it grows.

    Malformed calls stay text. White space around calls is dropped.
    """

    def __init__(self, format: ToolFormat):
        self.format = format
        self._begin, self._end = format.begin, format.end
        self._held = ""  # not returned yet
        self._is_inside = False  # inside calls whose end has not come yet
        self._is_behind = False  # after calls, with only white space since
        self._is_plain = False  # plain text: it did not begin as a call does

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """Returns the text that is known not to be part of a call, and the complete calls."""
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
            raw, tag, behind = self._held.partition(self._end or self._begin)
            if not tag:
                return shown, calls
            self._held, self._is_inside = behind, not self._end
            if new := self.format.parse(raw):
                calls += new
                self._is_behind = True
            else:
                shown += self._text(self._begin + raw + self._end)

    def flush(self) -> tuple[str, list[ToolCall]]:
        """Returns what is left at the end of the text."""
        held, self._held = self._held, ""
        if not self._is_inside:
            return self._text(held), []
        self._is_inside = False
        if not self._end and (calls := self.format.parse(held)):
            return "", calls
        return self._begin + held, []

    def _text(self, text: str) -> str:
        if self._is_behind:
            text = text.lstrip()
            self._is_behind = not text
        return text


# A name before its arguments, possibly with an identifier and special tokens between them.
_NAMED = re.compile(
    r"\s*(?P<name>[\w.-]+)\s*(\[CALL_ID\]\s*(?P<id>\w+)\s*)?(\[ARGS\])?\s*(?P<arguments>\{.*)",
    re.DOTALL,
)


def _json_calls(raw: str) -> list[ToolCall]:
    """Parses calls in any of the JSON formats, without the marks around them.

    Returns [] unless all of `raw` is calls.
    """
    try:
        if named := _NAMED.fullmatch(raw):
            found = [{**named.groupdict(), "arguments": json.loads(named["arguments"])}]
        else:
            found = _values(raw)
    except (ValueError, RecursionError):
        return []
    calls = [_call(item) for item in found]
    return [] if None in calls else calls  # type: ignore[return-value]


def _values(raw: str) -> list[Any]:
    """JSON values in a list or in sequence, with semicolons between them in Llama's format."""
    values: list[Any] = []
    while raw := raw.lstrip(" \n;"):
        value, end = json.JSONDecoder().raw_decode(raw)
        values += value if isinstance(value, list) else [value]
        raw = raw[end:]
    return values


def _call(found: Any) -> ToolCall | None:
    if not (isinstance(found, dict) and isinstance(found.get("name"), str)):
        return None
    # Models trained on either key sometimes write the other.
    arguments = found.get("arguments", found.get("parameters", {}))
    if not isinstance(arguments, dict):
        return None
    id = found.get("id")
    return ToolCall(
        found["name"],
        json.dumps(arguments, ensure_ascii=False),
        id if isinstance(id, str) and re.fullmatch("[a-zA-Z0-9]{9}", id) else None,
    )
