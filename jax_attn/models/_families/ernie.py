"""ERNIE 4.5 and its mixture of experts."""

from __future__ import annotations

import dataclasses

from jax_attn.models._config.config import ModelConfig
from jax_attn.models._config.keys import Keys
from jax_attn.models._families import layer_kinds, rope_keys, shared


def ernie4_5(keys: Keys) -> ModelConfig:
    head_dim = shared.head_dim_of(keys, 128)
    return _ernie(keys, head_dim, 2)


def ernie4_5_moe(keys: Keys) -> ModelConfig:
    end = keys.get("moe_layer_end_index", -1)
    last = layer_kinds.count(keys) - 1 if end == -1 else keys.count("moe_layer_end_index", -1)
    first = keys.count("moe_layer_start_index", 1)
    step = keys.size("moe_layer_interval", 1)
    dense_layers = tuple(
        i for i in range(layer_kinds.count(keys)) if (i + 1) % step or not first <= i <= last
    )
    keys.expect("moe_norm_min", 1e-12)
    per_token = keys.name_of("moe_k", "num_experts_per_tok")
    size = keys.size("moe_intermediate_size", 1536)
    experts = shared.checked_experts(
        keys,
        # The second names are those that transformers takes for the same.
        count=keys.size(keys.name_of("moe_num_experts", "num_experts", "num_local_experts"), 64),
        per_token_key=per_token,
        per_token=keys.size(per_token, 6),
        intermediate_size=size,
        names=dataclasses.replace(
            shared.EXPERT_NAMES,
            correction="mlp.moe_statics.e_score_correction_bias",
            correction_is_row=True,
        ),
        dense_layers=dense_layers,
        has_correction=True,
        shared_size=size * keys.count("moe_num_shared_experts", 2),
    )
    return dataclasses.replace(_ernie(keys, shared.head_dim_of(keys), 4), experts=experts)


def _ernie(keys: Keys, head_dim: int, default_kv_heads: int) -> ModelConfig:
    keys.expect("use_bias", False, None)
    rope = rope_keys.read(keys, 5e5, head_dim=head_dim, interleaved=True)
    return shared.silu_model(
        keys,
        layer_kinds.all_full(keys, rope),
        default_kv_heads=default_kv_heads,
        head_dim=head_dim,
        tie_embeddings=keys.flag("tie_word_embeddings", True),
    )


FAMILIES = {
    "ernie4_5": ernie4_5,
    "ernie4_5_moe": ernie4_5_moe,
}
