"""Falcon-H1: attention and Mamba-2 side by side in each layer."""

from __future__ import annotations

from jax_attn.models._config.config import LayerKind, ModelConfig
from jax_attn.models._config.keys import Keys
from jax_attn.models._families import bamba, layer_kinds, mamba_keys, rope_keys, shared


def falcon_h1(keys: Keys) -> ModelConfig:
    keys.expect("mlp_bias", False)
    keys.expect("sliding_window", None)
    for name in ("layer_types", "layers_block_type"):
        keys.expect(name, None, ["hybrid"] * layer_kinds.count(keys))

    def scales(key: str, count: int) -> tuple[float, ...]:
        return (1.0,) * count if keys.get(key) is None else keys.numbers(key, count)

    norm = "none"
    if keys.flag("mamba_rms_norm"):
        norm = "gate_last" if keys.flag("mamba_norm_before_gate", True) else "gate_first"
    mamba = mamba_keys.read(
        keys,
        keys.size_or_none("mamba_d_ssm", 1024),
        out_bias=keys.flag("projectors_bias"),
        norm=norm,
        in_scale=keys.number("ssm_in_multiplier", 1.0),
        part_scales=scales("ssm_multipliers", 5),
        out_scale=keys.number("ssm_out_multiplier", 1.0),
    )
    gate_scale, down_scale = scales("mlp_multipliers", 2)
    head_dim = shared.head_dim_of(keys)
    return shared.silu_model(
        keys,
        [LayerKind(rope_keys.read(keys), recurrent=mamba)] * layer_kinds.count(keys),
        default_kv_heads=8,
        head_dim=head_dim,
        # The multiplier of k, which comes before its rotation.
        sm_scale=head_dim**-0.5 * keys.number("key_multiplier", 1.0),
        attention_in_scale=keys.number("attention_in_multiplier", 1.0),
        attention_out_scale=keys.number("attention_out_multiplier", 1.0),
        gate_scale=gate_scale,
        down_scale=down_scale,
        embedding_scale=keys.number("embedding_multiplier", 1.0),
        logit_scale=keys.number("lm_head_multiplier", 1.0),
        renamed=bamba.RENAMED,
        **shared.biases(keys),
    )


FAMILIES = {"falcon_h1": falcon_h1}
