"""The scheduler, run by a fake engine whose pages remember what was written into them."""

import dataclasses
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from helpers.serve.fake_device import VOCAB, FakeEngine, FakeFiles, nodes, reference_output
from helpers.serve.schedules import advance, assert_drained, config, scheduled, sequence
from jax_attn.serve._scheduling.admission import Admission, QueueFull
from jax_attn.serve._scheduling.prompt_policy import PromptPolicy
from jax_attn.serve._scheduling.request import FinishReason, SamplingParams, Sequence, Status
from jax_attn.serve._scheduling.scheduler import Scheduler
from jax_attn.serve._scheduling.step_plan import StepPlan
from jax_attn.serve._scheduling.streaming import Streaming


def test_when_a_sequence_first_got_in():
    """The time before that was its time in the queue."""
    scheduler = Scheduler(config(max_running=1))
    first, second = (sequence(name, range(4), max_tokens=2) for name in "ab")
    scheduler.add(first, second)
    assert first.admitted is None
    for now in range(1, 5):
        advance(scheduler, float(now))
    assert (first.admitted, second.admitted) == (1.0, 3.0)


# ---- simulations -------------------------------------------------------------------------------


@dataclasses.dataclass
class Traffic:
    """Random arrivals of prompts from a few families, aborts and deadlines."""

    seed: int
    num_steps: int = 200
    abort_rate: float = 0.1
    deadline_rate: float = 0.1

    def run(self, scheduler: Scheduler, depth: int, forces: bool, files: FakeFiles | None = None):
        rng = random.Random(self.seed)
        engine = FakeEngine(scheduler, depth, forces, files)
        seqs: list[Sequence] = []
        now = 0
        while now < self.num_steps or engine.has_work:
            if now < self.num_steps and rng.random() < 0.4:
                seqs += self._arrive(rng, scheduler, now)
            if rng.random() < self.abort_rate:
                victim = rng.choice(seqs) if seqs else None
                if victim and victim.status is not Status.FINISHED:
                    assert scheduler.abort(victim.id) is victim
                    scheduler.check_integrity()
            engine.step(now)
            scheduler.check_integrity()
            now += 1
            assert now < 20 * self.num_steps, "no end in sight"
        return engine, seqs

    def _arrive(self, rng: random.Random, scheduler: Scheduler, now: int) -> list[Sequence]:
        family, num_common = rng.randrange(3), rng.randrange(1, 40)
        prompt = [(7 * family + i) % VOCAB for i in range(num_common)]
        prompt += [rng.randrange(VOCAB) for _ in range(rng.randrange(10))]
        scores = rng.random() < 0.2
        params = SamplingParams(
            max_tokens=rng.choice([1, 2, rng.randrange(1, 60)]),
            ignore_eos=rng.random() < 0.5,
            logprobs=0 if scores else None,
            prompt_logprobs=scores,
        )
        deadline = now + rng.randrange(40) if rng.random() < self.deadline_rate else None
        namespace, priority = rng.choice(["", "", "other"]), rng.choice([0, 0, 1])
        seqs = [
            Sequence(f"{now}.{i}", str(now), list(prompt), params, namespace,
                     priority, deadline, now)
            for i in range(rng.choice([1, 1, 1, 3]))
        ]  # fmt: skip
        try:
            scheduler.add(*seqs)
        except QueueFull:
            return []
        return seqs


SYSTEMS = {
    "roomy": config(),
    "tight": config(num_pages=30, max_step_tokens=12, prefill_chunk=5),
    "growing": config(num_pages=30, prefill_chunk=3, max_prefill_chunk=20, step_sizes=(8, 16)),
    "tight table": config(max_kv_pages_step=30),
    "one at a time": config(max_running=1, max_step_tokens=7, prefill_chunk=7),
    "no prefix cache": config(num_pages=40, prefix_cache=False),
    "padded": config(num_pages=40, step_sizes=(8, 32)),
    "page size 1": config(page_size=1, num_pages=120, max_kv_pages_step=240),
    "page size 7": config(page_size=7, num_pages=20, max_waiting=5),
    "host": config(num_pages=30, num_host_pages=40),
    "host, tight": config(num_pages=26, num_host_pages=7, max_step_tokens=12, prefill_chunk=5),
    "host, page size 1": config(
        page_size=1, num_pages=120, max_kv_pages_step=240, num_host_pages=70
    ),
    "states": config(num_states=40, checkpoint_tokens=8, num_pages=40),
    "states, tight": config(
        num_states=16, checkpoint_tokens=12, num_pages=30, max_step_tokens=12, prefill_chunk=5
    ),
    "states, growing": config(
        num_states=20, page_size=7, num_pages=20, max_waiting=5, step_sizes=(8, 16)
    ),
    "streaming": config(num_pages=34, kv_policy=Streaming(3, 16)),
    "streaming, tight": config(
        num_pages=26, max_step_tokens=12, prefill_chunk=5, kv_policy=Streaming(6, 9)
    ),
    "streaming, page size 1": config(
        page_size=1, num_pages=120, max_kv_pages_step=240, kv_policy=Streaming(3, 20)
    ),
    "streaming, host": config(num_pages=30, num_host_pages=40, kv_policy=Streaming(1, 20)),
    "streaming, no prefix cache": config(
        num_pages=22, prefix_cache=False, kv_policy=Streaming(4, 28)
    ),
    "prompts": config(num_pages=40, kv_policy=PromptPolicy.snapkv(11, window=5)),
    "prompts, tight": config(
        num_pages=30, max_step_tokens=12, prefill_chunk=5, kv_policy=PromptPolicy.h2o(9)
    ),
    "prompts, page size 1": config(
        page_size=1, num_pages=130, max_kv_pages_step=240, kv_policy=PromptPolicy.h2o(20)
    ),
    "prompts, host": config(num_pages=30, num_host_pages=40, kv_policy=PromptPolicy.h2o(10)),
    "prompts, no prefix cache": config(
        num_pages=30, prefix_cache=False, kv_policy=PromptPolicy.snapkv(6, window=2)
    ),
    "states, host": config(
        num_states=16, checkpoint_tokens=8, num_pages=30, num_host_pages=40, num_host_states=12
    ),
    "states, host, tight": config(
        page_size=1,
        num_pages=120,
        max_kv_pages_step=240,
        num_states=16,
        checkpoint_tokens=4,
        num_host_pages=60,
        num_host_states=5,
    ),
    "states, no prefix cache": config(num_pages=40, prefix_cache=False, num_states=16),
    "bursts": config(num_pages=50, burst_steps=3),
    "bursts, host, tight": config(
        num_pages=26, max_step_tokens=12, prefill_chunk=5, num_host_pages=7, burst_steps=4
    ),
    "bursts, page size 1": config(page_size=1, num_pages=120, max_kv_pages_step=150, burst_steps=5),
}


