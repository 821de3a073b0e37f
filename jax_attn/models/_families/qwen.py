"""Qwen 2 and 3, and their mixtures of experts."""

from __future__ import annotations

import dataclasses

from jax_attn.models._config.config import LayerKind, ModelConfig
from jax_attn.models._config.keys import Keys
from jax_attn.models._families import layer_kinds, rope_keys, shared


def qwen2(keys: Keys) -> ModelConfig:
    return shared.silu_model(keys, _qwen_layers(keys), default_kv_heads=32, qkv_bias=True)


def qwen3(keys: Keys) -> ModelConfig:
    return shared.silu_model(
        keys,
        _qwen_layers(keys, default_head_dim=128),
        default_kv_heads=32,
        head_dim=shared.head_dim_of(keys, 128),
        qk_norm="per_head",
        **shared.biases(keys),
    )


def qwen2_moe(keys: Keys) -> ModelConfig:
    window = None
    if keys.flag("use_sliding_window"):  # else transformers writes 0
        window = keys.size_or_none("sliding_window", 4096)
    first = keys.count("max_window_layers", 28)
    types = [
        layer_kinds.FULL if window is None or i % 2 or i >= first else layer_kinds.SLIDING
        for i in range(layer_kinds.count(keys))
    ]
    return shared.silu_model(
        keys,
        layer_kinds.by_type(keys, types, rope_keys.read(keys), window),
        default_kv_heads=16,
        qkv_bias=keys.flag("qkv_bias", True),
        experts=shared.checked_experts(
            keys,
            count=keys.size(keys.name_of("num_experts", "num_local_experts"), 60),
            per_token=keys.size("num_experts_per_tok", 4),
            intermediate_size=keys.size("moe_intermediate_size", 1408),
            names=dataclasses.replace(shared.EXPERT_NAMES, shared="mlp.shared_expert"),
            normalize=keys.flag("norm_topk_prob"),
            dense_layers=dense_layers(keys),
            shared_size=keys.size("shared_expert_intermediate_size", 5632),
            shared_gate=True,
        ),
    )


def qwen3_moe(keys: Keys) -> ModelConfig:
    window = keys.size_or_none("sliding_window", 4096)
    if not keys.flag("use_sliding_window"):
        window = None
    return shared.silu_model(
        keys,
        layer_kinds.equal(keys, rope_keys.read(keys), window),
        default_kv_heads=4,
        qk_norm="per_head",
        experts=shared.checked_experts(
            keys,
            # The second name is the one that transformers 5 writes.
            count=keys.size(keys.name_of("num_experts", "num_local_experts"), 128),
            per_token=keys.size("num_experts_per_tok", 8),
            intermediate_size=keys.size("moe_intermediate_size", 768),
            names=shared.EXPERT_NAMES,
            normalize=keys.flag("norm_topk_prob"),
            dense_layers=dense_layers(keys),
        ),
        **shared.biases(keys),
    )


def dense_layers(keys: Keys) -> tuple[int, ...]:
    """The layers of a mixture of experts that have an MLP."""
    num_layers, step = layer_kinds.count(keys), keys.size("decoder_sparse_step", 1)
    named = keys.items("mlp_only_layers") or []
    if not all(type(i) is int for i in named):
        raise keys.error(f"mlp_only_layers: expected integers, got {named!r}")
    return tuple(i for i in range(num_layers) if i in named or (i + 1) % step)


def _qwen_layers(keys: Keys, default_head_dim: int | None = None) -> list[LayerKind]:
    rope = rope_keys.read(keys, head_dim=shared.head_dim_of(keys, default_head_dim))
    window = keys.size_or_none("sliding_window", 4096)
    if not keys.flag("use_sliding_window"):
        window = None
    first = keys.count("max_window_layers", 28)
    types = [
        layer_kinds.FULL if window is None or i < first else layer_kinds.SLIDING
        for i in range(layer_kinds.count(keys))
    ]
    return layer_kinds.by_type(keys, types, rope, window)


FAMILIES = {
    "qwen2": qwen2,
    "qwen2_moe": qwen2_moe,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
}
