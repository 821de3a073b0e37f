"""The response format of answers with choices: from texts to models of `schemas`."""

from __future__ import annotations

import time
from typing import Any, Literal, Protocol

from pydantic import BaseModel

from jax_attn.serve._chat import tools
from jax_attn.serve._chat.reasoning import Parts
from jax_attn.serve._chat.tools import ToolParser
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

    def chunk(
        self, index: int, text: str, has_scores: bool, finish: str | None
    ) -> BaseModel | None:
        """An event with the new part of one choice; None: there is nothing new."""

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
        return CompletionScores(self.tokens, self._first_offset(index))

    def chunk(self, index: int, text: str, has_scores: bool, finish: str | None) -> BaseModel:
        if not self._started[index]:
            self._started[index] = True
            text = self._echoes[index] + text
        choice = schemas.CompletionChoice(index=index, text=text, **reasons_of(finish))
        return schemas.Completion(**self._head, choices=[choice])

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

    def chunk(
        self, index: int, text: str, has_scores: bool, finish: str | None
    ) -> BaseModel | None:
        answer = self._answers[index]
        num_before = len(answer.calls)
        reasoning, text = answer.push(text, at_end=finish is not None)
        new = [
            schemas.ToolCallDelta(index=i, **answer.calls[i].model_dump())
            for i in range(num_before, len(answer.calls))
        ]
        if self._started[index] and not (text or reasoning or new or has_scores or finish):
            return None
        role: Literal["assistant"] | None = None if self._started[index] else "assistant"
        self._started[index] = True
        choice = schemas.ChatChunkChoice(
            index=index,
            delta=schemas.Delta(
                role=role,
                content=None if reasoning and not text else text,
                reasoning_content=reasoning or None,
                tool_calls=new or None,
            ),
            **answer.reasons(finish),
        )
        return schemas.ChatCompletionChunk(**self._head, choices=[choice])

    def usage_chunk(self, usage: schemas.Usage) -> BaseModel:
        return schemas.ChatCompletionChunk(**self._head, choices=[], usage=usage)

    def whole(self, usage: schemas.Usage) -> BaseModel:
        return schemas.ChatCompletion(**self._head, choices=[], usage=usage)

    def choice(self, index: int, text: str, finish: str | None) -> BaseModel:
        answer = self._answers[index]
        reasoning, text = answer.push(text, at_end=True)
        message = schemas.AssistantMessage(
            content=text, reasoning_content=reasoning or None, tool_calls=answer.calls or None
        )
        if not text and (answer.calls or reasoning):
            message.content = None
        return schemas.ChatChoice(index=index, message=message, **answer.reasons(finish))


class SplitText:
    """Splits the text of a chat's choice into thoughts, answer and tool calls.

    Calls inside thoughts are ignored.
    """

    def __init__(self, prepared: Prepared):
        format = prepared.tool_format
        self._splitter = prepared.splitter() if prepared.splitter else None
        self._shows_reasoning = prepared.shows_reasoning
        self._parser = None if format is None else ToolParser(format)
        self._new_id = (format or tools.HARMONY).new_id
        self._max_calls = prepared.max_tool_calls
        self.calls: list[schemas.ToolCall] = []

    def push(self, text: str, at_end: bool) -> tuple[str, str]:
        """Returns (thoughts, answer): text of each that is known not to be part of a tool call."""
        parts = self._splitter.push(text) if self._splitter else Parts(content=text)
        reasoning, content, calls = parts
        if self._splitter and at_end:
            last = self._splitter.flush()
            reasoning, content = reasoning + last.reasoning, content + last.content
            calls += last.calls
        if self._parser is not None:
            content, found = self._parser.push(content)
            calls += tuple(found)
            if at_end:
                rest, more = self._parser.flush()
                content, calls = content + rest, (*calls, *more)
        left = None if self._max_calls is None else self._max_calls - len(self.calls)
        for call in calls[:left]:
            function = schemas.FunctionCall(name=call.name, arguments=call.arguments)
            self.calls.append(schemas.ToolCall(id=call.id or self._new_id(), function=function))
        return reasoning if self._shows_reasoning else "", content

    def reasons(self, reason: str | None) -> dict[str, Any]:
        called = self.calls and reason == FinishReason.STOP
        return reasons_of("tool_calls" if called else reason)


def reasons_of(reason: str | None) -> dict[str, Any]:
    """finish_reason, as one of OpenAI's values, and stop_reason for the other reasons."""
    if reason in (FinishReason.DEADLINE, FinishReason.ERROR):
        return {"finish_reason": "length", "stop_reason": str(reason)}
    return {"finish_reason": reason}


def _head(prepared: Prepared) -> dict[str, Any]:
    return {"id": prepared.id, "created": int(time.time()), "model": prepared.model}
