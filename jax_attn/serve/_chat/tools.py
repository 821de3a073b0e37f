"""Tool calls: the grammar for calls that a request demands, and a parser for calls in a text.

The format of a call comes from the chat template: see `format_of`.
"""

from __future__ import annotations

import dataclasses
import json
import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from jax_attn.serve._chat import custom_tools, gemma_tool_calls, strict_json
from jax_attn.serve._chat.growing_calls import GrowingCall, GrowingCalls, Steps
from jax_attn.serve._text.stop_strings import overlap


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: str  # a JSON object
    id: str | None = None  # if the model gave one
    grown: GrowingCall | None = field(default=None, compare=False)  # it, while it was written


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
    grow: Callable[[GrowingCalls], Steps[None]] = lambda calls: _grow_json_calls(calls)
    # Delimiter of strings where arguments are in Gemma's format instead of JSON.
    quote: str = ""
    answer_opening: str = ""  # what precedes an answer that is no call

    @property
    def marks(self) -> list[str]:
        """The parts of the format that may be special tokens."""
        calls = self.before_name, self.before_arguments, self.behind
        parts = (self.begin, self.end, self.quote, *calls)
        return [mark for part in parts for mark in _MARK.findall(part)]

    def new_id(self) -> str:
        return secrets.token_hex(5)[:9] if self.short_ids else f"call_{secrets.token_hex(12)}"


# Malformed calls at the end of a text after each of which the rest is searched for strings again.
MOST_MALFORMED = 16

_MARK = re.compile(r"\[[A-Z_]+\]|<[^<>]+>")

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
BARE = ToolFormat(
    '{"name": "',
    '", "parameters": ',
    "}",
    between=None,
    parse=lambda raw: _bare_calls(raw),
    grow=lambda calls: _grow_bare_calls(calls),
)


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


_DEEPSEEK_CALL = "<｜tool▁call▁begin｜>"
_DEEPSEEK_HEAD = re.compile(
    rf"\s*{_DEEPSEEK_CALL}\s*(function<｜tool▁sep｜>)?(?P<name>[\w.-]+)\s*"
    r"(<｜tool▁sep｜>|```json)\s*(?=\{)"
)
_DEEPSEEK_TAIL = re.compile(r"\s*(```)?\s*<｜tool▁call▁end｜>\s*")


def _deepseek(raw: str) -> list[ToolCall]:
    """The formats of DeepSeek V3 and R1, with arguments in a fence, and of V3.1."""
    calls, at = [], 0
    while at < len(raw):
        if (head := _DEEPSEEK_HEAD.match(raw, at)) is None:
            return []
        try:
            end = strict_json.end_of_value(raw, head.end())
        except (ValueError, RecursionError):
            return []
        if (tail := _DEEPSEEK_TAIL.match(raw, end)) is None:
            return []
        calls.append(ToolCall(head["name"], strict_json.rewritten(raw[head.end() : end])))
        at = tail.end()
    return calls


def _grow_deepseek(calls: GrowingCalls) -> Steps[None]:
    while True:
        head = yield from calls.head(_DEEPSEEK_HEAD)
        yield from calls.arguments(head["name"])
        yield from calls.head(_DEEPSEEK_TAIL)


