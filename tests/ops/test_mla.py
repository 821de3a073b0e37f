"""Multi-head latent attention: absorbed over a latent cache, and its projections in and out."""

import dataclasses
import itertools

import deepseek
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_attn as ja
from helpers.attention_cases import DTYPES, E4M3, SHORT, Case, build, expect, kv_places
from helpers.attention_checks import check, make_plan, run
from helpers.backends import on_every_backend, on_every_platform
from helpers.checking import assert_close_state, assert_same_bits
from jax_attn import reference
from jax_attn.models import LinearScaling, Rope

# DeepSeek-V2 and V3: 512 columns are both key and value, 64 are key only.
DEEPSEEK = {"mla": True, "num_kv_heads": 1, "head_dim_qk": 576, "head_dim_vo": 512}
SCALE = (128 + 64) ** -0.5
DECODES = (0, 1, 15, 16, 17, 33, 96, 97, 1023)
# The mix of a server's step, shorter than MIXED_QO: 128 heads are many rows for the reference.
SHORT_QO = (1, 0, 17, 1, 5, 1, 3)
SHORT_KV = (33, 16, 17, 0, 2, 300, 129)


def latent(name, num_qo_heads, **fields):
    lens = {"qo_lens": SHORT_QO, "kv_lens": SHORT_KV}
    fields = {**DEEPSEEK, **lens, "sm_scale": SCALE, "dtype": "bfloat16", **fields}
    return Case(name, num_qo_heads=num_qo_heads, **fields)


def _cases():
    for heads in (1, 2, 5, 8, 16, 17, 32, 40, 64, 65, 100, 127, 128):
        dtype = DTYPES[1 + heads % 2]
        yield latent(f"heads_{heads}-{SHORT[dtype]}", heads, dtype=dtype, page_size=1)
    for page_size in (None, 1, 3, 16, 64):
        yield latent(
            f"page_size_{page_size}",
            16,
            qo_lens=(1,) * len(DECODES),
            kv_lens=DECODES,
            page_size=page_size,
        )
    for heads, qo_len in itertools.product((4, 16, 128), (2, 4, 7)):
        yield latent(
            f"speculative_{qo_len}x{heads}",
            heads,
            qo_lens=(qo_len,) * len(DECODES),
            kv_lens=DECODES,
            page_size=64,
            contents=("normal", "count", "rising", "falling"),
        )
    # Every length around the kernels' steps once.
    yield latent("every_kv_len", 3, qo_lens=(1,) * 140, kv_lens=tuple(range(1, 141)), page_size=7)
    for schedule, split in (("balanced", None), ("fixed_split", 128), ("no_split", None)):
        for heads in (16, 128):
            yield latent(
                f"one_long_request_{heads}-{schedule}",
                heads,
                qo_lens=(1, 2, 0),
                kv_lens=(2000, 300, 3),
                page_size=64,
                schedule=schedule,
                kv_split=split,
                contents=("normal", "rising", "falling"),
            )
    prefixes = {
        "qo_lens": (1,) * 6,
        "kv_lens": (600, 577, 900, 33, 801, 257),
        "branches": ("ab", "ab", "abc", "", "abc", "a"),
        "num_ctas": 3,
    }
    for heads in (8, 128):
        yield latent(f"shared_prefixes_{heads}", heads, **prefixes)
    yield latent("stacked", 16, num_layers=3, page_size=5)
    yield latent("sinks", 20, sinks=True)
    yield latent("soft_cap", 20, logits_soft_cap=5.0, dtype="float16")
    yield latent("window", 20, window_left=40)
    yield latent("full", 20, causal=False)
    yield latent("negative_scale", 20, sm_scale=-0.1)
    yield latent("q_offsets", 20, q_offsets=(0, 16, -3, 0, 65, 170, 2000))
    yield latent("batch_0", 16, qo_lens=(), kv_lens=())
    yield latent("no_keys", 16, qo_lens=(3, 1), kv_lens=(0, 0), contents=("normal",))
    # Other models: MiniCPM3, and sizes that no model has.
    yield latent("minicpm3", 40, head_dim_qk=288, head_dim_vo=256)
    yield latent("small", 6, head_dim_qk=144, head_dim_vo=128)
    yield latent("no_rope", 6, head_dim_qk=128, head_dim_vo=128)


CASES = tuple(_cases())


FLOAT8 = (E4M3, "float8_e5m2")

# Only the code specific to an instruction set differs: a few cases for each are enough.
FEW = [case for case in CASES if case.name in ("heads_5-f16", "heads_100-bf16", "speculative_4x4")]


