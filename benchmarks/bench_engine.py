"""The serving engine alone, in process, on random weights of known shapes: no files, no HTTP.

    python -m benchmarks.bench_engine                      -> results/<device>-engine.json
    python -m benchmarks.bench_engine --tiny --out FILE    tries the script on any machine
    python -m benchmarks.bench_engine --cpu                on a CPU -> results/cpu-<isa>-engine.json

On a CPU it measures decodes of Qwen3-0.6B's shapes, for one client and for several. Peers are
transformers and llama.cpp, if installed in this Python or in those of --peer-python. They are
interleaved with ours.

A step's floor is computed from its own sequences: one read of weights, keys and values, or its
matmuls, at the ceilings measured in the same run. Steps overlap, so the time of a step runs from
when the host has the previous step's tokens to when it has this step's tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import bench_cpu, device_trace, ops, report, shapes
from benchmarks.bench import Bench
from benchmarks.report import Ceilings, Row, log
from jax_attn import _core
from jax_attn.models import Model
from jax_attn.serve._engine.engine import Engine
from jax_attn.serve._engine.engine_config import EngineConfig, capacities
from jax_attn.serve._scheduling.events import PHASES
from jax_attn.serve._scheduling.request import SamplingParams, Sequence
from jax_attn.serve._scheduling.scheduler import Scheduler


@dataclasses.dataclass(frozen=True)
class Load:
    """The sizes of the measurements. `tiny` is for trying the script."""

    num_running: int  # of the decode and the shared prefix
    max_step_tokens: int
    context: int  # of the decode
    shared_prefix: int
    own_prompt: int  # tokens after it
    num_requests: int  # of the throughput measurement
    lengths: tuple[int, int]  # of its prompts and outputs, uniform between
    num_traced: int  # steps

    @property
    def num_measured(self) -> int:
        """The number of decode steps; their mean context is `context`."""
        return self.context // 8

    def throughput_name(self, shape: str) -> str:
        low, high = self.lengths
        return f"serve/{shape}/throughput/{self.num_requests}x{low}..{high}"

    def throughput_lengths(self) -> np.ndarray:
        """Tokens of prompts and of outputs, [2, num_requests]."""
        low, high = self.lengths
        return np.random.default_rng(0).integers(low, high + 1, (2, self.num_requests))


FULL = Load(64, 8192, 1024, 2048, 128, 256, (100, 1024), 16)
TINY = Load(8, 256, 64, 64, 16, 12, (4, 40), 4)
NUM_PAGES = {"llama-3.1-8b": 10240, "qwen3-0.6b": 12288}  # 22 GB each; the tiny ones take less
PAGE_SIZE = 16
# XLA options for decodes: Triton matmuls where XLA predicts that they are faster.
VARIANTS = {
    "triton": {"xla_gpu_enable_triton_gemm": True},
}


def make_prompt(seed: int, length: int, vocab_size: int) -> list[int]:
    return np.random.default_rng(seed).integers(2, vocab_size, length).tolist()


class Step:
    """The work of one step, and its time."""

    def __init__(self, entries: Iterable[Any]):
        self.qo_lens = [entry.num_tokens for entry in entries]
        self.kv_lens = [entry.seq.num_computed + entry.num_tokens for entry in entries]
        self.us = 0.0

    @property
    def is_decode(self) -> bool:
        return max(self.qo_lens) == 1


class Driver:
    """A compiled engine that records its steps."""

    def __init__(self, model: Model, config: EngineConfig):
        self.model, self.engine = model, Engine(model, config)
        begin, device = time.perf_counter(), self.engine.device
        num_executables = len(self.engine.warm_up())
        log(f"{num_executables} executables in {time.perf_counter() - begin:.1f} s")
        self._plan = device.plan
        device.plan = self._recorded_plan  # type: ignore[method-assign]
        self._planned: list[Step] = []
        self._ids = itertools.count()
        self.weight_bytes = shapes.weight_bytes(model)
        self.kv_token_bytes = shapes.kv_token_bytes(model)

    def _recorded_plan(self, entries: Any) -> Any:
        self._planned.append(Step(entries))
        return self._plan(entries)

    @property
    def num_compiles(self) -> int:
        """Compilations since the warm-up."""
        return self.engine.device.num_compiles_after_warm_up

    def restart(self, **changes: Any) -> None:
        """Starts with an empty scheduler on the same device. changes: to the engine's config."""
        assert not self.engine.has_work
        config = dataclasses.replace(self.engine.config, **changes)
        self.engine.scheduler = Scheduler(capacities(config, self.model.config))

    def prompt(self, length: int) -> list[int]:
        return make_prompt(next(self._ids), length, self.model.config.vocab_size)

    def submit(
        self, prompts: list[list[int]], max_tokens: int | list[int], temperature: float = 0.0
    ) -> None:
        each = max_tokens if isinstance(max_tokens, list) else [max_tokens] * len(prompts)
        self.engine.submit(
            [
                Sequence(
                    id=(name := f"{next(self._ids)}"),
                    request_id=name,
                    tokens=prompt,
                    params=SamplingParams(
                        max_tokens=n, temperature=temperature, seed=int(name), ignore_eos=True
                    ),
                )
                for prompt, n in zip(prompts, each, strict=True)
            ]
        )

    def run(self, num_steps: int | None = None) -> list[Step]:
        """Runs until no work is left, or until num_steps are done and the next is launched."""
        steps: list[Step] = []
        last = time.perf_counter()
        while self.engine.has_work and (num_steps is None or len(steps) <= num_steps):
            self._planned.clear()
            self.engine.step()
            now = time.perf_counter()
            if steps and not steps[-1].us:  # this call waited for that step
                steps[-1].us = 1e6 * (now - last)
            last = now
            steps += self._planned
        return [step for step in steps if step.us]

    def mean_ttft_us(self, prompts: list[list[int]]) -> float:
        """Mean time from the submission of all prompts to the first token of each."""
        first: dict[str, float] = {}
        begin = time.perf_counter()
        self.submit(prompts, 8)
        while self.engine.has_work:
            events = self.engine.step()
            now = time.perf_counter()
            for event in events:
                first.setdefault(event.seq_id, now)
        return 1e6 * (statistics.mean(first.values()) - begin)

    def abort_all(self) -> None:
        for seq in (*self.engine.scheduler.running, *self.engine.scheduler.waiting):
            self.engine.abort(seq.id)
        self.run()

    def recover(self) -> None:
        """Makes the engine usable again after an error within or between steps."""
        self.engine.recover("The benchmark failed.")
        self.abort_all()
        self.restart()

    # ---- floors --------------------------------------------------------------------------------

    def num_bytes(self, step: Step) -> float:
        """Bytes of a step, with reads of the cache up to each length and writes of new tokens."""
        tokens = sum(step.kv_lens) + sum(step.qo_lens)
        return self.weight_bytes + self.kv_token_bytes * tokens

    def flops(self, step: Step) -> float:
        return shapes.step_flops(self.model, step.qo_lens, step.kv_lens)

    def floor_us(self, step: Step, ceilings: Ceilings) -> float:
        bytes_us = self.num_bytes(step) / ceilings.bytes_per_us
        return max(bytes_us, self.flops(step) / ceilings.flops_per_us)


