"""Apertus."""

from __future__ import annotations

from jax_attn.models._config.config import ModelConfig
from jax_attn.models._config.keys import Keys
from jax_attn.models._families import layer_kinds, rope_keys, shared

_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12e6,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def apertus(keys: Keys) -> ModelConfig:
    keys.expect("hidden_act", "xielu")
    # transformers ignores these, which say what it does.
    keys.expect("mlp_bias", False)
    keys.expect("qk_norm", True)
    keys.expect("post_norm", False)
    return shared.model(
        keys,
        layer_kinds.all_full(keys, rope_keys.read(keys, 12e6, default=_ROPE)),
        activation="xielu",
        gated=False,
        qk_norm="per_head",
        renamed=(
            ("input_layernorm", "attention_layernorm"),
            ("post_attention_layernorm", "feedforward_layernorm"),
        ),
        **shared.biases(keys),
    )


FAMILIES = {
    "apertus": apertus,
}
