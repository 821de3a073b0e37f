"""A decoder block of DeepSeek-V2 and V3: latent attention, then a gated MLP.

latent_attention.py runs it.

Prompts attend without absorption to their own fresh keys and values. Every other step attends
absorbed over the latent cache. Both write the cache, so decodes can follow prompts.

Experts are left out: `intermediate_size` is the size of a dense MLP, as in the first layers of the
published models. Rotation pairs element i with i + rope / 2. For checkpoints that pair neighbours,
permute the rope columns once, at loading.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

import jax_attn as ja
from jax_attn import mla
from jax_attn.models import Rope, rotate

BlockParams = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class DeepseekConfig:
    """The block's sizes. Hashable: a static argument of jitted functions.

    Names are those of config.json.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    q_lora_rank: int | None  # None: queries come from the hidden state directly (V2-Lite)
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope: Rope
    rms_norm_eps: float = 1e-6
    mscale: float = 1.0  # extended contexts: attention logits are scaled by its square

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def sm_scale(self) -> float:
        return float(self.qk_head_dim**-0.5 * self.mscale**2)


def prompt_spec(config: DeepseekConfig, max_qo_tokens: int, **kwargs: Any) -> ja.AttentionSpec:
    """Returns the spec for whole prompts; `kwargs` are further fields of AttentionSpec."""
    return ja.AttentionSpec(
        num_qo_heads=config.num_attention_heads,
        num_kv_heads=config.num_attention_heads,
        head_dim_qk=config.qk_head_dim,
        head_dim_vo=config.v_head_dim,
        sm_scale=config.sm_scale,
        page_size=None,
        max_qo_tokens=max_qo_tokens,
        max_kv_tokens=max_qo_tokens,
        **kwargs,
    )


def cache_fields(config: DeepseekConfig) -> dict[str, Any]:
    """Returns the fields of AttentionSpec that the latent cache decides."""
    return {
        "num_qo_heads": config.num_attention_heads,
        "num_kv_heads": 1,
        "head_dim_qk": config.kv_lora_rank + config.qk_rope_head_dim,
        "head_dim_vo": config.kv_lora_rank,
        "mla": True,
        "sm_scale": config.sm_scale,
    }


def random_block(config: DeepseekConfig, key: jax.Array, dtype: Any) -> BlockParams:
    """Returns random weights of one block; matrices are [in, out]."""
    heads, rank = config.num_attention_heads, config.kv_lora_rank
    hidden, q_in = config.hidden_size, config.q_lora_rank or config.hidden_size
    shapes = {
        "q_b": (q_in, heads * config.qk_head_dim),
        "kv_a": (hidden, rank + config.qk_rope_head_dim),
        "kv_b": (rank, heads * (config.qk_nope_head_dim + config.v_head_dim)),
        "o": (heads * config.v_head_dim, hidden),
        "gate_up": (hidden, 2 * config.intermediate_size),
        "down": (config.intermediate_size, hidden),
    }
    norms = {"attention_norm": hidden, "kv_a_norm": rank, "mlp_norm": hidden}
    if config.q_lora_rank is not None:
        shapes["q_a"] = (hidden, config.q_lora_rank)
        norms["q_a_norm"] = config.q_lora_rank
    keys = jax.random.split(key, len(shapes) + len(norms))
    params = {
        name: (jax.random.normal(k, shape) * shape[0] ** -0.5).astype(dtype)
        for (name, shape), k in zip(shapes.items(), keys, strict=False)
    }
    for (name, size), k in zip(norms.items(), keys[len(shapes) :], strict=True):
        params[name] = (1 + 0.1 * jax.random.normal(k, (size,))).astype(dtype)
    return params


