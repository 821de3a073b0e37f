"""Tool calls: required by a grammar, found in a text, shown to the model, sent to the client."""

import json
import random

import pytest

pytest.importorskip("starlette", reason="needs the extra `serve`")

from helpers.serve.fake_engine import MODEL, FakeEngine, fake_model
from helpers.serve.live_server import serving
from helpers.serve.streamed_calls import Joined, calls_of_chunks, split, streamed
from helpers.serve.tokenizer_kinds import byte_level, with_added
from helpers.serve.written_calls import as_gemma, written
from jax_attn.serve._chat import gemma_tool_calls, strict_json, tools
from jax_attn.serve._chat.growing_calls import MOST_NESTED, GrowingCall, GrowingCalls
from jax_attn.serve._chat.harmony import HarmonySplitter
from jax_attn.serve._chat.tools import (
    BARE,
    DEEPSEEK,
    DEEPSEEK_V3,
    FUNCTION_GEMMA,
    GEMMA_4,
    HARMONY,
    LISTED,
    LISTED_SPACE,
    NAMED,
    NAMED_ID,
    TAGGED,
    ToolCall,
    ToolParser,
)
from jax_attn.serve._grammar import grammar

CHAT = "/v1/chat/completions"
WEATHER = {
    "name": "get_weather",
    "description": "of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "unit": {"$ref": "#/$defs/unit"}},
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"unit": {"enum": ["C", "F"]}},
    },
}
# Without a reference, which Gemma's format cannot express as a grammar.
PLAIN_WEATHER = WEATHER | {
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "unit": {"enum": ["C", "F"]}},
        "required": ["city"],
    }
}
NOTHING = {"name": "do-nothing"}
NAMES = {"get_weather", "do-nothing", "f", "g", "g-h"}
TOOLS = [{"type": "function", "function": function} for function in (WEATHER, NOTHING)]
BIG = {"const": 2**53 + 1}
ASKED = {"messages": [{"role": "user", "content": "Rain?"}], "tools": TOOLS, "max_tokens": 100}


def call(name: str, arguments: dict, format=TAGGED) -> str:
    """One of several calls; with an identifier if the format has one."""
    before = (format.before_name + name + format.before_arguments).replace("#" * 9, "123abcDEF")
    written = as_gemma(arguments, format.quote) if format.quote else json.dumps(arguments)
    return before + written + format.behind


def calls(format, *one: str) -> str:
    return format.opening + (format.between or "").join(one) + format.closing


def mistral_tokenizer():
    """The bundled model's tokenizer with more special tokens, by their texts."""
    tokenizer = fake_model().tokenizer
    texts = ["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"]
    tokenizer.add_special_tokens(texts)
    return tokenizer, {text: tokenizer.token_to_id(text) for text in texts}


PARIS = call("get_weather", {"city": "Paris"})
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
ARGUMENTS = {"x": [1, -2.5, True, None, "a,b]"], "y": {"z": "}é\n", "w": {}}, "v": []}
IDLE = call("do-nothing", {})