_of_deepseek = partial(
    ToolFormat,
    opening="<｜tool▁calls▁begin｜>",
    closing="<｜tool▁calls▁end｜>",
    begin="<｜tool▁calls▁begin｜>",
    end="<｜tool▁calls▁end｜>",
    parse=_deepseek,
    grow=_grow_deepseek,
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
        return [ToolCall(name, found) for name, found in gemma_tool_calls.parse(raw, quote)]

    def grow(calls: GrowingCalls) -> Steps[None]:
        return gemma_tool_calls.grow(calls, quote)

    return ToolFormat(
        f"{begin}call:",
        "",
        end,
        between="",
        begin=begin,
        end=end,
        quote=quote,
        parse=parse,
        grow=grow,
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
    answer_opening="<|channel|>final<|message|>",
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

    functions: {"name": ..., "parameters": JSON schema of an object}, as clients send them. With
        "input_grammar", a pair of syntax and definition, it is a custom tool.
    answer: a JSON schema for an answer that is allowed instead of calls.
    special_tokens: token ids of the tokenizer, by text.

    Raises:
      gemma_tool_calls.CannotDemand: a schema has no grammar in this format.
      custom_tools.CustomToolError: the input's grammar has none.
    """

    literal = partial(_literal, special_tokens=special_tokens or {})
    more = f"({literal(format.between)} call)*" if parallel and format.between is not None else ""
    lines = [
        "start: calls" if answer is None else "start: calls | answer",
        f"calls: {literal(format.opening)} call {more} {literal(format.closing)}",
    ]
    if answer is not None:
        compact = {"x-guidance": {"whitespace_flexible": False}}
        lines.append(f"answer: {literal(format.answer_opening)} answer_json")
        lines.append(f"answer_json: %json {json.dumps(answer | compact)}")
    return "\n".join(lines + _call_rules(format, format.before_name, functions, literal)) + "\n"


def grammar_once_begun(
    format: ToolFormat,
    functions: Sequence[dict[str, Any]],
    parallel: bool,
    special_tokens: Mapping[str, int],
    free_marks: Sequence[str] = (),
) -> str | None:
    """A Lark grammar for any text, in which calls follow the schemas of the functions.

    functions, parallel, special_tokens: see `grammar_of`; with "is_free", arguments are any text
        up to the mark behind it. Without `parallel` the text ends with
    its call. free_marks: marks that the text may have, though they may be special tokens.

    Returns None where only the whole text is a call, or its channels begin with other marks.

    Raises:
      gemma_tool_calls.CannotDemand: a schema has no grammar in this format.
      custom_tools.CustomToolError: the input's grammar has none.
    """
    mark = format.begin
    if not mark or format.answer_opening:
        return None
    literal = partial(_literal, special_tokens=special_tokens)
    if mark in special_tokens:  # which TEXT never matches
        head = f"head: TEXT <[{special_tokens[mark]}]>"
    else:
        head = f"head[lazy]: TEXT {json.dumps(mark)}"
    between, before_name = "", format.before_name.removeprefix(mark)
    if format.opening:
        before_name = format.before_name
        if parallel and format.between is not None:
            between = f"({literal(format.between)} call)*"
    free = [f"TEXT <[{special_tokens[x]}]>" for x in free_marks if x in special_tokens]
    free_parts = "free* " if free else ""
    lines = [
        f"start: {free_parts}(calls {free_parts})* TEXT"
        if parallel
        else f"start: {free_parts}(calls | TEXT)",
        head,
        f"calls: head {literal(format.opening.removeprefix(mark))} call {between}"
        f" {literal(format.closing)}",
        "TEXT: /(.|\\n)*/",
        *([f"free: {' | '.join(free)}"] if free else []),
    ]
    return "\n".join(lines + _call_rules(format, before_name, functions, literal)) + "\n"


def _call_rules(
    format: ToolFormat,
    before_name: str,
    functions: Sequence[dict[str, Any]],
    literal: Callable[[str], str],
) -> list[str]:
    """Lines of a Lark grammar: the rule `call`, and what it needs."""

    def head(name: str) -> str:
        text = before_name + name + format.before_arguments
        return literal(text) if format.begin else _json_literal(text)

    names = [f"f{i}" for i in range(len(functions))]
    lines = [f"call: {' | '.join(names)}"]
    for rule, function in zip(names, functions, strict=True):
        before = head(function["name"])
        lines.append(f"{rule}: {before} {rule}_arguments {literal(format.behind)}")
        if (given := function.get("input_grammar")) is not None:
            text = custom_tools.lark_of(given[0], given[1], not format.quote)
            if format.quote:
                quote = literal(format.quote)
                lines.append(
                    f'{rule}_arguments: "{{{custom_tools.INPUT}:" {quote} {rule}_input {quote} "}}"'
                )
            else:
                begin, end = custom_tools.arguments_of("|").split("|")
                lines.append(
                    f"{rule}_arguments: {json.dumps(begin)} {rule}_input {json.dumps(end)}"
                )
            lines.append(f"{rule}_input: %lark {{\n{text}}}")
            continue
        if function.get("is_free"):
            lines.append(f'{rule}_arguments: "{{" TEXT ({literal(format.quote)} TEXT)*')
            continue
        if format.quote:
            schema = function.get("parameters") or {}
            lines += gemma_tool_calls.rules(
                f"{rule}_arguments", schema, format.quote, literal(format.quote)
            )
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
    return lines


def _literal(text: str, special_tokens: Mapping[str, int]) -> str:
    """`text` as a Lark literal. A # in `text` stands for a digit of an identifier."""
    parts = []
    for part in re.split(rf"({_MARK.pattern}|#+)", text):
        if part in special_tokens:
            parts.append(f"<[{special_tokens[part]}]>")
        elif part.startswith("#"):
            parts.append(f"/[a-zA-Z0-9]{{{len(part)}}}/")
        elif part:
            parts.append(json.dumps(part))
    return " ".join(parts)


def _json_literal(text: str) -> str:
    """The beginning of a JSON text as a Lark terminal for each of its parts.

    A longer terminal would win over the beginning of an answer in JSON: no answer could follow.
    """
    return " ".join(map(json.dumps, re.findall(r'"[^"]*"|: |, |[{}]', text)))


class ToolParser:
    """Separates tool calls in one text from the text around them, while it grows.

    Malformed calls stay text. White space around calls is dropped.
    """

    def __init__(self, format: ToolFormat, names: Collection[str] | None = None):
        """names: of the functions. Where nothing marks a call, JSON with another name is text.

        None: any name is a function's.
        """
        self.format = format
        self._names = None if format.begin else names
        self._begin, self._end = format.begin, format.end
        self._held = ""  # not returned yet
        self._is_inside = False  # inside calls whose end has not come yet
        self._is_behind = False  # after calls, with only white space since
        self._is_plain = False  # plain text: it did not begin as a call does
        # A mark in a string is part of an argument, except after many malformed calls.
        self._strings: strict_json.StringScan | strict_json.QuoteScan | None = None
        self._num_malformed = 0  # found at the end of the text
        self._searched = 0  # characters of `_held` in which no mark ends the calls
        self._growing = GrowingCalls(format.grow, self._names)

    @property
    def growing(self) -> list[GrowingCall]:
        """The calls that are being written, as far as they are known."""
        return self._growing.calls if self._is_inside else []

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
            if self._is_inside:
                self._growing.push(self._held)
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
                self._enter(behind)
            if (at := self._end_of_calls()) < 0:
                self._growing.push(self._held)
                return shown, calls
            growing, raw = self._growing, self._take(at)
            if new := self._parse(raw, growing):
                calls += new
                self._is_behind = True
            else:
                shown += self._text(self._begin + raw + self._end)

    def flush(self, is_cut: bool = False) -> tuple[str, list[ToolCall]]:
        """Returns what is left at the end of the text.

        is_cut: the text would go on. The beginning of a call is then no text, and is dropped.
        """
        shown, calls = "", list[ToolCall]()
        while self._is_inside:
            if not self._end and (new := self._parse(self._held, self._growing)):
                return shown, calls + new
            # Malformed: the first mark ends the calls, whatever it is in.
            at = self._held.find(self._end or self._begin) if self._begin else -1
            if at < 0:
                self._is_inside = False
                if is_cut and self._begins_as_a_call():
                    return shown, calls
                return shown + self._text(self._begin + self._held), calls
            shown += self._text(self._begin + self._take(at) + self._end)
            self._num_malformed += 1
            more, new = self.push("")
            shown, calls = shown + more, calls + new
        held, self._held = self._held, ""
        if (
            is_cut
            and self._begin
            and len(mark := held.lstrip()) > 1
            and self._begin.startswith(mark)
        ):
            held = ""
        return shown + self._text(held), calls

    def _begins_as_a_call(self) -> bool:
        """Whether the held text, behind the mark if there is one, may be the beginning of calls."""
        text, format = self._held.lstrip(), self.format
        if not self._begin:  # only the name tells a call from an answer in JSON
            name = _BARE_NAME.match(text)
            return name is not None and (self._names is None or name[1] in self._names)
        head = (format.opening + format.before_name).partition(self._begin)[2].strip()
        return not text or text[0] in "{[" or (text[0] == head[0] if head else text[0].isalnum())

    def _enter(self, behind: str) -> None:
        """Begins calls, of which `behind` is known."""
        self._held, self._is_inside, self._searched = behind, True, 0
        self._growing = GrowingCalls(self.format.grow)
        quote = self.format.quote
        self._strings = strict_json.QuoteScan(quote) if quote else strict_json.StringScan()

    def _end_of_calls(self) -> int:
        """Where the mark begins that ends the calls; -1: not yet."""
        mark = self._end or self._begin
        while (at := self._held.find(mark, self._searched)) >= 0:
            assert self._strings is not None
            sees_strings = self._num_malformed < MOST_MALFORMED
            if not (sees_strings and self._strings.is_inside(self._held, at)):
                return self._held.find(mark) if self._strings.is_broken else at
            self._searched = at + 1
        self._searched = max(self._searched, len(self._held) - len(mark) + 1)
        return -1

    def _take(self, at: int) -> str:
        """Returns the calls before the mark at `at`, and goes on behind it."""
        raw, behind = self._held[:at], self._held[at + len(self._end or self._begin) :]
        if self._end:
            self._held, self._is_inside = behind, False
        else:
            self._enter(behind)
        return raw

    def _parse(self, raw: str, growing: GrowingCalls) -> list[ToolCall]:
        calls = self.format.parse(raw)
        if self._names is not None and not {call.name for call in calls} <= set(self._names):
            return []
        growing.push(raw)
        return joined(calls, growing)

    def _text(self, text: str) -> str:
        if self._is_behind:
            text = text.lstrip()
            self._is_behind = not text
        return text


def joined(calls: list[ToolCall], growing: GrowingCalls) -> list[ToolCall]:
    """The complete calls, each with what was known of it while it was written."""
    grown = [*growing.calls, *[None] * len(calls)]
    return [
        dataclasses.replace(call, grown=begun)
        if begun is not None and begun.begins(call.name, call.arguments)
        else call
        for call, begun in zip(calls, grown, strict=False)
    ]


_BARE_NAME = re.compile(r'\{\s*"name"\s*:\s*"([\w.-]+)"')
# A name before its arguments, possibly with an identifier and special tokens between them.
_NAMED = re.compile(r"\s*(?P<name>[\w.-]+)\s*(\[CALL_ID\]\s*(?P<id>\w+)\s*)?(\[ARGS\])?\s*(?=\{)")


def _json_calls(raw: str) -> list[ToolCall]:
    """Parses calls in any of the JSON formats, without the marks around them.

    Returns [] unless all of `raw` is calls.
    """
    if named := _NAMED.match(raw):
        arguments = raw[named.end() :]
        if not strict_json.is_object(arguments):
            return []
        return [ToolCall(named["name"], strict_json.rewritten(arguments), _id(named["id"]))]
    return _calls_of(raw, _call)


def _grow_json_calls(calls: GrowingCalls) -> Steps[None]:
    """Reads what `_json_calls` parses, while it is written."""
    if (yield from calls.next_character(str.isspace)) in "{[":
        yield from _grow_objects(calls)
    else:
        head = yield from calls.head(_NAMED)
        yield from calls.arguments(head["name"], _id(head["id"]))


def _grow_bare_calls(calls: GrowingCalls) -> Steps[None]:
    return _grow_objects(calls, _KEYS)


def _grow_objects(calls: GrowingCalls, keys: Collection[str] | None = None) -> Steps[None]:
    """Reads what `_values` finds. keys: that a call may have; None: any."""
    while True:
        yield from calls.next_character(" \n;".__contains__)
        if not (yield from calls.is_next("[")):
            yield from _grow_object(calls, keys)
        elif not (yield from calls.is_next("]")):
            yield from _grow_object(calls, keys)
            while (yield from calls.is_next(",")):
                yield from _grow_object(calls, keys)
            if not (yield from calls.is_next("]")):
                raise ValueError("no list")


def _grow_object(calls: GrowingCalls, keys: Collection[str] | None) -> Steps[None]:
    if not (yield from calls.is_next("{")):
        raise ValueError("no object")
    name, early = None, ""  # early: arguments before the name
    seen: set[str] = set()
    while True:
        key = json.loads((yield from calls.collected(calls.key)).removesuffix(": "))
        if (keys is not None and key not in keys) or key in seen:
            raise ValueError("no call")
        seen.add(key)
        if key in ("arguments", "parameters") and name is not None:
            yield from calls.arguments(name)
        else:
            value = yield from calls.collected(calls.value)
            if key == "name":
                name = _text(value)
                if not (name and name.isprintable()):
                    raise ValueError("no name")
                if early:
                    call = calls.begin(name)
                    call.new.append(early)
                    call.is_whole = True
            elif key in ("arguments", "parameters"):
                early = value
        if (yield from calls.is_next("}")):
            return
        if not (yield from calls.is_next(",")):
            raise ValueError("no comma")


def _bare_calls(raw: str) -> list[ToolCall]:
    """Parses a text that is calls and nothing more: other keys make it an answer in JSON."""

    def call(members: dict[str, str]) -> ToolCall | None:
        return _call(members) if members.keys() <= _KEYS else None

    return _calls_of(raw, call)


_KEYS = {"name", "arguments", "parameters", "id", "type"}


def _calls_of(raw: str, make: Callable[[dict[str, str]], ToolCall | None]) -> list[ToolCall]:
    try:
        calls = [make(strict_json.members(found, 0)[0]) for found in _values(raw)]
    except (ValueError, RecursionError):
        return []
    return [] if None in calls else calls  # type: ignore[return-value]


def _values(raw: str) -> list[str]:
    """JSON values in a list or in sequence, with semicolons between them in Llama's format."""
    values: list[str] = []
    while raw := raw.lstrip(" \n;"):
        if raw[0] == "[":
            found, end = strict_json.items(raw, 0)
            values += found
        else:
            end = strict_json.end_of_value(raw, 0)
            values.append(raw[:end])
        raw = raw[end:]
    return values


def _call(members: dict[str, str]) -> ToolCall | None:
    name, id = (_text(members.get(key, "")) for key in ("name", "id"))
    # Models trained on either key sometimes write the other.
    arguments = members.get("arguments", members.get("parameters", "{}"))
    # Half a surrogate pair, among others, cannot be printed, or sent.
    if not (name and name.isprintable() and arguments.startswith("{")):
        return None
    return ToolCall(name, strict_json.rewritten(arguments), _id(id))


def _text(value: str) -> str | None:
    """The string that a JSON value is; None: it is another value, or none."""
    return json.loads(value) if value.startswith('"') else None


def _id(id: str | None) -> str | None:
    return id if id is not None and re.fullmatch("[a-zA-Z0-9]{9}", id) else None
