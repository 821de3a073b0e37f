"""Variants on a GPU: generated kernels against those of a CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import variant_functions
from variant_functions import (
    alibi,
    dense_bias,
    documents,
    prefix_lm,
    sigmoid_of,
    t5_bias,
    tree,
)

import jax_attn as ja
from helpers.attention_cases import E4M3, Case, build
from helpers.backends import Backend
from jax_attn import _core, masks

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.parametrize("backend", [Backend("gpu")], ids=["cuda"], indirect=True),
]

RNG = np.random.default_rng(11)
# Shorter than some indices, which are clamped.
OPERANDS = {
    "slopes": RNG.uniform(0.01, 0.3, 5).astype(np.float32),
    "table": RNG.normal(size=(32, 4)).astype(jnp.bfloat16),
    "bias": RNG.normal(size=(1, 4, 150, 900)).astype(np.float16),
    "q_doc": RNG.integers(0, 3, 200).astype(np.int32),
    "kv_doc": RNG.integers(0, 3, 3000).astype(np.uint8),
    "prefix": RNG.integers(0, 200, 9).astype(np.int32),
    "ancestors": RNG.integers(0, 2**31 - 1, 240).astype(np.int32),
    "seen": RNG.random((4, 1100)) < 0.7,
    "temperature": np.float32(0.7),
}


def soft_cap(score, at, temperature):
    return 3.0 * jnp.tanh(score / (3.0 * temperature))


sigmoid = sigmoid_of(2.0)


def some_keys(at, seen):
    return seen[at.head, at.kv_pos]


VARIANTS = {
    "alibi": (alibi, None, "softmax"),
    "t5_bias": (t5_bias, None, "softmax"),
    "soft_cap": (soft_cap, None, "softmax"),
    "dense_bias": (dense_bias, None, "softmax"),
    "sigmoid": (sigmoid, documents, "none"),
    "documents": (None, documents, "softmax"),
    "prefix_lm": (None, prefix_lm, "softmax"),
    "tree": (None, tree, "softmax"),
    "some_keys": (alibi, some_keys, "softmax"),
}
DECODES = {"qo_lens": (1, 1, 2, 1, 1), "kv_lens": (130, 1, 700, 1025, 64)}
CASES = [
    Case("page 16", dtype="bfloat16"),
    Case("ragged, full", dtype="bfloat16", page_size=None, causal=False, head_dim_qk=128),
    Case("page 5, window, soft cap, sinks", dtype="float16", page_size=5, head_dim_qk=40,
         window_left=300, logits_soft_cap=5.0, sinks=True),
    Case("fixed split", dtype="bfloat16", schedule="fixed_split", kv_split=128, causal=False),
    Case("decodes", dtype="bfloat16", page_size=1, head_dim_qk=128, **DECODES),
    Case("head_dim 256", dtype="bfloat16", head_dim_qk=256, num_kv_heads=1),
    Case("e4m3", dtype="bfloat16", kv_dtype=E4M3, head_dim_qk=128),
    Case("float32", page_size=5, causal=False),
    Case("mla, 4 heads", dtype="bfloat16", mla=True, num_kv_heads=1, head_dim_qk=192,
         head_dim_vo=128, sm_scale=0.08, **DECODES),
    Case("mla, 40 heads", dtype="bfloat16", mla=True, num_qo_heads=40, num_kv_heads=1,
         head_dim_qk=192, head_dim_vo=128, sm_scale=0.08, **DECODES),
]  # fmt: skip


def variant_of(name):
    return variant_functions.variant_of(OPERANDS, *VARIANTS[name])


@jax.jit
def attend(q, k, v, plan, layer, scales, sinks, operands):
    return ja.attention(
        q, k, v, plan, layer=layer, sinks=sinks, variant_operands=operands, **scales,
        return_lse=plan.spec.variant.normalizes,
    )  # fmt: skip


def run(case, batch, variant, operands, target):
    spec = ja.AttentionSpec(**case.spec_fields(), variant=variant, target=target)
    plan = ja.plan(spec, **batch.lengths.plan_arguments())
    out = attend(
        batch.q, batch.k, batch.v, plan, batch.layer, batch.scales, batch.sinks, operands or None
    )
    return [np.asarray(x, np.float32) for x in (out if isinstance(out, tuple) else (out,))]


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_gpu_gives_what_a_cpu_does(backend, case, name):
    if case.sinks and VARIANTS[name][2] == "none":
        pytest.skip("there are no sinks without a softmax")
    variant, operands = variant_of(name)
    # Hidden rows are NaN, also keys and values of other documents.
    batch = build(case, "normal")
    got = run(case, batch, variant, operands, None)
    again = run(case, batch, variant, operands, None)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        want = run(case, batch, variant, operands, "cpu")
    for x, y, z in zip(got, again, want, strict=True):
        np.testing.assert_array_equal(x, y)
        scale = 1e-4 if case.dtype == "float32" else 2e-2
        rows = np.isfinite(z)
        np.testing.assert_array_equal(np.isfinite(x), rows)
        np.testing.assert_array_equal(x[~rows], z[~rows])
        np.testing.assert_allclose(x[rows], z[rows], rtol=scale, atol=scale)


def test_new_contents_and_lengths_compile_nothing(backend):
    variant, _ = variant_of("documents")
    case = CASES[1]
    batch = build(case, "normal")
    run(case, batch, variant, {"q_doc": OPERANDS["q_doc"], "kv_doc": OPERANDS["kv_doc"]}, None)
    before = _core.jit_stats()["compiled"]
    for n in (7, 300):
        ids = RNG.integers(0, 3, n)
        operands = {"q_doc": ids.astype(np.int32), "kv_doc": ids.astype(np.uint8)}
        run(case, batch, variant, operands, None)
    assert _core.jit_stats()["compiled"] == before


@pytest.mark.parametrize("name", ("documents", "prefix_lm", "sigmoid", "some_keys"))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_step_lists_give_what_all_steps_do(backend, case, name):
    """Documents in rows, so that some whole steps are hidden and some are shown."""
    if case.sinks and VARIANTS[name][2] == "none":
        pytest.skip("there are no sinks without a softmax")
    variant, operands = variant_of(name)
    if "q_doc" in operands:
        operands["q_doc"] = np.arange(len(OPERANDS["q_doc"]), dtype=np.int32) // 70
        operands["kv_doc"] = np.arange(len(OPERANDS["kv_doc"]), dtype=np.int32) // 400 % 3
        operands["kv_doc"] = operands["kv_doc"].astype(np.uint8)
    batch = build(case, "normal")
    arguments = batch.lengths.plan_arguments()
    places = {n: x for n, x in arguments.items() if n in ("kv_indptr", "q_offsets")}
    mask = masks.Mask(variant.mask, {
        n: x for n, x in operands.items() if n in variant.mask.__code__.co_varnames
    })  # fmt: skip
    fields = case.spec_fields() | {"share_prefixes": False}
    spec = ja.AttentionSpec(**fields, variant=variant, max_steps=4000)
    block_map = mask.block_map(
        spec, arguments["qo_indptr"], arguments["kv_lens"], **places, q_block=8, kv_block=64
    )
    plan = ja.plan(spec, **arguments, block_map=block_map)
    out = attend(batch.q, batch.k, batch.v, plan, batch.layer, batch.scales, batch.sinks, operands)
    got = [np.asarray(x, np.float32) for x in (out if isinstance(out, tuple) else (out,))]
    want = run(case, batch, variant, operands, None)
    for x, z in zip(got, want, strict=True):
        scale = 1e-4 if case.dtype == "float32" else 2e-2
        rows = np.isfinite(z)
        np.testing.assert_array_equal(np.isfinite(x), rows)
        np.testing.assert_array_equal(x[~rows], z[~rows])
        np.testing.assert_allclose(x[rows], z[rows], rtol=scale, atol=scale)
