"""StreamingLLM (arXiv 2309.17453): a long text keeps its first tokens and its last ones.

The text is cut into blocks of pages. At the beginning of a block, `KvMemory.drop` gives back the
pages between the first tokens (attention sinks) and the window before the block. So what a token
sees is a function of its index alone: not of chunks, of other sequences, or of preemptions. A token
sees the sinks, and between `window` and `window` + block + page tokens before it. (A token that is
computed again, as a grammar made its sample void, may see what the next block does.)

Positions are those in the cache (section 3.2). Keys are rotated when they are written, at their
index in the text. RoPE depends on distances only, and those between the tokens of the window are
the same in text and cache. Those to the sinks are not: the device rotates copies of the sinks' keys
forward by the tokens that were dropped, always from the keys as they were written, so errors of
rounding do not add up.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

# Prompt and output together, unless given: f32 angles of RoPE are right to 0.06 radians there.
_MAX_TOKENS = 1 << 20
# A block is a window's eighth: a token sees at most so much more than the window, and sinks are
# rotated once in a block.
_BLOCKS_OF_WINDOW = 8


class Rotation(NamedTuple):
    """The device copies page `source` to `target`, with keys `distance` tokens further on."""

    source: int
    target: int
    distance: int


@dataclass(frozen=True)
class Streaming:
    """Keep the first `sinks` tokens, rounded up to pages, and the last `window`.

    max_tokens: the limit on prompt and output together.

    Raises ValueError: a value is below 1.
    """

    sinks: int = 4
    window: int = 2000
    max_tokens: int = _MAX_TOKENS

    def __post_init__(self) -> None:
        for name in ("sinks", "window", "max_tokens"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"streaming: {name}: expected at least 1, got {value}")


@dataclass(frozen=True)
class StreamingPages:
    """A policy in pages of `page_size` tokens. Lengths are in tokens, multiples of a page, but for
    `window`."""

    policy: Streaming
    page_size: int

    @property
    def window(self) -> int:
        return self.policy.window

    @cached_property
    def sinks(self) -> int:
        return -(-self.policy.sinks // self.page_size) * self.page_size

    @cached_property
    def block(self) -> int:
        return max(1, self.window // _BLOCKS_OF_WINDOW // self.page_size) * self.page_size

    @cached_property
    def first_drop(self) -> int:
        """The tokens of a text before its first page is dropped: their keys are those of any
        policy, so sequences may share them."""
        return -(-(self.sinks + self.window + self.page_size) // self.block) * self.block

    @cached_property
    def max_table_pages(self) -> int:
        """Pages that a token may see."""
        most = self.sinks + self.window + self.block + self.page_size
        return -(-max(most, self.first_drop) // self.page_size)

    @cached_property
    def max_pages(self) -> int:
        """Pages that a sequence may hold: those that it sees, the sinks as they were written, and
        shared pages until none of them is in the window."""
        most = self.first_drop + self.window + self.block + self.page_size + self.sinks
        return -(-most // self.page_size)

    def num_dropped(self, index: int) -> int:
        """The tokens after the sinks that token number `index` does not see."""
        begin = index // self.block * self.block
        start = max(0, begin - self.window) // self.page_size * self.page_size
        return max(0, start - self.sinks)

    def block_end(self, index: int) -> int:
        return (index // self.block + 1) * self.block
