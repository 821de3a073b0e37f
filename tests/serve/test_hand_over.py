"""Requests that leave one engine and go on in another: their tokens are those of one engine."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

pytest.importorskip("llguidance", reason="needs the extra `serve`")

from jax_attn.serve._engine.engine import Engine
from jax_attn.serve._engine.engine_config import EngineConfig
from jax_attn.serve._engine.hand_over import HandedOver
from jax_attn.serve._grammar import grammar
from jax_attn.serve._scheduling.request import FinishReason, SamplingParams, Sequence

# One shape for all steps: it compiles once, and bits are comparable.
CONFIG = EngineConfig(
    num_pages=30, page_size=8, max_running=3, max_step_tokens=8, batch_invariant=True
)
PROMPT = [(7 * i * i + 3) % 900 for i in range(37)]
SAMPLED = SamplingParams(14, temperature=1.0, seed=5, ignore_eos=True, logprobs=1)

ids = itertools.count()


@pytest.fixture(scope="module")
def engines(model):
    made = [Engine(model, CONFIG) for _ in range(2)]
    for engine in made:
        engine.warm_up()
    for source, target in (made, made[::-1]):
        hand_over(source, target, SAMPLED, 1)  # the first one compiles copies
    return made


@pytest.fixture
def pair(engines):
    for engine in engines:
        engine.scheduler.cache.clear()
    return engines


class Told:
    """What the events of a request say."""

    def __init__(self):
        self.tokens, self.text, self.logprobs, self.reason = [], "", [], None

    def run(self, engine, num_tokens=1000):
        """Until the request has ended, or has that many tokens."""
        while self.reason is None and len(self.tokens) < num_tokens:
            self.take(engine.step())
            engine.scheduler.check_integrity()
        return self

    def take(self, events):
        for event in events:
            self.tokens += event.tokens
            self.text += event.text
            self.logprobs += event.logprobs or []
            self.reason = event.finish_reason

    @property
    def all(self):
        return self.tokens, self.text, self.logprobs, self.reason


def submit(engine, params, prompt=PROMPT) -> str:
    name = str(next(ids))
    engine.submit([Sequence(name, name, list(prompt), params, namespace="mine")])
    return name


def hand_over(source, target, params, num_tokens, prompt=PROMPT, in_bytes=False) -> Told:
    told = Told()
    name = submit(source, params, prompt)
    told.run(source, num_tokens)
    told.take(source.settle())
    handed = source.export_request(name)
    assert not source.has_work and not source.scheduler.running
    source.scheduler.check_integrity()
    if in_bytes:
        handed = HandedOver.from_bytes(handed.to_bytes())
    target.import_request(handed, "there")
    target.scheduler.check_integrity()
    return told.run(target)


KINDS = {
    "sampled": SAMPLED,
    "penalties and bias": dataclasses.replace(
        SAMPLED, repetition_penalty=1.3, frequency_penalty=0.5, logit_bias=((300, 2.5),)
    ),
    "grammar": SamplingParams(
        14, temperature=0, grammar=grammar.from_regex("[a-z]{3,5} = [0-9]{4} in the end")
    ),
    "stop string": SamplingParams(20, temperature=0, stop=("e",), min_tokens=12, ignore_eos=True),
    "prompt logprobs": dataclasses.replace(SAMPLED, prompt_logprobs=True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_of_one_engine(pair, kind):
    source, target = pair
    params = KINDS[kind]
    submit(source, params)
    alone = Told().run(source).all
    num_compiles = [engine.stats()["compilations"] for engine in pair]
    for num_tokens, in_bytes in ((0, True), (1, False), (6, True)):
        for engine in pair:
            engine.scheduler.cache.clear()
        before = target.stats()
        told = hand_over(source, target, params, num_tokens, in_bytes=in_bytes)
        assert told.all == alone, (kind, num_tokens)
        hits = target.stats()["prefix_hit_tokens"] - before["prefix_hit_tokens"]
        # Four full pages of the prompt; 37 tokens and 4 of the output make five.
        expected = {0: 0, 1: 32, 6: 40}[num_tokens]
        if kind in ("sampled", "penalties and bias"):
            assert hits == expected
    assert num_compiles == [engine.stats()["compilations"] for engine in pair]


def test_two_that_hand_over_to_each_other_under_load(pair):
    one, other = pair
    submit(one, SAMPLED)
    alone = Told().run(one).all
    for engine in pair:
        engine.scheduler.cache.clear()
        submit(engine, dataclasses.replace(SAMPLED, seed=8), PROMPT[5:])
    told, name = Told(), submit(one, SAMPLED)

    def step(engine):
        told.take([event for event in engine.step() if event.seq_id == name])

    for turn in range(6):
        for _ in range(4):
            step(one)
        if told.reason is not None:
            break
        told.take([event for event in one.settle() if event.seq_id == name])
        if told.reason is not None:
            break
        handed = one.export_request(name)
        name = f"turn {turn}"
        other.import_request(handed, name)
        one, other = other, one
    while told.reason is None:
        step(one)
    assert turn > 1 and told.all == alone
    for engine in pair:
        while engine.has_work:
            engine.step()
        engine.scheduler.check_integrity()


def test_a_full_pool_reads_the_tokens_again(pair):
    source, target = pair
    submit(source, SAMPLED)
    alone = Told().run(source).all
    for i in range(2):  # hold 26 of 30 pages
        submit(target, dataclasses.replace(SAMPLED, max_tokens=60), [i, *PROMPT, *PROMPT][:50])
    for _ in range(30):
        target.step()
    name = submit(source, SAMPLED)
    told = Told().run(source, 3)
    told.take(source.settle())
    target.import_request(source.export_request(name), "there")
    while told.reason is None:
        told.take([event for event in target.step() if event.seq_id == "there"])
        target.scheduler.check_integrity()
    assert told.all == alone
    while target.has_work:
        target.step()


@pytest.mark.parametrize("part", ["compile_copies", "put"])
def test_no_memory_for_what_arrives(pair, monkeypatch, part):
    source, target = pair
    submit(source, SAMPLED)
    alone = Told().run(source).all
    name = submit(source, SAMPLED)
    told = Told().run(source, 6)
    told.take(source.settle())
    handed = source.export_request(name)
    other = submit(target, SAMPLED, PROMPT[3:])
    target.step()

    def fail(*args):
        raise RuntimeError("RESOURCE_EXHAUSTED")

    with monkeypatch.context() as patch:
        patch.setattr(target.device, part, fail)
        with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
            target.import_request(handed, "there")
    target.scheduler.check_integrity()
    events = []
    while target.has_work:
        events += target.step()
    assert {event.seq_id for event in events} == {other}
    expected = FinishReason.LENGTH if part == "compile_copies" else FinishReason.ERROR
    assert events[-1].finish_reason is expected
    submit(target, SAMPLED)  # reads no page that was not written
    assert Told().run(target).all == alone


def made(**changes) -> HandedOver:
    page = [np.zeros((2, 8, 2, 64), np.float32)] * 2
    fields = {"tokens": PROMPT, "num_prompt": 37, "params": SAMPLED, "namespace": "", "tenant": ""}
    fields |= {"priority": 0, "adapter_name": "", "seconds_left": None, "version": "0"}
    return HandedOver(**fields | {"page_size": 8, "pages": [page], "states": []} | changes)


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"version": "1"}, "expected weights of version '0', got '1'"),
        ({"page_size": 16}, "expected pages of 8 tokens, got 16"),
        ({"num_prompt": 38}, "num_prompt: expected 1 to 37, got 38"),
        ({"num_prompt": 23}, "expected less output than max_tokens = 14, got 14 tokens"),
        ({"tokens": PROMPT[:7], "num_prompt": 7}, "expected pages of at most 7 tokens, got 1"),
        ({"pages": [[np.zeros((2, 8, 2, 64), np.float16)] * 2]}, "pages: expected .* float32, got"),
        ({"pages": [[np.zeros((2, 8, 2, 64), np.float32)]]}, "both engines need the same model"),
        ({"states": [[np.zeros(3, np.float32)]]}, "states: expected none, got .3. float32"),
        ({"tokens": [5000, *PROMPT], "num_prompt": 38}, "prompt: expected tokens in"),
        ({"tokens": [*PROMPT, 5000]}, "tokens: expected tokens in"),
        ({"adapter_name": "x"}, "adapter: expected one of none"),
    ],
)
def test_what_does_not_fit_is_refused(pair, changes, sentence):
    engine = pair[0]
    shape = jax.tree.leaves(engine.device.shapes_of_copies()[0])[0]
    assert shape.shape == (2, 8, 2, 64), shape
    with pytest.raises(ValueError, match=sentence):
        engine.import_request(made(**changes), "x")
    assert not engine.has_work
    engine.scheduler.check_integrity()


def test_bytes_that_are_none_of_ours():
    data = made().to_bytes()
    again = HandedOver.from_bytes(data)
    assert again.params == SAMPLED and again.tokens == PROMPT
    assert again.to_bytes() == data
    for wrong in (b"", b"x" * 100, data[:-1], data + b"x", data[:60], data[:30] + b"{" + data[31:]):
        with pytest.raises(ValueError, match="import_request: expected bytes of export_request"):
            HandedOver.from_bytes(wrong)


def test_it_takes_the_rights_of_the_request_that_is_read_again():
    handed = made(namespace="ours", tenant="us", priority=-5)
    seq = Sequence("x", "x", list(PROMPT), dataclasses.replace(SAMPLED, seed=99), "theirs", 3)
    seq.tenant = "they"
    handed.go_on_as(seq)
    assert (handed.namespace, handed.tenant, handed.priority) == ("theirs", "they", 3)
    assert handed.params == SAMPLED  # with its seed
    seq.adapter_name = "other"
    with pytest.raises(ValueError, match="import_request: adapter: expected those"):
        handed.go_on_as(seq)


def test_a_request_that_there_is_not(pair):
    with pytest.raises(ValueError, match="export_request: expected a request that runs or waits"):
        pair[0].export_request("nobody")
    name = submit(pair[0], SAMPLED)
    told = Told().run(pair[0])
    assert told.reason is FinishReason.LENGTH
    with pytest.raises(ValueError, match="got '" + name):
        pair[0].export_request(name)
