"""The engine on a shallow model: a sequence's tokens do not depend on what runs beside it.

The oracle is the model's dense reference path, one sequence at a time, on the tokens that the
engine chose: each must be the one that the reference would have chosen there.
"""

import dataclasses
import itertools
import json
import random
import re
import threading
import time
from array import array

import jax
import numpy as np
import pytest

from helpers.paths import EXAMPLES
from helpers.serve.small_engine import on_device
from jax_attn import models
from jax_attn.serve._engine import buckets
from jax_attn.serve._engine.engine import Engine
from jax_attn.serve._engine.engine_config import EngineConfig
from jax_attn.serve._grammar import grammar, token_masks
from jax_attn.serve._scheduling.admission import QueueFull
from jax_attn.serve._scheduling.request import FinishReason, SamplingParams, Sequence, Status
from jax_attn.serve._scheduling.step_plan import ScheduledSequence, StepPlan

CONFIG = EngineConfig(num_pages=36, page_size=8, max_running=8, max_step_tokens=40)
INVARIANT = dataclasses.replace(CONFIG, num_pages=240, batch_invariant=True)  # longer than a split

ids = itertools.count()


@pytest.fixture(scope="module")
def device(model):
    engine = Engine(model, CONFIG)
    engine.warm_up()
    return engine.device


@pytest.fixture(scope="module")
def invariant_device(model):
    engine = Engine(model, INVARIANT)
    engine.warm_up()
    return engine.device


@pytest.fixture
def make_engine(model, device):
    """Engines of any policy on one compiled device."""

    def make(**changes) -> Engine:
        return on_device(model, device, dataclasses.replace(CONFIG, **changes))

    return make


@pytest.fixture(scope="module")
def logits_of(model):
    """tokens -> [len(tokens), vocab], by the reference path."""
    forward = jax.jit(lambda tokens: models.reference_forward(model.params, model.config, tokens))

    def run(tokens):
        padded = np.zeros(256, np.int32)
        padded[: len(tokens)] = tokens
        return np.asarray(forward(padded))[: len(tokens)]

    return run


TEXT = (EXAMPLES / "prompts" / "ast.py.txt").read_text("utf-8")


def prompt(model, begin: int, length: int) -> list[int]:
    return [0, *model.tokenizer.encode(TEXT).ids[begin : begin + length - 1]]


def sequence(tokens: list[int], **kwargs) -> Sequence:
    fields = {k: kwargs.pop(k) for k in ("deadline", "priority", "namespace") if k in kwargs}
    params = SamplingParams(**{"max_tokens": 24, "temperature": 0} | kwargs)
    name = f"s{next(ids)}"
    return Sequence(name, name, list(tokens), params, **fields)


class Result:
    """The contents of a sequence's events."""

    def __init__(self):
        self.tokens, self.text, self.logprobs = [], "", []
        self.reason = self.error = self.num_cached = None
        self.is_clients_fault = False

    def add(self, event):
        assert self.reason is None, "an event after the last"
        self.tokens += event.tokens
        self.text += event.text
        self.logprobs += event.logprobs or []
        self.reason, self.error = event.finish_reason, event.error
        self.is_clients_fault = event.is_clients_fault
        if event.num_cached_tokens is not None:
            assert self.num_cached is None
            self.num_cached = event.num_cached_tokens


def run(engine: Engine, *seqs: Sequence, each_step=None) -> list[Result]:
    """Steps until all is done, checking the engine's integrity on the way."""
    results = {seq.id: Result() for seq in seqs}
    num_compiles = engine.device.num_compiles_after_warm_up
    engine.submit(seqs)
    while engine.has_work:
        for event in engine.step():
            results[event.seq_id].add(event)
        engine.scheduler.check_integrity()
        if each_step is not None:
            each_step()
    check_drained(engine)
    assert engine.device.num_compiles_after_warm_up == num_compiles
    for seq in seqs:
        if results[seq.id].reason is not FinishReason.ERROR:
            assert seq.tokens[seq.num_prompt :] == results[seq.id].tokens
    return list(results.values())


def check_drained(engine: Engine) -> None:
    engine.scheduler.check_integrity()
    stats = engine.stats()
    assert stats["running"] == stats["waiting"] == stats["pages_used"] == 0
    assert stats["pages_free"] + stats["pages_cached"] == stats["pages_total"]


def check_greedy(logits_of, seq: Sequence, adjust=None) -> None:
    """adjust(scores, output so far): applies penalties to the logits."""
    logits = logits_of(seq.tokens)
    for i in range(seq.num_prompt, len(seq.tokens)):
        scores = logits[i - 1]
        if adjust is not None:
            scores = adjust(scores.copy(), seq.tokens[seq.num_prompt : i])
        assert scores[seq.tokens[i]] >= scores.max() - 1e-3, (i, seq.num_prompt)


# ---- greedy text in any company ----------------------------------------------------------------


def workload(model, seed: int) -> list[Sequence]:
    """Prompts of all lengths, many of them with a common prefix."""
    rng = random.Random(seed)
    seqs = []
    for _ in range(24):
        begin = rng.choice([0, 0, 0, 300, rng.randrange(1000)])
        tokens = prompt(model, begin, rng.choice([1, 2, 7, 8, 9, 16, 33, rng.randrange(1, 90)]))
        seqs.append(
            sequence(tokens, max_tokens=rng.randrange(1, 110), ignore_eos=rng.random() < 0.5)
        )
    return seqs


