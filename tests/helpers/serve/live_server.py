"""Servers under test, and clients that send what others cannot.

`serving`: uvicorn in a thread, with a fake engine behind it. `ServerProcess`: the command, with a
model, in a process of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from helpers.serve.fake_engine import MODEL, FakeEngine, fake_model
from jax_attn.serve._http.connection import Connection
from jax_attn.serve._http.server import ServerConfig, create_app

KEYS = ("a-key-of-one-tenant", "another-tenants-key")
OPERATOR_KEY = "the-key-of-an-operator"
HANG_SECONDS = 240  # for what takes milliseconds: no verdict may depend on a machine's speed
START_SECONDS = 240
# A wheel has no model in it.
# An installed package must not be shadowed by a checkout without the extension.
SAFE_PATH = ["-P"] if sys.flags.safe_path else []


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
    def is_busy(self) -> bool:
        """A connection is open, or a request is worked on."""
        state = self.uvicorn.server_state
        return bool(state.connections or state.tasks)

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
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=HANG_SECONDS)
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
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=HANG_SECONDS)
        connection.sendall(request)
        return connection

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Its event loop does nothing inside: it sees a connection and what was sent at once."""
        begun, go_on = threading.Event(), threading.Event()

        def pause() -> None:
            begun.set()
            go_on.wait(HANG_SECONDS)

        self.uvicorn.servers[0].get_loop().call_soon_threadsafe(pause)
        assert begun.wait(HANG_SECONDS)
        try:
            yield
        finally:
            go_on.set()


def post_bytes(path: str, body: dict) -> bytes:
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw


@contextlib.contextmanager
def serving(
    engine: FakeEngine | None = None, directory: Path = MODEL, embedding=None, **config
) -> Iterator[LiveServer]:
    model = fake_model()
    engine = engine or FakeEngine(model.tokenizer)
    app = create_app(
        engine,
        model,
        ServerConfig(model_directory=directory, model_name="tiny", **config),
        embedding,
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
    # As the command does: run() would take uvloop where that is installed.
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    try:
        eventually(lambda: server.started)
        yield LiveServer(server.servers[0].sockets[0].getsockname()[1], engine, app, server)
    finally:
        server.should_exit = True
        thread.join(HANG_SECONDS)


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANG_SECONDS
    while not holds():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.005)


def key_options(directory: Path) -> list[str]:
    """Two tenants and an operator, of a ServerProcess in this directory."""
    (directory / "keys").write_text("\n".join(KEYS))
    (directory / "operators").write_text(OPERATOR_KEY)
    return ["--api-key-file", "keys", "--operator-key-file", "operators"]


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class ServerProcess:
    """`python -m jax_attn.serve`, which is ready after `wait_until_ready`."""

    def __init__(self, directory: Path, *options: str, port: int = 0, log: Path | None = None):
        """directory: where it runs, and where its log goes unless to `log`, which is not read.

        port: 0 is one that is free.
        """
        self._log = open(log or directory / "log", "wb")
        self.process = subprocess.Popen(
            [sys.executable, *SAFE_PATH, "-m", "jax_attn.serve", "--port", str(port), *options],
            cwd=directory,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        self.url = f"http://127.0.0.1:{port}" if port else self._wait(self._find_url)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def wait_until_ready(self) -> None:
        self._wait(self._is_ready)

    def _is_ready(self) -> bool:
        try:
            return self.get("/health")[0] == 200
        except OSError:  # it does not listen yet
            return False

    @contextlib.contextmanager
    def engine_stopped(self) -> Iterator[None]:
        """The process of the engine does nothing inside; that of HTTP goes on."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            eventually(lambda: b"State:\tT" in self._proc_status())
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def _proc_status(self) -> bytes:
        return Path(f"/proc/{self.process.pid}/status").read_bytes()

    def get(self, path: str, key: str = "") -> tuple[int, bytes]:
        headers = {"Authorization": f"Bearer {key}"}
        request = urllib.request.Request(self.url + path, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=HANG_SECONDS) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def client(self, key: str = KEYS[0]):
        import openai  # of the extra `test`

        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=HANG_SECONDS
        )

    def metric(self, name: str) -> float:
        text = self.get("/metrics", OPERATOR_KEY)[1].decode()
        return float(re.search(rf"^{re.escape(name)} (.*)$", text, re.MULTILINE)[1])

    def is_at_rest(self) -> bool:
        """No request, and every page free or cached."""
        names = ("sequences_waiting", "sequences_running", 'pages{state="used"}')
        return not any(self.metric(f"jax_attn_{name}") for name in names)

    def resident_bytes(self) -> int:
        return self._status("VmRSS")

    def peak_bytes(self) -> int:
        """Resident, since `forget_peak`."""
        return self._status("VmHWM")

    def forget_peak(self) -> None:
        for pid in self._pids():
            Path(f"/proc/{pid}/clear_refs").write_text("5")

    @property
    def http_pid(self) -> int:
        """Of the process that answers HTTP; 0 where there is none of its own."""
        for child in children_of(self.process.pid):
            if b"jax_attn.serve._http.http_process" in Path(f"/proc/{child}/cmdline").read_bytes():
                return child
        return 0

    def _pids(self) -> list[int]:
        return [self.process.pid] + ([self.http_pid] if self.http_pid else [])

    def _status(self, name: str) -> int:
        """Of both processes together."""
        texts = [Path(f"/proc/{pid}/status").read_text() for pid in self._pids()]
        found = [re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE) for text in texts]
        return sum(int(each[1]) for each in found) << 10

    def log(self) -> str:
        if not Path(self._log.name).is_file():
            return ""  # a device
        with open(self._log.name, "rb") as file:
            return file.read().decode(errors="replace")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(HANG_SECONDS)
        self._log.close()

    def _find_url(self) -> str | None:
        found = re.search(r"running on (http://\S+)", self.log())
        return found and found[1]

    def _wait(self, result):
        deadline = time.monotonic() + START_SECONDS
        while not (value := result()):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"exit status {self.process.poll()}: {self.log()}")
            time.sleep(0.05)
        return value


async def ask(
    port: int,
    body: dict | bytes | None,
    path: str = "/v1/completions",
    *,
    leave_after: int | None = None,
    head: bytes = b"",
    **headers: str,
) -> Answer | None:
    """One request over a connection of its own. Without a body it is a GET.

    leave_after: events of the stream after which the client goes. None is for those that go.
    head: more header lines, as they are.
    """
    method = "GET" if body is None else "POST"
    if isinstance(body, dict):
        body = json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close"]
    if body is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    try:
        writer.write("\r\n".join(lines).encode() + b"\r\n" + head + b"\r\n" + (body or b""))
        if leave_after is not None:
            await writer.drain()
            seen = 0
            while seen < leave_after and (line := await reader.readline()):
                seen += line.startswith(b"data: ")
            return None
        return parse_answer(await reader.read())
    finally:
        writer.close()


def parse_answer(raw: bytes) -> Answer:
    """Of a connection that ends with it."""
    top, _, rest = raw.partition(b"\r\n\r\n")
    status, *lines = top.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    chunked = headers.get("transfer-encoding") == "chunked"
    return Answer(int(status.split()[1]), headers, joined(rest) if chunked else rest)


def joined(raw: bytes) -> bytes:
    """A body without the framing of chunked encoding."""
    body = b""
    while raw:
        size, _, raw = raw.partition(b"\r\n")
        body += raw[: int(size, 16)]
        raw = raw[int(size, 16) + 2 :]
    return body
