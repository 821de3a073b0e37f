"""DeepSeek V2, V3 and R1, Kimi K2, GLM 4.7 Flash: latent attention and experts in groups."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax_attn.models._config.config import ExpertGroups, Latent, ModelConfig
from jax_attn.models._config.keys import Keys
from jax_attn.models._config.rope import YarnScaling
from jax_attn.models._families import layer_kinds, rope_keys, shared


def deepseek_v2(keys: Keys) -> ModelConfig:
    keys.expect("scoring_func", "softmax")
    keys.expect("norm_topk_prob", False)  # transformers ignores it
    keys.expect("mlp_bias", False)
    keys.expect("rope_interleave", True)  # transformers ignores it
    keys.expect("topk_method", "greedy", "group_limited_greedy")
    groups = None
    if keys.get("topk_method") == "group_limited_greedy":
        groups = ExpertGroups(keys.size("n_group"), keys.size("topk_group"), by_two=False)
    return _deepseek(
        keys,
        count=keys.size(keys.name_of("n_routed_experts", "num_experts"), 64),
        per_token=keys.size("num_experts_per_tok"),
        intermediate_size=keys.size("moe_intermediate_size", 1407),
        num_shared=keys.size("n_shared_experts", 2),
        dense_layers=shared.first_layers(keys, keys.count("first_k_dense_replace", 0)),
        groups=groups,
        normalize=False,
        scale=keys.number("routed_scaling_factor", 1.0),
    )


def deepseek_v3(keys: Keys) -> ModelConfig:
    keys.expect("scoring_func", "sigmoid")
    keys.expect("topk_method", "noaux_tc")
    config = _deepseek(
        keys,
        interleaved=keys.flag("rope_interleave", True),
        count=keys.size(keys.name_of("n_routed_experts", "num_local_experts"), 256),
        per_token=keys.size("num_experts_per_tok", 8),
        intermediate_size=keys.size("moe_intermediate_size", 2048),
        num_shared=keys.size("n_shared_experts", 1),
        dense_layers=shared.first_layers(keys, keys.count("first_k_dense_replace", 3)),
        groups=ExpertGroups(keys.size("n_group", 8), keys.size("topk_group", 4), by_two=True),
        normalize=keys.flag("norm_topk_prob", True),
        scale=keys.number("routed_scaling_factor", 2.5),
        sigmoid=True,
    )
    # The extra layers are for multi-token prediction.
    extra = keys.count(keys.name_of("num_nextn_predict_layers", "num_mtp_layers"), 0)
    return dataclasses.replace(config, extra_layers=extra)


def glm4_moe_lite(keys: Keys) -> ModelConfig:
    num_layers = layer_kinds.count(keys)
    keys.expect("first_k_dense_replace", 1)  # transformers ignores it
    keys.expect("topk_method", "noaux_tc")
    types = keys.items("mlp_layer_types") or ["dense"] + ["sparse"] * (num_layers - 1)
    if len(types) < num_layers or not all(each in ("dense", "sparse") for each in types):
        raise keys.error(
            f"mlp_layer_types: expected {num_layers} times 'dense' or 'sparse', got {types!r}"
        )
    return _deepseek(
        keys,
        interleaved=keys.flag("rope_interleave", True),
        default_sizes=(768, 512, 192, 64, 256),
        count=keys.size(keys.name_of("n_routed_experts", "num_local_experts"), 64),
        per_token=keys.size("num_experts_per_tok", 4),
        intermediate_size=keys.size("moe_intermediate_size", 1536),
        num_shared=keys.size("n_shared_experts", 1),
        dense_layers=tuple(i for i in range(num_layers) if types[i] == "dense"),
        groups=ExpertGroups(keys.size("n_group", 1), keys.size("topk_group", 1), by_two=True),
        normalize=keys.flag("norm_topk_prob", True),
        scale=keys.number("routed_scaling_factor", 1.8),
        sigmoid=True,
    )


def _deepseek(
    keys: Keys,
    *,
    intermediate_size: int,
    num_shared: int,
    dense_layers: tuple[int, ...],
    interleaved: bool = True,
    default_sizes: tuple[int, int, int, int, int] = (1536, 512, 128, 64, 128),
    **experts: Any,
) -> ModelConfig:
    keys.expect("attention_bias", False)
    keys.expect("moe_layer_freq", 1)  # transformers ignores it
    q_rank, kv_rank, nope, rope_dim, v = default_sizes
    latent = Latent(
        q_rank=keys.size_or_none("q_lora_rank", q_rank),
        kv_rank=keys.size("kv_lora_rank", kv_rank),
        nope=keys.size("qk_nope_head_dim", nope),
        rope=keys.size("qk_rope_head_dim", rope_dim),
        v=keys.size("v_head_dim", v),
        interleaved=interleaved,
    )
    if latent.rope % 2:
        raise keys.error(f"qk_rope_head_dim: expected an even number, got {latent.rope}")
    # transformers takes head_dim for that of RoPE.
    keys.expect("head_dim", latent.rope, None)
    rope = rope_keys.read(keys, head_dim=latent.rope)
    # Logit scale of YaRN, section 3.4, applied in the model here and not in cos and sin.
    mscale = 1.0
    if isinstance(rope.scaling, YarnScaling) and rope.scaling.mscale_all_dim:
        mscale = rope.scaling.mscale_of(rope.scaling.mscale_all_dim)
    return shared.silu_model(
        keys,
        layer_kinds.all_full(keys, rope),
        num_kv_heads=1,
        head_dim=latent.kv_rank + latent.rope,
        sm_scale=(latent.nope + latent.rope) ** -0.5 * mscale**2,
        latent=latent,
        experts=shared.checked_experts(
            keys,
            intermediate_size=intermediate_size,
            names=shared.EXPERT_NAMES,
            dense_layers=dense_layers,
            shared_size=intermediate_size * num_shared,
            **experts,
        ),
    )


FAMILIES = {
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "glm4_moe_lite": glm4_moe_lite,
    "kimi_k2": deepseek_v3,  # its files name the same model so
}
