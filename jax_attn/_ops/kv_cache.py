"""Appending new keys and values to the paged KV cache in place, with or without rotation."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, overload

import jax

from jax_attn._ops.operands import (
    check_array,
    check_cache,
    check_data,
    check_scales,
    check_values,
    count_parts,
    layer_operand,
    of_parts,
    pad_heads,
    spec_of,
    split_of,
)
from jax_attn._plan.plan import AttentionPlan
from jax_attn._spec.spec import AttentionSpec
from jax_attn._xla import ffi
from jax_attn._xla.transforms import check_split, over_heads, refusing

_INSTEAD = {
    "vmap": "put the batch into the plan, one request per element",
    "gradients": "in a loss, pass k and v to attention or dot_product_attention (docs/training.md)",
}


def _written(operands: tuple[Any, ...], spec: AttentionSpec) -> tuple[jax.Array, ...]:
    return tuple(pages for pages in ffi.append_kv(*operands, spec=spec) if pages is not None)


def _rotated(operands: tuple[Any, ...], spec: AttentionSpec) -> tuple[jax.Array, ...]:
    return ffi.append_rotated(*operands, spec=spec)


_append_kv = refusing("append_kv", over_heads("append_kv", _written), **_INSTEAD)
_append_rotated = refusing("append_rotated", over_heads("append_rotated", _rotated), **_INSTEAD)


@overload
def append_kv(
    k_pages: jax.Array,
    v_pages: jax.Array,
    k_new: jax.Array,
    v_new: jax.Array,
    plan: AttentionPlan,
    *,
    layer: Any = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]: ...
@overload
def append_kv(
    k_pages: jax.Array,
    v_pages: None,
    k_new: jax.Array,
    v_new: None,
    plan: AttentionPlan,
    *,
    layer: Any = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
) -> tuple[jax.Array, None]: ...
def append_kv(
    k_pages: jax.Array,
    v_pages: jax.Array | None,
    k_new: jax.Array,
    v_new: jax.Array | None,
    plan: AttentionPlan,
    *,
    layer: Any = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Write the batch's new keys and values into their pages, in place.

    Query token i of a request goes to position kv_len - qo_len + i: kv_lens of the plan include the
    new tokens. XLA makes no copy under jit if k_pages and v_pages are donated (or are loop
    carries). Attention must then take the arrays returned here, never the old ones.

    Each query token needs a slot of its own. If two have one slot, the last of them stays there in
    a small batch on a CPU, and any of them on a GPU or in a large batch. A token that has no slot,
    because its request has fewer keys than query tokens, is not written. With JAX_ATTN_CHECK=1 both
    raise ValueError.

    k_pages: [num_pages, page_size, num_kv_heads, head_dim_qk], or stacked with a leading
        [num_layers] and `layer`. Models pass the stacked cache: slicing it makes XLA copy.
    v_pages: the same with head_dim_vo; None with mla, as is v_new.
    k_new: [max_qo_tokens, num_kv_heads, head_dim_qk]. Rows beyond the plan's tokens are not read.
    v_new: [max_qo_tokens, num_kv_heads, head_dim_vo].
    layer: int or i32 scalar, may be traced; None for an unstacked cache.
    k_scale, v_scale: [num_kv_heads], f32, finite and positive, or None: 1. For float8 pages (k_new
        and v_new have the spec's dtype), new / scale is rounded to nearest, ties to even.
        Magnitudes above the largest value (448 for e4m3, 57344 for e5m2), infinity included, become
        that value; NaN stays NaN.

    int8 has one scale per row; mxfp4, nvfp4 and int4 have one scale per block of a row. append_kv
    computes these scales. An nvfp4 element is also multiplied by the scale of its head. NaN or
    infinity makes all elements that share the scale NaN. Magnitudes above 2688 times the head's
    scale (nvfp4) or above 524032 (int4) saturate to about that: docs/formats.md.

    Returns k_pages and v_pages. Raises ValueError for arrays that do not fit the plan's spec.

    In the example, two decodes over 5 and 20 keys, the new ones included, write token 4 of page 7
    and token 3 of page 4.

    >>> import jax, jax.numpy as jnp, numpy as np
    >>> import jax_attn as ja
    >>> spec = ja.AttentionSpec(4, 2, 64, page_size=16, max_qo_tokens=2, max_kv_pages=4)
    >>> lens, page_indptr = np.array([5, 20]), np.array([0, 1, 3])
    >>> plan = ja.plan(spec, np.arange(3), lens, page_indptr, np.array([7, 2, 4]))
    >>> k_pages, v_pages = jnp.zeros((2, 8, 16, 2, 64), spec.dtype)
    >>> k_new, v_new = jnp.ones((2, 2, 2, 64), spec.dtype)
    >>> append_kv = jax.jit(ja.append_kv, donate_argnums=(0, 1))
    >>> k_pages, v_pages = append_kv(k_pages, v_pages, k_new, v_new, plan)
    >>> np.argwhere(k_pages[:, :, 0, 0]).tolist()
    [[4, 3], [7, 4]]
    """
    spec = spec_of("append_kv", plan)
    if not spec.is_paged:
        raise ValueError("append_kv: plan: expected one of a paged spec, got page_size=None.")
    if spec.padded is not spec:
        k_new = pad_heads("append_kv", "k_new", k_new, spec.head_dim_qk, spec.padded_dims[0])
        v_new = pad_heads("append_kv", "v_new", v_new, spec.value_dim, spec.padded_dims[1])
        spec = spec.padded
        plan = dataclasses.replace(plan, spec=spec)
    one, num_parts = spec, 1 if spec.mla else count_parts(k_new, spec.num_kv_heads)
    spec = of_parts(one, num_parts)
    k_shape, v_shape = spec.new_kv_shapes
    scales = check_scales("append_kv", spec, {"k_scale": k_scale, "v_scale": v_scale})
    k_new = check_array("append_kv", "k_new", k_new, k_shape, spec.dtype)
    v_new = check_values("append_kv", "v_new", v_new, v_shape, spec.dtype)
    k_pages, v_pages, num_layers = check_cache("append_kv", spec, k_pages, v_pages, layer)
    layer_index = layer_operand("append_kv", layer, num_layers)
    buffer, layer_index = check_data(
        "append_kv", plan, layer_index, k_pages, num_layers, writes=True
    )
    heads = one.num_kv_heads
    by_name: dict[str, tuple[Any, int | None, int]] = {
        "k_pages": (k_pages, -2, heads),
        "v_pages": (v_pages, -2, heads),
        "k_new": (k_new, 1, heads),
        "v_new": (v_new, 1, heads),
        "plan": (buffer, None, 0),
        "layer": (layer_index, None, 0),
        "k_scale": (scales[0], 0, heads),
        "v_scale": (scales[1], 0, heads),
    }
    head_axis = k_pages.ndim - 2
    results = {"k_pages": (k_pages.ndim, head_axis, heads)}
    if v_pages is not None:
        results["v_pages"] = results["k_pages"]
    split = split_of(one, num_parts, by_name, results)
    operands = tuple(array for array, *_ in by_name.values())
    check_split("append_kv", split, operands)
    k_out, *v_out = _append_kv(operands, split)
    return k_out, v_out[0] if v_out else None


