"""/openapi.json: the routes, and the bodies as the pydantic models of `schemas` describe them."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from jax_attn.serve._anthropic import message_schemas
from jax_attn.serve._ollama import ollama_schemas
from jax_attn.serve._openai import batch_schemas, embeddings, response_schemas, schemas, scores
from jax_attn.serve._openai.errors import ErrorResponse

_POSTS: list[tuple[str, str, type[BaseModel], type[BaseModel]]] = [
    ("/v1/completions", "Continue a text", schemas.CompletionRequest, schemas.Completion),
    (
        "/v1/chat/completions",
        "Answer a conversation",
        schemas.ChatCompletionRequest,
        schemas.ChatCompletion,
    ),
    (
        "/v1/responses",
        "Answer a conversation, as OpenAI's Responses API has it",
        response_schemas.ResponsesRequest,
        response_schemas.ModelResponse,
    ),
    (
        "/v1/responses/input_tokens",
        "Tokens of such a conversation",
        response_schemas.InputTokensRequest,
        response_schemas.InputTokens,
    ),
    (
        "/v1/conversations",
        "Begin a conversation that responses continue",
        response_schemas.ConversationRequest,
        response_schemas.Conversation,
    ),
    (
        "/v1/conversations/{id}",
        "Replace a conversation's metadata",
        response_schemas.ConversationUpdate,
        response_schemas.Conversation,
    ),
    (
        "/v1/conversations/{id}/items",
        "Add items to a conversation",
        response_schemas.ItemsRequest,
        response_schemas.ItemList,
    ),
    (
        "/v1/messages",
        "Answer a conversation, as Anthropic's Messages API has it",
        message_schemas.MessagesRequest,
        message_schemas.MessageAnswer,
    ),
    (
        "/v1/messages/count_tokens",
        "Tokens of such a conversation",
        message_schemas.CountRequest,
        message_schemas.TokenCount,
    ),
    (
        "/api/chat",
        "Answer a conversation, as Ollama's API has it",
        ollama_schemas.OllamaChatRequest,
        ollama_schemas.OllamaChatAnswer,
    ),
    (
        "/api/generate",
        "Answer a text, as Ollama's API has it",
        ollama_schemas.GenerateRequest,
        ollama_schemas.GenerateAnswer,
    ),
    (
        "/api/show",
        "The model, as Ollama's API has it",
        ollama_schemas.ShowRequest,
        ollama_schemas.OllamaShown,
    ),
    (
        "/api/embed",
        "Vectors of texts, as Ollama's API has them",
        ollama_schemas.EmbedRequest,
        ollama_schemas.EmbedAnswer,
    ),
    (
        "/api/embeddings",
        "The vector of a text, likewise",
        ollama_schemas.OneEmbeddingRequest,
        ollama_schemas.OneEmbedding,
    ),
    (
        "/v1/batches",
        "Run a file of requests, with --files-directory",
        batch_schemas.BatchRequest,
        batch_schemas.Batch,
    ),
    (
        "/v1/embeddings",
        "Vectors of texts",
        embeddings.EmbeddingRequest,
        embeddings.EmbeddingList,
    ),
    ("/v1/rerank", "Documents by relevance", scores.RerankRequest, scores.Ranking),
    ("/v1/score", "Scores of pairs of texts", scores.ScoreRequest, scores.ScoreList),
    ("/classify", "Classes of texts", scores.ClassifyRequest, scores.ClassList),
    (
        "/tokenize",
        "Tokens of a text or conversation",
        schemas.TokenizeRequest,
        schemas.TokenizeResponse,
    ),
    ("/detokenize", "Text of tokens", schemas.DetokenizeRequest, schemas.DetokenizeResponse),
    ("/v1/weights", "Load new weights, for operators", schemas.WeightsRequest, schemas.Weights),
    ("/v1/loras", "Load a LoRA adapter, for operators", schemas.LoraRequest, schemas.ModelCard),
    ("/v1/weights/pause", "Take no steps until resumed", schemas.PauseRequest, schemas.Weights),
    ("/v1/weights/resume", "Take steps again", schemas.ResumeRequest, schemas.Weights),
]
_JSON_GETS: list[tuple[str, str, type[BaseModel]]] = [
    ("/v1/models", "The model that is served", schemas.ModelList),
    ("/v1/models/{model}", "The model, if it is the one that is served", schemas.ModelCard),
    ("/v1/responses/{id}", "A response that is kept or runs", response_schemas.ModelResponse),
    (
        "/v1/responses/{id}/input_items",
        "The items of its request",
        response_schemas.ItemList,
    ),
    ("/v1/conversations/{id}", "A conversation", response_schemas.Conversation),
    ("/v1/conversations/{id}/items", "Its items", response_schemas.ItemList),
    ("/v1/files", "The caller's files, with --files-directory", batch_schemas.FileList),
    ("/v1/files/{id}", "A file, without its content", batch_schemas.FileObject),
    ("/v1/batches", "The caller's batches", batch_schemas.BatchList),
    ("/v1/batches/{id}", "A batch", batch_schemas.Batch),
    ("/api/tags", "The models, as Ollama's API has them", ollama_schemas.OllamaModels),
    ("/api/ps", "The models that are loaded, likewise", ollama_schemas.OllamaRunning),
    ("/version", "Of jax_attn", schemas.Version),
    ("/api/version", "The same", schemas.Version),
    ("/health", "200 when requests can be served, 503 before and after", schemas.Health),
]
_OTHER_GETS = [
    ("/", "A playground and a live view", "text/html"),
    ("/metrics", "Numbers for Prometheus", "text/plain"),
    ("/debug/state", "What the live view shows", "application/json"),
    ("/debug/cache_events", "What the prefix cache stores and evicts", "text/event-stream"),
    ("/openapi.json", "This description", "application/json"),
]
_EVENTS: dict[str, type[BaseModel]] = {
    "/v1/completions": schemas.Completion,
    "/v1/chat/completions": schemas.ChatCompletionChunk,
    "/v1/responses": response_schemas.ResponseEvent,
    "/v1/messages": message_schemas.MessageEvent,
}
# Streams of lines of JSON, each as the whole answer, rather than events.
_LINES = ("/api/chat", "/api/generate")
_ENDS_WITH_DONE = (schemas.Completion, schemas.ChatCompletionChunk)


def describe() -> dict[str, Any]:
    """Returns the OpenAPI 3.1 description as JSON-able data."""
    models: list[type[BaseModel]] = [
        model for _, _, request, answer in _POSTS for model in (request, answer)
    ]
    models += [model for _, _, model in _JSON_GETS]
    models += [schemas.HandOverRequest, *_EVENTS.values(), response_schemas.DeletedResponse]
    models += [response_schemas.DeletedConversation, batch_schemas.DeletedFile]
    models += [ErrorResponse, message_schemas.MessageError, ollama_schemas.OllamaError]
    _, definitions = models_json_schema(
        [(model, "validation") for model in dict.fromkeys(models)],
        ref_template="#/components/schemas/{model}",
    )
    paths: dict[str, Any] = {}
    for path, summary, request, answer in _POSTS:
        content = _json(answer)
        if event := _EVENTS.get(path):
            content["text/event-stream"] = {
                "schema": _ref(event),
                "x-note": "with stream: true; one event a chunk"
                + (", then `data: [DONE]`" if event in _ENDS_WITH_DONE else ""),
            }
        if path in _LINES:
            note = "unless stream is false; one object a line"
            content["application/x-ndjson"] = {"schema": _ref(answer), "x-note": note}
        paths[path] = {
            "post": {
                "summary": summary,
                "requestBody": {"required": True, "content": _json(request)},
                "responses": {
                    "200": {"description": "OK", "content": content},
                    "default": _error(path),
                },
            }
        }
    for path, summary, answer in _JSON_GETS:
        paths.setdefault(path, {}).update(_get(summary, _json(answer), _error(path)))
    for path, summary, media_type in _OTHER_GETS:
        paths[path] = _get(summary, {media_type: {}}, _error(path))

    error = _error("")
    paths["/health"]["get"]["security"] = []
    paths["/v1/loras/{model}"] = {
        "delete": _operation("Unload a LoRA adapter, for operators", _json(schemas.Weights), error)
    }
    paths["/v1/responses/{id}"]["delete"] = _operation(
        "Forget a response", _json(response_schemas.DeletedResponse), error
    )
    paths["/v1/responses/{id}/cancel"] = {
        "post": _operation(
            "End a response that runs in the background",
            _json(response_schemas.ModelResponse),
            error,
        )
    }
    form = {
        "type": "object",
        "properties": {
            "file": {"type": "string", "format": "binary"},
            "purpose": {"type": "string", "enum": ["batch"]},
        },
        "required": ["file", "purpose"],
    }
    paths["/v1/files"]["post"] = {
        **_operation("Keep a file of requests", _json(batch_schemas.FileObject), error),
        "requestBody": {"required": True, "content": {"multipart/form-data": {"schema": form}}},
    }
    bytes_: dict[str, Any] = {"application/octet-stream": {}}
    paths["/v1/hand_over"] = {
        "post": {
            **_operation("Begin a request that another server goes on with", bytes_, error),
            "requestBody": {"required": True, "content": _json(schemas.HandOverRequest)},
        }
    }
    paths["/v1/hand_over/continue"] = {
        "post": {
            **_operation(
                "Go on with it: the answer is that of the route", {"application/json": {}}, error
            ),
            "requestBody": {"required": True, "content": bytes_},
        }
    }
    paths["/v1/files/{id}"]["delete"] = _operation(
        "Forget a file", _json(batch_schemas.DeletedFile), error
    )
    paths["/v1/files/{id}/content"] = _get("What is in a file", bytes_, error)
    paths["/v1/batches/{id}/cancel"] = {
        "post": _operation("End a batch; its answers are kept", _json(batch_schemas.Batch), error)
    }
    paths["/v1/conversations/{id}"]["delete"] = _operation(
        "Forget a conversation", _json(response_schemas.DeletedConversation), error
    )
    paths["/v1/conversations/{id}/items/{item}"] = {
        "get": _operation("An item", {"application/json": {}}, error),
        "delete": _operation("Remove an item", _json(response_schemas.Conversation), error),
    }
    for path in paths:
        names = [_parameter(name, "path") for name in re.findall(r"\{(\w+)\}", path)]
        if path.endswith(("items", "/v1/files", "/v1/batches")):
            paths[path]["get"]["parameters"] = [
                _parameter(name, "query") for name in ("after", "limit", "order")
            ]
        if names:
            paths[path]["parameters"] = names
    return {
        "openapi": "3.1.0",
        "info": {"title": "jax_attn.serve", "version": "1"},
        "security": [{"key": []}],
        "paths": paths,
        "components": {
            "schemas": definitions["$defs"],
            "securitySchemes": {
                "key": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "where the server was started with --api-key-file",
                }
            },
        },
    }


@functools.cache
def as_json() -> bytes:
    """`describe` as JSON, made at the first call."""
    return json.dumps(describe()).encode()


def _parameter(name: str, place: str) -> dict[str, Any]:
    schema = {"type": "string"}
    return {"name": name, "in": place, "required": place == "path", "schema": schema}


def _error(path: str) -> dict[str, Any]:
    """Errors of a route."""
    shape: type[BaseModel] = ErrorResponse
    if path.startswith("/v1/messages"):
        shape = message_schemas.MessageError
    elif path.startswith("/api/"):
        shape = ollama_schemas.OllamaError
    return {"description": "Error", "content": _json(shape)}


def _get(summary: str, content: dict[str, Any], error: dict[str, Any]) -> dict[str, Any]:
    return {"get": _operation(summary, content, error)}


def _operation(summary: str, content: dict[str, Any], error: dict[str, Any]) -> dict[str, Any]:
    responses = {"200": {"description": "OK", "content": content}, "default": error}
    return {"summary": summary, "responses": responses}


def _json(model: type[BaseModel]) -> dict[str, Any]:
    return {"application/json": {"schema": _ref(model)}}


def _ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{model.__name__}"}
