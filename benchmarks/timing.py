"""Device time of one call inside jit, free of what a jit call costs on the host.

A chain of n calls and one of 2n are compiled, each one executable; what a call costs is in their
difference (bursts.py). Each runs behind another chain and is timed by the device (device_clock.py);
where there is no GPU, by the host.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

from benchmarks import bursts, device_clock
from benchmarks.bursts import Timing

AHEAD_US = 1000  # of work that hides what the host does for a chain before it launches


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
    return max(shortest, min(longest, round(bursts.TARGET_US / max(expected_us, 1.0))))


def time_chain(
    make_chain: Callable[[int], Callable[[], Any]], num_calls: int, *, sustained: bool = False
) -> Timing:
    """make_chain(n): a function of no arguments that runs n dependent or distinct calls."""
    short, long = make_chain(num_calls), make_chain(2 * num_calls)
    # Both compile before either is timed: a new executable with a command buffer evicts the graphs
    # of the older ones, which are captured again on their next run.
    for _ in range(2):
        jax.block_until_ready((short(), long()))

    if jax.default_backend() == "gpu":
        num_ahead = math.ceil(AHEAD_US / device_clock.elapsed_us(short, short))
        time_us = functools.partial(
            device_clock.elapsed_us, lambda: [short() for _ in range(num_ahead)]
        )
    else:
        time_us = wall_us
    return bursts.measure(
        lambda: time_us(short), lambda: time_us(long), num_calls, sustained=sustained
    )
