"""Constrained decoding with llguidance: compiled grammars, token masks, forced tokens.

A grammar is text, made by `from_json_schema`, `from_regex` or `from_lark`. `Grammars.compile`
compiles it, and a `Matcher` follows one sequence through it. Compiling may take any time and
memory, a mask up to some 50 ms: clients' grammars go through `compiler` and `token_masks`.

Forced tokens are those for which the grammar leaves no choice. llguidance gives the tokens of the
forced text as the tokenizer would split it, up to the first that later text might split
differently. From there the mask decides, and allows every token that begins with the forced text.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import llguidance
import numpy as np

from jax_attn.models._weights.protocols import Tokenizer
from jax_attn.serve._grammar import json_schema
from jax_attn.serve._grammar.vocabulary import Vocabulary
from jax_attn.serve._text import memory

MAX_GRAMMAR_CHARS = 100_000
MAX_GRAMMAR_SECONDS = 1.0  # CPU seconds to compile one grammar
MAX_GRAMMAR_BYTES = 96 << 20  # memory to compile one grammar
_GIVE_BACK_BYTES = 8 << 20  # of grammars that have left the cache


class GrammarError(ValueError):
    """A grammar that cannot be used. The message is one sentence for its author."""


def usable_schema(schema: Any, check_numbers: bool = True) -> Any:
    """A JSON Schema as llguidance takes it. Text that is not JSON is left to the compiler.

    check_numbers: refuse those that llguidance would change.

    Raises:
      GrammarError: it has such a number.
    """
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            return schema
    try:
        return json_schema.usable(schema, check_numbers)
    except json_schema.CannotHold as error:
        raise GrammarError(f"JSON schema: {error}.") from None


# Not what a client's schema has as x-guidance: its patterns of separators and of white space may
# demand a text without an end; see from_lark.
_COMPACT: Any = {
    "whitespace_flexible": False,
    "whitespace_pattern": None,
    "item_separator": ",",
    "key_separator": ":",
}


def from_json_schema(schema: str | dict[str, Any] | bool) -> str:
    """The grammar of a JSON Schema (True: any JSON value). No white space between tokens."""
    schema = usable_schema(schema)
    if not isinstance(schema, str):
        schema = json.dumps({} if schema is True else schema)
    try:
        return llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=_COMPACT)
    except ValueError as error:
        raise GrammarError(f"JSON schema: {one_line(str(error))}.") from error


def from_regex(pattern: str) -> str:
    """The grammar of a text that matches the whole regular expression (Rust's syntax)."""
    return llguidance.LLMatcher.grammar_from_regex(pattern)


def from_choices(texts: Sequence[str]) -> str:
    """The grammar of one of the texts."""
    return from_lark("start: " + " | ".join(map(json.dumps, texts)), is_own=True)


def from_lark(
    grammar: str, added_tokens: Mapping[str, int] | None = None, *, is_own: bool = False
) -> str:
    """A context-free grammar in llguidance's dialect of Lark; `start` is the start rule.

    added_tokens: tokens that <name> may name, though they are not special; ids by text.
    is_own: no part of it is a client's, so texts that must follow are found without a mask. A
      client may demand one without an end (after `/a+/ "a"` has begun, all that may follow is
      another a), which llguidance would look for forever.
    """

    def by_id(found: re.Match[str]) -> str:
        token = (added_tokens or {}).get(found[0])
        return found[0] if token is None else f"<[{token}]>"

    text = _LARK_PARTS.sub(by_id, grammar)
    if not is_own:
        text += '\n%llguidance {"no_forcing": true}'  # the last one of a grammar counts
    return llguidance.LLMatcher.grammar_from_lark(text)


# Comments, strings, regular expressions, and names of tokens.
_LARK_PARTS = re.compile(
    r"""//[^\n]* | "(?:\\.|[^"\\\n])*" | /(?:\\.|[^/\\\n])+/ | <[^<>\s]+>""", re.VERBOSE
)


# Within these limits a mask takes at most some 50 ms, and the states of a lexer some 20 MB. Schemas
# of 300 alternatives, properties or tools, and enums of 2,000 texts use a fraction of each.
_LIMITS: dict[str, Any] = {
    "verbose_errors": False,  # verbose errors would put the whole parser state in the sentence
    "step_max_items": 10_000,
    "max_items_in_row": 500,
    "step_lexer_fuel": 50_000,
    "max_lexer_states": 10_000,
}


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    text: str
    num_bytes: int  # bytes that it keeps, about
    _matcher: llguidance.LLMatcher

    def matcher(self) -> Matcher:
        """A matcher at the start of the grammar."""
        return Matcher(self._matcher.deep_copy())


class Grammars:
    """A cache of compiled grammars of one tokenizer, least recently used first out. Thread-safe.

    Tenants do not share entries: all copies of a grammar share the states of its lexer, which are
    limited, and the time to get one would tell what others use.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_tokens: Sequence[int],
        max_entries: int = 128,
        max_bytes: int = 64 << 20,
    ):
        """vocab_size: of the model; the tokenizer may have fewer tokens, or more.

        max_entries, max_bytes: limits of the cache. What leaves it goes back to the system.

        Raises:
          ValueError: no grammar can be made for the tokenizer.
        """
        if not eos_tokens:
            raise ValueError("eos_tokens: expected at least one, to end a text with, got none.")
        self._eos_tokens = list(eos_tokens)
        self._vocabulary = Vocabulary(tokenizer, vocab_size, eos_tokens)
        self._tokenizer = llguidance.LLTokenizer(self._vocabulary, eos_token=self._eos_tokens)
        self._limits = llguidance.LLParserLimits(**_LIMITS)
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._compiled: OrderedDict[tuple[str, str], CompiledGrammar] = OrderedDict()
        self._lock = threading.Lock()
        self.num_compiled = 0
        self._num_dropped_bytes = 0  # since memory was given back

    def __len__(self) -> int:
        return len(self._compiled)

    @property
    def description(self) -> dict[str, Any]:
        """The data that another process needs to compile the same: see `trial`."""
        return {
            "tokens": [raw.decode("latin-1") for raw in self._vocabulary.tokens],
            "special": self._vocabulary.special_token_ids,
            "eos": self._eos_tokens,
            "limits": _LIMITS,
            "seconds": MAX_GRAMMAR_SECONDS,
            "bytes": MAX_GRAMMAR_BYTES,
        }

    def cached(self, grammar: str, tenant: str = "") -> CompiledGrammar | None:
        with self._lock:
            compiled = self._compiled.get((tenant, grammar))
            if compiled is not None:
                self._compiled.move_to_end((tenant, grammar))
            return compiled

    def matcher(self, grammar: str, tenant: str = "") -> Matcher:
        """A matcher at the start of `grammar`, compiled in this call. Raises GrammarError."""
        return (self.cached(grammar, tenant) or self.compile(grammar, tenant)).matcher()

    def compile(self, grammar: str, tenant: str = "", num_bytes: int = 0) -> CompiledGrammar:
        """Compiles. num_bytes: memory that it keeps, if known. Raises GrammarError."""
        if len(grammar) > MAX_GRAMMAR_CHARS:
            raise GrammarError(
                f"grammar: expected at most {MAX_GRAMMAR_CHARS} characters, got {len(grammar)}."
            )
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise GrammarError(f"grammar: {one_line(matcher.get_error())}.")
        compiled = CompiledGrammar(grammar, max(num_bytes, 4 * len(grammar)), matcher)
        with self._lock:
            self.num_compiled += 1
            self._compiled[tenant, grammar] = compiled
            self._shrink()
            gives_back = self._num_dropped_bytes >= _GIVE_BACK_BYTES
            self._num_dropped_bytes *= not gives_back
        if gives_back:
            memory.give_back()
        return compiled

    def forget(self, grammar: str, tenant: str = "") -> None:
        """Drops a grammar whose lexer states may be used up."""
        with self._lock:
            self._compiled.pop((tenant, grammar), None)

    def _shrink(self) -> None:
        num_bytes = sum(compiled.num_bytes for compiled in self._compiled.values())
        while len(self._compiled) > self._max_entries or num_bytes > self._max_bytes:
            _, compiled = self._compiled.popitem(last=False)
            num_bytes -= compiled.num_bytes
            self._num_dropped_bytes += compiled.num_bytes


class Matcher:
    """A sequence's position in its grammar. Raises GrammarError if the grammar gets stuck."""

    def __init__(self, matcher: llguidance.LLMatcher):
        self._matcher = matcher

    def copy(self) -> Matcher:
        """An independent matcher at the same position."""
        return Matcher(self._matcher.deep_copy())

    @property
    def is_forced(self) -> bool:
        """Whether there is only one way to go on."""
        return bool(self._matcher.compute_ff_tokens())

    @property
    def is_stopped(self) -> bool:
        """Whether the text is complete: nothing may follow."""
        return self._matcher.is_stopped()

    def advance(self, token: int) -> None:
        """Appends a token that the last mask allowed."""
        if not self._matcher.consume_token(token):
            self._refuse()

    def take_forced(self) -> list[int]:
        """Returns the tokens that must follow, already appended; []: there is a choice."""
        tokens = self._matcher.compute_ff_tokens()
        if tokens and not self._matcher.consume_tokens(tokens):
            self._refuse()
        return tokens

    def fill_mask(self, row_mask: np.ndarray) -> None:
        """Writes a bit for each token, 1: it may follow; lowest first. row_mask: [words] i32."""
        if not (row_mask.flags.c_contiguous and row_mask.dtype == np.int32):
            raise ValueError("fill_mask: row_mask: expected a contiguous row of int32.")
        self._matcher.unsafe_compute_mask_ptr(row_mask.ctypes.data, row_mask.nbytes)
        if self._matcher.is_error():
            self._refuse()

    def _refuse(self) -> None:
        raise GrammarError(f"grammar: {one_line(self._matcher.get_error())}.")


def one_line(message: str) -> str:
    """Returns llguidance's message without the quotations on its further lines."""
    lines = message.strip().split("\n")
    reason = next((line[7:] for line in lines[1:] if line.startswith("error: ")), "")
    return f"{lines[0].rstrip('.:')}: {reason}" if reason else lines[0].rstrip(".:")
