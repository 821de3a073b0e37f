"""Hunyuan, dense and with experts."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax_attn.models._config.config import ModelConfig
from jax_attn.models._config.keys import Keys
from jax_attn.models._config.rope import Rope
from jax_attn.models._families import layer_kinds, rope_keys, shared

_RENAMED = (
    ("self_attn.q_norm", "self_attn.query_layernorm"),
    ("self_attn.k_norm", "self_attn.key_layernorm"),
)


def hunyuan_v1_dense(keys: Keys) -> ModelConfig:
    return _hunyuan(keys)


def hunyuan_v1_moe(keys: Keys) -> ModelConfig:
    size, num_layers = keys.size("intermediate_size"), layer_kinds.count(keys)
    # transformers ignores these two.
    _of_every_layer(keys, "moe_intermediate_size", size, num_layers, (size,))
    _of_every_layer(keys, "num_shared_expert", 1, num_layers, (1,))
    per_token = keys.name_of("moe_topk", "num_experts_per_tok")
    return _hunyuan(
        keys,
        experts=shared.checked_experts(
            keys,
            # The second names are those that transformers takes for the same.
            count=keys.size(keys.name_of("num_experts", "num_local_experts"), 1),
            per_token_key=per_token,
            per_token=_of_every_layer(keys, per_token, 1, num_layers),
            intermediate_size=size,
            names=dataclasses.replace(
                shared.EXPERT_NAMES, router="mlp.gate.wg", shared="mlp.shared_mlp"
            ),
            shared_size=size,
        ),
    )


def _of_every_layer(
    keys: Keys, name: str, default: int, num_layers: int, allowed: tuple[int, ...] = ()
) -> int:
    """Reads a number, or a list with the same number for every layer."""
    value = keys.get(name, default)
    values = value if isinstance(value, list) else [value] * num_layers
    if len(values) < num_layers or any(x != values[0] for x in values[:num_layers]):
        raise keys.error(f"{name}: expected {num_layers} times the same number, got {value!r}")
    number = keys.check_size(name, values[0])
    if allowed and number not in allowed:
        raise keys.error(f"{name}: expected {allowed[0]}, got {value!r}")
    return number


def _hunyuan(keys: Keys, **options: Any) -> ModelConfig:
    # transformers ignores these, which say what it does.
    keys.expect("use_qk_norm", True)
    keys.expect("use_cla", False)
    head_dim = shared.head_dim_of(keys)
    keys.expect("attention_head_dim", None, head_dim)
    return shared.silu_model(
        keys,
        layer_kinds.all_full(keys, _rope(keys, head_dim)),
        qk_norm="per_head",
        qk_norm_after_rope=True,
        renamed=_RENAMED,
        **shared.biases(keys),
        **options,
    )


def _rope(keys: Keys, head_dim: int) -> Rope:
    """With `alpha` the base is larger, and the other keys of "dynamic" have no effect."""
    settings = rope_keys.settings_of(keys, None)
    is_dynamic = settings.get("rope_type", settings.get("type")) == "dynamic"
    if not is_dynamic or not settings.get("alpha"):
        return rope_keys.read(keys, head_dim=head_dim)
    alpha = settings.number("alpha")
    kept = ("rope_theta", "partial_rotary_factor")
    plain = Keys({x: settings.raw[x] for x in kept if x in settings.raw}, settings.path)
    rope = rope_keys.parse(plain, keys, 1e4, head_dim)
    if rope.fraction != 1:
        raise settings.error(f"partial_rotary_factor: expected 1.0, got {rope.fraction!r}")
    if head_dim == 2:
        raise keys.error("head_dim: expected more than 2 with alpha, got 2")
    return dataclasses.replace(rope, theta=rope.theta * alpha ** (head_dim / (head_dim - 2)))


FAMILIES = {
    "hunyuan_v1_dense": hunyuan_v1_dense,
    "hunyuan_v1_moe": hunyuan_v1_moe,
}
