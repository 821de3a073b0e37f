"""/v1/rerank, /v1/score and /classify: their bodies, and from logits to answers.

The shapes are those of Cohere and Jina (rerank) and of vLLM (score, classify).
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

import numpy as np
from pydantic import BaseModel, Field
from pydantic.json_schema import SkipJsonSchema

from jax_attn import models
from jax_attn.serve._openai import fields
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
_MANY = Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS)
Texts: TypeAlias = Annotated[list[Text], _MANY]


class RerankDocument(fields.RequestBody):
    text: Text


class RerankRequest(fields.RequestBody):
    model: str | SkipJsonSchema[None] = None
    query: Text
    documents: Annotated[list[Text | RerankDocument], _MANY] = Field(
        description="texts, or objects with `text`"
    )
    top_n: int | SkipJsonSchema[None] = Field(
        None, ge=1, description="only so many of the best; absent: all"
    )
    return_documents: bool = Field(False, description="repeat the texts in the answer")
    rank_fields: fields.Unsupported = None
    max_chunks_per_doc: fields.Unsupported = None
    max_tokens_per_doc: fields.Unsupported = None
    truncation: fields.Unsupported = None
    user: fields.Ignored


class ScoreRequest(fields.RequestBody):
    model: str | SkipJsonSchema[None] = None
    text_1: Text | Texts = Field(description="one text, or as many as text_2 has")
    text_2: Text | Texts
    user: fields.Ignored


class ClassifyRequest(fields.RequestBody):
    model: str | SkipJsonSchema[None] = None
    input: Text | Texts
    user: fields.Ignored


class ScoreUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class RankedText(BaseModel):
    text: str


class RankedDocument(BaseModel):
    index: int
    relevance_score: float
    document: RankedText | None = None


class Ranking(BaseModel):
    id: str
    model: str
    results: list[RankedDocument]
    usage: ScoreUsage


class PairScore(BaseModel):
    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreList(BaseModel):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[PairScore]
    usage: ScoreUsage


class TextClass(BaseModel):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassList(BaseModel):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[TextClass]
    usage: ScoreUsage


@dataclass(frozen=True, kw_only=True)
class PreparedScores(PreparedSequences):
    """A checked request. answer: makes the body of the answer from [n, num_labels] f32 logits."""

    answer: Callable[[np.ndarray, ScoreUsage], BaseModel]


class ScoreReader:
    """Reads the bodies for one model that makes scores. Its methods raise ApiError."""

    def __init__(self, model: models.EmbeddingModel, embedder: ServedEmbedder):
        assert model.scoring is not None
        self.scoring, self._name = model.scoring, embedder.name
        self._max_tokens = embedder.max_tokens
        self._vocab_size = model.config.vocab_size
        self._texts = TextEncoder(model.tokenizer)

    # ---- bodies ----------------------------------------------------------------------------------

    def rerank(self, body: RerankRequest) -> PreparedScores:
        self._check_model(body.model)
        texts = [each if isinstance(each, str) else each.text for each in body.documents]

        def answer(logits: np.ndarray, usage: ScoreUsage) -> Ranking:
            scores = self.scoring.relevance(logits)
            best = np.argsort(-scores, kind="stable")[: body.top_n]
            results = [
                RankedDocument(
                    index=int(i),
                    relevance_score=float(scores[i]),
                    document=RankedText(text=texts[i]) if body.return_documents else None,
                )
                for i in best
            ]
            return Ranking(id=_new_id("rerank"), model=self._name, results=results, usage=usage)

        pairs = [(body.query, text) for text in texts]
        return self._prepared(pairs, "documents", answer)

    def score(self, body: ScoreRequest) -> PreparedScores:
        self._check_model(body.model)
        first, second = (
            [each] if isinstance(each, str) else each for each in (body.text_1, body.text_2)
        )
        if len(first) not in (1, len(second)):
            raise bad_field("text_1", f"expected one text or {len(second)}, got {len(first)}")
        if len(first) == 1:
            first = first * len(second)

        def answer(logits: np.ndarray, usage: ScoreUsage) -> ScoreList:
            data = [
                PairScore(index=i, score=float(score))
                for i, score in enumerate(self.scoring.relevance(logits))
            ]
            return ScoreList(
                id=_new_id("score"), created=int(time.time()), model=self._name, data=data,
                usage=usage,
            )  # fmt: skip

        return self._prepared(list(zip(first, second, strict=True)), "text_2", answer)

    def classify(self, body: ClassifyRequest) -> PreparedScores:
        self._check_model(body.model)
        texts = [body.input] if isinstance(body.input, str) else body.input
        labels = self.scoring.labels

        def answer(logits: np.ndarray, usage: ScoreUsage) -> ClassList:
            data = [
                TextClass(
                    index=i,
                    label=labels[int(probs.argmax())],
                    probs=probs.tolist(),
                    num_classes=len(labels),
                )
                for i, probs in enumerate(self.scoring.probabilities(logits))
            ]
            return ClassList(
                id=_new_id("classify"), created=int(time.time()), model=self._name, data=data,
                usage=usage,
            )  # fmt: skip

        sequences = self.tokens(texts, "input")[0]
        return PreparedScores(sequences=sequences, answer=answer)

    # ---- their parts -----------------------------------------------------------------------------

    def check_pairs(self) -> None:
        """Raises ApiError unless the model has one score for a pair."""
        if (n := len(self.scoring.labels)) != 1:
            raise ApiError(
                400,
                f"model: expected a cross-encoder with one label, {self._name!r} has {n} labels; "
                "/classify gives their probabilities",
                param="model",
                code="invalid_value",
            )

    def tokens(
        self, texts: Sequence[str] | Sequence[tuple[str, str]], field: str
    ) -> tuple[list[list[int]], list[int]]:
        """Returns the tokens of texts or pairs, and where each second text begins."""
        if self.scoring.prompt is not None and isinstance(texts[0], str):
            raise ApiError(
                400,
                f"model: {self._name!r} scores pairs only, at /v1/rerank and /v1/score",
                param="model",
                code="invalid_value",
            )
        limit = self._max_tokens
        for i, given in enumerate(texts):
            for text in [given] if isinstance(given, str) else given:
                self._texts.refuse_long(text, f"{field}[{i}]", limit)
        sequences, seconds, num_tokens = [], [], 0
        for begin in range(0, len(texts), _TEXTS_AT_A_TIME):
            encoded = self._encoded(texts[begin : begin + _TEXTS_AT_A_TIME])
            for i, (tokens, second) in enumerate(encoded, begin):
                if not tokens:
                    raise bad_field(f"{field}[{i}]", "no tokens")
                if len(tokens) > limit:
                    raise overflow(f"{field}[{i}]", limit, len(tokens))
                if (largest := max(tokens)) >= self._vocab_size:
                    raise bad_field(
                        f"{field}[{i}]",
                        f"token {largest} is beyond the vocabulary of {self._vocab_size}",
                    )
                num_tokens += len(tokens)
                if num_tokens > MAX_REQUEST_TOKENS:
                    raise bad_field(field, f"more than {MAX_REQUEST_TOKENS} tokens in one request")
                sequences.append(tokens)
                seconds.append(second if self.scoring.has_types else len(tokens))
        return sequences, seconds

    def _encoded(
        self, texts: Sequence[str] | Sequence[tuple[str, str]]
    ) -> list[tuple[list[int], int]]:
        """See TextEncoder.encode_typed; with the prompt of a text model around each pair."""
        prompt = self.scoring.prompt
        if prompt is None:
            return self._texts.encode_typed(texts)
        asked = [prompt.pair.format(query=pair[0], document=pair[1]) for pair in texts]
        before, behind, *pairs = self._texts.encode_plain([prompt.before, prompt.behind, *asked])
        whole = [before + tokens + behind for tokens in pairs]
        return [(tokens, len(tokens)) for tokens in whole]

    def _prepared(
        self,
        pairs: list[tuple[str, str]],
        field: str,
        answer: Callable[[np.ndarray, ScoreUsage], BaseModel],
    ) -> PreparedScores:
        self.check_pairs()
        sequences, seconds = self.tokens(pairs, field)
        return PreparedScores(sequences=sequences, seconds=seconds, answer=answer)

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self._name):
            assert name is not None
            raise ApiError(
                404,
                f"model: {name[:200]!r} makes no scores here, {self._name!r} does",
                param="model",
                code="model_not_found",
            )


_TEXTS_AT_A_TIME = 64  # are encoded, so that a request with too many tokens ends early


def _new_id(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"


class ScoreResponse(VectorsResponse):
    """Answers a request for scores."""

    async def _json(self, vectors: np.ndarray) -> AsyncIterator[bytes]:
        prepared = self._sequences
        assert isinstance(prepared, PreparedScores)
        n = prepared.num_tokens
        usage = ScoreUsage(prompt_tokens=n, total_tokens=n)

        def dump() -> bytes:
            return prepared.answer(vectors, usage).model_dump_json(exclude_none=True).encode()

        yield await asyncio.to_thread(dump)  # it may repeat all documents
