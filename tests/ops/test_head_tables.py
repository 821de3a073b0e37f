"""Page tables of heads, against dense attention of each head over the keys that it kept."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_attn as ja
from jax_attn import head_tables, retention

HEADS, KV_HEADS, DIM, PAGE = 6, 3, 32, 4


def make(rng, qo_lens, kv_lens, spare_rows=2, **fields):
    """A plan of the lengths, with the pages in no order."""
    kv_lens = np.asarray(kv_lens)
    num_pages = -(-kv_lens.reshape(-1) // PAGE)
    indptr = np.append(0, np.cumsum(num_pages))
    pages = rng.permutation(indptr[-1] + 3)[: indptr[-1]]
    qo_indptr = np.append(0, np.cumsum(qo_lens))
    spec = head_tables.spec(
        HEADS, KV_HEADS, DIM, dtype="float32", page_size=PAGE, max_batch=len(qo_lens) + 1,
        max_qo_tokens=int(qo_indptr[-1]) + spare_rows, max_kv_pages=int(indptr[-1]) + 1,
        target="cpu", **fields,
    )  # fmt: skip
    return head_tables.plan(spec, qo_indptr, kv_lens, indptr, pages), qo_indptr, indptr, pages


def dense(q, k, v):
    """One head: queries at the end of the keys. [n, group, dim], [m, dim] -> [n, group, dim]"""
    logits = np.einsum("ngd,md->ngm", q, k) / np.sqrt(DIM)
    n, m = len(q), len(k)
    sees = np.arange(m) <= np.arange(m - n, m)[:, None, None]
    weights = np.exp(np.where(sees, logits, -np.inf))
    return np.einsum("ngm,md->ngd", weights / weights.sum(-1, keepdims=True), v)


@pytest.mark.parametrize(
    ("qo_lens", "kv_lens"),
    (
        ([1, 1, 0], [[9, 1, 30], [5, 17, 4], [0, 3, 8]]),
        ([3, 1, 5], [[9, 3, 30], [5, 17, 1], [5, 6, 40]]),
    ),
    ids=("decodes", "mixed"),
)
def test_each_head_attends_to_its_own_keys(qo_lens, kv_lens):
    rng = np.random.default_rng(0)
    plan, qo_indptr, indptr, pages = make(rng, qo_lens, kv_lens)
    assert (plan.rows is None) == (max(qo_lens) <= 1)
    num_rows = plan.plan.spec.max_qo_tokens // KV_HEADS
    q = rng.normal(size=(num_rows, HEADS, DIM)).astype(np.float32)
    k_pages, v_pages = rng.normal(size=(2, len(pages) + 3, PAGE, 1, DIM)).astype(np.float32)
    o = jax.jit(head_tables.attention)(q, k_pages, v_pages, plan)
    assert o.shape == q.shape
    for r, (begin, end) in enumerate(zip(qo_indptr, qo_indptr[1:], strict=False)):
        for h in range(KV_HEADS):
            at = r * KV_HEADS + h
            mine = pages[indptr[at] : indptr[at + 1]]
            k, v = (x[mine].reshape(-1, DIM)[: kv_lens[r][h]] for x in (k_pages, v_pages))
            group = slice(h * HEADS // KV_HEADS, (h + 1) * HEADS // KV_HEADS)
            np.testing.assert_allclose(
                o[begin:end, group], dense(q[begin:end, group], k, v), atol=1e-5
            )
    np.testing.assert_array_equal(o[qo_indptr[-1] :], 0)  # padding


def test_gradients_go_to_each_heads_own_keys():
    """Against those of jnp, of rows that are gathered by head and scattered back."""
    rng = np.random.default_rng(5)
    qo_lens, kv_lens = [2, 1], [[5, 9, 2], [1, 4, 6]]
    plan, qo_indptr, indptr, pages = make(rng, qo_lens, kv_lens, 0)
    q, d_o = rng.normal(size=(2, 3, HEADS, DIM)).astype(np.float32)
    k_pages, v_pages = rng.normal(size=(2, len(pages) + 3, PAGE, 1, DIM)).astype(np.float32)

    def plain(q, k_pages, v_pages):
        total = 0.0
        for r, (begin, end) in enumerate(itertools.pairwise(qo_indptr)):
            for h in range(KV_HEADS):
                at, n = r * KV_HEADS + h, kv_lens[r][h]
                mine = pages[indptr[at] : indptr[at + 1]]
                k, v = (x[mine].reshape(-1, DIM)[:n] for x in (k_pages, v_pages))
                group = slice(h * HEADS // KV_HEADS, (h + 1) * HEADS // KV_HEADS)
                logits = jnp.einsum("ngd,md->ngm", q[begin:end, group], k) / np.sqrt(DIM)
                sees = np.arange(n) <= np.arange(n - (end - begin), n)[:, None, None]
                weights = jax.nn.softmax(jnp.where(sees, logits, -jnp.inf), axis=-1)
                o = jnp.einsum("ngm,md->ngd", weights, v)
                total += (o * d_o[begin:end, group]).sum()
        return total

    def paged(q, k_pages, v_pages):
        return (head_tables.attention(q, k_pages, v_pages, plan) * d_o).sum()

    arrays = q, k_pages, v_pages
    grads = [jax.jit(jax.grad(f, (0, 1, 2)))(*arrays) for f in (paged, plain)]
    for got, want in zip(*grads, strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5)


def test_dropped_keys_count_by_their_mean():
    """RazorAttention's compensation token of one head, by a variant, in layer 1 of two."""
    rng = np.random.default_rng(6)
    n = 12
    k, v = rng.normal(size=(2, n, KV_HEADS, DIM)).astype(np.float32)
    kept = np.stack([np.asarray(retention.sinks_and_window(n, 2, 4))] * KV_HEADS)
    variant = ja.Variant(
        lambda s, at, bias: s + bias[at.kv_row], operands={"bias": np.zeros(1, np.float32)}
    )
    lens = np.array([n, 7, n])  # head 1 has dropped keys
    plan, _, indptr, pages = make(rng, [1], [lens], 0, variant=variant)
    num_rows = (len(pages) + 3) * PAGE
    pools, bias = np.zeros((2, 2, num_rows, DIM), np.float32), np.zeros(num_rows, np.float32)
    for pool, x in zip(pools, (k, v), strict=True):
        mean, rows = retention.compensation(x, kept), retention.compact(x, kept)
        for h in range(KV_HEADS):
            own = (pages[indptr[h] : indptr[h + 1], None] * PAGE + np.arange(PAGE)).reshape(-1)
            pool[1, own[: lens[h]]] = x[:, h] if h != 1 else [mean[h], *rows[h]]
            if h == 1:
                bias[own[0]] = np.log(n - kept.shape[1])
    q = rng.normal(size=(1, HEADS, DIM)).astype(np.float32)
    k_pages, v_pages = pools.reshape(2, 2, -1, PAGE, 1, DIM)
    o = head_tables.attention(q, k_pages, v_pages, plan, layer=1, variant_operands={"bias": bias})
    dropped = np.setdiff1d(np.arange(n), kept[1])
    for h in range(KV_HEADS):
        own_k, own_v = k[:, h].copy(), v[:, h].copy()
        if h == 1:  # as if each dropped key were the mean of them
            own_k[dropped], own_v[dropped] = own_k[dropped].mean(0), own_v[dropped].mean(0)
        group = slice(2 * h, 2 * h + 2)
        np.testing.assert_allclose(o[:, group], dense(q[:, group], own_k, own_v), atol=1e-5)


