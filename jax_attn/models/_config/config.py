"""The configuration of a decoder, in one form for all families."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jax_attn.models._config.quantized_files import Quantization
from jax_attn.models._config.rope import Rope


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """The settings in which layers of one model may differ."""

    rope: Rope | None  # None: no position embedding
    window: int | None = None  # tokens visible to a token, itself included; None: all before it


@dataclasses.dataclass(frozen=True)
class Experts:
    """A mixture of experts instead of an MLP; each token goes to the `per_token` likeliest."""

    count: int
    per_token: int
    intermediate_size: int
    names: ExpertNames
    normalize: bool = True  # scale the probabilities of a token's experts to sum to 1
    dense_layers: tuple[int, ...] = ()  # layers with an MLP instead of experts
    # The files store all experts in one tensor, [experts, in, out], with gate and up interleaved.
    # Experts and router have biases. "mxfp4": two tensors, quantized values and scales.
    stacked: Literal["", "plain", "mxfp4"] = ""
    # DeepSeek: scores are sigmoids. A bias per expert affects the choice but not the weight. Only
    # experts of the best groups are chosen. Scores are scaled. All tokens also go through a shared
    # MLP of shared_size.
    sigmoid: bool = False
    groups: ExpertGroups | None = None
    scale: float = 1.0
    shared_size: int = 0


@dataclasses.dataclass(frozen=True)
class ExpertGroups:
    """`count` groups of experts; a token uses only experts of its best `chosen` groups.

    The score of a group is that of its best expert, or the sum of its best two (`by_two`).
    """

    count: int
    chosen: int
    by_two: bool


@dataclasses.dataclass(frozen=True)
class ExpertNames:
    """Tensor names in the files, after "model.layers.0."; {} is the expert."""

    router: str
    gate_up: tuple[str, ...]
    down: str


@dataclasses.dataclass(frozen=True)
class Latent:
    """Sizes of latent attention. The cache has one head of kv_rank + rope columns."""

    q_rank: int | None  # None: queries come from the hidden state directly
    kv_rank: int
    nope: int  # dimensions of a head's q and k without RoPE
    rope: int  # dimensions of a head's q and k with RoPE
    v: int
    interleaved: bool  # files pair neighbours for RoPE


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The configuration of a decoder. Hashable: a static argument of jitted functions.

    Defaults are those of Llama.
    """

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
    activation_limit: float = 0.0  # clamp limit of clamped_swiglu
    qkv_bias: bool = False
    o_bias: bool = False
    packed: bool = False  # files have q, k, v in one tensor, and gate and up in another
    # RMSNorm of q and k before RoPE, over each head or over all heads together.
    qk_norm: Literal["none", "per_head", "all_heads"] = "none"
    pre_norms: bool = True  # RMSNorm of the inputs of attention and MLP
    sinks: bool = False  # one logit per head that takes part in its softmax, without a value
    post_norms: bool = False  # RMSNorm of the outputs of attention and MLP, before the residual
    residual_scale: float = 1.0  # factor of the outputs of attention and MLP
    norm_offset: float = 0.0  # RMSNorm multiplies by norm_offset + weight
    embedding_scale: float = 1.0
    attention_soft_cap: float = 0.0  # 0: none
    logit_soft_cap: float = 0.0
    logit_scale: float = 1.0
    experts: Experts | None = None
    latent: Latent | None = None  # if set, num_kv_heads is 1 and head_dim is the cache's
    extra_layers: int = 0  # layers after the others in the files, which are not loaded
    tensor_prefix: str = ""  # prefix of the tensor names in the files
    quantization: Quantization | None = None  # of the quantized matrices in the files
    # For one device's part (tensor_parallel.py): the mesh axis over which heads, columns and
    # experts are split, and whether the vocabulary is split, too.
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
        """The distinct windows of layers, in order of appearance; attention has one spec each."""
        return tuple(dict.fromkeys(kind.window for kind in self.layers))
