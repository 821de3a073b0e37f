"""The bodies of /v1/files and /v1/batches. `schemas` describes their common rules."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, Field

from jax_attn.serve._openai.fields import Ignored, RequestBody
from jax_attn.serve._openai.response_schemas import Metadata

Endpoint: TypeAlias = Literal[
    "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"
]
BatchStatus: TypeAlias = Literal[
    "validating", "in_progress", "finalizing", "completed", "failed", "cancelling", "cancelled"
]


class BatchRequest(RequestBody):
    input_file_id: str = Field(max_length=64)
    endpoint: Endpoint = Field(description="the url of every line")
    completion_window: Literal["24h"] = "24h"
    metadata: Metadata = {}
    output_expires_after: Ignored


class FileObject(BaseModel):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"] = "processed"


class FileList(BaseModel):
    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(BaseModel):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class RequestCounts(BaseModel):
    total: int = 0
    completed: int = 0
    failed: int = 0


class Batch(BaseModel):
    id: str
    object: Literal["batch"] = "batch"
    endpoint: Endpoint
    input_file_id: str
    completion_window: Literal["24h"] = "24h"
    status: BatchStatus = "validating"
    errors: Any = None
    output_file_id: str | None = None  # of the answers
    error_file_id: str | None = None  # of the answers that are errors
    created_at: int
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    expires_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    metadata: dict[str, str] = {}


class BatchList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool
