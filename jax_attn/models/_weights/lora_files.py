"""LoRA adapters as PEFT writes them: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jax_attn.models._config.config import ModelConfig
from jax_attn.models._config.directory import ModelDirectoryError, existing_directory, read_json
from jax_attn.models._weights.tensors import is_of_shared_kv, layer_prefix, layer_tensors
from jax_attn.models._weights.weights import file_order

MAX_RANK = 64

# Weights of Params that adapters may change: those that a step multiplies as a whole.
ADAPTED = (
    "qkv",
    "o",
    "mixed_o",
    "qkvz",
    "ba",
    "kda_qkv",
    "fgb",
    "f_b",
    "g_b",
    "zxbcdt",
    "lightning_qkv",
    "output_gate",
    "bcx",
    "gate_up",
    "down",
    "shared_gate_up",
    "shared_down",
    "q_a",
    "q_b",
    "kv_a",
)

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"

# Keys of the config that change nothing here: notes, and what only training uses.
_PASSED_OVER = frozenset(
    ("auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode")
    + ("lora_dropout", "fan_in_fan_out", "peft_version", "eva_config", "loftq_config")
    + ("corda_config", "lora_ga_config", "megatron_core", "runtime_config", "ensure_weight_tying")
    + ("qalora_group_size",)
)
_READ = frozenset(
    ("peft_type", "r", "lora_alpha", "use_rslora", "target_modules", "exclude_modules")
    + ("rank_pattern", "alpha_pattern", "layers_to_transform", "layers_pattern")
    + ("bias", "init_lora_weights")
)
# Ways to begin a training that leave the model's own weights as they are.
_BEGINNINGS = (True, False, None, "gaussian", "eva", "orthogonal")

_LORA = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")
_IN_LAYER = re.compile(r"\w+\.layers\.(\d+)\.(.+)")


class Pair(NamedTuple):
    """What an adapter adds to a module: x a^T b^T. a: [rank, in]. b: [out, rank], scaled. f32."""

    a: np.ndarray
    b: np.ndarray


class LoraWeights(NamedTuple):
    """An adapter. pairs: by layer and module, such as (0, "self_attn.q_proj").

    rank: the largest of the pairs.
    """

    rank: int
    pairs: dict[tuple[int, str], Pair]


def load_lora(directory: str | Path, config: ModelConfig) -> LoraWeights:
    """Reads the directory of an adapter that PEFT has written.

    Raises ModelDirectoryError for one that cannot be used: names file, key or tensor.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    top = existing_directory(directory)
    raw = read_json(top / CONFIG)
    path = top / TENSORS
    if not path.is_file():
        other = next(iter(sorted(top.glob("adapter_model.*"))), None)
        advice = f"; convert {other.name} to safetensors" if other is not None else ""
        raise ModelDirectoryError(f"{path}: no such file{advice}")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ModelDirectoryError(f"{path}: not a safetensors file: {error}") from error
    return make_lora(raw, tensors, config, top / CONFIG, path)


