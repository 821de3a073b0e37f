"""Nemotron 3 and 4, and their hybrids.

In Nemotron-H and the hybrids of Nemotron 3 each layer is one of Mamba-2, attention, an MLP or
experts.
"""

from __future__ import annotations

import math
from typing import Any

from jax_attn.models._config.config import ExpertGroups, ExpertNames, LayerKind, ModelConfig
from jax_attn.models._config.keys import Keys
from jax_attn.models._families import layer_kinds, mamba_keys, rope_keys, shared

_PATTERN = {"M": "linear_attention", "*": layer_kinds.FULL, "-": "mlp", "E": "moe"}
_OLDER = {"mamba": "linear_attention", "attention": layer_kinds.FULL}
_OTHER_NAMES = {
    "n_groups": "mamba_n_groups",
    "conv_kernel": "mamba_d_conv",
    "time_step_min": "mamba_dt_min",
    "time_step_limit": "mamba_dt_limit",
    "use_conv_bias": "mamba_conv_bias",
}
_RENAMED = (
    ("input_layernorm", "norm"),
    ("post_attention_layernorm", "norm"),
    ("self_attn.", "mixer."),
    ("mamba.", "mixer."),
    ("mlp.", "mixer."),
    ("model.norm", "model.norm_f"),
    ("embed_tokens", "embeddings"),
)


def nemotron(keys: Keys) -> ModelConfig:
    rope = rope_keys.read(keys, default_fraction=0.5)
    return shared.model(
        keys,
        layer_kinds.all_full(keys, rope),
        norm_offset=1.0,
        **shared.layer_norms(keys, "norm_eps"),
        **shared.mlp_without_gate(keys, "relu2", bias=keys.flag("mlp_bias")),
        **shared.biases(keys),
    )


def nemotron_h(keys: Keys) -> ModelConfig:
    names = {name: keys.name_of(name, other) for name, other in _OTHER_NAMES.items()}
    eps = keys.number("layer_norm_epsilon", 1e-5)
    keys.expect("rms_norm_eps", eps)  # transformers ignores it
    keys.expect("mlp_hidden_act", "relu2")
    keys.expect("mamba_hidden_act", "silu")
    keys.expect("sliding_window", None)
    keys.expect("mlp_bias", False)
    keys.expect("attention_bias", False)  # transformers ignores it
    keys.expect("residual_in_fp32", False)  # likewise
    keys.expect("tie_word_embeddings", False)  # likewise
    limit = names["time_step_limit"]
    if mamba_keys.time_step_limit(keys, limit) != (0.0, math.inf):  # likewise
        raise keys.error(f"{limit}: expected [0, Infinity], got {keys.get(limit)!r}")
    head_dim = shared.head_dim_of(keys, 128)
    keys.expect("attention_head_dim", head_dim, None)  # of the first files
    bias = keys.flag("use_bias")
    mamba = mamba_keys.checked(
        keys,
        names["n_groups"],
        num_heads=keys.size("mamba_num_heads", 128),
        head_dim=keys.size("mamba_head_dim", 64),
        num_groups=keys.size(names["n_groups"], 8),
        state_dim=keys.size("ssm_state_size", 128),
        conv_width=keys.size(names["conv_kernel"], 4),
        conv_bias=keys.flag(names["use_conv_bias"], True),
        in_bias=bias,
        out_bias=bias,
        dt_range=(keys.number(names["time_step_min"], 0.001), math.inf),
    )
    types = _types(keys)
    mlp = LayerKind(None, attention=False)
    kinds = {
        "linear_attention": LayerKind(None, attention=False, recurrent=mamba, mlp=False),
        layer_kinds.FULL: LayerKind(None, mlp=False),
        "mlp": mlp,
        "moe": mlp,
    }
    keys = Keys(
        keys.raw
        | {
            "num_hidden_layers": len(types),
            "layer_types": types,
            "rms_norm_eps": eps,
        },
        keys.path,
    )
    options: dict[str, Any] = {}
    if "moe" in types:
        options["experts"] = _experts(keys, types)
    return shared.model(
        keys,
        layer_kinds.hybrid(keys, types, kinds),
        default_kv_heads=8,
        head_dim=head_dim,
        activation="relu2",
        gated=False,
        tensor_prefix="backbone.",
        renamed=_RENAMED,
        **options,
    )


def _types(keys: Keys) -> list[Any]:
    """Returns the kinds of the layers; their number decides, not num_hidden_layers."""
    name = keys.name_of("layers_block_type", "layer_types")
    types, pattern = keys.items(name), keys.get("hybrid_override_pattern")
    if types is None and pattern is not None:
        if not isinstance(pattern, str) or not set(pattern) <= set(_PATTERN) or not pattern:
            raise keys.error(
                f"hybrid_override_pattern: expected some of 'M', '*', '-' and 'E', got {pattern!r}"
            )
        types = [_PATTERN[each] for each in pattern]
    if not types:
        raise keys.error(f"{name}: expected kinds of layers, got {types!r}")
    return [_OLDER.get(each, each) if isinstance(each, str) else each for each in types]


def _experts(keys: Keys, types: list[Any]) -> Any:
    return shared.checked_experts(
        keys,
        count=keys.size(keys.name_of("n_routed_experts", "num_local_experts"), 8),
        per_token=keys.size("num_experts_per_tok", 2),
        intermediate_size=keys.size("moe_intermediate_size", 7688),
        names=ExpertNames(
            "mlp.gate",
            ("mlp.experts.{}.up_proj",),
            "mlp.experts.{}.down_proj",
            latent=("mlp.fc1_latent_proj", "mlp.fc2_latent_proj"),
        ),
        normalize=keys.flag("norm_topk_prob", True),
        dense_layers=tuple(i for i, each in enumerate(types) if each != "moe"),
        groups=ExpertGroups(keys.size("n_group", 1), keys.size("topk_group", 1), by_two=True),
        scale=keys.number("routed_scaling_factor", 1.0),
        sigmoid=True,
        shared_size=keys.size("moe_shared_expert_intermediate_size", 7688),
        latent_size=keys.size_or_none("moe_latent_size") or 0,
    )


FAMILIES = {
    "nemotron": nemotron,
    "nemotron_h": nemotron_h,
}
