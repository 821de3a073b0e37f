"""/debug/cache_events: what the prefix cache stores and evicts, as server-sent events."""

from __future__ import annotations

import asyncio
import json

from starlette.types import Receive, Scope, Send

from jax_attn.serve._openai.answers import KEEP_ALIVE_SECONDS, disconnected
from jax_attn.serve._scheduling.cache_events import CacheEvent
from jax_attn.serve._scheduling.protocols import ServedEngine

_MAX_WAITING = 1024  # lists of events that a reader has not taken; beyond it, its stream ends


class CacheWatch:
    """The readers. The engine tells of its cache while there are some. For one event loop."""

    def __init__(self, engine: ServedEngine):
        self._engine = engine
        self._readers: set[asyncio.Queue[list[CacheEvent]]] = set()

    def add(self) -> asyncio.Queue[list[CacheEvent]]:
        """A new reader. All of them get everything that is cached again."""
        loop = asyncio.get_running_loop()

        def tell(events: list[CacheEvent]) -> None:
            loop.call_soon_threadsafe(self._put, events)

        self._engine.on_cache_events = tell
        reader: asyncio.Queue[list[CacheEvent]] = asyncio.Queue(_MAX_WAITING)
        self._readers.add(reader)
        self._engine.watch_cache(True)
        return reader

    def remove(self, reader: asyncio.Queue[list[CacheEvent]]) -> None:
        self._readers.discard(reader)
        if not self._readers:
            self._engine.watch_cache(False)

    def _put(self, events: list[CacheEvent]) -> None:
        for reader in list(self._readers):
            if reader.full():
                self._readers.discard(reader)  # its stream ends when it has taken what there is
            else:
                reader.put_nowait(events)

    def is_reading(self, reader: asyncio.Queue[list[CacheEvent]]) -> bool:
        return reader in self._readers


class CacheEventsAnswer:
    """An ASGI application: a stream that ends when its reader leaves or is too slow."""

    def __init__(self, watch: CacheWatch):
        self._watch = watch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._send(send))
        left = asyncio.create_task(disconnected(receive))
        try:
            await asyncio.wait({work, left}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, left):
                task.cancel()
            await asyncio.gather(work, left, return_exceptions=True)

    async def _send(self, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        reader = self._watch.add()
        try:
            while self._watch.is_reading(reader) or not reader.empty():
                text = await self._next(reader)
                await send({"type": "http.response.body", "body": text, "more_body": True})
        finally:
            self._watch.remove(reader)
        await send({"type": "http.response.body", "body": b""})

    async def _next(self, reader: asyncio.Queue[list[CacheEvent]]) -> bytes:
        try:
            events = await asyncio.wait_for(reader.get(), KEEP_ALIVE_SECONDS)
        except TimeoutError:
            return b": waiting\n\n"
        return "".join(map(_text, events)).encode()


def _text(event: CacheEvent) -> str:
    kind, namespace, parent, pages = event
    data = {} if kind == "cleared" else {"namespace": namespace, "parent": parent, "pages": pages}
    return f"event: {kind}\ndata: {json.dumps(data)}\n\n"
