"""Tangents and gradients of dense attention in jnp, one block of keys at a time."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# _BLOCK: keys whose logits are in memory at the same time. _PANELS: number of parts of the query
# rows. Each part loops over the blocks of keys that it sees. A causal mask shows half of all
# logits, and four panels compute 5/8 of them. Each panel is one more loop to compile.
_BLOCK, _PANELS = 512, 4

Array = jax.Array


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
    """The static arguments of a call."""

    query_lens: tuple[int, ...] | None  # None: T for all requests, or an operand
    kv_lens: tuple[int, ...] | None  # None: S for all requests, or an operand
    sm_scale: float  # multiplied by the operand "scale", if there is one
    window: tuple[int, int]  # query i sees i - left <= j <= i + right; -1: no limit
    operands: tuple[Operand, ...] = ()

    @property
    def split(self) -> tuple[str, ...]:
        """Axes along which devices may split the work.

        The batch axis b is not among them if lengths are static, because they belong to requests.
        """
        has_lengths = self.query_lens is not None or self.kv_lens is not None
        return ("h",) if has_lengths else ("b", "h")

    def named(self, operands: Any) -> dict[str, Array]:
        """The operands by name, from arrays in the order of the problem's operands."""
        return {of.name: x for of, x in zip(self.operands, operands, strict=True)}


def gradients(
    problem: Problem, wanted: tuple[str, ...], q: Array, k: Array, v: Array, *others: Array
) -> tuple[Array, ...]:
    """Gradients of q, k, v and the wanted operands.

    Used where kernels have no backward pass, and for second derivatives. The algorithm is
    FlashAttention-2's (arXiv 2307.08691, Algorithm 2).

    others: the operands, o, lse, d_o, d_lse.

    For each block of keys, P = exp(logits - lse). With D = sum(do * o) - dlse of each row:
    dv = P^T do,  dlogits = P * (do v^T - D),  dq = scale dlogits k,  dk = scale dlogits^T q.
    The gradient of an operand is the sum of dlogits over the axes along which it is broadcast. For
    the operand "scale", dlogits is multiplied by the score first.
    """
    *operands, o, lse, d_o, d_lse = others
    call = _Call(problem, q, k, v, problem.named(operands), lse)
    o, d_o = call.without_empty_rows(o), call.without_empty_rows(d_o)
    d = call.rows_as_logits(_einsum("btnd,btnd->btn", d_o, o) - d_lse)
    d_o = call.grouped(d_o)
    d_k, d_v = (jnp.zeros(x.shape, jnp.float32) for x in (call.k_blocks, call.v_blocks))
    d_q = []
    of_operands: dict[str, list[Array]] = {name: [] for name in wanted}
    for rows, seen in call.panels():
        panel = _Panel(rows, call.q[:, rows], d_o[:, rows], d[..., rows, :])
        start = jnp.zeros(panel.q.shape, jnp.float32)
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
    of_operands = {
        name: call.summed(name, d_logits * weights.score if name == "scale" else d_logits)
        for name in wanted
    }
    p, d_s = p.astype(q.dtype), (call.scale * d_logits).astype(q.dtype)
    d_k, d_v = _einsum("bhgts,bthgd->bshd", d_s, q), _einsum("bhgts,bthge->bshe", p, d_o)
    return d_q + _einsum("bhgts,bshd->bthgd", d_s, k), (d_k, d_v, of_operands)


