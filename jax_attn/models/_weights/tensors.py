"""The tensors of a decoder model's files: their names, and their shapes in torch's layout."""

from __future__ import annotations

import re
from typing import TypeAlias

from jax_attn.models._config.config import AltUp, Experts, Latent, LayerKind, ModelConfig
from jax_attn.models._weights import mxfp4, recurrent_tensors

Shape: TypeAlias = tuple[int, ...]

Parts: TypeAlias = dict[str, Shape]
"""Tensors of the files that make one matrix, side by side; a list of them makes a stack."""

LAYER_INPUTS_TABLE = "model.embed_tokens_per_layer.weight"


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, Parts | list[Parts]]:
    """Returns for each weight of a layer its tensors in the files, with torch's shapes.

    A matrix is [out, in] in torch, and [in, out] in Params.
    """

    def renamed(parts: Parts) -> Parts:
        return {in_files(name, config): shape for name, shape in parts.items()}

    return {
        weight: [renamed(each) for each in parts] if isinstance(parts, list) else renamed(parts)
        for weight, parts in _layer_tensors(config, layer).items()
    }


def is_upright(weight: str, ndim: int, config: ModelConfig) -> bool:
    """Whether a weight's tensors in the files have its layout in Params; else they are transposed.

    ndim: of the weight in Params, without the axis of a stack of several tensors.
    """
    if ndim == 3 and weight.startswith("expert_"):
        return config.experts is None or config.experts.stacked != "rows"
    return weight.endswith(("embed", "_bias")) or ndim != 2


def in_files(name: str, config: ModelConfig) -> str:
    """Returns what the files call a tensor of Llama's name."""
    for ours, theirs in config.renamed:
        name = name.replace(ours, theirs)
    return name


def embed_name(config: ModelConfig) -> str:
    return in_files("model.embed_tokens.weight", config)


def head_name(config: ModelConfig) -> str:
    return in_files("lm_head.weight", config)


def outer_tensors(config: ModelConfig) -> dict[str, Parts | list[Parts]]:
    """Returns for each weight outside of the layers its tensors, as `layer_tensors`; names are
    whole. If the head is tied to the embedding, its tensor need not be there. A layer for
    multi-token prediction has the embedding and the head of its model."""
    d = config.hidden_size
    if config.mtp:
        own: dict[str, Parts | list[Parts]] = {
            "mtp_in": {in_files("mtp.fc.weight", config): (d, 2 * d)}
        }
        for weight, name in (
            ("final_norm", "model.norm"),
            ("mtp_embedding_norm", "mtp.pre_fc_norm_embedding"),
            ("mtp_hidden_norm", "mtp.pre_fc_norm_hidden"),
        ):
            own |= _norm_tensors(config, weight, in_files(name, config))
        return own
    table: Shape = config.vocab_size, d
    tensors: dict[str, Parts | list[Parts]] = {
        "embed": {embed_name(config): table},
        "head": {head_name(config): table},
    }
    if config.head_bias:
        tensors["head_bias"] = {in_files("lm_head.bias", config): table[:1]}
    tensors |= _norm_tensors(config, "final_norm", in_files("model.norm", config))
    if (inputs := config.layer_inputs) is not None:
        size = config.num_layers * inputs.size
        tensors |= {
            "layer_inputs_embed": {LAYER_INPUTS_TABLE: (inputs.vocab_size, size)},
            "layer_inputs_projection": {"model.per_layer_model_projection.weight": (size, d)},
            "layer_inputs_norm": {"model.per_layer_projection_norm.weight": (inputs.size,)},
        }
    if config.altup is not None:
        others = range(config.altup.num_inputs - 1)
        for weight, name in (("altup_in", "projections"), ("altup_out", "unembed_projections")):
            tensors[weight] = [{f"model.altup_{name}.{i}.weight": (d, d)} for i in others]
    return tensors


def mtp_prefix(config: ModelConfig) -> str:
    """Returns the beginning of the names of all tensors for multi-token prediction."""
    return in_files("mtp.fc.weight", config).rsplit(".", 2)[0] + "."


def layer_prefix(config: ModelConfig, layer: int) -> str:
    """Returns the beginning of the names of a layer's tensors."""
    return in_files(f"model.layers.{layer}.", config)


def is_of_shared_kv(name: str, config: ModelConfig) -> bool:
    """Whether a tensor is for keys and values of a layer that shares others': of no use."""
    found = re.match(r"(?:model\.)?layers\.(\d+)\.self_attn\.(?:[kv]_proj|[kv]_norm)\.", name)
    if found is None:
        return False
    return any(kind.shares_kv for kind in config.layers[int(found[1]) :][:1])


