"""Matmuls of 8-bit values: what is refused; on CPUs, attention over int8."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import jax_attn as ja
from helpers.attention_cases import CASES, Case, build, expect, kv_places
from helpers.attention_checks import check, run
from helpers.backends import Backend, on_every_isa
from helpers.checking import assert_same_bits
from jax_attn import reference

E4M3 = "float8_e4m3fn"


def _spec(**fields):
    names = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim_qk": 64, "max_kv_pages": 8}
    return ja.AttentionSpec(**(names | {"target": "cpu", "eight_bit_products": True} | fields))


# --- the choice


@pytest.mark.parametrize(("target", "kv_dtype"), [("cpu", "int8"), ("sm_90", E4M3)])
def test_the_choice_is_of_the_spec(target, kv_dtype):
    fields = {"target": target, "kv_dtype": kv_dtype}
    spec, plain = _spec(**fields), _spec(**fields, eight_bit_products=False)
    assert spec != plain and not (spec.problem_words == plain.problem_words).all()
    assert ja.AttentionSpec.from_fields(spec.to_fields()) == spec
    assert spec.kv_shapes(3, 16) == plain.kv_shapes(3, 16)


@pytest.mark.parametrize(
    ("fields", "got"),
    [
        ({}, "kv_dtype=None on cpu"),
        ({"kv_dtype": E4M3}, f"kv_dtype='{E4M3}' on cpu"),
        ({"kv_dtype": "mxfp4"}, "kv_dtype='mxfp4' on cpu"),
        ({"kv_dtype": "int8", "target": "sm_90"}, "kv_dtype='int8' on sm_90"),
        ({"kv_dtype": "float8_e5m2", "target": "sm_90"}, "kv_dtype='float8_e5m2' on sm_90"),
        ({"kv_dtype": E4M3, "target": "sm_80"}, f"kv_dtype='{E4M3}' on sm_80"),
        ({"mla": True, "num_kv_heads": 1, "sm_scale": 0.1}, "kv_dtype=None on cpu"),
    ],
)
def test_formats_that_are_not_multiplied_are_refused(fields, got):
    with pytest.raises(NotImplementedError) as error:
        _spec(**fields)
    message = str(error.value)
    for words in ("AttentionSpec: eight_bit_products: supported with", got, "leave it False"):
        assert words in message and message.endswith("."), message


def test_weights_of_any_sign_are_refused():
    variant = ja.Variant(logits=lambda s, _: s, normalize="none")
    with pytest.raises(NotImplementedError, match="eight_bit_products:.*normalize='none'"):
        _spec(kv_dtype="int8", variant=variant)


def test_it_is_true_or_false():
    with pytest.raises(ValueError, match="eight_bit_products: expected True or False, got 8"):
        _spec(kv_dtype="int8", eight_bit_products=8)


@pytest.mark.parametrize(
    ("field", "value"), [("kv_format", 0), ("kv_format", 1), ("arch", 90), ("arch", 80)]
)
def test_damaged_words_are_refused(field, value):
    """Attributes of a foreign executable are checked by csrc/plan/check_problem.cc."""
    spec = _spec(kv_dtype="int8")
    fields = spec.problem.spec | {field: value}
    with pytest.raises(ValueError, match="eight_bit_products: expected 0 to 0, got 1"):
        ja._core.Problem(fields, {}, [])
    assert ja._core.Problem(spec.problem.spec, {}, []).words == spec.problem.words


# --- attention over int8, on CPUs

_BITS = {"kv_dtype": "int8", "eight_bit_products": True}
_SPLITS = {128: 256, 384: 512}  # steps have 256 tokens
INT8_CASES = [
    dataclasses.replace(case, kv_split=_SPLITS.get(case.kv_split, case.kv_split), **_BITS)
    for case in CASES
    if case.page_size is not None and not case.mla and case.kv_dtype is None
]
INT8_CASES = [dataclasses.replace(case, contents=case.contents[:2]) for case in INT8_CASES]
MIXED = [
    Case("causal", **_BITS),
    Case("full", causal=False, dtype="bfloat16", **_BITS),
    Case("window", window_left=20, page_size=5, num_qo_heads=32, **_BITS),
    Case("split", schedule="fixed_split", kv_split=256, num_qo_heads=6, **_BITS),
]


@pytest.mark.parametrize("case", INT8_CASES, ids=lambda case: case.name)
def test_case(case):
    """Compares with dequantized q, k and v, within the rounding of weights (weight_bound)."""
    backend = Backend("cpu")
    with backend.active():
        check(case, backend)


@pytest.mark.parametrize("case", INT8_CASES[::4], ids=lambda case: case.name)
@on_every_isa  # in turn: the expected values are computed once
def test_case_on_isa(case, backend):
    if "huge" in case.contents and backend.isa == "baseline":
        pytest.skip("without FMA the scaled logit is rounded at 0.06 before the subtraction")
    check(case, backend)


@on_every_isa
@pytest.mark.parametrize("case", MIXED, ids=lambda case: case.name)
@pytest.mark.parametrize("what", ["k", "v"])
def test_nan_reaches_only_the_rows_that_see_it(case, what, backend):
    """A NaN or infinity in a row that append_kv quantizes."""
    batch = build(case)
    plan = ja.plan(backend.spec(**case.spec_fields()), **batch.lengths.plan_arguments())
    clean_o, clean_lse = run(plan, batch)
    starts = np.concatenate([[0], np.cumsum(case.kv_lens)])
    places = np.stack(kv_places(batch.lengths, case.page_size))
    array = getattr(batch, what).copy()
    for request, position, head in ((4, 0, 1), (6, 299, 0), (7, 600, 1)):
        row = np.full((1, 64), 1e3)
        row[0, 5] = np.nan if head else np.inf
        array[(*places[:, starts[request] + position], head)] = reference.quantize(
            row, None, "int8"
        )
    dirty = dataclasses.replace(batch, **{what: array})
    want = expect(case, dirty)
    hit = np.isnan(want.o).any(-1)
    assert hit.any() and not hit.all()
    o, lse = run(plan, dirty)
    np.testing.assert_array_equal(np.isnan(o), np.isnan(want.o))
    np.testing.assert_array_equal(np.isnan(lse), np.isnan(want.lse))
    assert_same_bits("o of the other rows", o[~hit], clean_o[~hit])
    assert_same_bits("lse of the other rows", lse[~hit], clean_lse[~hit])


@on_every_isa
def test_queries_that_are_not_finite_reach_their_rows_alone(backend):
    case = Case("", dtype="bfloat16", **_BITS)
    batch = build(case)
    plan = ja.plan(backend.spec(**case.spec_fields()), **batch.lengths.plan_arguments())
    clean_o, _ = run(plan, batch)
    q = batch.q.copy()
    q[0, 1, 3], q[50, 3, 0] = np.nan, -np.inf
    o, lse = run(plan, dataclasses.replace(batch, q=q))
    hit = np.zeros(o.shape[:2], bool)
    hit[0, 1] = hit[50, 3] = True
    assert np.isnan(o[hit]).all() and np.isnan(lse[hit]).all()
    assert_same_bits("o of the other rows", o[~hit], clean_o[~hit])


@on_every_isa
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("dim", [64, 40, 200])
def test_codes_of_queries(dim, dtype, backend):
    """lse of one key tells the logit: rows of all sizes, of ties, of zeros, of one element."""
    rng = np.random.default_rng(3)
    n = 64
    q = rng.normal(size=(n, 1, dim)) * 2.0 ** rng.integers(-12, 12, (n, 1, 1))
    q[0] = 0
    q[1, :, 1:] = 0
    q[2] = rng.integers(-127, 128, q[2].shape) / 2  # ties
    q[2, :, 0] = 127 / 2
    q[3] = 0 if dtype == "float16" else 2.0**-95
    q = q.astype(dtype)
    spec = backend.spec(
        num_qo_heads=1, num_kv_heads=1, head_dim_qk=dim, dtype=dtype, page_size=1, sm_scale=-0.3,
        max_batch=n, max_qo_tokens=n, max_kv_pages=n, **_BITS,
    )  # fmt: skip
    ids = np.arange(n + 1, dtype=np.int32)
    plan = ja.plan(spec, ids, np.ones(n, np.int32), ids, ids[:-1])
    k, v = (
        np.asarray(reference.quantize(rng.normal(size=(n, 1, 1, dim)).astype(dtype), None, "int8"))
        for _ in "kv"
    )
    o, lse = ja.attention(q, k, v, plan, return_lse=True)
    keys, values = (reference.dequantize(x[:, 0], None, np.float64) for x in (k, v))
    want = -0.3 * (reference.quantize_queries(q.astype(np.float64), "int8") * keys).sum(-1)
    size = 0.3 * (np.abs(q.astype(np.float64)) * np.abs(keys)).sum(-1)
    # Sums are exact. What is left: three factors for scales, the change of base from 2 to e, and
    # the only weight, which is within 2^-22 of 1.
    assert np.all(np.abs(lse - want) <= 2.0**-21 * (size + 1))
    # The only key's weight is 255 of 255, and its value is a quantized value times its scale.
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.float64(o), values, rtol=eps / 2 + 2.0**-20, atol=1e-30)


@on_every_isa
def test_weights_are_rounded_to_multiples_of_the_largest(backend):
    """Two keys whose values tell their softmax weights apart."""
    n, dim = 200, 8
    gap = np.linspace(0, 12, n)
    q = np.zeros((n, 1, dim), np.float32)
    q[:, 0, 0] = 127
    k, v = np.zeros((2, n, 2, 1, dim), np.float32)
    k[:, 1, 0, 0] = -gap / 127
    v[:, 0, 0, 0], v[:, 1, 0, 1] = 127, 127 * 3
    spec = backend.spec(
        num_qo_heads=1, num_kv_heads=1, head_dim_qk=dim, dtype="float32", page_size=2,
        sm_scale=1.0, max_batch=n, max_qo_tokens=n, max_kv_pages=n, **_BITS,
    )  # fmt: skip
    ids = np.arange(n + 1, dtype=np.int32)
    plan = ja.plan(spec, ids, np.full(n, 2, np.int32), ids, ids[:-1])
    pages = (np.asarray(reference.quantize(x, None, "int8")) for x in (k, v))
    o = np.asarray(ja.attention(q, *pages, plan))[:, 0]
    total = 1 + np.exp(-gap)
    # Scales of values are 1 and 3, so a unit of the quantized weight is worth 3 / 255.
    codes = np.rint(np.stack([np.full(n, 85.0), 255 * np.exp(-gap)], 1))
    want = codes * 3 / 255 * 127 / total[:, None]
    off = np.abs(o[:, :2] - want) > 1e-5 * 127
    near_tie = np.abs(255 * np.exp(-gap) % 1 - 0.5) < 1e-3
    assert not off[~near_tie].any() and not o[:, 2:].any()


@on_every_isa
@pytest.mark.parametrize(
    "case",
    [
        Case("mixed", (3, 1, 40, 7), (120, 64, 40, 300), **_BITS),
        Case("chunk", (200, 1), (333, 140), num_qo_heads=2, page_size=5, **_BITS),
        Case("dims", (40, 1), (50, 20), head_dim_qk=128, head_dim_vo=24, **_BITS),
    ],
    ids=lambda case: case.name,
)
def test_fresh_kv_is_what_append_leaves(case, backend):
    rng = np.random.default_rng(7)
    case = dataclasses.replace(case, dtype="bfloat16")
    batch = build(case)
    spec = backend.spec(**case.spec_fields())
    new = [rng.normal(size=shape).astype(jnp.bfloat16) for shape in spec.new_kv_shapes]
    plan = ja.plan(spec, **batch.lengths.plan_arguments())
    k, v = ja.append_kv(batch.k, batch.v, *new, plan)
    want = ja.attention(batch.q, k, v, plan, return_lse=True)
    fresh = backend.spec(**case.spec_fields(), fresh_kv=True)
    plan = ja.plan(fresh, **batch.lengths.plan_arguments())
    for pages in ((batch.k, batch.v), (k, v)):
        got = ja.attention(batch.q, *pages, plan, k_new=new[0], v_new=new[1], return_lse=True)
        assert_same_bits("o", got[0], want[0])
        assert_same_bits("lse", got[1], want[1])


@on_every_isa
@pytest.mark.parametrize("lengths", [((1,) * 5, (0, 1, 129, 700, 17)), ((150, 3), (550, 140))])
def test_variants(lengths, backend):
    """A mask and a bias: results as without int8 matmuls, within their rounding."""
    variant = ja.Variant(
        logits=lambda s, at: s - 0.01 * at.kv_pos.astype(s.dtype),
        mask=lambda at: (at.kv_pos % 7 != 3) | (at.kv_pos > at.q_pos - 4),
    )
    case = Case("", *lengths, dtype="float32", num_qo_heads=8, **_BITS)
    batch = build(case)
    outs = []
    for products in (True, False):
        fields = case.spec_fields() | {"eight_bit_products": products, "share_prefixes": False}
        spec = backend.spec(**fields, variant=variant)
        outs.append(run(ja.plan(spec, **batch.lengths.plan_arguments()), batch))
    (o, lse), (plain_o, plain_lse) = outs
    finite = np.isfinite(plain_lse)
    assert (np.isfinite(lse) == finite).all() and finite.any()
    # q is off by 1/254 of its largest element: about 1 % of a logit with 64 dims.
    assert np.abs(lse[finite] - plain_lse[finite]).max() < 0.05
    error = np.linalg.norm(o - plain_o) / np.linalg.norm(plain_o)
    assert 1e-4 < error < 0.02, error


def test_a_plan_from_a_file_says_that_codes_are_multiplied(tmp_path):
    case = Case("", dtype="bfloat16", **_BITS)
    batch = build(case)
    spec = ja.AttentionSpec(**case.spec_fields(), target="cpu")
    plan = ja.plan(spec, **batch.lengths.plan_arguments())
    plan.save(tmp_path / "plan")
    loaded = ja.AttentionPlan.load(tmp_path / "plan")
    assert loaded.spec == spec
    for name, got, want in zip(("o", "lse"), run(loaded, batch), run(plan, batch), strict=True):
        assert_same_bits(name, got, want)