def simulate(system: str, depth: int, forces: bool, seeds, has_files: bool = False) -> None:
    totals = {
        "dropped": 0,
        "preemptions": 0,
        "cached": 0,
        "returned": 0,
        "read": 0,
        "bursts": 0,
        "reasons": set(),
    }
    for seed in seeds:
        scheduler = Scheduler(SYSTEMS[system])
        files = FakeFiles(scheduler, seed) if has_files else None
        engine, seqs = Traffic(seed).run(scheduler, depth, forces, files)
        totals["bursts"] += engine.num_bursts
        for seq in seqs:
            expected, reason = reference_output(seq, forces)
            output = seq.tokens[seq.num_prompt :]
            totals["reasons"].add(seq.finish_reason)
            if seq.finish_reason in (FinishReason.ABORT, FinishReason.DEADLINE):
                assert output == expected[: len(output)]
            else:
                assert (output, seq.finish_reason) == (expected, reason)
        stats = scheduler.stats()
        totals["preemptions"] += stats.num_preemptions
        totals["cached"] += stats.num_prompt_tokens_cached
        totals["dropped"] += stats.num_dropped_pages or 0
        totals["returned"] += stats.host["returned"] if stats.host else 0
        totals["read"] += 0 if files is None else files.num_read
        assert_drained(scheduler)
    # Checks that every event that the simulation is for has occurred.
    assert totals["reasons"] == set(FinishReason) - {FinishReason.ERROR}
    assert totals["preemptions"] > 0 or system in ("roomy", "one at a time")
    assert (totals["cached"] > 0) == ("no prefix cache" not in system)
    assert (totals["dropped"] > 0) == ("streaming" in system or "prompts" in system)
    assert (totals["returned"] > 0) == ("host" in system)
    assert (totals["read"] > 0) == has_files
    assert (totals["bursts"] > 0) == ("bursts" in system)


@pytest.mark.parametrize("depth, forces", [(0, False), (1, False), (1, True), (2, True)])
@pytest.mark.parametrize("system", SYSTEMS)
def test_every_token_is_computed_once_in_order_over_the_right_pages(system, depth, forces):
    simulate(system, depth, forces, range(2))


@pytest.mark.parametrize("depth, forces", [(0, False), (2, True)])
@pytest.mark.parametrize("system", [name for name in SYSTEMS if "host" in name])
def test_the_same_with_files(system, depth, forces):
    simulate(system, depth, forces, range(2), has_files=True)


@pytest.mark.slow
@pytest.mark.parametrize("depth, forces", [(0, False), (1, False), (1, True), (2, True)])
@pytest.mark.parametrize("system", SYSTEMS)
def test_the_same_for_longer(system, depth, forces):
    simulate(system, depth, forces, range(2, 8))


@pytest.mark.parametrize("system", ["roomy", "tight"])
def test_deterministic(system):
    def log():
        return Traffic(5).run(Scheduler(SYSTEMS[system]), 1, True)[0].log

    first = log()
    assert len(first) > 100
    assert first == log()


class Diligent(Admission):
    """Searches the queue in every step, even if no sequence can enter."""

    _least_need = property(lambda self: None, lambda self, need: None)


@pytest.mark.parametrize("num_lookups", [128, 3])
@pytest.mark.parametrize("system", SYSTEMS)
def test_lookups_that_are_spared_change_nothing(system, num_lookups, monkeypatch):
    monkeypatch.setattr("jax_attn.serve._scheduling.admission._LOOKUPS", num_lookups)
    num_peeks = []
    for seed in range(2):
        logs = []
        for kind in (Admission, Diligent):
            monkeypatch.setattr("jax_attn.serve._scheduling.scheduler.Admission", kind)
            scheduler = Scheduler(SYSTEMS[system])
            peek, calls = scheduler.cache.peek, []
            scheduler.cache.peek = lambda *key, peek=peek, calls=calls: (
                calls.append(1) or peek(*key)
            )
            logs.append(Traffic(seed).run(scheduler, depth=1, forces=bool(seed % 2))[0].log)
            num_peeks.append(len(calls))
        assert logs[0] == logs[1]
    assert sum(num_peeks[::2]) < sum(num_peeks[1::2]) or system in ("roomy", "one at a time")


def test_a_queue_that_nobody_leaves_is_looked_up_once():
    scheduler = Scheduler(config(num_pages=23))
    prompts = [range(100 * i, 100 * i + 26) for i in range(40)]
    scheduler.add(*[sequence(f"{i}", prompt, max_tokens=14) for i, prompt in enumerate(prompts)])
    for _ in range(4):  # 7 pages each, and a reserve: there is no room for a third
        assert len(advance(scheduler).entries) == 2
    num_peeks, peek = [], scheduler.cache.peek
    scheduler.cache.peek = lambda *key: num_peeks.append(1) or peek(*key)
    for _ in range(4):
        assert len(advance(scheduler).entries) == 2
    assert not num_peeks
    scheduler.add(sequence("urgent", range(5), priority=-1, max_tokens=3))
    assert [seq.id for seq in advance(scheduler).admitted] == ["urgent"]


