"""A log line for each request, with the identifier that the client also gets."""

import json
import logging
import re
import socket

import pytest

pytest.importorskip("starlette", reason="needs the extra `serve`")

from helpers.serve.fake_engine import FakeEngine, fake_model
from helpers.serve.live_server import eventually, post_bytes, serving
from jax_attn.serve._http.log_format import JsonLines

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = {"prompt": "import os", "max_tokens": 4}
KEYS = ("a-key-of-one-tenant", "another-tenants-key")


@pytest.fixture
def lines(caplog):
    """Lines of the log so far, each as a dictionary."""
    caplog.set_level(logging.INFO, "jax_attn.serve.access")

    def read():
        records = [r for r in caplog.records if r.name == "jax_attn.serve.access"]
        return [dict(re.findall(r"(\S+?)=(\S+)", r.getMessage())) for r in records]

    return read


def last(lines, num=1):
    eventually(lambda: len(lines()) >= num)
    return lines()[-1]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_line_says_who_asked_for_what_and_how_long_it_took(lines, stream):
    with serving(FakeEngine(fake_model().tokenizer, delay=0.01), api_keys=KEYS) as server:
        key = {"Authorization": f"Bearer {KEYS[1]}"}
        answer = server.post(COMPLETIONS, HELLO | {"n": 2, "stream": stream}, **key)
        line = last(lines)
        seq = server.engine.submitted[-1]
    assert line["id"] == answer.headers["x-request-id"] and line["tenant"] == "key1"
    assert line["route"] == f"POST:{COMPLETIONS}" and line["status"] == "200"
    assert line["prompt_tokens"] == str(seq.num_prompt) and line["output_tokens"] == "8"
    times = [float(line[f"{name}_s"]) for name in ("queue", "first_token", "total")]
    assert times == sorted(times) and times[2] >= 0.03
    assert not any(key in str(lines()) for key in KEYS)


def test_lines_of_json(caplog):
    """One object a line; numbers are numbers, and what was not reached is null."""
    caplog.set_level(logging.INFO)
    with serving() as server:
        for path, body in ((COMPLETIONS, HELLO), ("/tokenize", {"prompt": "a"})):
            answer = server.post(path, body)
    eventually(lambda: len([r for r in caplog.records if hasattr(r, "fields")]) == 2)
    first, second = (
        json.loads(JsonLines().format(r)) for r in caplog.records if hasattr(r, "fields")
    )
    assert first["logger"] == "jax_attn.serve.access" and first["level"] == "info"
    assert first["route"] == f"POST:{COMPLETIONS}" and first["status"] == 200
    assert first["output_tokens"] == 4 and 0 <= first["queue_s"] <= first["total_s"]
    assert second["id"] == answer.headers["x-request-id"] and second["first_token_s"] is None
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("jax_attn.serve").exception("%s failed", "it")
    text = JsonLines().format(caplog.records[-1])
    line = json.loads(text)
    assert "\n" not in text and line["message"] == "it failed" and line["level"] == "error"
    assert "two\nlines" in line["exception"] and line["time"].endswith("+00:00")


def test_a_line_for_every_request(lines, monkeypatch):
    with serving(api_keys=KEYS) as server:
        key = {"Authorization": f"Bearer {KEYS[0]}"}
        monkeypatch.setattr(server.engine, "generate", lambda seqs: 1 / 0)
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        for num, (status, call) in enumerate(
            [
                (401, lambda: server.get("/v1/models")),
                (404, lambda: server.get("/nothing", **key)),
                (200, lambda: server.get("/v1/models", **key)),
                (400, lambda: server.post(COMPLETIONS, {"prompt": 5}, **key)),
                (500, lambda: server.post(COMPLETIONS, HELLO, **key)),
                (200, lambda: server.post("/tokenize", {"prompt": "a"}, **key)),
            ],
            start=1,
        ):
            answer = call()
            line = last(lines, num)
            assert answer.status == status and line["status"] == str(status)
            assert answer.headers["x-request-id"] == line["id"]
            assert line["tenant"] == ("-" if status == 401 else "key0")
            assert line["first_token_s"] == "-"


def test_a_client_that_goes(lines):
    with serving() as server:
        server.engine.holds_at = 3
        with server.connect(post_bytes(COMPLETIONS, HELLO | {"max_tokens": 200})):
            eventually(lambda: server.engine.live)
        line = last(lines)
        assert line["status"] == "499" and int(line["output_tokens"]) < 200


def test_the_clients_identifier_is_kept(lines):
    with serving() as server:
        wanted = "abc-123:/+="
        calls = [(COMPLETIONS, HELLO), (COMPLETIONS, {}), ("/tokenize", {"prompt": "a"})]
        for num, (path, body) in enumerate(calls, 1):
            answer = server.post(path, body, X_Request_Id=wanted)
            assert answer.headers["x-request-id"] == wanted == last(lines, num)["id"]
        answer = server.get("/v1/models", X_Request_Id="x" * 128)
        assert answer.headers["x-request-id"] == "x" * 128
        # No client can name a sequence of the engine.
        assert wanted not in server.engine.submitted[0].id


@pytest.mark.parametrize("wanted", ["", "x" * 129, "a b", "\xe9", "a\tb"], ids=repr)
def test_an_identifier_that_could_not_be_logged_is_not_kept(lines, wanted):
    with serving() as server:
        answer = server.get("/v1/models", X_Request_Id=wanted)
        assert re.fullmatch(r"req-[0-9a-f]{24}", answer.headers["x-request-id"])


def test_nothing_a_client_sends_makes_another_line(lines, caplog):
    with serving() as server:
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(b"GET /a%0Aid=forged%20status=200 HTTP/1.1\r\nHost: a\r\n\r\n")
            assert b" 404 " in connection.recv(1000)
        server.get("/" + "a" * 9000)
        eventually(lambda: len(lines()) == 2)
        first, second = (record.getMessage() for record in caplog.records[-2:])
    assert "\n" not in first and lines()[0]["route"] == "GET:/a?id=forged?status=200"
    assert lines()[0]["status"] == "404" and len(second) < 400


def test_it_can_be_switched_off(lines):
    with serving(access_log=False) as server:
        assert server.get("/health", X_Request_Id="kept").headers["x-request-id"] == "kept"
        assert server.get("/health").headers["x-request-id"].startswith("req-")
    assert not lines()


def test_probes_have_no_line(lines):
    with serving() as server:
        for path in ("/health", "/metrics", "/v1/models"):
            assert server.get(path).status == 200
        assert last(lines)["route"] == "GET:/v1/models" and len(lines()) == 1
