"""The bodies of the HTTP API: OpenAI's fields, this server's own, and the caps on all of them.

Requests are strict: a string is not a number, and an unknown field is an error that names it. A
field that is null counts as absent. What a description below calls "not supported" is accepted
only where it asks for nothing.

A body has a number of errors that does not grow with it: an object with more fields than there are
is refused at once, and every list ends at its first error.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema, WithJsonSchema
from pydantic_core import PydanticCustomError

# Caps that are the same for every model. Those on length and on the queue come from the engine.
MAX_CHOICES = 64  # n, and the sequences of a request: prompts x n
MAX_PROMPTS = 64
MAX_MESSAGES = 2048
MAX_TOOLS = 128
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKENS = 64
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 300
# Log-probabilities of an answer: tokens x (1 + logprobs) of all its choices, those of the prompt
# included if it is echoed. So many are 20 MB of JSON.
MAX_SCORES = 1 << 18
MAX_GRAMMAR_CHARS = 65536  # of a schema as JSON, a regular expression or a grammar
MAX_DEADLINE_SECONDS = 86400


def _refuse(value: Any) -> None:
    if value not in (None, False, [], {}, "", "none", "auto"):
        raise PydanticCustomError("unsupported", "not supported by this server")


# "Asks for nothing" is null, false, empty, "none" or "auto".
Unsupported: TypeAlias = Annotated[
    None, BeforeValidator(_refuse), WithJsonSchema({"type": "null", "description": "not supported"})
]
# Fields that cannot change the answer; clients send them to OpenAI for its own book-keeping.
Ignored: TypeAlias = Annotated[Any, Field(default=None, description="accepted, and ignored")]


def _at_most(limit: int) -> BeforeValidator:
    """Of entries, before any of them is looked at."""

    def check(value: Any) -> Any:
        if isinstance(value, dict | list) and len(value) > limit:
            raise PydanticCustomError(
                "too_long",
                "expected at most {limit} entries, got {length}",
                {"limit": limit, "length": len(value)},
            )
        return value

    return BeforeValidator(check)


_TOKENS_AT_A_TIME = 1 << 16


def _tokens(value: Any) -> list[int]:
    """As pydantic would check it, but other threads get a turn every so many tokens."""
    if not isinstance(value, list):
        raise PydanticCustomError("tokens", "expected a list of tokens")
    for begin in range(0, len(value), _TOKENS_AT_A_TIME):
        part = value[begin : begin + _TOKENS_AT_A_TIME]
        if set(map(type, part)) == {int} and 0 <= min(part) and max(part) < 2**31:
            continue
        bad = next(i for i, x in enumerate(part) if type(x) is not int or not 0 <= x < 2**31)
        raise PydanticCustomError(
            "tokens", "expected a token, an integer from 0 to 2**31 - 1", {"inside": begin + bad}
        )
    return value


def _tokens_schema(**more: int) -> WithJsonSchema:
    token = {"type": "integer", "minimum": 0, "exclusiveMaximum": 2**31}
    return WithJsonSchema({"type": "array", "items": token, **more})


Tokens: TypeAlias = Annotated[list[int], PlainValidator(_tokens), _tokens_schema()]
PromptTokens: TypeAlias = Annotated[list[int], PlainValidator(_tokens), _tokens_schema(minItems=1)]
StopTokens: TypeAlias = Annotated[
    list[int],
    PlainValidator(_tokens),
    _at_most(MAX_STOP_TOKENS),  # which looks first
    _tokens_schema(maxItems=MAX_STOP_TOKENS),
]
StopString: TypeAlias = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    _names: ClassVar[frozenset[str]]  # of the fields, as clients call them

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        cls._names = frozenset(field.alias or name for name, field in cls.model_fields.items())

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        body = {key: value for key, value in body.items() if value is not None}
        if len(body) > len(cls._names):  # else pydantic finds it, beside what may say more
            unknown = next(key for key in body if key not in cls._names)
            raise PydanticCustomError("unknown_field", "unknown field", {"inside": unknown})
        return body


def _kind_of_stop(stop: Any) -> str:
    return "texts" if isinstance(stop, list) else "text"


# By its type, so that an error is about what was meant.
Stop: TypeAlias = Annotated[
    Annotated[StopString, Tag("text")]
    | Annotated[list[StopString], Tag("texts"), Field(fail_fast=True, max_length=MAX_STOP_STRINGS)],
    Discriminator(_kind_of_stop),
]


class StreamOptions(_Request):
    include_usage: bool = False
    include_obfuscation: Ignored


class JsonSchemaFormat(_Request):
    name: Annotated[str, Field(max_length=64)] = "schema"
    description: Ignored
    # "schema" would hide a method of BaseModel.
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: Ignored  # the output always follows the schema


class ResponseFormat(_Request):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | SkipJsonSchema[None] = None

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise PydanticCustomError(
                "response_format", "json_schema belongs to type 'json_schema', and is needed there"
            )
        return self


class _Sampling(_Request):
    """What completions and chat completions have in common."""

    model: str | SkipJsonSchema[None] = Field(None, description="as /v1/models names it")
    n: int = Field(1, ge=1, le=MAX_CHOICES, description="choices for each prompt")
    stream: bool = False
    stream_options: StreamOptions | SkipJsonSchema[None] = None
    max_tokens: int | SkipJsonSchema[None] = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=100, description="0: greedy")
    top_p: float = Field(1.0, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    seed: int | SkipJsonSchema[None] = Field(
        None,
        ge=-(2**63),
        lt=2**63,
        description="same seed, same text; whatever the load if the server runs batch-invariant",
    )
    stop: Stop = []
    logit_bias: Annotated[
        dict[
            Annotated[str, Field(pattern=r"^[0-9]{1,9}$")],
            Annotated[float, Field(ge=-100, le=100)],
        ],
        _at_most(MAX_LOGIT_BIAS),
        Field(max_length=MAX_LOGIT_BIAS, description="token id -> what is added to its logit"),
    ] = {}
    response_format: ResponseFormat | SkipJsonSchema[None] = None

    # This server's own. With the openai client: extra_body={"top_k": 40}.
    top_k: int = Field(0, ge=-1, lt=2**31, description="0 or -1: off")
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    min_tokens: int = Field(0, ge=0, description="no end of text and no stop before so many")
    ignore_eos: bool = False
    stop_token_ids: StopTokens = []
    json_schema: dict[str, Any] | bool | SkipJsonSchema[None] = Field(
        None, description="the output is JSON that fits this schema (vLLM: guided_json)"
    )
    regex: str | SkipJsonSchema[None] = Field(
        None,
        max_length=MAX_GRAMMAR_CHARS,
        description="the output matches this (vLLM: guided_regex)",
    )
    grammar: str | SkipJsonSchema[None] = Field(
        None,
        max_length=MAX_GRAMMAR_CHARS,
        description="the output follows this Lark grammar (vLLM: guided_grammar)",
    )
    priority: int = Field(
        0, ge=-1000, le=1000, description="lower runs first, of one key's requests"
    )
    deadline: float | SkipJsonSchema[None] = Field(
        None,
        gt=0,
        le=MAX_DEADLINE_SECONDS,
        description="seconds from arrival; then the output ends, finish_reason 'deadline'",
    )
    cache_salt: str = Field(
        "",
        max_length=256,
        description="cached prefixes are shared only between requests with the same salt",
    )

    user: Ignored
    metadata: Ignored
    store: Ignored
    service_tier: Ignored
    safety_identifier: Ignored
    prompt_cache_key: Ignored
    prompt_cache_retention: Ignored

    @model_validator(mode="after")
    def _fields_that_go_together(self) -> _Sampling:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "stream_options needs stream: true")
        formats = [self.json_schema is not None, self.regex is not None, self.grammar is not None]
        formats.append(self.response_format is not None and self.response_format.type != "text")
        if sum(formats) > 1:
            raise PydanticCustomError(
                "grammar", "only one of response_format, json_schema, regex and grammar"
            )
        return self

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


def _kind_of_prompt(prompt: Any) -> str | None:
    if not isinstance(prompt, list):
        return "text" if isinstance(prompt, str) else None
    if prompt and isinstance(prompt[0], int):
        return "tokens"
    return "token lists" if prompt and isinstance(prompt[0], list) else "texts"


# By its first element, so that an error is about what was meant.
Prompt: TypeAlias = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[PromptTokens, Tag("tokens")]
    | Annotated[
        list[str], Tag("texts"), Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)
    ]
    | Annotated[
        list[PromptTokens],
        Tag("token lists"),
        Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS),
    ],
    Discriminator(
        _kind_of_prompt,
        custom_error_type="prompt",
        custom_error_message="expected a text, a list of tokens, or a list of either",
    ),
]


class CompletionRequest(_Sampling):
    prompt: Prompt = Field(description="a text or its tokens, or a list of either")
    max_tokens: int = Field(16, ge=0, description="0: the prompt is read, and nothing written")
    logprobs: int | SkipJsonSchema[None] = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool = Field(False, description="the prompt precedes the text, and its logprobs theirs")
    best_of: int | SkipJsonSchema[None] = Field(None, ge=1, description="as n, if given")
    suffix: Unsupported = None

    @model_validator(mode="after")
    def _completion_fields_that_go_together(self) -> CompletionRequest:
        if self.best_of not in (None, self.n):
            raise PydanticCustomError("best_of", "best_of other than n is not supported")
        return self


class TextPart(_Request):
    type: Literal["text"]
    text: str


Content: TypeAlias = str | Annotated[list[TextPart], Field(fail_fast=True)]


class FunctionCall(_Request):
    name: str
    arguments: str = Field(description="a JSON object")


class ToolCall(_Request):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class PlainMessage(_Request):
    role: Literal["system", "developer", "user"]
    content: Content
    name: Ignored


class ToolMessage(_Request):
    """What a call gave."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: str = ""


