"""How many pages sequences get: to the last page of the pool and the last entry of the table."""

import pytest

from helpers.serve.schedules import advance, assert_drained, config, scheduled, sequence
from jax_attn.serve._scheduling.request import Status
from jax_attn.serve._scheduling.scheduler import Scheduler

LIMITS = {
    "pool": {"num_pages": 5, "max_kv_pages_step": 50},
    "table": {"num_pages": 50, "max_kv_pages_step": 5},
    "both": {"num_pages": 5, "max_kv_pages_step": 5},
}


@pytest.mark.parametrize("num_prompt", [1, 15, 16, 17, 18])
@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("max_running", [1, 8])
def test_a_sequence_that_is_alone_fills_the_last_page(limit, num_prompt, max_running):
    """Its pages are taken one by one, or all at its start."""
    scheduler = Scheduler(config(max_running=max_running, **LIMITS[limit]))
    assert scheduler.max_sequence_tokens == 20
    seq = sequence("0", range(num_prompt), max_tokens=20 - num_prompt)
    scheduler.add(seq)
    most = 0
    for _ in range(20):
        if seq.status is Status.FINISHED:
            break
        step = advance(scheduler)
        assert step and not step.preempted
        most = max(most, len(seq.pages))
    assert seq.status is Status.FINISHED and most == 5
    with pytest.raises(ValueError, match="expected at most 20 tokens together, got 21"):
        scheduler.add(sequence("1", range(num_prompt), max_tokens=21 - num_prompt))
    assert_drained(scheduler)


@pytest.mark.parametrize("limit", ["num_pages", "max_kv_pages_step"])
@pytest.mark.parametrize("spare", [0, -1])
def test_two_sequences_share_the_last_pages(limit, spare):
    """The first has 2 pages and may take a third; the second needs 3 and leaves 2 in reserve."""
    room = 2 + 3 + 2 + spare
    scheduler = Scheduler(config(**{"num_pages": 99, "max_kv_pages_step": 99, limit: room}))
    scheduler.add(sequence("0", range(8), max_tokens=4), sequence("1", range(90, 101)))
    assert scheduled(advance(scheduler)) == ({"0": 8, "1": 11} if spare == 0 else {"0": 8})


@pytest.mark.parametrize(
    "num_pages, in_reserve", [(99, 2), (100, 3), (199, 3), (200, 4), (1000, 12)]
)
def test_a_hundredth_of_the_pool_stays_in_reserve(num_pages, in_reserve):
    """While one runs: a page for it and one for the other, and a hundredth."""
    for spare, enters in ((0, True), (-1, False)):
        scheduler = Scheduler(config(num_pages=num_pages, max_kv_pages_step=10 * num_pages))
        memory = scheduler.memory
        assert memory.has_room(num_pages, num_pages)  # nobody runs
        scheduler.add(sequence("0", range(9)))
        advance(scheduler)
        assert memory.num_available == num_pages - 3
        num_new = num_pages - 3 - in_reserve - spare
        assert memory.has_room(num_new, num_new) is enters
        # Cached pages cost an entry of the table, and no page.
        assert memory.has_room(num_new, 3 * num_pages) is enters
    for spare, enters in ((0, True), (-1, False)):
        scheduler = Scheduler(config(num_pages=num_pages, max_kv_pages_step=2 * num_pages))
        scheduler.add(sequence("0", range(9)))
        advance(scheduler)
        entries = 2 * num_pages - 3 - in_reserve - spare
        assert scheduler.memory.has_room(0, entries) is enters
        assert not scheduler.memory.has_room(num_pages, entries)


class Eager:
    """Drafts as many tokens as it may."""

    def __init__(self):
        self.asked = []

    def propose(self, seq, most):
        self.asked.append(most)
        return [1] * most

    def settle(self, num_drafts, num_taken):
        pass


