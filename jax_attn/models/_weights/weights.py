"""The weights of a decoder model in memory: loaded from files, or random."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn.models._config.config import Latent, ModelConfig
from jax_attn.models._config.quantized_files import PASSED_OVER, Rows
from jax_attn.models._config.rope import Rope, rotary_order
from jax_attn.models._products.panels import Panels, to_panels
from jax_attn.models._products.quantized import Matrix, Quantized, codes_per_byte, widen
from jax_attn.models._weights import mxfp4
from jax_attn.models._weights.tensors import Parts, Shape, file_shapes, layer_tensors
from jax_attn.models._weights.weight_files import Expected, FileTensors, open_tensors

Params: TypeAlias = dict[str, Any]
"""embed [vocab, hidden], final_norm [hidden], head [hidden, vocab] unless tied, and layers: a list
of dicts of weights, [in, out] or [n]. Matrices that multiply the same input are one: qkv is q, k
and v, gate_up is gate and up, side by side. Those of experts are stacked, [experts, in, out]. A
matrix that the files have in few bits is a `Quantized`, and one in the order of the CPU's own
products a `Panels`: then that of a tied embedding is [hidden, vocab]."""

# Matrices that a step multiplies as a whole. Not among them: experts, of which a step uses some,
# and the matrices that latent attention absorbs.
_PRODUCTS = frozenset(
    ("qkv", "o", "gate_up", "down", "shared_gate_up", "shared_down", "router")
    + ("q_a", "q_b", "kv_a", "head")
)


_IMAGE_PARTS = ("vision_tower.", "multi_modal_projector.")


class _Expected(Expected):
    def __init__(self, config: ModelConfig):
        super().__init__(config, file_shapes(config))
        self._model = config

    def is_passed_over(self, name: str) -> bool:
        """Whether a tensor is ignored: the RoPE table of old exports, the copy of a tied head, an
        image encoder beside the text model, DeepSeek's layers for multi-token prediction.
        """
        config = self._model
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


def load_params(
    directory: str | Path,
    config: ModelConfig,
    dtype: jax.typing.DTypeLike = "bfloat16",
    progress: Callable[[int, int], None] | None = None,
    *,
    in_panels: bool = False,
) -> Params:
    """Reads the weights of model.safetensors, or of the shards that its index names.

    Peak memory is the weights plus the source tensors of one weight. All headers are checked first.

    dtype: dtype of the weights in memory, and so of the activations. Files may hold bf16, f16 or
      f32. Matrices quantized by config.quantization stay quantized.
    progress, in_panels: see `load`.

    Raises ModelDirectoryError for a tensor that is missing, unexpected or does not fit.
    """
    with contextlib.ExitStack() as stack:
        tensors = open_tensors(stack, directory, _Expected(config), progress)
        return _make_params(tensors, config, dtype, in_panels)


def _make_params(
    tensors: FileTensors, config: ModelConfig, dtype: jax.typing.DTypeLike, in_panels: bool
) -> Params:
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
        # Weights stay quantized unless latent attention absorbs them, or a part is not quantized.
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

    def on_device(name: str, weight: np.ndarray | Quantized) -> Matrix | Panels:
        if isinstance(weight, Quantized):
            return jax.block_until_ready(jax.tree.map(jnp.asarray, weight))
        array = jnp.asarray(weight, dtype)
        # Wait: the source of a running copy stays in memory.
        return jax.block_until_ready(pack_weight(name, array, config) if in_panels else array)

    def make(layer: int, weight: str, parts: Parts | list[Parts]) -> Matrix | Panels:
        if not isinstance(parts, list):
            return on_device(weight, side_by_side(layer, weight, parts))
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
        return on_device(weight, whole)

    params: Params = {
        "embed": on_device("embed", tensors["model.embed_tokens.weight"]),
        "final_norm": on_device("final_norm", tensors["model.norm.weight"]),
    }
    if not config.tie_embeddings:
        head = tensors.matrix("lm_head.weight")
        whole = _below_each_other([head]) if isinstance(head, Rows) else head.T
        params["head"] = on_device("head", whole)
    params["layers"] = [
        {weight: make(i, weight, parts) for weight, parts in layer_tensors(config, i).items()}
        for i in range(config.num_layers)
    ]
    return params


def _below_each_other(
    rows: list[Rows], ordered: Callable[[np.ndarray], np.ndarray] = lambda array: array
) -> Quantized:
    """Stacks matrices [out, in] of torch by rows and reorders outputs; returns [in, out]."""

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
    """Dequantizes to [out, in] f32."""
    wide = np.asarray(widen(_below_each_other([rows._replace(order=None)]), jnp.float32)).T
    return wide if rows.order is None else wide[:, np.argsort(rows.order)]


def _same(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    if one is None or other is None:
        return one is other
    return np.array_equal(one, other)


def _gate_then_up(tensor: np.ndarray, weight: str, config: ModelConfig) -> np.ndarray:
    """Moves gate's columns before up's, for files that interleave them."""
    if config.experts is None or not config.experts.stacked or "gate_up" not in weight:
        return tensor
    return np.concatenate([tensor[..., ::2], tensor[..., 1::2]], axis=-1)


def _in_rotary_order(tensor: np.ndarray, weight: str, config: ModelConfig) -> np.ndarray:
    """Puts the elements of each head of q and k, and of their norms, in the kernels' order.

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
    """Latent attention: reorders RoPE pairs from neighbours to elements rope / 2 apart."""
    if not latent.interleaved or weight not in ("q_b", "kv_a"):
        return tensor
    fixed = latent.nope if weight == "q_b" else latent.kv_rank
    order = np.concatenate([np.arange(0, latent.rope, 2), np.arange(1, latent.rope, 2)])
    heads = tensor.reshape(-1, fixed + latent.rope, tensor.shape[1])
    return heads[:, np.concatenate([np.arange(fixed), fixed + order])].reshape(tensor.shape)


