"""Compilation of CUDA kernels: paths of NVRTC and the kernel cache, and filling the cache early."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import pathlib
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from jax_attn import _core, _environment
from jax_attn._spec.spec import AttentionSpec, dtype_code
from jax_attn._spec.target import parse_target


@dataclasses.dataclass(frozen=True)
class CompiledKernel:
    """A kernel that is ready in the cache."""

    name: str  # readable: operation, architecture, dtype, tiles; ends in the hash of the cache key
    origin: str  # "compiled" now, read from "disk", or already in "memory"
    milliseconds: float  # time that this call took to compile or read
    cache_path: str  # folder with kernel.cubin and its source kernel.cu; "": not kept on disk
    cubin_bytes: int
    smem_bytes: int  # dynamic shared memory of a launch
    num_threads: int  # of a CTA


def precompile(
    specs: AttentionSpec | Iterable[AttentionSpec], target: str | None = None
) -> list[CompiledKernel]:
    """Compile every CUDA kernel of the specs into the cache, so that no later process waits.

    Needs NVRTC (pip install 'jax-attn[cuda13]') but neither GPU nor driver. Run it while building a
    container, with JAX_ATTN_CACHE_DIR inside the image. The build of NVRTC is part of the cache
    key, so use the one that the image will run with. Processes use only cache entries written by
    root or by their own user.

    specs: one spec or several. The kernels are attention, plan, append (paged specs) and merge.
    target: "sm_90" and the like, instead of each spec's target.

    Returns the kernels that are in the cache now, each once.

    Raises ValueError for a spec whose target is not CUDA, RuntimeError if NVRTC is missing.
    """
    if isinstance(specs, AttentionSpec):
        specs = [specs]
    _follow_log_switches()
    jobs: dict[str, Callable[[], dict[str, Any]]] = {}
    for spec in specs:
        jobs |= jobs_of(spec if target is None else dataclasses.replace(spec, target=target))
    running = [_pool().submit(job) for job in jobs.values()]
    return [CompiledKernel(**future.result()) for future in running]


def compile_ahead(operation: str, spec: AttentionSpec, gradient: tuple[int, ...] = ()) -> None:
    """Start compiling the kernel of a call that is being traced.

    XLA needs the kernel only at the end of its own compilation, so it waits only for the rest of
    the compile, if any.

    operation: "attention", "backward", "append", "append_rotated", "plan" or "plan_general".
        Nothing happens unless a GPU is the default backend.
    gradient: for "backward": the words of the gradient of the spec's variant.
    """
    if parse_target(spec.target)[0] and jax.default_backend() == "gpu":
        _follow_log_switches()
        _start(operation, spec, gradient)


@functools.cache
def _start(
    operation: str, spec: AttentionSpec, gradient: tuple[int, ...]
) -> list[Future[dict[str, Any]]]:
    # Errors are ignored here: the call that needs the kernel compiles it again and raises.
    jobs = jobs_of(spec, gradient if operation == "backward" else None)
    return [_pool().submit(job) for name, job in jobs.items() if name.startswith(f"{operation}-")]


@functools.cache
def _pool() -> ThreadPoolExecutor:
    """Threads for NVRTC, which uses one core per kernel and can compile several at once."""
    return ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="jax_attn-nvrtc")


def _forget_pool() -> None:
    """Drop the pool in a forked child, which does not have its parent's threads."""
    _pool.cache_clear()
    _start.cache_clear()


os.register_at_fork(after_in_child=_forget_pool)


def jobs_of(
    spec: AttentionSpec, gradient: tuple[int, ...] | None = None
) -> dict[str, Callable[[], dict[str, Any]]]:
    """The kernels of a spec: name -> function that prepares the kernel and returns how.

    gradient: words of the variant's gradient, to include the backward pass; None: without it.
    """
    arch, _ = parse_target(spec.target)
    if arch == 0:
        raise ValueError(
            f"precompile: target: expected a CUDA target, got {spec.target!r}; without a GPU, say"
            ' which one to compile for: precompile(specs, target="sm_90").'
        )
    dtype = dtype_code(spec.dtype)
    jobs = {
        _core.attention_source(spec.problem).name: lambda: _core.prepare_attention(spec.problem),
    }
    always_general = spec.schedule == "auto" or spec.max_steps is not None
    if not always_general:
        jobs[f"plan-{arch}"] = lambda: _core.prepare_plan(arch, False)
    if always_general or spec.share_prefixes:
        jobs[f"plan_general-{arch}"] = lambda: _core.prepare_plan(arch, True)
    if spec.is_paged:
        for rotates in (False, True)[: 1 if spec.mla else 2]:
            name = _core.append_source(spec.problem, rotates).name
            jobs[name] = functools.partial(_core.prepare_append, spec.problem, rotates)
    jobs[f"merge-{arch}-{dtype}"] = lambda: _core.prepare_merge(arch, dtype)
    if gradient is not None:
        of = spec.problem, list(gradient)
        name = _core.backward_sources(*of)[-1].name  # the fastest of those that run
        jobs[name] = lambda: _core.prepare_backward(*of)
    return jobs


def _follow_log_switches() -> None:
    """Log kernels compiled from now on if either switch is on."""
    with_jax: bool = jax.config.jax_log_compiles  # type: ignore[attr-defined]
    _core.set_compile_log(_environment.log_compile or with_jax)


def nvrtc_candidates() -> list[str]:
    """Paths where libnvrtc may be, best first.

    A copy that is already loaded in the process comes before all of them.
    """
    folders: list[pathlib.Path] = []
    for package in ("nvidia.cu13", "nvidia.cuda_nvrtc"):  # wheels of CUDA 13 and 12
        try:
            found = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            continue
        if found is not None and found.submodule_search_locations is not None:
            folders += [pathlib.Path(path) / "lib" for path in found.submodule_search_locations]
    for toolkit in _environment.cuda_toolkits:
        folders += [pathlib.Path(toolkit) / "lib64", pathlib.Path(toolkit) / "lib"]
    names = ("libnvrtc.so.13", "libnvrtc.so.12")
    return [str(folder / name) for folder in folders for name in names] + list(names)


_core.set_jit_paths(nvrtc_candidates(), [], _environment.cache_dir)
_follow_log_switches()
