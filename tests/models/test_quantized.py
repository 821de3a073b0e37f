"""Quantized weights: the numbers that their format defines, in the bits of the files."""

import dataclasses
import json
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import model_cases, quantized_cases
from helpers.mesh_checks import run_on_cpus
from helpers.quantized_cases import DEEPSEEK, FORMATS, LLAMA, MOE
from jax_attn import models
from jax_attn.models._products import quantized
from jax_attn.models._products.quantized import Quantized

safetensors_numpy = pytest.importorskip("safetensors.numpy")

TOLERANCE = 4e-5  # of the largest logit, as in test_models.py
TILE = 256
every_format = pytest.mark.parametrize("name", FORMATS)
reference = jax.jit(
    models.reference_forward,
    static_argnames="config",
    compiler_options={"xla_backend_optimization_level": 0},
)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Small tiles, as with few cores: matrices here have several tiles and a rest."""
    monkeypatch.setattr(quantized, "_TILE", TILE)


def is_quantized(x) -> bool:
    return isinstance(x, Quantized)


def load_both(directory, raw, name, **kwargs):
    """The quantized model, and the plain one of the same numbers.

    Activations are as they are; test_activations.py has models that round them.
    """
    config, wide = quantized_cases.write(directory, raw, name, **kwargs)
    params = with_plain_activations(models.load_params(directory, config, "float32"))
    plain_dir = directory / "plain"
    plain_dir.mkdir()
    (plain_dir / "config.json").write_text(json.dumps(raw))
    safetensors_numpy.save_file(wide, plain_dir / "model.safetensors")
    plain_config = models.load_config(plain_dir)
    assert dataclasses.replace(config, quantization=None) == plain_config
    return config, params, models.load_params(plain_dir, plain_config, "float32")


def with_plain_activations(params):
    return jax.tree.map(
        lambda x: quantized.without_activations(x) if is_quantized(x) else x,
        params,
        is_leaf=is_quantized,
    )


def difference(got, expected) -> float:
    got, expected = np.asarray(got), np.asarray(expected)
    return float(np.abs(got - expected).max() / np.abs(expected).max())


def logits_of(params, config) -> np.ndarray:
    return reference(params, dataclasses.replace(config, quantization=None), model_cases.tokens())


@every_format
def test_logits_are_those_of_the_numbers_that_the_files_stand_for(name, tmp_path):
    config, params, plain = load_both(tmp_path, LLAMA, name)
    assert difference(logits_of(params, config), logits_of(plain, config)) < TOLERANCE


@every_format
def test_every_matrix_is_kept_in_its_bits(name, tmp_path):
    config, _ = quantized_cases.write(tmp_path, LLAMA, name)
    params = models.load_params(tmp_path, config, "bfloat16")
    matrices = [x for layer in params["layers"] for k, x in layer.items() if "norm" not in k]
    assert len(matrices) == 4 * config.num_layers and all(map(is_quantized, matrices))
    for matrix in matrices:
        inner, outer = matrix.shape
        assert matrix.codes.nbytes == inner * outer * FORMATS[name].bits // 8
        groups = -(-inner // matrix.group_size)
        assert matrix.scales.shape == (groups, outer)
    assert params["embed"].dtype == params["head"].dtype == jnp.bfloat16
    tokens = model_cases.tokens()[:9]
    out = jax.eval_shape(lambda p: models.reference_forward(p, config, tokens), params)
    assert out.dtype == jnp.float32


@pytest.mark.parametrize("name", ["fp8 block", "compressed int8", "awq"])
@pytest.mark.parametrize("raw", [MOE, DEEPSEEK], ids=["qwen3 moe", "deepseek v3"])
def test_experts_and_latent_attention(raw, name, tmp_path):
    config, params, plain = load_both(tmp_path, raw, name)
    assert is_quantized(params["layers"][1]["expert_down"])
    assert difference(logits_of(params, config), logits_of(plain, config)) < TOLERANCE


def test_a_quantised_head_and_parts_that_are_not(tmp_path):
    config, params, plain = load_both(tmp_path, LLAMA, "gptq sorted", plain=("0.self_attn.k_proj",))
    assert is_quantized(params["head"]) and is_quantized(params["layers"][1]["qkv"])
    assert not is_quantized(params["layers"][0]["qkv"])  # one of its three parts is not
    assert difference(logits_of(params, config), logits_of(plain, config)) < TOLERANCE


def test_parts_of_a_head_that_rotate(tmp_path):
    """Rows of q and k move in memory together with their scales."""
    raw = model_cases.CONFIGS["phi3 long, partial"] | {"num_hidden_layers": 1}
    for name in ("fp8 block", "gptq sorted"):
        (tmp_path / name).mkdir()
        config, params, plain = load_both(tmp_path / name, raw | {"intermediate_size": 64}, name)
        assert difference(logits_of(params, config), logits_of(plain, config)) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gptq", {"checkpoint_format": "gptq_v2"}),
        ("gptq v2", {"checkpoint_format": "gptq"}),
    ],
)
def test_logits_tell_one_format_from_another(name, change, tmp_path):
    config, wide = quantized_cases.write(tmp_path, LLAMA, name)
    right = logits_of(models.load_params(tmp_path, config, "float32"), config)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["quantization_config"] |= change
    other = models.parse_config(raw)
    wrong = logits_of(models.load_params(tmp_path, other, "float32"), config)
    assert difference(wrong, right) > 100 * TOLERANCE


@pytest.mark.parametrize("kind", ["int8", "int4", "e4m3", "e2m1"])
@pytest.mark.parametrize("columns", [7, TILE, 2 * TILE + 5])
def test_products(kind, columns):
    """By tiles and at once, with one group and several, and a last group that is not full."""
    random = np.random.RandomState(0)
    rows = 96
    codes = random.randint(0, 256, (rows // quantized.codes_per_byte(kind), columns))
    codes = codes.astype(np.int8 if kind == "int8" else np.uint8)
    if kind == "e4m3":
        codes[(codes & 0x7F) == 0x7F] = 3
    x = random.standard_normal((5, rows)).astype(np.float32)
    for size in (96, 32, 40):
        groups = -(-rows // size)
        scales = random.uniform(0.5, 1.5, (groups, columns)).astype(np.float32)
        zeros = random.randint(0, 16, scales.shape).astype(np.uint8) if kind == "int4" else None
        weight = jax.tree.map(jnp.asarray, Quantized(codes, scales, zeros, None, kind, size))
        wide = np.asarray(quantized.widen(weight, jnp.float32))
        table = {"e4m3": jnp.float8_e4m3fn, "e2m1": jnp.float4_e2m1fn}.get(kind)
        values = codes if kind in ("int8", "e4m3") else np.stack([codes & 15, codes >> 4], 1)
        values = values.reshape(rows, columns)
        if table is not None:
            every = np.arange(256).astype(np.uint8).view(jnp.float8_e4m3fn).astype(np.float32)
            if kind == "e2m1":
                every = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
                every = np.concatenate([every, -every])
            values = every[values]
        group = np.arange(rows) // size
        expected = values.astype(np.float32)
        if zeros is not None:
            expected = expected - zeros[group]
        np.testing.assert_array_equal(wide, expected * scales[group])
        on_gpu = partial(quantized._product, dtype=None, has_float8=True)
        for product in (quantized.product, on_gpu):
            got = jax.jit(product)(x, weight)
            np.testing.assert_allclose(got, x @ wide, rtol=1e-5, atol=1e-4 * np.abs(wide).max())


def test_widening_is_bounded():
    """On CPU a matmul widens one tile of the matrix, not the whole matrix or all matrices."""
    rows, columns = 512, 4096
    codes, scales = jnp.zeros((rows, columns), jnp.uint8), jnp.ones((4, columns))
    layers = [Quantized(codes, scales, None, None, "e4m3", 128) for _ in range(3)]

    def compute(x, layers):
        for weight in layers:
            x = quantized.product(x, weight)[:, :rows]
        return x

    compiled = jax.jit(compute).lower(jnp.ones((2, rows)), layers).compile()
    wide_tile = 4 * rows * TILE
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * wide_tile < rows * columns


@pytest.mark.parametrize(
    "name", ["fp8 tensor", "fp8 tensor, as on a GPU", "compressed int8", "gptq sorted", "awq"]
)
def test_tensor_parallel(name):
    run_on_cpus(2, f"import test_quantized as t; t.check_tensor_parallel({name!r})")


def check_tensor_parallel(name: str) -> None:
    import tempfile
    from pathlib import Path

    from helpers.mesh_checks import make_mesh
    from jax_attn.models._layers import decoder

    on_gpu = name.endswith(", as on a GPU")
    name = name.removesuffix(", as on a GPU")
    if on_gpu:
        quantized.multiplies_float8 = lambda: True
    with tempfile.TemporaryDirectory() as directory:
        config, _ = quantized_cases.write(Path(directory), LLAMA | {"intermediate_size": 192}, name)
        params = models.load_params(directory, config, "float32")
    split = models.TensorParallel(config, make_mesh(2, 1), "heads")
    if name == "gptq sorted":
        with pytest.raises(ValueError, match="TensorParallel: down: expected rows in their order"):
            split.split_params(params)
        return
    parts = split.split_params(params)
    for whole, part in zip(params["layers"], parts["layers"], strict=True):
        for weight in ("qkv", "o", "gate_up", "down"):
            shards = part[weight].codes.addressable_shards
            assert part[weight].is_transposed == on_gpu
            assert {s.data.nbytes for s in shards} == {whole[weight].codes.nbytes // 2}
    everywhere = jax.sharding.PartitionSpec()
    specs = jax.tree.map(lambda x: x.sharding.spec, parts)
    x = np.random.RandomState(0).standard_normal((6, config.hidden_size)).astype(np.float32)

    def mlp(config):
        return lambda weights, x: decoder._mlp(x, weights, config)

    for whole, part, spec in zip(params["layers"], parts["layers"], specs["layers"], strict=True):
        got = jax.jit(
            jax.shard_map(
                mlp(split.config),
                mesh=split.mesh,
                in_specs=(spec, everywhere),
                out_specs=everywhere,
                check_vma=False,
            )
        )(part, x)
        assert difference(got, mlp(config)(whole, x)) < TOLERANCE
        # Each device's heads of q, then of k, then of v.
        whole_qkv, part_qkv = (np.asarray(quantized.product(x, w["qkv"])) for w in (whole, part))
        order = np.concatenate([split._columns("qkv", d) for d in range(2)])
        assert difference(part_qkv, whole_qkv[:, order]) < TOLERANCE


def test_groups_that_devices_would_cut():
    config = models.parse_config(LLAMA | {"quantization_config": FORMATS["gptq"].config})
    split = models.TensorParallel(config, jax.sharding.AbstractMesh((2,), ("heads",)), "heads")
    codes, scales = np.zeros((24, 8), np.uint8), np.zeros((3, 8), np.float32)
    weight = Quantized(codes, scales, scales.astype(np.uint8), None, "int4", 16)
    with pytest.raises(ValueError, match="groups of 16 rows of o in a number that the 2 devices"):
        split.split_params({"o": weight})


# ---- misfits -----------------------------------------------------------------------------------


def changed(name: str, **changes):
    return FORMATS[name].config | changes


def of_weights(**changes):
    config = json.loads(json.dumps(FORMATS["compressed int8"].config))
    config["config_groups"]["group_0"]["weights"] |= changes
    return config


CONFIGS = {
    "another method": (
        {"quant_method": "hqq"},
        "quant_method: expected 'fp8', 'fbgemm_fp8', 'bitsandbytes', 'gptq', 'awq', "
        "'compressed-tensors', 'modelopt' or 'mxfp4', got 'hqq'",
    ),
    "no method": ({"bits": 4}, "key 'quant_method' is missing"),
    "no object": (["fp8"], "quantization_config: expected an object, got ['fp8']"),
    "mxfp4 of another family": (
        {"quant_method": "mxfp4"},
        "quant_method: 'mxfp4' is not supported with model_type 'llama'",
    ),
    "e5m2": (changed("fp8 tensor", fmt="e5m2"), "fmt: expected 'e4m3' or None, got 'e5m2'"),
    "a block": (
        changed("fp8 block", weight_block_size=[128]),
        "weight_block_size: expected two integers, got [128]",
    ),
    "3 bits": (changed("gptq", bits=3), "bits: expected 4, got 3"),
    "no bits": ({"quant_method": "awq", "group_size": 8}, "key 'bits' is missing"),
    "odd groups": (
        changed("awq", group_size=7),
        "group_size: expected -1 or an even number, got 7",
    ),
    "bits by layer": (
        changed("gptq", dynamic={"+:.*": {"bits": 8}}),
        "key 'dynamic' is not supported",
    ),
    "gemv": (changed("awq", version="gemv"), "version: expected 'gemm', got 'gemv'"),
    "no zeros": (changed("awq", zero_point=False), "zero_point: expected True, got False"),
    "nf4": (
        changed("llm.int8", load_in_8bit=False, load_in_4bit=True),
        "key 'load_in_4bit' is not supported",
    ),
    "neither": (changed("llm.int8", load_in_8bit=False), "load_in_8bit: expected True, got False"),
    "a quantised cache": (
        changed("compressed int8", kv_cache_scheme={"num_bits": 8}),
        "key 'kv_cache_scheme' is not supported",
    ),
    "int8 as nvfp4": (
        changed("compressed int8", format="nvfp4-pack-quantized"),
        "strategy: expected 'tensor_group', got 'channel'",
    ),
    "mixed precision": (
        changed("modelopt fp8", quant_algo="MIXED_PRECISION"),
        "quant_algo: expected 'FP8', 'FP8_PER_CHANNEL_PER_TOKEN' or 'NVFP4', got 'MIXED_PRECISION'",
    ),
    "wider groups of nvfp4": (
        changed("modelopt nvfp4", group_size=32),
        "group_size: expected 16 or None, got 32",
    ),
    "4 bits not packed": (of_weights(num_bits=4), "num_bits: expected 8, got 4"),
    "dynamic weights": (of_weights(dynamic=True), "dynamic: expected False or None, got True"),
    "no strategy": (of_weights(strategy="token"), "strategy: expected 'channel', "),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_not_done_is_refused(name):
    raw, message = CONFIGS[name]
    with pytest.raises(models.ModelDirectoryError) as error:
        models.parse_config(LLAMA | {"quantization_config": raw}, "x/config.json")
    assert message in str(error.value), str(error.value)
    assert str(error.value).startswith("x/config.json: quantization_config")
    assert "\n" not in str(error.value)


def test_settings_of_modelopt_in_a_file_of_their_own(tmp_path):
    config, _ = quantized_cases.write(tmp_path, LLAMA, "modelopt nvfp4")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    of_modelopt = {
        "producer": {"name": "modelopt", "version": "0.29.0"},
        "quantization": {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": "FP8",
            "group_size": 16,
            "exclude_modules": ["lm_head"],
        },
    }
    path = tmp_path / "hf_quant_config.json"
    path.write_text(json.dumps(of_modelopt))
    assert models.load_config(tmp_path) == config
    of_modelopt["quantization"]["quant_algo"] = "W4A8_AWQ"
    path.write_text(json.dumps(of_modelopt))
    message = "hf_quant_config.json: quantization: quant_algo: expected 'FP8', 'FP8_PER_CH"
    with pytest.raises(models.ModelDirectoryError, match=message):
        models.load_config(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"), [("weight_scale", 0x7F), ("weight_scale_2", 0.0), ("weight_scale_2", np.nan)]
)
def test_scales_of_nvfp4_that_are_no_numbers(name, value, tmp_path):
    config, _ = quantized_cases.write(tmp_path, LLAMA, "modelopt nvfp4")
    path = tmp_path / "model.safetensors"
    tensors = read_all(path)
    scales = tensors[f"{Q_PROJ}.{name}"]
    if name == "weight_scale":
        scales = scales.view(np.uint8).copy()
        scales[0, 0] = value
        tensors[f"{Q_PROJ}.{name}"] = scales.view(jnp.float8_e4m3fn)
    else:
        tensors[f"{Q_PROJ}.{name}"] = np.full_like(scales, value)
    safetensors_numpy.save_file(tensors, path)
    with pytest.raises(
        models.ModelDirectoryError, match=f"tensor '{Q_PROJ}.*expected .* as {name}"
    ):
        models.load_params(tmp_path, config, "float32")


Q_PROJ = "model.layers.0.self_attn.q_proj"


def with_nan(tensors):
    codes = tensors[f"{Q_PROJ}.weight"].view(np.uint8).copy()
    codes[3, 5] = 0xFF
    return {f"{Q_PROJ}.weight": codes.view(jnp.float8_e4m3fn)}


def uneven(tensors):
    index = tensors[f"{Q_PROJ}.g_idx"].copy()
    index[0] = index[-1]
    return {f"{Q_PROJ}.g_idx": index}


def shuffled(tensors):
    index = np.random.RandomState(9).permutation(tensors[f"{Q_PROJ}.g_idx"])
    return {f"{Q_PROJ}.g_idx": index}


FILES = {
    "no scales": (
        "fp8 block",
        lambda t: {f"{Q_PROJ}.weight_scale_inv": None},
        f"tensor '{Q_PROJ}.weight_scale' is missing",
    ),
    "no matrix": ("gptq", lambda t: {f"{Q_PROJ}.qweight": None}, f"'{Q_PROJ}.qweight' is missing"),
    "nothing": (
        "awq",
        lambda t: {f"{Q_PROJ}.{x}": None for x in ("qweight", "qzeros", "scales")},
        f"tensor '{Q_PROJ}.weight' is missing",
    ),
    "scales of other blocks": (
        "fp8 block",
        lambda t: {f"{Q_PROJ}.weight_scale_inv": np.ones((1, 1), np.float32)},
        f"tensor '{Q_PROJ}.weight_scale_inv': expected shape (3, 3), got (1, 1)",
    ),
    "scales of integers": (
        "gptq",
        lambda t: {f"{Q_PROJ}.scales": np.ones((4, 64), np.int32)},
        f"tensor '{Q_PROJ}.scales': expected dtype BF16, F16 or F32, got I32",
    ),
    "int8 in a file of fp8": (
        "fp8 tensor",
        lambda t: {f"{Q_PROJ}.weight": np.ones((64, 64), np.int8)},
        f"tensor '{Q_PROJ}.weight': expected dtype BF16, F16, F32 or F8_E4M3, got I8",
    ),
    "NaN": ("fp8 tensor", with_nan, f"tensor '{Q_PROJ}.weight': expected numbers, got NaN"),
    "a bias": (
        "gptq",
        lambda t: {f"{Q_PROJ}.bias": np.ones(64, np.float16)},
        f"tensor '{Q_PROJ}.bias': expected zeros, as the model has no such bias",
    ),
    "groups of other sizes": ("gptq", uneven, "expected a g_idx that has each group 16 times"),
    "another order of q": (
        "gptq sorted",
        shuffled,
        "expected the g_idx of the matrices that multiply the same input",
    ),
    "a strange tensor": (
        "awq",
        lambda t: {f"{Q_PROJ}.qzeroes": np.ones(3, np.float32)},
        f"tensor '{Q_PROJ}.qzeroes' is no part of a llama model",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_files_that_do_not_fit(name, tmp_path):
    form, edit, message = FILES[name]
    config, _ = quantized_cases.write(tmp_path, LLAMA, form)
    path = tmp_path / "model.safetensors"
    tensors = read_all(path)
    tensors |= edit(tensors)
    safetensors_numpy.save_file({k: v for k, v in tensors.items() if v is not None}, path)
    with pytest.raises(models.ModelDirectoryError, match=re.escape(message)) as error:
        models.load_params(tmp_path, config, "float32")
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)


def test_experts_that_are_sorted_or_not_alike(tmp_path):
    for name, plain, message in (
        ("gptq sorted", ("lm_head", "gate."), "desc_act is not supported with experts"),
        ("awq", ("lm_head", "gate.", "experts.2.down_proj"), "to be quantised, or none"),
    ):
        (tmp_path / name).mkdir()
        config, _ = quantized_cases.write(tmp_path / name, MOE, name, plain=plain)
        with pytest.raises(models.ModelDirectoryError, match=message) as error:
            models.load_params(tmp_path / name, config, "float32")
        assert "model.layers.0.mlp.experts." in str(error.value)


def test_scales_of_mxfp4_that_are_no_numbers(tmp_path):
    config = model_cases.write(tmp_path, model_cases.CONFIGS["gpt-oss mxfp4"])
    path = tmp_path / "model.safetensors"
    tensors = read_all(path)
    name = "model.layers.1.mlp.experts.down_proj_scales"
    scales = tensors[name].copy()
    scales[2, 3, 0] = 255
    safetensors_numpy.save_file(tensors | {name: scales}, path)
    with pytest.raises(models.ModelDirectoryError, match=f"'{name}': expected at most 240"):
        models.load_params(tmp_path, config)


def read_all(path) -> dict[str, np.ndarray]:
    """Reads all tensors, FP8 too, which safetensors does not load into numpy."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    dtypes = {"F8_E4M3": jnp.float8_e4m3fn, "BF16": jnp.bfloat16, "F16": np.float16}
    dtypes |= {"F32": np.float32, "I32": np.int32, "I64": np.int64, "I8": np.int8, "U8": np.uint8}
    found = {}
    for name, entry in json.loads(data[8 : 8 + size]).items():
        begin, end = entry["data_offsets"]
        raw = data[8 + size + begin : 8 + size + end]
        found[name] = np.frombuffer(raw, dtypes[entry["dtype"]]).reshape(entry["shape"])
    return found