@pytest.fixture(scope="module")
def alone(model, device, logits_of):
    """The tokens of each sequence of workload(0), run one after the other."""
    engine = Engine(model, CONFIG)
    engine.device = device
    out = []
    for seq in workload(model, 0):
        run(engine, seq)
        check_greedy(logits_of, seq)
        out.append(seq.tokens)
    return out


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"prefill_chunk": 3},
        {"prefill_chunk": 17, "starvation_seconds": 0},
        {"prefix_cache": False},
        {"max_kv_pages_step": 40, "prefill_chunk": 8},
        {"burst_steps": 4},
        {"burst_steps": 3, "prefill_chunk": 8},
    ],
    ids=str,
)
def test_any_company(model, make_engine, alone, changes):
    """Random arrivals, aborts, a pool too small for all, chunks, prefix hits: the same tokens."""
    engine = make_engine(**changes)
    rng = random.Random(str(changes))
    seqs = workload(model, 0)
    extra = workload(model, 1)  # these are aborted at some time
    todo = [(rng.randrange(30), seq) for seq in seqs + extra]
    aborts = {rng.randrange(5, 200): seq.id for seq in extra}
    results = {seq.id: Result() for seq in seqs + extra}
    num_compiles = engine.device.num_compiles_after_warm_up
    for step in itertools.count():
        engine.submit([seq for when, seq in todo if when == step])
        if step in aborts:
            engine.abort(aborts[step])
        for event in engine.step():
            results[event.seq_id].add(event)
        engine.scheduler.check_integrity()
        if step >= 200 and not engine.has_work:
            break
    check_drained(engine)
    assert engine.device.num_compiles_after_warm_up == num_compiles
    for seq, tokens in zip(seqs, alone, strict=True):
        assert seq.tokens == tokens
        output = tokens[seq.num_prompt :]
        assert results[seq.id].tokens == output
        text = model.tokenizer.decode(output)
        assert results[seq.id].text == text
        reason = FinishReason.STOP if output[-1] == 0 else FinishReason.LENGTH
        if seq.params.ignore_eos:
            reason = FinishReason.LENGTH
        assert results[seq.id].reason is reason
    stats = engine.stats()
    assert stats["preemptions"] > 3
    assert (stats["prefix_hit_tokens"] > 100) == (changes.get("prefix_cache") is not False)
    assert {r.reason for r in results.values()} >= {FinishReason.ABORT, FinishReason.LENGTH}


def test_penalties_through_preemption(model, make_engine, logits_of):
    """The counts on the device are rebuilt when a sequence moves to another slot."""
    engine = make_engine()
    seqs = [
        sequence(
            prompt(model, 40 * i, 60),
            max_tokens=50,
            frequency_penalty=0.7,
            presence_penalty=0.4,
            repetition_penalty=1.3,
            logit_bias=((100 + i, 3.0),),
            ignore_eos=True,
        )
        for i in range(8)
    ]
    run(engine, *seqs)
    assert engine.stats()["preemptions"] > 0
    for i, seq in enumerate(seqs):

        def adjust(scores, output, seq=seq, i=i):
            scores[100 + i] += 3.0
            seen = sorted({*seq.tokens[: seq.num_prompt], *output})
            x = scores[seen]
            scores[seen] = np.where(x > 0, x / 1.3, x * 1.3)
            for token in set(output):
                scores[token] -= 0.7 * output.count(token) + 0.4
            return scores

        check_greedy(logits_of, seq, adjust)


def test_logprobs(model, make_engine, logits_of):
    """Log-probabilities are those of the raw logits, one entry a token, in any company."""
    seqs = [
        sequence(prompt(model, 0, 30), max_tokens=20, logprobs=4, temperature=0.9, seed=3),
        sequence(prompt(model, 9, 12), max_tokens=20, temperature=0.9),
        sequence(prompt(model, 3, 21), max_tokens=9, logprobs=0),
    ]
    results = run(make_engine(), *seqs)
    assert results[1].logprobs == []
    for seq, result in ((seqs[0], results[0]), (seqs[2], results[2])):
        expected = np.asarray(jax.nn.log_softmax(logits_of(seq.tokens)))[seq.num_prompt - 1 :]
        assert [entry.token for entry in result.logprobs] == result.tokens
        for entry, row in zip(result.logprobs, expected, strict=False):
            assert abs(entry.logprob - row[entry.token]) < 1e-3
            assert len(entry.top) == seq.params.logprobs
            for (_, logprob), best in zip(entry.top, sorted(row)[::-1], strict=False):
                assert abs(logprob - best) < 1e-3


def check_prompt_logprobs(seq, result, logits_of):
    """The first is null, each other one is of its token after the earlier ones; output follows."""
    n = seq.num_prompt + len(result.tokens)
    assert [entry.token for entry in result.logprobs] == seq.tokens[:n]
    first, *rest = result.logprobs
    assert (first.logprob, first.top) == (None, ())
    for entry, row in zip(rest, jax.nn.log_softmax(logits_of(seq.tokens)), strict=False):
        assert abs(entry.logprob - row[entry.token]) < 1e-3
        assert len(entry.top) == seq.params.logprobs
        for token, logprob in entry.top:
            assert abs(logprob - row[token]) < 1e-3
        if entry.top:
            assert abs(entry.top[0][1] - row.max()) < 1e-3


