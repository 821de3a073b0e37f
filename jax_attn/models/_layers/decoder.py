"""The decoder of all families: a paged forward pass, and a dense one as its oracle."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_attn as ja
from jax_attn import parallel
from jax_attn.models._config.config import LayerKind, ModelConfig
from jax_attn.models._config.rope import rotate
from jax_attn.models._layers import experts, latent
from jax_attn.models._products.panels import Panels
from jax_attn.models._products.quantized import product
from jax_attn.models._weights.weights import Params

Attend = Callable[..., jax.Array]
"""(qkv, sinks, idx, kind) -> o [n, num_qo_heads, head_dim]: rotation and attention of layer `idx`.
qkv: [n, num_qo_heads + 2 * num_kv_heads, head_dim], the heads of q, of k, and of v.
sinks: [num_qo_heads] f32 or None.
With latent attention (projected, weights, idx, kind) -> o [n, num_qo_heads, v]; projected:
latent.Projected, not rotated; weights: of the layer."""


def attention_specs(config: ModelConfig, **kwargs: Any) -> tuple[ja.AttentionSpec, ...]:
    """Returns one spec per window of config.windows; `kwargs` are further fields of AttentionSpec.

    A batch needs one plan per spec, all made from the same lengths and page table.
    """
    return tuple(
        ja.AttentionSpec(
            num_qo_heads=config.num_qo_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim_qk=config.head_dim,
            head_dim_vo=config.latent.kv_rank if config.latent else config.head_dim,
            mla=config.latent is not None,
            sm_scale=config.sm_scale,
            logits_soft_cap=config.attention_soft_cap,
            window_left=-1 if window is None else window - 1,
            **kwargs,
        )
        for window in config.windows
    )


def init_pages(
    config: ModelConfig, specs: tuple[ja.AttentionSpec, ...], num_pages: int
) -> tuple[jax.Array, jax.Array | None]:
    """Returns empty k_pages, v_pages: [num_layers, num_pages, page_size, num_kv_heads, head_dim],
    zeros. Shapes of int8 and mxfp4 are those of AttentionSpec.kv_shapes.

    With latent attention k_pages holds the whole cache, and v_pages is None.
    """
    page_size, dtype = specs[0].page_size, specs[0].dtype_of_kv
    assert page_size is not None
    k_shape, v_shape = specs[0].kv_shapes(config.num_layers, num_pages, page_size)
    return jnp.zeros(k_shape, dtype), None if v_shape is None else jnp.zeros(v_shape, dtype)


def forward(
    params: Params,
    config: ModelConfig,
    tokens: jax.Array,
    positions: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array | None,
    plans: tuple[ja.AttentionPlan, ...] | tuple[parallel.StripedPlan, ...],
    logit_rows: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Runs one step of a batch: appends the tokens to the cache and attends over it.

    Args:
      params: as `load` returns them; their dtype must be that of the plans.
      config: static.
      tokens: [max_qo_tokens] i32. Packed, request after request, by the plan's qo_indptr; values in
        the padding are ignored.
      positions: [max_qo_tokens] i32. Position of each token in its sequence: kv_len - qo_len + i.
      k_pages, v_pages: as `init_pages` makes them. Written in place if donated.
      plans: the batch's plans, one per spec of `attention_specs`. StripedPlans inside shard_map if
        each device has a KV shard of every page.
      logit_rows: [n] i32. The tokens to compute logits for, usually the last of each request.

    Returns:
      logits: [n, vocab_size] f32.
      k_pages, v_pages: with the new tokens.
    """
    if len(plans) != len(config.windows):
        raise ValueError(f"forward: plans: expected {len(config.windows)}, got {len(plans)}.")
    plan_of: dict[int | None, Any] = dict(zip(config.windows, plans, strict=True))
    # The append uses only lengths and pages, so any of the plans will do.
    some_plan: Any = plans[0]
    angles_of = {kind: _angles(kind, positions, config) for kind in config.kinds}
    is_striped = isinstance(some_plan, parallel.StripedPlan)
    append: Any = parallel.append_stripes if is_striped else ja.append_kv
    attention: Any = parallel.attend_stripes if is_striped else ja.attention

    def attend(qkv: jax.Array, sinks: jax.Array | None, idx: int, kind: LayerKind) -> jax.Array:
        nonlocal k_pages, v_pages
        assert v_pages is not None
        if is_striped:
            q, k, v = _rotated_heads(qkv, positions, config, kind)
            k_pages, v_pages = append(k_pages, v_pages, k, v, some_plan, layer=idx)
            return attention(q, k_pages, v_pages, plan_of[kind.window], layer=idx, sinks=sinks)
        # Pass the stacked cache and an index, not a slice: XLA would copy a slice.
        q, k_pages, v_pages = ja.append_rotated(
            qkv.reshape(len(qkv), -1), *angles_of[kind], k_pages, v_pages, some_plan, layer=idx
        )
        return ja.attention(q, k_pages, v_pages, plan_of[kind.window], layer=idx, sinks=sinks)

    def attend_latent(
        projected: latent.Projected, weights: Params, idx: int, kind: LayerKind
    ) -> jax.Array:
        nonlocal k_pages

        def attend_rows(q: jax.Array, rows: jax.Array) -> jax.Array:
            nonlocal k_pages
            k_pages, _ = append(k_pages, None, rows, None, some_plan, layer=idx)
            return attention(q, k_pages, None, plan_of[kind.window], layer=idx)

        return latent.absorbed(projected.rotated(angles_of[kind]), weights, config, attend_rows)

    x = _layers(tokens, params, config, attend_latent if config.latent else attend)
    return _logits(x[logit_rows], params, config), k_pages, v_pages


