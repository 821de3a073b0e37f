"""Tool calls while they are written: names, and arguments as far as they are known.

`tools` reads calls that are complete. Beside it, a stream needs the pieces of a call's arguments as
the model writes them. They are read here, each character once. The pieces so far are always the
beginning of the JSON text that the complete call has. What cannot be known yet, or is no call,
makes no pieces; then it comes with the complete call, or not at all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from jax_attn.serve._chat import strict_json

_T = TypeVar("_T")
# Reads a part of a growing text. It yields to wait for more text, and raises ValueError for what is
# no call.
Steps: TypeAlias = Generator[None, None, _T]
Write: TypeAlias = Callable[[str], None]
IsSpace: TypeAlias = Callable[[str], bool]

MOST_NESTED = 64
_LONGEST_HEAD = 256  # characters before the arguments of a call
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_FIRST_HALF = re.compile(r"\\u[dD][89abAB]")
_SECOND_HALF = re.compile(r"\\u[dD][c-fC-F]")
_END_OF_SCALAR = re.compile(r"[ \t\n\r,\]}]")
_SCALAR = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?|true|false|null")
_JSON_SPACE = " \t\n\r"


@dataclass(eq=False)
class GrowingCall:
    """A call whose arguments have begun. new: pieces of them that nobody has taken."""

    name: str
    id: str | None = None  # if the model gave one before the arguments
    new: list[str] = field(default_factory=list)
    taken: list[str] = field(default_factory=list)
    is_whole: bool = False  # the arguments have ended

    def take(self) -> str:
        """The arguments since the last time."""
        piece = "".join(self.new)
        self.new.clear()
        self.taken.append(piece)
        return piece

    def begins(self, name: str, arguments: str) -> bool:
        """Whether the complete call may be this one."""
        return name == self.name and arguments.startswith("".join([*self.taken, *self.new]))


class GrowingCalls:
    """Reads the calls between two marks while they are written."""

    def __init__(
        self,
        read: Callable[[GrowingCalls], Steps[None]],
        names: Collection[str] | None = None,
    ):
        """read: the format's reader. names: of the functions; None: any name is a function's."""
        self.calls: list[GrowingCall] = []
        self.text, self.at = "", 0  # `at`: how far the text is read
        self._names = names
        self._steps: Steps[None] | None = read(self)

    def push(self, text: str) -> None:
        """text: all text since the mark."""
        self.text = text
        if self._steps is not None:
            try:
                next(self._steps)
            except (StopIteration, ValueError, RecursionError):
                self._steps = None

    def begin(self, name: str, id: str | None = None) -> GrowingCall:
        if self._names is not None and name not in self._names:
            raise ValueError("no function")
        self.calls.append(GrowingCall(name, id))
        return self.calls[-1]

    def arguments(self, name: str, id: str | None = None) -> Steps[None]:
        """Reads the JSON object that is the call's arguments."""
        if (yield from self.next_character()) != "{":
            raise ValueError("no object")
        call = self.begin(name, id)
        yield from self.value(call.new.append)
        call.is_whole = True

    # ---- parts of the text -----------------------------------------------------------------------

    def has(self, size: int) -> Steps[None]:
        """Waits until so many characters are there."""
        while len(self.text) - self.at < size:
            yield

    def head(self, pattern: re.Pattern[str]) -> Steps[re.Match[str]]:
        """Waits until the text goes on with the pattern, and reads it."""
        while (found := pattern.match(self.text, self.at)) is None:
            if len(self.text) - self.at > _LONGEST_HEAD:
                raise ValueError("no head")
            yield
        self.at = found.end()
        return found

    def next_character(self, is_space: IsSpace = _JSON_SPACE.__contains__) -> Steps[str]:
        """Skips space. Returns the character behind it, which stays to be read."""
        while True:
            yield from self.has(1)
            if not is_space(character := self.text[self.at]):
                return character
            self.at += 1

    def is_next(self, character: str, is_space: IsSpace = _JSON_SPACE.__contains__) -> Steps[bool]:
        """Whether the character is next, behind space; then it is read."""
        found = (yield from self.next_character(is_space)) == character
        self.at += found
        return found

    def is_mark(self, mark: str) -> Steps[bool]:
        """Whether the text goes on with the mark; then it is read."""
        while len(begin := self.text[self.at : self.at + len(mark)]) < len(mark):
            if not mark.startswith(begin):
                break
            yield
        self.at += len(mark) * (begin == mark)
        return begin == mark

    def until(self, end: re.Pattern[str]) -> Steps[str]:
        """Reads the text before a character that ends it."""
        begin = self.at
        while (found := end.search(self.text, self.at)) is None:
            self.at = len(self.text)
            yield
        self.at = found.start()
        return self.text[begin : self.at]

    # ---- JSON ------------------------------------------------------------------------------------

    def collected(self, read: Callable[[Write], Steps[None]]) -> Steps[str]:
        """What the reader writes."""
        parts: list[str] = []
        yield from read(parts.append)
        return "".join(parts)

    def value(self, write: Write, depth: int = 0) -> Steps[None]:
        """Reads a value, and writes it as `strict_json.rewritten` does."""
        if depth > MOST_NESTED:
            raise ValueError("too deep")
        begin = yield from self.next_character()
        if begin == '"':
            yield from self.string(write)
        elif begin in "{[":
            self.at += 1
            write(begin)
            yield from self._items(write, "}" if begin == "{" else "]", depth)
        else:
            write(scalar((yield from self.until(_END_OF_SCALAR))))

    def _items(self, write: Write, closing: str, depth: int) -> Steps[None]:
        if not (yield from self.is_next(closing)):
            while True:
                if closing == "}":
                    yield from self.key(write)
                yield from self.value(write, depth + 1)
                if (yield from self.is_next(closing)):
                    break
                if not (yield from self.is_next(",")):
                    raise ValueError("no comma")
                write(", ")
        write(closing)

    def key(self, write: Write) -> Steps[None]:
        """Reads a key and the colon behind it."""
        if (yield from self.next_character()) != '"':
            raise ValueError("no key")
        yield from self.string(write)
        if not (yield from self.is_next(":")):
            raise ValueError("no colon")
        write(": ")

    def string(self, write: Write) -> Steps[None]:
        self.at += 1
        write('"')
        while True:
            yield from self.has(1)
            if plain := _PLAIN.match(self.text, self.at):
                write(plain[0])
                self.at = plain.end()
            elif self.text[self.at] == "\\":
                write(strict_json.string(json.loads(f'"{(yield from self._escape())}"'))[1:-1])
            elif self.text[self.at] == '"':
                self.at += 1
                write('"')
                return
            else:
                raise ValueError("a control character")

    def _escape(self) -> Steps[str]:
        """An escape, or two that are a surrogate pair."""
        begin = self.at
        yield from self._one_escape()
        if _FIRST_HALF.match(self.text, begin):
            yield from self.has(1)
            behind = self.at
            if self.text[behind] == "\\":
                yield from self._one_escape()
                if not _SECOND_HALF.match(self.text, behind):
                    self.at = behind
        return self.text[begin : self.at]

    def _one_escape(self) -> Steps[None]:
        yield from self.has(2)
        size = 6 if self.text[self.at + 1] == "u" else 2
        yield from self.has(size)
        self.at += size


def scalar(text: str) -> str:
    """The text of a number or a word. Raises ValueError for what is none."""
    if not _SCALAR.fullmatch(text):
        raise ValueError("no JSON")
    return text
