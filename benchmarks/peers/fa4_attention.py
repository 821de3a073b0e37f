"""fa4-jax: FlashAttention-4's CuTe DSL kernels (wgmma on Hopper), prefill and backward.

Batches of equal lengths go to flash_attn, others are packed for flash_attn_varlen. Its kernels are
traced and compiled at their first call, which takes seconds each.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from benchmarks.bursts import Timing
from benchmarks.peers.harness import Peer, is_dense
from benchmarks.peers.jax_chains import dense_shapes, time_calls
from benchmarks.workloads import Workload


def main() -> None:
    peer = Peer()
    fa4_jax = peer.require("fa4_jax")
    peer.report(note=f"fa4-jax {fa4_jax.__version__}")
    for workload in peer.workloads("backward", "prefill"):
        if workload.page_size is None:
            peer.measure(workload.id, "fa4-jax", lambda w=workload: time_attention(w))


def time_attention(workload: Workload) -> Timing:
    import fa4_jax

    w = workload
    if is_dense(w):
        return time_calls(
            w, lambda q, k, v: fa4_jax.flash_attn(q, k, v, causal=w.causal), dense_shapes(w)
        )
    q_begin, k_begin = jnp.asarray(w.qo_indptr), jnp.asarray(w.kv_indptr)

    def packed(q: Any, k: Any, v: Any) -> Any:
        return fa4_jax.flash_attn_varlen(q, k, v, q_begin, k_begin, causal=w.causal)

    kv_shape = (sum(w.kv_lens), w.num_kv_heads, w.head_dim)
    return time_calls(w, packed, ((w.nnz_qo, w.num_qo_heads, w.head_dim), kv_shape))


if __name__ == "__main__":
    main()
