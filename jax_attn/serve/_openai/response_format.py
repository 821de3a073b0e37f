"""The response format of answers with choices: from texts to models of `schemas`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from pydantic import BaseModel

from jax_attn.serve._chat import custom_tools, tools
from jax_attn.serve._chat.custom_tools import GrowingInput
from jax_attn.serve._chat.growing_calls import GrowingCall
from jax_attn.serve._chat.reasoning import Parts
from jax_attn.serve._chat.tools import ToolCall, ToolParser
from jax_attn.serve._openai import schemas
from jax_attn.serve._openai.logprobs import ChatScores, CompletionScores, Scores, TokenJson
from jax_attn.serve._openai.prepare import Prepared
from jax_attn.serve._scheduling.request import FinishReason


class Style(Protocol):
    """One of OpenAI's two response formats.

    The JSON of its models lacks log-probabilities, which are spliced in.
    """

    keeps_text: bool  # the text of a choice is sent unchanged, as it comes
    tokens: TokenJson

    def scores(self, index: int) -> Scores | None: ...

    def chunks(
        self, index: int, text: str, has_scores: bool, finish: str | None
    ) -> list[BaseModel]:
        """Events with the new parts of one choice; log-probabilities belong to the first."""

    def usage_chunk(self, usage: schemas.Usage) -> BaseModel: ...

    def whole(self, usage: schemas.Usage) -> BaseModel:
        """The whole answer, without its choices."""

    def choice(self, index: int, text: str, finish: str | None) -> BaseModel:
        """A choice of the whole answer."""


class CompletionStyle:
    keeps_text = True

    def __init__(self, prepared: Prepared, with_logprobs: bool, tokens: TokenJson):
        self._head: dict[str, Any] = _head(prepared)
        self._prepared, self._with_logprobs, self.tokens = prepared, with_logprobs, tokens
        self._echoes = [echo for echo in prepared.echoes for _ in range(prepared.num_choices)]
        self._started = [False] * len(self._echoes)

    def scores(self, index: int) -> Scores | None:
        if not self._with_logprobs:
            return None
        prompt_index = index // self._prepared.num_choices
        begin = -1
        if self._prepared.begins[prompt_index]:
            # With an echo, the prompt's tokens come first.
            begin = len(self._prepared.prompts[prompt_index]) if self._echoes[index] else 0
        return CompletionScores(self.tokens, self._first_offset(index), begin)

    def chunks(
        self, index: int, text: str, has_scores: bool, finish: str | None
    ) -> list[BaseModel]:
        if not self._started[index]:
            self._started[index] = True
            text = self._echoes[index] + text
        choice = schemas.CompletionChoice(index=index, text=text, **reasons_of(finish))
        return [schemas.Completion(**self._head, choices=[choice])]

    def usage_chunk(self, usage: schemas.Usage) -> BaseModel:
        return schemas.Completion(**self._head, choices=[], usage=usage)

    whole = usage_chunk

    def choice(self, index: int, text: str, finish: str | None) -> BaseModel:
        return schemas.CompletionChoice(
            index=index, text=self._echoes[index] + text, **reasons_of(finish)
        )

    def _first_offset(self, index: int) -> int:
        """The text offset of the prompt's first token; below 0 if the text does not show it."""
        if not self._echoes[index]:
            return 0
        prompt = self._prepared.prompts[index // self._prepared.num_choices]
        shown = b"".join(map(self.tokens.text, prompt)).decode(errors="replace")
        return len(self._echoes[index]) - len(shown)


class ChatStyle:
    def __init__(self, prepared: Prepared, with_logprobs: bool, tokens: TokenJson):
        self._head: dict[str, Any] = _head(prepared)
        self._with_logprobs, self.tokens = with_logprobs, tokens
        self._started = [False] * len(prepared.sequences)
        self._answers = [SplitText(prepared) for _ in prepared.sequences]
        self.keeps_text = prepared.tool_format is None and prepared.splitter is None

    def scores(self, index: int) -> Scores | None:
        return ChatScores(self.tokens) if self._with_logprobs else None

    def chunks(
        self, index: int, text: str, has_scores: bool, finish: str | None
    ) -> list[BaseModel]:
        answer = self._answers[index]
        reasoning, text = answer.push(text, finish, streams=True)
        deltas = [_call_delta(part) for part in answer.continued if part.has_news]
        calls = [_call_delta(part) for part in answer.begun if part.has_news]
        if text or reasoning or not (deltas or calls):
            content = None if reasoning and not text else text
            deltas.append(schemas.Delta(content=content, reasoning_content=reasoning or None))
        deltas += calls
        if self._started[index] and not (
            text or reasoning or has_scores or finish or deltas[0].tool_calls
        ):
            return []
        if not self._started[index]:
            self._started[index], deltas[0].role = True, "assistant"
        choices = [schemas.ChatChunkChoice(index=index, delta=delta) for delta in deltas]
        choices[-1] = choices[-1].model_copy(update=answer.reasons(finish))
        return [schemas.ChatCompletionChunk(**self._head, choices=[choice]) for choice in choices]

    def usage_chunk(self, usage: schemas.Usage) -> BaseModel:
        return schemas.ChatCompletionChunk(**self._head, choices=[], usage=usage)

    def whole(self, usage: schemas.Usage) -> BaseModel:
        return schemas.ChatCompletion(**self._head, choices=[], usage=usage)

    def choice(self, index: int, text: str, finish: str | None) -> BaseModel:
        answer = self._answers[index]
        reasoning, text = answer.push(text, finish or FinishReason.STOP)
        message = schemas.AssistantMessage(
            content=text, reasoning_content=reasoning or None, tool_calls=answer.calls or None
        )
        if not text and (answer.calls or reasoning):
            message.content = None
        return schemas.ChatChoice(index=index, message=message, **answer.reasons(finish))


@dataclass(eq=False)
class StreamedCall:
    """A call of which a stream tells, whether or not it will be complete."""

    index: int
    id: str
    name: str
    num_sent: int = 0  # characters of its arguments
    is_ended: bool = False
    input: GrowingInput | None = None  # of a custom tool


class CallPart(NamedTuple):
    """What is new of a call. The first part of each has no arguments.

    arguments: of a custom tool, its input.
    """

    call: StreamedCall
    is_first: bool = False
    arguments: str = ""
    is_last: bool = False

    @property
    def has_news(self) -> bool:
        """Whether a stream that does not tell of the end of a call has something to tell."""
        return self.is_first or bool(self.arguments)


class SplitText:
    """Splits the text of a chat's choice into thoughts, answer and tool calls.

    Calls inside thoughts are ignored.

    calls: the complete ones. continued, begun: what the last `push` found of calls that had begun
    before it, and of others.
    """

    def __init__(self, prepared: Prepared):
        format = prepared.tool_format
        self._splitter = prepared.splitter() if prepared.splitter else None
        self._shows_reasoning = prepared.shows_reasoning
        self._parser = None if format is None else ToolParser(format, prepared.tool_names)
        self._new_id = (format or tools.HARMONY).new_id
        self._max_calls, self._custom_tools = prepared.max_tool_calls, prepared.custom_tools
        self.calls: list[schemas.ToolCall | schemas.CustomToolCall] = []
        self.continued: list[CallPart] = []
        self.begun: list[CallPart] = []
        self._num_begun = 0
        self._growing: dict[GrowingCall, StreamedCall] = {}

    def push(self, text: str, finish: str | None, streams: bool = False) -> tuple[str, str]:
        """Returns (thoughts, answer): text of each that is known not to be part of a tool call.

        finish: why the text ends here; None: it goes on. A call that is cut is dropped.
        streams: calls begin before they are complete. Such a call may be cut, or turn out
        malformed, and has no last part then.
        """
        self.continued, self.begun = [], []
        at_end, is_cut = finish is not None, finish not in (None, FinishReason.STOP)
        parts = self._splitter.push(text) if self._splitter else Parts(content=text)
        reasoning, content, calls, growing = parts
        if self._splitter and at_end:
            last = self._splitter.flush(is_cut)
            reasoning, content = reasoning + last.reasoning, content + last.content
            calls += last.calls
        if self._parser is not None:
            content, found = self._parser.push(content)
            calls += tuple(found)
            if at_end:
                rest, more = self._parser.flush(is_cut)
                content, calls = content + rest, (*calls, *more)
            growing += tuple(self._parser.growing)
        known = set(self._growing)
        for call in calls[: self._left]:
            self._complete(call, known)
        if streams:
            completed = {call.grown for call in calls}
            for each in [each for each in growing if each not in completed][: self._left]:
                self._advance(each, known)
        return reasoning if self._shows_reasoning else "", content

    @property
    def _left(self) -> int | None:
        """How many more calls the answer may have; None: any number."""
        return None if self._max_calls is None else self._max_calls - len(self.calls)

    def _complete(self, call: ToolCall, known: set[GrowingCall]) -> None:
        was_known = call.grown in known
        streamed = self._growing.pop(call.grown, None) if call.grown is not None else None
        if streamed is None:
            streamed = self._begin(call.name, call.id)
        if not streamed.is_ended:
            piece = call.arguments[streamed.num_sent :]
            self._tell(CallPart(streamed, False, piece, True), was_known)
        if call.name in self._custom_tools:
            custom = schemas.CustomCall(name=call.name, input=custom_tools.input_of(call.arguments))
            self.calls.append(schemas.CustomToolCall(id=streamed.id, custom=custom))
            return
        function = schemas.FunctionCall(name=call.name, arguments=call.arguments)
        self.calls.append(schemas.ToolCall(id=streamed.id, function=function))

    def _advance(self, call: GrowingCall, known: set[GrowingCall]) -> None:
        streamed = self._growing.get(call)
        if streamed is None:
            streamed = self._growing[call] = self._begin(call.name, call.id)
        piece = call.take()
        if piece or (call.is_whole and not streamed.is_ended):
            self._tell(CallPart(streamed, False, piece, call.is_whole), call in known)

    def _begin(self, name: str, id: str | None) -> StreamedCall:
        call = StreamedCall(self._num_begun, id or self._new_id(), name)
        if name in self._custom_tools:
            call.input = GrowingInput()
        self._num_begun += 1
        self.begun.append(CallPart(call, True))
        return call

    def _tell(self, part: CallPart, was_known: bool) -> None:
        part.call.num_sent += len(part.arguments)
        part.call.is_ended = part.is_last
        if part.call.input is not None:
            part = part._replace(arguments=part.call.input.push(part.arguments, part.is_last))
        (self.continued if was_known else self.begun).append(part)

    def reasons(self, reason: str | None) -> dict[str, Any]:
        called = self.calls and reason == FinishReason.STOP
        return reasons_of("tool_calls" if called else reason)


def _call_delta(part: CallPart) -> schemas.Delta:
    call = part.call
    if call.input is not None:
        custom = schemas.CustomDelta(
            name=call.name if part.is_first else None, input=part.arguments
        )
        delta = schemas.ToolCallDelta(index=call.index, custom=custom)
        if part.is_first:
            delta.id, delta.type = call.id, "custom"
    elif part.is_first:
        function = schemas.FunctionDelta(name=call.name, arguments="")
        delta = schemas.ToolCallDelta(
            index=call.index, id=call.id, type="function", function=function
        )
    else:
        function = schemas.FunctionDelta(arguments=part.arguments)
        delta = schemas.ToolCallDelta(index=call.index, function=function)
    return schemas.Delta(content=None, tool_calls=[delta])


def reasons_of(reason: str | None) -> dict[str, Any]:
    """finish_reason, as one of OpenAI's values, and stop_reason for the other reasons."""
    if reason in (FinishReason.DEADLINE, FinishReason.ERROR):
        return {"finish_reason": "length", "stop_reason": str(reason)}
    return {"finish_reason": reason}


def _head(prepared: Prepared) -> dict[str, Any]:
    return {"id": prepared.id, "created": int(time.time()), "model": prepared.model}
