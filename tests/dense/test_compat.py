"""Calls in other libraries' form, against those libraries' references."""

import inspect
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.gpu.paged_attention import (
    paged_attention as paged_attention_on_gpu,
)
from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention_reference
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention
from jax.experimental.pallas.ops.tpu.ragged_paged_attention.kernel import (
    ref_ragged_paged_attention,
)

import jax_attn as ja
from helpers.paths import ROOT
from jax_attn import compat

RNG = np.random.default_rng(0)


def normal(*shape, dtype=np.float32):
    return jnp.asarray(RNG.normal(size=shape), dtype)


# ---- keywords

# Those of functions that are not installed in every environment, of their newest versions.
OF_RPA = """
queries keys values kv_cache kv_lens page_indices cu_q_lens distribution use_causal_mask
update_kv_cache skip_kv_mask sm_scale sliding_window soft_cap out_dtype mask_value q_scale k_scale
v_scale chunk_prefill_size d_block_sizes p_block_sizes m_block_sizes vmem_limit_bytes debug_mode
disable_bounds_checks disable_semaphore_checks attention_sink
"""
OF_FLAX = """
query key value bias mask broadcast_dropout dropout_rng dropout_rate deterministic dtype precision
module promote_dtype is_causal force_fp32_for_softmax einsum_dot_general qk_attn_weights_einsum
attn_weights_value_einsum
"""


