"""AttentionPlan.with_pages: other pages, the same lengths, no planning."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_attn as ja
from helpers.attention_cases import POISON_ID, Case, build, make_lengths, random_case
from helpers.backends import on_every_platform
from helpers.checking import assert_close_state
from jax_attn import _environment, masks, reference

CASE = Case("", num_ctas=3, share_prefixes=False)


def plan_of(case, **more):
    lengths, num_pages = make_lengths(case, np.random.default_rng(0))
    fields = case.spec_fields() | {"num_pages": num_pages} | more
    spec = ja.AttentionSpec(**fields, target="cpu")
    return spec, lengths, ja.plan(spec, **lengths.plan_arguments())


def other_pages(lengths, seed=1):
    """Other pages for the same positions. Poison stays poison, so that reading it would show."""
    rng = np.random.default_rng(seed)
    pages = lengths.page_indices.copy()
    is_live = pages != POISON_ID
    pages[is_live] = rng.permutation(pages[is_live])
    return pages


@pytest.mark.parametrize("seed", range(40))
def test_words_are_those_of_a_new_plan(seed):
    case = dataclasses.replace(random_case(seed), branches=None, share_prefixes=False)
    if case.page_size is None:
        case = dataclasses.replace(case, page_size=5)
    spec, lengths, plan = plan_of(case)
    pages = other_pages(lengths)
    fresh = ja.plan(spec, **lengths.plan_arguments() | {"page_indices": pages})
    before = plan.buffer.copy()
    np.testing.assert_array_equal(plan.with_pages(pages).buffer, fresh.buffer)
    traced = jax.jit(ja.AttentionPlan.with_pages)(plan, pages)
    np.testing.assert_array_equal(traced.buffer, fresh.buffer)
    np.testing.assert_array_equal(plan.buffer, before)


def test_a_batch_without_requests_or_capacity():
    spec = ja.AttentionSpec(1, 1, 64, max_kv_pages=0, share_prefixes=False, target="cpu")
    plan = ja.plan(spec, [0], [], [0], [])
    np.testing.assert_array_equal(plan.with_pages([]).buffer, plan.buffer)
    np.testing.assert_array_equal(jax.jit(plan.with_pages)(jnp.zeros(0, int)).buffer, plan.buffer)


@on_every_platform
def test_each_layer_has_its_own_pages(backend):
    batch = build(CASE)
    spec = backend.spec(**CASE.spec_fields())
    plan = ja.plan(spec, **batch.lengths.plan_arguments())
    tables = np.stack([other_pages(batch.lengths, seed) for seed in range(3)])
    k, v = (np.where(np.isnan(x), 0.5, x) for x in (batch.k, batch.v))

    @jax.jit
    def layers(plan, tables):
        def layer(_, pages):
            return None, ja.attention(batch.q, k, v, plan.with_pages(pages), return_lse=True)

        return jax.lax.scan(layer, None, tables)[1]

    for _ in range(2):
        o, lse = layers(plan, tables)
    assert layers._cache_size() == 1
    for i, pages in enumerate(tables):
        arguments = batch.lengths.plan_arguments() | {"page_indices": pages}
        as_f64 = (x.astype(np.float64) for x in (batch.q, k, v))
        want_o, want_lse = reference.attention(*as_f64, **arguments, spec=spec)
        o_bound, lse_bound = np.full(want_lse.shape, 1e-4), np.full(want_lse.shape, 1e-4)
        assert_close_state(o[i], lse[i], want_o, want_lse, o_bound, lse_bound)


@pytest.mark.parametrize(
    "window_left, window_right", ((-1, 0), (100, 0), (40, 25), (-1, -1), (0, 25))
)
def test_positions_survive_gaps(window_left, window_right):
    """Selected pages in any order: keys whose positions are not their offsets in the cache."""
    rng = np.random.default_rng(0)
    case = Case("", (30, 1, 5), (160, 96, 48), causal=False, page_size=8, share_prefixes=False)
    batch, num_pages = build(case), 70
    k, v = rng.normal(size=(2, num_pages, 8, 2, 64)).astype(np.float32)
    lengths = batch.lengths
    q_positions = rng.integers(0, 400, len(batch.q)).astype(np.int32)
    page_starts = (8 * rng.integers(0, 50, num_pages)).astype(np.int32)
    mask = masks.page_positions(
        q_positions, page_starts, 8, window_left=window_left, window_right=window_right
    )
    spec = ja.AttentionSpec(**case.spec_fields(), variant=mask.variant(), target="cpu")
    plan = ja.plan(spec, **lengths.plan_arguments())
    pages = rng.permutation(num_pages)[: len(lengths.page_indices)].astype(np.int32)
    call = jax.jit(lambda p, x: ja.attention(
        batch.q, k, v, p.with_pages(x), variant_operands=mask.operands, return_lse=True
    ))  # fmt: skip
    o, lse = (np.asarray(x) for x in call(plan, pages))
    for r, kv_len in enumerate(case.kv_lens):
        mine = pages[lengths.page_indptr[r] :][: kv_len // 8]
        keys, values = k[mine].reshape(-1, 2, 64), v[mine].reshape(-1, 2, 64)
        position = (page_starts[mine][:, None] + np.arange(8)).reshape(-1)
        for row in range(*lengths.qo_indptr[r : r + 2]):
            behind = q_positions[row] - position
            sees = np.ones(kv_len, bool)
            if window_left >= 0:
                sees &= behind <= window_left
            if window_right >= 0:
                sees &= behind >= -window_right
            for head in range(4):
                if not sees.any():
                    assert not o[row, head].any() and np.isneginf(lse[row, head])
                    continue
                logits = keys[sees, head // 2].astype(np.float64) @ batch.q[row, head] / 8
                weights = np.exp(logits - logits.max())
                want = weights @ values[sees, head // 2] / weights.sum()
                np.testing.assert_allclose(o[row, head], want, atol=2e-5)


@pytest.mark.parametrize("bad", (-1, 2**31 - 1, "num_pages"))
@pytest.mark.parametrize("check", (False, True))
def test_a_page_id_out_of_range_is_refused(bad, check, monkeypatch):
    spec, lengths, plan = plan_of(CASE)
    pages = other_pages(lengths)
    at = int(lengths.page_indptr[4]) + 1
    pages[at] = bad = spec.num_pages if bad == "num_pages" else bad
    sentence = rf"page_indices\[{at}\] of request 4: expected a page id in \[0, {spec.num_pages}\)"
    with pytest.raises(ValueError, match=rf"^AttentionPlan.with_pages: {sentence}, got {bad}\."):
        plan.with_pages(pages)
    traced = jax.jit(ja.AttentionPlan.with_pages)(plan, pages)
    assert sentence.replace("\\", "") in traced.fault()
    header = traced.header()
    assert header["num_items"] == header["nnz_qo"] == 0 and not traced.queue_indptr().any()
    # A faulty plan stays faulty, whatever follows.
    again = jax.jit(ja.AttentionPlan.with_pages)(traced, other_pages(lengths))
    assert again.fault() == traced.fault()
    monkeypatch.setattr(_environment, "check", check)
    batch = build(CASE)
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=sentence):
        jax.block_until_ready(
            jax.jit(lambda p, i: ja.attention(batch.q, batch.k, batch.v, p.with_pages(i)))(
                plan, pages
            )
        )


def test_ids_are_checked_against_the_pool_where_the_spec_tells_none():
    _, lengths, plan = plan_of(CASE, num_pages=None)
    batch, pages = build(CASE), other_pages(lengths)
    pages[0] = len(batch.k)
    refused = (ValueError, jax.errors.JaxRuntimeError)
    with pytest.raises(refused, match="max_page_id: expected page ids below"):
        jax.block_until_ready(ja.attention(batch.q, batch.k, batch.v, plan.with_pages(pages)))


def test_bad_arguments_are_refused():
    _, lengths, plan = plan_of(CASE)
    pages = other_pages(lengths)
    few = pages[: lengths.page_indptr[-1] - 1]
    sentence = rf"page_indices: expected at least page_indptr\[-1\] = {len(few) + 1} entries, got"
    with pytest.raises(ValueError, match=f"^AttentionPlan.with_pages: {sentence}"):
        plan.with_pages(few)
    assert jax.jit(ja.AttentionPlan.with_pages)(plan, few).fault().startswith("plan: page_indices")
    with pytest.raises(ValueError, match="^AttentionPlan.with_pages: page_indices: expected a 1-d"):
        plan.with_pages(pages[None])
    with pytest.raises(NotImplementedError, match="share_prefixes=False in the spec, got True"):
        plan_of(dataclasses.replace(CASE, share_prefixes=True))[2].with_pages(pages)
    with pytest.raises(ValueError, match="expected one over pages, got page_size=None"):
        spec = ja.AttentionSpec(1, 1, 64, page_size=None, max_kv_tokens=9, target="cpu")
        ja.plan(spec, [0, 1], [9]).with_pages(pages)
