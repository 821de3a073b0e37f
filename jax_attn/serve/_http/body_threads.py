"""Threads that turn bodies into requests, for tenants in turn."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from jax_attn.serve._openai.limits import Ticket
from jax_attn.serve._text import memory

Result = TypeVar("Result")


class BodyThreads:
    """Runs the work for each body in a thread.

    Long bodies go one at a time, as parsing one may block all other threads for a while. Short ones
    do not wait for them. The memory of many of either goes back to the system.
    """

    LONG_BYTES = 1 << 16
    GIVE_BACK_BYTES = 4 << 20  # of bodies, the tokens of which may have taken a hundred times that

    def __init__(self) -> None:
        self._short, self._long = FairPool("short", 4), FairPool("long", 1)
        self._num_bytes = 0  # of bodies since memory was given back

    async def run(
        self, ticket: Ticket, num_bytes: int, work: Callable[..., Result], *args: Any
    ) -> Result:
        """Returns or raises the result of work(*args)."""
        pool = self._short if num_bytes <= self.LONG_BYTES else self._long
        try:
            return await pool.run(ticket.tenant, partial(work, *args))
        finally:
            self._num_bytes += num_bytes
            if self._num_bytes >= self.GIVE_BACK_BYTES:
                self._num_bytes = 0
                self._long.submit(memory.give_back)

    def close(self) -> None:
        self._short.close()
        self._long.close()


class FairPool:
    """A pool of threads, each of which is a slot for one job.

    A tenant's jobs start in order, and the tenants take turns after each job.
    """

    def __init__(self, name: str, num_threads: int) -> None:
        self._pool = ThreadPoolExecutor(num_threads, f"jax_attn {name}")
        self._num_free = num_threads
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    async def run(self, tenant: str, job: Callable[[], Result]) -> Result:
        """Returns or raises the job's result.

        The slot of a job that nobody waits for any more is free when its thread is.
        """
        await self._acquire(tenant)
        loop = asyncio.get_running_loop()
        try:
            running = self._pool.submit(job)
        except RuntimeError:  # the pool is closed
            self._release()
            raise

        def release(_: Future[Result]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._release)

        running.add_done_callback(release)
        return await asyncio.wrap_future(running)

    def submit(self, job: Callable[[], None]) -> None:
        """Runs a job that needs no slot and has no result."""
        with contextlib.suppress(RuntimeError):  # the pool is closed
            self._pool.submit(job)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _acquire(self, tenant: str) -> None:
        if self._num_free:
            self._num_free -= 1
            return
        slot: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(slot)
        try:
            await slot
        except asyncio.CancelledError:
            if not slot.cancelled():  # the slot was granted too late
                self._release()
            raise

    def _release(self) -> None:
        while self._waiting:
            tenant, slots = self._waiting.popitem(last=False)
            while slots and slots[0].cancelled():
                slots.popleft()
            if slots:
                slots.popleft().set_result(None)
                self._waiting[tenant] = slots  # behind the other tenants
                return
        self._num_free += 1
