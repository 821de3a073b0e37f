"""Tool calls: demanded by a grammar, found in a text, shown to the model, told to the client."""

import json
import random

import pytest

pytest.importorskip("starlette", reason="needs the extra `serve`")

from helpers.serve.fake_engine import MODEL, FakeEngine, fake_model
from helpers.serve.live_server import serving
from jax_attn.serve._chat import tools
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
# Without a reference, of which there is no grammar in Gemma's format.
PLAIN_WEATHER = WEATHER | {
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "unit": {"enum": ["C", "F"]}},
        "required": ["city"],
    }
}
NOTHING = {"name": "do-nothing"}
TOOLS = [{"type": "function", "function": function} for function in (WEATHER, NOTHING)]
ASKED = {"messages": [{"role": "user", "content": "Rain?"}], "tools": TOOLS, "max_tokens": 100}


def call(name: str, arguments: dict, format=TAGGED) -> str:
    """One of several; with an identifier where the format has one."""
    before = (format.before_name + name + format.before_arguments).replace("#" * 9, "123abcDEF")
    written = as_gemma(arguments, format.quote) if format.quote else json.dumps(arguments)
    return before + written + format.behind


def as_gemma(value, quote: str) -> str:
    if isinstance(value, str):
        return quote + value + quote
    if isinstance(value, list):
        return f"[{','.join(as_gemma(item, quote) for item in value)}]"
    if isinstance(value, dict):
        pairs = (f"{key}:{as_gemma(item, quote)}" for key, item in value.items())
        return f"{{{','.join(pairs)}}}"
    return json.dumps(value)


def calls(format, *one: str) -> str:
    return format.opening + (format.between or "").join(one) + format.closing


def mistral_tokenizer():
    """The bundled model's, with more special tokens; and these by their texts."""
    tokenizer = fake_model().tokenizer
    texts = ["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"]
    tokenizer.add_special_tokens(texts)
    return tokenizer, {text: tokenizer.token_to_id(text) for text in texts}


PARIS = call("get_weather", {"city": "Paris"})
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
        # No calls, and not to be lost: cut off, no JSON, no name, arguments that are no object.
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
        (NAMED, "[TOOL_CALLS]f[ARGS]{", "[TOOL_CALLS]f[ARGS]{", []),
        (NAMED, call("f", {}, NAMED) + "[TOOL_CALLS]", "[TOOL_CALLS]", [("f", {})]),
    ],
)
def test_calls_are_found_however_the_text_is_cut(format, text, shown, expected):
    rng = random.Random(text)
    for longest in (len(text) + 1, 1, 2, 3, 5, 8, 13):
        parser, got_text, got_calls, rest = ToolParser(format), "", [], text
        while rest:
            n = rng.randint(1, longest)
            new_text, new_calls = parser.push(rest[:n])
            got_text, rest = got_text + new_text, rest[n:]
            got_calls += new_calls
        last_text, last_calls = parser.flush()
        assert got_text + last_text == (text if shown == "nothing less" else shown)
        found = [(c.name, json.loads(c.arguments)) for c in got_calls + last_calls]
        assert found == expected


def test_identifiers():
    """Those that a model gave, and otherwise any that its template will take back."""
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
    parser = ToolParser(BARE)
    assert parser.push("No") == ("No", [])
    assert parser.push("{") == ("{", [])


# ---- demanded ----------------------------------------------------------------------------------


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
        # Letters in the place of special tokens are no call.
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
    texts, calls, reasons = {0: "", 1: ""}, {0: [], 1: []}, {}
    for chunk in map(json.loads, chunks):
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["delta"]["content"] or ""
        calls[choice["index"]] += choice["delta"]["tool_calls"] or []
        reasons[choice["index"]] = choice["finish_reason"]
    assert texts == {0: "Wait.", 1: "Wait."} and set(reasons.values()) == {"tool_calls"}
    for made in calls.values():
        assert [c["index"] for c in made] == [0, 1]
        assert [c["function"]["name"] for c in made] == ["get_weather", "do-nothing"]
    assert len({c["id"] for made in calls.values() for c in made}) == 4


def test_no_call_and_no_tools(server):
    server.engine.says = "It rains."
    for body in (ASKED, ASKED | {"tool_choice": "none"}):
        choice = server.post(CHAT, body).json["choices"][0]
        assert choice["finish_reason"] == "stop" and choice["message"]["tool_calls"] is None
        assert choice["message"]["content"] == "It rains."
        assert ("TOOLS" in prompt_of(server)) == (body is ASKED)
    server.engine.says = PARIS  # of which nobody spoke
    answer = server.post(CHAT, ASKED | {"tool_choice": "none"}).json["choices"][0]
    assert answer["message"]["content"] == PARIS and answer["finish_reason"] == "stop"
    server.engine.says = PARIS
    answer = server.post(CHAT, ASKED | {"max_tokens": 9}).json["choices"][0]
    assert answer["finish_reason"] == "length" and answer["message"]["content"].startswith("<tool")


def test_one_call_at_most(server):
    server.engine.says = f"{PARIS}\n{IDLE}"
    body = ASKED | {"parallel_tool_calls": False}
    (made,) = server.post(CHAT, body).json["choices"][0]["message"]["tool_calls"]
    assert made["function"]["name"] == "get_weather"


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
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "["}}],
                    }
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_400_names_the_field(server, change, param):
    answer = server.post(CHAT, ASKED | change)
    assert (answer.status, answer.error["param"]) == (400, param), answer.error


def test_every_kind_of_value_can_be_demanded_in_gemmas_format():
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": ["integer", "null"]},
            "b": {"type": "array", "items": {"type": "number"}},
            "c": {"type": "object", "properties": {"d": {"const": "x"}}},
            "e": {"type": "boolean"},
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
        ({"a": 1}, False),
        ({"b": ["x"], "e": True}, False),
        ({"b": [], "c": {"d": "y"}, "e": True}, False),
    ]:
        matcher = grammars.matcher(grammar.from_lark(lark))
        try:
            for token in tokenizer.encode(call("f", arguments, GEMMA_4)).ids:
                matcher.advance(token)
            assert fits and matcher.is_stopped, arguments
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
        {"required": ["x"]},
    ],
)
def test_what_cannot_be_demanded_of_gemma_is_refused(tmp_path, schema):
    (tmp_path / "chat_template.jinja").write_text("{{ tools | tojson }} <|tool_call>")
    function = {"name": "f", "parameters": {"type": "object"} | schema}
    body = ASKED | {"tools": [{"type": "function", "function": function}], "max_tokens": 5}
    with serving(directory=tmp_path) as server:
        answer = server.post(CHAT, body | {"tool_choice": "required"})
        assert (answer.status, answer.error["param"]) == (400, "tools"), answer.body
        assert "cannot be demanded" in answer.error["message"]
        assert server.post(CHAT, body).status == 200


@pytest.mark.parametrize("format", [LISTED, LISTED_SPACE, NAMED, NAMED_ID])
def test_mistral(tmp_path, monkeypatch, format):
    """Special tokens are seen where there are tools, and identifiers are such as it takes back."""
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
        streamed = [c for delta in deltas for c in delta["tool_calls"] or []]
        assert [c["function"] for c in streamed] == [c["function"] for c in made]
        assert [c["index"] for c in streamed] == [0, 1]

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
