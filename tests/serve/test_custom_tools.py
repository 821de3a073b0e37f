"""Custom tools: inputs that are texts, with a grammar or without, whole and in streams."""

import json

import pytest

pytest.importorskip("starlette", reason="needs the extra `serve`")
pytest.importorskip("openai", reason="needs the extra `test`")

from helpers.serve.fake_engine import FakeEngine, fake_model
from helpers.serve.live_server import serving
from jax_attn.serve._chat import custom_tools
from jax_attn.serve._chat.custom_tools import CustomToolError, GrowingInput
from jax_attn.serve._chat.tools import BARE, GEMMA_4, TAGGED, grammar_of
from jax_attn.serve._grammar import grammar

CHAT = "/v1/chat/completions"
PATCH = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: add_hunk | delete_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " TEXT LF
filename: /(.+)/
TEXT: /[^\n]+/  // "a name"
add_line: "+" /(.*)/ LF -> line

%import common.LF
"""
EDIT = '*** Begin Patch\n*** Add File: a"b\\c.py\n+print("é\\n")\t1\n+\n*** Delete File: q"\n'
EDIT += "*** End Patch\n"


@pytest.fixture(scope="module")
def grammars():
    tokenizer = fake_model().tokenizer
    return grammar.Grammars(tokenizer, tokenizer.get_vocab_size(), (0,))


def follows(grammars, lark: str, text: str) -> bool:
    matcher = grammars.matcher(grammar.from_lark(lark))
    try:
        for token in [*fake_model().tokenizer.encode(text).ids, 0]:
            if not matcher.is_stopped:
                matcher.advance(token)
    except grammar.GrammarError:
        return False
    return matcher.is_stopped


# ---- a grammar between quotes


@pytest.mark.parametrize(
    "syntax, definition, text, fits",
    [
        ("regex", r'[a-z]+\n"[^"]*"\\', 'ab\n"x\ty"\\', True),
        ("regex", r'[a-z]+\n"[^"]*"\\', 'ab\n"x"y"\\', False),
        ("regex", ".*", 'a"b\\c\tdé/', True),
        ("regex", ".*", "a\nb", False),
        ("regex", r"\S+\s\d{2}/\D", 'a"b\\ 12/"', True),
        ("regex", r"[^a-c\n]+", 'dq"\\\x01', True),
        ("regex", r"[^a-c\n]+", 'dq"\n', False),
        ("regex", r"[^a-c\n]+", 'b"', False),
        ("regex", r"(?i:select)\s+[\w,]+", "SeLect\n a,b", True),
        ("regex", r"[\x00-\x7f]+", 'a"b\\\n\x1f~', True),
        ("regex", r"[ -\]]+", 'A"\\]', True),
        ("regex", r"[ -\[]+", "\\", False),
        ("lark", PATCH, EDIT, True),
        ("lark", PATCH, EDIT.replace("+print", "print"), False),
        ("lark", 'start: "SELECT "i N ("," WS N)* "\\n"\nN: /[a-z"]+/ // c "x\n%import common.WS\n',
         'select a"b,\n \tc\n', True),
        ("lark", 'start: A B\nA: "a".."c"\nB: /x.y/s\n', "bx\ny", True),
        ("lark", 'start: e\ne: ESCAPED_STRING | "(" e ")"\n%import common (ESCAPED_STRING, INT)\n',
         '(("a\\"b"))', True),
        ("lark", 'start: "a" WS_INLINE "\\n"\n%import common.WS_INLINE\n', "a \t\n", True),
        ("lark", 'start: "a" NEWLINE "\\t"\n%import common (NEWLINE)\n', "a\r\n\n\t", True),
        ("lark", 'start: "a" "b"\n%ignore WS\n%import common.WS\n', "a\t\nb", True),
        ("lark", 'start: "\\u007f" /\\x7f/\n', "\x7f\x7f", True),
        ("regex", r"\s[\s]\d[\d]", "\u205f\u3000\u0663\u0663", True),
        ("regex", r"\S|[^\s]|[^\d]{2}", "\u2028", False),
        ("lark", 'start: "a" ~ 2..3 /[^a]{1,2}/ "\\n"\n', 'aa"x\n', True),
        ("lark", 'start: "a" ~ 2..3 /[^a]{1,2}/ "\\n"\n', 'aa"xx\n', False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_quoted", [True, False])
def test_a_grammar_and_its_quoted_form_have_the_same_texts(
    grammars, syntax, definition, text, fits, is_quoted
):
    """Between quotes as JSON writes it, and as it is, where its end is the text's."""
    if not is_quoted:
        assert follows(grammars, custom_tools.lark_of(syntax, definition, False), text) == fits
        return
    made = custom_tools.lark_of(syntax, definition, True)
    outer = f'start: "\\"" x "\\""\nx: %lark {{\n{made}}}\n'
    assert follows(grammars, outer, json.dumps(text, ensure_ascii=False)) == fits


