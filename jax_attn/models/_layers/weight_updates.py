"""Weights that change while an engine holds them: from a trainer's arrays to the engine's layout.

The names are those of `Params` (`layers.0.qkv`) or of the model's files
(`model.layers.0.self_attn.q_proj.weight`, with torch's shapes), read as the loader reads them: what
it passes over is passed over. Everything runs on the devices: arrays go from the trainer's mesh to
the engine's without a copy on the host.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_attn.models._config.config import ModelConfig
from jax_attn.models._layers.tensor_parallel import TensorParallel
from jax_attn.models._products.panels import Panels
from jax_attn.models._products.quantized import Quantized
from jax_attn.models._weights.tensors import (
    Parts,
    embed_name,
    file_shapes,
    head_name,
    is_upright,
    layer_prefix,
    layer_tensors,
    outer_tensors,
)
from jax_attn.models._weights.weights import (
    DecoderTensors,
    Params,
    file_order,
    is_vector,
    pack_weight,
    shapes_in_memory,
)

_SHOWN = 3  # names that an error lists


class Target(NamedTuple):
    """A weight of Params. layer: None for those outside of the layers."""

    layer: int | None
    name: str

    def __str__(self) -> str:
        return self.name if self.layer is None else f"layers.{self.layer}.{self.name}"


class Update(NamedTuple):
    """A weight's new value.

    sources: arrays in the layout of Params (one), or of the files: those that make the matrix.
    stack: of the files, and so many experts.
    """

    target: Target
    sources: tuple[jax.Array, ...]
    is_of_files: bool
    stack: int


class WeightUpdates:
    """Checks and converts new weights for an engine that has `params`.

    split: the engine's mesh; None: it has one device.
    """

    def __init__(self, config: ModelConfig, params: Params, split: TensorParallel | None):
        """config: of the whole model. params: as the engine holds them, for formats and devices."""
        self._config, self._split = config, split
        self._held = {
            Target(layer, name): _Held.of(weight) for layer, name, weight in _weights(params)
        }
        # The files may have another head, though the config ties it to the embedding.
        held = dataclasses.replace(config, tie_embeddings="head" not in params)
        self._shapes = {
            Target(layer, name): shape for layer, name, shape in _weights(shapes_in_memory(held))
        }
        self._files = DecoderTensors(held, with_head=True)
        # For each weight its tensors in the files; several sets of them make a stack.
        self._parts = {target: _parts(config, target) for target in self._held}

    def plan(self, params: Any, *, partial: bool = False) -> list[Update]:
        """Checks new weights. Changes nothing.

        params: a pytree of arrays; the names are the keys of its paths, joined by dots, without the
          `value` of flax's variables. numpy arrays are copied to the device.
        partial: weights that are not in `params` stay as they are.
        A head that is tied to the embedding may stand for it, by the name that files have.

        Raises:
          ValueError: a name, a shape or a dtype that does not fit, in one sentence.
        """
        found = named(params)
        names = {full_name: self._files.name(full_name) for full_name in found}
        full_names = {name: full_name for full_name, name in names.items()}
        for full_name, name in names.items():
            if (other := full_names[name]) != full_name:
                raise _error(full_name, f"expected each tensor once, got it as {other}, too")
        given = {name: found[full_name] for name, full_name in full_names.items()}
        if self._config.tie_embeddings:
            self._tie(given)
        updates, used = [], set[str]()
        for target, parts in self._parts.items():
            sets = parts if isinstance(parts, list) else [parts]
            own = given.get(str(target))
            if own is not None:
                used.add(str(target))
                _check_shape(str(target), own, self._shapes[target])
                self._check_plain(target)
                updates.append(Update(target, (own,), False, 0))
                continue
            shapes = {name: shape for each in sets for name, shape in each.items()}
            there = [name for name in shapes if name in given]
            if there and len(there) < len(shapes):
                lacking = next(name for name in shapes if name not in given)
                raise _error(
                    there[0],
                    f"expected with it all tensors that make {target}, got none called {lacking}",
                )
            if not there:
                continue
            for name, shape in shapes.items():
                _check_shape(name, given[name], shape)
            self._check_plain(target)
            used |= set(there)
            stack = len(parts) if isinstance(parts, list) else 0
            updates.append(Update(target, tuple(given[n] for n in shapes), True, stack))
        self._check_names(names, used)
        if not partial and len(updates) < len(self._held):
            done = {update.target for update in updates}
            lacking_weights = [str(target) for target in self._held if target not in done]
            raise _error(
                "params",
                f"expected every weight of the model, got none for {_some(lacking_weights)};"
                " partial=True keeps the old ones",
            )
        return updates

    def _tie(self, given: dict[str, Any]) -> None:
        """A tied head that is there alone is the embedding, as it is in a model's files."""
        embed = embed_name(self._config)
        if "embed" in given or embed in given:
            return
        if head_name(self._config) in given:
            given[embed] = given[head_name(self._config)]
        elif "head" in given:
            raise _error("head", "expected with it embed, which this model's head is tied to")

    def _check_plain(self, target: Target) -> None:
        if self._held[target].is_quantized:
            raise _error(
                str(target), "expected a weight that the engine holds unquantized, got a quantized"
            )

    def _check_names(self, names: Mapping[str, str], used: set[str]) -> None:
        """names: by those that the caller has."""
        unknown = sorted(
            full_name
            for full_name, name in names.items()
            if name not in used and not self._is_passed_over(name)
        )
        if unknown:
            raise _error(
                unknown[0],
                "expected names of the model's weights, as layers.0.qkv, or of its files' tensors,"
                f" as {next(iter(file_shapes(self._config)))}, got {_some(unknown)}; use a filter"
                " or a map of names",
            )

    def _is_passed_over(self, name: str) -> bool:
        is_tied_head = self._config.tie_embeddings and name in (head_name(self._config), "head")
        return is_tied_head or self._files.is_passed_over(name)

    def convert(self, update: Update, *, donate: bool) -> jax.Array | Panels:
        """The weight as the engine holds it, in memory of its own.

        donate: the sources are deleted, and their memory used if layout and devices agree.
        """
        target, held = update.target, self._held[update.target]
        shape = self._shapes[target]
        axis, split_order = None, None
        sharding = None if held.is_panels else held.sharding
        if self._split is not None:
            axis, split_order = self._split.split_of(target.name, len(shape))
            if held.is_panels:
                sharding = self._split.sharding_of(axis)
        make = _converter(
            len(update.sources) if update.is_of_files else 0,
            update.stack,
            is_upright=is_upright(target.name, len(shape) - (update.stack > 0), self._config),
            is_vector=is_vector(target.name),
            axis=axis,
            dtype=held.dtype,
            sharding=sharding,
            donates=donate and split_order is None and self._keeps_memory(update),
        )
        sources = [_moved(source, held.sharding) for source in update.sources]
        config, order = self._config, None
        if target.layer is not None:
            config = config.of(config.layers[target.layer])
        if update.is_of_files:
            order = file_order(target.name, config, shape[-1])
        array = make(sources, order, split_order)
        if donate:
            for source in update.sources:
                if isinstance(source, jax.Array) and not source.is_deleted():
                    source.delete()
        if not held.is_panels:
            return array
        if self._split is None:
            packed = pack_weight(target.name, array, self._config)
        else:
            packed = self._split.pack_weight(target.name, array)
        assert isinstance(packed, Panels)
        return packed

    def _keeps_memory(self, update: Update) -> bool:
        """Whether the engine can use the memory of the sources as it is."""
        held, source = self._held[update.target], update.sources[0]
        if update.is_of_files or held.is_panels or not isinstance(source, jax.Array):
            return False
        return source.dtype == held.dtype and source.sharding.is_equivalent_to(
            held.sharding, source.ndim
        )


