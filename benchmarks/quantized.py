"""Quantized weights. On a CPU: model steps and memory, compared with f32. On a GPU: matmuls of an
8B model, compared with bf16 and, with --xla, with XLA's products of the same values.

    python -m benchmarks.quantized [--rows 1,64,256] [--xla]

On a GPU a chain cycles through many matrices, so each is read from memory.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

import jax_attn as ja
from benchmarks import ops, shapes, timing
from benchmarks.masks import in_turns
from benchmarks.report import log
from jax_attn import models
from jax_attn.models._products import quantized, quantized_cuda

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


# Rows and columns of qkv, o, gate and up, down in a layer of llama-3.1-8b.
PRODUCTS = ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096))
SHOWN_IN_XLA = (4096, 28672)  # only this one: XLA takes long to compile and run it
NUM_LAYERS = 32
WITH_WGMMA = ("int4", "e2m1", "e4m3")


def product_us(
    num_rows: int, shape: tuple[int, int], kind: str, product: Callable[..., Any]
) -> tuple[float, int]:
    """Returns the time of a matmul with bf16 rows, and its matrix's bytes. kind: a key of
    shapes.QUANTIZED, or bf16; " wgmma" behind it: by that kernel of Hopper."""
    kind, _, loop = kind.partition(" ")
    fewest = 1 if loop == "wgmma" else quantized_cuda.MAX_ROWS + 1
    if quantized_cuda._fewest_wgmma_rows != fewest:
        quantized_cuda._fewest_wgmma_rows = fewest
        jax.clear_caches()  # the kernel is chosen when a call is traced

    def matrices(count: int) -> list[Any]:
        plain = {"layers": [{"w": w} for w in ops.normal(shape, count)]}
        made = plain if kind == "bf16" else shapes.quantize(plain, kind)
        return [layer["w"] for layer in made["layers"]]

    (x,) = ops.normal((num_rows, shape[0]))
    num_bytes = sum(a.nbytes for a in jax.tree.leaves(matrices(1)))
    run = jax.jit(
        lambda x, weights: [product(x, w) for w in weights], compiler_options=ops.uncaptured()
    )

    def make_chain(num_calls: int) -> Callable[[], Any]:
        weights = matrices(num_calls)
        return lambda: run(x, weights)

    num_calls = max(4, min(16, ops.ROTATE_BYTES // num_bytes))
    return timing.time_chain(make_chain, num_calls).us, num_bytes


def on_gpu(all_rows: list[int], with_xla: bool) -> None:
    ceilings, _ = ops.measure_ceilings()
    log(f"{jax.devices()[0].device_kind}, {ceilings.bytes_per_us / 1e6:.2f} TB/s")
    in_xla = partial(quantized._product, dtype=None, has_float8=True)
    for num_rows in all_rows:
        total: dict[str, float] = {}
        for shape in PRODUCTS:
            for kind in ("bf16", *shapes.QUANTIZED, *(f"{kind} wgmma" for kind in WITH_WGMMA)):
                us, num_bytes = product_us(num_rows, shape, kind, quantized.product)
                total[kind] = total.get(kind, 0.0) + us
                text = f"{kind} {us:.1f} (floor {num_bytes / ceilings.bytes_per_us:.1f}"
                if with_xla and shape == SHOWN_IN_XLA and kind in ("int4", "e2m1", "e4m3"):
                    text += f", XLA {product_us(num_rows, shape, kind, in_xla)[0]:.1f}"
                log(f"{num_rows} x {shape[0]} x {shape[1]}, us: {text})")
        sums = ", ".join(f"{kind} {us * NUM_LAYERS / 1e3:.2f}" for kind, us in total.items())
        log(f"{num_rows} rows, products of {NUM_LAYERS} layers, ms: {sums}")


def on_cpu() -> None:
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
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quantized")
    parser.add_argument("--rows", default="1,64,256", help="of x, on a GPU: %(default)s")
    parser.add_argument("--xla", action="store_true", help="XLA's own products, too: minutes")
    given = parser.parse_args()
    if ops.on_gpu():
        on_gpu([int(n) for n in given.rows.split(",")], given.xla)
    else:
        on_cpu()
