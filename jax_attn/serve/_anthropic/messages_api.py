"""/v1/messages, Anthropic's Messages API, built on chat completions.

A request becomes a chat request (`MessagesApi.prepare`), and the engine's output becomes a list of
content blocks: thoughts, texts and calls (`_Blocks`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

from pydantic import ValidationError
from starlette.types import Send

from jax_attn.serve._anthropic import message_schemas as ms
from jax_attn.serve._anthropic.message_errors import error_body
from jax_attn.serve._openai import schemas
from jax_attn.serve._openai.answers import GenerationAnswer
from jax_attn.serve._openai.errors import ApiError, bad_field, from_validation
from jax_attn.serve._openai.prepare import Caller, Prepared, Preparer
from jax_attn.serve._openai.response_format import CallPart, SplitText, reasons_of
from jax_attn.serve._scheduling.events import TokenEvent

Event = dict[str, Any]

# A field of a chat request -> its place in a messages request.
_FIELDS = {"response_format": "output_config.format", "stop": "stop_sequences"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class MessagesApi:
    def __init__(self, preparer: Preparer):
        self._preparer = preparer

    def prepare(
        self, body: ms.MessagesRequest, caller: Caller
    ) -> tuple[Prepared, partial[MessagesAnswer]]:
        """Returns the request for the engine, and a factory for its answer.

        The factory takes GenerationAnswer's further arguments. Raises ApiError.
        """
        fields = _chat_fields(body) | {"max_tokens": body.max_tokens}
        for name in ("temperature", "top_p", "top_k"):
            if (value := getattr(body, name)) is not None:
                fields[name] = value
        if body.stop_sequences:
            # The text then ends with the one that it met, which the answer names.
            fields |= {"stop": body.stop_sequences, "include_stop_str_in_output": True}
        try:
            prepared = self._preparer.chat(_chat(fields), caller, "msg_")
        except ApiError as error:
            raise _renamed(error) from None
        return prepared, partial(MessagesAnswer, tuple(body.stop_sequences), stream=body.stream)

    def count(self, body: ms.CountRequest) -> ms.TokenCount:
        """Counts the tokens of the prompt. Raises ApiError."""
        try:
            self._preparer.check_model(body.model)
            tokens = self._preparer.chat_prompt(_chat(_chat_fields(body))).tokens
        except ApiError as error:
            raise _renamed(error) from None
        return ms.TokenCount(input_tokens=len(tokens))


# ---- requests ----------------------------------------------------------------------------------


def _chat(fields: dict[str, Any]) -> schemas.ChatCompletionRequest:
    try:
        return schemas.ChatCompletionRequest.model_validate(fields)
    except ValidationError as error:
        raise from_validation(error, fields) from None


def _renamed(error: ApiError) -> ApiError:
    """Renames the error's field to that of the original request."""
    param, message = error.param or "", str(error)
    new = _FIELDS.get(re.split(r"[.[]", param)[0], param)
    if param and message.startswith(param):
        message = new + message[len(param) :]
    return ApiError(error.status, message, param=new or None, code=error.code)


def _chat_fields(body: ms.CountRequest) -> dict[str, Any]:
    """The fields of ChatCompletionRequest that decide on the prompt."""
    messages = _messages(body.messages)
    # A last message of the assistant is the beginning of the answer.
    fields: dict[str, Any] = {"continue_final_message": messages[-1]["role"] == "assistant"}
    if body.system:
        messages.insert(0, {"role": "system", "content": _text(body.system)})
    fields |= {"model": body.model, "messages": messages}
    thinks = body.thinking is not None and body.thinking.type != "disabled"
    fields["chat_template_kwargs"] = {"enable_thinking": thinks}
    shows = body.thinking is not None and thinks and body.thinking.display != "omitted"
    fields["include_reasoning"] = shows
    if (config := body.output_config) is not None:
        fields["reasoning_effort"] = config.effort
        if config.format is not None:
            schema = {"schema": config.format.schema_}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    fields["tools"] = [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.input_schema,
                "strict": tool.strict,
            },
        }
        for tool in body.tools
        if tool is not None
    ]
    if (choice := body.tool_choice) is not None:
        if (choice.type == "tool") != (choice.name is not None):
            raise bad_field("tool_choice.name", "belongs to type 'tool', and is needed there")
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        named = {"type": "function", "function": {"name": choice.name}}
        fields["tool_choice"] = named if choice.type == "tool" else _CHOICES[choice.type]
    return fields


