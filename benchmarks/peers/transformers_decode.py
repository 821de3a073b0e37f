"""A decode step of transformers' static batches on a CPU, in turns with bench_engine.

    python -m benchmarks.peers.transformers_decode <requests

The first line of stdin is a JSON object: config, the object of a config.json, and dtype. Each other
line asks for steps: clients, context, the tokens of each prompt, and steps. The answer is the time
of each step: {"us": [...]}. Random weights, greedy. Needs torch and transformers alone, so that it
runs with a Python of their own.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
import transformers


def make_model(config: dict[str, Any], dtype: str) -> Any:
    torch.set_default_dtype(getattr(torch, dtype))
    of_model = transformers.AutoConfig.for_model(**config)
    return transformers.AutoModelForCausalLM.from_config(of_model).eval()


class Batch:
    """Sequences that decode together, begun with random prompts."""

    def __init__(self, model: Any, clients: int, context: int):
        self.model = model
        self.tokens = torch.randint(2, model.config.vocab_size, (clients, context))
        self.cache = None
        self.step()

    def step(self) -> None:
        out = self.model(self.tokens, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.cache = out.past_key_values
        self.tokens = out.logits[:, -1:].argmax(-1)


def main() -> None:
    model = make_model(**json.loads(sys.stdin.readline()))
    batches: dict[tuple[int, int], Batch] = {}
    print(
        json.dumps({"note": f"torch {torch.__version__}, transformers {transformers.__version__}"})
    )
    sys.stdout.flush()
    with torch.inference_mode():
        for line in sys.stdin:
            asked = json.loads(line)
            key = asked["clients"], asked["context"]
            if key not in batches:
                batches.clear()
                batches[key] = Batch(model, *key)
                batches[key].step()
            us = []
            for _ in range(asked["steps"]):
                begin = time.perf_counter()
                batches[key].step()
                us.append(1e6 * (time.perf_counter() - begin))
            print(json.dumps({"us": us}), flush=True)


if __name__ == "__main__":
    main()
