"""Kv policies of prompts, and page selection, in the engine: what the model knows, and times.

    python -m benchmarks.prompt_policies [--tiny]

The bundled model reads a prompt of modules that Python ships. Each policy keeps a share of its
keys, or each token reads a share of its pages. The model goes on with the text that follows
(perplexity), and with a passage of the prompt's first half that comes again, whose first tokens end
the prompt (a needle: the share of its tokens that are the likeliest). Each token of both is a
request of its own, which has the tokens before it as output. With page selection these go through
the model one by one, as tokens that are read together read all pages. Times are those of the
processor, of all threads of the process: of a prompt until its first token, and of each token after
it.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import math
import statistics
import textwrap
import time
from typing import Any

from jax_attn import models
from jax_attn.serve._engine.engine import Engine
from jax_attn.serve._engine.engine_config import EngineConfig
from jax_attn.serve._scheduling.events import TokenLogprob
from jax_attn.serve._scheduling.kv_policies import parse, parse_selection
from jax_attn.serve._scheduling.request import SamplingParams, Sequence

FOLLOWING = 64  # tokens whose perplexity is measured
GIVEN, ASKED = 8, 24  # tokens of the needle
PAGE = 16


def known(engine: Engine, prompt: list[int], following: list[int]) -> list[tuple[float, bool]]:
    """(logprob, whether it is the likeliest) of each token that follows the prompt."""
    found = []
    for i, token in enumerate(following):
        # The bias chooses the token; its logprob is of the model's own logits.
        params = SamplingParams(
            i + 2, temperature=0, ignore_eos=True, logprobs=1, logit_bias=((token, 1e4),)
        )
        seq = Sequence("text", "text", list(prompt), params)
        seq.tokens += following[:i]
        engine.submit([seq])
        logprobs: list[TokenLogprob] = []
        while engine.has_work:
            logprobs += (x for event in engine.step() for x in event.logprobs or ())
        assert logprobs[0].token == token
        found.append((logprobs[0].logprob, logprobs[0].top[0][0] == token))
    return found


def timed(engine: Engine, prompt: list[int]) -> tuple[int, float, float]:
    """The most pages after the first token, and the two processor times in seconds."""
    seq = Sequence(
        "text", "text", list(prompt), SamplingParams(FOLLOWING, temperature=0, ignore_eos=True)
    )
    engine.scheduler.cache.clear()
    engine.submit([seq])
    begin = time.process_time()
    while not seq.num_output:
        engine.step()
    first, pages = time.process_time(), 0
    while engine.has_work:
        engine.step()
        pages = max(pages, len(seq.pages))
    return pages, first - begin, time.process_time() - first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1400, help="of the prompt")
    parser.add_argument("--shares", type=float, nargs="*", default=[0.5, 0.3], help="of its keys")
    parser.add_argument("--only", nargs="*", help="beginnings of names of rows; all rows")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="tries the script")
    args = parser.parse_args()
    num_following = FOLLOWING
    if args.tiny:
        args.tokens, args.shares, args.rounds, num_following = 300, [0.5], 1, 4

    model = models.load(models.BUNDLED, dtype="float32")
    options: dict[str, dict[str, Any]] = {"all keys": {}}
    for keep in (int(share * args.tokens) for share in args.shares):
        pages = keep // PAGE
        options |= {
            f"snapkv, {keep}": {"kv_policy": parse(f"snapkv:keep={keep}")},
            f"h2o, {keep}": {"kv_policy": parse(f"h2o:keep={keep}")},
            f"quest, {pages} pages": {"kv_select": parse_selection(f"quest:pages={pages}")},
        }
    if args.only:
        options = {x: y for x, y in options.items() if x.startswith(tuple(args.only))}
    texts = [
        model.tokenizer.encode(inspect.getsource(source)).ids
        for source in (json.decoder, textwrap, statistics, argparse)[: 1 if args.tiny else None]
    ]
    print("policy            pages  perplexity  needle  ms to the first token  ms/token")
    for name, option in options.items():
        limits = EngineConfig(
            num_pages=512, page_size=PAGE, max_running=1, max_step_tokens=256, **option
        )  # fmt: skip
        engine = Engine(model, limits)
        engine.warm_up()
        times = [timed(engine, text[: args.tokens]) for text in texts for _ in range(args.rounds)]
        if "kv_select" in option:
            engine = Engine(model, dataclasses.replace(limits, max_step_tokens=1))
            engine.warm_up()
        losses, right = [], []
        for text in texts:
            prompt, needle = text[: args.tokens], text[args.tokens // 4 :][: GIVEN + ASKED]
            following = text[args.tokens :][:num_following]
            losses += [-logprob for logprob, _ in known(engine, prompt, following)]
            asked = known(engine, [*prompt, *needle[:GIVEN]], needle[GIVEN:])
            right += [is_likeliest for _, is_likeliest in asked]
        pages = max(each for each, *_ in times)
        first, rest = (1e3 * statistics.median(each[i] for each in times) for i in (1, 2))
        print(
            f"{name:16}  {pages:5}  {math.exp(statistics.mean(losses)):10.2f}"
            f"  {statistics.mean(right):6.2f}  {first:21.1f}  {rest / (FOLLOWING - 1):8.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
