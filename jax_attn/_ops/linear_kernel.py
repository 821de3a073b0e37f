"""Linear attention by the kernels of csrc where there are some, in jax.numpy elsewhere.

Kernels: on CPUs and CUDA; gradients on CUDA where csrc/select/linear.cc has some.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core as jax_core
from jax.interpreters import ad, batching, mlir

from jax_attn import _core
from jax_attn._ops.operands import with_default_promotion
from jax_attn._plan.state_plan import words_of_sequences
from jax_attn._spec.state_spec import CHUNK, LinearAttentionSpec
from jax_attn._spec.target import gpu_target
from jax_attn._xla import ffi, jit
from jax_attn._xla.transforms import Axes, jvp_of, partitioned, varying_alike


class LinearOperands(NamedTuple):
    """The arrays that a call is differentiated by. See ja.linear_attention."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array | None
    beta: jax.Array | None
    states: jax.Array


@dataclasses.dataclass(frozen=True)
class LinearCall:
    """The static arguments of a call.

    op: the name of the operation in messages.
    spec: dims and numbers of heads of all devices together.
    rows: names of the axes of q, k and v in front of the heads; "b t": sequences of one length, of
        which each has a state, in order. "t": packed, and there is a plan.
    slots: names of the axes of states in front of the heads.
    in_jnp: (call, operands, plan_buffer, layer) -> (o, states) in jax.numpy.
    """

    op: str
    spec: LinearAttentionSpec
    rows: str
    slots: str
    in_jnp: Callable[..., tuple[jax.Array, jax.Array]]

    def tree(self, has_beta: bool) -> Any:
        """The structure of (operands, plan_buffer, layer)."""
        g = None if self.spec.decay == "none" else 0
        operands = LinearOperands(0, 0, 0, g, 0 if has_beta else None, 0)  # type: ignore[arg-type]
        return jax.tree.structure((operands, *((0, 0) if self.rows == "t" else ())))


def _axes(call: LinearCall, has_beta: bool, *target: Any, is_backward: bool) -> Axes:
    """Heads are independent, and so are sequences that have a state each."""
    group = call.spec.num_v_heads // call.spec.num_qk_heads
    rows, keys, heads, sizes = call.rows, "h", "(h g)", {"g": group}
    if 1 in (group, call.spec.num_qk_heads):  # Shardy has no factors of size 1
        keys, heads, sizes = ("h", "h", {}) if group == 1 else ("h", "g", {})
    channels = " d" if call.spec.decay == "channel" else ""
    values, states = f"{rows} {heads} e", f"{call.slots} {heads} d e"
    operands = [f"{rows} {keys} d", f"{rows} {keys} d", values]
    operands += [f"{rows} {heads}{channels}"] * (call.spec.decay != "none")
    operands += [f"{rows} {heads}"] * has_beta
    operands += [states]
    plan, results = ["p", ""] if rows == "t" else [], [values, states]
    arguments = [*operands, *plan, *(results if is_backward else [])]
    results = operands if is_backward else results
    return Axes(f"{', '.join(arguments)} -> {', '.join(results)}", ("b", "h"), sizes)


class _Packed(NamedTuple):
    """The arguments of a kernel: packed rows, and a plan."""

    operands: LinearOperands
    plan: list[jax.Array]
    numbers: dict[str, Any]


def _packed(
    call: LinearCall, operands: LinearOperands, plan: list[jax.Array], target: tuple[int, int]
) -> _Packed:
    spec, begin = call.spec, call.spec.chunks_begin
    chunks, longest = spec.max_chunks, spec.max_qo_len
    if not plan:
        batch, seq = operands.q.shape[:2]
        longest = seq
        words, begin, chunks = words_of_sequences(batch, seq, seq if target == ffi.CPU else CHUNK)
        plan = [words, jnp.zeros((), jnp.int32)]
        flat: list[Any] = [
            None if x is None else x.reshape(batch * seq, *x.shape[2:]) for x in operands[:-1]
        ]
        operands = LinearOperands(*[*flat, operands.states])
    assert spec.scale is not None
    numbers: dict[str, Any] = {"chunks_begin": begin, "max_chunks": chunks, "max_qo_len": longest}
    numbers |= {"scale": spec.scale, "delta_rule": spec.delta_rule, "l2_norm": spec.l2_norm}
    return _Packed(operands, plan, numbers)


