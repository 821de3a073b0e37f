"""Rounded activations: the numbers of compressed-tensors, and products of 8-bit numbers."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from helpers import quantized_cases
from helpers.backends import Backend
from helpers.quantized_cases import LLAMA, MOE, WITH_ACTIVATIONS
from jax_attn import models
from jax_attn.models._layers import experts
from jax_attn.models._products import quantized
from jax_attn.models._products.activations import Activations, rounded
from jax_attn.models._products.quantized import Quantized

safetensors_numpy = pytest.importorskip("safetensors.numpy")

GPU = ", as on a GPU"
TYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e2m1": ml_dtypes.float4_e2m1fn}
LARGEST = {"e4m3": 448, "e2m1": 6}
reference = jax.jit(
    models.reference_forward,
    static_argnames="config",
    compiler_options={"xla_backend_optimization_level": 0},
)


def nearest(x, kind) -> np.ndarray:
    """By ml_dtypes, or numpy's rounding of ties to even."""
    if kind == "int8":
        return np.round(np.clip(x, -128, 127))
    return np.clip(x, -LARGEST[kind], LARGEST[kind]).astype(TYPES[kind]).astype(np.float32)


def logits_of(params, config):
    """[vocab_size, vocab_size] f32: row t follows a text that is token t alone."""
    plain = dataclasses.replace(config, quantization=None)
    texts = np.arange(config.vocab_size)[:, None]
    return np.concatenate([reference(params, plain, text) for text in texts])


def without_activations(params):
    is_leaf = lambda x: isinstance(x, Quantized)  # noqa: E731
    plain = lambda x: quantized.without_activations(x) if is_leaf(x) else x  # noqa: E731
    return jax.tree.map(plain, params, is_leaf=is_leaf)


@pytest.mark.parametrize("name", [*WITH_ACTIVATIONS, "fp8 channel, tokens, as on a GPU"])
def test_logits_are_those_of_compressed_tensors(name, tmp_path, monkeypatch):
    if on_gpu := name.endswith(GPU):
        name = name.removesuffix(GPU)
        monkeypatch.setattr(quantized, "multiplies_float8", lambda: True)
    config, _ = quantized_cases.write(tmp_path, LLAMA, name)
    params = models.load_params(tmp_path, config, "float32")
    with np.load(quantized_cases.RECORDED) as recorded:
        want = recorded[name]
    assert all(params["layers"][1][each].is_transposed == on_gpu for each in ("qkv", "o", "down"))
    far = np.abs(logits_of(params, config) - want).max(axis=1) > 4e-5 * np.abs(want).max()
    # The last bit of an activation decides ties, and differs from processor to processor. One that
    # falls otherwise changes its own text alone: 3 of 48 in int8, none in the others, on AVX512.
    assert far.mean() < 0.2
    plain = np.abs(logits_of(without_activations(params), config) - want).max(axis=1)
    assert (plain > 5e-3 * np.abs(want).max()).all()


# ---- rounding ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["e4m3", "int8", "e2m1"])
def test_numbers_are_rounded_to_the_nearest(kind):
    """All numbers of the kind, those halfway between two of them, and neighbors of both."""
    every = np.arange(256).astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    every = {"int8": np.arange(-128, 128), "e2m1": np.array([*range(-6, 7), 0.5, 1.5])}.get(
        kind, every[np.isfinite(every)]
    )
    every = np.unique(every).astype(np.float32)
    x = np.concatenate([every, (every[1:] + every[:-1]) / 2, [1e4, -1e4]]).astype(np.float32)
    x = np.concatenate([x, np.nextafter(x, np.inf), np.nextafter(x, -np.inf), [-np.inf]])
    x = x.astype(np.float32)
    for scale in (1, 2**-20):
        one = np.full((1, 1), scale, np.float32)
        got = jax.jit(rounded, static_argnums=1)(x[None] * scale, Activations(kind, True), one)
        np.testing.assert_array_equal(np.asarray(got.values)[0], nearest(x, kind))
        got = rounded(jnp.array([[1, np.nan]]), Activations(kind, True), one).values
        np.testing.assert_array_equal(np.isnan(got), [[False, True]])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "how",
    [
        Activations("e4m3"),
        Activations("int8"),
        Activations("e4m3", limit=1.5),
        Activations("e4m3", group_size=16, powers=True),
        Activations("int8", group_size=16),
        Activations("e2m1", group_size=16),
    ],
    ids=str,
)
def test_scales_are_those_of_rows_and_groups(how, dtype):
    """Element by element; the last group is not full, and a row is all zeros."""
    random = np.random.RandomState(0)
    x = jnp.asarray(random.standard_normal((4, 40)) * [[1], [0], [30], [1e-3]], dtype)
    whole = np.float32(1 / 448) if how.kind == "e2m1" else None
    of_files = None if whole is None else whole.reshape(1, 1)
    got = jax.jit(rounded, static_argnums=1)(x, how, of_files).product()
    assert got.dtype == x.dtype
    values, want = np.asarray(x, np.float32), np.zeros(x.shape, np.float32)
    size = how.group_size or 40
    for row in range(4):
        for first in range(0, 40, size):
            part = values[row, first : first + size]
            largest = min(np.abs(part).max(), np.float32(how.limit or np.inf))
            if largest == 0:
                continue
            scale = largest / np.float32({"e4m3": 448, "int8": 127.5, "e2m1": 6}[how.kind])
            if how.powers:
                scale = np.float32(2.0 ** np.ceil(np.log2(scale)))
            if how.kind == "e2m1":
                scale = max(nearest(scale / whole, "e4m3"), 0) * whole or 0.125 * whole
            want[row, first : first + size] = nearest(part / scale, how.kind) * scale
    tolerance = {"float32": 1e-6, "bfloat16": 2**-8}[dtype]
    np.testing.assert_allclose(np.asarray(got, np.float32), want, rtol=tolerance)