@on_every_platform
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case, backend):
    check(case, backend)


@on_every_backend
@pytest.mark.parametrize("case", FEW, ids=lambda case: case.name)
def test_few_cases(case, backend):
    check(case, backend)


@on_every_platform
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case_of_e4m3(case, backend):
    """The bounds are those of plain rows: the reference multiplies dequantized values."""
    check(dataclasses.replace(case, kv_dtype=E4M3), backend)


@on_every_backend
@pytest.mark.parametrize("kv_dtype", FLOAT8)
@pytest.mark.parametrize("case", FEW, ids=lambda case: case.name)
def test_rows_of_codes_have_the_bits_of_plain_rows(case, kv_dtype, backend):
    """Quantized rows have the bits of dequantized plain rows; k_scale is a power of two.

    On CUDA another kernel may run plain rows; csrc/mla_codes_*_test.cc compare the bits.
    """
    batch = build(dataclasses.replace(case, kv_dtype=kv_dtype))
    coded = dataclasses.replace(case, kv_dtype=kv_dtype)
    scaled = dataclasses.replace(batch, scales={"k_scale": np.float32([0.25])})
    with np.errstate(invalid="ignore"):
        plain = reference.dequantize(batch.k, scaled.scales["k_scale"], jnp.dtype(case.dtype))
    got = run(make_plan(coded, backend, batch), scaled)
    want_batch = dataclasses.replace(batch, k=np.asarray(plain), scales={})
    if backend.platform == "cpu":
        want = run(make_plan(case, backend, batch), want_batch)
        assert_same_bits("o", got[0], want[0])
        np.testing.assert_allclose(got[1], want[1], rtol=1e-6, atol=1e-6)
        return
    want = expect(case, want_batch)
    assert_close_state(*got, want.o, want.lse, want.o_bound, want.lse_bound)


@on_every_platform
@pytest.mark.parametrize("kv_dtype", FLOAT8)
def test_append_and_attention_over_codes(kv_dtype, backend):
    """Through the stacked cache; scales are data, and one executable serves all."""
    case = latent("append", 16, qo_lens=(5, 1, 0), kv_lens=(40, 17, 9), num_layers=2)
    batch = build(dataclasses.replace(case, kv_dtype=kv_dtype))
    spec = backend.spec(**case.spec_fields() | {"kv_dtype": kv_dtype})
    lengths = batch.lengths.plan_arguments()
    plan = ja.plan(spec, **lengths)
    rng = np.random.default_rng(2)
    new = (40 * rng.normal(size=(spec.max_qo_tokens, 1, 576))).astype(spec.dtype)
    new[0, 0, 5], new[1, 0, 570], new[2, 0, 0] = np.inf, -np.inf, 1e6  # saturates
    new[6:] = np.nan

    @jax.jit
    def step(pages, scale):
        pages, none = ja.append_kv(pages, None, new, None, plan, layer=1, k_scale=scale)
        assert none is None
        return ja.attention(batch.q, pages, None, plan, layer=1, k_scale=scale), pages

    for scale in (np.float32([0.3]), np.float32([2.7])):
        o, pages = step(batch.k, scale)
        pages, want = np.asarray(pages), np.array(batch.k)
        with np.errstate(invalid="ignore", over="ignore"):
            rows = reference.quantize(new, scale, kv_dtype)
        places = np.stack(kv_places(batch.lengths, case.page_size))
        want[1][tuple(places[:, 35:40])] = rows[:5]
        want[1][tuple(places[:, 56:57])] = rows[5:6]
        nan = np.isnan(want.astype(np.float32))
        assert_same_bits("nan", np.isnan(pages.astype(np.float32)), nan)
        assert_same_bits("codes", pages[~nan], want[~nan])
        truth, _ = reference.attention(
            batch.q.astype(np.float64),
            want.astype(np.float64),
            None,
            **lengths,
            spec=spec,
            layer=1,
            k_scale=scale,
        )
        error = np.abs(np.float32(o[:6]) - truth[:6]).max(axis=-1)
        largest = np.abs(truth[:6]).max(axis=-1)
        assert np.all(error <= 2.0**-6 * largest)  # weights and o have 8 bits
    assert step._cache_size() == 1


@on_every_platform
@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan])
def test_a_scale_of_codes_that_is_not_positive_shows(bad, backend):
    case = latent("bad", 20, qo_lens=(3, 1), kv_lens=(20, 9), kv_dtype=E4M3)
    batch = build(case)
    batch = dataclasses.replace(batch, scales={"k_scale": np.float32([bad])})
    o, lse = run(make_plan(case, backend, batch), batch)
    assert np.isnan(o[:4]).all() and np.isnan(lse[:4]).all()