def test_logprobs_of_the_prompt(model, make_engine, logits_of):
    """The whole prompt has them, even if cached; for requests beside it, the cost does not grow."""
    engine = make_engine(num_pages=80)
    wanted = {"logprobs": 2, "prompt_logprobs": True}
    (plain,) = run(engine, sequence(prompt(model, 0, 70), max_tokens=5))
    seqs = [
        sequence(prompt(model, 0, 70), **wanted, max_tokens=5),
        sequence(prompt(model, 0, 70), max_tokens=5),
        sequence(prompt(model, 20, 33), **wanted | {"logprobs": 0}, max_tokens=1, temperature=1.0),
        sequence([0], **wanted, max_tokens=3),
        sequence(prompt(model, 0, 70), **wanted, max_tokens=0),
        sequence([0], **wanted, max_tokens=0),
        sequence(prompt(model, 0, 70), max_tokens=0),
    ]
    results = run(engine, *seqs)
    assert results[0].tokens == results[1].tokens == plain.tokens
    assert [len(result.tokens) for result in results] == [5, 5, 1, 3, 0, 0, 0]
    assert [result.num_cached for result in results] == [0, 69, 0, 0, 0, 0, 69]
    assert {result.reason for result in results} == {FinishReason.LENGTH}
    for i in (0, 2, 3, 4, 5):
        check_prompt_logprobs(seqs[i], results[i], logits_of)
    assert not (results[1].logprobs or results[6].logprobs)


def test_logprobs_of_the_prompt_when_preempted(model, make_engine, logits_of):
    engine = make_engine()
    wanted = {"logprobs": 1, "prompt_logprobs": True}
    others = [sequence(prompt(model, 40 * i, 30), max_tokens=60, ignore_eos=True) for i in range(4)]
    seqs = [sequence(prompt(model, 30 * i, 90), **wanted, max_tokens=40) for i in range(3)]
    results = run(engine, *others, *seqs)[4:]
    assert any(seq.num_preempted for seq in seqs)
    for seq, result in zip(seqs, results, strict=True):
        check_prompt_logprobs(seq, result, logits_of)


# ---- sampling ----------------------------------------------------------------------------------


def invariant_engine(model, device, **changes) -> Engine:
    made = Engine(model, dataclasses.replace(INVARIANT, **changes))
    made.device = device
    return made


def invariant_sequences(model) -> list[Sequence]:
    return [
        sequence(
            prompt(model, 50 * i, 1015 if i == 5 else 20 + 13 * i),
            max_tokens=25,
            temperature=1.0,
            top_p=0.95 if i % 2 else 1.0,
            seed=i,
            logprobs=2,
            ignore_eos=True,
        )
        for i in range(6)
    ]


@pytest.fixture(scope="module")
def invariant_alone(model, invariant_device):
    """The results of `invariant_sequences`, run one after the other."""
    engine = invariant_engine(model, invariant_device)
    return [run(engine, seq)[0] for seq in invariant_sequences(model)]


@pytest.mark.parametrize(
    "changes", [{}, {"prefill_chunk": 5}, {"prefix_cache": False}, {"num_pages": 160}], ids=str
)
def test_batch_invariant(model, invariant_device, invariant_alone, changes):
    """The same seed gives the same bits, logprobs too, in any company.

    That holds for chunked, cached and preempted sequences.
    """
    engine = invariant_engine(model, invariant_device, **changes)
    others = [
        sequence(
            prompt(model, 7 * i, 10 + i),
            max_tokens=90 if "num_pages" in changes else 35,
            seed=99 + i,
            temperature=2.0,
            ignore_eos=True,
        )
        for i in range(5)
    ]
    for company in (others, []) if not changes else (others,):
        mixed = invariant_sequences(model)
        order = [*company[:3], *mixed, *company[3:]]
        got = dict(zip([seq.id for seq in order], run(engine, *order), strict=True))
        for seq, one in zip(mixed, invariant_alone, strict=True):
            assert got[seq.id].tokens == one.tokens
            assert got[seq.id].logprobs == one.logprobs  # floats, bit for bit
    # Checks the premise: all were cached the second time, or some were preempted.
    assert changes or min(got[seq.id].num_cached for seq in mixed) >= 16
    assert (engine.stats()["preemptions"] > 0) == ("num_pages" in changes)


def test_every_token_has_noise_of_its_own(model, make_engine):
    """At a high temperature tokens rarely repeat, and no token depends on another."""
    (result,) = run(make_engine(), sequence([0, 5], temperature=1e6, max_tokens=40))
    assert len(set(result.tokens)) > 35 or result.reason is FinishReason.STOP


def test_n_share_the_prompt(model, make_engine):
    engine = make_engine()
    tokens = prompt(model, 0, 50)
    seqs = [sequence(tokens, seed=i, temperature=1.0, max_tokens=12) for i in range(5)]
    results = run(engine, *seqs)
    assert len({tuple(r.tokens) for r in results}) > 1
    assert sorted(r.num_cached for r in results) == [0, 48, 48, 48, 48]


def test_a_page_that_begins_like_the_prompt_is_copied(model, make_engine, logits_of):
    """Pages of 8. The second parts from the first within a page, which stays as it was."""
    engine = make_engine()
    tokens, other = prompt(model, 0, 30), prompt(model, 40, 12)
    first, second = sequence(tokens), sequence([*tokens[:21], *other])
    (want,) = run(engine, first)
    (result,) = run(engine, second)
    assert result.num_cached == 21
    check_greedy(logits_of, second)
    (again,) = run(engine, sequence(tokens))
    assert again.num_cached == 29 and again.tokens == want.tokens


