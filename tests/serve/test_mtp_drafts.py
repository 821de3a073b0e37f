"""Drafts of a model's own layer for multi-token prediction.

Right ones save steps, wrong ones change nothing, and each is what the layer says about the text.
"""

import collections
import dataclasses
import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("llguidance", reason="needs the extra `serve`")

import jax_attn as ja
from helpers import model_cases, mtp_cases
from jax_attn import models
from jax_attn.serve import _options, _sizing
from jax_attn.serve._engine import draft_model
from jax_attn.serve._engine.engine import Engine
from jax_attn.serve._engine.engine_config import EngineConfig
from jax_attn.serve._engine.hand_over import HandedOver
from jax_attn.serve._grammar import grammar
from jax_attn.serve._scheduling.request import SamplingParams, Sequence

LIMITS = EngineConfig(
    num_pages=40, page_size=4, max_running=6, max_step_tokens=24, num_states=24,
    checkpoint_tokens=8, max_drafts=3,
)  # fmt: skip
LONGEST = 80
QUICK = {"xla_backend_optimization_level": 0}
STEM = [5, 9, 200, 31, 7, 7, 12, 90, 4, 300, 8, 21, 63, 2, 2, 150, 77]


@pytest.fixture(scope="module")
def random():
    return mtp_cases.make(mtp_cases.CONFIGS["qwen3.5"])


def step(config, params, tokens, hidden=None):
    """A step of one sequence of LONGEST tokens: what `forward` returns for all rows."""
    specs = models.attention_specs(
        config, dtype="float32", page_size=LONGEST, max_batch=1, max_qo_tokens=LONGEST,
        max_kv_pages=1,
    )  # fmt: skip
    at = jnp.arange(LONGEST)
    plans = tuple(
        ja.plan(spec, *map(np.array, ([0, LONGEST], [LONGEST], [0, 1], [0]))) for spec in specs
    )
    more = {} if hidden is None else {"hidden": hidden}
    if config.recurrent is not None:
        of_states = models.state_spec(
            config, dtype="float32", max_tokens=LONGEST, max_batch=1, num_slots=1
        )
        plan = ja.plan_linear_attention(of_states, np.array([0, LONGEST]), [-1], [0])
        more = {"states": models.init_states(config, 1, "float32"), "state_plan": plan}
    pages = models.init_pages(config, specs, 1)
    return models.forward(params, config, tokens, at, *pages, plans, at, **more)


@pytest.fixture(scope="module")
def says(random):
    """Says which tokens follow a text, by the model, and which drafts the layer makes."""
    (config, params, _), (own, of_layer, _) = random
    keeping = dataclasses.replace(config, keeps_hidden=True)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def read(tokens):
        logits, *pages, _ = step(keeping, params, tokens)
        return logits.argmax(-1), models.kept_hidden(*pages, jnp.arange(LONGEST), keeping)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def guess(tokens, hidden):
        shared = {name: params[name] for name in ("embed", "head")}
        logits, _, _, made = step(own, of_layer | shared, tokens, hidden)
        return logits.argmax(-1), made

    def says(text, num_drafts=0):
        padded = np.zeros(LONGEST + 1, np.int32)
        padded[: len(text)] = text
        best, hidden = read(padded[:-1])
        for i in range(num_drafts):
            last = len(text) - 2 + i
            guesses, made = guess(padded[1:], hidden)
            padded[last + 2] = guesses[last]
            hidden = hidden.at[last + 1].set(made[last])
        return best[: len(text)].tolist(), padded[len(text) :][:num_drafts].tolist()

    return says


def watch(engine, says):
    """Returns a list that grows by (sequence, tokens, drafts) whenever the layer makes drafts.

    Every third time the model verifies right ones in their place.
    """
    made, drafts = [], engine.draft_model.draft

    def draft(entries, newest):
        drafts(entries, newest)
        for entry in entries:
            if not entry.drafts:
                continue
            made.append((entry.seq, entry.seq.num_known, entry.drafts))
            if len(made) % 3 == 0:
                num_known, text = entry.seq.num_known, list(entry.seq.tokens)
                while len(text) < num_known + len(entry.drafts):
                    text.append(says(text)[0][-1])
                entry.drafts = tuple(text[num_known:])

    engine.draft_model.draft = draft
    return made


