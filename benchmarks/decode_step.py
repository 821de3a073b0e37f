"""A decode step of many layers in one jit: whether it is captured, and the cost of a call in it.

Proof of capture: the handlers' host code counts its runs (jax_attn._core.jit_stats). A step that
replays a CUDA graph launches num_layers kernels and never runs that code.
"""

from __future__ import annotations

import dataclasses
import functools
import glob
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_attn as ja
from benchmarks import ops
from benchmarks.report import Row, log
from benchmarks.workloads import Workload
from jax_attn import _core

FORMS = ("unrolled", "scan", "fori", "while")
LOOP_STEPS = 10  # decode steps inside one call of the forms that loop over steps
NUM_STEPS = 20  # steps of the proof


def make_step(num_layers: int, form: str) -> Callable[..., Any]:
    """Returns step(k, v, x, k_new, v_new, buffer, plan) -> k, v, x: appends and attends per layer.

    The step has only our calls: a layer's o is the next layer's q. unrolled, scan: one step over
    the layers. fori: LOOP_STEPS unrolled steps in a fori_loop. while: as many scanned steps in a
    while_loop whose end depends on data.
    """

    def layer(carry: Any, index: Any, k_new: Any, v_new: Any, plan: Any) -> Any:
        k, v, x = carry
        k, v = ja.append_kv(k, v, k_new, v_new, plan, layer=index)
        return k, v, ja.attention(x, k, v, plan, layer=index)

    def unrolled(carry: Any, *rest: Any) -> Any:
        for index in range(num_layers):
            carry = layer(carry, index, *rest)
        return carry

    def scanned(carry: Any, *rest: Any) -> Any:
        def body(carry: Any, index: Any) -> Any:
            return layer(carry, index, *rest), None

        return jax.lax.scan(body, carry, jnp.arange(num_layers, dtype=jnp.int32))[0]

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(k: Any, v: Any, x: Any, k_new: Any, v_new: Any, plan: Any) -> Any:
        rest, carry = (k_new, v_new, plan), (k, v, x)
        if form == "unrolled":
            return unrolled(carry, *rest)
        if form == "scan":
            return scanned(carry, *rest)
        if form == "fori":
            return jax.lax.fori_loop(0, LOOP_STEPS, lambda _, c: unrolled(c, *rest), carry)

        def unfinished(state: Any) -> Any:
            count, (_, _, x) = state
            return (count < LOOP_STEPS) & (x[0, 0, 0] < 1e30)

        def body(state: Any) -> Any:
            count, carry = state
            return count + 1, scanned(carry, *rest)

        return jax.lax.while_loop(unfinished, body, (jnp.int32(0), carry))[1]

    return step


def bench_step(workload: Workload, spec: Any, plan: Any, kernels_us: float | None) -> Iterator[Row]:
    """Measures a step. kernels_us: attention plus append of one layer; None: not measured."""
    w = workload
    row = (w.num_kv_heads, w.head_dim)
    num_layers = w.num_layers if ops.on_gpu() else 3
    pool = (num_layers, w.num_pages, w.page_size, *row)
    cache = ops.normal(pool, 2, seed=1)
    (x,) = ops.normal((w.nnz_qo, w.num_qo_heads, w.head_dim))
    k_new, v_new = ops.normal((w.nnz_qo, *row), 2, seed=2)
    on_device = dataclasses.replace(plan, buffer=jax.device_put(plan.buffer))
    on_host = dataclasses.replace(plan, buffer=np.asarray(plan.buffer))

    profiled_us: float | None = None
    for form in FORMS:
        step = make_step(num_layers, form)
        memory = step.lower(*cache, x, k_new, v_new, on_device).compile().memory_analysis()
        steps_a_call = LOOP_STEPS if form in ("fori", "while") else 1
        num_calls = max(2, NUM_STEPS // steps_a_call)

        def run(plan: Any, num_calls: int, step: Any = step) -> None:
            for _ in range(num_calls):
                cache[0], cache[1], o = step(*cache, x, k_new, v_new, plan)
            jax.block_until_ready(o)

        plans = {"": on_device}
        if form in ("unrolled", "scan"):
            plans["/numpy-plan"] = on_host
        for suffix, operand in plans.items():
            run(operand, 3)
            before = _core.jit_stats()
            run(operand, num_calls)
            after = _core.jit_stats()
            ran = {
                name: after[name] - before[name]
                for name in ("attention_launches", "append_launches")
            }
            times = []
            for _ in range(9):
                begin = time.perf_counter()
                run(operand, num_calls)
                times.append(1e6 * (time.perf_counter() - begin) / (num_calls * steps_a_call))
            step_us = float(np.median(times))
            if profiled_us is None and ops.on_gpu():
                profiled_us = _profiled_kernels_us(functools.partial(run, operand, 2), 2)
            more: dict[str, Any] = {
                "handler_runs": ran,
                "handler_runs_if_not_captured": 2 * num_layers * num_calls * steps_a_call,
                "cache_bytes": cache[0].nbytes + cache[1].nbytes,
                "temp_bytes": int(getattr(memory, "temp_size_in_bytes", 0)),
            }
            calls = 2 * num_layers
            if kernels_us is not None:
                overhead = (step_us - num_layers * kernels_us) / calls
                more["overhead_us_per_call_over_chains"] = round(overhead, 2)
            if profiled_us is not None:
                more["kernels_us"] = round(profiled_us, 1)
                more["overhead_us_per_call"] = round((step_us - profiled_us) / calls, 2)
            name = f"{w.id}/{form}{suffix}"
            log(f"{name}: {step_us:.1f} us a step, {more}")
            num_bytes = num_layers * w.kv_bytes
            yield Row(name, step_us, bytes=num_bytes, min_bytes=num_bytes, more=more)


def _profiled_kernels_us(run: Callable[[], Any], num_steps: int) -> float | None:
    """Returns the total duration of all kernels and memsets of a step, from the profiler.

    XLA runs without command buffers under a profiler, so every kernel appears separately.
    """
    try:
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                run()
            (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
            totals: dict[str, tuple[int, float]] = {}
            for plane in jax.profiler.ProfileData.from_file(path).planes:
                if not plane.name.startswith("/device:GPU"):
                    continue
                for line in plane.lines:
                    if not line.name.startswith("Stream"):
                        continue
                    for event in line.events:
                        count, total = totals.get(event.name, (0, 0.0))
                        totals[event.name] = (count + 1, total + event.duration_ns / 1e3)
    except Exception as error:  # a broken profiler must not fail the run
        log(f"profiler: {type(error).__name__}: {error}")
        return None
    for name, (count, total) in sorted(totals.items(), key=lambda item: -item[1][1]):
        log(f"profiler: {count:5d} x {total / count:8.2f} us  {name[:60]}")
    return sum(total for _, total in totals.values()) / num_steps if totals else None
