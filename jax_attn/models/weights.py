"""The weights of a model: their names and shapes, from safetensors files or at random."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn.models import mxfp4
from jax_attn.models.config import Experts, Latent, ModelConfig
from jax_attn.models.directory import ModelDirectoryError, existing, read_json
from jax_attn.models.quantized import Matrix, Quantized, codes_per_byte, widen
from jax_attn.models.quantized_files import FLOATS, PASSED_OVER, Rows, Tensor, name_of
from jax_attn.models.rope import Rope, rotary_order

Params: TypeAlias = dict[str, Any]
"""embed [vocab, hidden], final_norm [hidden], head [hidden, vocab] unless tied, and layers: a list
of dicts of weights, [in, out] or [n]. Matrices that multiply the same input are one: qkv is q, k
and v, gate_up is gate and up, side by side. Those of experts are stacked, [experts, in, out]. A
matrix that the files have in few bits is a `Quantized`."""

Shape: TypeAlias = tuple[int, ...]

Parts: TypeAlias = dict[str, Shape]
"""Tensors of the files that make one matrix, side by side; a list of them makes a stack."""

_WEIGHT, _EMBED = ".weight", "model.embed_tokens.weight"
_IMAGE_PARTS = ("vision_tower.", "multi_modal_projector.")


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, Parts | list[Parts]]:
    """For each weight of a layer the tensors it is made of, as torch shapes them.

    A matrix is [out, in] in torch, and the other way round in Params.
    """
    d = config.hidden_size
    q_size = config.num_qo_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    qkv_sizes = {"q": q_size, "k": kv_size, "v": kv_size}
    # Where there are norms after attention and MLP, they take the name of the one before the MLP.
    before_mlp = "pre_feedforward" if config.post_norms else "post_attention"
    tensors: dict[str, Parts | list[Parts]] = {"o": {"self_attn.o_proj.weight": (d, q_size)}}
    if config.latent is not None:
        tensors = _latent_tensors(config, config.latent)
    elif config.packed:
        tensors["qkv"] = {"self_attn.qkv_proj.weight": (q_size + 2 * kv_size, d)}
    else:
        tensors["qkv"] = {f"self_attn.{x}_proj.weight": (n, d) for x, n in qkv_sizes.items()}
    if config.pre_norms:
        tensors["attention_norm"] = {"input_layernorm.weight": (d,)}
        tensors["mlp_norm"] = {f"{before_mlp}_layernorm.weight": (d,)}
    if config.qkv_bias:
        tensors["qkv_bias"] = {f"self_attn.{x}_proj.bias": (n,) for x, n in qkv_sizes.items()}
    if config.sinks:
        tensors["sinks"] = {"self_attn.sinks": (config.num_qo_heads,)}
    if config.o_bias:
        tensors["o_bias"] = {"self_attn.o_proj.bias": (d,)}
    if config.qk_norm != "none":
        for x in "qk":
            size = config.head_dim if config.qk_norm == "per_head" else qkv_sizes[x]
            tensors[f"{x}_norm"] = {f"self_attn.{x}_norm.weight": (size,)}
    if config.post_norms:
        tensors["attention_post_norm"] = {"post_attention_layernorm.weight": (d,)}
        tensors["mlp_post_norm"] = {"post_feedforward_layernorm.weight": (d,)}
    return tensors | _mlp_tensors(config, layer)


def _latent_tensors(config: ModelConfig, latent: Latent) -> dict[str, Parts | list[Parts]]:
    d, heads = config.hidden_size, config.num_qo_heads
    q_size = heads * (latent.nope + latent.rope)
    tensors: dict[str, Parts | list[Parts]] = {
        "kv_a": {"self_attn.kv_a_proj_with_mqa.weight": (latent.kv_rank + latent.rope, d)},
        "kv_a_norm": {"self_attn.kv_a_layernorm.weight": (latent.kv_rank,)},
        "kv_b": {"self_attn.kv_b_proj.weight": (heads * (latent.nope + latent.v), latent.kv_rank)},
        "o": {"self_attn.o_proj.weight": (d, heads * latent.v)},
    }
    if latent.q_rank is None:
        return tensors | {"q_b": {"self_attn.q_proj.weight": (q_size, d)}}
    return tensors | {
        "q_a": {"self_attn.q_a_proj.weight": (latent.q_rank, d)},
        "q_a_norm": {"self_attn.q_a_layernorm.weight": (latent.q_rank,)},
        "q_b": {"self_attn.q_b_proj.weight": (q_size, latent.q_rank)},
    }


def _mlp_tensors(config: ModelConfig, layer: int) -> dict[str, Parts | list[Parts]]:
    d, ff, experts = config.hidden_size, config.intermediate_size, config.experts
    if experts is not None and layer not in experts.dense_layers:
        return _expert_tensors(experts, d)
    if config.packed:
        gate_up: Parts = {"mlp.gate_up_proj.weight": (2 * ff, d)}
    else:
        gate_up = {f"mlp.{x}_proj.weight": (ff, d) for x in ("gate", "up")}
    return {"gate_up": gate_up, "down": {"mlp.down_proj.weight": (d, ff)}}


def _expert_tensors(experts: Experts, d: int) -> dict[str, Parts | list[Parts]]:
    names, ff, count = experts.names, experts.intermediate_size, experts.count
    router: dict[str, Parts | list[Parts]] = {"router": {f"{names.router}.weight": (count, d)}}
    if experts.sigmoid:
        router["router_correction"] = {f"{names.router}.e_score_correction_bias": (count,)}
    if shared := experts.shared_size:
        prefix = "mlp.shared_experts"
        router["shared_gate_up"] = {
            f"{prefix}.{x}_proj.weight": (shared, d) for x in ("gate", "up")
        }
        router["shared_down"] = {f"{prefix}.down_proj.weight": (d, shared)}
    if not experts.stacked:
        return router | {
            "expert_gate_up": [
                {f"{name.format(e)}.weight": (ff, d) for name in names.gate_up}
                for e in range(count)
            ],
            "expert_down": [{f"{names.down.format(e)}.weight": (d, ff)} for e in range(count)],
        }
    (gate_up,), down = names.gate_up, names.down
    return router | {
        "router_bias": {f"{names.router}.bias": (count,)},
        "expert_gate_up": _stack(experts, gate_up, d, 2 * ff),
        "expert_gate_up_bias": {f"{gate_up}_bias": (count, 2 * ff)},
        "expert_down": _stack(experts, down, ff, d),
        "expert_down_bias": {f"{down}_bias": (count, d)},
    }


def _stack(experts: Experts, name: str, inner: int, outer: int) -> Parts:
    if experts.stacked == "plain":
        return {name: (experts.count, inner, outer)}
    blocks = (experts.count, outer, inner // mxfp4.BLOCK)
    return {f"{name}_blocks": (*blocks, mxfp4.BLOCK // 2), f"{name}_scales": blocks}


def file_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor that belongs in the files, as torch shapes it; names are without prefix."""
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
    }
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    for i in range(config.num_layers):
        for weight in layer_tensors(config, i).values():
            for parts in weight if isinstance(weight, list) else [weight]:
                shapes |= {f"model.layers.{i}.{name}": shape for name, shape in parts.items()}
    return shapes


