"""HTTP/1.1 framing: what RFC 9112 calls faulty is refused, and a byte costs bounded work."""

import logging
from weakref import WeakKeyDictionary

import h11
import pytest

pytest.importorskip("starlette", reason="needs the extra `serve`")

from helpers.serve.live_server import eventually, parse_answer, serving
from jax_attn.serve._http import connection as connection_module
from jax_attn.serve._http import framing
from jax_attn.serve._http.connection import Connection

POST = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BODY = b'{"prompt": "import os"}'
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
ONE = b"%x\r\n%b\r\n" % (len(BODY), BODY)


@pytest.fixture(scope="module")
def server():
    with serving() as server:
        yield server


def new_parser(now: float = 1e9):
    budget = framing.ChunkBudget()
    return framing.StrictParser(16384, lambda: budget.take(now))


def parsed(*parts: bytes) -> tuple[list, str]:
    """The events of a new connection that gets the parts in turn, and its fault."""
    parser, events = new_parser(), []
    for part in parts:
        parser.receive_data(part)
        try:
            while (event := parser.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
                events.append(event)
        except h11.RemoteProtocolError:
            assert parser.fault
            return events, parser.fault
    return events, ""


@pytest.mark.parametrize(
    ("raw", "fault"),
    [
        (POST + b"Content-Length: 23, 23\r\n\r\n" + BODY, "Content-Length"),
        (POST + b"Content-Length: 23\r\nContent-Length: 23\r\n\r\n" + BODY, "Content-Length"),
        (POST + b"Content-Length: +23\r\n\r\n" + BODY, "Content-Length"),
        (POST + b"Content-Length: 23\r\nX: a\r\n b\r\n\r\n" + BODY, "folded"),
        (POST + b"Content-Length: 23\r\nX: a\r\n\tb\r\n\r\n" + BODY, "folded"),
        (POST + b"Content-Length: 23\nX: a\r\n\r\n" + BODY, "CR LF"),
        (POST + b"Content-Length: 23\r\nX: a\n\r\n" + BODY, "CR LF"),
        (POST + b"Content-Length: 23\r\nX: a\r\n\n" + BODY, "CR LF"),
        ((POST + b"Content-Length: 23\r\n\r\n").replace(b"\r", b"") + BODY, "CR LF"),
        (CHUNKED.replace(b"1.1", b"1.0") + ONE + b"0\r\n\r\n", "HTTP/1.0"),
        (POST + b"Content-Length: 23\r\nTransfer-Encoding: chunked\r\n\r\n" + ONE, "both"),
        (CHUNKED + ONE + b"0\r\n\n", "CR LF"),
        (CHUNKED + ONE.replace(b"\r\n", b";a\rb\r\n", 1) + b"0\r\n\r\n", "CR LF"),
        (CHUNKED + ONE + ONE.replace(b"\r\n", b";a\r\r\n", 1) + b"0\r\n\r\n", "CR LF"),
        (CHUNKED + ONE + b"0;a\rb\r\n\r\n", "CR LF"),
        (CHUNKED + ONE + b"0\r\nX: a\n\r\n", "CR LF"),
        (CHUNKED + ONE + b"0\r\nX: a\r\n b\r\n\r\n", "folded"),
        (POST + b"a:\r\n" * framing.MAX_HEADERS, "headers"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_faulty_messages_are_refused(server, raw, fault):
    """However they are cut into packets, and with a sentence for the client."""
    assert fault in parsed(raw)[1]
    assert fault in parsed(*(raw[i : i + 1] for i in range(len(raw))))[1]
    with server.connect(raw) as connection:
        answer = parse_answer(b"".join(iter(lambda: connection.recv(65536), b"")))
    assert answer.status == 400 and answer.error["code"] == "invalid_http"
    assert fault in answer.error["message"]


@pytest.mark.parametrize(
    "raw",
    [
        POST + b"Content-Length: 23\r\n\r\n" + BODY,
        POST + b"content-length:23\r\nX-content-length: 5, 5\r\n\r\n" + BODY,
        CHUNKED + ONE + b"0\r\n\r\n",
        CHUNKED + ONE + b"0;a=b\r\nX: a\r\n\r\n",
        CHUNKED + b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\n\r\n",
    ],
    ids=["length", "lower case", "a chunk", "a trailer", "chunks of a byte"],
)
def test_what_is_right_is_read(server, raw):
    for parts in ([raw], [raw[i : i + 1] for i in range(len(raw))]):
        events, fault = parsed(*parts)
        body = b"".join(event.data for event in events if isinstance(event, h11.Data))
        assert not fault and body == BODY and isinstance(events[-1], h11.EndOfMessage)
    raw = raw.replace(b"Host", b"Connection: close\r\nHost")
    with server.connect(raw) as connection:
        answer = parse_answer(b"".join(iter(lambda: connection.recv(65536), b"")))
    assert answer.status == 200 and answer.json["count"] > 0


def test_the_chunks_that_have_come_are_one_event():
    events, fault = parsed(CHUNKED, b"2\r\nab\r\n" * 500, b"2\r\nab\r\n" * 500 + b"0\r\n\r\n")
    data = [event for event in events if isinstance(event, h11.Data)]
    assert not fault and [len(event.data) for event in data] == [1000, 1000]
    assert len(events) == 4


def test_work_for_a_body_in_small_chunks_is_bounded():
    """It is refused by the number of chunks: those of a usual size are never too many."""
    most = framing.FREE_CHUNKS + framing.BUDGET_CHUNKS
    many = b"1\r\na\r\n" * most
    assert parsed(CHUNKED, many)[1] == ""
    assert "on average, got" in parsed(CHUNKED, many + b"1\r\na\r\n" * 99)[1]
    usual = b"%x\r\n%b\r\n" % (framing.MEAN_CHUNK_BYTES, b"a" * framing.MEAN_CHUNK_BYTES)
    assert parsed(CHUNKED, *[usual * 100] * (2 * most // 100))[1] == ""
    read = []
    parser = new_parser()
    parser.receive_data(CHUNKED)
    parser.next_event()
    one = parser._reader._reader  # of h11
    parser._reader._reader = lambda buffer: read.append(0) or one(buffer)
    parser.receive_data(b"1\r\na\r\n" * 100_000)
    with pytest.raises(h11.RemoteProtocolError):
        parser.next_event()
    assert len(read) < 1.1 * most


def status_of(server, raw: bytes) -> int | str:
    """A client that still sends when it is refused may get a reset instead of the answer."""
    with server.connect(raw) as connection:
        try:
            return parse_answer(b"".join(iter(lambda: connection.recv(65536), b""))).status
        except ConnectionResetError:
            return "reset"


def test_small_chunks_of_an_address_have_one_budget(server, monkeypatch):
    monkeypatch.setattr(framing, "BUDGET_CHUNKS_A_SECOND", 0)
    monkeypatch.setattr(Connection, "_budgets", WeakKeyDictionary())
    raw = CHUNKED.replace(b"Host", b"Connection: close\r\nHost") + b"1\r\n \r\n" * 3000
    assert status_of(server, raw + ONE + b"0\r\n\r\n") == 200
    for _ in range(2):
        assert status_of(server, raw + ONE + b"0\r\n\r\n") in (400, "reset")
    budget = framing.ChunkBudget()
    monkeypatch.undo()
    assert sum(budget.take(1e9) for _ in range(10_000)) == framing.BUDGET_CHUNKS
    assert not budget.take(1e9) and budget.take(1e9 + 1)


def test_faults_are_logged_once_a_second_with_an_address(server, monkeypatch, caplog):
    monkeypatch.setattr(connection_module._Faults, "seconds", 3600.0)
    with caplog.at_level(logging.WARNING), serving() as server:
        for _ in range(5):
            with server.connect(b"\x16\x03\x01\r\n\r\n") as connection:
                assert b" 400 " in connection.recv(1000).split(b"\r\n")[0]
        eventually(lambda: not server.num_connections)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "127.0.0.1" in line and "illegal request line" in line
    faults = connection_module._Faults()
    caplog.clear()
    for now in (0.0, 1.0, 3599.0, 3600.0):
        faults.see("::1", "x", now)
    assert "2 more" in caplog.records[-1].getMessage() and len(caplog.records) == 2
