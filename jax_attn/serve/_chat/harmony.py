"""The format of gpt-oss's answers: messages to channels, each with a header that names the channel.

    <|channel|>analysis<|message|>thoughts<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>
    <|start|>assistant<|channel|>final<|message|>the answer<|return|>

The text has no line ends, and no first <|start|>assistant: the prompt ends with it. A recipient may
also come before the channel.
"""

from __future__ import annotations

import re
from functools import partial

from jax_attn.serve._chat import strict_json
from jax_attn.serve._chat.growing_calls import GrowingCalls
from jax_attn.serve._chat.reasoning import Parts
from jax_attn.serve._chat.tools import MOST_MALFORMED, ToolCall, joined
from jax_attn.serve._text.stop_strings import overlap

CHANNEL, MESSAGE, CALL = "<|channel|>", "<|message|>", "<|call|>"
FINAL = f"{CHANNEL}final{MESSAGE}"  # appended to the prompt, it makes the model answer at once
_ENDS = re.compile(r"<\|(end|call|return|start|channel)\|>")
_MARKS = ("<|end|>", CALL, "<|return|>", "<|start|>", CHANNEL)
_BEGINS = ("<|", "to=")  # of a header
_BEGIN = re.compile(r"\s*<\|(start|channel)\|>")
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
        # A mark in a string is part of an argument, except after many malformed calls.
        self._strings, self._num_malformed = strict_json.StringScan(), 0
        self._searched = 0  # characters of a held call in which no mark ends it
        self._growing: GrowingCalls | None = None  # a call
        # _joint: text to put before the next content of this message
        self._has_content, self._joint = False, ""

    def push(self, text: str) -> Parts:
        self._held += text
        reasoning, content, calls = "", "", list[ToolCall]()
        while True:
            if self._is_header and not self._take_header():
                break
            end = self._end()
            if end is None:
                if self._growing is not None:  # arguments are held until they end
                    self._growing.push(self._held)
                    break
                keep = max(overlap(self._held, mark) for mark in _MARKS)
                size = len(self._held) - keep
                new, self._held = self._held[:size], self._held[size:]
            else:
                new, self._held = self._held[: end.start()], self._held[end.end() :]
                if end[1] in ("start", "channel"):
                    self._held = end[0] + self._held
            if not self._recipient:
                if self._channel == "analysis":
                    reasoning += new
                else:
                    content += self._joined(new)
            if end is None:
                break
            part = self._end_message(new)
            calls += part.calls
            content += part.content
        growing = () if self._growing is None else tuple(self._growing.calls)
        return Parts(reasoning, content, tuple(calls), growing)

    def flush(self, is_cut: bool = False) -> Parts:
        reasoning, content, calls = "", "", list[ToolCall]()
        while self._recipient and not strict_json.is_object(self._held):
            # Malformed: the first mark ends the call, whatever it is in.
            if (end := _ENDS.search(self._held)) is None:
                break
            malformed = self._held[: end.start()]
            self._held = (end[0] if end[1] in ("start", "channel") else "") + (
                self._held[end.end() :]
            )
            content += self._end_message(malformed).content
            self._num_malformed += 1
            more = self.push("")
            reasoning, content = reasoning + more.reasoning, content + more.content
            calls += more.calls
        held, self._held = self._held, ""
        last = Parts()
        if self._is_header:  # the text was cut off before the message, or this is no header
            last = Parts() if held.lstrip().startswith(_BEGINS) else Parts(content=held)
        elif self._recipient:
            last = self._end_message(held)
            last = last._replace(content="") if is_cut else last
        else:
            last = Parts(held) if self._channel == "analysis" else Parts(content=held)
        return Parts(reasoning + last.reasoning, content + last.content, (*calls, *last.calls))

    def _end(self) -> re.Match[str] | None:
        """The mark that ends the message; None: not yet."""
        while end := _ENDS.search(self._held, self._searched):
            sees_strings = self._recipient and self._num_malformed < MOST_MALFORMED
            if not (sees_strings and self._strings.is_inside(self._held, end.start())):
                self._searched = 0
                return _ENDS.search(self._held) if self._strings.is_broken else end
            self._searched = end.start() + 1
        longest = max(map(len, _MARKS))
        self._searched = max(0, len(self._held) - longest + 1) if self._recipient else 0
        return None

    def _take_header(self) -> bool:
        """Parses the held text. Returns whether it is the header of a message."""
        header, mark, behind = self._held.partition(MESSAGE)
        length = len(header) - (0 if mark else overlap(header, MESSAGE))
        may_be = _may_be_header(self._held) and length <= _MAX_HEADER
        if may_be and not mark:
            return False
        self._is_header, self._channel, self._recipient = False, "final", ""
        self._strings, self._searched = strict_json.StringScan(), 0
        self._joint = "\n" if self._has_content else ""
        if may_be:
            self._held = behind
            if channel := re.search(r"<\|channel\|>\s*(\w+)", header):
                self._channel = channel[1]
            if recipient := re.search(r"\bto=([\w.-]+)", header):
                self._recipient = recipient[1].removeprefix("functions.")
            if self._recipient:
                read = partial(GrowingCalls.arguments, name=self._recipient)
                self._growing = GrowingCalls(read)
        elif begin := _BEGIN.match(self._held):
            self._searched = begin.end()  # the mark is text; it would end no message but this one
        return True

    def _end_message(self, text: str) -> Parts:
        """Ends the message. text: of a call. A malformed call becomes content."""
        self._is_header = True
        name, self._recipient = self._recipient, ""
        growing, self._growing = self._growing, None
        if growing is None:
            return Parts()
        if strict_json.is_object(text):
            growing.push(text)
            call = ToolCall(name, strict_json.rewritten(text))
            return Parts(calls=tuple(joined([call], growing)))
        return Parts(content=self._joined(text))

    def _joined(self, new: str) -> str:
        """Puts a line end between two messages."""
        if not new:
            return ""
        joint, self._joint, self._has_content = self._joint, "", True
        return joint + new


def _may_be_header(text: str) -> bool:
    begin = text.lstrip()
    return any(mark.startswith(begin[: len(mark)]) for mark in _BEGINS)
