"""Decodes whose number does not divide a GPU's queues: each schedule beside the read of the bytes.

    python -m benchmarks.uneven_decodes [--seconds 50] [--tiny]

LeanAttention's promise is equal work for every processor, whatever batch and heads. `no_split` is
FlashAttention-2, `fixed_split` FlashDecoding. Occupancy is that of AttentionPlan.describe.
"""

from __future__ import annotations

import argparse
import time

from benchmarks import ops, timing
from benchmarks.workloads import Workload

# (requests, keys of each, query heads, kv heads)
ROWS = (
    (17, 4096, 32, 8),
    (17, 16384, 32, 8),
    (9, 8192, 64, 8),
    (3, 30000, 48, 48),
    (20, 16384, 32, 8),
    (24, 4096, 32, 8),
    (1, 65536, 56, 56),
    (50, 4096, 32, 8),
    (64, 4096, 32, 8),
    (34, 4096, 32, 8),
    (24, 16384, 32, 8),
    (8, 1024, 32, 8),
    (1, 512, 32, 8),
)
SCHEDULES = ("", "schedule=fixed_split,kv_split=2048", "schedule=no_split")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=50, help="after which no row starts")
    parser.add_argument("--tiny", action="store_true", help="keys / 64: tries the script anywhere")
    arguments = parser.parse_args()
    begin = time.monotonic()
    bytes_per_us = ops.read_bytes_per_us()
    for count, kv_len, num_qo_heads, num_kv_heads in ROWS:
        if time.monotonic() - begin > arguments.seconds:
            break
        kv_lens = (kv_len // 64 if arguments.tiny else kv_len,) * count
        workload = Workload(
            f"decode/{count}x{kv_lens[0]} {num_qo_heads}/{num_kv_heads}",
            "decode", num_qo_heads, num_kv_heads, 128, 16, True, (1,) * count, kv_lens, None,
        )  # fmt: skip
        data = ops.make_data(workload)
        read_us = workload.bytes / bytes_per_us
        texts = []
        for fields in SCHEDULES:
            spec = ops.make_spec(workload, ops.parse_variant(fields))
            plan = ops.make_plan(workload, spec)
            chain = ops.attention_chain(data, spec, plan)
            error = ops.relative_error(data, chain(1)()) if not texts else 0.0
            assert error < workload.max_error, (workload.id, error)
            us = timing.time_chain(chain, 4).us
            costs = plan.queue_costs()
            texts.append(
                f"{spec.schedule} {us:.1f} us, {us / read_us:.3f} x the read, occupancy"
                f" {costs.mean() / costs.max():.3f}"
            )
        print(f"{workload.id}: {'; '.join(texts)}", flush=True)


if __name__ == "__main__":
    main()
