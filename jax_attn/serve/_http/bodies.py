"""From the bytes of a body to a checked request, in bounded time and memory.

Parsing holds Python's lock: while it runs, no stream gets a token. 4 MiB of numbers take 40 ms, but
as many empty lists take a second and half a gigabyte. So the lists, objects and keys of a body, and
its bytes outside of strings, are counted before it is parsed; one body is parsed at a time; and
after it other threads get time to run.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Iterator
from typing import TypeVar

import numpy as np
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from jax_attn.serve._openai.errors import ApiError, from_validation
from jax_attn.serve._openai.fields import UnknownFields

# Limit on the [ and { of a body, and on its keys (counted by colons): 30 ms to parse. The largest
# number of messages, in parts, with calls and tools, has a fifth of them.
MAX_CONTAINERS = 1 << 16
MAX_KEYS = 1 << 16
# Limit on bytes outside of strings, quotes included. Bodies may be longer where they have pictures,
# which are strings.
MAX_PLAIN_BYTES = 4 << 20

_LONG_SECONDS, _MAX_PAUSE_SECONDS = 0.005, 0.1

Body = TypeVar("Body", bound=BaseModel)
_lock = threading.Lock()


def parse(raw: bytes, model: type[Body], unknown: UnknownFields | None = None) -> Body:
    """Parses a body. unknown: gets unknown fields; None refuses them. Raises ApiError, 400."""
    with _lock:
        begin = time.monotonic()
        _check_size(raw)
        try:
            with _no_collection():
                body = from_json(raw, allow_inf_nan=False)
        except ValueError as error:
            raise ApiError(400, f"body: {error}", code="invalid_json") from None
        if (seconds := time.monotonic() - begin) > _LONG_SECONDS:
            time.sleep(min(seconds, _MAX_PAUSE_SECONDS))
    try:
        return model.model_validate(body, context=unknown)
    except ValidationError as error:
        raise from_validation(error, body) from None


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Turns garbage collection off: JSON has no cycles, and Python would look every 700 lists."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _check_size(raw: bytes) -> None:
    most = {
        "bytes outside of strings": MAX_PLAIN_BYTES,
        "lists and objects": MAX_CONTAINERS,
        "keys": MAX_KEYS,
    }
    # Includes those in strings, which is quick, and good enough for all but long texts.
    counts = _counts(raw)
    if any(count > limit for count, limit in zip(counts, most.values(), strict=True)):
        counts = _counts(_outside_strings(raw))
    for (what, limit), count in zip(most.items(), counts, strict=True):
        if count > limit:
            raise ApiError(
                400, f"body: expected at most {limit} {what}, got {count}", code="invalid_value"
            )


def _counts(raw: bytes) -> list[int]:
    return [len(raw), raw.count(b"[") + raw.count(b"{"), raw.count(b":")]


def _outside_strings(raw: bytes) -> bytes:
    """Removes escapes, and what is between quotes, from JSON.

    If `raw` is not JSON, the result is some of its bytes.
    """
    plain = np.frombuffer(raw.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
    is_quote = plain == ord('"')
    is_inside = np.bitwise_xor.accumulate(is_quote)
    return plain[~is_inside | is_quote].tobytes()
