"""The device's part of kv policies of prompts: chooses the keys that heads keep, and copies them.

A prompt that is read has all its keys in pages. Some of its tokens, or all, go through the model
once more, to sum their attention weights: the kernels do not return these. See `prompt_policy`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.stages import Compiled

import jax_attn as ja
from jax_attn import models
from jax_attn.models._layers.kept_keys import KEYS_AT_ONCE, add_weights, copy_kept
from jax_attn.serve._scheduling.prompt_policy import KeptKeys, PromptPolicy
from jax_attn.serve._scheduling.step_plan import SchedulerConfig

_QUERIES = 256  # of a call, if all of a prompt's count

Compile = Callable[..., Compiled]
"""(function made by jax.jit, *args) -> its executable."""


class PromptKeys:
    """Chooses the keys of one prompt after the other, in the order of calls."""

    def __init__(
        self,
        config: models.ModelConfig,
        dtype: str,
        capacities: SchedulerConfig,
        split: models.TensorParallel | None,
    ):
        """config: of what one device computes. split: the engine's mesh; None: it has one device.

        Raises ValueError: pages are no part of the keys that are looked at together.
        """
        policy = capacities.prompt_policy
        assert policy is not None
        if KEYS_AT_ONCE % capacities.page_size:
            raise ValueError(
                f"EngineConfig: page_size: expected one that divides {KEYS_AT_ONCE} with kv_policy"
                f" {policy.name}, got {capacities.page_size}."
            )
        self.policy: PromptPolicy = policy
        self._config, self._split, self._page_size = config, split, capacities.page_size
        self._num_kept_pages = capacities.num_kept_pages
        most = min(capacities.num_pages, capacities.max_kv_pages_step)
        most = min(most, -(-config.max_positions // self._page_size))
        at_once = KEYS_AT_ONCE // self._page_size
        self._num_pages = -(-most // at_once) * at_once
        (self._spec,) = models.attention_specs(
            config,
            dtype=dtype,
            page_size=self._page_size,
            num_pages=capacities.num_pages,
            max_batch=1,
            max_qo_tokens=policy.queries or _QUERIES,
            max_kv_pages=most,
        )
        self._sums: jax.Array | None = None
        self._add: Compiled | None = None
        self._copy: Compiled | None = None

    @property
    def arrays(self) -> list[jax.Array]:
        """Those that stay on the device: the sums of weights of a prompt's keys."""
        return [] if self._sums is None else [self._sums]

    def reset(self) -> None:
        self._sums = jnp.zeros(self._sums_shape.shape, jnp.float32, device=self._sharding)

    def free(self) -> None:
        """Frees the arrays, until `reset`."""
        self._sums = None

    @property
    def _sharding(self) -> NamedSharding | None:
        if self._split is None:
            return None
        return NamedSharding(self._split.mesh, P(None, self._split.axis_name))

    @property
    def _sums_shape(self) -> jax.ShapeDtypeStruct:
        """[num_layers, num_kv_heads, tokens], with the heads of all devices."""
        num_devices = 1 if self._split is None else self._split.size
        heads = num_devices * self._config.num_kv_heads
        shape = self._config.page_groups[0], heads, self._num_pages * self._page_size
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=self._sharding)

    def tasks(
        self, compile: Compile, shapes: tuple[Any, ...], trees: tuple[Any, Any], lora_specs: Any
    ) -> dict[str, Callable[[], Compiled]]:
        """A function that compiles each executable, by name.

        shapes: weights, k_pages, v_pages and the adapters' pools, flat. trees: structures of the
        weights and of the pools; None: there are no adapters. lora_specs: how a mesh has the pools.
        """
        weights, k_pages, v_pages, lora = shapes
        whole, of_sums, of_pages, of_weights = None, P(), P(), []
        if self._split is not None:
            whole, of_pages = NamedSharding(self._split.mesh, P()), self._split.pages_spec
            of_sums = P(None, self._split.axis_name)
            of_weights = [x.sharding.spec for x in weights]

        def ints(*shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=whole)

        plan = ja.AttentionPlan(ints(self._spec.plan_words), self._spec)
        queries, sources = ints(3, self._queries), ints(self._num_pages)

        def compile_add() -> Compiled:
            specs = of_sums, P(), of_weights, of_pages, of_pages, lora_specs, P(), P(), P()
            add = self._on_each_device(partial(self._add_weights, trees), specs, of_sums)
            given = weights, k_pages, v_pages, lora, queries, plan, sources
            self._add = compile(jax.jit(add, donate_argnums=0), self._sums_shape, ints(), *given)
            return self._add

        def compile_copy() -> Compiled:
            specs = of_pages, of_pages, of_sums, P(), P(), P()
            copy = self._on_each_device(self._copy_kept, specs, (of_pages, of_pages))
            given = k_pages, v_pages, self._sums_shape, ints(), sources
            jitted = jax.jit(copy, donate_argnums=(0, 1))
            self._copy = compile(jitted, *given, ints(self._num_kept_pages))
            return self._copy

        return {"weights of keys": compile_add, "kept keys": compile_copy}

    def _on_each_device(self, function: Any, in_specs: Any, out_specs: Any) -> Any:
        """Wraps what one device computes for all devices of the mesh, if there is one."""
        if self._split is None:
            return function
        # Plans, tokens and page numbers are the same on all devices.
        mesh = self._split.mesh
        return jax.shard_map(
            function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def _add_weights(
        self,
        trees: tuple[Any, Any],
        sums: jax.Array,
        is_first: jax.Array,
        weights: list[jax.Array],
        k_pages: jax.Array,
        v_pages: jax.Array,
        lora: list[jax.Array],
        words: jax.Array,
        plan: ja.AttentionPlan,
        pages: jax.Array,
    ) -> jax.Array:
        """is_first: 1: of a prompt, so that the sums begin at 0. words: tokens, positions, and
        slots of adapters."""
        tree, lora_tree = trees
        tokens, positions, slots = words
        adapters = None
        if lora_tree is not None:
            adapters = models.Adapters(jax.tree.unflatten(lora_tree, lora), slots)
        sums = jnp.where(is_first == 1, 0, sums)
        params = jax.tree.unflatten(tree, weights)
        cache = k_pages, v_pages, plan, pages
        return add_weights(sums, params, self._config, tokens, positions, *cache, adapters)

    def _copy_kept(
        self,
        k_pages: jax.Array,
        v_pages: jax.Array,
        sums: jax.Array,
        num_tokens: jax.Array,
        sources: jax.Array,
        targets: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        of = self.policy

        def select(sums: jax.Array) -> jax.Array:
            return ja.retention.select(sums, num_tokens, of.keep, recent=of.recent, pool=of.pool)

        kept = jax.lax.map(select, sums)  # one layer's sorts at a time
        return copy_kept(k_pages, v_pages, kept, sources, targets)

    @property
    def _queries(self) -> int:
        return self._spec.max_qo_tokens

    def run(
        self,
        weights: list[jax.Array],
        k_pages: Any,
        v_pages: Any,
        lora: list[jax.Array],
        move: KeptKeys,
    ) -> tuple[Any, Any]:
        """Chooses and copies the keys of a prompt. Returns k_pages, v_pages: the old ones are
        donated."""
        assert self._add is not None and self._copy is not None
        end = len(move.tokens)
        sources = np.zeros(self._num_pages, np.int32)
        sources[: len(move.sources)] = move.sources
        begin = 0 if self.policy.queries is None else end - self.policy.queries
        for first in range(begin, end, self._queries):
            is_first = np.int32(first == begin)
            cache = weights, k_pages, v_pages, lora
            self._sums = self._add(
                self._sums, is_first, *cache, *self._arguments(move, first), sources
            )
        targets = np.array(move.targets, np.int32)
        k_pages, v_pages = self._copy(k_pages, v_pages, self._sums, np.int32(end), sources, targets)
        return k_pages, v_pages

    def _arguments(self, move: KeptKeys, begin: int) -> tuple[np.ndarray, ja.AttentionPlan]:
        """Tokens, positions and adapters of the queries from `begin` on, and their plan."""
        tokens = move.tokens[begin : begin + self._queries]
        end, words = begin + len(tokens), np.zeros((3, self._queries), np.int32)
        words[0, : len(tokens)] = tokens
        words[1] = begin + np.arange(self._queries)
        words[2] = -1
        words[2, : len(tokens)] = move.adapter
        num_pages = -(-end // self._page_size)
        table = [0, num_pages], move.sources[:num_pages]
        return words, ja.plan(self._spec, [0, len(tokens)], [end], *table)

    def empty(self) -> KeptKeys:
        """A prompt of one token more than it keeps, over page 0, which is overwritten."""
        num_tokens = self.policy.keep + 1
        num_pages = -(-num_tokens // self._page_size)
        return KeptKeys([0] * num_tokens, -1, [0] * num_pages, [0] * self._num_kept_pages)
