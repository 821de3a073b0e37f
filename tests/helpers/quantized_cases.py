"""Directories with quantized matrices, and the numbers that they stand for.

The helpers pack and widen element by element, following each format's own description.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from helpers import model_cases
from jax_attn.models._families.parse import parse_config
from jax_attn.models._weights.tensors import file_shapes

Tensors = dict[str, np.ndarray]


class Format(NamedTuple):
    config: dict[str, Any]  # quantization_config
    # (random, out, in) -> tensors by the ends of their names, and the matrix [out, in] f32.
    make: Callable[[np.random.RandomState, int, int], tuple[Tensors, np.ndarray]]
    bits: int


def e4m3(random, outer, inner) -> np.ndarray:
    """Random e4m3 bytes, u8, without NaN; some are zeros and subnormals."""
    codes = random.randint(0, 256, (outer, inner)).astype(np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 1
    return codes


def scales_of(random, shape, dtype=np.float32) -> np.ndarray:
    return random.uniform(0.5, 1.5, shape).astype(dtype)


INPUT_SCALE = np.float32(1 / 128)  # activations beyond 3.5 are cut off


def fp8(name: str, per: str, block: int = 0, dtype: Any = np.float32, of_input: str = ""):
    """of_input: the name of a static scale of activations."""

    def make(random, outer, inner):
        codes = e4m3(random, outer, inner).view(jnp.float8_e4m3fn)
        size, rows = (block, block) if block else (inner, 1 if per == "channel" else outer)
        shape = (-(-outer // rows), -(-inner // size))
        scales = (scales_of(random, shape) / 512).astype(dtype)
        wide = np.empty((outer, inner), np.float32)
        for o in range(outer):
            for i in range(inner):
                wide[o, i] = np.float32(codes[o, i]) * np.float32(scales[o // rows, i // size])
        if per == "tensor":
            scales = scales.reshape(())
        more = {of_input: INPUT_SCALE.reshape(1)} if of_input else {}
        return {"weight": codes, name: scales} | more, wide

    return make


def int8(random, outer, inner):
    codes = random.randint(-127, 128, (outer, inner)).astype(np.int8)
    scales = scales_of(random, (outer, 1)) / 256
    return {"weight": codes, "weight_scale": scales}, codes * scales


def int8_with_zeros(random, outer, inner):
    tensors, _ = int8(random, outer, inner)
    zeros = random.randint(-20, 20, (outer, 1)).astype(np.int8)
    codes, scales = tensors["weight"].astype(np.float32), tensors["weight_scale"]
    return tensors | {"weight_zero_point": zeros}, (codes - zeros) * scales


def llm_int8(random, outer, inner):
    codes = random.randint(-127, 128, (outer, inner)).astype(np.int8)
    largest = scales_of(random, (outer,))
    marks = {"weight_format": np.zeros((), np.uint8)}
    return {"weight": codes, "SCB": largest, **marks}, codes * (largest[:, None] / 127)


def packed(codes: np.ndarray) -> np.ndarray:
    """Packs numbers below 16 [..., n] to i32 [..., n / 8], the first in the lowest bits."""
    words = np.zeros((*codes.shape[:-1], codes.shape[-1] // 8), np.uint32)
    for i in range(codes.shape[-1]):
        words[..., i // 8] |= codes[..., i].astype(np.uint32) << np.uint32(4 * (i % 8))
    return words.view(np.int32)


def gptq(size: int, offset: int = 1, sort: bool = False):
    """GPTQ's format. sort: desc_act, whose groups hold elements that need not be neighbours."""

    def make(random, outer, inner):
        size_here = inner if size < 0 else size
        groups = inner // size_here
        codes = random.randint(0, 16, (outer, inner))
        zeros = random.randint(offset, 16, (groups, outer))
        scales = (scales_of(random, (groups, outer)) / 20).astype(np.float16)
        index = np.arange(inner) // size_here
        if sort:  # the input's order: matrices that multiply the same input share it
            np.random.RandomState(inner).shuffle(index)
        wide = (codes - zeros[index].T) * scales[index].T.astype(np.float32)
        return {
            "qweight": np.ascontiguousarray(packed(codes).T),
            "qzeros": packed(zeros - offset),
            "scales": scales,
            "g_idx": index.astype(np.int32),
            "bias": np.zeros(outer, np.float16),
        }, wide

    return make