def test_append_writes_to_the_end_of_each_head():
    rng = np.random.default_rng(1)
    qo_lens, kv_lens = [2, 1], [[5, 9, 2], [1, 4, 6]]
    plan, qo_indptr, indptr, pages = make(rng, qo_lens, kv_lens, 0)
    k, v = rng.normal(size=(2, 3, KV_HEADS, DIM)).astype(np.float32)
    empty = np.zeros((len(pages) + 3, PAGE, 1, DIM), np.float32)
    k_pages, v_pages = head_tables.append_kv(empty, empty, k, v, plan)
    for new, written in ((k, k_pages), (v, v_pages)):
        for r, (begin, end) in enumerate(zip(qo_indptr, qo_indptr[1:], strict=False)):
            for h in range(KV_HEADS):
                at = r * KV_HEADS + h
                rows = np.asarray(written)[pages[indptr[at] : indptr[at + 1]]].reshape(-1, DIM)
                last = kv_lens[r][h]
                np.testing.assert_array_equal(rows[last - (end - begin) : last], new[begin:end, h])
        assert (np.asarray(written) != 0).any(-1).sum() == new.shape[0] * KV_HEADS


def test_bad_input_is_refused():
    plan, *_ = make(np.random.default_rng(2), [1, 1], [[3, 3, 3], [3, 3, 3]])
    with pytest.raises(ValueError, match="num_qo_heads: expected a multiple of num_kv_heads = 3"):
        head_tables.spec(8, 3, DIM, max_batch=1, max_qo_tokens=1)
    with pytest.raises(ValueError, match="num_qo_heads: expected a multiple of num_kv_heads = 0"):
        head_tables.spec(8, 0, DIM, max_batch=1, max_qo_tokens=1)
    with pytest.raises(ValueError, match=r"expected \[batch_size, num_kv_heads\]"):
        head_tables.plan(plan.plan.spec, [0, 1], [3, 3, 3], [0, 1, 2, 3], [0, 1, 2])
    with pytest.raises(ValueError, match="as many columns as head_tables.spec had"):
        head_tables.plan(plan.plan.spec, [0, 1], [[3, 3]], [0, 1, 2], [0, 1])
    for qo_indptr in ([1, 2, 3], [0, 2, 1]):
        with pytest.raises(ValueError, match="qo_indptr: expected offsets that begin with 0"):
            head_tables.plan(plan.plan.spec, qo_indptr, [[3] * 3] * 2, np.arange(7), np.arange(6))


