"""Beyond 2^31 and 2^32: offsets are 64 bits wide, for indices of any width.

Arrays have their full virtual size, and memory is committed only where something is written.
Unwritten pages are one page of zeros or of garbage, so a test takes megabytes.
"""

import functools
import mmap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_attn as ja
from helpers.checking import assert_same_bits
from jax_attn import _environment, reference

HEAD_DIM, PAGE_SIZE = 64, 16
MAP_NORESERVE = 0x4000  # Linux; in mmap from Python 3.13 on


@pytest.fixture(autouse=True)
def no_poison(monkeypatch):
    """Poisoning would write to whole results."""
    monkeypatch.setattr(_environment, "poison", False)


@pytest.fixture(autouse=True)
def little_memory():
    """Fails if a large array is copied or passed over."""
    with open("/proc/self/status") as file:
        before = resident(file.read())
    yield
    with open("/proc/self/status") as file:
        assert resident(file.read()) - before < 2 << 20  # kB


def resident(status):
    return int(status.split("VmHWM:")[1].split()[0])


def zeros(shape, dtype=np.float16):
    """Zeros of numpy that are not committed, aligned so that XLA does not copy them."""
    num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    return np.frombuffer(memory, dtype).reshape(shape)


def in_jax(array):
    """The array in JAX, sharing its memory."""
    shared = jax.dlpack.from_dlpack(array, copy=False)
    assert shared.unsafe_buffer_pointer() == array.ctypes.data
    return shared


