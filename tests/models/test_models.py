"""Every family of models: against transformers, and the paged forward pass against the dense one.

What transformers computes comes from tests/data; where torch and transformers are installed it is
computed again, and models go through the files that transformers writes.
"""

import dataclasses
import functools
import operator
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_attn as ja
from helpers import model_cases
from helpers.paths import DATA, ROOT
from jax_attn import models
from jax_attn.models._layers import decoder, experts, latent

pytest.importorskip("safetensors.numpy")
pytest.importorskip("tokenizers")

SHIPPED = models.BUNDLED
SHARDED = DATA / "llama3_sharded"

# Of the largest logit. Measured: up to 2e-5 between us and transformers (DeepSeek, whose experts'
# sum is not normalised; 7e-6 without), 1e-6 between our two.
TOLERANCE = 4e-5

every_model = pytest.mark.parametrize("name", model_cases.CONFIGS)
# Most of the time of these tests is compilation, so that less of it is better.
QUICK = {"xla_backend_optimization_level": 0}
reference = jax.jit(models.reference_forward, static_argnames="config", compiler_options=QUICK)


def largest_difference(got, expected) -> float:
    """As a part of the largest expected number."""
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.shape == expected.shape and np.isfinite(got).all()
    return float(np.abs(got - expected).max() / np.abs(expected).max())


def load_case(name: str, directory: Path) -> tuple[models.ModelConfig, models.Params]:
    config = model_cases.write(directory, model_cases.CONFIGS[name])
    return config, models.load_params(directory, config, "float32")


@pytest.mark.parametrize("sizes", [[3, 0, 70, 1], [0, 0, 0, 5], [33, 32, 31, 1], [0, 0, 0, 0]])
def test_each_row_meets_the_matrix_of_its_group(sizes):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(sum(sizes), 8)).astype(np.float32)
    weights = rng.normal(size=(4, 8, 5)).astype(np.float32)
    got = jax.jit(experts.grouped_matmul)(x, weights, np.array(sizes, np.int32))
    expected = np.einsum("ni,nio->no", x, weights[np.repeat(np.arange(4), sizes)])
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


# ---- transformers ------------------------------------------------------------------------------


@every_model
def test_agrees_with_transformers(name, tmp_path):
    config, params = load_case(name, tmp_path)
    logits = reference(params, config, model_cases.tokens())[:: model_cases.LOGITS_EVERY]
    assert largest_difference(logits, np.load(model_cases.LOGITS)[name]) < TOLERANCE


@every_model
def test_agrees_with_transformers_live(name, tmp_path):
    """And reads the directory that transformers saves; the recorded logits are not out of date."""
    pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    import make_model_logits

    model = make_model_logits.transformers_model(model_cases.CONFIGS[name])
    tokens = model_cases.tokens()
    expected = make_model_logits.logits(model, tokens)
    recorded = np.load(model_cases.LOGITS)[name]
    assert largest_difference(expected[:: model_cases.LOGITS_EVERY], recorded) < TOLERANCE

    model.save_pretrained(tmp_path)
    config = models.load_config(tmp_path)
    # What stood in the keys of transformers 4 or was a default there, means the same.
    assert config == models.parse_config(model_cases.CONFIGS[name] | special_tokens(tmp_path))
    params = models.load_params(tmp_path, config, "float32")
    assert largest_difference(reference(params, config, tokens), expected) < TOLERANCE
    specs = small_specs(config)
    (paged,) = run_in_chunks(params, config, specs, [tokens], np.random.default_rng(0))
    assert largest_difference(paged, expected) < TOLERANCE


def special_tokens(directory: Path) -> dict:
    config = models.load_config(directory)
    return {"bos_token_id": config.bos_token, "eos_token_id": list(config.eos_tokens)}


def change_layers(**changes):
    def change(config: models.ModelConfig) -> models.ModelConfig:
        layers = tuple(dataclasses.replace(kind, **changes) for kind in config.layers)
        return dataclasses.replace(config, layers=layers)

    return change


def change_windows(by: int):
    def change(config: models.ModelConfig) -> models.ModelConfig:
        windows = [kind.window and kind.window + by for kind in config.layers]
        layers = [
            dataclasses.replace(kind, window=window)
            for kind, window in zip(config.layers, windows, strict=True)
        ]
        return dataclasses.replace(config, layers=tuple(layers))

    return change


def swap_ropes(config: models.ModelConfig) -> models.ModelConfig:
    one, other = config.kinds
    swapped = {one: models.LayerKind(other.rope, one.window)}
    swapped[other] = models.LayerKind(one.rope, other.window)
    return dataclasses.replace(config, layers=tuple(swapped[kind] for kind in config.layers))


