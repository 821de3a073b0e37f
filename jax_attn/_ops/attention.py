"""The public attention call and item_times."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Literal, overload

import jax
import numpy as np

from jax_attn._ops import gradients
from jax_attn._ops.operands import (
    check_array,
    check_cache,
    check_data,
    check_scales,
    check_values,
    check_variant_operands,
    count_parts,
    layer_operand,
    of_parts,
    pad_heads,
    spec_of,
)
from jax_attn._ops.vectors import transform_operands, transform_output
from jax_attn._plan.plan import AttentionPlan
from jax_attn._spec.spec import AttentionSpec
from jax_attn._xla import ffi
from jax_attn._xla.attention_operands import AttentionOperands, split_by_head
from jax_attn._xla.transforms import HeadSplit, check_split


@overload
def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    plan: AttentionPlan,
    *,
    k_new: jax.Array | None = None,
    v_new: jax.Array | None = None,
    layer: Any = None,
    sinks: jax.Array | None = None,
    q_scale: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    variant_operands: Mapping[str, Any] | None = None,
    return_lse: Literal[False] = False,
) -> jax.Array: ...
@overload
def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    plan: AttentionPlan,
    *,
    k_new: jax.Array | None = None,
    v_new: jax.Array | None = None,
    layer: Any = None,
    sinks: jax.Array | None = None,
    q_scale: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    variant_operands: Mapping[str, Any] | None = None,
    return_lse: Literal[True],
) -> tuple[jax.Array, jax.Array]: ...
def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    plan: AttentionPlan,
    *,
    k_new: jax.Array | None = None,
    v_new: jax.Array | None = None,
    layer: Any = None,
    sinks: jax.Array | None = None,
    q_scale: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    variant_operands: Mapping[str, Any] | None = None,
    return_lse: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention of a whole batch: prefill, decode, chunked prefill or any mix, in one call.

    q: [max_qo_tokens, num_qo_heads, head_dim_qk]. Packed query tokens; rows beyond the plan's
        tokens are not read.
    k: [num_pages, page_size, num_kv_heads, head_dim_qk], or stacked with a leading [num_layers]
        and `layer`; for a ragged spec [max_kv_tokens, num_kv_heads, head_dim_qk].
    v: the same with head_dim_vo; None with mla, where k holds the values, too. Slots beyond a
        request's kv_len and pages that no request owns never influence a result, even if they hold
        NaN.
    k_new: [max_qo_tokens, num_kv_heads, head_dim_qk] if the spec has fresh_kv=True, else None. The
        keys of the query tokens: token i of a request is at its position kv_len - qo_len + i. k is
        read only at earlier positions, so append_kv may run before, after or never.
    v_new: the same with head_dim_vo.
    layer: int or i32 scalar, may be traced; None for an unstacked cache.
    sinks: [num_qo_heads], f32, or None. One extra logit per head that takes part in the softmax
        and has no value; counted once.
    q_scale: [num_qo_heads], k_scale, v_scale: [num_kv_heads], f32, finite, or None: 1. For float8
        and nvfp4 operands: an element stands for its value times the scale of its head. So logits
        = sm_scale * q_scale * k_scale * (q . k), before soft cap, masks and sinks, and o is
        multiplied by v_scale. With mla, v_scale is None, and o is multiplied by k_scale. They may
        be traced. A q_scale or k_scale that is not positive makes the results of its heads NaN.
    variant_operands: name -> array. The operands of the spec's variant, with its dtypes and numbers
        of axes, and any lengths except 0; may be traced. None if the variant has no operands.
    return_lse: also return lse. Not allowed with a variant of normalize="none".

    Returns o: [max_qo_tokens, num_qo_heads, head_dim_vo] in the spec's dtype, and with return_lse
    lse: [max_qo_tokens, num_qo_heads], f32: the natural log of the sum over visible keys (and the
    sink) of exp(final logits). A row that sees no key and a padding row have o = 0, lse = -inf.

    On a mesh, arrays may be split by head, with a plan for one device's heads; nothing is gathered
    (docs/devices.md).

    The variant's transforms of q and o, and of ragged k and v, run in jnp around the kernel.

    Differentiable in q, k, v and sinks, lse included, and in float variant_operands
    (docs/training.md), to any order, forward (jax.jvp) and backward. Rows of k and v that no query
    reads have gradient 0. Pages that requests share get the sum over these requests. The kernels
    compute the gradient; forward mode, second derivatives and a gradient under vmap are in jnp,
    which compares every query token with every key of the batch.

    The same inputs and plan give the same bits, gradients included. vmap is not supported: batch
    requests in the plan. Raises ValueError for arrays that do not fit the plan's spec. Raises
    NotImplementedError for arrays with another sharding, for vmap, and for derivatives with mla,
    fresh_kv, kv_dtype or max_steps.

    The example has one request of 3 query tokens and 3 keys without pages. Row 3 of o is padding.

    >>> import jax.numpy as jnp
    >>> import numpy as np
    >>> import jax_attn as ja
    >>> spec = ja.AttentionSpec(
    ...     4, 2, 64, dtype="float32", page_size=None, max_qo_tokens=4, max_kv_tokens=4
    ... )
    >>> plan = ja.plan(spec, np.array([0, 3]), np.array([3]))
    >>> q, k, v = jnp.ones((4, 4, 64)), jnp.ones((4, 2, 64)), jnp.ones((4, 2, 64))
    >>> o, lse = ja.attention(q, k, v, plan, return_lse=True)
    >>> o[:, 0, 0].round(3).tolist()
    [1.0, 1.0, 1.0, 0.0]
    >>> jnp.exp(lse[:, 0] - 8).round().tolist()  # row i sees i + 1 logits of 64 / sqrt(64)
    [1.0, 2.0, 3.0, 0.0]
    """
    given = AttentionOperands[Any](
        q=q,
        k=k,
        v=v,
        layer=layer,
        k_new=k_new,
        v_new=v_new,
        sinks=sinks,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    value_dim = spec_of("attention", plan).value_dim
    plan, given = _padded("attention", plan, given)
    operands, split = _checked("attention", plan, given, variant_operands)
    if return_lse and (variant := plan.spec.variant) is not None and not variant.normalizes:
        raise ValueError(
            "attention: return_lse: expected False with a variant of normalize='none', got True."
        )
    o, lse = _run(operands, split)
    if o.shape[-1] != value_dim:
        o = o[..., :value_dim]
    return (o, lse) if return_lse else o


def item_times(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    plan: AttentionPlan,
    *,
    k_new: jax.Array | None = None,
    v_new: jax.Array | None = None,
    layer: Any = None,
    sinks: jax.Array | None = None,
    q_scale: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    variant_operands: Mapping[str, Any] | None = None,
) -> np.ndarray:
    """Run `attention` and measure when each work item runs, for AttentionPlan.plot.

    Cannot be called inside jit.

    q, k, v, plan, k_new, v_new, layer, sinks, q_scale, k_scale, v_scale, variant_operands: as for
        attention.

    Returns [num_items, 2], f64 seconds from an arbitrary zero: when each item of plan.items()
    began and ended, its share of merges included, in the second of two runs. On CPU, threads take
    items from each other's queues, and items that run together (same kv span or same head) share
    their time in proportion to their rows and keys. On CUDA a separate kernel is compiled, and the
    clock is %globaltimer; loads for an item may begin while the item before it runs.
    """
    given = AttentionOperands[Any](
        q=q,
        k=k,
        v=v,
        layer=layer,
        k_new=k_new,
        v_new=v_new,
        sinks=sinks,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    plan, given = _padded("item_times", plan, given)
    operands, split = _checked("item_times", plan, given, variant_operands)
    if split.num_parts > 1:
        raise NotImplementedError(
            "item_times: q: arrays on one device are supported, got heads of"
            f" {split.num_parts}; time the part of one device."
        )
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(operands)):
        raise ValueError("item_times: expected arrays that are there, got traced ones: inside jit.")
    spec = split.spec
    if spec.kernel_spec is not spec:
        operands = transform_operands(operands, spec)
    timed = jax.jit(functools.partial(ffi.attention, spec=spec.kernel_spec, record_times=True))
    for _ in range(2):
        workspace = np.asarray(timed(operands)[2])
    times = workspace[plan.spec.workspace_words :].view(np.int64).reshape(-1, 2)
    return times[: plan.header()["num_items"]] * 1e-9


def _run(operands: AttentionOperands[jax.Array], split: HeadSplit) -> tuple[jax.Array, jax.Array]:
    """o and lse of a checked call."""
    spec = split.spec
    if spec.kernel_spec is spec:
        return gradients.attention(operands, split)
    inner = transform_operands(operands, spec)
    kernel_split = split_by_head(inner, spec.kernel_spec, split.num_parts)
    o, lse = gradients.attention(inner, kernel_split)
    return transform_output(o, operands, spec), lse


def _padded(
    op: str, plan: AttentionPlan, given: AttentionOperands[Any]
) -> tuple[AttentionPlan, AttentionOperands[Any]]:
    """The call with head dims that kernels have. Pages have them already."""
    spec = spec_of(op, plan)
    if spec.padded is spec:
        return plan, given
    qk, vo = zip((spec.head_dim_qk, spec.value_dim), spec.padded_dims, strict=True)
    dims = {"q": qk, "k_new": qk, "v_new": vo}
    if not spec.is_paged:
        dims |= {"k": qk, "v": vo}
    arrays = {name: pad_heads(op, name, getattr(given, name), *dim) for name, dim in dims.items()}
    plan = dataclasses.replace(plan, spec=spec.padded)
    return plan, dataclasses.replace(given, **arrays)


def _checked(
    op: str,
    plan: AttentionPlan,
    given: AttentionOperands[Any],
    variant_operands: Mapping[str, Any] | None,
) -> tuple[AttentionOperands[jax.Array], HeadSplit]:
    """The checked operands of a call in kernel form, and how their heads are split.

    given: the caller's operands, without those of the plan and without variant_operands.
    """
    one = spec_of(op, plan)
    num_parts = count_parts(given.q, one.num_qo_heads)
    spec = of_parts(one, num_parts)
    q = check_array(op, "q", given.q, spec.q_shape, spec.dtype_of_q)
    if spec.is_paged:
        k, v, num_layers = check_cache(op, spec, given.k, given.v, given.layer)
    else:
        if given.layer is not None:
            raise ValueError(f"{op}: layer: expected None with a ragged spec, got {given.layer}.")
        num_layers = 1
        assert spec.max_kv_tokens is not None
        k_shape, v_shape = spec.kv_shapes(spec.max_kv_tokens)
        k = check_array(op, "k", given.k, k_shape, spec.dtype_of_kv)
        v = check_values(op, "v", given.v, v_shape, spec.dtype_of_kv)
    k_new, v_new = _checked_new(op, spec, given.k_new, given.v_new)
    sinks = given.sinks
    if sinks is not None:
        if spec.variant is not None and not spec.variant.normalizes:
            raise ValueError(
                f"{op}: sinks: expected None with a variant of normalize='none', got an array."
            )
        sinks = check_array(op, "sinks", sinks, (spec.num_qo_heads,), "float32")
    scales = {name: getattr(given, name) for name in ("q_scale", "k_scale", "v_scale")}
    q_scale, k_scale, v_scale = check_scales(op, spec, scales)
    variant = check_variant_operands(op, spec, variant_operands)
    layer = layer_operand(op, given.layer, num_layers)
    plan_buffer, layer = check_data(op, plan, layer, k, num_layers)
    if spec.variant is not None and num_parts > 1 and spec.variant.reads_heads:
        raise NotImplementedError(  # each device numbers its heads from 0
            f"{op}: variant: one that reads head or kv_head is supported where a device has all"
            f" heads of the arrays, got heads split {num_parts} ways; use jax.shard_map, with"
            " the part of its operands that each device's heads read."
        )
    operands = AttentionOperands(
        q=q,
        k=k,
        v=v,
        plan_buffer=plan_buffer,
        layer=layer,
        k_new=k_new,
        v_new=v_new,
        sinks=sinks,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        variant=tuple(variant),
    )
    split = split_by_head(operands, one, num_parts)
    check_split(op, split, operands)
    return operands, split


def _checked_new(
    op: str, spec: AttentionSpec, k_new: Any, v_new: Any
) -> tuple[jax.Array | None, jax.Array | None]:
    """The checked keys and values of the query tokens, for a spec with fresh_kv."""
    for name, new in (("k_new", k_new), ("v_new", v_new)):
        if (new is not None) != spec.fresh_kv:
            expected = "the keys or values of the query tokens" if spec.fresh_kv else "None"
            raise ValueError(
                f"{op}: {name}: expected {expected} with a spec of fresh_kv={spec.fresh_kv}, got"
                f" {'None' if new is None else 'an array'}."
            )
    if not spec.fresh_kv:
        return None, None
    k_shape, v_shape = spec.new_kv_shapes
    k_new = check_array(op, "k_new", k_new, k_shape, spec.dtype)
    return k_new, check_values(op, "v_new", v_new, v_shape, spec.dtype)
