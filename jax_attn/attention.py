"""Attention over a plan, and the drop-in for jax.nn.dot_product_attention."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np

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
from jax_attn.plan import plan as make_plan
from jax_attn.spec import AttentionSpec
from jax_attn.transforms import refusing


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
    return_lse: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention of a whole batch: prefill, decode, chunked prefill or any mix, in one call.

    q: [max_qo_tokens, num_qo_heads, head_dim_qk]. Packed query tokens; rows beyond the plan's
        tokens are not read.
    k: [num_pages, page_size, num_kv_heads, head_dim_qk], or stacked with a leading [num_layers]
        and `layer`; for a ragged spec [max_kv_tokens, num_kv_heads, head_dim_qk].
    v: the same with head_dim_vo; None with mla, where k holds the values, too. Slots beyond a
        request's kv_len and pages that no request owns never influence a result, whatever they
        hold.
    k_new: [max_qo_tokens, num_kv_heads, head_dim_qk] with a spec of fresh_kv=True, else None. The
        keys of the query tokens: token i of a request is position kv_len - qo_len + i of it. k is
        read at the positions before them alone, so that append_kv may run before, after or never.
    v_new: the same with head_dim_vo.
    layer: int or i32 scalar, which may be traced; None for an unstacked cache.
    sinks: [num_qo_heads], f32, or None. One extra logit per head that takes part in the softmax
        and has no value; counted once.
    q_scale: [num_qo_heads], k_scale, v_scale: [num_kv_heads], f32, finite, or None, which is 1. Of
        float8_e4m3fn operands: an element stands for its value times the scale of its head. So
        logits = sm_scale * q_scale * k_scale * (q . k), before soft cap, masks and sinks, and o is
        multiplied by v_scale. They may be traced. A scale of q or k that is not positive makes the
        results of its heads NaN.
    return_lse: also return lse.

    Returns o: [max_qo_tokens, num_qo_heads, head_dim_vo] in the spec's dtype, and with return_lse
    lse: [max_qo_tokens, num_qo_heads], f32: the natural log of the sum over visible keys (and the
    sink) of exp(final logits). A row that sees no key and a padding row have o = 0, lse = -inf.

    Same inputs and plan, same bits. Not differentiable; not for vmap: requests batch in the plan.
    Raises ValueError for arrays that do not fit the plan's spec.
    """
    operands = _operands(
        "attention", q, k, v, plan, k_new, v_new, layer, sinks, q_scale, k_scale, v_scale
    )
    o, lse, _ = _attention(*operands)
    return (o, lse) if return_lse else o


_attention = refusing(
    "attention",
    ffi.attention,
    vmap="put the batch into the plan, one request per element",
    gradients="jax_attn.dot_product_attention and merge_states have them",
)


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
) -> np.ndarray:
    """Runs `attention` for its times, which AttentionPlan.plot draws: not inside jit.

    q, k, v, plan, k_new, v_new, layer, sinks, q_scale, k_scale, v_scale: as for attention.

    Returns [num_items, 2], f64 seconds from an arbitrary zero: when each item of plan.items()
    began and ended, its share of merges included. The second of two runs. On CPU threads take items
    from each other's queues, and items of one kv span that run together get equal shares. On CUDA a
    kernel of its own is compiled, and the clock is %globaltimer; loads for an item may have begun
    while the one before it ran.
    """
    operands = _operands(
        "item_times", q, k, v, plan, k_new, v_new, layer, sinks, q_scale, k_scale, v_scale
    )
    if any(isinstance(x, jax.core.Tracer) for x in operands):
        raise ValueError("item_times: expected arrays that are there, got traced ones: inside jit.")
    timed = jax.jit(
        functools.partial(ffi.attention, record_times=True), static_argnums=len(operands) - 1
    )
    for _ in range(2):
        workspace = np.asarray(timed(*operands)[2])
    times = workspace[plan.spec.workspace_words :].view(np.int64).reshape(-1, 2)
    return times[: plan.header()["num_items"]] * 1e-9


