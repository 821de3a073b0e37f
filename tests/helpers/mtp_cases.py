"""Small models with a layer for multi-token prediction, with weights that any machine can make.

tests/data/mtp.npz holds the logits that transformers computes for them (make_mtp.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from helpers import model_cases
from helpers.paths import DATA
from jax_attn import models
from jax_attn.models._config.config import ModelConfig
from jax_attn.models._families.parse import load_config

LOGITS = DATA / "mtp.npz"
NUM_GUESSED = 3  # rows at the end that have the layer's own hidden state
# The rows that LOGITS holds.
_NUM_LAST = 1 + NUM_GUESSED
ROWS = [0, 1, 7, 14, 22, 31, *range(model_cases.NUM_TOKENS - 1)[-_NUM_LAST:]]

_EXTRA = {"num_nextn_predict_layers": 1}
CONFIGS: dict[str, dict[str, Any]] = {
    **{name: model_cases.CONFIGS[name] for name in ("qwen3 next", "qwen3.5", "qwen3.5 moe")},
    **{name: model_cases.CONFIGS[name] | _EXTRA for name in ("glm4 moe", "deepseek v3")},
}


def write(directory: Path, raw: dict[str, Any], **more: Any) -> tuple[ModelConfig, ModelConfig]:
    """Writes config.json and model.safetensors; returns the configs of the model and its layer.

    more: tensors that are written, too, by name.
    """
    from safetensors.numpy import save_file

    (directory / "config.json").write_text(json.dumps(raw))
    config = load_config(directory)
    own = models.mtp_config(config)
    tensors = {
        config.tensor_prefix + name.removeprefix("model.") if config.tensor_prefix else name: x
        for name, x in model_cases.random_tensors(config).items()
    }
    save_file(tensors | model_cases.random_tensors(own) | more, directory / "model.safetensors")
    return config, own