def unwritten(shape):
    """Float16 in memory of XLA's own, so that it can be donated.

    It is the q that append_rotated leaves undefined, all of it in a batch without tokens.
    """
    num_heads, head_dim = 16, 256
    num_tokens, rest = divmod(int(np.prod(shape)), num_heads * head_dim)
    assert rest == 0  # otherwise a slice of q would be a copy
    spec = ja.AttentionSpec(
        *(num_heads, 1, head_dim),
        dtype="float16",
        page_size=1,
        max_batch=1,
        max_qo_tokens=num_tokens,
        max_kv_pages=1,
        max_items=1,
        target="cpu",
    )
    plan = ja.plan(spec, [0], [], [0], [])
    pages = jnp.zeros((1, 1, 1, head_dim), jnp.float16)
    angles = in_jax(zeros((num_tokens, head_dim // 2), np.float32))
    qkv = in_jax(zeros((num_tokens, (num_heads + 2) * head_dim)))

    @jax.jit
    def rotate(qkv, angles, pages, plan):
        q, _, _ = ja.append_rotated(qkv, angles, angles, pages, pages, plan)
        return q.reshape(shape)

    return rotate(qkv, angles, pages, plan)


def random(rng, *shape):
    return rng.normal(size=shape).astype(np.float16)


def paged_spec(num_requests, kv_lens, **more):
    fields = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim_qk": HEAD_DIM, "dtype": "float16"}
    pages = sum(-(-n // PAGE_SIZE) for n in kv_lens)
    capacities = {"max_batch": num_requests, "max_qo_tokens": 2 * num_requests}
    capacities |= {"max_kv_pages": pages, "page_size": PAGE_SIZE, "target": "cpu"}
    return ja.AttentionSpec(**fields | capacities | more)


def indptr(lens):
    return np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)


@pytest.mark.parametrize("num_layers", [None, 3])
def test_append_and_attention_in_a_pool_beyond_2_to_the_32(num_layers):
    """Attention over a large pool has the bits of a pool with only the pages in use.

    Each pool, and the first or last layer, has 2^32 elements. Offsets lie on both sides of 2^31 and
    2^32 elements, and of 2^32 bytes.
    """
    row = 2 * HEAD_DIM  # elements of a slot
    num_pages = (2**32 // (num_layers or 1)) // (PAGE_SIZE * row) // 2 * 2 + 8
    borders = [x // (PAGE_SIZE * row) for x in (2**31, 2**32)]
    used = {0, 1, num_pages - 1, num_pages - 2}
    used |= {b + i for b in borders for i in (-1, 0, 1) if b + i < num_pages}
    used = np.array(sorted(used), np.int32)
    rng = np.random.default_rng(0)
    kv_lens = np.array([PAGE_SIZE * len(used) - 3, 2], np.int32)
    pages = np.append(rng.permutation(len(used)), 1).astype(np.int32)
    spec = paged_spec(2, kv_lens)
    layer = None if num_layers is None else num_layers - 1

    def run(pool, pages):
        """Appends all tokens but the last two of each request, two at a time."""
        lead = () if num_layers is None else (num_layers,)
        shape = (*lead, pool, PAGE_SIZE, 2, HEAD_DIM)
        k, v = (
            unwritten(shape) if pool == num_pages else jnp.zeros(shape, jnp.float16)
            for _ in range(2)
        )
        append = jax.jit(functools.partial(ja.append_kv, layer=layer), donate_argnums=(0, 1))
        at = k.unsafe_buffer_pointer(), v.unsafe_buffer_pointer()
        rng = np.random.default_rng(1)
        for end in range(2, kv_lens.max() + 1, 2):
            lens = np.minimum(end + kv_lens.max() % 2, kv_lens)
            plan = ja.plan(spec, [0, 2, 4], lens, [0, len(used), len(used) + 1], pages)
            k_new, v_new = random(rng, 4, 2, HEAD_DIM), random(rng, 4, 2, HEAD_DIM)
            k, v = append(k, v, k_new, v_new, plan)
        assert at == (k.unsafe_buffer_pointer(), v.unsafe_buffer_pointer())
        q = random(rng, 4, 4, HEAD_DIM)
        attend = jax.jit(functools.partial(ja.attention, layer=layer, return_lse=True))
        return [np.asarray(x) for x in attend(q, k, v, plan)]

    large, small = run(num_pages, used[pages]), run(len(used), pages)
    for name, a, b in zip(("o", "lse"), large, small, strict=True):
        assert np.isfinite(a).all()
        assert_same_bits(name, a, b)


def test_a_context_of_four_million_tokens():
    """Pages repeat, so that the truth is a weighted sum over few keys."""
    num_pages, kv_len, qo_len = 50, 4 * 2**20 - 5, 3
    rng = np.random.default_rng(0)
    pages = rng.integers(0, num_pages, -(-kv_len // PAGE_SIZE)).astype(np.int32)
    spec = paged_spec(1, [kv_len], num_qo_heads=2, num_kv_heads=1, max_qo_tokens=qo_len)
    plan = ja.plan(spec, [0, qo_len], [kv_len], [0, len(pages)], pages)
    k, v = (random(rng, num_pages, PAGE_SIZE, 1, HEAD_DIM) for _ in range(2))
    q = random(rng, qo_len, 2, HEAD_DIM)
    o, lse = (np.asarray(x, np.float64) for x in ja.attention(q, k, v, plan, return_lse=True))
    for token in range(qo_len):
        seen = kv_len - qo_len + 1 + token
        slots = pages[: seen // PAGE_SIZE, None] * PAGE_SIZE + np.arange(PAGE_SIZE)
        slots = np.append(slots, pages[seen // PAGE_SIZE] * PAGE_SIZE + np.arange(seen % PAGE_SIZE))
        counts = np.bincount(slots, minlength=num_pages * PAGE_SIZE)
        logits = q[token].astype(np.float64) @ k.reshape(-1, HEAD_DIM).astype(np.float64).T / 8
        weights = counts * np.exp(logits)
        want = weights @ v.reshape(-1, HEAD_DIM).astype(np.float64)
        np.testing.assert_allclose(lse[token], np.log(weights.sum(-1)), atol=1e-4)
        np.testing.assert_allclose(o[token], want / weights.sum(-1)[:, None], atol=2e-3)


@pytest.mark.parametrize("page_size", [PAGE_SIZE, None])
def test_a_batch_of_70_000_requests(page_size):
    """Decodes; each is compared with the reference, all at once."""
    n, most, dim = 70_000, 20, 8
    rng = np.random.default_rng(0)
    kv_lens = rng.integers(0, most + 1, n).astype(np.int32)
    fields = {"num_qo_heads": 2, "num_kv_heads": 1, "head_dim_qk": dim, "dtype": "float32"}
    fields |= {"max_batch": n, "max_qo_tokens": n, "page_size": page_size, "target": "cpu"}
    q = rng.normal(size=(n, 2, dim)).astype(np.float32)
    k, v = (rng.normal(size=(n, most, dim)).astype(np.float32) for _ in range(2))
    is_there = np.arange(most) < kv_lens[:, None]
    if page_size is None:
        spec = ja.AttentionSpec(**fields, max_kv_tokens=int(kv_lens.sum()))
        plan = ja.plan(spec, np.arange(n + 1), kv_lens)
        o, lse = ja.attention(q, k[is_there][:, None], v[is_there][:, None], plan, return_lse=True)
    else:
        used = -(-kv_lens // page_size)
        starts = indptr(used)
        num_pages = int(starts[-1])
        spec = ja.AttentionSpec(**fields, max_kv_pages=num_pages, num_pages=num_pages)
        ids = rng.permutation(num_pages).astype(np.int32)
        plan = ja.plan(spec, np.arange(n + 1), kv_lens, starts, ids, q_offsets=kv_lens - 1)
        position = np.broadcast_to(np.arange(most), is_there.shape)[is_there]
        request = np.broadcast_to(np.arange(n)[:, None], is_there.shape)[is_there]
        slots = ids[starts[request] + position // page_size] * page_size + position % page_size
        pools = np.full((2, num_pages * page_size, 1, dim), np.nan, np.float32)
        is_old = position < kv_lens[request] - 1
        for pool, x in zip(pools, (k, v), strict=True):
            pool[slots[is_old], 0] = x[is_there][is_old]
        last = np.maximum(kv_lens - 1, 0)
        k_new, v_new = (x[np.arange(n), last][:, None] for x in (k, v))
        pages = (pool.reshape(num_pages, page_size, 1, dim) for pool in pools)
        k_pages, v_pages = ja.append_kv(*pages, k_new, v_new, plan)
        for got, x in ((k_pages, k), (v_pages, v)):
            np.testing.assert_array_equal(
                np.asarray(got).reshape(-1, dim)[slots], x[is_there], strict=True
            )
        o, lse = ja.attention(q, k_pages, v_pages, plan, return_lse=True)
    logits = np.einsum("nhd,nkd->nhk", q, k) / np.sqrt(dim)
    logits = np.where(is_there[:, None], logits, -np.inf)
    with np.errstate(divide="ignore"):
        want_lse = np.log(np.exp(logits).sum(-1))
    weights = np.exp(logits - np.where(np.isinf(want_lse), 0, want_lse)[..., None])
    np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(o, np.einsum("nhk,nkd->nhd", weights, v), rtol=1e-4, atol=1e-5)


def test_merge_beyond_2_to_the_32():
    """States with lse -inf are not read, so the others may lie far apart."""
    num_states, n, dim = 1030, 64, 1 << 16
    live = [0, 500, 511, 512, 1023, 1024, 1029]  # state 512 begins at 2^31 elements, 1024 at 2^32
    rng = np.random.default_rng(0)
    o_parts = zeros((num_states, n, 1, dim))
    lse_parts = np.full((num_states, n, 1), -np.inf, np.float32)
    rows = [0, 1, n - 1]
    for state in live:
        o_parts[state, rows] = random(rng, len(rows), 1, dim)
        lse_parts[state] = rng.normal(size=(n, 1))
    got = jax.jit(ja.merge_states)(in_jax(o_parts), lse_parts)
    want = reference.merge_states(
        o_parts[live][:, rows].astype(np.float64), lse_parts[live][:, rows].astype(np.float64)
    )
    np.testing.assert_allclose(np.asarray(got[0])[rows], want[0], atol=2e-3)
    np.testing.assert_allclose(np.asarray(got[1])[rows], want[1], atol=1e-5)
    small = ja.merge_states(o_parts[live], lse_parts[live])
    for name, a, b in zip(("o", "lse"), got, small, strict=True):
        assert_same_bits(name, a, b)
