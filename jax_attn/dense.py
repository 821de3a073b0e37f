"""The drop-in for jax.nn.dot_product_attention: dense batches, gradients, meshes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jax_attn import gradients
from jax_attn.attention import attention
from jax_attn.plan import AttentionPlan, plan
from jax_attn.spec import AttentionSpec
from jax_attn.transforms import Axes, on_explicit_mesh, partitioned
from jax_attn.variant import Variant

_OP = "dot_product_attention"

# Of the backward pass in jnp. _BLOCK: keys whose logits are in memory at the same time. _PANELS:
# parts of the query rows; each loops over the blocks of keys that it sees. Under a causal mask,
# half of all logits are visible; four panels compute 5/8 of them. Each is one more loop to compile.
_BLOCK, _PANELS = 512, 4


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Drop-in for jax.nn.dot_product_attention: dense batches, same arguments, same meaning.

    query: [batch, T, num_qo_heads, head_dim] or [T, num_qo_heads, head_dim], bf16 | f16 | f32.
    key: [batch, S, num_kv_heads, head_dim] or without the batch, dtype of query.
    value: [batch, S, num_kv_heads, head_dim_vo] or without the batch, dtype of query.
    bias: added to the logits, a float array. mask: bool, True where a key is seen. Each is [batch,
        num_qo_heads, T, S] with every axis of that length or 1, or without the batch where query
        has none. They are read as they are: nothing is broadcast. On one device.
    scale: logits = scale * (query . key), a number known while tracing. None: 1 / sqrt(head_dim).
    is_causal: query i sees keys j <= i. As in jax.nn, both sequences count from their start, also
        where T != S. (AttentionSpec.causal aligns their ends.)
    query_seq_lengths, key_value_seq_lengths: [batch], integers in [0, T] and [0, S], known on the
        host. Query rows beyond their length are 0.
    local_window_size: (left, right) or one int for both. Query i sees i - left <= j <= i + right.
    implementation: None only.
    return_residual: also return lse.

    Returns o: [batch, T, num_qo_heads, head_dim_vo] in query's dtype, and with return_residual lse:
    [batch, T, num_qo_heads], f32, natural log. Without the batch where query has none. A row that
    sees no key has o = 0, lse = -inf.

    Two results differ from jax.nn, which returns the mean of all values for a row that sees no key,
    and rounds lse to query's dtype.

    Differentiable in query, key and value; lse may be part of the loss. The backward pass is that
    of FlashAttention-2 (arXiv 2307.08691, Algorithm 2), on CUDA block by block in jnp. Its memory
    grows with T + S, not with T * S. What lies beyond the lengths has gradient 0 and no influence,
    whatever it holds. vmap joins the mapped axis to the batch.

    On a mesh, arrays that are split over batch or heads stay where they are; nothing is gathered.
    With lengths, arrays may be split over heads only. Others raise ValueError; where only XLA knows
    how they are split, compilation fails with the same sentence.

    Raises ValueError for arrays that do not fit each other, or for a wrong length or window.
    Raises NotImplementedError for implementation, for a scale or lengths that are traced by jit,
    and with bias or mask for gradients and vmap.
    """
    if implementation is not None:
        raise NotImplementedError(
            f"{_OP}: implementation: only None is supported; use jax.nn.dot_product_attention."
        )
    query, key, value = jnp.asarray(query), jnp.asarray(key), jnp.asarray(value)
    q, k, v = (a if a.ndim == 4 else a[None] for a in (query, key, value))
    _check_operands(q, k, v)
    if isinstance(scale, jax.core.Tracer):
        raise NotImplementedError(
            f"{_OP}: scale: a number known while tracing is supported, got a traced one; multiply"
            " query by it and pass scale=1.0."
        )
    batch, q_len, _, head_dim = q.shape
    problem = _Problem(
        query_lens=_host_lengths("query_seq_lengths", query_seq_lengths, batch, q_len),
        kv_lens=_host_lengths("key_value_seq_lengths", key_value_seq_lengths, batch, k.shape[1]),
        sm_scale=float(head_dim) ** -0.5 if scale is None else float(scale),
        window=window_of(_OP, local_window_size, is_causal),
    )
    if bias is None and mask is None:
        o, lse = _attend(problem, q, k, v)
    else:
        logits = (*q.shape[:1], q.shape[2], q_len, k.shape[1])
        operands = {
            name: _broadcasting(name, array, query.ndim, logits)
            for name, array in (("bias", bias), ("mask", mask))
            if array is not None
        }
        o, lse = _attend_with(operands, problem, q, k, v)
    if query.ndim == 3:
        o, lse = o[0], lse[0]
    return (o, lse) if return_residual else o


