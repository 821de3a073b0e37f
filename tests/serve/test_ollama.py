"""/api/chat, /api/generate and the models, with Ollama's own client: streams, tools, errors."""

import json

import pytest

pytest.importorskip("starlette", reason="needs the extra `serve`")
ollama = pytest.importorskip("ollama", reason="needs the extra `test`")

from helpers.serve.fake_engine import FakeEngine, fake_model  # noqa: E402
from helpers.serve.live_server import KEYS, serving  # noqa: E402
from jax_attn.serve._openai import answers  # noqa: E402

TEMPLATE = (
    "{% if tools %}TOOLS {{ tools | tojson }}"
    '{{ "as <tool_call>{\\"name\\": NAME, \\"arguments\\": {}}</tool_call>" }}{% endif %}'
    "{% for m in messages %}{{ m.role }}: "
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}CALL {{ c.id }} {{ c.function.name }} "
    "{{ c.function.arguments | tojson }}{% endfor %}"
    "{% if m.role == 'tool' %} FOR {{ m.tool_call_id }} {{ m.name }}{% endif %};{% endfor %}"
    "{% if add_generation_prompt %}{{ 'THINK' if enable_thinking else 'assistant:' }}{% endif %}"
)
HELLO = [{"role": "user", "content": "Hello. " * 9}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def weather(city: str) -> str:
    """The weather.

    Args:
      city: its name
    """
    return f"rain in {city}"


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    (path / "chat_template.jinja").write_text(TEMPLATE)
    (path / "model.safetensors").write_bytes(b"0" * 1234)
    (path / "generation_config.json").write_text('{"temperature": 0.5, "repetition_penalty": 1.1}')
    engine = FakeEngine(fake_model().tokenizer)
    engine.limits.max_model_len = 1000
    with serving(engine, directory=path) as server:
        yield server


@pytest.fixture
def server(shared_server, monkeypatch):
    monkeypatch.setattr(shared_server.engine, "says", "")
    return shared_server


@pytest.fixture
def client(server):
    return ollama.Client(host=server.url)


def prompt_of(server) -> str:
    seq = server.engine.submitted[-1]
    return server.engine.tokenizer.decode(seq.tokens[: seq.num_prompt])


@pytest.mark.parametrize("call", ["chat", "generate"])
def test_a_stream_is_the_whole_answer(server, client, call):
    given = {"messages": HELLO} if call == "chat" else {"prompt": "Hello. " * 9}
    options = {"seed": 3, "num_predict": 12, "num_ctx": 4096, "repeat_penalty": 1.2}

    def text(answer):
        return answer.message.content if call == "chat" else answer.response

    ask = getattr(client, call)
    whole = ask("tiny:latest", options=options, **given)
    assert whole.done and whole.done_reason == "length" and whole.model == "tiny"
    assert whole.eval_count == 12 and whole.prompt_eval_count > 20
    assert whole.total_duration >= whole.eval_duration + whole.prompt_eval_duration > 0
    parts = list(ask("tiny", options=options, stream=True, **given))
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert "".join(map(text, parts)) == text(whole) and len(parts) > 5
    assert parts[-1].eval_count == 12 and parts[-1].done_reason == "length"
    params = server.engine.submitted[-1].params
    assert params.seed == 3 and params.repetition_penalty == 1.2
    assert params.temperature == 0.5  # the model's
    assert prompt_of(server).startswith("user: Hello.")


def test_a_stream_by_default(server):
    body = {"model": "tiny", "messages": HELLO, "options": {"num_predict": 3}}
    answer = server.post("/api/chat", body)
    assert answer.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in answer.body.splitlines()]
    assert [line["done"] for line in lines] == [False] * 3 + [True]
    assert lines[0]["message"] == {"role": "assistant", "content": lines[0]["message"]["content"]}


