"""Low-rank matrices of adapters beside a weight (LoRA: arXiv 2106.09685), many in one batch.

Which adapter a row has is data, so a compiled step serves any mix of them.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_attn._xla import ffi


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LoraPool:
    """The low-rank matrices of one weight, for each of a fixed number of adapters.

    Columns of the weight have parts with an `a` of their own, such as those of q, k and v.

    a: [adapters, parts, rank, in], zeros beyond an adapter's rank.
    b: [adapters, rank, out], in the weight's dtype like a. Includes the adapter's scale.
    ranks: [adapters, parts] i32, of each; 0: it leaves the part as it is.
    """

    a: jax.Array
    b: jax.Array
    ranks: jax.Array


@dataclasses.dataclass(frozen=True)
class Adapted:
    """A weight [in, out] whose products have what each row's adapter adds.

    weight: any that `quantized.product` multiplies.
    adapters: [n] i32, of each row of x; -1: none.
    ends: where the parts' columns end.
    """

    weight: Any
    pool: LoraPool
    adapters: jax.Array
    ends: tuple[int, ...]

    def add(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """Returns y [n, out] plus the adapters' products of x [n, in]; both of the pool's dtype.

        On CPUs, each row reads its own adapter alone, and its bits do not depend on the others.
        Elsewhere all adapters multiply all rows.
        """
        pool = self.pool
        return jax.lax.platform_dependent(
            x,
            y,
            self.adapters,
            pool.a,
            pool.b,
            pool.ranks,
            cpu=partial(ffi.lora, ends=self.ends),
            default=partial(_of_all_adapters, ends=self.ends),
        )


def _of_all_adapters(
    x: jax.Array,
    y: jax.Array,
    adapters: jax.Array,
    a: jax.Array,
    b: jax.Array,
    ranks: jax.Array,
    *,
    ends: tuple[int, ...],
) -> jax.Array:
    is_own = adapters[:, None] == jnp.arange(len(a))
    h = jnp.einsum("nk,sprk->nspr", x, a, preferred_element_type=jnp.float32)
    h = jnp.where(is_own[:, :, None, None], h, 0).astype(x.dtype)
    begins = (0, *ends[:-1])
    added = [
        jnp.einsum("nsr,sro->no", h[:, :, i], b[..., begin:end], preferred_element_type=jnp.float32)
        for i, (begin, end) in enumerate(zip(begins, ends, strict=True))
    ]
    return (y + jnp.concatenate(added, axis=1)).astype(y.dtype)
