"""Separates a model's thoughts from its answer while the text grows.

The chat template shows how a model marks its thoughts: between <think> and </think> (Qwen3,
DeepSeek-R1) or as messages to a separate channel (see `harmony`).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from jax_attn.serve._chat.growing_calls import GrowingCall
from jax_attn.serve._chat.tools import ToolCall
from jax_attn.serve._text.stop_strings import overlap

THINK, END_THINK = "<think>", "</think>"


class Parts(NamedTuple):
    """New parts of an answer."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[ToolCall, ...] = ()
    growing: tuple[GrowingCall, ...] = ()  # calls that are being written, with what is new of them


class Splitter(Protocol):
    """Splits one text into parts. Marks, and white space beside them, are in no part."""

    def push(self, text: str) -> Parts: ...

    def flush(self, is_cut: bool = False) -> Parts:
        """Returns what is left. is_cut: the text would go on, so part of a call is dropped."""


def thinks(template: str) -> bool:
    return END_THINK in template


class ThinkSplitter:
    """Splits a text that may begin with one block of thoughts.

    White space around the block and at its ends is dropped. Without an end mark all text is
    thoughts.
    """

    def __init__(self, is_open: bool):
        """is_open: the prompt ends inside the block."""
        self._held = ""
        self._state = "inside" if is_open else "before"
        # Thoughts, or the answer after them, have text other than white space.
        self._is_begun = False

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
                # White space is sent together with the text after it.
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

    def flush(self, is_cut: bool = False) -> Parts:
        held, self._held = self._held, ""
        return Parts(held.rstrip()) if self._state == "inside" else Parts(content=held)
