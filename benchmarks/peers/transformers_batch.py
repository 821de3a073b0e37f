"""transformers' continuous batching, with the shapes and prompts of bench_engine and bench_serve.

    python -m benchmarks.peers.transformers_batch                  on the GPU
    python -m benchmarks.peers.transformers_batch --tiny           tries the script, on any machine

Random weights in bf16, greedy, EOS ignored. Measures bench_engine's throughput, with all requests
at once, and bench_serve's closed loop, without HTTP. generate_batch has one output length for all
requests, so requests with different lengths go directly to the manager that it creates.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"  # jax_attn only provides shapes; the GPU is the peer's

import torch
import transformers
from transformers.generation.continuous_batching.utils import WorkloadHints

from benchmarks import shapes
from benchmarks.bench_engine import FULL, TINY, Load, make_prompt
from benchmarks.bench_serve import RAMP, Requests, prompt_text

SHAPE = "qwen3-0.6b"
PEER = "transformers continuous batching"
CLOSED_PROMPT, CLOSED_OUTPUT = 128, (64, 128)  # the defaults of bench_serve
NO_TOKEN = -1
# Without flash-attn, a step's mask is [all its tokens, all cached tokens].
POOL = {"max_batch_tokens": 4096}
TINY_POOL = {"num_blocks": 64, "max_batch_tokens": 256}  # else most of the machine's memory


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, nargs="*", default=[64], help="of the closed loops")
    parser.add_argument("--seconds", type=float, default=15, help="of a closed loop")
    parser.add_argument("--attention", default="paged|sdpa", help="transformers' implementation")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and load")
    arguments = parser.parse_args()
    model = make_model(arguments.tiny, arguments.attention)
    load = TINY if arguments.tiny else FULL
    report(note=f"transformers {transformers.__version__}, {arguments.attention}, {model.device}")
    throughput(model, load, 2 if arguments.tiny else 16)  # warm
    for num_clients in arguments.clients:
        rate = closed_loop(model, num_clients, arguments.seconds)
        report(workload=f"http/{SHAPE}/closed/{num_clients}", peer=PEER, us=1e6 / rate)
    seconds = throughput(model, load, load.num_requests)  # last, because it may take minutes
    report(workload=load.throughput_name(SHAPE), peer=PEER, us=1e6 * seconds)


def report(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def make_model(tiny: bool, attention: str) -> Any:
    raw = shapes.SHAPES[SHAPE] | (shapes.TINY if tiny else {})
    config = transformers.AutoConfig.for_model(**raw)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=attention
        )
    return model.eval()


def manager_of(model: Any, prompt: int, output: int, num_requests: int) -> Any:
    """Returns the manager context of generate_batch for requests of at most these lengths."""
    is_tiny = model.config.vocab_size == shapes.TINY["vocab_size"]
    batching = transformers.ContinuousBatchingConfig(**(TINY_POOL if is_tiny else POOL))
    config = transformers.GenerationConfig(
        do_sample=False, max_new_tokens=output, eos_token_id=NO_TOKEN, pad_token_id=0
    )
    hints = WorkloadHints(
        max_prompt_length=prompt, max_generated_length=output, num_requests=num_requests
    )
    return model.continuous_batching_context_manager(
        generation_config=config,
        continuous_batching_config=batching,
        workload_hints=hints,
        block=True,
        timeout=5,
    )


def finished(manager: Any) -> int:
    """Waits for a request to end and returns the number of its generated tokens."""
    while True:
        result = manager.get_result(timeout=1)
        if result is None and not manager.is_running():
            raise RuntimeError(f"generation ended: {manager.background_thread_status.fatal_error}")
        if result is None or not result.is_finished():
            continue
        if result.error is not None:
            raise RuntimeError(result.error)
        return len(result.generated_tokens)


def throughput(model: Any, load: Load, num_requests: int) -> float:
    """Returns seconds from the submission of all requests to the end of the last one."""
    prompts, outputs = load.throughput_lengths()[:, :num_requests].tolist()
    vocab_size = model.config.vocab_size
    with manager_of(model, max(prompts), max(outputs), num_requests) as manager:
        begin = time.perf_counter()
        for i, (length, output) in enumerate(zip(prompts, outputs, strict=True)):
            manager.add_request(make_prompt(i, length, vocab_size), max_new_tokens=output)
        num_tokens = sum(finished(manager) for _ in prompts)
        seconds = time.perf_counter() - begin
    assert num_tokens == sum(outputs), f"{num_tokens} tokens for {sum(outputs)}"
    return seconds


def closed_loop(model: Any, num_clients: int, seconds: float) -> float:
    """Returns tokens per second of requests that end after the ramp."""
    text = shapes.make_tokenizer(model.config.vocab_size).encode(prompt_text()).ids
    requests = Requests(text, CLOSED_PROMPT, CLOSED_OUTPUT, random.Random(0))
    with manager_of(model, CLOSED_PROMPT, CLOSED_OUTPUT[1], num_clients) as manager:

        def send() -> None:
            prompt, output = requests.next()
            manager.add_request(prompt, max_new_tokens=output)

        begin = time.perf_counter()
        for _ in range(num_clients):
            send()
        num_tokens = 0
        while (now := time.perf_counter()) < begin + seconds:
            tokens = finished(manager)
            send()
            if now >= begin + RAMP * seconds:
                num_tokens += tokens
        counted = time.perf_counter() - begin - RAMP * seconds
        for _ in range(num_clients):
            finished(manager)
    return num_tokens / counted


if __name__ == "__main__":
    main()
