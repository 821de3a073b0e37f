"""Weight matrices in the layout of the CPU's matmul kernels (csrc/cpu/product.h).

On CPUs, XLA's matmuls of few rows run far below memory bandwidth (docs/notes/cpu.md).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn._xla import ffi

KernelActivation = Literal["gelu", "gelu_tanh", "relu"]
"""What a product can end with. In the order of Activation of csrc/cpu/kernels.h."""
KERNEL_ACTIVATIONS: tuple[KernelActivation, ...] = get_args(KernelActivation)

# The same in jax.numpy, for gradients.
_PLAIN: dict[KernelActivation, Callable[[jax.Array], jax.Array]] = {
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "relu": jax.nn.relu,
}

_COLUMNS = 32  # columns of a panel
_DEPTHS = 32  # the rows of a bf16 panel are a multiple of this
_ALIGNMENT = 4096  # bytes; XLA needs at least 64 to use memory without a copy


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Panels:
    """A matrix [in, out], or a stack of them, in panels of 32 columns, padded with zeros.

    panels: [ceil(out / 32), in, 32], f16 | f32; for bf16 [ceil(out / 32), pairs, 32, 2], in pairs
        of rows, padded with zeros to a multiple of 32 rows. A stack has one more axis in front.
    shape: (in, out), or (groups, in, out).
    """

    panels: jax.Array
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    @property
    def dtype(self) -> jnp.dtype:
        return self.panels.dtype

    @property
    def nbytes(self) -> int:
        return self.panels.nbytes

    def columns(self, indices: jax.Array) -> jax.Array:
        """Returns the matrix's columns with indices [n] i32, as [n, in]."""
        found = self.panels[indices // _COLUMNS, :, indices % _COLUMNS]
        return found.reshape(len(indices), -1)[:, : self.shape[0]]

    def product(
        self,
        x: jax.Array,
        dtype: jax.typing.DTypeLike | None,
        bias: jax.Array | None = None,
        activation: KernelActivation | None = None,
    ) -> jax.Array:
        """Computes activation(x [n, in] @ the matrix + bias [out]) -> [n, out], rounded once.

        x has the matrix's dtype. The result has it, too, or f32 if `dtype` asks for that. The bits
        of a row do not depend on the number of rows.
        """
        return _product(x, self, bias, jnp.dtype(dtype or x.dtype), activation)

    def unpacked(self) -> jax.Array:
        """The matrix, or the stack of them, as it was before `to_panels`."""
        *groups, depth, columns = self.shape
        rows = self.panels
        if rows.ndim - len(groups) == 4:  # in pairs of rows
            rows = rows.swapaxes(-1, -2).reshape(*rows.shape[:-3], -1, _COLUMNS)
        rows = jnp.moveaxis(rows, -2, -3)
        return rows.reshape(*rows.shape[:-2], -1)[..., :depth, :columns]

    def grouped_product(self, x: jax.Array, group_sizes: jax.Array) -> jax.Array:
        """Multiplies each row of x by its matrix of a stack, as experts.grouped_matmul.

        Reads the matrices of groups with rows only.
        """
        return ffi.grouped_panels(x, self.panels, group_sizes, self.shape[-1], x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _product(
    x: jax.Array,
    weight: Panels,
    bias: jax.Array | None,
    dtype: jnp.dtype,
    activation: KernelActivation | None,
) -> jax.Array:
    number = 0 if activation is None else 1 + KERNEL_ACTIVATIONS.index(activation)
    return ffi.product(x, weight.panels, weight.shape[1], dtype, bias, number)


def _product_fwd(
    x: jax.Array, weight: Panels, bias: jax.Array | None, *static: Any
) -> tuple[jax.Array, Any]:
    return _product(x, weight, bias, *static), (x, weight, bias)


def _product_bwd(
    dtype: jnp.dtype, activation: KernelActivation | None, saved: Any, gradient: jax.Array
) -> Any:
    """XLA's products, as without panels."""

    def plain(x: jax.Array, weight: Panels, bias: jax.Array | None) -> jax.Array:
        ends = bias is not None or activation is not None
        y = jnp.dot(x, weight.unpacked(), preferred_element_type=jnp.float32 if ends else dtype)
        y = y if bias is None else y + bias
        y = y if activation is None else _PLAIN[activation](y)
        return y.astype(dtype)

    return jax.vjp(plain, *saved)[1](gradient)


_product.defvjp(_product_fwd, _product_bwd)


def to_panels(matrix: jax.Array, *, transposed: bool = False) -> Panels:
    """Converts a matrix, or a stack [groups, in, out], to panels.

    matrix: [in, out], or transposed [out, in]; bf16 | f16 | f32.
    """
    if isinstance(matrix, jax.core.Tracer):
        pack = lambda x: _panels(x, transposed)  # noqa: E731
        shape = matrix.shape[::-1] if transposed else matrix.shape
        return Panels((jax.vmap(pack) if matrix.ndim == 3 else pack)(matrix), shape)
    if matrix.ndim == 3:
        shape = jax.eval_shape(lambda x: _panels(x, transposed), matrix[0]).shape
        whole = _empty_in_large_pages((len(matrix), *shape), matrix.dtype)
        for i, each in enumerate(matrix):  # one by one, as a stack may be a large part of a model
            np.copyto(whole[i], np.asarray(_panels(each, transposed)))
        return Panels(jax.device_put(whole), matrix.shape)
    depth, columns = matrix.shape[::-1] if transposed else matrix.shape
    return Panels(_in_large_pages(_panels(matrix, transposed)), (depth, columns))


@partial(jax.jit, static_argnums=1)
def _panels(matrix: jax.Array, transposed: bool) -> jax.Array:
    matrix = matrix.T if transposed else matrix
    is_bf16 = matrix.dtype == jnp.bfloat16
    more = -len(matrix) % _DEPTHS if is_bf16 else 0, -matrix.shape[1] % _COLUMNS
    padded = jnp.pad(matrix, [(0, n) for n in more])
    if not is_bf16:
        return padded.reshape(len(padded), -1, _COLUMNS).swapaxes(0, 1)
    return padded.reshape(len(padded) // 2, 2, -1, _COLUMNS).transpose(2, 0, 3, 1)


def _in_large_pages(array: jax.Array) -> jax.Array:
    """Copies an array into memory of numpy, which asks the kernel for 2 MB pages. A step reads all
    weights, and 4 KB pages cost a part of the bandwidth (docs/notes/cpu.md)."""
    whole = _empty_in_large_pages(array.shape, array.dtype)
    np.copyto(whole, np.asarray(array))
    return jax.device_put(whole)  # no copy if the memory is aligned


def _empty_in_large_pages(shape: tuple[int, ...], dtype: jnp.dtype) -> np.ndarray:
    num_bytes = math.prod(shape) * jnp.dtype(dtype).itemsize
    memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    return memory[begin : begin + num_bytes].view(dtype).reshape(shape)