def _norm_tensors(config: ModelConfig, weight: str, name: str) -> dict[str, Parts]:
    shape = (config.hidden_size,)
    tensors: dict[str, Parts] = {weight: {f"{name}.weight": shape}}
    if config.norm_bias:
        tensors[f"{weight}_bias"] = {f"{name}.bias": shape}
    return tensors


def _layer_tensors(config: ModelConfig, layer: int) -> dict[str, Parts | list[Parts]]:
    kind = config.layers[layer]
    config, d = config.of(kind), config.hidden_size
    tensors: dict[str, Parts | list[Parts]] = {}
    if kind.recurrent is not None:
        tensors |= recurrent_tensors.of(kind.recurrent, d)
    if kind.attention:
        tensors |= _attention_tensors(config, kind)
    # The norm after attention may have the usual name of the pre-MLP norm.
    after_attention, after_mlp = config.post_norm_names
    post_norms = config.post_norms and kind.attention
    is_taken = post_norms and after_attention == "post_attention_layernorm"
    before_mlp = "pre_feedforward" if is_taken else "post_attention"
    has_mixer = bool(tensors)
    pre_norms = config.pre_norms or not kind.attention
    if pre_norms and has_mixer:
        tensors |= _norm_tensors(config, "attention_norm", "input_layernorm")
    if pre_norms and kind.mlp and config.parallel != "same_norm":
        tensors |= _norm_tensors(config, "mlp_norm", f"{before_mlp}_layernorm")
    if post_norms:
        tensors |= _norm_tensors(config, "attention_post_norm", after_attention)
        tensors |= _norm_tensors(config, "mlp_post_norm", after_mlp)
    if (inputs := config.layer_inputs) is not None:
        tensors["layer_input_gate"] = {"per_layer_input_gate.weight": (inputs.size, d)}
        tensors["layer_input_projection"] = {"per_layer_projection.weight": (d, inputs.size)}
        tensors["layer_input_norm"] = {"post_per_layer_input_norm.weight": (d,)}
    if config.altup is not None:
        tensors |= _altup_tensors(config.altup, d)
    if config.layer_scales:
        tensors["layer_scale"] = {"layer_scalar": (1,)}
    return tensors | (_mlp_tensors(config, layer) if kind.mlp else {})