def append_rotated(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    plan: AttentionPlan,
    *,
    layer: Any = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Apply rotary embeddings to queries and keys, and append_kv, in one kernel.

    Element i of a head is paired with i + head_dim_qk / 2, and the pair (a, b) becomes
    (a cos - b sin, b cos + a sin), computed in f32 and rounded to the spec's dtype. A decode step
    then needs one launch instead of four between projection and attention.

    qkv: [max_qo_tokens, (num_qo_heads + num_kv_heads) * head_dim_qk + num_kv_heads * head_dim_vo].
        For each token the heads of q, then of k, then of v. Rows beyond the plan's tokens are not
        read.
    cos, sin: [max_qo_tokens, head_dim_qk / 2], f32. Of the angles of each token's position.
    k_pages, v_pages, layer, k_scale, v_scale: as in append_kv. Quantized pages are made from the
        rounded elements.

    Returns q: [max_qo_tokens, num_qo_heads, head_dim_qk] (rows beyond the plan's tokens are
    undefined), k_pages and v_pages. Raises ValueError for arrays that do not fit the plan's spec.
    """
    op, spec = "append_rotated", spec_of("append_rotated", plan)
    if not spec.is_paged:
        raise ValueError(f"{op}: plan: expected one of a paged spec, got page_size=None.")
    if spec.mla:
        raise NotImplementedError(f"{op}: plan: mla=True rotates a part of its rows: append_kv.")
    if spec.padded is not spec:
        raise NotImplementedError(
            f"{op}: plan: head dims that rows of pages have without padding are supported, got"
            f" {spec.head_dim_qk} and {spec.value_dim} for rows of {spec.padded_dims[0]} and"
            f" {spec.padded_dims[1]}; rotate q and k_new, then append_kv."
        )
    tokens, half = spec.max_qo_tokens, spec.head_dim_qk // 2
    shapes = (spec.q_shape, *spec.new_kv_shapes)
    one_row_dim = sum(math.prod(shape[1:]) for shape in shapes if shape is not None)
    one, num_parts = spec, count_parts(qkv, one_row_dim)
    spec, row_dim = of_parts(one, num_parts), num_parts * one_row_dim
    scales = check_scales(op, spec, {"k_scale": k_scale, "v_scale": v_scale})
    qkv = check_array(op, "qkv", qkv, (tokens, row_dim), spec.dtype)
    cos = check_array(op, "cos", cos, (tokens, half), "float32")
    sin = check_array(op, "sin", sin, (tokens, half), "float32")
    k, v, num_layers = check_cache(op, spec, k_pages, v_pages, layer)
    layer_index = layer_operand(op, layer, num_layers)
    buffer, layer_index = check_data(op, plan, layer_index, k, num_layers, writes=True)
    heads = one.num_kv_heads
    by_name: dict[str, tuple[Any, int | None, int]] = {
        "qkv": (qkv, 1, one_row_dim),
        "cos": (cos, None, 0),
        "sin": (sin, None, 0),
        "k_pages": (k, -2, heads),
        "v_pages": (v, -2, heads),
        "plan": (buffer, None, 0),
        "layer": (layer_index, None, 0),
        "k_scale": (scales[0], 0, heads),
        "v_scale": (scales[1], 0, heads),
    }
    pages = (k.ndim, k.ndim - 2, heads)
    results = {"q": (3, 1, one.num_qo_heads), "k_pages": pages, "v_pages": pages}
    split = split_of(one, num_parts, by_name, results)
    operands = tuple(array for array, *_ in by_name.values())
    check_split(op, split, operands)
    return _append_rotated(operands, split)
