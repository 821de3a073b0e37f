"""The text model of Qwen3-VL; models/_vision has its pictures."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax_attn.models._config.config import ExpertNames, ModelConfig
from jax_attn.models._config.keys import Keys
from jax_attn.models._families import layer_kinds, qwen, rope_keys, shared


def qwen3_vl(keys: Keys) -> ModelConfig:
    defaults = {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 128000,
        "rms_norm_eps": 1e-6,
    }
    return _text(_text_keys(keys, defaults), default_kv_heads=32, default_head_dim=128)


def qwen3_vl_moe(keys: Keys) -> ModelConfig:
    defaults = {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "max_position_embeddings": 128000,
        "rms_norm_eps": 1e-6,
    }
    text = _text_keys(keys, defaults)
    text.expect("norm_topk_prob", True)  # transformers ignores it
    experts = shared.checked_experts(
        text,
        # The second name is the one that transformers 5 writes.
        count=text.size(text.name_of("num_experts", "num_local_experts"), 60),
        per_token=text.size("num_experts_per_tok", 4),
        intermediate_size=text.size("moe_intermediate_size", 1408),
        names=ExpertNames("mlp.gate", ("mlp.experts.gate_up_proj",), "mlp.experts.down_proj"),
        stacked="columns",
        dense_layers=qwen.dense_layers(text),
    )
    return _text(text, default_kv_heads=16, default_head_dim=None, experts=experts)


def _text_keys(keys: Keys, defaults: dict[str, Any]) -> Keys:
    family = keys.need("model_type")
    text = shared.text_of(keys, f"{family}_text")
    tied = keys.flag("tie_word_embeddings")
    if text.get("tie_word_embeddings") is not None:
        text.expect("tie_word_embeddings", tied)
    own = {"model_type": family, "tie_word_embeddings": tied}
    return Keys(defaults | text.raw | own, text.path)


def _text(keys: Keys, default_head_dim: int | None, **options: Any) -> ModelConfig:
    head_dim = shared.head_dim_of(keys, default_head_dim)
    settings = rope_keys.settings_of(keys, None)
    sections = rope_keys.take_sections(settings, [24, 20, 20])
    rope_keys.set_original_length(keys, settings)
    rope = rope_keys.parse(settings, keys, 500000.0, head_dim)
    if rope.fraction != 1:
        raise settings.error(f"partial_rotary_factor: expected 1.0, got {rope.fraction!r}")
    rope = dataclasses.replace(rope, sections=sections)
    return shared.silu_model(
        keys,
        layer_kinds.all_full(keys, rope),
        head_dim=head_dim,
        qk_norm="per_head",
        tensor_prefix="model.language_model.",
        **shared.biases(keys),
        **options,
    )


FAMILIES = {"qwen3_vl": qwen3_vl, "qwen3_vl_moe": qwen3_vl_moe}
