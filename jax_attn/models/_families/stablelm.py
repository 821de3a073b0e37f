"""StableLM."""

from __future__ import annotations

from jax_attn.models._config.config import ModelConfig
from jax_attn.models._config.keys import Keys
from jax_attn.models._families import layer_kinds, rope_keys, shared


def stablelm(keys: Keys) -> ModelConfig:
    shared.expect_share_of_hidden_size(keys)
    return shared.silu_model(
        keys,
        layer_kinds.all_full(keys, rope_keys.read(keys, default_fraction=0.25)),
        default_kv_heads=32,
        qkv_bias=keys.flag("use_qkv_bias"),
        qk_norm="each_head" if keys.flag("qk_layernorm") else "none",
        parallel="same_norm" if keys.flag("use_parallel_residual") else "",
        renamed=(
            ("self_attn.q_norm", "self_attn.q_layernorm.norms"),
            ("self_attn.k_norm", "self_attn.k_layernorm.norms"),
        ),
        **shared.layer_norms(keys, "layer_norm_eps"),
    )


FAMILIES = {
    "stablelm": stablelm,
}
