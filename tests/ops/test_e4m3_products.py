"""Matmuls of e4m3 values on sm_90: results on a GPU, and refusals where there is no kernel.

tests/csrc/sm90/formats_sm90_test.cc runs the kernel without a GPU, with f32 sums.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_attn as ja
from helpers.backends import Backend
from jax_attn import reference

E4M3 = "float8_e4m3fn"

on_gpu = pytest.mark.parametrize(
    "backend", [pytest.param(Backend("gpu"), id="cuda", marks=pytest.mark.cuda)], indirect=True
)


def rounded(q):
    """Rounds [rows, head_dim] to e4m3, each row's largest magnitude to 448; float64."""
    most = np.maximum(np.abs(q).max(axis=-1, keepdims=True), 2.0**-100)
    codes = reference.quantize((q * (448 / most)).astype(np.float32), None)
    return codes.astype(np.float64) * (most / 448)


def exact(q, k, v, pos, *, left, cap):
    """o, lse, the mean of |v|, and the mean of |o's terms| of one row, in float64."""
    begin = 0 if left < 0 else max(0, pos - left)
    k, v = k[begin : pos + 1], v[begin : pos + 1]
    s = k @ q / np.sqrt(len(q))
    s = cap * np.tanh(s / cap) if cap else s
    w = np.exp(s - s.max())
    lse = s.max() + np.log(w.sum())
    w /= w.sum()
    return w @ v, lse, np.abs(v).sum(axis=0), w @ np.abs(v)


CASES = {
    "prefill": {"lens": ((700, 700), (130, 2000)), "heads": (4, 2), "dims": (128, 128)},
    "long": {"lens": ((64, 8192),), "heads": (8, 1), "dims": (128, 128), "page_size": 16},
    "decode": {"lens": ((1, 3000), (1, 1), (3, 700)), "heads": (16, 2), "dims": (128, 128)},
    "head_dim_64": {"lens": ((300, 900),), "heads": (2, 2), "dims": (64, 64), "page_size": 64},
    "head_dim_192_128": {"lens": ((200, 600),), "heads": (2, 2), "dims": (192, 128)},
    "head_dim_192": {"lens": ((200, 600),), "heads": (2, 1), "dims": (192, 192), "page_size": 1},
    "odd": {"lens": ((45, 70), (9, 300)), "heads": (5, 1), "dims": (48, 80), "page_size": 5},
    "window": {
        "lens": ((300, 900), (5, 90)),
        "heads": (4, 4),
        "dims": (128, 128),
        "page_size": 16,
        "left": 200,
        "cap": 20.0,
    },
    "fixed_split": {"lens": ((40, 3000), (1, 700)), "heads": (4, 2), "dims": (128, 128)}
    | {"page_size": 16, "options": {"schedule": "fixed_split", "kv_split": 512, "max_items": 1000}},
}


