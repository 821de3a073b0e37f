"""Pictures by http(s) URLs: which hosts and addresses, redirects, limits on bytes and time."""

import asyncio
import contextlib
import http.server
import socket
import threading
import time
from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace

import pytest

pytest.importorskip("starlette", reason="needs the extra `serve`")

from jax_attn.serve._http import picture_urls
from jax_attn.serve._http.body_threads import FairPool
from jax_attn.serve._http.picture_urls import FetchError, PictureFetcher, is_public

PUBLIC = "93.184.216.34"
HOST = "pictures.example"


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.server.seen.append((self.headers["Host"], self.path))
        status, headers, body = self.server.answers.get(self.path, (404, {}, b""))
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        for piece in body if isinstance(body, list) else [body]:
            self.wfile.write(piece)
            if isinstance(body, list):
                time.sleep(0.05)

    def handle(self):
        with contextlib.suppress(ConnectionError):  # a client that has read enough
            super().handle()

    def log_message(self, *_):
        pass


@pytest.fixture
def web():
    """A server that stands for all of the web: `connect` leads any address to it."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.answers, server.seen, server.addresses = {}, [], []
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()

    def connect(address: str, port: int, seconds: float) -> socket.socket:
        server.addresses.append((address, port))
        return socket.create_connection(server.server_address, seconds)

    server.connect = connect
    yield server
    server.shutdown()
    server.server_close()


def fetch(web, url: str, names: dict[str, list[str]] | None = None, hosts=(HOST,)) -> bytes:
    names = {HOST: [PUBLIC]} if names is None else names

    def resolve(host: str, port: int) -> list[str]:
        if host not in names:
            raise OSError("unknown")
        return names[host]

    fetcher = PictureFetcher(hosts, resolve, web.connect)
    try:
        return asyncio.run(fetcher.fetch("", [url]))[url]
    finally:
        fetcher.close()


def test_a_picture_of_an_allowed_host(web):
    web.answers["/a.png?x=1"] = 200, {}, b"picture"
    assert fetch(web, f"http://{HOST}/a.png?x=1#part") == b"picture"
    assert web.seen == [(HOST, "/a.png?x=1")]
    assert web.addresses == [(PUBLIC, 80)]
    assert fetch(web, f"HTTP://{HOST.upper()}/a.png?x=1", {HOST: [PUBLIC]}) == b"picture"


REFUSED = [
    ("http://other.example/a.png", "expected a host of --allow-image-urls, got 'other.example'"),
    (f"http://{HOST}.evil.example/", "expected a host of --allow-image-urls"),
    (f"http://{HOST}@evil.example/", "without a user's name"),
    (f"http://evil.example#@{HOST}/", "expected a host of --allow-image-urls, got 'evil.example'"),
    (f"http://{HOST}:8080/", "expected the port of http, got 8080"),
    (f"http://{HOST}:x/", "expected a URL of http or https"),
    (f"ftp://{HOST}/", "expected a URL of http or https"),
    (f"http://{HOST}/a\r\nHost: x", "expected a URL of http or https, in ASCII"),
    (f"http://{HOST}/missing", "answered 404"),
]


@pytest.mark.parametrize("url, words", REFUSED)
def test_a_url_that_is_refused(web, url, words):
    with pytest.raises(FetchError, match=words):
        fetch(web, url)
    assert bool(web.addresses) == ("404" in words)


PRIVATE = [
    *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1"),
    *("0.0.0.0", "255.255.255.255", "224.0.0.1", "198.18.0.1", "::1", "::", "fe80::1%eth0"),
    *("fc00::1", "ff02::1", "::ffff:10.0.0.1", "2002:7f00:1::", "64:ff9b::7f00:1", "no"),
    *("2001:0:53aa:64c:0:0:80ff:fffe", "fec0::1"),
]


@pytest.mark.parametrize("address", PRIVATE)
def test_addresses_that_are_not_public(web, address):
    assert not is_public(address)
    with pytest.raises(FetchError, match="public addresses alone, got 'pictures.example'"):
        fetch(web, f"http://{HOST}/", {HOST: [PUBLIC, address]})
    assert not web.addresses


def test_a_host_is_resolved_once_for_a_connection(web):
    """Else its second answer could be an address that was not checked."""
    answers = [[PUBLIC], ["127.0.0.1"]]
    fetcher = PictureFetcher([HOST], lambda host, port: answers.pop(0), web.connect)
    web.answers["/"] = 200, {}, b"picture"
    assert asyncio.run(fetcher.fetch("", [f"http://{HOST}/"])) == {f"http://{HOST}/": b"picture"}
    fetcher.close()
    assert web.addresses == [(PUBLIC, 80)] and answers == [["127.0.0.1"]]


def test_public_addresses():
    assert is_public(PUBLIC) and is_public("2606:2800:220:1:248:1893:25c8:1946")


def test_redirects_are_checked(web):
    other = "cdn.example"
    names = {HOST: [PUBLIC], other: ["8.8.8.8"], "inner": ["10.0.0.1"]}
    web.answers["/b"] = 200, {}, b"picture"
    for location, allowed, words in [
        (f"http://{other}/b", (HOST, other), None),
        ("/b", (HOST,), None),
        (f"http://{other}/b", (HOST,), "expected a host of --allow-image-urls, got 'cdn.example'"),
        ("http://inner/b", (HOST, "inner"), "public addresses alone, got 'inner'"),
        ("file:///etc/passwd", (HOST,), "expected a URL of http or https"),
        ("/a", (HOST,), "expected at most 3 redirects"),
        ("http://[", (HOST,), "expected a redirect to a URL of http or https"),
    ]:
        web.answers["/a"] = 302, {"Location": location}, b""
        if words is None:
            assert fetch(web, f"http://{HOST}/a", names, allowed) == b"picture"
            continue
        with pytest.raises(FetchError, match=words):
            fetch(web, f"http://{HOST}/a", names, allowed)


def test_limits(web, monkeypatch):
    monkeypatch.setattr(picture_urls, "MAX_BYTES", 1000)
    monkeypatch.setattr(picture_urls, "SECONDS", 0.4)
    web.answers["/long"] = 200, {}, b"x" * 1001
    web.answers["/slow"] = 200, {"Content-Length": "900"}, [b"x"] * 30
    web.answers["/slow%20and%20last"] = 200, {"Connection": "close"}, [b"x"] * 30
    web.answers["/coded"] = 200, {"Content-Encoding": "gzip"}, b"x"
    for path, words in [
        ("/long", "expected pictures of at most 1000 bytes together"),
        ("/coded", "got Content-Encoding 'gzip'"),
        ("/slow", "took longer than 0.4 s"),
        ("/slow%20and%20last", "took longer than 0.4 s"),
    ]:
        with pytest.raises(FetchError, match=words):
            fetch(web, f"http://{HOST}{path}")
    fetcher = PictureFetcher([HOST], lambda host, port: [PUBLIC], web.connect)
    web.answers |= {f"/{i}": (200, {}, b"x" * 600) for i in range(2)}
    urls = [f"http://{HOST}/{i}" for i in range(2)]
    with pytest.raises(FetchError, match="at most 1000 bytes together"):
        asyncio.run(fetcher.fetch("", urls))
    fetcher.close()


def test_a_host_that_cannot_be_reached(web):
    """All of its addresses are tried."""
    tried = []

    def connect(address: str, port: int, seconds: float) -> socket.socket:
        tried.append(address)
        raise OSError("refused")

    fetcher = PictureFetcher([HOST], lambda host, port: [PUBLIC, "8.8.8.8"], connect)
    with pytest.raises(FetchError, match="the host 'pictures.example' cannot be reached"):
        asyncio.run(fetcher.fetch("", [f"https://{HOST}/"]))
    fetcher.close()
    assert tried == [PUBLIC, "8.8.8.8"]


def test_a_server_that_says_nothing(monkeypatch):
    monkeypatch.setattr(picture_urls, "SECONDS", 0.2)
    kept = []

    def connect(address: str, port: int, seconds: float) -> socket.socket:
        ours, theirs = socket.socketpair()
        kept.append(theirs)
        return ours

    fetcher = PictureFetcher([HOST], lambda host, port: [PUBLIC], connect)
    for scheme in ("http", "https"):
        with pytest.raises(FetchError, match=r"the pictures took longer than 0\.2 s"):
            asyncio.run(fetcher.fetch("", [f"{scheme}://{HOST}/"]))
    fetcher.close()
    for sock in kept:
        sock.close()


def test_a_server_that_begins_a_line_and_is_silent(monkeypatch):
    """http.client has let go of the socket then, but the thread still reads it."""
    monkeypatch.setattr(picture_urls, "SECONDS", 0.2)
    ours, theirs = socket.socketpair()
    theirs.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n1")
    fetcher = PictureFetcher([HOST], lambda host, port: [PUBLIC], lambda *_: ours)
    refusals = []

    def fetch_it() -> None:
        try:
            fetcher._fetch_all([f"http://{HOST}/"])
        except FetchError as error:
            refusals.append(str(error))

    thread = threading.Thread(target=fetch_it)
    thread.start()
    theirs.settimeout(30)
    try:
        while theirs.recv(1000):  # the end of the socket, as the time is over
            pass
    finally:
        theirs.close()
        thread.join()
        fetcher.close()
    assert refusals == [f"the pictures took longer than {picture_urls.SECONDS:g} s"]


def test_what_does_not_speak_http(web):
    def connect(address: str, port: int, seconds: float) -> socket.socket:
        ours, theirs = socket.socketpair()
        theirs.sendall(b"SSH-2.0\r\n")
        theirs.close()
        return ours

    fetcher = PictureFetcher([HOST], lambda host, port: [PUBLIC], connect)
    for scheme in ("http", "https"):
        with pytest.raises(FetchError, match="did not answer as a server of HTTP does"):
            asyncio.run(fetcher.fetch("", [f"{scheme}://{HOST}/"]))
    fetcher.close()


def test_a_host_without_an_address(web):
    with pytest.raises(FetchError, match="the host 'pictures.example' has no address"):
        fetch(web, f"http://{HOST}/", {})


def test_the_time_of_a_request_begins_with_its_thread(web, monkeypatch):
    """A request that waited for a thread longer than its own time still has all of it."""
    now = [0.0]
    monkeypatch.setattr(picture_urls, "time", SimpleNamespace(monotonic=lambda: now[0]))
    web.answers["/a"] = 200, {}, b"a"
    fetcher = PictureFetcher([HOST], lambda host, port: [PUBLIC], web.connect)

    async def run() -> Mapping[str, bytes]:
        url = f"http://{HOST}/a"
        pool, blocked = fetcher._pool, threading.Event()
        others = [asyncio.create_task(pool.run("b", blocked.wait)) for _ in range(4)]
        await asyncio.sleep(0)
        asked = asyncio.create_task(fetcher.fetch("a", [url]))
        await asyncio.sleep(0)
        now[0] += 1.5 * picture_urls.SECONDS
        blocked.set()
        await asyncio.gather(*others)
        return await asked

    assert asyncio.run(run()) == {f"http://{HOST}/a": b"a"}
    fetcher.close()


def test_a_thread_that_is_still_busy_has_its_slot():
    """Nobody waits for the resolver's answer, but other jobs cannot begin before it."""
    pool, resolved, begun = FairPool("pictures", 1), threading.Event(), []

    async def run() -> None:
        first = asyncio.create_task(pool.run("a", resolved.wait))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first])
        assert first.cancelled()
        # Two of the same tenant, then one of another, which is next in turn.
        jobs = [partial(begun.append, name) for name in "aab"]
        tasks = [
            asyncio.create_task(pool.run(tenant, job))
            for tenant, job in zip("aab", jobs, strict=True)
        ]
        await asyncio.sleep(0)
        assert pool._num_free == 0 and not begun
        assert [len(slots) for slots in pool._waiting.values()] == [2, 1]
        resolved.set()
        await asyncio.gather(*tasks)
        while not pool._num_free:
            await asyncio.sleep(0)

    asyncio.run(run())
    pool.close()
    assert begun == ["a", "b", "a"]
