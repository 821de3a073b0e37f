"""Writes tests/data/mtp.npz: the logits of multi-token prediction that transformers computes.

    python tests/data/make_mtp.py

Needs torch and transformers (5.23 made the file), and jax_attn for the names of the tensors. The
layer is transformers' MtpLayer. Its block is the last layer of a model with one layer more.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file
from transformers.modeling_layers import MtpLayer

from helpers import model_cases, mtp_cases
from jax_attn.models._config.config import ModelConfig
from jax_attn.models._weights.tensors import layer_prefix, outer_tensors


def load(raw: dict[str, Any], tensors: dict[str, np.ndarray]) -> transformers.PreTrainedModel:
    """A model of these tensors in f32."""
    with tempfile.TemporaryDirectory() as directory:
        model_cases.write(Path(directory), raw | {"num_nextn_predict_layers": 0})
        save_file(tensors, Path(directory) / "model.safetensors")
        model, loading = transformers.AutoModelForCausalLM.from_pretrained(
            directory, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
        )
    assert not any(loading.values()), loading
    return model.eval()


def layer_of(
    raw: dict[str, Any], config: ModelConfig, own: ModelConfig
) -> tuple[transformers.PreTrainedModel, MtpLayer]:
    """The model, and its layer for multi-token prediction."""
    tensors, of_layer = (model_cases.random_tensors(each) for each in (config, own))
    n, prefix = config.num_layers, layer_prefix(own, 0)
    outer = {name for parts in outer_tensors(own).values() for name in parts}
    block = {
        f"model.layers.{n}.{name.removeprefix(prefix)}": x
        for name, x in of_layer.items()
        if name not in outer
    }
    longer = raw | {"num_hidden_layers": n + 1}
    if config.recurrent is not None:
        kinds = ["full_attention" if x.attention else "linear_attention" for x in config.layers]
        longer["layer_types"] = [*kinds, "full_attention"]
    model = load(raw, tensors)
    last = load(longer, tensors | block).model.layers[n]
    layer = MtpLayer(model.config, lambda config, idx: last, type(model.model.norm), n)
    modules = {"mtp_in": "eh_proj", "mtp_embedding_norm": "enorm", "mtp_hidden_norm": "hnorm"}
    for weight, parts in outer_tensors(own).items():
        (name,) = parts
        module = layer.get_submodule(modules.get(weight, "post_norm"))
        module.weight.data = torch.from_numpy(of_layer[name])
    return model, layer.eval()


def logits(raw: dict[str, Any], tokens: np.ndarray) -> np.ndarray:
    """[len - 1, vocab_size] f32. Row i is that of token i and of the token behind it.

    The last NUM_GUESSED rows have the layer's own hidden state of the row before.
    """
    with tempfile.TemporaryDirectory() as directory:
        config, own = mtp_cases.write(Path(directory), raw)
    model, layer = layer_of(raw, config, own)
    n = len(tokens) - 1
    mask = torch.full((n, n), torch.finfo(torch.float32).min).triu(1)[None, None]
    with torch.no_grad():
        known = torch.from_numpy(tokens)[None]
        hidden = model(known, output_hidden_states=True).hidden_states[-1][:, :-1]
        embedded = model.get_input_embeddings()(known[:, 1:])
        positions = torch.arange(1, n + 1)[None]
        angles = model.model.rotary_emb(embedded, position_ids=positions)
        for row in range(n - mtp_cases.NUM_GUESSED, n + 1):
            made = layer(embedded, hidden, angles, mask, positions, None)
            if row < n:
                hidden[:, row] = made[:, row - 1]
        return model.lm_head(made)[0].numpy()


def main() -> None:
    tokens = model_cases.tokens()
    rows = {name: logits(raw, tokens)[mtp_cases.ROWS] for name, raw in mtp_cases.CONFIGS.items()}
    np.savez_compressed(mtp_cases.LOGITS, **rows)
    print(f"{mtp_cases.LOGITS}: {len(rows)} models, {mtp_cases.LOGITS.stat().st_size} bytes")


if __name__ == "__main__":
    main()
