"""From the bytes of a picture to the pixels that a tower reads, as transformers' processors do it.

Needs Pillow: pip install 'jax_attn[pictures]'.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from jax_attn.models._config.directory import ModelDirectoryError, read_json
from jax_attn.models._config.keys import Keys
from jax_attn.models._vision.layers import VisionConfig

if TYPE_CHECKING:
    from PIL.Image import Image

# Formats whose decoders are in Pillow's own code or in libraries that browsers use. Others, such as
# EPS, run programs or are little tested.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_SOURCE_PIXELS = 1 << 25  # of a picture before it is resized: 100 MB in memory
_BILINEAR, _BICUBIC = 2, 3  # Pillow's numbers


class PictureError(ValueError):
    """A picture cannot be used, in one sentence."""


class Sizing(Protocol):
    """The size to which pictures are resized."""

    @property
    def max_pixels(self) -> int: ...

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Returns height and width. Raises PictureError."""
        ...


@dataclasses.dataclass(frozen=True)
class Multiples:
    """Sides near their own that are multiples of `factor`, and pixels in a range (Qwen)."""

    factor: int
    min_pixels: int
    max_pixels: int

    def size(self, height: int, width: int) -> tuple[int, int]:
        _check_ratio(height, width, 200)
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


@dataclasses.dataclass(frozen=True)
class Square:
    """One size for all pictures, whatever their shape (Gemma 3)."""

    side: int

    @property
    def max_pixels(self) -> int:
        return self.side**2

    def size(self, height: int, width: int) -> tuple[int, int]:
        _check_ratio(height, width, max(height, width, 1))
        return self.side, self.side


