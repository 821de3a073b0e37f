"""Full garbage collections that look only at what came since the last one.

Otherwise one of a server with 1,500 open streams takes over 100 ms of the processor, in which no
stream goes on: it looks at the 200 objects of each of them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import Any

# Full collections until one looks at all objects, at a calm moment and at any other. The second is
# for a server that is never calm: some 20 million new objects come in between.
_UNTIL_ALL, _UNTIL_ALL_AT_LAST = 8, 256


def spare_the_collector() -> None:
    """Excludes existing objects from garbage collection: 100,000, 60 ms of each full one."""
    gc.collect()
    gc.freeze()


class SpareCollector:
    """Spares objects that have survived a full collection.

    They are freed as usual when nothing refers to them, and so are closed connections, which are
    no cycles. Cycles among them stay until a collection looks at all objects.
    """

    def __init__(self, is_calm: Callable[[], bool]):
        """is_calm: whether a full collection of all objects would delay nobody for long."""
        self._is_calm = is_calm
        self._num_since = 0  # full collections since one of all objects

    def begin(self) -> None:
        """Spares all objects that are there."""
        spare_the_collector()
        gc.callbacks.append(self._on_collection)

    def end(self) -> None:
        """Undoes `begin`, if it was called."""
        if self._on_collection in gc.callbacks:
            gc.callbacks.remove(self._on_collection)
            gc.unfreeze()

    def _on_collection(self, phase: str, info: Mapping[str, Any]) -> None:
        if phase != "stop" or info["generation"] != 2:
            return
        self._num_since += 1
        if self._num_since >= (_UNTIL_ALL if self._is_calm() else _UNTIL_ALL_AT_LAST):
            self._num_since = 0
            gc.unfreeze()  # for the next one
        else:
            gc.freeze()
