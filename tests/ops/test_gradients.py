"""The backward pass of jax_attn.attention against the float64 reference."""

import dataclasses
import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jax_attn as ja
from helpers.attention_cases import CASES, MASKS, Case, build, built, random_case
from helpers.backends import Backend, on_every_backend, on_every_platform
from helpers.checking import assert_same_bits
from helpers.jaxprs import equations
from helpers.prefixes import num_shared, one_document
from jax_attn import _core, reference
from jax_attn._dense import dense
from jax_attn._ops import gradients
from jax_attn._xla.attention_operands import BackwardOperands

NAMES = ("d_q", "d_k", "d_v", "d_sinks")
DIFFERENTIABLE = [case for case in CASES if case.kv_dtype is None and not case.mla]


BEST_CPU = (Backend("cpu"),)


def cpu_backends(case):
    """Every instruction set for short cases, the best one for the others."""
    is_short = case.name.startswith(("mask_", "head_dim_", "group_", "prefix_mixed"))
    isas = ja._core.supported_cpu_isas()
    return [Backend("cpu", isa) for isa in isas] if is_short else BEST_CPU


def cotangents(case, batch):
    """Cotangents of o and lse, NaN in padding rows."""
    rng = np.random.default_rng(3)
    spec = case.spec_fields()
    shape = (spec["max_qo_tokens"], case.num_qo_heads, case.head_dim_vo or case.head_dim_qk)
    d_o, d_lse = rng.normal(size=shape), rng.normal(size=shape[:2])
    for x in (d_o, d_lse):
        x[sum(case.qo_lens) :] = np.nan
    return jnp.asarray(d_o, case.dtype), jnp.asarray(d_lse, jnp.float32)


@functools.partial(jax.jit, static_argnames="has_sinks")
def vjp(q, k, v, plan, layer, sinks, d_o, d_lse, has_sinks):
    def attend(q, k, v, sinks=None):
        return ja.attention(q, k, v, plan, layer=layer, sinks=sinks, return_lse=True)

    operands = (q, k, v, sinks) if has_sinks else (q, k, v)
    return jax.vjp(attend, *operands)[1]((d_o, d_lse))


def run(plan, batch, d_o, d_lse):
    """d_q, d_k, d_v and with sinks d_sinks, as numpy arrays."""
    arrays = batch.q, batch.k, batch.v, plan, batch.layer, batch.sinks, d_o, d_lse
    return tuple(np.asarray(x) for x in vjp(*arrays, has_sinks=batch.sinks is not None))


def check(case, backends=BEST_CPU, content=None):
    """Compares the gradients of each backend. Returns plan, batch, the last gradients."""
    content = content or case.contents[0]
    batch = built(case, content)
    spec = backends[0].spec(**case.spec_fields())
    plan = ja.plan(spec, **batch.lengths.plan_arguments())
    d_o, d_lse = cotangents(case, batch)
    expect = functools.partial(
        reference.attention_vjp,
        np.asarray(d_o),
        np.asarray(d_lse),
        batch.q,
        batch.k,
        batch.v,
        **batch.lengths.plan_arguments(),
        spec=plan.spec,
        layer=batch.layer,
        sinks=batch.sinks,
    )
    eps = 4e-6 if case.dtype == "float32" else 2.5 * float(jnp.finfo(case.dtype).eps)
    if content.startswith("far_"):
        eps += 4e-5  # rounding of an lse of up to 350 in float32
    want, sizes = expect(), expect(magnitudes=True)
    for backend in backends:
        if content == "huge" and backend.platform != "cpu":
            eps += 2.0**19 * 2.0**-24  # weights are those of the f32 lse, which is -(2^19) or so
        with backend.active():
            got = run(plan, batch, d_o, d_lse)
            again = run(plan, batch, d_o, d_lse)
        for name, a, same, b, size in zip(NAMES, got, again, want, sizes, strict=False):
            assert a.dtype == (np.float32 if name == "d_sinks" else case.dtype), name
            error = np.abs(a.astype(np.float64) - b)
            bad = ~(error <= eps * (size + 1e-3 * size.max(initial=0)) + 1e-30)
            assert not bad.any(), (
                f"{backend}: {name}: {bad.sum()} of {bad.size} are wrong, the first at"
                f" {np.argwhere(bad)[0]}: expected {b[bad][0]}, got {a[bad][0]}, of terms of"
                f" {size[bad][0]}"
            )
            if name != "d_sinks":
                assert not a[size == 0].any(), name  # exactly 0 where nothing is read
            assert_same_bits(f"{backend}: {name}", a, same)
    return plan, batch, got