@pytest.mark.parametrize("limit", ["num_pages", "max_kv_pages_step"])
@pytest.mark.parametrize(
    "num_prompt, num_free, num_drafts, num_pages",
    [
        # Two run, so 3 pages stay in reserve. Without new pages, drafts fill the last page.
        *[(3, 4, 0, 1), (3, 5, 6, 3)],
        *[(4, 3, 3, 2), (4, 4, 6, 3)],
        *[(5, 3, 2, 2), (5, 4, 6, 3)],
        *[(6, 4, 1, 2), (6, 5, 6, 4)],
        *[(7, 4, 0, 2), (7, 5, 6, 4)],
    ],
)
def test_drafts_where_pages_are_short(limit, num_prompt, num_free, num_drafts, num_pages):
    """Drafts take pages that nobody else needs, or use the rest of the sequence's last page."""
    room = 20 + -(-(num_prompt + 1) // 4) + num_free
    sizes = {"num_pages": 99, "max_kv_pages_step": 99, limit: room}
    scheduler = Scheduler(config(max_step_tokens=120, step_sizes=(16, 120), **sizes))
    seq = sequence("0", range(num_prompt), max_tokens=20, drafter=Eager())
    scheduler.add(seq, sequence("1", range(50, 129), max_tokens=2))  # 20 pages
    advance(scheduler)
    step = scheduler.schedule(0.0)
    (entry,) = (entry for entry in step.entries if entry.seq is seq)
    assert (len(entry.drafts), len(seq.pages)) == (num_drafts, num_pages)
    assert seq.drafter.asked == [num_drafts] and entry.num_tokens == 1 + num_drafts
    scheduler.check_integrity()


@pytest.mark.parametrize(
    "sizes, max_step_tokens, num_drafts",
    [((4, 120), 120, 2), ((2, 4, 120), 120, 0), ((3, 120), 120, 1), ((), 120, 6), ((), 80, 6)],
)
def test_drafts_fill_what_a_step_is_padded_to(sizes, max_step_tokens, num_drafts):
    """Two decode, so 6 of 8 rows are left; without sizes a step may have max_step_tokens."""
    scheduler = Scheduler(config(max_step_tokens=max_step_tokens, step_sizes=sizes))
    seq = sequence("0", range(4), max_tokens=20, drafter=Eager())
    scheduler.add(seq, sequence("1", range(50, 120), max_tokens=9))
    advance(scheduler)
    assert scheduled(scheduler.schedule(0.0)) == {"0": 1 + num_drafts, "1": 1}


@pytest.mark.parametrize("limit", ["num_pages", "max_kv_pages_step"])
def test_drafts_that_need_no_page_stay_within_the_step_where_pages_are_short(limit):
    """The last page has room for two, the step for one; no page is left beside the reserve."""
    sizes = {"num_pages": 99, "max_kv_pages_step": 99, limit: 24}
    scheduler = Scheduler(config(max_step_tokens=120, step_sizes=(3, 120), **sizes))
    seq = sequence("0", range(5), max_tokens=20, drafter=Eager())
    scheduler.add(seq, sequence("1", range(50, 129), max_tokens=2))  # 20 pages
    advance(scheduler)
    assert scheduled(scheduler.schedule(0.0)) == {"0": 2, "1": 1}
    assert seq.drafter.asked == [1]


@pytest.mark.parametrize("limit", LIMITS)
def test_two_that_grow_never_have_more_than_there_is(limit):
    """The younger one makes room for the page that the older one needs."""
    scheduler = Scheduler(config(**LIMITS[limit]))
    seqs = [sequence(str(i), [10 * i] * 3, max_tokens=17) for i in range(2)]
    scheduler.add(*seqs)
    most, preempted = 0, []
    while any(seq.status is not Status.FINISHED for seq in seqs):
        preempted += advance(scheduler).preempted
        most = max(most, sum(len(seq.pages) for seq in seqs))
    assert most == 5 and set(preempted) == {seqs[1]}
    assert_drained(scheduler)


def test_sequences_share_the_room_for_drafts():
    scheduler = Scheduler(config(max_step_tokens=120, step_sizes=(6, 120)))
    for i in range(2):
        scheduler.add(sequence(str(i), [10 * i] * 4, max_tokens=20, drafter=Eager()))
    advance(scheduler)
    assert scheduled(scheduler.schedule(0.0)) == {"0": 3, "1": 3}