def test_min_tokens_and_ignore_eos(model, make_engine):
    engine = make_engine()
    tokens, bias = prompt(model, 0, 9), ((0, 50.0),)
    at_once, later, never = (
        sequence(tokens, logit_bias=bias, max_tokens=10, **kwargs)
        for kwargs in ({}, {"min_tokens": 4}, {"ignore_eos": True})
    )
    results = run(engine, at_once, later, never)
    assert results[0].tokens == [0] and results[0].text == ""
    assert results[1].tokens[4:] == [0] and 0 not in results[1].tokens[:4]
    assert results[2].tokens == [0] * 10
    reasons = [FinishReason.STOP, FinishReason.STOP, FinishReason.LENGTH]
    assert [r.reason for r in results] == reasons


def test_stops(model, make_engine):
    engine = make_engine()
    tokens = prompt(model, 0, 40)
    (free,) = run(engine, sequence(tokens, max_tokens=30))
    stop = free.text[7:12]
    stopped, by_token, nearly, shown, shown_token = run(
        engine,
        sequence(tokens, max_tokens=30, stop=(stop,)),
        sequence(tokens, max_tokens=30, stop_token_ids=(free.tokens[6],)),
        sequence(tokens, max_tokens=30, stop=(free.text[-3:] + "\0",)),
        sequence(tokens, max_tokens=30, stop=(stop,), include_stop=True),
        sequence(tokens, max_tokens=30, stop_token_ids=(free.tokens[6],), include_stop=True),
    )
    assert nearly.text == free.text  # held-back text comes in the end
    assert stopped.text == free.text[: free.text.index(stop)]
    assert stopped.tokens == free.tokens[: len(stopped.tokens)] and len(stopped.tokens) < 30
    first = free.tokens.index(free.tokens[6])
    assert by_token.tokens == free.tokens[: first + 1]
    assert by_token.text == model.tokenizer.decode(free.tokens[:first])
    assert stopped.reason is by_token.reason is FinishReason.STOP
    assert shown.text == stopped.text + stop and shown.tokens == stopped.tokens
    assert shown_token.text == by_token.text + model.tokenizer.decode([free.tokens[6]])


# ---- grammars ----------------------------------------------------------------------------------

PERSON = {
    "type": "object",
    "properties": {
        "full_name_of_the_person": {"type": "string", "maxLength": 12},
        "unit_of_measurement": {"const": "kilograms of feathers"},
        "weight": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
    },
    "required": ["full_name_of_the_person", "unit_of_measurement", "weight", "tags"],
    "additionalProperties": False,
}


def test_json_schema(model, make_engine):
    """At a high temperature, with preemptions, with and without penalties: always valid."""
    engine = make_engine()
    text = grammar.from_json_schema(PERSON)
    seqs = [
        sequence(
            prompt(model, 10 * i, 40 + i),
            grammar=text,
            max_tokens=120,
            temperature=1.5,
            seed=i,
            presence_penalty=0.5 * (i % 2),
        )
        for i in range(12)
    ]
    results = run(engine, *seqs)
    assert engine.stats()["preemptions"] > 0
    for result in results:
        assert result.reason is FinishReason.STOP
        value = json.loads(result.text)
        assert list(value) == PERSON["required"]
        assert len(value["full_name_of_the_person"]) <= 12 and 0 <= value["weight"] <= 999
        assert value["unit_of_measurement"] == "kilograms of feathers"
        assert len(value["tags"]) <= 3 and set(value["tags"]) <= {"red", "green"}


def test_jump_forward_saves_steps(model, make_engine):
    """A text without choices: the same with and without jumps, in a fraction of the steps."""
    pattern = r"def forced_by_the_grammar\(arguments\): return None # and nothing else"
    expected = pattern.replace("\\", "")
    steps, tokens = {}, {}
    for jump in (True, False):
        engine = make_engine(jump_forward=jump)
        seq = sequence(prompt(model, 0, 20), grammar=grammar.from_regex(pattern), max_tokens=60)
        (result,) = run(engine, seq)
        assert (result.text, result.reason) == (expected, FinishReason.STOP)
        steps[jump], tokens[jump] = engine.stats()["steps"], len(result.tokens)
        forced = engine.stats()["jump_forward_tokens"]
        assert forced > 0.7 * tokens[jump] if jump else forced == 0
    assert steps[True] < tokens[True] / 2 <= steps[False]


