"""Tangents and gradients of dense attention in jnp, one block of keys at a time."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_attn._xla.transforms import varying_alike

# _BLOCK: keys whose logits are in memory at the same time. _PANELS: number of parts of the query
# rows. Each part loops over the blocks of keys that it sees. A causal mask shows half of all
# logits, and four panels compute 5/8 of them. Each panel is one more loop to compile.
_BLOCK, _PANELS = 512, 4

# P = exp(logits - lse) is off by the rounding error of lse: by up to 2^-16 from here on, and beyond
# 2^24 lse is the largest logit without the sum.
_FAR_LSE = 2.0**8

Array = jax.Array
RowStates = Callable[..., tuple[Array, Array]]


class Operand(NamedTuple):
    """An array that a call reads besides q, k and v.

    scale, bias, mask: [batch, num_qo_heads, T, S], each axis of that length or 1. query_lens,
    kv_lens: [batch], int32.
    """

    name: str
    dtype: str
    is_full: tuple[bool, ...]  # for each axis: whether it is longer than 1

    @property
    def axes(self) -> str:
        """Names of the axes for transforms.Axes. Work is never split along "one"."""
        names = zip(("b", "(h g)", "t", "s"), self.is_full, strict=False)
        return " ".join(name if is_full else "one" for name, is_full in names)


@dataclasses.dataclass(frozen=True)
class Problem:
    """The static arguments of a call.

    Lengths that are known while tracing are here and among the operands: here for a plan on the
    host, and there for a device of a mesh that has some of the requests.
    """

    query_lens: tuple[int, ...] | None  # of all requests; None: T, or traced
    kv_lens: tuple[int, ...] | None  # of all requests; None: S, or traced
    sm_scale: float  # multiplied by the operand "scale", if there is one
    window: tuple[int, int]  # query i sees i - left <= j <= i + right; -1: no limit
    soft_cap: float = 0.0  # c > 0: logits = c * tanh(logits / c), before bias and masks
    operands: tuple[Operand, ...] = ()

    def named(self, operands: Any) -> dict[str, Array]:
        """The operands by name, from arrays in the order of the problem's operands."""
        return {of.name: x for of, x in zip(self.operands, operands, strict=True)}


def kv_lens_of(operands: Mapping[str, Array], batch: int, kv_len: int) -> Array:
    return operands.get("kv_lens", jnp.full((batch,), kv_len, jnp.int32))


def row_states(
    problem: Problem, q: Array, k: Array, v: Array, *others: Array
) -> tuple[Array, Array]:
    """What P = exp((u - shift) * factor - log_sum) needs of each row; see _Logits for u and factor.

    others: the operands, lse, and kv_lens [batch], which XLA's partitioner wants as an operand.
    Returns shift and log_sum like lse. They are 0 and lse, but in rows whose lse is so far from 0
    that it does not determine P: there they are the largest u and the logarithm of the sum, found
    by one more pass over the keys.
    """
    q, k, v, *others = varying_alike((q, k, v, *others))
    *operands, lse, kv_lens = others
    is_far = jnp.isfinite(lse) & (jnp.abs(lse) >= _FAR_LSE)

    def found() -> tuple[Array, Array]:
        named = problem.named(operands) | {"kv_lens": kv_lens}
        call = _Call(problem, q, k, v, named, lse)
        start = call.rows_as_logits(call.zeros(lse.shape))
        add_block = functools.partial(_add_to_states, call)
        blocks = call.xs(slice(0, call.num_blocks))  # one loop: it is rarely run, always compiled
        states, _ = jax.lax.scan(add_block, (start - jnp.inf, start), blocks)
        shift, total = map(call.logits_as_rows, states)
        is_found = is_far & (total > 0)
        log_sum = jnp.log(jnp.where(is_found, total, 1.0))
        return jnp.where(is_found, shift, 0.0), jnp.where(is_found, log_sum, lse)

    return jax.lax.cond(jnp.any(is_far), found, lambda: (jnp.zeros_like(lse), lse))


def _add_to_states(call: _Call, state: Any, of_block: Any) -> Any:
    shift, total = state
    logits = call.logits(slice(0, shift.shape[-2]), *of_block)
    u = jnp.where(logits.visible, logits.u, -jnp.inf)
    new = jnp.maximum(shift, u.max(axis=-1, keepdims=True))
    finite = jnp.where(jnp.isneginf(new), 0.0, new)
    total *= jnp.exp((shift - finite) * logits.factor)
    return (new, total + jnp.exp((u - finite) * logits.factor).sum(axis=-1, keepdims=True)), None


