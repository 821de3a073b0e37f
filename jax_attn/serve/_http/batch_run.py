"""Runs a file of requests through the application, without a port. The files have OpenAI's format.

A line of input is {"custom_id", "method", "url", "body"}; an answer is {"id", "custom_id",
"response": {"status_code", "request_id", "body"}, "error"}.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from pydantic import RootModel
from starlette.types import ASGIApp

from jax_attn.serve._http import bodies
from jax_attn.serve._openai.errors import ApiError

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
_KEYS = {"custom_id", "method", "url", "body"}
_RETRY_SECONDS = 0.05  # after a 429: the queue is full


class BatchError(ValueError):
    """A file that cannot be used, in one sentence."""


class Line(NamedTuple):
    custom_id: str
    url: str
    begin: int  # of the line in the file, bytes


class _Json(RootModel[Any]):
    """Any value, for `bodies.parse`."""


def read_input(path: Path, name: str, most_bytes: int, most: int | None = None) -> dict[str, Line]:
    """The requests by custom_id.

    name: of the file in errors. most_bytes: of a line. most: lines that the file may have.

    Raises:
      BatchError: a line is not one or too long, or there are too many.
    """
    lines: dict[str, Line] = {}
    with path.open("rb") as file:
        begin = number = 0
        while raw := file.readline(most_bytes + 1):
            number += 1
            if len(raw) > most_bytes:
                raise BatchError(f"{name}:{number}: expected at most {most_bytes} bytes of a line")
            if most is not None and number > most:
                raise BatchError(f"{name}: expected at most {most} lines, got more")
            if raw.strip():
                line = _check(raw, f"{name}:{number}")
                custom_id = line["custom_id"]
                if custom_id in lines:
                    raise BatchError(
                        f"{name}:{number}: custom_id: expected another for each request, got"
                        f" {custom_id[:100]!r} twice"
                    )
                lines[custom_id] = Line(custom_id, line["url"], begin)
            begin += len(raw)
    return lines


def _check(raw: bytes, where: str) -> dict[str, Any]:
    try:
        line = _parse(raw)
    except ApiError as error:
        what = str(error).removeprefix("body: ")
        raise BatchError(f"{where}: expected a JSON object: {what}") from None
    if not isinstance(line, dict) or not _KEYS <= line.keys():
        raise BatchError(f"{where}: expected an object with {', '.join(sorted(_KEYS))}")
    if not isinstance(line["custom_id"], str) or not line["custom_id"]:
        raise BatchError(f"{where}: custom_id: expected a text, got {_shown(line['custom_id'])}")
    if line["method"] != "POST":
        raise BatchError(f"{where}: method: expected 'POST', got {_shown(line['method'])}")
    if line["url"] not in URLS:
        raise BatchError(
            f"{where}: url: expected one of {', '.join(URLS)}, got {_shown(line['url'])}"
        )
    if not isinstance(line["body"], dict):
        raise BatchError(f"{where}: body: expected an object, got {_shown(line['body'])}")
    if line["body"].get("stream"):
        raise BatchError(f"{where}: body: stream: expected false, as a batch has no streams")
    if line["body"].get("background"):
        raise BatchError(
            f"{where}: body: background: expected false, as a batch waits for its answers"
        )
    return line


def _parse(raw: bytes) -> Any:
    """Parses a line with the limits of a body. Raises ApiError."""
    return bodies.parse(raw.strip(), _Json).root


def _shown(value: Any) -> str:
    return repr(value)[:100]


def answered(output: BinaryIO, name: str, warn: Callable[[str], None]) -> list[str]:
    """The custom_ids of the answers. Cuts off a last line that was not written whole.

    Raises:
      BatchError: a line is no answer.
    """
    output.seek(0)
    end, found = 0, []
    for number, raw in enumerate(output, 1):
        if not raw.endswith(b"\n"):
            warn(f"{name}: the last line was cut; its request runs again")
            output.truncate(end)
            break
        try:
            found.append(json.loads(raw)["custom_id"])
        except (ValueError, KeyError, TypeError):
            raise BatchError(f"{name}:{number}: expected an answer with a custom_id") from None
        end += len(raw)
    return found


class BatchRun:
    """Some requests in flight at once. Each answer is written whole, when it is there.

    has_failed: the engine has; another run answers what is left.
    """

    def __init__(
        self,
        app: ASGIApp,
        source: Path,
        lines: list[Line],
        write: Callable[[int, bytes], None],
        window: int,
        state: Callable[[], dict[str, Any]] = dict,
        defaults: Mapping[str, Any] | None = None,
    ):
        """write: gets the status of an answer, and its line. window: requests in flight.

        state: makes that of a request. defaults: of fields of a body that is no embedding's.
        """
        self._app, self._source, self._lines, self._write = app, source, lines, write
        self._window, self._state, self._defaults = window, state, dict(defaults or {})
        self.has_failed = False

    async def run(self) -> None:
        while (status := await self._health()) != "ok":
            if status == "failed":
                self.has_failed = True
                return
            await asyncio.sleep(_RETRY_SECONDS)
        places = asyncio.Semaphore(self._window)
        async with asyncio.TaskGroup() as group:
            async for raw in self._requests():
                await places.acquire()
                if self.has_failed:
                    break
                task = group.create_task(self._answer(raw))
                task.add_done_callback(lambda _: places.release())

    async def _health(self) -> str:
        _, _, answer = await self._call("GET", "/health", b"")
        return str(json.loads(answer)["status"])

    async def _requests(self) -> AsyncIterator[bytes]:
        with self._source.open("rb") as file:
            for line in self._lines:
                file.seek(line.begin)
                yield file.readline()

    async def _answer(self, raw: bytes) -> None:
        custom_id, url, body = await asyncio.to_thread(self._request, raw)
        while True:
            status, headers, answer = await self._call("POST", url, body)
            if status != 429:
                break
            await asyncio.sleep(_RETRY_SECONDS)
        if status == 503:  # the engine has failed, or ends: another run answers the request
            self.has_failed = True
            return
        id = headers.get(b"x-request-id", b"").decode()
        made = await asyncio.to_thread(_answer_line, custom_id, status, id, answer)
        # One call, so that a kill leaves whole lines and at most a part of the last.
        self._write(status, made)

    def _request(self, raw: bytes) -> tuple[str, str, bytes]:
        """The custom_id, the URL and the body of a line."""
        line = _parse(raw)
        defaults = {} if line["url"] == "/v1/embeddings" else self._defaults
        return line["custom_id"], line["url"], json.dumps(defaults | line["body"]).encode()

    async def _call(
        self, method: str, path: str, body: bytes
    ) -> tuple[int, dict[bytes, bytes], bytes]:
        """Has the application answer a request. Returns status, headers and body."""
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "state": self._state(),
        }
        status, headers, parts = 500, dict[bytes, bytes](), list[bytes]()
        incoming = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if incoming:
                return incoming.pop()
            await asyncio.Event().wait()  # the client stays
            raise AssertionError

        async def send(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status, found = message["status"], message.get("headers", ())
                headers.update(found)
            elif message["type"] == "http.response.body":
                parts.append(message.get("body", b""))

        await self._app(scope, receive, send)
        return status, headers, b"".join(parts)


def _answer_line(custom_id: str, status: int, request_id: str, body: bytes) -> bytes:
    made = {
        "id": f"batch_req_{secrets.token_hex(12)}",
        "custom_id": custom_id,
        "response": {
            "status_code": status,
            "request_id": request_id,
            "body": json.loads(body),
        },
        "error": None,
    }
    return json.dumps(made, ensure_ascii=False).encode() + b"\n"
