"""What the prefix cache stores and evicts, as names of pages, for routers between servers.

The name of a page stands for its tokens and all before them: BLAKE2b with 8 bytes of digest, over
the name of the page before it and its tokens, 4 bytes each, little-endian. Before the first page
comes the digest of its namespace, or nothing where that is empty. So who knows the tokens and the
page size of a server without keys can compute the names.

Pages with tokens of pictures, and those behind them, have no names and no events: their keys hold
numbers that mean something to one engine alone.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from typing import Literal, NamedTuple

_DIGEST_BYTES = 8


class CacheEvent(NamedTuple):
    """pages: names, in the order of their tokens. parent: of the page before them; "": none is."""

    kind: Literal["cleared", "stored", "evicted"]  # cleared: forget all; what is stored follows
    namespace: str = ""  # its digest
    parent: str = ""
    pages: tuple[str, ...] = ()


class CacheLog:
    """The events since `take` was called last."""

    def __init__(self, page_size: int):
        self._page_bytes = 4 * page_size
        self._events = [CacheEvent("cleared")]

    def add(
        self, kind: Literal["stored", "evicted"], namespace: str, key: bytes, begin: int
    ) -> None:
        """Adds the pages of `key` (the packed tokens from the root on) from that one on, as far as
        they have names."""
        root = _digest(namespace.encode()) if namespace else b""
        names = list(self._names(root, key))
        if begin >= len(names):
            return
        parent = names[begin - 1].hex() if begin else ""
        pages = tuple(name.hex() for name in names[begin:])
        self._events.append(CacheEvent(kind, root.hex(), parent, pages))

    def take(self) -> list[CacheEvent]:
        events, self._events = self._events, []
        return events

    def _names(self, before: bytes, key: bytes) -> Iterable[bytes]:
        for begin in range(0, len(key), self._page_bytes):
            page = key[begin : begin + self._page_bytes]
            if max(page[3::4]) >= 0x80:  # a negative token, which is of a picture
                return
            before = _digest(before + page)
            yield before


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


class SharedEvents:
    """The events of several caches as those of one, which has a page as long as one of them does.

    A cache counts from its "cleared" on: what it told before was for an earlier reader.
    """

    def __init__(self) -> None:
        self._held: dict[int, dict[str, tuple[str, str]]] = {}  # by cache: page -> its place
        self._num_holders = Counter[str]()

    def add(self, index: int, events: Iterable[CacheEvent]) -> list[CacheEvent]:
        """Returns what the events of a cache change."""
        changes: list[CacheEvent] = []
        for event in events:
            if event.kind == "cleared":
                changes += self.remove(index)
                self._held[index] = {}
            elif index in self._held:
                changes += self._add(self._held[index], event)
        return changes

    def remove(self, index: int) -> list[CacheEvent]:
        """Returns what changes because a cache has none of its pages any more."""
        held = self._held.pop(index, {})
        last = [page for page in held if self._num_holders[page] == 1]
        self._num_holders -= Counter(held.keys())
        return [CacheEvent("evicted", *held[page], (page,)) for page in last]

    def _add(self, held: dict[str, tuple[str, str]], event: CacheEvent) -> list[CacheEvent]:
        changed: list[CacheEvent] = []
        parent = event.parent
        for page in event.pages:
            place, parent = (event.namespace, parent), page
            if event.kind == "stored":
                held[page] = place
                self._num_holders[page] += 1
                is_change = self._num_holders[page] == 1
            else:
                del held[page]
                self._num_holders[page] -= 1
                is_change = not self._num_holders[page]
                if is_change:
                    del self._num_holders[page]
            if is_change:
                changed.append(CacheEvent(event.kind, *place, (page,)))
        return changed