def gradients(
    problem: Problem,
    wanted: tuple[str, ...],
    states_of: RowStates,
    q: Array,
    k: Array,
    v: Array,
    *others: Array,
) -> tuple[Array, ...]:
    """Gradients of q, k, v and the wanted operands.

    Used where kernels have no backward pass, and for second derivatives. The algorithm is
    FlashAttention-2's (arXiv 2307.08691, Algorithm 2).

    states_of: row_states, as the caller runs it on devices; not differentiated.
    others: the operands, o, lse, d_o, d_lse.

    For each block of keys, P = exp(logits - lse). With D = sum(do * o) - dlse of each row:
    dv = P^T do,  dlogits = P * (do v^T - D),  dq = scale dlogits k,  dk = scale dlogits^T q.
    The gradient of an operand is the sum of dlogits over the axes along which it is broadcast. For
    the operand "scale", dlogits is multiplied by the score first. With a soft cap, dlogits is
    multiplied by its slope, but for bias.
    """
    *operands, o, lse, d_o, d_lse = others
    states = states_of(problem, q, k, v, *operands, lse)
    call = _Call(problem, q, k, v, problem.named(operands), lse, states)
    o, d_o = call.without_empty_rows(o), call.without_empty_rows(d_o)
    d = call.rows_as_logits(_einsum("btnd,btnd->btn", d_o, o) - d_lse)
    d_o = call.grouped(d_o)
    d_k, d_v = (call.zeros(x.shape) for x in (call.k_blocks, call.v_blocks))
    d_q = []
    of_operands: dict[str, list[Array]] = {name: [] for name in wanted}
    for rows, seen in call.panels():
        panel = _Panel(rows, call.q[:, rows], d_o[:, rows], d[..., rows, :])
        start = call.zeros(panel.q.shape)
        add_block = functools.partial(_add_gradients, call, wanted, panel)
        d_q_rows, (d_k_part, d_v_part, of_blocks) = jax.lax.scan(add_block, start, call.xs(seen))
        d_q.append(d_q_rows)
        around = ((seen.start, call.num_blocks - seen.stop), *((0, 0),) * 4)
        d_k, d_v = d_k + jnp.pad(d_k_part, around), d_v + jnp.pad(d_v_part, around)
        for name, part in of_blocks.items():
            of_operands[name].append(call.of_all_keys(name, part, seen))
    d_q_all = jnp.concatenate(d_q, axis=1).reshape(q.shape)
    results = [x.astype(q.dtype) for x in (d_q_all, *map(call.of_keys, (d_k, d_v)))]
    return *results, *(call.of_all_rows(name, parts) for name, parts in of_operands.items())


class _Panel(NamedTuple):
    """One part of the query rows."""

    rows: slice
    q: Array  # [batch, rows, num_kv_heads, group_size, head_dim_qk]
    d_o: Array  # [batch, rows, num_kv_heads, group_size, head_dim_vo]
    d: Array  # [batch, num_kv_heads, group_size, rows, 1]


def _add_gradients(
    call: _Call, wanted: tuple[str, ...], panel: _Panel, d_q: Array, of_block: Any
) -> Any:
    """dq of the panel's rows, and their terms of dk, dv and wanted operands by block; all f32."""
    rows, q, d_o, d = panel
    begin, k, v = of_block
    weights = call.weights(rows, begin, k, v)
    p, k, v = weights.p, weights.k, weights.v
    d_logits = jnp.where(weights.visible, p * (_einsum("bthge,bshe->bhgts", d_o, v) - d), 0)
    d_score = weights.slope * d_logits
    of_operands = {
        name: call.summed(name, d_score * weights.score if name == "scale" else d_logits)
        for name in wanted
    }
    p, d_s = p.astype(q.dtype), (call.scale * d_score).astype(q.dtype)
    d_k, d_v = _einsum("bhgts,bthgd->bshd", d_s, q), _einsum("bhgts,bthge->bshe", p, d_o)
    return d_q + _einsum("bhgts,bshd->bthgd", d_s, k), (d_k, d_v, of_operands)


