"""The vision tower of Qwen3-VL and Qwen3.5: patches of pictures to rows of the text model.

Source: arXiv 2511.21631. Patches of all pictures of a batch lie back to back, without padding
between them, and those of a picture attend to each other.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_attn as ja
from jax_attn.models._config.keys import Keys
from jax_attn.models._config.rope import rotate
from jax_attn.models._weights.tensors import Shape
from jax_attn.models._weights.weight_files import Expected, FileTensors, open_tensors, weights_dtype
from jax_attn.models._weights.weights import Params

_NORM_EPS = 1e-6
_CHANNELS = 3  # red, green, blue
MAX_PICTURES = 64  # of a batch
# The families, and the token that stands for a picture unless config.json names another.
FAMILIES = {"qwen3_vl": 151655, "qwen3_5": 248056, "qwen3_5_moe": 248056}


@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """The configuration of a vision tower. Hashable: a static argument of jitted functions."""

    family: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    output_size: int  # hidden size of the text model
    patch_size: int  # pixels of a side
    num_frames: int  # frames of a patch; a picture is repeated
    merge_size: int  # a token of the text model is merge_size x merge_size patches
    grid_size: int  # side of the table of learned positions, which is resized to each picture
    deepstack: tuple[int, ...]  # layers whose rows are added to those of the text model, too
    rope_theta: float
    activation: str  # of the MLPs; one of ACTIVATIONS
    picture_token: int  # of the vocabulary: stands for a token of a picture in a prompt
    tensor_prefix: str = "model.visual."
    quantization: None = None

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def factor(self) -> int:
        """Pixels of a side of a token: heights and widths of pictures are multiples."""
        return self.patch_size * self.merge_size


def parse(keys: Keys, output_size: int, vocab_size: int) -> VisionConfig:
    """Returns the config of a tower from the keys of config.json. Raises ModelDirectoryError.

    output_size: the text model's hidden size.
    """
    family = keys.need("model_type")
    vision = keys.inner("vision_config") or Keys({}, f"{keys.path}: vision_config")
    vision.expect("model_type", f"{family}_vision", family)  # the second is in older files
    vision.expect("in_channels", _CHANNELS)
    vision.expect("hidden_act", *ACTIVATIONS)
    # Some are other names of keys below, in transformers.
    for key in ("rope_scaling", "quantization_config", "rope_theta", "partial_rotary_factor"):
        vision.expect(key, None)
    for key in ("head_dim", "num_attention_heads", "num_hidden_layers"):
        vision.expect(key, None)
    rope = vision.inner("rope_parameters") or Keys({}, vision.path)
    rope.expect("rope_type", "axial")
    for key in rope.raw:
        if key not in ("rope_type", "rope_theta"):
            raise rope.error(f"key '{key}' is not supported with 'axial'")
    vision.expect("out_hidden_size", output_size)
    num_layers, num_heads = vision.size("depth", 27), vision.size("num_heads", 16)
    hidden_size = vision.size("hidden_size", 1152)
    if hidden_size % (4 * num_heads):
        raise vision.error(
            f"hidden_size: expected a multiple of 4 x num_heads {num_heads}, got {hidden_size}"
        )
    num_positions = vision.size("num_position_embeddings", 2304)
    grid_size = round(num_positions**0.5)
    if grid_size**2 != num_positions:
        raise vision.error(
            f"num_position_embeddings: expected the square of an integer, got {num_positions}"
        )
    deepstack = []
    if family == "qwen3_vl":
        deepstack = vision.get("deepstack_visual_indexes", [8, 16, 24])
    else:  # transformers ignores it
        vision.expect("deepstack_visual_indexes", None, [])
    is_ascending = isinstance(deepstack, list) and all(type(i) is int for i in deepstack)
    if not is_ascending or deepstack != sorted({*deepstack} & {*range(num_layers)}):
        raise vision.error(
            f"deepstack_visual_indexes: expected ascending layers of {num_layers}, got "
            f"{deepstack!r}"
        )
    token = Keys({"image_token_id": FAMILIES[family]} | keys.raw, keys.path)
    picture_token = token.token("image_token_id", vocab_size)
    if picture_token is None:
        raise keys.error("image_token_id: expected a token of the vocabulary, got None")
    return VisionConfig(
        family=family,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=vision.size("intermediate_size", 4304),
        num_heads=num_heads,
        output_size=output_size,
        patch_size=vision.size("patch_size", 16),
        num_frames=vision.size("temporal_patch_size", 2),
        merge_size=vision.size("spatial_merge_size", 2),
        grid_size=grid_size,
        deepstack=tuple(deepstack),
        rope_theta=rope.number("rope_theta", 10000.0),
        activation=vision.get("hidden_act", "gelu_pytorch_tanh"),
        picture_token=picture_token,
    )


# ---- weights -----------------------------------------------------------------------------------


def _linear(name: str, outer: int, inner: int) -> dict[str, tuple[str, Shape]]:
    """The tensors of a matrix and its bias."""
    return {"": (f"{name}.weight", (outer, inner)), "_bias": (f"{name}.bias", (outer,))}


def _norm(name: str, size: int) -> dict[str, tuple[str, Shape]]:
    return {"": (f"{name}.weight", (size,)), "_bias": (f"{name}.bias", (size,))}


def _layer_tensors(config: VisionConfig) -> dict[str, tuple[str, Shape]]:
    """Returns for each weight of a layer its tensor in the files, with torch's shape."""
    d, ff = config.hidden_size, config.intermediate_size
    return _named(
        attention_norm=_norm("norm1", d),
        qkv=_linear("attn.qkv", 3 * d, d),
        o=_linear("attn.proj", d, d),
        mlp_norm=_norm("norm2", d),
        up=_linear("mlp.linear_fc1", ff, d),
        down=_linear("mlp.linear_fc2", d, ff),
    )


