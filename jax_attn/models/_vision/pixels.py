"""From the bytes of a picture to the pixels that a tower reads, as Qwen2VLImageProcessor does it.

Needs Pillow: pip install 'jax_attn[pictures]'.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jax_attn.models._config.directory import read_json
from jax_attn.models._config.keys import Keys
from jax_attn.models._vision.tower import VisionConfig

if TYPE_CHECKING:
    from PIL.Image import Image

# Formats whose decoders are in Pillow's own code or in libraries that browsers use. Others, such as
# EPS, run programs or are little tested.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_SOURCE_PIXELS = 1 << 25  # of a picture before it is resized: 100 MB in memory
_PROCESSORS = tuple(f"Qwen2VLImageProcessor{x}" for x in ("", "Fast", "Pil"))
_MAX_RATIO = 200  # of the sides


class PictureError(ValueError):
    """A picture cannot be used, in one sentence."""


@dataclasses.dataclass(frozen=True)
class PixelConfig:
    """How pictures are resized and normalized.

    factor: heights and widths become multiples of it, in pixels.
    min_pixels, max_pixels: of a resized picture.
    mean, std: of the three channels, of values between 0 and 1.
    """

    factor: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Returns the height and width to which a picture is resized. Raises PictureError."""
        if not height or not width or max(height, width) > _MAX_RATIO * min(height, width):
            raise PictureError(
                f"expected sides with a ratio of at most {_MAX_RATIO}, got {width} x {height}"
                " pixels"
            )
        factor = self.factor
        new = [round(side / factor) * factor for side in (height, width)]
        if new[0] * new[1] > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            new = [
                max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width)
            ]
        elif new[0] * new[1] < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            new = [math.ceil(side * grow / factor) * factor for side in (height, width)]
        return new[0], new[1]


def load_config(directory: str | Path, tower: VisionConfig) -> PixelConfig:
    """Reads preprocessor_config.json. Raises ModelDirectoryError."""
    path = Path(directory) / "preprocessor_config.json"
    keys = Keys(read_json(path), path)
    keys.expect("image_processor_type", *_PROCESSORS, None)
    for key in ("do_resize", "do_rescale", "do_normalize"):
        keys.expect(key, True, None)
    keys.expect("do_convert_rgb", True, None)
    keys.expect("resample", 3, None)  # bicubic
    for key in ("do_center_crop", "do_pad"):
        keys.expect(key, None, False)
    if abs(keys.number("rescale_factor", 1 / 255) - 1 / 255) > 1e-9:
        raise keys.error(f"rescale_factor: expected 1 / 255, got {keys.get('rescale_factor')!r}")
    for key, value in (
        ("patch_size", tower.patch_size),
        ("temporal_patch_size", tower.num_frames),
        ("merge_size", tower.merge_size),
    ):
        keys.need(key)
        keys.expect(key, value)
    size = keys.inner("size") or Keys({}, path)
    least = keys if keys.get("min_pixels") is not None else size
    most = keys if keys.get("max_pixels") is not None else size
    min_pixels = least.size("min_pixels" if least is keys else "shortest_edge")
    max_pixels = most.size("max_pixels" if most is keys else "longest_edge")
    if max_pixels < max(min_pixels, tower.factor**2):
        raise keys.error(
            f"size: expected a longest_edge of at least {max(min_pixels, tower.factor**2)} pixels,"
            f" got {max_pixels}"
        )
    return PixelConfig(
        tower.factor,
        min_pixels,
        max_pixels,
        keys.numbers("image_mean", 3),
        keys.numbers("image_std", 3),
    )


def decode(data: bytes, max_pixels: int = MAX_SOURCE_PIXELS) -> Image:
    """Decodes a file of one of FORMATS, turned as its EXIF data say; of several frames the first.

    max_pixels: more are refused before any memory is taken for them.

    Raises PictureError.
    """
    image_module = _pillow()
    from PIL import ImageOps

    expected = f"expected a picture as {', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of bombs: their size is checked here
        try:
            image: Any = image_module.open(io.BytesIO(data), formats=FORMATS)
        except image_module.DecompressionBombError:
            raise PictureError(f"expected at most {max_pixels} pixels") from None
        except Exception:
            raise PictureError(f"{expected}, got {len(data)} bytes of something else") from None
        width, height = image.size
        if width * height > max_pixels:
            raise PictureError(f"expected at most {max_pixels} pixels, got {width} x {height}")
        try:
            image.load()
            with contextlib.suppress(Exception):  # EXIF data are often wrong
                image = ImageOps.exif_transpose(image)
        except Exception as error:  # decoders raise many kinds
            raise PictureError(f"{expected}, got a file that is damaged: {error}") from None
    found: Image = image
    return found


def prepare(image: Image, config: PixelConfig) -> np.ndarray:
    """Returns the pixels of a picture, resized: [height, width, 3] u8.

    What is transparent becomes white. Raises PictureError.
    """
    image_module = _pillow()
    height, width = config.size(image.height, image.width)
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = image_module.new("RGBA", image.size, (255, 255, 255, 255))
        image = image_module.alpha_composite(white, image)
    resized = image.convert("RGB").resize((width, height), image_module.Resampling.BICUBIC)
    return np.asarray(resized)


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise PictureError(
            "expected the package Pillow, which is not installed: pip install 'jax_attn[pictures]'"
        ) from None
    return Image
