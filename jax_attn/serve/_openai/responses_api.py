"""/v1/responses, OpenAI's Responses API, built on chat completions.

A request becomes a chat request (`ResponsesApi.prepare`), and the engine's output becomes a list of
items: thoughts, messages and calls (`Output`). A response is stored for `previous_response_id`,
with the conversation that led to it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from pydantic import TypeAdapter, ValidationError
from starlette.types import Receive, Scope, Send

from jax_attn.serve._chat import custom_tools
from jax_attn.serve._openai import response_schemas as rs
from jax_attn.serve._openai import schemas
from jax_attn.serve._openai.answers import GenerationAnswer, send_pieces
from jax_attn.serve._openai.background import BackgroundRuns
from jax_attn.serve._openai.conversations import Conversations
from jax_attn.serve._openai.errors import ApiError, bad_field, from_validation
from jax_attn.serve._openai.logprobs import TokenJson
from jax_attn.serve._openai.prepare import Caller, Prepared, Preparer
from jax_attn.serve._openai.response_format import CallPart, SplitText, reasons_of
from jax_attn.serve._openai.response_items import output_id, page, response_of, shown
from jax_attn.serve._openai.response_store import BoundedStore, StoredResponse
from jax_attn.serve._scheduling.events import TokenEvent, TokenLogprob

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


# Tokens x (1 + top_logprobs) of a response, which is one JSON text, made at once in 30 ms.
_MAX_SCORES = 1 << 14
# Bytes of the responses that a request's references are looked for in, which takes 0.1 s.
_MAX_REFERRED_BYTES = 16 << 20
_LEAST_LOGPROB = -9999.0  # as OpenAI writes those that are infinite
_CALLS = ("function_call", "custom_tool_call")
_ITEMS = TypeAdapter(list[rs.Item])


class ResponsesApi:
    def __init__(
        self,
        preparer: Preparer,
        tokens: TokenJson,
        store: BoundedStore[StoredResponse] | None = None,
    ):
        self._preparer, self._tokens = preparer, tokens
        self._store = store or BoundedStore[StoredResponse]()
        self.conversations, self._runs = Conversations(), BackgroundRuns()

    def prepare(
        self, body: rs.ResponsesRequest, caller: Caller
    ) -> tuple[Prepared, partial[ResponseAnswer]]:
        """Returns the request for the engine, and a factory for its answer.

        The factory takes GenerationAnswer's further arguments. Raises ApiError.
        """
        given = self._whole(body.input, caller.tenant)
        messages = self._messages(body, given, caller.tenant)
        prepared = self._prepared(body, messages, caller)
        items = shown(given)
        put = partial(self._put, caller.tenant, body, json.dumps(messages).encode(), items)
        tokens = None if body.num_top is None else self._tokens
        return prepared, partial(
            ResponseAnswer, _outline(body, prepared), put, tokens, stream=body.stream
        )

    def _whole(self, given: str | list[Any], tenant: str) -> str | list[Any]:
        """The input, with items in place of references to them. Raises ApiError."""
        if isinstance(given, str):
            return given
        outputs: dict[str, dict[str, Any]] = {"": {}}  # items of responses, by their identifiers
        places: dict[str, int] = {}  # of references, by the items' identifiers
        num_bytes = 0
        for i, item in enumerate(given):
            if not isinstance(item, rs.ItemReference):
                continue
            response, where = response_of(item.id), f"input[{i}].id"
            if response not in outputs:
                stored = self._store.get(tenant, response)
                body = stored.body if stored is not None else b'{"output": []}'
                if (num_bytes := num_bytes + len(body)) > _MAX_REFERRED_BYTES:
                    wrong = f"the responses referred to have more than {_MAX_REFERRED_BYTES} bytes"
                    raise bad_field("input", f"{wrong}; use previous_response_id")
                outputs[response] = {each["id"]: each for each in json.loads(body)["output"]}
            if item.id not in outputs[response]:
                raise _no_item(item.id, where)
            if item.id in places:
                raise bad_field(where, f"input[{places[item.id]}] is the same item")
            places[item.id] = i
        items = _ITEMS.validate_python([outputs[response_of(id)][id] for id in places])
        whole = dict(enumerate(given)) | dict(zip(places.values(), items, strict=True))
        return list(whole.values())

    def _messages(
        self, body: rs.ResponsesRequest, given: str | list[Any], tenant: str
    ) -> list[dict[str, Any]]:
        """The chat so far, and the input, whose items are whole. Raises ApiError."""
        history: list[dict[str, Any]] = []
        if (previous := body.previous_response_id) is not None:
            if self._runs.get(tenant, previous) is not None:
                raise bad_field("previous_response_id", f"{previous[:64]!r} has not ended")
            history = json.loads(self._find(tenant, previous, "previous_response_id").messages)
        if (id := body.conversation_id) is not None:
            found = self.conversations.get(tenant, id, "conversation")
            history = _messages(_ITEMS.validate_python(found.parsed()), {})
        return history + _messages(given, _names_of_calls(history))

    def count(self, body: rs.InputTokensRequest, tenant: str) -> rs.InputTokens:
        """Counts the tokens of the prompt. Raises ApiError."""
        try:
            self._preparer.check_model(body.model)
            chat = _chat(body, self._messages(body, self._whole(body.input, tenant), tenant))
            tokens = self._preparer.chat_prompt(chat).tokens
        except ApiError as error:
            raise _renamed(error) from None
        return rs.InputTokens(input_tokens=len(tokens))

    def input_items(self, tenant: str, id: str, query: Mapping[str, str]) -> bytes:
        """A part of the items of a response's request, as JSON. Raises ApiError."""
        return page(json.loads(self._find(tenant, id).items), query)

    def _prepared(
        self, body: rs.ResponsesRequest, messages: list[dict[str, Any]], caller: Caller
    ) -> Prepared:
        try:
            prepared = self._preparer.chat(_chat(body, messages), caller, "resp_")
        except ApiError as error:
            raise _renamed(error) from None
        num_scores = prepared.sequences[0].params.max_tokens * (1 + (body.num_top or 0))
        if body.num_top is not None and num_scores > _MAX_SCORES:
            raise bad_field(
                "max_output_tokens",
                f"tokens x (1 + top_logprobs) = {num_scores} are more than {_MAX_SCORES}; use fewer"
                " of them",
            )
        field = prepared.grammar_field or ""
        return dataclasses.replace(prepared, grammar_field=_FIELDS.get(field, field))

    def stored(self, tenant: str, id: str) -> StoredAnswer:
        """Answers with a response that is stored or runs. Raises ApiError, 404."""
        if (running := self._runs.get(tenant, id)) is not None:
            return StoredAnswer(running.so_far())
        return StoredAnswer(self._find(tenant, id).body)

    async def delete(self, tenant: str, id: str) -> rs.DeletedResponse:
        """Deletes a response, also one that runs. Raises ApiError, 404."""
        await self._runs.stop(tenant, id)
        if not self._store.remove(tenant, id):
            raise _not_found(id)
        return rs.DeletedResponse(id=id)

    def start(self, tenant: str, answer: ResponseAnswer) -> StoredAnswer:
        """Has a response run in the background. Answers with its beginning."""
        self._runs.start(tenant, answer)
        return StoredAnswer(answer.so_far())

    async def cancel(self, tenant: str, id: str) -> StoredAnswer:
        """Ends a response that runs in the background; one that was cancelled stays so.

        Raises ApiError, 404, or 400 for another that has ended.
        """
        await self._runs.stop(tenant, id)
        body = self._find(tenant, id).body
        if json.loads(body)["status"] != "cancelled":
            raise ApiError(
                400,
                f"response {id[:64]!r} cannot be cancelled: it has ended; close the connection of "
                "one that runs without background: true",
                param="response_id",
                code="unsupported_value",
            )
        return StoredAnswer(body)

    async def close(self) -> None:
        """Ends what runs in the background."""
        await self._runs.close()

    def _find(self, tenant: str, id: str, param: str | None = None) -> StoredResponse:
        if (found := self._store.get(tenant, id)) is None:
            raise _not_found(id, param)
        return found

    def _put(
        self,
        tenant: str,
        request: rs.ResponsesRequest,
        messages: bytes,
        items: list[dict[str, Any]],
        response: rs.ModelResponse,
        answer: dict[str, Any] | None,
        body: bytes,
    ) -> None:
        """Stores what the request wants to be kept. answer: a chat message; None: there is none."""
        if answer is not None:
            messages = b"%b, %b]" % (messages[:-1], json.dumps(answer).encode())
        if request.store:
            stored = StoredResponse(body, messages, json.dumps(items).encode())
            self._store.put(tenant, response.id, stored)
        if request.conversation_id is not None and answer is not None:
            # A call that was cut cannot be in a later prompt: its arguments are not JSON.
            output = [
                item.model_dump()
                for item in response.output
                if item.type not in _CALLS or item.status == "completed"
            ]
            # It was deleted, or is full: the response is there all the same.
            with contextlib.suppress(ApiError):
                self.conversations.append(tenant, request.conversation_id, items + output)


