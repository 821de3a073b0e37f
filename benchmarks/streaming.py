"""StreamingLLM in the engine: the time and the memory of a token, as a text grows.

    python -m benchmarks.streaming                     -> a row for each length
    python -m benchmarks.streaming --tokens 4000       tries the script

One text is generated without an end, by the first layers of the bundled model. Times are those of
the processor, of all threads of the process, in the tokens before each length.
"""

from __future__ import annotations

import argparse
import dataclasses
import resource
import time

from jax_attn import models
from jax_attn.serve._engine.engine import Engine
from jax_attn.serve._engine.engine_config import EngineConfig
from jax_attn.serve._scheduling.request import SamplingParams, Sequence
from jax_attn.serve._scheduling.streaming import Streaming

LENGTHS = (2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000)
MEASURED = 1_000  # tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=LENGTHS[-1])
    parser.add_argument("--window", type=int, default=1000)
    parser.add_argument("--layers", type=int, default=2)
    args = parser.parse_args()

    model = models.load(models.BUNDLED, dtype="float32")
    config = dataclasses.replace(model.config, layers=model.config.layers[: args.layers])
    params = model.params | {"layers": model.params["layers"][: args.layers]}
    policy = Streaming(window=args.window)
    limits = EngineConfig(num_pages=512, max_running=1, max_step_tokens=64, kv_policy=policy)
    engine = Engine(model._replace(config=config, params=params), limits)
    engine.warm_up()
    sampling = SamplingParams(args.tokens, temperature=1.0, ignore_eos=True)
    seq = Sequence("text", "text", model.tokenizer.encode("def").ids, sampling)
    engine.submit([seq])

    print("tokens  processor ms/token  ms/token  pages  MiB of the process")
    for length in (each for each in LENGTHS if each <= args.tokens):
        while seq.num_output < length - MEASURED:
            engine.step()
        begin, wall = time.process_time(), time.perf_counter()
        while seq.num_output < length:
            engine.step()
        processor, seconds = time.process_time() - begin, time.perf_counter() - wall
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        num_pages = engine.scheduler.memory.num_held(seq)
        print(
            f"{length:6}  {1e3 * processor / MEASURED:18.3f}  {1e3 * seconds / MEASURED:8.3f}"
            f"  {num_pages:5}  {memory:7.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
