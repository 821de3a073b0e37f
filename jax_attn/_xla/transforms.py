"""Rules for custom calls under vmap, differentiation and XLA's partitioner."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.interpreters import ad
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def refusing(
    op: str, call: Callable[..., Any], *, vmap: str, gradients: str | None = None
) -> Callable[..., Any]:
    """Wrap `call(operands, static)` to raise NotImplementedError under vmap and differentiation.

    op: the name of the operation in the message.
    vmap, gradients: the end of the message: what to do instead. gradients None: nothing to refuse,
        because no result is a float.
    operands: any tree of arrays. Arrays without elements are made inside the call: as operands they
        crash the compiler of jax 0.11 in a shard_map that is not under jit.
    """

    def refuse(transformation: str, advice: str) -> Any:
        raise NotImplementedError(f"{op}: {transformation}: not supported; {advice}.")

    def wrapped(operands: Any, static: Any) -> Any:
        arrays, tree = jax.tree.flatten(operands)
        types = [jax.typeof(a) for a in arrays]
        present = [a for a, t in zip(arrays, types, strict=True) if t.size]

        @jax.custom_batching.custom_vmap
        def flat(*present: jax.Array) -> Any:
            rest = iter(present)
            given = [next(rest) if t.size else jnp.zeros(t.shape, t.dtype) for t in types]
            return call(jax.tree.unflatten(tree, given), static)

        flat.def_vmap(lambda *_: refuse("vmap", vmap))
        if gradients is None:
            return flat(*present)
        differentiable = jax.custom_jvp(flat)
        differentiable.defjvp(lambda *_: refuse("gradients", gradients))
        return differentiable(*present)

    return wrapped


def varying_alike(arrays: Any) -> Any:
    """A tree of arrays that all vary over the same axes of a shard_map, those of any of them.

    Inside a shard_map with check_vma=True the gradient of an array must vary over the axes of the
    array. A custom rule gives gradients that vary as all operands do, so operands are made alike
    first. JAX then adds up the gradient over the axes over which the array did not vary.

    Elsewhere it returns the arrays.
    """
    varying = [jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(arrays)]
    names = frozenset[str]().union(*varying)

    def cast(x: Any) -> Any:
        missing = names - jax.typeof(x).manual_axis_type.varying
        return lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x

    return jax.tree.map(cast, arrays)


def jvp_of(call: Callable[..., Any], primals: Any, tangents: Any, /, **static: Any) -> Any:
    """The rule of ad.primitive_jvps for a primitive that computes `call(*primals, **static)`."""
    is_zero = [isinstance(t, ad.Zero) for t in tangents]

    def run(*varying: jax.Array) -> Any:
        rest = iter(varying)
        arrays = [x if z else next(rest) for x, z in zip(primals, is_zero, strict=True)]
        return call(*arrays, **static)

    varying = [x for x, z in zip(primals, is_zero, strict=True) if not z]
    return jax.jvp(run, varying, [t for t in tangents if not isinstance(t, ad.Zero)])


# The exceptions that the partitioner's callbacks have raised, newest last, by their text.
_refusals: dict[str, Exception] = {}
_MOST_REFUSALS = 64


def _kept(callback: Callable[..., Any]) -> Callable[..., Any]:
    """A callback of XLA's partitioner whose exceptions reach the caller of the compiler.

    XLA turns an exception into a JaxRuntimeError that begins with INTERNAL and ends with the text
    of a traceback.
    """

    def called(*args: Any) -> Any:
        try:
            return callback(*args)
        except Exception as error:
            _refusals[str(error)] = copy.copy(error)  # without the frames
            while len(_refusals) > _MOST_REFUSALS:
                del _refusals[next(iter(_refusals))]
            raise

    return called


def _raised_by_callback(error: Exception) -> Exception | None:
    """The exception of a callback that XLA's error reports, as a new one; None: another error."""
    text = str(error)
    if "custom_partitioner" not in text:
        return None
    for sentence, refusal in reversed(list(_refusals.items())):
        if sentence and sentence in text:
            return copy.copy(refusal)
    return None


def _report_refusals() -> None:
    """Let JAX raise exceptions of the partitioner's callbacks as they are.

    JAX has no public name for this. Without it, the errors are those of XLA, with the same
    sentence in them.
    """
    with contextlib.suppress(ImportError, AttributeError):
        from jax._src import compiler

        compiler.register_xla_runtime_error_handler(_raised_by_callback)


_report_refusals()