def _not_found(id: str, param: str | None = None) -> ApiError:
    return ApiError(
        404,
        f"response {id[:64]!r} not found: it is not yours, was not stored, was deleted, or had to "
        "make room for newer ones",
        param=param or "response_id",
        code="previous_response_not_found" if param else "response_not_found",
    )


def _no_item(id: str, param: str) -> ApiError:
    return ApiError(
        404,
        f"{param}: item {id[:64]!r} not found: it is in no output of a response that is yours and "
        "stored; send the item itself",
        param=param,
        code="item_not_found",
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


def _chat(
    body: rs.ResponsesRequest, messages: list[dict[str, Any]]
) -> schemas.ChatCompletionRequest:
    """The request as one for a chat. Raises ApiError."""
    fields = _chat_fields(body)
    if body.instructions is not None:
        messages = [{"role": "system", "content": body.instructions}, *messages]
    fields["messages"] = messages
    try:
        return schemas.ChatCompletionRequest.model_validate(fields)
    except ValidationError as error:
        raise from_validation(error, fields) from None


def _chat_fields(body: rs.ResponsesRequest) -> dict[str, Any]:
    """Fields of ChatCompletionRequest, without the messages.

    Fields that the body does not set are left out, so that the model's defaults apply.
    """
    fields: dict[str, Any] = {name: getattr(body, name) for name in _SHARED & body.model_fields_set}
    fields["parallel_tool_calls"] = body.parallel_tool_calls
    fields["chat_template_kwargs"] = body.chat_template_kwargs
    fields["mm_processor_kwargs"] = body.mm_processor_kwargs
    if body.max_output_tokens is not None:
        fields["max_completion_tokens"] = body.max_output_tokens
    if body.num_top is not None:
        fields |= {"logprobs": True, "top_logprobs": body.num_top}
    if body.reasoning is not None:
        fields["reasoning_effort"] = body.reasoning.effort
    if body.tools:
        fields["tools"] = [_chat_tool(tool) for tool in body.tools if tool is not None]
    choice = body.tool_choice
    if isinstance(choice, rs.AllowedTools):
        allowed = {"mode": choice.mode, "tools": list(map(_named_tool, choice.tools))}
        fields["tool_choice"] = {"type": choice.type, "allowed_tools": allowed}
    elif isinstance(choice, rs.NamedFunctionTool | rs.NamedCustomTool):
        fields["tool_choice"] = _named_tool(choice)
    else:
        fields["tool_choice"] = choice
    if body.text is not None and (format := body.text.format) is not None:
        fields["response_format"] = {"type": format.type}
        if format.schema_ is not None:
            fields["response_format"]["json_schema"] = {"schema": format.schema_}
    return fields


def _named_tool(tool: rs.NamedFunctionTool | rs.NamedCustomTool) -> dict[str, Any]:
    return {"type": tool.type, tool.type: {"name": tool.name}}


def _chat_tool(tool: rs.FunctionTool | rs.CustomTool) -> dict[str, Any]:
    if isinstance(tool, rs.FunctionTool):
        include = {"name", "description", "parameters", "strict"}
        return {
            "type": "function",
            "function": tool.model_dump(include=include, exclude_unset=True),
        }
    given = tool.format
    format: dict[str, Any] = {"type": given.type}
    if given.type == "grammar":
        format["grammar"] = {"syntax": given.syntax, "definition": given.definition}
    custom = {"name": tool.name, "description": tool.description, "format": format}
    return {"type": "custom", "custom": custom}


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
                kind = item.type.removesuffix("_output")
                raise bad_field(where, f"no {kind} has it: {item.call_id[:64]!r}")
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
            is_custom = isinstance(item, rs.CustomCallItem)
            arguments = custom_tools.arguments_of(item.input) if is_custom else item.arguments
            call = {"name": item.name, "arguments": arguments}
            answer.setdefault("tool_calls", []).append({"id": item.call_id, "function": call})
    return messages


def _may_follow(item: Any, answer: dict[str, Any]) -> bool:
    """Whether `item` may join an answer: thoughts come first, then a text, then calls."""
    if isinstance(item, rs.FunctionCallItem | rs.CustomCallItem):
        return True
    taken = (
        {"content", "tool_calls"} if isinstance(item, rs.MessageItem) else set(answer) - {"role"}
    )
    return not taken & answer.keys()


def _content(parts: Any) -> str | list[dict[str, Any]]:
    """A text; with pictures, the parts of a chat message."""
    if isinstance(parts, str):
        return parts
    if not any(isinstance(part, rs.PictureItemPart) for part in parts):
        return "\n".join(part.text for part in parts)
    return [
        {"type": "image_url", "image_url": {"url": part.image_url}}
        if isinstance(part, rs.PictureItemPart)
        else {"type": "text", "text": part.text}
        for part in parts
    ]


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
    assert choice is not None  # those of other types have been refused
    format = body.text.format if body.text is not None else None
    conversation = body.conversation_id
    return rs.ModelResponse(
        id=prepared.id,
        background=body.background,
        conversation=None if conversation is None else rs.ConversationId(id=conversation),
        top_logprobs=body.num_top or 0,
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
        tool_choice=choice if isinstance(choice, str | None) else choice.model_dump(),
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

    def __init__(self, prepared: Prepared, streams: bool):
        """streams: calls begin before they are complete, and may be cut."""
        self._split, self._streams = SplitText(prepared), streams
        self._response_id = prepared.id
        # The last item, while it grows.
        self._open: rs.OutputItem | None = None
        self._texts: list[str] = []  # of it
        self.items: list[Any] = []
        self.num_thought = 0  # tokens up to the end of the thoughts
        self._num_tokens = 0
        # Log-probabilities: of the last item, of its last event, and of tokens without a text yet.
        self._entries: list[Any] = []
        self._scores: list[Any] = []
        self._pending: list[Any] = []

    def push(
        self, text: str, num_tokens: int, finish: str | None, scores: list[Any] | None = None
    ) -> Iterator[Event]:
        """Adds text. finish: why it is the last; None: it is not. scores: of the tokens."""
        self._pending += scores or ()
        end: rs.ItemStatus | None = None
        if finish is not None:
            is_whole = reasons_of(finish)["finish_reason"] == "stop"
            end = "completed" if is_whole else "incomplete"
        reasoning, content = self._split.push(text, finish, self._streams)
        self._num_tokens += num_tokens
        for part in self._split.continued:
            yield from self._call(part)
        if reasoning:
            yield from self._add(rs.OutputReasoning, "rs", reasoning)
            self._pending = self._pending if content else []
        if self.items and not content and isinstance(self.items[-1], rs.OutputReasoning):
            self.num_thought = self._num_tokens
        if content:
            if isinstance(self._open, rs.OutputReasoning):
                self._drop_thoughts(len(content.encode()))
            yield from self._add(rs.OutputMessage, "msg", content)
        for part in self._split.begun:
            yield from self._call(part)
        if end is not None:
            if not self.items:  # clients expect at least one item
                yield from self._add(rs.OutputMessage, "msg", "")
            yield from self._close(end)

    def _drop_thoughts(self, num_bytes: int) -> None:
        """Forgets the log-probabilities of tokens before a text that has just begun."""
        while sum(len(entry["bytes"]) for entry in self._pending[1:]) >= num_bytes:
            del self._pending[0]

    def message(self) -> dict[str, Any]:
        """The whole output as a chat message."""
        texts: dict[str, list[str]] = {"reasoning": [], "message": []}
        for item in self.items:
            if item.type in texts:
                texts[item.type] += [part.text for part in item.content]
        message: dict[str, Any] = {"role": "assistant", "content": "".join(texts["message"])}
        if texts["reasoning"]:
            message["reasoning_content"] = "".join(texts["reasoning"])
        calls = [
            {"id": item.call_id, "function": {"name": item.name, "arguments": _arguments(item)}}
            for item in self.items
            if item.type in _CALLS and item.status == "completed"
        ]
        if calls:
            message["tool_calls"] = calls
        return message

    def _add(
        self, kind: type[rs.OutputMessage | rs.OutputReasoning], prefix: str, text: str
    ) -> Iterator[Event]:
        if not isinstance(self._open, kind):
            yield from self._close_for_another()
            self._open, self._entries = kind(id=self._new_id(prefix)), []
            self.items.append(self._open)
            yield self._item_event("response.output_item.added", self._open)
            yield self._part_event("response.content_part.added", part=self._part("").model_dump())
            self._texts = []
        self._texts.append(text)
        if kind is rs.OutputMessage:
            self._scores, self._pending = self._pending, []
            self._entries += self._scores
        if text:
            yield self._part_event(f"response.{self._word}.delta", delta=text, **self._shown_scores)

    def _close(self, status: rs.ItemStatus) -> Iterator[Event]:
        if (item := self._open) is None:
            return
        text, item.status = "".join(self._texts), status
        if isinstance(item, rs.OutputFunctionCall):
            item.arguments = text
            yield self._arguments_event("done", name=item.name, arguments=text)
        elif isinstance(item, rs.OutputCustomToolCall):
            item.input = text
            yield self._arguments_event("done", input=text)
        else:
            self._scores = self._entries
            part = self._part(text)
            item.content = [part]  # type: ignore[assignment]
            yield self._part_event(f"response.{self._word}.done", text=text, **self._shown_scores)
            yield self._part_event("response.content_part.done", part=part.model_dump())
        yield self._item_event("response.output_item.done", item)
        self._open = None

    def _close_for_another(self) -> Iterator[Event]:
        # A call that is still open has turned out malformed.
        is_call = isinstance(self._open, rs.OutputFunctionCall | rs.OutputCustomToolCall)
        return self._close("incomplete" if is_call else "completed")

    def _call(self, part: CallPart) -> Iterator[Event]:
        if part.is_first:
            yield from self._close_for_another()
            call = part.call
            if call.input is None:
                self._open = rs.OutputFunctionCall(
                    id=self._new_id("fc"), call_id=call.id, name=call.name, arguments=""
                )
            else:
                self._open = rs.OutputCustomToolCall(
                    id=self._new_id("ctc"), call_id=call.id, name=call.name, input=""
                )
            self._texts = []
            self.items.append(self._open)
            yield self._item_event("response.output_item.added", self._open)
        if part.arguments:
            self._texts.append(part.arguments)
            yield self._arguments_event("delta", delta=part.arguments)
        if part.is_last:
            yield from self._close("completed")

    def _new_id(self, prefix: str) -> str:
        return output_id(prefix, self._response_id, len(self.items))

    def _arguments_event(self, kind: str, **fields: str) -> Event:
        assert self._open is not None
        where = {"item_id": self._open.id, "output_index": len(self.items) - 1}
        is_custom = isinstance(self._open, rs.OutputCustomToolCall)
        word = "custom_tool_call_input" if is_custom else "function_call_arguments"
        return {"type": f"response.{word}.{kind}", **where, **fields}

    @property
    def _word(self) -> str:
        return "reasoning_text" if isinstance(self._open, rs.OutputReasoning) else "output_text"

    @property
    def _shown_scores(self) -> dict[str, Any]:
        """Log-probability fields, which events of texts have and those of thoughts do not."""
        return {} if isinstance(self._open, rs.OutputReasoning) else {"logprobs": self._scores}

    def _part(self, text: str) -> rs.OutputText | rs.ReasoningText:
        if isinstance(self._open, rs.OutputReasoning):
            return rs.ReasoningText(text=text)
        return rs.OutputText(text=text, logprobs=self._entries)

    def _item_event(self, type: str, item: Any) -> Event:
        return {"type": type, "output_index": len(self.items) - 1, "item": item.model_dump()}

    def _part_event(self, type: str, **fields: Any) -> Event:
        assert self._open is not None
        where = {"item_id": self._open.id, "output_index": len(self.items) - 1}
        return {"type": type, **where, "content_index": 0, **fields}


def _arguments(item: rs.OutputFunctionCall | rs.OutputCustomToolCall) -> str:
    """The arguments that the model wrote."""
    if isinstance(item, rs.OutputCustomToolCall):
        return custom_tools.arguments_of(item.input)
    return item.arguments


class ResponseAnswer(GenerationAnswer):
    """The answer of one response."""

    def __init__(
        self,
        response: rs.ModelResponse,
        put: Callable[[rs.ModelResponse, dict[str, Any] | None, bytes], None],
        tokens: TokenJson | None,
        *args: Any,
        **kwargs: Any,
    ):
        """response: its outline. tokens: None: no log-probabilities are wanted.

        put: stores (response, chat message if there is one, JSON of the response).
        Further arguments: those of GenerationAnswer.
        """
        super().__init__(*args, **kwargs)
        self._response, self._put, self._tokens = response, put, tokens
        self.id, self.is_background = response.id, response.background
        self._output = Output(self._prepared, self._stream)
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
            self._fail(error)
        else:
            self._finish()
        await self._tell_response(send, self._response.status)
        await send({"type": "http.response.body", "body": b""})

    def _push(self, event: TokenEvent) -> Iterator[Event]:
        """The stream events that follow from an engine event."""
        entries = event.logprobs or () if self._tokens is not None else ()
        self._ticket.take(scores=sum(1 + len(entry.top) for entry in entries))
        scores = [self._score(entry) for entry in entries]
        return self._output.push(event.text, len(event.tokens), event.finish_reason, scores)

    def _score(self, entry: TokenLogprob) -> dict[str, Any]:
        top = [self._token(token, logprob) for token, logprob in entry.top]
        return self._token(entry.token, entry.logprob) | {"top_logprobs": top}

    def _token(self, token: int, logprob: float | None) -> dict[str, Any]:
        assert self._tokens is not None and logprob is not None  # the output's have one
        raw = self._tokens.text(token)
        text, logprob = raw.decode(errors="replace"), max(logprob, _LEAST_LOGPROB)
        return {"token": text, "bytes": list(raw), "logprob": logprob}

    def so_far(self) -> bytes:
        """The JSON of the response while it runs."""
        has_begun = self._record.admitted is not None
        status = "in_progress" if has_begun else "queued"
        return self._response.model_copy(update={"status": status}).model_dump_json().encode()

    def fail(self, error: ApiError) -> None:
        """Stores the response as failed."""
        self._fail(error)
        self._put(self._response, None, self._response.model_dump_json().encode())

    def cancel(self) -> None:
        """Stores the response as cancelled."""
        self._response.status = "cancelled"
        self._put(self._response, None, self._response.model_dump_json().encode())

    def _fail(self, error: ApiError) -> None:
        code: Any = "server_error" if error.status >= 500 else "invalid_prompt"
        self._response.status = "failed"
        self._response.error = rs.ResponseError(code=code, message=str(error))
        self._response.output = self._output.items

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
        self._put(response, output.message(), body)
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
