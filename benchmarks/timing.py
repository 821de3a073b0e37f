"""Device time of one call inside jit, without the host's cost of a jit call.

A chain of n calls and one of 2n are compiled to one executable each. Their difference gives the
time of a call (bursts.py). Each runs behind other work and is timed by the device's clock
(device_clock.py) or, without a GPU, by the host's.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import bursts, device_clock
from benchmarks.bursts import Timing

# Reads of this array: 2 ms in all, in which the host launches the whole chain.
AHEAD_BYTES, NUM_AHEAD = 1 << 30, 6


def wall_us(run: Callable[[], Any]) -> float:
    """Times one run on the host, results awaited. Frees their memory before returning."""
    begin = time.perf_counter()
    jax.block_until_ready(run())
    return 1e6 * (time.perf_counter() - begin)


def median_us(run: Callable[[], Any], repeats: int = 15) -> float:
    for _ in range(3):
        wall_us(run)
    return statistics.median(wall_us(run) for _ in range(repeats))


def chain_length(expected_us: float, shortest: int, longest: int) -> int:
    return max(shortest, min(longest, round(bursts.TARGET_US / max(expected_us, 1.0))))


@functools.cache
def _reader() -> Callable[[], jax.Array]:
    data = jnp.zeros((1 << 14, AHEAD_BYTES >> 15), jnp.bfloat16)
    return functools.partial(jax.jit(functools.partial(jnp.max, axis=1)), data)


def _read_ahead() -> list[jax.Array]:
    """Keeps the device busy at almost no cost for the host.

    Chains of short calls would not: the host takes as long to launch one as the device to run it.
    """
    return [_reader()() for _ in range(NUM_AHEAD)]


def time_chain(
    make_chain: Callable[[int], Callable[[], Any]], num_calls: int, *, sustained: bool = False
) -> Timing:
    """Times one call. make_chain(n): returns a function that runs n dependent or distinct calls."""
    short, long = make_chain(num_calls), make_chain(2 * num_calls)
    # Both compile before either is timed: a new executable with a command buffer evicts the graphs
    # of the older ones, which are captured again on their next run.
    for _ in range(2):
        jax.block_until_ready((short(), long()))

    if jax.default_backend() == "gpu":
        time_us = functools.partial(device_clock.elapsed_us, _read_ahead)
    else:
        time_us = wall_us
    return bursts.measure(
        lambda: time_us(short), lambda: time_us(long), num_calls, sustained=sustained
    )