def _merger_tensors(config: VisionConfig, is_deepstack: bool) -> dict[str, tuple[str, Shape]]:
    merged = config.hidden_size * config.merge_size**2
    return _named(
        norm=_norm("norm", merged if is_deepstack else config.hidden_size),
        up=_linear("linear_fc1", merged, merged),
        down=_linear("linear_fc2", config.output_size, merged),
    )


def _named(**weights: dict[str, tuple[str, Shape]]) -> dict[str, tuple[str, Shape]]:
    return {
        weight + suffix: tensor
        for weight, tensors in weights.items()
        for suffix, tensor in tensors.items()
    }


def _parts(config: VisionConfig) -> dict[str, dict[str, tuple[str, Shape]]]:
    """All weights, by the prefix of their tensors."""
    patch = (_CHANNELS, config.num_frames, config.patch_size, config.patch_size)
    table = (config.grid_size**2, config.hidden_size)
    layer = _layer_tensors(config)
    deepstack = _merger_tensors(config, True)
    return {
        "": {
            "patch": ("patch_embed.proj.weight", (config.hidden_size, *patch)),
            "patch_bias": ("patch_embed.proj.bias", (config.hidden_size,)),
            "positions": ("pos_embed.weight", table),
        },
        "merger.": _merger_tensors(config, False),
        **{f"blocks.{i}.": layer for i in range(config.num_layers)},
        **{f"deepstack_merger_list.{i}.": deepstack for i in range(len(config.deepstack))},
    }


def file_shapes(config: VisionConfig) -> dict[str, Shape]:
    """Returns every expected tensor of the files with torch's shape; names have no prefix."""
    return {
        prefix + name: shape
        for prefix, weights in _parts(config).items()
        for name, shape in weights.values()
    }


class _Expected(Expected):
    def is_passed_over(self, name: str) -> bool:
        """Whether a tensor is of the text model: it has another prefix, which is still there."""
        return name.startswith(("model.", "lm_head.", "mtp."))


def load_params(
    directory: str | Path,
    config: VisionConfig,
    dtype: jax.typing.DTypeLike = "bfloat16",
    progress: Callable[[int, int], None] | None = None,
) -> Params:
    """Reads the weights, as weights.load_params does.

    patch: [frames * 3 * patch_size ** 2, hidden]. positions: [grid_size ** 2, hidden]. layers:
    as in an encoder. mergers: the last layer's, then one for each layer of deepstack. A bias beside
    each matrix and norm.
    """
    dtype = weights_dtype(dtype)
    with contextlib.ExitStack() as stack:
        expected = _Expected(config, file_shapes(config))
        tensors = open_tensors(stack, directory, expected, progress)
        return _make_params(tensors, config, dtype)


def _make_params(tensors: FileTensors, config: VisionConfig, dtype: jax.typing.DTypeLike) -> Params:
    def make(prefix: str, weights: dict[str, tuple[str, Shape]]) -> Params:
        def one(name: str) -> jax.Array:
            found = tensors[prefix + name]
            if found.ndim == 5:  # of patches: [hidden, channels, frames, height, width]
                found = found.swapaxes(1, 2).reshape(len(found), -1)
            is_table = name.startswith("pos_embed")
            # Wait: the source of a running copy stays in memory.
            return jax.block_until_ready(jnp.asarray(found if is_table else found.T, dtype))

        return {weight: one(name) for weight, (name, _) in weights.items()}

    made = {prefix: make(prefix, weights) for prefix, weights in _parts(config).items()}
    deepstack = [made[f"deepstack_merger_list.{i}."] for i in range(len(config.deepstack))]
    return made[""] | {
        "layers": [made[f"blocks.{i}."] for i in range(config.num_layers)],
        "mergers": [made["merger."], *deepstack],
    }