@dataclasses.dataclass(frozen=True)
class _Problem:
    """What is static in a call."""

    query_lens: tuple[int, ...] | None  # None: all of T
    kv_lens: tuple[int, ...] | None  # None: all of S
    sm_scale: float
    window: tuple[int, int]  # query i sees i - left <= j <= i + right; -1: all
    variant: Variant | None = None  # bias, mask

    @property
    def split(self) -> tuple[str, ...]:
        """Axes along which devices may split the work; with lengths, which requests have, not b."""
        has_lengths = self.query_lens is not None or self.kv_lens is not None
        return ("h",) if has_lengths else ("b", "h")

    def repeated(self, n: int) -> _Problem:
        """The problem of n such batches joined into one."""
        query_lens, kv_lens = (x and n * x for x in (self.query_lens, self.kv_lens))
        return dataclasses.replace(self, query_lens=query_lens, kv_lens=kv_lens)


def _check_operands(q: jax.Array, k: jax.Array, v: jax.Array) -> None:
    fits = q.ndim == k.ndim == v.ndim == 4 and v.shape[:-1] == k.shape[:-1]
    if not (fits and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3]):
        raise ValueError(
            f"{_OP}: query, key, value: expected [batch, T, num_qo_heads, head_dim], [batch, S,"
            " num_kv_heads, head_dim], and the same but for head_dim, got"
            f" {list(q.shape)}, {list(k.shape)}, {list(v.shape)}."
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"{_OP}: query, key, value: expected one dtype, got {q.dtype}, {k.dtype}, {v.dtype};"
            " cast them."
        )


def window_of(op: str, size: Any, is_causal: bool) -> tuple[int, int]:
    """How far a query sees to its left and right, -1: without limit, as jax.nn says it."""
    left, right = (-1, -1)
    if size is not None:
        both = (size, size) if isinstance(size, int) else tuple(size)
        if len(both) != 2 or min(both) < 0:
            raise ValueError(
                f"{op}: local_window_size: expected (left, right) or one int for both, >= 0, got"
                f" {size}."
            )
        left, right = both
    return left, 0 if is_causal else right


def _host_lengths(name: str, lengths: Any, batch: int, limit: int) -> tuple[int, ...] | None:
    if lengths is None:
        return None
    if isinstance(lengths, jax.core.Tracer):
        raise NotImplementedError(
            f"{_OP}: {name}: lengths known on the host are supported, got a traced array; use"
            " jax_attn.plan outside jit and jax_attn.attention inside."
        )
    array = np.asarray(lengths)
    is_whole = array.dtype.kind in "iu" or not array.size
    if array.shape != (batch,) or not is_whole or not ((array >= 0) & (array <= limit)).all():
        raise ValueError(
            f"{_OP}: {name}: expected {batch} whole numbers in [0, {limit}], got {array.tolist()}."
        )
    return tuple(array.tolist())


# ---- bias and mask -------------------------------------------------------------------------------


