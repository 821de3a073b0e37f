"""Tenants never see each other's values; a million steps.

A freed page is poisoned, and a read of a page that another tenant wrote is caught (see
fake_device).

    python -m pytest tests/serve/test_isolation.py -m hours -n 0
"""

import random

import pytest

from helpers.serve.fake_device import VOCAB, FakeEngine, reference_output, salt
from helpers.serve.schedules import assert_drained, config
from jax_attn.serve._scheduling.admission import QueueFull
from jax_attn.serve._scheduling.request import FinishReason, SamplingParams, Sequence, Status
from jax_attn.serve._scheduling.scheduler import Scheduler
from jax_attn.serve._scheduling.step_plan import StepPlan
from jax_attn.serve._scheduling.tenants import namespace

TENANTS = ("", "key0", "key1", "key2")
SYSTEMS = [
    config(num_pages=30, max_step_tokens=12, prefill_chunk=5),
    config(num_pages=16, max_running=4, max_step_tokens=16, starvation_seconds=2),
    config(page_size=1, num_pages=60, max_kv_pages_step=90),
    config(num_pages=24, max_kv_pages_step=30, max_waiting=12),
    config(num_pages=30, max_step_tokens=12, prefill_chunk=5, num_states=16, checkpoint_tokens=8),
    config(page_size=1, num_pages=60, max_kv_pages_step=90, num_states=20, checkpoint_tokens=4),
    config(num_pages=30, max_step_tokens=12, prefill_chunk=5, burst_steps=4),
    config(page_size=1, num_pages=60, max_kv_pages_step=90, burst_steps=3),
]


class RetractingEngine(FakeEngine):
    """Some samples in flight turn out to be void, and their sequences are held for a while."""

    def __init__(self, scheduler: Scheduler, rng: random.Random):
        super().__init__(scheduler, depth=1)
        self._rng, self._held = rng, []
        self.num_retracted = 0

    def step(self, now: float) -> StepPlan | None:
        for seq in self._held[:]:
            if seq.status is Status.FINISHED or self._rng.random() < 0.4:
                self._held.remove(seq)
                self.scheduler.resume(seq)
        plan = super().step(now)
        for entry in plan.entries if plan else ():
            seq = entry.seq
            may = entry.samples and seq.may_retract and seq.num_in_flight == 1
            if may and seq.status is not Status.FINISHED and self._rng.random() < 0.2:
                self.scheduler.retract(seq)
                self.device.num_computed[seq.id] = seq.num_computed
                self.voided.add((self.num_launched - 1, seq.id))
                self._held.append(seq)
                self.num_retracted += 1
        return plan


def arrive(rng: random.Random, scheduler: Scheduler, name: str, now: int) -> list[Sequence]:
    """All tenants draw from the same few prompts."""
    prompt = [(7 * rng.randrange(2) + i) % VOCAB for i in range(rng.randrange(1, 24))]
    prompt += [rng.randrange(VOCAB) for _ in range(rng.randrange(3))]
    params = SamplingParams(
        max_tokens=rng.choice([1, 2, rng.randrange(1, 30)]),
        ignore_eos=rng.random() < 0.5,
        grammar="any" if rng.random() < 0.3 else None,
    )
    tenant = rng.choice(TENANTS)
    seqs = [
        Sequence(
            f"{name}.{i}",
            name,
            list(prompt),
            params,
            namespace(tenant, rng.choice(["", "", "salt"])),
            rng.choice([-1000, 0, 1000]),
            now + rng.randrange(40) if rng.random() < 0.1 else None,
            tenant=tenant,
        )
        for i in range(rng.choice([1, 1, 3]))
    ]
    try:
        scheduler.add(*seqs)
    except QueueFull:
        return []
    return seqs


def simulate(seed: int, num_steps: int) -> dict[str, int]:
    """Runs steps of one engine under constant load."""
    rng = random.Random(seed)
    scheduler = Scheduler(SYSTEMS[seed % len(SYSTEMS)])
    engine, live, num_compared = RetractingEngine(scheduler, rng), [], 0
    for now in range(num_steps):
        if rng.random() < 0.3:
            live += arrive(rng, scheduler, f"{now}", now)
        if live and rng.random() < 0.03:
            scheduler.abort(rng.choice(live).id)
        engine.step(now)
        engine.log.clear()
        if now % 50 == 0:
            scheduler.check_integrity()
            engine.voided = {v for v in engine.voided if v[0] >= engine.num_retired}
            for seq in [seq for seq in live if seq.status is Status.FINISHED]:
                num_compared += check_output(seq)
            live = [seq for seq in live if seq.status is not Status.FINISHED]
            engine.device.owners = {seq.slot: seq for seq in scheduler.running}
    for seq in live:
        scheduler.abort(seq.id)
    while engine.flying:
        engine.step(num_steps)
    stats = scheduler.stats()
    assert_drained(scheduler)
    return {
        "compared": num_compared,
        "preempted": stats.num_preemptions,
        "cached": stats.num_prompt_tokens_cached,
        "retracted": engine.num_retracted,
    }


def check_output(seq: Sequence) -> int:
    """Checks that the output is that of a run alone; a context begins with its namespace's salt."""
    expected, reason = reference_output(seq, False)
    output = seq.tokens[seq.num_prompt :]
    if seq.finish_reason in (FinishReason.ABORT, FinishReason.DEADLINE):
        assert output == expected[: len(output)]
    else:
        assert (output, seq.finish_reason) == (expected, reason)
    return 1


def test_no_foreign_value_reaches_a_result():
    totals = [simulate(seed, 1_400) for seed in range(2 * len(SYSTEMS))]
    for name, least in (
        ("compared", 2000),
        ("preempted", 100),
        ("cached", 5000),
        ("retracted", 300),
    ):
        assert sum(total[name] for total in totals) >= least, name


@pytest.mark.hours
@pytest.mark.timeout(3600)
def test_a_million_steps():
    for seed in range(100, 200):
        simulate(seed, 10_000)


def test_namespaces_have_contexts_of_their_own():
    names = [namespace(tenant, extra) for tenant in TENANTS for extra in ("", "salt")]
    assert len({salt(name) for name in names}) == len(set(names)) == len(names)


@pytest.mark.parametrize("mistake", ["sharing", "freeing"])
def test_the_oracle_notices(mistake, monkeypatch):
    """Mistakes: pages shared between namespaces, and pages freed while in use."""
    if mistake == "sharing":
        monkeypatch.setattr(
            "jax_attn.serve._scheduling.prefix_cache.RadixCache._child_key",
            lambda self, node, namespace, key, begin=0: key[begin : begin + self._page_bytes],
        )
    else:
        monkeypatch.setattr(
            "jax_attn.serve._scheduling.prefix_cache.RadixCache.lock", lambda self, node: None
        )
        monkeypatch.setattr(
            "jax_attn.serve._scheduling.prefix_cache.RadixCache.unlock", lambda self, node: None
        )
    with pytest.raises(AssertionError, match="foreign page|is free|hold the context"):
        for seed in range(20):
            simulate(seed, 49)
            monkeypatch.setattr(Scheduler, "check_integrity", lambda self: None)