def run(engine, *prompts, num_tokens=24, **params) -> list[Sequence]:
    sampling = {"max_tokens": num_tokens, "temperature": 0, "ignore_eos": True} | params
    seqs = [
        Sequence(str(i), str(i), list(x), SamplingParams(**sampling)) for i, x in enumerate(prompts)
    ]
    engine.submit(seqs)
    while engine.has_work:
        engine.step()
        engine.scheduler.check_integrity()
    assert engine.stats()["pages_used"] == 0
    return seqs


@pytest.fixture(scope="module")
def warm(random):
    engine = Engine(random[0], LIMITS, draft_model=random[1])
    engine.warm_up()
    engine.draft_model.cost = 0.0  # whatever was measured
    return engine


class Steady:
    """A pace that wrong drafts do not slow down, with a pause now and then."""

    def __init__(self, most, *args, **kwargs):
        self._most, self._num = most, 0

    def next(self, most):
        self._num += 1
        return min(most, self._most) if self._num % 7 else 0

    def settle(self, num_drafts, num_taken):
        return 0.0


@pytest.fixture
def engine(warm, monkeypatch):
    """With an empty cache; what is in its pages and states, nobody may read."""
    monkeypatch.setattr(draft_model, "Pace", Steady)
    warm.scheduler.cache.clear()
    for device in (warm.device, warm.draft_model.device):
        for name in ("_k_pages", "_v_pages", "_states"):
            setattr(device, name, jax.tree.map(lambda x: x * np.nan, getattr(device, name)))
    monkeypatch.setattr(warm.draft_model, "draft", warm.draft_model.draft)  # undone
    return warm


def check(engine, says, made, seqs):
    """Outputs are the model's, and drafts the layer's, whatever became of earlier ones."""
    assert len(made) > 5 and max(len(drafts) for *_, drafts in made) > 1
    for seq in seqs:
        best, _ = says(seq.tokens)
        assert best[seq.num_prompt - 1 : -1] == seq.tokens[seq.num_prompt :]
    for seq, num_known, drafts in made:
        assert says(seq.tokens[:num_known], len(drafts))[1] == list(drafts)


def test_drafts_are_what_the_layer_says(engine, says):
    """Over chunks of prompts, pauses, batches, cached prefixes, accepted and refused drafts."""
    made = watch(engine, says)
    seqs = run(engine, [*STEM, *STEM, 3])
    seqs += run(engine, [*STEM, 3], STEM[::-1], [77], num_tokens=16)
    seqs += run(engine, [*STEM, 4], [78])  # with room for several drafts each
    seqs += run(engine, [*STEM, *STEM, 3, *seqs[0].tokens[35:50], 8])
    assert seqs[-1].num_cached >= 32
    check(engine, says, made, seqs)


def test_preempted_sequences(engine, says):
    """Three that grow to 15 pages each, in a pool of 40."""
    made = watch(engine, says)
    before = engine.stats()["preemptions"]
    seqs = run(engine, *([i, *STEM, i, *STEM[:3]] for i in range(3)), num_tokens=38)
    assert engine.stats()["preemptions"] > before
    check(engine, says, made, seqs)


def test_pages_that_were_on_the_host(random, says, monkeypatch):
    """Hidden states leave with their pages, and the layer reads them when they are back."""
    monkeypatch.setattr(draft_model, "Pace", Steady)
    limits = dataclasses.replace(
        LIMITS, num_pages=18, num_states=13, num_host_pages=60, num_host_states=30
    )
    engine = Engine(random[0], limits, draft_model=random[1])
    engine.warm_up()
    host = engine.scheduler.memory.host
    host.call_tokens = host.page_tokens = host.state_tokens = 0.0  # whatever was measured
    prompts = [[i, *STEM, *STEM[::-1], i] for i in range(3)]
    for prompt in prompts:
        run(engine, prompt)
    made = watch(engine, says)
    seqs = [run(engine, prompt)[0] for prompt in prompts]
    assert [seq.num_cached for seq in seqs] == [32, 32, 32]
    check(engine, says, made, seqs)


