"""Every environment variable of jax_attn, read here and nowhere else.

JAX_ATTN_CHECK=1         before a kernel runs, check everything it relies on: the whole plan, page
                         ids against the pool, the layer; a slot of its own for each token that
                         append_kv writes, and lengths of a traced plan that count new tokens; on
                         any device; slow
JAX_ATTN_POISON=1        fill results and workspaces with 0xFF before a kernel runs, for tests
JAX_ATTN_PRINT_CONFIG=1  print the kernel configuration chosen for each new AttentionSpec, and why
JAX_ATTN_LOG_COMPILE=1   print a line for each CUDA kernel that is compiled or read from the disk
                         cache, and how its key differs from the nearest known one;
                         jax_log_compiles has the same effect
JAX_ATTN_CACHE_DIR       folder of compiled CUDA kernels, and of a server's XLA executables; empty:
                         no disk cache; default: jax_attn in XDG_CACHE_HOME, which is ~/.cache if
                         not set. A folder that other users can write or rename is not used: what
                         is compiled is then kept in memory only
JAX_ATTN_CPU_ISA         instruction set of the CPU kernels for all work items: baseline, avx2,
                         avx512, avx512_bf16, amx or neon; default: the best one the machine has,
                         except that items with few rows use the one that tuning found faster
                         (JAX_ATTN_PRINT_CONFIG=1 names it)
JAX_ATTN_TUNING          file written by `python -m jax_attn.tune`: planner numbers and instruction
                         sets measured on this processor
CUDA_HOME, CUDA_PATH     a CUDA toolkit, searched for NVRTC after the pip wheels
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


def _flag(name: str) -> bool:
    value = os.environ.get(name, "0")
    if value not in ("0", "1"):
        raise ValueError(f"{name}: expected 0 or 1, got {value!r}.")
    return value == "1"


def _cache_dir() -> str:
    """The cache folder as an absolute path, or "" for no disk cache.

    A path that still begins with ~ (the user has no home directory) is returned as it is; code that
    opens the cache refuses it.
    """
    folder = os.environ.get("JAX_ATTN_CACHE_DIR")
    if folder is None:
        base = os.environ.get("XDG_CACHE_HOME", "")
        # XDG: a relative XDG_CACHE_HOME is ignored.
        folder = os.path.join(base if os.path.isabs(base) else "~/.cache", "jax_attn")
    folder = os.path.expanduser(folder)
    try:
        folder.encode()
    except UnicodeEncodeError:
        raise ValueError(f"JAX_ATTN_CACHE_DIR: expected a path in UTF-8, got {folder!r}.") from None
    return os.path.abspath(folder) if folder and folder[0] != "~" else folder


check: bool = _flag("JAX_ATTN_CHECK")
poison: bool = _flag("JAX_ATTN_POISON")
print_config: bool = _flag("JAX_ATTN_PRINT_CONFIG")
log_compile: bool = _flag("JAX_ATTN_LOG_COMPILE")
cpu_isa: str = os.environ.get("JAX_ATTN_CPU_ISA", "")
tuning: str = os.environ.get("JAX_ATTN_TUNING", "")
cache_dir: str = _cache_dir()
cuda_toolkits: list[str] = [
    *filter(None, (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"))),
    "/usr/local/cuda",
]


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Make functions traced inside fill results and workspaces with 0xFF before kernels run."""
    global poison
    previous, poison = poison, True
    try:
        yield
    finally:
        poison = previous
