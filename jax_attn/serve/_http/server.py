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
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
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

from jax_attn import models
from jax_attn.serve._http import bodies, debug_state, openapi
from jax_attn.serve._http.auth import Authenticate, LoopbackHost
from jax_attn.serve._http.body_threads import Lanes
from jax_attn.serve._http.connection import DiscardBody
from jax_attn.serve._openai import fields, response_schemas, schemas
from jax_attn.serve._openai.access_log import AccessLog, Record
from jax_attn.serve._openai.answers import ChoicesAnswer, GenerationAnswer
from jax_attn.serve._openai.embeddings import (
    EmbeddingReader,
    EmbeddingRequest,
    EmbeddingResponse,
    PreparedEmbeddings,
)
from jax_attn.serve._openai.errors import ApiError, model_not_found
from jax_attn.serve._openai.limits import Gate, KeyLimits, Ticket
from jax_attn.serve._openai.logprobs import TokenJson
from jax_attn.serve._openai.metrics import Metrics
from jax_attn.serve._openai.prepare import (
    Caller,
    Prepared,
    Preparer,
    sampling_defaults,
)
from jax_attn.serve._openai.response_format import ChatStyle, CompletionStyle, Style
from jax_attn.serve._openai.responses_api import ResponsesApi, StoredAnswer
from jax_attn.serve._openai.served_models import ServedEmbedder, ServedModel
from jax_attn.serve._scheduling.protocols import ServedEngine
from jax_attn.serve._scheduling.tenants import owner
from jax_attn.serve._text.token_bytes import TokenBytes

log = logging.getLogger("jax_attn.serve")

_PAGE = Path(__file__).parents[1] / "static" / "index.html"
_RETRY_AFTER_SECONDS = 5
_TREE_TOKENS = 32  # tokens shown of each node in the live view
VIEW_SECONDS = 0.25  # how long a live view is reused

Body = TypeVar("Body", bound=BaseModel)
Result = TypeVar("Result")
# Factory that takes GenerationAnswer's first arguments.
MakeAnswer: TypeAlias = Callable[
    [ServedEngine, Prepared, Metrics, Ticket, Record], GenerationAnswer
]


@dataclass(frozen=True)
class ServerConfig:
    model_directory: Path
    model_name: str
    model_aliases: tuple[str, ...] = ()  # other names, which requests may use
    strict: bool = False  # refuse unknown fields instead of ignoring them
    generation_config: bool = True  # use the sampling defaults of the model directory
    api_keys: tuple[str, ...] = ()
    operator_keys: tuple[str, ...] = ()  # keys that also see /metrics and all of /debug/state
    key_limits: KeyLimits | None = None  # None: KeyLimits.default
    # Other machines can reach the server: without keys /metrics and /debug/state are refused.
    is_public: bool = False
    access_log: bool = True
    check_host: bool = False  # only answer to names of this machine; see auth.LoopbackHost
    allowed_origins: tuple[str, ...] = ()  # origins of web pages that may use the server; "*": all
    max_body_bytes: int = 4 << 20
    body_timeout: float = 30.0  # seconds for a client to send its body


