"""LoRA adapters in the engine: batches of several, prefixes, loading, meshes, drafts."""

import jax
import numpy as np
import pytest

pytest.importorskip("llguidance", reason="needs the extra `serve`")

from helpers import lora
from helpers.mesh_checks import run_on_cpus
from helpers.model_cases import shallow
from helpers.small_llm import SMALL, check_at_rest
from jax_attn import LLM, SamplingParams, models

PROMPT = list(range(300, 340))


def greedy(adapter="", **more):
    return SamplingParams(**{"max_tokens": 8, "temperature": 0, "adapter": adapter} | more)


def logprobs_of(llm, adapter=""):
    params = SamplingParams(temperature=1.0, logprobs_of="model", adapter=adapter)
    return llm.score([PROMPT], params)[0].logprobs


@pytest.fixture(scope="module")
def small(model):
    return shallow(model)


@pytest.fixture(scope="module")
def adapters(small):
    """Tensors of adapters by name; "wide" has a rank of its own."""
    ranks = {"a": 4, "b": 4, "c": 4, "wide": 20}
    return {name: lora.tensors(small.config, name, rank) for name, rank in ranks.items()}


@pytest.fixture(scope="module")
def llm(small):
    with LLM(small, directory=models.BUNDLED, max_loras=2, **SMALL) as made:
        yield made


@pytest.fixture(autouse=True)
def without_adapters(request):
    yield
    if "llm" in request.fixturenames:
        llm = request.getfixturevalue("llm")
        for name in llm.loras:
            llm.unload_lora(name)
        check_at_rest(llm)


def load(llm, adapters, *names):
    for name in names:
        llm.load_lora(name, adapters[name], config=lora.CONFIG | {"r": 20 if name == "wide" else 4})


@pytest.fixture(scope="module")
def merged(small, adapters):
    """Tokens and logprobs of engines made with the merged weights: the oracle."""
    found = {}
    for name in ("a", "b"):
        adapter = models.make_lora(lora.CONFIG, adapters[name], small.config)
        params = lora.merged(small.params, small.config, adapter)
        whole = small._replace(params=params)
        with LLM(whole, directory=models.BUNDLED, **SMALL) as made:
            tokens = made.generate([PROMPT], greedy(max_tokens=30))[0].tokens
            found[name] = tokens, logprobs_of(made)
    return found


def test_adapters_of_one_batch_are_those_of_merged_weights(llm, adapters, merged):
    [plain] = llm.generate([PROMPT], greedy())
    load(llm, adapters, "a", "b")
    assert llm.loras == ["a", "b"]
    outputs = llm.generate([PROMPT] * 3, [greedy("a"), greedy(), greedy("b")])
    expected = [merged["a"][0][:8], plain.tokens, merged["b"][0][:8]]
    assert [output.tokens for output in outputs] == expected
    assert len({tuple(tokens) for tokens in expected}) == 3
    for name in "ab":
        np.testing.assert_allclose(logprobs_of(llm, name), merged[name][1], atol=1e-4)


def test_nothing_is_compiled_when_adapters_come_and_go(llm, adapters):
    before = llm.stats()["compilations"]
    load(llm, adapters, "a", "b")
    llm.generate([PROMPT] * 2, [greedy("a"), greedy("b")])
    llm.unload_lora("a")
    load(llm, adapters, "c")
    llm.generate([PROMPT] * 2, [greedy("c"), greedy()])
    assert llm.stats()["compilations"] == before


def test_prefixes_belong_to_an_adapter(llm, adapters):
    def cached(adapter):
        return llm.generate([PROMPT], greedy(adapter))[0].num_cached_tokens

    load(llm, adapters, "a", "b")
    cached("")
    assert [cached("a"), cached("a"), cached("b"), cached("b"), cached("")] == [0, 39, 0, 39, 39]
    # Other weights under the same name are another adapter.
    [before] = llm.generate([PROMPT], greedy("a"))
    llm.load_lora("a", adapters["c"], config=lora.CONFIG)
    [after] = llm.generate([PROMPT], greedy("a"))
    assert after.num_cached_tokens == 0 and after.tokens != before.tokens


