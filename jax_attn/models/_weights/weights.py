"""The weights of a decoder model in memory: loaded from files, or random."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn.models._config.config import Latent, ModelConfig
from jax_attn.models._config.quantized_files import PASSED_OVER, Rows
from jax_attn.models._config.recurrent import GatedDelta, Lightning
from jax_attn.models._config.rope import Rope, rotary_order
from jax_attn.models._products import quantized
from jax_attn.models._products.panels import Panels, to_panels
from jax_attn.models._products.quantized import Matrix, Quantized, codes_per_byte, widen
from jax_attn.models._weights import mxfp4
from jax_attn.models._weights.tensors import (
    LAYER_INPUTS_TABLE,
    Parts,
    Shape,
    embed_name,
    file_shapes,
    head_name,
    is_of_shared_kv,
    is_upright,
    layer_prefix,
    layer_tensors,
    mtp_prefix,
    outer_tensors,
)
from jax_attn.models._weights.weight_files import Expected, FileTensors, open_tensors, weights_dtype

Params: TypeAlias = dict[str, Any]
"""embed [vocab, hidden], final_norm [hidden], head [hidden, vocab] unless it is the embedding, what
else `outer_tensors` names, and layers: a list of dicts of weights, [in, out] or [n]. Matrices that
multiply the same input are one: qkv is q, k and v, gate_up is gate and up, side by side. Those of
experts are stacked, [experts, in, out]. A matrix that the files have in few bits is a `Quantized`,
and one in the order of the CPU's own products a `Panels`: then that of a tied embedding is [hidden,
vocab]."""

# Matrices that a step multiplies as a whole, and experts, of which it multiplies some. Not among
# them: the matrices that latent attention absorbs.
_PRODUCTS = frozenset(
    ("qkv", "o", "gate_up", "down", "shared_gate_up", "shared_down", "router", "qkvz", "ba", "bcx")
    + ("expert_gate_up", "expert_down")
    + ("mixed_o", "q_a", "q_b", "kv_a", "head", "zxbcdt", "kda_qkv", "fgb", "f_b", "g_b")
    + ("lightning_qkv", "output_gate", "latent_in", "latent_out")
    + ("layer_inputs_projection", "layer_input_gate", "layer_input_projection")
    + ("laurel_left", "laurel_right", "mtp_in")
)


_OTHER_INPUTS = (
    *("vision_tower.", "vision_model.", "multi_modal_projector.", "model.visual."),
    *(f"model.{part}." for part in ("vision_tower", "embed_vision", "audio_tower", "embed_audio")),
)
# What transformers writes of lightning attention beside its weights: functions of the config.
_CONSTANTS = (".slope_rate", ".query_decay", ".key_decay", ".diagonal_decay")


class DecoderTensors(Expected):
    """The tensors of a decoder's files, and what their names are here."""

    def __init__(self, config: ModelConfig, with_head: bool):
        """with_head: see `load_params`."""
        shapes = file_shapes(config)
        self._embed, self._head = embed_name(config), head_name(config)
        optional = {self._head: shapes[self._embed]} if config.tie_embeddings else None
        tables = self._embed, LAYER_INPUTS_TABLE
        super().__init__(config, shapes, optional, tables, config.aliases)
        self._model, self._with_head = config, with_head

    def missing(self, tensors: Mapping[str, Any]) -> list[str]:
        """A tied head alone in the files is the embedding, too."""
        is_there = self._model.tie_embeddings and self._head in tensors
        return [name for name in super().missing(tensors) if name != self._embed or not is_there]

    def is_passed_over(self, name: str) -> bool:
        """Whether a tensor is ignored: tables of RoPE and masks of old exports, the head of an
        embedding model, encoders of images and audio beside the text model, keys and values of
        layers that share others, DeepSeek's and Qwen's layers for multi-token prediction, which
        `load_mtp` reads.
        """
        config = self._model
        stem, _, suffix = name.rpartition(".")
        return (
            name.endswith(("rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias"))
            or (name == self._head and not self._with_head)
            or (bool(config.tensor_prefix) and name.startswith(_OTHER_INPUTS))
            or (config.recurrent is not None and name.startswith("mtp."))
            or (isinstance(config.recurrent, Lightning) and name.endswith(_CONSTANTS))
            or (stem in self.of_matrix and suffix in PASSED_OVER)
            or is_of_shared_kv(name, config)
            or any(
                name.startswith(layer_prefix(config, config.num_layers + i))
                for i in range(config.extra_layers)
            )
        )


