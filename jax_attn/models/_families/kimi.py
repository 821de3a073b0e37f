"""Kimi Linear: layers with Kimi delta attention, and some with latent attention without RoPE."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax_attn.models._config.config import ExpertGroups, Latent, LayerKind, ModelConfig
from jax_attn.models._config.keys import Keys
from jax_attn.models._config.recurrent import KimiDelta
from jax_attn.models._families import layer_kinds, shared

# transformers' names, and those of the published files.
_OTHER_NAMES = {
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
}
_FULL, _LINEAR = layer_kinds.FULL, "linear_attention"


def kimi_linear(keys: Keys) -> ModelConfig:
    names = {name: keys.name_of(name, other) for name, other in _OTHER_NAMES.items()}
    length = keys.size(names["max_position_embeddings"])
    keys = Keys(keys.raw | {"max_position_embeddings": length}, keys.path)
    keys.expect("attention_bias", False)
    # transformers ignores these, which say what it does.
    keys.expect("mla_use_nope", True)
    keys.expect("moe_router_activation_func", "sigmoid")
    keys.expect("use_grouped_topk", True)
    keys.expect("topk_method", "noaux_tc")
    keys.expect("moe_layer_freq", 1)
    keys.expect("tie_word_embeddings", False)
    keys.expect("sliding_window", None)
    latent = Latent(
        q_rank=keys.size_or_none("q_lora_rank"),
        kv_rank=keys.size("kv_lora_rank", 512),
        nope=keys.size("qk_nope_head_dim", 128),
        rope=keys.size("qk_rope_head_dim", 64),
        v=keys.size("v_head_dim", 128),
        interleaved=False,
    )
    if latent.rope % 2:
        raise keys.error(f"qk_rope_head_dim: expected an even number, got {latent.rope}")
    inner = keys.inner("linear_attn_config") or Keys({}, keys.path)

    def size(name: str, outside: str, default: int) -> int:
        return inner.size(name) if name in inner.raw else keys.size(outside, default)

    sizes = KimiDelta(
        size("num_heads", "linear_num_heads", 32),
        size("head_dim", "linear_head_dim", 128),
        size("short_conv_kernel_size", "linear_conv_kernel_dim", 4),
    )
    kinds = {
        _FULL: LayerKind(None),
        _LINEAR: LayerKind(None, attention=False, recurrent=sizes),
    }
    num_experts = keys.size(names["num_local_experts"], 256)
    size_of_expert = keys.size("moe_intermediate_size", 1024)
    block = "block_sparse_moe"
    return shared.silu_model(
        keys,
        layer_kinds.hybrid(keys, _types(keys, inner), kinds),
        num_kv_heads=1,
        head_dim=latent.kv_rank + latent.rope,
        aliases=((f"{block}.", "mlp."),),  # of MLPs, as transformers writes them
        sm_scale=(latent.nope + latent.rope) ** -0.5,
        latent=latent,
        experts=shared.checked_experts(
            keys,
            count=num_experts,
            per_token=keys.size(names["num_experts_per_tok"], 8),
            intermediate_size=size_of_expert,
            names=dataclasses.replace(
                shared.MIXTRAL_EXPERT_NAMES,
                shared=f"{block}.shared_experts",
                correction=f"{block}.gate.e_score_correction_bias",
            ),
            normalize=keys.flag(names["norm_topk_prob"], True),
            dense_layers=_dense_layers(keys),
            groups=ExpertGroups(
                keys.size(names["n_group"], 1), keys.size("topk_group", 1), by_two=True
            ),
            scale=keys.number("routed_scaling_factor", 2.446),
            sigmoid=True,
            shared_size=size_of_expert * keys.size(names["n_shared_experts"], 1),
        ),
    )


def _types(keys: Keys, inner: Keys) -> list[str]:
    """Returns the kinds of the layers of a config without layer_types."""
    num_layers = layer_kinds.count(keys)
    if not {"full_attn_layers", "kda_layers"} <= {*inner.raw}:
        return [_LINEAR if i % 4 or not i else _FULL for i in range(num_layers)]
    types = [""] * num_layers
    for name, kind in (("full_attn_layers", _FULL), ("kda_layers", _LINEAR)):
        for number in inner.items(name) or ():
            if type(number) is not int or not 1 <= number <= num_layers:
                raise inner.error(
                    f"{name}: expected numbers from 1 to {num_layers}, got {number!r}"
                )
            types[number - 1] = kind
    if "" in types:
        raise inner.error(
            f"full_attn_layers, kda_layers: expected all layers, got none of them for layer"
            f" {types.index('') + 1}"
        )
    return types


def _dense_layers(keys: Keys) -> tuple[int, ...]:
    num_layers = layer_kinds.count(keys)
    types: Any = keys.items("mlp_layer_types")
    if types is None:
        return shared.first_layers(keys, keys.count("first_k_dense_replace", 1))
    if len(types) != num_layers or not all(each in ("dense", "sparse") for each in types):
        raise keys.error(
            f"mlp_layer_types: expected {num_layers} times 'dense' or 'sparse', got {types!r}"
        )
    return tuple(i for i, each in enumerate(types) if each == "dense")


FAMILIES = {"kimi_linear": kimi_linear}
