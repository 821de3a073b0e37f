"""k and v of the batch's query tokens from k_new and v_new, of earlier tokens from pages."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_attn as ja
from helpers.attention_cases import Case, build, expect, kv_places, make_plan
from helpers.attention_checks import run
from helpers.backends import on_every_backend, on_every_platform
from helpers.checking import assert_close_state, assert_same_bits


@jax.jit
def attend(q, k, v, k_new, v_new, plan, layer, sinks):
    return ja.attention(
        q, k, v, plan, k_new=k_new, v_new=v_new, layer=layer, sinks=sinks, return_lse=True
    )


def split_off_new_tokens(case, batch):
    """Moves new tokens out of the pages, leaving NaN: (k_new, v_new, pages without them)."""
    places = np.stack(kv_places(batch.lengths, case.page_size))
    starts = np.concatenate([[0], np.cumsum(case.kv_lens)]).astype(int)
    moved = []
    for pages, rows in ((batch.k, batch.k_rows), (batch.v, batch.v_rows)):
        pages = pages.copy()
        new = np.full((len(batch.q), *pages.shape[-2:]), np.nan, pages.dtype)
        for r, (qo_len, kv_len) in enumerate(zip(case.qo_lens, case.kv_lens, strict=True)):
            n = min(qo_len, kv_len)  # if queries are more than keys, the first have none
            end = batch.lengths.qo_indptr[r + 1]
            new[end - n : end] = rows[r][kv_len - n :]
            at = tuple(places[:, starts[r] + kv_len - n : starts[r] + kv_len])
            pages[(..., *at, slice(None), slice(None))] = np.nan
        moved.append((new, pages))
    (k_new, k), (v_new, v) = moved
    return k_new, v_new, dataclasses.replace(batch, k=k, v=v)


def run_fresh(plan, batch, k_new, v_new):
    operands = batch.q, batch.k, batch.v, k_new, v_new, plan, batch.layer, batch.sinks
    return tuple(np.asarray(x) for x in attend(*operands))


# Chunks that start at, before and after a page's border, decodes, a prompt from nothing, requests
# without new tokens, without any token, and with more queries than keys.
CASES = [
    Case("causal"),
    Case("page_1", page_size=1, dtype="bfloat16"),
    Case("page_5", page_size=5, dtype="float16", num_qo_heads=10),
    Case("page_64", page_size=64, dtype="bfloat16", head_dim_qk=128, num_kv_heads=1),
    Case("full", causal=False, dtype="bfloat16"),
    Case("window", window_left=3, dtype="bfloat16"),
    Case("window_over_the_border", window_left=40, page_size=7),
    Case("both_windows", causal=False, window_left=30, window_right=9),
    Case("cap", logits_soft_cap=2.0, dtype="bfloat16"),
    Case("sinks", sinks=True, dtype="bfloat16", head_dim_vo=32),
    Case("layers", num_layers=3, dtype="bfloat16"),
    Case("fixed_split", schedule="fixed_split", kv_split=128),
    Case("one_queue", num_ctas=1, dtype="bfloat16"),
    Case("many_queues", num_ctas=64, dtype="bfloat16", qo_lens=(1, 2, 70), kv_lens=(3000, 900, 70)),
    Case("q_offsets", q_offsets=(40, 5, 0, 0, 80, -3, 9, 1030, 650), causal=False, window_left=25),
    Case("every_length", qo_lens=tuple(i % 7 for i in range(140)), kv_lens=tuple(range(140))),
    Case("empty", qo_lens=(), kv_lens=()),
]


@on_every_backend
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_new_tokens_beside_the_pages(case, backend):
    for content in ("normal", "count"):
        batch = build(case, content)
        want = expect(case, batch)
        spec = backend.spec(**case.spec_fields(), fresh_kv=True)
        plan = ja.plan(spec, **batch.lengths.plan_arguments())
        appended = ja.plan(
            dataclasses.replace(spec, fresh_kv=False), **batch.lengths.plan_arguments()
        )
        assert_same_bits("plan", plan.buffer, appended.buffer)
        k_new, v_new, rest = split_off_new_tokens(case, batch)
        o, lse = run_fresh(plan, rest, k_new, v_new)
        assert_close_state(o, lse, want.o, want.lse, want.o_bound, want.lse_bound)
        # The bits do not depend on a token's page, nor on whether the pages hold it already.
        for name, got, other in zip(("o", "lse"), (o, lse), run(appended, batch), strict=True):
            assert_same_bits(f"{name} of appended tokens", got, other)
        again = run_fresh(plan, batch, k_new, v_new)
        for name, got, other in zip(("o", "lse"), again, (o, lse), strict=True):
            assert_same_bits(f"{name} beside appended tokens", got, other)


# float32 tiles on CUDA have 16 rows: sharing pays with 16 tokens in one, not with 4 of 4 heads.
BESIDE_A_PREFIX = pytest.mark.parametrize(
    "case",
    [
        Case(
            f"prefix-{dtype}",
            qo_lens=(1, 1, 3, 1, 40, 1, 2, 1),
            kv_lens=(513, 530, 600, 640, 552, 900, 514, 519),
            branches=("a",) * 8,
            branch_tokens=512,
            num_qo_heads=num_qo_heads,
            num_ctas=3,  # few: with many, sharing the prefix does not pay
            dtype=dtype,
        )
        for dtype, num_qo_heads in (("float32", 2), ("bfloat16", 8))
    ],
    ids=lambda case: case.name,
)


@BESIDE_A_PREFIX
@pytest.mark.parametrize("target", ["cpu", "sm_80", "sm_90"])
def test_a_prefix_is_shared_beside_new_tokens(case, target):
    plan = make_plan(case, target, fresh_kv=True)
    assert plan.phase() == "csu"
    items = plan.items()
    assert items["kv_end"][items["num_groups"] > 1].max() <= 512


@on_every_backend
@BESIDE_A_PREFIX
def test_new_tokens_after_a_shared_prefix(case, backend):
    """One launch covers shared spans, own pages and new tokens."""
    batch = build(case)
    spec = backend.spec(**case.spec_fields(), fresh_kv=True)
    plan = ja.plan(spec, **batch.lengths.plan_arguments())
    k_new, v_new, rest = split_off_new_tokens(case, batch)
    o, lse = run_fresh(plan, rest, k_new, v_new)
    want = expect(case, batch)
    assert_close_state(o, lse, want.o, want.lse, want.o_bound, want.lse_bound)


def test_shared_pages_end_before_new_tokens():
    """Sharing stops before new tokens, even if requests have equal page tables.

    All rows of a chunk see its first token, but no other request has it: without fresh_kv the
    common part of rows of 2-token chunks ends at 1024.
    """
    n, tokens = 8, 1025
    ends = []
    for fresh_kv in (False, True):
        spec = ja.AttentionSpec(
            2, 2, 64, page_size=1, fresh_kv=fresh_kv, target="cpu",
            max_batch=n, max_qo_tokens=2 * n, max_kv_pages=n * tokens,
        )  # fmt: skip
        table = np.arange(n + 1) * tokens, np.tile(np.arange(tokens), n)
        items = ja.plan(spec, 2 * np.arange(n + 1), [tokens] * n, *table).items()
        ends.append(items["kv_end"][items["num_groups"] > 1].max())
    assert ends == [1024, 1024 - spec.kernel_config["tile_kv"]]


@on_every_platform
def test_nan_in_a_new_token_reaches_only_the_rows_that_see_it(backend):
    case = Case("", window_left=20, page_size=5)
    batch = build(case)
    spec = backend.spec(**case.spec_fields(), fresh_kv=True)
    plan = ja.plan(spec, **batch.lengths.plan_arguments())
    k_new, v_new, rest = split_off_new_tokens(case, batch)
    clean, _ = run_fresh(plan, rest, k_new, v_new)
    row = batch.lengths.qo_indptr[6] + 60  # of a chunk of 130
    v_new[row, 1] = np.nan
    o, _ = run_fresh(plan, rest, k_new, v_new)
    hit = np.isnan(o).any(-1)
    seeing = np.zeros_like(hit)
    seeing[row : row + 21, 2:] = True
    np.testing.assert_array_equal(hit, seeing)
    np.testing.assert_allclose(o[~hit].astype(np.float64), clean[~hit], rtol=1e-5, atol=1e-6)


@on_every_platform
def test_append_before_after_or_never(backend):
    """Any order inside one function, also with donated pages."""
    case = Case("", dtype="bfloat16", num_layers=2)
    batch = build(case)
    plan = ja.plan(
        backend.spec(**case.spec_fields(), fresh_kv=True), **batch.lengths.plan_arguments()
    )
    k_new, v_new, rest = split_off_new_tokens(case, batch)

    def step(k, v, order):
        def append(k, v):
            return ja.append_kv(k, v, k_new, v_new, plan, layer=1)

        if order == "before":
            k, v = append(k, v)
        o, lse = ja.attention(
            batch.q, k, v, plan, k_new=k_new, v_new=v_new, layer=1, return_lse=True
        )
        if order == "after":
            k, v = append(k, v)
        return o, lse, k, v

    results = {}
    for order in ("before", "after", "never"):
        pages = jnp.asarray(rest.k), jnp.asarray(rest.v)
        results[order] = jax.jit(step, static_argnums=2, donate_argnums=(0, 1))(*pages, order)
    for order in ("after", "never"):
        for i, name in enumerate(("o", "lse")):
            assert_same_bits(f"{name} {order}", results[order][i], results["before"][i])
    for i in (2, 3):
        assert_same_bits("pages", results["after"][i], results["before"][i])
    # With more queries than keys, some rows of k_new have no slot; append_kv skips them.
    for i, pages in ((2, batch.k), (3, batch.v)):
        assert_same_bits("pages", results["after"][i], pages)


@on_every_platform
def test_planned_inside_jit(backend):
    """Kernels read an item's request, which device planners write, too."""
    case = Case("", dtype="bfloat16", share_prefixes=False)
    batch = build(case)
    spec = backend.spec(**case.spec_fields(), fresh_kv=True)
    k_new, v_new, rest = split_off_new_tokens(case, batch)
    arguments = batch.lengths.plan_arguments()
    want = run_fresh(ja.plan(spec, **arguments), rest, k_new, v_new)

    @jax.jit
    def planned(arguments):
        operands = batch.q, rest.k, rest.v, k_new, v_new
        return attend(*operands, ja.plan(spec, **arguments), None, None)

    for name, got, other in zip(("o", "lse"), planned(arguments), want, strict=True):
        assert_same_bits(name, got, other)


