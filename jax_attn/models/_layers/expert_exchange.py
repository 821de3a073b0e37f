"""Experts over devices: rows go to the devices that have their experts, and come back.

The way of GShard (arXiv 2006.16668) with two all-to-alls, but no row is dropped: what does not fit
the static capacity of a round goes in the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# Bytes that a device sends in a round which holds any routing. Below it no device asks the others
# whether all rows have gone: on a GPU the host would wait for that answer in every layer.
_ONE_ROUND_BYTES = 4 << 20
_SLACK = 1.25  # capacity of a round over the rows of an even routing

RowsAt = Callable[[jax.Array], jax.Array]
"""(indices [r] i32) -> [r, d]."""
Compute = Callable[[RowsAt, jax.Array], jax.Array]
"""(rows, expert [r] i32) -> [r, out]: a device's experts, numbered from 0; rows of experts beyond
them have undefined results."""


def exchange(
    rows_at: RowsAt,
    expert: jax.Array,
    count: int,
    most: int,
    axis_name: str,
    compute: Compute,
    capacity: int | None = None,
) -> jax.Array:
    """Computes rows where their experts are, inside shard_map: -> [m, out], in their order.

    rows_at: the rows, f32, bf16 or f16. expert: [m] i32, numbered over all devices of the axis,
      `count` on each; rows of experts beyond them are not sent, and have zeros as results.
    most: the most rows that one device can have for one other.
    capacity: the rows of a round from a device to another; None: see `capacity_of`.

    A round is an all-to-all there and one back. All devices make equally many.
    """
    size = lax.axis_size(axis_name)
    one = jax.eval_shape(rows_at, expert[:1])
    if capacity is None:
        capacity = capacity_of(len(expert), most, size, one.shape[1] * one.dtype.itemsize)
    sent = _Sent.of(expert, count, size)
    out = jax.eval_shape(lambda expert: compute(rows_at, expert), expert)
    results = jnp.zeros(out.shape, out.dtype)

    def run_round(i: jax.Array | int, results: jax.Array) -> jax.Array:
        row, is_row = sent.rows_of(i, capacity)
        ids = jnp.where(is_row, expert[row] % count, count)
        rows, ids = _to_owners(rows_at(row), ids, axis_name)
        back = lax.all_to_all(compute(rows.__getitem__, ids), axis_name, 0, 0, tiled=True)
        slot, is_now = sent.slots_of(i, capacity)
        return jnp.where(is_now[:, None], back[slot], results)

    results = run_round(0, results)
    if capacity >= most:
        return results
    longest = lax.pmax(sent.counts.max(), axis_name)
    num_rounds = (longest + capacity - 1) // capacity
    _, results = lax.while_loop(
        lambda carry: carry[0] < num_rounds,
        lambda carry: (carry[0] + 1, run_round(*carry)),
        (jnp.int32(1), results),
    )
    return results


def capacity_of(num_rows: int, most: int, size: int, row_bytes: int) -> int:
    """Rows of a round from a device to another.

    All that there can be if these are few bytes, else the rows of an even routing and a quarter.
    """
    if size * most * row_bytes <= _ONE_ROUND_BYTES:
        return most
    return min(most, max(1, -(-int(_SLACK * num_rows) // size)))


class _Sent(NamedTuple):
    """Which rows go where, in the order of devices, then of rows.

    order: [m] i32, the rows. place: [m] i32, the inverse. device: [m] i32, of each row; `size`:
    none. counts, begins: [size] i32, of each device's rows in `order`.
    """

    order: jax.Array
    place: jax.Array
    device: jax.Array
    counts: jax.Array
    begins: jax.Array

    @classmethod
    def of(cls, expert: jax.Array, count: int, size: int) -> _Sent:
        device = jnp.minimum(expert // count, size)
        order = jnp.argsort(device, stable=True)
        counts = jnp.bincount(device, length=size).astype(jnp.int32)
        return cls(order, jnp.argsort(order), device, counts, jnp.cumsum(counts) - counts)

    def rows_of(self, i: jax.Array | int, capacity: int) -> tuple[jax.Array, jax.Array]:
        """The row in each slot of round i, and whether there is one: [size * capacity]."""
        nth = i * capacity + jnp.arange(capacity)
        at = jnp.minimum(self.begins[:, None] + nth, len(self.order) - 1)
        return self.order[at].reshape(-1), (nth < self.counts[:, None]).reshape(-1)

    def slots_of(self, i: jax.Array | int, capacity: int) -> tuple[jax.Array, jax.Array]:
        """The slot of each row, and whether the row goes in round i: [m]."""
        size = len(self.counts)
        device = jnp.minimum(self.device, size - 1)
        nth = self.place - self.begins[device] - i * capacity
        is_now = (nth >= 0) & (nth < capacity) & (self.device < size)
        return jnp.where(is_now, device * capacity + nth, 0), is_now


def _to_owners(rows: jax.Array, ids: jax.Array, axis_name: str) -> tuple[jax.Array, jax.Array]:
    """Exchanges rows and ids in one all-to-all. As integers: those keep all bits."""
    words = 4 // rows.dtype.itemsize  # values of a row in a word
    padded = jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % words)))
    if words > 1:
        padded = padded.reshape(len(rows), -1, words)
    packed = lax.bitcast_convert_type(padded, jnp.int32)
    packed = jnp.concatenate([packed, ids[:, None].astype(jnp.int32)], axis=1)
    packed = lax.all_to_all(packed, axis_name, 0, 0, tiled=True)
    arrived = lax.bitcast_convert_type(packed[:, :-1], rows.dtype).reshape(len(rows), -1)
    return arrived[:, : rows.shape[1]], packed[:, -1]