def test_a_row_that_is_no_number_spoils_no_other():
    x = np.ones((3, 8), np.float32)
    x[1, 2] = np.nan
    for how in (Activations("e4m3"), Activations("int8"), Activations("e4m3", group_size=8)):
        got = np.asarray(rounded(jnp.asarray(x), how).product())
        assert np.isnan(got[1]).all()
        np.testing.assert_allclose(got[[0, 2]], 1, rtol=1 / 255)  # int8: 127 of 127.5 steps


# ---- products ----------------------------------------------------------------------------------


def matrix(depth, columns, how, x_scale=None):
    """As files have it: [out, in], to be multiplied as 8-bit numbers."""
    random = np.random.RandomState(1)
    codes = quantized_cases.e4m3(random, columns, depth).view(jnp.float8_e4m3fn)
    scales = random.uniform(0.5, 1.5, (1, columns)).astype(np.float32)
    weight = Quantized(codes, scales, None, None, "e4m3", depth, how, x_scale)
    return jax.tree.map(jnp.asarray, weight)


@pytest.mark.parametrize("columns", [7, 256, 517])
@pytest.mark.parametrize("how", [Activations("e4m3"), Activations("e4m3", True)], ids=str)
def test_products_of_8_bit_numbers(how, columns, monkeypatch):
    """By tiles, and as a GPU has them."""
    monkeypatch.setattr(quantized, "_TILE", 256)
    x_scale = jnp.full((1, 1), 0.01, jnp.float32) if how.is_static else None
    weight = matrix(48, columns, how, x_scale)
    assert weight.shape == (48, columns) and weight.is_transposed
    x = jnp.asarray(np.random.RandomState(2).standard_normal((5, 48)), jnp.float32)
    rows = rounded(x, how, x_scale)
    wide = np.asarray(weight.codes, np.float64).T * np.asarray(weight.scales, np.float64)
    np.testing.assert_allclose(quantized.widen(weight, jnp.float32), wide, rtol=1e-6)
    want = np.asarray(rows.values, np.float64) * np.asarray(rows.scales, np.float64) @ wide
    plain = quantized.without_activations(weight)
    bound = 1e-6 * np.abs(want).max()
    np.testing.assert_allclose(jax.jit(quantized.product)(x, weight), want, atol=bound)
    on_gpu = jax.jit(quantized._float8_product, static_argnums=2)(rows, plain, None)
    np.testing.assert_allclose(on_gpu, want, atol=bound)
    elsewhere = quantized._product(rows.product(), plain, None, has_float8=True)
    np.testing.assert_allclose(elsewhere, want, atol=bound)


@pytest.mark.cuda
@pytest.mark.parametrize("backend", [Backend("gpu")], ids=["cuda"], indirect=True)
@pytest.mark.parametrize("shape", [(1, 4096, 6144), (7, 4096, 272), (300, 528, 1000)], ids=str)
def test_products_of_8_bit_numbers_on_a_gpu(shape, backend):
    """Tensor cores keep some 13 bits below the largest addend of 32 products."""
    num_rows, depth, columns = shape
    x = jnp.asarray(np.random.RandomState(5).standard_normal((num_rows, depth)), jnp.float32)
    for how in (Activations("e4m3"), Activations("e4m3", True)):
        x_scale = jnp.full((1, 1), 0.01, jnp.float32) if how.is_static else None
        weight = matrix(depth, columns, how, x_scale)
        rows = rounded(x, how, x_scale)
        wide = np.asarray(weight.codes, np.float64).T * np.asarray(weight.scales, np.float64)
        want = np.asarray(rows.values, np.float64) * np.asarray(rows.scales, np.float64) @ wide
        error = np.asarray(jax.jit(quantized.product)(x, weight), np.float64) - want
        assert np.sqrt((error**2).mean()) < 1e-3 * np.sqrt((want**2).mean())