class MtpTensors(Expected):
    """The tensors of a layer for multi-token prediction, among those of its model."""

    def __init__(self, config: ModelConfig):
        super().__init__(config, file_shapes(config), aliases=config.aliases)
        self._prefix = mtp_prefix(config)

    def is_passed_over(self, name: str) -> bool:
        """Whether a tensor is the model's, or a copy of its embedding or head."""
        stem, _, suffix = name.rpartition(".")
        return (
            not name.startswith(self._prefix)
            or stem.endswith((".embed_tokens", ".shared_head.head"))
            or (stem in self.of_matrix and suffix in PASSED_OVER)
        )


def load_params(
    directory: str | Path,
    config: ModelConfig,
    dtype: jax.typing.DTypeLike = "bfloat16",
    progress: Callable[[int, int], None] | None = None,
    *,
    in_panels: bool = False,
    with_head: bool = True,
) -> Params:
    """Reads the weights of model.safetensors, or of the shards that its index names.

    config: also a result of `mtp_config`; then without the embedding and the head.

    Peak memory is the weights plus the source tensors of one weight. All headers are checked first.

    dtype: dtype of the weights in memory, and so of the activations. Files may hold bf16, f16 or
      f32. Matrices quantized by config.quantization stay quantized.
    progress, in_panels: see `load`.
    with_head: False: without the head, which models of embeddings do not use. True: if config ties
      the head to the embedding, but the files have another head, theirs is used, as in
      transformers.

    Raises ModelDirectoryError for a tensor that is missing, unexpected or does not fit, ValueError
    for a dtype other than bfloat16, float16 and float32.
    """
    dtype = weights_dtype(dtype)
    with contextlib.ExitStack() as stack:
        expected = MtpTensors(config) if config.mtp else DecoderTensors(config, with_head)
        tensors = open_tensors(stack, directory, expected, progress)
        return _make_params(tensors, config, dtype, in_panels, with_head)


def _make_params(
    tensors: FileTensors,
    config: ModelConfig,
    dtype: jax.typing.DTypeLike,
    in_panels: bool,
    with_head: bool,
) -> Params:
    def side_by_side(
        layer: int | None, weight: str, parts: Parts, is_stacked: bool = False
    ) -> np.ndarray | Quantized:
        names = [_whole_name(layer, name, config) for name in parts]
        own = config if layer is None else config.of(config.layers[layer])
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
        in_few_bits = [rows for rows in found if isinstance(rows, Rows)]
        if weight != "kv_b":
            _check_one_input(names, found, tensors)
        # Weights stay quantized unless latent attention absorbs them, or a part is not quantized.
        if len(in_few_bits) == len(found) and weight != "kv_b":
            for name, rows in zip(names, in_few_bits, strict=True):
                if not _same(rows.order, in_few_bits[0].order):
                    raise tensors.error(
                        name, "expected the g_idx of the matrices that multiply the same input"
                    )
            return _below_each_other(
                in_few_bits, lambda array: _in_memory_order(array, weight, own), is_stacked
            )
        arrays = [_widened(rows) if isinstance(rows, Rows) else rows for rows in found]
        if is_vector(weight):
            arrays = [array.reshape(-1) for array in arrays]
        whole = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        whole = _in_memory_order(whole, weight, own)
        if is_upright(weight, whole.ndim, config):
            return _gate_then_up(whole, weight, config)
        return whole.swapaxes(-1, -2)

    def on_device(name: str, weight: np.ndarray | Quantized) -> Matrix | Panels:
        if isinstance(weight, Quantized):
            return jax.block_until_ready(jax.tree.map(jnp.asarray, weight))
        # With a dtype, also that of the weight, asarray compiles a conversion for each shape.
        array = jnp.asarray(weight, None if weight.dtype == jnp.dtype(dtype) else dtype)
        # Wait: the source of a running copy stays in memory.
        return jax.block_until_ready(pack_weight(name, array, config) if in_panels else array)

    def make(layer: int | None, weight: str, parts: Parts | list[Parts]) -> Matrix | Panels:
        if not isinstance(parts, list):
            return on_device(weight, side_by_side(layer, weight, parts))
        first = side_by_side(layer, weight, parts[0], is_stacked=True)
        whole = jax.tree.map(lambda a: np.empty((len(parts), *a.shape), a.dtype), first)
        for i, part in enumerate(parts):
            expert = side_by_side(layer, weight, part, is_stacked=True) if i else first
            if isinstance(expert, Quantized) != isinstance(first, Quantized):
                raise tensors.error(
                    _whole_name(layer, next(iter(part)), config),
                    "expected all experts of a layer to be quantised, or none",
                )
            if isinstance(expert, Quantized) and expert.order is not None:
                raise tensors.error(
                    _whole_name(layer, next(iter(part)), config),
                    "expected a g_idx in order, as desc_act is not supported with experts",
                )
            jax.tree.map(lambda a, b, i=i: a.__setitem__(i, b), whole, expert)
        return on_device(weight, whole)

    embed, head = embed_name(config), head_name(config)
    outer = outer_tensors(config)
    params: Params = {}
    if "embed" in outer:
        params["embed"] = on_device("embed", tensors[embed if embed in tensors else head])
    for weight, parts in outer.items():
        if weight not in ("embed", "head"):
            params[weight] = make(None, weight, parts)
    is_tied = config.tie_embeddings
    if is_tied and with_head and head in tensors and embed in tensors:
        is_tied = tensors.are_equal(head, embed)
    if "head" in outer and not is_tied:
        rows = tensors.matrix(head)
        whole = _below_each_other([rows]) if isinstance(rows, Rows) else rows.T
        params["head"] = on_device("head", whole)
    params["layers"] = [
        {weight: make(i, weight, parts) for weight, parts in layer_tensors(config, i).items()}
        for i in range(config.num_layers)
    ]
    return params


