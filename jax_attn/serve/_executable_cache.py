"""Keeps XLA's executables on disk, so that the next start of the server reads them.

JAX does this with JAX_COMPILATION_CACHE_DIR; a server does it by itself, beside the compiled CUDA
kernels, in the folder of JAX_ATTN_CACHE_DIR.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import stat
from pathlib import Path

import jax

from jax_attn import _environment

log = logging.getLogger("jax_attn.serve")

_FOLDER, _LOG_LEVEL = "jax_compilation_cache_dir", "jax_logging_level"  # options of JAX
_MAX_BYTES = 1 << 30  # then the executables that were not read for the longest time go


def use_cache() -> None:
    """Begins to read and write the cache, unless the user has chosen one or wants none."""
    if getattr(jax.config, _FOLDER) is not None or not _environment.cache_dir:
        return
    folder = Path(_environment.cache_dir) / f"xla-{_machine()}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if (why := others_write(folder)) is not None:
            raise PermissionError(why)
    except OSError as error:
        log.warning(
            "executables are not kept on disk, so each start compiles them: %s;"
            " see JAX_ATTN_CACHE_DIR",
            error,
        )
        return
    jax.config.update(_FOLDER, str(folder))
    jax.config.update("jax_compilation_cache_max_size", _MAX_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if jax.default_backend() == "cpu" and getattr(jax.config, _LOG_LEVEL) == "NOTSET":
        _hide_preferences()


def others_write(folder: Path) -> str | None:
    """Why other users can put files there, as an executable that is read runs; None: they cannot.

    A folder above may be sticky like /tmp, where users rename only what is theirs.
    """
    for at in (resolved := folder.resolve(), *resolved.parents):
        found = at.stat()
        if found.st_uid not in (0, os.geteuid(), Path("/").stat().st_uid):
            return f"{at} belongs to another user"
        is_sticky = at != resolved and found.st_mode & stat.S_ISVTX
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not is_sticky:
            return f"{at} can be written by other users"
    return None


def _machine() -> str:
    """A name for processors with the same instructions: code of another one may not run here."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = "vendor_id", "cpu family", "model", "flags", "Features", "CPU part"
    known = sorted({line for line in lines if line.partition("\t")[0].strip() in names})
    return hashlib.sha256("\n".join([platform.machine(), *known]).encode()).hexdigest()[:12]


def _hide_preferences() -> None:
    """Hides XLA's errors of each executable read on a CPU: `prefer-no-gather` is to it an
    instruction that the processor lacks. Python's log stays as it was."""
    loggers = [logging.getLogger(name) for name in ("jax", "jaxlib")]
    before = [(each.level, [*each.handlers]) for each in loggers]
    jax.config.update(_LOG_LEVEL, "CRITICAL")
    for each, (level, handlers) in zip(loggers, before, strict=True):
        each.setLevel(level)
        each.handlers[:] = handlers
