"""The tensors of a layer's part that has a state: names in the files, and torch's shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from jax_attn.models._config.recurrent import (
    GatedDelta,
    KimiDelta,
    Lightning,
    Mamba2,
    Recurrent,
    ShortConvolution,
)

_Tensors: TypeAlias = dict[str, Any]
"""As tensors.layer_tensors returns: for each weight its parts in the files."""


def of(sizes: Recurrent, d: int) -> _Tensors:
    """d: hidden_size."""
    return _TENSORS[type(sizes)](sizes, d)


def _convolution(sizes: ShortConvolution, d: int) -> _Tensors:
    n = sizes.num_channels
    tensors: _Tensors = {
        "bcx": {"conv.in_proj.weight": (3 * n, d)},
        "conv": {"conv.conv.weight": (n, 1, sizes.conv_width)},
        "mixed_o": {"conv.out_proj.weight": (d, n)},
    }
    if sizes.bias:
        tensors["bcx_bias"] = {"conv.in_proj.bias": (3 * n,)}
        tensors["conv_bias"] = {"conv.conv.bias": (n,)}
        tensors["mixed_o_bias"] = {"conv.out_proj.bias": (d,)}
    return tensors


def _gated_delta(sizes: GatedDelta, d: int) -> _Tensors:
    q, z, heads = (
        sizes.num_k_heads * sizes.dim_k,
        sizes.num_v_heads * sizes.dim_v,
        sizes.num_v_heads,
    )
    of_layout: dict[str, tuple[dict[str, int], dict[str, int]]] = {
        "qkvz": ({"in_proj_qkvz": 2 * q + 2 * z}, {"in_proj_ba": 2 * heads}),
        "qkv_z": (
            {"in_proj_qkv": 2 * q + z, "in_proj_z": z},
            {"in_proj_b": heads, "in_proj_a": heads},
        ),
        "apart": (
            {"q_proj": q, "k_proj": q, "v_proj": z, "g_proj": z},
            {"b_proj": heads, "a_proj": heads},
        ),
    }
    is_apart = sizes.layout == "apart"
    convs = {"q_conv1d": q, "k_conv1d": q, "v_conv1d": z} if is_apart else {"conv1d": 2 * q + z}
    norm, out = ("o_norm", "o_proj") if is_apart else ("norm", "out_proj")

    def beside(parts: dict[str, int]) -> dict[str, tuple[int, ...]]:
        return {f"linear_attn.{name}.weight": (n, d) for name, n in parts.items()}

    qkvz, ba = of_layout[sizes.layout]
    return {
        "qkvz": beside(qkvz),
        "ba": beside(ba),
        "conv": {
            f"linear_attn.{name}.weight": (n, 1, sizes.conv_width) for name, n in convs.items()
        },
        "dt_bias": {"linear_attn.dt_bias": (heads,)},
        "a_log": {"linear_attn.A_log": (heads,)},
        "gated_norm": {f"linear_attn.{norm}.weight": (sizes.dim_v,)},
        "mixed_o": {f"linear_attn.{out}.weight": (d, z)},
    }


def _kimi_delta(sizes: KimiDelta, d: int) -> _Tensors:
    dim, n = sizes.dim, sizes.num_heads * sizes.dim

    def matrix(name: str, out: int, depth: int) -> dict[str, tuple[int, int]]:
        return {f"self_attn.{name}_proj.weight": (out, depth)}

    return {
        "kda_qkv": matrix("q", n, d) | matrix("k", n, d) | matrix("v", n, d),
        "conv": {f"self_attn.{x}_conv1d.weight": (n, 1, sizes.conv_width) for x in "qkv"},
        # Decay and gate come from `dim` numbers each, through a second matrix.
        "fgb": matrix("f_a", dim, d) | matrix("g_a", dim, d) | matrix("b", sizes.num_heads, d),
        "f_b": matrix("f_b", n, dim),
        "g_b": matrix("g_b", n, dim),
        "dt_bias": {"self_attn.dt_bias": (n,)},
        "a_log": {"self_attn.A_log": (1, 1, sizes.num_heads, 1)},
        "gated_norm": {"self_attn.o_norm.weight": (dim,)},
        "mixed_o": matrix("o", d, n),
    }


def _mamba2(sizes: Mamba2, d: int) -> _Tensors:
    inner, channels, heads = sizes.inner_size, sizes.num_channels, sizes.num_heads
    tensors: _Tensors = {
        "zxbcdt": {"mamba.in_proj.weight": (inner + channels + heads, d)},
        "conv": {"mamba.conv1d.weight": (channels, 1, sizes.conv_width)},
        "dt_bias": {"mamba.dt_bias": (heads,)},
        "a_log": {"mamba.A_log": (heads,)},
        "skip": {"mamba.D": (heads,)},
        "mixed_o": {"mamba.out_proj.weight": (d, inner)},
    }
    if sizes.conv_bias:
        tensors["conv_bias"] = {"mamba.conv1d.bias": (channels,)}
    if sizes.in_bias:
        tensors["zxbcdt_bias"] = {"mamba.in_proj.bias": (inner + channels + heads,)}
    if sizes.out_bias:
        tensors["mixed_o_bias"] = {"mamba.out_proj.bias": (d,)}
    if sizes.norm != "none":
        tensors["gated_norm"] = {"mamba.norm.weight": (inner,)}
    return tensors


def _lightning(sizes: Lightning, d: int) -> _Tensors:
    n = sizes.num_heads * sizes.dim
    return {
        "lightning_qkv": {"self_attn.qkv_proj.weight": (3 * n, d)},
        "output_gate": {"self_attn.output_gate.weight": (n, d)},
        "lightning_norm": {"self_attn.norm.weight": (n,)},
        "mixed_o": {"self_attn.out_proj.weight": (d, n)},
    }


_TENSORS: dict[type[Recurrent], Callable[[Any, int], _Tensors]] = {
    GatedDelta: _gated_delta,
    KimiDelta: _kimi_delta,
    Mamba2: _mamba2,
    Lightning: _lightning,
    ShortConvolution: _convolution,
}
