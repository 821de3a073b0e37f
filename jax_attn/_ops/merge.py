"""Merging attention states (o, lse) over disjoint sets of keys."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_attn._ops.operands import as_array
from jax_attn._spec.spec import dtype_code
from jax_attn._spec.target import default_target, parse_target
from jax_attn._xla import ffi
from jax_attn._xla.transforms import Axes, partitioned, varying_alike


def merge_states(o_parts: jax.Array, lse_parts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Merge attention states of the same queries over disjoint sets of keys.

    lse = log sum_i exp(lse_i),  o = sum_i exp(lse_i - lse) * o_i: the state over the union of the
    keys (Flash-Decoding; FlashInfer, arXiv 2501.01005, section 2.2). (0, -inf) is the identity, and
    merging only identities gives the identity. Differentiable in both arguments and results.
    Supports vmap.

    o_parts: [num_states, n, num_heads, head_dim_vo], bf16 | f16 | f32; head_dim_vo is any multiple
        of 8. With num_states = 0 the result is the identity.
    lse_parts: [num_states, n, num_heads], f32, natural log.

    Returns o: [n, num_heads, head_dim_vo] in o_parts' dtype; lse: [n, num_heads], f32, natural log.
    Raises ValueError for shapes or dtypes that do not fit.

    For example, two states with the same lse have the same weight.

    >>> import jax.numpy as jnp
    >>> import jax_attn as ja
    >>> o_parts = jnp.stack([jnp.full((1, 1, 8), 1.0), jnp.full((1, 1, 8), 3.0)])
    >>> o, lse = ja.merge_states(o_parts, jnp.zeros((2, 1, 1)))
    >>> round(o.mean().item(), 4), round(lse.item(), 4)  # log(exp(0) + exp(0))
    (2.0, 0.6931)
    """
    o_parts = as_array("merge_states", "o_parts", o_parts)
    lse_parts = as_array("merge_states", "lse_parts", lse_parts)
    if o_parts.ndim != 4 or o_parts.shape[-1] == 0:
        raise ValueError(
            "merge_states: o_parts: expected [num_states, n, num_heads, head_dim_vo >= 8], got"
            f" {list(o_parts.shape)}."
        )
    if lse_parts.shape != o_parts.shape[:-1] or lse_parts.dtype != jnp.float32:
        raise ValueError(
            f"merge_states: lse_parts: expected float32{list(o_parts.shape[:-1])}, got"
            f" {lse_parts.dtype}{list(lse_parts.shape)}."
        )
    dtype_code(o_parts.dtype, "merge_states: o_parts")
    if o_parts.shape[-1] % 8:
        raise NotImplementedError(
            "merge_states: head_dim_vo: multiples of 8 are supported, got"
            f" {o_parts.shape[-1]}; pad o with zeros."
        )
    return _merge_states(*varying_alike((o_parts, lse_parts)))


