"""docs/replicas.md's configuration of nginx: equal sessions on equal replicas, and draining."""

import contextlib
import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest

from helpers.paths import ROOT

pytest.importorskip("starlette", reason="needs the extra `serve`")

from helpers.serve.fake_engine import FakeEngine, fake_model
from helpers.serve.live_server import HANG_SECONDS, eventually, serving
from helpers.serve.ports import free_port

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
PAGE = ROOT / "docs" / "replicas.md"
SESSIONS = [f"session {i}" for i in range(60)]

pytestmark = pytest.mark.skipif(NGINX is None, reason="no nginx (apt-get install nginx-light)")


class Proxy:
    """nginx with the page's configuration in front of replicas on these ports."""

    def __init__(self, directory: Path, ports: list[int]):
        self.directory, self.port = directory, free_port()
        self.write(ports)
        self.process = subprocess.Popen([NGINX, *self.options])
        eventually(self.is_there)

    @property
    def options(self) -> list[str]:
        return ["-p", str(self.directory), "-c", str(self.directory / "nginx.conf")]

    def write(self, ports: list[int], down: int | None = None) -> None:
        (block,) = re.findall(r"^```nginx\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
        listed = re.findall(r"server (127\.0\.0\.1:\d+) max_fails", block)
        assert len(listed) == len(ports)
        for address, port in zip(listed, ports, strict=True):
            is_down = " down" * (port == down)
            block = block.replace(f"{address} max_fails", f"127.0.0.1:{port}{is_down} max_fails")
        block = block.replace("listen 127.0.0.1:8000;", f"listen 127.0.0.1:{self.port};")
        kinds = "client_body", "proxy", "fastcgi", "uwsgi", "scgi"
        temporary = [f"{kind}_temp_path {self.directory};" for kind in kinds]
        user = "user root;" * (os.getuid() == 0)  # may read pytest's directory
        (self.directory / "nginx.conf").write_text(
            f"daemon off; {user} pid nginx.pid; error_log error.log; worker_processes 1;\n"
            f"events {{}}\nhttp {{\naccess_log off; {' '.join(temporary)}\n{block}}}\n"
        )

    def reload(self) -> None:
        subprocess.run([NGINX, *self.options, "-s", "reload"], check=True, timeout=HANG_SECONDS)

    def is_there(self) -> bool:
        assert self.process.poll() is None, (self.directory / "error.log").read_text()
        with contextlib.suppress(OSError):
            return self.ask("GET", "/health")[0] == 200
        return False

    def ask(self, method: str, path: str, body=None, **headers: str) -> tuple[int, bytes]:
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=HANG_SECONDS)
        with contextlib.closing(connection):
            raw = None if body is None else json.dumps(body)
            connection.request(method, path, raw, {"Content-Type": "application/json"} | headers)
            response = connection.getresponse()
            return response.status, response.read()

    def complete(self, session: str, **more) -> tuple[int, bytes]:
        body = {"prompt": session, "max_tokens": 2} | more
        return self.ask("POST", "/v1/completions", body, X_Session=session)

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(HANG_SECONDS)


@pytest.fixture
def replicas():
    with contextlib.ExitStack() as stack:
        engines = [FakeEngine(fake_model().tokenizer) for _ in range(3)]
        yield [stack.enter_context(serving(engine)) for engine in engines]


@pytest.fixture
def proxy(tmp_path, replicas):
    with contextlib.closing(Proxy(tmp_path, [replica.port for replica in replicas])) as proxy:
        yield proxy


def places(proxy: Proxy, replicas) -> dict[str, int]:
    """The replica that answers each session."""
    found = {}
    for session in SESSIONS:
        before = [len(replica.engine.submitted) for replica in replicas]
        assert proxy.complete(session)[0] == 200
        after = [len(replica.engine.submitted) for replica in replicas]
        (found[session],) = [i for i in range(3) if after[i] > before[i]]
    return found