@on_gpu
@pytest.mark.parametrize("q_dtype", [None, E4M3], ids=["", "q"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_results_are_within_what_codes_may_change(case, q_dtype, backend):
    """Results are within the bound of formats_sm90_test.cc plus the GPU's truncation.

    A GPU truncates addends at 2^-13 of the largest one; an instruction has 33 of them.
    """
    rng = np.random.default_rng(0)
    lens, (heads, kv_heads), (dim_qk, dim_vo) = case["lens"], case["heads"], case["dims"]
    page_size, left, cap = case.get("page_size"), case.get("left", -1), case.get("cap", 0.0)
    num_qo, num_kv = (sum(n) for n in zip(*lens, strict=True))
    pages = [-(-kv // page_size) for _, kv in lens] if page_size else []
    spec = backend.spec(
        num_qo_heads=heads,
        num_kv_heads=kv_heads,
        head_dim_qk=dim_qk,
        head_dim_vo=dim_vo,
        kv_dtype=E4M3,
        q_dtype=q_dtype,
        eight_bit_products=True,
        window_left=left,
        logits_soft_cap=cap,
        page_size=page_size,
        max_batch=len(lens),
        max_qo_tokens=num_qo,
        max_kv_pages=sum(pages) or None,
        max_kv_tokens=None if page_size else num_kv,
        **case.get("options", {}),
    )
    q = rng.normal(size=(num_qo, heads, dim_qk)).astype(jnp.dtype(q_dtype or "bfloat16"))
    k, v = (rng.normal(size=(num_kv, kv_heads, d)).astype(reference.E4M3) for d in (dim_qk, dim_vo))
    scales = {
        "k_scale": rng.uniform(0.5, 1.5, kv_heads),
        "v_scale": rng.uniform(0.5, 1.5, kv_heads),
    }
    if q_dtype:
        scales["q_scale"] = rng.uniform(0.5, 1.5, heads)
    scales = {name: x.astype(np.float32) for name, x in scales.items()}
    qo_indptr, kv_indptr = (np.cumsum([0, *n]).astype(np.int32) for n in zip(*lens, strict=True))
    lengths = [qo_indptr, np.array([kv for _, kv in lens], np.int32)]
    operands = [k, v]
    if page_size:
        ids = rng.permutation(sum(pages)).astype(np.int32)
        lengths += [np.cumsum([0, *pages]).astype(np.int32), ids]
        operands = []
        for x in (k, v):
            pool = np.full((len(ids), page_size, *x.shape[1:]), np.nan, reference.E4M3)
            for r, (_, kv) in enumerate(lens):
                at = np.arange(kv)
                own = ids[lengths[2][r] + at // page_size]
                pool[own, at % page_size] = x[kv_indptr[r] : kv_indptr[r] + kv]
            operands.append(pool)
    plan = ja.plan(spec, *lengths)
    attend = jax.jit(lambda *qkv: ja.attention(*qkv, plan, return_lse=True, **scales))
    o, lse = (np.asarray(x).astype(np.float64) for x in attend(q, *operands))
    again = attend(q, *operands)
    assert np.array_equal(np.asarray(again[0]).astype(np.float64), o)

    error = size = 0.0
    for r, (qo, kv) in enumerate(lens):
        tokens = range(qo) if qo < 50 else [0, 1, qo // 2, qo - 1]
        for i, head in ((i, h) for i in tokens for h in range(heads)):
            row, kv_head = qo_indptr[r] + i, head // (heads // kv_heads)
            q_row = q[row, head].astype(np.float64)
            q_row = q_row * scales["q_scale"][head] if q_dtype else rounded(q_row)
            span = slice(kv_indptr[r], kv_indptr[r] + kv)
            k_rows = k[span, kv_head].astype(np.float64) * scales["k_scale"][kv_head]
            v_rows = v[span, kv_head].astype(np.float64) * scales["v_scale"][kv_head]
            want, want_lse, sizes, means = exact(
                q_row, k_rows, v_rows, kv - qo + i, left=left, cap=cap
            )
            count = kv - qo + i + 1 if left < 0 else min(left + 1, kv - qo + i + 1)
            # Error of logits: products, sums of 32 and what is added to these.
            products = k_rows[: kv - qo + i + 1] * q_row / np.sqrt(dim_qk)
            sums = np.cumsum(products, axis=1)[:, 31::32]
            largest = max(abs(products).max(), abs(sums).max(initial=0))
            lse_bound = 33 * 2.0**-13 * -(-dim_qk // 32) * largest + 1e-3
            assert abs(lse[row, head] - want_lse) < lse_bound
            # Error of softmax weights, of o and of its sum of weights in a step of 128 tokens.
            relative = 1 / 15 + 2 * lse_bound + 4 * 33 * 2.0**-13
            most = 0.875 * 128 * 15 / 16
            bound = (means + abs(want)) * relative
            bound += 2.0**-10 * (sizes + count * abs(want)) / most + 2.0**-8 * abs(want) + 1e-3
            np.testing.assert_array_less(abs(o[row, head] - want), bound)
            error += ((o[row, head] - want) ** 2).sum()
            size += (want**2).sum()
    print(f"relative error of o beside exact weights: {(error / size) ** 0.5:.4f}")
    assert (error / size) ** 0.5 < 0.05


@on_gpu
def test_a_value_that_a_row_does_not_see(backend):
    """A NaN value reaches the rows that see it, and no other."""
    spec = backend.spec(
        num_qo_heads=4,
        num_kv_heads=2,
        head_dim_qk=128,
        kv_dtype=E4M3,
        eight_bit_products=True,
        max_qo_tokens=300,
        page_size=None,
        max_kv_tokens=300,
    )
    rng = np.random.default_rng(1)
    q = rng.normal(size=(300, 4, 128)).astype(jnp.bfloat16)
    k, v = (rng.normal(size=(300, 2, 128)).astype(reference.E4M3) for _ in "kv")
    v[150, 1, 7] = np.nan
    o = np.asarray(ja.attention(q, k, v, ja.plan(spec, [0, 300], [300]))).astype(np.float32)
    want = np.zeros(o.shape, bool)
    want[150:, 2:, 7] = True
    np.testing.assert_array_equal(np.isnan(o), want)


def test_wide_values_are_refused():
    with pytest.raises(
        NotImplementedError, match="head_dim_vo up to 192 on sm_90, got True with 256"
    ):
        ja.AttentionSpec(
            2, 2, 256, kv_dtype=E4M3, eight_bit_products=True, max_kv_pages=8, target="sm_90"
        )


@pytest.mark.parametrize("q_dtype", [None, E4M3])
def test_the_hopper_loop_has_them(q_dtype, caplog):
    spec = ja.AttentionSpec(
        8,
        2,
        128,
        kv_dtype=E4M3,
        q_dtype=q_dtype,
        eight_bit_products=True,
        max_kv_pages=8,
        target="sm_90",
    )
    assert spec.kernel_config["main_loop"] == 1 and not caplog.records
