"""A layer for multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2).

The layer guesses the token behind the next one. For token i it reads the model's last hidden state
of token i and the embedding of token i + 1. It is the first of a chain of guesses: the next one has
the layer's own hidden state and the guess. The pages of its model keep the model's hidden states,
so the layer can read a text at any time, also one whose pages another request has filled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_attn.models._config.config import ModelConfig
from jax_attn.models._products.quantized import product
from jax_attn.models._weights.weights import Params


def mtp_config(config: ModelConfig) -> ModelConfig:
    """Returns the config of the first layer for multi-token prediction that a model's files have.

    Its weights have no embedding and no head: they are the model's.

    Raises ValueError: models of this family have no such layers.
    """
    if config.extra_layers:  # DeepSeek, GLM
        prefix = f"model.layers.{config.num_layers}."
        renamed: tuple[tuple[str, str], ...] = (
            ("model.layers.0.", prefix),
            ("model.norm", f"{prefix}shared_head.norm"),
            ("mtp.fc", f"{prefix}eh_proj"),
            ("mtp.pre_fc_norm_embedding", f"{prefix}enorm"),
            ("mtp.pre_fc_norm_hidden", f"{prefix}hnorm"),
        )
    elif config.family.startswith(("qwen3_next", "qwen3_5")):
        renamed = (("model.layers.", "mtp.layers."), ("model.norm", "mtp.norm"))
    else:
        raise ValueError(
            "multi-token prediction: expected a model whose files have layers for it, such as"
            f" Qwen3.5 or DeepSeek V3, got {config.family}."
        )
    experts = config.experts
    return dataclasses.replace(
        config,
        layers=(next(kind for kind in config.layers[::-1] if kind.attention),),
        experts=experts and dataclasses.replace(experts, dense_layers=()),
        extra_layers=0,
        tensor_prefix="",
        renamed=renamed,
        mtp=True,
        keeps_hidden=False,
    )


def joined(
    x: jax.Array,
    hidden: jax.Array,
    params: Params,
    config: ModelConfig,
    norm: Callable[[jax.Array, Params, str, ModelConfig], jax.Array],
) -> jax.Array:
    """Returns the layer's input [n, hidden].

    x: [n, hidden], embeddings. hidden: [n, hidden], states of the tokens before.
    """
    parts = (
        norm(x, params, "mtp_embedding_norm", config),
        norm(hidden.astype(x.dtype), params, "mtp_hidden_norm", config),
    )
    return product(jnp.concatenate(parts, axis=-1), params["mtp_in"])


def keep(
    hidden: jax.Array, k: Any, v: Any, plan: Any, config: ModelConfig, append: Callable[..., Any]
) -> tuple[Any, Any]:
    """Writes hidden states to the last layers of pages, as if they were keys and values.

    hidden: [max_qo_tokens, hidden], after the final norm. k, v: of the first group of pages.
    append: append_kv.
    """
    num_layers = config.num_hidden_layers
    first = config.page_groups[0] - num_layers
    row = config.num_kv_heads * config.head_dim * (1 if v is None else 2)
    padded = jnp.pad(hidden, ((0, 0), (0, num_layers * row - hidden.shape[1])))
    heads = padded.reshape(len(hidden), num_layers, -1, config.num_kv_heads, config.head_dim)
    for i in range(num_layers):
        v_new = None if v is None else heads[:, i, 1]
        k, v = append(k, v, heads[:, i, 0], v_new, plan, layer=first + i)
    return k, v


def kept(
    k_pages: jax.Array, v_pages: jax.Array | None, rows: jax.Array, config: ModelConfig
) -> jax.Array:
    """Returns the hidden states [n, hidden] that a model keeps.

    k_pages, v_pages: the model's. rows: [n] i32, page * page_size + row in the page; clamped.
    config: of the model.
    """
    page, row = jnp.divmod(rows, k_pages.shape[2])
    layers = range(k_pages.shape[0] - config.num_hidden_layers, k_pages.shape[0])
    parts = [
        pages[layer, page, row].reshape(len(rows), -1)
        for layer in layers
        for pages in (k_pages, v_pages)
        if pages is not None
    ]
    return jnp.concatenate(parts, axis=-1)[:, : config.hidden_size]
