"""The server's routes under requests made from its own description.

No answer is a 5xx and none is missing. Each fits the description of its status, and at the end
nothing is left of any request. The requests run in this process, against the application without a
socket and with a fake engine (a thousand a second), or over HTTP against a server with a model.
"""

from __future__ import annotations

import asyncio
import collections
import http.client
import json
import random
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from helpers import embedding_cases
from helpers.serve.fake_engine import MODEL, FakeEngine, fake_model
from helpers.serve.live_server import Answer, eventually
from jax_attn import models
from jax_attn.serve._engine.embedder import Embedder
from jax_attn.serve._http.server import create_app
from jax_attn.serve._http.settings import ServerConfig

from . import bodies
from .bodies import Request

EMBEDDING_CASE = "bert mean"
START_SECONDS = 240.0
ANSWER_SECONDS = 240.0  # longer is a hang on any machine
LONGEST_ERROR = 2000  # bytes
ERROR_KEYS = {"message", "type", "param", "code", "reason"}


class Routes:
    name = "routes"

    def __init__(self) -> None:
        self.statuses: collections.Counter[int] = collections.Counter()

    def case(self, rng: random.Random) -> Request:
        return bodies.request(rng)

    def smaller(self, case: Request) -> Iterator[Request]:
        return bodies.smaller(case)

    def run(self, cases: list[Request]) -> None:
        for case in cases:
            answer = self.answer(case)
            check(case, answer)
            self.statuses[answer.status] += 1

    def answer(self, case: Request) -> Answer:
        raise NotImplementedError

    def check_at_end(self) -> None:
        raise NotImplementedError

    def to_json(self, case: Request) -> Any:
        return case.to_json()

    def from_json(self, data: Any) -> Request:
        return Request.from_json(data)


def check(case: Request, answer: Answer) -> None:
    where = f"{case.method} {case.path} {case.body[:300]!r}: {answer.status} {answer.body[:300]!r}"
    assert answer.status < 500, where
    content_type = answer.headers.get("content-type", "")
    if content_type.startswith("text/event-stream"):
        *events, end = answer.body.split(b"\n\n")
        assert events and not end, where
        has_names = case.path in ("/v1/responses", "/v1/messages")
        assert has_names or events.pop() == b"data: [DONE]", where
        for event in events:
            if not event.startswith(b":"):  # a comment
                name, mark, raw = event.rpartition(b"data: ")
                data = json.loads(raw)
                assert mark and name == (
                    b"event: %b\n" % data["type"].encode() if has_names else b""
                )
                error = data.get("response", data).get("error") or {}
                kinds = error.get("type"), error.get("code")
                assert not {"server_error", "api_error"} & {*kinds}, where
        if case.path == "/v1/responses":
            assert data["response"]["status"] != "in_progress", where
        if case.path == "/v1/messages":
            assert data["type"] in ("message_stop", "error"), where
    elif content_type.startswith("application/x-ndjson"):
        *_, last = map(json.loads, answer.body.splitlines())
        assert last.get("done") or last.get("error"), where
    elif content_type.startswith("application/json") and case.method != "HEAD":
        data = json.loads(answer.body)
        if answer.status >= 400 and case.path.startswith("/api/"):
            assert data.keys() == {"error"} and isinstance(data["error"], str), where
        elif answer.status >= 400:
            error = data["error"]
            keys = {"message", "type"} if case.path.startswith("/v1/messages") else ERROR_KEYS
            assert error.keys() == keys and error["message"], where
            assert len(answer.body) < LONGEST_ERROR, where
    if answer.status >= 400:
        assert b"Traceback" not in answer.body, where


def write_embedding_model(directory: Path) -> Path:
    """Writes a small random encoder whose vectors may be cut to the size in the examples."""
    return embedding_cases.write(directory, EMBEDDING_CASE, matryoshka_dimensions=[2])


