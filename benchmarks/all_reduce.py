"""The all-reduce of a layer over the GPUs of one host, by size: by one kernel and by XLA.

    python -m benchmarks.all_reduce [--devices N] [--largest BYTES] [--calls 32]

Each call feeds the next one, as in a model; the time is that of many such calls divided by their
number. A row is 8 KB, and the sizes below that are one row. The kernel is also measured where
all_reduce would leave a large sum to XLA. "sum" is the sum alone, "norm" is sum,
residual and RMS norm.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import math
import os
from typing import Any

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # no multicast, which needs extra privileges

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from benchmarks import timing
from jax_attn import parallel

_ROUNDS = 7
_LOOPS = 4
_ROW = 4096  # bfloat16


def _chain(mesh: Any, by_kernel: bool, has_norm: bool, calls: int) -> Any:
    given = {"mesh": mesh if by_kernel else None}

    def step(_: Any, carry: Any) -> Any:
        x, residual, weight = carry
        for _ in range(calls):
            if has_norm:
                residual, x = parallel.all_reduce(
                    x, "x", residual=residual, norm_weight=weight, **given
                )
            else:
                x = parallel.all_reduce(x, "x", **given)
        return x, residual, weight

    def chain(x: Any, residual: Any, weight: Any) -> Any:
        return jax.lax.fori_loop(0, _LOOPS, step, (x, residual, weight))[0]

    everywhere = (P(), P(), P())
    return jax.jit(
        jax.shard_map(chain, mesh=mesh, in_specs=everywhere, out_specs=P(), check_vma=False)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=None)
    parser.add_argument("--largest", type=int, default=64 << 20)
    parser.add_argument("--calls", type=int, default=32)
    arguments = parser.parse_args()
    module = importlib.import_module("jax_attn.parallel.all_reduce")
    module._XLA_FROM = dict.fromkeys((False, True), math.inf)  # type: ignore[attr-defined]
    devices = jax.devices()[: arguments.devices]
    mesh = jax.make_mesh((len(devices),), ("x",), devices=devices)
    print(f"{len(devices)} x {devices[0].device_kind}, jax {jax.__version__}, us a call")
    print(f"{'bytes':>10} {'sum':>9} {'XLA':>9} {'norm':>9} {'XLA':>9}")
    place = jax.sharding.NamedSharding(mesh, P())
    size = 1024
    while size <= arguments.largest:
        columns = min(_ROW, size // 2)
        shape = size // 2 // columns, columns
        x, residual = (jax.device_put(jnp.ones(shape, jnp.bfloat16), place) for _ in range(2))
        weight = jax.device_put(jnp.ones(columns, jnp.bfloat16), place)
        times = []
        calls = max(2, min(arguments.calls, (256 << 20) // size))
        for has_norm in (False, True):
            for by_kernel in (True, False):
                chain = _chain(mesh, by_kernel, has_norm, calls)
                us = timing.median_us(functools.partial(chain, x, residual, weight), _ROUNDS)
                times.append(us / (calls * _LOOPS))
        print(f"{size:10} " + " ".join(f"{t:9.1f}" for t in times), flush=True)
        size *= 4 if size < 64 << 10 else 2
    parallel.check_all_reduces()


if __name__ == "__main__":
    main()
