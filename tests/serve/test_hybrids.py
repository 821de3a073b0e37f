"""The engine on models with recurrent layers: states in chunks, from checkpoints, after preemption.

Every answer is compared with the reference, token by token, on the whole text.
"""

import dataclasses
import re

import jax
import numpy as np
import pytest

pytest.importorskip("llguidance", reason="needs the extra `serve`")

from helpers import model_cases
from helpers.serve.small_engine import FixedDrafts
from jax_attn import models
from jax_attn.serve._engine import constrained_decoding, speculation
from jax_attn.serve._engine.engine import Engine
from jax_attn.serve._engine.engine_config import EngineConfig
from jax_attn.serve._engine.file_store import FileStore
from jax_attn.serve._engine.hand_over import HandedOver
from jax_attn.serve._grammar import grammar
from jax_attn.serve._scheduling.request import SamplingParams, Sequence

LIMITS = EngineConfig(
    num_pages=30, page_size=4, max_running=3, max_step_tokens=16, num_states=12, checkpoint_tokens=8
)
LONGEST = 64
STEM = [5, 9, 200, 31, 7, 7, 12, 90, 4, 300, 8, 21, 63, 2, 2, 150, 77]


@pytest.fixture(scope="module")
def model():
    tokenizer = models.load(models.BUNDLED, "float32").tokenizer
    sizes = {"vocab_size": tokenizer.get_vocab_size(), "eos_token_id": 0}
    config = models.parse_config(model_cases.CONFIGS["qwen3.5"] | sizes)
    params = models.random_params(config, jax.random.key(0), "float32")
    return models.Model(config, params, tokenizer)


@pytest.fixture(scope="module")
def warm(model):
    engine = Engine(model, LIMITS)
    engine.warm_up()
    return engine


@pytest.fixture
def engine(warm):
    """With an empty cache and states of NaN: nobody may read what nobody wrote."""
    cache = warm.scheduler.cache
    cache.clear()
    warm.device._states = jax.tree.map(lambda x: x * np.nan, warm.device._states)
    return warm


@pytest.fixture(scope="module")
def drafting(model):
    engine = Engine(model, dataclasses.replace(LIMITS, max_drafts=4))
    engine.warm_up()
    return engine


@pytest.fixture(scope="module")
def reference(model):
    forward = jax.jit(
        lambda tokens: models.reference_forward(model.params, model.config, tokens),
        compiler_options={"xla_backend_optimization_level": 0},
    )

    def best(tokens):
        padded = np.zeros(LONGEST, np.int32)
        padded[: len(tokens)] = tokens
        return np.argmax(forward(padded), -1)

    return best


def run(engine, reference, *prompts, num_tokens=6, **params) -> list[Sequence]:
    """Runs requests together. The answers must be those of the reference."""
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True, **params)
    seqs = [Sequence(str(i), str(i), list(x), sampling) for i, x in enumerate(prompts)]
    engine.submit(seqs)
    while engine.has_work:
        engine.step()
        engine.scheduler.check_integrity()
    for seq in seqs:
        assert seq.num_output == num_tokens
        best = reference(seq.tokens)[seq.num_prompt - 1 :][:num_tokens]
        assert best.tolist() == seq.tokens[seq.num_prompt :]
    return seqs


def test_prompts_in_chunks(engine, reference):
    run(engine, reference, [*STEM, *STEM, 3], STEM[::-1], [77])


def test_a_cached_prefix_goes_on_from_its_state(engine, reference):
    (first,) = run(engine, reference, [*STEM, 1, 1, 1])
    second, third = run(engine, reference, [*STEM, 2, 2], [*STEM, 1, 1, 4])
    assert engine.stats()["states"] == {"free": 7, "cached": 5, "used": 0}
    # Checkpoints of the first: after 8 and 16 tokens; of an answer, after 24.
    assert [seq.num_cached for seq in (first, second, third)] == [0, 16, 16]


def test_requests_that_come_together_share_the_state_where_they_part(engine, reference):
    seqs = run(engine, reference, *([*STEM[:13], i, *[i + 1] * 7] for i in (1, 2, 3)))
    assert [seq.num_cached for seq in seqs] == [0, 12, 12]


def test_the_same_request_several_times(engine, reference):
    assert [seq.num_cached for seq in run(engine, reference, *[STEM] * 5)] == [0, 16, 16, 16, 16]


def test_the_next_turn_of_a_chat(engine, reference):
    (first,) = run(engine, reference, STEM, num_tokens=12)
    (second,) = run(engine, reference, [*first.tokens, 1, 2, 3])
    assert second.num_cached == 24


