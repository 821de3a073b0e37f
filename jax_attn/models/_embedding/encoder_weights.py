"""An encoder's weights: which tensors of the files they are, and reading them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn.models._weights.protocols import CheckpointConfig
from jax_attn.models._weights.tensors import Parts, Shape
from jax_attn.models._weights.weight_files import Expected, FileTensors, open_tensors, weights_dtype
from jax_attn.models._weights.weights import Params


@dataclasses.dataclass(frozen=True)
class EncoderTensors:
    """The tensors of each weight, without the files' prefix, with torch's shapes.

    A weight of several tensors is their concatenation along the first axis.
    """

    tables: dict[str, Parts]
    layers: list[dict[str, Parts]]
    is_other: Callable[[str], bool]  # whether a tensor that is no weight is for another task
    head: dict[str, Parts] = dataclasses.field(default_factory=dict)

    def shapes(self) -> dict[str, Shape]:
        """Returns the shape of every tensor by its name."""
        weights = [self.tables, self.head, *self.layers]
        return {
            name: shape
            for each in weights
            for parts in each.values()
            for name, shape in parts.items()
        }


class _Expected(Expected):
    def __init__(self, config: CheckpointConfig, tensors: EncoderTensors):
        super().__init__(config, tensors.shapes())
        self._is_other = tensors.is_other

    def is_passed_over(self, name: str) -> bool:
        return name not in self.shapes and self._is_other(name)


def load_params(
    directory: str | Path,
    config: CheckpointConfig,
    tensors: EncoderTensors,
    dtype: jax.typing.DTypeLike = "bfloat16",
    progress: Callable[[int, int], None] | None = None,
) -> Params:
    """Reads the weights, as weights.load_params does.

    Returns the tables, as the files have them; "layers", a dict a layer, and "head" if there is
    one, whose matrices are transposed: [inputs, outputs].
    """
    dtype = weights_dtype(dtype)
    with contextlib.ExitStack() as stack:
        files = open_tensors(stack, directory, _Expected(config, tensors), progress)
        return _make_params(files, tensors, dtype)


def _make_params(
    files: FileTensors, tensors: EncoderTensors, dtype: jax.typing.DTypeLike
) -> Params:
    def make(parts: Parts) -> jax.Array:
        # Wait: the source of a running copy stays in memory.
        whole = np.concatenate([files[name] for name in parts])
        return jax.block_until_ready(jnp.asarray(whole, dtype))

    def turned(weights: dict[str, Parts]) -> Params:
        return {weight: make(parts).T for weight, parts in weights.items()}

    params: Params = {weight: make(parts) for weight, parts in tensors.tables.items()}
    params["layers"] = [turned(layer) for layer in tensors.layers]
    if tensors.head:
        params["head"] = turned(tensors.head)
    return params
