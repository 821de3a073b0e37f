"""Counters of an engine: the current step's numbers, totals, and seconds by phase."""

from __future__ import annotations

import time
from typing import Any

from jax_attn.serve._scheduling.events import PHASES, StepStats
from jax_attn.serve._scheduling.scheduler import SchedulerStats

_TOTALS = (
    "steps",
    "generated_tokens",
    "jump_forward_tokens",
    "draft_tokens",
    "draft_tokens_taken",
)


class Counters:
    """Written by the engine's thread.

    step: numbers of the last call of Engine.step.
    totals: since the start.
    phases: for each of PHASES a context manager that adds the seconds of its block.
    """

    def __init__(self) -> None:
        self.step = StepStats(0)
        self.totals = dict.fromkeys(_TOTALS, 0)
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self.phases = {name: _Phase(self, name) for name in PHASES}

    def begin_step(self) -> None:
        self.step = StepStats(self.step.index + 1)

    def add_seconds(self, phase: str, seconds: float) -> None:
        self.step.seconds[phase] += seconds
        self._seconds[phase] += seconds

    def report(
        self,
        scheduler: SchedulerStats,
        num_pages: int,
        num_compilations: int,
        num_buckets_left: int,
        device_bytes: dict[int, int],
    ) -> dict[str, Any]:
        """See Engine.stats. num_compilations: after the warm-up, unexpected ones.
        num_buckets_left: not compiled yet. device_bytes: by device."""
        num_kept = scheduler.num_free_pages + scheduler.num_cached_pages
        return {
            "waiting": scheduler.num_waiting,
            "running": scheduler.num_running,
            "pages_total": num_pages,
            "pages_free": scheduler.num_free_pages,
            "pages_cached": scheduler.num_cached_pages,
            "pages_used": num_pages - num_kept,
            "states": scheduler.states,
            "host": scheduler.host,
            "host_states": scheduler.host_states,
            "files": scheduler.files,
            "dropped_pages": scheduler.num_dropped_pages,
            "prompt_tokens": scheduler.num_prompt_tokens,
            "prefix_hit_tokens": scheduler.num_prompt_tokens_cached,
            "preemptions": scheduler.num_preemptions,
            **self.totals,
            "compilations": num_compilations,
            "buckets_left": num_buckets_left,
            "step_seconds": dict(self._seconds),
            "device_bytes": device_bytes,
        }


class _Phase:
    """Measures a `with` block. contextlib's generators would take as long as some of the phases."""

    __slots__ = ("_counters", "_name", "_begin")

    def __init__(self, counters: Counters, name: str):
        self._counters, self._name = counters, name
        self._begin = 0.0

    def __enter__(self) -> None:
        self._begin = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._counters.add_seconds(self._name, time.perf_counter() - self._begin)
