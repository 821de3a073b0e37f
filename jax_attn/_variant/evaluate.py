"""A variant's program on arrays, in jnp: for derivatives that kernels do not compute."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jax_attn._variant.operations import DTYPES, OPERATIONS, cast, load
from jax_attn._variant.program import At, constant_value
from jax_attn._variant.variant import Variant


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
            value = load(operands[x.args[0]], args).astype(DTYPES[x.kind])
        elif x.op == "cast":
            value = cast(args[0], instructions[x.args[0]].kind, x.kind)
        elif not args:
            value = getattr(at, x.op)
        else:
            value = OPERATIONS[x.op](*jnp.broadcast_arrays(*args))
        values.append(value)
    logits, visible = variant.results
    return score if logits < 0 else values[logits], None if visible < 0 else values[visible]
