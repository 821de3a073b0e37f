"""Recurrent states beside pages: which checkpoints are made, and what they save. Counted."""

import random

import pytest

from helpers.serve.fake_device import FakeEngine
from helpers.serve.schedules import advance, assert_drained, config, scheduled, sequence
from jax_attn.serve._scheduling.request import FinishReason, SamplingParams, Sequence, Status
from jax_attn.serve._scheduling.scheduler import Scheduler

SYSTEM = range(100, 140)  # 40 tokens, ten pages of 4


def states(**changes):
    return config(**{"num_states": 32, "max_step_tokens": 64, "prefill_chunk": 64} | changes)


def run(engine: FakeEngine, *seqs) -> int:
    """Runs sequences to their ends, checking each step. Returns the number of tokens computed."""
    scheduler, engine.device.num_tokens_run = engine.scheduler, 0
    scheduler.add(*seqs)
    while engine.has_work:
        engine.step(0.0)
        scheduler.check_integrity()
    return engine.device.num_tokens_run


def test_a_prompt_again_is_read_from_its_last_page_on():
    """The last token is always read, and a checkpoint is at the end of a page."""
    scheduler = Scheduler(states())
    for num_prompt, num_cached in ((40, 36), (41, 40), (43, 40)):
        first, again = (sequence(f"{num_prompt}{x}", SYSTEM) for x in "ab")
        for seq in (first, again):
            seq.tokens[:] = [num_prompt, *range(num_prompt - 1)]
            seq.__post_init__()
            scheduler.add(seq)
            while seq.status is not Status.FINISHED:
                advance(scheduler)
        assert (first.num_cached, again.num_cached) == (0, num_cached)
    assert_drained(scheduler)


@pytest.mark.parametrize("at_once", [True, False])
def test_the_shared_part_of_many_prompts_is_computed_once(at_once):
    """The first one leaves a checkpoint where the second, which waits, parts from it."""
    engine = FakeEngine(scheduler := Scheduler(states()))
    seqs = [sequence(f"{i}", [*SYSTEM, *[i] * 9], max_tokens=1) for i in range(8)]
    if at_once:
        num_tokens = run(engine, *seqs)
        assert num_tokens == 49 + 7 * 9
        assert [seq.num_cached for seq in seqs] == [0] + [40] * 7
        return
    for seq in seqs:
        scheduler.add(seq)
        while seq.status is not Status.FINISHED:
            advance(scheduler)
    # The second one finds pages and no state: it computes them, and leaves the checkpoint.
    assert [seq.num_cached for seq in seqs] == [0, 0] + [40] * 6


def test_a_prompt_that_is_read_leaves_a_checkpoint_for_one_that_comes_later():
    scheduler = Scheduler(states(max_step_tokens=16, prefill_chunk=16))
    first, second = (sequence(name, [*SYSTEM, i, i, i]) for i, name in enumerate("ab"))
    scheduler.add(first)
    assert scheduled(advance(scheduler)) == {"a": 16}
    scheduler.add(second)
    assert scheduled(advance(scheduler)) == {"a": 16}
    assert scheduled(advance(scheduler)) == {"a": 11}
    assert scheduled(advance(scheduler)) == {"a": 1, "b": 3}
    assert second.num_cached == 40


def test_a_checkpoint_is_where_it_saves_most():
    """Two part after 40 tokens, one after 48, and one after 8: it would wait in vain."""
    scheduler = Scheduler(states(max_step_tokens=96, prefill_chunk=96))
    stem = [*SYSTEM, *range(200, 212)]
    others = [[*stem[:40], 1, 1], [*stem[:40], 2, 2], [*stem[:48], 3, 3], [*stem[:8], *[4] * 9]]
    first = sequence("a", [*stem, *[0] * 8])
    scheduler.add(first, *[sequence(f"{i}", tokens) for i, tokens in enumerate(others)])
    assert scheduled(advance(scheduler)) == {"a": 60, "3": 17}
    assert scheduled(advance(scheduler)) == {"a": 1, "3": 1, "0": 2, "1": 2, "2": 10}


def test_sequences_of_one_request_go_on_from_one_state():
    engine = FakeEngine(Scheduler(states()))
    seqs = [sequence(f"r.{i}", SYSTEM, max_tokens=4) for i in range(5)]
    assert run(engine, *seqs) == 40 + 4 * 4 + 5 * 3
    assert [seq.num_cached for seq in seqs] == [0, *[36] * 4]


def test_the_next_turn_of_a_chat_goes_on_within_the_answer():
    engine = FakeEngine(Scheduler(states(checkpoint_tokens=8)))
    first = sequence("a", range(10), max_tokens=20)
    run(engine, first)
    assert first.num_output == 20
    second = sequence("b", [*first.tokens, 3, 3, 3], max_tokens=1)
    run(engine, second)
    assert second.num_cached == 24  # the last multiple of 8 before 29, as token 30 was never fed


