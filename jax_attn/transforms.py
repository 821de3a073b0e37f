"""What JAX's transformations get of a kernel that they cannot see into: one sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def refusing(
    op: str, call: Callable[..., Any], *, vmap: str, gradients: str | None = None
) -> Callable[..., Any]:
    """`call(*arrays, static)`, except that transformations of it raise NotImplementedError.

    vmap, gradients: what to do instead, the ends of these sentences. Without float results there
    are no gradients to refuse. Arrays may be None.
    """

    def refuse(transformation: str, advice: str) -> Any:
        raise NotImplementedError(f"{op}: {transformation}: not supported; {advice}.")

    def wrapped(*args: Any) -> Any:
        *arrays, static = args
        present = [a for a in arrays if a is not None]

        @jax.custom_batching.custom_vmap
        def flat(*operands: jax.Array) -> Any:
            rest = iter(operands)
            return call(*(None if a is None else next(rest) for a in arrays), static)

        flat.def_vmap(lambda *_: refuse("vmap", vmap))
        if gradients is None:
            return flat(*present)
        differentiable = jax.custom_jvp(flat)
        differentiable.defjvp(lambda *_: refuse("gradients", gradients))
        return differentiable(*present)

    return wrapped