def pack_weight(name: str, weight: Matrix, config: ModelConfig) -> Matrix | Panels:
    """Converts a weight of Params to panels if a step multiplies it as a whole."""
    is_multiplied = name in _PRODUCTS or (name == "embed" and config.tie_embeddings)
    if isinstance(weight, Quantized) or not is_multiplied:
        return weight
    return to_panels(weight, transposed=name == "embed")


def pack_params(params: Params, config: ModelConfig) -> Params:
    """Returns the same weights in the layout for one CPU, see Params."""

    def pack(path: tuple[Any, ...], weight: Any) -> Any:
        if isinstance(weight, Panels):
            return weight
        return jax.block_until_ready(pack_weight(path[-1].key, weight, config))

    is_leaf = lambda x: isinstance(x, (Quantized, Panels))  # noqa: E731
    return jax.tree_util.tree_map_with_path(pack, params, is_leaf=is_leaf)


def random_params(
    config: ModelConfig, key: jax.Array, dtype: jax.typing.DTypeLike = "bfloat16"
) -> Params:
    """Returns random weights, for tests and benchmarks. Activations and logits are of order 1.

    Norm weights and biases are random, too, so that a test notices if one is left out.
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
    if len(shapes) == 2 and len(shapes[0]) == 4:  # quantized values and scales
        count, outer, num_blocks = shapes[1]
        return (count, num_blocks * mxfp4.BLOCK, outer)
    if len(shapes[0]) == 3 or weight.startswith("expert"):
        return shapes[0]
    sizes, *rest = zip(*shapes, strict=True)
    return (*(x[0] for x in rest), sum(sizes))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key: jax.Array, shape: Shape, dtype: Any, scale: float, mean: float = 0) -> jax.Array:
    return (mean + scale * jax.random.normal(key, shape, dtype)).astype(dtype)