class _Held(NamedTuple):
    """How the engine holds a weight."""

    dtype: jnp.dtype
    sharding: jax.sharding.Sharding
    is_panels: bool = False
    is_quantized: bool = False

    @classmethod
    def of(cls, weight: Any) -> _Held:
        array = jax.tree.leaves(weight)[0]
        kinds = isinstance(weight, Panels), isinstance(weight, Quantized)
        return cls(jnp.dtype(array.dtype), array.sharding, *kinds)


def named(params: Any) -> dict[str, Any]:
    """The arrays of a pytree by the keys of their paths, joined by dots.

    flax keeps an array as the `value` of a variable; that key is left out.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=_is_whole)
    return {_SUFFIX.sub("", ".".join(map(_key, path))): leaf for path, leaf in leaves}


_SUFFIX = re.compile(r"\.(?:raw_)?value$")


def _key(entry: Any) -> str:
    for name in ("key", "name", "idx"):
        if hasattr(entry, name):
            return str(getattr(entry, name))
    return str(entry)


def _is_whole(leaf: Any) -> bool:
    return isinstance(leaf, (Panels, Quantized))


def _weights(params: Params) -> Iterable[tuple[int | None, str, Any]]:
    """(layer, name, weight) of Params, or of anything in their form."""
    yield from ((None, name, weight) for name, weight in params.items() if name != "layers")
    for i, layer in enumerate(params["layers"]):
        yield from ((i, name, weight) for name, weight in layer.items())


def _parts(config: ModelConfig, target: Target) -> Parts | list[Parts]:
    """The tensors of a weight by their whole names, with torch's shapes."""
    if target.layer is None:
        return outer_tensors(config)[target.name]

    prefix = layer_prefix(config, target.layer)

    def whole_names(parts: Parts) -> Parts:
        return {prefix + name: shape for name, shape in parts.items()}

    parts = layer_tensors(config, target.layer)[target.name]
    return [whole_names(each) for each in parts] if isinstance(parts, list) else whole_names(parts)


