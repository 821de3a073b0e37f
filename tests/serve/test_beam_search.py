"""Beam search: texts found beside all texts there are, and requests with use_beam_search."""

import dataclasses
import itertools
import json
import math
import random

import numpy as np
import pytest

pytest.importorskip("starlette", reason="needs the extra `serve`")

from helpers.paths import DATA
from helpers.serve.live_server import eventually, serving
from helpers.serve.small_engine import CONFIG
from jax_attn.serve._engine.async_engine import AsyncEngine
from jax_attn.serve._scheduling.beam_search import BeamSearch
from jax_attn.serve._scheduling.events import TokenEvent, TokenLogprob
from jax_attn.serve._scheduling.request import FinishReason, SamplingParams, Sequence

CASES = json.loads((DATA / "beams.json").read_text())
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BEAMS = {"prompt": "import os", "use_beam_search": True, "n": 3, "max_tokens": 5}
PROMPT = [5, 6]


def searched(search, logprobs_of, width, limit=100):
    """Runs a search on a model that is a function from tokens to the logprobs of the next."""
    for _ in range(limit):
        if search.is_done:
            return
        events = []
        assert len(search.sequences()) <= width
        for seq in search.sequences():
            offers = logprobs_of(tuple(seq.tokens))
            top = sorted(enumerate(offers), key=lambda each: -each[1])[: seq.params.logprobs]
            events.append(TokenEvent(seq.id, [0], logprobs=[TokenLogprob(0, 0.0, tuple(top))]))
        search.take(events)
    raise AssertionError("the search has no end")


def outputs(search, width, **params):
    seqs = [Sequence(str(i), "", PROMPT, SamplingParams(**params)) for i in range(width)]
    return search.events(seqs, lambda seq, tokens: "")


@pytest.mark.parametrize("penalty", [-1.0, 0.0, 0.7, 2.0])
@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_with_beams_for_all_prefixes_the_best_of_all_texts_are_found(penalty, max_tokens):
    """Three tokens, of which 2 ends a text: at most four beams that go on at a time."""
    for seed in range(20):
        table = random.Random(seed)
        logits = {
            (*PROMPT, *begin): [table.gauss(0, 3) for _ in range(3)]
            for length in range(max_tokens)
            for begin in itertools.product((0, 1), repeat=length)
        }

        def logprobs_of(tokens, logits=logits):
            whole = math.log(sum(map(math.exp, logits[tokens])))
            return [logit - whole for logit in logits[tokens]]

        every = {}
        for length in range(1, max_tokens + 1):
            for begin in itertools.product((0, 1), repeat=length - 1):
                for last in (2,) if length < max_tokens else (0, 1, 2):
                    tokens, total = (*begin, last), 0.0
                    for i, token in enumerate(tokens):
                        total += logprobs_of((*PROMPT, *tokens[:i]))[token]
                    every[tokens] = total / length**penalty
        best = sorted(every, key=every.get, reverse=True)[:10]
        prompt = Sequence("p", "", PROMPT, SamplingParams(max_tokens=max_tokens))
        search = BeamSearch(prompt, 10, penalty, (2,))
        searched(search, logprobs_of, 10)
        found = outputs(search, len(best), max_tokens=max_tokens, logprobs=2)
        assert [tuple(event.tokens) for event in found] == best
        for event in found:
            assert len(event.logprobs[0].top) == 2
            total = sum(each.logprob for each in event.logprobs)
            assert total / len(event.tokens) ** penalty == pytest.approx(every[tuple(event.tokens)])
            ended = event.tokens[-1] == 2
            assert event.finish_reason == (FinishReason.STOP if ended else FinishReason.LENGTH)


@pytest.mark.parametrize("penalty", [0.0, -1.0])
def test_the_search_ends_when_nothing_can_change(penalty):
    """Beams that go on lose against the finished texts after two steps, not after 50."""
    steps = []

    def logprobs_of(tokens):
        steps.append(tokens)
        return [math.log(p) for p in (0.3, 0.3, 0.4)]

    prompt = Sequence("p", "", PROMPT, SamplingParams(max_tokens=50))
    search = BeamSearch(prompt, 2, penalty, (2,))
    searched(search, logprobs_of, 2)
    assert max(map(len, steps)) == len(PROMPT) + 1
    assert [event.tokens for event in outputs(search, 2, max_tokens=50)] == [[2], [0, 2]]
    patient = BeamSearch(prompt, 2, 3.0, (2,))  # long texts may still win
    searched(patient, logprobs_of, 2)
    assert max(map(len, steps)) > len(PROMPT) + 1


