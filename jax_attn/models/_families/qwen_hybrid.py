"""Qwen3-Next and Qwen3.5: layers with the gated delta rule, and some with gated attention."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from jax_attn.models._config.config import Experts, LayerKind, ModelConfig
from jax_attn.models._config.keys import Keys
from jax_attn.models._config.rope import Rope
from jax_attn.models._families import layer_kinds, qwen, rope_keys, shared


def qwen3_next(keys: Keys) -> ModelConfig:
    experts = _shared_experts(
        keys,
        count=512,
        per_token=10,
        normalize=keys.flag("norm_topk_prob", True),
        dense_layers=qwen.dense_layers(keys),
    )
    return _hybrid(keys, layout="qkvz", default_kv_heads=2, experts=experts)


def qwen3_5(keys: Keys) -> ModelConfig:
    return _hybrid(keys, layout="qkv_z", default_kv_heads=4)


def qwen3_5_moe(keys: Keys) -> ModelConfig:
    # transformers ignores these.
    keys.expect("norm_topk_prob", True)
    keys.expect("decoder_sparse_step", 1)
    keys.expect("mlp_only_layers", None, [])
    experts = _shared_experts(keys, count=256, per_token=8, normalize=True)
    # No layer has an MLP of this size.
    keys = Keys({"intermediate_size": experts.intermediate_size} | keys.raw, keys.path)
    return _hybrid(keys, layout="qkv_z", default_kv_heads=2, experts=experts)


def with_images(keys: Keys) -> ModelConfig:
    """Returns the text model; models/_vision has its pictures."""
    family = f"{keys.need('model_type')}_text"
    text = shared.text_of(keys, family)
    if (tied := keys.get("tie_word_embeddings")) is not None:
        text.expect("tie_word_embeddings", tied)
    config = FAMILIES[family](Keys({"model_type": family} | text.raw, text.path))
    return dataclasses.replace(config, tensor_prefix="model.language_model.")


def _hybrid(keys: Keys, layout: Literal["qkvz", "qkv_z"], **options: Any) -> ModelConfig:
    """layout: see GatedDelta."""
    keys.expect("sliding_window", None)
    keys.expect("attn_output_gate", True)  # transformers ignores it
    head_dim = shared.head_dim_of(keys, 256)
    sizes = shared.gated_delta(
        keys,
        num_k_heads=keys.size("linear_num_key_heads", 16),
        num_v_heads=keys.size("linear_num_value_heads", 32),
        dim_k=keys.size("linear_key_head_dim", 128),
        dim_v=keys.size("linear_value_head_dim", 128),
        conv_width=keys.size("linear_conv_kernel_dim", 4),
        layout=layout,
    )
    full, linear = layer_kinds.FULL, "linear_attention"
    interval = keys.size("full_attention_interval", 4)
    types = [linear if (i + 1) % interval else full for i in range(layer_kinds.count(keys))]
    kinds = {
        full: LayerKind(_rope(keys, head_dim)),
        linear: LayerKind(None, attention=False, recurrent=sizes),
    }
    layers = layer_kinds.hybrid(keys, types, kinds)
    return shared.silu_model(
        keys,
        layers,
        head_dim=head_dim,
        qk_norm="per_head",
        norm_offset=1.0,
        attention_gate=True,
        **shared.biases(keys),
        **options,
    )


def _rope(keys: Keys, head_dim: int) -> Rope:
    settings = rope_keys.settings_of(keys, None)
    sections = rope_keys.take_sections(settings, [11, 11, 10])
    if settings.get("partial_rotary_factor") is None:
        settings.raw["partial_rotary_factor"] = keys.number("partial_rotary_factor", 0.25)
    rope_keys.set_original_length(keys, settings)
    rope = rope_keys.parse(settings, keys, 10000.0, head_dim)
    return dataclasses.replace(rope, sections=sections)


def _shared_experts(keys: Keys, count: int, per_token: int, **options: Any) -> Experts:
    return shared.checked_experts(
        keys,
        count=keys.size(keys.name_of("num_experts", "num_local_experts"), count),
        per_token=keys.size("num_experts_per_tok", per_token),
        intermediate_size=keys.size("moe_intermediate_size", 512),
        names=dataclasses.replace(shared.EXPERT_NAMES, shared="mlp.shared_expert"),
        shared_size=keys.size("shared_expert_intermediate_size", 512),
        shared_gate=True,
        **options,
    )


FAMILIES = {
    "qwen3_next": qwen3_next,
    "qwen3_5_text": qwen3_5,
    "qwen3_5": with_images,
    "qwen3_5_moe_text": qwen3_5_moe,
    "qwen3_5_moe": with_images,
}
