"""dots.llm1."""

from __future__ import annotations

from jax_attn.models._config.config import ExpertGroups, ModelConfig
from jax_attn.models._config.keys import Keys
from jax_attn.models._families import layer_kinds, rope_keys, shared


def dots1(keys: Keys) -> ModelConfig:
    keys.expect("scoring_func", "sigmoid", "noaux_tc")  # transformers ignores it
    window = keys.size_or_none("sliding_window", 4096)
    first = keys.count("max_window_layers", 62)
    types = [
        layer_kinds.FULL if window is None or i < first else layer_kinds.SLIDING
        for i in range(layer_kinds.count(keys))
    ]
    size = keys.size("moe_intermediate_size", 1408)
    return shared.silu_model(
        keys,
        layer_kinds.by_type(keys, types, rope_keys.read(keys), window),
        default_kv_heads=32,
        qk_norm="per_head",
        experts=shared.checked_experts(
            keys,
            count=keys.size(keys.name_of("n_routed_experts", "num_local_experts")),
            per_token=keys.size("num_experts_per_tok"),
            intermediate_size=size,
            names=shared.EXPERT_NAMES,
            normalize=keys.flag("norm_topk_prob"),
            dense_layers=shared.first_layers(keys, keys.count("first_k_dense_replace", 0)),
            sigmoid=True,
            groups=ExpertGroups(keys.size("n_group", 1), keys.size("topk_group", 1), by_two=True),
            scale=keys.number("routed_scaling_factor", 1.0),
            shared_size=size * keys.size("n_shared_experts"),
        ),
        **shared.biases(keys),
    )


FAMILIES = {
    "dots1": dots1,
}
