"""append_kv moves bits: every byte of the pools must be the expected one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_attn as ja
from helpers.attention_cases import MIXED_KV, MIXED_QO, Case, build, kv_places
from helpers.backends import Backend, on_every_backend, on_every_platform
from helpers.checking import assert_same_bits
from jax_attn import reference

append = jax.jit(ja.append_kv)

# append_kv needs a position for every query token: kv_len >= qo_len.
KV = tuple(max(q, k) for q, k in zip(MIXED_QO, MIXED_KV, strict=True))
CASES = [
    Case("f32", kv_lens=KV),
    Case("bf16", kv_lens=KV, dtype="bfloat16", page_size=1),
    Case("f16_odd_page", kv_lens=KV, dtype="float16", page_size=7, head_dim_qk=24, head_dim_vo=8),
    Case("stacked", kv_lens=KV, num_layers=3, page_size=5, num_kv_heads=3, num_qo_heads=3),
    Case("decode", (1,) * 157, tuple(1 + (37 * r) % 211 for r in range(157)), dtype="bfloat16"),
    Case("one_head_large_page", (700, 1), (700, 65), page_size=64, num_kv_heads=1, num_qo_heads=8),
    Case("nothing_new", (0, 0), (20, 0)),
    Case("empty_batch", (), ()),
]


def new_tokens(case):
    """Selects the new tokens from the tokens of all requests, request by request."""
    starts = np.concatenate([[0], np.cumsum(case.kv_lens)]).astype(int)
    new = [
        np.arange(starts[r + 1] - qo_len, starts[r + 1]) for r, qo_len in enumerate(case.qo_lens)
    ]
    return np.concatenate([[], *new]).astype(int)


def pools_before(case, batch):
    """The pools of `build` with the slots of new tokens still NaN, and the new tokens packed."""
    nnz = sum(case.qo_lens)
    rows = case.spec_fields()["max_qo_tokens"]
    places = kv_places(batch.lengths, case.page_size)
    at = tuple(axis[new_tokens(case)] for axis in places)
    if case.num_layers is not None:
        at = (case.num_layers - 1, *at)
    pools, tokens = [], []
    for full in (batch.k, batch.v):
        token = np.full((rows, *full.shape[-2:]), np.nan, full.dtype)
        token[:nnz] = full[at]
        pool = full.copy()
        pool[at] = np.nan
        pools.append(pool)
        tokens.append(token)
    return pools, tokens


def lengths_of(batch):
    names = "qo_indptr kv_lens page_indptr page_indices".split()
    return {name: getattr(batch.lengths, name) for name in names}


@on_every_backend
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_append_fills_the_new_slots_and_no_other(case, backend):
    batch = build(case)
    pools, tokens = pools_before(case, batch)
    plan = ja.plan(backend.spec(**case.spec_fields()), **batch.lengths.plan_arguments())
    k_pages, v_pages = append(*pools, *tokens, plan, layer=batch.layer)
    assert_same_bits("k_pages", k_pages, batch.k)
    assert_same_bits("v_pages", v_pages, batch.v)
    want = reference.append_kv(*pools, *tokens, **lengths_of(batch), layer=batch.layer)
    for name, got, expected in zip(("k", "v"), (k_pages, v_pages), want, strict=True):
        assert_same_bits(name, got, expected)


@on_every_platform
def test_every_bit_pattern_survives(backend):
    """Signalling NaNs, -0 and subnormals are copied without arithmetic."""
    case = Case("", (16,), (16,), num_qo_heads=1, num_kv_heads=1, head_dim_qk=256, dtype="float16")
    plan_lengths = build(case).lengths
    plan = ja.plan(backend.spec(**case.spec_fields()), **plan_lengths.plan_arguments())
    words = np.arange(2**16, dtype=np.uint16).reshape(16, 16, 1, 256)
    got = []
    for tokens in words:
        new = np.zeros((19, 1, 256), np.uint16)
        new[:16] = tokens
        new = new.view(np.float16)
        pages = np.zeros((4, 16, 1, 256), np.float16)
        k_pages, _ = append(pages, pages, new, new, plan)
        got.append(np.asarray(k_pages)[plan_lengths.page_indices[0]].view(np.uint16))
    np.testing.assert_array_equal(np.stack(got), words)


@on_every_platform
def test_tokens_before_position_zero_are_dropped(backend):
    """qo_len > kv_len is legal for attention; tokens without a position have no slot either."""
    case = Case("", (5, 2), (2, 2), num_qo_heads=1, num_kv_heads=1, head_dim_qk=8, page_size=2)
    batch = build(case)
    plan = ja.plan(backend.spec(**case.spec_fields()), **batch.lengths.plan_arguments())
    new = np.arange(10 * 8, dtype=np.float32).reshape(10, 1, 8)
    pages = np.full(batch.k.shape, np.nan, np.float32)
    k_pages, _ = append(pages, pages, new, new, plan)
    want = pages.copy()
    first, second = (batch.lengths.page_indices[i] for i in batch.lengths.page_indptr[:2])
    want[first], want[second] = new[3:5], new[5:7]
    assert_same_bits("k_pages", k_pages, want)


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(Backend("cpu"), id="cpu", marks=pytest.mark.big),
        pytest.param(Backend("gpu"), id="cuda", marks=pytest.mark.cuda),
    ],
    indirect=True,
)
def test_pools_beyond_2_32_elements(backend):
    """Writes slots on both sides of 2^31 and 2^32 elements, and nowhere else near them."""
    page_elements = 16 * 1 * 128
    num_pages = 2**32 // page_elements + 5
    ids = [2**31 // page_elements, num_pages - 1, 3, 2**32 // page_elements]
    spec = backend.spec(
        num_qo_heads=1,
        num_kv_heads=1,
        head_dim_qk=128,
        head_dim_vo=8,
        dtype="float16",
        max_batch=1,
        max_qo_tokens=64,
        max_kv_pages=4,
    )
    plan = ja.plan(spec, [0, 64], [64], [0, 4], ids)
    rng = np.random.default_rng(0)
    new = [rng.normal(size=(64, 1, d)).astype(np.float16) for d in (128, 8)]
    pages = [jnp.zeros((num_pages, 16, 1, d), np.float16) for d in (128, 8)]
    pages = jax.jit(ja.append_kv, donate_argnums=(0, 1))(*pages, *new, plan)
    wrong = sorted({i % (2**b // page_elements) for i in ids for b in (31, 32)} - set(ids))
    for pool, tokens in zip(pages, new, strict=True):
        written = pool[np.array(ids)].reshape(tokens.shape)
        assert_same_bits("pages", written, tokens)
        assert not np.asarray(pool[np.array(wrong)]).any()


@on_every_platform
def test_attention_right_after_append_sees_the_new_tokens(backend):
    case = Case("", kv_lens=KV, num_layers=2, dtype="bfloat16")
    batch = build(case)
    pools, tokens = pools_before(case, batch)
    plan = ja.plan(backend.spec(**case.spec_fields()), **batch.lengths.plan_arguments())

    @jax.jit
    def step(k_pages, v_pages, q, k_new, v_new, plan, layer):
        k_pages, v_pages = ja.append_kv(k_pages, v_pages, k_new, v_new, plan, layer=layer)
        return ja.attention(q, k_pages, v_pages, plan, layer=layer)

    o = step(*pools, batch.q, *tokens, plan, jnp.int32(1))
    want = ja.attention(batch.q, batch.k, batch.v, plan, layer=1)
    assert_same_bits("o", o, want)
    assert np.isfinite(np.asarray(o, np.float32)).all()


rotated = jax.jit(ja.append_rotated)


def rotated_case(case, batch, backend):
    """Operands of append_rotated for the case: qkv, cos, sin and a plan.

    qkv is NaN after the plan's tokens. The angles are random, not those of positions.
    """
    spec = backend.spec(**case.spec_fields())
    rows, nnz = spec.max_qo_tokens, sum(case.qo_lens)
    head_dim, rng = spec.head_dim_qk, np.random.default_rng(5)
    row_dim = (spec.num_qo_heads + spec.num_kv_heads) * head_dim
    row_dim += spec.num_kv_heads * spec.head_dim_vo
    qkv = rng.normal(size=(rows, row_dim)).astype(spec.dtype)
    qkv[nnz:] = np.nan
    angles = rng.uniform(-4, 4, (rows, head_dim // 2)).astype(np.float32)
    plan = ja.plan(spec, **batch.lengths.plan_arguments())
    return qkv, np.cos(angles), np.sin(angles), plan


def assert_rotated(name, got, want):
    """Checks equality up to the last bit of the dtype.

    Sums of products may be rounded once or twice. NaN marks rows that must not be written.
    """
    got, want = np.asarray(got), np.asarray(want)
    eps = float(jnp.finfo(want.dtype).eps)
    got, want = got.astype(np.float64), want.astype(np.float64)
    np.testing.assert_allclose(got, want, rtol=eps, atol=4e-7, err_msg=name)


@on_every_platform
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_append_rotated_is_rotation_and_append(case, backend):
    batch = build(case)
    pools, _ = pools_before(case, batch)
    qkv, cos, sin, plan = rotated_case(case, batch, backend)
    got = rotated(qkv, cos, sin, *pools, plan, layer=batch.layer)
    want = reference.append_rotated(qkv, cos, sin, *pools, **lengths_of(batch), layer=batch.layer)
    nnz = sum(case.qo_lens)
    assert_rotated("q", got[0][:nnz], want[0][:nnz])
    assert_rotated("k_pages", got[1], want[1])
    assert_same_bits("v_pages", got[2], want[2])


@on_every_platform
@pytest.mark.parametrize("scaled", [False, True])
def test_append_rotated_rounds_before_it_quantizes(scaled, backend):
    """Pages of e4m3 hold what append_kv makes of the keys in pages of the spec's dtype."""
    case = Case("", kv_lens=KV, dtype="bfloat16", num_kv_heads=2, num_qo_heads=4)
    batch = build(case)
    qkv, cos, sin, plan = rotated_case(case, batch, backend)
    scales = {"k_scale": np.float32([0.02, 3]), "v_scale": np.float32([7, 0.1])} if scaled else {}
    fields = case.spec_fields() | {"kv_dtype": "float8_e4m3fn"}
    plan_e4m3 = ja.plan(backend.spec(**fields), **batch.lengths.plan_arguments())
    pools = [np.zeros(pages.shape, jnp.float8_e4m3fn) for pages in (batch.k, batch.v)]
    q, *got = rotated(qkv, cos, sin, *pools, plan_e4m3, **scales)

    plain_q, *plain = rotated(qkv, cos, sin, np.zeros_like(batch.k), np.zeros_like(batch.v), plan)
    places = tuple(axis[new_tokens(case)] for axis in kv_places(batch.lengths, case.page_size))
    nnz = sum(case.qo_lens)
    new = []
    for pages in map(np.asarray, plain):
        tokens = np.zeros((plan.spec.max_qo_tokens, *pages.shape[-2:]), pages.dtype)
        tokens[:nnz] = pages[places]
        new.append(tokens)
    want = append(*pools, *new, plan_e4m3, **scales)
    assert_same_bits("q", q[:nnz], plain_q[:nnz])
    for name, a, b in zip(("k_pages", "v_pages"), got, want, strict=True):
        assert np.asarray(a, np.float32).any()
        assert_same_bits(name, a, b)