def test_preempted_sequences_end_as_if_they_had_run_alone():
    """Six that grow to 25 pages each in a pool of 30: the youngest is preempted again and again."""
    scheduler = Scheduler(config(num_pages=30))
    engine = FakeEngine(scheduler)
    seqs = [sequence(f"{i}", range(10 * i, 10 * i + 10), max_tokens=90) for i in range(6)]
    scheduler.add(*seqs)
    finished: list[Sequence] = []
    for now in range(2000):
        engine.step(now)
        scheduler.check_integrity()
        finished += [seq for seq in seqs if seq.status is Status.FINISHED and seq not in finished]
        if not engine.has_work:
            break
    assert finished == seqs, "the oldest first"
    for seq in seqs:
        assert seq.tokens[seq.num_prompt :] == reference_output(seq, False)[0]
    # No thrashing: each is preempted a few times, not at every page, and finds some of its pages.
    num_needed = sum(len(seq.tokens) - 1 for seq in seqs)
    assert 5 <= scheduler.stats().num_preemptions <= 15
    assert engine.device.num_tokens_run < 1.7 * num_needed
    assert_drained(scheduler)


def test_pages_that_are_shared_are_found_by_the_fake_device_if_written():
    """The oracle itself must notice a page that another sequence overwrote."""
    scheduler = Scheduler(config())
    engine = FakeEngine(scheduler)
    seq = sequence("a", range(10), max_tokens=20)
    scheduler.add(seq)
    engine.step(0)
    engine.device.slots[seq.pages[1], 2] += 1
    with pytest.raises(AssertionError, match="does not hold the context"):
        engine.step(1)


# ---- what is scheduled -------------------------------------------------------------------------


def test_where_nobody_waits_no_prompt_is_copied(monkeypatch):
    """A copy to find sharers took 4 bytes a token in every step of a long prompt."""
    scheduler = Scheduler(config())
    scheduler.add(sequence("a", [3]), sequence("b", range(90)))
    advance(scheduler)
    monkeypatch.delattr(Admission, "coming")
    assert scheduled(scheduler.schedule(0.0)).keys() == {"a", "b"}
    scheduler.add(sequence("c", range(90)))
    with pytest.raises(AttributeError):
        scheduler.schedule(0.0)


def test_chunks_of_prompts_share_a_step_with_all_decodes():
    scheduler = Scheduler(config(max_step_tokens=20, prefill_chunk=6))
    scheduler.add(*[sequence(f"d{i}", [i, i], max_tokens=50) for i in range(3)])
    assert scheduled(advance(scheduler)) == {"d0": 2, "d1": 2, "d2": 2}
    scheduler.add(sequence("long", range(100, 125)), sequence("next", range(200, 205)))
    decodes = {"d0": 1, "d1": 1, "d2": 1}
    assert scheduled(advance(scheduler)) == decodes | {"long": 6}
    for _ in range(3):
        assert scheduled(advance(scheduler)) == decodes | {"long": 6}
    assert scheduled(advance(scheduler)) == decodes | {"long": 1, "next": 5}
    assert scheduled(advance(scheduler)) == decodes | {"long": 1, "next": 1}


def test_chunks_fill_what_a_step_is_padded_to():
    """The size below if five eighths of a chunk fit, and otherwise the one above."""
    for num_decodes, num_tokens in ((1, 15), (6, 10), (7, 25), (15, 17), (16, 16), (22, 10)):
        scheduler = Scheduler(
            config(num_pages=300, max_running=24, max_kv_pages_step=300, step_sizes=(8, 16, 32))
        )
        scheduler.add(*[sequence(f"d{i}", [i], max_tokens=50) for i in range(num_decodes)])
        advance(scheduler)
        scheduler.add(sequence("long", range(40, 240)))
        assert scheduled(advance(scheduler))["long"] == num_tokens


def test_chunks_grow_with_what_waits():
    """A chunk is an eighth of waiting and running prompts: prefill_chunk to max_prefill_chunk."""
    for lens, num_tokens in (((16,), 2), ((40,), 5), ((20, 20), 5), ((60, 60, 60, 60), 9)):
        scheduler = Scheduler(config(prefill_chunk=2, max_prefill_chunk=9))
        scheduler.add(sequence("d", [1], max_tokens=50))
        advance(scheduler)
        scheduler.add(*[sequence(f"{i}", range(100 * i, 100 * i + n)) for i, n in enumerate(lens)])
        for _ in range(2):
            steps = scheduled(advance(scheduler))
            assert steps.pop("d") == 1
            assert sum(steps.values()) in (num_tokens, num_tokens - 1)  # fewer wait by then


def test_a_prompt_whose_logprobs_are_wanted_has_as_many_tokens_as_rows_are_left():
    """The rows are shared with waiting requests: each takes half of what is left."""
    scheduler = Scheduler(config())
    wanted = SamplingParams(max_tokens=1, logprobs=0, prompt_logprobs=True)
    scheduler.add(Sequence("a", "a", list(range(40)), wanted))
    assert scheduled(advance(scheduler)) == {"a": 8}
    scheduler.add(Sequence("b", "b", list(range(40)), wanted), sequence("c", range(40, 60)))
    assert scheduled(advance(scheduler)) == {"a": 4, "b": 2, "c": 20}
    assert scheduled(advance(scheduler)) == {"a": 6, "b": 1, "c": 1}


def test_without_decodes_prompts_have_the_whole_step():
    scheduler = Scheduler(config(max_step_tokens=20, prefill_chunk=6))
    scheduler.add(sequence("a", range(15)), sequence("b", range(100, 130)))
    assert scheduled(advance(scheduler)) == {"a": 15, "b": 5}
    assert scheduled(advance(scheduler)) == {"a": 1, "b": 6}


