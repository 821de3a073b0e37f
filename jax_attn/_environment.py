"""Every environment variable of jax_attn, read here and nowhere else.

JAX_ATTN_CHECK=1         before a kernel runs, check all that it follows: the whole plan, page ids
                         against the pool, the layer; on any device, slowly
JAX_ATTN_POISON=1        fill results and workspaces with 0xFF before a kernel runs, for tests
JAX_ATTN_PRINT_CONFIG=1  print the kernel configuration chosen for each new AttentionSpec, and why
JAX_ATTN_LOG_COMPILE=1   print a line for each CUDA kernel that is compiled or read from the disk
                         cache, and how its key differs from the nearest known one; jax_log_compiles
                         does so, too
JAX_ATTN_CACHE_DIR       folder of compiled CUDA kernels; empty: none; default jax_attn in
                         XDG_CACHE_HOME, which is ~/.cache if not set. One that other users can
                         write, or rename, is not used: kernels are kept in memory then
JAX_ATTN_CPU_ISA         instruction set of the CPU kernels: baseline, avx2, avx512, avx512_bf16,
                         amx or neon, for all work items; default: the best the machine has, and
                         for items of few rows what tuning found to be faster
                         (JAX_ATTN_PRINT_CONFIG=1 names it)
JAX_ATTN_TUNING          file of `python -m jax_attn.tune`: the planner's numbers, and which
                         instruction sets, as measured on the processor at hand
CUDA_HOME, CUDA_PATH     a CUDA toolkit, searched for NVRTC after the wheels of pip
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
    """An absolute path, or "" for none. One that begins with ~, on a machine that knows no home of
    this user, is refused by whoever needs it."""
    folder = os.environ.get("JAX_ATTN_CACHE_DIR")
    if folder is None:
        base = os.environ.get("XDG_CACHE_HOME", "")
        # As XDG has it, a relative path is none.
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
    """Functions traced inside fill results and workspaces with 0xFF before their kernels run."""
    global poison
    previous, poison = poison, True
    try:
        yield
    finally:
        poison = previous
