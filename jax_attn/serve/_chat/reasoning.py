"""What a model thinks before it answers, apart from the answer, while the text grows.

How a model marks its thoughts is what its chat template shows: between <think> and </think>, as
Qwen3 and DeepSeek-R1, or as messages to a channel of its own (see `harmony`).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from jax_attn.serve._chat.tools import ToolCall
from jax_attn.serve._text.stop_strings import overlap

THINK, END_THINK = "<think>", "</think>"


class Parts(NamedTuple):
    """News of an answer."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[ToolCall, ...] = ()


class Splitter(Protocol):
    """Of one text. What is in no part of it is marks, and white space beside them."""

    def push(self, text: str) -> Parts: ...

    def flush(self) -> Parts: ...


def thinks(template: str) -> bool:
    return END_THINK in template


class ThinkSplitter:
    """A text may begin with one block of thoughts. White space around it and in its ends is
    dropped; if its end does not come, all is thoughts."""

    def __init__(self, is_open: bool):
        """is_open: the prompt ends within the block."""
        self._held = ""
        self._state = "inside" if is_open else "before"
        self._is_begun = False  # thoughts, or the answer after them, are not all white space

    def push(self, text: str) -> Parts:
        self._held += text
        reasoning = ""
        if self._state == "before":
            begin = self._held.lstrip()
            if THINK.startswith(begin[: len(THINK)]) and len(begin) < len(THINK):
                return Parts()
            if not begin.startswith(THINK):
                self._state, self._is_begun = "behind", True
            else:
                self._state, self._held = "inside", begin[len(THINK) :]
        if self._state == "inside":
            self._held = self._held if self._is_begun else self._held.lstrip()
            before, end, behind = self._held.partition(END_THINK)
            if not end:
                # White space goes out with what follows it.
                sure = before[: len(before) - overlap(before, END_THINK)].rstrip()
                self._is_begun |= bool(sure)
                self._held = before[len(sure) :]
                return Parts(sure)
            reasoning, self._held = before.rstrip(), behind
            self._state, self._is_begun = "behind", False
        content = self._held if self._is_begun else self._held.lstrip()
        self._is_begun |= bool(content)
        self._held = ""
        return Parts(reasoning, content)

    def flush(self) -> Parts:
        held, self._held = self._held, ""
        return Parts(held.rstrip()) if self._state == "inside" else Parts(content=held)
