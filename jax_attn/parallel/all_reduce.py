"""Sums over the devices of a mesh axis, with the residual and the RMS norm that follow them.

On GPUs of one process a kernel does all of it in one launch (csrc/cuda/any/all_reduce.cuh,
docs/notes/all_reduce.md). Elsewhere it is `jax.lax.psum` and the same arithmetic.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_attn import _core
from jax_attn._xla import ffi
from jax_attn._xla.transforms import refusing

_DTYPES = ("bfloat16", "float16", "float32")
_VECTOR_BYTES = 16
_MOST_THREADS = 512
_LARGEST_E4M3 = 448.0
_LONGEST_TIMEOUT = 1e6  # seconds; the kernel counts ns in 64 bits
# Bytes of x from which on devices send sums (two-shot) instead of rows, by the number of devices.
# One-shot sends x to N - 1 devices, two-shot 2 (N - 1) / N of it, after one more wait of some 4 us:
# with two devices that is no less. Predicted for 200 GB/s of each device to all others; not
# measured.
_TWO_SHOT_FROM = {
    3: 512 << 10,
    4: 384 << 10,
    5: 256 << 10,
    6: 256 << 10,
    7: 192 << 10,
    8: 192 << 10,
}
# Bytes of x from which on XLA's all-reduce is faster: of a sum alone, and with a norm. Measured on
# two H200s (docs/notes/all_reduce.md); more devices are taken to be like them.
_XLA_FROM = {False: 8 << 20, True: 16 << 20}
_numbers = itertools.count(1)  # of call sites


class _Norm(NamedTuple):
    """What follows the sum; has_norm False: nothing but the residual."""

    has_norm: bool
    offset: float
    eps: float
    quantize: bool


def all_reduce(
    x: jax.Array,
    axis_name: str,
    *,
    mesh: jax.sharding.Mesh | None = None,
    residual: jax.Array | None = None,
    norm_weight: jax.Array | None = None,
    norm_offset: float = 0.0,
    eps: float = 1e-6,
    quantize: bool = False,
    timeout: float = 20.0,
) -> Any:
    """Sum x over a mesh axis, inside jax.shard_map; then add a residual and apply an RMS norm.

    The sum is in f32, in the order of the devices on the axis, and is rounded to the dtype of x
    once; all devices get the same bits, in every run. XLA's all-reduce, where it is used, has an
    order of its own on GPUs.

    Args:
      x: [..., columns], bfloat16, float16 or float32. This device's part of the sum.
      axis_name: an axis of the shard_map.
      mesh: the mesh of the shard_map, which JAX does not tell inside. With it, GPUs of this process
        that can map each other's memory sum by one kernel, without NCCL. None: XLA's all-reduce.
        It is also used for other devices, for several processes, for more than 8 devices on the
        axis, for rows of more than 16 KB or not of whole 16 bytes, under check_vma=True, and for
        arrays of so many MB that it is faster.
      residual: like x, the same on all devices: added to the rounded sum. None: nothing is.
      norm_weight: [columns], dtype of x. None: no norm.
      norm_offset: the norm multiplies by norm_offset + norm_weight.
      eps: added to the mean square.
      quantize: the normed rows as float8_e4m3fn, each with a scale of its own. Not for float32.
      timeout: seconds, up to 1e6, after which a device that waits for another gives up. Results are
        NaN then, and later calls raise JaxRuntimeError; see `check_all_reduces`.

    Returns:
      total: like x, residual + sum; alone without norm_weight. With it (total, normed), normed like
      x: RMSNorm(total), in f32 and rounded. With quantize (total, codes, scales): codes [...,
      columns] float8_e4m3fn, scales [...] f32; normed is codes * scales.

    Gradients are those of the sum by `jax.lax.psum`, which their computation repeats.

    Raises:
      ValueError: an axis or mesh that is not the shard_map's, other shapes or dtypes, a timeout out
        of range.
      NotImplementedError: under vmap, where the kernel is used.
    """
    _check(x, axis_name, mesh, residual, norm_weight, quantize, timeout)
    norm = _Norm(norm_weight is not None, norm_offset, eps, quantize)
    groups = None if mesh is None else _groups(x, axis_name, mesh, norm.has_norm)
    operands = tuple(a for a in (x, residual, norm_weight) if a is not None)
    plain = functools.partial(_plain, axis_name, norm, residual is not None)
    if groups is None or x.size == 0:
        return plain(*operands)

    @jax.custom_vjp
    def fused(*operands: jax.Array) -> Any:
        return _by_kernel(operands, groups, norm, residual is not None, timeout)

    def forward(*operands: jax.Array) -> Any:
        return fused(*operands), operands

    fused.defvjp(forward, lambda operands, gradients: jax.vjp(plain, *operands)[1](gradients))
    return fused(*operands)


def check_all_reduces() -> None:
    """Raise RuntimeError, in one sentence, if devices have given up in an all-reduce.

    Results of that step and of later ones are NaN. Costs less than a microsecond: call it after the
    results of a step were read.
    """
    if fault := _core.all_reduce_fault():
        raise RuntimeError(fault)


def _check(
    x: jax.Array,
    axis_name: str,
    mesh: jax.sharding.Mesh | None,
    residual: jax.Array | None,
    norm_weight: jax.Array | None,
    quantize: bool,
    timeout: float,
) -> None:
    inside = jax.sharding.get_abstract_mesh()
    if axis_name not in inside.manual_axes:
        raise ValueError(
            "all_reduce: axis_name: expected an axis of the jax.shard_map around the call,"
            f" {tuple(inside.manual_axes)}, got {axis_name!r}."
        )
    if mesh is not None and dict(mesh.shape) != dict(inside.shape):
        raise ValueError(
            f"all_reduce: mesh: expected that of the shard_map, {dict(inside.shape)}, got"
            f" {dict(mesh.shape)}."
        )
    if x.ndim == 0 or x.dtype.name not in _DTYPES:
        raise ValueError(
            f"all_reduce: x: expected [..., columns] of {', '.join(_DTYPES)}, got"
            f" {x.dtype.name}{list(x.shape)}."
        )
    for name, array, shape in (
        ("residual", residual, x.shape),
        ("norm_weight", norm_weight, x.shape[-1:]),
    ):
        if array is not None and (array.shape != shape or array.dtype != x.dtype):
            raise ValueError(
                f"all_reduce: {name}: expected {x.dtype.name}{list(shape)}, got"
                f" {array.dtype.name}{list(array.shape)}."
            )
    if quantize and (norm_weight is None or x.dtype.name == "float32"):
        raise ValueError(
            "all_reduce: quantize: expected norm_weight, and bfloat16 or float16, got"
            f" {'no norm_weight' if norm_weight is None else x.dtype.name}."
        )
    if not 0 < timeout <= _LONGEST_TIMEOUT:
        raise ValueError(
            f"all_reduce: timeout: expected seconds above 0, up to {_LONGEST_TIMEOUT:.0e}, got"
            f" {timeout}."
        )


# --- by XLA ---


def _plain(axis_name: str, norm: _Norm, has_residual: bool, *operands: jax.Array) -> Any:
    x = operands[0]
    # XLA on CPUs sums in the order of devices: bfloat16 in f32, but float16 in float16.
    total = lax.psum(x.astype(jnp.float32) if x.dtype == jnp.float16 else x, axis_name)
    total = total.astype(x.dtype)
    if has_residual:
        total = operands[1] + total
    if not norm.has_norm:
        return total
    x32 = total.astype(jnp.float32)
    variance = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
    scale = norm.offset + operands[-1].astype(jnp.float32)
    scale = scale.reshape(*(1,) * (total.ndim - 1), -1)
    normed = (x32 * lax.rsqrt(variance + norm.eps) * scale).astype(total.dtype)
    if not norm.quantize:
        return total, normed
    normed32 = normed.astype(jnp.float32)
    largest = jnp.max(jnp.abs(normed32), axis=-1)
    scales = jnp.where(largest > 0, largest / _LARGEST_E4M3, 1.0)
    return total, (normed32 / scales[..., None]).astype(jnp.float8_e4m3fn), scales


# --- by the kernel ---


def _groups(
    x: jax.Array, axis_name: str, mesh: jax.sharding.Mesh, has_norm: bool
) -> tuple[tuple[int, ...], ...] | None:
    """The devices that sum, group by group, as CUDA numbers them; None: XLA sums."""
    if axis_name in jax.typeof(x).manual_axis_type.varying:
        return None  # JAX cannot be told that the kernel's results are the same on all devices
    if x.nbytes >= _XLA_FROM[has_norm] or _row_vectors(x, has_norm) is None:
        return None
    return _groups_of(mesh, axis_name)


@functools.cache
def _groups_of(mesh: jax.sharding.Mesh, axis_name: str) -> tuple[tuple[int, ...], ...] | None:
    devices = mesh.devices
    size = mesh.shape[axis_name]
    if not 2 <= size <= _core.max_reducers:
        return None
    own_process = jax.process_index()
    if any(d.platform != "gpu" or d.process_index != own_process for d in devices.flat):
        return None
    axis = mesh.axis_names.index(axis_name)
    rows = np.moveaxis(devices, axis, -1).reshape(-1, size)
    groups = tuple(tuple(int(d.local_hardware_id) for d in row) for row in rows)
    return groups if all(_core.can_access_peers(list(group)) for group in groups) else None


def _row_vectors(x: jax.Array, has_norm: bool) -> int | None:
    """Vectors of 16 bytes of the rows that the kernel sees; None: it does not take x.

    Without a norm rows are of any length that divides the array: 8 KB at most, so that several
    CTAs share a small array.
    """
    width = _VECTOR_BYTES // x.dtype.itemsize
    size = x.shape[-1] if has_norm else x.size
    if size == 0 or size % width:
        return None
    vectors = size // width
    if has_norm:
        return vectors if vectors * _VECTOR_BYTES <= _core.all_reduce_row_bytes else None
    return next(n for n in range(min(vectors, _MOST_THREADS), 0, -1) if vectors % n == 0)


def _by_kernel(
    operands: tuple[jax.Array, ...],
    groups: tuple[tuple[int, ...], ...],
    norm: _Norm,
    has_residual: bool,
    timeout: float,
) -> Any:
    x = operands[0]
    row_vectors = _row_vectors(x, norm.has_norm)
    assert row_vectors is not None
    columns = row_vectors * _VECTOR_BYTES // x.dtype.itemsize
    num_rows, size = x.size // columns, len(groups[0])
    two_shot = x.nbytes >= _TWO_SHOT_FROM.get(size, math.inf)
    pieces = -(-num_rows // size) if two_shot else num_rows
    vectors = -(-row_vectors // _MOST_THREADS)
    attributes = {
        "devices": np.asarray(groups, np.int64).reshape(-1),
        "group_size": np.int64(size),
        "num_threads": np.int64(-(-row_vectors // vectors // 32) * 32),
        "vectors": np.int64(vectors),
        "num_ctas": np.int64(min(pieces, _core.all_reduce_ctas)),
        "call": np.int64(next(_numbers) % 2**31),
        "limit": np.int64(max(1, round(1000 * timeout))),
        "two_shot": two_shot,
        "residual": has_residual,
        "norm": norm.has_norm,
        "quantizes": norm.quantize,
        "eps": np.float32(norm.eps),
        "norm_offset": np.float32(norm.offset),
    }
    call = refusing(
        "all_reduce",
        lambda operands, attributes: ffi.all_reduce(operands, **attributes),
        vmap="put the batch into the rows of x",
    )
    rows = tuple(a.reshape(-1, columns) if i <= has_residual else a for i, a in enumerate(operands))
    total, *more = call(rows, attributes)
    total = total.reshape(x.shape)
    if not norm.has_norm:
        return total
    normed = more[0].reshape(x.shape)
    return (total, normed, more[1].reshape(x.shape[:-1])) if norm.quantize else (total, normed)
