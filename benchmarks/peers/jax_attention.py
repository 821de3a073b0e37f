"""JAX's own attention: jax.nn.dot_product_attention through cuDNN, and Pallas Mosaic GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import ops
from benchmarks.bursts import Timing
from benchmarks.peers.harness import Peer, expected_us, is_dense
from benchmarks.peers.jax_chains import dense_shapes, time_calls
from benchmarks.workloads import Workload


def main() -> None:
    peer = Peer()
    peer.report(note=f"jax {jax.__version__}")
    mosaic_runs = True
    for w in filter(is_dense, peer.workloads("backward", "prefill", "decode")):
        if w.kind == "decode":
            # Chains of shorter calls are host-bound even with work ahead. 1x1024 on an H200 came
            # out as 0.5 us, though memory alone needs 0.9 us.
            if w.page_size == 16 and expected_us(w) > 50:
                peer.measure(w.id, "jax.nn cudnn dense", lambda w=w: time_dense(w, cudnn))
            continue
        peer.measure(w.id, "jax.nn cudnn", lambda w=w: time_dense(w, cudnn))
        if w.kind == "prefill" and mosaic_runs:
            # jax 0.11.2's kernel has its scratch in float16 for all dtypes. A failure by types
            # would repeat for every row.
            mosaic_runs = peer.measure(
                w.id, "pallas mosaic gpu (f16)", lambda w=w: time_dense(w, mosaic, jnp.float16)
            )


def time_dense(
    workload: Workload, make: Callable[[Workload], Callable[..., Any]], dtype: Any = jnp.bfloat16
) -> Timing:
    return time_calls(workload, make(workload), dense_shapes(workload), dtype)


def cudnn(workload: Workload) -> Callable[..., Any]:
    causal = workload.causal and workload.qo_lens[0] > 1
    implementation = "cudnn" if ops.on_gpu() else "xla"

    def attend(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=causal, implementation=implementation
        )

    return attend


def mosaic(workload: Workload) -> Callable[..., Any]:
    """Makes the call with the largest block_kv that fits shared memory, as in that file's own
    benchmark."""
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    block_kv = {64: 256, 128: 128, 256: 64}[workload.head_dim]
    config = attention_mgpu.TuningConfig(
        block_q=64,  # per warpgroup, of two
        block_kv=block_kv,
        max_concurrent_steps=2,
        causal=workload.causal,
    )
    return lambda q, k, v: attention_mgpu.attention(q, k, v, config)


if __name__ == "__main__":
    main()