class RoutesInProcess(Routes):
    """Sends requests to the ASGI application with a real embedding model."""

    def __init__(self) -> None:
        super().__init__()
        model = fake_model()
        self.engine = FakeEngine(model.tokenizer)
        config = ServerConfig(model_directory=MODEL, model_name="tiny")
        with tempfile.TemporaryDirectory() as directory:
            vectors = models.load_embedding(write_embedding_model(Path(directory)), "float32")
        self._embedder = Embedder(vectors, "vectors")
        self._app = create_app(self.engine, model, config, (vectors, self._embedder))
        self.engine.start()
        ready = threading.Event()
        self._embedder.start(ready.set)
        assert ready.wait(START_SECONDS), "the embedding model is not ready"
        self._loop = asyncio.new_event_loop()

    def answer(self, case: Request) -> Answer:
        return self._loop.run_until_complete(asyncio.wait_for(self._answer(case), ANSWER_SECONDS))

    async def _answer(self, case: Request) -> Answer:
        sent: list[dict[str, Any]] = []
        ended = asyncio.Event()
        received = iter([{"type": "http.request", "body": case.body, "more_body": False}])

        async def receive() -> dict[str, Any]:
            if (message := next(received, None)) is not None:
                return message
            await ended.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                ended.set()

        try:
            await self._app(scope_of(case), receive, send)
        except Exception as error:
            raise AssertionError(f"{case}: {error!r}") from error
        assert ended.is_set(), f"{case}: no end of the answer"
        start, *parts = sent
        headers = {
            name.decode().lower(): value.decode("latin-1") for name, value in start["headers"]
        }
        self.engine.submitted.clear()
        return Answer(start["status"], headers, b"".join(part["body"] for part in parts))

    def check_at_end(self) -> None:
        assert not self.engine.live, "sequences that nobody waits for"
        assert len(asyncio.all_tasks(self._loop)) == 0, "tasks that nobody waits for"

    def close(self) -> None:
        self._embedder.stop()
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()


def scope_of(case: Request) -> dict[str, Any]:
    """The ASGI scope that uvicorn makes for the request."""
    path, _, query = case.path.partition("?")
    headers = [(name.encode(), value.encode("latin-1")) for name, value in case.headers]
    if not any(name == b"content-length" for name, _ in headers):
        headers.append((b"content-length", b"%d" % len(case.body)))
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "server": ("127.0.0.1", 80),
        "client": ("127.0.0.1", 1),
        "scheme": "http",
        "method": case.method,
        "root_path": "",
        "path": unquote(path),
        "raw_path": path.encode("ascii"),
        "query_string": query.encode("ascii"),
        "headers": headers,
        "state": {},
    }


class RoutesOverHttp(Routes):
    """Sends requests to a server, such as a live_server.ServerProcess."""

    def __init__(self, server: Any, key: str = ""):
        super().__init__()
        self._server, self._key = server, key
        self._connection: http.client.HTTPConnection | None = None

    def answer(self, case: Request) -> Answer:
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        headers |= {name: value for name, value in case.headers if value.isprintable()}
        path = case.path
        try:
            return self._exchange(case.method, path, case.body, headers)
        except (http.client.RemoteDisconnected, ConnectionError):
            # The server may close a connection that was kept alive, but not a fresh one.
            self._close()
        try:
            return self._exchange(case.method, path, case.body, headers)
        except (http.client.HTTPException, OSError) as error:
            self._close()
            raise AssertionError(f"{case}: {error!r}") from error

    def _exchange(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> Answer:
        if self._connection is None:
            self._connection = http.client.HTTPConnection(
                "127.0.0.1", self._server.port, timeout=ANSWER_SECONDS
            )
        self._connection.request(method, path, body, headers)
        response = self._connection.getresponse()
        lower = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, lower, response.read())

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def check_at_end(self) -> None:
        self._close()
        eventually(self._server.is_at_rest)
        assert self._server.get("/health")[0] == 200
        assert "Traceback" not in self._server.log()

    def close(self) -> None:
        self._close()
