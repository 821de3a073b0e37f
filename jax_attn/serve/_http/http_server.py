"""Runs the application in uvicorn: sockets, limits on connections, signals."""

from __future__ import annotations

import logging
import resource
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from jax_attn.serve._http.connection import Connection
from jax_attn.serve._http.settings import HttpConfig
from jax_attn.serve._http.spare_collector import SpareCollector

log = logging.getLogger("jax_attn.serve")

_MAX_HEADER_BYTES = 16384  # request line and headers; uvicorn answers 400 to more
_BACKLOG = 2048  # connections that the kernel keeps until they are accepted
_ACCEPTS = 64  # connections accepted at a time, 10 ms, in which no stream goes on
_CALM = 32  # connections up to which a collection of all objects takes little longer than alone
_OTHER_FILES = 128  # open files that are not connections
_MAX_FILES = 65536  # limit on open files; many shells allow 1,024, fewer than the queue has clients


class HttpServer(uvicorn.Server):
    """Drains at the first signal, gives up at the second, and returns after either."""

    def __init__(self, app: Starlette, config: HttpConfig):
        """app: made by `create_app`."""
        super().__init__(
            uvicorn.Config(
                app,
                host=config.host,
                port=config.port,
                backlog=_ACCEPTS,
                http=limited_connection(config.max_connections, allow_many_connections()),
                # An option of h11, the parser whose limit on headers can be set.
                h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
                ws="none",
                lifespan="on",
                access_log=False,
                log_config=None,  # its lines go where all others do
                server_header=False,
                headers=[("X-Content-Type-Options", "nosniff")],
                proxy_headers=False,
                timeout_graceful_shutdown=config.drain_seconds,
            )
        )
        self._on_drain: Callable[[], None] = app.state.server.drain
        self.collector = SpareCollector(lambda: len(self.server_state.connections) <= _CALM)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for server in self.servers:
            for listener in server.sockets:
                with listener.dup() as same:
                    same.listen(_BACKLOG)  # asyncio uses one number for both

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        self.collector.end()

    def stop(self) -> None:
        """Stops from any thread, after the running answers are complete."""
        self.should_exit = True

    def leave(self) -> None:
        """Does what the first signal does, unless it has already come. From any thread."""
        if not self.should_exit:
            self._on_drain()
            self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Without super(), which would raise the signal again after the drain.
        self._on_drain()
        self.force_exit = self.should_exit
        self.should_exit = True


def allow_many_connections() -> int:
    """Raises the limit on open files, as each connection is one. Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return _MAX_FILES if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def limited_connection(max_connections: int, max_files: int) -> type[Connection]:
    """A Connection class with limits. One address may have half of the connections."""
    most = max(2, min(max_connections, max_files - _OTHER_FILES))
    if most < max_connections:
        log.warning("connections: at most %d, as this process may open %d files", most, max_files)

    class Limited(Connection):
        max_connections = most
        max_of_address = -(-most // 2)

    return Limited
