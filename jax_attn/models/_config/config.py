"""What a decoder computes, whatever family it belongs to."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jax_attn.models._config.quantized_files import Quantization
from jax_attn.models._config.rope import Rope


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """What layers of one model may differ in."""

    rope: Rope | None  # None: positions are not told
    window: int | None = None  # tokens that a token sees, itself included; None: all before it


@dataclasses.dataclass(frozen=True)
class Experts:
    """A mixture of experts in the place of an MLP; each token goes to the `per_token` likeliest."""

    count: int
    per_token: int
    intermediate_size: int
    names: ExpertNames
    normalize: bool = True  # probabilities of the experts that a token goes to add up to 1
    dense_layers: tuple[int, ...] = ()  # layers that have an MLP nevertheless
    # All experts are one tensor in the files, [experts, in, out], where gate and up alternate; they
    # and the router have biases. "mxfp4": two tensors, codes and scales.
    stacked: Literal["", "plain", "mxfp4"] = ""
    # DeepSeek's: scores are sigmoids, to which the choice, but not the weight, adds a bias of each
    # expert; only experts of the best groups are chosen; scores are scaled; all tokens go to an MLP
    # of shared_size besides.
    sigmoid: bool = False
    groups: ExpertGroups | None = None
    scale: float = 1.0
    shared_size: int = 0


@dataclasses.dataclass(frozen=True)
class ExpertGroups:
    """Experts fall into `count` groups; a token's are of its best `chosen` groups.

    A group is as good as its best expert, or the sum of its best two.
    """

    count: int
    chosen: int
    by_two: bool


@dataclasses.dataclass(frozen=True)
class ExpertNames:
    """Of tensors in the files, behind "model.layers.0."; {} is the expert."""

    router: str
    gate_up: tuple[str, ...]
    down: str


@dataclasses.dataclass(frozen=True)
class Latent:
    """Sizes of latent attention. The cache has one head of kv_rank + rope columns."""

    q_rank: int | None  # None: queries come from the hidden state directly
    kv_rank: int
    nope: int  # of a head's q and k, without RoPE
    rope: int  # and with
    v: int
    interleaved: bool  # files pair neighbours for RoPE


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Hashable: a static argument of jitted functions. Defaults are those of Llama."""

    family: str  # model_type of config.json
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerKind, ...]  # the kind of each layer
    rms_norm_eps: float
    tie_embeddings: bool
    max_positions: int
    bos_token: int | None
    eos_tokens: tuple[int, ...]
    sm_scale: float  # attention logits = sm_scale * (q . k)
    activation: Literal["silu", "gelu_tanh", "clamped_swiglu"] = "silu"
    activation_limit: float = 0.0  # of clamped_swiglu
    qkv_bias: bool = False
    o_bias: bool = False
    packed: bool = False  # files have q, k, v in one tensor, and gate and up in another
    # RMSNorm of q and k before RoPE: of each head, or of all heads together.
    qk_norm: Literal["none", "per_head", "all_heads"] = "none"
    pre_norms: bool = True  # RMSNorm of what goes into attention and MLP
    sinks: bool = False  # a logit of each head that takes part in its softmax, without a value
    post_norms: bool = False  # RMSNorm of what attention and MLP add to the residual
    residual_scale: float = 1.0  # of what attention and MLP add
    norm_offset: float = 0.0  # RMSNorm multiplies by norm_offset + weight
    embedding_scale: float = 1.0
    attention_soft_cap: float = 0.0  # 0: none
    logit_soft_cap: float = 0.0
    logit_scale: float = 1.0
    experts: Experts | None = None
    latent: Latent | None = None  # num_kv_heads is 1 and head_dim that of the cache then
    extra_layers: int = 0  # of the files, behind the others, that are not for here
    tensor_prefix: str = ""  # of the names in the files
    quantization: Quantization | None = None  # of the matrices in the files that are so
    # Of one device's part (tensor_parallel.py): the mesh axis that heads, columns and experts are
    # split over, and whether the vocabulary is, too.
    heads_axis: str | None = None
    splits_vocabulary: bool = False

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The distinct kinds of layers, in order of appearance."""
        return tuple(dict.fromkeys(self.layers))

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The distinct windows of layers, in order of appearance; attention has a spec for each."""
        return tuple(dict.fromkeys(kind.window for kind in self.layers))