def change(**changes):
    return lambda config: dataclasses.replace(config, **changes)


def change_experts(**changes):
    return lambda config: dataclasses.replace(
        config, experts=dataclasses.replace(config.experts, **changes)
    )


def change_groups(**changes):
    return lambda config: change_experts(
        groups=dataclasses.replace(config.experts.groups, **changes)
    )(config)


def change_scaling(**changes):
    def change(config: models.ModelConfig) -> models.ModelConfig:
        rope = config.layers[0].rope
        scaling = dataclasses.replace(rope.scaling, **changes)
        return change_layers(rope=dataclasses.replace(rope, scaling=scaling))(config)

    return change


MISTAKES = {
    "window 1 longer": ("mistral window", change_windows(1)),
    "window 1 shorter": ("gemma3", change_windows(-1)),
    "all layers windowed": ("gemma2", change_layers(window=7)),
    "no window": ("qwen2 windows above", change_layers(window=None)),
    "no attention soft cap": ("gemma2", change(attention_soft_cap=0.0)),
    "no logit soft cap": ("gemma2", change(logit_soft_cap=0.0)),
    "norms without their 1": ("gemma3", change(norm_offset=0.0)),
    "norms with a 1": ("qwen3", change(norm_offset=1.0)),
    "no post norms": ("gemma2", change(post_norms=False)),
    "no q, k norm": ("qwen3", change(qk_norm="none")),
    "no qkv bias": ("qwen2 tied", change(qkv_bias=False)),
    "no o bias": ("llama bias tied, llama3 rope", change(o_bias=False)),
    "scale of another head_dim": ("gemma3", change(sm_scale=1 / 4)),
    "no embedding scale": ("gemma3", change(embedding_scale=1.0)),
    "activation": ("gemma2", change(activation="silu")),
    "ropes swapped": ("gemma3", swap_ropes),
    "no rope scaling": ("llama mha, linear rope", change_layers(rope=models.Rope(1000.0))),
    "no llama3 rope scaling": (
        "llama bias tied, llama3 rope",
        change_layers(rope=models.Rope(500.0)),
    ),
    "no yarn": ("olmo2 bias, yarn", change_layers(rope=models.Rope(100.0))),
    "yarn without amplitude": ("gpt-oss", change_scaling(attention_factor=1.0)),
    "yarn truncated": ("gpt-oss", change_scaling(truncate=True)),
    "no longrope": ("phi3 long, partial", change_layers(rope=models.Rope(1e4, fraction=0.75))),
    "all of a head rotates": ("phi3 long, partial", change_layers(rope=models.Rope(1e4))),
    "rope in all layers": ("smollm3 windows", change_layers(rope=models.Rope(1000.0))),
    "pre norms": ("olmo2", lambda config: dataclasses.replace(config, post_norms=False)),
    "no residual scale": ("granite", change(residual_scale=1.0)),
    "no logit scale": ("granite", change(logit_scale=1.0)),
    "expert probabilities as they are": ("mixtral window", change_experts(normalize=False)),
    "expert probabilities made 1": ("qwen3 moe, some dense", change_experts(normalize=True)),
    "an expert less": ("qwen3 moe", change_experts(per_token=2)),
    "groups by their best": ("deepseek v3", change_groups(by_two=False)),
    "all groups": ("deepseek v2 groups, yarn", change_groups(chosen=4)),
    "softmax of a router": ("deepseek v3", change_experts(sigmoid=False)),
    "no scale of experts": ("deepseek v2 groups, yarn", change_experts(scale=1.0)),
    "no mscale": ("deepseek v3", change(sm_scale=20**-0.5)),
    "no sinks": ("gpt-oss", change(sinks=False)),
    "another limit": ("gpt-oss", change(activation_limit=2.0)),
    "plain silu": ("gpt-oss", change(activation="silu")),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_logits_of_transformers_tell(mistake, tmp_path):
    """A mistake in any part of a model is far outside the tolerance."""
    name, change = MISTAKES[mistake]
    config, params = load_case(name, tmp_path)
    wrong = reference(params, change(config), model_cases.tokens())
    expected = np.load(model_cases.LOGITS)[name]
    assert largest_difference(wrong[:: model_cases.LOGITS_EVERY], expected) > 100 * TOLERANCE


def test_sharded_directory_agrees_with_transformers():
    config = models.load_config(SHARDED)
    assert config.layers[0].rope.scaling == models.Llama3Scaling(4.0, 1.0, 4.0, 64)
    assert not config.tie_embeddings
    params = models.load_params(SHARDED, config, "float32")
    expected = np.load(SHARDED / "expected.npz")
    logits = models.reference_forward(params, config, expected["tokens"])
    np.testing.assert_allclose(logits[::10], expected["logits"], rtol=0, atol=2e-5)


def test_shipped_model_agrees_with_transformers():
    """Greedy continuation by transformers 5.17, in f32."""
    model = models.load(SHIPPED, "float32")
    prompt = 'import os\n\n\ndef main(argv):\n    """Return the name of the file."""\n    for'
    tokens = [0, *model.tokenizer.encode(prompt).ids]
    continuation = (
        " arg in sys.argv:\n        if not arg.startswith('argv'):\n            raise ValueError(\""
        'Cannot run this file")\n        return None\n\n    if not sys.argv:\n        return '
        "sys.argv[0]\n\n    if not sys.argv:\n        return sys.argv[1]\n\n    if"
    )
    tokens += model.tokenizer.encode(continuation).ids
    greedy = models.reference_forward(model.params, model.config, np.array(tokens)).argmax(-1)
    num_new = len(model.tokenizer.encode(continuation).ids)
    assert model.tokenizer.decode(greedy[-num_new - 1 : -1]) == continuation


# ---- the paged forward pass --------------------------------------------------------------------


def small_specs(
    config, page_size: int = 4, dtype: str = "float32", kv_dtype: str | None = None
) -> tuple[ja.AttentionSpec, ...]:
    return models.attention_specs(
        config,
        dtype=dtype,
        kv_dtype=kv_dtype,
        page_size=page_size,
        max_batch=4,
        max_qo_tokens=24,
        max_kv_pages=300,
    )


def run_in_chunks(params, config, specs, sequences, rng) -> list[np.ndarray]:
    """Logits of every token, by random chunks of random requests a step, in scattered pages.

    The cache and the padding start as poison: NaN pages, void tokens and positions.
    """
    step = jax.jit(
        models.forward,
        static_argnames="config",
        donate_argnames=("k_pages", "v_pages"),
        compiler_options=QUICK,
    )
    page_size, max_tokens = specs[0].page_size, specs[0].max_qo_tokens
    max_pages = [-(-len(sequence) // page_size) for sequence in sequences]
    num_pages = sum(max_pages) + 3
    ids = rng.permutation(num_pages)[: sum(max_pages)]
    pages = np.split(ids, np.cumsum(max_pages)[:-1])
    empty = models.init_pages(config, specs, num_pages)
    k_pages, v_pages = jax.tree.map(lambda x: x + np.nan, empty)
    done = [0] * len(sequences)
    logits: list[list[np.ndarray]] = [[] for _ in sequences]
    while any(n < len(sequence) for n, sequence in zip(done, sequences, strict=True)):
        budget, batch = max_tokens, []
        for r in rng.permutation(len(sequences)):
            n = min(int(rng.choice([0, 1, 5, 20])), len(sequences[r]) - done[r], budget)
            if rng.random() < 0.8:  # and sometimes a request that gets nothing
                batch.append((r, n))
                budget -= n
        qo_indptr = np.append(0, np.cumsum([n for _, n in batch])).astype(np.int32)
        kv_lens = np.array([done[r] + n for r, n in batch], np.int32)
        num_pages_each = -(-kv_lens // page_size)
        page_indices = np.concatenate(
            [np.empty(0, np.int32)]
            + [pages[r][:n] for (r, _), n in zip(batch, num_pages_each, strict=True)]
        )
        tokens = rng.integers(0, config.vocab_size, max_tokens, np.int32)
        positions = rng.integers(0, 1000, max_tokens, np.int32)
        for i, (r, n) in enumerate(batch):
            rows = slice(qo_indptr[i], qo_indptr[i + 1])
            tokens[rows] = sequences[r][done[r] : done[r] + n]
            positions[rows] = np.arange(done[r], done[r] + n)
        page_indptr = np.append(0, np.cumsum(num_pages_each))
        lengths_and_pages = (qo_indptr, kv_lens, page_indptr, page_indices.astype(np.int32))
        plans = tuple(ja.plan(spec, *lengths_and_pages) for spec in specs)
        all_rows = np.arange(max_tokens, dtype=np.int32)
        step_logits, k_pages, v_pages = step(
            params, config, tokens, positions, k_pages, v_pages, plans, all_rows
        )
        for i, (r, n) in enumerate(batch):
            logits[r].append(np.asarray(step_logits[qo_indptr[i] : qo_indptr[i + 1]]))
            done[r] += n
    return [np.concatenate(parts) for parts in logits]


@every_model
def test_chunks_equal_reference(name, tmp_path):
    config, params = load_case(name, tmp_path)
    seed = list(model_cases.CONFIGS).index(name)
    rng = np.random.default_rng(seed)
    sequences = [rng.integers(0, config.vocab_size, n) for n in (1, 13, 29, model_cases.NUM_TOKENS)]
    specs = small_specs(config, page_size=(1, 7, 16, 48)[seed % 4])
    got = run_in_chunks(params, config, specs, sequences, rng)
    for sequence, logits in zip(sequences, got, strict=True):
        # Of one length, to compile once: what follows a token does not matter to it.
        padded = np.resize(sequence, model_cases.NUM_TOKENS)
        expected = reference(params, config, padded)[: len(sequence)]
        assert largest_difference(logits, expected) < TOLERANCE


def test_chunks_over_latent_rows_of_e4m3_equal_the_reference_of_rounded_rows(monkeypatch):
    """Without experts, of which it may choose others if a row differs in its last bit."""
    raw = model_cases.CONFIGS["deepseek v3"] | {"num_hidden_layers": 2, "first_k_dense_replace": 2}
    config = models.parse_config(raw)
    params = models.random_params(config, jax.random.key(0), "float32")
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, config.vocab_size, n) for n in (13, 29)]
    specs = small_specs(config, kv_dtype="float8_e4m3fn")
    got = run_in_chunks(params, config, specs, sequences, rng)
    plain = [reference(params, config, np.resize(sequence, 29)) for sequence in sequences]

    def on_host(x):
        x = np.asarray(x)
        return ja.reference.quantize(x).astype(x.dtype)

    class Rounded(latent.Projected):
        def rotated(self, angles):
            def rounded(x):  # on the host: XLA of jax 0.10 makes 0 of some least codes
                like = jax.ShapeDtypeStruct(x.shape, x.dtype)
                return jax.pure_callback(on_host, like, x)

            x = super().rotated(angles)
            return x._replace(ckv=rounded(x.ckv), k_rope=rounded(x.k_rope))

    monkeypatch.setattr(latent, "Projected", Rounded)

    @functools.partial(jax.jit, static_argnames="config")  # another function: it is traced anew
    def rounded_reference(params, config, tokens):
        return models.reference_forward(params, config, tokens)

    for sequence, logits, far in zip(sequences, got, plain, strict=True):
        n = len(sequence)
        near = rounded_reference(params, config, np.resize(sequence, 29))[:n]
        assert largest_difference(logits, near) < TOLERANCE < largest_difference(logits, far[:n])


@pytest.mark.parametrize("dtype, atol", [("float32", 1e-3), ("bfloat16", 0.5)])
def test_shipped_model_chunks_equal_reference(dtype, atol):
    model = models.load(SHIPPED, dtype)
    ids = [0, *model.tokenizer.encode(Path(decoder.__file__).read_text()).ids]
    sequences = [np.array(ids[:n]) for n in (3, 40, 233)]
    specs = small_specs(model.config, page_size=16, dtype=dtype)
    rng = np.random.default_rng(0)
    got = run_in_chunks(model.params, model.config, specs, sequences, rng)
    for sequence, logits in zip(sequences, got, strict=True):
        expected = reference(model.params, model.config, np.resize(sequence, 233))[: len(sequence)]
        np.testing.assert_allclose(logits, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen2 windows above"])
def test_cache_is_written_in_place(name):
    """No copy of anything as large as a layer's cache: with a scan, also over periods of layers."""
    config = models.parse_config(model_cases.CONFIGS[name])
    params = models.random_params(config, jax.random.key(0), "float32")
    specs = small_specs(config, page_size=16)
    k_pages, v_pages = models.init_pages(config, specs, num_pages=4096)
    plans = tuple(ja.plan(spec, [0, 1], [20], [0, 2], [5, 9]) for spec in specs)
    zeros = np.zeros(24, np.int32)
    compiled = (
        jax.jit(models.forward, static_argnames="config", donate_argnames=("k_pages", "v_pages"))
        .lower(params, config, zeros, zeros, k_pages, v_pages, plans, zeros[:2])
        .compile()
    )
    layer_bytes = k_pages.nbytes // config.num_layers
    assert compiled.memory_analysis().temp_size_in_bytes < layer_bytes
    shape = ",".join(map(str, k_pages.shape))
    copies = [line for line in compiled.as_text().splitlines() if " copy(" in line]
    assert not [line for line in copies if shape in line]


@every_model
def test_types_of_16_bits(name):
    """Activations stay in them (a scan would not have it otherwise); logits are f32."""
    config = models.parse_config(model_cases.CONFIGS[name])
    for dtype in ("bfloat16", "float16"):
        make = functools.partial(models.random_params, config, dtype=dtype)
        params = jax.eval_shape(make, jax.random.key(0))
        specs = small_specs(config, dtype=dtype)
        pages = models.init_pages(config, specs, num_pages=3)
        plans = tuple(ja.plan(spec, [0, 1], [1], [0, 1], [2]) for spec in specs)
        rows = np.zeros(specs[0].max_qo_tokens, np.int32)
        forward = jax.jit(models.forward, static_argnames="config")
        out = jax.eval_shape(forward, params, config, rows, rows, *pages, plans, rows[:2])
        assert out[0].dtype == jnp.float32
        assert {x.dtype for x in jax.tree.leaves(out[1:])} == {jnp.dtype(dtype)}
        assert out[0].shape == (2, config.vocab_size)


def test_plans_of_another_model_are_refused():
    config = models.parse_config(model_cases.CONFIGS["gemma2"])
    with pytest.raises(ValueError, match="forward: plans: expected 2, got 1"):
        models.forward({}, config, *[None] * 4, plans=(None,), logit_rows=None)


def test_random_params_are_like_loaded_ones(tmp_path):
    for name in model_cases.CONFIGS:
        config, params = load_case(name, tmp_path)
        make = functools.partial(models.random_params, config, dtype="float16")
        made = jax.eval_shape(make, jax.random.key(0))
        shape_of, is_leaf = operator.attrgetter("shape"), lambda x: hasattr(x, "shape")
        shapes = jax.tree.map(shape_of, params, is_leaf=is_leaf)  # of quantised ones, too
        assert jax.tree.map(shape_of, made) == shapes, name
        assert {w.dtype for w in jax.tree.leaves(made)} == {jnp.dtype("float16")}


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_logits_of_random_params_are_of_order_1(name):
    config = models.parse_config(model_cases.CONFIGS[name])
    params = models.random_params(config, jax.random.key(0), "float32")
    again = models.random_params(config, jax.random.key(0), "float32")
    jax.tree.map(np.testing.assert_array_equal, params, again)
    assert abs(float(params["final_norm"].mean()) + config.norm_offset - 1) < 0.1
    logits = reference(params, config, model_cases.tokens())
    assert 0.3 < float(jnp.std(logits)) < 3


def test_no_layer_copies_its_weights():
    """A decode is the reading of all weights once: not one matrix may be in what XLA allocates."""
    config = models.parse_config(
        model_cases.CONFIGS["llama"] | {"hidden_size": 256, "intermediate_size": 1024}
    )
    specs = models.attention_specs(
        config, dtype="float32", page_size=8, max_batch=2, max_qo_tokens=2, max_kv_pages=8
    )
    params = models.random_params(config, jax.random.key(0), "float32")
    pages = models.init_pages(config, specs, 8)
    plans = tuple(ja.plan(spec, [0, 1], [5], [0, 1], [0]) for spec in specs)
    tokens = jnp.zeros(2, jnp.int32)
    step = jax.jit(models.forward, static_argnames="config", donate_argnames=("k_pages", "v_pages"))
    lowered = step.lower(params, config, tokens, tokens, *pages, plans, tokens)
    memory = lowered.compile().memory_analysis()
    if not hasattr(memory, "temp_size_in_bytes"):
        pytest.skip("this jaxlib does not tell")
    workspaces = 4 * sum(spec.workspace_words for spec in specs)
    smallest = min(x.nbytes for x in jax.tree.leaves(params["layers"]) if x.ndim == 2)
    assert memory.temp_size_in_bytes - workspaces < smallest // 2


def test_the_benchmark_without_paged_attention_says_the_same():
    """benchmarks/peers/jax_nn_decoder.py is made of parts of the decoder."""
    path = ROOT / "benchmarks" / "peers" / "jax_nn_decoder.py"
    peer = runpy.run_path(str(path))
    model = models.load(SHIPPED, dtype="float32")
    prompts = np.random.default_rng(0).integers(1, 4096, (2, 9), dtype=np.int32)
    got = peer["run_batch"](model, prompts, num_steps=4, cache_len=16)
    for prompt, generated in zip(prompts, np.asarray(got), strict=True):
        tokens = np.concatenate([prompt, generated])
        logits = models.reference_forward(model.params, model.config, tokens)
        np.testing.assert_array_equal(np.argmax(logits, axis=-1)[len(prompt) - 1 : -1], generated)
