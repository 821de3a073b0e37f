"""Many prompts with shared beginnings: `jax_attn.LLM`, in turns with the server over HTTP.

    python -m benchmarks.bench_llm [--prompts 10000] [--rounds 3]
    python -m benchmarks.bench_llm --prompts 64 --rounds 1        tries the script on any machine

The bundled model in float32. Prompts have one of 20 beginnings of 128 tokens and 9 of their own, in
random order; each gets 16 tokens. The server gets bodies of up to 1,000 prompts. Of the numbers of
bodies in flight (--bodies) the best counts in each round. Every run has other tokens, so that no
prefix is cached.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import gettempdir

import numpy as np

import jax_attn
from benchmarks.http_client import Client, running_server
from benchmarks.report import log
from jax_attn import models

NUM_BEGINNINGS, BEGINNING, OWN, OUTPUT, BODY = 20, 128, 9, 16, 1000


def prompts_of(num: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    beginnings = rng.integers(300, 4000, (NUM_BEGINNINGS, BEGINNING))
    own = rng.integers(300, 4000, (num, OWN))
    which = rng.integers(0, NUM_BEGINNINGS, num)
    return np.concatenate([beginnings[which], own], axis=1).tolist()


def run_llm(llm: jax_attn.LLM, prompts: list[list[int]]) -> float:
    """Tokens per second."""
    params = jax_attn.SamplingParams(max_tokens=OUTPUT, temperature=0, ignore_eos=True)
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params, progress=False)
    seconds = time.perf_counter() - begin
    assert all(len(output.tokens) == OUTPUT for output in outputs)
    return OUTPUT * len(prompts) / seconds


def run_server(client: Client, prompts: list[list[int]], num_bodies: int) -> float:
    """Tokens per second. num_bodies: requests in flight."""
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

    begin = time.perf_counter()
    with ThreadPoolExecutor(num_bodies) as pool:
        num_tokens = sum(pool.map(post, bodies))
    seconds = time.perf_counter() - begin
    assert num_tokens == OUTPUT * len(prompts)
    return num_tokens / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bodies", default="2,4", help="requests in flight, numbers to try")
    args = parser.parse_args()
    tried = [int(n) for n in args.bodies.split(",")]
    cache = str(Path(gettempdir()) / "jax_attn_bench_llm")
    options = ["--dtype", "float32", "--max-waiting", str(args.prompts + BODY)]
    rates: dict[str, list[float]] = {"LLM": [], "server": []}
    with (
        jax_attn.LLM(models.BUNDLED, dtype="float32") as llm,
        running_server(*options, "--no-access-log", cache=cache) as client,
    ):
        for i in range(args.rounds):
            seed = 1000 * i
            rates["LLM"].append(run_llm(llm, prompts_of(args.prompts, seed)))
            of_round = [run_server(client, prompts_of(args.prompts, seed + n), n) for n in tried]
            rates["server"].append(max(of_round))
            by_bodies = ", ".join(
                f"{n}: {rate:.0f}" for n, rate in zip(tried, of_round, strict=True)
            )
            log(
                f"round {i}: LLM {rates['LLM'][-1]:.0f} tokens/s; server, by bodies in flight"
                f" {by_bodies}"
            )
    medians = {name: statistics.median(each) for name, each in rates.items()}
    log(
        f"{args.prompts} prompts, medians: LLM {medians['LLM']:.0f}, server"
        f" {medians['server']:.0f} tokens/s ({medians['LLM'] / medians['server'] - 1:+.1%})"
    )


if __name__ == "__main__":
    main()
