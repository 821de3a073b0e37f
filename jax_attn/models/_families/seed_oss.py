"""Seed-OSS."""

from __future__ import annotations

from jax_attn.models._config.config import ModelConfig
from jax_attn.models._config.keys import Keys
from jax_attn.models._families import layer_kinds, rope_keys, shared


def seed_oss(keys: Keys) -> ModelConfig:
    keys.expect("mlp_bias", False)
    head_dim = shared.head_dim_of(keys, 128)
    return shared.silu_model(
        keys,
        layer_kinds.all_full(keys, rope_keys.read(keys, head_dim=head_dim)),
        default_kv_heads=8,
        head_dim=head_dim,
        qkv_bias=keys.flag("attention_bias", True),
        o_bias=keys.flag("attention_out_bias"),
    )


FAMILIES = {
    "seed_oss": seed_oss,
}
