"""The bodies of /v1/responses, OpenAI's Responses API. `schemas` describes their common rules."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    BaseModel,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    WithJsonSchema,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import PydanticCustomError

from jax_attn.serve._openai import fields, schemas
from jax_attn.serve._openai.fields import Ignored, RequestBody, Unsupported

MAX_METADATA = 16


def _refuse_type(value: Any) -> None:
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str):
        raise PydanticCustomError("missing", "expected an object with a type", {"inside": "type"})
    raise PydanticCustomError(
        "unsupported",
        "{type} is not supported by this server",
        {"type": repr(kind[:64]), "inside": "type"},
    )


# OpenAI's types that this server does not support: the error has the type's name.
_Other: TypeAlias = Annotated[
    None, BeforeValidator(_refuse_type), WithJsonSchema({"not": {}, "description": "not supported"})
]


def _by_type(*known: str, default: str | None = None) -> Discriminator:
    """Selects a type by its "type" field. default: for objects without one."""

    def kind(value: Any) -> str:
        found = value.get("type", default) if isinstance(value, dict) else None
        return found if found in known else "other"

    return Discriminator(kind)


# ---- the conversation --------------------------------------------------------------------------


class TextItemPart(RequestBody):
    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Ignored
    logprobs: Ignored
    prompt_cache_breakpoint: Ignored


Part: TypeAlias = Annotated[
    Annotated[TextItemPart, Tag("input_text")]
    | Annotated[TextItemPart, Tag("output_text")]
    | Annotated[TextItemPart, Tag("text")]
    | Annotated[schemas.RefusalPart, Tag("refusal")]
    | Annotated[_Other, Tag("other")],
    _by_type("input_text", "output_text", "text", "refusal"),
]
Parts: TypeAlias = str | Annotated[list[Part], Field(fail_fast=True)]


class MessageItem(RequestBody):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts
    id: Ignored
    status: Ignored
    phase: Ignored


class FunctionCallItem(RequestBody):
    """A call in an earlier answer."""

    type: Literal["function_call"]
    call_id: str = Field(max_length=256)
    name: str
    arguments: str = Field("", description="a JSON object")
    id: Ignored
    status: Ignored


class FunctionCallOutputItem(RequestBody):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str = Field(max_length=256)
    output: Parts
    id: Ignored
    status: Ignored


class ReasoningPart(RequestBody):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(RequestBody):
    """Thoughts of an earlier answer, for the template."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningPart], Field(fail_fast=True)] = []
    summary: Annotated[list[ReasoningPart], Field(fail_fast=True)] = []
    encrypted_content: Ignored
    id: Ignored
    status: Ignored


Item: TypeAlias = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[_Other, Tag("other")],
    _by_type("message", "function_call", "function_call_output", "reasoning", default="message"),
]


def _kind_of_input(given: Any) -> str:
    return "items" if isinstance(given, list) else "text"


# Chosen by type, so that an error is about the one that was meant.
Input: TypeAlias = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[
        list[Item],
        Tag("items"),
        Field(fail_fast=True, min_length=1, max_length=schemas.MAX_MESSAGES),
    ],
    Discriminator(_kind_of_input),
]


# ---- requests ----------------------------------------------------------------------------------


class FunctionTool(schemas.Function):
    type: Literal["function"]


class NamedFunctionTool(schemas.NamedFunction):
    type: Literal["function"]


class TextFormat(RequestBody):
    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(max_length=64)] = "schema"
    # A field named "schema" would hide a method of BaseModel.
    schema_: dict[str, Any] | SkipJsonSchema[None] = Field(None, alias="schema")
    description: Ignored
    strict: Ignored  # the output always follows the schema

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> TextFormat:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise PydanticCustomError(
                "schema", "schema belongs to type 'json_schema', and is needed there"
            )
        return self


class TextConfig(RequestBody):
    format: TextFormat | SkipJsonSchema[None] = None
    verbosity: Literal["medium"] | SkipJsonSchema[None] = None


class ReasoningConfig(RequestBody):
    effort: str | SkipJsonSchema[None] = Field(
        None, max_length=32, description="for the template; none: enable_thinking is false, too"
    )
    summary: Ignored  # there is no summary: an answer has all of its thoughts
    generate_summary: Ignored


