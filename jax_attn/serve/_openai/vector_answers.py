"""What routes of an embedding model share: checked sequences, and waiting for their vectors."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from dataclasses import dataclass

import numpy as np
from starlette.types import Receive, Scope, Send

from jax_attn.serve._openai.access_log import Record
from jax_attn.serve._openai.answers import disconnected, send_pieces
from jax_attn.serve._openai.errors import ApiError
from jax_attn.serve._openai.limits import Ticket
from jax_attn.serve._openai.metrics import Metrics
from jax_attn.serve._openai.served_models import ServedEmbedder
from jax_attn.serve._scheduling.protocols import EmbedderStopped

# Limits on a request, those of OpenAI.
MAX_INPUTS = 2048
MAX_REQUEST_TOKENS = 300_000


@dataclass(frozen=True, kw_only=True)
class PreparedSequences:
    """The tokens of a checked request.

    seconds: for each sequence, where the tokens of its second text begin; None: it has none.
    """

    sequences: list[list[int]]
    seconds: list[int] | None = None

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.sequences))


class VectorsResponse(ABC):
    """An ASGI application that has the embedder compute a prepared request, and answers it.

    When the client leaves, sequences that have not begun are dropped.
    """

    def __init__(
        self,
        embedder: ServedEmbedder,
        prepared: PreparedSequences,
        metrics: Metrics,
        ticket: Ticket,
        record: Record,
    ):
        self._embedder, self._sequences = embedder, prepared
        self._metrics, self._ticket, self._record = metrics, ticket, record

    @abstractmethod
    def _json(self, vectors: np.ndarray) -> AsyncIterator[bytes]:
        """Yields the answer's body. vectors: [number of sequences, size] f32, all finite."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._respond(send))
        left = asyncio.create_task(disconnected(receive))
        try:
            await asyncio.wait({work, left}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            cut_off = not work.done()
            for task in (work, left):
                task.cancel()
            await asyncio.gather(work, left, return_exceptions=True)
            self._ticket.leave()
            failed = not cut_off and work.exception() is not None
            self._metrics.count("disconnected" if cut_off else "failed" if failed else "completed")
        if not cut_off:
            work.result()

    async def _respond(self, send: Send) -> None:
        vectors = await self._vectors()
        if not np.isfinite(vectors).all():
            raise ApiError(500, "the model's numbers are not finite", code="internal_error")
        self._metrics.embedding_tokens.inc(self._sequences.num_tokens)
        headers = [(b"content-type", b"application/json"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for piece in self._json(vectors):
            await send_pieces(send, [piece])
            await asyncio.sleep(0)  # lets other requests run
        await send({"type": "http.response.body", "body": b""})

    async def _vectors(self) -> np.ndarray:
        """Waits for the vectors: [number of sequences, size] f32. Raises ApiError."""
        prepared = self._sequences
        try:
            job = self._embedder.submit(self._ticket.tenant, prepared.sequences, prepared.seconds)
        except EmbedderStopped as error:
            raise ApiError(503, str(error), code="failed") from None
        try:
            await asyncio.wrap_future(job.done)
        except EmbedderStopped as error:
            raise ApiError(500, str(error), code="internal_error") from None
        finally:
            self._record.admitted = job.begun
            job.cancel()
        return job.vectors
