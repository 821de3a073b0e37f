"""The bodies of the HTTP API: OpenAI's fields, this server's extensions, and their limits.

`fields` describes how the fields are read.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

from pydantic import (
    BaseModel,
    Discriminator,
    Field,
    PlainValidator,
    SerializerFunctionWrapHandler,
    Tag,
    model_serializer,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import PydanticCustomError

from jax_attn.serve._chat import custom_tools
from jax_attn.serve._openai.bounds import MAX_SCORES
from jax_attn.serve._openai.fields import (
    Ignored,
    PromptTokens,
    RequestBody,
    Tokens,
    ToolName,
    Unsupported,
    at_most,
    check_tokens,
    tokens_schema,
)

# Limits that are the same for every model. Those on length and on the queue depend on the engine.
MAX_CHOICES = 64  # n
MAX_PROMPTS = 1024
MAX_MESSAGES = 2048
MAX_TOOLS = 128
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKENS = 64
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 300
MAX_GRAMMAR_CHARS = 65536  # of a JSON schema, a regular expression or a grammar
MAX_ALTERNATIVES = 1024  # of guided_choice
MAX_DEADLINE_SECONDS = 86400


StopTokens: TypeAlias = Annotated[
    list[int],
    PlainValidator(check_tokens),
    at_most(MAX_STOP_TOKENS),  # checked first
    tokens_schema(maxItems=MAX_STOP_TOKENS),
]
StopString: TypeAlias = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


def _kind_of_stop(stop: Any) -> str:
    if stop == "":
        return "none"
    return "texts" if isinstance(stop, list) else "text"


# Chosen by type, so that an error is about the one that was meant.
Stop: TypeAlias = Annotated[
    Annotated[StopString, Tag("text")]
    | Annotated[Literal[""], Tag("none")]
    | Annotated[list[StopString], Tag("texts"), Field(fail_fast=True, max_length=MAX_STOP_STRINGS)],
    Discriminator(_kind_of_stop),
]


class StreamOptions(RequestBody):
    include_usage: bool = False
    include_obfuscation: Ignored


class JsonSchemaFormat(RequestBody):
    name: Annotated[str, Field(max_length=64)] = "schema"
    description: Ignored
    # A field named "schema" would hide a method of BaseModel.
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: Ignored  # the output always follows the schema


Alternatives: TypeAlias = Annotated[
    list[str],
    Field(
        fail_fast=True, min_length=1, max_length=MAX_ALTERNATIVES, description="the output is one"
    ),
]


class ResponseFormat(RequestBody):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | SkipJsonSchema[None] = None
    value: dict[str, Any] | SkipJsonSchema[None] = Field(
        None, description="a JSON schema beside json_object, as huggingface_hub sends it"
    )

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> ResponseFormat:
        if self.value is not None and self.type != "json_object":
            raise PydanticCustomError("response_format", "value belongs to type 'json_object'")
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise PydanticCustomError(
                "response_format", "json_schema belongs to type 'json_schema', and is needed there"
            )
        return self


class StructuredOutputs(RequestBody):
    """vLLM's form of constraints on the output."""

    # A field named "json" would hide a method of BaseModel.
    json_: dict[str, Any] | bool | str | SkipJsonSchema[None] = Field(None, alias="json")
    regex: str | SkipJsonSchema[None] = Field(None, max_length=MAX_GRAMMAR_CHARS)
    grammar: str | SkipJsonSchema[None] = Field(None, max_length=MAX_GRAMMAR_CHARS)
    choice: Alternatives | SkipJsonSchema[None] = None
    json_object: bool = False
    structural_tag: Unsupported = None
    disable_fallback: Ignored
    disable_any_whitespace: Ignored  # the output has no white space anyway
    disable_additional_properties: Unsupported = None
    whitespace_pattern: Unsupported = None


class OutputConstraint(NamedTuple):
    """A constraint on the output, and the field that it comes from."""

    field: str
    kind: Literal["json", "regex", "grammar", "choice"]
    value: Any


