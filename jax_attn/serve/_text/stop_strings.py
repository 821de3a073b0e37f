"""Finds stop strings, and other marks, in a text that comes in pieces."""

from __future__ import annotations


class StopString:
    """Tracks how much of a stop string a text ends with.

    The algorithm is that of Knuth, Morris and Pratt: one or two steps a character, for any text and
    string.
    """

    __slots__ = ("_text", "_shorter", "num_matched")

    def __init__(self, text: str):
        self._text = text
        # For each prefix of the string, its longest proper prefix that is also its suffix.
        self._shorter = [0] * len(text)
        self.num_matched = 0  # characters; less than all of them
        for i in range(1, len(text)):
            self.num_matched = self._next(text[i])
            self._shorter[i] = self.num_matched
        self.num_matched = 0

    @property
    def length(self) -> int:
        return len(self._text)

    def push(self, new: str) -> int | None:
        """Offset in `new` at which the first complete match begins; negative: before `new`."""
        found = None
        for i, character in enumerate(new):
            self.num_matched = self._next(character)
            if self.num_matched == len(self._text):
                self.num_matched = self._shorter[-1]
                if found is None:
                    found = i + 1 - len(self._text)
        return found

    def _next(self, character: str) -> int:
        num_matched = self.num_matched
        while num_matched and self._text[num_matched] != character:
            num_matched = self._shorter[num_matched - 1]
        return num_matched + (self._text[num_matched] == character)


def overlap(text: str, stop: str) -> int:
    """The length of the longest suffix of `text` that is a proper prefix of `stop`."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((n for n in lengths if text.endswith(stop[:n])), 0)
