"""Short sequences on Hopper: the kernel with one consumer beside the others, and cuDNN.

    python -m benchmarks.short_sequences [--budget SECONDS] [NAME ...]

NAMEs are beginnings of workloads' names; without one all are measured.

Whole results of each form are compared with those of the form that is chosen without a
typical_kv_len, and rows with float32. docs/notes/prefill.md has the results.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import jax.numpy as jnp
import numpy as np

import jax_attn as ja
from benchmarks import ops, timing
from benchmarks.peers import jax_attention
from benchmarks.random_workloads import lognormal
from benchmarks.workloads import Workload


def one_consumer(head_dim: int, num_processors: int = 132) -> dict[str, int]:
    """Fields of KernelConfig of the kernel with one consumer."""
    ctas = 3 if head_dim <= 64 else 2  # HopperCtasPerSm in csrc/params.h
    tile = {"num_tiles": 1, "tile_q_0": 64, "tile_q_1": 0, "tile_kv": 64}
    costs = {"item_cost": 128, "split_cost": 96}  # reasoned: two steps, as the state of half a tile
    return {"num_warps": 8, "num_ctas": ctas * num_processors, **tile, **costs}


def forms(head_dim: int) -> dict[str, dict[str, Any]]:
    """Variants of ops.make_spec."""
    found: dict[str, dict[str, Any]] = {"chosen": {}}
    if head_dim <= 128:
        found["one consumer"] = one_consumer(head_dim)
        found["portable"] = {
            "main_loop": 0,
            "num_warps": 4,
            "tile_q_0": 16,
            "tile_q_1": 128,
            "tile_kv": 64,
            "num_stages": 6 if head_dim <= 64 else 4,
            "num_ctas": 264,
        }
    if head_dim <= 64:
        found["two consumers"] = {"num_warps": 12, "tile_q_1": 128}
    return found


def workloads() -> list[Workload]:
    """Encoders, vision towers and prompts, and longer requests to see where the forms cross."""
    rng = np.random.default_rng(0)
    texts = [min(n, 512) for n in lognormal(rng, 120, 48, 0.8)]
    shapes = (
        ("llama-1b 2x538", 32, 8, 64, True, [538] * 2),
        ("qwen2.5-7b 32x200", 28, 4, 128, True, [200] * 32),
        ("vit 16x197", 12, 12, 64, False, [197] * 16),
        ("64x256", 16, 16, 128, True, [256] * 64),
        ("bert 32x512", 16, 16, 64, False, [512] * 32),
        ("qwen3-14b, 21 prompts", 40, 8, 128, True, lognormal(rng, 300, 21)),
        ("bert, 48 texts", 12, 12, 64, False, texts),
        ("llama-8b 1x300", 32, 8, 128, True, [300]),
        ("gpt2 16x1000", 12, 12, 64, True, [1000] * 16),
        ("16x1024", 16, 16, 128, True, [1024] * 16),
        ("smollm 4x2048", 32, 32, 64, True, [2048] * 4),
        ("bge 1x173", 16, 16, 64, False, [173]),
        ("llama-405b 1x416", 128, 8, 128, True, [416]),
        ("qwen-vl 8x600", 16, 16, 80, False, [600] * 8),
        ("gemma 4x2000", 8, 4, 256, True, [2000] * 4),
    )
    return [
        Workload(
            id=name,
            kind="prefill",
            num_qo_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            page_size=None,
            causal=causal,
            qo_lens=tuple(lens),
            kv_lens=tuple(lens),
            anchor_us=None,
        )
        for name, heads, kv_heads, head_dim, causal, lens in shapes
    ]


def measure(workload: Workload) -> None:
    """Prints a line for each form, and one for cuDNN if all lengths are equal."""
    data = ops.make_data(workload)
    num_calls = min(6, ops.attention_chain_length(workload))
    chosen = None
    for name, variant in forms(workload.head_dim).items():
        spec = ops.make_spec(workload, variant)
        plan = ops.make_plan(workload, spec)
        o = ja.attention(data.q, *data.kv(0)[:2], plan).astype(jnp.float32)
        chosen = o if chosen is None else chosen
        difference = float(jnp.linalg.norm(o - chosen) / jnp.linalg.norm(chosen))
        error = ops.relative_error(data, o)
        chain = timing.time_chain(ops.attention_chain(data, spec, plan), num_calls)
        print(
            f"{workload.id:22} {name:13} {chain.us:8.2f} us, spread {chain.spread:.2f},"
            f" {len(plan.items())} items, error {error:.1e}, to the chosen {difference:.1e}",
            flush=True,
        )
    if len(set(workload.qo_lens)) == 1:
        attend = jax_attention.cudnn(workload)
        chain = jax_attention.time_dense(workload, lambda _: attend)
        print(f"{workload.id:22} {'jax.nn':13} {chain.us:8.2f} us", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.short_sequences")
    parser.add_argument(
        "--budget", type=float, default=300, help="seconds; then nothing new starts"
    )
    parser.add_argument("names", nargs="*", default=[""])
    arguments = parser.parse_args()
    end = time.perf_counter() + arguments.budget
    for workload in workloads():
        if workload.id.startswith(tuple(arguments.names)) and time.perf_counter() < end:
            measure(workload)


if __name__ == "__main__":
    main()
