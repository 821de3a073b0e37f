"""The part of a layer that has a state: which module computes it, and its output projection."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from jax_attn import parallel
from jax_attn.models._config.config import ModelConfig
from jax_attn.models._config.recurrent import (
    GatedDelta,
    KimiDelta,
    Lightning,
    Mamba2,
    Recurrent,
    ShortConvolution,
)
from jax_attn.models._layers import gated_delta, kimi_delta, lightning, mamba2, short_convolution
from jax_attn.models._layers.recurrence import Recurrence
from jax_attn.models._products.quantized import product
from jax_attn.models._weights.weights import Params

Mix = Callable[[jax.Array, Params], jax.Array]
"""(h [n, hidden], weights of the layer) -> [n, hidden]. h: after the layer's norm."""

_MODULES: dict[type[Recurrent], Any] = {
    GatedDelta: gated_delta,
    KimiDelta: kimi_delta,
    Mamba2: mamba2,
    Lightning: lightning,
}


def of(sizes: Recurrent, config: ModelConfig, recurrence: Recurrence) -> Mix:
    if isinstance(sizes, ShortConvolution):
        mix: Mix = partial(short_convolution.mix, recurrence=recurrence)
    else:
        mix = partial(
            _MODULES[type(sizes)].mix, sizes=sizes, eps=config.rms_norm_eps, recurrence=recurrence
        )

    def projected(h: jax.Array, weights: Params) -> jax.Array:
        o = product(mix(h, weights).reshape(len(h), -1), weights["mixed_o"])
        if config.heads_axis is not None:
            o = parallel.all_reduce(o, config.heads_axis, mesh=config.heads_mesh)
        if "mixed_o_bias" in weights:
            o += weights["mixed_o_bias"][None]
        if isinstance(sizes, Mamba2) and sizes.out_scale != 1:
            o *= sizes.out_scale
        return o

    return projected