def test_groups_of_x_are_those_of_its_own_order():
    random = np.random.RandomState(4)
    codes, order = random.randint(-99, 99, (32, 8)), random.permutation(32).astype(np.int32)
    how = Activations("e4m3", group_size=8)
    ordered = Quantized(
        codes[order].astype(np.int8), np.ones((1, 8), np.float32), None, order, "int8", 32, how
    )
    x = random.standard_normal((3, 32)).astype(np.float32) * np.repeat([1, 100, 9, 1], 8)
    want = rounded(jnp.asarray(x, jnp.float32), how).product() @ codes.astype(np.float32)
    got = quantized.product(jnp.asarray(x, jnp.float32), jax.tree.map(jnp.asarray, ordered))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("platform", ["cuda", "cpu"])
def test_8_bit_numbers_are_multiplied_on_gpus(platform):
    weight, x = matrix(64, 128, Activations("e4m3")), jnp.ones((8, 64), jnp.bfloat16)
    call = jax.jit(lambda x, weight: quantized.product(x, weight))
    text = call.trace(x, weight).lower(lowering_platforms=(platform,)).as_text()
    dots = re.findall(r"dot_general.*\((tensor<[^,]*>), (tensor<[^,]*>)\)", text)
    assert dots
    assert all(("f8E4M3FN" in a and "f8E4M3FN" in b) == (platform == "cuda") for a, b in dots)


@pytest.mark.parametrize(
    ("target", "expected"), [((0, 0), False), (None, False), ((80, 108), False), ((90, 132), True)]
)
def test_gpus_that_multiply_8_bit_numbers(target, expected, monkeypatch):
    monkeypatch.setattr(quantized, "gpu_target", lambda: target)
    assert quantized.multiplies_float8() == expected


@pytest.mark.parametrize("is_static", [False, True])
def test_experts_round_the_rows_that_they_see(is_static):
    random = np.random.RandomState(3)
    codes = quantized_cases.e4m3(random, 3 * 16, 24).reshape(3, 16, 24)
    how = Activations("e4m3", is_static)
    x_scale = np.array([0.01, 0.003, 0.02], np.float32).reshape(3, 1, 1) if is_static else None
    weight = Quantized(codes, np.ones((3, 1, 24), np.float32), None, None, "e4m3", 16, how, x_scale)
    x, sizes = random.standard_normal((7, 16)).astype(np.float32), np.array([2, 0, 5], np.int32)
    got = jax.jit(experts.grouped_matmul)(x, jax.tree.map(jnp.asarray, weight), sizes)
    for row, group in enumerate(np.repeat(np.arange(3), sizes)):
        of_group = None if x_scale is None else x_scale[group]
        own = rounded(x[row : row + 1], how, of_group).product()
        wide = codes[group].view(jnp.float8_e4m3fn).astype(np.float32)
        np.testing.assert_allclose(got[row], np.asarray(own @ wide)[0], rtol=1e-4, atol=1e-2)


def test_experts_of_a_model(tmp_path):
    """Logits follow the static scale of an expert."""
    config, _ = quantized_cases.write(tmp_path, MOE, "fp8 tensor, static")
    params = models.load_params(tmp_path, config, "float32")
    stack = params["layers"][0]["expert_down"]
    assert stack.x_scale.shape == (len(stack.codes), 1, 1) and not stack.is_transposed
    before = logits_of(params, config)
    coarse = dataclasses.replace(stack, x_scale=stack.x_scale * 8)
    params["layers"][0]["expert_down"] = coarse
    assert np.abs(logits_of(params, config) - before).max() > 1e-3 * np.abs(before).max()


# ---- settings ----------------------------------------------------------------------------------


def parsed(quantization_config):
    raw = LLAMA | {"quantization_config": quantization_config}
    return models.parse_config(raw, "x/config.json").quantization.activations


def test_schemes():
    fp8 = {"quant_method": "fp8"}
    blocks = {"weight_block_size": [128, 128]}
    assert parsed(fp8 | blocks) == Activations("e4m3", group_size=128)
    assert parsed(fp8 | blocks | {"scale_fmt": "ue8m0"}) == Activations(
        "e4m3", group_size=128, powers=True
    )
    assert parsed(fp8 | {"activation_scheme": "dynamic"}) == Activations("e4m3")
    assert parsed(fp8 | {"activation_scheme": "static"}) == Activations("e4m3", True)
    fbgemm = {"quant_method": "fbgemm_fp8"}
    assert parsed(fbgemm) == Activations("e4m3", limit=1200.0)
    assert parsed(fbgemm | {"activation_scale_ub": 5}) == Activations("e4m3", limit=5.0)
    modelopt = {"quant_method": "modelopt", "quant_algo": "FP8"}
    assert parsed(modelopt) == Activations("e4m3", True)
    modelopt["quant_algo"] = "FP8_PER_CHANNEL_PER_TOKEN"
    assert parsed(modelopt) == Activations("e4m3")
    modelopt["quant_algo"] = "NVFP4"
    assert parsed(modelopt) == Activations("e2m1", group_size=16)
    weights = {"type": "int", "strategy": "channel"}
    assert parsed(quantized_cases.compressed("int-quantized", None, **weights)) is None