# ---- in a text ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("format", "text", "shown", "expected"),
    [
        (TAGGED, "Just a text, a < b.\n", "Just a text, a < b.\n", []),
        (TAGGED, PARIS, "", [("get_weather", {"city": "Paris"})]),
        (
            TAGGED,
            f"Let me see.\n\n{PARIS}\n{IDLE}\n",
            "Let me see.",
            [("get_weather", {"city": "Paris"}), ("do-nothing", {})],
        ),
        (TAGGED, f"{IDLE} and then\n", "and then\n", [("do-nothing", {})]),
        (TAGGED, '<tool_call>{"name":"f"}</tool_call>', "", [("f", {})]),
        # Text that is no call and must not be lost: cut off, no JSON, no name, arguments not an
        # object.
        (TAGGED, PARIS[:-5], PARIS[:-5], []),
        (TAGGED, "<tool_call>\nhello\n</tool_call>", "<tool_call>\nhello\n</tool_call>", []),
        (TAGGED, '<tool_call>{"a": 1}</tool_call>', '<tool_call>{"a": 1}</tool_call>', []),
        (TAGGED, '<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', []),
        (TAGGED, "a <tool_cal", "a <tool_cal", []),
        (BARE, call("f", {"x": 1}, BARE), "", [("f", {"x": 1})]),
        (BARE, " \n" + call("f", {"x": 1}, BARE), "", [("f", {"x": 1})]),
        (BARE, "See: " + call("f", {}, BARE), "See: " + call("f", {}, BARE), []),
        (BARE, '{"answer": 42}', '{"answer": 42}', []),
        (BARE, "", "", []),
        (BARE, '{"name": "f"}; {"name": "g"}', "", [("f", {}), ("g", {})]),
        (LISTED, "No [a] call.\n", "No [a] call.\n", []),
        (LISTED, calls(LISTED, call("f", {"x": [1]}, LISTED)), "", [("f", {"x": [1]})]),
        (
            LISTED_SPACE,
            "So: "
            + calls(LISTED_SPACE, call("f", {"x": "]"}, LISTED), call("g", {}, LISTED))
            + "\n",
            "So:",
            [("f", {"x": "]"}), ("g", {})],
        ),
        (LISTED, '[TOOL_CALLS][{"name": "f"}', '[TOOL_CALLS][{"name": "f"}', []),
        (LISTED, '[TOOL_CALLS][{"name": "f"}, 5]', '[TOOL_CALLS][{"name": "f"}, 5]', []),
        (LISTED, "[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
        (
            NAMED,
            "So: " + call("f", {"x": {"y": 1}}, NAMED) + call("g-h", {}, NAMED) + "\n",
            "So:",
            [("f", {"x": {"y": 1}}), ("g-h", {})],
        ),
        (NAMED, '[TOOL_CALLS]f{"x": 1}', "", [("f", {"x": 1})]),
        (NAMED_ID, call("f", {}, NAMED_ID) + call("g", {}, NAMED_ID), "", [("f", {}), ("g", {})]),
        *(
            (
                format,
                "So: " + calls(format, call("f", ARGUMENTS, format), call("g-h", {}, format)),
                "So:",
                [("f", ARGUMENTS), ("g-h", {})],
            )
            for format in (DEEPSEEK, DEEPSEEK_V3, FUNCTION_GEMMA, GEMMA_4)
        ),
        *(
            (DEEPSEEK, f"{DEEPSEEK.begin}{raw}{DEEPSEEK.end}", "nothing less", [])
            for raw in ("", "x", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{<｜tool▁call▁end｜>")
        ),
        *(
            (GEMMA_4, f"<|tool_call>{raw}<tool_call|>", "nothing less", [])
            for raw in ("", "call:f", "call:f{a}", "call:f{a:b}", "call:f{a:1", "call:f{}}", "f{}")
        ),
        (GEMMA_4, "<|tool_call>call:f{" + "a:{" * 9999, "nothing less", []),
        # JSON with the name of no function, or with more than a call has, is an answer.
        *(
            (BARE, text, text, [])
            for text in (
                '{"name": "Paris", "population": 5}',
                '{"name": "Paris", "parameters": {}}',
                '{"name": "f", "population": 5}',
                '{"name": "f"}; {"name": "Paris"}',
                '[{"name": "f"}]',
            )
        ),
        (BARE, '{"type": "function", "name": "f", "arguments": {}}', "", [("f", {})]),
        # Malformed calls end at the first mark, and others follow.
        (TAGGED, f'<tool_call>{{"a</tool_call> x {IDLE}', "nothing more", [("do-nothing", {})]),
        (NAMED, '[TOOL_CALLS]f{"a[TOOL_CALLS]g{}', "nothing more", [("g", {})]),
        (
            TAGGED,
            f'<tool_call>{{"a\n</tool_call> x {call("f", {"a": "</tool_call>"})}',
            "nothing more",
            [("f", {"a": "</tool_call>"})],
        ),
        (GEMMA_4, '<|tool_call>call:f{a:<|"|><tool_call|>', "nothing less", []),
        (TAGGED, '<tool_call>{"name": "\\ud800"}</tool_call>', "nothing less", []),
        (TAGGED, '<tool_call>{"name": ""}</tool_call>', "nothing less", []),
        *(
            (format, before + number + behind, "nothing less", [])
            for number in ("NaN", "Infinity", "-Infinity")
            for format, before, behind in (
                (TAGGED, '<tool_call>{"name": "f", "arguments": {"x": ', "}}</tool_call>"),
                (BARE, '{"name": "f", "parameters": {"x": ', "}}"),
                (NAMED, '[TOOL_CALLS]f[ARGS]{"x": ', "}"),
                (GEMMA_4, "<|tool_call>call:f{x:", "}<tool_call|>"),
                (
                    DEEPSEEK,
                    f'{DEEPSEEK.opening}{DEEPSEEK.before_name}f<｜tool▁sep｜>{{"x": ',
                    f"}}{DEEPSEEK.behind}{DEEPSEEK.closing}",
                ),
            )
        ),
        (
            GEMMA_4,
            '<|tool_call>call:f{<|"|>a b<|"|>: None}<tool_call|>',
            "",
            [("f", {"a b": None})],
        ),
        (NAMED, "[TOOL_CALLS]f[ARGS]{", "[TOOL_CALLS]f[ARGS]{", []),
        (NAMED, call("f", {}, NAMED) + "[TOOL_CALLS]", "[TOOL_CALLS]", [("f", {})]),
    ],
)
def test_calls_are_found_however_the_text_is_cut(format, text, shown, expected):
    rng = random.Random(text)
    for longest in (len(text) + 1, 1, 2, 3, 5, 8, 13):
        parser, got_text, got_calls, rest = ToolParser(format, NAMES), "", [], text
        while rest:
            n = rng.randint(1, longest)
            new_text, new_calls = parser.push(rest[:n])
            got_text, rest = got_text + new_text, rest[n:]
            got_calls += new_calls
        last_text, last_calls = parser.flush()
        if shown == "nothing more":
            shown = text[: text.rindex(format.begin)].rstrip()
        assert got_text + last_text == (text if shown == "nothing less" else shown)
        found = [(c.name, json.loads(c.arguments)) for c in got_calls + last_calls]
        assert found == expected


FORMATS = (
    TAGGED, BARE, LISTED, LISTED_SPACE, NAMED, NAMED_ID, DEEPSEEK, DEEPSEEK_V3, FUNCTION_GEMMA,
    GEMMA_4, HARMONY,
)  # fmt: skip


def read(format, *pieces) -> list[tuple[str, str]]:
    if format == HARMONY:
        splitter = HarmonySplitter()
        parts = [*map(splitter.push, pieces), splitter.flush()]
        return [(call.name, call.arguments) for part in parts for call in part.calls]
    parser = ToolParser(format, NAMES)
    parts = [*map(parser.push, pieces), parser.flush()]
    return [(call.name, call.arguments) for _, calls in parts for call in calls]


@pytest.mark.parametrize("format", FORMATS)
def test_marks_in_arguments(format):
    """The marks of every format are text in a string, also beside quotes and backslashes."""
    marks = [mark for each in FORMATS for mark in each.marks if mark != format.quote]
    texts = [*marks, "```", "{", "}]", "; "]
    if not format.quote:
        texts += [f'\\"{mark}"' for mark in marks] + ["\\", '"']
    arguments = json.dumps({"x": texts, "y": {"z": "".join(texts)}}, ensure_ascii=False)
    text = written(format, [("f", arguments), ("g", arguments)])
    for pieces in ([text], list(text)):
        assert read(format, *pieces) == [("f", arguments), ("g", arguments)]


@pytest.mark.parametrize("format", FORMATS)
def test_arguments_keep_their_values(format):
    """Numbers keep all their digits, and half a surrogate pair its escape, which can be sent."""
    arguments = '{"x": [1e999, -1e400, 123456789012345678901, 0.10000000000000000555, 1.0, 5e-324]}'
    assert read(format, written(format, [("f", arguments)])) == [("f", arguments)]
    if not format.quote:
        arguments = '{"a\\udfff": ["\\ud800", "\\udc00\\ud800", "\\ud83d\\ude00 \\u00e9"]}'
        ((_, found),) = read(format, written(format, [("f", arguments)]))
        found.encode()
        assert json.loads(found) == json.loads(arguments)


# ---- while they are written --------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
def test_arguments_come_as_they_are_written(format):
    """However the text is cut, the pieces are the whole's arguments, and each is the earliest."""
    values = ARGUMENTS | {"e": [[], {}, [{"a": [1e3]}]], "t": "</tool_call> [TOOL_CALLS] \\ {"}
    made = [("f", json.dumps(values, ensure_ascii=False)), ("g", "{}"), ("f", '{"a": "b"}')]
    text = written(format, made)
    cuts = [[text[:at], text[at:]] for at in range(1, len(text), 3)]
    rng = random.Random(0)
    for longest in (1, 2, 5, 9):
        places = sorted(rng.sample(range(len(text)), len(text) // longest))
        cuts.append([text[a:b] for a, b in zip([0, *places], [*places, None], strict=True)])
    for pieces in ([text], list(text), *cuts):
        content, found, splitter = streamed(format, NAMES, pieces)
        assert (content, found) == ("", made)
        assert [(c.function.name, c.function.arguments) for c in splitter.calls] == made
    splitter, told = split(format, NAMES), []
    for at, character in enumerate(text):
        splitter.push(character, None, streams=True)
        parts = [*splitter.continued, *splitter.begun]
        told += [at] * any(part.arguments for part in parts)
    # One character at a time: all but those of marks, escapes, numbers and words.
    assert len(told) > 0.4 * sum(len(arguments) for _, arguments in made)


@pytest.mark.parametrize(
    ("format", "raw"),
    [
        (TAGGED, '<tool_call>{"id": [{"x": "}"}], "arguments": {"a": 1}, "name": "f"}</tool_call>'),
        (TAGGED, '<tool_call> [ {"name":"f","arguments":{"a":1},"type":"x"} ] </tool_call>'),
        (TAGGED, '<tool_call>{"name": "g", "arguments": {"a": 2}, "name": "f", '
         '"arguments": {"a": 1}}</tool_call>'),
        (TAGGED, '<tool_call>f {"a" : 1 }</tool_call>'),
        (LISTED, '[TOOL_CALLS][{"arguments": {"\\u0061": 1}, "id": "123abcDEF", "name": "f"}]'),
        (BARE, ' {"type": "function", "name": "f", "parameters": {"a":\n1}}'),
        (GEMMA_4, "<|tool_call>call: f {<|\"|>a<|\"|> : 1 }<tool_call|>"),
        (DEEPSEEK, f"{DEEPSEEK.begin}<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n"
         f'```json\n{{"a":1}}\n```<｜tool▁call▁end｜>{DEEPSEEK.end}'),
    ],
)  # fmt: skip
def test_calls_that_are_written_otherwise(format, raw):
    for pieces in ([raw], list(raw)):
        content, found, splitter = streamed(format, NAMES, pieces)
        assert content == "" and found[-1] == ("f", '{"a": 1}')
        # What has been sent cannot be taken back.
        assert len(found) == 1 + (len(pieces) > 1 and '"g"' in raw)
        assert [call.function.name for call in splitter.calls] == ["f"]


def test_infinite_numbers_are_sent_as_json_and_strings_stay():
    text = json.dumps({"a": -float("inf"), "b": [float("inf"), 'Infinity "Infinity"']})
    sent = strict_json.sendable(text)
    assert sent == '{"a": -1e999, "b": [1e999, "Infinity \\"Infinity\\""]}'
    assert json.loads(sent) == json.loads(text)


@pytest.mark.parametrize("format", FORMATS)
def test_a_stream_ends_in_arguments(format):
    """A call that is cut has a valid beginning of its arguments, and none is complete."""
    arguments = '{"city": "\\ud83d\\ude00 P", "x": [1.5e3, true, {"y": null}]}'
    if format.quote:
        arguments = '{"city": "😀 P", "x": [1.5e3, true, {"y": null}]}'
    text = written(format, [("f", arguments)])
    whole = strict_json.rewritten(arguments)
    end = len(text) - len(format.behind + format.closing) - len("<|call|>") * (format == HARMONY)
    lengths = []
    for at in range(1, end):
        _, found, splitter = streamed(format, NAMES, [text[:at]], "length")
        assert not splitter.calls
        assert len(found) <= 1 and all(name == "f" for name, _ in found)
        lengths += [len(part) for _, part in found if whole.startswith(part)]
    assert len(lengths) >= 0.8 * len(arguments) and lengths == sorted(lengths)
    assert lengths[-1] >= len(whole) - 2


@pytest.mark.parametrize(
    "broken", ['{"x": NaN}', '{"x": 1,}', '{"x" 1}', '{"x": "\n"}', '{"x": 01}']
)
def test_malformed_arguments_in_a_stream(broken):
    """The call ends before what is malformed; the text and the other calls are the whole's."""
    text = f'<tool_call>{{"name": "f", "arguments": {broken}}}</tool_call>\n{IDLE}'
    for pieces in ([text], list(text)):
        content, found, splitter = streamed(TAGGED, NAMES, pieces)
        assert content == text[: text.rindex("<tool_call>")].rstrip()
        assert found[-1] == ("do-nothing", "{}") and len(splitter.calls) == 1
        assert all(arguments.strip() in broken for _, arguments in found[:-1])


def test_the_most_calls_of_a_stream():
    text = written(TAGGED, [("f", '{"a": 1}'), ("g", "{}")])
    for pieces in ([text], list(text)):
        splitter, joined = split(TAGGED, NAMES, most=1), Joined()
        for piece in pieces:
            splitter.push(piece, None, streams=True)
            for part in (*splitter.continued, *splitter.begun):
                joined.add(part)
        assert [call["name"] for call in joined.calls] == ["f"] and joined.ended == {0}


@pytest.mark.parametrize("format", [TAGGED, GEMMA_4, HARMONY])
def test_arguments_are_read_once(format, monkeypatch):
    """A long argument costs each character once, not with each token again."""
    num_read, push = 0, GrowingCalls.push

    def counted(self, text):
        nonlocal num_read
        before = self.at
        push(self, text)
        num_read += self.at - before

    monkeypatch.setattr(GrowingCalls, "push", counted)
    text = written(format, [("f", json.dumps({"a": "b" * 3000, "c": int("1" * 3000)}))])
    _, found, _ = streamed(format, NAMES, list(text))
    assert len(found) == 1 and num_read <= len(text)


def test_channels():
    splitter = HarmonySplitter()
    text = (
        ' to=functions.f<|channel|>commentary json<|message|>{"a": "<|call|>"}<|call|>'
        '<|start|>assistant<|channel|>commentary to=functions.g<|message|>{"a": NaN}<|call|>'
        '<|start|>assistant<|channel|>commentary to=functions.g<|message|>{"a<|call|>'
        "<|start|>assistant<|channel|>analysis<|message|>hm<|end|>"
        "<|start|>assistant<|channel|>final<|message|>done<|return|>"
    )
    for pieces in ([text], list(text)):
        splitter = HarmonySplitter()
        parts = [*map(splitter.push, pieces), splitter.flush()]
        (found,) = [each for part in parts for each in part.calls]
        assert found == ToolCall("f", '{"a": "<|call|>"}')
        assert "".join(part.reasoning for part in parts) == "hm"
        assert "".join(part.content for part in parts) == '{"a": NaN}\n{"a\ndone'
    for text in ("t", "to be", "<", "to=x"):
        splitter = HarmonySplitter()
        shown = splitter.push(text).content + splitter.flush().content
        assert shown == ("" if text == "to=x" else text)


def test_a_header_that_is_too_long_is_text():
    """It begins with the mark of a header, at which the splitter must not look for ever."""
    short, long = "<|channel|>analysis".ljust(256), "<|channel|>analysis".ljust(257)
    begun = " <|start|>assistant"
    for header, content, reasoning in (
        (short, "", "hm"),
        (long, f"{long}<|message|>hm", ""),
        (begun + short, begun, "hm"),
        (begun + long, f"{begun}\n{long}<|message|>hm", ""),
    ):
        text = f"{header}<|message|>hm<|end|>"
        for pieces in ([text], list(text)):
            splitter = HarmonySplitter()
            parts = [*map(splitter.push, pieces), splitter.flush()]
            assert "".join(part.content for part in parts) == content
            assert "".join(part.reasoning for part in parts) == reasoning


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: ToolParser(TAGGED), '<tool_call>{"a' + "</tool_call>" * 500),
        (lambda: ToolParser(TAGGED), '<tool_call>{"a</tool_call>' * 500),
        (lambda: ToolParser(NAMED), '[TOOL_CALLS]f{"a' * 500),
        (HarmonySplitter, '<|channel|>x to=f<|message|>{"a<|call|>' * 500),
    ],
)
def test_malformed_calls_cost_a_few_searches(make, text, monkeypatch):
    """Not one of the rest of the text for each."""
    num_places = 0
    is_inside = strict_json.StringScan.is_inside

    def counted(self, *args):
        nonlocal num_places
        num_places += 1
        return is_inside(self, *args)

    monkeypatch.setattr(strict_json.StringScan, "is_inside", counted)
    parser = make()
    parser.push(text)
    parser.flush()
    assert num_places <= 20 * 1000


def test_identifiers():
    """The model's own identifiers, and otherwise new ones that its template accepts."""
    assert ToolParser(NAMED_ID).push(call("f", {}, NAMED_ID) * 2)[1] == [
        ToolCall("f", "{}", "123abcDEF")
    ]
    parser = ToolParser(LISTED)
    parser.push('[TOOL_CALLS][{"name": "f", "id": "123abcDEF"}, {"name": "g", "id": "1"}]')
    assert [found.id for found in parser.flush()[1]] == ["123abcDEF", None]
    for format in (LISTED, LISTED_SPACE, NAMED, NAMED_ID):
        assert len(format.new_id()) == 9 and format.new_id().isalnum()
        assert format.new_id() != format.new_id()
    assert len({TAGGED.new_id(), TAGGED.new_id()}) == 2


def test_text_is_not_held_longer_than_it_must():
    parser = ToolParser(TAGGED)
    assert parser.push("a b") == ("a b", [])
    assert parser.push(" <tool") == ("", [])
    assert parser.push("box>") == (" <toolbox>", [])
    assert parser.push(f"x{PARIS}") == ("x", [ToolCall("get_weather", '{"city": "Paris"}')])
    malformed = '<tool_call>say "hi</tool_call>'
    assert ToolParser(TAGGED).push(malformed) == (malformed, [])
    parser = ToolParser(BARE)
    assert parser.push("No") == ("No", [])
    assert parser.push("{") == ("{", [])


# ---- required ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("format", "parallel", "answer", "text", "fits"),
    [
        (TAGGED, True, None, PARIS, True),
        (TAGGED, True, None, f"{PARIS}\n{IDLE}", True),
        (TAGGED, False, None, f"{PARIS}\n{IDLE}", False),
        (TAGGED, True, None, "No.", False),
        (TAGGED, True, None, call("get_weather", {}), False),
        (TAGGED, True, None, call("get_weather", {"city": "a", "unit": "C"}), True),
        (TAGGED, True, None, call("get_weather", {"city": "a", "unit": "K"}), False),
        (TAGGED, True, None, call("do-nothing", {"x": 1}), False),
        (TAGGED, True, None, call("another", {}), False),
        (TAGGED, True, {"type": "integer"}, "17", True),
        (TAGGED, True, {"type": "integer"}, IDLE, True),
        (TAGGED, True, {"type": "integer"}, "x", False),
        (BARE, True, None, call("get_weather", {"city": "a"}, BARE), True),
        (BARE, True, PERSON, call("get_weather", {"city": "a", "unit": "C"}, BARE), True),
        (BARE, True, PERSON, '{"name":"Ann","age":5}', True),
        (BARE, True, PERSON, '{"name":"get_weather","age":5}', True),
        (BARE, True, PERSON, '{"name":"get_weather"}', False),
        (BARE, True, PERSON, call("get_weather", {}, BARE), False),
        (BARE, True, {"required": ["x"]}, '{"x":1}', True),
        (BARE, True, {}, "[1]", True),
        (HARMONY, True, PERSON, '<|channel|>final<|message|>{"name":"Ann","age":5}', True),
        (HARMONY, True, PERSON, '{"name":"Ann","age":5}', False),
        (BARE, True, None, PARIS, False),
        *(
            (format, parallel, None, calls(format, *[call("do-nothing", {}, format)] * n), fits)
            for format in (
                LISTED,
                LISTED_SPACE,
                NAMED,
                NAMED_ID,
                DEEPSEEK,
                DEEPSEEK_V3,
                FUNCTION_GEMMA,
            )  # fmt: skip
            for parallel, n, fits in ((True, 1, True), (True, 2, True), (False, 2, False))
        ),
        *(
            (format, True, None, calls(format, call("get_weather", arguments, format)), fits)
            for format in (DEEPSEEK_V3, FUNCTION_GEMMA, GEMMA_4, HARMONY)
            for arguments, fits in (
                ({"city": "Paris"}, True),
                ({"city": "Paris", "unit": "C"}, True),
                ({"city": "Paris", "unit": "K"}, False),
                ({"unit": "C"}, False),
                ({"city": 5}, False),
                ({"city": "Paris", "x": 1}, False),
                ({}, False),
            )
        ),
        (LISTED, True, None, calls(LISTED_SPACE, call("do-nothing", {}, LISTED)), False),
        (NAMED_ID, True, None, call("do-nothing", {}, NAMED), False),
        (NAMED, True, {"type": "integer"}, "17", True),
        # Plain text in the place of special tokens is no call.
        (NAMED, True, None, None, False),
    ],
)
def test_grammar(format, parallel, answer, text, fits):
    tokenizer, special = mistral_tokenizer()
    grammars = grammar.Grammars(tokenizer, tokenizer.get_vocab_size(), (0,))
    weather = PLAIN_WEATHER if format.quote else WEATHER
    lark = tools.grammar_of(format, [weather, NOTHING], parallel, answer, special)
    matcher = grammars.matcher(grammar.from_lark(lark))
    if text is None:
        plain = fake_model().tokenizer
        tokens = [*plain.encode(call("do-nothing", {}, format)).ids, 0]
    else:
        tokens = [*tokenizer.encode(text).ids, 0]
    if fits:
        for token in tokens:
            if not matcher.is_stopped:
                matcher.advance(token)
        assert matcher.is_stopped
    else:
        with pytest.raises(grammar.GrammarError):
            for token in tokens:
                matcher.advance(token)


