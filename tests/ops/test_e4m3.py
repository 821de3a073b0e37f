"""float8_e4m3fn keys, values and queries: every e4m3 value, every conversion, scales of heads.

The cases of attention_cases.py cover everything else.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_attn as ja
from helpers.attention_cases import E4M3, Case, build
from helpers.backends import on_every_backend, on_every_platform
from helpers.checking import assert_same_bits
from jax_attn import reference

CODES = np.arange(256, dtype=np.uint8).view(reference.E4M3)


every_dtype = pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])


def one_key(backend, dtype, num_tokens, **fields):
    """A spec and a plan of num_tokens queries over one key each, or over one key for all."""
    spec = backend.spec(
        num_qo_heads=1,
        num_kv_heads=1,
        head_dim_qk=256,
        dtype=dtype,
        kv_dtype=E4M3,
        sm_scale=1.0,
        causal=False,
        page_size=1,
        max_batch=num_tokens,
        max_qo_tokens=num_tokens,
        max_kv_pages=num_tokens,
        **fields,
    )
    return spec, ja.plan(spec, [0, num_tokens], [1], [0, 1], [0])


@on_every_backend
@every_dtype
@pytest.mark.parametrize("num_tokens", [1, 256], ids=["decode", "prefill"])
def test_every_code_of_a_value(num_tokens, dtype, backend):
    """Over one key o is its value, and every dtype represents e4m3 exactly."""
    _, plan = one_key(backend, dtype, num_tokens)
    q = jnp.ones((num_tokens, 1, 256), dtype)
    k, v = np.zeros((1, 1, 1, 256), E4M3), CODES.reshape(1, 1, 1, 256)
    o = np.asarray(ja.attention(q, k, v, plan)).astype(np.float32)
    want = np.broadcast_to(CODES.astype(np.float32), o.shape)
    np.testing.assert_array_equal(o, want)
    np.testing.assert_array_equal(np.isnan(o[0, 0]), np.isnan(CODES))


@on_every_backend
@every_dtype
@pytest.mark.parametrize("q_dtype", [None, E4M3], ids=["", "q"])
def test_every_code_of_a_key(q_dtype, dtype, backend):
    """Token i is the unit vector of dimension i, so that its logit is element i of the key."""
    _, plan = one_key(backend, dtype, 256, q_dtype=q_dtype)
    q = np.eye(256)[:, None].astype(q_dtype or dtype)
    codes = np.where(np.isnan(CODES), 0, CODES).astype(E4M3)
    k, v = codes.reshape(1, 1, 1, 256), np.zeros((1, 1, 1, 256), E4M3)
    _, lse = ja.attention(q, k, v, plan, return_lse=True)
    # A running max of 0 instead of the true one leaves the error of exp2 and log2 near 1.
    np.testing.assert_allclose(lse[:, 0], codes.astype(np.float32), rtol=1e-6, atol=1e-6)
    if q_dtype is None:
        return
    # With q and k exchanged; one token for each value, as NaN stays in its own row's products.
    q = np.zeros((256, 1, 256), E4M3)
    q[:, 0, 0] = CODES
    k = np.zeros((1, 1, 1, 256), E4M3)
    k[..., 0] = 1
    _, lse = ja.attention(q, k, v, plan, return_lse=True)
    np.testing.assert_allclose(lse[:, 0], CODES.astype(np.float32), rtol=1e-6, atol=1e-6)


@on_every_platform
@every_dtype
@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled"])
def test_append_converts_as_the_reference_does(scaled, dtype, backend):
    """Every 16-bit number: ties, subnormals, numbers too large, infinities, NaN; f32 near ties."""
    case = Case("", (16,), (16,), num_qo_heads=2, num_kv_heads=2, head_dim_qk=256, kv_dtype=E4M3)
    lengths = build(case).lengths
    spec = backend.spec(**case.spec_fields() | {"dtype": dtype})
    plan = ja.plan(spec, **lengths.plan_arguments())
    words = np.arange(2**16, dtype=np.uint16)
    if dtype == "float32":
        words = words.astype(np.uint32) << 16
        words = np.concatenate([words + low for low in (0, 1, 0xFFFF)]).astype(np.uint32)
    numbers = words.view(dtype).reshape(-1, 16, 2, 256)
    append = jax.jit(ja.append_kv)
    rng = np.random.default_rng(0)
    for new in numbers:
        new = np.concatenate([new, np.zeros((3, 2, 256), dtype)])
        scales = rng.uniform(0.01, 50, (2, 2)).astype(np.float32) if scaled else (None, None)
        pages = np.full((4, 16, 2, 256), np.nan, E4M3)
        got = append(pages, pages, new, new, plan, k_scale=scales[0], v_scale=scales[1])
        for pool, scale in zip(got, scales, strict=True):
            page = np.asarray(pool)[lengths.page_indices[0]]
            with np.errstate(invalid="ignore"):
                want = reference.quantize(new[:16], scale)
            assert_same_bits("nan", np.isnan(page), np.isnan(want))
            assert_same_bits("codes", page[~np.isnan(want)], want[~np.isnan(want)])
            assert np.isnan(np.asarray(pool)).sum() == 3 * page.size + np.isnan(want).sum()


@on_every_platform
def test_append_and_attention_without_a_recompile(backend):
    """Through the stacked cache, as a model does; scales are data."""
    case = Case("", (5, 1), (40, 17), num_layers=2, dtype="bfloat16", kv_dtype=E4M3, num_qo_heads=4)
    batch = build(case)
    plan = ja.plan(backend.spec(**case.spec_fields()), **batch.lengths.plan_arguments())
    lengths = batch.lengths.plan_arguments()
    rng = np.random.default_rng(1)
    k_new, v_new = (rng.normal(size=(9, 2, 64)).astype(jnp.bfloat16) for _ in "kv")

    @jax.jit
    def step(k, v, scales):
        k, v = ja.append_kv(k, v, k_new, v_new, plan, layer=1, **scales)
        return ja.attention(batch.q, k, v, plan, layer=1, **scales), k, v

    for seed in range(3):
        scales = np.random.default_rng(seed).uniform(0.5, 2, (2, 2)).astype(np.float32)
        scales = {"k_scale": scales[0], "v_scale": scales[1]}
        o, k, v = step(batch.k, batch.v, scales)
        want = reference.append_kv(batch.k, batch.v, k_new, v_new, **lengths, layer=1, **scales)
        assert_same_bits("k", k, want[0])
        assert_same_bits("v", v, want[1])
        arguments = batch.q, np.asarray(want[0]), np.asarray(want[1])
        truth, _ = reference.attention(
            *(x.astype(np.float64) for x in arguments), **lengths, spec=plan.spec, layer=1, **scales
        )
        np.testing.assert_allclose(np.float32(o[:6]), truth[:6], atol=2e-2)
    assert step._cache_size() == 1


@on_every_platform
def test_a_scale_is_a_factor_of_its_head(backend):
    """Scales are powers of two, so that the bits are those of scaled operands."""
    case = Case("", dtype="bfloat16", kv_dtype=E4M3, q_dtype=E4M3, num_qo_heads=8, sinks=True)
    batch = build(case)
    spec = backend.spec(**case.spec_fields())
    plan = ja.plan(spec, **batch.lengths.plan_arguments())
    arrays = batch.q, batch.k, batch.v, plan
    attend = jax.jit(ja.attention)
    plain = np.asarray(attend(*arrays, sinks=batch.sinks))
    ones = {"q_scale": np.ones(8), "k_scale": np.ones(2), "v_scale": np.ones(2)}
    ones = {name: x.astype(np.float32) for name, x in ones.items()}
    assert_same_bits("o with scales of 1", attend(*arrays, sinks=batch.sinks, **ones), plain)
    values = ones | {"v_scale": np.array([1, 4], np.float32)}
    want = plain * np.repeat(values["v_scale"], 4)[:, None].astype(plain.dtype)
    assert_same_bits("o with v_scale", attend(*arrays, sinks=batch.sinks, **values), want)
    # A factor of q's scale may move to k's.
    keys = ones | {"k_scale": np.array([2, 0.25], np.float32)}
    keys["q_scale"] = np.repeat(1 / keys["k_scale"], 4)
    assert_same_bits("o with both", attend(*arrays, sinks=batch.sinks, **keys), plain)
    only_k = attend(*arrays, sinks=batch.sinks, k_scale=keys["k_scale"])
    only_q = attend(*arrays, sinks=batch.sinks, q_scale=np.repeat(keys["k_scale"], 4))
    assert_same_bits("o with either", only_q, only_k)
    assert (np.asarray(only_k) != plain).any()


@on_every_platform
@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan])
def test_a_scale_that_is_not_positive_shows(bad, backend):
    case = Case("", (3, 1), (20, 9), dtype="bfloat16", kv_dtype=E4M3, q_dtype=E4M3)
    batch = build(case)
    plan = ja.plan(backend.spec(**case.spec_fields()), **batch.lengths.plan_arguments())
    arrays = batch.q, batch.k, batch.v, plan
    good = np.asarray(ja.attention(*arrays))[:4]
    for name, heads in (("k_scale", slice(2, 4)), ("q_scale", slice(3, 4))):
        scale = np.ones(len(batch.scales[name]), np.float32)
        scale[-1] = bad
        o, lse = ja.attention(*arrays, **{name: scale}, return_lse=True)
        wrong = np.zeros(4, bool)
        wrong[heads] = True
        assert np.isnan(np.asarray(o)[:4, wrong]).all() and np.isnan(lse[:4, wrong]).all()
        assert_same_bits("o of the other heads", np.asarray(o)[:4, ~wrong], good[:, ~wrong])


def test_quantize_of_numpy_and_of_jax_agree():
    words = np.arange(2**16, dtype=np.uint32) << 16
    x = np.concatenate([words, words + 1, words + 0xFFFF]).astype(np.uint32).view(np.float32)
    with np.errstate(invalid="ignore"):
        host = reference.quantize(x[:, None])
    # XLA's emitters of jax 0.10 (see conftest.py) round some of the smallest values to 0.
    own = {"xla_cpu_use_fusion_emitters": True} if jax.__version__.startswith("0.10.") else {}
    on_jax = jax.jit(reference.quantize, compiler_options=own)
    assert_same_bits("codes", on_jax(jnp.asarray(x)[:, None]), host)
    finite = host[np.isfinite(x)].astype(np.float64)[:, 0]
    error = np.abs(finite - np.clip(x[np.isfinite(x)], -448, 448).astype(np.float64))
    assert np.all(error <= np.maximum(2.0**-10, np.abs(finite) / 15))
