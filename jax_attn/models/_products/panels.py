"""Weight matrices in the layout of the CPU's matmul kernels (csrc/cpu/product.h).

On CPUs, XLA's matmuls of few rows run far below memory bandwidth (docs/notes/cpu.md).
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn._xla import ffi

_COLUMNS = 32  # columns of a panel
_DEPTHS = 32  # the rows of a bf16 panel are a multiple of this
_ALIGNMENT = 4096  # bytes; XLA needs at least 64 to use memory without a copy


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Panels:
    """A matrix [in, out] in panels of 32 columns, padded with zeros.

    panels: [ceil(out / 32), in, 32], f16 | f32; for bf16 [ceil(out / 32), pairs, 32, 2], in pairs
        of rows, padded with zeros to a multiple of 32 rows.
    shape: (in, out).
    """

    panels: jax.Array
    shape: tuple[int, int] = dataclasses.field(metadata={"static": True})

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

    def product(self, x: jax.Array, dtype: jax.typing.DTypeLike | None) -> jax.Array:
        """Computes x [n, in] @ the matrix -> [n, out].

        x has the matrix's dtype. The result has it, too, or f32 if `dtype` asks for that. The bits
        of a row do not depend on the number of rows. Not differentiable.
        """
        return ffi.product(x, self.panels, self.shape[1], dtype or x.dtype)


def to_panels(matrix: jax.Array, *, transposed: bool = False) -> Panels:
    """Converts a matrix to panels. matrix: [in, out], or transposed [out, in]; bf16 | f16 | f32."""
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
    memory = np.empty(array.nbytes + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    whole = memory[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    np.copyto(whole, np.asarray(array))
    return jax.device_put(whole)  # no copy if the memory is aligned
