"""Writes tests/data/activations.npz: expected logits for quantized_cases.WITH_ACTIVATIONS, computed
by transformers and compressed-tensors.

    python tests/data/make_activations.py

Needs torch, transformers and compressed-tensors (2.13, 5.24 and 0.20 made the file), and jax_attn
for the tensors' names.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

from helpers import quantized_cases


def logits(name: str) -> np.ndarray:
    """[vocab_size, vocab_size] f32: row t follows a text that is token t alone."""
    with tempfile.TemporaryDirectory() as directory:
        quantized_cases.write(Path(directory), quantized_cases.LLAMA, name)
        model, loading = transformers.AutoModelForCausalLM.from_pretrained(
            directory, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
        )
    problems = [key for keys in loading.values() for key in keys]
    assert not problems, problems
    # It makes weights of NVFP4 bfloat16, exact here.
    model.hf_quantizer.compressor.decompress_model(model)
    model = model.to(torch.float32)
    with torch.no_grad():
        texts = torch.arange(model.config.vocab_size)[:, None]
        return model.eval()(texts).logits[:, 0].numpy()


def main() -> None:
    rows = {name: logits(name) for name in quantized_cases.WITH_ACTIVATIONS}
    np.savez_compressed(quantized_cases.RECORDED, **rows)


if __name__ == "__main__":
    main()
