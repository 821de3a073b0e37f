"""Servers under test, and clients that can send raw and malformed requests.

`serving`: uvicorn in a thread with a fake engine. `ServerProcess`: the command with a model, in its
own process.
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
from jax_attn.models import EmbeddingModel
from jax_attn.serve._engine.embedder import Embedder
from jax_attn.serve._http.connection import Connection
from jax_attn.serve._http.fair_loop import new_loop
from jax_attn.serve._http.server import create_app
from jax_attn.serve._http.settings import ServerConfig

KEYS = ("a-key-of-one-tenant", "another-tenants-key")
OPERATOR_KEY = "the-key-of-an-operator"
HANG_SECONDS = 240  # for milliseconds of work: no verdict may depend on a machine's speed
START_SECONDS = 240
# A wheel has no model in it. A checkout without the extension must not shadow an installed package.
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
        """True while a connection is open or a request is being handled."""
        state = self.uvicorn.server_state
        return bool(state.connections or state.tasks)

    @property
    def num_connections(self) -> int:
        return len(self.uvicorn.server_state.connections)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, key: str = "none"):
        return _openai_client(self.url, key)

    def request(self, method: str, path: str, body=None, **headers: str) -> Answer:
        """Sends a request. body: bytes are sent as they are, other values as JSON."""
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
        """The text after `data: ` in each event of a stream."""
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
        """Pauses the server's event loop, so that it sees a connection and its data at once."""
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
    engine: FakeEngine | None = None,
    directory: Path = MODEL,
    embedding=None,
    loop=None,
    model=None,
    **config,
) -> Iterator[LiveServer]:
    """loop: the event loop to use; None: one as the command's. model: None: `fake_model`."""
    model = model or fake_model()
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

    # The command uses asyncio; server.run() would use uvloop if it is installed.
    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop or new_loop()) as runner:
            runner.run(server.serve())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        eventually(lambda: server.started)
        yield LiveServer(server.servers[0].sockets[0].getsockname()[1], engine, app, server)
    finally:
        server.should_exit = True
        thread.join(HANG_SECONDS)


@contextlib.contextmanager
def serving_encoder(model: EmbeddingModel, name: str = "vectors", **config) -> Iterator[LiveServer]:
    """Serves an embedding model or one that scores, once it is ready. `embedder` runs it."""
    embedder = Embedder(model, name)
    with serving(embedding=(model, embedder), **config) as server:
        eventually(lambda: server.get("/health").ok)
        server.embedder = embedder
        yield server


def _openai_client(url: str, key: str):
    import openai  # from the extra `test`

    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=HANG_SECONDS)


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANG_SECONDS
    while not holds():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.005)


def key_options(directory: Path) -> list[str]:
    """Options of a ServerProcess in this directory: keys of two tenants and an operator."""
    (directory / "keys").write_text("\n".join(KEYS))
    (directory / "operators").write_text(OPERATOR_KEY)
    return ["--api-key-file", "keys", "--operator-key-file", "operators"]


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class ServerProcess:
    """`python -m jax_attn.serve`, which is ready after `wait_until_ready`."""

    def __init__(self, directory: Path, *options: str, port: int = 0, log: Path | None = None):
        """Starts the process.

        directory: its working directory, and where its log goes. log: another file for the log,
        which is not read. port: 0 takes a free one.
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
        except OSError:  # not listening yet
            return False

    @contextlib.contextmanager
    def engine_stopped(self) -> Iterator[None]:
        """Stops the engine's process inside the block; the HTTP process goes on."""
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
        return _openai_client(self.url, key)

    def metric(self, name: str) -> float:
        text = self.get("/metrics", OPERATOR_KEY)[1].decode()
        return float(re.search(rf"^{re.escape(name)} (.*)$", text, re.MULTILINE)[1])

    def is_at_rest(self) -> bool:
        """True if there is no request and every page is free or cached."""
        names = ("sequences_waiting", "sequences_running", 'pages{state="used"}')
        return not any(self.metric(f"jax_attn_{name}") for name in names)

    def resident_bytes(self) -> int:
        return self._status("VmRSS")

    def peak_bytes(self) -> int:
        """Peak resident bytes since `forget_peak`."""
        return self._status("VmHWM")

    def forget_peak(self) -> None:
        for pid in self._pids():
            Path(f"/proc/{pid}/clear_refs").write_text("5")

    @property
    def http_pid(self) -> int:
        """Process id of the HTTP process; 0 if the engine's process answers HTTP itself."""
        for child in children_of(self.process.pid):
            if b"jax_attn.serve._http.http_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                return child
        return 0

    def _pids(self) -> list[int]:
        return [self.process.pid] + ([self.http_pid] if self.http_pid else [])

    def _status(self, name: str) -> int:
        """A field of /proc/PID/status for both processes together."""
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
    """Sends one request over a new connection. Without a body it is a GET.

    leave_after: the client leaves after this many events of the stream; the answer is None then.
    head: more header lines, sent as they are.
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
    """Parses an answer that ends when its connection ends."""
    top, _, rest = raw.partition(b"\r\n\r\n")
    status, *lines = top.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    chunked = headers.get("transfer-encoding") == "chunked"
    return Answer(int(status.split()[1]), headers, joined(rest) if chunked else rest)


def joined(raw: bytes) -> bytes:
    """The body without chunked framing."""
    body = b""
    while raw:
        size, _, raw = raw.partition(b"\r\n")
        body += raw[: int(size, 16)]
        raw = raw[int(size, 16) + 2 :]
    return body
