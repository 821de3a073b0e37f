"""Writes tests/data/model_logits.npz: the logits that transformers computes for model_cases.py.

    python tests/data/make_model_logits.py
    python tests/data/make_model_logits.py --new   # keeps the logits that are there

Needs torch and transformers (5.23 made the file), and jax_attn for the names of the tensors.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from helpers import model_cases

# Functions of the config (MiniMax), which files need not have.
CONSTANTS = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")


def transformers_model(raw: dict[str, Any]) -> transformers.PreTrainedModel:
    """The model of a directory in f32, with the weights of model_cases.random_tensors."""
    with tempfile.TemporaryDirectory() as directory:
        model_cases.write(Path(directory), raw)
        # eager: the other implementations leave out Gemma 2's soft cap of attention.
        model, loading = transformers.AutoModelForCausalLM.from_pretrained(
            directory, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
        )
    for key, names in loading.items():
        problems = [name for name in names if not str(name).endswith(CONSTANTS)]
        assert not problems, (key, problems)
    return model.eval()


def logits(model: transformers.PreTrainedModel, tokens: np.ndarray) -> np.ndarray:
    """[len, vocab_size] f32 of one sequence."""
    with torch.no_grad():
        return model(torch.from_numpy(tokens)[None]).logits[0].numpy()


def main() -> None:
    tokens = model_cases.tokens()
    known = dict(np.load(model_cases.LOGITS)) if "--new" in sys.argv else {}
    rows = {
        name: known[name]
        if name in known
        else logits(transformers_model(raw), tokens)[:: model_cases.LOGITS_EVERY]
        for name, raw in model_cases.CONFIGS.items()
    }
    np.savez_compressed(model_cases.LOGITS, **rows)
    print(f"{model_cases.LOGITS}: {len(rows)} models, {model_cases.LOGITS.stat().st_size} bytes")


if __name__ == "__main__":
    main()
