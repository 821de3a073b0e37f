"""/openapi.json: the routes, and the bodies as the pydantic models of `schemas` describe them."""

from __future__ import annotations

import re
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from jax_attn.serve._openai import embeddings, response_schemas, schemas
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
        "/v1/embeddings",
        "Vectors of texts",
        embeddings.EmbeddingRequest,
        embeddings.EmbeddingList,
    ),
    (
        "/tokenize",
        "Tokens of a text or conversation",
        schemas.TokenizeRequest,
        schemas.TokenizeResponse,
    ),
    ("/detokenize", "Text of tokens", schemas.DetokenizeRequest, schemas.DetokenizeResponse),
]
_JSON_GETS: list[tuple[str, str, type[BaseModel]]] = [
    ("/v1/models", "The model that is served", schemas.ModelList),
    ("/v1/models/{model}", "The model, if it is the one that is served", schemas.ModelCard),
    ("/v1/responses/{id}", "A response that is kept", response_schemas.ModelResponse),
    ("/version", "Of jax_attn", schemas.Version),
    ("/health", "200 when requests can be served, 503 before and after", schemas.Health),
]
_OTHER_GETS = [
    ("/", "A playground and a live view", "text/html"),
    ("/metrics", "Numbers for Prometheus", "text/plain"),
    ("/debug/state", "What the live view shows", "application/json"),
    ("/openapi.json", "This description", "application/json"),
]
_EVENTS: dict[str, type[BaseModel]] = {
    "/v1/completions": schemas.Completion,
    "/v1/chat/completions": schemas.ChatCompletionChunk,
    "/v1/responses": response_schemas.ResponseEvent,
}


def describe() -> dict[str, Any]:
    """Returns the OpenAPI 3.1 description as JSON-able data."""
    models: list[type[BaseModel]] = [
        model for _, _, request, answer in _POSTS for model in (request, answer)
    ]
    models += [model for _, _, model in _JSON_GETS]
    models += [*_EVENTS.values(), response_schemas.DeletedResponse, ErrorResponse]
    _, definitions = models_json_schema(
        [(model, "validation") for model in dict.fromkeys(models)],
        ref_template="#/components/schemas/{model}",
    )
    error = {"description": "Error", "content": _json(ErrorResponse)}
    paths: dict[str, Any] = {}
    for path, summary, request, answer in _POSTS:
        content = _json(answer)
        if event := _EVENTS.get(path):
            content["text/event-stream"] = {
                "schema": _ref(event),
                "x-note": "with stream: true; one event a chunk"
                + ("" if event is response_schemas.ResponseEvent else ", then `data: [DONE]`"),
            }
        paths[path] = {
            "post": {
                "summary": summary,
                "requestBody": {"required": True, "content": _json(request)},
                "responses": {"200": {"description": "OK", "content": content}, "default": error},
            }
        }
    for path, summary, answer in _JSON_GETS:
        paths[path] = _get(summary, _json(answer), error)
    for path, summary, media_type in _OTHER_GETS:
        paths[path] = _get(summary, {media_type: {}}, error)
    paths["/health"]["get"]["security"] = []
    paths["/v1/responses/{id}"]["delete"] = _operation(
        "Forget a response", _json(response_schemas.DeletedResponse), error
    )
    paths["/v1/responses/{id}/cancel"] = {
        "post": {
            "summary": "Always an error: responses in the background are not supported",
            "responses": {"default": error},
        }
    }
    for path in paths:
        if found := re.search(r"\{(\w+)\}", path):
            paths[path]["parameters"] = [
                {"name": found[1], "in": "path", "required": True, "schema": {"type": "string"}}
            ]
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


def _get(summary: str, content: dict[str, Any], error: dict[str, Any]) -> dict[str, Any]:
    return {"get": _operation(summary, content, error)}


def _operation(summary: str, content: dict[str, Any], error: dict[str, Any]) -> dict[str, Any]:
    responses = {"200": {"description": "OK", "content": content}, "default": error}
    return {"summary": summary, "responses": responses}


def _json(model: type[BaseModel]) -> dict[str, Any]:
    return {"application/json": {"schema": _ref(model)}}


def _ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{model.__name__}"}
