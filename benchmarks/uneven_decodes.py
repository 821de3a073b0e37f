"""Decodes whose number does not divide a GPU's queues: each schedule beside the read of the bytes.

    python -m benchmarks.uneven_decodes [--prompts] [--seconds 50] [--tiny]

LeanAttention's promise is equal work for every processor, whatever batch and heads. `no_split` is
FlashAttention-2, `fixed_split` FlashDecoding. Occupancy is that of AttentionPlan.describe. With
--prompts, batches in which the planner's model sees little to gain by more splits of prompts:
docs/notes/planners.md.
"""

from __future__ import annotations

import argparse
import time

import jax

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
# (query tokens of each request, keys of each, query heads, kv heads)
PROMPTS = (
    ((832, 1378, 616, 886), (10619,) * 4, 32, 32),
    ((294, 1381), (8000,) * 2, 64, 8),
    ((1282, 680, 1430), (7106,) * 3, 32, 8),
    ((1040, 940, 1524), (20822,) * 3, 64, 8),
    ((400, 300), (2000, 1500), 32, 8),
    ((899, 1083, 195, 1366, 1790, 1341, 1308), (5819,) * 7, 40, 10),
    ((1,) * 20 + (344, 215, 103, 84), (300,) * 20 + (344, 215, 103, 259), 24, 3),
)
SCHEDULES = ("", "schedule=fixed_split,kv_split=2048", "schedule=no_split")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=50, help="after which no row starts")
    parser.add_argument("--prompts", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="keys / 64: tries the script anywhere")
    arguments = parser.parse_args()
    begin = time.monotonic()
    bytes_per_us = ops.read_bytes_per_us()
    decodes = (((1,) * count, (kv_len,) * count, *heads) for count, kv_len, *heads in ROWS)
    for qo_lens, kv_lens, *heads in PROMPTS if arguments.prompts else decodes:
        if time.monotonic() - begin > arguments.seconds:
            break
        if arguments.tiny:
            qo_lens, kv_lens = (tuple(-(-n // 64) for n in lens) for lens in (qo_lens, kv_lens))
        kind = "prefill" if arguments.prompts else "decode"
        name = f"{kind}/{len(kv_lens)}x{max(qo_lens)}@{max(kv_lens)} {heads[0]}/{heads[1]}"
        workload = Workload(name, kind, *heads, 128, 16, True, qo_lens, kv_lens, None)
        data = ops.make_data(workload)
        read_us = workload.bytes / bytes_per_us
        texts = []
        for fields in SCHEDULES:
            spec = ops.make_spec(workload, ops.parse_variant(fields))
            try:
                plan = ops.make_plan(workload, spec)
            except ValueError:  # more chunks than a plan has items
                texts.append(f"{spec.schedule} is refused")
                continue
            chain = ops.attention_chain(data, spec, plan)
            last = jax.tree.leaves(chain(1)())[-1]
            error = ops.relative_error(data, last) if not texts else 0.0
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
