"""Prefix levels that the user gives the planner instead of a search."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_attn as ja
from helpers.backends import Backend, on_every_platform
from helpers.prefixes import Told, num_shared, one_document

TARGETS = ("cpu", "sm_80:16", "sm_90:4")
HEADS = ((8, 2), (16, 1), (4, 4), (15, 3))


def random_levels(seed, num_levels=None, *, batch_size=None, own=700, **fields):
    """Requests in nested groups, some without query tokens, with prefixes of any length."""
    rng = np.random.default_rng(seed)
    page_size = int(rng.choice([1, 7, 16]))
    batch_size = int(rng.integers(1, 40)) if batch_size is None else batch_size
    num_levels = int(rng.integers(1, 5)) if num_levels is None else num_levels
    qo_lens = rng.choice([1, 1, 1, 1, 2, 5, 0, 30], batch_size)
    borders, length = {0, batch_size}, np.zeros(batch_size, int)
    levels = []
    common = np.zeros(batch_size, int)  # tokens that a request shares with the request before it
    for _ in range(num_levels):
        borders |= set(rng.integers(0, batch_size + 1, rng.integers(0, 6)).tolist())
        indptr = np.array([*sorted(borders), *[batch_size] * rng.integers(0, 3)])
        lens = rng.choice([0, 100, 128, 400, 700, 1500], len(indptr) - 1)
        for i, (begin, end) in enumerate(zip(indptr[:-1], indptr[1:], strict=True)):
            if end > begin:
                lens[i] += rng.choice([0, 0, length[begin]])
                length[begin:end] = np.maximum(length[begin:end], lens[i])
                common[begin + 1 : end] = np.maximum(common[begin + 1 : end], lens[i])
        levels.append((indptr, lens))
    kv_lens = np.maximum(length, qo_lens) + rng.integers(0, own, batch_size)
    used = -(-kv_lens // page_size)
    tables = []
    next_id = 0
    for r in range(batch_size):
        num_common = common[r] // page_size if r else 0
        fresh = next_id + np.arange(used[r] - min(num_common, used[r]))
        tables.append(np.concatenate([tables[-1][:num_common] if r else [], fresh]).astype(int))
        next_id += len(fresh)
    heads = HEADS[rng.integers(len(HEADS))]
    fields = {
        "num_qo_heads": heads[0], "num_kv_heads": heads[1], "head_dim_qk": 64, "dtype": "float32",
        "page_size": page_size, "max_batch": batch_size + 2,
        "max_qo_tokens": int(qo_lens.sum()) + 2, "max_kv_pages": int(used.sum()) + 3,
        "causal": bool(rng.random() < 0.7), "window_left": int(rng.choice([-1, -1, 900])),
    } | fields  # fmt: skip
    lengths = {
        "qo_indptr": np.concatenate([[0], np.cumsum(qo_lens)]),
        "kv_lens": kv_lens,
        "page_indptr": np.concatenate([[0], np.cumsum(used)]),
        "page_indices": np.concatenate(tables),
    }
    return Told(fields, lengths, tuple(levels))


def work(plan):
    """The items, in whichever queue they are."""
    names = ["request", "kv_head", "kv_begin", "kv_end", "qo_len", "num_groups", "tile", "q_pos"]
    return np.sort(plan.items()[names])


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_told_is_shared_like_what_is_found(target):
    told = one_document()
    plan, found = told.plan(target), told.plan(target, prefix_levels=None)
    assert num_shared(plan) == 16 + 4
    np.testing.assert_array_equal(work(plan), work(found))
    assert plan.queue_costs().max() == found.queue_costs().max()
    one_level = told.plan(target, prefix_levels=told.levels[:1])
    assert num_shared(one_level) == 16
    assert num_shared(told.plan(target, prefix_levels=())) == 0
    # One level, found or given: the same bits.
    lengths = told.lengths | {"kv_lens": np.full(16, 2048 + 40)}
    again = Told(told.fields, lengths, (([0, 16], [2048]),))
    np.testing.assert_array_equal(
        again.plan(target).buffer, again.plan(target, prefix_levels=None).buffer
    )


@pytest.mark.parametrize("target", TARGETS)
def test_every_pair_is_covered_once_and_no_schedule_is_predicted_slower(target):
    shares = 0
    for seed in range(60):
        told = random_levels(seed)
        flat, plan = (told.plan(target, prefix_levels=x) for x in ((), told.levels))
        assert plan.queue_costs().max(initial=0) <= flat.queue_costs().max(initial=0) + 1e-6
        covered = [np.zeros(n, int) for n in told.lengths["kv_lens"]]
        request_of = np.repeat(np.arange(len(covered)), np.diff(told.lengths["qo_indptr"]))
        pages, indptr = told.lengths["page_indices"], told.lengths["page_indptr"]
        for item in plan.items()[plan.items()["kv_head"] == 0]:
            rows = slice(item["first_token"], item["first_token"] + item["qo_len"])
            if item["num_groups"] > 1:
                rows = plan.qo_indices()[rows]
            for r in np.unique(request_of[rows]):
                one = (request_of[rows] == r).sum()
                covered[r][item["kv_begin"] : item["kv_end"]] += one
                span = slice(
                    item["kv_begin"] // plan.spec.page_size,
                    -(-item["kv_end"] // plan.spec.page_size),
                )
                np.testing.assert_array_equal(
                    pages[indptr[r] :][span], pages[item["kv_base"] :][span]
                )
        for item in flat.items()[flat.items()["kv_head"] == 0]:
            covered[item["request"]][item["kv_begin"] : item["kv_end"]] -= item["qo_len"]
        assert all((x == 0).all() for x in covered)
        shares += num_shared(plan) > 0
    assert shares > 10


@pytest.mark.parametrize("schedule, kv_split", [("balanced", None), ("fixed_split", 128)])
def test_attention_over_told_levels(schedule, kv_split):
    """On a CPU, against each request by itself; with fixed_split the bits are the same."""
    shares = 0
    for seed in range(12):
        room = {} if kv_split is None else {"max_items": 20000, "max_partial_rows": 40000}
        told = random_levels(
            seed, batch_size=12, own=200, schedule=schedule, kv_split=kv_split, num_ctas=3, **room
        )
        rng = np.random.default_rng(seed)
        flat, plan = (told.plan(prefix_levels=x) for x in ((), told.levels))
        q = rng.normal(size=plan.spec.q_shape).astype(np.float32)
        shape, _ = plan.spec.kv_shapes(told.lengths["page_indices"].max() + 1, plan.spec.page_size)
        k, v = rng.normal(size=(2, *shape)).astype(np.float32)
        o, lse = ja.attention(q, k, v, plan, return_lse=True)
        want_o, want_lse = ja.attention(q, k, v, flat, return_lse=True)
        if schedule == "fixed_split":
            np.testing.assert_array_equal(o, want_o)
            np.testing.assert_array_equal(lse, want_lse)
        np.testing.assert_allclose(o, want_o, rtol=2e-5, atol=2e-6)
        np.testing.assert_allclose(lse, want_lse, rtol=2e-5, atol=2e-6)
        shares += num_shared(plan) > 0
    assert shares >= 3


@on_every_platform
def test_levels_inside_a_compiled_function(backend):
    """One executable serves all levels of the same shapes, with the host's bits."""
    told = one_document(num_ctas=4)  # with all queues of a GPU sharing would not pay
    spec = backend.spec(**told.fields)

    @functools.partial(jax.jit)
    def plan(lengths, levels):
        return ja.plan(spec, **lengths, prefix_levels=levels)

    lengths = {name: jnp.asarray(x) for name, x in told.lengths.items()}
    for levels in (
        told.levels,
        (([0, 16], [1024]), ([0, 16, 16], [2048, 0])),
        (([0, 16], [0]), ([0, 4, 16], [2560, 2048])),
    ):
        traced = tuple(tuple(map(jnp.asarray, level)) for level in levels)
        want = ja.plan(spec, **told.lengths, prefix_levels=levels)
        assert num_shared(want) > 0
        np.testing.assert_array_equal(plan(lengths, traced).buffer, want.buffer)
    assert plan._cache_size() == 1


