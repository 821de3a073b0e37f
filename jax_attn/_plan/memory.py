"""Memory for plans that are made on the host."""

from __future__ import annotations

import collections
import weakref

import numpy as np

from jax_attn._spec.spec import AttentionSpec


class _FreedMemory:
    """Memory of a spec's plans that nobody holds any more, for its next ones. Whether malloc gives
    such memory back to the system is chance, and pages that come anew cost more than a plan: 160 us
    of 190 for 86 of them, in a virtual machine.
    """

    def __init__(self, num_words: int) -> None:
        self._num_words = num_words
        # With the array that was over each block last; what looks into one holds that array, whose
        # base is no array. Popping is atomic, so no two threads have the same block.
        self._blocks: collections.deque[tuple[memoryview, weakref.ref[np.ndarray]]]
        self._blocks = collections.deque(maxlen=3)

    @staticmethod
    def of(spec: AttentionSpec) -> _FreedMemory:
        memory = spec.__dict__.get("_freed_memory")
        if memory is None:
            memory = spec.__dict__["_freed_memory"] = _FreedMemory(spec.plan_words)
        return memory

    def take(self) -> np.ndarray:
        block = self._pop() or memoryview(np.empty(self._num_words, np.int32))
        array = np.frombuffer(block, np.int32)
        self._blocks.append((block, weakref.ref(array)))
        return array

    def _pop(self) -> memoryview | None:
        for _ in range(len(self._blocks)):  # the last one first: it is in a cache
            try:
                block, array = self._blocks.pop()
            except IndexError:  # another thread's
                return None
            if array() is None:
                return block
            self._blocks.appendleft((block, array))
        return None


def plan_memory(spec: AttentionSpec, buffer: np.ndarray | None) -> np.ndarray:
    """[spec.plan_words], i32, for a plan made on the host: `buffer`, or of the spec's own memory.

    Raises ValueError for a buffer of another kind.
    """
    if buffer is None:
        return _FreedMemory.of(spec).take()
    if not (
        isinstance(buffer, np.ndarray)
        and buffer.shape == (spec.plan_words,)
        and buffer.dtype == np.int32
        and buffer.flags.c_contiguous
        and buffer.flags.writeable
    ):
        got = f"{buffer.dtype}{list(buffer.shape)}" if hasattr(buffer, "dtype") else type(buffer)
        raise ValueError(
            f"plan: buffer: expected a writeable contiguous numpy array int32[{spec.plan_words}],"
            f" got {got}."
        )
    return buffer
