"""A layer with lightning attention (arXiv 2401.04658) in place of attention (MiniMax)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn.models._config.recurrent import Lightning
from jax_attn.models._layers.recurrence import Recurrence, mean_of_squares
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
    g = jnp.broadcast_to(-_slopes(sizes), (n, heads))
    o = recurrence.attend(q, k, v, g, None).reshape(n, -1).astype(jnp.float32)
    o *= jax.lax.rsqrt(mean_of_squares(o, sizes.normed_together) + _NORM_EPS)
    o = (o * weights["lightning_norm"].astype(jnp.float32)[None]).astype(x.dtype)
    return jax.nn.sigmoid(product(x, weights["output_gate"])) * o


def _slopes(sizes: Lightning) -> jax.Array:
    """The constants of the heads, [num_heads] f32."""
    together = sizes.normed_together
    num_all = sizes.num_heads * (1 if together is None else together.count)
    all_slopes = sizes.slope * 2.0 ** (-8 / num_all * (np.arange(num_all) + 1))
    slopes = jnp.asarray(all_slopes, jnp.float32).reshape(-1, sizes.num_heads)
    return slopes[0] if together is None else slopes[jax.lax.axis_index(together.axis_name)]