# Constraints that are plain fields of a request.
_CONSTRAINTS: tuple[tuple[str, Literal["json", "regex", "grammar", "choice"]], ...] = (
    ("json_schema", "json"),
    ("regex", "regex"),
    ("grammar", "grammar"),
    ("guided_json", "json"),
    ("guided_regex", "regex"),
    ("guided_grammar", "grammar"),
    ("guided_choice", "choice"),
)


class Generation(RequestBody):
    """Fields that all requests for text share."""

    model: str | SkipJsonSchema[None] = Field(None, description="as /v1/models names it")
    stream: bool = False
    stream_options: StreamOptions | SkipJsonSchema[None] = None
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
        at_most(MAX_LOGIT_BIAS),
        Field(max_length=MAX_LOGIT_BIAS, description="token id -> what is added to its logit"),
    ] = {}

    # Extensions of this server. With the openai client: extra_body={"top_k": 40}.
    top_k: int = Field(0, ge=-1, lt=2**31, description="0 or -1: off")
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    min_tokens: int = Field(0, ge=0, description="no end of text and no stop before so many")
    ignore_eos: bool = False
    stop_token_ids: StopTokens = []
    priority: int = Field(
        0, ge=-1000, le=1000, description="lower runs first, of one key's requests"
    )
    deadline: float | SkipJsonSchema[None] = Field(
        None,
        gt=0,
        le=MAX_DEADLINE_SECONDS,
        description="seconds from arrival; then the output ends: finish_reason 'length', and "
        "stop_reason 'deadline'",
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


class SamplingBody(Generation):
    """Fields that completions and chat completions share."""

    n: int = Field(1, ge=1, le=MAX_CHOICES, description="choices for each prompt")
    max_tokens: int | SkipJsonSchema[None] = Field(None, ge=1)
    response_format: ResponseFormat | SkipJsonSchema[None] = None

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
    # Extensions of vLLM, beside those above.
    guided_json: dict[str, Any] | bool | str | SkipJsonSchema[None] = Field(
        None, description="as json_schema, or its text"
    )
    guided_regex: str | SkipJsonSchema[None] = Field(None, max_length=MAX_GRAMMAR_CHARS)
    guided_grammar: str | SkipJsonSchema[None] = Field(None, max_length=MAX_GRAMMAR_CHARS)
    guided_choice: Alternatives | SkipJsonSchema[None] = None
    structured_outputs: StructuredOutputs | SkipJsonSchema[None] = None
    skip_special_tokens: bool = Field(True, description="in the text")
    include_stop_str_in_output: bool = Field(
        False, description="the text ends behind the stop string, or with the stop token, it met"
    )
    prompt_logprobs: int | SkipJsonSchema[None] = Field(
        None, ge=0, le=MAX_LOGPROBS, description="of the prompt's tokens, with so many others"
    )
    truncate_prompt_tokens: int | SkipJsonSchema[None] = Field(
        None,
        ge=-1,
        description="so many of its last tokens are the prompt; -1: as many as leave room for "
        "max_tokens",
    )
    guided_decoding_backend: Ignored
    guided_whitespace_pattern: Unsupported = None
    spaces_between_special_tokens: Ignored
    request_id: Ignored
    use_beam_search: bool = Field(
        False, description="the choices are the n likeliest texts that n beams find, the best first"
    )
    length_penalty: float = Field(
        1.0,
        ge=-10,
        le=10,
        description="of use_beam_search: texts are compared by the sum of their logprobs over "
        "length ** length_penalty",
    )
    early_stopping: Unsupported = None
    allowed_token_ids: Unsupported = None
    bad_words: Unsupported = None
    logits_processors: Unsupported = None
    prompt_embeds: Unsupported = None
    return_tokens_as_token_ids: bool = Field(
        False, description="log-probabilities name tokens as token_id:5"
    )
    return_token_ids: bool = Field(
        False, description="the answer has token_ids of the choices, and prompt_token_ids"
    )
    kv_transfer_params: Unsupported = None

    @model_validator(mode="after")
    def _fields_that_go_together(self) -> SamplingBody:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "stream_options needs stream: true")
        if len(constraints := self._constraints()) > 1:
            raise PydanticCustomError(
                "grammar",
                "only one of response_format, json_schema, regex, grammar, structured_outputs and "
                "guided_*, got {fields}",
                {"fields": " and ".join(dict.fromkeys(found.field for found in constraints))},
            )
        if self.truncate_prompt_tokens == 0:
            raise PydanticCustomError("truncate_prompt_tokens", "expected -1 or at least 1, got 0")
        if self.prompt_logprobs is not None and self.stream:
            raise PydanticCustomError("prompt_logprobs", "prompt_logprobs needs stream: false")
        return self

    @property
    def num_sampled(self) -> int:
        """Sequences for each prompt."""
        return self.n

    @property
    def constraint(self) -> OutputConstraint | None:
        return next(iter(self._constraints()), None)

    def _constraints(self) -> list[OutputConstraint]:
        found = [
            OutputConstraint(field, kind, value)
            for field, kind in _CONSTRAINTS
            if (value := getattr(self, field)) is not None
        ]
        if (format := self.response_format) is not None and format.type != "text":
            wanted = format.json_schema
            schema: Any = wanted.schema_ if wanted is not None else format.value
            schema = {"type": "object"} if schema is None else schema
            found.append(OutputConstraint("response_format", "json", schema))
        if (given := self.structured_outputs) is not None:
            field = "structured_outputs"
            found += [
                OutputConstraint(field, "json", given.json_),
                OutputConstraint(field, "json", {"type": "object"} if given.json_object else None),
                OutputConstraint(field, "regex", given.regex),
                OutputConstraint(field, "grammar", given.grammar),
                OutputConstraint(field, "choice", given.choice),
            ]
        return [each for each in found if each.value is not None]

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if isinstance(self.stop, str):
            return (self.stop,) if self.stop else ()
        return tuple(self.stop)


