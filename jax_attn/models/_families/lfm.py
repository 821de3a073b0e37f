"""LFM2, with MLPs or experts: layers with short convolutions, and some with attention."""

from __future__ import annotations

from typing import Any

from jax_attn.models._config.config import ExpertNames, LayerKind, ModelConfig
from jax_attn.models._config.keys import Keys
from jax_attn.models._config.recurrent import ShortConvolution
from jax_attn.models._families import layer_kinds, rope_keys, shared

_RENAMED = (
    ("input_layernorm", "operator_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("mlp.gate_proj", "feed_forward.w1"),
    ("mlp.up_proj", "feed_forward.w3"),
    ("mlp.down_proj", "feed_forward.w2"),
    ("self_attn.o_proj", "self_attn.out_proj"),
    ("self_attn.q_norm", "self_attn.q_layernorm"),
    ("self_attn.k_norm", "self_attn.k_layernorm"),
    ("model.norm", "model.embedding_norm"),
)


def lfm2(keys: Keys) -> ModelConfig:
    num_layers = layer_kinds.count(keys)
    chosen = keys.items("full_attn_idxs")
    if chosen is None:
        chosen = [*range(num_layers)]
    if not all(type(i) is int for i in chosen):
        raise keys.error(f"full_attn_idxs: expected integers, got {chosen!r}")
    types = [layer_kinds.FULL if i in chosen else "conv" for i in range(num_layers)]
    return _lfm2(keys, types, intermediate_size=_intermediate_size(keys))


def lfm2_moe(keys: Keys) -> ModelConfig:
    keys.need("layer_types")
    if keys.items("layer_types") is None:
        raise keys.error("layer_types: expected a list, got None")
    keys.expect("use_expert_bias", True)
    block = "feed_forward"
    return _lfm2(
        keys,
        ["conv"] * layer_kinds.count(keys),
        experts=shared.checked_experts(
            keys,
            count=keys.size("num_experts", 32),
            per_token=keys.size("num_experts_per_tok", 4),
            intermediate_size=keys.size("moe_intermediate_size", 1792),
            names=ExpertNames(
                f"{block}.gate",
                (f"{block}.experts.{{}}.w1", f"{block}.experts.{{}}.w3"),
                f"{block}.experts.{{}}.w2",
                correction=f"{block}.expert_bias",
            ),
            normalize=keys.flag("norm_topk_prob", True),
            normalize_eps=1e-6,
            dense_layers=shared.first_layers(keys, keys.count("num_dense_layers", 2)),
            scale=keys.number("routed_scaling_factor", 1.0),
            sigmoid=True,
        ),
    )


def _lfm2(keys: Keys, types: list[str], **options: Any) -> ModelConfig:
    keys.expect("sliding_window", None)
    full, conv = layer_kinds.FULL, "conv"
    sizes = ShortConvolution(
        keys.size("hidden_size"), keys.size("conv_L_cache", 3), keys.flag("conv_bias")
    )
    kinds = {
        full: LayerKind(rope_keys.read(keys, 1e6)),
        conv: LayerKind(None, attention=False, recurrent=sizes),
    }
    layers = layer_kinds.hybrid(keys, types, kinds)
    name = "tie_embedding" if "tie_embedding" in keys.raw else "tie_word_embeddings"
    keys = Keys(keys.raw | {"rms_norm_eps": keys.number("norm_eps", 1e-5)}, keys.path)
    return shared.silu_model(
        keys,
        layers,
        default_kv_heads=8,
        qk_norm="per_head",
        tie_embeddings=keys.flag(name, True),
        renamed=_RENAMED,
        **options,
    )


def _intermediate_size(keys: Keys) -> int:
    """Two thirds of the config's, times a factor, rounded up to a multiple."""
    size = keys.size("block_ff_dim" if "block_ff_dim" in keys.raw else "intermediate_size")
    if not keys.flag("block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    if keys.get("block_ffn_dim_multiplier", 1.0) is not None:
        size = int(keys.number("block_ffn_dim_multiplier", 1.0) * size)
        multiple = keys.size("block_multiple_of", 256)
        size = multiple * -(-size // multiple)
    return size


FAMILIES = {"lfm2": lfm2, "lfm2_moe": lfm2_moe}