def make_lora(
    raw: Mapping[str, Any],
    tensors: Mapping[str, Any],
    config: ModelConfig,
    config_path: Path | str = "config",
    path: Path | str = "tensors",
) -> LoraWeights:
    """An adapter of a config, as adapter_config.json has it, and arrays by PEFT's names.

    config_path, path: what errors call the two.

    Raises ModelDirectoryError as load_lora.
    """
    known = _LoraConfig(raw, config_path, config.tensor_prefix)
    modules = _modules(config)
    found: dict[str, dict[str, np.ndarray]] = {}
    for full_name, tensor in tensors.items():
        name = _without_prefix(full_name, config)
        match = _LORA.fullmatch(name)
        if match is None:
            raise ModelDirectoryError(
                f"{path}: tensor '{full_name}': expected lora_A and lora_B of the model's linear"
                " layers only, without biases, embeddings, magnitudes or whole weights"
            )
        if is_of_shared_kv(name, config):
            continue
        module, side = match["module"], match["side"]
        shape = modules.get(module)
        if shape is None:
            raise ModelDirectoryError(
                f"{path}: tensor '{full_name}': expected a module that adapters may change"
                f" ({_some(modules)}), got {module}"
            )
        if not known.targets(module):
            raise ModelDirectoryError(
                f"{path}: tensor '{full_name}': expected a module that target_modules of"
                f" {CONFIG} names"
            )
        rank = known.rank(module)
        expected = (rank, shape[1]) if side == "A" else (shape[0], rank)
        if tuple(tensor.shape) != expected:
            raise ModelDirectoryError(
                f"{path}: tensor '{full_name}': expected shape {expected}, got"
                f" {tuple(tensor.shape)}"
            )
        if not jnp.issubdtype(tensor.dtype, jnp.floating):
            raise ModelDirectoryError(
                f"{path}: tensor '{full_name}': expected floating-point numbers, got {tensor.dtype}"
            )
        found.setdefault(module, {})[side] = np.asarray(tensor).astype(np.float32)
    pairs = {}
    for module in modules:
        sides = found.get(module)
        if sides is None:
            if known.targets(module):
                raise ModelDirectoryError(
                    f"{path}: tensor '{module}.lora_A.weight' is missing, though target_modules of"
                    f" {CONFIG} names the module"
                )
            continue
        if len(sides) < 2:
            lacking = "B" if "A" in sides else "A"
            raise ModelDirectoryError(f"{path}: tensor '{module}.lora_{lacking}.weight' is missing")
        layer, inner = _split(module)
        pairs[layer, inner] = Pair(sides["A"], sides["B"] * np.float32(known.scale(module)))
    if not pairs:
        raise ModelDirectoryError(f"{path}: expected tensors of an adapter, got none")
    return LoraWeights(max(len(pair.a) for pair in pairs.values()), pairs)


class _LoraConfig:
    """A checked adapter_config.json."""

    def __init__(self, raw: Mapping[str, Any], path: Path | str, prefix: str):
        """prefix: of the model's modules, in the names that patterns match."""
        self._raw, self._path, self._prefix = raw, path, prefix
        self._expect("peft_type", raw.get("peft_type"), "LORA")
        if raw.get("use_dora"):
            raise self._error("use_dora: expected false, as DoRA is not supported")
        if saved := raw.get("modules_to_save"):
            raise self._error(
                f"modules_to_save: expected none, as whole weights are not a part of an adapter"
                f" here, got {saved!r}"
            )
        self._expect("bias", raw.get("bias", "none"), "none")
        begun = raw.get("init_lora_weights", True)
        if begun not in _BEGINNINGS:
            raise self._error(
                f"init_lora_weights: expected a way that keeps the model's own weights, got"
                f" {begun!r}; convert the adapter with path_initial_model_for_weight_conversion"
            )
        for key, value in raw.items():
            if key not in _PASSED_OVER | _READ and value:
                raise self._error(f"{key}: expected none, as it is not supported, got {value!r}")
        for key, value in {"r": raw.get("r", 8), **self._pattern("rank_pattern")}.items():
            if type(value) is not int or not 1 <= value <= MAX_RANK:
                raise self._error(f"{key}: expected a rank of 1 to {MAX_RANK}, got {value!r}")
        for key, value in {
            "lora_alpha": raw.get("lora_alpha", 8),
            **self._pattern("alpha_pattern"),
        }.items():
            is_number = type(value) in (int, float) and math.isfinite(value)
            if not is_number:
                raise self._error(f"{key}: expected a number, got {value!r}")
        self._check_targets()

    def _check_targets(self) -> None:
        for key in ("target_modules", "exclude_modules"):
            value = self._raw.get(key)
            if value is None and key == "exclude_modules":
                continue
            is_list = isinstance(value, list) and all(isinstance(x, str) for x in value)
            if not (is_list or isinstance(value, str)) or (key == "target_modules" and not value):
                raise self._error(f"{key}: expected names or a regular expression, got {value!r}")
            if isinstance(value, str):
                self._check_regex(key, value)
        layers = self._raw.get("layers_to_transform")
        listed = layers if isinstance(layers, list) else [] if layers is None else [layers]
        if not all(type(layer) is int for layer in listed):
            raise self._error(f"layers_to_transform: expected numbers, got {layers!r}")
        self._layers = frozenset(listed)

    def _check_regex(self, key: str, value: str) -> None:
        try:
            re.compile(value)
        except re.error as error:
            raise self._error(
                f"{key}: expected a regular expression, got {value!r}: {error}"
            ) from None

    def _pattern(self, key: str) -> dict[str, Any]:
        value = self._raw.get(key) or {}
        if not isinstance(value, dict):
            raise self._error(f"{key}: expected an object, got {value!r}")
        for name in value:
            self._check_regex(key, name)
        return value

    def _expect(self, key: str, value: Any, expected: str) -> None:
        if value != expected:
            raise self._error(f"{key}: expected {expected!r}, got {value!r}")

    def _error(self, sentence: str) -> ModelDirectoryError:
        return ModelDirectoryError(f"{self._path}: {sentence}")

    def targets(self, module: str) -> bool:
        """Whether the adapter changes a module, by PEFT's rules."""
        names, excluded = self._raw["target_modules"], self._raw.get("exclude_modules")
        if excluded and self._matches(excluded, module):
            return False
        if isinstance(names, str):
            return names == "all-linear" or self._matches(names, module)
        in_layers = not self._layers or _split(module)[0] in self._layers
        return in_layers and self._matches(names, module)

    def _matches(self, names: str | list[str], module: str) -> bool:
        whole = self._prefix + module
        if isinstance(names, str):
            return any(re.fullmatch(names, each) is not None for each in (module, whole))
        return any(whole == name or whole.endswith(f".{name}") for name in names)

    def rank(self, module: str) -> int:
        return int(_by_pattern(self._pattern("rank_pattern"), module, self._raw.get("r", 8)))

    def scale(self, module: str) -> float:
        """The factor of the product: alpha / r, with rsLoRA (arXiv 2312.03732) alpha / sqrt(r)."""
        alpha = _by_pattern(self._pattern("alpha_pattern"), module, self._raw.get("lora_alpha", 8))
        rank = self.rank(module)
        return float(alpha) / (math.sqrt(rank) if self._raw.get("use_rslora") else rank)


