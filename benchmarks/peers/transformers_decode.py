"""A decode step of transformers' static batches on a CPU, interleaved with bench_engine.

    python -m benchmarks.peers.transformers_decode <requests       (peers/decode_turns.py)

Random weights, greedy. Needs only torch and transformers, so it can run with a separate Python.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

from benchmarks.peers import decode_turns


def make_model(config: dict[str, Any], dtype: str) -> Any:
    torch.set_default_dtype(getattr(torch, dtype))
    of_model = transformers.AutoConfig.for_model(**config)
    return transformers.AutoModelForCausalLM.from_config(of_model).eval()


class Batch:
    def __init__(self, model: Any, clients: int, context: int):
        self.model = model
        self.tokens = torch.randint(2, model.config.vocab_size, (clients, context))
        self.cache = None
        self.step()

    def step(self) -> None:
        out = self.model(self.tokens, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.cache = out.past_key_values
        self.tokens = out.logits[:, -1:].argmax(-1)

    def close(self) -> None:
        self.cache = None


if __name__ == "__main__":
    with torch.inference_mode():
        versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
        decode_turns.serve(versions, make_model, Batch)
