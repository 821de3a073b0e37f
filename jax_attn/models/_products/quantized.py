"""Quantized matrices: stored in few bits, and widened (dequantized) inside the matmul.

quantized_files.py reads the file formats of each quantization method.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jax_attn._spec.target import gpu_target
from jax_attn._xla import ffi
from jax_attn.models._products import quantized_cuda
from jax_attn.models._products.activations import Activations, Rounded, rounded
from jax_attn.models._products.lora import Adapted
from jax_attn.models._products.panels import Panels

Array = Any  # of numpy or JAX
Kind = Literal["int8", "int4", "e4m3", "e2m1"]
"""What a code is: a signed integer; an unsigned one of 4 bits; an element of OCP 8-bit floating
point, or of 4-bit (Microscaling Formats, version 1.0)."""

# Conversion of quantized values to the bits of an f16: the shift of the sign, the shift of the
# rest, and the factor for the f16. The factor corrects the exponent bias: 15 for f16, 7 for e4m3,
# 1 for e2m1. f16 conversions keep subnormals, which f32 would flush to zero.
_SHIFTS: dict[str, tuple[int, int, float]] = {
    "e4m3": (8, 7, 2.0**8),
    "e2m1": (12, 9, 2.0**14),
}
# Columns widened at a time on CPU. Measured (2 cores, [2048, 8192]): 256 are 1.1 to 2.3 times as
# fast as 64 or 1,024 (docs/notes/quantized_weights.md).
_TILE = min(max(128 * (os.cpu_count() or 1), 256), 2048)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
    """A quantized matrix or a stack of them: [..., in, out] with values (code - zero) * scale.

    codes: [..., in, out], i8 (int8) or u8. Quantized values. 4-bit formats have two rows in a byte:
        [..., in / 2, out] u8, the first row in the low half. Or [..., out, in] float8_e4m3fn, as
        products of 8-bit numbers read them: then a column has one scale.
    scales: [..., groups, out], f32, or u8 meaning 2 ** (scale - 127). One per group_size rows.
    zeros: [..., groups, out] u8, or None. Zero points.
    order: [in] i32, the element of x that each row multiplies; None: row i multiplies element i.
    activations: how x is rounded before the product; None: not at all.
    x_scale: [..., 1, 1] f32, the scale that the files have for x; None: they have none.
    """

    codes: Array
    scales: Array
    zeros: Array | None
    order: Array | None
    kind: Kind = dataclasses.field(metadata={"static": True})
    group_size: int = dataclasses.field(metadata={"static": True})
    activations: Activations | None = dataclasses.field(default=None, metadata={"static": True})
    x_scale: Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        *stack, rows, columns = self.codes.shape
        if self.is_transposed:
            return (*stack, columns, rows)
        return (*stack, rows * self.codes_per_byte, columns)

    @property
    def is_transposed(self) -> bool:
        """Whether codes are [..., out, in]."""
        return bool(self.codes.dtype == jnp.float8_e4m3fn)

    @property
    def codes_per_byte(self) -> int:
        return codes_per_byte(self.kind)


Matrix = jax.Array | Quantized
"""A weight as files have it."""


def codes_per_byte(kind: Kind) -> int:
    return 2 if kind in ("int4", "e2m1") else 1


def product(
    x: jax.Array, weight: Matrix | Panels | Adapted, dtype: jax.typing.DTypeLike | None = None
) -> jax.Array:
    """Computes x [n, in] @ weight [in, out] -> [n, out] of `dtype`, default x's.

    On CPU, tiles of columns are widened one after the other, small enough for the processor's
    cache. On a GPU, XLA fuses widening and matmul into one kernel if int8 or e4m3 columns have one
    scale each. Other formats have a kernel for up to 256 rows of 16-bit x (quantized_cuda.py). All
    other matrices are widened in memory first.

    If the weight has `activations`, x is rounded. Then x of 8 bits and a matrix of float8_e4m3fn
    are multiplied as they are on a GPU; elsewhere both are widened, which gives the same numbers
    but for the rounding of x times its scale to x's dtype.
    """
    if isinstance(weight, Adapted):
        y = product(x, weight.weight, dtype)
        if y.dtype == x.dtype:
            return weight.add(x, y)
        return y + weight.add(x, jnp.zeros(y.shape, x.dtype)).astype(y.dtype)
    if isinstance(weight, Panels):
        return weight.product(x, dtype)
    if not isinstance(weight, Quantized):
        return jnp.dot(x, weight, preferred_element_type=dtype)
    if weight.order is not None:
        if weight.activations is not None:  # groups of x are those of its own order
            x = rounded(x, weight.activations, weight.x_scale).product()
            weight = without_activations(weight)
        x, weight = x[:, weight.order], dataclasses.replace(weight, order=None)
    ways: dict[str, Callable[..., jax.Array]] = {
        "cpu": partial(tiled_product, dtype=dtype),
        "cuda": partial(_cuda_product, dtype=dtype),
        "default": partial(_product, dtype=dtype, has_float8=True),
    }
    if weight.activations is None:
        return jax.lax.platform_dependent(x, weight, **ways)

    def of_widened(way: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        return lambda rows, weight: way(rows.product(), weight)

    rows = rounded(x, weight.activations, weight.x_scale)
    ways = {platform: of_widened(way) for platform, way in ways.items()}
    if weight.is_transposed:
        ways["cuda"] = partial(_float8_product, dtype=dtype)
    return jax.lax.platform_dependent(rows, without_activations(weight), **ways)


def multiplies_float8() -> bool:
    """Whether this process's GPU multiplies e4m3 numbers: their matrices are stored [out, in].

    CPUs multiply those twice as fast that are stored [in, out].
    """
    target = gpu_target()
    return target is not None and target[0] >= 89


def without_activations(weight: Quantized) -> Quantized:
    """The weight for x that is rounded already."""
    return dataclasses.replace(weight, activations=None, x_scale=None)


def _float8_product(
    rows: Rounded, weight: Quantized, dtype: jax.typing.DTypeLike | None
) -> jax.Array:
    """`product` by tensor cores that multiply e4m3 numbers, sm_89 and later: cuBLASLt needs both
    operands with the summed dimension last."""
    values = rows.values.astype(jnp.float8_e4m3fn)
    contracted = (((1,), (1,)), ((), ()))
    y = jax.lax.dot_general(values, weight.codes, contracted, preferred_element_type=jnp.float32)
    return (y * rows.scales * weight.scales).astype(dtype or rows.values.dtype)


def _cuda_product(x: jax.Array, weight: Quantized, dtype: jax.typing.DTypeLike | None) -> jax.Array:
    """`product` on NVIDIA GPUs; the weight's rows are in x's order."""
    kind, size = weight.kind, weight.group_size

    def in_xla(
        x: jax.Array, codes: jax.Array, scales: jax.Array, zeros: jax.Array | None = None
    ) -> jax.Array:
        matrix = Quantized(codes, scales, zeros, None, kind, size)
        return _product(x, matrix, dtype, has_float8=True)

    arrays = weight.codes, weight.scales
    if not quantized_cuda.supports(x, *arrays, kind, size):
        return in_xla(x, *arrays, weight.zeros)
    matrix = quantized_cuda.Matrix(kind, size, jnp.dtype(dtype or x.dtype))
    return quantized_cuda.product(x, *arrays, weight.zeros, matrix, in_xla)


def widen(weight: Matrix, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Dequantizes to [..., in, out] of `dtype`. The weight's rows must be in x's order."""
    if not isinstance(weight, Quantized):
        return weight.astype(dtype)
    assert weight.order is None
    if weight.is_transposed:
        return (_float8_values(weight.codes).swapaxes(-1, -2) * weight.scales).astype(dtype)
    parts = [_widen_part(weight, part) for part in _parts(weight)]
    return jnp.stack(parts, axis=-2).reshape(weight.shape).astype(dtype)


