"""StreamingLLM in the engine: tokens are those of a dense reference that masks the same keys."""

import dataclasses
import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_attn
from helpers.paths import EXAMPLES
from helpers.serve.small_engine import on_device
from helpers.small_llm import SMALL
from jax_attn import LLM, models
from jax_attn.models._config.config import Latent, Temperature
from jax_attn.models._layers import decoder
from jax_attn.serve import _loading, _options
from jax_attn.serve._engine.engine import Engine
from jax_attn.serve._engine.engine_config import EngineConfig
from jax_attn.serve._openai.metrics import _families
from jax_attn.serve._scheduling import kv_policies
from jax_attn.serve._scheduling.request import FinishReason, SamplingParams, Sequence
from jax_attn.serve._scheduling.streaming import Streaming, StreamingPages

PAGE, SINKS, WINDOW = 4, 6, 40  # so 8 sinks, and blocks of 4
CONFIG = EngineConfig(
    num_pages=80, page_size=PAGE, max_running=4, max_step_tokens=16,
    kv_policy=Streaming(SINKS, WINDOW),
)  # fmt: skip
PAGES = StreamingPages(CONFIG.kv_policy, PAGE)
LONGEST = 160

ids = itertools.count()


@pytest.fixture(scope="module")
def device(model):
    engine = Engine(model, dataclasses.replace(CONFIG, max_drafts=2))
    engine.warm_up()
    return engine.device


@pytest.fixture
def make_engine(model, device):
    def make(**changes) -> Engine:
        device.reset()
        return on_device(model, device, dataclasses.replace(CONFIG, **changes))

    return make


@pytest.fixture(scope="module")
def logprobs_of(model):
    """tokens -> the reference's logprobs of each next token, [len, vocab]."""
    run = jax.jit(lambda tokens: jax.nn.log_softmax(reference(model, tokens)))

    def padded(tokens):
        row = np.zeros(LONGEST, np.int32)
        row[: len(tokens)] = tokens
        return np.asarray(run(row))[: len(tokens)]

    return padded


def reference(model, tokens):
    """Logits of StreamingLLM as its paper has it: a token's row has positions in the cache."""
    config = model.config
    index = np.arange(len(tokens))
    # What the module `streaming` says, written out: blocks of 4, the window before the block.
    starts = np.maximum(0, index // 4 * 4 - WINDOW) // PAGE * PAGE
    starts = np.maximum(starts, 8)
    visible = (index[None] < 8) | (index[None] >= starts[:, None])
    visible &= index[None] <= index[:, None]

    def attend(qkv, weights, place, kind):
        out = []
        for start in np.unique(starts):
            positions = np.where(index < 8, index, index - start + 8)
            q, k, v = decoder._rotated_heads(qkv, weights, jnp.asarray(positions), config, kind)
            k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
            rows = starts == start
            scores = config.sm_scale * jnp.einsum("qhd,khd->hqk", q[rows], k)
            scores = jnp.where(visible[rows], scores, -jnp.inf)
            out.append(jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores), v))
        return jnp.concatenate(out)

    x = decoder._layers(tokens, model.params, config, attend, states=None)
    return decoder._logits(x, model.params, config)


def prompt(model, begin: int, length: int) -> list[int]:
    text = (EXAMPLES / "prompts" / "ast.py.txt").read_text("utf-8")
    return [0, *model.tokenizer.encode(text).ids[begin : begin + length - 1]]


def sequence(tokens, max_tokens: int = 24, **kwargs) -> Sequence:
    kwargs |= {"temperature": 0, "ignore_eos": True, "logprobs": 0}
    params = SamplingParams(max_tokens, **kwargs)
    return Sequence(f"s{next(ids)}", "r", list(tokens), params)


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
            assert engine.scheduler.memory.num_held(seq) <= PAGES.max_pages
            assert len(seq.pages) <= PAGES.max_table_pages
    assert engine.device.num_compiles_after_warm_up == num_compiles
    assert all(seq.finish_reason is FinishReason.LENGTH for seq in seqs)
    return logprobs


