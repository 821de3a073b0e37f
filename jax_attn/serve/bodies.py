"""From the bytes of a body to a checked request, in bounded time and memory.

Parsing holds Python's lock: while it runs, no stream gets a token. 4 MiB of numbers or text take
tens of milliseconds, but as many empty lists take a second and half a gigabyte. So the lists,
objects and keys of a body are counted before it is parsed.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from jax_attn.serve.errors import ApiError, from_validation

# Of a body: [ and {, and what is before a colon. 30 ms to parse; the longest conversation that
# `schemas` allows has a tenth of them.
MAX_CONTAINERS = 1 << 16
MAX_KEYS = 1 << 16

Body = TypeVar("Body", bound=BaseModel)


def parse(raw: bytes, model: type[Body]) -> Body:
    """Raises: ApiError, 400."""
    _check_size(raw)
    try:
        body = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"body: {error}", code="invalid_json") from None
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise from_validation(error, body) from None


def _check_size(raw: bytes) -> None:
    most = {"lists and objects": MAX_CONTAINERS, "keys": MAX_KEYS}
    # Those in strings included, which is quick, and enough for all but long texts.
    counts = [raw.count(b"[") + raw.count(b"{"), raw.count(b":")]
    if any(count > limit for count, limit in zip(counts, most.values(), strict=True)):
        outside = _outside_strings(raw)
        counts = [outside.count(b"[") + outside.count(b"{"), outside.count(b":")]
    for (what, limit), count in zip(most.items(), counts, strict=True):
        if count > limit:
            raise ApiError(
                400, f"body: expected at most {limit} {what}, got {count}", code="invalid_value"
            )


def _outside_strings(raw: bytes) -> bytes:
    """Without the escapes and strings of JSON; of anything else some of its bytes."""
    plain = np.frombuffer(raw.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
    is_quote = plain == ord('"')
    is_inside = np.bitwise_xor.accumulate(is_quote)
    return plain[~is_inside & ~is_quote].tobytes()
