"""A connection of the HTTP server: uvicorn's, with a limit on how long it may take to ask."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle


class Connection(H11Protocol):
    """Closed where no request has begun in time, headers complete: uvicorn by itself would keep a
    new connection that says nothing, and any that sends its headers a byte at a time, for ever.
    """

    head_seconds = 30.0
    _timer: asyncio.TimerHandle | None = None

    def __init__(self, config: Config, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        self.conn = _Strict(h11.SERVER, config.h11_max_incomplete_event_size)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head(None)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_head(self.cycle)

    def send_400_response(self, msg: str) -> None:
        """The rest of a body, or what follows a request, is no HTTP."""
        if self.cycle is not None and not self.cycle.response_complete:
            # An answer that did not wait for the body would come after this one.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:  # one has begun, or been
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timer()

    def _await_head(self, last: RequestResponseCycle | None) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(self.head_seconds, self._give_up, last)

    def _give_up(self, last: RequestResponseCycle | None) -> None:
        if self.cycle is last:  # a request would have begun another
            self.transport.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class _Strict(h11.Connection):
    """h11 takes a body with both a length and chunks for one in chunks. A proxy in front of this
    server may go by the length, and so take for a body what is a request here (smuggling)."""

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = {name for name, _ in event.headers}
            if names >= {b"content-length", b"transfer-encoding"}:
                raise h11.RemoteProtocolError("both Content-Length and Transfer-Encoding")
        return event
