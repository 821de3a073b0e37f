"""Products of each row with the matrix of its group: csrc/cuda/sm90/grouped_product.cuh."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_attn import _core
from jax_attn._spec.spec import dtype_code
from jax_attn._spec.target import gpu_target
from jax_attn._xla import ffi

MAX_GROUPS = 1024  # kMaxProductGroups
_VECTOR = 8  # elements of one copy; depth and columns are multiples of it
_TILE_COLUMNS = {64: (64, 128, 256), 128: (128, 256)}
# Rows of a group, on average, above which tiles have 128 rows: then many groups have more than 64,
# and would read their matrix twice. A guess, not measured.
_FEW_ROWS = 48
# What a tile costs beside its columns, in columns: its rows of x, and the result. A guess, too.
_TILE_COST = 48


class Tiles(NamedTuple):
    rows: int
    columns: int


def supports(x: jax.Array, weights: jax.Array) -> bool:
    """Whether the kernel multiplies x [n, in] with weights [groups, in, out] on this GPU."""
    target = gpu_target()
    groups, depth, columns = weights.shape
    return (
        target is not None
        and target[0] == 90
        and x.dtype == weights.dtype
        and x.dtype in (jnp.bfloat16, jnp.float16)
        and 0 < len(x) < 1 << 24
        and 0 < groups <= MAX_GROUPS
        and all(0 < size < 1 << 18 and size % _VECTOR == 0 for size in (depth, columns))
        and not any(any(jax.typeof(a).sharding.spec) for a in (x, weights))
    )


def product(
    x: jax.Array, weights: jax.Array, group_sizes: jax.Array, transposed: bool = False
) -> jax.Array:
    """Multiplies each row of x [n, in] by the matrix of its group -> [n, out]; see `supports`.

    weights: [groups, in, out], if transposed [groups, out, in]. group_sizes: [groups] i32, sum at
      most n; rows beyond the sum become zeros.

    Derivatives are those of ragged_dot, vmap is a loop. XLA's partitioner keeps weights that are
    split, in any way; it gathers x.
    """
    is_manual = bool(jax.sharding.get_abstract_mesh().manual_axes)
    call = functools.partial(_product if is_manual else _on_mesh, transposed)
    differentiable = jax.custom_jvp(jax.custom_batching.sequential_vmap(call))

    @differentiable.defjvp
    def tangent(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
        otherwise = functools.partial(in_xla, transposed=transposed)
        return differentiable(*primals), jax.jvp(otherwise, primals, tangents)[1]

    y: jax.Array = differentiable(x, weights, jnp.asarray(group_sizes, jnp.int32))
    return y


def in_xla(
    x: jax.Array, weights: jax.Array, group_sizes: jax.Array, transposed: bool = False
) -> jax.Array:
    """The same by ragged_dot, which on GPUs multiplies all rows by the matrices of all groups."""
    return jax.lax.ragged_dot(x, weights.swapaxes(1, 2) if transposed else weights, group_sizes)


def choose_tiles(num_rows: int, groups: int, columns: int, processors: int) -> Tiles:
    """Returns the tiles with the shortest predicted time, if each row's group is random."""
    rows = 64 if num_rows <= _FEW_ROWS * groups else 128
    with_rows = groups * -math.expm1(-num_rows / groups)
    row_tiles = with_rows if rows == 64 else groups / 2 + num_rows / rows

    def cost(width: int) -> float:
        waves = -(-row_tiles * -(-columns // width) // processors)
        return waves * (width + _TILE_COST)

    # The widest one of equals has the fewest tiles.
    return Tiles(rows, min(reversed(_TILE_COLUMNS[rows]), key=cost))


def _product(
    transposed: bool, x: jax.Array, weights: jax.Array, group_sizes: jax.Array
) -> jax.Array:
    """Launches the kernel on one device."""
    _, processors = gpu_target() or (90, _core.default_processors(90))
    columns = weights.shape[1 if transposed else 2]
    tiles = choose_tiles(len(x), len(weights), columns, processors)
    return ffi.grouped_product(
        x,
        weights,
        group_sizes,
        transposed=transposed,
        tile_rows=tiles.rows,
        tile_columns=tiles.columns,
        dtype=dtype_code(x.dtype),
    )


_partitioned = custom_partitioning(_product, static_argnums=(0,))


def _partition(transposed: bool, mesh: Any, arguments: Any, result: Any) -> Any:
    groups, *sides = (*arguments[1].sharding.spec, None, None, None)[:3]
    depth, columns = reversed(sides) if transposed else sides

    def names(over: Any) -> tuple[str, ...]:
        return (over,) if isinstance(over, str) else tuple(over or ())

    def size(over: Any) -> int:
        return math.prod(mesh.shape[name] for name in names(over))

    num_groups, *lengths = arguments[1].shape
    depth_length, columns_length = reversed(lengths) if transposed else lengths
    # What is not split into whole vectors is gathered.
    groups = groups if num_groups % size(groups) == 0 else None
    depth = depth if depth_length % (size(depth) * _VECTOR) == 0 else None
    columns = columns if columns_length % (size(columns) * _VECTOR) == 0 else None

    def own(x: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
        # The kernel reads sizes like that: negative ones are 0, and no row is behind the last.
        ends = jnp.minimum(jnp.cumsum(jnp.maximum(group_sizes, 0)), len(x))
        group_sizes = jnp.diff(ends, prepend=0)
        if groups is None:
            y = _product(transposed, x, weights, group_sizes)
        else:
            # The rows of this device's groups go first; those behind them become zeros.
            first = jax.lax.axis_index(names(groups)) * len(weights)
            before = jnp.where(jnp.arange(len(group_sizes)) < first, group_sizes, 0).sum()
            sizes = jax.lax.dynamic_slice_in_dim(group_sizes, first, len(weights))
            y = _product(transposed, jnp.roll(x, -before, 0), weights, sizes)
            y = jnp.roll(y, before, 0)
        summed = names(groups) + names(depth)
        return jax.lax.psum(y, summed) if summed else y

    of_weights = P(groups, columns, depth) if transposed else P(groups, depth, columns)
    shardings = (P(None, depth), of_weights, P())
    made = tuple(NamedSharding(mesh, sharding) for sharding in shardings)
    return mesh, own, NamedSharding(mesh, P(None, columns)), made


def _rule(transposed: bool, mesh: Any, arguments: Any, result: Any) -> str:
    return "m k, g n k, s -> m n" if transposed else "m k, g k n, s -> m n"


_partitioned.def_partition(partition=_partition, sharding_rule=_rule)


@functools.partial(jax.jit, static_argnums=0)
def _on_mesh(transposed: bool, *arrays: jax.Array) -> jax.Array:
    y: jax.Array = _partitioned(transposed, *arrays)
    return y