def tangents(
    problem: Problem, wanted: tuple[str, ...], q: Array, k: Array, v: Array, *others: Array
) -> tuple[Array, Array]:
    """Tangents of o and lse, linear in the tangents of q, k, v and the wanted operands.

    others: the operands, o, lse, the tangents of q, k, v and of the wanted operands.

    With tl the tangent of the logits and tv that of v: tlse = sum(P * tl),
    to = sum(P * tl * v + P * tv) - tlse * o.
    """
    n = len(problem.operands)
    operands, (o, lse), (t_q, t_k, t_v) = others[:n], others[n : n + 2], others[n + 2 : n + 5]
    call = _Call(problem, q, k, v, problem.named(operands), lse)
    of_operands = dict(zip(wanted, map(call.padded, others[n + 5 :]), strict=True))
    t_q = call.grouped(call.without_empty_rows(t_q))
    t_k, t_v = call.blocks(t_k), call.blocks(t_v)
    of_rows = []
    for rows, seen in call.panels():
        shape = (*call.q[:, rows].shape[:-1], v.shape[3])
        start = jnp.zeros(shape, jnp.float32), jnp.zeros((*shape[:-1], 1), jnp.float32)
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
    for name, tangent in of_operands.items():
        part = call.part(tangent, rows, begin)
        t_logits += part * weights.score if name == "scale" else part
    p_t = jnp.where(weights.visible, p * t_logits, 0)
    of_v, t_lse = sums
    of_v += _einsum("bhgts,bshe->bthge", p_t.astype(v.dtype), v)
    of_v += _einsum("bhgts,bshe->bthge", p.astype(v.dtype), t_v)
    return (of_v, t_lse + jnp.moveaxis(p_t.sum(axis=-1), 3, 1)[..., None]), None


_einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


class _Weights(NamedTuple):
    """P of some rows and a block of keys: [batch, num_kv_heads, group_size, rows, keys], f32."""

    p: Array
    score: Array  # sm_scale * (q . k)
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
        # lse is inf for a row that sees no key, so that its P is 0.
        self._lse = self.rows_as_logits(jnp.where(self._is_empty, jnp.inf, lse))
        self._padded = {name: self.padded(x) for name, x in operands.items()}
        kv_lens = operands.get("kv_lens")
        if kv_lens is None:
            lens = problem.kv_lens or (self._kv_len,) * self._batch
            kv_lens = jnp.asarray(np.asarray(lens, np.int32))
        self._kv_lens = kv_lens[:, None, None, None, None]
        scale = operands.get("scale", jnp.ones((1, 1, 1, 1)))
        self.scale = problem.sm_scale * scale[..., None]

    # Layouts of rows and keys.

    def without_empty_rows(self, x: Array) -> Array:
        """x with 0 in rows that see no key: their o is constant, and 0 * NaN would be NaN."""
        return jnp.where(self._is_empty[..., None], 0, x)

    def grouped(self, x: Array) -> Array:
        return x.reshape(*x.shape[:2], *self._heads, -1)

    def rows_as_logits(self, x: Array) -> Array:
        """x from [batch, T, num_qo_heads] to [batch, num_kv_heads, group_size, T, 1]."""
        return jnp.moveaxis(x.reshape(*x.shape[:2], *self._heads), 1, -1)[..., None]

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
        begin = jnp.arange(self.num_blocks) * self._block
        return begin[seen], self.k_blocks[seen], self.v_blocks[seen]

    # Logits.

    def weights(self, rows: slice, begin: Array, k: Array, v: Array) -> _Weights:
        visible = self._visible(rows, begin)
        k, v = _where_seen(visible, k), _where_seen(visible, v)
        product = _einsum("bthgd,bshd->bhgts", self.q[:, rows], k)
        logits = self.scale * product
        if (bias := self._padded.get("bias")) is not None:
            logits += self.part(bias, rows, begin)
        p = jnp.where(visible, jnp.exp(logits - self._lse[..., rows, :]), 0)
        return _Weights(p, self._problem.sm_scale * product, visible, k, v)

    def _visible(self, rows: slice, begin: Array) -> Array:
        """Whether each row sees each key, bool; axes may have length 1."""
        keys = begin + jnp.arange(self._block)
        visible = keys < jnp.minimum(self._kv_lens, self._kv_len)
        i = jnp.arange(rows.start, rows.stop)[:, None]
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