# ---- a batch -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class PatchBatch:
    """Patches of pictures back to back, then padding.

    Those that become one token of the text model are neighbours.

    patches: [num_patches, 3, patch_size, patch_size] u8.
    places: [num_patches, 2] i32. Row and column of each patch in its picture.
    taps, tap_weights: [num_patches, 4] i32 and f32. Which learned positions a patch is between.
    plan: of attention among the patches of each picture.
    """

    patches: Any
    places: Any
    taps: Any
    tap_weights: Any
    plan: ja.AttentionPlan

    @staticmethod
    def make(
        config: VisionConfig,
        pictures: list[np.ndarray],
        num_patches: int,
        dtype: jax.typing.DTypeLike,
    ) -> PatchBatch:
        """Packs pictures into a batch and plans it.

        pictures: [height, width, 3] u8 each, multiples of config.factor.
        num_patches: the capacity, which fixes the shapes.

        Raises ValueError if it, or MAX_PICTURES, is exceeded.
        """
        p, m = config.patch_size, config.merge_size
        sizes = [(x.shape[0] // p, x.shape[1] // p) for x in pictures]
        lens = np.array([rows * columns for rows, columns in sizes], np.int32)
        if (used := int(lens.sum())) > num_patches or len(pictures) > MAX_PICTURES:
            raise ValueError(
                f"PatchBatch: pictures: expected at most {num_patches} patches of {MAX_PICTURES}"
                f" pictures, got {used} of {len(pictures)}"
            )
        patches = np.zeros((num_patches, _CHANNELS, p, p), np.uint8)
        places = np.zeros((num_patches, 2), np.int32)
        taps = np.zeros((num_patches, 4), np.int32)
        tap_weights = np.zeros((num_patches, 4), np.float32)
        begin = 0
        for pixels, (rows, columns) in zip(pictures, sizes, strict=True):
            of_picture = slice(begin, begin + rows * columns)
            blocks = pixels.reshape(rows // m, m, p, columns // m, m, p, _CHANNELS)
            ordered = blocks.transpose(0, 3, 1, 4, 6, 2, 5)
            patches[of_picture] = ordered.reshape(-1, _CHANNELS, p, p)
            grid = np.indices((rows, columns)).reshape(2, rows // m, m, columns // m, m)
            row, column = grid.transpose(0, 1, 3, 2, 4).reshape(2, -1)
            places[of_picture] = np.stack([row, column], -1)
            row_taps, row_weights = _between(row, rows, config.grid_size)
            column_taps, column_weights = _between(column, columns, config.grid_size)
            all_taps = row_taps[:, :, None] * config.grid_size + column_taps[:, None]
            taps[of_picture] = all_taps.reshape(-1, 4)
            tap_weights[of_picture] = (row_weights[:, :, None] * column_weights[:, None]).reshape(
                -1, 4
            )
            begin += rows * columns
        indptr = np.append(0, lens.cumsum()).astype(np.int32)
        spec = attention_spec(config, num_patches, dtype)
        plan = ja.plan(spec, indptr, lens, kv_indptr=indptr)
        return PatchBatch(patches, places, taps, tap_weights, plan)


def attention_spec(
    config: VisionConfig, num_patches: int, dtype: jax.typing.DTypeLike
) -> ja.AttentionSpec:
    """The spec of all layers for batches of this capacity."""
    return ja.AttentionSpec(
        num_qo_heads=config.num_heads,
        num_kv_heads=config.num_heads,
        head_dim_qk=config.head_dim,
        causal=False,
        dtype=jnp.dtype(dtype).name,
        page_size=None,
        max_batch=MAX_PICTURES,
        max_qo_tokens=num_patches,
        max_kv_tokens=num_patches,
    )


def _between(places: np.ndarray, number: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the two learned positions of a side around each of `number` places, and weights.

    The first and the last place have the first and the last position. In f32, as transformers.
    """
    at = places.astype(np.float32) * np.float32(size - 1) / np.float32(max(number - 1, 1))
    first = np.floor(at)
    taps = np.clip(first[:, None] + np.arange(2), 0, size - 1).astype(np.int32)
    part = at - first
    return taps, np.stack([1 - part, part], -1).astype(np.float32)


# ---- the forward pass --------------------------------------------------------------------------


def encode(
    params: Params,
    config: VisionConfig,
    batch: PatchBatch,
    mean: tuple[float, ...],
    std: tuple[float, ...],
) -> jax.Array:
    """Returns the rows of the text model, [num_patches / merge_size ** 2, 1 + depth, output_size].

    Row i is that of the patches from i * merge_size ** 2 on: the embedding, then what is added
    after each of the text model's first layers (`PictureRows`). Layers of equal shapes share an
    executable.

    mean, std: of the three channels, of values between 0 and 1.
    """
    outside = {key: value for key, value in params.items() if key not in ("layers", "mergers")}
    arrays = batch.patches, batch.taps, batch.tap_weights
    places, plan, arrays = jax.device_put((batch.places, batch.plan, arrays))
    x = _begin(*arrays, outside, config=config, mean=mean, std=std)
    deep = []
    for i, weights in enumerate(params["layers"]):
        x = _layer(x, places, plan, weights, config=config)
        if i in config.deepstack:
            merger = params["mergers"][1 + config.deepstack.index(i)]
            deep.append(_merge(x, merger, config=config, is_deepstack=True))
    first = _merge(x, params["mergers"][0], config=config, is_deepstack=False)
    return jnp.stack([first, *deep], 1)


@partial(jax.jit, static_argnames=("config", "mean", "std"))
def _begin(
    patches: jax.Array,
    taps: jax.Array,
    tap_weights: jax.Array,
    params: Params,
    config: VisionConfig,
    mean: tuple[float, ...],
    std: tuple[float, ...],
) -> jax.Array:
    dtype = params["patch"].dtype
    center, width = (np.array(each, np.float32).reshape(-1, 1, 1) for each in (mean, std))
    normal = (patches.astype(jnp.float32) * np.float32(1 / 255) - center) / width
    flat = normal.astype(dtype).reshape(len(patches), -1)
    x = jnp.tile(flat, (1, config.num_frames)) @ params["patch"] + params["patch_bias"]
    table = params["positions"]
    return x + jnp.sum(table[taps] * tap_weights[..., None], 1).astype(dtype)


@partial(jax.jit, static_argnames="config")
def _layer(
    x: jax.Array, places: jax.Array, plan: ja.AttentionPlan, weights: Params, config: VisionConfig
) -> jax.Array:
    h = _layer_norm(x, weights, "attention_norm")
    qkv = (h @ weights["qkv"] + weights["qkv_bias"]).reshape(len(x), 3, -1, config.head_dim)
    # A quarter of a head's elements turns with the row, a quarter with the column, as pairs with
    # the other half.
    quarter = config.head_dim // 4
    frequencies = config.rope_theta ** -(np.arange(quarter) / quarter)
    turns = places.astype(jnp.float32)[..., None] * frequencies.astype(np.float32)
    turns = turns.reshape(len(x), -1)
    angles = jnp.cos(turns), jnp.sin(turns)
    o = ja.attention(rotate(qkv[:, 0], angles), rotate(qkv[:, 1], angles), qkv[:, 2], plan)
    x = x + o.reshape(len(x), -1) @ weights["o"] + weights["o_bias"]
    h = _layer_norm(x, weights, "mlp_norm")
    h = ACTIVATIONS[config.activation](h @ weights["up"] + weights["up_bias"])
    return x + h @ weights["down"] + weights["down_bias"]


@partial(jax.jit, static_argnames=("config", "is_deepstack"))
def _merge(x: jax.Array, weights: Params, config: VisionConfig, is_deepstack: bool) -> jax.Array:
    merged = -1, config.hidden_size * config.merge_size**2
    if is_deepstack:  # the norm is of all patches of a token together
        h = _layer_norm(x.reshape(merged), weights, "norm")
    else:
        h = _layer_norm(x, weights, "norm").reshape(merged)
    h = jax.nn.gelu(h @ weights["up"] + weights["up_bias"], approximate=False)
    return h @ weights["down"] + weights["down_bias"]


def _layer_norm(x: jax.Array, weights: Params, name: str) -> jax.Array:
    """LayerNorm over the last axis, computed in f32."""
    x32 = x.astype(jnp.float32)
    x32 -= jnp.mean(x32, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
    scale, bias = (weights[key].astype(jnp.float32) for key in (name, f"{name}_bias"))
    return (x32 * jax.lax.rsqrt(variance + _NORM_EPS) * scale + bias).astype(x.dtype)


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu_pytorch_tanh": jax.nn.gelu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "silu": jax.nn.silu,
}
