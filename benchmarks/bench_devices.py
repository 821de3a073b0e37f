"""The cost of splitting decodes over devices: KV shards on CPU devices compared with one device.

    python -m benchmarks.bench_devices [--devices 2] [--context 16384] [--requests 8] [--layers 16]

Devices of one CPU share its cores and its thread pool, so a split cannot be faster. The ratio of
the two times is the overhead of plans and of the exchange. A step is the attention of all layers
with one plan, as in a model; all layers have the same keys. Steps are interleaved, and medians of
rounds are printed with the machine's load. If the machine is busy, two devices have more threads
that compete for cores; then compare processor seconds.
"""

from __future__ import annotations

import argparse
import functools
import os
import time
from collections.abc import Callable
from typing import Any

_ROUNDS = 21


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    defaults = {"devices": 2, "context": 16384, "requests": 8, "layers": 16}
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    count = f"--xla_force_host_platform_device_count={args.devices}"
    os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": count}
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores, {vars(args)}")
    seconds = _measure(args.devices, args.context, args.requests, args.layers)
    for name, (wall, processor) in seconds.items():
        print(f"{name:40} {1e6 * wall:10.0f} us, of processors {1e6 * processor:10.0f}")
    whole = seconds["one device"]
    for name in ("striped", "striped, plans in the step"):
        wall, processor = (x / y for x, y in zip(seconds[name], whole, strict=True))
        print(f"{name} / one device: {wall:.3f}, of processors {processor:.3f}")


def _measure(size: int, context: int, requests: int, num_layers: int) -> dict[str, Any]:
    """Returns median wall and processor seconds of each kind of step, and of plans on the host."""
    import jax
    import numpy as np
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    import jax_attn as ja
    from jax_attn import parallel

    page_size, heads, kv_heads, head_dim = 64 * size, 32, 8, 128
    pages_each = -(-context // page_size)
    spec = ja.AttentionSpec(
        heads, kv_heads, head_dim, dtype="float32", page_size=page_size, max_batch=requests,
        max_qo_tokens=requests, max_kv_pages=requests * pages_each, target="cpu",
    )  # fmt: skip
    kv_shards = parallel.KvShards(spec, "kv", size)
    mesh = jax.make_mesh((size,), ("kv",), axis_types=(AxisType.Auto,))
    rng = np.random.default_rng(0)
    shape = requests * pages_each, page_size, kv_heads, head_dim
    pages = [rng.standard_normal(shape, np.float32) for _ in "kv"]
    q = rng.standard_normal((requests, heads, head_dim), np.float32)
    indptr = np.arange(requests + 1, dtype=np.int32)
    lengths = (indptr, np.full(requests, context, np.int32), indptr * pages_each,
               np.arange(requests * pages_each, dtype=np.int32))  # fmt: skip

    on_one = [jax.device_put(x, jax.devices()[0]) for x in pages]
    striped = NamedSharding(mesh, kv_shards.pages_spec(is_stacked=False))
    on_all = [jax.device_put(x, striped) for x in pages]
    everywhere = PartitionSpec()
    plan = jax.device_put(ja.plan(spec, *lengths), jax.devices()[0])
    plans = jax.device_put(
        parallel.plan_kv_shards(kv_shards, *lengths), NamedSharding(mesh, kv_shards.plan_spec)
    )

    def layers(attend: Callable[..., Any], q: Any, *rest: Any) -> Any:
        for _ in range(num_layers):
            q = attend(q, *rest)
        return q

    def plan_and_attend(q: Any, k: Any, v: Any, *lengths: Any) -> Any:
        return layers(
            parallel.attend_kv_shards, q, k, v, parallel.plan_kv_shards(kv_shards, *lengths)
        )

    def mapped(call: Callable[..., Any], *specs: Any) -> Any:
        return jax.jit(
            jax.shard_map(
                call, mesh=mesh, in_specs=specs, out_specs=everywhere, check_vma=False
            )
        )  # fmt: skip

    one = jax.jit(functools.partial(layers, ja.attention))
    pages_specs = everywhere, striped.spec, striped.spec
    split = mapped(
        functools.partial(layers, parallel.attend_kv_shards), *pages_specs, kv_shards.plan_spec
    )
    planned = mapped(plan_and_attend, *pages_specs, *[everywhere] * 4)
    gather = functools.partial(layers, lambda o: jax.lax.all_gather(o, "kv").sum(0))
    exchange = mapped(gather, everywhere)
    steps: dict[str, Callable[[], Any]] = {
        "one device": lambda: one(q, *on_one, plan),
        "striped": lambda: split(q, *on_all, plans),
        "striped, plans in the step": lambda: planned(q, *on_all, *lengths),
        "all-gather of the states alone": lambda: exchange(q),
        "plan of one device, on the host": lambda: ja.plan(spec, *lengths),
        "plans of all devices, on the host": lambda: parallel.plan_kv_shards(kv_shards, *lengths),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for round_index in range(_ROUNDS + 1):
        for name, step in steps.items():
            begin = time.perf_counter(), time.process_time()
            jax.block_until_ready(step())
            end = time.perf_counter(), time.process_time()
            if round_index:  # the first one compiles
                times[name].append((end[0] - begin[0], end[1] - begin[1]))
    return {name: np.median(x, axis=0).tolist() for name, x in times.items()}


if __name__ == "__main__":
    main()
