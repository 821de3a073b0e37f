"""What attention and append_kv ask of their operands, in one place."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jax_attn import config
from jax_attn.plan import AttentionPlan
from jax_attn.spec import AttentionSpec


def spec_of(op: str, plan: Any) -> AttentionSpec:
    """The spec of a plan; what is no plan gets a sentence."""
    if not isinstance(plan, AttentionPlan):
        raise TypeError(
            f"{op}: plan: expected an AttentionPlan, which jax_attn.plan makes, got"
            f" {type(plan).__name__}."
        )
    return plan.spec


def check_array(op: str, name: str, array: Any, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """`array` as a jax.Array if it has this shape and dtype; else a ValueError says what to do."""
    array = jnp.asarray(array)
    if array.shape != shape or array.dtype != dtype:
        advice = ""
        if array.shape == shape:
            advice = f" Cast it: {name}.astype({dtype!r})."
        elif array.dtype == dtype and len(shape) > 1 and array.shape[1:] == shape[1:]:
            advice = f" Pad it, or make the spec with this capacity ({array.shape[0]})."
        elif sorted(array.shape) == sorted(shape):
            advice = " These are the same axes in another order: transpose it."
        raise ValueError(
            f"{op}: {name}: expected {dtype}{list(shape)} as the plan's spec says, got"
            f" {array.dtype}{list(array.shape)}.{advice}"
        )
    _refuse_parts(op, name, array)
    return array


def _refuse_parts(op: str, name: str, array: jax.Array) -> None:
    """Arrays that are known to be split over a mesh: each device would get, and compute, it all."""
    sharding = (jax.typeof(array) if isinstance(array, jax.core.Tracer) else array).sharding
    if isinstance(sharding, NamedSharding) and sharding.num_devices > 1 and any(sharding.spec):
        raise NotImplementedError(
            f"{op}: {name}: arrays split over a mesh are supported inside of jax.shard_map, with a"
            f" plan of what one device sees (examples/shard_heads.py), got {sharding.spec}."
        )


def check_values(
    op: str, name: str, v: Any, shape: tuple[int, ...] | None, dtype: str
) -> jax.Array | None:
    """`v` as check_array gives it; None where its shape is None: with mla k holds the values."""
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
    """q_scale, k_scale, v_scale, or some of them, as float32 arrays of a number a head.

    None where nothing of spec is float8_e4m3fn; else an array without elements stands for 1: XLA's
    optional operands are the last ones.
    """
    arrays: list[jax.Array | None] = []
    for name, scale in scales.items():
        of_q = name == "q_scale"
        if scale is not None and (spec.q_dtype if of_q else spec.kv_dtype) is None:
            raise ValueError(
                f"{op}: {name}: expected None unless the spec's {'q' if of_q else 'kv'}_dtype is"
                f" float8_e4m3fn, got an array of {jnp.shape(scale)}."
            )
        if scale is not None:
            num_heads = spec.num_qo_heads if of_q else spec.num_kv_heads
            scale = check_array(op, name, scale, (num_heads,), "float32")
        elif spec.is_quantized:
            scale = jnp.zeros((0,), jnp.float32)
        arrays.append(scale)
    return arrays


def as_stacked(
    op: str, spec: AttentionSpec, k_pages: Any, v_pages: Any, layer: Any
) -> tuple[jax.Array, jax.Array | None]:
    """The paged cache as [num_layers, num_pages, page_size, num_kv_heads, head_dim], no copy."""
    k_pages = jnp.asarray(k_pages)
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
    # Kernels number the rows of a layer in 32 bits; with fresh_kv one of them says which array.
    most = 2**31 if spec.fresh_kv else 2**32 - 2
    if num_pages * spec.page_size > most:
        raise NotImplementedError(
            f"{op}: k_pages: up to {most} token slots a layer are supported with"
            f" fresh_kv={spec.fresh_kv}, got {num_pages * spec.page_size}."
        )
    if layer is None:
        k_pages, v_pages = k_pages[None], None if v_pages is None else v_pages[None]
    return k_pages, v_pages


def layer_operand(op: str, layer: Any, num_layers: int) -> jax.Array:
    """The layer index as an i32 scalar; one known now is checked now."""
    if layer is None:
        return jnp.int32(0)
    array = layer if isinstance(layer, jax.Array) else np.asarray(layer)
    if array.shape or array.dtype.kind not in "iu":
        raise ValueError(
            f"{op}: layer: expected an integer scalar, got {array.dtype}{list(array.shape)}."
        )
    if not isinstance(layer, jax.core.Tracer) and not 0 <= int(layer) < num_layers:
        raise ValueError(f"{op}: layer: expected an index in [0, {num_layers}), got {layer}.")
    return jnp.asarray(layer, jnp.int32)


def check_data(
    op: str, plan: AttentionPlan, layer: jax.Array, pages_shape: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """The plan's buffer and the layer, as operands of a kernel.

    JAX_ATTN_CHECK=1: their data are looked at, wherever they live, before the kernel has them.
    """
    buffer = jnp.asarray(plan.buffer)
    if not config.check:
        return buffer, layer
    num_layers, num_pages = pages_shape[:2] if plan.spec.is_paged else (1, -1)

    def check(buffer: Any, layer: Any) -> np.ndarray:
        try:
            plan.spec.problem.check_plan(np.ascontiguousarray(buffer), num_pages)
        except ValueError as error:
            raise ValueError(f"{op}: {error}") from None
        if not 0 <= int(layer) < num_layers:
            raise ValueError(f"{op}: layer: expected an index in [0, {num_layers}), got {layer}.")
        return np.asarray(layer, np.int32)

    if not any(isinstance(x, jax.core.Tracer) for x in (buffer, layer)):
        check(buffer, layer)
        return buffer, layer
    # The kernel has the layer from the check, so it waits for that.
    shape = jax.ShapeDtypeStruct((), jnp.int32)
    return buffer, jax.pure_callback(check, shape, buffer, layer, vmap_method="sequential")
