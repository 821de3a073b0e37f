"""Memory that the allocator keeps after work that took much of it."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any


def give_back() -> None:
    """Gives freed memory back to the system, where the allocator can. Takes some milliseconds.

    glibc keeps what lies below the last piece in use: 140 MB after texts of a few MB. Other threads
    run meanwhile.
    """
    if (libc := _libc()) is not None:
        libc.malloc_trim(0)


@cache
def _libc() -> Any:
    """The C library if it is glibc."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "malloc_trim") else None
