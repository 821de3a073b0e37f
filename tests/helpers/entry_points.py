"""Calls of every public function that takes arrays, in small shapes, for tests of JAX's modes.

`CASES` has the calls by public name. A name that is in no table here fails test_modes.py.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_attn as ja
from jax_attn import compat, masks, mla, parallel

MODULES = (ja, compat, masks, mla, parallel)

# Public names that take no arrays, or not as a part of JAX's programs.
OTHERS = {
    "jax_attn.At": "what a variant's functions are given",
    "jax_attn.AttentionSpec": "static",
    "jax_attn.LinearAttentionSpec": "static",
    "jax_attn.StatePlan": "what plan_linear_attention makes",
    "jax_attn.StateSpec": "static",
    "jax_attn.FixedBatch": "what fixed_batch makes",
    "jax_attn.PlanBucket": "numbers on the host",
    "jax_attn.Rows": "what rows makes",
    "jax_attn.Variant": "static; attention has it",
    "jax_attn.export_checks": "for jax.export, which the calls here are tried with",
    "jax_attn.fixed_batch": "static sizes to a spec and zeros",
    "jax_attn.item_times": "measures times on the host; it refuses jit",
    "jax_attn.precompile": "compiles CUDA kernels",
    "jax_attn.masks.Batch": "what a mask's own classes are given",
    "jax_attn.masks.BlockMap": "of arrays; masks.document_ids makes one",
    "jax_attn.masks.Mask": "static functions; masks.document_ids makes one",
    "jax_attn.masks.block_sparse": "host arrays to a mask, as masks.custom_mask",
    "jax_attn.masks.block_sparse_pages": "host arrays to arguments of plan",
    "jax_attn.masks.HIDDEN": "a number",
    "jax_attn.masks.MIXED": "a number",
    "jax_attn.masks.VISIBLE": "a number",
    "jax_attn.parallel.check_all_reduces": "on the host, after a step",
    "jax_attn.parallel.KvShards": "static",
    "jax_attn.parallel.KvShardPlan": "what plan_kv_shards makes",
    "jax_attn.parallel.SequencePlan": "what plan_sequence makes",
    "jax_attn.parallel.SequenceShards": "static",
}
ORACLES = "jax_attn.reference"  # numpy in float64; the only module of jax_attn that is not tried


@dataclasses.dataclass(frozen=True)
class Entry:
    """One call. arrays: host arrays, or trees of them; all are traced under jit."""

    call: Callable[..., Any]
    arrays: tuple[Any, ...]
    of: tuple[int, ...] = ()  # numbers of the arrays that have gradients
    vmap: str | None = None  # how it refuses to be mapped over arrays[0]; None: it works


def public_names() -> set[str]:
    """Names of all modules in MODULES, but for those of modules."""
    return {
        f"{module.__name__}.{name}"
        for module in MODULES
        for name in module.__all__
        if not isinstance(getattr(module, name), types.ModuleType)
    }


RNG = np.random.default_rng(0)


def normal(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return RNG.normal(size=shape).astype(dtype)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


# ---- plans ---------------------------------------------------------------------------------------

ROWS, HEADS, KV_HEADS, DIM = 6, 4, 2, 16
REFUSES_VMAP = "vmap: not supported"
# Three requests: a prompt of 3, nothing, a decode over 5 keys. Rows 4 and 5 are padding.
QO_INDPTR, KV_LENS = ints(0, 3, 3, 4), ints(3, 0, 5)
PAGED = QO_INDPTR, KV_LENS, ints(0, 1, 1, 3), ints(2, 0, 1)


def spec(**fields: Any) -> ja.AttentionSpec:
    fields = {
        "num_qo_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim_qk": DIM, "dtype": "float32",
        "max_batch": 3, "max_qo_tokens": ROWS, "target": "cpu",
    } | fields  # fmt: skip
    capacity = {"page_size": 4, "max_kv_pages": 4} if "page_size" not in fields else {}
    return ja.AttentionSpec(**fields, **capacity)


def ragged(**fields: Any) -> ja.AttentionSpec:
    return spec(page_size=None, max_kv_tokens=9, **fields)


def plan_of(of: ja.AttentionSpec) -> ja.AttentionPlan:
    return ja.plan(of, *(PAGED if of.is_paged else PAGED[:2]))


def attend(q: Any, k: Any, v: Any, plan: Any, **options: Any) -> Any:
    return ja.attention(q, k, v, plan, return_lse=True, **options)


def attention_cases() -> dict[str, Entry]:
    rows, keys, pages = normal(ROWS, HEADS, DIM), normal(9, KV_HEADS, DIM), (2, 3, 4, KV_HEADS, DIM)
    new = normal(ROWS, KV_HEADS, DIM)
    plain, paged = plan_of(ragged()), plan_of(spec())

    def sloped(score: Any, at: Any, slope: Any) -> Any:
        return score + slope[at.head] * (at.kv_pos - at.q_pos)

    slope = normal(HEADS)
    variant = ja.Variant(logits=sloped, operands={"slope": slope})

    def scaled(x: Any, at: Any, weight: Any) -> Any:
        return x * weight * (1 + at.head)

    def turned(x: Any, at: Any, angle: Any) -> Any:
        a, b, rest = x[:4], x[4:8], x[8:]
        cos, sin = jnp.cos(angle[at.kv_pos]), jnp.sin(angle[at.kv_pos])
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest])

    def shifted(x: Any, at: Any) -> Any:
        return x + at.kv_pos * 0.1

    def gated(x: Any, at: Any) -> Any:
        return x * jax.nn.sigmoid(at.q_pos * 0.1)

    transforms = {"weight": normal(DIM), "angle": normal(9, 4)}
    transformed = ja.Variant(
        q=scaled, k=turned, v=shifted, o=gated, head_dim=DIM, operands=transforms
    )
    latent = {"num_kv_heads": 1, "head_dim_qk": 32, "head_dim_vo": 16, "mla": True, "sm_scale": 1.0}
    codes = normal(*pages[1:]).astype(jnp.float8_e4m3fn)
    scale = np.ones(KV_HEADS, np.float32)
    return {
        "ragged": Entry(attend, (rows, keys, keys + 1, plain), (0, 1, 2), REFUSES_VMAP),
        "sinks": Entry(
            lambda q, k, v, sinks, plan: attend(q, k, v, plan, sinks=sinks),
            (rows, keys, keys + 1, normal(HEADS), plain), (0, 1, 2, 3), REFUSES_VMAP,
        ),
        "layers": Entry(
            lambda q, k, v, layer, plan: attend(q, k, v, plan, layer=layer),
            (rows, normal(*pages), normal(*pages), np.int32(1), paged), (0, 1, 2), REFUSES_VMAP,
        ),
        "variant": Entry(
            lambda q, k, v, slope, plan: attend(q, k, v, plan, variant_operands={"slope": slope}),
            (rows, keys, keys + 1, slope, plan_of(ragged(variant=variant))),
            (0, 1, 2, 3), REFUSES_VMAP,
        ),
        "transforms": Entry(
            lambda q, k, v, weight, angle, plan: attend(
                q, k, v, plan, variant_operands={"weight": weight, "angle": angle}),
            (rows, keys, keys + 1, *transforms.values(), plan_of(ragged(variant=transformed))),
            (0, 1, 2, 3, 4), REFUSES_VMAP,
        ),
        "e4m3": Entry(
            lambda q, k, scale, plan: attend(q, k, k, plan, k_scale=scale, v_scale=scale),
            (rows, codes, scale, plan_of(spec(kv_dtype="float8_e4m3fn"))), (), REFUSES_VMAP,
        ),
        "mla": Entry(
            lambda q, k, plan: attend(q, k, None, plan),
            (normal(ROWS, HEADS, 32), normal(3, 4, 1, 32), plan_of(spec(**latent))), (),
            REFUSES_VMAP,
        ),
        "fresh": Entry(
            lambda q, k, new, plan: attend(q, k, k, plan, k_new=new, v_new=new),
            (rows, normal(*pages[1:]), new, plan_of(spec(fresh_kv=True))), (), REFUSES_VMAP,
        ),
    }  # fmt: skip


def append_cases() -> dict[str, dict[str, Entry]]:
    pages, new = normal(2, 3, 4, KV_HEADS, DIM), normal(ROWS, KV_HEADS, DIM)
    qkv, angle = normal(ROWS, (HEADS + 2 * KV_HEADS) * DIM), normal(ROWS, DIM // 2)
    plan = plan_of(spec())
    return {
        "jax_attn.append_kv": {
            "": Entry(
                lambda new, k, v, plan: ja.append_kv(k, v, new, new, plan, layer=1),
                (new, pages, pages + 1, plan), (), REFUSES_VMAP,
            ),
            "e4m3": Entry(
                lambda new, k, scale, plan: ja.append_kv(
                    k, k, new, new, plan, k_scale=scale, v_scale=scale),
                (new, pages[0].astype(jnp.float8_e4m3fn), np.ones(KV_HEADS, np.float32),
                 plan_of(spec(kv_dtype="float8_e4m3fn"))), (), REFUSES_VMAP,
            ),
        },
        "jax_attn.append_rotated": {
            "": Entry(
                lambda qkv, cos, sin, k, v, plan: ja.append_rotated(
                    qkv, cos, sin, k, v, plan, layer=0)[1:],  # padding rows of q are undefined
                (qkv, np.cos(angle), np.sin(angle), pages, pages + 1, plan), (), REFUSES_VMAP,
            ),
        },
        "jax_attn.rows": {
            "lengths": Entry(lambda *lengths: ja.rows(*lengths, ROWS), (QO_INDPTR, KV_LENS)),
        },
        "jax_attn.plan": {
            "pages": Entry(
                lambda *lengths: ja.plan(spec(), *lengths).buffer,
                PAGED, (), REFUSES_VMAP,
            ),
            "ragged": Entry(
                lambda *lengths: ja.plan(ragged(), *lengths).buffer,
                (QO_INDPTR, KV_LENS), (), REFUSES_VMAP,
            ),
            "prefixes": Entry(
                lambda qo, lens, indptr, pages, borders, prefix: ja.plan(
                    spec(), qo, lens, indptr, pages, prefix_levels=[(borders, prefix)]).buffer,
                (*PAGED, ints(0, 2, 3), ints(0, 4)), (),
                REFUSES_VMAP,
            ),
        },
        "jax_attn.AttentionPlan": {
            "with_pages": Entry(
                lambda pages, plan: plan.with_pages(pages).buffer,
                (ints(1, 2, 0), plan_of(spec(share_prefixes=False))), (),
            ),
        },
    }  # fmt: skip


# ---- dense batches, states, projections ----------------------------------------------------------


def dense_arrays(batch: int = 2, heads: int = HEADS, kv_heads: int = KV_HEADS) -> tuple[Any, ...]:
    return normal(batch, 5, heads, DIM), *normal(2, batch, 7, kv_heads, DIM)


def dense_cases(attend: Callable[..., Any] = ja.dot_product_attention) -> dict[str, Entry]:
    q, k, v = dense_arrays()
    attend = functools.partial(attend, return_residual=True)
    lengths = {"query_seq_lengths": [5, 3], "key_value_seq_lengths": [0, 6]}
    mask = RNG.random((2, 1, 5, 7)) < 0.8
    bias = normal(HEADS, 1, 7)

    def everything(q: Any, k: Any, v: Any, bias: Any, scale: Any, mask: Any, lens: Any) -> Any:
        return attend(
            q, k, v, bias, mask, key_value_seq_lengths=lens, query_seq_lengths=lens, scale=scale,
            logits_soft_cap=3.0, local_window_size=(2, 3),
        )  # fmt: skip

    def tangents(*arrays: Any) -> Any:
        floats, others = arrays[:5], arrays[5:]
        return jax.jvp(lambda *x: everything(*x, *others), floats, floats)

    def second(*arrays: Any) -> Any:
        floats, others = arrays[:5], arrays[5:]
        slope = jax.grad(lambda *x: loss_of(everything(*x, *others)), (0, 1, 2, 3, 4))
        return jax.jvp(slope, floats, floats)

    given = q, k, v, normal(2, 1, 5, 7), np.float32(0.3), mask, ints(3, 5)
    return {
        "plain": Entry(functools.partial(attend, is_causal=True), (q, k, v), (0, 1, 2)),
        "lengths": Entry(functools.partial(attend, **lengths), (q, k, v), (0, 1, 2)),
        "bias": Entry(attend, (q, k, v, bias), (0, 1, 2, 3)),
        "mask": Entry(
            lambda q, k, v, mask: attend(q, k, v, mask=mask), (q, k, v, mask), (0, 1, 2)
        ),
        "all": Entry(everything, given, (0, 1, 2, 3, 4)),
        "tangents": Entry(tangents, given),
        "second derivatives": Entry(second, given),
        "second derivatives of kernels": Entry(
            lambda *x: jax.jvp(jax.grad(lambda *x: loss_of(attend(*x))), x, x), (q, k, v)
        ),
        "soft_cap": Entry(functools.partial(attend, logits_soft_cap=2.0), (q, k, v), (0, 1, 2)),
        "one": Entry(attend, (q[0], k[0], v[0]), (0, 1, 2)),
        "bf16": Entry(
            lambda q, k, v: attend(q, k, v),
            tuple(x.astype(jnp.bfloat16) for x in (q, k, v)), (0, 1, 2),
        ),
    }  # fmt: skip


def state_cases() -> dict[str, dict[str, Entry]]:
    o, lse = normal(2, 3, 2, 8), normal(2, 3, 2)
    lse[:, 0], lse[0, 1] = -np.inf, -np.inf
    return {
        "jax_attn.merge_states": {"": Entry(ja.merge_states, (o, lse), (0, 1))},
        "jax_attn.merge_state": {
            "": Entry(ja.merge_state, (o[0], lse[0], o[1], lse[1]), (0, 1, 2, 3))
        },
        "jax_attn.state_to_triplet": {
            "": Entry(lambda o, lse: ja.state_to_triplet(o, lse, lse + 1), (o, lse), (0, 1))
        },
        "jax_attn.state_from_triplet": {
            "": Entry(
                ja.state_from_triplet, (o, lse, np.float32(2 * np.isfinite(lse))),
                (0, 1, 2),
            )
        },
    }  # fmt: skip


def latent_cases() -> dict[str, dict[str, Entry]]:
    ckv, k_rope, w_uk, w_uv = normal(3, 8), normal(3, 4), normal(2, 6, 8), normal(2, 8, 5)
    return {
        f"jax_attn.mla.{name}": {"": Entry(call, arrays, tuple(range(len(arrays))))}
        for name, call, arrays in (
            ("split_kv_b", lambda kv_b: mla.split_kv_b(kv_b, 2, 6), (normal(8, 22),)),
            ("latent_rows", mla.latent_rows, (ckv, k_rope)),
            ("absorb_query", mla.absorb_query, (normal(3, 2, 6), normal(3, 2, 4), w_uk)),
            ("expand_output", mla.expand_output, (normal(3, 2, 8), w_uv)),
            ("expand_kv", mla.expand_kv, (ckv, k_rope, w_uk, w_uv)),
        )
    }


# ---- masks ---------------------------------------------------------------------------------------


def mask_cases() -> dict[str, dict[str, Entry]]:
    """Attention with each mask, whose operands are traced; its block map is traced, too."""
    q, k = normal(ROWS, HEADS, DIM), normal(9, KV_HEADS, DIM)
    pages = normal(3, 4, KV_HEADS, DIM)
    visible = RNG.random(3 * 3 + 1 * 5) < 0.7

    def entry(
        mask: Callable[..., masks.Mask], arrays: tuple[Any, ...], is_paged: bool = False
    ) -> Entry:
        variant = mask(*arrays).variant()
        of = (spec if is_paged else ragged)(variant=variant, causal=False)

        def call(q: Any, k: Any, plan: Any, *arrays: Any) -> Any:
            return attend(q, k, k, plan, variant_operands=mask(*arrays).operands)

        keys = pages if is_paged else k
        return Entry(call, (q, keys, plan_of(of), *arrays), (0, 1), REFUSES_VMAP)

    def with_operands(mask: masks.Mask, arrays: tuple[Any, ...]) -> masks.Mask:
        """The mask, made on the host, with traced operands."""
        return masks.Mask(mask.function, dict(zip(mask.operands, arrays, strict=True)))

    def with_map(q: Any, k: Any, ids: Any, qo: Any, lens: Any) -> Any:
        mask = masks.document_ids(ids, ids)
        of = ragged(variant=mask.variant(), causal=False, max_steps=16)
        blocks = mask.block_map(of, qo, lens)
        return attend(
            q, k, k, ja.plan(of, qo, lens, block_map=blocks), variant_operands=mask.operands
        )

    ids = ints(0, 0, 1, 1, 1, 2, 2, 2, 2)
    tree = masks.tree(ints(-1, 0, 0, -1), QO_INDPTR)
    custom = masks.custom_mask(visible, QO_INDPTR, KV_LENS)
    return {
        "jax_attn.masks.document_ids": {
            "": entry(lambda q_ids, kv_ids: masks.document_ids(q_ids, kv_ids), (ids[:ROWS], ids)),
            "block_map": Entry(
                with_map, (q, k, ids, QO_INDPTR, KV_LENS), (0, 1), REFUSES_VMAP,
            ),
        },
        "jax_attn.masks.prefix_lm": {"": entry(masks.prefix_lm, (ints(2, 0, 1),))},
        "jax_attn.masks.tree": {
            "": entry(lambda *x: with_operands(tree, x), tuple(tree.operands.values()))
        },
        "jax_attn.masks.custom_mask": {
            "": entry(lambda *x: with_operands(custom, x), tuple(custom.operands.values()))
        },
        "jax_attn.masks.page_positions": {
            "": entry(lambda q, starts: masks.page_positions(q, starts, 4),
                      (ints(0, 1, 2, 4, 0, 0), ints(0, 4, 0)), True)
        },
    }  # fmt: skip


# ---- other libraries' forms ----------------------------------------------------------------------


def compat_cases() -> dict[str, dict[str, Entry]]:
    q, pages = normal(2, HEADS, DIM), normal(KV_HEADS, 6, 4, DIM)
    lengths, table = ints(5, 0), ints(3, 1, 5, 2).reshape(2, 2)
    rows, new = normal(ROWS, HEADS, DIM), normal(ROWS, KV_HEADS, DIM)
    cache = normal(3, 4, 2 * KV_HEADS, 1, DIM)
    x, keys = normal(2, 5, HEADS, DIM), normal(2, 5, HEADS, DIM)
    new_rows, own_rows = normal(2, 5, KV_HEADS, DIM), normal(2, 12, KV_HEADS, DIM)
    return {
        "jax_attn.compat.paged_attention": {
            "": Entry(
                compat.paged_attention, (q, pages, pages + 1, lengths, table), (0, 1, 2),
                REFUSES_VMAP)
        },
        "jax_attn.compat.paged_attention_gpu": {
            "": Entry(
                lambda q, k, v, table, lengths: compat.paged_attention_gpu(q, k, v, table, lengths),
                (q, pages, pages + 1, table, lengths), (0, 1, 2), REFUSES_VMAP),
            "all": Entry(
                lambda q, k, v, table: compat.paged_attention_gpu(q, k, v, table, None),
                (q, pages, pages + 1, table), (0, 1, 2), REFUSES_VMAP),
        },
        "jax_attn.compat.ragged_paged_attention": {
            "": Entry(
                lambda *x: compat.ragged_paged_attention(*x, sm_scale=0.3, sliding_window=4),
                (rows, new, new + 1, cache, ints(3, 5, 9), ints(0, 0, 2, 1, 0, 0), ints(0, 3, 4, 9),
                 ints(0, 0, 2), normal(HEADS)), (0, 3), REFUSES_VMAP),
            "scales": Entry(
                lambda *x: compat.ragged_paged_attention(
                    *x, q_scale=0.5, k_scale=0.5, v_scale=2.0, out_dtype=jnp.bfloat16),
                (rows, new, new + 1, cache, ints(3, 5, 9), ints(0, 0, 2, 1, 0, 0), ints(0, 3, 4, 9),
                 ints(0, 0, 2)), (), REFUSES_VMAP),
        },
        "jax_attn.compat.cached_attention": {
            "": Entry(
                lambda *x: compat.cached_attention(*x, sliding_window=4, attn_logits_soft_cap=5.0),
                (x, new_rows, new_rows + 1, own_rows, own_rows + 1, ints(0, 3)), (), REFUSES_VMAP),
        },
        "jax_attn.compat.flax_attention": {
            "": Entry(
                lambda *x: compat.flax_attention(*x, is_causal=True), (x, keys, keys + 1),
                (0, 1, 2)),
            "bias": Entry(
                lambda q, k, v, bias, mask: compat.flax_attention(q, k, v, bias, mask),
                (x, keys, keys + 1, normal(2, HEADS, 5, 5),
                 (RNG.random((2, 1, 5, 5)) < 0.8).astype(np.float32)), (0, 1, 2, 3)),
            "bool": Entry(
                lambda q, k, v, mask: compat.flax_attention(q, k, v, None, mask),
                (x, keys, keys + 1, RNG.random((2, 1, 5, 5)) < 0.8), (0, 1, 2)),
        },
    }  # fmt: skip


# ---- recurrent states ----------------------------------------------------------------------------


def recurrent_cases() -> dict[str, dict[str, Entry]]:
    of = ja.LinearAttentionSpec(
        ROWS, 3, 4, num_qk_heads=KV_HEADS, num_v_heads=HEADS, head_dim_k=DIM, head_dim_v=DIM,
        l2_norm=True, dtype="float32",
    )  # fmt: skip
    batch = QO_INDPTR, ints(-1, 2, 1), ints(0, 2, 1)
    plan = ja.plan_linear_attention(of, *batch)
    q, v = normal(ROWS, KV_HEADS, DIM), normal(ROWS, HEADS, DIM)
    g, beta = -np.abs(normal(ROWS, HEADS)), np.abs(normal(ROWS, HEADS))
    pool = normal(4, HEADS, DIM, DIM)
    dense = [normal(2, 5, heads, DIM) for heads in (KV_HEADS, KV_HEADS, HEADS)]
    gates = -np.abs(normal(2, 5, HEADS)), np.abs(normal(2, 5, HEADS))
    return {
        "jax_attn.linear_attention": {
            "": Entry(
                ja.linear_attention, (q, q + 1, v, g, beta, pool, plan), (0, 1, 2, 3, 4, 5),
                None)
        },
        "jax_attn.short_convolution": {
            "": Entry(
                lambda *x: ja.short_convolution(*x, activation="silu"),
                (normal(ROWS, 6), normal(6, 4), normal(6), normal(4, 3, 6), plan), (0, 1, 2, 3),
                None)
        },
        "jax_attn.plan_linear_attention": {
            "": Entry(lambda *x: ja.plan_linear_attention(of, *x).buffer, batch)
        },
        "jax_attn.gated_delta_rule": {
            "": Entry(ja.gated_delta_rule, (*dense, *gates), (0, 1, 2, 3, 4))
        },
    }  # fmt: skip


CASES: dict[str, dict[str, Entry]] = {
    "jax_attn.attention": attention_cases(),
    "jax_attn.dot_product_attention": dense_cases(),
    **append_cases(),
    **state_cases(),
    **latent_cases(),
    **mask_cases(),
    **compat_cases(),
    **recurrent_cases(),
}


# ---- running them --------------------------------------------------------------------------------

# JAX's modes that change how any program is traced. (transfer_guard, debug_nans and disable_jit
# change how it runs: test_modes.py.)
CONTEXTS: dict[str, Callable[[], Any]] = {
    "rank promotion": lambda: jax.numpy_rank_promotion("raise"),
    "dtype promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "x64": lambda: jax.enable_x64(True),
}


def loss_of(results: Any) -> jax.Array:
    """A number that depends on all floats of the results; -inf counts as 0."""
    terms = [
        jnp.sum(jnp.sin(jnp.where(jnp.isneginf(x), jnp.zeros_like(x), x).astype(jnp.float32)))
        for x in jax.tree.leaves(results)
        if jnp.issubdtype(x.dtype, jnp.floating)
    ]
    return functools.reduce(jnp.add, terms)


def with_slopes(entry: Entry) -> Callable[..., Any]:
    """The call, and its gradients."""
    if not entry.of:
        return entry.call

    def run(*arrays: Any) -> Any:
        def loss(*varying: Any) -> Any:
            whole = list(arrays)
            for i, x in zip(entry.of, varying, strict=True):
                whole[i] = x
            results = entry.call(*whole)
            return loss_of(results), results

        slopes = jax.grad(loss, tuple(range(len(entry.of))), has_aux=True)
        gradients, results = slopes(*(arrays[i] for i in entry.of))
        return results, gradients

    return run


def compare(got: Any, want: Any, order: Callable[[Any], Any] = lambda x: x) -> None:
    """Equal up to rounding, and of the same shapes and dtypes.

    order: applied to each result of `got`.
    """
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(got) == len(want)
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), f"result {i}: {a.aval}, want {b.aval}"
        a, b = (x.astype(np.float64) for x in (order(np.asarray(a)), np.asarray(b)))
        tolerance = 3e-2 if want[i].dtype == jnp.bfloat16 else 2e-5
        np.testing.assert_allclose(a, b, tolerance, tolerance, err_msg=f"result {i}")
