"""The Llama family: loading, RoPE scaling, and the paged forward pass against the dense one."""

import dataclasses
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_attn as ja
from jax_attn import models
from jax_attn.models import weights

safetensors_numpy = pytest.importorskip("safetensors.numpy")
pytest.importorskip("tokenizers")

HERE = Path(__file__).resolve().parent
SHIPPED = HERE.parent / "models" / "tiny-llama-stdlib"
SHARDED = HERE / "data" / "llama3_sharded"

SMALL = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def random_tensors(config: models.ModelConfig, dtype=np.float32, seed=0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = weights.file_shapes(config)
    return {
        name: (rng.normal(len(shape) == 1, 0.2, shape)).astype(dtype)
        for name, shape in shapes.items()
    }


@pytest.fixture
def small_dir(tmp_path: Path) -> Path:
    """A directory that loads, for tests to damage."""
    write_json(tmp_path / "config.json", SMALL)
    config = models.load_config(tmp_path)
    safetensors_numpy.save_file(random_tensors(config), tmp_path / "model.safetensors")
    (tmp_path / "tokenizer.json").write_bytes((SHIPPED / "tokenizer.json").read_bytes())
    return tmp_path


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


# ---- loading -----------------------------------------------------------------------------------


def test_agrees_with_transformers_sharded_untied_llama3():
    config = models.load_config(SHARDED)
    assert config.layers[0].rope.scaling == models.Llama3Scaling(4.0, 1.0, 4.0, 64)
    assert not config.tie_embeddings
    params = models.load_params(SHARDED, config, "float32")
    expected = np.load(SHARDED / "expected.npz")
    logits = models.reference_forward(params, config, expected["tokens"])
    np.testing.assert_allclose(logits[::10], expected["logits"], rtol=0, atol=2e-5)


def test_agrees_with_transformers_shipped_model():
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


@pytest.mark.parametrize("dtype", [np.float16, np.float32, jnp.bfloat16])
def test_dtypes_of_files(small_dir, dtype):
    config = models.load_config(small_dir)
    tensors = random_tensors(config, dtype)
    safetensors_numpy.save_file(tensors, small_dir / "model.safetensors")
    params = models.load(small_dir, "float32").params
    assert {w.dtype for w in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    layer_1 = tensors["model.layers.1.self_attn.k_proj.weight"].astype(np.float32)
    q_size = config.num_qo_heads * config.head_dim
    k = params["layers"]["qkv"][1][:, q_size : q_size + config.num_kv_heads * config.head_dim]
    np.testing.assert_array_equal(k, layer_1.T)


def test_tied_head_is_the_embedding(small_dir):
    write_json(small_dir / "config.json", SMALL | {"tie_word_embeddings": True})
    params = models.load(small_dir).params  # the file's lm_head.weight is passed over
    assert "head" not in params
    config = models.load_config(small_dir)
    untied = dataclasses.replace(config, tie_embeddings=False)
    np.testing.assert_array_equal(
        models.reference_forward(params, config, np.arange(9)),
        models.reference_forward(params | {"head": params["embed"].T}, untied, np.arange(9)),
    )


def test_config_defaults(tmp_path):
    """What old Llama configs leave out."""
    left_out = {"num_key_value_heads", "head_dim", "rope_theta", "tie_word_embeddings"}
    write_json(tmp_path / "config.json", {k: v for k, v in SMALL.items() if k not in left_out})
    config = models.load_config(tmp_path)
    assert (config.num_kv_heads, config.head_dim) == (6, 4)
    assert set(config.layers) == {models.LayerKind(models.Rope(10000.0))}
    assert not config.tie_embeddings and config.eos_tokens == ()


def edit_config(**changes):
    """An edit that sets keys of config.json, and drops those set to `...`."""

    def edit(path: Path) -> None:
        config = {k: v for k, v in (SMALL | changes).items() if v is not ...}
        write_json(path / "config.json", config)

    return edit


def edit_tensors(edit):
    def edit_file(path: Path) -> None:
        tensors = random_tensors(models.load_config(path))
        edit(tensors)
        safetensors_numpy.save_file(tensors, path / "model.safetensors")

    return edit_file


def lose_shard(path: Path) -> None:
    (path / "model.safetensors").unlink()
    weight_map = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    write_json(path / "model.safetensors.index.json", weight_map)


KEY = "model.layers.2.mlp.up_proj.weight"
MISFITS = {
    "no config": (
        lambda path: (path / "config.json").unlink(),
        "config.json: no such file",
    ),
    "config is not JSON": (
        lambda path: (path / "config.json").write_text("{"),
        "config.json: not JSON",
    ),
    "missing key": (edit_config(hidden_size=...), "key 'hidden_size' is missing"),
    "other model": (edit_config(model_type="gpt2"), "model_type: expected 'llama', got 'gpt2'"),
    "mlp bias": (edit_config(mlp_bias=True), "mlp_bias: expected False"),
    "activation": (edit_config(hidden_act="gelu"), "hidden_act: expected 'silu', got 'gelu'"),
    "quantized": (edit_config(quantization_config={"bits": 4}), "quantization_config: expected"),
    "heads": (
        edit_config(num_key_value_heads=4),
        "num_attention_heads: expected a multiple of num_key_value_heads 4, got 6",
    ),
    "rope type": (
        edit_config(rope_scaling={"type": "yarn", "factor": 2.0}),
        "rope_type: expected 'default', 'linear' or 'llama3', got 'yarn'",
    ),
    "rope key": (
        edit_config(rope_scaling={"rope_type": "llama3", "factor": 2.0}),
        "rope_scaling: key 'low_freq_factor' is missing",
    ),
    "no weights": (
        lambda path: (path / "model.safetensors").unlink(),
        "neither model.safetensors nor model.safetensors.index.json is there",
    ),
    "lost shard": (lose_shard, "model-00001-of-00002.safetensors: no such file"),
    "not safetensors": (
        lambda path: (path / "model.safetensors").write_bytes(b"\x80\x02}q\x00."),
        "model.safetensors: not a safetensors file",
    ),
    "missing tensor": (edit_tensors(lambda t: t.pop(KEY)), f"tensor '{KEY}' is missing"),
    "extra tensor": (
        edit_tensors(lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": np.zeros(96)})),
        "tensor 'model.layers.0.self_attn.q_proj.bias' is no part of a llama model",
    ),
    "shape": (
        edit_tensors(lambda t: t.update({KEY: np.zeros([40, 23], np.float32)})),
        f"tensor '{KEY}': expected shape (40, 24), got (40, 23)",
    ),
    "dtype": (
        edit_tensors(lambda t: t.update({KEY: np.zeros([40, 24], np.int8)})),
        f"tensor '{KEY}': expected dtype BF16, F16 or F32, got I8",
    ),
    "no tokenizer": (
        lambda path: (path / "tokenizer.json").unlink(),
        "tokenizer.json: no such file",
    ),
    "not a tokenizer": (
        lambda path: (path / "tokenizer.json").write_text("{}"),
        "tokenizer.json: not a tokenizer",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_misfits_are_refused_in_one_sentence(small_dir, name):
    models.load(small_dir)
    edit, message = MISFITS[name]
    edit(small_dir)
    with pytest.raises(models.ModelDirectoryError) as error:
        models.load(small_dir)
    assert message in str(error.value)
    assert str(small_dir) in str(error.value) and "\n" not in str(error.value)


# ---- RoPE --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rope", [None, LLAMA3, LLAMA3 | {"factor": 32.0, "low_freq_factor": 2.0}])
def test_rope_frequencies_formula(tmp_path, rope):
    """One frequency at a time, by wavelength, as the Llama 3.1 model card tells it."""
    write_json(tmp_path / "config.json", SMALL | {"head_dim": 128, "rope_scaling": rope})
    expected = []
    for i in range(64):
        frequency = 1 / 10000.0 ** (2 * i / 128)
        if rope:
            wavelength, original = 2 * math.pi / frequency, rope["original_max_position_embeddings"]
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            if wavelength > original / low:
                frequency /= rope["factor"]
            elif wavelength > original / high:
                smooth = (original / wavelength - low) / (high - low)
                frequency *= (1 - smooth) / rope["factor"] + smooth
        expected.append(frequency)
    frequencies = models.load_config(tmp_path).layers[0].rope.frequencies(128)
    np.testing.assert_allclose(frequencies, expected, rtol=1e-12)


# ---- the paged forward pass --------------------------------------------------------------------


def run_in_chunks(params, config, specs, sequences, rng) -> list[np.ndarray]:
    """Logits of every token, by random chunks of random requests a step, in scattered pages.

    The cache and the padding start as poison: NaN pages, void tokens and positions.
    """
    step = jax.jit(models.forward, static_argnames="config", donate_argnames=("k_pages", "v_pages"))
    spec = specs[0]
    max_pages = [-(-len(sequence) // spec.page_size) for sequence in sequences]
    num_pages = sum(max_pages) + 3
    ids = rng.permutation(num_pages)[: sum(max_pages)]
    pages = np.split(ids, np.cumsum(max_pages)[:-1])
    k_pages, v_pages = (x + np.nan for x in models.init_pages(config, specs, num_pages))
    done = [0] * len(sequences)
    logits: list[list[np.ndarray]] = [[] for _ in sequences]
    while any(n < len(sequence) for n, sequence in zip(done, sequences, strict=True)):
        budget, batch = spec.max_qo_tokens, []
        for r in rng.permutation(len(sequences)):
            n = min(int(rng.choice([0, 1, 5, 30])), len(sequences[r]) - done[r], budget)
            if rng.random() < 0.8:  # and sometimes a request that gets nothing
                batch.append((r, n))
                budget -= n
        qo_indptr = np.append(0, np.cumsum([n for _, n in batch])).astype(np.int32)
        kv_lens = np.array([done[r] + n for r, n in batch], np.int32)
        num_pages_each = -(-kv_lens // spec.page_size)
        page_indices = np.concatenate(
            [np.empty(0, np.int32)]
            + [pages[r][:n] for (r, _), n in zip(batch, num_pages_each, strict=True)]
        )
        tokens = rng.integers(0, config.vocab_size, spec.max_qo_tokens, np.int32)
        positions = rng.integers(0, 1000, spec.max_qo_tokens, np.int32)
        for i, (r, n) in enumerate(batch):
            rows = slice(qo_indptr[i], qo_indptr[i + 1])
            tokens[rows] = sequences[r][done[r] : done[r] + n]
            positions[rows] = np.arange(done[r], done[r] + n)
        page_indptr = np.append(0, np.cumsum(num_pages_each))
        batch_arrays = (qo_indptr, kv_lens, page_indptr, page_indices.astype(np.int32))
        plans = tuple(ja.plan(spec, *batch_arrays) for spec in specs)
        all_rows = np.arange(spec.max_qo_tokens, dtype=np.int32)
        step_logits, k_pages, v_pages = step(
            params, config, tokens, positions, k_pages, v_pages, plans, all_rows
        )
        for i, (r, n) in enumerate(batch):
            logits[r].append(np.asarray(step_logits[qo_indptr[i] : qo_indptr[i + 1]]))
            done[r] += n
    return [np.concatenate(parts) for parts in logits]


@pytest.mark.parametrize(
    "page_size, changes",
    [
        (1, {}),
        (16, {}),
        (7, {"num_attention_heads": 5, "num_key_value_heads": 1, "tie_word_embeddings": True}),
        (7, {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}),
        (48, {"head_dim": 64, "rope_scaling": LLAMA3}),
    ],
    ids=["gqa 1", "gqa 16", "mqa tied 7", "mha 7", "llama3 48"],
)
def test_chunks_equal_reference(tmp_path, page_size, changes):
    write_json(tmp_path / "config.json", SMALL | changes)
    config = models.load_config(tmp_path)
    tensors = random_tensors(config, seed=page_size)
    safetensors_numpy.save_file(tensors, tmp_path / "model.safetensors")
    params = models.load_params(tmp_path, config, "float32")
    rng = np.random.default_rng(page_size)
    sequences = [rng.integers(0, config.vocab_size, n) for n in (1, 17, 63, 130)]
    specs = models.attention_specs(
        config,
        dtype="float32",
        page_size=page_size,
        max_batch=5,
        max_qo_tokens=48,
        max_kv_pages=300,
    )
    got = run_in_chunks(params, config, specs, sequences, rng)
    for sequence, logits in zip(sequences, got, strict=True):
        expected = models.reference_forward(params, config, sequence)
        np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype, atol", [("float32", 1e-3), ("bfloat16", 0.5)])
def test_shipped_model_chunks_equal_reference(dtype, atol):
    model = models.load(SHIPPED, dtype)
    text = Path(weights.__file__).read_text()
    ids = [0, *model.tokenizer.encode(text).ids]
    sequences = [np.array(ids[:n]) for n in (3, 40, 233)]
    specs = models.attention_specs(
        model.config, dtype=dtype, page_size=16, max_batch=3, max_qo_tokens=64, max_kv_pages=64
    )
    rng = np.random.default_rng(0)
    got = run_in_chunks(model.params, model.config, specs, sequences, rng)
    for sequence, logits in zip(sequences, got, strict=True):
        expected = models.reference_forward(model.params, model.config, sequence)
        np.testing.assert_allclose(logits, expected, rtol=0, atol=atol)


def test_cache_is_written_in_place(tmp_path):
    """A scan over the layers, and no copy of anything as large as a layer's cache."""
    write_json(tmp_path / "config.json", SMALL)
    config = models.load_config(tmp_path)
    safetensors_numpy.save_file(random_tensors(config), tmp_path / "model.safetensors")
    params = models.load_params(tmp_path, config, "float32")
    specs = models.attention_specs(
        config, dtype="float32", page_size=16, max_batch=2, max_qo_tokens=8, max_kv_pages=16
    )
    k_pages, v_pages = models.init_pages(config, specs, num_pages=4096)
    plans = tuple(ja.plan(spec, [0, 1], [20], [0, 2], [5, 9]) for spec in specs)
    zeros = np.zeros(8, np.int32)
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
