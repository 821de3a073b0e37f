"""Encoders: BERT and RoBERTa, over ragged batches without padding.

Sources: BERT (Devlin et al., arXiv 1810.04805), RoBERTa (arXiv 1907.11692).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_attn as ja
from jax_attn.models._config.activations import dense
from jax_attn.models._config.keys import Keys, refuse_changes_of_any_family
from jax_attn.models._weights.float_weights import Weight, WeightTree, table
from jax_attn.models._weights.tensors import Shape
from jax_attn.models._weights.weights import Params


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
    """The configuration of an encoder. Hashable: a static argument of jitted functions."""

    family: str  # model_type of config.json
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_layers: int
    num_positions: int  # rows of the position table
    num_types: int  # segment types; tokens have the first, those of a pair's second text the second
    norm_eps: float
    activation: str  # one of _ACTIVATION_NAMES
    # RoBERTa: positions start at this token's id + 1, and the token has no position. None: at 0.
    pad_token: int | None
    tensor_prefix: str  # name prefix in files of models with a head
    quantization: None = None

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def max_positions(self) -> int:
        """Tokens of the longest sequence."""
        return self.num_positions - (0 if self.pad_token is None else self.pad_token + 1)

    def positions(self, tokens: np.ndarray) -> np.ndarray:
        """Returns the rows [n] i32 of the position table for the tokens of one sequence."""
        if self.pad_token is None:
            return np.arange(len(tokens), dtype=np.int32)
        is_token = tokens != self.pad_token
        return (np.cumsum(is_token) * is_token + self.pad_token).astype(np.int32)


# ---- families ----------------------------------------------------------------------------------


_ACTIVATION_NAMES = "gelu", "gelu_new", "gelu_pytorch_tanh", "relu"


def _bert(keys: Keys) -> EncoderConfig:
    return _encoder(keys, "bert.", None)


def _roberta(keys: Keys) -> EncoderConfig:
    pad_token = keys.get("pad_token_id", 1)
    if type(pad_token) is not int or pad_token < 0:
        raise keys.error(f"pad_token_id: expected an integer >= 0, got {pad_token!r}")
    return _encoder(keys, "roberta.", pad_token)


FAMILIES: dict[str, Callable[[Keys], EncoderConfig]] = {
    "bert": _bert,
    "roberta": _roberta,
    "xlm-roberta": _roberta,
}


def _encoder(keys: Keys, tensor_prefix: str, pad_token: int | None) -> EncoderConfig:
    refuse_changes_of_any_family(keys, keys.need("model_type"))
    keys.expect("position_embedding_type", "absolute", None)
    for key in ("is_decoder", "add_cross_attention"):
        keys.expect(key, False)
    for key in ("quantization_config", "compression_config"):
        keys.expect(key, None)
    keys.expect("hidden_act", *_ACTIVATION_NAMES)
    hidden_size, num_heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    keys.head_dim(hidden_size, num_heads)
    config = EncoderConfig(
        family=keys.need("model_type"),
        vocab_size=keys.size("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=keys.size("intermediate_size"),
        num_heads=num_heads,
        num_layers=keys.size("num_hidden_layers"),
        num_positions=keys.size("max_position_embeddings"),
        num_types=keys.size("type_vocab_size", 2),
        norm_eps=keys.number("layer_norm_eps", 1e-12),
        activation=keys.get("hidden_act", "gelu"),
        pad_token=pad_token,
        tensor_prefix=tensor_prefix,
    )
    if config.max_positions < 1:
        raise keys.error(
            f"max_position_embeddings: expected more than pad_token_id + 1, got "
            f"{config.num_positions}"
        )
    return config


# ---- weights -----------------------------------------------------------------------------------


def tensors(config: EncoderConfig) -> WeightTree:
    """Returns the tensors of the weights.

    embed, positions, types [n, hidden]; norm, norm_bias [hidden]. A layer: as a decoder's,
    with up instead of gate_up, and a bias for each weight.
    """
    d, ff = config.hidden_size, config.intermediate_size
    linear: dict[str, tuple[tuple[str, ...], Shape]] = {
        "qkv": (tuple(f"attention.self.{x}" for x in ("query", "key", "value")), (d, d)),
        "o": (("attention.output.dense",), (d, d)),
        "up": (("intermediate.dense",), (ff, d)),
        "down": (("output.dense",), (d, ff)),
        "attention_norm": (("attention.output.LayerNorm",), (d,)),
        "mlp_norm": (("output.LayerNorm",), (d,)),
    }

    def layer(i: int) -> dict[str, Weight]:
        weights: dict[str, Weight] = {}
        for weight, (names, shape) in linear.items():
            stems = [f"encoder.layer.{i}.{name}" for name in names]
            weights[weight] = Weight({f"{stem}.weight": shape for stem in stems})
            weights[f"{weight}_bias"] = Weight({f"{stem}.bias": shape[:1] for stem in stems})
        return weights

    return {
        "embed": table("embeddings.word_embeddings.weight", config.vocab_size, d),
        "positions": table("embeddings.position_embeddings.weight", config.num_positions, d),
        "types": table("embeddings.token_type_embeddings.weight", config.num_types, d),
        "norm": table("embeddings.LayerNorm.weight", d),
        "norm_bias": table("embeddings.LayerNorm.bias", d),
        "layers": [layer(i) for i in range(config.num_layers)],
    }


def is_other(name: str) -> bool:
    """Whether a tensor is for other tasks, or the position ids of old files."""
    return name.startswith(("pooler.", "cls.", "lm_head.")) or name.endswith("position_ids")


# ---- the forward pass --------------------------------------------------------------------------


def attention_spec(config: EncoderConfig, **kwargs: Any) -> ja.AttentionSpec:
    """Returns the spec of all layers; `kwargs` are further fields of AttentionSpec."""
    return ja.AttentionSpec(
        num_qo_heads=config.num_heads,
        num_kv_heads=config.num_heads,
        head_dim_qk=config.head_dim,
        causal=False,
        **kwargs,
    )


def embed(
    tokens: jax.Array,
    positions: jax.Array,
    types: jax.Array,
    params: Params,
    config: EncoderConfig,
) -> jax.Array:
    """Returns the first layer's input [n, hidden] for tokens, positions and types, [n] i32."""
    x = params["embed"][tokens] + params["types"][types] + params["positions"][positions]
    return _layer_norm(x, params, "norm", config)


