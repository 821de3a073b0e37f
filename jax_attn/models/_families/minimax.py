"""MiniMax 01 (lightning attention) and M2."""

from __future__ import annotations

import dataclasses

from jax_attn.models._config.config import LayerKind, ModelConfig, NormedResidual
from jax_attn.models._config.keys import Keys
from jax_attn.models._config.recurrent import Lightning
from jax_attn.models._families import layer_kinds, rope_keys, shared


def minimax_m2(keys: Keys) -> ModelConfig:
    # transformers ignores these, which say what it does.
    keys.expect("scoring_func", "sigmoid")
    keys.expect("use_qk_norm", True)
    keys.expect("qk_norm_type", "per_layer")
    keys.expect("use_routing_bias", True)
    keys.expect("shared_intermediate_size", 0)
    head_dim = shared.head_dim_of(keys, 128)
    fraction = 1.0
    if keys.get("rotary_dim") is not None:
        fraction = keys.size("rotary_dim") / head_dim
    rope = rope_keys.read(keys, 5e6, head_dim=head_dim, default_fraction=fraction)
    return shared.silu_model(
        keys,
        layer_kinds.all_full(keys, rope),
        default_kv_heads=8,
        head_dim=head_dim,
        qk_norm="all_heads",
        experts=shared.checked_experts(
            keys,
            count=keys.size(keys.name_of("num_local_experts", "num_experts"), 256),
            per_token=keys.size("num_experts_per_tok", 8),
            intermediate_size=keys.size("intermediate_size"),
            names=dataclasses.replace(
                shared.MIXTRAL_EXPERT_NAMES,
                correction="block_sparse_moe.e_score_correction_bias",
            ),
            sigmoid=True,
        ),
    )


def minimax(keys: Keys) -> ModelConfig:
    head_dim = shared.head_dim_of(keys)
    keys.expect("rotary_dim", head_dim, None)  # transformers ignores it
    keys.expect("shared_intermediate_size", 0)  # likewise
    keys.expect("postnorm", True)  # likewise
    num_layers, full, linear = layer_kinds.count(keys), layer_kinds.FULL, "linear_attention"
    attention = LayerKind(rope_keys.read(keys, 1e6), keys.size_or_none("sliding_window"))
    # A constant decay falls with the layer, and with the head (see Lightning).
    slopes = [1 - i / (num_layers - 1 + 1e-5) + 1e-5 for i in range(num_layers)]
    num_heads = keys.size("num_attention_heads")
    types = [linear if i % 2 else full for i in range(num_layers)]
    some = LayerKind(None, attention=False, recurrent=Lightning(num_heads, head_dim, 1.0))
    layers = layer_kinds.hybrid(keys, types, {full: attention, linear: some})
    layers = [
        LayerKind(None, attention=False, recurrent=Lightning(num_heads, head_dim, slope))
        if kind.recurrent
        else kind
        for kind, slope in zip(layers, slopes, strict=True)
    ]

    def factors(part: str) -> tuple[float, float]:
        alpha, beta = (keys.number(f"{part}_{x}_factor", 1.0) for x in ("alpha", "beta"))
        return alpha, beta

    return shared.silu_model(
        keys,
        layers,
        default_kv_heads=8,
        head_dim=head_dim,
        normed_residual=NormedResidual(
            factors("full_attn"), factors("linear_attn"), factors("mlp")
        ),
        experts=shared.checked_experts(
            keys,
            count=keys.size(keys.name_of("num_local_experts", "num_experts"), 8),
            per_token=keys.size("num_experts_per_tok", 2),
            intermediate_size=keys.size("intermediate_size"),
            names=shared.MIXTRAL_EXPERT_NAMES,
        ),
    )


FAMILIES = {
    "minimax": minimax,
    "minimax_m2": minimax_m2,
}
