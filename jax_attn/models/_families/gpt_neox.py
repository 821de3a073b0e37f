"""GPT-NeoX and Pythia."""

from __future__ import annotations

from jax_attn.models._config.config import ModelConfig
from jax_attn.models._config.keys import Keys
from jax_attn.models._families import layer_kinds, rope_keys, shared

_RENAMED = (
    ("model.layers", "gpt_neox.layers"),
    ("model.embed_tokens", "gpt_neox.embed_in"),
    ("model.norm", "gpt_neox.final_layer_norm"),
    ("lm_head", "embed_out"),
    ("self_attn.qkv_proj", "attention.query_key_value"),
    ("self_attn.o_proj", "attention.dense"),
    ("mlp.up_proj", "mlp.dense_h_to_4h"),
    ("mlp.down_proj", "mlp.dense_4h_to_h"),
)


def gpt_neox(keys: Keys) -> ModelConfig:
    shared.expect_share_of_hidden_size(keys)
    fraction = keys.number("rotary_pct", 0.25)
    rope_keys.rotary_dim_of(keys, "rotary_pct", fraction, shared.head_dim_of(keys))
    own = {
        # RoPE's keys outside of rope_parameters have names of their own.
        "rope_theta": keys.number("rotary_emb_base", 1e4),
        "partial_rotary_factor": fraction,
        "num_key_value_heads": None,  # transformers ignores it
    }
    keys = Keys(keys.raw | own, keys.path)
    rope = rope_keys.read(keys, default_fraction=0.25)
    return shared.model(
        keys,
        layer_kinds.all_full(keys, rope),
        qkv_bias=keys.flag("attention_bias", True),
        o_bias=keys.flag("attention_bias", True),
        packed=("qkv_by_head",),
        parallel="own_norm" if keys.flag("use_parallel_residual", True) else "",
        renamed=_RENAMED,
        **shared.layer_norms(keys, "layer_norm_eps"),
        **shared.mlp_without_gate(keys, "gelu", bias=True),
    )


FAMILIES = {
    "gpt_neox": gpt_neox,
}