def kind_of_prompt(prompt: Any) -> str | None:
    if not isinstance(prompt, list):
        return "text" if isinstance(prompt, str) else None
    if prompt and isinstance(prompt[0], int | float):
        return "tokens"
    return "token lists" if prompt and isinstance(prompt[0], list) else "texts"


# Chosen by the first element, so that an error is about the kind that was meant.
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
        kind_of_prompt,
        custom_error_type="prompt",
        custom_error_message="expected a text, a list of tokens, or a list of either",
    ),
]


class CompletionRequest(SamplingBody):
    mm_processor_kwargs: Unsupported = None
    prompt: Prompt = Field(description="a text or its tokens, or a list of either")
    max_tokens: int = Field(16, ge=0, description="0: the prompt is read, and nothing written")
    logprobs: int | SkipJsonSchema[None] = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool = Field(False, description="the prompt precedes the text, and its logprobs theirs")
    best_of: int | SkipJsonSchema[None] = Field(
        None,
        ge=1,
        le=MAX_CHOICES,
        description="so many are generated; the n with the highest mean log-probability come back",
    )
    add_special_tokens: bool = Field(True, description="of the tokenizer, to prompts that are text")
    suffix: str = Field(
        "", description="what follows the text; for models with tokens for filling in the middle"
    )

    @model_validator(mode="after")
    def _completion_fields_that_go_together(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of < self.n:
            raise PydanticCustomError("best_of", "best_of is less than n")
        if self.num_sampled > self.n and self.stream:
            raise PydanticCustomError("best_of", "best_of beyond n needs stream: false")
        if self.suffix and self.echo:
            raise PydanticCustomError("suffix", "suffix needs echo: false")
        if self.suffix and kind_of_prompt(self.prompt) in ("tokens", "token lists"):
            raise PydanticCustomError("suffix", "suffix needs a prompt that is a text")
        return self

    @property
    def num_sampled(self) -> int:
        return self.best_of or self.n


class TextPart(RequestBody):
    type: Literal["text"]
    text: str
    cache_control: Ignored

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, part: Any) -> Any:
        """Refuses images, sounds and files, before their fields count as unknown."""
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        if isinstance(kind, str) and kind != "text":
            raise PydanticCustomError(
                "unsupported",
                "{type} is not supported by this server, 'text' is",
                {"type": repr(kind[:64]), "inside": "type"},
            )
        return part