def tiled_product(
    x: jax.Array, weight: Matrix, dtype: jax.typing.DTypeLike | None = None
) -> jax.Array:
    """`product` on CPUs; the weight's rows are in x's order."""
    if not isinstance(weight, Quantized):
        return jnp.dot(x, weight, preferred_element_type=dtype)
    columns = weight.shape[-1]
    if columns <= _TILE:
        return _product(x, weight, dtype)

    def add_tile(i: jax.Array, y: jax.Array) -> jax.Array:
        first = i * _TILE  # slices of the last tile begin earlier, to stay inside
        tile = _columns(weight, first, _TILE)
        return jax.lax.dynamic_update_slice_in_dim(y, _product(x, tile, dtype), first, 1)

    y = jnp.zeros((len(x), columns), dtype or x.dtype)
    return jax.lax.fori_loop(0, -(-columns // _TILE), add_tile, y)


def grouped_product(x: jax.Array, weights: Quantized, group_sizes: jax.Array) -> jax.Array:
    """`experts.grouped_matmul` on CPUs: widens matrices in the processor's cache, to f32.

    weights: [groups, in, out], not transposed, with rows in x's order. Derivatives are those of
    ragged_dot with all matrices widened, vmap is a loop.
    """
    assert weights.order is None and not weights.is_transposed
    call = jax.custom_jvp(jax.custom_batching.sequential_vmap(_quantized_groups))

    @call.defjvp
    def tangent(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
        return call(*primals), jax.jvp(_ragged_product, primals, tangents)[1]

    y: jax.Array = call(x, weights, jnp.asarray(group_sizes, jnp.int32))
    return y


def _quantized_groups(x: jax.Array, weights: Quantized, group_sizes: jax.Array) -> jax.Array:
    y = ffi.quantized_groups(
        x.astype(jnp.float32),
        weights.codes,
        weights.scales,
        jnp.zeros(0, jnp.uint8) if weights.zeros is None else weights.zeros,
        group_sizes,
        # The kernel knows int8 by the dtype of the codes.
        format=0 if weights.kind == "int8" else quantized_cuda.FORMATS[weights.kind],
        group_size=weights.group_size,
    )
    return y.astype(x.dtype)


def _ragged_product(x: jax.Array, weights: Quantized, group_sizes: jax.Array) -> jax.Array:
    return jax.lax.ragged_dot(x, widen(weights, x.dtype), group_sizes)


def _columns(weight: Quantized, first: jax.Array, count: int) -> Quantized:
    def of(array: jax.Array, axis: int = 1) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(array, first, count, axis)

    zeros = None if weight.zeros is None else of(weight.zeros)
    codes = of(weight.codes, 0 if weight.is_transposed else 1)
    return dataclasses.replace(weight, codes=codes, scales=of(weight.scales), zeros=zeros)


def _product(
    x: jax.Array,
    weight: Quantized,
    dtype: jax.typing.DTypeLike | None,
    has_float8: bool = False,
) -> jax.Array:
    """Widens and multiplies. has_float8: XLA converts its float8 fast, which is not so on CPUs."""
    if weight.is_transposed:
        codes = weight.codes if has_float8 else _float8_values(weight.codes)
        y = jnp.dot(x, codes.astype(x.dtype).T, preferred_element_type=jnp.float32)
        return (y * weight.scales).astype(dtype or x.dtype)
    # If a column has one scale, the scale is applied to the sum.
    one_scale = weight.scales.shape[-2] == 1 and weight.zeros is None
    if one_scale and (weight.kind == "int8" or (weight.kind == "e4m3" and has_float8)):
        # One exact conversion, which XLA's GPU kernel does while it reads the quantized values.
        codes = weight.codes
        if weight.kind == "e4m3":
            codes = jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
        y = jnp.dot(x, codes.astype(x.dtype), preferred_element_type=jnp.float32)
        return (y * weight.scales).astype(dtype or x.dtype)
    parts = _parts(weight)
    y = jnp.zeros((), jnp.float32)
    for i, part in enumerate(parts):
        wide = _values(part, weight.kind) if one_scale else _widen_part(weight, part)
        rows = x[:, i :: len(parts)]
        y += jnp.dot(rows, wide.astype(x.dtype), preferred_element_type=jnp.float32)
    return (y * _scales(weight) if one_scale else y).astype(dtype or x.dtype)


def _parts(weight: Quantized) -> list[jax.Array]:
    """Returns the quantized values of all rows or, for 4-bit formats, of even and of odd rows."""
    if weight.codes_per_byte == 1:
        return [weight.codes]
    return [weight.codes & 15, weight.codes >> 4]


def _widen_part(weight: Quantized, part: jax.Array) -> jax.Array:
    """Dequantizes rows, equally many of each group, to [..., rows, out] f32."""
    values, scales = _values(part, weight.kind), _scales(weight)
    rows, size = part.shape[-2], weight.group_size // weight.codes_per_byte
    zeros = None if weight.zeros is None else weight.zeros.astype(jnp.float32)
    if rows != scales.shape[-2] * size:  # the last group is not full

        def of_rows(array: jax.Array) -> jax.Array:
            return jnp.repeat(array, size, axis=-2)[..., :rows, :]

        return (values if zeros is None else values - of_rows(zeros)) * of_rows(scales)
    values = values.reshape(*scales.shape[:-1], size, part.shape[-1])
    if zeros is not None:
        values -= zeros[..., None, :]
    return (values * scales[..., None, :]).reshape(part.shape)


def _values(codes: jax.Array, kind: Kind) -> jax.Array:
    """Converts quantized values to f32, without the factor that `_scales` includes."""
    if kind not in _SHIFTS:
        return codes.astype(jnp.float32)
    sign_shift, shift, _ = _SHIFTS[kind]
    sign = 0x80 if kind == "e4m3" else 8
    wide = codes.astype(jnp.uint16)
    bits = ((wide & sign) << sign_shift) | ((wide & (sign - 1)) << shift)
    return jax.lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)


def _float8_values(codes: jax.Array) -> jax.Array:
    """Converts float8_e4m3fn to f32, on CPUs faster than XLA's own conversion."""
    octets = jax.lax.bitcast_convert_type(codes, jnp.uint8)
    return _values(octets, "e4m3") * _SHIFTS["e4m3"][2]


def _scales(weight: Quantized) -> jax.Array:
    factor = _SHIFTS[weight.kind][2] if weight.kind in _SHIFTS else 1.0
    if weight.scales.dtype != jnp.uint8:
        return weight.scales * factor
    # The factor is added to the exponent, because 2 ** -127 is not a normal number.
    exponents = weight.scales.astype(jnp.uint32) + int(factor).bit_length() - 1
    return jax.lax.bitcast_convert_type(exponents << 23, jnp.float32)
