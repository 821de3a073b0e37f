"""A layer with lightning attention (arXiv 2401.04658) in place of attention (MiniMax)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn.models._config.recurrent import Lightning
from jax_attn.models._layers.recurrence import Recurrence
from jax_attn.models._products.quantized import product
from jax_attn.models._weights.weights import Params

_NORM_EPS = 1e-6  # whatever rms_norm_eps is


def mix(
    x: jax.Array, weights: Params, sizes: Lightning, eps: float, recurrence: Recurrence
) -> jax.Array:
    """Mixes tokens: x [n, hidden] -> [n, num_heads * dim], before the output projection."""
    n, heads = len(x), sizes.num_heads
    qkv = jax.nn.silu(product(x, weights["lightning_qkv"])).reshape(n, heads, 3 * sizes.dim)
    q, k, v = jnp.split(qkv, 3, axis=-1)
    slopes = sizes.slope * 2.0 ** (-8 / heads * (np.arange(heads) + 1))
    g = jnp.broadcast_to(jnp.asarray(-slopes, jnp.float32), (n, heads))
    o = recurrence.attend(q, k, v, g, None).reshape(n, -1).astype(jnp.float32)
    o *= jax.lax.rsqrt(jnp.mean(jnp.square(o), axis=-1, keepdims=True) + _NORM_EPS)
    o = (o * weights["lightning_norm"].astype(jnp.float32)[None]).astype(x.dtype)
    return jax.nn.sigmoid(product(x, weights["output_gate"])) * o