class PictureUrl(RequestBody):
    url: str = Field(description="a data: URL with base64: PNG, JPEG, WEBP, GIF or BMP")
    detail: Ignored


class PicturePart(RequestBody):
    """A picture of the user, for models that read them."""

    type: Literal["image_url"]
    image_url: PictureUrl
    cache_control: Ignored


class RefusalPart(RequestBody):
    """A refusal by the assistant, instead of an answer."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


def _kind_of_part(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    return kind if kind in ("refusal", "image_url") else "text"


Content: TypeAlias = str | Annotated[list[TextPart], Field(fail_fast=True)]
ShownContent: TypeAlias = (
    str
    | Annotated[
        list[
            Annotated[
                Annotated[TextPart, Tag("text")]
                | Annotated[TextPart, Tag("refusal")]
                | Annotated[PicturePart, Tag("image_url")],
                Discriminator(_kind_of_part),
            ]
        ],
        Field(fail_fast=True),
    ]
)
SaidContent: TypeAlias = (
    str
    | Annotated[
        list[
            Annotated[
                Annotated[TextPart, Tag("text")]
                | Annotated[TextPart, Tag("image_url")]
                | Annotated[RefusalPart, Tag("refusal")],
                Discriminator(_kind_of_part),
            ]
        ],
        Field(fail_fast=True),
    ]
)


class Prediction(RequestBody):
    type: Literal["content"]
    content: Content

    @property
    def text(self) -> str:
        content = self.content
        return content if isinstance(content, str) else "".join(part.text for part in content)


class FunctionCall(RequestBody):
    name: str
    arguments: str = Field(description="a JSON object")


class ToolCall(RequestBody):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class CustomCall(RequestBody):
    name: str
    input: str


class CustomToolCall(RequestBody):
    """A call of a custom tool, whose input is a text."""

    id: str
    type: Literal["custom"] = "custom"
    custom: CustomCall


class PastToolCall(ToolCall):
    """A call copied from an answer or joined from a stream, whose pieces have an index."""

    index: Ignored


class PastCustomToolCall(CustomToolCall):
    index: Ignored

    @property
    def function(self) -> FunctionCall:
        """The call as the model wrote it."""
        call = self.custom
        return FunctionCall(name=call.name, arguments=custom_tools.arguments_of(call.input))


def _kind_of_tool(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else None
    return "custom" if kind == "custom" else "function"


class PlainMessage(RequestBody):
    role: Literal["system", "developer", "user"]
    content: ShownContent
    name: Ignored
    cache_control: Ignored


class ToolMessage(RequestBody):
    """The result of a call."""

    role: Literal["tool"]
    content: Content = ""
    tool_call_id: str
    name: str = ""
    cache_control: Ignored


class PastAnswer(RequestBody):
    role: Literal["assistant"]
    content: SaidContent = ""
    tool_calls: Annotated[
        list[
            Annotated[
                Annotated[PastToolCall, Tag("function")]
                | Annotated[PastCustomToolCall, Tag("custom")],
                Discriminator(_kind_of_tool),
            ]
        ],
        Field(fail_fast=True, max_length=MAX_TOOLS),
    ] = []
    reasoning_content: str | SkipJsonSchema[None] = Field(None, description="for the template")
    reasoning: str | SkipJsonSchema[None] = Field(None, description="as reasoning_content")
    reasoning_details: Ignored
    name: Ignored
    cache_control: Ignored
    function_call: Unsupported = None
    audio: Unsupported = None
    refusal: Ignored
    annotations: Ignored


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


class Function(RequestBody):
    name: ToolName
    description: str = ""
    parameters: dict[str, Any] | SkipJsonSchema[None] = Field(
        None, description="JSON schema of an object"
    )
    strict: bool = Field(False, description="calls follow the schema also with tool_choice auto")


class Tool(RequestBody):
    type: Literal["function"]
    function: Function
    cache_control: Ignored

    def demanded(self) -> dict[str, Any]:
        """The function that a grammar of calls has."""
        return self.function.model_dump()

    def shown(self) -> dict[str, Any]:
        """What the chat template sees of it."""
        return self.model_dump(exclude_unset=True, exclude={"function": {"strict"}})


class GrammarText(RequestBody):
    syntax: Literal["lark", "regex"]
    definition: str = Field(min_length=1, max_length=MAX_GRAMMAR_CHARS)


class CustomFormat(RequestBody):
    type: Literal["text", "grammar"]
    grammar: GrammarText | SkipJsonSchema[None] = None

    @model_validator(mode="after")
    def _grammar_where_it_belongs(self) -> CustomFormat:
        if (self.type == "grammar") != (self.grammar is not None):
            raise PydanticCustomError(
                "grammar", "grammar belongs to type 'grammar', and is needed there"
            )
        return self


class Custom(RequestBody):
    name: ToolName
    description: str = ""
    format: CustomFormat = Field(
        CustomFormat(type="text"), description="grammar: the input follows it once a call begins"
    )


class CustomTool(RequestBody):
    """A tool whose input is a text. Models see a function with one argument."""

    type: Literal["custom"]
    custom: Custom
    cache_control: Ignored

    @property
    def function(self) -> Function:
        return Function(
            name=self.custom.name,
            description=self.custom.description,
            parameters=custom_tools.SCHEMA,
            strict=self.custom.format.grammar is not None,
        )

    def demanded(self) -> dict[str, Any]:
        """See Tool."""
        given = self.custom.format.grammar
        pair = None if given is None else (given.syntax, given.definition)
        return self.function.model_dump() | {"input_grammar": pair}

    def shown(self) -> dict[str, Any]:
        """What the chat template sees of it."""
        custom, parameters = self.custom, custom_tools.SCHEMA
        description = custom.description
        if (given := custom.format.grammar) is not None:
            description += f"\nThe input follows this {given.syntax} grammar:\n{given.definition}"
        function = {
            "name": custom.name,
            "description": description.strip(),
            "parameters": parameters,
        }
        return {"type": "function", "function": function}


class NamedFunction(RequestBody):
    name: str


class NamedTool(RequestBody):
    type: Literal["function"]
    function: NamedFunction


class NamedCustomTool(RequestBody):
    type: Literal["custom"]
    custom: NamedFunction

    @property
    def function(self) -> NamedFunction:
        return self.custom


AnyNamedTool: TypeAlias = Annotated[
    Annotated[NamedTool, Tag("function")] | Annotated[NamedCustomTool, Tag("custom")],
    Discriminator(_kind_of_tool),
]


class AllowedToolNames(RequestBody):
    mode: Literal["auto", "required"]
    tools: Annotated[list[AnyNamedTool], Field(fail_fast=True, min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(RequestBody):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedToolNames


def _kind_of_choice(choice: Any) -> str:
    if not isinstance(choice, dict):
        return "word"
    kind = choice.get("type")
    return {"allowed_tools": "allowed", "custom": "custom"}.get(str(kind), "named")


ToolChoice: TypeAlias = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")]
    | Annotated[NamedTool, Tag("named")]
    | Annotated[NamedCustomTool, Tag("custom")]
    | Annotated[AllowedTools, Tag("allowed")],
    Discriminator(_kind_of_choice),
]


class PictureOptions(RequestBody):
    do_pan_and_scan: bool = Field(
        False, description="parts of long pictures are shown beside them; for Gemma 3"
    )


class ChatCompletionRequest(SamplingBody):
    messages: Messages
    mm_processor_kwargs: PictureOptions | SkipJsonSchema[None] = None
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
    tools: Annotated[
        list[
            Annotated[
                Annotated[Tool, Tag("function")] | Annotated[CustomTool, Tag("custom")],
                Discriminator(_kind_of_tool),
            ]
        ],
        Field(fail_fast=True, max_length=MAX_TOOLS),
    ] = []
    tool_choice: ToolChoice = Field(
        "auto",
        description="required, or a function's name: the arguments follow the function's schema; "
        "allowed_tools: the model sees these alone",
    )
    parallel_tool_calls: bool = True
    functions: Unsupported = None
    function_call: Unsupported = None
    audio: Unsupported = None
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True, max_length=1)] = ["text"]
    prediction: Prediction | SkipJsonSchema[None] = Field(
        None,
        description="a text that the answer may repeat: with --max-drafts it takes fewer steps",
    )
    reasoning_effort: str | SkipJsonSchema[None] = Field(
        None, max_length=32, description="for the template; none: enable_thinking is false, too"
    )
    include_reasoning: bool = Field(True, description="false: the answer has no reasoning_content")
    add_generation_prompt: bool = Field(
        True, description="the prompt ends with the beginning of the assistant's message"
    )
    continue_final_message: bool = Field(
        False, description="the answer continues the last message, which stays open"
    )
    chat_template: str | SkipJsonSchema[None] = Field(
        None, max_length=256, description="one of the model's, by its name"
    )
    add_special_tokens: bool = Field(False, description="of the tokenizer; templates have theirs")
    echo: Unsupported = None
    documents: Unsupported = None
    verbosity: Ignored  # a hint
    web_search_options: Unsupported = None

    @model_validator(mode="after")
    def _chat_fields_that_go_together(self) -> ChatCompletionRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError("top_logprobs", "top_logprobs needs logprobs: true")
        if self.tool_choice not in ("none", "auto") and not self.tools:
            raise PydanticCustomError("tool_choice", "tool_choice needs tools")
        if isinstance(self.tool_choice, AllowedTools):
            allowed = self.tool_choice.allowed_tools
            names = {tool.function.name for tool in allowed.tools}
            if unknown := names - {tool.function.name for tool in self.tools}:
                raise PydanticCustomError(
                    "tool_choice", "{name} is none of the tools", {"name": repr(min(unknown)[:64])}
                )
            self.tools = [tool for tool in self.tools if tool.function.name in names]
            self.tool_choice = allowed.mode
        may_call = self.tools and self.tool_choice != "none"
        if may_call and self.constraint is not None and self.constraint.kind != "json":
            raise PydanticCustomError(
                "grammar", "{field} leaves no room for tools", {"field": self.constraint.field}
            )
        if self.continue_final_message:
            if "add_generation_prompt" in self.model_fields_set and self.add_generation_prompt:
                raise PydanticCustomError(
                    "continue_final_message",
                    "continue_final_message needs add_generation_prompt: false",
                )
            self.add_generation_prompt = False
        if self.prediction is not None and self.n > 1:
            raise PydanticCustomError("prediction", "prediction needs n: 1")
        if self.max_tokens not in (None, self.max_completion_tokens or self.max_tokens):
            raise PydanticCustomError("max_tokens", "other than max_completion_tokens")
        return self

    @property
    def answers_freely(self) -> bool:
        """Whether the answer may be any text, and calls in it."""
        return self.tool_choice == "auto" and self.constraint is None

    @property
    def may_call_several(self) -> bool:
        """Whether an answer may have several calls: a function that is named is called once."""
        is_named = isinstance(self.tool_choice, NamedTool | NamedCustomTool)
        return self.parallel_tool_calls and not is_named


class TokenizeRequest(RequestBody):
    """A text, or messages that the chat template renders."""

    model: str | SkipJsonSchema[None] = None
    prompt: str | SkipJsonSchema[None] = None
    messages: Messages | SkipJsonSchema[None] = None
    add_special_tokens: bool = Field(True, description="of prompt; templates write their own")

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("prompt", "exactly one of prompt and messages is needed")
        return self


class DetokenizeRequest(RequestBody):
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


class PromptLogprob(BaseModel):
    """The entry of a token in vLLM's format; the token is its key."""

    logprob: float
    rank: int | None = Field(description="1: the likeliest; null: beyond those that are here")
    decoded_token: str


