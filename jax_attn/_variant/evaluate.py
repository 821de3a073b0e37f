"""A variant's program on arrays, in jnp: for derivatives that kernels do not compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_attn._variant.program import F32, I32, At, constant_value
from jax_attn._variant.variant import Variant

_DTYPES = (jnp.float32, jnp.int32, jnp.bool_)  # order of VariantType


def evaluate(
    variant: Variant, score: jax.Array, at: At, operands: Sequence[jax.Array]
) -> tuple[jax.Array, jax.Array | None]:
    """The logits, and what is visible (None: all), as kernels compute them.

    score: f32. at: i32 arrays that broadcast to its shape. operands: in the variant's order.
    """
    values: list[jax.Array] = []
    instructions = variant.instructions
    for x in instructions:
        args = [values[i] for i in x.value_args]
        if x.op == "const":
            value = jnp.asarray(constant_value(x.kind, x.args[0]))
        elif x.op == "score":
            value = score
        elif x.op == "dim":
            value = jnp.int32(operands[x.args[0]].shape[x.args[1]])
        elif x.op == "load":
            value = _load(operands[x.args[0]], args).astype(_DTYPES[x.kind])
        elif x.op == "cast":
            value = _cast(args[0], instructions[x.args[0]].kind, x.kind)
        elif not args:
            value = getattr(at, x.op)
        else:
            value = _OPERATIONS[x.op](*jnp.broadcast_arrays(*args))
        values.append(value)
    logits, visible = variant.results
    return score if logits < 0 else values[logits], None if visible < 0 else values[visible]


def _load(array: jax.Array, indices: list[jax.Array]) -> jax.Array:
    return array[tuple(i.clip(0, n - 1) for i, n in zip(indices, array.shape, strict=True))]


def _cast(x: jax.Array, kind: int, to: int) -> jax.Array:
    if kind == to:
        return lax.stop_gradient(x)  # what such a cast means
    if kind == F32 and to == I32:
        return jnp.where(jnp.isnan(x), 0, x).astype(jnp.int32)
    return x.astype(_DTYPES[to])


_OPERATIONS: dict[str, Callable[..., Any]] = {
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
