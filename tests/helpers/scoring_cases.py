"""Small models for sequence classification, with weights that any machine can make again.

tests/data/scores.npz holds the logits that transformers computes for them (make_scores.py).
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from helpers import embedding_cases, model_cases
from helpers.paths import DATA
from jax_attn.models._config.keys import Keys
from jax_attn.models._embedding import embedding, scoring

RECORDED = DATA / "scores.npz"


def _case(name: str, architecture: str, labels: int, **keys: Any) -> dict[str, Any]:
    raw, _, _ = embedding_cases.CASES[name]
    names = {str(i): f"class {i}" for i in range(labels)}
    return raw | {"architectures": [f"{architecture}ForSequenceClassification"]} | {
        "id2label": names, "label2id": {each: int(i) for i, each in names.items()}, **keys
    }  # fmt: skip


CASES = {
    "bert, one label": _case("bert mean", "Bert", 1),
    "bert tanh, one type, 3 labels": _case("bert cls, tanh, one type", "Bert", 3),
    "xlm-roberta, one label": _case("xlm-roberta", "XLMRoberta", 1),
    "roberta relu, 4 labels": _case("roberta relu, pad 3", "Roberta", 4),
}


_MODERN = {
    "model_type": "modernbert",
    "architectures": ["ModernBertForSequenceClassification"],
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
}
CASES |= {
    "modernbert, one label": _MODERN | {
        "num_hidden_layers": 4, "local_attention": 8, "id2label": {"0": "a"}, "label2id": {"a": 0},
        "global_rope_theta": 50.0, "local_rope_theta": 7.0,
    },
    "modernbert mean, relu, 3 labels": _MODERN | {
        "num_hidden_layers": 3, "local_attention": 6, "norm_eps": 1e-3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 30.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 9.0},
        },
        "hidden_activation": "gelu_pytorch_tanh", "classifier_activation": "relu",
        "classifier_pooling": "mean", "id2label": {str(i): f"class {i}" for i in range(3)},
        "label2id": {f"class {i}": i for i in range(3)},
    },
}  # fmt: skip


# Its vectors without the head, pooled by the mean, are recorded, too.
MODERN, VECTORS = "modernbert, one label", "modernbert vectors"


def pairs() -> tuple[list[list[int]], list[int]]:
    """Token sequences of odd lengths, and where the second text of each begins."""
    sequences = embedding_cases.sequences()
    return sequences, [len(tokens) * 2 // 3 for tokens in sequences]


def has_types(raw: dict[str, Any]) -> bool:
    return raw["model_type"] == "bert" and raw.get("type_vocab_size", 2) > 1


def tensors(raw: dict[str, Any]) -> dict[str, np.ndarray]:
    """Random tensors of the model and its head, with the names of transformers' files."""
    config = embedding.ENCODERS[raw["model_type"]](Keys(raw, "config.json"))
    head = scoring.head_tensors(config, len(raw["id2label"]))
    body = {
        config.tensor_prefix + name: each for name, each in embedding_cases.tensors(raw).items()
    }
    for name, shape in (tensor for parts in head.values() for tensor in parts.items()):
        random = np.random.RandomState(zlib.crc32(name.encode()))
        prefix = config.tensor_prefix if name.startswith("pooler.") else ""
        normal = (name == "head.norm.weight") + 0.3 * random.standard_normal(shape)
        body[prefix + name] = normal.astype(np.float32)
    return body


def write(directory: Path, name: str, **keys: Any) -> Path:
    """Writes a directory as transformers does. keys: replace keys of config.json."""
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    raw = CASES[name] | keys
    (directory / "config.json").write_text(json.dumps(raw))
    save_file(tensors(CASES[name]), directory / "model.safetensors")
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(48)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = [("w1", 1), ("w2", 2)]
    tokenizer.post_processor = processors.TemplateProcessing(
        "w1 $A w2", "w1 $A w2 $B:1 w2:1", special_tokens=special
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def write_answers(directory: Path, name: str, yes: str = "yes") -> Path:
    """Writes a text model of model_cases whose tokens 7 and 3 are "yes" and "no"."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    model_cases.write(directory, model_cases.CONFIGS[name])
    words = {f"w{i}": i for i in range(48) if i not in (3, 7)} | {"no": 3, yes: 7}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory
