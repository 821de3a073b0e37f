"""The oracle itself, against a loop that follows the definition word by word and against jax.nn."""

import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_attn import reference


def make_spec(**kw):
    fields = {
        "variant": None,
        "causal": False,
        "window_left": -1,
        "window_right": -1,
        "logits_soft_cap": 0.0,
        "sm_scale": None,
        "page_size": 4,
        "eight_bit_products": False,
    }
    return SimpleNamespace(**(fields | kw))


def attention_by_definition(q, k, v, q_offset, spec, sinks):
    """One request, one number at a time. q [T, Hq, D], k [S, Hkv, D], v [S, Hkv, Dv], float64."""
    o = np.zeros((q.shape[0], q.shape[1], v.shape[2]))
    lse = np.full(q.shape[:2], -np.inf)
    right = 0 if spec.causal else spec.window_right
    for t, h in np.ndindex(*lse.shape):
        kv_head = h // (q.shape[1] // k.shape[1])
        pos = q_offset + t
        seen = [
            j
            for j in range(len(k))
            if (spec.window_left < 0 or j >= pos - spec.window_left)
            and (right < 0 or j <= pos + right)
        ]
        if not seen:
            continue
        scale = spec.sm_scale or 1 / math.sqrt(q.shape[2])
        logits = [scale * sum(q[t, h] * k[j, kv_head]) for j in seen]
        if spec.logits_soft_cap:
            cap = spec.logits_soft_cap
            logits = [cap * math.tanh(x / cap) for x in logits]
        total = sum(math.exp(x) for x in logits) + (0 if sinks is None else math.exp(sinks[h]))
        lse[t, h] = math.log(total)
        for x, j in zip(logits, seen, strict=True):
            o[t, h] += math.exp(x) / total * v[j, kv_head]
    return o, lse


