"""Rewrites the blocks of documents that quote other files: readme_tables.py [--check].

In README.md and docs/**/*.md, a block between these lines:

    <!-- begin: NAME -->
    <!-- end: NAME -->

    NAME             what it holds
    example FILE     examples/FILE, which CI runs
    highlights       ten rows of benchmarks/results/*.json (result_tables.py)
    targets          benchmarks/targets.toml beside benchmarks/results/*.json (targets.py)
    paper figures    rows of benchmarks/results/*.json by paper (paper_tables.py)
    planned samples  schedules of random batches, of benchmarks/results/*-papers.json

It also writes docs/images/results.svg, the plot of the ten rows. --check changes nothing and fails
if anything differs from its source. Both fail on broken links, also in the other pages that LINKED
names.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import paper_tables
import result_plot
import result_tables
import targets

ROOT = Path(__file__).resolve().parents[1]
BLOCKS: dict[str, Callable[[], str]] = {
    "highlights": result_tables.highlights_table,
    "targets": targets.table,
    "paper figures": paper_tables.figures,
    "planned samples": paper_tables.planned,
}
# Documents without blocks, whose links are checked.
LINKED = (
    "*.md",
    ".github/**/*.md",
    "tests/*.md",
    "data/*/README.md",
    "examples/*/README.md",
)
PICTURES: dict[str, Callable[[], str]] = {"docs/images/results.svg": result_plot.plot}

_BLOCK = re.compile(r"<!-- begin: (.+?) -->\n.*?<!-- end: (.+?) -->", re.DOTALL)
_CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.DOTALL | re.MULTILINE)


def documents() -> list[Path]:
    """The documents that may have blocks."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def linked() -> list[Path]:
    """The documents whose links are checked."""
    return sorted({*documents(), *(path for pattern in LINKED for path in ROOT.glob(pattern))})


def block(name: str) -> str:
    """Returns the contents of a block. Raises SystemExit for an unknown name."""
    kind, _, file = name.partition(" ")
    if kind == "example" and (path := ROOT / "examples" / file).is_file():
        return f"```python\n{path.read_text()}```"
    if name not in BLOCKS:
        raise SystemExit(f"<!-- begin: {name} -->: expected {', '.join(BLOCKS)} or example FILE")
    return BLOCKS[name]()


def rewritten(text: str, document: str) -> str:
    def replace(found: re.Match[str]) -> str:
        name, end = found.groups()
        if name != end:
            raise SystemExit(f"{document}: block {name!r} ends as {end!r}")
        return f"<!-- begin: {name} -->\n{block(name)}\n<!-- end: {name} -->"

    text, count = _BLOCK.subn(replace, text)
    if not count == text.count("<!-- begin: ") == text.count("<!-- end: "):
        raise SystemExit(f"{document}: a block lacks its begin or its end")
    return text


def broken_links(document: Path) -> list[str]:
    """Returns links and pictures of a document whose file or heading does not exist."""
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", _CODE.sub("", document.read_text())):
        if "://" not in link:
            path, _, anchor = link.partition("#")
            target = document.parent / path if path else document
            if not target.exists() or (anchor and anchor not in anchors(target)):
                broken.append(f"{document.relative_to(ROOT)}: {link}")
    return broken


def anchors(document: Path) -> set[str]:
    """Returns GitHub's anchors of a document's headings."""
    text = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def main(arguments: list[str]) -> None:
    wanted = {path: rewritten(path.read_text(), path.name) for path in documents()}
    wanted |= {ROOT / name: draw() for name, draw in PICTURES.items()}
    for path, text in wanted.items():
        is_same = path.is_file() and path.read_text() == text
        if arguments != ["--check"]:
            path.write_text(text)
        elif not is_same:
            name = path.relative_to(ROOT)
            raise SystemExit(f"{name} is out of date: run python build_tools/readme_tables.py")
    if broken := [link for document in linked() for link in broken_links(document)]:
        raise SystemExit("links that lead nowhere: " + ", ".join(broken))


if __name__ == "__main__":
    main(sys.argv[1:])
