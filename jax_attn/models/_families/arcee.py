"""Arcee (AFM)."""

from __future__ import annotations

from jax_attn.models._config.config import ModelConfig
from jax_attn.models._config.keys import Keys
from jax_attn.models._families import layer_kinds, rope_keys, shared


def arcee(keys: Keys) -> ModelConfig:
    keys.expect("mlp_bias", False)
    keys.expect("hidden_act", "relu2")
    return shared.model(
        keys,
        layer_kinds.all_full(keys, rope_keys.read(keys)),
        activation="relu2",
        gated=False,
        **shared.biases(keys),
    )


FAMILIES = {
    "arcee": arcee,
}
