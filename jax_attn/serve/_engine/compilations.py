"""Counts XLA's compilations in this process that nobody has announced."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import jax.monitoring

_unexpected: list[float] = []  # seconds of each
_thread = threading.local()


@contextlib.contextmanager
def expected() -> Iterator[None]:
    """Does not count what this thread compiles inside."""
    before = getattr(_thread, "expects", False)
    _thread.expects = True
    try:
        yield
    finally:
        _thread.expects = before


def num_unexpected() -> int:
    """The number of compilations outside of `expected`, by all threads since the import."""
    return len(_unexpected)


def _on_event(event: str, duration_secs: float, **_: str | int) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        if not getattr(_thread, "expects", False):
            _unexpected.append(duration_secs)


jax.monitoring.register_event_duration_secs_listener(_on_event)
