"""Activations of MLPs, by the names of config.json."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from jax_attn.models._config.keys import Keys

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": partial(jax.nn.gelu, approximate=False),
    # Those of gelu with tanh differ in the order of the operations only. jax's gelu is that form.
    "gelu_fast": jax.nn.gelu,
    "gelu_new": jax.nn.gelu,
    "gelu_pytorch_tanh": jax.nn.gelu,
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "silu": jax.nn.silu,
}


def activation_name(keys: Keys, key: str, default: str) -> str:
    """Returns one of ACTIVATIONS; `default` for a missing key. Raises ModelDirectoryError."""
    keys.expect(key, *ACTIVATIONS)
    return str(keys.get(key, default))
