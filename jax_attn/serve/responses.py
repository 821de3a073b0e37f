"""From the engine's events to OpenAI's answers, whole or as server-sent events."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from jax_attn.serve import schemas
from jax_attn.serve.async_engine import EngineStopped
from jax_attn.serve.errors import ApiError
from jax_attn.serve.grammar import GrammarError
from jax_attn.serve.metrics import Metrics
from jax_attn.serve.prepare import Prepared
from jax_attn.serve.request import FinishReason
from jax_attn.serve.scheduler import QueueFull
from jax_attn.serve.tools import ToolParser

_RETRY_AFTER_SECONDS = 1
_MARK = "the text goes here"

TokenText = Callable[[int], bytes]
"""The exact bytes of a token, which need not be whole characters."""


@dataclass
class _Choice:
    """What one sequence has produced so far."""

    text: str = ""
    num_tokens: int = 0
    has_begun: bool = False  # its first chunk is sent
    num_cached: int = 0
    last_event: float = 0.0  # time.monotonic()
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None


class Style(Protocol):
    """One of OpenAI's two shapes of an answer."""

    keeps_text: bool  # the text of a choice is shown as it is, and when it comes

    def chunk(
        self, index: int, text: str, logprobs: list[Any], finish: str | None
    ) -> BaseModel | None:
        """An event with the news of one choice, if there are any."""

    def usage_chunk(self, usage: schemas.Usage) -> BaseModel: ...

    def whole(self, choices: list[_Choice], usage: schemas.Usage) -> BaseModel: ...


