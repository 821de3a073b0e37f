"""A drop-in for jax.nn.dot_product_attention: dense batches, gradients, meshes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core as jax_core
from jax.interpreters import ad, batching, mlir

from jax_attn._dense import blocks_jnp
from jax_attn._dense.blocks_jnp import Operand, Problem
from jax_attn._ops import gradients
from jax_attn._ops.attention import attention
from jax_attn._ops.operands import as_known
from jax_attn._plan.plan import AttentionPlan, plan
from jax_attn._spec.spec import AttentionSpec, dtype_code
from jax_attn._spec.target import LARGEST_HEAD_DIM
from jax_attn._variant.variant import Variant
from jax_attn._xla.attention_operands import BackwardOperands
from jax_attn._xla.transforms import Axes, jvp_of, on_explicit_mesh, partitioned, varying_alike

_OP = "dot_product_attention"

_IMPLEMENTATIONS = (None, "xla", "cudnn")

# Taken on import: a program may put the function of this module in its place.
_of_jax_nn: Any = jax.nn.dot_product_attention


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
    implementation: Literal["xla", "cudnn"] | None = None,
    return_residual: bool = False,
    logits_soft_cap: float | None = None,
    residual_dtype: Any = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Drop-in for jax.nn.dot_product_attention: dense batches, same arguments, same meaning.

    logits_soft_cap and residual_dtype are not arguments of jax.nn.

    query: [batch, T, num_qo_heads, head_dim] or [T, num_qo_heads, head_dim], bf16 | f16 | f32.
    key: [batch, S, num_kv_heads, head_dim] or without the batch, dtype of query.
    value: [batch, S, num_kv_heads, head_dim_vo] or without the batch, dtype of query.
    bias: float, added to the logits. mask: bool, True where a key is visible. Each is
        [batch, num_qo_heads, T, S] with every axis of that length or 1; leading axes may be
        missing. They are never broadcast in memory.
    scale: logits = scale * (query . key). None: 1 / sqrt(head_dim).
    is_causal: query i sees keys j <= i. As in jax.nn, both sequences count from their start, even
        if T != S. (AttentionSpec.causal aligns their ends.)
    query_seq_lengths, key_value_seq_lengths: [batch], integers in [0, T] and [0, S]; traced ones
        are clamped to that range. Query rows beyond their length are 0.
    local_window_size: (left, right) or one int for both. Query i sees i - left <= j <= i + right.
    implementation: None: this library. "xla", "cudnn": the call is passed to jax.nn unchanged.
    return_residual: also return lse.
    logits_soft_cap: c > 0: logits = c * tanh(scale * (query . key) / c), before bias and masks, as
        in Gemma 2. None: none. Only with implementation=None.
    residual_dtype: dtype of lse; None: that of query, as in jax.nn. With "float32" lse is not
        rounded. Only with implementation=None.

    Returns o: [batch, T, num_qo_heads, head_dim_vo] in query's dtype, and with return_residual lse:
    [batch, T, num_qo_heads] in residual_dtype, natural log. Without the batch axis if query has
    none. A row that sees no key has o = 0, lse = -inf; jax.nn returns the mean of all values there.

    All arrays and scale may be traced; the other arguments are static. Shapes are known while
    tracing: jax.export's symbolic dimensions raise NotImplementedError. vmap joins the mapped axis
    to the batch. A bias or mask that is not mapped and has batch length 1 is not repeated.

    Differentiable in query, key, value, bias and a traced scale, forward (jax.jvp) and backward,
    any number of times; lse may be part of the loss. The backward pass follows FlashAttention-2
    (arXiv 2307.08691, Algorithm 2). It uses kernels on CPUs and on CUDA; with a bias, a mask or a
    traced scale it uses jnp, one block of keys at a time. Its memory grows with T + S and with the
    bias, not with T * S. The same inputs give the same bits. Elements beyond the lengths, and keys
    that a mask hides from all queries, have gradient 0 and no influence, even if they are NaN.

    On a mesh, arrays may be split over batch or heads and are not gathered. A bias or mask is split
    like the rows, or has length 1 on the split axis. Heads may be split where all devices get the
    same number of KV heads. Other shardings raise ValueError, from the compiler if only XLA knows
    the sharding.

    Raises ValueError for arrays that do not fit each other, or for a wrong length, window, soft cap
    or implementation. Raises NotImplementedError for another dtype, and for a head_dim above 512.

    In the example, query i sees keys 0 to i, whose values are 0 to i.

    >>> import numpy as np
    >>> import jax_attn as ja
    >>> q, k = np.ones((1, 3, 2, 16), np.float32), np.ones((1, 3, 1, 16), np.float32)
    >>> v = k * np.arange(3, dtype=np.float32)[:, None, None]
    >>> ja.dot_product_attention(q, k, v, is_causal=True)[0, :, 0, 0].round(3).tolist()
    [0.0, 0.5, 1.0]
    """
    if implementation not in _IMPLEMENTATIONS:
        raise ValueError(
            f'{_OP}: implementation: expected None, "xla" or "cudnn", got {implementation!r}.'
        )
    if implementation is not None:
        ours = {"logits_soft_cap": logits_soft_cap, "residual_dtype": residual_dtype}
        for name, given in ours.items():
            if given is not None:
                raise ValueError(
                    f"{_OP}: {name}: expected None with implementation={implementation!r}, which is"
                    f" jax.nn's, got {given!r}."
                )
        return _of_jax_nn(
            query,
            key,
            value,
            bias,
            mask,
            scale=scale,
            is_causal=is_causal,
            query_seq_lengths=query_seq_lengths,
            key_value_seq_lengths=key_value_seq_lengths,
            local_window_size=local_window_size,
            implementation=implementation,
            return_residual=return_residual,
        )
    of_names = {"query": query, "key": key, "value": value}
    query, key, value = (as_known(_OP, *pair) for pair in of_names.items())
    q, k, v = (a if a.ndim == 4 else a[None] for a in (query, key, value))
    _check_operands(q, k, v)
    soft_cap = soft_cap_of(_OP, logits_soft_cap)
    batch, q_len, num_qo_heads, head_dim = q.shape
    kv_len, head_dim_vo = k.shape[1], v.shape[3]
    logits = batch, num_qo_heads, q_len, kv_len
    arrays: dict[str, jax.Array] = {}
    sm_scale = head_dim**-0.5 if scale is None else scale
    if isinstance(sm_scale, jax.core.Tracer):
        arrays["scale"] = _traced_scale(sm_scale)
        sm_scale = 1.0
    for name, array in (("bias", bias), ("mask", mask)):
        if array is not None:
            arrays[name] = _broadcasting(name, array, logits)
    lens: dict[str, tuple[int, ...] | None] = {"query_lens": None, "kv_lens": None}
    for name, argument, lengths, limit in (
        ("query_lens", "query_seq_lengths", query_seq_lengths, q_len),
        ("kv_lens", "key_value_seq_lengths", key_value_seq_lengths, kv_len),
    ):
        if isinstance(lengths, jax.core.Tracer):
            arrays[name] = _traced_lengths(argument, lengths, batch, limit)
        elif lengths is not None:
            lens[name] = _host_lengths(argument, lengths, batch, limit)
            arrays[name] = jnp.asarray(np.asarray(lens[name], np.int32))
    problem = Problem(
        **lens,
        sm_scale=float(sm_scale),
        window=window_of(_OP, local_window_size, is_causal),
        soft_cap=soft_cap,
        operands=tuple(
            Operand(name, x.dtype.name, tuple(n > 1 or x.ndim == 1 for n in x.shape))
            for name, x in arrays.items()
        ),
    )
    padded = map(_padded_head_dim, (q, k, v))
    o, lse = _attend(problem, *varying_alike((*padded, *arrays.values())))
    o = o[..., :head_dim_vo]
    if query.ndim == 3:
        o, lse = o[0], lse[0]
    lse = lse.astype(query.dtype if residual_dtype is None else residual_dtype)
    return (o, lse) if return_residual else o


