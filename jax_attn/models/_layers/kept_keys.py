"""How much a prompt's queries look at each of its keys, and copies of the keys that heads keep."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

import jax_attn as ja
from jax_attn.models._config.config import KvPlace, LayerKind, ModelConfig
from jax_attn.models._layers.decoder import (
    _layers,
    _rotated_heads,
    _sinks,
    _soft_cap,
)
from jax_attn.models._layers.lora import Adapters
from jax_attn.models._weights.weights import Params

KEYS_AT_ONCE = 512  # whose weights are in memory


def why_not_kept(config: ModelConfig) -> str | None:
    """Why the heads of the model cannot keep some keys each; None: they can."""
    if config.why_not_all_keys is not None:
        return config.why_not_all_keys
    if len(config.attention_kinds) > 1 or any(kind.shares_kv for kind in config.layers):
        return "layers with different keys"
    return None


def add_weights(
    sums: jax.Array,
    params: Params,
    config: ModelConfig,
    tokens: jax.Array,
    positions: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    plan: ja.AttentionPlan,
    pages: jax.Array,
    adapters: Adapters | None = None,
) -> jax.Array:
    """Adds the attention weights of some tokens of a sequence to the sums of its keys.

    The tokens go through the model once more; their keys and values, and those before them, are in
    the cache already. Weights are summed over the queries and query heads of each KV head.

    sums: [num_layers, num_kv_heads, num_keys] f32. Written in place if donated.
    tokens, positions: [max_qo_tokens] i32. Neighbours in the text; the plan says how many.
    k_pages, v_pages: as `init_pages` makes them, for a model without `why_not_kept`.
    plan: of one request, up to the last of the tokens.
    pages: [num_keys / page_size] i32, as many as make KEYS_AT_ONCE keys several times: the pages of
      the sequence in the order of its text, then anything.

    Returns sums.
    """
    page_size = k_pages.shape[2]
    num_pages = KEYS_AT_ONCE // page_size
    is_query = jnp.arange(len(tokens)) < plan.nnz_qo
    num_keys = jnp.max(jnp.where(is_query, positions, -1)) + 1
    # A query sees the keys up to its own; rows of padding see none.
    last = jnp.where(is_query, positions, -1)

    def attend(qkv: jax.Array, weights: Params, place: KvPlace, kind: LayerKind) -> jax.Array:
        nonlocal sums
        layer = place.layer
        q, k, _ = _rotated_heads(qkv, weights, positions, config, kind)
        o, lse = ja.attention(
            q, k_pages, v_pages, plan, layer=layer, sinks=_sinks(weights, config), return_lse=True
        )
        heads = k.shape[1]
        q = q.reshape(len(q), heads, -1, q.shape[-1])
        log_sums = lse.T.reshape(heads, -1, len(q), 1)

        def add(i: jax.Array, sums: jax.Array) -> jax.Array:
            ids = lax.dynamic_slice(pages, (i * num_pages,), (num_pages,))
            rows = k_pages[jnp.full(num_pages, layer), ids]  # one gather, not a slice of the pool
            rows = rows.reshape(KEYS_AT_ONCE, heads, -1)[..., : q.shape[-1]]
            logits = jnp.einsum("qhgd,khd->hgqk", q, rows, preferred_element_type=jnp.float32)
            logits = _soft_cap(config.sm_scale * logits, config.attention_soft_cap)
            sees = i * KEYS_AT_ONCE + jnp.arange(KEYS_AT_ONCE) <= last[:, None]
            more = jnp.where(sees, jnp.exp(logits - log_sums), 0).sum((1, 2))[None]
            at = layer, 0, i * KEYS_AT_ONCE
            old = lax.dynamic_slice(sums, at, more.shape)
            return lax.dynamic_update_slice(sums, old + more, at)

        sums = lax.fori_loop(0, -(-num_keys // KEYS_AT_ONCE), add, sums)
        return o

    _layers(tokens, params, config, attend, adapters)
    return sums


def copy_kept(
    k_pages: jax.Array,
    v_pages: jax.Array,
    kept: jax.Array,
    sources: jax.Array,
    targets: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Copies the keys and values that each head keeps to the first slots of other pages.

    k_pages, v_pages: as for `add_weights`. Written in place if donated.
    kept: [num_layers, num_kv_heads, budget] i32, positions in the text.
    sources: [n] i32, the pages of the text. targets: [m] i32, those that hold `budget` keys; slots
      that are left in the last of them get copies, too.

    Returns k_pages, v_pages.
    """

    def of_layer(layer: jax.Array, pages: jax.Array) -> jax.Array:
        _, _, page_size, heads, _ = pages.shape
        room = len(targets) * page_size
        at = jnp.pad(kept[layer], ((0, 0), (0, room - kept.shape[2])), mode="edge").T
        rows = pages[layer, sources[at // page_size], at % page_size, jnp.arange(heads)]
        return pages.at[layer, targets].set(rows.reshape(len(targets), page_size, heads, -1))

    k_pages, v_pages = (lax.fori_loop(0, len(x), of_layer, x) for x in (k_pages, v_pages))
    return k_pages, v_pages