def test_a_full_step_still_has_every_decode():
    scheduler = Scheduler(config(max_step_tokens=8, prefill_chunk=8))
    scheduler.add(*[sequence(f"{i}", [i]) for i in range(8)])
    assert len(scheduled(advance(scheduler))) == 8
    scheduler.add(sequence("late", range(20), priority=-1))
    for _ in range(7):
        assert scheduled(advance(scheduler)) == {f"{i}": 1 for i in range(8)}
    assert scheduled(advance(scheduler)) == {"late": 8}


def test_a_full_hit_leaves_a_token_to_compute():
    scheduler = Scheduler(config())
    scheduler.add(sequence("first", range(12), max_tokens=1))
    advance(scheduler)
    for num_tokens, num_cached in [(12, 11), (13, 12), (11, 10), (5, 4), (4, 3), (1, 0)]:
        seq = sequence(f"{num_tokens}", range(num_tokens), max_tokens=1)
        scheduler.add(seq)
        step = advance(scheduler)
        assert scheduled(step) == {seq.id: num_tokens - num_cached}
        assert step.entries[0].samples
        assert seq.num_cached == num_cached
    assert scheduler.cache.num_cached == 3  # computed again, the last page is not kept twice
    assert_drained(scheduler)


def test_output_is_cached_as_far_as_its_tokens_are_known():
    scheduler = Scheduler(config())
    seq = sequence("a", range(6), max_tokens=20)
    scheduler.add(seq)
    engine = FakeEngine(scheduler)
    for now in range(8):
        engine.step(now)
    assert seq.num_computed == 13 and len(seq.tokens) == 13 and seq.num_in_flight == 1
    tokens = list(seq.tokens)
    scheduler.abort("a")
    assert scheduler.cache.num_cached == 3
    follow_up = sequence("b", [*tokens, 1, 2])
    scheduler.add(follow_up)
    assert scheduled(scheduler.schedule(9)) == {"b": 3}
    assert follow_up.num_cached == 12


def test_nothing_is_cached_of_a_failed_sequence():
    scheduler = Scheduler(config())
    seq = sequence("a", range(6), max_tokens=20)
    scheduler.add(seq)
    for _ in range(10):
        advance(scheduler)
    scheduler.finish(seq, FinishReason.ERROR)
    scheduler.check_integrity()
    assert scheduler.cache.num_cached == 1  # of the prompt, as soon as it was launched
    assert seq.finish_reason == "error"


def test_nothing_runs_beyond_max_tokens():
    scheduler = Scheduler(config())
    seq = sequence("a", range(5), max_tokens=2)
    scheduler.add(seq)
    for num_tokens in (5, 1):
        step = scheduler.schedule(0)
        assert scheduled(step) == {"a": num_tokens}
        scheduler.launched(step)
    assert scheduler.schedule(0) is None  # both samples are in flight
    scheduler.append(seq, [1])
    assert scheduler.schedule(0) is None
    scheduler.append(seq, [1])
    scheduler.finish(seq, FinishReason.LENGTH)
    assert_drained(scheduler)


def test_a_step_that_is_never_launched_is_scheduled_again():
    scheduler = Scheduler(config())
    scheduler.add(sequence("a", range(5)), sequence("b", range(10, 70)))
    first, second = scheduler.schedule(0), scheduler.schedule(0)
    assert scheduled(first) == scheduled(second) == {"a": 5, "b": 27}
    assert first.admitted and not second.admitted


# ---- the prefix cache --------------------------------------------------------------------------


def test_longest_prefix_first():
    scheduler = Scheduler(config(max_running=1))
    scheduler.add(sequence("seed", range(20), max_tokens=1))
    advance(scheduler)
    scheduler.add(
        sequence("none", range(100, 120), max_tokens=1),
        sequence("short", [*range(8), *range(50, 60)], max_tokens=1),
        sequence("long", [*range(16), *range(60, 65)], max_tokens=1),
        sequence("none either", range(200, 210), max_tokens=1),
    )
    order = []
    while scheduler.waiting:
        order += scheduled(advance(scheduler))
    assert order == ["long", "short", "none", "none either"]


@pytest.mark.parametrize("seconds", [0, 1, 3, 7])
def test_starvation_is_bounded(seconds):
    """One slot, and always a sequence with a longer cached prefix in the queue; a step a second."""
    scheduler = Scheduler(config(max_running=1, starvation_seconds=seconds))
    scheduler.add(sequence("seed", range(20), max_tokens=1))
    advance(scheduler)
    poor = sequence("poor", range(100, 110), max_tokens=1)
    scheduler.add(poor)
    num_overtakers = 0
    for i in range(50):
        scheduler.add(sequence(f"rich {i}", range(20), max_tokens=1))
        advance(scheduler, i)
        if poor.status is Status.FINISHED:
            break
        num_overtakers += 1
    assert num_overtakers == seconds


def test_a_starved_sequence_that_does_not_fit_holds_back_the_others():
    scheduler = Scheduler(config(num_pages=20, starvation_seconds=3))
    scheduler.add(sequence("small", range(4), max_tokens=12))
    advance(scheduler)
    big = sequence("big", range(100, 170), max_tokens=2)
    scheduler.add(big)
    admitted = []
    for i in range(60):
        scheduler.add(sequence(f"{i}", range(4), max_tokens=12))
        step = advance(scheduler, i)
        admitted += [seq.id for seq in step.admitted]
        if big in step.admitted:
            break
    assert admitted[-1] == "big"
    assert len(admitted) == 4  # three overtook it


