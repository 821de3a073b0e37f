"""OLMo 2 and 3, and OLMo Hybrid."""

from __future__ import annotations

from typing import Any

from jax_attn.models._config.config import LayerKind, ModelConfig
from jax_attn.models._config.keys import Keys
from jax_attn.models._config.rope import Rope
from jax_attn.models._families import layer_kinds, rope_keys, shared


def olmo2(keys: Keys) -> ModelConfig:
    return _olmo(keys, layer_kinds.all_full(keys, rope_keys.read(keys)))


def olmo3(keys: Keys) -> ModelConfig:
    # transformers reads rope_theta for the layers with full attention only.
    head_dim = shared.head_dim_of(keys)
    ropes = rope_keys.by_layer_type(keys, head_dim, 5e5, Keys({}, keys.path), 5e5)
    window = keys.size("sliding_window", 4096)
    types = layer_kinds.all_but_each(keys, 4)
    return _olmo(keys, layer_kinds.by_type(keys, types, ropes[0], window, ropes[1]))


def olmo_hybrid(keys: Keys) -> ModelConfig:
    num_heads = keys.size("num_attention_heads")
    num_k_heads = keys.size_or_none("linear_num_key_heads", num_heads) or num_heads
    dim_k = keys.size_or_none("linear_key_head_dim")
    if dim_k is None:
        dim_k = int(0.75 * keys.size("hidden_size") / num_k_heads)
    sizes = shared.gated_delta(
        keys,
        num_k_heads=num_k_heads,
        num_v_heads=keys.size_or_none("linear_num_value_heads", num_heads) or num_heads,
        dim_k=dim_k,
        dim_v=keys.size_or_none("linear_value_head_dim") or 2 * dim_k,
        conv_width=keys.size("linear_conv_kernel_dim", 4),
        layout="apart",
        beta_scale=2.0 if keys.flag("linear_allow_neg_eigval", True) else 1.0,
        norm_eps=1e-5,  # whatever rms_norm_eps is
    )
    full, linear = layer_kinds.FULL, "linear_attention"
    types = [linear if (i + 1) % 4 else full for i in range(layer_kinds.count(keys))]
    if full not in types:
        types[-1] = full
    kinds = {
        full: LayerKind(_rope_or_none(keys)),
        linear: LayerKind(None, attention=False, recurrent=sizes),
    }
    aliases = (
        ("attention_layer_norm", "input_layernorm"),
        ("feedforward_layer_norm", "post_attention_layernorm"),
    )
    return _olmo(keys, layer_kinds.hybrid(keys, types, kinds), aliases=aliases)


def _rope_or_none(keys: Keys) -> Rope | None:
    """Returns None for a base of null, as the published models have it."""
    settings = rope_keys.settings_of(keys, None)
    if settings.get("rope_theta", keys.get("rope_theta", 1e4)) is not None:
        return rope_keys.read(keys)
    settings.expect("rope_type", "default")
    settings.expect("type", "default", None)
    return None


def _olmo(keys: Keys, layers: list[LayerKind], **options: Any) -> ModelConfig:
    return shared.silu_model(
        keys,
        layers,
        qk_norm="all_heads",
        pre_norms=False,
        post_norms=True,
        **shared.biases(keys),
        **options,
    )


FAMILIES = {
    "olmo3": olmo3,
    "olmo2": olmo2,
    "olmo_hybrid": olmo_hybrid,
}
