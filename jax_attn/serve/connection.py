"""A connection of the HTTP server: uvicorn's, with a limit on how long it may take to ask."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle


class Connection(H11Protocol):
    """Closed where no request has begun in time, headers complete: uvicorn by itself would keep a
    new connection that says nothing, and any that sends its headers a byte at a time, for ever.
    """

    head_seconds = 30.0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head(None)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_head(self.cycle)

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