def _attention_tensors(config: ModelConfig, kind: LayerKind) -> dict[str, Parts | list[Parts]]:
    d = config.hidden_size
    if config.latent is not None:
        return _latent_tensors(config, config.latent)
    q_size = config.num_qo_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    # A gate's columns are beside those of q, head by head.
    qkv_sizes = {"q": q_size * (1 + config.attention_gate)}
    if not kind.shares_kv:
        qkv_sizes |= {"k": kv_size} if kind.values_are_keys else {"k": kv_size, "v": kv_size}
    projections = qkv_sizes
    if {"qkv", "qkv_by_head"} & {*config.packed}:
        projections = {"qkv": q_size + 2 * kv_size}
    tensors: dict[str, Parts | list[Parts]] = {
        "o": {"self_attn.o_proj.weight": (d, q_size)},
        "qkv": {f"self_attn.{x}_proj.weight": (n, d) for x, n in projections.items()},
    }
    if config.qkv_bias:
        tensors["qkv_bias"] = {f"self_attn.{x}_proj.bias": (n,) for x, n in projections.items()}
    if config.sinks:
        tensors["sinks"] = {"self_attn.sinks": (config.num_qo_heads,)}
    if config.o_bias:
        tensors["o_bias"] = {"self_attn.o_proj.bias": (d,)}
    if config.qk_norm != "none":
        for x in "q" if kind.shares_kv else "qk":
            size, name = config.head_dim, f"self_attn.{x}_norm"
            parts: Parts = {f"{name}.weight": (size,)}
            if config.qk_norm == "all_heads":
                parts = {f"{name}.weight": (qkv_sizes[x],)}
            elif "qk_norm" in config.packed:
                parts = {f"{name}.weight": (qkv_sizes[x] // size, size)}
            elif config.qk_norm == "each_head":
                num_heads = qkv_sizes[x] // size
                parts = {f"{name}.{i}.weight": (size,) for i in range(num_heads)}
            tensors[f"{x}_norm"] = parts
    return tensors


def _altup_tensors(sizes: AltUp, d: int) -> dict[str, Parts | list[Parts]]:
    n = sizes.num_inputs
    return {
        "altup_router": {"altup.modality_router.weight": (n, d)},
        "altup_router_norm": {"altup.router_norm.weight": (d,)},
        "altup_prediction": {"altup.prediction_coefs.weight": (n * n, n)},
        "altup_correction": {"altup.correction_coefs.weight": (n, n)},
        "altup_scale": {"altup.correct_output_scale": (d,)},
        "laurel_left": {"laurel.linear_left.weight": (sizes.laurel_rank, d)},
        "laurel_right": {"laurel.linear_right.weight": (d, sizes.laurel_rank)},
        "laurel_norm": {"laurel.post_laurel_norm.weight": (d,)},
    }


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
    of_experts: dict[str, Parts | list[Parts]] = {}
    if experts is not None and layer not in experts.dense_layers:
        of_experts = _expert_tensors(config, experts)
        if not experts.beside_mlp:
            return of_experts
    inner = _inner_sizes(config, ff)
    tensors = of_experts | {
        "gate_up": {f"mlp.{x}_proj.weight": (n, d) for x, n in inner.items()},
        "down": {"mlp.down_proj.weight": (d, ff)},
    }
    if config.activation == "xielu":
        shapes: dict[str, Shape] = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}
        tensors["xielu"] = {f"mlp.act_fn.{x}": shape for x, shape in shapes.items()}
    if config.mlp_bias:
        tensors["gate_up_bias"] = {f"mlp.{x}_proj.bias": (n,) for x, n in inner.items()}
        tensors["down_bias"] = {"mlp.down_proj.bias": (d,)}
    return tensors


def _inner_sizes(config: ModelConfig, size: int) -> dict[str, int]:
    """The outputs of the matrices before an MLP's activation, by name."""
    if "gate_up" in config.packed:
        return {"gate_up": 2 * size}
    return dict.fromkeys(("gate", "up") if config.gated else ("up",), size)


def _expert_tensors(config: ModelConfig, experts: Experts) -> dict[str, Parts | list[Parts]]:
    names, ff, count = experts.names, experts.intermediate_size, experts.count
    d = config.hidden_size
    router: dict[str, Parts | list[Parts]] = {"router": {f"{names.router}.weight": (count, d)}}
    if experts.sigmoid or experts.has_correction:
        shape = (1, count) if names.correction_is_row else (count,)
        router["router_correction"] = {names.correction: shape}
    if shared := experts.shared_size:
        prefix = names.shared
        router["shared_gate_up"] = {
            f"{prefix}.{x}_proj.weight": (n, d) for x, n in _inner_sizes(config, shared).items()
        }
        router["shared_down"] = {f"{prefix}.down_proj.weight": (d, shared)}
        if experts.shared_gate:
            router["shared_gate"] = {f"{prefix}_gate.weight": (1, d)}
    if size := experts.latent_size:
        inner, outer = names.latent
        router["latent_in"] = {f"{inner}.weight": (size, d)}
        router["latent_out"] = {f"{outer}.weight": (d, size)}
        d = size
    if not experts.stacked:
        return router | {
            "expert_gate_up": [
                {f"{name.format(e)}.weight": (ff, d) for name in names.gate_up}
                for e in range(count)
            ],
            "expert_down": [{f"{names.down.format(e)}.weight": (d, ff)} for e in range(count)],
        }
    (gate_up,), down = names.gate_up, names.down
    if experts.stacked == "columns":
        return router | {
            "expert_gate_up": {gate_up: (count, d, 2 * ff)},
            "expert_down": {down: (count, ff, d)},
        }
    if experts.beside_mlp:
        router |= {
            "router_norm": {"router.scale": (d,)},
            "expert_scale": {"router.per_expert_scale": (count,)},
            "expert_norm": {"pre_feedforward_layernorm_2.weight": (d,)},
            "expert_post_norm": {"post_feedforward_layernorm_2.weight": (d,)},
            "beside_post_norm": {"post_feedforward_layernorm_1.weight": (d,)},
        }
    if experts.stacked == "rows":
        return router | {
            "expert_gate_up": {gate_up: (count, 2 * ff, d)},
            "expert_down": {down: (count, d, ff)},
        }
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
    shapes: dict[str, Shape] = {}
    for name, outer in outer_tensors(config).items():
        if name != "head" or not config.tie_embeddings:
            for parts in outer if isinstance(outer, list) else [outer]:
                shapes |= parts
    for i in range(config.num_layers):
        for weight in layer_tensors(config, i).values():
            for parts in weight if isinstance(weight, list) else [weight]:
                shapes |= {layer_prefix(config, i) + x: shape for x, shape in parts.items()}
    return shapes
