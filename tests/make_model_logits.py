"""Writes tests/data/model_logits.npz: the logits that transformers computes for model_cases.py.

    python tests/make_model_logits.py

Needs torch and transformers (5.23 made the file), and jax_attn for the names of the tensors.
"""

from __future__ import annotations

from typing import Any

import model_cases
import numpy as np
import torch
import transformers

from jax_attn import models


def transformers_model(raw: dict[str, Any]) -> transformers.PreTrainedModel:
    """The model of a config.json in f32, with the weights of model_cases.random_tensors."""
    config = transformers.AutoConfig.for_model(**raw)
    # eager: the other implementations leave out Gemma 2's soft cap of attention.
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    )
    tensors = model_cases.random_tensors(models.parse_config(raw))
    state = {name: torch.from_numpy(tensor) for name, tensor in tensors.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    return model.eval()


def logits(model: transformers.PreTrainedModel, tokens: np.ndarray) -> np.ndarray:
    """[len, vocab_size] f32 of one sequence."""
    with torch.no_grad():
        return model(torch.from_numpy(tokens)[None]).logits[0].numpy()


def main() -> None:
    tokens = model_cases.tokens()
    rows = {
        name: logits(transformers_model(raw), tokens)[:: model_cases.LOGITS_EVERY]
        for name, raw in model_cases.CONFIGS.items()
    }
    np.savez_compressed(model_cases.LOGITS, **rows)
    print(f"{model_cases.LOGITS}: {len(rows)} models, {model_cases.LOGITS.stat().st_size} bytes")


if __name__ == "__main__":
    main()
