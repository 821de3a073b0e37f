"""What a prompt's keys are worth: quality, memory and time of policies that keep some in each head.

    python -m benchmarks.retention [--tiny]

The bundled model reads a prompt of modules that Python ships, each policy keeps some of its keys,
and the model goes on over these, by page tables of heads: with the text that follows (perplexity),
and with a passage of its first half that comes again (a needle, which attention must find; its
first tokens are given). The model has 2 KV heads in each of 6 layers. Times are those of the
processor: a decode of a layer's shape, all policies in turns. `razor` finds retrieval heads by the
paper's test, random tokens that repeat, and gives the other heads a compensation token.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import statistics
import textwrap
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_attn as ja
from jax_attn import head_tables, models, retention

PAGE = 16
WINDOW, SINKS = 32, 4
GIVEN, ASKED = 8, 24  # tokens of the needle
RETRIEVAL_HEADS = 0.25  # of all KV heads
FOLLOWING = 64  # tokens whose perplexity is measured
ROUNDS = 30

Kept = list[np.ndarray]  # of each KV head of a layer: positions


class Model:
    """The bundled model, layer by layer, in f32."""

    def __init__(self) -> None:
        model = models.load(models.BUNDLED, dtype="float32")
        self.params, self.tokenizer, config = model.params, model.tokenizer, model.config
        self.heads, self.kv_heads = config.num_qo_heads, config.num_kv_heads
        self.dim, self.vocab_size = config.head_dim, config.vocab_size
        self.inverse = 10000.0 ** (-np.arange(0, self.dim, 2) / self.dim)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids

    def project(self, layer: Any, x: Any, begin: int) -> tuple[Any, Any, Any]:
        y = _norm(x, layer["attention_norm"]) @ layer["qkv"]
        sizes = np.cumsum([self.heads, self.kv_heads]) * self.dim
        q, k, v = (each.reshape(len(x), -1, self.dim) for each in jnp.split(y, sizes, axis=1))
        angles = (begin + np.arange(len(x)))[:, None] * self.inverse
        cos, sin = (jnp.float32(f(angles))[:, None] for f in (np.cos, np.sin))
        return _rotate(q, cos, sin), _rotate(k, cos, sin), v

    def run(self, tokens: Sequence[int], begin: int, attend: Callable[..., Any]) -> Any:
        """Logits. attend(layer number, q, k, v) -> o."""
        x = self.params["embed"][np.asarray(tokens)]
        for i, layer in enumerate(self.params["layers"]):
            q, k, v = self.project(layer, x, begin)
            x = x + attend(i, q, k, v).reshape(len(x), -1) @ layer["o"]
            gate, up = jnp.split(_norm(x, layer["mlp_norm"]) @ layer["gate_up"], 2, axis=1)
            x = x + (jax.nn.silu(gate) * up) @ layer["down"]
        return _norm(x, self.params["final_norm"]) @ self.params["embed"].T

    def read(self, tokens: Sequence[int]) -> tuple[list[Any], Any]:
        """q, k, v of each layer, and the logits."""
        cache: list[Any] = []

        def attend(_: int, q: Any, k: Any, v: Any) -> Any:
            cache.append((q, k, v))
            return ja.dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]

        return cache, self.run(tokens, 0, attend)


def continued(
    model: Model, cache: list[Any], kept: list[Kept], compensated: bool, tokens: Sequence[int]
) -> Any:
    """Logits of tokens that follow the prompt, over the kept keys.

    compensated: heads that lack keys have their mean, too, which counts as all of them.
    """
    variant = None
    if compensated:
        variant = ja.Variant(
            lambda s, at, bias: s + bias[at.kv_row], operands={"bias": np.zeros(1, np.float32)}
        )

    def attend(i: int, q: Any, k: Any, v: Any) -> Any:
        _, *old = cache[i]
        num_tokens = len(old[0])
        means = [compensated and len(head) < num_tokens for head in kept[i]]
        lens = np.array([len(head) + mean for head, mean in zip(kept[i], means, strict=True)])
        pages = -(-(lens + len(tokens)) // PAGE)
        indptr = np.append(0, np.cumsum(pages))
        spec = head_tables.spec(
            model.heads, model.kv_heads, model.dim, dtype="float32", page_size=PAGE, max_batch=1,
            max_qo_tokens=len(tokens), max_kv_pages=int(indptr[-1]), variant=variant,
        )  # fmt: skip
        plan = head_tables.plan(
            spec, [0, len(tokens)], (lens + len(tokens))[None], indptr, np.arange(indptr[-1])
        )
        pools, bias = [], np.zeros(indptr[-1] * PAGE, np.float32)
        for x in old:
            pool = np.zeros((indptr[-1] * PAGE, 1, model.dim), np.float32)
            for h, (head, mean) in enumerate(zip(kept[i], means, strict=True)):
                at = indptr[h] * PAGE
                if mean:
                    pool[at] = retention.compensation(x[:, h : h + 1], head[None])[0]
                    bias[at] = np.log(num_tokens - len(head))
                    at += 1
                pool[at : at + len(head), 0] = x[head, h]
            pools.append(jnp.asarray(pool.reshape(-1, PAGE, 1, model.dim)))
        k_pages, v_pages = head_tables.append_kv(pools[0], pools[1], k, v, plan)
        operands = {"variant_operands": {"bias": bias}} if compensated else {}
        return head_tables.attention(q, k_pages, v_pages, plan, **operands)

    return model.run(tokens, len(cache[0][0]), attend)


def retrieval_heads(model: Model, length: int) -> set[tuple[int, int]]:
    """(layer, KV head) of those that look back at the token before, or after, an earlier copy of
    theirs: RazorAttention's induction and echo heads (arXiv 2407.15891, section 3.3)."""
    once = np.random.default_rng(0).integers(1, model.vocab_size, length)
    cache, _ = model.read([*once, *once])
    scores = {}
    for i, (q, k, _) in enumerate(cache):
        grouped = q[length:].reshape(length, model.kv_heads, -1, model.dim)
        logits = jnp.einsum("qhgd,khd->hgqk", grouped, k) * model.dim**-0.5
        rows = np.arange(length)
        sees = np.arange(2 * length) <= length + rows[:, None]
        weights = jax.nn.softmax(jnp.where(sees, logits, -jnp.inf), axis=-1)
        found = weights[:, :, rows, rows] + weights[:, :, rows, (rows + 1) % (2 * length)]
        for h, score in enumerate(found.mean(-1).max(-1)):
            scores[i, h] = float(score)
    return set(sorted(scores, key=lambda x: -scores[x])[: round(RETRIEVAL_HEADS * len(scores))])


