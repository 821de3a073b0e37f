"""Holds the events of sequences in an event loop until their readers take them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from jax_attn.serve._scheduling.events import TokenEvent
from jax_attn.serve._scheduling.request import Sequence


@dataclass(slots=True, eq=False)
class _Reader:
    """The reader of one call of `stream`."""

    news: dict[str, TokenEvent] = field(default_factory=dict)  # by sequence: events not taken yet
    waiter: asyncio.Future[None] | None = None  # for the caller of `take`

    def put(self, event: TokenEvent) -> None:
        """Adds an event.

        Until it is taken, later events of the sequence are joined to it: a server that cannot write
        every token separately writes fewer, longer chunks.
        """
        if (earlier := self.news.get(event.seq_id)) is None:
            self.news[event.seq_id] = event
        else:
            earlier.extend(event)
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    async def take(self) -> list[TokenEvent]:
        """Waits until there are events. Returns all of them."""
        if not self.news:
            self.waiter = asyncio.get_running_loop().create_future()
            await self.waiter
        taken, self.news = self.news, {}
        return list(taken.values())


class Inbox:
    """The readers in one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._readers: dict[str, _Reader] = {}  # by sequence

    @property
    def sequences(self) -> set[str]:
        """Ids of the sequences that have not ended."""
        return set(self._readers)

    def deliver(self, events: list[TokenEvent]) -> None:
        """Delivers events from any thread. Raises RuntimeError once the event loop is closed."""
        self._loop.call_soon_threadsafe(self.put, events)

    def put(self, events: list[TokenEvent]) -> None:
        """Delivers events. Call it in the event loop."""
        for event in events:
            reader = self._readers.get(event.seq_id)
            if reader is None:
                continue  # its reader has left
            reader.put(event)
            if event.finish_reason is not None:
                del self._readers[event.seq_id]

    def add(self, seq_ids: set[str]) -> _Reader:
        """A reader for the events of these sequences, until they end or are removed."""
        reader = _Reader()
        self._readers |= dict.fromkeys(seq_ids, reader)
        return reader

    def remove(self, seq_ids: set[str]) -> None:
        for seq_id in seq_ids:
            self._readers.pop(seq_id, None)


class Inboxes:
    """The inboxes of all event loops."""

    def __init__(self) -> None:
        self._by_loop: dict[asyncio.AbstractEventLoop, Inbox] = {}

    def here(self) -> Inbox:
        """That of the running event loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._by_loop:
            inboxes = self._by_loop.items()
            self._by_loop = {each: inbox for each, inbox in inboxes if not each.is_closed()}
            self._by_loop[loop] = Inbox(loop)
        return self._by_loop[loop]


async def stream(
    seqs: Seq[Sequence],
    inbox_here: Callable[[], Inbox],
    submit: Callable[[Seq[Sequence], Inbox], Awaitable[None]],
    abort: Callable[[set[str]], None],
) -> AsyncGenerator[TokenEvent]:
    """The events of the sequences, interleaved, until each has had its finish_reason.

    inbox_here: the inbox of the running event loop.
    submit: gives the sequences to an engine, whose events go to the inbox. Its exceptions, such as
    a refusal, are raised at the first event.
    abort: tells the engine which sequences have no reader any more.
    """
    inbox = inbox_here()
    left = {seq.id for seq in seqs}
    reader = inbox.add(left)
    is_refused = False
    try:
        try:
            await submit(seqs, inbox)
        except Exception:
            is_refused = True
            raise
        while left:
            for event in await reader.take():
                if event.finish_reason is not None:
                    left.discard(event.seq_id)
                yield event
    finally:
        inbox.remove(left)
        if left and not is_refused:
            abort(left)
