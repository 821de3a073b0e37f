"""Pictures in prompts. Plain data, and the numbers that stand for them in the prefix cache.

A key of the prefix cache has 4 bytes a token. Those of a picture's tokens hold a number of its
content, which no other content has had. So equal pictures share pages, and others never do.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from dataclasses import dataclass, field

_MOST_NUMBERS = 1 << 16  # pictures that are remembered


@dataclass(frozen=True, eq=False, slots=True)
class Picture:
    """A picture in a prompt. The sequences of a request share it.

    begin: its first token in the prompt.
    rows, columns: of the tokens that show it, which are row by row.
    height, width: in pixels. pixels: three bytes each, row by row.
    row_gap: tokens of text behind each row; the prompt has them.
    """

    begin: int
    rows: int
    columns: int
    height: int
    width: int
    pixels: bytes
    row_gap: int = 0
    digest: bytes = field(init=False)  # of size and pixels

    def __post_init__(self) -> None:
        if len(self.pixels) != 3 * self.height * self.width:
            raise ValueError(
                f"Picture: pixels: expected {3 * self.height * self.width} bytes, got"
                f" {len(self.pixels)}"
            )
        digest = hashlib.sha256(b"%d %d " % (self.height, self.width) + self.pixels).digest()
        object.__setattr__(self, "digest", digest)

    @property
    def num_tokens(self) -> int:
        """With those behind its rows."""
        return self.rows * (self.columns + self.row_gap)

    @property
    def is_shown(self) -> list[bool]:
        """Whether each token shows the picture: not those behind its rows."""
        return ([True] * self.columns + [False] * self.row_gap) * self.rows

    @property
    def end(self) -> int:
        """The token after its last."""
        return self.begin + self.num_tokens


class PictureNumbers:
    """Numbers of pictures by their content.

    The least recently used are forgotten. Then the same picture gets another number: the cache does
    not find its pages, but none of another picture. For any thread.
    """

    def __init__(self) -> None:
        self._numbers: OrderedDict[bytes, int] = OrderedDict()
        self._next = 0
        self._lock = threading.Lock()

    def of(self, picture: Picture) -> int:
        with self._lock:
            number = self._numbers.pop(picture.digest, None)
            if number is None:
                number, self._next = self._next, self._next + 1
            self._numbers[picture.digest] = number
            if len(self._numbers) > _MOST_NUMBERS:
                self._numbers.popitem(last=False)
            return number
