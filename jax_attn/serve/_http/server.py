"""The HTTP application: routes, middleware, errors. `create_app` makes it for one engine."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import logging
import math
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeAlias, TypeVar

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from jax_attn import models
from jax_attn.serve._anthropic import message_schemas
from jax_attn.serve._anthropic.messages_api import MessagesApi
from jax_attn.serve._engine.hand_over import HandedOver
from jax_attn.serve._http import bodies, debug_state, openapi, tracing
from jax_attn.serve._http.auth import Authenticate, LoopbackHost
from jax_attn.serve._http.batches import Batches
from jax_attn.serve._http.body_threads import BodyThreads
from jax_attn.serve._http.cache_watch import CacheEventsAnswer, CacheWatch
from jax_attn.serve._http.connection import DiscardBody
from jax_attn.serve._http.error_shapes import error_response
from jax_attn.serve._http.files import FileAnswer, Files
from jax_attn.serve._http.hand_over import Continued, not_handed_over, while_connected
from jax_attn.serve._http.keys import tenants
from jax_attn.serve._http.picture_urls import FetchError, PictureFetcher
from jax_attn.serve._http.settings import ServerConfig
from jax_attn.serve._ollama import ollama_schemas
from jax_attn.serve._ollama.ollama_api import OllamaApi
from jax_attn.serve._ollama.ollama_embeddings import (
    EmbedResponse,
    OneEmbeddingResponse,
    prepare_embed,
    prepare_embedding,
)
from jax_attn.serve._openai import batch_schemas, fields, response_schemas, schemas
from jax_attn.serve._openai.access_log import AccessLog, Record
from jax_attn.serve._openai.answers import ChoicesAnswer, GenerationAnswer
from jax_attn.serve._openai.bounds import KeyLimits
from jax_attn.serve._openai.embeddings import (
    EmbeddingReader,
    EmbeddingRequest,
    EmbeddingResponse,
    PreparedEmbeddings,
)
from jax_attn.serve._openai.errors import ApiError, bad_field, model_not_found
from jax_attn.serve._openai.limits import Limiter, Ticket
from jax_attn.serve._openai.logprobs import TokenIdJson, TokenJson
from jax_attn.serve._openai.metrics import Metrics
from jax_attn.serve._openai.model_facts import ModelFacts
from jax_attn.serve._openai.pictures import FETCHED, PicturesWanted
from jax_attn.serve._openai.prepare import (
    Caller,
    Prepared,
    Preparer,
    sampling_defaults,
)
from jax_attn.serve._openai.response_format import ChatStyle, CompletionStyle, Style
from jax_attn.serve._openai.response_items import page
from jax_attn.serve._openai.responses_api import ResponseAnswer, ResponsesApi, StoredAnswer
from jax_attn.serve._openai.scores import (
    ClassifyRequest,
    PreparedScores,
    RerankRequest,
    ScoreReader,
    ScoreRequest,
    ScoreResponse,
)
from jax_attn.serve._openai.served_models import ServedEmbedder, ServedModel
from jax_attn.serve._openai.vector_answers import PreparedSequences
from jax_attn.serve._scheduling.protocols import EngineStopped, ServedEngine
from jax_attn.serve._scheduling.tenants import owner
from jax_attn.serve._text.token_bytes import TokenBytes

log = logging.getLogger("jax_attn.serve")

_PAGE = Path(__file__).parents[1] / "static" / "index.html"
_RETRY_AFTER_SECONDS = 5
_TREE_TOKENS = 32  # tokens shown of each node in the live view
VIEW_SECONDS = 0.25  # how long a live view is reused

Body = TypeVar("Body", bound=BaseModel)
Result = TypeVar("Result")
PreparedBody = TypeVar("PreparedBody", bound=PreparedSequences)
_BYTES = "application/octet-stream"
_MOVE_SECONDS = 300.0  # for the bytes of a request that moves between servers
# Factory that takes GenerationAnswer's first arguments.
MakeAnswer: TypeAlias = Callable[
    [ServedEngine | Continued, Prepared, Metrics, Ticket, Record], GenerationAnswer
]


# Routes that need a text model, served by _TextServer.
_TEXT_ROUTES = [
    ("/v1/completions", "completions", "POST"),
    ("/v1/chat/completions", "chat_completions", "POST"),
    ("/v1/messages", "messages", "POST"),
    ("/v1/messages/count_tokens", "count_message_tokens", "POST"),
    ("/api/chat", "ollama_chat", "POST"),
    ("/api/generate", "ollama_generate", "POST"),
    ("/api/show", "ollama_show", "POST"),
    ("/api/tags", "ollama_models", "GET"),
    ("/api/ps", "ollama_running", "GET"),
    ("/v1/responses", "responses", "POST"),
    ("/v1/responses/input_tokens", "count_response_tokens", "POST"),
    ("/v1/responses/{id}", "response", "GET"),
    ("/v1/responses/{id}", "delete_response", "DELETE"),
    ("/v1/responses/{id}/cancel", "cancel_response", "POST"),
    ("/v1/responses/{id}/input_items", "input_items", "GET"),
    ("/v1/conversations", "create_conversation", "POST"),
    ("/v1/conversations/{id}", "conversation", "GET"),
    ("/v1/conversations/{id}", "update_conversation", "POST"),
    ("/v1/conversations/{id}", "delete_conversation", "DELETE"),
    ("/v1/conversations/{id}/items", "conversation_items", "GET"),
    ("/v1/conversations/{id}/items", "add_items", "POST"),
    ("/v1/conversations/{id}/items/{item}", "conversation_item", "GET"),
    ("/v1/conversations/{id}/items/{item}", "remove_item", "DELETE"),
    ("/tokenize", "tokenize", "POST"),
    ("/detokenize", "detokenize", "POST"),
    ("/v1/loras", "load_lora", "POST"),
    ("/v1/loras/{name:path}", "unload_lora", "DELETE"),
    ("/v1/hand_over", "hand_over", "POST"),
    ("/v1/hand_over/continue", "go_on", "POST"),
    ("/v1/weights", "weights", "POST"),
    ("/v1/weights/pause", "pause", "POST"),
    ("/v1/weights/resume", "resume", "POST"),
    ("/debug/state", "debug_state", "GET"),
    ("/debug/cache_events", "cache_events", "GET"),
    ("/openapi.json", "openapi", "GET"),
    ("/", "page", "GET"),
]

_FILES = [
    ("/v1/files", "upload_file", "POST"),
    ("/v1/files", "list_files", "GET"),
    ("/v1/files/{id}", "file", "GET"),
    ("/v1/files/{id}", "delete_file", "DELETE"),
    ("/v1/files/{id}/content", "file_content", "GET"),
    ("/v1/batches", "create_batch", "POST"),
    ("/v1/batches", "list_batches", "GET"),
    ("/v1/batches/{id}", "batch", "GET"),
    ("/v1/batches/{id}/cancel", "cancel_batch", "POST"),
]


def create_app(
    engine: ServedEngine | None,
    model: ServedModel | None,
    config: ServerConfig,
    embedding: tuple[models.EmbeddingModel, ServedEmbedder] | None = None,
) -> Starlette:
    """Makes the ASGI application. It starts the engine, and stops it at the end.

    Args:
      engine: an AsyncEngine, not started; None: only an embedding model is served.
      model: as `jax_attn.models.load` returns it; None without an engine.
      embedding: a model for vectors or for scores, and what runs it, not started.

    Raises:
      ValueError: a file of the directory cannot be used; chat.ChatTemplateError is one. Or the
        directory of files cannot.
    """
    server: _Server
    if engine is None:
        server = _Server(config, embedding)
    else:
        assert model is not None
        server = _TextServer(engine, model, config, embedding)
    text_routes = [
        Route(path, getattr(server, name, server.no_text_model), methods=[method])
        for path, name, method in _TEXT_ROUTES
    ]
    trace = None if server.tracer is None else server.tracer.request
    middleware = [
        Middleware(AccessLog, enabled=config.access_log, trace=trace),
        Middleware(DiscardBody),
    ]
    if config.allowed_origins:
        # First, as browsers ask for permission without a key.
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=config.allowed_origins,
                allow_methods=["DELETE", "GET", "POST"],
                allow_headers=["*"],
                expose_headers=["Retry-After", "X-Request-Id"],
            )
        )
    if config.check_host:
        middleware.append(Middleware(LoopbackHost))
    if config.api_keys or config.operator_keys:
        middleware.append(
            Middleware(
                Authenticate,
                keys=config.api_keys,
                operator_keys=config.operator_keys,
                open_paths=["/health"],
            )
        )
    routes = [
        *text_routes,
        *[Route(path, getattr(server, name), methods=[method]) for path, name, method in _FILES],
        Route("/v1/embeddings", server.embeddings, methods=["POST"]),
        Route("/api/embed", server.ollama_embed, methods=["POST"]),
        Route("/api/embeddings", server.ollama_embedding, methods=["POST"]),
        Route("/v1/rerank", server.rerank, methods=["POST"]),
        Route("/v1/score", server.score, methods=["POST"]),
        Route("/classify", server.classify, methods=["POST"]),
        Route("/v1/models", server.models),
        Route("/v1/models/{name:path}", server.model),
        Route("/health", server.health),
        Route("/version", server.version),
        Route("/api/version", server.version),
        Route("/metrics", server.metrics_text),
    ]
    handlers: dict[Any, Any] = {
        ApiError: server.on_api_error,
        HTTPException: _on_http_exception,
        ClientDisconnect: _on_disconnect,
        Exception: _on_bug,
    }
    app = Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers=handlers,
        lifespan=server.lifespan,
    )
    # Batches come without connections and keys.
    server.inner = Starlette(
        routes=routes,
        middleware=[Middleware(AccessLog, enabled=False, trace=trace)],
        exception_handlers=handlers,
    )
    app.state.server = server
    return app


class _Server:
    """Routes that need no text model: embeddings, scores, models, and those about the server."""

    def __init__(
        self,
        config: ServerConfig,
        embedding: tuple[models.EmbeddingModel, ServedEmbedder] | None,
        engine: ServedEngine | None = None,
    ):
        self._engine, self._config = engine, config
        self._metrics = Metrics(engine)
        limits = config.key_limits or KeyLimits.default(
            *((engine.limits.max_waiting, engine.limits.max_running) if engine else _NO_ENGINE)
        )
        self.limiter, self._body_threads = Limiter(engine, limits), BodyThreads()
        self._limits = limits
        self._fetcher = PictureFetcher(config.image_hosts) if config.image_hosts else None
        self._embedder: ServedEmbedder | None = None
        self._embedding_reader: EmbeddingReader | None = None
        self._score_reader: ScoreReader | None = None
        if embedding is not None:
            self._embedder = embedding[1]
            if embedding[0].scoring is None:
                self._embedding_reader = EmbeddingReader(*embedding)
            else:
                self._score_reader = ScoreReader(*embedding)
        self._unknown = None if config.strict else fields.UnknownFields()
        self._created = int(time.time())
        self._draining = self._embedder_is_ready = False
        self.inner: ASGIApp  # answers requests that come without a connection
        self.tracer: tracing.Tracer | None = None
        if config.otlp_endpoint is not None:
            self.tracer = tracing.Tracer(tracing.otlp_exporter(config.otlp_endpoint))
        directory = config.files_directory
        self._file_store = None if directory is None else Files(directory)
        self._batches: Batches | None = None

    @contextlib.asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        if self._file_store is not None:
            directory = self._config.files_directory
            assert directory is not None
            window = self._engine.limits.max_running if self._engine is not None else 64
            owners = {"": ""}
            if self._has_keys:
                owners = tenants(self._config.api_keys, self._config.operator_keys)
            self._batches = Batches(
                directory, self._file_store, self.inner, owners, window, self._config.max_body_bytes
            )
            self._batches.resume()
        if self._embedder is not None:
            self._embedder.start(on_ready=self._on_embedder_ready)
        elif self._engine is not None:
            self._engine.start()
        yield
        await self._end_background()
        if self._batches is not None:
            await self._batches.close()
        if self._file_store is not None:
            self._file_store.close()
        # Every connection is closed by now, so nobody waits for the jobs that still run.
        if self._embedder is not None:
            await asyncio.to_thread(self._embedder.stop)
        if self._engine is not None:
            await self._engine.stop(drain=False)
        self._body_threads.close()
        if self._fetcher is not None:
            self._fetcher.close()
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.close)

    async def _end_background(self) -> None:
        """Ends what runs although no connection waits for it."""

    def _on_embedder_ready(self) -> None:
        """Starts the engine after the embedder, as it counts compilations while it serves."""
        self._embedder_is_ready = True
        if self._engine is not None:
            self._engine.start()

    def drain(self) -> None:
        """Refuses requests from now on; running ones go on."""
        self._draining = True

    async def no_text_model(self, request: Request) -> NoReturn:
        raise ApiError(
            404,
            f"{request.url.path}: no model for texts is served here, only one for embeddings;"
            " --model does",
            code="model_not_found",
        )

    # ---- embeddings and scores -----------------------------------------------------------------

    async def embeddings(self, request: Request) -> EmbeddingResponse:
        return await self._embed(
            request, EmbeddingRequest, EmbeddingReader.prepare, EmbeddingResponse
        )

    async def ollama_embed(self, request: Request) -> EmbeddingResponse:
        body = ollama_schemas.EmbedRequest
        return await self._embed(request, body, prepare_embed, EmbedResponse)

    async def ollama_embedding(self, request: Request) -> EmbeddingResponse:
        body = ollama_schemas.OneEmbeddingRequest
        return await self._embed(request, body, prepare_embedding, OneEmbeddingResponse)

    async def _embed(
        self,
        request: Request,
        model: type[Body],
        prepare: Callable[[EmbeddingReader, Body], PreparedEmbeddings],
        answer: type[EmbeddingResponse],
    ) -> EmbeddingResponse:
        embedder, reader = self._embedder, self._embedding_reader
        if embedder is None or reader is None:
            raise self._no_model("embedding model", "/v1/rerank, /v1/score or /classify")
        prepared, *others = await self._sequences(request, model, partial(prepare, reader))
        return answer(embedder, reader, prepared, *others)

    async def rerank(self, request: Request) -> ScoreResponse:
        return await self._scores(request, RerankRequest, ScoreReader.rerank)

    async def score(self, request: Request) -> ScoreResponse:
        return await self._scores(request, ScoreRequest, ScoreReader.score)

    async def classify(self, request: Request) -> ScoreResponse:
        return await self._scores(request, ClassifyRequest, ScoreReader.classify)

    async def _scores(
        self,
        request: Request,
        model: type[Body],
        prepare: Callable[[ScoreReader, Body], PreparedScores],
    ) -> ScoreResponse:
        embedder, reader = self._embedder, self._score_reader
        if embedder is None or reader is None:
            raise self._no_model("model with a head for scores", "/v1/embeddings")
        return ScoreResponse(
            embedder, *await self._sequences(request, model, partial(prepare, reader))
        )

    def _no_model(self, kind: str, others: str) -> ApiError:
        """404: there is no model of this kind; one of the other kind has other routes."""
        hint = f"; {self._embedder.name!r} is one for {others}" if self._embedder else ""
        return ApiError(
            404,
            f"no {kind} is served here; --embedding-model does{hint}",
            code="model_not_found",
        )

    async def _sequences(
        self, request: Request, model: type[Body], prepare: Callable[[Body], PreparedBody]
    ) -> tuple[PreparedBody, Metrics, Ticket, Record]:
        """Reads a body for the embedder, within the limits."""
        assert self._embedder is not None
        self._need_ready()
        record = request.state.record
        ticket = self.limiter.enter(_tenant(request), queues=False)
        try:
            prepared = await self._with_body(
                request, ticket, lambda raw: prepare(self._parse(raw, model))
            )
            record.num_prompt = prepared.num_tokens
            num_bytes = 4 * self._embedder.size * len(prepared.sequences)
            ticket.take(tokens=prepared.num_tokens, embedding_bytes=num_bytes)
        except BaseException:
            ticket.leave()
            raise
        return prepared, self._metrics, ticket, record

    def _parse(self, raw: bytes, model: type[Body]) -> Body:
        return bodies.parse(raw, model, self._unknown)

    def _need_ready(self) -> None:
        status = self._status()
        if status != "ok":
            raise ApiError(
                503,
                f"the server does not take requests: {status}",
                code=status,
                retry_after=_RETRY_AFTER_SECONDS,
            )

    def _status(self) -> Literal["ok", "compiling", "draining", "failed"]:
        parts = [part for part in (self._engine, self._embedder) if part is not None]
        if any(part.failure is not None for part in parts):
            return "failed"
        if self._draining:
            return "draining"
        is_ready = self._embedder_is_ready if self._engine is None else self._engine.ready
        return "ok" if is_ready else "compiling"

    # ---- files and batches ---------------------------------------------------------------------

    def _stored(self, request: Request) -> tuple[Files, Batches, str]:
        """Files, batches, and their owner. Raises ApiError where there are none."""
        if self._file_store is None or self._batches is None:
            raise ApiError(
                404,
                f"{request.url.path}: this server keeps no files; --files-directory has it do so",
                code="no_files",
            )
        return self._file_store, self._batches, getattr(request.state, "owner", "")

    async def upload_file(self, request: Request) -> Response:
        files, _, owner = self._stored(request)
        self._check_origin(request)
        ticket = self.limiter.enter(_tenant(request), queues=False)
        try:
            return _json(await files.upload(owner, request))
        finally:
            ticket.leave()

    def _check_origin(self, request: Request) -> None:
        """Refuses what other web pages may send without asking. Raises ApiError."""
        origin, allowed = request.headers.get("origin"), self._config.allowed_origins
        if origin is None or origin in allowed or "*" in allowed:
            return
        if origin.partition("://")[2] != request.headers.get("host"):
            raise ApiError(
                403,
                f"Origin: {origin[:200]!r} may not use this server; --allow-origin lets it",
                param="Origin",
                code="wrong_origin",
            )

    async def list_files(self, request: Request) -> StoredAnswer:
        files, _, owner = self._stored(request)
        found = [file.model_dump() for file in files.list(owner)]
        return StoredAnswer(page(found, request.query_params, most=10_000))

    async def file(self, request: Request) -> Response:
        files, _, owner = self._stored(request)
        return _json(files.get(owner, request.path_params["id"]))

    async def delete_file(self, request: Request) -> Response:
        files, batches, owner = self._stored(request)
        id = files.get(owner, request.path_params["id"]).id
        batches.check_unused(id)
        files.delete(owner, id)
        return _json(batch_schemas.DeletedFile(id=id))

    async def file_content(self, request: Request) -> FileAnswer:
        files, _, owner = self._stored(request)
        return FileAnswer(files.path(files.get(owner, request.path_params["id"]).id))

    async def create_batch(self, request: Request) -> Response:
        _, batches, owner = self._stored(request)
        ticket = self.limiter.enter(_tenant(request), queues=False)
        try:
            body = await self._with_body(
                request, ticket, lambda raw: self._parse(raw, batch_schemas.BatchRequest)
            )
            return _json(await batches.create(owner, body))
        finally:
            ticket.leave()

    async def list_batches(self, request: Request) -> StoredAnswer:
        _, batches, owner = self._stored(request)
        found = [batch.model_dump() for batch in batches.list(owner)]
        return StoredAnswer(page(found, request.query_params))

    async def batch(self, request: Request) -> Response:
        _, batches, owner = self._stored(request)
        return _json(batches.get(owner, request.path_params["id"]))

    async def cancel_batch(self, request: Request) -> Response:
        _, batches, owner = self._stored(request)
        return _json(await batches.cancel(owner, request.path_params["id"]))

    # ---- the models ----------------------------------------------------------------------------

    @property
    def _max_lens(self) -> dict[str, int]:
        """The token limit of each model, by name."""
        embedder = self._embedder
        return {} if embedder is None else {embedder.name: embedder.max_tokens}

    async def models(self, request: Request) -> Response:
        return _json(schemas.ModelList(data=list(map(self._card, self._max_lens))))

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._max_lens:
            raise model_not_found(name, next(iter(self._max_lens)))
        return _json(self._card(name))

    def _card(self, name: str) -> schemas.ModelCard:
        return schemas.ModelCard(
            id=name,
            created=self._created,
            max_model_len=self._max_lens[name],
            parent=self._parent(name),
            quantization=self._quantization(name),
            features=self._features(name),
        )

    def _quantization(self, name: str) -> str | None:
        return None

    def _features(self, name: str) -> list[str]:
        return ["scores"] if self._score_reader is not None else ["embeddings"]

    def _parent(self, name: str) -> str | None:
        """The model that an adapter changes; None: it is a model."""
        return None

    # ---- the server itself ---------------------------------------------------------------------

    async def health(self, request: Request) -> Response:
        status = self._status()
        return _json(schemas.Health(status=status), 200 if status == "ok" else 503)

    async def version(self, request: Request) -> Response:
        return _json(schemas.Version(version=metadata.version("jax_attn")))

    async def metrics_text(self, request: Request) -> Response:
        self._need_operator(request, "/metrics")
        return Response(self._metrics.text(), headers={"Content-Type": self._metrics.content_type})

    @property
    def _has_keys(self) -> bool:
        return bool(self._config.api_keys or self._config.operator_keys)

    def _is_operator(self, request: Request) -> bool:
        """Whether the caller may see all tenants' data: an operator, or the server's only user."""
        if not self._has_keys:
            return not self._config.is_public
        is_alone = len(self._config.api_keys) == 1 and not self._config.operator_keys
        return is_alone or getattr(request.state, "is_operator", False)

    def _need_operator(self, request: Request, path: str) -> None:
        if not self._is_operator(request):
            needed = "an operator's key" if self._has_keys else "a key"
            option = "--operator-key-file" if self._has_keys else "--api-key-file"
            raise ApiError(
                403,
                f"{path} shows what others do, and needs {needed}: start the server with {option}",
                code="operators_only",
            )

    # ---- bodies and errors ---------------------------------------------------------------------

    async def _with_body(
        self, request: Request, ticket: Ticket, work: Callable[..., Result], *args: Any
    ) -> Result:
        """Returns work(body, *args), run in a thread. Limits the body's length and time.

        Raises:
          ApiError: 400, 408, 413, 415 or 429.
        """
        # Any web page that the user visits could send other types without asking first.
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if request.url.path.startswith("/api/"):
            self._check_origin(request)  # Ollama's clients send any type, or none
        elif media_type != "application/json":
            raise ApiError(415, "Content-Type: expected application/json", param="Content-Type")
        config = self._config
        raw = await self._read(request, ticket, config.max_body_bytes, config.body_timeout)
        job = partial(work, raw, *args)
        try:
            if self._fetcher is None:
                return await self._body_threads.run(ticket, len(raw), job)
            try:
                return await self._body_threads.run(ticket, len(raw), partial(_knowing, {}, job))
            except PicturesWanted as wanted:
                fetched = await self._fetched(ticket, wanted)
            return await self._body_threads.run(ticket, len(raw), partial(_knowing, fetched, job))
        finally:
            ticket.give_back("body_bytes")

    async def _fetched(self, ticket: Ticket, wanted: PicturesWanted) -> Mapping[str, bytes]:
        assert self._fetcher is not None
        try:
            found = await self._fetcher.fetch(ticket.tenant, wanted.urls)
        except FetchError as error:
            first = next(iter(wanted.urls.values()))
            raise bad_field(wanted.urls.get(error.url, first), str(error)) from None
        ticket.take(body_bytes=sum(map(len, found.values())))
        return found

    async def _read(
        self, request: Request, ticket: Ticket | None, limit: int, seconds: float
    ) -> bytes:
        """The body. ticket: whose bytes those of long bodies are; None: nobody's.

        Raises ApiError: it is too long, or too late.
        """
        try:
            async with asyncio.timeout(seconds):
                return await self._read_all(request, ticket, limit)
        except TimeoutError:
            message = f"the body took longer than {seconds:g} s"
            raise ApiError(408, message, code="timeout") from None

    async def _read_all(self, request: Request, ticket: Ticket | None, limit: int) -> bytes:
        too_long = ApiError(413, f"the body is longer than {limit} bytes", code="body_too_large")
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > limit:
            raise too_long
        raw, num_taken = bytearray(), BodyThreads.LONG_BYTES  # short ones do not count
        async for chunk in request.stream():
            raw += chunk
            if len(raw) > limit:
                raise too_long
            if ticket is not None and len(raw) > num_taken:
                ticket.take(body_bytes=len(raw) - num_taken)
                num_taken = len(raw)
        return bytes(raw)

    async def on_api_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        if request.url.path.startswith(("/v1/", "/api/")):
            if error.status in (400, 413, 415):
                self._metrics.count("invalid")
            elif error.status == 429:
                self._metrics.count("rejected")
        return error_response(error, request.url.path)


def _knowing(fetched: Mapping[str, bytes], job: Callable[[], Result]) -> Result:
    """Runs a job that may use these pictures."""
    token = FETCHED.set(fetched)
    try:
        return job()
    finally:
        FETCHED.reset(token)


class _TextServer(_Server):
    """Adds the routes of a text model, and the engine that runs it."""

    def __init__(
        self,
        engine: ServedEngine,
        model: ServedModel,
        config: ServerConfig,
        embedding: tuple[models.EmbeddingModel, ServedEmbedder] | None,
    ):
        super().__init__(config, embedding, engine)
        self._engine: ServedEngine = engine
        directory = config.model_directory
        self._prepare = Preparer(
            model,
            engine,
            directory,
            (config.model_name, *config.model_aliases),
            self._limits,
            sampling_defaults(directory) if config.generation_config else {},
            config.vision,
            config.max_pictures,
        )
        self._messages = MessagesApi(self._prepare)
        self._facts = ModelFacts.of(model.config, directory)
        if self._embedder is not None and self._embedder.name in self._prepare.names:
            raise ValueError(f"two models are called {self._embedder.name!r}")
        for adapter in config.adapters:
            self._check_adapter_name(adapter)
            self._prepare.adapters.append(adapter)
        token_bytes = TokenBytes(model.tokenizer)
        of_tokens = token_bytes, token_bytes.strips_first_space()
        # By whether a request names tokens by their ids.
        self._token_json = {False: TokenJson(*of_tokens), True: TokenIdJson(*of_tokens)}
        self._responses = ResponsesApi(self._prepare, self._token_json[False])
        self._ollama = OllamaApi(self._prepare, self._facts, self._token_json[False])
        self._page, self._page_policy = _read_page()
        self._cache_watch = CacheWatch(engine)
        self._views: dict[str, tuple[float, asyncio.Future[bytes]]] = {}  # by tenant

    @property
    def _max_lens(self) -> dict[str, int]:
        names = [*self._prepare.names, *self._prepare.adapters]
        return dict.fromkeys(names, self._prepare.max_model_len) | super()._max_lens

    def _parent(self, name: str) -> str | None:
        return self._prepare.name if name in self._prepare.adapters else None

    def _quantization(self, name: str) -> str | None:
        return None if name in super()._max_lens else self._facts.quantization

    def _features(self, name: str) -> list[str]:
        return super()._features(name) if name in super()._max_lens else self._prepare.features

    # ---- generation ----------------------------------------------------------------------------

    async def completions(self, request: Request) -> GenerationAnswer:
        return await self._generate(request, self._prepare_completion)

    def _prepare_completion(self, raw: bytes, caller: Caller) -> tuple[Prepared, MakeAnswer]:
        body = self._parse(raw, schemas.CompletionRequest)
        prepared = self._prepare.completion(body, caller)
        tokens = self._token_json[body.return_tokens_as_token_ids]
        style = CompletionStyle(prepared, body.logprobs is not None, tokens)
        return prepared, _with_choices(style, body)

    async def chat_completions(self, request: Request) -> GenerationAnswer:
        return await self._generate(request, self._prepare_chat)

    def _prepare_chat(self, raw: bytes, caller: Caller) -> tuple[Prepared, MakeAnswer]:
        body = self._parse(raw, schemas.ChatCompletionRequest)
        prepared = self._prepare.chat(body, caller)
        tokens = self._token_json[body.return_tokens_as_token_ids]
        style = ChatStyle(prepared, body.logprobs, tokens)
        return prepared, _with_choices(style, body)

    async def responses(self, request: Request) -> GenerationAnswer | StoredAnswer:
        def prepare(raw: bytes, caller: Caller) -> tuple[Prepared, MakeAnswer]:
            body = self._parse(raw, response_schemas.ResponsesRequest)
            return self._responses.prepare(body, caller)

        answer = await self._generate(request, prepare)
        if isinstance(answer, ResponseAnswer) and answer.is_background:
            return self._responses.start(_tenant(request), answer)
        return answer

    async def messages(self, request: Request) -> GenerationAnswer:
        def prepare(raw: bytes, caller: Caller) -> tuple[Prepared, MakeAnswer]:
            body = self._parse(raw, message_schemas.MessagesRequest)
            return self._messages.prepare(body, caller)

        return await self._generate(request, prepare)

    async def ollama_chat(self, request: Request) -> GenerationAnswer:
        def prepare(raw: bytes, caller: Caller) -> tuple[Prepared, MakeAnswer]:
            body = self._parse(raw, ollama_schemas.OllamaChatRequest)
            return self._ollama.prepare_chat(body, caller)

        return await self._generate(request, prepare)

    async def ollama_generate(self, request: Request) -> GenerationAnswer:
        def prepare(raw: bytes, caller: Caller) -> tuple[Prepared, MakeAnswer]:
            body = self._parse(raw, ollama_schemas.GenerateRequest)
            return self._ollama.prepare_generate(body, caller)

        return await self._generate(request, prepare)

    async def ollama_show(self, request: Request) -> Response:
        def work(raw: bytes) -> bytes:
            body = self._parse(raw, ollama_schemas.ShowRequest)
            return self._ollama.show(body).model_dump_json().encode()

        return await self._transform(request, work)

    async def ollama_models(self, request: Request) -> Response:
        return _json(self._ollama.models())

    async def ollama_running(self, request: Request) -> Response:
        return _json(self._ollama.running())

    async def _generate(
        self,
        request: Request,
        prepare: Callable[[bytes, Caller], tuple[Prepared, MakeAnswer]],
    ) -> GenerationAnswer:
        self._need_ready()
        record = request.state.record
        tenant = _tenant(request)
        ticket = self.limiter.enter(tenant, queues=True)
        try:
            caller = Caller(tenant, record.arrival)
            prepared, make = await self._with_body(request, ticket, prepare, caller)
            _take(ticket, record, prepared)
        except BaseException:
            ticket.leave()
            raise
        return make(self._engine, prepared, self._metrics, ticket, record)

    async def response(self, request: Request) -> StoredAnswer:
        if request.query_params.get("stream", "false") != "false":
            raise bad_field("stream", "the events of a stored response are not kept; leave it out")
        return self._responses.stored(_tenant(request), request.path_params["id"])

    async def delete_response(self, request: Request) -> Response:
        return _json(await self._responses.delete(_tenant(request), request.path_params["id"]))

    async def cancel_response(self, request: Request) -> StoredAnswer:
        return await self._responses.cancel(_tenant(request), request.path_params["id"])

    async def input_items(self, request: Request) -> StoredAnswer:
        id, query = request.path_params["id"], request.query_params
        return StoredAnswer(self._responses.input_items(_tenant(request), id, query))

    async def count_response_tokens(self, request: Request) -> Response:
        def work(raw: bytes) -> bytes:
            body = self._parse(raw, response_schemas.InputTokensRequest)
            return self._responses.count(body, _tenant(request)).model_dump_json().encode()

        return await self._transform(request, work)

    async def _end_background(self) -> None:
        await self._responses.close()

    # ---- conversations -------------------------------------------------------------------------

    async def create_conversation(self, request: Request) -> Response:
        def work(raw: bytes) -> bytes:
            body = self._parse(raw, response_schemas.ConversationRequest)
            made = self._responses.conversations.create(_tenant(request), body)
            return made.model_dump_json().encode()

        return await self._transform(request, work)

    async def conversation(self, request: Request) -> Response:
        found = self._responses.conversations.get(_tenant(request), request.path_params["id"])
        return _json(found.shown())

    async def update_conversation(self, request: Request) -> Response:
        def work(raw: bytes) -> bytes:
            body = self._parse(raw, response_schemas.ConversationUpdate)
            tenant, id = _tenant(request), request.path_params["id"]
            changed = self._responses.conversations.update(tenant, id, body)
            return changed.model_dump_json().encode()

        return await self._transform(request, work)

    async def delete_conversation(self, request: Request) -> Response:
        id = request.path_params["id"]
        return _json(self._responses.conversations.delete(_tenant(request), id))

    async def conversation_items(self, request: Request) -> StoredAnswer:
        id, query = request.path_params["id"], request.query_params
        return StoredAnswer(self._responses.conversations.items(_tenant(request), id, query))

    async def add_items(self, request: Request) -> Response:
        def work(raw: bytes) -> bytes:
            body = self._parse(raw, response_schemas.ItemsRequest)
            tenant, id = _tenant(request), request.path_params["id"]
            return self._responses.conversations.add(tenant, id, body)

        return await self._transform(request, work)

    async def conversation_item(self, request: Request) -> StoredAnswer:
        names = request.path_params
        item = self._responses.conversations.item(_tenant(request), names["id"], names["item"])
        return StoredAnswer(json.dumps(item).encode())

    async def remove_item(self, request: Request) -> Response:
        names, conversations = request.path_params, self._responses.conversations
        return _json(conversations.remove(_tenant(request), names["id"], names["item"]))

    # ---- tokens --------------------------------------------------------------------------------

    async def tokenize(self, request: Request) -> Response:
        def work(raw: bytes) -> bytes:
            tokens = self._prepare.tokenize(self._parse(raw, schemas.TokenizeRequest))
            answer = schemas.TokenizeResponse(
                tokens=tokens, count=len(tokens), max_model_len=self._prepare.max_model_len
            )
            return answer.model_dump_json().encode()

        return await self._transform(request, work)

    async def count_message_tokens(self, request: Request) -> Response:
        def work(raw: bytes) -> bytes:
            body = self._parse(raw, message_schemas.CountRequest)
            return self._messages.count(body).model_dump_json().encode()

        return await self._transform(request, work)

    async def detokenize(self, request: Request) -> Response:
        def work(raw: bytes) -> bytes:
            text = self._prepare.detokenize(self._parse(raw, schemas.DetokenizeRequest))
            return schemas.DetokenizeResponse(prompt=text).model_dump_json().encode()

        return await self._transform(request, work)

    async def _transform(self, request: Request, work: Callable[[bytes], bytes]) -> Response:
        ticket = self.limiter.enter(_tenant(request), queues=False)
        try:
            answer = await self._with_body(request, ticket, work)
        finally:
            ticket.leave()
        return Response(answer, headers=_NO_STORE, media_type="application/json")

    # ---- weights -------------------------------------------------------------------------------

    async def weights(self, request: Request) -> Response:
        body = await self._operators_body(request, schemas.WeightsRequest)
        path = self._operators_directory(body.path)
        return await self._control(
            "weights", directory=path, version=body.version, keep_prefixes=body.keep_prefixes
        )

    def _operators_directory(self, name: str) -> Path:
        """A directory below --weights-directory. Raises ApiError."""
        assert self._config.weights_directory is not None
        top = self._config.weights_directory.resolve()
        path = (top / name).resolve()
        if not path.is_relative_to(top) or not path.is_dir():
            raise bad_field("path", f"{name[:200]!r} is no directory below --weights-directory")
        return path

    async def pause(self, request: Request) -> Response:
        body = await self._operators_body(request, schemas.PauseRequest)
        return await self._control("pause", end=body.end)

    async def resume(self, request: Request) -> Response:
        await self._operators_body(request, schemas.ResumeRequest)
        return await self._control("resume")

    # ---- adapters ------------------------------------------------------------------------------

    def _check_adapter_name(self, name: str) -> None:
        """Raises ValueError for the name of a model."""
        taken = [*self._prepare.names, *([self._embedder.name] if self._embedder else ())]
        if name in taken or "\0" in name:
            raise ValueError(f"lora: expected a name that no model has, got {name!r}")

    async def load_lora(self, request: Request) -> Response:
        body = await self._operators_body(request, schemas.LoraRequest)
        path = self._operators_directory(body.path)
        try:
            self._check_adapter_name(body.name)
        except ValueError as error:
            raise bad_field("name", str(error)) from None
        await self._control("lora", adapter=body.name, directory=path)
        if body.name not in self._prepare.adapters:
            self._prepare.adapters.append(body.name)
        return _json(self._card(body.name))

    async def unload_lora(self, request: Request) -> Response:
        self._need_weights_operator(request)
        name = request.path_params["name"]
        if name not in self._prepare.adapters:
            raise ApiError(404, f"no adapter is called {name[:200]!r}", code="model_not_found")
        # First here, so that no request names it that the engine would not know.
        self._prepare.adapters.remove(name)
        return await self._control("unload", adapter=name)

    # ---- requests that move between servers ----------------------------------------------------

    async def hand_over(self, request: Request) -> Response:
        """Begins a request here, and returns what `go_on` of another server continues."""
        self._need_hand_over(request)
        record = request.state.record
        ticket = self.limiter.enter(_tenant(request), queues=True)
        try:
            caller = Caller(ticket.tenant, record.arrival)

            def prepare(raw: bytes) -> tuple[schemas.HandOverRequest, Prepared]:
                body = self._parse(raw, schemas.HandOverRequest)
                return body, self._prepare_moving(body, caller)[0]

            body, prepared = await self._with_body(request, ticket, prepare)
            _take(ticket, record, prepared)
            (seq,) = prepared.sequences
            so_far = {"path": body.path, "body": body.body}
            work = self._engine.hand_over(seq, body.num_tokens, so_far)
            data = await while_connected(request, work)
        finally:
            ticket.leave()
        if len(data) > self._config.max_hand_over_bytes:
            raise ApiError(
                413,
                f"the request has {len(data)} bytes: expected at most --hand-over-bytes ="
                f" {self._config.max_hand_over_bytes}",
                code="too_many_bytes",
            )
        return Response(data, media_type=_BYTES)

    async def go_on(self, request: Request) -> GenerationAnswer:
        """Answers a request that another server has begun, from its first token on."""
        self._need_hand_over(request)
        if request.headers.get("content-type", "") != _BYTES:
            raise ApiError(415, f"Content-Type: expected {_BYTES}", param="Content-Type")
        record = request.state.record
        ticket = self.limiter.enter(_tenant(request), queues=True)
        try:
            limit = self._config.max_hand_over_bytes
            data = await self._read(request, None, limit, _MOVE_SECONDS)
            caller = Caller(ticket.tenant, record.arrival)

            def prepare() -> tuple[Prepared, MakeAnswer]:
                try:
                    so_far = HandedOver.read_so_far(data)
                except ValueError as error:
                    raise not_handed_over(f"expected an answer of /v1/hand_over: {error}") from None
                asked = json.dumps({name: so_far.get(name) for name in ("path", "body")})
                body = self._parse(asked.encode(), schemas.HandOverRequest)
                return self._prepare_moving(body, caller)

            prepared, make = await self._body_threads.run(ticket, len(data), prepare)
            _take(ticket, record, prepared)
        except BaseException:
            ticket.leave()
            raise
        return make(Continued(self._engine, data), prepared, self._metrics, ticket, record)

    def _prepare_moving(
        self, moving: schemas.HandOverRequest, caller: Caller
    ) -> tuple[Prepared, MakeAnswer]:
        ways = {
            "/v1/completions": self._prepare_completion,
            "/v1/chat/completions": self._prepare_chat,
        }
        prepared, make = ways[moving.path](json.dumps(moving.body).encode(), caller)
        if (num := len(prepared.sequences)) != 1:
            raise bad_field("body", f"expected one prompt and one choice, got {num} together")
        if prepared.sequences[0].pictures:
            raise bad_field("body", "expected a request without pictures")
        if prepared.beams is not None:
            raise bad_field("body", "expected a request without use_beam_search")
        return prepared, make

    def _need_hand_over(self, request: Request) -> None:
        """Raises ApiError unless the request is an operator's, requests may move, and the engine
        runs."""
        if not self._config.max_hand_over_bytes:
            raise ApiError(
                404,
                f"{request.url.path}: requests of this server do not move; --hand-over-bytes lets"
                " them",
                code="no_hand_over",
            )
        self._need_operators_key(request)
        self._need_ready()

    # ---- operators -----------------------------------------------------------------------------

    async def _operators_body(self, request: Request, model: type[Body]) -> Body:
        """The body of an operator's request. Raises ApiError, also where weights cannot change."""
        self._need_weights_operator(request)
        ticket = self.limiter.enter(_tenant(request), queues=False)
        try:
            return await self._with_body(request, ticket, lambda raw: self._parse(raw, model))
        finally:
            ticket.leave()

    def _need_weights_operator(self, request: Request) -> None:
        """Raises ApiError unless the request is an operator's and weights may change."""
        if self._config.weights_directory is None:
            raise ApiError(
                404,
                f"{request.url.path}: this server's weights do not change; --weights-directory"
                " lets them",
                code="weights_are_fixed",
            )
        self._need_operators_key(request)

    def _need_operators_key(self, request: Request) -> None:
        """Raises ApiError unless the request has the key of an operator."""
        if not getattr(request.state, "is_operator", False):
            raise ApiError(
                403,
                f"{request.url.path} needs an operator's key: start the server with"
                " --operator-key-file",
                code="operators_only",
            )

    async def _control(self, name: str, **options: Any) -> Response:
        self._need_ready()
        try:
            version = await self._engine.control(name, **options)
        except ValueError as error:
            raise bad_field("path", str(error)) from None
        except EngineStopped:
            raise ApiError(503, "the server is shutting down", code="draining") from None
        return _json(schemas.Weights(version=version))

    # ---- the live view -------------------------------------------------------------------------

    async def debug_state(self, request: Request) -> Response:
        """The engine's snapshot: a tenant sees its own part, an operator all but others' texts."""
        if self._config.is_public and not self._has_keys:
            self._need_operator(request, "/debug/state")
        body = json.dumps({"status": self._status(), "model": self._prepare.name}).encode()
        if self._engine.ready:
            body = body[:-1] + b", " + (await self._view(request))[1:]
        return Response(body, media_type="application/json", headers=_NO_STORE)

    async def cache_events(self, request: Request) -> CacheEventsAnswer:
        self._need_operator(request, "/debug/cache_events")
        self._need_ready()
        return CacheEventsAnswer(self._cache_watch)

    async def _view(self, request: Request) -> bytes:
        """Makes the JSON of the data that the caller may see.

        This takes some 10 ms, so a tenant's view is reused for VIEW_SECONDS, however often it asks.
        """
        tenant = _tenant(request)
        begin, view = self._views.get(tenant, (-math.inf, None))
        if view is None or time.monotonic() > begin + VIEW_SECONDS:
            view = asyncio.ensure_future(self._make_view(tenant, self._is_operator(request)))
            self._views[tenant] = (time.monotonic(), view)
        return await asyncio.shield(view)

    async def _make_view(self, tenant: str, sees_all: bool) -> bytes:
        snapshot = await self._engine.snapshot() | {"stats": self._engine.stats()}

        def owns(namespace: str) -> bool:
            return owner(namespace) == tenant

        def make() -> bytes:
            seen = debug_state.seen_by(snapshot, owns, sees_all, self._texts)
            return json.dumps(seen).encode()

        return await asyncio.to_thread(make)

    def _texts(self, tokens: list[list[int]]) -> list[str]:
        return self._prepare.decode_all([each[:_TREE_TOKENS] for each in tokens])

    async def openapi(self, request: Request) -> Response:
        # Made when it is wanted, as that takes as long as all else of the application.
        description = await asyncio.to_thread(openapi.as_json)
        return Response(description, media_type="application/json")

    async def page(self, request: Request) -> Response:
        headers = {"Content-Security-Policy": self._page_policy, **_NO_STORE}
        return Response(self._page, media_type="text/html", headers=headers)


