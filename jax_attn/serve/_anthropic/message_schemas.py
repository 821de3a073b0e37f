"""The bodies of /v1/messages, Anthropic's Messages API. `_openai/schemas` has the common rules."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, Discriminator, Field, Tag
from pydantic.json_schema import SkipJsonSchema

from jax_attn.serve._openai import schemas
from jax_attn.serve._openai.fields import (
    Ignored,
    OtherType,
    RequestBody,
    ToolName,
    Unsupported,
    by_type,
)

# ---- requests ----------------------------------------------------------------------------------


class TextBlock(RequestBody):
    type: Literal["text"]
    text: str
    cache_control: Ignored
    citations: Ignored


_Texts: TypeAlias = Annotated[
    list[
        Annotated[
            Annotated[TextBlock, Tag("text")] | Annotated[OtherType, Tag("other")], by_type("text")
        ]
    ],
    Field(fail_fast=True),
]


class PictureSource(RequestBody):
    type: Literal["base64"]
    media_type: str
    data: str


class PictureBlock(RequestBody):
    """A picture of the user, for models that read them."""

    type: Literal["image"]
    source: PictureSource
    cache_control: Ignored


class ToolUseBlock(RequestBody):
    """A call in an earlier answer."""

    type: Literal["tool_use"]
    id: str = Field(max_length=256)
    name: str
    input: dict[str, Any]
    cache_control: Ignored
    caller: Ignored


class ToolResultBlock(RequestBody):
    """The result of a call. The model sees its content; that it is an error, only from there."""

    type: Literal["tool_result"]
    tool_use_id: str = Field(max_length=256)
    content: str | _Texts = ""
    is_error: Ignored
    cache_control: Ignored


class ThinkingBlock(RequestBody):
    """Thoughts of an earlier answer, for the template."""

    type: Literal["thinking"]
    thinking: str
    signature: Ignored


Block: TypeAlias = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[PictureBlock, Tag("image")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[OtherType, Tag("other")],
    by_type("text", "image", "tool_use", "tool_result", "thinking"),
]


class MessageParam(RequestBody):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(fail_fast=True)]


class MessageTool(RequestBody):
    type: Literal["custom"] = "custom"
    name: ToolName
    description: str = ""
    input_schema: dict[str, Any] = Field(description="JSON schema of an object")
    cache_control: Ignored
    strict: bool = Field(False, description="calls follow the schema also with tool_choice auto")
    eager_input_streaming: Ignored
    input_examples: Ignored
    defer_loading: Ignored
    allowed_callers: Ignored


class MessageToolChoice(RequestBody):
    type: Literal["auto", "any", "tool", "none"]
    name: str | SkipJsonSchema[None] = Field(None, description="with type 'tool'")
    disable_parallel_tool_use: bool = False


class Thinking(RequestBody):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | SkipJsonSchema[None] = Field(
        None, ge=1, description="a hint, and no limit: max_tokens is one"
    )
    display: Literal["summarized", "omitted"] = "summarized"


class OutputFormat(RequestBody):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(RequestBody):
    effort: str | SkipJsonSchema[None] = Field(None, max_length=32, description="for the template")
    format: OutputFormat | SkipJsonSchema[None] = None


def _kind_of_content(content: Any) -> str:
    return "texts" if isinstance(content, list) else "text"


class CountRequest(RequestBody):
    """What decides on the prompt."""

    model: str = Field(description="as /v1/models names it")
    messages: Annotated[
        list[MessageParam],
        Field(fail_fast=True, min_length=1, max_length=schemas.MAX_MESSAGES),
    ]
    system: (
        Annotated[
            Annotated[str, Tag("text")] | Annotated[_Texts, Tag("texts")],
            Discriminator(_kind_of_content),
        ]
        | SkipJsonSchema[None]
    ) = None
    tools: Annotated[
        list[
            Annotated[
                Annotated[MessageTool, Tag("custom")] | Annotated[OtherType, Tag("other")],
                by_type("custom", default="custom"),
            ]
        ],
        Field(fail_fast=True, max_length=schemas.MAX_TOOLS),
    ] = []
    tool_choice: MessageToolChoice | SkipJsonSchema[None] = None
    thinking: Thinking | SkipJsonSchema[None] = None
    output_config: OutputConfig | SkipJsonSchema[None] = None
    cache_control: Ignored
    context_management: Ignored


class MessagesRequest(CountRequest):
    max_tokens: int = Field(ge=1)
    stream: bool = False
    stop_sequences: Annotated[
        list[schemas.StopString], Field(fail_fast=True, max_length=schemas.MAX_STOP_STRINGS)
    ] = []
    temperature: float | SkipJsonSchema[None] = Field(None, ge=0, le=100)
    top_p: float | SkipJsonSchema[None] = Field(None, ge=0, le=1)
    top_k: int | SkipJsonSchema[None] = Field(None, ge=0, lt=2**31)
    metadata: Ignored
    service_tier: Ignored
    inference_geo: Ignored
    container: Unsupported = None
    mcp_servers: Unsupported = None


# ---- answers -----------------------------------------------------------------------------------


class OutputText(BaseModel):
    type: Literal["text"] = "text"
    text: str


class OutputThinking(BaseModel):
    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str = ""


class OutputToolUse(BaseModel):
    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(BaseModel):
    input_tokens: int = Field(description="of the prompt, without those that were cached")
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0
    output_tokens: int = 0


class MessageAnswer(BaseModel):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[OutputText | OutputThinking | OutputToolUse] = []
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class MessageEvent(BaseModel):
    """An event of a stream; its type says which further fields it has."""

    type: str


class TokenCount(BaseModel):
    input_tokens: int


class MessageErrorBody(BaseModel):
    type: str
    message: str


class MessageError(BaseModel):
    """The body of an error, in Anthropic's shape."""

    type: Literal["error"] = "error"
    error: MessageErrorBody
