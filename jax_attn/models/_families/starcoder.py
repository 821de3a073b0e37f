"""StarCoder 2."""

from __future__ import annotations

from jax_attn.models._config.config import ModelConfig
from jax_attn.models._config.keys import Keys
from jax_attn.models._families import layer_kinds, rope_keys, shared


def starcoder2(keys: Keys) -> ModelConfig:
    # transformers ignores these, which say what it does.
    keys.expect("norm_type", "layer_norm")
    keys.expect("mlp_type", "default")
    bias = keys.flag("use_bias", True)
    return shared.model(
        keys,
        layer_kinds.equal(keys, rope_keys.read(keys), keys.size_or_none("sliding_window")),
        default_kv_heads=2,
        tie_embeddings=keys.flag("tie_word_embeddings", True),
        qkv_bias=bias,
        o_bias=bias,
        renamed=(("mlp.up_proj", "mlp.c_fc"), ("mlp.down_proj", "mlp.c_proj")),
        **shared.layer_norms(keys, "norm_epsilon"),
        **shared.mlp_without_gate(keys, "gelu_pytorch_tanh", bias=bias),
    )


FAMILIES = {
    "starcoder2": starcoder2,
}
