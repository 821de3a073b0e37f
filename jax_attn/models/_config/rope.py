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
    """Dynamic NTK: the base grows for contexts longer than max_position_embeddings.

    Such contexts are not served, so the frequencies do not change.
    """

    factor: float

    def apply(self, frequencies: np.ndarray) -> np.ndarray:
        return frequencies


@dataclasses.dataclass(frozen=True)
class ProportionalScaling:
    """Gemma 4: frequencies are those of a whole head, but only the first `rotating` are used."""

    factor: float
    rotating: int  # frequencies, each of two dimensions; the other dimensions do not rotate

    def apply(self, frequencies: np.ndarray) -> np.ndarray:
        return np.where(np.arange(len(frequencies)) < self.rotating, frequencies / self.factor, 0)


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Scaling of the Llama 3.1 release, `apply_scaling`.

    Wavelengths much shorter than the original context are kept. Longer ones than it are stretched
    by `factor`. Those in between are blended.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def apply(self, frequencies: np.ndarray) -> np.ndarray:
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        low, high = self.low_freq_factor, self.high_freq_factor
        if low == high:
            kept = np.where(turns > low, 1, 0)
        else:
            kept = np.clip((turns - low) / (high - low), 0, 1)
        return kept * frequencies + (1 - kept) * frequencies / self.factor


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071, section 3.2).

    Dimensions with more than `beta_fast` rotations within the original context are kept. Those with
    less than `beta_slow` rotations are stretched by `factor`. A linear ramp covers the dimensions
    in between. cos and sin are multiplied by the attention factor (section 3.4).
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # round the ramp's ends to whole dimensions
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
    """LongRoPE (arXiv 2402.13753): one factor per frequency.

    The long-context factors are used if the longest sequence exceeds the original context, for
    sequences of any length, because keys in the cache must not change as a sequence grows.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: float
    amplitude: float
    is_long: bool  # whether the longest sequence exceeds the original context

    def apply(self, frequencies: np.ndarray) -> np.ndarray:
        return frequencies / np.asarray(self.long_factor if self.is_long else self.short_factor)

    def limited(self, max_positions: int) -> LongRopeScaling:
        """Returns the scaling for sequences of up to max_positions tokens."""
        is_long = max_positions > self.original_max_position_embeddings
        return dataclasses.replace(self, is_long=is_long)


Scaling: TypeAlias = (
    LinearScaling
    | DynamicScaling
    | ProportionalScaling
    | Llama3Scaling
    | YarnScaling
    | LongRopeScaling
)


@dataclasses.dataclass(frozen=True)
class Rope:
    theta: float  # the base of the wavelengths
    scaling: Scaling | None = None
    fraction: float = 1.0  # share of a head's dimensions that rotate; order: see rotary_order
    interleaved: bool = False  # files pair neighbours
    # Positions may have three parts: time, row and column of a picture's token. Frequency i is of
    # part i % 3, but from 3 * sections[part] on of time again (Qwen3-VL, arXiv 2511.21631).
    sections: tuple[int, int, int] | None = None

    def rotary_dim(self, head_dim: int) -> int:
        return int(head_dim * self.fraction)

    def frequencies(self, head_dim: int) -> np.ndarray:
        """Returns [head_dim / 2] f64, radians per token; 0 for dimensions that do not rotate."""
        rotary_dim = self.rotary_dim(head_dim)
        frequencies = self.theta ** -(np.arange(0, rotary_dim, 2) / rotary_dim)
        if self.scaling is not None:
            frequencies = self.scaling.apply(frequencies)
        return np.pad(frequencies, (0, head_dim // 2 - len(frequencies)))

    def angles(self, head_dim: int, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns cos, sin: [n, head_dim / 2] f32 of positions [n], times the amplitude.

        positions: [3, n] with `sections`; [n] there means that all three are the same.
        """
        frequencies = jnp.asarray(self.frequencies(head_dim), jnp.float32)
        if positions.ndim == 2:
            places = positions[self._parts(head_dim // 2)].T
        else:
            places = positions[:, None]
        angles = places.astype(jnp.float32) * frequencies[None]
        amplitude = getattr(self.scaling, "amplitude", 1.0)
        # Dimensions that do not rotate are not amplified.
        amplitudes = np.where(
            np.arange(head_dim // 2) < self.rotary_dim(head_dim) // 2, amplitude, 1
        ).astype(np.float32)[None]
        return jnp.cos(angles) * amplitudes, jnp.sin(angles) * amplitudes

    def _parts(self, number: int) -> np.ndarray:
        """Returns [number] i64, the part of a position that each frequency is of."""
        assert self.sections is not None
        part = np.arange(number) % 3
        return np.where(np.arange(number) < 3 * np.array(self.sections)[part], part, 0)


def rotary_order(rope: Rope, head_dim: int) -> np.ndarray:
    """Returns [head_dim] i64, the permutation of a head's dimensions from files to memory.

    Kernels rotate element i with i + head_dim / 2. Files pair i with i + rotary_dim / 2, or 2 i
    with 2 i + 1 (`interleaved`); dimensions that do not rotate come last. q and k are
    permuted alike, so their dot products do not change.
    """
    half, rotary_half = head_dim // 2, rope.rotary_dim(head_dim) // 2
    fixed = np.arange(2 * rotary_half, head_dim)
    first, second = np.split(fixed, [half - rotary_half])
    rotated = np.arange(2 * rotary_half)
    one, other = (rotated[::2], rotated[1::2]) if rope.interleaved else np.split(rotated, 2)
    return np.concatenate([one, first, other, second])


def rotate(x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates x: [n, heads, head_dim], pairing element i with i + head_dim / 2."""
    cos, sin = (x[:, None] for x in angles)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
