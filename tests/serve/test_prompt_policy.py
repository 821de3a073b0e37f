"""SnapKV and H2O in the engine: tokens are those of a dense reference that keeps the same keys."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_attn
from helpers import lora
from helpers.mesh_checks import run_on_cpus
from helpers.model_cases import shallow
from helpers.paths import EXAMPLES
from helpers.serve.small_engine import on_device
from helpers.small_llm import SMALL
from jax_attn import LLM, models, retention
from jax_attn.models._config.config import Latent
from jax_attn.models._layers import decoder
from jax_attn.serve import _options, _sizing
from jax_attn.serve._engine.engine import Engine
from jax_attn.serve._engine.engine_config import EngineConfig
from jax_attn.serve._scheduling import kv_policies
from jax_attn.serve._scheduling.prompt_policy import PromptPolicy
from jax_attn.serve._scheduling.request import FinishReason, SamplingParams, Sequence

PAGE, KEEP, WINDOW = 4, 30, 10
POLICIES = {"snapkv": PromptPolicy.snapkv(KEEP, WINDOW), "h2o": PromptPolicy.h2o(KEEP)}
CONFIG = EngineConfig(
    num_pages=150, page_size=PAGE, max_running=4, max_step_tokens=16, kv_policy=POLICIES["snapkv"]
)
NUM_KEPT = -(-KEEP // PAGE)

ids = itertools.count()


@pytest.fixture(scope="module")
def devices(model):
    """Compiled once for each policy; None: everything is kept."""
    made = {}
    for name, policy in [*POLICIES.items(), (None, None)]:
        engine = Engine(model, dataclasses.replace(CONFIG, max_drafts=2, kv_policy=policy))
        engine.warm_up()
        made[name] = engine.device
    return made


@pytest.fixture
def make_engine(model, devices):
    def make(name="snapkv", **changes) -> Engine:
        changes = {"kv_policy": POLICIES.get(name)} | changes
        devices[name].reset()
        return on_device(model, devices[name], dataclasses.replace(CONFIG, **changes))

    return make


def reference(model, tokens, num_prompt, name):
    """Logprobs of each next token: [len, vocab]. What follows the prompt sees the kept keys."""
    config, index = model.config, np.arange(len(tokens))
    causal = index[None] <= index[:, None]
    follows = index >= num_prompt

    def attend(qkv, weights, place, kind):
        q, k, v = decoder._rotated_heads(qkv, weights, jnp.asarray(index), config, kind)
        visible = np.broadcast_to(causal, (k.shape[1], *causal.shape)).copy()
        if num_prompt > KEEP:
            of_prompt = q[:num_prompt], k[:num_prompt]
            if name == "snapkv":
                kept = retention.snapkv(of_prompt[0][-WINDOW:], of_prompt[1], KEEP)
            else:
                kept = retention.heavy_hitters(*of_prompt, KEEP, recent=KEEP // 2)
            for h, positions in enumerate(np.asarray(kept)):
                dropped = np.setdiff1d(index[:num_prompt], positions)
                visible[h] &= ~(follows[:, None] & np.isin(index, dropped)[None])
        group = q.shape[1] // k.shape[1]
        visible = np.repeat(visible, group, axis=0)
        k, v = (jnp.repeat(x, group, axis=1) for x in (k, v))
        scores = config.sm_scale * jnp.einsum("qhd,khd->hqk", q, k)
        weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf))
        return jnp.einsum("hqk,khd->qhd", weights, v)

    x = decoder._layers(jnp.asarray(tokens), model.params, config, attend, states=None)
    return np.asarray(jax.nn.log_softmax(decoder._logits(x, model.params, config)))


def prompt(model, begin: int, length: int) -> list[int]:
    text = (EXAMPLES / "prompts" / "ast.py.txt").read_text("utf-8")
    return [0, *model.tokenizer.encode(text).ids[begin : begin + length - 1]]


def sequence(tokens, max_tokens: int = 20, **kwargs) -> Sequence:
    fields = {"adapter_name": kwargs.pop("adapter_name", "")}
    kwargs = {"temperature": 0, "ignore_eos": True, "logprobs": 0} | kwargs
    params = SamplingParams(max_tokens, **kwargs)
    return Sequence(f"s{next(ids)}", "r", list(tokens), params, **fields)


def run(engine, *seqs) -> dict[str, list[float]]:
    """Runs the sequences to their ends. Returns the logprobs of their tokens, by id."""
    logprobs = {seq.id: [] for seq in seqs}
    engine.submit(seqs)
    num_compiles = engine.device.num_compiles_after_warm_up
    while engine.has_work:
        for event in engine.step():
            assert event.error is None
            logprobs[event.seq_id] += [each.logprob for each in event.logprobs or ()]
        engine.scheduler.check_integrity()
        for seq in seqs:
            if seq.num_dropped:
                num_held = -(-(KEEP + len(seq.tokens) - seq.num_prompt) // PAGE)
                assert len(seq.pages) <= num_held + 1  # of drafts
    assert engine.device.num_compiles_after_warm_up == num_compiles
    assert all(seq.finish_reason is FinishReason.LENGTH for seq in seqs)
    return logprobs


def check(model, seq, logprobs, name="snapkv"):
    expected = reference(model, seq.tokens, seq.num_prompt, name)[seq.num_prompt - 1 : -1]
    chosen = seq.tokens[seq.num_prompt :]
    of_chosen = expected[np.arange(len(chosen)), chosen]
    np.testing.assert_allclose(logprobs, of_chosen, atol=2e-4)
    assert (expected.max(axis=1) - of_chosen).max() < 2e-4  # each is the likeliest


def check_all(model, engine, *seqs, name="snapkv"):
    logprobs = run(engine, *seqs)
    for seq in seqs:
        check(model, seq, logprobs[seq.id], name)


@pytest.mark.parametrize("num_prompt", [31, 90, 261])
@pytest.mark.parametrize("name", POLICIES)
def test_tokens_are_those_of_the_reference(model, make_engine, name, num_prompt):
    """31: one key is dropped. 261: H2O sums over two calls."""
    engine = make_engine(name)
    check_all(model, engine, sequence(prompt(model, 50, num_prompt), 30), name=name)
    assert engine.stats()["dropped_pages"] == -(-num_prompt // PAGE) - NUM_KEPT


@pytest.mark.parametrize("name", POLICIES)
def test_short_prompts_have_the_bits_of_no_policy(model, make_engine, name):
    """Also if they grow beyond what a prompt keeps."""
    tokens, found = prompt(model, 50, KEEP), []
    for each in (name, None):
        engine, seq = make_engine(each), sequence(tokens, 40)
        found.append((run(engine, seq)[seq.id], seq.tokens))
        assert not engine.stats().get("dropped_pages")
    assert found[0] == found[1]


def test_what_is_kept_differs_from_the_last_keys(model):
    """The reference keeps other keys in each head, so the tests tell heads apart."""
    tokens = prompt(model, 50, 90)
    config, kept = model.config, []

    def attend(qkv, weights, place, kind):
        q, k, v = decoder._rotated_heads(qkv, weights, jnp.arange(90), config, kind)
        kept.append(np.asarray(retention.snapkv(q[-WINDOW:], k, KEEP)))
        return jax_attn.dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]

    decoder._layers(jnp.asarray(tokens), model.params, config, attend, states=None)
    assert len(np.unique(np.concatenate(kept), axis=0)) == len(kept) * len(kept[0])


@pytest.mark.parametrize("name", POLICIES)
def test_sequences_of_one_batch_do_not_disturb_each_other(model, make_engine, name):
    seqs = [sequence(prompt(model, 60 * i, 25 + 37 * i), 20) for i in range(4)]
    check_all(model, make_engine(name), *seqs, name=name)


def test_pages_of_the_prompt_are_shared_whole(model, make_engine):
    """And those of the output not at all, as they depend on what was dropped."""
    engine = make_engine()
    tokens = prompt(model, 20, 60)
    first = sequence(tokens, 30)
    check_all(model, engine, first)
    assert engine.scheduler.cache.num_cached == engine.scheduler.cache.num_evictable == 60 // PAGE
    same, longer = sequence(tokens, 20), sequence([*first.tokens, 5, 6], 20)
    check_all(model, engine, same, longer)
    assert same.num_cached == 59  # with a copy of the last page
    assert 60 <= longer.num_cached < 64


def test_n_share_their_prompt(model, make_engine):
    engine = make_engine()
    tokens = prompt(model, 20, 60)
    check_all(model, engine, *(sequence(tokens, 15 + i) for i in range(3)))
    assert engine.scheduler.admission.num_prompt_tokens_cached == 2 * 59


def test_a_prompt_that_is_alone_gives_its_pages_to_others(model, make_engine):
    """Two prompts of 200 tokens have room one after the other, while both go on."""
    engine = make_engine(num_pages=90, prefix_cache=False)
    seqs = [sequence(prompt(model, 40 * i, 200), 60) for i in range(3)]
    check_all(model, engine, *seqs)
    assert engine.stats()["preemptions"] == 0
    assert engine.stats()["dropped_pages"] == 3 * (50 - NUM_KEPT)


@pytest.mark.parametrize("name", POLICIES)
def test_preempted_sequences_go_on(model, make_engine, name):
    engine = make_engine(name, num_pages=52)
    seqs = [sequence(prompt(model, 30 * i, 40), 80) for i in range(3)]
    check_all(model, engine, *seqs, name=name)
    assert engine.stats()["preemptions"] > 0


def test_without_a_prefix_cache(model, make_engine):
    check_all(model, make_engine(prefix_cache=False), sequence(prompt(model, 9, 70), 20))


def test_pages_of_prompts_that_were_on_the_host(model):
    """They go there once heads have kept their keys, and come back for the same prompt."""
    engine = Engine(model, dataclasses.replace(CONFIG, num_pages=60, num_host_pages=80))
    engine.warm_up_first()
    host = engine.scheduler.memory.host
    host.page_tokens = host.call_tokens = 0.01  # returning is sooner, whatever was measured
    first, other, again = (sequence(prompt(model, i, 150), 10) for i in (9, 300, 9))
    for seq in (first, other, again):
        check_all(model, engine, seq)
    assert host.num_returned > 0 and again.num_cached >= 148


def test_a_request_that_is_handed_over(model, make_engine):
    """It takes the pages of its prompt along, and its heads choose again."""
    engine = make_engine()
    seq = sequence(prompt(model, 50, 70), 20)
    engine.submit([seq])
    while seq.num_output < 6:
        engine.step()
    engine.settle()
    handed = engine.export_request(seq.id)
    assert len(handed.pages) == 68 // PAGE
    engine = make_engine()
    engine.import_request(handed, "again")
    (live,) = engine._outputs.live.values()
    while engine.has_work:
        engine.step()
    expected = sequence(prompt(model, 50, 70), 20)
    run(engine, expected)
    assert live.seq.tokens == expected.tokens and live.seq.num_output == 20


def test_one_token_needs_no_choice(model, make_engine):
    engine = make_engine()
    check_all(model, engine, sequence(prompt(model, 9, 70), 1))
    assert engine.stats()["dropped_pages"] == 0


def test_drafts_are_verified(model, make_engine):
    engine = make_engine(max_drafts=2)
    tokens = 4 * prompt(model, 50, 15)  # so that the text repeats itself
    check_all(model, engine, sequence(tokens, 40))
    assert engine.stats()["draft_tokens_taken"] > 0


def test_with_a_grammar(model, make_engine):
    """A sample may be void, and its token is computed again over the kept keys."""
    engine = make_engine()
    seq = sequence(prompt(model, 50, 70), 12, grammar="start: /[a-z ]{30,}/", logprobs=None)
    engine.submit([seq])
    while engine.has_work:
        engine.step()
        engine.scheduler.check_integrity()
    assert seq.finish_reason is FinishReason.LENGTH
    assert set(model.tokenizer.decode(seq.tokens[70:])) <= set("abcdefghijklmnopqrstuvwxyz ")


def test_bits_do_not_depend_on_the_batch(model):
    engine = Engine(model, dataclasses.replace(CONFIG, batch_invariant=True, prefix_cache=False))
    engine.warm_up()
    seqs = [sequence(prompt(model, 40 * i, 40 + 29 * i), 20) for i in range(3)]
    alone = sequence(seqs[2].tokens, 20)
    together = run(engine, *seqs)
    assert run(engine, alone)[alone.id] == together[seqs[2].id]
    check(model, alone, together[seqs[2].id])


@pytest.mark.parametrize("name", POLICIES)
def test_queries_have_the_adapter_of_their_sequence(model, name):
    policy = POLICIES[name]
    engine = Engine(model, dataclasses.replace(CONFIG, max_loras=2, kv_policy=policy))
    engine.warm_up_first()
    adapters = {each: lora.tensors(model.config, each) for each in "ab"}
    for each, tensors in adapters.items():
        engine.load_lora(each, models.make_lora(lora.CONFIG, tensors, model.config))
    seqs = [sequence(prompt(model, 50, 70), 20, adapter_name=each) for each in "ba"]
    logprobs = run(engine, *seqs)
    for seq in seqs:
        weights = models.make_lora(lora.CONFIG, adapters[seq.adapter_name], model.config)
        merged = lora.merged(model.params, model.config, weights)
        check(model._replace(params=merged), seq, logprobs[seq.id], name)


def test_on_other_devices_and_over_two():
    run_on_cpus(2, "import test_prompt_policy as t; t.check_devices()")


def check_devices():
    """Runs in a process with two devices."""
    model, second = shallow(models.load(models.BUNDLED, dtype="float32")), jax.devices()[1]
    for name in POLICIES:
        for options in ({"devices": (second,)}, {"tensor_parallel": 2}):
            options |= {"kv_policy": POLICIES[name]}
            engine = Engine(model, dataclasses.replace(CONFIG, **options))
            engine.warm_up_first()
            check_all(model, engine, sequence(prompt(model, 50, 80), 20), name=name)


@pytest.mark.parametrize("name", POLICIES)
def test_the_pools_are_written_in_place(devices, name):
    device = devices[name]
    pool = device._k_pages.nbytes
    assert device._executables["kept keys"].memory_analysis().temp_size_in_bytes < pool
    assert device._executables["kept keys"].memory_analysis().alias_size_in_bytes >= 2 * pool


def test_memory_of_the_sums_is_set_aside(model, devices):
    args = _options.from_keywords({"kv_policy": f"snapkv:keep={KEEP},window={WINDOW}"})
    num_bytes = _sizing._bytes_of_sums(model.config, args)
    (sums,) = devices["snapkv"]._prompt_keys.arrays
    assert sums.nbytes <= num_bytes == 4 * 2 * model.config.num_kv_heads * 2048
    assert sum(devices["snapkv"].bytes_held().values()) >= sums.nbytes
    assert _sizing._bytes_of_sums(model.config, _options.from_keywords({})) == 0


def test_llm(model, directory):
    with LLM(model, directory=directory, **SMALL, kv_policy="snapkv:keep=40,window=8") as llm:
        params = jax_attn.SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
        (output,) = llm.generate([prompt(model, 30, 120)], params)
        assert len(output.tokens) == 20
        assert llm.stats()["dropped_pages"] == 10


def test_sleep_and_new_weights(model, make_engine):
    engine = make_engine()
    check_all(model, engine, sequence(prompt(model, 50, 70), 5))
    engine.sleep(weights=False)
    engine.wake()
    check_all(model, engine, sequence(prompt(model, 50, 70), 5))


@pytest.mark.parametrize(
    "text", ["snapkv", "snapkv:", "snapkv:window=3", "h2o:keep=9,window=3", "h2o:keep=x", "razor"]
)
def test_a_policy_that_there_is_not_is_refused(text):
    with pytest.raises(ValueError, match="snapkv:keep=1024,window=32 or h2o:keep=1024, got "):
        kv_policies.parse(text)
    with pytest.raises(ValueError, match="--kv-policy: expected streaming:sinks=4,window=2000"):
        _options.from_keywords({"kv_policy": text})


def test_defaults_of_a_policy():
    assert kv_policies.parse("snapkv:keep=99") == PromptPolicy.snapkv(99, 32)
    assert kv_policies.parse("h2o:keep=9") == PromptPolicy.h2o(9)
    assert [PromptPolicy.h2o(keep).recent for keep in (1, 8, 9)] == [1, 4, 5]
    args = _options.from_keywords({"kv_policy": "h2o:keep=9", "max_model_len": 77})
    assert _options.engine_config(50, args).kv_policy == PromptPolicy.h2o(9)
    with pytest.raises(ValueError, match="snapkv: keep: expected at least 32, the last tokens"):
        kv_policies.parse("snapkv:keep=31")
    with pytest.raises(ValueError, match="h2o: keep: expected at least 1, the last tokens"):
        kv_policies.parse("h2o:keep=0")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"kv_dtype": "int8"}, "kv_dtype: expected None with kv_policy, got int8"),
        ({"context_parallel": 2}, "context_parallel: expected 1 with kv_policy, got 2"),
        ({"num_pages": 16}, "num_pages: expected at least 17, which a sequence needs"),
        ({"max_kv_pages_step": 9}, "max_kv_pages_step: expected at least 17"),
        ({"page_size": 24}, "page_size: expected one that divides 512 with kv_policy snapkv"),
        (
            {"kv_policy": PromptPolicy.h2o(2048), "num_pages": 2000},
            "kv_policy: expected to keep fewer than the model's 2048 tokens, got",
        ),
    ],
)
def test_settings_that_do_not_go_with_it_are_refused(model, changes, message):
    with pytest.raises(ValueError, match=message):
        Engine(model, dataclasses.replace(CONFIG, **changes))


@pytest.mark.parametrize(
    "of_layer, of_model, reason",
    [
        ({"window": 8}, {}, "layers with a sliding window"),
        ({}, {"latent": Latent(8, 8, 8, 8, 8, False)}, "latent attention"),
    ],
)
def test_models_whose_heads_cannot_choose_are_refused(model, of_layer, of_model, reason):
    layers = tuple(dataclasses.replace(kind, **of_layer) for kind in model.config.layers)
    config = dataclasses.replace(model.config, layers=layers, **of_model)
    with pytest.raises(ValueError, match=f"kv_policy: expected None, as llama has {reason}, got"):
        Engine(model._replace(config=config), CONFIG)


def test_a_sequence_alone_may_have_all_positions_of_the_model(model):
    engine = Engine(model, dataclasses.replace(CONFIG, num_pages=600, max_running=1))
    assert engine.max_sequence_tokens == model.config.max_positions


def test_a_prompt_that_leaves_no_room_for_what_it_keeps_is_refused(make_engine):
    engine = make_engine(num_pages=40)
    most = (40 - NUM_KEPT) * PAGE
    assert engine.max_sequence_tokens == most
    with pytest.raises(ValueError, match=f"expected at most {most} tokens together"):
        engine.submit([sequence([1] * most, 1)])
