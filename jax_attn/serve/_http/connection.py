"""A connection of the HTTP server: uvicorn's, with limits and reliable errors.

It limits the number of connections and how slow they may be. Errors reach clients that still
send.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import h11
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

from jax_attn.serve._http.fair_loop import MOST
from jax_attn.serve._http.framing import ChunkBudget, StrictParser
from jax_attn.serve._http.settings import MAX_CONNECTIONS
from jax_attn.serve._openai.errors import ApiError

log = logging.getLogger("jax_attn.serve")
# uvicorn's own line about such a connection says neither who it is nor what is wrong.
_UVICORN = logging.getLogger("uvicorn.error.connection")
_UVICORN.addFilter(lambda record: record.msg != "Invalid HTTP request received.")

# Bytes that are parsed at once, while no other connection is served. A body in chunks of a byte
# takes a millisecond for 2,000 bytes; one of known length takes almost no time.
_READ_BYTES, _READ_BODY_BYTES = 4096, 65536


_MAX_BUDGETS = 4096  # addresses whose budgets are kept
_MAX_HEAD_BYTES = 16384  # limit on request line and headers, if uvicorn is not given one


class _Faults:
    """Logs connections that send no HTTP: at most one line a second, with an address."""

    seconds = 1.0

    def __init__(self) -> None:
        self._last, self._num_untold = -math.inf, 0

    def see(self, address: str, fault: str, now: float) -> None:
        if now < self._last + self.seconds:
            self._num_untold += 1
            return
        others = f" ({self._num_untold} more since the last line)" if self._num_untold else ""
        log.warning("not HTTP from %s: %s%s", address or "-", fault, others)
        self._last, self._num_untold = now, 0


class _Turns:
    """Runs a few callbacks in each turn of the loop, in order."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop, self._waiting = loop, deque[Callable[[], None]]()

    def wait(self, callback: Callable[[], None]) -> None:
        self._waiting.append(callback)
        if len(self._waiting) == 1:
            self._loop.call_soon(self._run)

    def _run(self) -> None:
        for _ in range(min(MOST, len(self._waiting))):
            try:
                self._waiting[0]()
            except Exception:
                log.exception("a request that had waited for its turn failed")
            finally:
                self._waiting.popleft()
        if self._waiting:
            self._loop.call_soon(self._run)


