"""A layer of Mamba-2 (arXiv 2405.21060), in place of attention or beside it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn.models._config.recurrent import Mamba2
from jax_attn.models._layers.recurrence import Recurrence, mean_of_squares
from jax_attn.models._products.quantized import product
from jax_attn.models._weights.weights import Params


def mix(
    x: jax.Array, weights: Params, sizes: Mamba2, eps: float, recurrence: Recurrence
) -> jax.Array:
    """Mixes tokens: x [n, hidden] -> [n, inner_size], before the output projection.

    eps: of the norm behind the recurrence.
    """
    n, inner, of_group = len(x), sizes.inner_size, (sizes.num_groups, sizes.state_dim)
    bc = sizes.num_groups * sizes.state_dim
    y = product(x if sizes.in_scale == 1 else x * sizes.in_scale, weights["zxbcdt"])
    if "zxbcdt_bias" in weights:
        y += weights["zxbcdt_bias"][None]
    if any(scale != 1 for scale in sizes.part_scales):
        widths = [inner, inner, bc, bc, sizes.num_heads]
        y *= jnp.asarray(np.repeat(sizes.part_scales, widths), y.dtype)[None]
    z, xbc, dt = jnp.split(y, [inner, inner + sizes.num_channels], axis=-1)
    xbc = recurrence.convolve(xbc, weights["conv"][:, 0], weights.get("conv_bias"), "silu")
    v, k, q = jnp.split(xbc, [inner, inner + bc], axis=-1)
    a_log, dt_bias = (weights[name].astype(jnp.float32)[None] for name in ("a_log", "dt_bias"))
    dt = jnp.clip(jax.nn.softplus(dt.astype(jnp.float32) + dt_bias), *sizes.dt_range)
    v = v.reshape(n, sizes.num_heads, sizes.head_dim)
    # The strength is dt, so v needs no rounding of dt * x.
    o = recurrence.attend(
        q.reshape(n, *of_group), k.reshape(n, *of_group), v, -jnp.exp(a_log) * dt, dt
    )
    o = o.astype(jnp.float32) + weights["skip"].astype(jnp.float32)[None, :, None] * v
    return _gated(o.reshape(n, inner), z, weights, sizes, eps).astype(x.dtype)


def _gated(o: jax.Array, gate: jax.Array, weights: Params, sizes: Mamba2, eps: float) -> jax.Array:
    gate = jax.nn.silu(gate.astype(jnp.float32))
    if sizes.norm == "none":
        return o * gate
    if sizes.norm == "gate_first":
        o *= gate
    groups = o.reshape(len(o), sizes.num_groups, -1)
    groups *= jax.lax.rsqrt(mean_of_squares(groups, sizes.normed_together) + eps)
    o = groups.reshape(o.shape) * weights["gated_norm"].astype(jnp.float32)[None]
    return o * gate if sizes.norm == "gate_last" else o