def partitionable(
    call: Callable[..., Any],
    *,
    num_static: int,
    partition: Callable[..., Any],
    infer: Callable[..., Any],
    sharding_rule: Callable[..., Any],
) -> Callable[..., Any]:
    """jax.experimental's custom_partitioning of `call(*static, *arrays)`, for both partitioners.

    partition(*static, mesh, arguments, results): as there. Its exceptions reach the user.
    infer(*static, mesh, arguments, results): the shardings of the results for GSPMD, which asks
        more than once and before it has decided on those of the arguments. It must not raise.
    sharding_rule(*static, mesh, types, result_types): the same for Shardy.
    """

    @_kept
    def partition_and_keep(*args: Any) -> Any:
        mesh, part, *shardings = partition(*args)
        return mesh, _kept(part), *shardings

    whole = custom_partitioning(call, static_argnums=tuple(range(num_static)))
    whole.def_partition(
        partition=partition_and_keep,
        infer_sharding_from_operands=_kept(infer),
        sharding_rule=sharding_rule,
    )

    def called(*args: Any) -> Any:
        # In jax.ensure_compile_time_eval constants are arrays even here, inside of jit, and
        # custom_partitioning asserts that there are none.
        is_eager = not isinstance(jnp.zeros(()), jax.core.Tracer)
        is_folding = is_eager and any(isinstance(x, jax.core.Tracer) for x in args)
        return (call if is_folding else whole)(*args)

    return called


def _partition_spec(array: Any) -> Any:
    """The PartitionSpec of an array that a partitioner describes; P() while GSPMD has none."""
    return P() if array.sharding is None else array.sharding.spec


class Axes(NamedTuple):
    """Names for the axes of a function's arrays, and the axes along which work may be split."""

    names: str  # "b t (h g) d, ... -> ...": of (h g), h is the major part
    split: tuple[str, ...]  # parts along these axes are independent of each other
    sizes: dict[str, int] = {}  # name of a minor part -> its size

    def arrays(self) -> tuple[list[list[tuple[str, int]]], list[list[tuple[str, int]]]]:
        """The axes of all arguments, and those of all results.

        An axis is (name of its major part, size of its minor part).
        """

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
    """Wrap `call(*static, *arrays)` to run on each device of a mesh with the device's parts.

    op: the name of the operation in messages.
    axes(*static): the Axes of the arrays and of the tuple of results.
    num_static: number of leading arguments that are static.
    per_device: the function that a device runs on its parts. None: `call`.

    Without a mesh, and inside shard_map, the result is just `call`. Nothing is gathered: arrays
    that are split along other axes, or differently, raise ValueError on a mesh of explicit axes. If
    only XLA knows the sharding, its compilation fails with the same sentence.
    """
    part = per_device or call

    def partition(*args: Any) -> Any:
        *static, mesh, arguments, results = args
        about = axes(*static)
        of_arguments, of_results = about.arrays()
        arrays = [*jax.tree.leaves(results), *jax.tree.leaves(arguments)]
        specs = _specs(about, mesh, zip(of_results + of_arguments, arrays, strict=True))
        for array, of_array in zip(jax.tree.leaves(arguments), of_arguments, strict=True):
            _check_fits(op, about, of_array, _partition_spec(array), specs, is_whole_fine=True)
        result_shardings, argument_shardings = (
            tuple(NamedSharding(mesh, spec) for spec in _partition_specs(side, specs))
            for side in (of_results, of_arguments)
        )
        return mesh, functools.partial(part, *static), result_shardings, argument_shardings

    def infer(*args: Any) -> Any:
        *static, mesh, arguments, _ = args
        about = axes(*static)
        of_arguments, of_results = about.arrays()
        specs = _specs(about, mesh, zip(of_arguments, jax.tree.leaves(arguments), strict=True))
        return tuple(NamedSharding(mesh, spec) for spec in _partition_specs(of_results, specs))

    def sharding_rule(*args: Any) -> Any:
        """The Shardy rule.

        Axes that may not be split get unique names, so that XLA does not reshard them before
        `partition` checks them.
        """
        about, numbers = axes(*args[:num_static]), itertools.count()
        known = {*about.split, *about.sizes}

        def own(name: re.Match[str]) -> str:
            return name[0] if name[0] in known else f"{name[0]}{next(numbers)}"

        return re.sub(r"\w+", own, about.names), about.sizes

    whole = partitionable(
        call, num_static=num_static, partition=partition, infer=infer, sharding_rule=sharding_rule
    )

    # jit provides the arrays' mesh
    @functools.partial(jax.jit, static_argnums=tuple(range(num_static)))
    def on_mesh(*args: Any) -> Any:
        static, arrays = args[:num_static], args[num_static:]
        return on_explicit_mesh(
            op,
            functools.partial(part, *static),
            axes(*static),
            otherwise=functools.partial(whole, *static),
        )(*arrays)

    def wrapped(*args: Any) -> Any:
        is_manual = is_in_shard_map(op, args[num_static:])
        return (call if is_manual else on_mesh)(*args)

    return wrapped