def follows(matcher, tokens: list[int]) -> bool:
    """Whether the grammar allows the tokens; the last one ends the text."""
    try:
        for token in tokens:
            matcher.advance(token)
    except grammar.GrammarError:
        return False
    return True


MARKED = [TAGGED, LISTED, LISTED_SPACE, NAMED, NAMED_ID, DEEPSEEK, DEEPSEEK_V3, FUNCTION_GEMMA]


@pytest.mark.parametrize("format", [*MARKED, GEMMA_4])
@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize("parallel", [False, True])
def test_calls_follow_their_schemas_once_they_begin(format, is_special, parallel):
    """Text before, between and behind calls is free, also the beginning of a mark."""
    tokenizer = fake_model().tokenizer
    special = {}
    if is_special:
        tokenizer.add_special_tokens([format.begin, "<think>", "<other>"])
        special = {x: tokenizer.token_to_id(x) for x in (format.begin, "<think>", "<other>")}
    weather = PLAIN_WEATHER if format.quote else WEATHER
    lark = tools.grammar_once_begun(
        format, [weather, NOTHING], parallel, special, ["<think>", "</think>"]
    )
    grammars = grammar.Grammars(tokenizer, tokenizer.get_vocab_size(), (0,))
    compiled = grammars.compile(grammar.from_lark(lark))

    def fits(text: str) -> bool:
        return follows(compiled.matcher(), [*tokenizer.encode(text).ids, 0])

    sun = calls(format, call("get_weather", {"city": "Oslo", "unit": "C"}, format))
    kelvin = calls(format, call("get_weather", {"city": "Oslo", "unit": "K"}, format))
    other = calls(format, call("other", {}, format))
    nothing = calls(format, call("do-nothing", {}, format))
    assert fits("") and fits("Sun\n in {Oslo} <|x|> [") and fits(f"a {format.begin[:-1]}")
    assert fits(sun) and fits(f"Let me see.\n\n{sun}")
    for wrong in (kelvin, other, f"a {kelvin}", f"a {format.begin} b"):
        assert not fits(wrong), wrong
    # A second call, and text behind one.
    assert fits(f"a {sun}\nb {nothing} c") == parallel
    assert not fits(f"{sun}\n{kelvin}")
    if is_special:
        assert fits(f"<think>a</think>{nothing}") and not fits("<other>")


