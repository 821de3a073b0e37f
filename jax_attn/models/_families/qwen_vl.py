"""The text model of Qwen3-VL; models/_vision has its pictures."""

from __future__ import annotations

import dataclasses

from jax_attn.models._config.config import ModelConfig
from jax_attn.models._config.keys import Keys
from jax_attn.models._families import layer_kinds, rope_keys, shared


def qwen3_vl(keys: Keys) -> ModelConfig:
    text = shared.text_of(keys, "qwen3_vl_text")
    tied = keys.flag("tie_word_embeddings")
    if text.get("tie_word_embeddings") is not None:
        text.expect("tie_word_embeddings", tied)
    defaults = {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 128000,
        "rms_norm_eps": 1e-6,
    }
    return _text(Keys(defaults | text.raw | {"tie_word_embeddings": tied}, text.path))


def _text(keys: Keys) -> ModelConfig:
    keys = Keys(keys.raw | {"model_type": "qwen3_vl"}, keys.path)
    head_dim = shared.head_dim_of(keys, 128)
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
        default_kv_heads=32,
        head_dim=head_dim,
        qk_norm="per_head",
        tensor_prefix="model.language_model.",
        **shared.biases(keys),
    )


FAMILIES = {"qwen3_vl": qwen3_vl}
