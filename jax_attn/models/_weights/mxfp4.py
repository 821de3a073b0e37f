"""MXFP4: 4-bit values with a scale per 32 of them (OCP Microscaling Formats, version 1.0)."""

from __future__ import annotations

import numpy as np

BLOCK = 32  # values per scale
# A value is multiplied by 2 ** (scale - 127). 255 is NaN. Scales from 241 to 254 are refused: no
# real weight is that large.
MAX_SCALE = 240


def codes(blocks: np.ndarray) -> np.ndarray:
    """Returns [count, out, in / 2] u8, two values per byte, the first in the low bits.

    blocks: [count, out, in / 32, 16] u8, as in the files.
    """
    return blocks.reshape(*blocks.shape[:2], -1)
