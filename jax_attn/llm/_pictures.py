"""Pictures in chats from Python: files, bytes, arrays and Pillow's images."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

_MODES = ("1", "L", "LA", "P", "RGB", "RGBA")  # of Pillow, those that PNG has


def as_urls(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the message with its pictures as OpenAI has them, in data: URLs.

    Parts {"type": "image", "image": ...} hold a path, the bytes of a file, an array [height, width,
    3] of u8, or an image of Pillow.

    Raises:
      ValueError: something else. OSError: the file cannot be read.
    """
    content = message.get("content")
    if not isinstance(content, (list, tuple)):
        return dict(message)
    return {**message, "content": [_as_url(part) for part in content]}


def _as_url(part: Any) -> Any:
    if not isinstance(part, Mapping) or part.get("type") != "image":
        return part
    coded = base64.b64encode(_file(part.get("image"))).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{coded}"}}


def _file(image: Any) -> bytes:
    if isinstance(image, bytes):
        return image
    if isinstance(image, (str, os.PathLike)):
        return Path(image).read_bytes()
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
            raise ValueError(
                "image: expected an array [height, width, 3] of uint8, got"
                f" {list(image.shape)} of {image.dtype}"
            )
        from PIL import Image

        image = Image.fromarray(image)
    if not hasattr(image, "save"):
        raise ValueError(
            "image: expected a path, the bytes of a file, an array or an image of Pillow, got"
            f" {type(image).__name__}"
        )
    out = io.BytesIO()
    (image if image.mode in _MODES else image.convert("RGB")).save(out, "PNG", compress_level=1)
    return out.getvalue()
