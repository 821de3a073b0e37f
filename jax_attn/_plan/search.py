"""Binary search, for arrays of the host and of JAX."""

from __future__ import annotations

from typing import Any, Literal

import jax.numpy as jnp
import numpy as np


def searchsorted(
    xp: Any, borders: Any, values: Any, *, side: Literal["left", "right"] = "right"
) -> Any:
    """Where each value belongs among sorted borders, as numpy.searchsorted. In jnp: i32.

    jax.numpy.searchsorted raises an AssertionError of its own in a shard_map that leaves axes to
    XLA, if the borders vary over the others (jax 0.10, check_vma=True). In place of its loop this
    one is unrolled, which on a GPU needs fewer launches.
    """
    if xp is np:
        return np.searchsorted(borders, values, side=side)
    low = jnp.zeros(values.shape, jnp.int32)
    high = jnp.full(values.shape, len(borders), jnp.int32)
    for _ in range(len(borders).bit_length()):
        middle = (low + high) // 2
        border = borders[jnp.minimum(middle, len(borders) - 1)]
        is_behind = (low < high) & (border <= values if side == "right" else border < values)
        low = jnp.where(is_behind, middle + 1, low)
        high = jnp.where(is_behind, high, middle)
    return low