@pytest.mark.parametrize("use_sinks", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": True, "window_left": 3},
        {"window_left": 2, "window_right": 1},
        {"window_right": 4, "logits_soft_cap": 1.5, "sm_scale": 0.7},
    ],
    ids=str,
)
def test_attention_follows_the_definition(options, use_sinks):
    rng = np.random.default_rng(0)
    spec = make_spec(**options)
    qo_lens, kv_lens = np.array([3, 0, 5, 2, 4]), np.array([7, 3, 5, 0, 2])
    qo_indptr = np.concatenate([[0], np.cumsum(qo_lens)])
    num_pages = -(-kv_lens // 4)
    page_indptr = np.concatenate([[0], np.cumsum(num_pages)])
    page_indices = rng.permutation(20)[: page_indptr[-1]]
    k_pages, v_pages = np.full((2, 20, 4, 2, 8), np.nan), np.full((2, 20, 4, 2, 6), np.nan)
    ks = [rng.normal(size=(n, 2, 8)) for n in kv_lens]
    vs = [rng.normal(size=(n, 2, 6)) for n in kv_lens]
    for r, n in enumerate(kv_lens):
        for j in range(n):
            page = page_indices[page_indptr[r] + j // 4]
            k_pages[1, page, j % 4], v_pages[1, page, j % 4] = ks[r][j], vs[r][j]
    q = rng.normal(size=(17, 6, 8))
    q[14:] = np.nan
    sinks = rng.normal(size=6) if use_sinks else None
    q_offsets = np.array([4, 0, 1, 0, -2]) if options.get("window_left") == 2 else None

    o, lse = reference.attention(
        q,
        k_pages,
        v_pages,
        qo_indptr,
        kv_lens,
        page_indptr,
        page_indices,
        spec=spec,
        layer=1,
        sinks=sinks,
        q_offsets=q_offsets,
    )

    assert o.dtype == lse.dtype == np.float64
    for r in range(5):
        rows = slice(qo_indptr[r], qo_indptr[r + 1])
        q_offset = kv_lens[r] - qo_lens[r] if q_offsets is None else q_offsets[r]
        want_o, want_lse = attention_by_definition(q[rows], ks[r], vs[r], q_offset, spec, sinks)
        np.testing.assert_allclose(o[rows], want_o, rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(lse[rows], want_lse, rtol=1e-12)
    assert not o[14:].any() and np.all(lse[14:] == -np.inf)

    ragged_o, ragged_lse = reference.attention(
        q,
        np.concatenate(ks),
        np.concatenate(vs),
        qo_indptr,
        kv_lens,
        spec=spec,
        sinks=sinks,
        q_offsets=q_offsets,
    )
    np.testing.assert_array_equal(ragged_o, o)
    np.testing.assert_array_equal(ragged_lse, lse)


def test_attention_of_jax_arrays_and_of_numpy_arrays_agree():
    rng = np.random.default_rng(1)
    q, k, v = (jnp.asarray(rng.normal(size=(9, h, 16)), jnp.bfloat16) for h in (4, 2, 2))
    lens = {"qo_indptr": np.array([0, 2, 8]), "kv_lens": np.array([4, 5])}
    spec = make_spec(causal=True)
    o, lse = reference.attention(q, k, v, **lens, spec=spec, sinks=jnp.zeros(4))
    want_o, want_lse = reference.attention(
        *(np.asarray(x) for x in (q, k, v)), **lens, spec=spec, sinks=np.zeros(4, np.float32)
    )
    assert isinstance(o, jax.Array) and isinstance(want_o, np.ndarray)
    assert o.dtype == want_o.dtype == jnp.bfloat16 and lse.dtype == want_lse.dtype == np.float32
    np.testing.assert_allclose(
        o.astype(np.float32), want_o.astype(np.float32), rtol=2**-7, atol=2**-9
    )
    np.testing.assert_allclose(lse, want_lse, rtol=1e-5)


@pytest.mark.parametrize("what", ["k", "v"])
def test_nan_reaches_the_rows_that_see_it_and_no_other(what):
    rng = np.random.default_rng(2)
    arrays = {name: rng.normal(size=(6, 1, 8)) for name in "qkv"}
    arrays[what][3] = np.nan
    o, lse = reference.attention(
        *arrays.values(),
        np.array([0, 6]),
        np.array([6]),
        spec=make_spec(causal=True, window_left=1),
    )
    bad = np.isnan(o).any((1, 2))
    np.testing.assert_array_equal(bad, [False, False, False, True, True, False])
    np.testing.assert_array_equal(np.isnan(lse[:, 0]), bad if what == "k" else np.zeros(6, bool))


def test_infinities_reach_the_rows_that_see_them_and_no_other():
    rng = np.random.default_rng(2)
    q, k, v = (rng.normal(size=(6, 1, 8)) for _ in "qkv")
    v[3, 0, 1], v[3, 0, 2], v[4, 0, 2] = np.inf, -np.inf, np.inf
    spec = make_spec(causal=True, window_left=1)
    o, lse = reference.attention(q, k, v, np.array([0, 6]), np.array([6]), spec=spec)
    assert np.isfinite(lse).all() and np.isfinite(o[[0, 1, 2]]).all()
    np.testing.assert_array_equal(o[3:, 0, 1], [np.inf, np.inf, o[5, 0, 1]])
    np.testing.assert_array_equal(o[3:, 0, 2], [-np.inf, np.nan, np.inf])
    assert np.isfinite(np.delete(o, [1, 2], axis=2)).all() and np.isfinite(o[5, 0, 1])


def test_infinite_logits():
    """+inf makes NaN; -inf has no weight, and a row with nothing else sees no key."""
    q, k, v = np.ones((3, 1, 8)), np.zeros((3, 1, 8)), np.ones((3, 1, 8))
    k[0, 0, 3], k[2, 0, 3] = -np.inf, np.inf
    spec = make_spec(causal=True)
    o, lse = reference.attention(q, k, v, np.array([0, 3]), np.array([3]), spec=spec)
    np.testing.assert_array_equal(o[:, 0, 0], [0, 1, np.nan])
    np.testing.assert_array_equal(lse[:, 0], [-np.inf, 0, np.nan])
    capped = make_spec(causal=True, logits_soft_cap=5.0)
    o, lse = reference.attention(q, k, v, np.array([0, 3]), np.array([3]), spec=capped)
    np.testing.assert_allclose(o[:, 0, 0], 1)
    np.testing.assert_allclose(lse[[0, 2], 0], [-5, np.logaddexp(np.logaddexp(-5, 0), 5)])


@pytest.mark.parametrize("layer", [None, 1])
def test_append_writes_the_new_tokens_and_nothing_else(layer):
    lead = () if layer is None else (3,)
    k_pages = jnp.full((*lead, 6, 2, 1, 4), jnp.nan)
    v_pages = jnp.full((*lead, 6, 2, 1, 3), jnp.nan)
    k_new = jnp.arange(5 * 4.0).reshape(5, 1, 4)
    v_new = -jnp.arange(5 * 3.0).reshape(5, 1, 3)
    k_pages, v_pages = reference.append_kv(
        k_pages,
        v_pages,
        k_new,
        v_new,
        qo_indptr=np.array([0, 3, 3, 4]),
        kv_lens=np.array([5, 2, 1]),
        page_indptr=np.array([0, 3, 4, 5]),
        page_indices=np.array([5, 0, 2, 1, 3]),
        layer=layer,
    )
    places = [(0, 0), (0, 1), (2, 0), (3, 0)]
    for pages, new in ((k_pages, k_new), (v_pages, v_new)):
        want = np.full(pages.shape, np.nan)
        for token, place in enumerate(places):
            want[place if layer is None else (layer, *place)] = new[token]
        np.testing.assert_array_equal(pages, want)


def test_merge_states_of_parts_is_attention_over_all_keys():
    rng = np.random.default_rng(3)
    q, k, v = (rng.normal(size=(n, 2, 8)) for n in (4, 10, 10))
    everything = np.ones((4, 10), bool)
    want_o, want_lse = reference.attention_dense(q, k, v, everything)
    borders = [0, 3, 3, 9, 10]  # one of the parts is empty
    parts = [
        reference.attention_dense(q, k[a:b], v[a:b], everything[:, a:b])
        for a, b in zip(borders, borders[1:], strict=False)
    ]
    o, lse = reference.merge_states(*(np.stack(x) for x in zip(*parts, strict=True)))
    np.testing.assert_allclose(o, want_o, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-12)

    nothing = np.zeros_like(o), np.full_like(lse, -np.inf)
    for state in ((o, lse), nothing):
        merged_o, merged_lse = reference.merge_state(*state, *nothing)
        np.testing.assert_array_equal(merged_o, state[0])
        np.testing.assert_array_equal(merged_lse, state[1])
    grads = jax.grad(
        lambda *x: sum(jnp.where(jnp.isfinite(y), y, 0).sum() for y in reference.merge_state(*x)),
        argnums=(0, 1, 2, 3),
    )(*(jnp.asarray(x) for x in (*nothing, *nothing)))
    assert all(np.isfinite(g).all() for g in grads)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"scale": 0.3, "local_window_size": (2, 1)},
        {"is_causal": True, "local_window_size": 3},
        {"query_seq_lengths": np.array([3, 5]), "key_value_seq_lengths": np.array([7, 2])},
    ],
    ids=str,
)
@pytest.mark.parametrize("batched", [True, False])
def test_dot_product_attention_is_that_of_jax(options, batched):
    rng = np.random.default_rng(4)
    q, k, v = (
        jnp.asarray(rng.normal(size=s), jnp.float32)
        for s in ((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8))
    )
    bias = jnp.asarray(rng.normal(size=(1, 4, 5, 7)), jnp.float32)
    mask = jnp.asarray(rng.random((2, 1, 5, 7)) < 0.9).at[..., 0].set(True)
    if not batched:
        q, k, v, mask = q[0], k[0], v[0], mask[:1]
        options = {n: x[:1] if n.endswith("lengths") else x for n, x in options.items()}
    want = jax.nn.dot_product_attention(q, k, v, bias, mask, **options)
    got = reference.dot_product_attention(q, k, v, bias, mask, **options)
    # Rows that see no key differ on purpose: 0 here, a mean of values in jax.nn.
    some = np.asarray(jnp.abs(got).max(-1, keepdims=True) > 0)
    assert some.mean() > 0.4
    np.testing.assert_allclose(
        np.where(some, got, 0), np.where(some, want, 0), rtol=2e-5, atol=2e-6
    )