def test_jump_forward_amid_choices(model, make_engine, logits_of):
    """Chosen tokens are the reference's choice among the allowed ones, forced ones in its cache."""
    pattern = r"(alpha|beta|gamma) is red red red red red red now (red|green|blue) as well\."
    seqs = [
        sequence(
            prompt(model, 30 * i, 25 + i),
            grammar=grammar.from_regex(pattern),
            max_tokens=60,
            frequency_penalty=1.0,
        )
        for i in range(6)
    ]
    engine = make_engine()
    results = run(engine, *seqs)
    assert engine.stats()["jump_forward_tokens"] > 6 * 5
    for seq, result in zip(seqs, results, strict=True):
        assert re.fullmatch(pattern, result.text)
        matcher = engine.grammars.matcher(seq.params.grammar)
        logits, words = logits_of(seq.tokens), -(-model.config.vocab_size // 32)
        for i, token in enumerate(result.tokens):
            mask = np.zeros(words, np.int32)
            matcher.fill_mask(mask)
            allowed = np.unpackbits(mask.view(np.uint8), bitorder="little").astype(bool)
            scores = logits[seq.num_prompt + i - 1].copy()
            for other in set(result.tokens[:i]):
                scores[other] -= 1.0 * result.tokens[:i].count(other)
            forced = engine.grammars.matcher(seq.params.grammar)
            for t in result.tokens[:i]:
                forced.advance(t)
            if not forced.take_forced():
                assert scores[token] >= scores[allowed].max() - 1e-3
            matcher.advance(token)


def test_grammar_with_logprobs_is_not_jumped(model, make_engine):
    engine = make_engine()
    seq = sequence(
        prompt(model, 0, 20), grammar=grammar.from_regex("abc abc abc"), logprobs=1, max_tokens=30
    )
    (result,) = run(engine, seq)
    assert result.text == "abc abc abc" and len(result.logprobs) == len(result.tokens)


@pytest.mark.parametrize("jump", [True, False])
def test_length_cuts_forced_tokens(model, make_engine, jump):
    """A text that is complete with its last token counts as not cut."""
    engine = make_engine(jump_forward=jump)

    def text(max_tokens):
        return sequence(
            prompt(model, 0, 20),
            grammar=grammar.from_regex("import os, sys, re, json"),
            max_tokens=max_tokens,
        )

    (cut,) = run(engine, text(3))
    assert len(cut.tokens) == 3 and cut.reason is FinishReason.LENGTH
    (whole,) = run(engine, text(50))
    for shortage, reason in ((0, FinishReason.STOP), (1, FinishReason.LENGTH)):
        (result,) = run(engine, text(len(whole.tokens) - shortage))
        assert result.tokens == whole.tokens[: len(whole.tokens) - shortage]
        assert result.reason is reason


@pytest.mark.parametrize("where", ["fill_mask", "advance", "take_forced"])
def test_a_grammar_that_gets_stuck(model, make_engine, logits_of, monkeypatch, where):
    """The grammar ends its own sequence, and no other."""
    engine = make_engine()
    text = grammar.from_regex("[a-z]{3} (and so on|and on)+ [0-9]{9}")
    seqs = [sequence(prompt(model, 0, 20), grammar=text, max_tokens=40), sequence([0, 593, 633])]
    call, num_calls = getattr(grammar.Matcher, where), itertools.count()

    def stuck(*args):
        if next(num_calls) == 3:
            raise grammar.GrammarError("grammar: too complex.")
        return call(*args)

    monkeypatch.setattr(grammar.Matcher, where, stuck)
    results = run(engine, *seqs)
    assert (results[0].reason, results[0].error) == (FinishReason.ERROR, "grammar: too complex.")
    assert results[1].reason is FinishReason.LENGTH
    check_greedy(logits_of, seqs[1])


class Late:
    """Masks that arrive on command, for the grammars that `which` picks."""

    def __init__(self, monkeypatch, which=lambda constraint: True):
        self.comes = threading.Event()
        take = token_masks.SequenceGrammar.run

        def late(constraint, turn):
            if which(constraint):
                assert self.comes.wait(60)
            take(constraint, turn)

        monkeypatch.setattr(token_masks.SequenceGrammar, "run", late)


def step_until(engine, results, done, most=1000) -> None:
    for _ in range(most):
        for event in engine.step():
            results[event.seq_id].add(event)
        engine.scheduler.check_integrity()
        if done():
            return
    raise AssertionError(f"not in {most} steps")


@pytest.mark.parametrize("num_prompt", [15, 16, 17])
def test_a_late_mask_holds_its_own_sequence_only(
    model, make_engine, logits_of, monkeypatch, num_prompt
):
    """In the end the text is the same as without the delay. Pages have 8 tokens."""
    pattern = r"(alpha|beta|gamma) is red red red now (red|green|blue) as well\."

    def constrained():
        return sequence(
            prompt(model, 0, num_prompt),
            grammar=grammar.from_regex(pattern),
            max_tokens=60,
            frequency_penalty=1.0,
        )

    (expected,) = run(make_engine(), constrained())
    late = Late(monkeypatch)
    engine, held, other = make_engine(), constrained(), sequence(prompt(model, 30, 9), max_tokens=9)
    results = {seq.id: Result() for seq in (held, other)}
    engine.submit([held, other])
    step_until(engine, results, lambda: other.status is Status.FINISHED)
    assert results[other.id].reason is FinishReason.LENGTH and held.num_output == 0
    assert held.is_held
    late.comes.set()
    step_until(engine, results, lambda: not engine.has_work)
    assert results[held.id].text == expected.text
    assert results[held.id].tokens == expected.tokens
    check_greedy(logits_of, other)
    check_drained(engine)


@pytest.mark.parametrize("what", ["abort", "deadline", "preemption", "failure"])
def test_whatever_happens_while_a_mask_is_late(model, make_engine, monkeypatch, what):
    late = Late(monkeypatch)
    engine = make_engine()
    text = grammar.from_regex("[a-z]{3} and so on")
    deadline = time.monotonic() + 3600 if what == "deadline" else None
    held = sequence(prompt(model, 0, 20), grammar=text, max_tokens=40, deadline=deadline)
    results = {held.id: Result()}
    engine.submit([held])
    step_until(engine, results, lambda: held.is_held)
    if what == "abort":
        engine.abort(held.id)
    elif what == "deadline":
        monkeypatch.setattr(time, "monotonic", lambda: deadline)
        step_until(engine, results, lambda: held.status is Status.FINISHED)
        monkeypatch.undo()
    elif what == "preemption":
        engine.scheduler._preempt(held, StepPlan())
    else:
        for event in engine.recover("It failed."):
            results[event.seq_id].add(event)
    late.comes.set()
    if engine.has_work:
        step_until(engine, results, lambda: not engine.has_work)
    reasons = {"abort": "abort", "deadline": "deadline", "preemption": "stop", "failure": "error"}
    assert results[held.id].reason == reasons[what]
    assert what != "preemption" or re.fullmatch("[a-z]{3} and so on", results[held.id].text)
    assert not engine._constrained.num_held
    check_drained(engine)


def test_a_bug_in_a_grammar_is_told_to_its_own_sequence(model, make_engine, monkeypatch):
    def broken(self, row_mask):
        raise ZeroDivisionError

    monkeypatch.setattr(grammar.Matcher, "fill_mask", broken)
    seqs = [
        sequence(prompt(model, 0, 20), grammar=grammar.from_regex("[a-z]*")),
        sequence([0, 593, 633]),
    ]
    results = run(make_engine(), *seqs)
    assert results[0].error == "The grammar failed: ZeroDivisionError."
    assert results[1].reason is FinishReason.LENGTH


def test_a_grammar_that_is_used_up_is_compiled_anew(model, make_engine, monkeypatch):
    """Copies of a compiled grammar share its lexer."""

    def stuck(self, row_mask):
        raise grammar.GrammarError("grammar: too complex.")

    engine, text = make_engine(), grammar.from_regex("[a-z]*")
    with monkeypatch.context() as patch:
        patch.setattr(grammar.Matcher, "fill_mask", stuck)
        (result,) = run(engine, sequence(prompt(model, 0, 20), grammar=text))
    assert result.error == "grammar: too complex." and result.is_clients_fault
    assert engine.grammars.cached(text) is None
    run(engine, sequence(prompt(model, 0, 20), grammar=text, max_tokens=3))


def test_min_tokens_leaves_the_host_a_step_ahead(model, make_engine):
    """The next step is sampled before the host waits for the last step's tokens."""
    engine = make_engine()
    device, order = engine.device, []

    class Watched:
        def __getattr__(self, name):
            return getattr(device, name)

        def sample(self, *args):
            order.append("sample")
            return device.sample(*args)

        def read(self, sampled):
            order.append("read")
            return device.read(sampled)

    engine.device = Watched()
    seqs = [
        sequence(prompt(model, 0, 20), min_tokens=12, max_tokens=12, seed=3, temperature=2.0),
        sequence(prompt(model, 9, 20), max_tokens=12),
    ]
    engine.submit(seqs)
    while engine.has_work:
        engine.step()
    assert order == ["sample", *["sample", "read"] * 11, "read"]


# ---- refusals and failures ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"max_tokens": 5000}, "max_tokens: expected prompt and output within"),
        ({"logprobs": 21}, "logprobs: expected at most 20"),
        ({"logit_bias": tuple((i, 1.0) for i in range(301))}, "logit_bias: expected at most 300"),
        ({"logit_bias": ((4096, 1.0),)}, "logit_bias: expected tokens in"),
        # The first would raise IndexError in the step of all others, the second would be another
        # token.
        ({"stop_token_ids": (4096,), "min_tokens": 1}, "stop_token_ids: expected tokens in"),
        ({"stop_token_ids": (-1,), "min_tokens": 1}, "stop_token_ids: expected tokens in"),
        ({"deadline": float("nan")}, "deadline: expected seconds, got nan"),
        ({"priority": float("nan")}, "priority: expected an integer, got nan"),
        ({"grammar": grammar.from_regex("(")}, "grammar: .*unclosed group"),
    ],
)
def test_refused(model, make_engine, kwargs, message):
    """The whole request is refused, and leaves nothing behind."""
    engine = make_engine()
    good, bad = sequence([0, 5]), sequence([0, 5], **kwargs)
    with pytest.raises(ValueError, match=message):
        engine.submit([good, bad])
    assert not engine.has_work
    with pytest.raises(ValueError, match="prompt: expected tokens in"):
        engine.submit([sequence([0, -1])])
    check_drained(engine)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"top_k": 2**31}, "top_k: expected 0 to"),
        ({"temperature": 1e39}, "temperature: expected a finite number"),
        ({"repetition_penalty": 1e300}, "repetition_penalty: expected a finite number"),
        ({"presence_penalty": float("nan")}, "presence_penalty: expected a finite number"),
        ({"frequency_penalty": float("-inf")}, "frequency_penalty: expected a finite number"),
        ({"top_p": float("nan")}, "top_p: expected"),
        ({"min_p": float("nan")}, "min_p: expected"),
        ({"logit_bias": ((1, 1e39),)}, "logit_bias: expected finite numbers"),
    ],
)
def test_values_that_the_device_cannot_hold(kwargs, message):
    """They would fail, or become NaN, in a step that runs other sequences too."""
    with pytest.raises(ValueError, match=message):
        sequence([0], **kwargs)