def _whole_name(layer: int | None, name: str, config: ModelConfig) -> str:
    return name if layer is None else layer_prefix(config, layer) + name


def _check_one_input(
    names: list[str], found: list[np.ndarray | Rows], tensors: FileTensors
) -> None:
    """Raises unless matrices that multiply the same input have it rounded in the same way."""
    first = found[0]
    for name, rows in zip(names, found, strict=True):
        both = [each for each in (first, rows) if isinstance(each, Rows)]
        if not any(each.activations for each in both):
            continue
        if len(both) == 1:
            raise tensors.error(
                name,
                "expected the matrices that multiply the same input to be quantised, or none, as"
                " their activations are",
            )
        expected, got = (None if each.x_scale is None else each.x_scale.item() for each in both)
        if got != expected:
            raise tensors.error(
                name,
                "expected the activation scale of the matrices that multiply the same input,"
                f" {expected}, got {got}",
            )


def _below_each_other(
    rows: list[Rows],
    ordered: Callable[[np.ndarray], np.ndarray] = lambda array: array,
    is_stacked: bool = False,
) -> Quantized:
    """Stacks matrices [out, in] of torch by rows and reorders outputs; returns [in, out].

    is_stacked: for a stack of matrices, whose products are not those of 8-bit numbers.
    """

    def below(arrays: Iterable[np.ndarray]) -> np.ndarray:
        return ordered(np.concatenate([*arrays]))

    def whole(arrays: Iterable[np.ndarray]) -> np.ndarray:
        return np.ascontiguousarray(below(arrays).T)

    first = rows[0]
    how = first.activations
    is_float8 = (
        first.kind == "e4m3"
        and how is not None
        and (how.kind, how.group_size) == ("e4m3", None)
        and first.scales.shape[1] == 1
        and first.zeros is None
        and not any(size % 16 for each in rows for size in each.codes.shape)  # XLA would pad it
    )
    if is_float8 and not is_stacked and quantized.multiplies_float8():
        codes = np.ascontiguousarray(below(each.codes for each in rows)).view(jnp.float8_e4m3fn)
    else:
        codes = whole(each.codes for each in rows)
    if codes_per_byte(first.kind) == 2:
        codes = codes[::2] | codes[1::2] << 4
    scales = whole(each.scales for each in rows)
    zeros = (
        None if first.zeros is None else whole(z for each in rows if (z := each.zeros) is not None)
    )
    return Quantized(
        *(codes, scales, zeros, first.order),
        *(first.kind, first.group_size, first.activations, first.x_scale),
    )


def _widened(rows: Rows) -> np.ndarray:
    """Dequantizes to [out, in] f32."""
    plain = rows._replace(order=None, activations=None, x_scale=None)
    wide = np.asarray(widen(_below_each_other([plain]), jnp.float32)).T
    return wide if rows.order is None else wide[:, np.argsort(rows.order)]


