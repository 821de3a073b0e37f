"""Bytes on the socket: HTTP that is broken, cut, doubled or slow, or no HTTP at all.

Many conversations run at once against uvicorn with a fake engine. No answer is a 5xx, every answer
is HTTP, nothing is logged with a traceback, and proper requests are answered meanwhile. Bytes
hidden in another request's body are never taken for a request. At the end no connection is left.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import logging
import random
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any

from helpers.serve.live_server import eventually, serving

from . import bodies

HIDDEN = b"/hidden-in-a-body"  # if the application sees a request for it, it was smuggled
CANARY_SECONDS = 0.02  # between two proper requests
MAX_WAIT = 240.0  # seconds; longer is a hang on any machine
READ_SECONDS = 0.1


@dataclasses.dataclass(frozen=True)
class Conversation:
    """Steps ("send", bytes), or pause, read, eof, reset without bytes; then the client leaves."""

    steps: tuple[tuple[str, bytes], ...]


class Sockets:
    name = "sockets"

    def __init__(self, server: Any = None):
        """server: a live_server.LiveServer. None: starts one, which `close` stops."""
        self._stack = contextlib.ExitStack()
        self.server = server or self._stack.enter_context(serving())
        self.statuses: collections.Counter[int] = collections.Counter()
        self._log = _Tracebacks()
        for name in ("", "uvicorn", "uvicorn.error", "asyncio"):
            logging.getLogger(name).addHandler(self._log)
        self._paths: list[str] = []
        self._watch_paths()

    def _watch_paths(self) -> None:
        """Records the paths that the application is asked for."""
        inner = self.server.app.build_middleware_stack()

        async def watched(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http":
                self._paths.append(scope["path"])
            await inner(scope, receive, send)

        self.server.app.middleware_stack = watched

    def case(self, rng: random.Random) -> Conversation:
        return conversation(rng)

    def run(self, cases: list[Conversation]) -> None:
        self._log.records.clear()
        self._paths.clear()
        asyncio.run(self._run(cases))
        eventually(lambda: not self.server.is_busy)  # errors may follow an answer
        assert HIDDEN.decode() not in self._paths, "a request was smuggled in another"
        assert not self._log.records, self._log.records[0]

    async def _run(self, cases: list[Conversation]) -> None:
        canary = asyncio.create_task(self._ask_properly())
        try:
            answers = await asyncio.gather(*(self._converse(case) for case in cases))
        finally:
            canary.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await canary
        await self._converse(_PROPER)  # the server has handled all earlier conversations
        for case, raw in zip(cases, answers, strict=True):
            self._check(case, raw)

    async def _ask_properly(self) -> None:
        while True:
            async with asyncio.timeout(MAX_WAIT):
                raw = await self._converse(_PROPER)
            assert b'{"status":"ok"}' in raw, f"a proper request was answered {raw!r}"
            await asyncio.sleep(CANARY_SECONDS)

    async def _converse(self, case: Conversation) -> bytes:
        raw = b""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        try:
            for action, data in case.steps:
                if action == "send":
                    writer.write(data)
                    await writer.drain()
                elif action == "pause":
                    await asyncio.sleep(0.002)
                elif action == "eof":
                    writer.write_eof()
                elif action == "read":
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(READ_SECONDS):
                            raw += await reader.read(65536)
                elif action == "reset":
                    linger = struct.pack("ii", 1, 0)
                    connection = writer.get_extra_info("socket")
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                    writer.transport.abort()
                    return raw
            if not any(action == "eof" for action, _ in case.steps):
                writer.write_eof()
            async with asyncio.timeout(MAX_WAIT):
                raw += await reader.read()
        except (ConnectionError, OSError) as error:
            assert not isinstance(error, TimeoutError), f"{case}: not closed"
        finally:
            writer.transport.abort()
        return raw

    def _check(self, case: Conversation, raw: bytes) -> None:
        assert not raw or raw.startswith((b"HTTP/1.1 ", b"HTTP/1.0 ")), f"{case}: {raw[:200]!r}"
        for line in raw.split(b"\r\n"):
            if line.startswith(b"HTTP/1.") and line[9:12].isdigit():
                status = int(line[9:12])
                assert status < 500, f"{case}: {raw[:500]!r}"
                self.statuses[status] += 1

    def check_at_end(self) -> None:
        self.run([_PROPER])
        assert not self.server.engine.live, "sequences that nobody waits for"
        assert self.server.get("/health").status == 200

    def smaller(self, case: Conversation) -> Iterator[Conversation]:
        steps = case.steps
        hides = HIDDEN in b"".join(data for _, data in steps)
        for i, (action, data) in enumerate(steps):
            yield Conversation(steps[:i] + steps[i + 1 :])
            # A hidden request would be a request of its own without the bytes before it.
            if action == "send" and not hides:
                for part in bodies.smaller_bytes(data):
                    yield Conversation((*steps[:i], ("send", part), *steps[i + 1 :]))

    def to_json(self, case: Conversation) -> Any:
        return [[action, data.decode("latin-1")] for action, data in case.steps]

    def from_json(self, data: Any) -> Conversation:
        return Conversation(tuple((action, raw.encode("latin-1")) for action, raw in data))

    def close(self) -> None:
        for name in ("", "uvicorn", "uvicorn.error", "asyncio"):
            logging.getLogger(name).removeHandler(self._log)
        self._stack.close()


class _Tracebacks(logging.Handler):
    """Collects log records of errors or with an exception."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info or record.levelno >= logging.ERROR:
            self.records.append(self.format(record))