@on_every_platform
@pytest.mark.parametrize("case", DIFFERENTIABLE, ids=lambda case: case.name)
def test_case(case, backend):
    check(case, cpu_backends(case) if backend.platform == "cpu" else [backend])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_a_kernel(dtype, monkeypatch):
    """In jnp, as beyond 256 columns where shared memory has 100 KB; cotangents of padding rows are
    NaN there, too."""
    monkeypatch.setattr(ja.AttentionSpec, "has_backward_kernel", False)
    jax.clear_caches()
    case = next(case for case in CASES if case.name.startswith("head_dim_320_512"))
    check(dataclasses.replace(case, dtype=dtype))
    jax.clear_caches()


@on_every_platform
@pytest.mark.parametrize("mask", ["causal", "full", "both_long", "cap_full_window"])
@pytest.mark.parametrize(
    ("head_dims", "heads"),
    [((64, 64), (5, 1)), ((128, 128), (4, 4)), ((80, 96), (2, 1)), ((192, 128), (2, 2))],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_ragged(dtype, head_dims, heads, mask, backend):
    """On sm_90 the WGMMA kernels, with whole and partial tiles and blocks."""
    dim_qk, dim_vo = head_dims
    for content in ("normal", "peaky", "count"):
        case = Case(
            f"hopper_{mask}-{content}", (200, 0, 64, 1, 130, 3), (200, 16, 400, 1, 300, 0),
            *heads, dim_qk, dim_vo, dtype=dtype, page_size=None, **MASKS[mask], contents=(content,),
        )  # fmt: skip
        check(case, [backend])


@on_every_platform
@pytest.mark.parametrize("mask", ["causal", "full", "both_long", "cap_full_window"])
@pytest.mark.parametrize(
    ("head_dims", "page_size"),
    [((512, 512), 16), ((512, 512), None), ((264, 40), 5), ((64, 408), None)],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_more_than_256_columns(dtype, head_dims, page_size, mask, backend):
    """On CUDA two warps have the same rows, or gradients are in jnp where memory is short."""
    dim_qk, dim_vo = head_dims
    case = Case(
        f"beyond_256_{mask}", (70, 0, 33, 1, 3), (90, 16, 150, 1, 0), 4, 2, dim_qk, dim_vo,
        dtype=dtype, page_size=page_size, **MASKS[mask], contents=("normal",),
    )  # fmt: skip
    check(case, [backend])


@pytest.mark.parametrize(
    ("target", "has_kernel"), [("sm_80", True), ("sm_90", True), ("sm_120", False)]
)
def test_which_gpus_have_a_kernel_beyond_256_columns(target, has_kernel):
    spec = ja.AttentionSpec(4, 2, 512, page_size=16, max_kv_pages=8, target=target)
    assert spec.has_backward_kernel == has_kernel


@on_every_platform
@pytest.mark.parametrize("mask", ["causal", "full", "both_long", "cap_full_window"])
@pytest.mark.parametrize(
    ("head_dim", "heads", "page_size", "dtype"),
    [
        (64, (5, 1), 1, "bfloat16"),
        (64, (2, 2), 256, "float16"),
        (128, (4, 4), 16, "bfloat16"),
        (128, (4, 2), 40, "float16"),
    ],
)
def test_groups(head_dim, heads, page_size, dtype, mask, backend):
    """On sm_90 the WGMMA kernel, with prompts and answers in two groups, one of them a tree.

    Some prefixes end within a block of keys; some queries see no key, some keys have no query.
    """
    for content in ("normal", "peaky", "count"):
        case = Case(
            f"groups_{mask}-{content}", (300, 70, 130, 0, 64, 257, 1, 90, 3),
            (300, 400, 430, 310, 320, 257, 290, 90, 0), *heads, head_dim, dtype=dtype,
            page_size=page_size, num_layers=2, branches=("aa", "aab", "aab", "aa", "aac", "b", "b",
            "", ""), branch_tokens=144, **MASKS[mask], contents=(content,),
        )  # fmt: skip
        check(case, [backend])


@on_every_platform
@pytest.mark.parametrize("head_dim", [64, 128])
def test_pages_that_nobody_shares_have_the_bits_of_rows(head_dim, backend):
    """The same operands give the same bits, lse included."""
    lens, tokens = (200, 0, 64, 450, 1), 715
    rng = np.random.default_rng(4)
    heads = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim_qk": head_dim, "dtype": "bfloat16"}
    common = heads | {"max_batch": 5, "max_qo_tokens": tokens}
    indptr = np.cumsum([0, *lens])
    tables = [-(-n // 16) for n in lens]
    rows = np.concatenate(
        [16 * first + np.arange(n) for first, n in zip(np.cumsum([0, *tables]), lens, strict=False)]
    )
    q, d_o = (jnp.asarray(rng.normal(size=(tokens, 4, head_dim)), "bfloat16") for _ in range(2))
    k, v = (jnp.asarray(rng.normal(size=(tokens, 2, head_dim)), "bfloat16") for _ in range(2))
    d = jnp.asarray(rng.normal(size=(tokens, 4)), jnp.float32)
    ragged = ja.plan(backend.spec(**common, page_size=None, max_kv_tokens=tokens), indptr, lens)
    paged = ja.plan(
        backend.spec(**common, page_size=16, max_kv_pages=sum(tables)), indptr, lens,
        np.cumsum([0, *tables]), np.arange(sum(tables)),
    )  # fmt: skip
    _, lse = ja.attention(q, k, v, ragged, return_lse=True)

    def run(k, v, plan):
        operands = BackwardOperands(
            q=q, k=k, v=v, plan_buffer=plan.buffer, layer=jnp.int32(0), lse=lse, d=d, d_o=d_o
        )
        return jax.jit(lambda x: gradients.gradients(x, plan.spec))(operands)

    def in_pages(x):
        pool = jnp.full((16 * sum(tables), 2, head_dim), jnp.nan, x.dtype)
        return pool.at[rows].set(x).reshape(-1, 16, 2, head_dim)

    want, got = run(k, v, ragged), run(in_pages(k), in_pages(v), paged)
    assert_same_bits("d_q", np.asarray(got[0]), np.asarray(want[0]))
    for name, a, b in zip(NAMES[1:], got[1:], want[1:], strict=False):
        flat = np.asarray(a).reshape(-1, 2, head_dim)
        assert_same_bits(name, flat[rows], np.asarray(b))
        assert not np.delete(flat, rows, 0).any(), name


@pytest.mark.parametrize("seed", range(12))
def test_random_case(seed):
    case = random_case(1000 + seed)
    check(case, content="normal")


def test_the_reference_has_the_gradients_of_itself():
    """Finite differences of reference.attention in float64, of every operand."""
    for case in (
        Case("", (3, 0, 2, 4), (5, 2, 2, 3), head_dim_qk=8, page_size=2, sinks=True),
        Case("", (3, 4), (6, 5), 2, 1, 8, 16, causal=False, logits_soft_cap=1.5, sm_scale=-0.4),
        Case("", (5, 3), (7, 3), 2, 2, 8, page_size=None, window_left=2, sinks=True),
    ):
        batch = build(case)
        fields = ja.AttentionSpec(**case.spec_fields(), target="cpu")
        d_o, d_lse = (np.nan_to_num(np.float64(x)) for x in cotangents(case, batch))
        operands = {
            name: np.float64(x)
            for name, x in (("q", batch.q), ("k", batch.k), ("v", batch.v), ("sinks", batch.sinks))
            if x is not None
        }
        lengths = batch.lengths.plan_arguments()

        def loss(operands, d_o=d_o, d_lse=d_lse, fields=fields, lengths=lengths):
            o, lse = reference.attention(**operands, **lengths, spec=fields)
            return (d_o * o).sum() + (d_lse * np.where(np.isneginf(lse), 0, lse)).sum()

        got = reference.attention_vjp(d_o, d_lse, **operands, **lengths, spec=fields)
        rng = np.random.default_rng(8)
        for name, slope in zip(operands, got, strict=False):
            direction = np.where(slope == 0, 0, rng.normal(size=slope.shape))
            ahead, behind = (
                loss(operands | {name: operands[name] + h * direction}) for h in (1e-5, -1e-5)
            )
            np.testing.assert_allclose(
                (ahead - behind) / 2e-5, (slope * direction).sum(), rtol=1e-7, err_msg=name
            )


# ---- non-finite and missing values


@on_every_backend
@pytest.mark.parametrize("cap", [0.0, 2.0])
def test_what_is_not_finite_reaches_who_sees_it(cap, backend):
    """A NaN row reaches the keys it sees. A NaN key reaches the rows that see it, and their keys.

    With a soft cap an infinite key makes a finite logit, whose slope is 0.
    """
    case = Case(
        "", (150, 40), (150, 40), 4, 2, 64, page_size=None, window_left=20, logits_soft_cap=cap
    )
    clean = build(case)
    plan = ja.plan(backend.spec(**case.spec_fields()), **clean.lengths.plan_arguments())
    d_o, d_lse = cotangents(case, clean)
    want = run(plan, clean, d_o, d_lse)
    row, key = 70, 100  # of the first request
    for name, bad in (
        ("q", np.nan),
        ("q", np.inf),
        ("d_o", np.inf),
        ("d_lse", np.nan),
        ("k", np.nan),
        ("k", np.inf),
        ("v", -np.inf),
    ):
        if name == "k" and bad == np.inf and not cap:
            continue  # the sign of its logit decides if a row's lse is finite
        arrays = {"q": clean.q, "k": clean.k, "v": clean.v, "d_o": d_o, "d_lse": d_lse}
        x = np.array(arrays[name])
        x[(row, 1) if x.ndim == 2 else (row, 1, 3) if name in ("q", "d_o") else (key, 0, 3)] = bad
        arrays[name] = x
        batch = dataclasses.replace(clean, q=arrays["q"], k=arrays["k"], v=arrays["v"])
        d_q, d_k, d_v = run(plan, batch, jnp.asarray(arrays["d_o"]), jnp.asarray(arrays["d_lse"]))
        if name in ("k", "v"):
            rows, keys = slice(key, key + 21), slice(key - 20, key + 21)
            if name == "k" and bad == np.inf:  # lse is finite
                keys = slice(key, key + 1)
            heads = [0, 1]
        else:
            rows, keys, heads = slice(row, row + 1), slice(row - 20, row + 1), [1]
        is_nan = np.zeros(d_q.shape[:2], bool)
        is_nan[rows, heads] = True
        np.testing.assert_array_equal(np.isnan(d_q).all(-1), is_nan, err_msg=name)
        assert_same_bits("d_q", d_q[~is_nan], want[0][~is_nan])
        of_keys = np.zeros(d_k.shape[:2], bool)
        of_keys[keys, 0] = True
        as_clean = ~of_keys
        if name in ("k", "v"):  # the rows' weights of other keys change
            as_clean[key - 20 : key + 21, 0] = False
        for x, clean_x in ((d_k, want[1]), (d_v, want[2])):
            np.testing.assert_array_equal(np.isnan(x).all(-1), of_keys, err_msg=name)
            assert_same_bits("d_k, d_v", x[as_clean], clean_x[as_clean])


def test_gradients_never_cross_documents():
    """Documents in one batch: the data of one has no effect on another's gradients."""
    case = Case("", (33, 130, 64), (33, 130, 64), page_size=None)
    clean, other = build(case), build(case)
    plan = ja.plan(ja.AttentionSpec(**case.spec_fields()), **clean.lengths.plan_arguments())
    d_o, d_lse = cotangents(case, clean)
    rows, keys = slice(33, 163), slice(34, 164)  # ragged rows have a gap after each request
    other.q[rows], other.k[keys], other.v[keys] = np.nan, np.nan, np.nan
    want, got = run(plan, clean, d_o, d_lse), run(plan, other, d_o, d_lse)
    for a, b, inside in zip(got, want, (rows, keys, keys), strict=True):
        assert np.isnan(a[inside]).any()
        assert_same_bits("", np.delete(a, inside, 0), np.delete(b, inside, 0))


# Requests that share pages, but not the work on them: many tasks write the same rows.
THREADS = """
import hashlib, sys, jax, numpy as np, jax_attn as ja
rng = np.random.default_rng(0)
tables = [np.append(np.arange(40), 40 + r) for r in range(6)]
spec = ja.AttentionSpec(4, 2, 32, dtype=sys.argv[1], page_size=16, max_batch=6, max_qo_tokens=600,
                        max_kv_pages=246, share_prefixes=False, num_ctas=3, target="cpu")
plan = ja.plan(spec, np.arange(7) * 100, [650] * 6, np.arange(7) * 41, np.concatenate(tables))
q, d_o = (rng.normal(size=(600, 4, 32)).astype(spec.dtype) for _ in range(2))
k, v = (rng.normal(size=(46, 16, 2, 32)).astype(spec.dtype) for _ in range(2))
step = jax.jit(lambda *qkv: jax.vjp(lambda *x: ja.attention(*x, plan), *qkv)[1](d_o))
digests = {hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in step(q, k, v))).hexdigest()
           for _ in range(20)}
print(*digests)
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bits_do_not_depend_on_threads(dtype):
    found = set()
    for threads in ("1", "2", "7"):
        command = [sys.executable, "-c", THREADS, dtype]
        environment = os.environ | {"NPROC": threads}
        found.add(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)
    assert len(found) == 1 and len(found.pop().split()) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_backward_pass_lowers_for_cuda(dtype):
    """Without a GPU: checks the custom call, whose memory does not grow with tokens squared."""
    spec = ja.AttentionSpec(
        4, 2, 64, dtype=dtype, page_size=16, max_batch=3, max_qo_tokens=500, max_kv_pages=40,
        target="sm_90",
    )  # fmt: skip
    plan = jax.eval_shape(lambda: ja.plan(spec, [0, 8], [40], [0, 3], [0, 1, 2]))
    q = jax.ShapeDtypeStruct((500, 4, 64), dtype)
    pages = jax.ShapeDtypeStruct((7, 30, 16, 2, 64), dtype)  # stacked

    def loss(q, k, v, plan):
        return ja.attention(q, k, v, plan, layer=3).astype(jnp.float32).sum()

    step = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    text = step.trace(q, pages, pages, plan).lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "@jax_attn_backward" in line]
    words = 16 + 3 + 2 * 40 + 2 * 30  # counter, requests, entries of page tables, pages
    if dtype == "bfloat16":  # owners of pages, and sums of d_q in tiles of 128 rows
        tiles = 4 * (500 // 128 + 3)
        words = 4 * -(-(words + 3 + 2 * 40 + 30 + tiles) // 4) + tiles * 128 * 64
    assert len(calls) == 1 and f"tensor<{words}xf32>" in calls[0]


@pytest.mark.parametrize("head_dim, rows", [(64, 128), (128, 64)])
def test_the_workspace_of_sm_90_grows_with_tokens(head_dim, rows):
    """Ragged: f32 sums of d_q in tiles of `rows` rows, and a counter for each tile."""

    def words(tokens, batch=3, dtype="bfloat16", target="sm_90"):
        spec = ja.AttentionSpec(
            4, 2, head_dim, dtype=dtype, page_size=None, max_batch=batch, max_qo_tokens=tokens,
            max_kv_tokens=99, target=target,
        )  # fmt: skip
        return spec.problem.backward_words(1)

    tiles = 500 // rows + 3
    assert words(500) == 4 * -(-(16 + 3 + 4 * tiles) // 4) + 4 * tiles * rows * head_dim
    assert words(500, dtype="float32") == words(500, target="sm_80") == 16 + 3


@pytest.mark.timeout(1800)
@on_every_platform
@pytest.mark.parametrize("runs", [200, pytest.param(10_000, marks=pytest.mark.hours)])
@pytest.mark.parametrize(
    ("dtype", "head_dim"), [("float32", 16), ("bfloat16", 16), ("bfloat16", 64)]
)
def test_the_same_bits_in_every_run(dtype, head_dim, runs, backend):
    """Requests that share pages; many tasks in several queues write the same rows."""
    tables = [np.append(np.arange(8), 8 + r) for r in range(4)]
    spec = backend.spec(
        num_qo_heads=4, num_kv_heads=2, head_dim_qk=head_dim, dtype=dtype, page_size=16,
        max_batch=4, max_qo_tokens=40, max_kv_pages=36, share_prefixes=False, num_ctas=3,
    )  # fmt: skip
    plan = ja.plan(spec, np.arange(5) * 10, [140] * 4, np.arange(5) * 9, np.concatenate(tables))
    rng = np.random.default_rng(0)
    q, d_o = (jnp.asarray(rng.normal(size=(40, 4, head_dim)), dtype) for _ in range(2))
    k, v = (jnp.asarray(rng.normal(size=(12, 16, 2, head_dim)), dtype) for _ in range(2))
    step = jax.jit(lambda *qkv: jax.vjp(lambda *x: ja.attention(*x, plan), *qkv)[1](d_o))
    first = [np.asarray(x) for x in step(q, k, v)]
    for _ in range(runs):
        for name, a, b in zip(NAMES, step(q, k, v), first, strict=False):
            assert_same_bits(name, np.asarray(a), b)


def test_a_plan_of_another_batch_is_refused():
    """The kernels' backward pass has the forward pass's checks: of pages, words, shapes."""
    spec = ja.AttentionSpec(
        4, 2, 32, dtype="float32", page_size=16, max_batch=2, max_qo_tokens=8, max_kv_pages=4,
        target="cpu",
    )  # fmt: skip
    lengths = [0, 4, 8], [20, 30], [0, 2, 4]
    good, far = (ja.plan(spec, *lengths, pages) for pages in ([0, 1, 2, 3], [0, 1, 2, 9]))
    other = ja.plan(dataclasses.replace(spec, max_batch=3), *lengths, [0, 1, 2, 3])
    q, rows = jnp.ones((8, 4, 32)), jnp.zeros((8, 4))
    pages = jnp.ones((4, 16, 2, 32))

    def forward(buffer):
        plan = dataclasses.replace(good, buffer=buffer)
        return ja.attention(q, pages, pages, plan)

    def backward(buffer):
        operands = BackwardOperands(
            q=q, k=pages, v=pages, plan_buffer=buffer, layer=jnp.int32(0), lse=rows, d=rows, d_o=q
        )
        return gradients.gradients(operands, good.spec)

    for run in (forward, backward):
        jax.block_until_ready(run(jnp.asarray(good.buffer)))
        for buffer, words in (
            (far.buffer, "page.*9"),
            (np.zeros_like(good.buffer), "plan"),
            (other.buffer, "plan"),
        ):
            with pytest.raises(Exception, match=words):
                jax.block_until_ready(run(jnp.asarray(buffer)))


# ---- with the rest of JAX


def test_checkpoint_can_save_what_the_backward_pass_needs():
    """The forward pass runs once under a policy that saves o and lse, and twice otherwise."""
    case = Case("", (40,), (40,), page_size=None)
    batch = build(case)
    plan = ja.plan(ja.AttentionSpec(**case.spec_fields()), **batch.lengths.plan_arguments())
    names = jax.checkpoint_policies.save_only_these_names("jax_attn_o", "jax_attn_lse")

    def count(policy):
        layer = jax.checkpoint(
            lambda q: jnp.sin(ja.attention(q, batch.k, batch.v, plan)), policy=policy
        )
        slope = jax.value_and_grad(lambda q: layer(q).sum())
        made = equations(jax.make_jaxpr(slope)(batch.q).jaxpr)
        return sum(e.primitive.name == "custom_partitioning" for e in made)

    assert (count(names), count(None)) == (2, 3)


def test_merged_states_have_the_gradients_of_the_whole():
    """Attention over two halves of the keys, merged."""
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(20, 4, 32)), jnp.float32)
    k, v = (jnp.asarray(rng.normal(size=(90, 2, 32)), jnp.float32) for _ in range(2))

    def plan_of(num_keys):
        spec = ja.AttentionSpec(
            4, 2, 32, dtype="float32", causal=False, page_size=None, max_batch=1, max_qo_tokens=20,
            max_kv_tokens=num_keys, target="cpu",
        )  # fmt: skip
        return ja.plan(spec, [0, 20], [num_keys])

    whole, parts = plan_of(90), (plan_of(50), plan_of(40))

    def merged(q, k, v):
        halves = zip(parts, (slice(0, 50), slice(50, 90)), strict=True)
        states = [ja.attention(q, k[at], v[at], p, return_lse=True) for p, at in halves]
        return ja.merge_states(*(jnp.stack(x) for x in zip(*states, strict=True)))

    def slopes(attend):
        def loss(*qkv):
            o, lse = attend(*qkv)
            return jnp.sum(jnp.sin(o)) + jnp.sum(jnp.cos(lse))

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v)

    want = slopes(lambda *qkv: ja.attention(*qkv, whole, return_lse=True))
    for a, b in zip(slopes(merged), want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize(
    "fields,what",
    [
        ({"fresh_kv": True}, "fresh_kv"),
        ({"kv_dtype": "float8_e4m3fn"}, "float8_e4m3fn keys"),
        ({"mla": True, "num_kv_heads": 1, "head_dim_vo": 32, "sm_scale": 0.1}, "mla"),
    ],
)
def test_what_has_no_gradient_says_so_while_tracing(fields, what):
    spec = ja.AttentionSpec(
        **{"num_qo_heads": 4, "num_kv_heads": 2, "head_dim_qk": 64, "dtype": "bfloat16",
           "page_size": 16, "max_batch": 1, "max_qo_tokens": 8, "max_kv_pages": 4, "target": "cpu"}
        | fields
    )  # fmt: skip
    q = jax.ShapeDtypeStruct(spec.q_shape, spec.dtype_of_q)
    k_shape, v_shape = spec.kv_shapes(4, 16)
    k = jax.ShapeDtypeStruct(k_shape, spec.dtype_of_kv)
    v = v_shape and jax.ShapeDtypeStruct(v_shape, spec.dtype_of_kv)
    new = [jax.ShapeDtypeStruct((8, *x[2:]), spec.dtype) for x in (k_shape, v_shape or k_shape)]
    plan = jax.eval_shape(lambda: ja.plan(spec, [0, 8], [40], [0, 3], [0, 1, 2]))

    def loss(q, k, v, plan, new):
        fresh = {"k_new": new[0], "v_new": new[1]} if spec.fresh_kv else {}
        return ja.attention(q, k, v, plan, **fresh).astype(jnp.float32).sum()

    with pytest.raises(NotImplementedError, match=f"^attention: gradients: {what}.*; "):
        jax.eval_shape(jax.grad(loss), q, k, v, plan, new)


def launches_of_gradients(device, **options):
    """Launches of the backward kernels for the gradients of q, k and v on a GPU."""
    x = jax.device_put(jnp.ones((2, 40, 4, 64), jnp.bfloat16), device)

    def loss(q, k, v):
        return ja.dot_product_attention(q, k, v, **options).astype(jnp.float32).sum()

    before = _core.jit_stats()["backward_launches"]
    jax.block_until_ready(jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(x, x, x))
    return _core.jit_stats()["backward_launches"] - before


@pytest.mark.cuda
@pytest.mark.parametrize("backend", [Backend("gpu")], ids=["cuda"], indirect=True)
def test_the_dense_entry_runs_the_backward_kernels_on_cuda(backend):
    """With a bias or a mask the dense entry differentiates in jnp."""
    mask = jnp.tril(jnp.ones((1, 1, 40, 40), bool))
    assert launches_of_gradients(backend.device, is_causal=True) > 0
    assert launches_of_gradients(backend.device, mask=mask) == 0
    assert launches_of_gradients(backend.device, bias=mask.astype(jnp.float32)) == 0


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_the_dense_entry_lowers_to_the_backward_kernels(target, monkeypatch):
    """Lowers for CUDA without a GPU: one backward call, none with a mask."""
    monkeypatch.setattr(dense, "AttentionSpec", functools.partial(ja.AttentionSpec, target=target))

    def num_calls(**options):
        def loss(q, k, v):
            return ja.dot_product_attention(q, k, v, **options).astype(jnp.float32).sum()

        x = jax.ShapeDtypeStruct((2, 48, 4, 64), jnp.bfloat16)
        step = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
        text = step.trace(x, x, x).lower(lowering_platforms=("cuda",)).as_text()
        return text.count("@jax_attn_backward")

    assert num_calls(is_causal=True) == 1
    assert num_calls(mask=jnp.ones((1, 1, 48, 48), bool)) == 0


# ---- shared prefixes


def test_a_group_has_the_gradients_of_whole_sequences():
    """Answers to one prompt stored once, compared with answers that each have a copy of it."""
    group, prefix, own, page = 5, 320, 48, 16
    rng = np.random.default_rng(2)
    tokens = prefix + group * own
    heads = 4, 2, 32
    common = {"dtype": "float32", "max_batch": 8, "target": "cpu"}
    q, d_o = (jnp.asarray(rng.normal(size=(tokens, 4, 32)), jnp.float32) for _ in range(2))
    k, v = (jnp.asarray(rng.normal(size=(tokens, 2, 32)), jnp.float32) for _ in range(2))
    tables = [np.arange(prefix // page)]
    tables += [
        np.append(tables[0], (prefix + i * own) // page + np.arange(own // page))
        for i in range(group)
    ]
    spec = ja.AttentionSpec(
        *heads, page_size=page, max_qo_tokens=tokens, max_kv_pages=sum(map(len, tables)),
        num_ctas=2, **common,
    )  # fmt: skip
    qo_lens, kv_lens = [prefix] + [own] * group, [prefix] + [prefix + own] * group
    plan = ja.plan(
        spec, np.cumsum([0, *qo_lens]), kv_lens, np.cumsum([0, *map(len, tables)]),
        np.concatenate(tables),
    )  # fmt: skip
    assert any(item["num_groups"] > 1 for item in plan.items()), "the prompt is not shared"

    def shared(q, k, v):
        return ja.attention(q, *(x.reshape(-1, page, 2, 32) for x in (k, v)), plan)

    whole = ja.AttentionSpec(
        *heads, page_size=None, max_qo_tokens=group * (prefix + own),
        max_kv_tokens=group * (prefix + own), **common,
    )  # fmt: skip
    whole_plan = ja.plan(whole, np.arange(group + 1) * (prefix + own), np.full(group, prefix + own))
    rows = np.concatenate(
        [np.append(np.arange(prefix), prefix + i * own + np.arange(own)) for i in range(group)]
    )
    # All copies of a prompt row together count once.
    weight = np.where(rows < prefix, 1 / group, 1).astype(np.float32)[:, None, None]

    def slopes(attend, d_o):
        return jax.jit(lambda *qkv: jax.vjp(attend, *qkv)[1](d_o))(q, k, v)

    got = slopes(shared, d_o)
    want = slopes(
        lambda *qkv: ja.attention(*(x[rows] for x in qkv), whole_plan), weight * d_o[rows]
    )
    for name, a, b in zip("qkv", got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=name)


def test_prefix_levels_that_are_given_have_the_gradients_of_what_is_found():
    """Compares nested levels with none (each request computes its prompt) and the reference."""
    told = one_document(head_dim_qk=32, dtype="float32")
    rng = np.random.default_rng(5)
    num_pages = 1 + int(told.lengths["page_indices"].max())
    q, d_o = (rng.normal(size=(16, 8, 32)).astype(np.float32) for _ in range(2))
    k, v = (rng.normal(size=(num_pages, 16, 2, 32)).astype(np.float32) for _ in range(2))
    plans = [told.plan(prefix_levels=x) for x in (told.levels, None, ())]
    assert [num_shared(x) for x in plans] == [20, 20, 0]
    given, found, flat = (
        jax.jit(lambda *qkv, p=p: jax.vjp(lambda *x: ja.attention(*x, p), *qkv)[1](d_o))(q, k, v)
        for p in plans
    )
    want = reference.attention_vjp(
        d_o, np.zeros((16, 8)), q, k, v, **told.lengths, spec=plans[0].spec
    )
    for got in (given, found, flat):
        for name, a, b in zip(NAMES, got, want, strict=False):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=name)


# ---- any lengths

requests = st.lists(st.tuples(st.integers(0, 150), st.integers(0, 300)), min_size=1, max_size=4)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(requests, st.sampled_from([-1, 0, 31, 128]), st.booleans(), st.sampled_from([None, 8]))
def test_any_lengths(lens, window_left, causal, page_size):
    case = Case(
        "", *zip(*lens, strict=True), 4, 2, 16, 24, causal=causal, window_left=window_left,
        page_size=page_size,
    )  # fmt: skip
    check(case, content="normal")