class PastAnswer(_Request):
    role: Literal["assistant"]
    content: Content = Field("", description="needed where there are no tool_calls")
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=MAX_TOOLS)] = []
    reasoning_content: str | SkipJsonSchema[None] = Field(None, description="for the template")
    name: Ignored
    function_call: Unsupported = None
    audio: Unsupported = None
    refusal: Ignored
    annotations: Ignored

    @model_validator(mode="after")
    def _says_something(self) -> PastAnswer:
        if "content" not in self.model_fields_set and not self.tool_calls:
            raise PydanticCustomError("content", "content or tool_calls is needed")
        return self


def _kind_of_message(message: Any) -> str:
    role = message.get("role") if isinstance(message, dict) else None
    return role if role in ("assistant", "tool") else "plain"


Message: TypeAlias = Annotated[
    Annotated[PlainMessage, Tag("plain")]
    | Annotated[PastAnswer, Tag("assistant")]
    | Annotated[ToolMessage, Tag("tool")],
    Discriminator(_kind_of_message),
]


Messages: TypeAlias = Annotated[
    list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)
]


class Function(_Request):
    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str = ""
    parameters: dict[str, Any] | SkipJsonSchema[None] = Field(
        None, description="JSON schema of an object"
    )
    strict: Ignored


class Tool(_Request):
    type: Literal["function"]
    function: Function