def test_a_hand_over(engine, says):
    """The layer reads what another engine's model has left in the pages."""
    made = watch(engine, says)
    sampling = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    engine.submit([Sequence("a", "a", [*STEM, *STEM], sampling)])
    tokens = []
    while len(tokens) < 3:
        tokens += [x for event in engine.step() for x in event.tokens]
    tokens += [x for event in engine.settle() for x in event.tokens]
    handed = HandedOver.from_bytes(engine.export_request("a").to_bytes())
    engine.scheduler.cache.clear()
    del made[:]
    engine.import_request(handed, "b")
    while engine.has_work:
        tokens += [x for event in engine.step() for x in event.tokens]
        engine.scheduler.check_integrity()
    text = [*STEM, *STEM, *tokens]
    assert len(tokens) == 24 and says(text)[0][33:-1] == tokens
    check(engine, says, made, [])


# ---- layers that are always right ----------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3.5 moe", "glm4 moe", "deepseek v3"])
@pytest.mark.parametrize("through", ["embedding", "hidden"])
def test_right_drafts_are_accepted(name, through):
    num_tokens = 21
    model, layer, expected = mtp_cases.always_right(name, through, STEM, num_tokens)
    limits = dataclasses.replace(LIMITS, max_running=8, num_states=None)
    engine = Engine(model, limits, draft_model=layer)
    engine.warm_up()
    engine.draft_model.cost = 0.0
    for _ in range(2):  # the second time from the cache
        before = engine.stats()
        (seq,) = run(engine, STEM, num_tokens=num_tokens)
        assert seq.tokens[len(STEM) :] == expected and len({*expected}) > 4
        stats = engine.stats()
        made, taken, steps = (
            stats[x] - before[x] for x in ("draft_tokens", "draft_tokens_taken", "steps")
        )
        assert taken == made > num_tokens // 2 and steps < num_tokens // 2


NOISE = {"right": (0.0, 0.75, 1.0), "sometimes right": (0.3, 0.1, 0.9)}


@pytest.mark.parametrize("how", NOISE)
def test_the_output_is_what_it_is_without(how, monkeypatch):
    """Token by token, greedy or sampled, with the bits of logprobs.

    Penalties and a grammar make some drafts of a layer that is always right wrong.
    """
    noise, least, most = NOISE[how]
    model, layer, _ = mtp_cases.always_right("qwen3.5", "embedding", STEM, 1)
    matrix = layer.params["mtp_in"]
    layer.params["mtp_in"] += noise * jax.random.normal(jax.random.key(5), matrix.shape) * 0.2
    limits = dataclasses.replace(LIMITS, batch_invariant=True, max_running=8, num_states=None)
    engine = Engine(model, limits, draft_model=layer)
    engine.warm_up()
    engine.draft_model.cost = 0.0
    monkeypatch.setattr(draft_model, "Pace", Steady)
    pattern = grammar.from_regex("(the number is [0-9]{4}, )+")
    requests = [
        {},
        {"temperature": 1.0, "seed": 5, "logprobs": 2},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 30, "seed": 1},
        {"frequency_penalty": 0.5, "repetition_penalty": 1.2, "temperature": 0.3, "logprobs": 1},
        {"grammar": pattern, "ignore_eos": False, "temperature": 1.0, "seed": 3},
    ]

    def outputs():
        found = collections.defaultdict(list)
        for n, together in enumerate([requests, *([x] for x in requests)]):
            shared = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
            seqs = [
                Sequence(str(i), str(i), [*STEM, i], SamplingParams(**shared | x))
                for i, x in enumerate(together)
            ]
            engine.submit(seqs)
            while engine.has_work:
                for event in engine.step():
                    logprobs = event.logprobs or [None] * len(event.tokens)
                    found[n, event.seq_id] += zip(event.tokens, logprobs, strict=True)
        return found

    with_drafts = outputs()
    stats = engine.stats()
    assert least <= stats["draft_tokens_taken"] / stats["draft_tokens"] <= most
    assert stats["draft_tokens"] > 80
    monkeypatch.setattr(engine._speculation, "_max_drafts", 0)
    assert outputs() == with_drafts
    assert engine.stats()["draft_tokens"] == stats["draft_tokens"]