def on_explicit_mesh(
    op: str, part: Callable[..., Any], about: Axes, *, otherwise: Callable[..., Any]
) -> Callable[..., Any]:
    """Call `part(*arrays)` on each device if the mesh axes are explicit, else `otherwise(*arrays)`.

    Raises ValueError, when called, for arrays that are split along axes not in `about.split`, or
    differently from each other.
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
        for t, axes in zip(types, of_arguments, strict=True):
            # An array without gradients (a mask, lengths) may be whole: nothing is added up.
            is_whole_fine = not jnp.issubdtype(t.dtype, jnp.floating)
            _check_fits(op, about, axes, t.sharding.spec, specs, is_whole_fine=is_whole_fine)
        arrays = placed(arrays, meshes[0], in_specs)
        return jax.shard_map(
            part, mesh=meshes[0], in_specs=in_specs, out_specs=out_specs, check_vma=False
        )(*arrays)

    return call


def is_in_shard_map(op: str, arrays: Any) -> bool:
    """Whether the call is inside of a shard_map, where each device runs it on its parts.

    Raises NotImplementedError if the shard_map leaves an explicit axis over which an array is
    split: the custom call would gather it, and its gradients would be of another type. XLA gathers
    arrays over axes that are left to it.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    for spec in (jax.typeof(x).sharding.spec for x in jax.tree.leaves(arrays) if manual):
        if any(spec):
            raise NotImplementedError(
                f"{op}: sharding: expected arrays that are not split over axes other than those of"
                f" the jax.shard_map around the call, {tuple(manual)}, got {spec}; make those axes"
                " manual, too, by axis_names of shard_map."
            )
    return bool(manual)


def placed(arrays: Iterable[Any], mesh: Any, specs: Iterable[P]) -> tuple[Any, ...]:
    """The arrays on an explicit mesh, split as the specs say.

    The mesh is in the sharding, because jax.set_mesh may not have been called.
    """
    return tuple(
        jax.sharding.reshard(x, NamedSharding(mesh, spec))
        for x, spec in zip(arrays, specs, strict=True)
    )


@dataclasses.dataclass(frozen=True)
class Operand:
    """A description of an array in a call that may be split by head over a mesh."""

    name: str
    ndim: int
    head_axis: int | None  # None: every device has the whole array
    heads: int  # of one device, along head_axis


def operand_of(spec: Any, name: str, array: Any, head_axis: int | None, heads: int) -> Operand:
    """The Operand that describes an array of a call.

    spec: the AttentionSpec of one device. head_axis: may be negative.
    """
    if not array.size or (spec.mla and heads == spec.num_kv_heads):
        head_axis = None
    return Operand(name, array.ndim, None if head_axis is None else head_axis % array.ndim, heads)


