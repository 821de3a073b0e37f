"""Copies of pages, or of slots of states, out of the device's pools and into them.

`copy_within` copies pages of a pool to others. `HostPages` keeps pages in the host's memory for the
prefix cache: pinned, by JAX's memory kinds, so that copies run beside computations, and nothing
waits on the host. The device's work is in the order of calls, so a page is there before the layers
of the next step read it. A hand-over of a request takes pages out, and puts them into the pools of
another engine.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.stages import Compiled

from jax_attn.serve._engine.file_copies import FileCopies
from jax_attn.serve._scheduling.host_tier import FromFile, Move, ToFiles

PAGES = 16  # pages of a call; a call of fewer takes as long

Pools = Any  # a pytree of arrays [num_layers, number of pages or slots, ...]


class PoolCopies:
    """Copies a fixed number of pages, or slots, in a call. One is a pytree of [num_layers, ...]."""

    def __init__(self, what: str, pools: Pools, batch: int):
        """what: "pages" or "states", for names."""
        self._what, self._batch = what, batch
        self.shardings = [jax.tree.map(lambda x: _of_one(x.sharding), pools)] * batch
        self._take: Compiled | None = None
        self._put: Compiled | None = None

    @property
    def is_compiled(self) -> bool:
        return self._take is not None and self._put is not None

    def tasks(self, pools: Pools) -> dict[str, Callable[[], Compiled]]:
        """A function that compiles each executable, by name."""
        ids = np.zeros(self._batch, np.int32)

        def compile_take() -> Compiled:
            take = jax.jit(_take, out_shardings=self.shardings)
            self._take = take.lower(pools, ids).compile()
            return self._take

        def compile_put() -> Compiled:
            shardings = jax.tree.map(lambda x: x.sharding, pools)
            put = jax.jit(_put, donate_argnums=0, out_shardings=shardings)
            self._put = put.lower(pools, self.shapes(pools), ids).compile()
            return self._put

        return {f"{self._what} out": compile_take, f"{self._what} in": compile_put}

    def shapes(self, pools: Pools) -> list[Any]:
        """jax.ShapeDtypeStruct of each of a batch."""
        shapes = jax.eval_shape(_take, pools, np.zeros(self._batch, np.int32))
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            shapes,
            self.shardings,
        )

    def take(self, pools: Pools, ids: list[int]) -> list[Any]:
        """Copies of the pages on the device."""
        assert self._take is not None
        taken: list[Any] = []
        for begin in range(0, len(ids), self._batch):
            batch = ids[begin : begin + self._batch]
            taken += self._take(pools, self._padded(batch))[: len(batch)]
        return taken

    def put(self, pools: Pools, ids: list[int], values: list[Any]) -> Pools:
        """Writes pages. Returns the pools; those that were passed are donated."""
        assert self._put is not None
        for begin in range(0, len(ids), self._batch):
            batch = ids[begin : begin + self._batch]
            given = values[begin : begin + self._batch]
            given = jax.device_put(given, self.shardings[: len(batch)])
            given += given[-1:] * (self._batch - len(batch))
            pools = self._put(pools, given, self._padded(batch))
        return pools

    def _padded(self, ids: list[int]) -> np.ndarray:
        """[batch] i32: the last one again for those that are missing."""
        return np.array(ids + ids[-1:] * (self._batch - len(ids)), np.int32)


def copy_within(pools: Pools) -> Compiled:
    """Compiles a function of pools, which are donated, and two pages, i32: copies the first to the
    second.

    One page a call: of several, XLA for CPUs reads later ones out of a copy of the pools, 0.4 GiB
    for the bundled model.
    """

    def copy(pools: Pools, source: Any, target: Any) -> Pools:
        return _put(pools, _take(pools, [source]), [target])

    shardings = jax.tree.map(lambda x: x.sharding, pools)
    function = jax.jit(copy, donate_argnums=0, out_shardings=shardings)
    return function.lower(pools, np.int32(0), np.int32(0)).compile()


class HostPages:
    """Pages in the host's memory, by their numbers there.

    files: where some of them go; None: they stay.
    """

    def __init__(self, copies: PoolCopies):
        pinned = partial(jax.tree.map, lambda x: x.with_memory_kind("pinned_host"))
        self._sharding = pinned(copies.shardings[0])
        self._copies = copies
        self._pages: dict[int, Any] = {}
        self.files: FileCopies | None = None

    def shape(self, pools: Pools) -> Any:
        """jax.ShapeDtypeStruct of a page in the host's memory."""
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            self._copies.shapes(pools)[0],
            self._sharding,
        )

    def move(self, pools: Pools, moves: Iterable[Move | ToFiles | FromFile]) -> Pools:
        """Runs the moves in their order. Returns the pools; those that were passed are donated."""
        for (kind, to_host), group in itertools.groupby(moves, _direction):
            if kind is not Move:
                self._move_files(group)
                continue
            _, ids, numbers, _ = (list(each) for each in zip(*group, strict=True))
            if to_host:
                taken = self._copies.take(pools, ids)
                taken = jax.device_put(taken, [self._sharding] * len(taken))
                self._pages |= zip(numbers, taken, strict=True)
            else:
                pools = self._copies.put(pools, ids, [self._pages[each] for each in numbers])
        return pools

    def _move_files(self, moves: Iterable[Any]) -> None:
        for move in moves:
            if isinstance(move, FromFile):
                self._pages[move.host_page] = move.value
                continue
            assert self.files is not None
            values = [self._pages[each] for each in move.host_pages]
            self.files.write(move.owner, move.key, values, move.is_state)

    def clear(self) -> None:
        self._pages = {}


def _direction(move: Move | ToFiles | FromFile) -> tuple[type, bool]:
    return type(move), isinstance(move, Move) and move.to_host


def _take(pools: Pools, ids: Any) -> list[Any]:
    return [
        jax.tree.map(partial(lax.dynamic_index_in_dim, index=ids[i], axis=1, keepdims=False), pools)
        for i in range(len(ids))
    ]


def _put(pools: Pools, values: list[Any], ids: Any) -> Pools:
    for i, value in enumerate(values):
        put = partial(lax.dynamic_update_index_in_dim, index=ids[i], axis=1)
        pools = jax.tree.map(put, pools, value)
    return pools


def _of_one(pool: jax.sharding.Sharding) -> jax.sharding.Sharding:
    """The sharding of one page of a pool."""
    if isinstance(pool, jax.sharding.NamedSharding):
        spec = jax.sharding.PartitionSpec(None, *pool.spec[2:])
        return jax.sharding.NamedSharding(pool.mesh, spec)
    return pool