def test_who_waited_behind_a_starved_sequence_enters_when_that_is_aborted():
    scheduler = Scheduler(config(num_pages=20, starvation_seconds=1))
    scheduler.add(sequence("runs", range(4), max_tokens=60))
    advance(scheduler)
    scheduler.add(sequence("big", range(100, 170), max_tokens=2))
    scheduler.add(sequence("overtakes", range(200, 204), max_tokens=60))
    assert [seq.id for seq in advance(scheduler).admitted] == ["overtakes"]
    scheduler.add(sequence("waits", range(300, 304), max_tokens=60))
    for now in (1, 2):
        assert not advance(scheduler, now).admitted
    scheduler.abort("big")
    assert [seq.id for seq in advance(scheduler, 3).admitted] == ["waits"]


def test_stats_of_a_new_scheduler():
    stats = dataclasses.asdict(Scheduler(config()).stats())
    for name in ("states", "host", "host_states", "num_dropped_pages", "files"):
        assert stats.pop(name) is None, name
    assert stats.pop("num_free_pages") == 100 and set(stats.values()) == {0}


def test_siblings_compute_their_prompt_once():
    scheduler = Scheduler(config(max_step_tokens=64, prefill_chunk=64))
    engine = FakeEngine(scheduler)
    prompt = range(43)
    scheduler.add(*[sequence(f"a.{i}", prompt, max_tokens=5) for i in range(4)])
    assert scheduled(engine.step(0)) == {"a.0": 43}
    assert scheduled(engine.step(1)) == {"a.0": 1, "a.1": 3, "a.2": 3, "a.3": 3}
    running = scheduler.running
    assert all(seq.pages[:10] == running[0].pages[:10] for seq in running)
    assert len({seq.pages[10] for seq in running}) == 4  # each sequence has its own partial page
    while engine.has_work:
        engine.step(2)
        scheduler.check_integrity()
    assert scheduler.stats().num_prompt_tokens_cached == 3 * 40
    assert_drained(scheduler)


def test_a_shared_prefix_is_computed_once_and_no_longer_waited_for():
    """Half of the prompts is shared and takes two steps: the others start in the third."""
    scheduler = Scheduler(config(max_step_tokens=16, prefill_chunk=16))
    shared = list(range(24))
    a = sequence("a", [*shared, *range(100, 140)])
    b = sequence("b", [*shared, *range(200, 203)], max_tokens=2)
    scheduler.add(a, b)
    assert scheduled(advance(scheduler)) == {"a": 16}
    assert scheduled(advance(scheduler)) == {"a": 16}
    assert scheduled(advance(scheduler)) == {"a": 16}  # all of a step's tokens
    assert b.status is Status.WAITING
    assert scheduled(advance(scheduler)) == {"a": 16}
    assert scheduled(advance(scheduler)) == {"a": 1, "b": 3}
    assert b.num_cached == 24


@pytest.mark.parametrize("max_running", [64, 8])
def test_the_hit_rate_of_a_shared_system_prompt_is_the_ideal_one(max_running):
    """64 requests at once: only the first computes the 2,048 tokens, however many may run."""
    scheduler = Scheduler(
        config(
            page_size=16,
            num_pages=2000,
            max_running=max_running,
            max_step_tokens=1024,
            prefill_chunk=512,
            max_kv_pages_step=20_000,
        )
    )
    system = list(range(2048))
    for i in range(64):
        scheduler.add(sequence(f"{i}", [*system, *range(10_000 * (i + 1), 10_000 * (i + 1) + 50)]))
    while scheduler.waiting or scheduler.running:
        advance(scheduler)
    assert scheduler.stats().num_prompt_tokens_cached == 63 * 2048
    assert_drained(scheduler)


def test_nobody_waits_for_another_namespace_or_without_a_cache():
    prompt = range(9)
    scheduler = Scheduler(config())
    scheduler.add(sequence("a", prompt), sequence("b", prompt, namespace="other"))
    assert scheduled(advance(scheduler)) == {"a": 9, "b": 9}
    scheduler = Scheduler(config(prefix_cache=False))
    scheduler.add(sequence("a", prompt), sequence("b", prompt))
    assert scheduled(advance(scheduler)) == {"a": 9, "b": 9}
    assert scheduler.cache.num_cached == 0


def test_a_page_computed_twice_is_kept_once():
    """Two prompts become alike only while both are running: here, in their outputs."""
    scheduler = Scheduler(config())
    engine = FakeEngine(scheduler)
    scheduler.add(sequence("a", range(8), max_tokens=9))
    while engine.has_work:
        engine.step(0)
    num_cached = scheduler.cache.num_cached
    scheduler.add(sequence("b", range(8), max_tokens=9))
    while engine.has_work:
        engine.step(0)
        scheduler.check_integrity()
    assert scheduler.cache.num_cached == num_cached == 4
    assert_drained(scheduler)


# ---- pages, preemption -------------------------------------------------------------------------


def run_until_preempted(scheduler: Scheduler) -> StepPlan:
    for _ in range(100):
        step = advance(scheduler)
        if step.preempted:
            return step
    raise AssertionError("nobody was preempted")


def test_the_youngest_is_preempted_and_comes_back_first():
    scheduler = Scheduler(config(num_pages=14))
    lengths = [14, 40, 40]
    seqs = [sequence(f"{i}", range(10 * i, 10 * i + 8), lengths[i]) for i in range(3)]
    scheduler.add(*seqs)
    scheduler.add(sequence("later", range(50, 55), max_tokens=2))
    step = run_until_preempted(scheduler)
    assert step.preempted == [seqs[2]]
    assert scheduler.waiting[0] is seqs[2]
    assert seqs[2].status is Status.WAITING and seqs[2].slot == -1 and not seqs[2].pages
    admitted: list[Sequence] = []
    while not admitted:
        admitted = advance(scheduler).admitted
    assert admitted[0] is seqs[2]
    assert seqs[2].num_computed > 8  # it found pages of its own again,
    assert seqs[2].num_cached == 0  # which is no hit of its prompt
    assert scheduler.stats().num_prompt_tokens_cached == 0