def test_several_calls_in_one_list_follow_their_schemas():
    tokenizer, special = mistral_tokenizer()
    grammars = grammar.Grammars(tokenizer, tokenizer.get_vocab_size(), (0,))
    for parallel in (False, True):
        lark = tools.grammar_once_begun(LISTED, [WEATHER, NOTHING], parallel, special)
        compiled = grammars.compile(grammar.from_lark(lark))
        for unit in "CK":
            one = call("get_weather", {"city": "Oslo", "unit": unit}, LISTED)
            two = calls(LISTED, call("do-nothing", {}, LISTED), one)
            tokens = [*tokenizer.encode(f"So: {two}").ids, 0]
            assert follows(compiled.matcher(), tokens) == (parallel and unit == "C")


def test_formats_whose_calls_have_no_mark_of_their_own_are_left_free():
    assert tools.grammar_once_begun(BARE, [NOTHING], True, {}) is None
    assert tools.grammar_once_begun(HARMONY, [NOTHING], True, {}) is None


# ---- over HTTP ---------------------------------------------------------------------------------

TEMPLATE = (
    "{% if tools %}TOOLS {{ tools | tojson }}"
    '{{ "as <tool_call>{\\"name\\": NAME, \\"arguments\\": {}}</tool_call>" }}{% endif %}'
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}CALL {{ c.function.name }} {{ c.function.arguments.city }}"
    "{% endfor %}{% if m.role == 'tool' %} FOR {{ m.tool_call_id }}{% endif %};{% endfor %}"
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture
def server(directory):
    engine = FakeEngine(fake_model().tokenizer)
    engine.limits.max_model_len = 1000
    with serving(engine, directory=directory) as server:
        yield server