@pytest.mark.parametrize("shape", ((5, HEADS), (8, HEADS // 2), (2, 2 * HEADS)), ids=str)
def test_arrays_of_other_shapes_are_refused(shape):
    """Also those with as many rows in all."""
    plan, *_ = make(np.random.default_rng(2), [1, 1], [[3, 3, 3], [3, 3, 3]])
    pages, new = jnp.zeros((9, PAGE, 1, DIM)), jnp.zeros((4, KV_HEADS, DIM))
    with pytest.raises(ValueError, match=rf"q: expected \[4, {HEADS}, head_dim\], .*, got"):
        head_tables.attention(jnp.zeros((*shape, DIM)), pages, pages, plan)
    of_keys = jnp.zeros((shape[0], shape[1] * KV_HEADS // HEADS, DIM))
    for arrays, name in (((of_keys, new), "k_new"), ((new, of_keys), "v_new")):
        with pytest.raises(ValueError, match=rf"{name}: expected \[4, {KV_HEADS}, head_dim\]"):
            head_tables.append_kv(pages, pages, *arrays, plan)


def test_a_plan_of_fewer_heads_than_its_spec_is_refused():
    spec = head_tables.spec(
        8, 4, DIM, dtype="float32", page_size=PAGE, max_batch=2, max_qo_tokens=4, max_kv_pages=9,
        target="cpu",
    )  # fmt: skip
    plan = head_tables.plan(spec, [0, 1, 2], [[3, 3], [3, 3]], np.arange(5), np.arange(4))
    pages = jnp.zeros((9, PAGE, 1, DIM))
    with pytest.raises(ValueError, match=r"q: expected \[8, 4, head_dim\]"):
        head_tables.attention(jnp.zeros((4, 8, DIM)), pages, pages, plan)


def test_one_kv_head():
    """Then a request's head table is its page table."""
    fields = {"page_size": PAGE, "max_batch": 2, "max_qo_tokens": 3, "max_kv_pages": 4}
    spec = head_tables.spec(HEADS, 1, DIM, dtype="float32", target="cpu", **fields)
    assert spec == ja.AttentionSpec(
        HEADS, 1, DIM, dtype="float32", target="cpu", share_prefixes=False, **fields
    )


def weights_of(q, k, first):
    """Sums of softmax weights of queries at positions first + i, head by head, in loops."""
    sums = np.zeros((KV_HEADS, len(k)))
    for i in range(len(q)):
        for head in range(HEADS):
            h = head // (HEADS // KV_HEADS)
            logits = k[: first + i + 1, h].astype(np.float64) @ q[i, head] / np.sqrt(DIM)
            weights = np.exp(logits - logits.max())
            sums[h, : first + i + 1] += weights / weights.sum()
    return sums


def test_snapkv_and_heavy_hitters_keep_the_largest_sums():
    rng = np.random.default_rng(3)
    n, window, budget = 300, 8, 40
    q = rng.normal(size=(n, HEADS, DIM)).astype(np.float32)
    k = 2 * rng.normal(size=(n, KV_HEADS, DIM)).astype(np.float32)
    k[n - window] = 20 * q[n - window :, :: HEADS // KV_HEADS].mean(0)  # not for its neighbours
    kept = np.asarray(retention.snapkv(q[-window:], k, budget, pool=5))
    sums = weights_of(q[-window:], k, n - window)
    pooled = np.stack([np.convolve(x[: n - window], np.ones(5), "same") for x in sums])
    hitters = np.asarray(retention.heavy_hitters(q, k, budget, recent=window))
    for found, scores in ((kept, pooled), (hitters, weights_of(q, k, 0))):
        assert found.shape == (KV_HEADS, budget)
        assert (np.diff(found, axis=1) > 0).all()
        for mine, score in zip(found, scores, strict=True):
            best = np.argsort(score[: n - window])[::-1][: budget - window]
            assert set(mine) == {*best, *range(n - window, n)}


def test_select_looks_at_the_tokens_of_the_prompt_alone():
    """Sums beyond it, and of the last keys, do not count, also for neighbours of a pool."""
    rng = np.random.default_rng(4)
    n, budget, recent = 60, 20, 6
    sums = rng.random((KV_HEADS, 100)).astype(np.float32)
    sums[:, n - recent :] = 1e3
    select = jax.jit(lambda sums, n: retention.select(sums, n, budget, recent=recent, pool=3))
    for head, found in zip(sums, np.asarray(select(sums, n)), strict=True):
        pooled = np.convolve(head[: n - recent], np.ones(3), "same")
        best = np.argsort(pooled)[::-1][: budget - recent]
        assert found.tolist() == sorted({*best.tolist(), *range(n - recent, n)})
    with pytest.raises(ValueError, match="select: budget: expected between 6 and the 100 tokens"):
        retention.select(sums, n, 5, recent=recent)
    with pytest.raises(ValueError, match="select: pool: expected an odd number, got 2"):
        retention.select(sums, n, budget, recent=recent, pool=2)


def test_kept_keys_and_their_compensation():
    x = np.arange(7 * 2 * 3, dtype=np.float32).reshape(7, 2, 3)
    kept = np.stack([np.asarray(retention.sinks_and_window(7, 1, 2)), [1, 2, 3]])
    assert kept[0].tolist() == [0, 5, 6]
    assert [retention.sinks_and_window(3, n, 3 - n).tolist() for n in (0, 3)] == [[0, 1, 2]] * 2
    rows, mean = retention.compact(x, kept), retention.compensation(x, kept)
    for h, others in enumerate(([1, 2, 3, 4], [0, 4, 5, 6])):
        np.testing.assert_array_equal(rows[h], x[kept[h], h])
        np.testing.assert_allclose(mean[h], x[others, h].mean(0), rtol=1e-6)


def test_compensation_of_few_keys_does_not_cancel():
    """Nothing of the keys that stay is left in the mean, however large they are."""
    x = np.full((9, 2, DIM), 1e9, np.float32)
    x[4] = 1.0
    kept = np.tile(np.delete(np.arange(9), 4), (2, 1))
    np.testing.assert_array_equal(retention.compensation(x, kept), x[4])


def test_retention_refuses_budgets_that_do_not_fit():
    q, k = np.zeros((4, HEADS, DIM)), np.zeros((9, KV_HEADS, DIM))
    with pytest.raises(ValueError, match="budget: expected between 4 and the 9 tokens"):
        retention.snapkv(q, k, 3)
    with pytest.raises(ValueError, match="pool: expected an odd number, got 4"):
        retention.snapkv(q, k, 5, pool=4)
    with pytest.raises(ValueError, match="expected between 1 and the 4 tokens"):
        retention.heavy_hitters(q, k[:4], 10, recent=1)
    for sinks, window in ((4, 6), (-1, 3), (3, -1)):
        with pytest.raises(ValueError, match=f"num_tokens = 9 together, got {sinks} and {window}"):
            retention.sinks_and_window(9, sinks, window)
    with pytest.raises(ValueError, match="kept: expected fewer than the 9 tokens of x, got 9"):
        retention.compensation(k, np.tile(np.arange(9), (KV_HEADS, 1)))


def test_retention_refuses_shapes_that_do_not_fit():
    q, k = np.zeros((4, HEADS, DIM)), np.zeros((9, KV_HEADS, DIM))
    for bad_q, bad_k in ((q[:, :4], k), (q[..., 1:], k), (q, k[:, 0])):
        with pytest.raises(ValueError, match="snapkv: q, k: expected"):
            retention.snapkv(bad_q, bad_k, 6)
    with pytest.raises(ValueError, match="heavy_hitters: q: expected the 9 tokens of k, got 4"):
        retention.heavy_hitters(q, k, 6, recent=2)
    for kept in (np.arange(3), np.zeros((KV_HEADS - 1, 3), int)):
        for gather in (retention.compact, retention.compensation):
            with pytest.raises(ValueError, match=f"{gather.__name__}: kept: expected"):
                gather(k, kept)
