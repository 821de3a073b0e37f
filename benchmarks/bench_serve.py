"""A running server, measured from outside over HTTP.

    python -m benchmarks.bench_serve                     starts one with the bundled model, beside
                                                         the same model through jax.nn; writes
                                                         results/<device>-serve.json
    python -m benchmarks.bench_serve -- --model DIR      with another model, without a peer
    python -m benchmarks.bench_serve --url http://127.0.0.1:8000 --out FILE

Closed loop: a fixed number of clients, each of which sends its next request when the last is
answered. Open loop: Poisson arrivals at fractions of the largest closed loop's requests per second.
All answers are streamed. Prompts are slices of one text, so no two have a common prefix. Client and
server share the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.bench import Bench
from benchmarks.http_client import Answer, Client, running_server
from benchmarks.report import Row, log

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "data" / "tiny-llama-stdlib"  # the server's default without --model
RAMP = 0.2  # share of a loop's time that is not counted, at its start
PEER = "jax.nn, padded caches"
WHOLE_STEP = 1 << 20  # tokens of prompts beside decodes: all that fit in a step


@dataclasses.dataclass
class Requests:
    """An endless sequence of requests, deterministic for a seed."""

    text: list[int]  # tokens
    prompt_len: int
    output_lens: tuple[int, int]  # uniform between
    random: random.Random

    def next(self) -> tuple[list[int], int]:
        begin = self.random.randrange(len(self.text) - self.prompt_len)
        return self.text[begin : begin + self.prompt_len], self.random.randint(*self.output_lens)


def prompt_text() -> str:
    files = sorted((ROOT / "examples" / "prompts").glob("*.txt"))
    return "\n".join(path.read_text("utf-8") for path in files)


async def closed_loop(
    client: Client, requests: Requests, num_clients: int, seconds: float
) -> tuple[list[Answer], float, float]:
    """Returns the answers, and the tokens and requests per second after the ramp."""
    begin = time.perf_counter()
    end = begin + seconds
    answers: list[Answer] = []

    async def loop() -> None:
        while time.perf_counter() < end:
            answers.append(await client.generate(*requests.next()))

    await asyncio.gather(*(loop() for _ in range(num_clients)))
    counted = begin + RAMP * seconds, end
    # A chunk has one token, or a few if a token's text had to wait for the next one.
    num_tokens = sum(
        answer.num_tokens * _share_between(answer.times, *counted) for answer in answers
    )
    tokens_per_s = num_tokens / (counted[1] - counted[0])
    tokens_each = sum(answer.num_tokens for answer in answers) / len(answers)
    return answers, tokens_per_s, tokens_per_s / tokens_each


async def open_loop(
    client: Client, requests: Requests, rate: float, seconds: float
) -> list[Answer]:
    """Sends Poisson arrivals, `rate` per second. Returns the answers to those after the ramp."""
    begin = time.perf_counter()
    arrival = 0.0
    tasks: list[asyncio.Task[Answer]] = []
    while (arrival := arrival + requests.random.expovariate(rate)) < seconds:
        await asyncio.sleep(max(0.0, begin + arrival - time.perf_counter()))
        tasks.append(asyncio.create_task(client.generate(*requests.next())))
    answers = await asyncio.gather(*tasks)
    return [answer for answer in answers if answer.sent >= begin + RAMP * seconds]


async def shared_prefix(
    client: Client, text: list[int], prefix_len: int, num_requests: int
) -> dict[str, float]:
    """Sends all requests at once; each has 32 tokens of its own after the prefix."""
    own = 32
    begin = random.Random(1).randrange(len(text) // 2)
    prefix = text[begin : begin + prefix_len]
    before = client.metrics()
    answers = await asyncio.gather(
        *(client.generate(prefix + text[i * own : (i + 1) * own], 16) for i in range(num_requests))
    )
    after = client.metrics()
    grown = {
        name: after[f"jax_attn_{name}_tokens_total"] - before[f"jax_attn_{name}_tokens_total"]
        for name in ("prompt", "prefix_hit")
    }
    computed = prefix_len + num_requests * own  # the minimum that must be computed
    return {
        "hit_rate": round(grown["prefix_hit"] / grown["prompt"], 4),
        "ideal": round(1 - computed / grown["prompt"], 4),
        "ttft_mean_ms": _ms(np.mean([answer.ttft for answer in answers])),
    }


class ServeBench(Bench):
    def run(self) -> None:
        a = self.arguments
        if a.url:
            self.measure(Client(a.url))
            return
        with tempfile.TemporaryDirectory() as cache:
            with running_server(*a.server, cache=cache) as client:
                self.measure(client)
            # Whole prompts per step, for throughput: decodes wait for the prompts of others.
            whole = "--prefill-chunk", str(WHOLE_STEP)
            with running_server(*a.server, *whole, cache=cache) as client:
                self.loops(client, a.clients[-1:], "/whole-prompts")
            with running_server(*a.server, "--no-prefix-cache", cache=cache) as client:
                without = self.measure_prefix(client)
        shared = next(row for row in self.rows if "/shared-prefix/" in row.workload)
        shared.peers["without prefix cache"] = 1e3 * without["ttft_mean_ms"]
        log(f"{shared.workload}: mean TTFT without the cache {without['ttft_mean_ms']} ms")

    def measure(self, client: Client) -> None:
        self.model = json.loads(client.get("/v1/models"))["data"][0]["id"]
        log(f"{self.model} at {client.url}")
        self.loops(client, self.arguments.clients)
        self.measure_prefix(client, add=True)

    def loops(self, client: Client, nums_clients: list[int], suffix: str = "") -> None:
        a = self.arguments
        requests = Requests(self.text(client), a.prompt, tuple(a.output), random.Random(0))
        other_model = any(option.partition("=")[0] == "--model" for option in a.server)
        asyncio.run(closed_loop(client, requests, 2, 2))  # warm-up: connections, imports, caches
        rate = 0.0
        for num_clients in nums_clients:
            answers, tokens_per_s, rate = asyncio.run(
                closed_loop(client, requests, num_clients, a.seconds)
            )
            row = self.add(f"closed/{num_clients}{suffix}", 1e6 / tokens_per_s, answers)
            row.more["tokens_per_s"] = round(tokens_per_s, 1)
            row.more["requests_per_s"] = round(rate, 3)
            if not (a.url or suffix or other_model):
                self.measure_peer(row, num_clients)
            log(f"{row.workload}: {row.more} {row.peers}")
        for share in a.shares:
            answers = asyncio.run(open_loop(client, requests, share * rate, a.seconds * 2))
            gaps = [gap for answer in answers for gap in answer.gaps]
            row = self.add(f"open/{share:g}{suffix}", 1e6 * float(np.median(gaps)), answers)
            row.more["requests_per_s"] = round(share * rate, 3)
            log(f"{row.workload}: {row.more}")

    def text(self, client: Client) -> list[int]:
        return json.loads(client.get("/tokenize", {"prompt": prompt_text()}))["tokens"]

    def measure_prefix(self, client: Client, add: bool = False) -> dict[str, float]:
        limit = json.loads(client.get("/v1/models"))["data"][0]["max_model_len"]
        prefix_len = min(2048, limit // 4 * 3)
        num_requests = 64
        found = asyncio.run(shared_prefix(client, self.text(client), prefix_len, num_requests))
        if add:
            more = found | {"hit_rate_over_ideal": round(found["hit_rate"] / found["ideal"], 4)}
            name = self.name(f"shared-prefix/{num_requests}x{prefix_len}+32")
            self.rows.append(Row(name, 1e3 * found["ttft_mean_ms"], more=more))
            log(f"{name}: {more}")
        return found

    def measure_peer(self, row: Row, batch: int) -> None:
        """Measures the peer in its own process, while the server is idle."""
        a = self.arguments
        command = [sys.executable, "-m", "benchmarks.peers.jax_nn_decoder", "--model", str(MODEL)]
        command += ["--batch", str(batch), "--prompt", str(a.prompt)]
        command += ["--output", *map(str, a.output), "--seconds", str(a.seconds)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        if done.returncode:
            self.fail(PEER, done.stderr.strip()[-300:])
            return
        tokens_per_s = json.loads(done.stdout)["tokens_per_s"]
        row.peers[PEER] = 1e6 / tokens_per_s
        row.more["peer_tokens_per_s"] = tokens_per_s

    def name(self, what: str) -> str:
        return f"http/{self.model}/{what}"

    def add(self, what: str, us: float, answers: list[Answer]) -> Row:
        good = [answer for answer in answers if answer.status == 200]
        if len(good) < len(answers):
            self.fail(what, f"{len(answers) - len(good)} requests were refused")
        ttfts = [answer.ttft for answer in good]
        gaps = [gap for answer in good for gap in answer.gaps]
        median, p99 = np.quantile(gaps, [0.5, 0.99])
        more = {
            "requests": len(good),
            "ttft_p50_ms": _ms(np.quantile(ttfts, 0.5)),
            "ttft_p99_ms": _ms(np.quantile(ttfts, 0.99)),
            "inter_token_p50_ms": _ms(median),
            "inter_token_p99_ms": _ms(p99),
            "inter_token_p99_over_p50": round(float(p99 / median), 2),
        }
        row = Row(self.name(what), us, more=more)
        self.rows.append(row)
        return row

    def write(self) -> None:
        a = self.arguments
        # Import jax only now: a server that was started here has released the device.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        device = report.device_name()
        path = a.out or report.RESULTS / f"{device}-serve.json"
        report.write(
            path,
            self.rows,
            self.ceilings,
            device=f"{device}, {os.cpu_count()} processors",
            failures=self.failures,
            prompt_tokens=a.prompt,
            output_tokens=a.output,
            server_options=[re.sub(r"(^|=)/.*/", r"\1", option) for option in a.server],  # no paths
        )
        log(f"wrote {path}")


def _ms(seconds: Any) -> float:
    return round(1e3 * float(seconds), 2)


def _share_between(times: list[float], begin: float, end: float) -> float:
    return sum(begin <= t < end for t in times) / len(times)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench_serve",
        description=__doc__.splitlines()[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--url", help="of a server that runs already; it gets no peer")
    add("--clients", type=int, nargs="+", default=[1, 8, 32], help="of the closed loops")
    add("--shares", type=float, nargs="*", default=[0.5, 0.8, 0.95], help="of the open loops")
    add("--prompt", type=int, default=128, help="tokens (%(default)s)")
    add("--output", type=int, nargs=2, default=[64, 128], help="tokens, uniform between")
    add("--seconds", type=float, default=15, help="of a closed loop; an open one takes twice that")
    add("--out", type=Path, help="result file instead of results/<device>-serve.json")
    add("server", nargs="*", help="behind --: options for the server that is started")
    return ServeBench(parser.parse_args()).main()


if __name__ == "__main__":
    sys.exit(main())
