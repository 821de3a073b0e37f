"""The bodies of /v1/responses, OpenAI's Responses API. `schemas` describes their common rules."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    BaseModel,
    Discriminator,
    Field,
    Tag,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import PydanticCustomError

from jax_attn.serve._openai import fields, schemas
from jax_attn.serve._openai.fields import (
    Ignored,
    OtherType,
    RequestBody,
    ToolName,
    Unsupported,
    by_type,
)

MAX_METADATA = 16


# ---- the conversation --------------------------------------------------------------------------


class TextItemPart(RequestBody):
    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Ignored
    logprobs: Ignored
    prompt_cache_breakpoint: Ignored


class PictureItemPart(RequestBody):
    """A picture of the user, for models that read them."""

    type: Literal["input_image"]
    image_url: str = Field(description="a data: URL with base64")
    detail: Ignored
    file_id: Unsupported = None
    prompt_cache_breakpoint: Ignored


Part: TypeAlias = Annotated[
    Annotated[TextItemPart, Tag("input_text")]
    | Annotated[TextItemPart, Tag("output_text")]
    | Annotated[TextItemPart, Tag("text")]
    | Annotated[schemas.RefusalPart, Tag("refusal")]
    | Annotated[OtherType, Tag("other")],
    by_type("input_text", "output_text", "text", "refusal"),
]
ShownPart: TypeAlias = Annotated[
    Annotated[TextItemPart, Tag("input_text")]
    | Annotated[TextItemPart, Tag("output_text")]
    | Annotated[TextItemPart, Tag("text")]
    | Annotated[PictureItemPart, Tag("input_image")]
    | Annotated[schemas.RefusalPart, Tag("refusal")]
    | Annotated[OtherType, Tag("other")],
    by_type("input_text", "output_text", "text", "input_image", "refusal"),
]
Parts: TypeAlias = str | Annotated[list[Part], Field(fail_fast=True)]


class MessageItem(RequestBody):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Annotated[list[ShownPart], Field(fail_fast=True)]
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


class CustomCallItem(RequestBody):
    """A call of a custom tool in an earlier answer."""

    type: Literal["custom_tool_call"]
    call_id: str = Field(max_length=256)
    name: str
    input: str
    id: Ignored
    status: Ignored


class CustomCallOutputItem(FunctionCallOutputItem):
    type: Literal["custom_tool_call_output"]  # type: ignore[assignment]


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
    | Annotated[CustomCallItem, Tag("custom_tool_call")]
    | Annotated[CustomCallOutputItem, Tag("custom_tool_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[OtherType, Tag("other")],
    by_type(
        "message",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
        "reasoning",
        default="message",
    ),
]


class ItemReference(RequestBody):
    """An item of the output of a response that is stored, in the item's place."""

    type: Literal["item_reference"]
    id: str = Field(max_length=256)


def _kind_of_item(given: Any) -> str:
    is_reference = isinstance(given, dict) and given.get("type") == "item_reference"
    return "reference" if is_reference else "whole"


def _kind_of_input(given: Any) -> str:
    return "items" if isinstance(given, list) else "text"


# Chosen by type, so that an error is about the one that was meant.
Input: TypeAlias = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[
        list[
            Annotated[
                Annotated[ItemReference, Tag("reference")] | Annotated[Item, Tag("whole")],
                Discriminator(_kind_of_item),
            ]
        ],
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


class NamedCustomTool(schemas.NamedFunction):
    type: Literal["custom"]


class AllowedTools(RequestBody):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[
        list[Annotated[NamedFunctionTool | NamedCustomTool, Field(discriminator="type")]],
        Field(fail_fast=True, min_length=1, max_length=schemas.MAX_TOOLS),
    ]


def _kind_of_choice(given: Any) -> str:
    if not isinstance(given, dict):
        return "word"
    kind = given.get("type")
    return kind if kind in ("function", "custom", "allowed_tools") else "other"


ToolChoice: TypeAlias = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")]
    | Annotated[NamedFunctionTool, Tag("function")]
    | Annotated[NamedCustomTool, Tag("custom")]
    | Annotated[AllowedTools, Tag("allowed_tools")]
    | Annotated[OtherType, Tag("other")],
    Discriminator(_kind_of_choice),
]


class CustomFormat(RequestBody):
    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | SkipJsonSchema[None] = None
    definition: str | SkipJsonSchema[None] = Field(
        None, min_length=1, max_length=schemas.MAX_GRAMMAR_CHARS
    )

    @model_validator(mode="after")
    def _grammar_where_it_belongs(self) -> CustomFormat:
        given = [value is not None for value in (self.syntax, self.definition)]
        if given != [self.type == "grammar"] * 2:
            raise PydanticCustomError(
                "grammar", "syntax and definition belong to type 'grammar', and are needed there"
            )
        return self


class CustomTool(RequestBody):
    """A tool whose input is a text."""

    type: Literal["custom"]
    name: ToolName
    description: str = ""
    format: CustomFormat = Field(
        CustomFormat(type="text", syntax=None, definition=None),
        description="grammar: the input follows it once a call begins",
    )


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
    verbosity: Ignored  # a hint


class ReasoningConfig(RequestBody):
    effort: str | SkipJsonSchema[None] = Field(
        None, max_length=32, description="for the template; none: enable_thinking is false, too"
    )
    summary: Ignored  # there is no summary: an answer has all of its thoughts
    generate_summary: Ignored


