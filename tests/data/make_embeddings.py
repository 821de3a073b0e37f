"""Writes tests/data/embeddings.npz: expected embeddings for embedding_cases.py.

transformers computes them, with the pooling of sentence-transformers.

    python tests/data/make_embeddings.py

Needs torch, transformers and sentence-transformers (2.13, 5.24 and 6.2 made the file), the package
of MiniLM (embedding_cases.py), and jax_attn for the names of the tensors.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling

from helpers import embedding_cases


def embeddings(name: str) -> np.ndarray:
    """[number of sequences, size] f32, each sequence alone."""
    with tempfile.TemporaryDirectory() as directory:
        embedding_cases.write(Path(directory), name)
        model, loading = transformers.AutoModel.from_pretrained(
            directory, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
        )
    # Encoders' parts outside their layers are unused, and the files do not have them.
    problems = [key for keys in loading.values() for key in keys if "pooler" not in str(key)]
    assert not problems, problems
    _, mode, normalizes = embedding_cases.CASES[name]
    pooling = Pooling(embedding_cases.SIZE, mode)
    rows = []
    with torch.no_grad():
        for tokens in embedding_cases.sequences():
            tokens = torch.tensor([tokens])
            mask = torch.ones_like(tokens)
            hidden = model.eval()(tokens, attention_mask=mask).last_hidden_state
            features = {"token_embeddings": hidden, "attention_mask": mask}
            rows.append(pooling(features)["sentence_embedding"][0])
        made = torch.stack(rows)
        return (torch.nn.functional.normalize(made) if normalizes else made).numpy()


def main() -> None:
    rows = {name: embeddings(name) for name in embedding_cases.CASES}
    published = SentenceTransformer(str(embedding_cases.minilm()), device="cpu")
    rows[embedding_cases.MINILM] = np.stack([published.encode(x) for x in embedding_cases.TEXTS])
    np.savez_compressed(embedding_cases.RECORDED, **rows)
    size = embedding_cases.RECORDED.stat().st_size
    print(f"{embedding_cases.RECORDED}: {len(rows)} models, {size} bytes")


if __name__ == "__main__":
    main()