def _messages(given: list[ms.MessageParam]) -> list[dict[str, Any]]:
    """Converts messages. Each result of a call becomes a message of its own.

    Raises:
      ApiError: a block in a message of the other role, or the result of an unknown call.
    """
    messages: list[dict[str, Any]] = []
    names: dict[str, str] = {}  # of the calls so far, by their ids
    for i, message in enumerate(given):
        if isinstance(message.content, str):
            messages.append({"role": message.role, "content": message.content})
            continue
        answer: dict[str, Any] = {"role": "assistant", "content": ""}
        for j, block in enumerate(message.content):
            assert block is not None  # blocks of other types have been refused
            where = f"messages[{i}].content[{j}]"
            is_users = isinstance(block, ms.ToolResultBlock | ms.PictureBlock)
            owner = "user" if is_users else "assistant"
            if not isinstance(block, ms.TextBlock) and message.role != owner:
                raise bad_field(where, f"{block.type!r} does not belong to role {message.role!r}")
            if isinstance(block, ms.ToolResultBlock):
                if block.tool_use_id not in names:
                    wrong = f"no tool_use has it: {block.tool_use_id[:64]!r}"
                    raise bad_field(f"{where}.tool_use_id", wrong)
                messages.append(
                    {
                        "role": "tool",
                        "tool_call_id": block.tool_use_id,
                        "name": names[block.tool_use_id],
                        "content": _text(block.content),
                    }
                )
            elif isinstance(block, ms.ToolUseBlock):
                names[block.id] = block.name
                call = {"name": block.name, "arguments": json.dumps(block.input)}
                answer.setdefault("tool_calls", []).append({"id": block.id, "function": call})
            elif isinstance(block, ms.ThinkingBlock):
                answer["reasoning_content"] = block.thinking
            elif message.role == "assistant":
                assert isinstance(block, ms.TextBlock)
                answer["content"] = _joined(answer["content"], block.text)
            else:
                if not (messages and messages[-1] is answer):
                    answer = {"role": message.role, "content": ""}
                    messages.append(answer)
                _add(answer, block)
        if message.role == "assistant":
            messages.append(answer)
    if not messages:
        raise bad_field("messages", "no content")
    return messages


def _add(message: dict[str, Any], block: ms.TextBlock | ms.PictureBlock) -> None:
    """Adds a block to a message of the user: its content is a text, or with pictures a list."""
    content = message["content"]
    if isinstance(block, ms.TextBlock) and isinstance(content, str):
        message["content"] = _joined(content, block.text)
        return
    if isinstance(content, str):
        content = message["content"] = [{"type": "text", "text": content}] if content else []
    if isinstance(block, ms.TextBlock):
        content.append({"type": "text", "text": block.text})
        return
    url = f"data:{block.source.media_type};base64,{block.source.data}"
    content.append({"type": "image_url", "image_url": {"url": url}})


def _joined(first: str, second: str) -> str:
    return f"{first}\n{second}" if first else second


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


# ---- answers -----------------------------------------------------------------------------------


class _Blocks:
    """The content blocks of an answer, and the stream events that describe them."""

    def __init__(self, prepared: Prepared, streams: bool):
        """streams: calls begin before they are complete, and may be cut."""
        self._split, self._streams = SplitText(prepared), streams
        # The last one, while it grows.
        self._open: ms.OutputText | ms.OutputThinking | ms.OutputToolUse | None = None
        self._texts: list[str] = []  # of it
        self.blocks: list[Any] = []

    @property
    def has_calls(self) -> bool:
        return bool(self._split.calls)

    def push(self, text: str, finish: str | None) -> Iterator[Event]:
        """Adds text. finish: why it is the last; None: it is not."""
        thoughts, content = self._split.push(text, finish, self._streams)
        for part in self._split.continued:
            yield from self._call(part)
        if thoughts:
            yield from self._add(ms.OutputThinking(thinking=""), "thinking", thoughts)
        if content:
            yield from self._add(ms.OutputText(text=""), "text", content)
        for part in self._split.begun:
            yield from self._call(part)
        if finish is not None:
            yield from self._close()

    def _call(self, part: CallPart) -> Iterator[Event]:
        if part.is_first:
            yield from self._begin(ms.OutputToolUse(id=part.call.id, name=part.call.name, input={}))
        if part.arguments:
            self._texts.append(part.arguments)
            yield self._delta("input_json", partial_json=part.arguments)
        if part.is_last and isinstance(self._open, ms.OutputToolUse):
            self._open.input = json.loads("".join(self._texts))
            yield from self._close()

    def _add(
        self, empty: ms.OutputText | ms.OutputThinking, field: str, text: str
    ) -> Iterator[Event]:
        if type(self._open) is not type(empty):
            yield from self._begin(empty)
        self._texts.append(text)
        yield self._delta(field, **{field: text})

    def _begin(
        self, block: ms.OutputText | ms.OutputThinking | ms.OutputToolUse
    ) -> Iterator[Event]:
        yield from self._close()
        self._open, self._texts = block, []
        self.blocks.append(block)
        yield self._start(block)

    def _close(self) -> Iterator[Event]:
        block, self._open = self._open, None
        if block is None:
            return
        if not isinstance(block, ms.OutputToolUse):
            setattr(block, block.type, "".join(self._texts))
        yield {"type": "content_block_stop", "index": len(self.blocks) - 1}

    def _start(self, block: Any) -> Event:
        index = len(self.blocks) - 1
        return {"type": "content_block_start", "index": index, "content_block": block.model_dump()}

    def _delta(self, kind: str, **fields: str) -> Event:
        delta = {"type": f"{kind}_delta", **fields}
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}