def _with_choices(style: Style, body: schemas.SamplingBody) -> MakeAnswer:
    options = body.stream_options
    return partial(
        ChoicesAnswer,
        style,
        stream=body.stream,
        include_usage=options is not None and options.include_usage,
    )


_NO_ENGINE = 1024, 0  # limits on one key's waiting and running requests if there is no engine
_NO_STORE = {"Cache-Control": "no-store"}


def _take(ticket: Ticket, record: Record, prepared: Prepared) -> None:
    """Takes what a request is of its key's limits. Raises ApiError."""
    record.num_prompt = prepared.num_prompt_tokens
    ticket.take(
        choices=len(prepared.sequences),
        tokens=prepared.num_prompt_tokens * prepared.num_choices,
        picture_bytes=sum(len(each.pixels) for each in prepared.sequences[0].pictures),
    )


def _tenant(request: Request) -> str:
    return getattr(request.state, "tenant", "")


def _json(body: BaseModel, status: int = 200) -> Response:
    return Response(body.model_dump_json(), status, _NO_STORE, media_type="application/json")


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Answers Starlette's errors: unknown route or method."""
    assert isinstance(error, HTTPException)
    api_error = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    api_error.headers.update(error.headers or {})
    return error_response(api_error, request.url.path)


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=400)  # the client left in the middle of its body; nobody reads this


async def _on_bug(request: Request, error: Exception) -> Response:
    """Answers 500. Starlette logs the exception; the client gets no details."""
    api_error = ApiError(500, "internal error", code="internal_error")
    # The access log does not see this.
    if (record := getattr(request.state, "record", None)) is not None:
        api_error.headers["X-Request-Id"] = record.id
    return error_response(api_error, request.url.path)


def _read_page() -> tuple[bytes, str]:
    """The web page, and a policy that allows only its own script and style."""
    page = _PAGE.read_bytes()

    def hashes(tag: str) -> str:
        parts = re.findall(rb"<%b>(.*?)</%b>" % (tag.encode(), tag.encode()), page, re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(part).digest()).decode() for part in parts]
        return " ".join(f"'sha256-{digest}'" for digest in digests)

    return page, (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
