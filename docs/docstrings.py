"""Conversion of this library's docstrings to reStructuredText.

Docstrings are plain text, written to be read in an editor:

    name, other: text      an argument or a field; its text goes on in deeper lines
    Heading                followed by a deeper line: a group of these
        code               a deeper block behind an empty line, and lines that begin with >>>

Everything else is paragraphs, in which `x` is code and docs/x.md a link. A line that begins with
Returns or Raises begins a paragraph.
"""

import re

_FIELD = re.compile(r"([a-zA-Z_]\w*(?:, [a-zA-Z_]\w*)*): (.*)")


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def inline(text: str) -> str:
    """Converts a line of a paragraph: `x` becomes code, and all other markup is escaped."""
    pieces = re.split(r"(`[^`]+`)", text)
    for i, piece in enumerate(pieces):
        if i % 2:
            pieces[i] = f"`{piece}`"
        else:
            piece = re.sub(r"([\\*|`]|_(?!\w))", r"\\\1", piece)
            pieces[i] = re.sub(r"\bdocs/(\w+)\.md\b", r":doc:`docs/\1.md </docs/\1>`", piece)
    return "".join(pieces)


def to_rest(lines: list[str]) -> list[str]:
    """Converts a docstring to reStructuredText. The first line sets the indentation."""
    out: list[str] = []
    _block([line.rstrip() for line in lines], out, "")
    return out


def _deeper(lines: list[str], begin: int, indent: int) -> int:
    """Returns the end of the run of lines from `begin` on that are deeper than indent."""
    end = begin
    while end < len(lines) and (not lines[end] or _indent(lines[end]) > indent):
        end += 1
    while end > begin and not lines[end - 1]:
        end -= 1
    return end


def _dedented(lines: list[str]) -> list[str]:
    least = min((_indent(line) for line in lines if line), default=0)
    return [line[least:] for line in lines]


def _block(lines: list[str], out: list[str], margin: str) -> None:
    i, in_paragraph = 0, False
    while i < len(lines):
        line = lines[i]
        end = _deeper(lines, i + 1, 0)
        if not line:
            out.append("")
            i, in_paragraph = i + 1, False
        elif line.startswith(" "):  # behind an empty line
            end = _deeper(lines, i, 0)
            out += ["", margin + "::", ""]
            out += [f"{margin}    {x}".rstrip() for x in _dedented(lines[i:end])] + [""]
            i = end
        elif line.startswith(">>> "):
            end = next((j for j in range(i, len(lines)) if not lines[j]), len(lines))
            out += [margin + x for x in lines[i:end]]
            i = end
        elif (field := _FIELD.fullmatch(line)) and (not in_paragraph or end > i + 1):
            out += ["", f"{margin}``{field[1]}``"]
            _block([field[2], *_dedented(lines[i + 1 : end])], out, margin + "    ")
            out.append("")
            i = end
        elif not in_paragraph and i + 1 < end and lines[i + 1]:
            group: list[str] = []
            _block(_dedented(lines[i + 1 : end]), group, margin + "    ")
            # The group starts right after the heading: an empty line would separate them.
            out += ["", f"{margin}{inline(line)}", *group[group[0] == "" :], ""]
            i = end
        else:
            if re.match("(Returns|Raises) ", line):
                out.append("")
            out.append(margin + inline(line))
            i, in_paragraph = i + 1, True
