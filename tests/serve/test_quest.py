"""Quest in the engine: tokens are those of a dense reference that masks what was not selected."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_prompt_policy import prompt, sequence

import jax_attn
from helpers import lora
from helpers.mesh_checks import run_on_cpus
from helpers.model_cases import shallow
from helpers.serve.small_engine import on_device
from helpers.small_llm import SMALL
from jax_attn import LLM, models
from jax_attn.models._config.config import Latent
from jax_attn.models._layers import decoder
from jax_attn.serve import _options, _sizing
from jax_attn.serve._engine.engine import Engine
from jax_attn.serve._engine.engine_config import EngineConfig
from jax_attn.serve._scheduling import kv_policies
from jax_attn.serve._scheduling.kv_policies import parse
from jax_attn.serve._scheduling.quest import Quest
from jax_attn.serve._scheduling.request import FinishReason

PAGE, SELECTED, DENSE = 4, 6, 2
CONFIG = EngineConfig(
    num_pages=150, page_size=PAGE, max_running=4, max_step_tokens=16, kv_select=Quest(SELECTED)
)


@pytest.fixture(scope="module")
def model(whole_model):
    """Two layers that select, so that the keys of the second depend on what the first selects."""
    return shallow(whole_model, DENSE + 2)


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


def selected_pages(q, k, row, sm_scale) -> set[int]:
    """The pages that row `row` of q reads, [n, heads, head_dim], with keys [n, kv_heads, head_dim].
    A head's bound of a page is the sum over channels of max(q * least, q * greatest)."""
    last = row // PAGE
    if last < SELECTED:
        return set(range(last + 1))
    group, sums = q.shape[1] // k.shape[1], np.zeros(last)
    for head in range(q.shape[1]):
        bounds = []
        for page in range(last):
            keys = k[page * PAGE :][:PAGE, head // group]
            corners = q[row, head] * keys.min(0), q[row, head] * keys.max(0)
            bounds.append(sm_scale * np.maximum(*corners).sum())
        weights = np.exp(np.array(bounds) - max(bounds))
        sums += weights / weights.sum()
    return {last, *np.argsort(-sums)[: SELECTED - 1].tolist()}


def reference(model, tokens, rows, parts: int = 1):
    """Logprobs of each next token: [len, vocab]. rows: those that select. parts: devices, each of
    which selects for its own heads."""
    config, index = model.config, np.arange(len(tokens))

    def attend(qkv, weights, place, kind):
        q, k, v = decoder._rotated_heads(qkv, weights, jnp.asarray(index), config, kind)
        visible = np.broadcast_to(index <= index[:, None], (parts, len(index), len(index))).copy()
        of_parts = zip(*(np.split(np.asarray(x), parts, axis=1) for x in (q, k)), strict=True)
        for part, (own_q, own_k) in enumerate(of_parts):
            for row in rows if place.layer >= DENSE else ():
                read = selected_pages(own_q, own_k, row, config.sm_scale)
                visible[part, row] &= np.isin(index // PAGE, list(read))
        visible = np.repeat(visible, q.shape[1] // parts, axis=0)
        k, v = (jnp.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
        scores = config.sm_scale * jnp.einsum("qhd,khd->hqk", q, k)
        weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf))
        return jnp.einsum("hqk,khd->qhd", weights, v)

    x = decoder._layers(jnp.asarray(tokens), model.params, config, attend, states=None)
    return np.asarray(jax.nn.log_softmax(decoder._logits(x, model.params, config)))


def run(engine, *seqs):
    """Runs the sequences to their ends. Returns, by id, logprobs of their tokens and the places of
    the tokens that went through the model alone, when they did for the last time."""
    logprobs = {seq.id: [] for seq in seqs}
    alone = {seq.id: {} for seq in seqs}
    plan = engine.device.plan

    def watched(entries, rows_of=None):
        for entry in entries:
            places = range(entry.begin, entry.begin + entry.num_launched)
            is_alone = entry.num_tokens == 1 and entry.begin >= entry.seq.num_prompt
            alone[entry.seq.id] |= dict.fromkeys(places, is_alone)
        return plan(entries, rows_of)

    engine.device.plan = watched
    engine.submit(seqs)
    num_compiles = engine.device.num_compiles_after_warm_up
    try:
        while engine.has_work:
            for event in engine.step():
                assert event.error is None
                logprobs[event.seq_id] += [each.logprob for each in event.logprobs or ()]
            engine.scheduler.check_integrity()
    finally:
        engine.device.plan = plan
    assert engine.device.num_compiles_after_warm_up == num_compiles
    assert all(seq.finish_reason is FinishReason.LENGTH for seq in seqs)
    if engine.config.prefix_cache:
        check_bounds(engine)
    return logprobs, {i: [at for at, x in places.items() if x] for i, places in alone.items()}


def check_bounds(engine) -> None:
    """All pages of the prefix cache have the bounds of their keys."""
    cached = [node.pages for *_, node in engine.scheduler.cache.latest_first() if not node.on_host]
    pages = [page for each in cached for page in each]
    keys = np.asarray(engine.device._k_pages)[DENSE:, pages]
    (bounds,) = np.asarray(engine.device._page_bounds)[:, :, pages]
    assert pages
    np.testing.assert_array_equal(bounds[:, :, 0], keys.min(2))
    np.testing.assert_array_equal(bounds[:, :, 1], keys.max(2))


def check(model, seq, logprobs, rows, begin: int = 0, parts: int = 1):
    """begin: tokens of the output before it are not checked."""
    first = seq.num_prompt + begin
    rows = [row for row in rows if row < len(seq.tokens)]
    expected = reference(model, seq.tokens, rows, parts)[first - 1 : -1]
    chosen = seq.tokens[first:]
    of_chosen = expected[np.arange(len(chosen)), chosen]
    np.testing.assert_allclose(logprobs[begin:], of_chosen, atol=2e-4)
    assert (expected.max(axis=1) - of_chosen).max() < 2e-4  # each is the likeliest
    return rows


def check_all(model, engine, *seqs, parts: int = 1):
    logprobs, rows = run(engine, *seqs)
    for seq in seqs:
        check(model, seq, logprobs[seq.id], rows[seq.id], parts=parts)


def test_tokens_are_those_of_the_reference(model, make_engine):
    engine = make_engine()
    seqs = [sequence(prompt(model, 40 * i, 12 + 31 * i), 20) for i in range(4)]
    logprobs, rows = run(engine, *seqs)
    for seq in seqs:
        assert check(model, seq, logprobs[seq.id], rows[seq.id]) == [
            *range(seq.num_prompt, len(seq.tokens) - 1)
        ]
    # It is no approximation of nothing: all keys give other logprobs.
    every_key = reference(model, seqs[3].tokens, [])[seqs[3].num_prompt - 1 : -1]
    of_chosen = every_key[np.arange(20), seqs[3].tokens[-20:]]
    assert np.abs(of_chosen - logprobs[seqs[3].id]).max() > 0.01


def test_enough_pages_are_all_pages(model):
    prompts = [prompt(model, 30 * i, 20 + 25 * i) for i in range(3)]
    found = []
    for selection in (None, Quest(40), Quest(150)):  # the last could leave out nothing
        engine = Engine(model, dataclasses.replace(CONFIG, kv_select=selection))
        engine.warm_up_first()
        assert len(engine.device._page_bounds) == (selection == Quest(40))
        seqs = [sequence(tokens) for tokens in prompts]
        engine.submit(seqs)
        while engine.has_work:
            engine.step()
        found.append([seq.tokens for seq in seqs])
    assert found[0] == found[1] == found[2]


def test_a_shared_prefix_and_a_copied_page(model, make_engine):
    engine = make_engine()
    tokens = prompt(model, 0, 75)
    check_all(model, engine, sequence(tokens), sequence(tokens))  # as with n
    again = sequence(tokens)
    check_all(model, engine, again)  # the last token of the prompt is alone, and reads all
    assert again.num_cached == 74
    seqs = [sequence([*tokens[:66], *prompt(model, 90 * n, 11)]) for n in (1, 2)]
    check_all(model, engine, *seqs)
    assert [seq.num_cached for seq in seqs] == [66, 66]  # two of them in a copied page


def test_pages_come_back_from_the_host(model):
    config = dataclasses.replace(CONFIG, num_pages=40, num_host_pages=60)
    engine = Engine(model, config)
    engine.warm_up_first()
    host = engine.scheduler.memory.host
    host.call_tokens = host.page_tokens = 0  # it is worth it
    prompts = [prompt(model, begin, 90) for begin in (0, 100)]
    for tokens in [*prompts, *prompts]:
        check_all(model, engine, sequence(tokens))
    assert host.num_returned > 2 * SELECTED


def test_a_request_goes_on_in_another_engine(model, make_engine):
    other = Engine(model, CONFIG)
    other.warm_up_first()
    seq, engine = sequence(prompt(model, 20, 90), 20), make_engine()
    engine.submit([seq])
    while seq.num_output < 8:
        engine.step()
    engine.settle()
    handed = engine.export_request(seq.id)
    other.import_request(handed, "there")
    check_bounds(other)
    live = other._outputs.live["there"].seq
    while other.has_work:
        other.step()
    assert live.num_cached >= 90
    check_bounds(other)
    assert len(live.tokens) == 110


def test_preempted_requests_go_on(model):
    engine = Engine(model, dataclasses.replace(CONFIG, num_pages=50, prefix_cache=False))
    engine.warm_up_first()
    seqs = [sequence(prompt(model, 50 * i, 60), 40) for i in range(3)]
    preempted = {}
    schedule = engine.scheduler.schedule

    def watched(now):
        plan = schedule(now)
        preempted.update({seq.id: seq.num_output + 1 for seq in (plan.preempted if plan else ())})
        return plan

    engine.scheduler.schedule = watched
    logprobs, rows = run(engine, *seqs)
    assert preempted
    for seq in seqs:
        begin = preempted.get(seq.id, 0)
        check(model, seq, logprobs[seq.id], rows[seq.id], begin)


def test_drafts_read_all_keys(model, make_engine):
    engine = make_engine(max_drafts=2)
    repeated = prompt(model, 0, 40)
    seqs = [sequence([*repeated, *repeated], 30), sequence(prompt(model, 90, 70), 30)]
    logprobs, rows = run(engine, *seqs)
    assert engine.stats()["draft_tokens_taken"] > 0
    assert len(rows[seqs[0].id]) < 29
    for seq in seqs:
        check(model, seq, logprobs[seq.id], rows[seq.id])


def test_bursts(model, make_engine):
    engine = make_engine(burst_steps=4)
    check_all(model, engine, *(sequence(prompt(model, 60 * i, 50), 18 + i) for i in range(2)))
    assert engine.stats()["steps"] > 0


def test_adapters(model):
    engine = Engine(model, dataclasses.replace(CONFIG, max_loras=2))
    engine.warm_up_first()
    tensors = lora.tensors(model.config, "a")
    engine.load_lora("a", models.make_lora(lora.CONFIG, tensors, model.config))
    seq = sequence(prompt(model, 50, 70), adapter_name="a")
    logprobs, rows = run(engine, seq)
    weights = models.make_lora(lora.CONFIG, tensors, model.config)
    merged = lora.merged(model.params, model.config, weights)
    check(model._replace(params=merged), seq, logprobs[seq.id], rows[seq.id])


def test_a_step_bounds_no_more_pages_than_a_request_has(model, device):
    assert device.buckets[0].selected.longest == CONFIG.num_pages
    short = model._replace(config=model.config.limited(98))
    engine = Engine(short, CONFIG)
    assert engine.device.buckets[-1].selected.longest == 25
    engine.warm_up_first()
    check_all(short, engine, sequence(prompt(model, 50, 78), 20))


def test_sleep(model, make_engine):
    engine = make_engine()
    check_all(model, engine, sequence(prompt(model, 50, 70), 5))
    engine.sleep(weights=False)
    assert not engine.device._page_bounds
    engine.wake()
    check_all(model, engine, sequence(prompt(model, 50, 70), 5))


def test_on_other_devices_and_over_two():
    run_on_cpus(2, "import test_quest as t; t.check_devices()")


def check_devices():
    """Runs in a process with two devices."""
    model = shallow(models.load(models.BUNDLED, dtype="float32"), DENSE + 2)
    for options, parts in (({"devices": (jax.devices()[1],)}, 1), ({"tensor_parallel": 2}, 2)):
        engine = Engine(model, dataclasses.replace(CONFIG, **options))
        engine.warm_up_first()
        check_all(model, engine, sequence(prompt(model, 50, 80), 20), parts=parts)


def test_the_bounds_are_written_in_place(device):
    pool, bounds = device._k_pages.nbytes, device._page_bounds[0].nbytes
    written = {"bounds of pages": bounds, "forward, 16 tokens x 4 sequences": 2 * pool + bounds}
    for name, num_bytes in written.items():
        memory = device._executables[name].memory_analysis()
        assert memory.alias_size_in_bytes >= num_bytes
        assert memory.temp_size_in_bytes < pool


def test_memory_of_the_bounds_is_set_aside(model, device):
    (bounds,), none = device._page_bounds, {"page_size": PAGE, "dtype": "float32"}
    plain, selecting = (
        _options.from_keywords(none | more) for more in ({}, {"kv_select": "quest:pages=6"})
    )
    assert _sizing._bytes_of_bounds(model.config, selecting) * CONFIG.num_pages == bounds.nbytes
    assert _sizing._bytes_of_bounds(model.config, plain) == 0
    # They go neither to the host nor to files.
    sizes = [_sizing.bytes_of_page(model.config, args) for args in (plain, selecting)]
    assert sizes[0] == sizes[1]
    held = jax.tree.leaves((device._weights, device.pages, bounds))
    assert sum(device.bytes_held().values()) == sum(array.nbytes for array in held)


def test_an_engine_is_made_with_memory_for_the_bounds(model):
    sizes = {"page_size": PAGE, "max_running": 2, "max_step_tokens": 16, "dtype": "float32"}
    args = _options.from_keywords(sizes | {"kv_select": "quest:pages=6"})
    limit = _sizing._CPU_BYTES // 200
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_sizing, "_CPU_BYTES", limit)
        engine = _sizing.make_engine(model, args)._engine
    k_pages, v_pages = engine.device.pages
    held = k_pages.nbytes + v_pages.nbytes + engine.device._page_bounds[0].nbytes
    assert 0.95 * limit < held <= limit


def test_files_are_of_one_selection(model, tmp_path):
    options = {"page_size": PAGE, "host_cache_bytes": 1 << 30, "file_cache_bytes": 1 << 30}
    made = set()
    for name, selection in enumerate((None, "quest:pages=6", "quest:pages=7")):
        more = {"file_cache": str(tmp_path / str(name)), "kv_select": selection}
        args = _options.from_keywords(options | {"dtype": "float32"} | more)
        made.add(_sizing._file_store(model, args)._model)
    assert len(made) == 3


def test_llm(whole_model, directory):
    with LLM(whole_model, directory=directory, **SMALL, kv_select="quest:pages=3") as llm:
        params = jax_attn.SamplingParams(
            max_tokens=20, temperature=0, ignore_eos=True, n=2, grammar="start: /[a-z ]+/"
        )
        outputs = llm.generate([prompt(whole_model, 30, 120)], params)
        assert {len(output.tokens) for output in outputs} == {20}


@pytest.mark.parametrize("text", ["quest", "quest:", "quest:pages=x", "quest:keep=3", "h2o:keep=9"])
def test_a_selection_that_there_is_not_is_refused(text):
    with pytest.raises(ValueError, match="expected quest:pages=64, got "):
        kv_policies.parse_selection(text)
    with pytest.raises(ValueError, match="--kv-select: expected quest:pages=64, got "):
        _options.from_keywords({"kv_select": text})


def test_one_page_is_refused():
    with pytest.raises(ValueError, match="quest: pages: expected at least 2, the last page and"):
        kv_policies.parse_selection("quest:pages=1")
    args = _options.from_keywords({"kv_select": "quest:pages=9"})
    assert _options.engine_config(50, args).kv_select == Quest(9)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"kv_dtype": "int8"}, "kv_dtype: expected None with kv_select, got int8"),
        ({"context_parallel": 2}, "context_parallel: expected 1 with kv_select, got 2"),
        ({"batch_invariant": True}, "batch_invariant: expected False with kv_select, got True"),
        ({"kv_policy": parse("h2o:keep=9")}, "kv_policy: expected None with kv_select, got Promp"),
        ({"expert_group": object()}, "experts of several engines: expected False with kv_select"),
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
def test_models_that_do_not_have_all_keys_are_refused(model, of_layer, of_model, reason):
    layers = tuple(dataclasses.replace(kind, **of_layer) for kind in model.config.layers)
    config = dataclasses.replace(model.config, layers=layers, **of_model)
    with pytest.raises(ValueError, match=f"kv_select: expected None, as llama has {reason}, got"):
        Engine(model._replace(config=config), CONFIG)


@pytest.mark.parametrize(
    "beside, name",
    [("processes", "several processes"), ("draft_model", "a draft model"), ("vision", "pictures")],
)
def test_what_does_not_go_with_it_is_refused(model, beside, name):
    config = dataclasses.replace(CONFIG, max_drafts=2)
    with pytest.raises(ValueError, match=f"{name}: expected False with kv_select, got True"):
        Engine(model, config, **{beside: model})
