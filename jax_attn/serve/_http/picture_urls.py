"""Fetches pictures from the web, for requests that name them by http(s) URLs.

Only from hosts that the operator has named, and never from an address that is not public: a URL
must not reach what only this machine can. A host is resolved once for a connection, all its
addresses are checked, and the connection goes to one of them. A redirect is checked like a URL.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any
from urllib.parse import SplitResult, urljoin, urlsplit

from jax_attn.serve._http.body_threads import FairPool

MAX_BYTES = 32 << 20  # of all pictures of a request, as of a body
SECONDS = 10.0  # for all pictures of a request, once a thread fetches them
_MOST_SECONDS = 20.0  # with the wait for a thread, and resolvers, which may take longer
_MAX_REDIRECTS = 3
_REDIRECTS = (301, 302, 303, 307, 308)
_CHUNK = 1 << 16
_NUM_THREADS = 4
_PORTS = {"http": 80, "https": 443}
_CONNECTIONS = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
_NAT64 = ipaddress.ip_network("64:ff9b::/96")

Resolve = Callable[[str, int], Iterable[str]]
"""(host, port) -> addresses. Raises OSError."""
Connect = Callable[[str, int, float], socket.socket]
"""(address, port, seconds) -> a connected socket. Raises OSError."""


class FetchError(Exception):
    """A URL cannot be used, in one sentence. url: it; "" if it is none alone."""

    url = ""


class PictureFetcher:
    def __init__(
        self,
        hosts: Iterable[str],
        resolve: Resolve | None = None,
        connect: Connect | None = None,
    ):
        """hosts: names that URLs may have."""
        self._hosts = frozenset(host.lower() for host in hosts)
        self._resolve, self._connect = resolve or _resolve, connect or _connect
        self._pool = FairPool("pictures", _NUM_THREADS)

    async def fetch(self, tenant: str, urls: Iterable[str]) -> Mapping[str, bytes]:
        """Returns the bytes of each URL. Raises FetchError that names no address."""
        job = partial(self._fetch_all, list(urls))
        try:
            async with asyncio.timeout(_MOST_SECONDS):
                return await self._pool.run(tenant, job)
        except TimeoutError:
            raise FetchError(f"the pictures took longer than {_MOST_SECONDS:g} s") from None

    def close(self) -> None:
        self._pool.close()

    def _fetch_all(self, urls: list[str]) -> dict[str, bytes]:
        deadline = time.monotonic() + SECONDS  # of a thread's own time: the wait for it is others'
        found: dict[str, bytes] = {}
        num_left = MAX_BYTES
        for url in urls:
            try:
                found[url] = self._fetch(url, num_left, deadline)
            except FetchError as error:
                error.url = url
                raise
            num_left -= len(found[url])
        return found

    def _fetch(self, url: str, max_bytes: int, deadline: float) -> bytes:
        for _ in range(1 + _MAX_REDIRECTS):
            parts = checked(url, self._hosts)
            answer = self._get(parts, max_bytes, deadline)
            if isinstance(answer, bytes):
                return answer
            try:
                url = urljoin(url, answer.url)
            except ValueError:
                raise FetchError("expected a redirect to a URL of http or https") from None
        raise FetchError(f"expected at most {_MAX_REDIRECTS} redirects")

    def _get(self, parts: SplitResult, max_bytes: int, deadline: float) -> bytes | _Redirect:
        assert parts.hostname is not None
        host, port = parts.hostname, _PORTS[parts.scheme]
        try:
            addresses = [*self._resolve(host, port)]
        except OSError:
            raise FetchError(f"the host {host!r} has no address") from None
        if not addresses or not all(map(is_public, addresses)):
            raise FetchError(f"expected a host with public addresses alone, got {host!r}")
        seconds = deadline - time.monotonic()
        connection: Any = _CONNECTIONS[parts.scheme](host)
        connection.sock = self._connected(addresses, port, host, seconds)
        # One limit for all: a server could else send a byte now and then. http.client forgets a
        # socket that its answer still reads, so the timer has a list of its own.
        sockets = [connection.sock]
        timer = threading.Timer(max(0.0, deadline - time.monotonic()), _end, [sockets])
        timer.start()
        try:
            if parts.scheme == "https":
                connection.sock = ssl.create_default_context().wrap_socket(
                    connection.sock, server_hostname=host, do_handshake_on_connect=False
                )
                sockets.append(connection.sock)
                connection.sock.do_handshake()
            return _exchange(connection, parts, max_bytes, deadline)
        except (OSError, http.client.HTTPException, ValueError):
            if time.monotonic() >= deadline:
                raise FetchError(f"the pictures took longer than {SECONDS:g} s") from None
            raise FetchError(f"the host {host!r} did not answer as a server of HTTP does") from None
        finally:
            timer.cancel()
            connection.close()

    def _connected(
        self, addresses: Iterable[str], port: int, host: str, seconds: float
    ) -> socket.socket:
        for address in addresses:
            if seconds <= 0:
                break
            try:
                return self._connect(address, port, seconds)
            except OSError:
                continue
        raise FetchError(f"the host {host!r} cannot be reached")


class _Redirect:
    def __init__(self, url: str):
        self.url = url


def checked(url: str, hosts: frozenset[str]) -> SplitResult:
    """Returns the parts of a URL that may be fetched. Raises FetchError."""
    try:
        parts = urlsplit(url)
        port, host = parts.port, parts.hostname
    except ValueError:
        raise FetchError("expected a URL of http or https") from None
    if parts.scheme not in _PORTS or not host or not url.isascii() or not url.isprintable():
        raise FetchError("expected a URL of http or https, in ASCII")
    if parts.username is not None or parts.password is not None:
        raise FetchError("expected a URL without a user's name")
    if port not in (None, _PORTS[parts.scheme]):
        raise FetchError(f"expected the port of {parts.scheme}, got {port}")
    if host not in hosts:
        raise FetchError(f"expected a host of --allow-image-urls, got {host[:100]!r}")
    return parts


def is_public(address: str) -> bool:
    """Whether an address is one of the internet: not of this machine or its networks."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        # Those that lead to an IPv4 address, which may be any.
        if ip.ipv4_mapped is not None or ip.sixtofour is not None or ip.teredo is not None:
            return False
        if ip in _NAT64:
            return False
        if ip.is_site_local:  # fec0::/10, of a site's own network (RFC 3879)
            return False
    return ip.is_global and not ip.is_multicast and not ip.is_reserved


