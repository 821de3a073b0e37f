"""Cohere's Command R, R+, R7B and A, and Aya."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax_attn.models._config.config import LayerKind, ModelConfig
from jax_attn.models._config.keys import Keys
from jax_attn.models._families import layer_kinds, rope_keys, shared


def cohere(keys: Keys) -> ModelConfig:
    layers = layer_kinds.all_full(keys, rope_keys.read(keys, 5e5, interleaved=True))
    has_norms = keys.flag("use_qk_norm")
    return _cohere(keys, layers, packed=("qk_norm",), qk_norm="each_head" if has_norms else "none")


def cohere2(keys: Keys) -> ModelConfig:
    """Layers with full attention have no RoPE."""
    shared.expect_share_of_hidden_size(keys)
    # transformers ignores these, which say what it does.
    keys.expect("use_parallel_block", True)
    keys.expect("use_gated_activation", True)
    keys.expect("rotary_pct", 1.0)
    window = keys.size("sliding_window", 4096)
    types = [layer_kinds.FULL] * layer_kinds.count(keys)
    if keys.get("layer_types") is None:
        types = layer_kinds.all_but_each(keys, keys.size("sliding_window_pattern", 4))
    rope = rope_keys.read(keys, interleaved=True)
    layers = [
        kind if kind.window is not None else dataclasses.replace(kind, rope=None)
        for kind in layer_kinds.by_type(keys, types, rope, window)
    ]
    return _cohere(keys, layers)


def _cohere(keys: Keys, layers: list[LayerKind], **options: Any) -> ModelConfig:
    return shared.silu_model(
        keys,
        layers,
        parallel="same_norm",
        tie_embeddings=keys.flag("tie_word_embeddings", True),
        logit_scale=keys.number("logit_scale", 0.0625),
        **shared.layer_norms(keys, "layer_norm_eps", bias=False),
        **shared.biases(keys),
        **options,
    )


FAMILIES = {
    "cohere": cohere,
    "cohere2": cohere2,
}
