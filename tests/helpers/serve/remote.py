"""A RemoteEngine and the host of its engine, at the two ends of a pair of sockets."""

import asyncio
import contextlib
import socket
import threading

from jax_attn.serve._engine.async_engine import AsyncEngine
from jax_attn.serve._engine.replicas import Replicas
from jax_attn.serve._ipc.engine_host import EngineHost
from jax_attn.serve._ipc.remote_engine import RemoteEngine
from jax_attn.serve._ipc.wire import Wire, receive


@contextlib.asynccontextmanager
async def remote(engine: AsyncEngine | Replicas):
    """A RemoteEngine here; the host has its own thread and event loop. Nothing is left of them."""
    ours, theirs = socket.socketpair()
    host = EngineHost(engine, Wire(theirs))
    thread = threading.Thread(target=lambda: asyncio.run(host.run("hello", signals=False)))
    thread.start()
    assert await asyncio.to_thread(receive, ours) == "hello"
    client = RemoteEngine(Wire(ours), engine.limits, engine.stats())
    client.start()
    try:
        yield client
    finally:
        await client.stop(drain=True)
        await asyncio.to_thread(thread.join)
    for each in getattr(engine, "_engines", [engine]):
        assert not each._thread.is_alive() and not each._recipients
    assert not host._submissions and not client._answers and not client._inbox.sequences
