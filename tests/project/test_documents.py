"""README and docs/: they name everything there is, and the checks of pages find mistakes."""

import collections
import importlib
import inspect
import re
import sys
import tomllib
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_attn as ja
from helpers.paths import ROOT
from jax_attn import _environment, compat
from jax_attn.serve import __main__ as command
from jax_attn.serve._http import openapi
from jax_attn.serve._openai.metrics import Metrics

sys.path[:0] = [str(ROOT / "build_tools"), str(ROOT / "docs")]
import conf  # noqa: E402
import docstrings  # noqa: E402
import readme_tables  # noqa: E402


def coded(page: str) -> str:
    """The text that a page sets as code, one piece a line, without fences."""
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    return "\n".join(re.findall(r"`([^`]+)`", text))


def lacks(page: str, names: list[str]) -> list[str]:
    text = coded(page)
    return [name for name in names if not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text)]


def test_every_public_name_is_in_the_api():
    assert not lacks("docs/api.md", ja.__all__)
    assert not lacks("docs/devices.md", ja.parallel.__all__)
    assert not lacks("docs/compat.md", compat.__all__)


def test_every_public_module_has_a_page_of_reference():
    """Sphinx fills each page with the names of the module's __all__."""
    modules = [name for name in ja.__all__ if isinstance(getattr(ja, name), types.ModuleType)]
    pages = {path.stem: path.read_text() for path in (ROOT / "docs/reference").glob("*.rst")}
    for name in ("jax_attn", "compat", "models", *modules):
        module = importlib.import_module("jax_attn" if name == "jax_attn" else f"jax_attn.{name}")
        assert f".. automodule:: {module.__name__}\n" in pages[name] and module.__all__


def test_every_page_is_where_a_reader_finds_it():
    """Each page is in one of an index's lists, which are also the navigation."""
    found = set()
    for index in (ROOT / "docs").rglob("index.md"):
        links = re.findall(r"^(\S+\.(?:md|rst))$", conf.navigation(index.read_text()), re.MULTILINE)
        found |= {index, *((index.parent / link).resolve() for link in links)}
    pages = [path for kind in ("*.md", "*.rst") for path in (ROOT / "docs").rglob(kind)]
    assert len(pages) > 40 and not set(pages) - found
    assert all(path.is_file() for path in found)


def test_every_example_has_a_row():
    text = (ROOT / "docs/examples.md").read_text()
    examples = [path.name for path in (ROOT / "examples").glob("*.py")]
    assert len(examples) > 20
    assert not [name for name in examples if f"| [{name[:-3]}](../examples/{name}) |" not in text]


def test_an_index_becomes_a_part_of_the_navigation_for_each_heading():
    page = (
        "# Top\n\n- [no](no.md)\n\n## One\n\n- [a](a.md): x\n- [b](../b.md#c)\n\n## Two\n\nText.\n"
    )
    assert conf.navigation(page) == "```{toctree}\n:hidden:\n:caption: One\n\na.md\n```"


def test_the_built_page_of_performance_has_all_results():
    page = (ROOT / "docs/performance.md").read_text()
    built = conf.with_tables(page)
    assert len(page.splitlines()) < 150 and "<!-- table: " not in built
    papers = (ROOT / "docs/papers.md").read_text()
    for path in (ROOT / "benchmarks/results").glob("*.json"):
        if path.stem.endswith("-papers"):
            assert f"`benchmarks/results/{path.name}`" in papers
        else:
            assert f"from `benchmarks/results/{path.name}`:" in built
    with pytest.raises(KeyError):
        conf.with_tables("<!-- table: unknown -->")


def test_the_glossary_has_no_word_twice():
    """Each word in bold type has an entry, in one of its forms."""
    lines = re.findall(
        r"^\| (?!word |---)(.+?) \| (.+) \|$", (ROOT / "docs/glossary.md").read_text(), re.M
    )
    words = [word for line, _ in lines for word in line.strip("`").split(", ")]
    assert len(words) > 120 and len(set(words)) == len(words)
    bold = {name for _, meaning in lines for name in re.findall(r"\*\*(.+?)\*\*", meaning)}
    assert not [name for name in bold if not {name, name.removesuffix("s")} & set(words)]