# Routes that need a text model, served by _TextServer.
_TEXT_ROUTES = [
    ("/v1/completions", "completions", "POST"),
    ("/v1/chat/completions", "chat_completions", "POST"),
    ("/v1/responses", "responses", "POST"),
    ("/v1/responses/{id}", "response", "GET"),
    ("/v1/responses/{id}", "delete_response", "DELETE"),
    ("/v1/responses/{id}/cancel", "cancel_response", "POST"),
    ("/tokenize", "tokenize", "POST"),
    ("/detokenize", "detokenize", "POST"),
    ("/debug/state", "debug_state", "GET"),
    ("/openapi.json", "openapi", "GET"),
    ("/", "page", "GET"),
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
      embedding: a model for /v1/embeddings, and what runs it, not started.

    Raises:
      ValueError: a file of the directory cannot be used; chat.ChatTemplateError is one.
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
    middleware = [Middleware(AccessLog, enabled=config.access_log), Middleware(DiscardBody)]
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
    app = Starlette(
        routes=[
            *text_routes,
            Route("/v1/embeddings", server.embeddings, methods=["POST"]),
            Route("/v1/models", server.models),
            Route("/v1/models/{name:path}", server.model),
            Route("/health", server.health),
            Route("/version", server.version),
            Route("/metrics", server.metrics_text),
        ],
        middleware=middleware,
        exception_handlers={
            ApiError: server.on_api_error,
            HTTPException: _on_http_exception,
            ClientDisconnect: _on_disconnect,
            Exception: _on_bug,
        },
        lifespan=server.lifespan,
    )
    app.state.server = server
    return app


class _Server:
    """Routes that need no text model: embeddings, models, and those about the server."""

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
        self.gate, self._lanes = Gate(engine, limits), Lanes()
        self._limits = limits
        self._embedder, self._embedding_reader = None, None
        if embedding is not None:
            self._embedder = embedding[1]
            self._embedding_reader = EmbeddingReader(*embedding)
        self._unknown = None if config.strict else fields.UnknownFields()
        self._created = int(time.time())
        self._draining = self._embedder_is_ready = False

    @contextlib.asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        if self._embedder is not None:
            self._embedder.start(on_ready=self._on_embedder_ready)
        elif self._engine is not None:
            self._engine.start()
        yield
        # Every connection is closed by now, so nobody waits for the jobs that still run.
        if self._embedder is not None:
            await asyncio.to_thread(self._embedder.stop)
        if self._engine is not None:
            await self._engine.stop(drain=False)
        self._lanes.close()

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

    # ---- embeddings ----------------------------------------------------------------------------

    async def embeddings(self, request: Request) -> EmbeddingResponse:
        embedder, reader = self._embedder, self._embedding_reader
        if embedder is None or reader is None:
            raise ApiError(
                404,
                "no embedding model is served here; --embedding-model does",
                code="model_not_found",
            )
        self._need_ready()
        record = request.state.record

        def prepare(raw: bytes) -> PreparedEmbeddings:
            return reader.prepare(self._parse(raw, EmbeddingRequest))

        ticket = self.gate.enter(_tenant(request), queues=False)
        try:
            prepared = await self._with_body(request, ticket, prepare)
            record.num_prompt = prepared.num_tokens
            num_bytes = 4 * embedder.size * len(prepared.sequences)
            ticket.take(tokens=prepared.num_tokens, embedding_bytes=num_bytes)
        except BaseException:
            ticket.leave()
            raise
        return EmbeddingResponse(embedder, reader, prepared, self._metrics, ticket, record)

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
        longest = self._max_lens[name]
        return schemas.ModelCard(id=name, created=self._created, max_model_len=longest)

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
        if media_type != "application/json":
            raise ApiError(415, "Content-Type: expected application/json", param="Content-Type")
        try:
            async with asyncio.timeout(self._config.body_timeout):
                raw = await self._read(request, ticket)
        except TimeoutError:
            raise ApiError(
                408, f"the body took longer than {self._config.body_timeout:g} s", code="timeout"
            ) from None
        try:
            return await self._lanes.run(ticket, len(raw), work, raw, *args)
        finally:
            ticket.give_back("body_bytes")

    async def _read(self, request: Request, ticket: Ticket) -> bytes:
        limit = self._config.max_body_bytes
        too_long = ApiError(413, f"the body is longer than {limit} bytes", code="body_too_large")
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > limit:
            raise too_long
        raw, num_taken = bytearray(), Lanes.LONG_BYTES  # short ones do not count
        async for chunk in request.stream():
            raw += chunk
            if len(raw) > limit:
                raise too_long
            if len(raw) > num_taken:
                ticket.take(body_bytes=len(raw) - num_taken)
                num_taken = len(raw)
        return bytes(raw)

    async def on_api_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        if request.url.path.startswith("/v1/"):
            if error.status in (400, 413, 415):
                self._metrics.count("invalid")
            elif error.status == 429:
                self._metrics.count("rejected")
        return error.response()


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
        )
        self._responses = ResponsesApi(self._prepare)
        if self._embedder is not None and self._embedder.name in self._prepare.names:
            raise ValueError(f"two models are called {self._embedder.name!r}")
        self._token_json = TokenJson(TokenBytes(model.tokenizer))
        self._description = json.dumps(openapi.describe()).encode()
        self._page, self._page_policy = _read_page()
        self._views: dict[str, tuple[float, asyncio.Future[bytes]]] = {}  # by tenant

    @property
    def _max_lens(self) -> dict[str, int]:
        return dict.fromkeys(self._prepare.names, self._prepare.max_model_len) | super()._max_lens

    # ---- generation ----------------------------------------------------------------------------

    async def completions(self, request: Request) -> GenerationAnswer:
        def prepare(raw: bytes, caller: Caller) -> tuple[Prepared, MakeAnswer]:
            body = self._parse(raw, schemas.CompletionRequest)
            prepared = self._prepare.completion(body, caller)
            style = CompletionStyle(prepared, body.logprobs is not None, self._token_json)
            return prepared, _with_choices(style, body)

        return await self._generate(request, prepare)

    async def chat_completions(self, request: Request) -> GenerationAnswer:
        def prepare(raw: bytes, caller: Caller) -> tuple[Prepared, MakeAnswer]:
            body = self._parse(raw, schemas.ChatCompletionRequest)
            prepared = self._prepare.chat(body, caller)
            style = ChatStyle(prepared, body.logprobs, self._token_json)
            return prepared, _with_choices(style, body)

        return await self._generate(request, prepare)

    async def responses(self, request: Request) -> GenerationAnswer:
        def prepare(raw: bytes, caller: Caller) -> tuple[Prepared, MakeAnswer]:
            body = self._parse(raw, response_schemas.ResponsesRequest)
            return self._responses.prepare(body, caller)

        return await self._generate(request, prepare)

    async def _generate(
        self,
        request: Request,
        prepare: Callable[[bytes, Caller], tuple[Prepared, MakeAnswer]],
    ) -> GenerationAnswer:
        self._need_ready()
        record = request.state.record
        tenant = _tenant(request)
        ticket = self.gate.enter(tenant, queues=True)
        try:
            caller = Caller(tenant, record.arrival)
            prepared, make = await self._with_body(request, ticket, prepare, caller)
            record.num_prompt = prepared.num_prompt_tokens
            ticket.take(
                choices=len(prepared.sequences),
                tokens=prepared.num_prompt_tokens * prepared.num_choices,
            )
        except BaseException:
            ticket.leave()
            raise
        return make(self._engine, prepared, self._metrics, ticket, record)

    async def response(self, request: Request) -> StoredAnswer:
        return self._responses.stored(_tenant(request), request.path_params["id"])

    async def delete_response(self, request: Request) -> Response:
        return _json(self._responses.delete(_tenant(request), request.path_params["id"]))

    async def cancel_response(self, request: Request) -> NoReturn:
        self._responses.cancel(_tenant(request), request.path_params["id"])

    # ---- tokens --------------------------------------------------------------------------------

    async def tokenize(self, request: Request) -> Response:
        def work(raw: bytes) -> bytes:
            tokens = self._prepare.tokenize(self._parse(raw, schemas.TokenizeRequest))
            answer = schemas.TokenizeResponse(
                tokens=tokens, count=len(tokens), max_model_len=self._prepare.max_model_len
            )
            return answer.model_dump_json().encode()

        return await self._transform(request, work)

    async def detokenize(self, request: Request) -> Response:
        def work(raw: bytes) -> bytes:
            text = self._prepare.detokenize(self._parse(raw, schemas.DetokenizeRequest))
            return schemas.DetokenizeResponse(prompt=text).model_dump_json().encode()

        return await self._transform(request, work)

    async def _transform(self, request: Request, work: Callable[[bytes], bytes]) -> Response:
        ticket = self.gate.enter(_tenant(request), queues=False)
        try:
            answer = await self._with_body(request, ticket, work)
        finally:
            ticket.leave()
        return Response(answer, headers=_NO_STORE, media_type="application/json")

    # ---- the live view -------------------------------------------------------------------------

    async def debug_state(self, request: Request) -> Response:
        """The engine's snapshot: a tenant sees its own part, an operator all but others' texts."""
        if self._config.is_public and not self._has_keys:
            self._need_operator(request, "/debug/state")
        body = json.dumps({"status": self._status(), "model": self._prepare.name}).encode()
        if self._engine.ready:
            body = body[:-1] + b", " + (await self._view(request))[1:]
        return Response(body, media_type="application/json", headers=_NO_STORE)

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
        return Response(self._description, media_type="application/json")

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


def _tenant(request: Request) -> str:
    return getattr(request.state, "tenant", "")


def _json(body: BaseModel, status: int = 200) -> Response:
    return Response(body.model_dump_json(), status, _NO_STORE, media_type="application/json")


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Answers Starlette's errors: unknown route or method."""
    assert isinstance(error, HTTPException)
    api_error = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    api_error.headers.update(error.headers or {})
    return api_error.response()


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=400)  # the client left in the middle of its body; nobody reads this


async def _on_bug(request: Request, error: Exception) -> Response:
    """Answers 500. Starlette logs the exception; the client gets no details."""
    api_error = ApiError(500, "internal error", code="internal_error")
    # The access log does not see this.
    if (record := getattr(request.state, "record", None)) is not None:
        api_error.headers["X-Request-Id"] = record.id
    return api_error.response()


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
