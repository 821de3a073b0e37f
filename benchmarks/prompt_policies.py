"""SnapKV and H2O in the engine: pages, processor time, and a passage that must be found.

    python -m benchmarks.prompt_policies [--tiny]

The bundled model reads a prompt of modules that Python ships. It ends with the first tokens of a
passage of its own first half (a needle), and the model goes on: the share of its tokens that are
the passage's. The policies keep the same number of keys. Times are those of the processor, of all
threads of the process: of the prompt until its first token, and of each token after it.
`benchmarks.retention` has the perplexity over what the same policies keep.
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
import textwrap
import time

from jax_attn import models
from jax_attn.serve._engine.engine import Engine
from jax_attn.serve._engine.engine_config import EngineConfig
from jax_attn.serve._scheduling.kv_policies import parse
from jax_attn.serve._scheduling.request import SamplingParams, Sequence

GIVEN, ASKED = 8, 24  # tokens of the needle
PAGE = 16


def run(engine: Engine, prompt: list[int]) -> tuple[list[int], int, float, float]:
    """Its tokens, the most pages after the first one, and the two processor times in seconds."""
    sampling = SamplingParams(ASKED, temperature=0, ignore_eos=True)
    seq = Sequence("text", "text", list(prompt), sampling)
    engine.submit([seq])
    begin = time.process_time()
    while not seq.num_output:
        engine.step()
    first, pages = time.process_time(), 0
    while engine.has_work:
        engine.step()
        pages = max(pages, len(seq.pages))
    return seq.tokens[len(prompt) :], pages, first - begin, time.process_time() - first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1400, help="of the prompt")
    parser.add_argument("--shares", type=float, nargs="*", default=[0.5, 0.3], help="of its keys")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="tries the script")
    args = parser.parse_args()
    if args.tiny:
        args.tokens, args.shares, args.rounds = 300, [0.5], 1

    model = models.load(models.BUNDLED, dtype="float32")
    kept = {share: int(share * args.tokens) for share in args.shares}
    policies: dict[str, str | None] = {"all keys": None}
    for keep in kept.values():
        policies |= {
            f"streaming, {keep}": f"streaming:sinks=4,window={keep - PAGE}",
            f"snapkv, {keep}": f"snapkv:keep={keep}",
            f"h2o, {keep}": f"h2o:keep={keep}",
        }
    prompts, wanted = [], []
    for source in (json.decoder, textwrap, statistics, argparse)[: 1 if args.tiny else None]:
        text = model.tokenizer.encode(inspect.getsource(source)).ids[: args.tokens]
        needle = text[len(text) // 4 :][: GIVEN + ASKED]
        prompts.append([*text, *needle[:GIVEN]])
        wanted.append(needle[GIVEN:])
    print("policy            pages  needle  ms to the first token  ms/token")
    for name, policy in policies.items():
        engine = Engine(
            model,
            EngineConfig(
                num_pages=512, page_size=PAGE, max_running=1, max_step_tokens=256,
                prefix_cache=False, kv_policy=None if policy is None else parse(policy),
            ),
        )  # fmt: skip
        engine.warm_up()
        rows = [[run(engine, prompt) for prompt in prompts] for _ in range(args.rounds)]
        found = [
            sum(map(int.__eq__, tokens, passage)) / ASKED
            for (tokens, *_), passage in zip(rows[0], wanted, strict=True)
        ]
        pages = max(pages for _, pages, *_ in rows[0])
        first, rest = (
            1e3 * statistics.median(statistics.mean(each[i] for each in row) for row in rows)
            for i in (2, 3)
        )
        print(
            f"{name:16}  {pages:5}  {statistics.mean(found):6.2f}  {first:21.1f}"
            f"  {rest / (ASKED - 1):8.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