def test_the_preempted_wait_before_those_that_never_ran():
    scheduler = Scheduler(config(num_pages=12, max_running=2))
    scheduler.add(sequence("seed", range(100, 112), max_tokens=1))
    advance(scheduler)
    old, early = sequence("old", range(8), max_tokens=30), sequence("early", range(50, 58))
    late = sequence("late", range(100, 112), max_tokens=20)
    scheduler.add(old, early, late)
    assert list(scheduled(advance(scheduler))) == ["late", "old"]  # by cached tokens
    assert run_until_preempted(scheduler).preempted == [late]
    assert scheduler.waiting == [late, early]


def test_the_lowest_priority_is_preempted():
    scheduler = Scheduler(config(num_pages=14))
    low = sequence("low", range(8), max_tokens=40, priority=1)
    scheduler.add(low)
    advance(scheduler)
    scheduler.add(*[sequence(f"{i}", range(20 + i, 28 + i), max_tokens=40) for i in range(2)])
    assert run_until_preempted(scheduler).preempted == [low]


def test_the_late_token_of_a_preempted_sequence_is_kept():
    scheduler = Scheduler(config(num_pages=8, max_running=2))
    old, young = (sequence(f"{i}", range(10 * i, 10 * i + 8), max_tokens=20) for i in range(2))
    scheduler.add(old, young)
    flying: list[StepPlan] = []
    while True:
        step = scheduler.schedule(0)
        if step.preempted:
            break
        scheduler.launched(step)
        for entry in flying.pop().entries if flying else []:
            scheduler.append(entry.seq, [7])
        flying.append(step)
    assert step.preempted == [young] and young.num_in_flight == 1
    num_output = young.num_output
    scheduler.launched(step)
    scheduler.abort("0")  # there is room enough for it now
    assert scheduler.schedule(0) is None  # but its last token is not known
    scheduler.append(young, [9])
    assert young.num_output == num_output + 1 and young.tokens[-1] == 9
    assert young.num_in_flight == 0
    step = scheduler.schedule(0)
    assert step.admitted == [young] and step.entries[-1].samples
    scheduler.check_integrity()


def test_a_preempted_sequence_can_end_by_its_late_token():
    scheduler = Scheduler(config(num_pages=8, max_running=2))
    seqs = [sequence(f"{i}", range(10 * i, 10 * i + 8), max_tokens=20) for i in range(2)]
    scheduler.add(*seqs)
    run_until_preempted(scheduler)
    scheduler.append(seqs[1], [0], num_sampled=0)
    scheduler.finish(seqs[1], FinishReason.STOP)
    assert not scheduler.waiting
    scheduler.check_integrity()


def test_a_preempted_sequence_whose_late_token_is_lost_samples_again():
    """After a failed step, the engine recovers this way."""
    scheduler = Scheduler(config(num_pages=8, max_running=2))
    old, young = (sequence(f"{i}", range(10 * i, 10 * i + 8), max_tokens=20) for i in range(2))
    scheduler.add(old, young)
    while not (step := scheduler.schedule(0)).preempted:
        scheduler.launched(step)
        for entry in step.entries:
            if entry.seq.num_in_flight == 2:
                scheduler.append(entry.seq, [7])
    num_tokens = len(young.tokens)
    scheduler.finish(old, FinishReason.ERROR)
    scheduler.append(young, [], num_sampled=young.num_in_flight)
    scheduler.cache.clear()
    scheduler.check_integrity()
    assert scheduled(scheduler.schedule(0)) == {"1": num_tokens}
    scheduler.abort("1")
    assert_drained(scheduler)


def test_admission_leaves_pages_for_the_running_to_grow():
    scheduler = Scheduler(config(num_pages=20, max_step_tokens=100))
    scheduler.add(*[sequence(f"{i}", range(9 * i, 9 * i + 9), max_tokens=30) for i in range(8)])
    # Three pages each, and one in reserve for each that will run: 5 * 3 + 5 <= 20 < 6 * 3 + 6.
    assert len(scheduled(advance(scheduler))) == 5


def test_the_largest_sequence_runs_whatever_is_cached():
    scheduler = Scheduler(config(num_pages=10))
    for i in range(5):
        scheduler.add(sequence(f"{i}", range(20 * i, 20 * i + 20), max_tokens=3))
        advance(scheduler)
    assert scheduler.max_sequence_tokens == 40
    for num_prompt in (39, 1, 20):
        seq = sequence(f"big {num_prompt}", range(500, 500 + num_prompt), 40 - num_prompt)
        scheduler.add(seq)
        while seq.status is not Status.FINISHED:
            assert advance(scheduler) is not None
    assert_drained(scheduler)


# ---- priorities, deadlines, queue, abort --------------------------------------------------------


def test_priorities_are_strict():
    scheduler = Scheduler(config(max_running=1))
    scheduler.add(sequence("seed", range(20), max_tokens=1))
    advance(scheduler)
    scheduler.add(
        sequence("low, cached", range(20), max_tokens=1, priority=2),
        sequence("middle", range(100, 105), max_tokens=1, priority=1),
        sequence("high", range(200, 205), max_tokens=1, priority=-3),
    )
    order = []
    while scheduler.waiting:
        order += scheduled(advance(scheduler))
    assert order == ["high", "middle", "low, cached"]


def test_deadlines_end_the_waiting_and_the_running():
    scheduler = Scheduler(config(max_running=1))
    running = sequence("running", range(5), max_tokens=50, deadline=10.0)
    waiting = sequence("waiting", range(5), deadline=5.0)
    patient = sequence("patient", range(5), deadline=100.0)
    scheduler.add(running, waiting, patient)
    assert advance(scheduler, now=4.9).expired == []
    step = advance(scheduler, now=5.0)
    assert step.expired == [waiting] and scheduled(step) == {"running": 1}
    assert waiting.finish_reason == "deadline"
    step = advance(scheduler, now=10.0)
    assert step.expired == [running] and scheduled(step) == {"patient": 1}
    scheduler.append(running, [3])  # late, and ignored
    assert running.num_output == 2
    scheduler.abort("patient")
    assert_drained(scheduler)


