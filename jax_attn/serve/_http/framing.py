"""The framing of HTTP/1.1 messages: h11's parser, stricter than it and with bounded work.

A proxy in front of this server may read a faulty message in another way, and so take for a body
what is a request here (request smuggling). RFC 9112 calls such messages faulty (sections 2.2, 5.2,
6.1, 6.3); h11 accepts some of them. They are refused here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import h11

MAX_HEADERS = 128  # lines; h11 takes some 4 us for each
# A body may have FREE_CHUNKS chunks, and one more for every MEAN_CHUNK_BYTES of data: a chunk takes
# some 3 us, however short it is. Further ones come from a budget of the client's address.
FREE_CHUNKS, MEAN_CHUNK_BYTES = 128, 64
BUDGET_CHUNKS, BUDGET_CHUNKS_A_SECOND = 4096, 1024

_LENGTH = re.compile(rb"^content-length[ \t]*:(.*)$", re.IGNORECASE | re.MULTILINE)
_END_OF_HEAD = re.compile(rb"\n\r?\n")
# The line before a chunk's data, behind what is left of the last chunk's end. h11 reads past a CR.
_LONE_CR = re.compile(rb"[\r\n]*[^\r\n]*\r[^\n]")
_NO_CRLF = "a line end that is not CR LF"


def _fault_of_lines(raw: bytes) -> str:
    """What is wrong with the lines of headers or trailers; "": nothing."""
    rest = raw.replace(b"\r\n", b"")
    if b"\r" in rest or b"\n" in rest:
        return _NO_CRLF
    is_folded = b"\n " in raw or b"\n\t" in raw
    return "a header that is folded over several lines" if is_folded else ""


class ChunkBudget:
    """The small chunks that one address may still send. It fills up as time goes by."""

    def __init__(self) -> None:
        self._left, self._last = float(BUDGET_CHUNKS), 0.0

    def take(self, now: float) -> bool:
        """Takes a chunk at time `now`, in seconds. False: none is left."""
        refill = (now - self._last) * BUDGET_CHUNKS_A_SECOND
        self._left, self._last = min(BUDGET_CHUNKS, self._left + refill), now
        if self._left < 1:
            return False
        self._left -= 1
        return True


class StrictParser(h11.Connection):
    """The server's end of a connection. `fault` says why `next_event` has raised."""

    def __init__(self, max_head_bytes: int, may_take_chunk: Callable[[], bool]):
        """may_take_chunk: takes a small chunk from the address's budget; False: none is left."""
        super().__init__(h11.SERVER, max_head_bytes)
        self.fault = ""
        self._may_take_chunk = may_take_chunk

    def forget(self) -> None:
        """Lets go of the connection, which refers to this."""
        self._may_take_chunk = lambda: False

    def next_event(self) -> Any:
        """Raises h11.RemoteProtocolError."""
        if self.their_state is not h11.IDLE:
            return self._checked_event()
        head = self._head()
        if head.count(b"\n") > MAX_HEADERS + 2:  # beside them the first line and the last
            self._refuse(f"more than {MAX_HEADERS} headers")
        event = self._checked_event()
        if isinstance(event, h11.Request):
            self._check(event, head)
        return event

    def _checked_event(self) -> Any:
        try:
            return super().next_event()
        except h11.RemoteProtocolError as error:
            self.fault = self.fault or str(error)[:200]
            raise

    def _head(self) -> bytes:
        """What has come of the request line and the headers."""
        waiting = self.trailing_data[0]
        end = _END_OF_HEAD.search(waiting)
        return waiting[: end.end()] if end else waiting

    def _check(self, request: h11.Request, head: bytes) -> None:
        if fault := _fault_of_lines(head):
            self._refuse(fault)
        lengths = [each.strip() for each in _LENGTH.findall(head)]
        if len(lengths) > 1 or not all(each.isdigit() for each in lengths):
            self._refuse("expected one Content-Length, a number")
        if not any(name == b"transfer-encoding" for name, _ in request.headers):
            return
        if lengths:
            self._refuse("both Content-Length and Transfer-Encoding")
        if request.http_version < b"1.1":
            self._refuse("Transfer-Encoding in HTTP/1.0")
        self._reader = _JoinedChunks(self._reader, self._may_take_chunk, self._refuse)

    def _refuse(self, fault: str) -> None:
        self.fault = fault
        raise h11.RemoteProtocolError(fault)


class _JoinedChunks:
    """Reads a body in chunks: all data that has come, as one event.

    An event for each chunk would take four times as long.
    """

    def __init__(self, reader: Any, may_take: Callable[[], bool], refuse: Callable[[str], None]):
        """reader: h11's, for one chunk. may_take: see StrictParser. refuse: raises."""
        self._reader, self._may_take, self._refuse = reader, may_take, refuse
        self._num_chunks = self._num_bytes = 0
        self._end: h11.EndOfMessage | None = None

    def __call__(self, buffer: Any) -> h11.Data | h11.EndOfMessage | None:
        if self._end is not None:
            return self._end
        data = bytearray()
        while True:
            before = bytes(buffer)
            event = self._reader(buffer)
            taken = before[: len(before) - len(buffer)]
            has_line = event.chunk_start if isinstance(event, h11.Data) else True
            if has_line and _LONE_CR.match(taken):
                self._refuse(_NO_CRLF)
            if isinstance(event, h11.Data):
                data += event.data
                self._count(event)
                continue
            if isinstance(event, h11.EndOfMessage):
                if fault := _fault_of_lines(taken):
                    self._refuse(fault)
                self._end = event
            return h11.Data(data=bytes(data)) if data else self._end

    def _count(self, chunk: h11.Data) -> None:
        self._num_chunks += chunk.chunk_start
        self._num_bytes += len(chunk.data)
        is_small = self._num_chunks > FREE_CHUNKS + self._num_bytes // MEAN_CHUNK_BYTES
        if chunk.chunk_start and is_small and not self._may_take():
            self._refuse(
                f"expected chunks of at least {MEAN_CHUNK_BYTES} bytes on average, got "
                f"{self._num_chunks} chunks of {self._num_bytes} bytes together"
            )

    def read_eof(self) -> Any:
        return self._reader.read_eof()
