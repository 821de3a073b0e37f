"""The backward pass with variants against an oracle.

The oracle is jax.vjp of dense attention in float64 that calls the user's functions.
"""

import dataclasses
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from variant_functions import alibi, dense_bias, documents, prefix_lm, sigmoid_of, t5_bias

import jax_attn as ja
from helpers.attention_cases import Case, build
from helpers.checking import assert_same_bits
from helpers.mesh_checks import run_on_cpus
from helpers.variant_gradients import (
    BEST,
    LONG,
    OPERATIONS,
    SHORT,
    check,
    gradients_beside_nan,
    logits_of,
    plan_of,
)
from helpers.variants import (
    dilated,
    nothing,
    of_lengths,
    on_every_cpu,
    packed,
    per_row,
    sinks_and_window,
    soft_cap,
    variant_of,
)
from jax_attn._variant.gradient import gradient_of


@on_every_cpu
@pytest.mark.parametrize(
    "mask",
    [documents, prefix_lm, dilated, sinks_and_window, packed, nothing],
    ids=lambda f: f.__name__,
)
def test_masks(mask, backend):
    for case in (SHORT, LONG) if backend.isa == BEST else (SHORT,):
        check(case, mask=mask)


@on_every_cpu
@pytest.mark.parametrize(
    "logits", [alibi, t5_bias, soft_cap, dense_bias, per_row, of_lengths], ids=lambda f: f.__name__
)
def test_logits(logits, backend):
    for case in (SHORT, LONG) if backend.isa == BEST else (SHORT,):
        check(case, logits)


@on_every_cpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("logits, mask", [(alibi, None), (None, dilated), (t5_bias, documents)])
def test_dtypes(dtype, logits, mask, backend):
    check(dataclasses.replace(SHORT, dtype=dtype), logits, mask)


@pytest.mark.parametrize(
    "fields",
    [
        {"causal": False},
        {"window_left": 9},
        {"causal": False, "window_left": 20, "window_right": 3},
        {"logits_soft_cap": 1.5, "sinks": True},
        {"num_layers": 3, "sm_scale": -0.3},
        {"num_qo_heads": 8, "num_kv_heads": 1, "schedule": "no_split"},
        {"page_size": None, "q_offsets": (3, 1, 0, 149)},
        {"num_ctas": 3, "kv_split": 128, "schedule": "fixed_split"},
    ],
    ids=lambda fields: "-".join(fields),
)
@pytest.mark.parametrize("logits, mask", [(per_row, sinks_and_window), (None, documents)])
def test_plans(fields, logits, mask):
    """per_row changes the score after the soft cap; its derivative by an operand is that score."""
    check(dataclasses.replace(SHORT, **fields), logits, mask)


@on_every_cpu
@pytest.mark.parametrize("cap", [0.0, 1.5])
@pytest.mark.parametrize(
    "logits, mask",
    [(sigmoid_of(2.0), None), (sigmoid_of(2.0), dilated), (None, None), (None, documents)],
)
def test_without_softmax(logits, mask, cap, backend):
    check(dataclasses.replace(SHORT, logits_soft_cap=cap), logits, mask, "none")


def test_the_score_itself_after_a_soft_cap():
    check(dataclasses.replace(SHORT, logits_soft_cap=1.5), lambda score, at: score)


@on_every_cpu
@pytest.mark.parametrize("operation", OPERATIONS)
def test_operations(operation, backend):
    """Each rule, by the score and by an operand that is read twice, at clamped indices."""
    rng = np.random.default_rng(2)
    case = Case("", (7, 9), (30, 41), head_dim_qk=16)
    operands = {"x": rng.normal(size=(33, 4)).astype(np.float32)}
    check(case, logits_of(operation), operands=operands)


