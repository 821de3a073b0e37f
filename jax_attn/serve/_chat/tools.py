"""Tool calls: the grammar of those that a request demands, and finding them in a text.

How a model writes a call is what its chat template taught it: see `format_of`.
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
    """What models write: opening + call (between + call)* + closing, where a call is
    before_name + its name + before_arguments + a JSON object + behind.
    """

    before_name: str
    before_arguments: str
    behind: str
    between: str | None  # None: there is one call
    opening: str = ""
    closing: str = ""
    # Around one or several calls: "", the beginning: all of the text is calls, or nothing is; "",
    # the end: it is the next beginning, or that of the text.
    begin: str = ""
    end: str = ""
    short_ids: bool = False  # the template refuses any but those of 9 letters and digits
    parse: Callable[[str], list[ToolCall]] = lambda raw: _json_calls(raw)
    # What texts stand between, where arguments are not JSON but written as Gemma does.
    quote: str = ""

    def new_id(self) -> str:
        return secrets.token_hex(5)[:9] if self.short_ids else f"call_{secrets.token_hex(12)}"


# Of Hermes and Qwen: behind a text or none.
TAGGED = ToolFormat(
    '<tool_call>\n{"name": "',
    '", "arguments": ',
    "}\n</tool_call>",
    between="\n",
    begin="<tool_call>",
    end="</tool_call>",
)
# Of Llama 3: the whole answer.
BARE = ToolFormat('{"name": "', '", "parameters": ', "}", between=None)


_mistral = partial(ToolFormat, begin="[TOOL_CALLS]", short_ids=True)

# Of Mistral, behind a text or none; what is in brackets are special tokens. First one list, by some
# models behind a space, later each call by itself, for a while with an identifier (here any digit).
LISTED = _mistral(
    '{"name": "', '", "arguments": ', "}", between=", ", opening="[TOOL_CALLS][", closing="]"
)
LISTED_SPACE = dataclasses.replace(LISTED, opening="[TOOL_CALLS] [")
NAMED = _mistral("[TOOL_CALLS]", "[ARGS]", "", between="")
NAMED_ID = _mistral("[TOOL_CALLS]", "[CALL_ID]#########[ARGS]", "", between="")


def _deepseek(raw: str) -> list[ToolCall]:
    """Of V3 and R1, whose arguments are in a fence, and of V3.1."""
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
# Of gpt-oss, whose answers `harmony` reads. `begin` is what must be shown of special tokens.
HARMONY = ToolFormat(
    "<|channel|>commentary to=functions.",
    " <|constrain|>json<|message|>",
    "",
    between=None,
    begin="<|channel|>",
)


def format_of(template: str) -> ToolFormat | None:
    """How the chat template has the model write calls; None if it is none of the known ways."""
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
    # Others have XML or something of their own between these tags.
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
    """A Lark grammar of calls of the functions, at least one; `parallel`: or several.

    functions: {"name": ..., "parameters": JSON schema of an object}, as clients send them.
    answer: a JSON schema of what may come instead of calls.
    special_tokens: of the tokenizer, by their text.

    Raises:
      gemma_tool_calls.CannotDemand: a schema says what there is no grammar of in this format.
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
        lines.append(f"{rule}_arguments: %json {json.dumps(schema)}")
    return "\n".join(lines) + "\n"


def _literal(text: str, special_tokens: Mapping[str, int]) -> str:
    """Of Lark. In `text`, digits of an identifier are number signs."""
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
    """Separates the calls in one text from what is said around them, while the text grows.

    What looks like a call and is none stays text. White space around calls is dropped.
    """

    def __init__(self, format: ToolFormat):
        self.format = format
        self._begin, self._end = format.begin, format.end
        self._held = ""  # not given out yet
        self._is_inside = False  # calls, whose end did not come yet
        self._is_behind = False  # calls, and nothing but white space came since
        self._is_plain = False  # without a beginning: it did not begin as a call does

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
        """What is left at the end of the text."""
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


# A name before its arguments, perhaps with an identifier and special tokens between them.
_NAMED = re.compile(
    r"\s*(?P<name>[\w.-]+)\s*(\[CALL_ID\]\s*(?P<id>\w+)\s*)?(\[ARGS\])?\s*(?P<arguments>\{.*)",
    re.DOTALL,
)


def _json_calls(raw: str) -> list[ToolCall]:
    """Calls in any of the formats with JSON, without what is around them; none unless all of it is
    calls."""
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
    """Of JSON: a list's, or those that follow each other, which Llama puts semicolons between."""
    values: list[Any] = []
    while raw := raw.lstrip(" \n;"):
        value, end = json.JSONDecoder().raw_decode(raw)
        values += value if isinstance(value, list) else [value]
        raw = raw[end:]
    return values


def _call(found: Any) -> ToolCall | None:
    if not (isinstance(found, dict) and isinstance(found.get("name"), str)):
        return None
    # Models of either format are seen to use the other's word.
    arguments = found.get("arguments", found.get("parameters", {}))
    if not isinstance(arguments, dict):
        return None
    id = found.get("id")
    return ToolCall(
        found["name"],
        json.dumps(arguments, ensure_ascii=False),
        id if isinstance(id, str) and re.fullmatch("[a-zA-Z0-9]{9}", id) else None,
    )
