"""Calls that come from elsewhere against the references of where they come from."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention_reference
from jax.experimental.pallas.ops.tpu.ragged_paged_attention.kernel import (
    ref_ragged_paged_attention,
)

import jax_attn as ja
from helpers.paths import ROOT
from jax_attn import compat

RNG = np.random.default_rng(0)


def normal(*shape, dtype=np.float32):
    return jnp.asarray(RNG.normal(size=shape), dtype)


# ---- jax.experimental.pallas.ops.{tpu, gpu}.paged_attention


@pytest.mark.parametrize("door", ["tpu", "gpu"])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_paged_attention(num_kv_heads, soft_cap, door):
    batch, page_size, num_slots, num_pages, head_dim = 5, 8, 6, 40, 64
    q = normal(batch, 4, head_dim) / 8
    k, v = (normal(num_kv_heads, num_pages, page_size, head_dim) for _ in range(2))
    lengths = np.int32([48, 1, 9, 0, 30])
    table = RNG.permutation(num_pages)[: batch * num_slots].reshape(batch, num_slots)
    dense = [jnp.moveaxis(x[:, table], 0, -2).reshape(batch, -1, num_kv_heads, 64) for x in (k, v)]
    want = paged_attention_reference(q, *dense, jnp.asarray(lengths), attn_logits_soft_cap=soft_cap)
    table[1, 1:] = 10**6  # what is not read
    options = {"attn_logits_soft_cap": soft_cap, "pages_per_compute_block": 4, "mask_value": -1e10}
    table = np.int32(table)
    if door == "gpu":
        call = jax.jit(lambda *x: compat.paged_attention_gpu(*x, **options, block_h=16, k_splits=4))
        got = call(q, k, v, table, lengths)
    else:
        got = jax.jit(lambda *x: compat.paged_attention(*x, **options))(q, k, v, lengths, table)
    seen = lengths > 0
    np.testing.assert_allclose(got[seen], want[seen], rtol=1e-5, atol=1e-5)
    assert not np.asarray(got[~seen]).any()


def test_paged_attention_gpu_without_lengths():
    q, (k, v) = normal(2, 4, 64) / 8, normal(2, 2, 9, 8, 64)
    table = np.int32([[3, 1, 8], [0, 2, 5]])
    dense = [jnp.moveaxis(x[:, table], 0, -2).reshape(2, 24, 2, 64) for x in (k, v)]
    want = paged_attention_reference(q, *dense, None)
    got = compat.paged_attention_gpu(q, k, v, table, None)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


# ---- RPA v3


def interleaved(k, v):
    """[..., heads, head_dim] of keys and of values -> [..., 2 * heads, head_dim]."""
    return jnp.stack([k, v], axis=-2).reshape(*k.shape[:-2], -1, k.shape[-1])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sliding_window": 5},
        {"soft_cap": 3.0},
        {"k_scale": 0.5, "v_scale": 2.0},
        {"q_scale": 0.25, "soft_cap": 3.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("packing,width", [(1, 64), (2, 128)])
def test_ragged_paged_attention(packing, width, options):
    """Prefill, chunked prefill and decode together, and sequences that are not there."""
    num_heads, num_kv_heads, head_dim, page_size, num_slots, num_pages = 4, 2, 64, 8, 6, 40
    q_lens, kv_lens = [1, 1, 12, 7], np.int32([20, 1, 30, 7, 99, 99])
    cu_q_lens = np.int32([0, *np.cumsum(q_lens), -5, -5])
    distribution = np.int32([2, 2, 4])
    num_tokens, total = sum(q_lens), 25
    q = normal(total, num_heads, head_dim)
    k, v = (normal(total, num_kv_heads, head_dim) for _ in range(2))
    pages = jnp.pad(
        interleaved(*normal(2, num_pages, page_size, num_kv_heads, head_dim)),
        ((0, 0),) * 3 + ((0, width - head_dim),),
    )
    table = np.int32(RNG.permutation(num_pages)[: 6 * num_slots].reshape(6, num_slots))
    written = np.array(pages)
    token = 0
    for seq, n in enumerate(q_lens):
        for position in range(kv_lens[seq] - n, kv_lens[seq]):
            slot = table[seq, position // page_size], position % page_size
            written[slot][:, :head_dim] = interleaved(k[token], v[token])
            token += 1
    # Dividing by a power of two and multiplying by it again rounds nothing away.
    known = {name: x for name, x in options.items() if name != "q_scale"}
    want = ref_ragged_paged_attention(
        q[:num_tokens], jnp.asarray(written[..., :head_dim]), kv_lens[:4], table[:4],
        cu_q_lens[:5], np.int32([4]), sm_scale=0.2, **known,
    )  # fmt: skip
    cache = pages.reshape(num_pages, page_size, -1, packing, width)

    def call(q, k, v, cache, *lengths, **more):
        return compat.ragged_paged_attention(
            q, k, v, cache, *lengths, sm_scale=0.2, **options, **more, vmem_limit_bytes=1 << 20
        )

    lengths = kv_lens, table.ravel(), cu_q_lens, distribution
    o, cache = jax.jit(call)(q, k, v, cache, *lengths)
    np.testing.assert_allclose(o[:num_tokens], want, rtol=1e-5, atol=1e-5)
    assert not np.asarray(o[num_tokens:]).any()
    np.testing.assert_array_equal(cache.reshape(written.shape), written)
    again, same = call(q, 0 * k, 0 * v, cache, *map(jnp.asarray, lengths), update_kv_cache=False)
    np.testing.assert_allclose(again, o, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(same, cache)


@pytest.mark.parametrize("causal", [True, False])
def test_ragged_paged_attention_with_a_sink(causal):
    """Masked by cause or not, scaled, in a dtype of its own, against the float64 reference."""
    q, (k, v) = normal(5, 4, 64), normal(2, 5, 2, 64)
    cache, sinks = normal(6, 8, 4, 1, 64), normal(4)
    kv_lens, cu_q_lens = np.int32([20, 3]), np.int32([0, 2, 5])
    table = np.int32([[4, 0, 2], [1, 5, 3]])
    o, cache = compat.ragged_paged_attention(
        q, k, v, cache, kv_lens, table.ravel(), cu_q_lens, np.int32([0, 0, 2]), sinks,
        use_causal_mask=causal, sm_scale=0.2, k_scale=0.5, v_scale=3.0, out_dtype=jnp.bfloat16,
    )  # fmt: skip
    assert o.dtype == jnp.bfloat16
    for seq, kv_len in enumerate(kv_lens):
        rows = np.float64(cache)[table[seq], :, :, 0].reshape(-1, 2, 2, 64)[:kv_len]
        keys, values = (np.repeat(rows[:, :, i], 2, axis=1) for i in (0, 1))
        part = slice(*cu_q_lens[seq : seq + 2])
        logits = 0.1 * np.einsum("qhd,khd->qhk", np.float64(q[part]), keys)
        if causal:
            position = kv_len - logits.shape[0] + np.arange(logits.shape[0])
            logits[np.arange(kv_len) > position[:, None, None] + np.zeros((1, 4, 1))] = -np.inf
        weights = np.exp(logits)
        weights /= weights.sum(axis=-1, keepdims=True) + np.exp(np.float64(sinks))[:, None]
        want = 3 * np.einsum("qhk,khd->qhd", weights, values)
        np.testing.assert_allclose(np.float64(o[part]), want, rtol=1e-2, atol=1e-3)


def test_what_does_not_fit_is_said():
    q, pages, n, table = normal(2, 4, 8), normal(2, 3, 8, 8), np.int32([1, 2]), np.zeros((2, 3))
    for call, error, match in (
        (lambda: compat.paged_attention(q, pages, pages[1:], n, table), ValueError, "v_pages: exp"),
        (
            lambda: compat.paged_attention(q, pages, pages, table, n),
            ValueError,
            "lengths: expected",
        ),
        (
            lambda: compat.paged_attention(q, (), pages, n, table),
            NotImplementedError,
            "k_pages: arr",
        ),
        (lambda: compat.paged_attention(q, pages, pages, n, table, blocks=3), TypeError, "blocks"),
        (
            lambda: compat.paged_attention_gpu(q, pages, pages, n, table),
            ValueError,
            "paged_attention_gpu: lengths: expected",
        ),
        (
            lambda: compat.paged_attention_gpu(q, pages, pages, table, n, v_scales_pages=n),
            NotImplementedError,
            "paged_attention_gpu: v_scales_pages: None",
        ),
        (
            lambda: compat.paged_attention_gpu(q, pages, pages, table[:1], n),
            ValueError,
            "paged_attention_gpu: block_tables: expected",
        ),
        (
            lambda: compat.ragged_paged_attention(
                q, q, q, normal(3, 8, 4, 1, 8), n, n, np.zeros(3), np.zeros(3)
            ),
            ValueError,
            "kv_cache: expected 8 heads",
        ),
        (lambda: compat.flax_attention(q, q, q, dropout_rate=0.1), NotImplementedError, "dropout"),
        (lambda: compat.flax_attention(q, q, q, module=1), NotImplementedError, "sow_weights"),
    ):
        with pytest.raises(error, match=match):
            call()


# ---- Flax, Equinox: where they are installed


@pytest.mark.parametrize("lead", [(2,), (2, 3)])
def test_flax_nnx(lead):
    nnx = pytest.importorskip("flax.nnx", reason="Flax is not installed")
    x = normal(*lead, 9, 16)
    mask = nnx.make_causal_mask(jnp.ones((*lead, 9)))
    layers = [
        nnx.MultiHeadAttention(4, 16, decode=False, rngs=nnx.Rngs(0), **more)
        for more in ({}, {"attention_fn": compat.flax_attention})
    ]
    want, got = (
        nnx.value_and_grad(lambda f: jnp.sum(jnp.sin(f(x, mask=mask, is_causal=True))))(layer)
        for layer in layers
    )
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_flax_linen():
    nn = pytest.importorskip("flax.linen", reason="Flax is not installed")
    x = normal(2, 9, 16)
    mask = nn.make_causal_mask(jnp.ones((2, 9)))  # of float32
    plain, ours = (
        nn.MultiHeadDotProductAttention(4, **more)
        for more in ({}, {"attention_fn": compat.flax_attention})
    )
    variables = plain.init(jax.random.key(0), x)
    want, got = (
        jax.value_and_grad(lambda w, f=f: jnp.sum(jnp.sin(f.apply(w, x, mask=mask))))(variables)
        for f in (plain, ours)
    )
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_equinox():
    """The layer of the page, mapped over a batch, against jax.nn."""
    eqx = pytest.importorskip("equinox", reason="Equinox is not installed")
    text = (ROOT / "docs/compat.md").read_text()
    code = text[text.index("import equinox") :].partition("```")[0]
    results = []
    for attend in (ja.dot_product_attention, jax.nn.dot_product_attention):
        space = {}
        exec(code, space)
        space["ja"] = types.SimpleNamespace(dot_product_attention=attend)
        layer = space["Attention"](16, 4, jax.random.key(0))
        x = jax.random.normal(jax.random.key(1), (3, 9, 16))
        results.append(
            eqx.filter_value_and_grad(lambda f, x=x: jnp.sum(jnp.sin(jax.vmap(f)(x))))(layer)
        )
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
