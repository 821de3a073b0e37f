"""Speculative decoding: the same output as without drafts, in fewer steps."""

import collections
import dataclasses

import jax
import numpy as np
import pytest

from helpers.paths import EXAMPLES
from helpers.serve.small_engine import FixedDrafts

pytest.importorskip("llguidance", reason="needs the extra `serve`")

from jax_attn import models
from jax_attn.serve._engine import speculation
from jax_attn.serve._engine.draft_model import ModelDrafter
from jax_attn.serve._engine.engine import Engine
from jax_attn.serve._engine.engine_config import EngineConfig
from jax_attn.serve._grammar import grammar
from jax_attn.serve._scheduling import drafts
from jax_attn.serve._scheduling.drafts import NgramDrafter
from jax_attn.serve._scheduling.request import FinishReason, SamplingParams, Sequence

CONFIG = EngineConfig(
    num_pages=120, page_size=4, max_running=8, max_step_tokens=32, batch_invariant=True
)
REPEATED = "def add(a, b):\n    return a + b\n\n\n" * 6
TEXT = (EXAMPLES / "prompts" / "ast.py.txt").read_text("utf-8")


@pytest.fixture(scope="module")
def model(whole_model):
    """A shallow model does not see that a text repeats."""
    return whole_model


@pytest.fixture(scope="module")
def device(model):
    engine = Engine(model, dataclasses.replace(CONFIG, max_drafts=7))
    engine.warm_up()
    return engine.device


@pytest.fixture(scope="module")
def smaller(model):
    """Draft models by name.

    The model itself, one with nearly its weights, noise, and the model again for short texts only.
    """
    key, std = jax.random.key(1), 0.15
    near = jax.tree.map(
        lambda w: w * (1 + std * jax.random.normal(key, w.shape, w.dtype)), model.params
    )
    config = dataclasses.replace(model.config, layers=model.config.layers[:1])
    noise = models.random_params(config, key, "float32")
    short = dataclasses.replace(model.config, max_positions=90)
    return {
        "itself": model,
        "near": model._replace(params=near),
        "noise": model._replace(config=config, params=noise),
        "short": model._replace(config=short),
    }


@pytest.fixture(scope="module")
def draft_device(model, smaller):
    """The compiled device of a draft model. Its pages keep their previous contents."""
    devices = {}

    def device(name):
        if name not in devices:
            config = dataclasses.replace(CONFIG, max_drafts=1)
            engine = Engine(model, config, draft_model=smaller[name])
            devices[name] = engine.draft_model.device
            devices[name].warm_up()
        return devices[name]

    return device


@pytest.fixture
def run(model, device, smaller, draft_device):
    """Runs sequences, given as prompts and parameters, on an engine with that many drafts."""

    def run(max_drafts, *requests, each_step=None, draft=None, predicted=(), **changes):
        config = dataclasses.replace(CONFIG, max_drafts=max_drafts, **changes)
        engine = Engine(model, config, draft_model=smaller.get(draft))
        engine.device = device
        if draft is not None:
            engine.draft_model.device = draft_device(draft)
        params = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
        seqs = [
            Sequence(f"s{i}", f"s{i}", list(prompt), SamplingParams(**params | more))
            for i, (prompt, more) in enumerate(requests)
        ]
        for seq in seqs:
            seq.predicted = list(predicted)
        engine.submit(seqs)
        events = collections.defaultdict(list)
        while engine.has_work:
            for event in engine.step():
                events[event.seq_id].append(event)
            engine.scheduler.check_integrity()
            if each_step is not None:
                each_step(engine, seqs)
        assert engine.stats()["pages_used"] == 0
        return engine, [told(seq, events[seq.id]) for seq in seqs]

    return run


def told(seq, events):
    tokens = [token for event in events for token in event.tokens]
    assert tokens == seq.tokens[seq.num_prompt :]
    logprobs = [entry for event in events for entry in event.logprobs or ()]
    text = "".join(event.text for event in events)
    return tokens, text, logprobs, events[-1].finish_reason, events[-1].error


@pytest.fixture(scope="module")
def repeated(model):
    return [0, *model.tokenizer.encode(REPEATED).ids]


@pytest.fixture(scope="module")
def text(model):
    return [0, *model.tokenizer.encode(TEXT).ids[:60]]


