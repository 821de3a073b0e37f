"""The tower of Gemma 3: SigLIP (arXiv 2303.15343) and a mean of patches (arXiv 2503.19786)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_attn.models._config.activations import activation_name
from jax_attn.models._config.config import ModelConfig
from jax_attn.models._config.keys import Keys
from jax_attn.models._vision import layers
from jax_attn.models._vision.layers import PromptText, VisionConfig
from jax_attn.models._weights.float_weights import Weight, WeightTree, table
from jax_attn.models._weights.weights import Params

_TOWER = "vision_tower"


def parse(keys: Keys, text: ModelConfig) -> VisionConfig:
    vision = layers.vision_keys(keys, "siglip_vision_model")
    hidden_size, num_heads = vision.size("hidden_size", 768), vision.size("num_attention_heads", 12)
    image_size, patch_size = vision.size("image_size", 224), vision.size("patch_size", 16)
    num_tokens = keys.size("mm_tokens_per_image", 256)
    side, grid_size = round(num_tokens**0.5), image_size // patch_size
    if image_size % patch_size or side**2 != num_tokens or grid_size % side:
        raise keys.error(
            f"mm_tokens_per_image: expected the square of a divisor of image_size {image_size} /"
            f" patch_size {patch_size}, got {num_tokens}"
        )
    begin, end, picture = (
        layers.need_token(
            keys, keys.name_of(f"{name}_token_index", f"{name}_token_id"), default, text.vocab_size
        )
        for name, default in (("boi", 255999), ("eoi", 256000), ("image", 262144))
    )
    return VisionConfig(
        family=keys.need("model_type"),
        num_layers=vision.size("num_hidden_layers", 12),
        hidden_size=hidden_size,
        intermediate_size=vision.size("intermediate_size", 3072),
        num_heads=num_heads,
        head_dim=vision.head_dim(hidden_size, num_heads),
        output_size=text.hidden_size,
        patch_size=patch_size,
        merge_size=grid_size // side,
        norm_eps=vision.number("layer_norm_eps", 1e-6),
        activation=activation_name(vision, "hidden_act", "gelu_pytorch_tanh"),
        picture_token=picture,
        prompt=PromptText(begin, ("\n\n", begin, picture, end, "\n\n")),
        grid_size=grid_size,
    )


def weight_tree(config: VisionConfig) -> WeightTree:
    d, ff = config.hidden_size, config.intermediate_size

    def layer(i: int) -> dict[str, Weight]:
        block = f"{_TOWER}.encoder.layers.{i}"
        heads = tuple(f"{block}.self_attn.{x}_proj" for x in "qkv")
        return {
            **layers.norm("attention_norm", f"{block}.layer_norm1", d),
            **layers.linear("qkv", heads, d, d),
            **layers.linear("o", f"{block}.self_attn.out_proj", d, d),
            **layers.norm("mlp_norm", f"{block}.layer_norm2", d),
            **layers.linear("up", f"{block}.mlp.fc1", ff, d),
            **layers.linear("down", f"{block}.mlp.fc2", d, ff),
        }

    projector = "multi_modal_projector"
    return {
        "patch": layers.patch_weight(f"{_TOWER}.embeddings.patch_embedding.weight", config),
        "patch_bias": table(f"{_TOWER}.embeddings.patch_embedding.bias", d),
        "positions": table(
            f"{_TOWER}.embeddings.position_embedding.weight", config.grid_size**2, d
        ),
        "layers": [layer(i) for i in range(config.num_layers)],
        **layers.norm("norm", f"{_TOWER}.post_layernorm", d),
        "projector_norm": table(f"{projector}.mm_soft_emb_norm.weight", d),
        "projector": table(f"{projector}.mm_input_projection_weight", d, config.output_size),
    }


def begin(
    patches: jax.Array, places: jax.Array, sizes: jax.Array, params: Params, config: VisionConfig
) -> jax.Array:
    """All pictures have the size of the table of positions."""
    positions = params["positions"][config.grid_size * places[:, 0] + places[:, 1]]
    return layers.product(patches, params, "patch") + positions


def finish(
    x: jax.Array, kept: list[jax.Array], params: Params, config: VisionConfig
) -> list[jax.Array]:
    x = layers.apply_norm(x, params, "norm", config.norm_eps)
    pooled = jnp.mean(layers.merged(x, config).astype(jnp.float32), 1).astype(x.dtype)
    scale = 1 + params["projector_norm"].astype(jnp.float32)
    return [layers.rms_norm(pooled, config.norm_eps, scale) @ params["projector"]]
