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
import jax.numpy as jnp

from jax_attn import _core, _environment
from jax_attn._spec.spec import AttentionSpec, dtype_code
from jax_attn._spec.state_spec import LinearAttentionSpec
from jax_attn._spec.target import default_target, parse_target

# Names of kernels, and functions that prepare each and return how.
Jobs = dict[str, Callable[[], dict[str, Any]]]


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
    specs: AttentionSpec | LinearAttentionSpec | Iterable[AttentionSpec | LinearAttentionSpec],
    target: str | None = None,
) -> list[CompiledKernel]:
    """Compile every CUDA kernel of the specs into the cache, so that no later process waits.

    Needs NVRTC (pip install 'jax-attn[cuda13]') but neither GPU nor driver. Run it while building a
    container, with JAX_ATTN_CACHE_DIR inside the image. The build of NVRTC is part of the cache
    key, so use the one that the image will run with. Processes use only cache entries written by
    root or by their own user.

    specs: one spec or several. The kernels of an AttentionSpec are attention, plan, append (paged
        specs) and merge; those of a LinearAttentionSpec are the ones of linear_attention.
    target: "sm_90" and the like, instead of each spec's target. A LinearAttentionSpec has none;
        None means this process's GPU.

    Returns the kernels that are in the cache now, each once.

    Raises ValueError for a spec whose target is not CUDA, RuntimeError if NVRTC is missing.
    """
    if isinstance(specs, AttentionSpec | LinearAttentionSpec):
        specs = [specs]
    _follow_log_switches()
    jobs: Jobs = {}
    for spec in specs:
        if isinstance(spec, LinearAttentionSpec):
            jobs |= _jobs_of_linear_spec(spec, default_target() if target is None else target)
        else:
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
    _start_on_gpu(parse_target(spec.target)[0], _jobs_of_operation, operation, spec, gradient)


def compile_linear_ahead(problem: list[int]) -> None:
    """The same for the kernels of linear attention. problem: see linear_problem."""
    _start_on_gpu(problem[0], jobs_of_linear, *problem)


def compile_linear_gradient_ahead(problem: list[int]) -> None:
    """The same for the kernels of its gradients."""
    _start_on_gpu(problem[0], jobs_of_linear_gradient, *problem)


def compile_convolution_ahead(arch: int, dtype: int, width: int, silu: bool) -> None:
    """The same for the kernel of a short convolution."""
    _start_on_gpu(arch, _jobs_of_convolution, arch, dtype, width, silu)


def _start_on_gpu(arch: int, jobs_of_call: Callable[..., Jobs], *arguments: Any) -> None:
    if arch and jax.default_backend() == "gpu":
        _follow_log_switches()
        _start(jobs_of_call, *arguments)


@functools.cache
def _start(jobs_of_call: Callable[..., Jobs], *arguments: Any) -> list[Future[dict[str, Any]]]:
    # Errors are ignored here: the call that needs the kernel compiles it again and raises.
    return [_pool().submit(job) for job in jobs_of_call(*arguments).values()]


def _jobs_of_operation(operation: str, spec: AttentionSpec, gradient: tuple[int, ...]) -> Jobs:
    jobs = jobs_of(spec, gradient if operation == "backward" else None)
    return {name: job for name, job in jobs.items() if name.startswith(f"{operation}-")}


@functools.cache
def _pool() -> ThreadPoolExecutor:
    """Threads for NVRTC, which uses one core per kernel and can compile several at once."""
    return ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="jax_attn-nvrtc")


def _forget_pool() -> None:
    """Drop the pool in a forked child, which does not have its parent's threads."""
    _pool.cache_clear()
    _start.cache_clear()


os.register_at_fork(after_in_child=_forget_pool)


def jobs_of(spec: AttentionSpec, gradient: tuple[int, ...] | None = None) -> Jobs:
    """The kernels of a spec.

    gradient: words of the variant's gradient, to include the backward pass; None: without it.
    """
    arch, _ = _cuda_target(spec.target)
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


def _cuda_target(target: str | None) -> tuple[int, int]:
    assert target is not None  # a spec has one
    found = parse_target(target)
    if found[0] == 0:
        raise ValueError(
            f"precompile: target: expected a CUDA target, got {target!r}; without a GPU, say"
            ' which one to compile for: precompile(specs, target="sm_90").'
        )
    return found


def jobs_of_linear(*problem: int) -> Jobs:
    """As jobs_of, for the words of linear_problem. Chunked loops are several kernels."""
    words = list(problem)
    return {
        source.name: functools.partial(_core.prepare_linear_attention, words, i)
        for i, source in enumerate(_core.linear_attention_sources(words))
    }


def jobs_of_linear_gradient(*problem: int) -> Jobs:
    """The same for gradients. None: they are jax.numpy code."""
    words = list(problem)
    return {
        source.name: functools.partial(_core.prepare_linear_gradient, words, i)
        for i, source in enumerate(_core.linear_gradient_sources(words))
    }


def _jobs_of_linear_spec(spec: LinearAttentionSpec, target: str) -> Jobs:
    found = _cuda_target(target)

    def array(*shape: int, dtype: Any = spec.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    assert spec.max_qo_len is not None
    words = linear_problem(
        array(spec.max_tokens, spec.num_qk_heads, spec.head_dim_k),
        array(spec.max_tokens, spec.num_v_heads, spec.head_dim_v),
        None if spec.decay_shape is None else array(*spec.decay_shape, dtype=jnp.float32),
        array(*spec.state_shape, dtype=spec.state_dtype),
        target=found,
        max_qo_len=spec.max_qo_len,
        max_chunks=spec.max_chunks,
        delta_rule=spec.delta_rule,
        l2_norm=spec.l2_norm,
    )
    return jobs_of_linear(*words)


def _jobs_of_convolution(arch: int, dtype: int, width: int, silu: bool) -> Jobs:
    of = arch, dtype, width, silu
    name = _core.short_convolution_source(*of).name
    return {name: functools.partial(_core.prepare_short_convolution, *of)}


def linear_problem(
    q: jax.Array | jax.ShapeDtypeStruct,
    v: jax.Array | jax.ShapeDtypeStruct,
    g: jax.Array | jax.ShapeDtypeStruct | None,
    states: jax.Array | jax.ShapeDtypeStruct,
    *,
    target: tuple[int, int],
    max_qo_len: int,
    max_chunks: int,
    delta_rule: bool,
    l2_norm: bool,
) -> list[int]:
    """The words of ReadLinearProblem in csrc/select/linear.cc."""
    decay = 0 if g is None else g.ndim - 1
    heads = q.shape[1], v.shape[1], q.shape[2], v.shape[2]
    flags = int(delta_rule), int(l2_norm), int(states.dtype == jnp.bfloat16)
    of_call = q.shape[0], max_qo_len, max_chunks
    return [*target, dtype_code(q.dtype.name), *heads, decay, *flags, *of_call]


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
