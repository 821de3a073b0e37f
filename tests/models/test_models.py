"""Every family of models: against transformers, and the paged forward pass against the dense one.

The logits of transformers come from tests/data. If torch and transformers are installed, the logits
are computed again, and models go through the files that transformers writes.
"""

import dataclasses
import functools
import json
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
from jax_attn.models._config import config as models_config
from jax_attn.models._config.keys import Keys
from jax_attn.models._embedding import embedding
from jax_attn.models._layers import decoder, experts, latent
from jax_attn.models._layers.weight_updates import WeightUpdates
from jax_attn.models._products import panels, quantized

pytest.importorskip("safetensors.numpy")
pytest.importorskip("tokenizers")

SHIPPED = models.BUNDLED
SHARDED = DATA / "llama3_sharded"

# Part of the largest logit. Measured: up to 7e-6 between us and transformers, 1e-6 between our two.
TOLERANCE = 1.5e-5
# For models with recurrent layers, 4e-5 and 2e-5: both sides sum in chunks of their own.
RECURRENT_TOLERANCE = 1e-4
# For Gemma 3n and 4, 2.5e-5: scores are not scaled, so softmax is steep.
STEEP_TOLERANCE = 1e-4

every_model = pytest.mark.parametrize("name", model_cases.CONFIGS)
# These tests mostly compile, so less optimisation is faster.
QUICK = {"xla_backend_optimization_level": 0}
reference = jax.jit(models.reference_forward, static_argnames="config", compiler_options=QUICK)


def largest_difference(got, expected) -> float:
    """Relative to the largest expected number."""
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.shape == expected.shape and np.isfinite(got).all()
    return float(np.abs(got - expected).max() / np.abs(expected).max())


def tolerance(name: str) -> float:
    config = models.parse_config(model_cases.CONFIGS[name])
    if config.recurrent is not None:
        return RECURRENT_TOLERANCE
    return STEEP_TOLERANCE if config.v_norm else TOLERANCE


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("sizes", [[3, 0, 70, 1], [0, 0, 0, 5], [0, 0, 0, 0]])
def test_each_row_meets_the_panels_of_its_group(sizes, dtype):
    """Rows behind those of all groups are 0."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(sum(sizes) + 2, 40)), dtype)
    weights = jnp.asarray(rng.normal(size=(4, 40, 37)), dtype)
    stack = panels.to_panels(weights)
    assert stack.shape == weights.shape
    got = jax.jit(experts.grouped_matmul)(x, stack, np.array(sizes, np.int32))
    assert got.dtype == x.dtype and not np.asarray(got[sum(sizes) :], np.float32).any()
    alone = [panels.to_panels(each) for each in weights]
    for row, group in enumerate(np.repeat(np.arange(4), sizes)):
        expected = alone[group].product(x[row : row + 1], None)
        np.testing.assert_array_equal(got[row : row + 1], expected)  # the same bits


@pytest.mark.parametrize("sizes", [[3, -1, 2], [4, 0, 3]])
def test_group_sizes_that_are_refused(sizes):
    stack = panels.to_panels(jnp.ones((3, 8, 5)))
    with pytest.raises(Exception, match="group_rows: expected numbers >= 0 with a sum of at most"):
        jax.block_until_ready(stack.grouped_product(jnp.ones((6, 8)), np.array(sizes, np.int32)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("kind", "has_zeros"),
    [("int8", False), ("int8", True), ("int4", False), ("int4", True), ("e4m3", False)]
    + [("e2m1", False)],
)
def test_each_row_meets_the_codes_of_its_group(kind, has_zeros, dtype):
    """Columns that fill no panel, a last group of scales that is not full, groups without rows."""
    rng = np.random.default_rng(0)
    depth, columns, each, sizes = 40, 37, 16, [3, 0, 70, 1]
    rows = depth // quantized.codes_per_byte(kind)
    codes = rng.integers(0, 256, (4, rows, columns)).astype(np.uint8)
    if kind == "e4m3":
        codes[(codes & 127) == 127] = 0  # NaN
    scales = rng.uniform(0.5, 1, (4, 3, columns)).astype(np.float32)
    if kind == "e2m1":
        scales = rng.integers(120, 130, scales.shape).astype(np.uint8)
    zeros = rng.integers(0, 16, scales.shape).astype(np.uint8) if has_zeros else None
    codes = codes.view(np.int8) if kind == "int8" else codes
    weights = quantized.Quantized(codes, scales, zeros, None, kind, each)
    weights = jax.tree.map(jnp.asarray, weights)
    x = jnp.asarray(rng.normal(size=(sum(sizes) + 2, depth)), dtype)
    got = jax.jit(experts.grouped_matmul)(x, weights, np.array(sizes, np.int32))
    assert got.dtype == x.dtype and not np.asarray(got[sum(sizes) :], np.float32).any()
    wide = np.asarray(quantized.widen(weights, jnp.float32))
    of_rows = np.repeat(np.arange(4), sizes)
    expected = np.einsum("ni,nio->no", np.asarray(x, np.float32)[: sum(sizes)], wide[of_rows])
    tolerance = (1e-5 if dtype == "float32" else 4e-3) * abs(expected).max()
    np.testing.assert_allclose(np.asarray(got[: sum(sizes)], np.float32), expected, atol=tolerance)


def test_quantized_groups_under_transformations():
    """vmap, and derivatives in x forward and backward, against all matrices widened."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (4, 8, 5)).astype(np.uint8)
    scales = rng.uniform(0.5, 1, (4, 2, 5)).astype(np.float32)
    weights = jax.tree.map(jnp.asarray, quantized.Quantized(codes, scales, None, None, "int4", 8))
    xs = jnp.asarray(rng.normal(size=(2, 6, 16)), jnp.float32)
    sizes = jnp.array([[3, 0, 1, 2], [0, 6, 0, 0]])

    def plain(x, sizes):
        return jax.lax.ragged_dot(x, quantized.widen(weights, jnp.float32), sizes)

    got = jax.vmap(lambda x, sizes: quantized.grouped_product(x, weights, sizes))(xs, sizes)
    for i in range(2):
        np.testing.assert_allclose(got[i], plain(xs[i], sizes[i]), rtol=1e-5, atol=1e-4)

    def derivatives(product):
        x, of_x = xs[0], lambda x: product(x, sizes[0])
        _, forward = jax.jvp(of_x, (x,), (x[::-1],))
        return forward, jax.grad(lambda x: (of_x(x) ** 2).sum())(x)

    ours = derivatives(lambda x, sizes: experts.grouped_matmul(x, weights, sizes))
    for one, other in zip(ours, derivatives(plain), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-4)


