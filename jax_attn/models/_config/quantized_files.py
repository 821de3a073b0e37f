"""Quantized matrices in files: quantization_config, and conversion of its tensors to `Rows`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from jax_attn.models._config.keys import Keys
from jax_attn.models._products.activations import Activations
from jax_attn.models._products.activations import Kind as ActivationKind
from jax_attn.models._products.quantized import Kind

Shape = tuple[int, ...]
FLOATS = ("BF16", "F16", "F32")
_AWQ_ORDER = np.argsort([0, 2, 4, 6, 1, 3, 5, 7])  # AWQ's kernels order the columns of a word so
_PER_WORD = 8  # 4-bit values in an i32 word


class Rows(NamedTuple):
    """A quantized matrix in torch's layout; rows can be permuted and concatenated."""

    codes: np.ndarray  # [out, in], one quantized value per element
    scales: np.ndarray  # [out, groups] f32
    zeros: np.ndarray | None  # [out, groups]
    order: np.ndarray | None  # [in] i32, see Quantized
    kind: Kind
    group_size: int
    activations: Activations | None
    x_scale: np.ndarray | None  # [1, 1] f32, see Quantized


class Tensor(NamedTuple):
    """The shapes and dtypes that files may have for one tensor of a matrix."""

    shapes: tuple[Shape, ...]
    dtypes: tuple[str, ...]
    is_needed: bool = True


# Tensors of a matrix that are not read: scales of activations that are not rounded by them, and
# facts that shapes and dtypes give.
PASSED_OVER = ("input_scale", "activation_scale", "input_global_scale") + (
    *("weight_shape", "weight_format"),
    *("k_scale", "v_scale"),  # of a quantized cache
)
# NVFP4: the tensors of a matrix with its values, and with the scales of all of them and of x.
_NVFP4_NAMES = {
    "modelopt": ("weight", "weight_scale_2", "input_scale"),
    "compressed-tensors": ("weight_packed", "weight_global_scale", "input_global_scale"),
}
_NVFP4_GROUP = 16
_OTHER_NAMES = {"weight_scale_inv": "weight_scale", "activation_scale": "input_scale"}


