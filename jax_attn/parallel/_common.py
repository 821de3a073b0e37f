"""Code shared by KV shards and sequence shards."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import linear_call
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_attn._spec.spec import AttentionSpec
from jax_attn._xla.transforms import partitionable

_NO_LIMIT = 2**30  # larger than any position: a window of this size hides nothing


def windows(spec: AttentionSpec) -> tuple[int, int]:
    """window_left and window_right; -1 for a side that hides nothing."""
    left, right = spec.window_left, 0 if spec.causal else spec.window_right
    return (-1 if left >= _NO_LIMIT else left), (-1 if right >= _NO_LIMIT else right)


def add_sinks(o: jax.Array, lse: jax.Array, sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The state with the sinks' extra logits, which have no value; rows without keys stay equal."""
    total = jnp.where(jnp.isneginf(lse), -jnp.inf, jnp.logaddexp(lse, sinks[None]))
    # Not exp(lse - total): far from 0, total is the larger one alone.
    weight = jax.nn.sigmoid(jnp.where(jnp.isneginf(lse), 0.0, lse - sinks[None]))
    return (o * weight[..., None]).astype(o.dtype), total


def check_axis(op: str, kind: str, name: str, size: int, mesh: Any) -> None:
    """Raise ValueError if the axis of a plan is not one of the mesh, or is of another size.

    kind: the class with the static half of the plan. name, size: its axis.
    mesh: None: that of the shard_map in which the call is.
    """
    inside = jax.sharding.get_abstract_mesh()
    if mesh is None and name not in inside.manual_axes:
        raise ValueError(
            f"{op}: mesh: expected a mesh outside of jax.shard_map over axis {name!r}, got None."
        )
    sizes = (inside if mesh is None else mesh).shape
    if sizes.get(name) != size:
        raise ValueError(
            f"{op}: plan: expected {kind} of the mesh, {dict(sizes)}, got axis {name!r} of {size}."
        )


def mapped(
    op: str,
    call: Callable[..., Any],
    mesh: jax.sharding.Mesh,
    arrays: dict[str, tuple[Any, P]],
    out_specs: Any,
) -> Any:
    """Run call(**arrays) by shard_map, without sending any part of the arrays to other devices.

    arrays: name -> (array, its PartitionSpec); None stays None.

    Raises NotImplementedError for an array with another split. An array that every device has, or
    that is split along only some of the axes, is allowed: each device takes its part. If only XLA
    knows the split, its compilation fails with the same sentence. The same rules apply to gradients
    of the results.
    """
    values = {
        name: jax.tree.map(functools.partial(_as_split, _Split(op, name, mesh, spec)), value)
        for name, (value, spec) in arrays.items()
    }
    results = jax.shard_map(
        lambda values: call(**values),
        mesh=mesh,
        in_specs=({name: spec for name, (_, spec) in arrays.items()},),
        out_specs=out_specs,
        check_vma=False,  # JAX cannot see that all-gathered results are equal
    )(values)

    def pulled_back(spec: P, result: jax.Array) -> jax.Array:
        return _with_gradient_as_split(_Split(op, "gradient", mesh, spec), result)

    is_spec = lambda x: isinstance(x, P)  # noqa: E731
    return jax.tree.map(pulled_back, out_specs, results, is_leaf=is_spec)


@dataclasses.dataclass(frozen=True)
class _Split:
    """The required split of an operand, and its name in error messages."""

    op: str
    name: str
    mesh: jax.sharding.Mesh
    spec: P

    def check(self, got: jax.sharding.Sharding, ndim: int) -> None:
        """Raise NotImplementedError if slicing alone cannot turn `got` into the required split."""
        want = NamedSharding(self.mesh, self.spec)
        if got.is_fully_replicated or got.is_equivalent_to(want, ndim):
            return
        if isinstance(got, NamedSharding):
            sizes, wanted = got.mesh.shape, [*self.spec, *[None] * ndim]
            pairs = [
                (_axes(sizes, entry), _axes(self.mesh.shape, other))
                for entry, other in zip(got.spec, wanted, strict=False)
            ]
            if sizes == self.mesh.shape and all(not a or a == b for a, b in pairs):
                return
        raise NotImplementedError(
            f"{self.op}: {self.name}: expected an array that is split as {self.spec}, or on every"
            f" device, got {getattr(got, 'spec', got)}: reshard it, or call inside jax.shard_map"
            " (docs/devices.md)."
        )


def _axes(sizes: Any, entry: Any) -> tuple[str, ...]:
    """The mesh axes with more than one device in an entry of a PartitionSpec."""
    names = (entry,) if isinstance(entry, str) else entry or ()
    return tuple(name for name in names if sizes[name] > 1)


def _as_split(split: _Split, x: Any) -> Any:
    """x with this split. Raises NotImplementedError if that needs more than slicing."""
    if AxisType.Explicit in split.mesh.axis_types:
        sharding = jax.typeof(x).sharding
        if any(sharding.spec):
            split.check(sharding, jnp.ndim(x))
        return jax.sharding.reshard(x, NamedSharding(split.mesh, split.spec))
    if isinstance(x, jax.core.Tracer):
        return _seen_by_xla(split, x)
    if isinstance(x, jax.Array) and len(x.sharding.device_set) > 1:
        split.check(x.sharding, x.ndim)
    return x


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _with_gradient_as_split(split: _Split, x: jax.Array) -> jax.Array:
    return x


@_with_gradient_as_split.defjvp
def _(split: _Split, primals: Any, tangents: Any) -> Any:
    moved = linear_call(lambda _, t: t, lambda _, d: _as_split(split, d), (), *tangents)
    return _with_gradient_as_split(split, *primals), moved


def _partition(split: _Split, mesh: Any, arguments: Any, results: Any) -> Any:
    (x,) = arguments
    if x.sharding is not None:  # GSPMD has none for an array that every device has
        split.check(x.sharding, len(x.shape))
    want = NamedSharding(mesh, split.spec)
    return mesh, lambda x: x, want, (want,)


def _rule(split: _Split, mesh: Any, arguments: Any, results: Any) -> str:
    """The Shardy rule: the splits of argument and result are independent."""
    names = [[f"{side}{i}" for i in range(len(arguments[0].shape))] for side in "xy"]
    return " -> ".join(map(" ".join, names))


_partitioned = partitionable(
    lambda split, x: x,
    num_static=1,
    partition=_partition,
    infer=lambda split, mesh, *_: NamedSharding(mesh, split.spec),
    sharding_rule=_rule,
)
_jitted = jax.jit(_partitioned, static_argnums=(0,))  # jit provides the array's mesh
_seen_by_xla = jax.custom_jvp(_jitted, nondiff_argnums=(0,))
_seen_by_xla.defjvp(lambda split, primals, tangents: (_seen_by_xla(split, *primals), *tangents))