@pytest.mark.cuda
@pytest.mark.parametrize("backend", [Backend("gpu")], ids=["cuda"], indirect=True)
def test_levels_are_planned_on_a_gpu(backend):
    for seed in range(40):
        told = random_levels(seed, dtype="bfloat16")
        spec = backend.spec(**told.fields)
        planned = jax.jit(lambda x, levels, s=spec: ja.plan(s, **x, prefix_levels=levels))(
            *jax.tree.map(jnp.asarray, (told.lengths, told.levels))
        )
        want = ja.plan(spec, **told.lengths, prefix_levels=told.levels)
        np.testing.assert_array_equal(planned.buffer, want.buffer)


WRONG = {
    "begin": ((([1, 16], [9]),), r"prefix_levels\[0\] request_indptr\[0\]: expected 0, got 1"),
    "end": ((([0, 15], [9]),), r"request_indptr\[1\]: expected batch_size = 16, got 15"),
    "order": (
        (([0, 16], [9]), ([0, 5, 4, 16], [9, 9, 9])),
        r"prefix_levels\[1\] request_indptr\[2\]: expected offsets that never decrease \(the one"
        r" before is 5\), got 4",
    ),
    "nesting": (
        (([0, 4, 16], [9, 9]), ([0, 5, 16], [9, 9])),
        r"prefix_levels\[1\] request_indptr: expected every border of the level before, such as 4,"
        r" got 0",
    ),
    "length": (
        (([0, 16], [2149]),),
        r"prefix_levels\[0\] prefix_lens: request 4: expected 0 to its kv_len = 2148 tokens, got"
        r" 2149",
    ),
    "negative": ((([0, 16], [-1]),), r"prefix_lens: request 0: expected 0 to .*, got -1"),
    "pages": (
        (([0, 16], [2064]),),
        r"page_indices\[796\]: expected page 128, as in the request before with the same prefix"
        r" \(prefix_levels\), got 188",
    ),
}