@pytest.mark.parametrize("members", ['"-%', r"\\-^", " -%", "X-a"])
def test_a_range_never_has_what_json_escapes(grammars, members):
    """Whether it begins with such a character or has one within."""
    made = custom_tools.lark_of("regex", f"[{members}]+", True)
    outer = f'start: "\\"" x "\\""\nx: %lark {{\n{made}}}\n'
    raw = '"' if "%" in members else "\\"
    assert follows(grammars, outer, json.dumps(2 * raw))
    assert not follows(grammars, outer, f'"{raw}{members[-1]}"')


@pytest.mark.parametrize(
    "text, got",
    [
        ("start: %json {}", "'%json'"), ("start: <foo>", "'<foo>'"), ("start: A\nA: ~/a/", "'~'"),
        ("start: /a[b&&c]/", "'&&'"), (r"start: /\bx/", r"'\\\\b'"), ("start: /(?=a)/", r"'\(\?=a"),
        (r"start: /\p{P}/", r"'\\\\p'"), (r"start: /[\D]/", r"'\\\\D'"),
    ],
)  # fmt: skip
def test_what_cannot_be_quoted_is_refused(text, got):
    with pytest.raises(CustomToolError, match=f"is supported here, got {got}"):
        custom_tools.quoted_lark(text)


@pytest.mark.parametrize("cut", range(1, 20, 3))
def test_an_input_grows(cut):
    text = 'a\n"b"\\ é \t end'
    arguments = custom_tools.arguments_of(text)
    pieces = list(arguments)
    i = 0
    while i < len(pieces):  # pieces split no escape
        if pieces[i] == "\\":
            pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
        i += 1
    grown, shown = GrowingInput(), ""
    for j in range(0, len(pieces), cut):
        shown += grown.push("".join(pieces[j : j + cut]), False)
        assert text.startswith(shown)
    assert shown + grown.push("", True) == text


def test_what_cannot_be_sent_is_replaced():
    half = r'{"input": "a\ud83d", "x": ' + "9" * 5000 + "}"
    grown = GrowingInput()
    assert custom_tools.input_of(half) == grown.push(half, True) == "a\ufffd"


def test_arguments_without_an_input_are_the_input():
    assert custom_tools.input_of('{"a": 1}') == '{"a": 1}'
    grown = GrowingInput()
    assert [grown.push('{"a": 1, "in', False), grown.push('put": "zz"}', True)] == ["", "zz"]


@pytest.mark.parametrize("format", [TAGGED, BARE, GEMMA_4])
def test_a_demanded_call_follows_the_grammar(grammars, format):
    tool = {"name": "edit", "parameters": custom_tools.SCHEMA, "input_grammar": ("lark", PATCH)}
    lark = grammar_of(format, [tool], False)

    def call(text: str) -> str:
        inside = f"{{input:{format.quote}{text}{format.quote}}}"
        written = inside if format.quote else custom_tools.arguments_of(text)
        head = f"{format.before_name}edit{format.before_arguments}"
        return format.opening + head + written + format.behind + format.closing

    assert follows(grammars, lark, call(EDIT))
    assert not follows(grammars, lark, call(EDIT.replace("+print", "print")))


# ---- over HTTP


def called(text: str, name: str = "edit") -> str:
    call = f'{{"name": "{name}", "arguments": {custom_tools.arguments_of(text)}}}'
    return f"<tool_call>\n{call}\n</tool_call>"


FORMAT = {"type": "grammar", "grammar": {"syntax": "lark", "definition": PATCH}}
EDIT_TOOL = {"type": "custom", "custom": {"name": "edit", "description": "D", "format": FORMAT}}
SAY_TOOL = {"type": "custom", "custom": {"name": "say"}}
ASKED = {"messages": [{"role": "user", "content": "Go"}], "tools": [EDIT_TOOL, SAY_TOOL]}
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}"
    "[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}{{ m.name or '' }};"
    '{% endfor %}{{ tools | tojson }}{{ "<tool_call>{\\"arguments\\": 1}" if tools }}'
)


@pytest.fixture
def server(tmp_path):
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    engine = FakeEngine(fake_model().tokenizer)
    engine.limits.max_model_len = 4096
    with serving(engine, directory=tmp_path) as server:
        yield server


def prompt_of(server) -> str:
    seq = server.engine.submitted[-1]
    return server.engine.tokenizer.decode(seq.tokens[: seq.num_prompt])


def grammar_follows(server, text: str) -> bool:
    matcher = server.engine._grammars.matcher(server.engine.submitted[-1].params.grammar)
    try:
        for token in server.engine.tokenizer.encode(text).ids:
            matcher.advance(token)
    except grammar.GrammarError:
        return False
    return True