def project(
    x: jax.Array, weights: Params, positions: jax.Array, config: ModelConfig, kind: LayerKind
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns rotated q, k, v: [n, num_heads, head_dim] from x [n, hidden] and a layer's weights.

    positions: [n] i32. Does not support latent attention.
    """
    h = _rms_norm(x, weights["attention_norm"], config) if config.pre_norms else x
    return _rotated_heads(_qkv(h, weights, config), positions, config, kind)


def layer(
    x: jax.Array,
    weights: Params,
    config: ModelConfig,
    attend: Callable[[jax.Array | None], jax.Array],
) -> jax.Array:
    """Runs a layer: x [n, hidden] -> x. attend(sinks) returns o [n, num_qo_heads, head_dim] for the
    results of `project`."""
    return _layer(x, weights, config, lambda qkv, sinks: attend(sinks))


def final_norm(x: jax.Array, params: Params, config: ModelConfig) -> jax.Array:
    """Applies the final norm: the last layer's x [n, hidden] -> the LM head's input [n, hidden]."""
    return _rms_norm(x, params["final_norm"], config)


def reference_forward(params: Params, config: ModelConfig, tokens: jax.Array) -> jax.Array:
    """Returns logits [len, vocab_size] f32 of one sequence tokens [len] i32, by dense attention."""
    positions = jnp.arange(tokens.shape[0])

    distance = positions[:, None] - positions

    def attend_latent(
        projected: latent.Projected, weights: Params, idx: int, kind: LayerKind
    ) -> jax.Array:
        rotated = projected.rotated(_angles(kind, positions, config))
        q, k, v = latent.expanded(rotated, weights, config)
        return dense(q, k, v, None, kind)

    def attend(qkv: jax.Array, sinks: jax.Array | None, idx: int, kind: LayerKind) -> jax.Array:
        q, k, v = _rotated_heads(qkv, positions, config, kind)
        group_size = config.num_qo_heads // config.num_kv_heads
        k, v = (jnp.repeat(x, group_size, axis=1) for x in (k, v))
        return dense(q, k, v, sinks, kind)

    def dense(
        q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None, kind: LayerKind
    ) -> jax.Array:
        visible = distance >= 0
        if kind.window is not None:
            visible &= distance < kind.window
        scores = jnp.einsum("qhd,khd->hqk", q, k, preferred_element_type=jnp.float32)
        scores = _soft_cap(config.sm_scale * scores, config.attention_soft_cap)
        scores = jnp.where(visible, scores, -jnp.inf)
        if sinks is not None:  # one more logit, without a value
            sinks = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))
            scores = jnp.concatenate([scores, sinks], axis=-1)
        weights = jax.nn.softmax(scores)[..., : len(k)].astype(v.dtype)
        return jnp.einsum("hqk,khd->qhd", weights, v)

    x = _layers(tokens, params, config, attend_latent if config.latent else attend)
    return _logits(x, params, config)


def _layers(tokens: jax.Array, params: Params, config: ModelConfig, attend: Attend) -> jax.Array:
    """Runs all layers and returns x [n, hidden].

    The Python loop is unrolled on purpose. The body of an XLA loop would slice each layer's weights
    out of a stack, and ops that cannot fuse with the slice (the Triton matmuls of decodes) would
    read a copy.
    """
    x = embed(tokens, params, config)
    for idx, (kind, weights) in enumerate(zip(config.layers, params["layers"], strict=True)):
        x = _layer(x, weights, config, partial(attend, idx=idx, kind=kind))
    return x


def _layer(
    x: jax.Array,
    weights: Params,
    config: ModelConfig,
    attend: Attend,
) -> jax.Array:
    """Runs a layer: x [n, hidden] -> x. attend(qkv, sinks) -> o [n, num_qo_heads, head_dim]."""

    def norm(x: jax.Array, name: str, is_on: bool) -> jax.Array:
        return _rms_norm(x, weights[name], config) if is_on else x

    def add(x: jax.Array, h: jax.Array) -> jax.Array:
        return x + (h if config.residual_scale == 1 else h * config.residual_scale)

    h = norm(x, "attention_norm", config.pre_norms)
    if config.latent:
        projected = latent.project(h, weights, config, lambda x, w: _rms_norm(x, w, config))
        o = attend(projected, weights)
    else:
        o = attend(
            _qkv(h, weights, config),
            weights["sinks"].astype(jnp.float32) if config.sinks else None,
        )
    h = _sum(product(o.reshape(len(x), -1), weights["o"]), config)
    if config.o_bias:
        h += weights["o_bias"]
    x = add(x, norm(h, "attention_post_norm", config.post_norms))

    mlp = _experts if "router" in weights else _mlp
    h = mlp(norm(x, "mlp_norm", config.pre_norms), weights, config)
    return add(x, norm(h, "mlp_post_norm", config.post_norms))


def _qkv(x: jax.Array, weights: Params, config: ModelConfig) -> jax.Array:
    """Projects x, after the layer's norm, to [n, num_qo_heads + 2 * num_kv_heads, head_dim]."""
    qkv = product(x, weights["qkv"])
    if config.qkv_bias:
        qkv += weights["qkv_bias"]
    if config.qk_norm == "all_heads":
        sizes = [n * config.head_dim for n in (config.num_qo_heads, config.num_kv_heads)]
        q, k, v = jnp.split(qkv, np.cumsum(sizes), axis=-1)
        names = ("q", q), ("k", k)
        q, k = (_rms_norm(x, weights[f"{n}_norm"], config, config.heads_axis) for n, x in names)
        qkv = jnp.concatenate([q, k, v], axis=-1)
    qkv = qkv.reshape(len(x), -1, config.head_dim)
    if config.qk_norm == "per_head":
        # One kernel for all heads, with v masked out; q, k and v apart would take three kernels.
        head = jnp.arange(qkv.shape[1])[:, None]
        scale = jnp.where(head < config.num_qo_heads, weights["q_norm"], weights["k_norm"])
        is_v = head >= config.num_qo_heads + config.num_kv_heads
        qkv = jnp.where(is_v, qkv, _rms_norm(qkv, scale, config))
    return qkv


def _mlp(x: jax.Array, weights: Params, config: ModelConfig) -> jax.Array:
    gated = _gated(product(x, weights["gate_up"]), config)
    return _sum(product(gated, weights["down"]), config)


def _sum(x: jax.Array, config: ModelConfig) -> jax.Array:
    """Returns the sum of the devices' partial sums."""
    return x if config.heads_axis is None else jax.lax.psum(x, config.heads_axis)


def _gated(gate_up: jax.Array, config: ModelConfig) -> jax.Array:
    """Applies the gated activation to an MLP's first matmul, [n, 2 * size] -> [n, size]."""
    gate, up = jnp.split(gate_up, 2, axis=-1)
    if config.activation == "clamped_swiglu":  # gpt-oss
        limit = config.activation_limit
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        return (up + 1) * gate * jax.nn.sigmoid(1.702 * gate)
    return _ACTIVATIONS[config.activation](gate) * up


def _experts(x: jax.Array, weights: Params, config: ModelConfig) -> jax.Array:
    """Runs the experts: x [n, hidden] -> sum over a token's experts of probability * output.

    Tokens are sorted by expert, so each expert multiplies only its own rows. A device of a mesh has
    a part of the experts; rows of other devices' experts sort last and contribute nothing.
    """
    assert config.experts is not None
    per_token, count = config.experts.per_token, weights["expert_down"].shape[0]
    logits = product(x, weights["router"], jnp.float32)
    if "router_bias" in weights:
        logits += weights["router_bias"].astype(jnp.float32)
    scores, chosen = experts.route(logits, weights.get("router_correction"), config.experts)
    expert = chosen.reshape(-1)
    is_own = None
    if config.heads_axis is not None:
        expert -= count * jax.lax.axis_index(config.heads_axis)
        is_own = (expert >= 0) & (expert < count)
        expert = jnp.where(is_own, expert, count)
        scores = jnp.where(is_own.reshape(scores.shape), scores, 0)
    order = jnp.argsort(expert, stable=True)
    num_rows = jnp.bincount(expert, length=count).astype(jnp.int32)  # only this device's experts

    def of_expert(x: jax.Array, name: str) -> jax.Array:
        y = experts.grouped_matmul(x, weights[name], num_rows)
        if is_own is not None:
            y = jnp.where(is_own[order, None], y, 0)
        bias = weights.get(f"{name}_bias")
        return y if bias is None else y + bias[expert[order]]

    h = _gated(of_expert(x[order // per_token], "expert_gate_up"), config)
    h = of_expert(h, "expert_down")
    by_token = h[jnp.argsort(order)].reshape(len(x), per_token, -1)
    y = jnp.einsum("nkd,nk->nd", by_token, scores.astype(x.dtype))
    if "shared_down" in weights:
        gated = _gated(product(x, weights["shared_gate_up"]), config)
        y += product(gated, weights["shared_down"])
    return _sum(y, config)


def _rotated_heads(
    qkv: jax.Array, positions: jax.Array, config: ModelConfig, kind: LayerKind
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns rotated q, k, v, for attention without append_rotated."""
    q, k, v = jnp.split(qkv, [config.num_qo_heads, config.num_qo_heads + config.num_kv_heads], 1)
    angles = _angles(kind, positions, config)
    return rotate(q, angles), rotate(k, angles), v


def _angles(
    kind: LayerKind, positions: jax.Array, config: ModelConfig
) -> tuple[jax.Array, jax.Array]:
    """Returns cos, sin: [n, head_dim / 2] f32; 1 and 0 in layers without RoPE."""
    head_dim = config.latent.rope if config.latent else config.head_dim
    if kind.rope is None:
        shape = (len(positions), head_dim // 2)
        return jnp.ones(shape, jnp.float32), jnp.zeros(shape, jnp.float32)
    return kind.rope.angles(head_dim, positions)


_ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": jax.nn.gelu}  # jax's gelu is the tanh form


def embed(tokens: jax.Array, params: Params, config: ModelConfig) -> jax.Array:
    """Returns the first layer's input [n, hidden] for tokens [n] i32."""
    table = params["embed"]
    if config.splits_vocabulary:
        row = tokens - len(table) * jax.lax.axis_index(config.heads_axis)
        is_own = (row >= 0) & (row < len(table))
        x = _sum(jnp.where(is_own[:, None], table[jnp.where(is_own, row, 0)], 0), config)
    elif isinstance(table, Panels):
        x = table.columns(tokens)
    else:
        x = table[tokens]
    return x if config.embedding_scale == 1 else x * jnp.asarray(config.embedding_scale, x.dtype)


def _logits(x: jax.Array, params: Params, config: ModelConfig) -> jax.Array:
    x = final_norm(x, params, config)
    head = params["embed" if config.tie_embeddings else "head"]
    if config.tie_embeddings and not isinstance(head, Panels):
        head = head.T
    logits = product(x, head, jnp.float32) * config.logit_scale
    if config.splits_vocabulary:
        logits = jax.lax.all_gather(logits, config.heads_axis, axis=1, tiled=True)
    return _soft_cap(logits, config.logit_soft_cap)


def _soft_cap(x: jax.Array, cap: float) -> jax.Array:
    return cap * jnp.tanh(x / cap) if cap else x


def _rms_norm(
    x: jax.Array, weight: jax.Array, config: ModelConfig, over: str | None = None
) -> jax.Array:
    """RMSNorm. over: the mesh axis over which the last axis of x is split in equal parts."""
    x32 = x.astype(jnp.float32)
    variance = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
    if over is not None:
        variance = jax.lax.pmean(variance, over)
    scale = config.norm_offset + weight.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(variance + config.rms_norm_eps) * scale).astype(x.dtype)
