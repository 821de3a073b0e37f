"""Adapters in a forward pass: those of a batch's tokens, as data."""

from __future__ import annotations

from typing import NamedTuple

import jax

from jax_attn.models._config.config import ModelConfig
from jax_attn.models._products.lora import Adapted, LoraPool
from jax_attn.models._weights.weights import Params

Pools = list[dict[str, LoraPool]]
"""For each layer, a pool for each weight that adapters may change."""


class Adapters(NamedTuple):
    """The adapters of a batch.

    pools: as `LoraPools` holds them. of_tokens: [max_qo_tokens] i32. The adapter of each token;
    -1: none.
    """

    pools: Pools
    of_tokens: jax.Array


def adapted(weights: Params, adapters: Adapters | None, layer: int, config: ModelConfig) -> Params:
    """A layer's weights, with their adapters. config: of one device's part."""
    if adapters is None:
        return weights
    pools, own = adapters.pools[layer], config.of(config.layers[layer])
    return weights | {
        name: Adapted(weights[name], pool, adapters.of_tokens, _ends(name, pool, own))
        for name, pool in pools.items()
    }


def _ends(name: str, pool: LoraPool, config: ModelConfig) -> tuple[int, ...]:
    """Where the columns of a weight's parts end, on one device."""
    num_parts, columns = pool.a.shape[1], pool.b.shape[2]
    if num_parts == 1:
        return (columns,)
    if name == "qkv":
        q, kv = (n * config.head_dim for n in (config.num_qo_heads, config.num_kv_heads))
        return (q, q + kv, q + 2 * kv)[:num_parts]
    return columns // 2, columns  # gate and up