def test_chat(server, client):
    server.engine.says = f"So.\n{called(EDIT)}\n{called('hi', 'say')}"
    message = client.chat.completions.create(model="tiny", **ASKED).choices[0].message
    assert [(call.type, call.custom.name, call.custom.input) for call in message.tool_calls] == [
        ("custom", "edit", EDIT), ("custom", "say", "hi"),
    ]  # fmt: skip
    shown = prompt_of(server)
    assert "begin_patch" in shown and '"input"' in shown  # the model sees the grammar
    # The grammar holds once a call begins, and only for the tool that has one.
    assert grammar_follows(server, f"So.\n{called(EDIT)} Done. {called('any', 'say')}")
    assert not grammar_follows(server, f"So.\n{called('no patch')}")
    # The answer can be sent back.
    past = message.model_dump(exclude_none=True)
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "done"}
    messages = [*ASKED["messages"], past, result]
    assert server.post(CHAT, ASKED | {"messages": messages}).status == 200
    assert f"[edit {json.dumps({'input': EDIT})[:30]}" in prompt_of(server)


def test_chat_in_a_stream(server, client):
    server.engine.says = f"So.\n{called(EDIT)}"
    texts, first = [], []
    with client.chat.completions.create(model="tiny", stream=True, **ASKED) as stream:
        for chunk in stream:
            for call in chunk.choices[0].delta.tool_calls or ():
                extra = call.model_extra
                texts.append(extra["custom"]["input"])
                if call.id:
                    first.append((call.index, call.type, extra["custom"]["name"]))
    assert first == [(0, "custom", "edit")] and "".join(texts) == EDIT
    assert len(texts) > 5 and all(texts[1:])  # it came as it was written, and nothing empty


@pytest.mark.parametrize("stream", [False, True])
def test_responses(server, client, stream):
    server.engine.says = called(EDIT)
    tool = {"type": "custom", "name": "edit", "format": {"type": "grammar", **FORMAT["grammar"]}}
    asked = {"model": "tiny", "input": "Go", "tools": [tool]}
    if stream:
        with client.responses.stream(**asked) as events:
            deltas = [e.delta for e in events if e.type == "response.custom_tool_call_input.delta"]
            response = events.get_final_response()
        assert "".join(deltas) == EDIT and len(deltas) > 5
    else:
        response = client.responses.create(**asked)
    (item,) = response.output
    assert (item.type, item.name, item.input) == ("custom_tool_call", "edit", EDIT)
    assert server.engine.submitted[-1].params.grammar is not None
    output = {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "done"}
    again = client.responses.create(
        model="tiny", input=[output], previous_response_id=response.id, tools=[tool],
        tool_choice={"type": "custom", "name": "edit"},
    )  # fmt: skip
    assert again.output and "[edit" in prompt_of(server)
    client.responses.create(model="tiny", input=[item.model_dump(), output])
    kinds = [x.type for x in client.responses.input_items.list(again.id).data]
    assert "custom_tool_call_output" in kinds


def test_a_named_tool_is_called(server):
    server.engine.says = called(EDIT)
    choice = {"type": "custom", "custom": {"name": "edit"}}
    assert server.post(CHAT, ASKED | {"tool_choice": choice}).status == 200
    assert grammar_follows(server, called(EDIT))
    assert not grammar_follows(server, called("hi", "say"))
    allowed = {"mode": "required", "tools": [{"type": "custom", "custom": {"name": "say"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    assert server.post(CHAT, ASKED | {"tool_choice": choice}).status == 200
    assert grammar_follows(server, called("hi", "say"))


@pytest.mark.parametrize(
    "format, words",
    [
        ({"type": "grammar"}, "grammar belongs to type 'grammar'"),
        ({"type": "grammar", "grammar": {"syntax": "ebnf", "definition": "a"}}, "syntax"),
        ({"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: %json {}"}},
         "tools: format: a grammar of rules, texts and regular expressions"),
    ],
)  # fmt: skip
def test_a_format_that_cannot_be_used(server, format, words):
    tool = {"type": "custom", "custom": {"name": "edit", "format": format}}
    answer = server.post(CHAT, ASKED | {"tools": [tool]})
    assert answer.status == 400 and words in answer.error["message"], answer.error


def test_a_model_whose_calls_have_no_mark(tmp_path):
    (tmp_path / "chat_template.jinja").write_text('"parameters": dictionary of argument name')
    with serving(directory=tmp_path) as server:
        answer = server.post(CHAT, ASKED | {"max_tokens": 5})
        assert answer.status == 400 and "'required' can" in answer.error["message"]
        assert server.post(CHAT, ASKED | {"tool_choice": "required", "max_tokens": 5}).status == 200