def requests(repeated, text):
    """Requests one at a time and mixed, with every feature that supports drafts or does not."""
    lark = grammar.from_lark('start: ("def add(a, b):\\n    return a + b\\n\\n\\n")+')
    return [
        (repeated, {}),
        (repeated, {"temperature": 1.0, "seed": 5}),
        (text, {"temperature": 0.7, "top_p": 0.9, "top_k": 30, "seed": 1}),
        (repeated, {"logprobs": 3}),
        (repeated[:-7], {"stop": ("return a + b\n\n\ndef",)}),
        (repeated, {"min_tokens": 20, "ignore_eos": False}),
        (repeated, {"max_tokens": 1}),
        (repeated, {"max_tokens": 2}),
        (repeated, {"presence_penalty": 0.5, "frequency_penalty": 0.5}),
        (repeated, {"repetition_penalty": 1.1, "temperature": 0.3, "logprobs": 1}),
        (repeated, {"logit_bias": ((300, 2.0),)}),
        (repeated, {"grammar": lark, "ignore_eos": False}),
        (text, {"prompt_logprobs": True, "logprobs": 1}),
        ([5], {}),
    ]


@pytest.mark.parametrize(
    ("draft", "least", "most"),
    [("itself", 0.99, 1.0), ("near", 0.2, 0.9), ("noise", 0.0, 0.05), ("short", 0.99, 1.0)],
)
def test_a_draft_model_leaves_the_output_as_it_is(run, repeated, text, draft, least, most):
    """A draft model's quality decides how many drafts are right, for sampled and greedy output."""
    batch = requests(repeated, text)
    _, expected = run(0, *batch)
    engine, got = run(4, *batch, draft=draft)
    assert got == expected
    stats = engine.stats()
    assert stats["draft_tokens"] > (5 if draft == "noise" else 30)
    assert least <= stats["draft_tokens_taken"] / stats["draft_tokens"] <= most
    assert stats["step_seconds"]["draft"] > 0


# How many drafts are right at least, by the index in `requests`.
LEAST_TAKEN = (20, 20, 0, 20, 6, 8, 0, 0, 20, 20, 20, 0, 1, 20)


@pytest.mark.parametrize("which", range(len(LEAST_TAKEN)))
def test_the_output_is_what_it_is_without(run, repeated, text, which):
    """Token by token, greedy or sampled: a sample depends only on its seed and position."""
    request = requests(repeated, text)[which]
    plain, expected = run(0, request)
    engine, got = run(7, request)
    assert got == expected
    assert plain.stats()["draft_tokens"] == 0
    assert engine.stats()["draft_tokens_taken"] >= LEAST_TAKEN[which]
    if LEAST_TAKEN[which]:  # without drafts that are right, a late mask may cost steps
        assert plain.stats()["steps"] - engine.stats()["steps"] >= LEAST_TAKEN[which] // 2


def test_the_output_of_a_batch_is_what_it_is_without(run, repeated, text):
    batch = requests(repeated, text)
    assert len(batch) == len(LEAST_TAKEN)
    plain, expected = run(0, *batch)
    engine, got = run(7, *batch)
    assert got == expected
    assert plain.stats()["draft_tokens"] == 0
    assert engine.stats()["draft_tokens_taken"] > 20


@pytest.mark.parametrize("right", [True, False])
def test_penalties_count_the_drafts_that_were_right(run, repeated, monkeypatch, right):
    """Penalties count accepted tokens before a sample, and no refused drafts."""
    request = repeated, {"frequency_penalty": 1.2, "repetition_penalty": 1.3, "logprobs": 1}
    _, expected = run(0, request)
    tokens = expected[0][0]
    drafts = tokens if right else [7 if i % 3 == 2 else t for i, t in enumerate(tokens)]
    monkeypatch.setattr(speculation, "NgramDrafter", lambda most: FixedDrafts(drafts))
    engine, got = run(4, request)
    assert got == expected
    stats = engine.stats()
    num_refused = stats["draft_tokens"] - stats["draft_tokens_taken"]
    assert stats["draft_tokens_taken"] > 15 and (num_refused == 0 if right else num_refused > 10)


GRAMMARS = {
    "any text": "start: /(.|\\n)*/",
    "few letters": "start: /[a-f ():+,\\n]*/",
    "forced": 'start: ("def add(a, b):\\n    return " ("a" | "b" | "c + ") "+ b\\n\\n\\n")+',
    "short": 'start: ("def add(a" | "def add(a, b):" | "def sub(a, b):\\n") /[a-z ]{4}/',
}


