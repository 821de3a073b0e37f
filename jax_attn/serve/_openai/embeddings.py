"""/v1/embeddings: its body, from a body to tokens, and from vectors to OpenAI's answer."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
from pydantic import BaseModel, Discriminator, Field, Tag
from pydantic.json_schema import SkipJsonSchema

from jax_attn import models
from jax_attn.serve._openai import fields, schemas
from jax_attn.serve._openai.errors import ApiError, bad_field, overflow
from jax_attn.serve._openai.served_models import ServedEmbedder
from jax_attn.serve._openai.text_encoder import TextEncoder
from jax_attn.serve._openai.vector_answers import (
    MAX_INPUTS,
    MAX_REQUEST_TOKENS,
    PreparedSequences,
    VectorsResponse,
)

Text: TypeAlias = Annotated[str, Field(min_length=1)]
# Chosen by the first element, so that an error is about the kind that was meant.
Input: TypeAlias = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[fields.PromptTokens, Tag("tokens")]
    | Annotated[
        list[Text], Tag("texts"), Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS)
    ]
    | Annotated[
        list[fields.PromptTokens],
        Tag("token lists"),
        Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS),
    ],
    Discriminator(
        schemas.kind_of_prompt,
        custom_error_type="prompt",
        custom_error_message="expected a text, a list of tokens, or a list of either",
    ),
]


class EmbeddingRequest(fields.RequestBody):
    model: str | SkipJsonSchema[None] = None
    input: Input = Field(description="a text or its tokens, or a list of either")
    encoding_format: Literal["float", "base64"] = Field(
        "float", description="base64: of the numbers as little-endian float32"
    )
    dimensions: int | SkipJsonSchema[None] = Field(
        None, ge=1, description="the first numbers only, if the model was trained for that"
    )
    user: fields.Ignored


class Embedding(BaseModel):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


@dataclass(frozen=True, kw_only=True)
class PreparedEmbeddings(PreparedSequences):
    """A checked request."""

    dimensions: int  # of the vectors in the answer
    is_base64: bool


class EmbeddingReader:
    def __init__(self, model: models.EmbeddingModel, embedder: ServedEmbedder):
        self.name, self._max_tokens = embedder.name, embedder.max_tokens
        self._sizes, self._vocab_size = model.sizes, model.config.vocab_size
        self._normalizes = model.pooling.normalize
        self._texts = TextEncoder(model.tokenizer)

    def prepare(self, body: EmbeddingRequest, cuts: bool = False) -> PreparedEmbeddings:
        """Checks the body and encodes its inputs. Raises ApiError.

        cuts: long texts are cut rather than refused.
        """
        if body.model not in (None, self.name):
            assert body.model is not None
            raise ApiError(
                404,
                f"model: {body.model[:200]!r} makes no embeddings here, {self.name!r} does",
                param="model",
                code="model_not_found",
            )
        dimensions = self.dimensions(body.dimensions)
        is_one = isinstance(body.input, str) or isinstance(body.input[0], int)
        inputs: list[Any] = [body.input] if is_one else body.input  # type: ignore[assignment]
        sequences: list[list[int]] = []
        num_tokens = 0
        for i, each in enumerate(inputs):
            if cuts and isinstance(each, str):
                each = self._texts.encode_beginning(each, self._max_tokens)
            tokens = self.tokens(each, "input" if is_one else f"input[{i}]")
            num_tokens += len(tokens)
            if num_tokens > MAX_REQUEST_TOKENS:
                raise bad_field("input", f"more than {MAX_REQUEST_TOKENS} tokens in one request")
            sequences.append(tokens)
        return PreparedEmbeddings(
            sequences=sequences,
            dimensions=dimensions,
            is_base64=body.encoding_format == "base64",
        )

    def tokens(self, given: str | list[int], field: str) -> list[int]:
        """Encodes an input and checks its tokens. Raises ApiError that names `field`."""
        if isinstance(given, str):
            given = self._texts.encode(given, field, self._max_tokens)
        tokens = given
        if not tokens:
            raise bad_field(field, "no tokens")
        if len(tokens) > self._max_tokens:
            raise overflow(field, self._max_tokens, len(tokens))
        if (largest := max(tokens)) >= self._vocab_size:
            raise bad_field(
                field, f"token {largest} is beyond the vocabulary of {self._vocab_size}"
            )
        return tokens

    def dimensions(self, wanted: int | None) -> int:
        """The size of the vectors; None: the whole. Raises ApiError."""
        dimensions = self._sizes[-1] if wanted is None else wanted
        if dimensions not in self._sizes:
            raise bad_field("dimensions", f"expected {self._words_for_sizes()}, got {dimensions}")
        return dimensions

    def _words_for_sizes(self) -> str:
        sizes = self._sizes
        if len(sizes) == 1:
            return f"{sizes[0]}, as this model's vectors cannot be cut"
        return f"1 to {sizes[-1]}" if isinstance(sizes, range) else f"one of {list(sizes)}"

    def cut(self, vectors: np.ndarray, dimensions: int) -> np.ndarray:
        """Cuts vectors to [n, dimensions]. If they had length 1, they have it again."""
        if dimensions == vectors.shape[1]:
            return vectors
        vectors = vectors[:, :dimensions]
        if self._normalizes:
            lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
            vectors = vectors / np.maximum(lengths, 1e-12)
        return vectors


class EmbeddingResponse(VectorsResponse):
    """Answers a request for embeddings."""

    def __init__(
        self, embedder: ServedEmbedder, reader: EmbeddingReader, prepared: PreparedEmbeddings,
        *others: Any,
    ):  # fmt: skip
        super().__init__(embedder, prepared, *others)
        self._reader, self._prepared = reader, prepared

    def _cut(self, vectors: np.ndarray) -> np.ndarray:
        return self._reader.cut(vectors, self._prepared.dimensions)

    async def _json(self, vectors: np.ndarray) -> AsyncIterator[bytes]:
        """Yields one vector at a time, a millisecond each: all of them may be 40 MB of text."""
        vectors = self._cut(vectors)
        n = self._prepared.num_tokens
        usage = EmbeddingUsage(prompt_tokens=n, total_tokens=n)
        whole = EmbeddingList(data=[], model=self._embedder.name, usage=usage)
        before, behind = whole.model_dump_json().encode().split(b'"data":[]')
        yield before + b'"data":['
        for i, vector in enumerate(vectors):
            value: str | list[float] = vector.tolist()
            if self._prepared.is_base64:
                value = base64.b64encode(vector.astype("<f4").tobytes()).decode()
            entry = json.dumps({"object": "embedding", "index": i, "embedding": value})
            yield b"," * bool(i) + entry.encode()
        yield b"]" + behind