def test_a_silent_stream_shows_life_in_ndjson(server, client, monkeypatch):
    monkeypatch.setattr(answers, "KEEP_ALIVE_SECONDS", 0.02)
    monkeypatch.setattr(server.engine, "holds_at", 1)
    monkeypatch.setattr(server.engine, "says", "Yes.")
    parts = client.chat("tiny", HELLO, stream=True)
    seen = [next(parts) for _ in range(4)]
    assert not any(part.done for part in seen) and seen[-1].message.content == ""
    monkeypatch.setattr(server.engine, "holds_at", None)
    assert "".join(part.message.content for part in [*seen, *parts]) == "Yes."


@pytest.mark.parametrize("stream", [False, True])
def test_a_loop_with_tools(server, client, monkeypatch, stream):
    monkeypatch.setattr(server.engine, "says", f"<think>Hm.</think>Wait. {CALL}{CALL}")
    answer = client.chat("tiny", HELLO, tools=[weather], think=True, stream=stream)
    parts = list(answer) if stream else [answer]
    assert "".join(part.message.thinking or "" for part in parts) == "Hm."
    assert "".join(part.message.content for part in parts).strip() == "Wait."
    calls = [call for part in parts for call in part.message.tool_calls or []]
    assert [(call.function.name, call.function.arguments) for call in calls] == [
        ("weather", {"city": "Oslo"})
    ] * 2
    assert parts[-1].done_reason == "stop"
    assert "TOOLS" in prompt_of(server) and prompt_of(server).endswith("THINK")
    past = {"role": "assistant", "content": "Wait.", "thinking": "Hm.", "tool_calls": calls}
    results = [
        {"role": "tool", "content": text, "tool_name": "weather"} for text in ("rain", "sun")
    ]
    monkeypatch.setattr(server.engine, "says", "Rain.")
    said = client.chat("tiny", [*HELLO, past, *results], tools=[weather], think=False).message
    assert said.content == "Rain." and not said.tool_calls
    prompt = prompt_of(server)
    assert 'CALL call00001 weather {"city": "Oslo"}' in prompt
    assert "tool: rain FOR call00001 weather;tool: sun FOR call00002 weather" in prompt
    assert "<think>Hm.</think>Wait." in prompt and prompt.endswith("assistant:")


def test_thoughts_that_nobody_wants(server, client, monkeypatch):
    monkeypatch.setattr(server.engine, "says", "<think>Hm.</think>Yes.")
    message = client.chat("tiny", HELLO, think=False).message
    assert message.content == "Yes." and message.thinking is None
    assert client.generate("tiny", "Well?").thinking == "Hm."


def test_format_and_stop(server, client):
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}}
    client.chat("tiny", HELLO, format=schema, options={"stop": ["x", "y"], "num_predict": 2})
    params = server.engine.submitted[-1].params
    assert "age" in params.grammar and params.stop == ("x", "y")
    client.generate("tiny", "Well?", format="json", options={"num_predict": 2})
    assert server.engine.submitted[-1].params.grammar is not None
    client.generate("tiny", "Well?", format="", options={"num_predict": 2})
    assert server.engine.submitted[-1].params.grammar is None


def test_raw_and_system(server, client):
    assert client.generate("tiny", "import os", raw=True).eval_count > 100
    assert prompt_of(server) == "import os"
    client.generate("tiny", "Well?", system="Be brief.", options={"num_predict": 2})
    assert prompt_of(server) == "system: Be brief.;user: Well?;assistant:"


@pytest.mark.parametrize("raw", [False, True])
def test_logprobs(server, client, raw):
    options = {"num_predict": 3}
    ask = {"logprobs": True, "top_logprobs": 2, "raw": raw, "options": options}
    whole = client.generate("tiny", "import os", **ask)
    assert [len(entry.top_logprobs) for entry in whole.logprobs] == [2, 2, 2]
    assert whole.logprobs[0].logprob == -0.5 and whole.logprobs[0].token
    parts = list(client.generate("tiny", "import os", stream=True, **ask))
    assert sum(len(part.logprobs or ()) for part in parts) == 3


