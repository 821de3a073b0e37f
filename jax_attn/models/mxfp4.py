"""MXFP4: codes of four bits with a scale for each 32 (OCP Microscaling Formats, version 1.0)."""

from __future__ import annotations

import numpy as np

BLOCK = 32  # codes that share a scale

# What a code is worth, section 5.3.3: sign, two bits of exponent, one of mantissa.
_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def widen(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """[count, in, out] f32, of the files' [count, out, in].

    blocks: [count, out, in / 32, 16], u8. Two codes each, the first in the low bits.
    scales: [count, out, in / 32], u8. A code counts times 2 ** (scale - 127); 255 is NaN.
    """
    count, outer, num_blocks, _ = blocks.shape
    wide = np.empty((count, num_blocks * BLOCK, outer), np.float32)
    for e in range(count):  # one at a time bounds what is in memory beside the result
        codes = np.stack([blocks[e] & 15, blocks[e] >> 4], axis=-1).reshape(
            outer, num_blocks, BLOCK
        )
        exponents = scales[e].astype(np.int32)[..., None] - 127
        values = np.ldexp(_VALUES[codes], exponents)
        values = np.where(scales[e][..., None] == 255, np.float32(np.nan), values)
        wide[e] = values.reshape(outer, -1).T
    return wide