class CompletionStyle:
    keeps_text = True

    def __init__(self, prepared: Prepared, with_logprobs: bool, token_text: TokenText):
        self._head: dict[str, Any] = _head(prepared)
        self._echoes = [echo for echo in prepared.echoes for _ in range(prepared.num_choices)]
        self._with_logprobs, self._token_text = with_logprobs, token_text
        self._started = [False] * len(self._echoes)
        self._offsets = [self._first_offset(prepared, i) for i in range(len(self._echoes))]
        self._decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in self._echoes]

    def chunk(self, index: int, text: str, logprobs: list[Any], finish: str | None) -> BaseModel:
        if not self._started[index]:
            self._started[index] = True
            text = self._echoes[index] + text
        choice = schemas.CompletionChoice(
            index=index, text=text, logprobs=self._logprobs(index, logprobs), finish_reason=finish
        )
        return schemas.Completion(**self._head, choices=[choice])

    def usage_chunk(self, usage: schemas.Usage) -> BaseModel:
        return schemas.Completion(**self._head, choices=[], usage=usage)

    def whole(self, choices: list[_Choice], usage: schemas.Usage) -> BaseModel:
        return schemas.Completion(
            **self._head,
            choices=[
                schemas.CompletionChoice(
                    index=index,
                    text=self._echoes[index] + choice.text,
                    logprobs=self._logprobs(index, choice.logprobs),
                    finish_reason=choice.finish_reason,
                )
                for index, choice in enumerate(choices)
            ],
            usage=usage,
        )

    def _logprobs(self, index: int, logprobs: list[Any]) -> schemas.CompletionLogprobs | None:
        if not self._with_logprobs:
            return None
        offsets = []
        for entry in logprobs:
            offsets.append(max(0, self._offsets[index]))
            text = self._decoders[index].decode(self._token_text(entry.token))
            self._offsets[index] += len(text)
        return schemas.CompletionLogprobs(
            tokens=[self._text(entry.token) for entry in logprobs],
            token_logprobs=[entry.logprob for entry in logprobs],
            top_logprobs=[self._top(entry) for entry in logprobs],
            text_offset=offsets,
        )

    def _first_offset(self, prepared: Prepared, index: int) -> int:
        """Of the prompt's first token; below 0 where it is one that the text does not show."""
        if not (self._with_logprobs and self._echoes[index]):
            return 0
        prompt = prepared.prompts[index // prepared.num_choices]
        shown = b"".join(map(self._token_text, prompt)).decode(errors="replace")
        return len(self._echoes[index]) - len(shown)

    def _top(self, entry: Any) -> dict[str, float] | None:
        """The token itself among them, as OpenAI has it. Of tokens with one text, the likeliest."""
        if entry.logprob is None:
            return None
        top: dict[str, float] = {}
        for token, logprob in (*entry.top, (entry.token, entry.logprob)):
            top.setdefault(self._text(token), logprob)
        return top

    def _text(self, token: int) -> str:
        """Where a token is part of a character, its bytes, as OpenAI writes them."""
        raw = self._token_text(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class ChatStyle:
    def __init__(self, prepared: Prepared, with_logprobs: bool, token_text: TokenText):
        self._head: dict[str, Any] = _head(prepared)
        self._with_logprobs, self._token_text = with_logprobs, token_text
        self._started = [False] * len(prepared.sequences)
        self._calls = [_Calls(prepared) for _ in prepared.sequences]
        self.keeps_text = prepared.tool_format is None

    def chunk(
        self, index: int, text: str, logprobs: list[Any], finish: str | None
    ) -> BaseModel | None:
        calls = self._calls[index]
        num_before = len(calls.made)
        text = calls.push(text, at_end=finish is not None)
        new = [
            schemas.ToolCallDelta(index=i, **calls.made[i].model_dump())
            for i in range(num_before, len(calls.made))
        ]
        if self._started[index] and not (text or new or logprobs or finish):
            return None
        role: Any = None if self._started[index] else "assistant"
        self._started[index] = True
        choice = schemas.ChatChunkChoice(
            index=index,
            delta=schemas.Delta(role=role, content=text, tool_calls=new or None),
            logprobs=self._logprobs(logprobs),
            finish_reason=calls.finish_reason(finish),
        )
        return schemas.ChatCompletionChunk(**self._head, choices=[choice])

    def usage_chunk(self, usage: schemas.Usage) -> BaseModel:
        return schemas.ChatCompletionChunk(**self._head, choices=[], usage=usage)

    def whole(self, choices: list[_Choice], usage: schemas.Usage) -> BaseModel:
        return schemas.ChatCompletion(
            **self._head,
            choices=[self._choice(index, choice) for index, choice in enumerate(choices)],
            usage=usage,
        )

    def _choice(self, index: int, choice: _Choice) -> schemas.ChatChoice:
        calls = self._calls[index]
        text = calls.push(choice.text, at_end=True)
        message = schemas.AssistantMessage(content=text, tool_calls=calls.made or None)
        if calls.made and not text:
            message.content = None
        return schemas.ChatChoice(
            index=index,
            message=message,
            logprobs=self._logprobs(choice.logprobs),
            finish_reason=calls.finish_reason(choice.finish_reason),
        )

    def _logprobs(self, logprobs: list[Any]) -> schemas.ChatLogprobs | None:
        if not self._with_logprobs:
            return None
        return schemas.ChatLogprobs(
            content=[
                schemas.TokenLogprob(
                    **self._token(entry.token, entry.logprob),
                    top_logprobs=[
                        schemas.TopLogprob(**self._token(token, logprob))
                        for token, logprob in entry.top
                    ],
                )
                for entry in logprobs
            ]
        )

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self._token_text(token)
        return {"token": raw.decode(errors="replace"), "logprob": logprob, "bytes": list(raw)}


class _Calls:
    """The tool calls of one choice."""

    def __init__(self, prepared: Prepared):
        format = prepared.tool_format
        self._parser = None if format is None else ToolParser(format)
        self._max_calls = prepared.max_tool_calls
        self.made: list[schemas.ToolCall] = []

    def push(self, text: str, at_end: bool) -> str:
        """What of the text is no tool call, as far as that is known."""
        if self._parser is None:
            return text
        text, calls = self._parser.push(text)
        if at_end:
            rest, more = self._parser.flush()
            text, calls = text + rest, calls + more
        for call in calls[: None if self._max_calls is None else self._max_calls - len(self.made)]:
            function = schemas.FunctionCall(name=call.name, arguments=call.arguments)
            id = call.id or self._parser.format.new_id()
            self.made.append(schemas.ToolCall(id=id, function=function))
        return text

    def finish_reason(self, reason: str | None) -> str | None:
        return "tool_calls" if self.made and reason == FinishReason.STOP else reason


def _head(prepared: Prepared) -> dict[str, Any]:
    return {"id": prepared.id, "created": int(time.time()), "model": prepared.model}


class GenerationResponse:
    """Runs a prepared request on the engine and answers it: an ASGI application.

    The answer begins with the first token, so that a full queue is still a plain 429. When the
    client goes away, the engine's iterator is closed, which aborts its sequences.
    """

    def __init__(
        self,
        engine: Any,
        prepared: Prepared,
        style: Style,
        metrics: Metrics,
        *,
        stream: bool,
        include_usage: bool,
    ):
        self._engine, self._prepared, self._style = engine, prepared, style
        self._metrics, self._stream, self._include_usage = metrics, stream, include_usage
        self._index = {seq.id: index for index, seq in enumerate(prepared.sequences)}
        self._choices = [_Choice() for _ in prepared.sequences]
        self._around_text: dict[int, tuple[bytes, bytes]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        respond = self._respond_in_events if self._stream else self._respond_whole
        work = asyncio.create_task(respond(send))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            cut_off = not work.done()
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
            self._account(work, cut_off)
        if not cut_off:
            work.result()

    # ---- one answer ----------------------------------------------------------------------------

    async def _respond_whole(self, send: Send) -> None:
        async for _ in self._events():
            pass
        body = self._style.whole(self._choices, self._usage()).model_dump_json().encode()
        await self._start(send, "application/json", (b"content-length", b"%d" % len(body)))
        await send({"type": "http.response.body", "body": body})

    # ---- server-sent events --------------------------------------------------------------------

    async def _respond_in_events(self, send: Send) -> None:
        started = False
        try:
            async for event in self._events():
                if not started:
                    await self._start(send, "text/event-stream")
                    started = True
                finish = None if event.finish_reason is None else str(event.finish_reason)
                logprobs = event.logprobs or []
                if event.text or logprobs or finish:
                    index = self._index[event.seq_id]
                    news = self._chunk(index, event.text, logprobs, finish)
                    if news is not None:
                        await _send_event(send, news)
        except ApiError as error:
            if not started:
                raise
            await _send_event(send, error.body().model_dump_json().encode())
        else:
            if self._include_usage:
                chunk = self._style.usage_chunk(self._usage())
                await _send_event(send, chunk.model_dump_json().encode())
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    def _chunk(
        self, index: int, text: str, logprobs: list[Any], finish: str | None
    ) -> bytes | None:
        """All but the first and the last chunk of a choice differ in their text alone, unless the
        style changes it."""
        is_plain = self._choices[index].has_begun and not (logprobs or finish)
        self._choices[index].has_begun = True
        around = self._around_text.get(index)
        if is_plain and around is None and self._style.keeps_text:
            marked = self._style.chunk(index, _MARK, logprobs, finish)
            assert marked is not None
            before, after = marked.model_dump_json().encode().split(json.dumps(_MARK).encode())
            around = self._around_text[index] = (before, after)
        if is_plain and around is not None:
            return json.dumps(text).encode().join(around)
        chunk = self._style.chunk(index, text, logprobs, finish)
        return None if chunk is None else chunk.model_dump_json().encode()

    async def _start(self, send: Send, content_type: str, *headers: tuple[bytes, bytes]) -> None:
        all_headers = [
            *headers,
            (b"content-type", content_type.encode()),
            (b"cache-control", b"no-store"),
            (b"x-request-id", self._prepared.id.encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": all_headers})

    # ---- events --------------------------------------------------------------------------------

    async def _events(self) -> AsyncIterator[Any]:
        """The engine's events, after they have been counted.

        Raises:
          ApiError: the queue is full, the engine stops, or a sequence failed.
        """
        async with contextlib.aclosing(self._engine.generate(self._prepared.sequences)) as events:
            try:
                async for event in events:
                    self._count(event)
                    yield event
            except QueueFull as error:
                raise ApiError(
                    429,
                    f"{error}; try again later",
                    code="queue_full",
                    retry_after=_RETRY_AFTER_SECONDS,
                ) from None
            except GrammarError as error:
                raise self._bad_grammar(str(error)) from None
            except EngineStopped:
                raise ApiError(503, "the server is shutting down", code="draining") from None

    def _count(self, event: Any) -> None:
        if event.finish_reason == FinishReason.ERROR and not event.is_clients_fault:
            raise ApiError(500, event.error or "the request failed", code="engine_error")
        if event.finish_reason == FinishReason.ABORT:
            raise ApiError(503, "the server is shutting down", code="draining")
        choice = self._choices[self._index[event.seq_id]]
        now = time.monotonic()
        if event.tokens:
            if choice.num_tokens == 0:
                self._metrics.ttft.observe(now - self._prepared.arrival)
            else:
                each = (now - choice.last_event) / len(event.tokens)
                for _ in event.tokens:
                    self._metrics.inter_token.observe(each)
            choice.last_event = now
            choice.num_tokens += len(event.tokens)
        if event.num_cached_tokens is not None:
            choice.num_cached = event.num_cached_tokens
        choice.text += event.text
        choice.logprobs += event.logprobs or []
        if event.finish_reason is not None:
            choice.finish_reason = str(event.finish_reason)
        # The grammar that one choice has got stuck in may take the others to their end.
        if event.is_clients_fault and all(c.finish_reason == "error" for c in self._choices):
            raise self._bad_grammar(event.error or "the grammar has got stuck")

    def _bad_grammar(self, message: str) -> ApiError:
        field = self._prepared.grammar_field or "grammar"
        return ApiError(400, f"{field}: {message}", param=field, code="invalid_grammar")

    def _usage(self) -> schemas.Usage:
        n = self._prepared.num_choices
        prompt = sum(len(tokens) for tokens in self._prepared.prompts)
        output = sum(choice.num_tokens for choice in self._choices)
        # The prompt counts once for all its choices, and all but the first find it cached.
        cached = sum(
            min(choice.num_cached for choice in self._choices[first : first + n])
            for first in range(0, len(self._choices), n)
        )
        return schemas.Usage(
            prompt_tokens=prompt,
            completion_tokens=output,
            total_tokens=prompt + output,
            prompt_tokens_details=schemas.PromptTokensDetails(cached_tokens=cached),
        )

    def _account(self, work: asyncio.Task, cut_off: bool) -> None:
        self._metrics.request.observe(time.monotonic() - self._prepared.arrival)
        reasons = {choice.finish_reason for choice in self._choices}
        if cut_off:
            outcome = "disconnected"
        elif isinstance(error := work.exception(), ApiError) and error.status == 400:
            return  # counted where it is answered
        elif isinstance(error, ApiError) and error.status == 429:
            outcome = "rejected"
        elif error is not None or None in reasons:
            outcome = "failed"
        else:
            outcome = "deadline" if FinishReason.DEADLINE in reasons else "completed"
        self._metrics.count(outcome)


async def _disconnected(receive: Receive) -> None:
    """Returns when the client has gone; its body has been read by now."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_event(send: Send, event: bytes) -> None:
    body = b"data: %b\n\n" % event
    await send({"type": "http.response.body", "body": body, "more_body": True})