def _check_operands(q: jax.Array, k: jax.Array, v: jax.Array) -> None:
    fits = q.ndim == k.ndim == v.ndim == 4 and v.shape[:-1] == k.shape[:-1]
    if not (fits and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3]):
        raise ValueError(
            f"{_OP}: query, key, value: expected [batch, T, num_qo_heads, head_dim], [batch, S,"
            " num_kv_heads, head_dim], and the same but for head_dim, got"
            f" {list(q.shape)}, {list(k.shape)}, {list(v.shape)}."
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"{_OP}: query, key, value: expected one dtype, got {q.dtype}, {k.dtype}, {v.dtype};"
            " cast them."
        )
    dtype_code(q.dtype, f"{_OP}: query")
    if max(q.shape[3], v.shape[3]) > LARGEST_HEAD_DIM:
        raise NotImplementedError(
            f"{_OP}: head_dim: up to {LARGEST_HEAD_DIM} is supported, got"
            f' {max(q.shape[3], v.shape[3])}; use implementation="xla".'
        )


def window_of(op: str, size: Any, is_causal: bool) -> tuple[int, int]:
    """(left, right) of a local_window_size in jax.nn's form; -1: no limit on that side."""
    left, right = (-1, -1)
    if size is not None:
        both = (size, size) if isinstance(size, int) else tuple(size)
        if len(both) != 2 or min(both) < 0:
            raise ValueError(
                f"{op}: local_window_size: expected (left, right) or one int for both, >= 0, got"
                f" {size}."
            )
        left, right = both
    return left, 0 if is_causal else right