def _broadcasting(name: str, array: Any, ndim: int, logits: tuple[int, ...]) -> jax.Array:
    """A bias or mask as a variant's operand: an index beyond an axis of length 1 is clamped."""
    array = jnp.asarray(array)
    given = array if array.ndim == 4 or ndim == 4 else array[None]
    fits = given.ndim == 4 and all(
        n in (1, full) for n, full in zip(given.shape, logits, strict=True)
    )
    is_right = array.dtype == bool if name == "mask" else jnp.issubdtype(array.dtype, jnp.floating)
    if not fits or not is_right:
        raise ValueError(
            f"{_OP}: {name}: expected {'bool' if name == 'mask' else 'a float array'} of"
            f" {list(logits)}, each axis of that length or 1, got {array.dtype}{list(array.shape)}."
        )
    known = ("bool", "float32", "bfloat16", "float16")
    return given if given.dtype.name in known else given.astype(jnp.float32)


def _add_bias(score: Any, at: Any, bias: Any) -> Any:
    return score + bias[at.request, at.head, at.q_pos, at.kv_pos]


def _is_seen(at: Any, mask: Any) -> Any:
    return mask[at.request, at.head, at.q_pos, at.kv_pos]


@functools.cache
def _variant(dtypes: tuple[tuple[str, str], ...]) -> Variant:
    operands = {name: jax.ShapeDtypeStruct((1,) * 4, dtype) for name, dtype in dtypes}
    return Variant(
        logits=_add_bias if "bias" in operands else None,
        mask=_is_seen if "mask" in operands else None,
        operands=operands,
    )


def _attend_with(
    operands: dict[str, jax.Array], problem: _Problem, q: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, jax.Array]:
    if not q.size or not k.size or not v.size:
        return _attend_batch(problem, q, k, v)
    variant = _variant(tuple((name, x.dtype.name) for name, x in operands.items()))
    problem = dataclasses.replace(problem, variant=variant)
    whole = _plan(problem, q.shape, k.shape, v.shape[3], q.dtype.name)
    o, lse = _attend_tokens(whole.spec, q, k, v, jnp.asarray(whole.buffer), operands)
    return _without_padding(problem, o, lse)


# ---- forward -------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    problem: _Problem, q: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """o: [batch, T, num_qo_heads, head_dim_vo]; lse: [batch, T, num_qo_heads], f32."""

    o, lse = _joining(_attend_batch)(problem, q, k, v)
    return o, lse