def _by_pattern(pattern: Mapping[str, Any], module: str, default: Any) -> Any:
    """The value of the first key that the end of the module's name matches."""
    for key, value in pattern.items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return default


def _modules(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """The modules that adapters may change, and torch's shapes of their weights."""
    modules = {}
    for layer in range(config.num_layers):
        for name, parts in layer_tensors(config, layer).items():
            if name in ADAPTED and isinstance(parts, dict):
                for tensor, (out, depth) in parts.items():
                    whole = layer_prefix(config, layer) + tensor
                    modules[whole.removesuffix(".weight")] = (out, depth)
    return modules


def column_parts(name: str, layer: int, config: ModelConfig) -> list[tuple[int, int]]:
    """The columns of a weight of Params from left to right: (file's tensor, number of columns).

    A tensor is there twice if its columns are apart, as those of q and its gate are.
    """
    parts = layer_tensors(config, layer)[name]
    assert isinstance(parts, dict)
    tensor = np.repeat(np.arange(len(parts)), [shape[0] for shape in parts.values()])
    order = file_order(name, config.of(config.layers[layer]), len(tensor))
    tensor = tensor if order is None else tensor[order]
    borders = [0, *(1 + np.flatnonzero(np.diff(tensor))), len(tensor)]
    return [(int(tensor[begin]), int(end - begin)) for begin, end in itertools.pairwise(borders)]


def _split(module: str) -> tuple[int, str]:
    match = _IN_LAYER.fullmatch(module)
    assert match is not None
    return int(match[1]), match[2]


def _without_prefix(name: str, config: ModelConfig) -> str:
    name = name.removeprefix("base_model.model.").removeprefix(config.tensor_prefix)
    stem = layer_prefix(config, 0).partition("layers.")[0]
    return name if name.startswith(stem) else stem + name


def _some(modules: Iterable[str]) -> str:
    names = dict.fromkeys(module.rpartition(".")[2] for module in modules)
    return ", ".join(names)
