"""Responses with background: true, which run while no connection waits for them."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Protocol

from starlette.types import Message, Receive, Scope, Send

from jax_attn.serve._openai.access_log import Record
from jax_attn.serve._openai.errors import ApiError

log = logging.getLogger("jax_attn.serve")


class BackgroundAnswer(Protocol):
    """See ResponseAnswer."""

    id: str

    @property
    def record(self) -> Record: ...

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...

    def fail(self, error: ApiError) -> None:
        """Stores the response as failed."""

    def cancel(self) -> None:
        """Stores the response as cancelled."""

    def so_far(self) -> bytes:
        """The JSON of the response while it runs."""


class _Run:
    def __init__(self, answer: BackgroundAnswer):
        self.answer = answer
        self.stopped = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    async def receive(self) -> Message:
        await self.stopped.wait()
        return {"type": "http.disconnect"}


async def _discard(message: Any) -> None:
    pass


class BackgroundRuns:
    """The running responses by tenant and identifier. They hold their places in its limits."""

    def __init__(self) -> None:
        self._runs: dict[tuple[str, str], _Run] = {}

    def start(self, tenant: str, answer: BackgroundAnswer) -> None:
        run = self._runs[tenant, answer.id] = _Run(answer)
        answer.record.go_on()
        run.task = asyncio.create_task(self._run(tenant, run))

    def get(self, tenant: str, id: str) -> BackgroundAnswer | None:
        """Returns a response that has not ended; None: there is none."""
        run = self._runs.get((tenant, id))
        return None if run is None else run.answer

    async def stop(self, tenant: str, id: str) -> bool:
        """Ends a response, which is stored as cancelled. Returns whether it was running."""
        if (run := self._runs.get((tenant, id))) is None:
            return False
        run.stopped.set()
        assert run.task is not None
        await asyncio.wait([run.task])
        return True

    async def close(self) -> None:
        for tenant, id in list(self._runs):
            await self.stop(tenant, id)

    async def _run(self, tenant: str, run: _Run) -> None:
        answer = run.answer
        try:
            await answer({}, run.receive, _discard)
            if run.stopped.is_set():
                answer.cancel()
        except ApiError as error:
            answer.fail(error)
        except Exception:
            log.exception("a response in the background has failed")
            answer.fail(ApiError(500, "internal error", code="internal_error"))
        finally:
            del self._runs[tenant, answer.id]
            answer.record.end()
