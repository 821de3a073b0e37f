"""New weights while the engine runs, pauses, sleep, and the meshes they come from."""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("llguidance", reason="needs the extra `serve`")

from helpers.mesh_checks import run_on_cpus
from helpers.small_llm import SMALL, check_at_rest
from jax_attn import LLM, SamplingParams, models
from jax_attn.llm import EngineStopped

GREEDY = SamplingParams(max_tokens=8, temperature=0)
PROMPT = list(range(300, 340))


def engine_of(llm):
    return llm._runtime.engine("", runs=False)._engine


def scaled(tree):
    """Other weights: a model that writes other texts."""
    return jax.tree.map(lambda x: (np.asarray(x) * 1.05 + 0.003).astype(x.dtype), tree)


@pytest.fixture(scope="module")
def new(model):
    """A second engine that was made with the new weights: the oracle."""
    changed = model._replace(params=jax.tree.map(jnp.asarray, scaled(model.params)))
    with LLM(changed, directory=models.BUNDLED, **SMALL) as made:
        yield made


@pytest.fixture(autouse=True)
def old_weights(request):
    if "llm" not in request.fixturenames:
        yield
        return
    llm, model = request.getfixturevalue("llm"), request.getfixturevalue("model")
    yield
    llm.resume()
    llm.update_params(model.params, version="0")
    llm.wake()
    check_at_rest(llm)


@pytest.mark.parametrize("form", ["params", "files", "flax", "numpy"])
def test_new_weights_are_those_of_an_engine_made_with_them(llm, new, model, files, form):
    params = {
        "params": lambda: jax.tree.map(jnp.asarray, scaled(model.params)),
        "files": lambda: {name: jnp.asarray(x) for name, x in scaled(files).items()},
        # nnx.State: nested, layers by number, each array the `value` of a variable.
        "flax": lambda: jax.tree.map(
            lambda x: {"value": jnp.asarray(x)},
            scaled(model.params) | {"layers": dict(enumerate(scaled(model.params["layers"])))},
        ),
        "numpy": lambda: scaled(files),
    }[form]()
    old = llm.generate([PROMPT], GREEDY)[0]
    assert llm.update_params(params) == llm.version != "0"
    [output] = llm.generate([PROMPT], GREEDY)
    [expected] = new.generate([PROMPT], GREEDY)
    assert output.tokens == expected.tokens != old.tokens
    assert output.num_cached_tokens == 0
    assert output.completions[0].versions == [llm.version] * 8
    for a, b in zip(engine_of(llm).device._weights, engine_of(new).device._weights, strict=True):
        np.testing.assert_array_equal(a, b)


def test_nothing_is_compiled_after_the_first_update(llm, model, files):
    arrays = {name: jnp.asarray(x) for name, x in scaled(files).items()}
    executables = dict(engine_of(llm).device._executables)
    llm.update_params(arrays)
    before = llm.stats()["compilations"]
    llm.update_params(arrays)
    llm.generate([PROMPT], GREEDY)
    assert llm.stats()["compilations"] == before
    assert engine_of(llm).device._executables == executables


def test_a_copy_is_the_engines_own_and_a_donation_takes_the_array(llm, model):
    """The trainer's next step writes into its arrays."""
    params = jax.tree.map(jnp.asarray, scaled(model.params))
    llm.update_params(params)
    [expected] = llm.generate([PROMPT], GREEDY)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))
    jax.jit(lambda x: jax.tree.map(jnp.zeros_like, x), donate_argnums=0)(params)
    assert llm.generate([PROMPT], GREEDY)[0].tokens == expected.tokens
    llm.update_params(again := jax.tree.map(jnp.asarray, scaled(model.params)), donate=True)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(again))
    assert llm.generate([PROMPT], GREEDY)[0].tokens == expected.tokens


def test_memory_of_numpy_is_copied(llm, model):
    params = scaled(model.params)
    llm.update_params(params)
    [expected] = llm.generate([PROMPT], GREEDY)
    for leaf in jax.tree.leaves(params):
        leaf[...] = 0
    assert llm.generate([PROMPT], GREEDY)[0].tokens == expected.tokens


