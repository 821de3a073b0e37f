"""README and docs/: whether they name all there is, and whether their checks see what is wrong."""

import re
import sys
from pathlib import Path

import pytest

import jax_attn as ja
from jax_attn import config
from jax_attn.serve import __main__ as command
from jax_attn.serve import openapi

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "build_tools"))
import readme_tables  # noqa: E402


def coded(page: str) -> str:
    """What a page sets as code, one piece a line, fences left out."""
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    return "\n".join(re.findall(r"`([^`]+)`", text))


def lacks(page: str, names: list[str]) -> list[str]:
    text = coded(page)
    return [name for name in names if not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text)]


def test_every_public_name_is_in_the_api():
    assert not lacks("docs/api.md", ja.__all__)


def test_every_environment_variable_has_an_entry():
    names = re.findall(r"^\w+(?:, \w+)?(?==1|  )", config.__doc__, re.MULTILINE)
    names = [name for line in names for name in line.split(", ")]
    assert len(names) >= 6 and not lacks("docs/development.md", names)


def test_every_option_of_the_server_has_an_entry(capsys):
    with pytest.raises(SystemExit):
        command.main(["--help"])
    options = sorted(set(re.findall(r"--[a-z][a-z-]*", capsys.readouterr().out)) - {"--help"})
    assert len(options) >= 15 and not lacks("docs/server.md", options)


def test_every_route_and_own_field_has_an_entry():
    description = openapi.describe()
    assert not lacks("docs/server.md", list(description["paths"]))
    schemas = description["components"]["schemas"]
    own = "top_k min_p repetition_penalty min_tokens ignore_eos stop_token_ids json_schema regex "
    own = (own + "grammar priority deadline cache_salt").split()
    assert set(own) <= set(schemas["CompletionRequest"]["properties"])
    assert not lacks("docs/server.md", [*own, "chat_template_kwargs"])


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A checkout that is up to date: a README with one example, and a page with a link."""
    for folder in ("docs", "benchmarks", "examples"):
        (tmp_path / folder).mkdir()
    (tmp_path / "examples" / "a.py").write_text("print(1)\n")
    (tmp_path / "benchmarks" / "NOTES.md").write_text("# Notes\n")
    (tmp_path / "docs" / "page.md").write_text("# One page\n\n[up](../README.md#the-top)\n")
    block = "<!-- begin: example a.py -->\n```python\nprint(1)\n```\n<!-- end: example a.py -->\n"
    (tmp_path / "README.md").write_text(f"# The top\n\n[page](docs/page.md)\n\n{block}")
    monkeypatch.setattr(readme_tables, "ROOT", tmp_path)
    monkeypatch.setattr(readme_tables, "PICTURES", {"docs/picture.svg": lambda: "<svg/>\n"})
    (tmp_path / "docs" / "picture.svg").write_text("<svg/>\n")
    return tmp_path


def test_documents_that_are_up_to_date_pass(tree):
    readme_tables.main(["--check"])


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("examples/a.py", "1", "2", "README.md is out of date"),
        ("docs/picture.svg", "<svg/>", "<svg></svg>", "picture.svg is out of date"),
        ("README.md", "docs/page.md", "docs/pages.md", "README.md: docs/pages.md"),
        ("docs/page.md", "#the-top", "#the-end", "docs/page.md: ../README.md#the-end"),
        ("docs/page.md", "[up]", "![picture](no.svg) [up]", "docs/page.md: no.svg"),
        ("README.md", "begin: example a.py", "begin: example b.py", "ends as 'example a.py'"),
        ("README.md", "example a.py", "example b.py", "expected highlights, "),
        ("README.md", "<!-- end: example a.py -->", "", "lacks its begin or its end"),
    ],
    ids=["code", "picture", "link", "anchor", "image", "names", "unknown", "unclosed"],
)
def test_what_is_wrong_is_said(tree, file, old, new, message):
    path = tree / file
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(SystemExit, match=re.escape(message)):
        readme_tables.main(["--check"])


def test_writing_repairs_a_block_and_a_picture(tree):
    (tree / "examples" / "a.py").write_text("print(2)\n")
    (tree / "docs" / "picture.svg").unlink()
    readme_tables.main([])
    readme_tables.main(["--check"])
    assert "print(2)" in (tree / "README.md").read_text()


def test_a_link_in_code_is_no_link(tree):
    page = tree / "docs" / "page.md"
    page.write_text(page.read_text() + "\n`x[0](y)`\n\n```\n[a](b.md)\n```\n")
    readme_tables.main(["--check"])
