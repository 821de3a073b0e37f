"""Custom tools: their input is a text of its own, which may have to follow a grammar.

Models write calls of functions, so a custom tool is a function with one argument, `input`. Where
arguments are JSON, the text is written as a JSON string; `quoted_lark` makes the grammar of that
string from the grammar of the text.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable
from functools import partial
from typing import Any, Literal, NamedTuple

from jax_attn.serve._chat import strict_json

INPUT = "input"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}


class CustomToolError(ValueError):
    """A grammar that cannot be used. The message is one sentence for its author."""


# ---- from arguments to the input ----------------------------------------------------------------

_HEAD = re.compile(r'\{\s*"input"\s*:\s*"')
_STRING = re.compile(r'(?:[^"\\]|\\.)*')


def arguments_of(text: str) -> str:
    """The arguments of a call with this input."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def input_of(arguments: str) -> str:
    """The input in a call's arguments, a JSON object. Without one, all of them."""
    found = strict_json.members(arguments, 0)[0].get(INPUT, "")
    return _whole_characters(json.loads(found)) if found.startswith('"') else arguments


def _whole_characters(text: str) -> str:
    """The text without halves of surrogate pairs, which cannot be sent."""
    return re.sub("[\ud800-\udfff]", "\ufffd", text)


class GrowingInput:
    """The input of a call while its arguments grow by pieces that split no escape."""

    def __init__(self) -> None:
        self._arguments = ""
        self._at: int | None = None  # how far the string is read; None: it has not begun
        self._sent: list[str] = []

    def push(self, piece: str, is_last: bool) -> str:
        """Returns what is new of the input. is_last: the arguments are complete."""
        self._arguments += piece
        if self._at is None and (head := _HEAD.match(self._arguments)):
            self._at = head.end()
        new = ""
        if self._at is not None and (found := _STRING.match(self._arguments, self._at)):
            new, self._at = _whole_characters(json.loads(f'"{found[0]}"')), found.end()
        if is_last:
            whole, sent = input_of(self._arguments), "".join([*self._sent, new])
            new += whole.removeprefix(sent) if whole.startswith(sent) else ""
        self._sent.append(new)
        return new


# ---- from the grammar of a text to that of a JSON string ----------------------------------------


def lark_of(syntax: Literal["lark", "regex"], definition: str, is_quoted: bool) -> str:
    """The Lark grammar of an input. is_quoted: as it stands between the quotes of a JSON string.

    Raises:
      CustomToolError: the grammar has something that cannot be quoted.
    """
    if syntax == "regex":
        if is_quoted and (expression := _repeated(definition, "")) is not None:
            return f"start: {expression}\n"
        pattern = _quoted_regex(definition, "") if is_quoted else definition
        return f"start: /{_with_slashes(pattern)}/\n"
    return quoted_lark(definition) if is_quoted else definition


