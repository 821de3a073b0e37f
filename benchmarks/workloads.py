"""The canonical workloads of workloads.json, with drawn lengths and computed floors.

This module imports neither jax nor torch: ours and every peer draw the same batch from it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

PATH = Path(__file__).with_name("workloads.json")
ATTENTION_KINDS = ("decode", "mixed", "prefill", "mla", "shared_prefix")
BACKWARD_PRODUCTS = 5  # S recomputed, dP, dV, dQ, dK; the forward pass has two
READ_BYTES = 30 << 27  # for the read ceiling: 67 times an H200's cache, fewer than 2^31 bf16


@dataclasses.dataclass(frozen=True)
class Workload:
    """One batch. Lengths are in tokens, one entry per request."""

    id: str
    kind: str
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int  # of q and k
    page_size: int | None  # None: ragged k, v
    causal: bool
    qo_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    anchor_us: float | None  # best peer on another H200, another day; None: unknown
    num_states: int = 0  # merge
    num_layers: int = 0  # step
    head_dim_latent: int | None = None  # mla: columns of k that are v; None: v is an array
    shared_len: int = 0  # leading tokens, in whole pages, that all requests share
    kv_dtype: str = "bf16"  # k and v; or e4m3, e5m2, int8, mxfp4, nvfp4, int4; others bf16
    q_dtype: str = "bf16"  # q; or e4m3
    eight_bit_products: bool = False  # matmuls of quantized values

    @property
    def batch_size(self) -> int:
        return len(self.kv_lens)

    @property
    def nnz_qo(self) -> int:
        return sum(self.qo_lens)

    @property
    def qo_indptr(self) -> np.ndarray:
        """[batch_size + 1], i32."""
        return np.concatenate([[0], np.cumsum(self.qo_lens)]).astype(np.int32)

    @property
    def kv_indptr(self) -> np.ndarray:
        """[batch_size + 1], i32, tokens."""
        return np.concatenate([[0], np.cumsum(self.kv_lens)]).astype(np.int32)

    @property
    def page_indptr(self) -> np.ndarray:
        """[batch_size + 1], i32, pages."""
        assert self.page_size is not None
        pages = [-(-n // self.page_size) for n in self.kv_lens]
        return np.concatenate([[0], np.cumsum(pages)]).astype(np.int32)

    @property
    def num_page_indices(self) -> int:
        """Entries of the page table."""
        return int(self.page_indptr[-1])

    @property
    def num_pages(self) -> int:
        """Pages of a pool that exactly holds the batch."""
        assert self.page_size is not None
        num_shared = self.shared_len // self.page_size
        return self.num_page_indices - max(0, self.batch_size - 1) * num_shared

    def page_indices(self) -> np.ndarray:
        """[num_page_indices], i32: ids in random order, as after some hours of serving."""
        assert self.page_size is not None
        num_shared = self.shared_len // self.page_size
        ids = np.random.default_rng(0).permutation(self.num_pages).astype(np.int32)
        if not num_shared:
            return ids
        own = np.split(
            ids[num_shared:], self.page_indptr[1:-1] - num_shared * np.arange(1, self.batch_size)
        )
        return np.concatenate([np.concatenate([ids[:num_shared], pages]) for pages in own])

    @property
    def head_dim_vo(self) -> int:
        return self.head_dim if self.head_dim_latent is None else self.head_dim_latent

    def unshared(self) -> Workload:
        """For a prompt and its answers as one request each: the answers as whole sequences."""
        lens = self.kv_lens[1:]
        return dataclasses.replace(self, qo_lens=lens, kv_lens=lens, shared_len=0, page_size=None)

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V, each read once."""
        tokens = sum(self.kv_lens) - max(0, self.batch_size - 1) * self.shared_len
        dim = self.head_dim
        four_bits = {"mxfp4": dim // 32, "nvfp4": dim // 16, "int4": dim // 16}  # bytes of scales
        row = {"bf16": 2 * dim, "int8": dim + 4}.get(self.kv_dtype, dim)
        if self.kv_dtype in four_bits:
            row = dim // 2 + four_bits[self.kv_dtype]
        return tokens * self.num_kv_heads * row * (2 if self.head_dim_latent is None else 1)

    @property
    def bytes(self) -> int:
        """Fewest bytes to move: each input read once, each output written once."""
        token = self.head_dim * 2
        if self.kind == "append":
            return self.nnz_qo * self.num_kv_heads * token * 2 * 2
        if self.kind == "merge":
            return self.nnz_qo * self.num_qo_heads * (token + 4) * (self.num_states + 1)
        results = self.head_dim_vo * 2
        if self.kind == "backward":  # q, k, v, o and its gradient in, three gradients out
            return 2 * self.kv_bytes + self.nnz_qo * self.num_qo_heads * 2 * (token + results)
        return self.kv_bytes + self.nnz_qo * self.num_qo_heads * (token + results)

    @property
    def flops(self) -> int:
        """2 * (QK and PV) over visible (query, key) pairs; backward: 2 * five such matmuls."""
        if self.kind not in (*ATTENTION_KINDS, "backward"):
            return 0
        pairs = 0
        for qo, kv in zip(self.qo_lens, self.kv_lens, strict=True):
            pairs += qo * kv - (qo * (qo - 1) // 2 if self.causal else 0)
        flops = 2 * pairs * self.num_qo_heads * (self.head_dim + self.head_dim_vo)
        return flops * BACKWARD_PRODUCTS // 2 if self.kind == "backward" else flops

    @property
    def max_error(self) -> float:
        """Bound of o's error relative to float32, in norms over a few rows, for normal data."""
        return 6e-2 if self.eight_bit_products else 1e-2

    @property
    def sustained(self) -> bool:
        """Whether its matmuls are large enough to reach the power limit (bursts.py)."""
        return self.kind in ("mixed", "prefill", "mla", "backward")

    def floor_us(self, bytes_per_us: float, flops_per_us: float) -> float:
        """The least possible time on a device with these ceilings."""
        return max(self.bytes / bytes_per_us, self.flops / flops_per_us)


def load(select: Iterable[str] = (), kinds: Iterable[str] = (), shrink: int = 1) -> list[Workload]:
    """Returns workloads with an id in `select` and a kind in `kinds`; empty means all.

    select: ids, or prefixes that end in "*".
    shrink: divides lengths and tokens, for trying the scripts on a machine without the device.
    """
    select, kinds = list(select), list(kinds)

    def wanted(entry: dict[str, Any]) -> bool:
        if kinds and entry["kind"] not in kinds:
            return False
        return not select or any(_matches(entry["id"], pattern) for pattern in select)

    supported = (*ATTENTION_KINDS, "append", "merge", "step", "plan", "backward")
    entries = json.loads(PATH.read_text())["workloads"]
    for pattern in select:
        if not any(_matches(entry["id"], pattern) for entry in entries):
            raise SystemExit(f"--select: no workload {pattern!r} in {PATH.name}")
    return [_make(e, shrink) for e in entries if e["kind"] in supported and wanted(e)]


def _matches(name: str, pattern: str) -> bool:
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern


def _make(entry: dict[str, Any], shrink: int) -> Workload:
    shared_len = entry.get("shared_len", 0) // shrink
    if entry["kind"] == "merge":
        qo_lens, kv_lens = [entry["num_tokens"]], [0]
    elif entry["kind"] == "shared_prefix":
        qo_lens = [entry["qo_len"]] * entry["batch"]
        kv_lens = [entry["shared_len"] + entry["unique_len"]] * entry["batch"]
    else:
        qo_lens, kv_lens = _lengths(entry)
    is_mla = entry["kind"] == "mla"
    workload = Workload(
        id=entry["id"],
        kind=entry["kind"],
        num_qo_heads=entry["num_qo_heads"],
        num_kv_heads=1 if is_mla else entry.get("num_kv_heads", entry["num_qo_heads"]),
        head_dim=entry["head_dim_ckv"] + entry["head_dim_kpe"] if is_mla else entry["head_dim"],
        page_size=entry.get("page_size"),
        causal=entry.get("causal", True),
        qo_lens=tuple(qo_lens),
        kv_lens=tuple(kv_lens),
        anchor_us=entry.get("h200_best_peer_us"),
        num_states=entry.get("num_states", 0),
        num_layers=entry.get("num_layers", 0),
        head_dim_latent=entry["head_dim_ckv"] if is_mla else None,
        shared_len=shared_len,
        kv_dtype=entry.get("kv_dtype", "bf16"),
        q_dtype=entry.get("q_dtype", "bf16"),
        eight_bit_products=entry.get("eight_bit_products", False),
    )
    workload = shrunk(workload, shrink)
    if "h200_best_peer_tflops" in entry and shrink == 1:
        anchor_us = workload.flops / entry["h200_best_peer_tflops"] / 1e6
        workload = dataclasses.replace(workload, anchor_us=round(anchor_us, 1))
    return workload


def shrunk(workload: Workload, shrink: int) -> Workload:
    """The workload with its lengths divided."""
    if shrink == 1:
        return workload
    qo_lens = [max(1, n // shrink) for n in workload.qo_lens]
    kv_lens = [max(q, n // shrink) for q, n in zip(qo_lens, workload.kv_lens, strict=True)]
    return dataclasses.replace(workload, qo_lens=tuple(qo_lens), kv_lens=tuple(kv_lens))


def _lengths(entry: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Returns (qo_lens, kv_lens), drawn from the distributions described in workloads.json."""
    requests = entry["requests"]
    if isinstance(requests, list):
        qo_lens = [r["qo_len"] for r in requests for _ in range(r["count"])]
        kv_lens = [r["kv_len"] for r in requests for _ in range(r["count"])]
        return qo_lens, kv_lens
    batch, rng = requests["batch"], np.random.default_rng(0)
    if requests["distribution"] == "uniform":
        kv_lens = rng.integers(512, 1537, batch).tolist()
    else:
        z = np.minimum(rng.zipf(1.5, batch), 200)
        kv_lens = np.maximum(16, (z / z.mean() * 1024).astype(int)).tolist()
    return (kv_lens if entry["kind"] == "prefill" else [1] * batch), kv_lens
