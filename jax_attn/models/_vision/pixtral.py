"""The tower of Mistral 3: Pixtral (arXiv 2410.07073), and a product that merges patches."""

from __future__ import annotations

import jax
import numpy as np

from jax_attn.models._config.activations import activation_name
from jax_attn.models._config.config import ModelConfig
from jax_attn.models._config.keys import Keys
from jax_attn.models._vision import layers
from jax_attn.models._vision.layers import PromptText, VisionConfig
from jax_attn.models._weights.float_weights import Weight, WeightTree
from jax_attn.models._weights.weights import Params

_TOWER, _PROJECTOR = "vision_tower", "multi_modal_projector"


def parse(keys: Keys, text: ModelConfig) -> VisionConfig:
    vision = layers.vision_keys(keys, "pixtral")
    keys.expect("vision_feature_layer", -1)
    hidden_size = vision.size("hidden_size", 1024)
    num_heads = vision.size("num_attention_heads", 16)
    head_dim = vision.head_dim(hidden_size, num_heads, 4)
    vision.expect("head_dim", head_dim)
    key = keys.name_of("image_token_index", "image_token_id")
    picture = layers.need_token(keys, key, 10, text.vocab_size)
    return VisionConfig(
        family=keys.need("model_type"),
        num_layers=vision.size("num_hidden_layers", 24),
        hidden_size=hidden_size,
        intermediate_size=vision.size("intermediate_size", 4096),
        num_heads=num_heads,
        head_dim=head_dim,
        output_size=text.hidden_size,
        patch_size=vision.size("patch_size", 16),
        merge_size=keys.size("spatial_merge_size", 2),
        norm_eps=1e-5,
        activation=activation_name(vision, "hidden_act", "gelu"),
        picture_token=picture,
        prompt=PromptText(picture, (picture,), ("[IMG_BREAK]", "[IMG_END]")),
        rope_theta=layers.rope_theta(vision, 10000.0),
        rope_series="alternating",
        projector_eps=text.rms_norm_eps,
        projector_activation=activation_name(keys, "projector_hidden_act", "gelu"),
        projector_bias=keys.flag("multimodal_projector_bias"),
    )


def weight_tree(config: VisionConfig) -> WeightTree:
    d, ff, out = config.hidden_size, config.intermediate_size, config.output_size

    def layer(i: int) -> dict[str, Weight]:
        block = f"{_TOWER}.transformer.layers.{i}"
        heads = tuple(f"{block}.attention.{x}_proj" for x in "qkv")
        return {
            **layers.norm("attention_norm", f"{block}.attention_norm", d, bias=False),
            **layers.linear("qkv", heads, d, d, bias=False),
            **layers.linear("o", f"{block}.attention.o_proj", d, d, bias=False),
            **layers.norm("mlp_norm", f"{block}.ffn_norm", d, bias=False),
            **layers.linear("gate", f"{block}.feed_forward.gate_proj", ff, d, bias=False),
            **layers.linear("up", f"{block}.feed_forward.up_proj", ff, d, bias=False),
            **layers.linear("down", f"{block}.feed_forward.down_proj", d, ff, bias=False),
        }

    bias = config.projector_bias
    return {
        "patch": layers.patch_weight(f"{_TOWER}.patch_conv.weight", config),
        **layers.norm("norm", f"{_TOWER}.ln_pre", d, bias=False),
        "layers": [layer(i) for i in range(config.num_layers)],
        **layers.norm("projector_norm", f"{_PROJECTOR}.norm", d, bias=False),
        "merger": _merger_weight(config),
        **layers.linear("projector_up", f"{_PROJECTOR}.linear_1", out, d, bias=bias),
        **layers.linear("projector_down", f"{_PROJECTOR}.linear_2", out, out, bias=bias),
    }


def _merger_weight(config: VisionConfig) -> Weight:
    """Files have the patches of a token side by side in each channel; here each is whole."""
    d, number = config.hidden_size, config.merge_size**2

    def by_patch(tensor: np.ndarray) -> np.ndarray:
        return tensor.reshape(d, d, number).transpose(2, 1, 0).reshape(-1, d)

    name = f"{_PROJECTOR}.patch_merger.merging_layer.weight"
    return Weight({name: (d, d * number)}, by_patch)


def begin(
    patches: jax.Array, places: jax.Array, sizes: jax.Array, params: Params, config: VisionConfig
) -> jax.Array:
    x = layers.product(patches, params, "patch")
    return layers.apply_norm(x, params, "norm", config.norm_eps)


def finish(
    x: jax.Array, kept: list[jax.Array], params: Params, config: VisionConfig
) -> list[jax.Array]:
    x = layers.apply_norm(x, params, "projector_norm", config.projector_eps)
    tokens = layers.merged(x, config)
    h = layers.product(tokens.reshape(len(tokens), -1), params, "merger")
    h = layers.product(h, params, "projector_up", config.projector_activation)
    return [layers.product(h, params, "projector_down")]
