"""Messages between two processes of one server that trust each other: pickles over a socket."""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

_LENGTH = struct.Struct("<Q")  # bytes of the pickle that follows
_READ_BYTES = 1 << 18


def _pack(message: Any) -> bytes:
    packed = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(packed)) + packed


def receive(sock: socket.socket) -> Any:
    """Reads one message from a blocking socket, and no byte of the next. Raises EOFError."""
    (length,) = _LENGTH.unpack(_read(sock, _LENGTH.size))
    return pickle.loads(_read(sock, length))


def _read(sock: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        if not (part := sock.recv(min(length - len(data), _READ_BYTES))):
            raise EOFError("the other process has ended")
        data += part
    return bytes(data)


class Wire:
    """One end of the socket. `send` never waits: unsent data is buffered."""

    def __init__(self, sock: socket.socket):
        sock.setblocking(False)
        self._socket = sock
        self._lock = threading.Lock()
        self._unsent = bytearray()  # guarded by _lock
        self._received = bytearray()
        self._loop: asyncio.AbstractEventLoop | None = None

    def attach(self, on_message: Callable[[Any], None], on_end: Callable[[], None]) -> None:
        """Has the running event loop call on_message with each message of the other side.

        on_end is called once, when the other side is gone.
        """
        self._loop = asyncio.get_running_loop()
        self._on_message, self._on_end = on_message, on_end
        self._loop.add_reader(self._socket, self._receive)

    def send(self, message: Any) -> None:
        """Sends from any thread, once attached. Does nothing if the other side is gone."""
        frame = _pack(message)
        with self._lock:
            if self._unsent:
                self._unsent += frame
                return
            if (num_sent := self._try(frame)) < len(frame):
                self._unsent += frame[num_sent:]
                assert self._loop is not None
                self._loop.call_soon_threadsafe(self._loop.add_writer, self._socket, self._flush)

    def close(self) -> None:
        """Closes the wire. Call it in the event loop."""
        if self._loop is not None:
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
        self._socket.close()

    def _try(self, data: bytes | bytearray) -> int:
        """Sends without waiting. Returns the number of bytes that were taken."""
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError:  # the other side is gone; `_receive` notices this too
            return len(data)

    def _flush(self) -> None:
        with self._lock:
            del self._unsent[: self._try(self._unsent)]
            if not self._unsent:
                assert self._loop is not None
                self._loop.remove_writer(self._socket)

    def _receive(self) -> None:
        try:
            part = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        if not part:
            assert self._loop is not None
            self._loop.remove_reader(self._socket)
            self._on_end()
            return
        self._received += part
        begin = 0
        while len(self._received) - begin >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received, begin)
            end = begin + _LENGTH.size + length
            if end > len(self._received):
                break
            message = pickle.loads(self._received[begin + _LENGTH.size : end])
            begin = end
            self._on_message(message)
        del self._received[:begin]
