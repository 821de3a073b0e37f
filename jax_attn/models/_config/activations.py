"""Activations of MLPs, by the names of config.json, and products that end with one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn.models._config.keys import Keys
from jax_attn.models._products.panels import KernelActivation, Panels
from jax_attn.models._products.quantized import Matrix, product

Activation: TypeAlias = Callable[[jax.Array], jax.Array]


def _in_f32(function: Activation) -> Activation:
    """Computes in f32 and rounds once, as torch does: XLA rounds bf16 after every operation, which
    takes most of the time on CPUs."""
    return lambda x: function(x.astype(jnp.float32)).astype(x.dtype)


def _gelu(x: jax.Array) -> jax.Array:
    # Not jax.nn.gelu, whose erfc takes twice the time of erf on CPUs.
    return 0.5 * x * (1 + jax.lax.erf(x * np.float32(0.5**0.5)))


ACTIVATIONS: dict[str, Activation] = {
    "gelu": _in_f32(_gelu),
    # Those of gelu with tanh differ in the order of the operations only. jax's gelu is that form.
    "gelu_fast": _in_f32(jax.nn.gelu),
    "gelu_new": _in_f32(jax.nn.gelu),
    "gelu_pytorch_tanh": _in_f32(jax.nn.gelu),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "silu": _in_f32(jax.nn.silu),
}


_IN_KERNELS: dict[str, KernelActivation] = {
    "gelu": "gelu",
    **dict.fromkeys(("gelu_fast", "gelu_new", "gelu_pytorch_tanh"), "gelu_tanh"),
    "relu": "relu",
}


def dense(
    x: jax.Array,
    weight: Matrix | Panels,
    bias: jax.Array | None = None,
    activation: str | None = None,
) -> jax.Array:
    """Computes activation(x [n, in] @ weight [in, out] + bias [out]) -> [n, out] of x's dtype.

    Of a matrix in panels, the kernel adds the bias and computes the activation before it rounds
    the sums and writes them.
    """
    if isinstance(weight, Panels) and (activation is None or activation in _IN_KERNELS):
        end = None if activation is None else _IN_KERNELS[activation]
        return weight.product(x, None, bias, end)
    y = product(x, weight)
    y = y if bias is None else y + bias
    return y if activation is None else ACTIVATIONS[activation](y)


def activation_name(keys: Keys, key: str, default: str) -> str:
    """Returns one of ACTIVATIONS; `default` for a missing key. Raises ModelDirectoryError."""
    keys.expect(key, *ACTIVATIONS)
    return str(keys.get(key, default))