def test_values_at_their_limits(make_engine):
    engine = make_engine()
    extremes = [
        {"top_k": 2**31 - 1, "temperature": 3.4e38},
        {"temperature": 1e-300, "top_p": 1e-300, "min_p": 1.0},
        {"repetition_penalty": 3.4e38, "presence_penalty": -3.4e38, "frequency_penalty": 3.4e38},
        {"logit_bias": tuple((i, 3.4e38 * (-1) ** i) for i in range(300)), "temperature": 1.0},
        {"seed": -(2**200), "temperature": 1.0}, {"seed": 2**64, "temperature": 1.0},
        {"stop": ("a" * 10_000,) * 16}, {"priority": 10**400, "max_tokens": 3},
    ]  # fmt: skip
    for result in run(engine, *(sequence([0, 5], **kwargs) for kwargs in extremes)):
        assert result.reason is FinishReason.LENGTH and result.error is None


def test_queue_full(make_engine):
    engine = make_engine(max_waiting=3)
    seqs = [sequence([0, i]) for i in range(4)]
    with pytest.raises(QueueFull):
        engine.submit(seqs)
    assert not engine.has_work
    run(engine, *seqs[:3])


def test_deadline(model, make_engine):
    engine = make_engine()
    seqs = [sequence(prompt(model, 0, 10), max_tokens=20, deadline=d) for d in (0.0, None)]
    late, fine = run(engine, *seqs)
    assert (late.reason, late.tokens) == (FinishReason.DEADLINE, [])
    assert fine.reason is FinishReason.LENGTH


