"""Weight matrices as the CPU's own products read them (csrc/cpu/product.h).

XLA's products of few rows run far below the bandwidth of memory on CPUs (docs/notes/cpu.md).
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn._xla import ffi

_COLUMNS = 32  # of a panel
_DEPTHS = 32  # rows of a panel of bf16 are a multiple of so many
_ALIGNMENT = 4096  # bytes, as XLA's own arrays have at least 64


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Panels:
    """A matrix [in, out], 32 columns after the other, with zeros beyond the last one.

    panels: [ceil(out / 32), in, 32], f16 | f32; of bf16 [ceil(out / 32), pairs, 32, 2], in pairs of
        rows, with zeros up to a multiple of 32 rows.
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
        """[n, in]: columns [n] i32 of the matrix."""
        found = self.panels[indices // _COLUMNS, :, indices % _COLUMNS]
        return found.reshape(len(indices), -1)[:, : self.shape[0]]

    def product(self, x: jax.Array, dtype: jax.typing.DTypeLike | None) -> jax.Array:
        """x [n, in] @ the matrix -> [n, out] of `dtype`, which is f32, or of x's, which is the
        matrix's. The bits of a row do not depend on how many there are. Has no derivative."""
        return ffi.product(x, self.panels, self.shape[1], dtype or x.dtype)


def to_panels(matrix: jax.Array, *, transposed: bool = False) -> Panels:
    """matrix: [in, out], or transposed [out, in]; bf16 | f16 | f32."""
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
    """A copy in memory of numpy, which asks the kernel for pages of 2 MB: one step reads all
    weights, and pages of 4 KB cost some of the bandwidth (docs/notes/cpu.md)."""
    memory = np.empty(array.nbytes + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    whole = memory[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    np.copyto(whole, np.asarray(array))
    return jax.device_put(whole)  # which JAX takes as it is, if it is aligned
