"""uvicorn in a thread with a fake engine behind it, and a client that sends what others cannot."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from fake_engine import MODEL, FakeEngine, fake_model

from jax_attn.serve.connection import Connection
from jax_attn.serve.server import ServerConfig, create_app


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def ok(self) -> bool:
        return self.status == 200

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def error(self):
        return self.json["error"]


@dataclass
class LiveServer:
    port: int
    engine: FakeEngine
    app: object
    uvicorn: uvicorn.Server

    @property
    def num_connections(self) -> int:
        return len(self.uvicorn.server_state.connections)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def request(self, method: str, path: str, body=None, **headers: str) -> Answer:
        """body: bytes as they are, anything else as JSON."""
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        if body is not None:
            headers.setdefault("Content-Type", "application/json")
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        with contextlib.closing(connection):
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            lower = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, lower, response.read())

    def get(self, path: str, **headers: str) -> Answer:
        return self.request("GET", path, **headers)

    def post(self, path: str, body, **headers: str) -> Answer:
        return self.request("POST", path, body, **headers)

    def events(self, path: str, body: dict) -> list[str]:
        """What follows `data: ` in each event of a stream."""
        answer = self.post(path, body | {"stream": True})
        assert answer.status == 200, answer.body
        assert answer.headers["content-type"].startswith("text/event-stream")
        parts = answer.body.decode().split("\n\n")
        assert parts.pop() == "" and all(part.startswith("data: ") for part in parts)
        return [part.removeprefix("data: ") for part in parts]

    def connect(self, request: bytes) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=20)
        connection.sendall(request)
        return connection


def post_bytes(path: str, body: dict) -> bytes:
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw


@contextlib.contextmanager
def serving(
    engine: FakeEngine | None = None, directory: Path = MODEL, **config
) -> Iterator[LiveServer]:
    model = fake_model()
    engine = engine or FakeEngine(model.tokenizer)
    app = create_app(
        engine, model, ServerConfig(model_directory=directory, model_name="tiny", **config)
    )
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            port=0,
            http=Connection,
            h11_max_incomplete_event_size=16384,
            log_level="warning",
            timeout_graceful_shutdown=2,
        )
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        eventually(lambda: server.started)
        yield LiveServer(server.servers[0].sockets[0].getsockname()[1], engine, app, server)
    finally:
        server.should_exit = True
        thread.join(10)


def eventually(holds: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.005)
