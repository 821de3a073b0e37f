"""From config.json to ModelConfig, family by family.

An option that changes what a model computes is either done or refused. Defaults of missing keys are
those of transformers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jax_attn.models.config import LayerKind, ModelConfig
from jax_attn.models.directory import ModelDirectoryError, read_json
from jax_attn.models.rope import LinearScaling, Llama3Scaling, Rope

_SCALINGS = {"linear": LinearScaling, "llama3": Llama3Scaling}


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

    def expect(self, key: str, expected: Any) -> None:
        """Refuses any other value; a missing key is the same as `expected`."""
        if (got := self.raw.get(key, expected)) != expected:
            raise self.error(f"{key}: expected {expected!r}, got {got!r}")


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
    family = FAMILIES.get(keys.get("model_type"))
    if family is None:
        raise keys.error(
            f"model_type: expected {_one_of(FAMILIES)}, got {keys.get('model_type')!r}"
        )
    keys.expect("quantization_config", None)
    return family(keys)


def _llama(keys: _Keys) -> ModelConfig:
    keys.expect("hidden_act", "silu")
    keys.expect("mlp_bias", False)
    bias = keys.get("attention_bias", False)
    kv_heads = keys.get("num_key_value_heads")
    return _config(keys, [LayerKind(_rope(keys))], kv_heads, qkv_bias=bias, o_bias=bias)


FAMILIES: dict[Any, Callable[[_Keys], ModelConfig]] = {"llama": _llama}


def _config(
    keys: _Keys, period: list[LayerKind], num_kv_heads: int | None, **options: Any
) -> ModelConfig:
    """What all families share. Layer i is of kind period[i % len(period)]."""
    num_qo_heads, num_layers = keys.need("num_attention_heads"), keys.need("num_hidden_layers")
    num_kv_heads = num_kv_heads or num_qo_heads
    if num_qo_heads % num_kv_heads:
        raise keys.error(
            f"num_attention_heads: expected a multiple of num_key_value_heads {num_kv_heads}, got "
            f"{num_qo_heads}"
        )
    head_dim = keys.get("head_dim") or keys.need("hidden_size") // num_qo_heads
    common = {
        "family": keys.need("model_type"),
        "vocab_size": keys.need("vocab_size"),
        "hidden_size": keys.need("hidden_size"),
        "intermediate_size": keys.need("intermediate_size"),
        "num_qo_heads": num_qo_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "layers": tuple(period[i % len(period)] for i in range(num_layers)),
        "rms_norm_eps": keys.need("rms_norm_eps"),
        "tie_embeddings": keys.get("tie_word_embeddings", False),
        "max_positions": keys.need("max_position_embeddings"),
        "bos_token": keys.get("bos_token_id"),
        "eos_tokens": _eos_tokens(keys.get("eos_token_id")),
        "sm_scale": 1 / math.sqrt(head_dim),
    }
    return ModelConfig(**(common | options))


def _rope(keys: _Keys) -> Rope:
    # transformers 5 keeps everything about RoPE in one dict; 4 kept the base outside of it.
    rope = keys.get("rope_parameters") or keys.get("rope_scaling") or {}
    theta = rope.get("rope_theta", keys.get("rope_theta", 10000.0))
    return Rope(theta, _rope_scaling(keys, rope))


def _rope_scaling(keys: _Keys, rope: dict[str, Any]) -> LinearScaling | Llama3Scaling | None:
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type == "default":
        return None
    if rope_type not in _SCALINGS:
        raise keys.error(
            f"rope_type: expected {_one_of(['default', *_SCALINGS])}, got {rope_type!r}"
        )
    scaling = _SCALINGS[rope_type]
    names = [field.name for field in dataclasses.fields(scaling)]
    if missing := [name for name in names if name not in rope]:
        raise keys.error(f"rope_scaling: key '{missing[0]}' is missing")
    return scaling(**{name: rope[name] for name in names})


def _eos_tokens(value: int | list[int] | None) -> tuple[int, ...]:
    return () if value is None else tuple(value) if isinstance(value, list) else (value,)


def _one_of(names: Any) -> str:
    *others, last = map(repr, names)
    return f"{', '.join(others)} or {last}" if others else last