def merge_state(
    o_a: jax.Array, lse_a: jax.Array, o_b: jax.Array, lse_b: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Merge two attention states; see merge_states.

    o_a, o_b: [n, num_heads, head_dim_vo], same dtype.
    lse_a, lse_b: [n, num_heads], f32, natural log.

    For example, a state over no keys does not change the other state.

    >>> import jax.numpy as jnp
    >>> import jax_attn as ja
    >>> none = jnp.zeros((1, 2, 8)), jnp.full((1, 2), -jnp.inf)
    >>> o, lse = ja.merge_state(jnp.ones((1, 2, 8)), jnp.full((1, 2), 3.0), *none)
    >>> o.mean().item(), lse.tolist()
    (1.0, [[3.0, 3.0]])
    """
    names = "o_a", "lse_a", "o_b", "lse_b"
    given = zip(names, (o_a, lse_a, o_b, lse_b), strict=True)
    o_a, lse_a, o_b, lse_b = (as_array("merge_state", *pair) for pair in given)
    if o_a.ndim != 3:
        raise ValueError(
            f"merge_state: o_a: expected [n, num_heads, head_dim_vo], got {list(o_a.shape)}."
        )
    for name, a, b in (("o_b", o_a, o_b), ("lse_b", lse_a, lse_b)):
        if a.shape != b.shape or a.dtype != b.dtype:
            raise ValueError(
                f"merge_state: {name}: expected {a.dtype}{list(a.shape)} as in the first state, got"
                f" {b.dtype}{list(b.shape)}."
            )
    return merge_states(jnp.stack([o_a, o_b]), jnp.stack([lse_a, lse_b]))


def state_to_triplet(
    o: jax.Array, lse: jax.Array, max_logits: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A state as an unnormalized triplet (o', max, sum), as engines that normalize late keep it.

    o' = sum_j exp(logit_j - max) v_j and sum = sum_j exp(logit_j - max), where max is the running
    max. Any value of max describes the same state, and merging triplets does not need a certain
    one.

    o: [..., num_heads, head_dim_vo], bf16 | f16 | f32.
    lse: [..., num_heads], f32, natural log. (0, -inf), the identity, becomes (0, -inf, 0).
    max_logits: [..., num_heads], f32. The running max of each row; None: lse, so each sum is 1.

    Returns o': [..., num_heads, head_dim_vo], max and sum: [..., num_heads], all f32.
    Differentiable. Raises ValueError for shapes or dtypes that do not fit.

    >>> import jax.numpy as jnp
    >>> import jax_attn as ja
    >>> o, lse = jnp.ones((1, 2, 8)), jnp.full((1, 2), 3.0)
    >>> triplet = ja.state_to_triplet(o, lse)
    >>> triplet[2].tolist()
    [[1.0, 1.0]]
    >>> ja.state_from_triplet(*triplet)[1].tolist()
    [[3.0, 3.0]]
    """
    op = "state_to_triplet"
    o, lse = as_array(op, "o", o), as_array(op, "lse", lse)
    running_max = lse if max_logits is None else as_array(op, "max_logits", max_logits)
    _check_triplet("state_to_triplet", o, lse=lse, max_logits=running_max)
    is_empty = jnp.isneginf(lse)
    # A row that sees no key must not compute -inf - -inf, nor its gradient.
    exponent = jnp.where(is_empty, 0.0, lse) - jnp.where(is_empty, 0.0, running_max)
    sums = jnp.where(is_empty, 0.0, jnp.exp(exponent))
    return o.astype(jnp.float32) * sums[..., None], jnp.where(is_empty, -jnp.inf, running_max), sums


def state_from_triplet(
    o: jax.Array, max_logits: jax.Array, sums: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The state (o / sum, max + log(sum)) of a triplet (o, max, sum).

    o: [..., num_heads, head_dim_vo], bf16 | f16 | f32: sum_j exp(logit_j - max) v_j.
    max_logits: [..., num_heads], f32, natural-log units. Need not be the largest logit.
    sums: [..., num_heads], f32: sum_j exp(logit_j - max). 0: no key; o and max are then ignored.

    Returns o: [..., num_heads, head_dim_vo] in the dtype of o, and lse: [..., num_heads], f32,
    natural log; (0, -inf) if there is no key. Differentiable. Raises ValueError for shapes or
    dtypes that do not fit.
    """
    given = {"o": o, "max_logits": max_logits, "sums": sums}
    o, max_logits, sums = (as_array("state_from_triplet", *pair) for pair in given.items())
    _check_triplet("state_from_triplet", o, max_logits=max_logits, sums=sums)
    is_empty = sums == 0
    divisor = jnp.where(is_empty, 1.0, sums)
    lse = jnp.where(is_empty, -jnp.inf, jnp.where(is_empty, 0.0, max_logits) + jnp.log(divisor))
    normalized = jnp.where(is_empty[..., None], 0.0, o.astype(jnp.float32)) / divisor[..., None]
    return normalized.astype(o.dtype), lse


def _check_triplet(op: str, o: jax.Array, **rows: jax.Array) -> None:
    dtype_code(o.dtype, f"{op}: o")
    if o.ndim < 2:
        raise ValueError(f"{op}: o: expected [..., num_heads, head_dim_vo], got {list(o.shape)}.")
    for name, row in rows.items():
        if row.shape != o.shape[:-1] or row.dtype != jnp.float32:
            raise ValueError(
                f"{op}: {name}: expected float32{list(o.shape[:-1])} for o of {list(o.shape)}, got"
                f" {row.dtype}{list(row.shape)}."
            )


def _fold_rows(o_parts: jax.Array, lse_parts: jax.Array) -> tuple[jax.Array, jax.Array]:
    arch, _ = parse_target(default_target())
    return ffi.merge_states(o_parts, lse_parts, arch, dtype_code(o_parts.dtype))


# Rows and heads are independent.
_fold_on_mesh = partitioned(
    "merge_states",
    _fold_rows,
    lambda: Axes("s n h d, s n h -> n h d, n h", split=("n", "h")),
)


@jax.custom_batching.custom_vmap
def _fold(o_parts: jax.Array, lse_parts: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _fold_on_mesh(o_parts, lse_parts)


@_fold.def_vmap
def _fold_batch(
    axis_size: int, in_batched: list[bool], o_parts: jax.Array, lse_parts: jax.Array
) -> tuple[Any, Any]:
    """vmap rule: rows are independent, so the mapped axis joins n."""

    def join(array: jax.Array, batched: bool) -> jax.Array:
        # [axis_size, num_states, n, ...] -> [num_states, axis_size * n, ...]
        if not batched:
            array = jnp.broadcast_to(array, (axis_size, *array.shape))
        num_states, n = array.shape[1:3]
        return array.swapaxes(0, 1).reshape(num_states, axis_size * n, *array.shape[3:])

    def split(array: jax.Array) -> jax.Array:
        return array.reshape(axis_size, n, *array.shape[1:])

    n = o_parts.shape[2 if in_batched[0] else 1]
    o, lse = _fold(join(o_parts, in_batched[0]), join(lse_parts, in_batched[1]))
    return (split(o), split(lse)), (True, True)


@jax.custom_jvp
def _merge_states(o_parts: jax.Array, lse_parts: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _fold(o_parts, lse_parts)


@_merge_states.defjvp
def _merge_tangents(primals: Any, tangents: Any) -> Any:
    """With weights w of o = sum_i w_i o_i: d o / d lse_i = w_i (o_i - o), d lse / d lse_i = w_i.

    o is the sum in f32, not its rounded value.
    """
    o_parts, lse_parts = primals
    t_o_parts, t_lse_parts = tangents
    o, lse = _merge_states(o_parts, lse_parts)
    # A row that sees no key has no weights; do not compute exp(-inf - -inf). The sum is not that of
    # lse, which far from 0 is the largest part alone.
    largest = jnp.max(lse_parts, axis=0, keepdims=True, initial=-jnp.inf)
    weights = jnp.exp(lse_parts - jnp.where(jnp.isneginf(largest), 0.0, largest))
    weights /= jnp.where(jnp.isneginf(largest), 1.0, weights.sum(axis=0, keepdims=True))
    moved = weights * t_lse_parts
    t_lse = jnp.sum(moved, axis=0)
    shares, moved = weights[..., None], moved[..., None]
    parts = jnp.where(shares > 0, o_parts, 0).astype(jnp.float32)
    t_o = jnp.sum(shares * t_o_parts.astype(jnp.float32) + moved * parts, axis=0)
    t_o -= t_lse[..., None] * jnp.sum(shares * parts, axis=0)
    return (o, lse), (t_o.astype(o.dtype), t_lse)
