"""Requests that move between servers: what the routes of `/v1/hand_over` are made of."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from collections.abc import Sequence as Seq
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from jax_attn.serve._openai.answers import disconnected
from jax_attn.serve._openai.errors import ApiError
from jax_attn.serve._openai.limits import queue_full
from jax_attn.serve._scheduling.admission import QueueFull
from jax_attn.serve._scheduling.events import TokenEvent
from jax_attn.serve._scheduling.protocols import EngineStopped, Limits, ServedEngine
from jax_attn.serve._scheduling.request import Sequence

Result = TypeVar("Result")


class Continued:
    """The engine for the answer of one request, of which another server has computed a part."""

    def __init__(self, engine: ServedEngine, data: bytes):
        self._engine, self._data = engine, data

    @property
    def limits(self) -> Limits:
        return self._engine.limits

    async def generate(self, seqs: Seq[Sequence]) -> AsyncGenerator[TokenEvent]:
        (seq,) = seqs
        try:
            async for event in self._engine.go_on(self._data, seq):
                yield event
        except ValueError as error:
            raise not_handed_over(str(error)) from None


def not_handed_over(message: str) -> ApiError:
    return ApiError(400, message, code="not_handed_over")


async def while_connected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of engine work, which ends if the client leaves. The body must have been read.

    Raises ApiError for what the engine refuses, ClientDisconnect.
    """
    task = asyncio.ensure_future(work)
    leaves = asyncio.ensure_future(disconnected(request.receive))
    try:
        await asyncio.wait({task, leaves}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return await task
    except QueueFull as error:
        raise queue_full(str(error)) from None
    except EngineStopped:
        raise ApiError(503, "the server is shutting down", code="draining") from None
    except ValueError as error:
        raise ApiError(400, str(error), code="invalid_value") from None
    except RuntimeError as error:
        raise ApiError(500, str(error) or "the request failed", code="engine_error") from None
    finally:
        for each in (task, leaves):
            each.cancel()
        await asyncio.gather(task, leaves, return_exceptions=True)
