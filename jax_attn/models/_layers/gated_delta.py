"""A layer with the gated delta rule (arXiv 2412.06464) in place of attention."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_attn.models._config.recurrent import GatedDelta
from jax_attn.models._layers.recurrence import Recurrence
from jax_attn.models._products.quantized import product
from jax_attn.models._weights.weights import Params


def mix(
    x: jax.Array, weights: Params, sizes: GatedDelta, eps: float, recurrence: Recurrence
) -> jax.Array:
    """Mixes tokens: x [n, hidden] -> [n, num_v_heads, dim_v], before the output projection.

    eps: of the norm behind the rule, unless the sizes have another.
    """
    n, of_keys = len(x), (sizes.num_k_heads, sizes.dim_k)
    mixed, z = jnp.split(product(x, weights["qkvz"]), [sizes.num_channels], axis=-1)
    mixed = recurrence.convolve(mixed, weights["conv"][:, 0], None, "silu")
    num_k = sizes.num_k_heads * sizes.dim_k
    q, k, v = jnp.split(mixed, [num_k, 2 * num_k], axis=-1)
    b, a = jnp.split(product(x, weights["ba"], jnp.float32), 2, axis=-1)
    a_log, dt_bias = (weights[name].astype(jnp.float32)[None] for name in ("a_log", "dt_bias"))
    o = recurrence.attend(
        q.reshape(n, *of_keys),
        k.reshape(n, *of_keys),
        v.reshape(n, sizes.num_v_heads, sizes.dim_v),
        -jnp.exp(a_log) * jax.nn.softplus(a + dt_bias),
        sizes.beta_scale * jax.nn.sigmoid(b),
    )
    eps = eps if sizes.norm_eps is None else sizes.norm_eps
    return _gated_norm(o, z.reshape(o.shape), weights["gated_norm"], eps)


def _gated_norm(x: jax.Array, gate: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """RMSNorm over each head, then times SiLU of the gate."""
    x32 = x.astype(jnp.float32)
    variance = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
    normed = weight * (x32 * jax.lax.rsqrt(variance + eps)).astype(x.dtype)
    return (normed * jax.nn.silu(gate.astype(jnp.float32))).astype(x.dtype)
