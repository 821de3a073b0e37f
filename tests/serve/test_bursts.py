"""Bursts: several steps of decodes, scheduled and launched at once, give what single steps give."""

import dataclasses
import itertools

import numpy as np
import pytest

from helpers.paths import EXAMPLES
from helpers.serve.small_engine import on_device
from jax_attn.serve._engine.engine import Engine
from jax_attn.serve._engine.engine_config import EngineConfig
from jax_attn.serve._scheduling.request import FinishReason, SamplingParams, Sequence

TEXT = (EXAMPLES / "prompts" / "ast.py.txt").read_text("utf-8")
# One shape of a step, so that bits do not depend on how many sequences run.
CONFIG = EngineConfig(
    num_pages=120, page_size=8, max_running=8, max_step_tokens=40, batch_invariant=True
)
MIXED = (
    {"temperature": 0, "max_tokens": 30},
    {"seed": 1, "max_tokens": 24, "logprobs": 3},
    {"seed": 2, "max_tokens": 17, "top_p": 0.9, "top_k": 40, "stop": ("e",)},
    {"seed": 3, "max_tokens": 23, "presence_penalty": 1.0, "repetition_penalty": 1.2},
    {"temperature": 0, "max_tokens": 21, "logit_bias": ((7, 4.0),), "logprobs": 0},
    {"seed": 5, "max_tokens": 29, "min_tokens": 9, "ignore_eos": False},
    {"seed": 6, "max_tokens": 22, "logprobs": 1, "logprobs_of": "sampled", "min_p": 0.05},
    {"seed": 7, "max_tokens": 2},
    {"seed": 8, "max_tokens": 40, "stop_token_ids": tuple(range(0, 4000, 50))},
    {"temperature": 0, "max_tokens": 12, "grammar": 'start: /[a-z]{3,9}/ "." '},
)
ids = itertools.count()


@pytest.fixture(scope="module")
def device(model):
    engine = Engine(model, CONFIG)
    engine.warm_up()
    return engine.device


@pytest.fixture
def make_engine(model, device):
    def make(burst_steps: int = 4, **changes) -> Engine:
        config = dataclasses.replace(CONFIG, burst_steps=burst_steps, **changes)
        return on_device(model, device, config)

    return make


def sequence(model, begin: int, length: int, **params) -> Sequence:
    tokens = [0, *model.tokenizer.encode(TEXT).ids[begin : begin + length - 1]]
    name = f"s{next(ids)}"
    return Sequence(name, name, tokens, SamplingParams(**{"ignore_eos": True} | params))


def mixed(model, which=MIXED) -> list[Sequence]:
    return [sequence(model, 7 * i, 5 + i, **params) for i, params in enumerate(which)]


def step(engine: Engine, events: dict) -> int:
    """Runs a step, collects its events by sequence, and returns how many steps it launched."""
    for event in engine.step():
        events.setdefault(event.seq_id, []).append(event)
    engine.scheduler.check_integrity()
    return engine.step_stats.num_steps


def run(engine: Engine, *arrivals: list[Sequence]) -> tuple[list[tuple], list[int]]:
    """Submits the sequences of a list every tenth step. Returns what each got, and the numbers of
    steps launched at once."""
    events, launched = {}, []
    todo = list(arrivals)
    while todo or engine.has_work:
        if todo and len(launched) % 10 == 0:
            engine.submit(todo.pop(0))
        launched.append(step(engine, events))
    check_drained(engine)
    return [result(seq, events[seq.id]) for seqs in arrivals for seq in seqs], launched


def result(seq: Sequence, events: list) -> tuple:
    """Tokens, text, logprobs, and how it ended."""
    tokens = [token for event in events for token in event.tokens]
    assert tokens == seq.tokens[seq.num_prompt :]
    text = "".join(event.text for event in events)
    logprobs = [each for event in events for each in event.logprobs or ()]
    assert [event.finish_reason for event in events[:-1]] == [None] * (len(events) - 1)
    return tokens, text, logprobs, events[-1].finish_reason, events[-1].error


def check_drained(engine: Engine) -> None:
    engine.scheduler.check_integrity()
    stats = engine.stats()
    assert stats["running"] == stats["waiting"] == stats["pages_used"] == 0
    assert stats["pages_free"] + stats["pages_cached"] == stats["pages_total"]


@pytest.fixture(scope="module")
def single(model, device):
    """What MIXED gets one step at a time."""
    results, launched = run(on_device(model, device, CONFIG), mixed(model))
    assert set(launched) == {1}
    reasons = {reason for *_, reason, _ in results}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}
    return results


@pytest.mark.parametrize("burst_steps", [2, 3, 4, 8])
def test_bits_are_those_of_single_steps(model, make_engine, single, burst_steps):
    """Tokens, text, logprobs and reasons, of all kinds of sampling at once."""
    results, launched = run(make_engine(burst_steps), mixed(model))
    assert results == single
    assert max(launched) == burst_steps


def test_arrivals_change_nothing(model, make_engine, single):
    seqs = mixed(model)
    results, launched = run(make_engine(), seqs[:3], seqs[3:4], seqs[4:8], seqs[8:])
    assert results == single
    assert max(launched) == 4