def test_abort_is_told_with_the_next_step(model, make_engine):
    engine = make_engine()
    seqs = [sequence(prompt(model, 0, 30), max_tokens=50, ignore_eos=True) for _ in range(3)]
    engine.submit(seqs)
    for _ in range(4):
        engine.step()
    engine.abort(seqs[1].id)
    engine.abort("nobody")
    assert not seqs[1].pages
    events = {event.seq_id: event for event in engine.step()}
    assert events[seqs[1].id].finish_reason is FinishReason.ABORT
    for seq in seqs:
        engine.abort(seq.id)
    assert {event.finish_reason for event in engine.step()} == {FinishReason.ABORT}
    assert not engine.has_work
    check_drained(engine)


def test_a_step_that_raises(model, make_engine, logits_of, monkeypatch):
    """Running sequences end with an error, waiting ones run, and the lost cache is not used."""
    engine = make_engine()
    tokens = prompt(model, 0, 40)
    run(engine, sequence(tokens))  # leaves its pages in the cache
    seqs = [sequence(tokens, max_tokens=30) for _ in range(12)]
    results = {seq.id: Result() for seq in seqs}
    engine.submit(seqs)
    for _ in range(5):
        for event in engine.step():
            results[event.seq_id].add(event)

    def fail(batch):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine.device, "forward", fail)
        with pytest.raises(RuntimeError):
            engine.step()
    for event in engine.recover("The engine failed."):
        results[event.seq_id].add(event)
    assert engine.stats()["pages_free"] == CONFIG.num_pages
    while engine.has_work:
        for event in engine.step():
            results[event.seq_id].add(event)
    failed = [r for r in results.values() if r.reason is FinishReason.ERROR]
    assert len(failed) == 8 and all(r.error == "The engine failed." for r in failed)
    for seq in seqs:
        if results[seq.id].reason is not FinishReason.ERROR:
            assert len(results[seq.id].tokens) == 30
            check_greedy(logits_of, seq)
    check_drained(engine)


def test_a_step_that_raises_with_a_preempted_sequence_in_flight(
    model, make_engine, logits_of, monkeypatch
):
    """Its token is lost with the step, and is sampled again."""
    engine = make_engine()
    seqs = [
        sequence(prompt(model, 40 * i, 60), max_tokens=60, ignore_eos=True, temperature=i % 2)
        for i in range(8)
    ]
    expected = [
        run(engine, dataclasses.replace(seq, id="x", tokens=list(seq.tokens)))[0] for seq in seqs
    ]
    forward, victims = engine.device.forward, []

    def fail(batch):
        if not victims:
            victims.extend(seq for seq in engine.scheduler.waiting if seq.num_in_flight)
            if victims:
                raise RuntimeError
        return forward(batch)

    monkeypatch.setattr(engine.device, "forward", fail)
    results = {seq.id: Result() for seq in seqs}
    engine.submit(seqs)
    while engine.has_work:
        try:
            events = engine.step()
        except RuntimeError:
            events = engine.recover("failed")
        for event in events:
            results[event.seq_id].add(event)
    assert victims
    for seq, one in zip(seqs, expected, strict=True):
        if results[seq.id].reason is not FinishReason.ERROR:
            assert results[seq.id].tokens == one.tokens
    assert all(results[seq.id].reason is FinishReason.LENGTH for seq in victims)
    check_drained(engine)


