"""The decoder of all families: a paged forward pass, and a dense one as its oracle."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_attn as ja
from jax_attn import parallel
from jax_attn.models._config.activations import ACTIVATIONS
from jax_attn.models._config.config import AttentionKind, Chunk, KvPlace, LayerKind, ModelConfig
from jax_attn.models._config.rope import rotate
from jax_attn.models._layers import (
    altup,
    expert_exchange,
    experts,
    latent,
    mixers,
    mtp,
    recurrence,
)
from jax_attn.models._layers.lora import Adapters, adapted
from jax_attn.models._layers.selected_pages import PageSelection
from jax_attn.models._products.panels import Panels
from jax_attn.models._products.quantized import product
from jax_attn.models._weights.weights import Params

Attend = Callable[..., jax.Array]
"""(qkv, weights, place, kind) -> o [n, num_qo_heads, head_dim]: rotation and attention of a layer.
qkv: [n, num_qo_heads + 2 * num_kv_heads, head_dim], the heads of q, of k, and of v; those of q
alone if the layer shares keys and values. weights: of the layer.
With latent attention (projected, weights, place, kind) -> o [n, num_qo_heads, v]; projected:
latent.Projected, not rotated."""


Total: TypeAlias = Callable[[jax.Array, ModelConfig], jax.Array]
"""(a device's partial sums, config) -> what a layer goes on with: `_sum`, or `_part`."""


class PictureRows(NamedTuple):
    """What the tokens of a step that show pictures have instead of an embedding.

    features: [n, 1 + depth, hidden]. The embedding of each token, and what is added to its row
      after each of the first `depth` layers; values of other tokens are ignored.
    ends: [n] i32. The position behind the picture that a token shows; 0 for other tokens.
    """

    features: Any
    ends: Any


Pages: TypeAlias = jax.Array | tuple[jax.Array, ...]
"""[num_layers, num_pages, page_size, num_kv_heads, head_dim]; a tuple of such arrays, one for each
of config.page_groups, if there are several. A page has one number in all of them."""


def attention_specs(
    config: ModelConfig, *, longest_picture: int = 0, **kwargs: Any
) -> tuple[ja.AttentionSpec, ...]:
    """Returns a spec for each of config.attention_kinds; `kwargs` are further fields of
    AttentionSpec.

    A batch needs one plan per spec, all made from the same lengths and page table.

    longest_picture: tokens of the longest picture of steps with `PictureRows`, for models whose
      pictures' tokens see each other; 0: there are no pictures.
    """
    spec = ja.AttentionSpec(**_spec_fields(config), **kwargs)
    return _of_kinds(spec, config, longest_picture)


def train_specs(config: ModelConfig, **kwargs: Any) -> tuple[ja.AttentionSpec, ...]:
    """`attention_specs` for `train_forward`, which expands latent attention to heads of its own."""
    fields = _spec_fields(config)
    if (sizes := config.latent) is not None:
        fields |= {
            "num_kv_heads": config.num_qo_heads,
            "head_dim_qk": _in_eights(sizes.nope + sizes.rope),
            "head_dim_vo": _in_eights(sizes.v),
            "mla": False,
        }
    return _of_kinds(ja.AttentionSpec(**fields, **kwargs), config)


def _in_eights(head_dim: int) -> int:
    """The head dimension that kernels take: zeros beyond change no product."""
    return -(-head_dim // 8) * 8


def init_pages(
    config: ModelConfig, specs: tuple[ja.AttentionSpec, ...], num_pages: int
) -> tuple[Pages, Pages | None]:
    """Returns empty k_pages, v_pages, zeros: see `Pages`. num_layers: those with keys and values of
    their own. Shapes of int8 and mxfp4 are those of AttentionSpec.kv_shapes.

    With latent attention k_pages holds the whole cache, and v_pages is None.
    """
    num_layers = config.page_groups
    if len(num_layers) == 1:
        return specs[0].empty_pages(num_pages, *num_layers)
    made = [
        specs[i].empty_pages(num_pages, n)
        for i, n in zip(_first_of_groups(config), num_layers, strict=True)
    ]
    k_pages, v_pages = zip(*made, strict=True)
    return k_pages, v_pages


def _first_of_groups(config: ModelConfig) -> list[int]:
    """For each group of pages, the first of config.attention_kinds that has its heads."""
    heads = [kind.heads for kind in config.attention_kinds]
    return [heads.index(each) for each in dict.fromkeys(heads)]


class FixedBatch(NamedTuple):
    """Everything static that `forward` needs for a batch of fixed size.

    specs: as of `attention_specs`. pages: as of `init_pages`. page_table: page_indptr and
    page_indices, for `jax_attn.plan`.
    """

    specs: tuple[ja.AttentionSpec, ...]
    pages: tuple[Pages, Pages | None]
    page_table: tuple[np.ndarray, np.ndarray]


def fixed_batch(config: ModelConfig, *, longest_picture: int = 0, **kwargs: Any) -> FixedBatch:
    """Returns specs, pages and page table for a batch of fixed size, as `jax_attn.fixed_batch`.

    longest_picture: see `attention_specs`. kwargs: batch_size and max_kv_len, and further fields of
      AttentionSpec, such as dtype.
    """
    num_layers = config.page_groups
    batch = ja.fixed_batch(**_spec_fields(config), num_layers=num_layers[0], **kwargs)
    specs = _of_kinds(batch.spec, config, longest_picture)
    pages: tuple[Pages, Pages | None] = batch.pages
    if len(num_layers) > 1:
        pages = init_pages(config, specs, len(batch.page_table[1]))
    return FixedBatch(specs, pages, batch.page_table)


def _spec_fields(config: ModelConfig) -> dict[str, Any]:
    return {
        "num_qo_heads": config.num_qo_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim_qk": config.head_dim,
        "head_dim_vo": config.latent.kv_rank if config.latent else config.head_dim,
        "mla": config.latent is not None,
        "sm_scale": config.sm_scale,
        "logits_soft_cap": config.attention_soft_cap,
    }


def _of_kinds(
    spec: ja.AttentionSpec, config: ModelConfig, longest_picture: int = 0
) -> tuple[ja.AttentionSpec, ...]:
    """Returns a spec for each of config.attention_kinds from one for the heads of the config."""

    def make(kind: AttentionKind) -> ja.AttentionSpec:
        own: dict[str, Any] = {}
        if isinstance(kind.window, Chunk):
            own = {
                "window_left": kind.window.length - 1,
                "variant": _in_one_chunk(kind.window.length),
                "share_prefixes": False,  # the mask depends on the position of a query
            }
        elif kind.window is not None:
            own = {"window_left": kind.window - 1}
        if kind.sees_pictures and longest_picture:
            own |= {
                "causal": False,
                "window_right": longest_picture - 1,
                "variant": _up_to_last(),
                "share_prefixes": False,  # the mask depends on the row of a query
            }
        if kind.heads != (config.num_kv_heads, config.head_dim):
            own |= {"num_kv_heads": kind.num_kv_heads}
            own |= dict.fromkeys(("head_dim_qk", "head_dim_vo"), kind.head_dim)
        return dataclasses.replace(spec, **own) if own else spec

    return tuple(map(make, config.attention_kinds))


@cache
def _in_one_chunk(length: int) -> ja.Variant:
    return ja.Variant(mask=lambda at: at.q_pos // length == at.kv_pos // length)


@cache
def _up_to_last() -> ja.Variant:
    """Each row of q sees keys up to a position of its own."""
    return ja.Variant(
        mask=lambda at, last: at.kv_pos <= last[at.q_row], operands={"last": np.zeros(1, np.int32)}
    )


def forward(
    params: Params,
    config: ModelConfig,
    tokens: jax.Array,
    positions: jax.Array,
    k_pages: Pages,
    v_pages: Pages | None,
    plans: tuple[ja.AttentionPlan, ...] | tuple[parallel.KvShardPlan, ...],
    logit_rows: jax.Array,
    adapters: Adapters | None = None,
    states: recurrence.States | None = None,
    state_plan: ja.StatePlan | None = None,
    pictures: PictureRows | None = None,
    hidden: jax.Array | None = None,
    selection: PageSelection | None = None,
) -> tuple[Any, ...]:
    """Runs one step of a batch: appends the tokens to the cache and attends over it.

    Args:
      params: as `load` returns them; their dtype must be that of the plans.
      config: static.
      tokens: [max_qo_tokens] i32. Packed, request after request, by the plan's qo_indptr; values in
        the padding are ignored.
      positions: [max_qo_tokens] i32. Position of each token in its sequence: kv_len - qo_len + i.
        Or [3, max_qo_tokens] with pictures, see Rope.sections and `picture_positions`.
      k_pages, v_pages: as `init_pages` makes them. Written in place if donated.
      plans: the batch's plans, one per spec of `attention_specs`. KvShardPlans inside shard_map if
        each device has a KV shard of every page.
      logit_rows: [n] i32. The tokens to compute logits for, usually the last of each request.
      adapters: of the tokens; None: no token has one.
      states, state_plan: of models with recurrent layers: as `init_states` makes them, and a plan
        of `state_spec`. Written in place if donated.
      pictures: rows of tokens that show pictures, in the order of `tokens`; None: no token does.
      hidden: [max_qo_tokens, hidden]. With a result of `mtp_config`: the last hidden states of the
        tokens before `tokens`, whose positions and places in the cache they have; params also has
        the model's embedding, and its head if there is one.
      selection: of the pages that rows read; None: rows read all that the plans have. For models
        without `why_not_kept`. Not an argument of jit: make it inside.

    Returns:
      logits: [n, vocab_size] f32.
      k_pages, v_pages: with the new tokens.
      states: with the new states, if the model has recurrent layers.
      hidden: [n, hidden], with a result of `mtp_config`: the layer's own.
    """
    if config.mtp != (hidden is not None):
        raise ValueError(
            f"forward: hidden: expected {'states' if config.mtp else 'None'}, as config is"
            f" {'' if config.mtp else 'not '}one for multi-token prediction."
        )
    has_states = config.recurrent is not None
    if has_states != (states is not None) or has_states != (state_plan is not None):
        raise ValueError(
            f"forward: states, state_plan: expected {'both' if has_states else 'none'}, as"
            f" {config.family} has {'' if has_states else 'no '}recurrent layers."
        )
    kinds = config.attention_kinds
    if not isinstance(plans, (tuple, list)) or len(plans) != len(kinds):
        got = len(plans) if isinstance(plans, (tuple, list)) else type(plans).__name__
        raise ValueError(
            f"forward: plans: expected {len(kinds)}, a tuple with one for each spec of"
            f" attention_specs, got {got}."
        )
    plan_of: dict[AttentionKind, Any] = dict(zip(kinds, plans, strict=True))
    # The append uses only lengths, pages and heads, so any plan with a group's heads will do.
    some_plans: list[Any] = [plans[i] for i in _first_of_groups(config)]
    k_groups, v_groups = (
        _groups(x, name, config) for x, name in ((k_pages, "k_pages"), (v_pages, "v_pages"))
    )
    angles_of = {kind: _angles(kind, positions, config) for kind in config.kinds if kind.attention}
    is_sharded = isinstance(plans[0], parallel.KvShardPlan)
    append: Any = parallel.append_kv_shards if is_sharded else ja.append_kv
    attention: Any = parallel.attend_kv_shards if is_sharded else ja.attention

    def attend(qkv: jax.Array, weights: Params, place: KvPlace, kind: LayerKind) -> jax.Array:
        group, idx = place
        some_plan, plan = some_plans[group], plan_of[config.attention_kind(kind)]
        k, v = k_groups[group], v_groups[group]
        if kind.shares_kv:
            q = rotate(_at_temperature(qkv, positions, config, kind), angles_of[kind])
        elif is_sharded or not _rotates_in_append(config, kind):
            q, *new = _rotated_heads(qkv, weights, positions, config, kind)
            k, v = append(k, v, *new, some_plan, layer=idx)
        else:
            qkv = _at_temperature(qkv, positions, config, kind)
            # Pass the stacked cache and an index, not a slice: XLA would copy a slice.
            q, k, v = ja.append_rotated(
                qkv.reshape(len(qkv), -1), *angles_of[kind], k, v, some_plan, layer=idx
            )
        k_groups[group], v_groups[group] = k, v
        if selection is not None:
            plan = selection.plan(idx, q, k, plan)
        seen = {}
        if kind.sees_pictures and pictures is not None:
            seen = {"variant_operands": {"last": jnp.maximum(positions, pictures.ends - 1)}}
        return attention(q, k, v, plan, layer=idx, sinks=_sinks(weights, config), **seen)

    def attend_latent(
        projected: latent.Projected, weights: Params, place: KvPlace, kind: LayerKind
    ) -> jax.Array:
        group, idx = place

        def attend_rows(q: jax.Array, rows: jax.Array) -> jax.Array:
            k, _ = append(k_groups[group], None, rows, None, some_plans[group], layer=idx)
            k_groups[group] = k
            return attention(q, k, None, plan_of[config.attention_kind(kind)], layer=idx)

        return latent.absorbed(projected.rotated(angles_of[kind]), weights, config, attend_rows)

    paged = None
    if states is not None and state_plan is not None:
        paged = recurrence.Paged(states, state_plan)
    attend_any = attend_latent if config.latent else attend
    num_tokens = plans[0].nnz_qo if isinstance(plans[0], ja.AttentionPlan) else None
    x = _layers(tokens, params, config, attend_any, adapters, paged, pictures, num_tokens, hidden)
    logits = _logits(x[logit_rows], params, config)
    more: tuple[Any, ...] = () if paged is None else (paged.states,)
    if config.mtp:
        more = (final_norm(x[logit_rows], params, config),)
    if config.keeps_hidden:
        normed = final_norm(x, params, config)
        k_groups[0], v_groups[0] = mtp.keep(
            normed, k_groups[0], v_groups[0], some_plans[0], config, append
        )
    new_pages = (tuple(x) if len(x) > 1 else x[0] for x in (k_groups, v_groups))
    return (logits, *new_pages, *more)


def _groups(pages: Pages | None, name: str, config: ModelConfig) -> list[Any]:
    """Returns the arrays of the groups of pages: [None] for those that latent attention lacks."""
    groups = [*pages] if isinstance(pages, (tuple, list)) else [pages]
    if len(groups) != (expected := len(config.page_groups)):
        raise ValueError(
            f"forward: {name}: expected {expected} arrays, as init_pages makes them for"
            f" {config.family}, got {len(groups)}."
        )
    return groups


def state_spec(
    config: ModelConfig, *, dtype: jax.typing.DTypeLike, **kwargs: Any
) -> ja.StateSpec | None:
    """Returns the spec of a batch over states of the recurrent layers; None: there are none.

    kwargs: max_tokens, max_batch, num_slots, and further fields of StateSpec.
    """
    sizes = config.recurrent
    if sizes is None:
        return None
    if sizes.rule is None:
        return ja.StateSpec(**kwargs)
    return ja.LinearAttentionSpec(**dataclasses.asdict(sizes.rule), dtype=dtype, **kwargs)


def init_states(
    config: ModelConfig, num_slots: int, dtype: jax.typing.DTypeLike
) -> recurrence.States | None:
    """Returns empty states of the recurrent layers; None: the model has none.

    dtype: of the activations. Recurrent states are float32.
    """
    sizes = config.recurrent
    if sizes is None:
        return None
    lead = config.num_recurrent_layers, num_slots
    conv = recurrent = None
    if sizes.conv_shape is not None:
        conv = jnp.zeros((*lead, *sizes.conv_shape), dtype)
    if sizes.rule is not None:
        recurrent = jnp.zeros((*lead, *sizes.rule.state_shape), jnp.float32)
    return recurrence.States(conv, recurrent)


def train_forward(
    params: Params,
    config: ModelConfig,
    tokens: jax.Array,
    positions: jax.Array,
    plans: tuple[ja.AttentionPlan, ...],
    logit_rows: jax.Array,
    state_plans: tuple[ja.StatePlan, ...] = (),
) -> jax.Array:
    """`forward` for training: differentiable in `params`, without a cache.

    The keys and values of the batch's own tokens are the pages: page i has rows i * page_size to
    (i + 1) * page_size. So the page tables of several requests can begin with the pages of one
    prompt, which is then computed once, forward and backward.

    Args:
      params: not quantized. Those of `pack_params`, called in the differentiated function, have the
        products of an engine on CPUs, and so its bits (docs/rl.md).
      config: static.
      tokens: [num_pages * page_size] i32. A request's tokens begin at a page; values in the padding
        are ignored, but must be tokens.
      positions: [num_pages * page_size] i32. Position of each token in its sequence.
      plans: one for each spec of `train_specs`. Requests have the rows of their own pages.
      logit_rows: [n] i32. The tokens to compute logits for.
      state_plans: of models with recurrent layers: plans of `state_spec` for consecutive parts of
        the tokens, max_tokens each, with one number of slots. A plan's requests have whole pages,
        padding included. States are zeros at first; a plan may read slots that an earlier one
        writes: the first has the prompts, the second the answers that share their pages.

    Returns logits [n, vocab_size] f32.

    Raises:
      ValueError: plans for other windows or another attention, state plans for other tokens, or
        tokens that do not fill pages.
    """
    waves = _waves(config, len(tokens), state_plans)
    kinds = config.attention_kinds
    if len(plans) != len(kinds):
        raise ValueError(f"train_forward: plans: expected {len(kinds)}, got {len(plans)}.")
    page_size = plans[0].spec.page_size
    if page_size is None or len(tokens) % page_size:
        raise ValueError(
            "train_forward: tokens: expected a multiple of the plans' page size"
            f" {page_size}, got {len(tokens)}."
        )
    if plans[0].spec.mla:
        raise ValueError(
            "train_forward: plans: expected those of train_specs, got latent attention, which has"
            " no gradient."
        )
    plan_of = dict(zip(kinds, plans, strict=True))
    kept: Kept = {}

    def attend(qkv: jax.Array, weights: Params, place: KvPlace, kind: LayerKind) -> jax.Array:
        if _rotates_in_append(config, kind):
            qkv = _at_temperature(qkv, positions, config, kind)
            plan = plan_of[config.attention_kind(kind)]
            whole = _rotated_by_append(qkv, *_angles(kind, positions, config), plan)
            kept[place] = whole[1:]
        else:
            whole = _whole_heads(qkv, weights, positions, config, kind, place, kept)
        return heads(*whole, _sinks(weights, config), kind)

    def attend_latent(
        projected: latent.Projected, weights: Params, place: KvPlace, kind: LayerKind
    ) -> jax.Array:
        rotated = projected.rotated(_angles(kind, positions, config))
        q, k, v = latent.expanded(rotated, weights, config)
        own = v.shape[-1]
        q, k, v = (
            jnp.pad(x, ((0, 0), (0, 0), (0, _in_eights(x.shape[-1]) - x.shape[-1])))
            for x in (q, k, v)
        )
        return heads(q, k, v, None, kind)[..., :own]

    def heads(
        q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None, kind: LayerKind
    ) -> jax.Array:
        k, v = (x.reshape(-1, page_size, *x.shape[1:]) for x in (k, v))
        return ja.attention(q, k, v, plan_of[config.attention_kind(kind)], sinks=sinks)

    attend_any = attend_latent if config.latent else attend
    x = _layers(tokens, params, config, attend_any, states=waves)
    return _logits(x[logit_rows], params, config)


def _waves(
    config: ModelConfig, num_tokens: int, plans: tuple[ja.StatePlan, ...]
) -> recurrence.InWaves | None:
    """The recurrence of `train_forward`; None: the model has none. Raises ValueError."""
    sizes, found = config.recurrent, [plan.spec.max_tokens for plan in plans]
    if sizes is None and not plans:
        return None
    expected = "none" if sizes is None else f"plans of {num_tokens} tokens together"
    if sizes is None or sum(found) != num_tokens or not plans:
        raise ValueError(
            f"train_forward: state_plans: expected {expected}, as {config.family} has"
            f" {'no ' if sizes is None else ''}recurrent layers, got plans of {found}."
        )
    slots = {plan.spec.num_slots for plan in plans}
    if len(slots) > 1:
        raise ValueError(
            f"train_forward: state_plans: expected one num_slots, got {sorted(slots)}."
        )
    return recurrence.InWaves(sizes, plans)


def project(
    x: jax.Array, weights: Params, positions: jax.Array, config: ModelConfig, kind: LayerKind
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns rotated q, k, v: [n, num_heads, head_dim] from x [n, hidden] and a layer's weights.

    positions: [n] i32. Does not support latent attention.
    """
    h = _norm(x, weights, "attention_norm", config) if config.pre_norms else x
    return _rotated_heads(_qkv(h, weights, config, kind)[0], weights, positions, config, kind)


def layer(
    x: jax.Array,
    weights: Params,
    config: ModelConfig,
    kind: LayerKind,
    attend: Callable[[jax.Array | None], jax.Array],
) -> jax.Array:
    """Runs a layer: x [n, hidden] -> x. attend(sinks) returns o [n, num_qo_heads, head_dim] for the
    results of `project`."""
    return _layer(x, weights, config, kind, lambda qkv, weights: attend(_sinks(weights, config)))


def final_norm(x: jax.Array, params: Params, config: ModelConfig) -> jax.Array:
    """Applies the final norm: the last layer's x [n, hidden] -> the LM head's input [n, hidden]."""
    return _norm(x, params, "final_norm", config)


def reference_forward(params: Params, config: ModelConfig, tokens: jax.Array) -> jax.Array:
    """Returns logits [len, vocab_size] f32 of one sequence tokens [len] i32, by dense attention."""
    positions = jnp.arange(tokens.shape[0])

    distance = positions[:, None] - positions[None]
    kept: Kept = {}

    def attend_latent(
        projected: latent.Projected, weights: Params, place: KvPlace, kind: LayerKind
    ) -> jax.Array:
        rotated = projected.rotated(_angles(kind, positions, config))
        q, k, v = latent.expanded(rotated, weights, config)
        return dense(q, k, v, None, kind)

    def attend(qkv: jax.Array, weights: Params, place: KvPlace, kind: LayerKind) -> jax.Array:
        q, k, v = _whole_heads(qkv, weights, positions, config, kind, place, kept)
        k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
        return dense(q, k, v, _sinks(weights, config), kind)

    def dense(
        q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None, kind: LayerKind
    ) -> jax.Array:
        visible = distance >= 0
        if isinstance(kind.window, Chunk):
            chunks = positions // kind.window.length
            visible &= chunks[:, None] == chunks[None]
        elif kind.window is not None:
            visible &= distance < kind.window
        scores = jnp.einsum("qhd,khd->hqk", q, k, preferred_element_type=jnp.float32)
        scores = _soft_cap(config.sm_scale * scores, config.attention_soft_cap)
        scores = jnp.where(visible, scores, -jnp.inf)
        if sinks is not None:  # one more logit, without a value
            sinks = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))
            scores = jnp.concatenate([scores, sinks], axis=-1)
        weights = jax.nn.softmax(scores)[..., : len(k)].astype(v.dtype)
        return jnp.einsum("hqk,khd->qhd", weights, v)

    alone = None if config.recurrent is None else recurrence.TokenByToken(config.recurrent)
    attend_any = attend_latent if config.latent else attend
    x = _layers(tokens, params, config, attend_any, states=alone)
    return _logits(x, params, config)


def _layers(
    tokens: jax.Array,
    params: Params,
    config: ModelConfig,
    attend: Attend,
    adapters: Adapters | None = None,
    states: recurrence.Recurrence | None = None,
    pictures: PictureRows | None = None,
    num_tokens: jax.Array | None = None,
    hidden: jax.Array | None = None,
) -> jax.Array:
    """Runs all layers and returns x [n, hidden].

    attend: with the place of a layer's keys and values. states: of recurrent layers.
    pictures, hidden: see `forward`. num_tokens: see `_experts`.

    The Python loop is unrolled on purpose. The body of an XLA loop would slice each layer's weights
    out of a stack, and ops that cannot fuse with the slice (the Triton matmuls of decodes) would
    read a copy.
    """
    if config.placeholders:
        is_placeholder = jnp.isin(tokens, jnp.array(config.placeholders))
        tokens = jnp.where(is_placeholder, config.pad_token, tokens)
    x = embed(tokens, params, config)
    if hidden is not None:
        x = mtp.joined(x, hidden, params, config, _norm)
    features: list[jax.Array] = []
    if pictures is not None:
        is_picture = pictures.ends[:, None] > 0
        rows, *features = pictures.features.astype(x.dtype).swapaxes(0, 1)
        x = jnp.where(is_picture, rows, x)
    inputs = _layer_inputs(tokens, x, params, config)
    if config.altup is not None:
        x = altup.expand(x, params["altup_in"])
    num_recurrent = 0
    is_fused = pictures is None and _norms_follow_sums(config)
    normed = None  # x after the next layer's first norm, if the layer before computed it
    layers = zip(config.layers, config.kv_places, params["layers"], strict=True)
    for idx, (kind, place, own) in enumerate(layers):
        weights = adapted(own, adapters, idx, config)
        attend_here = mix = None
        if place is not None:
            attend_here = partial(attend, place=place, kind=kind)
        if kind.recurrent is not None:
            assert states is not None
            states.index = num_recurrent
            num_recurrent += 1
            mix = mixers.of(kind.recurrent, config, states)
        if is_fused:
            assert attend_here is not None
            following = [layer["attention_norm"] for layer in params["layers"][idx + 1 : idx + 2]]
            x, normed = _layer_of_sums(
                x, normed, weights, following, config, kind, attend_here, num_tokens
            )
            continue
        run = partial(
            _layer,
            weights=weights,
            config=config,
            kind=kind,
            attend=attend_here,
            mix=mix,
            num_tokens=num_tokens,
        )
        x = _with_own_input(x, None if inputs is None else inputs[:, idx], weights, config, run)
        if idx < len(features):
            x = jnp.where(is_picture, x + features[idx], x)
    return x if config.altup is None else altup.merge(x, params["altup_out"])


def _norms_follow_sums(config: ModelConfig) -> bool:
    """Whether what follows each sum over devices is the residual and an RMS norm alone."""
    between = (
        config.o_bias, config.mlp_bias, config.layer_norm, config.norm_bias, config.post_norms,
        config.parallel, config.normed_residual, config.layer_inputs, config.altup,
        config.layer_scales, config.recurrent, config.experts and config.experts.beside_mlp,
    )  # fmt: skip
    scales = config.residual_scale, config.attention_out_scale, config.down_scale
    return (
        config.heads_axis is not None
        and config.pre_norms
        and not any(between)
        and all(scale == 1 for scale in scales)
        and all(kind.attention and kind.mlp for kind in config.kinds)
    )


def _layer_of_sums(
    x: jax.Array,
    normed: jax.Array | None,
    weights: Params,
    following: list[jax.Array],
    config: ModelConfig,
    kind: LayerKind,
    attend: Attend,
    num_tokens: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None]:
    """`_layer` if `_norms_follow_sums`: residuals and norms are computed with the sums.

    normed: x after the layer's first norm; None: not computed yet. following: the weight of the
    norm after the layer, if it is one of a layer.

    Returns the new x, and x after the norm that follows.
    """
    h = _norm(x, weights, "attention_norm", config) if normed is None else normed
    h = _attention(h, weights, config, kind, attend, total=_part)
    x, h = _sum_and_norm(h, config, residual=x, norm_weight=weights["mlp_norm"])
    if "router" in weights and "gate_up" not in weights:
        h = _experts(h, weights, config, total=_part, num_tokens=num_tokens)
    else:
        h = _mlp(h, weights, config, kind.sparsity, total=_part)
    if not following:
        return _sum_and_norm(h, config, residual=x), None
    x, h = _sum_and_norm(h, config, residual=x, norm_weight=following[0])
    return x, h


def _with_own_input(
    x: jax.Array,
    own_input: jax.Array | None,
    weights: Params,
    config: ModelConfig,
    run: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """Runs a layer and what follows it: its own input, alternating updates, its scale.

    own_input: [n, config.layer_inputs.size] or None. run: `_layer`, x [n, hidden] -> x.
    """

    def norm(x: jax.Array, name: str) -> jax.Array:
        return _scaled_norm(x, weights[name], config)

    def of_input(x: jax.Array) -> jax.Array:
        assert own_input is not None
        gate = ACTIVATIONS[config.activation](product(x, weights["layer_input_gate"]))
        h = product(gate * own_input, weights["layer_input_projection"])
        return norm(h, "layer_input_norm")

    if config.altup is None:
        x = run(x)
        if own_input is not None:
            x += of_input(x)
        return x * weights["layer_scale"] if config.layer_scales else x
    predictions = altup.predict(x, weights, config.altup, norm)
    active = run(predictions[config.altup.active])
    x = altup.correct(predictions, active, weights, config.altup, norm)
    active = x[config.altup.active]
    if config.altup.scales_output:
        active *= weights["altup_scale"]
    return x.at[1:].add(of_input(active))


def _layer_inputs(
    tokens: jax.Array, x: jax.Array, params: Params, config: ModelConfig
) -> jax.Array | None:
    """Returns the layers' own inputs [n, num_layers, size], or None. x: the embedded tokens."""
    sizes = config.layer_inputs
    if sizes is None:
        return None
    shape = len(x), config.num_layers, sizes.size
    known = jnp.where(tokens < sizes.vocab_size, tokens, 0)
    embedded = params["layer_inputs_embed"][known].reshape(shape)
    embedded *= jnp.asarray(sizes.size**0.5, x.dtype)
    projected = product(x, params["layer_inputs_projection"]) * config.hidden_size**-0.5
    projected = _scaled_norm(projected.reshape(shape), params["layer_inputs_norm"], config)
    return (projected + embedded) * 0.5**0.5


def _layer(
    x: jax.Array,
    weights: Params,
    config: ModelConfig,
    kind: LayerKind,
    attend: Attend | None = None,
    mix: mixers.Mix | None = None,
    num_tokens: jax.Array | None = None,
) -> jax.Array:
    """Runs a layer: x [n, hidden] -> x. attend(qkv, weights) -> o [n, num_qo_heads, head_dim].

    mix: of a layer with a state. num_tokens: see `_experts`.
    """

    pre_norms = config.pre_norms or attend is None
    post_norms = config.post_norms and attend is not None

    def norm(x: jax.Array, name: str, is_on: bool) -> jax.Array:
        return _norm(x, weights, name, config) if is_on else x

    def add(
        x: jax.Array,
        normed: jax.Array,
        h: jax.Array,
        part: Literal["attention", "recurrent", "mlp"],
    ) -> jax.Array:
        if config.normed_residual is not None:
            kept, new = getattr(config.normed_residual, part)
            return _times(normed, kept) + _times(h, new)
        return x + _times(h, config.residual_scale)

    into_attention = h = norm(x, "attention_norm", pre_norms) if mix or attend else x
    mixed: list[jax.Array] = []
    if mix is not None:
        mixed.append(mix(h, weights))
    if attend is not None:
        mixed.append(_attention(h, weights, config, kind, attend))
    before = x
    if mixed:
        out = norm(sum(mixed[1:], mixed[0]), "attention_post_norm", post_norms)
        x = add(x, h, out, "recurrent" if mix else "attention")
    if "router" not in weights and "down" not in weights:
        return x
    if config.altup is not None:
        x = altup.add_laurel(x, into_attention, weights, partial(norm, is_on=True))
    if config.parallel == "same_norm":
        h = into_attention
    else:
        h = norm(before if config.parallel else x, "mlp_norm", pre_norms)
    into_mlp = h
    if "router" in weights and "gate_up" not in weights:
        h = _experts(h, weights, config, num_tokens=num_tokens)
    else:
        h = _mlp(h, weights, config, kind.sparsity)
    if "beside_post_norm" in weights:
        routed = _scaled_norm(x, weights["router_norm"], config) * config.hidden_size**-0.5
        of_experts = _experts(
            norm(x, "expert_norm", True), weights, config, routed, num_tokens=num_tokens
        )
        h = norm(h, "beside_post_norm", True) + norm(of_experts, "expert_post_norm", True)
    return add(x, into_mlp, norm(h, "mlp_post_norm", post_norms), "mlp")


def _times(x: jax.Array, factor: float) -> jax.Array:
    return x if factor == 1 else x * factor


def _attention(
    h: jax.Array,
    weights: Params,
    config: ModelConfig,
    kind: LayerKind,
    attend: Attend,
    total: Total | None = None,
) -> jax.Array:
    total = total or _sum
    if config.latent:
        norm_latent = partial(_scaled_norm, config=config, eps=config.latent.norm_eps)
        o = attend(latent.project(h, weights, config, norm_latent), weights)
    else:
        qkv, gate = _qkv(h, weights, config, kind)
        o = attend(qkv, weights)
        if gate is not None:
            o = o.reshape(gate.shape) * jax.nn.sigmoid(gate)
    h = total(product(o.reshape(len(h), -1), weights["o"]), config)
    if config.o_bias:
        h += weights["o_bias"][None]
    return _times(h, config.attention_out_scale)


def _qkv(
    x: jax.Array, weights: Params, config: ModelConfig, kind: LayerKind
) -> tuple[jax.Array, jax.Array | None]:
    """Projects x, after the layer's norm, to [n, num_qo_heads + 2 * num_kv_heads, head_dim], or to
    the heads of q alone if the layer shares keys and values.

    Also returns the attention gate before its sigmoid, [n, num_qo_heads * head_dim], or None.
    """
    config = config.of(kind)
    qkv, gate = product(_times(x, config.attention_in_scale), weights["qkv"]), None
    if config.qkv_bias:
        qkv += weights["qkv_bias"][None]
    if config.attention_gate:
        num_heads = config.num_qo_heads + 2 * config.num_kv_heads
        qkv, gate = jnp.split(qkv, [num_heads * config.head_dim], axis=-1)
    if config.qk_norm == "all_heads":
        sizes = [n * config.head_dim for n in (config.num_qo_heads, config.num_kv_heads)]
        q, k, v = jnp.split(qkv, np.cumsum(sizes), axis=-1)
        names = ("q", q), ("k", k)
        q, k = (_scaled_norm(x, weights[f"{n}_norm"], config, config.heads_axis) for n, x in names)
        qkv = jnp.concatenate([q, k, v], axis=-1)
    qkv = qkv.reshape(len(x), -1, config.head_dim)
    if kind.values_are_keys and not kind.shares_kv:
        qkv = jnp.concatenate([qkv, qkv[:, config.num_qo_heads :]], axis=1)
    return qkv if config.qk_norm_after_rope else _normed_heads(qkv, weights, config, kind), gate


def _normed_heads(
    qkv: jax.Array, weights: Params, config: ModelConfig, kind: LayerKind
) -> jax.Array:
    """Applies the norms of single heads to those of q and k, and of v, if there are such norms.

    config: with the sizes of the layer's kind.
    """
    if config.qk_norm not in ("per_head", "each_head"):
        return qkv
    # One kernel for all heads, with v masked out; q, k and v apart would take three kernels.
    head = jnp.arange(qkv.shape[1])[:, None]
    scale = weights["q_norm"]
    if config.qk_norm == "each_head":
        scales = [scale, weights["k_norm"], weights["k_norm"]]  # v's are masked out
        scale = jnp.concatenate(scales).reshape(-1, config.head_dim)
    elif not kind.shares_kv:
        scale = jnp.where(head < config.num_qo_heads, scale, weights["k_norm"])
    is_v = head >= config.num_qo_heads + config.num_kv_heads
    if config.v_norm:
        return _scaled_norm(qkv, jnp.where(is_v, 1 - config.norm_offset, scale), config)
    return jnp.where(is_v, qkv, _scaled_norm(qkv, scale, config))


def _sinks(weights: Params, config: ModelConfig) -> jax.Array | None:
    """Returns a layer's sinks [num_qo_heads] f32; None: it has none."""
    return weights["sinks"].astype(jnp.float32) if config.sinks else None


def _mlp(
    x: jax.Array,
    weights: Params,
    config: ModelConfig,
    sparsity: float = 0.0,
    total: Total | None = None,
) -> jax.Array:
    total = total or _sum
    gate_up = product(x, weights["gate_up"])
    if config.mlp_bias:
        gate_up += weights["gate_up_bias"][None]
    if sparsity:
        gate, up = jnp.split(gate_up, 2, axis=-1)
        gate_up = jnp.concatenate([_sparse(gate, sparsity), up], axis=-1)
    if config.activation == "xielu":
        h = _xielu(gate_up, weights["xielu"])
    else:
        h = _gated(gate_up, config)
    h = _times(total(product(h, weights["down"]), config), config.down_scale)
    return h + weights["down_bias"][None] if config.mlp_bias else h


def _sparse(x: jax.Array, sparsity: float) -> jax.Array:
    """Subtracts the quantile that `sparsity` of each row is below, if it is normally distributed;
    values below become 0."""
    x32 = x.astype(jnp.float32)
    deviations = statistics.NormalDist().inv_cdf(sparsity)
    cut = x32.mean(-1, keepdims=True) + deviations * x32.std(-1, keepdims=True)
    return jax.nn.relu(x32 - cut).astype(x.dtype)


def _sum(x: jax.Array, config: ModelConfig) -> jax.Array:
    """Returns the sum of the devices' partial sums."""
    return x if config.heads_axis is None else _sum_and_norm(x, config)


def _part(x: jax.Array, config: ModelConfig) -> jax.Array:
    """Leaves a device's partial sum as it is."""
    return x


def _sum_and_norm(x: jax.Array, config: ModelConfig, **following: Any) -> Any:
    """Returns the sum of the devices' partial sums, and what follows: see `parallel.all_reduce`."""
    assert config.heads_axis is not None
    return parallel.all_reduce(
        x,
        config.heads_axis,
        mesh=config.heads_mesh,
        norm_offset=config.norm_offset,
        eps=config.rms_norm_eps,
        **following,
    )


def _gated(gate_up: jax.Array, config: ModelConfig) -> jax.Array:
    """Applies the gated activation to an MLP's first matmul, [n, 2 * size] -> [n, size]; without a
    gate [n, size] -> [n, size]."""
    if not config.gated:
        return ACTIVATIONS[config.activation](gate_up)
    gate, up = jnp.split(gate_up, 2, axis=-1)
    if config.activation == "clamped_swiglu":  # gpt-oss
        limit = config.activation_limit
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        return (up + 1) * gate * jax.nn.sigmoid(1.702 * gate)
    return ACTIVATIONS[config.activation](_times(gate, config.gate_scale)) * up


def _xielu(x: jax.Array, weights: jax.Array) -> jax.Array:
    """xIELU (arXiv 2411.13010). weights: [4], alpha_p, alpha_n, beta and eps as in the files."""
    alpha_p, alpha_n, beta, eps = weights.astype(jnp.float32)
    x32 = x.astype(jnp.float32)
    below = (jnp.expm1(jnp.minimum(x32, eps)) - x32) * (beta + jax.nn.softplus(alpha_n))
    above = jax.nn.softplus(alpha_p) * jnp.square(x32)
    return (jnp.where(x32 > 0, above, below) + beta * x32).astype(x.dtype)


def _experts(
    x: jax.Array,
    weights: Params,
    config: ModelConfig,
    routed: jax.Array | None = None,
    total: Total | None = None,
    num_tokens: jax.Array | None = None,
) -> jax.Array:
    """Runs the experts: x [n, hidden] -> sum over a token's experts of score * output, or of the
    outputs for score * input.

    routed: [n, hidden], the input of the router; None: x.
    num_tokens: i32, the tokens of x before the padding; None: unknown. With config.experts_axis
      padding is not sent.
    Tokens are sorted by expert, so each expert multiplies only its own rows. A device of a mesh has
    a part of the experts. Rows of other devices' experts sort last and contribute nothing, or, with
    config.experts_axis, are computed there.
    """
    assert config.experts is not None
    routed = x if routed is None else routed
    if config.experts_axis is not None and config.experts_axis == config.heads_axis:
        y = _experts_of_parts(x, routed, weights, config, num_tokens)
    else:
        y = _routed_experts(x, routed, weights, config, num_tokens)
    if "shared_down" in weights:
        gated = _gated(product(x, weights["shared_gate_up"]), config)
        shared = product(gated, weights["shared_down"])
        if config.experts.shared_gate:
            shared *= jax.nn.sigmoid(product(x, weights["shared_gate"]))
        y += shared
    return (total or _sum)(y, config)


def _experts_of_parts(
    x: jax.Array,
    routed: jax.Array,
    weights: Params,
    config: ModelConfig,
    num_tokens: jax.Array | None,
) -> jax.Array:
    """`_routed_experts` for tokens that all devices have: each sends its part of them, and returns
    zeros for the others."""
    assert config.experts_axis is not None
    size = lax.axis_size(config.experts_axis)
    each = -(-len(x) // size)
    begin = lax.axis_index(config.experts_axis) * each

    def part(a: jax.Array) -> jax.Array:
        padded = jnp.pad(a, ((0, size * each - len(a)), (0, 0)))
        return lax.dynamic_slice_in_dim(padded, begin, each)

    num_own = (len(x) if num_tokens is None else num_tokens) - begin
    y = _routed_experts(part(x), part(routed), weights, config, num_own)
    zeros = jnp.zeros((size * each, y.shape[1]), y.dtype)
    return lax.dynamic_update_slice_in_dim(zeros, y, begin, 0)[: len(x)]


def _routed_experts(
    x: jax.Array,
    routed: jax.Array,
    weights: Params,
    config: ModelConfig,
    num_tokens: jax.Array | None = None,
) -> jax.Array:
    """`_experts` without the shared ones and the sum over devices."""
    assert config.experts is not None
    per_token, count = config.experts.per_token, weights["expert_down"].shape[0]
    logits = product(routed, weights["router"], jnp.float32)
    if "router_bias" in weights:
        logits += weights["router_bias"].astype(jnp.float32)[None]
    scores, chosen = experts.route(logits, weights.get("router_correction"), config.experts)
    if "expert_scale" in weights:
        scores *= weights["expert_scale"].astype(jnp.float32)[chosen]
    expert = chosen.reshape(-1)
    if config.heads_axis is not None and config.experts_axis is None:
        expert -= count * lax.axis_index(config.heads_axis)
        is_own = (expert >= 0) & (expert < count)
        expert = jnp.where(is_own, expert, count)
        scores = jnp.where(is_own.reshape(scores.shape), scores, 0)
    inputs = product(x, weights["latent_in"]) if "latent_in" in weights else x
    factors = None
    if config.experts.scales_input:
        factors = scores.reshape(-1, 1).astype(x.dtype)
        scores = jnp.ones_like(scores)

    def rows_at(pair: jax.Array) -> jax.Array:
        rows = inputs[pair // per_token]
        return rows if factors is None else rows * factors[pair]

    if config.experts_axis is None:
        h = _multiply(rows_at, expert, weights, config)
    else:
        if num_tokens is not None:
            is_token = jnp.arange(len(x)) < num_tokens
            expert = jnp.where(is_token.repeat(per_token), expert, config.experts.count)
        most = len(x) * min(per_token, count)
        multiply = partial(_multiply, weights=weights, config=config)
        h = expert_exchange.exchange(rows_at, expert, count, most, config.experts_axis, multiply)
    y = jnp.einsum("nkd,nk->nd", h.reshape(len(x), per_token, -1), scores.astype(x.dtype))
    return product(y, weights["latent_out"]) if "latent_out" in weights else y


def _multiply(
    rows_at: Callable[[jax.Array], jax.Array],
    expert: jax.Array,
    weights: Params,
    config: ModelConfig,
) -> jax.Array:
    """A device's experts: -> [m, out], undefined for rows of none of them.

    rows_at: (indices [m] i32) -> [m, in]. expert: [m] i32, numbered on the device.
    """
    count = weights["expert_down"].shape[0]
    order = jnp.argsort(expert, stable=True)
    num_rows = jnp.bincount(expert, length=count).astype(jnp.int32)
    has_others = config.heads_axis is not None or config.experts_axis is not None

    def of_expert(x: jax.Array, name: str) -> jax.Array:
        y = experts.grouped_matmul(x, weights[name], num_rows)
        if has_others:
            y = jnp.where(expert[order, None] < count, y, 0)
        bias = weights.get(f"{name}_bias")
        return y if bias is None else y + bias[expert[order]]

    h = _gated(of_expert(rows_at(order), "expert_gate_up"), config)
    return of_expert(h, "expert_down")[jnp.argsort(order)]


def _rotated_heads(
    qkv: jax.Array, weights: Params, positions: jax.Array, config: ModelConfig, kind: LayerKind
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns rotated q, k, v, for attention without append_rotated."""
    own = config.of(kind)
    ends = [own.num_qo_heads, own.num_qo_heads + own.num_kv_heads]
    qk, v = jnp.split(qkv, ends[1:], axis=1)
    qk = rotate(qk, _angles(kind, positions, config))
    if kind.l2_norm:
        qk = _scaled_norm(qk, jnp.ones(()), config)
    qkv = jnp.concatenate([qk, v], axis=1)
    if config.qk_norm_after_rope:
        qkv = _normed_heads(qkv, weights, own, kind)
    q, k, v = jnp.split(_at_temperature(qkv, positions, config, kind), ends, axis=1)
    return q, k, v


Kept: TypeAlias = dict[KvPlace, tuple[jax.Array, jax.Array]]
"""k, v: [n, num_kv_heads, head_dim] of the layers so far, for those that share them."""


def _whole_heads(
    qkv: jax.Array,
    weights: Params,
    positions: jax.Array,
    config: ModelConfig,
    kind: LayerKind,
    place: KvPlace,
    kept: Kept,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns rotated q, k, v for attention without a cache; k and v may be another layer's."""
    if kind.shares_kv:
        qkv = _at_temperature(qkv, positions, config, kind)
        return rotate(qkv, _angles(kind, positions, config)), *kept[place]
    q, k, v = _rotated_heads(qkv, weights, positions, config, kind)
    kept[place] = k, v
    return q, k, v


def _rotates_in_append(config: ModelConfig, kind: LayerKind) -> bool:
    """Whether nothing stands between rotation and cache, so that append_rotated does both."""
    return not (kind.shares_kv or config.qk_norm_after_rope or kind.l2_norm)


@jax.custom_vjp
def _rotated_by_append(
    qkv: jax.Array, cos: jax.Array, sin: jax.Array, plan: ja.AttentionPlan
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns q, k, v: [n, num_heads, head_dim] of qkv [n, heads of all three, head_dim].

    q and k are rotated by the kernel of `forward`, with its bits: in f32, XLA's own product and sum
    are one rounding. The tokens of the plan have the rows of their own pages.
    """
    page_size = plan.spec.page_size
    assert page_size is not None
    k, v = plan.spec.empty_pages(len(qkv) // page_size)
    assert v is not None
    q, k, v = ja.append_rotated(qkv.reshape(len(qkv), -1), cos, sin, k, v, plan)
    q = jnp.where(jnp.arange(len(q))[:, None, None] < plan.nnz_qo, q, 0)  # defined in the padding
    k, v = (x.reshape(len(qkv), *x.shape[2:]) for x in (k, v))
    return q, k, v


def _rotated_fwd(
    qkv: jax.Array, cos: jax.Array, sin: jax.Array, plan: ja.AttentionPlan
) -> tuple[Any, Any]:
    return _rotated_by_append(qkv, cos, sin, plan), (cos, sin)


def _rotated_bwd(angles: tuple[jax.Array, jax.Array], gradients: Any) -> Any:
    """A rotation's transpose is the one by the opposite angle."""
    d_q, d_k, d_v = gradients
    cos, sin = angles
    d_qk = rotate(jnp.concatenate([d_q, d_k], axis=1), (cos, -sin))
    return jnp.concatenate([d_qk, d_v], axis=1), None, None, None


_rotated_by_append.defvjp(_rotated_fwd, _rotated_bwd)


def _at_temperature(
    qkv: jax.Array, positions: jax.Array, config: ModelConfig, kind: LayerKind
) -> jax.Array:
    """Multiplies the heads of q by the layer's temperature at their positions."""
    if kind.temperature is None:
        return qkv
    shifted = positions.astype(jnp.float32) + kind.temperature.offset
    turns = jnp.floor(shifted / kind.temperature.length)
    scale = 1 + kind.temperature.beta * jnp.log1p(turns)
    is_q = jnp.arange(qkv.shape[1])[None] < config.num_qo_heads
    return qkv * jnp.where(is_q, scale[:, None], 1).astype(qkv.dtype)[..., None]


def _angles(
    kind: LayerKind, positions: jax.Array, config: ModelConfig
) -> tuple[jax.Array, jax.Array]:
    """Returns cos, sin: [n, head_dim / 2] f32; 1 and 0 in layers without RoPE."""
    head_dim = config.latent.rope if config.latent else config.of(kind).head_dim
    if kind.rope is None:
        shape = (positions.shape[-1], head_dim // 2)
        return jnp.ones(shape, jnp.float32), jnp.zeros(shape, jnp.float32)
    return kind.rope.angles(head_dim, positions)


def embed(tokens: jax.Array, params: Params, config: ModelConfig) -> jax.Array:
    """Returns the first layer's input [n, hidden] for tokens [n] i32."""
    table = params["embed"]

    def rows_of(tokens: jax.Array) -> jax.Array:
        return table.columns(tokens) if isinstance(table, Panels) else table[tokens]

    if config.splits_vocabulary:
        count = table.shape[-1] if isinstance(table, Panels) else len(table)
        row = tokens - count * jax.lax.axis_index(config.heads_axis)
        is_own = (row >= 0) & (row < count)
        x = _sum(jnp.where(is_own[:, None], rows_of(jnp.where(is_own, row, 0)), 0), config)
    else:
        x = rows_of(tokens)
    return x if config.embedding_scale == 1 else x * jnp.asarray(config.embedding_scale, x.dtype)


def _logits(x: jax.Array, params: Params, config: ModelConfig) -> jax.Array:
    x = final_norm(x, params, config)
    head = params.get("head")
    if head is None:
        embed = params["embed"]
        head = embed if isinstance(embed, Panels) else embed.T
    logits = product(x, head, jnp.float32)
    if config.head_bias:
        logits += params["head_bias"].astype(jnp.float32)[None]
    logits *= config.logit_scale
    if config.splits_vocabulary:
        logits = jax.lax.all_gather(logits, config.heads_axis, axis=1, tiled=True)
    return _soft_cap(logits, config.logit_soft_cap)


def _soft_cap(x: jax.Array, cap: float) -> jax.Array:
    return cap * jnp.tanh(x / cap) if cap else x


def _norm(x: jax.Array, weights: Params, name: str, config: ModelConfig) -> jax.Array:
    """The norm with the weights of that name."""
    bias = weights[f"{name}_bias"] if config.norm_bias else None
    return _scaled_norm(x, weights[name], config, bias=bias)


def _scaled_norm(
    x: jax.Array,
    weight: jax.Array,
    config: ModelConfig,
    over: str | None = None,
    eps: float | None = None,
    bias: jax.Array | None = None,
) -> jax.Array:
    """RMSNorm or LayerNorm.

    over: the mesh axis over which the last axis of x is split in equal parts.
    eps: None: rms_norm_eps.
    """

    def mean(x: jax.Array) -> jax.Array:
        own = jnp.mean(x, axis=-1, keepdims=True)
        return own if over is None else jax.lax.pmean(own, over)

    x32 = x.astype(jnp.float32)
    if config.layer_norm:
        x32 -= mean(x32)
    variance = mean(jnp.square(x32))
    scale = config.norm_offset + weight.astype(jnp.float32)
    scale = scale.reshape(*(1,) * (x.ndim - scale.ndim), *scale.shape)
    eps = config.rms_norm_eps if eps is None else eps
    y = x32 * jax.lax.rsqrt(variance + eps) * scale
    return (y if bias is None else y + bias.astype(jnp.float32)).astype(x.dtype)
