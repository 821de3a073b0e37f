"""The device's clock, read between executables, without the host's waiting time."""

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
    """Makes a one-warp kernel that reads the clock. A GPU runs executables in call order."""
    read = pl.pallas_call(
        _read, out_shape=_WARP, compiler_params=triton.CompilerParams(num_warps=1), name="stamp"
    )
    return functools.partial(jax.jit(read), jnp.zeros(_WARP.shape, _WARP.dtype))


def elapsed_us(ahead: Callable[[], Any], run: Callable[[], Any]) -> float:
    """Returns the time from the end of `ahead` to the end of `run`, both asynchronous; below 4 s.

    If `ahead` takes long enough, it hides the host's work before the first launch, some us a call.
    """
    results = ahead(), _stamp()(), run(), _stamp()()
    _, begin, _, end = jax.block_until_ready(results)
    # Copy the arrays: indexing a jax array would run another executable, and the device would idle.
    return (int(np.asarray(end)[0]) - int(np.asarray(begin)[0])) % 2**32 / 1e3