def test_a_long_prompt_has_checkpoints_on_its_way():
    engine = FakeEngine(Scheduler(states(checkpoint_tokens=16)))
    run(engine, sequence("a", range(60), max_tokens=1))
    other = sequence("b", [*range(37), 9, 9, 9], max_tokens=1)
    run(engine, other)
    assert other.num_cached == 32


def test_a_preempted_sequence_goes_on_from_its_checkpoint():
    scheduler = Scheduler(states(checkpoint_tokens=8))
    seq = sequence("a", range(20), max_tokens=40)
    scheduler.add(seq)
    for _ in range(11):
        advance(scheduler)
    assert (seq.num_computed, seq.num_output) == (30, 11)
    scheduler.suspend()
    assert (seq.state, seq.num_computed) == (-1, 0)
    scheduler.check_integrity()
    assert scheduled(advance(scheduler)) == {"a": 31 - 24}


def test_a_void_sample_begins_again_from_the_checkpoint():
    """The states after a token cannot be undone."""
    scheduler = Scheduler(states())
    params = SamplingParams(max_tokens=8, grammar="x")
    seq = Sequence("a", "a", list(range(20)), params)
    scheduler.add(seq)
    step = scheduler.schedule(0.0)
    scheduler.launched(step)
    scheduler.retract(seq)
    scheduler.check_integrity()
    assert seq.status is Status.WAITING and scheduler.schedule(0.0) is None
    scheduler.resume(seq)
    assert scheduled(scheduler.schedule(0.0)) == {"a": 4}
    assert seq.num_preempted == 1


def test_checkpoints_leave_slots_for_all_that_may_run():
    engine = FakeEngine(
        scheduler := Scheduler(states(num_states=16, checkpoint_tokens=4, num_pages=400))
    )
    first = sequence("a", range(60), max_tokens=1)
    run(engine, first)
    assert scheduler.memory.states.num_available == 16  # all but its own were evictable
    others = [sequence(f"{i}", range(100 * i, 100 * i + 60)) for i in range(1, 9)]
    scheduler.add(*others)
    for _ in range(20):
        advance(scheduler)
        if scheduler.memory.num_running == 8:
            break
    assert scheduler.memory.num_running == 8


def test_the_state_least_recently_used_goes_first():
    engine = FakeEngine(scheduler := Scheduler(states(num_states=6, max_running=2)))
    prompts = {name: range(100 * i, 100 * i + 9) for i, name in enumerate("abcdefgh")}

    def cached(name: str) -> int:
        seq = sequence(f"{name}{random.random()}", prompts[name], max_tokens=1)
        run(engine, seq)
        return seq.num_cached

    assert [cached(name) for name in "abcab"] == [0, 0, 0, 8, 8]
    for name in "defgh":
        assert cached(name) == 0
    assert cached("h") == 8 and cached("a") == 0
    assert scheduler.cache.num_cached == 8 * 2  # the pages are all still there


def test_a_state_that_does_not_come_back_is_waited_for(monkeypatch):
    """A sequence never begins from states that are not on the device."""
    limits = states(num_states=6, max_running=2, num_host_pages=8, num_host_states=4)
    scheduler = Scheduler(limits)
    scheduler.memory.host.call_tokens = scheduler.memory.host.state_tokens = 0.0
    scheduler.add(sequence("a", range(9), max_tokens=1))
    while scheduler.memory.num_running or scheduler.waiting:
        advance(scheduler)
    while scheduler.cache.nodes_with_state:
        assert scheduler.cache.evict_state()  # to the host
    bring_back, tried = scheduler.cache.bring_back_state, []

    def fail_once(node):
        assert node.host_state >= 0
        tried.append(node)
        return len(tried) > 1 and bring_back(node)

    monkeypatch.setattr(scheduler.cache, "bring_back_state", fail_once)
    again = sequence("b", range(9), max_tokens=1)
    scheduler.add(again)
    assert scheduler.schedule(0.0) is None and again.status is Status.WAITING
    scheduler.check_integrity()
    while again.status is not Status.FINISHED:
        advance(scheduler)
    assert len(tried) == 2 and again.num_cached == 8
    assert_drained(scheduler)


def test_a_failed_step_leaves_no_state():
    scheduler = Scheduler(states())
    seq = sequence("a", SYSTEM)
    scheduler.add(seq)
    advance(scheduler)
    scheduler.finish(seq, FinishReason.ERROR)
    scheduler.cache.clear()
    scheduler.check_integrity()
    assert scheduler.memory.states.num_available == 32
    assert not scheduler.cache.nodes_with_state


def test_too_few_states_are_refused():
    with pytest.raises(ValueError, match="num_states: expected at least 2 for each of max_running"):
        states(num_states=15)