@on_every_platform
@pytest.mark.parametrize("head_dims", [(24, 8), (40, 40), (576, 512)])
def test_what_only_cpus_support(head_dims, backend):
    """float32, and head dims without a CUDA tile."""
    d_qk, d_vo = head_dims
    case = latent("cpu", 12, head_dim_qk=d_qk, head_dim_vo=d_vo, dtype="float32")
    if backend.platform == "cpu":
        return check(case, backend)
    with pytest.raises(NotImplementedError, match="mla=True"):
        backend.spec(**case.spec_fields())


@on_every_platform
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("heads", [2, 16, 100])
def test_nan_in_a_visible_latent_row_reaches_only_the_rows_that_see_it(heads, dtype, backend):
    case = latent("nan", heads, dtype=dtype)
    batch = build(case)
    plan = make_plan(case, backend, batch)
    clean_o, clean_lse = run(plan, batch)
    starts = np.concatenate([[0], np.cumsum(case.kv_lens)])
    places = np.stack(kv_places(batch.lengths, case.page_size))
    # In a column that is key and value, and in one that is key only.
    for column in (7, 570):
        k = batch.k.copy()
        for request, position in ((2, 9), (5, 40), (6, 128)):
            k[(*places[:, starts[request] + position], 0, column)] = np.nan
        dirty = dataclasses.replace(batch, k=k)
        want = expect(case, dirty)
        hit = np.isnan(want.lse)
        assert hit.any() and not hit.all()
        o, lse = run(plan, dirty)
        np.testing.assert_array_equal(np.isnan(lse), hit)
        assert np.isnan(o[hit]).all()
        assert_same_bits("o of the other rows", o[~hit], clean_o[~hit])
        assert_same_bits("lse of the other rows", lse[~hit], clean_lse[~hit])


@on_every_platform
@pytest.mark.parametrize("heads", [16, 128])
def test_a_request_has_the_same_bits_in_any_batch(heads, backend):
    fields = {"schedule": "fixed_split", "kv_split": 128, "page_size": 16}
    many = latent("many", heads, qo_lens=(1, 2, 1, 4), kv_lens=(50, 300, 1000, 90), **fields)
    batch = build(many)
    o, lse = run(make_plan(many, backend, batch), batch)
    for r in range(4):
        rows = slice(*batch.lengths.qo_indptr[r : r + 2])
        pages = slice(*batch.lengths.page_indptr[r : r + 2])
        spec = make_plan(many, backend, batch).spec
        alone = ja.plan(
            spec,
            [0, many.qo_lens[r]],
            [many.kv_lens[r]],
            [0, pages.stop - pages.start],
            batch.lengths.page_indices[pages],
        )
        q = np.full_like(batch.q, np.nan)
        q[: many.qo_lens[r]] = batch.q[rows]
        alone_o, alone_lse = run(alone, dataclasses.replace(batch, q=q))
        assert_same_bits(f"o of request {r}", alone_o[: many.qo_lens[r]], o[rows])
        assert_same_bits(f"lse of request {r}", alone_lse[: many.qo_lens[r]], lse[rows])


@on_every_platform
@pytest.mark.parametrize("causal", [True, False])
def test_prefill_that_is_not_absorbed(causal, backend):
    """Heads of 192 and 128: the result of `ja.mla.expand_kv` takes the ordinary path."""
    for heads in (5, 16):
        case = Case(
            "prefill",
            qo_lens=(40, 1, 130),
            kv_lens=(40, 60, 130),
            num_qo_heads=heads,
            num_kv_heads=heads,
            head_dim_qk=192,
            head_dim_vo=128,
            dtype="bfloat16",
            page_size=None,
            causal=causal,
        )
        check(case, backend)


# ---- the projections, and a block of a model ---------------------------------------------------

BLOCKS = {
    # DeepSeek-V2-Lite's and V3's shapes, made small.
    "v2_lite": deepseek.DeepseekConfig(96, 128, 6, None, 128, 32, 16, 24, Rope(1e4)),
    "v3": deepseek.DeepseekConfig(
        64, 96, 16, 48, 256, 64, 32, 64, Rope(1e4, LinearScaling(2.0)), mscale=1.2
    ),
}


