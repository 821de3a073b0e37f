"""What variants cost on a GPU, beside the built-in kernel: a prefill, bf16, 32/8 heads, d128.

python -m benchmarks.variants_gpu [NAME ...]
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_attn as ja
from benchmarks import device_clock
from benchmarks.report import log
from benchmarks.variant_functions import alibi, causal, documents_of_rows
from jax_attn import masks

BATCH, LENGTH, HEADS, KV_HEADS, HEAD_DIM = 4, 4096, 32, 8, 128
ROWS = BATCH * LENGTH
CALLS = 20  # that are timed together


def cases() -> dict[str, tuple[dict[str, Any], Any, Any, dict[str, Any], bool]]:
    """name: fields of the spec, logits, mask, operands, with step lists."""
    slopes = np.random.default_rng(0).uniform(0.01, 0.3, HEADS).astype(np.float32)
    one, many = np.zeros(ROWS, np.int32), np.int32(np.arange(ROWS) % LENGTH // 64)
    full = {"causal": False}
    return {
        "causal built in": ({}, None, None, {}, False),
        "full built in": (full, None, None, {}, False),
        "causal, lists that hide nothing": ({}, None, lambda at: at.kv_pos >= 0, {}, True),
        "causal by a mask, lists": (full, None, causal, {}, True),
        "score * 1.01": ({}, lambda score, at: score * 1.01, None, {}, False),
        "mask kv_pos + q_pos >= 0": ({}, None, lambda at: at.kv_pos + at.q_pos >= 0, {}, False),
        "alibi, slopes 1e-5": ({}, alibi, None, {"slopes": 0 * slopes + 1e-5}, False),
        "alibi, slopes .01 to .3": ({}, alibi, None, {"slopes": slopes}, False),
        "alibi, slopes -.01 to -.3": ({}, alibi, None, {"slopes": -slopes}, False),
        "one document": ({}, None, documents_of_rows, {"doc": one}, False),
        "one document, lists": ({}, None, documents_of_rows, {"doc": one}, True),
        "64 documents, lists": ({}, None, documents_of_rows, {"doc": many}, True),
    }


def make(
    fields: dict[str, Any], logits: Any, mask: Any, operands: dict[str, Any], lists: bool
) -> Callable[[], Any]:
    variant = ja.Variant(logits, mask, operands=operands) if logits or mask else None
    spec = ja.AttentionSpec(
        HEADS, KV_HEADS, HEAD_DIM, page_size=None, max_batch=BATCH, max_qo_tokens=ROWS,
        max_kv_tokens=ROWS, variant=variant, max_steps=1 << 16 if lists else None, **fields,
    )  # fmt: skip
    lengths = np.arange(BATCH + 1) * LENGTH, np.full(BATCH, LENGTH)
    block_map = None
    if lists:
        # Of tiles, 128 rows of Hopper.
        block_map = masks.Mask(mask, operands).block_map(spec, *lengths, q_block=32)
    plan = ja.plan(spec, *lengths, block_map=block_map)
    log(next((line.strip() for line in plan.describe().splitlines() if "  steps" in line), ""))
    plan = jax.device_put(plan)
    given = {name: jnp.asarray(x) for name, x in operands.items()} or None
    kv_shape = ROWS, KV_HEADS, HEAD_DIM
    q, k, v = (
        jax.random.normal(jax.random.key(i), shape, jnp.bfloat16)
        for i, shape in enumerate((spec.q_shape, kv_shape, kv_shape))
    )
    attend = jax.jit(lambda *a: ja.attention(*a[:4], variant_operands=a[4]))
    return lambda: attend(q, k, v, plan, given)


def median_us(run: Callable[[], Any]) -> float:
    def burst(num_calls: int) -> list[Any]:
        return [run() for _ in range(num_calls)]

    jax.block_until_ready(burst(3))
    times = (device_clock.elapsed_us(lambda: burst(5), lambda: burst(CALLS)) for _ in range(5))
    return statistics.median(times) / CALLS


def main() -> None:
    chosen = sys.argv[1:] or cases()
    base = 0.0
    for name, case in cases().items():
        if name not in chosen:
            continue
        us = median_us(make(*case))
        base = base or us
        log(f"{name:36} {us:8.0f} us  {us / base:.2f} x")


if __name__ == "__main__":
    main()