class MessagesAnswer(GenerationAnswer):
    """The answer of one request: a message, or its events."""

    def __init__(self, stops: tuple[str, ...], *args: Any, **kwargs: Any):
        """stops: the stop sequences. Further arguments: those of GenerationAnswer."""
        super().__init__(*args, **kwargs)
        self._stops, self._met = stops, ""  # _met: the stop sequence that the text ended with
        self._blocks = _Blocks(self._prepared, self._stream)

    async def _respond_whole(self, send: Send) -> None:
        async for event in self._events():
            for _ in self._push(event):
                pass
        await self._send_whole(send, [self._message().model_dump_json().encode()])

    async def _respond_in_events(self, send: Send) -> None:
        try:
            has_begun = False
            async for event in self._events():
                if not has_begun:
                    has_begun = True
                    begin = ms.MessageAnswer(
                        id=self._prepared.id, model=self._prepared.model, usage=self._counts()
                    )
                    await self._tell(send, {"type": "message_start", "message": begin.model_dump()})
                for news in self._push(event):
                    await self._tell(send, news)
        except ApiError as error:
            if not self._is_started:
                raise
            await self._tell(send, error_body(error).model_dump())
        else:
            whole = self._message()
            delta = {"stop_reason": whole.stop_reason, "stop_sequence": whole.stop_sequence}
            usage = whole.usage.model_dump()
            await self._tell(send, {"type": "message_delta", "delta": delta, "usage": usage})
            await self._tell(send, {"type": "message_stop"})
        await send({"type": "http.response.body", "body": b""})

    def _push(self, event: TokenEvent) -> Iterator[Event]:
        """The stream events that follow from an engine event."""
        text = event.text
        if event.finish_reason is not None and reasons_of(event.finish_reason) == _STOP:
            # A stop sequence is held until it is complete, so all of it is in the last text.
            met = [stop for stop in self._stops if text.endswith(stop)]
            self._met = max(met, key=len, default="")
            text = text.removesuffix(self._met)
        return self._blocks.push(text, event.finish_reason)

    def _message(self) -> ms.MessageAnswer:
        """The whole answer."""
        reason: Any = "max_tokens"
        if reasons_of(self._choices[0].finish_reason) == _STOP:
            reason = "tool_use" if self._blocks.has_calls else "end_turn"
            reason = "stop_sequence" if self._met else reason
        return ms.MessageAnswer(
            id=self._prepared.id,
            model=self._prepared.model,
            content=self._blocks.blocks,
            stop_reason=reason,
            stop_sequence=self._met or None,
            usage=self._counts(),
        )

    def _counts(self) -> ms.MessageUsage:
        usage = self._usage()
        cached = usage.prompt_tokens_details.cached_tokens
        return ms.MessageUsage(
            input_tokens=usage.prompt_tokens - cached,
            cache_read_input_tokens=cached,
            output_tokens=usage.completion_tokens,
        )

    async def _tell(self, send: Send, event: Event) -> None:
        await self._send_event(send, [json.dumps(event).encode()], event["type"].encode())


_STOP = {"finish_reason": "stop"}
