"""Workloads that nobody chose: shapes of published models, lengths by chance.

A model is drawn from published.json, a task from TASKS, lengths from a log-normal distribution. The
draws depend on the seed alone, so ours and every peer draw the same batches. Imports neither jax
nor torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from benchmarks.workloads import Workload, shrunk

PUBLISHED = Path(__file__).with_name("published.json")
PAGE_SIZES = (16, 16, 16, 32, 64, 1)
# Bounds of a batch: bytes of K and V in bf16, and operations of the forward pass.
GPU_BOUNDS = 8 << 30, 40e12
CPU_BOUNDS = 192 << 20, 40e9

Lengths = tuple[list[int], list[int]]  # of queries and of keys, of each request


def lognormal(rng: np.random.Generator, median: float, count: int, sigma: float = 1.0) -> list[int]:
    lengths = median * np.exp(sigma * rng.standard_normal(count))
    return np.clip(lengths.round(), 1, 131072).astype(int).tolist()


def _batch(rng: np.random.Generator, largest: int) -> int:
    """A batch size, log-uniform."""
    return int(round(np.exp(rng.uniform(0, np.log(largest)))))


def _decode(rng: np.random.Generator) -> Lengths:
    keys = lognormal(rng, float(rng.choice([300, 1000, 4000])), _batch(rng, 256))
    return [1] * len(keys), keys


def _even_decode(rng: np.random.Generator) -> Lengths:
    count, length = _batch(rng, 128), int(rng.integers(64, 8192))
    return [1] * count, [length] * count


def _drafts(rng: np.random.Generator) -> Lengths:
    keys = lognormal(rng, 1500, _batch(rng, 64))
    queries = int(rng.integers(2, 9))
    return [queries] * len(keys), [n + queries for n in keys]


def _prompts(rng: np.random.Generator) -> Lengths:
    lengths = lognormal(rng, float(rng.choice([60, 300, 1500])), _batch(rng, 64))
    return lengths, lengths


def _even_prompts(rng: np.random.Generator) -> Lengths:
    count, length = _batch(rng, 64), int(np.exp(rng.uniform(np.log(50), np.log(8192))))
    return [length] * count, [length] * count


def _mixed(rng: np.random.Generator) -> Lengths:
    keys = lognormal(rng, 1500, _batch(rng, 128))
    chunk = int(rng.integers(128, 2049))
    return [1] * len(keys) + [chunk], [*keys, chunk + int(rng.integers(0, 8192))]


def _texts(rng: np.random.Generator) -> Lengths:
    lengths = [min(n, 512) for n in lognormal(rng, 120, _batch(rng, 256), 0.8)]
    return lengths, lengths


# (kind of Workload, its lengths, whether K and V are in pages). jax.nn, cuDNN and fa4 can only do
# equal lengths.
DECODER_TASKS: tuple[tuple[str, Callable[[np.random.Generator], Lengths], bool], ...] = (
    ("decode", _decode, True),
    ("decode", _even_decode, True),
    ("mixed", _drafts, True),
    ("mixed", _mixed, True),
    ("prefill", _prompts, False),
    ("prefill", _even_prompts, False),
    ("backward", _even_prompts, False),
)


def draw(
    count: int,
    seed: int,
    select: Iterable[str] = (),
    shrink: int = 1,
    bounds: tuple[float, float] = GPU_BOUNDS,
) -> list[Workload]:
    """Returns `count` workloads, or those of them with an id in `select`.

    An id is random/SEED/INDEX and what the workload is.
    shrink: divides the lengths, for trying a script on a machine without the device.
    bounds: bytes of K and V and operations that no batch exceeds. A batch that is too large loses
    half of its requests, then its one request half of its tokens.
    """
    models = json.loads(PUBLISHED.read_text())["models"]
    rng = np.random.default_rng(seed)
    chosen = set(select)
    drawn = [_draw(f"random/{seed}/{i}", models, rng, bounds) for i in range(count)]
    return [shrunk(workload, shrink) for workload in drawn if not chosen or workload.id in chosen]


def _draw(
    name: str, models: list[list], rng: np.random.Generator, bounds: tuple[float, float]
) -> Workload:
    model, num_qo_heads, num_kv_heads, head_dim, use = models[rng.integers(len(models))]
    causal, page_size = use == "decoder", None
    if causal:
        kind, lengths_of, is_paged = DECODER_TASKS[rng.integers(len(DECODER_TASKS))]
        lengths = lengths_of(rng)
        if is_paged:
            page_size = int(rng.choice(PAGE_SIZES))
    else:
        kind = "backward" if rng.random() < 0.2 else "prefill"
        if use == "encoder":
            lengths = _texts(rng)
        else:
            lengths = ([int(use.split()[1])] * _batch(rng, 64),) * 2
        if kind == "backward":  # peers train on equal lengths
            lengths = ([max(lengths[0])] * len(lengths[0]),) * 2

    def workload() -> Workload:
        return Workload(
            id="/".join(
                (
                    name,
                    model.rpartition("/")[2].replace(" ", ""),
                    f"{num_qo_heads}-{num_kv_heads}-d{head_dim}",
                    kind,
                    f"{len(lengths[1])}x{round(np.mean(lengths[1]))}",
                )
            ),
            kind=kind,
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            causal=causal,
            qo_lens=tuple(lengths[0]),
            kv_lens=tuple(lengths[1]),
            anchor_us=None,
        )

    max_bytes, max_flops = bounds
    while (drawn := workload()).kv_bytes > max_bytes or drawn.flops > max_flops:
        if len(lengths[0]) > 1:
            kept = max(1, len(lengths[0]) // 2)
            lengths = lengths[0][-kept:], lengths[1][-kept:]
        else:
            queries = max(1, lengths[0][0] // 2)
            lengths = [queries], [max(queries, lengths[1][0] // 2)]
    return drawn


def distribution(ratios: dict[str, float]) -> str:
    """Describes peer / ours over workloads: median, fifth percentile, the three worst."""
    if not ratios:
        return "no row has a peer"
    values = np.array(list(ratios.values()))
    worst = sorted(ratios.items(), key=lambda item: item[1])[:3]
    return (
        f"best peer / ours over {len(values)} rows: median {np.median(values):.2f},"
        f" 5th percentile {np.percentile(values, 5):.2f}; worst: "
        + "; ".join(f"{name} {ratio:.2f}" for name, ratio in worst)
    )
