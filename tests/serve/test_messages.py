"""/v1/messages, Anthropic's Messages API: conversations, tools, thoughts, streams, errors."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("starlette", reason="needs the extra `serve`")

from helpers.serve.fake_engine import FakeEngine, fake_model
from helpers.serve.live_server import serving

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
TEMPLATE = (
    "{% if tools %}TOOLS {{ tools | tojson }}"
    '{{ "as <tool_call>{\\"name\\": NAME, \\"arguments\\": {}}</tool_call>" }}{% endif %}'
    "{% for m in messages %}{{ m.role }}: "
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}CALL {{ c.function.name }} "
    "{{ c.function.arguments | tojson }}{% endfor %}"
    "{% if m.role == 'tool' %} FOR {{ m.name }}{% endif %};{% endfor %}"
    "{% if add_generation_prompt %}{{ 'THINK' if enable_thinking else 'assistant:' }}{% endif %}"
)
TOOL = {
    "name": "read",
    "description": "a file",
    "input_schema": {
        "type": "object",
        "properties": {"path": {"enum": ["a.py", "b.py"]}},
        "required": ["path"],
    },
}
HELLO = {
    "model": "tiny",
    "max_tokens": 100,
    "messages": [{"role": "user", "content": "Hello. " * 9}],
}
CALL = '<tool_call>\n{"name": "read", "arguments": {"path": "a.py"}}\n</tool_call>'
LOOP = [
    {
        "role": "user",
        "content": [{"type": "text", "text": "Read."}, {"type": "text", "text": "It."}],
    },
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Which?", "signature": "x"},
            {"type": "text", "text": "Yes."},
            {"type": "tool_use", "id": "toolu_1", "name": "read", "input": {"path": "a.py"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "toolu_1",
                "content": [{"type": "text", "text": "import os"}],
                "is_error": False,
            },
            {"type": "text", "text": "And now?", "cache_control": {"type": "ephemeral"}},
        ],
    },
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def shared_server(directory):
    engine = FakeEngine(fake_model().tokenizer)
    engine.limits.max_model_len = 1000
    with serving(engine, directory=directory) as server:
        yield server


@pytest.fixture
def server(shared_server, monkeypatch):
    monkeypatch.setattr(shared_server.engine, "says", "")
    return shared_server


def prompt_of(server) -> str:
    seq = server.engine.submitted[-1]
    return server.engine.tokenizer.decode(seq.tokens[: seq.num_prompt])


def events(server, body: dict) -> list[dict]:
    answer = server.post(MESSAGES, body | {"stream": True})
    assert answer.status == 200, answer.body
    found = []
    for part in answer.body.decode().split("\n\n")[:-1]:
        name, data = part.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def joined(found: list[dict]) -> dict:
    """The message that a client puts together from its events."""
    message = found[0]["message"]
    blocks, num_stopped = message["content"], 0
    for event in found[1:]:
        kind = event["type"]
        if kind == "content_block_start":
            assert event["index"] == len(blocks) == num_stopped  # one block at a time
            blocks.append(event["content_block"] | {"input_json": ""})
        elif kind == "content_block_delta":
            delta = event["delta"]
            field = {"input_json_delta": "partial_json"}.get(delta["type"], delta["type"][:-6])
            target = "input_json" if field == "partial_json" else field
            blocks[event["index"]][target] += delta[field]
        elif kind == "content_block_stop":
            assert event["index"] == num_stopped
            num_stopped += 1
        elif kind == "message_delta":
            message |= event["delta"] | {"usage": event["usage"]}
    for block in blocks:
        text = block.pop("input_json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(text)
    assert found[-1] == {"type": "message_stop"}
    return message


@pytest.mark.parametrize(
    ("says", "more", "blocks", "reason"),
    [
        ("It rains.", {}, [("text", "It rains.")], "end_turn"),
        ("It rains.", {"max_tokens": 2}, None, "max_tokens"),
        (
            f"Wait.\n{CALL}",
            {"tools": [TOOL]},
            [("text", "Wait."), ("tool_use", {"path": "a.py"})],
            "tool_use",
        ),
        (CALL + CALL, {"tools": [TOOL]}, [("tool_use", {"path": "a.py"})] * 2, "tool_use"),
        (
            "<think>Hm.</think>Yes.",
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            [("thinking", "Hm."), ("text", "Yes.")],
            "end_turn",
        ),
        ("<think>Hm.</think>Yes.", {}, [("text", "Yes.")], "end_turn"),
    ],
    ids=["text", "cut", "call", "calls", "thoughts", "hidden"],
)
def test_whole_and_in_events(server, says, more, blocks, reason):
    server.engine.says = says
    whole = server.post(MESSAGES, HELLO | more).json
    found = events(server, HELLO | more)
    for message in (whole, joined(found)):
        assert message["type"] == "message" and message["role"] == "assistant"
        assert message["id"].startswith("msg_") and message["model"] == "tiny"
        assert message["stop_reason"] == reason and message["stop_sequence"] is None
        field = {"tool_use": "input"}
        seen = [(b["type"], b[field.get(b["type"], b["type"])]) for b in message["content"]]
        assert blocks is None or seen == blocks
        usage, seq = message["usage"], server.engine.submitted[-1]
        assert usage["output_tokens"] > 0 and usage["cache_read_input_tokens"] == 16
        assert usage["input_tokens"] == seq.num_prompt - 16
    kinds = [event["type"] for event in found]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop")


def test_the_input_of_a_tool_comes_as_it_is_written(server):
    server.engine.says = f"Wait.\n{CALL}\n{CALL}"
    found = events(server, HELLO | {"tools": [TOOL]})
    blocks = [block["input"] for block in joined(found)["content"] if block["type"] == "tool_use"]
    assert blocks == [{"path": "a.py"}] * 2
    deltas = [event["delta"] for event in found if event["type"] == "content_block_delta"]
    assert sum(delta["type"] == "input_json_delta" for delta in deltas) > 2 * 4
    num_tokens = len(server.engine.tokenizer.encode(server.engine.says).ids)
    found = events(server, HELLO | {"tools": [TOOL], "max_tokens": num_tokens - 5})
    assert found[-2]["delta"]["stop_reason"] == "max_tokens"
    pieces = [e["delta"].get("partial_json", "") for e in found if "delta" in e]
    assert "".join(pieces).startswith('{"path": "a.py"}{"p')
    assert [event["type"] for event in found].count("content_block_stop") == 3


def test_stop_sequences(server):
    server.engine.says = "one two three"
    body = HELLO | {"stop_sequences": [" three", " two"]}
    for message in (server.post(MESSAGES, body).json, joined(events(server, body))):
        assert message["stop_reason"] == "stop_sequence" and message["stop_sequence"] == " two"
        assert "".join(block["text"] for block in message["content"]) == "one"


def test_a_loop_of_calls_and_results(server):
    body = HELLO | {"system": [{"type": "text", "text": "Be brief."}], "messages": LOOP}
    answer = server.post(MESSAGES, body | {"tools": [TOOL], "top_k": 5, "temperature": 0.5})
    assert answer.status == 200, answer.body
    assert prompt_of(server).endswith(
        "system: Be brief.;user: Read.\nIt.;assistant: <think>Which?</think>Yes.CALL read "
        '{"path": "a.py"};tool: import os FOR read;user: And now?;assistant:'
    )
    assert '"name": "read"' in prompt_of(server)
    params = server.engine.submitted[-1].params
    assert (params.top_k, params.temperature, params.max_tokens) == (5, 0.5, 100)
    count = server.post(COUNT, {k: body[k] for k in ("model", "messages", "system")}).json
    server.post(MESSAGES, body)
    assert count == {"input_tokens": server.engine.submitted[-1].num_prompt}


def tool(name: str, **fields: str) -> dict:
    schema = {"type": "object", "properties": {field: {"type": "string"} for field in fields}}
    return {"name": name, "input_schema": schema}


class Workshop:
    """The tools of a coding agent, on files of a folder."""

    TOOLS = (
        tool("read", path="a file"),
        tool("edit", path="a file", old="a text in it", new="what takes its place"),
        tool("run", path="a program"),
    )

    def __init__(self, folder):
        self._folder = folder

    def read(self, path):
        return (self._folder / path).read_text(), False

    def edit(self, path, old, new):
        file = self._folder / path
        file.write_text(file.read_text().replace(old, new))
        return "done", False

    def run(self, path):
        done = subprocess.run(
            [sys.executable, path], cwd=self._folder, capture_output=True, text=True
        )
        return (done.stdout + done.stderr).splitlines()[-1], done.returncode != 0

    def result(self, call) -> dict:
        text, is_error = getattr(self, call.name)(**call.input)
        content = [{"type": "text", "text": text}]
        return {"type": "tool_result", "tool_use_id": call.id, "content": content,
                "is_error": is_error}  # fmt: skip


def says(text: str, name: str, **arguments: str) -> str:
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<think>{text}</think><tool_call>\n{call}\n</tool_call>"


@pytest.mark.parametrize("stream", [False, True])
def test_a_coding_agent_reads_edits_and_runs(server, tmp_path, stream):
    """With Anthropic's own client, which sends back what it has got."""
    anthropic = pytest.importorskip("anthropic", reason="needs the extra `test`")
    (tmp_path / "a.py").write_text("print(1 + One)\n")
    workshop, messages = Workshop(tmp_path), [{"role": "user", "content": "Mend a.py."}]
    script = [
        says("Look.", "read", path="a.py"),
        says("Try.", "run", path="a.py"),
        says("So.", "edit", path="a.py", old="One", new='len("a\\n")'),
        says("Again.", "run", path="a.py"),
        "It is mended.",
    ]
    asked = {"model": "tiny", "max_tokens": 200, "tools": Workshop.TOOLS, "system": "Be brief."}
    asked["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        for server.engine.says in script:
            if stream:
                with client.messages.stream(messages=messages, **asked) as events:
                    message = events.get_final_message()
            else:
                message = client.messages.create(messages=messages, **asked)
            messages.append({"role": "assistant", "content": message.content})
            calls = [block for block in message.content if block.type == "tool_use"]
            assert message.stop_reason == ("tool_use" if calls else "end_turn")
            if calls:
                messages.append({"role": "user", "content": list(map(workshop.result, calls))})
    assert message.content[-1].text == "It is mended." and not calls
    assert (tmp_path / "a.py").read_text() == 'print(1 + len("a\\n"))\n'
    prompt = prompt_of(server)
    past = [
        "system: Be brief.;user: Mend a.py.;",
        '<think>Look.</think>CALL read {"path": "a.py"};tool: print(1 + One)\n FOR read;',
        "<think>Try.</think>CALL run",
        "tool: NameError: name 'One' is not defined",
        "<think>Again.</think>CALL run",
        "tool: 3 FOR run;",
    ]
    assert [part for part in past if part not in prompt] == []


def test_a_message_of_the_system_between_others(server):
    texts = [{"type": "text", "text": text} for text in ("Be", "brief.")]
    for content in ("Be\nbrief.", texts):
        messages = [*LOOP, {"role": "system", "content": content}]
        assert server.post(MESSAGES, HELLO | {"messages": messages}).status == 200
        assert prompt_of(server).endswith("user: And now?;system: Be\nbrief.;assistant:")


def test_the_header_of_the_identifier_that_clients_read(server):
    """Anthropic's clients name it in errors, and beside each answer."""
    for answer in (server.post(MESSAGES, HELLO), server.post(COUNT, {})):
        assert answer.headers["request-id"] == answer.headers["x-request-id"]
    assert "request-id" not in server.get("/v1/models").headers


def test_the_last_message_of_the_assistant_goes_on(server):
    messages = [*HELLO["messages"], {"role": "assistant", "content": "The answer is"}]
    assert server.post(MESSAGES, HELLO | {"messages": messages}).status == 200
    assert prompt_of(server).endswith("assistant: The answer is")


@pytest.mark.parametrize(
    ("choice", "demands", "several"),
    [
        ({"type": "auto"}, False, True),
        ({"type": "none"}, False, True),
        ({"type": "any"}, True, True),
        ({"type": "any", "disable_parallel_tool_use": True}, True, False),
        ({"type": "tool", "name": "read"}, True, False),
    ],
    ids=str,
)
def test_tool_choice(server, choice, demands, several):
    server.engine.says = CALL
    body = HELLO | {"tools": [TOOL], "tool_choice": choice}
    assert server.post(MESSAGES, body).status == 200
    grammar = server.engine.submitted[-1].params.grammar
    assert (grammar is not None) == demands and (")*" in (grammar or "")) == (demands and several)
    assert ("TOOLS" in prompt_of(server)) == (choice["type"] != "none")


def test_a_schema_is_followed_and_thinking_reaches_the_template(server):
    format = {"type": "json_schema", "schema": {"title": "mark", "type": "object"}}
    body = HELLO | {"output_config": {"format": format}}
    assert server.post(MESSAGES, body).status == 200
    assert "mark" in server.engine.submitted[-1].params.grammar
    assert server.post(MESSAGES, HELLO | {"thinking": {"type": "adaptive"}}).status == 200
    assert prompt_of(server).endswith("THINK")


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}
LINK = {"type": "image", "source": {"type": "url", "url": "x"}}
RESULT = {"type": "tool_result", "tool_use_id": "nobody", "content": "a"}