@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize("draft", [None, "itself"])
@pytest.mark.parametrize("jumps", [False, True])
def test_grammars_with_drafts(run, repeated, draft, jumps, name):
    """Masks are known after each draft; if a token is forced, it comes without a draft."""
    params = {"grammar": grammar.from_lark(GRAMMARS[name]), "ignore_eos": False}
    batch = [
        (repeated, params | {"temperature": t, "seed": seed, **more})
        for t, seed, more in ((0, 0, {}), (0.7, 1, {}), (0.3, 2, {"frequency_penalty": 0.1}))
    ]
    _, expected = run(0, *batch, jump_forward=jumps)
    engine, got = run(4, *batch, jump_forward=jumps, draft=draft)
    assert got == expected
    least = {"any text": 20, "few letters": 10}
    if not jumps:
        least |= {"forced": 20, "short": 1}
    assert engine.stats()["draft_tokens_taken"] >= least.get(name, 0)


def test_repeated_text_takes_few_steps(run, repeated):
    engine, _ = run(7, (repeated, {"max_tokens": 80}))
    stats = engine.stats()
    assert stats["steps"] < 80 / 3 and stats["draft_tokens_taken"] > 50
    assert stats["generated_tokens"] == 80


def test_text_without_repetition_is_let_alone(run, text):
    """Drafts stop after some were refused."""
    engine, _ = run(7, (text, {"max_tokens": 200, "temperature": 1.5}))
    assert engine.stats()["draft_tokens"] <= 40 and engine.stats()["steps"] > 190


@pytest.mark.parametrize(("draft", "n"), [(None, 100), (None, 400), ("near", 400)])
def test_sampled_output_is_distributed_as_without(run, model, monkeypatch, draft, n):
    """Three tokens, of which the drafts propose the likeliest, against the model's own odds.

    Suppose wrong drafts were taken, or right ones refused and sampled again. Then the first and the
    second token would not have the model's distribution: 9 cells, n samples.
    """
    prompt = [0, *model.tokenizer.encode("def main(self").ids[:3]]  # four are read in one step

    def odds(tokens):
        """Probabilities of the three likeliest next tokens."""
        logits = models.reference_forward(model.params, model.config, np.array(tokens))[-1]
        top = np.argsort(logits)[::-1][:3]
        return top.tolist(), np.asarray(jax.nn.softmax(logits[top])).tolist()

    first, p_first = odds(prompt)
    expected = {}
    for a, p in zip(first, p_first, strict=True):
        for b, q in zip(*odds([*prompt, a]), strict=True):
            expected[a, b] = p * q
    likeliest = max(expected, key=expected.get)
    monkeypatch.setattr(speculation, "NgramDrafter", lambda most: FixedDrafts([*likeliest, 7, 7]))
    counts = dict.fromkeys(expected, 0)
    num_taken = 0
    for begin in range(0, n, 4):  # four sequences leave rows for drafts
        params = {"max_tokens": 4, "temperature": 1.0, "top_k": 3}
        batch = ((prompt, params | {"seed": begin + i}) for i in range(4))
        engine, got = run(7, *batch, draft=draft)
        num_taken += engine.stats()["draft_tokens_taken"]
        for tokens, *_ in got:
            counts[tuple(tokens[:2])] += 1
    assert num_taken > n / 20
    chi_square = sum((counts[c] - n * p) ** 2 / (n * p) for c, p in expected.items())
    assert chi_square < 26.1, (counts, expected)  # 8 degrees of freedom, one in a thousand


