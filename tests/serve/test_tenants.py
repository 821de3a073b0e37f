"""Fair shares: whatever one tenant has queued, others' requests start, run and get tokens."""

import collections
import dataclasses
import itertools
import random

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
    # It goes on as if alone: one token a step, except for two steps that its prompt may take.
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
    # A tenant with prompts can use more tokens of a step than half of the decoding slots.
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
    scheduler = Scheduler(config(num_pages=24, starvation_seconds=100))
    a = many("a", 3, 12, 50)
    scheduler.add(*a)
    advance(scheduler)
    (b,) = many("b", 1, 2, 60)
    scheduler.add(b)
    preempted = []
    while b.num_output < 40:
        preempted += advance(scheduler).preempted
    assert preempted and set(preempted) <= set(a)


def preempted_for(num_pages: int, a: tuple[int, int]) -> int:
    """Sequences of a that are preempted for one of b that needs num_pages pages.

    Of 40 pages, b has 8. a: its sequences, and pages of each. One page for each running sequence
    and one more are in reserve, so nothing below fits without a preemption.
    """
    scheduler = Scheduler(config(num_pages=40, max_step_tokens=200, prefill_chunk=200))
    scheduler.add(*many("a", a[0], 4 * a[1] - 3, 30))
    advance(scheduler)
    scheduler.add(*many("b", 1, 29, 30))
    advance(scheduler)
    assert len(scheduler.running) == a[0] + 1
    scheduler.add(*many("b", 1, 4 * num_pages - 1, 5))
    step = advance(scheduler)
    assert not step.admitted and {seq.tenant for seq in step.preempted} <= {"a"}
    return len(step.preempted)


def test_who_has_less_than_its_share_of_pages_takes_them_from_who_has_more():
    """A share is 20 pages. Beyond it nothing is taken, or two tenants would preempt in turns."""
    assert preempted_for(12, a=(4, 6)) == 1  # 24 pages; b would have 8 + 12 = 20
    assert preempted_for(13, a=(4, 6)) == 0  # b would have 21
    assert preempted_for(12, a=(4, 5)) == 0  # a has its share
    assert preempted_for(11, a=(3, 7)) == 1  # a has 21


@pytest.mark.parametrize(
    "num_a, num_b, num_preempted",
    [(8, 0, 1), (5, 3, 1), (4, 4, 0), (3, 5, 0), (5, 4, 0), (6, 3, 1)],
)
def test_who_has_less_than_its_share_of_slots_takes_them_from_who_has_more(
    num_a, num_b, num_preempted
):
    """A share is 4 of 8 or 9 slots."""
    sizes = {"max_running": num_a + num_b, "max_step_tokens": 200, "prefill_chunk": 200}
    scheduler = Scheduler(config(**sizes))
    scheduler.add(*many("a", num_a, 2, 30), *many("b", num_b, 2, 30))
    advance(scheduler)
    assert len(scheduler.running) == num_a + num_b
    scheduler.add(*many("b", 3, 2, 30))
    preempted = advance(scheduler).preempted
    assert [seq.tenant for seq in preempted] == ["a"] * num_preempted


@pytest.mark.parametrize("num_pages", [24, 40])
def test_preemptions_between_two_tenants_are_bounded(num_pages):
    """Both want all pages for 400 steps. A preempted sequence goes on to its end soon."""
    scheduler = Scheduler(config(num_pages=num_pages, max_waiting=1000))
    seqs, num_preempted = [], 0
    for _ in range(400):
        for name in ("a", "b"):
            if sum(seq.tenant == name for seq in scheduler.waiting) < 4:
                seqs += (new := many(name, 4, 12, 30))
                scheduler.add(*new)
        num_preempted += len(advance(scheduler).preempted)
    num_finished = sum(seq.status is Status.FINISHED for seq in seqs)
    assert num_finished >= num_pages * 400 // 300
    assert max(seq.num_preempted for seq in seqs) <= 2
    assert num_preempted <= 1.3 * num_finished


@pytest.mark.parametrize("num_pages, num_preempted", [((16, 2), 1), ((2, 16), 0)])
def test_of_two_with_less_than_their_share_the_first_in_turn_takes_pages(num_pages, num_preempted):
    """A share is 20 of 60 pages. 20 are free, 6 of these in reserve."""
    sizes = {"num_pages": 60, "max_step_tokens": 200, "prefill_chunk": 200}
    scheduler = Scheduler(config(**sizes))
    scheduler.add(*many("a", 5, 29, 30))
    advance(scheduler)
    assert len(scheduler.running) == 5
    for name, num in zip("bc", num_pages, strict=True):
        scheduler.add(*many(name, 1, 4 * num - 1, 5))
    assert [seq.tenant for seq in advance(scheduler).preempted] == ["a"] * num_preempted


