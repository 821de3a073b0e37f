"""Logs a line for each request, with the identifier that the client and the log share."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger("jax_attn.serve.access")

_ID = re.compile(r"[\x21-\x7e]{1,128}")
_MESSAGES = re.compile("/v1/messages(/|$)")
_PROBES = ("/health", "/metrics")  # asked every few seconds: they would hide the other lines
_MAX_ROUTE_CHARS = 100
_GONE = 499  # status in the log, as in other servers: the client left before there was an answer


@dataclass
class Record:
    """Data about a request. Times are time.monotonic(); None: that stage was not reached."""

    id: str
    is_clients: bool  # the client chose the id, so the answer repeats it
    arrival: float = field(default_factory=time.monotonic)
    tenant: str = ""
    status: int | None = None
    num_prompt: int = 0  # tokens
    num_output: int = 0
    admitted: float | None = None  # when its first choice began to run
    first_token: float | None = None
    on_end: Callable[[], None] | None = None  # called at the last `end`
    _num_open: int = 1

    def go_on(self) -> None:
        """The request goes on after its answer, until one more `end`."""
        self._num_open += 1

    def end(self) -> None:
        self._num_open -= 1
        if not self._num_open and self.on_end is not None:
            self.on_end()

    def see_first_token(self, now: float) -> None:
        if self.first_token is None:
            self.first_token = now

    def see_admitted(self, when: float) -> None:
        self.admitted = when if self.admitted is None else min(self.admitted, when)

    @property
    def shown_status(self) -> int:
        """The status, also of a request whose client has left without one."""
        return self.status or _GONE

    def fields(self, route: str) -> dict[str, str | int | float | None]:
        """What the log says of the request. Times are seconds since its arrival."""
        ends = {
            "queue_s": self.admitted,
            "first_token_s": self.first_token,
            "total_s": time.monotonic(),
        }
        return {
            "id": self.id,
            "tenant": self.tenant or None,
            "route": _printable(route),
            "status": self.shown_status,
            "prompt_tokens": self.num_prompt,
            "output_tokens": self.num_output,
        } | {
            name: None if end is None else round(end - self.arrival, 4)
            for name, end in ends.items()
        }


Trace: TypeAlias = Callable[[Record, str, str, str], None]
"""(record, method, path, traceparent or "")."""


class AccessLog:
    """ASGI middleware. The application writes its data into scope["state"]["record"]."""

    def __init__(self, app: ASGIApp, enabled: bool, trace: Trace | None = None):
        """trace: is told of each POST that has ended, also in the background."""
        self._app, self._enabled, self._trace = app, enabled, trace

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        wanted = Headers(scope=scope).get("x-request-id", "")
        is_clients = _ID.fullmatch(wanted) is not None
        record = Record(wanted if is_clients else f"req-{secrets.token_hex(12)}", is_clients)
        scope.setdefault("state", {})["record"] = record
        if self._trace is not None and scope["method"] == "POST":
            parent = Headers(scope=scope).get("traceparent", "")
            told = record, scope["method"], _printable(scope["path"]), parent
            record.on_end = partial(self._trace, *told)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                headers = MutableHeaders(scope=message)
                if record.is_clients or "x-request-id" not in headers:
                    headers["x-request-id"] = record.id
                else:
                    record.id = headers["x-request-id"]
                if _MESSAGES.match(scope["path"]):  # Anthropic's clients look for this one
                    headers["request-id"] = record.id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            record.status = record.status or 500
            raise
        finally:
            is_probe = scope["path"] in _PROBES and record.status in (200, 503)
            if self._enabled and not is_probe:
                shown = record.fields(f"{scope['method']}:{scope['path']}")
                log.info("%s", _line(shown), extra={"fields": shown})
            record.end()


def _line(fields: dict[str, str | int | float | None]) -> str:
    return " ".join(f"{name}={_text(value)}" for name, value in fields.items())


def _text(value: str | int | float | None) -> str:
    return "-" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)


def _printable(text: str) -> str:
    """Makes a client's text one printable word of a line."""
    text = text if len(text) <= _MAX_ROUTE_CHARS else text[:_MAX_ROUTE_CHARS] + "..."
    return re.sub(r"[^\x21-\x7e]", "?", text)
