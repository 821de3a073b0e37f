"""Weight matrices as the CPU's own products read them (csrc/cpu/product.h).

XLA's products of few rows run far below the bandwidth of memory on CPUs (docs/notes/cpu.md).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jax_attn import ffi

_COLUMNS = 32  # of a panel
_DEPTHS = 32  # rows of a panel of bf16 are a multiple of so many


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


@jax.jit
def to_panels(matrix: jax.Array) -> Panels:
    """matrix: [in, out], bf16 | f16 | f32."""
    depth, columns = matrix.shape
    is_bf16 = matrix.dtype == jnp.bfloat16
    more = -depth % _DEPTHS if is_bf16 else 0, -columns % _COLUMNS
    padded = jnp.pad(matrix, [(0, n) for n in more])
    if not is_bf16:
        panels = padded.reshape(depth, -1, _COLUMNS).swapaxes(0, 1)
    else:
        panels = padded.reshape(len(padded) // 2, 2, -1, _COLUMNS).transpose(2, 0, 3, 1)
    return Panels(panels, (depth, columns))
