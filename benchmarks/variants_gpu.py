"""The cost of variants on a GPU, compared with built-in kernels and XLA: bf16, 32/8 heads, d128.

python -m benchmarks.variants_gpu [NAME ...]        names of rows, or their prefixes
python -m benchmarks.variants_gpu --shrink 64       tries the script, also on a CPU
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_attn as ja
from benchmarks import device_clock, ops
from benchmarks.masks import block_map_calls
from benchmarks.report import log
from benchmarks.variant_functions import (
    alibi,
    causal,
    dense_bias,
    documents_of_rows,
    t5_bias,
    tree,
)
from jax_attn import masks

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
MAP_TOKENS = 65536
CALLS = 20  # calls timed together


@dataclasses.dataclass(frozen=True)
class Batch:
    size: int
    qo_len: int
    kv_len: int
    page_size: int | None = None

    def shrunk(self, by: int) -> Batch:
        """Returns the batch with shorter lengths; qo_len shrinks only for a prefill."""
        qo_len = self.qo_len // by if self.qo_len == self.kv_len else self.qo_len
        return dataclasses.replace(self, qo_len=qo_len, kv_len=self.kv_len // by)


PREFILL = Batch(4, 4096, 4096)
DECODE = Batch(64, 1, 4096, page_size=16)
DRAFTS = Batch(64, 8, 4096, page_size=16)


@dataclasses.dataclass(frozen=True)
class Case:
    """A row. base: the row to compare with. operands: makes the operands of a batch, by name."""

    base: str = "causal built in"
    logits: Any = None
    mask: Any = None
    operands: Callable[[Batch], Mapping[str, Any]] = lambda batch: {}
    causal: bool = True
    lists: bool = False
    batch: Batch = PREFILL


def slopes(low: float, high: float) -> Callable[[Batch], Mapping[str, Any]]:
    values = np.random.default_rng(0).uniform(0, 1, HEADS)
    return lambda batch: {"slopes": np.float32(low + (high - low) * values)}


def documents(length: int) -> Callable[[Batch], Mapping[str, Any]]:
    """Makes documents of `length` tokens each; 0: a single document."""

    def ids(batch: Batch) -> Mapping[str, Any]:
        place = np.arange(batch.size * batch.qo_len) % batch.qo_len
        return {"doc": np.int32(place // length if length else 0 * place)}

    return ids


def table(batch: Batch) -> Mapping[str, Any]:
    return {"table": jax.random.normal(jax.random.key(7), (32, HEADS), jnp.bfloat16)}


def bias(batch: Batch) -> Mapping[str, Any]:
    shape = batch.size, HEADS, batch.qo_len, batch.kv_len
    return {"bias": jax.random.normal(jax.random.key(8), shape, jnp.bfloat16)}


def ancestors(batch: Batch) -> Mapping[str, Any]:
    """Returns a bit mask per draft, of its ancestors and itself in a binary tree."""
    bits: list[int] = []
    for draft in range(batch.qo_len):
        bits.append(1 << draft | (bits[(draft - 1) // 2] if draft else 0))
    return {"ancestors": np.tile(np.int32(bits), batch.size)}


CASES = {
    "causal built in": Case(),
    "full built in": Case(causal=False),
    "causal, lists that hide nothing": Case(mask=lambda at: at.kv_pos >= 0, lists=True),
    "causal by a mask": Case(mask=causal, causal=False, base="full built in"),
    "causal by a mask, lists": Case(mask=causal, causal=False, lists=True),
    "score * 1.01": Case(logits=lambda score, at: score * 1.01),
    "mask kv_pos + q_pos >= 0": Case(mask=lambda at: at.kv_pos + at.q_pos >= 0),
    "alibi, slopes 1e-5": Case(logits=alibi, operands=slopes(1e-5, 1e-5)),
    "alibi, slopes .01 to .3": Case(logits=alibi, operands=slopes(0.01, 0.3)),
    "alibi, slopes -.01 to -.3": Case(logits=alibi, operands=slopes(-0.01, -0.3)),
    "alibi, slopes .01 to .84": Case(logits=alibi, operands=slopes(0.01, 0.84)),
    "one document": Case(mask=documents_of_rows, operands=documents(0)),
    "one document, lists": Case(mask=documents_of_rows, operands=documents(0), lists=True),
    "64 documents, lists": Case(mask=documents_of_rows, operands=documents(64), lists=True),
    "t5": Case(logits=t5_bias, operands=table),
    "dense bias [B, H, T, S]": Case(logits=dense_bias, operands=bias),
    "decode built in": Case(base="decode built in", batch=DECODE),
    "decode alibi": Case("decode built in", alibi, operands=slopes(0.01, 0.3), batch=DECODE),
    "drafts causal built in": Case(base="drafts causal built in", batch=DRAFTS),
    "drafts tree": Case(
        "drafts causal built in", mask=tree, operands=ancestors, causal=False, batch=DRAFTS
    ),
}
XLA_BIAS = "jax.nn dense bias"  # followed by the implementation's name
MAP = "block map of 64k"
NAMES = [*CASES, *(f"{XLA_BIAS}, {name}" for name in ("xla", "cudnn")), MAP, f"{MAP} and plan"]


def arrays_of(batch: Batch) -> list[Any]:
    """Returns q, k, v; k and v are rows or pages."""
    rows = batch.size * batch.kv_len
    kv_shape: tuple[int, ...] = rows, KV_HEADS, HEAD_DIM
    if batch.page_size is not None:
        kv_shape = rows // batch.page_size, batch.page_size, KV_HEADS, HEAD_DIM
    shapes = (batch.size * batch.qo_len, HEADS, HEAD_DIM), kv_shape, kv_shape
    return [jax.random.normal(jax.random.key(i), s, jnp.bfloat16) for i, s in enumerate(shapes)]


def make(case: Case, batch: Batch) -> Callable[[], Any]:
    operands = dict(case.operands(batch))
    variant = None
    if case.logits or case.mask:
        variant = ja.Variant(case.logits, case.mask, operands=operands)
    rows = batch.size * batch.kv_len
    paged = batch.page_size is not None
    spec = ja.AttentionSpec(
        HEADS, KV_HEADS, HEAD_DIM, page_size=batch.page_size, max_batch=batch.size,
        max_qo_tokens=batch.size * batch.qo_len, max_kv_tokens=None if paged else rows,
        max_kv_pages=rows // batch.page_size if batch.page_size else None,
        variant=variant, causal=case.causal, max_steps=1 << 16 if case.lists else None,
    )  # fmt: skip
    lengths = np.arange(batch.size + 1) * batch.qo_len, np.full(batch.size, batch.kv_len)
    pages = ()
    if batch.page_size:
        order = np.random.default_rng(0).permutation(rows // batch.page_size)
        pages = np.arange(batch.size + 1) * (batch.kv_len // batch.page_size), order
    block_map = None
    if case.lists:
        # q_block in tokens: a tile has 128 rows on Hopper.
        block_map = masks.Mask(case.mask, operands).block_map(spec, *lengths, q_block=32)
    plan = ja.plan(spec, *lengths, *pages, block_map=block_map)
    for line in plan.describe().splitlines():
        if "  steps" in line:
            log(line.strip())
    plan = jax.device_put(plan)
    given = {name: jnp.asarray(x) for name, x in operands.items()} or None
    q, k, v = arrays_of(batch)
    attend = jax.jit(lambda *a: ja.attention(*a[:4], variant_operands=a[4]))
    return lambda: attend(q, k, v, plan, given)


def make_xla(implementation: str, batch: Batch) -> Callable[[], Any]:
    """Makes a call of jax.nn with the same dense bias."""
    given = bias(batch)["bias"]
    q, k, v = (x.reshape(batch.size, -1, *x.shape[1:]) for x in arrays_of(batch))
    attend = jax.jit(
        functools.partial(
            jax.nn.dot_product_attention, is_causal=True, implementation=implementation
        )
    )
    return lambda: attend(q, k, v, given).reshape(-1, HEADS, HEAD_DIM)


def median_us(run: Callable[[], Any]) -> float:
    def burst(num_calls: int) -> list[Any]:
        return [run() for _ in range(num_calls)]

    def elapsed_us() -> float:
        if ops.on_gpu():
            return device_clock.elapsed_us(lambda: burst(5), lambda: burst(CALLS))
        begin = time.perf_counter()
        jax.block_until_ready(burst(CALLS))
        return 1e6 * (time.perf_counter() - begin)

    jax.block_until_ready(burst(3))
    return statistics.median(elapsed_us() for _ in range(5)) / CALLS


class Rows:
    """Times of rows, each measured once."""

    def __init__(self, shrink: int) -> None:
        self._shrink = shrink
        self._us: dict[str, float] = {}

    def us(self, name: str) -> float:
        if name not in self._us:
            self._us[name] = median_us(self.call(name))
        return self._us[name]

    def call(self, name: str) -> Callable[[], Any]:
        if name in CASES:
            return make(CASES[name], CASES[name].batch.shrunk(self._shrink))
        if name.startswith(XLA_BIAS):
            return make_xla(name.rpartition(" ")[2], PREFILL.shrunk(self._shrink))
        calls = block_map_calls(MAP_TOKENS // self._shrink, target=None)
        return calls["map and plan" if name.endswith("plan") else "map"]

    def check_bias(self, name: str) -> None:
        """Checks that jax.nn computes the same as ours."""
        both = (self.call(n)().astype(jnp.float32) for n in (name, "dense bias [B, H, T, S]"))
        difference = jnp.max(jnp.abs(jnp.subtract(*both)))
        log(f"{name}: differs from ours by at most {float(difference):.4f}")

    def report(self, name: str) -> None:
        us = self.us(name)
        text = f"{name:36} {us:8.0f} us"
        base = CASES[name].base if name in CASES else ""
        if name.startswith(XLA_BIAS):
            base = "dense bias [B, H, T, S]"
        if base:
            text += f"  {us / self.us(base):.2f} x {base}"
        log(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="rows, or how they begin")
    parser.add_argument("--shrink", type=int, default=1, help="divides all lengths")
    arguments = parser.parse_args()
    rows = Rows(arguments.shrink)
    for name in NAMES:
        if arguments.names and not name.startswith(tuple(arguments.names)):
            continue
        try:
            if name.startswith(XLA_BIAS):
                rows.check_bias(name)
            rows.report(name)
        except Exception as error:  # a row that fails prints one line
            log(f"{name:36} {type(error).__name__}: {' '.join(str(error).split())[:200]}")


if __name__ == "__main__":
    main()
