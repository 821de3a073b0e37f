"""The process that answers HTTP, with its own Python, as the engine's process sees it.

It runs `http_main`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys

from jax_attn import models
from jax_attn.serve._engine.async_engine import AsyncEngine
from jax_attn.serve._engine.processes import Processes
from jax_attn.serve._engine.replicas import Replicas
from jax_attn.serve._http.settings import HttpConfig, ServerConfig, Setup
from jax_attn.serve._ipc.engine_host import EngineHost
from jax_attn.serve._ipc.wire import Wire

log = logging.getLogger("jax_attn.serve")

_MAIN = "jax_attn.serve._http.http_main"
_UNFLUSHED = 120  # Python's exit status if a stream, such as one to a full disk, cannot be flushed


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
                [sys.executable, *_flags(), "-m", _MAIN, str(theirs.fileno()), format],
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