def test_nan_logits_end_one_sequence(model, make_engine, logits_of, monkeypatch):
    engine = make_engine()
    seqs = [sequence(prompt(model, 20 * i, 20), max_tokens=20, ignore_eos=True) for i in range(3)]
    forward, num_calls = engine.device.forward, itertools.count()

    def poisoned(batch):
        scores = forward(batch)
        if next(num_calls) == 6:
            host = np.asarray(scores.logits).copy()
            host[1] = np.nan
            return scores._replace(logits=jax.device_put(host))
        return scores

    monkeypatch.setattr(engine.device, "forward", poisoned)
    results = run(engine, *seqs)
    assert results[1].reason is FinishReason.ERROR and "not numbers" in results[1].error
    for i in (0, 2):
        assert results[i].reason is FinishReason.LENGTH
        check_greedy(logits_of, seqs[i])


# ---- the step ----------------------------------------------------------------------------------


def test_the_next_step_is_launched_before_tokens_are_read(model, make_engine, monkeypatch):
    engine, calls = make_engine(), []

    def note(owner, name, label):
        call = getattr(owner, name)

        def noted(*args):
            calls.append(label)
            return call(*args)

        monkeypatch.setattr(owner, name, noted)

    note(engine.device, "forward", "forward")
    note(engine.device, "sample", "sample")
    note(engine.device, "read", "read")
    run(engine, sequence(prompt(model, 0, 9), max_tokens=5, ignore_eos=True))
    assert calls == ["forward", "sample"] + ["forward", "sample", "read"] * 4 + ["read"]


def test_nothing_is_computed_in_vain(model, make_engine):
    """A sequence that ends by its length is not scheduled once more."""
    engine = make_engine()
    run(engine, sequence(prompt(model, 0, 16), max_tokens=7, ignore_eos=True))
    assert engine.stats()["steps"] == 7


def test_stats_and_snapshot(model, make_engine):
    engine = make_engine()
    seqs = [
        sequence(prompt(model, 0, 50), max_tokens=10, namespace=name) for name in ("a", "a", "b")
    ]
    snapshots = []

    def each_step():
        stats = engine.step_stats
        snapshots.append(json.loads(json.dumps(engine.snapshot())))
        assert all(seconds >= 0 for seconds in stats.seconds.values())
        assert stats.num_tokens <= CONFIG.max_step_tokens

    results = run(engine, *seqs, each_step=each_step)
    stats = engine.stats()
    num_tokens = sum(len(r.tokens) for r in results)
    assert stats["generated_tokens"] == num_tokens
    assert stats["prompt_tokens"] == 150 and stats["prefix_hit_tokens"] == 48
    assert stats["steps"] == sum(bool(s["step"]["entries"]) for s in snapshots)
    states = snapshots[0]["pages"]["states"]
    assert len(states) == CONFIG.num_pages and set(states) <= set("fclu")
    assert snapshots[0]["requests"][0]["status"] == "running"
    assert {node["namespace"] for node in snapshots[-1]["tree"]} >= {"a", "b"}
    shown = [node["tokens"] for node in snapshots[-1]["tree"]]
    assert any(tokens[:8] == seqs[0].tokens[:8] for tokens in shown)


def test_warm_up_lists_what_it_compiles(device):
    names = [bucket.name for bucket in device.buckets]
    decodes = (1, 4, 8) if jax.default_backend() == "cpu" else (8,)
    assert names == [f"{n} tokens x {n} sequences" for n in decodes] + ["40 tokens x 8 sequences"]
    with_drafts = buckets.sizes(CONFIG.max_running, CONFIG.max_step_tokens, has_drafts=True)
    assert with_drafts == [(8, 8), (40, 8)]  # one sequence has room for drafts


def test_batch_invariant_plans_hold_any_batch(model):
    """Long prompts in chunks among long decodes: the splits fit the chosen capacities."""
    config = dataclasses.replace(
        CONFIG, num_pages=2100, max_running=8, max_step_tokens=256, batch_invariant=True
    )
    engine = Engine(model, config)
    (bucket,) = engine.device.buckets
    assert bucket.specs[0].schedule == "fixed_split"
    longest = model.config.max_positions
    for num_decodes, num_prompts in ((8, 0), (7, 1), (4, 4), (0, 1), (0, 8)):
        entries = []
        for i in range(num_decodes + num_prompts):
            seq = sequence([5] * longest)
            seq.pages = array("i", range(longest // CONFIG.page_size))
            n = 1 if i < num_decodes else (256 - num_decodes) // num_prompts
            entries.append(ScheduledSequence(seq, longest - n, n, True))
        (plan,) = bucket.unpack(engine.device.plan(entries).words).plans
        assert plan.header()["num_partial_rows"] > 0


@pytest.mark.parametrize(("kv_dtype", "fewest_same"), [("float8_e4m3fn", 4), ("int8", 20)])
def test_a_cache_of_codes(kv_dtype, fewest_same, model, make_engine):
    """A quantized cache takes fewer bytes; nearly equal logits give the same words if clear."""
    engine = Engine(model, dataclasses.replace(CONFIG, kv_dtype=kv_dtype))
    engine.warm_up()
    tokens = prompt(model, 0, 30)
    (got,) = run(engine, sequence(tokens))
    (want,) = run(make_engine(), sequence(tokens))
    same = sum(a == b for a, b in zip(got.tokens, want.tokens, strict=False))
    assert engine.device._k_pages.dtype == kv_dtype and len(got.tokens) == 24
    assert same >= fewest_same, (got.text, want.text)
    # A prefix hit has the values that were computed.
    (again,) = run(engine, sequence(tokens))
    assert again.tokens == got.tokens and again.num_cached == 29  # 24, and 5 of a copied page