def test_states_and_pages_leave_for_the_host_and_come_back(model, reference):
    """The pool holds one of three prompts, and few states."""
    limits = dataclasses.replace(
        LIMITS, num_pages=14, max_running=1, num_states=3, num_host_pages=40, num_host_states=20
    )
    tiered = Engine(model, limits)
    tiered.warm_up()
    host = tiered.scheduler.memory.host
    host.call_tokens = host.page_tokens = host.state_tokens = 0.0  # whatever was measured
    prompts = [[i, *STEM, *STEM[::-1], i] for i in range(3)]
    for prompt in prompts:
        run(tiered, reference, prompt)
    assert tiered.stats()["host_states"]["cached"] >= 2
    tiered.device._states = jax.tree.map(lambda x: x * np.nan, tiered.device._states)
    assert [run(tiered, reference, x)[0].num_cached for x in prompts[:2]] == [32, 32]
    host.state_tokens = 1000.0  # dearer than computing
    assert run(tiered, reference, prompts[2])[0].num_cached == 0


def test_states_and_pages_leave_for_files_and_come_back_after_a_restart(model, reference, tmp_path):
    """Device and host hold little more than a prompt each."""
    limits = dataclasses.replace(
        LIMITS, num_pages=14, max_running=1, num_states=3, num_host_pages=12, num_host_states=4
    )
    prompts = [[i, *STEM, *STEM[::-1], i] for i in range(4)]

    def made():
        engine = Engine(model, dataclasses.replace(limits, files=FileStore(tmp_path, 1 << 30, "m")))
        engine.device.compile_all()
        return engine

    engine = made()
    for prompt in prompts:
        run(engine, reference, prompt)
    assert run(engine, reference, prompts[0])[0].num_cached == 32  # from files, while it runs
    assert any(tmp_path.glob("*.state"))
    engine.close()
    engine = made()
    engine.device._states = jax.tree.map(lambda x: x * np.nan, engine.device._states)
    assert [run(engine, reference, x)[0].num_cached for x in prompts] == [32] * 4
    engine.close()
    # Without its states a prefix is of no use, and what lies before others is.
    for path in sorted(tmp_path.glob("*.state"))[::2]:
        path.unlink()
    engine = made()
    for prompt in prompts:
        assert run(engine, reference, prompt)[0].num_cached in (0, 8, 16, 24, 32)
    engine.close()


class Guesses:
    """Proposes what the reference says, but a wrong token wherever `is_right` has False."""

    def __init__(self, reference, is_right):
        self._reference, self._is_right, self._texts = reference, is_right, {}

    def propose(self, seq, most):
        text = list(seq.tokens)
        for _ in range(seq.num_in_flight + most):
            text.append(int(self._reference(text)[len(text) - 1]))
        guesses = text[seq.num_known :]
        for i, at in enumerate(range(seq.num_known, len(text))):
            if not self._is_right[at % len(self._is_right)]:
                guesses[i] = (guesses[i] + 1) % 100
        return guesses

    def settle(self, num_drafts, num_taken):
        pass


@pytest.mark.parametrize(
    "is_right", [[True], [False], [True, True, False, True, False, False, True]], ids=str
)
def test_drafts(drafting, reference, monkeypatch, is_right):
    """Refused ones leave no trace in a state, and accepted ones are in it, over checkpoints."""
    drafting.scheduler.cache.clear()
    drafting.device._states = jax.tree.map(lambda x: x * np.nan, drafting.device._states)
    drafter = Guesses(reference, is_right)
    monkeypatch.setattr(speculation, "NgramDrafter", lambda most: drafter)
    before = drafting.stats()
    (alone,) = run(drafting, reference, STEM, num_tokens=24)
    run(drafting, reference, [*STEM, 3], STEM[::-1], num_tokens=12)
    (later,) = run(drafting, reference, [*alone.tokens, 1, 2])
    # The last multiple of 8 that a step's states were not beyond: its drafts go in the next step.
    assert later.num_cached >= 32
    stats = drafting.stats()
    made, taken = (stats[x] - before[x] for x in ("draft_tokens", "draft_tokens_taken"))
    assert made > 20
    assert taken == made if all(is_right) else taken < made
    assert any(is_right) == (taken > 0)


def test_a_hand_over(engine, reference):
    """The engine forgets the request's pages and states, and gets them again."""
    sampling = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    engine.submit([Sequence("a", "a", [*STEM, *STEM], sampling)])
    events = []
    while sum(len(event.tokens) for event in events) < 3:
        events += engine.step()
    events += engine.settle()
    handed = HandedOver.from_bytes(engine.export_request("a").to_bytes())
    engine.scheduler.cache.clear()
    engine.device._states = jax.tree.map(lambda x: x * np.nan, engine.device._states)
    before = engine.stats()["prefix_hit_tokens"]
    engine.import_request(handed, "b")
    while engine.has_work:
        events += engine.step()
        engine.scheduler.check_integrity()
    tokens = [token for event in events for token in event.tokens]
    text = [*STEM, *STEM, *tokens]
    assert tokens == reference(text)[33:][:8].tolist()
    assert engine.stats()["prefix_hit_tokens"] - before == 32


