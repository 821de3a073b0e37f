"""Writes tests/data/pictures.npz: what transformers computes for picture_cases.py.

    python tests/data/make_pictures.py

Needs torch, transformers and Pillow (2.13, 5.24 and 13.0 made the file), and jax_attn for the names
of the tensors.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from helpers import picture_cases

SIZES = [(37, 90), (8, 8), (300, 41), (64, 64)]


def transformers_model(name: str) -> transformers.PreTrainedModel:
    """The model of a case in f32."""
    with tempfile.TemporaryDirectory() as directory:
        picture_cases.write(Path(directory), name)
        model, loading = transformers.AutoModelForImageTextToText.from_pretrained(
            directory, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
        )
    problems = {key: names for key, names in loading.items() if names}
    assert not problems, problems
    return model.eval()


def processor(name: str) -> Qwen2VLImageProcessorPil:
    raw = picture_cases.preprocessor(picture_cases.CONFIGS[name])
    return Qwen2VLImageProcessorPil(**{k: v for k, v in raw.items() if k != "image_processor_type"})


def computed(name: str) -> dict[str, np.ndarray]:
    """features: rows of all pictures. logits: of the prompt. positions: [3, n] of its tokens."""
    model, prepare = transformers_model(name), processor(name)
    images = [Image.fromarray(each) for each in picture_cases.pictures()]
    ready: Any = prepare(images, return_tensors="pt", do_resize=False)
    tokens, _ = picture_cases.prompt()
    ids = torch.tensor([tokens])
    kinds = (ids == picture_cases.PICTURE_TOKEN).int()
    grid = ready["image_grid_thw"]
    with torch.no_grad():
        seen = model.model.visual(ready["pixel_values"], grid_thw=grid)
        deep = getattr(seen, "deepstack_features", None) or []
        features = torch.stack([seen.pooler_output, *deep], 1)
        positions, _ = model.model.get_rope_index(
            input_ids=ids, mm_token_type_ids=kinds, image_grid_thw=grid
        )
        logits = model(
            input_ids=ids,
            pixel_values=ready["pixel_values"],
            image_grid_thw=grid,
            mm_token_type_ids=kinds,
        ).logits[0]
    return {
        "features": features.numpy(),
        "positions": positions[:, 0].numpy(),
        "logits": logits[::3].numpy(),
    }


def resized(name: str) -> dict[str, np.ndarray]:
    """For pictures that are resized: their patches, normalized, every 97th of each."""
    rows = {}
    for height, width in SIZES:
        image = Image.fromarray(picture_cases.picture(height, width))
        ready = processor(name)([image], return_tensors="np")
        rows[f"{height} x {width}"] = ready["pixel_values"].reshape(-1)[::97]
        rows[f"grid of {height} x {width}"] = ready["image_grid_thw"][0]
    return rows


def main() -> None:
    arrays = {}
    for name in picture_cases.CONFIGS:
        for key, value in (computed(name) | resized(name)).items():
            arrays[f"{name}: {key}"] = value
    np.savez_compressed(picture_cases.RECORDED, **arrays)
    size = picture_cases.RECORDED.stat().st_size
    print(f"{picture_cases.RECORDED}: {len(arrays)} arrays, {size} bytes")


if __name__ == "__main__":
    main()
