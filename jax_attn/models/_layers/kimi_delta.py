"""A layer with Kimi delta attention (KDA, arXiv 2510.26692) in place of attention."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_attn.models._config.recurrent import KimiDelta
from jax_attn.models._layers.recurrence import Recurrence
from jax_attn.models._products.quantized import product
from jax_attn.models._weights.weights import Params


def mix(
    x: jax.Array, weights: Params, sizes: KimiDelta, eps: float, recurrence: Recurrence
) -> jax.Array:
    """Mixes tokens: x [n, hidden] -> [n, num_heads, dim], before the output projection.

    eps: of the norm behind the rule.
    """
    heads = len(x), sizes.num_heads, sizes.dim
    mixed = product(x, weights["kda_qkv"])
    mixed = recurrence.convolve(mixed, weights["conv"][:, 0], None, "silu")
    q, k, v = (part.reshape(heads) for part in jnp.split(mixed, 3, axis=-1))
    decay, gate, b = jnp.split(product(x, weights["fgb"]), [sizes.dim, 2 * sizes.dim], axis=-1)
    decay = product(decay, weights["f_b"], jnp.float32)
    decay = jax.nn.softplus(decay + weights["dt_bias"].astype(jnp.float32)[None])
    rate = jnp.exp(weights["a_log"].astype(jnp.float32)).reshape(1, -1, 1)
    beta = jax.nn.sigmoid(b.astype(jnp.float32))
    o = recurrence.attend(q, k, v, -rate * decay.reshape(heads), beta).astype(jnp.float32)
    gate = product(gate, weights["g_b"], jnp.float32).reshape(heads)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(o), axis=-1, keepdims=True) + eps)
    weight = weights["gated_norm"].astype(jnp.float32)
    return (weight * (o * scale) * jax.nn.sigmoid(gate)).astype(x.dtype)