def test_refusals():
    fields = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim_qk": 64, "target": "cpu"}
    paged = fields | {"max_kv_pages": 8, "max_batch": 2, "max_qo_tokens": 4}
    with pytest.raises(ValueError, match="fresh_kv: expected False with page_size=None"):
        ja.AttentionSpec(**fields, page_size=None, max_kv_tokens=8, fresh_kv=True)
    with pytest.raises(NotImplementedError, match="fresh_kv: supported with mla=False"):
        ja.AttentionSpec(
            **(paged | {"num_kv_heads": 1, "head_dim_vo": 32, "sm_scale": 1.0}),
            mla=True,
            fresh_kv=True,
        )
    spec = ja.AttentionSpec(**paged, fresh_kv=True)
    plan = ja.plan(spec, [0, 1], [5], [0, 1], [0])
    q, pages = jnp.zeros((4, 4, 64), jnp.bfloat16), jnp.zeros((8, 16, 2, 64), jnp.bfloat16)
    new = jnp.zeros((4, 2, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match="v_new: expected the keys or values .* got None"):
        ja.attention(q, pages, pages, plan, k_new=new)
    with pytest.raises(ValueError, match=r"k_new: expected bfloat16\[4, 2, 64\].* got bfloat16\[3"):
        ja.attention(q, pages, pages, plan, k_new=new[:3], v_new=new)
    without = ja.plan(dataclasses.replace(spec, fresh_kv=False), [0, 1], [5], [0, 1], [0])
    with pytest.raises(ValueError, match="k_new: expected None with a spec of fresh_kv=False"):
        ja.attention(q, pages, pages, without, k_new=new, v_new=new)
    with pytest.raises(NotImplementedError, match="vmap"):
        jax.vmap(lambda q: ja.attention(q, pages, pages, plan, k_new=new, v_new=new))(q[None])


def test_pages_of_new_tokens_are_in_no_bucket():
    case = Case("", (40, 1, 16), (40, 17, 32))
    assert make_plan(case).bucket() == ("c-u", 57, 0, 3 + 2 + 2, 3)
    assert make_plan(case, fresh_kv=True).bucket() == ("c-u", 57, 0, 0 + 1 + 1, 3)
    assert make_plan(Case("", (), ()), fresh_kv=True).bucket() == ("---", 0, 0, 0, 0)
