"""From config.json to ModelConfig, family by family.

An option that changes what a model computes is either done or refused. Defaults of missing keys are
those of transformers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from jax_attn.models.config import LayerKind, ModelConfig
from jax_attn.models.directory import ModelDirectoryError, read_json
from jax_attn.models.rope import LinearScaling, Llama3Scaling, Rope

_SCALINGS: dict[str, type[LinearScaling | Llama3Scaling]] = {
    "linear": LinearScaling,
    "llama3": Llama3Scaling,
}
_FULL, _SLIDING = "full_attention", "sliding_attention"


def load_config(directory: str | Path) -> ModelConfig:
    """Reads config.json, and the stop tokens of generation_config.json where there is one.

    Raises:
      ModelDirectoryError: a key is missing, or asks for something that no model here does.
    """
    directory = Path(directory)
    path = directory / "config.json"
    config = parse_config(read_json(path), path)
    generation = directory / "generation_config.json"
    if generation.is_file():  # chat models end a turn with more tokens than they end a text
        eos = _eos_tokens(read_json(generation).get("eos_token_id"))
        eos_tokens = tuple(dict.fromkeys(config.eos_tokens + eos))
        config = dataclasses.replace(config, eos_tokens=eos_tokens)
    return config


def parse_config(raw: dict[str, Any], path: Path | str = "config.json") -> ModelConfig:
    """The model that the object of a config.json describes. `path` is for messages."""
    keys = _Keys(raw, path)
    keys.need("model_type")
    keys.expect("model_type", *_FAMILIES)
    keys.expect("quantization_config", None)
    return _FAMILIES[raw["model_type"]](keys)


class _Keys:
    """The keys of a config.json, as transformers 4 or 5 writes it."""

    def __init__(self, raw: dict[str, Any], path: Path | str):
        self.raw, self.path = raw, path

    def error(self, message: str) -> ModelDirectoryError:
        return ModelDirectoryError(f"{self.path}: {message}")

    def get(self, key: str, default: Any = None) -> Any:
        return self.raw.get(key, default)

    def need(self, key: str) -> Any:
        if key not in self.raw:
            raise self.error(f"key '{key}' is missing")
        return self.raw[key]

    def number(self, key: str, default: float | None = None) -> Any:
        """A positive number. A default also stands in for null."""
        value = self.need(key) if default is None else self.get(key)
        return self.check_number(key, default if value is None else value)

    def size(self, key: str, default: int | None = None) -> int:
        value = self.number(key, default)
        if not isinstance(value, int):
            raise self.error(f"{key}: expected an integer, got {value!r}")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        self.expect(key, default, not default)
        return bool(self.get(key, default))

    def expect(self, key: str, *allowed: Any) -> None:
        """Refuses any other value; a missing key is the first of them."""
        if (got := self.get(key, allowed[0])) not in allowed:
            raise self.error(f"{key}: expected {_one_of(allowed)}, got {got!r}")

    def check_number(self, key: str, value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise self.error(f"{key}: expected a number > 0, got {value!r}")
        return value


# ---- families ----------------------------------------------------------------------------------


def _llama(keys: _Keys) -> ModelConfig:
    keys.expect("mlp_bias", False)
    keys.expect("sliding_window", None)
    keys.expect("layer_types", None)
    layers = [LayerKind(_rope(keys))] * keys.size("num_hidden_layers")
    return _silu_model(keys, layers, **_biases(keys))


def _mistral(keys: _Keys) -> ModelConfig:
    keys.expect("layer_types", None)
    window = None if keys.get("sliding_window", 4096) is None else keys.size("sliding_window", 4096)
    return _silu_model(keys, [LayerKind(_rope(keys), window)] * keys.size("num_hidden_layers"))


def _qwen2(keys: _Keys) -> ModelConfig:
    return _silu_model(keys, _qwen_layers(keys), qkv_bias=True)


def _qwen3(keys: _Keys) -> ModelConfig:
    head_dim = keys.size("head_dim", 128)
    return _silu_model(keys, _qwen_layers(keys), head_dim=head_dim, qk_norm=True, **_biases(keys))


def _gemma2(keys: _Keys) -> ModelConfig:
    rope = _rope(keys)
    alternating = [_FULL if i % 2 else _SLIDING for i in range(keys.size("num_hidden_layers"))]
    return _gemma(
        keys,
        _layers(keys, alternating, LayerKind(rope), LayerKind(rope, keys.size("sliding_window"))),
        attention_soft_cap=_soft_cap(keys, "attn_logit_softcapping", 50.0),
        logit_soft_cap=_soft_cap(keys, "final_logit_softcapping", 30.0),
    )


def _gemma3(keys: _Keys) -> ModelConfig:
    keys.expect("attn_logit_softcapping", None)  # transformers passes it over
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
        qk_norm=True,
        logit_soft_cap=_soft_cap(keys, "final_logit_softcapping", None),
    )


def _gemma3_with_images(keys: _Keys) -> ModelConfig:
    """The text model; images are not for here."""
    text = keys.need("text_config")
    if not isinstance(text, dict):
        raise keys.error(f"text_config: expected an object, got {text!r}")
    # On the hub it has only what differs from the defaults.
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
    config = _gemma3(_Keys(defaults | text | outer, f"{keys.path}: text_config"))
    return dataclasses.replace(config, tensor_prefix="language_model.")


_FAMILIES: dict[str, Callable[[_Keys], ModelConfig]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "gemma3": _gemma3_with_images,
}


# ---- what families share -----------------------------------------------------------------------


def _silu_model(keys: _Keys, layers: list[LayerKind], **options: Any) -> ModelConfig:
    keys.expect("hidden_act", "silu")
    return _model(keys, layers, **options)


def _gemma(keys: _Keys, layers: list[LayerKind], **options: Any) -> ModelConfig:
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


def _model(keys: _Keys, layers: list[LayerKind], **options: Any) -> ModelConfig:
    """`options` override what the keys say."""
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


def _biases(keys: _Keys) -> dict[str, bool]:
    bias = keys.flag("attention_bias")
    return {"qkv_bias": bias, "o_bias": bias}


def _soft_cap(keys: _Keys, key: str, default: float | None) -> float:
    """0 for null, which is not the same as a missing key."""
    return 0.0 if keys.get(key, default) is None else keys.number(key, default)


def _qwen_layers(keys: _Keys) -> list[LayerKind]:
    rope = _rope(keys)
    num_layers = keys.size("num_hidden_layers")
    if not keys.flag("use_sliding_window"):
        return _layers(keys, [_FULL] * num_layers, LayerKind(rope), None)
    first = keys.get("max_window_layers", 28)  # may be 0
    types = [_FULL if i < first else _SLIDING for i in range(num_layers)]
    return _layers(keys, types, LayerKind(rope), LayerKind(rope, keys.size("sliding_window", 4096)))


def _layers(
    keys: _Keys, types: list[str], full: LayerKind, sliding: LayerKind | None
) -> list[LayerKind]:
    """The kind of each layer, as layer_types says or, where that is missing, `types`."""
    kinds = {_FULL: full} | ({_SLIDING: sliding} if sliding else {})
    named = keys.get("layer_types") or types
    if len(named) != len(types):
        raise keys.error(f"layer_types: expected {len(types)} entries, got {len(named)}")
    for name in named:
        if name not in kinds:
            raise keys.error(f"layer_types: expected {_one_of(kinds)}, got {name!r}")
    return [kinds[name] for name in named]


def _rope(keys: _Keys) -> Rope:
    # transformers 5 keeps everything about RoPE in one dict; 4 kept the base outside of it.
    rope = keys.get("rope_parameters") or keys.get("rope_scaling") or {}
    return _parse_rope(keys, rope, keys.get("rope_theta", 10000.0))


def _parse_rope(keys: _Keys, rope: dict[str, Any], default_theta: float) -> Rope:
    theta = keys.check_number("rope_theta", rope.get("rope_theta", default_theta))
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ("default", *_SCALINGS):
        raise keys.error(
            f"rope_type: expected {_one_of(['default', *_SCALINGS])}, got {rope_type!r}"
        )
    scaling = _SCALINGS.get(rope_type)
    names = [field.name for field in dataclasses.fields(scaling)] if scaling else []
    for name in rope:
        if name not in ("rope_type", "type", "rope_theta", *names):
            raise keys.error(f"rope_scaling: key '{name}' is not supported with {rope_type!r}")
    for name in names:
        if name not in rope:
            raise keys.error(f"rope_scaling: key '{name}' is missing")
        keys.check_number(f"rope_scaling: {name}", rope[name])
    return Rope(theta, scaling(**{name: rope[name] for name in names}) if scaling else None)


def _eos_tokens(value: int | list[int] | None) -> tuple[int, ...]:
    return () if value is None else tuple(value) if isinstance(value, list) else (value,)


def _one_of(values: Iterable[Any]) -> str:
    *others, last = map(repr, values)
    return f"{', '.join(others)} or {last}" if others else last