def test_operands_of_every_shape():
    """Small operands have a copy for each kv head; heads take turns with large shared ones."""

    def logits(score, at, scale, by_kv_head, by_row, whole):
        score = score * scale + by_kv_head[at.kv_head, at.q_pos]
        return score + by_row[at.q_row] * 0.1 + whole[at.q_row, at.kv_pos]

    rng = np.random.default_rng(2)
    operands = {
        "scale": np.float32(0.7),
        "by_kv_head": rng.normal(size=(2, 1)).astype(jnp.bfloat16),
        "by_row": rng.normal(size=20).astype(np.float16),
        "whole": rng.normal(size=(20, 200)).astype(np.float32),
    }
    check(Case("", (20,), (200,), head_dim_qk=16), logits, operands=operands)


# ---- which gradients, and missing values


def test_only_what_is_differentiated_is_computed():
    variant, operands = variant_of(alibi)
    batch = build(SHORT)
    plan = plan_of(SHORT, batch, variant)

    def loss(q, slopes):
        return ja.attention(q, batch.k, batch.v, plan, variant_operands={"slopes": slopes})[
            :43
        ].sum()

    def results(argnums):
        step = jax.jit(jax.grad(loss, argnums))
        text = step.trace(batch.q, operands["slopes"]).lower().as_text()
        (call,) = (line for line in text.splitlines() if "@jax_attn_backward" in line)
        return call.rsplit("->", 1)[1].count("tensor<")

    assert (results(0), results(1)) == (4, 5)


def test_what_a_mask_hides_has_no_gradient_and_no_influence():
    for got, want in gradients_beside_nan("float32", "cpu"):
        assert_same_bits("", got, want)


def test_a_row_that_is_not_finite_makes_nan_of_the_operands_that_it_reads():
    batch = build(SHORT)
    q = np.array(batch.q)
    q[40, 1, 0] = np.inf  # of the third request

    def loss(q, bias):
        read = {"bias": bias}
        return ja.attention(q, batch.k, batch.v, plan, variant_operands=read)[:43].sum()

    def of_rows(score, at, bias):
        return score + bias[at.q_row, at.head]

    bias = np.zeros((43, 4), np.float32)
    plan = plan_of(SHORT, batch, ja.Variant(of_rows, operands={"bias": bias}))
    found = np.asarray(jax.jit(jax.grad(loss, 1))(q, bias))
    is_nan = np.zeros((43, 4), bool)
    is_nan[40, 1] = True
    np.testing.assert_array_equal(np.isnan(found), is_nan)


def test_prefixes_in_common():
    """Items of several requests' rows, under a mask and a bias that depend on the key row alone."""

    def mask(at, hidden):
        return ~hidden[at.kv_row]

    def logits(score, at, bias):
        return score + bias[at.kv_row, at.head]

    case = Case(
        "", (1, 1, 2), (200, 210, 220), head_dim_qk=16, branches=("aaab", "aaac", "aaad"),
        branch_tokens=48,
    )  # fmt: skip
    batch = build(case)
    rows = batch.k.shape[0] * batch.k.shape[1]
    rng = np.random.default_rng(4)
    operands = {
        "hidden": rng.random(rows) < 0.4,
        "bias": rng.normal(size=(rows, 4)).astype(np.float32),
    }
    variant = ja.Variant(logits, mask, operands=operands)
    shared = plan_of(case, batch, variant, num_ctas=2)
    assert any(item["num_groups"] > 1 for item in shared.items())
    check(dataclasses.replace(case, num_ctas=2), logits, mask, operands=operands)


THREADS = """
import hashlib, jax, numpy as np, jax_attn as ja
rng = np.random.default_rng(0)
def logits(score, at, table, scale, whole):
    return score * scale + table[at.q_pos - at.kv_pos, at.head] + whole[at.q_row, at.kv_pos]
f32 = np.float32
operands = {"table": rng.normal(size=(64, 8)).astype(f32), "scale": f32(0.5),
            "whole": rng.normal(size=(600, 700)).astype(f32)}
spec = ja.AttentionSpec(8, 4, 32, dtype="float32", page_size=None, max_batch=3, max_qo_tokens=600,
                        max_kv_tokens=1950, num_ctas=3, target="cpu",
                        variant=ja.Variant(logits, operands=operands))
plan = ja.plan(spec, np.arange(4) * 200, [650] * 3)
q, d_o = (rng.normal(size=(600, 8, 32)).astype(f32) for _ in range(2))
k, v = (rng.normal(size=(1950, 4, 32)).astype(f32) for _ in range(2))
step = jax.jit(lambda *x: jax.vjp(
    lambda q, k, v, r: ja.attention(q, k, v, plan, variant_operands=r), *x)[1](d_o))
for _ in range(5):
    leaves = jax.tree.leaves(step(q, k, v, operands))
    print(hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in leaves)).hexdigest())
"""


