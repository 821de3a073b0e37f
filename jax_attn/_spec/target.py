"""Targets of specs: "cpu" or a GPU architecture, with the number of processors."""

from __future__ import annotations

import functools
import os
import re

import jax

from jax_attn import _core

# Kernels without mla have no larger one. On CUDA some formats have less (csrc/select/cuda.cc).
LARGEST_HEAD_DIM = 512

TARGETS = '"cpu", "sm_90" or "sm_90:132" (multiprocessors)'


def default_target() -> str:
    """The target of jax.default_backend(): "cpu" or "sm_<compute capability>".

    Raises NotImplementedError for another backend.
    """
    backend = jax.default_backend()
    if backend == "cpu":
        return "cpu"
    if backend == "gpu":
        return "sm_" + jax.local_devices()[0].compute_capability.replace(".", "")
    raise NotImplementedError(f"AttentionSpec: backend {backend!r}: cpu and CUDA are supported.")


def gpu_target() -> tuple[int, int] | None:
    """parse_target of this process's GPU; None if it is too old for kernels.

    (0, 0) without a GPU, for programs that are exported: kernels find theirs when they run.
    """
    if jax.default_backend() != "gpu":
        return 0, 0
    try:
        return parse_target(default_target())
    except (NotImplementedError, ValueError):  # below sm_80, or not CUDA
        return None


@functools.cache
def parse_target(target: str) -> tuple[int, int]:
    """(compute capability, number of processors) of a target; (0, usable cores) for "cpu".

    target: "cpu", "sm_90", or "sm_90:132" to give the number of multiprocessors. Without a number:
        that of this machine's GPU if it has this compute capability, else a default.

    Raises ValueError for another form, NotImplementedError below sm_80.
    """
    if target == "cpu":
        has_affinity = hasattr(os, "sched_getaffinity")
        return 0, len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    known = re.fullmatch(r"sm_(\d{1,3})a?(?::(\d{1,7}))?", target, re.ASCII)
    if known is None:
        raise ValueError(f"AttentionSpec: target: expected {TARGETS}, got {target!r}.")
    arch, count = known.groups()
    if int(arch) < 80:
        raise NotImplementedError(
            f"AttentionSpec: target: sm_80 and later are supported, got {target}."
        )
    if count:
        return int(arch), int(count)
    if jax.default_backend() == "gpu" and default_target() == f"sm_{arch}":
        return int(arch), jax.local_devices()[0].core_count
    return int(arch), _core.default_processors(int(arch))
