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
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
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
    # A text model does not read SigLIP's pooling head.
    loading["missing_keys"] = [x for x in loading["missing_keys"] if "vision_tower.head." not in x]
    problems = {key: names for key, names in loading.items() if names}
    assert not problems, problems
    return model.eval()


_PROCESSORS = {
    "gemma3": Gemma3ImageProcessorPil,
    "gemma4": Gemma4ImageProcessorPil,
    "mistral3": PixtralImageProcessorPil,
}


def processor(name: str) -> Any:
    raw = picture_cases.CONFIGS[name]
    keys = {k: v for k, v in picture_cases.preprocessor(raw).items() if k != "image_processor_type"}
    return _PROCESSORS.get(raw["model_type"], Qwen2VLImageProcessorPil)(**keys)


def computed(name: str) -> dict[str, np.ndarray]:
    """features: rows of all pictures. logits: of the prompt. positions: of its tokens, [3, n]."""
    model, prepare, raw = transformers_model(name), processor(name), picture_cases.CONFIGS[name]
    images = [Image.fromarray(each) for each in picture_cases.pictures(raw)]
    ready: Any = prepare(images, return_tensors="pt", do_resize=False)
    tokens, _ = picture_cases.prompt(raw)
    ids = torch.tensor([tokens])
    kinds = (ids == picture_cases.PICTURE_TOKEN).int()
    family, arrays = raw["model_type"], {}
    names = {"gemma4": "image_position_ids", "mistral3": "image_sizes"}
    inputs = {"pixel_values": ready["pixel_values"]}
    if family in names:
        inputs[names[family]] = torch.as_tensor(ready[names[family]])
    elif family != "gemma3":
        inputs["image_grid_thw"] = ready["image_grid_thw"]
    with torch.no_grad():
        if "image_grid_thw" in inputs:
            seen = model.model.visual(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"])
        else:
            seen = model.model.get_image_features(**inputs, return_dict=True)
        rows = seen.pooler_output
        rows = torch.cat(list(rows)) if isinstance(rows, (list, tuple)) else rows
        deep = getattr(seen, "deepstack_features", None) or []
        arrays["features"] = torch.stack([rows.reshape(-1, rows.shape[-1]), *deep], 1).numpy()
        if "image_grid_thw" in inputs:
            positions, _ = model.model.get_rope_index(
                input_ids=ids, mm_token_type_ids=kinds, image_grid_thw=inputs["image_grid_thw"]
            )
            arrays["positions"] = positions[:, 0].numpy()
        if family == "gemma3":
            inputs["token_type_ids"] = kinds
        elif family != "mistral3":
            inputs["mm_token_type_ids"] = kinds
        arrays["logits"] = model(input_ids=ids, **inputs).logits[0][::3].numpy()
    return arrays


def resized(name: str) -> dict[str, np.ndarray]:
    """For pictures that are resized: normalized, every 97th number, and rows and columns of tokens.

    Qwen's in the order of their patches, others' [3, height, width].
    """
    rows, raw = {}, picture_cases.CONFIGS[name]
    config = picture_cases.config_of(raw)
    for height, width in SIZES:
        image = Image.fromarray(picture_cases.picture(height, width))
        ready = processor(name)([image], return_tensors="np")
        pixels = np.asarray(ready["pixel_values"])
        if "image_grid_thw" in ready:
            grid = ready["image_grid_thw"][0][1:] // config.merge_size
        elif "image_position_ids" in ready:
            places = ready["image_position_ids"][0]
            columns, lines = places.max(0) + 1
            grid = np.array([lines, columns]) // config.merge_size
            patches = pixels[0][places[:, 0] >= 0] * 2 - 1
            p = config.patch_size
            pixels = patches.reshape(lines, columns, p, p, 3).transpose(4, 0, 2, 1, 3)
        else:
            grid = np.array(pixels.shape[-2:]) // config.factor
        rows[f"{height} x {width}"] = pixels.reshape(-1)[::97]
        rows[f"grid of {height} x {width}"] = grid
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
