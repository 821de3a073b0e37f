"""Memory for plans that are made on the host."""

from __future__ import annotations

import collections
import weakref

import numpy as np

from jax_attn._spec.spec import AttentionSpec


class _FreedMemory:
    """Memory of a spec's dead plans, reused for its next ones.

    malloc may return such memory to the system, and page faults on new memory cost more than
    planning: 86 faults took 160 of 190 us in a virtual machine.
    """

    def __init__(self, num_words: int) -> None:
        self._num_words = num_words
        # Each block with a weak reference to its last array. Every view keeps that array alive
        # (numpy collapses bases only down to it), so a dead reference means a free block. Popping
        # is atomic, so no two threads get the same block.
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
        for _ in range(len(self._blocks)):  # the last one first: it is likely in cache
            try:
                block, array = self._blocks.pop()
            except IndexError:  # another thread took it
                return None
            if array() is None:
                return block
            self._blocks.appendleft((block, array))
        return None


def plan_memory(spec: AttentionSpec, buffer: np.ndarray | None) -> np.ndarray:
    """Memory for a plan made on the host, [spec.plan_words], i32: `buffer`, or reused memory.

    Raises ValueError for a buffer of another dtype, shape or kind.
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
