"""The tower of Gemma 4: pictures of any size, and a mean of patches."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn.models._config.activations import activation_name
from jax_attn.models._config.config import ModelConfig
from jax_attn.models._config.keys import Keys
from jax_attn.models._vision import layers
from jax_attn.models._vision.layers import PromptText, VisionConfig
from jax_attn.models._weights.float_weights import Weight, WeightTree, table
from jax_attn.models._weights.weights import Params

_TOWER = "vision_tower"
_BOUNDS = ("input_min", "input_max", "output_min", "output_max")


def parse(keys: Keys, text: ModelConfig) -> VisionConfig:
    vision = layers.vision_keys(keys, "gemma4_vision")
    vision.expect("attention_bias", False, None)
    num_heads = vision.size("num_attention_heads", 12)
    num_kv_heads = vision.size("num_key_value_heads", 12)
    head_dim = vision.size("head_dim", 64)
    if num_heads % num_kv_heads:
        raise vision.error(
            f"num_attention_heads: expected a multiple of num_key_value_heads {num_kv_heads}, got"
            f" {num_heads}"
        )
    if head_dim % 4:
        raise vision.error(f"head_dim: expected a multiple of 4, got {head_dim}")
    begin, end, picture = (
        layers.need_token(keys, f"{name}_token_id", default, text.vocab_size)
        for name, default in (("boi", 255999), ("eoi", 258882), ("image", 258880))
    )
    return VisionConfig(
        family=keys.need("model_type"),
        num_layers=vision.size("num_hidden_layers", 16),
        hidden_size=vision.size("hidden_size", 768),
        intermediate_size=vision.size("intermediate_size", 3072),
        num_heads=num_heads,
        head_dim=head_dim,
        output_size=text.hidden_size,
        patch_size=vision.size("patch_size", 16),
        merge_size=vision.size("pooling_kernel_size", 3),
        norm_eps=vision.number("rms_norm_eps", 1e-6),
        activation=activation_name(vision, "hidden_activation", "gelu_pytorch_tanh"),
        picture_token=picture,
        prompt=PromptText(picture, (begin, picture, end)),
        num_kv_heads=num_kv_heads,
        sm_scale=1.0,
        rope_theta=layers.rope_theta(vision, 100.0),
        grid_size=vision.size("position_embedding_size", 10240),
        clips=vision.flag("use_clipped_linears"),
        standardizes=vision.flag("standardize"),
    )


def weight_tree(config: VisionConfig) -> WeightTree:
    d, ff, n = config.hidden_size, config.intermediate_size, config.head_dim
    heads = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}

    def product(weight: str, name: str, outer: int, inner: int) -> dict[str, Weight]:
        made = layers.linear(weight, f"{name}.linear", outer, inner, bias=False)
        if config.clips:
            made[f"{weight}_clip"] = Weight({f"{name}.{each}": () for each in _BOUNDS}, np.asarray)
        return made

    def layer(i: int) -> dict[str, Weight]:
        block = f"{_TOWER}.encoder.layers.{i}"
        attention, mlp = f"{block}.self_attn", f"{block}.mlp"
        made = {
            **layers.norm("attention_norm", f"{block}.input_layernorm", d, bias=False),
            **layers.norm("q_norm", f"{attention}.q_norm", n, bias=False),
            **layers.norm("k_norm", f"{attention}.k_norm", n, bias=False),
            **product("o", f"{attention}.o_proj", d, config.num_heads * n),
            **product("gate", f"{mlp}.gate_proj", ff, d),
            **product("up", f"{mlp}.up_proj", ff, d),
            **product("down", f"{mlp}.down_proj", d, ff),
        }
        for weight, name in (
            ("attention_post_norm", "post_attention"),
            ("mlp_norm", "pre_feedforward"),
            ("mlp_post_norm", "post_feedforward"),
        ):
            made |= layers.norm(weight, f"{block}.{name}_layernorm", d, bias=False)
        for each, number in heads.items():
            assert number is not None
            made |= product(each, f"{attention}.{each}_proj", number * n, d)
        for name in ("q", "k", "q_norm", "k_norm"):
            made[name] = Weight(made[name].parts, _in_order(n))
        return made

    tree: WeightTree = {
        "patch": _patch_weight(config),
        "positions": table(
            f"{_TOWER}.patch_embedder.position_embedding_table", 2, config.grid_size, d
        ),
        "layers": [layer(i) for i in range(config.num_layers)],
        **layers.linear(
            "projector", "embed_vision.embedding_projection", config.output_size, d, bias=False
        ),
    }
    if config.standardizes:
        tree |= {name: table(f"{_TOWER}.{name}", d) for name in ("std_bias", "std_scale")}
    return tree


def _in_order(head_dim: int) -> Callable[[np.ndarray], np.ndarray]:
    """Files rotate the halves of a head apart, with the column and with the row. Here element i is
    a pair with i + head_dim / 2, first those of the rows."""
    columns, rows = np.arange(head_dim).reshape(2, 2, -1)
    order = np.concatenate([rows[0], columns[0], rows[1], columns[1]])

    def change(tensor: np.ndarray) -> np.ndarray:
        heads = tensor.reshape(-1, head_dim, *tensor.shape[1:])[:, order]
        return heads.reshape(tensor.shape).T

    return change


def _patch_weight(config: VisionConfig) -> Weight:
    p, d = config.patch_size, config.hidden_size

    def channels_first(tensor: np.ndarray) -> np.ndarray:
        pixels = tensor.reshape(d, p, p, layers.CHANNELS)
        return pixels.transpose(3, 1, 2, 0).reshape(-1, d)

    name = f"{_TOWER}.patch_embedder.input_proj.weight"
    return Weight({name: (d, layers.CHANNELS * p * p)}, channels_first)


def begin(
    patches: jax.Array, places: jax.Array, sizes: jax.Array, params: Params, config: VisionConfig
) -> jax.Array:
    of_columns, of_rows = params["positions"]
    positions = of_columns[places[:, 1]] + of_rows[places[:, 0]]
    return layers.product(patches, params, "patch") + positions


def finish(
    x: jax.Array, kept: list[jax.Array], params: Params, config: VisionConfig
) -> list[jax.Array]:
    pooled = jnp.mean(layers.merged(x, config).astype(jnp.float32), 1).astype(x.dtype)
    # In f32: the factor may take numbers out of the range of float16.
    scaled = pooled.astype(jnp.float32) * config.hidden_size**0.5
    if config.standardizes:
        bias, scale = (params[name].astype(jnp.float32) for name in ("std_bias", "std_scale"))
        scaled = (scaled - bias) * scale
    normal = layers.rms_norm(scaled.astype(x.dtype), config.norm_eps)
    return [layers.product(normal, params, "projector")]