def tangents(
    problem: Problem,
    wanted: tuple[str, ...],
    states_of: RowStates,
    q: Array,
    k: Array,
    v: Array,
    *others: Array,
) -> tuple[Array, Array]:
    """Tangents of o and lse, linear in the tangents of q, k, v and the wanted operands.

    states_of: see gradients.
    others: the operands, o, lse, the tangents of q, k, v and of the wanted operands.

    With tl the tangent of the logits and tv that of v: tlse = sum(P * tl),
    to = sum(P * tl * v + P * tv) - tlse * o.
    """
    n = len(problem.operands)
    operands, (o, lse), (t_q, t_k, t_v) = others[:n], others[n : n + 2], others[n + 2 : n + 5]
    states = states_of(problem, q, k, v, *operands, lse)
    call = _Call(problem, q, k, v, problem.named(operands), lse, states)
    of_operands = dict(zip(wanted, map(call.padded, others[n + 5 :]), strict=True))
    t_q = call.grouped(call.without_empty_rows(t_q))
    t_k, t_v = call.blocks(t_k), call.blocks(t_v)
    of_rows = []
    for rows, seen in call.panels():
        shape = (*call.q[:, rows].shape[:-1], v.shape[3])
        start = call.zeros(shape), call.zeros((*shape[:-1], 1))
        add_block = functools.partial(_add_tangents, call, of_operands, rows, t_q[:, rows])
        of_rows.append(jax.lax.scan(add_block, start, (*call.xs(seen), t_k[seen], t_v[seen]))[0])
    of_v, t_lse = (jnp.concatenate(x, axis=1) for x in zip(*of_rows, strict=True))
    t_o = of_v - t_lse * call.grouped(call.without_empty_rows(o))
    return t_o.reshape(o.shape).astype(o.dtype), t_lse.reshape(lse.shape)


def _add_tangents(
    call: _Call, of_operands: Mapping[str, Array], rows: slice, t_q: Array, sums: Any, of_block: Any
) -> Any:
    begin, k, v, t_k, t_v = of_block
    weights = call.weights(rows, begin, k, v)
    p, k, v = weights.p, weights.k, weights.v
    t_k, t_v = _where_seen(weights.visible, t_k), _where_seen(weights.visible, t_v)
    q = call.q[:, rows]
    t_logits = call.scale * (
        _einsum("bthgd,bshd->bhgts", t_q, k) + _einsum("bthgd,bshd->bhgts", q, t_k)
    )
    if "scale" in of_operands:
        t_logits += call.part(of_operands["scale"], rows, begin) * weights.score
    t_logits *= weights.slope
    if "bias" in of_operands:
        t_logits += call.part(of_operands["bias"], rows, begin).astype(jnp.float32)
    p_t = jnp.where(weights.visible, p * t_logits, 0)
    of_v, t_lse = sums
    of_v += _einsum("bhgts,bshe->bthge", p_t.astype(v.dtype), v)
    of_v += _einsum("bhgts,bshe->bthge", p.astype(v.dtype), t_v)
    return (of_v, t_lse + jnp.moveaxis(p_t.sum(axis=-1), 3, 1)[..., None]), None


# By default a GPU rounds f32 operands to TF32, which the kernels do not.
_einsum = functools.partial(
    jnp.einsum, preferred_element_type=jnp.float32, precision=jax.lax.Precision.HIGHEST
)


class _Logits(NamedTuple):
    """Logits u * factor of some rows and a block of keys.

    With a bias, u is the logit and factor is 1. With a soft cap, u is the tanh and factor the cap.
    Otherwise u is q . k with the sign of the scale, and factor the scale's magnitude, so that
    differences of u are taken before any rounding.
    """

    u: Array  # [batch, num_kv_heads, group_size, rows, keys], f32
    factor: Array  # axes may have length 1
    slope: Array | float  # derivative of the soft cap; 1.0 without one
    product: Array  # q . k
    visible: Array  # bool; axes may have length 1
    k: Array  # [batch, keys, num_kv_heads, head_dim_qk], 0 where no row sees the key
    v: Array  # likewise


class _Weights(NamedTuple):
    """P of some rows and a block of keys: [batch, num_kv_heads, group_size, rows, keys], f32."""

    p: Array
    score: Array  # sm_scale * (q . k), without a traced scale
    slope: Array | float  # derivative of the soft cap; 1.0 without one
    visible: Array  # bool; axes may have length 1
    k: Array  # [batch, keys, num_kv_heads, head_dim_qk], 0 where no row sees the key
    v: Array  # likewise


