"""From the engine's events to HTTP answers, whole or as server-sent events.

This has the common part and answers with choices. `responses_api` has the others.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import json
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from jax_attn.serve._grammar.grammar import GrammarError
from jax_attn.serve._openai import schemas
from jax_attn.serve._openai.access_log import Record
from jax_attn.serve._openai.errors import ApiError
from jax_attn.serve._openai.limits import Ticket, queue_full
from jax_attn.serve._openai.logprobs import PromptScores, Scores
from jax_attn.serve._openai.metrics import Metrics
from jax_attn.serve._openai.prepare import Prepared
from jax_attn.serve._openai.response_format import Style
from jax_attn.serve._scheduling.admission import QueueFull
from jax_attn.serve._scheduling.events import TokenEvent, TokenLogprob
from jax_attn.serve._scheduling.protocols import EngineStopped, ServedEngine
from jax_attn.serve._scheduling.request import FinishReason, Sequence, UnknownAdapter

# Between two keep-alive comments of a stream; proxies cut one silent for 15 to 60 s.
KEEP_ALIVE_SECONDS = 10.0
_ENTRIES_AT_A_TIME = 64  # log-probabilities, a millisecond; then other requests run
_EVENTS_AT_A_TIME = 8  # events of several choices in one step; then other requests run
_PIECE_BYTES = 1 << 16  # parts of a long answer are at most this large
_MARK = "the text goes here"
_NO_SCORES = b'"logprobs":null'  # no text can contain it: its quotes would be escaped
_NO_PROMPT_SCORES = b'"prompt_logprobs":null'
# _WINDOW: sequences of a request that the engine has at a time. _GROUP: sequences of each call.
# When some end, others follow.
_WINDOW, _GROUP = 64, 16
_RETRY_SECONDS = 0.05  # if the queue has no room for the rest of a running request


@dataclass
class _Choice:
    """The output of one sequence so far."""

    scores: Scores | None = None  # None: not requested
    prompt_scores: PromptScores | None = None  # None: not requested
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)  # not sent yet, if they are requested
    num_tokens: int = 0
    has_begun: bool = False  # its first chunk has been sent
    num_cached: int = 0
    logprob: float = 0.0  # sum over its tokens, if they are requested
    last_event: float = 0.0  # time.monotonic()
    finish_reason: str | None = None


class _Ended(NamedTuple):
    """The engine has finished a group of sequences."""

    task: asyncio.Task[None] | None
    group: list[Sequence]
    error: Exception | None


class GenerationAnswer(abc.ABC):
    """Runs a prepared request on the engine and answers it: an ASGI application.

    The answer begins with the first token or the first keep-alive comment, so a full queue still
    gives a plain 429. When the client leaves, the engine's iterator is closed, which aborts its
    sequences.
    """

    _media_type = "text/event-stream"  # of streams

    def __init__(
        self,
        engine: ServedEngine,
        prepared: Prepared,
        metrics: Metrics,
        ticket: Ticket,
        record: Record,
        *,
        stream: bool,
    ):
        self._engine, self._prepared = engine, prepared
        self._metrics, self._ticket, self._record = metrics, ticket, record
        self._stream = stream
        self._index = {seq.id: index for index, seq in enumerate(prepared.sequences)}
        self._choices = [_Choice() for _ in prepared.sequences]
        self._is_started = False  # whether the answer has begun
        self._has_output = False  # whether an event has been sent since the first token
        # An event (possibly in several pieces) or a keep-alive comment is being sent. Nothing may
        # come between its pieces. A lock would take a tenth of an event's time.
        self._is_sending = False
        self._comment: asyncio.Task[None] | None = None
        self._last_sent = time.monotonic()

    @property
    def record(self) -> Record:
        return self._record

    @abc.abstractmethod
    async def _respond_whole(self, send: Send) -> None: ...

    @abc.abstractmethod
    async def _respond_in_events(self, send: Send) -> None: ...

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        respond = self._respond_in_events if self._stream else self._respond_whole
        work = asyncio.create_task(respond(send))
        others = [asyncio.create_task(disconnected(receive))]
        try:
            if self._stream:
                others.append(asyncio.create_task(self._keep_alive(send)))
            await asyncio.wait({work, others[0]}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            cut_off = not work.done()
            for task in (work, *others):
                task.cancel()
            await asyncio.gather(work, *others, return_exceptions=True)
            self._ticket.leave()
            self._account(work, cut_off)
        if not cut_off:
            work.result()

    # ---- sending -------------------------------------------------------------------------------

    async def _send_whole(self, send: Send, pieces: list[bytes]) -> None:
        length = b"%d" % sum(map(len, pieces))
        await self._start(send, "application/json", (b"content-length", length))
        await send_pieces(send, pieces)
        await send({"type": "http.response.body", "body": b""})

    async def _send_event(self, send: Send, pieces: list[bytes], name: bytes = b"") -> None:
        if self._comment is not None:
            await self._comment
        self._is_sending = True
        if not self._is_started:
            await self._start(send, self._media_type)
        await send_pieces(send, self._framed(pieces, name))
        self._last_sent = time.monotonic()
        self._is_sending = False
        if not self._has_output and self._record.first_token is not None:
            self._has_output = True
            self._metrics.first_event.observe(self._last_sent - self._prepared.arrival)

    def _framed(self, pieces: list[bytes], name: bytes) -> list[bytes]:
        """An event of a stream. name: of its kind; empty: none is sent."""
        head = b"event: %b\ndata: " % name if name else b"data: "
        return [head, *pieces, b"\n\n"]

    def _sign_of_life(self) -> bytes:
        """What a stream sends while there is no event: a comment, which clients ignore."""
        return b": waiting\n\n"

    async def _keep_alive(self, send: Send) -> None:
        """Sends a sign of life whenever nothing was sent for a while."""
        while True:
            left = self._last_sent + KEEP_ALIVE_SECONDS - time.monotonic()
            if left > 0 or self._is_sending:
                await asyncio.sleep(max(left, KEEP_ALIVE_SECONDS / 10))
                continue
            self._comment = asyncio.create_task(self._send_comment(send))
            await self._comment
            self._comment = None

    async def _send_comment(self, send: Send) -> None:
        if not self._is_started:
            await self._start(send, self._media_type)
        await send_pieces(send, [self._sign_of_life()])
        self._last_sent = time.monotonic()

    async def _start(self, send: Send, content_type: str, *headers: tuple[bytes, bytes]) -> None:
        self._is_started = True
        all_headers = [
            *headers,
            (b"content-type", content_type.encode()),
            (b"cache-control", b"no-store"),
            (b"x-request-id", self._prepared.id.encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": all_headers})

    # ---- events --------------------------------------------------------------------------------

    async def _events(self) -> AsyncIterator[TokenEvent]:
        """Counts the engine's events and yields them.

        Raises:
          ApiError: the queue is full, the engine stops, or a sequence failed.
        """
        async with contextlib.aclosing(self._all_events()) as events:
            try:
                async for event in events:
                    self._count(event)
                    yield event
            except QueueFull as error:
                raise queue_full(str(error)) from None
            except GrammarError as error:
                raise self._bad_grammar(str(error)) from None
            except UnknownAdapter:  # it was unloaded since the body was read
                name = self._prepared.model
                raise ApiError(
                    404,
                    f"model: {name[:200]!r} is not served here any more",
                    param="model",
                    code="model_not_found",
                ) from None
            except EngineStopped:
                raise ApiError(503, "the server is shutting down", code="draining") from None

    def _all_events(self) -> AsyncGenerator[TokenEvent]:
        """The events of all sequences.

        The engine gets the sequences of a large request in groups.
        """
        seqs, beams = self._prepared.sequences, self._prepared.beams
        if beams is not None:
            return beams.events(self._engine, seqs, self._prepared.num_choices)
        if len(seqs) <= self._window:
            return self._engine.generate(seqs)
        return self._events_of_many(seqs)

    @property
    def _window(self) -> int:
        limits = self._engine.limits
        return min(_WINDOW, limits.max_waiting // limits.num_replicas)

    async def _events_of_many(self, seqs: list[Sequence]) -> AsyncGenerator[TokenEvent]:
        window = self._window
        size = max(1, min(_GROUP, window // 2))
        groups = deque(seqs[begin : begin + size] for begin in range(0, len(seqs), size))
        news: asyncio.Queue[TokenEvent | _Ended] = asyncio.Queue()
        running: set[asyncio.Task[None]] = set()
        has_begun = is_full = False
        try:
            while groups or running:
                while groups and not is_full and (len(running) + 1) * size <= window:
                    running.add(asyncio.create_task(self._run(groups.popleft(), news)))
                if not running:
                    await asyncio.sleep(_RETRY_SECONDS)
                    is_full = False
                    continue
                event = await news.get()
                if isinstance(event, _Ended):
                    running.discard(event.task)
                    is_full = isinstance(event.error, QueueFull)
                    if is_full and (has_begun or running):
                        groups.appendleft(event.group)
                    elif event.error is not None:
                        raise event.error
                else:
                    has_begun = True
                    yield event
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _run(self, group: list[Sequence], news: asyncio.Queue[TokenEvent | _Ended]) -> None:
        """Puts the events of a group into `news`, then an _Ended."""
        error = None
        try:
            async with contextlib.aclosing(self._engine.generate(group)) as events:
                async for event in events:
                    news.put_nowait(event)
        except Exception as raised:
            error = raised
        news.put_nowait(_Ended(asyncio.current_task(), group, error))

    def _count(self, event: TokenEvent) -> None:
        reason = event.finish_reason
        if event.admitted is not None:
            self._record.see_admitted(event.admitted)
        if reason == FinishReason.ERROR and not event.is_clients_fault:
            raise ApiError(500, event.error or "the request failed", code="engine_error")
        if reason == FinishReason.ABORT:
            raise ApiError(503, "the server is shutting down", code="draining")
        choice = self._choices[self._index[event.seq_id]]
        now = time.monotonic()
        if event.tokens:
            if choice.num_tokens == 0:
                self._metrics.ttft.observe(now - self._prepared.arrival)
                self._record.see_first_token(now)
            else:
                each = (now - choice.last_event) / len(event.tokens)
                for _ in event.tokens:
                    self._metrics.inter_token.observe(each)
            choice.last_event = now
            choice.num_tokens += len(event.tokens)
            self._record.num_output += len(event.tokens)
        if event.num_cached_tokens is not None:
            choice.num_cached = event.num_cached_tokens
        if reason is None:
            return
        choice.finish_reason = str(reason)
        # If one choice's grammar gets stuck, the others may still end normally.
        if event.is_clients_fault and all(c.finish_reason == "error" for c in self._choices):
            raise self._bad_grammar(event.error or "the grammar has got stuck")

    def _bad_grammar(self, message: str) -> ApiError:
        field = self._prepared.grammar_field or "grammar"
        return ApiError(400, f"{field}: {message}", param=field, code="invalid_grammar")

    def _usage(self) -> schemas.Usage:
        n = self._prepared.num_choices
        prompt = sum(len(tokens) for tokens in self._prepared.prompts)
        output = sum(choice.num_tokens for choice in self._choices)
        # The prompt counts once for all its choices; all but the first find it cached.
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

    def _account(self, work: asyncio.Task[None], cut_off: bool) -> None:
        self._metrics.request.observe(time.monotonic() - self._prepared.arrival)
        reasons = {choice.finish_reason for choice in self._choices}
        if cut_off:
            outcome = "disconnected"
        elif isinstance(error := work.exception(), ApiError) and error.status in (400, 429):
            return  # counted in the code that answers it
        elif error is not None or None in reasons:
            outcome = "failed"
        else:
            outcome = "deadline" if FinishReason.DEADLINE in reasons else "completed"
        self._metrics.count(outcome)


class ChoicesAnswer(GenerationAnswer):
    """An answer that is a list of choices, for completions and chat completions."""

    def __init__(self, style: Style, *args: Any, include_usage: bool, **kwargs: Any):
        """Takes GenerationAnswer's arguments besides."""
        super().__init__(*args, **kwargs)
        self._style, self._include_usage = style, include_usage
        for index, (choice, seq) in enumerate(
            zip(self._choices, self._prepared.sequences, strict=True)
        ):
            choice.scores, choice.prompt_scores = style.scores(index), self._prompt_scores(seq)
        self._around_text: dict[int, tuple[bytes, bytes]] = {}

    def _prompt_scores(self, seq: Sequence) -> PromptScores | None:
        num_top = self._prepared.num_prompt_top
        if num_top is None:
            return None
        return PromptScores(self._style.tokens, seq.num_prompt, num_top)

    # ---- one answer ----------------------------------------------------------------------------

    async def _respond_whole(self, send: Send) -> None:
        async for event in self._events():
            choice = self._choices[self._index[event.seq_id]]
            choice.texts.append(event.text)
            if self._prepared.returns_ids:
                choice.token_ids += event.tokens
            if event.logprobs and event.tokens:
                own = event.logprobs[-len(event.tokens) :]  # before them are the prompt's
                choice.logprob += sum(entry.logprob or 0.0 for entry in own)
            # A stream sends its log-probabilities as they come.
            self._ticket.take(scores=sum(1 + len(entry.top) for entry in event.logprobs or ()))
            await add_scores(choice, event.logprobs)
        whole = self._style.whole(self._usage())
        if self._prepared.returns_ids and isinstance(whole, schemas.ChatCompletion):
            whole.prompt_token_ids = self._prepared.prompts[0]
        before, behind = whole.model_dump_json().encode().split(b'"choices":[]')
        pieces = [before, b'"choices":[']
        for place, index in enumerate(self._shown()):
            choice = self._choices[index]
            model: Any = self._style.choice(index, "".join(choice.texts), choice.finish_reason)
            model.index = place
            if self._prepared.returns_ids:
                self._add_ids(model, index, is_first=True)
            pieces += [b","] * bool(place) + _dump(model, choice.scores, choice.prompt_scores)
            await asyncio.sleep(0)  # lets other requests run
        pieces += [b"]", behind]
        await self._send_whole(send, pieces)

    def _shown(self) -> list[int]:
        """The choices of the answer: all, or the likeliest of each prompt by a token's mean."""
        choices, best = range(len(self._choices)), self._prepared.num_best
        if best is None:
            return list(choices)

        def mean(index: int) -> float:
            choice = self._choices[index]
            return choice.logprob / max(1, choice.num_tokens)

        size = self._prepared.num_choices
        groups = [choices[begin : begin + size] for begin in choices[::size]]
        return [i for group in groups for i in sorted(group, key=mean, reverse=True)[:best]]

    # ---- server-sent events --------------------------------------------------------------------

    async def _respond_in_events(self, send: Send) -> None:
        try:
            num_sent = 0
            async for event in self._events():
                finish = None if event.finish_reason is None else str(event.finish_reason)
                index = self._index[event.seq_id]
                if self._prepared.returns_ids:
                    self._choices[index].token_ids += event.tokens
                if event.logprobs:
                    await add_scores(self._choices[index], event.logprobs)
                if event.text or event.logprobs or finish:
                    for news in self._chunks(index, event.text, bool(event.logprobs), finish):
                        await self._send_event(send, news)
                        num_sent += 1
                        if num_sent % _EVENTS_AT_A_TIME == 0:
                            await asyncio.sleep(0)
        except ApiError as error:
            if not self._is_started:
                raise
            await self._send_event(send, [error.body().model_dump_json().encode()])
        else:
            if self._include_usage:
                usage = self._style.usage_chunk(self._usage())
                await self._send_event(send, [usage.model_dump_json().encode()])
        await self._send_event(send, [b"[DONE]"])
        await send({"type": "http.response.body", "body": b""})

    def _chunks(
        self, index: int, text: str, has_scores: bool, finish: str | None
    ) -> list[list[bytes]]:
        """Makes the chunks with what is new, each in pieces.

        The chunks of a choice differ only in their text, except for the first, the last, and those
        that the style changes.
        """
        choice = self._choices[index]
        is_plain = choice.has_begun and not (has_scores or finish or self._prepared.returns_ids)
        is_first, choice.has_begun = not choice.has_begun, True
        around = self._around_text.get(index)
        if is_plain and around is None and self._style.keeps_text:
            (marked,) = self._style.chunks(index, _MARK, False, finish)
            whole = b"".join(_dump(marked, choice.scores))
            before, after = whole.split(json.dumps(_MARK).encode())
            around = self._around_text[index] = (before, after)
        if is_plain and around is not None:
            return [[json.dumps(text).encode().join(around)]]
        chunks = self._style.chunks(index, text, has_scores, finish)
        if chunks and self._prepared.returns_ids:
            self._add_ids(chunks[0].choices[0], index, is_first)  # type: ignore[attr-defined]
            if is_first and isinstance(chunks[0], schemas.ChatCompletionChunk):
                chunks[0].prompt_token_ids = self._prepared.prompts[0]
        return [_dump(chunk, None if i else choice.scores) for i, chunk in enumerate(chunks)]

    def _add_ids(self, model: Any, index: int, is_first: bool) -> None:
        """Adds the tokens of a choice that have not been sent; before the first, the prompt's."""
        choice = self._choices[index]
        model.token_ids, choice.token_ids = choice.token_ids, []
        if is_first and isinstance(model, schemas.CompletionChoice):
            model.prompt_token_ids = self._prepared.prompts[index // self._prepared.num_choices]


async def disconnected(receive: Receive) -> None:
    """Returns when the client has gone. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def add_scores(choice: _Choice, entries: list[TokenLogprob] | None) -> None:
    """Adds log-probabilities in parts: a long prompt has thousands in one event."""
    if not entries or (choice.scores is None and choice.prompt_scores is None):
        return
    for begin in range(0, len(entries), _ENTRIES_AT_A_TIME):
        if begin:
            await asyncio.sleep(0)
        some = entries[begin : begin + _ENTRIES_AT_A_TIME]
        if choice.prompt_scores is not None:
            some = choice.prompt_scores.take_own(some)
        if choice.scores is not None:
            choice.scores.add(some)


def _dump(
    model: BaseModel, scores: Scores | None, prompt_scores: PromptScores | None = None
) -> list[bytes]:
    """The JSON of one choice, or of a chunk with it, in pieces, with the log-probabilities."""
    pieces = [model.model_dump_json().encode()]
    for mark, found in ((_NO_SCORES, scores), (_NO_PROMPT_SCORES, prompt_scores)):
        if found is not None:
            before, after = pieces.pop().split(mark)
            pieces += [before, mark.removesuffix(b"null"), *found.take(), after]
    return pieces


async def send_pieces(send: Send, pieces: list[bytes]) -> None:
    """Sends the joined pieces in parts of at most _PIECE_BYTES.

    Copying a long answer at once would delay others, and each part that a slow client takes shows
    that it still reads.
    """
    if sum(map(len, pieces)) <= _PIECE_BYTES:
        await send(_body(b"".join(pieces)))
        return
    body = bytearray()
    for piece in pieces:
        body += piece
        while len(body) > _PIECE_BYTES:
            await send(_body(bytes(body[:_PIECE_BYTES])))
            del body[:_PIECE_BYTES]
            await asyncio.sleep(0)
    await send(_body(bytes(body)))


def _body(body: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": True}
