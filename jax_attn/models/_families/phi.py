"""Phi-3, Phi-4 and Phi-3.5 MoE."""

from __future__ import annotations

import dataclasses

from jax_attn.models._config.config import ModelConfig
from jax_attn.models._config.keys import Keys
from jax_attn.models._config.rope import LongRopeScaling, Rope
from jax_attn.models._families import layer_kinds, rope_keys, shared


def phi3(keys: Keys) -> ModelConfig:
    window = keys.size_or_none("sliding_window")
    return shared.silu_model(
        keys, layer_kinds.equal(keys, _phi3_rope(keys), window), packed=("qkv", "gate_up")
    )


def _phi3_rope(keys: Keys) -> Rope:
    settings = rope_keys.settings_of(keys, None)
    if settings.get("rope_type", settings.get("type")) in ("su", "yarn", "longrope"):
        settings.raw["rope_type"] = "longrope"  # the others are older names
        name = "original_max_position_embeddings"
        outside = keys.size(name, 4096)
        if (inside := settings.get(name)) not in (None, outside):
            raise settings.error(f"{name}: expected {outside}, as outside of it, got {inside!r}")
        settings.raw[name] = outside
    return rope_keys.parse(settings, keys, 10000.0, shared.head_dim_of(keys))


def phimoe(keys: Keys) -> ModelConfig:
    keys.expect("num_experts_per_tok", 2)  # transformers ignores it
    rope = _phimoe_rope(keys)
    max_positions = keys.size("max_position_embeddings")
    if isinstance(rope.scaling, LongRopeScaling):
        # Programs differ on the factors of longer sequences.
        max_positions = min(max_positions, int(rope.scaling.original_max_position_embeddings))
    return shared.silu_model(
        keys,
        layer_kinds.equal(keys, rope, keys.size_or_none("sliding_window")),
        default_kv_heads=8,
        max_positions=max_positions,
        head_bias=keys.flag("lm_head_bias"),
        experts=shared.checked_experts(
            keys,
            count=keys.size("num_local_experts", 16),
            per_token=2,
            intermediate_size=keys.size("intermediate_size"),
            names=shared.MIXTRAL_EXPERT_NAMES,
            sparse_mixer=keys.number("router_jitter_noise", 0.01),
        ),
        **shared.layer_norms(keys, "rms_norm_eps"),
        **shared.biases(keys),
    )


def _phimoe_rope(keys: Keys) -> Rope:
    """With longrope, cos and sin are multiplied by mscales of the settings."""
    settings = rope_keys.settings_of(keys, None)
    rope_type = settings.get("rope_type", settings.get("type", "default"))
    if rope_type == "default":
        return rope_keys.read(keys, 1e6)
    if rope_type != "longrope":
        raise settings.error(f"rope_type: expected 'default' or 'longrope', got {rope_type!r}")
    rope_keys.set_original_length(keys, settings)
    amplitude, _ = (settings.number(f"{length}_mscale") for length in ("short", "long"))
    for length in ("short", "long"):
        del settings.raw[f"{length}_mscale"]
    rope = rope_keys.parse(settings, keys, 1e6, shared.head_dim_of(keys))
    if rope.fraction != 1:
        raise settings.error(f"partial_rotary_factor: expected 1.0, got {rope.fraction!r}")
    assert isinstance(rope.scaling, LongRopeScaling)
    scaling = dataclasses.replace(rope.scaling, amplitude=amplitude, is_long=False)
    return dataclasses.replace(rope, scaling=scaling)


FAMILIES = {
    "phi3": phi3,
    "phimoe": phimoe,
}