def test_preempted_sequences(engine, reference):
    """Three that grow to 11 pages each, in a pool of 30."""
    prompts = [[i, *STEM, i, *STEM[:3]] for i in range(3)]
    before = engine.scheduler.stats().num_preemptions
    run(engine, reference, *prompts, num_tokens=24)
    assert engine.scheduler.stats().num_preemptions > before


def test_a_grammar_that_forces_tokens(engine, monkeypatch):
    """Forced tokens are read as a chunk behind the sample. Void samples leave no trace."""
    pattern = grammar.from_regex("the number is [0-9]{4}, and the word is [a-z]{3}[.]")
    texts = []
    for jumps, seconds in ((True, 1.0), (False, 1.0), (True, 0.0), (False, 0.0)):
        monkeypatch.setattr(constrained_decoding, "SLOW_SECONDS", seconds)
        monkeypatch.setattr(engine, "config", dataclasses.replace(LIMITS, jump_forward=jumps))
        sampling = SamplingParams(max_tokens=40, temperature=0, grammar=pattern)
        seq = Sequence("g", "g", list(STEM), sampling)
        engine.submit([seq])
        while engine.has_work:
            engine.step()
            engine.scheduler.check_integrity()
        texts.append(engine.model.tokenizer.decode(seq.tokens[seq.num_prompt :]))
        engine.scheduler.cache.evict(engine.scheduler.cache.num_cached)
    assert len(set(texts)) == 1 and re.fullmatch(r"the number is \d{4}, and .*", texts[0]), texts


def test_bits_depend_on_the_sequence_alone(model):
    """Alone, in a batch with other cuts, from a checkpoint, after a preemption, with drafts."""
    limits = dataclasses.replace(LIMITS, batch_invariant=True, max_drafts=2, num_pages=22)
    engine = Engine(model, limits)
    engine.warm_up()
    # These logprobs are too coarse to show all roundings: see test_linear_attention.
    assert all(bucket.state_spec.chunk == 1 for bucket in engine.device.buckets)

    def logprobs(*prompts):
        params = SamplingParams(12, temperature=0, ignore_eos=True, logprobs=1)
        seqs = [Sequence(str(i), str(i), list(x), params) for i, x in enumerate(prompts)]
        found = {seq.id: [] for seq in seqs}
        engine.submit(seqs)
        while engine.has_work:
            for event in engine.step():
                found[event.seq_id] += [(x.token, x.logprob) for x in event.logprobs or ()]
        return found, seqs

    prompt = [*STEM, 8, 8, 3, 8, 8]
    alone, _ = logprobs(prompt)
    again, (seq,) = logprobs(prompt)
    assert seq.num_cached == 20
    assert again == alone
    before = engine.stats()["preemptions"]
    for _ in range(3):
        engine.scheduler.cache.clear()
        together, _ = logprobs(prompt, STEM[::-1], [1, *STEM])
        assert together["0"] == alone["0"]
    assert engine.stats()["preemptions"] > before


@pytest.mark.parametrize("jumps", [True, False])
def test_a_grammar_with_drafts(drafting, monkeypatch, jumps):
    """Forced tokens come behind accepted drafts that the state lacks."""
    pattern = grammar.from_regex("(the number is [0-9]{4}, ){3}")
    monkeypatch.setattr(
        drafting, "config", dataclasses.replace(drafting.config, jump_forward=jumps)
    )
    tokens, texts = [], []
    for _ in range(2):  # without guesses, then with right ones
        drafting.scheduler.cache.clear()
        monkeypatch.setattr(
            speculation, "NgramDrafter", lambda most, known=tokens: FixedDrafts(known)
        )
        sampling = SamplingParams(max_tokens=60, temperature=0, grammar=pattern)
        seq = Sequence("g", "g", list(STEM), sampling)
        before = drafting.stats()["draft_tokens_taken"]
        drafting.submit([seq])
        while drafting.has_work:
            drafting.step()
            drafting.scheduler.check_integrity()
        tokens = seq.tokens[seq.num_prompt :]
        texts.append(drafting.model.tokenizer.decode(tokens))
    assert texts[0] == texts[1] and re.fullmatch(r"(the number is \d{4}, ){3}", texts[0])
    assert drafting.stats()["draft_tokens_taken"] > before


def test_new_weights_begin_with_new_states(engine, reference, model):
    (first,) = run(engine, reference, STEM)
    weight = model.params["layers"][0]["dt_bias"]
    engine.update_params({"layers.0.dt_bias": weight}, None, partial=True)
    (again,) = run(engine, reference, STEM)
    assert (first.num_cached, again.num_cached) == (0, 0)


def test_sleep_and_wake(engine, reference):
    run(engine, reference, STEM)
    engine.sleep(weights=False)
    assert engine.device._states is None
    engine.wake()
    run(engine, reference, STEM)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_states": 5}, "num_states: expected at least 2 for each of max_running 3 sequences"),
    ],
)
def test_what_is_refused(model, changes, message):
    with pytest.raises(ValueError, match=message):
        Engine(model, dataclasses.replace(LIMITS, **changes))
