"""The products of experts beside lax.ragged_dot: time of each, in turns.

    python -m benchmarks.experts [--groups 64] [--depth 1024] [--columns 768]

On CPUs, processor time: the kernel of Panels, the loop over groups, and ragged_dot, for weights of
several formats. On GPUs, the wall clock over calls in a row: what `grouped_matmul` does in both
products of the experts of a layer of Qwen3-30B-A3B and in the gradient of x, and ragged_dot, for 8
rows a token. There the options are ignored.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn.models._layers import experts
from jax_attn.models._products.panels import to_panels
from jax_attn.models._products.quantized import Quantized, codes_per_byte, widen

_SECONDS = 0.2  # of each measurement
_ROWS = (8, 64, 512)
_FORMATS = ("float32", "bfloat16", "int8", "int4")

# On GPUs: tokens, experts a token, experts, [depth, columns] of their matrices.
_TOKENS, _PER_TOKEN, _EXPERTS = (1, 8, 32, 128, 512, 1024, 2048, 8192), 8, 128
_MATRICES = {"gate_up": (2048, 1536), "down": (768, 2048)}
_GPU_SECONDS = 0.1


def weights_of(kind: str, shape: tuple[int, int, int], rng: np.random.Generator) -> Any:
    if kind not in ("int8", "int4"):
        return jnp.asarray(rng.normal(size=shape), kind)
    groups, depth, columns = shape
    rows = depth // codes_per_byte(kind)
    codes = rng.integers(0, 100, (groups, rows, columns))
    scales = jnp.ones((groups, 1 if kind == "int8" else depth // 128, columns), jnp.float32)
    codes = jnp.asarray(codes, jnp.int8 if kind == "int8" else jnp.uint8)
    return Quantized(codes, scales, None, None, kind, depth // scales.shape[1])


def milliseconds(run: Callable[[], jax.Array]) -> float:
    """Processor time of one call."""
    jax.block_until_ready(run())
    begin, number = time.process_time(), 0
    while time.process_time() - begin < _SECONDS:
        jax.block_until_ready(run())
        number += 1
    return 1e3 * (time.process_time() - begin) / number


def gpu_milliseconds(run: Callable[[], jax.Array]) -> float:
    """Wall clock of a call among others; the device works while the host launches the next ones."""

    def calls(number: int) -> float:
        begin = time.perf_counter()
        for _ in range(number):
            y = run()
        jax.block_until_ready(y)
        return time.perf_counter() - begin

    calls(1)  # compiles
    number = max(1, min(200, round(_GPU_SECONDS / calls(1))))
    return 1e3 * min(calls(number) for _ in range(3)) / number


def on_gpu() -> None:
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {_EXPERTS} experts, ms")
    rng = np.random.default_rng(0)
    for name, (depth, columns) in _MATRICES.items():
        shape = (_EXPERTS, depth, columns)
        weights = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16) * depth**-0.5
        transposed = jax.jit(partial(experts._plain_on_gpu, transposed=True))
        for tokens in _TOKENS:
            chosen = rng.permuted(np.tile(np.arange(_EXPERTS), (tokens, 1)), axis=1)[:, :_PER_TOKEN]
            sizes = jnp.bincount(jnp.asarray(chosen.ravel()), length=_EXPERTS).astype(jnp.int32)
            rows = tokens * _PER_TOKEN
            x, d_y = (
                jax.random.normal(jax.random.key(1), (rows, size), jnp.bfloat16)
                for size in (depth, columns)
            )
            runs = {
                "grouped_matmul": partial(jax.jit(experts.grouped_matmul), x, weights, sizes),
                "its d_x": partial(transposed, d_y, weights, sizes),
                "ragged_dot": partial(jax.jit(jax.lax.ragged_dot), x, weights, sizes),
            }
            took = {way: gpu_milliseconds(run) for way, run in runs.items()}
            flops = 2 * rows * depth * columns
            read = 2 * (len(set(chosen.ravel())) * depth * columns + rows * (depth + columns))
            shown = ", ".join(
                f"{way} {each:.3f} ({flops / each / 1e9:.0f} TFLOP/s, {read / each / 1e6:.0f} GB/s)"
                for way, each in took.items()
            )
            print(f"{name}, {tokens} tokens: {shown}", flush=True)


def ways(weights: Any) -> dict[str, tuple[Callable[..., jax.Array], Any]]:
    def ragged(x: jax.Array, weights: Any, sizes: jax.Array) -> jax.Array:
        return jax.lax.ragged_dot(x, widen(weights, x.dtype), sizes)

    found = {"grouped_matmul": (experts.grouped_matmul, weights), "ragged_dot": (ragged, weights)}
    if isinstance(weights, Quantized):
        return {"loop over groups": (experts._loop_over_groups, weights), **found}
    return {"panels": (experts.grouped_matmul, to_panels(weights)), **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("groups", 64), ("depth", 1024), ("columns", 768)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    if jax.default_backend() != "cpu":
        on_gpu()
        return
    rng = np.random.default_rng(0)
    for kind in _FORMATS:
        weights = weights_of(kind, (args.groups, args.depth, args.columns), rng)
        made = ways(weights)
        for rows in _ROWS:
            chosen = rng.integers(0, args.groups, rows)
            sizes = np.bincount(chosen, minlength=args.groups).astype(np.int32)
            dtype = "float32" if kind == "float32" else "bfloat16"
            x = jnp.asarray(rng.normal(size=(rows, args.depth)), dtype)
            took = {
                name: milliseconds(partial(jax.jit(run), x, own, sizes))
                for name, (run, own) in made.items()
            }
            shown = ", ".join(f"{name} {each:.2f} ms" for name, each in took.items())
            print(f"{kind}, {rows} rows of {len(set(chosen))} groups: {shown}", flush=True)


if __name__ == "__main__":
    main()