def _same(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    if one is None or other is None:
        return one is other
    return np.array_equal(one, other)


def _gate_then_up(tensor: np.ndarray, weight: str, config: ModelConfig) -> np.ndarray:
    """Moves gate's columns before up's, for files that interleave them."""
    stacked = "" if config.experts is None else config.experts.stacked
    if stacked not in ("plain", "mxfp4") or "gate_up" not in weight:
        return tensor
    return np.concatenate([tensor[..., ::2], tensor[..., 1::2]], axis=-1)


def _in_memory_order(tensor: np.ndarray, weight: str, config: ModelConfig) -> np.ndarray:
    """Puts the outputs [out, ...] of a weight of the files in the order of Params."""
    sizes = config.recurrent
    if weight in ("qkvz", "ba") and isinstance(sizes, GatedDelta) and sizes.layout == "qkvz":
        per_head = sizes.num_v_heads // sizes.num_k_heads
        parts = [sizes.dim_k, sizes.dim_k, per_head * sizes.dim_v, per_head * sizes.dim_v]
        if weight == "ba":
            parts = [per_head, per_head]
        tensor = tensor[_apart(sizes.num_k_heads, parts)]
    if "qkv_by_head" in config.packed and weight in ("qkv", "qkv_bias"):
        tensor = tensor[_apart(config.num_qo_heads, [config.head_dim] * 3)]
    if config.attention_gate and weight in ("qkv", "qkv_bias"):
        q_gate = _apart(config.num_qo_heads, [config.head_dim] * 2)
        q, gate = np.split(q_gate, 2)
        tensor = tensor[np.concatenate([q, np.arange(len(q_gate), len(tensor)), gate])]
    return _in_rotary_order(tensor, weight, config)


def _apart(num_heads: int, parts: list[int]) -> np.ndarray:
    """The order that puts parts apart, which the files have side by side for each head."""
    columns = np.arange(num_heads * sum(parts)).reshape(num_heads, -1)
    return np.concatenate([x.reshape(-1) for x in np.split(columns, np.cumsum(parts)[:-1], 1)])


def _in_rotary_order(tensor: np.ndarray, weight: str, config: ModelConfig) -> np.ndarray:
    """Puts the elements of each head of q and k, and of their norms, in the kernels' order.

    tensor: [out, ...].
    """
    if config.latent is not None:
        return _in_pairs_order(tensor, weight, config, config.latent)
    ropes = [kind.rope for kind in config.layers if kind.rope is not None]
    layouts = {(rope.fraction, rope.interleaved) for rope in ropes}
    if layouts <= {(1, False)}:
        return tensor
    ((fraction, interleaved),) = layouts
    num_heads = {
        "qkv": config.num_qo_heads + config.num_kv_heads,
        "qkv_bias": config.num_qo_heads + config.num_kv_heads,
        "q_norm": 1 if config.qk_norm == "per_head" else config.num_qo_heads,
        "k_norm": 1 if config.qk_norm == "per_head" else config.num_kv_heads,
    }.get(weight, 0)
    order = rotary_order(Rope(1.0, fraction=fraction, interleaved=interleaved), config.head_dim)
    rotated = num_heads * config.head_dim
    heads = tensor[:rotated].reshape(num_heads, config.head_dim, *tensor.shape[1:])
    return np.concatenate([heads[:, order].reshape(tensor[:rotated].shape), tensor[rotated:]])


def is_vector(weight: str) -> bool:
    """Whether tensors of any shape make one vector."""
    return weight in ("q_norm", "k_norm", "xielu")


def file_order(weight: str, config: ModelConfig, size: int) -> np.ndarray | None:
    """The order in which a weight of Params has the outputs of its files' tensors; None: theirs.

    config: with the sizes of the weight's layer. size: the number of outputs, [size] i64.
    """
    outputs = np.arange(size)
    order = _gate_then_up(outputs, weight, config)
    if weight in ("qkv", "qkv_bias", "q_norm", "k_norm", "q_b", "kv_a", "qkvz", "ba"):
        order = _in_memory_order(outputs[:, None], weight, config)[:, 0]
    return None if np.array_equal(order, outputs) else order


def _in_pairs_order(
    tensor: np.ndarray, weight: str, config: ModelConfig, latent: Latent
) -> np.ndarray:
    """Latent attention: reorders RoPE pairs from neighbours to elements rope / 2 apart."""
    if not latent.interleaved or weight not in ("q_b", "kv_a"):
        return tensor
    fixed = latent.nope if weight == "q_b" else latent.kv_rank
    order = np.concatenate([np.arange(0, latent.rope, 2), np.arange(1, latent.rope, 2)])
    heads = tensor.reshape(-1, fixed + latent.rope, tensor.shape[1])
    return heads[:, np.concatenate([np.arange(fixed), fixed + order])].reshape(tensor.shape)


def pack_weight(name: str, weight: Matrix | Panels, config: ModelConfig) -> Matrix | Panels:
    """Converts a weight of Params to panels if a step multiplies it as a whole."""
    if isinstance(weight, (Quantized, Panels)) or not packs(name, config):
        return weight
    return to_panels(weight, transposed=name == "embed")


def packs(name: str, config: ModelConfig) -> bool:
    """Whether `pack_weight` makes panels of a weight of this name, if it is an array."""
    return name in _PRODUCTS or (name == "embed" and config.tie_embeddings)


def pack_params(params: Params, config: ModelConfig) -> Params:
    """Returns the same weights in the layout for CPUs, see Params.

    Traced, gradients go through it to `params`. Inside shard_map these are a device's part.
    """

    def pack(path: tuple[Any, ...], weight: Any) -> Any:
        return jax.block_until_ready(pack_weight(path[-1].key, weight, config))

    is_leaf = lambda x: isinstance(x, (Quantized, Panels))  # noqa: E731
    return jax.tree_util.tree_map_with_path(pack, params, is_leaf=is_leaf)


def random_params(
    config: ModelConfig, key: jax.Array, dtype: jax.typing.DTypeLike = "bfloat16"
) -> Params:
    """Returns random weights, for tests and benchmarks. Activations and logits are of order 1.

    Norm weights and biases are random, too, so that a test notices if one is left out.
    """

    def make(path: tuple[jax.tree_util.DictKey, ...], shape: Shape, key: jax.Array) -> jax.Array:
        name = path[-1].key
        if name.endswith("norm"):
            return _normal(key, shape, dtype, 0.1, 1 - config.norm_offset)
        if name in ("layer_scale", "expert_scale", "altup_scale"):
            return _normal(key, shape, dtype, 0.1, 1)
        named = "sinks", "a_log", "skip", "xielu"
        is_vector = name.endswith(("bias", "correction")) or name in named
        return _normal(key, shape, dtype, 0.1 if is_vector else shape[-2] ** -0.5)

    shapes = shapes_in_memory(config)
    leaves, tree = jax.tree.flatten_with_path(shapes, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(key, len(leaves))
    made = [make(*leaf, k) for leaf, k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(tree, made)


def shapes_in_memory(config: ModelConfig) -> Params:
    """Params with the shape of each weight in its place; those of `Panels` are the matrix's."""

    def in_memory(tensors: dict[str, Parts | list[Parts]]) -> dict[str, Shape]:
        return {name: _shape_in_memory(name, parts, config) for name, parts in tensors.items()}

    outer = in_memory(outer_tensors(config))
    if config.tie_embeddings:
        outer.pop("head", None)
    layers = [in_memory(layer_tensors(config, i)) for i in range(config.num_layers)]
    return outer | {"layers": layers}


def _shape_in_memory(weight: str, parts: Parts | list[Parts], config: ModelConfig) -> Shape:
    if isinstance(parts, list):
        return (len(parts), *_shape_in_memory(weight, parts[0], config))
    shapes = list(parts.values())
    if is_vector(weight):
        return (sum(map(math.prod, shapes)),)
    if len(shapes) == 2 and len(shapes[0]) == 4:  # quantized values and scales
        count, outer, num_blocks = shapes[1]
        return (count, num_blocks * mxfp4.BLOCK, outer)
    sizes, *rest = zip(*shapes, strict=True)
    shape = (sum(sizes), *(x[0] for x in rest))
    if is_upright(weight, len(shape), config):
        return shape
    *stacked, outputs, inputs = shape
    return (*stacked, inputs, outputs)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key: jax.Array, shape: Shape, dtype: Any, scale: float, mean: float = 0) -> jax.Array:
    return (mean + scale * jax.random.normal(key, shape, dtype)).astype(dtype)