# Their escapes in JSON. Others of the control characters are written by number.
_SHORT = {'"': '"', "\\": "\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
_SPECIAL = [*map(chr, range(0x20)), '"', "\\"]
_PARTS = re.compile(
    r"""(?P<comment>//[^\n]*)
      | (?P<string>"(?:\\.|[^"\\\n])*")(?P<flag>i?)
        (?:\s*\.\.\s*(?P<end>"(?:\\.|[^"\\\n])*"))?
      | /(?P<regex>(?:\\.|[^/\\\n])+)/(?P<flags>[a-z]*)
      | %import\s+common\s*(?P<imported>\.\s*\w+(?:\s*->\s*\w+)?|\([^)]*\))
      | (?P<name>\b[A-Z_][A-Z0-9_]*\b)
      | (?P<refused><[^<>\s]+>|%(?!ignore\b)\w+|~\s*(?!\s*\d))""",
    re.VERBOSE,
)
_NEWLINE = r"\r?\n"
# Terminals of lark's `common` that match characters which JSON escapes.
_COMMON = {
    "CR": r"\r",
    "ESCAPED_STRING": r'"([^"\\\n]|\\.)*"',
    "LF": r"\n",
    "NEWLINE": f"({_NEWLINE})+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
}


def quoted_lark(grammar: str) -> str:
    """Returns the grammar with each of its texts as JSON writes it in a string.

    Raises:
      CustomToolError: the grammar has something that cannot be quoted.
    """
    grammar = _PARTS.sub(_plain_part, grammar)
    # A terminal is one lexeme. So one that is a repetition and no more becomes a rule.
    in_terminals = {
        name
        for line in grammar.splitlines()
        if (found := re.match(r"\s*(?:[A-Z_][A-Z0-9_]*(?:\.\d+)?\s*:|%ignore)(.*)", line))
        for name in re.findall(r"\b[A-Z_][A-Z0-9_]*\b", found[1])
    }
    rules = {
        found[1]: f"{found[1].lower()}_text"
        for found in re.finditer(
            r"(?m)^\s*([A-Z_][A-Z0-9_]*)\s*:\s*/((?:\\.|[^/\\\n])+)/(s?)\s*$", grammar
        )
        if found[1] not in in_terminals and _repeated(found[2], found[3]) is not None
    }
    is_rule, lines = True, []
    for line in grammar.splitlines():
        if defined := re.match(r"\s*[?!]?(\w+)(?:\.\d+)?\s*(?:\[[^\]]*\]\s*)?:", line):
            is_rule = defined[1] in rules or not defined[1].isupper()
        may_repeat = is_rule and not line.lstrip().startswith("%")
        quote = partial(_quoted_part, rules=rules, may_repeat=may_repeat)
        lines.append(_PARTS.sub(quote, line))
    return "\n".join(lines) + "\n"


def _plain_part(found: re.Match[str]) -> str:
    """Leaves comments out, and writes imported terminals."""
    if found["comment"]:
        return ""
    return _imported(found["imported"]) if found["imported"] else found[0]


def _repeated(pattern: str, flags: str) -> str | None:
    return (
        _Regex(pattern.replace("\\/", "/"), "s" in flags).repeated() if flags in ("", "s") else None
    )


def _quoted_part(found: re.Match[str], rules: dict[str, str], may_repeat: bool) -> str:
    if found["name"]:
        return rules.get(found["name"], found["name"])
    if found["refused"]:
        raise CustomToolError(
            f"a grammar of rules, texts and regular expressions is supported here, got"
            f" {found['refused'].strip()[:40]!r}"
        )
    if found["imported"]:  # characters of this terminal are all plain
        return found[0]
    if found["regex"]:
        flags = found["flags"]
        if may_repeat and (expression := _repeated(found["regex"], flags)) is not None:
            return expression
        pattern = found["regex"].replace("\\/", "/")
        return f"/{_with_slashes(_quoted_regex(pattern, flags))}/{flags}"
    text = _text(found["string"])
    if found["end"]:
        begin, end = (re.escape(x) for x in (text, _text(found["end"])))
        return f"/{_with_slashes(_quoted_regex(f'[{begin}-{end}]', ''))}/"
    if found["flag"]:
        return f"/{_with_slashes(_quoted_regex(re.escape(text), 'i'))}/i"
    # llguidance reads no DEL in a text.
    return json.dumps(_escaped(text), ensure_ascii=False).replace("\x7f", "\\u007f")


def _text(literal: str) -> str:
    try:
        return str(ast.literal_eval(literal))
    except (SyntaxError, ValueError):
        raise CustomToolError(f"expected a text, got {literal[:40]}") from None


def _imported(names: str) -> str:
    """The import of terminals of `common`; those that JSON escapes are written out."""
    if names.startswith("("):
        wanted = [(name.strip(), name.strip()) for name in names[1:-1].split(",")]
    else:
        name, _, alias = names[1:].partition("->")
        wanted = [(name.strip(), alias.strip() or name.strip())]
    lines = []
    for name, own in wanted:
        if name in _COMMON:
            lines.append(f"{own}: /{_COMMON[name]}/")
        else:
            lines.append(f"%import common.{name}" + ("" if own == name else f" -> {own}"))
    return "\n".join(lines)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _with_slashes(pattern: str) -> str:
    return re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", pattern)


_PLAIN_ESCAPES = ("d", "w")  # they match none of the characters that JSON escapes
_SPACES = "\t\n\v\f\r"  # those of \s that JSON escapes
_PLAIN_SPACES = r" \x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}"
_NUMBERED = re.compile(
    r"x\{([0-9a-fA-F]+)\}|x([0-9a-fA-F]{2})|u\{([0-9a-fA-F]+)\}|u([0-9a-fA-F]{4})"
)
_BY_LETTER = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a"}
_LETTERS = re.compile(r"p\{?(L[a-z]?|N[a-z]?|Letter|Number)\}?")


def _quoted_regex(pattern: str, flags: str) -> str:
    """Returns the regular expression of the texts as JSON writes them in a string."""
    return _Regex(pattern, "s" in flags).quoted()


class _Set(NamedTuple):
    """A set of characters. plain: a class of those that JSON does not escape, or "".

    escapes: a regular expression of each of the others, as JSON writes it.
    """

    plain: str
    escapes: list[str]

    def regex(self) -> str:
        return f"(?:{'|'.join([*filter(None, [self.plain]), *self.escapes])})"


_REPETITION = re.compile(r"(?P<sign>[*+?])?|\{(?P<from>\d+),(?P<to>\d+)\}")


class _Regex:
    """Rewrites a regular expression of Rust's syntax, part by part."""

    def __init__(self, pattern: str, dot_is_any: bool):
        self._pattern, self._at, self._dot_is_any = pattern, 0, dot_is_any

    def quoted(self) -> str:
        parts: list[str] = []
        while self._at < len(self._pattern):
            parts.append(self._part())
        return "".join(parts)

    def _refuse(self, what: str) -> CustomToolError:
        return CustomToolError(
            f"a regular expression of characters, classes, groups and repetitions is supported"
            f" here, got {what[:40]!r}"
        )

    def _next(self) -> str:
        self._at += 1
        if self._at > len(self._pattern):
            raise self._refuse(self._pattern)
        return self._pattern[self._at - 1]

    def repeated(self) -> str | None:
        """A Lark expression, if all of it is one set of characters, or a repetition of one, or of
        ends of lines.

        A lexeme would go on with the backslash of an escape that belongs to what follows it. So an
        escape is a lexeme of its own.
        """
        if self._pattern == _COMMON["NEWLINE"]:
            return f"(/{_quoted_regex(_NEWLINE, '')}/)+"
        has_group = self._pattern.startswith("(") and self._pattern.endswith(")")
        if has_group:
            self._pattern = self._pattern[1:-1]
        try:
            found = self._set(self._next())
        except CustomToolError:
            return None
        repetition = _REPETITION.fullmatch(self._pattern, self._at)
        if found is None or not found.escapes or repetition is None:
            return None
        sign = repetition["sign"] or ""
        counts = f" ~ {repetition['from']}..{repetition['to']}" if repetition["from"] else sign
        parts = [f"/{'|'.join(found.escapes)}/"]
        if found.plain:
            parts.insert(0, f"/{_with_slashes(found.plain)}{'+' if sign in ('*', '+') else ''}/")
        return f"({' | '.join(parts)}){counts}"

    def _set(self, character: str) -> _Set | None:
        """The set that begins with the character; None: it begins none."""
        if character == "[":
            return self._class()
        if character == ".":
            return _any_but([] if self._dot_is_any else ["\n"], "")
        if character == "\\" and self._pattern[self._at : self._at + 1] in ("D", "S", "W"):
            letter = self._next()
            if letter == "S":
                return _any_but([*_SPACES], _PLAIN_SPACES)
            return _any_but([], f"\\{letter.lower()}")
        return None

    def _part(self) -> str:
        character = self._next()
        if (found := self._set(character)) is not None:
            return found.regex()
        if character == "(" and self._pattern.startswith("?", self._at):
            if not (opened := re.compile(r"\?(?:i?:|P?<\w+>)").match(self._pattern, self._at)):
                raise self._refuse(self._pattern[self._at - 1 : self._at + 5])
            self._at = opened.end()
            return f"({opened[0]}"
        if character == "\\":
            return self._escape()
        return _one_of([character]) if character in _SPECIAL else character

    def _escape(self) -> str:
        if (found := _NUMBERED.match(self._pattern, self._at)) is not None:
            return _one_of([self._numbered(found)])
        if (letters := _LETTERS.match(self._pattern, self._at)) is not None:
            self._at = letters.end()
            return f"\\{letters[0]}"
        letter = self._next()
        if letter in _PLAIN_ESCAPES:
            return f"\\{letter}"
        if letter == "s":
            return _Set(f"[{_PLAIN_SPACES}]", [*map(_character, _SPACES)]).regex()
        return _one_of([self._of_letter(letter)])

    def _of_letter(self, letter: str) -> str:
        """The character that stands behind a backslash as this letter, or as itself."""
        if letter not in _BY_LETTER and letter.isalnum():
            raise self._refuse(f"\\{letter}")
        return _BY_LETTER.get(letter, letter)

    def _numbered(self, found: re.Match[str]) -> str:
        self._at = found.end()
        try:
            return chr(int(next(filter(None, found.groups())), 16))
        except (ValueError, OverflowError):
            raise self._refuse(f"\\{found[0]}") from None

    def _class(self) -> _Set:
        negated = self._pattern.startswith("^", self._at)
        self._at += negated
        special: set[str] = set()
        plain: list[str] = []
        is_first = True
        while (character := self._next()) != "]" or is_first:
            is_first = False
            if character == "[" or self._pattern[self._at - 1 : self._at + 1] in ("&&", "--", "~~"):
                raise self._refuse(self._pattern[self._at - 1 : self._at + 1])
            begin = self._member(character, special, plain)
            if begin is None:
                continue
            end = begin
            if self._pattern[self._at : self._at + 1] == "-" and (
                self._pattern[self._at + 1 : self._at + 2] not in ("]", "")
            ):
                self._at += 1
                found = self._member(self._next(), special, plain)
                if found is None or found < begin:
                    raise self._refuse(self._pattern)
                end = found
            special |= {x for x in _SPECIAL if begin <= x <= end}
            plain.append(_range(begin, end))
        members = "".join(plain)
        if negated:
            return _any_but(sorted(special), members)
        return _Set(f"[{members}]" if members else "", [*map(_character, sorted(special))])

    def _member(self, character: str, special: set[str], plain: list[str]) -> str | None:
        """A character of a class; None: an escape of several, which is added."""
        if character != "\\":
            return character
        if (found := _NUMBERED.match(self._pattern, self._at)) is not None:
            return self._numbered(found)
        letter = self._next()
        if letter in _PLAIN_ESCAPES:
            plain.append(f"\\{letter}")
            return None
        if letter == "s":
            special |= {*_SPACES}
            plain.append(_PLAIN_SPACES)
            return None
        return self._of_letter(letter)


def _range(begin: str, end: str) -> str:
    """Members of a class between two characters, without those that JSON escapes."""
    parts, at = [], ord(begin)
    for gap in [*sorted(map(ord, _SPECIAL)), 0x110000]:
        if gap < at:
            continue
        last = min(ord(end), gap - 1)
        if at <= last:
            parts.append(_in_class(at) if at == last else f"{_in_class(at)}-{_in_class(last)}")
        at = gap + 1
        if at > ord(end):
            break
    return "".join(parts)


def _in_class(code: int) -> str:
    return chr(code) if chr(code).isalnum() and code < 0x80 else f"\\x{{{code:x}}}"


def _character(character: str) -> str:
    """A regular expression of one character as JSON writes it."""
    if character not in _SPECIAL:
        return re.escape(character)
    short = _SHORT.get(character)
    written = f"\\{short}" if short else f"\\u{ord(character):04x}"
    return f"(?-i:{re.escape(written)})"


def _one_of(characters: list[str]) -> str:
    return f"(?:{'|'.join(map(_character, characters))})"


def _any_but(left_out: Iterable[str], members: str) -> _Set:
    """Any character but these, and those of the members of a class."""
    left_out = list(left_out)
    rest = [x for x in _SPECIAL if x not in left_out]
    plain = "".join(_in_class(ord(x)) for x in left_out if x not in _SPECIAL)
    return _Set(f'[^"\\\\\\x{{0}}-\\x{{1f}}{plain}{members}]', [*map(_character, rest)])