def project(
    x: jax.Array, weights: Params, config: EncoderConfig
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns q, k, v: [n, num_heads, head_dim] from x [n, hidden] and the weights of a layer."""
    qkv = dense(x, weights["qkv"], weights["qkv_bias"])
    q, k, v = jnp.split(qkv.reshape(len(x), -1, config.head_dim), 3, axis=1)
    return q, k, v


def layer(x: jax.Array, o: jax.Array, weights: Params, config: EncoderConfig) -> jax.Array:
    """Finishes a layer: x [n, hidden] and attention's o [n, num_heads, head_dim] -> x."""
    h = dense(o.reshape(len(x), -1), weights["o"], weights["o_bias"])
    x = _layer_norm(x + h, weights, "attention_norm", config)
    h = dense(x, weights["up"], weights["up_bias"], config.activation)
    h = dense(h, weights["down"], weights["down_bias"])
    return _layer_norm(x + h, weights, "mlp_norm", config)


def _layer_norm(x: jax.Array, weights: Params, name: str, config: EncoderConfig) -> jax.Array:
    x32 = x.astype(jnp.float32)
    x32 -= jnp.mean(x32, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
    normal = x32 * jax.lax.rsqrt(variance + config.norm_eps)
    scale, bias = (weights[key].astype(jnp.float32) for key in (name, f"{name}_bias"))
    return (normal * scale + bias).astype(x.dtype)