@dataclasses.dataclass(frozen=True)
class Quantization:
    """The format of the matrices of a model whose tensors are quantized."""

    method: str  # quant_method
    layout: Literal["dense", "bitsandbytes", "gptq", "awq", "packed", "nvfp4"]
    kind: Kind
    group_size: int | None = None  # elements of a row per scale; None: all
    block: int = 1  # rows per scale
    has_zeros: bool = False
    zero_offset: int = 0  # added to the zero points of the files
    activations: Activations | None = None  # how x is rounded; None: not at all

    def tensors(self, outer: int, inner: int) -> dict[str, Tensor]:
        """Returns the tensors of a matrix [outer, inner] by the suffix of their names."""
        of_x = {}
        if self._x_scale_name is not None:
            of_x = {self._x_scale_name: Tensor(((), (1,), (1, 1)), FLOATS)}
        return self._tensors(outer, inner) | of_x

    @property
    def _x_scale_name(self) -> str | None:
        if self.activations is None or not self.activations.needs_scale:
            return None
        return _NVFP4_NAMES[self.method][2] if self.layout == "nvfp4" else "input_scale"

    def _tensors(self, outer: int, inner: int) -> dict[str, Tensor]:
        groups = self._groups(inner)
        if self.layout == "dense":
            dtype = "F8_E4M3" if self.kind == "e4m3" else "I8"
            scales = (-(-outer // self.block), groups)
            shapes = (scales,) if groups > 1 else ((), (1,), (1, 1), (outer,), scales)
            return {
                "weight": Tensor(((outer, inner),), (dtype,)),
                "weight_scale": Tensor(shapes, FLOATS),
            } | ({"weight_zero_point": Tensor(shapes, ("I8",))} if self.has_zeros else {})
        if self.layout == "bitsandbytes":
            return {
                "weight": Tensor(((outer, inner),), ("I8",)),
                "SCB": Tensor(((outer,),), FLOATS),
            }
        if self.layout == "nvfp4":
            codes, whole, _ = _NVFP4_NAMES[self.method]
            return {
                codes: Tensor(((outer, inner // 2),), ("U8",)),
                "weight_scale": Tensor(((outer, groups),), ("F8_E4M3",)),
                whole: Tensor(((), (1,)), ("F32",)),
            }
        words = outer // _PER_WORD
        if self.layout == "packed":
            zeros = {"weight_zero_point": Tensor(((-(-outer // _PER_WORD), groups),), ("I32",))}
            return {
                "weight_packed": Tensor(((outer, -(-inner // _PER_WORD)),), ("I32",)),
                "weight_scale": Tensor(((outer, groups),), FLOATS),
                "weight_g_idx": Tensor(((inner,),), ("I32",), is_needed=False),
            } | (zeros if self.has_zeros else {})
        shape = (inner // _PER_WORD, outer) if self.layout == "gptq" else (inner, words)
        index = {"g_idx": Tensor(((inner,),), ("I32",), is_needed=False)}
        return {
            "qweight": Tensor((shape,), ("I32",)),
            "qzeros": Tensor(((groups, words),), ("I32",)),
            "scales": Tensor(((groups, outer),), FLOATS),
        } | (index if self.layout == "gptq" else {})

    def read(self, get: Callable[[str], np.ndarray | None], outer: int, inner: int) -> Rows:
        """Reads a matrix [outer, inner].

        get: returns the tensor of a name in `tensors`, or None for a missing optional one.

        Raises ValueError for contents that cannot be used.
        """

        def need(name: str) -> np.ndarray:
            found = get(name)
            assert found is not None
            return found

        zeros, index = None, None
        if self.layout in ("dense", "bitsandbytes"):
            codes = need("weight")
            if self.kind == "e4m3":
                if ((codes & 0x7F) == 0x7F).any():
                    raise ValueError("expected numbers, got NaN")
            if self.layout == "dense":
                scales = self._of_rows(need("weight_scale"), outer, inner)
                if self.has_zeros:
                    zeros = self._of_rows(need("weight_zero_point"), outer, inner)
            else:
                scales = need("SCB")[:, None].astype(np.float32) / np.float32(127)
        elif self.layout == "nvfp4":
            names = _NVFP4_NAMES[self.method]
            octets = need(names[0])
            codes = np.stack([octets & 15, octets >> 4], axis=-1).reshape(outer, -1)
            scales = need("weight_scale")
            if ((scales & 0x7F) == 0x7F).any():
                raise ValueError("expected numbers as weight_scale, got NaN")
            factor = self._factor(names[1], need(names[1]))
            scales = scales.view(jnp.float8_e4m3fn).astype(np.float32) * factor
        elif self.layout == "packed":
            codes = _nibbles(need("weight_packed"))[:, :inner]
            scales, index = need("weight_scale"), get("weight_g_idx")
            zeros = np.full(scales.shape, 8, np.uint8)
            if self.has_zeros:
                zeros = _nibbles(need("weight_zero_point").T).T[:outer]
            index = None if index is None or (index < 0).all() else index
        elif self.layout == "gptq":
            codes = _nibbles(need("qweight").T)
            scales, zeros = need("scales").T, _nibbles(need("qzeros")).T
            index = get("g_idx")
        else:
            codes, zeros = (_in_awq_order(need(name)).T for name in ("qweight", "qzeros"))
            scales = need("scales").T
        if zeros is not None:
            zeros = zeros + zeros.dtype.type(self.zero_offset)
        size = self.group_size or inner
        order = None if index is None else _order(index, size)
        if order is not None:
            codes = codes[:, order]
        x_scale = None
        if (name := self._x_scale_name) is not None:
            x_scale = self._factor(name, need(name)).reshape(1, 1)
        scales = scales.astype(np.float32)
        return Rows(codes, scales, zeros, order, self.kind, size, self.activations, x_scale)

    def _factor(self, name: str, scale: np.ndarray) -> np.float32:
        """The scale of a whole tensor. Raises ValueError for no number above 0."""
        whole = np.float32(scale.reshape(()))
        is_inverse = self.layout == "nvfp4" and self.method == "compressed-tensors"
        with np.errstate(divide="ignore"):
            factor = 1 / whole if is_inverse else whole
        if not (np.isfinite(factor) and factor > 0):
            raise ValueError(f"expected a number > 0 as {name}, got {whole}")
        return factor

    def _groups(self, inner: int) -> int:
        return -(-inner // (self.group_size or inner))

    def _of_rows(self, array: np.ndarray, outer: int, inner: int) -> np.ndarray:
        """Broadcasts values for all rows, or for blocks of rows, to [outer, groups]."""
        if array.size == 1:
            return np.broadcast_to(array.reshape(1, 1), (outer, self._groups(inner)))
        array = array.reshape(len(array), -1)
        return np.repeat(array, self.block, axis=0)[:outer]


def name_of(suffix: str) -> str:
    """Returns the name that `Quantization.tensors` uses for a suffix."""
    return _OTHER_NAMES.get(suffix, suffix)


def _nibbles(words: np.ndarray) -> np.ndarray:
    """Unpacks i32 words [..., n] to 4-bit values [..., 8 n] u8, the lowest bits first."""
    octets = np.ascontiguousarray(words).view(np.uint8)
    return np.stack([octets & 15, octets >> 4], axis=-1).reshape(*words.shape[:-1], -1)


def _in_awq_order(words: np.ndarray) -> np.ndarray:
    codes = _nibbles(words)
    return codes.reshape(len(codes), -1, _PER_WORD)[..., _AWQ_ORDER].reshape(codes.shape)


def _order(index: np.ndarray, size: int) -> np.ndarray | None:
    """Returns the elements of a row sorted by group; None if they are sorted already.

    index: [in]. The group of each element. Raises ValueError unless groups have `size` elements.
    """
    expected = np.arange(len(index)) // size
    if (index == expected).all():
        return None
    order = np.argsort(index, kind="stable").astype(np.int32)
    if not (index[order] == expected).all():
        raise ValueError(f"expected a g_idx that has each group {size} times")
    return order


# ---- quantization_config -----------------------------------------------------------------------


def parse_quantization(keys: Keys, of_modelopt: Keys | None = None) -> Quantization | None:
    """Parses quantization_config. Raises, naming the key, for an unsupported option.

    of_modelopt: the keys of hf_quant_config.json, which counts if quantization_config is missing.
    """
    keys.expect("compression_config", None)
    raw = keys.get("quantization_config")
    if raw is None and of_modelopt is not None:
        of_modelopt.need("quantization")
        return _modelopt(_inner(of_modelopt, "quantization", of_modelopt.get("quantization")))
    if raw is None:
        return None
    inner = _inner(keys, "quantization_config", raw)
    inner.need("quant_method")
    inner.expect("quant_method", *_METHODS)
    return _METHODS[raw["quant_method"]](inner)


def _inner(keys: Keys, key: str, value: Any) -> Keys:
    if not isinstance(value, Mapping):
        raise keys.error(f"{key}: expected an object, got {value!r}")
    return Keys(dict(value), f"{keys.path}: {key}")


def _know(keys: Keys, *names: str) -> None:
    """Raises for keys other than `names`, which are read elsewhere or have no effect here."""
    for key, value in keys.raw.items():
        if key not in (*names, "quant_method") and value not in (None, False, {}, []):
            raise keys.error(f"key '{key}' is not supported")


_LEFT_OUT = ("modules_to_not_convert", "ignored_layers", "ignore")  # the files show it


def _fp8(keys: Keys) -> Quantization:
    """Parses the settings of DeepSeek's and transformers' FP8. Without a scheme it is dynamic."""
    _know(keys, "activation_scheme", "fmt", "weight_block_size", "scale_fmt", *_LEFT_OUT)
    keys.expect("fmt", "e4m3", None)
    keys.expect("activation_scheme", "dynamic", "static", None)
    keys.expect("scale_fmt", "float", "ue8m0", None)
    is_static = keys.get("activation_scheme") == "static"
    powers = keys.get("scale_fmt") == "ue8m0" and not is_static
    block, size = 1, None
    if keys.get("weight_block_size") is not None:
        block, size = _block(keys, "weight_block_size")
    activations = Activations("e4m3", is_static, None if is_static else size, powers=powers)
    return Quantization("fp8", "dense", "e4m3", size, block, activations=activations)


def _fbgemm_fp8(keys: Keys) -> Quantization:
    _know(keys, "activation_scale_ub", *_LEFT_OUT)
    limit = keys.get("activation_scale_ub", 1200.0)  # the default of transformers
    if limit is not None:
        limit = float(keys.check_number("activation_scale_ub", limit))
    return Quantization("fbgemm_fp8", "dense", "e4m3", activations=Activations("e4m3", limit=limit))


def _bitsandbytes(keys: Keys) -> Quantization:
    _know(
        keys,
        "load_in_8bit",
        "_load_in_8bit",
        "llm_int8_threshold",  # for activations
        "llm_int8_skip_modules",
        *(f"bnb_4bit_{x}" for x in ("compute_dtype", "quant_storage", "quant_type")),
    )
    if not (keys.get("load_in_8bit") or keys.get("_load_in_8bit")):
        raise keys.error("load_in_8bit: expected True, got False")
    return Quantization("bitsandbytes", "bitsandbytes", "int8")


def _gptq(keys: Keys) -> Quantization:
    _know(
        keys,
        *("bits", "group_size", "desc_act", "sym", "checkpoint_format", "pack_dtype", "lm_head"),
        # How the file was made, and how other programs run it.
        *("damp_percent", "damp_auto_increment", "true_sequential", "static_groups", "meta"),
        *("model_name_or_path", "model_file_base_name", "dataset", "tokenizer", "batch_size"),
        *("block_name_to_quantize", "module_name_preceding_first_block", "model_seqlen"),
        *("modules_in_block_to_quantize", "cache_block_outputs", "exllama_config", "use_exllama"),
        *("disable_exllama", "max_input_length", "pad_token_id", "use_cuda_fp16", "backend"),
        *("act_group_aware", "mse"),
    )
    keys.need("bits")
    keys.expect("bits", 4)
    keys.expect("pack_dtype", "int32", None)
    keys.expect("checkpoint_format", "gptq", "gptq_v2", None)
    # The first version of the format stores zero points minus one.
    offset = 0 if keys.get("checkpoint_format") == "gptq_v2" else 1
    return Quantization("gptq", "gptq", "int4", _group_size(keys), 1, True, offset)


def _awq(keys: Keys) -> Quantization:
    _know(keys, "bits", "group_size", "version", "zero_point", "backend", *_LEFT_OUT)
    keys.need("bits")
    keys.expect("bits", 4)
    keys.expect("zero_point", True)
    if str(keys.get("version", "gemm")).lower() != "gemm":
        raise keys.error(f"version: expected 'gemm', got {keys.get('version')!r}")
    return Quantization("awq", "awq", "int4", _group_size(keys), has_zeros=True)


def _compressed_tensors(keys: Keys) -> Quantization:
    _know(
        keys,
        *("config_groups", "format", "quantization_status", "global_compression_ratio", "version"),
        *_LEFT_OUT,
    )
    keys.expect("quantization_status", "compressed", None)
    layouts: dict[str, Literal["dense", "packed", "nvfp4"]] = {
        "float-quantized": "dense",
        "int-quantized": "dense",
        "naive-quantized": "dense",
        "pack-quantized": "packed",
        "nvfp4-pack-quantized": "nvfp4",
    }
    keys.expect("format", *layouts)
    groups = _inner(keys, "config_groups", keys.need("config_groups"))
    found = set()
    for name in groups.raw:
        group = _inner(groups, name, groups.need(name))
        _know(group, "weights", "input_activations", "targets", "format")
        group.expect("format", keys.get("format"), None)
        weights = _inner(group, "weights", group.need("weights"))
        of_weights = _scheme(weights, layouts[keys.get("format", "float-quantized")])
        raw, activations = group.get("input_activations"), None
        if raw is not None:
            activations = _activations(_inner(group, "input_activations", raw))
        found.add(dataclasses.replace(of_weights, activations=activations))
    if len(found) != 1:
        raise keys.error(f"config_groups: expected one way for all weights, got {len(found)}")
    return found.pop()


def _scheme(keys: Keys, layout: Literal["dense", "packed", "nvfp4"]) -> Quantization:
    """Parses the scheme of the weights of a compressed-tensors group."""
    _know(
        keys,
        *("num_bits", "type", "strategy", "group_size", "block_structure", "symmetric", "actorder"),
        *("observer", "observer_kwargs", "scale_dtype", "zp_dtype", "dynamic"),
    )
    keys.expect("dynamic", False, None)
    for key in ("num_bits", "type", "strategy"):
        keys.need(key)
    if layout == "nvfp4":
        for key, value in (("strategy", "tensor_group"), ("num_bits", 4), ("type", "float")):
            keys.expect(key, value)
        keys.expect("group_size", _NVFP4_GROUP)
        keys.expect("symmetric", True)
        return Quantization("compressed-tensors", "nvfp4", "e2m1", _NVFP4_GROUP)
    keys.expect("strategy", "channel", "tensor", "group", "block")
    keys.expect("num_bits", 8 if layout == "dense" else 4)
    keys.expect("type", *(("float", "int") if layout == "dense" else ("int",)))
    kind: Kind = "int4" if layout == "packed" else "e4m3"
    if layout == "dense" and keys.get("type") == "int":
        kind = "int8"
    size, block = None, 1
    if keys.get("strategy") == "group":
        size = _group_size(keys)
    elif keys.get("strategy") == "block":
        block, size = _block(keys, "block_structure")
    has_zeros = not keys.flag("symmetric", True)
    return Quantization("compressed-tensors", layout, kind, size, block, has_zeros)


def _activations(keys: Keys) -> Activations:
    """Parses the scheme of the inputs of a compressed-tensors group."""
    _know(
        keys,
        *("num_bits", "type", "strategy", "group_size", "symmetric", "dynamic"),
        *("observer", "observer_kwargs", "scale_dtype", "zp_dtype"),
    )
    keys.expect("num_bits", 8, 4)
    keys.expect("type", "int", "float", None)
    keys.expect("symmetric", True, None)
    if keys.get("num_bits") == 4:
        expected = ("type", "float"), ("strategy", "tensor_group"), ("dynamic", "local")
        for key, value in (*expected, ("group_size", _NVFP4_GROUP)):
            keys.need(key)
            keys.expect(key, value)
        return Activations("e2m1", group_size=_NVFP4_GROUP)
    keys.expect("scale_dtype", None)
    kind: ActivationKind = "e4m3" if keys.get("type") == "float" else "int8"
    keys.expect("dynamic", False, True, None)
    if not keys.get("dynamic"):
        keys.expect("strategy", "tensor", None)
        return Activations(kind, is_static=True)
    # One scale for a whole batch would make a request's tokens depend on the others'.
    keys.need("strategy")
    keys.expect("strategy", "token", "group")
    size = _group_size(keys) if keys.get("strategy") == "group" else None
    return Activations(kind, group_size=size)


def _group_size(keys: Keys) -> int | None:
    if keys.need("group_size") == -1:
        return None
    size = keys.size("group_size")
    if size % 2:  # two rows that share a byte must share a scale
        raise keys.error(f"group_size: expected -1 or an even number, got {size}")
    return size


def _block(keys: Keys, key: str) -> tuple[int, int]:
    """Returns the rows and columns that share a scale."""
    value = keys.need(key)
    if not (isinstance(value, list) and len(value) == 2 and all(type(x) is int for x in value)):
        raise keys.error(f"{key}: expected two integers, got {value!r}")
    rows, columns = (keys.check_number(key, x) for x in value)
    return rows, columns


def _mxfp4(keys: Keys) -> Quantization:
    """Parses gpt-oss's settings: only the experts are MXFP4, with tensors of their own."""
    _know(keys, *_LEFT_OUT)
    return Quantization("mxfp4", "dense", "e2m1", 32)


def _modelopt(keys: Keys) -> Quantization:
    """Parses the settings of NVIDIA's ModelOpt. The cache's format is that of the spec, not of the
    files."""
    _know(
        keys,
        *("quant_algo", "group_size", "kv_cache_quant_algo", "kv_cache_scheme", "exclude_modules"),
        *("config_groups", "producer", "quant_library", *_LEFT_OUT),
    )
    keys.need("quant_algo")
    keys.expect("quant_algo", "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4")
    if (found := keys.get("quant_algo")) != "NVFP4":
        activations = Activations("e4m3", is_static=found == "FP8")
        return Quantization("modelopt", "dense", "e4m3", activations=activations)
    keys.expect("group_size", _NVFP4_GROUP, None)
    activations = Activations("e2m1", group_size=_NVFP4_GROUP)
    return Quantization("modelopt", "nvfp4", "e2m1", _NVFP4_GROUP, activations=activations)


_METHODS: dict[str, Callable[[Keys], Quantization]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm_fp8,
    "bitsandbytes": _bitsandbytes,
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "mxfp4": _mxfp4,
}
