"""A mixture of experts: routing of tokens to experts, and the grouped matmul."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_attn.models._config.config import ExpertGroups, Experts
from jax_attn.models._products import grouped_cuda
from jax_attn.models._products.activations import rounded
from jax_attn.models._products.panels import Panels
from jax_attn.models._products.quantized import (
    Matrix,
    Quantized,
    grouped_product,
    tiled_product,
    widen,
    without_activations,
)

_TILE = 32  # rows of one matmul of the CPU's loop


def route(
    logits: jax.Array, correction: jax.Array | None, experts: Experts
) -> tuple[jax.Array, jax.Array]:
    """Returns each token's expert weights [n, per_token] f32 and expert ids [n, per_token] i32.

    logits: [n, count] f32. correction: [count], [count, 1] or None. Affects the choice, not the
      weights.
    """
    if experts.scales_input:
        best, chosen = jax.lax.top_k(logits, experts.per_token)
        return jax.nn.sigmoid(best), chosen
    if experts.sparse_mixer is not None:
        return _sparse_mixer(logits, experts.sparse_mixer)
    scores = jax.nn.sigmoid(logits) if experts.sigmoid else jax.nn.softmax(logits)
    choice = scores if correction is None else scores + correction.astype(jnp.float32).reshape(-1)
    if experts.groups is not None:
        choice = _of_best_groups(choice, experts.groups)
    _, chosen = jax.lax.top_k(choice, experts.per_token)
    scores = jnp.take_along_axis(scores, chosen, axis=1)
    if experts.normalize:
        scores /= scores.sum(-1, keepdims=True) + experts.normalize_eps
    return scores * experts.scale, chosen


def _sparse_mixer(logits: jax.Array, jitter: float) -> tuple[jax.Array, jax.Array]:
    """Chooses two experts as `route` (arXiv 2409.12136), in inference.

    The weight of each is its probability among the experts that are at most 2 * jitter below it,
    relative to the larger magnitude; the second is chosen without the first.
    """

    def choose(left: jax.Array) -> tuple[jax.Array, jax.Array]:
        best, chosen = left.max(-1, keepdims=True), left.argmax(-1)[:, None]
        distance = (best - logits) / jnp.maximum(jnp.abs(logits), best)
        near = jnp.where(distance > 2 * jitter, -jnp.inf, left)
        return jnp.take_along_axis(jax.nn.softmax(near), chosen, axis=1), chosen

    weight, first = choose(logits)
    is_first = jnp.arange(logits.shape[1])[None] == first
    other, second = choose(jnp.where(is_first, -jnp.inf, logits))
    return jnp.concatenate([weight, other], 1), jnp.concatenate([first, second], 1)


def _of_best_groups(choice: jax.Array, groups: ExpertGroups) -> jax.Array:
    """Masks experts of other groups with -inf (DeepSeek-V3, arXiv 2412.19437, section 2.1.2)."""
    by_group = choice.reshape(len(choice), groups.count, -1)
    best, _ = jax.lax.top_k(by_group, 2 if groups.by_two else 1)
    _, chosen = jax.lax.top_k(best.sum(-1), groups.chosen)
    is_chosen = jnp.zeros(by_group.shape[:2], bool).at[jnp.arange(len(choice))[:, None], chosen]
    return jnp.where(is_chosen.set(True)[..., None], by_group, -jnp.inf).reshape(choice.shape)


def grouped_matmul(x: jax.Array, weights: Matrix | Panels, group_sizes: jax.Array) -> jax.Array:
    """Multiplies each row by the matrix of its group: -> [n, out].

    x: [n, in], sorted by group. weights: [groups, in, out]. group_sizes: [groups] i32, sum at most
    n; rows beyond the sum have undefined products. Differentiable in x and in weights that are not
    quantized, if the sum is n.

    Only matrices of groups with rows are read. On GPUs that needs the kernel of Hopper, for 16 bits
    (grouped_cuda.supports); without it ragged_dot multiplies all rows by all matrices. Quantized
    ones with fewer rows than groups are gathered there and widened; else all are widened.

    On CPUs, XLA computes ragged_dot as a matmul of all rows with all groups, so a loop over groups
    is used there, or the kernels of Panels and of codes. benchmarks/experts.py measures them.
    """
    if isinstance(weights, Panels):
        return _grouped_panels(x, weights, group_sizes)
    if isinstance(weights, Quantized):
        if weights.activations is not None:
            of_rows = weights.x_scale
            if of_rows is not None:
                of_rows = of_rows[_groups_of_rows(len(x), group_sizes), 0]
            x = rounded(x, weights.activations, of_rows).product()
            weights = without_activations(weights)
        return _grouped(x, weights, group_sizes)
    return _grouped_plain(x, weights, group_sizes)


def _grouped(x: jax.Array, weights: Matrix, group_sizes: jax.Array) -> jax.Array:
    has_kernel = isinstance(weights, Quantized) and not weights.is_transposed
    on_cpu = grouped_product if has_kernel else _loop_over_groups
    return jax.lax.platform_dependent(x, weights, group_sizes, cpu=on_cpu, default=_on_gpu)


# The CPU's loop has as many steps as there are tiles, which JAX cannot run backward.
@jax.custom_vjp
def _grouped_plain(x: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
    return _grouped(x, weights, group_sizes)


def _grouped_fwd(x: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> tuple[Any, Any]:
    return _grouped(x, weights, group_sizes), (x, weights, group_sizes)


def _grouped_bwd(saved: Any, d_y: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x, weights, group_sizes = saved
    d_x = jax.lax.platform_dependent(
        d_y, weights, group_sizes, cpu=_transposed_loop, default=_transposed_on_gpu
    )
    d_weights = jax.lax.platform_dependent(
        x, weights, group_sizes, d_y, cpu=_weight_gradients, default=_ragged_weight_gradients
    )
    return d_x, d_weights, None


_grouped_plain.defvjp(_grouped_fwd, _grouped_bwd)


@jax.custom_vjp
def _grouped_panels(x: jax.Array, weights: Panels, group_sizes: jax.Array) -> jax.Array:
    return weights.grouped_product(x, group_sizes)


def _grouped_panels_fwd(
    x: jax.Array, weights: Panels, group_sizes: jax.Array
) -> tuple[jax.Array, Any]:
    return weights.grouped_product(x, group_sizes), (x, weights, group_sizes)


def _grouped_panels_bwd(saved: Any, d_y: jax.Array) -> tuple[jax.Array, Panels, None]:
    x, weights, group_sizes = saved
    matrices, pull = jax.vjp(Panels.unpacked, weights)
    d_x, d_matrices, _ = _grouped_bwd((x, matrices, group_sizes), d_y)
    return d_x, *pull(d_matrices), None


_grouped_panels.defvjp(_grouped_panels_fwd, _grouped_panels_bwd)


def _ragged_weight_gradients(
    x: jax.Array, weights: jax.Array, group_sizes: jax.Array, d_y: jax.Array
) -> jax.Array:
    _, pull = jax.vjp(lambda weights: grouped_cuda.in_xla(x, weights, group_sizes), weights)
    (d_weights,) = pull(d_y)
    return d_weights


def _weight_gradients(
    x: jax.Array, weights: jax.Array, group_sizes: jax.Array, d_y: jax.Array
) -> jax.Array:
    """x^T d_y over the rows of each group: [groups, in, out]."""
    tiles = _Tiles(len(x), group_sizes)

    def add_tile(group: jax.Array, i: jax.Array, sums: jax.Array) -> jax.Array:
        first, is_own = tiles.rows(group, i)
        rows = jax.lax.dynamic_slice_in_dim(x, first, tiles.size)
        d_rows = jax.lax.dynamic_slice_in_dim(d_y, first, tiles.size)
        rows = jnp.where(is_own[:, None], rows, 0)
        return sums + jnp.dot(rows.T, d_rows, preferred_element_type=jnp.float32)

    def of_group(group: jax.Array) -> jax.Array:
        zeros = jnp.zeros(weights.shape[1:], jnp.float32)
        sums = jax.lax.fori_loop(0, tiles.count(group), lambda i, y: add_tile(group, i, y), zeros)
        return sums.astype(weights.dtype)

    return jax.lax.map(of_group, jnp.arange(len(group_sizes)))


def _on_gpu(x: jax.Array, weights: Matrix, group_sizes: jax.Array) -> jax.Array:
    if isinstance(weights, Quantized) and len(x) < len(group_sizes):
        return _of_own_groups(x, weights, group_sizes)
    return _plain_on_gpu(x, widen(weights, x.dtype), group_sizes)


def _plain_on_gpu(
    x: jax.Array, weights: jax.Array, group_sizes: jax.Array, transposed: bool = False
) -> jax.Array:
    is_own = grouped_cuda.supports(x, weights)
    product = grouped_cuda.product if is_own else grouped_cuda.in_xla
    return product(x, weights, group_sizes, transposed)


def _transposed_on_gpu(x: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
    return _plain_on_gpu(x, weights, group_sizes, transposed=True)


def _transposed_loop(x: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
    return _loop_over_groups(x, weights.swapaxes(1, 2), group_sizes)


def _of_own_groups(x: jax.Array, weights: Quantized, group_sizes: jax.Array) -> jax.Array:
    """Gathers a matrix for each row, and widens those alone."""
    group = _groups_of_rows(len(x), group_sizes)
    own = jax.tree.map(lambda a: a[group], weights)
    return jnp.einsum("ni,nio->no", x, widen(own, x.dtype))


def _groups_of_rows(num_rows: int, group_sizes: jax.Array) -> jax.Array:
    """The group of each row, [num_rows] i32; the last one's for rows of none."""
    group = jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(num_rows), side="right")
    return jnp.minimum(group, len(group_sizes) - 1)


