"""Middleware: API keys, and the Host header that a server without keys accepts."""

from __future__ import annotations

import base64
import hmac
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from jax_attn.serve._http.error_shapes import error_response
from jax_attn.serve._http.keys import digest, is_loopback, tenants
from jax_attn.serve._openai.errors import ApiError


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
            state["owner"] = digest(presented).hex()
            if "record" in state:
                state["record"].tenant = tenant
        await self._app(scope, receive, send)

    def _tenant(self, presented: bytes) -> str | None:
        """Takes the same time for every key, right, partly right or missing."""
        shown = digest(presented)
        matches = [hmac.compare_digest(shown, known) for known in self._digests]
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
            if not is_loopback(name.lower()):
                error = ApiError(
                    403,
                    "Host: expected localhost; to serve under another name, use --api-key-file",
                    param="Host",
                    code="wrong_host",
                )
                return await error_response(error, scope["path"])(scope, receive, send)
        await self._app(scope, receive, send)


def _presented_key(authorization: str) -> bytes:
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).partition(b":")[2]
        except ValueError:  # invalid base64, or not ASCII
            return b""
    return value.strip().encode() if scheme.lower() == "bearer" else b""
