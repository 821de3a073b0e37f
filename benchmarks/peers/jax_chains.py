"""Timing of JAX code by chains of calls, as in ops.attention_chain."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import ops, timing
from benchmarks.bursts import Timing
from benchmarks.peers.harness import expected_us, num_sets
from benchmarks.workloads import Workload

Shape = tuple[int, ...]
Attend = Callable[[Any, Any, Any], Any]  # q, k, v -> o


def dense_shapes(workload: Workload) -> tuple[Shape, Shape]:
    """Returns shapes of q and of k, v: [batch, len, heads, head_dim]. Needs harness.is_dense."""
    w = workload
    return (
        (w.batch_size, w.qo_lens[0], w.num_qo_heads, w.head_dim),
        (w.batch_size, w.kv_lens[0], w.num_kv_heads, w.head_dim),
    )


def time_calls(
    workload: Workload,
    attend: Attend,
    shapes: tuple[Shape, Shape],
    dtype: Any = jnp.bfloat16,
) -> Timing:
    """Times attend on fresh random arrays of `shapes`, as in ops.attention_chain.

    Decode: each o is the next q. Backward: ops.gradient_chain. Otherwise queries are distinct.
    """

    def normal(*args: Any, **kwargs: Any) -> list[jax.Array]:
        return [x.astype(dtype) for x in ops.normal(*args, **kwargs)]

    w = workload
    q_shape, kv_shape = shapes
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

    chains = {"decode": linked, "backward": ops.gradient_chain(attend, (q[0], k[0], v[0]), q)}
    make_chain = chains.get(w.kind, separate)
    return timing.time_chain(make_chain, num_calls, sustained=w.sustained)
