"""Experiments of papers that no other benchmark has (docs/papers.md), as rows by name.

    python -m benchmarks.papers                    -> results/DEVICE-papers.json
    python -m benchmarks.papers --select lean jump --seconds 60 --out FILE
    python -m benchmarks.papers --tiny             tries the script; writes nothing

A row compares jax_attn with itself: its peers are other settings of the same batch. On a GPU a time
is that of the device (timing.py). On a CPU it is processor time of one call, the median of several,
all settings in turns: it means something on a machine with other work, too. Limit the process to
one processor there (taskset -c 0), because waiting threads count as well.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_attn as ja
from benchmarks import ops, report, timing, workloads
from benchmarks.bench import Bench
from benchmarks.report import Row, log
from benchmarks.workloads import Workload
from jax_attn import models
from jax_attn._spec.tuning import this_cpu
from jax_attn.serve._engine.engine import Engine
from jax_attn.serve._engine.engine_config import EngineConfig
from jax_attn.serve._grammar import grammar
from jax_attn.serve._scheduling.request import SamplingParams, Sequence

RESULTS = Path(__file__).parent / "results"
SCHEDULES = {
    "balanced": "",
    "fixed_split": "schedule=fixed_split,kv_split=2048",  # FlashDecoding
    "no_split": "schedule=no_split",  # FlashAttention-2
}
MOST_KV_BYTES = 9 << 30  # of a row of `lean` that runs
PLANNED_FOR = "sm_90:132"  # the queues of an H100, wherever the plans are made
NUM_SAMPLES = 500  # LeanAttention's
NUM_TIMED_SAMPLES = 24  # the first of them
NUM_CPU_ROUNDS = 7

Call = Callable[..., Any]  # of q, k, v and the layer


def decodes(count: int, kv_len: int, heads: tuple[int, int], head_dim: int = 128) -> Workload:
    name = f"{count}x{kv_len}/{heads[0]}-{heads[1]}/d{head_dim}"
    return Workload(
        name, "decode", *heads, head_dim, 16, True, (1,) * count, (kv_len,) * count, None
    )


def lean_sweeps(shrink: int) -> Iterator[Workload]:
    """Context, heads and batch, one at a time, as LeanAttention's figures."""
    for head_dim in (128, 64):
        for kv_len in (1024 << i for i in range(10)):
            yield decodes(1, kv_len // shrink, (32, 32), head_dim)
        for heads in range(8, 65, 8):
            yield decodes(1, 65536 // shrink, (heads, heads), head_dim)
        for count in (1, 2, 3, 4, 6, 8, 12, 17, 24, 32):
            yield decodes(count, 8192 // shrink, (32, 32), head_dim)


def lean_samples(count: int) -> Iterator[Workload]:
    """Batches drawn over the same ranges."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        heads = 8 * int(rng.integers(1, 9))
        kv_len = int(1024 * 2 ** rng.uniform(0, 9))
        yield decodes(int(rng.integers(1, 33)), kv_len, (heads, heads), int(rng.choice((64, 128))))


def planned(count: int) -> dict[str, Any]:
    """Occupancy (mean load of a queue over the largest) and the largest load over that of
    `balanced`, of `count` samples. Loads are the planner's prediction; nothing runs."""
    largest, occupancy = np.zeros((2, len(SCHEDULES), count))
    for i, workload in enumerate(lean_samples(count)):
        for s, fields in enumerate(SCHEDULES.values()):
            spec = ops.make_spec(workload, ops.parse_variant(fields), PLANNED_FOR)
            costs = ops.make_plan(workload, spec).queue_costs()
            largest[s, i], occupancy[s, i] = costs.max(), costs.mean() / costs.max()
    return {
        name: {
            "occupancy_mean": round(float(occupancy[s].mean()), 3),
            "occupancy_least": round(float(occupancy[s].min()), 3),
            "over_balanced_mean": round(float((largest[s] / largest[0]).mean()), 3),
            "over_balanced_most": round(float((largest[s] / largest[0]).max()), 3),
        }
        for s, name in enumerate(SCHEDULES)
    }


def cpu_us(runs: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Processor time of a call of each, the median over rounds in which all take turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(NUM_CPU_ROUNDS):
        for name, run in runs.items():
            jax.block_until_ready(run())  # compiles; and nobody finds the caches of another
            begin = time.process_time()
            jax.block_until_ready(run())
            times[name].append(1e6 * (time.process_time() - begin))
    return {name: statistics.median(each) for name, each in times.items()}


def times_us(data: ops.AttentionData, calls: dict[str, Call]) -> dict[str, float]:
    """Time of each call, whose o is the next call's q."""

    def chain(call: Call) -> Callable[[int], Callable[[], Any]]:
        def make_chain(num_calls: int) -> Callable[[], Any]:
            @jax.jit
            def run(q: Any, k: Any, v: Any) -> Any:
                operands = dataclasses.replace(data, k=k, v=v)
                for i in range(num_calls):
                    q = call(q, *operands.kv(i))
                return q

            return lambda: run(data.q, data.k, data.v)

        return make_chain

    if not ops.on_gpu():
        return cpu_us({name: chain(call)(1) for name, call in calls.items()})
    length = ops.attention_chain_length(data.workload)
    return {name: timing.time_chain(chain(call), length).us for name, call in calls.items()}


def attend(plan: ja.AttentionPlan) -> Call:
    return lambda q, k, v, layer: ja.attention(q, k, v, plan, layer=layer)


class PaperBench(Bench):
    def run(self) -> None:
        if ops.on_gpu():
            self.measure_ceilings()
        for name in self.arguments.select or PARTS:
            self.guard(name, functools.partial(PARTS[name], self))

    @property
    def shrink(self) -> int:
        """Divides lengths: 1 on a GPU."""
        return 128 if self.arguments.tiny else 1 if ops.on_gpu() else 8

    def has_time(self) -> bool:
        return report.elapsed_s() < self.arguments.seconds

    def add(self, workload: Workload, name: str, us: dict[str, float], **more: Any) -> None:
        """A row of the first of `us`; the others are its peers."""
        ours, *peers = us
        row = report.workload_row(workload, us[ours], ours=ours, **more)
        row.workload, row.peers = name, {peer: us[peer] for peer in peers}
        self.rows.append(row)
        times = ", ".join(f"{key} {value:.1f} us" for key, value in us.items())
        log(f"{name}: {times} {more or ''}")

    def check(self, data: ops.AttentionData, call: Call, name: str) -> None:
        error = ops.relative_error(data, call(data.q, *data.kv(0)))
        if not error < data.workload.max_error:
            raise ValueError(f"{name}: relative error {error}")

    def lean(self) -> None:
        """LeanAttention: schedules as FlashAttention-2 and FlashDecoding, and occupancy. Times need
        a GPU: on one processor every schedule is the same work."""
        samples = lean_samples(NUM_TIMED_SAMPLES)
        for workload in itertools.chain(lean_sweeps(self.shrink), samples):
            too_large = workload.kv_bytes > MOST_KV_BYTES
            if not (ops.on_gpu() or self.arguments.tiny) or too_large or not self.has_time():
                continue
            data, calls, occupancy = ops.make_data(workload), {}, {}
            for schedule, fields in SCHEDULES.items():
                plan = ops.make_plan(workload, ops.make_spec(workload, ops.parse_variant(fields)))
                costs = plan.queue_costs()
                calls[schedule] = attend(plan)
                occupancy[schedule] = round(float(costs.mean() / costs.max()), 3)
            self.check(data, calls["balanced"], workload.id)
            us = times_us(data, calls)
            self.add(workload, f"lean/{workload.id}", us, occupancy=occupancy)

    def parallel(self) -> None:
        """FlashInfer's parallel generation: n answers to one prompt. `shared` is the default: where
        the planner predicts a gain."""
        for count in (1, 2, 4, 8, 16, 32, 64):
            shrink = self.shrink if self.arguments.tiny else 1
            self.shared("parallel", count, 2048 // shrink, 256 // shrink)

    def states(self) -> None:
        """Attention states of a long shared prompt (FlashInfer's cascade, Hydragen)."""
        for entry in workloads.load(kinds=["shared_prefix"]):
            shared = entry.shared_len // self.shrink
            self.shared(
                "states", entry.batch_size, shared, entry.kv_lens[0] // self.shrink - shared
            )

    def shared(self, name: str, count: int, shared_len: int, own: int) -> None:
        if not self.has_time():
            return
        own = max(own, 1)
        workload = dataclasses.replace(
            decodes(count, shared_len + own, (32, 8)), kind="shared_prefix", shared_len=shared_len
        )
        data = ops.make_data(workload)
        calls = {
            text: attend(ops.make_plan(workload, ops.make_spec(workload, {"share_prefixes": on})))
            for text, on in (("shared", None), ("not shared", False))
        }
        self.check(data, calls["shared"], name)
        self.add(workload, f"{name}/{count}x{shared_len}+{own}", times_us(data, calls))

    def unified(self) -> None:
        """vLLM's unified attention: decodes and prompt chunks in one call, and in a call each."""
        for entry in workloads.load(["mixed/128*"]):
            if not self.has_time():
                return
            workload = workloads.shrunk(entry, self.shrink)
            spec = ops.make_spec(workload, {})
            plan, data = ops.make_plan(workload, spec), ops.make_data(workload)
            first = next(i for i, n in enumerate(workload.qo_lens) if n > 1)
            parts = [_part(workload, spec, 0, first), _part(workload, spec, first, None)]
            cut = int(workload.qo_indptr[first])

            def in_two(
                q: Any, k: Any, v: Any, layer: Any, parts: Any = parts, cut: int = cut
            ) -> Any:
                pieces = q[:cut], q[cut:]
                found = [
                    ja.attention(piece, k, v, part, layer=layer)
                    for piece, part in zip(pieces, parts, strict=True)
                ]
                return jnp.concatenate(found)

            calls = {"one call": attend(plan), "two calls": in_two}
            for call in calls.values():
                self.check(data, call, entry.id)
            chunk = f"{workload.batch_size - first}x{workload.qo_lens[-1]}@{workload.kv_lens[-1]}"
            name = f"unified/{first}x1@{workload.kv_lens[0]}+{chunk}"
            self.add(workload, name, times_us(data, calls))

    def streaming(self) -> None:
        """StreamingLLM: keys rotated by their place in the cache, where the kernel loads them; or
        the whole cache rotated to a copy in each step. `no rotation` is attention alone."""
        for count in (1, 8):
            if not self.has_time():
                return
            workload = decodes(count, 2048 // self.shrink, (32, 8))
            data, dim = ops.make_data(workload), workload.head_dim
            inverse = (10000.0 ** (-np.arange(0, dim, 2) / dim)).astype(np.float32)
            angles = np.arange(workload.kv_lens[0], dtype=np.float32)[:, None] * inverse
            tables = {"cos": np.cos(angles), "sin": np.sin(angles)}
            variant = ja.Variant(k=_rotate_at, head_dim=dim, operands=tables)
            fused = ops.make_plan(workload, ops.make_spec(workload, {"variant": variant}))
            plain = ops.make_plan(workload, ops.make_spec(workload, {}))
            places = np.zeros((workload.num_pages, 16), np.int32)  # of the slots of each page
            for pages in workload.page_indices().reshape(count, -1):
                places[pages] = np.arange(16 * len(pages)).reshape(-1, 16)

            def load(q: Any, k: Any, v: Any, layer: Any, plan: Any = fused, x: Any = tables) -> Any:
                return ja.attention(q, k, v, plan, layer=layer, variant_operands=x)

            def copy(
                q: Any, k: Any, v: Any, layer: Any, plan: Any = plain, x: Any = tables,
                places: Any = places,
            ) -> Any:  # fmt: skip
                cos, sin = (jnp.asarray(x[name])[places][:, :, None] for name in ("cos", "sin"))
                rotated = _rotate(k[layer].astype(jnp.float32), cos, sin).astype(k.dtype)
                return ja.attention(q, rotated, v[layer], plan)

            self.agree(f"streaming/{workload.id}", data, load, copy)
            calls = {"rotated at load": load, "rotated to a copy": copy}
            us = times_us(data, calls | {"no rotation": attend(plain)})
            self.add(workload, f"streaming/{workload.id}", us)

    def agree(self, name: str, data: ops.AttentionData, *calls: Call) -> None:
        a, b = (np.float32(call(data.q, *data.kv(0))) for call in calls)
        error = np.linalg.norm(a - b) / np.linalg.norm(b)
        if not error < 1e-2:
            raise ValueError(f"{name}: relative difference {error}")

    def jump(self) -> None:
        """Jump-forward decoding (SGLang): an object of a JSON schema with long forced texts."""
        model = models.load(models.BUNDLED, "float32")
        runs: dict[str, Callable[[], Any]] = {}
        steps, texts = {}, {}
        for text, jumps in (("jump-forward", True), ("no jump-forward", False)):
            config = EngineConfig(
                num_pages=64, page_size=16, max_running=2, max_step_tokens=64,
                jump_forward=jumps, prefix_cache=False,
            )  # fmt: skip
            engine = Engine(model, config)
            engine.warm_up()

            def run(engine: Engine = engine, text: str = text) -> None:
                before = engine.stats()["steps"]
                params = SamplingParams(64, temperature=0, grammar=grammar.from_json_schema(SCHEMA))
                prompt = model.tokenizer.encode("person = ").ids
                engine.submit([Sequence("0", "0", prompt, params)])
                tokens: list[int] = []
                while engine.has_work:
                    tokens += [token for event in engine.step() for token in event.tokens]
                steps[text], texts[text] = engine.stats()["steps"] - before, tokens

            runs[text] = run
        us = cpu_us(runs)
        if texts["jump-forward"] != texts["no jump-forward"]:
            log("jump: tokens differ between the two")
        row = Row(
            "jump/json-schema", us["jump-forward"], peers={"no jump-forward": us["no jump-forward"]}
        )
        row.more = {"ours": "jump-forward", "steps": steps, "tokens": len(texts["jump-forward"])}
        self.rows.append(row)
        log(f"jump: {us} {steps}")

    def write(self) -> None:
        out = self.arguments.out
        isa = f"cpu-{ja._core.cpu_isa()}"
        if out is None:
            device = report.device_name() if ops.on_gpu() else isa
            out = RESULTS / f"{device}-papers.json"
        samples = 8 if self.arguments.tiny else NUM_SAMPLES
        more = {"planned_for": PLANNED_FOR, "samples": samples, "planned": planned(samples)}
        log(f"{samples} samples planned for {PLANNED_FOR}: {more['planned']}")
        if self.arguments.tiny and self.arguments.out is None:
            return
        more["clock"] = "device" if ops.on_gpu() else "processor time"
        if not ops.on_gpu():
            more["processor"] = this_cpu().name
            more["threads"] = len(os.sched_getaffinity(0))
        report.write(out, self.rows, self.ceilings, failures=self.failures, **more)


def _part(workload: Workload, spec: Any, begin: int, end: int | None) -> ja.AttentionPlan:
    """The plan of requests [begin, end) over the same pages."""
    requests = slice(begin, end)
    qo_lens, kv_lens = workload.qo_lens[requests], workload.kv_lens[requests]
    indptr = workload.page_indptr[begin:][: len(kv_lens) + 1]
    pages = workload.page_indices()[indptr[0] : indptr[-1]]
    small = dataclasses.replace(
        spec, max_batch=len(kv_lens), max_qo_tokens=sum(qo_lens), max_kv_pages=len(pages)
    )
    qo_indptr = np.concatenate([[0], np.cumsum(qo_lens)]).astype(np.int32)
    return ja.plan(small, qo_indptr, np.asarray(kv_lens, np.int32), indptr - indptr[0], pages)


def _rotate(x: Any, cos: Any, sin: Any) -> Any:
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _rotate_at(x: Any, at: ja.At, cos: Any, sin: Any) -> Any:
    half = x.shape[0] // 2
    a, b, c, s = x[:half], x[half:], cos[at.kv_pos], sin[at.kv_pos]
    return jnp.concatenate([a * c - b * s, b * c + a * s])


SCHEMA = {
    "type": "object",
    "properties": {
        "name_of_the_character": {"type": "string", "pattern": "^[a-z]{2,6}$"},
        "unit_of_measurement": {"const": "kilograms of feathers"},
        "weight": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name_of_the_character", "unit_of_measurement", "weight"],
    "additionalProperties": False,
}
PARTS: dict[str, Callable[[PaperBench], None]] = {
    "lean": PaperBench.lean,
    "parallel": PaperBench.parallel,
    "states": PaperBench.states,
    "unified": PaperBench.unified,
    "streaming": PaperBench.streaming,
    "jump": PaperBench.jump,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--select", nargs="*", choices=list(PARTS), help="parts; all without it")
    parser.add_argument("--seconds", type=float, default=240, help="after which no row starts")
    parser.add_argument("--tiny", action="store_true", help="short lengths: tries the script")
    parser.add_argument("--out", type=Path, help="instead of results/DEVICE-papers.json")
    return PaperBench(parser.parse_args()).main()


if __name__ == "__main__":
    raise SystemExit(main())