def prompt_of(server) -> str:
    seq = server.engine.submitted[-1]
    return server.engine.tokenizer.decode(seq.tokens[: seq.num_prompt])


def test_whole(server):
    server.engine.says = f"Wait.\n{PARIS}\n{IDLE}"
    choice = server.post(CHAT, ASKED).json["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Wait."
    first, second = choice["message"]["tool_calls"]
    assert first["type"] == "function" and first["id"] != second["id"]
    assert first["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    assert second["function"]["name"] == "do-nothing"
    assert server.engine.submitted[-1].params.grammar is None  # auto: it may also say something
    server.engine.says = PARIS
    assert server.post(CHAT, ASKED).json["choices"][0]["message"]["content"] is None


def test_stream(server):
    server.engine.says = f"Wait.\n{PARIS}\n{IDLE}"
    *chunks, done = server.events(CHAT, ASKED | {"n": 2})
    assert done == "[DONE]"
    texts, reasons, num_pieces = {0: "", 1: ""}, {}, 0
    for chunk in map(json.loads, chunks):
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["delta"]["content"] or ""
        reasons[choice["index"]] = choice["finish_reason"]
        num_pieces += bool(choice["delta"]["tool_calls"])
    assert texts == {0: "Wait.", 1: "Wait."} and set(reasons.values()) == {"tool_calls"}
    made = [calls_of_chunks(chunks, choice) for choice in (0, 1)]
    assert len({c["id"] for calls in made for c in calls}) == 4
    for calls in made:
        assert [c["function"] for c in calls] == [
            {"name": "get_weather", "arguments": '{"city": "Paris"}'},
            {"name": "do-nothing", "arguments": "{}"},
        ]
    assert num_pieces > 2 * 6  # the arguments came as they were written


def test_no_call_and_no_tools(server):
    server.engine.says = "It rains."
    for body in (ASKED, ASKED | {"tool_choice": "none"}):
        choice = server.post(CHAT, body).json["choices"][0]
        assert choice["finish_reason"] == "stop" and choice["message"]["tool_calls"] is None
        assert choice["message"]["content"] == "It rains."
        assert ("TOOLS" in prompt_of(server)) == (body is ASKED)
    server.engine.says = PARIS  # the request did not mention it
    answer = server.post(CHAT, ASKED | {"tool_choice": "none"}).json["choices"][0]
    assert answer["message"]["content"] == PARIS and answer["finish_reason"] == "stop"


def test_one_call_at_most(server):
    server.engine.says = f"{PARIS}\n{IDLE}"
    body = ASKED | {"parallel_tool_calls": False}
    (made,) = server.post(CHAT, body).json["choices"][0]["message"]["tool_calls"]
    assert made["function"]["name"] == "get_weather"


@pytest.mark.parametrize("format", [TAGGED, LISTED, NAMED, DEEPSEEK, FUNCTION_GEMMA, BARE, HARMONY])
def test_a_call_that_is_cut_is_no_text(format):
    """Wherever max_tokens cuts the call, none of its marks is text."""
    text = ("" if format is BARE else "Wait. ") + calls(
        format, call("get_weather", {"city": "P"}, format)
    )
    first = text.index(",") if format is BARE else text.index(format.begin) + 2
    if format is HARMONY:  # its marks are tokens, which nothing cuts
        first = text.index(format.begin) + len(format.begin)
    for end in range(first, len(text) - len(format.behind + format.closing)):
        if format is HARMONY:
            splitter = HarmonySplitter()
            shown = splitter.push(text[:end]).content + splitter.flush(is_cut=True).content
        else:
            parser = ToolParser(format, NAMES)
            shown = parser.push(text[:end])[0] + parser.flush(is_cut=True)[0]
        assert shown.strip() == ("" if format is BARE else "Wait."), (text[:end], shown)


@pytest.mark.parametrize("text", ["a < b, <", "say <tool_call> to", '{"answer": 4', "Wait. <x"])
def test_a_text_that_is_cut_stays(text):
    for format in (TAGGED, BARE):
        parser = ToolParser(format, NAMES)
        shown = parser.push(text)[0] + parser.flush(is_cut=True)[0]
        assert shown.replace(" ", "") == text.replace(" ", "")


def test_a_call_that_is_cut_over_http(server):
    server.engine.says = f"Wait.\n{PARIS}"
    num_tokens = len(server.engine.tokenizer.encode(server.engine.says).ids)
    for max_tokens in range(3, num_tokens - 2, 4):
        body = ASKED | {"max_tokens": max_tokens}
        choice = server.post(CHAT, body).json["choices"][0]
        *chunks, _ = server.events(CHAT, body)
        deltas = [json.loads(chunk)["choices"][0]["delta"]["content"] or "" for chunk in chunks]
        assert choice["message"]["content"] == "".join(deltas) == "Wait."
        assert choice["finish_reason"] == "length" and not choice["message"]["tool_calls"]


def test_a_function_that_is_named_is_called_once(server):
    server.engine.says = f"{IDLE}\n{IDLE}"
    named = {"type": "function", "function": {"name": "do-nothing"}}
    (made,) = server.post(CHAT, ASKED | {"tool_choice": named}).json["choices"][0]["message"][
        "tool_calls"
    ]
    assert made["function"]["name"] == "do-nothing"
    assert ")*" not in server.engine.submitted[-1].params.grammar
    answer = server.post(CHAT, ASKED | {"tool_choice": "required"}).json["choices"][0]
    assert len(answer["message"]["tool_calls"]) == 2


def test_strict_tools_have_a_grammar_without_being_demanded(server):
    """On the routes of OpenAI and Anthropic; the template does not see `strict`."""
    server.engine.says = f"Wait.\n{PARIS}"
    strict = {"type": "function", "function": WEATHER | {"strict": True}}
    asked = ASKED | {"tools": [strict, TOOLS[1]]}
    choice = server.post(CHAT, asked).json["choices"][0]
    assert choice["message"]["content"] == "Wait." and choice["message"]["tool_calls"]
    made, shown = server.engine.submitted[-1].params, prompt_of(server)
    assert "get_weather" in shown and "strict" not in shown
    grammar = server.engine._grammars.matcher(made.grammar)
    encode = server.engine.tokenizer.encode
    other = call("do-nothing", {"any": [1]})  # it is not strict: any object
    assert follows(grammar.copy(), encode(f"Wait.\n{PARIS}\n{other} Done.").ids)
    assert not follows(grammar.copy(), encode(call("get_weather", {"town": "Paris"})).ids)
    assert not made.goes_on  # a text of its own, as without a grammar
    flat = {"type": "function", **WEATHER, "strict": True}
    body = {"input": "Rain?", "tools": [flat]}
    assert server.post("/v1/responses", body).status == 200
    assert server.engine.submitted[-1].params.grammar is not None
    tool = {"name": "get_weather", "input_schema": WEATHER["parameters"], "strict": True}
    body = {"messages": ASKED["messages"], "max_tokens": 9, "tools": [tool], "model": "tiny"}
    assert server.post("/v1/messages", body).status == 200
    assert server.engine.submitted[-1].params.grammar is not None
    for plain in ({"strict": False}, {"strict": None}, {}):
        strict["function"] = WEATHER | plain
        assert server.post(CHAT, asked).status == 200
        assert server.engine.submitted[-1].params.grammar is None


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools(server, mode):
    server.engine.says = IDLE
    one = [{"type": "function", "function": {"name": "do-nothing"}}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": one}}
    assert server.post(CHAT, ASKED | {"tool_choice": choice}).status == 200
    assert "get_weather" not in prompt_of(server) and "do-nothing" in prompt_of(server)
    grammar = server.engine.submitted[-1].params.grammar
    assert (grammar is None) == (mode == "auto")
    one[0]["function"]["name"] = "other"
    answer = server.post(CHAT, ASKED | {"tool_choice": choice})
    assert answer.status == 400 and answer.error["param"] == "tool_choice"
    assert "'other' is none of the tools" in answer.error["message"]


def test_choice(server):
    server.engine.says = IDLE
    for choice, told, untold in [
        ("required", "get_weather", ""),
        ({"type": "function", "function": {"name": "do-nothing"}}, "do-nothing", "get_weather"),
    ]:
        assert server.post(CHAT, ASKED | {"tool_choice": choice}).status == 200
        text = server.engine.submitted[-1].params.grammar
        assert told in text and (not untold or untold not in text)
    response_format = {"type": "json_schema", "json_schema": {"schema": {"title": "mark"}}}
    assert server.post(CHAT, ASKED | {"response_format": response_format}).status == 200
    text = server.engine.submitted[-1].params.grammar
    assert "mark" in text and "get_weather" in text


def test_a_plain_answer_in_llamas_format(tmp_path):
    """JSON that calls none of the functions is the answer, whole and streamed."""
    parameters = '{"name": NAME, "parameters": dictionary of argument name and its value}'
    (tmp_path / "chat_template.jinja").write_text(f"{{{{ tools }}}} {parameters}")
    engine = FakeEngine(fake_model().tokenizer)
    engine.limits.max_model_len = 1000
    engine.says = '{"name": "Paris", "parameters": {}}'
    with serving(engine, directory=tmp_path) as server:
        choice = server.post(CHAT, ASKED).json["choices"][0]
        assert choice["message"]["content"] == engine.says
        assert choice["message"]["tool_calls"] is None and choice["finish_reason"] == "stop"
        *chunks, _ = server.events(CHAT, ASKED)
        deltas = [json.loads(chunk)["choices"][0]["delta"] for chunk in chunks]
        assert "".join(delta["content"] or "" for delta in deltas) == engine.says
        assert not any(delta["tool_calls"] for delta in deltas)


def test_added_tokens_that_are_not_special(directory, monkeypatch):
    """Qwen's <tool_call> is one: a demanded call is written with it."""
    model = fake_model()
    model.tokenizer = with_added(byte_level(), {"<tool_call>": (), "</tool_call>": ()})
    model.config.vocab_size = model.tokenizer.get_vocab_size()
    monkeypatch.setattr("helpers.serve.live_server.fake_model", lambda: model)
    engine = FakeEngine(model.tokenizer)
    engine.limits.max_model_len = 1000
    engine.says = IDLE
    named = {"type": "function", "function": {"name": "do-nothing"}}
    with serving(engine, directory=directory) as server:
        for choice in ("required", named):
            answer = server.post(CHAT, ASKED | {"tool_choice": choice})
            assert answer.json["choices"][0]["message"]["tool_calls"], answer.body
            matcher = engine._grammars.matcher(server.engine.submitted[-1].params.grammar)
            assert matcher.take_forced()[:1] == [model.tokenizer.token_to_id("<tool_call>")]
            assert server.engine.submitted[-1].params.skip_special_tokens
        beyond = ASKED | {"messages": [{"role": "user", "content": "a <image>"}]}
        with_added(model.tokenizer, {"<image>": ()})  # as in Gemma 3 1B
        answer = server.post(CHAT, beyond)
        assert (answer.status, answer.error["param"]) == (400, "messages")
        assert "beyond the vocabulary" in answer.error["message"]


def test_half_a_surrogate_pair(server):
    """In arguments, whole and streamed, and back in the conversation."""
    arguments = '{"city": "\\ud800", "x": 1e999}'
    server.engine.says = (
        f'<tool_call>{{"name": "get_weather", "arguments": {arguments}}}</tool_call>'
    )
    (made,) = server.post(CHAT, ASKED).json["choices"][0]["message"]["tool_calls"]
    assert made["function"]["arguments"] == arguments
    *chunks, _ = server.events(CHAT, ASKED)
    assert calls_of_chunks(chunks)[0]["function"] == made["function"]
    messages = [
        *ASKED["messages"],
        {"role": "assistant", "tool_calls": [made]},
        {"role": "tool", "tool_call_id": made["id"], "content": "rain"},
    ]
    assert server.post(CHAT, ASKED | {"messages": messages, "max_tokens": 5}).status == 200
    assert "CALL get_weather \ufffd;" in prompt_of(server)


def test_the_conversation_is_shown_to_the_model(server):
    made = {"id": "c1", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    messages = [
        *ASKED["messages"],
        {"role": "assistant", "content": None, "tool_calls": [made | {"type": "function"}]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "rain"}]},
    ]
    assert server.post(CHAT, ASKED | {"messages": messages, "max_tokens": 5}).status == 200
    prompt = prompt_of(server)
    assert '"description": "of a city"' in prompt
    assert "assistant: CALL get_weather Paris;tool: rain FOR c1;" in prompt


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": TOOLS * 65}, "tools"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"regex": "a"}, "grammar"),
        (
            {
                "tool_choice": "required",
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "f", "parameters": {"properties": {"x": {"type": 5}}}},
                    }
                ],
            },
            "tools",
        ),
        *(
            (
                {
                    "messages": [
                        {
                            "role": "assistant",
                            "tool_calls": [
                                {"id": "c", "function": {"name": "f", "arguments": raw}}
                            ],
                        }
                    ]
                },
                "messages[0].tool_calls[0].function.arguments",
            )
            for raw in ("[", "[]", "{} x", '{"x": NaN}', f'{{"x": {"9" * 5000}}}')
        ),
        (
            {
                "tool_choice": "required",
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "f", "parameters": {"properties": {"x": BIG}}},
                    }
                ],
            },
            "tools",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": BIG}}},
            "response_format",
        ),
    ],
)
def test_400_names_the_field(server, change, param):
    answer = server.post(CHAT, ASKED | change)
    assert (answer.status, answer.error["param"]) == (400, param), answer.error


