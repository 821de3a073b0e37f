"""Tensor parallelism over a mesh axis (Megatron-LM, arXiv 1909.08053): each device has a part of
the heads, the MLPs' columns, the experts and the vocabulary."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_attn as ja
from jax_attn import parallel
from jax_attn.models._config.config import Chunk, LayerKind, ModelConfig
from jax_attn.models._layers import recurrent_split
from jax_attn.models._layers.decoder import init_pages, init_states, train_forward
from jax_attn.models._layers.recurrence import States
from jax_attn.models._products.panels import Panels, to_panels
from jax_attn.models._products.quantized import Quantized
from jax_attn.models._weights.weights import Params, pack_params, packs

_ROWS = ("o", "down", "shared_down")  # split by rows: their results are partial sums
_HEADS = ("q_b", "kv_b", "sinks")  # the last axis is head after head


@dataclasses.dataclass(frozen=True)
class TensorParallel:
    """How a model is split over a mesh axis, and its pages over a second one.

    whole: the model's config. `config` is the config of one device's part: use it for
        `attention_specs`, and for `forward` inside shard_map over the axis. Plans are the same on
        every device.

    A layer has two all-reduces of activations. The embedding has one, and the logits have an
    all-gather. If there are fewer KV heads than devices, KV heads are replicated. If the axis does
    not divide the vocabulary, every device has all of it.

    context_axis_name: a mesh axis over which pages are split into KV shards (parallel.KvShards),
        or None. All devices of that axis have the same weights.
    exchanges_experts: a device routes its part of the tokens alone, and their rows go to the
        experts by all-to-all, see ExpertParallel. Otherwise each device routes all tokens, and
        computes the rows of its own experts.

    Raises ValueError for an axis that does not divide heads, MLPs or experts, for a context
    axis with chunks of attention, and for an exchange of experts without experts.
    """

    whole: ModelConfig
    mesh: jax.sharding.Mesh
    axis_name: str
    context_axis_name: str | None = None
    exchanges_experts: bool = False

    def __post_init__(self) -> None:
        whole, size = self.whole, self.size
        if self.exchanges_experts and whole.experts is None:
            raise ValueError(
                "TensorParallel: exchanges_experts: expected False for a model without experts, got"
                f" True for {whole.family}."
            )
        if self.context_axis_name and any(isinstance(kind.window, Chunk) for kind in whole.kinds):
            raise ValueError(
                "TensorParallel: context_axis_name: expected None for a model with chunks of"
                f" attention, got {self.context_axis_name!r} for {whole.family}; use fewer devices."
            )
        if whole.has_special_layers:
            raise ValueError(
                "TensorParallel: whole: expected layers with the same heads, keys and values of"
                f" their own and no inputs or scales of their own, got {whole.family}; use fewer"
                " devices."
            )
        if whole.num_kv_heads % size and size % whole.num_kv_heads:
            self._refuse("KV heads", whole.num_kv_heads, " or a divisor of theirs")
        sizes = {"query heads": whole.num_qo_heads}
        if whole.experts is None or whole.experts.dense_layers:
            sizes["columns of the MLP"] = whole.intermediate_size
        if whole.experts is not None:
            sizes["experts"] = whole.experts.count
            sizes["columns of the shared experts"] = whole.experts.shared_size
        if whole.recurrent is not None:
            divided, shared = recurrent_split.counts(whole.recurrent)
            sizes |= divided
            for name, count in shared.items():
                if count % size and size % count:
                    self._refuse(name, count, " or a divisor of theirs")
        for name, count in sizes.items():
            if count % size:
                self._refuse(name, count)

    def _refuse(self, name: str, count: int, more: str = "") -> None:
        raise ValueError(
            f"TensorParallel: mesh: expected {name} in a number that the {self.size} devices of"
            f" axis {self.axis_name!r} divide{more}, got {count}; use fewer devices."
        )

    @property
    def size(self) -> int:
        """The number of devices of the axis."""
        return int(self.mesh.shape[self.axis_name])

    @property
    def is_on_cpus(self) -> bool:
        """Whether the mesh is of CPUs, whose products are those of `pack_params`."""
        return bool(self.mesh.devices.flat[0].platform == "cpu")

    @functools.cached_property
    def config(self) -> ModelConfig:
        """The config of one device's part."""

        def own(kind: LayerKind) -> LayerKind:
            if kind.recurrent is None:
                return kind
            sizes = recurrent_split.of_device(kind.recurrent, self.axis_name, self.size)
            return dataclasses.replace(kind, recurrent=sizes)

        return dataclasses.replace(
            self.whole,
            layers=tuple(map(own, self.whole.layers)),
            num_qo_heads=self.whole.num_qo_heads // self.size,
            num_kv_heads=max(1, self.whole.num_kv_heads // self.size),
            heads_axis=self.axis_name,
            splits_vocabulary=self.whole.vocab_size % self.size == 0,
            heads_mesh=self.mesh,
            experts_axis=self.axis_name if self.exchanges_experts else None,
        )

    @property
    def pages_spec(self) -> P:
        """The sharding of k_pages and v_pages: by KV head, and by slot over the context axis.
        Latent rows have one head, which every device has."""
        heads = None if self.whole.latent else self.axis_name
        return P(None, None, self.context_axis_name, heads)

    def kv_shards(self, spec: ja.AttentionSpec) -> parallel.KvShards | None:
        """Returns the KvShards of a spec of `config`; None without a context axis. Raises as
        KvShards does."""
        name = self.context_axis_name
        if name is None:
            return None
        return parallel.KvShards(spec, name, int(self.mesh.shape[name]), self.axis_name)

    def init_pages(
        self, specs: tuple[ja.AttentionSpec, ...], num_pages: int
    ) -> tuple[jax.Array, jax.Array | None]:
        """Creates pages as `models.init_pages`; each device allocates only its own part."""
        times = 1 if self.whole.latent else self.size
        spec = dataclasses.replace(
            specs[0],
            num_qo_heads=specs[0].num_qo_heads * times,
            num_kv_heads=specs[0].num_kv_heads * times,
        )
        sharding = NamedSharding(self.mesh, self.pages_spec)
        make: Any = jax.jit(
            lambda: init_pages(self.config, (spec,), num_pages),
            out_shardings=(sharding, None if self.whole.latent else sharding),
        )
        pages: tuple[jax.Array, jax.Array | None] = make()
        return pages

    @property
    def states_spec(self) -> States | None:
        """The shardings of recurrent states, by v head and by channel; None: there are none."""
        sizes, axis = self.whole.recurrent, self.axis_name
        if sizes is None:
            return None
        conv = None if sizes.conv_shape is None else P(None, None, None, axis)
        return States(conv, None if sizes.rule is None else P(None, None, axis))  # type: ignore[arg-type]

    def init_states(self, num_slots: int, dtype: jax.typing.DTypeLike) -> States | None:
        """Creates states as `models.init_states`; each device allocates only its own part."""
        own = jax.eval_shape(lambda: init_states(self.config, num_slots, dtype))

        def make(x: jax.ShapeDtypeStruct, spec: P) -> jax.Array:
            axis = spec.index(self.axis_name)
            shape = *x.shape[:axis], x.shape[axis] * self.size, *x.shape[axis + 1 :]
            sharding = NamedSharding(self.mesh, spec)
            zeros: Any = jax.jit(lambda: jnp.zeros(shape, x.dtype), out_shardings=sharding)
            made: jax.Array = zeros()
            return made

        states: States | None = jax.tree.map(make, own, self.states_spec)
        return states

    def split_params(self, params: Params, *, packed: bool = False) -> Params:
        """Returns the weights as sharded arrays. Each device receives only its part.

        In a fused matrix such as qkv, each device gets its columns of every part, side by side.

        Traced, in jax.jit, it is differentiable: the gradient of a KV head that several devices
        have is the sum of theirs.

        packed: each device's part is in the layout for CPUs, as `models.pack_params` has it.

        Raises ValueError for a quantized matrix whose groups would be cut.
        """

        def split(path: Any, x: Any) -> Any:
            name = path[-1].key
            axis, order = self.split_of(name, len(x.shape))
            if not isinstance(x, Quantized):
                part = put(x, axis, order)
                return jax.block_until_ready(self.pack_weight(name, part)) if packed else part
            by_rows = axis is not None and axis == len(x.shape) - 2
            groups = x.scales.shape[-2]
            if by_rows and groups > 1 and x.shape[-2] % (self.size * x.group_size):
                self._refuse(f"groups of {x.group_size} rows of {name}", groups)
            if by_rows and x.order is not None:
                raise ValueError(
                    f"TensorParallel: {name}: expected rows in their order, got those of desc_act;"
                    " use one device."
                )
            # With one scale per column, every device needs it for its rows.
            of_groups = None if by_rows and groups == 1 else axis
            zeros = None if x.zeros is None else put(x.zeros, of_groups, order)
            row_order = None if x.order is None else put(x.order, None, None)
            scales = put(x.scales, of_groups, order)
            x_scale = None
            if x.x_scale is not None:  # a stack's are those of its experts
                x_scale = put(x.x_scale, axis if len(x.shape) == 3 else None, None)
            of_codes = 1 - axis if axis is not None and x.is_transposed else axis
            codes = put(x.codes, of_codes, order)
            return dataclasses.replace(
                x, codes=codes, scales=scales, zeros=zeros, order=row_order, x_scale=x_scale
            )

        def put(x: Any, axis: int | None, order: np.ndarray | None) -> jax.Array:
            return put_parts(x, self.mesh, self.axis_name, axis, order)

        is_leaf = lambda x: isinstance(x, Quantized)  # noqa: E731
        return jax.tree_util.tree_map_with_path(split, params, is_leaf=is_leaf)

    def train_forward(
        self,
        params: Params,
        tokens: jax.Array,
        positions: jax.Array,
        plans: tuple[ja.AttentionPlan, ...],
        logit_rows: jax.Array,
        state_plans: tuple[ja.StatePlan, ...] = (),
    ) -> jax.Array:
        """`models.train_forward` over the devices of the mesh, for jax.jit.

        On CPUs it multiplies packed weights, as an engine with as many devices does (docs/rl.md).

        params: those of the whole model, on the mesh in any sharding; not in Panels, and not
          quantized. Gradients have their shapes.
        plans, state_plans: of specs of `config`. They and the other arrays are the same on all
          devices, and as in `models.train_forward`.

        Returns logits [n, vocab_size] f32, on all devices. Raises as `models.train_forward`.
        """

        def of_device(params: Params, *arrays: Any) -> jax.Array:
            if self.is_on_cpus:
                params = pack_params(params, self.config)
            return train_forward(params, self.config, *arrays)

        def spec(path: Any, x: Any) -> P:
            return self.sharding_of(self.split_of(path[-1].key, x.ndim)[0]).spec

        run = jax.shard_map(
            of_device,
            mesh=self.mesh,
            in_specs=(jax.tree_util.tree_map_with_path(spec, params), *[P()] * 5),
            out_specs=P(),
            check_vma=False,  # gathered logits and sums are the same on all devices
        )
        arrays = tokens, positions, plans, logit_rows, state_plans
        logits: jax.Array = run(self.split_params(params), *arrays)
        return logits

    def pack_weight(self, name: str, weight: jax.Array) -> jax.Array | Panels:
        """A weight of `split_params` as `packed` makes it, on the devices."""
        if not packs(name, self.config):
            return weight
        axis, _ = self.split_of(name, weight.ndim)
        shardings = (self.sharding_of(x) for x in (axis, None if axis is None else 0))
        make = _packer(self.mesh, *(x.spec for x in shardings), transposed=name == "embed")
        packed: Panels = make(weight)
        return packed

    def sharding_of(self, axis: int | None) -> NamedSharding:
        """The sharding of a weight that is split along an axis; None: it is on all devices."""
        return NamedSharding(self.mesh, P() if axis is None else P(*[None] * axis, self.axis_name))

    def split_of(self, name: str, ndim: int) -> tuple[int | None, np.ndarray | None]:
        """Returns the split axis of a weight, and the order of its elements there; None: as is."""
        whole = self.whole
        if whole.recurrent is not None:
            found = recurrent_split.split_of(name, ndim, whole.recurrent, self.size)
            if found is not None:
                return found
        if name.startswith("expert_"):
            return 0, None
        if name in _ROWS:
            return 0, None
        if name in _HEADS:
            return ndim - 1, None
        if name in ("qkv", "qkv_bias"):
            names = "qkvg" if whole.attention_gate else "qkv"
            return ndim - 1, np.concatenate([self._columns(names, d) for d in range(self.size)])
        if name in ("gate_up", "gate_up_bias", "shared_gate_up"):
            return ndim - 1, self._gate_up_columns(name)
        if name in ("q_norm", "k_norm") and whole.qk_norm in ("all_heads", "each_head"):
            name = name[0]
            return 0, np.concatenate([self._columns(name, d) for d in range(self.size)])
        if name in ("embed", "head", "head_bias") and self.config.splits_vocabulary:
            return (1 if name == "head" else 0), None
        return None, None

    def _columns(self, names: str, device: int) -> np.ndarray:
        """Returns a device's columns of q, k, v, the gate, or of several of them side by side."""
        whole, local, columns, begin = self.whole, self.config, [], 0
        for name in names:
            of_queries = name in "qg"
            heads = whole.num_qo_heads if of_queries else whole.num_kv_heads
            count = local.num_qo_heads if of_queries else local.num_kv_heads
            first = device * heads // self.size
            columns.append(
                begin + np.arange(first * whole.head_dim, (first + count) * whole.head_dim)
            )
            begin += heads * whole.head_dim
        return np.concatenate(columns)

    def _gate_up_columns(self, name: str) -> np.ndarray:
        whole = self.whole
        size = whole.intermediate_size
        if name == "shared_gate_up":
            assert whole.experts is not None
            size = whole.experts.shared_size
        parts = 2 if whole.gated else 1
        return np.arange(parts * size).reshape(parts, self.size, -1).swapaxes(0, 1).reshape(-1)


@functools.cache
def _packer(mesh: jax.sharding.Mesh, of_weight: P, of_panels: P, *, transposed: bool) -> Any:
    """A jitted function: a split matrix -> the panels of each device's part, one after the other.
    Panels.shape is that of a part."""
    make = functools.partial(to_panels, transposed=transposed)
    each = jax.shard_map(make, mesh=mesh, in_specs=of_weight, out_specs=of_panels, check_vma=False)
    return jax.jit(each)


def put_parts(
    x: Any,
    mesh: jax.sharding.Mesh,
    axis_name: str,
    axis: int | None,
    order: np.ndarray | None = None,
) -> jax.Array:
    """x in equal parts over a mesh axis, or on all devices. Each device receives only its part.

    axis: of x, which is split; None: it is not. order: of its elements there; None: as they are.
    """
    sharding = NamedSharding(mesh, P() if axis is None else P(*[None] * axis, axis_name))
    if isinstance(x, jax.core.Tracer):
        traced = x if order is None else jnp.take(x, order, axis=axis)
        return jax.lax.with_sharding_constraint(traced, sharding)
    if axis is None:
        # Unlike device_put, this does not compare the values across processes of the mesh.
        whole = np.asarray(x)
        return jax.make_array_from_callback(whole.shape, sharding, lambda _: whole)
    array = np.moveaxis(np.asarray(x), axis, 0)
    rows = np.arange(len(array)) if order is None else order
    own = len(rows) // int(mesh.shape[axis_name])

    def part(index: Any) -> np.ndarray:
        begin = index[axis].start or 0
        return np.moveaxis(array[rows[begin : begin + own]], 0, axis)

    shape = (*x.shape[:axis], len(rows), *x.shape[axis + 1 :])
    return jax.make_array_from_callback(shape, sharding, part)
