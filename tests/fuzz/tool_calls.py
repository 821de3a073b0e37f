"""Tool calls with random arguments: written, split into tokens, cut anywhere, and read again.

A case is one answer of a model: calls in a format, or as a chat template shows them, after a text
or not. Its calls must be read as they were written, however the answer is cut, and through every
kind of tokenizer; and a grammar that demands them must make nothing else.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer

from helpers.serve import tokenizer_kinds
from helpers.serve.made_texts import made_text
from helpers.serve.streamed_calls import streamed
from helpers.serve.written_calls import FORMATS, ONE_CALL, Number, loads, shown, written
from jax_attn.serve._chat import gemma_tool_calls, tools
from jax_attn.serve._chat.harmony import HarmonySplitter
from jax_attn.serve._chat.tools import HARMONY, ToolFormat, ToolParser
from jax_attn.serve._grammar import grammar
from jax_attn.serve._grammar.grammar import GrammarError, Grammars
from jax_attn.serve._text.detokenizer import Detokenizer, Texts

_NAMED_FORMATS = {
    name: format
    for name, format in vars(tools).items()
    if isinstance(format, ToolFormat) and name.isupper()
}
NAMES = ("f", "get_weather", "do-nothing", "x" * 64, "a_1")
_MARKS = sorted({mark for format in _NAMED_FORMATS.values() for mark in format.marks} - {"<|x|>"})
_TEXTS = (
    *_MARKS, '"', "'", "\\", "\n", "\t", "\x00", "\x7f", " ", "  ", "{", "}", "[", "]", ",", ":",
    "```", "```json", "<", ">", "</", "é", "漢", "🙂", "\u2028", "\ufffd", "\ufeff", "▁", "Ġ",
    "<think>", "</think>", "<|end|>", "<|call|>", "<|start|>", "<|message|>", "<|im_end|>", "<eos>",
    '{"name": "f", "arguments": {}}', "NaN", "Infinity", "null", "1e999", "#########", "a", "the",
    "name", "%", "$", "\u0301", "\u202e", "\U0010ffff",
)  # fmt: skip
_NUMBERS = (
    "0", "-0", "1", "-1", "0.1", "1.0", "1e5", "1E-7", "9007199254740993", "18446744073709551616",
    "123456789012345678901234567890", "0.1000000000000000055511151231257827", "1e999", "-1e400",
    "5e-324", "1e-999", "3.141592653589793", "-0.0",
)  # fmt: skip
_HALVES = ("\ud800", "\udbff", "\udc00", "\udfff")
_KINDS = {**tokenizer_kinds.KINDS, "metaspace": tokenizer_kinds.metaspace}
_BEFORE = ("", "So: ", "Let me see.\n\n", "é 🙂 ", "a < b, {1} [2] ")


@dataclasses.dataclass(frozen=True)
class Case:
    writer: str  # name of a format, or of a chat template in small letters
    calls: tuple[tuple[str, str], ...]  # name, arguments
    before: str
    kind: str  # of the tokenizer
    flags: tuple[str, ...]  # of the tokens for the format's marks; ("none",): they are no tokens
    seed: int


class ToolCalls:
    name = "calls"

    def __init__(self) -> None:
        self.done: Counter[str] = Counter()

    # ---- cases ---------------------------------------------------------------------------------

    def case(self, rng: random.Random) -> Case:
        writer = rng.choice([*_NAMED_FORMATS, *FORMATS])
        format = _format(writer)
        most = 1 if writer in ONE_CALL else 3
        calls = tuple(
            (rng.choice(NAMES), _written(_object(rng, format, 0), rng))
            for _ in range(rng.randint(1, most))
        )
        flags = tuple(flag for flag in tokenizer_kinds.FLAGS if rng.random() < 0.3)
        return Case(
            writer,
            calls,
            rng.choice(_BEFORE) if writer.isupper() and _may_follow_text(format) else "",
            rng.choice(list(_KINDS)),
            ("none",) if rng.random() < 0.2 else flags,
            rng.randrange(2**32),
        )

    def smaller(self, case: Case) -> Iterator[Case]:
        for i in range(len(case.calls)):
            if len(case.calls) > 1:
                yield dataclasses.replace(case, calls=case.calls[:i] + case.calls[i + 1 :])
        for before in {"", *_BEFORE[1:2]} - {case.before}:
            if len(before) < len(case.before):
                yield dataclasses.replace(case, before=before)
        for i, (name, arguments) in enumerate(case.calls):
            if name != "f":
                yield _with(case, i, "f", arguments)
            for value in _smaller(loads(arguments)):
                if isinstance(value, dict):
                    yield _with(case, i, name, _written(value, None))
        for kind in ("byte_level",):
            if case.kind != kind:
                yield dataclasses.replace(case, kind=kind)
        for flag in case.flags:
            rest = tuple(each for each in case.flags if each != flag)
            yield dataclasses.replace(case, flags=rest)

    def to_json(self, case: Case) -> Any:
        return dataclasses.asdict(case)

    def from_json(self, data: Any) -> Case:
        calls = tuple((name, arguments) for name, arguments in data["calls"])
        return Case(**data | {"calls": calls, "flags": tuple(data["flags"])})

    # ---- checks --------------------------------------------------------------------------------

    def run(self, cases: list[Case]) -> None:
        for case in cases:
            self._run(case)

    def check_at_end(self) -> None:
        pass

    def _run(self, case: Case) -> None:
        format, is_shown = _format(case.writer), not case.writer.isupper()
        rng = random.Random(case.seed)
        if is_shown:
            text = shown(case.writer, list(case.calls))
        else:
            text = case.before + written(format, list(case.calls))
        expected = [(name, _value(arguments, is_shown)) for name, arguments in case.calls]
        whole = _read(format, [text])
        got = [(name, _value(arguments, is_shown)) for name, arguments in whole[1]]
        assert got == expected, f"read {got}, expected {expected}, in {text!r}"
        if not is_shown:
            assert whole[0] == case.before.rstrip(), f"text {whole[0]!r} in {text!r}"
        self.done[case.writer if is_shown else "written"] += 1
        for cut in _cuts(text, rng):
            assert _read(format, cut) == whole, f"cut into {cut}: {_read(format, cut)}"
            in_pieces = streamed(format, NAMES, cut)[:2]
            assert in_pieces == whole, f"streamed {cut}: {in_pieces}"
        self._through_tokens(case, format, text, whole)
        if rng.random() < 0.5 and not is_shown and case.kind in tokenizer_kinds.KINDS:
            self._demanded(case, format, rng)

    def _through_tokens(self, case: Case, format: ToolFormat, text: str, whole: Any) -> None:
        """The text of tokens comes as the tokenizer decodes it, and is read as if it came whole."""
        tokenizer, texts, _ = _tokenizer(case.kind, case.flags, case.writer)
        tokens = tokenizer.encode(text, add_special_tokens=False).ids
        decoded = tokenizer.decode(tokens, skip_special_tokens=False)
        prompt = tokenizer.encode("the name", add_special_tokens=False).ids
        both = tokenizer.decode(prompt + tokens, skip_special_tokens=False)
        after = both.removeprefix(tokenizer.decode(prompt, skip_special_tokens=False))
        for before, all_text in (((), decoded), (prompt, after)):
            detokenizer = Detokenizer(texts, skip_special_tokens=False, before=before)
            pieces = [detokenizer.push(token) for token in tokens]
            pieces.append(detokenizer.flush())
            assert "".join(pieces) == all_text, f"{pieces}, expected {all_text!r}"
            if all_text == text:
                self.done["through tokens"] += 1
                assert _read(format, pieces) == whole, f"through {pieces}: {_read(format, pieces)}"

    def _demanded(self, case: Case, format: ToolFormat, rng: random.Random) -> None:
        """A grammar for one call with these arguments: whatever it makes is read as this call."""
        if case.kind != "byte_level" and "▁" in format.begin:
            return  # SentencePiece shows a space there
        if case.kind == "llama" and "normalized" in case.flags:
            return  # such tokens have the space of the normalizer in their text
        name, arguments = rng.choice(case.calls)
        values = json.loads(arguments)
        try:
            json.dumps(values, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return  # JSON Schema has no half surrogate pairs
        schema = {
            "type": "object",
            "properties": {key: {"const": value} for key, value in values.items()},
            "required": list(values),
            "additionalProperties": False,
        }
        tokenizer, _, grammars = _tokenizer(case.kind, case.flags, case.writer)
        special = {
            token.content: id
            for id, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        }
        try:
            usable = grammar.usable_schema(schema, check_numbers=not format.quote)
            function = {"name": name, "parameters": usable}
            lark = tools.grammar_of(format, [function], False, None, special)
        except (gemma_tool_calls.CannotDemand, GrammarError):
            self.done["cannot be demanded"] += 1
            return
        try:
            text = made_text(
                tokenizer, grammars, grammar.from_lark(lark), rng, jump=rng.random() < 0.7
            )
        except GrammarError as error:
            raise AssertionError(f"demanding {schema}: {error}") from None
        got = [(each, json.loads(found)) for each, found in _read(format, [text])[1]]
        assert got == [(name, values)], f"demanded {values}, made {text!r}"
        self.done["demanded"] += 1


def _format(writer: str) -> ToolFormat:
    return _NAMED_FORMATS[writer] if writer.isupper() else FORMATS[writer]


def _may_follow_text(format: ToolFormat) -> bool:
    return bool(format.begin) and format != HARMONY


def _read(format: ToolFormat, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """The text and the calls of an answer that comes in pieces."""
    calls: list[tools.ToolCall] = []
    content = ""
    if format == HARMONY:
        splitter = HarmonySplitter()
        for part in (*map(splitter.push, pieces), splitter.flush()):
            content, calls = content + part.content, calls + list(part.calls)
    else:
        parser = ToolParser(format, NAMES)
        for new, found in (*map(parser.push, pieces), parser.flush()):
            content, calls = content + new, calls + found
    for call in calls:
        call.arguments.encode()  # can be sent
    return content, [(call.name, call.arguments) for call in calls]


def _cuts(text: str, rng: random.Random) -> Iterator[list[str]]:
    """The text in two pieces, cut at every place (of a long one at some), and in small ones."""
    places = range(1, len(text))
    for at in places if len(text) < 200 else sorted(rng.sample(places, 30)):
        yield [text[:at], text[at:]]
    yield list(text)
    for _ in range(3):
        pieces, at = [], 0
        while at < len(text):
            size = rng.randint(1, 9)
            pieces.append(text[at : at + size])
            at += size
        yield pieces


@functools.lru_cache(64)
def _tokenizer(kind: str, flags: tuple[str, ...], writer: str) -> tuple[Tokenizer, Texts, Grammars]:
    tokenizer = _KINDS[kind]()
    if flags != ("none",):
        tokenizer_kinds.with_added(tokenizer, dict.fromkeys(_format(writer).marks, flags))
    end = tokenizer_kinds.end_token(tokenizer)
    return tokenizer, Texts(tokenizer), Grammars(tokenizer, tokenizer.get_vocab_size(), [end])


# ---- values ------------------------------------------------------------------------------------


def _value(arguments: str, as_floats: bool) -> Any:
    """The value of JSON: exact, or with numbers as templates get them."""
    return json.loads(arguments) if as_floats else loads(arguments)


def _object(rng: random.Random, format: ToolFormat, depth: int) -> dict[str, Any]:
    return {
        _key(rng, format): _any(rng, format, depth + 1)
        for _ in range(rng.choice((0, 1, 1, 2, 2, 3)))
    }


def _any(rng: random.Random, format: ToolFormat, depth: int) -> Any:
    kind = rng.randrange(10 if depth < 4 else 7)
    if kind < 4:
        return _text(rng, format)
    if kind == 4:
        return Number(rng.choice(_NUMBERS))
    if kind == 5:
        return Number(str(rng.randint(-(10 ** rng.randint(1, 30)), 10**18)))
    if kind == 6:
        return rng.choice((True, False, None))
    if kind == 7:
        return [_any(rng, format, depth + 1) for _ in range(rng.randint(0, 3))]
    if kind == 8:  # JSON in a text
        return _written(_object(rng, format, 3), None).replace(format.quote or "\0", "")
    return _object(rng, format, depth)


def _text(rng: random.Random, format: ToolFormat) -> str:
    halves = () if format.quote else _HALVES
    parts = rng.choices((*_TEXTS, *halves), k=rng.choice((0, 1, 2, 3, 5, 9)))
    text = "".join(parts).encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    # Gemma's format has no escapes: nothing could show the delimiter in a text.
    return text.replace(format.quote, "") if format.quote else text


def _key(rng: random.Random, format: ToolFormat) -> str:
    if format.quote:
        return rng.choice(("a", "key", "name", "größe", "x-y", "a.b", "$ref", "1"))
    return rng.choice(("a", "key", "name", "arguments", _text(rng, format)))


def _written(value: Any, rng: random.Random | None) -> str:
    """JSON of the value; rng: with some of the white space and escapes that are allowed."""

    def space() -> str:
        return rng.choice(("", "", " ", "\n", "\t ")) if rng is not None else ""

    if isinstance(value, Number):
        return str(value)
    if isinstance(value, str):
        escapes = rng is not None and rng.random() < 0.3
        text = json.dumps(value, ensure_ascii=escapes)
        return "".join(f"\\u{ord(c):04x}" if "\ud800" <= c <= "\udfff" else c for c in text)
    if isinstance(value, dict):
        pairs = (
            f"{space()}{_written(k, rng)}:{space()}{_written(v, rng)}" for k, v in value.items()
        )
        return f"{{{','.join(pairs)}{space()}}}"
    if isinstance(value, list):
        return f"[{','.join(space() + _written(item, rng) for item in value)}]"
    return json.dumps(value)


def _smaller(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for key in value:
            yield {k: v for k, v in value.items() if k != key}
        for key, each in value.items():
            if len(key) > 1:
                yield {"a" if k == key else k: v for k, v in value.items()}
            for less in _smaller(each):
                yield value | {key: less}
    elif isinstance(value, list):
        for i in range(len(value)):
            yield value[:i] + value[i + 1 :]
            for less in _smaller(value[i]):
                yield [*value[:i], less, *value[i + 1 :]]
    elif isinstance(value, Number):
        if value != "1":
            yield Number("1")
    elif isinstance(value, str):
        for size in (len(value) // 2, 1):
            for at in range(0, len(value), max(size, 1)) if value else ():
                yield value[:at] + value[at + size :]


def _with(case: Case, index: int, name: str, arguments: str) -> Case:
    calls = list(case.calls)
    calls[index] = (name, arguments)
    return dataclasses.replace(case, calls=tuple(calls))
