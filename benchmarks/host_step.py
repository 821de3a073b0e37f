"""The host's time per step: the engine, full of decodes, on a fake device that takes no time.

    python -m benchmarks.host_step
    python -m benchmarks.host_step --waiting 1000 --running 16 --context 4096
                                                       and waiting requests without free pages

Sequences, pages, plan and texts are those of a real server; only the two executables are not run.
These times do not include JAX's time to launch them.
"""

from __future__ import annotations

import argparse
import cProfile
import dataclasses
import itertools
import pstats
import statistics
import time
from typing import Any

import numpy as np

from benchmarks import shapes
from benchmarks.report import log
from jax_attn.models import Model
from jax_attn.serve._engine.engine import Engine
from jax_attn.serve._engine.engine_config import EngineConfig
from jax_attn.serve._engine.sampling import Sampled
from jax_attn.serve._scheduling.events import PHASES
from jax_attn.serve._scheduling.request import SamplingParams, Sequence

VOCAB = shapes.SHAPES["qwen3-0.6b"]["vocab_size"]


def make_engine(
    num_running: int, context: int, num_waiting: int = 0, burst_steps: int = 1
) -> Engine:
    """Makes an engine that is decoding: a small model with the vocabulary of a large one.

    Waiting requests have free slots but no free pages: a prompt needs the pages that are reserved
    for running requests to grow.
    """
    model = shapes.make_model("qwen3-0.6b", tiny=True, dtype="float32")
    config = dataclasses.replace(model.config, vocab_size=VOCAB)  # its weights are never used
    model = Model(config, model.params, shapes.make_tokenizer(VOCAB))
    num_pages = num_running * (context + 512) // 16
    if num_waiting:
        num_left = (context - 1) // 16 + num_running  # the reserve for growth admits no request
        num_pages = (num_running * context // 16 + num_left) * 100 // 99
    capacities = EngineConfig(
        num_pages=num_pages,
        max_running=num_running + bool(num_waiting),
        max_step_tokens=8192,
        max_waiting=num_running + num_waiting,
        burst_steps=burst_steps,
    )
    engine = Engine(model, capacities)
    generator = np.random.default_rng(0)
    vocab = model.config.vocab_size
    answers = itertools.cycle(generator.integers(2, 4096, (64, num_running)).astype(np.int32))

    def sample(*_: Any) -> Sampled:
        return Sampled(next(answers))

    engine.device.forward = lambda _: "scores"  # type: ignore
    engine.device.sample = sample  # type: ignore[method-assign]
    for i in range(num_running + num_waiting):
        tokens = generator.integers(2, vocab, context).tolist()
        params = SamplingParams(max_tokens=500, temperature=0.0, seed=i, ignore_eos=True)
        engine.submit([Sequence(f"{i}", f"{i}", tokens, params)])
        if i == num_running - 1:
            while engine.scheduler.waiting or engine.step_stats.num_decodes < num_running:
                engine.step()
    return engine


def measure(engine: Engine, num_calls: int) -> dict[str, float]:
    """Returns median microseconds of a decode step by phase; "step" is processor time.

    num_calls: of Engine.step. One that launches a burst counts as the steps of it.
    """
    phases: dict[str, list[float]] = {phase: [] for phase in (*PHASES, "step")}
    for _ in range(num_calls):
        begin = time.thread_time()
        engine.step()
        stats = engine.step_stats
        seconds = stats.seconds | {"step": time.thread_time() - begin}
        for phase, s in seconds.items():
            phases[phase].append(1e6 * s / stats.num_steps)
    return {phase: round(statistics.median(us), 1) for phase, us in phases.items()}


def profile(engine: Engine, num_steps: int) -> None:
    with cProfile.Profile() as profiler:
        for _ in range(num_steps):
            engine.step()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(30)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.host_step", description=__doc__.splitlines()[0]
    )
    add = parser.add_argument
    add("--running", type=int, nargs="+", default=[1, 64, 256], help="sequences that decode")
    add("--context", type=int, default=512, help="tokens of each")
    add("--waiting", type=int, default=0, help="sequences that wait for pages")
    add("--steps", type=int, default=200)
    add("--burst-steps", type=int, nargs="+", default=[1], help="see EngineConfig")
    add("--profile", action="store_true", help="say which functions, instead")
    arguments = parser.parse_args()
    for num_running, burst in itertools.product(arguments.running, arguments.burst_steps):
        load = num_running, arguments.context, arguments.waiting, burst
        engine = make_engine(*load)
        num_calls = arguments.steps // burst
        if arguments.profile:
            profile(engine, num_calls)
        else:
            us = measure(engine, num_calls)
            what = f"{num_running} x {arguments.context}, {arguments.waiting} wait, burst {burst}"
            log(f"{what}: {us} us")


if __name__ == "__main__":
    main()
