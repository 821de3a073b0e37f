"""The process that answers HTTP, with its own Python, as the engine's process sees it.

It runs `http_main`.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys

log = logging.getLogger("jax_attn.serve")

_MAIN = "jax_attn.serve._http.http_main"
_UNFLUSHED = 120  # Python's exit status if a stream, such as one to a full disk, cannot be flushed


class HttpProcess:
    """The HTTP process. It starts at once, so that it imports modules while this one does.

    A context manager. The process has ended at its exit. This module imports nothing that takes
    time.

    socket: of a Wire, through which the process waits for its Setup.
    """

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        with theirs:
            # A new session: signals of the terminal come here, and are passed on once.
            self._process = subprocess.Popen(
                [sys.executable, *_flags(), "-m", _MAIN, str(theirs.fileno())],
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
        self.end()

    def end(self) -> None:
        """Ends it, if it runs. May be called again."""
        self.socket.close()
        self._process.kill()
        self._process.wait()

    def wait(self) -> bool:
        """Waits until it has ended by itself. Returns whether as it should."""
        status = self._process.wait()
        if status < 0:
            name = signal.Signals(-status).name
            log.error("the process that answers HTTP was ended by %s", name)
        return status in (0, _UNFLUSHED)


def _flags() -> list[str]:
    return ["-P"] if sys.flags.safe_path else []
