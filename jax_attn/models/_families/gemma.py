"""Gemma 2, 3, 3n and 4."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jax_attn.models._config.config import (
    AltUp,
    ExpertNames,
    Experts,
    LayerInputs,
    LayerKind,
    ModelConfig,
)
from jax_attn.models._config.keys import Keys
from jax_attn.models._config.rope import Rope
from jax_attn.models._families import layer_kinds, rope_keys, shared


def gemma2(keys: Keys) -> ModelConfig:
    rope = rope_keys.read(keys, head_dim=shared.head_dim_of(keys, 256))
    alternating = [
        layer_kinds.FULL if i % 2 else layer_kinds.SLIDING for i in range(layer_kinds.count(keys))
    ]
    return _gemma(
        keys,
        layer_kinds.by_type(keys, alternating, rope, keys.size("sliding_window")),
        attention_soft_cap=shared.soft_cap(keys, "attn_logit_softcapping", 50.0),
        logit_soft_cap=shared.soft_cap(keys, "final_logit_softcapping", 30.0),
    )


def gemma3(keys: Keys) -> ModelConfig:
    keys.expect("attn_logit_softcapping", None)  # transformers ignores it
    local = Keys({"rope_theta": keys.number("rope_local_base_freq", 1e4)}, keys.path)
    head_dim = shared.head_dim_of(keys, 256)
    full, sliding = rope_keys.by_layer_type(keys, head_dim, 1e6, local, 1e4)
    period = keys.size("sliding_window_pattern", 6)
    types = layer_kinds.all_but_each(keys, period)
    return _gemma(
        keys,
        layer_kinds.by_type(keys, types, full, keys.size("sliding_window"), sliding),
        qk_norm="per_head",
        logit_soft_cap=shared.soft_cap(keys, "final_logit_softcapping", None),
    )


def gemma3_with_images(keys: Keys) -> ModelConfig:
    """The text model; models/_vision has its pictures."""
    text = shared.text_of(keys, "gemma3_text")
    text.expect("final_logit_softcapping", None)  # transformers ignores it here
    keys.flag("tie_word_embeddings", True)
    # Configs on the Hub contain only the keys that differ from the defaults.
    defaults = {
        "model_type": "gemma3_text",
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
    }
    common = ("bos_token_id", "eos_token_id", "tie_word_embeddings")
    outer = {key: keys.raw[key] for key in common if keys.get(key) is not None}
    config = gemma3(Keys(defaults | text.raw | outer, text.path))
    layers = tuple(dataclasses.replace(kind, sees_pictures=True) for kind in config.layers)
    return dataclasses.replace(config, layers=layers, tensor_prefix="language_model.")


def _gemma(keys: Keys, layers: list[LayerKind], **options: Any) -> ModelConfig:
    keys.expect("hidden_activation", "gelu_pytorch_tanh", None)
    keys.expect("use_bidirectional_attention", False, None)
    return shared.model(
        keys,
        layers,
        default_kv_heads=4,
        head_dim=shared.head_dim_of(keys, 256),
        tie_embeddings=keys.flag("tie_word_embeddings", True),
        sm_scale=keys.number("query_pre_attn_scalar", 256) ** -0.5,
        activation="gelu_pytorch_tanh",
        post_norms=True,
        norm_offset=1.0,
        embedding_scale=keys.size("hidden_size") ** 0.5,
        **shared.biases(keys),
        **options,
    )


_GEMMA3N_DEFAULTS = {
    "vocab_size": 262400,
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "sliding_window": 512,
}


def gemma3n(keys: Keys) -> ModelConfig:
    keys = Keys(_GEMMA3N_DEFAULTS | keys.raw, keys.path)
    local = Keys({"rope_theta": keys.number("rope_local_base_freq", 1e4)}, keys.path)
    full, sliding = rope_keys.by_layer_type(keys, shared.head_dim_of(keys), 1e6, local, 1e4)
    kinds = {
        layer_kinds.FULL: LayerKind(full),
        layer_kinds.SLIDING: LayerKind(sliding, keys.size("sliding_window")),
    }
    types = layer_kinds.names(keys, layer_kinds.all_but_each(keys, 5), kinds)
    first_shared = len(types) - _num_shared(keys, types, 15)
    sizes = _sizes_of_mlps(keys, len(types))
    layers = [
        dataclasses.replace(
            kinds[name], intermediate_size=size, sparsity=sparsity, shares_kv=i >= first_shared
        )
        for i, (name, size, sparsity) in enumerate(
            zip(types, sizes, _sparsities(keys, len(types)), strict=True)
        )
    ]
    altup = AltUp(
        num_inputs=keys.size("altup_num_inputs", 4),
        active=keys.count("altup_active_idx", 0),
        scales_output=keys.flag("altup_correct_scale", True),
        laurel_rank=keys.size("laurel_rank", 64),
    )
    if altup.num_inputs < 2:
        raise keys.error(f"altup_num_inputs: expected 2 or more, got {altup.num_inputs}")
    if altup.active >= altup.num_inputs:
        raise keys.error(
            f"altup_active_idx: expected less than altup_num_inputs {altup.num_inputs}, got"
            f" {altup.active}"
        )
    inputs = LayerInputs(
        keys.size("hidden_size_per_layer_input", 256),
        keys.size("vocab_size_per_layer_input", 262144),
    )
    return _later_gemma(
        Keys(keys.raw | {"intermediate_size": sizes[0]}, keys.path),
        layers,
        altup=altup,
        layer_inputs=inputs,
        logit_soft_cap=shared.soft_cap(keys, "final_logit_softcapping", 30.0),
    )


def _sizes_of_mlps(keys: Keys, num_layers: int) -> list[int]:
    if not isinstance(keys.get("intermediate_size"), list):
        return [keys.size("intermediate_size")] * num_layers
    sizes = keys.numbers("intermediate_size", num_layers)
    return [keys.check_size("intermediate_size", size) for size in sizes]


def _sparsities(keys: Keys, num_layers: int) -> list[float]:
    found = keys.items("activation_sparsity_pattern")
    if found is None:
        return [0.95 if i < 10 < num_layers else 0.0 for i in range(num_layers)]
    is_share = [type(x) in (int, float) and 0 <= x < 1 for x in found]
    if len(found) != num_layers or not all(is_share):
        raise keys.error(
            f"activation_sparsity_pattern: expected {num_layers} numbers from 0 to less than 1, got"
            f" {found!r}"
        )
    return [float(x) for x in found]


def gemma3n_with_images(keys: Keys) -> ModelConfig:
    """Returns the text model; images and audio are not supported."""
    return _text_model(keys, "gemma3n_text", gemma3n)


_GEMMA4_DEFAULTS = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
}


def gemma4(keys: Keys) -> ModelConfig:
    keys = Keys(_GEMMA4_DEFAULTS | keys.raw, keys.path)
    full, sliding = layer_kinds.FULL, layer_kinds.SLIDING
    types = layer_kinds.names(keys, layer_kinds.all_but_each(keys, 6), (full, sliding))
    types = [*types[:-1], full]  # as transformers does
    kv_heads, head_dim = keys.size("num_key_value_heads"), shared.head_dim_of(keys)
    values_are_keys = keys.flag("attention_k_eq_v")
    global_heads = _global_heads(keys, types, kv_heads if not values_are_keys else None)
    ropes = keys.inner("rope_parameters") or Keys(_GEMMA4_ROPES, keys.path)
    keys.expect("use_bidirectional_attention", None, "vision")
    kinds = {
        sliding: LayerKind(
            _rope_of(ropes, sliding, head_dim),
            keys.size("sliding_window", 512),
            sees_pictures=keys.get("use_bidirectional_attention") == "vision",
        ),
        full: LayerKind(
            _rope_of(ropes, full, global_heads[1]),
            num_kv_heads=global_heads[0],
            head_dim=global_heads[1],
            values_are_keys=values_are_keys,
        ),
    }
    options: dict[str, Any] = {}
    if size := keys.count("hidden_size_per_layer_input", 256):
        options["layer_inputs"] = _layer_inputs(keys, size)
    if keys.flag("enable_moe_block"):
        options["experts"] = _gemma4_experts(keys)
    num_shared = _num_shared(keys, types)
    is_wide = keys.flag("use_double_wide_mlp")
    layers = [kinds[name] for name in types]
    for i in range(len(layers) - num_shared, len(layers)):
        wide = 2 * keys.size("intermediate_size") if is_wide else None
        layers[i] = dataclasses.replace(layers[i], shares_kv=True, intermediate_size=wide)
    return _later_gemma(
        keys,
        layers,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        layer_scales=True,
        logit_soft_cap=shared.soft_cap(keys, "final_logit_softcapping", None),
        **options,
    )


_GEMMA4_ROPES = {
    layer_kinds.SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    layer_kinds.FULL: {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1e6,
    },
}


def _rope_of(ropes: Keys, name: str, head_dim: int) -> Rope:
    inner = ropes.inner(name)
    if inner is None:
        raise ropes.error(f"rope_parameters: key '{name}' is missing")
    return rope_keys.proportional(inner, head_dim)


def _global_heads(keys: Keys, types: list[str], kv_heads: int | None) -> tuple[int, int]:
    """Returns num_kv_heads and head_dim of layers with full attention.

    They are in keys of their own, or, as transformers 5.24 writes them, in per_layer_config, which
    wins. kv_heads: those of all layers, if layers with full attention cannot have others.
    """
    if "per_layer_config" not in keys.raw:
        head_dim = keys.size("global_head_dim", 512)
        if kv_heads is None:
            kv_heads = keys.size_or_none("num_global_key_value_heads")
        own = keys
    else:
        expected = [str(i) for i, name in enumerate(types) if name == layer_kinds.FULL]
        each = keys.inner("per_layer_config") or Keys({}, keys.path)
        found = [each.inner(name) for name in each.raw]
        own = found[0] if found and found[0] is not None else each
        if sorted(each.raw) != sorted(expected) or any(
            x is None or x.raw != own.raw for x in found
        ):
            raise keys.error(
                f"per_layer_config: expected the same keys for the layers {', '.join(expected)},"
                f" those with full attention, got {each.raw!r}"
            )
        for name in own.raw:
            if name not in ("head_dim", "num_key_value_heads"):
                raise own.error(f"key '{name}' is not supported")
        head_dim = own.size("head_dim", keys.size("head_dim"))
        kv_heads = own.size_or_none("num_key_value_heads")
    kv_heads = kv_heads or keys.size("num_key_value_heads")
    if keys.size("num_attention_heads") % kv_heads:
        raise own.error(
            f"num_global_key_value_heads: expected a divisor of num_attention_heads"
            f" {keys.size('num_attention_heads')}, got {kv_heads}"
        )
    if head_dim % 2:
        raise own.error(f"global_head_dim: expected an even number, got {head_dim}")
    return kv_heads, head_dim


def _num_shared(keys: Keys, types: list[str], default: int = 0) -> int:
    """Returns the number of layers, the last ones, that read the keys and values of others."""
    number = keys.count("num_kv_shared_layers", default)
    if number and set(types[: max(0, len(types) - number)]) != set(types):
        raise keys.error(
            f"num_kv_shared_layers: expected a layer of each of layer_types before the last"
            f" {number}, which share its keys and values, got {types!r}"
        )
    return number


def _layer_inputs(keys: Keys, size: int) -> LayerInputs:
    vocab_size = keys.size("vocab_size_per_layer_input", 262144)
    if vocab_size < keys.size("vocab_size"):
        raise keys.error(
            f"vocab_size_per_layer_input: expected at least vocab_size {keys.size('vocab_size')},"
            f" got {vocab_size}"
        )
    return LayerInputs(size, vocab_size)


def _gemma4_experts(keys: Keys) -> Experts:
    return shared.checked_experts(
        keys,
        count=keys.size("num_experts"),
        per_token=keys.size("top_k_experts"),
        intermediate_size=keys.size("moe_intermediate_size"),
        names=ExpertNames("router.proj", ("experts.gate_up_proj",), "experts.down_proj"),
        stacked="rows",
        beside_mlp=True,
    )


def gemma4_with_images(keys: Keys) -> ModelConfig:
    """The text model; models/_vision has its pictures. Audio is not supported."""
    config = _text_model(keys, "gemma4_text", gemma4)
    named = {"image_token_id": 258880, "video_token_id": 258884, "audio_token_id": 258881}
    tokens = [
        keys.count(key, default)
        for key, default in named.items()
        if keys.get(key, default) is not None
    ]
    text = shared.text_of(keys, "gemma4_text")
    return dataclasses.replace(
        config,
        placeholders=tuple(token for token in tokens if token < config.vocab_size),
        pad_token=text.token("pad_token_id", config.vocab_size) or 0,
    )


def _text_model(keys: Keys, model_type: str, parse: Callable[[Keys], ModelConfig]) -> ModelConfig:
    text = shared.text_of(keys, model_type)
    common = ("bos_token_id", "eos_token_id")
    outer = {key: keys.raw[key] for key in common if keys.get(key) is not None}
    outer["tie_word_embeddings"] = keys.flag("tie_word_embeddings", True)  # the inner is not read
    config = parse(Keys({"model_type": model_type} | text.raw | outer, text.path))
    return dataclasses.replace(config, tensor_prefix="model.language_model.")


def _later_gemma(keys: Keys, layers: list[LayerKind], **options: Any) -> ModelConfig:
    """Gemma 3n and 4: norms of q, k and v, and no scale of the scores."""
    keys.expect("hidden_activation", "gelu_pytorch_tanh")
    return shared.model(
        keys,
        layers,
        tie_embeddings=keys.flag("tie_word_embeddings", True),
        sm_scale=1.0,
        activation="gelu_pytorch_tanh",
        qk_norm="per_head",
        v_norm=True,
        post_norms=True,
        embedding_scale=keys.size("hidden_size") ** 0.5,
        **shared.biases(keys),
        **options,
    )


FAMILIES = {
    "gemma2": gemma2,
    "gemma3_text": gemma3,
    "gemma3": gemma3_with_images,
    "gemma3n_text": gemma3n,
    "gemma3n": gemma3n_with_images,
    "gemma4_text": gemma4,
    "gemma4": gemma4_with_images,
}
