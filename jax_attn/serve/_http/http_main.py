"""What the process that answers HTTP runs; `http_process` starts it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Iterator
from functools import partial

from jax_attn.serve._http import log_format
from jax_attn.serve._http.fair_loop import new_loop
from jax_attn.serve._http.http_server import HttpServer
from jax_attn.serve._http.server import create_app
from jax_attn.serve._http.settings import Setup
from jax_attn.serve._ipc.remote_engine import RemoteEngine
from jax_attn.serve._ipc.wire import Wire, receive


class _Server(HttpServer):
    """An HttpServer whose signals come over the wire."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def main(file_descriptor: int) -> int:
    log_format.configure("text")
    for number in (signal.SIGTERM, signal.SIGINT):
        # A supervisor may send signals to all processes of a service.
        signal.signal(number, signal.SIG_IGN)
    sock = socket.socket(fileno=file_descriptor)
    try:
        setup: Setup = receive(sock)
        log_format.configure(setup.log_format)
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
    sys.exit(main(int(sys.argv[1])))
