"""Alternating updates (arXiv 2301.13310) and learned augmented residual layers (arXiv 2411.07501),
as Gemma 3n has them.

A token has several hidden states. A layer predicts all of them, computes the active one, and
corrects the others by what it got.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jax_attn.models._config.config import AltUp
from jax_attn.models._products.quantized import Matrix, product
from jax_attn.models._weights.weights import Params

Norm = Callable[[jax.Array, str], jax.Array]
"""(x, weight) -> x after the RMSNorm with that weight of the layer."""

_SMALLEST_SQUARE = 1e-5


def expand(x: jax.Array, projections: Matrix) -> jax.Array:
    """Returns hidden states [num_inputs, n, hidden] for embedded tokens x [n, hidden].

    projections: [num_inputs - 1, hidden, hidden].
    """
    return jnp.stack([x, *(_like(x, product(x, matrix)) for matrix in _each(projections))])


def merge(states: jax.Array, projections: Matrix) -> jax.Array:
    """Returns the last hidden state [n, hidden] of states [num_inputs, n, hidden]."""
    first, *others = states
    pairs = zip(others, _each(projections), strict=True)
    return jnp.stack([first, *(_like(first, product(x, matrix)) for x, matrix in pairs)]).mean(0)


def predict(states: jax.Array, weights: Params, sizes: AltUp, norm: Norm) -> jax.Array:
    """Returns predictions [num_inputs, n, hidden] of a layer's results."""
    routed = _routed(states[sizes.active], weights, norm)
    shape = len(routed), sizes.num_inputs, sizes.num_inputs
    coefficients = product(routed, weights["altup_prediction"]).reshape(shape)
    return states + jnp.einsum("tji,itd->jtd", coefficients, states)


def correct(
    predictions: jax.Array, computed: jax.Array, weights: Params, sizes: AltUp, norm: Norm
) -> jax.Array:
    """Returns hidden states [num_inputs, n, hidden]. computed: [n, hidden], of the layer."""
    coefficients = 1 + product(_routed(computed, weights, norm), weights["altup_correction"])
    innovation = computed - predictions[sizes.active]
    return predictions + innovation * coefficients.T[..., None]


def add_laurel(x: jax.Array, h: jax.Array, weights: Params, norm: Norm) -> jax.Array:
    """Adds to x, after attention, what a projection of low rank makes of attention's input h."""
    low_rank = product(product(h, weights["laurel_left"]), weights["laurel_right"])
    return (x + h + norm(low_rank, "laurel_norm")) * 0.5**0.5


def _routed(x: jax.Array, weights: Params, norm: Norm) -> jax.Array:
    """Returns [n, num_inputs] in -1 to 1."""
    h = norm(x, "altup_router_norm") * x.shape[-1] ** -1
    return jnp.tanh(product(h, weights["altup_router"], jnp.float32)).astype(x.dtype)


def _like(x: jax.Array, y: jax.Array) -> jax.Array:
    """Scales y to the magnitude of x."""
    squares = (jnp.mean(jnp.square(a.astype(jnp.float32)), -1, keepdims=True) for a in (x, y))
    wanted, got = squares
    scale = jnp.sqrt(wanted / jnp.maximum(got, _SMALLEST_SQUARE))
    return (y * scale).astype(x.dtype)


def _each(matrices: Matrix) -> list[Matrix]:
    return [jax.tree.map(lambda array, i=i: array[i], matrices) for i in range(matrices.shape[0])]
