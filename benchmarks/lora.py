"""Decode steps with LoRA adapters, beside the same steps without.

    python -m benchmarks.lora [--shape qwen3-0.6b] [--dtype float32] [--ranks 8,16] [--rounds 41]

Random weights and adapters of all linear layers. Each round runs every step once, beginning with
another one each time, so that drift of the machine is in all of them. A cost is the median over
rounds of what a step took beyond `none` of its round; in parentheses an interval that has the true
median with 95 %. `again` is `none` once more: its interval shows how far to trust the others.

  none       an engine without room for adapters
  again      the same
  unused     one with room for 32, and no request that names one
  one        every request has the same adapter: the goal is at most 8 %
  each       every request has one of its own: at most 20 % with 32 requests
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from array import array
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from benchmarks import shapes
from benchmarks.report import log
from jax_attn import models
from jax_attn.models._weights.lora_files import LoraWeights, Pair
from jax_attn.models._weights.tensors import layer_tensors
from jax_attn.serve._engine.buckets import Batch
from jax_attn.serve._engine.device import Device, DeviceConfig
from jax_attn.serve._engine.engine_config import EngineConfig, capacities
from jax_attn.serve._scheduling.request import Adapter, SamplingParams, Sequence
from jax_attn.serve._scheduling.step_plan import ScheduledSequence

NUM_LORAS, PAGE_SIZE, CONTEXT = 32, 16, 127


class Seconds(NamedTuple):
    wall: float
    processor: float


class Cost(NamedTuple):
    """A share of `none`'s time, and the interval that has the true median with 95 %."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:+.1%} ({self.low:+.1%} to {self.high:+.1%})"

    def verdict(self, goal: float) -> str:
        if self.high <= goal:
            return "met"
        return "missed" if self.low > goal else "not decided: more rounds"


def cost(times: list[float], without: list[float]) -> Cost:
    """What `times` are beyond those `without` adapters of the same rounds."""
    more = sorted(x / y - 1 for x, y in zip(times, without, strict=True))
    # Ranks of the normal approximation to the binomial distribution.
    skipped = max(0, math.floor((len(more) - 1.96 * math.sqrt(len(more))) / 2))
    return Cost(statistics.median(more), more[skipped], more[-1 - skipped])


def adapter(config: models.ModelConfig, rank: int) -> LoraWeights:
    rng = np.random.default_rng(0)
    pairs = {}
    for layer in range(config.num_layers):
        for name in ("qkv", "o", "gate_up", "down"):
            parts = layer_tensors(config, layer)[name]
            assert isinstance(parts, dict)
            for tensor, (out, depth) in parts.items():
                a = rng.standard_normal((rank, depth), np.float32)
                b = rng.standard_normal((out, rank), np.float32)
                pairs[layer, tensor.removesuffix(".weight")] = Pair(a / depth, b / rank)
    return LoraWeights(rank, pairs)


def batch_of(device: Device, slots: list[int | None]) -> Batch:
    """A decode of a token of each sequence, after CONTEXT others."""
    each, entries = (CONTEXT + PAGE_SIZE) // PAGE_SIZE, []
    for i, slot in enumerate(slots):
        params = SamplingParams(max_tokens=8)
        seq = Sequence(f"{i}", f"{i}", [1] * (CONTEXT + 1), params)
        seq.slot, seq.pages = i, array("i", range(i * each, (i + 1) * each))
        seq.adapter = None if slot is None else Adapter(slot, slot)
        device.set_params(i, params)
        entries.append(ScheduledSequence(seq, CONTEXT, 1, True))
    return device.plan(entries)


def measure(model: models.Model, rank: int, rounds: int) -> None:
    config = EngineConfig(
        num_pages=NUM_LORAS * (CONTEXT + PAGE_SIZE) // PAGE_SIZE + 1,
        page_size=PAGE_SIZE,
        max_running=NUM_LORAS,
        max_step_tokens=NUM_LORAS,
    )
    of_step = capacities(config, model.config)
    plain = Device(model, DeviceConfig(of_step))
    adapted = Device(model, DeviceConfig(of_step, max_loras=NUM_LORAS, max_lora_rank=rank))
    for slot in range(NUM_LORAS):
        adapted.set_lora(slot, adapter(model.config, rank))

    compiled = set[tuple[Device, str]]()

    def step(device: Device, slots: list[int | None]) -> Callable[[], Seconds]:
        batch = batch_of(device, slots)
        if (device, batch.bucket.name) not in compiled:
            compiled.add((device, batch.bucket.name))
            device.use(batch.bucket, device.compile_forward(batch.bucket))

        def run() -> Seconds:
            begin, begin_processor = time.perf_counter(), time.process_time()
            jax.block_until_ready(device.forward(batch).logits)
            return Seconds(time.perf_counter() - begin, time.process_time() - begin_processor)

        return run

    for num in (1, 8, 32):
        none = step(plain, [None] * num)
        steps = {
            "none": none,
            "again": none,
            "unused": step(adapted, [None] * num),
            "one": step(adapted, [0] * num),
            "each": step(adapted, list(range(num))),
        }
        if num == 1:
            del steps["each"]  # that is `one`
        times = run_rounds(steps, rounds)
        least = min(each.wall for each in times["none"])
        log(f"rank {rank}, {num:2} requests: none {1e3 * least:.1f} ms at least")
        for name in [*steps][1:]:
            wall, processor = (
                cost([each[i] for each in times[name]], [each[i] for each in times["none"]])
                for i in range(2)
            )
            goal = {("one", num): 0.08, ("each", NUM_LORAS): 0.2}.get((name, num))
            verdict = "" if goal is None else f", at most {goal:.0%}: {wall.verdict(goal)}"
            log(f"  {name:6} wall {wall}, processor {processor}{verdict}")


def run_rounds(steps: dict[str, Callable[[], Seconds]], rounds: int) -> dict[str, list[Seconds]]:
    """The times of each step in each round, after one round that is not counted."""
    names, times = [*steps], {name: list[Seconds]() for name in steps}
    for i in range(-1, rounds):
        first = i % len(names)
        for name in names[first:] + names[:first]:
            found = steps[name]()
            if i >= 0:
                times[name].append(found)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="qwen3-0.6b", choices=[*shapes.SHAPES])
    parser.add_argument("--tiny", action="store_true", help="tries the script on any machine")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--ranks", default="8,16")
    parser.add_argument("--rounds", type=int, default=41)
    args = parser.parse_args()
    model = shapes.make_model(args.shape, args.tiny, args.dtype)
    if jax.default_backend() == "cpu":
        model = model._replace(params=models.pack_params(model.params, model.config))
    for rank in map(int, args.ranks.split(",")):
        measure(model, rank, args.rounds)


if __name__ == "__main__":
    main()