FinishReason: TypeAlias = Literal["stop", "length", "tool_calls"] | None
StopReason: TypeAlias = Annotated[
    Literal["deadline", "error"] | None,
    Field(description="what finish_reason has no word for: out of time, or a grammar got stuck"),
]


PromptTokenIds: TypeAlias = Annotated[
    list[int] | None, Field(description="with return_token_ids; of a stream, in the first event")
]
TokenIds: TypeAlias = Annotated[
    list[int] | None,
    Field(description="with return_token_ids: all tokens, also the one that ends the text"),
]


class CompletionChoice(BaseModel):
    index: int
    text: str
    prompt_token_ids: PromptTokenIds = None
    token_ids: TokenIds = None
    logprobs: CompletionLogprobs | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None
    finish_reason: FinishReason = None
    stop_reason: StopReason = None


class Completion(BaseModel):
    """A whole answer, or one event of a stream."""

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
    reasoning_content: str | None = Field(None, description="what the model thought before it")
    refusal: None = None
    tool_calls: list[ToolCall | CustomToolCall] | None = None


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    token_ids: TokenIds = None
    logprobs: ChatLogprobs | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None
    finish_reason: FinishReason = None
    stop_reason: StopReason = None


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    prompt_token_ids: PromptTokenIds = None
    usage: Usage | None = None


