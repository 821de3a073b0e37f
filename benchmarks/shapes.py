"""Models of known shapes with random weights, for measuring the server without model files.

A shape is the object of a config.json. The tokenizer has a text for each token of the vocabulary,
so the host does the same work as for a real model.

    python -m benchmarks.shapes qwen3-0.6b DIRECTORY       writes it, for `jax_attn.serve --model`
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tokenizers
from tokenizers import Tokenizer, decoders, pre_tokenizers

from jax_attn import models
from jax_attn.models import Model
from jax_attn.models._products.activations import Activations
from jax_attn.models._products.quantized import Quantized, codes_per_byte

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
        "eos_token_id": 128001,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "eos_token_id": 151645,
    },
}
QUANTIZED = {"int8": 0, "e4m3": 128, "int4": 128, "e2m1": 32, "fp8": 0}
"""Kinds of codes, and rows of a scale; 0: all. fp8: e4m3, multiplied with x that is rounded to e4m3
with a scale for each row."""
TINY = {  # replaces sizes of any shape, for trying a script
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "eos_token_id": 1,
}


def make_model(shape: str, tiny: bool, dtype: str) -> Model:
    config = models.parse_config(SHAPES[shape] | (TINY if tiny else {}))
    key = jax.random.key(0, impl="rbg")  # gigabytes in milliseconds
    abstract = jax.eval_shape(lambda: models.random_params(config, key, dtype))
    leaves, tree = jax.tree.flatten_with_path(abstract)
    keys = jax.random.split(key, len(leaves))
    made = [
        _random(k, leaf.shape, dtype, mean=float(path[-1].key.endswith("norm")))
        for k, (path, leaf) in zip(keys, leaves, strict=True)
    ]
    params = jax.block_until_ready(jax.tree.unflatten(tree, made))
    return Model(config, params, make_tokenizer(config.vocab_size))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _random(key: jax.Array, shape: tuple[int, ...], dtype: str, mean: float) -> jax.Array:
    return (mean + shape[0] ** -0.5 * jax.random.normal(key, shape, dtype)).astype(dtype)


def quantize(params: models.Params, kind: Any) -> models.Params:
    """Replaces the layers' matrices by random quantized values of a kind."""
    keys = iter(jax.random.split(jax.random.key(1, impl="rbg"), len(jax.tree.leaves(params))))

    def of(weight: jax.Array) -> Any:
        if weight.ndim != 2:
            return weight
        rows, columns = weight.shape
        group = min(QUANTIZED[kind] or rows, rows)
        if kind == "fp8":
            octets = jax.random.bits(next(keys), (columns, rows), np.uint8) % 120
            values = jax.lax.bitcast_convert_type(octets, jax.numpy.float8_e4m3fn)
            of_columns = jax.numpy.full((1, columns), 1e-3, np.float32)
            return Quantized(values, of_columns, None, None, "e4m3", rows, Activations("e4m3"))
        codes = jax.random.bits(next(keys), (rows // codes_per_byte(kind), columns), np.uint8)
        codes = codes.view(np.int8) if kind == "int8" else codes % 120  # no NaN of e4m3
        scales = np.full((rows // group, columns), 1e-3, np.float32)
        if kind == "e2m1":
            scales = np.full(scales.shape, 120, np.uint8)
        zeros = np.full(scales.shape, 8, np.uint8) if kind == "int4" else None
        matrix = Quantized(codes, scales, zeros, None, kind, group)
        return jax.tree.map(jax.numpy.asarray, matrix)

    layers = [{name: of(weight) for name, weight in layer.items()} for layer in params["layers"]]
    return params | {"layers": layers}


def make_tokenizer(vocab_size: int) -> Tokenizer:
    """Makes a byte-level tokenizer: 256 bytes, then words of 3 to 5 letters. It never merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ("".join(w) for n in (3, 4, 5) for w in itertools.product("aeinorst", repeat=n))
    longer = (f"{word}{i}" for i in itertools.count() for word in ("Ġthe", "Ġof", "Ġand"))
    texts = itertools.chain(alphabet, words, longer)
    vocab = {text: i for i, text in enumerate(itertools.islice(texts, vocab_size))}
    tokenizer = Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def write_directory(shape: str, directory: Path, tiny: bool = False) -> None:
    """Writes a model directory: config.json, tokenizer.json, and random weights in f16."""
    from safetensors.numpy import save_file

    from jax_attn.models._weights.tensors import file_shapes

    raw = SHAPES[shape] | (TINY if tiny else {})
    config = models.parse_config(raw)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw))
    make_tokenizer(config.vocab_size).save(str(directory / "tokenizer.json"))
    # All weights repeat one long row of numbers: values do not matter, and drawing takes a minute.
    numbers = np.random.default_rng(0).standard_normal(10_000_019, np.float32).astype(np.float16)
    tensors, begin = {}, 0
    for name, sizes in file_shapes(config).items():
        count = math.prod(sizes)
        taken = np.resize(np.roll(numbers, -begin % len(numbers)), count).reshape(sizes)
        begin += count
        is_norm = name.endswith("norm.weight")
        tensors[name] = taken * 0 + 1 if is_norm else taken * np.float16(sizes[-1] ** -0.5)
    save_file(tensors, directory / "model.safetensors")


# ---- minimum work of a step --------------------------------------------------------------------


def weight_bytes(model: Model) -> int:
    """Bytes of weights that every step reads: all but an embedding that is not also the head."""
    leaves = dict(model.params)
    if not model.config.tie_embeddings:
        del leaves["embed"]  # one row per token
    return sum(x.nbytes for x in jax.tree.leaves(leaves))


def kv_token_bytes(model: Model) -> int:
    """Bytes of one token in the cache, all layers."""
    c = model.config
    itemsize = model.params["embed"].dtype.itemsize
    return 2 * c.num_layers * c.num_kv_heads * c.head_dim * itemsize


def step_flops(model: Model, qo_lens: list[int], kv_lens: list[int]) -> float:
    """Floating-point operations of a step: matmuls and causal attention. kv_lens include the new
    tokens. Logits are computed for one row per sequence."""
    c = model.config
    matrices = sum(x.size for x in jax.tree.leaves(model.params["layers"]) if x.ndim == 2)
    per_token, per_row = 2.0 * matrices, 2.0 * c.hidden_size * c.vocab_size
    pairs = sum(
        qo * kv - qo * (qo - 1) / 2 for qo, kv in zip(qo_lens, kv_lens, strict=True)
    )  # per query and visible key
    attention = 4.0 * c.num_layers * c.num_qo_heads * c.head_dim * pairs
    return per_token * sum(qo_lens) + per_row * len(qo_lens) + attention


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shapes")
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--tiny", action="store_true", help="tries what is to be done with it")
    arguments = parser.parse_args()
    write_directory(arguments.shape, arguments.directory, arguments.tiny)