def test_quantized_groups_of_no_depth_are_refused():
    weights = quantized.Quantized(
        jnp.zeros((2, 0, 5), jnp.int8), jnp.ones((2, 0, 5)), None, None, "int8", 8
    )
    with pytest.raises(Exception, match="quantized_groups: expected a depth > 0"):
        jax.block_until_ready(
            quantized.grouped_product(jnp.ones((3, 0)), weights, jnp.array([1, 2]))
        )


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantized_groups_are_gathered_for_few_rows(kind):
    """What a GPU computes with fewer rows than groups, beside the CPU's loop."""
    rng = np.random.default_rng(0)
    rows, each = 8 // quantized.codes_per_byte(kind), 8
    codes = rng.integers(0, 100, (6, rows, 5)).astype(np.int8 if kind == "int8" else np.uint8)
    scales = rng.uniform(0.5, 1, (6, 1, 5)).astype(np.float32)
    weights = jax.tree.map(jnp.asarray, quantized.Quantized(codes, scales, None, None, kind, each))
    x = rng.normal(size=(5, 8)).astype(np.float32)
    sizes = jnp.array([0, 2, 0, 1, 0, 1])
    got = experts._on_gpu(jnp.asarray(x), weights, sizes)
    expected = experts.grouped_matmul(jnp.asarray(x), weights, sizes)
    np.testing.assert_allclose(got[:4], expected[:4], rtol=1e-5, atol=1e-5)
    narrow = jax.make_jaxpr(experts._on_gpu)(x, weights, sizes)
    assert "ragged_dot" not in str(narrow) and "ragged_dot" in str(
        jax.make_jaxpr(experts._on_gpu)(np.tile(x, (2, 1)), weights, sizes)
    )


# ---- transformers ------------------------------------------------------------------------------


@every_model
def test_agrees_with_transformers(name, tmp_path):
    config, params = load_case(name, tmp_path)
    logits = reference(params, config, model_cases.tokens())[:: model_cases.LOGITS_EVERY]
    assert largest_difference(logits, np.load(model_cases.LOGITS)[name]) < tolerance(name)


def drop_foreign_tokens(directory, vocab_size):
    """Drops default tokens of transformers that the small vocabularies of our configs lack."""
    for path in (directory / "config.json", directory / "generation_config.json"):
        if path.exists():
            raw = json.loads(path.read_text())
            for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
                if np.any(np.array(raw.get(name) or 0) >= vocab_size):
                    raw[name] = None
            path.write_text(json.dumps(raw))


@every_model
def test_agrees_with_transformers_live(name, tmp_path):
    """Reads the directory that transformers saves; the recorded logits are not out of date."""
    pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    import make_model_logits

    model = make_model_logits.transformers_model(model_cases.CONFIGS[name])
    tokens = model_cases.tokens()
    expected = make_model_logits.logits(model, tokens)
    recorded = np.load(model_cases.LOGITS)[name]
    assert largest_difference(expected[:: model_cases.LOGITS_EVERY], recorded) < tolerance(name)

    model.save_pretrained(tmp_path)
    drop_foreign_tokens(tmp_path, model.config.vocab_size)
    config = models.load_config(tmp_path)
    # Keys of transformers 4, and its defaults, mean the same.
    parsed = models.parse_config(model_cases.CONFIGS[name] | special_tokens(tmp_path))
    assert dataclasses.replace(config, extra_layers=parsed.extra_layers) == parsed
    params = models.load_params(tmp_path, config, "float32")
    assert largest_difference(reference(params, config, tokens), expected) < tolerance(name)
    specs = small_specs(config)
    (paged,) = run_in_chunks(params, config, specs, [tokens], np.random.default_rng(0))
    assert largest_difference(paged, expected) < tolerance(name)


def special_tokens(directory: Path) -> dict:
    config = models.load_config(directory)
    return {"bos_token_id": config.bos_token, "eos_token_id": list(config.eos_tokens)}


