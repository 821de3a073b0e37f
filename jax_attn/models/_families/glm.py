"""GLM 4."""

from __future__ import annotations

from jax_attn.models._config.config import ExpertGroups, ModelConfig
from jax_attn.models._config.keys import Keys
from jax_attn.models._families import layer_kinds, rope_keys, shared


def glm4(keys: Keys) -> ModelConfig:
    head_dim = shared.head_dim_of(keys, 128)
    rope = rope_keys.read(keys, head_dim=head_dim, default_fraction=0.5, interleaved=True)
    return shared.silu_model(
        keys,
        layer_kinds.all_full(keys, rope),
        default_kv_heads=2,
        head_dim=head_dim,
        qkv_bias=keys.flag("attention_bias", True),
        packed=("gate_up",),
        post_norms=True,
        post_norm_names=("post_self_attn_layernorm", "post_mlp_layernorm"),
    )


def glm4_moe(keys: Keys) -> ModelConfig:
    keys.expect("scoring_func", "sigmoid")
    keys.expect("topk_method", "noaux_tc")
    size = keys.size("moe_intermediate_size", 1408)
    return shared.silu_model(
        keys,
        layer_kinds.all_full(keys, rope_keys.read(keys, default_fraction=0.5)),
        default_kv_heads=8,
        qkv_bias=keys.flag("attention_bias"),
        qk_norm="per_head" if keys.flag("use_qk_norm") else "none",
        extra_layers=keys.count(keys.name_of("num_nextn_predict_layers", "num_mtp_layers"), 1),
        experts=shared.checked_experts(
            keys,
            count=keys.size(keys.name_of("n_routed_experts", "num_local_experts"), 128),
            per_token=keys.size("num_experts_per_tok", 8),
            intermediate_size=size,
            names=shared.EXPERT_NAMES,
            normalize=keys.flag("norm_topk_prob", True),
            dense_layers=shared.first_layers(keys, keys.count("first_k_dense_replace", 1)),
            sigmoid=True,
            groups=ExpertGroups(keys.size("n_group", 1), keys.size("topk_group", 1), by_two=True),
            scale=keys.number("routed_scaling_factor", 1.0),
            shared_size=size * keys.size("n_shared_experts", 1),
        ),
    )


FAMILIES = {
    "glm4": glm4,
    "glm4_moe": glm4_moe,
}
