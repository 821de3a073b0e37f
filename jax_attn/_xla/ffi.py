"""The boundary to csrc/: registration of targets, and all calls of jax.ffi.ffi_call."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib.version
import numpy as np

from jax_attn import _core, _environment
from jax_attn._spec.spec import AttentionSpec, dtype_code
from jax_attn._variant.gradient import gradient_of
from jax_attn._xla import jit
from jax_attn._xla.attention_operands import AttentionOperands, BackwardOperands
from jax_attn._xla.transforms import refusing, varying_alike
from jax_attn.masks import BlockMap

CPU = (0, 0)  # a target without a GPU


def _runtime_ffi_version() -> tuple[int, int]:
    header = pathlib.Path(jaxlib.__file__).parent / "include/xla/ffi/api/c_api.h"
    found = dict(re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", header.read_text()))
    return int(found["MAJOR"]), int(found["MINOR"])


def _register() -> None:
    """Register every FFI target.

    Raises ImportError on a version mismatch: a target that XLA rejects would crash the backend.
    """
    runtime = _runtime_ffi_version()
    if _core.ffi_api_version > runtime:
        raise ImportError(
            f"jax_attn was built with XLA FFI API {_core.ffi_api_version}, jaxlib"
            f" {jaxlib.version.__version__} has {runtime}: rebuild jax_attn, or upgrade jaxlib."
        )
    for name, platform, stages in _core.registrations():
        jax.ffi.register_ffi_target(name, stages, platform=platform)


_register()
if _environment.cpu_isa:
    _core.set_cpu_isa(_environment.cpu_isa)


def _call(
    target: str,
    results: Sequence[jax.ShapeDtypeStruct],
    operands: Sequence[jax.Array],
    *,
    aliases: dict[int, int] | None = None,
    vmap_method: str | None = None,
    **attributes: Any,
) -> tuple[jax.Array, ...]:
    """The results of a custom call.

    In a shard_map they vary over the axes over which any operand varies, which jax.ffi does not
    see: without that JAX would take what devices compute for the same on all of them.

    aliases: number of an operand -> number of the result that is written in its memory.
    vmap_method: as jax.ffi.ffi_call has it.
    """
    operands = varying_alike(tuple(operands))
    call = jax.ffi.ffi_call(
        target, tuple(results), input_output_aliases=aliases, vmap_method=vmap_method
    )
    found, _ = varying_alike((tuple(call(*operands, **attributes)), operands))
    return found


def plan(
    qo_indptr: jax.Array,
    kv_lens: jax.Array,
    kv_indptr: jax.Array,
    page_indices: jax.Array,
    q_offsets: jax.Array,
    levels: tuple[jax.Array, jax.Array] | None,
    block_map: BlockMap | None,
    spec: AttentionSpec,
) -> jax.Array:
    """Plan inside a compiled function.

    levels: request_indptr [num_levels, num_prefixes + 1], prefix_lens [num_levels, num_prefixes].
    """
    num_levels, num_prefixes = (0, 0) if levels is None else levels[1].shape
    is_general = num_levels > 0 or spec.schedule == "auto" or spec.max_steps is not None
    blocks = {"q_block": 0, "kv_block": 0}
    num_columns = 0
    if block_map is not None:
        blocks = {name: getattr(block_map, name) for name in blocks}
        num_columns = block_map.classes.shape[1]
    scratch_words = spec.problem.plan_scratch_words(
        num_levels, num_prefixes, num_columns, blocks["kv_block"]
    )
    jit.compile_ahead("plan_general" if is_general else "plan", spec)
    results = (
        jax.ShapeDtypeStruct((spec.plan_words,), jnp.int32),
        jax.ShapeDtypeStruct((scratch_words,), jnp.int32),
    )
    if block_map is not None and levels is None:  # only the last operands may be left out
        levels = jnp.zeros((0, 0), np.int32), jnp.zeros((0, 0), np.int32)
    operands = (qo_indptr, kv_lens, kv_indptr, page_indices, q_offsets, *(levels or ()))
    if block_map is not None:
        operands += (block_map.classes,)
    attributes = {name: np.int64(tokens) for name, tokens in blocks.items()}

    def plan_batch(operands: tuple[jax.Array, ...], has_levels: bool) -> Any:
        numbers: dict[str, Any] = {
            "problem": spec.problem_words,
            "levels": has_levels,
            **attributes,
        }
        return _call("jax_attn_plan", results, operands, **numbers)

    buffer, _ = refusing("plan", plan_batch, vmap="make one plan for all, or one a step of a scan")(
        operands, num_levels > 0
    )
    return buffer


def attention(
    operands: AttentionOperands[jax.Array], spec: AttentionSpec, *, record_times: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """o, lse and the workspace.

    With record_times the workspace ends with the times of the items: [max_items, 2], int64
    nanoseconds, as int32 words.
    """
    problem_words, workspace_words = spec.problem_words, spec.workspace_words
    if record_times:
        config_words = spec.kernel_config | {"record_times": 1}
        recording = _core.Problem(
            spec.problem.spec, config_words, spec.program_words, spec.transform_words
        )
        problem_words = np.asarray(recording.words, np.int64)
        workspace_words = recording.workspace_words
    jit.compile_ahead("attention", spec)
    results = (
        jax.ShapeDtypeStruct(spec.o_shape, spec.dtype),
        jax.ShapeDtypeStruct(spec.o_shape[:2], jnp.float32),
        jax.ShapeDtypeStruct((workspace_words,), jnp.int32),
    )
    # Only the last operands of a call may be left out; others become an array without elements.
    sinks, v = operands.sinks, operands.k if operands.v is None else operands.v
    if sinks is None and (operands.q_scale is not None or operands.variant):
        sinks = jnp.zeros((0,), jnp.float32)
    arrays = jax.tree.leaves(dataclasses.replace(operands, v=v, sinks=sinks))
    numbers: dict[str, Any] = {"problem": problem_words, "poison": _environment.poison}
    o, lse, workspace = _call("jax_attn_attention", results, arrays, **numbers)
    return o, lse, workspace


def backward(
    operands: BackwardOperands[jax.Array], spec: AttentionSpec, *, wanted: tuple[int, ...] = ()
) -> tuple[jax.Array, ...]:
    """d_q, d_k, d_v, a workspace, and gradients of the variant operands `wanted` in their dtypes.

    On CPUs the workspace has the f32 sums of gradients that are not f32.
    """
    q, k, v = operands.q, operands.k, operands.v
    words, summed = ((), ()) if spec.variant is None else gradient_of(spec.variant, wanted)
    jit.compile_ahead("backward", spec, words)
    num_words = spec.problem.backward_words(k.shape[-4] if spec.is_paged else 1)
    described = (
        *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v)),
        jax.ShapeDtypeStruct((num_words,), jnp.float32),
        *(_sums_of(operands.variant[i], q, spec) for i in summed),
    )
    results = _call(
        "jax_attn_backward",
        described,
        jax.tree.leaves(operands),
        problem=spec.problem_words,
        gradient=np.asarray(words, np.int64),
        poison=_environment.poison,
    )
    sums = dict(zip(summed, (_whole(x, spec) for x in results[4:]), strict=True))
    like = [operands.variant[i] for i in wanted]
    of_operands = (
        sums.get(i, jnp.zeros(x.shape)).astype(x.dtype) for i, x in zip(wanted, like, strict=True)
    )
    return *results[:4], *of_operands


def _sums_of(operand: jax.Array, q: jax.Array, spec: AttentionSpec) -> jax.ShapeDtypeStruct:
    """The array in which a kernel sums the gradient of a variant operand.

    On CPUs a small operand has one sum per KV head, so that heads run in parallel. On CUDA each
    element has two words, which first hold a 64-bit sum.
    """
    if spec.target != "cpu":
        return jax.ShapeDtypeStruct((*operand.shape, 2), jnp.float32)
    num_copies = spec.num_kv_heads if operand.size * spec.num_kv_heads <= q.size else 1
    return jax.ShapeDtypeStruct((num_copies, *operand.shape), jnp.float32)


def _whole(sums: jax.Array, spec: AttentionSpec) -> jax.Array:
    """The gradient from the sums in the array of _sums_of."""
    return sums.sum(axis=0) if spec.target == "cpu" else sums[..., 0]


def append_kv(
    k_pages: jax.Array,
    v_pages: jax.Array | None,
    k_new: jax.Array,
    v_new: jax.Array | None,
    plan_buffer: jax.Array,
    layer: jax.Array,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
    *,
    spec: AttentionSpec,
) -> tuple[jax.Array, jax.Array | None]:
    jit.compile_ahead("append", spec)
    given = (k_pages,) if v_pages is None else (k_pages, v_pages)
    results = [jax.ShapeDtypeStruct(pages.shape, pages.dtype) for pages in given]
    aliases = {0: 0} if v_pages is None else {0: 0, 4: 1}
    values = () if v_pages is None else (v_pages, v_new)
    scales = [a for a in (k_scale, v_scale) if a is not None]
    operands = (k_pages, k_new, plan_buffer, layer, *values, *scales)
    numbers: dict[str, Any] = {"problem": spec.problem_words}
    k_out, *v_out = _call("jax_attn_append_kv", results, operands, aliases=aliases, **numbers)
    return k_out, v_out[0] if v_out else None


def append_rotated(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    plan_buffer: jax.Array,
    layer: jax.Array,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
    *,
    spec: AttentionSpec,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    jit.compile_ahead("append_rotated", spec)
    results = (
        jax.ShapeDtypeStruct(spec.q_shape, spec.dtype),
        jax.ShapeDtypeStruct(k_pages.shape, k_pages.dtype),
        jax.ShapeDtypeStruct(v_pages.shape, v_pages.dtype),
    )
    scales = [a for a in (k_scale, v_scale) if a is not None]
    operands = (qkv, cos, sin, k_pages, v_pages, plan_buffer, layer, *scales)
    aliases = {3: 1, 4: 2}
    numbers: dict[str, Any] = {"problem": spec.problem_words}
    q, k_out, v_out = _call(
        "jax_attn_append_rotated", results, operands, aliases=aliases, **numbers
    )
    return q, k_out, v_out


def all_reduce(operands: tuple[jax.Array, ...], **attributes: Any) -> tuple[jax.Array, ...]:
    """The sum over a group of GPUs, and normed rows and their scales
    (csrc/cuda/any/all_reduce_params.h).

    operands: x [num_rows, columns], and residual and weight if attributes say so, which are those
    of csrc/ffi/all_reduce.cc.
    """
    x = operands[0]
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    results = [like]
    if attributes["quantizes"]:
        results.append(jax.ShapeDtypeStruct(x.shape, jnp.float8_e4m3fn))
        results.append(jax.ShapeDtypeStruct(x.shape[:1], jnp.float32))
    elif attributes["norm"]:
        results.append(like)
    return _call(
        "jax_attn_all_reduce",
        results,
        operands,
        arch=np.int64(0),
        dtype=np.int64(dtype_code(x.dtype)),
        poison=_environment.poison,
        **attributes,
    )


def product(
    x: jax.Array,
    panels: jax.Array,
    columns: int,
    dtype: jax.typing.DTypeLike,
    bias: jax.Array | None = None,
    activation: int = 0,
) -> jax.Array:
    """The matmul of x, [n, in], with a matrix in panels (csrc/cpu/kernels.h), on CPUs only.

    bias: [columns] of x's dtype. activation: number of csrc/cpu/kernels.h, of product and bias.

    Returns [n, columns] of `dtype`.
    """
    results = [jax.ShapeDtypeStruct((len(x), columns), dtype)]
    operands = x, panels, jnp.zeros(0, x.dtype) if bias is None else bias
    target, number = "jax_attn_product", np.int64(activation)
    return _call(target, results, operands, activation=number, poison=_environment.poison)[0]


def grouped_panels(
    x: jax.Array,
    panels: jax.Array,
    group_rows: jax.Array,
    columns: int,
    dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """`product` of each row with the matrix of its group, on CPUs only.

    x: [n, in], sorted by group. panels: [groups, ...]. group_rows: [groups] i32, sum at most n.

    Returns [n, columns] of `dtype`; zeros in rows beyond the sum.
    """
    results = [jax.ShapeDtypeStruct((len(x), columns), dtype)]
    operands = x, panels, group_rows
    return _call("jax_attn_grouped_panels", results, operands, poison=_environment.poison)[0]


def quantized_groups(
    x: jax.Array,
    codes: jax.Array,
    scales: jax.Array,
    zeros: jax.Array,
    group_rows: jax.Array,
    *,
    format: int,
    group_size: int,
) -> jax.Array:
    """`grouped_panels` with quantized matrices (csrc/cpu/quantized_groups.h), on CPUs only.

    x: [n, in] f32. codes: [groups, ..., out], i8, or u8 of `format`. scales: f32, or exponents u8.
    zeros: as scales, or an array without elements. format: WeightFormat.

    Returns [n, out] f32; zeros in rows beyond those of all groups.
    """
    results = [jax.ShapeDtypeStruct((len(x), codes.shape[2]), jnp.float32)]
    operands = x, codes, scales, zeros, group_rows
    return _call(
        "jax_attn_quantized_groups",
        results,
        operands,
        format=np.int64(format),
        group_size=np.int64(group_size),
        poison=_environment.poison,
    )[0]


def linear_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array | None,
    beta: jax.Array | None,
    states: jax.Array,
    plan_buffer: jax.Array,
    layer: jax.Array,
    *,
    chunks_begin: int,
    max_chunks: int,
    max_qo_len: int,
    delta_rule: bool,
    l2_norm: bool,
    scale: float,
    target: tuple[int, int],
) -> tuple[jax.Array, jax.Array]:
    """o and the states, in the memory of `states` (csrc/params.h, LinearAttentionParams).

    chunks_begin: the word of the plan's buffer where its max_chunks chunks begin. max_qo_len: most
    tokens of a request. target: as parse_target has it; (0, 0): not known yet. Heads and dims are
    those of the arrays; the other arguments are as in ja.linear_attention.
    """
    words = jit.linear_problem(
        q, v, g, states,
        target=target, max_qo_len=max_qo_len, max_chunks=max_chunks, delta_rule=delta_rule,
        l2_norm=l2_norm,
    )  # fmt: skip
    jit.compile_linear_ahead(words)
    num_words = _core.linear_attention_workspace_words(words) if target != CPU else 0
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (v, states)]
    results += [jax.ShapeDtypeStruct((num_words,), jnp.int32)]
    o, states, _ = _call(
        "jax_attn_linear_attention",
        results,
        (q, k, v, *_present(g, beta), states, plan_buffer, layer),
        aliases={5: 1},
        problem=np.array(words, np.int64),
        scale=np.float32(scale),
        chunks_begin=np.int64(chunks_begin),
        poison=_environment.poison,
    )
    return o, states


def linear_attention_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array | None,
    beta: jax.Array | None,
    states: jax.Array,
    plan_buffer: jax.Array,
    layer: jax.Array,
    d_o: jax.Array,
    d_states: jax.Array,
    *,
    chunks_begin: int,
    max_chunks: int,
    max_qo_len: int,
    delta_rule: bool,
    l2_norm: bool,
    scale: float,
    target: tuple[int, int],
) -> tuple[jax.Array, ...]:
    """Gradients of the first six arguments from those of the results.

    That of an absent g or beta has no elements. That of states is in the memory of `d_states`, the
    gradient of the states after the call. See linear_attention. For CUDA: only where
    `_core.linear_gradient_sources` has kernels.
    """
    operands = (q, k, v, *_present(g, beta), states, plan_buffer, layer, d_o, d_states)
    words = jit.linear_problem(
        q, v, g, states,
        target=target, max_qo_len=max_qo_len, max_chunks=max_chunks, delta_rule=delta_rule,
        l2_norm=l2_norm,
    )  # fmt: skip
    jit.compile_linear_gradient_ahead(words)
    num_words = _core.linear_gradient_workspace_words(words) if target != CPU else 0
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands[:6]]
    results += [jax.ShapeDtypeStruct((num_words,), jnp.int32)]
    *gradients, _ = _call(
        "jax_attn_linear_attention_backward",
        results,
        operands,
        aliases={9: 5},
        problem=np.array(words, np.int64),
        scale=np.float32(scale),
        chunks_begin=np.int64(chunks_begin),
        poison=_environment.poison,
    )
    return tuple(gradients)


def _present(*arrays: jax.Array | None) -> list[jax.Array]:
    """Arrays without elements in place of absent ones."""
    return [jnp.zeros((0,), jnp.float32) if x is None else x for x in arrays]


def lora(
    x: jax.Array,
    y: jax.Array,
    adapters: jax.Array,
    a: jax.Array,
    b: jax.Array,
    ranks: jax.Array,
    ends: Sequence[int],
) -> jax.Array:
    """y plus the low-rank products of each row's adapter (csrc/cpu/lora.h), on CPUs only.

    x: [n, in]. y: [n, out]. adapters: [n] i32. a: [adapters, parts, rank, in]. b: [adapters, rank,
    out]. ranks: [adapters, parts] i32. ends: of the parts' columns.

    Returns [n, out], in y's memory.
    """
    results = [jax.ShapeDtypeStruct(y.shape, y.dtype)]
    operands = (x, y, adapters, a, b, ranks)
    words = np.array(ends, np.int64)
    return _call("jax_attn_lora", results, operands, aliases={1: 0}, ends=words)[0]


def short_convolution(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    states: jax.Array,
    plan_buffer: jax.Array,
    layer: jax.Array,
    *,
    chunks_begin: int,
    max_qo_len: int,
    silu: bool,
    arch: int,
) -> tuple[jax.Array, jax.Array]:
    """y and the states, in the memory of `states` (csrc/params.h, ShortConvolutionParams).

    chunks_begin, max_qo_len: as in linear_attention. arch: 0 on CPUs, or if not known yet. The
    other arguments are as in ja.short_convolution.
    """
    dtype, width = dtype_code(x.dtype.name), weight.shape[1]
    jit.compile_convolution_ahead(arch, dtype, width, silu)
    bias = jnp.zeros(len(weight)) if bias is None else bias
    results = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x, states)]
    y, states = _call(
        "jax_attn_short_convolution",
        results,
        (x, weight.astype(jnp.float32), bias.astype(jnp.float32), states, plan_buffer, layer),
        aliases={3: 1},
        vmap_method="sequential",
        arch=np.int64(arch),
        dtype=np.int64(dtype),
        width=np.int64(width),
        silu=silu,
        chunks_begin=np.int64(chunks_begin),
        max_qo_len=np.int64(max_qo_len),
        poison=_environment.poison,
    )
    return y, states


def quantized_product(
    x: jax.Array,
    codes: jax.Array,
    scales: jax.Array,
    zeros: jax.Array,
    *,
    num_splits: int,
    dtype: jax.typing.DTypeLike,
    x_dtype: int,
    **attributes: int,
) -> jax.Array:
    """The matmul of x, [n, in], with a quantized matrix, on CUDA only.

    The operands are described by QuantizedProductParams in csrc/params.h.

    zeros: an array without elements if there are none.
    attributes: arch, format, group_size, tile_rows, tile_columns, main_loop.

    Returns [num_splits, n, out] of `dtype` (x's or f32): partial sums over parts of the depth.
    """
    results = [jax.ShapeDtypeStruct((num_splits, len(x), codes.shape[1]), dtype)]
    numbers: dict[str, Any] = {name: np.int64(value) for name, value in attributes.items()}
    numbers |= {"dtype": np.int64(x_dtype)}
    operands = (x, codes, scales, zeros)
    return _call(
        "jax_attn_quantized_product", results, operands, **numbers, poison=_environment.poison
    )[0]


def grouped_product(
    x: jax.Array,
    weights: jax.Array,
    group_sizes: jax.Array,
    *,
    transposed: bool,
    **attributes: int,
) -> jax.Array:
    """The matmul of each row of x, [n, in], with the matrix of its group, on Hopper only: [n, out].

    The operands are described by GroupedProductParams in csrc/cuda/sm90/grouped_product_params.h.

    attributes: dtype, tile_rows, tile_columns.
    """
    columns = weights.shape[1 if transposed else 2]
    results = [jax.ShapeDtypeStruct((len(x), columns), x.dtype)]
    numbers: dict[str, Any] = {name: np.int64(value) for name, value in attributes.items()}
    numbers |= {"transposed": transposed, "poison": _environment.poison}
    return _call("jax_attn_grouped_product", results, (x, weights, group_sizes), **numbers)[0]


def merge_states(
    o_parts: jax.Array, lse_parts: jax.Array, arch: int, dtype: int
) -> tuple[jax.Array, jax.Array]:
    results = (
        jax.ShapeDtypeStruct(o_parts.shape[1:], o_parts.dtype),
        jax.ShapeDtypeStruct(lse_parts.shape[1:], jnp.float32),
    )
    numbers: dict[str, Any] = {"arch": arch, "dtype": dtype, "poison": _environment.poison}
    o, lse = _call("jax_attn_merge_states", results, (o_parts, lse_parts), **numbers)
    return o, lse