PEERS = {"transformers_decode": "transformers", "llama_cpp_decode": "llama.cpp"}
"""Modules of benchmarks.peers, and what each measures."""
WAITS = ("active", "passive")


class Peer:
    """transformers or llama.cpp in a process of its own (peers/decode_turns.py).

    module: a module of benchmarks.peers. waiting: a value of OMP_WAIT_POLICY. Spinning threads are
    faster on idle processors, and many times slower on busy ones. The process is stopped while
    others are measured, because its threads would spin on.
    """

    def __init__(self, python: str, module: str, waiting: str, config: Any, dtype: str):
        """Starts the process. Raises OSError if it does not start."""
        self.name = f"{PEERS[module]}, {waiting} waits"
        command = [python, "-m", f"benchmarks.peers.{module}"]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_WAIT_POLICY": waiting},
        )
        log(self._ask({"config": config, "dtype": dtype})["note"])

    def steps_us(self, clients: int, context: int, steps: int) -> list[float]:
        us: list[float] = self._ask({"clients": clients, "context": context, "steps": steps})["us"]
        return us

    def close(self) -> None:
        self._process.send_signal(signal.SIGCONT)
        self._process.communicate()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.send_signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        if not (line := self._process.stdout.readline()):
            raise OSError(f"{self.name} ended with status {self._process.wait()}")
        self._process.send_signal(signal.SIGSTOP)
        answer: dict[str, Any] = json.loads(line)
        return answer


