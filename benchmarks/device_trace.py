"""A GPU's activity under the profiler: busy time, kernels and gaps.

XLA runs without command buffers under a profiler. So every kernel appears separately, and the gaps
between the kernels of one executable are wider than without it.
"""

from __future__ import annotations

import collections
import dataclasses
import glob
import math
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

# Copies between host and device run beside the kernels; they alone do not make a device busy.
_HOST_COPIES = ("MemcpyH2D", "MemcpyD2H", "Memcpy HtoD", "Memcpy DtoH")


class Event(NamedTuple):
    begin_us: float
    end_us: float
    name: str
    module: str  # its executable; "": unknown


@dataclasses.dataclass(frozen=True)
class Summary:
    """Microseconds over `num_steps` steps, from the first step's begin to the last one's begin.

    busy + idle_within + idle_between = span. idle_between: between executables.
    """

    num_steps: int
    span: float
    busy: float
    idle_within: float
    idle_between: float
    kernels: tuple[tuple[str, int, float], ...]  # name, count, total; longest total first

    def describe(self) -> str:
        n = self.num_steps
        lines = [
            f"{n} steps of {self.span / n:.0f} us: busy {self.busy / n:.0f}, idle within"
            f" executables {self.idle_within / n:.0f}, between them {self.idle_between / n:.0f}"
        ]
        lines += [
            f"{total / n:9.1f} us a step, {count / n:7.1f} x {total / count:8.2f} us  {name[:90]}"
            for name, count, total in self.kernels[:24]
        ]
        return "\n    ".join(lines)


def record(run: Callable[[], Any], first_module: str) -> Summary | None:
    """Profiles `run`. first_module: the executable that begins a step (jit_forward).

    Returns None if the trace has no GPU.
    """
    events = record_events(run)
    return summarize(events, first_module) if events else None


def record_events(run: Callable[[], Any]) -> list[Event]:
    """Profiles `run` and returns the events of the first GPU, sorted by begin."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        return device_events(jax.profiler.ProfileData.from_file(path))


def covered_us(events: list[Event]) -> float:
    """Returns the time covered by at least one event. events: sorted by begin."""
    total, end = 0.0, -math.inf
    for event in events:
        total += max(0.0, event.end_us - max(end, event.begin_us))
        end = max(end, event.end_us)
    return total


def device_events(profile: Any) -> list[Event]:
    """Returns the events of the first GPU, sorted by begin."""
    events = []
    for plane in profile.planes:
        if not plane.name.startswith("/device:GPU:0"):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                if event.name.startswith(_HOST_COPIES):
                    continue
                module = next((str(v) for k, v in event.stats if k == "hlo_module"), "")
                begin = event.start_ns / 1e3
                events.append(Event(begin, begin + event.duration_ns / 1e3, event.name, module))
    return sorted(events)


def summarize(events: list[Event], first_module: str) -> Summary:
    """Summarizes events. Without module names in the trace, all of it counts as one step."""
    events = _with_modules(events)
    begins = [
        event.begin_us
        for before, event in zip([None, *events], events, strict=False)
        if event.module.startswith(first_module)
        and (before is None or before.module != event.module)
    ]
    # Skip the first steps, in which the profiler warms up.
    begins = begins[min(2, max(0, len(begins) - 2)) :]
    if len(begins) >= 2:
        events = [event for event in events if begins[0] <= event.begin_us < begins[-1]]
        end, num_steps = begins[-1], len(begins) - 1
    else:
        end, num_steps = max(event.end_us for event in events), 1
    busy = within = between = 0.0
    now, module = events[0].begin_us, events[0].module
    totals: dict[str, list[float]] = collections.defaultdict(list)
    for event in events:
        totals[event.name].append(event.end_us - event.begin_us)
        gap = max(0.0, event.begin_us - now)
        if event.module == module:
            within += gap
        else:
            between += gap
        busy += max(0.0, event.end_us - max(now, event.begin_us))
        now, module = max(now, event.end_us), event.module
    between += max(0.0, end - now)
    ranked = sorted(totals.items(), key=lambda item: -sum(item[1]))
    kernels = tuple((name, len(times), sum(times)) for name, times in ranked)
    return Summary(num_steps, end - events[0].begin_us, busy, within, between, kernels)


def _with_modules(events: list[Event]) -> list[Event]:
    """Assigns events without a module, such as fills, to the previous event's module."""
    named, module = [], ""
    for event in events:
        module = event.module or module
        named.append(event._replace(module=module))
    return named
