"""The chunked form of linear attention in jax.numpy: any decay, with and without the delta rule.

Gated DeltaNet (arXiv 2412.06464, section 3.3) and Mamba-2 (arXiv 2405.21060, section 6). With the
decays G summed from the start of a chunk and D[i, j] = exp(G_i - G_j) for i >= j:

    A  = tril(beta K K^T * D, -1),  T = (I + A)^-1
    V' = T (beta V) - T (beta K exp(G)) S
    o  = scale * ((Q exp(G)) S + tril(Q K^T * D) V')
    S <- exp(G_last) S + (K exp(G_last - G))^T V'

Only exponentials of differences of sums appear, so nothing overflows for g <= 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_attn._spec.state_spec import LinearAttentionSpec

L2_EPS = 1e-6


class Terms(NamedTuple):
    """What a chunk computes without knowing its state. f32, leading axes [..., num_v_heads].

    u: [..., chunk, head_dim_v], T (beta V).
    w: [..., chunk, head_dim_k], T (beta K exp(G)); None without the delta rule.
    q: [..., chunk, head_dim_k], scale * Q exp(G).
    qk: [..., chunk, chunk], scale * tril(Q K^T * D).
    k: [..., chunk, head_dim_k], K exp(G_last - G).
    decay: [..., head_dim_k or 1, 1], exp(G_last).
    """

    u: jax.Array
    w: jax.Array | None
    q: jax.Array
    qk: jax.Array
    k: jax.Array
    decay: jax.Array


def _product(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, a, b, precision=lax.Precision.HIGHEST)


def normalized(x: jax.Array) -> jax.Array:
    """x / sqrt(sum of squares + 1e-6) over the last axis."""
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + L2_EPS)


def _inverse(lower: jax.Array) -> jax.Array:
    """(I + lower)^-1 of strictly lower triangular matrices [..., n, n].

    The inverses T1 and T2 of two neighbours on the diagonal give that of their joint block, whose
    lower left part is -T2 A T1. Here for all pairs of a width at once, in matmuls of n x n: a
    reshape into blocks is refused on meshes with explicit axes, and XLA's triangular solve on CPUs
    calls LAPACK, which hung in gradients over four devices and under vmap (jax 0.10 and 0.12).
    """
    n = lower.shape[-1]
    row, column = jnp.arange(n)[:, None], jnp.arange(n)
    inverse, width = jnp.eye(n), 1
    while width < n:
        pairs = (row // (2 * width) == column // (2 * width)) & (row // width > column // width)
        below = jnp.where(pairs, lower, 0.0)
        step = _product("...ij,...jk->...ik", below, inverse)
        inverse = inverse - _product("...ij,...jk->...ik", inverse, step)
        width *= 2
    return inverse


def chunk_terms(
    spec: LinearAttentionSpec,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array | None,
    beta: jax.Array | None,
    ends: Any = None,
) -> Terms:
    """The terms of chunks whose rows behind their last token are 0 in every array.

    q, k: [..., chunk, num_qk_heads, head_dim_k]. v: [..., chunk, num_v_heads, head_dim_v].
    g: [..., chunk, num_v_heads (, head_dim_k)] or None. beta: [..., chunk, num_v_heads] or None.
    ends: [...], tokens: the state of `next_state` is that after so many tokens. None: after all.
    """
    assert spec.scale is not None
    group = spec.num_v_heads // spec.num_qk_heads
    size = q.shape[-3]
    q, k, v = (jnp.moveaxis(x.astype(jnp.float32), -3, -2) for x in (q, k, v))
    if spec.l2_norm:
        q, k = normalized(q), normalized(k)
    q, k = (jnp.repeat(x, group, axis=-3) for x in (q * spec.scale, k))
    beta = jnp.ones(v.shape[:-1]) if beta is None else jnp.moveaxis(beta, -2, -1)
    if g is None:
        g = jnp.zeros((*v.shape[:-1], 1))
    elif spec.decay == "head":
        g = jnp.moveaxis(g, -2, -1)[..., None]
    else:
        g = jnp.moveaxis(g, -3, -2)
    sums = jnp.cumsum(g, axis=-2)  # [..., heads, chunk, 1 or head_dim_k]
    row, column = jnp.arange(size)[:, None], jnp.arange(size)
    is_past = row >= column

    def times_decay(x: jax.Array) -> jax.Array:
        """tril(x k^T * D). Differences are masked first, so their exponentials stay finite."""
        if spec.decay == "channel":
            ahead = is_past[..., None]
            less = jnp.where(ahead, sums[..., :, None, :] - sums[..., None, :, :], 0.0)
            found = jnp.einsum(
                "...id,...jd,...ijd->...ij", x, k, jnp.exp(less), precision=lax.Precision.HIGHEST
            )
        else:
            less = jnp.where(is_past, sums - jnp.swapaxes(sums, -1, -2), 0.0)
            found = _product("...id,...jd->...ij", x, k) * jnp.exp(less)
        return jnp.where(is_past, found, 0.0)

    since = jnp.exp(sums)
    u, w = beta[..., None] * v, None
    if spec.delta_rule:
        lower = jnp.where(row > column, beta[..., None] * times_decay(k), 0.0)
        both = jnp.concatenate([u, beta[..., None] * k * since], axis=-1)
        both = _product("...ij,...jd->...id", _inverse(lower), both)
        u, w = both[..., : v.shape[-1]], both[..., v.shape[-1] :]
    if ends is None:
        last, to_last = sums[..., -1:, :], jnp.exp(sums[..., -1:, :] - sums)
    else:
        ends = jnp.asarray(ends)[..., None, None, None]
        is_last = jnp.arange(size)[:, None] == ends - 1
        last = jnp.sum(jnp.where(is_last, sums, 0.0), axis=-2, keepdims=True)
        counts = jnp.arange(size)[:, None] < ends
        to_last = jnp.where(counts, jnp.exp(jnp.where(counts, last - sums, 0.0)), 0.0)
    decay = jnp.swapaxes(jnp.exp(last), -1, -2)
    # where: 0 times a NaN behind `ends` would be NaN.
    kept = k if ends is None else jnp.where(to_last == 0, 0.0, k)
    return Terms(u, w, q * since, times_decay(q), kept * to_last, decay)


def next_state(terms: Terms, state: jax.Array, ends: Any = None) -> tuple[jax.Array, jax.Array]:
    """(o, state) of chunks from the states before them.

    state: [..., num_v_heads, head_dim_k, head_dim_v], f32. Returns o: [..., chunk, num_v_heads,
    head_dim_v], f32, and the state after the chunk, or after `ends` as in chunk_terms.
    """
    fresh = terms.u
    if terms.w is not None:
        fresh = fresh - _product("...cd,...de->...ce", terms.w, state)
    o = _product("...cd,...de->...ce", terms.q, state) + _product(
        "...ij,...je->...ie", terms.qk, fresh
    )
    if ends is not None:
        counts = jnp.arange(fresh.shape[-2])[:, None] < jnp.asarray(ends)[..., None, None, None]
        fresh = jnp.where(counts, fresh, 0.0)
    state = terms.decay * state + _product("...cd,...ce->...de", terms.k, fresh)
    return jnp.moveaxis(o, -2, -3), state
