"""The second tier of the prefix cache: pages and states that the device evicted, in the host's
memory.

The scheduler decides what moves, and the device moves it before its next step, in the order of
`moves`. So a page, or a slot of states, may be given away on either side as soon as its move is in
the list. Copies of pages and of kept keys within the device are in the same list.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

from jax_attn.serve._scheduling.pages import PageAllocator
from jax_attn.serve._scheduling.prompt_policy import KeptKeys


class Move(NamedTuple):
    """A copy between the device and the host: of a page, or of a slot of states."""

    to_host: bool
    page: int
    host_page: int
    is_state: bool = False

    @property
    def pages_written(self) -> list[int]:
        """The pages of the device that the move writes."""
        return [] if self.to_host or self.is_state else [self.page]


class ToFiles(NamedTuple):
    """A copy of pages of the host, or of a slot of states, to files. See `file_tier`.

    owner, key: of the entries; the pages are the last of `key`.
    """

    host_pages: tuple[int, ...]
    is_state: bool
    owner: str
    key: bytes

    @property
    def pages_written(self) -> list[int]:
        """No page of the device."""
        return []


class FromFile(NamedTuple):
    """A page, or a slot of states, of the host that was read from a file.

    value: arrays in the host's memory.
    """

    host_page: int
    is_state: bool
    value: Any

    @property
    def pages_written(self) -> list[int]:
        """No page of the device."""
        return []


class PageCopy(NamedTuple):
    """A copy of a page of the device to another one."""

    source: int
    page: int

    @property
    def pages_written(self) -> list[int]:
        """The pages of the device that the copy writes."""
        return [self.page]


OneMove: TypeAlias = Move | PageCopy | KeptKeys | ToFiles | FromFile


class Moves(list[OneMove]):
    """Copies of pages and states that the device has yet to run, in this order."""

    def take(self) -> list[OneMove]:
        """Those since the last call."""
        moves = self[:]
        self.clear()
        return moves


class HostTier:
    """Pages of the host, and the rule that says whether one is worth its way back.

    page_tokens, call_tokens: tokens that the model computes in the time in which one page comes
    back, and in which the first of several does in addition. state_tokens: and a slot of states.
    Measured in the warm-up; 0 before.
    """

    def __init__(self, num_pages: int, moves: Moves, num_states: int = 0):
        """moves: where the tier adds its own. num_states: slots of states; 0: it takes none."""
        self.allocator = PageAllocator(num_pages)
        self.states = PageAllocator(num_states) if num_states else None
        self.moves = moves
        self.page_tokens = self.call_tokens = self.state_tokens = 0.0
        self.is_open = True  # takes pages
        self.num_stored = 0  # pages that went to the host, since the start
        self.num_returned = 0  # and that came back

    def keeps(self, page_size: int) -> bool:
        """Whether pages are worth keeping: enough of them come back sooner than computed again."""
        return self.is_open and self.page_tokens < page_size

    def is_sooner(self, num_pages: int, num_tokens: float, has_state: bool = False) -> bool:
        """Whether that many pages, and states, come back sooner than num_tokens are computed."""
        seconds_in_tokens = has_state * self.state_tokens
        if num_pages:
            seconds_in_tokens += self.call_tokens + num_pages * self.page_tokens
        return self.is_open and seconds_in_tokens < num_tokens

    def counts(self) -> dict[str, int]:
        """Pages that are free and cached, and totals of those stored and returned."""
        free = self.allocator.num_free
        cached = self.allocator.num_pages - free
        moved = {"stored": self.num_stored, "returned": self.num_returned}
        return {"free": free, "cached": cached} | moved

    def counts_of_states(self) -> dict[str, int]:
        """Slots of states that are free and cached; {} without."""
        if self.states is None:
            return {}
        free = self.states.num_free
        return {"free": free, "cached": self.states.num_pages - free}

    def store(self, pages: list[int], host_pages: list[int]) -> None:
        """Has the device copy pages to the host."""
        self.moves += map(Move, [True] * len(pages), pages, host_pages)
        self.num_stored += len(pages)

    def give_back(self, host_pages: list[int], pages: list[int]) -> None:
        """Has the device copy pages from the host, and frees them there."""
        self.moves += map(Move, [False] * len(pages), pages, host_pages)
        self.num_returned += len(pages)
        self.allocator.free(host_pages)

    def receive(self, host_pages: list[int], values: list[Any]) -> None:
        """Has pages of the host take the values that were read from files."""
        self.moves += map(FromFile, host_pages, [False] * len(values), values)

    def receive_state(self, host_slot: int, value: Any) -> None:
        """Has a slot of states of the host take the values that were read from a file."""
        self.moves.append(FromFile(host_slot, True, value))

    def store_state(self, slot: int, host_slot: int) -> None:
        """Has the device copy a slot of states to the host."""
        self.moves.append(Move(True, slot, host_slot, is_state=True))

    def give_back_state(self, host_slot: int, slot: int) -> None:
        """Has the device copy a slot of states from the host, and frees it there."""
        self.moves.append(Move(False, slot, host_slot, is_state=True))
        assert self.states is not None
        self.states.free([host_slot])
