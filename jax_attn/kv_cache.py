"""The paged kv cache: appending new keys and values in place, rotated on the way or not."""

from __future__ import annotations

import math
from typing import Any, overload

import jax
import jax.numpy as jnp

from jax_attn import ffi
from jax_attn.operands import (
    as_stacked,
    check_array,
    check_data,
    check_scales,
    check_values,
    layer_operand,
    spec_of,
)
from jax_attn.plan import AttentionPlan
from jax_attn.transforms import refusing

_INSTEAD = {
    "vmap": "put the batch into the plan, one request per element",
    "gradients": "the paged cache is for inference; train on jax_attn.dot_product_attention",
}
_append_kv = refusing("append_kv", ffi.append_kv, **_INSTEAD)
_append_rotated = refusing("append_rotated", ffi.append_rotated, **_INSTEAD)


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
    """Writes the batch's new keys and values into their pages, in place.

    Query token i of a request goes to position kv_len - qo_len + i: kv_lens of the plan include the
    new tokens. In place means: under jit with k_pages and v_pages donated (or as loop carries), XLA
    makes no copy; attention must then take the arrays returned here, never the old ones.

    k_pages: [num_pages, page_size, num_kv_heads, head_dim_qk], or stacked with a leading
        [num_layers] and `layer`. Models pass the stacked cache: slicing it makes XLA copy.
    v_pages: the same with head_dim_vo; None with mla, as is v_new.
    k_new: [max_qo_tokens, num_kv_heads, head_dim_qk]. Rows beyond the plan's tokens are not read.
    v_new: [max_qo_tokens, num_kv_heads, head_dim_vo].
    layer: int or i32 scalar, which may be traced; None for an unstacked cache.
    k_scale, v_scale: [num_kv_heads], f32, finite and positive, or None, which is 1. Of pages of
        float8_e4m3fn (k_new and v_new are of the spec's dtype): what is written is new / scale, the
        nearest value, ties to even. What is beyond 448, infinity too, becomes 448; NaN stays NaN.

    Returns k_pages and v_pages. Raises ValueError for arrays that do not fit the plan's spec.
    """
    spec = spec_of("append_kv", plan)
    if not spec.is_paged:
        raise ValueError("append_kv: plan: expected one of a paged spec, got page_size=None.")
    k_shape, v_shape = spec.kv_shapes(spec.max_qo_tokens)
    scales = check_scales("append_kv", spec, {"k_scale": k_scale, "v_scale": v_scale})
    k_new = check_array("append_kv", "k_new", k_new, k_shape, spec.dtype)
    v_new = check_values("append_kv", "v_new", v_new, v_shape, spec.dtype)
    k_stacked, v_stacked = as_stacked("append_kv", spec, k_pages, v_pages, layer)
    layer_index = layer_operand("append_kv", layer, k_stacked.shape[0])
    buffer, layer_index = check_data("append_kv", plan, layer_index, k_stacked.shape)
    k_stacked, v_stacked = _append_kv(
        k_stacked, v_stacked, k_new, v_new, buffer, layer_index, *scales, spec
    )
    if v_pages is None:
        return k_stacked.reshape(k_pages.shape), None
    return k_stacked.reshape(k_pages.shape), v_stacked.reshape(v_pages.shape)


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
    """Rotary embeddings of queries and keys, and append_kv, in one kernel.

    Element i of a head is paired with i + head_dim_qk / 2, and the pair (a, b) becomes
    (a cos - b sin, b cos + a sin), computed in f32 and rounded to the spec's dtype. What a decode
    does between its projection and attention is then one launch instead of four.

    qkv: [max_qo_tokens, (num_qo_heads + num_kv_heads) * head_dim_qk + num_kv_heads * head_dim_vo]:
        of each token the heads of q, of k, and of v. Rows beyond the plan's tokens are not read.
    cos, sin: [max_qo_tokens, head_dim_qk / 2], f32, of the angles of each token's position.
    k_pages, v_pages, layer, k_scale, v_scale: as in append_kv; e4m3 pages get what is rounded.

    Returns q: [max_qo_tokens, num_qo_heads, head_dim_qk], whose rows beyond the plan's tokens are
    undefined, k_pages and v_pages. Raises ValueError for arrays that do not fit the plan's spec.
    """
    op, spec = "append_rotated", spec_of("append_rotated", plan)
    if not spec.is_paged:
        raise ValueError(f"{op}: plan: expected one of a paged spec, got page_size=None.")
    if spec.mla:
        raise NotImplementedError(f"{op}: plan: mla=True rotates a part of its rows: append_kv.")
    tokens, half = spec.max_qo_tokens, spec.head_dim_qk // 2
    shapes = (spec.q_shape, *spec.kv_shapes(tokens))
    row_dim = sum(math.prod(shape[1:]) for shape in shapes if shape is not None)
    scales = check_scales(op, spec, {"k_scale": k_scale, "v_scale": v_scale})
    qkv = check_array(op, "qkv", qkv, (tokens, row_dim), spec.dtype)
    cos = check_array(op, "cos", cos, (tokens, half), "float32")
    sin = check_array(op, "sin", sin, (tokens, half), "float32")
    k_stacked, v_stacked = as_stacked(op, spec, k_pages, v_pages, layer)
    layer_index = layer_operand(op, layer, k_stacked.shape[0])
    buffer, layer_index = check_data(op, plan, layer_index, k_stacked.shape)
    q, k_stacked, v_stacked = _append_rotated(
        qkv, cos, sin, k_stacked, v_stacked, buffer, layer_index, *scales, spec
    )
    return q, k_stacked.reshape(k_pages.shape), v_stacked.reshape(v_pages.shape)
