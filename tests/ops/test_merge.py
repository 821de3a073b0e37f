"""merge_state and merge_states against the float64 reference, and their algebraic laws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_attn as ja
from helpers.attention_cases import o_bound
from helpers.backends import on_every_backend, on_every_platform
from helpers.checking import assert_close_state, assert_same_bits
from jax_attn import reference

DTYPES = ("float32", "bfloat16", "float16")
merge = jax.jit(ja.merge_states)


def random_states(num_states, n, num_heads, head_dim, dtype, seed=0, spread=3.0, empty=0.25):
    """Random states, of which a share is the identity; some rows are empty in every state."""
    rng = np.random.default_rng(seed)
    o = rng.normal(size=(num_states, n, num_heads, head_dim)).astype(jnp.dtype(dtype))
    lse = (spread * rng.normal(size=o.shape[:-1])).astype(np.float32)
    is_empty = rng.random(lse.shape) < empty
    is_empty[:, ::7] = True
    o[is_empty], lse[is_empty] = 0, -np.inf
    return o, lse


def check(got, o_parts, lse_parts):
    want_o, want_lse = reference.merge_states(
        o_parts.astype(np.float64), lse_parts.astype(np.float64)
    )
    plain_o, _ = reference.merge_states(o_parts, lse_parts)
    dtype = o_parts.dtype.name
    o, lse = (np.asarray(x) for x in got)
    assert o.dtype == o_parts.dtype and lse.dtype == np.float32
    size = np.where(np.isfinite(want_lse), np.abs(want_lse), 0)
    assert_close_state(
        o, lse, want_o, want_lse, o_bound(want_o, plain_o, dtype), 1e-5 + size * 2.0**-21
    )


@on_every_backend
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [(1, 5, 2, 64), (2, 17, 3, 128), (3, 1, 1, 8), (5, 157, 7, 80), (17, 9, 2, 256), (2, 0, 4, 64)],
    ids=lambda shape: "x".join(map(str, shape)),
)
def test_merge_states(shape, dtype, backend):
    parts = random_states(*shape, dtype)
    first = merge(*parts)
    check(first, *parts)
    for name, a, b in zip(("o", "lse"), merge(*parts), first, strict=True):
        assert_same_bits(name, a, b)


@on_every_backend
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(2, 3, 2, 520), (3, 2, 1, 1032), (2, 2, 1, 4096), (9, 1, 1, 100_000), (3000, 1, 1, 8)]
)
def test_any_head_dim_and_any_number_of_states(shape, dtype, backend):
    """Columns are independent, so a wide row has the bits of its parts."""
    o, lse = random_states(*shape, dtype)
    got = merge(o, lse)
    check(got, o, lse)
    for first in range(0, shape[-1], 512 if shape[-1] < 5000 else 50_000):
        columns = slice(first, first + 504)
        part, part_lse = merge(o[..., columns], lse)
        assert_same_bits("o", part, np.asarray(got[0])[..., columns])
        assert_same_bits("lse", part_lse, got[1])


@on_every_backend
@pytest.mark.parametrize("n, num_heads", [(0, 0), (0, 3), (5, 0), (5, 3)])
def test_no_state_is_the_identity(n, num_heads, backend):
    for num_states in (0, 1, 4):
        o_parts = jnp.zeros((num_states, n, num_heads, 16), "bfloat16")
        o, lse = merge(o_parts, jnp.full(o_parts.shape[:-1], -jnp.inf))
        assert o.shape == (n, num_heads, 16) and not np.asarray(o, np.float32).any()
        assert lse.shape == (n, num_heads) and np.all(np.asarray(lse) == -np.inf)
    d_o, d_lse = jax.grad(lambda *x: ja.merge_states(*x)[0].sum().astype(jnp.float32), (0, 1))(
        jnp.zeros((0, n, num_heads, 16)), jnp.zeros((0, n, num_heads))
    )
    assert d_o.shape == (0, n, num_heads, 16) and d_lse.shape == (0, n, num_heads)


@on_every_backend
@pytest.mark.parametrize("spread", [0.0, 1e-3, 100.0, 1e5])
def test_any_size_of_lse(spread, backend):
    check(merge(*(parts := random_states(4, 40, 2, 64, "float32", spread=spread))), *parts)


@on_every_backend
@pytest.mark.parametrize("dtype", DTYPES)
def test_merge_state_is_merge_states_of_two(dtype, backend):
    o, lse = random_states(2, 33, 4, 96, dtype)
    pair = jax.jit(ja.merge_state)(o[0], lse[0], o[1], lse[1])
    for name, a, b in zip(("o", "lse"), pair, merge(o, lse), strict=True):
        assert_same_bits(name, a, b)


@on_every_backend
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_identity(dtype, backend):
    (o,), (lse,) = random_states(1, 21, 3, 64, dtype)
    none_o, none_lse = np.zeros_like(o), np.full_like(lse, -np.inf)
    for parts in (
        ((o,), (lse,)),
        ((o, none_o), (lse, none_lse)),
        ((none_o, o), (none_lse, lse)),
        ((none_o, none_o, o, none_o), (none_lse, none_lse, lse, none_lse)),
    ):
        got_o, got_lse = merge(np.stack(parts[0]), np.stack(parts[1]))
        np.testing.assert_array_equal(got_o, o)
        np.testing.assert_array_equal(got_lse, lse)
    got_o, got_lse = merge(np.stack([none_o] * 5), np.stack([none_lse] * 5))
    assert not np.asarray(got_o).any() and np.all(np.asarray(got_lse) == -np.inf)


@on_every_backend
def test_commutative_and_associative_up_to_rounding(backend):
    o, lse = random_states(6, 50, 2, 64, "float32")
    order = np.random.default_rng(0).permutation(6)
    check(merge(o[order], lse[order]), o, lse)
    left, right = merge(o[:2], lse[:2]), merge(o[2:], lse[2:])
    check(ja.merge_state(*left, *right), o, lse)


@on_every_backend
def test_nan_stays_in_its_row(backend):
    o, lse = random_states(3, 10, 2, 64, "float32", empty=0)
    clean_o, clean_lse = (np.asarray(x) for x in merge(o, lse))
    lse[1, 4, 1] = np.nan
    o[2, 8, 0, 3] = np.nan
    got_o, got_lse = (np.asarray(x) for x in merge(o, lse))
    nan_o = np.zeros(got_o.shape, bool)
    nan_o[4, 1], nan_o[8, 0, 3] = True, True
    np.testing.assert_array_equal(np.isnan(got_o), nan_o)
    assert np.isnan(got_lse[4, 1]) and np.isnan(got_lse).sum() == 1
    assert_same_bits("o", got_o[~nan_o], clean_o[~nan_o])
    assert_same_bits("lse", np.delete(got_lse.ravel(), 9), np.delete(clean_lse.ravel(), 9))


@on_every_backend
def test_states_that_are_not_finite(backend):
    """o of a state without keys is ignored; an infinite lse makes NaN."""
    o, lse = random_states(6, 12, 2, 64, "float32", empty=0)
    o[1, 3, 0, 5], o[5, 4, 1, 6] = np.inf, -np.inf
    o[2, 5], lse[2, 5] = np.nan, -np.inf
    o[:, 7], lse[:, 7] = np.inf, -np.inf
    lse[5, 8, 0] = np.inf
    with np.errstate(invalid="ignore"):
        want_o, want_lse = reference.merge_states(o.astype(np.float64), lse.astype(np.float64))
    assert np.isinf(want_o).sum() == 2 and np.isnan(want_o).sum() == 64
    assert not want_o[7].any() and np.isfinite(want_o[5]).all()
    got_o, got_lse = (np.asarray(x) for x in merge(o, lse))
    np.testing.assert_allclose(got_o, want_o, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got_lse, want_lse, rtol=1e-5, atol=1e-6)


@on_every_platform
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_are_those_of_the_reference(dtype, backend):
    o, lse = (jnp.asarray(x) for x in random_states(3, 15, 2, 32, dtype, spread=1.0))
    rng = np.random.default_rng(1)
    d_o = jnp.asarray(rng.normal(size=o.shape[1:]), dtype)
    d_lse = jnp.asarray(rng.normal(size=lse.shape[1:]), jnp.float32)

    def gradients(merge):
        return jax.jit(lambda o, lse: jax.vjp(merge, o, lse)[1]((d_o, d_lse)))(o, lse)

    got, want = gradients(ja.merge_states), gradients(reference.merge_states)
    for g, w in zip(got, want, strict=True):
        assert g.dtype == w.dtype and np.isfinite(np.asarray(g, np.float32)).all()
        tolerance = 1e-5 if dtype == "float32" else 2e-2
        np.testing.assert_allclose(
            np.asarray(g, np.float32), np.asarray(w, np.float32), rtol=tolerance, atol=tolerance
        )


def test_gradients_match_finite_differences():
    o, lse = random_states(2, 3, 1, 8, "float32", empty=0)

    def loss(o_a, lse_a, o_b, lse_b):
        o, lse = ja.merge_state(o_a, lse_a, o_b, lse_b)
        seen = jnp.where(jnp.isfinite(lse), lse, 0)
        return jnp.sum(jnp.sin(o)) + jnp.sum(jnp.cos(seen))

    arguments = [jnp.asarray(x) for x in (o[0], lse[0], o[1], lse[1])]
    gradients = jax.grad(loss, argnums=(0, 1, 2, 3))(*arguments)
    rng = np.random.default_rng(2)
    for i, gradient in enumerate(gradients):
        step = jnp.asarray(rng.normal(size=gradient.shape), jnp.float32) * 1e-2
        step = jnp.where(jnp.isfinite(arguments[i]), step, 0)
        ahead, behind = (
            loss(*arguments[:i], arguments[i] + sign * step, *arguments[i + 1 :])
            for sign in (1, -1)
        )
        np.testing.assert_allclose(
            jnp.sum(gradient * step), (ahead - behind) / 2, rtol=2e-2, atol=1e-4
        )


@on_every_platform
def test_attention_over_parts_merges_to_attention_over_all(backend):
    """Two plans over the two halves of one cache, as in prefix sharing and kv parallelism."""
    rng = np.random.default_rng(3)
    kv_len, cut = 300, 131
    shared = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim_qk": 64, "dtype": "float32"}
    spec = backend.spec(
        **shared, causal=False, page_size=None, max_batch=1, max_qo_tokens=3, max_kv_tokens=kv_len
    )
    q, k, v = (
        rng.normal(size=(n, h, 64)).astype(np.float32) for n, h in ((3, 4), (300, 2), (300, 2))
    )

    def attend(begin, end):
        plan = ja.plan(spec, [0, 3], [end - begin], kv_indptr=[begin, end])
        return ja.attention(q, k, v, plan, return_lse=True)

    o, lse = ja.merge_state(*attend(0, cut), *attend(cut, kv_len))
    want_o, want_lse = attend(0, kv_len)
    np.testing.assert_allclose(o, want_o, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-6)


# ---- triplets ------------------------------------------------------------------------------------


def direct_triplet(logits, v):
    """(unnormalised o, max, sum) of rows that see a prefix of the keys, as engines keep it."""
    peak = logits.max(-1, initial=-np.inf)
    weights = np.exp(logits - np.where(np.isneginf(peak), 0, peak)[..., None])
    return weights @ v, peak, weights.sum(-1)


def random_logits(seed=0, size=3.0):
    rng = np.random.default_rng(seed)
    logits = size * rng.normal(size=(6, 2, 33)).astype(np.float32)
    logits[
        np.broadcast_to(np.arange(33) >= np.arange(6)[:, None, None] * 6, logits.shape)
    ] = -np.inf
    return logits, rng.normal(size=(33, 16)).astype(np.float32)  # row 0 sees no key


@pytest.mark.parametrize("size", [0.0, 3.0, 1e5])
def test_states_from_triplets_and_back(size):
    o, peak, sums = direct_triplet(*random_logits(size=size))
    state = ja.state_from_triplet(o, peak, sums)
    with np.errstate(divide="ignore", invalid="ignore"):
        want_o, want_lse = o / sums[..., None], peak + np.log(sums)
    want_o[0], want_lse[0] = 0, -np.inf
    np.testing.assert_allclose(state[0], want_o, rtol=1e-6)
    np.testing.assert_allclose(state[1], want_lse, rtol=1e-6, atol=1e-6)
    # With its own max the triplet is the same again, with another max the state is the same.
    for got, want in zip(ja.state_to_triplet(*state, peak), (o, peak, sums), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5 + size * 2.0**-22, atol=1e-6)
    unit = ja.state_to_triplet(*state)
    np.testing.assert_array_equal(unit[2], np.where(np.isneginf(state[1]), 0.0, 1.0))
    for name, got, want in zip(("o", "lse"), ja.state_from_triplet(*unit), state, strict=True):
        assert_same_bits(name, got, want)


def test_triplets_merge_as_states_do():
    """vLLM's rule for triplets and merge_states agree, empty parts included."""
    logits, v = random_logits()
    parts = [
        direct_triplet(logits[..., s], v[s]) for s in (slice(0, 5), slice(5, 20), slice(20, 33))
    ]
    o, peak, sums = (np.stack(x) for x in zip(*parts, strict=True))
    top = np.maximum(peak.max(0), -1e30)
    scale = np.exp(peak - top)
    want = ja.state_from_triplet((scale[..., None] * o).sum(0), peak.max(0), (scale * sums).sum(0))
    got = ja.merge_states(*ja.state_from_triplet(o, peak, sums))
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-6, atol=1e-6)


