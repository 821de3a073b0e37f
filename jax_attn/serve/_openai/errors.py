"""Errors of the HTTP API: one exception class, and the wording of each failure for the client."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field, ValidationError
from pydantic_core import ErrorDetails
from starlette.responses import Response

_MAX_PATH_CHARS = 200  # a path can contain keys that the client chose


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None
    reason: str | None = Field(
        None, description="beside code rate_limit_exceeded: which limit was met"
    )


class ErrorResponse(BaseModel):
    """The body of every error, in OpenAI's shape."""

    error: ErrorBody


class ApiError(Exception):
    """A request that is answered with `status` and OpenAI's error JSON; `param` names the field.

    code: clients know one OpenAI code for every 429, so for these it gives the reason.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers: dict[str, str] = (
            {} if retry_after is None else {"Retry-After": str(retry_after)}
        )

    def body(self) -> ErrorResponse:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        code, reason = self.code, None
        if self.status == 429:
            kind = "tokens" if self.code == "too_many_tokens" else "requests"
            code, reason = "rate_limit_exceeded", self.code
        return ErrorResponse(
            error=ErrorBody(
                message=str(self), type=kind, param=self.param, code=code, reason=reason
            )
        )

    def response(self) -> Response:
        body = self.body().model_dump_json()
        return Response(body, self.status, self.headers, media_type="application/json")


def bad_field(param: str, message: str) -> ApiError:
    """400 for a field that passed the schema but does not fit this server or model."""
    return ApiError(400, f"{param}: {message}", param=param, code="invalid_value")


def model_not_found(name: str, served: str) -> ApiError:
    return ApiError(
        404,
        f"model: {name[:200]!r} is not served here, {served!r} is",
        param="model",
        code="model_not_found",
    )


def overflow(
    field: str, limit: int, num_prompt: int | str, max_tokens: int | None = None
) -> ApiError:
    """400 for a prompt over the context length, in OpenAI's words, which clients match."""
    message = f"This model's maximum context length is {limit} tokens. However, "
    if max_tokens is None or isinstance(num_prompt, str):
        message += f"your {field} resulted in {num_prompt} tokens. Please reduce the length of the "
        message += f"{field}."
    else:
        message += (
            f"you requested {num_prompt + max_tokens} tokens ({num_prompt} in the {field}, "
            f"{max_tokens} in the completion). Please reduce the length of the {field} or "
            "completion."
        )
    return ApiError(400, message, param=field, code="context_length_exceeded")


def from_validation(error: ValidationError, body: Any) -> ApiError:
    """400 for the first error that pydantic found; `body` is the parsed JSON."""
    errors = error.errors(include_url=False, include_input=False)
    # If a field can have several types, pydantic reports an error for each; the deepest one belongs
    # to the type that was meant.
    errors = [entry for entry in errors if entry["loc"][:1] == errors[0]["loc"][:1]]
    first = max(errors, key=lambda entry: len(entry["loc"]))
    if "inside" in (context := first.get("ctx", {})):  # the error comes from a rule of this server
        first["loc"] += (context["inside"],)
    # A rule about several fields has no location; its type names the field to change.
    param = _path(first, body) or (first["type"] if _is_ours(first["type"]) else None)
    code, message = _CODES.get(first["type"], "invalid_value"), first["msg"]
    if first["type"].endswith("_type") or first["type"].endswith("_parsing"):
        code = "invalid_type"
    if any(isinstance(bound, float) for bound in (context.get("ge"), context.get("le"))):
        code = code.replace("integer", "decimal")
    if code == "unknown_parameter":
        message = "unknown field"
    return ApiError(400, f"{param or 'body'}: {message}", param=param, code=code)


# OpenAI's codes, by pydantic's error types.
_CODES = {
    "unknown_field": "unknown_parameter",
    "extra_forbidden": "unknown_parameter",
    "missing": "missing_required_parameter",
    "unsupported": "unsupported_parameter",
    "string_too_long": "string_above_max_length",
    "string_too_short": "string_below_min_length",
    "too_long": "array_above_max_length",
    "too_short": "array_below_min_length",
    "greater_than_equal": "integer_below_min_value",
    "less_than_equal": "integer_above_max_value",
}


def _is_ours(kind: str) -> bool:
    return kind in (
        "stream_options", "grammar", "top_logprobs", "max_tokens", "prompt", "tool_choice",
        "best_of", "prompt_logprobs", "truncate_prompt_tokens", "continue_final_message",
        "background", "conversation", "suffix", "prediction",
    )  # fmt: skip


def _path(error: ErrorDetails, body: Any) -> str | None:
    """Formats pydantic's location as `messages[0].content`, without its tags for unions."""
    path = ""
    location = error["loc"]
    for depth, step in enumerate(location, 1):
        is_missing = error["type"] == "missing" and depth == len(location)
        if isinstance(step, int):
            path += f"[{step}]"
            body = body[step] if isinstance(body, list) and step < len(body) else None
        elif isinstance(body, dict) and (step in body or is_missing):
            path += f".{step}" if path else step
            body = body.get(step)
    return path[:_MAX_PATH_CHARS] or None