@on_every_platform
def test_append_rotated_drops_tokens_before_position_zero(backend):
    """These tokens have no slot, but their queries are rotated like all others."""
    case = Case("", (5, 2), (2, 2), num_qo_heads=1, num_kv_heads=1, head_dim_qk=8, page_size=2)
    batch = build(case)
    qkv, cos, sin, plan = rotated_case(case, batch, backend)
    pages = np.full(batch.k.shape, np.nan, np.float32)
    got = rotated(qkv, cos, sin, pages, pages, plan)
    # The last two tokens of each request, as in requests of two tokens.
    kept = np.array([3, 4, 5, 6])
    want = reference.append_rotated(
        *(x[kept] for x in (qkv, cos, sin)),
        *(pages, pages),
        **(lengths_of(batch) | {"qo_indptr": np.array([0, 2, 4])}),
    )
    assert_rotated("q", got[0][kept], want[0])
    assert np.isfinite(got[0][:7]).all()
    assert_rotated("k_pages", got[1], want[1])
    assert_same_bits("v_pages", got[2], want[2])


@pytest.mark.parametrize(("name", "wrong"), [("qkv", (48,)), ("cos", (16,)), ("sin", (1, 8))])
def test_append_rotated_says_what_does_not_fit(name, wrong):
    fields = Case("", (2,), (2,), num_qo_heads=2, num_kv_heads=1, head_dim_qk=16).spec_fields()
    plan = ja.plan(ja.AttentionSpec(**fields, target="cpu"), [0, 2], [2], [0, 1], [0])
    n, shapes = plan.spec.max_qo_tokens, {"qkv": (64,), "cos": (8,), "sin": (8,)}
    pages = np.zeros((4, plan.spec.page_size, 1, 16), np.float32)

    def call(shapes):
        new = {name: np.zeros((n, *shape), np.float32) for name, shape in shapes.items()}
        return ja.append_rotated(**new, k_pages=pages, v_pages=pages, plan=plan)

    call(shapes)
    with pytest.raises(ValueError, match=f"append_rotated: {name}: expected float32"):
        call(shapes | {name: wrong})
