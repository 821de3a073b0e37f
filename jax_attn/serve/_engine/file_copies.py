"""Moves pages and slots of states between the host's memory and a FileStore, in threads.

The engine's thread hands arrays over and takes them, and never waits for a file. Arrays of JAX are
never written again, so what a thread still has to write needs no copy: it stays in memory, as much
as `_MOST_WAITING` bytes. What comes beyond is not kept.
"""

from __future__ import annotations

import itertools
import logging
import math
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeAlias

import jax
import numpy as np

from jax_attn.serve._engine.file_store import FileStore
from jax_attn.serve._scheduling.file_tier import (
    Values,
    has_pictures,
    names,
    page_name,
    state_name,
)

log = logging.getLogger("jax_attn.serve")

_MOST_WAITING = 1 << 29
_READERS = 4  # one takes 0.45 ms of a processor for 2 MB
_MEASURED, _MEASURED_BYTES = 16, 1 << 26  # pages, and their bytes

_Jobs: TypeAlias = queue.SimpleQueue[Callable[[], None] | None]  # None ends the thread


class FileCopies:
    """The files of one engine; see `file_tier.Files`. Several may have one store."""

    def __init__(self, store: FileStore, page_size: int, page: Any, states: Any):
        """page, states: jax.ShapeDtypeStruct of one, in the host's memory; see HostPages."""
        self._store, self._page_size = store, page_size
        self._reports = store.join()
        self._page, self._state = page, states
        self._waiting_bytes = 0  # of the writer
        self._num_stored = self._num_left_out = 0  # pages
        self._can_write = True
        self._changed = threading.Condition()  # guards the numbers above
        self._read_ended = threading.Event()
        # One thread writes, one goes through the reads in their order, the others read a file each.
        self._writes, self._reads, self._files = _Jobs(), _Jobs(), _Jobs()
        for i, jobs in enumerate([self._writes, self._reads] + [self._files] * _READERS):
            name = f"jax_attn files {i}"
            threading.Thread(target=_run, args=(jobs,), name=name, daemon=True).start()

    def __contains__(self, name: str) -> bool:
        return name in self._store

    def __len__(self) -> int:
        return len(self._store)

    def counts(self) -> dict[str, int]:
        """See FileStore.counts, 0 if another engine of the store reports them; and totals of pages
        stored, and left out as the disk was slow."""
        found = {name: num * self._reports for name, num in self._store.counts().items()}
        return found | {"stored": self._num_stored, "left_out": self._num_left_out}

    def close(self) -> None:
        """See file_tier.Files."""
        self._can_write = False
        self._writes.put(None)
        self._reads.put(self._end_readers)
        self._reads.put(None)
        self._store.leave()

    def _end_readers(self) -> None:
        """Behind all reads, each of which waits for them."""
        for _ in range(_READERS):
            self._files.put(None)

    # ---- to files ----

    def write(self, owner: str, key: bytes, values: list[Any], is_state: bool) -> None:
        """See file_tier.Files."""
        like = self._state if is_state else self._page
        size = _num_bytes(like)
        with self._changed:
            num = max(0, min(len(values), (_MOST_WAITING - self._waiting_bytes) // size))
            if not self._waiting_bytes:
                num = max(1, num)  # one that is larger than all that may wait
            self._num_left_out += 0 if is_state else len(values) - num
            self._waiting_bytes += num * size
        if not num:
            return
        begin = len(key) // (4 * self._page_size) - len(values)
        self._writes.put(
            partial(self._write, owner, key, begin, values[:num], is_state, num * size)
        )

    def _write(
        self, owner: str, key: bytes, begin: int, values: list[Any], is_state: bool, size: int
    ) -> None:
        try:
            if self._can_write and not has_pictures(key):
                made = names(owner, key, begin, self._page_size)
                for name, value in zip(made, values, strict=False):
                    self._write_one(state_name(name) if is_state else page_name(name), value)
        except OSError as error:
            self._can_write = False
            log.error("--file-cache: nothing is written any more: %s", error)
        except Exception:
            # Arrays of a step that failed raise its error.
            log.exception("entries of the file cache were not written")
        finally:
            values.clear()
            with self._changed:
                self._waiting_bytes -= size
                self._changed.notify_all()

    def _write_one(self, name: str, value: Any) -> None:
        if name in self._store:
            self._store.touch([name])
            return
        self._store.write(name, [np.asarray(each) for each in jax.tree.leaves(value)])
        self._num_stored += name == page_name(name.partition(".")[0])

    def flush(self, seconds: float) -> None:
        """See file_tier.Files."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting_bytes, seconds)

    # ---- from files ----

    def read(self, pages: list[str], states: str | None) -> Future[Values]:
        values: Future[Values] = Future()
        self._reads.put(partial(self._read, pages, states, values))
        return values

    def _read(self, pages: list[str], states: str | None, values: Future[Values]) -> None:
        found, of_states = self._read_all(pages, self._page), []
        if states is not None and len(found) == len(pages):
            of_states = self._read_all([states], self._state)
        values.set_result(Values(found, *of_states))
        self._read_ended.set()

    def _read_all(self, names: list[str], like: Any) -> list[Any]:
        """The first of these entries, up to one that cannot be read."""
        asked = [Future[Any]() for _ in names]
        for name, value in zip(names, asked, strict=True):
            self._files.put(partial(self._fulfil, name, like, value))
        return [*itertools.takewhile(lambda x: x is not None, (each.result() for each in asked))]

    def _fulfil(self, name: str, like: Any, value: Future[Any]) -> None:
        try:
            value.set_result(self._read_one(name, like))
        except Exception:
            log.exception("an entry of the file cache was not read")
            value.set_result(None)

    def _read_one(self, name: str, like: Any) -> Any:
        """The arrays in the host's memory; None: there are none."""
        arrays = self._store.read(name)
        shapes, tree = jax.tree.flatten(like)
        if arrays is None or [(x.shape, x.dtype) for x in arrays] != [
            (x.shape, x.dtype) for x in shapes
        ]:
            return None
        placed = jax.device_put(arrays, [x.sharding for x in shapes])
        return jax.tree.unflatten(tree, jax.block_until_ready(placed))

    def wait(self, seconds: float) -> None:
        self._read_ended.wait(seconds)
        self._read_ended.clear()

    def read_seconds(self) -> tuple[float, float]:
        """See file_tier.Files."""
        of_page = max(1, min(_MEASURED, _MEASURED_BYTES // _num_bytes(self._page)))
        try:
            return self._seconds_of(self._page, of_page), self._seconds_of(self._state, 1)
        except OSError as error:
            log.error("--file-cache: nothing is written: %s", error)
            return math.inf, math.inf

    def _seconds_of(self, like: Any, num: int) -> float:
        if not (leaves := jax.tree.leaves(like)):
            return 0.0
        zeros = [np.zeros(x.shape, x.dtype) for x in leaves]
        return self._store.read_seconds(zeros, num, partial(self._read_all, like=like))


def _num_bytes(like: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(like))


def _run(jobs: _Jobs) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # it holds arrays