# ---- files and symbols that pages name -----------------------------------------------------------

_TOP = "csrc|jax_attn|tests|benchmarks|build_tools|docs|examples|data|\\.ci"
_PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "tests/GRAVEYARD.md")


def pages() -> list[str]:
    """All pages except the notes on experiments, whose code may be gone."""
    return [*_PAGES, *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]


def test_files_that_pages_name_exist():
    found = 0
    for page in pages():
        for piece in coded(page).splitlines():
            path = piece.split("::")[0]
            if not re.fullmatch(rf"({_TOP})/[\w./*-]*", path) or "-<" in path:
                continue
            found += 1
            assert any(ROOT.glob(path.rstrip("/"))) or "results" in path, f"{page}: {path}"
    assert found > 150


def test_symbols_that_pages_name_are_in_their_files():
    """Checks `file` (`Symbol`, `Symbol`, ...) in pages."""
    found = 0
    for page in pages():
        text = (ROOT / page).read_text()
        for path, symbols in re.findall(rf"`((?:{_TOP})/[\w./-]+)` \(([^)]*`[^)]*)\)", text):
            source = (ROOT / path).read_text()
            for symbol in re.findall(r"`([\w.]+)[^`]*`", symbols):
                found += 1
                assert symbol in source, f"{page}: {path}: {symbol}"
    assert found >= 5


def test_every_public_call_has_a_docstring():
    for module in (
        ja, ja.head_tables, ja.masks, ja.mla, ja.parallel, ja.reference, ja.retention, compat,
    ):  # fmt: skip
        names = [name for name in module.__all__ if callable(getattr(module, name))]
        assert not [name for name in names if not inspect.getdoc(getattr(module, name))]


def test_docstrings_become_lists_of_arguments():
    text = """One line about `x*` and docs/api.md.

    q: [n], i32. A row_
        of many.
    levels: pairs of
        lens: [n]. Tokens
            of each.
        more text.

    Heads
        k, v: two.
    Raises ValueError.

        code(*x)

    >>> f(*x)
    1
    """
    expected = """One line about ``x*`` and :doc:`docs/api.md </docs/api>`.

``q``
    [n], i32. A row\\_
    of many.

``levels``
    pairs of

    ``lens``
        [n]. Tokens
        of each.

    more text.

Heads
    ``k, v``
        two.

Raises ValueError.

::

    code(*x)

>>> f(*x)
1
"""
    lines = docstrings.to_rest(inspect.cleandoc(text).splitlines())
    made = re.sub("\n{3,}", "\n\n", "\n".join(lines))
    assert made.strip() == expected.strip()


def shown(default):
    return f'"{default}"' if isinstance(default, str) else default


def test_calls_in_the_api_are_written_as_they_are():
    """Names of arguments, their order, and their defaults; "...": there are more."""
    calls = re.findall(r"^(\w+)\((.+)\)$", coded("docs/api.md"), re.MULTILINE)
    calls = [(name, text) for name, text in calls if name in ja.__all__ and text != "..."]
    assert len(calls) >= 10
    for name, text in calls:
        parameters = inspect.signature(getattr(ja, name)).parameters.values()
        is_needed = {p.name: p.default is p.empty for p in parameters}
        there = [
            p.name if is_needed[p.name] else f"{p.name}={shown(p.default)}" for p in parameters
        ]
        written = [piece for piece in text.split(", ") if piece not in ("*", "...")]
        # plan's page table is optional, but a paged spec needs it
        there = [
            x.removesuffix("=None") if x.removesuffix("=None") in written else x for x in there
        ]
        assert [x for x in there if x in written] == written, name
        missing = [x for x in is_needed if is_needed[x] and x not in written]
        assert "..." in text or not missing, name


