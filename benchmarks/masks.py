"""Masks that save work, on a CPU: packed documents compared with a ragged batch, and block maps.

python -m benchmarks.masks
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_attn as ja
from benchmarks.report import log
from jax_attn import masks

NUM_TOKENS, NUM_DOCUMENTS, HEADS, HEAD_DIM = 16384, 16, 8, 128


def in_turns(calls: dict[str, Callable[[], Any]], repeats: int = 7) -> dict[str, float]:
    """Returns median seconds of each call. Calls are interleaved, so drift affects all alike."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(repeats + 1):
        for name, call in calls.items():
            begin = time.perf_counter()
            jax.block_until_ready(call())
            if i:
                times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(x) for name, x in times.items()}


def packed_documents(borders: np.ndarray) -> dict[str, float]:
    """Times packed documents. borders: [NUM_DOCUMENTS + 1], tokens."""
    spec = ja.AttentionSpec(
        HEADS, HEADS, HEAD_DIM, dtype="float32", page_size=None, max_batch=NUM_DOCUMENTS,
        max_qo_tokens=NUM_TOKENS, max_kv_tokens=NUM_TOKENS, target="cpu",
    )  # fmt: skip
    ids = np.repeat(np.arange(NUM_DOCUMENTS, dtype=np.int32), np.diff(borders))
    mask = masks.document_ids(ids)
    masked = dataclasses.replace(spec, variant=mask.variant(), max_steps=1 << 14)
    one = np.array([0, NUM_TOKENS]), np.array([NUM_TOKENS])
    plan = ja.plan(masked, *one, block_map=mask.block_map(masked, *one))
    ragged = ja.plan(spec, borders, np.diff(borders))
    q, k, v = jax.random.normal(jax.random.key(0), (3, *spec.q_shape), jnp.float32)
    log(next(line for line in plan.describe().splitlines() if "steps" in line))
    run = jax.jit(lambda p, operands: ja.attention(q, k, v, p, variant_operands=operands))
    same = run(plan, mask.operands), run(ragged, None)
    np.testing.assert_allclose(*same, atol=1e-4)
    return in_turns({"mask": lambda: run(plan, mask.operands), "ragged": lambda: run(ragged, None)})


def block_map_calls(num_tokens: int, target: str | None) -> dict[str, Callable[[], Any]]:
    """Returns calls inside jit, for document ids: the block map, and the plan made from it."""
    spec = ja.AttentionSpec(
        HEADS, HEADS, HEAD_DIM, page_size=None, max_batch=1, max_qo_tokens=num_tokens,
        max_kv_tokens=num_tokens, max_steps=1 << 17, target=target,
    )  # fmt: skip

    def make(ids: Any, qo: Any, lens: Any) -> masks.BlockMap:
        return masks.document_ids(ids).block_map(spec, qo, lens, q_block=128)

    ids = np.sort(np.random.default_rng(0).integers(0, 64, num_tokens)).astype(np.int32)
    arguments = jax.device_put((ids, np.array([0, num_tokens]), np.array([num_tokens])))
    plan = jax.jit(lambda *a: ja.plan(spec, *a[1:], block_map=make(*a)).buffer)
    one_map = jax.jit(lambda *a: make(*a).classes)
    return {"map": lambda: one_map(*arguments), "map and plan": lambda: plan(*arguments)}


def main() -> None:
    even = np.arange(NUM_DOCUMENTS + 1) * (NUM_TOKENS // NUM_DOCUMENTS)
    odd = np.sort(np.random.default_rng(0).integers(0, NUM_TOKENS, NUM_DOCUMENTS + 1))
    odd[[0, -1]] = 0, NUM_TOKENS
    for name, borders in (("of 1024 tokens each", even), ("of random lengths", odd)):
        times = packed_documents(borders)
        log(
            f"{NUM_DOCUMENTS} documents {name} in {NUM_TOKENS} tokens: mask"
            f" {1e3 * times['mask']:.1f} ms, ragged {1e3 * times['ragged']:.1f} ms,"
            f" {times['mask'] / times['ragged']:.3f} x"
        )
    for name, seconds in in_turns(block_map_calls(65536, "cpu"), 30).items():
        log(f"{name} of 65536 x 65536 tokens from document ids, in jit: {1e3 * seconds:.2f} ms")


if __name__ == "__main__":
    main()
