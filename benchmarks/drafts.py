"""Speculative decoding by n-gram lookup: the engine with and without drafts, in turns.

    python -m benchmarks.drafts                  -> a table, tokens/s
    python -m benchmarks.drafts --rounds 1 --tokens 40    tries the script

The bundled model. Repetitive text is a function that is there six times; source code is the
beginning of a module, whose continuations repeat less. A ratio is that of two runs of one round,
next to each other; the table has the median of all rounds, the least and the most. Processor time
of a token is less noisy than its time where others use the machine: its ratio is the last column.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from jax_attn import models
from jax_attn.serve.engine import Engine, EngineConfig
from jax_attn.serve.request import SamplingParams, Sequence

PROMPTS = Path(__file__).resolve().parents[1] / "examples" / "prompts"
CONFIG = EngineConfig(num_pages=2048, page_size=16, max_running=8, max_step_tokens=64)
CONTEXT = 200  # tokens of source code before what is written


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    clients: int
    repetitive: bool
    temperature: float


CASES = [
    Case("1 client, repetitive, greedy", 1, True, 0.0),
    Case("1 client, repetitive, temperature 1", 1, True, 1.0),
    Case("1 client, source code, greedy", 1, False, 0.0),
    Case("1 client, source code, temperature 1", 1, False, 1.0),
    Case("1 client, source code, temperature 1.5", 1, False, 1.5),
    Case("4 clients, repetitive, greedy", 4, True, 0.0),
    Case("8 clients, source code, temperature 1", 8, False, 1.0),
]


class Run(NamedTuple):
    tokens_per_second: float
    cpu_seconds: float  # of a token


class Bench:
    def __init__(self, max_drafts: int, num_tokens: int):
        self._model = models.load(models.BUNDLED, "float32")
        self._num_tokens = num_tokens
        # One after the other on the same device: what is compiled is the same.
        self._configs = [CONFIG, dataclasses.replace(CONFIG, max_drafts=max_drafts)]
        engine = Engine(self._model, CONFIG)
        engine.warm_up()
        self._device = engine.device

    def _prompt(self, repetitive: bool) -> list[int]:
        text = "def add(a, b):\n    return a + b\n\n\n" * 6
        if not repetitive:
            text = (PROMPTS / "ast.py.txt").read_text(encoding="utf-8")
        ids = self._model.tokenizer.encode(text).ids
        return [self._model.config.bos_token, *(ids if repetitive else ids[:CONTEXT])]

    def measure(self, case: Case, config: EngineConfig, seed: int) -> Run:
        engine = Engine(self._model, config)
        engine.device = self._device
        prompt = self._prompt(case.repetitive)
        engine.submit(
            [
                Sequence(
                    f"{i}",
                    f"{i}",
                    list(prompt),
                    SamplingParams(
                        max_tokens=self._num_tokens,
                        temperature=case.temperature,
                        seed=1000 * seed + i,
                        ignore_eos=True,
                    ),
                )
                for i in range(case.clients)
            ]
        )
        begin, begin_cpu, num_tokens = 0.0, 0.0, 0
        while engine.has_work:
            events = engine.step()
            if begin:
                num_tokens += sum(len(event.tokens) for event in events)
            elif events:  # from the first token on: prefill is not what is measured
                begin, begin_cpu = time.perf_counter(), time.process_time()
        seconds, cpu = time.perf_counter() - begin, time.process_time() - begin_cpu
        return Run(num_tokens / seconds, cpu / num_tokens)

    def rounds(self, case: Case, num_rounds: int) -> Iterator[tuple[Run, Run]]:
        """Without and with drafts. Which is first takes turns."""
        for seed in range(num_rounds):
            order = self._configs if seed % 2 == 0 else self._configs[::-1]
            found = {id(c): self.measure(case, c, seed) for c in order}
            yield found[id(self._configs[0])], found[id(self._configs[1])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--drafts", type=int, default=7, help="--max-drafts (%(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="of each case (%(default)s)")
    parser.add_argument("--tokens", type=int, default=200, help="of each client (%(default)s)")
    args = parser.parse_args()
    bench = Bench(args.drafts, args.tokens)
    print(f"| text | without | {args.drafts} drafts | ratio | least | most | processor time |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for case in CASES:
        pairs = list(bench.rounds(case, args.rounds))
        plain, drafted = (
            statistics.median(run.tokens_per_second for run in each)
            for each in zip(*pairs, strict=True)
        )
        ratios = [b.tokens_per_second / a.tokens_per_second for a, b in pairs]
        cpu = statistics.median(b.cpu_seconds / a.cpu_seconds for a, b in pairs)
        print(
            f"| {case.name} | {plain:.0f} | {drafted:.0f} | {statistics.median(ratios):.2f} "
            f"| {min(ratios):.2f} | {max(ratios):.2f} | {cpu:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