INVALID = "invalid_request_error"


@pytest.mark.parametrize(
    ("change", "status", "kind", "words"),
    [
        ({"max_tokens": None}, 400, INVALID, "max_tokens"),
        ({"max_tokens": 0}, 400, INVALID, "max_tokens"),
        ({"max_tokens": 9999}, 400, INVALID, "maximum context length"),
        ({"model": "other"}, 404, "not_found_error", "'other' is not served"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, 400, INVALID, "reads texts only"),
        ({"messages": [{"role": "user", "content": [LINK]}]}, 400, INVALID, "source.type"),
        ({"messages": [{"role": "user", "content": [RESULT]}]}, 400, INVALID, "'nobody'"),
        ({"messages": LOOP[1:2] + [{"role": "assistant", "content": [RESULT]}]}, 400,
         INVALID, "does not belong to role 'assistant'"),
        ({"messages": [{"role": "system", "content": [RESULT]}]}, 400, INVALID,
         "does not belong to role 'system'"),
        ({"messages": [{"role": "user", "content": []}]}, 400, INVALID, "no content"),
        ({"tool_choice": {"type": "any"}}, 400, INVALID, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, 400, INVALID, "name"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, 400, INVALID,
         "'web_search_20250305' is not supported"),
        ({"stop_sequences": [""]}, 400, INVALID, "stop_sequences"),
    ],
    ids=str,
)  # fmt: skip
def test_errors(server, change, status, kind, words):
    answer = server.post(MESSAGES, HELLO | change)
    assert answer.status == status, answer.body
    assert answer.json.keys() == {"type", "error"} and answer.json["type"] == "error"
    assert answer.error["type"] == kind and words in answer.error["message"]


