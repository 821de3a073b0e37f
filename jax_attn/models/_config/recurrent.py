"""Sizes of layers that have a state of fixed size, beside attention or in its place."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, TypeAlias


@dataclasses.dataclass(frozen=True)
class Rule:
    """How a recurrent state changes: fields of jax_attn.LinearAttentionSpec, by their names."""

    num_qk_heads: int
    num_v_heads: int
    head_dim_k: int
    head_dim_v: int
    decay: Literal["head", "channel"] = "head"
    delta_rule: bool = True
    l2_norm: bool = True
    scale: float | None = None

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return self.num_v_heads, self.head_dim_k, self.head_dim_v


@dataclasses.dataclass(frozen=True)
class NormedTogether:
    """Devices of a mesh axis, `count` neighbours each, whose outputs one norm is over."""

    axis_name: str
    count: int


@dataclasses.dataclass(frozen=True)
class GatedDelta:
    """A layer with the gated delta rule (arXiv 2412.06464).

    A causal convolution of each channel of q, k and v is in front of it. q and k heads may be fewer
    than v heads, and each then serves consecutive ones.
    """

    num_k_heads: int  # of q, too
    num_v_heads: int
    dim_k: int
    dim_v: int
    conv_width: int
    # The tensors of q, k, v and the gate in the files: "qkvz": one, k head by k head; "qkv_z": two;
    # "apart": four, and the convolution has three.
    layout: Literal["qkvz", "qkv_z", "apart"]
    beta_scale: float = 1.0  # factor of the strength's sigmoid; 2: eigenvalues from -1 to 1
    norm_eps: float | None = None  # of the norm behind the rule; None: rms_norm_eps

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: those of q, k and v."""
        return 2 * self.num_k_heads * self.dim_k + self.num_v_heads * self.dim_v

    @property
    def conv_shape(self) -> tuple[int, int]:
        """The shape of the convolution's state: its last inputs."""
        return self.conv_width - 1, self.num_channels

    @property
    def rule(self) -> Rule:
        return Rule(self.num_k_heads, self.num_v_heads, self.dim_k, self.dim_v)


@dataclasses.dataclass(frozen=True)
class ShortConvolution:
    """A layer with a gated causal convolution of each channel, as LFM2 has it."""

    num_channels: int
    conv_width: int
    bias: bool  # of the convolution and of the projections around it
    rule = None  # the convolution is all

    @property
    def conv_shape(self) -> tuple[int, int]:
        """The shape of its state: the last inputs."""
        return self.conv_width - 1, self.num_channels


@dataclasses.dataclass(frozen=True)
class KimiDelta:
    """A layer with Kimi delta attention (KDA, arXiv 2510.26692): a decay for each channel of k."""

    num_heads: int
    dim: int  # of q, k and v
    conv_width: int  # of the convolution of each channel of q, k and v

    @property
    def conv_shape(self) -> tuple[int, int]:
        """The shape of the convolution's state: its last inputs."""
        return self.conv_width - 1, 3 * self.num_heads * self.dim

    @property
    def rule(self) -> Rule:
        return Rule(self.num_heads, self.num_heads, self.dim, self.dim, decay="channel")


@dataclasses.dataclass(frozen=True)
class Mamba2:
    """A layer of Mamba-2 (arXiv 2405.21060): q is its C, k its B, and v its x.

    The input projection makes z (the gate), x, B, C and dt (a number a head), in this order. A
    causal convolution of each channel of x, B and C follows.
    """

    num_heads: int
    head_dim: int
    num_groups: int  # of B and C; each serves consecutive heads
    state_dim: int
    conv_width: int
    conv_bias: bool = True
    in_bias: bool = False
    out_bias: bool = False
    # RMSNorm of each group of the outputs, which a gate multiplies before or after it.
    norm: Literal["none", "gate_first", "gate_last"] = "gate_first"
    dt_range: tuple[float, float] = (0.0, math.inf)  # to which dt is clipped
    in_scale: float = 1.0  # factors of the input, of the projected parts, and of the output
    part_scales: tuple[float, ...] = (1.0,) * 5
    out_scale: float = 1.0
    normed_together: NormedTogether | None = None  # devices that have parts of one group

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: those of x, B and C."""
        return self.inner_size + 2 * self.num_groups * self.state_dim

    @property
    def conv_shape(self) -> tuple[int, int]:
        """The shape of the convolution's state: its last inputs."""
        return self.conv_width - 1, self.num_channels

    @property
    def rule(self) -> Rule:
        return Rule(
            self.num_groups,
            self.num_heads,
            self.state_dim,
            self.head_dim,
            delta_rule=False,
            l2_norm=False,
            scale=1.0,
        )


@dataclasses.dataclass(frozen=True)
class Lightning:
    """A layer with lightning attention (arXiv 2401.04658): the decay is a constant of the head."""

    num_heads: int
    dim: int
    slope: float  # factor of the heads' constants; layers of a model differ in it
    normed_together: NormedTogether | None = None  # devices that have a part of the heads
    conv_shape = None  # there is no convolution

    @property
    def rule(self) -> Rule:
        h, d = self.num_heads, self.dim
        return Rule(h, h, d, d, delta_rule=False, l2_norm=False, scale=1.0)


Recurrent: TypeAlias = GatedDelta | KimiDelta | Mamba2 | Lightning | ShortConvolution
