"""ejkernel: its Triton kernels for paged decode, called from JAX.

There are two: page_attention, which splits long contexts by its own rule, and unified_attention
with the split of vLLM's kernel of that name (16 parts, up to 128 / num_kv_heads requests).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.bursts import Timing
from benchmarks.peers.harness import Peer
from benchmarks.peers.jax_chains import time_calls
from benchmarks.workloads import Workload

PART = 256  # tokens per part in page_attention's own rule
MAX_NUMEL = 1 << 20  # limit of Triton's arrays; the merge kernel has one array for all parts


def main() -> None:
    peer = Peer()
    ejkernel = peer.require("ejkernel")
    peer.require("ejkernel.kernels._triton")
    peer.report(note=f"ejkernel {ejkernel.__version__}, jax {jax.__version__}")
    for workload in peer.workloads("decode"):
        for name, take in (("page", time_page), ("unified", time_unified)):
            peer.measure(workload.id, f"ejkernel {name}", lambda w=workload, t=take: t(w))


def time_page(workload: Workload) -> Timing:
    from ejkernel.kernels._triton.page_attention import page_attention

    w = workload
    kv_lens, table = jnp.asarray(w.kv_lens, jnp.int32), page_table(w)

    longest, group = max(w.kv_lens), w.num_qo_heads // w.num_kv_heads
    most_parts = MAX_NUMEL // (group * w.head_dim)
    num_splits = 0 if longest <= most_parts * PART else most_parts  # 0: its rule

    def attend(q: Any, k: Any, v: Any) -> Any:
        options = {"max_context_len": longest, "num_splits": num_splits}
        return page_attention(q, k, v, kv_lens, table, **options)

    kv_shape = (w.num_pages, w.num_kv_heads, w.page_size, w.head_dim)
    return time_calls(w, attend, (q_shape(w), kv_shape))


def time_unified(workload: Workload) -> Timing:
    from ejkernel.kernels._triton.unified_attention import unified_attention

    w = workload
    kv_lens, table = jnp.asarray(w.kv_lens, jnp.int32), page_table(w)
    begin = jnp.asarray(w.qo_indptr)
    split = {"seq_threshold_3d": 128 // w.num_kv_heads, "num_par_softmax_segments": 16}

    def attend(q: Any, k: Any, v: Any) -> Any:
        return unified_attention(q, k, v, kv_lens, table, begin, **split)

    kv_shape = (w.num_pages, w.page_size, w.num_kv_heads, w.head_dim)
    return time_calls(w, attend, (q_shape(w), kv_shape))


def q_shape(workload: Workload) -> tuple[int, ...]:
    return workload.nnz_qo, workload.num_qo_heads, workload.head_dim


def page_table(workload: Workload) -> jax.Array:
    """Returns [batch, pages of the longest request] i32, 0 after a request's last page."""
    w = workload
    pages = np.split(w.page_indices(), w.page_indptr[1:-1])
    table = np.zeros((w.batch_size, max(map(len, pages))), np.int32)
    for row, ids in zip(table, pages, strict=True):
        row[: len(ids)] = ids
    return jnp.asarray(table)


if __name__ == "__main__":
    main()
