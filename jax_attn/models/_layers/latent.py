"""Latent attention of a decoder layer (MLA: DeepSeek-V2, arXiv 2405.04434, section 2.1).

Attention is absorbed over one latent cache: all heads read the same rows, and the matrices that
would expand them are applied to q and o instead. jax_attn.mla has the algebra.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_attn import mla
from jax_attn.models._config.config import Latent, ModelConfig
from jax_attn.models._config.rope import rotate
from jax_attn.models._products.quantized import product
from jax_attn.models._weights.weights import Params


class Projected(NamedTuple):
    """Queries and the latent row of each token, not rotated."""

    q_nope: jax.Array  # [n, num_qo_heads, nope]
    q_rope: jax.Array  # [n, num_qo_heads, rope]
    ckv: jax.Array  # [n, kv_rank], after its norm
    k_rope: jax.Array  # [n, rope]

    def rotated(self, angles: tuple[jax.Array, jax.Array]) -> Projected:
        k_rope = rotate(self.k_rope[:, None], angles)[:, 0]
        return self._replace(q_rope=rotate(self.q_rope, angles), k_rope=k_rope)


def latent_of(config: ModelConfig) -> Latent:
    assert config.latent is not None
    return config.latent


def project(
    x: jax.Array,
    weights: Params,
    config: ModelConfig,
    norm: Callable[[jax.Array, jax.Array], jax.Array],
) -> Projected:
    """Projects x [n, hidden], after the layer's norm. norm(x, weight): RMSNorm."""
    latent = latent_of(config)
    h = norm(product(x, weights["q_a"]), weights["q_a_norm"]) if latent.q_rank is not None else x
    q = product(h, weights["q_b"]).reshape(len(x), config.num_qo_heads, -1)
    q_nope, q_rope = jnp.split(q, [latent.nope], axis=-1)
    ckv, k_rope = jnp.split(product(x, weights["kv_a"]), [latent.kv_rank], axis=-1)
    return Projected(q_nope, q_rope, norm(ckv, weights["kv_a_norm"]), k_rope)


def absorbed(
    projected: Projected,
    weights: Params,
    config: ModelConfig,
    attend: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """Returns o [n, num_qo_heads, v] from rotated projections. attend(q, rows) appends the latent
    rows [n, 1, kv_rank + rope], attends and returns [n, num_qo_heads, kv_rank]."""
    w_uk, w_uv = mla.split_kv_b(weights["kv_b"], config.num_qo_heads, latent_of(config).nope)
    q = mla.absorb_query(projected.q_nope, projected.q_rope, w_uk)
    return mla.expand_output(attend(q, mla.latent_rows(projected.ckv, projected.k_rope)), w_uv)


def expanded(
    projected: Projected, weights: Params, config: ModelConfig
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns q, k, v [n, num_qo_heads, ...], not absorbed, from rotated projections."""
    w_uk, w_uv = mla.split_kv_b(weights["kv_b"], config.num_qo_heads, latent_of(config).nope)
    k, v = mla.expand_kv(projected.ckv, projected.k_rope, w_uk, w_uv)
    return jnp.concatenate([projected.q_nope, projected.q_rope], axis=-1), k, v
