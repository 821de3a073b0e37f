"""Adapters in a forward pass: those of a batch's tokens, as data."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import jax

from jax_attn.models._config.config import ModelConfig
from jax_attn.models._products.lora import Adapted, LoraPool
from jax_attn.models._weights.lora_files import column_parts
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
    return weights | {
        name: Adapted(weights[name], pool, adapters.of_tokens, _ends(name, layer, pool, config))
        for name, pool in adapters.pools[layer].items()
    }


def _ends(name: str, layer: int, pool: LoraPool, config: ModelConfig) -> tuple[int, ...]:
    """Where the columns of a weight's parts end, on one device."""
    num_parts, columns = pool.a.shape[1], pool.b.shape[2]
    if name.endswith("gate_up"):  # the config has the columns of all devices
        return (columns,) if num_parts == 1 else (columns // 2, columns)
    return tuple(itertools.accumulate(num for _, num in column_parts(name, layer, config)))