def load_params(
    directory: str | Path,
    config: ModelConfig,
    dtype: jax.typing.DTypeLike = "bfloat16",
    progress: Callable[[int, int], None] | None = None,
) -> Params:
    """Reads the weights of model.safetensors, or of the shards that its index names.

    Memory holds the weights and what one of them is made of. All headers are checked first.

    dtype: of the weights in memory, and so of the activations; files may hold bf16, f16 or f32, or
      matrices as config.quantization says, which stay as they are.
    progress: see `load`.

    Raises ModelDirectoryError for a tensor that is missing, is one too many or does not fit.
    """
    with contextlib.ExitStack() as stack:
        expected = Expected(config, file_shapes(config))
        return _make_params(open_tensors(stack, directory, expected, progress), config, dtype)


class Expected:
    """The tensors that belong in the files of a model."""

    def __init__(self, config: Any, shapes: dict[str, Shape]):
        """config: a ModelConfig; of other models, for a subclass, what is used of one here."""
        self.config, self.shapes = config, shapes
        # Of matrices that may be quantised, by stem, and by name.
        self.of_matrix: dict[str, dict[str, Tensor]] = {}
        if config.quantization is not None and config.quantization.kind != "e2m1":
            for name, shape in self.shapes.items():
                if name.endswith(_WEIGHT) and len(shape) == 2 and name != _EMBED:
                    stem = name.removesuffix(_WEIGHT)
                    self.of_matrix[stem] = config.quantization.tensors(*shape)

    def name(self, full_name: str) -> str:
        """Without prefix, and with the one that models without a head are saved without."""
        name = full_name.removeprefix(self.config.tensor_prefix)
        longer = f"model.{name}"
        is_known = longer in self.shapes or longer.rpartition(".")[0] in self.of_matrix
        return longer if is_known else name

    def find(self, name: str) -> tuple[str, tuple[Tensor, ...]] | None:
        """What the tensor is called here, and what it may be."""
        plain = self.shapes.get(name)
        stem, _, suffix = name.rpartition(".")
        part = self.of_matrix.get(stem, {}).get(name_of(suffix))
        if plain is None and part is None:
            return None
        allowed = () if part is None else (part,)
        if plain is not None:
            allowed = (Tensor((plain,), _dtypes(name)), *allowed)
        return f"{stem}.{name_of(suffix)}" if stem else name, allowed

    def is_passed_over(self, name: str) -> bool:
        """Whether other programs' files have it, and nothing here needs it.

        Old exports carry the RoPE table, tied ones the head a second time, some an image encoder
        beside the text model, and DeepSeek's layers that predict more than one token.
        """
        config = self.config
        stem, _, suffix = name.rpartition(".")
        return (
            name.endswith("rotary_emb.inv_freq")
            or (name == "lm_head.weight" and config.tie_embeddings)
            or (bool(config.tensor_prefix) and name.startswith(_IMAGE_PARTS))
            or (stem in self.of_matrix and suffix in PASSED_OVER)
            or name.startswith(
                tuple(f"model.layers.{config.num_layers + i}." for i in range(config.extra_layers))
            )
        )

    def is_bias_of_zeros(self, name: str) -> bool:
        """Files of GPTQ have biases, which should be zeros, where the model has none."""
        stem, _, suffix = name.rpartition(".")
        quantization = self.config.quantization
        is_gptq = quantization is not None and quantization.layout == "gptq"
        return is_gptq and suffix == "bias" and stem in self.of_matrix

    def missing(self, tensors: dict[str, _InFile]) -> list[str]:
        missing = set(self.shapes) - set(tensors)
        for stem, parts in self.of_matrix.items():
            name = stem + _WEIGHT
            if name in tensors and tensors[name].dtype in FLOATS:
                continue  # not quantised
            needed = {f"{stem}.{part}" for part, tensor in parts.items() if tensor.is_needed}
            if any(part in tensors for part in needed):
                missing.discard(name)
                missing |= needed - set(tensors)
        return sorted(missing)


