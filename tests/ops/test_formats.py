"""Formats of the paged cache: what append_kv writes, and attention over it.

Kernels dequantize rows to the spec's dtype and then do the same as with plain pages. So attention
over quantized pages has the bits of attention over dequantized plain pages. On CUDA another kernel
may run plain pages: there formats_cuda_test.cc and codes_sm90_test.cc of tests/csrc compare the
bits.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_attn as ja
from helpers.attention_cases import Case, build
from helpers.backends import on_every_backend, on_every_isa, on_every_platform
from helpers.checking import assert_same_bits
from jax_attn import reference
from jax_attn._spec import formats

OWN_SCALES = ("int8", "mxfp4", "nvfp4", "int4")  # a NaN makes the whole block NaN
HEAD_SCALED = ("float8_e4m3fn", "float8_e5m2", "nvfp4")
FORMATS = ("float8_e5m2", *OWN_SCALES)
ALL_FORMATS = ("float8_e4m3fn", *FORMATS)


def encoded(pages, kv_dtype, scale=None):
    """Quantizes plain pages; unwritten slots are NaN, and so are their quantized values."""
    with np.errstate(invalid="ignore", over="ignore"):
        return np.asarray(reference.quantize(np.asarray(pages), scale, kv_dtype))


def decoded(codes, dtype, kv_dtype):
    with np.errstate(invalid="ignore"):
        return np.asarray(reference.dequantize(codes, None, jnp.dtype(dtype), kv_dtype))


def scales_of(kv_dtype, rng):
    """k_scale and v_scale of two heads, as keywords; none for a format without them."""
    if kv_dtype not in HEAD_SCALED:
        return {}
    k, v = rng.uniform(0.5, 2, (2, 2)).astype(np.float32)
    return {"k_scale": k, "v_scale": v}


# --- what append writes


def awkward_rows(rng, num_rows, heads, dim):
    """Rows of all sizes, of zeros, of one element, with ties, NaN, and infinities."""
    x = rng.normal(size=(num_rows, heads, dim))
    x *= 2.0 ** rng.integers(-20, 12, (num_rows, heads, 1))
    x[0] = 0
    x[1, :, 1:] = 0
    x[2] = rng.integers(-12, 13, x[2].shape) / 4  # ties of both formats
    x[2, :, 0] = 127 / 4
    x[3] = rng.integers(-24, 25, x[3].shape) / 4
    x[3, :, ::32] = 6
    x[4, 0, 3], x[5, 1, dim - 1], x[6, 0, 0] = np.nan, np.inf, -np.inf
    x[7] = 1e-7  # subnormal in f16
    return x


def padded(rows, dim):
    """Rows with zeros up to dim columns, as they lie in pages."""
    return np.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, dim - rows.shape[-1])])


@on_every_platform
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("kv_dtype", FORMATS)
@pytest.mark.parametrize("value_dim", [40, 48])  # on CUDA rows of 40 are padded to 48
def test_append_writes_what_the_reference_writes(kv_dtype, dtype, value_dim, backend):
    rng = np.random.default_rng(3)
    dims = {"head_dim_qk": 128, "head_dim_vo": value_dim}
    case = Case("", (16,), (16,), num_qo_heads=2, num_layers=2, **dims)
    spec = backend.spec(**(case.spec_fields() | {"kv_dtype": kv_dtype, "dtype": dtype}))
    lengths = build(case).lengths
    plan = ja.plan(spec, **lengths.plan_arguments())
    shapes = spec.kv_shapes(2, 4, 16)
    pages = [np.zeros(shape, spec.dtype_of_kv) for shape in shapes]
    k_new, v_new = (
        awkward_rows(rng, spec.max_qo_tokens, 2, dim).astype(dtype) for dim in (128, value_dim)
    )
    scales = scales_of(kv_dtype, rng)
    got = jax.jit(ja.append_kv)(*pages, k_new, v_new, plan, layer=1, **scales)
    page = lengths.page_indices[0]
    for pool, shape, new, scale, dim in zip(
        got, shapes, (k_new, v_new), scales.values() or (None, None), spec.padded_dims, strict=True
    ):
        assert pool.shape == shape and not np.asarray(pool[0]).any()
        rows = np.asarray(pool)[1, page]
        want = encoded(padded(new[:16], dim), kv_dtype, scale)
        if kv_dtype in OWN_SCALES:
            same = np.isnan(decoded(rows, dtype, kv_dtype))
            assert (same == np.isnan(decoded(want, dtype, kv_dtype))).all()
            last = new.shape[-1] - 1
            assert same[4, 0, 3] and same[5, 1, last] and same[6, 0].any() and not same[5, 0].any()
            keep = ~same.any(axis=-1)  # NaN has many bit patterns
        else:
            keep = ~(np.isnan(rows) & np.isnan(want)).any(axis=-1)
        assert_same_bits("codes", rows[keep], want[keep])


@on_every_platform
@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_append_rounds_every_number_of_16_bits_to_the_nearest_code(kv_dtype, dtype, backend):
    """Without scales, so that ties occur: they go to the even value."""
    numbers = np.arange(1 << 16, dtype=np.uint16).view(dtype).reshape(256, 2, 128)
    case = Case("", (256,), (256,), num_qo_heads=2, head_dim_qk=128, head_dim_vo=128)
    fields = case.spec_fields() | {"kv_dtype": kv_dtype, "dtype": dtype}
    spec, lengths = backend.spec(**fields), build(case).lengths
    plan = ja.plan(spec, **lengths.plan_arguments())
    pages = [np.zeros(shape, spec.dtype_of_kv) for shape in spec.kv_shapes(24, 16)]
    rows = np.pad(numbers, ((0, spec.max_qo_tokens - 256), (0, 0), (0, 0)))
    k_pages, _ = ja.append_kv(*pages, rows, rows, plan)
    used = np.asarray(lengths.page_indices)[:16]
    got, want = np.asarray(k_pages)[used].reshape(-1), encoded(numbers, kv_dtype).reshape(-1)
    nan = np.isnan(numbers.astype(np.float32)).reshape(-1)
    assert (np.isnan(got.astype(np.float32)) == np.isnan(want.astype(np.float32))).all()
    assert np.isnan(got.astype(np.float32))[nan].all()
    assert_same_bits("codes", got[~nan], want[~nan])


@on_every_platform
@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_append_rotated_writes_what_append_kv_writes(kv_dtype, backend):
    rng = np.random.default_rng(4)
    case = Case("", (5, 1), (40, 17), num_qo_heads=4, dtype="bfloat16", kv_dtype=None)
    fields = case.spec_fields() | {"kv_dtype": kv_dtype}
    spec, lengths = backend.spec(**fields), build(case).lengths
    plan = ja.plan(spec, **lengths.plan_arguments())
    tokens = spec.max_qo_tokens
    qkv = rng.normal(size=(tokens, 8 * 64)).astype(jnp.bfloat16)
    angle = rng.uniform(0, 6, (tokens, 32)).astype(np.float32)
    pages = [np.zeros(shape, spec.dtype_of_kv) for shape in spec.kv_shapes(12, 16)]
    scales = scales_of(kv_dtype, rng)
    _, *got = ja.append_rotated(qkv, np.cos(angle), np.sin(angle), *pages, plan, **scales)
    plain = backend.spec(**(fields | {"kv_dtype": None}))
    plain_plan = ja.plan(plain, **lengths.plan_arguments())
    plain_pages = [jnp.zeros(shape, plain.dtype) for shape in plain.kv_shapes(12, 16)]
    _, *want = ja.append_rotated(qkv, np.cos(angle), np.sin(angle), *plain_pages, plain_plan)
    at = np.asarray(want[0]).any(axis=(-1, -2))
    for new, old, scale in zip(got, want, scales.values() or (None, None), strict=True):
        assert_same_bits("codes", np.asarray(new)[at], encoded(old, kv_dtype, scale)[at])
        assert not np.asarray(new)[~at].any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_errors_of_codes(dtype):
    """Errors stay within bounds that follow from the formats, plus the rounding to dtype.

    int8: half a step of the largest magnitude / 127.
    mxfp4: 5 is as far from 4 as from 6, and 5 or more is the largest of its block.
    nvfp4: like mxfp4, with an error of the scale. Rounding makes the scale at most 18/17 of a sixth
    of the largest. A subnormal scale is off by up to 2^-10, and the largest loses 6 times that.
    int4: 8 becomes 7; values with the largest's sign are off by half a step, a sixteenth.
    e5m2: half a step of a quarter.
    """
    rng = np.random.default_rng(5)
    rounding = {"bfloat16": 2.0**-8, "float32": 2.0**-22}[dtype]
    x = (rng.normal(size=(4000, 2, 128)) * 2.0 ** rng.integers(-8, 8, (4000, 2, 1))).astype(dtype)
    true = x.astype(np.float64)
    size = np.abs(true)

    def error(kv_dtype):
        return np.abs(decoded(encoded(x, kv_dtype), dtype, kv_dtype).astype(np.float64) - true)

    row = size.max(axis=-1, keepdims=True)
    assert np.all(error("int8") <= row / 254 + rounding * row)
    blocks = (4000, 2, 4, 32)
    block = size.reshape(blocks).max(axis=-1, keepdims=True)
    assert np.all(error("mxfp4").reshape(blocks) <= (0.2 + rounding) * block)
    short = size.reshape(4000, 2, 8, 16).max(axis=-1, keepdims=True)
    of_short = error("nvfp4").reshape(4000, 2, 8, 16)
    bound = np.where(short > 6 / 64, 3 / 17 * short, np.maximum(short / 6 + 2.0**-10, 6 * 2.0**-10))
    assert np.all(of_short <= bound + rounding * short)
    of_int4 = error("int4").reshape(blocks)
    step = block / 8 * (1 + 2.0**-10)  # an f16 scale of at least that
    assert np.all(of_int4 <= step + rounding * block)
    is_negative = true.reshape(blocks).min(axis=-1, keepdims=True) == -block
    like_it = (true.reshape(blocks) < 0) == is_negative
    assert np.all((of_int4 <= step / 2 + rounding * block)[like_it])
    assert np.all(error("float8_e5m2") <= np.maximum(size / 8, 2.0**-17))
    # The bounds are sharp: more than nine tenths of each is reached.
    assert (error("int8") / row).max() > 0.9 / 254
    assert (error("mxfp4").reshape(blocks) / block).max() > 0.18
    assert (of_short / short)[short[..., 0] > 0.1].max() > 0.16
    assert (of_int4 / block).max() > 0.12 and (of_int4 / block)[like_it].max() > 0.06
    assert (error("float8_e5m2") / size).max() > 0.11


# --- attention

CASES = (
    Case("mixed"),
    Case("page_1", page_size=1, window_left=20, sinks=True),
    Case("page_5", page_size=5, logits_soft_cap=3.0, head_dim_qk=80, head_dim_vo=40),
    Case("page_8", page_size=8, logits_soft_cap=3.0, head_dim_qk=80, head_dim_vo=48),
    Case("full", causal=False, head_dim_qk=256, schedule="fixed_split", kv_split=128),
    Case("decode", (1,) * 5, (0, 1, 129, 300, 17), head_dim_qk=128, num_layers=2),
    Case("heads", (1, 2), (200, 77), num_qo_heads=24, num_kv_heads=24, page_size=16),
    Case("prefill", (150, 3), (150, 140), num_qo_heads=8, num_kv_heads=1, causal=False),
    Case("wide", (1, 40), (200, 77), head_dim_qk=512, num_layers=2),
    Case("prefix", (1,) * 4, (600, 530, 522, 519), branches=("aa", "aa", "aa", "aa"), num_ctas=2),
)


def attend(spec, batch, k, v, **more):
    plan = ja.plan(spec, **batch.lengths.plan_arguments())
    o, lse = ja.attention(
        batch.q, k, v, plan, layer=batch.layer, sinks=batch.sinks, return_lse=True, **more
    )
    return np.asarray(o), np.asarray(lse)


@on_every_backend
@pytest.mark.parametrize("kv_dtype", FORMATS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_attention_over_codes_has_the_bits_of_plain_pages(case, kv_dtype, backend):
    if case.name == "wide" and backend.platform != "cpu" and kv_dtype not in formats.FLOAT8:
        pytest.skip("not on CUDA")
    names = {"page_5": "float16", "page_8": "float16", "prefill": "float32"}
    dtype = names.get(case.name, "bfloat16")
    case = dataclasses.replace(case, dtype=dtype, contents=("normal",))
    batch = build(case)
    spec = backend.spec(**(case.spec_fields() | {"kv_dtype": kv_dtype}))
    plain = [decoded(encoded(pages, kv_dtype), dtype, kv_dtype) for pages in (batch.k, batch.v)]
    codes = [
        encoded(padded(pages, dim), kv_dtype)
        for pages, dim in zip((batch.k, batch.v), spec.padded_dims, strict=True)
    ]
    want = attend(backend.spec(**case.spec_fields()), batch, *plain)
    got = attend(spec, batch, *codes)
    assert np.isfinite(np.float32(got[0])).all() and np.abs(np.float32(got[0])).max() > 0.1
    if backend.platform == "cpu":
        assert_same_bits("o", got[0], want[0])
        assert_same_bits("lse", got[1], want[1])
        return
    # Both kernels have q . k in f32 and softmax weights of 16 bits, and round o once.
    bits = {"bfloat16": 8, "float16": 11}[dtype]
    largest = np.abs(np.float32(want[0])).max()
    np.testing.assert_allclose(
        np.float32(got[0]), np.float32(want[0]), rtol=0, atol=4 * 2.0**-bits * largest
    )
    np.testing.assert_allclose(got[1], want[1], atol=1e-4)


def all_codes(kv_dtype, dim):
    """Rows of one head with every quantized value.

    Scales of mxfp4: all that are normal in f32; of nvfp4: all; of int4: thousands, and the
    extremes.
    """
    rng = np.random.default_rng(8)
    if kv_dtype in ("mxfp4", "nvfp4"):
        # Rows whose blocks have one scale, then mixed scales, then only scales that append_kv
        # writes.
        scales = formats.row_bytes(kv_dtype, dim) - dim // 2
        rows = rng.integers(0, 256, (768, 1, dim // 2 + scales)).astype(np.uint8)
        least, end = (1, 256) if kv_dtype == "mxfp4" else (0, 256)
        rows[:256, :, dim // 2 :] = np.maximum(least, np.arange(256))[:, None, None]
        rows[256:512, 0, dim // 2 :] = rng.integers(least, end, (256, scales))
        least, end = (2, 253) if kv_dtype == "mxfp4" else (1, 127)
        rows[512:, 0, dim // 2 :] = rng.integers(least, end, (256, scales))
        return rows
    if kv_dtype == "int4":
        scales = -(-dim // 32)
        codes = rng.integers(0, 256, (4096, 1, dim // 2)).astype(np.uint8)
        halves = rng.integers(0, 1 << 16, (4096, 1, scales)).astype(np.uint16)
        halves[:64] = np.uint16([1, 0x03FF, 0x7BFF, 0x7C00, 0xFC00, 0x7E00, 0, 0x8000])[
            rng.integers(0, 8, (64, 1, scales))
        ]
        return np.concatenate([codes, halves.view(np.uint8)], axis=-1)
    codes = np.resize(np.arange(256, dtype=np.uint8), (256 // np.gcd(256, dim), 1, dim))
    if kv_dtype != "int8":
        return codes.view(kv_dtype)
    scale = np.float32([1, 0.7, 3e-5]).view(np.uint8).reshape(3, 1, 1, 4)
    rows = np.broadcast_to(codes, (3, *codes.shape))
    scale = np.broadcast_to(scale, (3, len(codes), 1, 4))
    return np.concatenate([rows, scale], axis=-1).reshape(-1, 1, dim + 4).view(np.int8)


@on_every_isa
@pytest.mark.parametrize("dim", [128, 96, 40])
@pytest.mark.parametrize("kv_dtype", ALL_FORMATS)
def test_a_single_key_gives_what_its_codes_stand_for(kv_dtype, dim, backend):
    """o is exactly the dequantized value, for each quantized value and scale.

    Subnormals may be 0. tests/csrc/cuda/formats_cuda_test.cc tests the CUDA kernels.
    """
    rows = all_codes(kv_dtype, dim)
    n = len(rows)
    names = {"num_qo_heads": 2, "num_kv_heads": 1, "head_dim_qk": dim, "page_size": 1}
    limits = {"max_batch": n, "max_qo_tokens": n, "max_kv_pages": n}
    spec = backend.spec(**names, **limits, dtype="bfloat16", kv_dtype=kv_dtype)
    ids = np.arange(n + 1, dtype=np.int32)
    plan = ja.plan(spec, ids, np.ones(n, np.int32), ids, ids[:-1])
    q = np.zeros((n, 2, dim), jnp.bfloat16)
    keys = encoded(np.zeros((n, 1, 1, dim), jnp.bfloat16), kv_dtype)
    o = np.float32(ja.attention(q, keys, rows[:, None], plan))
    want = np.broadcast_to(np.float32(decoded(rows, "bfloat16", kv_dtype)), o.shape)
    tiny = np.abs(want) < 2.0**-126
    np.testing.assert_array_equal(np.where(tiny, 0, o), np.where(tiny, 0, want))
    assert (np.abs(o[tiny]) < 2.0**-126).all()


def finite_rows(kv_dtype, shape, dim, rng):
    """Rows without NaN or infinity.

    Most scales are positive and normal; one in a hundred is another number.
    """
    num_codes = dim // 2 if kv_dtype in ("mxfp4", "nvfp4", "int4") else dim
    codes = rng.integers(0, 256, (*shape, num_codes)).astype(np.uint8)
    if kv_dtype in ("float8_e4m3fn", "float8_e5m2"):
        values = codes.view(kv_dtype)
        return np.where(np.isfinite(values.astype(np.float32)), values, values.dtype.type(-0.5))
    num_scales = formats.row_bytes(kv_dtype, dim) - num_codes
    odd_of = {"mxfp4": [0, 1], "nvfp4": [0, 0x80, 0x81, 0xB3, 0xFE]}
    if kv_dtype in odd_of:
        least, end = {"mxfp4": (110, 140), "nvfp4": (1, 127)}[kv_dtype]
        scales = rng.integers(least, end, (*shape, num_scales)).astype(np.uint8)
        odd = rng.random(scales.shape) < 0.01
        scales[odd] = rng.choice(np.uint8(odd_of[kv_dtype]), odd.sum())
    else:
        dtype = {"int8": np.float32, "int4": np.float16}[kv_dtype]
        scales = rng.normal(size=(*shape, num_scales // dtype().itemsize)).astype(dtype)
        scales[rng.random(scales.shape) < 0.01] = 0
    rows = np.concatenate([codes, scales.view(np.uint8)], axis=-1)
    return rows.view(np.int8) if kv_dtype == "int8" else rows


@on_every_isa
@pytest.mark.parametrize("dim", [64, 128, 192])
@pytest.mark.parametrize("kv_dtype", ALL_FORMATS)
def test_values_of_all_scales_have_the_bits_of_plain_pages(kv_dtype, dim, backend):
    """Some pairs of tokens are dequantized at once; some have a scale that does not allow it."""
    rng = np.random.default_rng(9)
    lens, dtype = np.int32([64, 96, 37, 130]), "bfloat16"
    num_pages = -(-lens // 16)
    ends = np.cumsum([0, *num_pages], dtype=np.int32)
    pool = (int(ends[-1]), 16, 2)
    values = finite_rows(kv_dtype, pool, dim, rng)
    keys = encoded(rng.normal(size=(*pool, dim)).astype(dtype), kv_dtype)
    sizes = {"num_qo_heads": 8, "num_kv_heads": 2, "head_dim_qk": dim, "page_size": 16}
    limits = {"max_batch": 4, "max_qo_tokens": 4, "max_kv_pages": int(ends[-1])}
    q = rng.normal(size=(4, 8, dim)).astype(dtype)
    page_ids = rng.permutation(ends[-1]).astype(np.int32)

    def attend_to(stored, k, v):
        spec = backend.spec(**sizes, **limits, dtype=dtype, kv_dtype=stored)
        plan = ja.plan(spec, np.arange(5, dtype=np.int32), lens, ends, page_ids)
        return np.asarray(ja.attention(q, k, v, plan))

    got = attend_to(kv_dtype, keys, values)
    want = attend_to(None, *(decoded(x, dtype, kv_dtype) for x in (keys, values)))
    assert np.isfinite(np.float32(want)).all() and np.abs(np.float32(want)).max() > 0.3
    assert_same_bits("o", got, want)


@pytest.mark.parametrize("kv_dtype", ["float8_e5m2", "nvfp4"])
def test_scales_of_heads_are_factors_of_them(kv_dtype):
    case = Case("", dtype="bfloat16", contents=("normal",))
    batch = build(case)
    codes = [encoded(pages, kv_dtype) for pages in (batch.k, batch.v)]
    spec = ja.AttentionSpec(**(case.spec_fields() | {"kv_dtype": kv_dtype}), target="cpu")
    scales = {"k_scale": np.float32([0.5, 2]), "v_scale": np.float32([4, 0.25])}
    got = attend(spec, batch, *codes, **scales)
    half = {
        name: decoded(rows, "float32", kv_dtype) * scales[f"{name}_scale"][:, None]
        for name, rows in zip("kv", codes, strict=True)
    }
    plain = ja.AttentionSpec(**case.spec_fields(), target="cpu")
    want = attend(plain, batch, *(x.astype(jnp.bfloat16) for x in half.values()))
    assert_same_bits("o", got[0], want[0])  # powers of two
    np.testing.assert_allclose(got[1], want[1], rtol=1e-6)


@on_every_platform
@pytest.mark.parametrize("kv_dtype", ALL_FORMATS)
@pytest.mark.parametrize(
    "case",
    [
        Case("mixed", (3, 1, 40, 7), (120, 64, 40, 300)),
        Case("chunk", (200, 1), (333, 140), num_qo_heads=2, page_size=5),
    ],
    ids=lambda case: case.name,
)
def test_fresh_kv_is_what_append_leaves(case, kv_dtype, backend):
    """The bits do not depend on whether append_kv ran."""
    rng = np.random.default_rng(7)
    case = dataclasses.replace(case, dtype="bfloat16", contents=("normal",))
    batch = build(case)
    scales = scales_of(kv_dtype, rng)
    codes = [encoded(pages, kv_dtype) for pages in (batch.k, batch.v)]
    fields = case.spec_fields() | {"kv_dtype": kv_dtype}
    spec = backend.spec(**fields)
    new = [rng.normal(size=shape).astype(jnp.bfloat16) for shape in spec.new_kv_shapes]
    plan = ja.plan(spec, **batch.lengths.plan_arguments())
    appended = ja.append_kv(*codes, *new, plan, **scales)
    fresh = backend.spec(**fields, fresh_kv=True)
    given = dict(zip(("k_new", "v_new"), new, strict=True)) | scales
    got = attend(fresh, batch, *codes, **given)
    assert_same_bits("o", attend(fresh, batch, *appended, **given)[0], got[0])
    want = attend(spec, batch, *appended, **scales)
    # On CPUs e4m3 without fresh rows has its own kernels; on Hopper all formats have.
    if kv_dtype == "float8_e4m3fn" or backend.platform != "cpu":
        np.testing.assert_allclose(np.float32(got[0]), np.float32(want[0]), atol=2e-2)
        return
    assert_same_bits("o", got[0], want[0])
    assert_same_bits("lse", got[1], want[1])


# --- unsupported


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"kv_dtype": "int8", "target": "sm_90", "page_size": 1},
            ("page_size", "CUDA", "16 bytes", "int8", "got 136 bytes", "page_size=1"),
        ),
        (
            {"kv_dtype": "mxfp4", "target": "sm_80", "dtype": "float32"},
            ("dtype", "mxfp4", "CUDA", "got float32"),
        ),
        (
            {"kv_dtype": "mxfp4", "mla": True, "sm_scale": 0.1, "num_kv_heads": 1}
            | {"target": "sm_90", "head_dim_vo": 128, "head_dim_qk": 128},
            ("kv_dtype", "mla=True", "mxfp4"),
        ),
        (
            {"kv_dtype": "int2"},
            ("kv_dtype", "float8_e4m3fn", "int8", "mxfp4", "nvfp4", "int4", "got int2"),
        ),
        (
            {"kv_dtype": "nvfp4", "target": "sm_80", "page_size": 1},
            ("page_size", "CUDA", "16 bytes", "nvfp4", "got 72 bytes", "page_size=1"),
        ),
        (
            {
                "kv_dtype": "nvfp4",
                "mla": True,
                "sm_scale": 0.1,
                "num_kv_heads": 1,
                "head_dim_vo": 64,
            },
            ("kv_dtype", "mla=True", "nvfp4"),
        ),
        (
            {"kv_dtype": "nvfp4", "page_size": None, "max_kv_pages": None, "max_kv_tokens": 8},
            ("kv_dtype", "page_size=None", "float8_e5m2 are", "got nvfp4"),
        ),
        ({"kv_dtype": "int4", "eight_bit_products": True}, ("eight_bit_products", "'int4'")),
        ({"kv_dtype": "mxfp4", "q_dtype": "mxfp4"}, ("q_dtype", "float8_e4m3fn", "mxfp4")),
        (
            {"kv_dtype": "int8", "page_size": None, "max_kv_pages": None, "max_kv_tokens": 8},
            ("kv_dtype", "page_size=None", "float8_e5m2", "got int8"),
        ),
        (
            {"kv_dtype": "float8_e4m3fn", "eight_bit_products": True, "fresh_kv": True}
            | {"target": "sm_90"},
            ("fresh_kv", "eight_bit_products", "CPU", "append"),
        ),
        (
            {"kv_dtype": "float8_e4m3fn", "q_dtype": "float8_e4m3fn", "fresh_kv": True},
            ("fresh_kv", "q_dtype=None", "append"),
        ),
    ],
)
def test_what_is_refused(changed, words):
    fields = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim_qk": 64, "max_kv_pages": 8}
    with pytest.raises(NotImplementedError) as error:
        ja.AttentionSpec(**(fields | {"target": "cpu"} | changed))
    message = str(error.value)
    assert all(word in message for word in words) and message.endswith("."), message


def test_scales_of_a_format_that_has_its_own_are_refused():
    case = Case("", dtype="bfloat16", contents=("normal",))
    batch = build(case)
    codes = [encoded(pages, "int8") for pages in (batch.k, batch.v)]
    spec = ja.AttentionSpec(**(case.spec_fields() | {"kv_dtype": "int8"}), target="cpu")
    with pytest.raises(ValueError, match="k_scale: expected None unless.*float8_e5m2"):
        attend(spec, batch, *codes, k_scale=np.ones(2, np.float32))
    with pytest.raises(ValueError, match=r"k_pages: expected int8.*68.*got bfloat16.*64"):
        attend(spec, batch, batch.k, batch.v)
