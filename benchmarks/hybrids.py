"""Hybrid models in the engine: a shared prompt through the prefix cache, and tokens a second.

    python -m benchmarks.hybrids                     -> both, Qwen3.5-0.8B's shapes
    python -m benchmarks.hybrids --layers 4 --prompt 512 --requests 8    tries the script

The weights are random. The first part compares the time to the first token, the mean of all
requests, of an engine with prefix cache with one without. The second compares the tokens that
transformers' `generate` and the engine write, for one client and for eight at once; it needs torch
and transformers. Times are of the clock and, behind it, of the processors: the second ones
mean something on a machine with other work, too.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jax_attn import models
from jax_attn.serve._engine.engine import Engine
from jax_attn.serve._engine.engine_config import EngineConfig
from jax_attn.serve._scheduling.request import SamplingParams, Sequence

PAGE_SIZE = 16
NUM_OWN = 16  # tokens of a request behind the shared prompt
CLIENTS = (1, 8)

# Qwen/Qwen3.5-0.8B, but for the vocabulary, which is the bundled tokenizer's.
SHAPES: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "eos_token_id": 0,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
    },
}


def raw_config(num_layers: int, vocab_size: int) -> dict[str, Any]:
    kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(num_layers)]
    return SHAPES | {
        "num_hidden_layers": num_layers,
        "layer_types": kinds,
        "vocab_size": vocab_size,
    }


def make_engine(model: models.Model, num_pages: int, **fields: Any) -> Engine:
    engine = Engine(model, EngineConfig(num_pages=num_pages, page_size=PAGE_SIZE, **fields))
    engine.warm_up()
    return engine


def run(engine: Engine, prompts: list[list[int]], num_tokens: int) -> np.ndarray:
    """[requests, 2]: seconds of clock and processors from the beginning to each first token."""
    params = SamplingParams(num_tokens, temperature=0, ignore_eos=True)
    begin = time.perf_counter(), time.process_time()
    first: dict[str, tuple[float, float]] = {}
    engine.submit([Sequence(str(i), str(i), x, params) for i, x in enumerate(prompts)])
    while engine.has_work:
        for event in engine.step():
            if event.tokens and event.seq_id not in first:
                now = time.perf_counter() - begin[0], time.process_time() - begin[1]
                first[event.seq_id] = now
    return np.array(list(first.values()))


def shared_prompt(model: models.Model, num_shared: int, num_requests: int) -> None:
    rng = np.random.default_rng(0)
    shared = rng.integers(1, 4000, num_shared).tolist()
    prompts = [shared + rng.integers(1, 4000, NUM_OWN).tolist() for _ in range(num_requests)]
    pages = num_requests * -(-(num_shared + NUM_OWN + 1) // PAGE_SIZE) + 8
    means = []
    for prefix_cache in (True, False):
        sizes = {"max_running": num_requests, "max_step_tokens": 512}
        engine = make_engine(model, pages, prefix_cache=prefix_cache, **sizes)
        means.append(run(engine, prompts, 1).mean(axis=0))
        del engine
    (clock, cpu), (clock_without, cpu_without) = means
    print(
        f"{num_requests} requests, {num_shared} tokens shared: first token after"
        f" {clock:.2f} s ({cpu:.2f}), without cache {clock_without:.2f} s ({cpu_without:.2f}),"
        f" ratio {clock_without / clock:.1f} ({cpu_without / cpu:.1f})",
        flush=True,
    )


def speed(call: Callable[[], Any], num_tokens: int) -> tuple[float, float]:
    """Tokens a second of the clock, and of the processors; the best of two runs."""
    best = 0.0, 0.0
    for _ in range(2):
        begin = time.perf_counter(), time.process_time()
        call()
        clock, cpu = time.perf_counter() - begin[0], time.process_time() - begin[1]
        best = max(best[0], num_tokens / clock), max(best[1], num_tokens / cpu)
    return best


def beside_transformers(
    model: models.Model, raw: dict[str, Any], dtype: str, num_prompt: int, num_tokens: int
) -> None:
    import torch
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    fields = {name: value for name, value in raw.items() if name != "model_type"}
    theirs = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**fields)).to(getattr(torch, dtype)).eval()
    pages = max(CLIENTS) * -(-(num_prompt + num_tokens) // PAGE_SIZE) + 8
    engine = make_engine(model, pages, max_running=max(CLIENTS), prefix_cache=False)
    for clients in CLIENTS:
        tokens = np.random.default_rng(clients).integers(1, 4000, (clients, num_prompt))
        given = torch.tensor(tokens)
        keywords = {"min_new_tokens": num_tokens, "do_sample": False, "pad_token_id": 0}

        def generate(given: Any = given, keywords: dict[str, Any] = keywords) -> None:
            with torch.no_grad():
                theirs.generate(given, max_new_tokens=num_tokens, **keywords)

        ours, of_torch = (
            speed(call, clients * num_tokens)
            for call in (lambda x=tokens: run(engine, x.tolist(), num_tokens), generate)
        )
        print(
            f"{clients} clients, {dtype}: {ours[0]:.1f} tokens/s ({ours[1]:.1f}), transformers"
            f" {of_torch[0]:.1f} ({of_torch[1]:.1f}), ratio {ours[0] / of_torch[0]:.2f}"
            f" ({ours[1] / of_torch[1]:.2f})",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--prompt", type=int, default=8192, help="tokens that requests share")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64, help="prompt and output; 0: no torch")
    args = parser.parse_args()
    tokenizer = models.load(models.BUNDLED, "float32").tokenizer
    raw = raw_config(args.layers, tokenizer.get_vocab_size())
    config = models.parse_config(raw)
    params = models.random_params(config, jax.random.key(0), args.dtype)
    model = models.Model(config, params, tokenizer)
    if args.tokens:
        beside_transformers(model, raw, args.dtype, args.tokens, args.tokens)
    if args.requests:
        shared_prompt(model, args.prompt, args.requests)


if __name__ == "__main__":
    main()
