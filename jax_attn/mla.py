"""Projections of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

The keys and values of all heads come from one latent row per token. It has two parts: ckv
(kv_lora_rank columns), and k_rope, the rotated part of the key that all heads share. The cache
holds [ckv, k_rope] and nothing else. There are two ways to attend:

    not absorbed   k, v = expand_kv(ckv, k_rope, w_uk, w_uv), then attention with as many KV heads
                   as query heads. Fewer operations per pair of tokens: best for prefill.
    absorbed       q = absorb_query(q_nope, q_rope, w_uk), then attention over the cache with
                   AttentionSpec(num_kv_heads=1, mla=True), then o = expand_output(o, w_uv).
                   Each row of the cache is read once for all heads: best for decode, and for any
                   query tokens whose context is in the cache.

Both need the model's sm_scale, which belongs to the heads before absorption: usually
(nope + rope) ** -0.5.

nope and rope are the numbers of unrotated and rotated columns of a head's query.
w_uk: [num_qo_heads, nope, kv_lora_rank] and w_uv: [num_qo_heads, kv_lora_rank, head_dim_v] are two
halves of one checkpoint matrix; split_kv_b splits it. Arrays may have any float dtype; results have
the dtype that jnp promotes their arguments to.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

__all__ = ["absorb_query", "expand_kv", "expand_output", "latent_rows", "split_kv_b"]


def split_kv_b(kv_b: jax.Array, num_qo_heads: int, nope: int) -> tuple[jax.Array, jax.Array]:
    """Split the matrix that expands latent rows into w_uk and w_uv.

    kv_b: [kv_lora_rank, num_qo_heads * (nope + head_dim_v)]. A checkpoint's kv_b_proj, transposed:
        ckv @ kv_b gives the keys (without rope) and values of all heads.

    Returns w_uk: [num_qo_heads, nope, kv_lora_rank] and w_uv: [num_qo_heads, kv_lora_rank,
    head_dim_v].
    """
    heads = kv_b.reshape(kv_b.shape[0], num_qo_heads, -1).transpose(1, 0, 2)
    return heads[..., :nope].swapaxes(1, 2), heads[..., nope:]


def latent_rows(ckv: jax.Array, k_rope: jax.Array) -> jax.Array:
    """Rows of the latent cache, as append_kv takes them for k_new.

    ckv: [n, kv_lora_rank], after its norm.
    k_rope: [n, rope], rotated.

    Returns [n, 1, kv_lora_rank + rope].
    """
    return jnp.concatenate([ckv, k_rope], axis=-1)[:, None]


def absorb_query(q_nope: jax.Array, q_rope: jax.Array, w_uk: jax.Array) -> jax.Array:
    """Queries for latent rows: q_nope . (w_uk ckv) = (q_nope w_uk) . ckv.

    q_nope: [n, num_qo_heads, nope].
    q_rope: [n, num_qo_heads, rope], rotated.
    w_uk: [num_qo_heads, nope, kv_lora_rank].

    Returns [n, num_qo_heads, kv_lora_rank + rope].
    """
    return jnp.concatenate([jnp.einsum("nhd,hdc->nhc", q_nope, w_uk), q_rope], axis=-1)


def expand_output(o: jax.Array, w_uv: jax.Array) -> jax.Array:
    """Apply the value projection to the output of absorbed attention.

    o: [n, num_qo_heads, kv_lora_rank].
    w_uv: [num_qo_heads, kv_lora_rank, head_dim_v].

    Returns [n, num_qo_heads, head_dim_v].
    """
    return jnp.einsum("nhc,hcd->nhd", o, w_uv)


def expand_kv(
    ckv: jax.Array, k_rope: jax.Array, w_uk: jax.Array, w_uv: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Keys and values of all heads, from latent rows.

    ckv: [n, kv_lora_rank], after its norm.
    k_rope: [n, rope], rotated.
    w_uk: [num_qo_heads, nope, kv_lora_rank].
    w_uv: [num_qo_heads, kv_lora_rank, head_dim_v].

    Returns k: [n, num_qo_heads, nope + rope] and v: [n, num_qo_heads, head_dim_v].
    """
    k_nope, v = jnp.einsum("nc,hdc->nhd", ckv, w_uk), jnp.einsum("nc,hcd->nhd", ckv, w_uv)
    shared = jnp.broadcast_to(k_rope[:, None], (*k_nope.shape[:2], k_rope.shape[-1]))
    return jnp.concatenate([k_nope, shared], axis=-1), v
