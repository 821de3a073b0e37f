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
from jax_attn.models._vision.layers import VisionConfig

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


CONFIGS["qwen3 vl experts"] = {
    "model_type": "qwen3_vl_moe",
    **_WHOLE,
    "text_config": {
        "model_type": "qwen3_vl_moe_text",
        **_TEXT,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "mlp_only_layers": [1],
        "tie_word_embeddings": False,
    },
    "vision_config": {"model_type": "qwen3_vl_moe_vision", **_VISION},
}

_SIGLIP: dict[str, Any] = {
    "model_type": "siglip_vision_model",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 4,
    "vision_use_head": False,
}
_PIXTRAL: dict[str, Any] = {
    "model_type": "pixtral",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 2,
    "head_dim": 16,
    "image_size": 64,
    "patch_size": 4,
    "rope_theta": 100.0,
}
_GEMMA4: dict[str, Any] = {
    "model_type": "gemma4_vision",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "patch_size": 4,
    "pooling_kernel_size": 3,
    "position_embedding_size": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 20.0},
}
_GEMMA4_TOKENS = {"image_token_id": PICTURE_TOKEN, "video_token_id": 41, "audio_token_id": 44}
_GEMMA4_TOKENS |= {"boi_token_id": 42, "eoi_token_id": 43}
_MISTRAL: dict[str, Any] = {
    "model_type": "mistral",
    **{key: value for key, value in _TEXT.items() if key != "rope_parameters"},
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    "sliding_window": None,
}

CONFIGS |= {
    "gemma3": {
        "model_type": "gemma3",
        "image_token_index": PICTURE_TOKEN,
        "boi_token_index": 42,
        "eoi_token_index": 43,
        "mm_tokens_per_image": 16,
        "text_config": dict(model_cases.CONFIGS["gemma3"]),
        "vision_config": _SIGLIP,
    },
    "gemma3 another tower": {
        "model_type": "gemma3",
        "image_token_id": PICTURE_TOKEN,
        "boi_token_id": 42,
        "eoi_token_id": 43,
        "mm_tokens_per_image": 16,
        "text_config": model_cases.CONFIGS["gemma3"] | {"sliding_window": 21},
        "vision_config": _SIGLIP
        | {
            "hidden_size": 24,
            "num_attention_heads": 1,
            "num_hidden_layers": 1,
            "image_size": 48,
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-4,
            "vision_use_head": True,
        },
    },
    "gemma4": {
        "model_type": "gemma4",
        **_GEMMA4_TOKENS,
        "text_config": model_cases.CONFIGS["gemma4"]
        | {"use_bidirectional_attention": "vision", "pad_token_id": 0},
        "vision_config": _GEMMA4,
    },
    "gemma4 clips, per-layer inputs": {
        "model_type": "gemma4",
        **_GEMMA4_TOKENS,
        "text_config": model_cases.CONFIGS["gemma4 per-layer inputs, shared keys"]
        | {"pad_token_id": 3},
        "vision_config": _GEMMA4
        | {
            "hidden_size": 24,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "hidden_activation": "silu",
            "rms_norm_eps": 1e-4,
            "use_clipped_linears": True,
            "standardize": True,
        },
    },
    "mistral3": {
        "model_type": "mistral3",
        "image_token_index": PICTURE_TOKEN,
        "text_config": _MISTRAL,
        "vision_config": _PIXTRAL,
        "spatial_merge_size": 2,
        "tie_word_embeddings": False,
    },
    "mistral3 ministral, biases": {
        "model_type": "mistral3",
        "image_token_id": PICTURE_TOKEN,
        "text_config": dict(model_cases.CONFIGS["ministral3"]),
        "vision_config": _PIXTRAL
        | {"hidden_size": 24, "num_attention_heads": 1, "head_dim": 24}
        | {"hidden_act": "silu", "patch_size": 8, "rope_theta": 30.0},
        "spatial_merge_size": 1,
        "multimodal_projector_bias": True,
        "projector_hidden_act": "silu",
        "vision_feature_layer": -1,
    },
}


def config_of(raw: dict[str, Any]) -> VisionConfig:
    return tower.parse(Keys(raw, "config.json"), models.parse_config(raw))


