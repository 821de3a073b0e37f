"""Checks of the operands of attention and append_kv.

Each function takes `op`, the name of the operation for error messages.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn import _environment
from jax_attn._plan.plan import AttentionPlan, traced_int32
from jax_attn._plan.records import HEADER_FIELDS
from jax_attn._spec.spec import AttentionSpec
from jax_attn._xla.transforms import HeadSplit, Operand, has_mesh, operand_of

_P = ParamSpec("_P")
_R = TypeVar("_R")


def with_default_promotion(call: Callable[_P, _R]) -> Callable[_P, _R]:
    """Traces a call that is jax.numpy code with JAX's defaults, whatever modes the caller has set.

    Such code broadcasts on purpose, and has the types that it says.
    """

    @functools.wraps(call)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        ranks, types = jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard")
        with ranks, types, jax.enable_x64(False):
            return call(*args, **kwargs)

    return run


def spec_of(op: str, plan: Any) -> AttentionSpec:
    """The spec of a plan. Raises TypeError if `plan` is not a plan."""
    if not isinstance(plan, AttentionPlan) or not isinstance(plan.spec, AttentionSpec):
        raise TypeError(
            f"{op}: plan: expected an AttentionPlan, which jax_attn.plan makes, got"
            f" {type(plan).__name__}"
            + (f" of {type(plan.spec).__name__}." if isinstance(plan, AttentionPlan) else ".")
        )
    return plan.spec


def as_array(op: str, name: str, value: Any) -> jax.Array:
    """`value` as a jax.Array. Raises ValueError if it is not an array."""
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{op}: {name}: expected an array, got {type(value).__name__} ({error})."
        ) from None


def as_known(op: str, name: str, value: Any) -> jax.Array:
    """`value` as a jax.Array.

    Raises NotImplementedError for the symbolic dimensions of jax.export, for an array whose sizes
    are those of a plan.
    """
    array = as_array(op, name, value)
    if not has_known_shape(array):
        raise NotImplementedError(
            f"{op}: {name}: sizes that are known while tracing are supported, got symbolic ones,"
            f" {array.dtype}{_shown(array.shape)}; export a function for each size, or for the"
            " largest one, with lengths as arguments."
        )
    return array


def has_known_shape(array: Any) -> bool:
    """False for an array with symbolic dimensions of jax.export."""
    return all(isinstance(n, int) for n in array.shape)


def _shown(shape: Any) -> str:
    return f"[{', '.join(map(str, shape))}]"


def check_array(op: str, name: str, array: Any, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """`array` as a jax.Array of this shape and dtype.

    Raises ValueError, with advice, for another shape or dtype.
    """
    array = as_array(op, name, array)
    if array.shape != shape or array.dtype != dtype:
        advice = ""
        if not has_known_shape(array):
            advice = " Its capacities are fixed, so export with these sizes."
        elif array.shape == shape:
            advice = f" Cast it: {name}.astype({dtype!r})."
        elif array.dtype == dtype and len(shape) > 1 and array.shape[1:] == shape[1:]:
            advice = f" Pad it, or make the spec with this capacity ({array.shape[0]})."
        elif array.dtype == dtype and array.ndim == len(shape) + 1:
            advice = " There is no batch axis: the tokens of all requests are packed."
        elif sorted(array.shape) == sorted(shape):
            advice = " These are the same axes in another order: transpose it."
        raise ValueError(
            f"{op}: {name}: expected {dtype}{list(shape)} as the plan's spec says, got"
            f" {array.dtype}{_shown(array.shape)}.{advice}"
        )
    return array


def pad_heads(op: str, name: str, array: Any, head_dim: int, padded: int) -> Any:
    """`array`, whose last axis is head_dim, with zeros up to `padded`. None stays None.

    Raises ValueError for another last axis.
    """
    if array is None:
        return None
    array = as_array(op, name, array)
    if array.shape[-1:] != (head_dim,):
        raise ValueError(
            f"{op}: {name}: expected rows of {head_dim} elements as the plan's spec says, got"
            f" {array.dtype}{_shown(array.shape)}."
        )
    return jnp.pad(array, ((0, 0),) * (array.ndim - 1) + ((0, padded - head_dim),))


def count_parts(array: Any, heads: int) -> int:
    """Number of parts into which a mesh splits the heads, each with `heads` heads. 1: no split.

    array: [tokens, heads, ...], the first operand.
    heads: the spec's number of heads. An array that does not fit counts as 1 part; check_array then
        refuses it.
    """
    shape = jnp.shape(array)
    if len(shape) < 2 or shape[1] % heads or not has_mesh(array):
        return 1
    return max(1, shape[1] // heads)


def of_parts(spec: AttentionSpec, num_parts: int) -> AttentionSpec:
    """The spec with the heads of all parts, used only for shapes of arrays."""
    if num_parts == 1:
        return spec
    whole = copy.copy(spec)
    object.__setattr__(whole, "num_qo_heads", spec.num_qo_heads * num_parts)
    if not spec.mla:
        object.__setattr__(whole, "num_kv_heads", spec.num_kv_heads * num_parts)
    return whole


def split_of(
    spec: AttentionSpec,
    num_parts: int,
    operands: dict[str, tuple[Any, int | None, int]],
    results: dict[str, tuple[int, int, int]],
) -> HeadSplit:
    """How a call's arrays are split by head.

    operands: name -> (array or None, head axis or None, heads of one device). The axis may be
        negative.
    results: name -> (ndim, head axis, heads of one device).
    """
    described = (
        None if array is None else operand_of(spec, name, array, head_axis, heads)
        for name, (array, head_axis, heads) in operands.items()
    )
    return HeadSplit(
        spec,
        tuple(described),
        tuple(Operand(name, *about) for name, about in results.items()),
        num_parts,
    )


def check_values(
    op: str, name: str, v: Any, shape: tuple[int, ...] | None, dtype: str
) -> jax.Array | None:
    """`v`, checked as by check_array. With shape None (mla: v is columns of k), v must be None.

    Raises ValueError also if v is None but required, or given but not allowed.
    """
    if shape is None:
        if v is not None:
            raise ValueError(
                f"{op}: {name}: expected None with mla=True, whose values are columns of k, got"
                f" {jnp.shape(v)}."
            )
        return None
    if v is None:
        raise ValueError(f"{op}: {name}: expected {dtype}{list(shape)}, got None.")
    return check_array(op, name, v, shape, dtype)


def check_scales(op: str, spec: AttentionSpec, scales: dict[str, Any]) -> list[jax.Array | None]:
    """q_scale, k_scale and v_scale, or some of them, as FFI operands.

    scales: name -> [num_qo_heads] for q_scale, [num_kv_heads] for the others, f32, or None. With
        mla v_scale is None: values are columns of k, so k_scale applies to them.

    Returns the arrays in the same order. All are None (no operands) if the spec's formats have no
    scales. Otherwise None becomes an array without elements, which stands for 1, because only the
    last operands of an XLA FFI call may be left out.

    Raises ValueError for another shape or dtype, or for a scale of an operand without scales.
    """
    arrays: list[jax.Array | None] = []
    for name, scale in scales.items():
        of_q = name == "q_scale"
        if scale is not None and name == "v_scale" and spec.mla:
            raise ValueError(
                f"{op}: v_scale: expected None with mla=True, whose values are columns of k, got an"
                f" array of {jnp.shape(scale)}; k_scale is that of both."
            )
        if scale is not None and not (spec.q_dtype if of_q else spec.has_head_scales):
            which = "q_dtype is" if of_q else "kv_dtype is nvfp4, float8_e5m2 or"
            raise ValueError(
                f"{op}: {name}: expected None unless the spec's {which} float8_e4m3fn, got an array"
                f" of {jnp.shape(scale)}."
            )
        if scale is not None:
            num_heads = spec.num_qo_heads if of_q else spec.num_kv_heads
            scale = check_array(op, name, scale, (num_heads,), "float32")
        elif spec.has_head_scales:
            scale = jnp.zeros((0,), jnp.float32)
        arrays.append(scale)
    return arrays


def check_variant_operands(
    op: str, spec: AttentionSpec, operands: Mapping[str, Any] | None
) -> list[jax.Array]:
    """The operands of the spec's variant, in its order.

    Raises ValueError for wrong names, dtypes or numbers of axes, and for an axis of length 0.
    """
    operands = {} if operands is None else operands
    variant = spec.variant
    names = () if variant is None else variant.names
    if not isinstance(operands, Mapping) or set(operands) != set(names):
        got = list(operands) if isinstance(operands, Mapping) else type(operands).__name__
        raise ValueError(
            f"{op}: variant_operands: expected {list(names) or 'none'} as the plan's variant says,"
            f" got {got}."
        )
    if variant is None:
        return []
    arrays = []
    for name, (dtype, rank) in zip(names, variant.operand_types, strict=True):
        array = as_array(op, name, operands[name])
        if array.dtype != dtype or array.ndim != rank or not array.size:
            advice = f" Cast it: {name}.astype({dtype!r})." if array.dtype != dtype else ""
            raise ValueError(
                f"{op}: variant_operands: {name}: expected {dtype} with {rank} axes, none of length"
                f" 0, as the plan's variant says, got {array.dtype}{list(array.shape)}.{advice}"
            )
        arrays.append(check_array(op, name, array, array.shape, dtype))
    return arrays


def check_cache(
    op: str, spec: AttentionSpec, k_pages: Any, v_pages: Any, layer: Any
) -> tuple[jax.Array, jax.Array | None, int]:
    """The paged cache, stacked or not, and its number of layers.

    Raises ValueError for a wrong rank, shape or dtype; NotImplementedError if a layer has more
    token slots than 32 bits can number.
    """
    k_pages = as_array(op, "k_pages", k_pages)
    rank = 4 if layer is None else 5
    if k_pages.ndim != rank:
        raise ValueError(
            f"{op}: k_pages: expected [num_pages, page_size, num_kv_heads, head_dim_qk]"
            f" {'with layer=None' if layer is None else 'with a leading [num_layers]'}, got rank"
            f" {k_pages.ndim}; pass layer for a stacked cache, and only for one."
        )
    num_pages = k_pages.shape[-4] if spec.num_pages is None else spec.num_pages
    assert spec.page_size is not None
    k_shape, v_shape = spec.kv_shapes(*k_pages.shape[:-4], num_pages, spec.page_size)
    k_pages = check_array(op, "k_pages", k_pages, k_shape, spec.dtype_of_kv)
    v_pages = check_values(op, "v_pages", v_pages, v_shape, spec.dtype_of_kv)
    # Kernels number the rows of a layer in 32 bits; with fresh_kv one bit selects the array.
    most = 2**31 if spec.fresh_kv else 2**32 - 2
    if spec.variant is not None and spec.variant.reads_kv_rows:
        most = 2**31 - 1
    # The kernel checks a pool whose number of pages is symbolic.
    if isinstance(num_pages, int) and num_pages * spec.page_size > most:
        raise NotImplementedError(
            f"{op}: k_pages: up to {most} token slots a layer are supported with"
            f" fresh_kv={spec.fresh_kv}, got {num_pages * spec.page_size}."
        )
    return k_pages, v_pages, 1 if layer is None else k_pages.shape[0]


def layer_operand(op: str, layer: Any, num_layers: int) -> jax.Array:
    """The layer index as an i32 scalar; 0 for None.

    Raises ValueError if it is not an integer, or is out of range (not checked if traced).
    """
    if layer is None:
        return jnp.int32(0)
    array = layer if isinstance(layer, jax.Array) else np.asarray(layer)
    if array.shape or array.dtype.kind not in "iu":
        raise ValueError(
            f"{op}: layer: expected an integer scalar, got {array.dtype}{list(array.shape)}."
        )
    most = num_layers if isinstance(num_layers, int) else np.inf  # symbolic: not known
    if not isinstance(layer, jax.core.Tracer) and not 0 <= int(layer) < most:
        raise ValueError(f"{op}: layer: expected an index in [0, {num_layers}), got {layer}.")
    is_traced = isinstance(layer, jax.core.Tracer)
    return traced_int32(array) if is_traced else jnp.asarray(array, jnp.int32)


def check_data(
    op: str,
    plan: AttentionPlan,
    layer: jax.Array,
    k: jax.Array,
    num_layers: int,
    *,
    writes: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The plan's buffer and the layer, as operands of a kernel.

    With JAX_ATTN_CHECK=1 their contents are checked on any device before the kernel runs.

    writes: the kernel writes the query tokens into their slots.

    Raises ValueError (inside jit in the form JAX reports from a callback) for an invalid plan
    buffer, page ids beyond the pool, a layer out of range, or query tokens without a slot of their
    own.
    """
    shape, dtype = (getattr(plan.buffer, name, None) for name in ("shape", "dtype"))
    if shape != (plan.spec.plan_words,) or dtype != np.int32:
        raise ValueError(
            f"{op}: plan: expected a buffer of int32[{plan.spec.plan_words}] as its spec says, got"
            f" {dtype}{list(shape or ())}."
        )
    buffer = jnp.asarray(plan.buffer)
    if not _environment.check:
        return buffer, layer
    num_pages = k.shape[-4] if plan.spec.is_paged else -1

    def check(buffer: np.ndarray, layer: int) -> None:
        try:
            plan.spec.problem.check_plan(buffer, num_pages)
        except ValueError as error:
            raise ValueError(f"{op}: {error}") from None
        check_layer(op, layer, num_layers)
        if writes:
            _check_slots(op, plan.spec, buffer)

    return buffer, checked_layer(check, buffer, layer)


