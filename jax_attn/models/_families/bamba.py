"""Bamba: layers of Mamba-2, and some with attention."""

from __future__ import annotations

from jax_attn.models._config.config import LayerKind, ModelConfig
from jax_attn.models._config.keys import Keys
from jax_attn.models._families import layer_kinds, mamba_keys, rope_keys, shared

# Falcon-H1 has them, too.
RENAMED = (
    ("post_attention_layernorm", "pre_ff_layernorm"),
    ("mlp.", "feed_forward."),
    ("model.norm", "model.final_layernorm"),
)


def bamba(keys: Keys) -> ModelConfig:
    keys.expect("mlp_bias", False)
    keys.expect("sliding_window", None)
    # transformers overwrites what is outside of RoPE's settings.
    keys.expect("partial_rotary_factor", 0.5)
    for name in ("layer_types", "layers_block_type"):
        keys.expect(name, None)
    indices = keys.items("attn_layer_indices") or []
    num_layers = layer_kinds.count(keys)
    if not all(type(i) is int for i in indices) or not any(i in range(num_layers) for i in indices):
        raise keys.error(
            f"attn_layer_indices: expected indices of some of the {num_layers} layers, got "
            f"{keys.get('attn_layer_indices')!r}"
        )
    head_dim = shared.head_dim_of(keys)
    if head_dim % 4:
        raise keys.error(
            f"num_attention_heads: expected a multiple of 4 dimensions for each head, half of which"
            f" rotate, got {head_dim}"
        )
    attention = LayerKind(rope_keys.read(keys, default_fraction=0.5))
    mamba = LayerKind(None, attention=False, recurrent=mamba_keys.read(keys))
    return shared.silu_model(
        keys,
        [attention if i in indices else mamba for i in range(num_layers)],
        default_kv_heads=8,
        renamed=RENAMED,
        **shared.biases(keys),
    )


FAMILIES = {"bamba": bamba}