def test_any_content_type_but_of_no_other_web_page(server):
    body = b'{"model": "tiny", "prompt": "a", "stream": false, "options": {"num_predict": 2}}'
    for kind in ("", "application/x-www-form-urlencoded", "text/plain"):
        assert server.post("/api/generate", body, Content_Type=kind).status == 200
        own = {"Content_Type": kind, "Origin": server.url}
        assert server.post("/api/generate", body, **own).status == 200
        for origin in ("http://evil.example", "null"):
            other = {"Content_Type": kind, "Origin": origin}
            answer = server.post("/api/generate", body, **other)
            assert answer.status == 403 and "--allow-origin" in answer.json["error"]


def test_models(server, client):
    (model,) = client.list().models
    assert (model.model, model.size, model.details.family) == ("tiny", 1234, "llama")
    assert len(model.digest) == 64 and model.modified_at.year > 2000
    (running,) = client.ps().models
    assert (running.model, running.digest) == ("tiny", model.digest)
    assert (running.context_length, running.expires_at.year) == (1000, 9999)
    shown = client.show("tiny:latest")
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert shown.modelinfo["llama.context_length"] == 1000
    assert shown.template == TEMPLATE
    assert shown.parameters == "temperature 0.5\nrepeat_penalty 1.1"
    assert server.get("/api/version").json == server.get("/version").json
    with pytest.raises(ollama.ResponseError, match="'x' is not served here, 'tiny' is") as caught:
        client.show("x")
    assert caught.value.status_code == 404


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "x"}, "model: 'x' is not served here"),
        ({"options": {"temperature": "hot"}}, "options.temperature: Input should be a valid"),
        ({"options": {"num_predict": 2000}}, "maximum context length is 1000"),
        ({"options": {"mirostat": 2}}, "options.mirostat: not supported"),
        ({"options": {"repeat_last_n": 64}}, "options.repeat_last_n: "),
        ({"format": {"type": "x"}}, "format: "),
        ({"format": "xml"}, "format: "),
        ({"think": "much"}, "think: "),
        ({"messages": []}, "messages: "),
        ({"messages": [{"role": "user", "content": "a", "images": ["aGk="]}]}, "reads texts only"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0]: no call comes before"),
        ({"messages": [{"role": "user", "thinking": "a"}]}, "messages[0]: only the assistant's"),
        ({"top_logprobs": 2}, "top_logprobs needs logprobs"),
    ],
)
def test_errors_in_ollamas_shape(server, change, message):
    answer = server.post("/api/chat", {"model": "tiny", "messages": HELLO} | change)
    assert answer.status in (400, 404)
    assert list(answer.json) == ["error"] and message in answer.json["error"]


def test_late_errors_and_keys(server, client):
    with pytest.raises(ollama.ResponseError, match="asked to fail"):
        list(client.generate("tiny", FakeEngine.FAIL, raw=True, stream=True))
    with pytest.raises(ollama.ResponseError, match="template: not supported"):
        client.generate("tiny", "a", template="b")
    with pytest.raises(
        ollama.ResponseError, match="system: belongs to the chat template, which raw"
    ):
        client.generate("tiny", "a", system="b", raw=True)
    assert "/api/chat" in server.get("/openapi.json").json["paths"]
    with serving(api_keys=KEYS) as other:
        with pytest.raises(ollama.ResponseError, match="a valid API key") as caught:
            ollama.Client(host=other.url).list()
        assert caught.value.status_code == 401
        headers = {"Authorization": f"Bearer {KEYS[0]}"}
        assert ollama.Client(host=other.url, headers=headers).list().models
        with pytest.raises(ollama.ResponseError, match="has no thoughts"):
            ollama.Client(host=other.url, headers=headers).chat("tiny", HELLO, think=True)