def test_requests_go_on_with_the_adapter_that_they_began_with(llm, adapters, merged):
    load(llm, adapters, "a")
    stream = llm.stream(PROMPT, greedy("a", max_tokens=30, ignore_eos=True))
    tokens = list(next(stream).tokens)
    llm.load_lora("a", adapters["b"], config=lora.CONFIG)
    with pytest.raises(ValueError, match="expected at most 2 adapters"):
        load(llm, adapters, "c")  # the old "a" is in use
    assert llm.generate([PROMPT], greedy("a"))[0].tokens == merged["b"][0][:8]
    llm.unload_lora("a")
    tokens += [token for chunk in stream for token in chunk.tokens]
    assert tokens[: len(merged["a"][0])] == merged["a"][0]
    load(llm, adapters, "c")


def test_preemption_keeps_the_adapter(small, adapters, merged):
    tight = SMALL | {"num_pages": 12}
    with LLM(small, directory=models.BUNDLED, max_loras=2, **tight) as llm:
        load(llm, adapters, "a", "b")
        params = [greedy(name, max_tokens=30) for name in "abab"]
        outputs = llm.generate([PROMPT] * 4, params)
        assert llm.stats()["preemptions"] > 0
        assert [o.tokens for o in outputs] == [merged[name][0] for name in "abab"]


def test_new_weights_below_an_adapter(llm, small, adapters):
    load(llm, adapters, "a")
    [before] = llm.generate([PROMPT], greedy("a"))
    scaled = jax.tree.map(lambda x: np.asarray(x) * np.float32(1.05), small.params)
    llm.update_params(scaled)
    changed = logprobs_of(llm, "a")
    llm.update_params(small.params)
    assert abs(changed - logprobs_of(llm, "a")).max() > 1e-3
    assert llm.generate([PROMPT], greedy("a"))[0].tokens == before.tokens


def test_directories_options_and_drafts(small, adapters, merged, tmp_path):
    """Adapters from the command line, with several tokens of a sequence in a step."""
    where = {name: lora.write(tmp_path / name, lora.CONFIG, adapters[name]) for name in "ab"}
    with LLM(small, directory=models.BUNDLED, lora=where, max_drafts=3, **SMALL) as llm:
        assert llm.loras == ["a", "b"]
        outputs = llm.generate([PROMPT] * 2, [greedy(name, max_tokens=30) for name in "ab"])
        assert [output.tokens for output in outputs] == [merged[name][0] for name in "ab"]
        with pytest.raises(ValueError, match="expected at most 2 adapters, the --max-loras"):
            llm.load_lora("c", where["a"])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"max_loras": 1, "max_lora_rank": 65},
            "LLM: --max-lora-rank: expected at most 64, got 65",
        ),
        ({"lora": {"a": "/nowhere"}}, "LLM: /nowhere: expected a directory, got none"),
        ({"lora": {"a": "/x", "b": "/y"}, "max_loras": 1}, "--max-loras: expected at least 2"),
        ({"lora": {"": "/x"}}, "argument --lora: expected NAME=DIR, got '=/x'"),
    ],
)
def test_options_that_do_not_fit(small, options, sentence):
    with pytest.raises(ValueError) as raised:
        LLM(small, **SMALL, **options)
    assert sentence in str(raised.value) and "\n" not in str(raised.value)


def test_calls_that_do_not_fit(llm, adapters, tmp_path):
    load(llm, adapters, "a")
    calls = {
        lambda: load(llm, adapters, "wide"): "lora: rank: expected at most 16, the --max-lora-rank",
        lambda: llm.load_lora("b", adapters["b"]): "config: expected one beside tensors, got None",
        lambda: llm.load_lora("b", tmp_path, config={}): "config: expected None",
        lambda: llm.load_lora("", adapters["b"], config=lora.CONFIG): "expected a name, got ''",
        lambda: llm.unload_lora("b"): "adapter: expected one of 'a', got 'b'",
        lambda: llm.generate([PROMPT], greedy("b")): "generate: adapter: expected one of 'a'",
        lambda: llm.score([PROMPT], greedy("b")): "score: adapter: expected one of 'a', got 'b'",
    }
    for call, sentence in calls.items():
        with pytest.raises(ValueError) as raised:
            call()
        assert sentence in str(raised.value) and "\n" not in str(raised.value)
    assert llm.loras == ["a"]


def test_an_engine_without_room_says_so(small, adapters):
    with LLM(small, **SMALL) as llm:
        with pytest.raises(ValueError, match="expected --max-loras of at least 1"):
            load(llm, adapters, "a")
        assert llm.loras == []


def test_over_two_devices():
    run_on_cpus(2, "import mesh_llm_checks as m; m.check_adapters()")