class CpuBench(Bench):
    """Decodes on a CPU, in f32 and bf16."""

    SHAPE = "qwen3-0.6b"

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__(arguments)
        self.path = arguments.out or report.RESULTS / f"cpu-{_core.cpu_isa()}-engine.json"
        self.context, self.steps, self.rounds = (8, 2, 2) if arguments.tiny else (64, 6, 4)

    def run(self) -> None:
        for dtype in ("float32", "bfloat16"):
            self.guard(dtype, lambda d=dtype: self.decodes(d))

    def write(self) -> None:
        report.write(
            self.path,
            self.rows,
            self.ceilings,
            device=bench_cpu.processor(),
            failures=self.failures,
        )

    def decodes(self, dtype: str) -> None:
        raw = shapes.SHAPES[self.SHAPE] | (shapes.TINY if self.arguments.tiny else {})
        peers: list[Peer] = []
        try:
            pythons = self.arguments.peer_python
            for python, module, waiting in itertools.product(pythons, PEERS, WAITS):
                try:
                    peers.append(Peer(python, module, waiting, raw, dtype))
                except OSError as error:
                    log(f"without a peer: {error}")
            model = shapes.make_model(self.SHAPE, self.arguments.tiny, dtype)
            config = EngineConfig(num_pages=1024, max_running=32, max_step_tokens=128)
            driver = Driver(model, config)
            del model
            for clients in (1, 8, 32):
                self.decode(dtype, clients, driver, peers)
        finally:
            for peer in peers:
                peer.close()

    def decode(self, dtype: str, clients: int, driver: Driver, peers: list[Peer]) -> None:
        """Measures our decodes, the peers' and memory bandwidth, interleaved."""
        num_tokens = self.context + (self.steps + 4) * (self.rounds + 1)
        driver.submit([driver.prompt(self.context) for _ in range(clients)], num_tokens)
        while any(seq.num_output == 0 for seq in driver.engine.scheduler.running) or (
            len(driver.engine.scheduler.running) < clients
        ):
            driver.run(1)
        ours: list[Step] = []
        theirs: dict[str, list[float]] = {peer.name: [] for peer in peers}
        reads: list[float] = []
        for _ in range(self.rounds):
            ours += driver.run(self.steps)
            jax.block_until_ready(driver.engine.device.newest)  # wait for the launched step
            for peer in peers:
                theirs[peer.name] += peer.steps_us(clients, self.context, self.steps)
            reads.append(bench_cpu.read_bytes_per_us())
        assert all(step.is_decode and len(step.qo_lens) == clients for step in ours)
        driver.abort_all()
        driver.restart()
        self.ceilings = Ceilings(max(reads), bench_cpu.matmul_flops_per_us(dtype))
        us = statistics.median(step.us for step in ours)
        num_bytes = driver.num_bytes(ours[0])
        row = Row(
            f"serve/{self.SHAPE}/{dtype}/decode/{clients}x{self.context}",
            us,
            bytes=num_bytes,
            parts_floor_us=num_bytes / max(reads),
            peers={name: statistics.median(us) for name, us in theirs.items()},
            more={"tokens_per_s": round(1e6 * clients / us, 2), "read_gbps": max(reads) / 1e3},
        )
        self.rows.append(row)
        log(f"{row.workload}: {us:.0f} us, {row.more}, {row.peers}")
        self.write()


