"""The format of gpt-oss's answers: messages to channels, each with a header that names the channel.

    <|channel|>analysis<|message|>thoughts<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>
    <|start|>assistant<|channel|>final<|message|>the answer<|return|>

The text has no line ends, and no first <|start|>assistant: the prompt ends with it.
"""

from __future__ import annotations

import json
import re

from jax_attn.serve._chat.reasoning import Parts
from jax_attn.serve._chat.tools import ToolCall
from jax_attn.serve._text.stop_strings import overlap

CHANNEL, MESSAGE, CALL = "<|channel|>", "<|message|>", "<|call|>"
FINAL = f"{CHANNEL}final{MESSAGE}"  # appended to the prompt, it makes the model answer at once
_ENDS = re.compile(r"<\|(end|call|return|start|channel)\|>")
_MARKS = ("<|end|>", CALL, "<|return|>", "<|start|>", CHANNEL)
_MAX_HEADER = 256  # characters; a longer header is treated as text


def writes_channels(template: str) -> bool:
    return CHANNEL in template and MESSAGE in template


class HarmonySplitter:
    """Splits an answer into its channels.

    A text that does not begin with a header is the answer.
    """

    def __init__(self, is_answer: bool = False):
        """is_answer: the prompt ends with the header of the final message."""
        self._held = ""
        self._is_header = not is_answer
        self._channel, self._recipient = "final", ""
        self._arguments = ""  # of the current call, so far
        # _joint: text to put before the next content of this message
        self._has_content, self._joint = False, ""

    def push(self, text: str) -> Parts:
        self._held += text
        reasoning, content, calls = "", "", list[ToolCall]()
        while True:
            if self._is_header and not self._take_header():
                break
            end = _ENDS.search(self._held)
            if end is None:
                keep = max(overlap(self._held, mark) for mark in _MARKS)
                new = self._held[: len(self._held) - keep]
                self._held = self._held[len(new) :]
            else:
                new, self._held = self._held[: end.start()], self._held[end.end() :]
                if end[1] in ("start", "channel"):
                    self._held = end[0] + self._held
            if self._recipient:
                self._arguments += new
            elif self._channel == "analysis":
                reasoning += new
            else:
                content += self._joined(new)
            if end is None:
                break
            for part in self._end_message():
                calls += part.calls
                content += part.content
        return Parts(reasoning, content, tuple(calls))

    def flush(self) -> Parts:
        held, self._held = self._held, ""
        if self._is_header:  # the text was cut off before the message, or this is no header
            return Parts() if held.lstrip().startswith("<|") else Parts(content=held)
        if self._recipient:
            self._arguments += held
            return next(iter(self._end_message()), Parts())
        return Parts(held) if self._channel == "analysis" else Parts(content=held)

    def _take_header(self) -> bool:
        """Parses the held text. Returns whether it is the header of a message."""
        header, mark, behind = self._held.partition(MESSAGE)
        begin = self._held.lstrip()[:2]
        may_be = "<|".startswith(begin) and len(header) <= _MAX_HEADER
        if may_be and not mark:
            return False
        self._is_header, self._channel, self._recipient = False, "final", ""
        self._joint = "\n" if self._has_content else ""
        if may_be:
            self._held = behind
            if channel := re.search(r"<\|channel\|>\s*(\w+)", header):
                self._channel = channel[1]
            if recipient := re.search(r"\bto=([\w.-]+)", header):
                self._recipient = recipient[1].removeprefix("functions.")
        return True

    def _end_message(self) -> list[Parts]:
        """Returns the call in the message, if it is one. Malformed calls become content."""
        self._is_header = True
        name, arguments = self._recipient, self._arguments
        self._recipient = self._arguments = ""
        if not name:
            return []
        try:
            is_call = isinstance(json.loads(arguments), dict)
        except (ValueError, RecursionError):
            is_call = False
        if is_call:
            return [Parts(calls=(ToolCall(name, arguments.strip()),))]
        return [Parts(content=self._joined(arguments))]

    def _joined(self, new: str) -> str:
        """Puts a line end between two messages."""
        if not new:
            return ""
        joint, self._joint, self._has_content = self._joint, "", True
        return joint + new
