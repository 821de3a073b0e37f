"""JAX's own: jax.nn.dot_product_attention through cuDNN, and Pallas's Mosaic GPU attention."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import ops, timing
from benchmarks.bursts import Timing
from benchmarks.peers.harness import Peer, expected_us, num_sets
from benchmarks.workloads import Workload


def main() -> None:
    peer = Peer()
    peer.report(note=f"jax {jax.__version__}")
    for workload in peer.workloads("prefill", "decode"):
        w = workload
        dense = len(set(w.kv_lens)) == 1 and len(set(w.qo_lens)) == 1
        if not dense or w.qo_lens[0] not in (1, w.kv_lens[0]):
            continue
        if w.kind == "decode":
            # Chains of shorter calls are bound by the host, whatever runs ahead: 0.5 us came out
            # for 1x1024 on an H200, where memory needs 0.9.
            if w.page_size == 16 and expected_us(w) > 50:
                peer.measure(w.id, "jax.nn cudnn dense", lambda w=w: time_dense(w, cudnn))
        elif w.page_size is None:
            peer.measure(w.id, "jax.nn cudnn", lambda w=w: time_dense(w, cudnn))
            # jax 0.11.2's has its scratch in float16, whatever it is given.
            peer.measure(
                w.id, "pallas mosaic gpu (f16)", lambda w=w: time_dense(w, mosaic, jnp.float16)
            )


def cudnn(workload: Workload) -> Callable[..., Any]:
    causal = workload.causal and workload.qo_lens[0] > 1
    implementation = "cudnn" if ops.on_gpu() else "xla"

    def attend(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=causal, implementation=implementation
        )

    return attend


def mosaic(workload: Workload) -> Callable[..., Any]:
    """block_kv as large as shared memory lets it be, as that file's own benchmark chooses it."""
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    block_kv = {64: 256, 128: 128, 256: 64}[workload.head_dim]
    config = attention_mgpu.TuningConfig(
        block_q=64,  # of each of two warpgroups
        block_kv=block_kv,
        max_concurrent_steps=2,
        causal=workload.causal,
    )
    return lambda q, k, v: attention_mgpu.attention(q, k, v, config)


def time_dense(
    workload: Workload, make: Callable[[Workload], Callable[..., Any]], dtype: Any = jnp.bfloat16
) -> Timing:
    """Chains as ops.attention_chain makes them: linked for decode, else distinct queries."""

    def normal(*args: Any, **kwargs: Any) -> list[jax.Array]:
        return [x.astype(dtype) for x in ops.normal(*args, **kwargs)]

    w = workload
    attend = make(w)
    kv_shape = (w.batch_size, w.kv_lens[0], w.num_kv_heads, w.head_dim)
    q_shape = (w.batch_size, w.qo_lens[0], w.num_qo_heads, w.head_dim)
    sets = num_sets(w) if w.kind == "decode" and ops.on_gpu() else 2
    k, v = normal(kv_shape, sets, seed=1), normal(kv_shape, sets, seed=2)
    shortest, longest = (8, 160) if w.kind == "decode" else (2, 8)
    num_calls = timing.chain_length(expected_us(w), shortest, longest) if ops.on_gpu() else 2
    q = normal(q_shape, 1 if w.kind == "decode" else 2 * num_calls)

    def linked(count: int) -> Callable[[], Any]:
        @jax.jit
        def run(q: Any, k: Any, v: Any) -> Any:
            o = q[0]
            for i in range(count):
                o = attend(o, k[i % sets], v[i % sets])
            return o

        return lambda: run(q, k, v)

    def separate(count: int) -> Callable[[], Any]:
        @functools.partial(jax.jit, compiler_options=ops.uncaptured())
        def run(q: Any, k: Any, v: Any) -> Any:
            return [attend(q[i], k[i % sets], v[i % sets]) for i in range(count)]

        return lambda: run(q[:count], k, v)

    make_chain = linked if w.kind == "decode" else separate
    return timing.time_chain(make_chain, num_calls, sustained=w.sustained)


if __name__ == "__main__":
    main()
