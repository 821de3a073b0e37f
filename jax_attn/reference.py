"""The oracle: every operation of this library in its simplest form, dense, request by request.

The code is written to be readable and correct, not fast. It runs on numpy and on jax arrays. The
precision follows the inputs:

    float64         (numpy, or jax with x64) everything in float64: the truth
    float32         everything in float32
    bf16, f16       logits and softmax in float32; P and the results are rounded to the dtype

Lengths and page tables are host arrays (numpy), as `jax_attn.plan` takes them.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn._spec import formats
from jax_attn._spec.spec import AttentionSpec
from jax_attn._spec.state_spec import LinearAttentionSpec
from jax_attn._variant.program import At
from jax_attn._variant.variant import Variant

Array = Any  # numpy.ndarray | jax.Array
E4M3 = jnp.float8_e4m3fn
E5M2 = jnp.float8_e5m2

__all__ = [
    "append_kv",
    "attention",
    "attention_dense",
    "attention_vjp",
    "dequantize",
    "dot_product_attention",
    "linear_attention",
    "merge_state",
    "merge_states",
    "quantize",
    "quantize_queries",
    "short_convolution",
    "visible_keys",
]


def attention(
    q: Array,
    k: Array,
    v: Array | None,
    qo_indptr: np.ndarray,
    kv_lens: np.ndarray,
    page_indptr: np.ndarray | None = None,
    page_indices: np.ndarray | None = None,
    *,
    spec: AttentionSpec,
    kv_indptr: np.ndarray | None = None,
    q_offsets: np.ndarray | None = None,
    layer: int | None = None,
    sinks: Array | None = None,
    q_scale: Array | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    variant_operands: Mapping[str, Array] | None = None,
) -> tuple[Array, Array]:
    """Attention of a batch of requests over a paged or ragged KV, as jax_attn.attention.

    Args:
      q: [max_qo_tokens, num_qo_heads, head_dim_qk]. Request r has the rows
        [qo_indptr[r], qo_indptr[r + 1]).
      k: [num_pages, page_size, num_kv_heads, head_dim_qk], or ragged [max_kv_tokens, num_kv_heads,
        head_dim_qk]; with `layer`, a leading [num_layers].
      v: as k, with head_dim_vo. None: the first spec.head_dim_vo columns of k (mla).
      qo_indptr: [batch_size + 1], i32, tokens.
      kv_lens: [batch_size], i32, tokens; the new ones included.
      page_indptr: [batch_size + 1], i32, pages. None if ragged.
      page_indices: [>= page_indptr[-1]], i32, page ids. None if ragged.
      spec: windows, soft cap and scale are read from it.
      kv_indptr: ragged only: [>= batch_size], i32, the first row of each request. None: the
        cumulative sum of kv_lens.
      q_offsets: [batch_size], i32, position of each request's first query token. None:
        kv_len - qo_len.
      layer: index of the layer if k and v have a leading [num_layers].
      sinks: [num_qo_heads], natural-log units: an extra logit per head that takes part in the
        softmax and has value 0. It is counted once.
      q_scale: [num_qo_heads], or None: 1.
      k_scale, v_scale: [num_kv_heads], or None: 1. Each element of q, k and v is multiplied by the
        scale of its head. Without v, k_scale applies to the values, too. Quantized values (see
        `quantize`) are first converted to the dtype of q, or to the spec's dtype if q is
        float8_e4m3fn. With spec.eight_bit_products they are not converted, and neither is the
        result of `quantize_queries`. The rounding of P depends on the kernel's steps and is not
        modelled.
      variant_operands: name -> array. Operands of the spec's variant.

    Returns:
      o: [max_qo_tokens, num_qo_heads, head_dim_vo], dtype of q, or the spec's if q is
        float8_e4m3fn. 0 in rows that see no key and in padding rows.
      lse: [max_qo_tokens, num_qo_heads], float32 (float64 if q is): the natural log of the sum of
        exp(logit) over the visible keys and the sink. -inf in rows that see no key, even with
        sinks.
    """
    if v is None:
        v, v_scale = k[..., : spec.head_dim_vo], k_scale
    dtype = jnp.dtype(spec.dtype) if q.dtype == E4M3 else q.dtype
    exact = dtype
    if spec.eight_bit_products:
        exact = np.float64 if dtype == np.float64 else np.float32
        q = q if q.dtype == E4M3 else quantize_queries(q, spec.kv_dtype)
    q, k, v = (
        dequantize(x, scale, exact, spec.kv_dtype if x.dtype == np.uint8 else None)
        for x, scale in ((q, q_scale), (k, k_scale), (v, v_scale))
    )
    if layer is not None:
        k, v = k[layer], v[layer]
    os, lses = [], []
    page_size = k.shape[1]
    for r, (rows, places, visible, q_offset) in enumerate(
        _requests(
            qo_indptr, kv_lens, page_indptr, page_indices, kv_indptr, q_offsets, page_size, spec
        )
    ):
        heads = np.arange(q.shape[1])[:, None, None]
        q_row = np.arange(rows.start, rows.stop)[:, None]
        facts = At(
            head=heads,
            kv_head=heads // (q.shape[1] // k.shape[-2]),
            request=r,
            q_pos=q_offset + q_row - rows.start,
            kv_pos=np.arange(visible.shape[1]),
            q_row=q_row,
            kv_row=places[0] if len(places) == 1 else places[0] * page_size + places[1],
            q_len=visible.shape[0],
            kv_len=visible.shape[1],
        )
        at = jax.tree.map(lambda x: np.asarray(x, np.int32), facts)
        q_r, k_r, v_r = (
            _transformed(name, x, at, spec, variant_operands)
            for name, x in (("q", q[rows]), ("k", k[places]), ("v", v[places]))
        )
        o_r, lse_r = attention_dense(
            q_r,
            k_r,
            v_r,
            visible,
            sm_scale=spec.sm_scale,
            logits_soft_cap=spec.logits_soft_cap,
            sinks=sinks,
            variant=spec.variant,
            at=at,
            variant_operands=variant_operands,
        )
        o_r = _transformed("o", o_r, at, spec, variant_operands)
        os.append(o_r.astype(dtype))
        lses.append(lse_r)
    xp = _namespace(q)
    padding = q.shape[0] - sum(len(o_r) for o_r in os)
    os.append(xp.zeros((padding, q.shape[1], v.shape[-1]), dtype))
    lses.append(xp.full((padding, q.shape[1]), -np.inf, _compute_dtype(q)))
    return xp.concatenate(os), xp.concatenate(lses)


def _transformed(
    name: str,
    x: Array,
    at: At,
    spec: AttentionSpec,
    variant_operands: Mapping[str, Array] | None,
) -> Array:
    """The vectors of a request after a transform of the spec's variant, rounded to their dtype.

    x: [tokens, heads, head_dim]. at: arrays that broadcast to [num_qo_heads, qo_len, kv_len].
    """
    variant = spec.variant
    if variant is None or name not in variant.transforms:
        return x
    tokens, heads, _ = x.shape
    facts: dict[str, Any] = {}
    for fact in ("request", "q_len", "kv_len", *(["q_pos", "q_row"] if name in "qo" else [])):
        facts[fact] = np.asarray(getattr(at, fact)).reshape(-1, 1)
    if name in "kv":
        facts |= {fact: np.asarray(getattr(at, fact)).reshape(-1, 1) for fact in _OF_KEYS}
        facts["kv_row"] = np.broadcast_to(facts["kv_row"], (tokens, 1))
    facts["head"] = np.arange(heads, dtype=np.int32)
    group = spec.num_qo_heads // spec.num_kv_heads
    facts["kv_head"] = facts["head"] // (group if name in "qo" else 1)
    wide = np.asarray(x).astype(_compute_dtype(x))
    with jax.enable_x64(True) if wide.dtype == np.float64 else contextlib.nullcontext():
        found = variant.apply_transform(name, wide, facts, variant_operands or {})
    return _namespace(x).asarray(found).astype(x.dtype)


_OF_KEYS = ("kv_pos", "kv_row")


def _requests(
    qo_indptr: np.ndarray,
    kv_lens: np.ndarray,
    page_indptr: np.ndarray | None,
    page_indices: np.ndarray | None,
    kv_indptr: np.ndarray | None,
    q_offsets: np.ndarray | None,
    page_size: int,
    spec: AttentionSpec,
) -> Iterator[tuple[slice, tuple[np.ndarray, ...], np.ndarray, int]]:
    """Iterate over the requests of a batch.

    page_size: not read if ragged. The other arguments: as for `attention`.

    Yields for each request: its rows of q, the offsets of its keys in k and v, which row sees which
    key, and the position of its first row.
    """
    if kv_indptr is None:
        kv_indptr = np.concatenate([[0], np.cumsum(kv_lens)])
    for r, kv_len in enumerate(np.asarray(kv_lens)):
        rows = slice(qo_indptr[r], qo_indptr[r + 1])
        places: tuple[np.ndarray, ...] = (kv_indptr[r] + np.arange(kv_len),)
        if page_indices is not None and page_indptr is not None:
            pages, slots = np.divmod(np.arange(kv_len), page_size)
            places = page_indices[page_indptr[r] + pages], slots
        qo_len = rows.stop - rows.start
        q_offset = kv_len - qo_len if q_offsets is None else q_offsets[r]
        right = 0 if spec.causal else spec.window_right
        visible = visible_keys(qo_len, kv_len, q_offset, spec.window_left, right)
        yield rows, places, visible, int(q_offset)


def attention_vjp(
    d_o: np.ndarray,
    d_lse: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    qo_indptr: np.ndarray,
    kv_lens: np.ndarray,
    page_indptr: np.ndarray | None = None,
    page_indices: np.ndarray | None = None,
    *,
    spec: AttentionSpec,
    kv_indptr: np.ndarray | None = None,
    q_offsets: np.ndarray | None = None,
    layer: int | None = None,
    sinks: np.ndarray | None = None,
    magnitudes: bool = False,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
    """The gradients of `attention` in float64. Elements that are read must be finite.

    Args:
      d_o: cotangent of o. Padding rows are not read.
      d_lse: cotangent of lse. Rows that see no key are not read.
      magnitudes: True: multiply absolute values instead, which gives a bound for the rounding error
        of a kernel.
      the others: as for `attention`, numpy arrays.

    Returns:
      d_q, d_k, d_v: in the shapes of q, k, v; 0 for elements that are not read.
      d_sinks: [num_qo_heads], or None.
    """
    size = np.abs if magnitudes else np.asarray
    q, k, v, d_o, d_lse = (x.astype(np.float64) for x in (q, k, v, d_o, d_lse))
    d_q, d_k, d_v = (np.zeros(x.shape) for x in (q, k, v))
    k_layer, v_layer, d_k_layer, d_v_layer = (
        x if layer is None else x[layer] for x in (k, v, d_k, d_v)
    )
    d_sinks = None if sinks is None else np.zeros(len(sinks))
    group = q.shape[1] // k.shape[-2]
    cap = spec.logits_soft_cap
    sm_scale = q.shape[-1] ** -0.5 if spec.sm_scale is None else spec.sm_scale
    page_size = k_layer.shape[1]
    for rows, places, visible, _ in _requests(
        qo_indptr, kv_lens, page_indptr, page_indices, kv_indptr, q_offsets, page_size, spec
    ):
        o_r, lse_r = attention_dense(
            q[rows],
            k_layer[places],
            v_layer[places],
            visible,
            sm_scale=sm_scale,
            logits_soft_cap=cap,
            sinks=sinks,
        )
        is_empty = np.isneginf(lse_r)
        d_lse_r = np.where(is_empty, 0, d_lse[rows])
        # From here on the query head is the first axis, before [qo_len, kv_len] or [*, head_dim].
        q_h, d_o_h, o_h, d_lse_h, k_h, v_h = (
            x.swapaxes(0, 1)
            for x in (
                q[rows],
                d_o[rows],
                o_r,
                d_lse_r,
                np.repeat(k_layer[places], group, axis=1),
                np.repeat(v_layer[places], group, axis=1),
            )
        )
        logits = sm_scale * q_h @ k_h.swapaxes(1, 2)
        slope = np.ones(())
        if cap:
            x = np.tanh(logits / cap)
            logits, slope = cap * x, 1 - x**2
        # Not exp(logits - lse): far from 0, lse is the largest logit without the sum.
        logits = np.where(visible, logits, -np.inf)
        of_sinks = np.full((1, 1), -np.inf) if sinks is None else sinks[:, None].astype(np.float64)
        largest = np.maximum(logits.max(axis=-1, initial=-np.inf), of_sinks)
        largest = np.where(is_empty.T, 0, largest)
        p = np.exp(logits - largest[..., None])
        sink_p = np.where(is_empty.T, 0, np.exp(of_sinks - largest))
        total = np.where(is_empty.T, 1, p.sum(axis=-1) + sink_p)
        p, sink_p = p / total[..., None], sink_p / total
        d_p = size(d_o_h) @ size(v_h).swapaxes(1, 2)
        d = (size(d_o_h) * size(o_h)).sum(-1) - (-1 if magnitudes else 1) * size(d_lse_h)
        d_s = abs(sm_scale) * slope * p * (d_p + d[..., None] if magnitudes else d_p - d[..., None])
        d_s = d_s if magnitudes else np.sign(sm_scale) * d_s
        d_q[rows] = (d_s @ size(k_h)).swapaxes(0, 1)
        per_head = d_s.swapaxes(1, 2) @ size(q_h), p.swapaxes(1, 2) @ size(d_o_h)
        for total, x in zip((d_k_layer, d_v_layer), per_head, strict=True):
            of_group = x.reshape(k.shape[-2], group, *x.shape[1:]).sum(axis=1)
            np.add.at(total, places, of_group.swapaxes(0, 1))
        if sinks is not None and d_sinks is not None:
            sign = 1 if magnitudes else -1
            d_sinks += sign * (sink_p * d).sum(axis=1)
    return d_q, d_k, d_v, d_sinks


def dequantize(x: Array, scale: Array | None, dtype: Any, kv_dtype: str | None = None) -> Array:
    """The values that quantized x stands for, as dtype. x itself if not quantized and no scale.

    x: [..., num_heads, head_dim], or rows made by `quantize`.
    scale: [num_heads], or None: 1.
    kv_dtype: format of x if x is uint8.
    """
    if x.dtype == np.int8:
        x = _from_int8(np.asarray(x))
    elif x.dtype == np.uint8:
        assert kv_dtype is not None, "three formats are rows of uint8"
        x = _from_four_bits(np.asarray(x), kv_dtype)
    elif x.dtype not in (E4M3, E5M2) and scale is None:
        return x
    x = x.astype(np.float64 if dtype == np.float64 else np.float32)
    return (x if scale is None else x * scale[:, None].astype(x.dtype)).astype(dtype)


def quantize_queries(q: Array, kv_dtype: str | None) -> np.ndarray:
    """q rounded to 8-bit values and back, as AttentionSpec.eight_bit_products multiplies it.

    The scale of a row is its largest magnitude divided by the largest 8-bit value (127 for int8,
    448 for float8_e4m3fn). q / scale is rounded to the nearest 8-bit value, ties to even. A row
    without a magnitude above 2^-90 counts as 0. A row with NaN or infinity is NaN.

    q: [..., head_dim]. Returns float64 for float64, else float32.
    """
    x = np.asarray(q)
    wide = np.float64 if x.dtype == np.float64 else np.float32
    x = x.astype(np.float32)
    largest = np.abs(x).max(axis=-1, keepdims=True)
    is_finite, counts = np.isfinite(largest), largest > np.float32(2.0**-90)
    scale = np.where(
        is_finite & counts, largest / np.float32(127 if kv_dtype == "int8" else 448), 1
    )
    codes = np.where(is_finite & counts, x, 0) / scale.astype(np.float32)
    codes = np.rint(codes) if kv_dtype == "int8" else codes.astype(E4M3).astype(np.float32)
    return codes.astype(wide) * np.where(is_finite, scale, np.nan).astype(wide)


def quantize(x: Array, scale: Array | None = None, kv_dtype: Any = E4M3) -> Array:
    """x as append_kv stores it, in a kv_dtype of docs/formats.md.

    float8: x / scale, rounded to nearest, ties to even, limited to the largest value; NaN stays
        NaN.
    int8: the scale of a row is its largest magnitude / 127, at least 2^-126. A row is the bytes of
        x / scale, rounded to the nearest integers, then the scale in float32.
    mxfp4: 4-bit e2m1 values (OCP Microscaling Formats 1.0), two per byte: byte i of a block of n
        has elements i and n / 2 + i. Then one byte for each block of 32: the exponent of its scale,
        the smallest power of two s with 6 * s >= every magnitude.
    nvfp4: 4-bit e2m1 values; byte i of each block of n <= 64 has elements i and n / 2 + i. Then one
        float8_e4m3fn block scale for each block of 16: largest magnitude / (6 * scale), rounded to
        nearest, at least 2^-9, NaN if the block has NaN or infinity. The 4-bit values are the
        nearest to x / (scale * block scale), limited to 6.
    int4: integers from -8 to 7 in the byte order of nvfp4. Then one float16 scale for each block of
        32: minus an eighth of the element with the largest magnitude (in a tie, the negative one),
        rounded away from 0 to the next float16, with magnitude in [2^-24, 65504]; NaN as for nvfp4.

    x: [..., num_heads, head_dim].
    scale: [num_heads], or None: 1. Only for float8 and nvfp4.
    """
    if kv_dtype == "int8":
        return _to_int8(np.asarray(x))
    if kv_dtype in formats.FOUR_BITS:
        return _to_four_bits(np.asarray(x), scale, kv_dtype)
    largest = float(jnp.finfo(kv_dtype).max)
    x = x.astype(np.float32)
    x = x if scale is None else x / scale[:, None].astype(np.float32)
    return _namespace(x).clip(x, -largest, largest).astype(kv_dtype)


def _to_int8(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float32)
    largest = np.abs(x).max(axis=-1, keepdims=True)
    is_finite = np.isfinite(largest)
    scale = np.where(
        is_finite, np.maximum(largest / np.float32(127), np.float32(2.0**-126)), np.nan
    )
    scale = scale.astype(np.float32)
    codes = np.rint(np.where(is_finite, x, 0) / np.where(is_finite, scale, 1)).astype(np.int8)
    return np.concatenate([codes, scale.view(np.int8)], axis=-1)


def _from_int8(x: np.ndarray) -> np.ndarray:
    scale = np.ascontiguousarray(x[..., -4:]).view(np.float32)
    return x[..., :-4].astype(np.float32) * scale


def _to_four_bits(x: np.ndarray, scale: Array | None, kv_dtype: str) -> np.ndarray:
    encode, _ = _FOUR_BITS[kv_dtype]
    head_scale = np.float32(1) if scale is None else np.asarray(scale, np.float32)[:, None]
    block, _ = formats.FOUR_BITS[kv_dtype]
    codes, scales = [], []
    for begin in range(0, x.shape[-1], block):
        part = encode(x[..., begin : begin + block], head_scale)
        codes.append(part[0])
        scales.append(part[1].view(np.uint8))
    packed = []
    code = np.concatenate(codes, axis=-1).astype(np.uint8)
    for span in _spans(kv_dtype, x.shape[-1]):
        low, high = np.split(code[..., span], 2, axis=-1)
        packed.append(low | high << 4)
    return np.concatenate(packed + scales, axis=-1)


def _from_four_bits(x: np.ndarray, kv_dtype: str) -> np.ndarray:
    _, decode = _FOUR_BITS[kv_dtype]
    block, scale_bytes = formats.FOUR_BITS[kv_dtype]
    head_dim = next(d for d in range(8, 1024, 8) if formats.row_bytes(kv_dtype, d) == x.shape[-1])
    codes, blocks = [], []
    for span in _spans(kv_dtype, head_dim):
        pairs = x[..., span.start // 2 : span.stop // 2]
        codes += [pairs & 15, pairs >> 4]
    code = np.concatenate(codes, axis=-1)
    scales = np.split(x[..., head_dim // 2 :], x[..., head_dim // 2 :].shape[-1] // scale_bytes, -1)
    for i, scale in enumerate(scales):
        part = code[..., i * block : (i + 1) * block]
        blocks.append(decode(part, np.ascontiguousarray(scale)))
    return np.concatenate(blocks, axis=-1).astype(np.float32)


def _spans(kv_dtype: str, head_dim: int) -> list[slice]:
    """The spans of elements that are packed together.

    Byte i of a span of n elements holds elements i and n / 2 + i.
    """
    span = 32 if kv_dtype == "mxfp4" else 64
    return [slice(d, min(d + span, head_dim)) for d in range(0, head_dim, span)]


_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def _to_e2m1(x: np.ndarray) -> np.ndarray:
    """The nearest e2m1 values as 4-bit codes, ties to even."""
    above = np.abs(np.minimum(np.abs(x), np.float32(7))[..., None] - _E2M1)
    nearest = above == above.min(axis=-1, keepdims=True)  # two of them in a tie
    code = np.argmax(nearest, axis=-1)
    code += (nearest.sum(axis=-1) == 2) & (code % 2 == 1)
    return code | np.where(np.signbit(x), 8, 0)


def _from_e2m1(code: np.ndarray) -> np.ndarray:
    return np.where(code & 8, np.float32(-1), np.float32(1)) * _E2M1[code & 7]


def _to_mxfp4(x: np.ndarray, _: Any) -> tuple[np.ndarray, np.ndarray]:
    # Biased exponent: scale / 2 must be representable, as float16 for f16 and normal for the rest.
    least = 104 if x.dtype == np.float16 else 3
    x = x.astype(np.float32)
    largest = np.abs(x).max(axis=-1, keepdims=True)
    is_finite = np.isfinite(largest)
    fraction, exponent = np.frexp(np.where(is_finite, largest, 1))  # fraction in [0.5, 1) or 0
    scale = np.maximum(exponent + 126 - np.where(fraction <= 0.75, 2, 1), least)
    scale = np.where(largest == 0, least, scale)
    scale = np.where(is_finite, scale, 255)
    signed = np.copysign(np.where(is_finite, x, 0), x)
    codes = _to_e2m1(signed * np.float32(2) ** (127 - np.minimum(scale, 254)))
    return codes, scale.astype(np.uint8)


def _from_mxfp4(code: np.ndarray, scale: np.ndarray) -> np.ndarray:
    exponent = scale.astype(np.int32)
    factor = np.where(exponent == 255, np.nan, np.float32(2) ** (exponent - np.float32(127)))
    return _from_e2m1(code) * factor.astype(np.float32)


def _to_nvfp4(x: np.ndarray, head_scale: Any) -> tuple[np.ndarray, np.ndarray]:
    x = x.astype(np.float32)
    largest = np.abs(x).max(axis=-1, keepdims=True)
    is_finite = np.isfinite(largest)
    wanted = np.where(is_finite, largest, 0) / (np.float32(6) * head_scale)
    scale = np.clip(wanted, np.float32(2.0**-9), np.float32(448)).astype(E4M3)
    step = np.maximum(scale.astype(np.float32) * head_scale, np.float32(2.0**-126))
    codes = np.where(is_finite, _to_e2m1(np.where(is_finite, x, 0) / step), 0)
    return codes, np.where(is_finite, scale, np.array(np.nan, E4M3))


def _from_nvfp4(code: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return _from_e2m1(code) * scale.view(E4M3).astype(np.float32)


def _to_int4(x: np.ndarray, _: Any) -> tuple[np.ndarray, np.ndarray]:
    x = x.astype(np.float32)
    high, low = x.max(axis=-1, keepdims=True), x.min(axis=-1, keepdims=True)
    is_finite = np.isfinite(high) & np.isfinite(low)
    eighth = np.where(is_finite, np.maximum(high, -low), 0) / np.float32(8)
    scale = np.minimum(eighth, np.float32(65504)).astype(np.float16)
    scale = np.where(scale < eighth, np.nextafter(scale, np.float16(np.inf)), scale)
    scale = np.clip(scale, np.float16(2.0**-24), np.float16(65504))
    scale = np.where(high > -low, -scale, scale)
    quotient = np.where(is_finite, x, 0) / scale.astype(np.float32)
    codes = np.rint(np.clip(quotient, -8, 7)).astype(np.int32) & 15
    return codes, np.where(is_finite, scale, np.float16(np.nan))


def _from_int4(code: np.ndarray, scale: np.ndarray) -> np.ndarray:
    numbers = (code.astype(np.int32) ^ 8) - 8
    return numbers.astype(np.float32) * scale.view(np.float16).astype(np.float32)


_FOUR_BITS = {
    "mxfp4": (_to_mxfp4, _from_mxfp4),
    "nvfp4": (_to_nvfp4, _from_nvfp4),
    "int4": (_to_int4, _from_int4),
}


def visible_keys(
    qo_len: int, kv_len: int, q_offset: int, window_left: int = -1, window_right: int = -1
) -> np.ndarray:
    """[qo_len, kv_len], bool: whether query token i, at position q_offset + i, sees key j.

    window_left, window_right: as in AttentionSpec; -1: no limit on that side.
    """
    pos = q_offset + np.arange(qo_len)[:, None]
    j = np.arange(kv_len)[None, :]
    visible = np.ones((qo_len, kv_len), bool)
    if window_left >= 0:
        visible &= j >= pos - window_left
    if window_right >= 0:
        visible &= j <= pos + window_right
    return visible


def attention_dense(
    q: Array,
    k: Array,
    v: Array,
    visible: Array,
    *,
    sm_scale: float | None = None,
    logits_soft_cap: float = 0.0,
    bias: Array | None = None,
    sinks: Array | None = None,
    variant: Variant | None = None,
    at: At | None = None,
    variant_operands: Mapping[str, Array] | None = None,
) -> tuple[Array, Array]:
    """Attention of one request: softmax(logits of the visible keys) @ v.

    Args:
      q: [qo_len, num_qo_heads, head_dim_qk].
      k: [kv_len, num_kv_heads, head_dim_qk].
      v: [kv_len, num_kv_heads, head_dim_vo].
      visible: bool, broadcastable to [num_qo_heads, qo_len, kv_len].
      sm_scale: logits = sm_scale * (q . k). None: 1 / sqrt(head_dim_qk).
      logits_soft_cap: c > 0: logits = c * tanh(logits / c). 0: off.
      bias: added to the logits after scale and soft cap, before the masks; broadcasts as `visible`.
      sinks: [num_qo_heads], natural-log units, or None.
      variant: its functions run under vmap, in float64 if q is. They get the logits after bias; its
        mask applies in addition to `visible`. With normalize="none", o is the sum of visible logits
        times values, and lse is 0.
      at: the `At` of a variant, arrays of i32 that broadcast as `visible`.
      variant_operands: name -> array. Operands of the variant.

    Returns:
      o: [qo_len, num_qo_heads, head_dim_vo], dtype of q.
      lse: [qo_len, num_qo_heads], as in `attention`.

    Rules for NaN and infinity, the same on every backend and in every loop:

    - A key or value that a row does not see never influences it, not even NaN or infinity.
    - A logit of NaN or +inf (from NaN or infinity in q or k) makes o and lse of the row NaN. A
      logit of -inf has softmax weight 0; a row with no other logits sees no key. `logits_soft_cap`
      makes infinities finite.
    - A value that is not finite affects only its column of o, in each row that sees it. NaN gives
      NaN. Infinity gives infinity, or NaN where its softmax weight is 0 here or underflows in
      float32. If a row sees several such values in a column, it is not specified whether it gets
      NaN or which infinity.
    """
    xp = _namespace(q)
    dtype = _compute_dtype(q)
    if sm_scale is None:
        sm_scale = q.shape[-1] ** -0.5

    def multiply(x: Array, y: Array) -> Array:
        """x: [num_qo_heads, n, m], y: [num_kv_heads, m, l] -> [num_qo_heads, n, l]."""
        group = x.shape[0] // y.shape[0]
        rows = x.reshape(y.shape[0], group * x.shape[1], x.shape[2])
        return (rows @ y).reshape(*x.shape[:2], y.shape[2])

    q_h, k_h, v_h = (x.astype(dtype).swapaxes(0, 1) for x in (q, k, v))  # heads first
    logits = dtype.type(sm_scale) * multiply(q_h, k_h.swapaxes(1, 2))
    if logits_soft_cap:
        logits = logits_soft_cap * xp.tanh(logits / logits_soft_cap)
    if bias is not None:
        logits = logits + bias.astype(dtype)
    visible = xp.broadcast_to(visible, logits.shape)
    if variant is not None and variant.has_program:
        assert at is not None
        with jax.enable_x64(True) if dtype == np.float64 else contextlib.nullcontext():
            changed, seen = variant.apply(logits, at, variant_operands or {})
            logits = logits if changed is None else xp.asarray(changed, dtype)
            visible = visible if seen is None else visible & xp.asarray(seen)
    logits = xp.where(visible, logits, -np.inf)
    is_sum = variant is not None and not variant.normalizes
    sees_a_key = (logits != -np.inf).any(axis=-1)  # NaN counts as visible

    logits_max = logits.max(axis=-1, initial=-np.inf)
    if sinks is not None:
        sinks = sinks.astype(dtype)[:, None]
        logits_max = xp.maximum(logits_max, sinks)
    logits_max = xp.where(sees_a_key, logits_max, 0)
    exp_logits = xp.exp(logits - logits_max[..., None])
    total = exp_logits.sum(axis=-1)
    if sinks is not None:
        total = total + xp.exp(sinks - logits_max)
    total = xp.where(sees_a_key, total, 1)
    lse = xp.where(sees_a_key, logits_max + xp.log(total), -np.inf)

    if is_sum:
        lse, total = xp.zeros_like(lse), xp.ones_like(total)
        exp_logits = xp.where(visible, logits, 0)

    probs = (exp_logits / total[..., None]).astype(v.dtype).astype(dtype)
    o = multiply(probs, xp.where(xp.isfinite(v_h), v_h, 0))
    nan = xp.isnan(total)[..., None]
    if xp is jnp or not np.isfinite(v_h).all():  # a traced array has no values to look at

        def sees(which: Array, values: Array) -> Array:
            """Whether a row sees, among the keys `which`, one of these values."""
            return multiply((visible & which).astype(dtype), values.astype(dtype)) > 0

        # 0 * NaN and 0 * inf are NaN: they must reach exactly the rows that see them.
        plus, minus = (sees(probs != 0, v_h == x) for x in (np.inf, -np.inf))
        nan = nan | sees(probs == probs, xp.isnan(v_h)) | sees(probs == 0, xp.isinf(v_h))
        nan = nan | (plus & minus)
        o = xp.where(plus, np.inf, xp.where(minus, -np.inf, o))
    o = xp.where(nan, np.nan, o)
    return o.swapaxes(0, 1).astype(q.dtype), lse.swapaxes(0, 1)


def append_kv(
    k_pages: Array,
    v_pages: Array,
    k_new: Array,
    v_new: Array,
    qo_indptr: np.ndarray,
    kv_lens: np.ndarray,
    page_indptr: np.ndarray,
    page_indices: np.ndarray,
    *,
    layer: int | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    kv_dtype: str | None = None,
) -> tuple[Array, Array]:
    """Write the batch's new tokens into their pages.

    Token i of a request goes to position kv_len - qo_len + i.

    Args:
      k_pages: [num_pages, page_size, num_kv_heads, head_dim_qk]; with `layer`, a leading
        [num_layers].
      v_pages: as k_pages, with head_dim_vo.
      k_new: [max_qo_tokens, num_kv_heads, head_dim_qk]. Rows beyond qo_indptr[-1] are not read.
      v_new: [max_qo_tokens, num_kv_heads, head_dim_vo].
      qo_indptr, kv_lens, page_indptr, page_indices: as in `attention`.
      layer: index of the layer if the pages have a leading [num_layers].
      k_scale, v_scale: [num_kv_heads] or None, for pages of float8 or nvfp4; see `quantize`.
      kv_dtype: format of the pages if they are uint8.

    Returns:
      k_pages, v_pages: copies of the pages with the new tokens.
    """
    page_size = k_pages.shape[-3]
    pages, slots = [], []
    for r, kv_len in enumerate(np.asarray(kv_lens)):
        pos = np.arange(kv_len - (qo_indptr[r + 1] - qo_indptr[r]), kv_len)
        pages.append(np.asarray(page_indices)[page_indptr[r] + pos // page_size])
        slots.append(pos % page_size)
    at: tuple[Any, ...] = (
        np.concatenate([[], *pages]).astype(int),
        np.concatenate([[], *slots]).astype(int),
    )
    if layer is not None:
        at = (layer, *at)
    nnz_qo = qo_indptr[-1]
    if k_pages.dtype != k_new.dtype:
        kv_dtype = kv_dtype or str(k_pages.dtype)
        k_new, v_new = quantize(k_new, k_scale, kv_dtype), quantize(v_new, v_scale, kv_dtype)
    k_pages = jnp.asarray(k_pages).at[at].set(k_new[:nnz_qo])
    v_pages = jnp.asarray(v_pages).at[at].set(v_new[:nnz_qo])
    return k_pages, v_pages


def append_rotated(
    qkv: Array,
    cos: Array,
    sin: Array,
    k_pages: Array,
    v_pages: Array,
    qo_indptr: np.ndarray,
    kv_lens: np.ndarray,
    page_indptr: np.ndarray,
    page_indices: np.ndarray,
    *,
    layer: int | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
) -> tuple[Array, Array, Array]:
    """Rotary embeddings of q and k (RoFormer, arXiv 2104.09864), then append_kv.

    Element i of a head is paired with i + head_dim_qk / 2. The pair (a, b) becomes
    (a cos - b sin, b cos + a sin).

    Args:
      qkv: [max_qo_tokens, (num_qo_heads + num_kv_heads) * head_dim_qk + num_kv_heads *
        head_dim_vo]: the heads of q, then of k, then of v.
      cos, sin: [max_qo_tokens, head_dim_qk / 2], for the position of each token.
      k_pages, v_pages, qo_indptr, kv_lens, page_indptr, page_indices, layer, k_scale, v_scale: as
        in `append_kv`.

    Returns:
      q: [max_qo_tokens, num_qo_heads, head_dim_qk], rotated; k_pages, v_pages: as in `append_kv`.
    """
    num_kv_heads, head_dim = k_pages.shape[-2:]
    v_dim = num_kv_heads * v_pages.shape[-1]
    xp = _namespace(qkv)
    heads = qkv[:, :-v_dim].reshape(len(qkv), -1, head_dim)
    a, b = xp.split(heads.astype(_compute_dtype(qkv)), 2, axis=-1)
    c, s = cos[:, None], sin[:, None]
    rotated = xp.concatenate([a * c - b * s, b * c + a * s], axis=-1).astype(qkv.dtype)
    v_new = qkv[:, -v_dim:].reshape(len(qkv), num_kv_heads, -1)
    pages = append_kv(
        k_pages,
        v_pages,
        rotated[:, -num_kv_heads:],
        v_new,
        *(qo_indptr, kv_lens, page_indptr, page_indices),
        layer=layer,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    return rotated[:, :-num_kv_heads], *pages


def merge_state(o_a: Array, lse_a: Array, o_b: Array, lse_b: Array) -> tuple[Array, Array]:
    """Merge two states of the same queries over disjoint sets of keys. See `merge_states`.

    Args:
      o_a, o_b: [n, num_heads, head_dim].
      lse_a, lse_b: [n, num_heads], natural log.
    """
    xp = _namespace(o_a)
    return merge_states(xp.stack([o_a, o_b]), xp.stack([lse_a, lse_b]))


def merge_states(o_parts: Array, lse_parts: Array) -> tuple[Array, Array]:
    """Merge states of the same queries over disjoint sets of keys.

    lse = log sum_i exp(lse_i), o = sum_i exp(lse_i - lse) * o_i (FlashInfer, arXiv 2501.01005,
    section 2.2).

    Args:
      o_parts: [num_states, n, num_heads, head_dim].
      lse_parts: [num_states, n, num_heads], natural log. A state with lse -inf is the identity; its
        o is ignored. A state with lse NaN or +inf makes the row NaN.

    Returns:
      o: [n, num_heads, head_dim], dtype of o_parts; lse: [n, num_heads].
    """
    xp = _namespace(o_parts)
    lse_parts = lse_parts.astype(_compute_dtype(o_parts))
    o_parts = xp.where((lse_parts == -np.inf)[..., None], xp.zeros((), o_parts.dtype), o_parts)
    lse_max = lse_parts.max(axis=0, initial=-np.inf)
    empty = lse_max == -np.inf
    # Empty rows get finite numbers before exp and log, so that gradients stay finite, too.
    lse_parts = xp.where(empty, 0, lse_parts)
    lse_max = xp.where(empty, 0, lse_max)
    weights = xp.exp(lse_parts - lse_max)
    total = xp.where(empty, 1, weights.sum(axis=0))
    o = (weights[..., None] * o_parts.astype(weights.dtype)).sum(axis=0) / total[..., None]
    o = xp.where(empty[..., None], 0, o)
    lse = xp.where(empty, -np.inf, lse_max + xp.log(total))
    return o.astype(o_parts.dtype), lse


def dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Array | None = None,
    key_value_seq_lengths: Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
) -> Array:
    """`jax.nn.dot_product_attention`, except that a row that sees no key is 0, not the mean of v.

    Args:
      query: [B, T, N, H] or [T, N, H].
      key: [B, S, K, H] or [S, K, H].
      value: [B, S, K, Hv] or [S, K, Hv].
      bias, mask: [B or 1, N or 1, T or 1, S or 1]. mask: bool, True where a key is visible.
      scale: logits = scale * (query . key). None: 1 / sqrt(H).
      is_causal: query i sees keys [0, i], also where T != S (top-left aligned).
      query_seq_lengths: [B]. Queries beyond it give 0.
      key_value_seq_lengths: [B]. Keys beyond it are not visible.
      local_window_size: (left, right), or one number for both: i sees [i - left, i + right].

    Returns:
      [B, T, N, Hv] or [T, N, Hv], dtype of query.
    """
    if query.ndim == 3:
        lead = lambda x: None if x is None else x.reshape(1, *x.shape)  # noqa: E731
        return dot_product_attention(
            lead(query),
            lead(key),
            lead(value),
            bias if bias is None or bias.ndim == 4 else lead(bias),
            mask if mask is None or mask.ndim == 4 else lead(mask),
            scale=scale,
            is_causal=is_causal,
            query_seq_lengths=query_seq_lengths,
            key_value_seq_lengths=key_value_seq_lengths,
            local_window_size=local_window_size,
        )[0]
    if local_window_size is None:
        window = (-1, -1)
    elif isinstance(local_window_size, int):
        window = (local_window_size, local_window_size)
    else:
        window = local_window_size
    qo_len, kv_len = query.shape[1], key.shape[1]
    os = []
    for b in range(query.shape[0]):
        visible = visible_keys(qo_len, kv_len, 0, *window)
        if is_causal:
            visible = visible & visible_keys(qo_len, kv_len, 0, -1, 0)
        if query_seq_lengths is not None:
            visible = visible & (np.arange(qo_len)[:, None] < query_seq_lengths[b])
        if key_value_seq_lengths is not None:
            visible = visible & (np.arange(kv_len)[None, :] < key_value_seq_lengths[b])
        if mask is not None:
            visible = visible & mask[b % mask.shape[0]]
        bias_b = None if bias is None else bias[b % bias.shape[0]]
        o, _ = attention_dense(query[b], key[b], value[b], visible, sm_scale=scale, bias=bias_b)
        os.append(o)
    return _namespace(query).stack(os)


def linear_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    g: np.ndarray | None,
    beta: np.ndarray | None,
    states: np.ndarray,
    qo_indptr: Any,
    read_slots: Any,
    write_slots: Any,
    *,
    spec: LinearAttentionSpec,
    commit_lens: Any = None,
    checkpoints: Any = (),
) -> tuple[np.ndarray, np.ndarray]:
    """The recurrence of LinearAttentionSpec, token by token in float64, on the host.

    Arguments are those of jax_attn.linear_attention and jax_attn.plan_linear_attention, for one
    layer. Returns o: [max_tokens, num_v_heads, head_dim_v], f64, 0 in rows without a token, and the
    states, f64.
    """
    q, k, v, states = (np.asarray(x, np.float64) for x in (q, k, v, states))
    group = spec.num_v_heads // spec.num_qk_heads
    assert spec.scale is not None
    o, after = np.zeros(v.shape), states.copy()
    for r, (begin, end) in enumerate(itertools.pairwise(qo_indptr)):
        S = np.zeros(states.shape[1:]) if read_slots[r] < 0 else states[read_slots[r]].copy()
        commit = end - begin if commit_lens is None else commit_lens[r]
        writes = [(commit, write_slots[r])]
        writes += [(position, slot) for request, position, slot in checkpoints if request == r]
        for t in range(begin, end + 1):
            for position, slot in writes:
                if position == t - begin and slot >= 0:
                    after[slot] = S
            if t == end:
                break
            q_t, k_t = (np.repeat(x[t], group, axis=0) for x in (q, k))
            if spec.l2_norm:
                q_t, k_t = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q_t, k_t))
            if g is not None:
                S *= np.exp(np.asarray(g[t], np.float64)).reshape(spec.num_v_heads, -1, 1)
            change = v[t] - np.einsum("hde,hd->he", S, k_t) if spec.delta_rule else v[t]
            strength = np.ones(spec.num_v_heads) if beta is None else np.asarray(beta[t], float)
            S += np.einsum("hd,he->hde", k_t, strength[:, None] * change)
            o[t] = spec.scale * np.einsum("hde,hd->he", S, q_t)
    return o, after


def short_convolution(
    x: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray | None,
    states: np.ndarray,
    qo_indptr: Any,
    read_slots: Any,
    write_slots: Any,
    *,
    activation: str | None = None,
    commit_lens: Any = None,
    checkpoints: Any = (),
) -> tuple[np.ndarray, np.ndarray]:
    """A causal depthwise convolution of each request, in float64 on the host.

    Arguments are those of jax_attn.short_convolution and jax_attn.plan_linear_attention, for one
    layer. Returns y: [max_tokens, num_channels], f64, and the states, f64.
    """
    x, weight, states = (np.asarray(a, np.float64) for a in (x, weight, states))
    past = weight.shape[1] - 1
    y, after = np.zeros(x.shape), states.copy()
    for r, (begin, end) in enumerate(itertools.pairwise(qo_indptr)):
        first = states[read_slots[r]] if read_slots[r] >= 0 else np.zeros((past, x.shape[1]))
        inputs = np.concatenate([first, x[begin:end]])
        commit = end - begin if commit_lens is None else commit_lens[r]
        writes = [(commit, write_slots[r])]
        writes += [(position, slot) for request, position, slot in checkpoints if request == r]
        for position, slot in writes:
            if slot >= 0:
                after[slot] = inputs[position : position + past]
        for t in range(end - begin):
            y[begin + t] = (inputs[t : t + past + 1] * weight.T).sum(axis=0)
        if bias is not None:
            y[begin:end] += np.asarray(bias, np.float64)
    if activation == "silu":
        y /= 1 + np.exp(-y)
    return y, after


def _namespace(x: Array) -> Any:
    return jnp if isinstance(x, jax.Array) else np


def _compute_dtype(x: Array) -> np.dtype:
    return np.dtype(np.float64 if x.dtype == np.float64 else np.float32)