def test_running_requests_go_on_with_the_new_weights(llm, new, model):
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True, logprobs=True)
    stream = llm.stream(PROMPT, params)
    tokens, versions = [], []

    def take(chunk):
        tokens.extend(chunk.tokens)
        versions.extend(chunk.versions)

    for _ in range(3):
        take(next(stream))
    llm.update_params(scaled(model.params), version="step 1")
    for chunk in stream:
        take(chunk)
    num_old = versions.count("0")
    assert 3 <= num_old < 30 and versions == ["0"] * num_old + ["step 1"] * (30 - num_old)
    rest = SamplingParams(max_tokens=30 - num_old, temperature=0, ignore_eos=True)
    [expected] = new.generate([PROMPT + tokens[:num_old]], rest)
    assert tokens[num_old:] == expected.tokens


def test_prefixes_are_kept_by_the_name_of_their_version(llm, model):
    llm.update_params(scaled(model.params), version="a")
    llm.generate([PROMPT], GREEDY)
    llm.update_params(model.params, version="b", keep_prefixes=True)
    assert [o.num_cached_tokens for o in llm.generate([PROMPT], GREEDY)] == [0]
    llm.update_params(scaled(model.params), version="a", keep_prefixes=True)
    assert [o.num_cached_tokens for o in llm.generate([PROMPT], GREEDY)] == [39]
    llm.update_params(scaled(model.params), version="a")
    assert [o.num_cached_tokens for o in llm.generate([PROMPT], GREEDY)] == [0]


def test_a_part_of_the_weights(llm, new, model, files):
    changed = {name: jnp.asarray(x) for name, x in scaled(files).items()}
    first = {name: x for name, x in changed.items() if ".layers." in name}
    llm.update_params(first, partial=True)
    expected, [found] = new.score([PROMPT])[0].logprobs, llm.score([PROMPT])
    assert found.version == llm.version and abs(found.logprobs - expected).max() > 0.01
    llm.update_params(
        {f"m/{name}": x for name, x in changed.items()} | {"m/step": jnp.zeros(3)},
        names=lambda name: name.removeprefix("m/"),
        filter=lambda name, array: "layers" not in name and "step" not in name,
        partial=True,
    )
    np.testing.assert_allclose(llm.score([PROMPT])[0].logprobs, expected, atol=1e-4)


Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "options", "sentence"),
    [
        (lambda p: p.pop("model.norm.weight"), {}, "got none for final_norm; partial=True keeps"),
        (
            lambda p: p.pop(Q),
            {},
            "k_proj.weight: expected with it all tensors that make layers.0.qkv",
        ),
        (lambda p: p.update({"x.y": p[Q]}), {}, "x.y: expected names of the model's weights"),
        (
            lambda p: p.update({Q: p[Q][1:]}),
            {},
            "q_proj.weight: expected an array of shape (512, 256)",
        ),
        (lambda p: p.update({Q: p[Q].astype(int)}), {}, "expected floating-point numbers, got int"),
        (lambda p: p.update({Q: "x"}), {}, "q_proj.weight: expected an array of shape"),
        (lambda p: None, {"version": ""}, "version: expected a name, got ''"),
        (
            lambda p: None,
            {"names": lambda name: "a"},
            "names: expected a name for each, got a twice",
        ),
    ],
)
def test_weights_that_do_not_fit_change_nothing(llm, files, change, options, sentence):
    before = llm.generate([PROMPT], GREEDY)[0]
    params = dict(files)
    change(params)
    with pytest.raises(ValueError) as raised:
        llm.update_params(params, **options)
    message = str(raised.value)
    assert message.startswith("update_params: ") and sentence in message and "\n" not in message
    [after] = llm.generate([PROMPT], GREEDY)
    assert after.tokens == before.tokens and after.num_cached_tokens == 39 and llm.version == "0"


