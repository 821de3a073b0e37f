"""MXFP4: codes of four bits with a scale for each 32 (OCP Microscaling Formats, version 1.0)."""

from __future__ import annotations

import numpy as np

BLOCK = 32  # codes that share a scale
# A code counts times 2 ** (scale - 127). 255 is NaN, and no weight is as large as those below it.
MAX_SCALE = 240


def codes(blocks: np.ndarray) -> np.ndarray:
    """[count, out, in / 2] u8, two codes each, the first in the low bits.

    blocks: [count, out, in / 32, 16], u8, of the files.
    """
    return blocks.reshape(*blocks.shape[:2], -1)