class Crowd:
    """Tenants that always have more sequences waiting than fit."""

    def __init__(self, scheduler: Scheduler, num_tenants: int = 1, **kind):
        self.scheduler, self.kind = scheduler, kind
        self.names = [f"crowd{i}." for i in range(num_tenants)]
        self.num_pages = 0  # of its sequences as they entered

    def step(self) -> None:
        for name in self.names:
            if sum(seq.tenant == name for seq in self.scheduler.waiting) < 5:
                self.scheduler.add(*many(name, 5, **self.kind))
        step = advance(self.scheduler)
        admitted = step.admitted if step else []
        self.num_pages += sum(
            -(-seq.num_prompt // 4) for seq in admitted if seq.tenant in self.names
        )

    def until(self, seq: Sequence, status: Status, most: int = 1000) -> int:
        """Steps until `seq` has that status."""
        for num_steps in range(most):
            if seq.status is status:
                return num_steps
            self.step()
        raise AssertionError(f"{seq.status} after {most} steps")


CROWDED = {
    "long ones": (1, {"num_prompt": 44, "max_tokens": 40}),
    "short ones": (1, {"num_prompt": 20, "max_tokens": 3}),
    "several within their shares": (3, {"num_prompt": 40, "max_tokens": 12}),
    "more than slots": (12, {"num_prompt": 40, "max_tokens": 4}),
    "all slots": (3, {"num_prompt": 1, "max_tokens": 12}),
}


@pytest.mark.parametrize("num_pages", [34, 60, 97])
@pytest.mark.parametrize("crowded", CROWDED)
def test_who_needs_more_than_its_share_waits_no_longer_than_twice_its_turn(crowded, num_pages):
    """There are 100 pages. Each of the others is given twice what it needs, then it is next."""
    num_others, kind = CROWDED[crowded]
    scheduler = Scheduler(config(max_waiting=1000))
    crowd = Crowd(scheduler, num_others, **kind)
    for _ in range(20):
        crowd.step()
    (mine,) = many("mine", 1, 4 * num_pages - 12, 12)
    scheduler.add(mine)
    crowd.num_pages = 0
    crowd.until(mine, Status.RUNNING)
    # Those that enter in the step in which its time comes have a poolful at most.
    assert crowd.num_pages <= 2 * num_others * num_pages + 100
    assert crowd.until(mine, Status.FINISHED) <= num_pages * 4 // 8 + 12 + 20
    assert mine.num_preempted == 0


def test_nobody_enters_before_an_overdue_sequence_and_others_go_on_after_it():
    scheduler = Scheduler(config(max_waiting=1000))
    crowd = Crowd(scheduler, 1, num_prompt=20, max_tokens=30)
    for _ in range(10):
        crowd.step()
    (mine,) = many("mine", 1, 240, 12)
    scheduler.add(mine)
    crowd.num_pages, num_pages = 0, []
    while mine.status is Status.WAITING:
        crowd.step()
        num_pages.append(crowd.num_pages)
    # 60 pages, twice; then others wait for some steps, until enough pages are free.
    assert 120 <= num_pages[-1] < 120 + 5 * 8
    assert num_pages.count(num_pages[-1]) > 3
    crowd.until(mine, Status.FINISHED)
    assert crowd.num_pages > num_pages[-1]


def test_a_tenant_with_large_sequences_only_gets_no_more_than_others_over_time():
    """Between two of its sequences the other tenant is given twice the pages of one."""
    scheduler = Scheduler(config(max_waiting=1000))
    crowd = Crowd(scheduler, 1, num_prompt=20, max_tokens=20)
    large = many("large", 30, 260, 20)
    scheduler.add(*large)
    for _ in range(1200):
        crowd.step()
    num_finished = sum(seq.status is Status.FINISHED for seq in large)
    assert 5 <= num_finished < 30
    assert crowd.num_pages >= 1.8 * 65 * num_finished


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_short_requests_do_not_undo_a_large_one_for_ever(prefix_cache):
    """Each comes while the large one, which has all pages, reads its prompt, and preempts it."""
    scheduler = Scheduler(config(prefix_cache=prefix_cache))
    (mine,) = many("mine", 1, 384, 4)
    scheduler.add(mine)
    for num_steps in range(300):
        if num_steps % 9 == 5:
            scheduler.add(*many("short", 1, 5, 3))
        advance(scheduler)
        if mine.status is Status.FINISHED:
            break
    assert mine.status is Status.FINISHED and 1 <= mine.num_preempted <= 4


def test_growth_of_others_does_not_preempt_who_has_borrowed():
    """Preempted are the others' last, though the borrower is the youngest and has most pages."""
    scheduler = Scheduler(config(max_waiting=1000, num_pages=60))
    crowd = Crowd(scheduler, 2, num_prompt=9, max_tokens=40)
    for _ in range(5):
        crowd.step()
    mine, second = many("mine", 2, 120, 60)
    scheduler.add(mine, second)
    crowd.until(mine, Status.RUNNING)
    num_before = scheduler.stats().num_preemptions
    crowd.until(mine, Status.FINISHED)
    assert mine.num_preempted == 0 and scheduler.stats().num_preemptions > num_before


@pytest.mark.parametrize("seed", range(6))
def test_every_wait_is_bounded_whatever_others_send(seed):
    """Tenants with random sequences, always more than fit, of up to all pages.

    A tenant without running sequences waits until each of the others has been given twice what it
    needs, and behind those of them that waited longer.
    """
    rng = random.Random(seed)
    num_tenants = rng.choice([2, 3, 5])
    scheduler = Scheduler(config(max_waiting=1000, num_pages=40, prefix_cache=rng.random() < 0.5))
    sizes = {f"t{i}": rng.choice([[150], [4, 150], [9], [4, 20, 60]]) for i in range(num_tenants)}
    sizes["t0"] = [9]  # short ones of one tenant could always take its place
    sizes["t1"] = [150]
    waits, longest = collections.Counter(), collections.Counter()
    for _ in range(1500):
        for name in sizes:
            if sum(seq.tenant == name for seq in scheduler.waiting) < 3:
                scheduler.add(*many(name, 3, rng.choice(sizes[name]), rng.choice([1, 4, 10])))
        advance(scheduler)
        running = {seq.tenant for seq in scheduler.running}
        for name in sizes:
            waits[name] = 0 if name in running else waits[name] + 1
            longest[name] = max(longest[name], waits[name])
    assert max(longest.values()) <= 100 * num_tenants


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
    """Also if the prompt fills its last page: that page is not shared yet."""
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
    """Preempted for other tenants' shares, in a pool too small for all."""
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
    """Sorting cost 6 ms a step for a thousand tenants, half a dozen times a step."""
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
