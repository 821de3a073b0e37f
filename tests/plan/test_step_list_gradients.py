"""The backward pass over plans with step lists, against jax.vjp of dense attention in float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from variant_functions import alibi, documents, prefix_lm, sigmoid_of, t5_bias

import jax_attn as ja
from helpers.attention_cases import Case, built
from helpers.checking import assert_same_bits
from helpers.prefixes import SharedPrompts
from helpers.variant_gradients import (
    BEST,
    LONG,
    SHORT,
    compare,
    frozen,
    gradients_of,
    gradients_of_oracle,
    on_gpu,
)
from helpers.variants import OPERANDS, dilated, nothing, on_every_cpu, per_row, sinks_and_window
from jax_attn import _core, masks
from jax_attn.masks import HIDDEN, MIXED, VISIBLE, BlockMap

MANY = Case("", (150, 3, 40), (700, 130, 900), head_dim_qk=32, page_size=None, num_ctas=5)


def named(function, operands):
    """The entries of `operands` that the function asks for."""
    names = function.__code__.co_varnames[: function.__code__.co_argcount] if function else ()
    return {name: operands[name] for name in names if name in operands}


def with_lists(case, variant, target, block_map_of):
    fields = case.spec_fields() | {"share_prefixes": False, "max_steps": 4000}
    spec = ja.AttentionSpec(**fields, variant=variant, target=target)
    lengths = built(case, "normal").lengths.plan_arguments()
    return ja.plan(spec, **lengths, block_map=block_map_of(spec, lengths))


def check(case, logits=None, mask=None, normalize="softmax", target="cpu"):
    """Checks gradients with lists of the mask's own map, whose blocks do not divide tiles."""
    operands = named(logits, OPERANDS) | named(mask, OPERANDS)
    functions = logits, mask, normalize

    def block_map_of(spec, lengths):
        given = {n: lengths[n] for n in ("kv_indptr", "q_offsets") if n in lengths}
        made = masks.Mask(mask, named(mask, operands))
        qo_indptr, kv_lens = lengths["qo_indptr"], lengths["kv_lens"]
        return made.block_map(spec, qo_indptr, kv_lens, q_block=7, kv_block=50, **given)

    make_plan = functools.partial(with_lists, block_map_of=block_map_of)
    got = gradients_of(case, functions, operands, target, make_plan)
    return compare(case, got, gradients_of_oracle(case, functions, frozen(operands)), target)