def test_triplets_have_types_gradients_and_refusals():
    o, lse = random_states(1, 8, 2, 16, "bfloat16")
    triplet = ja.state_to_triplet(o[0], lse[0])
    assert all(x.dtype == jnp.float32 for x in triplet)
    back = ja.state_from_triplet(triplet[0].astype(jnp.bfloat16), *triplet[1:])
    assert_same_bits("o", back[0], o[0])

    def total(o, lse):
        o, lse = ja.state_from_triplet(*ja.state_to_triplet(o, lse))
        return jnp.sum(o) + jnp.sum(jnp.where(jnp.isneginf(lse), 0.0, lse))

    d_o, d_lse = jax.grad(total, (0, 1))(o[0].astype(jnp.float32), lse[0])
    live = np.where(np.isneginf(lse[0]), 0.0, 1.0)
    np.testing.assert_array_equal(d_o, np.broadcast_to(live[..., None], d_o.shape))
    np.testing.assert_array_equal(d_lse, live)
    with pytest.raises(ValueError, match=r"state_to_triplet: lse: expected float32\[8, 2\]"):
        ja.state_to_triplet(o[0], lse[0, :3])
    with pytest.raises(ValueError, match=r"state_from_triplet: sums: expected float32\[8, 2\]"):
        ja.state_from_triplet(o[0], lse[0], np.zeros_like(lse[0], np.int32))


