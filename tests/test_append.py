"""append_kv moves bits: every byte of the pools must be the expected one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import MIXED_KV, MIXED_QO, Case, build, kv_places
from backends import Backend, on_every_backend, on_every_platform
from checking import assert_same_bits

import jax_attn as ja
from jax_attn import reference

append = jax.jit(ja.append_kv)

# Appending needs a position for every query token: kv_len >= qo_len.
KV = tuple(max(q, k) for q, k in zip(MIXED_QO, MIXED_KV, strict=True))
CASES = [
    Case("f32", kv_lens=KV),
    Case("bf16", kv_lens=KV, dtype="bfloat16", page_size=1),
    Case("f16_odd_page", kv_lens=KV, dtype="float16", page_size=7, head_dim_qk=24, head_dim_vo=8),
    Case("stacked", kv_lens=KV, num_layers=3, page_size=5, num_kv_heads=3, num_qo_heads=3),
    Case("decode", (1,) * 157, tuple(1 + (37 * r) % 211 for r in range(157)), dtype="bfloat16"),
    Case("one_head_large_page", (700, 1), (700, 65), page_size=64, num_kv_heads=1, num_qo_heads=8),
    Case("nothing_new", (0, 0), (20, 0)),
    Case("empty_batch", (), ()),
]


def pools_before(case, batch):
    """The pools of `build` with the slots of new tokens still NaN, and the new tokens packed."""
    nnz = sum(case.qo_lens)
    rows = case.spec_fields()["max_qo_tokens"]
    places = kv_places(batch.lengths, case.page_size)
    starts = np.concatenate([[0], np.cumsum(case.kv_lens)]).astype(int)
    new = [
        np.arange(starts[r + 1] - qo_len, starts[r + 1]) for r, qo_len in enumerate(case.qo_lens)
    ]
    new = np.concatenate([[], *new]).astype(int)
    at = tuple(axis[new] for axis in places)
    if case.num_layers is not None:
        at = (case.num_layers - 1, *at)
    pools, tokens = [], []
    for full in (batch.k, batch.v):
        token = np.full((rows, *full.shape[-2:]), np.nan, full.dtype)
        token[:nnz] = full[at]
        pool = full.copy()
        pool[at] = np.nan
        pools.append(pool)
        tokens.append(token)
    return pools, tokens


@on_every_backend
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_append_fills_the_new_slots_and_no_other(case, backend):
    batch = build(case)
    pools, tokens = pools_before(case, batch)
    plan = ja.plan(backend.spec(**case.spec_fields()), **batch.lengths.plan_arguments())
    k_pages, v_pages = append(*pools, *tokens, plan, layer=batch.layer)
    assert_same_bits("k_pages", k_pages, batch.k)
    assert_same_bits("v_pages", v_pages, batch.v)
    names = "qo_indptr kv_lens page_indptr page_indices".split()
    lengths = {name: getattr(batch.lengths, name) for name in names}
    want = reference.append_kv(*pools, *tokens, **lengths, layer=batch.layer)
    for name, got, expected in zip(("k", "v"), (k_pages, v_pages), want, strict=True):
        assert_same_bits(name, got, expected)


@on_every_platform
def test_every_bit_pattern_survives(backend):
    """Signalling NaNs, -0 and subnormals are moved, not computed with."""
    case = Case("", (16,), (16,), num_qo_heads=1, num_kv_heads=1, head_dim_qk=256, dtype="float16")
    plan_lengths = build(case).lengths
    plan = ja.plan(backend.spec(**case.spec_fields()), **plan_lengths.plan_arguments())
    words = np.arange(2**16, dtype=np.uint16).reshape(16, 16, 1, 256)
    got = []
    for tokens in words:
        new = np.zeros((19, 1, 256), np.uint16)
        new[:16] = tokens
        new = new.view(np.float16)
        pages = np.zeros((4, 16, 1, 256), np.float16)
        k_pages, _ = append(pages, pages, new, new, plan)
        got.append(np.asarray(k_pages)[plan_lengths.page_indices[0]].view(np.uint16))
    np.testing.assert_array_equal(np.stack(got), words)


@on_every_platform
def test_tokens_before_position_zero_are_dropped(backend):
    """qo_len > kv_len is legal for attention; tokens without a position have no slot either."""
    case = Case("", (5, 2), (2, 2), num_qo_heads=1, num_kv_heads=1, head_dim_qk=8, page_size=2)
    batch = build(case)
    plan = ja.plan(backend.spec(**case.spec_fields()), **batch.lengths.plan_arguments())
    new = np.arange(10 * 8, dtype=np.float32).reshape(10, 1, 8)
    pages = np.full(batch.k.shape, np.nan, np.float32)
    k_pages, _ = append(pages, pages, new, new, plan)
    want = pages.copy()
    first, second = (batch.lengths.page_indices[i] for i in batch.lengths.page_indptr[:2])
    want[first], want[second] = new[3:5], new[5:7]
    assert_same_bits("k_pages", k_pages, want)


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(Backend("cpu"), id="cpu", marks=pytest.mark.big),
        pytest.param(Backend("gpu"), id="cuda", marks=pytest.mark.cuda),
    ],
    indirect=True,
)
def test_pools_beyond_2_32_elements(backend):
    """Writes slots on both sides of 2^31 and 2^32 elements, and nowhere else near them."""
    page_elements = 16 * 1 * 128
    num_pages = 2**32 // page_elements + 5
    ids = [2**31 // page_elements, num_pages - 1, 3, 2**32 // page_elements]
    spec = backend.spec(
        num_qo_heads=1,
        num_kv_heads=1,
        head_dim_qk=128,
        head_dim_vo=8,
        dtype="float16",
        max_batch=1,
        max_qo_tokens=64,
        max_kv_pages=4,
    )
    plan = ja.plan(spec, [0, 64], [64], [0, 4], ids)
    rng = np.random.default_rng(0)
    new = [rng.normal(size=(64, 1, d)).astype(np.float16) for d in (128, 8)]
    pages = [jnp.zeros((num_pages, 16, 1, d), np.float16) for d in (128, 8)]
    pages = jax.jit(ja.append_kv, donate_argnums=(0, 1))(*pages, *new, plan)
    wrong = sorted({i % (2**b // page_elements) for i in ids for b in (31, 32)} - set(ids))
    for pool, tokens in zip(pages, new, strict=True):
        written = pool[np.array(ids)].reshape(tokens.shape)
        assert_same_bits("pages", written, tokens)
        assert not np.asarray(pool[np.array(wrong)]).any()


@on_every_platform
def test_attention_right_after_append_sees_the_new_tokens(backend):
    case = Case("", kv_lens=KV, num_layers=2, dtype="bfloat16")
    batch = build(case)
    pools, tokens = pools_before(case, batch)
    plan = ja.plan(backend.spec(**case.spec_fields()), **batch.lengths.plan_arguments())

    @jax.jit
    def step(k_pages, v_pages, q, k_new, v_new, plan, layer):
        k_pages, v_pages = ja.append_kv(k_pages, v_pages, k_new, v_new, plan, layer=layer)
        return ja.attention(q, k_pages, v_pages, plan, layer=layer)

    o = step(*pools, batch.q, *tokens, plan, jnp.int32(1))
    want = ja.attention(batch.q, batch.k, batch.v, plan, layer=1)
    assert_same_bits("o", o, want)
    assert np.isfinite(np.asarray(o, np.float32)).all()
