"""Granite, its mixture of experts, and Granite 4: layers of Mamba-2, and some with attention."""

from __future__ import annotations

from typing import Any

from jax_attn.models._config.config import ExpertNames, Experts, LayerKind, ModelConfig
from jax_attn.models._config.keys import Keys
from jax_attn.models._families import layer_kinds, mamba_keys, rope_keys, shared

_RENAMED = (
    ("mlp.gate_up_proj", "shared_mlp.input_linear"),
    ("mlp.down_proj", "shared_mlp.output_linear"),
)


def granite(keys: Keys) -> ModelConfig:
    keys.expect("mlp_bias", False)
    return _granite(keys, layer_kinds.all_full(keys, rope_keys.read(keys)))


def granitemoe(keys: Keys) -> ModelConfig:
    experts = _experts(keys, keys.size("num_local_experts", 8))
    return _granite(keys, layer_kinds.all_full(keys, rope_keys.read(keys)), experts=experts)


def granite_moe_hybrid(keys: Keys) -> ModelConfig:
    keys.expect("sliding_window", None)
    keys.expect("position_embedding_type", None, "nope", "rope")
    is_rotated = keys.get("position_embedding_type") == "rope"
    attention = LayerKind(rope_keys.read(keys) if is_rotated else None)
    kinds = {layer_kinds.FULL: attention, "attention": attention}
    name = keys.name_of("layer_types", "layers_block_type")
    named = keys.items(name)
    linear = "linear_attention", "mamba"
    if named is None or any(each in linear for each in named):
        mamba = LayerKind(None, attention=False, recurrent=mamba_keys.read(keys))
        kinds |= dict.fromkeys(linear, mamba)
    types = [linear[0]] * layer_kinds.count(keys)
    keys = Keys(keys.raw | {"layer_types": named}, keys.path)
    layers = layer_kinds.hybrid(keys, types, kinds)
    shared_size = keys.size("shared_intermediate_size", 1024)
    options: dict[str, Any] = {"intermediate_size": shared_size}
    if keys.count("num_local_experts", 8):
        experts = keys.size("num_local_experts", 8)
        options["experts"] = _experts(keys, experts, shared_size=shared_size)
    return _granite(keys, layers, packed=("gate_up",), renamed=_RENAMED, **options)


def _experts(keys: Keys, count: int, **options: Any) -> Experts:
    block = "block_sparse_moe"
    return shared.checked_experts(
        keys,
        count=count,
        per_token=keys.size("num_experts_per_tok", 2),
        intermediate_size=keys.size("intermediate_size"),
        names=ExpertNames(
            f"{block}.router.layer",
            (f"{block}.input_linear.weight",),
            f"{block}.output_linear.weight",
            shared="mlp",
        ),
        stacked="rows",
        **options,
    )


def _granite(keys: Keys, layers: list[LayerKind], **options: Any) -> ModelConfig:
    return shared.silu_model(
        keys,
        layers,
        sm_scale=keys.number("attention_multiplier", 1.0),
        embedding_scale=keys.number("embedding_multiplier", 1.0),
        residual_scale=keys.number("residual_multiplier", 1.0),
        logit_scale=1 / keys.number("logits_scaling", 1.0),
        **shared.biases(keys),
        **options,
    )


FAMILIES = {
    "granite": granite,
    "granitemoe": granitemoe,
    "granitemoehybrid": granite_moe_hybrid,
}