def soft_cap_of(op: str, soft_cap: float | None) -> float:
    """The soft cap of an AttentionSpec: 0 for None."""
    if soft_cap is None:
        return 0.0
    if isinstance(soft_cap, jax.core.Tracer) or not 0 < soft_cap < np.inf:
        raise ValueError(
            f"{op}: logits_soft_cap: expected None or a finite number above 0 that is known while"
            f" tracing, got {soft_cap}."
        )
    return float(soft_cap)


def _host_lengths(name: str, lengths: Any, batch: int, limit: int) -> tuple[int, ...]:
    array = np.asarray(lengths)
    is_whole = array.dtype.kind in "iu" or not array.size
    if array.shape != (batch,) or not is_whole or not ((array >= 0) & (array <= limit)).all():
        raise ValueError(
            f"{_OP}: {name}: expected {batch} whole numbers in [0, {limit}], got {array.tolist()}."
        )
    return tuple(array.tolist())


def _traced_lengths(name: str, lengths: jax.Array, batch: int, limit: int) -> jax.Array:
    if lengths.shape != (batch,) or lengths.dtype.kind not in "iu":
        raise ValueError(
            f"{_OP}: {name}: expected {batch} whole numbers in [0, {limit}], got"
            f" {lengths.dtype}{list(lengths.shape)}."
        )
    limit = min(limit, jnp.iinfo(lengths.dtype).max)  # of int8, for example
    return jnp.clip(lengths, 0, limit).astype(jnp.int32)


def _traced_scale(scale: jax.Array) -> jax.Array:
    if scale.shape or not jnp.issubdtype(scale.dtype, jnp.number):
        raise ValueError(f"{_OP}: scale: expected a number, got {scale.dtype}{list(scale.shape)}.")
    return scale.astype(jnp.float32).reshape(1, 1, 1, 1)


def _padded_head_dim(x: jax.Array) -> jax.Array:
    """x with head_dim padded with zeros to a multiple of 8, as kernels require."""
    return jnp.pad(x, ((0, 0),) * 3 + ((0, -x.shape[3] % 8),)) if x.shape[3] % 8 else x


# ---- bias and mask -------------------------------------------------------------------------------