def _resolve(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def _connect(address: str, port: int, seconds: float) -> socket.socket:
    return socket.create_connection((address, port), seconds)


def _end(sockets: list[socket.socket]) -> None:
    """Has the thread that waits for one of the sockets go on, with an error."""
    for each in sockets:
        with contextlib.suppress(OSError):  # it has ended
            each.shutdown(socket.SHUT_RDWR)


def _exchange(
    connection: http.client.HTTPConnection, parts: SplitResult, max_bytes: int, deadline: float
) -> bytes | _Redirect:
    """Sends a request and reads the answer. Raises FetchError, or what the socket raises."""
    host = parts.hostname
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    connection.request("GET", path, headers={"User-Agent": "jax_attn", "Accept": "image/*"})
    response = connection.getresponse()
    location = response.getheader("Location")
    if response.status in _REDIRECTS and location is not None:
        return _Redirect(location)
    if response.status != 200:
        raise FetchError(f"the host {host!r} answered {response.status}")
    if (coding := response.getheader("Content-Encoding", "identity")) != "identity":
        raise FetchError(f"expected a picture as it is, got Content-Encoding {coding[:50]!r}")
    too_long = FetchError(f"expected pictures of at most {MAX_BYTES} bytes together")
    if (response.length or 0) > max_bytes:
        raise too_long
    data = bytearray()
    while chunk := response.read1(_CHUNK):
        data += chunk
        if time.monotonic() >= deadline:
            raise TimeoutError
        if len(data) > max_bytes:
            raise too_long
    if response.length:
        raise ConnectionError("the answer is shorter than it said")
    return bytes(data)
