"""Device time of one call inside jit, free of what a jit call costs on the host.

A chain of n calls and one of 2n are compiled, each one executable; the difference of their wall
times over n is what one more call costs the device. Dispatch, synchronisation and the first and
last call's edges are in both and cancel.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

TARGET_US = 4000  # of a short chain: long beside the host's jitter of some 10 us
MEASURE_S = 0.5


@dataclasses.dataclass(frozen=True)
class Timing:
    """Microseconds. spread: between the quartiles of the repeats."""

    us: float
    spread: float
    num_calls: int


def wall_us(run: Callable[[], Any]) -> float:
    """One run, results awaited. Their memory is free again before the next run."""
    begin = time.perf_counter()
    jax.block_until_ready(run())
    return 1e6 * (time.perf_counter() - begin)


def median_us(run: Callable[[], Any], repeats: int = 15) -> float:
    for _ in range(3):
        wall_us(run)
    return statistics.median(wall_us(run) for _ in range(repeats))


def chain_length(expected_us: float, shortest: int, longest: int) -> int:
    return max(shortest, min(longest, round(TARGET_US / max(expected_us, 1.0))))


def time_chain(
    make_chain: Callable[[int], Callable[[], Any]], num_calls: int, measure_s: float = MEASURE_S
) -> Timing:
    """make_chain(n): a function of no arguments that runs n dependent or distinct calls."""
    short, long = make_chain(num_calls), make_chain(2 * num_calls)
    # Both compile before either is timed: a new executable with a command buffer evicts the graphs
    # of the older ones, which are captured again on their next run.
    for _ in range(2):
        jax.block_until_ready((short(), long()))
    once_s = 1e-6 * (wall_us(short) + wall_us(long))
    repeats = max(7, min(41, int(measure_s / once_s)))
    differences = []
    for _ in range(repeats):
        short_us = wall_us(short)
        differences.append((wall_us(long) - short_us) / num_calls)
    low, middle, high = statistics.quantiles(differences, n=4)
    return Timing(us=middle, spread=high - low, num_calls=num_calls)