def awq(random, outer, inner, size=16):
    codes = random.randint(0, 16, (inner, outer))
    zeros = random.randint(0, 16, (-(-inner // size), outer))
    scales = (scales_of(random, zeros.shape) / 20).astype(np.float16)
    index = np.arange(inner) // size
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # from AutoAWQ's WQLinear_GEMM

    def pack(array):
        words = np.zeros((len(array), array.shape[1] // 8), np.uint32)
        for word in range(words.shape[1]):
            for i, column in enumerate(order):
                words[:, word] |= array[:, 8 * word + column].astype(np.uint32) << np.uint32(4 * i)
        return words.view(np.int32)

    wide = ((codes - zeros[index]) * scales[index].astype(np.float32)).T
    return {"qweight": pack(codes), "qzeros": pack(zeros), "scales": scales}, wide


def pack_quantized(size: int, symmetric: bool):
    def make(random, outer, inner):
        codes = random.randint(-8, 8, (outer, inner))
        zeros = random.randint(-8, 8, (outer, inner // size)) * (not symmetric)
        scales = scales_of(random, zeros.shape) / 20
        index = np.arange(inner) // size
        wide = (codes - zeros[:, index]) * scales[:, index]
        tensors = {
            "weight_packed": packed(codes + 8),
            "weight_scale": scales.astype(jnp.bfloat16),
            "weight_shape": np.array([outer, inner]),
        }
        if not symmetric:
            tensors["weight_zero_point"] = packed(zeros.T + 8).T.copy()
        scales = tensors["weight_scale"].astype(np.float32)
        wide = (codes - zeros[:, index]) * scales[:, index]
        return tensors, wide.astype(np.float32)

    return make


_E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


def nvfp4(codes_name: str, whole_name: str, divides: bool, whole: float | None = None):
    """NVFP4: a byte has two values, the first in its low bits; scales in e4m3 for 16 of them, and
    one for all, which multiplies or divides. whole: the scale for all; None: a random one."""
    given = whole

    def make(random, outer, inner):
        codes = random.randint(0, 16, (outer, inner))
        scales = (1 + random.randint(0, 8, (outer, inner // 16)) / 8).astype(jnp.float8_e4m3fn)
        whole = np.float32(random.uniform(0.02, 0.04) if given is None else given)
        wide = np.empty((outer, inner), np.float32)
        octets = np.zeros((outer, inner // 2), np.uint8)
        for o in range(outer):
            for i in range(inner):
                sign = -1 if codes[o, i] & 8 else 1
                wide[o, i] = sign * _E2M1[codes[o, i] & 7] * np.float32(scales[o, i // 16]) * whole
                octets[o, i // 2] |= codes[o, i] << (4 * (i % 2))
        stored = np.full((1,) if divides else (), 1 / whole if divides else whole, np.float32)
        return {
            codes_name: octets,
            "weight_scale": scales,
            whole_name: stored,
            # Magnitudes up to 6.
            "input_global_scale" if divides else "input_scale": np.full(
                (1,) if divides else (), 448 if divides else 1 / 448, np.float32
            ),
        }, wide

    return make


def compressed(
    format: str, activations: dict[str, Any] | None = None, **weights: Any
) -> dict[str, Any]:
    group = {
        "weights": {"num_bits": 8, "symmetric": True, "dynamic": False} | weights,
        "input_activations": activations,
        "output_activations": None,
        "targets": ["Linear"],
    }
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
    }


_GPTQ = {"quant_method": "gptq", "bits": 4, "sym": False, "damp_percent": 0.1}
FORMATS = {
    "fp8 tensor": Format(
        {"quant_method": "fp8", "activation_scheme": "static"},
        fp8("weight_scale", "tensor", of_input="activation_scale"),
        8,
    ),
    "fp8 block": Format(
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [24, 24]},
        fp8("weight_scale_inv", "block", 24),
        8,
    ),
    "fbgemm": Format(
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        fp8("weight_scale", "channel"),
        8,
    ),
    "compressed fp8 channel": Format(
        compressed("float-quantized", type="float", strategy="channel"),
        fp8("weight_scale", "channel", dtype=jnp.bfloat16),
        8,
    ),
    "compressed fp8 block": Format(
        compressed("float-quantized", type="float", strategy="block", block_structure=[16, 16]),
        fp8("weight_scale", "block", 16),
        8,
    ),
    "compressed int8": Format(
        compressed("int-quantized", type="int", strategy="channel"), int8, 8
    ),
    "compressed int8 with zeros": Format(
        compressed("int-quantized", type="int", strategy="channel", symmetric=False),
        int8_with_zeros,
        8,
    ),
    "compressed int4": Format(
        compressed("pack-quantized", type="int", num_bits=4, strategy="group", group_size=16),
        pack_quantized(16, True),
        4,
    ),
    "compressed int4 with zeros": Format(
        compressed("pack-quantized", type="int", num_bits=4, strategy="group", group_size=32,
                   symmetric=False),
        pack_quantized(32, False),
        4,
    ),
    "compressed nvfp4": Format(
        compressed("nvfp4-pack-quantized", type="float", num_bits=4, strategy="tensor_group",
                   group_size=16),
        nvfp4("weight_packed", "weight_global_scale", True),
        4,
    ),
    "modelopt nvfp4": Format(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"],
         "kv_cache_scheme": {"num_bits": 8}, "producer": {"name": "modelopt"}},
        nvfp4("weight", "weight_scale_2", False),
        4,
    ),
    "modelopt fp8": Format(
        {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]},
        fp8("weight_scale", "tensor", of_input="input_scale"),
        8,
    ),
    "llm.int8": Format(
        {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False,
         "bnb_4bit_quant_type": "fp4", "llm_int8_threshold": 6.0},
        llm_int8,
        8,
    ),
    "gptq": Format(_GPTQ | {"group_size": 16, "desc_act": False}, gptq(16), 4),
    "gptq one group": Format(_GPTQ | {"group_size": -1}, gptq(-1), 4),
    "gptq sorted": Format(_GPTQ | {"group_size": 32, "desc_act": True}, gptq(32, sort=True), 4),
    "gptq v2": Format(
        _GPTQ | {"group_size": 16, "checkpoint_format": "gptq_v2"}, gptq(16, offset=0), 4
    ),
    "awq": Format(
        {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True,
         "version": "gemm", "modules_to_not_convert": None},
        awq,
        4,
    ),
}  # fmt: skip

_TOKENS = {"num_bits": 8, "symmetric": True, "dynamic": True, "strategy": "token"}
# Formats whose activations are rounded, too, and that compressed-tensors runs on a CPU.
WITH_ACTIVATIONS = {
    "fp8 channel, tokens": Format(
        compressed("float-quantized", _TOKENS | {"type": "float"}, type="float",
                   strategy="channel"),
        fp8("weight_scale", "channel"),
        8,
    ),
    "fp8 tensor, static": Format(
        compressed("float-quantized", {"num_bits": 8, "type": "float", "symmetric": True,
                                       "dynamic": False, "strategy": "tensor"},
                   type="float", strategy="tensor"),
        fp8("weight_scale", "tensor", of_input="input_scale"),
        8,
    ),
    "fp8 block, groups": Format(
        compressed("float-quantized", _TOKENS | {"type": "float", "strategy": "group",
                                                 "group_size": 16},
                   type="float", strategy="block", block_structure=[16, 16]),
        fp8("weight_scale", "block", 16),
        8,
    ),
    "int8 channel, tokens": Format(
        compressed("int-quantized", _TOKENS | {"type": "int"}, type="int", strategy="channel"),
        int8,
        8,
    ),
    "nvfp4, local": Format(
        compressed("nvfp4-pack-quantized",
                   {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": "local",
                    "strategy": "tensor_group", "group_size": 16,
                    "scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn"},
                   type="float", num_bits=4, strategy="tensor_group", group_size=16),
        nvfp4("weight_packed", "weight_global_scale", True, whole=2**-5),
        4,
    ),
}  # fmt: skip
RECORDED = Path(__file__).parents[1] / "data" / "activations.npz"  # make_activations.py


# Wide enough for several tiles of columns and a partial one.
LLAMA = model_cases.CONFIGS["llama"] | {
    "hidden_size": 64,
    "intermediate_size": 224,
    "num_hidden_layers": 2,
}
MOE = model_cases.CONFIGS["qwen3 moe"] | {
    "hidden_size": 64,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
}
DEEPSEEK = model_cases.CONFIGS["deepseek v3"] | {"hidden_size": 64, "moe_intermediate_size": 48}


def write(
    directory: Path, raw: dict[str, Any], name: str, plain: tuple[str, ...] = ("lm_head", "gate.")
) -> tuple[Any, Tensors]:
    """A directory of format `name`; its config, and all tensors as f32.

    plain: parts of the names of matrices that are not quantized.
    """
    from safetensors.numpy import save_file

    form = (FORMATS | WITH_ACTIVATIONS)[name]
    raw = raw | {"quantization_config": form.config}
    (directory / "config.json").write_text(json.dumps(raw))
    config = parse_config(raw)
    wide = model_cases.random_tensors(config)
    in_file = dict(wide)
    for tensor, shape in file_shapes(config).items():
        is_matrix = len(shape) == 2 and "embed" not in tensor
        if not is_matrix or any(part in tensor for part in plain):
            continue
        stem = tensor.removesuffix(".weight")
        random = np.random.RandomState(zlib.crc32(stem.encode()))
        parts, wide[tensor] = form.make(random, *shape)
        del in_file[tensor]
        in_file |= {f"{stem}.{part}": array for part, array in parts.items()}
    save_file(
        {k: np.ascontiguousarray(v) for k, v in in_file.items()}, directory / "model.safetensors"
    )
    return config, {
        tensor: np.ascontiguousarray(array, np.float32) for tensor, array in wide.items()
    }