def _forward_on_device(
    call: LinearCall, has_beta: bool, target: tuple[int, int], *arrays: jax.Array
) -> Any:
    operands, *plan = jax.tree.unflatten(call.tree(has_beta), arrays)
    packed = _packed(call, operands, plan, target)
    given: list[Any] = [*packed.operands, *packed.plan]
    o, states = ffi.linear_attention(*given, **packed.numbers, target=target)
    return o.reshape(operands.v.shape), states


def _has_gradient_kernels(
    call: LinearCall, operands: LinearOperands, plan: list[jax.Array], target: tuple[int, int]
) -> bool:
    spec = call.spec
    of_call = spec.max_tokens, spec.max_qo_len, spec.max_chunks
    if not plan:
        batch, seq = operands.q.shape[:2]
        of_call = batch * seq, seq, batch * max(1, -(-seq // CHUNK))
    tokens, longest, chunks = of_call
    assert longest is not None
    num_axes = len(call.rows.split())

    def packed(x: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((tokens, *x.shape[num_axes:]), x.dtype)

    g = None if operands.g is None else packed(operands.g)
    words = jit.linear_problem(
        packed(operands.q), packed(operands.v), g, operands.states,
        target=target, max_qo_len=longest, max_chunks=chunks, delta_rule=spec.delta_rule,
        l2_norm=spec.l2_norm,
    )  # fmt: skip
    return bool(_core.linear_gradient_sources(words))


def _backward_on_device(
    call: LinearCall, has_beta: bool, target: tuple[int, int], *arrays: jax.Array
) -> Any:
    operands, *plan = jax.tree.unflatten(call.tree(has_beta), arrays[:-2])
    packed = _packed(call, operands, plan, target)
    d_o, d_states = arrays[-2].reshape(packed.operands.v.shape), arrays[-1]
    given: list[Any] = [*packed.operands, *packed.plan, d_o, d_states]
    found = ffi.linear_attention_backward(*given, **packed.numbers, target=target)
    pairs = zip(operands, found, strict=True)
    return tuple(d.reshape(x.shape) for x, d in pairs if x is not None)


_partitioned_forward = partitioned(
    "linear_attention",
    _forward_on_device,
    functools.partial(_axes, is_backward=False),
    num_static=3,
)
_partitioned_backward = partitioned(
    "linear_attention: gradients",
    _backward_on_device,
    functools.partial(_axes, is_backward=True),
    num_static=3,
)


def _one_by_one(run: Callable[..., Any], *arrays: jax.Array) -> Any:
    """run(*arrays); under vmap one element of the batch follows the other."""
    mapped = jax.custom_batching.custom_vmap(run)

    @mapped.def_vmap
    def _(axis_size: int, in_batched: list[bool], *arrays: jax.Array) -> Any:
        def one(batched: list[jax.Array]) -> Any:
            rest = iter(batched)
            given = (next(rest) if b else x for x, b in zip(arrays, in_batched, strict=True))
            return _one_by_one(run, *given)

        found = jax.lax.map(one, [x for x, b in zip(arrays, in_batched, strict=True) if b])
        return found, jax.tree.map(lambda _: True, found)

    return mapped(*arrays)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _attend(call: LinearCall, operands: LinearOperands, *plan: jax.Array) -> Any:
    arrays, tree = jax.tree.flatten((operands, *plan))

    def by_kernel(target: tuple[int, int]) -> Callable[..., Any]:
        run = functools.partial(_partitioned_forward, call, operands.beta is not None, target)
        return functools.partial(_one_by_one, run)

    gpu = gpu_target()
    on_gpu = {} if gpu is None else {"cuda": by_kernel(gpu)}
    return jax.lax.platform_dependent(
        *arrays,
        cpu=by_kernel(ffi.CPU),
        **on_gpu,
        default=lambda *arrays: call.in_jnp(call, *jax.tree.unflatten(tree, arrays)),
    )


@_attend.defjvp
def _jvp(call: LinearCall, primals: Any, tangents: Any) -> Any:
    arrays, moved = jax.tree.leaves(primals), jax.tree.leaves(tangents[0])
    has_beta = primals[0].beta is not None
    found = _tangents_p.bind(*arrays, *moved, call=call, has_beta=has_beta)
    return _attend(call, *primals), tuple(found)


# Tangents of o and the states, in jnp. Its transpose in the tangents of the operands is the
# backward pass. Operands: those of the call, its plan, the tangents of the former.
_tangents_p = jax_core.Primitive("jax_attn_linear_tangents")
_tangents_p.multiple_results = True


def _split(call: LinearCall, has_beta: bool, arrays: Any) -> tuple[Any, list[Any], list[Any]]:
    """The operands, the plan and the tangents of the operands' leaves."""
    tree = call.tree(has_beta)
    operands, *plan = jax.tree.unflatten(tree, arrays[: tree.num_leaves])
    return operands, plan, list(arrays[tree.num_leaves :])


@with_default_promotion
def _tangents(*arrays: jax.Array, call: LinearCall, has_beta: bool) -> Any:
    operands, plan, moved = _split(call, has_beta, arrays)
    tree = jax.tree.structure(operands)
    run = lambda operands: call.in_jnp(call, operands, *plan)  # noqa: E731
    return list(jax.jvp(run, (operands,), (jax.tree.unflatten(tree, moved),))[1])


@with_default_promotion
def _tangents_transpose(cotangents: Any, *arrays: Any, call: LinearCall, has_beta: bool) -> Any:
    operands, plan, moved = _split(call, has_beta, arrays)
    tree: Any = jax.tree.structure((operands, *plan))

    def in_jnp(*arrays: jax.Array) -> Any:
        operands, *plan = jax.tree.unflatten(tree, arrays[:-2])
        _, pull = jax.vjp(lambda operands: call.in_jnp(call, operands, *plan), operands)
        return tuple(jax.tree.leaves(pull(arrays[-2:])))

    def by_kernel(target: tuple[int, int]) -> Callable[..., Any]:
        run = functools.partial(_partitioned_backward, call, has_beta, target)
        return functools.partial(_one_by_one, run)

    gpu = gpu_target()
    has_kernels = gpu is not None and _has_gradient_kernels(call, operands, plan, gpu)
    on_gpu = {"cuda": by_kernel(gpu)} if gpu is not None and has_kernels else {}

    @jax.custom_jvp
    def gradients(*arrays: jax.Array) -> Any:
        return jax.lax.platform_dependent(*arrays, cpu=by_kernel(ffi.CPU), **on_gpu, default=in_jnp)

    gradients.defjvp(functools.partial(jax.jvp, in_jnp))
    given = varying_alike((*arrays[: tree.num_leaves], *map(ad.instantiate_zeros, cotangents)))
    of_moved = zip(moved, gradients(*given), strict=True)
    none = [None] * tree.num_leaves
    return none + [d if ad.is_undefined_primal(x) else None for x, d in of_moved]


def _tangents_batched(arrays: Any, axes: Any, **static: Any) -> Any:
    results = jax.vmap(functools.partial(_tangents, **static), axes)(*arrays)
    return results, [0] * len(results)


def _tangents_types(*arrays: Any, call: LinearCall, has_beta: bool) -> Any:
    operands, _, _ = _split(call, has_beta, arrays)
    return [operands.v, operands.states]


_tangents_p.def_impl(_tangents)
_tangents_p.def_abstract_eval(_tangents_types)
ad.primitive_jvps[_tangents_p] = functools.partial(jvp_of, _tangents)
ad.primitive_transposes[_tangents_p] = _tangents_transpose
batching.primitive_batchers[_tangents_p] = _tangents_batched
mlir.register_lowering(_tangents_p, mlir.lower_fun(_tangents, multiple_results=True))


def attend(call: LinearCall, operands: LinearOperands, *plan: jax.Array) -> Any:
    """o and the states after the call.

    plan: the plan's buffer and the layer of stacked states; none for sequences of one length.
    """
    return _attend(call, *varying_alike((operands, *plan)))