def seen_by_lists(plan, mask):
    """[rows of q, positions], bool: the step is listed and, if masked, `mask` shows the pair."""
    seen, tile_kv = np.zeros_like(mask), plan.spec.kernel_config["tile_kv"]
    items = plan.items()
    for item in items[items["kv_head"] == 0]:
        rows = slice(item["first_token"], item["first_token"] + item["qo_len"])
        for word in plan.steps()[item["kv_begin"] // tile_kv : item["kv_end"] // tile_kv]:
            keys = slice((word >> 1) * tile_kv, ((word >> 1) + 1) * tile_kv)
            seen[rows, keys] = mask[rows, keys] if word & 1 else True
    return seen


def hides(at, shown):
    return shown[at.q_row, at.kv_pos]


def check_random_map(case, logits, has_mask, seed, target="cpu"):
    """Checks classes that are unrelated to the mask: a plan trusts its map."""
    rng = np.random.default_rng(seed)
    rows, most = case.spec_fields()["max_qo_tokens"], max(case.kv_lens)
    shown = rng.random((rows, most)) < 0.5 if has_mask else np.ones((rows, most), bool)
    shape = -(-rows // 40), -(-most // 100)
    classes = rng.choice([VISIBLE, HIDDEN, MIXED], shape, p=[0.15, 0.7, 0.15])
    block_map = BlockMap(classes.astype(np.uint8), 40, 100)
    operands = named(logits, OPERANDS)
    plans = []

    def make_plan(case, variant, target):
        plans.append(with_lists(case, variant, target, lambda *_: block_map))
        return plans[0]

    functions = (logits, hides, "softmax") if has_mask else (logits, None, "softmax")
    read = operands | ({"shown": shown} if has_mask else {})
    got = gradients_of(case, functions, read, target, make_plan)
    seen = seen_by_lists(plans[0], shown)
    assert 0.02 < seen.mean() < 0.9 and (plans[0].steps() & 1).any()
    want = gradients_of_oracle(case, (logits, hides, "softmax"), frozen(operands | {"shown": seen}))
    return compare(case, got, want, target)


@on_every_cpu
@pytest.mark.parametrize(
    "mask", [documents, prefix_lm, dilated, sinks_and_window, nothing], ids=lambda f: f.__name__
)
def test_masks(mask, backend):
    for case in (SHORT, LONG) if backend.isa == BEST else (SHORT,):
        check(case, mask=mask)


@on_every_cpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("logits, mask", [(alibi, documents), (t5_bias, sinks_and_window)])
def test_logits_and_operands(dtype, logits, mask, backend):
    check(dataclasses.replace(SHORT, dtype=dtype), logits, mask)


@pytest.mark.parametrize(
    "fields",
    [
        {"causal": False, "window_left": 200, "window_right": 30},
        {"logits_soft_cap": 1.5, "sinks": True},
        {"num_qo_heads": 8, "num_kv_heads": 1, "schedule": "no_split"},
        {"page_size": 16, "num_layers": 3, "sm_scale": -0.3},
        {"q_offsets": (3, 1, 800)},
        {"num_ctas": 3, "kv_split": 128, "schedule": "fixed_split"},
    ],
    ids=lambda fields: "-".join(fields),
)
@pytest.mark.parametrize("logits, mask", [(per_row, sinks_and_window), (None, documents)])
def test_plans(fields, logits, mask):
    check(dataclasses.replace(MANY, **fields), logits, mask)


def test_without_softmax():
    check(MANY, sigmoid_of(2.0), documents, "none")


@on_every_cpu
@pytest.mark.parametrize("has_mask", [False, True])
def test_a_plan_believes_its_map(has_mask, backend):
    for seed, fields in enumerate(
        ({}, {"page_size": 16, "causal": False}, {"dtype": "bfloat16", "window_left": 300})
    ):
        case = dataclasses.replace(MANY, **fields)
        check_random_map(case, alibi if seed == 1 else None, has_mask, seed)


def test_steps_that_all_queries_see_are_shared():
    """Shared items run without the mask, which asks for rows of queries."""
    rng = np.random.default_rng(3)
    batch = SharedPrompts(rng)
    mask = batch.mask("tree", rng)
    spec = batch.spec(mask, 4, 2)
    block_map = mask.block_map(spec, *batch.arguments()[:2], q_block=5, kv_block=128)
    k, v = batch.pages(rng, 2, 64), batch.pages(rng, 2, 64)
    q, d_o = rng.normal(size=(2, *spec.q_shape)).astype(np.float32)

    def gradients(spec, block_map):
        plan = ja.plan(spec, *batch.arguments(), block_map=block_map)

        def attend(*x):
            return ja.attention(*x, plan, variant_operands=mask.operands)

        got = jax.jit(lambda *x: jax.vjp(attend, *x)[1](d_o))(q, k, v)
        return plan.header()["num_shared_tokens"], got

    num_shared, got = gradients(spec, block_map)
    plain = dataclasses.replace(spec, max_steps=None, share_prefixes=False)
    not_shared, want = gradients(plain, None)
    assert num_shared > 0 and not_shared == 0
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * np.abs(b).max())


def packed_documents(target, dtype="float32", lens=(200, 333, 100), seed=0):
    """A plan of documents in one row, its mask, and q, k, v and a cotangent."""
    num = sum(lens)
    ids = np.repeat(np.arange(len(lens), dtype=np.int32), lens)
    mask = masks.document_ids(ids)
    spec = ja.AttentionSpec(
        2, 1, 64, dtype=dtype, page_size=None, max_batch=1, max_qo_tokens=num, max_kv_tokens=num,
        variant=mask.variant(), max_steps=200, target=target,
    )  # fmt: skip
    block_map = mask.block_map(spec, np.array([0, num]), np.array([num]), q_block=64)
    plan = ja.plan(spec, [0, num], [num], block_map=block_map)
    rng = np.random.default_rng(seed)
    arrays = [rng.normal(size=(num, h, 64)).astype(dtype) for h in (2, 1, 1, 2)]
    return ids, mask, plan, arrays


def gradients_of_packed(mask, plan):
    def attend(*x):
        return ja.attention(*x, plan, variant_operands=mask.operands)

    step = jax.jit(lambda *x: jax.vjp(attend, *x[:3])[1](x[3]))
    return lambda *x: [np.asarray(g) for g in step(*x)]


def check_documents(target, dtype="float32", dense_tolerance=2e-5):
    """Checks that a document's gradients do not depend on the other documents, in any bit.

    They also equal those of documents that are separate requests.
    """
    ids, mask, plan, arrays = packed_documents(target, dtype)
    lens = np.bincount(ids)
    run = gradients_of_packed(mask, plan)
    want = run(*arrays)
    for which in range(4):
        for poison in (1e3, np.nan, np.inf):
            changed = [x.copy() for x in arrays]
            changed[which][ids == 1] *= np.asarray(poison, dtype)
            for a, b in zip(run(*changed), want, strict=True):
                if np.isfinite(poison):
                    assert_same_bits("", a[ids != 1], b[ids != 1])
                else:
                    assert np.isfinite(a[ids != 1].astype(np.float32)).all()
    spec = dataclasses.replace(plan.spec, variant=None, max_steps=None, max_batch=len(lens))
    ragged = ja.plan(spec, np.append(0, np.cumsum(lens)), lens)
    attend = jax.jit(lambda *x: jax.vjp(lambda *y: ja.attention(*y, ragged), *x[:3])[1](x[3]))
    for a, b in zip(want, attend(*arrays), strict=True):
        b = np.asarray(b, np.float32)
        np.testing.assert_allclose(
            a.astype(np.float32), b, rtol=0, atol=dense_tolerance * np.abs(b).max()
        )


@pytest.mark.parametrize("dtype, tolerance", [("float32", 2e-5), ("bfloat16", 0.03)])
def test_gradients_never_cross_documents(dtype, tolerance):
    check_documents("cpu", jnp.dtype(dtype), tolerance)


def test_the_same_bits_in_every_run():
    """Tasks for parts of lists write the same rows as other tasks."""
    _, mask, plan, arrays = packed_documents("cpu", lens=(900, 200, 1300))
    assert len(plan.items()) > 10
    run = gradients_of_packed(mask, plan)
    first = run(*arrays)
    for _ in range(30):
        for a, b in zip(run(*arrays), first, strict=True):
            assert_same_bits("", a, b)


# ---- on CUDA: what is called there, and on a GPU


@pytest.mark.parametrize("target, step_keys", [("sm_90", 128), ("sm_80", 64)])
def test_the_portable_kernel_runs_lists(target, step_keys):
    """Lists add three workspace words for each query token."""
    spec = ja.AttentionSpec(
        4, 2, 64, dtype="bfloat16", page_size=None, max_batch=3, max_qo_tokens=500,
        max_kv_tokens=99, max_steps=77, target=target,
    )  # fmt: skip
    (source,) = _core.backward_sources(spec.problem, [])
    assert f"-steps{step_keys}" in source.name and f"kStepKeys = {step_keys};" in source.text
    assert spec.problem.backward_words(1) == 16 + 3 + 3 * 500


@on_gpu
@pytest.mark.parametrize("mask", [documents, sinks_and_window, nothing], ids=lambda f: f.__name__)
def test_masks_on_cuda(mask, backend):
    for case in (MANY, dataclasses.replace(MANY, page_size=16, dtype="bfloat16", head_dim_qk=64)):
        check(case, alibi, mask, target=None)


@on_gpu
@pytest.mark.parametrize("has_mask", [False, True])
def test_a_plan_believes_its_map_on_cuda(has_mask, backend):
    for seed, fields in enumerate(
        ({}, {"page_size": 16, "causal": False}, {"dtype": "bfloat16", "window_left": 300})
    ):
        case = dataclasses.replace(MANY, **fields)
        check_random_map(case, alibi if seed == 1 else None, has_mask, seed, target=None)


@on_gpu
def test_gradients_never_cross_documents_on_cuda(backend):
    check_documents(None, jnp.dtype("bfloat16"), 0.03)


# ---- inside jit


def test_a_plan_made_inside_jit_has_the_same_gradients():
    _, mask, plan, (q, k, v, d_o) = packed_documents("cpu")
    num = len(q)
    want = gradients_of_packed(mask, plan)(q, k, v, d_o)

    @jax.jit
    def step(lens):
        block_map = mask.block_map(plan.spec, [0, num], lens, max_kv_len=num, q_block=64)
        made = ja.plan(plan.spec, [0, num], lens, block_map=block_map)
        return jax.vjp(lambda *x: ja.attention(*x, made, variant_operands=mask.operands), q, k, v)[
            1
        ](d_o)

    for a, b in zip(step(np.array([num], np.int32)), want, strict=True):
        assert_same_bits("", np.asarray(a), b)
