"""config.json to ModelConfig: the functions of all families, one file a lineage."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jax_attn.models._config.config import ModelConfig
from jax_attn.models._config.directory import existing_directory, read_json
from jax_attn.models._config.keys import Keys, refuse_changes_of_any_family
from jax_attn.models._config.quantized_files import parse_quantization
from jax_attn.models._families import (
    apertus,
    arcee,
    bamba,
    cohere,
    deepseek,
    dots,
    ernie,
    exaone,
    falcon,
    gemma,
    glm,
    gpt_neox,
    gpt_oss,
    granite,
    hunyuan,
    kimi,
    lfm,
    llama,
    minimax,
    mistral,
    nemotron,
    olmo,
    phi,
    qwen,
    qwen_hybrid,
    qwen_vl,
    seed_oss,
    smollm,
    stablelm,
    starcoder,
)

_LINEAGES = (
    llama,
    mistral,
    qwen,
    qwen_hybrid,
    qwen_vl,
    deepseek,
    gpt_oss,
    phi,
    olmo,
    granite,
    lfm,
    smollm,
    gemma,
    glm,
    dots,
    exaone,
    ernie,
    seed_oss,
    arcee,
    minimax,
    nemotron,
    starcoder,
    stablelm,
    gpt_neox,
    hunyuan,
    apertus,
    cohere,
    bamba,
    falcon,
    kimi,
)
FAMILIES: dict[str, Callable[[Keys], ModelConfig]] = {
    name: parse for lineage in _LINEAGES for name, parse in lineage.FAMILIES.items()
}


def load_config(directory: str | Path) -> ModelConfig:
    """Reads config.json, and the stop tokens of generation_config.json if it exists.

    Raises:
      ModelDirectoryError: a key is missing, or asks for an unsupported option.
    """
    directory = existing_directory(directory)
    path = directory / "config.json"
    of_modelopt = directory / "hf_quant_config.json"
    config = parse_config(
        read_json(path),
        path,
        Keys(read_json(of_modelopt), of_modelopt) if of_modelopt.is_file() else None,
    )
    generation = directory / "generation_config.json"
    if generation.is_file():  # chat models have more stop tokens for a turn than for a text
        eos = Keys(read_json(generation), generation).tokens("eos_token_id", config.vocab_size)
        eos_tokens = tuple(dict.fromkeys(config.eos_tokens + eos))
        config = dataclasses.replace(config, eos_tokens=eos_tokens)
    return config


def parse_config(
    raw: dict[str, Any], path: Path | str = "config.json", of_modelopt: Keys | None = None
) -> ModelConfig:
    """Returns the config of a parsed config.json. `path` is used in error messages only.

    of_modelopt: the keys of hf_quant_config.json.
    """
    keys = Keys(raw, path)
    keys.need("model_type")
    keys.expect("model_type", *FAMILIES)
    keys.expect("is_causal", True)
    refuse_changes_of_any_family(keys, raw["model_type"])
    config = FAMILIES[raw["model_type"]](keys)
    quantization = parse_quantization(keys, of_modelopt)
    is_mxfp4 = quantization is not None and quantization.method == "mxfp4"
    if quantization is not None and is_mxfp4 != (raw["model_type"] == "gpt_oss"):
        raise keys.error(
            f"quantization_config: quant_method: {quantization.method!r} is not supported with"
            f" model_type {raw['model_type']!r}"
        )
    return dataclasses.replace(config, quantization=quantization)