def _broadcasting(name: str, array: Any, logits: tuple[int, ...]) -> jax.Array:
    """A bias or mask as a variant's operand.

    It broadcasts because indices beyond an axis of length 1 are clamped.
    """
    array = as_known(_OP, name, array)
    given = jnp.expand_dims(array, tuple(range(max(0, 4 - array.ndim))))
    fits = given.ndim == 4 and all(
        n in (1, full) for n, full in zip(given.shape, logits, strict=True)
    )
    if not fits or (array.dtype == bool) != (name == "mask") or array.dtype.kind == "c":
        raise ValueError(
            f"{_OP}: {name}: expected {'bool' if name == 'mask' else 'a float array'} of"
            f" {list(logits)}, each axis of that length or 1, got {array.dtype}{list(array.shape)}."
        )
    known = ("bool", "float32", "bfloat16", "float16")
    return given if given.dtype.name in known else given.astype(jnp.float32)


def _logits(soft_cap: float, score: Any, at: Any, scale: Any = None, bias: Any = None) -> Any:
    """soft_cap: applied here because a traced scale comes before it; 0: none."""
    if scale is not None:
        score = score * scale[at.request, 0, 0, 0]
    if soft_cap:
        score = soft_cap * jnp.tanh(score / soft_cap)
    return score if bias is None else score + bias[at.request, at.head, at.q_pos, at.kv_pos]


def _is_seen(at: Any, mask: Any) -> Any:
    return mask[at.request, at.head, at.q_pos, at.kv_pos]


@functools.cache
def _variant(operands: tuple[Operand, ...], soft_cap: float) -> Variant | None:
    """soft_cap: 0 if the spec applies it."""
    read = {of.name: of.dtype for of in operands if of.name in ("scale", "bias", "mask")}
    if not read:
        return None
    logits = functools.partial(_logits, soft_cap)
    return Variant(
        logits=logits if "scale" in read or "bias" in read else None,
        mask=_is_seen if "mask" in read else None,
        operands={name: jax.ShapeDtypeStruct((1,) * 4, dtype) for name, dtype in read.items()},
    )


