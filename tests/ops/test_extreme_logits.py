"""Logits of any finite size, by what softmax in float64 makes of them: forward and backward."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fuzz import search
from fuzz.logits import Logits
from test_gradients import check as check_gradients
from test_gradients import cotangents
from test_gradients import run as run_gradients

import jax_attn as ja
from helpers.attention_cases import FAR_CONTENTS, Case, build
from helpers.attention_checks import check, make_plan
from helpers.backends import on_every_backend, on_every_isa
from helpers.extreme_cases import FAMILIES, LENS

LARGEST = float(np.finfo(np.float32).max)
# What models add to hide a key, and more.
MASK_VALUES = (-1e4, -1e5, -1e9, -1e10, -1e12, -1e30, -3e38, -LARGEST)


@on_every_backend
@pytest.mark.parametrize("case", FAMILIES, ids=lambda case: case.name)
def test_forward(case, backend):
    check(dataclasses.replace(case, contents=FAR_CONTENTS, repeats=1), backend)


def test_made_up_batches(tmp_path):
    """A few of `make fuzz`."""
    search.search(Logits(), 15, num_cases=4, directory=tmp_path)


GRADIENTS = [
    *(Case(f"paged-{dtype}", dtype=dtype, **LENS) for dtype in ("float32", "bfloat16")),
    Case("ragged_bf16_d128", page_size=None, dtype="bfloat16", head_dim_qk=128, **LENS),
    Case("long", (3, 130), (2500, 1100)),  # rows of several tasks
    Case("sinks", sinks=True, **LENS),
    Case("negative_scale", sm_scale=-1e-3, **LENS),
    Case("large_cap", logits_soft_cap=1e8, **LENS),
    Case("window", window_left=50, **LENS),
]


@on_every_isa
@pytest.mark.parametrize("case", GRADIENTS, ids=lambda case: case.name)
def test_gradients(case, backend):
    if case.sm_scale is None:
        case = dataclasses.replace(case, sm_scale=1e-3)  # or the gradients themselves overflow
    for content in FAR_CONTENTS:
        check_gradients(case, [backend], content)


@on_every_isa
def test_gradients_of_a_soft_cap_are_finite(backend):
    case = Case("cap", logits_soft_cap=30.0, sm_scale=1e-3, **LENS)
    for content in FAR_CONTENTS:
        batch = build(case, content)
        plan = make_plan(case, backend, batch)
        for x in run_gradients(plan, batch, *cotangents(case, batch)):
            assert np.isfinite(x).all(), content


# ---- the dense entry, with what models write into biases -----------------------------------------


def softmax(logits, visible):
    """P and lse in float64, of logits rounded to f32."""
    logits = np.where(visible, logits.astype(np.float32).astype(np.float64), -np.inf)
    largest = logits.max(axis=-1, keepdims=True)
    p = np.exp(logits - largest)
    total = p.sum(axis=-1, keepdims=True)
    return p / total, (largest + np.log(total))[..., 0]


def dense_problem(dtype, num_keys=70, heads=2, head_dim=16):
    """q, k, v and cotangents whose scores are whole numbers, so that only the bias rounds."""
    rng = np.random.default_rng(5)
    shape = (2, num_keys, heads, head_dim)
    q, k = (rng.integers(-2, 3, shape) for _ in range(2))
    v, d_o = (rng.normal(size=shape) for _ in range(2))
    d_lse = rng.normal(size=shape[:3])
    return *(np.asarray(jnp.asarray(x, dtype)) for x in (q, k, v, d_o)), d_lse.astype(np.float32)


def dense_gradients(q, k, v, d_o, d_lse, bias, visible, scale):
    """o, lse, and the gradients of q, k, v and bias in float64."""
    q, k, v, d_o = (x.astype(np.float64) for x in (q, k, v, d_o))
    p, lse = softmax(scale * np.einsum("bthd,bshd->bhts", q, k) + bias.astype(np.float64), visible)
    o = np.einsum("bhts,bshd->bthd", p, v)
    d = (d_o * o).sum(-1) - d_lse
    d_s = p * (np.einsum("bthd,bshd->bhts", d_o, v) - d.swapaxes(1, 2)[..., None])
    return (
        o,
        lse.swapaxes(1, 2),
        scale * np.einsum("bhts,bshd->bthd", d_s, k),
        scale * np.einsum("bhts,bthd->bshd", d_s, q),
        np.einsum("bhts,bthd->bshd", p, d_o),
        d_s,
    )


@on_every_isa
@pytest.mark.parametrize(("dtype", "causal"), [("float32", True), ("bfloat16", False)])
def test_left_padding_by_a_bias(dtype, causal, backend):
    """Rows of padding see padding alone: they are the mean of its values."""
    q, k, v, d_o, d_lse = dense_problem(dtype)
    n, scale = q.shape[1], 0.25
    visible = np.tri(n, dtype=bool) if causal else np.ones((n, n), bool)
    hidden = np.arange(n) < np.array([13, 40])[:, None]

    def attend(q, k, v, bias):
        return ja.dot_product_attention(
            q, k, v, bias, scale=scale, is_causal=causal, return_residual=True,
            residual_dtype="float32",
        )  # fmt: skip

    run = jax.jit(lambda *x: (attend(*x), *jax.vjp(attend, *x)[1]((d_o, d_lse))))
    eps = 2e-5 if dtype == "float32" else 0.03
    for value in MASK_VALUES:
        bias = np.where(hidden, np.float32(value), np.float32(0))[:, None, None, :]
        bias = np.broadcast_to(bias, (2, 2, n, n)).copy()
        bias[1, 0] = value  # a head that sees nothing else at all
        got = jax.tree.leaves(run(q, k, v, jnp.asarray(bias)))
        want = dense_gradients(q, k, v, d_o, d_lse, bias, visible, scale)
        for name, a, b in zip(("o", "lse", "d_q", "d_k", "d_v", "d_bias"), got, want, strict=True):
            a, size = np.asarray(a, np.float64), 4 + np.abs(b).max(initial=0)
            if name == "lse":
                size = 4 + np.abs(b)
            bad = ~(np.abs(a - b) <= eps * size)
            assert not bad.any(), (value, name, np.argwhere(bad)[0], a[bad][0], b[bad][0])


def test_derivatives_of_all_kinds():
    """Forward mode and second derivatives, with a traced scale, of logits far from 0."""
    q, k, v, d_o, _ = dense_problem("float32", num_keys=9)
    q = q * 0 + 1.0
    k = (k > 0).astype(np.float32)  # ties in each row

    def ours(scale, size, v):
        return jnp.vdot(ja.dot_product_attention(q, size * k, v, scale=scale), d_o)

    def plain(scale, size, v):
        return jnp.vdot(jax.nn.dot_product_attention(q, size * k, v, scale=scale), d_o)

    for transform in (
        lambda f: lambda *x: jax.grad(f, 2)(*x),
        lambda f: lambda *x: jax.jvp(lambda v: jax.grad(f, 2)(*x[:2], v), x[2:], (x[2] ** 2,)),
    ):
        ours_of, plain_of = (jax.jit(transform(f)) for f in (ours, plain))
        for size in (1e5, 1e9, 1e30):
            arguments = jnp.float32(-1.0), jnp.float32(size), jnp.asarray(v)
            got, want = (jax.tree.leaves(f(*arguments)) for f in (ours_of, plain_of))
            for a, b in zip(got, want, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


# ---- merges --------------------------------------------------------------------------------------


@on_every_backend
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_merges(dtype, backend):
    """States with lse of all sizes, ties and empty states among them; with gradients."""
    sizes = np.array([0.0, 1e-38, 3.0, 1e5, 1e9, 1e30, 3e38, LARGEST])
    lse = np.stack([sizes, -sizes, sizes, np.full(8, -np.inf), 0.5 * sizes], 0)[..., None]
    lse = np.concatenate([lse, -lse[[1, 0, 2, 4]], lse[[1, 1]]], 0)[[0, 1, 2, 3, 4, 9, 10]]
    rng = np.random.default_rng(2)
    o = np.asarray(jnp.asarray(rng.normal(size=(len(lse), 8, 1, 16)), dtype))
    d_o = np.asarray(jnp.asarray(rng.normal(size=o.shape[1:]), dtype))
    lse = lse.astype(np.float32)
    largest = lse.max(0).astype(np.float64)
    p = np.exp(lse - largest)
    total = p.sum(0)
    p /= total
    (got_o, got_lse), pull = jax.vjp(ja.merge_states, jnp.asarray(o), jnp.asarray(lse))
    want_o = (p[..., None] * o.astype(np.float64)).sum(0)
    eps = 1e-5 if dtype == "float32" else 0.02
    np.testing.assert_allclose(np.asarray(got_o, np.float64), want_o, atol=eps)
    np.testing.assert_allclose(got_lse, largest + np.log(total), rtol=1e-6, atol=1e-5)
    d_parts, d_lse = pull((jnp.asarray(d_o), jnp.ones(got_lse.shape, jnp.float32)))
    dots = (o.astype(np.float64) * d_o.astype(np.float64)).sum(-1)
    want_d_lse = p * (dots - (p * dots).sum(0) + 1)
    want = p[..., None] * d_o.astype(np.float64)
    np.testing.assert_allclose(np.asarray(d_parts, np.float64), want, atol=eps)
    np.testing.assert_allclose(d_lse, want_d_lse, atol=1e-5)
