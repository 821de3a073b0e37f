"""Processor time of a decode that reads selected pages (Quest), beside one that reads all.

    python -m benchmarks.selected_pages [--tiny]

The weights are those of the bundled model in float32, whose positions are made as many as the
longest text needs: the tokens mean nothing there. One engine for each row, in turns; a time is the
median of its turns, of all threads of the process.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time

import numpy as np

from jax_attn import models
from jax_attn.serve._engine.engine import Engine
from jax_attn.serve._engine.engine_config import EngineConfig
from jax_attn.serve._scheduling.quest import Quest
from jax_attn.serve._scheduling.request import SamplingParams, Sequence

PAGE = 16
STEPS = 10  # of a turn


def make_engine(model: models.Model, num_tokens: int, pages: int | None, turns: int) -> Engine:
    """An engine that has read a prompt and goes on with it."""
    selection = None if pages is None else Quest(pages)
    limits = EngineConfig(
        num_pages=-(-model.config.max_positions // PAGE), page_size=PAGE, max_running=1,
        max_step_tokens=256, kv_select=selection,
    )  # fmt: skip
    engine = Engine(model, limits)
    engine.warm_up()
    tokens = np.random.default_rng(0).integers(1, model.config.vocab_size, num_tokens).tolist()
    params = SamplingParams((turns + 1) * STEPS, temperature=0, ignore_eos=True)
    seq = Sequence("text", "text", tokens, params)
    engine.submit([seq])
    while seq.num_output < 2:
        engine.step()
    return engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="*", default=[1400, 8000, 16000])
    parser.add_argument("--shares", type=float, nargs="*", default=[0.5, 0.25], help="of the pages")
    parser.add_argument("--turns", type=int, default=18)
    parser.add_argument("--tiny", action="store_true", help="tries the script")
    args = parser.parse_args()
    if args.tiny:
        args.lengths, args.turns = [200], 1
    bundled = models.load(models.BUNDLED, dtype="float32")
    print("tokens  pages read  ms/token")
    for num_tokens in args.lengths:
        positions = num_tokens + (args.turns + 1) * STEPS
        model = bundled._replace(
            config=dataclasses.replace(bundled.config, max_positions=positions)
        )
        pages = [None, *(int(share * num_tokens / PAGE) for share in args.shares)]
        engines = {each: make_engine(model, num_tokens, each, args.turns) for each in pages}
        times: dict[int | None, list[float]] = {each: [] for each in pages}
        for _ in range(args.turns):
            for each, engine in engines.items():
                begin = time.process_time()
                for _ in range(STEPS):
                    engine.step()
                times[each].append((time.process_time() - begin) / STEPS)
        for each, found in times.items():
            name = "all" if each is None else each
            print(f"{num_tokens:6}  {name:>10}  {1e3 * statistics.median(found):8.2f}", flush=True)


if __name__ == "__main__":
    main()
