"""API keys, and the Host header that a server without keys accepts."""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Iterable, Sequence
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from jax_attn.serve._http.error_shapes import error_response
from jax_attn.serve._openai.errors import ApiError

_MIN_KEY_CHARS = 16
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def read_keys(path: str | Path) -> tuple[str, ...]:
    """Reads one key a line. Blank lines and lines that begin with # are skipped.

    Keys come from a file because command lines and environments show up in process lists and crash
    reports.

    Raises:
      ValueError: there is no key, or one that is too short or cannot be sent in a header.
    """
    lines = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ValueError(f"{path}: no API key in this file")
    return checked_keys(keys, str(path))


def checked_keys(keys: Sequence[str], where: str) -> tuple[str, ...]:
    """Raises ValueError for a key that is too short or cannot be sent in a header."""
    for number, key in enumerate(keys, 1):
        if len(key) < _MIN_KEY_CHARS or not key.isascii() or not key.isprintable() or " " in key:
            raise ValueError(
                f"{where}: key {number}: expected at least {_MIN_KEY_CHARS} printable ASCII "
                "characters without spaces"
            )
    return tuple(keys)


def tenants(keys: Iterable[str], operator_keys: Iterable[str] = ()) -> dict[str, str]:
    """Maps the owner that each key stands for to its tenant.

    The owner is the SHA-256 of the key, in hexadecimal. It stays the same when other keys come or
    go. The tenant says where the key is in the list.
    """
    found: dict[str, str] = {}
    for name, group in (("operator", operator_keys), ("key", keys)):
        for i, key in enumerate(group):
            found.setdefault(_digest(key.encode()).hex(), f"{name}{i}")
    return found


class Authenticate:
    """ASGI middleware: answers 401 unless the request has one of the keys.

    The key is a bearer token, the header x-api-key or, for browsers, the password of HTTP Basic
    authentication, which they ask the user for. scope["state"]["tenant"] says which key it was, and
    "is_operator" whether it was one of operator_keys. "owner" is that of `tenants`.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Iterable[str],
        open_paths: Iterable[str],
        operator_keys: Iterable[str] = (),
    ):
        self._app = app
        known = tenants(keys, operator_keys)
        self._digests = list(map(bytes.fromhex, known))
        self._names = list(known.values())
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            headers = Headers(scope=scope)
            # x-api-key is Anthropic's header.
            presented = headers.get("x-api-key", "").strip().encode()
            if "authorization" in headers:
                presented = _presented_key(headers["authorization"])
            tenant = self._tenant(presented)
            if tenant is None:
                error = ApiError(401, "a valid API key is needed", code="invalid_api_key")
                # Browsers ask for the key if the challenge is Basic; programs get Bearer.
                challenge = "Basic" if scope["path"] == "/" else "Bearer"
                error.headers["WWW-Authenticate"] = f'{challenge} realm="jax_attn"'
                return await error_response(error, scope["path"])(scope, receive, send)
            state = scope.setdefault("state", {})
            state["tenant"], state["is_operator"] = tenant, tenant.startswith("operator")
            state["owner"] = _digest(presented).hex()
            if "record" in state:
                state["record"].tenant = tenant
        await self._app(scope, receive, send)

    def _tenant(self, presented: bytes) -> str | None:
        """Takes the same time for every key, right, partly right or missing."""
        digest = _digest(presented)
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return self._names[matches.index(True)] if any(matches) else None


class LoopbackHost:
    """ASGI middleware: answers 403 unless the Host header names this machine.

    It protects a server on a loopback address without keys. Otherwise a web page that its user
    visits could reach it by pointing its domain name at 127.0.0.1 (DNS rebinding).
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            host = Headers(scope=scope).get("host", "")
            name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
            if name.lower() not in _LOOPBACK:
                error = ApiError(
                    403,
                    "Host: expected localhost; to serve under another name, use --api-key-file",
                    param="Host",
                    code="wrong_host",
                )
                return await error_response(error, scope["path"])(scope, receive, send)
        await self._app(scope, receive, send)


def is_loopback(host: str) -> bool:
    return host in _LOOPBACK


def _digest(key: bytes) -> bytes:
    """Digests have equal length; compare_digest would reveal the length of a key."""
    return hashlib.sha256(key).digest()


def _presented_key(authorization: str) -> bytes:
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).partition(b":")[2]
        except ValueError:  # invalid base64, or not ASCII
            return b""
    return value.strip().encode() if scheme.lower() == "bearer" else b""