@pytest.mark.parametrize("levels, sentence", WRONG.values(), ids=WRONG)
def test_wrong_levels_are_refused_in_one_sentence(levels, sentence):
    told = one_document()
    with pytest.raises(ValueError, match=f"^plan: .*{sentence}.$"):
        told.plan(prefix_levels=levels)
    spec = ja.AttentionSpec(**told.fields)
    traced = jax.jit(lambda x, levels: ja.plan(spec, **x, prefix_levels=levels).buffer)
    with pytest.raises(Exception, match=sentence):
        traced(*jax.tree.map(jnp.asarray, (told.lengths, levels))).block_until_ready()


@pytest.mark.cuda
@pytest.mark.parametrize("backend", [Backend("gpu")], ids=["cuda"], indirect=True)
@pytest.mark.parametrize("levels, sentence", WRONG.values(), ids=WRONG)
def test_wrong_levels_are_faults_on_a_gpu(levels, sentence, backend):
    told = one_document()
    spec = backend.spec(**told.fields)
    with pytest.raises(ValueError) as refused:
        ja.plan(spec, **told.lengths, prefix_levels=levels)
    plan = jax.jit(lambda x, levels: ja.plan(spec, **x, prefix_levels=levels))(
        *jax.tree.map(jnp.asarray, (told.lengths, levels))
    )
    assert plan.fault() == str(refused.value)


def test_levels_of_the_wrong_shape_are_refused_when_tracing():
    told = one_document()
    for fields, levels, sentence in (
        ({}, (([0, 16], [9, 9]),), "expected one entry more than prefix_lens.* got 2 and 2"),
        ({}, (([0], []),), "expected one entry more than prefix_lens.* got 1 and 0"),
        ({}, (([0, 16], [9]),) * 9, "expected at most 8 levels, got 9"),
        ({}, (([0.0, 16.0], [9]),), r"request_indptr: expected a 1-d integer array"),
        ({}, ((range(18), [0] * 17),), "1 to max_batch = 16 .* got 18 and 17"),
        ({"share_prefixes": False}, (([0, 16], [9]),), "share_prefixes=False, got 1 levels"),
    ):
        with pytest.raises(ValueError, match=f"plan: prefix_levels.*{sentence}"):
            Told(told.fields | fields, told.lengths, levels).plan()


def test_requests_without_query_tokens_are_passed_over():
    """Waiting or finished slots of a batch do not matter, with any lengths and pages."""
    told = one_document()
    lengths = {name: np.array(x) for name, x in told.lengths.items()}
    lengths["kv_lens"][7] = 0
    lengths["qo_indptr"][8:] -= 1
    begin, end = lengths["page_indptr"][7:9]
    lengths["page_indices"][begin:end] = 2147480000
    plan = Told(told.fields, lengths, told.levels).plan()
    assert num_shared(plan) == 15 + 4
