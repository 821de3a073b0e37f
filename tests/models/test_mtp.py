"""A layer for multi-token prediction: its logits are those of transformers, chunk by chunk."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_attn as ja
from helpers import model_cases, mtp_cases
from jax_attn import models

pytest.importorskip("safetensors.numpy")
pytest.importorskip("tokenizers")

TOLERANCE = 1e-4  # part of the largest logit: both sides sum in chunks of their own
CHUNK, PAGE_SIZE = 16, 4
PAGES = np.random.default_rng(0).permutation(15)[: -(-model_cases.NUM_TOKENS // PAGE_SIZE)]
QUICK = {"xla_backend_optimization_level": 0}


@functools.cache
def step_of(config):
    """A jitted `forward`. Its cache is not donated."""
    return jax.jit(functools.partial(models.forward, config=config), compiler_options=QUICK)


def plans_of(config, begin, end):
    specs = models.attention_specs(
        config, dtype="float32", page_size=PAGE_SIZE, max_batch=1, max_qo_tokens=CHUNK,
        max_kv_pages=len(PAGES),
    )  # fmt: skip
    table = PAGES[: -(-end // PAGE_SIZE)]
    batch = [0, end - begin], [end], [0, len(table)], table
    return specs, tuple(ja.plan(spec, *map(np.asarray, batch)) for spec in specs)


def padded(values, fill):
    values = np.asarray(values)
    widths = [(0, CHUNK - len(values))] + [(0, 0)] * (values.ndim - 1)
    return jnp.asarray(np.pad(values, widths, constant_values=fill))


def model_pages(params, config, tokens):
    """The pages of a model that has read the tokens in chunks, with hidden states in them."""
    config = dataclasses.replace(config, keeps_hidden=True)
    specs, _ = plans_of(config, 0, 1)
    pages = jax.tree.map(lambda x: x + np.nan, models.init_pages(config, specs, 15))
    states = models.init_states(config, 1, "float32")
    spec = models.state_spec(config, dtype="float32", max_tokens=CHUNK, max_batch=1, num_slots=1)
    for begin in range(0, len(tokens), CHUNK):
        end = min(begin + CHUNK, len(tokens))
        _, plans = plans_of(config, begin, end)
        more = {}
        if spec is not None:
            reads = [0 if begin else -1]
            plan = ja.plan_linear_attention(spec, np.array([0, end - begin]), reads, [0])
            more = {"states": states, "state_plan": plan}
        _, k_pages, v_pages, *new = step_of(config)(
            params,
            tokens=padded(tokens[begin:end], -1),
            positions=padded(np.arange(begin, end), 7),
            k_pages=pages[0],
            v_pages=pages[1],
            plans=plans,
            logit_rows=jnp.zeros(1, jnp.int32),
            **more,
        )
        pages, states = (k_pages, v_pages), new[0] if new else None
    return config, pages


def guessed(params, own, config, pages, tokens):
    """The layer's logits [len - 1, vocab], its last rows with its own hidden states."""
    specs, _ = plans_of(own, 0, 1)
    cache = jax.tree.map(lambda x: x + np.nan, models.init_pages(own, specs, 15))
    num_rows, logits, made = len(tokens) - 1, [], None
    ends = [*range(5, num_rows - mtp_cases.NUM_GUESSED, 11)]
    ends += range(num_rows - mtp_cases.NUM_GUESSED, num_rows + 1)
    for begin, end in zip([0, *ends], ends, strict=False):
        at = np.arange(begin, end)
        if begin >= num_rows - mtp_cases.NUM_GUESSED:
            hidden = made[None, -1]
        else:
            rows = PAGES[at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE
            hidden = models.kept_hidden(*pages, rows, config)
        _, plans = plans_of(own, begin, end)
        found, *cache, made = step_of(own)(
            params,
            tokens=padded(tokens[at + 1], -1),
            positions=padded(at, 7),
            k_pages=cache[0],
            v_pages=cache[1],
            plans=plans,
            logit_rows=jnp.arange(end - begin),
            hidden=padded(hidden, np.nan),
        )
        logits.append(np.asarray(found))
    return np.concatenate(logits)


def difference(name, directory, change=lambda params: params):
    config, own = mtp_cases.write(directory, mtp_cases.CONFIGS[name])
    params = models.load_params(directory, config, "float32")
    tokens = model_cases.tokens()
    config, pages = model_pages(params, config, tokens)
    of_layer = models.load_params(directory, own, "float32")
    shared = {x: params[x] for x in ("embed", "head") if x in params}
    got = guessed(change(shared | of_layer), own, config, pages, tokens)[mtp_cases.ROWS]
    expected = np.load(mtp_cases.LOGITS)[name]
    assert got.shape == expected.shape and np.isfinite(got).all()
    return np.abs(got - expected).max() / np.abs(expected).max()


@pytest.mark.parametrize("name", mtp_cases.CONFIGS)
def test_agrees_with_transformers(name, tmp_path):
    assert difference(name, tmp_path) < TOLERANCE


MISTAKES = {
    "the norms the other way round": lambda p: (
        p | {"mtp_hidden_norm": p["mtp_embedding_norm"], "mtp_embedding_norm": p["mtp_hidden_norm"]}
    ),
    "hidden state before embedding": lambda p: p | {"mtp_in": jnp.roll(p["mtp_in"], 32, axis=0)},
    "the last norm without weights": lambda p: p | {"final_norm": p["final_norm"] * 0},
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_logits_tell_mistakes(mistake, tmp_path):
    assert difference("qwen3.5", tmp_path, MISTAKES[mistake]) > 100 * TOLERANCE


@pytest.mark.parametrize("name", mtp_cases.CONFIGS)
def test_the_recorded_logits_are_not_out_of_date(name):
    pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    import make_mtp

    found = make_mtp.logits(mtp_cases.CONFIGS[name], model_cases.tokens())[mtp_cases.ROWS]
    recorded = np.load(mtp_cases.LOGITS)[name]
    assert np.abs(found - recorded).max() < TOLERANCE * np.abs(recorded).max()


# ---- files -------------------------------------------------------------------------------------


def test_files_with_pictures_and_copies_of_the_embedding(tmp_path):
    """The layer's names have no prefix, and copies of what it shares are passed over."""
    raw = {"model_type": "qwen3_5", "text_config": mtp_cases.CONFIGS["qwen3.5"]}
    config, own = mtp_cases.write(tmp_path, raw | {"tie_word_embeddings": True})
    assert config.tensor_prefix == "model.language_model."
    with_prefix = models.load_params(tmp_path, own, "float32")
    assert set(with_prefix) == {
        "mtp_in", "mtp_embedding_norm", "mtp_hidden_norm", "final_norm", "layers",
    }  # fmt: skip
    assert len(models.load_params(tmp_path, config, "float32")["layers"]) == 4

    copy = np.zeros((48, 32), np.float32)
    copies = {f"model.layers.3.{x}.weight": copy for x in ("embed_tokens", "shared_head.head")}
    _, own = mtp_cases.write(tmp_path, mtp_cases.CONFIGS["deepseek v3"], **copies)
    assert "router" in models.load_params(tmp_path, own, "float32")["layers"][0]


@pytest.mark.parametrize(
    "name, message",
    [
        ("mtp.layers.1.mlp.up_proj.weight", " is no part of a qwen3_5_text model"),
        ("mtp.embed_tokens.weight.x", " is no part of a qwen3_5_text model"),
        ("mtp.fc.weight", r": expected shape \(32, 64\), got \(3,\)"),
    ],
)
def test_files_that_are_refused(name, message, tmp_path):
    wrong = {name: np.zeros(3, np.float32)}
    _, own = mtp_cases.write(tmp_path, mtp_cases.CONFIGS["qwen3.5"], **wrong)
    with pytest.raises(models.ModelDirectoryError, match=f"tensor '{name}'{message}"):
        models.load_params(tmp_path, own, "float32")


def test_files_without_such_a_layer(tmp_path):
    config = model_cases.write(tmp_path, model_cases.CONFIGS["qwen3.5"])
    with pytest.raises(
        models.ModelDirectoryError, match="'mtp.fc.weight' is missing, with 14 more"
    ):
        models.load_params(tmp_path, models.mtp_config(config), "float32")
    llama = models.parse_config(model_cases.CONFIGS["llama"])
    with pytest.raises(ValueError, match="files have layers for it, such as .*, got llama[.]"):
        models.mtp_config(llama)


def test_states_are_for_such_layers_alone():
    config = models.parse_config(model_cases.CONFIGS["qwen3.5"])
    for each, hidden in ((config, jnp.zeros((1, 32))), (models.mtp_config(config), None)):
        with pytest.raises(ValueError, match="forward: hidden: expected (None|states), as config"):
            models.forward({}, each, *[None] * 6, hidden=hidden)