def test_refused_drafts_are_not_in_the_cache(run, repeated, monkeypatch):
    """A request with the same prefix as the first continues as without drafts: no tokens, no kv."""
    monkeypatch.setattr(speculation, "NgramDrafter", lambda most: FixedDrafts([7] * 99))
    _, expected = run(0, (repeated, {}))
    longer = [*repeated, *expected[0][0]]
    engine, got = run(7, (repeated, {}))
    stats = engine.stats()
    assert stats["draft_tokens"] > 50 and stats["draft_tokens_taken"] == 0
    assert got == expected
    cached = engine.scheduler.cache
    key = np.array(longer, np.int32).tobytes()
    page = 4 * CONFIG.page_size
    num_pages = cached.peek("", key[: len(key) // page * page])
    assert num_pages == cached.num_cached == (len(longer) - 1) // CONFIG.page_size
    again = Sequence("again", "again", list(longer), SamplingParams(max_tokens=8, temperature=0))
    engine.submit([again])
    while engine.has_work:
        engine.step()
    assert again.num_cached > len(repeated)
    _, fresh = run(0, (longer, {"max_tokens": 8, "ignore_eos": False}))
    assert again.tokens[len(longer) :] == fresh[0][0]


def test_drafts_of_the_preempted_and_the_aborted(run, repeated):
    """Pages run out while drafts are in flight; then a client leaves."""
    batch = [(repeated, {"seed": i, "temperature": 0.5}) for i in range(6)]
    _, expected = run(0, *batch)
    preempted, got = run(7, *batch, num_pages=CONFIG.num_pages // 2)
    assert got == expected and preempted.stats()["draft_tokens_taken"] > 0
    assert preempted.stats()["preemptions"] > 0

    gone = []

    def abort(engine, seqs):
        for i, seq in enumerate(seqs):
            if seq.is_drafting and not gone:
                gone.append(i)
                engine.abort(seq.id)

    _, got = run(7, *batch, each_step=abort)
    for i, (answer, whole) in enumerate(zip(got, expected, strict=True)):
        assert answer == whole if i not in gone else answer[3] == FinishReason.ABORT
    assert gone


def test_a_failed_step_leaves_no_drafts(run, model, repeated, monkeypatch):
    failed = []

    def fail(engine, seqs):
        if not failed and seqs[0].is_drafting:
            failed.append(engine.recover("broken"))

    _, got = run(7, (repeated, {}), each_step=fail)
    assert failed and failed[0][0].error == "broken"


# ---- a draft model -----------------------------------------------------------------------------


@pytest.mark.parametrize("together", [True, False])
def test_a_draft_model_reads_what_it_lacks(run, text, together):
    """Prompts of several chunks that share prefixes, in pages that other requests had."""
    prompts = [text, text[:40] + text[20:], text[30:] * 3, text]
    batches = [prompts] if together else [[prompt] for prompt in prompts * 2]
    pages = {} if together else {"num_pages": 60}
    for batch in batches:
        each = ((prompt, {"max_tokens": 20}) for prompt in batch)
        engine, _ = run(4, *each, draft="itself", **pages)
        stats = engine.stats()
        assert stats["draft_tokens_taken"] == stats["draft_tokens"] > 5


def test_a_draft_model_has_what_it_read_for_others(run, text):
    engine, _ = run(4, (text, {"max_tokens": 20}), draft="itself")
    begins = []

    def propose(self, seq, most):
        drafts = original(self, seq, most)
        begins.append(self.num_read)
        return drafts

    original = ModelDrafter.propose
    again = Sequence("again", "again", list(text), SamplingParams(max_tokens=8, temperature=0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelDrafter, "propose", propose)
        engine.submit([again])
        while engine.has_work:
            engine.step()
    assert again.num_cached > 40
    assert begins[0] == again.num_cached


def test_pages_that_are_overwritten_are_read_again(run, text):
    """The pool is as large as one sequence: each has the pages of the one before."""
    engine, _ = run(4, (text, {"max_tokens": 20}), draft="itself", num_pages=24)
    for i in range(4):
        before = engine.stats()
        other = Sequence(
            f"{i}", f"{i}", [0, *text[i + 2 :]], SamplingParams(max_tokens=20, ignore_eos=True)
        )
        engine.submit([other])
        while engine.has_work:
            engine.step()
        made, taken = (
            engine.stats()[name] - before[name] for name in ("draft_tokens", "draft_tokens_taken")
        )
        assert made == taken > 5


def test_the_pages_of_drafts_and_of_the_preempted(run, repeated):
    batch = [(repeated, {"seed": i, "temperature": 0.5}) for i in range(6)]
    _, expected = run(0, *batch)
    engine, got = run(4, *batch, draft="itself", num_pages=CONFIG.num_pages // 2)
    stats = engine.stats()
    assert got == expected and stats["preemptions"] > 0
    assert stats["draft_tokens_taken"] == stats["draft_tokens"] > 0


def test_a_failed_step_leaves_nothing_of_a_draft_model(run, repeated):
    failed = []

    def fail(engine, seqs):
        if not failed and seqs[0].is_drafting:
            failed.append(engine.recover("broken"))
            again = Sequence(
                "again", "again", list(repeated), SamplingParams(max_tokens=30, temperature=0)
            )
            engine.submit([again])

    engine, _ = run(4, (repeated, {}), draft="itself", each_step=fail)
    stats = engine.stats()
    assert failed and stats["draft_tokens_taken"] == stats["draft_tokens"] > 5


def test_a_warm_engine_knows_what_a_draft_costs(model, smaller, text):
    config = dataclasses.replace(CONFIG, max_drafts=4, max_running=2, batch_invariant=False)
    engine = Engine(model, config, draft_model=smaller["noise"])
    names = engine.warm_up()
    assert any(name.startswith("drafts: forward") for name in names)
    assert 0 < engine.draft_model.cost < 3
    seq = Sequence("s", "s", list(text), SamplingParams(max_tokens=20, ignore_eos=True))
    engine.submit([seq])
    while engine.has_work:
        engine.step()
    stats = engine.stats()
    assert stats["draft_tokens"] > 0 and stats["compilations"] == 0
    (held,) = stats["device_bytes"].values()
    assert held > sum(engine.device.bytes_held().values())


def test_draft_models_that_are_refused(model, directory):
    from tokenizers import Tokenizer

    with pytest.raises(ValueError, match="max_drafts: expected at least 1 with a draft model"):
        Engine(model, CONFIG, draft_model=model)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_tokens(["another"])
    config = dataclasses.replace(CONFIG, max_drafts=4)
    with pytest.raises(ValueError, match="expected the tokens of the model, got others"):
        Engine(model, config, draft_model=model._replace(tokenizer=tokenizer))


# ---- guesses -----------------------------------------------------------------------------------


def sequence(tokens, in_flight=0):
    seq = Sequence("s", "s", list(tokens), SamplingParams(max_tokens=100))
    seq.num_in_flight = in_flight
    return seq


@pytest.mark.parametrize(
    ("tokens", "in_flight", "most", "expected"),
    [
        ([1, 2, 3, 4, 5, 1, 2, 3], 0, 3, [4, 5, 1]),
        ([1, 2, 3, 4, 5, 1, 2, 3], 1, 3, [5, 1, 2]),  # after the token in flight
        ([1, 2, 3, 4, 5, 1, 2, 3], 0, 4, [4, 5, 1, 2]),
        ([9, 9, 9], 0, 4, [9, 9, 9, 9]),  # continues as it began
        ([1, 2, 1, 2], 0, 4, [1, 2, 1, 2]),
        ([1, 2, 3, 8, 2, 3, 9, 1, 2, 3], 0, 1, [8]),  # the longest earlier match
        ([2, 3, 8, 2, 3, 9, 2, 3], 0, 1, [9]),  # the last of them
        ([1, 2, 3, 4], 0, 4, []),
        ([1, 2], 0, 4, []),
        ([7], 0, 4, []),
        # The same bytes, but across the borders of tokens.
        ([0x00000100, 0x00000100, 5, 1, 1 << 24], 0, 4, []),
    ],
)
def test_what_followed_before_is_proposed(tokens, in_flight, most, expected):
    assert NgramDrafter(15).propose(sequence(tokens, in_flight), most) == expected


def predicting(output, in_flight=0):
    """A sequence of which the client predicts tokens 10 to 29."""
    seq = sequence([1, 2, 3], 0)
    seq.predicted = list(range(10, 30))
    seq.tokens += output
    seq.num_in_flight = in_flight
    return seq


@pytest.mark.parametrize(
    ("output", "in_flight", "expected"),
    [
        ([], 0, [10, 11, 12, 13]),
        ([], 1, [11, 12, 13, 14]),
        ([10, 11], 1, [13, 14, 15, 16]),
        ([10, 11, 99], 0, []),  # the first change
        ([10, 11, 99, 15, 16], 0, [17, 18, 19, 20]),  # and behind it
        (list(range(10, 28)), 0, [28, 29]),
        (list(range(10, 30)), 0, []),
        ([2, 3], 0, [2, 3, 2, 3]),  # not predicted: as it was before in the text
    ],
)
def test_what_is_predicted_is_proposed(output, in_flight, expected):
    assert NgramDrafter(8).propose(predicting(output, in_flight), 4) == expected


def test_a_prediction_goes_on_from_where_it_was():
    """The match that follows the last one counts, where there are two."""
    seq = predicting([])
    seq.predicted = [5, 6, 7, 8, 5, 6, 9, 10, 11]
    drafter = NgramDrafter(8)
    assert drafter.propose(seq, 2) == [5, 6]
    seq.tokens += [99, 5, 6]
    assert drafter.propose(seq, 1) == [7]
    seq.tokens += [7, 98, 5, 6]
    assert drafter.propose(seq, 2) == [9, 10]


def test_a_right_prediction_takes_few_steps(run, text):
    engine, (plain,) = run(7, (text, {}))

    steps = engine.stats()["steps"]
    engine, (predicted,) = run(7, (text, {}), predicted=plain[0])
    assert predicted == plain
    assert engine.stats()["steps"] < steps / 2


def test_the_number_of_drafts_follows_what_is_taken():
    pace, sizes = drafts.Pace(15), []
    for num_taken in (4, 8, 15, 3, 0):
        sizes.append(pace.next(99))
        pace.settle(sizes[-1], num_taken)
    assert sizes == [4, 8, 15, 15, 4]


def rests(pace, num_taken, n):
    """Steps without drafts before each of the next n steps with some."""
    found = []
    for _ in range(n):
        rest = 0
        while not (num := pace.next(99)):
            rest += 1
        pace.settle(num, min(num, num_taken))
        found.append(rest)
    return found


def test_drafts_that_do_not_pay_become_rare():
    """Drafts become frequent again soon after they pay."""
    pace = drafts.Pace(15)
    assert rests(pace, 0, 8) == [0, 10, 10, 10, 16, 32, 64, 64]
    assert rests(pace, 15, 4) == [64, 0, 0, 0]
    # The end of a quotation is noticed after a few steps. The rests begin shorter again.
    assert rests(pace, 15, 4) == [0, 0, 0, 0]
    assert rests(pace, 0, 7) == [0, 0, 0, 0, 16, 32, 64]
    # One right draft of three, now and then, gains less than the waiting costs.
    seldom = drafts.Pace(15)
    num_drafts = num_steps = 0
    for i in range(200):
        num = 0
        while not num:
            num = seldom.next(99)
            num_steps += 1
        seldom.settle(num, i % 4 == 0)
        num_drafts += 1
    assert num_drafts / num_steps < 0.1


@pytest.mark.parametrize("cost", [0.0, 0.2, 1.0])
def test_drafts_in_vain_are_three_hundredths_of_the_time(cost):
    """The cost of a try, spread over the wait after it, from the second try on."""
    pace, num_steps, lost = drafts.Pace(4, cost), 0, 0.0
    while num_steps < 2000:
        num_steps += 1
        if num := pace.next(99):
            pace.settle(num, 0)
            lost += (0.3 + cost * num) * (num_steps > 1)
        assert lost <= 0.031 * num_steps + 0.3


def test_drafts_of_a_model_cost_what_it_takes():
    assert set(rests(drafts.Pace(4, cost=0.2), 2, 20)) == {0}
    assert rests(drafts.Pace(4, cost=0.9), 1, 8)[-1] == 64


def test_where_others_lose_by_drafts_one_begins_without(run, text):
    engine, _ = run(4, *((text, {"seed": i, "temperature": 1.0}) for i in range(3)), draft="noise")
    assert engine.draft_model.gain < 0
    seq = Sequence("more", "more", list(text), SamplingParams(max_tokens=30, ignore_eos=True))
    before = engine.stats()["draft_tokens"]
    engine.submit([seq])
    while engine.has_work:
        engine.step()
    assert engine.stats()["draft_tokens"] == before and seq.drafter.num_read == 0
    # It tries before long, and goes on once drafts pay.
    assert rests(drafts.Pace(4, expected=-0.1), 4, 4) == [32, 0, 0, 0]


def test_a_long_text_is_not_searched_from_its_beginning(monkeypatch):
    monkeypatch.setattr(drafts, "_LOOKBACK", 100)
    middle = list(range(1000, 1095))
    for distance, found in ((95, True), (101, False)):
        tokens = [1, 2, 3, *middle, *range(2000, 2000 + distance - 95), 1, 2, 3]
        assert bool(NgramDrafter(15).propose(sequence(tokens), 4)) == found
