"""Room for a fixed number of adapters, which come and go while a model runs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_attn.models._config.config import ModelConfig
from jax_attn.models._layers.lora import Pools
from jax_attn.models._layers.tensor_parallel import TensorParallel
from jax_attn.models._products.lora import LoraPool
from jax_attn.models._weights.lora_files import ADAPTED, LoraWeights, column_parts
from jax_attn.models._weights.tensors import layer_tensors
from jax_attn.models._weights.weights import file_order


class LoraPools:
    """Memory for `count` adapters of rank up to `max_rank`, and what writes them there.

    split: the engine's mesh; None: it has one device.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: jax.typing.DTypeLike,
        count: int,
        max_rank: int,
        split: TensorParallel | None = None,
    ):
        self._config, self._split = config, split
        self._dtype, self._max_rank = jnp.dtype(dtype), max_rank
        self.count = count
        empty = self._matrices(LoraWeights(0, {}))
        self.tree = jax.tree.structure(empty)
        # Flat, as the device has its weights.
        self.arrays: list[jax.Array] = [
            self._put(np.zeros((count, *x.shape), x.dtype), axis)
            for x, axis in zip(jax.tree.leaves(empty), self._axes(), strict=True)
        ]
        self._write = jax.jit(
            lambda arrays, news, slot: [
                jax.lax.dynamic_update_index_in_dim(x, new, slot, 0)
                for x, new in zip(arrays, news, strict=True)
            ],
            donate_argnums=0,
            out_shardings=None if split is None else [x.sharding for x in self.arrays],
        )
        self.set(0, LoraWeights(0, {}))  # compiles

    @property
    def specs(self) -> list[P]:
        """How a mesh has the arrays."""
        return [x.sharding.spec for x in self.arrays if isinstance(x.sharding, NamedSharding)]

    @staticmethod
    def numbers_per_rank(config: ModelConfig) -> int:
        """The numbers that an adapter of rank 1 has here, on all devices together."""
        numbers = 0
        for layer in range(config.num_layers):
            for name, parts in layer_tensors(config, layer).items():
                if name in ADAPTED and isinstance(parts, dict):
                    depth = next(iter(parts.values()))[1]
                    columns = column_parts(name, layer, config)
                    numbers += sum(num + depth for _, num in columns)
        return numbers

    def set(self, slot: int, weights: LoraWeights) -> None:
        """Makes `weights` the adapter `slot`. No step may be in flight. Compiles nothing."""
        leaves = jax.tree.leaves(self._matrices(weights))
        news = [self._put(x, axis) for x, axis in zip(leaves, self._axes(), strict=True)]
        self.arrays = self._write(self.arrays, news, np.int32(slot))
        jax.block_until_ready(self.arrays)

    def check(self, weights: LoraWeights) -> None:
        """Raises ValueError if the rank is too large."""
        if weights.rank > self._max_rank:
            raise ValueError(
                f"lora: rank: expected at most {self._max_rank}, the --max-lora-rank, got"
                f" {weights.rank}."
            )

    def _matrices(self, weights: LoraWeights) -> Pools:
        """An adapter in the layout of the pools, on the host, for all devices."""
        return [self._layer(weights, layer) for layer in range(self._config.num_layers)]

    def _layer(self, weights: LoraWeights, layer: int) -> dict[str, Any]:
        return {
            name: self._pool(weights, layer, name)
            for name in ADAPTED
            if name in layer_tensors(self._config, layer)
        }

    def _pool(self, weights: LoraWeights, layer: int, name: str) -> Any:
        parts = layer_tensors(self._config, layer)[name]
        assert isinstance(parts, dict)
        outs = [shape[0] for shape in parts.values()]
        depth, columns = next(iter(parts.values()))[1], sum(outs)
        in_memory = column_parts(name, layer, self._config)
        a = np.zeros((len(in_memory), self._max_rank, depth), self._dtype)
        b = np.zeros((self._max_rank, columns), self._dtype)
        ranks = np.zeros(len(in_memory), np.int32)
        begin = 0
        for i, (tensor, out) in enumerate(zip(parts, outs, strict=True)):
            pair = weights.pairs.get((layer, tensor.removesuffix(".weight")))
            if pair is not None:
                rank = len(pair.a)
                for at, (which, _) in enumerate(in_memory):
                    if which == i:
                        a[at, :rank], ranks[at] = pair.a, rank
                b[:rank, begin : begin + out] = pair.b.T
            begin += out
        own = self._config.of(self._config.layers[layer])
        order = file_order(name, own, columns)
        b = b if order is None else b[:, order]
        if self._split is not None:
            axis, split_order = self._split.split_of(name, 2)
            if axis == 1 and split_order is not None:
                b = b[:, split_order]
        return LoraPool(a, b, ranks)  # type: ignore[arg-type]  # of numpy, on the host

    def _axes(self) -> list[int | None]:
        """For each array, the axis that devices share, counted from the end; None: no axis."""
        axes: list[int | None] = []
        for layer in range(self._config.num_layers):
            tensors = layer_tensors(self._config, layer)
            for name in sorted(name for name in ADAPTED if name in tensors):
                axis = None if self._split is None else self._split.split_of(name, 2)[0]
                axes += [-1 if axis == 0 else None, -1 if axis == 1 else None, None]
        return axes

    def _put(self, array: np.ndarray, axis: int | None) -> jax.Array:
        if self._split is None:
            return jnp.asarray(array)
        names = [None] * array.ndim
        if axis is not None:
            names[axis] = self._split.axis_name  # type: ignore[call-overload]
        sharding = NamedSharding(self._split.mesh, P(*names))
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
