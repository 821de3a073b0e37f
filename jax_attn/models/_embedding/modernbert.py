"""ModernBERT: an encoder with rotary positions, layers of a window, and gated MLPs.

Source: Warner et al., arXiv 2412.13663.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jax_attn as ja
from jax_attn.models._config.activations import ACTIVATIONS, activation_name
from jax_attn.models._config.keys import Keys, refuse_changes_of_any_family
from jax_attn.models._products.quantized import product
from jax_attn.models._weights.float_weights import Weight, WeightTree, table
from jax_attn.models._weights.tensors import Shape
from jax_attn.models._weights.weights import Params

_FULL, _SLIDING = "full_attention", "sliding_attention"


class Layer(NamedTuple):
    """What differs between layers. Hashable."""

    window: int | None  # a token sees so many tokens on each side; None: all
    theta: float  # base of the rotary frequencies
    has_norm: bool  # whether attention's input is normalized: not in the first layer


@dataclasses.dataclass(frozen=True)
class ModernBertConfig:
    """The configuration of a ModernBERT. Hashable: a static argument of jitted functions."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    layers: tuple[Layer, ...]
    max_positions: int  # tokens of the longest sequence
    norm_eps: float
    activation: str  # of the MLPs; one of ACTIVATIONS
    classifier_activation: str
    classifier_mean: bool  # whether a head reads the mean of the rows, instead of the first
    tensor_prefix: str = "model."
    quantization: None = None
    num_types: int = 1

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The distinct windows, in the order of their layers."""
        return tuple(dict.fromkeys(layer.window for layer in self.layers))


def parse(keys: Keys) -> ModernBertConfig:
    """Returns the config from the keys of config.json. Raises ModelDirectoryError."""
    refuse_changes_of_any_family(keys, keys.need("model_type"))
    for key in ("attention_bias", "mlp_bias", "norm_bias", "classifier_bias", "is_decoder"):
        keys.expect(key, False)
    for key in ("quantization_config", "compression_config", "rope_scaling"):
        keys.expect(key, None)
    keys.expect("classifier_pooling", "cls", "mean")
    hidden_size, num_heads = keys.size("hidden_size", 768), keys.size("num_attention_heads", 12)
    keys.head_dim(hidden_size, num_heads, 2)
    return ModernBertConfig(
        family=keys.need("model_type"),
        vocab_size=keys.size("vocab_size", 50368),
        hidden_size=hidden_size,
        intermediate_size=keys.size("intermediate_size", 1152),
        num_heads=num_heads,
        layers=_layers(keys),
        max_positions=keys.size("max_position_embeddings", 8192),
        norm_eps=keys.number("norm_eps", 1e-5),
        activation=activation_name(keys, "hidden_activation", "gelu"),
        classifier_activation=activation_name(keys, "classifier_activation", "gelu"),
        classifier_mean=keys.get("classifier_pooling", "cls") == "mean",
    )


def _layers(keys: Keys) -> tuple[Layer, ...]:
    number, every = keys.size("num_hidden_layers", 22), keys.size("global_attn_every_n_layers", 3)
    kinds = keys.items("layer_types")
    if kinds is None:
        kinds = [_SLIDING if i % every else _FULL for i in range(number)]
    if len(kinds) != number or not set(kinds) <= {_FULL, _SLIDING}:
        raise keys.error(
            f"layer_types: expected {number} of {_FULL!r} and {_SLIDING!r}, got {kinds!r}"
        )
    windows = {_FULL: None, _SLIDING: keys.size("local_attention", 128) // 2}
    if windows[_SLIDING] == 0:
        raise keys.error("local_attention: expected at least 2, got 1")
    thetas = {
        _FULL: _theta(keys, _FULL, "global_rope_theta", 160_000.0),
        _SLIDING: _theta(keys, _SLIDING, "local_rope_theta", 10_000.0),
    }
    return tuple(Layer(windows[kind], thetas[kind], i > 0) for i, kind in enumerate(kinds))


def _theta(keys: Keys, kind: str, old_key: str, default: float) -> float:
    by_kind = keys.inner("rope_parameters")
    rope = None if by_kind is None else by_kind.inner(kind)
    if rope is not None:
        rope.expect("rope_type", "default")
        rope.expect("partial_rotary_factor", 1.0, None)
        if "rope_theta" in rope.raw:
            return float(rope.number("rope_theta"))
    return float(keys.number(old_key, default))


# ---- weights -----------------------------------------------------------------------------------


def tensors(config: ModernBertConfig) -> WeightTree:
    """Returns the tensors of the weights.

    embed [vocab, hidden]; norm, final_norm [hidden]. A layer: as an encoder's, with gate_up
    instead of up, and without biases.
    """
    d, ff = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[str, Shape]] = {
        "qkv": ("attn.Wqkv.weight", (3 * d, d)),
        "o": ("attn.Wo.weight", (d, d)),
        "mlp_norm": ("mlp_norm.weight", (d,)),
        "gate_up": ("mlp.Wi.weight", (2 * ff, d)),
        "down": ("mlp.Wo.weight", (d, ff)),
        "attention_norm": ("attn_norm.weight", (d,)),
    }

    def layer(i: int, kind: Layer) -> dict[str, Weight]:
        return {
            weight: Weight({f"layers.{i}.{name}": shape})
            for weight, (name, shape) in shapes.items()
            if kind.has_norm or weight != "attention_norm"
        }

    return {
        "embed": table("embeddings.tok_embeddings.weight", config.vocab_size, d),
        "norm": table("embeddings.norm.weight", d),
        "final_norm": table("final_norm.weight", d),
        "layers": [layer(i, kind) for i, kind in enumerate(config.layers)],
    }


def is_other(name: str) -> bool:
    """Whether a tensor is for other tasks, such as masked tokens."""
    return name.startswith(("head.", "decoder."))


# ---- the forward pass --------------------------------------------------------------------------


def attention_specs(config: ModernBertConfig, **kwargs: Any) -> tuple[ja.AttentionSpec, ...]:
    """Returns a spec for each of config.windows; `kwargs` are further fields of AttentionSpec."""
    return tuple(
        ja.AttentionSpec(
            num_qo_heads=config.num_heads,
            num_kv_heads=config.num_heads,
            head_dim_qk=config.head_dim,
            causal=False,
            window_left=-1 if window is None else window,
            window_right=-1 if window is None else window,
            **kwargs,
        )
        for window in config.windows
    )


def embed(tokens: jax.Array, params: Params, config: ModernBertConfig) -> jax.Array:
    """Returns the first layer's input [n, hidden] for tokens [n] i32."""
    return layer_norm(params["embed"][tokens], params["norm"], config.norm_eps)