def test_after_a_failure_amid_an_update_only_a_whole_one_helps(llm, new, model, monkeypatch):
    updates = engine_of(llm).device._updates
    convert, calls = updates.convert, []

    def failing(update, *, donate):
        calls.append(update)
        if len(calls) == 5:
            raise MemoryError("of a test")
        return convert(update, donate=donate)

    monkeypatch.setattr(updates, "convert", failing)
    with pytest.raises(MemoryError):
        llm.update_params(scaled(model.params))
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="generate: the engine lacks weights: update_params"):
        llm.generate([PROMPT])
    part = {"final_norm": model.params["final_norm"]}
    with pytest.raises(ValueError, match="expected every weight of the model"):
        llm.update_params(part, partial=True)
    llm.update_params(scaled(model.params))
    assert llm.generate([PROMPT], GREEDY)[0].tokens == new.generate([PROMPT], GREEDY)[0].tokens


# ---- pauses and memory ---------------------------------------------------------------------------


def running(llm, params):
    """A thread that generates, and the list that gets its outputs. Returns once it runs."""
    outputs = []

    def generate():
        try:
            outputs.extend(llm.generate([PROMPT], params))
        except EngineStopped as error:
            outputs.append(error)

    thread = threading.Thread(target=generate)
    steps = llm.stats()["steps"]
    thread.start()
    while llm.stats()["steps"] < steps + 3:
        time.sleep(0.001)
    return thread, outputs


LONG = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)


def test_a_pause_holds_requests_or_ends_them(llm):
    [expected] = llm.generate([PROMPT], LONG)
    thread, outputs = running(llm, LONG)
    llm.pause()
    steps = llm.stats()["steps"]
    waiting = threading.Thread(target=lambda: outputs.extend(llm.generate([PROMPT], GREEDY)))
    waiting.start()
    assert engine_of(llm)._pending is None and llm.stats()["steps"] == steps
    assert not outputs
    llm.resume()
    thread.join()
    waiting.join()
    assert sorted(len(output.tokens) for output in outputs) == [8, 200]
    assert max(outputs, key=lambda o: len(o.tokens)).tokens == expected.tokens
    thread, outputs = running(llm, LONG)
    llm.pause(end=True)
    thread.join()
    [completion] = outputs[0].completions
    assert completion.finish_reason == "abort"
    assert completion.tokens == expected.tokens[: len(completion.tokens)]
    llm.resume()
    assert llm.generate([PROMPT], GREEDY)[0].tokens == expected.tokens[:8]


def test_sleep_gives_memory_back_and_requests_go_on(llm, model):
    [expected] = llm.generate([PROMPT], LONG)
    held = sum(llm.stats()["device_bytes"].values())
    thread, outputs = running(llm, LONG)
    llm.sleep()
    device = engine_of(llm).device
    weights = sum(x.nbytes for x in device._weights)
    assert sum(device.bytes_held().values()) == weights < held
    with pytest.raises(RuntimeError, match="generate: the engine lacks pages: wake"):
        llm.generate([PROMPT])
    llm.sleep()  # it sleeps already
    llm.wake()
    thread.join()
    assert outputs[0].tokens == expected.tokens
    assert sum(llm.stats()["device_bytes"].values()) == held
    llm.sleep(weights=True)
    assert not sum(device.bytes_held().values())
    with pytest.raises(ValueError, match="wake: expected weights"):
        llm.wake()
    llm.update_params(model.params)
    llm.wake()
    assert llm.generate([PROMPT], GREEDY)[0].tokens == expected.tokens[:8]


def test_closing_does_not_wait_for_a_pause(model):
    llm = LLM(model, **SMALL)
    thread, outputs = running(llm, LONG)
    llm.pause()
    llm.close()
    thread.join()
    assert "closed" in str(outputs[0])


# ---- meshes --------------------------------------------------------------------------------------


def test_from_a_trainers_mesh_to_the_engines():
    run_on_cpus(4, "import mesh_llm_checks as m; m.check_resharding()")


@pytest.mark.parametrize("num_devices", [2, 4])
def test_bits_of_sampler_scorer_and_trainer_over_devices(num_devices):
    checks = f"m.check_bits({num_devices}, 'float32', 'bfloat16')"
    run_on_cpus(num_devices, f"import mesh_llm_checks as m; {checks}")
