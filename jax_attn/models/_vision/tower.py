"""Vision towers: patches of pictures to rows of the text model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn.models._config.config import ModelConfig
from jax_attn.models._config.keys import Keys
from jax_attn.models._vision import gemma3, gemma4, layers, pixtral, qwen
from jax_attn.models._vision.layers import PatchBatch, VisionConfig
from jax_attn.models._weights import float_weights
from jax_attn.models._weights.float_weights import tree_shapes
from jax_attn.models._weights.tensors import Shape
from jax_attn.models._weights.weights import Params

# By model_type. Each module has `parse`, `weight_tree`, `begin` and `finish`.
FAMILIES: dict[str, ModuleType] = {
    **dict.fromkeys(qwen.TOKENS, qwen),
    "gemma3": gemma3,
    "gemma4": gemma4,
    "mistral3": pixtral,
}
# Parts of names in some files, and what others have in their place.
_ALIASES = (("vision_tower.vision_model.", "vision_tower."),)
_OTHERS = ("language_model.", "lm_head.", "mtp.", "audio_tower.", "embed_audio.")
# SigLIP has these, and no text model reads them.
_POOLING_HEADS = "vision_tower.head.", "vision_tower.vision_model.head."


def parse(keys: Keys, text: ModelConfig) -> VisionConfig:
    """Returns the config of a tower from the keys of config.json. Raises ModelDirectoryError."""
    config: VisionConfig = FAMILIES[keys.need("model_type")].parse(keys, text)
    return config


def file_shapes(config: VisionConfig) -> dict[str, Shape]:
    """Returns every expected tensor of the files with torch's shape; names have no prefix."""
    return tree_shapes(FAMILIES[config.family].weight_tree(config))


def is_of_tower(name: str) -> bool:
    """Whether a tensor of the files is one of a tower, by its name."""
    return name.removeprefix("model.").startswith(("visual.", "vision_tower."))


def load_params(
    directory: str | Path,
    config: VisionConfig,
    dtype: jax.typing.DTypeLike = "bfloat16",
    progress: Callable[[int, int], None] | None = None,
    in_panels: bool = False,
) -> Params:
    """Reads the weights, as weights.load_params does.

    patch: [3 * patch_size ** 2, hidden]. layers: as in an encoder. What else there is, the family's
    weight_tree says.
    """
    tree = FAMILIES[config.family].weight_tree(config)
    return float_weights.load_tree(
        directory, config, tree, _is_other, dtype, progress, _ALIASES, in_panels
    )


def _is_other(name: str) -> bool:
    return name.startswith((*_OTHERS, *_POOLING_HEADS))


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
    executable. Runs on the device of the params.

    mean, std: of the three channels, of values between 0 and 1.
    """
    outside = {key: value for key, value in params.items() if key != "layers"}
    (device,) = params["patch"].devices()
    arrays = batch.patches, batch.places, batch.sizes
    plan, arrays = jax.device_put((batch.plan, arrays), device)
    x = _begin(*arrays, outside, config=config, mean=mean, std=std)
    kept = []
    for i, weights in enumerate(params["layers"]):
        x = layers.run_layer(x, arrays[1], plan, weights, config=config)
        if i in config.deepstack:
            kept.append(x)
    return _finish(x, kept, outside, config=config)


@partial(jax.jit, static_argnames=("config", "mean", "std"))
def _begin(
    patches: jax.Array,
    places: jax.Array,
    sizes: jax.Array,
    params: Params,
    config: VisionConfig,
    mean: tuple[float, ...],
    std: tuple[float, ...],
) -> jax.Array:
    center, width = (np.array(each, np.float32).reshape(-1, 1, 1) for each in (mean, std))
    normal = (patches.astype(jnp.float32) * np.float32(1 / 255) - center) / width
    flat = normal.astype(params["patch"].dtype).reshape(len(patches), -1)
    x: jax.Array = FAMILIES[config.family].begin(flat, places, sizes, params, config)
    return x


@partial(jax.jit, static_argnames="config")
def _finish(x: jax.Array, kept: list[jax.Array], params: Params, config: VisionConfig) -> jax.Array:
    return jnp.stack(FAMILIES[config.family].finish(x, kept, params, config), 1)
