"""Attention with the signatures of other JAX libraries, for code that moves from them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_attn._dense.dense import dot_product_attention
from jax_attn._ops.attention import attention
from jax_attn._plan.plan import plan
from jax_attn._spec.spec import AttentionSpec

__all__ = ["flax_attention", "paged_attention", "paged_attention_gpu", "ragged_paged_attention"]

# Launch parameters of their kernels, which our kernels do not have.
_TUNING = {
    "paged_attention": {"pages_per_compute_block", "megacore_mode", "inline_seq_dim"},
    "paged_attention_gpu": {"pages_per_compute_block", "block_h", "k_splits", "num_warps"}
    | {"num_stages", "interpret", "debug"},
    "ragged_paged_attention": {"chunk_prefill_size", "num_kv_pages_per_block", "debug_mode"}
    | {"num_queries_per_block", "vmem_limit_bytes", "decode_q_len", "decode_block_sizes"}
    | {"prefill_block_sizes"},
}


def _check_tuning(op: str, tuning: dict[str, Any]) -> None:
    if unknown := sorted(set(tuning) - _TUNING[op]):
        raise TypeError(f"{op}: expected no other arguments, got {', '.join(unknown)}.")


def _check_shape(op: str, name: str, array: Any, shape: tuple[int | None, ...], what: str) -> None:
    got = getattr(array, "shape", None)
    fits = got is not None and len(got) == len(shape)
    if not fits or any(n not in (None, m) for n, m in zip(shape, got or (), strict=True)):
        raise ValueError(
            f"{op}: {name}: expected {what}, got {None if got is None else list(got)}."
        )


def _pages_that_are_read(table: jax.Array, kv_lens: jax.Array, page_size: int) -> jax.Array:
    """The page table [batch, pages_per_sequence] with 0 in entries that hold no keys."""
    num_read = -(-kv_lens // page_size)
    return jnp.where(jnp.arange(table.shape[1]) < num_read[:, None], table, 0).astype(jnp.int32)


def paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    lengths: jax.Array,
    page_indices: jax.Array,
    *,
    mask_value: float | None = None,
    attn_logits_soft_cap: float | None = None,
    **tuning: Any,
) -> jax.Array:
    """jax.experimental.pallas.ops.tpu.paged_attention: one query token for each request.

    q: [batch, num_q_heads, head_dim], already scaled: logits = q . k. k_pages, v_pages:
        [num_kv_heads, num_pages, page_size, head_dim], dtype of q. They are not copied.
    lengths: i32[batch], keys of each request. page_indices: i32[batch, pages_per_sequence].
    mask_value: ignored; keys beyond the length never influence a result.
    tuning: launch parameters of their kernels, ignored.

    Returns o: [batch, num_q_heads, head_dim]; 0 for a request without keys. Raises ValueError for
    arrays that do not fit, NotImplementedError for pages of class QuantizedTensor.
    """
    del mask_value
    op = "paged_attention"
    _check_tuning(op, tuning)
    return _of_one_token(
        op, q, k_pages, v_pages, lengths, "page_indices", page_indices, attn_logits_soft_cap
    )


def paged_attention_gpu(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    block_tables: jax.Array,
    lengths: jax.Array | None,
    k_scales_pages: jax.Array | None = None,
    v_scales_pages: jax.Array | None = None,
    *,
    mask_value: float | None = None,
    attn_logits_soft_cap: float | None = None,
    **tuning: Any,
) -> jax.Array:
    """jax.experimental.pallas.ops.gpu.paged_attention: one query token for each request.

    q, k_pages, v_pages, mask_value, attn_logits_soft_cap: as for paged_attention.
    block_tables: i32[batch, pages_per_sequence]. lengths: i32[batch], keys of each request; None:
        all keys of its pages.
    k_scales_pages, v_scales_pages: must be None. tuning: launch parameters of their kernel,
        ignored.

    Returns o: [batch, num_q_heads, head_dim]; 0 for a request without keys. Raises ValueError for
    arrays that do not fit, NotImplementedError for scales.
    """
    del mask_value
    op = "paged_attention_gpu"
    _check_tuning(op, tuning)
    for name, scales in (("k_scales_pages", k_scales_pages), ("v_scales_pages", v_scales_pages)):
        if scales is not None:
            raise NotImplementedError(
                f"{op}: {name}: None is supported, got an array; the paged cache of"
                " jax_attn.attention has float8_e4m3fn with a scale for each head."
            )
    if lengths is None:
        _check_shape(op, "block_tables", block_tables, (None,) * 2, "[batch, pages_per_sequence]")
        _check_shape(op, "k_pages", k_pages, (None,) * 4, "[heads, pages, page_size, head_dim]")
        lengths = jnp.full(block_tables.shape[0], block_tables.shape[1] * k_pages.shape[2])
    return _of_one_token(
        op, q, k_pages, v_pages, lengths, "block_tables", block_tables, attn_logits_soft_cap
    )


def _of_one_token(
    op: str,
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    lengths: jax.Array,
    table_name: str,
    page_indices: jax.Array,
    soft_cap: float | None,
) -> jax.Array:
    for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
        if not hasattr(pages, "shape"):
            raise NotImplementedError(
                f"{op}: {name}: arrays are supported, got {type(pages).__name__}; the paged cache"
                " of jax_attn.attention has float8_e4m3fn."
            )
    _check_shape(op, "q", q, (None,) * 3, "[batch, num_q_heads, head_dim]")
    batch, num_q_heads, head_dim = q.shape
    pages_shape = (None, None, None, head_dim)
    _check_shape(op, "k_pages", k_pages, pages_shape, f"[heads, pages, page_size, {head_dim}]")
    _check_shape(op, "v_pages", v_pages, k_pages.shape, f"k_pages' {list(k_pages.shape)}")
    _check_shape(op, "lengths", lengths, (batch,), f"[{batch}]")
    _check_shape(op, table_name, page_indices, (batch, None), f"[{batch}, ...]")
    num_kv_heads, num_pages, page_size, _ = k_pages.shape
    if num_q_heads % num_kv_heads:
        raise ValueError(
            f"{op}: q: expected a multiple of {num_kv_heads} heads, got {num_q_heads}."
        )
    # Each KV head of a request is planned as a separate request with the head's part of the pool.
    num_requests, num_slots = batch * num_kv_heads, page_indices.shape[1]
    spec = AttentionSpec(
        num_q_heads // num_kv_heads,
        1,
        head_dim,
        dtype=q.dtype.name,
        sm_scale=1.0,
        logits_soft_cap=soft_cap or 0.0,
        page_size=page_size,
        max_batch=num_requests,
        max_qo_tokens=num_requests,
        max_kv_pages=num_requests * num_slots,
        share_prefixes=False,
    )
    table = _pages_that_are_read(page_indices, lengths, page_size)
    heads = jnp.arange(num_kv_heads, dtype=jnp.int32)[:, None] * num_pages
    own = plan(
        spec,
        jnp.arange(num_requests + 1),
        jnp.repeat(lengths.astype(jnp.int32), num_kv_heads),
        jnp.arange(num_requests + 1) * num_slots,
        (table[:, None] + heads).reshape(-1),
    )
    k, v = (x.reshape(-1, page_size, 1, head_dim) for x in (k_pages, v_pages))
    o = attention(q.reshape(spec.q_shape), k, v, own)
    return o.reshape(q.shape)


def ragged_paged_attention(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    kv_cache: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    distribution: jax.Array,
    attention_sink: jax.Array | None = None,
    *,
    use_causal_mask: bool = True,
    update_kv_cache: bool = True,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    out_dtype: Any = None,
    mask_value: float | None = None,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    **tuning: Any,
) -> tuple[jax.Array, jax.Array]:
    """The TPU library's ragged paged attention, version 3 (RPA v3): mixed prefill and decode.

    queries: [max_num_tokens, num_q_heads, head_dim]. keys, values: [max_num_tokens, num_kv_heads,
        head_dim], for the same tokens, written to the cache unless update_kv_cache is False.
    kv_cache: [num_pages, page_size, 2 * num_kv_heads / packing, packing, head_dim], dtype of
        queries, head_dim up to 128. Keys and values of a head are side by side. Donate it to write
        in place. It is read without a copy, so the q . k matmul costs twice as much.
    kv_lens: i32[max_num_seqs], new tokens included. page_indices: i32[max_num_seqs *
        pages_per_seq]. cu_q_lens: i32[max_num_seqs + 1].
    distribution: i32[3]. The last number is the number of sequences.
    attention_sink: [num_q_heads], f32. sliding_window: number of keys that a query sees, its own
        included. k_scale, v_scale: factors for stored keys and values. q_scale: queries are divided
        by it and rounded to the dtype of the cache; logits are multiplied by it.
    mask_value: ignored. tuning: launch parameters of their kernel, ignored.

    Returns o: [max_num_tokens, num_q_heads, head_dim], 0 beyond the tokens, and the cache. Raises
    ValueError for arrays that do not fit, NotImplementedError for a head_dim above 128.
    """
    del mask_value
    op = "ragged_paged_attention"
    _check_tuning(op, tuning)
    _check_shape(op, "queries", queries, (None,) * 3, "[max_num_tokens, num_q_heads, head_dim]")
    num_tokens, num_q_heads, head_dim = queries.shape
    _check_shape(op, "keys", keys, (num_tokens, None, head_dim), f"[{num_tokens}, heads, head_dim]")
    _check_shape(op, "values", values, keys.shape, f"keys' {list(keys.shape)}")
    _check_shape(op, "kv_cache", kv_cache, (None,) * 5, "[pages, page_size, heads, packing, dim]")
    num_pages, page_size, heads, packing, width = kv_cache.shape
    num_kv_heads = keys.shape[1]
    if heads * packing != 2 * num_kv_heads or width < head_dim:
        raise ValueError(
            f"{op}: kv_cache: expected {2 * num_kv_heads} heads of keys and values of head_dim >="
            f" {head_dim}, got {list(kv_cache.shape)}."
        )
    if width > 128:
        raise NotImplementedError(f"{op}: kv_cache: head_dim up to 128 is supported, got {width}.")
    _check_shape(op, "kv_lens", kv_lens, (None,), "[max_num_seqs]")
    num_seqs = kv_lens.shape[0]
    _check_shape(op, "cu_q_lens", cu_q_lens, (num_seqs + 1,), f"[{num_seqs + 1}]")
    _check_shape(op, "page_indices", page_indices, (None,), "[max_num_seqs * pages_per_seq]")
    _check_shape(op, "distribution", distribution, (3,), "[3]")
    # Sequences beyond the number given by `distribution` get no tokens.
    active = jnp.arange(num_seqs + 1) < distribution[-1]
    cu_q_lens = jnp.where(active, cu_q_lens, cu_q_lens[distribution[-1]]).astype(jnp.int32)
    kv_lens = jnp.where(active[:-1], kv_lens, 0).astype(jnp.int32)
    table = _pages_that_are_read(page_indices.reshape(num_seqs, -1), kv_lens, page_size)
    # A row of the cache is a key and its value. q is 0 in the value's columns.
    rows = kv_cache.reshape(num_pages, page_size, num_kv_heads, 2 * width)
    missing = ((0, 0), (0, 0), (0, width - head_dim))
    if update_kv_cache:
        new = jnp.concatenate([jnp.pad(keys, missing), jnp.pad(values, missing)], axis=-1)
        tokens = jnp.arange(num_tokens)
        seq = jnp.searchsorted(cu_q_lens, tokens, side="right") - 1
        at = jnp.minimum(seq, num_seqs - 1)
        position = kv_lens[at] - cu_q_lens[at + 1] + tokens
        page = jnp.where(seq < num_seqs, table[at, position // page_size], num_pages)
        rows = rows.at[page, position % page_size].set(new.astype(rows.dtype), mode="drop")
    spec = AttentionSpec(
        num_q_heads,
        num_kv_heads,
        2 * width,
        dtype=queries.dtype.name,
        causal=use_causal_mask,
        window_left=-1 if sliding_window is None else sliding_window - 1,
        sm_scale=sm_scale * (q_scale or 1.0) * (k_scale or 1.0),
        logits_soft_cap=soft_cap or 0.0,
        page_size=page_size,
        max_batch=num_seqs,
        max_qo_tokens=num_tokens,
        max_kv_pages=table.size,
    )
    own = plan(spec, cu_q_lens, kv_lens, jnp.arange(num_seqs + 1) * table.shape[1], table.ravel())
    if q_scale is not None:
        queries = _rounded_queries(queries, q_scale, kv_cache.dtype)
    q = jnp.pad(queries, ((0, 0), (0, 0), (0, 2 * width - head_dim)))
    o = attention(q, rows, rows, own, sinks=attention_sink)[..., width : width + head_dim]
    o = o if v_scale is None else o * v_scale
    return o.astype(out_dtype or queries.dtype), rows.reshape(kv_cache.shape)


def _rounded_queries(q: jax.Array, scale: float, dtype: Any) -> jax.Array:
    """Queries divided by the scale and rounded to the dtype, as in RPA v3."""
    limits = jnp.finfo(dtype)
    scaled = jnp.clip(q / scale, float(limits.min), float(limits.max))
    return scaled.astype(dtype).astype(q.dtype)


def flax_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    is_causal: bool = False,
) -> jax.Array:
    """`attention_fn` for flax.nnx.MultiHeadAttention and flax.linen.MultiHeadDotProductAttention.

    query: [..., T, num_heads, head_dim]. key, value: [..., S, num_heads, head_dim]. bias, mask:
        they broadcast to [..., num_heads, T, S]; a key is visible where the mask is not 0.
    dtype: dtype of the computation; None: that of the operands. precision: ignored.

    Returns [..., T, num_heads, head_dim]. Raises NotImplementedError for dropout of attention
    weights and for sowing them.
    """
    del broadcast_dropout, dropout_rng, precision
    if dropout_rate and not deterministic:
        raise NotImplementedError(
            f"flax_attention: dropout_rate: 0 is supported, got {dropout_rate}; weights are never"
            " in memory. Drop outputs of the layer."
        )
    if module is not None:
        raise NotImplementedError(
            "flax_attention: sow_weights: False is supported; weights are never in memory."
        )
    dtype = dtype or jnp.result_type(query, key, value)
    query, key, value = (jnp.asarray(x, dtype) for x in (query, key, value))
    batch = query.shape[:-3]

    def joined(x: jax.Array | None) -> jax.Array | None:
        """A bias or mask with its batch axes joined into one."""
        if x is None or x.ndim <= 3:
            return x
        is_one = all(n == 1 for n in x.shape[:-3])
        x = x if is_one else jnp.broadcast_to(x, (*batch, *x.shape[-3:]))
        return x.reshape(-1, *x.shape[-3:])

    q, k, v = (x.reshape(-1, *x.shape[-3:]) for x in (query, key, value))
    seen = None if mask is None else jnp.asarray(mask) != 0
    o = dot_product_attention(q, k, v, joined(bias), joined(seen), is_causal=is_causal)
    assert isinstance(o, jax.Array)
    return o.reshape(*batch, *o.shape[1:])