def preprocessor(raw: dict[str, Any]) -> dict[str, Any]:
    """The preprocessor_config.json of a case."""
    vision = raw["vision_config"]
    numbers = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.25, 0.2]}
    if raw["model_type"] == "gemma3":
        side = vision["image_size"]
        return {
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": side, "width": side},
            **numbers,
        }
    if raw["model_type"] == "gemma4":
        return {
            "image_processor_type": "Gemma4ImageProcessor",
            "patch_size": vision["patch_size"],
            "pooling_kernel_size": vision["pooling_kernel_size"],
            "max_soft_tokens": 70,
        }
    if raw["model_type"] == "mistral3":
        return {
            "image_processor_type": "PixtralImageProcessorFast",
            "patch_size": vision["patch_size"] * raw["spatial_merge_size"],
            "size": {"longest_edge": 60},
            **numbers,
        }
    return {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "patch_size": vision["patch_size"],
        "temporal_patch_size": vision["temporal_patch_size"],
        "merge_size": vision["spatial_merge_size"],
        "size": {"shortest_edge": 256, "longest_edge": 2048},
        **numbers,
    }


def processor(raw: dict[str, Any]) -> dict[str, Any]:
    """The processor_config.json of a case."""
    if raw["model_type"] != "mistral3":
        return {}
    patch_size, merge_size = raw["vision_config"]["patch_size"], raw["spatial_merge_size"]
    return {"patch_size": patch_size, "spatial_merge_size": merge_size}


def picture(height: int, width: int, number: int = 0) -> np.ndarray:
    """[height, width, 3] u8: smooth colors with some noise."""
    row, column = np.indices((height, width))
    colors = np.stack([row * 200 / height, column * 200 / width, (row + column) % 160], -1)
    random = np.random.RandomState(height * 1000 + width + 10**6 * number)
    noise = random.randint(0, 50, colors.shape)
    return (np.roll(colors, number, -1) + noise).astype(np.uint8)


def grids(raw: dict[str, Any]) -> list[tuple[int, int]]:
    """Rows and columns of the tokens of each of `pictures`."""
    return [(4, 4)] * 3 if raw["model_type"] == "gemma3" else [(4, 6), (3, 1), (2, 2)]


def pictures(raw: dict[str, Any]) -> list[np.ndarray]:
    """Pictures that need no resizing."""
    factor, sizes = config_of(raw).factor, grids(raw)
    numbers = range(3) if len(set(sizes)) == 1 else [0] * 3
    return [
        picture(rows * factor, columns * factor, number)
        for (rows, columns), number in zip(sizes, numbers, strict=True)
    ]


_ROW_END, _LAST_ROW_END = 45, 46  # of Pixtral


def prompt(raw: dict[str, Any]) -> tuple[list[int], list[tuple[int, int, int]]]:
    """The tokens of a prompt with all pictures, and their spans (`picture_positions`)."""
    tokens = [3, 1, 4, 42]
    spans = []
    for rows, columns in grids(raw):
        spans.append((len(tokens), rows, columns))
        ends = [_ROW_END] if config_of(raw).row_gap else []
        tokens += ([PICTURE_TOKEN] * columns + ends) * rows
        if ends:
            tokens[-1] = _LAST_ROW_END
        tokens += [43, 7, 42]
    return tokens + [9, 2, 6, 5], spans


_BOUNDS = {"input_min": -1.1, "input_max": 0.9, "output_min": -1.3, "output_max": 1.7}


def random_tensors(raw: dict[str, Any]) -> dict[str, np.ndarray]:
    """Random tensors of the tower, with the names of the files."""
    config = config_of(raw)
    tensors = {}
    for name, shape in tower.file_shapes(config).items():
        if not shape:
            tensors[config.tensor_prefix + name] = np.array(
                _BOUNDS[name.rpartition(".")[2]], np.float32
            )
            continue
        name = config.tensor_prefix + name
        normal = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
        is_norm = ("norm" in name or "ln_pre" in name) and name.endswith("weight")
        is_norm &= "mm_soft" not in name
        scale = 0.3 if len(shape) < 4 else 0.1
        tensors[name] = (float(is_norm) + scale * normal).astype(np.float32)
    return tensors


