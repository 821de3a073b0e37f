"""Forward mode and second derivatives over plans, against the same ones of dense float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from variant_functions import alibi, documents, sigmoid_of

import jax_attn as ja
from helpers.attention_cases import Case, built
from helpers.checking import assert_same_bits
from helpers.variant_gradients import cotangents, oracle, plain_plan, split
from helpers.variants import of_lengths, sinks_and_window, variant_of

SMALL = Case("", (17, 0, 5, 1), (40, 4, 5, 70), head_dim_qk=16)
SHARED = Case(
    "", (1, 1, 2), (200, 210, 220), head_dim_qk=16, branches=("aaab", "aaac", "aaad"),
    branch_tokens=48, num_ctas=2,
)  # fmt: skip


def with_odd_functions(score, at, slopes):
    odd = jnp.sin(score) + jnp.arctan(slopes[at.head] * at.kv_pos) - jax.lax.erf(0.5 * score)
    return score + 0.3 * jnp.select([odd < 0, odd > 1.0], [odd * odd, 0.5 * odd], jnp.expm1(-odd))


NONE = (None, None, "softmax")
CASES = {
    "pages": (SMALL, NONE),
    "ragged": (dataclasses.replace(SMALL, page_size=None), NONE),
    "full": (dataclasses.replace(SMALL, causal=False, page_size=5), NONE),
    "window": (dataclasses.replace(SMALL, window_left=9, causal=False, window_right=3), NONE),
    "sinks": (dataclasses.replace(SMALL, sinks=True, logits_soft_cap=1.5, num_layers=2), NONE),
    "offsets": (dataclasses.replace(SMALL, q_offsets=(3, 1, -2, 69)), NONE),
    "empty": (Case("", (5, 3), (2, 0), head_dim_qk=16), NONE),
    "shared": (SHARED, NONE),
    "blocks": (Case("", (3, 40), (700, 900), 2, 1, 8, head_dim_vo=24, page_size=None), NONE),
    "bfloat16": (dataclasses.replace(SMALL, dtype="bfloat16"), NONE),
    "alibi": (SMALL, (alibi, sinks_and_window, "softmax")),
    "lengths": (SMALL, (of_lengths, documents, "softmax")),
    "functions": (SMALL, (with_odd_functions, None, "softmax")),
    "constant": (SMALL, (lambda score, at: 1.0, lambda at: at.kv_pos != 2, "softmax")),
    "sigmoid": (dataclasses.replace(SMALL, page_size=None), (sigmoid_of(2.0), documents, "none")),
}


def setting(name):
    """Attention of a case by the kernels and by the oracle, and where to differentiate it.

    Both are functions of a dict of q, k, v, sinks and float operands.
    """
    case, functions = CASES[name]
    batch = built(case, "normal")
    variant, operands = (None, {}) if functions == NONE else variant_of(*functions)
    plan = plain_plan(case, variant, "cpu")
    floats, others = split(operands)
    live, with_lse = sum(case.qo_lens), functions[2] != "none"

    def ours(x):
        read = {n: (x | others)[n] for n in (plan.spec.variant.names if plan.spec.variant else ())}
        out = ja.attention(
            x["q"], x["k"], x["v"], plan, layer=batch.layer, sinks=x.get("sinks"),
            variant_operands=read or None, return_lse=with_lse,
        )  # fmt: skip
        o, lse = out if with_lse else (out, jnp.zeros(out.shape[:2]))
        lse = jnp.where(jnp.isneginf(lse), 0, lse)
        return o[:live].astype(x["q"].dtype), lse[:live]

    def exact(x):
        read = {n: x[n] for n in floats} | {n: jnp.asarray(y) for n, y in others.items()}
        arrays = x["q"], x["k"], x["v"], x.get("sinks")
        return oracle(case, batch, functions, *arrays, read)

    at = {"q": batch.q, "k": batch.k, "v": batch.v} | floats
    if batch.sinks is not None:
        at["sinks"] = batch.sinks
    rng = np.random.default_rng(5)
    along = {n: rng.normal(size=x.shape).astype(x.dtype) for n, x in at.items()}
    return case, ours, exact, {n: jnp.asarray(x) for n, x in at.items()}, along


def loss_of(function, case):
    """A scalar of o and lse that is not linear in them."""
    d_o, d_lse = (np.float32(x[: sum(case.qo_lens)]) for x in cotangents(case))

    def loss(x):
        o, lse = function(x)
        o = o.astype(jnp.promote_types(o.dtype, jnp.float32))
        return jnp.sum(jnp.sin(o) * d_o) + jnp.sum(lse * lse * d_lse)

    return loss


def in_float64(run, *trees):
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(np.nan_to_num(np.float64(x))), trees)
        return jax.tree.map(np.asarray, run(*wide))


def compare(got, want, case):
    eps = 2e-4 if case.dtype == "float32" else 5e-2
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        error = np.abs(np.float64(a) - b).max(initial=0)
        size = np.abs(b).max(initial=0)
        assert error <= eps * size + 1e-30, f"{jax.tree_util.keystr(path)}: {error} of {size}"


@pytest.mark.parametrize("name", CASES)
def test_jvp(name):
    case, ours, exact, at, along = setting(name)
    primals, got = jax.jit(lambda *x: jax.jvp(ours, *x))((at,), (along,))
    assert_same_bits("o", primals[0], ours(at)[0])
    compare(got, in_float64(lambda *x: jax.jvp(exact, (x[0],), (x[1],))[1], at, along), case)
    if name == "pages":
        found = jax.linearize(ours, at)[1](along)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), found, got)


@pytest.mark.parametrize("name", ["sinks", "shared", "empty", "sigmoid"])
def test_jvp_of_grad(name):
    case, ours, exact, at, along = setting(name)

    def product(function):
        return lambda x, t: jax.jvp(jax.grad(loss_of(function, case)), (x,), (t,))

    first, got = jax.jit(product(ours))(at, along)
    by_kernels = jax.jit(jax.grad(loss_of(ours, case)))(at)
    jax.tree.map(lambda a, b: assert_same_bits("gradient", a, b), first, by_kernels)
    compare(got, in_float64(product(exact), at, along)[1], case)


def test_grad_of_grad_and_grad_of_jvp():
    case, ours, exact, at, along = setting("alibi")

    def by_reverse(function):
        grad = jax.grad(loss_of(function, case))
        return jax.grad(lambda x, t: sum(jnp.vdot(a, t[n]) for n, a in grad(x).items()))

    def by_forward(function):
        loss = loss_of(function, case)
        return jax.grad(lambda x, t: jax.jvp(loss, (x,), (t,))[1])

    want = in_float64(by_reverse(exact), at, along)
    compare(jax.jit(by_reverse(ours))(at, along), want, case)
    compare(jax.jit(by_forward(ours))(at, along), want, case)


def test_jacobians_and_hessian():
    case = Case("", (3,), (5,), 2, 1, 8, page_size=None)
    batch = built(case, "normal")
    plan = plain_plan(case, None, "cpu")
    fixed = {"k": jnp.asarray(batch.k), "v": jnp.asarray(batch.v)}

    def ours(q):
        return ja.attention(q, fixed["k"], fixed["v"], plan)[:3]

    def exact(q, k, v):
        return oracle(case, batch, NONE, q, k, v, None, {})[0]

    q = jnp.asarray(np.nan_to_num(batch.q))
    want = in_float64(jax.jacfwd(exact), q, *fixed.values())
    for jacobian in (jax.jacfwd, jax.jacrev):
        np.testing.assert_allclose(jax.jit(jacobian(ours))(q), want, atol=1e-5)
    got = jax.hessian(lambda q: jnp.sum(ours(q) ** 2))(q)
    of_exact = jax.hessian(lambda *x: jnp.sum(exact(*x) ** 2))
    np.testing.assert_allclose(got, in_float64(of_exact, q, *fixed.values()), atol=1e-4)


def test_in_a_shard_map_that_is_not_under_jit():
    case, ours, _, at, along = setting("alibi")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), "x")
    for run in (jax.grad(loss_of(ours, case)), lambda x: jax.jvp(ours, (x,), (along,))[1]):
        mapped = jax.shard_map(run, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), mapped(at), run(at))


def test_what_has_no_derivatives_says_so():
    spec = ja.AttentionSpec(
        2, 1, 16, dtype="float32", page_size=16, max_batch=1, max_qo_tokens=4, max_kv_pages=1,
        fresh_kv=True, target="cpu",
    )  # fmt: skip
    plan = ja.plan(spec, [0, 4], [4], [0, 1], [0])
    q, new, pages = jnp.ones((4, 2, 16)), jnp.ones((4, 1, 16)), jnp.ones((1, 16, 1, 16))

    def attend(q):
        return ja.attention(q, pages, pages, plan, k_new=new, v_new=new)

    for run in (jax.jvp, lambda f, x, t: jax.linearize(f, *x), lambda f, x, t: jax.hessian(f)(*x)):
        with pytest.raises(NotImplementedError, match="^attention: gradients: fresh_kv: not supp"):
            run(attend, (q,), (q,))
    with pytest.raises(NotImplementedError, match="^attention: vmap: not supported; put the batch"):
        jax.vmap(attend)(q[None])
