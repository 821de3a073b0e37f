"""/api/chat and /api/generate, Ollama's API, built on chat completions; streams are NDJSON.

A request becomes a chat request or, with `raw`, one for a completion (`OllamaApi`), and the
engine's output becomes lines of JSON (`OllamaAnswer`).
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any

from pydantic import ValidationError
from starlette.types import Send

from jax_attn.serve._chat import strict_json
from jax_attn.serve._ollama import ollama_schemas as ollama
from jax_attn.serve._openai import schemas
from jax_attn.serve._openai.answers import GenerationAnswer, add_scores
from jax_attn.serve._openai.errors import ApiError, bad_field, from_validation, model_not_found
from jax_attn.serve._openai.logprobs import ChatScores, TokenJson
from jax_attn.serve._openai.model_facts import ModelFacts
from jax_attn.serve._openai.prepare import Caller, Prepared, Preparer
from jax_attn.serve._openai.response_format import SplitText, reasons_of
from jax_attn.serve._scheduling.events import TokenEvent

# A field of a chat request -> its place in a request here.
_FIELDS = {
    "max_tokens": "options.num_predict",
    "max_completion_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "response_format": "format",
}
_SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "seed", "stop", "presence_penalty",
    "frequency_penalty",
)  # fmt: skip
_FIELDS |= {name: f"options.{name}" for name in _SAMPLING}
# A feature of a model -> Ollama's word for it.
_CAPABILITIES = {
    "chat": "completion",
    "tools": "tools",
    "thinking": "thinking",
    "fill_in_the_middle": "insert",
    "pictures": "vision",
}
_SHOWN_DEFAULTS = {"repetition_penalty": "repeat_penalty"}
LATEST = ":latest"
_NEVER = "9999-12-31T23:59:59Z"
_MARKS = 8  # at least the tokens that are around a prefix and a suffix

Make = Callable[[dict[str, Any], str, str, list[Any]], ollama.OllamaAnswerBase]
"""(common fields, thoughts, content, calls) -> a whole answer, or a line of a stream."""


class OllamaApi:
    def __init__(self, preparer: Preparer, facts: ModelFacts, tokens: TokenJson):
        self._preparer, self._facts, self._tokens = preparer, facts, tokens

    # ---- requests ------------------------------------------------------------------------------

    def prepare_chat(
        self, body: ollama.OllamaChatRequest, caller: Caller
    ) -> tuple[Prepared, partial[OllamaAnswer]]:
        """Returns the request for the engine, and a factory for its answer.

        The factory takes GenerationAnswer's further arguments. Raises ApiError.
        """
        fields = self._chat_fields(body) | {"messages": _messages(body.messages)}
        fields["tools"] = [tool.model_dump(exclude_unset=True) for tool in body.tools]
        for tool in fields["tools"]:
            tool["type"] = "function"
        return self._chat(body, fields, caller, _chat_answer)

    def prepare_generate(
        self, body: ollama.GenerateRequest, caller: Caller
    ) -> tuple[Prepared, partial[OllamaAnswer]]:
        """Likewise for a prompt."""
        if body.raw or body.suffix:
            return self._raw(body, caller)
        messages = [{"role": "system", "content": body.system}] if body.system else []
        messages.append({"role": "user", "content": body.prompt})
        fields = self._chat_fields(body) | {"messages": messages}
        return self._chat(body, fields, caller, _generate_answer)

    def _chat(
        self, body: ollama.OllamaRequest, fields: dict[str, Any], caller: Caller, make: Make
    ) -> tuple[Prepared, partial[OllamaAnswer]]:
        prepared = _renaming(fields, lambda: self._prepare_chat(fields, caller))
        return prepared, self._answer(body, make)

    def _prepare_chat(self, fields: dict[str, Any], caller: Caller) -> Prepared:
        return self._preparer.chat(schemas.ChatCompletionRequest.model_validate(fields), caller)

    def _raw(
        self, body: ollama.GenerateRequest, caller: Caller
    ) -> tuple[Prepared, partial[OllamaAnswer]]:
        for name in ("system", "think"):
            if getattr(body, name):
                raise bad_field(
                    name, "belongs to the chat template, which raw and suffix go without"
                )
        fields = self._fields(body) | {"prompt": body.prompt, "suffix": body.suffix}
        if body.logprobs:
            fields["logprobs"] = body.top_logprobs or 0
        if "max_tokens" not in fields:  # a completion has 16 without it
            num_prompt = len(self._preparer.encode(body.prompt + body.suffix))
            num_prompt += _MARKS if body.suffix else 0
            fields["max_tokens"] = max(1, self._preparer.max_model_len - num_prompt)

        def prepare() -> Prepared:
            request = schemas.CompletionRequest.model_validate(fields)
            return self._preparer.completion(request, caller)

        return _renaming(fields, prepare), self._answer(body, _generate_answer)

    def _answer(self, body: ollama.OllamaRequest, make: Make) -> partial[OllamaAnswer]:
        scores = _Scores(self._tokens) if body.logprobs else None
        return partial(OllamaAnswer, make, scores, stream=body.stream)

    def _chat_fields(self, body: ollama.OllamaRequest) -> dict[str, Any]:
        fields = self._fields(body)
        if body.think and "thinking" not in self._preparer.features:
            raise bad_field("think", "the model's chat template has no thoughts")
        if isinstance(body.think, str):
            fields["reasoning_effort"] = body.think
        elif body.think is not None:
            fields["chat_template_kwargs"] = {"enable_thinking": body.think}
            fields["include_reasoning"] = body.think
        if body.logprobs:
            fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
        return fields

    def _fields(self, body: ollama.OllamaRequest) -> dict[str, Any]:
        """The fields that chats and completions share. Those that are not set are left out."""
        options = body.options
        fields: dict[str, Any] = {"model": self._name(body.model)}
        for name in _SAMPLING:
            if (value := getattr(options, name)) is not None:
                fields[name] = value
        if options.repeat_penalty is not None:
            fields["repetition_penalty"] = options.repeat_penalty
        if options.num_predict is not None and options.num_predict > 0:
            fields["max_tokens"] = options.num_predict
        if isinstance(body.format, dict):
            schema = {"name": "format", "schema": body.format}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif body.format:
            fields["response_format"] = {"type": "json_object"}
        return fields

    def _name(self, name: str) -> str:
        """The name as other routes know it."""
        known = {*self._preparer.names, *self._preparer.adapters}
        return name if name in known else name.removesuffix(LATEST)

    # ---- models --------------------------------------------------------------------------------

    def models(self) -> ollama.OllamaModels:
        """Answers /api/tags."""
        names = [*self._preparer.names, *self._preparer.adapters]
        return ollama.OllamaModels(models=list(map(self._model, names)))

    def running(self) -> ollama.OllamaRunning:
        """Answers /api/ps: what is served is always loaded."""
        running = [
            ollama.OllamaRunningModel(
                **self._model(name).model_dump(exclude={"modified_at"}),
                expires_at=_NEVER,
                context_length=self._preparer.max_model_len,
            )
            for name in (*self._preparer.names, *self._preparer.adapters)
        ]
        return ollama.OllamaRunning(models=running)

    def show(self, body: ollama.ShowRequest) -> ollama.OllamaShown:
        """Answers /api/show. Raises ApiError, 404."""
        asked = body.model or body.name or ""
        name = self._name(asked)
        if name not in (*self._preparer.names, *self._preparer.adapters):
            raise model_not_found(asked, self._preparer.name)
        family = self._facts.family
        defaults = [
            f"{_SHOWN_DEFAULTS.get(field, field)} {value}"
            for field, value in self._preparer.defaults.items()
        ]
        return ollama.OllamaShown(
            parameters="\n".join(defaults),
            template=self._preparer.chat_template,
            details=self._details(),
            model_info={
                "general.architecture": family,
                "general.basename": name,
                f"{family}.context_length": self._preparer.max_model_len,
            },
            capabilities=[
                word for name, word in _CAPABILITIES.items() if name in self._preparer.features
            ],
            modified_at=_time(self._facts.modified),
        )

    def _model(self, name: str) -> ollama.OllamaModel:
        facts = self._facts
        digest = hashlib.sha256(f"{name} {facts}".encode()).hexdigest()
        return ollama.OllamaModel(
            name=name,
            model=name,
            modified_at=_time(facts.modified),
            size=facts.num_bytes,
            digest=digest,
            details=self._details(),
        )

    def _details(self) -> ollama.OllamaDetails:
        family = self._facts.family
        quantization = self._facts.quantization or ""
        return ollama.OllamaDetails(
            family=family, families=[family], quantization_level=quantization
        )


def _renaming(fields: dict[str, Any], prepare: Callable[[], Prepared]) -> Prepared:
    """What `prepare` returns. Renames the field of an error to that of the original request."""
    try:
        try:
            return prepare()
        except ValidationError as error:
            raise from_validation(error, fields) from None
    except ApiError as error:
        param, message = error.param or "", str(error)
        new = _FIELDS.get(re.split(r"[.[]", param)[0], param)
        if param and message.startswith(param):
            message = new + message[len(param) :]
        raise ApiError(error.status, message, param=new or None, code=error.code) from None


def _messages(given: list[ollama.OllamaMessage]) -> list[dict[str, Any]]:
    """Converts messages. Calls get identifiers, and each result that of its call.

    Raises:
      ApiError: a result without a call.
    """
    messages: list[dict[str, Any]] = []
    open_calls: list[tuple[str, str]] = []  # (identifier, function) of those without a result
    num_calls = 0
    for i, message in enumerate(given):
        plain: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.images:
            plain["content"] = _shown(message)
        if message.role != "assistant" and (message.tool_calls or message.thinking):
            raise bad_field(f"messages[{i}]", "only the assistant's have tool_calls and thinking")
        if message.thinking is not None:
            plain["reasoning_content"] = message.thinking
        if message.role == "tool":
            plain["tool_call_id"], plain["name"] = _called(open_calls, message.tool_name, i)
        for call in message.tool_calls:
            num_calls += 1
            id, function = f"call{num_calls:05d}", call.function  # nine characters, as Mistral's
            open_calls.append((id, function.name))
            arguments = json.dumps(function.arguments)
            made = {"id": id, "function": {"name": function.name, "arguments": arguments}}
            plain.setdefault("tool_calls", []).append(made)
        messages.append(plain)
    return messages


def _shown(message: ollama.OllamaMessage) -> list[dict[str, Any]]:
    """The content of a message with pictures, which come first."""
    urls = [f"data:image/png;base64,{image}" for image in message.images]
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return parts + [{"type": "text", "text": message.content}] * bool(message.content)


def _called(open_calls: list[tuple[str, str]], name: str | None, i: int) -> tuple[str, str]:
    """Removes and returns the first call of this function, or of any."""
    for at, (_, function) in enumerate(open_calls):
        if name in (None, function):
            return open_calls.pop(at)
    asked = "" if name is None else f" of {name[:64]!r}"
    raise bad_field(f"messages[{i}]", f"no call{asked} comes before this result")


# ---- answers -----------------------------------------------------------------------------------


class _Scores(ChatScores):
    """Writes a list of OllamaLogprob."""

    def take(self) -> list[bytes]:
        _, *entries, _ = super().take()
        return [b"[", *entries, b"]"]


def _chat_answer(head: dict[str, Any], thoughts: str, content: str, calls: list[Any]) -> Any:
    message = ollama.OllamaAnswerMessage(
        content=content, thinking=thoughts or None, tool_calls=calls or None
    )
    return ollama.OllamaChatAnswer(**head, message=message)


def _generate_answer(head: dict[str, Any], thoughts: str, content: str, calls: list[Any]) -> Any:
    return ollama.GenerateAnswer(**head, response=content, thinking=thoughts or None)


class OllamaAnswer(GenerationAnswer):
    """The answer of one request: an object, or one a line."""

    _media_type = "application/x-ndjson"

    def __init__(self, make: Make, scores: _Scores | None, *args: Any, **kwargs: Any):
        """Further arguments: those of GenerationAnswer. scores: None: not requested."""
        super().__init__(*args, **kwargs)
        self._make = make
        self._split = SplitText(self._prepared)
        self._choices[0].scores = self._scores = scores

    async def _respond_whole(self, send: Send) -> None:
        thoughts, texts = [], []
        async for event in self._events():
            thought, text = self._split.push(event.text, event.finish_reason)
            thoughts.append(thought)
            texts.append(text)
            self._ticket.take(scores=sum(1 + len(entry.top) for entry in event.logprobs or ()))
            await add_scores(self._choices[0], event.logprobs)
        last = self._make(self._end(), "".join(thoughts), "".join(texts), self._calls(0))
        await self._send_whole(send, self._dump(last))

    async def _respond_in_events(self, send: Send) -> None:
        try:
            async for event in self._events():
                await self._tell(send, event)
        except ApiError as error:
            if not self._is_started:
                raise
            line = ollama.OllamaError(error=str(error)).model_dump_json()
            await self._send_event(send, [line.encode()])
        else:
            await self._send_event(send, self._dump(self._make(self._end(), "", "", [])))
        await send({"type": "http.response.body", "body": b""})

    async def _tell(self, send: Send, event: TokenEvent) -> None:
        num_calls = len(self._split.calls)
        thought, text = self._split.push(event.text, event.finish_reason)
        await add_scores(self._choices[0], event.logprobs)
        calls = self._calls(num_calls)
        if thought or text or calls or event.logprobs:
            line = self._make(self._head(done=False), thought, text, calls)
            await self._send_event(send, self._dump(line))

    def _framed(self, pieces: list[bytes], name: bytes) -> list[bytes]:
        return [*pieces, b"\n"]

    def _sign_of_life(self) -> bytes:
        """A line without news, as NDJSON has no comments."""
        return b"".join(
            self._framed(self._dump(self._make(self._head(done=False), "", "", [])), b"")
        )

    def _calls(self, first: int) -> list[ollama.OllamaAnswerCall]:
        """The calls from that one on."""
        return [
            ollama.OllamaAnswerCall(
                id=call.id,
                function=ollama.OllamaCallFunction(
                    name=call.function.name,
                    arguments=strict_json.loads(call.function.arguments),
                    index=index,
                ),
            )
            for index, call in enumerate(self._split.calls[first:], first)
            if isinstance(call, schemas.ToolCall)  # its requests have no custom tools
        ]

    def _dump(self, line: ollama.OllamaAnswerBase) -> list[bytes]:
        """JSON in pieces, with the new log-probabilities."""
        # Not pydantic's JSON, which would change numbers of arguments.
        text = json.dumps(line.model_dump(exclude_none=True), ensure_ascii=False)
        raw = strict_json.sendable(text).encode()
        if self._scores is None:
            return [raw]
        return [raw[:-1], b', "logprobs": ', *self._scores.take(), b"}"]

    def _head(self, done: bool) -> dict[str, Any]:
        return {"model": self._prepared.model, "created_at": _time(time.time()), "done": done}

    def _end(self) -> dict[str, Any]:
        """Why and when the answer ended."""
        usage, record, now = self._usage(), self._record, time.monotonic()
        begin = self._prepared.arrival
        admitted = begin if record.admitted is None else record.admitted
        first = now if record.first_token is None else record.first_token
        is_whole = reasons_of(self._choices[0].finish_reason)["finish_reason"] == "stop"
        return self._head(done=True) | {
            "done_reason": "stop" if is_whole else "length",
            "total_duration": nanoseconds(now - begin),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": nanoseconds(first - admitted),
            "eval_count": usage.completion_tokens,
            "eval_duration": nanoseconds(now - first),
        }


def nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))


def _time(seconds: float) -> str:
    """Seconds since 1970 as RFC 3339 has them."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