def test_an_expiry_is_reported_even_if_nothing_runs():
    scheduler = Scheduler(config())
    seq = sequence("a", range(5), deadline=1.0)
    scheduler.add(seq)
    step = scheduler.schedule(2.0)
    assert step.expired == [seq] and not step.entries
    assert scheduler.schedule(2.0) is None


def test_deadlines_of_finished_sequences_do_not_pile_up():
    scheduler = Scheduler(config())
    for i in range(1000):
        scheduler.add(sequence(f"{i}", [1], max_tokens=1, deadline=1e9))
        advance(scheduler)
    assert len(scheduler._deadlines) < 100


def test_the_queue_is_bounded_and_takes_siblings_together():
    scheduler = Scheduler(config(max_waiting=3))
    scheduler.add(sequence("a", [1]), sequence("b", [1]))
    with pytest.raises(QueueFull, match="2 of 3"):
        scheduler.add(sequence("c.0", [1]), sequence("c.1", [1]))
    assert [seq.id for seq in scheduler.waiting] == ["a", "b"]
    scheduler.add(sequence("d", [1]))
    with pytest.raises(QueueFull):
        scheduler.add(sequence("e", [1]))
    advance(scheduler)
    scheduler.add(sequence("e", [1]))


@pytest.mark.parametrize("num_steps", range(8))
def test_abort_in_any_state(num_steps):
    """Waiting, in the middle of the prompt, decoding with tokens in flight, with siblings."""
    scheduler = Scheduler(config(max_step_tokens=8, prefill_chunk=8, max_running=2))
    engine = FakeEngine(scheduler)
    seqs = [sequence(f"a.{i}", range(18), max_tokens=10) for i in range(3)]
    scheduler.add(*seqs)
    for now in range(num_steps):
        engine.step(now)
    for seq in seqs:
        assert scheduler.abort(seq.id) is seq
        assert scheduler.abort(seq.id) is None
        assert (seq.status, seq.finish_reason) == ("finished", "abort")
        scheduler.check_integrity()
    num_tokens = [len(seq.tokens) for seq in seqs]
    while engine.has_work:
        engine.step(9)
    assert [len(seq.tokens) for seq in seqs] == num_tokens
    assert_drained(scheduler)


def test_abort_between_schedule_and_launch():
    scheduler = Scheduler(config())
    scheduler.add(sequence("a", range(9)), sequence("b", range(20, 30)))
    step = scheduler.schedule(0)
    scheduler.abort("a")
    scheduler.launched(step)
    scheduler.check_integrity()
    assert scheduler.cache.num_cached == 2
    assert scheduled(scheduler.schedule(0)) == {"b": 1}


def test_abort_of_nobody():
    assert Scheduler(config()).abort("who?") is None


# ---- what is refused ---------------------------------------------------------------------------


def test_add_refuses_what_could_never_run():
    scheduler = Scheduler(config(num_pages=10))
    scheduler.add(sequence("fits", range(30), max_tokens=10))
    with pytest.raises(ValueError, match="expected at most 40 tokens together, got 41"):
        scheduler.add(sequence("long", range(30), max_tokens=11))
    with pytest.raises(ValueError, match="expected a prompt"):
        scheduler.add(sequence("empty", []))
    with pytest.raises(ValueError, match="ids that are not in use"):
        scheduler.add(sequence("fits", range(3)))
    with pytest.raises(ValueError, match="ids that are not in use"):
        scheduler.add(sequence("twin", range(3)), sequence("twin", range(3)))
    assert [seq.id for seq in scheduler.waiting] == ["fits"]
    scheduler.check_integrity()


def test_finish_refuses_a_stranger():
    with pytest.raises(ValueError, match="was added"):
        Scheduler(config()).finish(sequence("a", [1]), FinishReason.STOP)


def test_append_refuses_what_cannot_be():
    scheduler = Scheduler(config())
    seq = sequence("a", range(5), max_tokens=50)
    scheduler.add(seq)
    for _ in range(2):
        scheduler.launched(scheduler.schedule(0))
    assert seq.num_in_flight == 2
    with pytest.raises(ValueError, match="num_sampled: expected 0 to 2, got 3"):
        scheduler.append(seq, [1], num_sampled=3)
    with pytest.raises(ValueError, match="in front of a sample in flight"):
        scheduler.append(seq, [1, 2], num_sampled=1)
    with pytest.raises(ValueError, match="not computed yet"):
        scheduler.append(seq, [1], num_sampled=2)  # its follower is void: nothing to sample from
    assert (len(seq.tokens), seq.num_in_flight) == (5, 2)
    scheduler.append(seq, [1, 2, 3], num_sampled=2)
    assert scheduled(scheduler.schedule(0)) == {"a": 2}
    scheduler.check_integrity()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"page_size": 0}, "page_size: expected at least 1"),
        ({"prefill_chunk": 0}, "prefill_chunk: expected at least 1"),
        ({"starvation_seconds": -1}, "starvation_seconds"),
        ({"max_step_tokens": 7}, "max_step_tokens: expected at least max_running 8"),
    ],
)
def test_config_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)


@pytest.mark.parametrize(
    "field, value",
    [
        ("max_tokens", -1),
        ("min_tokens", 9),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", float("nan")),
        ("repetition_penalty", 0.0),
        ("presence_penalty", float("nan")),
        ("frequency_penalty", float("inf")),
        ("logprobs", -1),
        ("prompt_logprobs", True),  # no number
        ("stop", ("a", "")),
        ("logit_bias", ((3, float("nan")),)),
    ],
)
def test_sampling_params_refuse(field, value):
    with pytest.raises(ValueError, match=f"^{field}: expected"):
        SamplingParams(**{"max_tokens": 8, field: value})