@pytest.mark.parametrize(
    "ours, theirs",
    [
        (compat.paged_attention, inspect.signature(paged_attention).parameters),
        (compat.paged_attention_gpu, inspect.signature(paged_attention_on_gpu).parameters),
        (compat.ragged_paged_attention, OF_RPA.split()),
        (compat.flax_attention, OF_FLAX.split()),
        (ja.dot_product_attention, inspect.signature(jax.nn.dot_product_attention).parameters),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_keywords_of_the_originals(ours, theirs):
    own = [*inspect.signature(ours).parameters, *compat._TUNING.get(ours.__name__, ())]
    assert not {*theirs} - {*own}


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
    table[1, 1:] = 10**6  # not read
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
    """Prefill, chunked prefill and decode together, and unused sequence slots."""
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
    # Dividing by a power of two and multiplying by it again does not round.
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
    """Causal or not, scaled, with a dtype of its own, against the float64 reference."""
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


def rpa_batch(seq_lens, num_heads, head_dim, dtype, cache_dtype=None, page_size=16):
    """Arguments of RPA v3 as its own tests make them.

    Pages have no order, and what may not be read is NaN: unused slots and pages. Unused entries of
    the page table are -2^31.
    """
    rng = np.random.default_rng(1234)
    cache_dtype = jnp.dtype(cache_dtype or dtype)
    packing = 4 // cache_dtype.itemsize
    num_q_heads, num_kv_heads = num_heads
    num_tokens, width = sum(n for n, _ in seq_lens) + 5, -(-head_dim // 128) * 128
    max_seqs, pages_each = len(seq_lens) + 2, -(-max(n for _, n in seq_lens) // page_size)
    num_pages = len(seq_lens) * pages_each + 2
    heads = -(-2 * num_kv_heads // packing) * packing

    def random(*shape, dtype):
        return jnp.asarray(rng.normal(size=shape), jnp.float32).astype(dtype)

    q = random(num_tokens, num_q_heads, head_dim, dtype=dtype)
    k, v = (random(num_tokens, num_kv_heads, head_dim, dtype=cache_dtype) for _ in range(2))
    cache = np.asarray(random(num_pages, page_size, heads, width, dtype=cache_dtype)).copy()
    ids = rng.permutation(num_pages)
    table = np.full((max_seqs, pages_each), -(2**31), np.int32)
    is_used = np.zeros((num_pages, page_size), bool)
    for r, (_, kv_len) in enumerate(seq_lens):
        used = -(-kv_len // page_size)
        table[r, :used] = ids[r * pages_each : r * pages_each + used]
        at = np.arange(kv_len)
        is_used[table[r, at // page_size], at % page_size] = True
    cache[~is_used] = np.nan
    kv_lens, cu_q_lens = np.zeros(max_seqs, np.int32), np.zeros(max_seqs + 1, np.int32)
    kv_lens[: len(seq_lens)] = [n for _, n in seq_lens]
    cu_q_lens[1 : len(seq_lens) + 1] = np.cumsum([n for n, _ in seq_lens])
    cache = jnp.asarray(cache).reshape(num_pages, page_size, heads // packing, packing, width)
    lengths = kv_lens, table.ravel(), cu_q_lens, np.int32([0, 0, len(seq_lens)])
    return q, k, v, cache, *map(jnp.asarray, lengths)


def rpa_oracle(
    q, k, v, cache, kv_lens, table, cu_q_lens, distribution, *, update_kv_cache=True,
    use_causal_mask=True, sliding_window=None, soft_cap=None, sm_scale=1.0, q_scale=None,
    k_scale=None, v_scale=None, **ignored,
):  # fmt: skip
    """(o of the tokens, cache) by definition, in float64, from their documentation."""
    num_pages, page_size, heads, packing, width = cache.shape
    rows = np.asarray(cache).reshape(num_pages, page_size, heads * packing, width).copy()
    head_dim, num_kv_heads = q.shape[2], k.shape[1]
    group, table = q.shape[1] // num_kv_heads, np.asarray(table).reshape(len(kv_lens), -1)
    results = []
    for r in range(int(distribution[2])):
        part, kv_len = slice(int(cu_q_lens[r]), int(cu_q_lens[r + 1])), int(kv_lens[r])
        q_len, at = part.stop - part.start, np.arange(kv_len)
        slots = table[r, at // page_size], at % page_size
        mine = rows[slots]
        if update_kv_cache:
            new = np.zeros((q_len, *mine.shape[1:]), mine.dtype)
            pairs = np.stack([k[part], v[part]], axis=2).reshape(q_len, -1, head_dim)
            new[:, : 2 * num_kv_heads, :head_dim] = pairs
            mine[kv_len - q_len :] = new
            rows[slots] = mine
        keys, values = (
            np.repeat(np.float64(mine[:, i : 2 * num_kv_heads : 2, :head_dim]), group, axis=1)
            for i in (0, 1)
        )
        queries = np.float64(q[part])
        if q_scale is not None:
            queries = np.float64((q[part] / q_scale).astype(cache.dtype)) * q_scale
        logits = np.einsum("qhd,khd->hqk", queries, keys) * sm_scale * (k_scale or 1)
        if soft_cap is not None:
            logits = soft_cap * np.tanh(logits / soft_cap)
        position = (kv_len - q_len + np.arange(q_len))[:, None]
        if use_causal_mask:
            logits = np.where(at <= position, logits, -np.inf)
        if sliding_window is not None:
            logits = np.where(at > position - sliding_window, logits, -np.inf)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        results.append(np.einsum("hqk,khd->qhd", weights, values) * (v_scale or 1))
    return np.concatenate(results), rows.reshape(cache.shape)


PREFILLS = ((19, 33), (13, 18), (6, 25))
DECODES = ((1, 18), (1, 129), (1, 64), (1, 1), (1, 87))
MIXED = ((5, 18), (1, 129), (40, 97), (1, 31), (3, 64), (17, 17))
BF16 = {"dtype": jnp.bfloat16}


def eight_bits(cache_dtype, *scales, **more):
    names = zip(("q_scale", "k_scale", "v_scale"), scales, strict=True)
    return BF16 | {"cache_dtype": cache_dtype, **dict(names), **more}


# The grid of RPA v3's own tests, with shorter sequences: (q_len, kv_len) of each, heads, head_dim,
# and options. dtype: float32 unless it is given.
RPA = [
    *(
        (PREFILLS, (8, 2), 128, {"use_causal_mask": c} | t)
        for c in (True, False)
        for t in ({}, BF16)
    ),
    *((lens, (8, 2), 128, t) for lens in (DECODES, MIXED) for t in ({}, BF16)),
    *((lens, (8, 2), 128, {}) for lens in (((1, 1),), ((1, 1),) * 2, ((1, 15),), ((2, 5),))),
    *((MIXED[:2], (12, 2), head_dim, {}) for head_dim in (64, 80, 240, 256)),
    *((MIXED[:2], (5, 1), head_dim, BF16) for head_dim in (64, 80, 240, 256)),
    (((30, 61),), (3, 3), 240, BF16),
    (MIXED, (4, 4), 128, {"sliding_window": 5}),
    (MIXED, (4, 4), 128, {"sliding_window": 128}),
    (MIXED, (16, 2), 128, {"soft_cap": 50.0}),
    (PREFILLS, (8, 2), 128, eight_bits("float8_e4m3fn", None, 0.5, 0.5)),
    (PREFILLS, (8, 2), 128, eight_bits("float8_e4m3fn", None, None, None)),
    (PREFILLS, (8, 2), 128, eight_bits("float8_e5m2", None, 0.5, 2.0)),
    (PREFILLS, (8, 2), 128, eight_bits("float8_e4m3fn", 0.5, 0.5, 0.5)),
    (PREFILLS, (8, 2), 128, eight_bits("float8_e5m2", 0.5, None, None)),
    (MIXED, (5, 1), 64, eight_bits("float8_e4m3fn", None, 0.7, 3.0)),  # two heads of four
    (MIXED, (6, 3), 256, eight_bits("float8_e4m3fn", None, 0.7, 3.0)),
    (DECODES, (4, 2), 128, {"dtype": jnp.float32, "cache_dtype": "float8_e4m3fn", "k_scale": 0.5}),
    (MIXED, (8, 1), 128, BF16 | {"update_kv_cache": False}),
]


def check_rpa(seq_lens, num_heads, head_dim, options):
    options = {"sm_scale": head_dim**-0.5} | options
    dtype, cache_dtype = options.pop("dtype", jnp.float32), options.pop("cache_dtype", None)
    arguments = rpa_batch(seq_lens, num_heads, head_dim, dtype, cache_dtype)
    # What tunes their kernel changes nothing.
    tuning = {"m_block_sizes": (64, 256, 32, 128), "vmem_limit_bytes": 1 << 20}
    tuning |= {"d_block_sizes": (1, 64, 1, 64), "p_block_sizes": None}
    tuning |= {"disable_bounds_checks": True, "disable_semaphore_checks": True}
    tuning |= {"skip_kv_mask": not options.get("use_causal_mask", True), "debug_mode": False}
    step = jax.jit(lambda *x: compat.ragged_paged_attention(*x, **options, **tuning))
    o, cache = step(*arguments)
    want, written = rpa_oracle(*arguments, **options)
    tolerance = 1e-5 if dtype == jnp.float32 else 2e-2
    assert o.dtype == dtype
    np.testing.assert_allclose(np.float64(o[: len(want)]), want, rtol=tolerance, atol=tolerance)
    assert not np.asarray(o[len(want) :]).any()
    np.testing.assert_array_equal(np.float32(cache), np.float32(written))


@pytest.mark.parametrize("case", RPA, ids=str)
def test_the_grid_of_rpa_v3(case):
    check_rpa(*case)


@pytest.mark.parametrize("case", [RPA[1], RPA[12], RPA[15], RPA[22], RPA[28]], ids=str)
def test_rpa_v3_over_pages_that_are_copied(case, monkeypatch):
    """What happens where kernels have no head_dim of twice the cache's width."""
    monkeypatch.setattr(compat, "LARGEST_HEAD_DIM", 0)
    check_rpa(*case)


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"sliding_window": 0}, ValueError, "sliding_window: expected a positive number .* got 0"),
        ({"sliding_window": -1}, ValueError, "sliding_window: expected a positive number"),
        ({"soft_cap": 0.0}, ValueError, "soft_cap: expected a positive number or None, got 0.0"),
        ({"skip_kv_mask": True}, ValueError, "skip_kv_mask: expected False with use_causal_mask"),
        ({"block_sizes": 1}, TypeError, "expected no other arguments, got block_sizes"),
        (
            {"dtype": jnp.bfloat16, "cache_dtype": "float32"},
            NotImplementedError,
            "kv_cache: bfloat16",
        ),
        (
            {"dtype": jnp.bfloat16, "cache_dtype": "float8_e4m3fn", "keys": jnp.bfloat16},
            ValueError,
            "keys: expected float8_e4m3fn as the cache, got bfloat16; divide them by k_scale",
        ),
        ({"pages": 7}, ValueError, "page_indices: expected a multiple of 5 entries"),
        ({"heads": (5, 2)}, ValueError, "queries: expected a multiple of 2 heads, got 5"),
    ],
    ids=str,
)
def test_what_rpa_v3_refuses(options, error, words):
    names = ("dtype", "cache_dtype", "keys", "pages", "heads")
    dtype, cache_dtype, of_keys, pages, heads = (options.get(name) for name in names)
    arguments = [*rpa_batch(PREFILLS, heads or (4, 2), 64, dtype or jnp.float32, cache_dtype)]
    if of_keys is not None:
        arguments[1] = arguments[1].astype(of_keys)
    if pages is not None:
        arguments[5] = arguments[5][:pages]
    options = {name: x for name, x in options.items() if name not in names}
    with pytest.raises(error, match=f"^ragged_paged_attention: {words}"):
        compat.ragged_paged_attention(*arguments, **options)


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
        (
            lambda: compat.flax_attention(q, q, q, einsum_dot_general=jax.lax.dot_general),
            NotImplementedError,
            "einsum_dot_general: None is supported",
        ),
    ):
        with pytest.raises(error, match=match):
            call()


# ---- Flax's own cases: leading axes, masks and biases as its layers and tests make them


def attention_of_flax(q, k, v, bias, mask, is_causal):
    """softmax(q . k / sqrt(head_dim) + bias) v in float32."""
    logits = jnp.einsum("...qhd,...khd->...hqk", q, k) * q.shape[-1] ** -0.5
    logits = logits if bias is None else logits + bias
    if is_causal:
        mask_of_it = np.tril(np.ones(logits.shape[-2:], bool))
        logits = jnp.where(mask_of_it, logits, -1e30)
    logits = logits if mask is None else jnp.where(mask != 0, logits, -1e30)
    return jnp.einsum("...hqk,...khd->...qhd", jax.nn.softmax(logits, axis=-1), v)


def seen(*shape, dtype=bool):
    mask = RNG.random(shape) < 0.7
    mask[..., 0] = True  # Flax has the mean of all values where a row sees no key
    return mask.astype(dtype)


# leading axes, (T, S), bias, mask, further options
FLAX = {
    "one sequence": ((), (5, 5), None, None, {}),
    "two batch axes": ((2, 3), (5, 5), None, None, {"is_causal": True}),
    "keys of another length": ((2,), (5, 7), None, None, {}),
    "mask of a layer, float32": ((2,), (5, 5), None, seen(2, 1, 5, 5, dtype=np.float32), {}),
    "mask of a layer, int32": ((2, 3), (5, 5), None, seen(2, 3, 1, 5, 5, dtype=np.int32), {}),
    "mask without a batch": ((2,), (5, 7), None, seen(5, 7), {}),
    "mask of one head each": ((2,), (5, 7), None, seen(1, 4, 5, 7), {"is_causal": True}),
    "a step over a cache": ((2,), (1, 9), None, np.arange(9)[None, None, None] < 4, {}),
    "bias of heads": ((2, 3), (5, 7), normal(4, 5, 7), None, {}),
    "bias and mask": ((2,), (5, 7), normal(2, 1, 1, 7), seen(2, 1, 5, 7), {}),
    "in bfloat16": ((2,), (5, 5), None, None, {"dtype": jnp.bfloat16}),
    "in float16, a bias in float32": ((2,), (5, 5), normal(4, 5, 5), None, {"dtype": jnp.float16}),
    "not deterministic, no dropout": ((2,), (5, 5), None, None, {"deterministic": False}),
    "precision": ((2,), (5, 5), None, None, {"precision": jax.lax.Precision.HIGHEST}),
}


@pytest.mark.parametrize("name", FLAX)
def test_flax_attention(name):
    """Values, and gradients of all floats."""
    lead, (num_queries, num_keys), bias, mask, options = FLAX[name]
    lengths = num_queries, num_keys, num_keys
    floats = [normal(*lead, n, 4, 16) for n in lengths] + ([] if bias is None else [bias])

    def run(attend, **more):
        def loss(*floats):
            q, k, v, *rest = floats
            o = attend(q, k, v, rest[0] if rest else None, mask, **more)
            return jnp.sum(jnp.sin(o.astype(jnp.float32))), o

        return jax.jit(jax.value_and_grad(loss, tuple(range(len(floats))), has_aux=True))(*floats)

    (_, got), slopes = run(compat.flax_attention, **options)
    (_, want), want_slopes = run(attention_of_flax, is_causal=options.get("is_causal", False))
    assert got.dtype == options.get("dtype", jnp.float32) and got.shape == want.shape
    tolerance = 2e-5 if got.dtype == jnp.float32 else 4e-2
    for a, b in zip((got, *slopes), (want, *want_slopes), strict=True):
        np.testing.assert_allclose(np.float32(a), b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", [(0, 5, 4, 16), (2, 0, 4, 16), (0, 2, 5, 4, 16)], ids=str)
def test_nothing_gives_nothing(shape):
    q, bias = jnp.ones(shape), jnp.zeros((*shape[:-3], 4, 1, shape[-3]))
    assert compat.flax_attention(q, q, q, bias).shape == shape
    pages, table = jnp.ones((2, 3, 8, 16)), jnp.zeros((0, 2), jnp.int32)
    got = compat.paged_attention(jnp.ones((0, 4, 16)), pages, pages, table[:, 0], table)
    assert got.shape == (0, 4, 16)


def test_float64_is_refused():
    with jax.enable_x64(True):
        q = jnp.ones((2, 5, 4, 16))
        match = "^dot_product_attention: query: bfloat16, .* are supported, got float64"
        with pytest.raises(NotImplementedError, match=match):
            compat.flax_attention(q, q, q)


def test_what_flax_passes():
    q, k, v = normal(3, 2, 9, 4, 16)
    want = jax.nn.dot_product_attention(*(x.astype(jnp.bfloat16) for x in (q, k, v)))
    got = compat.flax_attention(
        q, k, v, dtype=jnp.bfloat16, force_fp32_for_softmax=True, qk_attn_weights_einsum=None,
        promote_dtype=lambda arrays, dtype: tuple(x.astype(dtype) for x in arrays),
    )  # fmt: skip
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(got), np.float32(want), atol=2e-2)


# ---- Flax, Equinox: where they are installed


@pytest.mark.parametrize("options", [{}, {"normalize_qk": True}, {"use_bias": False},
                                     {"dtype": jnp.float16}], ids=str)  # fmt: skip
def test_flax_layers_as_flax_tests_them(options):
    """A layer, and its steps over a cache."""
    nnx = pytest.importorskip("flax.nnx", reason="Flax is not installed")
    x = normal(2, 5, 16)
    plain, ours = (
        nnx.MultiHeadAttention(4, 16, decode=False, rngs=nnx.Rngs(0), **options, **more)
        for more in ({}, {"attention_fn": compat.flax_attention})
    )
    tolerance = 2e-2 if "dtype" in options else 2e-5
    np.testing.assert_allclose(ours(x), plain(x), rtol=tolerance, atol=tolerance)
    for layer in (plain, ours):
        layer.init_cache(x.shape, dtype=options.get("dtype", jnp.float32))
    for i in range(3):
        got, want = (layer(x[:, i : i + 1], decode=True) for layer in (ours, plain))
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


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
    mask = nn.make_causal_mask(jnp.ones((2, 9)))  # float32
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
    """The layer in the documentation, mapped over a batch, against jax.nn."""
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
