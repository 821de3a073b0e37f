"""gpt-oss."""

from __future__ import annotations

from jax_attn.models._config.config import ExpertNames, ModelConfig
from jax_attn.models._config.keys import Keys
from jax_attn.models._families import layer_kinds, rope_keys, shared


def gpt_oss(keys: Keys) -> ModelConfig:
    num_layers = layer_kinds.count(keys)
    keys.expect("swiglu_alpha", 1.702)
    is_quantized = keys.get("quantization_config") is not None
    default_rope = {
        "rope_type": "yarn",
        "factor": 32.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    }
    head_dim = shared.head_dim_of(keys, 64)
    rope = rope_keys.read(keys, 150000.0, head_dim=head_dim, default=default_rope)
    alternating = [layer_kinds.FULL if i % 2 else layer_kinds.SLIDING for i in range(num_layers)]
    bias = keys.flag("attention_bias", True)
    return shared.silu_model(
        keys,
        layer_kinds.by_type(keys, alternating, rope, keys.size("sliding_window", 128)),
        default_kv_heads=8,
        head_dim=head_dim,
        qkv_bias=bias,
        o_bias=bias,
        sinks=True,
        activation="clamped_swiglu",
        activation_limit=keys.number("swiglu_limit", 7.0),
        experts=shared.checked_experts(
            keys,
            count=keys.size(keys.name_of("num_local_experts", "num_experts"), 128),
            per_token=keys.size("num_experts_per_tok", 4),
            intermediate_size=keys.size("intermediate_size"),
            names=ExpertNames("mlp.router", ("mlp.experts.gate_up_proj",), "mlp.experts.down_proj"),
            stacked="mxfp4" if is_quantized else "plain",
        ),
    )


FAMILIES = {
    "gpt_oss": gpt_oss,
}
