"""The process that answers HTTP, with its own Python. The engine's process starts it.

Both ends are here: `HttpProcess`, and `main`, which the process runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from jax_attn import models
from jax_attn.serve._engine.async_engine import AsyncEngine
from jax_attn.serve._engine.processes import Processes
from jax_attn.serve._engine.replicas import Replicas
from jax_attn.serve._http import log_format
from jax_attn.serve._http.fair_loop import new_loop
from jax_attn.serve._http.http_server import HttpConfig, HttpServer
from jax_attn.serve._http.server import ServerConfig, create_app
from jax_attn.serve._ipc.remote_engine import EngineHost, RemoteEngine
from jax_attn.serve._ipc.wire import Wire, receive
from jax_attn.serve._scheduling.protocols import Limits

log = logging.getLogger("jax_attn.serve")

_UNFLUSHED = 120  # Python's exit status if a stream, such as one to a full disk, cannot be flushed


@dataclass(frozen=True)
class Setup:
    """The settings that the HTTP process needs."""

    limits: Limits
    stats: dict[str, Any]
    model: models.Model  # without weights
    config: ServerConfig
    http: HttpConfig


class HttpProcess:
    """The HTTP process. It starts at once, so that it imports modules while the model is loaded.

    A context manager. The process has ended at its exit.
    """

    def __init__(self, format: str) -> None:
        """format: of the log; see log_format.FORMATS."""
        ours, theirs = socket.socketpair()
        self._socket = ours
        with theirs:
            # A new session: signals of the terminal come here, and are passed on once.
            self._process = subprocess.Popen(
                [sys.executable, *_flags(), "-m", __name__, str(theirs.fileno()), format],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                # Only the engine uses the accelerator. With an arena for each thread, glibc keeps
                # twice as much of what long bodies took.
                env={"MALLOC_ARENA_MAX": "2"} | os.environ | {"JAX_PLATFORMS": "cpu"},
            )

    def __enter__(self) -> HttpProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def serve(
        self,
        engine: AsyncEngine | Replicas,
        model: models.Model,
        config: ServerConfig,
        http: HttpConfig,
        processes: Processes | None,
    ) -> int:
        """Runs the engine until the HTTP process ends. Returns the exit status of this process.

        engine: not started. model: without weights.
        """
        host = EngineHost(engine, Wire(self._socket))
        if processes is not None:
            processes.on_leave = host.leave
        asyncio.run(host.run(Setup(engine.limits, engine.stats(), model, config, http)))
        status = self._process.wait()
        if status < 0:
            name = signal.Signals(-status).name
            log.error("the process that answers HTTP was ended by %s", name)
        return 0 if status in (0, _UNFLUSHED) and engine.failure is None else 1


def _flags() -> list[str]:
    return ["-P"] if sys.flags.safe_path else []


class _Server(HttpServer):
    """An HttpServer whose signals come over the wire."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def main(file_descriptor: int, format: str) -> int:
    log_format.configure(format)
    for number in (signal.SIGTERM, signal.SIGINT):
        # A supervisor may send signals to all processes of a service.
        signal.signal(number, signal.SIG_IGN)
    sock = socket.socket(fileno=file_descriptor)
    try:
        setup: Setup = receive(sock)
        engine = RemoteEngine(Wire(sock), setup.limits, setup.stats)
        server = _Server(create_app(engine, setup.model, setup.config), setup.http)
    except EOFError:
        return 1  # the engine has reported the reason
    except (OSError, ValueError) as error:
        print(f"jax_attn.serve: {error}", file=sys.stderr)
        return 1
    engine.on_ready = server.collector.begin
    engine.on_failure = server.stop
    engine.on_signal = lambda: server.handle_exit(signal.SIGTERM, None)
    engine.on_leave = server.leave
    with asyncio.Runner(loop_factory=partial(new_loop, file_descriptor)) as runner:
        runner.run(server.serve())
    return 0 if server.started and engine.failure is None else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2]))
