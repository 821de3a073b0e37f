"""The engine alone under a closed loop of clients, with bursts and without, in turns.

    python -m benchmarks.step_bursts                       Qwen3-0.6B's shape, random weights
    python -m benchmarks.step_bursts --bundled             the bundled model, for a CPU

Each client sends its next request when the last has ended. "decodes": outputs so long that nobody
comes or goes. A line has tokens/s, microseconds of a step and of the engine thread's processor, how
many of the steps were in bursts, the time to the first token, and the host's phases of a step.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator

import numpy as np

from benchmarks import shapes
from benchmarks.report import log
from jax_attn import models
from jax_attn.serve._engine.engine import Engine
from jax_attn.serve._engine.engine_config import EngineConfig
from jax_attn.serve._scheduling.request import SamplingParams, Sequence

ENDLESS = 1 << 20  # tokens of an output


class Clients:
    """num_clients of them, on an engine of their own that has a compiled device.

    lengths: tokens of outputs, uniform between. temperature 1, so that there is noise to sample.
    """

    def __init__(self, engine: Engine, prompt: int, lengths: tuple[int, int]):
        self.engine, self.prompt, self.lengths = engine, prompt, lengths
        self.ids = itertools.count()
        self.random = np.random.default_rng(0)
        self.sent: dict[str, float] = {}  # when, until the first token comes
        self.first: list[float] = []  # seconds to first tokens

    def send(self, num: int) -> None:
        seqs = []
        for _ in range(num):
            name = f"{next(self.ids)}"
            tokens = self.random.integers(2, self.engine.model.config.vocab_size, self.prompt)
            most = self.engine.max_sequence_tokens - self.prompt
            length = min(int(self.random.integers(*self.lengths, endpoint=True)), most)
            params = SamplingParams(max_tokens=length, seed=int(name), ignore_eos=True)
            seqs.append(Sequence(name, name, tokens.tolist(), params))
            self.sent[name] = time.perf_counter()
        if seqs:
            self.engine.submit(seqs)

    def step(self) -> int:
        """Runs a step, and answers the requests that have ended by new ones. Returns tokens."""
        events = self.engine.step()
        now = time.perf_counter()
        for event in events:
            if event.tokens and event.seq_id in self.sent:
                self.first.append(now - self.sent.pop(event.seq_id))
        self.send(sum(event.finish_reason is not None for event in events))
        return sum(len(event.tokens) for event in events)

    def run(self, num_clients: int, seconds: float) -> str:
        engine = self.engine
        self.send(num_clients)
        while len(self.first) < num_clients:
            self.step()
        self.first.clear()
        before, begin, processor = engine.stats(), time.perf_counter(), time.thread_time()
        num_tokens = num_in_bursts = 0
        while (wall := time.perf_counter() - begin) < seconds:
            num_tokens += self.step()
            stats = engine.step_stats
            num_in_bursts += stats.num_steps if stats.num_steps > 1 else 0
        processor, after = time.thread_time() - processor, engine.stats()
        num_steps = after["steps"] - before["steps"]
        for seq in (*engine.scheduler.running, *engine.scheduler.waiting):
            engine.abort(seq.id)
        while engine.has_work:
            engine.step()
        phases = {
            name: round(1e6 * (s - before["step_seconds"][name]) / num_steps)
            for name, s in after["step_seconds"].items()
            if s > before["step_seconds"][name]
        }
        line = (
            f"{num_tokens / wall:8.0f} tokens/s, {1e6 * wall / num_steps:6.0f} us a step,"
            f" {1e6 * processor / num_steps:6.0f} of the thread's processor,"
            f" {num_in_bursts / num_steps:4.0%} in bursts, {phases}"
        )
        if self.first:
            p50, p99 = 1e3 * np.quantile(self.first, (0.5, 0.99))
            line += f", first token {p50:.0f} ms, P99 {p99:.0f}"
        return line


def engines(model: models.Model, config: EngineConfig, bursts: list[int]) -> Iterator[Engine]:
    """Engines that share a device, which the first one compiles."""
    device = None
    for burst_steps in bursts:
        engine = Engine(model, EngineConfig(**vars(config) | {"burst_steps": burst_steps}))
        if device is None:
            device = engine.device
            names = engine.warm_up()
            log(f"{len(names)} executables")
        engine.device = device
        yield engine


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step_bursts", description=__doc__.splitlines()[0]
    )
    add = parser.add_argument
    add("--bundled", action="store_true", help="the bundled model, float32")
    add("--clients", type=int, nargs="+", default=[64, 256])
    add("--bursts", type=int, nargs="+", default=[1, 4, 8], help="in turns; see EngineConfig")
    add("--prompt", type=int, default=128, help="tokens")
    add("--seconds", type=float, default=2.0, help="of a measurement")
    add("--turns", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.bundled:
        model = models.load(models.BUNDLED, dtype="float32")
    else:
        model = shapes.make_model("qwen3-0.6b", tiny=False, dtype="bfloat16")
    most = max(arguments.clients)
    config = EngineConfig(
        num_pages=most * 64,
        max_running=most,
        max_step_tokens=max(512, 2 * most),
        prefill_chunk=256,
        max_prefill_chunk=512,
    )
    made = dict(zip(arguments.bursts, engines(model, config, arguments.bursts), strict=True))
    loads = {"decodes": (ENDLESS, ENDLESS), "outputs of 64 to 128": (64, 128)}
    for _ in range(arguments.turns):
        for (load, lengths), num_clients in itertools.product(loads.items(), arguments.clients):
            for burst_steps, engine in made.items():
                clients = Clients(engine, arguments.prompt, lengths)
                line = clients.run(num_clients, arguments.seconds)
                log(f"{load}, {num_clients} clients, bursts of {burst_steps}: {line}")


if __name__ == "__main__":
    main()