def project(
    x: jax.Array, weights: Params, positions: jax.Array, config: ModernBertConfig, layer: Layer
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns rotated q and k, and v: [n, num_heads, head_dim] from x [n, hidden]."""
    if layer.has_norm:
        x = layer_norm(x, weights["attention_norm"], config.norm_eps)
    qkv = product(x, weights["qkv"]).reshape(len(x), 3, -1, config.head_dim)
    exponents = jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim
    angles = positions[:, None].astype(jnp.float32) * (1 / layer.theta**exponents)
    cos, sin = (each(angles)[:, None] for each in (jnp.cos, jnp.sin))

    def rotated(heads: jax.Array) -> jax.Array:
        a, b = jnp.split(heads.astype(jnp.float32), 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(heads.dtype)

    return rotated(qkv[:, 0]), rotated(qkv[:, 1]), qkv[:, 2]


def finish(x: jax.Array, o: jax.Array, weights: Params, config: ModernBertConfig) -> jax.Array:
    """Finishes a layer: x [n, hidden] and attention's o [n, num_heads, head_dim] -> x."""
    x = x + product(o.reshape(len(x), -1), weights["o"])
    h = layer_norm(x, weights["mlp_norm"], config.norm_eps)
    up, gate = jnp.split(product(h, weights["gate_up"]), 2, axis=-1)
    return x + product(ACTIVATIONS[config.activation](up) * gate, weights["down"])


def layer_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """LayerNorm over the last axis, without a bias, computed in f32."""
    x32 = x.astype(jnp.float32)
    x32 -= jnp.mean(x32, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
    return (x32 * jax.lax.rsqrt(variance + eps) * scale.astype(jnp.float32)).astype(x.dtype)
