"""Rotary position embeddings: frequencies, their scalings, and the rotation."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Positions divided by `factor`. Field names of scalings are those of config.json."""

    factor: float

    def apply(self, frequencies: np.ndarray) -> np.ndarray:
        return frequencies / self.factor


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """The Llama 3.1 release, `apply_scaling`.

    Wavelengths that fit often into the original context are kept, those that do not fit are
    stretched by `factor`, and the ones between are blended.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def apply(self, frequencies: np.ndarray) -> np.ndarray:
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        low, high = self.low_freq_factor, self.high_freq_factor
        kept = np.clip((turns - low) / (high - low), 0, 1)
        return kept * frequencies + (1 - kept) * frequencies / self.factor


@dataclasses.dataclass(frozen=True)
class Rope:
    theta: float  # the base of the wavelengths
    scaling: LinearScaling | Llama3Scaling | None = None

    def frequencies(self, head_dim: int) -> np.ndarray:
        """[head_dim / 2] f64, radians a token."""
        frequencies = self.theta ** -(np.arange(0, head_dim, 2) / head_dim)
        return frequencies if self.scaling is None else self.scaling.apply(frequencies)

    def angles(self, head_dim: int, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """cos, sin: [n, head_dim / 2] f32 of positions [n]."""
        frequencies = jnp.asarray(self.frequencies(head_dim), jnp.float32)
        angles = positions[:, None].astype(jnp.float32) * frequencies
        return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates x: [n, heads, head_dim], pairing element i with i + head_dim / 2."""
    cos, sin = (x[:, None] for x in angles)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