class _InFile(NamedTuple):
    """A tensor of a file that is open."""

    file: Any
    path: Path
    name: str  # there
    shape: Shape
    dtype: str

    def read(self) -> np.ndarray:
        if self.dtype == "F8_E4M3":  # numpy has no such type
            return _bytes_of(self.path, self.name).reshape(self.shape)
        return self.file.get_tensor(self.name)

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class FileTensors:
    """Of the files, each read when it is asked for."""

    def __init__(
        self,
        files: dict[str, _InFile],
        expected: Expected,
        progress: Callable[[int, int], None] | None,
    ):
        self._files, self._expected, self._progress = files, expected, progress
        self._num_read, self._num_all = 0, sum(tensor.size for tensor in files.values())

    def __getitem__(self, name: str) -> np.ndarray:
        tensor = self._files[name].read()
        self._num_read += tensor.size
        if self._progress is not None:
            self._progress(self._num_read, self._num_all)
        return tensor

    def matrix(self, name: str) -> np.ndarray | Rows:
        """A tensor as it is, or what it is if it is quantised."""
        stem = name.removesuffix(_WEIGHT)
        parts = self._expected.of_matrix.get(stem)
        if parts is None or (name in self._files and self._files[name].dtype in FLOATS):
            return self[name]
        quantization = self._expected.config.quantization
        assert quantization is not None

        def get(part: str) -> np.ndarray | None:
            return self[f"{stem}.{part}"] if f"{stem}.{part}" in self._files else None

        try:
            return quantization.read(get, *self._expected.shapes[name])
        except ValueError as error:
            raise self.error(name, str(error)) from None

    def error(self, name: str, message: str) -> ModelDirectoryError:
        """name: of a tensor, or of a matrix whose tensors have other names."""
        parts = self._expected.of_matrix.get(stem := name.removesuffix(_WEIGHT), ())
        names = [name, *(f"{stem}.{part}" for part in parts)]
        found = next(self._files[each] for each in names if each in self._files)
        return ModelDirectoryError(f"{found.path}: tensor '{found.name}': {message}")


