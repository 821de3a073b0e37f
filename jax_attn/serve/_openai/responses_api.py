"""/v1/responses, OpenAI's Responses API, built on chat completions.

A request becomes a chat request (`ResponsesApi.prepare`), and the engine's output becomes a list of
items: thoughts, messages and calls (`Output`). A response is stored for `previous_response_id`,
with the conversation that led to it.
"""

from __future__ import annotations

import dataclasses
import json
import re
import secrets
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NoReturn

from pydantic import ValidationError
from starlette.types import Receive, Scope, Send

from jax_attn.serve._openai import response_schemas as rs
from jax_attn.serve._openai import schemas
from jax_attn.serve._openai.answers import GenerationAnswer, send_pieces
from jax_attn.serve._openai.errors import ApiError, bad_field, from_validation
from jax_attn.serve._openai.prepare import Caller, Prepared, Preparer
from jax_attn.serve._openai.response_format import SplitText, reasons_of
from jax_attn.serve._openai.response_store import ResponseStore, StoredResponse
from jax_attn.serve._scheduling.events import TokenEvent

Event = dict[str, Any]

# A field of a chat request -> its place in a responses request.
_FIELDS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
}
# Fields that both kinds of requests have with the same meaning.
_SHARED = frozenset(schemas.Generation.model_fields) - {
    "stream", "stream_options", "store", "metadata",
}  # fmt: skip


class ResponsesApi:
    def __init__(self, preparer: Preparer, store: ResponseStore | None = None):
        self._preparer, self._store = preparer, store or ResponseStore()

    def prepare(
        self, body: rs.ResponsesRequest, caller: Caller
    ) -> tuple[Prepared, partial[ResponseAnswer]]:
        """Returns the request for the engine, and a factory for its answer.

        The factory takes GenerationAnswer's further arguments. Raises ApiError.
        """
        history: list[dict[str, Any]] = []
        if (previous := body.previous_response_id) is not None:
            history = json.loads(
                self._find(caller.tenant, previous, "previous_response_id").messages
            )
        messages = history + _messages(body.input, _names_of_calls(history))
        prepared = self._prepared(body, messages, caller)
        put = None
        if body.store:
            put = partial(self._put, caller.tenant, prepared.id, json.dumps(messages).encode())
        return prepared, partial(ResponseAnswer, _outline(body, prepared), put, stream=body.stream)

    def _prepared(
        self, body: rs.ResponsesRequest, messages: list[dict[str, Any]], caller: Caller
    ) -> Prepared:
        fields = _chat_fields(body)
        if body.instructions is not None:
            messages = [{"role": "system", "content": body.instructions}, *messages]
        fields["messages"] = messages
        try:
            chat = schemas.ChatCompletionRequest.model_validate(fields)
            prepared = self._preparer.chat(chat, caller, "resp_")
        except ValidationError as error:
            raise _renamed(from_validation(error, fields)) from None
        except ApiError as error:
            raise _renamed(error) from None
        field = prepared.grammar_field or ""
        return dataclasses.replace(prepared, grammar_field=_FIELDS.get(field, field))

    def stored(self, tenant: str, id: str) -> StoredAnswer:
        """Answers with a stored response. Raises ApiError, 404."""
        return StoredAnswer(self._find(tenant, id).body)

    def delete(self, tenant: str, id: str) -> rs.DeletedResponse:
        """Deletes a stored response. Raises ApiError, 404."""
        if not self._store.remove(tenant, id):
            raise _not_found(id)
        return rs.DeletedResponse(id=id)

    def cancel(self, tenant: str, id: str) -> NoReturn:
        """Always raises ApiError: stored responses have ended.

        To stop a running one, close the connection.
        """
        self._find(tenant, id)
        raise ApiError(
            400,
            f"response {id[:64]!r} cannot be cancelled: only one with background: true could be, "
            "which this server does not support; close the connection of one that still runs",
            param="response_id",
            code="unsupported_value",
        )

    def _find(self, tenant: str, id: str, param: str | None = None) -> StoredResponse:
        if (found := self._store.get(tenant, id)) is None:
            raise _not_found(id, param)
        return found

    def _put(self, tenant: str, id: str, messages: bytes, answer: bytes, body: bytes) -> None:
        conversation = b"%b, %b]" % (messages[:-1], answer)
        self._store.put(tenant, id, StoredResponse(body, conversation))


def _not_found(id: str, param: str | None = None) -> ApiError:
    return ApiError(
        404,
        f"response {id[:64]!r} not found: it is not yours, was not stored, was deleted, or had to "
        "make room for newer ones",
        param=param or "response_id",
        code="previous_response_not_found" if param else "response_not_found",
    )


