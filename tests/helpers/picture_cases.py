"""Small models that read pictures, with weights that any machine can make again.

tests/data/pictures.npz holds what transformers computes for them (make_pictures.py).
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jax_attn as ja
from helpers import model_cases
from helpers.paths import DATA
from jax_attn import models
from jax_attn.models._config.keys import Keys
from jax_attn.models._vision import tower

RECORDED = DATA / "pictures.npz"
PICTURE_TOKEN = 40

_TEXT: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 100.0,
        "mrope_section": [4, 3, 1],
        "mrope_interleaved": True,
    },
}
_VISION: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 25,
    "deepstack_visual_indexes": [0, 2],
}
_WHOLE = {"image_token_id": PICTURE_TOKEN, "video_token_id": 41}
_WHOLE |= {"vision_start_token_id": 42, "vision_end_token_id": 43}

# config.json of each. Positions have few frequencies, so that a wrong part of one shows.
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3 vl": {
        "model_type": "qwen3_vl",
        **_WHOLE,
        "text_config": {"model_type": "qwen3_vl_text", **_TEXT},
        "vision_config": {"model_type": "qwen3_vl_vision", **_VISION},
    },
    "qwen3 vl tied, one frame": {
        "model_type": "qwen3_vl",
        **_WHOLE,
        "tie_word_embeddings": True,
        "text_config": {
            "model_type": "qwen3_vl_text",
            **_TEXT,
            "num_hidden_layers": 2,
            "head_dim": 24,
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1000.0,
                "mrope_section": [8, 1, 3],
            },
        },
        "vision_config": {
            "model_type": "qwen3_vl",
            **_VISION,
            "hidden_size": 24,
            "num_heads": 1,
            "hidden_act": "gelu",
            "temporal_patch_size": 1,
            "num_position_embeddings": 9,
            "deepstack_visual_indexes": [1],
        },
    },
    "qwen3.5": {
        "model_type": "qwen3_5",
        **_WHOLE,
        "tie_word_embeddings": model_cases.CONFIGS["qwen3.5"]["tie_word_embeddings"],
        "text_config": {
            **model_cases.CONFIGS["qwen3.5"],
            "num_hidden_layers": 2,
            "full_attention_interval": 2,
            "max_position_embeddings": 256,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 100.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
            },
        },
        "vision_config": {
            key: value for key, value in _VISION.items() if key != "deepstack_visual_indexes"
        }
        | {"model_type": "qwen3_5_vision"},
    },
}


def preprocessor(raw: dict[str, Any]) -> dict[str, Any]:
    """The preprocessor_config.json of a case."""
    vision = raw["vision_config"]
    return {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "patch_size": vision["patch_size"],
        "temporal_patch_size": vision["temporal_patch_size"],
        "merge_size": vision["spatial_merge_size"],
        "size": {"shortest_edge": 256, "longest_edge": 2048},
        "image_mean": [0.5, 0.4, 0.3],
        "image_std": [0.5, 0.25, 0.2],
    }


def picture(height: int, width: int) -> np.ndarray:
    """[height, width, 3] u8: smooth colors with some noise."""
    row, column = np.indices((height, width))
    colors = np.stack([row * 200 / height, column * 200 / width, (row + column) % 160], -1)
    noise = np.random.RandomState(height * 1000 + width).randint(0, 50, colors.shape)
    return (colors + noise).astype(np.uint8)


def pictures() -> list[np.ndarray]:
    """Pictures that need no resizing: of 4 x 6, 3 x 1 and 2 x 2 tokens."""
    return [picture(32, 48), picture(24, 8), picture(16, 16)]


GRIDS = [(4, 6), (3, 1), (2, 2)]


def prompt() -> tuple[list[int], list[tuple[int, int, int]]]:
    """The tokens of a prompt with all pictures, and their spans (`picture_positions`)."""
    tokens = [3, 1, 4, 42]
    spans = []
    for rows, columns in GRIDS:
        spans.append((len(tokens), rows, columns))
        tokens += [PICTURE_TOKEN] * (rows * columns) + [43, 7, 42]
    return tokens + [9, 2, 6, 5], spans


def random_tensors(raw: dict[str, Any]) -> dict[str, np.ndarray]:
    """Random tensors of the tower, with the names of the files."""
    text = raw["text_config"]
    config = tower.parse(Keys(raw, "config.json"), text["hidden_size"], text["vocab_size"])
    tensors = {}
    for name, shape in tower.file_shapes(config).items():
        name = config.tensor_prefix + name
        normal = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
        is_norm = "norm" in name and name.endswith("weight")
        scale = 0.3 if len(shape) < 5 else 0.1
        tensors[name] = (float(is_norm) + scale * normal).astype(np.float32)
    return tensors


def write(directory: Path, name: str) -> None:
    """Writes config.json, preprocessor_config.json and model.safetensors."""
    _write(directory, CONFIGS[name])


def _write(directory: Path, raw: dict[str, Any]) -> None:
    from safetensors.numpy import load_file, save_file

    config = model_cases.write(directory, raw)
    text = load_file(directory / "model.safetensors")
    prefix = config.tensor_prefix
    named = {
        prefix + key.removeprefix("model.") if key.startswith("model.") else key: value
        for key, value in text.items()
    }
    save_file(named | random_tensors(raw), directory / "model.safetensors")
    (directory / "preprocessor_config.json").write_text(json.dumps(preprocessor(raw)))


# The parts of a message in their order, as Qwen's templates write them.
TEMPLATE = """{% for message in messages %}{{ message.role }}: {% if message.content is string %}
{{- message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}
{{- '<|vision_start|><|image_pad|><|vision_end|>' }}{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %};{% endfor %}"""


def write_chat(directory: Path) -> None:
    """Writes a model with a tokenizer, the bundled one's, and a chat template."""
    from helpers.serve import tokenizer_kinds

    names = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>")
    tokenizer = tokenizer_kinds.with_added(
        tokenizer_kinds.byte_level(), dict.fromkeys(names, ("special",))
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    raw = CONFIGS["qwen3 vl"]
    sizes = {"vocab_size": tokenizer.get_vocab_size(), "eos_token_id": 0}
    token = tokenizer.token_to_id("<|image_pad|>")
    _write(directory, raw | {"text_config": raw["text_config"] | sizes, "image_token_id": token})


_step = jax.jit(models.forward, static_argnames="config")


def logits(
    config: models.ModelConfig,
    params: models.Params,
    rows: np.ndarray,
    tokens: list[int],
    spans: list[tuple[int, int, int]],
    lengths: list[int] | None = None,
) -> np.ndarray:
    """The logits [n, vocab_size] of tokens, which are read in chunks; None: in one.

    rows: of all pictures, as `encode_pictures` returns them.
    """
    lengths = lengths or [len(tokens)]
    capacity = max(lengths)
    specs, (k_pages, v_pages), table = models.fixed_batch(
        config, dtype="float32", batch_size=1, max_kv_len=96, max_qo_tokens=capacity, page_size=8
    )
    is_picture = np.zeros(len(tokens), bool)
    for first, height, width in spans:
        is_picture[first : first + height * width] = True
    whole = np.zeros((len(tokens), *rows.shape[1:]), np.float32)
    whole[is_picture] = rows
    states = models.init_states(config, 1, "float32")
    state_spec = models.state_spec(
        config, dtype="float32", max_tokens=capacity, max_batch=1, num_slots=1
    )
    found, begin = [], 0
    for length in lengths:
        end = begin + length
        plans = tuple(ja.plan(spec, [0, length], [end], *table) for spec in specs)

        def chunk(array: np.ndarray, begin: int = begin, end: int = end) -> np.ndarray:
            padding = [(0, capacity - (end - begin))] + [(0, 0)] * (array.ndim - 1)
            return np.pad(array[begin:end], padding)

        state_plan = None
        if state_spec is not None:
            reads = [0 if begin else -1]
            state_plan = ja.plan_linear_attention(state_spec, [0, length], reads, [0])
        positions = models.picture_positions(0, len(tokens), spans)
        made, k_pages, v_pages, *more = _step(
            params,
            config,
            chunk(np.array(tokens, np.int32)),
            chunk(positions.T).T,
            k_pages,
            v_pages,
            plans,
            np.arange(capacity),
            states=states,
            state_plan=state_plan,
            pictures=models.PictureRows(chunk(whole), chunk(is_picture)),
        )
        states = more[0] if more else None
        found.append(np.asarray(made)[:length])
        begin = end
    assert begin == len(tokens)
    return np.concatenate(found)