def change_layers(**changes):
    def change(config: models.ModelConfig) -> models.ModelConfig:
        layers = tuple(dataclasses.replace(kind, **changes) for kind in config.layers)
        return dataclasses.replace(config, layers=layers)

    return change


def change_kind(window, **changes):
    """Changes the layers of a window."""

    def change(config: models.ModelConfig) -> models.ModelConfig:
        layers = [
            dataclasses.replace(kind, **changes) if kind.window == window else kind
            for kind in config.layers
        ]
        return dataclasses.replace(config, layers=tuple(layers))

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


def change_chunks(change):
    def change_all(config: models.ModelConfig) -> models.ModelConfig:
        layers = [
            dataclasses.replace(kind, window=kind.window and change(kind.window.length))
            for kind in config.layers
        ]
        return dataclasses.replace(config, layers=tuple(layers))

    return change_all


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


def change_altup(**changes):
    return lambda config: dataclasses.replace(
        config, altup=dataclasses.replace(config.altup, **changes)
    )


def change_groups(**changes):
    return lambda config: change_experts(
        groups=dataclasses.replace(config.experts.groups, **changes)
    )(config)


def change_recurrent(**changes):
    def change(config: models.ModelConfig) -> models.ModelConfig:
        layers = [
            kind
            if kind.recurrent is None
            else dataclasses.replace(kind, recurrent=dataclasses.replace(kind.recurrent, **changes))
            for kind in config.layers
        ]
        return dataclasses.replace(config, layers=tuple(layers))

    return change


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
    "norms of a hybrid without their 1": ("qwen3.5", change(norm_offset=0.0)),
    "all of a gated head rotates": ("qwen3.5", change_layers(rope=models.Rope(1000.0))),
    "shared expert, probabilities made 1": (
        "qwen3 next bias, few linear",
        change_experts(normalize=True),
    ),
    "no sinks": ("gpt-oss", change(sinks=False)),
    "another limit": ("gpt-oss", change(activation_limit=2.0)),
    "plain silu": ("gpt-oss", change(activation="silu")),
    "no gate of the shared expert": ("qwen2 moe", change_experts(shared_gate=False)),
    "windows in the dense layers": ("qwen2 moe", change_layers(window=7)),
    "yarn in the windows": ("olmo3", swap_ropes),
    "no norms after the layers": ("glm4", change(post_norms=False)),
    "all of a head rotates in pairs": (
        "glm4",
        change_layers(rope=models.Rope(1e3, interleaved=True)),
    ),
    "no norms of q, k": ("glm4 moe", change(qk_norm="none")),
    "no scale of sigmoids": ("glm4 moe", change_experts(scale=1.0)),
    "all groups of sigmoids": ("glm4 moe, groups", change_groups(chosen=4)),
    "windows nowhere": ("dots1", change_layers(window=None)),
    "rope without windows": ("exaone4", change_layers(rope=models.Rope(500.0))),
    "norms before": ("exaone4 full", change(post_norms=False)),
    "no bias after attention": ("seed oss, other biases", change(o_bias=False)),
    "softmax of experts": ("minimax m2", change_experts(sigmoid=False)),
    "sigmoid of experts": ("ernie4.5 moe", change_experts(sigmoid=True)),
    "no square": ("arcee", change(activation="silu")),
    "no temperature": ("ministral3", change_layers(temperature=None)),
    "a temperature too early": (
        "ministral3",
        change_layers(temperature=models_config.Temperature(0.7, 15)),
    ),
    "rope in a hybrid without": ("olmo hybrid", change_layers(rope=models.Rope(1e4))),
    "no rope in a hybrid": ("olmo hybrid bias, rope", change_layers(rope=None)),
    "norms before attention": ("olmo hybrid", change(post_norms=False)),
    "strength up to 1": ("olmo hybrid", change_recurrent(beta_scale=1.0)),
    "epsilon of the other norms": ("olmo hybrid", change_recurrent(norm_eps=None)),
    "groups of a gated norm": ("bamba bias", change_recurrent(norm="gate_last")),
    "no least step": ("nemotron-h", change_recurrent(dt_range=(0.0, 9.0))),
    "steps without a limit": (
        "falcon h1 gate before the norm",
        change_recurrent(dt_range=(0.4, 9.0)),
    ),
    "the gate after the norm": (
        "falcon h1 gate before the norm",
        change_recurrent(norm="gate_last"),
    ),
    "the gate before the norm": ("falcon h1 norms, bias", change_recurrent(norm="gate_first")),
    "no scale of what goes into a state": ("falcon h1", change_recurrent(in_scale=1.0)),
    "scales of B and C swapped": (
        "falcon h1",
        change_recurrent(part_scales=(0.8, 1.1, 0.7, 1.4, 1.2)),
    ),
    "no scale of steps": ("falcon h1", change_recurrent(part_scales=(0.8, 1.1, 1.4, 0.7, 1.0))),
    "no scale of k": ("falcon h1", change(sm_scale=8**-0.5)),
    "no scale before attention": ("falcon h1", change(attention_in_scale=1.0)),
    "no scale of gates": ("falcon h1", change(gate_scale=1.0)),
    "half of a head rotates not": ("bamba", change_layers(rope=models.Rope(1000.0))),
    "rope in granite 4": ("granite 4", change_layers(rope=models.Rope(1e4))),
    "rope beside states": ("kimi linear", change_layers(rope=models.Rope(1e4))),
    "no square in nemotron-h": ("nemotron-h moe", change(activation="silu")),
    "one slope for all layers": ("minimax", change_recurrent(slope=1.0)),
    "the residual before the norm": ("minimax", change(normed_residual=None)),
    "factors swapped": (
        "minimax",
        change(normed_residual=models_config.NormedResidual((0.9, 1.4), (1.3, 0.8), (1.1, 0.6))),
    ),
    "probabilities of LFM2 made 1": ("lfm2 moe bias", change_experts(normalize=True)),
    "no mscale of flash": ("glm4 moe lite", change(sm_scale=20**-0.5)),
    "LayerNorm without its mean": ("nemotron", change(layer_norm=False)),
    "LayerNorm without its 1": ("nemotron", change(norm_offset=0.0)),
    "LayerNorm without its bias": ("starcoder2", change(norm_bias=False)),
    "no bias of the MLP": ("starcoder2", change(mlp_bias=False)),
    "relu instead of gelu": ("nemotron bias, gelu", change(activation="relu2")),
    "another epsilon": ("stablelm", change(rms_norm_eps=1e-5)),
    "no norm of each head": ("stablelm parallel", change(qk_norm="none")),
    "one after the other": ("gpt-neox", change(parallel="")),
    "the MLP with the norm of attention": ("gpt-neox", change(parallel="same_norm")),
    "no residual scale of experts": ("granite moe", change(residual_scale=1.0)),
    "probabilities as they are": ("granite moe bias", change_experts(normalize=False)),
    "norms before RoPE": ("hunyuan", change(qk_norm_after_rope=False)),
    "a base without alpha": ("hunyuan", change_layers(rope=models.Rope(100.0))),
    "squared ReLU instead of xIELU": ("apertus", change(activation="relu2")),
    "softmax instead of the mixer": ("phimoe", change_experts(sparse_mixer=None)),
    "another jitter": ("phimoe", change_experts(sparse_mixer=0.15)),
    "no bias of the head": ("phimoe", change(head_bias=False)),
    "no mscale of longrope": ("phimoe longrope", change_scaling(amplitude=1.0)),
    "rope in every layer": (
        "cohere2",
        change_layers(rope=models.Rope(100.0, interleaved=True)),
    ),
    "norms of heads left out": ("cohere", change(qk_norm="none")),
    "no mean of parallel blocks": ("cohere2", change(layer_norm=False)),
    "a window instead of chunks": ("llama4", change_chunks(lambda length: length)),
    "longer chunks": ("llama4", change_chunks(lambda length: models_config.Chunk(length + 1))),
    "no norm after RoPE": ("llama4", change_layers(l2_norm=False)),
    "no temperature without RoPE": ("llama4", change_layers(temperature=None)),
    "a temperature one token late": (
        "llama4",
        change_layers(temperature=models_config.Temperature(0.7, 16)),
    ),
    "outputs of experts scaled": ("llama4", change_experts(scales_input=False)),
    "side by side": ("gpt-neox in turn", change(parallel="own_norm")),
    "no norm of v": ("gemma4", change(v_norm=False)),
    "scores scaled": ("gemma4", change(sm_scale=1 / 4)),
    "frequencies of the rotating part": (
        "gemma4",
        change_kind(None, rope=models.Rope(1e3, fraction=0.5)),
    ),
    "all of a global head rotates": ("gemma4", change_kind(None, rope=models.Rope(1e3))),
    "no scales of layers": ("gemma4", change(layer_scales=False)),
    "no inputs of layers": (
        "gemma4 per-layer inputs, shared keys",
        change(layer_inputs=None),
    ),
    "all of a gate": ("gemma3n", change_layers(sparsity=0.0)),
    "the active state not scaled": ("gemma3n", change_altup(scales_output=False)),
    "the first state active": ("gemma3n, another active state", change_altup(active=0)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_logits_of_transformers_tell(mistake, tmp_path):
    """A mistake in any part of a model is far outside the tolerance."""
    name, change = MISTAKES[mistake]
    config, params = load_case(name, tmp_path)
    wrong = reference(params, change(config), model_cases.tokens())
    expected = np.load(model_cases.LOGITS)[name]
    assert largest_difference(wrong[:: model_cases.LOGITS_EVERY], expected) > 100 * TOLERANCE


def without_gate(qkv):
    """The columns of the attention gate, behind those of v, made 0."""
    num_gate = model_cases.CONFIGS["qwen3.5"]["head_dim"] * 4
    return jnp.concatenate([qkv[:, :-num_gate], 0 * qkv[:, -num_gate:]], axis=1)


# A weight, and what a mistake in the code would make of it.
MISTAKES_IN_WEIGHTS = {
    "no attention gate": ("qwen3.5", "qkv", without_gate),
    "another decay": ("qwen3.5", "a_log", lambda x: x + 0.5),
    "no bias of the decay": ("qwen3.5", "dt_bias", lambda x: 0 * x),
    "strength and decay swapped": ("qwen3.5 moe", "ba", lambda x: jnp.roll(x, 4, axis=1)),
    "taps reversed": ("qwen3.5", "conv", lambda x: x[..., ::-1]),
    "no last tap": ("qwen3 next", "conv", lambda x: x.at[..., 0].set(0)),
    "gated norm with a 1": ("qwen3 next", "gated_norm", lambda x: x + 1),
    "q and k swapped": (
        "qwen3.5",
        "qkvz",
        lambda x: x[:, [*range(16, 32), *range(16), *range(32, 160)]],
    ),
    "heads of v one on": (
        "qwen3 next",
        "qkvz",
        lambda x: x.at[:, 32:96].set(jnp.roll(x[:, 32:96], 16, 1)),
    ),
    "alphas swapped": ("apertus", "xielu", lambda x: x[jnp.array([1, 0, 2, 3])]),
    "gates swapped": ("lfm2", "bcx", lambda x: jnp.roll(x, 32, axis=1)),
    "no bias of the convolution": ("lfm2 bias", "conv_bias", lambda x: 0 * x),
    "no gate of the shared expert": ("qwen3 next", "shared_gate", lambda x: 0 * x),
    "no decay of a channel": ("kimi linear", "f_b", lambda x: 0 * x),
    "no bias of channels": ("kimi linear groups", "dt_bias", lambda x: 0 * x),
    "decay and gate swapped": (
        "kimi linear",
        "fgb",
        lambda x: x.at[:, :32].set(jnp.roll(x[:, :32], 16, 1)),
    ),
    "B and C swapped": (
        "bamba",
        "zxbcdt",
        lambda x: x.at[:, 128:192].set(jnp.roll(x[:, 128:192], 32, 1)),
    ),
    "gate and x swapped": (
        "granite 4",
        "zxbcdt",
        lambda x: x.at[:, :128].set(jnp.roll(x[:, :128], 64, 1)),
    ),
    "steps of other heads": (
        "bamba",
        "zxbcdt",
        lambda x: x.at[:, 192:].set(jnp.roll(x[:, 192:], 1, 1)),
    ),
    "no skip": ("nemotron-h", "skip", lambda x: 0 * x),
    "no bias of steps": ("falcon h1", "dt_bias", lambda x: 0 * x),
    "no latent experts": ("nemotron-h moe", "latent_out", lambda x: 0 * x),
    "heads of lightning one on": ("minimax", "lightning_qkv", lambda x: jnp.roll(x, 24, axis=1)),
    "no gate of lightning": ("minimax", "output_gate", lambda x: 0 * x),
    "no correction of LFM2": ("lfm2 moe", "router_correction", lambda x: 0 * x),
    "gate and up of granite 4 swapped": (
        "granite 4",
        "expert_gate_up",
        lambda x: jnp.roll(x, 40, axis=2),
    ),
    "convolutions of q and k swapped": (
        "olmo hybrid",
        "conv",
        lambda x: x[jnp.array([*range(32, 64), *range(32), *range(64, 96)])],
    ),
    "no scale of an expert": ("gemma4 experts", "expert_scale", lambda x: 0 * x + 1),
    "router without its scale": ("gemma4 experts", "router_norm", lambda x: 0 * x + 1),
    "no MLP beside the experts": ("gemma4 experts", "beside_post_norm", lambda x: 0 * x),
    "up before gate": ("gemma4 experts", "expert_gate_up", lambda x: jnp.roll(x, 24, axis=2)),
    "no prediction": ("gemma3n", "altup_prediction", lambda x: 0 * x),
    "predictions of other states": (
        "gemma3n",
        "altup_prediction",
        lambda x: x.reshape(4, 4, 4).swapaxes(1, 2).reshape(4, 16),
    ),
    "no correction": ("gemma3n", "altup_correction", lambda x: 0 * x),
    "router without its norm's weight": (
        "gemma3n, another active state",
        "altup_router_norm",
        lambda x: 0 * x + 1,
    ),
    "no layer of low rank": ("gemma3n", "laurel_norm", lambda x: 0 * x),
    "gate of a layer's input": (
        "gemma4 per-layer inputs, shared keys",
        "layer_input_gate",
        lambda x: 0 * x,
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES_IN_WEIGHTS)
def test_logits_of_transformers_tell_wrong_weights(mistake, tmp_path):
    name, weight, change = MISTAKES_IN_WEIGHTS[mistake]
    config, params = load_case(name, tmp_path)
    layers = [
        layer | ({weight: change(layer[weight])} if weight in layer else {})
        for layer in params["layers"]
    ]
    wrong = reference(params | {"layers": layers}, config, model_cases.tokens())
    expected = np.load(model_cases.LOGITS)[name]
    difference = largest_difference(wrong[:: model_cases.LOGITS_EVERY], expected)
    assert difference > 30 * RECURRENT_TOLERANCE


@pytest.mark.parametrize("name", ["glm4", "ernie4.5"])
def test_logits_of_transformers_tell_neighbours_from_halves(name, tmp_path):
    config = model_cases.write(tmp_path, model_cases.CONFIGS[name])
    rope = dataclasses.replace(config.layers[0].rope, interleaved=False)
    config = change_layers(rope=rope)(config)
    wrong = reference(models.load_params(tmp_path, config, "float32"), config, model_cases.tokens())
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

    The cache and the padding start as poison: NaN pages and states, void tokens and positions. Each
    request has two slots of states, and a step reads one and writes either, or goes on from a
    checkpoint within the last step.
    """
    step = jax.jit(
        models.forward,
        static_argnames="config",
        donate_argnames=("k_pages", "v_pages", "states"),
        compiler_options=QUICK,
    )
    page_size, max_tokens = specs[0].page_size, specs[0].max_qo_tokens
    max_pages = [-(-len(sequence) // page_size) for sequence in sequences]
    num_pages = sum(max_pages) + 3
    ids = rng.permutation(num_pages)[: sum(max_pages)]
    pages = np.split(ids, np.cumsum(max_pages)[:-1])
    empty = models.init_pages(config, specs, num_pages)
    k_pages, v_pages = jax.tree.map(lambda x: x + np.nan, empty)
    num_slots = 3 * len(sequences)
    states = jax.tree.map(lambda x: x + np.nan, models.init_states(config, num_slots, "float32"))
    state_spec = models.state_spec(
        config, dtype="float32", max_tokens=max_tokens, max_batch=4, num_slots=num_slots,
        max_checkpoints=4,
    )  # fmt: skip
    slots = rng.permutation(num_slots).reshape(-1, 3).tolist()
    done = [0] * len(sequences)
    logits: list[list[np.ndarray]] = [[] for _ in sequences]
    while any(n < len(sequence) for n, sequence in zip(done, sequences, strict=True)):
        budget, batch = max_tokens, []
        for r in rng.permutation(len(sequences)):
            n = min(int(rng.choice([0, 1, 5, 20])), len(sequences[r]) - done[r], budget)
            if rng.random() < 0.8:  # sometimes a request gets nothing
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
        arguments = tokens, positions, k_pages, v_pages, plans, all_rows
        kept = [n for _, n in batch]
        if state_spec is None:
            step_logits, k_pages, v_pages = step(params, config, *arguments)
        else:
            reads = [slots[r][0] if done[r] else -1 for r, _ in batch]
            for r, _ in batch:
                if rng.random() < 0.5:
                    slots[r][:2] = slots[r][1::-1]
            kept = [int(rng.integers(1, n + 1)) if rng.random() < 0.3 and n else n for n in kept]
            checkpoints = [
                (i, n, slots[batch[i][0]][2]) for i, n in enumerate(kept) if n < batch[i][1]
            ]
            plan = ja.plan_linear_attention(
                state_spec,
                qo_indptr,
                reads,
                [slots[r][0] for r, _ in batch],
                checkpoints=np.array(checkpoints, np.int32).reshape(-1, 3),
            )
            step_logits, k_pages, v_pages, states = step(
                params, config, *arguments, states=states, state_plan=plan
            )
            for i, _, _ in checkpoints:
                slots[batch[i][0]] = slots[batch[i][0]][::-1]
        for i, (r, _) in enumerate(batch):
            logits[r].append(np.asarray(step_logits[qo_indptr[i] : qo_indptr[i + 1]])[: kept[i]])
            done[r] += kept[i]
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
        # All have one length, to compile once: tokens after a position do not affect it.
        padded = np.resize(sequence, model_cases.NUM_TOKENS)
        expected = reference(params, config, padded)[: len(sequence)]
        assert largest_difference(logits, expected) < tolerance(name)


def test_chunks_over_latent_rows_of_e4m3_equal_the_reference_of_rounded_rows(monkeypatch):
    """Without experts: a last-bit difference of a row could select other experts."""
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
            def rounded(x):  # on the host: XLA of jax 0.10 rounds small values to 0
                like = jax.ShapeDtypeStruct(x.shape, x.dtype)
                return jax.pure_callback(on_host, like, x)

            x = super().rotated(angles)
            return x._replace(ckv=rounded(x.ckv), k_rope=rounded(x.k_rope))

    monkeypatch.setattr(latent, "Projected", Rounded)

    @functools.partial(jax.jit, static_argnames="config")  # a new function is traced again
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
    """Nothing as large as a layer's cache is copied: with a scan, also over periods of layers."""
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
    """Activations stay 16-bit (a scan requires one dtype); logits are f32."""
    config = models.parse_config(model_cases.CONFIGS[name])
    for dtype in ("bfloat16", "float16"):
        make = functools.partial(models.random_params, config, dtype=dtype)
        params = jax.eval_shape(make, jax.random.key(0))
        specs = small_specs(config, dtype=dtype)
        pages = models.init_pages(config, specs, num_pages=3)
        plans = tuple(ja.plan(spec, [0, 1], [1], [0, 1], [2]) for spec in specs)
        rows = np.zeros(specs[0].max_qo_tokens, np.int32)
        forward = jax.jit(models.forward, static_argnames="config")
        states, state_plan = models.init_states(config, 2, dtype), None
        sizes = {"max_tokens": len(rows), "max_batch": 4, "num_slots": 2}
        if state_spec := models.state_spec(config, dtype=dtype, **sizes):
            state_plan = ja.plan_linear_attention(state_spec, [0, 1], [-1], [0])
        arguments = params, config, rows, rows, *pages, plans, rows[:2], None, states, state_plan
        out = jax.eval_shape(forward, *arguments)
        assert out[0].dtype == jnp.float32
        assert {x.dtype for x in jax.tree.leaves(out[1:3])} == {jnp.dtype(dtype)}
        of_states = () if states is None else (states,)
        dtypes = jax.tree.map(lambda x: x.dtype, tuple(out[3:]))
        assert dtypes == jax.tree.map(lambda x: x.dtype, of_states)
        assert out[0].shape == (2, config.vocab_size)


@pytest.mark.parametrize("name", ["gemma2", "deepseek v3", "gemma4"])
def test_a_fixed_batch_with_the_rows_of_its_lengths(name):
    """Two steps, a chunk of each prompt and its rest, give the logits of whole sequences."""
    config = models.parse_config(model_cases.CONFIGS[name])
    params = models.random_params(config, jax.random.key(0), "float32")
    batch = models.fixed_batch(
        config, dtype="float32", batch_size=2, max_kv_len=24, max_qo_tokens=24, page_size=8
    )
    assert [spec.window_left + 1 for spec in batch.specs] == [
        kind.window or 0 for kind in config.attention_kinds
    ]
    own = ("window_left", "num_kv_heads", "head_dim_qk", "head_dim_vo")
    other = [{k: v for k, v in spec.to_fields().items() if k not in own} for spec in batch.specs]
    assert all(fields == other[0] for fields in other)
    k_pages = jax.tree.leaves(batch.pages[0])
    assert sum(len(x) for x in k_pages) == config.num_layers and {x.shape[1] for x in k_pages} == {
        6
    }
    sequences = model_cases.tokens()[:34].reshape(2, 17)
    step = jax.jit(models.forward, static_argnames="config", compiler_options=QUICK)
    pages, done = batch.pages, np.zeros(2, int)
    for new in ([12, 3], [5, 14]):
        qo_indptr, kv_lens = np.cumsum([0, *new]), done + new
        plans = tuple(ja.plan(spec, qo_indptr, kv_lens, *batch.page_table) for spec in batch.specs)
        request, positions, last = ja.rows(qo_indptr, kv_lens, 24)
        live = request < 2
        tokens = np.where(live, sequences[np.where(live, request, 0), positions], 0)
        logits, *pages = step(params, config, tokens, positions, *pages, plans, last)
        done = kv_lens
    want = [reference(params, config, jnp.array(tokens))[-1] for tokens in sequences]
    assert largest_difference(logits, np.stack(want)) < TOLERANCE


def test_projections_have_the_factor_of_attentions_input():
    config = models.parse_config(model_cases.CONFIGS["falcon h1"])
    assert config.attention_in_scale != 1
    weights = models.random_params(config, jax.random.key(0), "float32")["layers"][0]
    x, positions = jax.random.normal(jax.random.key(1), (5, config.hidden_size)), jnp.arange(5)
    got = decoder.project(x, weights, positions, config, config.layers[0])
    scaled = weights | {"qkv": weights["qkv"] * config.attention_in_scale}
    plain = dataclasses.replace(config, attention_in_scale=1.0)
    expected = decoder.project(x, scaled, positions, plain, config.layers[0])
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), got, expected)


