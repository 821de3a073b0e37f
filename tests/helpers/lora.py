"""LoRA adapters for tests: random ones, as PEFT writes them, and weights with them merged."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from helpers.paths import DATA
from jax_attn import models
from jax_attn.models._weights.lora_files import ADAPTED, LoraWeights
from jax_attn.models._weights.tensors import layer_tensors
from jax_attn.models._weights.weights import file_order

# What PEFT computes (tests/data/make_lora_logits.py): for each case logits, config and shapes.
LOGITS = DATA / "lora_logits.npz"
CASES: dict[str, tuple[str, dict[str, Any]]] = {  # the model's case, and options of LoraConfig
    "alpha": ("llama", {"r": 4, "lora_alpha": 12, "target_modules": ["q_proj", "down_proj"]}),
    "rslora, all": ("qwen3", {"r": 6, "use_rslora": True, "target_modules": "all-linear"}),
    "patterns": (
        "llama",
        {
            "r": 4,
            "target_modules": ["q_proj", "v_proj", "o_proj"],
            "rank_pattern": {"v_proj": 2, r"layers\.1\.self_attn\.q_proj": 7},
            "alpha_pattern": {"o_proj": 3},
            "layers_to_transform": [0, 1],
        },
    ),
    "regex": (
        "qwen3",
        {
            "r": 3,
            "target_modules": r".*\.(0|2)\.(self_attn|mlp)\.(k|gate)_proj",
            "exclude_modules": ["layers.2.mlp.gate_proj"],
        },
    ),
    "packed": ("phi3", {"r": 4, "target_modules": ["qkv_proj", "gate_up_proj"]}),
}

CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": "all-linear",
}


def modules(config: models.ModelConfig) -> dict[str, tuple[int, int]]:
    """The linear layers of the files that adapters may change: name -> (out, in)."""
    return {
        f"model.layers.{layer}.{tensor.removesuffix('.weight')}": shape
        for layer in range(config.num_layers)
        for name, parts in layer_tensors(config, layer).items()
        if name in ADAPTED
        for tensor, shape in parts.items()
    }


def values(seed: str, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A tensor of an adapter, from numpy's legacy generator, which never changes."""
    random = np.random.RandomState(zlib.crc32(f"{seed} {name}".encode()))
    factor = shape[1] ** -0.5 if "lora_A" in name else 0.2
    return (random.standard_normal(shape) * factor).astype(np.float32)


def tensors(config: models.ModelConfig, seed: str, rank: int = 4) -> dict[str, np.ndarray]:
    """An adapter of all modules, by PEFT's names."""
    shapes = {}
    for module, (out, depth) in modules(config).items():
        shapes[f"base_model.model.{module}.lora_A.weight"] = (rank, depth)
        shapes[f"base_model.model.{module}.lora_B.weight"] = (out, rank)
    return {name: values(seed, name, shape) for name, shape in shapes.items()}


def write(directory: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def merged(
    params: models.Params, config: models.ModelConfig, adapter: LoraWeights
) -> models.Params:
    """Params whose matrices have the adapter's products added."""
    params = jax.tree.map(np.asarray, params)
    layers = []
    for layer, weights in enumerate(params["layers"]):
        new = dict(weights)
        for name, parts in layer_tensors(config, layer).items():
            if name not in ADAPTED:
                continue
            deltas = [
                pair.b @ pair.a
                if (pair := adapter.pairs.get((layer, tensor.removesuffix(".weight"))))
                else np.zeros(shape, np.float32)
                for tensor, shape in parts.items()
            ]
            delta = np.concatenate(deltas).T
            order = file_order(name, config, delta.shape[1])
            new[name] = weights[name] + (delta if order is None else delta[:, order])
        layers.append(new)
    return jax.tree.map(jnp.asarray, params | {"layers": layers})