class EngineBench(Bench):
    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__(arguments)
        self.load = TINY if arguments.tiny else FULL
        self.driver: Driver | None = None  # for the shape being measured
        self.path = arguments.out or report.RESULTS / f"{report.device_name()}-engine.json"

    def run(self) -> None:
        log(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
        # Sustained, because steps follow each other without rests.
        self.guard("ceilings", lambda: self.measure_ceilings(sustained=True))
        for shape in self.arguments.shapes.split(","):
            self.measure_shape(shape)
            gc.collect()  # free weights and cache for the next shape

    def measure_shape(self, shape: str) -> None:
        if self.guard(f"{shape}, setup", lambda: self.make_driver(shape)):
            assert self.driver is not None
            for part in self.parts_of(shape):
                self.guard(f"{shape}, {part.__name__}", partial(part, shape, self.driver))
        self.driver = None

    def parts_of(self, shape: str) -> list[Callable[[str, Driver], None]]:
        if ":" in shape:
            return [self.decode]
        if shape == "qwen3-0.6b":
            return [self.throughput, self.variants]
        return [self.decode, self.variants, self.prefill, self.chunks, self.shared_prefix]

    def guard(self, name: str, action: Callable[[], Any]) -> bool:
        if report.elapsed_s() > self.arguments.budget:
            self.fail(name, f"{self.arguments.budget} s are over")
            return False
        if not (done := super().guard(name, action)):
            if self.driver is not None:
                self.driver.recover()
        self.write()  # keeps the results of a run that is cut short
        return done

    def write(self) -> None:
        if self.rows:
            report.write(self.path, self.rows, self.ceilings, failures=self.failures)

    # ---- parts ---------------------------------------------------------------------------------

    def make_driver(self, shape: str) -> None:
        load = self.load
        num_running = load.num_requests if shape == "qwen3-0.6b" else load.num_running
        base, _, kind = shape.partition(":")
        model = shapes.make_model(base, self.arguments.tiny, "bfloat16")
        if kind:
            model = model._replace(params=shapes.quantize(model.params, kind))
        log(f"{shape}: {shapes.weight_bytes(model) / 1e9:.2f} GB of weights")
        config = EngineConfig(
            num_pages=NUM_PAGES[base],
            page_size=PAGE_SIZE,
            max_running=num_running,
            max_step_tokens=load.max_step_tokens,
        )
        self.driver = Driver(model, config)

    def decode(self, shape: str, driver: Driver) -> None:
        load = self.load
        name = f"serve/{shape}/decode/{load.num_running}x{load.context}"
        self.measure_decode(name, driver, load.num_running, load.context, traced=True)
        name += "/sampled"
        self.measure_decode(name, driver, load.num_running, load.context, temperature=1.0)

    def measure_decode(
        self,
        name: str,
        driver: Driver,
        num_running: int,
        context: int,
        temperature: float = 0.0,
        traced: bool = False,
    ) -> None:
        """Measures steps of decodes only, around that context. temperature 0: greedy."""
        load, engine = self.load, driver.engine
        length = context - load.num_measured // 2 - 8
        num_tokens = load.num_measured + 2 * load.num_traced + 64
        driver.submit([driver.prompt(length) for _ in range(num_running)], num_tokens, temperature)
        driver.run(-(-num_running * length // load.max_step_tokens) + 4)
        num_compiles, before = driver.num_compiles, engine.stats()
        steps = driver.run(load.num_measured)
        after = engine.stats()
        assert all(step.is_decode and len(step.qo_lens) == num_running for step in steps)
        us = statistics.median(step.us for step in steps)
        num_bytes = statistics.mean(map(driver.num_bytes, steps))
        row = Row(
            name,
            us,
            bytes=num_bytes,
            min_bytes=num_bytes,
            flops=driver.flops(steps[len(steps) // 2]),
            more={
                "tokens_per_s": round(1e6 * num_running / us),
                "p99_step_us": round(float(np.quantile([step.us for step in steps], 0.99)), 1),
                "mean_context": round(statistics.mean(steps[len(steps) // 2].kv_lens)),
                "compilations": driver.num_compiles - num_compiles,
                "host_us": _phases_us(before, after),
            },
        )
        ratio = us / (row.floor_us(self.ceilings) or us)
        row.more["ratio_to_floor"] = round(ratio, 3)
        self.rows.append(row)
        log(f"{name}: {us:.0f} us a step, {ratio:.2f} x floor, {row.more}")
        if traced:
            self.guard(f"{name}, trace", lambda: self.trace(row, driver, us))
        driver.abort_all()
        driver.restart()

    def trace(self, row: Row, driver: Driver, step_us: float | None) -> None:
        """Profiles steps. step_us: time of a step without the profiler, for the idle share."""
        summary = device_trace.record(lambda: driver.run(self.load.num_traced), "jit_forward")
        if summary is None:
            log(f"{row.workload}: no GPU in the trace")
            return
        log(f"{row.workload}, traced: {summary.describe()}")
        n = summary.num_steps
        row.more |= {
            "traced_step_us": round(summary.span / n, 1),
            "busy_us": round(summary.busy / n, 1),
            "idle_between_percent": round(100 * summary.idle_between / summary.span, 2),
            "idle_within_percent": round(100 * summary.idle_within / summary.span, 2),
            "kernels_us": {
                name[:120]: [round(count / n, 2), round(total / n, 1)]
                for name, count, total in summary.kernels[:16]
            },
        }
        if step_us is not None:
            # May come out below 0: without the profiler, command buffers make kernels faster.
            idle = max(0.0, 1 - summary.busy / n / step_us)
            row.more["idle_percent_without_profiler"] = round(100 * idle, 2)
            log(f"{row.workload}: idle {100 * idle:.1f} % of a step without the profiler")

    def prefill(self, shape: str, driver: Driver) -> None:
        """Measures steps of prompts only, of one request and of eight."""
        num_tokens = self.load.max_step_tokens
        for num_prompts in (8, 1):
            length = num_tokens // num_prompts
            name = f"serve/{shape}/prefill/{num_prompts}x{length}"
            driver.submit([driver.prompt(length) for _ in range(12 * num_prompts)], 1)
            steps = [step for step in driver.run() if sum(step.qo_lens) == num_tokens][2:]
            us = statistics.median(step.us for step in steps)
            middle = steps[len(steps) // 2]
            flops, num_bytes = driver.flops(middle), driver.num_bytes(middle)
            share = flops / us / self.ceilings.flops_per_us
            more = {
                "tokens_per_s": round(1e6 * num_tokens / us),
                "percent_of_matmul_ceiling": round(100 * share, 1),
            }
            row = Row(name, us, bytes=num_bytes, min_bytes=num_bytes, flops=flops, more=more)
            self.rows.append(row)
            log(f"{name}: {us:.0f} us, {flops / us / 1e6:.0f} TFLOP/s, {more}")
            driver.restart()
            if num_prompts == 8:
                driver.submit([driver.prompt(length) for _ in range(6 * num_prompts)], 1)
                self.guard(f"{name}, trace", lambda r=row, t=us: self.trace(r, driver, t))
                driver.abort_all()
                driver.restart()

    def shared_prefix(self, shape: str, driver: Driver) -> None:
        """Measures mean time to first token with the prefix cache; the peer is without it."""
        load = self.load
        shared = driver.prompt(load.shared_prefix)
        ttft_us: dict[bool, float] = {}
        for prefix_cache in (False, True):
            driver.restart(prefix_cache=prefix_cache)
            prompts = [shared + driver.prompt(load.own_prompt) for _ in range(load.num_running)]
            ttft_us[prefix_cache] = driver.mean_ttft_us(prompts)
        stats = driver.engine.stats()
        total = stats["prompt_tokens"]
        ideal = 1 - (load.shared_prefix + load.num_running * load.own_prompt) / total
        hit = stats["prefix_hit_tokens"] / total
        more = {"hit_rate": round(hit, 4), "ideal": round(ideal, 4)}
        more["hit_rate_over_ideal"] = round(hit / ideal, 4)
        name = f"serve/{shape}/ttft/{load.num_running}x{load.shared_prefix}+{load.own_prompt}"
        peers = {"without prefix cache": ttft_us[False]}
        self.rows.append(Row(name, ttft_us[True], peers=peers, more=more))
        log(f"{name}: mean {ttft_us[True]:.0f} us, without {ttft_us[False]:.0f} us, {more}")
        driver.restart()

    def throughput(self, shape: str, driver: Driver) -> None:
        load = self.load
        lengths = load.throughput_lengths()
        prompts = [driver.prompt(int(n)) for n in lengths[0]]
        driver.submit(prompts, lengths[1].tolist())
        num_compiles, before = driver.num_compiles, driver.engine.stats()
        begin = time.perf_counter()
        steps = driver.run()
        us = 1e6 * (time.perf_counter() - begin)
        after = driver.engine.stats()
        num_output = int(lengths[1].sum())
        assert after["generated_tokens"] - before["generated_tokens"] == num_output
        floor_us = sum(driver.floor_us(step, self.ceilings) for step in steps)
        row = Row(
            load.throughput_name(shape),
            us,
            bytes=sum(map(driver.num_bytes, steps)),
            flops=sum(map(driver.flops, steps)),
            parts_floor_us=floor_us,
            more={
                "output_tokens_per_s": round(1e6 * num_output / us),
                "prompt_tokens": int(lengths[0].sum()),
                "output_tokens": num_output,
                "steps": len(steps),
                "percent_of_roof": round(100 * floor_us / us, 1),
                "median_decode_us": round(statistics.median(s.us for s in steps if s.is_decode)),
                "preemptions": after["preemptions"] - before["preemptions"],
                "compilations": driver.num_compiles - num_compiles,
                "host_us": _phases_us(before, after),
            },
        )
        self.rows.append(row)
        log(f"{row.workload}: {us / 1e6:.2f} s, roof {floor_us / 1e6:.2f} s, {row.more}")
        driver.restart()
        context = load.context // 2
        name = f"serve/{shape}/decode/{load.num_requests}x{context}"
        self.measure_decode(name, driver, load.num_requests, context, traced=True)

    def chunks(self, shape: str, driver: Driver) -> None:
        """Measures steps of decodes in which prompts fill the rest of a bucket: the cost of larger
        prefill chunks for decodes, and their gain for waiting prompts."""
        load, engine = self.load, driver.engine
        num_decodes = load.num_running - 1
        driver.restart(prefix_cache=False)
        scheduler = engine.scheduler
        driver.submit([driver.prompt(load.context) for _ in range(num_decodes)], 8 * load.context)
        driver.run(-(-num_decodes * load.context // load.max_step_tokens) + 4)
        for num_tokens in (bucket.num_tokens for bucket in engine.device.buckets):
            chunk = num_tokens - num_decodes
            if chunk < 4 * num_decodes:
                continue
            scheduler.config = dataclasses.replace(scheduler.config, prefill_chunk=chunk)
            driver.submit([driver.prompt(2 * chunk) for _ in range(5)], 1)
            steps = [s for s in driver.run(14) if sum(s.qo_lens) == num_tokens][1:]
            us = statistics.median(s.us for s in steps)
            middle = steps[len(steps) // 2]
            name = f"serve/{shape}/mixed/{num_decodes}x{load.context}+{chunk}"
            row = Row(name, us, flops=driver.flops(middle), bytes=driver.num_bytes(middle))
            row.parts_floor_us = driver.floor_us(middle, self.ceilings)
            row.more = {"prompt_tokens_per_s": round(1e6 * chunk / us), "steps": len(steps)}
            self.rows.append(row)
            log(f"{name}: {us:.0f} us, floor {row.parts_floor_us:.0f}, {row.more}")
            driver.run(8)  # the rest of the prompts
        driver.abort_all()
        driver.restart()

    def variants(self, shape: str, driver: Driver) -> None:
        """Measures the largest bucket of decodes, compiled with other options."""
        device, num_running = driver.engine.device, driver.engine.config.max_running
        bucket = next(b for b in device.buckets if b.num_tokens == num_running)
        context = self.load.context // (1 if num_running == self.load.num_running else 2)
        chosen = device.executable(bucket)
        for name, options in VARIANTS.items() if ops.on_gpu() else [("plain", {})]:
            name = f"serve/{shape}/decode/{num_running}x{context}#{name}"

            def measure(name: str = name, options: Any = options) -> None:
                begin = time.perf_counter()
                compiled = device.compile_forward(bucket, options)
                log(f"{name}: compiled in {time.perf_counter() - begin:.1f} s")
                device.use(bucket, compiled)
                self.measure_decode(name, driver, num_running, context, traced=True)

            self.guard(name, measure)
            device.use(bucket, chosen)


def _phases_us(before: dict[str, Any], after: dict[str, Any]) -> dict[str, float]:
    """Returns microseconds per step by phase of the engine's thread. "wait": for the device."""
    num_steps = max(1, after["steps"] - before["steps"])
    seconds = {p: after["step_seconds"][p] - before["step_seconds"][p] for p in PHASES}
    return {phase: round(1e6 * s / num_steps, 1) for phase, s in seconds.items()}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench_engine",
        description=__doc__.splitlines()[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    known = [*shapes.SHAPES, "llama-3.1-8b:int8", "llama-3.1-8b:int4"]
    add("--shapes", default=",".join(known), help="comma separated; behind a colon is"
        f" what the layers' matrices are quantised to, of {', '.join(shapes.QUANTIZED)}:"
        " %(default)s")  # fmt: skip
    add("--budget", type=float, default=540, help="seconds after which nothing new starts")
    add("--out", type=Path, help="result file instead of results/<device>-engine.json")
    add("--tiny", action="store_true", help="tiny models and loads: tries the script")
    add("--cpu", action="store_true", help="decodes on a CPU, beside transformers and llama.cpp")
    add(
        "--peer-python",
        nargs="+",
        default=[sys.executable],
        help="Pythons, of which one has torch and transformers, one llama_cpp and gguf (this one)",
    )
    arguments = parser.parse_args()
    for shape in arguments.shapes.split(","):
        base, _, kind = shape.partition(":")
        if base not in shapes.SHAPES or kind not in ("", *shapes.QUANTIZED):
            parser.error(
                f"--shapes: {shape!r}: expected one of {', '.join(shapes.SHAPES)}, alone or"
                f" with one of {', '.join(shapes.QUANTIZED)} behind a colon"
            )
    return arguments


if __name__ == "__main__":
    # Weights, two caches and NVRTC's kernels need nearly all of the memory: allocate it once.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    given = parse_arguments()
    sys.exit((CpuBench if given.cpu else EngineBench)(given).main())