def test_integrity_check_sees_what_the_parts_cannot():
    def scheduler() -> Scheduler:
        made = Scheduler(config())
        made.add(sequence("a", range(9)), sequence("b", range(50, 59)))
        advance(made)
        return made

    def lost_page(s):
        s.running[0].pages.pop()

    def two_owners(s):
        s.running[0].pages[-1] = s.running[1].pages[-1]

    def forgotten_lock(s):
        s.cache.unlock(s.running[0].node)

    def extra_lock(s):
        s.cache.lock(s.running[0].node)

    def slot_twice(s):
        s.running[0].slot = s.running[1].slot

    def wrong_table(s):
        s.memory.num_table_pages += 1

    def wrong_share(s):
        s.running[0].pages[0] = s.running[1].pages[0]

    for break_it in (
        lost_page, two_owners, forgotten_lock, extra_lock, slot_twice, wrong_table, wrong_share
    ):  # fmt: skip
        broken = scheduler()
        break_it(broken)
        with pytest.raises(AssertionError):
            broken.check_integrity()


def test_no_jax():
    """Imports from a package of the same name without its __init__, which imports jax."""
    package = Path(sys.modules[Scheduler.__module__].__file__).parents[2]
    code = f"""
import importlib, pkgutil, sys, types
package = types.ModuleType("jax_attn")
package.__path__ = [{str(package)!r}]
sys.modules["jax_attn"] = package
import jax_attn.serve._scheduling as folder
names = [module.name for module in pkgutil.iter_modules(folder.__path__)]
assert "scheduler" in names
for name in names:
    importlib.import_module(f"{{folder.__name__}}.{{name}}")
assert not {{"jax", "jaxlib", "numpy"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


def test_the_tree_is_bounded_by_the_pool():
    """A long run in a small pool leaves only the nodes of cached pages."""
    scheduler = Scheduler(config(num_pages=20))
    for i in range(300):
        scheduler.add(sequence(f"{i}", range(i, i + 9), max_tokens=2, namespace=f"tenant {i}"))
        advance(scheduler)
        advance(scheduler)
    assert len(list(nodes(scheduler.cache))) <= 21
    assert_drained(scheduler)


# ---- pages that begin alike ----------------------------------------------------------------------


def test_a_page_that_begins_like_a_prompt_is_copied():
    """Pages of 4: 10 tokens in common are two pages and two tokens of the third."""
    engine = FakeEngine(Scheduler(config()))
    first = [*range(10), *range(50, 60)]
    for name, prompt, num_cached in (
        ("first", first, 0),
        ("parts", [*range(10), 20, 21, 22], 10),
        ("of the second", [*range(10), 20, 31, 32], 11),  # the one with most tokens in common
        ("first again", first, 19),  # all but the last token, which samples
        ("within one page", [0, 1, 90, 91], 2),
        ("another", [100, 101], 0),
    ):
        seq = sequence(name, prompt, max_tokens=3)
        engine.scheduler.add(seq)
        while engine.has_work:
            engine.step(0.0)
            engine.scheduler.check_integrity()
        assert seq.num_cached == num_cached, name
        assert seq.tokens[seq.num_prompt :] == reference_output(seq, False)[0]
    assert engine.device.num_copies == 4


def test_a_page_of_another_namespace_is_not_copied():
    engine = FakeEngine(Scheduler(config()))
    for name, num_cached in (("a", 0), ("b", 0), ("b", 3)):
        seq = sequence(f"{name} {num_cached}", [1, 2, 3, 4], namespace=name, max_tokens=2)
        engine.scheduler.add(seq)
        while engine.has_work:
            engine.step(0.0)
        assert seq.num_cached == num_cached


# ---- trees of prompts ----------------------------------------------------------------------------


def tree_prompts(rng, *levels):
    """Prompts of all leaves: each level is (children of a node, tokens of an edge)."""
    prompts = [[]]
    for num_children, num_tokens in levels:
        prompts = [
            [*prompt, *rng.integers(0, 2**30, num_tokens).tolist()]
            for prompt in prompts
            for _ in range(num_children)
        ]
    return prompts


def share_of_optimum(levels, starvation_seconds):
    """Tokens that are cached, as a share of those in the depth-first order; 20 steps a second."""
    rng = np.random.default_rng(1)
    prompts = [tuple(prompt) for prompt in tree_prompts(rng, *levels)]
    page = 4
    edges = {prompt[:end] for prompt in prompts for end in range(page, len(prompt), page)}
    num_possible = sum((len(prompt) - 1) // page for prompt in prompts)
    optimum = (num_possible - len(edges)) * page
    scheduler = Scheduler(
        config(
            num_pages=len(edges) // 4 + 150, max_kv_pages_step=1000, max_step_tokens=128,
            prefill_chunk=64, max_waiting=200, starvation_seconds=starvation_seconds,
        )
    )  # fmt: skip
    order = rng.permutation(len(prompts)).tolist()
    scheduler.add(*(sequence(f"{i}", prompts[i], max_tokens=4) for i in order))
    now = 0.0
    while scheduler.waiting or scheduler.running:
        assert advance(scheduler, now) is not None
        now += 0.05
    return scheduler.stats().num_prompt_tokens_cached / optimum


@pytest.mark.parametrize(
    "levels",
    (
        ((4, 32), (4, 32), (4, 32), (2, 6)),  # conversations that part again and again
        ((24, 160), (6, 10)),  # documents, and questions about each
        ((1, 64), (40, 100), (4, 9)),  # a system prompt, examples of tasks, inputs
    ),
)
def test_hits_come_near_the_depth_first_order(levels):
    """RadixAttention, theorem 3.1: depth first every edge is computed once. Here eight run at once,
    requests arrive in any order, and the cache holds a fraction of the tree."""
    assert share_of_optimum(levels, starvation_seconds=10) >= 0.95
    assert share_of_optimum(levels, starvation_seconds=0) < 0.9  # by arrival