def test_a_pool_with_no_room_for_bursts(model, make_engine, single):
    """Sequences are preempted. Where pages are too few for several steps, single ones are run."""
    engine = make_engine(num_pages=24, num_host_pages=0)
    results, launched = run(engine, mixed(model))
    assert results == single
    assert engine.stats()["preemptions"] > 0
    assert launched.count(1) > launched.count(4) > 0


def test_what_arrives_is_in_the_next_step(model, make_engine):
    engine, events = make_engine(), {}
    engine.submit([sequence(model, 0, 9, max_tokens=60, temperature=0)])
    while step(engine, events) == 1:
        pass
    late = sequence(model, 50, 9, max_tokens=4, temperature=0)
    engine.submit([late])
    assert step(engine, events) == 1, "a burst before a request that could enter"
    assert late.num_computed == 9
    assert step(engine, events) == 4
    while engine.has_work:
        step(engine, events)
    assert len(events[late.id][-1].tokens) and len(late.tokens) == 13


def test_who_waits_for_a_slot_waits_for_no_end_that_is_known(model, make_engine):
    """With all slots taken, bursts end where max_tokens lets the next one in."""
    engine = make_engine(max_running=2)
    first = [sequence(model, 9 * i, 5, max_tokens=n, temperature=0) for i, n in enumerate((8, 30))]
    waits = sequence(model, 80, 5, max_tokens=3, temperature=0)
    engine.submit([*first, waits])
    sampled = []
    while waits.num_computed == 0:
        step(engine, {})
        sampled.append(first[0].num_known - first[0].num_prompt)
    # The first sample is the prompt's. 1 is left after 4 more and 2 less than a burst.
    assert sampled[:4] == [1, 5, 8, 8]


@pytest.mark.parametrize(
    "params",
    [{"grammar": 'start: "a"+'}, {"min_tokens": 50, "ignore_eos": False}],
    ids=["grammar", "min_tokens"],
)
def test_masks_are_the_hosts(model, make_engine, params):
    engine = make_engine()
    _, launched = run(engine, [sequence(model, 0, 9, max_tokens=50, temperature=0, **params)])
    assert set(launched) == {1}


def test_a_cancelled_sequence_gives_its_pages_back(model, make_engine, single):
    engine, events = make_engine(), {}
    seqs = mixed(model, MIXED[:5])
    engine.submit(seqs)
    while step(engine, events) == 1:
        pass
    engine.abort(seqs[0].id)  # its burst is in flight, and another behind it
    free = engine.scheduler.allocator.num_free + engine.scheduler.cache.num_cached
    assert free == 120 - sum(len(s.pages) - s.num_shared for s in seqs)
    while engine.has_work:
        step(engine, events)
    assert events[seqs[0].id][-1].finish_reason is FinishReason.ABORT
    (tokens, *_), *others = (result(seq, events[seq.id]) for seq in seqs)
    assert others == single[1:5]
    assert tokens == single[0][0][: len(tokens)] and 0 < len(tokens) < 30
    check_drained(engine)


def test_tokens_after_the_end_are_dropped(model, make_engine):
    """A stop token in the middle of a burst: what follows is neither told nor cached."""
    plain = sequence(model, 0, 9, max_tokens=20, temperature=0)
    ((tokens, *_),), _ = run(make_engine(1), [plain])
    for end in range(3, 9):
        if tokens.index(tokens[end]) < end:
            continue
        engine = make_engine(4)
        params = {"max_tokens": 20, "temperature": 0, "stop_token_ids": (tokens[end],)}
        (found,), launched = run(engine, [sequence(model, 0, 9, **params)])
        assert found[0] == tokens[: end + 1] and found[3] is FinishReason.STOP
        assert 4 in launched
        # What the prefix cache has of it gives what a cold cache gives.
        again, _ = run(engine, [sequence(model, 0, 9, max_tokens=20, temperature=0)])
        assert again[0][0] == tokens


def test_nan_within_a_burst(model, make_engine, monkeypatch, single):
    """The tokens before it are told, as in single steps; others go on."""
    engine = make_engine(8)
    forward, calls = engine.device.forward, itertools.count()

    def poisoned(batch):
        scores = forward(batch)
        if next(calls) == 6:
            scores = scores._replace(logits=scores.logits.at[1].set(np.nan))
        return scores

    monkeypatch.setattr(engine.device, "forward", poisoned)
    plain = ({"temperature": 0, "max_tokens": 30}, {"seed": 1, "max_tokens": 24, "logprobs": 3})
    (first, second), launched = run(engine, mixed(model, plain))
    assert max(launched) == 8
    assert first == single[0]
    assert second[3] is FinishReason.ERROR and "not numbers" in second[4]
    assert second[0] == single[1][0][:6] and second[2] == single[1][2][:6]


def test_refused_with_drafts():
    with pytest.raises(ValueError, match="burst_steps: expected 1 with max_drafts or an"):
        dataclasses.replace(CONFIG, burst_steps=2, max_drafts=2)
