"""What families share: sizes, biases, experts, and the ModelConfig itself."""

from __future__ import annotations

from typing import Any

from jax_attn.models._config.activations import activation_name
from jax_attn.models._config.config import ExpertNames, Experts, LayerKind, ModelConfig
from jax_attn.models._config.keys import Keys, refuse_changes_of_any_family
from jax_attn.models._config.recurrent import GatedDelta
from jax_attn.models._families import layer_kinds


def silu_model(keys: Keys, layers: list[LayerKind], **options: Any) -> ModelConfig:
    keys.expect("hidden_act", "silu")
    return model(keys, layers, **options)


def model(
    keys: Keys, layers: list[LayerKind], default_kv_heads: int | None = None, **options: Any
) -> ModelConfig:
    """Builds a ModelConfig from the keys; `options` override them.

    default_kv_heads: that of a config without num_key_value_heads; None: num_attention_heads.
    """
    num_qo_heads = keys.size("num_attention_heads")
    num_kv_heads = keys.size_or_none("num_key_value_heads", default_kv_heads) or num_qo_heads
    if num_qo_heads % num_kv_heads:
        raise keys.error(
            f"num_attention_heads: expected a multiple of num_key_value_heads {num_kv_heads}, got "
            f"{num_qo_heads}"
        )
    head_dim = options.get("head_dim") or head_dim_of(keys)
    vocab_size = keys.size("vocab_size")
    common = {
        "family": keys.need("model_type"),
        "vocab_size": vocab_size,
        "hidden_size": keys.size("hidden_size"),
        "intermediate_size": keys.size("intermediate_size"),
        "num_qo_heads": num_qo_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "layers": tuple(layers),
        "rms_norm_eps": options.get("rms_norm_eps") or keys.number("rms_norm_eps"),
        "tie_embeddings": keys.flag("tie_word_embeddings"),
        "max_positions": keys.size("max_position_embeddings"),
        "bos_token": keys.token("bos_token_id", vocab_size),
        "eos_tokens": keys.tokens("eos_token_id", vocab_size),
        "sm_scale": head_dim**-0.5,
    }
    return ModelConfig(**(common | options))


def head_dim_of(keys: Keys, default: int | None = None) -> int:
    """default: that of a config without head_dim; None: the share of a head in hidden_size."""
    head_dim = keys.size_or_none("head_dim", default)
    if head_dim is None:
        hidden_size, num_heads = keys.size("hidden_size"), keys.size("num_attention_heads")
        head_dim = hidden_size // num_heads
        if head_dim % 2 or not head_dim:
            raise keys.error(
                f"hidden_size: expected an even number for each of num_attention_heads "
                f"{num_heads}, got {hidden_size}"
            )
    if head_dim % 2:
        raise keys.error(f"head_dim: expected an even number, got {head_dim}")
    return head_dim


def expect_share_of_hidden_size(keys: Keys) -> None:
    """Refuses a head_dim that transformers reads for RoPE only."""
    if (head_dim := keys.get("head_dim")) is not None:
        share = keys.size("hidden_size") // keys.size("num_attention_heads")
        if head_dim != share:
            raise keys.error(f"head_dim: expected {share}, as hidden_size says, got {head_dim!r}")


def mlp_without_gate(keys: Keys, activation: str, *, bias: bool) -> dict[str, Any]:
    """activation: hidden_act of a config without it."""
    named = activation_name(keys, "hidden_act", activation)
    return {"activation": named, "gated": False, "mlp_bias": bias}


def layer_norms(keys: Keys, eps: str, *, bias: bool = True) -> dict[str, Any]:
    """eps: the key of the epsilon."""
    return {"layer_norm": True, "norm_bias": bias, "rms_norm_eps": keys.number(eps, 1e-5)}


def biases(keys: Keys) -> dict[str, bool]:
    bias = keys.flag("attention_bias")
    return {"qkv_bias": bias, "o_bias": bias}


def text_of(keys: Keys, *model_types: str) -> Keys:
    """Returns the keys of the text model of a model with images.

    model_types: those that it may have; the first is that of one without the key.
    """
    keys.need("text_config")
    text = keys.inner("text_config")
    if text is None:
        raise keys.error("text_config: expected an object, got None")
    text.expect("model_type", *model_types)
    text.expect("quantization_config", None)
    text.expect("is_causal", True)
    refuse_changes_of_any_family(text, text.get("model_type", model_types[0]))
    return text


def gated_delta(keys: Keys, **sizes: Any) -> GatedDelta:
    checked = GatedDelta(**sizes)
    if checked.num_v_heads % checked.num_k_heads:
        raise keys.error(
            f"linear_num_value_heads: expected a multiple of linear_num_key_heads "
            f"{checked.num_k_heads}, got {checked.num_v_heads}"
        )
    return checked


def soft_cap(keys: Keys, key: str, default: float | None) -> float:
    """Returns the soft cap: 0 for null, `default` for a missing key."""
    return 0.0 if keys.get(key, default) is None else keys.number(key, default)


def first_layers(keys: Keys, number: int) -> tuple[int, ...]:
    return tuple(range(min(number, layer_kinds.count(keys))))


# The names of Qwen's experts, and of many others'.
EXPERT_NAMES = ExpertNames(
    "mlp.gate",
    ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
    "mlp.experts.{}.down_proj",
)

MIXTRAL_EXPERT_NAMES = ExpertNames(
    "block_sparse_moe.gate",
    ("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
    "block_sparse_moe.experts.{}.w2",
)


def checked_experts(
    keys: Keys, *, per_token_key: str = "num_experts_per_tok", **options: Any
) -> Experts:
    """per_token_key: what the config calls the experts of a token."""
    experts = Experts(**options)
    groups = experts.groups
    available, where = experts.count, ""
    if groups is not None:
        if experts.count % groups.count or (groups.by_two and experts.count < 2 * groups.count):
            raise keys.error(
                f"n_group: expected a divisor of the number of experts, {experts.count}, with "
                f"{'two' if groups.by_two else 'one'} or more in a group, got {groups.count}"
            )
        if groups.chosen > groups.count:
            raise keys.error(
                f"topk_group: expected at most n_group {groups.count}, got {groups.chosen}"
            )
        available = experts.count // groups.count * groups.chosen
        where = f" of topk_group {groups.chosen}"
    if experts.per_token > available:
        raise keys.error(
            f"{per_token_key}: expected at most the {available} experts{where}, got "
            f"{experts.per_token}"
        )
    return experts
