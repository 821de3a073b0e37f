"""The second tier of the prefix cache: pages that the device evicted, in the host's memory.

The scheduler decides what moves, and the device moves it before its next step, in the order of
`moves`. So a page may be given away on either side as soon as its move is in the list. Copies of
pages within the device are in the same list.
"""

from __future__ import annotations

from typing import NamedTuple

from jax_attn.serve._scheduling.pages import PageAllocator


class Move(NamedTuple):
    """A copy of a page between the device and the host."""

    to_host: bool
    page: int
    host_page: int


class PageCopy(NamedTuple):
    """A copy of a page of the device to another one."""

    source: int
    page: int


class Moves(list[Move | PageCopy]):
    """Copies of pages that the device has yet to run, in this order."""

    def take(self) -> list[Move | PageCopy]:
        """Those since the last call."""
        moves = self[:]
        self.clear()
        return moves


class HostTier:
    """Pages of the host, and the rule that says whether one is worth its way back.

    page_tokens, call_tokens: tokens that the model computes in the time in which one page comes
    back, and in which the first of several does in addition. Measured in the warm-up; 0 before.
    """

    def __init__(self, num_pages: int, moves: Moves):
        self.allocator = PageAllocator(num_pages)
        self.moves = moves
        self.page_tokens = self.call_tokens = 0.0
        self.is_open = True  # takes pages
        self.num_stored = 0  # pages that went to the host, since the start
        self.num_returned = 0  # and that came back

    def keeps(self, page_size: int) -> bool:
        """Whether pages are worth keeping: enough of them come back sooner than computed again."""
        return self.is_open and self.page_tokens < page_size

    def is_sooner(self, num_pages: int, page_size: int) -> bool:
        """Whether that many pages come back sooner than they are computed again."""
        seconds_in_tokens = self.call_tokens + num_pages * self.page_tokens
        return self.is_open and seconds_in_tokens < num_pages * page_size

    def counts(self) -> dict[str, int]:
        """Pages that are free and cached, and totals of those stored and returned."""
        free = self.allocator.num_free
        cached = self.allocator.num_pages - free
        moved = {"stored": self.num_stored, "returned": self.num_returned}
        return {"free": free, "cached": cached} | moved

    def store(self, pages: list[int], host_pages: list[int]) -> None:
        """Has the device copy pages to the host."""
        self.moves += map(Move, [True] * len(pages), pages, host_pages)
        self.num_stored += len(pages)

    def give_back(self, host_pages: list[int], pages: list[int]) -> None:
        """Has the device copy pages from the host, and frees them there."""
        self.moves += map(Move, [False] * len(pages), pages, host_pages)
        self.num_returned += len(pages)
        self.allocator.free(host_pages)