def test_a_step_that_fails_ends_the_search_with_its_texts():
    prompt = Sequence("p", "", PROMPT, SamplingParams(max_tokens=9))
    search = BeamSearch(prompt, 2, 1.0, ())
    (seq,) = search.sequences()
    offer = TokenLogprob(0, 0.0, ((7, -0.1), (8, -0.2)))
    search.take([TokenEvent(seq.id, [0], logprobs=[offer], num_cached_tokens=1, admitted=2.0)])
    first, second = search.sequences()
    assert (first.tokens, second.tokens) == ([5, 6, 7], [5, 6, 8])
    search.take(
        [
            TokenEvent(first.id, [0], logprobs=[offer]),
            TokenEvent(second.id, finish_reason=FinishReason.ERROR, error="No room."),
        ]
    )
    assert search.is_done
    found = outputs(search, 3, max_tokens=9)
    assert [event.tokens for event in found] == [[7], [8], []]
    assert {event.error for event in found} == {"No room."}
    assert (found[0].num_cached_tokens, found[0].admitted) == (1, 2.0)


# ---- requests ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(whole_model):
    config = dataclasses.replace(CONFIG, max_waiting=4)  # less than beams
    engine = AsyncEngine(whole_model, config)
    with serving(engine, model=whole_model) as server:
        eventually(lambda: server.get("/health").ok)
        yield server


@pytest.mark.parametrize("case", range(len(CASES)))
def test_choices_are_what_transformers_finds(server, tokenizer, case):
    case = CASES[case]
    answer = server.post(
        COMPLETIONS,
        {
            "prompt": case["prompt"],
            "use_beam_search": True,
            "n": case["width"],
            "max_tokens": case["max_tokens"],
            "length_penalty": case["length_penalty"],
            "stop_token_ids": case["stop_token_ids"],
            "return_token_ids": True,
            "logprobs": 1,
        },
    ).json
    choices = answer["choices"]
    assert [choice["token_ids"] for choice in choices] == case["tokens"]
    scores = []
    for choice, tokens in zip(choices, case["tokens"], strict=True):
        logprobs = choice["logprobs"]["token_logprobs"]
        scores.append(sum(logprobs) / len(tokens) ** case["length_penalty"])
        is_stop = tokens[-1] in case["stop_token_ids"]
        assert choice["finish_reason"] == ("stop" if is_stop else "length")
        shown = tokens[:-1] if is_stop else tokens
        assert choice["text"] == tokenizer.decode(shown)
    if case["scores"] is not None:
        np.testing.assert_allclose(scores, case["scores"], atol=3e-4)
    assert answer["usage"]["completion_tokens"] == sum(map(len, case["tokens"]))


def test_a_chat_has_texts_too_and_each_prompt_its_own(server):
    body = {key: value for key, value in BEAMS.items() if key != "prompt"}
    chat = server.post(CHAT, body | {"messages": [{"role": "user", "content": "import os"}]})
    assert len({choice["message"]["content"] for choice in chat.json["choices"]}) == 3
    both = server.post(COMPLETIONS, BEAMS | {"prompt": ["import os", "def f("]}).json["choices"]
    assert [choice["index"] for choice in both] == [0, 1, 2, 3, 4, 5]
    for i, prompt in enumerate(["import os", "def f("]):
        alone = server.post(COMPLETIONS, BEAMS | {"prompt": prompt}).json["choices"]
        assert [c["text"] for c in alone] == [c["text"] for c in both[3 * i : 3 * i + 3]]


@pytest.mark.parametrize(
    ("path", "change", "field"),
    [
        (COMPLETIONS, {"stream": True}, "stream"),
        (COMPLETIONS, {"n": 11}, "n"),
        (COMPLETIONS, {"best_of": 4}, "best_of"),
        (COMPLETIONS, {"echo": True}, "echo"),
        (COMPLETIONS, {"max_tokens": 0}, "max_tokens"),
        (COMPLETIONS, {"temperature": 0.7}, "temperature"),
        (COMPLETIONS, {"top_p": 0.9}, "top_p"),
        (COMPLETIONS, {"presence_penalty": 1}, "presence_penalty"),
        (COMPLETIONS, {"min_tokens": 2}, "min_tokens"),
        (COMPLETIONS, {"stop": "x"}, "stop"),
        (COMPLETIONS, {"stop": ["x"]}, "stop"),
        (COMPLETIONS, {"logit_bias": {"5": 1}}, "logit_bias"),
        (COMPLETIONS, {"prompt_logprobs": 0}, "prompt_logprobs"),
        (COMPLETIONS, {"regex": "a+"}, "regex"),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
        (COMPLETIONS, {"use_beam_search": False, "length_penalty": 0.5}, "length_penalty"),
    ],
)
def test_what_beams_do_not_honour_is_refused(server, path, change, field):
    body: dict = dict(BEAMS)
    if path == CHAT:
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    answer = server.post(path, body | change)
    assert answer.status == 400 and answer.error["param"] == field
    assert "use_beam_search" in answer.error["message"]


def test_neutral_values_are_no_wish(server):
    neutral = {"temperature": 0, "top_p": 1, "top_k": -1, "stop": [], "logit_bias": {}, "seed": 1}
    plain = server.post(COMPLETIONS, BEAMS).json["choices"]
    assert server.post(COMPLETIONS, BEAMS | neutral).json["choices"] == plain