@dataclasses.dataclass(frozen=True)
class Budget:
    """As large as a number of tokens allows, in about the same shape (Gemma 4)."""

    factor: int
    max_tokens: int

    @property
    def max_pixels(self) -> int:
        return self.max_tokens * self.factor**2

    def size(self, height: int, width: int) -> tuple[int, int]:
        _check_ratio(height, width, self.max_tokens)
        factor = self.factor
        grow = math.sqrt(self.max_pixels / (height * width))
        rows, columns = (math.floor(grow * side / factor) for side in (height, width))
        if not rows:
            rows, columns = 1, min(width // height, self.max_tokens)
        elif not columns:
            rows, columns = min(height // width, self.max_tokens), 1
        return rows * factor, columns * factor


@dataclasses.dataclass(frozen=True)
class LongestEdge:
    """No side longer than a limit, and multiples of `factor`, rounded up (Pixtral)."""

    factor: int
    longest: int

    @property
    def max_pixels(self) -> int:
        return (-(-self.longest // self.factor) * self.factor) ** 2

    def size(self, height: int, width: int) -> tuple[int, int]:
        _check_ratio(height, width, self.longest)
        shrink = max(height / self.longest, width / self.longest)
        if shrink > 1:
            height, width = math.floor(height / shrink), math.floor(width / shrink)
        rows, columns = (-(-max(side, 1) // self.factor) for side in (height, width))
        return rows * self.factor, columns * self.factor


def _check_ratio(height: int, width: int, most: int) -> None:
    if not height or not width or max(height, width) > most * min(height, width):
        raise PictureError(
            f"expected sides with a ratio of at most {most}, got {width} x {height} pixels"
        )


@dataclasses.dataclass(frozen=True)
class PanAndScan:
    """Parts of a long picture that are shown beside all of it (Gemma 3).

    min_side: of a part, pixels. min_ratio: of the longer side to the other.
    """

    min_side: int = 256
    most: int = 4
    min_ratio: float = 1.2

    def boxes(self, height: int, width: int) -> list[tuple[int, int, int, int]]:
        """Returns left, top, right and bottom of each part, as transformers cuts them; []: none."""
        long, short = max(height, width), min(height, width)
        if not short or long / short < self.min_ratio:
            return []
        num = min(long // self.min_side, math.floor(long / short + 0.5))
        num = min(self.most, max(2, num))
        side = math.ceil(long / num)
        if min(side, short) < self.min_side:
            return []
        ends = [(i * side, min(long, (i + 1) * side)) for i in range(num)]
        if width >= height:
            return [(begin, 0, end, height) for begin, end in ends]
        return [(0, begin, width, end) for begin, end in ends]


@dataclasses.dataclass(frozen=True)
class PixelConfig:
    """How pictures are resized and normalized.

    mean, std: of the three channels, of values between 0 and 1.
    resample: Pillow's number of the filter.
    pan_and_scan: None: the model knows no parts of pictures.
    """

    sizing: Sizing
    mean: tuple[float, ...]
    std: tuple[float, ...]
    resample: int = _BICUBIC
    pan_and_scan: PanAndScan | None = None


# ---- files -------------------------------------------------------------------------------------


_WHOLE = "processor_config.json"  # of the processor of texts and pictures


def config_path(directory: Path) -> Path:
    """Returns the file that says how pictures are resized; it may be missing.

    transformers 5 writes it into that of the whole processor.
    """
    path = directory / "preprocessor_config.json"
    return path if path.is_file() else directory / _WHOLE


def has_config(directory: Path) -> bool:
    path = config_path(directory)
    return path.is_file() and _settings(path) is not None


def _settings(path: Path) -> Keys | None:
    keys = Keys(read_json(path), path)
    return keys.inner("image_processor") if path.name == _WHOLE else keys


def load_config(directory: str | Path, tower: VisionConfig) -> PixelConfig:
    """Reads preprocessor_config.json, or processor_config.json. Raises ModelDirectoryError."""
    path = config_path(Path(directory))
    keys = _settings(path)
    if keys is None:
        raise ModelDirectoryError(f"{path}: key 'image_processor' is missing")
    for key in ("do_resize", "do_rescale"):
        keys.expect(key, True, None)
    keys.expect("do_convert_rgb", True, None)
    keys.expect("do_center_crop", None, False)
    if abs(keys.number("rescale_factor", 1 / 255) - 1 / 255) > 1e-9:
        raise keys.error(f"rescale_factor: expected 1 / 255, got {keys.get('rescale_factor')!r}")
    whole = Path(directory) / _WHOLE
    processor = Keys(read_json(whole) if whole.is_file() else {}, whole)
    return _READERS[tower.family](keys, tower, processor)


def _expect_processor(keys: Keys, name: str) -> None:
    keys.expect("image_processor_type", *(f"{name}{x}" for x in ("", "Fast", "Pil")), None)


def _normalized(keys: Keys, sizing: Sizing, resample: int = _BICUBIC) -> PixelConfig:
    keys.expect("do_normalize", True, None)
    keys.expect("resample", resample, None)
    mean, std = (keys.numbers(key, 3) for key in ("image_mean", "image_std"))
    return PixelConfig(sizing, mean, std, resample)


def _qwen(keys: Keys, tower: VisionConfig, processor: Keys) -> PixelConfig:
    _expect_processor(keys, "Qwen2VLImageProcessor")
    keys.expect("do_pad", None, False)
    for key, value in (
        ("patch_size", tower.patch_size),
        ("temporal_patch_size", tower.num_frames),
        ("merge_size", tower.merge_size),
    ):
        keys.need(key)
        keys.expect(key, value)
    size = keys.inner("size") or Keys({}, keys.path)
    least = keys if keys.get("min_pixels") is not None else size
    most = keys if keys.get("max_pixels") is not None else size
    min_pixels = least.size("min_pixels" if least is keys else "shortest_edge")
    max_pixels = most.size("max_pixels" if most is keys else "longest_edge")
    if max_pixels < max(min_pixels, tower.factor**2):
        raise keys.error(
            f"size: expected a longest_edge of at least {max(min_pixels, tower.factor**2)} pixels,"
            f" got {max_pixels}"
        )
    return _normalized(keys, Multiples(tower.factor, min_pixels, max_pixels))


def _gemma3(keys: Keys, tower: VisionConfig, processor: Keys) -> PixelConfig:
    _expect_processor(keys, "Gemma3ImageProcessor")
    # transformers' processor does not read do_pan_and_scan here: a call asks for it.
    keys.expect("do_pad", None, False)
    side = tower.patch_size * tower.grid_size
    size = keys.inner("size") or Keys({}, keys.path)
    for key in ("height", "width"):
        size.need(key)
        size.expect(key, side)
    found = _normalized(keys, Square(side), _BILINEAR)
    return dataclasses.replace(found, pan_and_scan=PanAndScan())


def _gemma4(keys: Keys, tower: VisionConfig, processor: Keys) -> PixelConfig:
    _expect_processor(keys, "Gemma4ImageProcessor")
    keys.expect("do_pad", None, False)
    keys.expect("do_normalize", False, None)
    keys.expect("resample", _BICUBIC, None)
    whole = Keys(_GEMMA4_DEFAULTS | keys.raw, keys.path)
    whole.expect("patch_size", tower.patch_size)
    whole.expect("pooling_kernel_size", tower.merge_size)
    tokens = keys.size("max_soft_tokens", 280)
    keys.expect("max_soft_tokens", 280, 70, 140, 560, 1120)
    # Any side that fits has a position.
    if tower.grid_size < tower.merge_size * tokens:
        raise keys.error(
            f"max_soft_tokens: expected at most position_embedding_size {tower.grid_size} /"
            f" pooling_kernel_size {tower.merge_size}, got {tokens}"
        )
    half = (0.5, 0.5, 0.5)  # the tower takes pixels from -1 to 1
    return PixelConfig(Budget(tower.factor, tokens), half, half)


def _pixtral(keys: Keys, tower: VisionConfig, processor: Keys) -> PixelConfig:
    _expect_processor(keys, "PixtralImageProcessor")
    keys.expect("do_pad", None, False, True)  # without an effect on the pixels of a picture
    # transformers takes the size of patches from the processor, whatever these keys say.
    whole = Keys(_PIXTRAL_DEFAULTS | processor.raw, processor.path)
    whole.expect("patch_size", tower.patch_size)
    whole.expect("spatial_merge_size", tower.merge_size)
    assert tower.prompt.row_ends is not None
    for key, text in zip(
        ("image_break_token", "image_end_token"), tower.prompt.row_ends, strict=True
    ):
        whole.expect(key, text)
    size = keys.inner("size") or Keys({"longest_edge": 1024}, keys.path)
    return _normalized(keys, LongestEdge(tower.factor, size.size("longest_edge")))


_GEMMA4_DEFAULTS = {"patch_size": 16, "pooling_kernel_size": 3}
_PIXTRAL_DEFAULTS = {"patch_size": 16, "spatial_merge_size": 1}

_READERS: dict[str, Callable[[Keys, VisionConfig, Keys], PixelConfig]] = {
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _qwen),
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "mistral3": _pixtral,
}


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
    height, width = config.sizing.size(image.height, image.width)
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = image_module.new("RGBA", image.size, (255, 255, 255, 255))
        image = image_module.alpha_composite(white, image)
    return np.asarray(image.convert("RGB").resize((width, height), config.resample))


def crops(image: Image, config: PixelConfig) -> list[Image]:
    """Returns the parts of a picture that pan and scan shows beside it; []: it shows none."""
    if config.pan_and_scan is None:
        return []
    return [image.crop(box) for box in config.pan_and_scan.boxes(image.height, image.width)]


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise PictureError(
            "expected the package Pillow, which is not installed: pip install 'jax_attn[pictures]'"
        ) from None
    return Image
