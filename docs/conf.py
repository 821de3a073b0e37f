"""Sphinx configuration: sphinx-build -c docs . build/docs.

The source folder is the repository, so links between pages are the same on GitHub and in the build.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS), str(DOCS.parent / "build_tools")]
import docstrings  # noqa: E402
import result_tables  # noqa: E402

import jax_attn  # noqa: E402

project = "jax_attn"
release = version = jax_attn.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
root_doc = "docs/index"
include_patterns = [
    "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md",
    "docs/**", "data/*/README.md", "tests/GRAVEYARD.md",
]  # fmt: skip
exclude_patterns = ["build", "dist", ".*", "csrc", "docs/_templates"]

myst_heading_anchors = 6  # GitHub's
html_theme = "furo"
html_title = project
html_additional_pages = {"index": "redirect.html"}
templates_path = ["_templates"]
html_show_sphinx = False

# Shapes and dtypes are in the docstrings; annotations have neither.
autodoc_typehints = "none"
autodoc_default_options = {"members": True, "member-order": "bysource"}
viewcode_line_numbers = True


def navigation(page: str) -> str:
    """Makes a table of contents from the links of an index page, with a part per heading, so that
    page and navigation have the same structure."""
    parts = []
    for part in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        links = re.findall(r"^- \[[^\]]+\]\(([^)#]+)\)", part, re.MULTILINE)
        if links:
            caption = part.splitlines()[0]
            lines = ["```{toctree}", ":hidden:", f":caption: {caption}", "", *links, "```"]
            parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _add_navigation(app: Sphinx, page: str, source: list[str]) -> None:
    if os.path.basename(page) == "index":
        source[0] += "\n\n" + navigation(source[0])


TABLES = {"results": result_tables.attention_tables, "serving": result_tables.serving_tables}


def with_tables(page: str) -> str:
    """Replaces each `<!-- table: NAME -->` of a page by a table of benchmarks/results/. The tables
    are too long to read in the repository. Raises KeyError for a name that TABLES lacks."""
    return re.sub(r"^<!-- table: (\w+) -->$", lambda found: TABLES[found[1]](), page, flags=re.M)


def _add_tables(app: Sphinx, page: str, source: list[str]) -> None:
    source[0] = with_tables(source[0])


def _to_rest(*arguments: Any) -> None:
    lines = arguments[-1]
    lines[:] = docstrings.to_rest(lines)


def _check_reference(app: Sphinx, env: Any) -> None:
    """Warns of public calls that the reference lacks, because autodoc does not."""
    from sphinx.util import logging

    objects = env.get_domain("py").objects
    for page in (DOCS / "reference").glob("*.rst"):
        module = importlib.import_module(page.read_text().rsplit("automodule:: ", 1)[1].strip())
        for name in module.__all__:
            full, value = f"{module.__name__}.{name}", getattr(module, name)
            is_call = callable(value) and not isinstance(value, types.GenericAlias)
            if is_call and full not in objects:
                logging.getLogger(__name__).warning("%s has no docstring in the reference", full)


def setup(app: Sphinx) -> None:
    app.connect("env-updated", _check_reference)
    app.connect("source-read", _add_navigation)
    app.connect("source-read", _add_tables)
    app.connect("autodoc-process-docstring", _to_rest)