def policies(model: Model, cache: list[Any], share: float, length: int) -> dict[str, list[Kept]]:
    """What each policy keeps of a prompt."""
    num_tokens = len(cache[0][0])
    budget, every = int(share * num_tokens), np.arange(num_tokens)

    def of_layers(keep: Callable[[int, Any, Any], Any]) -> list[Kept]:
        return [[*np.asarray(keep(i, q, k))] for i, (q, k, _) in enumerate(cache)]

    def of_heads(keep: Callable[[int, int], Any]) -> list[Kept]:
        heads = range(model.kv_heads)
        return [[np.asarray(keep(i, h)) for h in heads] for i in range(len(cache))]

    retrieve = retrieval_heads(model, length)
    rest = (share - RETRIEVAL_HEADS) / (1 - RETRIEVAL_HEADS)  # so that all heads have the budget
    local = max(2 * SINKS, int(rest * num_tokens))
    return {
        "all": of_heads(lambda i, h: every),
        "sinks and window": of_heads(
            lambda i, h: retention.sinks_and_window(num_tokens, SINKS, budget - SINKS)
        ),
        "snapkv": of_layers(lambda i, q, k: retention.snapkv(q[-WINDOW:], k, budget)),
        "h2o": of_layers(lambda i, q, k: retention.heavy_hitters(q, k, budget, recent=budget // 2)),
        "razor": of_heads(
            lambda i, h: (
                every
                if (i, h) in retrieve
                else retention.sinks_and_window(num_tokens, SINKS, local - SINKS)
            )
        ),
    }


def loss(logits: Any, tokens: Sequence[int]) -> float:
    """Mean nats of tokens, each after the one before it."""
    logs = jax.nn.log_softmax(logits[: len(tokens) - 1])
    return float(-logs[np.arange(len(tokens) - 1), np.asarray(tokens[1:])].mean())


def decode_us(model: Model, lens: dict[str, np.ndarray], rounds: int) -> dict[str, float]:
    """Processor time of a decode of 8 requests, the mean of layers.

    lens: [layers, num_kv_heads] of each name.
    """
    runs: dict[str, list[Callable[[], Any]]] = {}
    run = jax.jit(head_tables.attention)
    for name, each in ((name, each) for name, layers in lens.items() for each in layers):
        kv_lens = np.tile(each, (8, 1))
        indptr = np.append(0, np.cumsum(-(-kv_lens.reshape(-1) // PAGE)))
        spec = head_tables.spec(
            model.heads, model.kv_heads, model.dim, dtype="float32", page_size=PAGE, max_batch=8,
            max_qo_tokens=8, max_kv_pages=int(indptr[-1]),
        )  # fmt: skip
        plan = head_tables.plan(spec, np.arange(9), kv_lens, indptr, np.arange(indptr[-1]))
        pages = jnp.ones((int(indptr[-1]), PAGE, 1, model.dim))
        q = jnp.ones((8, model.heads, model.dim))
        runs.setdefault(name, []).append(functools.partial(run, q, pages, pages, plan))
    times: dict[str, list[float]] = {name: [] for name in runs}
    for each in range(rounds + 1):
        for name, calls in runs.items():
            begin = time.process_time()
            for call in calls:
                jax.block_until_ready(call())
            if each:
                times[name].append(1e6 * (time.process_time() - begin) / len(calls))
    return {name: statistics.median(each) for name, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1400, help="of the prompt")
    parser.add_argument("--shares", type=float, nargs="*", default=[0.5, 0.3], help="of its keys")
    parser.add_argument("--tiny", action="store_true", help="tries the script")
    args = parser.parse_args()
    num_tokens, length, rounds = args.tokens, 256, ROUNDS
    shares, sources = args.shares, [json.decoder, textwrap, statistics, argparse]
    if args.tiny:
        num_tokens, length, rounds, shares, sources = 300, 32, 1, [0.5], sources[:1]

    model = Model()
    rows: dict[tuple[float, str], list[tuple[float, ...]]] = {}
    lens: dict[str, np.ndarray] = {}
    for source in sources:
        tokens = model.encode(inspect.getsource(source))
        prompt, following = tokens[:num_tokens], tokens[num_tokens : num_tokens + FOLLOWING]
        begin = len(prompt) // 4
        needle = prompt[begin : begin + GIVEN + ASKED]
        cache, _ = model.read(prompt)
        # The window of SnapKV sees the question.
        asked, _ = model.read([*prompt, *needle[:GIVEN]])
        for share in shares:
            kept_text = policies(model, cache, share, length)
            kept_asked = policies(model, asked, share, length)
            for name in kept_text:
                compensated = name == "razor"
                text = continued(model, cache, kept_text[name], compensated, following)
                found = continued(model, asked, kept_asked[name], compensated, needle[GIVEN:])
                size = sum(len(head) for layer in kept_text[name] for head in layer)
                part = size / (len(prompt) * model.kv_heads * len(cache))
                right = np.argmax(found[:-1], 1) == np.asarray(needle[GIVEN + 1 :])
                values = part, np.exp(loss(text, following)), float(np.mean(right))
                rows.setdefault((share, name), []).append(values)
                sizes = [[len(head) for head in layer] for layer in kept_text[name]]
                lens[f"{name} {share}"] = np.array(sizes)
    us = decode_us(model, lens, rounds)
    print("share  policy             keys kept  perplexity  needle  decode us (processor)")
    for (share, name), found_values in rows.items():
        part, perplexity, needle_share = np.mean(found_values, 0)
        print(
            f"{share:5}  {name:17}  {part:9.2f}  {perplexity:10.2f}  {needle_share:6.2f}"
            f"  {us[f'{name} {share}']:9.1f}"
        )


def _norm(x: Any, weight: Any) -> Any:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight


def _rotate(x: Any, cos: Any, sin: Any) -> Any:
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


if __name__ == "__main__":
    main()
