"""Threads that turn bodies into requests, for tenants in turn."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from jax_attn.serve._openai.limits import Ticket

Result = TypeVar("Result")


class Lanes:
    """Runs the work for each body in a thread.

    Long bodies go one at a time, as parsing one may block all other threads for a while. Short ones
    do not wait for them.
    """

    LONG_BYTES = 1 << 16

    def __init__(self) -> None:
        self._short, self._long = _Lane("short", 4), _Lane("long", 1)

    async def run(
        self, ticket: Ticket, num_bytes: int, work: Callable[..., Result], *args: Any
    ) -> Result:
        """Returns or raises the result of work(*args)."""
        lane = self._short if num_bytes <= self.LONG_BYTES else self._long
        return await lane.run(ticket.tenant, partial(work, *args))

    def close(self) -> None:
        self._short.close()
        self._long.close()


class _Lane:
    """A queue of jobs.

    A tenant's jobs start in order, and the tenants take turns after each job.
    """

    def __init__(self, name: str, num_threads: int) -> None:
        self._pool = ThreadPoolExecutor(num_threads, f"jax_attn {name}")
        self._num_free = num_threads
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    async def run(self, tenant: str, job: Callable[[], Result]) -> Result:
        await self._acquire(tenant)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, job)
        finally:
            self._release()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _acquire(self, tenant: str) -> None:
        if self._num_free:
            self._num_free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the slot was granted too late
                self._release()
            raise

    def _release(self) -> None:
        while self._waiting:
            tenant, turns = self._waiting.popitem(last=False)
            while turns and turns[0].cancelled():
                turns.popleft()
            if turns:
                turns.popleft().set_result(None)
                self._waiting[tenant] = turns  # behind the other tenants
                return
        self._num_free += 1
