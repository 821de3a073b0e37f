"""The tower of Qwen3-VL and Qwen3.5 (arXiv 2511.21631)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn.models._config.activations import activation_name
from jax_attn.models._config.config import ModelConfig
from jax_attn.models._config.keys import Keys
from jax_attn.models._vision import layers
from jax_attn.models._vision.layers import PromptText, VisionConfig
from jax_attn.models._weights.float_weights import Weight, WeightTree, table
from jax_attn.models._weights.weights import Params

# The families, and the token that stands for a picture unless config.json names another.
TOKENS = {"qwen3_vl": 151655, "qwen3_vl_moe": 151655, "qwen3_5": 248056, "qwen3_5_moe": 248056}
_WITH_DEEPSTACK = ("qwen3_vl", "qwen3_vl_moe")


def parse(keys: Keys, text: ModelConfig) -> VisionConfig:
    family = keys.need("model_type")
    # The second is in older files.
    vision = layers.vision_keys(keys, f"{family}_vision", family)
    # Other names of keys below, in transformers.
    for key in ("rope_theta", "head_dim", "num_attention_heads", "num_hidden_layers"):
        vision.expect(key, None)
    vision.expect("out_hidden_size", text.hidden_size)
    num_layers, num_heads = vision.size("depth", 27), vision.size("num_heads", 16)
    hidden_size = vision.size("hidden_size", 1152)
    num_positions = vision.size("num_position_embeddings", 2304)
    grid_size = round(num_positions**0.5)
    if grid_size**2 != num_positions:
        raise vision.error(
            f"num_position_embeddings: expected the square of an integer, got {num_positions}"
        )
    picture_token = layers.need_token(keys, "image_token_id", TOKENS[family], text.vocab_size)
    return VisionConfig(
        family=family,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=vision.size("intermediate_size", 4304),
        num_heads=num_heads,
        head_dim=vision.head_dim(hidden_size, num_heads, 4, "num_heads"),
        output_size=text.hidden_size,
        patch_size=vision.size("patch_size", 16),
        merge_size=vision.size("spatial_merge_size", 2),
        norm_eps=1e-6,
        activation=activation_name(vision, "hidden_act", "gelu_pytorch_tanh"),
        picture_token=picture_token,
        prompt=PromptText(picture_token, (picture_token,)),
        rope_theta=layers.rope_theta(vision, 10000.0),
        num_frames=vision.size("temporal_patch_size", 2),
        grid_size=grid_size,
        deepstack=_deepstack(vision, family, num_layers),
    )


def _deepstack(vision: Keys, family: str, num_layers: int) -> tuple[int, ...]:
    found = []
    if family in _WITH_DEEPSTACK:
        found = vision.get("deepstack_visual_indexes", [8, 16, 24])
    else:  # transformers ignores it
        vision.expect("deepstack_visual_indexes", None, [])
    is_ascending = isinstance(found, list) and all(type(i) is int for i in found)
    if not is_ascending or found != sorted({*found} & {*range(num_layers)}):
        raise vision.error(
            f"deepstack_visual_indexes: expected ascending layers of {num_layers}, got {found!r}"
        )
    return tuple(found)


def weight_tree(config: VisionConfig) -> WeightTree:
    """mergers: the last layer's, then one for each layer of deepstack."""
    d, ff = config.hidden_size, config.intermediate_size

    def layer(i: int) -> dict[str, Weight]:
        block = f"visual.blocks.{i}"
        return {
            **layers.norm("attention_norm", f"{block}.norm1", d),
            **layers.linear("qkv", f"{block}.attn.qkv", 3 * d, d),
            **layers.linear("o", f"{block}.attn.proj", d, d),
            **layers.norm("mlp_norm", f"{block}.norm2", d),
            **layers.linear("up", f"{block}.mlp.linear_fc1", ff, d),
            **layers.linear("down", f"{block}.mlp.linear_fc2", d, ff),
        }

    size = d * config.merge_size**2

    def merger(name: str, norm_size: int) -> dict[str, Weight]:
        return {
            **layers.norm("norm", f"visual.{name}.norm", norm_size),
            **layers.linear("up", f"visual.{name}.linear_fc1", size, size),
            **layers.linear("down", f"visual.{name}.linear_fc2", config.output_size, size),
        }

    deepstack = [merger(f"deepstack_merger_list.{i}", size) for i in range(len(config.deepstack))]
    return {
        "patch": _patch_weight(config),
        "patch_bias": table("visual.patch_embed.proj.bias", d),
        "positions": table("visual.pos_embed.weight", config.grid_size**2, d),
        "layers": [layer(i) for i in range(config.num_layers)],
        "mergers": [merger("merger", d), *deepstack],
    }


def _patch_weight(config: VisionConfig) -> Weight:
    """The frames of a patch are equal in a picture, so that their weights' sum is enough."""
    whole = layers.patch_weight("visual.patch_embed.proj.weight", config)
    ((name, (hidden, channels, *sides)),) = whole.parts.items()

    def summed(tensor: np.ndarray) -> np.ndarray:
        return whole.change(tensor.astype(np.float32).sum(2))

    return dataclasses.replace(
        whole, parts={name: (hidden, channels, config.num_frames, *sides)}, change=summed
    )


def begin(
    patches: jax.Array, places: jax.Array, sizes: jax.Array, params: Params, config: VisionConfig
) -> jax.Array:
    """Learned positions are interpolated to each picture's size."""
    taps, tap_weights = zip(
        *(_between(places[:, i], sizes[:, i], config.grid_size) for i in range(2)), strict=True
    )
    rows = config.grid_size * taps[0][:, :, None] + taps[1][:, None]
    by_tap = tap_weights[0][:, :, None] * tap_weights[1][:, None]
    found = params["positions"][rows] * by_tap[..., None]
    positions = jnp.sum(found, (1, 2)).astype(patches.dtype)
    return layers.product(patches, params, "patch") + positions


def _between(places: jax.Array, number: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Returns the two learned positions of a side around each place of `number`, and weights.

    The first and the last place have the first and the last position. In f32, as transformers.
    """
    at = places.astype(jnp.float32) * (size - 1) / jnp.maximum(number - 1, 1).astype(jnp.float32)
    first = jnp.floor(at)
    taps = jnp.clip(first[:, None] + np.arange(2), 0, size - 1).astype(jnp.int32)
    part = at - first
    return taps, jnp.stack([1 - part, part], -1)


def finish(
    x: jax.Array, kept: list[jax.Array], params: Params, config: VisionConfig
) -> list[jax.Array]:
    first, *others = params["mergers"]
    return [
        _merge(x, first, config, is_deepstack=False),
        *(
            _merge(each, merger, config, is_deepstack=True)
            for each, merger in zip(kept, others, strict=True)
        ),
    ]


def _merge(x: jax.Array, weights: Params, config: VisionConfig, *, is_deepstack: bool) -> jax.Array:
    size = -1, config.hidden_size * config.merge_size**2
    if is_deepstack:  # the norm is of all patches of a token together
        h = layers.apply_norm(x.reshape(size), weights, "norm", config.norm_eps)
    else:
        h = layers.apply_norm(x, weights, "norm", config.norm_eps).reshape(size)
    h = layers.product(h, weights, "up", "gelu")
    return layers.product(h, weights, "down")