def leave(replica) -> None:
    """Does what SIGTERM does."""
    replica.app.state.server.drain()
    replica.uvicorn.should_exit = True


def test_a_session_stays_where_it_is(proxy, replicas):
    first = places(proxy, replicas)
    assert places(proxy, replicas) == first
    counts = [list(first.values()).count(i) for i in range(3)]
    assert min(counts) >= 8, counts
    # Tenants' sessions differ, and requests without a session header are one client's.
    num_submitted = [len(replica.engine.submitted) for replica in replicas]
    for _ in range(4):
        assert proxy.ask("POST", "/v1/completions", {"prompt": "x", "max_tokens": 1})[0] == 200
    more = [len(replica.engine.submitted) for replica in replicas]
    assert sorted(b - a for a, b in zip(num_submitted, more, strict=True)) == [0, 0, 4]


def test_draining(proxy, replicas):
    first = places(proxy, replicas)
    (leaving,) = {first[SESSIONS[0]]}
    replicas[leaving].engine.delay = 0.1
    answer: list = []
    stream = threading.Thread(
        target=lambda: answer.append(proxy.complete(SESSIONS[0], max_tokens=12, stream=True))
    )
    stream.start()
    eventually(lambda: replicas[leaving].engine.live)
    leave(replicas[leaving])
    time.sleep(0.3)
    then = places(proxy, replicas)
    stream.join(HANG_SECONDS)
    # The running answer is complete.
    assert answer[0][0] == 200 and answer[0][1].endswith(b"data: [DONE]\n\n"), answer
    for session, place in first.items():
        assert then[session] != leaving
        assert place in (leaving, then[session]), "another replica's session moved"
    assert len({then[session] for session in SESSIONS if first[session] == leaving}) == 2
    assert places(proxy, replicas) == then


def test_one_that_refuses(proxy, replicas):
    """Like a replica that compiles: 503, also to requests of open connections."""
    first = places(proxy, replicas)
    replicas[0].engine.ready = False
    then = places(proxy, replicas)
    assert all(then[x] == first[x] if first[x] else then[x] for x in SESSIONS)
    replicas[0].engine.ready = True
    eventually(lambda: places(proxy, replicas) == first)


def test_one_that_dies(tmp_path, replicas):
    """It accepts a connection and closes it without an answer."""
    with socket.create_server(("127.0.0.1", 0)) as dying:

        def die() -> None:
            with contextlib.suppress(OSError):  # closed below
                while True:
                    dying.accept()[0].close()

        threading.Thread(target=die, daemon=True).start()
        ports = [replicas[0].port, dying.getsockname()[1], replicas[2].port]
        with contextlib.closing(Proxy(tmp_path, ports)) as proxy:
            assert set(places(proxy, replicas).values()) == {0, 2}


def test_a_full_queue_is_told(proxy, replicas):
    for replica in replicas:
        replica.engine.limits.max_waiting = 0
    statuses = {proxy.complete(session)[0] for session in SESSIONS[:6]}
    assert statuses == {429}


def test_fewer_replicas(proxy, replicas):
    first = places(proxy, replicas)
    proxy.write([replica.port for replica in replicas], down=replicas[1].port)
    proxy.reload()
    eventually(lambda: 1 not in places(proxy, replicas).values())
    then = places(proxy, replicas)
    assert all(then[x] == first[x] for x in SESSIONS if first[x] != 1)


def test_streams_are_not_buffered(proxy, replicas):
    for replica in replicas:
        replica.engine.holds_at = 1
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=HANG_SECONDS)
    with contextlib.closing(connection):
        body = json.dumps({"prompt": "x", "max_tokens": 10, "stream": True})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.readline().startswith(b"data: {")  # of ten, while nine are to come
        for replica in replicas:
            replica.engine.holds_at = None
        assert response.read().endswith(b"data: [DONE]\n\n")
