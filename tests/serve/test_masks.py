"""Masks outside the engine's thread: a slow grammar delays only its own sequence."""

import threading
import time

import numpy as np
import pytest

from jax_attn.serve._grammar import grammar, token_masks
from jax_attn.serve._grammar.grammar import Grammars
from jax_attn.serve._grammar.token_masks import MaskJob, MaskWorkers, SequenceGrammar

VOCAB = 4096
AMBIGUOUS = grammar.from_lark('start: s\ns: s s s | s s | /[a-z ]/ | ""')


@pytest.fixture(scope="module")
def grammars(tokenizer) -> Grammars:
    return Grammars(tokenizer, VOCAB, [0])


def constraint(grammars, text: str, jumps: bool = True) -> SequenceGrammar:
    return SequenceGrammar(grammars.matcher(text), VOCAB // 32, jumps)


def done(workers: MaskWorkers, constraint: SequenceGrammar, tokens: list[int]) -> MaskJob:
    workers.start(constraint, tokens)
    workers.wait([constraint.job], 60)
    assert constraint.job.is_done
    return constraint.job


def first(job: MaskJob) -> int:
    return int(np.flatnonzero(np.unpackbits(job.mask.view(np.uint8), bitorder="little"))[0])


def test_a_text_job_by_job(grammars, tokenizer):
    workers = MaskWorkers(num_fast=2)
    one = constraint(grammars, grammar.from_regex("[ab] and then no choice at all"))
    job = done(workers, one, [])
    assert not job.forced and not job.is_stopped
    token = first(job)
    job = done(workers, one, [token])
    tokens = [token, *job.forced]
    while not job.is_stopped:
        job = done(workers, one, [] if job.forced else [first(job)])
        tokens += job.forced or ([] if job.is_stopped else [first(job)])
    assert tokenizer.decode(tokens) == "a and then no choice at all"


def test_what_may_follow_drafts(grammars, tokenizer, monkeypatch):
    """Masks after drafts go as far as there is a choice, and the grammar keeps its position."""
    monkeypatch.setattr(token_masks, "SLOW_SECONDS", 60)
    workers = MaskWorkers(num_fast=1)
    text = grammar.from_regex("[ab][cd] and no choice")
    drafts = [token for each in ("a", "c", " and", " no") for token in tokenizer.encode(each).ids]
    one, other = (constraint(grammars, text, jumps) for jumps in (True, False))
    for each, most in ((one, 1), (other, 4)):
        done(workers, each, [])
        ahead = each.look_ahead(drafts)
        assert len(ahead) == most
        assert len(each.look_ahead([drafts[0], drafts[0], drafts[1]])) == 1
        assert each.look_ahead([drafts[1]]) == []
        for i in range(most):
            job = done(workers, each, [drafts[i]])
            np.testing.assert_array_equal(job.mask, ahead[i])
    assert done(workers, one, [drafts[1]]).forced
    whole = constraint(grammars, text, False)
    assert not done(workers, whole, drafts[:2]).is_stopped
    slow = SequenceGrammar(grammars.matcher(text), VOCAB // 32, False, was_slow=True)
    slow.job = other.job
    assert slow.look_ahead(drafts) == []


class Stuck:
    """A matcher that takes as long as it is told."""

    is_stopped = False

    def __init__(self):
        self.goes_on, self.begun = threading.Event(), threading.Event()

    def fill_mask(self, mask):
        self.begun.set()
        assert self.goes_on.wait(60)
        mask[:] = -1


def test_who_was_slow_keeps_nobody_else_waiting(grammars):
    """Also if the others have a single thread."""
    workers = MaskWorkers(num_fast=1)
    slow = [SequenceGrammar(Stuck(), VOCAB // 32, False, was_slow=True) for _ in range(5)]
    for one in slow:
        workers.start(one, [])
    assert slow[0].matcher.begun.wait(60)
    for text in ("[a-z]{3}", "no choice"):
        assert done(workers, constraint(grammars, grammar.from_regex(text)), []).error is None
    assert not any(one.job.is_done for one in slow)
    for one in slow:
        one.matcher.goes_on.set()
    workers.wait([one.job for one in slow], 60)
    assert all(one.job.is_done for one in slow)


def test_waiting_has_an_end(grammars):
    workers = MaskWorkers(num_fast=1)
    stuck = SequenceGrammar(Stuck(), VOCAB // 32, False)
    workers.start(stuck, [])
    workers.wait([stuck.job], 0.01)
    workers.wait_for_any([stuck.job], 0.01)
    assert not stuck.job.is_done
    stuck.matcher.goes_on.set()
    workers.wait_for_any([stuck.job], 60)
    assert stuck.job.is_done


class Costly:
    is_stopped = False

    def fill_mask(self, mask):
        end = time.thread_time() + 0.02
        while time.thread_time() < end:
            pass


def test_a_budget_of_processor_time(monkeypatch):
    monkeypatch.setattr(token_masks, "_BUDGET_SECONDS", 0.1)
    monkeypatch.setattr(token_masks, "_BUDGET_SECONDS_TOKEN", 0.001)
    workers, one = MaskWorkers(num_fast=1), SequenceGrammar(Costly(), 1, False)
    num_jobs = 0
    while (job := done(workers, one, [])).error is None:
        num_jobs += 1
        assert one.was_slow and num_jobs < 20
    assert 2 <= num_jobs <= 6
    assert "expected at most 0.1 s: make it simpler" in job.error


def test_what_a_grammar_cannot_do_is_an_error_of_its_own(grammars):
    class Broken:
        is_stopped = False

        def fill_mask(self, mask):
            raise ZeroDivisionError

    workers = MaskWorkers(num_fast=1)
    assert isinstance(done(workers, SequenceGrammar(Broken(), 1, False), []).bug, ZeroDivisionError)
    sound = constraint(grammars, grammar.from_regex("a"))
    assert done(workers, sound, []).bug is None


def test_an_ambiguous_grammar_comes_to_an_end(grammars):
    """It fails within a few tokens: its rows exceed the limit on items."""
    workers, one = MaskWorkers(num_fast=1), constraint(grammars, AMBIGUOUS)
    tokens, num_tokens = [], 0
    rng = np.random.default_rng(0)
    while (job := done(workers, one, tokens)).error is None:
        bits = np.unpackbits(job.mask.view(np.uint8), bitorder="little")
        bits[0] = 0
        tokens = [int(rng.choice(np.flatnonzero(bits)))]
        num_tokens += 1
        assert num_tokens < 100
    assert "items; max is 500" in job.error
