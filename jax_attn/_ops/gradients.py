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
from jax.extend import core as jax_core
from jax.interpreters import ad, batching, mlir

from jax_attn._ops import plan_jnp
from jax_attn._ops.operands import as_known
from jax_attn._spec.spec import AttentionSpec
from jax_attn._xla import ffi
from jax_attn._xla.attention_operands import AttentionOperands, BackwardOperands
from jax_attn._xla.transforms import (
    HeadSplit,
    Operand,
    jvp_of,
    over_heads,
    refusing,
    varying_alike,
)

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


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _attention(
    split: HeadSplit, operands: AttentionOperands[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    o, lse = _forward(operands, split)
    return o, lse


def attention(
    operands: AttentionOperands[jax.Array], split: HeadSplit
) -> tuple[jax.Array, jax.Array]:
    """o and lse, differentiable in q, k, v, sinks and a variant's operands."""
    o, lse = _attention(split, varying_alike(operands))
    return o, lse


@functools.partial(_attention.defjvp, symbolic_zeros=True)
def _jvp(split: HeadSplit, primals: Any, tangents: Any) -> Any:
    (operands,), (given,) = primals, tangents
    check_differentiable(split.spec)
    as_known("attention: gradients", "k", operands.k)  # the workspace grows with the pool
    wanted = tuple(i for i, t in enumerate(given.variant) if not _is_zero(t))
    if wanted and split.num_parts > 1:
        raise NotImplementedError(
            "attention: gradients: variant_operands: supported where a device has all heads of the"
            f" arrays, got heads split {split.num_parts} ways; use jax.shard_map, and add up what"
            " its devices have."
        )
    o, lse = _attention(split, operands)
    o, lse = checkpoint_name(o, O_NAME), checkpoint_name(lse, LSE_NAME)
    linear = [
        jnp.zeros_like(x) if _is_zero(t) else t
        for x, t in zip(_linear(operands, wanted), _linear(given, wanted), strict=True)
    ]
    arrays, tree = jax.tree.flatten(operands)
    call = _Tangents(split, tree, wanted)
    return (o, lse), tuple(_tangents_p.bind(*arrays, o, lse, *linear, call=call))


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, jax.custom_derivatives.SymbolicZero)


def _linear(operands: AttentionOperands[Any], wanted: tuple[int, ...]) -> list[Any]:
    """What a call is differentiated by, of the operands or of their tangents or gradients."""
    found = [operands.q, operands.k, operands.v, operands.sinks]
    return [x for x in found if x is not None] + [operands.variant[i] for i in wanted]


def _with_linear(
    operands: AttentionOperands[Any], wanted: tuple[int, ...], arrays: Sequence[Any]
) -> AttentionOperands[Any]:
    """The operands with `arrays` in place of what _linear lists."""
    q, k, v, *rest = arrays
    sinks = None if operands.sinks is None else rest.pop(0)
    variant = list(operands.variant)
    for i, x in zip(wanted, rest, strict=True):
        variant[i] = x
    return dataclasses.replace(operands, q=q, k=k, v=v, sinks=sinks, variant=tuple(variant))


@dataclasses.dataclass(frozen=True)
class _Tangents:
    """The static arguments of _tangents_p."""

    split: HeadSplit
    tree: Any  # of the operands
    wanted: tuple[int, ...]  # numbers of a variant's operands


# Tangents of o and lse, in jnp. Its transpose in the linear operands is the backward pass.
# Operands: those of the call, o, lse, and the tangents of what _linear lists.
_tangents_p = jax_core.Primitive("jax_attn_tangents")
_tangents_p.multiple_results = True


def _in_jnp(call: _Tangents, operands: AttentionOperands[jax.Array]) -> Callable[..., Any]:
    """(o, lse) as a function of what _linear lists, for JAX to differentiate."""
    spec = call.split.spec
    if spec.max_steps is not None:
        raise NotImplementedError(
            "attention: forward mode and second derivatives: max_steps: None is supported, got"
            f" {spec.max_steps}; plan without a block map, whose variant hides the same."
        )

    def run(*varying: jax.Array) -> Any:
        return plan_jnp.attend(_with_linear(operands, call.wanted, varying), spec)

    return run


def _split_tangents(call: _Tangents, arrays: Any) -> tuple[Any, Any, Any, Any]:
    """The operands of the call, o, lse and what follows."""
    n = call.tree.num_leaves
    return jax.tree.unflatten(call.tree, arrays[:n]), arrays[n], arrays[n + 1], arrays[n + 2 :]


def _tangents(*arrays: jax.Array, call: _Tangents) -> Any:
    operands, _, _, linear = _split_tangents(call, arrays)
    primals = _linear(operands, call.wanted)
    return list(jax.jvp(_in_jnp(call, operands), primals, [*linear])[1])


def _tangents_transpose(cotangents: Any, *arrays: Any, call: _Tangents) -> Any:
    operands, o, lse, linear = _split_tangents(call, arrays)
    d_o, d_lse = map(ad.instantiate_zeros, cotangents)
    found = _gradients(call, operands, o, lse, d_o, d_lse)
    of_linear = zip(linear, found, strict=True)
    none = [None] * (len(arrays) - len(linear))
    return none + [d if ad.is_undefined_primal(x) else None for x, d in of_linear]


def _tangents_batched(arrays: Any, axes: Any, call: _Tangents) -> Any:
    if any(axis is not None for axis in axes[: call.tree.num_leaves]):
        raise NotImplementedError(f"attention: vmap: not supported; {_VMAP}.")
    results = jax.vmap(functools.partial(_tangents, call=call), axes)(*arrays)
    return results, [0] * len(results)


_tangents_p.def_impl(_tangents)
_tangents_p.def_abstract_eval(
    lambda *avals, call: list(avals[call.tree.num_leaves : call.tree.num_leaves + 2])
)
ad.primitive_jvps[_tangents_p] = functools.partial(jvp_of, _tangents)
ad.primitive_transposes[_tangents_p] = _tangents_transpose
batching.primitive_batchers[_tangents_p] = _tangents_batched
mlir.register_lowering(_tangents_p, mlir.lower_fun(_tangents, multiple_results=True))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _gradients(
    call: _Tangents,
    operands: AttentionOperands[jax.Array],
    o: jax.Array,
    lse: jax.Array,
    d_o: jax.Array,
    d_lse: jax.Array,
) -> tuple[jax.Array, ...]:
    """Gradients of what _linear lists, by the kernels; under vmap over cotangents in jnp."""
    arrays, tree = jax.tree.flatten((operands, o, lse))

    @jax.custom_batching.custom_vmap
    def of_cotangents(d_o: jax.Array, d_lse: jax.Array, *arrays: jax.Array) -> tuple[Any, ...]:
        operands, o, lse = jax.tree.unflatten(tree, arrays)
        found = _attention_backward(call, operands, o, lse, d_o, d_lse)
        return tuple(_linear(found, call.wanted))

    @of_cotangents.def_vmap
    def mapped(size: int, is_mapped: Any, d_o: jax.Array, d_lse: jax.Array, *arrays: Any) -> Any:
        if any(is_mapped[2:]):
            raise NotImplementedError(f"{_BACKWARD}: vmap: not supported; {_VMAP}.")
        operands, *_ = jax.tree.unflatten(tree, arrays)
        run = functools.partial(_gradients_in_jnp, call, operands)
        results = jax.vmap(run, [0 if x else None for x in is_mapped[:2]], axis_size=size)(
            d_o, d_lse
        )
        return results, (True,) * len(results)

    found: tuple[jax.Array, ...] = of_cotangents(d_o, d_lse, *arrays)
    return found


def _gradients_in_jnp(
    call: _Tangents, operands: AttentionOperands[jax.Array], d_o: jax.Array, d_lse: jax.Array
) -> tuple[jax.Array, ...]:
    run = _in_jnp(call, operands)
    found: tuple[jax.Array, ...] = jax.vjp(run, *_linear(operands, call.wanted))[1]((d_o, d_lse))
    return found


@_gradients.defjvp
def _second_derivatives(call: _Tangents, primals: Any, tangents: Any) -> Any:
    """o and lse follow from the operands, so that their tangents say nothing more."""
    operands, _, _, d_o, d_lse = primals
    of_operands, _, _, t_o, t_lse = tangents

    every = tuple(range(len(operands.variant)))

    def run(d_o: jax.Array, d_lse: jax.Array, *varying: jax.Array) -> Any:
        return _gradients_in_jnp(call, _with_linear(operands, every, varying), d_o, d_lse)

    varying = d_o, d_lse, *_linear(operands, every)
    moved = t_o, t_lse, *_linear(of_operands, every)
    return _gradients(call, *primals), jax.jvp(run, varying, moved)[1]


def _attention_backward(
    call: _Tangents,
    operands: AttentionOperands[Any],
    o: jax.Array,
    lse: jax.Array,
    d_o: jax.Array,
    d_lse: jax.Array,
) -> AttentionOperands[Any]:
    """The gradients of the operands; None for those without."""
    wanted = call.wanted
    if not call.split.spec.has_backward_kernel:
        in_jnp = _gradients_in_jnp(call, operands, d_o, d_lse)
        none = AttentionOperands(q=None, k=None, v=None, sinks=operands.sinks)
        none = dataclasses.replace(none, variant=(None,) * len(operands.variant))
        return _with_linear(none, wanted, in_jnp)
    d = row_sums(o, d_o, d_lse, call.split.spec.target)
    split = _split_backward(call.split, wanted)
    d_q, d_k, d_v, *of_wanted = _backward(wanted)(_backward_operands(operands, lse, d, d_o), split)
    sinks, d_sinks = operands.sinks, None
    if sinks is not None:
        # The sink has value 0, and weight 0 in a row that sees no key. It is at most lse, but for
        # rounding.
        weight = jnp.exp(jnp.minimum(sinks[None] - lse, 0.0))
        d_sinks = -(weight * jnp.where(jnp.isneginf(lse), 0, d)).sum(axis=0)
        if any(jax.typeof(d_sinks).sharding.spec):  # explicit mesh: split as the rows' heads
            d_sinks = jax.sharding.reshard(d_sinks, jax.typeof(sinks).sharding)
    by_index = dict(zip(wanted, of_wanted, strict=True))
    d_variant = tuple(by_index.get(i) for i in range(len(operands.variant)))
    return AttentionOperands(q=d_q, k=d_k, v=d_v, sinks=d_sinks, variant=d_variant)


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


def _split_backward(split: HeadSplit, wanted: tuple[int, ...]) -> HeadSplit:
    """How the arrays of the backward pass are split by head, from those of the forward pass."""
    forward, (of_o, of_lse) = split.operands, split.results
    d, d_o = dataclasses.replace(of_lse, name="d"), dataclasses.replace(of_o, name="d_o")
    products = [forward.q, forward.k, forward.v]  # split like their gradients
    products += [Operand("d_operand", forward.variant[i].ndim, None, 0) for i in wanted]
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
        (
            spec.max_steps is not None and spec.variant is not None and spec.variant.transforms,
            "max_steps with transforms of k or v of pages",
            "plan without a block map, whose variant hides the same",
        ),
        (
            spec.max_steps is not None and not spec.has_backward_kernel,
            f"max_steps with head dims beyond 256 on {spec.target}",
            "plan without a block map, whose variant hides the same",
        ),
        (spec.mla, "mla", "train on expanded keys and values, a ragged spec"),
    ):
        if has_none:
            raise NotImplementedError(f"attention: gradients: {what}: not supported; {instead}.")
