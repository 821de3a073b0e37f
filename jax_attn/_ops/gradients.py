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
from jax_attn._xla.attention_operands import AttentionOperands, BackwardOperands
from jax_attn._xla.transforms import HeadSplit, Operand, over_heads, refusing

# Names for jax.checkpoint policies. Besides the operands, the backward pass needs these two results
# of the forward pass.
O_NAME, LSE_NAME = "jax_attn_o", "jax_attn_lse"

_LANES = 16  # f32 in an AVX-512 vector, the unit in which a CPU sums a row

_VMAP = "put the batch into the plan, one request per element"
_BACKWARD = "attention's backward pass"
_NO_SECOND = "jax_attn.dot_product_attention has second derivatives"


def _states(operands: AttentionOperands[jax.Array], spec: AttentionSpec) -> tuple[jax.Array, ...]:
    return ffi.attention(operands, spec)[:2]


def _products(
    operands: BackwardOperands[jax.Array], spec: AttentionSpec, *, wanted: tuple[int, ...] = ()
) -> tuple[jax.Array, ...]:
    d_q, d_k, d_v, _, *of_operands = ffi.backward(operands, spec, wanted=wanted)
    return d_q, d_k, d_v, *of_operands


_forward = refusing("attention", over_heads("attention", _states), vmap=_VMAP)


@functools.cache
def _backward(wanted: tuple[int, ...]) -> Callable[..., Any]:
    """The backward function. wanted: numbers of the variant operands that have gradients."""
    call = functools.partial(_products, wanted=wanted)
    return refusing(_BACKWARD, over_heads(_BACKWARD, call), vmap=_VMAP, gradients=_NO_SECOND)


_backward_of_one = refusing(_BACKWARD, _products, vmap=_VMAP, gradients=_NO_SECOND)


def _call(split: HeadSplit, operands: AttentionOperands[jax.Array]) -> tuple[jax.Array, jax.Array]:
    o, lse = _forward(operands, split)
    return o, lse


# Two versions: only the one with a variant's operands asks which of them are differentiated. JAX
# cannot tell in a shard_map that is not under jit.
_attention = jax.custom_vjp(_call, nondiff_argnums=(0,))
_attention_of_operands = jax.custom_vjp(_call, nondiff_argnums=(0,))


def attention(
    operands: AttentionOperands[jax.Array], split: HeadSplit
) -> tuple[jax.Array, jax.Array]:
    """o and lse, differentiable in q, k, v, sinks and a variant's operands."""
    return (_attention_of_operands if operands.variant else _attention)(split, operands)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Wanted:
    operands: tuple[int, ...]  # numbers of a variant's operands


def _forward_of_operands(split: HeadSplit, primals: AttentionOperands[Any]) -> tuple[Any, Any]:
    operands = jax.tree.map(lambda primal: primal.value, primals)
    wanted = [i for i, x in enumerate(primals.variant) if x.perturbed]
    return _attention_forward(split, operands, wanted=wanted)


def _attention_forward(
    split: HeadSplit, operands: AttentionOperands[jax.Array], wanted: Sequence[int] = ()
) -> tuple[Any, Any]:
    check_differentiable(split.spec)
    if wanted and split.num_parts > 1:
        raise NotImplementedError(
            "attention: gradients: variant_operands: supported where a device has all heads of the"
            f" arrays, got heads split {split.num_parts} ways; use jax.shard_map, and add up what"
            " its devices have."
        )
    o, lse = _forward(operands, split)
    o, lse = checkpoint_name(o, O_NAME), checkpoint_name(lse, LSE_NAME)
    return (o, lse), (operands, o, lse, _Wanted(tuple(wanted)))


def _attention_backward(
    split: HeadSplit, saved: Any, cotangents: Any
) -> tuple[AttentionOperands[Any]]:
    operands, o, lse, wanted = saved
    d_o, d_lse = (
        jnp.zeros_like(x) if isinstance(d_x, jax.custom_derivatives.SymbolicZero) else d_x
        for x, d_x in zip((o, lse), cotangents, strict=True)
    )
    d = row_sums(o, d_o, d_lse, split.spec.target)
    split = _split_backward(split, wanted)
    d_q, d_k, d_v, *of_wanted = _backward(wanted.operands)(
        _backward_operands(operands, lse, d, d_o), split
    )
    sinks, d_sinks = operands.sinks, None
    if sinks is not None:
        # The sink has value 0, and weight 0 in a row that sees no key.
        d_sinks = -jnp.where(jnp.isneginf(lse), 0, jnp.exp(sinks - lse) * d).sum(axis=0)
        if any(jax.typeof(d_sinks).sharding.spec):  # explicit mesh: split as the rows' heads
            d_sinks = jax.sharding.reshard(d_sinks, jax.typeof(sinks).sharding)
    found = dict(zip(wanted.operands, of_wanted, strict=True))
    d_variant = tuple(found.get(i) for i in range(len(operands.variant)))
    return (AttentionOperands(q=d_q, k=d_k, v=d_v, sinks=d_sinks, variant=d_variant),)


_attention.defvjp(_attention_forward, _attention_backward)
_attention_of_operands.defvjp(_forward_of_operands, _attention_backward, symbolic_zeros=True)


def _backward_operands(
    operands: AttentionOperands[Any], lse: Any, d: Any, d_o: Any
) -> BackwardOperands[Any]:
    """The operands of the backward pass from those of the forward pass, or their descriptions."""
    return BackwardOperands(
        q=operands.q,
        k=operands.k,
        v=operands.v,
        plan_buffer=operands.plan_buffer,
        layer=operands.layer,
        lse=lse,
        d=d,
        d_o=d_o,
        variant=operands.variant,
    )


def _split_backward(split: HeadSplit, wanted: _Wanted) -> HeadSplit:
    """How the arrays of the backward pass are split by head, from those of the forward pass."""
    forward, (of_o, of_lse) = split.operands, split.results
    d, d_o = dataclasses.replace(of_lse, name="d"), dataclasses.replace(of_o, name="d_o")
    products = [forward.q, forward.k, forward.v]  # split like their gradients
    products += [Operand("d_operand", forward.variant[i].ndim, None, 0) for i in wanted.operands]
    operands = _backward_operands(forward, of_lse, d, d_o)
    return HeadSplit(split.spec, operands, tuple(products), split.num_parts)


def row_sums(o: jax.Array, d_o: jax.Array, d_lse: jax.Array, target: str | None) -> jax.Array:
    """D of FlashAttention-2 (arXiv 2307.08691) minus d_lse: [..., num_qo_heads], f32.

    target: the spec's target.
    """
    products = d_o.astype(jnp.float32) * o.astype(jnp.float32)
    if target == "cpu" and (head_dim := o.shape[-1]) % _LANES == 0:
        # On CPU, XLA sums a row by a chain of scalar additions, which takes 4 to 6 times as long.
        vectors = [products[..., i : i + _LANES] for i in range(0, head_dim, _LANES)]
        products = functools.reduce(operator.add, vectors)
        while (length := products.shape[-1]) > 1:
            products = products[..., : length // 2] + products[..., length // 2 :]
    return products.sum(axis=-1) - d_lse


def gradients(
    operands: BackwardOperands[jax.Array], spec: AttentionSpec
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """d_q, d_k and d_v of an attention call, in the shapes and dtypes of q, k and v."""
    d_q, d_k, d_v = _backward_of_one(operands, spec)
    return d_q, d_k, d_v


def check_differentiable(spec: AttentionSpec) -> None:
    """Raise NotImplementedError for a spec without gradients."""
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
