"""Small schedulers for tests, driven without a device."""

import dataclasses

from jax_attn.serve._scheduling.request import FinishReason, SamplingParams, Sequence
from jax_attn.serve._scheduling.scheduler import Scheduler
from jax_attn.serve._scheduling.step_plan import SchedulerConfig, StepPlan

SMALL = SchedulerConfig(
    page_size=4,
    num_pages=100,
    max_running=8,
    max_step_tokens=32,
    prefill_chunk=16,
    max_waiting=100,
    max_kv_pages_step=200,
    starvation_seconds=4,
)


def config(**changes) -> SchedulerConfig:
    return dataclasses.replace(SMALL, **changes)


def sequence(seq_id: str, tokens, max_tokens: int = 8, ignore_eos: bool = True, **fields):
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos)
    tokens = list(tokens)
    return Sequence(seq_id, seq_id.split(".")[0], tokens, params, **fields)


def scheduled(step: StepPlan | None) -> dict[str, int]:
    return {entry.seq.id: entry.num_tokens for entry in step.entries} if step else {}


def advance(scheduler: Scheduler, now: float = 0.0, token: int = 7) -> StepPlan | None:
    """Runs one step; its samples are known at once."""
    step = scheduler.schedule(now)
    if step:
        scheduler.launched(step)
        for entry in step.entries:
            if entry.samples:
                scheduler.append(entry.seq, [token])
                if entry.seq.num_output == entry.seq.params.max_tokens:
                    scheduler.finish(entry.seq, FinishReason.LENGTH)
    scheduler.check_integrity()
    return step


def assert_drained(scheduler: Scheduler) -> None:
    assert not scheduler.waiting and not scheduler.running
    scheduler.check_integrity()
    num_pages = scheduler.config.num_pages
    assert scheduler.cache.num_evictable == scheduler.cache.num_cached
    assert scheduler.cache.num_cached + scheduler.allocator.num_free == num_pages
    scheduler.cache.clear()
    if scheduler.memory.states is not None:
        assert scheduler.memory.states.num_available == scheduler.config.num_states
    assert scheduler.allocator.num_free == num_pages