def _operands(
    op: str,
    q: Any,
    k: Any,
    v: Any,
    plan: AttentionPlan,
    k_new: Any,
    v_new: Any,
    layer: Any,
    sinks: Any,
    q_scale: Any,
    k_scale: Any,
    v_scale: Any,
) -> tuple[Any, ...]:
    """The arguments of ffi.attention, checked."""
    spec = spec_of(op, plan)
    q = check_array(op, "q", q, spec.q_shape, spec.dtype_of_q)
    if spec.is_paged:
        k, v = as_stacked(op, spec, k, v, layer)
    else:
        if layer is not None:
            raise ValueError(f"{op}: layer: expected None with a ragged spec, got {layer}.")
        assert spec.max_kv_tokens is not None
        k_shape, v_shape = spec.kv_shapes(spec.max_kv_tokens)
        k = check_array(op, "k", k, k_shape, spec.dtype_of_kv)
        v = check_values(op, "v", v, v_shape, spec.dtype_of_kv)
    for name, new in (("k_new", k_new), ("v_new", v_new)):
        if (new is not None) != spec.fresh_kv:
            expected = "the keys or values of the query tokens" if spec.fresh_kv else "None"
            raise ValueError(
                f"{op}: {name}: expected {expected} with a spec of fresh_kv={spec.fresh_kv}, got"
                f" {'None' if new is None else 'an array'}."
            )
    if spec.fresh_kv:
        k_shape, v_shape = spec.kv_shapes(spec.max_qo_tokens)
        k_new = check_array(op, "k_new", k_new, k_shape, spec.dtype)
        v_new = check_values(op, "v_new", v_new, v_shape, spec.dtype)
    if sinks is not None:
        sinks = check_array(op, "sinks", sinks, (spec.num_qo_heads,), "float32")
    scales = check_scales(op, spec, {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale})
    layer_index = layer_operand(op, layer, k.shape[0])
    check_data(op, plan, layer_index, k.shape)
    buffer = jnp.asarray(plan.buffer)
    return q, k, v, buffer, layer_index, k_new, v_new, sinks, *scales, spec


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Drop-in for jax.nn.dot_product_attention: dense batches, same arguments, same meaning.

    query: [batch, T, num_qo_heads, head_dim] or [T, num_qo_heads, head_dim].
    key, value: [batch, S, num_kv_heads, head_dim] or without the batch.
    scale: of the logits; None: 1 / sqrt(head_dim).
    is_causal: query i sees keys j <= i. As in jax.nn this counts from the start of both sequences,
        also where T != S, unlike AttentionSpec.causal.
    query_seq_lengths, key_value_seq_lengths: [batch], i32, known on the host. Query rows beyond
        their length are 0.
    local_window_size: (left, right) or one int for both: query i sees i - left <= j <= i + right.
    return_residual: also return lse, [batch, T, num_qo_heads], f32 natural log (jax.nn rounds it to
        query's dtype). No gradient flows through it.

    A row that sees no key is 0 here; jax.nn returns the mean of all values. Differentiable in
    query, key and value: the backward pass recomputes through jax.nn.dot_product_attention.

    Raises NotImplementedError for bias, mask, lengths traced by jit, vmap, or another
    `implementation` than None.
    """
    for name, argument in (("bias", bias), ("mask", mask), ("implementation", implementation)):
        if argument is not None:
            raise NotImplementedError(
                f"dot_product_attention: {name}: only None is supported; use"
                " jax.nn.dot_product_attention."
            )
    query, key, value = jnp.asarray(query), jnp.asarray(key), jnp.asarray(value)
    q, k, v = (a if a.ndim == 4 else a[None] for a in (query, key, value))
    fits = q.ndim == k.ndim == v.ndim == 4 and v.shape[:-1] == k.shape[:-1]
    if not (fits and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3]):
        raise ValueError(
            "dot_product_attention: query, key, value: expected [batch, T, num_qo_heads, head_dim],"
            " [batch, S, num_kv_heads, head_dim], and the same but for head_dim, got"
            f" {list(query.shape)}, {list(key.shape)}, {list(value.shape)}."
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            "dot_product_attention: query, key, value: expected one dtype, got"
            f" {q.dtype}, {k.dtype}, {v.dtype}; cast them."
        )
    if isinstance(scale, jax.core.Tracer):
        raise NotImplementedError(
            "dot_product_attention: scale: a number known while tracing is supported, got a traced"
            " one; multiply query by it and pass scale=1.0."
        )
    if isinstance(local_window_size, int):
        local_window_size = (local_window_size, local_window_size)
    if local_window_size is not None and (
        len(local_window_size) != 2 or min(local_window_size) < 0
    ):
        raise ValueError(
            "dot_product_attention: local_window_size: expected (left, right) or one int for both,"
            f" >= 0, got {local_window_size}."
        )
    batch = q.shape[0]
    problem = _DenseProblem(
        query_lens=_host_lengths("query_seq_lengths", query_seq_lengths, batch, q.shape[1]),
        kv_lens=_host_lengths("key_value_seq_lengths", key_value_seq_lengths, batch, k.shape[1]),
        scale=None if scale is None else float(scale),
        is_causal=is_causal,
        window=local_window_size,
    )
    o, lse = _dense_attention(problem, q, k, v)
    if query.ndim == 3:
        o, lse = o[0], lse[0]
    return (o, jax.lax.stop_gradient(lse)) if return_residual else o


@dataclasses.dataclass(frozen=True)
class _DenseProblem:
    """The static side of a dense call."""

    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    scale: float | None
    is_causal: bool
    window: tuple[int, int] | None


def _host_lengths(name: str, lengths: Any, batch: int, limit: int) -> tuple[int, ...]:
    if lengths is None:
        return (limit,) * batch
    if isinstance(lengths, jax.core.Tracer):
        raise NotImplementedError(
            f"dot_product_attention: {name}: lengths known on the host are supported, got a traced"
            " array; use jax_attn.plan outside jit and jax_attn.attention inside."
        )
    array = np.asarray(lengths)
    is_whole = array.dtype.kind in "iu" or not array.size
    if array.shape != (batch,) or not is_whole or not ((array >= 0) & (array <= limit)).all():
        raise ValueError(
            f"dot_product_attention: {name}: expected {batch} whole numbers in [0, {limit}], got"
            f" {array.tolist()}."
        )
    return tuple(array.tolist())


@functools.lru_cache(maxsize=128)
def _dense_plan(
    problem: _DenseProblem, q_shape: tuple[int, ...], k_shape: tuple[int, ...], vo: int, dtype: str
) -> AttentionPlan:
    batch, q_len, num_qo_heads, head_dim = q_shape
    kv_len, num_kv_heads = k_shape[1:3]
    left, right = problem.window or (-1, -1)
    causal = problem.is_causal or right == 0
    spec = AttentionSpec(
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim_qk=head_dim,
        head_dim_vo=vo,
        dtype=dtype,
        causal=causal,
        window_left=left,
        window_right=0 if causal else right,
        sm_scale=problem.scale,
        page_size=None,
        max_batch=max(batch, 1),
        max_qo_tokens=max(batch * q_len, 1),
        max_kv_tokens=max(batch * kv_len, 1),
    )
    return make_plan(
        spec,
        np.arange(batch + 1) * q_len,
        np.asarray(problem.kv_lens, np.int32),
        kv_indptr=np.arange(batch + 1) * kv_len,
        q_offsets=np.zeros(batch, np.int32),  # causal and windows count from the start
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dense_attention(
    problem: _DenseProblem, q: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, jax.Array]:
    if not q.size or not k.size or not v.size:
        return jnp.zeros((*q.shape[:3], v.shape[3]), q.dtype), jnp.full(q.shape[:3], -jnp.inf)
    plan = _dense_plan(problem, q.shape, k.shape, v.shape[3], q.dtype.name)
    flat_q, flat_k, flat_v = (a.reshape(-1, *a.shape[2:]) for a in (q, k, v))
    o, lse = attention(flat_q, flat_k, flat_v, plan, return_lse=True)
    o, lse = o.reshape(*q.shape[:3], -1), lse.reshape(q.shape[:3])
    if min(problem.query_lens, default=0) < q.shape[1]:
        live = np.arange(q.shape[1]) < np.asarray(problem.query_lens)[:, None]
        o = jnp.where(live[..., None, None], o, 0)
        lse = jnp.where(live[..., None], lse, -jnp.inf)
    return o, lse


def _dense_forward(problem, q, k, v):
    o, lse = _dense_attention(problem, q, k, v)
    return (o, lse), (q, k, v, lse)


def _dense_backward(problem, saved, gradients):
    q, k, v, lse = saved
    # Rows without a key are constant here and means of all values in jax.nn.
    d_o = jnp.where(jnp.isneginf(lse)[..., None], 0, gradients[0])

    def dense(q, k, v):
        return jax.nn.dot_product_attention(
            q,
            k,
            v,
            scale=problem.scale,
            is_causal=problem.is_causal,
            query_seq_lengths=jnp.asarray(problem.query_lens, jnp.int32),
            key_value_seq_lengths=jnp.asarray(problem.kv_lens, jnp.int32),
            local_window_size=problem.window,
        )

    return jax.vjp(dense, q, k, v)[1](d_o)


_dense_attention.defvjp(_dense_forward, _dense_backward)
