"""EXAONE 4."""

from __future__ import annotations

import dataclasses

from jax_attn.models._config.config import ModelConfig
from jax_attn.models._config.keys import Keys
from jax_attn.models._families import layer_kinds, rope_keys, shared


def exaone4(keys: Keys) -> ModelConfig:
    """Layers with full attention have no RoPE if others have a window."""
    window = keys.size_or_none("sliding_window", 4096)
    types = [layer_kinds.FULL] * layer_kinds.count(keys)
    # With layer_types the pattern is not read. It may be a text such as "LLLG".
    if window is not None and keys.get("layer_types") is None:
        types = layer_kinds.all_but_each(keys, keys.size("sliding_window_pattern", 4))
    layers = layer_kinds.by_type(keys, types, rope_keys.read(keys), window)
    if window is not None:
        layers = [
            kind if kind.window is not None else dataclasses.replace(kind, rope=None)
            for kind in layers
        ]
    return shared.silu_model(
        keys,
        layers,
        default_kv_heads=32,
        qk_norm="per_head",
        pre_norms=False,
        post_norms=True,
    )


FAMILIES = {
    "exaone4": exaone4,
}