def _where_seen(visible: Array, x: Array) -> Array:
    """Keys or values, 0 where no row sees the key: 0 * NaN would be NaN."""
    seen = jnp.any(visible, axis=(2, 3))  # [batch, num_kv_heads or 1, keys]
    return jnp.where(jnp.moveaxis(seen, 1, 2)[..., None], x, 0)


class _Call:
    """The arrays of a call as the loops over blocks read them.

    Rows are [batch, T, num_kv_heads, group_size, head_dim]; heads are in front where logits are.
    """

    def __init__(
        self,
        problem: Problem,
        q: Array,
        k: Array,
        v: Array,
        operands: Mapping[str, Array],
        lse: Array,
        states: tuple[Array, Array] | None = None,
    ) -> None:
        self._problem, self._operands = problem, operands
        self._batch, self._q_len, num_qo_heads, _ = q.shape
        self._kv_len, num_kv_heads = k.shape[1:3]
        self._heads = num_kv_heads, num_qo_heads // num_kv_heads
        self.num_blocks = -(-self._kv_len // _BLOCK)
        self._block = -(-self._kv_len // self.num_blocks)
        self._is_empty = jnp.isneginf(lse)
        self.q = self.grouped(self.without_empty_rows(q))
        self.k_blocks, self.v_blocks = self.blocks(k), self.blocks(v)
        self._padded = {name: self.padded(x) for name, x in operands.items()}
        kv_lens = kv_lens_of(operands, self._batch, self._kv_len)
        self._kv_lens = kv_lens[:, None, None, None, None]
        scale = operands.get("scale", jnp.ones((1, 1, 1, 1), jnp.float32))
        self.scale = problem.sm_scale * scale[..., None]
        self._arrays = q, k, v, lse, *operands.values()
        if states is not None:
            shift, log_sum = states
            # inf for a row that sees no key, so that its P is 0.
            log_sum = jnp.where(self._is_empty, jnp.inf, log_sum)
            self._shift, self._log_sum = map(self.rows_as_logits, (shift, log_sum))

    def zeros(self, shape: tuple[int, ...]) -> Array:
        """The start of a sum over blocks, f32, which varies over a mesh as its terms do."""
        return varying_alike((jnp.zeros(shape, jnp.float32), *self._arrays))[0]

    # Layouts of rows and keys.

    def without_empty_rows(self, x: Array) -> Array:
        """x with 0 in rows that see no key: their o is constant, and 0 * NaN would be NaN."""
        return jnp.where(self._is_empty[..., None], 0, x)

    def grouped(self, x: Array) -> Array:
        return x.reshape(*x.shape[:2], *self._heads, -1)

    def rows_as_logits(self, x: Array) -> Array:
        """x from [batch, T, num_qo_heads] to [batch, num_kv_heads, group_size, T, 1]."""
        return jnp.moveaxis(x.reshape(*x.shape[:2], *self._heads), 1, -1)[..., None]

    def logits_as_rows(self, x: Array) -> Array:
        """Undo `rows_as_logits`."""
        x = jnp.moveaxis(x[..., 0], -1, 1)
        return x.reshape(*x.shape[:2], -1)

    def blocks(self, x: Array) -> Array:
        """k or v as [num_blocks, batch, block, num_kv_heads, head_dim], the last block padded."""
        padding = ((0, 0), (0, self.num_blocks * self._block - self._kv_len), (0, 0), (0, 0))
        shape = self._batch, self.num_blocks, self._block, *x.shape[2:]
        return jnp.moveaxis(jnp.pad(x, padding).reshape(shape), 1, 0)

    def of_keys(self, blocks: Array) -> Array:
        """Undo `blocks`: [batch, S, num_kv_heads, head_dim]."""
        x = jnp.moveaxis(blocks, 0, 1)
        return x.reshape(self._batch, -1, *x.shape[3:])[:, : self._kv_len]

    def panels(self) -> Iterator[tuple[slice, slice]]:
        """For each panel: its rows, and the blocks in which some row may see a key."""
        num_rows = -(-self._q_len // min(_PANELS, self.num_blocks))
        left, right = self._problem.window
        for begin in range(0, self._q_len, num_rows):
            end = min(begin + num_rows, self._q_len)
            first = max(0, begin - left) // self._block if left >= 0 else 0
            last = (end - 1 + right) // self._block + 1 if right >= 0 else self.num_blocks
            last = min(last, self.num_blocks)
            yield slice(begin, end), slice(min(first, last), last)

    def xs(self, seen: slice) -> tuple[Array, Array, Array]:
        """The scanned arrays of the blocks `seen`: index of the first key, keys, values."""
        begin = jnp.arange(self.num_blocks, dtype=jnp.int32) * self._block
        return begin[seen], self.k_blocks[seen], self.v_blocks[seen]

    # Logits.

    def logits(self, rows: slice, begin: Array, k: Array, v: Array) -> _Logits:
        visible = self._visible(rows, begin)
        k, v = _where_seen(visible, k), _where_seen(visible, v)
        product = _einsum("bthgd,bshd->bhgts", self.q[:, rows], k)
        slope: Array | float = 1.0
        if cap := self._problem.soft_cap:
            u = jnp.tanh(self.scale * product / cap)
            factor, slope = jnp.full((), cap, jnp.float32), 1 - u * u
        else:
            u, factor = jnp.where(self.scale < 0, -product, product), jnp.abs(self.scale)
        if (bias := self._padded.get("bias")) is not None:
            logits = cap * u if cap else self.scale * product
            u = logits + self.part(bias, rows, begin).astype(jnp.float32)
            factor = jnp.ones((), jnp.float32)
        return _Logits(u, factor, slope, product, visible, k, v)

    def weights(self, rows: slice, begin: Array, k: Array, v: Array) -> _Weights:
        u, factor, slope, product, visible, k, v = self.logits(rows, begin, k, v)
        shift = self._shift[..., rows, :]
        exponent = (u - shift) * factor - self._log_sum[..., rows, :]
        if "scale" in self._operands:  # the derivative of u * factor, not of (u - shift) * factor
            exponent += shift * (factor - jax.lax.stop_gradient(factor))
        p = jnp.where(visible, jnp.exp(exponent), 0)
        return _Weights(p, self._problem.sm_scale * product, slope, visible, k, v)

    def _visible(self, rows: slice, begin: Array) -> Array:
        """Whether each row sees each key, bool; axes may have length 1."""
        keys = begin + jnp.arange(self._block, dtype=jnp.int32)[None, None, None, None]
        visible = keys < jnp.minimum(self._kv_lens, self._kv_len)
        i = jnp.arange(rows.start, rows.stop, dtype=jnp.int32)[None, None, None, :, None]
        left, right = self._problem.window
        if left >= 0:
            visible &= keys >= i - left
        if right >= 0:
            visible &= keys <= i + right
        if (mask := self._padded.get("mask")) is not None:
            visible &= self.part(mask, rows, begin)
        return visible

    # Operands.

    def padded(self, x: Array) -> Array:
        """The operand with its key axis, if it has one, padded to whole blocks."""
        missing = self.num_blocks * self._block - self._kv_len
        if x.ndim == 1 or x.shape[3] == 1 or not missing:
            return x
        return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, missing)))

    def part(self, x: Array, rows: slice, begin: Array) -> Array:
        """The part of an operand for some rows and the block of keys at `begin`."""
        if x.shape[2] > 1:
            x = x[:, :, rows]
        if x.shape[3] > 1:
            x = jax.lax.dynamic_slice_in_dim(x, begin, self._block, axis=3)
        heads = self._heads if x.shape[1] > 1 else (1, 1)
        return x.reshape(x.shape[0], *heads, *x.shape[2:])

    def summed(self, name: str, x: Array) -> Array:
        """x, one number per logit, summed over the axes along which the operand is broadcast.

        Returns [batch, num_qo_heads, rows, keys], where these axes have length 1.
        """
        x = x.reshape(self._batch, -1, *x.shape[3:])
        axes = tuple(i for i, n in enumerate(self._operands[name].shape) if n == 1)
        return x.sum(axis=axes, keepdims=True)

    def of_all_keys(self, name: str, blocks: Array, seen: slice) -> Array:
        """Join the `summed` arrays of the blocks `seen` into one over all keys."""
        if self._operands[name].shape[3] == 1:
            return blocks.sum(axis=0)
        x = jnp.moveaxis(blocks, 0, 3)
        x = x.reshape(*x.shape[:3], -1)
        around = seen.start * self._block, (self.num_blocks - seen.stop) * self._block
        return jnp.pad(x, ((0, 0), (0, 0), (0, 0), around))[..., : self._kv_len]

    def of_all_rows(self, name: str, panels: list[Array]) -> Array:
        operand = self._operands[name]
        has_rows = operand.shape[2] > 1
        total = jnp.concatenate(panels, axis=2) if has_rows else functools.reduce(jnp.add, panels)
        return total.astype(operand.dtype)
