"""The cache is updated in place: no compiled module has a copy of it."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_attn as ja
from helpers.backends import on_every_platform
from helpers.checking import assert_same_bits

LAYERS, PAGES, PAGE_SIZE, HEADS, DIM = 4, 600, 16, 2, 64
SHAPE = (LAYERS, PAGES, PAGE_SIZE, HEADS, DIM)
CACHE_BYTES = 4 * int(np.prod(SHAPE))
BATCH = 3
STARTS = np.array([5, 40, 0])  # kv tokens of each request before the first step
PAGE_INDPTR = np.array([0, 10, 20, 30])
PAGE_INDICES = np.random.default_rng(0).permutation(PAGES)[:30]


def make_spec(backend):
    return backend.spec(
        num_qo_heads=2 * HEADS,
        num_kv_heads=HEADS,
        head_dim_qk=DIM,
        dtype="float32",
        page_size=PAGE_SIZE,
        max_batch=BATCH,
        max_qo_tokens=BATCH,
        max_kv_pages=30,
    )


def make_plan(spec, step):
    """Plan for decode step `step`, which may be traced."""
    kv_lens = STARTS + 1 + step
    if isinstance(step, int):
        return ja.plan(spec, np.arange(BATCH + 1), kv_lens, PAGE_INDPTR, PAGE_INDICES)
    arrays = (np.arange(BATCH + 1), PAGE_INDPTR, PAGE_INDICES)
    qo_indptr, page_indptr, page_indices = (jnp.asarray(x, jnp.int32) for x in arrays)
    return ja.plan(spec, qo_indptr, kv_lens.astype(jnp.int32), page_indptr, page_indices)


def layer(x, k_pages, v_pages, plan, index):
    """One layer of a toy model: x [BATCH, HEADS, DIM] makes q, k and v."""
    q = jnp.concatenate([x, 1 - x], axis=1)
    k_pages, v_pages = ja.append_kv(k_pages, v_pages, x + 1, x - 1, plan, layer=index)
    o = ja.attention(q, k_pages, v_pages, plan, layer=index)
    return jnp.tanh(o[:, :HEADS] + o[:, HEADS:] + x), k_pages, v_pages


def rotated_layer(x, k_pages, v_pages, plan, index):
    """The same layer, rotated by quarters of a turn."""
    qkv = jnp.concatenate([x, 1 - x, x + 1, x - 1], axis=1).reshape(BATCH, -1)
    cos, sin = (jnp.full((BATCH, DIM // 2), value, jnp.float32) for value in (0, 1))
    q, k_pages, v_pages = ja.append_rotated(qkv, cos, sin, k_pages, v_pages, plan, layer=index)
    o = ja.attention(q, k_pages, v_pages, plan, layer=index)
    return jnp.tanh(o[:, :HEADS] + o[:, HEADS:] + x), k_pages, v_pages


def unrolled(x, k_pages, v_pages, plan):
    for index in range(LAYERS):
        x, k_pages, v_pages = layer(x, k_pages, v_pages, plan, index)
    return x, k_pages, v_pages


def rotated(x, k_pages, v_pages, plan):
    for index in range(LAYERS):
        x, k_pages, v_pages = rotated_layer(x, k_pages, v_pages, plan, index)
    return x, k_pages, v_pages


def scanned(x, k_pages, v_pages, plan, layer=layer):
    def body(carry, index):
        return layer(*carry, plan, index), None

    return jax.lax.scan(body, (x, k_pages, v_pages), jnp.arange(LAYERS))[0]


def one_of_two(x, k_pages, v_pages, plan):
    return jax.lax.cond(
        x[0, 0, 0] > 100,
        lambda *a: a[:3],
        lambda *a: unrolled(*a),
        *(x, k_pages, v_pages, plan),
    )


def inputs():
    x = np.random.default_rng(1).normal(size=(BATCH, HEADS, DIM)).astype(np.float32)
    cache = np.full(SHAPE, np.nan, np.float32)
    for request, num_tokens in enumerate(STARTS):
        for pos in range(num_tokens):
            page = PAGE_INDICES[PAGE_INDPTR[request] + pos // PAGE_SIZE]
            cache[:, page, pos % PAGE_SIZE] = np.sin(pos)
    return jnp.asarray(x), jnp.array(cache), jnp.array(cache)


def assert_no_cache_copy(compiled, shape=SHAPE):
    """Only calls, loops and their plumbing may produce an array of the cache's size."""
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < CACHE_BYTES / 8, memory
    dims = ",".join(map(str, shape))
    made_by = re.findall(rf"= f32\[(?:1,)?{dims}\]\S* ([\w-]+)\(", compiled.as_text())
    assert made_by, "the cache is not in the module: the pattern is wrong"
    plumbing = {"parameter", "get-tuple-element", "bitcast", "custom-call", "opt-barrier"}
    assert set(made_by) <= plumbing, made_by


STEPS = {"unrolled": unrolled, "scanned": scanned, "one_of_two": one_of_two}
ROTATED = {"rotated": rotated, "rotated, scanned": partial(scanned, layer=rotated_layer)}