TOKENS = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}
REFUSED = {
    "one scale for a batch": (
        TOKENS | {"strategy": "tensor"},
        "strategy: expected 'token' or 'group', got 'tensor'",
    ),
    "no strategy": ({"num_bits": 8, "dynamic": True}, "key 'strategy' is missing"),
    "zero points": (TOKENS | {"symmetric": False}, "symmetric: expected True or None, got False"),
    "6 bits": (TOKENS | {"num_bits": 6}, "num_bits: expected 8 or 4, got 6"),
    "static groups": (
        TOKENS | {"dynamic": False, "strategy": "group"},
        "strategy: expected 'tensor' or None, got 'group'",
    ),
    "scales in e4m3": (
        TOKENS | {"scale_dtype": "torch.float8_e4m3fn"},
        "scale_dtype: expected None, got 'torch.float8_e4m3fn'",
    ),
    "4 bits, dynamic": (
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "dynamic": True},
        "dynamic: expected 'local', got True",
    ),
    "an order": (TOKENS | {"actorder": "group"}, "key 'actorder' is not supported"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_schemes_that_are_not_done_are_refused(name):
    activations, message = REFUSED[name]
    config = quantized_cases.compressed(
        "int-quantized", activations, type="int", strategy="channel"
    )
    with pytest.raises(models.ModelDirectoryError, match=re.escape(message)) as error:
        parsed(config)
    assert "config_groups: group_0: input_activations: " in str(error.value)


def test_a_scheme_of_fp8_that_is_not_known():
    with pytest.raises(models.ModelDirectoryError, match="activation_scheme: expected 'dynamic',"):
        parsed({"quant_method": "fp8", "activation_scheme": "token"})


Q_PROJ = "model.layers.0.self_attn.q_proj"
K_PROJ = "model.layers.0.self_attn.k_proj"
FILES = {
    "no scale": ({f"{Q_PROJ}.input_scale": None}, f"tensor '{Q_PROJ}.input_scale' is missing"),
    "zero": (
        {f"{Q_PROJ}.input_scale": np.zeros(1, np.float32)},
        f"tensor '{Q_PROJ}.weight': expected a number > 0 as input_scale, got 0.0",
    ),
    "another scale": (
        {f"{K_PROJ}.input_scale": np.ones(1, np.float32)},
        f"tensor '{K_PROJ}.weight': expected the activation scale of the matrices that multiply "
        "the same input, 0.0078125, got 1.0",
    ),
    "one scale for each": (
        {f"{Q_PROJ}.input_scale": np.ones(64, np.float32)},
        f"tensor '{Q_PROJ}.input_scale': expected shape () or (1,) or (1, 1), got (64,)",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_files_that_do_not_fit(name, tmp_path):
    changes, message = FILES[name]
    config = edited(tmp_path, changes)
    with pytest.raises(models.ModelDirectoryError, match=re.escape(message)):
        models.load_params(tmp_path, config, "float32")


def edited(directory, changes):
    """A directory of static scales with other tensors; None: without one."""
    config, _ = quantized_cases.write(directory, LLAMA, "fp8 tensor, static")
    path = directory / "model.safetensors"
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    found = {}
    for name, entry in json.loads(raw[8 : 8 + size]).items():
        begin, end = entry["data_offsets"]
        dtype = {"F8_E4M3": jnp.float8_e4m3fn, "F32": np.float32}[entry["dtype"]]
        part = raw[8 + size + begin : 8 + size + end]
        found[name] = np.frombuffer(part, dtype).reshape(entry["shape"])
    kept = {k: v for k, v in (found | changes).items() if v is not None}
    safetensors_numpy.save_file(kept, path)
    return config


def test_matrices_of_one_input_are_rounded_alike(tmp_path):
    config, _ = quantized_cases.write(
        tmp_path, LLAMA, "fp8 channel, tokens", plain=("lm_head", "0.self_attn.k_proj")
    )
    message = f"'{K_PROJ}.weight': expected the matrices that multiply the same input to be quan"
    with pytest.raises(models.ModelDirectoryError, match=re.escape(message)):
        models.load_params(tmp_path, config, "float32")
