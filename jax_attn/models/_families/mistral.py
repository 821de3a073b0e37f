"""Mistral, Ministral 3 and Mixtral."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax_attn.models._config.config import ModelConfig, Temperature
from jax_attn.models._config.keys import Keys
from jax_attn.models._families import layer_kinds, rope_keys, shared


def mistral(keys: Keys) -> ModelConfig:
    window = keys.size_or_none("sliding_window", 4096)
    return shared.silu_model(
        keys, layer_kinds.equal(keys, rope_keys.read(keys), window), default_kv_heads=8
    )


def mixtral(keys: Keys) -> ModelConfig:
    return shared.silu_model(
        keys,
        layer_kinds.equal(keys, rope_keys.read(keys, 1e6), keys.size_or_none("sliding_window")),
        default_kv_heads=8,
        experts=shared.checked_experts(
            keys,
            count=keys.size(keys.name_of("num_local_experts", "num_experts"), 8),
            per_token=keys.size("num_experts_per_tok", 2),
            intermediate_size=keys.size("intermediate_size"),
            names=shared.MIXTRAL_EXPERT_NAMES,
        ),
    )


def ministral3(keys: Keys) -> ModelConfig:
    default_rope = {
        "type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    }
    settings = rope_keys.settings_of(keys, default_rope)
    rope_keys.set_original_length(keys, settings)
    beta = settings.number("llama_4_scaling_beta")
    length = settings.number("original_max_position_embeddings")
    for name in ("llama_4_scaling_beta", "max_position_embeddings"):
        settings.raw.pop(name, None)
    head_dim = shared.head_dim_of(keys, 128)
    rope = rope_keys.parse(settings, keys, 1e4, head_dim)
    if rope.fraction != 1:
        raise settings.error(f"partial_rotary_factor: expected 1.0, got {rope.fraction!r}")
    layers = [
        dataclasses.replace(kind, temperature=Temperature(beta, length))
        for kind in layer_kinds.equal(keys, rope, keys.size_or_none("sliding_window"))
    ]
    return shared.silu_model(keys, layers, default_kv_heads=8, head_dim=head_dim)


def mistral3(keys: Keys) -> ModelConfig:
    """The text model; models/_vision has its pictures."""
    text = shared.text_of(keys, "mistral", "ministral3")
    common = ("bos_token_id", "eos_token_id")
    outer: dict[str, Any] = {key: keys.raw[key] for key in common if keys.get(key) is not None}
    outer["tie_word_embeddings"] = keys.flag("tie_word_embeddings", True)
    text = Keys({"model_type": "mistral"} | text.raw | outer, text.path)
    config = (ministral3 if text.get("model_type") == "ministral3" else mistral)(text)
    return dataclasses.replace(config, tensor_prefix="language_model.")


FAMILIES = {
    "mistral3": mistral3,
    "ministral3": ministral3,
    "mistral": mistral,
    "mixtral": mixtral,
}
