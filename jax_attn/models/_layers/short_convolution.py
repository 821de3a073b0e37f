"""A layer with a gated short convolution in place of attention (LFM2)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_attn.models._layers.recurrence import Recurrence
from jax_attn.models._products.quantized import product
from jax_attn.models._weights.weights import Params


def mix(x: jax.Array, weights: Params, recurrence: Recurrence) -> jax.Array:
    """Mixes tokens: x [n, hidden] -> [n, channels], before the output projection."""
    bcx = product(x, weights["bcx"])
    if "bcx_bias" in weights:
        bcx += weights["bcx_bias"][None]
    b, c, values = jnp.split(bcx, 3, axis=-1)
    kernel, bias = weights["conv"][:, 0], weights.get("conv_bias")
    return c * recurrence.convolve(b * values, kernel, bias, None)
