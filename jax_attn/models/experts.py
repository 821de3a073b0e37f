"""A mixture of experts: which expert takes which token, and a product of each with its own."""

from __future__ import annotations

import jax
import jax.numpy as jnp

_TILE = 32  # rows of one product of the CPU's loop


def route(logits: jax.Array, per_token: int, normalize: bool) -> tuple[jax.Array, jax.Array]:
    """logits: [n, experts] f32 -> scores [n, per_token] f32, experts [n, per_token] i32.

    The likeliest experts of each token and their probabilities; with `normalize` these add up to 1.
    """
    scores, experts = jax.lax.top_k(jax.nn.softmax(logits), per_token)
    return scores / scores.sum(-1, keepdims=True) if normalize else scores, experts


def grouped_matmul(x: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """x: [n, in], sorted by group; weights: [groups, in, out]; group_sizes: [groups] i32, n in all
    -> [n, out]: each row times the matrix of its group.

    On CPU XLA computes ragged_dot as a product of all rows with all groups, so that there it is a
    loop over groups. Measured (2 cores, 32 groups of [1024, 1024]): 4, 32 and 1,024 rows in 17, 35
    and 55 ms, ragged_dot 440, 350 and 2,030.
    """
    return jax.lax.platform_dependent(
        x, weights, group_sizes, cpu=_loop_over_groups, default=jax.lax.ragged_dot
    )


def _loop_over_groups(x: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
    n, tile = len(x), min(len(x), _TILE)
    ends = jnp.cumsum(group_sizes)
    begins = ends - group_sizes

    def add_tile(group: jax.Array, i: jax.Array, y: jax.Array) -> jax.Array:
        begin = begins[group] + i * tile
        first = jnp.minimum(begin, n - tile)  # a tile at the end begins earlier
        rows = first + jnp.arange(tile)
        is_own = (rows >= begin) & (rows < ends[group])
        product = jax.lax.dynamic_slice_in_dim(x, first, tile) @ weights[group]
        old = jax.lax.dynamic_slice_in_dim(y, first, tile)
        return jax.lax.dynamic_update_slice_in_dim(
            y, jnp.where(is_own[:, None], product, old), first, 0
        )

    def add_group(group: jax.Array, y: jax.Array) -> jax.Array:
        num_tiles = (group_sizes[group] + tile - 1) // tile
        return jax.lax.fori_loop(0, num_tiles, lambda i, y: add_tile(group, i, y), y)

    y = jnp.zeros((n, weights.shape[2]), x.dtype)
    return jax.lax.fori_loop(0, len(group_sizes), add_group, y)
