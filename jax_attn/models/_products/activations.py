"""Quantized activations: the rows of a product rounded to few bits, as the files of a model ask."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Kind = Literal["e4m3", "int8", "e2m1"]

_LARGEST = {"e4m3": 448.0, "int8": 127.0, "e2m1": 6.0}
_SMALLEST = {"e4m3": -448.0, "int8": -128.0, "e2m1": -6.0}
# The exponent of a format's smallest normal number, and its bits of mantissa.
_FLOATS = {"e4m3": (-6, 3), "e2m1": (0, 1)}
_TINY = float(np.finfo(np.float32).tiny)


@dataclasses.dataclass(frozen=True)
class Activations:
    """How the rows of x [n, in] are rounded before a product: to values of `kind` times a scale.

    Values and scales are those of compressed-tensors in f32.

    is_static: the scale is a number of the files. Otherwise it is the largest magnitude that shares
      it over the largest value of `kind`; of int8, over half of its range, 127.5.
    group_size: elements of a row that share a scale; None: all of them.
    limit: no row counts as larger for its scale (activation_scale_ub of fbgemm_fp8).
    powers: scales are rounded up to powers of two (scale_fmt ue8m0).

    e2m1 (NVFP4) has two scales: one of the files, and one in e4m3 for each group, relative to it.
    """

    kind: Kind
    is_static: bool = False
    group_size: int | None = None
    limit: float | None = None
    powers: bool = False

    @property
    def needs_scale(self) -> bool:
        """Whether the files have a scale of the matrix's input."""
        return self.is_static or self.kind == "e2m1"


class Rounded(NamedTuple):
    """values: [n, in], numbers of the kind, in x's dtype. scales: f32, [n, 1] or [1, 1]; of groups
    [n, in]."""

    values: jax.Array
    scales: jax.Array

    def product(self) -> jax.Array:
        """values * scales in x's dtype, [n, in]."""
        return (self.values.astype(jnp.float32) * self.scales).astype(self.values.dtype)


def rounded(x: jax.Array, how: Activations, of_files: Any = None) -> Rounded:
    """Rounds x [n, in]. of_files: the scale of the files, f32, [1, 1] or [n, 1]; None: none."""
    x32 = x.astype(jnp.float32)
    if how.is_static:
        scales = of_files
    elif how.group_size is None:
        scales = _scales(x32, how, of_files)
    else:
        depth, size = x.shape[1], how.group_size
        groups = jnp.pad(x32, ((0, 0), (0, -depth % size))).reshape(len(x), -1, size)
        scales = _scales(groups, how, None if of_files is None else of_files[..., None])
        scales = jnp.broadcast_to(scales, groups.shape).reshape(len(x), -1)[:, :depth]
    return Rounded(_nearest(_divided(x32, scales), how.kind).astype(x.dtype), scales)


def _divided(x: jax.Array, divisor: Any) -> jax.Array:
    """x / divisor, which is broadcast.

    XLA would multiply by the reciprocal of a constant, and since jaxlib 0.10.2 of any number for
    several elements: an ulp off, which counts, as the largest magnitude of int8 is a tie, 127.5
    steps. So each element has a divisor of its own.
    """
    return x / jnp.where(jnp.isnan(x), x, divisor)


def _scales(x: jax.Array, how: Activations, of_files: Any) -> jax.Array:
    """[..., 1] for x [..., elements that share a scale]."""
    largest = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    if how.limit is not None:
        largest = jnp.minimum(largest, how.limit)
    scales = _divided(largest, 127.5 if how.kind == "int8" else _LARGEST[how.kind])
    if how.powers:
        bits = jax.lax.bitcast_convert_type(scales, jnp.int32)
        exponents = (bits + 0x7FFFFF) & ~0x7FFFFF
        scales = jax.lax.bitcast_convert_type(exponents, jnp.float32)
    if how.kind == "e2m1":
        # A group of zeros has the scale that compressed-tensors gives it.
        inner = _nearest(_divided(scales, of_files), "e4m3")
        scales = jnp.where(inner == 0, 0.125, inner) * of_files
    return jnp.maximum(scales, _TINY)  # a row of zeros


def _nearest(x: jax.Array, kind: Kind) -> jax.Array:
    """Rounds f32 to the nearest number of a kind, ties to even; NaN stays NaN.

    By arithmetic: XLA may leave out a conversion to a narrow type and back.
    """
    x = jnp.clip(x, _SMALLEST[kind], _LARGEST[kind])
    if kind == "int8":
        return jnp.round(x)
    exponent, bits = _FLOATS[kind]
    step = 2.0 ** (exponent - bits)  # of the subnormals
    normal = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=bits)
    return jnp.where(jnp.abs(x) < 2.0**exponent, jnp.round(x / step) * step, normal)
