"""Conversion of config.json to ModelConfig, family by family.

Every option that changes the result of a model is either implemented or refused. Missing keys have
the defaults of transformers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jax_attn.models._config.config import (
    ExpertGroups,
    ExpertNames,
    Experts,
    Latent,
    LayerKind,
    ModelConfig,
)
from jax_attn.models._config.directory import read_json
from jax_attn.models._config.keys import Keys, one_of
from jax_attn.models._config.quantized_files import parse_quantization
from jax_attn.models._config.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Rope,
    Scaling,
    YarnScaling,
)

# The fields of these classes are the keys of config.json. _long_rope() handles "longrope".
_SCALINGS: dict[str, type[LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling]] = {
    "linear": LinearScaling,
    "dynamic": DynamicScaling,
    "llama3": Llama3Scaling,
    "yarn": YarnScaling,
}
_FULL, _SLIDING = "full_attention", "sliding_attention"


def load_config(directory: str | Path) -> ModelConfig:
    """Reads config.json, and the stop tokens of generation_config.json if it exists.

    Raises:
      ModelDirectoryError: a key is missing, or asks for an unsupported option.
    """
    directory = Path(directory)
    path = directory / "config.json"
    config = parse_config(read_json(path), path)
    generation = directory / "generation_config.json"
    if generation.is_file():  # chat models have more stop tokens for a turn than for a text
        eos = _eos_tokens(read_json(generation).get("eos_token_id"))
        eos_tokens = tuple(dict.fromkeys(config.eos_tokens + eos))
        config = dataclasses.replace(config, eos_tokens=eos_tokens)
    return config


def parse_config(raw: dict[str, Any], path: Path | str = "config.json") -> ModelConfig:
    """Returns the config of a parsed config.json. `path` is used in error messages only."""
    keys = Keys(raw, path)
    keys.need("model_type")
    keys.expect("model_type", *FAMILIES)
    config = FAMILIES[raw["model_type"]](keys)
    quantization = parse_quantization(keys)
    is_mxfp4 = quantization is not None and quantization.kind == "e2m1"
    if quantization is not None and is_mxfp4 != (raw["model_type"] == "gpt_oss"):
        raise keys.error(
            f"quantization_config: quant_method: {quantization.method!r} is not supported with"
            f" model_type {raw['model_type']!r}"
        )
    return dataclasses.replace(config, quantization=quantization)


# ---- families ----------------------------------------------------------------------------------


def _llama(keys: Keys) -> ModelConfig:
    keys.expect("mlp_bias", False)
    keys.expect("sliding_window", None)
    keys.expect("layer_types", None)
    layers = [LayerKind(_rope(keys))] * keys.size("num_hidden_layers")
    return _silu_model(keys, layers, **_biases(keys))


def _mistral(keys: Keys) -> ModelConfig:
    keys.expect("layer_types", None)
    window = None if keys.get("sliding_window", 4096) is None else keys.size("sliding_window", 4096)
    return _silu_model(keys, [LayerKind(_rope(keys), window)] * keys.size("num_hidden_layers"))


def _qwen2(keys: Keys) -> ModelConfig:
    return _silu_model(keys, _qwen_layers(keys), qkv_bias=True)


def _qwen3(keys: Keys) -> ModelConfig:
    head_dim = keys.size("head_dim", 128)
    layers = _qwen_layers(keys)
    return _silu_model(keys, layers, head_dim=head_dim, qk_norm="per_head", **_biases(keys))


def _qwen3_moe(keys: Keys) -> ModelConfig:
    num_layers, step = keys.size("num_hidden_layers"), keys.size("decoder_sparse_step", 1)
    named = keys.get("mlp_only_layers") or []
    window = None
    if keys.flag("use_sliding_window"):
        window = keys.size("sliding_window", 4096)
    return _silu_model(
        keys,
        [LayerKind(_rope(keys), window)] * num_layers,
        qk_norm="per_head",
        experts=Experts(
            # The second name is the one that transformers 5 writes.
            count=keys.size("num_experts", keys.get("num_local_experts") or 128),
            per_token=keys.size("num_experts_per_tok", 8),
            intermediate_size=keys.size("moe_intermediate_size", 768),
            names=ExpertNames(
                "mlp.gate",
                ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
                "mlp.experts.{}.down_proj",
            ),
            normalize=keys.flag("norm_topk_prob"),
            dense_layers=tuple(i for i in range(num_layers) if i in named or (i + 1) % step),
        ),
        **_biases(keys),
    )


def _mixtral(keys: Keys) -> ModelConfig:
    window = keys.get("sliding_window") and keys.size("sliding_window")
    block = "block_sparse_moe"
    return _silu_model(
        keys,
        [LayerKind(_rope(keys, 1e6), window)] * keys.size("num_hidden_layers"),
        experts=Experts(
            count=keys.size("num_local_experts", 8),
            per_token=keys.size("num_experts_per_tok", 2),
            intermediate_size=keys.size("intermediate_size"),
            names=ExpertNames(
                f"{block}.gate",
                (f"{block}.experts.{{}}.w1", f"{block}.experts.{{}}.w3"),
                f"{block}.experts.{{}}.w2",
            ),
        ),
    )


def _deepseek_v2(keys: Keys) -> ModelConfig:
    keys.expect("scoring_func", "softmax")
    keys.expect("norm_topk_prob", False)  # transformers ignores it
    keys.expect("topk_method", "greedy", "group_limited_greedy")
    groups = None
    if keys.get("topk_method") == "group_limited_greedy":
        groups = ExpertGroups(keys.size("n_group"), keys.size("topk_group"), by_two=False)
    return _deepseek(
        keys,
        groups=groups,
        normalize=False,
        scale=keys.number("routed_scaling_factor", 1.0),
    )


def _deepseek_v3(keys: Keys) -> ModelConfig:
    keys.expect("scoring_func", "sigmoid")
    keys.expect("topk_method", "noaux_tc")
    config = _deepseek(
        keys,
        groups=ExpertGroups(keys.size("n_group", 8), keys.size("topk_group", 4), by_two=True),
        normalize=keys.flag("norm_topk_prob", True),
        scale=keys.number("routed_scaling_factor", 2.5),
        sigmoid=True,
    )
    # The extra layers are for multi-token prediction.
    return dataclasses.replace(config, extra_layers=keys.get("num_nextn_predict_layers") or 0)


def _deepseek(keys: Keys, **options: Any) -> ModelConfig:
    for key, value in (("attention_bias", False), ("mlp_bias", False), ("moe_layer_freq", 1)):
        keys.expect(key, value)
    rope = _rope(keys)
    q_rank = keys.get("q_lora_rank", 1536) and keys.size("q_lora_rank", 1536)
    latent = Latent(
        q_rank=q_rank,
        kv_rank=keys.size("kv_lora_rank", 512),
        nope=keys.size("qk_nope_head_dim", 128),
        rope=keys.size("qk_rope_head_dim", 64),
        v=keys.size("v_head_dim", 128),
        interleaved=keys.flag("rope_interleave", True),
    )
    # Logit scale of YaRN, section 3.4, applied in the model here and not in cos and sin.
    mscale = 1.0
    if isinstance(rope.scaling, YarnScaling) and rope.scaling.mscale_all_dim:
        mscale = rope.scaling.mscale_of(rope.scaling.mscale_all_dim)
    expert_size = keys.size("moe_intermediate_size", 1407)
    experts = Experts(
        count=keys.size("n_routed_experts"),
        per_token=keys.size("num_experts_per_tok"),
        intermediate_size=expert_size,
        names=ExpertNames(
            "mlp.gate",
            ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
            "mlp.experts.{}.down_proj",
        ),
        dense_layers=tuple(range(keys.get("first_k_dense_replace", 0))),
        shared_size=expert_size * keys.size("n_shared_experts"),
        **options,
    )
    return _silu_model(
        keys,
        [LayerKind(rope)] * keys.size("num_hidden_layers"),
        num_kv_heads=1,
        head_dim=latent.kv_rank + latent.rope,
        sm_scale=(latent.nope + latent.rope) ** -0.5 * mscale**2,
        latent=latent,
        experts=experts,
    )


def _gpt_oss(keys: Keys) -> ModelConfig:
    num_layers = keys.size("num_hidden_layers")
    keys.expect("swiglu_alpha", 1.702)
    is_quantized = keys.get("quantization_config") is not None
    default_rope = {
        "rope_type": "yarn",
        "factor": 32.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    }
    rope = _rope(keys, 150000.0, default=default_rope)
    alternating = [_FULL if i % 2 else _SLIDING for i in range(num_layers)]
    window = keys.size("sliding_window", 128)
    bias = keys.flag("attention_bias", True)
    return _silu_model(
        keys,
        _layers(keys, alternating, LayerKind(rope), LayerKind(rope, window)),
        head_dim=keys.size("head_dim", 64),
        qkv_bias=bias,
        o_bias=bias,
        sinks=True,
        activation="clamped_swiglu",
        activation_limit=keys.number("swiglu_limit", 7.0),
        experts=Experts(
            count=keys.size("num_local_experts", 128),
            per_token=keys.size("num_experts_per_tok", 4),
            intermediate_size=keys.size("intermediate_size"),
            names=ExpertNames("mlp.router", ("mlp.experts.gate_up_proj",), "mlp.experts.down_proj"),
            stacked="mxfp4" if is_quantized else "plain",
        ),
    )


def _phi3(keys: Keys) -> ModelConfig:
    window = keys.get("sliding_window") and keys.size("sliding_window")
    rope = _rope(keys, phi3=True)
    return _silu_model(
        keys, [LayerKind(rope, window)] * keys.size("num_hidden_layers"), packed=True
    )


def _olmo2(keys: Keys) -> ModelConfig:
    return _silu_model(
        keys,
        [LayerKind(_rope(keys))] * keys.size("num_hidden_layers"),
        qk_norm="all_heads",
        pre_norms=False,
        post_norms=True,
        **_biases(keys),
    )


def _granite(keys: Keys) -> ModelConfig:
    keys.expect("mlp_bias", False)
    return _silu_model(
        keys,
        [LayerKind(_rope(keys))] * keys.size("num_hidden_layers"),
        sm_scale=keys.number("attention_multiplier", 1.0),
        embedding_scale=keys.number("embedding_multiplier", 1.0),
        residual_scale=keys.number("residual_multiplier", 1.0),
        logit_scale=1 / keys.number("logits_scaling", 1.0),
        **_biases(keys),
    )


def _smollm3(keys: Keys) -> ModelConfig:
    keys.expect("mlp_bias", False)
    num_layers = keys.size("num_hidden_layers")
    interval = keys.size("no_rope_layer_interval", 4)
    # Despite the key's name, 1 means that the layer has RoPE.
    has_rope = keys.get("no_rope_layers") or [
        int((i + 1) % interval != 0) for i in range(num_layers)
    ]
    if len(has_rope) < num_layers or not all(x in (0, 1) for x in has_rope):
        raise keys.error(f"no_rope_layers: expected {num_layers} times 0 or 1, got {has_rope!r}")
    window = None
    if keys.flag("use_sliding_window") and keys.get("sliding_window") is not None:
        window = keys.size("sliding_window")
    rope = _rope(keys, 2e6)
    types = [_SLIDING if window and not has_rope[i] else _FULL for i in range(num_layers)]
    kinds = _layers(keys, types, LayerKind(rope), LayerKind(rope, window))
    layers = [
        kind if has_rope[i] else dataclasses.replace(kind, rope=None)
        for i, kind in enumerate(kinds)
    ]
    tied = keys.flag("tie_word_embeddings", True)
    return _silu_model(keys, layers, tie_embeddings=tied, **_biases(keys))


def _gemma2(keys: Keys) -> ModelConfig:
    rope = _rope(keys)
    alternating = [_FULL if i % 2 else _SLIDING for i in range(keys.size("num_hidden_layers"))]
    return _gemma(
        keys,
        _layers(keys, alternating, LayerKind(rope), LayerKind(rope, keys.size("sliding_window"))),
        attention_soft_cap=_soft_cap(keys, "attn_logit_softcapping", 50.0),
        logit_soft_cap=_soft_cap(keys, "final_logit_softcapping", 30.0),
    )


def _gemma3(keys: Keys) -> ModelConfig:
    keys.expect("attn_logit_softcapping", None)  # transformers ignores it
    if both := keys.get("rope_parameters"):  # transformers 5
        full, sliding = both.get(_FULL) or {}, both.get(_SLIDING) or {}
    else:
        full = {"rope_theta": keys.get("rope_theta", 1e6)} | (keys.get("rope_scaling") or {})
        sliding = {"rope_theta": keys.get("rope_local_base_freq", 1e4)}
    period = keys.size("sliding_window_pattern", 6)
    num_layers = keys.size("num_hidden_layers")
    types = [_FULL if i % period == period - 1 else _SLIDING for i in range(num_layers)]
    window = keys.size("sliding_window")
    return _gemma(
        keys,
        _layers(
            keys,
            types,
            LayerKind(_parse_rope(keys, full, 1e6)),
            LayerKind(_parse_rope(keys, sliding, 1e4), window),
        ),
        qk_norm="per_head",
        logit_soft_cap=_soft_cap(keys, "final_logit_softcapping", None),
    )


def _gemma3_with_images(keys: Keys) -> ModelConfig:
    """Returns the text model; images are not supported."""
    text = keys.need("text_config")
    if not isinstance(text, dict):
        raise keys.error(f"text_config: expected an object, got {text!r}")
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
    keys_of_text = Keys(text, f"{keys.path}: text_config")
    keys_of_text.expect("quantization_config", None)
    config = _gemma3(Keys(defaults | text | outer, f"{keys.path}: text_config"))
    return dataclasses.replace(config, tensor_prefix="language_model.")


FAMILIES: dict[str, Callable[[Keys], ModelConfig]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "gpt_oss": _gpt_oss,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "phi3": _phi3,
    "olmo2": _olmo2,
    "granite": _granite,
    "smollm3": _smollm3,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "gemma3": _gemma3_with_images,
}


# ---- shared by families ------------------------------------------------------------------------


def _silu_model(keys: Keys, layers: list[LayerKind], **options: Any) -> ModelConfig:
    keys.expect("hidden_act", "silu")
    return _model(keys, layers, **options)


def _gemma(keys: Keys, layers: list[LayerKind], **options: Any) -> ModelConfig:
    keys.expect("hidden_activation", "gelu_pytorch_tanh", None)
    keys.expect("use_bidirectional_attention", False, None)
    return _model(
        keys,
        layers,
        head_dim=keys.size("head_dim", 256),
        tie_embeddings=keys.flag("tie_word_embeddings", True),
        sm_scale=keys.number("query_pre_attn_scalar", 256) ** -0.5,
        activation="gelu_tanh",
        post_norms=True,
        norm_offset=1.0,
        embedding_scale=keys.size("hidden_size") ** 0.5,
        **_biases(keys),
        **options,
    )


def _model(keys: Keys, layers: list[LayerKind], **options: Any) -> ModelConfig:
    """Builds a ModelConfig from the keys; `options` override them."""
    num_qo_heads = keys.size("num_attention_heads")
    num_kv_heads = keys.size("num_key_value_heads", num_qo_heads)
    if num_qo_heads % num_kv_heads:
        raise keys.error(
            f"num_attention_heads: expected a multiple of num_key_value_heads {num_kv_heads}, got "
            f"{num_qo_heads}"
        )
    hidden_size = keys.size("hidden_size")
    head_dim = options.get("head_dim") or keys.size("head_dim", hidden_size // num_qo_heads)
    common = {
        "family": keys.need("model_type"),
        "vocab_size": keys.size("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": keys.size("intermediate_size"),
        "num_qo_heads": num_qo_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "layers": tuple(layers),
        "rms_norm_eps": keys.number("rms_norm_eps"),
        "tie_embeddings": keys.flag("tie_word_embeddings"),
        "max_positions": keys.size("max_position_embeddings"),
        "bos_token": keys.get("bos_token_id"),
        "eos_tokens": _eos_tokens(keys.get("eos_token_id")),
        "sm_scale": head_dim**-0.5,
    }
    return ModelConfig(**(common | options))


def _biases(keys: Keys) -> dict[str, bool]:
    bias = keys.flag("attention_bias")
    return {"qkv_bias": bias, "o_bias": bias}


def _soft_cap(keys: Keys, key: str, default: float | None) -> float:
    """Returns the soft cap: 0 for null, `default` for a missing key."""
    return 0.0 if keys.get(key, default) is None else keys.number(key, default)


def _qwen_layers(keys: Keys) -> list[LayerKind]:
    rope = _rope(keys)
    num_layers = keys.size("num_hidden_layers")
    if not keys.flag("use_sliding_window"):
        return _layers(keys, [_FULL] * num_layers, LayerKind(rope), None)
    first = keys.get("max_window_layers", 28)  # may be 0
    types = [_FULL if i < first else _SLIDING for i in range(num_layers)]
    return _layers(keys, types, LayerKind(rope), LayerKind(rope, keys.size("sliding_window", 4096)))


def _layers(
    keys: Keys, types: list[str], full: LayerKind, sliding: LayerKind | None
) -> list[LayerKind]:
    """Returns the kind of each layer by layer_types or, if that is missing, by `types`."""
    kinds = {_FULL: full} | ({_SLIDING: sliding} if sliding else {})
    named = keys.get("layer_types") or types
    if len(named) != len(types):
        raise keys.error(f"layer_types: expected {len(types)} entries, got {len(named)}")
    for name in named:
        if name not in kinds:
            raise keys.error(f"layer_types: expected {one_of(kinds)}, got {name!r}")
    return [kinds[name] for name in named]


def _rope(
    keys: Keys,
    default_theta: float = 10000.0,
    *,
    default: dict[str, Any] | None = None,
    phi3: bool = False,
) -> Rope:
    # transformers 5 stores all RoPE settings in one dict; transformers 4 stores the base outside.
    rope = keys.get("rope_parameters") or keys.get("rope_scaling") or default or {}
    outside = {k: keys.raw[k] for k in ("rope_theta", "partial_rotary_factor") if k in keys.raw}
    rope = {k: v for k, v in outside.items() if v is not None} | rope
    if phi3 and rope.get("rope_type", rope.get("type")) in ("su", "yarn"):  # older names
        rope = {k: v for k, v in rope.items() if k != "type"} | {"rope_type": "longrope"}
    return _parse_rope(keys, rope, default_theta, partial=phi3)


def _parse_rope(
    keys: Keys, rope: dict[str, Any], default_theta: float, partial: bool = False
) -> Rope:
    theta = keys.check_number("rope_theta", rope.get("rope_theta", default_theta))
    fraction = keys.check_number("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0))
    if fraction != 1 and not partial:
        raise keys.error(f"partial_rotary_factor: expected 1.0, got {fraction!r}")
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    settings = {
        key: value
        for key, value in rope.items()
        if key not in ("rope_type", "type", "rope_theta", "partial_rotary_factor")
        and value is not None
    }
    scaling: Scaling | None = None
    if rope_type == "longrope":
        scaling = _long_rope(keys, settings, fraction)
    elif rope_type in _SCALINGS:
        scaling = _scaling(keys, rope_type, settings)
    elif rope_type != "default":
        known = ["default", "longrope", *_SCALINGS]
        raise keys.error(f"rope_type: expected {one_of(known)}, got {rope_type!r}")
    elif settings:
        raise keys.error(f"rope_scaling: key '{[*settings][0]}' is not supported with 'default'")
    return Rope(theta, scaling, fraction)


def _scaling(keys: Keys, rope_type: str, settings: dict[str, Any]) -> Scaling:
    fields = {field.name: field for field in dataclasses.fields(_SCALINGS[rope_type])}
    for name, value in settings.items():
        if name not in fields:
            raise keys.error(f"rope_scaling: key '{name}' is not supported with {rope_type!r}")
        if fields[name].type != "bool":
            keys.check_number(f"rope_scaling: {name}", value)
        elif not isinstance(value, bool):
            raise keys.error(f"rope_scaling: {name}: expected False or True, got {value!r}")
    for name, field in fields.items():
        if name not in settings and field.default is dataclasses.MISSING:
            raise keys.error(f"rope_scaling: key '{name}' is missing")
    return _SCALINGS[rope_type](**settings)


def _long_rope(keys: Keys, settings: dict[str, Any], fraction: float) -> LongRopeScaling:
    """Reads LongRoPE; a missing `factor` defaults to the ratio of the two lengths."""
    outer = keys.get("original_max_position_embeddings")
    settings = ({} if outer is None else {"original_max_position_embeddings": outer}) | settings
    names = "short_factor", "long_factor", "original_max_position_embeddings"
    for name in settings:
        if name not in (*names, "factor", "attention_factor"):
            raise keys.error(f"rope_scaling: key '{name}' is not supported with 'longrope'")
    for name in names:
        if name not in settings:
            raise keys.error(f"rope_scaling: key '{name}' is missing")
    short, long, original = (settings[name] for name in names)
    keys.check_number("original_max_position_embeddings", original)
    served = keys.size("max_position_embeddings")
    head_dim = keys.size("head_dim", keys.size("hidden_size") // keys.size("num_attention_heads"))
    size = int(head_dim * fraction) // 2
    for name, factors in (("short_factor", short), ("long_factor", long)):
        is_list = isinstance(factors, list) and len(factors) == size
        if not is_list or not all(isinstance(x, (int, float)) and x > 0 for x in factors):
            raise keys.error(
                f"rope_scaling: {name}: expected a list of {size} numbers > 0, got {factors!r}"
            )
    amplitude = settings.get("attention_factor")
    if amplitude is None:
        factor = settings.get("factor", served / original)
        amplitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    factors = tuple(long if served > original else short)
    return LongRopeScaling(factors, keys.check_number("attention_factor", amplitude))


def _eos_tokens(value: int | list[int] | None) -> tuple[int, ...]:
    return () if value is None else tuple(value) if isinstance(value, list) else (value,)