@pytest.mark.parametrize("lead", [(), (5,), (2, 3), (2, 3, 4)])
def test_triplets_of_any_rank(lead):
    """[num_heads, head_dim_vo] is the smallest: the state of one row."""
    rng = np.random.default_rng(0)
    shape = (*lead, 3)
    o, peak = (rng.normal(size=x).astype(np.float32) for x in ((*shape, 16), shape))
    sums = rng.integers(0, 3, shape).astype(np.float32)
    got_o, got_lse = ja.state_from_triplet(o, peak, sums)
    assert got_o.shape == o.shape and got_lse.shape == shape
    rows = ja.state_from_triplet(
        *(x.reshape(-1, 1, *x.shape[len(shape) :]) for x in (o, peak, sums))
    )
    assert_same_bits("o", got_o.reshape(-1, 1, 16), rows[0])
    assert_same_bits("lse", got_lse.reshape(-1, 1), rows[1])
    again = ja.state_to_triplet(got_o, got_lse, peak)
    for array, want in zip(again, (o, peak, sums), strict=True):
        seen = np.broadcast_to(
            (sums > 0).reshape(sums.shape + (1,) * (array.ndim - sums.ndim)), array.shape
        )
        np.testing.assert_allclose(np.asarray(array)[seen], want[seen], rtol=1e-5, atol=1e-6)