def _loop_over_groups(x: jax.Array, weights: Matrix, group_sizes: jax.Array) -> jax.Array:
    tiles = _Tiles(len(x), group_sizes)

    def add_tile(group: jax.Array, i: jax.Array, y: jax.Array) -> jax.Array:
        first, is_own = tiles.rows(group, i)
        weight = jax.tree.map(lambda a: a[group], weights)
        product = tiled_product(jax.lax.dynamic_slice_in_dim(x, first, tiles.size), weight)
        old = jax.lax.dynamic_slice_in_dim(y, first, tiles.size)
        return jax.lax.dynamic_update_slice_in_dim(
            y, jnp.where(is_own[:, None], product, old), first, 0
        )

    def add_group(group: jax.Array, y: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, tiles.count(group), lambda i, y: add_tile(group, i, y), y)

    y = jnp.zeros((len(x), weights.shape[2]), x.dtype)
    return jax.lax.fori_loop(0, len(group_sizes), add_group, y)


class _Tiles:
    """The rows of each group, some at a time."""

    def __init__(self, num_rows: int, group_sizes: jax.Array):
        self.size, self._last = min(num_rows, _TILE), max(0, num_rows - _TILE)
        self._sizes, self._ends = group_sizes, jnp.cumsum(group_sizes)

    def count(self, group: jax.Array) -> jax.Array:
        return (self._sizes[group] + self.size - 1) // max(1, self.size)

    def rows(self, group: jax.Array, i: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The first row of a tile, and which of its rows belong to the group's tile i."""
        end = self._ends[group]
        begin = end - self._sizes[group] + i * self.size
        first = jnp.minimum(begin, self._last)  # the last tile begins earlier, to stay inside
        rows = first + jnp.arange(self.size)
        return first, (rows >= begin) & (rows < end)