def test_errors_of_all_routes_and_of_a_stream(server, monkeypatch):
    answer = server.get(MESSAGES)
    assert answer.status == 405 and answer.error["type"] == "invalid_request_error"
    assert server.post(MESSAGES, HELLO).status == 200
    seq = server.engine.submitted[-1]
    last_token = seq.tokens[seq.num_prompt - 1 : seq.num_prompt]
    monkeypatch.setattr(server.engine, "_fail_tokens", last_token)
    *_, last = events(server, HELLO)
    assert last["type"] == "error" and last["error"]["type"] == "api_error"
    answer = server.post(MESSAGES, HELLO)
    assert answer.status == 500 and answer.error["type"] == "api_error"


def test_keys(directory):
    with serving(directory=directory, api_keys=("a-key-of-one-tenant",)) as server:
        answer = server.post(MESSAGES, HELLO)
        assert answer.status == 401 and answer.error["type"] == "authentication_error"
        assert server.post(MESSAGES, HELLO, x_api_key="another-tenants-key").status == 401
        for header, word in (("x_api_key", ""), ("Authorization", "Bearer ")):
            headers = {header: f"{word}a-key-of-one-tenant"}
            assert server.post(MESSAGES, HELLO, **headers).status == 200
            assert server.engine.submitted[-1].tenant == "key0"
