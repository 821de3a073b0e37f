"""/api/embed and the older /api/embeddings of Ollama's API, built on /v1/embeddings."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
from pydantic import ValidationError

from jax_attn.serve._ollama import ollama_schemas as ollama
from jax_attn.serve._ollama.ollama_api import LATEST, nanoseconds
from jax_attn.serve._openai.embeddings import (
    EmbeddingReader,
    EmbeddingRequest,
    EmbeddingResponse,
    PreparedEmbeddings,
)
from jax_attn.serve._openai.errors import ApiError, from_validation


def prepare_embed(reader: EmbeddingReader, body: ollama.EmbedRequest) -> PreparedEmbeddings:
    """Checks the body and encodes its texts. Raises ApiError."""
    return _prepare(reader, body.input, body.model, body.dimensions, body.truncate)


def prepare_embedding(
    reader: EmbeddingReader, body: ollama.OneEmbeddingRequest
) -> PreparedEmbeddings:
    """Likewise for one text."""
    try:
        return _prepare(reader, body.prompt, body.model, None, True)
    except ApiError as error:
        if error.param != "input":
            raise
        message = str(error).replace("input", "prompt", 1)
        raise ApiError(error.status, message, param="prompt", code=error.code) from None


def _prepare(
    reader: EmbeddingReader,
    given: str | list[str],
    model: str,
    dimensions: int | None,
    cuts: bool,
) -> PreparedEmbeddings:
    name = model if model == reader.name else model.removesuffix(LATEST)
    fields: dict[str, Any] = {"model": name, "input": given, "dimensions": dimensions}
    try:
        request = EmbeddingRequest.model_validate(fields)
    except ValidationError as error:
        raise from_validation(error, fields) from None
    return reader.prepare(request, cuts)


class EmbedResponse(EmbeddingResponse):
    """Answers /api/embed."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._begin = time.monotonic()

    async def _json(self, vectors: np.ndarray) -> AsyncIterator[bytes]:
        """Yields one vector at a time."""
        yield b'{"model":' + json.dumps(self._embedder.name).encode() + b',"embeddings":['
        for i, vector in enumerate(self._cut(vectors)):
            yield b"," * bool(i) + json.dumps(vector.tolist()).encode()
        end = {
            "total_duration": nanoseconds(time.monotonic() - self._begin),
            "load_duration": 0,
            "prompt_eval_count": self._prepared.num_tokens,
        }
        yield b"]," + json.dumps(end)[1:].encode()


class OneEmbeddingResponse(EmbeddingResponse):
    """Answers /api/embeddings."""

    async def _json(self, vectors: np.ndarray) -> AsyncIterator[bytes]:
        (vector,) = self._cut(vectors)
        yield json.dumps({"embedding": vector.tolist()}).encode()