@dataclasses.dataclass(frozen=True)
class HeadSplit:
    """How the arrays of a call are split by head. One plan, for one part, serves all parts."""

    spec: Any  # the AttentionSpec of one part
    operands: Any  # a tree of Operand, like that of the arrays
    results: tuple[Operand, ...]
    num_parts: int

    @property
    def given(self) -> tuple[Operand, ...]:
        return tuple(jax.tree.leaves(self.operands))

    def partition_specs(self, operands: tuple[Operand, ...], over: Any) -> tuple[P, ...]:
        """PartitionSpecs with the heads split over the mesh axes `over`, which may be none."""
        return tuple(
            P() if x.head_axis is None else P(*[None] * x.head_axis, over) for x in operands
        )

    def over(self, op: str, mesh: Any, specs: Iterable[Any]) -> Any:
        """The mesh axes over which heads are split.

        specs: the PartitionSpec of each given operand. Raises NotImplementedError for any other
            split, which XLA would gather.
        """
        found: Any = None
        for operand, spec in zip(self.given, specs, strict=True):
            for axis, entry in enumerate(spec):
                if not entry or math.prod(mesh.shape[a] for a in _names(entry)) == 1:
                    continue
                is_head_axis = self.num_parts > 1 and axis == operand.head_axis
                if not is_head_axis or _names(found or entry) != _names(entry):
                    self.refuse(op, operand, spec)
                found = entry
        size = math.prod(mesh.shape[a] for a in _names(found)) if found else 1
        if size != self.num_parts:
            self.refuse(op, self.given[0], P(*[None] * (self.given[0].head_axis or 0), found))
        return found

    def first_over(self, mesh: Any, specs: Iterable[Any]) -> Any:
        """The mesh axes over which the first array that is split has its heads; None: no array."""
        for operand, spec in zip(self.given, specs, strict=True):
            entries = [*spec, *[None] * operand.ndim]
            entry = None if operand.head_axis is None else entries[operand.head_axis]
            if entry and math.prod(mesh.shape[a] for a in _names(entry)) == self.num_parts > 1:
                return entry
        return None

    def refuse(self, op: str, operand: Operand, spec: Any) -> NoReturn:
        expected = "an array that is not split"
        if operand.head_axis is not None:
            one, count = operand.heads, self.num_parts
            expected = (
                f"{one} heads, as the plan's spec has, on each of {count} devices"
                if count > 1
                else "an array that is not split, or heads split and a spec of one device's heads"
            )
        raise NotImplementedError(
            f"{op}: {operand.name}: expected {expected}, got {spec}: split only the axis of heads,"
            " or use jax.shard_map (docs/devices.md)."
        )

    def rule(self) -> tuple[str, dict[str, int]]:
        """The Shardy rule: heads are split alike in all arrays; other axes are independent."""
        sizes = {"n": self.num_parts} if self.num_parts > 1 else {}
        count = itertools.count()

        def axes(operand: Operand) -> str:
            names = [f"a{next(count)}" for _ in range(operand.ndim)]
            if operand.head_axis is not None and self.num_parts > 1:
                minor = names[operand.head_axis]
                if operand.heads == 1:
                    names[operand.head_axis] = "n"
                else:
                    names[operand.head_axis] = f"(n {minor})"
                    sizes[minor] = operand.heads
            return " ".join(names)

        sides = (", ".join(map(axes, side)) for side in (self.given, self.results))
        rule = " -> ".join(sides)
        # Shardy takes sizes only for factors that are nowhere a whole dimension.
        whole = set(re.sub(r"\([^)]*\)", "", rule).replace(",", " ").split())
        return rule, {name: size for name, size in sizes.items() if name not in whole}


def _names(entry: Any) -> tuple[str, ...]:
    """The mesh axes of an entry of a PartitionSpec."""
    return (entry,) if isinstance(entry, str) else tuple(entry)


