"""Many prompts with shared beginnings: `jax_attn.LLM`, in turns with the server over HTTP.

    python -m benchmarks.bench_llm [--prompts 10000] [--rounds 3]
    python -m benchmarks.bench_llm --prompts 64 --rounds 1        tries the script on any machine

The bundled model in float32. Prompts have one of 20 beginnings of 128 tokens and 9 of their own, in
random order; each gets 16 tokens. The server gets bodies of up to 1,000 prompts. Of the numbers of
bodies in flight (--bodies) the best counts in each round. Every run has other tokens, so that no
prefix is cached. Beside tokens per second there are tokens per second of processor time, of this
process and of the server's: other work on the machine changes those less. Needs Linux.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import gettempdir
from typing import NamedTuple

import numpy as np

import jax_attn
from benchmarks.http_client import Client, running_server
from benchmarks.report import log
from jax_attn import models

NUM_BEGINNINGS, BEGINNING, OWN, OUTPUT, BODY = 20, 128, 9, 16, 1000


class Rate(NamedTuple):
    """Tokens per second, of the clock and of the processor."""

    wall: float
    processor: float

    def __str__(self) -> str:
        return f"{self.wall:.0f} ({self.processor:.0f} by processor) tokens/s"


def children_seconds() -> float:
    """Processor time of the processes that this one has started, and of theirs, so far."""
    parents, seconds = dict[int, int](), dict[int, float]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        pid = int(path.parent.name)
        parents[pid] = int(fields[1])
        seconds[pid] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def is_ours(pid: int) -> bool:
        return parents.get(pid) == os.getpid() or (pid in parents and is_ours(parents[pid]))

    return sum(each for pid, each in seconds.items() if is_ours(pid))


def timed(run: Callable[[], int], clock: Callable[[], float]) -> Rate:
    """run: returns a number of tokens. clock: processor time."""
    begin, begin_processor = time.perf_counter(), clock()
    num_tokens = run()
    return Rate(
        num_tokens / (time.perf_counter() - begin), num_tokens / (clock() - begin_processor)
    )


def prompts_of(num: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    beginnings = rng.integers(300, 4000, (NUM_BEGINNINGS, BEGINNING))
    own = rng.integers(300, 4000, (num, OWN))
    which = rng.integers(0, NUM_BEGINNINGS, num)
    return np.concatenate([beginnings[which], own], axis=1).tolist()


def run_llm(llm: jax_attn.LLM, prompts: list[list[int]]) -> Rate:
    params = jax_attn.SamplingParams(max_tokens=OUTPUT, temperature=0, ignore_eos=True)

    def run() -> int:
        outputs = llm.generate(prompts, params, progress=False)
        assert all(len(output.tokens) == OUTPUT for output in outputs)
        return OUTPUT * len(outputs)

    return timed(run, time.process_time)


def run_server(client: Client, prompts: list[list[int]], num_bodies: int) -> Rate:
    """num_bodies: requests in flight."""
    bodies = [
        {
            "prompt": prompts[i : i + BODY],
            "max_tokens": OUTPUT,
            "temperature": 0,
            "ignore_eos": True,
        }
        for i in range(0, len(prompts), BODY)
    ]

    def post(body: dict[str, object]) -> int:
        request = urllib.request.Request(
            f"{client.url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=3600) as response:
            return int(json.loads(response.read())["usage"]["completion_tokens"])

    def run() -> int:
        with ThreadPoolExecutor(num_bodies) as pool:
            num_tokens = sum(pool.map(post, bodies))
        assert num_tokens == OUTPUT * len(prompts)
        return num_tokens

    return timed(run, children_seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bodies", default="2,4", help="requests in flight, numbers to try")
    args = parser.parse_args()
    tried = [int(n) for n in args.bodies.split(",")]
    cache = str(Path(gettempdir()) / "jax_attn_bench_llm")
    options = ["--dtype", "float32", "--max-waiting", str(args.prompts + BODY)]
    rates: dict[str, list[Rate]] = {"LLM": [], "server": []}
    with (
        jax_attn.LLM(models.BUNDLED, dtype="float32") as llm,
        running_server(*options, "--no-access-log", cache=cache) as client,
    ):
        for i in range(args.rounds):
            seed = 1000 * i
            rates["LLM"].append(run_llm(llm, prompts_of(args.prompts, seed)))
            of_round = [run_server(client, prompts_of(args.prompts, seed + n), n) for n in tried]
            rates["server"].append(Rate(*map(max, zip(*of_round, strict=True))))
            by_bodies = ", ".join(f"{n}: {each}" for n, each in zip(tried, of_round, strict=True))
            log(f"round {i}: LLM {rates['LLM'][-1]}; server, by bodies in flight {by_bodies}")
    for name in Rate._fields:
        llm_rate, server_rate = (
            statistics.median(getattr(rate, name) for rate in each) for each in rates.values()
        )
        log(
            f"{args.prompts} prompts, medians by {name}: LLM {llm_rate:.0f}, server"
            f" {server_rate:.0f} tokens/s ({llm_rate / server_rate - 1:+.1%})"
        )


if __name__ == "__main__":
    main()
