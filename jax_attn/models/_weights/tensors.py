"""The tensors of a decoder model's files: their names, and their shapes in torch's layout."""

from __future__ import annotations

from typing import TypeAlias

from jax_attn.models._config.config import Experts, Latent, ModelConfig
from jax_attn.models._weights import mxfp4

Shape: TypeAlias = tuple[int, ...]

Parts: TypeAlias = dict[str, Shape]
"""Tensors of the files that make one matrix, side by side; a list of them makes a stack."""


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, Parts | list[Parts]]:
    """Returns for each weight of a layer its tensors in the files, with torch's shapes.

    A matrix is [out, in] in torch, and [in, out] in Params.
    """
    d = config.hidden_size
    q_size = config.num_qo_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    qkv_sizes = {"q": q_size, "k": kv_size, "v": kv_size}
    # In models with post-norms, the norm after attention has the usual name of the pre-MLP norm.
    before_mlp = "pre_feedforward" if config.post_norms else "post_attention"
    tensors: dict[str, Parts | list[Parts]] = {"o": {"self_attn.o_proj.weight": (d, q_size)}}
    if config.latent is not None:
        tensors = _latent_tensors(config, config.latent)
    elif config.packed:
        tensors["qkv"] = {"self_attn.qkv_proj.weight": (q_size + 2 * kv_size, d)}
    else:
        tensors["qkv"] = {f"self_attn.{x}_proj.weight": (n, d) for x, n in qkv_sizes.items()}
    if config.pre_norms:
        tensors["attention_norm"] = {"input_layernorm.weight": (d,)}
        tensors["mlp_norm"] = {f"{before_mlp}_layernorm.weight": (d,)}
    if config.qkv_bias:
        tensors["qkv_bias"] = {f"self_attn.{x}_proj.bias": (n,) for x, n in qkv_sizes.items()}
    if config.sinks:
        tensors["sinks"] = {"self_attn.sinks": (config.num_qo_heads,)}
    if config.o_bias:
        tensors["o_bias"] = {"self_attn.o_proj.bias": (d,)}
    if config.qk_norm != "none":
        for x in "qk":
            size = config.head_dim if config.qk_norm == "per_head" else qkv_sizes[x]
            tensors[f"{x}_norm"] = {f"self_attn.{x}_norm.weight": (size,)}
    if config.post_norms:
        tensors["attention_post_norm"] = {"post_attention_layernorm.weight": (d,)}
        tensors["mlp_post_norm"] = {"post_feedforward_layernorm.weight": (d,)}
    return tensors | _mlp_tensors(config, layer)


def _latent_tensors(config: ModelConfig, latent: Latent) -> dict[str, Parts | list[Parts]]:
    d, heads = config.hidden_size, config.num_qo_heads
    q_size = heads * (latent.nope + latent.rope)
    tensors: dict[str, Parts | list[Parts]] = {
        "kv_a": {"self_attn.kv_a_proj_with_mqa.weight": (latent.kv_rank + latent.rope, d)},
        "kv_a_norm": {"self_attn.kv_a_layernorm.weight": (latent.kv_rank,)},
        "kv_b": {"self_attn.kv_b_proj.weight": (heads * (latent.nope + latent.v), latent.kv_rank)},
        "o": {"self_attn.o_proj.weight": (d, heads * latent.v)},
    }
    if latent.q_rank is None:
        return tensors | {"q_b": {"self_attn.q_proj.weight": (q_size, d)}}
    return tensors | {
        "q_a": {"self_attn.q_a_proj.weight": (latent.q_rank, d)},
        "q_a_norm": {"self_attn.q_a_layernorm.weight": (latent.q_rank,)},
        "q_b": {"self_attn.q_b_proj.weight": (q_size, latent.q_rank)},
    }


def _mlp_tensors(config: ModelConfig, layer: int) -> dict[str, Parts | list[Parts]]:
    d, ff, experts = config.hidden_size, config.intermediate_size, config.experts
    if experts is not None and layer not in experts.dense_layers:
        return _expert_tensors(experts, d)
    if config.packed:
        gate_up: Parts = {"mlp.gate_up_proj.weight": (2 * ff, d)}
    else:
        gate_up = {f"mlp.{x}_proj.weight": (ff, d) for x in ("gate", "up")}
    return {"gate_up": gate_up, "down": {"mlp.down_proj.weight": (d, ff)}}


def _expert_tensors(experts: Experts, d: int) -> dict[str, Parts | list[Parts]]:
    names, ff, count = experts.names, experts.intermediate_size, experts.count
    router: dict[str, Parts | list[Parts]] = {"router": {f"{names.router}.weight": (count, d)}}
    if experts.sigmoid:
        router["router_correction"] = {f"{names.router}.e_score_correction_bias": (count,)}
    if shared := experts.shared_size:
        prefix = "mlp.shared_experts"
        router["shared_gate_up"] = {
            f"{prefix}.{x}_proj.weight": (shared, d) for x in ("gate", "up")
        }
        router["shared_down"] = {f"{prefix}.down_proj.weight": (d, shared)}
    if not experts.stacked:
        return router | {
            "expert_gate_up": [
                {f"{name.format(e)}.weight": (ff, d) for name in names.gate_up}
                for e in range(count)
            ],
            "expert_down": [{f"{names.down.format(e)}.weight": (d, ff)} for e in range(count)],
        }
    (gate_up,), down = names.gate_up, names.down
    return router | {
        "router_bias": {f"{names.router}.bias": (count,)},
        "expert_gate_up": _stack(experts, gate_up, d, 2 * ff),
        "expert_gate_up_bias": {f"{gate_up}_bias": (count, 2 * ff)},
        "expert_down": _stack(experts, down, ff, d),
        "expert_down_bias": {f"{down}_bias": (count, d)},
    }


def _stack(experts: Experts, name: str, inner: int, outer: int) -> Parts:
    if experts.stacked == "plain":
        return {name: (experts.count, inner, outer)}
    blocks = (experts.count, outer, inner // mxfp4.BLOCK)
    return {f"{name}_blocks": (*blocks, mxfp4.BLOCK // 2), f"{name}_scales": blocks}


def file_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Returns every expected tensor of the files with torch's shape; names have no prefix."""
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
    }
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    for i in range(config.num_layers):
        for weight in layer_tensors(config, i).values():
            for parts in weight if isinstance(weight, list) else [weight]:
                shapes |= {f"model.layers.{i}.{name}": shape for name, shape in parts.items()}
    return shapes