def over_heads(op: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Turn `call(operands, spec)` into a function (operands, split) for arrays split by head.

    operands: a tree of arrays, like split.operands.
    call: returns a tuple of arrays, described by split.results.

    Without a mesh, and inside shard_map, it runs `call` with all heads. On a mesh each device runs
    `call` for its own heads. Arrays with another split raise NotImplementedError when called; if
    only XLA knows the split, its compilation fails with the same sentence.
    """

    def one_part(split: HeadSplit, *arrays: jax.Array) -> Any:
        operands = jax.tree.unflatten(jax.tree.structure(split.operands), arrays)
        return call(operands, split.spec)

    def all_parts(split: HeadSplit, *arrays: jax.Array) -> Any:
        """The function that XLA partitions. If it does not, the parts run one after the other."""
        if split.num_parts == 1:
            return one_part(split, *arrays)

        def of_part(index: int, operand: Operand, x: jax.Array) -> jax.Array:
            if operand.head_axis is None:
                return x
            begin = index * operand.heads
            return lax.slice_in_dim(x, begin, begin + operand.heads, axis=operand.head_axis)

        done = [
            one_part(split, *(of_part(i, *pair) for pair in zip(split.given, arrays, strict=True)))
            for i in range(split.num_parts)
        ]
        return tuple(
            jnp.concatenate(pieces, axis=result.head_axis)
            for result, pieces in zip(split.results, zip(*done, strict=True), strict=True)
        )

    def shardings(
        split: HeadSplit, mesh: Any, over: Any, side: tuple[Operand, ...]
    ) -> tuple[NamedSharding, ...]:
        return tuple(NamedSharding(mesh, spec) for spec in split.partition_specs(side, over))

    def partition(split: HeadSplit, mesh: Any, arguments: Any, results: Any) -> Any:
        over = split.over(op, mesh, map(_partition_spec, jax.tree.leaves(arguments)))
        of_sides = (shardings(split, mesh, over, side) for side in (split.results, split.given))
        return mesh, functools.partial(one_part, split), *of_sides

    def infer(split: HeadSplit, mesh: Any, arguments: Any, results: Any) -> Any:
        over = split.first_over(mesh, map(_partition_spec, jax.tree.leaves(arguments)))
        return shardings(split, mesh, over, split.results)

    whole = partitionable(
        all_parts,
        num_static=1,
        partition=partition,
        infer=infer,
        sharding_rule=lambda split, *_: split.rule(),
    )

    @functools.partial(jax.jit, static_argnums=0)
    def on_mesh(split: HeadSplit, *arrays: jax.Array) -> Any:
        types = [jax.typeof(x).sharding for x in arrays]
        explicit = [t.mesh for t in types if any(t.spec)]
        if not explicit:
            return whole(split, *arrays)
        over = split.over(op, explicit[0], [t.spec for t in types])
        in_specs = split.partition_specs(split.given, over)
        # Each device takes its part of arrays that every device has.
        arrays = placed(arrays, explicit[0], in_specs)
        return jax.shard_map(
            functools.partial(one_part, split),
            mesh=explicit[0],
            in_specs=in_specs,
            out_specs=split.partition_specs(split.results, over),
            check_vma=False,
        )(*arrays)

    def wrapped(operands: Any, split: HeadSplit) -> Any:
        is_manual = is_in_shard_map(op, operands)
        return (one_part if is_manual else on_mesh)(split, *jax.tree.leaves(operands))

    return wrapped


def check_split(op: str, split: HeadSplit, operands: Any) -> None:
    """Raise NotImplementedError for concrete arrays with another split than by head."""
    arrays = jax.tree.leaves(operands)
    if any(isinstance(x, jax.core.Tracer) for x in arrays):
        return  # traced: over_heads or XLA checks the split
    shardings = [x.sharding for x in arrays]
    named = [s for s in shardings if isinstance(s, NamedSharding) and s.num_devices > 1]
    if named and not jax.sharding.get_abstract_mesh().manual_axes:
        specs = [s.spec if isinstance(s, NamedSharding) else P() for s in shardings]
        split.over(op, named[0].mesh, specs)


def has_mesh(array: Any) -> bool:
    """Whether the array is known to be on a mesh of several devices, split or replicated."""
    if isinstance(array, jax.core.Tracer):
        sharding = jax.typeof(array).sharding
    else:
        sharding = getattr(array, "sharding", None)
    return isinstance(sharding, NamedSharding) and sharding.mesh.size > 1


def _check_fits(
    op: str,
    about: Axes,
    axes: list[tuple[str, int]],
    got: Any,
    specs: dict[str, Any],
    *,
    is_whole_fine: bool = False,
) -> None:
    """Raise ValueError for an array with another split than in `specs`.

    is_whole_fine: arrays that are not split are allowed; each device takes its part.
    """
    fitting = P(*(specs.get(name) for name, _ in axes))
    pairs = zip([*got, *[None] * len(axes)], fitting, strict=False)
    if all(a == b or (is_whole_fine and a is None) for a, b in pairs):
        return
    names = " ".join(name for name, _ in axes)
    raise ValueError(
        f"{op}: sharding: expected arrays split alike, and along {' and '.join(about.split)} alone,"
        f" got {got} of [{names}], where {fitting} would fit; reshard it."
    )


def _specs(
    about: Axes, mesh: Any, arrays: Iterable[tuple[list[tuple[str, int]], Any]]
) -> dict[str, Any]:
    """The mesh axes over which each axis name is split, from the first array that splits it."""
    specs: dict[str, Any] = {}
    for axes, array in arrays:
        for (name, minor), size, spec in zip(
            axes, array.shape, _partition_spec(array), strict=False
        ):
            over = (spec,) if isinstance(spec, str) else spec or ()
            is_even = size // minor % math.prod(mesh.shape[axis] for axis in over) == 0
            if over and is_even and name in about.split:
                specs.setdefault(name, spec)
    return specs


def _partition_specs(array_axes: list[list[tuple[str, int]]], specs: dict[str, Any]) -> list[P]:
    return [P(*(specs.get(name) for name, _ in axes)) for axes in array_axes]