# ---- forward -------------------------------------------------------------------------------------


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _attend(problem: Problem, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
    """o: [batch, T, num_qo_heads, head_dim_vo]; lse: [batch, T, num_qo_heads], f32.

    arrays: q, k, v and the operands of the problem.
    """
    o, lse = _joining(_attend_batch)(problem, *arrays)
    return o, lse


def _join(
    problem: Problem, axis_size: int, in_batched: Any, arrays: Any, kinds: Any
) -> tuple[Problem, list[jax.Array]]:
    """The problem and arrays after vmap's mapped axis has joined the batch axis.

    kinds: for each array the index of its operand, or None if the array has the full batch axis. An
        operand that is not mapped and has batch length 1 is not repeated.
    """
    # Cases: (is mapped, has batch length 1).
    operands = list(problem.operands)
    batch = _batch_of(arrays[0], in_batched[0])
    is_shared = {
        i: not operand.is_full[0]
        and not any(b for b, kind in zip(in_batched, kinds, strict=True) if kind == i)
        for i, operand in enumerate(operands)
    }
    joined = []
    for x, is_batched, kind in zip(arrays, in_batched, kinds, strict=True):
        if kind is not None and is_shared[kind]:
            joined.append(x)
            continue
        x = x if is_batched else x[None]
        x = jnp.broadcast_to(x, (axis_size, batch, *x.shape[2:]))
        joined.append(x.reshape(axis_size * x.shape[1], *x.shape[2:]))
    for i, operand in enumerate(operands):
        if not is_shared[i]:
            operands[i] = operand._replace(is_full=(True, *operand.is_full[1:]))
    query_lens, kv_lens = (
        None if x is None else axis_size * x for x in (problem.query_lens, problem.kv_lens)
    )
    problem = dataclasses.replace(
        problem, query_lens=query_lens, kv_lens=kv_lens, operands=tuple(operands)
    )
    return problem, joined


def _batch_of(q: jax.Array, is_batched: bool) -> int:
    """The batch size of queries that vmap maps along their first axis, or not at all."""
    return q.shape[1] if is_batched else q.shape[0]


def _joining(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call(problem, q, k, v, *operands, *others)` under vmap."""

    def joined(problem: Problem, *arrays: jax.Array) -> Any:
        one = jax.custom_batching.custom_vmap(functools.partial(call, problem))

        @one.def_vmap
        def all_of_them(axis_size: int, in_batched: Any, *operands: jax.Array) -> Any:
            n = len(problem.operands)
            kinds = [None] * 3 + list(range(n)) + [None] * (len(operands) - 3 - n)
            results = joined(*_flat(_join(problem, axis_size, in_batched, operands, kinds)))
            batch = _batch_of(operands[0], in_batched[0])
            split = _split_batch(axis_size, batch, results)
            return split, (True,) * len(split)

        return one(*arrays)

    return joined


def _split_batch(axis_size: int, batch: int, results: Any) -> tuple[jax.Array, ...]:
    """Undo the joining of the mapped axis and the batch axis, which may be empty."""
    return tuple(x.reshape(axis_size, batch, *x.shape[1:]) for x in results)


def _flat(call: tuple[Problem, list[jax.Array]]) -> tuple[Any, ...]:
    return call[0], *call[1]


def _attend_batch(problem: Problem, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
    q, k, v = arrays[:3]
    if not q.size or not k.size or not v.size:
        o = jnp.zeros((*q.shape[:3], v.shape[3]), q.dtype)
        return o, jnp.full(q.shape[:3], -jnp.inf, jnp.float32)
    whole = _plan(problem, *arrays)
    return _attend_planned(problem, whole.spec, *arrays, jnp.asarray(whole.buffer))


def _plan(problem: Problem, *arrays: jax.Array) -> AttentionPlan:
    """The plan for the lengths, made on the host if those of all these requests are static."""
    spec = _spec(problem, *arrays[:3])
    lens = problem.named(arrays[3:]).get("kv_lens")
    known = problem.kv_lens if lens is not None else (arrays[1].shape[1],) * spec.max_batch
    if known is not None and len(known) == spec.max_batch:
        return _plan_on_host(spec, known)
    return _plan_lens(spec, lens)  # traced, or of a device's part of the requests


def _spec(problem: Problem, q: jax.Array, k: jax.Array, v: jax.Array) -> AttentionSpec:
    batch, q_len, num_qo_heads, head_dim = q.shape
    kv_len, num_kv_heads = k.shape[1:3]
    left, right = problem.window
    # A traced scale comes before the soft cap, so that the variant applies both.
    has_scale = any(operand.name == "scale" for operand in problem.operands)
    return AttentionSpec(
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim_qk=head_dim,
        head_dim_vo=v.shape[3],
        dtype=q.dtype.name,
        causal=right == 0,
        window_left=left,
        window_right=right,
        sm_scale=problem.sm_scale,
        logits_soft_cap=0.0 if has_scale else problem.soft_cap,
        variant=_variant(problem.operands, problem.soft_cap if has_scale else 0.0),
        page_size=None,
        max_batch=batch,
        max_qo_tokens=batch * q_len,
        max_kv_tokens=batch * kv_len,
        typical_kv_len=kv_len if q_len == kv_len else None,  # few queries are no prompts
    )


@functools.lru_cache(maxsize=128)
def _plan_on_host(spec: AttentionSpec, kv_lens: tuple[int, ...]) -> AttentionPlan:
    return _plan_lens(spec, np.asarray(kv_lens, np.int32))


def _plan_lens(spec: AttentionSpec, kv_lens: Any) -> AttentionPlan:
    batch, q_len, kv_len = spec.max_batch, spec.max_qo_tokens, spec.max_kv_tokens
    assert kv_len is not None
    return plan(
        spec,
        np.arange(batch + 1) * (q_len // batch),
        kv_lens,
        kv_indptr=np.arange(batch + 1) * (kv_len // batch),
        q_offsets=np.zeros(batch, np.int32),  # causal and windows count from the start
    )


def _attend_flat(
    problem: Problem, spec: AttentionSpec, *arrays_and_buffer: jax.Array
) -> tuple[jax.Array, jax.Array]:
    q, k, v, *operands, buffer = arrays_and_buffer
    read = None
    if spec.variant is not None:
        named = problem.named(operands)
        read = {name: named[name] for name in spec.variant.names}
    flat_q, flat_k, flat_v = (a.reshape(-1, *a.shape[2:]) for a in (q, k, v))
    own = AttentionPlan(buffer, spec)
    o, lse = attention(flat_q, flat_k, flat_v, own, variant_operands=read, return_lse=True)
    o, lse = o.reshape(*q.shape[:3], -1), lse.reshape(q.shape[:3])
    lens = problem.named(operands).get("query_lens")
    if lens is not None:
        live = (jnp.arange(q.shape[1])[None] < lens[:, None])[..., None]
        o = jnp.where(live[..., None], o, 0)
        lse = jnp.where(live, lse, -jnp.inf)
    return o, lse


def _attend_part(
    problem: Problem, spec: AttentionSpec, *arrays_and_buffer: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The call on one device of a mesh, which plans its own requests and heads."""
    *arrays, _ = arrays_and_buffer
    own = _plan(problem, *arrays)
    return _attend_flat(problem, own.spec, *arrays, jnp.asarray(own.buffer))


_DENSE = "b t (h g) d", "b s h d", "b s h e"
_ROWS = "b t (h g) e", "b t (h g)"
_SPLIT = ("b", "h")  # requests, and KV heads with their groups of query heads, are independent


def _axes_of(
    problem: Problem, heads: tuple[int, int], others: tuple[str, ...], results: tuple[str, ...]
) -> Axes:
    """Axes of the arrays.

    heads: numbers of KV heads and of query heads in a group.
    """
    arguments = (*_DENSE, *(operand.axes for operand in problem.operands), *others)
    names = f"{', '.join(arguments)} -> {', '.join(results)}"
    num_kv_heads, group_size = heads
    if 1 in heads:  # Shardy has no factors of size 1
        return Axes(names.replace("(h g)", "h" if group_size == 1 else "g"), _SPLIT)
    return Axes(names, _SPLIT, {"g": group_size})


def _heads_of(arrays: Sequence[jax.Array]) -> tuple[int, int]:
    num_qo_heads, num_kv_heads = arrays[0].shape[2], arrays[1].shape[2]
    return num_kv_heads, num_qo_heads // num_kv_heads


def _axes(problem: Problem, spec: AttentionSpec) -> Axes:
    return _axes_of(problem, (spec.num_kv_heads, spec.group_size), ("w",), _ROWS)


_attend_planned = partitioned(_OP, _attend_flat, _axes, num_static=2, per_device=_attend_part)


# ---- tangents and gradients ----------------------------------------------------------------------


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _row_states(problem: Problem, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
    """blocks_jnp.row_states on each device, so that it decides by its own rows.

    log_sum follows lse in derivatives; what else it and shift depend on cancels.
    """

    def run(problem: Problem, *arrays: jax.Array) -> Any:
        lse = arrays[-1]
        if not all(x.size for x in arrays[:3]):  # a batch of vmap may be empty
            return jnp.zeros_like(lse), lse
        batch, kv_len = arrays[1].shape[:2]
        lens = blocks_jnp.kv_lens_of(problem.named(arrays[3:-1]), batch, kv_len)
        return _row_states_planned(problem, _heads_of(arrays), *arrays, lens)

    shift, log_sum = _joining(run)(problem, *arrays)
    return shift, log_sum


@_row_states.defjvp
def _row_states_jvp(problem: Problem, primals: Any, tangents: Any) -> Any:
    shift, log_sum = _row_states(problem, *primals)
    return (shift, log_sum), (jnp.zeros_like(shift), tangents[-1])


def _row_states_axes(problem: Problem, heads: tuple[int, int]) -> Axes:
    return _axes_of(problem, heads, (*_ROWS[1:], "b"), _ROWS[1:] * 2)


def _row_states_of_part(problem: Problem, heads: tuple[int, int], *arrays: jax.Array) -> Any:
    del heads
    return blocks_jnp.row_states(problem, *arrays)


_row_states_planned = partitioned(_OP, _row_states_of_part, _row_states_axes, num_static=2)


@functools.partial(_attend.defjvp, symbolic_zeros=True)
def _jvp(problem: Problem, primals: Any, tangents: Any) -> Any:
    o, lse = _attend(problem, *primals)
    o, lse = checkpoint_name(o, gradients.O_NAME), checkpoint_name(lse, gradients.LSE_NAME)
    q, k, v = primals[:3]
    if not q.size or not k.size or not v.size:
        return (o, lse), (jnp.zeros_like(o), jnp.zeros_like(lse))
    is_zero = [isinstance(t, jax.custom_derivatives.SymbolicZero) for t in tangents]
    wanted = tuple(
        operand.name
        for operand, zero in zip(problem.operands, is_zero[3:], strict=True)
        if operand.name in ("scale", "bias") and not zero
    )
    given = [
        jnp.zeros_like(x) if zero else t
        for x, t, zero in zip(primals[:3], tangents[:3], is_zero[:3], strict=True)
    ]
    given += [problem.named(tangents[3:])[name] for name in wanted]
    of_o, of_lse = _tangents_p.bind(*primals, o, lse, *given, problem=problem, wanted=wanted)
    return (o, lse), (of_o, of_lse)


# Tangents of o and lse, in jnp. Its transpose in the linear operands is `_backward`.
# Operands: q, k, v, the problem's operands, o, lse, tangents of q, k, v and of wanted operands.
_tangents_p = jax_core.Primitive("jax_attn_dense_tangents")
_tangents_p.multiple_results = True


def _tangents(*arrays: jax.Array, problem: Problem, wanted: tuple[str, ...]) -> Any:
    n = len(problem.operands)
    if not all(x.size for x in arrays[:3]):  # a batch of vmap may be empty
        return tuple(map(jnp.zeros_like, arrays[3 + n : 5 + n]))
    run = functools.partial(blocks_jnp.tangents, problem, wanted, _row_states)
    of_wanted = (operand.axes for operand in problem.operands if operand.name in wanted)
    about = _axes_of(problem, _heads_of(arrays), (*_ROWS, *_DENSE, *of_wanted), _ROWS)
    return on_explicit_mesh(_OP, run, about, otherwise=run)(*arrays)


def _tangents_abstract(*avals: Any, problem: Problem, wanted: tuple[str, ...]) -> Any:
    n = len(problem.operands)
    return list(avals[3 + n : 5 + n])  # as o and lse


def _tangents_transpose(
    cotangents: Any, *arrays: Any, problem: Problem, wanted: tuple[str, ...]
) -> Any:
    n = 5 + len(problem.operands)
    d_o, d_lse = map(ad.instantiate_zeros, cotangents)
    results = _backward(problem, wanted, *arrays[:n], d_o, d_lse)
    linear = map(ad.is_undefined_primal, arrays[n:])
    return [None] * n + [d if is_one else None for d, is_one in zip(results, linear, strict=True)]


def _tangents_batched(arrays: Any, axes: Any, *, problem: Problem, wanted: tuple[str, ...]) -> Any:
    n = len(problem.operands)
    numbers = [i for i, operand in enumerate(problem.operands) if operand.name in wanted]
    kinds = [*[None] * 3, *range(n), *[None] * 5, *numbers]
    in_batched = [axis is not None for axis in axes]
    arrays = [
        x if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(arrays, axes, strict=True)
    ]
    size = next(x.shape[0] for x, axis in zip(arrays, axes, strict=True) if axis is not None)
    joined, operands = _join(problem, size, in_batched, arrays, kinds)
    results = _tangents_p.bind(*operands, problem=joined, wanted=wanted)
    return _split_batch(size, _batch_of(arrays[0], in_batched[0]), results), [0, 0]


_tangents_p.def_impl(_tangents)
_tangents_p.def_abstract_eval(_tangents_abstract)
ad.primitive_jvps[_tangents_p] = functools.partial(jvp_of, _tangents)
ad.primitive_transposes[_tangents_p] = _tangents_transpose
batching.primitive_batchers[_tangents_p] = _tangents_batched
mlir.register_lowering(_tangents_p, mlir.lower_fun(_tangents, multiple_results=True))


def _backward(problem: Problem, wanted: tuple[str, ...], *arrays: jax.Array) -> Any:
    """Gradients of q, k, v and the wanted operands.

    arrays: q, k, v, the operands, o, lse, d_o, d_lse.
    """
    spec = _spec(problem, *arrays[:3])
    if spec.variant is None and spec.has_backward_kernel:
        return _gradients(problem, *arrays)
    names = [operand for operand in problem.operands if operand.name in wanted]
    # A device has some requests and heads. Its gradients of shared operands are partial sums.
    parts = tuple("b (h g) t s" for _ in names)
    about = _axes_of(problem, _heads_of(arrays), (*_ROWS, *_ROWS), (*_DENSE, *parts))
    # XLA can split it.
    run = functools.partial(blocks_jnp.gradients, problem, wanted, _row_states)
    d_q, d_k, d_v, *of_parts = on_explicit_mesh(_OP, run, about, otherwise=run)(*arrays)
    of_operands = [
        x.sum(
            axis=tuple(i for i, is_full in enumerate(operand.is_full) if not is_full), keepdims=True
        )
        for x, operand in zip(of_parts, names, strict=True)
    ]
    return d_q, d_k, d_v, *of_operands


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _gradients(problem: Problem, *arrays: jax.Array) -> Any:
    """dq, dk and dv, computed by the kernels."""

    def run(problem: Problem, *arrays: jax.Array) -> Any:
        if not all(x.size for x in arrays[:3]):  # a batch of vmap may be empty
            return tuple(map(jnp.zeros_like, arrays[:3]))
        whole = _plan(problem, *arrays[: 3 + len(problem.operands)])
        return _gradients_planned(problem, whole.spec, *arrays, jnp.asarray(whole.buffer))

    *inputs, o, lse, d_o, d_lse = arrays
    d = gradients.row_sums(o, d_o, d_lse, _spec(problem, *arrays[:3]).target)
    return _joining(run)(problem, *inputs, lse, d, d_o)


@_gradients.defjvp
def _second_derivatives(problem: Problem, primals: Any, tangents: Any) -> Any:
    run = functools.partial(blocks_jnp.gradients, problem, (), _row_states)
    return jax.jvp(run, primals, tangents)


def _gradients_flat(problem: Problem, spec: AttentionSpec, *arrays: jax.Array) -> Any:
    *inputs, lse, d, d_o, buffer = arrays
    rows = (*inputs[:3], lse, d, d_o)
    q, k, v, lse, d, d_o = (x.reshape(-1, *x.shape[2:]) for x in rows)
    operands = BackwardOperands(
        q=q, k=k, v=v, plan_buffer=buffer, layer=jnp.int32(0), lse=lse, d=d, d_o=d_o
    )
    of_all = gradients.gradients(operands, spec)
    return tuple(x.reshape(like.shape) for x, like in zip(of_all, rows, strict=False))


def _gradients_part(problem: Problem, spec: AttentionSpec, *arrays: jax.Array) -> Any:
    *rest, _ = arrays
    own = _plan(problem, *rest[: 3 + len(problem.operands)])
    return _gradients_flat(problem, own.spec, *rest, jnp.asarray(own.buffer))


def _gradients_axes(problem: Problem, spec: AttentionSpec) -> Axes:
    others = "b t (h g)", "b t (h g)", "b t (h g) e", "w"
    return _axes_of(problem, (spec.num_kv_heads, spec.group_size), others, _DENSE)


_gradients_planned = partitioned(
    _OP, _gradients_flat, _gradients_axes, num_static=2, per_device=_gradients_part
)