@pytest.mark.parametrize(("begin", "end"), [("[", "]"), ("{a:", "}")])
def test_the_levels_of_a_call_in_gemmas_format(begin, end):
    """Those below the arguments, of which there are at most so many."""
    for depth, is_call in ((MOST_NESTED, True), (MOST_NESTED + 1, False)):
        nested = begin * (depth - 1) + begin[0] + end * depth
        found = gemma_tool_calls.parse(f"call:f{{a:{nested}}}", '<|"|>')
        arguments = '{"a": ' + nested.replace("a:", '"a": ') + "}"
        assert found == ([("f", arguments)] if is_call else [])


def test_every_kind_of_value_can_be_demanded_in_gemmas_format():
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": ["integer", "null"]},
            "b": {"type": "array", "items": {"type": "number"}},
            "c": {"type": "object", "properties": {"d": {"const": "x"}}},
            "e": {"type": "boolean"},
            "größe": {"enum": [{"a": ["x, y", 2**60 + 1]}, [], 'say "é"']},
        },
        "required": ["b", "e"],
    }
    tokenizer = fake_model().tokenizer
    grammars = grammar.Grammars(tokenizer, tokenizer.get_vocab_size(), (0,))
    lark = tools.grammar_of(GEMMA_4, [{"name": "f", "parameters": schema}], False)
    for arguments, fits in [
        ({"a": None, "b": [1, -2.5], "c": {"d": "x"}, "e": True}, True),
        ({"b": [], "e": False}, True),
        ({"b": [1], "c": {}, "e": False}, True),
        ({"a": -5, "b": [], "e": True}, True),
        ({"b": [], "e": True, "größe": {"a": ["x, y", 2**60 + 1]}}, True),
        ({"b": [], "e": True, "größe": 'say "é"'}, True),
        ({"b": [], "e": True, "größe": []}, True),
        ({"b": [], "e": True, "größe": {"a": ["x", 2**60 + 1]}}, False),
        ({"a": 1}, False),
        ({"b": ["x"], "e": True}, False),
        ({"b": [], "c": {"d": "y"}, "e": True}, False),
    ]:
        matcher = grammars.matcher(grammar.from_lark(lark))
        try:
            for token in tokenizer.encode(call("f", arguments, GEMMA_4)).ids:
                matcher.advance(token)
            assert fits and matcher.is_stopped, arguments
            assert read(GEMMA_4, call("f", arguments, GEMMA_4)) == [
                ("f", json.dumps(arguments, ensure_ascii=False))
            ]
        except grammar.GrammarError:
            assert not fits, arguments


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"x": {"anyOf": []}}},
        {"properties": {"x": {}}},
        {"properties": {"x": {"type": "string", "pattern": "a"}}},
        {"properties": {"x": {"type": "array"}}},
        {"properties": {"x": True}},
        {"properties": {"x": {"enum": []}}},
        {"properties": {"x": {"const": 'a <|"|> b'}}},
        {"properties": {"x y": {"type": "null"}}},
        {"properties": {"x": {"const": float("inf")}}},
        {"required": ["x"]},
    ],
)
def test_what_cannot_be_demanded_of_gemma_is_refused(tmp_path, schema):
    (tmp_path / "chat_template.jinja").write_text("{{ tools | tojson }} <|tool_call>")
    function = {"name": "f", "parameters": {"type": "object"} | schema}
    body = ASKED | {"tools": [{"type": "function", "function": function}], "max_tokens": 5}
    with serving(directory=tmp_path) as server:
        demands, asks = (
            json.dumps(each).replace("Infinity", "1e999").encode()
            for each in (body | {"tool_choice": "required"}, body)
        )
        answer = server.post(CHAT, demands)
        assert (answer.status, answer.error["param"]) == (400, "tools"), answer.body
        assert "cannot be demanded" in answer.error["message"]
        assert server.post(CHAT, asks).status == 200


