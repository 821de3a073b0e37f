"""Llama, and the text of Llama 4."""

from __future__ import annotations

import dataclasses

from jax_attn.models._config.config import (
    Chunk,
    ExpertNames,
    LayerKind,
    ModelConfig,
    Temperature,
)
from jax_attn.models._config.keys import Keys
from jax_attn.models._families import layer_kinds, rope_keys, shared

_CHUNKED = "chunked_attention"


def llama(keys: Keys) -> ModelConfig:
    keys.expect("mlp_bias", False)
    return shared.silu_model(
        keys, layer_kinds.all_full(keys, rope_keys.read(keys)), **shared.biases(keys)
    )


def llama4(keys: Keys) -> ModelConfig:
    head_dim = shared.head_dim_of(keys, 128)
    size, block = keys.size("intermediate_size"), "feed_forward"
    return shared.silu_model(
        keys,
        _llama4_layers(keys, head_dim),
        default_kv_heads=8,
        head_dim=head_dim,
        intermediate_size=keys.size("intermediate_size_mlp", 16384),
        experts=shared.checked_experts(
            keys,
            count=keys.size("num_local_experts", 16),
            per_token=keys.size("num_experts_per_tok", 1),
            intermediate_size=size,
            names=ExpertNames(
                f"{block}.router",
                (f"{block}.experts.gate_up_proj",),
                f"{block}.experts.down_proj",
                shared=f"{block}.shared_expert",
            ),
            dense_layers=_llama4_dense_layers(keys),
            stacked="columns",
            scales_input=True,
            shared_size=size,
        ),
        renamed=(("mlp.", f"{block}."),),
        **shared.biases(keys),
    )


def _llama4_layers(keys: Keys, head_dim: int) -> list[LayerKind]:
    """Layers with RoPE have chunks and norms, those without it a temperature."""
    rope = rope_keys.read(keys, 5e5, head_dim=head_dim, interleaved=True)
    has_rope = layer_kinds.have_rope(keys)
    length = keys.size_or_none("attention_chunk_size", 8192)
    kinds = {layer_kinds.FULL: LayerKind(rope)}
    if length is not None:
        kinds[_CHUNKED] = LayerKind(rope, Chunk(length))
    types = [_CHUNKED if each and length else layer_kinds.FULL for each in has_rope]
    has_norm = keys.flag("use_qk_norm", True)
    keys.expect("attn_temperature_tuning", True, False, 4)  # 4: of the first files
    temperature = None
    if keys.get("attn_temperature_tuning", True):
        beta, floor = keys.number("attn_scale", 0.1), keys.size("floor_scale", 8192)
        temperature = Temperature(beta, floor, offset=1)
    return [
        dataclasses.replace(kind, l2_norm=has_norm)
        if has_rope[i]
        else dataclasses.replace(kind, rope=None, temperature=temperature)
        for i, kind in enumerate(layer_kinds.by_name(keys, types, kinds))
    ]


def _llama4_dense_layers(keys: Keys) -> tuple[int, ...]:
    num_layers, step = layer_kinds.count(keys), keys.size("interleave_moe_layer_step", 1)
    with_experts = keys.items("moe_layers")
    if with_experts is None:
        with_experts = [*range(step - 1, num_layers, step)]
    if not all(type(i) is int for i in with_experts):
        raise keys.error(f"moe_layers: expected integers, got {with_experts!r}")
    return tuple(i for i in range(num_layers) if i not in with_experts)


def llama4_with_images(keys: Keys) -> ModelConfig:
    """Returns the text model; images are not supported."""
    text = shared.text_of(keys, "llama4_text")
    for each in (keys, text):
        each.expect("tie_word_embeddings", False)
    common = ("bos_token_id", "eos_token_id")
    outer = {key: keys.raw[key] for key in common if keys.get(key) is not None}
    config = llama4(Keys({"model_type": "llama4_text"} | text.raw | outer, text.path))
    return dataclasses.replace(config, tensor_prefix="language_model.")


FAMILIES = {
    "llama": llama,
    "llama4_text": llama4,
    "llama4": llama4_with_images,
}