def _check_shape(name: str, array: Any, shape: tuple[int, ...]) -> None:
    if not hasattr(array, "shape") or tuple(array.shape) != tuple(shape):
        got = getattr(array, "shape", type(array).__name__)
        raise _error(name, f"expected an array of shape {tuple(shape)}, got {got}")
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise _error(name, f"expected floating-point numbers, got {array.dtype}")


def _error(name: str, sentence: str) -> ValueError:
    return ValueError(f"update_params: {name}: {sentence}.")


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _moved(source: Any, target: jax.sharding.Sharding) -> jax.Array:
    """The array on the devices of `target`, by copies between devices."""
    if not isinstance(source, jax.Array):
        return jax.device_put(np.asarray(source), _whole(target))
    here = source.sharding
    if isinstance(here, NamedSharding) and isinstance(target, NamedSharding):
        if list(here.mesh.devices.flat) == list(target.mesh.devices.flat):
            return source  # one computation moves its parts
    if not here.is_fully_replicated:
        # Otherwise JAX would copy the parts by way of the host.
        assert isinstance(here, NamedSharding)
        source = _gathered(NamedSharding(here.mesh, P()))(source)
    return jax.device_put(source, _whole(target))


def _whole(sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
    """All of an array on each device of a sharding."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, P())
    return sharding


@functools.lru_cache
def _gathered(sharding: NamedSharding) -> Any:
    return jax.jit(lambda x: x, out_shardings=sharding)


@functools.cache
def _converter(
    num_tensors: int,
    stack: int,
    *,
    is_upright: bool,
    is_vector: bool,
    axis: int | None,
    dtype: jnp.dtype,
    sharding: jax.sharding.Sharding | None,
    donates: bool,
) -> Any:
    """A jitted function (sources, order, split_order) -> a weight in the layout of Params.

    num_tensors: of the files, `stack` sets of them (0: one set); 0: the source has that layout.
    is_upright: the tensors have it too; others are transposed. is_vector: tensors of any shape make
      a vector.
    """

    def make(sources: list[jax.Array], order: Any, split_order: Any) -> jax.Array:
        if num_tensors:
            sources = [x.reshape(-1) for x in sources] if is_vector else sources
            each = num_tensors // (stack or 1)
            sets = [sources[i : i + each] for i in range(0, num_tensors, each)]
            wholes = [jnp.concatenate([x.astype(dtype) for x in one]) for one in sets]
            wholes = wholes if is_upright else [x.swapaxes(-1, -2) for x in wholes]
            array = jnp.stack(wholes) if stack else wholes[0]
        else:
            array = sources[0].astype(dtype)
            if not donates:  # jit may return the same memory, which is the trainer's
                array = jnp.array(array, copy=True)
        if order is not None:
            array = jnp.take(array, order, axis=-1)
        if split_order is not None:
            array = jnp.take(array, split_order, axis=axis)
        return array

    return jax.jit(make, out_shardings=sharding, donate_argnums=0 if donates else ())