# ---- from files ----------------------------------------------------------------------------------

SMALL = {"max_running": 8, "max_step_tokens": 32, "num_pages": 40, "dtype": "float32"}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A directory of a model with a layer, and one without."""
    sizes = {"vocab_size": 4096, "eos_token_id": 0}
    found = []
    for name, write in (("with", mtp_cases.write), ("without", model_cases.write)):
        found.append(tmp_path_factory.mktemp(name))
        write(found[-1], mtp_cases.CONFIGS["qwen3.5"] | sizes)
        shutil.copy(models.BUNDLED / "tokenizer.json", found[-1])
    return found


def test_a_directory(files):
    params = ja.SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    texts = []
    for more in ({}, {"draft_model": "mtp"}):
        with ja.LLM(files[0], **SMALL, **more) as llm:
            texts.append(llm.generate([STEM], params)[0].tokens)
            stats = llm._runtime.engine("")._engine.stats()
    assert texts[0] == texts[1]
    assert stats["draft_tokens"] > 0


def test_files_that_are_refused(files):
    refused = [
        (files[1], "'mtp.fc.weight' is missing, with 14 more"),
        (models.BUNDLED, "expected a model whose files have layers for it, such as Qwen3.5"),
        (models.load(files[0], "float32"), "expected a directory of the model with mtp, got none"),
    ]
    for where, message in refused:
        with pytest.raises(ValueError, match=f"--draft-model.* {message}"):
            ja.LLM(where, **SMALL, draft_model="mtp")


@pytest.mark.parametrize("name, tp", [("qwen3.5", 1), ("glm4 moe", 2), ("deepseek v3", 2)])
def test_pages_have_room_for_hidden_states(name, tp):
    """Each device has all of a hidden state, and its part of keys and values."""
    config = models.parse_config(mtp_cases.CONFIGS[name])
    keeping = dataclasses.replace(config, keeps_hidden=True)
    args = _options.from_keywords({"tensor_parallel": tp, "dtype": "float32", "page_size": 4})
    plain, kept = (_sizing.bytes_of_page(each, args) for each in (config, keeping))
    row = config.head_dim if config.latent else 2 * config.head_dim * config.num_kv_heads // tp
    assert kept - plain == 4 * 4 * row * -(-config.hidden_size // row)
    num_layers = sum(kind.attention for kind in config.layers)
    assert plain == 4 * 4 * row * num_layers


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"kv_dtype": "float8_e4m3fn"}, "kv_dtype: expected None with drafts of multi-token"),
        ({"context_parallel": 2}, "context_parallel: expected 1 with drafts of multi-token"),
        ({"max_drafts": 0}, "max_drafts: expected at least 1 with a draft model"),
    ],
)
def test_what_is_refused(random, changes, message):
    with pytest.raises(ValueError, match=message):
        Engine(random[0], dataclasses.replace(LIMITS, **changes), draft_model=random[1])


def test_the_layer_of_another_model_is_refused(random):
    other = mtp_cases.make(model_cases.CONFIGS["qwen3.5"] | {"num_key_value_heads": 4})[1]
    with pytest.raises(ValueError, match="expected the layer for multi-token prediction of this"):
        Engine(random[0], LIMITS, draft_model=other)