@on_every_platform
@pytest.mark.parametrize("name", STEPS | ROTATED)
def test_one_step(name, backend):
    if name == "one_of_two" and jax.__version_info__ < (0, 11):
        pytest.skip("jax 0.10 copies what one branch of a conditional returns as it is")
    spec = make_spec(backend)
    plan = make_plan(spec, 0)
    step = jax.jit((STEPS | ROTATED)[name], donate_argnums=(1, 2))
    compiled = step.lower(*inputs(), plan).compile()
    assert_no_cache_copy(compiled)

    x, k_pages, v_pages = inputs()
    before = [c.unsafe_buffer_pointer() for c in (k_pages, v_pages)]
    x, *caches = step(x, k_pages, v_pages, plan)
    assert [c.unsafe_buffer_pointer() for c in caches] == before
    assert k_pages.is_deleted() and v_pages.is_deleted()
    assert np.isfinite(x).all()
    filled = ~np.isnan(np.asarray(caches[0]))
    assert filled.sum() == LAYERS * (STARTS.sum() + BATCH) * HEADS * DIM


@on_every_platform
@pytest.mark.parametrize("step", [layer, rotated_layer])
def test_one_step_of_a_cache_without_layers(step, backend):
    """Without reshapes: XLA copies a reshaped donated argument, there and back."""
    plan = make_plan(make_spec(backend), 0)
    x, k_pages, v_pages = inputs()
    stacked = jax.jit(step)(x, k_pages, v_pages, plan, 1)
    arrays = x, k_pages[1].copy(), v_pages[1].copy(), plan
    compiled = jax.jit(step, donate_argnums=(1, 2)).lower(*arrays, None).compile()
    assert_no_cache_copy(compiled, SHAPE[1:])
    pointers = [a.unsafe_buffer_pointer() for a in arrays[1:3]]
    got = compiled(*arrays, None)
    assert [a.unsafe_buffer_pointer() for a in got[1:]] == pointers
    for a, b in zip(got, (stacked[0], stacked[1][1], stacked[2][1]), strict=True):
        np.testing.assert_array_equal(a, b)


@on_every_platform
def test_all_ways_to_run_the_layers_give_the_same_bits(backend):
    plan = make_plan(make_spec(backend), 0)
    want = None
    for step in STEPS.values():
        got = jax.jit(step, donate_argnums=(1, 2))(*inputs(), plan)
        want = want or got
        for name, a, b in zip(("x", "k", "v"), got, want, strict=True):
            assert_same_bits(name, a, b)


@on_every_platform
def test_without_donation_the_old_cache_is_untouched(backend):
    plan = make_plan(make_spec(backend), 0)
    x, k_pages, v_pages = inputs()
    _, new_k, new_v = jax.jit(unrolled)(x, k_pages, v_pages, plan)
    for old, new, before in zip((k_pages, v_pages), (new_k, new_v), inputs()[1:], strict=True):
        assert_same_bits("the old cache", old, before)
        assert np.isnan(np.asarray(new)).sum() < np.isnan(np.asarray(before)).sum()


def loop_over_host_plans(spec, num_steps):
    """A decode loop whose plans were all made before, one row each."""
    buffers = jnp.stack([jnp.asarray(make_plan(spec, i).buffer) for i in range(num_steps)])

    def loop(x, k_pages, v_pages, buffers, until):
        def body(state):
            step, x, k_pages, v_pages = state
            plan = ja.AttentionPlan(buffers[step], spec)
            return step + 1, *scanned(x, k_pages, v_pages, plan)

        return jax.lax.while_loop(lambda s: s[0] < until, body, (0, x, k_pages, v_pages))[1:]

    return loop, buffers


def loop_that_plans(spec):
    """A decode loop that plans inside, without the host."""

    def loop(x, k_pages, v_pages, until):
        def body(state):
            step, x, k_pages, v_pages = state
            return step + 1, *scanned(x, k_pages, v_pages, make_plan(spec, step))

        return jax.lax.while_loop(lambda s: s[0] < until, body, (0, x, k_pages, v_pages))[1:]

    return loop


@on_every_platform
@pytest.mark.parametrize("planning", ["ahead", "inside"])
def test_a_decode_loop(planning, backend):
    num_steps = 20
    spec = make_spec(backend)
    if planning == "ahead":
        loop, *extra = loop_over_host_plans(spec, num_steps)
    else:
        loop, extra = loop_that_plans(spec), []
    extra.append(jnp.int32(num_steps))
    loop = jax.jit(loop, donate_argnums=(1, 2))
    assert_no_cache_copy(loop.lower(*inputs(), *extra).compile())

    x, k_pages, v_pages = inputs()
    before = k_pages.unsafe_buffer_pointer(), v_pages.unsafe_buffer_pointer()
    got = loop(x, k_pages, v_pages, *extra)
    assert tuple(c.unsafe_buffer_pointer() for c in got[1:]) == before

    want = inputs()
    step = jax.jit(unrolled, donate_argnums=(1, 2))
    for i in range(num_steps):
        want = step(*want, make_plan(spec, i))
    assert np.isfinite(got[0]).all()
    for name, a, b in zip(("x", "k", "v"), got, want, strict=True):
        assert_same_bits(name, a, b)


def test_a_plan_made_inside_has_the_bits_of_one_made_outside():
    from helpers.backends import Backend

    for schedule, split in (("balanced", None), ("fixed_split", 128), ("no_split", None)):
        spec = make_spec(Backend("cpu"))
        spec = dataclasses.replace(spec, schedule=schedule, kv_split=split, share_prefixes=None)
        made = jax.jit(lambda step, spec=spec: make_plan(spec, step).buffer)
        for step in (0, 3, 60):
            np.testing.assert_array_equal(made(jnp.int32(step)), make_plan(spec, step).buffer)
