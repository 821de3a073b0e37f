"""GRAVEYARD.md names tests that exist; its mistakes without another test are tested here."""

import ast
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_attn as ja
from helpers.attention_cases import CASES, Case, build
from helpers.backends import on_every_platform
from helpers.checking import assert_same_bits
from helpers.paths import ROOT
from jax_attn import reference

TABLE = (ROOT / "tests" / "GRAVEYARD.md").read_text()
ROWS_OF = re.compile(r"^\| (?!mistake|---)(.+) \| (.+) \|$", re.MULTILINE)
ROWS = ROWS_OF.findall(TABLE)


def functions_of(path: Path) -> set[str]:
    text = path.read_text()
    if path.suffix == ".py":
        return {
            node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)
        }
    return set(re.findall(r"^\w[\w<>:&* ]* (\w+)\([^;]*\) \{$", text, re.MULTILINE))


@pytest.mark.parametrize(("mistake", "guards"), ROWS, ids=[mistake for mistake, _ in ROWS])
def test_every_mistake_has_a_test_that_exists(mistake, guards):
    names = re.findall(r"`([^`]+)`", guards)
    assert names and ", ".join(f"`{name}`" for name in names) == guards
    for name in names:
        path, _, test = name.partition("::")
        test, _, case = test.partition("[")
        assert test in functions_of(ROOT / path), name
        assert not case or case.removesuffix("]") in {case.name for case in CASES}, name


def test_the_table_has_all_mistakes():
    """The table has 44 mistakes of others, each once, so that no edit loses one."""
    of_others = ROWS_OF.findall(TABLE.partition("## Found here")[0])
    assert len(of_others) == len({mistake for mistake, _ in of_others}) == 44


def flipped(x):
    """The same numbers in memory with negative strides."""
    return np.ascontiguousarray(x[::-1])[::-1]


def transposed(x):
    return np.ascontiguousarray(np.moveaxis(x, 0, -1)).transpose(-1, *range(x.ndim - 1))


def spread(x):
    return np.repeat(x, 2, axis=-1)[..., ::2]


@on_every_platform
@pytest.mark.parametrize("layout", [flipped, transposed, spread])
def test_operands_in_any_memory_layout(layout, backend):
    """Layouts of numpy's views, and those that XLA chooses for arrays."""
    case = Case("", head_dim_qk=16, page_size=3)
    batch = build(case)
    lengths = {name: layout(x) for name, x in batch.lengths.plan_arguments().items()}
    plan = ja.plan(backend.spec(**case.spec_fields()), **batch.lengths.plan_arguments())
    again = ja.plan(backend.spec(**case.spec_fields()), **lengths)
    assert_same_bits("plan", again.buffer, plan.buffer)

    def attend(*qkv):
        return ja.attention(*qkv, plan, return_lse=True)

    qkv = batch.q, batch.k, batch.v
    views = [layout(x) for x in qkv]
    for view, x in zip(views, qkv, strict=True):
        assert view.strides != x.strides
        np.testing.assert_array_equal(view, x)
    want = jax.jit(attend)(*qkv)
    # XLA turns a transposition into a layout if its consumer allows another one.
    turned = [np.ascontiguousarray(np.moveaxis(x, 0, -1)) for x in qkv]
    inside = jax.jit(lambda *turned: attend(*(jnp.moveaxis(x, -1, 0) for x in turned)))
    for got in (attend(*views), jax.jit(attend)(*views), inside(*turned)):
        for name, a, b in zip(("o", "lse"), got, want, strict=True):
            assert_same_bits(name, a, b)


@pytest.mark.parametrize("target", ["cpu", "sm_80:108", "sm_90:132"])
@pytest.mark.parametrize("below", [0, 1, 2, 7, 63, 64, 65, 1000])
def test_sizes_at_the_end_of_int32(below, target):
    """The largest capacities: refused in a sentence, or at least half of them accepted."""

    def words_of(**capacities):
        few = {"max_batch": 3, "max_qo_tokens": 9, "max_kv_pages": 5}
        spec = ja.AttentionSpec(8, 2, 64, target=target, **few | capacities)
        assert all(0 <= offset <= spec.plan_words for offset in spec.layout.values())
        return spec.plan_words

    for name in ("max_batch", "max_qo_tokens", "max_kv_pages", "max_items", "max_partial_rows"):
        try:
            words = words_of(**{name: 2**31 - 1 - below})
        except ValueError as error:
            assert "expected" in str(error) and "got" in str(error)
        else:
            assert 0 < words_of(**{name: 2**30}) <= words, name


@on_every_platform
@pytest.mark.parametrize("num_keys", [1, 3])
@pytest.mark.parametrize("window", [None, (2, 0)], ids=["causal", "window"])
def test_gradients_of_far_more_queries_than_keys(num_keys, window, backend):
    """With a window most rows see no key: their gradients are 0, and the others are right."""
    rng = np.random.default_rng(0)
    q = rng.normal(size=(1, 300, 2, 16)).astype(np.float32)
    k, v = (rng.normal(size=(1, num_keys, 1, 16)).astype(np.float32) for _ in "kv")

    def gradients(attend):
        loss = lambda *qkv: jnp.sum(  # noqa: E731
            jnp.sin(attend(*qkv, is_causal=True, local_window_size=window))
        )
        return jax.grad(loss, argnums=(0, 1, 2))(q, k, v)

    with jax.default_matmul_precision("highest"):  # on a GPU f32 matmuls are tf32 otherwise
        got, want = gradients(ja.dot_product_attention), gradients(reference.dot_product_attention)
    for name, a, b in zip("qkv", got, want, strict=True):
        assert np.isfinite(a).all(), name
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=name)
    if window is not None:
        assert not np.asarray(got[0])[:, num_keys + 2 :].any()
