"""The device's own time, read between executables: free of the host that waits for results."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

_WARP = jax.ShapeDtypeStruct((32,), jnp.int32)


def _read(zeros_ref: Any, now_ref: Any) -> None:
    (now_ref[...],) = triton.elementwise_inline_asm(
        "mov.u32 $0, %globaltimer_lo;",  # ns, the lower 32 bits
        args=[zeros_ref[...]],
        constraints="=r,r",
        pack=1,
        result_shape_dtypes=[_WARP],
    )


@functools.cache
def _stamp() -> Callable[[], jax.Array]:
    """A kernel of one warp. A GPU runs executables one after the other, in the order of calls."""
    read = pl.pallas_call(
        _read, out_shape=_WARP, compiler_params=triton.CompilerParams(num_warps=1), name="stamp"
    )
    return functools.partial(jax.jit(read), jnp.zeros(_WARP.shape, _WARP.dtype))


def elapsed_us(ahead: Callable[[], Any], run: Callable[[], Any]) -> float:
    """From the end of `ahead` to the end of `run`, both asynchronous; below 4 s.

    What the host does for a call before it launches the first kernel, some us a call, it does
    while the device is busy with `ahead`, if that takes long enough.
    """
    results = ahead(), _stamp()(), run(), _stamp()()
    _, begin, _, end = jax.block_until_ready(results)
    # By copies: an index of a jax array would be another executable, and the device would rest.
    return (int(np.asarray(end)[0]) - int(np.asarray(begin)[0])) % 2**32 / 1e3
