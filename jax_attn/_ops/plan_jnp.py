"""Attention over a plan in jnp: what forward mode and second derivatives are derivatives of.

It is the definition of the operation, one block of keys at a time, for the specs that have
gradients. Every query token is compared with every key of the batch, so it takes more time than the
kernels, and memory for one block of logits in forward mode.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn._plan.records import HEADER_FIELDS, WORK_ITEM
from jax_attn._plan.search import searchsorted
from jax_attn._spec.spec import AttentionSpec
from jax_attn._variant.evaluate import evaluate
from jax_attn._variant.program import At
from jax_attn._variant.transform import Transform, apply
from jax_attn._xla.attention_operands import AttentionOperands
from jax_attn._xla.transforms import varying_alike

_BLOCK = 512  # keys whose logits are in memory at the same time

# By default a GPU rounds f32 operands to TF32, which the kernels do not.
_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


class Rows(NamedTuple):
    """Query tokens. Each field: [max_qo_tokens], i32; live: bool."""

    request: jax.Array
    position: jax.Array
    qo_len: jax.Array
    kv_len: jax.Array
    live: jax.Array


class Keys(NamedTuple):
    """Keys of all requests, in blocks. Each field: [num_blocks, _BLOCK], i32; live: bool."""

    request: jax.Array
    position: jax.Array
    row: jax.Array  # of k and v, or of their pages
    qo_len: jax.Array
    kv_len: jax.Array
    live: jax.Array


def query_facts(rows: Rows) -> dict[str, jax.Array]:
    """The fields of `at` that a transform of q or o may read, [max_qo_tokens]."""
    return {
        "request": rows.request,
        "q_pos": rows.position,
        "q_row": jnp.arange(len(rows.request), dtype=jnp.int32),
        "q_len": rows.qo_len,
        "kv_len": rows.kv_len,
    }


def key_facts(keys: Keys) -> dict[str, jax.Array]:
    """The fields of `at` that a transform of k or v may read."""
    return {
        "request": keys.request,
        "kv_pos": keys.position,
        "kv_row": keys.row,
        "q_len": keys.qo_len,
        "kv_len": keys.kv_len,
    }


def attend(
    operands: AttentionOperands[jax.Array], spec: AttentionSpec
) -> tuple[jax.Array, jax.Array]:
    """o and lse of an attention call, as jax_attn.attention describes them.

    With a variant of normalize="none" lse is 0. spec: without mla, quantized operands, fresh_kv and
    max_steps.
    """
    q, k, v = operands.q, operands.k, operands.v
    assert v is not None and operands.plan_buffer is not None
    rows, keys = batch_of(operands.plan_buffer, spec)
    if spec.is_paged and k.ndim == 5:
        assert operands.layer is not None
        k, v = (jax.lax.dynamic_index_in_dim(x, operands.layer, keepdims=False) for x in (k, v))
    k, v = (x.reshape(-1, *x.shape[-2:]) for x in (k, v))
    num_tokens, num_qo_heads, num_kv_heads = q.shape[0], q.shape[1], k.shape[1]
    group = num_qo_heads // num_kv_heads
    q = jnp.where(rows.live[:, None, None], q, 0).astype(jnp.float32)
    q = q.reshape(num_tokens, num_kv_heads, group, -1)
    sinks = operands.sinks
    softmax = spec.variant is None or spec.variant.normalizes

    def add_block(state: Any, block: Keys) -> Any:
        top, total, o = state
        seen, logits = _logits(operands, spec, q, k, rows, block)
        values = _rows_of("v", v, operands, spec, block)
        if not softmax:
            weights = jnp.where(seen, logits, 0)
            return (top, total, o + _einsum("hgts,she->hgte", weights, values)), None
        logits = jnp.where(seen, logits, -jnp.inf)
        highest = jnp.maximum(top, jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True)))
        base = jnp.where(jnp.isneginf(highest), 0, highest)
        weights, scale = jnp.exp(logits - base), jnp.exp(top - base)
        total = total * scale + weights.sum(axis=-1, keepdims=True)
        return (highest, total, o * scale + _einsum("hgts,she->hgte", weights, values)), None

    shape = num_kv_heads, group, num_tokens
    start = (
        jnp.full((*shape, 1), -jnp.inf, jnp.float32),
        jnp.zeros((*shape, 1), jnp.float32),
        jnp.zeros((*shape, v.shape[2]), jnp.float32),
    )
    start, _ = varying_alike((start, (q, k, v, keys)))
    (top, total, o), _ = jax.lax.scan(jax.checkpoint(add_block), start, keys)
    lse = jnp.zeros((*shape, 1), jnp.float32)
    if softmax:
        is_empty = jnp.isneginf(top)
        base = jnp.where(is_empty, 0, top)
        if sinks is not None:
            extra = jnp.exp(sinks.reshape(num_kv_heads, group, 1, 1) - base)
            total = total + jnp.where(is_empty, 0, extra)
        total = jnp.where(is_empty, 1, total)
        o, lse = o / total, jnp.where(is_empty, -jnp.inf, base + jnp.log(total))

    def of_rows(x: jax.Array) -> jax.Array:
        # Cotangents of padding rows may be NaN. They reach nothing through a row that is 0.
        x = jnp.moveaxis(x, 2, 0).reshape(num_tokens, num_qo_heads, -1)
        return jnp.where(rows.live[:, None, None], x, 0)

    return of_rows(o).astype(operands.q.dtype), of_rows(lse)[..., 0]


def _rows_of(
    name: str,
    x: jax.Array,
    operands: AttentionOperands[jax.Array],
    spec: AttentionSpec,
    keys: Keys,
) -> jax.Array:
    """k or v of a block as kernels use them, in f32; 0 where there is no key."""
    transform = None if spec.variant is None else spec.variant.transforms.get(name)
    found = x[keys.row]
    if transform is not None:
        found = transform_rows(
            transform, found, spec, key_facts(keys), keys.live, 0, operands.variant
        )
    return jnp.where(keys.live[:, None, None], found, 0).astype(jnp.float32)


def transform_rows(
    transform: Transform,
    x: jax.Array,
    spec: AttentionSpec,
    facts: dict[str, jax.Array],
    live: jax.Array,
    fill: int,
    operands: tuple[jax.Array, ...],
) -> jax.Array:
    """The transform of the rows that are live, in x's dtype; `fill` in the others.

    x: [rows, heads, head_dim]. The others may hold NaN: they count as 1, so that neither they nor
    the derivatives there, such as those of a norm of 0, reach a gradient.
    """
    rows = live[:, None, None]
    heads = jnp.arange(x.shape[1], dtype=jnp.int32)
    by_head = {"head": heads, "kv_head": heads // (x.shape[1] // spec.num_kv_heads)}
    found = apply(transform, jnp.where(rows, x, 1), by_head, facts, operands)
    return jnp.where(rows, found.astype(x.dtype), fill)


def _logits(
    operands: AttentionOperands[jax.Array],
    spec: AttentionSpec,
    q: jax.Array,
    k: jax.Array,
    rows: Rows,
    keys: Keys,
) -> tuple[jax.Array, jax.Array]:
    """Whether rows see the keys of a block, and the final logits, 0 where they do not.

    [num_kv_heads, group_size, tokens, keys]; axes of the first may have length 1.
    """
    keys_of_block = _rows_of("k", k, operands, spec, keys)
    position = rows.position[:, None]
    seen = (rows.request[:, None] == keys.request[None]) & rows.live[:, None] & keys.live[None]
    if spec.causal:
        seen &= keys.position[None] <= position
    if spec.window_left >= 0:
        seen &= keys.position[None] >= position - spec.window_left
    if spec.window_right >= 0:
        seen &= keys.position[None] <= position + spec.window_right
    seen = seen[None, None]
    assert spec.sm_scale is not None
    logits = spec.sm_scale * _einsum("thgd,shd->hgts", q, keys_of_block)
    if spec.logits_soft_cap:
        logits = spec.logits_soft_cap * jnp.tanh(logits / spec.logits_soft_cap)
    if spec.variant is not None and spec.variant.has_program:
        num_kv_heads, group = logits.shape[:2]
        head = jnp.arange(num_kv_heads * group, dtype=jnp.int32).reshape(num_kv_heads, group, 1, 1)

        def by_row(x: jax.Array) -> jax.Array:
            return x[None, None, :, None]

        at = At(
            head=head,
            kv_head=head // group,
            request=by_row(rows.request),
            q_pos=by_row(rows.position),
            kv_pos=keys.position[None, None, None],
            q_row=by_row(jnp.arange(len(rows.request), dtype=jnp.int32)),
            kv_row=keys.row[None, None, None],
            q_len=by_row(rows.qo_len),
            kv_len=by_row(rows.kv_len),
        )
        shape = logits.shape
        logits, visible = evaluate(spec.variant, jnp.where(seen, logits, 0), at, operands.variant)
        logits = jnp.broadcast_to(logits, shape)
        seen = seen if visible is None else seen & visible
    return seen, jnp.where(seen, logits, 0)


def batch_of(buffer: jax.Array, spec: AttentionSpec) -> tuple[Rows, Keys]:
    """The query tokens and the keys of a plan."""

    def section(name: str, num_words: int) -> jax.Array:
        begin = spec.layout[name]
        return buffer[begin : begin + num_words]

    header = dict(zip(HEADER_FIELDS, section("header", len(HEADER_FIELDS)), strict=True))
    is_request = jnp.arange(spec.max_batch + 1) <= header["batch_size"]
    qo_indptr = jnp.where(is_request, section("qo_indptr", spec.max_batch + 1), header["nnz_qo"])
    kv_indptr = jnp.where(is_request, section("kv_indptr", spec.max_batch + 1), header["nnz_kv"])
    kv_lens = jnp.where(is_request[1:], section("kv_lens", spec.max_batch), 0)
    qo_lens = qo_indptr[1:] - qo_indptr[:-1]
    token = jnp.arange(spec.max_qo_tokens, dtype=jnp.int32)
    request = _request_of(qo_indptr, token)
    position = _first_positions(buffer, spec, qo_indptr)[request] + token - qo_indptr[request]
    live = token < header["nnz_qo"]
    rows = Rows(request, position, qo_lens[request], kv_lens[request], live)
    if spec.is_paged:
        assert spec.max_kv_pages is not None and spec.page_size is not None
        entry = jnp.arange(spec.max_kv_pages, dtype=jnp.int32)
        slot = jnp.arange(spec.page_size, dtype=jnp.int32)
        owner = _request_of(kv_indptr, entry)
        pages = section("page_indices", spec.max_kv_pages)
        first = (entry - kv_indptr[owner]) * spec.page_size
        owner, row, position = (
            x.ravel()
            for x in jnp.broadcast_arrays(
                owner[:, None],
                pages[:, None] * spec.page_size + slot[None],
                first[:, None] + slot[None],
            )
        )
        live = jnp.repeat(entry < header["nnz_kv"], spec.page_size)
    else:
        assert spec.max_kv_tokens is not None
        row = jnp.arange(spec.max_kv_tokens, dtype=jnp.int32)
        owner = _request_of(kv_indptr, row)
        position, live = row - kv_indptr[owner], row < header["nnz_kv"]
    live &= (position >= 0) & (position < kv_lens[owner])
    lens = qo_lens[owner], kv_lens[owner]
    found = owner, jnp.where(live, position, 0), jnp.where(live, row, 0), *lens, live
    missing = -len(row) % _BLOCK
    return rows, Keys(*(jnp.pad(x, (0, missing)).reshape(-1, _BLOCK) for x in found))


def _request_of(indptr: jax.Array, at: jax.Array) -> jax.Array:
    found = searchsorted(jnp, indptr, at) - 1
    return found.clip(0, len(indptr) - 2)


def _first_positions(buffer: jax.Array, spec: AttentionSpec, qo_indptr: jax.Array) -> jax.Array:
    """[max_batch], the position of each request's first query token.

    The items say it, except for those that several requests share. An item of a prefix that one
    request has alone has a position at most as large (csrc/plan/rules/sharing.h).
    """
    max_items, words = spec.kernel_config["max_items"], WORK_ITEM.itemsize // 4
    assert WORK_ITEM.names is not None
    begin = spec.layout["items"]
    items = buffer[begin : begin + max_items * words].reshape(max_items, words)
    of = dict(zip(WORK_ITEM.names, items.T, strict=True))
    num_items = buffer[spec.layout["header"] + HEADER_FIELDS.index("num_items")]
    is_own = (jnp.arange(max_items) < num_items) & (of["num_groups"] <= 1)
    request = jnp.where(is_own, of["request"], spec.max_batch)
    first = of["q_pos"] - of["first_token"] + qo_indptr[request.clip(0, spec.max_batch)]
    least = jnp.full(spec.max_batch, np.iinfo(np.int32).min, jnp.int32)
    return least.at[request].max(first, mode="drop").clip(-(2**30))
