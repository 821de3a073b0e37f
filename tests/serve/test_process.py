"""The server as a process: signals under load, death and restart, an unwritable log."""

import asyncio
import contextlib
import os
import re
import signal
import time
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="needs the extra `serve`")

from helpers.serve.live_server import (
    HANG_SECONDS,
    KEYS,
    OPERATOR_KEY,
    Answer,
    ServerProcess,
    ask,
    children_of,
    eventually,
    key_options,
)
from helpers.serve.ports import free_port

OPTIONS = ["--max-running", "4", "--max-step-tokens", "32", "--max-waiting", "40"]
BODY = {"prompt": "import os", "max_tokens": 60, "ignore_eos": True}


def num_taken(server: ServerProcess) -> int:
    """Requests of one sequence that the engine has, or has had."""
    text = server.get("/metrics", OPERATOR_KEY)[1].decode()
    names = r'sequences_waiting|sequences_running|requests_total{outcome="completed"}'
    found = re.findall(rf"^jax_attn_(?:{names}) (.*)$", text, re.M)
    return sum(int(float(value)) for value in found)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
def test_a_signal_amid_load(tmp_path, number):
    """A client gets its whole answer or an error, and the process ends well."""
    server = ServerProcess(
        tmp_path, *key_options(tmp_path), *OPTIONS, "--drain-seconds", str(HANG_SECONDS)
    )

    async def load() -> list[Answer | BaseException]:
        async def one(i: int) -> Answer:
            key = KEYS[i % 2]
            body = BODY | {"stream": i % 3 == 0, "max_tokens": 30}
            return await ask(server.port, body, Authorization=f"Bearer {key}")

        asks = [asyncio.create_task(one(i)) for i in range(30)]
        while num_taken(server) < 30:
            await asyncio.sleep(0.01)
        os.kill(server.process.pid, number)
        late = [asyncio.create_task(one(i)) for i in range(10)]
        return await asyncio.gather(*asks, *late, return_exceptions=True)

    with contextlib.closing(server):
        server.wait_until_ready()
        answers = asyncio.run(load())
        assert server.process.wait(HANG_SECONDS) == 0, server.log()
        assert "Traceback" not in server.log()
    early, late = answers[:30], answers[30:]
    # Accepted requests are answered in full; no connection is cut without an answer.
    assert all(isinstance(answer, Answer) and answer.status == 200 for answer in early), early
    for answer in late:  # refused by the server, or by a port that is closed
        assert isinstance(answer, ConnectionError) or answer.status in (200, 503), answer


def test_killed_and_started_again(tmp_path):
    """A restart on the same port works at once, and child processes have ended with the server."""
    port = free_port()
    grammar = BODY | {"regex": "[a-d]{3}"}
    for _ in range(2):
        server = ServerProcess(tmp_path, *OPTIONS, port=port)
        with contextlib.closing(server):
            server.wait_until_ready()
            assert asyncio.run(ask(port, grammar)).status == 200
            children = children_of(server.process.pid)
            stuck = [asyncio.run(ask(port, BODY | {"stream": True}, leave_after=1))]
            server.process.kill()
            server.process.wait(HANG_SECONDS)
        assert stuck == [None]
        eventually(lambda: not any(Path(f"/proc/{child}").exists() for child in children))  # noqa: B023


def test_the_process_of_http_is_killed(tmp_path):
    """The server ends with an exit status and a log line, as when the system is out of memory."""
    server = ServerProcess(tmp_path, *OPTIONS)
    with contextlib.closing(server):
        server.wait_until_ready()
        os.kill(server.http_pid, signal.SIGTERM)  # ignored: a supervisor signals all
        assert asyncio.run(ask(server.port, BODY)).status == 200
        os.kill(server.http_pid, signal.SIGKILL)
        assert server.process.wait(HANG_SECONDS) == 1
        assert "the process that answers HTTP was ended by SIGKILL" in server.log()


def test_a_full_disk_for_the_log(tmp_path):
    """Log lines are lost, and nothing else."""
    port = free_port()
    server = ServerProcess(tmp_path, *OPTIONS, port=port, log=Path("/dev/full"))
    with contextlib.closing(server):
        server.wait_until_ready()
        assert asyncio.run(ask(port, BODY)).status == 200
        assert asyncio.run(ask(port, BODY | {"prompt": 5})).status == 400
        os.kill(server.process.pid, signal.SIGTERM)
        # 120: Python could not flush its streams.
        assert server.process.wait(HANG_SECONDS) in (0, 120)


def test_nobody_reads_the_log(tmp_path):
    """A pipe without a reader, as after a logger's restart."""
    port = free_port()
    read, write = os.pipe()
    server = ServerProcess(tmp_path, *OPTIONS, port=port, log=Path(f"/dev/fd/{write}"))
    os.close(read)
    os.close(write)
    with contextlib.closing(server):
        server.wait_until_ready()
        for _ in range(3):
            assert asyncio.run(ask(port, BODY)).status == 200
        time.sleep(0.1)
        assert server.process.poll() is None
