"""Speculative decoding: the engine with and without drafts, interleaved.

    python -m benchmarks.drafts                  -> a table, tokens/s, of n-gram lookup
    python -m benchmarks.drafts --draft-model    -> one of draft models
    python -m benchmarks.drafts --rounds 1 --tokens 40    tries the script

The target is the bundled model. Repetitive text is a function repeated six times. Source code is
the beginning of a module, whose continuations repeat less. A ratio compares two adjacent runs of a
round; the table has the median, minimum and maximum over rounds. On a busy machine the processor
time of a token is less noisy than its wall time: its ratio is the last column.

With draft models, the target is the bundled model with 24 more layers that add nothing. The bundled
model is then a perfect draft at a fifth of the time. The other drafts have weights near it, and
random weights.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_attn import models
from jax_attn.serve._engine.engine import Engine
from jax_attn.serve._engine.engine_config import EngineConfig
from jax_attn.serve._scheduling.request import SamplingParams, Sequence

PROMPTS = Path(__file__).resolve().parents[1] / "examples" / "prompts"
CONFIG = EngineConfig(num_pages=2048, page_size=16, max_running=8, max_step_tokens=64)
NUM_MORE_LAYERS = 24
CONTEXT = 200  # tokens of source code before the generated ones


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


MODEL_CASES = [CASES[i] for i in (2, 3)]


class Run(NamedTuple):
    tokens_per_second: float
    cpu_seconds: float  # per token


class Bench:
    def __init__(
        self,
        model: models.Model,
        max_drafts: int,
        num_tokens: int,
        draft_model: models.Model | None = None,
    ):
        self._model, self._draft_model, self._num_tokens = model, draft_model, num_tokens
        # Both run one after the other on the same device and share compiled code.
        self._configs = [CONFIG, dataclasses.replace(CONFIG, max_drafts=max_drafts)]
        self._warm = Engine(model, self._configs[1], draft_model=draft_model)
        self._warm.warm_up()
        self.right = 0.0  # accepted share of the last run's drafts

    def _prompt(self, repetitive: bool) -> list[int]:
        text = "def add(a, b):\n    return a + b\n\n\n" * 6
        if not repetitive:
            text = (PROMPTS / "ast.py.txt").read_text(encoding="utf-8")
        ids = self._model.tokenizer.encode(text).ids
        return [self._model.config.bos_token, *(ids if repetitive else ids[:CONTEXT])]

    def measure(self, case: Case, config: EngineConfig, seed: int) -> Run:
        drafts = self._draft_model if config.max_drafts else None
        engine = Engine(self._model, config, draft_model=drafts)
        engine.device = self._warm.device
        if engine.draft_model is not None and self._warm.draft_model is not None:
            engine.draft_model.device = self._warm.draft_model.device
            engine.draft_model.cost = self._warm.draft_model.cost
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
            elif events:  # from the first token on: prefill is not measured
                begin, begin_cpu = time.perf_counter(), time.process_time()
        if num_drafts := engine.stats()["draft_tokens"]:
            self.right = engine.stats()["draft_tokens_taken"] / num_drafts
        seconds, cpu = time.perf_counter() - begin, time.process_time() - begin_cpu
        return Run(num_tokens / seconds, cpu / num_tokens)

    def rounds(self, case: Case, num_rounds: int) -> Iterator[tuple[Run, Run]]:
        """Yields runs without and with drafts. Their order alternates."""
        for seed in range(num_rounds):
            order = self._configs if seed % 2 == 0 else self._configs[::-1]
            found = {id(c): self.measure(case, c, seed) for c in order}
            yield found[id(self._configs[0])], found[id(self._configs[1])]

    def show(self, case: Case, num_rounds: int) -> None:
        """Prints a line of the table."""
        pairs = list(self.rounds(case, num_rounds))
        plain, drafted = (
            statistics.median(run.tokens_per_second for run in each)
            for each in zip(*pairs, strict=True)
        )
        ratios = [b.tokens_per_second / a.tokens_per_second for a, b in pairs]
        cpu = statistics.median(b.cpu_seconds / a.cpu_seconds for a, b in pairs)
        print(
            f"| {case.name} | {self.right:.0%} | {plain:.0f} | {drafted:.0f} "
            f"| {statistics.median(ratios):.2f} | {min(ratios):.2f} | {max(ratios):.2f} "
            f"| {cpu:.2f} |",
            flush=True,
        )


def deeper(model: models.Model) -> models.Model:
    """Returns a model that computes the same function with more layers."""
    layer = dict(model.params["layers"][0])
    layer |= {name: jnp.zeros_like(layer[name]) for name in ("o", "down")}
    layers = [*model.params["layers"], *[layer] * NUM_MORE_LAYERS]
    kinds = model.config.layers + model.config.layers[:1] * NUM_MORE_LAYERS
    config = dataclasses.replace(model.config, layers=kinds)
    return model._replace(config=config, params=model.params | {"layers": layers})


def near(model: models.Model, std: float) -> models.Model:
    """Returns the model with each weight multiplied by 1 + std * a normal random number."""
    key = jax.random.key(0)

    def change(weight: jax.Array) -> jax.Array:
        return weight * (1 + std * jax.random.normal(key, weight.shape, weight.dtype))

    return model._replace(params=jax.tree.map(change, model.params))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draft-model", action="store_true", help="in place of n-gram lookup")
    parser.add_argument("--drafts", type=int, help="--max-drafts (7; of a draft model 4)")
    parser.add_argument("--rounds", type=int, default=9, help="of each case (%(default)s)")
    parser.add_argument("--tokens", type=int, default=200, help="of each client (%(default)s)")
    args = parser.parse_args()
    num_drafts = args.drafts or (4 if args.draft_model else 7)
    print(f"| text | right | without | {num_drafts} drafts | ratio | least | most | processor |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    model = models.load(models.BUNDLED, "float32")
    if not args.draft_model:
        bench = Bench(model, num_drafts, args.tokens)
        for case in CASES:
            bench.show(case, args.rounds)
        return
    noise = models.random_params(model.config, jax.random.key(0), "float32")
    smaller = {"same": model, "near": near(model, 0.1), "noise": model._replace(params=noise)}
    for name, draft_model in smaller.items():
        bench = Bench(deeper(model), num_drafts, args.tokens, draft_model)
        for case in MODEL_CASES:
            bench.show(dataclasses.replace(case, name=f"{name}: {case.name}"), args.rounds)


if __name__ == "__main__":
    main()
