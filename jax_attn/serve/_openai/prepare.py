"""From a request body to sequences for the engine: templates, tokens, grammars and checks.

This may take a while (a long prompt, a large schema), so the server runs it in a thread.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import secrets
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import ValidationError

from jax_attn import models
from jax_attn.serve._chat import chat, custom_tools, gemma_tool_calls, harmony, reasoning, tools
from jax_attn.serve._grammar import grammar
from jax_attn.serve._openai import beams, fill_in_middle, schemas
from jax_attn.serve._openai.beams import Beams
from jax_attn.serve._openai.bounds import MAX_SCORES, KeyLimits
from jax_attn.serve._openai.errors import bad_field, model_not_found, overflow
from jax_attn.serve._openai.limits import check_one
from jax_attn.serve._openai.messages import for_template
from jax_attn.serve._openai.pictures import PictureReader
from jax_attn.serve._openai.served_models import ServedModel
from jax_attn.serve._openai.text_encoder import TextEncoder
from jax_attn.serve._scheduling.pictures import Picture
from jax_attn.serve._scheduling.protocols import ServedEngine
from jax_attn.serve._scheduling.request import SamplingParams, Sequence
from jax_attn.serve._scheduling.tenants import namespace
from jax_attn.serve._text.detokenizer import Detokenizer, Texts


@dataclass(frozen=True)
class Caller:
    tenant: str  # name of the tenant whose key was sent; "" without keys
    arrival: float  # of the request, time.monotonic()


@dataclass(frozen=True)
class Prepared:
    """A checked request. Choice i of prompt p is sequences[p * n + i], and has that index."""

    id: str
    model: str
    prompts: list[list[int]]
    echoes: list[str]  # what precedes the text of each prompt's choices
    sequences: list[Sequence]
    arrival: float  # time.monotonic()
    begins: list[bool]  # the output of each prompt is a text of its own
    tool_format: tools.ToolFormat | None = None  # None: the text may hold no tool calls
    tool_names: frozenset[str] = frozenset()  # of the functions that it may call
    custom_tools: frozenset[str] = frozenset()  # those of them whose input is a text
    max_tool_calls: int | None = None  # per choice; None: any number
    splitter: Callable[[], reasoning.Splitter] | None = None  # None: the text has no thoughts
    shows_reasoning: bool = True
    grammar_field: str | None = None  # the body's field that the grammar came from
    num_prompt_top: int | None = None  # likeliest tokens to report for each prompt token
    returns_ids: bool = False  # the answer has the tokens of prompts and choices
    num_best: int | None = None  # choices of each prompt that are shown: the likeliest; None: all
    beams: Beams | None = None  # the choices are the texts of beam searches; None: samples

    @property
    def num_choices(self) -> int:
        return len(self.sequences) // len(self.prompts)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))


class ChatPrompt(NamedTuple):
    """The prompt of a chat.

    splitter: for the thoughts in its answer, if it may have any.
    """

    text: str
    tokens: list[int]
    pictures: tuple[Picture, ...]
    splitter: Callable[[], reasoning.Splitter] | None


Made = TypeVar("Made")

_MOST_TOKENS = 1 << 18  # limit for /tokenize and /detokenize
_MAX_ECHO_CHARS = 1 << 22  # sum over all choices


class Preparer:
    def __init__(
        self,
        model: ServedModel,
        engine: ServedEngine,
        directory: str | Path,
        names: Seq[str],
        limits: KeyLimits,
        defaults: Mapping[str, Any],
        vision: models.VisionModel | None = None,
        max_pictures: int | None = None,
    ):
        """names: of the model, for clients; answers use the first. defaults: of request fields.
        vision, max_pictures: see PictureReader.

        Raises:
          chat.ChatTemplateError: the directory's template does not compile.
        """
        self.name, self._names = names[0], frozenset(names)
        self.max_model_len: int = engine.limits.max_model_len
        self.adapters: list[str] = []  # LoRA adapters, which clients name as the model
        self._limits, self.defaults = limits, defaults
        self._tokenizer = model.tokenizer
        self._texts = TextEncoder(model.tokenizer)
        self._pictures = PictureReader(vision, model.tokenizer, self.max_model_len, max_pictures)
        self._vocab_size, self._eos_tokens = model.config.vocab_size, model.config.eos_tokens
        added = model.tokenizer.get_added_tokens_decoder()
        self._special_tokens = {t.content: id for id, t in added.items() if t.special}
        self._special_ids = frozenset(self._special_tokens.values())
        self._added_tokens = {t.content: id for id, t in added.items() if id < self._vocab_size}
        self._fill_in_middle = fill_in_middle.format_of(self._added_tokens)
        self._template = chat.load(directory)
        add_bos = chat.tokenizer_config(directory).get("add_bos_token", False)
        self._bos = model.config.bos_token if add_bos else None

    @property
    def names(self) -> list[str]:
        return [self.name, *sorted(self._names - {self.name})]

    @property
    def chat_template(self) -> str:
        """Jinja's source; "": the model has none."""
        return self._template.source

    @property
    def features(self) -> list[str]:
        """What requests may ask of the model, in the words of /v1/models."""
        template = self._template
        found = {
            "chat": bool(template.source),
            "tools": template.tool_format is not None,
            "thinking": template.thinks or template.writes_channels,
            "fill_in_the_middle": self._fill_in_middle is not None,
            "pictures": self._pictures.has_model,
        }
        return ["completions", *(name for name, has in found.items() if has)]

    def completion(self, body: schemas.CompletionRequest, caller: Caller) -> Prepared:
        """Prepares a completion. Raises ApiError."""
        self.check_model(body.model)
        beams.check(body)
        prompt = body.prompt
        if isinstance(prompt, str) or isinstance(prompt[0], int):
            prompt = [prompt]  # type: ignore[assignment]
        if body.suffix:
            prompt = [self._around(p, body.suffix) for p in prompt]  # type: ignore[arg-type]
        prompts: list[list[int]] = [
            self._truncated(
                self.encode(p, body.add_special_tokens) if isinstance(p, str) else p,  # type: ignore[arg-type]
                body,
                body.max_tokens,
            )
            for p in prompt
        ]
        lengths = self._lengths(body, prompts, "prompt", body.logprobs, body.echo, caller)
        for tokens in prompts:
            self._checked(tokens)
        echoes = [""] * len(prompts)
        if body.echo:
            echoes = [
                p
                if isinstance(p, str) and body.truncate_prompt_tokens is None
                else self.decode(ids)
                for p, ids in zip(prompt, prompts, strict=True)
            ]
            if (num_chars := sum(map(len, echoes)) * body.num_sampled) > _MAX_ECHO_CHARS:
                raise bad_field(
                    "echo",
                    f"the prompts x n = {body.num_sampled} have {num_chars} characters, which are "
                    f"more than {_MAX_ECHO_CHARS}",
                )
        picks = body.num_sampled > body.n
        params = self._params(body, 0 if picks and body.logprobs is None else body.logprobs)
        if body.echo and body.logprobs is not None:
            params["prompt_logprobs"] = True
        if body.suffix and (format := self._fill_in_middle) is not None:
            ends = [self._added_tokens[mark] for mark in format.stops if mark in self._added_tokens]
            params["stop_token_ids"] += tuple(ends)
        prepared = self._prepared("cmpl-", body, prompts, echoes, lengths, params, caller)
        return dataclasses.replace(prepared, num_best=body.n if picks else None)

    def _around(self, prefix: str, suffix: str) -> str:
        """The prompt for the text between these. Raises ApiError."""
        if self._fill_in_middle is None:
            raise bad_field(
                "suffix",
                "the model has no tokens for filling in the middle that this server knows (those of"
                " Qwen, CodeGemma, StarCoder, Granite, DeepSeek and Codestral)",
            )
        return self._fill_in_middle.prompt(prefix, suffix)

    def chat(
        self, body: schemas.ChatCompletionRequest, caller: Caller, prefix: str = "chatcmpl-"
    ) -> Prepared:
        """Prepares a chat completion. prefix: of the answer's identifier. Raises ApiError."""
        self.check_model(body.model)
        beams.check(body)
        tool_format = self._tool_format(body)
        shown = [tool.shown() for tool in body.tools] if tool_format else None
        _, prompt, pictures, splitter = self._chat_prompt(body, shown)
        max_tokens = body.max_completion_tokens or body.max_tokens
        if pictures and body.truncate_prompt_tokens is not None:
            raise bad_field("truncate_prompt_tokens", "not supported with pictures")
        prompt = self._checked(self._truncated(prompt, body, max_tokens or 1), "messages")
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        lengths = self._lengths(body, [prompt], "messages", logprobs, False, caller)
        params = self._params(body, logprobs)
        marks = []
        if tool_format is not None:
            params["grammar"] = self._tool_grammar(body, tool_format)
            marks += tool_format.marks
        has_grammar = params["grammar"] is not None and not body.answers_freely
        params["goes_on"] = answer_goes_on(body.continue_final_message, has_grammar)
        if splitter is not None:
            marks += [harmony.CHANNEL, reasoning.THINK, reasoning.END_THINK]
        if any(mark in self._special_tokens for mark in marks):
            params["skip_special_tokens"] = False
        if self._template.writes_channels and harmony.CALL in self._special_tokens:
            params["stop_token_ids"] += (self._special_tokens[harmony.CALL],)
        prepared = self._prepared(prefix, body, [prompt], [""], lengths, params, caller, pictures)
        if body.prediction is not None:
            guess = self._texts.encode(
                body.prediction.text, "prediction", self.max_model_len, False
            )
            prepared.sequences[0].predicted = guess[: self.max_model_len]
        return dataclasses.replace(
            prepared,
            tool_format=None if self._template.writes_channels else tool_format,
            tool_names=frozenset(tool.function.name for tool in body.tools),
            custom_tools=frozenset(
                tool.custom.name for tool in body.tools if isinstance(tool, schemas.CustomTool)
            ),
            max_tool_calls=None if body.may_call_several else 1,
            splitter=splitter,
            shows_reasoning=body.include_reasoning,
        )

    def chat_prompt(self, body: schemas.ChatCompletionRequest) -> ChatPrompt:
        """The prompt of a chat. Raises ApiError.

        The template sees the tools, whatever it has the model write to call them.
        """
        tools = [tool.shown() for tool in body.tools or ()]
        return self._chat_prompt(body, tools or None)

    def _chat_prompt(
        self, body: schemas.ChatCompletionRequest, tools: list[dict[str, Any]] | None
    ) -> ChatPrompt:
        options = body.mm_processor_kwargs
        pans = options is not None and options.do_pan_and_scan
        shown = self._pictures.read(body.messages, pans)
        text, splitter = self._rendered(body, tools)
        text = self._pictures.mark(text, shown)
        tokens = self._texts.encode(text, "messages", self.max_model_len, body.add_special_tokens)
        tokens, pictures = self._pictures.place(tokens, shown)
        return ChatPrompt(text, tokens, pictures, splitter)

    def _rendered(
        self, body: schemas.ChatCompletionRequest, tools: list[dict[str, Any]] | None
    ) -> tuple[str, Callable[[], reasoning.Splitter] | None]:
        """The prompt's text, and a splitter for the thoughts in its answer, if it may have any."""
        variables: dict[str, Any] = {"add_generation_prompt": body.add_generation_prompt}
        if body.reasoning_effort is not None:
            variables["reasoning_effort"] = body.reasoning_effort
            if body.reasoning_effort == "none":
                variables["enable_thinking"] = False
        variables |= body.chat_template_kwargs
        text = self._render(
            body.messages, variables, tools, body.chat_template, body.continue_final_message
        )
        answers_at_once = body.constraint is not None
        if self._template.writes_channels:
            if answers_at_once and not tools and body.add_generation_prompt:
                text += harmony.FINAL
            is_answer = text.endswith(harmony.FINAL) or body.continue_final_message
            return text, lambda: harmony.HarmonySplitter(is_answer)
        if not self._template.thinks:
            return text, None
        is_open = text.rstrip().endswith(reasoning.THINK)
        if is_open and (answers_at_once or body.tool_choice not in ("none", "auto")):
            text, is_open = f"{text.rstrip()}\n\n{reasoning.END_THINK}\n\n", False
        return text, lambda: reasoning.ThinkSplitter(is_open)

    def _tool_format(self, body: schemas.ChatCompletionRequest) -> tools.ToolFormat | None:
        """The format of the calls that the answer may have; None: the request wants none."""
        if not body.tools or body.tool_choice == "none":
            return None
        if self._template.tool_format is None:
            raise bad_field(
                "tools",
                "the model's chat template writes no tool calls that this server can read (those "
                "of Hermes, Qwen, Llama 3, Mistral, gpt-oss, DeepSeek and Gemma)",
            )
        return self._template.tool_format

    def _tool_grammar(
        self, body: schemas.ChatCompletionRequest, tool_format: tools.ToolFormat
    ) -> str | None:
        """The grammar for calls that the request demands; None: the output is not restricted."""
        answer: Any = None
        if body.answers_freely:
            return self._grammar_once_begun(body, tool_format)
        if body.tool_choice == "auto" and (constraint := body.constraint) is not None:
            answer = self._made(constraint.field, lambda: grammar.usable_schema(constraint.value))
            answer = answer if isinstance(answer, dict) else {}
        functions = [tool.demanded() for tool in body.tools]
        if isinstance(body.tool_choice, schemas.NamedTool | schemas.NamedCustomTool):
            name = body.tool_choice.function.name
            functions = [function for function in functions if function["name"] == name]
            if not functions:
                raise bad_field("tool_choice", f"{name[:64]!r} is none of the tools")
        self._make_usable(functions, tool_format)
        try:
            text = tools.grammar_of(
                tool_format, functions, body.may_call_several, answer, self._special_tokens
            )
        except custom_tools.CustomToolError as error:
            raise bad_field("tools", f"format: {error}") from None
        except gemma_tool_calls.CannotDemand as error:
            raise bad_field(
                "tools",
                f"a call that follows the schema cannot be demanded from this model: {error}; "
                "tool_choice 'auto' can",
            ) from None
        return self._made("tools", lambda: _tools_grammar(text, functions))

    def _grammar_once_begun(
        self, body: schemas.ChatCompletionRequest, tool_format: tools.ToolFormat
    ) -> str | None:
        """The grammar for a text whose calls of strict tools follow their schemas, if any.

        In Gemma's format calls of the other tools do, too, where their schemas have a grammar.
        Raises ApiError where a strict tool's calls cannot follow it.
        """
        functions = [tool.demanded() for tool in body.tools]
        if not any(function["strict"] for function in functions):
            return None
        for function in functions:
            if not (function["strict"] or tool_format.quote):
                function["parameters"] = {"type": "object"}
        self._make_usable(functions, tool_format)
        for function in functions:
            if tool_format.quote and function.get("input_grammar") is None:
                self._find_freedom(function, tool_format)
        thoughts = (reasoning.THINK, reasoning.END_THINK) if self._template.thinks else ()
        try:
            text = tools.grammar_once_begun(
                tool_format, functions, body.may_call_several, self._special_tokens, thoughts
            )
        except custom_tools.CustomToolError as error:
            raise bad_field("tools", f"format: {error}") from None
        if text is None and any(function.get("input_grammar") for function in functions):
            raise bad_field(
                "tools",
                "format: with tool_choice 'auto' this model's calls cannot follow a grammar;"
                " 'required' can",
            )
        if text is None:
            return None
        return self._made("tools", lambda: _tools_grammar(text, functions))

    def _find_freedom(self, function: dict[str, Any], tool_format: tools.ToolFormat) -> None:
        """Marks a function in Gemma's format whose schema has no grammar there.

        Raises ApiError for one that is strict, or whose calls would have no end.
        """
        try:
            schema = function["parameters"] or {}
            gemma_tool_calls.rules("f", schema, tool_format.quote, tool_format.quote)
        except gemma_tool_calls.CannotDemand as error:
            marks = (tool_format.behind, tool_format.quote)
            if function["strict"] or not all(mark in self._special_tokens for mark in marks):
                raise bad_field(
                    "tools",
                    f"strict: calls of {function['name']!r} cannot follow the schema with this"
                    f" model: {error}",
                ) from None
            function["is_free"] = True

    def _make_usable(self, functions: list[dict[str, Any]], tool_format: tools.ToolFormat) -> None:
        """Replaces the schemas by those that grammars are made of."""
        # Gemma's format has numbers as they are written.
        usable = functools.partial(grammar.usable_schema, check_numbers=not tool_format.quote)
        for function in functions:
            schema = function["parameters"]
            function["parameters"] = self._made("tools", functools.partial(usable, schema))

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self._names and name not in self.adapters:
            raise model_not_found(name, self.name)

    def encode(
        self, text: str, add_special_tokens: bool = True, most: int | None = None
    ) -> list[int]:
        """Encodes a text. most: number of tokens of use. Raises ApiError if there are far more."""
        tokens = self._texts.encode(text, "prompt", self.max_model_len, add_special_tokens, most)
        return self._with_bos(tokens) if add_special_tokens else tokens

    def encode_all(self, texts: list[str]) -> list[list[int]]:
        """Encodes texts with special tokens, as a batch. Checks no lengths."""
        return [self._with_bos(tokens) for tokens in self._texts.encode_all(texts)]

    def _with_bos(self, tokens: list[int]) -> list[int]:
        is_missing = self._bos is not None and tokens[:1] != [self._bos]
        return [self._bos, *tokens] if is_missing else tokens  # type: ignore[list-item]

    def encode_messages(
        self,
        messages: list[schemas.Message],
        variables: dict[str, Any],
        tools: list[dict[str, Any]] | None = None,
        most: int | None = None,
    ) -> list[int]:
        shown = self._pictures.read(messages)
        text = self._pictures.mark(self._render(messages, variables, tools), shown)
        tokens = self._texts.encode(text, "messages", self.max_model_len, False, most)
        return self._pictures.place(tokens, shown)[0]

    def _render(
        self,
        messages: list[schemas.Message],
        variables: dict[str, Any],
        tools: list[dict[str, Any]] | None = None,
        name: str | None = None,
        continues: bool = False,
    ) -> str:
        """See ChatTemplate.render. Raises ApiError."""
        plain = [
            for_template(message, f"messages[{i}]", self._template.writes_channels)
            for i, message in enumerate(messages)
        ]
        try:
            return self._template.render(plain, variables, tools, name, continues)
        except chat.ChatTemplateError as error:
            field, _, rest = str(error).partition(": ")
            if rest and field in ("chat_template", "continue_final_message"):
                raise bad_field(field, rest) from None
            raise bad_field("messages", str(error)) from None

    def _truncated(
        self, tokens: list[int], body: schemas.SamplingBody, max_tokens: int
    ) -> list[int]:
        """Keeps the last tokens only, if the request asks for that."""
        most = body.truncate_prompt_tokens
        if most is None:
            return tokens
        if most < 0:
            most = max(1, self.max_model_len - max_tokens)
        return tokens[-most:]

    def tokenize(self, body: schemas.TokenizeRequest) -> list[int]:
        """Answers /tokenize. Raises ApiError."""
        self.check_model(body.model)
        most = max(_MOST_TOKENS, self.max_model_len)
        if body.messages is not None:
            return self.encode_messages(body.messages, {}, most=most)
        return self.encode(body.prompt or "", body.add_special_tokens, most)

    def detokenize(self, body: schemas.DetokenizeRequest) -> str:
        """Answers /detokenize. Raises ApiError."""
        self.check_model(body.model)
        most = max(_MOST_TOKENS, self.max_model_len)
        if len(body.tokens) > most:
            raise bad_field("tokens", f"expected at most {most} tokens, got {len(body.tokens)}")
        return self.decode(body.tokens)

    def decode(self, tokens: list[int]) -> str:
        """Decodes tokens. Raises ApiError."""
        return self.decode_all([self._checked(tokens, "tokens")])[0]

    def decode_all(self, tokens: list[list[int]]) -> list[str]:
        # As a batch, which lets other threads run meanwhile.
        return self._tokenizer.decode_batch(tokens, skip_special_tokens=False)

    def text_of(self, seq: Sequence, tokens: list[int]) -> str:
        """The text of output tokens of a sequence, as the engine makes it."""
        params = seq.params
        text = Detokenizer(
            self._output_texts,
            skip_special_tokens=params.skip_special_tokens,
            before=seq.tokens if params.goes_on else (),
        )
        return "".join(map(text.push, tokens)) + text.flush()

    @functools.cached_property
    def _output_texts(self) -> Texts:
        return Texts(self._tokenizer)

    def _checked(self, tokens: list[int], field: str = "prompt") -> list[int]:
        if (largest := max(tokens, default=0)) >= self._vocab_size:
            raise bad_field(
                field, f"token {largest} is beyond the vocabulary of {self._vocab_size}"
            )
        return tokens

    def _is_shown(self, tokens: list[int], params: dict[str, Any]) -> bool:
        """Whether tokens have text."""
        hidden = self._special_ids if params["skip_special_tokens"] else ()
        return any(token not in hidden for token in reversed(tokens))

    def _params(self, body: schemas.SamplingBody, logprobs: int | None) -> dict[str, Any]:
        """The fields of SamplingParams that are the same for all sequences of the request."""
        self._checked(body.stop_token_ids, "stop_token_ids")
        bias = {int(token): value for token, value in body.logit_bias.items()}
        self._checked(list(bias), "logit_bias")
        fields = self._sampling_fields(body)
        if (num_top := body.prompt_logprobs) is not None:
            logprobs = max(num_top, logprobs or 0)
        return {
            "min_tokens": body.min_tokens,
            "temperature": fields["temperature"],
            "top_k": max(fields["top_k"], 0),
            "top_p": max(fields["top_p"], 1e-6),  # top_p 0: only the likeliest token
            "min_p": fields["min_p"],
            "repetition_penalty": fields["repetition_penalty"],
            "presence_penalty": body.presence_penalty,
            "frequency_penalty": body.frequency_penalty,
            "logprobs": logprobs,
            "prompt_logprobs": num_top is not None,
            "stop_token_ids": tuple(body.stop_token_ids),
            "stop": body.stop_strings,
            "logit_bias": tuple(bias.items()),
            "ignore_eos": body.ignore_eos,
            "goes_on": True,
            "skip_special_tokens": body.skip_special_tokens,
            "include_stop": body.include_stop_str_in_output,
            "grammar": self._grammar(body),
        }

    def _sampling_fields(self, body: schemas.SamplingBody) -> dict[str, Any]:
        """The body's sampling fields, with the model's defaults for absent ones."""
        return {
            name: self.defaults[name]
            if name in self.defaults and name not in body.model_fields_set
            else getattr(body, name)
            for name in DEFAULTS
        }

    def _grammar(self, body: schemas.SamplingBody) -> str | None:
        if (constraint := body.constraint) is None:
            return None
        field, kind, value = constraint
        text = value if isinstance(value, str) else json.dumps(value)
        if len(text) > schemas.MAX_GRAMMAR_CHARS:
            raise bad_field(field, f"more than {schemas.MAX_GRAMMAR_CHARS} characters")
        make = {
            "json": grammar.from_json_schema,
            "regex": grammar.from_regex,
            "grammar": lambda text: grammar.from_lark(text, self._added_tokens),
            "choice": grammar.from_choices,
        }[kind]
        return self._made(field, lambda: make(value))

    def _made(self, field: str, make: Callable[[], Made]) -> Made:
        """What `make` returns: a grammar, or a part of it. Raises ApiError that names the field."""
        try:
            return make()
        except grammar.GrammarError as error:
            raise bad_field(field, str(error)) from None

    def _lengths(
        self,
        body: schemas.SamplingBody,
        prompts: list[list[int]],
        field: str,
        logprobs: int | None,
        echo: bool,
        caller: Caller,
    ) -> list[int]:
        """The maximum output tokens of the choices of each prompt.

        Raises ApiError if the request exceeds the size of any answer.
        """
        check_one(
            self._limits,
            caller.tenant,
            choices=len(prompts) * body.num_sampled,
            tokens=sum(map(len, prompts)) * body.num_sampled,
        )
        limit = "max_tokens"
        if getattr(body, "max_completion_tokens", None) is not None:
            limit = "max_completion_tokens"
        max_tokens: int | None = getattr(body, limit)
        each = 0 if logprobs is None else 1 + logprobs  # log-probabilities per token
        of_prompt = each if echo else 0
        if body.prompt_logprobs is not None:
            of_prompt += 1 + body.prompt_logprobs
        wanted, num_scores = [], 0
        for prompt in prompts:
            room = self.max_model_len - len(prompt)
            if not prompt:
                raise bad_field(field, "no tokens")
            if room < (1 if max_tokens is None else max_tokens):
                raise overflow(field, self.max_model_len, len(prompt), max_tokens)
            if max_tokens is None and each:
                room = min(room, MAX_SCORES // (each * body.num_sampled))
            wanted.append(room if max_tokens is None else max_tokens)
            if body.min_tokens > wanted[-1]:
                raise bad_field("min_tokens", f"more than {limit}, {wanted[-1]}")
            num_scores += (wanted[-1] * each + len(prompt) * of_prompt) * body.num_sampled
        if num_scores > MAX_SCORES:
            raise bad_field(
                "logprobs",
                f"tokens x (1 + logprobs) x n = {num_scores} are more than {MAX_SCORES}; "
                "use fewer of them",
            )
        return wanted

    def _prepared(
        self,
        prefix: str,
        body: schemas.SamplingBody,
        prompts: list[list[int]],
        echoes: list[str],
        lengths: list[int],
        params: dict[str, Any],
        caller: Caller,
        pictures: tuple[Picture, ...] = (),
    ) -> Prepared:
        request_id = f"{prefix}{secrets.token_hex(12)}"
        adapter = body.model if body.model in self.adapters else ""
        seed = secrets.randbits(63) if body.seed is None else body.seed
        sequences: list[Sequence] = []
        for prompt, wanted in zip(prompts, lengths, strict=True):
            for choice in range(body.num_sampled):
                sequences.append(
                    Sequence(
                        id=f"{request_id}-{len(sequences)}",
                        request_id=request_id,
                        tokens=list(prompt),
                        params=SamplingParams(
                            max_tokens=wanted, seed=seed_of_choice(seed, choice), **params
                        ),
                        namespace=namespace(caller.tenant, body.cache_salt),
                        priority=body.priority,
                        deadline=None if body.deadline is None else caller.arrival + body.deadline,
                        arrival=caller.arrival,
                        tenant=caller.tenant,
                        adapter_name=adapter or "",
                        pictures=pictures,
                    )
                )
        return Prepared(
            request_id,
            adapter or self.name,
            prompts,
            echoes,
            sequences,
            caller.arrival,
            [not params["goes_on"] or not self._is_shown(prompt, params) for prompt in prompts],
            grammar_field=_grammar_field(body),
            num_prompt_top=body.prompt_logprobs,
            returns_ids=body.return_token_ids,
            beams=self._beams(body),
        )

    def _beams(self, body: schemas.SamplingBody) -> Beams | None:
        if not body.use_beam_search:
            return None
        return Beams(body.length_penalty, self._eos_tokens, self.text_of)


def seed_of_choice(seed: int, choice: int) -> int:
    """The seed of a choice; that of choice 0 is `seed`.

    Seeds are far apart, so that no choice of seed s is another choice of seed s + 1.
    """
    return (seed + choice * 0x9E3779B97F4A7C15) % 2**64


# Fields of generation_config.json that are used, as in vLLM.
DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def answer_goes_on(is_continued: bool, has_grammar: bool) -> bool:
    """Whether a chat's answer goes on from the prompt's text: see SamplingParams of the engine.

    It is a text of its own, unless something else says how it begins.
    """
    return is_continued or has_grammar


def sampling_defaults(directory: str | Path) -> dict[str, Any]:
    """The sampling defaults in the directory's generation_config.json; {} without one.

    Raises:
      ValueError: a value that no request could have.
    """
    path = Path(directory) / "generation_config.json"
    if not path.is_file():
        return {}
    raw = json.loads(path.read_text(encoding="utf-8"))
    found = {name: raw[name] for name in DEFAULTS if raw.get(name) is not None}
    try:
        body = schemas.CompletionRequest.model_validate({"prompt": "", **found})
    except ValidationError as error:
        first = error.errors()[0]
        name = first["loc"][0]
        raise ValueError(
            f"{path}: {name}: {first['msg']}, got {found.get(str(name))!r}; "
            "--generation-config none does without"
        ) from None
    return {name: getattr(body, name) for name in found}


def _tools_grammar(text: str, functions: list[dict[str, Any]]) -> str:
    """The grammar of calls; it is the server's own unless a custom tool's is a part of it."""
    is_own = not any(function.get("input_grammar") for function in functions)
    return grammar.from_lark(text, is_own=is_own)


def _grammar_field(body: schemas.SamplingBody) -> str:
    """The field that has the grammar, or ""."""
    if getattr(body, "tools", None) and body.tool_choice != "none":  # type: ignore[attr-defined]
        return "tools"
    return "grammar" if body.constraint is None else body.constraint.field
