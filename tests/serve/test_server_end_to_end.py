"""`python -m jax_attn.serve` with the bundled model, and the official openai client."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading

import pytest

pytest.importorskip("starlette", reason="needs the extra `serve`")
openai = pytest.importorskip("openai", reason="needs the extra `test`")

from helpers.serve.live_server import (  # noqa: E402
    HANG_SECONDS,
    KEYS,
    OPERATOR_KEY,
    SAFE_PATH,
    START_SECONDS,
    ServerProcess,
    eventually,
    key_options,
)

MODEL = "tiny-llama-stdlib"
PROMPT = "import os\nimport sys\n\n\ndef main("
OPTIONS = ["--max-running", "4", "--max-step-tokens", "64", "--max-waiting", "8"]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    directory = tmp_path_factory.mktemp("server")
    model = directory / MODEL
    model.mkdir()
    for path in model_directory().iterdir():
        if path.name != "chat_template.jinja":
            (model / path.name).symlink_to(path)
    template = (model_directory() / "chat_template.jinja").read_text()
    (model / "chat_template.jinja").write_text(TOOLS_TEMPLATE + template)
    server = ServerProcess(directory, *OPTIONS, *key_options(directory), "--model", str(model))
    with contextlib.closing(server):
        server.wait_until_ready()
        yield server
        assert server.metric("jax_attn_compilations_total") == 0


# The bundled model's own template has no tools.
TOOLS_TEMPLATE = """{% if tools %}{{ tools | tojson }} <tool_call>{"arguments": {}}{% endif %}"""


def model_directory():
    from helpers.serve.fake_engine import MODEL as directory

    return directory


@pytest.fixture
def client(server):
    with server.client() as client:
        yield client


def test_completion(client):
    # The number of chunks depends on how fast they are read; test_server.py counts them.
    request = {"model": MODEL, "prompt": PROMPT, "max_tokens": 200, "temperature": 0}
    request["extra_body"] = {"ignore_eos": True}
    answer = client.completions.create(**request)
    text = answer.choices[0].text
    assert text and answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 200
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    chunks = list(
        client.completions.create(**request, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == text
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens


def test_prefix_cache_shows_in_the_usage(client):
    request = {"model": MODEL, "prompt": PROMPT * 8, "max_tokens": 1, "temperature": 0}
    first = client.completions.create(**request).usage
    second = client.completions.create(**request).usage
    assert first.prompt_tokens == second.prompt_tokens > 64
    assert first.prompt_tokens_details.cached_tokens < 16
    assert second.prompt_tokens_details.cached_tokens >= second.prompt_tokens - 16
    # Other tenants, by key or by salt, share nothing.
    salted = client.completions.create(**request, extra_body={"cache_salt": "mine"}).usage
    assert salted.prompt_tokens_details.cached_tokens == 0


def test_tenants_share_nothing(server):
    for key in KEYS:
        with server.client(key) as client:
            usage = client.completions.create(
                model=MODEL, prompt="x = 1\n" * 40, max_tokens=1
            ).usage
            assert usage.prompt_tokens_details.cached_tokens == 0


def test_chat(client):
    messages = [
        {"role": "system", "content": "Answer in code."},
        {"role": "user", "content": "Read a file."},
    ]
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, max_completion_tokens=20, temperature=0
    )
    content = answer.choices[0].message.content
    assert content and answer.choices[0].message.role == "assistant"
    stream = client.chat.completions.create(
        model=MODEL, messages=messages, max_completion_tokens=20, temperature=0, stream=True
    )
    deltas = [chunk.choices[0].delta for chunk in stream]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == content


def test_logprobs_of_the_prompt(client):
    """Generated text has the same logprobs as a prompt, though it is cached."""
    request = {"model": MODEL, "temperature": 0, "logprobs": 3}
    choice = client.completions.create(prompt=PROMPT, max_tokens=20, **request).choices[0]
    again = client.completions.create(
        prompt=PROMPT + choice.text, max_tokens=0, echo=True, **request
    )
    found, expected = again.choices[0].logprobs, choice.logprobs
    assert again.choices[0].text == PROMPT + choice.text == "".join(found.tokens[1:])
    assert again.usage.completion_tokens == 0
    assert found.tokens[-20:] == expected.tokens
    assert found.token_logprobs[-20:] == pytest.approx(expected.token_logprobs, abs=1e-3)
    assert found.top_logprobs[-1] == pytest.approx(expected.top_logprobs[-1], abs=1e-3)
    assert found.token_logprobs[0] is None and None not in found.token_logprobs[1:]


def test_choices_and_seeds(client):
    request = {"model": MODEL, "prompt": PROMPT, "max_tokens": 16, "temperature": 1, "n": 2}
    one, again = (client.completions.create(**request, seed=7) for _ in range(2))
    texts = [choice.text for choice in one.choices]
    assert [choice.index for choice in one.choices] == [0, 1] and len(set(texts)) == 2
    assert texts == [choice.text for choice in again.choices]


def test_logprobs(client):
    answer = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=8, temperature=0, logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert "".join(logprobs.tokens) == answer.choices[0].text
    for token, logprob, top in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert len(top) == 3 and top[token] == logprob == max(top.values())  # greedy
    chat = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "é"}],
        max_tokens=8,
        logprobs=True,
        top_logprobs=2,
    )
    entries = chat.choices[0].logprobs.content
    assert len(entries) == chat.usage.completion_tokens
    assert all(len(entry.top_logprobs) == 2 and entry.logprob <= 0 for entry in entries)


def test_json_schema(client):
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["ada", "bob"]}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Who?"}],
        max_tokens=60,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "person", "schema": schema, "strict": True},
        },
    )
    person = json.loads(answer.choices[0].message.content)
    assert person.keys() == {"name", "age"} and person["name"] in ("ada", "bob")
    regex = client.completions.create(
        model=MODEL, prompt="", max_tokens=30, extra_body={"regex": "[0-9]{4}-[0-9]{2}"}
    )
    assert re.fullmatch("[0-9]{4}-[0-9]{2}", regex.choices[0].text)
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(
            model=MODEL, prompt="", extra_body={"json_schema": {"type": "no such"}}
        )
    assert refused.value.param == "json_schema"


def test_tools(client):
    """A model that knows nothing of tools has to call one, with arguments by its schema."""
    function = {
        "name": "set_level",
        "parameters": {
            "type": "object",
            "properties": {"level": {"enum": ["low", "high"]}, "on": {"type": "boolean"}},
            "required": ["level", "on"],
            "additionalProperties": False,
        },
    }
    request = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Turn it on."}],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 200,
    }
    choice = client.chat.completions.create(**request).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    (call,) = choice.message.tool_calls
    with client.chat.completions.stream(**request) as stream:
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls
    for made in (call, streamed):
        assert made.function.name == "set_level"
        arguments = json.loads(made.function.arguments)
        assert arguments["level"] in ("low", "high") and arguments["on"] in (True, False)
    messages = [
        *request["messages"],
        choice.message,
        {"role": "tool", "tool_call_id": call.id, "content": "done"},
    ]
    answer = client.chat.completions.create(
        **request | {"messages": messages, "tool_choice": "none"}
    )
    assert answer.choices[0].message.tool_calls is None


def test_responses(client):
    """A stream, a continued conversation, a required call, and a response format."""
    request = {"model": MODEL, "temperature": 0, "max_output_tokens": 12}
    whole = client.responses.create(input="Read a file.", **request)
    events = list(client.responses.create(input="Read a file.", **request, stream=True))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert events[-1].type == f"response.{whole.status}"
    streamed = events[-1].response
    assert whole.output_text == streamed.output_text == "".join(deltas)
    assert client.responses.retrieve(streamed.id).output_text == whole.output_text
    after = client.responses.create(input="And now?", previous_response_id=whole.id, **request)
    assert after.usage.input_tokens > whole.usage.input_tokens + 12
    assert after.usage.input_tokens_details.cached_tokens >= 16
    schema = {
        "type": "object",
        "properties": {"level": {"enum": ["low", "high"]}},
        "required": ["level"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "name": "set_level", "parameters": schema, "strict": True}
    request = {"model": MODEL, "input": "Turn it on.", "max_output_tokens": 100}
    called = client.responses.create(
        **request, tools=[tool], tool_choice="required", parallel_tool_calls=False
    )
    (call,) = called.output
    assert call.name == "set_level" and json.loads(call.arguments)["level"] in ("low", "high")
    shape = {"format": {"type": "json_schema", "name": "level", "schema": schema}}
    assert json.loads(client.responses.create(**request, text=shape).output_text).keys() == {
        "level"
    }
    client.responses.delete(whole.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(**request, previous_response_id=whole.id)


def test_stop(client):
    answer = client.completions.create(
        model=MODEL, prompt="for i in range(", max_tokens=40, stop=[":"], temperature=0
    )
    assert ":" not in answer.choices[0].text and answer.choices[0].finish_reason == "stop"


def test_errors_of_the_client_library(server, client):
    with pytest.raises(openai.AuthenticationError):
        server.client("wrong").models.list()
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-4", prompt="a")
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=[])
    assert refused.value.param == "messages"
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=MODEL, prompt="a", max_tokens=10**6)
    assert [model.id for model in client.models.list()] == [MODEL]


def test_disconnect_frees_the_engine(server, client):
    """Far more work than the test has time for, all of it abandoned."""
    streams = [
        client.completions.create(
            model=MODEL,
            prompt=PROMPT,
            max_tokens=1900,
            stream=True,
            extra_body={"ignore_eos": True, "min_tokens": 1900},
        )
        for _ in range(4)
    ]
    for stream in streams:
        next(iter(stream))
    disconnected = 'jax_attn_requests_total{outcome="disconnected"}'
    num_gone = server.metric(disconnected)
    with server.engine_stopped():  # otherwise it might be done first
        for stream in streams:
            stream.close()
        eventually(lambda: server.metric(disconnected) == num_gone + 4)
        before = server.metric("jax_attn_generated_tokens_total")
    eventually(lambda: not server.metric("jax_attn_sequences_running"))
    assert server.metric("jax_attn_generated_tokens_total") - before < 4 * 400
    # Nothing leaked: pages that are not free are cached, and nothing holds them.
    assert server.metric('jax_attn_pages{state="used"}') == 0
    assert client.completions.create(model=MODEL, prompt="a", max_tokens=2).choices


@pytest.mark.parametrize(
    ("header", "status"),
    [("X: " + "a" * 20_000, 400), (f"Content-Length: {(4 << 20) + 1}", 413)],
    ids=["headers", "body"],
)
def test_caps(server, header, status):
    """The limits in docs/server.md, for the server as the command starts it."""
    lines = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    request = "\r\n".join([*lines, f"Authorization: Bearer {KEYS[0]}", header, "", ""])
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as connection:
        connection.settimeout(HANG_SECONDS)
        connection.sendall(request.encode())
        assert connection.recv(1000).split()[1] == str(status).encode()


def test_full_queue(server):
    """4 run, 8 wait: of 24 at once 12 or more are refused, and all others are answered."""
    outcomes = []

    def ask():
        with server.client() as client:
            try:
                answer = client.completions.create(
                    model=MODEL, prompt=PROMPT, max_tokens=200, extra_body={"ignore_eos": True}
                )
                outcomes.append(answer.usage.completion_tokens)
            except openai.RateLimitError as error:
                outcomes.append(int(error.response.headers["retry-after"]) and "refused")

    threads = [threading.Thread(target=ask) for _ in range(24)]
    with server.engine_stopped():
        for thread in threads:
            thread.start()
        eventually(lambda: len(outcomes) == 12)
    for thread in threads:
        thread.join(HANG_SECONDS)
    assert outcomes[:12] == ["refused"] * 12 and len(outcomes) == 24
    # If 12 come before the next step, the engine lets 8 of them wait.
    assert outcomes.count("refused") + outcomes.count(200) == 24 and outcomes.count(200) >= 8


def test_live_state(server, client):
    client.completions.create(model=MODEL, prompt=PROMPT * 8, max_tokens=1)

    def texts(key: str) -> str:
        state = json.loads(server.get("/debug/state", key)[1])
        assert state["status"] == "ok"
        return "".join(node.get("text", "") for node in state["tree"])

    eventually(lambda: PROMPT[:20] in texts(KEYS[0]))  # a snapshot made after that request
    assert PROMPT[:20] not in texts(KEYS[1])
    state = json.loads(server.get("/debug/state", OPERATOR_KEY)[1])
    assert len(state["pages"]["states"]) == state["pages"]["total"] and state["stats"]["steps"]
    assert PROMPT[:20] not in "".join(node.get("text", "") for node in state["tree"])


def test_sigterm_drains(tmp_path):
    server = ServerProcess(
        tmp_path, *OPTIONS, "--model", str(model_directory()), "--drain-seconds", str(HANG_SECONDS)
    )
    with contextlib.closing(server), server.client() as client:
        server.wait_until_ready()
        stream = client.completions.create(
            model=MODEL,
            prompt=PROMPT,
            max_tokens=200,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        next(iter(stream))
        os.kill(server.process.pid, signal.SIGTERM)
        chunks = list(stream)  # to the end
        assert chunks[-1].usage.completion_tokens == 200
        assert server.process.wait(HANG_SECONDS) == 0, server.log()
        with pytest.raises(openai.APIConnectionError):
            client.models.list()


def test_sigterm_at_the_start(tmp_path):
    """The port is open; the first executables may be compiled by then, or not."""
    server = ServerProcess(tmp_path, *OPTIONS, "--model", str(model_directory()))
    with contextlib.closing(server):
        os.kill(server.process.pid, signal.SIGTERM)
        assert server.process.wait(START_SECONDS) == 0, server.log()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "nothing/here"], "nothing/here"),
        (["--api-key-file", "missing"], "--api-key-file: expected a file with one key a line"),
        (["--page-size", "0"], "at least 1"),
        (["--model", str(model_directory()), "--num-pages", "1000000000"], "--num-pages: expected"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_bad_command_lines(tmp_path, options, message):
    done = subprocess.run(
        [sys.executable, *SAFE_PATH, "-m", "jax_attn.serve", "--port", "0", *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
    )
    assert done.returncode in (1, 2) and message in done.stderr
    assert "Traceback" not in done.stderr
