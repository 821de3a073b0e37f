"""Fair shares: whatever one tenant has queued, the others' requests start, run and have tokens."""

import collections
import dataclasses
import itertools

import pytest

from helpers.serve.fake_device import FakeEngine
from helpers.serve.schedules import SMALL, advance, assert_drained, config, scheduled, sequence
from jax_attn.serve._scheduling.admission import QueueFull
from jax_attn.serve._scheduling.request import SamplingParams, Sequence, Status
from jax_attn.serve._scheduling.scheduler import Scheduler
from jax_attn.serve._scheduling.tenants import Tenant, TenantLimits

ids = itertools.count()


def many(tenant: str, num: int, num_prompt: int, max_tokens: int, **fields) -> list[Sequence]:
    """Sequences without a common beginning."""
    prompts = ([next(ids) % 2**31] * num_prompt for _ in range(num))
    return [
        sequence(
            f"{tenant}{next(ids)}", prompt, max_tokens, tenant=tenant, namespace=tenant, **fields
        )
        for prompt in prompts
    ]


def steps_until(scheduler: Scheduler, seq: Sequence, most: int = 1000) -> int:
    for num_steps in range(1, most):
        step = advance(scheduler)
        if seq in step.admitted:
            return num_steps
    raise AssertionError(f"still waiting after {most} steps")


CROWDS = {
    "decodes": {"num_prompt": 2, "max_tokens": 60},
    "prompts": {"num_prompt": 90, "max_tokens": 2},
    "all pages": {"num_prompt": 44, "max_tokens": 40},
    "urgent": {"num_prompt": 3, "max_tokens": 60, "priority": -1000},
    "short": {"num_prompt": 1, "max_tokens": 1},
}


@pytest.mark.parametrize("crowd", CROWDS)
@pytest.mark.parametrize("num_before", [0, 1, 50])
def test_one_request_among_ten_thousand_of_another_starts_within_two_steps(crowd, num_before):
    scheduler = Scheduler(config(max_waiting=10_000))
    scheduler.add(*many("a", 10_000, **CROWDS[crowd]))
    for _ in range(num_before):
        advance(scheduler)
    (mine,) = many("b", 1, 12, 6, priority=1000)
    scheduler.add(mine)
    assert steps_until(scheduler, mine) <= 2
    # And it goes on as if it were alone: a step each, but for the two that its prompt may take.
    num_steps = 1
    while mine.status is not Status.FINISHED:
        advance(scheduler)
        num_steps += 1
    assert num_steps <= 6 + 2


def test_of_many_tenants_each_starts_within_two_rounds():
    """A round: each tenant has had a turn."""
    scheduler = Scheduler(config(max_waiting=10_000))
    scheduler.add(*many("a", 5_000, 9, 20))
    for _ in range(10):
        advance(scheduler)
    others = [many(f"t{i}", 1, 5, 4)[0] for i in range(30)]
    scheduler.add(*others)
    num_admitted = collections.Counter()
    while any(seq.status is Status.WAITING for seq in others):
        num_admitted.update(seq.tenant for seq in advance(scheduler).admitted)
    assert num_admitted["a"] <= 2 + SMALL.max_running


@pytest.mark.parametrize("heavy", CROWDS)
def test_two_tenants_that_want_all_have_half_of_the_slots_and_tokens(heavy):
    scheduler = Scheduler(config(max_waiting=10_000))
    num_tokens, num_slots = collections.Counter(), collections.Counter()
    for step_index in range(600):
        for name, kind in (("a", CROWDS[heavy]), ("b", {"num_prompt": 20, "max_tokens": 8})):
            if sum(seq.tenant == name for seq in scheduler.waiting) < 20:
                scheduler.add(*many(name, 20, **kind))
        step = advance(scheduler)
        if step_index >= 50:
            for entry in step.entries:
                num_tokens[entry.seq.tenant] += entry.num_tokens
            num_slots.update(seq.tenant for seq in scheduler.running)
    # Whoever reads prompts can use more tokens of a step than half of the slots that decode.
    assert num_tokens["b"] >= 0.4 * num_tokens.total()
    assert heavy in ("short", "prompts") or num_slots["a"] >= 0.3 * num_slots.total()
    assert num_tokens["a"] >= 0.25 * num_tokens.total() or heavy == "short"
    assert num_slots["b"] >= 0.3 * num_slots.total()