def test_tools_beside_a_strict_one_keep_their_arguments_in_gemmas_format(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("{{ tools | tojson }} <|tool_call>")
    strict, other = {"name": "strict", "strict": True}, PLAIN_WEATHER
    body = ASKED | {"tools": [{"type": "function", "function": each} for each in (strict, other)]}
    with serving(directory=tmp_path) as server:
        assert server.post(CHAT, body).status == 200
        made = server.engine.submitted[-1].params.grammar
        encode = server.engine.tokenizer.encode
        for arguments, fits in (({"city": "Oslo", "unit": "C"}, True), ({"town": "Oslo"}, False)):
            text = calls(GEMMA_4, call("get_weather", arguments, GEMMA_4))
            matcher = server.engine._grammars.matcher(made)
            assert follows(matcher, encode(f"Wait.\n{text}").ids) == fits, arguments


def test_schemas_without_a_grammar_in_gemmas_format(tmp_path):
    """A strict tool is refused; another is free, and does not free the strict one beside it."""
    (tmp_path / "chat_template.jinja").write_text("{{ tools | tojson }} <|tool_call>")
    tokenizer = fake_model().tokenizer
    tokenizer.add_special_tokens(["<|tool_call>", "<tool_call|>", '<|"|>'])
    strict = PLAIN_WEATHER | {"strict": True}
    free = {"name": "free", "parameters": {"type": "object", "properties": {"x": {}}}}
    model = fake_model()
    model.tokenizer, model.config.vocab_size = tokenizer, tokenizer.get_vocab_size()
    engine = FakeEngine(tokenizer)

    def body(*functions):
        return ASKED | {"tools": [{"type": "function", "function": each} for each in functions]}

    with serving(engine, directory=tmp_path, model=model) as server:
        answer = server.post(CHAT, body(free | {"strict": True}))
        assert (answer.status, answer.error["param"]) == (400, "tools")
        assert "strict: calls of 'free' cannot follow the schema" in answer.error["message"]
        assert server.post(CHAT, body(strict, free)).status == 200
        matcher = engine._grammars.matcher(engine.submitted[-1].params.grammar)

        def fits(name: str, arguments: dict) -> bool:
            text = calls(GEMMA_4, call(name, arguments, GEMMA_4))
            return follows(matcher.copy(), [*tokenizer.encode(f"Wait.\n{text} Done.").ids, 0])

        assert fits("get_weather", {"city": "Oslo"}) and fits("free", {"x": ["any", {"y": 1}]})
        assert not fits("get_weather", {"town": "Oslo"}) and not fits("other", {})


@pytest.mark.parametrize("format", [LISTED, LISTED_SPACE, NAMED, NAMED_ID])
def test_mistral(tmp_path, monkeypatch, format):
    """Special tokens are found in requests with tools; identifiers fit its template."""
    written = {LISTED: "[TOOL_CALLS][", LISTED_SPACE: "[TOOL_CALLS] ["}.get(
        format, format.before_name + format.before_arguments
    )
    refusal = "{% if c.id | length != 9 %}{{ raise_exception('9') }}{% endif %}"
    (tmp_path / "chat_template.jinja").write_text(
        "{{ tools | tojson }}{% for m in messages %}{% for c in m.tool_calls or [] %}"
        + written.replace("#" * 9, "{{ c.id }}")
        + refusal
        + "{% endfor %}{{ m.content }}{% endfor %}"
    )
    model = fake_model()
    model.tokenizer, special = mistral_tokenizer()
    model.config.vocab_size = model.tokenizer.get_vocab_size()
    monkeypatch.setattr("helpers.serve.live_server.fake_model", lambda: model)
    engine = FakeEngine(model.tokenizer)
    engine.limits.max_model_len = 1000
    one, other = call("get_weather", {"city": "é"}, format), call("do-nothing", {}, format)
    engine.says = "Wait. " + calls(format, one, other)
    with serving(engine, directory=tmp_path) as server:
        choice = server.post(CHAT, ASKED).json["choices"][0]
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "Wait."
        first, second = made = choice["message"]["tool_calls"]
        assert first["function"] == {"name": "get_weather", "arguments": '{"city": "é"}'}
        assert second["function"] == {"name": "do-nothing", "arguments": "{}"}
        params = server.engine.submitted[-1].params
        assert not params.skip_special_tokens

        *chunks, _ = server.events(CHAT, ASKED)
        deltas = [json.loads(chunk)["choices"][0]["delta"] for chunk in chunks]
        assert "".join(delta["content"] or "" for delta in deltas) == "Wait."
        assert [c["function"] for c in calls_of_chunks(chunks)] == [c["function"] for c in made]

        messages = [*ASKED["messages"], choice["message"] | {"content": None, "refusal": None}]
        messages.append({"role": "tool", "tool_call_id": first["id"], "content": "rain"})
        again = server.post(CHAT, ASKED | {"messages": messages, "tool_choice": "required"})
        assert again.status == 200, again.body
        params = server.engine.submitted[-1].params
        assert f"<[{special['[TOOL_CALLS]']}]>" in params.grammar
        assert server.post(CHAT, ASKED | {"tool_choice": "none"}).status == 200
        assert server.engine.submitted[-1].params.skip_special_tokens


def test_templates():
    source = (MODEL / "chat_template.jinja").read_text()
    assert tools.format_of(source) is None
    qwen = r"""<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n"""
    assert tools.format_of(qwen) == TAGGED
    hermes = (
        r"""'<tool_call>\n' + '{"name": "' + f.name + '", "arguments": ' + f.arguments | tojson"""
    )
    assert tools.format_of(hermes) == TAGGED
    assert tools.format_of("<tool_call>\n<function=NAME>\n<parameter=NAME>") is None
    assert tools.format_of("<tool_call>NAME\n<arg_key>") is None
    llama = '{"name": function name, "parameters": dictionary of argument name and its value}'
    assert tools.format_of(llama) == BARE
    mistral = """{{- "[TOOL_CALLS]%s[" }}{{- tool_call.function|tojson }}"""
    assert tools.format_of(mistral % "") == LISTED
    assert tools.format_of(mistral % " ") == LISTED_SPACE
    assert tools.format_of("{{ '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}") == NAMED
    assert tools.format_of("{{ '[TOOL_CALLS]' + name + '[CALL_ID]' + '[ARGS]' }}") == NAMED_ID
    deepseek = "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' %s }}"
    assert tools.format_of(deepseek % "+ name + '\\n```json\\n'") == DEEPSEEK_V3
    assert tools.format_of(deepseek % "+ name + '<｜tool▁sep｜>'") == DEEPSEEK
    assert tools.format_of("<start_function_call>call:{{ name }}") == FUNCTION_GEMMA
    assert tools.format_of("<|tool_call>call:{{ name }}") == GEMMA_4
    assert tools.format_of("<|channel|>commentary to=functions.{{ name }}") == HARMONY


@pytest.mark.parametrize(
    ("name", "arguments", "is_it"),
    [("f", '{"a": 1}', True), ("g", '{"a": 1}', False), ("f", '{"b": 1}', False)],
)
def test_a_complete_call_is_the_one_that_grew(name, arguments, is_it):
    """By its name and by all pieces of its arguments, taken or not."""
    growing = GrowingCall("f", new=['{"a'])
    growing.take()
    growing.new.append('":')
    assert growing.begins(name, arguments) is is_it