def _make_params(tensors: FileTensors, config: ModelConfig, dtype: jax.typing.DTypeLike) -> Params:
    def plain(layer: int, weight: str, parts: Parts, found: list[np.ndarray]) -> np.ndarray:
        whole = _in_rotary_order(np.concatenate(found), weight, config)
        if whole.ndim == 3 or weight.endswith("_bias"):  # [experts, ...] as in memory
            return _gate_then_up(whole, weight, config)
        return whole.T

    def side_by_side(layer: int, weight: str, parts: Parts) -> np.ndarray | Quantized:
        names = [f"model.layers.{layer}.{name}" for name in parts]
        if names[0].endswith("_blocks"):
            blocks, scales = (tensors[name] for name in names)
            if scales.max() > mxfp4.MAX_SCALE:
                raise tensors.error(names[1], f"expected at most {mxfp4.MAX_SCALE}")
            codes, scales = (
                _gate_then_up(array.swapaxes(1, 2), weight, config)
                for array in (mxfp4.codes(blocks), scales)
            )
            return Quantized(codes, scales, None, None, "e2m1", mxfp4.BLOCK)
        found = [tensors.matrix(name) for name in names]
        quantized = [rows for rows in found if isinstance(rows, Rows)]
        # What latent attention absorbs is wanted as it is, and so is what is quantised in part.
        if len(quantized) == len(found) and weight != "kv_b":
            for name, rows in zip(names, quantized, strict=True):
                if not _same(rows.order, quantized[0].order):
                    raise tensors.error(
                        name, "expected the g_idx of the matrices that multiply the same input"
                    )
            return _below_each_other(
                quantized, lambda array: _in_rotary_order(array, weight, config)
            )
        arrays = [_widened(rows) if isinstance(rows, Rows) else rows for rows in found]
        return plain(layer, weight, parts, arrays)

    def on_device(weight: np.ndarray | Quantized) -> Matrix:
        if isinstance(weight, Quantized):
            return jax.block_until_ready(jax.tree.map(jnp.asarray, weight))
        # Waits, as what is being copied stays in memory.
        return jax.block_until_ready(jnp.asarray(weight, dtype))

    def make(layer: int, weight: str, parts: Parts | list[Parts]) -> Matrix:
        if not isinstance(parts, list):
            return on_device(side_by_side(layer, weight, parts))
        first = side_by_side(layer, weight, parts[0])
        whole = jax.tree.map(lambda a: np.empty((len(parts), *a.shape), a.dtype), first)
        for i, part in enumerate(parts):
            expert = side_by_side(layer, weight, part) if i else first
            if isinstance(expert, Quantized) != isinstance(first, Quantized):
                raise tensors.error(
                    f"model.layers.{layer}.{next(iter(part))}",
                    "expected all experts of a layer to be quantised, or none",
                )
            if isinstance(expert, Quantized) and expert.order is not None:
                raise tensors.error(
                    f"model.layers.{layer}.{next(iter(part))}",
                    "expected a g_idx in order, as desc_act is not supported with experts",
                )
            jax.tree.map(lambda a, b, i=i: a.__setitem__(i, b), whole, expert)
        return on_device(whole)

    params: Params = {
        "embed": on_device(tensors["model.embed_tokens.weight"]),
        "final_norm": on_device(tensors["model.norm.weight"]),
    }
    if not config.tie_embeddings:
        head = tensors.matrix("lm_head.weight")
        whole = _below_each_other([head]) if isinstance(head, Rows) else head.T
        params["head"] = on_device(whole)
    params["layers"] = [
        {weight: make(i, weight, parts) for weight, parts in layer_tensors(config, i).items()}
        for i in range(config.num_layers)
    ]
    return params


def _below_each_other(
    rows: list[Rows], ordered: Callable[[np.ndarray], np.ndarray] = lambda array: array
) -> Quantized:
    """[in, out] of matrices that torch has as [out, in], with their outputs in another order."""

    def whole(arrays: Iterable[np.ndarray]) -> np.ndarray:
        return np.ascontiguousarray(ordered(np.concatenate([*arrays])).T)

    first = rows[0]
    codes = whole(each.codes for each in rows)
    if codes_per_byte(first.kind) == 2:
        codes = codes[::2] | codes[1::2] << 4
    scales = whole(each.scales for each in rows)
    zeros = (
        None if first.zeros is None else whole(z for each in rows if (z := each.zeros) is not None)
    )
    return Quantized(codes, scales, zeros, first.order, first.kind, first.group_size)


