"""The weights of a model: their names and shapes, from safetensors files or at random."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn.models.config import ModelConfig
from jax_attn.models.directory import ModelDirectoryError, existing, read_json

Params: TypeAlias = dict[str, Any]
"""embed [vocab, hidden], final_norm [hidden], head [hidden, vocab] unless tied, and layers: a list
of dicts of weights, [in, out] or [n]. Matrices that multiply the same input are one: qkv is q, k
and v, gate_up is gate and up, side by side."""

Shape: TypeAlias = tuple[int, ...]

_IMAGE_PARTS = ("vision_tower.", "multi_modal_projector.")


def layer_tensors(config: ModelConfig) -> dict[str, dict[str, Shape]]:
    """For each weight of a layer the tensors it is made of, side by side, as torch shapes them.

    A matrix is [out, in] in torch, and the other way round in Params.
    """
    d, ff = config.hidden_size, config.intermediate_size
    q_size = config.num_qo_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    qkv_sizes = {"q": q_size, "k": kv_size, "v": kv_size}
    # Where there are norms after attention and MLP, they take the name of the one before the MLP.
    before_mlp = "pre_feedforward" if config.post_norms else "post_attention"
    tensors: dict[str, dict[str, Shape]] = {
        "attention_norm": {"input_layernorm.weight": (d,)},
        "qkv": {f"self_attn.{x}_proj.weight": (size, d) for x, size in qkv_sizes.items()},
        "o": {"self_attn.o_proj.weight": (d, q_size)},
        "mlp_norm": {f"{before_mlp}_layernorm.weight": (d,)},
        "gate_up": {f"mlp.{x}_proj.weight": (ff, d) for x in ("gate", "up")},
        "down": {"mlp.down_proj.weight": (d, ff)},
    }
    if config.qkv_bias:
        tensors["qkv_bias"] = {f"self_attn.{x}_proj.bias": (n,) for x, n in qkv_sizes.items()}
    if config.o_bias:
        tensors["o_bias"] = {"self_attn.o_proj.bias": (d,)}
    if config.qk_norm:
        tensors |= {f"{x}_norm": {f"self_attn.{x}_norm.weight": (config.head_dim,)} for x in "qk"}
    if config.post_norms:
        tensors["attention_post_norm"] = {"post_attention_layernorm.weight": (d,)}
        tensors["mlp_post_norm"] = {"post_feedforward_layernorm.weight": (d,)}
    return tensors


def file_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor that belongs in the files, as torch shapes it; names are without prefix."""
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
    }
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    for tensors in layer_tensors(config).values():
        for i in range(config.num_layers):
            shapes |= {f"model.layers.{i}.{name}": shape for name, shape in tensors.items()}
    return shapes


def load_params(
    directory: str | Path, config: ModelConfig, dtype: jax.typing.DTypeLike = "bfloat16"
) -> Params:
    """Reads the weights of model.safetensors, or of the shards that its index names.

    dtype: of the weights in memory, and so of the activations; files may hold bf16, f16 or f32.

    Raises ModelDirectoryError for a tensor that is missing, is one too many or does not fit.
    """
    directory = Path(directory)
    shapes = file_shapes(config)
    tensors: dict[str, np.ndarray] = {}
    for path in _weight_files(directory):
        tensors |= _read_tensors(path, shapes, config)
    if missing := sorted(shapes.keys() - tensors.keys()):
        raise ModelDirectoryError(
            f"{directory}: tensor '{config.tensor_prefix}{missing[0]}' is missing, with "
            f"{len(missing) - 1} more"
        )

    def side_by_side(names: list[str]) -> jax.Array:
        # pop: the parts of a large model must not stay in memory beside the whole.
        return jnp.asarray(np.concatenate([tensors.pop(name) for name in names]).T, dtype)

    params: Params = {
        "embed": jnp.asarray(tensors["model.embed_tokens.weight"], dtype),
        "final_norm": jnp.asarray(tensors["model.norm.weight"], dtype),
    }
    if not config.tie_embeddings:
        params["head"] = jnp.asarray(tensors["lm_head.weight"].T, dtype)
    params["layers"] = [
        {
            weight: side_by_side([f"model.layers.{i}.{name}" for name in parts])
            for weight, parts in layer_tensors(config).items()
        }
        for i in range(config.num_layers)
    ]
    return params


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
    layer = {}
    for weight, parts in layer_tensors(config).items():
        sizes, *rest = zip(*parts.values(), strict=True)
        layer[weight] = (*(x[0] for x in rest), sum(sizes))
    shapes["layers"] = [layer] * config.num_layers

    def make(path: tuple[jax.tree_util.DictKey, ...], shape: Shape, key: jax.Array) -> jax.Array:
        name = path[-1].key
        if name.endswith("norm"):
            return _normal(key, shape, dtype, 0.1, 1 - config.norm_offset)
        return _normal(key, shape, dtype, 0.1 if name.endswith("bias") else shape[-2] ** -0.5)

    leaves, tree = jax.tree.flatten_with_path(shapes, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(key, len(leaves))
    made = [make(*leaf, k) for leaf, k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(tree, made)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key: jax.Array, shape: Shape, dtype: Any, scale: float, mean: float = 0) -> jax.Array:
    return (mean + scale * jax.random.normal(key, shape, dtype)).astype(dtype)


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


def _read_tensors(
    path: Path, shapes: dict[str, Shape], config: ModelConfig
) -> Iterable[tuple[str, np.ndarray]]:
    """The tensors of one file, each checked against `shapes`."""
    from safetensors import SafetensorError, safe_open

    try:
        file = safe_open(path, framework="numpy")
    except SafetensorError as error:
        raise ModelDirectoryError(f"{path}: not a safetensors file: {error}") from error
    with file:
        for full_name in file.keys():
            name = full_name.removeprefix(config.tensor_prefix)
            if name not in shapes and _is_passed_over(name, config):
                continue
            where = f"{path}: tensor '{full_name}'"
            if name not in shapes:
                raise ModelDirectoryError(
                    f"{where} is no part of a {config.family} model with this config"
                )
            header = file.get_slice(full_name)
            shape, dtype = tuple(header.get_shape()), header.get_dtype()
            if shape != shapes[name]:
                raise ModelDirectoryError(f"{where}: expected shape {shapes[name]}, got {shape}")
            if dtype not in ("BF16", "F16", "F32"):
                raise ModelDirectoryError(f"{where}: expected dtype BF16, F16 or F32, got {dtype}")
            yield name, file.get_tensor(full_name)


def _is_passed_over(name: str, config: ModelConfig) -> bool:
    """Old exports carry the RoPE table, tied ones the head a second time, and some an image encoder
    beside the text model."""
    return (
        name.endswith("rotary_emb.inv_freq")
        or (name == "lm_head.weight" and config.tie_embeddings)
        or (bool(config.tensor_prefix) and name.startswith(_IMAGE_PARTS))
    )
