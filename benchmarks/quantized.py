"""Steps of a model with quantised weights beside the same in f32, on a CPU, and memory.

python -m benchmarks.quantized
"""

from __future__ import annotations

from functools import partial

import jax
import numpy as np

import jax_attn as ja
from benchmarks import shapes
from benchmarks.masks import in_turns
from benchmarks.report import log
from jax_attn import models

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


def main() -> None:
    config = models.parse_config(LLAMA)
    plain = models.random_params(config, jax.random.key(0), "float32")
    all_params: dict[str, models.Params] = {"f32": plain} | {
        kind: shapes.quantize(plain, kind) for kind in shapes.QUANTIZED
    }
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
