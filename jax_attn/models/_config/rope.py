"""Rotary position embeddings: frequencies, their scalings, and the rotation."""

from __future__ import annotations

import dataclasses
import math
from typing import TypeAlias

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
class DynamicScaling:
    """Dynamic NTK: the base grows with contexts beyond max_position_embeddings.

    Those are not served, so frequencies stay what they are.
    """

    factor: float

    def apply(self, frequencies: np.ndarray) -> np.ndarray:
        return frequencies


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
class YarnScaling:
    """YaRN (arXiv 2309.00071, section 3.2).

    Dimensions that turn more than `beta_fast` times within the original context are kept, those
    that turn less than `beta_slow` times are stretched by `factor`, with a linear ramp over the
    dimensions between. cos and sin are multiplied by the attention factor (section 3.4).
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # the ramp's borders to whole dimensions
    attention_factor: float | None = None  # None: from factor, mscale and mscale_all_dim
    mscale: float | None = None
    mscale_all_dim: float | None = None

    def apply(self, frequencies: np.ndarray) -> np.ndarray:
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        step = math.log(turns[0] / turns[1])  # frequencies are a geometric series
        low, high = (math.log(turns[0] / beta) / step for beta in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * len(frequencies) - 1)
        if low == high:
            high += 0.001
        stretched = np.clip((np.arange(len(frequencies)) - low) / (high - low), 0, 1)
        return stretched * frequencies / self.factor + (1 - stretched) * frequencies

    @property
    def amplitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self.mscale_of(self.mscale) / self.mscale_of(self.mscale_all_dim)
        return self.mscale_of(1.0)

    def mscale_of(self, mscale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0


@dataclasses.dataclass(frozen=True)
class LongRopeScaling:
    """LongRoPE (arXiv 2402.13753): a factor for each frequency.

    The factors are those for long contexts if the model serves any that is longer than the
    original one, whatever the length of a sequence: keys in the cache never change.
    """

    factors: tuple[float, ...]
    amplitude: float

    def apply(self, frequencies: np.ndarray) -> np.ndarray:
        return frequencies / np.asarray(self.factors)


Scaling: TypeAlias = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongRopeScaling


@dataclasses.dataclass(frozen=True)
class Rope:
    theta: float  # the base of the wavelengths
    scaling: Scaling | None = None
    fraction: float = 1.0  # of a head's dimensions, which rotate; see rotary_order for their place

    def rotary_dim(self, head_dim: int) -> int:
        return int(head_dim * self.fraction)

    def frequencies(self, head_dim: int) -> np.ndarray:
        """[head_dim / 2] f64, radians a token; 0 for what does not rotate."""
        rotary_dim = self.rotary_dim(head_dim)
        frequencies = self.theta ** -(np.arange(0, rotary_dim, 2) / rotary_dim)
        if self.scaling is not None:
            frequencies = self.scaling.apply(frequencies)
        return np.pad(frequencies, (0, head_dim // 2 - len(frequencies)))

    def angles(self, head_dim: int, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """cos, sin: [n, head_dim / 2] f32 of positions [n], times the scaling's amplitude."""
        frequencies = jnp.asarray(self.frequencies(head_dim), jnp.float32)
        angles = positions[:, None].astype(jnp.float32) * frequencies
        amplitude = getattr(self.scaling, "amplitude", 1.0)
        # What does not rotate is not amplified either.
        amplitudes = np.where(
            np.arange(head_dim // 2) < self.rotary_dim(head_dim) // 2, amplitude, 1
        )
        return jnp.cos(angles) * amplitudes, jnp.sin(angles) * amplitudes


def rotary_order(rope: Rope, head_dim: int) -> np.ndarray:
    """[head_dim] i64: from the dimensions of a head in the files to those in memory.

    Kernels rotate element i with i + head_dim / 2. Where a part of a head rotates, files pair i
    with i + rotary_dim / 2, and what does not rotate comes last. q and k are permuted alike, which
    leaves their products as they are.
    """
    half, rotary_half = head_dim // 2, rope.rotary_dim(head_dim) // 2
    fixed = np.arange(2 * rotary_half, head_dim)
    first, second = np.split(fixed, [half - rotary_half])
    return np.concatenate(
        [np.arange(rotary_half), first, np.arange(rotary_half, 2 * rotary_half), second]
    )


def rotate(x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates x: [n, heads, head_dim], pairing element i with i + head_dim / 2."""
    cos, sin = (x[:, None] for x in angles)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
