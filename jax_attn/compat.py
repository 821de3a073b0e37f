"""Attention with the signatures of other JAX libraries, for code that moves from them."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from jax_attn._dense.dense import dot_product_attention
from jax_attn._ops.attention import attention
from jax_attn._ops.kv_cache import append_kv
from jax_attn._ops.operands import as_known
from jax_attn._plan.plan import plan
from jax_attn._spec.spec import AttentionSpec
from jax_attn._spec.target import LARGEST_HEAD_DIM, default_target

__all__ = [
    "cached_attention",
    "flax_attention",
    "paged_attention",
    "paged_attention_gpu",
    "ragged_paged_attention",
]

# Launch parameters of their kernels, which our kernels do not have.
_TUNING = {
    "paged_attention": {"pages_per_compute_block", "megacore_mode", "inline_seq_dim"},
    "paged_attention_gpu": {"pages_per_compute_block", "block_h", "k_splits", "num_warps"}
    | {"num_stages", "interpret", "debug"},
    "ragged_paged_attention": {"chunk_prefill_size", "num_kv_pages_per_block", "debug_mode"}
    | {"num_queries_per_block", "vmem_limit_bytes", "decode_q_len", "decode_block_sizes"}
    | {"prefill_block_sizes", "d_block_sizes", "p_block_sizes", "m_block_sizes"}
    | {"disable_bounds_checks", "disable_semaphore_checks"},
}

# Dtypes of a cache that kernels read with queries of another dtype.
_EIGHT_BITS = ("float8_e4m3fn", "float8_e5m2")


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
    is_read = jnp.arange(table.shape[1])[None] < num_read[:, None]
    return jnp.where(is_read, table, 0).astype(jnp.int32)


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
    for name, array in (("q", q), ("lengths", lengths), (table_name, page_indices)):
        as_known(op, name, array)
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
    if not batch:
        return jnp.zeros_like(q)
    # Each KV head of a request is planned as a separate request with the head's part of the pool.
    num_requests, num_slots = batch * num_kv_heads, page_indices.shape[1]
    spec = AttentionSpec(
        num_q_heads // num_kv_heads,
        1,
        head_dim,
        dtype=q.dtype.name,
        causal=False,  # the token is the last one, and a request may have no keys
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
        (table[:, None] + heads[None]).reshape(-1),
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
    skip_kv_mask: bool = False,
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
    kv_cache: [num_pages, page_size, heads / packing, packing, width], dtype of queries,
        float8_e4m3fn or float8_e5m2. heads: 2 * num_kv_heads, rounded up to a multiple of packing;
        the key and the value of a head are side by side. width: at least head_dim. Donate it to
        write in place. Up to a width of 256 it is read without a copy, and the q . k matmul costs
        twice as much. Else pages in page_indices are copied.
    kv_lens: i32[max_num_seqs], new tokens included. page_indices: i32[max_num_seqs *
        pages_per_seq]. cu_q_lens: i32[max_num_seqs + 1].
    distribution: i32[3]. The last number is the number of sequences.
    attention_sink: [num_q_heads], f32. sliding_window: number of keys that a query sees, its own
        included. k_scale, v_scale: factors for stored keys and values. q_scale: queries are divided
        by it and rounded to the dtype of the cache; logits are multiplied by it.
    keys and values for a float8 cache have its dtype: they are divided by k_scale and v_scale and
        rounded before the call, as in RPA v3.
    skip_kv_mask: ignored; as in RPA v3, must be False with use_causal_mask. mask_value: ignored.
    tuning: launch parameters of their kernel (m_block_sizes, disable_bounds_checks, ...), ignored.

    Returns o: [max_num_tokens, num_q_heads, head_dim], 0 beyond the tokens, and the cache. Raises
    ValueError for arrays and options that do not fit, NotImplementedError for a cache of another
    dtype or a head_dim that attention does not have.
    """
    del mask_value
    op = "ragged_paged_attention"
    _check_tuning(op, tuning)
    for name, array in (("queries", queries), ("kv_lens", kv_lens), ("page_indices", page_indices)):
        as_known(op, name, array)
    if skip_kv_mask and use_causal_mask:
        raise ValueError(f"{op}: skip_kv_mask: expected False with use_causal_mask, got True.")
    if sliding_window is not None and sliding_window <= 0:
        raise ValueError(
            f"{op}: sliding_window: expected a positive number of keys or None, got"
            f" {sliding_window}."
        )
    if soft_cap is not None and soft_cap <= 0:
        raise ValueError(f"{op}: soft_cap: expected a positive number or None, got {soft_cap}.")
    _check_shape(op, "queries", queries, (None,) * 3, "[max_num_tokens, num_q_heads, head_dim]")
    num_tokens, num_q_heads, head_dim = queries.shape
    _check_shape(op, "keys", keys, (num_tokens, None, head_dim), f"[{num_tokens}, heads, head_dim]")
    _check_shape(op, "values", values, keys.shape, f"keys' {list(keys.shape)}")
    _check_shape(op, "kv_cache", kv_cache, (None,) * 5, "[pages, page_size, heads, packing, dim]")
    num_pages, page_size, heads, packing, width = kv_cache.shape
    num_kv_heads = keys.shape[1]
    if num_q_heads % num_kv_heads:
        raise ValueError(
            f"{op}: queries: expected a multiple of {num_kv_heads} heads, got {num_q_heads}."
        )
    num_pairs = -(-2 * num_kv_heads // packing) * packing // 2  # in the cache; the last are unused
    if heads * packing != 2 * num_pairs or width < head_dim:
        raise ValueError(
            f"{op}: kv_cache: expected {2 * num_pairs} heads of keys and values of head_dim >="
            f" {head_dim}, got {list(kv_cache.shape)}."
        )
    if kv_cache.dtype != queries.dtype and kv_cache.dtype.name not in _EIGHT_BITS:
        raise NotImplementedError(
            f"{op}: kv_cache: {queries.dtype} as queries, {' and '.join(_EIGHT_BITS)} are"
            f" supported, got {kv_cache.dtype}; cast the queries."
        )
    for name, new in (("keys", keys), ("values", values)):
        if update_kv_cache and new.dtype != kv_cache.dtype:
            raise ValueError(
                f"{op}: {name}: expected {kv_cache.dtype} as the cache, got {new.dtype}; divide"
                f" them by {name[0]}_scale, if there is one, and cast them."
            )
    _check_shape(op, "kv_lens", kv_lens, (None,), "[max_num_seqs]")
    num_seqs = kv_lens.shape[0]
    _check_shape(op, "cu_q_lens", cu_q_lens, (num_seqs + 1,), f"[{num_seqs + 1}]")
    _check_shape(op, "page_indices", page_indices, (None,), "[max_num_seqs * pages_per_seq]")
    if page_indices.shape[0] % max(1, num_seqs):
        raise ValueError(
            f"{op}: page_indices: expected a multiple of {num_seqs} entries, as many for each"
            f" sequence, got {page_indices.shape[0]}."
        )
    _check_shape(op, "distribution", distribution, (3,), "[3]")
    # Sequences beyond the number given by `distribution` get no tokens.
    active = jnp.arange(num_seqs + 1) < distribution[-1]
    cu_q_lens = jnp.where(active, cu_q_lens, cu_q_lens[distribution[-1]]).astype(jnp.int32)
    kv_lens = jnp.where(active[:-1], kv_lens, 0).astype(jnp.int32)
    table = _pages_that_are_read(page_indices.reshape(num_seqs, -1), kv_lens, page_size)
    # A row of the cache is a key and its value. q is 0 in the value's columns.
    rows = kv_cache.reshape(num_pages, page_size, num_pairs, 2 * width)
    if update_kv_cache:
        missing = ((0, 0), (0, num_pairs - num_kv_heads), (0, width - head_dim))
        new = jnp.concatenate([jnp.pad(keys, missing), jnp.pad(values, missing)], axis=-1)
        tokens = jnp.arange(num_tokens)
        seq = jnp.searchsorted(cu_q_lens, tokens, side="right") - 1
        at = jnp.minimum(seq, num_seqs - 1)
        position = kv_lens[at] - cu_q_lens[at + 1] + tokens
        is_written = (seq < num_seqs) & (position >= 0)
        page = jnp.where(is_written, table[at, position // page_size], num_pages)
        rows = rows.at[page, position % page_size].set(new, mode="drop")
    if q_scale is not None:
        queries = _rounded_queries(queries, q_scale, kv_cache.dtype)
    target = default_target()
    if 2 * width <= LARGEST_HEAD_DIM:
        q, sinks, k, v, kv_dtype = _in_pairs(queries, attention_sink, rows, num_kv_heads)
        of_o = slice(width, width + head_dim)
    else:
        used = rows[table].reshape(-1, page_size, num_pairs, 2, width).astype(queries.dtype)
        table = jnp.arange(table.size, dtype=jnp.int32).reshape(table.shape)
        used = jnp.pad(used[..., :head_dim], ((0, 0),) * 4 + ((0, -head_dim % 8),))
        q = jnp.pad(queries, ((0, 0), (0, 0), (0, -head_dim % 8)))
        k, v = (used[:, :, :num_kv_heads, i] for i in (0, 1))
        sinks, of_o = attention_sink, slice(head_dim)
        kv_dtype = None
    spec = AttentionSpec(
        q.shape[1],
        k.shape[2],
        q.shape[2],
        dtype=queries.dtype.name,
        kv_dtype=kv_dtype,
        causal=use_causal_mask,
        window_left=-1 if sliding_window is None else sliding_window - 1,
        sm_scale=sm_scale * (q_scale or 1.0) * (k_scale or 1.0),
        logits_soft_cap=soft_cap or 0.0,
        page_size=page_size,
        max_batch=num_seqs,
        max_qo_tokens=num_tokens,
        max_kv_pages=table.size,
        target=target,
    )
    own = plan(spec, cu_q_lens, kv_lens, jnp.arange(num_seqs + 1) * table.shape[1], table.ravel())
    o = attention(q, k, v, own, sinks=sinks)[:, :num_q_heads, of_o]
    o = o if v_scale is None else o * v_scale
    return o.astype(out_dtype or queries.dtype), rows.reshape(kv_cache.shape)


def _in_pairs(
    queries: jax.Array, sinks: jax.Array | None, rows: jax.Array, num_kv_heads: int
) -> tuple[jax.Array, jax.Array | None, jax.Array, jax.Array, str | None]:
    """q, sinks, k, v and kv_dtype for rows that are a key and its value.

    q is 0 in the columns of the value, and in heads that the rows have beyond num_kv_heads.
    """
    num_q_heads, head_dim = queries.shape[1:]
    num_pairs, row = rows.shape[2:]
    more = num_q_heads // num_kv_heads * num_pairs - num_q_heads
    q = jnp.pad(queries, ((0, 0), (0, more), (0, row - head_dim)))
    sinks = None if sinks is None else jnp.pad(sinks, (0, more))
    return q, sinks, rows, rows, None if rows.dtype == queries.dtype else rows.dtype.name


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
    promote_dtype: Any = None,
    is_causal: bool = False,
    *,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Any = None,
    qk_attn_weights_einsum: Any = None,
    attn_weights_value_einsum: Any = None,
) -> jax.Array:
    """`attention_fn` for flax.nnx.MultiHeadAttention and flax.linen.MultiHeadDotProductAttention.

    query: [..., T, num_heads, head_dim]. key, value: [..., S, num_heads, head_dim]. bias, mask:
        they broadcast to [..., num_heads, T, S]; a key is visible where the mask is not 0.
    dtype: dtype of the computation; None: that of the operands. promote_dtype: called instead with
        (query, key, value) and dtype. precision, force_fp32_for_softmax: ignored; sums and weights
        are float32.

    Returns [..., T, num_heads, head_dim]. Raises NotImplementedError for dropout of attention
    weights, for sowing them, and for products of your own (einsum_dot_general,
    qk_attn_weights_einsum, attn_weights_value_einsum).
    """
    del broadcast_dropout, dropout_rng, precision, force_fp32_for_softmax
    products = {
        "einsum_dot_general": einsum_dot_general,
        "qk_attn_weights_einsum": qk_attn_weights_einsum,
        "attn_weights_value_einsum": attn_weights_value_einsum,
    }
    if given := [name for name, product in products.items() if product is not None]:
        raise NotImplementedError(
            f"flax_attention: {', '.join(given)}: None is supported; products are in the kernels."
        )
    if dropout_rate and not deterministic:
        raise NotImplementedError(
            f"flax_attention: dropout_rate: 0 is supported, got {dropout_rate}; weights are never"
            " in memory. Drop outputs of the layer."
        )
    if module is not None:
        raise NotImplementedError(
            "flax_attention: sow_weights: False is supported; weights are never in memory."
        )
    if promote_dtype is not None:
        query, key, value = promote_dtype((query, key, value), dtype=dtype)
    else:
        dtype = dtype or jnp.result_type(query, key, value)
        query, key, value = (jnp.asarray(x, dtype) for x in (query, key, value))
    batch = query.shape[:-3]

    def joined(x: jax.Array | None) -> jax.Array | None:
        """A bias or mask with its batch axes joined into one."""
        if x is None or x.ndim <= 3:
            return x
        is_one = all(n == 1 for n in x.shape[:-3])
        x = x if is_one else jnp.broadcast_to(x, (*batch, *x.shape[-3:]))
        return x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])

    q, k, v = (x.reshape(math.prod(batch), *x.shape[-3:]) for x in (query, key, value))
    seen = None if mask is None else jnp.asarray(mask).astype(bool)
    o = dot_product_attention(q, k, v, joined(bias), joined(seen), is_causal=is_causal)
    assert isinstance(o, jax.Array)
    return o.reshape(*batch, *o.shape[1:])


