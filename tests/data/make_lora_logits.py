"""Writes tests/data/lora_logits.npz: the logits that PEFT computes for the cases of lora.py.

    python tests/data/make_lora_logits.py

Needs torch, transformers and peft (0.21 made the file), and jax_attn for the names of the tensors.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
from make_model_logits import logits, transformers_model
from safetensors.numpy import load_file

from helpers import lora, model_cases


def adapter_of(name: str, options: dict[str, Any]) -> tuple[np.ndarray, str, str]:
    """Logits of a model with a new adapter, its config and the shapes of its tensors, as JSON."""
    raw, config_options = model_cases.CONFIGS[lora.CASES[name][0]], options
    config = peft.LoraConfig(**config_options)
    made = peft.get_peft_model(transformers_model(raw), config)
    with tempfile.TemporaryDirectory() as directory:
        made.save_pretrained(directory)
        top = Path(directory)
        shapes = {k: x.shape for k, x in load_file(top / "adapter_model.safetensors").items()}
        written = json.loads((top / "adapter_config.json").read_text())
        lora.write(top, written, {k: lora.values(name, k, shape) for k, shape in shapes.items()})
        loaded = peft.PeftModel.from_pretrained(transformers_model(raw), directory)
        found = logits(loaded.eval(), model_cases.tokens())[:: model_cases.LOGITS_EVERY]
    return found, json.dumps(written), json.dumps({k: list(x) for k, x in shapes.items()})


def main() -> None:
    torch.manual_seed(0)
    arrays: dict[str, Any] = {}
    for name, (_, options) in lora.CASES.items():
        arrays[f"{name} logits"], arrays[f"{name} config"], arrays[f"{name} shapes"] = adapter_of(
            name, options
        )
    np.savez_compressed(lora.LOGITS, **arrays)
    print(f"{lora.LOGITS}: {len(lora.CASES)} adapters, {lora.LOGITS.stat().st_size} bytes")


if __name__ == "__main__":
    main()
