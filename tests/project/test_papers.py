"""docs/papers.md: it has every paper, and the calls that it names exist."""

import dataclasses
import inspect
import re
import sys

import pytest

import jax_attn as ja
from helpers.paths import ROOT
from jax_attn.serve import _options
from jax_attn.serve._engine.engine_config import EngineConfig
from jax_attn.serve._http import openapi

sys.path[:0] = [str(ROOT / "build_tools")]
import paper_tables  # noqa: E402
import readme_tables  # noqa: E402

PAGE = ROOT / "docs/papers.md"
NAMES = """
FlashAttention-2|FlashAttention-3|FlashDecoding|LeanAttention|occupancy|stream-K|FlashInfer|
LogitsTransform|BSR|composable formats|attention states|cascade|parallel generation|FlexAttention|
FlashSigmoid|PagedAttention|vLLM|Unified Attention|Gaudi|GQA|MLA|FlashMLA|Hydragen|ChunkAttention|
RadixAttention|SGLang|LRU|cache-aware|hit rate|jump-forward|copy-on-write|StreamingLLM|Quest|H2O|
SnapKV|RazorAttention|Gated DeltaNet|KDA|Mamba-2|Orca|Sarathi|SpecInfer|Medusa|EAGLE|RingAttention|
Ulysses|Helix
""".replace("\n", "").split("|")
# README: only the reader's search words: families of papers are named once there.
NOT_IN_README = {"FlashAttention-2", "FlashAttention-3", "vLLM", "SGLang"}


def tables() -> list[list[str]]:
    """The rows of papers: [paper, call, where, its figure, ours]."""
    text = PAGE.read_text().partition("## Our figures")[0]
    lines = re.findall(r"^\| (?!paper |---)(.*) \|$", text, re.MULTILINE)
    return [[cell.strip() for cell in line.split(" |")] for line in lines]


@pytest.mark.parametrize(("page", "left_out"), [(PAGE, set()), (ROOT / "README.md", NOT_IN_README)])
def test_every_paper_is_found_by_its_name(page, left_out):
    text = page.read_text().lower()
    assert not [name for name in set(NAMES) - left_out if name.lower() not in text]


def test_every_row_has_a_figure_or_a_reason():
    rows = tables()
    assert len(rows) > 30
    for paper, call, where, figure, ours in rows:
        assert figure and ours, paper
        assert (call == "none") == (where == ""), paper
        if call == "none":
            assert ours.startswith("not here, because"), paper


def test_calls_exist():
    arguments = {
        name
        for call in (ja.AttentionSpec, ja.LinearAttentionSpec, ja.Variant, ja.plan, ja.attention)
        for name in inspect.signature(call).parameters
    }
    fields = openapi.describe()["components"]["schemas"]["CompletionRequest"]["properties"]
    config = {field.name for field in dataclasses.fields(EngineConfig)}
    owners = {
        "plan": set(dir(ja.AttentionPlan)),
        "masks": set(ja.masks.__all__),
        "parallel": set(ja.parallel.__all__),
        "head_tables": set(ja.head_tables.__all__),
        "retention": set(ja.retention.__all__),
        "EngineConfig": config,
    }
    options = inspect.getsource(_options)
    found = 0
    for paper, call, *_ in tables():
        for piece in re.findall(r"`([^`]+)`", call):
            found += 1
            if piece.startswith("--"):
                assert f'"{piece}"' in options, (paper, piece)
                continue
            name = re.match(r"\w*(?:\.\w+)?", piece)[0]
            owner, _, member = name.partition(".")
            if member:
                assert member in owners[owner], (paper, piece)
            elif name and not piece.startswith(f"{name}="):
                assert name in {*ja.__all__, "LLM", *arguments, *fields}, (paper, piece)
            for argument in re.findall(r"(\w+)=", piece):
                assert argument in arguments, (paper, piece)
    assert found > 30


def test_links_lead_somewhere():
    assert not readme_tables.broken_links(PAGE)


def test_parts_of_the_benchmark_are_those_of_the_page():
    source = (ROOT / "benchmarks/papers.py").read_text()
    parts = re.findall(r'^    "(\w+)": PaperBench\.', source, re.MULTILINE)
    assert parts == list(paper_tables.PARTS)
    assert all(f"`{part}`" in PAGE.read_text() for part in parts)


def test_tables_are_those_of_the_results():
    """A paper of a row is in the tables of papers, too, and the page has the row."""
    text = PAGE.read_text()
    assert readme_tables.rewritten(text, PAGE.name) == text
    named = " ".join(paper for paper, *_ in tables()).lower()
    for papers, *_ in paper_tables.FIGURES:
        assert all(paper.lower() in named for paper in papers.split(", "))


def test_a_row_that_is_gone_is_named():
    with pytest.raises(SystemExit, match="no row decode/none"):
        paper_tables._row("h100", "decode/none")
