"""Writes tests/data/scores.npz: expected logits for scoring_cases.py, computed by transformers.

    python tests/data/make_scores.py

Needs torch and transformers (2.13 and 5.24 made the file), and jax_attn for the tensors' names.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

from helpers import scoring_cases


def logits(name: str) -> np.ndarray:
    """[number of sequences, num_labels] f32, each sequence alone."""
    with tempfile.TemporaryDirectory() as directory:
        scoring_cases.write(Path(directory), name)
        model, loading = transformers.AutoModelForSequenceClassification.from_pretrained(
            directory, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
        )
    problems = [key for keys in loading.values() for key in keys]
    assert not problems, problems
    rows = []
    with torch.no_grad():
        for tokens, second in zip(*scoring_cases.pairs(), strict=True):
            types = [int(i >= second) for i in range(len(tokens))]
            more = {}
            if scoring_cases.has_types(scoring_cases.CASES[name]):
                more = {"token_type_ids": torch.tensor([types])}
            tokens = torch.tensor([tokens])
            mask = torch.ones_like(tokens)
            rows.append(model.eval()(tokens, attention_mask=mask, **more).logits[0])
        return torch.stack(rows).numpy()


def vectors(name: str) -> np.ndarray:
    """[number of sequences, hidden] f32: means of the last layer, without the head."""
    with tempfile.TemporaryDirectory() as directory:
        scoring_cases.write(Path(directory), name)
        model = transformers.AutoModel.from_pretrained(
            directory, attn_implementation="eager", dtype=torch.float32
        )
    with torch.no_grad():
        rows = [model.eval()(torch.tensor([each])) for each in scoring_cases.pairs()[0]]
        return torch.stack([row.last_hidden_state[0].mean(0) for row in rows]).numpy()


def main() -> None:
    rows = {name: logits(name) for name in scoring_cases.CASES}
    rows[scoring_cases.VECTORS] = vectors(scoring_cases.MODERN)
    np.savez_compressed(scoring_cases.RECORDED, **rows)


if __name__ == "__main__":
    main()
