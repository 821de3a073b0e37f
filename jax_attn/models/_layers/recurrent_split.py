"""Tensor parallelism of recurrent layers: each device has a part of the v heads, the q and k heads
that these use, and the channels of the convolution with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jax_attn.models._config.recurrent import (
    GatedDelta,
    KimiDelta,
    Lightning,
    Mamba2,
    NormedTogether,
    Recurrent,
    ShortConvolution,
)


class _Heads(NamedTuple):
    """Part of a weight's axis: heads of `width` elements. Heads fewer than devices are repeated."""

    num: int
    width: int

    def of_device(self, device: int, num_devices: int) -> np.ndarray:
        first, own = device * self.num // num_devices, part(self.num, num_devices)
        return np.arange(first * self.width, (first + own) * self.width)


def part(count: int, num_devices: int) -> int:
    """The heads of one device."""
    return max(1, count // num_devices)


def counts(sizes: Recurrent) -> tuple[dict[str, int], dict[str, int]]:
    """By name: what the devices must divide, and what they may also be a multiple of."""
    match sizes:
        case GatedDelta():
            return {"v heads": sizes.num_v_heads}, {"k heads": sizes.num_k_heads}
        case Mamba2():
            return {"heads": sizes.num_heads}, {"groups of B and C": sizes.num_groups}
        case ShortConvolution():
            return {"channels of convolutions": sizes.num_channels}, {}
    return {"heads": sizes.num_heads}, {}


def of_device(sizes: Recurrent, axis_name: str, num_devices: int) -> Recurrent:
    """The sizes of one device's part."""
    if num_devices == 1:
        return sizes
    match sizes:
        case GatedDelta():
            k, v = (part(n, num_devices) for n in (sizes.num_k_heads, sizes.num_v_heads))
            return dataclasses.replace(sizes, num_k_heads=k, num_v_heads=v)
        case Mamba2():
            heads, groups = (part(n, num_devices) for n in (sizes.num_heads, sizes.num_groups))
            own = dataclasses.replace(sizes, num_heads=heads, num_groups=groups)
            if sizes.num_groups < num_devices:
                together = NormedTogether(axis_name, num_devices // sizes.num_groups)
                own = dataclasses.replace(own, normed_together=together)
            return own
        case ShortConvolution():
            return dataclasses.replace(sizes, num_channels=part(sizes.num_channels, num_devices))
        case Lightning():
            own_heads = part(sizes.num_heads, num_devices)
            together = NormedTogether(axis_name, num_devices)
            return dataclasses.replace(sizes, num_heads=own_heads, normed_together=together)
    return dataclasses.replace(sizes, num_heads=part(sizes.num_heads, num_devices))


def split_of(
    name: str, ndim: int, sizes: Recurrent, num_devices: int
) -> tuple[int, np.ndarray] | None:
    """The split axis of a weight, and its elements there, device after device; None: as is."""
    parts = _parts(sizes).get(name)
    if parts is None:
        return None
    axis = ndim - 1 if name in _BY_COLUMNS else ndim - 2 if ndim == 4 else 0
    order = [_side_by_side(parts, d, num_devices) for d in range(num_devices)]
    return axis, np.concatenate(order)


def _side_by_side(parts: Sequence[_Heads], device: int, num_devices: int) -> np.ndarray:
    columns, begin = [], 0
    for heads in parts:
        columns.append(begin + heads.of_device(device, num_devices))
        begin += heads.num * heads.width
    return np.concatenate(columns)


# Matrices [in, out] of a layer's inputs.
_BY_COLUMNS = (
    "qkvz", "ba", "kda_qkv", "fgb", "f_b", "g_b", "zxbcdt", "lightning_qkv", "output_gate", "bcx",
)  # fmt: skip


def _parts(sizes: Recurrent) -> dict[str, list[_Heads]]:
    """For each weight that is split: its split axis, as heads side by side."""
    match sizes:
        case GatedDelta():
            k, v = _Heads(sizes.num_k_heads, sizes.dim_k), _Heads(sizes.num_v_heads, sizes.dim_v)
            each = _Heads(sizes.num_v_heads, 1)
            return {
                "qkvz": [k, k, v, v],
                "ba": [each, each],
                "conv": [k, k, v],
                "dt_bias": [each],
                "a_log": [each],
                "mixed_o": [v],
            }
        case KimiDelta():
            n, each = _Heads(sizes.num_heads, sizes.dim), _Heads(sizes.num_heads, 1)
            whole = _Heads(1, sizes.dim)
            return {
                "kda_qkv": [n, n, n],
                "conv": [n, n, n],
                "fgb": [whole, whole, each],
                "f_b": [n],
                "g_b": [n],
                "dt_bias": [n],
                "a_log": [each],
                "mixed_o": [n],
            }
        case Mamba2():
            v, each = _Heads(sizes.num_heads, sizes.head_dim), _Heads(sizes.num_heads, 1)
            of_group = _Heads(sizes.num_groups, sizes.state_dim)
            projected, convolved = [v, v, of_group, of_group, each], [v, of_group, of_group]
            return {
                "zxbcdt": projected,
                "zxbcdt_bias": projected,
                "conv": convolved,
                "conv_bias": convolved,
                "dt_bias": [each],
                "a_log": [each],
                "skip": [each],
                "gated_norm": [v],
                "mixed_o": [v],
            }
        case Lightning():
            n = _Heads(sizes.num_heads, sizes.dim)
            return {
                "lightning_qkv": [_Heads(sizes.num_heads, 3 * sizes.dim)],
                "output_gate": [n],
                "lightning_norm": [n],
                "mixed_o": [n],
            }
        case ShortConvolution():
            c = _Heads(sizes.num_channels, 1)
            return {
                "bcx": [c, c, c],
                "bcx_bias": [c, c, c],
                "conv": [c],
                "conv_bias": [c],
                "mixed_o": [c],
            }
