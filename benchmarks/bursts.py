"""Timing of chains, with rests of the device between them: one protocol for us and for the peers.

Continuous matmuls bring a GPU to its power limit in 0.1 s, and its clock falls by up to a sixth (an
H200: 1980 MHz, then 1600 to 1780; the driver names the power limit as the reason). A single number
would be for an unknown clock, so there are two. `us` is from short bursts with rests, in which the
clock does not fall; other projects' graphs of 10 to 20 calls measure the same. `sustained_us` is
without rests, from the second half of 0.4 s. Memory-bound work stays below the limit: there both
are equal, and the second is not measured.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable

TARGET_US = 2000  # length of a short chain: long compared with the host's jitter, some 10 us
MEASURE_S = 0.6
REST = 3  # length of a rest, in times of a repeat
SUSTAINED_S = 0.4


@dataclasses.dataclass(frozen=True)
class Timing:
    """Microseconds of a call. spread: interquartile range of the repeats."""

    us: float
    spread: float
    sustained_us: float | None = None


def measure(
    short_us: Callable[[], float],
    long_us: Callable[[], float],
    num_calls: int,
    *,
    sustained: bool = False,
) -> Timing:
    """Measures a call. short_us, long_us: run a chain of n and of 2n calls and return its time.

    The time of a call is the difference divided by n. Dispatch, synchronization and the edges of a
    chain are in both and cancel.
    """

    def difference_us() -> float:
        short = short_us()
        return (long_us() - short) / num_calls

    begin = time.perf_counter()
    short_us(), difference_us()
    busy_s = time.perf_counter() - begin
    repeats = max(9, min(41, int(MEASURE_S / ((1 + REST) * busy_s))))
    differences = []
    for _ in range(repeats):
        time.sleep(REST * busy_s)
        short_us()  # the first run wakes up host and device, 150 us
        differences.append(difference_us())
    low, middle, high = statistics.quantiles(differences, n=4)
    if not sustained:
        return Timing(middle, high - low)
    end, differences = time.perf_counter() + SUSTAINED_S, []
    while time.perf_counter() < end or len(differences) < 2:
        differences.append(difference_us())
    return Timing(middle, high - low, statistics.median(differences[len(differences) // 2 :]))