def write(directory: Path, name: str) -> None:
    """Writes config.json, preprocessor_config.json and model.safetensors."""
    _write(directory, CONFIGS[name])


def _write(directory: Path, raw: dict[str, Any]) -> None:
    from safetensors.numpy import load_file, save_file

    config = model_cases.write(directory, raw)
    text = load_file(directory / "model.safetensors")
    prefix, towers = config.tensor_prefix, random_tensors(raw)
    if prefix == "language_model.":  # as transformers' files have it
        named = {prefix + key: value for key, value in text.items()}
        towers = {key.removeprefix("model."): value for key, value in towers.items()}
    else:
        named = {
            prefix + key.removeprefix("model.") if key.startswith("model.") else key: value
            for key, value in text.items()
        }
    save_file(named | towers, directory / "model.safetensors")
    (directory / "preprocessor_config.json").write_text(json.dumps(preprocessor(raw)))
    (directory / "processor_config.json").write_text(json.dumps(processor(raw)))


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


def write_family(directory: Path, name: str, marker: str) -> Any:
    """Writes a model of a family with a tokenizer, which is returned, and a chat template that
    writes a marker for each picture."""
    from helpers.serve import tokenizer_kinds

    names = ("<soft>", "<start_of_image>", "<end_of_image>", "[IMG_BREAK]", "[IMG_END]")
    tokenizer = tokenizer_kinds.with_added(
        tokenizer_kinds.byte_level(), dict.fromkeys(names, ("special",))
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    template = TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", marker)
    (directory / "chat_template.jinja").write_text(template)
    raw = CONFIGS[name]
    tokens = dict(zip(("image", "boi", "eoi"), map(tokenizer.token_to_id, names), strict=False))
    ids = {key: tokens.get(key.partition("_token")[0], value) for key, value in raw.items()}
    sizes = {"vocab_size": tokenizer.get_vocab_size(), "eos_token_id": 0}
    _write(directory, ids | {"text_config": raw["text_config"] | sizes})
    return tokenizer


_step = jax.jit(models.forward, static_argnames="config")


def chunks(raw: dict[str, Any]) -> list[int]:
    """Odd lengths of the chunks of a prompt. Pictures are whole if their tokens see each other."""
    tokens, spans = prompt(raw)
    ends = [13, 30, len(tokens)]
    if models.parse_config(raw).sees_pictures:
        ends = [next((i + r * c for i, r, c in spans if i < end < i + r * c), end) for end in ends]
    return np.diff([0, *ends]).tolist()


def logits(
    config: models.ModelConfig,
    params: models.Params,
    rows: np.ndarray,
    tokens: list[int],
    spans: list[tuple[int, int, int]],
    lengths: list[int] | None = None,
    row_gap: int = 0,
) -> np.ndarray:
    """The logits [n, vocab_size] of tokens, which are read in chunks; None: in one.

    rows: of all pictures, as `encode_pictures` returns them. row_gap: see VisionConfig.
    """
    lengths = lengths or [len(tokens)]
    capacity = max(lengths)
    specs, (k_pages, v_pages), table = models.fixed_batch(
        config,
        dtype="float32",
        batch_size=1,
        max_kv_len=96,
        max_qo_tokens=capacity,
        page_size=8,
        longest_picture=max((height * width for _, height, width in spans), default=1),
    )
    ends = np.zeros(len(tokens), np.int32)
    for first, height, width in spans:
        stride = width + row_gap
        for begin in range(first, first + height * stride, stride):
            ends[begin : begin + width] = first + height * stride
    whole = np.zeros((len(tokens), *rows.shape[1:]), np.float32)
    whole[ends > 0] = rows
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
        positions = np.arange(len(tokens), dtype=np.int32)
        if config.position_parts == 3:
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
            pictures=models.PictureRows(chunk(whole), chunk(ends)),
        )
        states = more[0] if more else None
        found.append(np.asarray(made)[:length])
        begin = end
    assert begin == len(tokens)
    return np.concatenate(found)