def test_the_bits_do_not_depend_on_threads():
    found = set()
    for threads in ("1", "2", "7"):
        command = [sys.executable, "-c", THREADS]
        environment = os.environ | {"NPROC": threads}
        out = subprocess.run(command, env=environment, capture_output=True, check=True).stdout
        found |= set(out.split())
    assert len(found) == 1


# ---- refusals


def test_too_long_with_derivatives():
    def logits(score, at):
        for i in range(30):
            score = jnp.maximum(score, jnp.tanh(score * i))
        return score

    variant = ja.Variant(logits)
    words = "^attention: gradients: a variant: with derivatives: .* 128 values"
    with pytest.raises(NotImplementedError, match=words):
        gradient_of(variant)


def test_operands_of_split_heads():
    run_on_cpus(2, "import test_variant_gradients as t; t.check_operands_of_split_heads()")


def check_operands_of_split_heads():
    """The parts of one sum on several devices are not added up, so such operands are refused."""
    variant = ja.Variant(lambda score, at, scale: score * scale, operands={"scale": 1.0})
    case = Case("", (20,), (30,), 2, 1, 16, page_size=None)
    batch = build(case)
    plan = plan_of(case, batch, variant)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), "h")
    by_head = jax.NamedSharding(mesh, jax.P(None, "h"))
    q, k, v = (
        jax.device_put(np.concatenate([x, x], 1), by_head) for x in (batch.q, batch.k, batch.v)
    )

    def loss(q, scale):
        return ja.attention(q, k, v, plan, variant_operands={"scale": scale})[:20].sum()

    words = "^attention: gradients: variant_operands: .* heads split 2 ways"
    with pytest.raises(NotImplementedError, match=words):
        jax.jit(jax.grad(loss, 1))(q, jnp.float32(1))
    assert np.isfinite(jax.jit(jax.grad(loss, 0))(q, jnp.float32(1))[:20]).all()


def test_damaged_words_of_a_gradient():
    variant, operands = variant_of(alibi)
    batch = build(SHORT)
    plan = plan_of(SHORT, batch, variant)
    spec = plan.spec
    rows = np.zeros(spec.o_shape[:2], np.float32)
    good = gradient_of(variant, (0,)).words
    sums = jax.ShapeDtypeStruct((1, 4), jnp.float32)

    def run(words, *sums):
        results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (batch.q, batch.k, batch.v)]
        call = jax.ffi.ffi_call(
            "jax_attn_backward", (*results, jax.ShapeDtypeStruct((0,), jnp.float32), *sums)
        )
        arrays = batch.q, batch.k, batch.v, plan.buffer, np.int32(0), rows, rows, batch.q
        words = np.asarray(words, np.int64)
        return jax.block_until_ready(
            call(
                *arrays,
                operands["slopes"],
                problem=spec.problem_words,
                gradient=words,
                poison=False,
            )
        )

    run(good, sums)
    for words in (
        (),
        good[:1],
        good[:-1],
        (99, *good[1:]),
        (good[0], 17, *good[2:]),
        (good[0], -1),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match="backward pass: gradient|program"):
            run(words, sums)
    for place in (2, 3):  # the load, and its derivative
        for bad in (-1, 4, 1000):
            words = (*good[:place], bad, *good[place + 1 :])
            with pytest.raises(jax.errors.JaxRuntimeError, match="backward pass: gradient"):
                run(words, sums)
    for other in ((), (jax.ShapeDtypeStruct((3, 4), jnp.float32),), (sums, sums)):
        with pytest.raises(
            jax.errors.JaxRuntimeError, match="backward pass: gradients of operands"
        ):
            run(good, *other)
