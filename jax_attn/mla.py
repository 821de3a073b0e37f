"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): its projections.

A token's keys and values of all heads come from one latent row: ckv (kv_lora_rank columns), and
k_rope, the rotated part of the key that all heads share. The cache holds [ckv, k_rope] and nothing
else. There are two ways to attend:

    not absorbed   k, v = expand_kv(ckv, k_rope, w_uk, w_uv), then attention with as many kv heads
                   as query heads. Fewer operations for each pair of tokens: for prefill.
    absorbed       q = absorb_query(q_nope, q_rope, w_uk); attention over the cache with
                   AttentionSpec(num_kv_heads=1, mla=True); o = expand_output(o, w_uv). Reads each
                   row of the cache once for all heads: for decode, and for any tokens whose context
                   is in the cache.

Both need the model's sm_scale, which is that of the heads before absorption, usually
(nope + rope) ** -0.5.

w_uk: [num_qo_heads, nope, kv_lora_rank] and w_uv: [num_qo_heads, kv_lora_rank, head_dim_v] are
halves of one matrix, which split_kv_b takes apart.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

__all__ = ["absorb_query", "expand_kv", "expand_output", "latent_rows", "split_kv_b"]


def split_kv_b(kv_b: jax.Array, num_qo_heads: int, nope: int) -> tuple[jax.Array, jax.Array]:
    """w_uk and w_uv of kv_b: [kv_lora_rank, num_qo_heads * (nope + head_dim_v)], so that
    ckv @ kv_b are the heads' keys and values, as in a checkpoint's kv_b_proj transposed."""
    heads = kv_b.reshape(kv_b.shape[0], num_qo_heads, -1).transpose(1, 0, 2)
    return heads[..., :nope].swapaxes(1, 2), heads[..., nope:]


def latent_rows(ckv: jax.Array, k_rope: jax.Array) -> jax.Array:
    """Rows of the latent cache, as append_kv takes them: [n, 1, kv_lora_rank + rope].

    ckv: [n, kv_lora_rank], after its norm. k_rope: [n, rope], rotated.
    """
    return jnp.concatenate([ckv, k_rope], axis=-1)[:, None]


def absorb_query(q_nope: jax.Array, q_rope: jax.Array, w_uk: jax.Array) -> jax.Array:
    """Queries that meet latent rows: [n, num_qo_heads, kv_lora_rank + rope].

    q_nope . (w_uk ckv) = (q_nope w_uk) . ckv.

    q_nope: [n, num_qo_heads, nope]. q_rope: [n, num_qo_heads, rope], rotated.
    """
    return jnp.concatenate([jnp.einsum("nhd,hdc->nhc", q_nope, w_uk), q_rope], axis=-1)


def expand_output(o: jax.Array, w_uv: jax.Array) -> jax.Array:
    """Absorbed o: [n, num_qo_heads, kv_lora_rank] -> [n, num_qo_heads, head_dim_v]."""
    return jnp.einsum("nhc,hcd->nhd", o, w_uv)


def expand_kv(
    ckv: jax.Array, k_rope: jax.Array, w_uk: jax.Array, w_uv: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """k: [n, num_qo_heads, nope + rope] and v: [n, num_qo_heads, head_dim_v] of latent rows.

    ckv: [n, kv_lora_rank], after its norm. k_rope: [n, rope], rotated.
    """
    k_nope, v = jnp.einsum("nc,hdc->nhd", ckv, w_uk), jnp.einsum("nc,hcd->nhd", ckv, w_uv)
    shared = jnp.broadcast_to(k_rope[:, None], (*k_nope.shape[:2], k_rope.shape[-1]))
    return jnp.concatenate([k_nope, shared], axis=-1), v