def cached_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    positions: jax.Array,
    *,
    sm_scale: float | None = None,
    sliding_window: int | None = None,
    attn_logits_soft_cap: float | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A step of a sampler whose cache has a row for each sequence, as those of gemma and Flax.

    Writes the new tokens to their rows, at their positions, and attends to all tokens up to each.

    query: [batch, T, num_heads, head_dim]. key, value: [batch, T, num_kv_heads, head_dim]. T: new
        tokens of each sequence; their positions follow each other.
    k_cache, v_cache: [batch, cache_len, num_kv_heads, head_dim], dtype of the query. Under jit a
        donated cache, or one that a loop carries, is written in place.
    positions: i32[batch, T] or [batch], of which the first of each sequence counts. positions[b] +
        T is at most cache_len. Padding at the end of a prompt is written and attends like tokens;
        the next tokens replace it before any attends to it.
    sm_scale: factor of q . k; None: 1 / sqrt(head_dim). sliding_window: number of keys that a query
        sees, its own included.

    Returns o: [batch, T, num_heads, head_dim], and both caches. Raises ValueError for arrays and
    options that do not fit.
    """
    op = "cached_attention"
    as_known(op, "query", query)
    _check_shape(op, "query", query, (None,) * 4, "[batch, T, num_heads, head_dim]")
    batch, num_new, num_heads, head_dim = query.shape
    _check_shape(
        op, "key", key, (batch, num_new, None, head_dim), f"[{batch}, {num_new}, heads, {head_dim}]"
    )
    _check_shape(op, "value", value, key.shape, f"key's {list(key.shape)}")
    num_kv_heads = key.shape[2]
    if not num_kv_heads or num_heads % num_kv_heads:
        raise ValueError(
            f"{op}: query: expected a multiple of {num_kv_heads} heads, got {num_heads}."
        )
    row = (batch, None, num_kv_heads, head_dim)
    _check_shape(op, "k_cache", k_cache, row, f"[{batch}, cache_len, {num_kv_heads}, {head_dim}]")
    _check_shape(op, "v_cache", v_cache, k_cache.shape, f"k_cache's {list(k_cache.shape)}")
    for name, array in (("k_cache", k_cache), ("v_cache", v_cache)):
        if array.dtype != query.dtype:
            raise ValueError(
                f"{op}: {name}: expected the query's {query.dtype}, got {array.dtype}."
            )
    if sliding_window is not None and sliding_window <= 0:
        raise ValueError(
            f"{op}: sliding_window: expected a positive number of keys or None, got"
            f" {sliding_window}."
        )
    cache_len = k_cache.shape[1]
    if num_new > cache_len:
        raise ValueError(f"{op}: key: expected at most {cache_len} tokens, got {num_new}.")
    of_positions = (batch, num_new) if getattr(positions, "ndim", 1) == 2 else (batch,)
    _check_shape(op, "positions", positions, of_positions, f"[{batch}] or [{batch}, {num_new}]")
    if positions.ndim == 2:
        positions = positions[:, 0]
    spec = AttentionSpec(
        num_heads,
        num_kv_heads,
        head_dim,
        dtype=query.dtype.name,
        window_left=-1 if sliding_window is None else sliding_window - 1,
        sm_scale=sm_scale,
        logits_soft_cap=attn_logits_soft_cap or 0.0,
        page_size=cache_len,  # a row of the cache is a page
        num_pages=batch,
        max_batch=batch,
        max_qo_tokens=batch * num_new,
        max_kv_pages=batch,
        share_prefixes=False,
    )
    # Layers with the same positions and options have the same plan, which XLA then makes once.
    rows = jnp.arange(batch + 1, dtype=jnp.int32)
    own = plan(spec, rows * num_new, positions.astype(jnp.int32) + num_new, rows, rows[:-1])
    k, v = (x.astype(query.dtype).reshape(batch * num_new, *x.shape[2:]) for x in (key, value))
    k_cache, v_cache = append_kv(k_cache, v_cache, k, v, own)
    o = attention(query.reshape(spec.q_shape), k_cache, v_cache, own)
    return o.reshape(query.shape), k_cache, v_cache
