"""Experts over a mesh axis whose devices have tokens and a cache of their own."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_attn as ja
from jax_attn.models._config.config import ModelConfig
from jax_attn.models._layers.decoder import Pages, init_pages, init_states
from jax_attn.models._layers.recurrence import States
from jax_attn.models._layers.tensor_parallel import put_parts
from jax_attn.models._weights.weights import Params


@dataclasses.dataclass(frozen=True)
class ExpertParallel:
    """How experts are spread over a mesh axis while everything else is by data: each device has
    tokens, plans, pages and states of its own, and all weights but those of other devices' experts.

    whole: the model's config. `config` is that of a device: use it for `attention_specs`, and for
        `forward` inside shard_map over the axis.

    The rows of a layer's tokens go to the devices of their experts by one all-to-all, and come back
    by another. Nothing is dropped: what a device sends beyond the capacity of a round goes in
    further rounds. There is no other collective. All devices have to run equally many steps of the
    same shapes, some perhaps without tokens.

    TensorParallel with `exchanges_experts` has the same exchange, with attention by heads.

    Raises ValueError for a model without experts, and for an axis that does not divide them.
    """

    whole: ModelConfig
    mesh: jax.sharding.Mesh
    axis_name: str

    def __post_init__(self) -> None:
        experts = self.whole.experts
        if experts is None:
            raise ValueError(
                "ExpertParallel: whole: expected a model with experts, got"
                f" {self.whole.family}; use data parallelism alone."
            )
        if experts.count % self.size:
            raise ValueError(
                f"ExpertParallel: mesh: expected experts in a number that the {self.size} devices"
                f" of axis {self.axis_name!r} divide, got {experts.count}; use fewer devices."
            )

    @property
    def size(self) -> int:
        """The number of devices of the axis."""
        return int(self.mesh.shape[self.axis_name])

    @functools.cached_property
    def config(self) -> ModelConfig:
        """The config of one device's part."""
        return dataclasses.replace(self.whole, experts_axis=self.axis_name)

    @property
    def pages_spec(self) -> P:
        """The sharding of k_pages and v_pages: each device has pages of its own."""
        return P(None, self.axis_name)

    states_spec = pages_spec  # slots of its own

    def init_pages(
        self, specs: tuple[ja.AttentionSpec, ...], num_pages: int
    ) -> tuple[Pages, Pages | None]:
        """Creates pages as `models.init_pages`, num_pages on each device."""
        made: tuple[Pages, Pages | None] = self._on_devices(
            lambda: init_pages(self.config, specs, num_pages * self.size)
        )
        return made

    def init_states(self, num_slots: int, dtype: jax.typing.DTypeLike) -> States | None:
        """Creates states as `models.init_states`, num_slots on each device."""
        made: States | None = self._on_devices(
            lambda: init_states(self.config, num_slots * self.size, dtype)
        )
        return made

    def _on_devices(self, make: Any) -> Any:
        return jax.jit(make, out_shardings=NamedSharding(self.mesh, self.pages_spec))()

    def split_params(self, params: Params) -> Params:
        """Returns the weights as sharded arrays. Each device receives only its part."""

        def put(path: Any, x: Any) -> jax.Array:
            names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
            # The order of rows is the same in all experts.
            is_order = getattr(path[-1], "name", None) == "order"
            is_split = names[-1].startswith(("expert_gate_up", "expert_down")) and not is_order
            return put_parts(x, self.mesh, self.axis_name, 0 if is_split else None)

        split: Params = jax.tree_util.tree_map_with_path(put, params)
        return split