def _renamed(error: ApiError) -> ApiError:
    """Renames the error's field to that of the original request."""
    param, message = error.param or "", str(error)
    new = _FIELDS.get(re.split(r"[.[]", param)[0], param)
    if message.startswith(param):
        message = new + message[len(param) :]
    # Other messages contain no text of the client's.
    if error.code == "context_length_exceeded" or param == "min_tokens":
        for old, name in _FIELDS.items():
            message = message.replace(old, name)
    return ApiError(error.status, message, param=new or None, code=error.code)


# ---- requests ----------------------------------------------------------------------------------


def _chat_fields(body: rs.ResponsesRequest) -> dict[str, Any]:
    """Fields of ChatCompletionRequest, without the messages.

    Fields that the body does not set are left out, so that the model's defaults apply.
    """
    fields: dict[str, Any] = {name: getattr(body, name) for name in _SHARED & body.model_fields_set}
    fields["parallel_tool_calls"] = body.parallel_tool_calls
    fields["chat_template_kwargs"] = body.chat_template_kwargs
    if body.max_output_tokens is not None:
        fields["max_completion_tokens"] = body.max_output_tokens
    if body.reasoning is not None:
        fields["reasoning_effort"] = body.reasoning.effort
    if body.tools:
        fields["tools"] = [
            {
                "type": "function",
                "function": tool.model_dump(
                    include={"name", "description", "parameters"}, exclude_unset=True
                ),
            }
            for tool in body.tools
            if tool is not None
        ]
    choice = body.tool_choice
    if isinstance(choice, rs.NamedFunctionTool):
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    else:
        fields["tool_choice"] = choice
    if body.text is not None and (format := body.text.format) is not None:
        fields["response_format"] = {"type": format.type}
        if format.schema_ is not None:
            fields["response_format"]["json_schema"] = {"schema": format.schema_}
    return fields