class Connection(H11Protocol):
    """Closes a connection if no request has begun in time, with complete headers.

    uvicorn alone would keep for ever a new connection that sends nothing, and one that sends its
    headers a byte at a time. Also aborts if the client does not read what it asked for.
    """

    head_seconds = 30.0
    write_seconds = 30.0  # for the data to write, some 100 kB, to get below 16 kB
    max_connections = MAX_CONNECTIONS
    max_of_address = 4096  # connections of one address, likewise

    _of_address: ClassVar[WeakKeyDictionary[ServerState, Counter[str]]] = WeakKeyDictionary()
    _budgets: ClassVar[WeakKeyDictionary[ServerState, OrderedDict[str, ChunkBudget]]] = (
        WeakKeyDictionary()
    )
    _faults: ClassVar[WeakKeyDictionary[ServerState, _Faults]] = WeakKeyDictionary()
    _turns: ClassVar[WeakKeyDictionary[ServerState, _Turns]] = WeakKeyDictionary()
    _waits_its_turn = False
    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    def __init__(self, config: Config, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        self.conn: StrictParser = StrictParser(
            config.h11_max_incomplete_event_size or _MAX_HEAD_BYTES, self._may_take_chunk
        )
        self.logger = _UVICORN

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._set_read_size(_READ_BYTES)
        counts = self._of_address.setdefault(self.server_state, Counter())
        counts[self._address] += 1
        if len(self.connections) > self.max_connections:
            self._refuse(f"the server has {self.max_connections} connections, its limit")
        elif counts[self._address] > self.max_of_address:
            self._refuse(f"your address has {self.max_of_address} connections, the limit")
        else:
            self._await_head(None)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self.transport.is_closing():  # the data was not HTTP, possibly without headers
            return
        is_plain = self.conn.their_state is h11.SEND_BODY and any(
            name == b"content-length" for name, _ in self.headers
        )
        self._set_read_size(_READ_BODY_BYTES if is_plain else _READ_BYTES)

    def on_response_complete(self) -> None:
        last = self.cycle
        self._waits_its_turn = bool(self.conn.trailing_data[0])
        super().on_response_complete()
        if self.cycle is last:  # else a request was already there
            self._await_head(last)

    def handle_events(self) -> None:
        if self._waits_its_turn:  # a request that came before the last one was answered
            self._waits_its_turn = False
            turns = self._turns.setdefault(self.server_state, _Turns(self.loop))
            turns.wait(self._handle_later)
        else:
            super().handle_events()

    def _handle_later(self) -> None:
        if not self.transport.is_closing():
            super().handle_events()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.write_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        _stop(self._write_timer)

    def send_400_response(self, msg: str) -> None:
        """Handles a request, the rest of a body, or data after a request, that is not HTTP."""
        fault = self.conn.fault or msg
        faults = self._faults.setdefault(self.server_state, _Faults())
        faults.see(self._address, fault, self.loop.time())
        if self.cycle is not None and not self.cycle.response_complete:
            # An answer that did not wait for the body would follow this one.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._answer(ApiError(400, f"HTTP: {fault}", code="invalid_http"))
        else:  # an answer has begun or is complete
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        _stop(self._head_timer)
        _stop(self._write_timer)
        # Without these cycles a connection is freed at once, and no collection has to find it.
        self.conn.forget()
        if self.cycle is not None:
            self.cycle.on_response = _do_nothing
        self.transport._read_ready_cb = _do_nothing  # type: ignore[attr-defined]  # asyncio's
        counts = self._of_address[self.server_state]
        counts[self._address] -= 1
        if not counts[self._address]:
            del counts[self._address]

    @property
    def _address(self) -> str:
        return self.client[0] if self.client else ""

    def _may_take_chunk(self) -> bool:
        budgets = self._budgets.setdefault(self.server_state, OrderedDict())
        budget = budgets.setdefault(self._address, ChunkBudget())
        budgets.move_to_end(self._address)
        if len(budgets) > _MAX_BUDGETS:
            budgets.popitem(last=False)
        return budget.take(self.loop.time())

    def _set_read_size(self, num_bytes: int) -> None:
        self.transport.max_size = num_bytes  # type: ignore[attr-defined]  # asyncio's, if not uvloop's

    def _refuse(self, reason: str) -> None:
        message = f"{reason}; try again later"
        self._answer(ApiError(429, message, code="too_many_connections", retry_after=5))

    def _answer(self, error: ApiError) -> None:
        """Answers without a request, and closes the connection."""
        body = error.body().model_dump_json()
        lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"]
        lines += [f"{name}: {value}" for name, value in error.headers.items()]
        lines += ["Content-Type: application/json", f"Content-Length: {len(body.encode())}"]
        self.transport.write("\r\n".join([*lines, "Connection: close", "", body]).encode())
        self.transport.close()

    def _await_head(self, last: RequestResponseCycle | None) -> None:
        _stop(self._head_timer)
        self._head_timer = self.loop.call_later(self.head_seconds, self._give_up, last)

    def _give_up(self, last: RequestResponseCycle | None) -> None:
        if self.cycle is last:  # another request would have a new cycle
            self.transport.close()
            # close() waits until all is written.
            self._write_timer = self.loop.call_later(self.write_seconds, self.transport.abort)


class DiscardBody:
    """ASGI middleware that reads the rest of the body before it answers an error.

    Otherwise the connection would close while the client still sends. The client would then get a
    reset, often without the answer. The wait is bounded: a client that sends more than max_bytes,
    or slowly, still gets a reset.
    """

    max_bytes = 1 << 20
    seconds = 1.0

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        has_more = (
            headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        ) and "expect" not in headers  # reading would make such a client send the body

        async def receive_and_see() -> Message:
            nonlocal has_more
            message = await receive()
            has_more = has_more and message.get("more_body", False)
            return message

        async def read_the_rest() -> None:
            left = self.max_bytes
            while has_more and left > 0:
                left -= len((await receive_and_see()).get("body", b""))

        async def send_behind_the_body(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400 and has_more:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(read_the_rest(), self.seconds)
            await send(message)

        await self._app(scope, receive_and_see, send_behind_the_body)


def _do_nothing() -> None: ...


def _stop(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