def test_ranks_that_are_no_states():
    for shape in ((), (16,)):
        o, row = np.zeros(shape, np.float32), np.zeros(shape[:-1], np.float32)
        for call in (ja.state_to_triplet, lambda o, x: ja.state_from_triplet(o, x, x)):
            with pytest.raises(
                ValueError, match=r"o: expected \[..., num_heads, head_dim_vo\], got"
            ):
                call(o, row)
    for shape in ((16,), (2, 16), (1, 2, 16), (1, 1, 1, 2, 16), (2, 5, 3, 0)):
        o, row = np.zeros(shape, np.float32), np.zeros(shape[:-1], np.float32)
        with pytest.raises(ValueError, match=r"merge_states: o_parts: expected \[num_states, n,"):
            ja.merge_states(o, row)
        if len(shape) != 3:
            with pytest.raises(ValueError, match=r"merge_state: o_a: expected \[n, num_heads"):
                ja.merge_state(o, row, o, row)


def test_forward_mode_and_second_derivatives():
    """Derivatives of o and lse agree in any order of forward and reverse mode."""
    rng = np.random.default_rng(0)
    o, lse = rng.normal(size=(3, 5, 2, 8)), rng.normal(size=(3, 5, 2))
    lse[1, 2] = lse[:, 3] = -np.inf
    at = o.astype(np.float32), lse.astype(np.float32)
    along = tuple(rng.normal(size=x.shape).astype(np.float32) for x in at)

    def plain(o, lse):
        top = jax.lax.stop_gradient(jnp.max(lse, axis=0))
        shares = jnp.exp(lse - jnp.where(jnp.isneginf(top), 0, top)[None])
        total = jnp.sum(shares, axis=0)
        safe = jnp.where(total > 0, total, 1)
        merged = jnp.sum(shares[..., None] * o, axis=0) / safe[..., None]
        return merged, jnp.where(total > 0, top + jnp.log(safe), 0)

    def ours(o, lse):
        o, lse = ja.merge_states(o, lse)
        return o, jnp.where(jnp.isneginf(lse), 0, lse)

    def second(function):
        def loss(*x):
            return sum(jnp.sum(jnp.sin(y)) for y in function(*x))

        return jax.jit(lambda: jax.jvp(jax.grad(loss, (0, 1)), at, along)[1])()

    for got, want in (
        (jax.jvp(ours, at, along)[1], jax.jvp(plain, at, along)[1]),
        (second(ours), second(plain)),
    ):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-5), got, want)
