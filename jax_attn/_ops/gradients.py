"""The backward pass of attention over a plan."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_attn._spec.spec import AttentionSpec
from jax_attn._xla import ffi
from jax_attn._xla.transforms import HeadSplit, Operand, over_heads, refusing

# What the backward pass keeps of the forward pass besides its operands, for policies of
# jax.checkpoint.
O_NAME, LSE_NAME = "jax_attn_o", "jax_attn_lse"

_NUM_OPERANDS = 11  # of ffi.attention, before those of a variant
_LANES = 16  # that a row is cut into where a CPU adds it up: a vector of AVX-512

_VMAP = "put the batch into the plan, one request per element"
_BACKWARD = "attention's backward pass"
_NO_SECOND = "jax_attn.dot_product_attention has second derivatives"


def _states(*operands: Any) -> tuple[jax.Array, ...]:
    return ffi.attention(*operands)[:2]


def _products(*operands: Any, wanted: tuple[int, ...] = ()) -> tuple[jax.Array, ...]:
    d_q, d_k, d_v, _, *of_operands = ffi.backward(*operands, wanted=wanted)
    return d_q, d_k, d_v, *of_operands


_forward = refusing("attention", over_heads("attention", _states), vmap=_VMAP)


@functools.cache
def _backward(wanted: tuple[int, ...]) -> Callable[..., Any]:
    """wanted: operands of a variant that have gradients."""
    call = functools.partial(_products, wanted=wanted)
    return refusing(_BACKWARD, over_heads(_BACKWARD, call), vmap=_VMAP, gradients=_NO_SECOND)


_backward_of_one = refusing(_BACKWARD, _products, vmap=_VMAP, gradients=_NO_SECOND)


def _call(split: HeadSplit, *operands: Any) -> tuple[jax.Array, jax.Array]:
    o, lse = _forward(*operands, split)
    return o, lse


# Only a variant's operands ask which of them are differentiated. JAX cannot say so in a shard_map
# that is not under jit.
_attention = jax.custom_vjp(_call, nondiff_argnums=(0,))
_attention_of_operands = jax.custom_vjp(_call, nondiff_argnums=(0,))


def attention(*operands: Any) -> tuple[jax.Array, jax.Array]:
    """o and lse of ffi.attention, differentiable in q, k, v, sinks and a variant's operands.

    operands: those of ffi.attention, but for the last one, which is a HeadSplit.
    """
    *arrays, split = operands
    has_operands = len(arrays) > _NUM_OPERANDS
    return (_attention_of_operands if has_operands else _attention)(split, *arrays)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Wanted:
    operands: tuple[int, ...]  # of a variant, by number


def _forward_of_operands(split: HeadSplit, *primals: Any) -> tuple[Any, Any]:
    arrays = [None if x is None else x.value for x in primals]
    wanted = [i for i, x in enumerate(primals[_NUM_OPERANDS:]) if x.perturbed]
    return _attention_forward(split, *arrays, wanted=wanted)


def _attention_forward(
    split: HeadSplit, *arrays: Any, wanted: Sequence[int] = ()
) -> tuple[Any, Any]:
    check_differentiable(split.spec)
    if wanted and split.num_parts > 1:
        raise NotImplementedError(
            "attention: gradients: variant_operands: supported where a device has all heads of the"
            f" arrays, got heads split {split.num_parts} ways; use jax.shard_map, and add up what"
            " its devices have."
        )
    o, lse = _forward(*arrays, split)
    o, lse = checkpoint_name(o, O_NAME), checkpoint_name(lse, LSE_NAME)
    q, k, v, buffer, layer, _, _, sinks = arrays[:8]
    read = tuple(arrays[_NUM_OPERANDS:])
    return (o, lse), (q, k, v, buffer, layer, sinks, read, o, lse, _Wanted(tuple(wanted)))


def _attention_backward(split: HeadSplit, saved: Any, cotangents: Any) -> tuple[Any, ...]:
    q, k, v, buffer, layer, sinks, read, o, lse, wanted = saved
    d_o, d_lse = (
        jnp.zeros_like(x) if isinstance(d_x, jax.custom_derivatives.SymbolicZero) else d_x
        for x, d_x in zip((o, lse), cotangents, strict=True)
    )
    d = row_sums(o, d_o, d_lse, split.spec.target)
    operands = (q, k, v, buffer, layer, lse, d, d_o, *read)
    split = _split_backward(split, [read[i].ndim for i in wanted.operands])
    d_q, d_k, d_v, *of_operands = _backward(wanted.operands)(*operands, split)
    d_sinks = None
    if sinks is not None:
        # The sink has value 0, and no weight in a row without a key.
        d_sinks = -jnp.where(jnp.isneginf(lse), 0, jnp.exp(sinks - lse) * d).sum(axis=0)
        if any(jax.typeof(d_sinks).sharding.spec):  # as the rows' heads are, on a mesh in the types
            d_sinks = jax.sharding.reshard(d_sinks, jax.typeof(sinks).sharding)
    found = dict(zip(wanted.operands, of_operands, strict=True))
    d_read = [found.get(i) for i in range(len(read))]
    return d_q, d_k, d_v, *[None] * 4, d_sinks, *[None] * 3, *d_read


_attention.defvjp(_attention_forward, _attention_backward)
_attention_of_operands.defvjp(_forward_of_operands, _attention_backward, symbolic_zeros=True)


def _split_backward(split: HeadSplit, wanted_ndims: list[int]) -> HeadSplit:
    """How the arrays of the backward pass are split by head, from those of the forward pass."""
    of_o, of_lse = split.results
    products = [x for x in split.operands[:3] if x is not None]  # q, k, v; their gradients
    products += [Operand("d_operand", ndim, None, 0) for ndim in wanted_ndims]
    of_rows = of_lse._replace(name="d"), of_o._replace(name="d_o")
    arrays = (*split.operands[:5], of_lse, *of_rows, *split.operands[_NUM_OPERANDS:])
    return HeadSplit(split.spec, arrays, tuple(products), split.num_parts)


def row_sums(o: jax.Array, d_o: jax.Array, d_lse: jax.Array, target: str | None) -> jax.Array:
    """D of FlashAttention-2 (arXiv 2307.08691), less d_lse: [..., num_qo_heads], f32.

    target: of the spec.
    """
    products = d_o.astype(jnp.float32) * o.astype(jnp.float32)
    if target == "cpu" and (head_dim := o.shape[-1]) % _LANES == 0:
        # XLA's sum of a row is a chain of scalar additions there, of 4 to 6 times the time.
        vectors = [products[..., i : i + _LANES] for i in range(0, head_dim, _LANES)]
        products = functools.reduce(operator.add, vectors)
        while (length := products.shape[-1]) > 1:
            products = products[..., : length // 2] + products[..., length // 2 :]
    return products.sum(axis=-1) - d_lse


def gradients(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    buffer: jax.Array,
    layer: jax.Array,
    lse: jax.Array,
    d: jax.Array,
    d_o: jax.Array,
    spec: AttentionSpec,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """d_q, d_k, d_v of an attention call, in the shapes and dtypes of q, k and v.

    buffer, layer, spec: of the call. lse: its result. d: what row_sums returns. d_o: as o.
    """
    d_q, d_k, d_v = _backward_of_one(q, k, v, buffer, layer, lse, d, d_o, spec)
    return d_q, d_k, d_v


def check_differentiable(spec: AttentionSpec) -> None:
    """Raises NotImplementedError for what has no gradient."""
    for has_none, what, instead in (
        (
            spec.is_quantized,
            f"{spec.kv_dtype} keys and values",
            "train on pages of the spec's dtype",
        ),
        (spec.q_dtype is not None, "float8_e4m3fn queries", "train on q of the spec's dtype"),
        (spec.fresh_kv, "fresh_kv", "make the spec without it, and append_kv after the step"),
        (spec.mla, "mla", "train on expanded keys and values, a ragged spec"),
    ):
        if has_none:
            raise NotImplementedError(f"attention: gradients: {what}: not supported; {instead}.")