def check(logprobs_of, seq, logprobs):
    expected = logprobs_of(seq.tokens)[seq.num_prompt - 1 : -1]
    chosen = seq.tokens[seq.num_prompt :]
    of_chosen = expected[np.arange(len(chosen)), chosen]
    np.testing.assert_allclose(logprobs, of_chosen, atol=2e-4)
    assert (expected.max(axis=1) - of_chosen).max() < 2e-4  # each is the likeliest


def check_all(logprobs_of, engine, *seqs):
    logprobs = run(engine, *seqs)
    for seq in seqs:
        check(logprobs_of, seq, logprobs[seq.id])


@pytest.mark.parametrize("num_prompt, max_tokens", [(10, 120), (100, 40)])
def test_tokens_are_those_of_the_reference(model, make_engine, logprobs_of, num_prompt, max_tokens):
    engine = make_engine()
    seq = sequence(prompt(model, 50, num_prompt), max_tokens)
    check_all(logprobs_of, engine, seq)
    # The last token is not fed back; the block before it began at 136.
    num_blocks = (num_prompt + max_tokens - 1) // PAGE
    assert engine.stats()["dropped_pages"] == num_blocks - (WINDOW + 8) // PAGE


def test_sequences_of_one_batch_do_not_disturb_each_other(model, make_engine, logprobs_of):
    engine = make_engine()
    seqs = [sequence(prompt(model, 60 * i, 5 + 37 * i), 50) for i in range(3)]
    check_all(logprobs_of, engine, *seqs)


def test_n_share_their_prompt_and_drop_it(model, make_engine, logprobs_of):
    engine = make_engine()
    tokens = prompt(model, 20, 45)
    seqs = [sequence(tokens, 60), sequence(tokens, 70), sequence(tokens, 80)]
    check_all(logprobs_of, engine, *seqs)
    assert engine.scheduler.admission.num_prompt_tokens_cached == 2 * 44
    # Only the prompt of the texts is cached, and nobody holds it.
    assert engine.scheduler.cache.num_cached == engine.scheduler.cache.num_evictable == 11


def test_preempted_sequences_go_on(model, make_engine, logprobs_of):
    engine = make_engine(num_pages=40)
    seqs = [sequence(prompt(model, 30 * i, 20), 100) for i in range(3)]
    check_all(logprobs_of, engine, *seqs)
    assert engine.stats()["preemptions"] > 0


def test_without_a_prefix_cache(model, make_engine, logprobs_of):
    check_all(logprobs_of, make_engine(prefix_cache=False), sequence(prompt(model, 9, 70), 50))


def test_long_prompts_find_only_what_comes_before_the_first_drop(model, make_engine, logprobs_of):
    engine = make_engine()
    first, second = (sequence(prompt(model, 50, 120), 10) for _ in range(2))
    check_all(logprobs_of, engine, first)
    assert engine.scheduler.cache.num_cached == PAGES.first_drop // PAGE
    check_all(logprobs_of, engine, second)
    assert second.num_cached == PAGES.first_drop - 1  # with a copy of the last page


def test_drafts_are_verified(model, make_engine, logprobs_of):
    engine = make_engine(max_drafts=2)
    tokens = 4 * prompt(model, 50, 15)  # so that the text repeats itself
    check_all(logprobs_of, engine, sequence(tokens, 60))
    assert engine.stats()["draft_tokens_taken"] > 0


def test_bits_do_not_depend_on_the_batch(model, logprobs_of):
    engine = Engine(model, dataclasses.replace(CONFIG, batch_invariant=True, prefix_cache=False))
    engine.warm_up()
    seqs = [sequence(prompt(model, 40 * i, 70 + 9 * i), 30) for i in range(3)]
    alone = sequence(seqs[2].tokens, 30)
    together = run(engine, *seqs)
    assert run(engine, alone)[alone.id] == together[seqs[2].id]
    check(logprobs_of, alone, together[seqs[2].id])


def test_of_one_device_of_several(model, logprobs_of):
    engine = Engine(model, dataclasses.replace(CONFIG, devices=(jax.devices()[0],)))
    engine.warm_up_first()
    check_all(logprobs_of, engine, sequence(prompt(model, 50, 30), 70))


