"""Errors in the shape of the protocol that a route belongs to."""

from __future__ import annotations

from starlette.responses import Response

from jax_attn.serve._anthropic.message_errors import error_body
from jax_attn.serve._ollama.ollama_schemas import OllamaError
from jax_attn.serve._openai.errors import ApiError


def error_response(error: ApiError, path: str) -> Response:
    """The answer to a request of that path."""
    if path.startswith("/api/"):
        body = OllamaError(error=str(error)).model_dump_json(exclude_none=True)
    elif path == "/v1/messages" or path.startswith("/v1/messages/"):
        body = error_body(error).model_dump_json()
    else:
        return error.response()
    return Response(body, error.status, error.headers, media_type="application/json")