def test_absorbing_changes_no_logit_and_no_output():
    rng = np.random.default_rng(0)
    heads, nope, rope, rank, v_dim = 5, 24, 8, 40, 16
    ckv, k_rope = rng.normal(size=(7, rank)), rng.normal(size=(7, rope))
    q_nope, q_rope = rng.normal(size=(3, heads, nope)), rng.normal(size=(3, heads, rope))
    kv_b = rng.normal(size=(rank, heads * (nope + v_dim)))
    w_uk, w_uv = ja.mla.split_kv_b(jnp.asarray(kv_b), heads, nope)
    k, v = ja.mla.expand_kv(jnp.asarray(ckv), jnp.asarray(k_rope), w_uk, w_uv)
    plain = (ckv @ kv_b).reshape(7, heads, nope + v_dim)
    np.testing.assert_allclose(k[..., :nope], plain[..., :nope], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(v, plain[..., nope:], rtol=1e-4, atol=1e-4)
    latent = ja.mla.latent_rows(jnp.asarray(ckv), jnp.asarray(k_rope))
    assert latent.shape == (7, 1, rank + rope)
    q = ja.mla.absorb_query(jnp.asarray(q_nope), jnp.asarray(q_rope), w_uk)
    full = np.concatenate([q_nope, q_rope], axis=-1)
    np.testing.assert_allclose(
        np.einsum("qhd,kd->hqk", q, latent[:, 0]),
        np.einsum("qhd,khd->hqk", full, k),
        rtol=1e-4,
        atol=1e-3,
    )
    weights = rng.random(size=(heads, 3, 7))
    np.testing.assert_allclose(
        ja.mla.expand_output(jnp.asarray(np.einsum("hqk,kc->qhc", weights, ckv)), w_uv),
        np.einsum("hqk,khd->qhd", weights, v),
        rtol=1e-4,
        atol=1e-3,
    )


@on_every_platform
@pytest.mark.parametrize("dtype, tolerance", [("float32", 2e-5), ("bfloat16", 0.03)])
@pytest.mark.parametrize("name", BLOCKS)
def test_block_prefills_and_decodes_as_the_formulas_say(name, dtype, tolerance, backend):
    """Prompts at once, then token by token and two at a time, on a stacked cache."""
    config = BLOCKS[name]
    on_cpu = backend.platform == "cpu"
    if dtype == "float32" and not on_cpu:
        pytest.skip("CUDA has no kernel of float32 over a latent cache")
    # Jitted, and all of one length: operation by operation XLA would compile hundreds.
    random_block = jax.jit(deepseek.random_block, static_argnames=("config", "dtype"))
    reference_block = jax.jit(deepseek.reference_block, static_argnames="config")
    params = random_block(config, jax.random.key(0), dtype)
    lens = np.array([9, 1, 20])
    xs = np.random.default_rng(1).normal(size=(3, 27, config.hidden_size)).astype(jnp.dtype(dtype))
    want = [np.asarray(reference_block(params, config, x), np.float32) for x in xs]
    target = "cpu" if on_cpu else None
    step = jax.jit(deepseek.block, static_argnames="config", donate_argnames="latent_pages")
    max_tokens, page_size, pages_each = 32, 4, 8
    cache = ja.AttentionSpec(
        **deepseek.cache_fields(config),
        page_size=page_size,
        max_batch=3,
        max_qo_tokens=max_tokens,
        max_kv_pages=24,
        dtype=dtype,
        target=target,
    )
    prompt = deepseek.prompt_spec(config, max_tokens, max_batch=3, dtype=dtype, target=target)
    width = config.kv_lora_rank + config.qk_rope_head_dim
    pages = jnp.full((2, 24, page_size, 1, width), jnp.nan, dtype)
    page_indices = np.random.default_rng(0).permutation(24)

    done = np.zeros(3, int)
    for new in (lens, [1, 1, 1], [2, 0, 1], [1, 4, 2]):
        new = np.asarray(new)
        qo_indptr = np.concatenate([[0], np.cumsum(new)])
        x = np.full((max_tokens, config.hidden_size), np.nan, xs.dtype)
        positions = np.zeros(max_tokens, np.int32)
        for r in range(3):
            rows = slice(qo_indptr[r], qo_indptr[r + 1])
            x[rows] = xs[r, done[r] : done[r] + new[r]]
            positions[rows] = np.arange(done[r], done[r] + new[r])
        plan = ja.plan(cache, qo_indptr, done + new, pages_each * np.arange(4), page_indices)
        is_prompt = not done.any()
        prompt_plan = ja.plan(prompt, qo_indptr, new) if is_prompt else None
        got, pages = step(params, config, x, positions, pages, plan, prompt_plan, layer=1)
        got = np.asarray(got, np.float32)
        for r in range(3):
            np.testing.assert_allclose(
                got[qo_indptr[r] : qo_indptr[r + 1]],
                want[r][done[r] : done[r] + new[r]],
                atol=tolerance * np.abs(want[r]).max(),
                rtol=0,
            )
        done += new
    assert np.isnan(np.asarray(pages[0])).all()  # the other layer


def latent_spec(**changes):
    fields = {
        "num_qo_heads": 16,
        **DEEPSEEK,
        "sm_scale": SCALE,
        "page_size": 16,
        "max_kv_pages": 8,
        "max_batch": 2,
        "max_qo_tokens": 2,
        "target": "cpu",
    }
    return ja.AttentionSpec(**{**fields, **changes})


@pytest.mark.parametrize(
    "changes, error, sentence",
    [
        ({"sm_scale": None}, ValueError, "sm_scale: expected the model's scale"),
        ({"num_kv_heads": 2}, ValueError, "num_kv_heads: expected 1 with mla=True"),
        ({"num_qo_heads": 129}, NotImplementedError, "1 to 128 are supported, got 129"),
        ({"head_dim_qk": 584}, NotImplementedError, "multiples of 8 up to 576"),
        ({"head_dim_qk": 64, "head_dim_vo": 128}, ValueError, "at most head_dim_qk=64"),
        ({"target": "sm_90", "dtype": "float32"}, NotImplementedError, "dtype: with mla=True"),
        ({"target": "sm_90", "head_dim_vo": 448}, NotImplementedError, "multiples of 128"),
        ({"target": "sm_90", "head_dim_qk": 568}, NotImplementedError, "multiples of 16"),
        ({"kv_dtype": "int8"}, NotImplementedError, "kv_dtype: with mla=True.*e5m2.*got int8"),
        ({"kv_dtype": "mxfp4"}, NotImplementedError, "kv_dtype: with mla=True.*got mxfp4"),
        ({"kv_dtype": E4M3, "q_dtype": E4M3}, NotImplementedError, "q_dtype: with mla=True None"),
        (
            {"kv_dtype": E4M3, "target": "sm_90", "dtype": "float32"},
            NotImplementedError,
            "dtype: with mla=True",
        ),
        (
            {"kv_dtype": E4M3, "target": "sm_90", "eight_bit_products": True},
            NotImplementedError,
            "eight_bit_products: supported with mla=False",
        ),
    ],
)
def test_bad_spec(changes, error, sentence):
    with pytest.raises(error, match=sentence):
        latent_spec(**changes)


def test_bad_operands():
    spec = latent_spec()
    plan = ja.plan(spec, [0, 1], [5], [0, 1], [0])
    q = jnp.zeros(spec.q_shape, spec.dtype)
    pages = jnp.zeros((4, 16, 1, 576), spec.dtype)
    new = jnp.zeros((2, 1, 576), spec.dtype)
    with pytest.raises(ValueError, match="attention: v_pages: expected None with mla=True"):
        ja.attention(q, pages, pages[..., :512], plan)
    with pytest.raises(ValueError, match="append_kv: v_new: expected None with mla=True"):
        ja.append_kv(pages, None, new, new, plan)
    with pytest.raises(ValueError, match=r"k_pages: expected bfloat16\[4, 16, 1, 576\]"):
        ja.attention(q, pages[..., :512], None, plan)
    codes = latent_spec(kv_dtype=E4M3)
    coded, scale = jnp.zeros((4, 16, 1, 576), E4M3), np.ones(1, np.float32)
    plan_of_codes = ja.plan(codes, [0, 1], [5], [0, 1], [0])
    with pytest.raises(ValueError, match="attention: v_scale: expected None with mla=True"):
        ja.attention(q, coded, None, plan_of_codes, v_scale=scale)
    with pytest.raises(ValueError, match="append_kv: v_scale: expected None with mla=True"):
        ja.append_kv(coded, None, new, None, plan_of_codes, v_scale=scale)
    with pytest.raises(ValueError, match=r"k_scale: expected float32\[1\].*got float32\[16\]"):
        ja.attention(q, coded, None, plan_of_codes, k_scale=np.ones(16, np.float32))
    both = ja.AttentionSpec(4, 2, 64, max_kv_pages=8, max_qo_tokens=2, target="cpu")
    with pytest.raises(ValueError, match=r"attention: v_pages: expected bfloat16.*got None"):
        ja.attention(
            jnp.zeros(both.q_shape, both.dtype),
            jnp.zeros((4, 16, 2, 64), both.dtype),
            None,
            ja.plan(both, [0, 1], [5], [0, 1], [0]),
        )
