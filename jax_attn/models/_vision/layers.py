"""What vision towers share: their configuration, batches of patches, and a layer.

Patches of all pictures of a batch lie back to back, without padding between them, and those of a
picture attend to each other.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jax_attn as ja
from jax_attn.models._config.activations import ACTIVATIONS, dense
from jax_attn.models._config.keys import Keys
from jax_attn.models._config.rope import rotate
from jax_attn.models._weights.float_weights import Weight
from jax_attn.models._weights.tensors import Shape
from jax_attn.models._weights.weights import Params

CHANNELS = 3  # red, green, blue
MAX_PICTURES = 64  # of a batch


class PromptText(NamedTuple):
    """What stands for a picture in the text of a prompt: texts, and tokens of the vocabulary.

    marker: the token that chat templates write. parts: what replaces it; the picture token in it
      becomes all tokens of the picture.
    row_ends: the tokens behind each row of the picture, and behind the last; None: no tokens.
    """

    marker: int
    parts: tuple[int | str, ...]
    row_ends: tuple[str, str] | None = None


@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """The configuration of a vision tower. Hashable: a static argument of jitted functions."""

    family: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    head_dim: int
    output_size: int  # hidden size of the text model
    patch_size: int  # pixels of a side
    merge_size: int  # a token of the text model is merge_size x merge_size patches
    norm_eps: float
    activation: str  # of the MLPs; one of ACTIVATIONS
    picture_token: int  # of the vocabulary: stands for a token of a picture in a prompt
    prompt: PromptText
    num_kv_heads: int | None = None  # None: num_heads
    sm_scale: float | None = None  # None: 1 / sqrt(head_dim)
    rope_theta: float | None = None  # None: no rotary positions
    # Whether rows and columns have the same frequencies, or take turns in one series of them.
    rope_series: Literal["same", "alternating"] = "same"
    num_frames: int = 1  # frames of a patch; a picture is repeated
    grid_size: int = 0  # side of a square table of learned positions
    deepstack: tuple[int, ...] = ()  # layers whose rows are added to those of the text model, too
    projector_eps: float = 1e-6  # of norms between the tower and the text model
    projector_activation: str = "gelu"
    projector_bias: bool = False
    clips: bool = False  # inputs and outputs of products are clipped
    standardizes: bool = False
    tensor_prefix: str = "model."
    quantization: None = None

    @property
    def factor(self) -> int:
        """Pixels of a side of a token: heights and widths of pictures are multiples."""
        return self.patch_size * self.merge_size

    @property
    def row_gap(self) -> int:
        """Tokens of text behind each row of a picture."""
        return 0 if self.prompt.row_ends is None else 1


# ---- keys --------------------------------------------------------------------------------------


def vision_keys(keys: Keys, *model_types: str) -> Keys:
    """Returns the keys of vision_config, {} if it is missing. model_types: that it may have."""
    vision = keys.inner("vision_config") or Keys({}, f"{keys.path}: vision_config")
    vision.expect("model_type", *model_types)
    for key in ("in_channels", "num_channels"):
        vision.expect(key, CHANNELS)
    for key in ("rope_scaling", "quantization_config", "partial_rotary_factor"):
        vision.expect(key, None)
    return vision


def rope_theta(vision: Keys, default: float) -> float:
    """Returns the base of rotary positions of rows and columns."""
    rope = vision.inner("rope_parameters") or Keys({}, vision.path)
    rope.expect("rope_type", "axial", "default")  # the latter is the former's name in older files
    for key in rope.raw:
        if key not in ("rope_type", "rope_theta"):
            raise rope.error(f"key '{key}' is not supported with 'axial'")
    return float(rope.number("rope_theta", vision.number("rope_theta", default)))


def need_token(keys: Keys, key: str, default: int, vocab_size: int) -> int:
    """Returns a token of the vocabulary; `default` for a missing key."""
    token = Keys({key: default} | keys.raw, keys.path).token(key, vocab_size)
    if token is None:
        raise keys.error(f"{key}: expected a token of the vocabulary, got None")
    return token


# ---- weights -----------------------------------------------------------------------------------


def linear(
    weight: str, names: str | tuple[str, ...], outer: int, inner: int, *, bias: bool = True
) -> dict[str, Weight]:
    """A matrix, and its bias; of several names side by side."""
    stems = (names,) if isinstance(names, str) else names
    made = {weight: Weight({f"{stem}.weight": (outer, inner) for stem in stems})}
    if bias:
        made[f"{weight}_bias"] = Weight({f"{stem}.bias": (outer,) for stem in stems})
    return made


def norm(weight: str, name: str, size: int, *, bias: bool = True) -> dict[str, Weight]:
    made = {weight: Weight({f"{name}.weight": (size,)})}
    return made | ({f"{weight}_bias": Weight({f"{name}.bias": (size,)})} if bias else {})


def patch_weight(name: str, config: VisionConfig) -> Weight:
    """The matrix of a convolution over patches: [frames * 3 * patch_size ** 2, hidden]."""
    patch = CHANNELS, config.patch_size, config.patch_size
    shape: Shape = config.hidden_size, *patch

    def flat(tensor: np.ndarray) -> np.ndarray:
        return tensor.reshape(len(tensor), -1).T

    return Weight({name: shape}, flat)


# ---- a batch -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class PatchBatch:
    """Patches of pictures back to back, then padding.

    Those that become one token of the text model are neighbours.

    patches: [num_patches, 3, patch_size, patch_size] u8.
    places: [num_patches, 2] i32. Row and column of each patch in its picture.
    sizes: [num_patches, 2] i32. Rows and columns of its picture, in patches; 1 in the padding.
    plan: of attention among the patches of each picture.
    """

    patches: Any
    places: Any
    sizes: Any
    plan: ja.AttentionPlan

    @staticmethod
    def make(
        config: VisionConfig,
        pictures: list[np.ndarray],
        num_patches: int,
        dtype: jax.typing.DTypeLike,
    ) -> PatchBatch:
        """Packs pictures into a batch and plans it.

        pictures: [height, width, 3] u8 each, multiples of config.factor.
        num_patches: the capacity, which fixes the shapes.

        Raises ValueError if it, or MAX_PICTURES, is exceeded.
        """
        p, m = config.patch_size, config.merge_size
        grids = [(x.shape[0] // p, x.shape[1] // p) for x in pictures]
        lens = np.array([rows * columns for rows, columns in grids], np.int32)
        if (used := int(lens.sum())) > num_patches or len(pictures) > MAX_PICTURES:
            raise ValueError(
                f"PatchBatch: pictures: expected at most {num_patches} patches of {MAX_PICTURES}"
                f" pictures, got {used} of {len(pictures)}"
            )
        patches = np.zeros((num_patches, CHANNELS, p, p), np.uint8)
        places = np.zeros((num_patches, 2), np.int32)
        sizes = np.ones((num_patches, 2), np.int32)
        begin = 0
        for pixels, (rows, columns) in zip(pictures, grids, strict=True):
            of_picture = slice(begin, begin + rows * columns)
            blocks = pixels.reshape(rows // m, m, p, columns // m, m, p, CHANNELS)
            ordered = blocks.transpose(0, 3, 1, 4, 6, 2, 5)
            patches[of_picture] = ordered.reshape(-1, CHANNELS, p, p)
            grid = np.indices((rows, columns)).reshape(2, rows // m, m, columns // m, m)
            places[of_picture] = grid.transpose(1, 3, 2, 4, 0).reshape(-1, 2)
            sizes[of_picture] = rows, columns
            begin += rows * columns
        indptr = np.append(0, lens.cumsum()).astype(np.int32)
        spec = attention_spec(config, num_patches, dtype)
        plan = ja.plan(spec, indptr, lens, kv_indptr=indptr)
        return PatchBatch(patches, places, sizes, plan)


def attention_spec(
    config: VisionConfig, num_patches: int, dtype: jax.typing.DTypeLike
) -> ja.AttentionSpec:
    """The spec of all layers for batches of this capacity."""
    return ja.AttentionSpec(
        num_qo_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads or config.num_heads,
        head_dim_qk=config.head_dim,
        sm_scale=config.sm_scale,
        causal=False,
        dtype=jnp.dtype(dtype).name,
        page_size=None,
        max_batch=MAX_PICTURES,
        max_qo_tokens=num_patches,
        max_kv_tokens=num_patches,
    )


# ---- the forward pass --------------------------------------------------------------------------


def layer(
    x: jax.Array, places: jax.Array, plan: ja.AttentionPlan, weights: Params, config: VisionConfig
) -> jax.Array:
    """Runs a layer: x [num_patches, hidden] -> x. What it has besides, its weights say.

    The norm of a head's q and k has v normalized, too, without weights (Gemma 4).
    """

    def post_norm(h: jax.Array, name: str) -> jax.Array:
        return apply_norm(h, weights, name, config.norm_eps) if name in weights else h

    h = apply_norm(x, weights, "attention_norm", config.norm_eps)
    names = ("qkv",) if "qkv" in weights else ("q", "k", "v")
    qkv = jnp.concatenate([product(h, weights, name) for name in names], -1)
    heads = qkv.reshape(len(x), -1, config.head_dim)
    ends = config.num_heads, config.num_heads + (config.num_kv_heads or config.num_heads)
    q, k, v = jnp.split(heads, ends, axis=1)
    if "q_norm" in weights:
        q, k = (
            apply_norm(each, weights, name, config.norm_eps)
            for each, name in ((q, "q_norm"), (k, "k_norm"))
        )
        v = rms_norm(v, config.norm_eps)
    if config.rope_theta is not None:
        angles = _angles(places, config)
        q, k = rotate(q, angles), rotate(k, angles)
    o = ja.attention(q, k, v, plan).reshape(len(x), -1)
    x = x + post_norm(product(o, weights, "o"), "attention_post_norm")
    h = apply_norm(x, weights, "mlp_norm", config.norm_eps)
    if "gate" in weights:
        h = product(h, weights, "gate", config.activation) * product(h, weights, "up")
    else:
        h = product(h, weights, "up", config.activation)
    return x + post_norm(product(h, weights, "down"), "mlp_post_norm")


def _angles(places: jax.Array, config: VisionConfig) -> tuple[jax.Array, jax.Array]:
    """Returns cos and sin, [num_patches, head_dim / 2] f32.

    A quarter of a head's elements turns with the row, a quarter with the column, as pairs with the
    other half.
    """
    assert config.rope_theta is not None
    quarter = config.head_dim // 4
    if config.rope_series == "same":
        exponents = np.tile(np.arange(quarter) / quarter, (2, 1))
    else:
        exponents = (np.arange(2 * quarter) / (2 * quarter)).reshape(quarter, 2).T
    frequencies = (config.rope_theta**-exponents).astype(np.float32)
    turns = (places.astype(jnp.float32)[..., None] * frequencies).reshape(len(places), -1)
    return jnp.cos(turns), jnp.sin(turns)


def product(x: jax.Array, weights: Params, name: str, activation: str | None = None) -> jax.Array:
    """x times a matrix, with its bias if it has one; inputs and outputs are clipped if it says so.

    {name}_clip: [4] f32, the least and the largest input and output.
    """
    weight, bias, clip = weights[name], weights.get(f"{name}_bias"), weights.get(f"{name}_clip")
    if clip is None:
        return dense(x, weight, bias, activation)
    y = dense(jnp.clip(x, *clip[:2].astype(x.dtype)), weight, bias)
    y = jnp.clip(y, *clip[2:].astype(y.dtype))
    return y if activation is None else ACTIVATIONS[activation](y)


def apply_norm(x: jax.Array, weights: Params, name: str, eps: float) -> jax.Array:
    """LayerNorm over the last axis if there is a bias, otherwise RMSNorm, computed in f32."""
    scale, bias = (weights.get(key) for key in (name, f"{name}_bias"))
    assert scale is not None
    if bias is None:
        return rms_norm(x, eps, scale)
    x32 = x.astype(jnp.float32)
    x32 -= jnp.mean(x32, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
    normal = x32 * jax.lax.rsqrt(variance + eps)
    return (normal * scale.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


def rms_norm(x: jax.Array, eps: float, scale: jax.Array | None = None) -> jax.Array:
    x32 = x.astype(jnp.float32)
    normal = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (normal if scale is None else normal * scale.astype(jnp.float32)).astype(x.dtype)


def merged(x: jax.Array, config: VisionConfig) -> jax.Array:
    """[num_patches, size] -> [num_tokens, merge_size ** 2, size]: the patches of each token."""
    return x.reshape(-1, config.merge_size**2, x.shape[-1])


run_layer = partial(jax.jit, static_argnames="config")(layer)