class Sparse(BaseModel):
    """Fields without a value are not sent."""

    @model_serializer(mode="wrap")
    def _without_nulls(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in serialize(self).items() if value is not None}


class FunctionDelta(Sparse):
    name: str | None = None
    arguments: str


class CustomDelta(Sparse):
    name: str | None = None
    input: str


class ToolCallDelta(Sparse):
    """A part of a call. Only the first has name, id and type; arguments follow it in pieces."""

    index: int
    id: str | None = None
    type: Literal["function", "custom"] | None = None
    function: FunctionDelta | None = None
    custom: CustomDelta | None = None


class Delta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(BaseModel):
    index: int
    delta: Delta
    token_ids: TokenIds = None
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason = None
    stop_reason: StopReason = None


class ChatCompletionChunk(BaseModel):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    prompt_token_ids: PromptTokenIds = None
    usage: Usage | None = None


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "jax_attn"
    max_model_len: int = Field(description="tokens, prompt and output together")
    parent: str | None = Field(None, description="of a LoRA adapter: the model it changes")
    quantization: str | None = Field(
        None, description="how its files' matrices are quantized, such as gptq; null: they are not"
    )
    features: list[str] = Field(
        description="what it can do: completions, chat, tools, thinking, fill_in_the_middle,"
        " pictures; or embeddings; or scores"
    )


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeResponse(BaseModel):
    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeResponse(BaseModel):
    prompt: str


class WeightsRequest(RequestBody):
    """New weights for the engine, by an operator."""

    path: str = Field(description="a model directory, below --weights-directory")
    version: str | SkipJsonSchema[None] = Field(
        None, min_length=1, description="a name; without one the number of updates so far"
    )
    keep_prefixes: bool = Field(False, description="keep what other versions have cached")


class LoraRequest(RequestBody):
    """A LoRA adapter for the engine, by an operator."""

    name: str = Field(min_length=1, max_length=200, description="as clients name it")
    path: str = Field(description="a directory of an adapter, below --weights-directory")


class HandOverRequest(RequestBody):
    """A request that goes on in another server, by an operator."""

    path: Literal["/v1/completions", "/v1/chat/completions"] = Field(
        description="the route that the request is for"
    )
    body: dict[str, Any] = Field(description="what its client has sent there; n is 1")
    num_tokens: int = Field(1, ge=1, description="of output before it goes")


class PauseRequest(RequestBody):
    end: bool = Field(False, description="end the requests there are, instead of holding them")


class ResumeRequest(RequestBody):
    pass


class Weights(BaseModel):
    version: str


class Version(BaseModel):
    version: str


class Health(BaseModel):
    status: Literal["ok", "compiling", "draining", "failed"]
