"""Block classes of a mask: its program, run on intervals instead of numbers.

Each interval holds all values that an instruction may take in a block. This proves that a mask
hides all of a block, shows all of it, or neither. Only i32 and bool are followed; an unknown value
may be anything. A block about which nothing is proved is MIXED, which is slower but never wrong.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn._variant.program import Instruction
from jax_attn._variant.variant import Variant

_LEAST, _MOST = -(2**31), 2**31 - 1
_FEW_LOADS = 4  # read stretches directly if that loads each element at most this often
_SAFE = 2**31 - 2**10  # an i32 result computed in f32 (rounded) below this does not overflow


@dataclasses.dataclass(frozen=True)
class Interval:
    """[lo, hi] of i32 or bool arrays that broadcast to [num_row_blocks, num_kv_blocks].

    width: hi - lo in most blocks, used to look up arrays at an index that is a range. None: unknown
        while tracing.
    """

    lo: Any
    hi: Any
    width: int | None = None

    @property
    def is_bool(self) -> bool:
        return np.dtype(self.lo.dtype) == np.bool_


def any_int(xp: Any) -> Interval:
    return Interval(xp.full((1, 1), _LEAST, np.int32), xp.full((1, 1), _MOST, np.int32))


def any_bool(xp: Any) -> Interval:
    return Interval(xp.zeros((1, 1), np.bool_), xp.ones((1, 1), np.bool_))


def classes(
    variant: Variant, facts: Mapping[str, Interval], operands: Mapping[str, Any]
) -> tuple[Any, Any]:
    """(may be visible, may be hidden) for each block, bool, by the mask of a variant.

    facts: field of variant.At -> its interval; a missing field may have any value.
    operands: name -> array, host or traced.
    """
    arrays = [*operands.values(), *(x for f in facts.values() for x in (f.lo, f.hi))]
    xp = jnp if any(isinstance(x, jax.Array) for x in arrays) else np
    values: list[Interval | None] = []  # None: unknown, or f32, which is not followed
    ordered = [xp.asarray(operands[name]) for name in variant.names]
    for x in variant.instructions:
        if x.op in facts:
            value: Interval | None = facts[x.op]
        elif x.kind == 0:
            value = None
        elif x.op == "const":
            dtype = np.bool_ if x.kind == 2 else np.int32
            value = _exactly(xp, x.args[0], dtype)
        elif x.op == "dim":
            value = _exactly(xp, ordered[x.args[0]].shape[x.args[1]], np.int32)
        elif x.op == "load":
            value = _load(xp, ordered[x.args[0]], [values[i] for i in x.args[1:]])
        else:
            value = _apply(xp, x, [values[i] for i in x.args])
        if value is None and x.kind != 0:
            value = any_bool(xp) if x.kind == 2 else any_int(xp)
        values.append(value)
    result = values[variant.results[1]]
    assert result is not None
    return result.hi, ~result.lo


def _exactly(xp: Any, value: int, dtype: Any) -> Interval:
    array = xp.full((1, 1), value, dtype)
    return Interval(array, array, 0)


def _apply(xp: Any, x: Instruction, args: list[Interval | None]) -> Interval | None:
    """The value of an instruction; None if it is unknown."""
    rule = _RULES.get(x.op)
    if rule is None or any(a is None for a in args):
        return None
    return rule(xp, *args)


def _load(xp: Any, array: Any, indices: list[Interval | None]) -> Interval | None:
    """The smallest and largest element that the indices may reach.

    If all indices but the last are single numbers, this covers a stretch along the last axis;
    otherwise the whole array.
    """
    if array.dtype not in (np.int32, np.uint8, np.bool_) or 0 in array.shape:
        return None
    dtype = np.bool_ if array.dtype == np.bool_ else np.int32
    array = array.astype(np.int32)
    if not indices:
        return _of_type(array.reshape(1, 1), array.reshape(1, 1), dtype)
    known = [any_int(xp) if i is None else i for i in indices]
    lows = [i.lo.clip(0, n - 1) for i, n in zip(known, array.shape, strict=True)]
    highs = [i.hi.clip(0, n - 1) for i, n in zip(known, array.shape, strict=True)]
    longest = known[-1].width
    if longest is None and xp is np:
        longest = int((highs[-1] - lows[-1]).max(initial=0))
    whole = array.min().reshape(1, 1), array.max().reshape(1, 1)
    if longest is None or longest >= array.shape[-1]:
        return _of_type(whole[0], whole[1], dtype)
    is_one = [low == high for low, high in zip(lows[:-1], highs[:-1], strict=True)]
    shape = np.broadcast_shapes(*(x.shape for x in (*lows, *highs)))
    if math.prod(shape) * (longest + 1) <= _FEW_LOADS * array.size:
        # Read each stretch directly. On a GPU this is one kernel; windows take one per step.
        is_near = functools.reduce(operator.and_, is_one, highs[-1] - lows[-1] <= longest)
        at = lows[-1][..., None] + xp.arange(longest + 1, dtype=np.int32)
        at = xp.minimum(at, highs[-1][..., None])
        stretch = array[(*(low[..., None] for low in lows[:-1]), at)]
        found = [stretch.min(-1), stretch.max(-1)]
    else:
        # Cover the stretch by two windows of a power-of-two size, at its begin and at its end.
        size = 1
        while 2 * size <= longest + 1:
            size *= 2
        is_near = functools.reduce(operator.and_, is_one, highs[-1] - lows[-1] < 2 * size)
        found = []
        for reduce in (xp.minimum, xp.maximum):
            windows = array  # windows[..., i]: reduction of the elements from i on
            for step in (2**n for n in range(size.bit_length() - 1)):
                end = xp.repeat(windows[..., -1:], step, axis=-1)
                windows = reduce(windows, xp.concatenate([windows[..., step:], end], axis=-1))
            ends = lows[-1], (highs[-1] - size + 1).clip(0)
            found.append(reduce(*(windows[(*lows[:-1], at)] for at in ends)))
    low, high = (xp.where(is_near, x, other) for x, other in zip(found, whole, strict=True))
    return _of_type(low, high, dtype)


def _of_type(low: Any, high: Any, dtype: Any) -> Interval:
    return Interval(low.astype(dtype), high.astype(dtype))


def _settled(
    xp: Any, low: Any, high: Any, results: list[Any], width: int | None = None
) -> Interval:
    """[low, high], or any i32 if one of the f32 results may overflow i32, which would wrap."""
    fits = xp.ones((1, 1), np.bool_)
    for value in results:
        fits = fits & (abs(value) < _SAFE)
    low, high = xp.where(fits, low, _LEAST), xp.where(fits, high, _MOST)
    return Interval(low.astype(np.int32), high.astype(np.int32), width)


def _f32(x: Any) -> Any:
    return x.astype(np.float32)


def _add(xp: Any, a: Interval, b: Interval) -> Interval:
    width = None if a.width is None or b.width is None else a.width + b.width
    sums = [_f32(a.lo) + _f32(b.lo), _f32(a.hi) + _f32(b.hi)]
    return _settled(xp, a.lo + b.lo, a.hi + b.hi, sums, width)


def _neg(xp: Any, a: Interval) -> Interval:
    return _settled(xp, -a.hi, -a.lo, [_f32(a.lo), _f32(a.hi)], a.width)


def _mul(xp: Any, a: Interval, b: Interval) -> Interval:
    pairs = [(x, y) for x in (a.lo, a.hi) for y in (b.lo, b.hi)]
    low = high = pairs[0][0] * pairs[0][1]
    for x, y in pairs[1:]:
        low, high = xp.minimum(low, x * y), xp.maximum(high, x * y)
    return _settled(xp, low, high, [_f32(x) * _f32(y) for x, y in pairs])


def _where(xp: Any, known: Any, low: Any, high: Any, width: int | None = None) -> Interval:
    """[low, high] where `known`, else any value."""
    low, high = xp.where(known, low, _LEAST), xp.where(known, high, _MOST)
    return Interval(low.astype(np.int32), high.astype(np.int32), width)


def _divide(xp: Any, a: Interval, b: Interval) -> Interval:
    """a / b if b is one positive number: truncation keeps the order. Otherwise unknown."""
    known = (b.lo == b.hi) & (b.lo > 0) & (a.lo > _LEAST)
    by = xp.where(known, b.lo, 1)
    least = a.lo.clip(_LEAST + 1), a.hi.clip(_LEAST + 1)  # so that abs does not overflow
    low, high = (xp.sign(x) * (abs(x) // by) for x in least)
    return _where(xp, known, low, high, a.width)


def _remainder(xp: Any, a: Interval, b: Interval) -> Interval:
    """a % b if a >= 0 and b is one positive number: the order is kept within one period."""
    known = (b.lo == b.hi) & (b.lo > 0) & (a.lo >= 0)
    by = xp.where(known, b.lo, 1)
    same = a.lo // by == a.hi // by
    return _where(xp, known, xp.where(same, a.lo % by, 0), xp.where(same, a.hi % by, by - 1))


def _shift_right(xp: Any, a: Interval, b: Interval) -> Interval:
    by = b.lo.clip(0, 31)
    return _where(xp, (b.lo == b.hi) & (b.lo == by), a.lo >> by, a.hi >> by, a.width)


def _and(xp: Any, a: Interval, b: Interval) -> Interval:
    if a.is_bool:
        return Interval(a.lo & b.lo, a.hi & b.hi)
    exactly = (a.lo == a.hi) & (b.lo == b.hi)
    known = (a.lo >= 0) | (b.lo >= 0)
    most = xp.where(a.lo >= 0, xp.where(b.lo >= 0, xp.minimum(a.hi, b.hi), a.hi), b.hi)
    low, high = xp.where(exactly, a.lo & b.lo, 0), xp.where(exactly, a.lo & b.lo, most)
    return _where(xp, exactly | known, low, high)


def _or(xp: Any, a: Interval, b: Interval) -> Interval | None:
    return Interval(a.lo | b.lo, a.hi | b.hi) if a.is_bool else None


def _xor(xp: Any, a: Interval, b: Interval) -> Interval | None:
    return _not(xp, _equal(xp, a, b)) if a.is_bool else None


def _not(xp: Any, a: Interval) -> Interval:
    return Interval(~a.hi, ~a.lo, a.width)


def _equal(xp: Any, a: Interval, b: Interval) -> Interval:
    is_one = (a.lo == a.hi) & (b.lo == b.hi)
    return Interval(is_one & (a.lo == b.lo), (a.lo <= b.hi) & (b.lo <= a.hi))


def _select(xp: Any, which: Interval, yes: Interval, no: Interval) -> Interval:
    least = yes.lo & no.lo if yes.is_bool else xp.minimum(yes.lo, no.lo)
    most = yes.hi | no.hi if yes.is_bool else xp.maximum(yes.hi, no.hi)
    low = xp.where(which.lo, yes.lo, xp.where(which.hi, least, no.lo))
    return Interval(low, xp.where(which.lo, yes.hi, xp.where(which.hi, most, no.hi)))


def _cast(xp: Any, a: Interval) -> Interval:
    """Cast from i32 to bool or from bool to i32."""
    if a.is_bool:
        return Interval(a.lo.astype(np.int32), a.hi.astype(np.int32))
    zero = _exactly(xp, 0, np.int32)
    return _not(xp, _equal(xp, a, zero))


def _abs(xp: Any, a: Interval) -> Interval:
    return _select(xp, Interval(a.lo >= 0, a.hi >= 0), a, _neg(xp, a))


def _smaller(xp: Any, a: Interval, b: Interval) -> Interval:
    return Interval(xp.minimum(a.lo, b.lo), xp.minimum(a.hi, b.hi))


def _larger(xp: Any, a: Interval, b: Interval) -> Interval:
    return Interval(xp.maximum(a.lo, b.lo), xp.maximum(a.hi, b.hi))


_RULES: dict[str, Callable[..., Interval | None]] = {
    "abs": _abs,
    "add": _add,
    "and": _and,
    "cast": _cast,
    "div": _divide,
    "eq": _equal,
    "le": lambda xp, a, b: Interval(a.hi <= b.lo, a.lo <= b.hi),
    "lt": lambda xp, a, b: Interval(a.hi < b.lo, a.lo < b.hi),
    "max": _larger,
    "min": _smaller,
    "mul": _mul,
    "ne": lambda xp, a, b: _not(xp, _equal(xp, a, b)),
    "neg": _neg,
    "not": _not,
    "or": _or,
    "rem": _remainder,
    "sar": _shift_right,
    "select": _select,
    "sub": lambda xp, a, b: _add(xp, a, _neg(xp, b)),
    "xor": _xor,
}
