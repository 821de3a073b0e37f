"""Where stop strings, and other marks, occur in a text that comes piece by piece."""

from __future__ import annotations


class StopString:
    """How much of a stop string a text ends with, found as Knuth, Morris and Pratt do: in a step or
    two a character, whatever the text and the string are."""

    __slots__ = ("_text", "_shorter", "num_matched")

    def __init__(self, text: str):
        self._text = text
        # Of each beginning of the string, the longest shorter one that it ends with.
        self._shorter = [0] * len(text)
        self.num_matched = 0  # characters; never all of them
        for i in range(1, len(text)):
            self.num_matched = self._next(text[i])
            self._shorter[i] = self.num_matched
        self.num_matched = 0

    @property
    def length(self) -> int:
        return len(self._text)

    def push(self, new: str) -> int | None:
        """Where in `new` the string begins that is the first to end there; before it: negative."""
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
    """The length of the longest end of `text` that is a beginning of `stop`, and not all of it."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((n for n in lengths if text.endswith(stop[:n])), 0)
