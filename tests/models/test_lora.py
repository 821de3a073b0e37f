"""LoRA adapters: the segmented product on every instruction set, files, and whole models.

Oracles: sums in float64, weights with the adapter merged, and what PEFT computes (helpers/lora.py).
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import jax_attn as ja
from helpers import lora, model_cases
from jax_attn import models
from jax_attn.models._products.lora import Adapted, LoraPool, _of_all_adapters
from jax_attn.models._weights.weights import pack_params

# ---- the product ---------------------------------------------------------------------------------


def pool_of(dtype, depth, ends, max_rank=12, count=5):
    rng = np.random.default_rng(depth)
    ranks = rng.integers(0, max_rank + 1, (count, len(ends))).astype(np.int32)
    a = rng.standard_normal((count, len(ends), max_rank, depth), np.float32) * depth**-0.5
    a *= np.arange(max_rank)[:, None] < ranks[..., None, None]
    b = rng.standard_normal((count, max_rank, ends[-1]), np.float32)
    return LoraPool(jnp.asarray(a, dtype), jnp.asarray(b, dtype), jnp.asarray(ranks))


def operands(dtype, depth, columns, num_rows, count=5):
    rng = np.random.default_rng(num_rows)
    x = jnp.asarray(rng.standard_normal((num_rows, depth), np.float32), dtype)
    y = jnp.asarray(rng.standard_normal((num_rows, columns), np.float32), dtype)
    return x, y, jnp.asarray(rng.integers(-1, count, num_rows), jnp.int32)


def in_float64(x, y, adapters, pool, ends):
    x, y, a, b = (np.asarray(array, np.float64) for array in (x, y, pool.a, pool.b))
    begins = [0, *ends[:-1]]
    for row, adapter in enumerate(adapters):
        for part, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            if adapter >= 0:
                y[row, begin:end] += a[adapter, part] @ x[row] @ b[adapter][:, begin:end]
    return y


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("depth", "ends"), [(1, (1,)), (100, (70, 83, 96)), (257, (33, 66)), (512, (1024, 1536))]
)
def test_the_product_is_that_of_each_rows_adapter(dtype, depth, ends, isa):
    pool = pool_of(dtype, depth, ends)
    atol = {"float32": 1e-5, "bfloat16": 0.06, "float16": 0.008}[dtype]
    for num_rows in (0, 1, 5, 40):
        x, y, adapters = operands(dtype, depth, ends[-1], num_rows)
        expected = in_float64(x, y, adapters, pool, ends)
        got = jax.jit(Adapted(None, pool, adapters, ends).add)(x, y)
        assert got.dtype == y.dtype
        np.testing.assert_allclose(np.asarray(got, np.float64), expected, atol=atol)
        none = np.asarray(adapters) < 0
        assert (np.asarray(got)[none] == np.asarray(y)[none]).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_gpus_run_is_the_same_product(dtype):
    ends = (70, 83, 96)
    pool = pool_of(dtype, 100, ends)
    x, y, adapters = operands(dtype, 100, ends[-1], 40)
    got = _of_all_adapters(x, y, adapters, pool.a, pool.b, pool.ranks, ends=ends)
    atol = {"float32": 2e-5, "bfloat16": 0.1}[dtype]
    np.testing.assert_allclose(
        np.asarray(got, np.float64), in_float64(x, y, adapters, pool, ends), atol=atol
    )


def test_bits_of_a_row_do_not_depend_on_the_others(isa):
    ends = (700, 1400)
    pool = pool_of("float32", 300, ends)
    x, y, adapters = operands("float32", 300, ends[-1], 40)
    whole = np.asarray(jax.jit(Adapted(None, pool, adapters, ends).add)(x, y))
    for n in (1, 2, 3, 4, 7, 16):
        some = jax.jit(Adapted(None, pool, adapters[:n], ends).add)(x[:n], y[:n])
        assert (np.asarray(some) == whole[:n]).all(), n


# ---- models --------------------------------------------------------------------------------------


def logits(params, config, pools, slots, tokens, lengths):
    """Logits of sequences in one step, each with the adapter of its slot."""
    specs, (k_pages, v_pages), page_table = models.fixed_batch(
        config, dtype="float32", batch_size=len(lengths), max_kv_len=64, page_size=8,
        max_qo_tokens=sum(lengths),
    )  # fmt: skip
    indptr = np.cumsum([0, *lengths]).astype(np.int32)
    plans = tuple(ja.plan(spec, indptr, np.array(lengths, np.int32), *page_table) for spec in specs)
    _, positions, _ = ja.rows(indptr, np.array(lengths, np.int32), max_qo_tokens=sum(lengths))
    tree = jax.tree.unflatten(pools.tree, pools.arrays)
    adapters = models.Adapters(tree, jnp.asarray(np.repeat(slots, lengths), jnp.int32))
    step = jax.jit(models.forward, static_argnames="config")
    rows, n = jnp.arange(sum(lengths)), len(lengths)
    spec = models.state_spec(
        config, dtype="float32", max_tokens=sum(lengths), max_batch=n, num_slots=n
    )
    plan = None if spec is None else ja.plan_linear_attention(spec, indptr, [-1] * n, range(n))
    out, *_ = step(
        params, config, jnp.asarray(tokens), positions, k_pages, v_pages, plans, rows, adapters,
        models.init_states(config, n, "float32"), plan,
    )  # fmt: skip
    return np.split(np.asarray(out), indptr[1:-1])


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "phi3 long, partial", "gemma3", "qwen3 moe, some dense", "deepseek v3"),
        "gemma4 per-layer inputs, shared keys",
        *("qwen3 next", "qwen3.5", "kimi linear", "lfm2"),
    ],
)
def test_adapters_of_a_batch_are_those_of_merged_weights(name):
    config = models.parse_config(model_cases.CONFIGS[name])
    params = models.random_params(config, jax.random.key(0), "float32")
    pools = models.LoraPools(config, "float32", 3, 8)
    adapters = [
        models.make_lora(lora.CONFIG, lora.tensors(config, seed), config) for seed in ("a", "b")
    ]
    for slot, adapter in zip((2, 0), adapters, strict=True):
        pools.set(slot, adapter)
    lengths = [9, 5, 7]
    tokens = model_cases.tokens()[: sum(lengths)]
    packed = pack_params(params, config)
    found = logits(packed, config, pools, [2, -1, 0], tokens, lengths)
    models_of = [lora.merged(params, config, x) for x in adapters]
    plain, begin = [], 0
    for got, whole, n in zip(found, (models_of[0], params, models_of[1]), lengths, strict=True):
        part = jnp.asarray(tokens[begin : begin + n])
        expected = models.reference_forward(whole, config, part)
        np.testing.assert_allclose(got, expected, atol=2e-4)
        plain.append(abs(models.reference_forward(params, config, part) - expected).max())
        begin += n
    assert plain[0] > 0.05 and plain[2] > 0.05  # adapters show


@pytest.mark.parametrize("name", lora.CASES)
def test_logits_are_those_of_peft(name, tmp_path):
    with np.load(lora.LOGITS) as recorded:
        expected = recorded[f"{name} logits"]
        raw, shapes = (json.loads(str(recorded[f"{name} {x}"])) for x in ("config", "shapes"))
    config = model_cases.write(tmp_path, model_cases.CONFIGS[lora.CASES[name][0]])
    params = models.load_params(tmp_path, config, "float32")
    tensors = {k: lora.values(name, k, tuple(shape)) for k, shape in shapes.items()}
    adapter = models.load_lora(lora.write(tmp_path / "adapter", raw, tensors), config)
    pools = models.LoraPools(config, "float32", 1, 8)
    pools.set(0, adapter)
    tokens = model_cases.tokens()
    [got] = logits(params, config, pools, [0], tokens, [len(tokens)])
    np.testing.assert_allclose(got[:: model_cases.LOGITS_EVERY], expected, atol=1e-4, rtol=1e-4)


# ---- files ---------------------------------------------------------------------------------------

Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"peft_type": "IA3"}, "peft_type: expected 'LORA', got 'IA3'"),
        ({"use_dora": True}, "use_dora: expected false"),
        ({"bias": "all"}, "bias: expected 'none', got 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save: expected none"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights: expected a way that keeps"),
        ({"lora_bias": True}, "lora_bias: expected none, as it is not supported"),
        ({"r": 65}, "r: expected a rank of 1 to 64, got 65"),
        ({"r": "8"}, "r: expected a rank of 1 to 64, got '8'"),
        ({"rank_pattern": {"q_proj": 0}}, "q_proj: expected a rank of 1 to 64, got 0"),
        ({"rank_pattern": {"(": 2}}, "rank_pattern: expected a regular expression"),
        ({"lora_alpha": None}, "lora_alpha: expected a number"),
        ({"target_modules": None}, "target_modules: expected names or a regular expression"),
        ({"target_modules": "("}, "target_modules: expected a regular expression"),
        ({"layers_to_transform": ["x"]}, "layers_to_transform: expected numbers"),
        ({"r": 3}, ".lora_A.weight': expected shape (3, "),
        ({"target_modules": ["k_proj"]}, "a module that target_modules of adapter_config.json"),
    ],
)
def test_configs_that_do_not_fit(change, sentence, tmp_path):
    config = models.parse_config(model_cases.CONFIGS["llama"])
    where = lora.write(tmp_path / "a", lora.CONFIG | change, lora.tensors(config, "a"))
    with pytest.raises(models.ModelDirectoryError) as raised:
        models.load_lora(where, config)
    message = str(raised.value)
    assert message.startswith(str(where)) and sentence in message and "\n" not in message


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda t: t.pop(f"{Q}.lora_A.weight"), "q_proj.lora_A.weight' is missing"),
        (
            lambda t: [t.pop(f"{Q}.lora_{x}.weight") for x in "AB"],
            "is missing, though target_modules",
        ),
        (lambda t: t.update({f"{Q}.lora_magnitude_vector": np.ones(3)}), "without biases"),
        (
            lambda t: t.update({f"{Q[:-6]}x_proj.lora_A.weight": np.ones((4, 32))}),
            "expected a module that adapters may change (o_proj, q_proj",
        ),
        (
            lambda t: t.update({f"{Q}.lora_A.weight": np.ones((4, 32), np.int32)}),
            "expected floating-point numbers, got int32",
        ),
        (lambda t: t.clear(), "is missing"),
    ],
)
def test_tensors_that_do_not_fit(change, sentence, tmp_path):
    config = models.parse_config(model_cases.CONFIGS["llama"])
    tensors = lora.tensors(config, "a")
    change(tensors)
    where = lora.write(tmp_path / "a", lora.CONFIG, tensors)
    with pytest.raises(models.ModelDirectoryError) as raised:
        models.load_lora(where, config)
    message = str(raised.value)
    assert message.startswith(f"{where / 'adapter_model.safetensors'}: ") and sentence in message
    assert "\n" not in message


def test_directories_that_do_not_fit(tmp_path):
    config = models.parse_config(model_cases.CONFIGS["llama"])
    with pytest.raises(models.ModelDirectoryError, match="expected a directory, got none"):
        models.load_lora(tmp_path / "none", config)
    with pytest.raises(models.ModelDirectoryError, match="adapter_config.json: no such file"):
        models.load_lora(tmp_path, config)
    (tmp_path / "adapter_config.json").write_text(json.dumps(lora.CONFIG))
    (tmp_path / "adapter_model.bin").touch()
    with pytest.raises(models.ModelDirectoryError, match="convert adapter_model.bin"):
        models.load_lora(tmp_path, config)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"x")
    with pytest.raises(models.ModelDirectoryError, match="not a safetensors file"):
        models.load_lora(tmp_path, config)


def test_keys_and_values_of_layers_that_share_others_are_passed_over():
    """As those of the model's files are."""
    config = models.parse_config(model_cases.CONFIGS["gemma3n"])
    tensors = lora.tensors(config, "a")
    expected = models.make_lora(lora.CONFIG, tensors, config)
    for layer, kind in enumerate(config.layers):
        for x in "kv":
            name = f"base_model.model.model.layers.{layer}.self_attn.{x}_proj.lora_A.weight"
            assert (name in tensors) == (not kind.shares_kv)
            tensors.setdefault(name, np.ones((4, 32), np.float32))
    got = models.make_lora(lora.CONFIG, tensors, config)
    assert got.pairs.keys() == expected.pairs.keys()


def test_bf16_files(tmp_path):
    config = models.parse_config(model_cases.CONFIGS["llama"])
    exact = lora.tensors(config, "a")
    half = {name: x.astype(jnp.bfloat16) for name, x in exact.items()}
    lora.write(tmp_path, lora.CONFIG, exact)
    save_file(half, tmp_path / "adapter_model.safetensors")
    found = models.load_lora(tmp_path, config).pairs[0, "self_attn.q_proj"]
    np.testing.assert_array_equal(found.a, half[f"{Q}.lora_A.weight"].astype(np.float32))
    assert found.b.dtype == np.float32
