"""Steps of a model with quantised weights beside the same in f32, on a CPU, and memory.

python -m benchmarks.quantized
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_attn as ja
from benchmarks.masks import in_turns
from benchmarks.report import log
from jax_attn import models
from jax_attn.models.quantized import Quantized, codes_per_byte

LLAMA = {
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
}
# Rows of a scale; 0: all.
KINDS = {"int8": 0, "e4m3": 128, "int4": 128, "e2m1": 32}


def quantize(params: models.Params, kind: Any, group: int) -> models.Params:
    """Random codes in the place of the layers' matrices."""
    random = np.random.default_rng(0)

    def of(weight: jax.Array) -> Any:
        if weight.ndim != 2:
            return weight
        rows, columns = weight.shape
        codes = random.integers(0, 120, (rows // codes_per_byte(kind), columns)).astype(
            np.int8 if kind == "int8" else np.uint8
        )
        groups = rows // (group or rows)
        scales = np.full((groups, columns), 1e-3, np.float32)
        if kind == "e2m1":
            scales = np.full(scales.shape, 120, np.uint8)
        zeros = np.full(scales.shape, 8, np.uint8) if kind == "int4" else None
        matrix = Quantized(codes, scales, zeros, None, kind, group or rows)
        return jax.tree.map(jnp.asarray, matrix)

    layers = [{name: of(weight) for name, weight in layer.items()} for layer in params["layers"]]
    return params | {"layers": layers}


def main() -> None:
    config = models.parse_config(LLAMA)
    plain = models.random_params(config, jax.random.key(0), "float32")
    all_params = {"f32": plain} | {kind: quantize(plain, kind, n) for kind, n in KINDS.items()}
    for kind, params in all_params.items():
        held = sum(x.nbytes for x in jax.tree.leaves(params["layers"]))
        log(f"{kind}: layers hold {held / 2**20:.0f} MiB")
    for num_tokens in (1, 8, 64):
        specs = models.attention_specs(
            config, dtype="float32", page_size=16, max_batch=64, max_qo_tokens=num_tokens,
            max_kv_pages=64,
        )  # fmt: skip
        pages = models.init_pages(config, specs, 64)
        counts = np.arange(num_tokens + 1)
        plans = tuple(
            ja.plan(spec, counts, np.ones(num_tokens, int), counts, counts[:-1]) for spec in specs
        )
        rows = np.arange(num_tokens, dtype=np.int32)
        arguments = (rows, np.zeros_like(rows), *pages, plans, rows)
        calls, temporary = {}, {}
        for kind, params in all_params.items():
            step = jax.jit(lambda params, *args: models.forward(params, config, *args)[0])
            compiled = step.lower(params, *arguments).compile()
            temporary[kind] = compiled.memory_analysis().temp_size_in_bytes / 2**20
            calls[kind] = partial(compiled, params, *arguments)
        seconds = in_turns(calls, 15)
        words = (f"{k} {1e3 * s:.1f} ms (+{temporary[k]:.0f} MiB)" for k, s in seconds.items())
        log(f"{num_tokens} tokens: " + ", ".join(words))


if __name__ == "__main__":
    main()