def block(
    params: BlockParams,
    config: DeepseekConfig,
    x: jax.Array,
    positions: jax.Array,
    latent_pages: jax.Array,
    cache_plan: ja.AttentionPlan,
    prompt_plan: ja.AttentionPlan | None = None,
    layer: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns x after the block, and the cache with the batch's tokens appended.

    Args:
      params: the weights of this block.
      config: static.
      x: [max_qo_tokens, hidden_size]. Packed tokens, by the plans' qo_indptr.
      positions: [max_qo_tokens] i32. Position of each token in its sequence.
      latent_pages: [num_pages, page_size, 1, kv_lora_rank + rope], or stacked with a leading
        [num_layers] and `layer`. Written in place if donated.
      cache_plan: plan of a spec with `cache_fields` for the batch's lengths and pages.
      prompt_plan: plan of `prompt_spec`, for a batch of whole prompts (kv_lens = qo_lens): attends
        without absorption. None: attends absorbed, for any batch.
      layer: int or i32 scalar; None for an unstacked cache.
    """
    q_nope, q_rope, ckv, k_rope = _project(params, config, x, positions)
    w_uk, w_uv = _split_kv_b(params, config)
    latent_pages, _ = ja.append_kv(
        latent_pages, None, mla.latent_rows(ckv, k_rope), None, cache_plan, layer=layer
    )
    if prompt_plan is not None:
        k, v = mla.expand_kv(ckv, k_rope, w_uk, w_uv)
        o = ja.attention(jnp.concatenate([q_nope, q_rope], axis=-1), k, v, prompt_plan)
    else:
        q = mla.absorb_query(q_nope, q_rope, w_uk)
        o = mla.expand_output(ja.attention(q, latent_pages, None, cache_plan, layer=layer), w_uv)
    return _add_output(params, config, x, o), latent_pages


def reference_block(params: BlockParams, config: DeepseekConfig, x: jax.Array) -> jax.Array:
    """Runs the block on one whole sequence x: [len, hidden_size], by the paper's formulas."""
    positions = jnp.arange(len(x))
    q_nope, q_rope, ckv, k_rope = _project(params, config, x, positions)
    kv = (ckv @ params["kv_b"]).reshape(len(x), config.num_attention_heads, -1)
    k_nope, v = jnp.split(kv, [config.qk_nope_head_dim], axis=-1)
    q_nope, q_rope, k_nope, k_rope = (
        a.astype(jnp.float32) for a in (q_nope, q_rope, k_nope, k_rope)
    )
    scores = jnp.einsum("qhd,khd->hqk", q_nope, k_nope)
    scores += jnp.einsum("qhd,kd->hqk", q_rope, k_rope)
    visible = positions[:, None] >= positions
    weights = jax.nn.softmax(jnp.where(visible, config.sm_scale * scores, -jnp.inf))
    return _add_output(params, config, x, jnp.einsum("hqk,khd->qhd", weights.astype(v.dtype), v))


def _split_kv_b(params: BlockParams, config: DeepseekConfig) -> tuple[jax.Array, jax.Array]:
    return mla.split_kv_b(params["kv_b"], config.num_attention_heads, config.qk_nope_head_dim)


def _project(
    params: BlockParams, config: DeepseekConfig, x: jax.Array, positions: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns q_nope, q_rope: [n, num_attention_heads, ...], ckv, k_rope: [n, ...]; rotated."""
    angles = config.rope.angles(config.qk_rope_head_dim, positions)
    h = _rms_norm(x, params["attention_norm"], config)
    q_in = h
    if config.q_lora_rank is not None:
        q_in = _rms_norm(h @ params["q_a"], params["q_a_norm"], config)
    q = (q_in @ params["q_b"]).reshape(len(x), config.num_attention_heads, -1)
    q_nope, q_rope = jnp.split(q, [config.qk_nope_head_dim], axis=-1)
    ckv, k_rope = jnp.split(h @ params["kv_a"], [config.kv_lora_rank], axis=-1)
    ckv = _rms_norm(ckv, params["kv_a_norm"], config)
    return q_nope, rotate(q_rope, angles), ckv, rotate(k_rope[:, None], angles)[:, 0]


def _add_output(
    params: BlockParams, config: DeepseekConfig, x: jax.Array, o: jax.Array
) -> jax.Array:
    x = x + o.reshape(len(x), -1) @ params["o"]
    gate, up = jnp.split(_rms_norm(x, params["mlp_norm"], config) @ params["gate_up"], 2, axis=-1)
    return x + (jax.nn.silu(gate) * up) @ params["down"]


def _rms_norm(x: jax.Array, weight: jax.Array, config: DeepseekConfig) -> jax.Array:
    x32 = x.astype(jnp.float32)
    variance = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
    return (x32 * jax.lax.rsqrt(variance + config.rms_norm_eps) * weight).astype(x.dtype)
