"""The backward pass with variants on CUDA: its custom call, and results on a GPU.

The oracle is jax.vjp of dense attention in float64.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from variant_functions import alibi, dense_bias, documents, prefix_lm, sigmoid_of, t5_bias

import jax_attn as ja
from helpers import variant_gradients as on_cpus
from helpers.attention_cases import Case, build
from helpers.variant_gradients import LONG, OPERATIONS, SHORT, on_gpu, plan_of
from helpers.variants import (
    dilated,
    nothing,
    of_lengths,
    packed,
    per_row,
    sinks_and_window,
    soft_cap,
    variant_of,
)
from jax_attn import _core
from jax_attn._variant.gradient import gradient_of


def check(*arguments, **options):
    return on_cpus.check(*arguments, **options, target=None)


# ---- without a GPU


def kernels_of(variant, wanted=()):
    spec = ja.AttentionSpec(
        4, 2, 128, dtype="bfloat16", page_size=None, max_qo_tokens=99, max_kv_tokens=99,
        variant=variant, target="sm_90",
    )  # fmt: skip
    words = [] if variant is None else list(gradient_of(variant, wanted).words)
    return _core.backward_sources(spec.problem, words)


def test_the_portable_kernel_runs_variants_on_hopper():
    variant, _ = variant_of(alibi)
    assert len(kernels_of(None)) == 2
    (source,) = kernels_of(variant)
    assert "wgmma" not in source.name and "variant::Given" in source.text


def test_kernels_differ_by_what_is_differentiated():
    variant, _ = variant_of(alibi)
    (of_scores,), (of_slopes,) = kernels_of(variant), kernels_of(variant, (0,))
    assert of_scores.name != of_slopes.name
    assert "kNumElements = 0;" in of_scores.text and "kNumElements = 1;" in of_slopes.text


def test_a_gradient_of_another_variant_is_refused():
    variant, other = variant_of(alibi)[0], variant_of(t5_bias)[0]
    spec = ja.AttentionSpec(
        4, 2, 64, max_kv_pages=9, max_qo_tokens=9, variant=variant, target="sm_90"
    )
    for words in ([], list(gradient_of(other).words)):
        with pytest.raises(ValueError, match="^gradient: expected"):
            _core.backward_sources(spec.problem, words)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_backward_pass_lowers_for_cuda(dtype):
    """The workspace has two words for each element of differentiated operands, and no others."""
    variant, operands = variant_of(t5_bias, documents)
    spec = ja.AttentionSpec(
        4, 2, 64, dtype=dtype, page_size=16, max_batch=3, max_qo_tokens=500, max_kv_pages=40,
        target="sm_90", variant=variant,
    )  # fmt: skip
    plan = jax.eval_shape(lambda: ja.plan(spec, [0, 8], [40], [0, 3], [0, 1, 2]))
    q = jax.ShapeDtypeStruct((500, 4, 64), dtype)
    pages = jax.ShapeDtypeStruct((30, 16, 2, 64), dtype)

    def loss(q, k, v, table, plan):
        read = operands | {"table": table}
        return ja.attention(q, k, v, plan, variant_operands=read).astype(jnp.float32).sum()

    def results(*argnums):
        step = jax.jit(jax.grad(loss, argnums))
        arguments = q, pages, pages, jax.ShapeDtypeStruct((9, 4), jnp.bfloat16), plan
        text = step.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
        (call,) = (line for line in text.splitlines() if "@jax_attn_backward" in line)
        return call.rsplit("->", 1)[1]

    assert results(0, 1, 2).count("tensor<") == 4
    assert results(0, 3).count("tensor<") == 5 and "tensor<9x4x2xf32>" in results(0, 3)


# ---- on a GPU

WIDE = Case("", (37, 0, 5, 130), (90, 4, 5, 150), head_dim_qk=128, dtype="bfloat16")
RAGGED = dataclasses.replace(WIDE, head_dim_qk=64, page_size=None)


@on_gpu
@pytest.mark.parametrize(
    "mask",
    [documents, prefix_lm, dilated, sinks_and_window, packed, nothing],
    ids=lambda f: f.__name__,
)
def test_masks(mask, backend):
    for case in (SHORT, WIDE):
        check(case, mask=mask)


@on_gpu
@pytest.mark.parametrize(
    "logits", [alibi, t5_bias, soft_cap, dense_bias, per_row, of_lengths], ids=lambda f: f.__name__
)
def test_logits(logits, backend):
    for case in (LONG, RAGGED):
        check(case, logits)


@on_gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("logits, mask", [(alibi, None), (None, dilated), (t5_bias, documents)])
def test_dtypes(dtype, logits, mask, backend):
    check(dataclasses.replace(SHORT, dtype=dtype), logits, mask)


@on_gpu
@pytest.mark.parametrize(
    "fields",
    [
        {"window_left": 9},
        {"logits_soft_cap": 1.5, "sinks": True},
        {"num_layers": 3, "sm_scale": -0.3},
        {"num_qo_heads": 8, "num_kv_heads": 1, "schedule": "no_split"},
        {"page_size": None, "q_offsets": (3, 1, 0, 149)},
        {"num_ctas": 3, "kv_split": 128, "schedule": "fixed_split"},
        {"head_dim_qk": 256, "dtype": "bfloat16"},
        {"head_dim_qk": 192, "head_dim_vo": 128, "dtype": "bfloat16", "page_size": 5},
    ],
    ids=lambda fields: "-".join(fields),
)
def test_plans(fields, backend):
    check(dataclasses.replace(SHORT, **fields), per_row, sinks_and_window)


@on_gpu
@pytest.mark.parametrize("cap", [0.0, 1.5])
@pytest.mark.parametrize("logits, mask", [(sigmoid_of(2.0), dilated), (None, documents)])
def test_without_softmax(logits, mask, cap, backend):
    for case in (SHORT, RAGGED):
        check(dataclasses.replace(case, logits_soft_cap=cap), logits, mask, "none")


@on_gpu
@pytest.mark.parametrize("operation", OPERATIONS)
def test_operations(operation, backend):
    """By the score and by an operand that is read twice, at clamped indices."""

    def logits(score, at, x):
        return OPERATIONS[operation](score, x[at.kv_pos, at.head] + x[at.q_pos - 40, 0])

    rng = np.random.default_rng(2)
    case = Case("", (7, 9), (30, 41), head_dim_qk=16)
    check(case, logits, operands={"x": rng.normal(size=(33, 4)).astype(np.float32)})


@on_gpu
@pytest.mark.parametrize("size", [1e-12, 1.0, 1e12])
def test_operands_of_every_size(size, backend):
    """A scalar, one for each row, for each key and for each logit: terms of any magnitude."""

    def logits(score, at, scale, by_row, by_key, whole):
        score = score * scale + by_row[at.q_row] * 0.1
        return score + (by_key[at.kv_pos] + whole[at.q_row, at.kv_pos]) * size

    rng = np.random.default_rng(2)
    operands = {
        "scale": np.float32(0.7),
        "by_row": rng.normal(size=20).astype(np.float16),
        "by_key": (rng.normal(size=200) / size).astype(np.float32),
        "whole": (rng.normal(size=(20, 200)) / size).astype(np.float32),
    }
    check(Case("", (20,), (200,), head_dim_qk=16), logits, operands=operands)


@on_gpu
def test_a_prompt_that_requests_share(backend):
    """Several requests read keys and values of one pool, each at its own positions."""
    case = Case(
        "", (40, 30, 20), (200, 210, 220), dtype="bfloat16", branches=("aaab", "aaac", "aaad"),
        branch_tokens=48,
    )  # fmt: skip
    check(case, alibi, prefix_lm)


@on_gpu
def test_what_a_mask_hides_has_no_gradient_and_no_influence(backend):
    # The forward pass recomputes rows whose step has a hidden non-finite value. They are equal up
    # to rounding, and d_q of a row with one key consists of rounding errors.
    for got, want in on_cpus.gradients_beside_nan("bfloat16", None):
        got, want = got.astype(np.float32), want.astype(np.float32)
        most = 6 * float(jnp.finfo(jnp.bfloat16).eps) * np.abs(want).max()
        np.testing.assert_allclose(got, want, rtol=0, atol=most)


@on_gpu
def test_a_row_that_is_not_finite_makes_nan_of_the_operands_that_it_reads(backend):
    batch = build(SHORT)
    q = np.array(batch.q)
    q[40, 1, 0] = -np.inf  # of the third request

    def loss(q, bias):
        read = {"bias": bias}
        return ja.attention(q, batch.k, batch.v, plan, variant_operands=read)[:43].sum()

    def of_rows(score, at, bias):
        return score + bias[at.q_row, at.head]

    bias = np.zeros((43, 4), np.float32)
    plan = plan_of(SHORT, batch, ja.Variant(of_rows, operands={"bias": bias}), target=None)
    is_nan = np.zeros((43, 4), bool)
    is_nan[40, 1] = True
    np.testing.assert_array_equal(np.isnan(jax.jit(jax.grad(loss, 1))(q, bias)), is_nan)


@on_gpu
def test_new_contents_compile_nothing(backend):
    variant, operands = variant_of(alibi)
    batch = build(RAGGED)
    plan = plan_of(RAGGED, batch, variant, target=None)

    @jax.jit
    def step(q, slopes):
        def loss(q, slopes):
            o = ja.attention(q, batch.k, batch.v, plan, variant_operands={"slopes": slopes})
            return o[:172].astype(jnp.float32).sum()

        return jax.grad(loss, (0, 1))(q, slopes)

    jax.block_until_ready(step(batch.q, operands["slopes"]))
    before = _core.jit_stats()["compiled"]
    jax.block_until_ready(step(batch.q, np.float32([1, 2, 3, 4])))
    assert _core.jit_stats()["compiled"] == before
