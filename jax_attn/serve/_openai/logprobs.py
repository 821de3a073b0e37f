"""Writes log-probabilities as JSON, in parts: an answer may hold a quarter of a million."""

from __future__ import annotations

import codecs
import functools
import json
import math
from collections.abc import Callable, Iterable
from typing import Protocol

from jax_attn.serve._scheduling.events import TokenLogprob

TokenText = Callable[[int], bytes]
"""The exact bytes of a token, which need not be whole characters."""


class TokenJson:
    """The JSON of tokens, cached while in use."""

    def __init__(self, token_text: TokenText, strips_first_space: bool = False):
        """strips_first_space: a text does not show the space that its first token begins with."""
        self.text, self.strips_first_space = token_text, strips_first_space
        # 300 bytes per entry.
        self.name = functools.lru_cache(1 << 14)(self._name)
        self.around = functools.lru_cache(1 << 14)(self._around)

    def _name(self, token: int) -> str:
        """The form in completions: a token that is part of a character shows its bytes."""
        raw = self.text(token)
        try:
            return json.dumps(raw.decode())
        except UnicodeDecodeError:
            return json.dumps("bytes:" + "".join(f"\\x{byte:02x}" for byte in raw))

    def _around(self, token: int) -> tuple[str, str]:
        """The form in chats: the JSON before and after the token's log-probability."""
        raw = self.text(token)
        return f'{{"token":{self._shown(token, raw)},"logprob":', f',"bytes":{list(raw)}'

    def _shown(self, token: int, raw: bytes) -> str:
        return json.dumps(raw.decode(errors="replace"))


class TokenIdJson(TokenJson):
    """Shows each token as vLLM's "token_id:5". Its bytes are still those of its text."""

    def _name(self, token: int) -> str:
        return f'"token_id:{token}"'

    def _shown(self, token: int, raw: bytes) -> str:
        return self._name(token)


class Scores(Protocol):
    """The log-probabilities of one choice."""

    def add(self, entries: Iterable[TokenLogprob]) -> None:
        """Adds the log-probabilities of further tokens."""

    def take(self) -> list[bytes]:
        """Returns the JSON, in pieces, of the entries added since the last call."""


class ChatScores:
    """Writes schemas.ChatLogprobs."""

    def __init__(self, tokens: TokenJson):
        self._tokens = tokens
        self._pieces: list[bytes] = []

    def add(self, entries: Iterable[TokenLogprob]) -> None:
        text = ",".join(map(self._entry, entries))
        if text:
            self._pieces.append(f"{',' if self._pieces else ''}{text}".encode())

    def take(self) -> list[bytes]:
        pieces, self._pieces = self._pieces, []
        return [b'{"content":[', *pieces, b"]}"]

    def _entry(self, entry: TokenLogprob) -> str:
        top = ",".join([self._token(token, logprob) + "}" for token, logprob in entry.top])
        return f'{self._token(entry.token, entry.logprob)},"top_logprobs":[{top}]}}'

    def _token(self, token: int, logprob: float | None) -> str:
        before, behind = self._tokens.around(token)
        return f"{before}{_number(logprob)}{behind}"


class CompletionScores:
    """Writes schemas.CompletionLogprobs."""

    _NAMES = ("tokens", "token_logprobs", "top_logprobs", "text_offset")

    def __init__(self, tokens: TokenJson, first_offset: int, begin: int = -1):
        """first_offset: text offset of the first token; below 0 if the text does not show it.

        begin: index of the token that begins a text of its own; -1: none does.
        """
        self._tokens, self._offset = tokens, first_offset
        self._num_to_begin = begin if tokens.strips_first_space else -1
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._columns: list[list[bytes]] = [[] for _ in self._NAMES]

    def add(self, entries: Iterable[TokenLogprob]) -> None:
        rows = [
            (
                self._tokens.name(entry.token),
                _number(entry.logprob),
                self._top(entry),
                str(self._next_offset(entry.token)),
            )
            for entry in entries
        ]
        for column, cells in zip(self._columns, zip(*rows, strict=True), strict=False):
            column.append(f"{',' if column else ''}{','.join(cells)}".encode())

    def take(self) -> list[bytes]:
        columns, self._columns = self._columns, [[] for _ in self._NAMES]
        pieces, mark = [], "{"
        for name, column in zip(self._NAMES, columns, strict=True):
            pieces += [f'{mark}"{name}":['.encode(), *column]
            mark = "],"
        return [*pieces, b"]}"]

    def _next_offset(self, token: int) -> int:
        offset = max(0, self._offset)
        raw = self._tokens.text(token)
        if self._num_to_begin == 0 and raw.startswith(b" "):
            raw = raw[1:]
        self._num_to_begin -= 1
        self._offset += len(self._decode(raw))
        return offset

    def _top(self, entry: TokenLogprob) -> str:
        """Includes the token itself, as OpenAI does.

        Of tokens with one text, the likeliest counts.
        """
        if entry.logprob is None:
            return "null"
        top: dict[str, float] = {}
        for token, logprob in (*entry.top, (entry.token, entry.logprob)):
            top.setdefault(self._tokens.name(token), logprob)
        return f"{{{','.join([f'{name}:{_number(top[name])}' for name in top])}}}"


class PromptScores:
    """Writes vLLM's prompt_logprobs: for each prompt token, by id, it and the likeliest ones."""

    def __init__(self, tokens: TokenJson, num_tokens: int, num_top: int):
        self._tokens, self._num_left, self._num_top = tokens, num_tokens, num_top
        self._pieces: list[bytes] = []

    def take_own(self, entries: list[TokenLogprob]) -> list[TokenLogprob]:
        """Takes the entries of the prompt. Returns the rest, which are those of the output."""
        own = entries[: self._num_left]
        self._num_left -= len(own)
        if text := ",".join(map(self._entry, own)):
            self._pieces.append(f"{',' if self._pieces else ''}{text}".encode())
        return entries[len(own) :]

    def take(self) -> list[bytes]:
        pieces, self._pieces = self._pieces, []
        return [b"[", *pieces, b"]"]

    def _entry(self, entry: TokenLogprob) -> str:
        if entry.logprob is None:
            return "null"
        ranks = {token: rank for rank, (token, _) in enumerate(entry.top, 1)}
        found = dict(entry.top[: self._num_top]) | {entry.token: entry.logprob}
        return f"{{{','.join([self._token(t, p, ranks.get(t)) for t, p in found.items()])}}}"

    def _token(self, token: int, logprob: float, rank: int | None) -> str:
        text = json.dumps(self._tokens.text(token).decode(errors="replace"))
        rank_text = "null" if rank is None else rank
        return (
            f'"{token}":{{"logprob":{_number(logprob)},"rank":{rank_text},"decoded_token":{text}}}'
        )


def _number(value: float | None) -> str:
    return repr(value) if value is not None and math.isfinite(value) else "null"