def _joining(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call(problem, *arrays)` of dense batches under vmap: requests are independent, so a mapped
    axis joins the batch."""

    def joined(problem: _Problem, *arrays: jax.Array) -> Any:
        one = jax.custom_batching.custom_vmap(functools.partial(call, problem))

        @one.def_vmap
        def all_of_them(axis_size: int, in_batched: Any, *operands: jax.Array) -> Any:
            batches = []
            for x, is_batched in zip(operands, in_batched, strict=True):
                x = x if is_batched else jnp.broadcast_to(x, (axis_size, *x.shape))
                batches.append(x.reshape(-1, *x.shape[2:]))
            results = joined(problem.repeated(axis_size), *batches)
            split = tuple(x.reshape(axis_size, -1, *x.shape[1:]) for x in results)
            return split, (True,) * len(split)

        return one(*arrays)

    return joined


def _attend_batch(
    problem: _Problem, q: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, jax.Array]:
    if not q.size or not k.size or not v.size:
        return jnp.zeros((*q.shape[:3], v.shape[3]), q.dtype), jnp.full(q.shape[:3], -jnp.inf)
    whole = _plan(problem, q.shape, k.shape, v.shape[3], q.dtype.name)
    o, lse = _attend_planned(problem, whole.spec, q, k, v, jnp.asarray(whole.buffer))
    return _without_padding(problem, o, lse)


def _without_padding(
    problem: _Problem, o: jax.Array, lse: jax.Array
) -> tuple[jax.Array, jax.Array]:
    if problem.query_lens is not None:
        live = np.arange(o.shape[1]) < np.asarray(problem.query_lens)[:, None]
        o = jnp.where(live[..., None, None], o, 0)
        lse = jnp.where(live[..., None], lse, -jnp.inf)
    return o, lse


@functools.lru_cache(maxsize=128)
def _plan(
    problem: _Problem, q_shape: tuple[int, ...], k_shape: tuple[int, ...], vo: int, dtype: str
) -> AttentionPlan:
    batch, q_len, num_qo_heads, head_dim = q_shape
    kv_len, num_kv_heads = k_shape[1:3]
    left, right = problem.window
    spec = AttentionSpec(
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim_qk=head_dim,
        head_dim_vo=vo,
        dtype=dtype,
        causal=right == 0,
        window_left=left,
        window_right=right,
        sm_scale=problem.sm_scale,
        variant=problem.variant,
        page_size=None,
        max_batch=batch,
        max_qo_tokens=batch * q_len,
        max_kv_tokens=batch * kv_len,
    )
    return plan(
        spec,
        np.arange(batch + 1) * q_len,
        np.asarray(problem.kv_lens or (kv_len,) * batch, np.int32),
        kv_indptr=np.arange(batch + 1) * kv_len,
        q_offsets=np.zeros(batch, np.int32),  # causal and windows count from the start
    )


def _attend_tokens(
    spec: AttentionSpec,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    buffer: jax.Array,
    operands: dict[str, jax.Array] | None,
) -> tuple[jax.Array, jax.Array]:
    flat_q, flat_k, flat_v = (a.reshape(-1, *a.shape[2:]) for a in (q, k, v))
    own = AttentionPlan(buffer, spec)
    o, lse = attention(flat_q, flat_k, flat_v, own, variant_operands=operands, return_lse=True)
    return o.reshape(*q.shape[:3], -1), lse.reshape(q.shape[:3])


def _attend_flat(
    problem: _Problem,
    spec: AttentionSpec,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    buffer: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    return _attend_tokens(spec, q, k, v, buffer, None)


def _attend_part(
    problem: _Problem,
    spec: AttentionSpec,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    buffer: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """What one device of a mesh does: it plans its own requests and heads."""
    own = _plan(problem, q.shape, k.shape, v.shape[3], q.dtype.name)
    return _attend_flat(problem, own.spec, q, k, v, jnp.asarray(own.buffer))


_DENSE = "b t (h g) d, b s h d, b s h e"
_ROWS = "b t (h g) e, b t (h g)"


def _axes(problem: _Problem, spec: AttentionSpec) -> Axes:
    """The work may be split over requests, and over KV heads with their groups of query heads."""
    return Axes(f"{_DENSE}, w -> {_ROWS}", problem.split, {"g": spec.group_size})


_attend_planned = partitioned(_OP, _attend_flat, _axes, num_static=2, per_device=_attend_part)


# ---- backward ------------------------------------------------------------------------------------


def _forward(
    problem: _Problem, q: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[Any, tuple[jax.Array, ...]]:
    o, lse = _attend(problem, q, k, v)
    o, lse = checkpoint_name(o, gradients.O_NAME), checkpoint_name(lse, gradients.LSE_NAME)
    return (o, lse), (q, k, v, o, lse)


def _backward(
    problem: _Problem, saved: tuple[jax.Array, ...], cotangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    q, k, v = saved[:3]
    if not q.size or not k.size or not v.size:
        return jnp.zeros_like(q), jnp.zeros_like(k), jnp.zeros_like(v)
    if _plan(problem, q.shape, k.shape, v.shape[3], q.dtype.name).spec.target == "cpu":
        return _gradients(problem, *saved, *cotangents)
    # On a GPU XLA's products, which are measured there, until the kernels are.
    names = f"{_DENSE}, {_ROWS}, {_ROWS} -> {_DENSE}"
    about = Axes(names, problem.split, {"g": q.shape[2] // k.shape[2]})
    run = functools.partial(_jnp_gradients, problem)  # which XLA splits by itself
    return on_explicit_mesh(_OP, run, about, otherwise=run)(*saved, *cotangents)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _gradients(
    problem: _Problem,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    o: jax.Array,
    lse: jax.Array,
    d_o: jax.Array,
    d_lse: jax.Array,
) -> Any:
    """dq, dk, dv by the kernels."""

    def run(problem: _Problem, *arrays: jax.Array) -> Any:
        q, k, v, *_ = arrays
        whole = _plan(problem, q.shape, k.shape, v.shape[3], q.dtype.name)
        return _gradients_planned(problem, whole.spec, *arrays, jnp.asarray(whole.buffer))

    return _joining(run)(problem, q, k, v, lse, gradients.row_sums(o, d_o, d_lse), d_o)


@_gradients.defjvp
def _second_derivatives(problem: _Problem, primals: Any, tangents: Any) -> Any:
    return jax.jvp(functools.partial(_jnp_gradients, problem), primals, tangents)


def _gradients_flat(problem: _Problem, spec: AttentionSpec, *arrays: jax.Array) -> Any:
    *operands, buffer = arrays
    q, k, v, lse, d, d_o = (x.reshape(-1, *x.shape[2:]) for x in operands)
    of_all = gradients.gradients(q, k, v, buffer, jnp.int32(0), lse, d, d_o, spec)
    return tuple(x.reshape(like.shape) for x, like in zip(of_all, operands, strict=False))


def _gradients_part(problem: _Problem, spec: AttentionSpec, *arrays: jax.Array) -> Any:
    q, k, v, *rest, _ = arrays
    own = _plan(problem, q.shape, k.shape, v.shape[3], q.dtype.name)
    return _gradients_flat(problem, own.spec, q, k, v, *rest, jnp.asarray(own.buffer))


def _gradients_axes(problem: _Problem, spec: AttentionSpec) -> Axes:
    names = f"{_DENSE}, b t (h g), b t (h g), b t (h g) e, w -> {_DENSE}"
    return Axes(names, problem.split, {"g": spec.group_size})


_gradients_planned = partitioned(
    _OP, _gradients_flat, _gradients_axes, num_static=2, per_device=_gradients_part
)


def _jnp_gradients(
    problem: _Problem,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    o: jax.Array,
    lse: jax.Array,
    d_o: jax.Array,
    d_lse: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of q, k and v (FlashAttention-2, arXiv 2307.08691, Algorithm 2) on a GPU, and where
    they are differentiated again.

    For each block of keys, P = exp(logits - lse). With D = sum(do * o) - dlse of each row:
    dv = P^T do,  ds = P * (do v^T - D),  dq = sm_scale ds k,  dk = sm_scale ds^T q.
    """
    (batch, q_len, num_qo_heads, _), (kv_len, num_kv_heads) = q.shape, k.shape[1:3]
    # Rows without a key are constant; 0 * NaN would be NaN, so what lies beyond lengths is cleared.
    is_empty = jnp.isneginf(lse)
    q, o, d_o = (jnp.where(is_empty[..., None], 0, x) for x in (q, o, d_o))
    d = _einsum("btnd,btnd->btn", d_o, o) - d_lse
    kv_lens = np.asarray(problem.kv_lens or (kv_len,) * batch)[:, None]
    if problem.kv_lens is not None:
        live = (np.arange(kv_len) < kv_lens)[..., None, None]
        k, v = jnp.where(live, k, 0), jnp.where(live, v, 0)
    # [num_blocks, batch, block, num_kv_heads, head_dim], the last block padded with zeros.
    num_blocks = -(-kv_len // _BLOCK)
    block = -(-kv_len // num_blocks)
    padding = ((0, 0), (0, num_blocks * block - kv_len), (0, 0), (0, 0))
    k_blocks, v_blocks = (
        jnp.moveaxis(jnp.pad(x, padding).reshape(batch, num_blocks, block, num_kv_heads, -1), 1, 0)
        for x in (k, v)
    )
    # Rows: [batch, T, num_kv_heads, group_size, head_dim], and heads in front where logits are.
    groups = num_kv_heads, num_qo_heads // num_kv_heads
    q, d_o = (x.reshape(batch, q_len, *groups, -1) for x in (q, d_o))
    lse, d = (
        jnp.moveaxis(x.reshape(batch, q_len, *groups), 1, -1)[..., None]
        for x in (jnp.where(is_empty, jnp.inf, lse), d)
    )
    d_q = []
    d_k, d_v = (jnp.zeros(x.shape, jnp.float32) for x in (k_blocks, v_blocks))
    num_rows = -(-q_len // min(_PANELS, num_blocks))
    for first in range(0, q_len, num_rows):
        rows = slice(first, min(first + num_rows, q_len))
        seen = _blocks_seen(problem.window, rows, block, num_blocks)
        panel = _Panel(q[:, rows], d_o[:, rows], lse[..., rows, :], d[..., rows, :])
        blocks = (x[seen] for x in (jnp.arange(num_blocks) * block, k_blocks, v_blocks))
        d_q_rows, of_blocks = _panel_gradients(problem, panel, rows, kv_lens, tuple(blocks))
        d_q.append(d_q_rows)
        around = ((seen.start, num_blocks - seen.stop), *((0, 0),) * 4)
        d_k, d_v = (x + jnp.pad(y, around) for x, y in zip((d_k, d_v), of_blocks, strict=True))
    d_k, d_v = (
        jnp.moveaxis(x, 0, 1).reshape(batch, num_blocks * block, num_kv_heads, -1)[:, :kv_len]
        for x in (d_k, d_v)
    )
    d_q_all = jnp.concatenate(d_q, axis=1).reshape(batch, q_len, num_qo_heads, -1)
    return d_q_all.astype(q.dtype), d_k.astype(q.dtype), d_v.astype(q.dtype)


class _Panel(NamedTuple):
    """Some of the query rows. lse is inf where a row sees no key, so that its P is 0."""

    q: jax.Array  # [batch, rows, num_kv_heads, group_size, head_dim_qk]
    d_o: jax.Array  # [batch, rows, num_kv_heads, group_size, head_dim_vo]
    lse: jax.Array  # [batch, num_kv_heads, group_size, rows, 1]
    d: jax.Array  # the same


def _panel_gradients(
    problem: _Problem,
    panel: _Panel,
    rows: slice,
    kv_lens: np.ndarray,
    blocks: tuple[jax.Array, ...],
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """The rows' dq, and what they add to dk and dv of each block; all f32.

    blocks: the first key, the keys and the values of each block, [num_blocks, ...].
    """
    q, d_o, lse, d = panel

    def add_block(d_q: jax.Array, of_block: Any) -> Any:
        begin, k, v = of_block
        visible = _visible(problem.window, rows, begin + jnp.arange(k.shape[1]), kv_lens)
        logits = problem.sm_scale * _einsum("bthgd,bshd->bhgts", q, k)
        p = jnp.where(visible, jnp.exp(logits - lse), 0)
        d_s = problem.sm_scale * p * (_einsum("bthge,bshe->bhgts", d_o, v) - d)
        p, d_s = p.astype(q.dtype), d_s.astype(q.dtype)
        d_k, d_v = _einsum("bhgts,bthgd->bshd", d_s, q), _einsum("bhgts,bthge->bshe", p, d_o)
        return d_q + _einsum("bhgts,bshd->bthgd", d_s, k), (d_k, d_v)

    return jax.lax.scan(add_block, jnp.zeros(q.shape, jnp.float32), blocks)


_einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def _blocks_seen(window: tuple[int, int], rows: slice, block: int, num_blocks: int) -> slice:
    """The range of blocks in which at least one of the query rows may see a key."""
    left, right = window
    first = max(0, rows.start - left) // block if left >= 0 else 0
    last = (rows.stop - 1 + right) // block + 1 if right >= 0 else num_blocks
    last = min(last, num_blocks)
    return slice(min(first, last), last)


def _visible(
    window: tuple[int, int], rows: slice, keys: jax.Array, kv_lens: np.ndarray
) -> jax.Array:
    """[batch, 1, 1, rows, keys], bool: which row sees which key."""
    visible = (keys < kv_lens)[:, None, None, None, :]
    i = jnp.arange(rows.start, rows.stop)[:, None]
    left, right = window
    if left >= 0:
        visible &= keys >= i - left
    if right >= 0:
        visible &= keys <= i + right
    return visible


_attend.defvjp(_forward, _backward)
