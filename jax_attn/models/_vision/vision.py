"""A vision tower as a whole: config, weights, and how pictures are made ready for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import jax
import numpy as np

from jax_attn.models._config.directory import existing_directory, read_json
from jax_attn.models._config.keys import Keys
from jax_attn.models._families.parse import load_config
from jax_attn.models._vision import pixels, tower
from jax_attn.models._vision.layers import PatchBatch, VisionConfig
from jax_attn.models._vision.pixels import PixelConfig
from jax_attn.models._weights.weight_files import tensor_names
from jax_attn.models._weights.weights import Params


@dataclasses.dataclass(frozen=True)
class VisionModel:
    """A vision tower, as `load_vision` returns it."""

    config: VisionConfig
    params: Params
    pixels: PixelConfig

    @property
    def dtype(self) -> str:
        return str(self.params["patch"].dtype)

    def on(self, device: jax.Device) -> VisionModel:
        """Returns the model with its weights on a device, where it runs then."""
        return dataclasses.replace(self, params=jax.device_put(self.params, device))

    @property
    def max_tokens(self) -> int:
        """Tokens of the largest picture, without those behind its rows."""
        return self.pixels.sizing.max_pixels // self.config.factor**2

    def grid(self, picture: np.ndarray) -> tuple[int, int]:
        """Rows and columns of the tokens of a picture [height, width, 3]."""
        return picture.shape[0] // self.config.factor, picture.shape[1] // self.config.factor


def has_vision(directory: str | Path) -> bool:
    """Whether the directory is of a model whose pictures are supported.

    One without vision_config, preprocessor_config.json or a tower's tensors is of a text model.
    """
    directory = existing_directory(directory)
    raw = read_json(directory / "config.json")
    if raw.get("model_type") not in tower.FAMILIES or not raw.get("vision_config"):
        return False
    return pixels.has_config(directory) and any(map(tower.is_of_tower, tensor_names(directory)))


def load_vision(
    directory: str | Path,
    dtype: jax.typing.DTypeLike = "bfloat16",
    progress: Callable[[int, int], None] | None = None,
    *,
    in_panels: bool = False,
) -> VisionModel:
    """Loads the vision tower of a directory whose text model `load` reads.

    Args: see `load`. preprocessor_config.json, or processor_config.json, says how pictures are
      resized.

    Raises:
      ModelDirectoryError: the model has no tower that is supported, or a file, key or tensor is
        missing or does not fit; names it.
    """
    directory = existing_directory(directory)
    path = directory / "config.json"
    keys = Keys(read_json(path), path)
    keys.need("model_type")
    keys.expect("model_type", *tower.FAMILIES)
    text = load_config(directory)
    config = tower.parse(keys, text)
    return VisionModel(
        config,
        tower.load_params(directory, config, dtype, progress, in_panels),
        pixels.load_config(directory, config),
    )


def encode_pictures(
    model: VisionModel, pictures: Sequence[np.ndarray], num_patches: int | None = None
) -> jax.Array:
    """Returns the rows of pictures for `PictureRows`, [num_tokens, 1 + depth, hidden].

    pictures: [height, width, 3] u8 each, as `prepare_picture` returns them. Their rows are back to
      back, each picture's row by row.
    num_patches: the capacity, which fixes the shapes; None: as many as there are.
    """
    patch = model.config.patch_size
    used = sum(x.shape[0] * x.shape[1] // patch**2 for x in pictures)
    batch = PatchBatch.make(model.config, list(pictures), num_patches or used, model.dtype)
    return tower.encode(model.params, model.config, batch, model.pixels.mean, model.pixels.std)


def picture_positions(begin: int, end: int, spans: Iterable[tuple[int, int, int]]) -> np.ndarray:
    """Returns the positions [3, end - begin] i32 of the tokens `begin` to `end` of a sequence.

    Time, row and column, see Rope.sections, for models with config.position_parts 3. A picture is
    one instant, whose rows and columns count from it; the text goes on behind the longer side.

    spans: of each picture, its first token, and its rows and columns in tokens; ascending.
    """
    index = np.arange(begin, end, dtype=np.int32)
    where, shift = np.tile(index, (3, 1)), 0
    for first, rows, columns in spans:
        number, inside = rows * columns, index - first
        start = first + shift
        place = start + np.stack([np.zeros_like(inside), inside // columns, inside % columns])
        where = np.where((inside >= 0) & (inside < number), place, where)
        shift += max(rows, columns) - number
        where = np.where(inside >= number, index + shift, where)
    return where