def test_a_tenant_that_is_alone_has_everything():
    scheduler = Scheduler(config())
    scheduler.add(*many("a", 100, 2, 30))
    advance(scheduler)
    assert len(scheduler.running) == 8
    with pytest.raises(QueueFull, match=r"the queue is full: 92 of 100 "):
        scheduler.add(*many("a", 9, 2, 3))
    scheduler.add(*many("a", 8, 2, 3))


def test_nobody_fills_the_queue_for_others():
    scheduler = Scheduler(config())
    scheduler.add(*many("a", 100, 2, 30))
    scheduler.add(*many("b", 50, 2, 30))
    with pytest.raises(QueueFull, match="your share of it is 50"):
        scheduler.add(*many("b", 1, 2, 30))
    with pytest.raises(QueueFull, match="your share of it is 50"):
        scheduler.add(*many("a", 1, 2, 30))
    scheduler.add(*many("c", 33, 2, 30))
    with pytest.raises(QueueFull, match="your share of it is 33"):
        scheduler.add(*many("c", 1, 2, 30))


def test_limits_of_a_tenant():
    limits = TenantLimits(max_waiting=5, max_running=2)
    scheduler = Scheduler(config(tenant_limits=limits))
    with pytest.raises(QueueFull, match="more than the 5 that a key may have"):
        scheduler.add(*many("a", 6, 2, 30))
    a = many("a", 5, 2, 4)
    scheduler.add(*a)
    while scheduler.running or scheduler.waiting:
        advance(scheduler)
        assert len(scheduler.running) <= 2
    assert all(seq.num_output == 4 for seq in a)
    for name in ("max_waiting", "max_running"):
        with pytest.raises(ValueError, match=f"{name}: expected at least 1, got 0"):
            TenantLimits(**{name: 0})


def test_pages_are_taken_from_whoever_has_most():
    """b is the youngest, and has one page; a's grow beyond what there is."""
    scheduler = Scheduler(config(num_pages=24, starvation_steps=100))
    a = many("a", 3, 12, 50)
    scheduler.add(*a)
    advance(scheduler)
    (b,) = many("b", 1, 2, 60)
    scheduler.add(b)
    preempted = []
    while b.num_output < 40:
        preempted += advance(scheduler).preempted
    assert preempted and set(preempted) <= set(a)


def test_who_was_idle_long_does_not_shut_out_others_for_long():
    """b always has a little to do while a reads much; then b wants all."""
    scheduler = Scheduler(config(max_waiting=1000))
    for _ in range(300):
        if not any(seq.tenant == "b" for seq in scheduler.running + scheduler.waiting):
            scheduler.add(*many("b", 1, 1, 30))
        if len(scheduler.waiting) < 4:
            scheduler.add(*many("a", 4, 60, 2))
        advance(scheduler)
    scheduler.add(*many("b", 500, 60, 2))
    had = []
    for _ in range(12):
        if sum(seq.tenant == "a" for seq in scheduler.waiting) < 4:
            scheduler.add(*many("a", 4, 60, 2))
        step = advance(scheduler)
        had += [e.seq.tenant for e in step.entries for _ in range(e.num_tokens)]
    assert had.count("a") >= 0.3 * len(had)


def test_priorities_order_the_requests_of_one_tenant_only():
    scheduler = Scheduler(config(max_running=2, max_step_tokens=8))
    scheduler.add(*many("a", 20, 4, 1, priority=-1000), *many("b", 20, 4, 1, priority=1000))
    late = many("b", 1, 4, 1, priority=5)[0]
    scheduler.add(late)
    order = []
    while scheduler.waiting:
        order += list(advance(scheduler).admitted)
    tenants = [seq.tenant for seq in order]
    assert all(abs(tenants[:n].count("a") - tenants[:n].count("b")) <= 2 for n in range(40))
    assert next(seq for seq in order if seq.tenant == "b") is late


