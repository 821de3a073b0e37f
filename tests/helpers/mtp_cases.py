"""Small models with a layer for multi-token prediction, with weights that any machine can make.

tests/data/mtp.npz holds the logits that transformers computes for them (make_mtp.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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

_WITHOUT = ("o", "down", "mixed_o", "expert_down", "shared_down")  # what layers add to x
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


def make(raw: dict[str, Any]) -> tuple[models.Model, models.Model]:
    """A random model and its layer."""
    tokenizer = models.load(models.BUNDLED, "float32").tokenizer
    sizes = {"vocab_size": tokenizer.get_vocab_size(), "eos_token_id": 0}
    config = models.parse_config(raw | sizes | {"tie_word_embeddings": False})
    own = models.mtp_config(config)
    found = [
        models.Model(each, models.random_params(each, jax.random.key(i), "float32"), tokenizer)
        for i, each in enumerate((config, own))
    ]
    return found[0], found[1]


def always_right(
    name: str, through: str, prompt: list[int], num_tokens: int
) -> tuple[models.Model, models.Model, list[int]]:
    """A model whose next token depends on the last one alone, and a layer that says the same.

    through: what the layer reads, the embedding of the token or the hidden state before it.
    Returns the model, the layer and the tokens that follow the prompt.
    """
    (config, params, tokenizer), (own, of_layer, _) = make(CONFIGS[name])

    def silent(layers: list[models.Params]) -> list[models.Params]:
        return [{k: w * 0 if k in _WITHOUT else w for k, w in x.items()} for x in layers]

    def normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        x /= np.sqrt(np.square(x).mean(-1, keepdims=True) + config.rms_norm_eps)
        return x * (config.norm_offset + weight)

    params["layers"], of_layer["layers"] = silent(params["layers"]), silent(of_layer["layers"])
    embed, head, weight = (np.array(params[x]) for x in ("embed", "head", "final_norm"))
    hidden = normed(embed.copy(), weight)
    text = [prompt[-1]]
    for _ in range(num_tokens):
        text.append(int((hidden[text[-1]] @ head).argmax()))
    neutral = np.full_like(weight, 1 - config.norm_offset)
    of_layer |= {"mtp_embedding_norm": neutral, "mtp_hidden_norm": neutral, "final_norm": weight}
    zeros, one = np.zeros((len(weight), len(weight)), np.float32), np.eye(len(weight))
    halves = one, zeros
    if through == "hidden":
        # A map from the hidden state of each of few tokens to the embedding of the one behind.
        read = normed(hidden[text[:-1]], neutral)
        halves = zeros, np.linalg.lstsq(read, normed(embed[text[1:]], neutral))[0]
    of_layer["mtp_in"] = jnp.asarray(np.concatenate(halves), jnp.float32)
    model = models.Model(config, params, tokenizer)
    of_layer = jax.tree.map(jnp.asarray, of_layer)
    return model, models.Model(own, of_layer, tokenizer), text[1:]
