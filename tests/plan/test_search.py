"""The binary search of plans."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_attn._plan.search import searchsorted


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("length", [1, 2, 7, 8])
def test_finds_what_numpy_finds(side, length):
    borders = np.sort(np.random.default_rng(length).integers(0, 6, length)).astype(np.int32)
    values = np.arange(-1, 8, dtype=np.int32)
    want = np.searchsorted(borders, values, side=side)
    host = searchsorted(np, borders, values, side=side)
    assert type(host) is np.ndarray and (host == want).all()
    traced = jax.jit(lambda b, v: searchsorted(jnp, b, v, side=side))(borders, values)
    assert traced.dtype == jnp.int32 and (traced == want).all()