def test_equal_prompts_of_two_tenants_have_pages_of_their_own():
    scheduler = Scheduler(config())
    prompt = range(13)
    for tenant in "ab":
        scheduler.add(sequence(tenant, prompt, tenant=tenant, namespace=tenant))
    assert scheduled(advance(scheduler)) == {"a": 13, "b": 13}
    a, b = scheduler.running
    assert not set(a.pages) & set(b.pages)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_retracted_token_goes_through_again_and_nothing_else_changes(depth):
    """Also where the prompt fills its last page: that page is not shared yet."""
    params = SamplingParams(max_tokens=6, ignore_eos=True, grammar="any")
    for num_prompt in (7, 8, 9):
        scheduler = Scheduler(config())
        seq = Sequence("a", "a", list(range(num_prompt)), params)
        scheduler.add(seq)
        step = scheduler.schedule(0)
        scheduler.launched(step)
        assert seq.num_in_flight == 1 and seq.num_shared == (num_prompt - 1) // 4
        scheduler.retract(seq)
        scheduler.check_integrity()
        assert scheduler.schedule(0) is None
        scheduler.resume(seq)
        assert scheduled(scheduler.schedule(0)) == {"a": 1}
        for token in range(6):
            step = scheduler.schedule(0)
            scheduler.launched(step)
            scheduler.append(seq, [token])
        assert seq.tokens[num_prompt:] == list(range(6))


def test_only_a_sample_in_flight_is_retracted():
    scheduler = Scheduler(config())
    params = SamplingParams(max_tokens=6, ignore_eos=True, grammar="any")
    seq = Sequence("a", "a", [1, 2, 3], params)
    plain = sequence("b", [1])
    scheduler.add(seq, plain)
    with pytest.raises(ValueError, match="a: retract: expected one sample in flight, got 0"):
        scheduler.retract(seq)
    scheduler.launched(scheduler.schedule(0))
    with pytest.raises(ValueError, match="b: retract"):
        scheduler.retract(plain)


def test_a_tenants_sequences_end_as_if_they_had_run_alone():
    """Preempted for others' shares, in a pool too small for all."""
    from helpers.serve.fake_device import reference_output

    scheduler = Scheduler(config(num_pages=30, max_waiting=1000))
    engine = FakeEngine(scheduler)
    seqs = [seq for name in "abc" for seq in many(name, 10, 6, 30)]
    seqs = [dataclasses.replace(seq, tokens=[t % 50 for t in seq.tokens]) for seq in seqs]
    for now, seq in enumerate(seqs):
        scheduler.add(seq)
        engine.step(now)
    while engine.has_work:
        engine.step(0)
        scheduler.check_integrity()
    assert scheduler.stats().num_preemptions > 0
    for seq in seqs:
        assert seq.tokens[seq.num_prompt :] == reference_output(seq, False)[0]
    assert_drained(scheduler)


def test_tenants_that_wait_are_not_sorted_in_every_step(monkeypatch):
    """They were, half a dozen times: 6 ms a step for a thousand of them."""
    scheduler = Scheduler(config(max_waiting=10_000))
    scheduler.add(*(many(f"t{i}", 1, 5, 60)[0] for i in range(1000)))
    for _ in range(5):
        advance(scheduler)
    num_looks, turn = 0, Tenant.turn.fget

    def counted(tenant: Tenant) -> tuple[int, int, int]:
        nonlocal num_looks
        num_looks += 1
        return turn(tenant)

    monkeypatch.setattr(Tenant, "turn", property(counted))
    assert scheduler.schedule(100.0).entries
    assert num_looks <= 1000 + 10 * SMALL.max_running