def _widened(rows: Rows) -> np.ndarray:
    """[out, in] f32."""
    wide = np.asarray(widen(_below_each_other([rows._replace(order=None)]), jnp.float32)).T
    return wide if rows.order is None else wide[:, np.argsort(rows.order)]


def _same(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    if one is None or other is None:
        return one is other
    return np.array_equal(one, other)


def _gate_then_up(tensor: np.ndarray, weight: str, config: ModelConfig) -> np.ndarray:
    """Where the columns of gate and up alternate, those of gate first."""
    if config.experts is None or not config.experts.stacked or "gate_up" not in weight:
        return tensor
    return np.concatenate([tensor[..., ::2], tensor[..., 1::2]], axis=-1)


def _in_rotary_order(tensor: np.ndarray, weight: str, config: ModelConfig) -> np.ndarray:
    """q and k, and what else has their dimensions, with those of each head as kernels rotate them.

    tensor: [out, ...].
    """
    if config.latent is not None:
        return _in_pairs_order(tensor, weight, config, config.latent)
    ropes = {kind.rope for kind in config.layers if kind.rope is not None}
    if all(rope.fraction == 1 for rope in ropes):
        return tensor
    (fraction,) = {rope.fraction for rope in ropes}
    num_heads = {
        "qkv": config.num_qo_heads + config.num_kv_heads,
        "qkv_bias": config.num_qo_heads + config.num_kv_heads,
        "q_norm": 1 if config.qk_norm == "per_head" else config.num_qo_heads,
        "k_norm": 1 if config.qk_norm == "per_head" else config.num_kv_heads,
    }.get(weight, 0)
    order = rotary_order(Rope(1.0, fraction=fraction), config.head_dim)
    rotated = num_heads * config.head_dim
    heads = tensor[:rotated].reshape(num_heads, config.head_dim, *tensor.shape[1:])
    return np.concatenate([heads[:, order].reshape(tensor[:rotated].shape), tensor[rotated:]])


def _in_pairs_order(
    tensor: np.ndarray, weight: str, config: ModelConfig, latent: Latent
) -> np.ndarray:
    """Of latent attention's q and k: neighbours that rotate together, half of them apart."""
    if not latent.interleaved or weight not in ("q_b", "kv_a"):
        return tensor
    fixed = latent.nope if weight == "q_b" else latent.kv_rank
    order = np.concatenate([np.arange(0, latent.rope, 2), np.arange(1, latent.rope, 2)])
    heads = tensor.reshape(-1, fixed + latent.rope, tensor.shape[1])
    return heads[:, np.concatenate([np.arange(fixed), fixed + order])].reshape(tensor.shape)


def random_params(
    config: ModelConfig, key: jax.Array, dtype: jax.typing.DTypeLike = "bfloat16"
) -> Params:
    """Random weights under which activations and logits are of order 1, for tests and benchmarks.

    Norm weights and biases are random, too, so that leaving one out is seen.
    """
    d = config.hidden_size
    shapes: Params = {"embed": (config.vocab_size, d), "final_norm": (d,)}
    if not config.tie_embeddings:
        shapes["head"] = (d, config.vocab_size)
    shapes["layers"] = [
        {
            weight: _shape_in_memory(weight, parts)
            for weight, parts in layer_tensors(config, i).items()
        }
        for i in range(config.num_layers)
    ]

    def make(path: tuple[jax.tree_util.DictKey, ...], shape: Shape, key: jax.Array) -> jax.Array:
        name = path[-1].key
        if name.endswith("norm"):
            return _normal(key, shape, dtype, 0.1, 1 - config.norm_offset)
        is_vector = name.endswith(("bias", "correction")) or name == "sinks"
        return _normal(key, shape, dtype, 0.1 if is_vector else shape[-2] ** -0.5)

    leaves, tree = jax.tree.flatten_with_path(shapes, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(key, len(leaves))
    made = [make(*leaf, k) for leaf, k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(tree, made)


def _shape_in_memory(weight: str, parts: Parts | list[Parts]) -> Shape:
    if isinstance(parts, list):
        return (len(parts), *_shape_in_memory("", parts[0]))
    shapes = list(parts.values())
    if len(shapes) == 2 and len(shapes[0]) == 4:  # codes and scales
        count, outer, num_blocks = shapes[1]
        return (count, num_blocks * mxfp4.BLOCK, outer)
    if len(shapes[0]) == 3 or weight.startswith("expert"):
        return shapes[0]
    sizes, *rest = zip(*shapes, strict=True)
    return (*(x[0] for x in rest), sum(sizes))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key: jax.Array, shape: Shape, dtype: Any, scale: float, mean: float = 0) -> jax.Array:
    return (mean + scale * jax.random.normal(key, shape, dtype)).astype(dtype)


def open_tensors(
    stack: contextlib.ExitStack,
    directory: str | Path,
    expected: Expected,
    progress: Callable[[int, int], None] | None,
) -> FileTensors:
    """Those of model.safetensors, or of the shards; the files are open as long as stack.

    Raises: see `load_params`.
    """
    tensors: dict[str, _InFile] = {}
    for path in _weight_files(Path(directory)):
        tensors |= _tensors_of(stack, path, expected)
    if missing := expected.missing(tensors):
        raise ModelDirectoryError(
            f"{directory}: tensor '{expected.config.tensor_prefix}{missing[0]}' is missing, with "
            f"{len(missing) - 1} more"
        )
    return FileTensors(tensors, expected, progress)


def _weight_files(directory: Path) -> list[Path]:
    whole, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    if not index.is_file():
        raise ModelDirectoryError(f"{directory}: neither {whole.name} nor {index.name} is there")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ModelDirectoryError(f"{index}: key 'weight_map' is missing")
    names = set(map(str, weight_map.values()))
    for name in names:
        # The index may be a stranger's, and is to name files of this directory only.
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ModelDirectoryError(
                f"{index}: weight_map: expected names of files in this directory, got {name!r}"
            )
    return [existing(directory / name) for name in sorted(names)]


def _tensors_of(
    stack: contextlib.ExitStack, path: Path, expected: Expected
) -> Iterable[tuple[str, _InFile]]:
    """The tensors of one file, each checked. The file is open as long as stack."""
    from safetensors import SafetensorError, safe_open

    config = expected.config
    try:
        file = safe_open(path, framework="numpy")
    except SafetensorError as error:
        raise ModelDirectoryError(f"{path}: not a safetensors file: {error}") from error
    stack.enter_context(file)
    for full_name in file.keys():
        name = expected.name(full_name)
        where = f"{path}: tensor '{full_name}'"
        found = expected.find(name)
        if found is None and expected.is_passed_over(name):
            continue
        if found is None and expected.is_bias_of_zeros(name):
            if file.get_tensor(full_name).any():
                raise ModelDirectoryError(f"{where}: expected zeros, as the model has no such bias")
            continue
        if found is None:
            raise ModelDirectoryError(
                f"{where} is no part of a {config.family} model with this config"
            )
        header = file.get_slice(full_name)
        shape, dtype = tuple(header.get_shape()), header.get_dtype()
        known, allowed = found
        shapes = [shape for tensor in allowed for shape in tensor.shapes]
        if shape not in shapes:
            words = " or ".join(map(str, dict.fromkeys(shapes)))
            raise ModelDirectoryError(f"{where}: expected shape {words}, got {shape}")
        dtypes = [dtype for tensor in allowed for dtype in tensor.dtypes]
        if dtype not in dtypes:
            words = " or ".join(", ".join(dtypes).rsplit(", ", 1))
            raise ModelDirectoryError(f"{where}: expected dtype {words}, got {dtype}")
        yield known, _InFile(file, path, full_name, shape, dtype)


def _dtypes(name: str) -> tuple[str, ...]:
    return ("U8",) if name.endswith(("_blocks", "_scales")) else FLOATS


def _bytes_of(path: Path, name: str) -> np.ndarray:
    """A tensor as u8 [n], by what the header of the file says of it."""
    header, data = _header_of(path)
    begin, end = header[name]["data_offsets"]
    return np.fromfile(path, np.uint8, end - begin, offset=data + begin)


@functools.lru_cache(maxsize=1)  # it may have tens of thousands of tensors
def _header_of(path: Path) -> tuple[dict[str, Any], int]:
    """And where the data begins."""
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        return json.loads(file.read(size)), 8 + size