def test_every_phase_of_ci_has_an_entry():
    phases = re.findall(r"^phase_(\w+)\(\)", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    assert len(phases) >= 11 and not lacks("docs/development.md", phases)


def test_every_environment_variable_has_an_entry():
    names = re.findall(r"^\w+(?:, \w+)?(?==1|  )", _environment.__doc__, re.MULTILINE)
    names = [name for line in names for name in line.split(", ")]
    assert len(names) >= 6 and not lacks("docs/environment.md", names)


def test_environment_variables_are_read_in_one_module():
    """All by jax_attn/_environment.py, whose docstring lists them."""
    sources = [*(ROOT / "jax_attn").rglob("*.py"), *(ROOT / "csrc").rglob("*.*")]
    reads = re.compile(r"environ\.get\(|environ\[|getenv\(")
    found = [str(path.relative_to(ROOT)) for path in sources if reads.search(path.read_text())]
    assert found == ["jax_attn/_environment.py"]
    names = re.findall(r"""(?:get|_flag)\("(\w+)\"""", (ROOT / found[0]).read_text())
    assert len(names) >= 9 and not [name for name in names if name not in _environment.__doc__]


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


class Engine:
    """The part of an engine that the metrics read, with every number."""

    ready = True

    def stats(self):
        return collections.defaultdict(int, step_seconds={"plan": 1.0}, device_bytes={0: 1})


def test_every_metric_has_an_entry():
    names = re.findall(r"^# TYPE jax_attn_(\w+)", Metrics(Engine()).text().decode(), re.MULTILINE)
    names = [name for name in names if not name.endswith("_created")]  # added by the library
    assert len(names) >= 12
    text = re.sub(r"\{\w+\}", "", coded("docs/operations.md"))
    assert not [name for name in names if not re.search(rf"\b{name}\b", text)]


def own_code(page: str) -> str:
    """The Python of a page that is not an example, which CI runs by itself."""
    text = re.sub(r"<!-- begin: .*?<!-- end: ", "", (ROOT / page).read_text(), flags=re.DOTALL)
    return "\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))


def test_code_of_concepts_runs(tmp_path, monkeypatch):
    """A batch with the sharing that the page describes: 64 decodes, pages of 16."""
    monkeypatch.chdir(tmp_path)
    spec = ja.AttentionSpec(8, 2, 64, fresh_kv=True, max_qo_tokens=64, max_kv_pages=64 * 400)
    shared = np.arange(400)
    tables = np.arange(64)[:, None] * 400 + 1000 + shared
    tables[:, :128] = shared[:128]  # 2048 tokens
    tables[:16, :384], tables[16:32, :256] = shared[:384], 500 + shared[:256]
    tables[16:32, :128] = shared[:128]
    pages, new = (
        jnp.zeros((2, 30_000, 16, 2, 64), spec.dtype),
        jnp.zeros((2, 64, 2, 64), spec.dtype),
    )
    names = {
        "ja": ja,
        "spec": spec,
        "qo_indptr": np.arange(65),
        "kv_lens": np.full(64, 6300),
        "page_indptr": 400 * np.arange(65),
        "page_indices": tables.reshape(-1),
        "q": jnp.zeros(spec.q_shape, spec.dtype),
        **dict(zip(("k_pages", "v_pages", "k_new", "v_new"), (*pages, *new), strict=True)),
    }
    exec(own_code("docs/concepts.md"), names)
    assert names["plan"].bucket().num_shared_pages > 0
    assert {path.name for path in tmp_path.iterdir()} == {"schedule.html", "plan.npz"}


def test_code_of_devices_runs():
    spec = ja.AttentionSpec(4, 2, 64, page_size=64, max_batch=2, max_qo_tokens=8, max_kv_pages=9)
    names = {"parallel": ja.parallel, "spec": spec, "ja": ja, "jax": jax}
    names |= {"NamedSharding": jax.sharding.NamedSharding, "P": jax.sharding.PartitionSpec}
    exec(own_code("docs/devices.md"), names)
    kv_shards = names["kv_shards"]
    automatic = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((4,), ("kv",), axis_types=automatic)
    pages, rows = kv_shards.pages_spec(is_stacked=False), kv_shards.rows_spec
    lengths = [np.array(x, np.int32) for x in ([0, 1, 8], [70, 64], [0, 2, 3], [4, 0, 3])]
    step = jax.shard_map(
        names["step"],
        mesh=mesh,
        in_specs=(rows, rows, rows, pages, pages, jax.sharding.PartitionSpec()),
        out_specs=(rows, pages, pages),
        check_vma=False,
    )
    new, cache = jnp.zeros((8, 2, 64), spec.dtype), jnp.zeros((5, 64, 2, 64), spec.dtype)
    o, k_pages, _ = jax.eval_shape(
        step, jnp.zeros(spec.q_shape, spec.dtype), new, new, cache, cache, lengths
    )
    assert o.shape == spec.o_shape and k_pages.shape == cache.shape
    one = jax.make_mesh((1,), ("heads",), automatic, devices=jax.devices("cpu")[:1])
    plan = ja.plan(spec, [0, 1, 8], [70, 64], [0, 2, 3], [4, 0, 3])
    o = names["decode_heads"](one, jnp.zeros(spec.q_shape, spec.dtype), cache, cache, plan)
    assert o.shape == spec.o_shape
    tokens = names["shards"].array_spec
    layer = jax.shard_map(
        names["layer"],
        mesh=mesh,
        in_specs=(tokens, tokens, tokens, jax.sharding.PartitionSpec()),
        out_specs=tokens,
        check_vma=False,
    )
    o = jax.eval_shape(layer, jnp.zeros(spec.q_shape, spec.dtype), new, new, np.array([0, 3, 7]))
    assert o.shape == spec.o_shape


def test_code_of_the_api_fits_its_call():
    """Without compiling: test_jit.py does that."""
    fits = inspect.signature(ja.precompile).bind
    exec(own_code("docs/api.md"), {"ja": types.SimpleNamespace(precompile=fits), "spec": None})


def test_code_of_formats_runs():
    pages, new = jnp.zeros((2, 8, 16, 2, 64), "float8_e4m3fn"), jnp.ones((2, 64, 2, 64), "bfloat16")
    names = {
        "ja": ja,
        "qo_indptr": np.array([0, 5]),
        "kv_lens": np.array([5]),
        "page_indptr": np.array([0, 1]),
        "page_indices": np.array([3]),
        "q": jnp.ones((64, 8, 64), "bfloat16"),
        "k_scale": jnp.full(2, 0.5, jnp.float32),
        "v_scale": jnp.full(2, 0.5, jnp.float32),
        **dict(zip(("k_pages", "v_pages", "k_new", "v_new"), (*pages, *new), strict=True)),
    }
    exec(own_code("docs/formats.md"), names)
    np.testing.assert_allclose(np.float32(names["o"][:5]), 1, atol=1e-2)


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """An up-to-date checkout: a README with one example, and a page with a link."""
    for folder in ("docs", "benchmarks", "examples"):
        (tmp_path / folder).mkdir()
    (tmp_path / "examples" / "a.py").write_text("print(1)\n")
    (tmp_path / "CONTRIBUTING.md").write_text("[page](docs/page.md)\n")
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
        ("CONTRIBUTING.md", "docs/page.md", "docs/pages.md", "CONTRIBUTING.md: docs/pages.md"),
        ("docs/page.md", "#the-top", "#the-end", "docs/page.md: ../README.md#the-end"),
        ("docs/page.md", "[up]", "![picture](no.svg) [up]", "docs/page.md: no.svg"),
        ("README.md", "begin: example a.py", "begin: example b.py", "ends as 'example a.py'"),
        ("README.md", "example a.py", "example b.py", "expected highlights, "),
        ("README.md", "<!-- end: example a.py -->", "", "lacks its begin or its end"),
    ],
    ids=["code", "picture", "link", "other", "anchor", "image", "names", "unknown", "unclosed"],
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


def test_pre_commit_checks_with_the_versions_of_make_lint():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = re.findall(
        r'dependencies: \["(.+?)"\]', (ROOT / ".pre-commit-config.yaml").read_text()
    )
    assert len(listed) == 3 and set(listed) <= set(
        project["project"]["optional-dependencies"]["dev"]
    )