def test_layers_without_rope_turn_no_token_by_three_positions():
    config = models.parse_config(model_cases.CONFIGS["olmo hybrid"])
    kind = next(kind for kind in config.layers if kind.attention)
    assert kind.rope is None
    cos, sin = decoder._angles(kind, jnp.zeros((3, 7), jnp.int32), config)
    assert cos.shape == sin.shape == (7, config.head_dim // 2)


def test_layers_that_share_keys_have_no_pages():
    """They read those of the last layer before the shared ones with their window."""
    config = models.parse_config(model_cases.CONFIGS["gemma4 per-layer inputs, shared keys"])
    assert config.kv_places == ((0, 0), (1, 0), (1, 1), (0, 1), (0, 1), (1, 1))
    specs = small_specs(config)
    k_pages, v_pages = models.init_pages(config, specs, num_pages=3)
    assert [x.shape for x in k_pages] == [(2, 3, 4, 2, 16), (2, 3, 4, 2, 32)]
    assert [x.shape for x in v_pages] == [x.shape for x in k_pages]
    with pytest.raises(ValueError, match="^forward: k_pages: expected 2 arrays, .*, got 1"):
        models.forward({}, config, *[None] * 2, k_pages[0], v_pages, specs, None)
    lone = dataclasses.replace(config, layers=config.layers[-2:])
    with pytest.raises(ValueError, match="a layer with keys and values before layer 0"):
        _ = lone.kv_places


@pytest.mark.parametrize("name", ["gemma4", "gemma4 equal heads"])
def test_special_layers_are_refused_by_meshes_and_as_embeddings(name, tmp_path):
    raw = model_cases.CONFIGS["gemma4"]
    if name == "gemma4 equal heads":  # only a scale of each layer is left
        raw = raw | {"global_head_dim": 16, "num_global_key_value_heads": None}
    config = models.parse_config(raw)
    with pytest.raises(models.ModelDirectoryError, match="'gemma4_text' makes no embeddings here"):
        embedding.parse_config(Keys(raw, tmp_path))
    mesh = jax.make_mesh((1,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,))
    with pytest.raises(ValueError, match="^TensorParallel: whole: .* got gemma4_text; use fewer"):
        models.TensorParallel(config, mesh, "heads")


def test_plans_of_another_model_are_refused():
    config = models.parse_config(model_cases.CONFIGS["gemma2"])
    for plans, got in (((None,), "1"), ([], "0"), (None, "NoneType"), (np.ones(2), "ndarray")):
        message = f"forward: plans: expected 2, a tuple with one for each spec .*, got {got}"
        with pytest.raises(ValueError, match=message):
            models.forward({}, config, *[None] * 4, plans=plans, logit_rows=None)


def test_random_params_are_like_loaded_ones(tmp_path):
    for name in model_cases.CONFIGS:
        config, params = load_case(name, tmp_path)
        make = functools.partial(models.random_params, config, dtype="float16")
        made = jax.eval_shape(make, jax.random.key(0))
        shape_of, is_leaf = operator.attrgetter("shape"), lambda x: hasattr(x, "shape")
        shapes = jax.tree.map(shape_of, params, is_leaf=is_leaf)  # also quantized ones
        assert jax.tree.map(shape_of, made) == shapes, name
        assert {w.dtype for w in jax.tree.leaves(made)} == {jnp.dtype("float16")}


@pytest.mark.parametrize(
    "name",
    [
        *("gpt-neox", "stablelm parallel", "granite moe", "cohere", "apertus", "phimoe", "llama4"),
        "tied, other head",
    ],
)
def test_weights_by_the_names_of_files_are_those_that_are_loaded(name, tmp_path):
    """Tensors in other shapes and orders than those of Params."""
    has_other_head = name == "tied, other head"
    raw = model_cases.CONFIGS["llama" if has_other_head else name] | {"num_hidden_layers": 1}
    config = model_cases.write(tmp_path, raw)
    tensors = model_cases.random_tensors(config)
    if has_other_head:
        config = dataclasses.replace(config, tie_embeddings=True)
    params = models.load_params(tmp_path, config, "float32")
    updates = WeightUpdates(config, params, None)
    planned = updates.plan(tensors)
    assert len(planned) == len(jax.tree.leaves(params))
    for update in planned:
        layer, weight = update.target
        held = params if layer is None else params["layers"][layer]
        got = updates.convert(update, donate=False)
        np.testing.assert_array_equal(got, held[weight], err_msg=weight)


def test_a_tied_head_alone_updates_the_embedding():
    """As in a model's files. By the name of Params it has another layout, so it is refused."""
    config = dataclasses.replace(
        models.parse_config(model_cases.CONFIGS["llama"]), tie_embeddings=True
    )
    params = models.random_params(config, jax.random.key(0))
    updates = WeightUpdates(config, params, None)
    table = np.random.default_rng(0).standard_normal(params["embed"].shape).astype(np.float32)
    (update,) = updates.plan({"lm_head.weight": table}, partial=True)
    got = np.asarray(updates.convert(update, donate=False), np.float32)
    np.testing.assert_allclose(got, table, rtol=1e-2)
    # Beside the embedding it says nothing new.
    both = {"lm_head.weight": table, "model.embed_tokens.weight": -table}
    (update,) = updates.plan(both, partial=True)
    assert update.sources[0] is both["model.embed_tokens.weight"]
    with pytest.raises(ValueError, match="^update_params: head: expected with it embed"):
        updates.plan({"head": table.T}, partial=True)


@pytest.mark.parametrize(
    ("name", "prefix", "passed_over"),
    [
        ("nemotron-h", "backbone.", []),
        ("olmo hybrid", "", []),
        ("kimi linear", "", []),
        ("minimax", "", ["model.layers.1.self_attn.slope_rate"]),
        ("qwen3.5", "model.language_model.", ["model.visual.x", "mtp.x"]),
        (
            "gemma3n",
            "model.language_model.",
            ["model.vision_tower.x", "model.language_model.layers.4.self_attn.k_proj.weight"],
        ),
    ],
)
def test_updates_read_names_as_the_loader_does(name, prefix, passed_over):
    config = dataclasses.replace(
        models.parse_config(model_cases.CONFIGS[name]), tensor_prefix=prefix
    )
    params = jax.eval_shape(lambda: models.random_params(config, jax.random.key(0)))
    updates = WeightUpdates(config, params, None)
    tensors = model_cases.random_tensors(config)
    in_files = {other: np.zeros(3) for other in passed_over}
    for tensor, array in tensors.items():
        file_name = tensor
        for other, usual in config.aliases:
            file_name = file_name.replace(usual, other)
        if not config.aliases and "lm_head" not in tensor:
            file_name = prefix + file_name.removeprefix("model.")
        in_files[file_name] = array
    assert updates.plan(in_files) == updates.plan(tensors)
    assert len(updates.plan(params)) == len(jax.tree.leaves(params))
    with pytest.raises(ValueError, match=f"^update_params: {prefix}x.y: expected names of"):
        updates.plan(in_files | {f"{prefix}x.y": np.zeros(3)})
    norm = next(tensor for tensor in tensors if tensor.endswith("norm.weight"))
    other = prefix + norm.removeprefix("model.")
    if other != norm:
        with pytest.raises(ValueError, match="expected each tensor once, got"):
            updates.plan(tensors | {other: tensors[norm]})


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
    """A decode step reads all weights once: XLA may allocate no buffer that holds a matrix."""
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