class ConversationParam(RequestBody):
    id: str = Field(max_length=256)


def _kind_of_conversation(given: Any) -> str:
    return "object" if isinstance(given, dict) else "text"


ConversationRef: TypeAlias = Annotated[
    Annotated[str, Tag("text"), Field(max_length=256)]
    | Annotated[ConversationParam, Tag("object")],
    Discriminator(_kind_of_conversation),
]
Metadata: TypeAlias = Annotated[
    dict[
        Annotated[str, Field(max_length=64)],
        Annotated[str, Field(max_length=512)],
    ],
    fields.at_most(MAX_METADATA),
    Field(max_length=MAX_METADATA, description="comes back in the answer"),
]


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
                Annotated[FunctionTool, Tag("function")]
                | Annotated[CustomTool, Tag("custom")]
                | Annotated[OtherType, Tag("other")],
                by_type("function", "custom"),
            ]
        ],
        Field(fail_fast=True, max_length=schemas.MAX_TOOLS),
    ] = []
    tool_choice: ToolChoice = Field(
        "auto",
        description="required, or a function's name: the arguments follow the function's schema; "
        "allowed_tools: the model sees these alone",
    )
    parallel_tool_calls: bool = True
    text: TextConfig | SkipJsonSchema[None] = None
    reasoning: ReasoningConfig | SkipJsonSchema[None] = None
    previous_response_id: str | SkipJsonSchema[None] = Field(None, max_length=256)
    store: bool = Field(True, description="keep the response, as long as there is room for it")
    metadata: Metadata = {}
    mm_processor_kwargs: schemas.PictureOptions | SkipJsonSchema[None] = None
    chat_template_kwargs: dict[str, Any] = Field(
        {}, description="more variables for the model's template, such as enable_thinking"
    )
    truncation: Literal["disabled"] = "disabled"
    include: Annotated[
        list[Literal["reasoning.encrypted_content", "message.output_text.logprobs"]],
        Field(fail_fast=True, max_length=16),
    ] = Field(
        [],
        description="message.output_text.logprobs: log-probabilities of the text. The other is "
        "read past: thoughts are not encrypted",
    )
    top_logprobs: int | SkipJsonSchema[None] = Field(
        None, ge=0, le=schemas.MAX_LOGPROBS, description="with so many others for each token"
    )
    background: bool = Field(
        False, description="answer at once; GET the response until its status says that it ended"
    )
    conversation: ConversationRef | SkipJsonSchema[None] = Field(
        None, description="whose items come first, and which gets those of input and output"
    )
    context_management: Unsupported = None
    max_tool_calls: Unsupported = None
    moderation: Unsupported = None
    prompt: Unsupported = None
    prompt_cache_options: Ignored

    @model_validator(mode="after")
    def _response_fields_that_go_together(self) -> ResponsesRequest:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "stream_options needs stream: true")
        if self.background and (self.stream or not self.store):
            raise PydanticCustomError("background", "background needs stream: false, store: true")
        if self.conversation is not None and self.previous_response_id is not None:
            raise PydanticCustomError(
                "conversation", "only one of conversation and previous_response_id"
            )
        return self

    @property
    def num_top(self) -> int | None:
        """Alternatives for each token; None: no log-probabilities are wanted."""
        wanted = "message.output_text.logprobs" in self.include or self.top_logprobs is not None
        return (self.top_logprobs or 0) if wanted else None

    @property
    def conversation_id(self) -> str | None:
        given = self.conversation
        return given.id if isinstance(given, ConversationParam) else given


class InputTokensRequest(ResponsesRequest):
    """What decides on the prompt of a response; further fields change nothing."""


Items: TypeAlias = Annotated[list[Item], Field(fail_fast=True, max_length=20)]


class ConversationRequest(RequestBody):
    items: Items = []
    metadata: Metadata = {}


class ConversationUpdate(RequestBody):
    metadata: Metadata


class ItemsRequest(RequestBody):
    items: Annotated[list[Item], Field(fail_fast=True, min_length=1, max_length=20)]


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


class OutputCustomToolCall(BaseModel):
    type: Literal["custom_tool_call"] = "custom_tool_call"
    id: str
    call_id: str
    name: str
    input: str
    status: ItemStatus = "in_progress"


OutputItem: TypeAlias = OutputMessage | OutputReasoning | OutputFunctionCall | OutputCustomToolCall


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


class ConversationId(BaseModel):
    id: str


class ModelResponse(BaseModel):
    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"] = (
        "in_progress"
    )
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[OutputItem] = []
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
    background: bool = False
    conversation: ConversationId | None = None
    top_logprobs: int = 0


class ResponseEvent(BaseModel):
    """An event of a stream. OpenAI defines which fields each type has."""

    type: str
    sequence_number: int
    response: ModelResponse | None = None
    output_index: int | None = None
    item: OutputItem | None = None
    item_id: str | None = None
    content_index: int | None = None
    part: OutputText | ReasoningText | None = None
    delta: str | None = None
    text: str | None = None
    arguments: str | None = None
    input: str | None = None


class DeletedResponse(BaseModel):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class ItemList(BaseModel):
    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(BaseModel):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class Conversation(BaseModel):
    id: str
    object: Literal["conversation"] = "conversation"
    created_at: int
    metadata: dict[str, str]


class DeletedConversation(BaseModel):
    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: Literal[True] = True
