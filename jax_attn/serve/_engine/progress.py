"""Progress of long work: a bar on a terminal, otherwise a line of the log now and then."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

from tqdm import tqdm

log = logging.getLogger("jax_attn.serve")

SECONDS = 10.0  # between two lines
_LINE = "{desc}: {n_fmt} of {total_fmt} {unit}s in {elapsed}, {remaining} left"


class _Log:
    """A file, some of whose lines go to the log, which survives a full disk."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def write(self, text: str) -> None:
        # tqdm also draws its bar when its text changes.
        if (line := text.strip()) and (now := time.monotonic()) >= self._last + SECONDS:
            self._last = now
            log.info("%s", line)

    def flush(self) -> None: ...


def progress_bar(desc: str, unit: str, total: int | None = None, **options: Any) -> tqdm:
    """A context manager with `update(number)`. options: others of tqdm."""
    options |= {"desc": desc, "unit": unit, "total": total, "leave": False}
    if sys.stderr.isatty():
        return tqdm(**options)
    return tqdm(**options, file=_Log(), bar_format=_LINE, mininterval=min(SECONDS, 1.0))