_PROPER = Conversation(
    (("send", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"), ("read", b""))
)

# ---- what is sent ------------------------------------------------------------------------------

_BODY = b'{"prompt":"a","max_tokens":1}'
_JSON = b"Content-Type: application/json\r\n"
_SMUGGLED = b"GET " + HIDDEN + b" HTTP/1.1\r\nHost: localhost\r\n\r\n"


def conversation(rng: random.Random) -> Conversation:
    raw = rng.choices(
        [proper, broken_head, framing, chunked, no_http, mutated, pipeline],
        weights=[1, 3, 3, 3, 1, 4, 1],
    )[0](rng)
    steps: list[tuple[str, bytes]] = []
    style = rng.random()
    if style < 0.5:
        steps.append(("send", raw))
    else:
        cuts = sorted(rng.randrange(len(raw) + 1) for _ in range(rng.randrange(1, 5)))
        for begin, end in zip([0, *cuts], [*cuts, len(raw)], strict=True):
            steps.append(("send", raw[begin:end]))
            steps += [("pause", b"")] * (rng.random() < 0.3)
    if style > 0.8:  # leaves in the middle
        steps = steps[: rng.randrange(1, len(steps) + 1)]
    end = rng.random()
    steps += [("read", b"")] * (end < 0.5)
    steps += [("reset", b"")] * (end > 0.8)
    return Conversation(tuple(steps))


def post(head: bytes, body: bytes, version: bytes = b"HTTP/1.1") -> bytes:
    """A POST request. head: additional header lines, each with its line end."""
    return b"POST /v1/completions %b\r\nHost: localhost\r\n%b%b\r\n%b" % (
        version,
        _JSON,
        head,
        body,
    )


def proper(rng: random.Random) -> bytes:
    return rng.choice(
        [
            post(b"Content-Length: %d\r\n" % len(_BODY), _BODY),
            post(b"Transfer-Encoding: chunked\r\n", b"%x\r\n%b\r\n0\r\n\r\n" % (len(_BODY), _BODY)),
            b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
            b"GET /v1/models HTTP/1.0\r\n\r\n",
            b"HEAD /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
        ]
    )


_TARGETS = [
    b"/health", b"*", b"", b"http://elsewhere/health", b"//health", b"/" + b"a" * 9000, b"/\0",
    b"/\xff",
    b"/%", b"/%zz", b"/%00", b"/%c0%ae%c0%ae/", b"/../../etc/passwd", b"/?%s%n", b"health", b"/ /",
    b"/#", b"/\t", b"elsewhere:443", b"/v1/models/\xc3\xa9", b"/v1/models/%ff%fe",
]  # fmt: skip
_METHODS = [
    b"GET",
    b"POST",
    b"get",
    b"CONNECT",
    b"OPTIONS",
    b"PRI",
    b"",
    b"G\0T",
    b"A" * 3000,
    b"TRACE",
]
_VERSIONS = [
    b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/0.9", b"HTTP/1.9", b"HTTP/11", b"http/1.1", b"",
    b"HTTP/1.1 ", b"HTTP/\xff.1", b"ICY/1.0",
]  # fmt: skip
_LINES = [
    b"Host: a\r\nHost: b", b"Host:", b"Host: \xff\0", b": empty", b"No-Colon", b" folded: 1",
    b"\tx",
    b"X: a\r\n b", b"X: a\rY: b", b"X: a\nY: b", b"X: \0", b"X: " + b"a" * 20_000, b"X\0: 1",
    b"\xff: 1",
    b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: eA==",
    b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABk",
    b"Expect: 100-continue", b"Expect: 200-ok", b"Connection: close, keep-alive",
    b"Connection: \xff",
    b"Authorization: Basic \xe9", b"Authorization: Bearer \xff",
    b"Authorization: Basic " + b"A" * 9001,
    b"Cookie: " + b"a=b; " * 999, b"Content-Type: application/json; charset=\xff",
    b"Content-Encoding: gzip", b"Origin: null", b"Origin: \xff", b"Range: bytes=-1",
    b"TE: trailers",
    b"X-Request-Id: \xff\xfe", b"X-Request-Id: a\x1b[2J", b"X-Forwarded-For: \0", b"Trailer: Host",
    *(b"X-%d: 1" % i for i in range(3)), b"\r\n".join(b"Y-%d: 1" % i for i in range(2000)),
]  # fmt: skip


def broken_head(rng: random.Random) -> bytes:
    target = rng.choice(_TARGETS) if rng.random() < 0.4 else b"/health"
    method = rng.choice(_METHODS) if rng.random() < 0.3 else b"GET"
    version = rng.choice(_VERSIONS) if rng.random() < 0.3 else b"HTTP/1.1"
    lines = [b"Host: localhost", *rng.sample(_LINES, rng.randrange(4))]
    newline = rng.choice([b"\r\n"] * 6 + [b"\n", b"\r", b"\r\r\n"])
    space = rng.choice([b" "] * 6 + [b"  ", b"\t", b"\x0b", b""])
    head = space.join([method, target, version])
    return newline.join([head, *lines, b"", b""]) + rng.choice([b"", b"", _BODY, b"\0" * 9])


_LENGTHS = [
    b"0", b"5", b"-5", b"+5", b"5 ", b"0x5", b"5.0", b"5e0", b"5, 5", b"5, 6", b"", b"\xd9\xa5",
    b"5\x0b",
    b"9" * 400, b"18446744073709551621", b"4294967301", b"05", b"5;", b"\x005", b"4194305",
]  # fmt: skip
_CODINGS = [
    b"chunked", b"Chunked", b"identity", b"chunked, chunked", b"gzip, chunked", b"chunked, gzip",
    b"xchunked", b"chunked\0", b"\x0bchunked", b"\r\n chunked", b"", b"chunked;q=1", b'"chunked"',
    b"chunked\r\nTransfer-Encoding: identity", b"identity\r\nTransfer-Encoding: chunked",
]  # fmt: skip


def framing(rng: random.Random) -> bytes:
    """Two contradicting or invalid body lengths.

    Bytes that one length puts into the body, and the other into a next request, must never be
    answered.
    """
    lengths = [rng.choice(_LENGTHS) for _ in range(rng.choice((0, 1, 2)))]
    codings = [rng.choice(_CODINGS) for _ in range(rng.choice((0, 1, 1)))]
    colon = rng.choice([b": "] * 6 + [b" : ", b":", b"\t: "])
    lines = [b"Content-Length" + colon + length for length in lengths]
    lines += [b"Transfer-Encoding" + colon + coding for coding in codings]
    rng.shuffle(lines)
    version = rng.choice([b"HTTP/1.1"] * 4 + [b"HTTP/1.0"])
    head = b"".join(line + b"\r\n" for line in lines)
    if codings and lengths or len(set(lengths) - {b"5, 5", b"5 "}) > 1:
        return post(head, b"0\r\n\r\n" + _SMUGGLED, version)
    return post(head, b"5\r\nhello\r\n", version)


_SIZES = [
    b"5", b"05", b"0x5", b"-5", b"+5", b" 5", b"5 ", b"ffffffffffffffffffff", b"G", b"", b"5;a=b",
    b"5;" + b"a" * 20_000, b"5\n", b"5;\n", b"00000000000000000000000005", b"5\0", b"\xff", b"5\r",
]  # fmt: skip


def chunked(rng: random.Random) -> bytes:
    """Chunks whose sizes are wrong or no numbers, followed by more bytes or none."""
    raw = b""
    for _ in range(rng.randrange(1, 4)):
        size = rng.choice(_SIZES) if rng.random() < 0.5 else b"5"
        raw += size + b"\r\n" + rng.choice([b"hello", b"hell", b"hello, world"])
        raw += rng.choice([b"\r\n"] * 4 + [b"\n", b"", b"XX"])
    raw += rng.choice(
        [b"0\r\n\r\n", b"0\r\nTrailer: \xff\r\n\r\n", b"0\r\n" + b"T: a\r\n" * 3000, b""]
    )
    return post(b"Transfer-Encoding: chunked\r\n", raw)


def no_http(rng: random.Random) -> bytes:
    return rng.choice(
        [
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(500),
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0",
            b"SSH-2.0-OpenSSH_9.6\r\n",
            b"\0" * rng.randrange(1, 40_000),
            b"\r\n" * rng.randrange(1, 9000),
            rng.randbytes(rng.randrange(1, 3000)),
            b"a" * 40_000,
            b"\xef\xbb\xbfGET / HTTP/1.1\r\n\r\n",
            b"*1\r\n$4\r\nPING\r\n",
        ]
    )


def mutated(rng: random.Random) -> bytes:
    """A valid request with a few bytes changed."""
    raw = bytearray(proper(rng))
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(raw))
        change = rng.random()
        if change < 0.4:
            raw[at] = rng.randrange(256)
        elif change < 0.6:
            del raw[at : at + rng.choice((1, 1, 9))]
        elif change < 0.8:
            raw[at:at] = rng.choice([b"\r\n", b"\n", b"\0", b" ", b"\xff", b":", b"0", b"\r\n\r\n"])
        else:
            begin = rng.randrange(len(raw))
            raw[at:at] = raw[begin : begin + 20]
        if not raw:
            return b"\r\n"
    return bytes(raw)


def pipeline(rng: random.Random) -> bytes:
    """Several requests at once, valid and invalid."""
    makers: list[Callable[[random.Random], bytes]] = [proper, proper, proper, mutated, broken_head]
    return b"".join(rng.choice(makers)(rng) for _ in range(rng.choice((2, 3, 30))))