class ResponsesRequest(schemas.Generation):
    input: Input
    instructions: str | SkipJsonSchema[None] = Field(
        None, description="the first message, from the system; those of earlier responses are past"
    )
    max_output_tokens: int | SkipJsonSchema[None] = Field(
        None, ge=1, description="default: what the context leaves"
    )
    tools: Annotated[
        list[
            Annotated[
                Annotated[FunctionTool, Tag("function")] | Annotated[_Other, Tag("other")],
                _by_type("function"),
            ]
        ],
        Field(fail_fast=True, max_length=schemas.MAX_TOOLS),
    ] = []
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool = Field(
        "auto",
        description="required, or a function's name: the arguments follow the function's schema",
    )
    parallel_tool_calls: bool = True
    text: TextConfig | SkipJsonSchema[None] = None
    reasoning: ReasoningConfig | SkipJsonSchema[None] = None
    previous_response_id: str | SkipJsonSchema[None] = Field(None, max_length=256)
    store: bool = Field(True, description="keep the response, as long as there is room for it")
    metadata: Annotated[
        dict[
            Annotated[str, Field(max_length=64)],
            Annotated[str, Field(max_length=512)],
        ],
        fields.at_most(MAX_METADATA),
        Field(max_length=MAX_METADATA, description="comes back in the response"),
    ] = {}
    chat_template_kwargs: dict[str, Any] = Field(
        {}, description="more variables for the model's template, such as enable_thinking"
    )
    truncation: Literal["disabled"] = "disabled"
    include: Annotated[
        list[Literal["reasoning.encrypted_content"]], Field(fail_fast=True, max_length=16)
    ] = Field([], description="accepted, and ignored: thoughts are not encrypted")
    background: Unsupported = None
    conversation: Unsupported = None
    context_management: Unsupported = None
    max_tool_calls: Unsupported = None
    moderation: Unsupported = None
    prompt: Unsupported = None
    top_logprobs: Unsupported = None
    prompt_cache_options: Ignored

    @model_validator(mode="after")
    def _response_fields_that_go_together(self) -> ResponsesRequest:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "stream_options needs stream: true")
        return self


# ---- answers -----------------------------------------------------------------------------------

ItemStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]


class OutputText(BaseModel):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class ReasoningText(BaseModel):
    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class OutputMessage(BaseModel):
    type: Literal["message"] = "message"
    id: str
    role: Literal["assistant"] = "assistant"
    status: ItemStatus = "in_progress"
    content: list[OutputText] = []


class OutputReasoning(BaseModel):
    type: Literal["reasoning"] = "reasoning"
    id: str
    status: ItemStatus = "in_progress"
    summary: list[Any] = []
    content: list[ReasoningText] = []


class OutputFunctionCall(BaseModel):
    type: Literal["function_call"] = "function_call"
    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus = "in_progress"


class InputTokensDetails(BaseModel):
    cached_tokens: int


class OutputTokensDetails(BaseModel):
    reasoning_tokens: int = Field(description="up to the end of the thoughts, their marks included")


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(BaseModel):
    code: Literal["server_error", "invalid_prompt"]
    message: str


class IncompleteDetails(BaseModel):
    reason: Literal["max_output_tokens"] = "max_output_tokens"
    stop_reason: schemas.StopReason = None


class ModelResponse(BaseModel):
    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed"] = "in_progress"
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[OutputMessage | OutputReasoning | OutputFunctionCall] = []
    usage: ResponseUsage | None = None
    # Values of the request, or the defaults that were used.
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    background: Literal[False] = False


class ResponseEvent(BaseModel):
    """An event of a stream. OpenAI defines which fields each type has."""

    type: str
    sequence_number: int
    response: ModelResponse | None = None
    output_index: int | None = None
    item: OutputMessage | OutputReasoning | OutputFunctionCall | None = None
    item_id: str | None = None
    content_index: int | None = None
    part: OutputText | ReasoningText | None = None
    delta: str | None = None
    text: str | None = None
    arguments: str | None = None


class DeletedResponse(BaseModel):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True