def _messages(given: str | list[Any], names: dict[str, str]) -> list[dict[str, Any]]:
    """Converts items to chat messages. Consecutive thoughts, text and calls form one message.

    names: call_id -> function, of earlier calls; calls in `given` are added.

    Raises:
      ApiError: the result of an unknown call.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[dict[str, Any]] = []
    answer: dict[str, Any] | None = None  # the last message, if more items may join it
    for i, item in enumerate(given):
        if isinstance(item, rs.MessageItem) and item.role != "assistant":
            messages.append({"role": item.role, "content": _content(item.content)})
            answer = None
            continue
        if isinstance(item, rs.FunctionCallOutputItem):
            if item.call_id not in names:
                where = f"input[{i}].call_id"
                raise bad_field(where, f"no function_call has it: {item.call_id[:64]!r}")
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": item.call_id,
                    "name": names[item.call_id],
                    "content": _content(item.output),
                }
            )
            answer = None
            continue
        begins_anew = answer is None or not _may_follow(item, answer)
        if begins_anew:
            answer = {"role": "assistant"}
            messages.append(answer)
        assert answer is not None
        if isinstance(item, rs.ReasoningItem):
            parts = item.content or item.summary
            answer["reasoning_content"] = "\n".join(part.text for part in parts)
        elif isinstance(item, rs.MessageItem):
            answer["content"] = _content(item.content)
        else:
            names[item.call_id] = item.name
            call = {"name": item.name, "arguments": item.arguments}
            answer.setdefault("tool_calls", []).append({"id": item.call_id, "function": call})
    return messages


def _may_follow(item: Any, answer: dict[str, Any]) -> bool:
    """Whether `item` may join an answer: thoughts come first, then a text, then calls."""
    if isinstance(item, rs.FunctionCallItem):
        return True
    taken = (
        {"content", "tool_calls"} if isinstance(item, rs.MessageItem) else set(answer) - {"role"}
    )
    return not taken & answer.keys()


def _content(parts: Any) -> str:
    return parts if isinstance(parts, str) else "\n".join(part.text for part in parts)


def _names_of_calls(messages: list[dict[str, Any]]) -> dict[str, str]:
    return {
        call["id"]: call["function"]["name"]
        for message in messages
        for call in message.get("tool_calls", ())
    }


def _outline(body: rs.ResponsesRequest, prepared: Prepared) -> rs.ModelResponse:
    """The response before it has any output."""
    params = prepared.sequences[0].params
    choice = body.tool_choice
    format = body.text.format if body.text is not None else None
    return rs.ModelResponse(
        id=prepared.id,
        created_at=int(time.time()),
        model=prepared.model,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata,
        parallel_tool_calls=body.parallel_tool_calls,
        previous_response_id=body.previous_response_id,
        reasoning={"effort": body.reasoning and body.reasoning.effort, "summary": None},
        store=body.store,
        temperature=params.temperature,
        text={"format": _shown_format(format)},
        tool_choice=choice if isinstance(choice, str) else choice.model_dump(),
        tools=[tool.model_dump() for tool in body.tools if tool is not None],
        top_p=params.top_p,
    )


def _shown_format(format: rs.TextFormat | None) -> dict[str, Any]:
    if format is None or format.type != "json_schema":
        return {"type": "text" if format is None else format.type}
    return {"type": format.type, "name": format.name, "schema": format.schema_, "strict": True}


# ---- answers -----------------------------------------------------------------------------------


class Output:
    """The items of a response, and the stream events that describe them."""

    def __init__(self, prepared: Prepared):
        self._split = SplitText(prepared)
        # The last item, while it grows.
        self._open: rs.OutputMessage | rs.OutputReasoning | None = None
        self.items: list[Any] = []
        self.num_thought = 0  # tokens up to the end of the thoughts
        self._num_tokens = 0

    def push(self, text: str, num_tokens: int, end: rs.ItemStatus | None) -> Iterator[Event]:
        """Adds text. end: this is the last text; an open item gets this status."""
        num_calls = len(self._split.calls)
        reasoning, content = self._split.push(text, at_end=end is not None)
        self._num_tokens += num_tokens
        if reasoning:
            yield from self._add(rs.OutputReasoning, "rs", reasoning)
        if self.items and not content and isinstance(self.items[-1], rs.OutputReasoning):
            self.num_thought = self._num_tokens
        if content:
            yield from self._add(rs.OutputMessage, "msg", content)
        for call in self._split.calls[num_calls:]:
            yield from self._close("completed")
            yield from self._call(call)
        if end is not None:
            if not self.items:  # clients expect at least one item
                yield from self._add(rs.OutputMessage, "msg", "")
            yield from self._close(end)

    def message(self) -> dict[str, Any]:
        """The whole output as a chat message."""
        texts: dict[str, list[str]] = {"reasoning": [], "message": []}
        for item in self.items:
            if item.type in texts:
                texts[item.type] += [part.text for part in item.content]
        message: dict[str, Any] = {"role": "assistant", "content": "".join(texts["message"])}
        if texts["reasoning"]:
            message["reasoning_content"] = "".join(texts["reasoning"])
        if self._split.calls:
            calls = [item for item in self.items if item.type == "function_call"]
            message["tool_calls"] = [
                {"id": call.call_id, "function": {"name": call.name, "arguments": call.arguments}}
                for call in calls
            ]
        return message

    def _add(
        self, kind: type[rs.OutputMessage | rs.OutputReasoning], prefix: str, text: str
    ) -> Iterator[Event]:
        if not isinstance(self._open, kind):
            yield from self._close("completed")
            self._open = kind(id=f"{prefix}_{secrets.token_hex(12)}")
            self.items.append(self._open)
            yield self._item_event("response.output_item.added", self._open)
            yield self._part_event("response.content_part.added", part=self._part("").model_dump())
            self._texts: list[str] = []
        self._texts.append(text)
        if text:
            yield self._part_event(f"response.{self._word}.delta", delta=text, **self._scores)

    def _close(self, status: rs.ItemStatus) -> Iterator[Event]:
        if (item := self._open) is None:
            return
        part = self._part(text := "".join(self._texts))
        item.content = [part]  # type: ignore[assignment]
        item.status = status
        yield self._part_event(f"response.{self._word}.done", text=text, **self._scores)
        yield self._part_event("response.content_part.done", part=part.model_dump())
        yield self._item_event("response.output_item.done", item)
        self._open = None

    def _call(self, call: schemas.ToolCall) -> Iterator[Event]:
        item = rs.OutputFunctionCall(
            id=f"fc_{secrets.token_hex(12)}", call_id=call.id, name=call.function.name, arguments=""
        )
        self.items.append(item)
        yield self._item_event("response.output_item.added", item)
        item.arguments, item.status = call.function.arguments, "completed"
        where = {"item_id": item.id, "output_index": len(self.items) - 1}
        name = "response.function_call_arguments"
        yield {"type": f"{name}.delta", **where, "delta": item.arguments}
        yield {"type": f"{name}.done", **where, "name": item.name, "arguments": item.arguments}
        yield self._item_event("response.output_item.done", item)

    @property
    def _word(self) -> str:
        return "reasoning_text" if isinstance(self._open, rs.OutputReasoning) else "output_text"

    @property
    def _scores(self) -> dict[str, Any]:
        """Log-probability fields, which events of texts have and those of thoughts do not."""
        return {} if isinstance(self._open, rs.OutputReasoning) else {"logprobs": []}

    def _part(self, text: str) -> rs.OutputText | rs.ReasoningText:
        kind = rs.ReasoningText if isinstance(self._open, rs.OutputReasoning) else rs.OutputText
        return kind(text=text)

    def _item_event(self, type: str, item: Any) -> Event:
        return {"type": type, "output_index": len(self.items) - 1, "item": item.model_dump()}

    def _part_event(self, type: str, **fields: Any) -> Event:
        assert self._open is not None
        where = {"item_id": self._open.id, "output_index": len(self.items) - 1}
        return {"type": type, **where, "content_index": 0, **fields}


class ResponseAnswer(GenerationAnswer):
    """The answer of one response."""

    def __init__(
        self,
        response: rs.ModelResponse,
        put: Callable[[bytes, bytes], None] | None,
        *args: Any,
        **kwargs: Any,
    ):
        """response: its outline. put: stores (chat message, response), both JSON; None: not stored.

        Further arguments: those of GenerationAnswer.
        """
        super().__init__(*args, **kwargs)
        self._response, self._put = response, put
        self._output = Output(self._prepared)
        self._num_sent = 0  # events

    async def _respond_whole(self, send: Send) -> None:
        async for event in self._events():
            for _ in self._push(event):
                pass
        await self._send_whole(send, [self._finish()])

    async def _respond_in_events(self, send: Send) -> None:
        try:
            async for event in self._events():
                await self._begin(send)
                for news in self._push(event):
                    await self._tell(send, news)
        except ApiError as error:
            if not self._is_started:
                raise
            await self._begin(send)
            code: Any = "server_error" if error.status >= 500 else "invalid_prompt"
            self._response.status = "failed"
            self._response.error = rs.ResponseError(code=code, message=str(error))
            self._response.output = self._output.items
        else:
            self._finish()
        await self._tell_response(send, self._response.status)
        await send({"type": "http.response.body", "body": b""})

    def _push(self, event: TokenEvent) -> Iterator[Event]:
        """The stream events that follow from an engine event."""
        end: rs.ItemStatus | None = None
        if event.finish_reason is not None:
            is_whole = reasons_of(event.finish_reason)["finish_reason"] == "stop"
            end = "completed" if is_whole else "incomplete"
        return self._output.push(event.text, len(event.tokens), end)

    def _finish(self) -> bytes:
        """Completes the response. Returns its JSON, and stores it if the request asks for that."""
        response, output = self._response, self._output
        reasons = reasons_of(self._choices[0].finish_reason)
        response.status = "completed" if reasons["finish_reason"] == "stop" else "incomplete"
        response.completed_at = int(time.time())
        if response.status == "incomplete":
            response.incomplete_details = rs.IncompleteDetails(
                stop_reason=reasons.get("stop_reason")
            )
        response.output = output.items
        usage = self._usage()
        response.usage = rs.ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=rs.InputTokensDetails(
                cached_tokens=usage.prompt_tokens_details.cached_tokens
            ),
            output_tokens=usage.completion_tokens,
            output_tokens_details=rs.OutputTokensDetails(reasoning_tokens=output.num_thought),
            total_tokens=usage.total_tokens,
        )
        body = response.model_dump_json().encode()
        if self._put is not None:
            self._put(json.dumps(output.message()).encode(), body)
        return body

    async def _begin(self, send: Send) -> None:
        if not self._num_sent:
            await self._tell_response(send, "created")
            await self._tell_response(send, "in_progress")

    async def _tell_response(self, send: Send, name: str) -> None:
        await self._tell(
            send, {"type": f"response.{name}", "response": self._response.model_dump()}
        )

    async def _tell(self, send: Send, event: Event) -> None:
        event["sequence_number"] = self._num_sent
        self._num_sent += 1
        await self._send_event(send, [json.dumps(event).encode()], event["type"].encode())


class StoredAnswer:
    """An ASGI application that sends a stored response in pieces.

    A client that does not read it then keeps only a part of it in the server's memory.
    """

    def __init__(self, body: bytes):
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [
            (b"content-type", b"application/json"),
            (b"cache-control", b"no-store"),
            (b"content-length", b"%d" % len(self._body)),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send_pieces(send, [self._body])
        await send({"type": "http.response.body", "body": b""})
