"""SmolLM 3."""

from __future__ import annotations

import dataclasses

from jax_attn.models._config.config import ModelConfig
from jax_attn.models._config.keys import Keys
from jax_attn.models._families import layer_kinds, rope_keys, shared


def smollm3(keys: Keys) -> ModelConfig:
    keys.expect("mlp_bias", False)
    num_layers = layer_kinds.count(keys)
    has_rope = layer_kinds.have_rope(keys)
    window = keys.size_or_none("sliding_window")
    if not keys.flag("use_sliding_window"):
        window = None
    types = [
        layer_kinds.SLIDING if window and not has_rope[i] else layer_kinds.FULL
        for i in range(num_layers)
    ]
    layers = [
        kind if has_rope[i] else dataclasses.replace(kind, rope=None)
        for i, kind in enumerate(
            layer_kinds.by_type(keys, types, rope_keys.read(keys, 2e6), window)
        )
    ]
    tied = keys.flag("tie_word_embeddings", True)
    return shared.silu_model(
        keys, layers, default_kv_heads=4, tie_embeddings=tied, **shared.biases(keys)
    )


FAMILIES = {
    "smollm3": smollm3,
}
