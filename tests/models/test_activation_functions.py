"""Activations of MLPs: those of bf16 are computed in f32 and rounded once, as torch does."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_attn.models._config.activations import ACTIVATIONS

TANH = math.sqrt(2 / math.pi)


def gelu_tanh(x: float) -> float:
    return 0.5 * x * (1 + math.tanh(TANH * (x + 0.044715 * x**3)))


EXACT = {
    "gelu": lambda x: 0.5 * x * (1 + math.erf(x / math.sqrt(2))),
    "gelu_fast": gelu_tanh,
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "relu": lambda x: max(x, 0.0),
    "relu2": lambda x: max(x, 0.0) ** 2,
    "silu": lambda x: x / (1 + math.exp(-x)),
}
ROUNDING = {"float32": 2.0**-21, "bfloat16": 1.01 * 2.0**-8}  # of a result


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_rounds_once(name, dtype):
    x = jnp.linspace(-20, 20, 4001).astype(dtype)
    got = jax.jit(ACTIVATIONS[name])(x)
    assert got.dtype == x.dtype
    expected = np.array([EXACT[name](float(each)) for each in x])
    error = np.abs(np.asarray(got, np.float64) - expected)
    # 1 + erf, and 1 + tanh, of negative x cancel in f32.
    assert (error <= ROUNDING[dtype] * np.abs(expected) + 1e-6).all(), x[error.argmax()]