def check_layer(op: str, layer: int, num_layers: int) -> None:
    if not 0 <= layer < num_layers:
        raise ValueError(f"{op}: layer: expected an index in [0, {num_layers}), got {layer}.")


def checked_layer(
    check: Callable[[np.ndarray, int], None], buffer: jax.Array, layer: jax.Array
) -> jax.Array:
    """The layer, after check(buffer, layer): a kernel that takes it waits for the check."""

    def run(buffer: Any, layer: Any) -> np.ndarray:
        check(np.ascontiguousarray(buffer), int(layer))
        return np.asarray(layer, np.int32)

    if not any(isinstance(x, jax.core.Tracer) for x in (buffer, layer)):
        run(buffer, layer)
        return layer
    shape = jax.ShapeDtypeStruct((), jnp.int32)
    found = jax.pure_callback(run, shape, buffer, layer, vmap_method="sequential")
    assert isinstance(found, jax.Array)
    return found


def _check_slots(op: str, spec: AttentionSpec, buffer: np.ndarray) -> None:
    """Raise ValueError if a query token has no slot, or the slot of another one."""
    assert spec.page_size is not None
    begin = spec.layout["header"] + HEADER_FIELDS.index("batch_size")
    batch_size = int(buffer[begin])

    def section(name: str, num_words: int) -> np.ndarray:
        return buffer[spec.layout[name] :][:num_words]

    qo_indptr, kv_lens = section("qo_indptr", batch_size + 1), section("kv_lens", batch_size)
    qo_lens = np.diff(qo_indptr)
    request = np.repeat(np.arange(batch_size), qo_lens)
    position = kv_lens[request] - qo_indptr[request + 1] + np.arange(len(request))
    if (position < 0).any():
        r = request[position.argmin()]
        raise ValueError(
            f"{op}: plan: kv_lens[{r}]: expected at least {qo_lens[r]}, the number of query tokens"
            f" of the request, got {kv_lens[r]}; kv_lens count the new tokens, too: add them."
        )
    entry = section("kv_indptr", batch_size)[request] + position // spec.page_size
    page, slot = buffer[spec.layout["page_indices"] + entry], position % spec.page_size
    order = np.lexsort((slot, page))
    same = (np.diff(page[order]) == 0) & (np.diff(slot[order]) == 0)
    if same.any():
        one, other = sorted(order[same.argmax() :][:2])
        raise ValueError(
            f"{op}: plan: page_indices: expected a slot of its own for each query token, got slot"
            f" {slot[one]} of page {page[one]} for tokens of requests {request[one]} and"
            f" {request[other]}; give one of them a copy of the page."
        )
