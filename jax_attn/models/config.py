"""What a decoder computes, whatever family it belongs to."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jax_attn.models.rope import Rope


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """What layers of one model may differ in."""

    rope: Rope
    window: int | None = None  # tokens that a token sees, itself included; None: all before it


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
    activation: Literal["silu", "gelu_tanh"] = "silu"
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False  # RMSNorm of each head's q and k, before RoPE
    post_norms: bool = False  # RMSNorm of what attention and MLP add to the residual, too
    norm_offset: float = 0.0  # RMSNorm multiplies by norm_offset + weight
    embedding_scale: float = 1.0
    attention_soft_cap: float = 0.0  # 0: none
    logit_soft_cap: float = 0.0
    tensor_prefix: str = ""  # of the names in the files

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The distinct kinds of layers, in order of appearance; attention has a spec for each."""
        return tuple(dict.fromkeys(self.layers))
