"""Serves in one process, without the pipe to HTTP's: an embedding model, which may have a text
model beside it."""

from __future__ import annotations

import asyncio

from jax_attn.serve._http.fair_loop import new_loop
from jax_attn.serve._http.http_server import HttpServer
from jax_attn.serve._http.server import create_app
from jax_attn.serve._http.settings import HttpConfig, ServerConfig
from jax_attn.serve._loading import Loaded


def serve(loaded: Loaded, config: ServerConfig, http: HttpConfig) -> int:
    """Returns the exit status of the process. Raises OSError, ValueError: see `create_app`."""
    engine, embedding = loaded.engine, loaded.embedding
    server = HttpServer(create_app(engine, loaded.model, config, embedding), http)
    if engine is not None:
        engine.on_ready = server.collector.begin
    parts = [part for part in (engine, embedding and embedding[1]) if part is not None]
    for part in parts:
        # A supervisor then starts a new server.
        part.on_failure = server.stop
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(server.serve())
    return 0 if server.started and all(part.failure is None for part in parts) else 1
