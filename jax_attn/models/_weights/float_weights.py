"""Weights of encoders and towers, which files have as floats: a tree of tensors, and reading it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jax_attn.models._products.panels import Panels, to_panels
from jax_attn.models._weights.protocols import CheckpointConfig
from jax_attn.models._weights.tensors import Parts, Shape
from jax_attn.models._weights.weight_files import Expected, FileTensors, open_tensors, weights_dtype
from jax_attn.models._weights.weights import Params


@dataclasses.dataclass(frozen=True)
class Weight:
    """A weight: tensors of the files, side by side along their first axis.

    parts: their names, without the files' prefix, and torch's shapes.
    change: from torch's layout to that in memory; matrices become [inputs, outputs].
    """

    parts: Parts
    change: Callable[[np.ndarray], np.ndarray] = np.transpose


WeightTree: TypeAlias = dict[str, Any]
"""Params with a Weight for each array."""


def table(name: str, *shape: int) -> Weight:
    """A weight that is a tensor of the files as it is."""
    return Weight({name: shape}, np.asarray)


def tree_shapes(tree: WeightTree) -> dict[str, Shape]:
    """Returns the shape of every tensor by its name, without the files' prefix."""
    leaves = jax.tree.leaves(tree, is_leaf=_is_weight)
    return {name: shape for leaf in leaves for name, shape in leaf.parts.items()}


def load_tree(
    directory: str | Path,
    config: CheckpointConfig,
    tree: WeightTree,
    is_other: Callable[[str], bool],
    dtype: jax.typing.DTypeLike = "bfloat16",
    progress: Callable[[int, int], None] | None = None,
    aliases: tuple[tuple[str, str], ...] = (),
    in_panels: bool = False,
) -> Params:
    """Reads the weights of a tree, as weights.load_params does.

    is_other: whether a tensor that is no weight, by its name in the tree's terms, may be there.
    aliases: see ModelConfig.
    in_panels: matrices of layers, which `product` multiplies, are Panels.
    """
    dtype = weights_dtype(dtype)
    with contextlib.ExitStack() as stack:
        expected = _Expected(config, tree_shapes(tree), is_other, aliases)
        files = open_tensors(stack, directory, expected, progress)

        def read(path: tuple[Any, ...], weight: Weight) -> jax.Array | Panels:
            whole = jnp.asarray(weight.change(_joined(files, weight.parts)), dtype)
            if in_panels and path[0].key == "layers" and whole.ndim == 2:
                return to_panels(whole)
            # Wait: the source of a running copy stays in memory.
            return jax.block_until_ready(whole)

        params: Params = jax.tree.map_with_path(read, tree, is_leaf=_is_weight)
        return params


def _is_weight(node: Any) -> bool:
    return isinstance(node, Weight)


def _joined(files: FileTensors, parts: Parts) -> np.ndarray:
    tensors = [np.asarray(files[name]) for name in parts]
    if len(tensors) == 1:
        return tensors[0]
    return np.concatenate([np.atleast_1d(tensor) for tensor in tensors])


class _Expected(Expected):
    def __init__(
        self,
        config: CheckpointConfig,
        shapes: dict[str, Shape],
        is_other: Callable[[str], bool],
        aliases: tuple[tuple[str, str], ...],
    ):
        super().__init__(config, shapes, aliases=aliases)
        self._is_other = is_other

    def is_passed_over(self, name: str) -> bool:
        return self._is_other(name)
