"""Head dims that are no multiple of 8 in plans: what is padded, and that nothing else changes."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_attn as ja
from helpers.attention_cases import Case, build, expected
from helpers.attention_checks import run
from helpers.backends import on_every_platform
from helpers.checking import assert_close_state

LENS = {"qo_lens": (1, 0, 5, 30), "kv_lens": (70, 3, 9, 130)}
CASES = (
    Case("paged", **LENS, head_dim_qk=20, head_dim_vo=33, dtype="bfloat16", num_layers=2),
    Case("ragged", **LENS, head_dim_qk=81, head_dim_vo=81, dtype="float16", page_size=None),
    Case("one", **LENS, head_dim_qk=1, head_dim_vo=3, sinks=True, window_left=20),
    Case("wide", **LENS, head_dim_qk=300, head_dim_vo=511, dtype="bfloat16"),
)


def padded_pages(array, rows):
    """Pages as append_kv leaves them: zeros behind each row."""
    return np.pad(array, ((0, 0),) * (array.ndim - 1) + ((0, rows[-1] - array.shape[-1]),))


@on_every_platform
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_results_are_those_of_the_definition(case, backend):
    batch, want = build(case), expected(case, "normal")
    plan = ja.plan(backend.spec(**case.spec_fields()), **batch.lengths.plan_arguments())
    k, v = batch.k, batch.v
    if case.page_size is not None:
        k_shape, v_shape = plan.spec.kv_shapes(case.page_size)
        assert k_shape[-1] % 8 == v_shape[-1] % 8 == 0
        k, v = padded_pages(k, k_shape), padded_pages(v, v_shape)
    o, lse = run(plan, dataclasses.replace(batch, k=k, v=v))
    assert o.shape == plan.spec.o_shape
    assert_close_state(o, lse, want.o, want.lse, want.o_bound, want.lse_bound)


@on_every_platform
@pytest.mark.parametrize("kv_dtype", [None, "float8_e4m3fn"])
def test_append_pads_pages_and_attention_reads_them(kv_dtype, backend):
    """The result is that of pages in which the caller padded everything."""
    fields = {
        "num_qo_heads": 4, "num_kv_heads": 2, "dtype": "bfloat16", "kv_dtype": kv_dtype,
        "sm_scale": 0.2, "max_qo_tokens": 9, "max_kv_pages": 4, "max_batch": 2,
    }  # fmt: skip
    spec = backend.spec(**fields, head_dim_qk=20, head_dim_vo=36)
    wide = backend.spec(**fields, head_dim_qk=32, head_dim_vo=48)
    assert spec.plan_words == wide.plan_words and spec.padded.padded is spec.padded
    lengths = np.array([0, 9]), np.array([9]), np.array([0, 1]), np.array([2])
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.normal(size=(9, heads, dim)), "bfloat16")
        for heads, dim in ((4, 20), (2, 20), (2, 36))
    )

    def attend(spec, q, k, v):
        plan = ja.plan(spec, *lengths)
        pages = ja.append_kv(*spec.empty_pages(3), k, v, plan)
        return ja.attention(q, *pages, plan)

    def padded(x, dim):
        return jnp.pad(x, ((0, 0), (0, 0), (0, dim - x.shape[2])))

    got = attend(spec, q, k, v)
    want = attend(wide, padded(q, 32), padded(k, 32), padded(v, 48))[..., :36]
    assert got.shape == (9, 4, 36)
    np.testing.assert_allclose(np.float32(got), np.float32(want), atol=2e-2)


def test_fresh_rows_gradients_and_files(tmp_path):
    fields = {"num_qo_heads": 2, "num_kv_heads": 1, "head_dim_qk": 12, "dtype": "float32",
              "max_qo_tokens": 5, "target": "cpu"}  # fmt: skip
    spec = ja.AttentionSpec(**fields, page_size=None, max_kv_tokens=5)
    plan = ja.plan(spec, np.array([0, 5]), np.array([5]))
    plan.save(tmp_path / "plan")
    assert ja.AttentionPlan.load(tmp_path / "plan").spec == spec
    rng = np.random.default_rng(1)
    q, k, v = (jnp.asarray(rng.normal(size=(5, h, 12)), jnp.float32) for h in (2, 1, 1))

    def plain(q, k, v):
        s = jnp.einsum("thd,sd->ths", q, k[:, 0]) * 12**-0.5
        s = jnp.where(jnp.tril(jnp.ones((5, 5), bool))[:, None], s, -jnp.inf)
        return jnp.einsum("ths,sd->thd", jax.nn.softmax(s, axis=-1), v[:, 0])

    weights = jnp.asarray(rng.normal(size=(5, 2, 12)), jnp.float32)
    got = jax.grad(lambda *x: (ja.attention(*x, plan) * weights).sum(), (0, 1, 2))(q, k, v)
    want = jax.grad(lambda *x: (plain(*x) * weights).sum(), (0, 1, 2))(q, k, v)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    spec = ja.AttentionSpec(**fields, fresh_kv=True, max_kv_pages=1)
    plan = ja.plan(spec, np.array([0, 5]), np.array([5]), np.array([0, 1]), np.array([0]))
    o = ja.attention(q, *spec.empty_pages(1), plan, k_new=k, v_new=v)
    np.testing.assert_allclose(o, plain(q, k, v), atol=1e-5)


def test_what_is_refused():
    spec = ja.AttentionSpec(2, 1, 20, max_qo_tokens=4, max_kv_pages=1, target="cpu")
    plan = ja.plan(spec, np.array([0, 1]), np.array([1]), np.array([0, 1]), np.array([0]))
    pages = spec.empty_pages(1)
    assert pages[0].shape == (1, 16, 1, 24)
    q = jnp.zeros((4, 2, 24), "bfloat16")
    with pytest.raises(ValueError, match=r"attention: q: expected rows of 20 elements .* 24\]"):
        ja.attention(q, *pages, plan)
    new = jnp.zeros((4, 1, 24), "bfloat16")
    with pytest.raises(ValueError, match="append_kv: k_new: expected rows of 20 elements"):
        ja.append_kv(*pages, new, new, plan)
    narrow = jnp.zeros((1, 16, 1, 20), "bfloat16")
    with pytest.raises(ValueError, match=r"attention: k_pages: expected .* 24\]"):
        ja.attention(q[..., :20], narrow, narrow, plan)
    qkv, angles = jnp.zeros((4, 80), "bfloat16"), jnp.zeros((4, 10))
    with pytest.raises(NotImplementedError, match="append_rotated: plan: .* got 20 and 20"):
        ja.append_rotated(qkv, angles, angles, *pages, plan)


def test_gradients_without_a_kernel_are_those_of_the_kernel(monkeypatch):
    """GPUs with little shared memory compute those of heads of more than 256 columns in jnp."""
    spec = ja.AttentionSpec(4, 2, 264, page_size=None, dtype="float32", max_qo_tokens=6,
                            max_kv_tokens=6, max_batch=2, target="cpu")  # fmt: skip
    assert not dataclasses.replace(spec, dtype="bfloat16", target="sm_120").has_backward_kernel
    plan = ja.plan(spec, np.array([0, 4, 6]), np.array([4, 2]))
    rng = np.random.default_rng(2)
    q, k, v = (jnp.asarray(rng.normal(size=(6, h, 264)), jnp.float32) for h in (4, 2, 2))
    sinks = jnp.asarray(rng.normal(size=4), jnp.float32)

    def gradients():
        def loss(q, k, v, sinks):
            o, lse = ja.attention(q, k, v, plan, sinks=sinks, return_lse=True)
            return (o**2).sum() + lse.sum()

        dense = jax.grad(lambda *x: (ja.dot_product_attention(*x) ** 2).sum(), (0, 1, 2))
        return jax.grad(loss, (0, 1, 2, 3))(q, k, v, sinks), dense(q, k, v)

    of_kernel = gradients()
    monkeypatch.setattr(ja.AttentionSpec, "has_backward_kernel", False)
    jax.clear_caches()
    for a, b in zip(jax.tree.leaves(gradients()), jax.tree.leaves(of_kernel), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
