"""The products of experts beside lax.ragged_dot: processor time of each, in turns.

    python benchmarks/experts.py [--groups 64] [--depth 1024] [--columns 768]

On CPUs: the kernel of Panels, the loop over groups, and ragged_dot, for weights of several formats.
Elsewhere: what `grouped_matmul` does, and ragged_dot over widened weights, by wall clock.
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
    """Seconds of one call: processor time on CPUs, wall clock elsewhere."""
    clock = time.process_time if jax.default_backend() == "cpu" else time.perf_counter
    jax.block_until_ready(run())
    begin, number = clock(), 0
    while clock() - begin < _SECONDS:
        jax.block_until_ready(run())
        number += 1
    return 1e3 * (clock() - begin) / number


def ways(weights: Any) -> dict[str, tuple[Callable[..., jax.Array], Any]]:
    def ragged(x: jax.Array, weights: Any, sizes: jax.Array) -> jax.Array:
        return jax.lax.ragged_dot(x, widen(weights, x.dtype), sizes)

    found = {"grouped_matmul": (experts.grouped_matmul, weights), "ragged_dot": (ragged, weights)}
    if jax.default_backend() != "cpu":
        return found
    if isinstance(weights, Quantized):
        return {"loop over groups": (experts._loop_over_groups, weights), **found}
    return {"panels": (experts.grouped_matmul, to_panels(weights)), **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("groups", 64), ("depth", 1024), ("columns", 768)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
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
