"""The bodies of /api/, Ollama's API. `_openai/schemas` has the common rules."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, Discriminator, Field, Tag, model_validator
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import PydanticCustomError

from jax_attn.serve._openai import schemas
from jax_attn.serve._openai.fields import Ignored, RequestBody, Unsupported
from jax_attn.serve._openai.vector_answers import MAX_INPUTS

# ---- requests ----------------------------------------------------------------------------------


class Options(RequestBody):
    num_predict: int | SkipJsonSchema[None] = Field(
        None, ge=-2, description="output tokens; below 1: what the context leaves"
    )
    temperature: float | SkipJsonSchema[None] = Field(None, ge=0, le=100)
    top_k: int | SkipJsonSchema[None] = Field(None, ge=-1, lt=2**31)
    top_p: float | SkipJsonSchema[None] = Field(None, ge=0, le=1)
    min_p: float | SkipJsonSchema[None] = Field(None, ge=0, le=1)
    seed: int | SkipJsonSchema[None] = Field(None, ge=-(2**63), lt=2**63)
    stop: schemas.Stop | SkipJsonSchema[None] = None
    repeat_penalty: float | SkipJsonSchema[None] = Field(None, ge=0.01, le=100)
    repeat_last_n: int | SkipJsonSchema[None] = Field(
        None, ge=-1, le=-1, description="-1: the penalties are about the whole text"
    )
    presence_penalty: float | SkipJsonSchema[None] = Field(None, ge=-2, le=2)
    frequency_penalty: float | SkipJsonSchema[None] = Field(None, ge=-2, le=2)
    typical_p: float = Field(1.0, ge=1, le=1, description="1: off")
    tfs_z: float = Field(1.0, ge=1, le=1, description="1: off")
    mirostat: Unsupported = None
    mirostat_tau: Ignored
    mirostat_eta: Ignored
    penalize_newline: Ignored
    # How Ollama loads a model: this server has loaded its own.
    num_ctx: Ignored
    num_keep: Ignored
    num_batch: Ignored
    num_gpu: Ignored
    main_gpu: Ignored
    num_thread: Ignored
    numa: Ignored
    low_vram: Ignored
    f16_kv: Ignored
    logits_all: Ignored
    vocab_only: Ignored
    use_mmap: Ignored
    use_mlock: Ignored
    embedding_only: Ignored


def _kind_of_format(given: Any) -> str:
    return "schema" if isinstance(given, dict) else "word"


Format: TypeAlias = Annotated[
    Annotated[Literal["", "json"], Tag("word")] | Annotated[dict[str, Any], Tag("schema")],
    Discriminator(_kind_of_format),
]


def _kind_of_think(given: Any) -> str:
    return "effort" if isinstance(given, str) else "switch"


Think: TypeAlias = Annotated[
    Annotated[bool, Tag("switch")] | Annotated[Literal["low", "medium", "high"], Tag("effort")],
    Discriminator(_kind_of_think),
]


def _kind_of_texts(given: Any) -> str:
    return "texts" if isinstance(given, list) else "text"


Text: TypeAlias = Annotated[str, Field(min_length=1)]
Texts: TypeAlias = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[
        list[Text], Tag("texts"), Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS)
    ],
    Discriminator(_kind_of_texts),
]


class OllamaRequest(RequestBody):
    """What both kinds of requests for text have."""

    model: str = Field(description="as /api/tags names it; ':latest' may follow")
    stream: bool = Field(True, description="false: one JSON object, instead of one a line")
    options: Options = Options.model_validate({})
    format: Format | SkipJsonSchema[None] = Field(
        None, description="json, or a JSON schema that the output follows"
    )
    think: Think | SkipJsonSchema[None] = Field(
        None, description="the template's enable_thinking, or its reasoning_effort"
    )
    logprobs: bool = False
    top_logprobs: int | SkipJsonSchema[None] = Field(None, ge=0, le=schemas.MAX_LOGPROBS)
    keep_alive: Ignored

    @model_validator(mode="after")
    def _fields_that_go_together(self) -> OllamaRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError("top_logprobs", "top_logprobs needs logprobs: true")
        return self


class OllamaFunctionCall(RequestBody):
    name: str
    arguments: dict[str, Any] = {}
    index: Ignored
    description: Ignored


class OllamaCall(RequestBody):
    type: Ignored
    id: Ignored
    function: OllamaFunctionCall


class OllamaMessage(RequestBody):
    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | SkipJsonSchema[None] = Field(None, description="for the template")
    tool_calls: Annotated[
        list[OllamaCall], Field(fail_fast=True, max_length=schemas.MAX_TOOLS)
    ] = []
    tool_name: str | SkipJsonSchema[None] = Field(
        None, description="of the function that a result is of; without it, the next one called"
    )
    tool_call_id: Ignored
    name: Ignored
    images: Annotated[list[str], Field(fail_fast=True)] = Field(
        [], description="of the user, in base64, for models that read them"
    )


class OllamaTool(RequestBody):
    type: Literal["function"] = "function"
    function: schemas.Function


class OllamaChatRequest(OllamaRequest):
    messages: Annotated[
        list[OllamaMessage],
        Field(fail_fast=True, min_length=1, max_length=schemas.MAX_MESSAGES),
    ]
    tools: Annotated[list[OllamaTool], Field(fail_fast=True, max_length=schemas.MAX_TOOLS)] = []


class GenerateRequest(OllamaRequest):
    prompt: str = Field(min_length=1)
    system: str = ""
    raw: bool = Field(False, description="the prompt as it is, without the chat template")
    suffix: str = Field("", description="what follows the text, as /v1/completions has it")
    template: Unsupported = None
    context: Unsupported = None
    images: Unsupported = None
    width: Ignored
    height: Ignored
    steps: Ignored


class ShowRequest(RequestBody):
    model: str | SkipJsonSchema[None] = None
    name: str | SkipJsonSchema[None] = Field(None, description="as model")
    verbose: Ignored

    @model_validator(mode="after")
    def _has_a_name(self) -> ShowRequest:
        if self.model is None and self.name is None:
            raise PydanticCustomError("missing", "model is needed")
        return self


class EmbedRequest(RequestBody):
    model: str = Field(description="the embedding model; ':latest' may follow")
    input: Texts = Field(description="a text, or a list of texts")
    truncate: bool = Field(True, description="false: texts that are too long are refused, not cut")
    dimensions: int | SkipJsonSchema[None] = Field(
        None, ge=1, description="the first numbers only, if the model was trained for that"
    )
    options: Ignored
    keep_alive: Ignored


class OneEmbeddingRequest(RequestBody):
    """As older clients ask."""

    model: str
    prompt: str = Field(min_length=1)
    options: Ignored
    keep_alive: Ignored


# ---- answers -----------------------------------------------------------------------------------


class OllamaScore(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class OllamaLogprob(OllamaScore):
    top_logprobs: list[OllamaScore]


class OllamaAnswerBase(BaseModel):
    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length"] | None = None
    total_duration: int | None = Field(None, description="nanoseconds, as all durations")
    load_duration: int | None = None
    prompt_eval_count: int | None = Field(None, description="tokens of the prompt")
    prompt_eval_duration: int | None = Field(None, description="from the first step to a token")
    eval_count: int | None = Field(None, description="tokens of the output")
    eval_duration: int | None = None
    logprobs: list[OllamaLogprob] | None = None


class OllamaCallFunction(BaseModel):
    name: str
    arguments: dict[str, Any]
    index: int


class OllamaAnswerCall(BaseModel):
    id: str
    function: OllamaCallFunction


class OllamaAnswerMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    thinking: str | None = None
    tool_calls: list[OllamaAnswerCall] | None = None


class OllamaChatAnswer(OllamaAnswerBase):
    """A whole answer, or one line of a stream; `done` marks the last one."""

    message: OllamaAnswerMessage


class GenerateAnswer(OllamaAnswerBase):
    """A whole answer, or one line of a stream; `done` marks the last one."""

    response: str
    thinking: str | None = None


class OllamaDetails(BaseModel):
    format: str = "safetensors"
    family: str
    families: list[str]
    parameter_size: str = ""
    quantization_level: str = ""
    parent_model: str = ""


class OllamaModel(BaseModel):
    name: str
    model: str
    modified_at: str
    size: int = Field(description="bytes of the files with its weights")
    digest: str
    details: OllamaDetails


class OllamaModels(BaseModel):
    models: list[OllamaModel]


class OllamaRunningModel(BaseModel):
    name: str
    model: str
    size: int = Field(description="bytes of the files with its weights")
    digest: str
    details: OllamaDetails
    expires_at: str = Field(description="never")
    context_length: int


class OllamaRunning(BaseModel):
    models: list[OllamaRunningModel]


class EmbedAnswer(BaseModel):
    model: str
    embeddings: list[list[float]]
    total_duration: int = Field(description="nanoseconds")
    load_duration: int
    prompt_eval_count: int = Field(description="tokens of the texts")


class OneEmbedding(BaseModel):
    embedding: list[float]


class OllamaShown(BaseModel):
    modelfile: str = ""
    parameters: str = Field(description="the model's defaults for sampling")
    template: str = Field(description="its chat template, which is Jinja's")
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaError(BaseModel):
    """The body of an error, in Ollama's shape."""

    error: str
