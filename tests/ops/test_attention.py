"""jax_attn.attention against the float64 reference, on every backend and every case."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_attn as ja
from helpers.attention_cases import (
    CASES,
    E4M3,
    MASKS,
    MIXED_KV,
    MIXED_QO,
    SCHEDULES,
    Case,
    build,
    expect,
    expected,
    kv_places,
    random_case,
)
from helpers.attention_checks import attend, check, make_plan, run
from helpers.backends import Backend, on_every_backend, on_every_platform
from helpers.checking import assert_close_state, assert_same_bits
from jax_attn._xla import ffi
from jax_attn._xla.attention_operands import AttentionOperands


@on_every_backend
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case, backend):
    check(case, backend)


@on_every_backend
@pytest.mark.parametrize("seed", range(40))
def test_random_case(seed, backend):
    check(random_case(seed), backend)


HOPPER = 1  # MainLoop in csrc/spec.h

MIXED_CASES = [
    Case("causal"),
    Case("full", causal=False, dtype="bfloat16"),
    Case("window", window_left=20, page_size=5),
    Case("ragged", page_size=None, dtype="float16"),
    Case("fixed_split", schedule="fixed_split", kv_split=128, num_qo_heads=6),
    Case("e4m3", kv_dtype=E4M3, dtype="bfloat16", window_left=20, page_size=5),
    Case("e4m3_f16", kv_dtype=E4M3, dtype="float16", page_size=None),
]


@on_every_backend
@pytest.mark.parametrize("what", ["k", "v"])
@pytest.mark.parametrize("case", MIXED_CASES, ids=lambda case: case.name)
def test_nan_inside_a_visible_key_reaches_only_the_rows_that_see_it(case, what, backend):
    batch = build(case)
    plan = make_plan(case, backend, batch)
    clean_o, clean_lse = run(plan, batch)
    starts = np.concatenate([[0], np.cumsum(case.kv_lens)])
    places = np.stack(kv_places(batch.lengths, case.page_size))
    # One NaN key in each of three requests: at the first, the last and a middle position.
    array = getattr(batch, what).copy()
    for request, position, head in ((4, 0, 1), (6, 299, 0), (7, 600, 1)):
        array[(*places[:, starts[request] + position], head)] = np.nan
    dirty = dataclasses.replace(batch, **{what: array})
    want = expect(case, dirty)
    hit = np.isnan(want.o).any(-1)
    assert hit.any() and not hit.all()
    o, lse = run(plan, dirty)
    np.testing.assert_array_equal(np.isnan(o), np.isnan(want.o))
    np.testing.assert_array_equal(np.isnan(lse), np.isnan(want.lse))
    if plan.spec.kernel_config["main_loop"] == HOPPER:
        # The kernel recomputes rows that meet the NaN in a product, without Tensor Cores, in f32.
        assert_close_state(o, lse, want.o, want.lse, want.o_bound, want.lse_bound)
        return
    assert_same_bits("o of the other rows", o[~hit], clean_o[~hit])
    assert_same_bits("lse of the other rows", lse[~hit], clean_lse[~hit])


@on_every_backend
@pytest.mark.parametrize("case", MIXED_CASES, ids=lambda case: case.name)
def test_infinities_reach_only_the_rows_that_see_them(case, backend):
    """Infinite keys make logits of both signs: NaN, or no weight."""
    batch = build(case)
    plan = make_plan(case, backend, batch)
    clean_o, clean_lse = run(plan, batch)
    starts = np.concatenate([[0], np.cumsum(case.kv_lens)])
    places = np.stack(kv_places(batch.lengths, case.page_size))
    k, v = batch.k.copy(), batch.v.copy()
    for array, request, position, head, column, value in (
        (v, 2, 3, 0, 5, np.inf),
        (v, 4, 64, 1, 0, -np.inf),
        (v, 6, 171, 0, 63, np.inf),
        (v, 6, 299, 1, 7, np.inf),
        (v, 8, 698, 1, 9, -np.inf),
        (k, 4, 100, 0, 3, np.inf),
        (k, 7, 1000, 1, 60, -np.inf),
    ):
        array[(*places[:, starts[request] + position], head, column)] = value
    dirty = dataclasses.replace(batch, k=k, v=v)
    want = expect(case, dirty)
    hit = ~np.isfinite(want.o).all(-1)
    touched = hit.copy()  # also rows of the infinite keys' requests and heads
    for request, head in ((4, 0), (7, 1)):
        rows = slice(*batch.lengths.qo_indptr[request : request + 2])
        group = case.num_qo_heads // case.num_kv_heads
        touched[rows, head * group : (head + 1) * group] = True
    assert hit.any() and not touched.all()
    o, lse = run(plan, dirty)
    assert_close_state(o, lse, want.o, want.lse, want.o_bound, want.lse_bound)
    if plan.spec.kernel_config["main_loop"] != HOPPER:  # recomputed rows, see above
        assert_same_bits("o of the other rows", o[~touched], clean_o[~touched])
        assert_same_bits("lse of the other rows", lse[~touched], clean_lse[~touched])


@on_every_platform
def test_garbage_never_reaches_a_result(backend):
    """Zeros, infinities and large numbers as garbage; every other test has NaN."""
    for case in MIXED_CASES:
        batch = build(case)
        plan = make_plan(case, backend, batch)
        want = run(plan, batch)
        for garbage in (0.0, np.inf, -np.inf, 3e38 if case.dtype != "float16" else 65504.0):
            arrays = {name: getattr(batch, name).copy() for name in "qkv"}
            for array in arrays.values():
                array[np.isnan(array)] = garbage
            other = dataclasses.replace(batch, **arrays)
            for name, got, clean in zip(("o", "lse"), run(plan, other), want, strict=True):
                assert_same_bits(f"{name} with {garbage} ({case.name})", got, clean)


@on_every_platform
@pytest.mark.parametrize(
    "lengths",
    # On sm_90 the few rows of "decodes" have their own kernel, but not with larger capacities.
    [{}, {"qo_lens": (1, 2, 0, 1, 1), "kv_lens": (1500, 33, 9, 0, 300)}],
    ids=["mixed", "decodes"],
)
def test_capacities_never_change_bits(lengths, backend):
    for schedule, split in SCHEDULES:
        case = Case(
            "", schedule=schedule, kv_split=split, num_qo_heads=6, dtype="bfloat16", **lengths
        )
        batch = build(case)
        fields = case.spec_fields()
        want_o, want_lse = run(make_plan(case, backend, batch), batch)
        fields["max_batch"] += 100
        fields["max_kv_pages"] += 1000
        fields["max_qo_tokens"] += 333
        q = np.full((fields["max_qo_tokens"], *batch.q.shape[1:]), np.nan, batch.q.dtype)
        q[: len(batch.q)] = batch.q
        plan = ja.plan(backend.spec(**fields), **batch.lengths.plan_arguments())
        o, lse = run(plan, dataclasses.replace(batch, q=q))
        n = len(want_o)
        assert_same_bits(f"o ({schedule})", o[:n], want_o)
        assert_same_bits(f"lse ({schedule})", lse[:n], want_lse)
        assert not o[n:].any() and np.all(lse[n:] == -np.inf)


@on_every_platform
@pytest.mark.parametrize("schedule,split", SCHEDULES)
def test_one_executable_runs_many_plans(schedule, split, backend):
    """Long and short batches alternate in one executable: nothing of the previous plan is left."""
    long = Case("", schedule=schedule, kv_split=split)
    fields = long.spec_fields()
    spec = backend.spec(**fields)
    shapes = [long] + [
        dataclasses.replace(long, qo_lens=qo, kv_lens=kv)
        for qo, kv in (((1,), (1,)), ((1, 1, 1), (900, 3, 7)), ((), ()), ((200,), (200,)))
    ]
    batches = []
    for case in shapes:
        batch = build(case)
        q = np.full((spec.max_qo_tokens, *batch.q.shape[1:]), np.nan, np.float32)
        q[: len(batch.q)] = batch.q
        k, v = (np.full((400, *x.shape[1:]), np.nan, x.dtype) for x in (batch.k, batch.v))
        k[: len(batch.k)], v[: len(batch.v)] = batch.k, batch.v
        page_indices = batch.lengths.page_indices[: batch.lengths.page_indptr[-1]]
        lengths = dataclasses.replace(batch.lengths, page_indices=page_indices)
        batches.append(dataclasses.replace(batch, q=q, k=k, v=v, lengths=lengths))
    plans = [ja.plan(spec, **batch.lengths.plan_arguments()) for batch in batches]
    first = [run(plan, batch) for plan, batch in zip(plans, batches, strict=True)]
    for case, (o, lse) in zip(shapes, first, strict=True):
        want = expected(case, "normal")
        n = min(len(want.o), spec.max_qo_tokens)
        assert_close_state(
            o[:n], lse[:n], want.o[:n], want.lse[:n], want.o_bound[:n], want.lse_bound[:n]
        )
        assert not o[n:].any() and np.all(lse[n:] == -np.inf)
    for i in (0, 1, 0, 3, 2, 4, 0, 0, 1):
        o, lse = run(plans[i], batches[i])
        assert_same_bits("o", o, first[i][0])
        assert_same_bits("lse", lse, first[i][1])


@on_every_platform
def test_layer_may_be_any_integer_scalar(backend):
    case = Case("", (3, 1), (20, 9), num_layers=2)
    batch = build(case)
    batch.k[0], batch.v[0] = batch.k[1], 2 * batch.v[1]
    plan = make_plan(case, backend, batch)
    o = run(plan, batch)[0]
    for layer in (1, np.int32(1), np.int64(1), np.uint8(1), jnp.int32(1), np.array(1)):
        assert_same_bits("o", ja.attention(batch.q, batch.k, batch.v, plan, layer=layer), o)
    assert_same_bits("o", ja.attention(batch.q, batch.k, batch.v, plan, layer=0), 2 * o)


@on_every_platform
def test_o_alone_is_the_o_of_both(backend):
    case = Case("", dtype="bfloat16")
    batch = build(case)
    plan = make_plan(case, backend, batch)
    alone = ja.attention(batch.q, batch.k, batch.v, plan)
    assert isinstance(alone, jax.Array)
    assert_same_bits("o", alone, run(plan, batch)[0])


# ---- batch invariance of schedule="fixed_split" --------------------------------------------------

INVARIANCE_CASES = [
    Case("f32", dtype="float32"),
    Case("bf16", dtype="bfloat16", num_qo_heads=10, page_size=3),
    Case("window", dtype="bfloat16", window_left=90, sinks=True),
    Case("cap", dtype="float16", logits_soft_cap=5.0, num_qo_heads=4, num_kv_heads=4),
    Case("full_window", causal=False, window_left=70, window_right=0, head_dim_vo=24),
    Case("ragged", page_size=None, num_qo_heads=7, num_kv_heads=1),
    Case("e4m3", dtype="bfloat16", kv_dtype=E4M3, q_dtype=E4M3, page_size=3, sinks=True),
]
INVARIANCE_CASES = [
    dataclasses.replace(case, schedule="fixed_split", kv_split=128) for case in INVARIANCE_CASES
] + [
    dataclasses.replace(
        case,
        kv_dtype="int8",
        eight_bit_products=True,
        schedule="fixed_split",
        kv_split=256,
    )
    for case in (
        Case("codes", dtype="bfloat16", num_qo_heads=10, page_size=3),
        Case("codes_window", dtype="float32", window_left=90, sinks=True, head_dim_vo=72),
        Case("codes_cap", dtype="float16", logits_soft_cap=5.0, num_qo_heads=7, num_kv_heads=1),
    )
]


@on_every_backend
@pytest.mark.parametrize("case", INVARIANCE_CASES, ids=lambda case: case.name)
def test_fixed_split_bits_of_a_request_do_not_depend_on_its_batch(case, backend):
    batch = build(case)
    o, lse = run(make_plan(case, backend, batch), batch)
    for r, (qo_len, kv_len) in enumerate(zip(MIXED_QO, MIXED_KV, strict=True)):
        begin = batch.lengths.qo_indptr[r]
        alone_o, alone_lse = run_rows(case, backend, batch, r, 0, qo_len, kv_len)
        assert_same_bits(f"o of request {r}", alone_o, o[begin : begin + qo_len])
        assert_same_bits(f"lse of request {r}", alone_lse, lse[begin : begin + qo_len])


@on_every_backend
@pytest.mark.parametrize("case", INVARIANCE_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("chunk", [1, 5, 16, 64, 100, 177])
def test_fixed_split_bits_of_a_prefill_do_not_depend_on_its_chunks(case, chunk, backend):
    """Each chunk of a prefill sees only the keys so far, which are all that a causal row needs."""
    length = 300
    case = dataclasses.replace(case, qo_lens=(length,), kv_lens=(length,))
    batch = build(case)
    whole_o, whole_lse = run(make_plan(case, backend, batch), batch)
    first = 250 if chunk == 1 else 0
    for begin in range(first, length, chunk):
        end = min(begin + chunk, length)
        o, lse = run_rows(case, backend, batch, 0, begin, end, end)
        assert_same_bits(f"o of [{begin}, {end})", o, whole_o[begin:end])
        assert_same_bits(f"lse of [{begin}, {end})", lse, whole_lse[begin:end])


@on_every_backend
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_fixed_split_bits_of_a_request_do_not_depend_on_who_has_its_prefix(dtype, backend):
    """Alone, among up to 64 requests with the same prefix, and among them without sharing it."""
    paths = ("aa", "aab", "aab", "aaba", "c", "aabb", "aaba", "cc")
    num_shared = []
    for num_requests in (1, 2, 3, 8, 17, 64):
        requests = range(num_requests)
        case = Case(
            f"{num_requests} requests",
            qo_lens=tuple((1, 1, 3, 1, 1, 2, 1, 1)[r % 8] for r in requests),
            kv_lens=tuple(300 + 37 * r % 501 for r in requests),
            branches=tuple(paths[r % 8] for r in requests),
            branch_tokens=128,
            num_qo_heads=8,
            dtype=dtype,
            schedule="fixed_split",
            kv_split=128,
            num_ctas=2,
        )
        batch = build(case)
        plan = make_plan(case, backend, batch)
        num_shared.append(plan.header()["num_shared_tokens"])
        o, lse = run(plan, batch)
        flat = make_plan(dataclasses.replace(case, share_prefixes=False), backend, batch)
        assert flat.header()["num_shared_tokens"] == 0
        flat_o, flat_lse = run(flat, batch)
        assert_same_bits("o without sharing", flat_o, o)
        assert_same_bits("lse without sharing", flat_lse, lse)
        for r in list(requests)[:8]:
            begin, qo_len = batch.lengths.qo_indptr[r], case.qo_lens[r]
            alone_o, alone_lse = run_rows(case, backend, batch, r, 0, qo_len, case.kv_lens[r])
            assert_same_bits(f"o of request {r}", alone_o, o[begin : begin + qo_len])
            assert_same_bits(f"lse of request {r}", alone_lse, lse[begin : begin + qo_len])
    assert num_shared[0] == 0 and num_shared[-1] >= 16, num_shared


def run_rows(case, backend, batch, request, begin, end, kv_len):
    """Runs query tokens [begin, end) of a request over its first kv_len keys, alone in a batch."""
    fields = case.spec_fields() | {"max_batch": 2}
    spec = backend.spec(**fields)
    q = np.full(batch.q.shape, np.nan, batch.q.dtype)
    first = batch.lengths.qo_indptr[request] + begin
    q[: end - begin] = batch.q[first : first + end - begin]
    table = {}
    if case.page_size is None:
        start = batch.lengths.kv_indptr[request]
        table["kv_indptr"] = np.array([start, start + kv_len])
    else:
        start, stop = batch.lengths.page_indptr[request : request + 2]
        table["page_indptr"] = np.array([0, stop - start])
        table["page_indices"] = batch.lengths.page_indices[start:stop]
    if kv_len < end - begin:
        table["q_offsets"] = np.array([kv_len - (end - begin)])
    plan = ja.plan(spec, np.array([0, end - begin]), np.array([kv_len]), **table)
    o, lse = run(plan, dataclasses.replace(batch, q=q))
    return o[: end - begin], lse[: end - begin]


# ---- sizes beyond 16 and 32 bits -----------------------------------------------------------------


@on_every_platform
def test_batches_beyond_65535_requests(backend):
    batch_size = 70_001
    rng = np.random.default_rng(0)
    spec = backend.spec(
        num_qo_heads=1,
        num_kv_heads=1,
        head_dim_qk=8,
        dtype="float32",
        page_size=1,
        max_batch=batch_size,
        max_qo_tokens=batch_size,
        max_kv_pages=2 * batch_size,
    )
    kv_lens = np.arange(batch_size) % 3
    page_indptr = np.concatenate([[0], np.cumsum(kv_lens)])
    page_indices = rng.permutation(page_indptr[-1])
    q = rng.normal(size=(batch_size, 1, 8)).astype(np.float32)
    k, v = (rng.normal(size=(page_indptr[-1], 1, 1, 8)).astype(np.float32) for _ in "kv")
    batch = np.arange(batch_size + 1), kv_lens, page_indptr, page_indices
    plan = ja.plan(spec, *batch, q_offsets=kv_lens - 1)
    o, lse = (np.asarray(x) for x in attend(q, k, v, plan))
    # Requests of 0, 1 and 2 keys, whose results are known in closed form.
    assert not o[::3].any() and np.all(lse[::3] == -np.inf)
    one_key = v[page_indices[page_indptr[1:-1:3]], 0, 0]
    np.testing.assert_allclose(o[1::3, 0], one_key, rtol=1e-5)
    first = page_indptr[2:-1:3]
    keys = page_indices[np.stack([first, first + 1], 1)]
    logits = (q[2::3] * k[keys, 0, 0]).sum(-1).astype(np.float64) / np.sqrt(8)
    weights = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    want = (weights[..., None] * v[keys, 0, 0]).sum(1)
    np.testing.assert_allclose(o[2::3, 0], want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse[2::3, 0], np.log(np.exp(logits).sum(1)), rtol=1e-5, atol=1e-6)


def test_pools_beyond_2_32_elements():
    """Reads slots on both sides of 2^31 and 2^32 elements; the rest is never touched."""
    check_large_pool(Backend("cpu"), lazy_zeros)


@pytest.mark.cuda
@pytest.mark.parametrize("backend", [Backend("gpu")], ids=["cuda"], indirect=True)
def test_pools_beyond_2_32_elements_on_cuda(backend):
    check_large_pool(backend, lambda shape: jnp.zeros(shape, jnp.float16))


def lazy_zeros(shape):
    """A float16 array of zeros on the CPU whose untouched pages cost no memory."""
    size = 2 * int(np.prod(shape, dtype=np.int64))
    try:
        words = np.zeros(size + 64, np.uint8)
    except MemoryError:
        pytest.skip(f"no {size} bytes of address space")
    begin = -words.ctypes.data % 64  # XLA uses foreign memory without a copy if it is aligned
    return words[begin : begin + size].view(np.float16).reshape(shape)


def check_large_pool(backend, zeros):
    page_elements = 16 * 1 * 128
    num_pages = 2**32 // page_elements + 5
    ids = [
        2**31 // page_elements + 1,
        num_pages - 1,
        3,
        2**32 // page_elements,
        2**31 // page_elements,
    ]
    rng = np.random.default_rng(0)
    spec = backend.spec(
        num_qo_heads=2,
        num_kv_heads=1,
        head_dim_qk=128,
        dtype="float16",
        num_pages=num_pages,
        max_batch=1,
        max_qo_tokens=2,
        max_kv_pages=len(ids),
    )
    plan = ja.plan(spec, [0, 2], [16 * len(ids) - 3], [0, len(ids)], ids)
    q = rng.normal(size=(2, 2, 128)).astype(np.float16)
    small_k, small_v = (rng.normal(size=(5, 16, 1, 128)).astype(np.float16) for _ in "kv")
    pools = []
    for small in (small_k, small_v):
        pool = zeros((num_pages, 16, 1, 128))
        # Pages that an address computed in 31 or 32 bits would read instead.
        wrong = sorted({i % (2**b // page_elements) for i in ids for b in (31, 32)} - set(ids))
        for places, content in ((ids, small), (wrong, np.full_like(small[: len(wrong)], np.nan))):
            if isinstance(pool, np.ndarray):
                pool[places] = content
            else:
                pool = jax.jit(lambda p, i, x: p.at[i].set(x), donate_argnums=0)(
                    pool, np.array(places), content
                )
        if isinstance(pool, np.ndarray):
            pool = jnp.from_dlpack(pool, copy=False)
        pools.append(pool)
    o, lse = attend(q, *pools, plan)
    small_plan = ja.plan(
        backend.spec(
            num_qo_heads=2,
            num_kv_heads=1,
            head_dim_qk=128,
            dtype="float16",
            max_batch=1,
            max_qo_tokens=2,
            max_kv_pages=5,
        ),
        [0, 2],
        [16 * len(ids) - 3],
        [0, len(ids)],
        np.arange(5),
    )
    want_o, want_lse = attend(q, small_k, small_v, small_plan)
    assert_same_bits("o", o, want_o)
    assert_same_bits("lse", lse, want_lse)


def test_ragged_rows_beyond_2_32_elements():
    row_elements, num_keys = 128, 40
    start = 2**32 // row_elements - 17  # the request's rows lie on both sides
    rng = np.random.default_rng(0)
    fields = {"num_qo_heads": 2, "num_kv_heads": 1, "head_dim_qk": 128, "dtype": "float16"}
    fields |= {"page_size": None, "max_batch": 1, "max_qo_tokens": 3}
    q = rng.normal(size=(3, 2, 128)).astype(np.float16)
    small = [rng.normal(size=(num_keys, 1, 128)).astype(np.float16) for _ in "kv"]
    large = []
    for content in small:
        rows = lazy_zeros((start + num_keys, 1, 128))
        rows[start:] = content
        rows[: num_keys - 17] = np.nan  # rows that a 32-bit address would read
        large.append(jnp.from_dlpack(rows, copy=False))
    results = []
    for k, v, first in ((*small, 0), (*large, start)):
        spec = Backend("cpu").spec(**fields, max_kv_tokens=len(k))
        plan = ja.plan(spec, [0, 3], [num_keys], kv_indptr=[first, first + num_keys])
        results.append(attend(q, k, v, plan))
    for name, got, want in zip(("o", "lse"), results[1], results[0], strict=True):
        assert_same_bits(name, got, want)


# ---- the tests themselves ------------------------------------------------------------------------


@on_every_platform
def test_poison_shows_a_row_that_nobody_writes(backend):
    """Without items every live row keeps its 0xFF; if this fails, other tests prove less.

    A CPU refuses such a plan. There the workspace shows the poison, because no state uses all of
    it.
    """
    case = Case("", (1, 5), (9, 30))
    batch = build(case)
    plan = make_plan(case, backend, batch)
    if backend.platform == "cpu":
        operands = AttentionOperands(
            q=batch.q, k=batch.k, v=batch.v, plan_buffer=plan.buffer, layer=np.int32(0)
        )
        *_, workspace = ffi.attention(operands, plan.spec)
        assert (np.asarray(workspace) == -1).any()
        return
    layout, buffer = plan.spec.layout, plan.buffer.copy()
    buffer[layout["queue_indptr"] :][: plan.spec.kernel_config["num_ctas"] + 1] = 0
    o, lse = run(dataclasses.replace(plan, buffer=buffer), batch)
    assert np.isnan(o[:6]).all() and np.isnan(lse[:6]).all()
    assert not o[6:].any() and np.all(lse[6:] == -np.inf)


def test_masks_and_schedules_of_the_list_are_all_in_use():
    """A case list that lost a feature would pass unnoticed."""
    for mask in MASKS.values():
        assert any(all(getattr(c, n) == x for n, x in mask.items()) for c in CASES)
    for name, values in {
        "page_size": (None, 1, 3, 5, 7, 16, 48, 64),
        "head_dim_qk": (8, 24, 64, 80, 96, 112, 128, 192, 256),
        "dtype": ("float32", "bfloat16", "float16"),
        "schedule": ("balanced", "fixed_split", "no_split"),
        "sinks": (True, False),
    }.items():
        assert {getattr(c, name) for c in CASES} >= set(values), name
    groups = {c.num_qo_heads // c.num_kv_heads for c in CASES}
    assert groups >= set(range(1, 17))
    assert any(c.head_dim_vo not in (None, c.head_dim_qk) for c in CASES)