@pytest.mark.parametrize("name", ["rotate", "copies of pages"])
def test_pages_move_without_a_copy_of_the_pool(device, name):
    memory = device._executables[name].memory_analysis()
    pool = device._k_pages.nbytes
    assert memory.alias_size_in_bytes >= 2 * pool > 0
    assert memory.temp_size_in_bytes < pool / 2


def test_llm_and_its_limit(model, directory):
    policy = {"kv_policy": "streaming:window=40,sinks=6", "max_model_len": 3000}
    with LLM(model, directory=directory, **SMALL, **policy) as llm:
        params = jax_attn.SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
        (output,) = llm.generate("def ", params)
        assert len(output.tokens) == 100
        assert llm.stats()["dropped_pages"] > 5
        # More than the model's 2048 is allowed.
        with pytest.raises(ValueError, match="maximum context length is 3000 tokens"):
            llm.generate("def ", jax_attn.SamplingParams(max_tokens=3000))


def test_metrics(make_engine):
    stats = make_engine().stats()
    (family,) = (x for x in _families([((), stats)]) if x.name == "jax_attn_dropped_pages")
    assert [sample.value for sample in family.samples] == [0]


@pytest.mark.parametrize(
    "text", ["window=3", "streaming:sinks", "streaming:sinks=1,sinks=2", "streaming:x=1"]
)
def test_a_policy_that_there_is_not_is_refused(text):
    with pytest.raises(ValueError, match="expected streaming:sinks=4,window=2000, .*, got "):
        kv_policies.parse(text)
    with pytest.raises(ValueError, match="--kv-policy: expected streaming:sinks=4,window=2000"):
        _options.from_keywords({"kv_policy": text})


def test_defaults_of_a_policy():
    for text in ("streaming", "streaming:sinks=4"):
        assert kv_policies.parse(text) == Streaming(4, 2000)
    args = _options.from_keywords({"kv_policy": "streaming:window=9", "max_model_len": 77})
    assert _options.engine_config(50, args).kv_policy == Streaming(4, 9, 77)
    with pytest.raises(ValueError, match="streaming: window: expected at least 1, got 0"):
        kv_policies.parse("streaming:window=0")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"kv_dtype": "int8"}, "kv_dtype: expected None with kv_policy, got int8"),
        ({"tensor_parallel": 2}, "tensor_parallel: expected 1 with kv_policy, got 2"),
        ({"context_parallel": 2}, "context_parallel: expected 1 with kv_policy, got 2"),
        ({"num_pages": 20}, "num_pages: expected at least 27, which a sequence needs"),
        ({"max_kv_pages_step": 9}, "max_kv_pages_step: expected at least 27"),
        (
            {"kv_policy": Streaming(4, 2000), "num_pages": 2000},
            "kv_policy: expected sinks and window within 2048 tokens, the model's positions, got",
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
        ({"temperature": Temperature(0.1, 8.0)}, {}, "queries scaled by their position"),
        ({}, {"qk_norm_after_rope": True}, "norms of keys after RoPE"),
        ({}, {"latent": Latent(8, 8, 8, 8, 8, False)}, "latent attention"),
    ],
)
def test_models_whose_keys_cannot_move_are_refused(model, of_layer, of_model, reason):
    layers = tuple(dataclasses.replace(kind, **of_layer) for kind in model.config.layers)
    config = dataclasses.replace(model.config, layers=layers, **of_model)
    with pytest.raises(ValueError, match=f"kv_policy: expected None, as llama has {reason}, got"):
        Engine(model._replace(config=config), CONFIG)


def test_a_model_with_a_vision_tower_reads_texts(monkeypatch):
    """The tower is not loaded, as the engine refuses it with a kv policy."""
    monkeypatch.setattr(models, "has_vision", lambda directory: True)
    monkeypatch.setattr(models, "load_vision", lambda *_, **__: "a tower")
    args = _options.from_keywords({"kv_policy": "streaming:window=40"})
    assert _loading.load_vision(Path("model"), args) is None
    args = _options.from_keywords({})
    assert _loading.load_vision(Path("model"), args) == "a tower"
