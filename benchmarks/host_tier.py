"""The prefix cache's host tier: conversations whose pages do not fit in the device's pool.

    python -m benchmarks.host_tier          -> seconds to the first token, with and without
    python -m benchmarks.host_tier --conversations 4 --layers 1    tries the script

All conversations have a turn, one after the other and some at once, then all have the next. So the
pages of a conversation have left the pool before its next turn: it has a quarter of all pages. The
model has random weights and the width of a model of 1B. Both engines take turns within the run.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time

import jax
import numpy as np

from jax_attn import models
from jax_attn.serve._engine.engine import Engine
from jax_attn.serve._engine.engine_config import EngineConfig
from jax_attn.serve._scheduling.request import SamplingParams, Sequence

PAGE_SIZE = 16
OUTPUT = 8  # tokens of an answer


def config_of(num_layers: int, tokenizer: models.Tokenizer) -> models.ModelConfig:
    return models.parse_config(
        {
            "model_type": "llama",
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_hidden_layers": num_layers,
            "vocab_size": tokenizer.get_vocab_size(),
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "eos_token_id": 0,
        }
    )


class Conversations:
    """The texts of all conversations in one engine, and the times of their turns."""

    def __init__(self, engine: Engine, num: int, num_prompt: int, num_new: int, at_once: int):
        self.engine, self.at_once, self.num_new = engine, at_once, num_new
        self.rng = np.random.default_rng(0)
        self.texts = [self._tokens(num_prompt) for _ in range(num)]
        self.turn = 0

    def _tokens(self, num: int) -> list[int]:
        tokens: list[int] = self.rng.integers(1, 4000, num).tolist()
        return tokens

    def run_turn(self) -> list[float]:
        """Runs the next turn of all, at_once at a time. Returns seconds to each first token."""
        self.turn += 1
        waiting = list(range(len(self.texts)))
        begun: dict[str, float] = {}
        seqs: dict[str, tuple[int, Sequence]] = {}
        first: list[float] = []
        params = SamplingParams(OUTPUT, temperature=0, ignore_eos=True)
        while waiting or seqs:
            while waiting and len(seqs) < self.at_once:
                i = waiting.pop(0)
                if self.turn > 1:
                    self.texts[i] = self.texts[i] + self._tokens(self.num_new)
                name = f"{self.turn}.{i}"
                seq = Sequence(name, name, list(self.texts[i]), params)
                seqs[name], begun[name] = (i, seq), time.perf_counter()
                self.engine.submit([seq])
            for event in self.engine.step():
                if event.tokens and event.seq_id in begun:
                    first.append(time.perf_counter() - begun.pop(event.seq_id))
                if event.finish_reason is not None:
                    i, seq = seqs.pop(event.seq_id)
                    self.texts[i] = seq.tokens
        return first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=224)
    parser.add_argument("--new", type=int, default=24)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--at-once", type=int, default=2)
    args = parser.parse_args()
    tokenizer = models.load(models.BUNDLED, "float32").tokenizer
    config = config_of(args.layers, tokenizer)
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    params = models.random_params(config, jax.random.key(0), dtype)
    model = models.Model(config, params, tokenizer)
    longest = args.prompt + args.turns * (OUTPUT + args.new)
    num_needed = args.conversations * -(-longest // PAGE_SIZE)
    without = EngineConfig(
        num_pages=num_needed // 4,
        page_size=PAGE_SIZE,
        max_running=args.at_once,
        max_step_tokens=256,
    )
    both = {}
    for name, num_host_pages in (("without", 0), ("with", num_needed)):
        engine = Engine(model, dataclasses.replace(without, num_host_pages=num_host_pages))
        engine.warm_up()
        num = args.conversations
        both[name] = Conversations(engine, num, args.prompt, args.new, args.at_once)
    host = both["with"].engine.scheduler.memory.host
    assert host is not None
    print(f"a page comes back in the time of {host.page_tokens:.3f} tokens of its {PAGE_SIZE}")
    print("| turn | without, s: P50, P90 | with, s: P50, P90 | ratio of P50 | of means |")
    print("| ---: | ---: | ---: | ---: | ---: |")
    for turn in range(1, args.turns + 1):
        seconds = {name: each.run_turn() for name, each in both.items()}
        middle = {name: statistics.median(each) for name, each in seconds.items()}
        late = {name: statistics.quantiles(each, n=10)[-1] for name, each in seconds.items()}
        means = {name: statistics.fmean(each) for name, each in seconds.items()}
        cells = (f"{middle[name]:.3f}, {late[name]:.3f}" for name in both)
        ratios = (x["with"] / x["without"] for x in (middle, means))
        print(f"| {turn} |", " | ".join(cells), "|", " | ".join(f"{x:.3f}" for x in ratios), "|")
    assert both["with"].texts == both["without"].texts or dtype != "float32", "other tokens"
    stats = both["with"].engine.stats()
    print(stats["host"], stats["prefix_hit_tokens"], "of", stats["prompt_tokens"], "tokens cached")


if __name__ == "__main__":
    main()
