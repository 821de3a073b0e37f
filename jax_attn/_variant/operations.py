"""The operations of programs in jnp."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_attn._variant.program import F32, I32

DTYPES = (jnp.float32, jnp.int32, jnp.bool_)  # order of VariantType


def load(array: jax.Array, indices: Sequence[jax.Array]) -> jax.Array:
    """The elements at indices that broadcast to each other, each clamped."""
    return array[tuple(i.clip(0, n - 1) for i, n in zip(indices, array.shape, strict=True))]


def cast(x: jax.Array, kind: int, to: int) -> jax.Array:
    if kind == to:
        return lax.stop_gradient(x)  # what such a cast means
    if kind == F32 and to == I32:
        return jnp.where(jnp.isnan(x), 0, x).astype(jnp.int32)
    return x.astype(DTYPES[to])


OPERATIONS: dict[str, Callable[..., Any]] = {
    "neg": lax.neg,
    "abs": lax.abs,
    "sign": lax.sign,
    "floor": lax.floor,
    "ceil": lax.ceil,
    "round": lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN),
    "exp": lax.exp,
    "exp2": lax.exp2,
    "log": lax.log,
    "log1p": lax.log1p,
    "tanh": lax.tanh,
    "logistic": lax.logistic,
    "sqrt": lax.sqrt,
    "rsqrt": lax.rsqrt,
    "not": lax.bitwise_not,
    "add": lax.add,
    "sub": lax.sub,
    "mul": lax.mul,
    "div": lax.div,
    "rem": lax.rem,
    "min": lax.min,
    "max": lax.max,
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
    "xor": lax.bitwise_xor,
    "shl": lax.shift_left,
    "sar": lax.shift_right_arithmetic,
    "shr": lax.shift_right_logical,
    "eq": lax.eq,
    "ne": lax.ne,
    "lt": lax.lt,
    "le": lax.le,
    "select": lax.select,
    "expm1": lax.expm1,
    "sin": lax.sin,
    "cos": lax.cos,
    "erf": lax.erf,
    "erfc": lax.erfc,
    "atan2": lax.atan2,
    "pow": lax.pow,
}