class NamedFunction(_Request):
    name: str


class NamedTool(_Request):
    type: Literal["function"]
    function: NamedFunction


class ChatCompletionRequest(_Sampling):
    messages: Messages
    max_tokens: int | SkipJsonSchema[None] = Field(
        None,
        ge=1,
        description=f"default: what the context leaves, with logprobs at most {MAX_SCORES} of them",
    )
    max_completion_tokens: int | SkipJsonSchema[None] = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | SkipJsonSchema[None] = Field(None, ge=0, le=MAX_LOGPROBS)
    chat_template_kwargs: dict[str, Any] = Field(
        {}, description="more variables for the model's template, such as enable_thinking"
    )
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] = []
    tool_choice: Literal["none", "auto", "required"] | NamedTool = Field(
        "auto",
        description="required, or a function's name: the arguments follow the function's schema",
    )
    parallel_tool_calls: bool = True
    functions: Unsupported = None
    function_call: Unsupported = None
    audio: Unsupported = None
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True, max_length=1)] = ["text"]
    prediction: Unsupported = None
    reasoning_effort: Unsupported = None
    verbosity: Unsupported = None
    web_search_options: Unsupported = None

    @model_validator(mode="after")
    def _chat_fields_that_go_together(self) -> ChatCompletionRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError("top_logprobs", "top_logprobs needs logprobs: true")
        if self.tool_choice not in ("none", "auto") and not self.tools:
            raise PydanticCustomError("tool_choice", "tool_choice needs tools")
        may_call = self.tools and self.tool_choice != "none"
        if may_call and (self.regex is not None or self.grammar is not None):
            raise PydanticCustomError("grammar", "regex and grammar leave no room for tools")
        if self.max_tokens not in (None, self.max_completion_tokens or self.max_tokens):
            raise PydanticCustomError("max_tokens", "other than max_completion_tokens")
        return self


class TokenizeRequest(_Request):
    """Either a text, or messages as the chat template writes them."""

    model: str | SkipJsonSchema[None] = None
    prompt: str | SkipJsonSchema[None] = None
    messages: Messages | SkipJsonSchema[None] = None
    add_special_tokens: bool = Field(True, description="of prompt; templates write their own")

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("prompt", "exactly one of prompt and messages is needed")
        return self


class DetokenizeRequest(_Request):
    model: str | SkipJsonSchema[None] = None
    tokens: Tokens


# ---- answers -----------------------------------------------------------------------------------


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None] = Field(description="null: the first token of a prompt")
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None


class Completion(BaseModel):
    """The whole answer, or one event of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]


class AssistantMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | None = None


class ToolCallDelta(ToolCall):
    index: int


class Delta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(BaseModel):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatCompletionChunk(BaseModel):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "jax_attn"
    max_model_len: int = Field(description="tokens, prompt and output together")


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeResponse(BaseModel):
    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeResponse(BaseModel):
    prompt: str


class Health(BaseModel):
    status: Literal["ok", "compiling", "draining", "failed"]
