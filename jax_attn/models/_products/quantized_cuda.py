"""Matmuls of few rows with quantized matrices on CUDA (csrc/cuda/sm80/quantized_product.cuh)."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_attn import _core
from jax_attn._spec.spec import dtype_code
from jax_attn._spec.target import default_target, parse_target
from jax_attn._xla import ffi

FORMATS = {"int4": 0, "e2m1": 1, "e4m3": 2}  # WeightFormat of csrc/params.h
# Rows of x. With more rows a widened copy of the matrix should cost less than decoding it again:
# a guess, not measured.
MAX_ROWS = 256
_STEP = 64  # rows of the matrix, kProductStep
_VECTOR = 16  # bytes of one copy; columns are a multiple of it

# Rows of x and columns of the matrix per CTA. Accumulators of 64 rows take half of the registers.
# 224 columns fill 132 multiprocessors in cases where 256 leave some idle; a warpgroup has 128.
_TILE_ROWS = (8, 16, 32, 64)
_TILE_COLUMNS, _WGMMA_TILE_COLUMNS = (256, 224), (256, 128)
# Rows of x from which on Hopper's kernel is that with wgmma (csrc/cuda/sm90/quantized_product.cuh).
# Measured on an H200 with 64 rows: 4 to 17 % faster. Fewer rows were not measured.
_fewest_wgmma_rows = 33
# Latency until the first step has arrived, in bytes that a multiprocessor reads in that time.
_START = 32 << 10


class Matrix(NamedTuple):
    """The specialization of a call, beside shapes and dtypes."""

    kind: str  # a key of FORMATS
    group_size: int
    dtype: Any  # dtype of the result


class Tiles(NamedTuple):
    rows: int
    columns: int
    num_splits: int  # parts of the depth (split-K), each with its own partial sums


def supports(x: jax.Array, codes: jax.Array, scales: jax.Array, kind: str, group_size: int) -> bool:
    """Whether the kernel supports x [n, in] and the matrix, which must not be a stack.

    False for e4m3 with one scale per column: XLA's own kernel is as fast there.
    """
    if kind not in FORMATS or codes.ndim != 2 or any(jax.typeof(x).sharding.spec):
        return False
    (num_rows, depth), columns, groups = x.shape, codes.shape[1], len(scales)
    has_groups = groups > 1 and (group_size % _STEP == 0 or group_size == _STEP // 2)
    return (
        0 < num_rows <= MAX_ROWS
        and x.dtype in (jnp.bfloat16, jnp.float16)
        and scales.dtype == (jnp.uint8 if kind == "e2m1" else jnp.float32)
        and depth % 8 == 0
        and columns % _VECTOR == 0
        and (has_groups or (groups == 1 and kind != "e4m3"))
        and not any(any(jax.typeof(a).sharding.spec) for a in (codes, scales))
    )


def product(
    x: jax.Array,
    codes: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
    matrix: Matrix,
    otherwise: Callable[..., jax.Array],
) -> jax.Array:
    """Computes x [n, in] @ the matrix -> [n, out], for arrays that `supports` accepts.

    otherwise(x, codes, scales[, zeros]): the same in XLA, used for vmap and derivatives.
    XLA's partitioner keeps arrays split by rows of x or by columns; it gathers other shardings.
    """
    operands = (x, codes, scales) if zeros is None else (x, codes, scales, zeros)
    is_manual = bool(jax.sharding.get_abstract_mesh().manual_axes)
    call = functools.partial(_product if is_manual else _on_mesh, matrix)

    mapped = jax.custom_batching.custom_vmap(call)

    def in_xla(_: int, is_mapped: list[bool], *arrays: jax.Array) -> tuple[jax.Array, bool]:
        return jax.vmap(otherwise, [0 if m else None for m in is_mapped])(*arrays), True

    mapped.def_vmap(in_xla)
    differentiable = jax.custom_jvp(mapped)

    @differentiable.defjvp
    def tangent(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
        return mapped(*primals), jax.jvp(otherwise, primals, tangents)[1]

    y: jax.Array = differentiable(*operands)
    return y


def choose_tiles(
    num_rows: int, depth: int, columns: int, bits: int, processors: int, has_wgmma: bool = False
) -> Tiles:
    """Returns the tiles and the split with the shortest predicted time. bits: per value."""
    all_columns = _WGMMA_TILE_COLUMNS if has_wgmma else _TILE_COLUMNS
    rows = next((n for n in _TILE_ROWS if n >= num_rows), _TILE_ROWS[-1])
    steps = -(-depth // _STEP)

    def cost(tiles: Tiles) -> float:
        """Predicted time, in bytes of the matrix that a multiprocessor could read in it."""
        num_ctas = -(-num_rows // rows) * -(-columns // tiles.columns) * tiles.num_splits
        # x and partial sums come from L2, twice as fast.
        step_bytes = _STEP * (tiles.columns * bits / 8 + rows)
        own_steps = -(-steps // tiles.num_splits)
        waves = -(-num_ctas // processors)
        sums = 0 if tiles.num_splits == 1 else 4 * tiles.num_splits * num_rows * columns
        # The other width needs one more kernel to be compiled.
        factor = 1 if tiles.columns == all_columns[0] else 1.04
        return factor * waves * (own_steps * step_bytes + _START) + sums / processors

    splits = range(1, min(steps, 32) + 1)
    return min((Tiles(rows, c, s) for c in all_columns for s in splits), key=cost)


def _product(
    matrix: Matrix,
    x: jax.Array,
    codes: jax.Array,
    scales: jax.Array,
    *zeros: jax.Array,
) -> jax.Array:
    """Launches the kernel on one device. zeros: one array, or none."""
    arch, processors = parse_target(default_target())
    if arch == 0:  # lowering for a device that this machine lacks
        processors = _core.default_processors(90)
    bits = 8 if matrix.kind == "e4m3" else 4
    num_rows, depth = x.shape
    has_wgmma = num_rows >= _fewest_wgmma_rows and arch == 90
    tiles = choose_tiles(num_rows, depth, codes.shape[1], bits, processors, has_wgmma)
    is_own = tiles.num_splits == 1 and matrix.dtype in (x.dtype, jnp.float32)
    y = ffi.quantized_product(
        x,
        codes,
        scales,
        *(zeros or [jnp.zeros((0, 0), jnp.uint8)]),
        num_splits=tiles.num_splits,
        dtype=matrix.dtype if is_own else jnp.float32,
        arch=arch,
        x_dtype=dtype_code(x.dtype),
        format=FORMATS[matrix.kind],
        group_size=matrix.group_size,
        tile_rows=tiles.rows,
        tile_columns=tiles.columns,
        main_loop=int(has_wgmma),
    )
    # A chain of adds, not a reduction, so that XLA can fuse it with the next op.
    return functools.reduce(operator.add, y).astype(matrix.dtype)


_partitioned = custom_partitioning(_product, static_argnums=(0,))


def _partition(matrix: Matrix, mesh: Any, arguments: Any, result: Any) -> Any:
    x, codes = arguments[:2]
    rows, columns = x.sharding.spec[:1], codes.sharding.spec[1:2]
    over_rows, over_columns = (spec[0] if spec else None for spec in (rows, columns))

    def size(over: Any) -> int:
        names = (over,) if isinstance(over, str) else over or ()
        return functools.reduce(operator.mul, (mesh.shape[name] for name in names), 1)

    if codes.shape[1] % (size(over_columns) * _VECTOR):
        over_columns = None
    if over_columns is not None and x.shape[0] % size(over_rows):
        over_rows = None
    splits = (P(over_rows), *[P(None, over_columns)] * (len(arguments) - 1))
    own = functools.partial(_product, matrix)
    shardings = tuple(NamedSharding(mesh, split) for split in splits)
    return mesh, own, NamedSharding(mesh, P(over_rows, over_columns)), shardings


def _rule(matrix: Matrix, mesh: Any, arguments: Any, result: Any) -> str:
    groups = ", ".join("g n" for _ in arguments[2:])
    return f"m k, r n, {groups} -> m n"


_partitioned.def_partition(partition=_partition, sharding_rule=_rule)


@functools.partial(jax.jit, static_argnums=0)
def _on_mesh(matrix: Matrix, *arrays: jax.Array) -> jax.Array:
    y: jax.Array = _partitioned(matrix, *arrays)
    return y
