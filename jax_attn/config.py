"""Every environment variable of jax_attn, read here and nowhere else.

JAX_ATTN_CHECK=1         before a kernel runs, check all that it will follow: the whole plan, page ids
                         against the pool, the layer; on any device, slowly
JAX_ATTN_POISON=1        fill results and workspaces with 0xFF before a kernel runs, for tests
JAX_ATTN_PRINT_CONFIG=1  print the kernel configuration chosen for each new AttentionSpec, and why
JAX_ATTN_CACHE_DIR       folder of compiled CUDA kernels; empty: none; default jax_attn in
                         XDG_CACHE_HOME, which is ~/.cache if not set
JAX_ATTN_CPU_ISA         instruction set of the CPU kernels: baseline, avx2, avx512, avx512_bf16 or
                         neon; default: the best the machine has
CUDA_HOME, CUDA_PATH     a CUDA toolkit, searched for NVRTC after the wheels of pip
"""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator


def _flag(name: str) -> bool:
    value = os.environ.get(name, "0")
    if value not in ("0", "1"):
        raise ValueError(f"{name}: expected 0 or 1, got {value!r}.")
    return value == "1"


check: bool = _flag("JAX_ATTN_CHECK")
poison: bool = _flag("JAX_ATTN_POISON")
print_config: bool = _flag("JAX_ATTN_PRINT_CONFIG")
cpu_isa: str = os.environ.get("JAX_ATTN_CPU_ISA", "")
cache_dir: str = os.environ.get(
    "JAX_ATTN_CACHE_DIR",
    str(pathlib.Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "jax_attn"),
)
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
