"""Errors in Anthropic's shape."""

from __future__ import annotations

from jax_attn.serve._anthropic.message_schemas import MessageError, MessageErrorBody
from jax_attn.serve._openai.errors import ApiError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_body(error: ApiError) -> MessageError:
    kind = "invalid_request_error" if error.status < 500 else "api_error"
    kind = _TYPES.get(error.status, kind)
    return MessageError(error=MessageErrorBody(type=kind, message=str(error)))
