"""How vmap, gradients and XLA's partitioner treat custom calls, which they cannot look into."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def refusing(
    op: str, call: Callable[..., Any], *, vmap: str, gradients: str | None = None
) -> Callable[..., Any]:
    """`call(*arrays, static)` that raises NotImplementedError under vmap and differentiation.

    op: the name of the operation in the message.
    vmap, gradients: the end of the message: what to do instead. gradients None: nothing to refuse,
        because no result is a float.
    Arrays may be None.
    """

    def refuse(transformation: str, advice: str) -> Any:
        raise NotImplementedError(f"{op}: {transformation}: not supported; {advice}.")

    def wrapped(*args: Any) -> Any:
        *arrays, static = args
        present = [a for a in arrays if a is not None]

        @jax.custom_batching.custom_vmap
        def flat(*operands: jax.Array) -> Any:
            rest = iter(operands)
            return call(*(None if a is None else next(rest) for a in arrays), static)

        flat.def_vmap(lambda *_: refuse("vmap", vmap))
        if gradients is None:
            return flat(*present)
        differentiable = jax.custom_jvp(flat)
        differentiable.defjvp(lambda *_: refuse("gradients", gradients))
        return differentiable(*present)

    return wrapped


class Axes(NamedTuple):
    """Names for the axes of a function's arrays, and the axes along which work may be split."""

    names: str  # "b t (h g) d, ... -> ...": of (h g), h is the major part
    split: tuple[str, ...]  # parts along these axes are independent of each other
    sizes: dict[str, int] = {}  # of the minor parts, by name

    def arrays(self) -> tuple[list[list[tuple[str, int]]], list[list[tuple[str, int]]]]:
        """Of each axis of all arguments, then of all results: (name of its major part, size of its
        minor part)."""

        def read(array: str) -> list[tuple[str, int]]:
            found = re.findall(r"\((\w+) (\w+)\)|(\w+)", array)
            return [(major or whole, self.sizes.get(minor, 1)) for major, minor, whole in found]

        arguments, results = self.names.split("->")
        return [read(x) for x in arguments.split(",")], [read(x) for x in results.split(",")]


def partitioned(
    op: str,
    call: Callable[..., Any],
    axes: Callable[..., Axes],
    *,
    num_static: int = 0,
    per_device: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """`call(*static, *arrays)` that runs on each device of a mesh for the parts that are there.

    op: the name of the operation in messages.
    axes(*static): the Axes of the arrays and of the tuple of results.
    num_static: how many of the arguments are static; they come first.
    per_device: what a device does with its parts. None: `call`.

    Without a mesh, and inside shard_map, it is `call` and nothing else. Arrays that are split along
    other axes are gathered by XLA; on a mesh of explicit axes they raise ValueError.
    """
    part = per_device or call
    static_argnums = tuple(range(num_static))
    whole = custom_partitioning(call, static_argnums=static_argnums)

    def partition(*args: Any) -> Any:
        *static, mesh, arguments, results = args
        about = axes(*static)
        of_arguments, of_results = about.arrays()
        arrays = [*jax.tree.leaves(results), *jax.tree.leaves(arguments)]
        specs = _specs(about, mesh, zip(of_results + of_arguments, arrays, strict=True))
        result_shardings, argument_shardings = (
            tuple(NamedSharding(mesh, spec) for spec in _partition_specs(side, specs))
            for side in (of_results, of_arguments)
        )
        return mesh, functools.partial(part, *static), result_shardings, argument_shardings

    def sharding_rule(*args: Any) -> Any:
        about = axes(*args[:num_static])
        factors = dict.fromkeys(re.findall(r"\w+", about.names))
        together = tuple(name for name in factors if name not in about.split)
        return about.names, about.sizes | {"need_replication_factors": together}

    whole.def_partition(partition=partition, sharding_rule=sharding_rule)

    @functools.partial(jax.jit, static_argnums=static_argnums)  # which knows of the arrays' mesh
    def on_mesh(*args: Any) -> Any:
        static, arrays = args[:num_static], args[num_static:]
        return on_explicit_mesh(
            op,
            functools.partial(part, *static),
            axes(*static),
            otherwise=functools.partial(whole, *static),
        )(*arrays)

    def wrapped(*args: Any) -> Any:
        is_manual = bool(jax.sharding.get_abstract_mesh().manual_axes)
        return (call if is_manual else on_mesh)(*args)

    return wrapped


def on_explicit_mesh(
    op: str, part: Callable[..., Any], about: Axes, *, otherwise: Callable[..., Any]
) -> Callable[..., Any]:
    """`part(*arrays)` on each device of a mesh whose axes are explicit; else `otherwise(*arrays)`.

    Raises ValueError, when called, for arrays that are split along other axes than `about.split`,
    or not alike.
    """

    def call(*arrays: jax.Array) -> Any:
        types = [jax.typeof(x) for x in arrays]
        meshes = [t.sharding.mesh for t in types if any(t.sharding.spec)]
        if not meshes:
            return otherwise(*arrays)
        of_arguments, of_results = about.arrays()
        specs = _specs(about, meshes[0], zip(of_arguments, types, strict=True))
        in_specs, out_specs = (
            tuple(_partition_specs(side, specs)) for side in (of_arguments, of_results)
        )
        for t, axes, spec in zip(types, of_arguments, in_specs, strict=True):
            if t.sharding.spec != spec:
                names = " ".join(name for name, _ in axes)
                raise ValueError(
                    f"{op}: sharding: expected arrays split alike, and along"
                    f" {' and '.join(about.split)} alone, got {t.sharding.spec} of [{names}],"
                    f" where {spec} would fit; reshard it."
                )
        return jax.shard_map(
            part, mesh=meshes[0], in_specs=in_specs, out_specs=out_specs, check_vma=False
        )(*arrays)

    return call


def _specs(
    about: Axes, mesh: Any, arrays: Iterable[tuple[list[tuple[str, int]], Any]]
) -> dict[str, Any]:
    """The axes of the mesh over which each name is split, from the first array that splits it."""
    specs: dict[str, Any] = {}
    for axes, array in arrays:
        for (name, minor), size, spec in zip(axes, array.shape, array.sharding.spec, strict=False):
            over = (spec,) if isinstance(spec, str) else spec or ()
            is_even = size // minor % math.prod(mesh.shape[axis] for axis in over) == 0
            if over and is_even and name in about.split:
                specs.setdefault(name, spec)
    return specs


def _partition_specs(array_axes: list[list[tuple[str, int]]], specs: dict[str, Any]) -> list[P]:
    return [P(*(specs.get(name) for name, _ in axes)) for axes in array_axes]
