"""The device half of the engine: weights, kv cache, sampler state and compiled functions.

Every call returns before the device is done. The device works in the order of calls.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.stages import Compiled

from jax_attn import models, parallel
from jax_attn.models._layers.moved_pages import move_keys
from jax_attn.models._layers.selected_pages import DENSE_LAYERS, bound_pages, init_bounds
from jax_attn.models._layers.weight_updates import Update as WeightUpdate
from jax_attn.serve._engine import buckets, compilations, sampling
from jax_attn.serve._engine.buckets import Batch, Bucket
from jax_attn.serve._engine.file_copies import FileCopies
from jax_attn.serve._engine.file_store import FileStore
from jax_attn.serve._engine.pool_copies import PAGES, HostPages, PoolCopies, copy_within
from jax_attn.serve._engine.progress import progress_bar
from jax_attn.serve._engine.prompt_keys import PromptKeys
from jax_attn.serve._engine.selected_rows import SelectedShape
from jax_attn.serve._scheduling.host_tier import Move, OneMove, PageCopy
from jax_attn.serve._scheduling.prompt_policy import KeptKeys
from jax_attn.serve._scheduling.quest import Quest
from jax_attn.serve._scheduling.request import SamplingParams
from jax_attn.serve._scheduling.step_plan import ScheduledSequence, SchedulerConfig
from jax_attn.serve._scheduling.streaming import Rotation

_COPY = "copies of pages"  # the executable of `copy_pages`
_BOUNDS = "bounds of pages"  # that of `_bound`

# Called with the number of executables done, their total, and the last one's name.
Progress: TypeAlias = Callable[[int, int, str], None]


class Scores(NamedTuple):
    """The results of a forward pass that sampling needs. They stay on the device.

    logits: [num_rows of the bucket, vocab] f32. Row i is that of entry i; scored tokens follow.
    rows: see buckets.Arguments.
    """

    logits: jax.Array
    rows: jax.Array


@dataclass(frozen=True)
class DeviceConfig:
    """Settings that all processes of a server share. See EngineConfig for most fields."""

    capacities: SchedulerConfig
    batch_invariant: bool = False
    kv_dtype: str | None = None
    eight_bit_products: bool = False
    tensor_parallel: int = 1
    expert_parallel: bool = False
    context_parallel: int = 1
    max_drafts: int = 0  # of a sequence in a step
    max_loras: int = 0
    max_lora_rank: int = 0
    devices: tuple[jax.Device, ...] | None = None
    # [number, hidden], see Bucket; None: no sequence has pictures.
    picture_shape: tuple[int, int] | None = None
    longest_picture: int = 0  # tokens
    kv_select: Quest | None = None


class Device:
    has_lost_cache = False  # it is empty, as a step of other engines failed; until `reset`

    def __init__(self, model: models.Model, config: DeviceConfig):
        params, capacities = model.params, config.capacities
        self._model_config = model.config
        self._split = _split(model.config, config)
        self._has_drafts = config.max_drafts > 0
        self._rotates = capacities.streaming is not None
        longest = min(-(-model.config.max_positions // capacities.page_size), capacities.num_pages)
        # Else there is no layer, or no request with pages, to leave something out.
        self._selects = (
            config.kv_select is not None
            and config.kv_select.pages < longest
            and model.config.page_groups[0] > DENSE_LAYERS
        )
        self._page_bounds: tuple[jax.Array, ...] = ()  # one array, if `_selects`
        params = self._place(params)
        # The config of what one device computes.
        self.config = model.config if self._split is None else self._split.config
        # Flat: a step would otherwise flatten its hundreds of arrays, 25 us of the host.
        self._weights: list[Any]  # arrays
        self._tree: Any
        self._weights, self._tree = jax.tree.flatten(params)
        self._num_pages, self._max_running = capacities.num_pages, capacities.max_running
        self._page_size = capacities.page_size
        self._num_states = capacities.num_states
        sizes = buckets.sizes(capacities.max_running, capacities.max_step_tokens, self._has_drafts)
        if config.batch_invariant:
            # One shape for all steps: the order in which XLA sums a row of a matmul depends on the
            # number of rows.
            sizes = sizes[-1:]
        dtype = self.dtype = str(model.params["final_norm"].dtype)
        self._loras: models.LoraPools | None = None
        if config.max_loras:
            self._loras = models.LoraPools(
                model.config, dtype, config.max_loras, config.max_lora_rank, self._split
            )
        make_specs = buckets.invariant_specs if config.batch_invariant else buckets.balanced_specs
        self.buckets: list[Bucket] = []
        for size, shape in _with_pictures(sizes, config):
            specs = make_specs(
                self.config,
                dtype,
                capacities,
                *size,
                kv_dtype=config.kv_dtype,
                eight_bit_products=config.eight_bit_products,
                longest_picture=config.longest_picture if shape is not None else 0,
            )
            selected = None
            if self._selects:
                assert config.kv_select is not None
                # Requests that share pages read different ones.
                selected = SelectedShape(
                    config.kv_select.pages,
                    longest,
                    dataclasses.replace(specs[0], share_prefixes=False),
                )
            kv_shards = () if self._split is None else map(self._split.kv_shards, specs)
            sharded = tuple(x for x in kv_shards if x is not None)
            of_states = buckets.state_spec(
                self.config,
                dtype,
                capacities,
                *size,
                is_first_choice=size != sizes[-1],
                max_drafts=config.max_drafts,
                batch_invariant=config.batch_invariant,
            )
            self.buckets.append(
                Bucket(
                    *size,
                    specs,
                    sharded,
                    config.max_loras > 0,
                    of_states,
                    position_parts=1
                    if config.picture_shape is None
                    else model.config.position_parts,
                    picture_shape=shape,
                    selected=selected,
                )
            )
        self._slots = sampling.SlotParams(capacities.max_running)
        self._allow_all = {
            bucket.num_rows: self._everywhere(
                sampling.allow_all(bucket.num_rows, model.config.vocab_size)
            )
            for bucket in self.buckets
        }
        self._batch_invariant = config.batch_invariant
        self._executables: dict[str, Compiled] = {}  # by name
        self._usable = self.buckets  # replaced, not changed: another thread reads it
        self._host: HostPages | None = None
        self._host_states: HostPages | None = None
        self._num_compiles_warm: int | None = None
        self._prompt_keys: PromptKeys | None = None
        if capacities.prompt_policy is not None:
            self._prompt_keys = PromptKeys(self.config, dtype, capacities, self._split)
        self.reset()
        # Steps donate these arrays while other buckets are compiled.
        self._shapes = jax.tree.map(
            self._shape_of,
            (
                self._weights,
                self._state,
                (self._k_pages, self._v_pages, self._states),
                self._lora_arrays,
                self._page_bounds,
            ),
        )
        self._page_copies = PoolCopies("pages", self.pages, PAGES)
        self._state_copies = PoolCopies("states", self._states, 1)
        # A page with a prompt's first tokens is copied; states are those of ends of pages.
        self._copies_pages = capacities.prefix_cache and not capacities.num_states
        if capacities.num_host_pages:
            self._host = HostPages(self._page_copies)
        if capacities.num_host_states:
            self._host_states = HostPages(self._state_copies)

    def _place(self, params: models.Params) -> models.Params:
        """The weights where, and in the form in which, steps read them."""
        if self._split is not None:
            return self._split.split_params(params, packed=self._split.is_on_cpus)
        if jax.default_backend() == "cpu":
            return models.pack_params(params, self._model_config)
        return params

    def reset(self) -> None:
        """Makes an empty kv cache, empty states and new sampler state, also after a failure.

        Raises jax.errors.JaxRuntimeError here, not at the first use, if they do not fit.
        """
        self.free_pages()  # the new ones need their memory
        specs, num_pages = self.buckets[0].specs, self._num_pages
        if self._split is None:
            pages: tuple[Any, Any] = models.init_pages(self.config, specs, num_pages)
            self._states = models.init_states(self.config, self._num_states, self.dtype)
        else:
            pages = self._split.init_pages(specs, num_pages)
            self._states = self._split.init_states(self._num_states, self.dtype)
        self._k_pages, self._v_pages = pages
        if self._selects:
            made = jax.eval_shape(init_bounds, self._k_pages)
            sharding = None if self._split is None else self._k_pages.sharding
            self._page_bounds = (jnp.zeros(made.shape, made.dtype, device=sharding),)
        state = sampling.init_state(self._max_running, self.config.vocab_size)
        self._state = jax.tree.map(self._everywhere, state)
        if self._prompt_keys is not None:
            self._prompt_keys.reset()
        jax.block_until_ready((self._k_pages, self._v_pages, self._states, self._state))
        self._count_bytes()

    def free_pages(self) -> None:
        """Frees the kv cache and all states, until `reset`. No step may be in flight."""
        for name in ("_k_pages", "_v_pages", "_states", "_state"):
            setattr(self, name, None)
        self._page_bounds = ()
        if self._prompt_keys is not None:
            self._prompt_keys.free()
        for host in (self._host, self._host_states):
            if host is not None:
                host.clear()
        self._count_bytes()

    # ---- weights -------------------------------------------------------------------------------

    @property
    def has_weights(self) -> bool:
        return bool(self._weights)

    def free_weights(self) -> None:
        """Frees the weights, until `update`. No step may be in flight."""
        _ = self._updates  # while the weights can be read
        self._weights = []
        self._count_bytes()

    def plan_update(self, params: Any, *, partial: bool) -> list[WeightUpdate]:
        """See WeightUpdates.plan. Without weights, nothing stays as it is."""
        return self._updates.plan(params, partial=partial and self.has_weights)

    def update(self, updates: Sequence[WeightUpdate], *, donate: bool) -> None:
        """Replaces weights one by one, so that memory holds one of them twice. Compiles no step.

        No step may be in flight. After an exception there are no weights, rather than a mix of old
        and new ones.
        """
        weights: list[Any] = self._weights or [None] * self._tree.num_leaves
        self._weights = []  # the tree below has the only reference to each
        params = jax.tree.unflatten(self._tree, weights)
        del weights
        for update in updates:
            layer, name = update.target
            holder = params if layer is None else params["layers"][layer]
            holder[name] = None
            holder[name] = self._updates.convert(update, donate=donate)
        self._weights = jax.block_until_ready(self._tree.flatten_up_to(params))
        self._count_bytes()

    def embedding_and_head(self) -> models.Params:
        """These of the current weights; without a head if it is tied to the embedding."""
        return jax.tree.map(lambda i: self._weights[i], self._shared_leaves)

    @functools.cached_property
    def _shared_leaves(self) -> models.Params:
        """`embedding_and_head` with an index into `_weights` in the place of each array."""
        leaves = jax.tree.unflatten(self._tree, range(self._tree.num_leaves))
        return {name: leaves[name] for name in ("embed", "head") if name in leaves}

    @functools.cached_property
    def _updates(self) -> models.WeightUpdates:
        params = jax.tree.unflatten(self._tree, self._weights)
        return models.WeightUpdates(self._model_config, params, self._split)

    # ---- adapters ------------------------------------------------------------------------------

    def set_lora(self, slot: int, weights: models.LoraWeights) -> None:
        """Makes `weights` the adapter in a slot. No step may be in flight. Compiles nothing.

        Raises ValueError: its rank is too large; nothing has changed.
        """
        assert self._loras is not None
        self._loras.check(weights)
        self._loras.set(slot, weights)

    @property
    def _lora_arrays(self) -> list[jax.Array]:
        return [] if self._loras is None else self._loras.arrays

    @property
    def _sharding(self) -> jax.sharding.Sharding | None:
        """The sharding of arrays that every device has in full."""
        return None if self._split is None else NamedSharding(self._split.mesh, P())

    def _everywhere(self, array: Any) -> jax.Array:
        if self._sharding is None:
            return jnp.asarray(array)
        # Unlike device_put, this needs no communication with the other processes.
        host = np.asarray(array)
        return jax.make_array_from_callback(host.shape, self._sharding, lambda _: host)

    def bytes_held(self) -> dict[int, int]:
        """By device id: bytes of weights, kv cache and states, on the devices of this process."""
        return dict(self._bytes_held)

    def _count_bytes(self) -> None:
        self._bytes_held: collections.Counter[int] = collections.Counter()
        cache: list[Any] = [self._k_pages, self._v_pages, self._states, self._page_bounds]
        if self._prompt_keys is not None:
            cache += self._prompt_keys.arrays
        for array in (*self._weights, *self._lora_arrays, *jax.tree.leaves(cache)):
            for shard in array.addressable_shards:
                self._bytes_held[shard.device.id] += shard.data.nbytes

    # ---- a step --------------------------------------------------------------------------------

    def set_params(self, slot: int, params: SamplingParams) -> None:
        """Sets the parameters of the sequence that is in `slot` from the next plan on."""
        self._slots.set(slot, params)

    def plan(
        self, entries: Sequence[ScheduledSequence], rows_of: buckets.RowsOf | None = None
    ) -> Batch:
        """Packs the arguments of the smallest compiled bucket that holds the entries.

        Runs on the host. rows_of: needed if the entries have pictures.
        """
        needs = buckets.Needs.of(entries)
        bucket = next(bucket for bucket in self._usable if bucket.holds(needs))
        return buckets.make_batch(bucket, entries, self._slots, rows_of)

    @property
    def newest(self) -> jax.Array:
        """The newest sampled token of each slot: [max_running] i32."""
        return self._state.last_tokens

    def forward(self, batch: Batch, newest: jax.Array | None = None) -> Scores:
        """Runs a step, which adds its tokens to the kv cache. newest: another device's `newest`."""
        forward = self._executables[_forward_name(batch.bucket)]
        newest = self.newest if newest is None else newest
        logits, rows, self._k_pages, self._v_pages, self._states, *bounds = forward(
            self._weights,
            batch.words,
            newest,
            self._k_pages,
            self._v_pages,
            self._states,
            self._lora_arrays,
            batch.features,
            *self._page_bounds,
        )
        self._page_bounds = tuple(bounds)
        return Scores(logits, rows)

    @property
    def pages(self) -> tuple[models.Pages, models.Pages | None]:
        """k_pages and v_pages. The next step donates them."""
        return self._k_pages, self._v_pages

    def move(self, moves: Sequence[OneMove]) -> None:
        """Copies pages on the device, and pages and states to the host and back, after the steps
        before. Those of the host also go to files, and come from there.

        Pages move in the order of the list, and states in theirs. The two are in different pools,
        so states do not cut a batch of pages short.
        """
        elsewhere = PageCopy | KeptKeys  # that are of pages of the device alone
        states = [x for x in moves if not isinstance(x, elsewhere) and x.is_state]
        pages = [x for x in moves if isinstance(x, elsewhere) or not x.is_state]

        def place(move: OneMove) -> type | None:
            return type(move) if isinstance(move, elsewhere) else None

        for kind, group in itertools.groupby(pages, place):
            if kind is KeptKeys:
                self.keep_keys([x for x in group if isinstance(x, KeptKeys)])
                continue
            if kind is PageCopy:
                self.copy_pages([(x.source, x.page) for x in group if isinstance(x, PageCopy)])
                continue
            assert self._host is not None
            with_host = [x for x in group if not isinstance(x, elsewhere)]
            self._k_pages, self._v_pages = self._host.move(self.pages, with_host)
            self._bound([x.page for x in with_host if isinstance(x, Move) and not x.to_host])
        if states:
            assert self._host_states is not None
            self._states = self._host_states.move(self._states, states)

    def open_files(self, store: FileStore) -> FileCopies:
        """Has pages and states of the host, which there is, go to files and come from there."""
        assert self._host is not None
        page, state = self._host.shape(self.pages), ()
        if self._host_states is not None:
            state = self._host_states.shape(self._states)
        files = FileCopies(store, self._page_size, page, state)
        for host in (self._host, self._host_states):
            if host is not None:
                host.files = files
        return files

    def copy_pages(self, copies: list[tuple[int, int]]) -> None:
        """Copies pages of the pools, one after the other: (from, to)."""
        copy = self._executables[_COPY]
        for pages in copies:
            self._k_pages, self._v_pages = copy(self.pages, *map(np.int32, pages))

    def _bound(self, pages: list[int]) -> None:
        """Computes the bounds of full pages that no step has written, if any are needed.

        A page of `copy_pages` is not full of its request's own tokens yet.
        """
        for begin in range(0, len(pages) if self._selects else 0, PAGES):
            some = np.array(pages[begin : begin + PAGES], np.int32)
            padded = np.pad(some, (0, PAGES - len(some)), mode="edge")
            bound = self._executables[_BOUNDS]
            self._page_bounds = (bound(*self._page_bounds, self._k_pages, padded),)

    def keep_keys(self, moves: Sequence[KeptKeys]) -> None:
        """Chooses and copies the keys that prompts keep, after the steps before."""
        assert self._prompt_keys is not None
        for move in moves:
            self._k_pages, self._v_pages = self._prompt_keys.run(
                self._weights, *self.pages, self._lora_arrays, move
            )

    def rotate(self, rotations: Sequence[Rotation]) -> None:
        """Copies pages with their keys rotated, after the steps before."""
        for begin in range(0, len(rotations), _ROTATIONS):
            some = np.array(rotations[begin : begin + _ROTATIONS], np.int32)
            padded = np.pad(some, ((0, _ROTATIONS - len(some)), (0, 0)), mode="edge")
            self._k_pages, self._v_pages = self._executables["rotate"](*self.pages, padded)

    # ---- a request that goes, or comes ---------------------------------------------------------

    def take(self, pages: list[int], states: list[int]) -> tuple[list[Any], list[Any]]:
        """Copies of pages and of slots of states, after the steps before."""
        if not pages:
            return [], []
        self.compile_copies()
        found = self._page_copies.take(self.pages, pages)
        return found, self._state_copies.take(self._states, states)

    def put(
        self, pages: list[int], of_pages: list[Any], states: list[int], of_states: list[Any]
    ) -> None:
        """Writes pages and slots of states: results of `take` of a device of the same model.

        `compile_copies` comes before it.
        """
        if not (pages or states):
            return
        self._k_pages, self._v_pages = self._page_copies.put(self.pages, pages, of_pages)
        self._bound(pages)
        self._states = self._state_copies.put(self._states, states, of_states)

    def shapes_of_copies(self) -> tuple[Any, Any]:
        """jax.ShapeDtypeStruct of a page, and of a slot of states, as `take` copies them."""
        pages = self._page_copies.shapes(self.pages)
        return pages[0], self._state_copies.shapes(self._states)[0]

    def compile_copies(self) -> None:
        """Compiles them at their first use, which is not a shape that the warm-up has missed."""
        with compilations.expected():
            for copies, pools in (
                (self._page_copies, self.pages),
                (self._state_copies, self._states),
            ):
                if not copies.is_compiled:
                    for compile in copies.tasks(pools).values():
                        compile()

    def set_state(
        self, slot: int, params: SamplingParams, tokens: list[int], num_prompt: int
    ) -> None:
        """Gives the sampler the biases and token counts of the sequence in `slot`."""
        arrays = sampling.slot_arrays(params, tokens, num_prompt, self.config.vocab_size)
        self._state = self._executables["slot"](self._state, np.int32(slot), *arrays)

    def sample(
        self, scores: Scores, kind: sampling.Kind, mask: np.ndarray | None
    ) -> sampling.Sampled:
        """Samples and starts to copy the result to the host. mask: None allows all tokens."""
        num_rows = len(scores.rows)
        allowed = self._allow_all[num_rows] if mask is None else mask
        sample = self._sampler(num_rows, kind)
        self._state, sampled = sample(self._state, *scores, allowed)
        if kind != "full":  # what the executable of another kind gives besides is not asked for
            sampled = sampling.Sampled(sampled.tokens)
        for array in sampled:
            if array is not None:
                array.copy_to_host_async()
        return sampled

    def _sampler(self, num_rows: int, kind: sampling.Kind) -> Compiled:
        """The cheapest compiled executable that serves the kind, as one for more does, too."""
        for each in sampling.KINDS[sampling.KINDS.index(kind) :]:
            found = self._executables.get(_sample_name(num_rows, each))
            if found is not None:
                return found
        raise KeyError(_sample_name(num_rows, kind))

    def read(self, sampled: sampling.Sampled) -> sampling.Sampled:
        """Waits for the result, as numpy arrays. jax.device_get would start the copies again."""
        arrays: Any = (None if array is None else np.asarray(array) for array in sampled)
        read = sampling.Sampled(*arrays)
        if self._split is not None:
            parallel.check_all_reduces()  # before tokens of NaN are sent
        return read

    def rest(self) -> None:
        """Called when there is no work. Devices of several engines need not wait for this one."""

    def close(self) -> None:
        """Called after the engine's last step."""

    # ---- compilation ---------------------------------------------------------------------------

    def warm_up(self, progress: Progress | None = None) -> list[str]:
        """Compiles everything that a step can need, and runs it once. Returns names."""
        return self._warm_up(self._tasks(self.buckets), progress)

    def warm_up_first(self, progress: Progress | None = None) -> list[str]:
        """As `warm_up`, for as few executables as any step needs. `compile_later` does the others.

        The buckets are two, one for any step and one for decodes. They have the largest number of
        sequences, so they share what samples: greedily, and in any way. It is everything where XLA
        times kernels on the device, which must do nothing else then, and if bits may not depend on
        what is compiled.
        """
        if jax.default_backend() != "cpu" or self._batch_invariant:
            return self.warm_up(progress)
        largest = self.buckets[-1]
        first = [
            bucket
            for bucket in self.buckets
            if bucket is largest or bucket.num_tokens == bucket.num_rows == largest.num_rows
        ]
        later = {_sample_name(largest.num_rows, kind) for kind in _KINDS_LATER}
        tasks = self._tasks(first)
        return self._warm_up({name: tasks[name] for name in tasks if name not in later}, progress)

    def compile_later(self, check: Callable[[], None]) -> None:
        """Compiles what is left: of the buckets in use, then the others, the smallest first. Any
        thread may, while steps run.

        Each is used once it is compiled. check: called before each executable; what it raises ends
        this.
        """
        for bucket in [*self._usable, *self._missing]:
            for name, compile in self._tasks([bucket]).items():
                if name not in self._executables:
                    check()
                    self._executables[name] = compile()
            self._use_compiled()

    @property
    def num_buckets_left(self) -> int:
        """Buckets that no step can use yet, as they are not compiled."""
        return len(self.buckets) - len(self._usable)

    @property
    def is_complete(self) -> bool:
        """Whether `compile_later` has nothing to do."""
        return not self._missing

    def _warm_up(
        self, tasks: dict[str, Callable[[], Compiled]], progress: Progress | None
    ) -> list[str]:
        names = self._compile(tasks, progress)
        self._run_all()
        self.forget_compilations()
        return names

    def compile_all(self) -> None:
        """Compiles everything that a step can need, without running it."""
        self._compile(self._tasks(self.buckets), None)

    def _compile(
        self, tasks: dict[str, Callable[[], Compiled]], progress: Progress | None
    ) -> list[str]:
        """Runs `tasks`, and shows the progress. Returns names.

        progress: an exception that it raises ends the compilation.
        """
        for name in self._executables:
            tasks.pop(name, None)
        # Large ones are last in a list of buckets and first here, so the pool does not end with
        # one.
        with (
            ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool,
            progress_bar("compile", "executable", len(tasks)) as bar,
        ):
            names = {pool.submit(compile): name for name, compile in reversed(tasks.items())}
            try:
                for i, future in enumerate(as_completed(names)):
                    self._executables[names[future]] = future.result()
                    bar.set_postfix_str(names[future])
                    bar.update()
                    if progress is not None:
                        progress(i, len(tasks), names[future])
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        self._use_compiled()
        return list(tasks)

    def _use_compiled(self) -> None:
        """Lets steps use the buckets that can run and be sampled in any way."""
        self._usable = [
            bucket
            for bucket in self.buckets
            if self._executables.keys()
            >= {_forward_name(bucket), _sample_name(bucket.num_rows, "full")}
        ]

    @property
    def _missing(self) -> list[Bucket]:
        """Buckets whose executables are not all there."""
        return [
            bucket
            for bucket in self.buckets
            if not self._executables.keys() >= {_forward_name(bucket), *_sample_names(bucket)}
        ]

    @property
    def num_compiles_after_warm_up(self) -> int:
        """XLA compilations in this process since then, other than those of `compile_later`.

        0, unless some shape was not static.
        """
        if self._num_compiles_warm is None:
            return 0
        return compilations.num_unexpected() - self._num_compiles_warm

    def forget_compilations(self) -> None:
        """Has `num_compiles_after_warm_up` count from now on."""
        self._num_compiles_warm = compilations.num_unexpected()

    def _tasks(self, some: Iterable[Bucket]) -> dict[str, Callable[[], Compiled]]:
        """A function that compiles each executable of the buckets, by name. All may run at once."""
        vocab_size = self.config.vocab_size
        _, state, *_ = self._shapes
        arrays = sampling.slot_arrays(SamplingParams(max_tokens=1), [], 0, vocab_size)
        tasks: dict[str, Callable[[], Compiled]] = {
            "slot": partial(compile_jitted, sampling.set_slot, state, np.int32(0), *arrays)
        }
        if self._rotates:
            tasks["rotate"] = self._compile_rotate
        if self._prompt_keys is not None:
            weights, _, (k_pages, v_pages, _), lora, _ = self._shapes
            trees = self._tree, None if self._loras is None else self._loras.tree
            specs = [] if self._loras is None else self._loras.specs
            shapes = weights, k_pages, v_pages, lora
            tasks |= self._prompt_keys.tasks(compile_jitted, shapes, trees, specs)
        if self._selects:
            tasks[_BOUNDS] = self._compile_bounds
        some = list(some)
        for bucket in some:
            tasks[_forward_name(bucket)] = partial(self.compile_forward, bucket)
        if self._host is not None and not self._page_copies.is_compiled:
            tasks |= self._page_copies.tasks(self.pages)
        if self._host_states is not None and not self._state_copies.is_compiled:
            tasks |= self._state_copies.tasks(self._states)
        if self._copies_pages:
            tasks[_COPY] = partial(copy_within, self.pages)
        for num_rows in dict.fromkeys(bucket.num_rows for bucket in some):
            everywhere = {"sharding": self._sharding}
            logits = jax.ShapeDtypeStruct((num_rows, vocab_size), jnp.float32, **everywhere)
            rows = jax.ShapeDtypeStruct((num_rows, sampling.ROW_WORDS), jnp.int32, **everywhere)
            mask = self._allow_all[num_rows]
            for kind in sampling.KINDS:
                sample = partial(compile_jitted, sampling.sample, state, logits, rows, mask)
                tasks[_sample_name(num_rows, kind)] = partial(
                    sample, kind=kind, has_drafts=self._has_drafts, options=self._xla_options
                )
        return tasks

    @property
    def _xla_options(self) -> dict[str, str]:
        """Options of XLA for what computes logits and samples."""
        return sampling.BATCH_INVARIANT if self._batch_invariant else {}

    def _compile_rotate(self) -> Compiled:
        config = self.config

        def move(k_pages: models.Pages, v_pages: models.Pages, rotations: jax.Array) -> Any:
            return move_keys(config, k_pages, v_pages, *rotations.T)

        pools = self._shapes[2][:2]
        shardings = None if self._split is None else jax.tree.map(lambda x: x.sharding, pools)
        rotate: Any = jax.jit(move, donate_argnums=(0, 1), out_shardings=shardings)
        rotations = np.zeros((_ROTATIONS, len(Rotation._fields)), np.int32)
        return compile_jitted(rotate, *pools, rotations)

    def _compile_bounds(self) -> Compiled:
        (bounds,), (k_pages, *_) = self._shapes[4], self._shapes[2]
        function: Any = jax.jit(bound_pages, donate_argnums=0, out_shardings=bounds.sharding)
        return compile_jitted(function, bounds, k_pages, np.zeros(PAGES, np.int32))

    def compile_forward(self, bucket: Bucket, options: dict[str, Any] | None = None) -> Compiled:
        """Compiles the bucket's forward pass. options: of XLA, added to those of its size."""
        lora_tree = None if self._loras is None else self._loras.tree
        weights, state, cache, lora_arrays, bounds = self._shapes
        compute = buckets.make_forward(self.config, self._tree, lora_tree, bucket)
        if self._split is not None:
            compute = self._on_each_device(compute)
        forward = jax.jit(
            compute,
            donate_argnums=(3, 4, 5, 8) if self._selects else (3, 4, 5),
            compiler_options=xla_options(bucket.num_tokens, weights)
            | self._xla_options
            | (options or {}),
        )
        words = jax.ShapeDtypeStruct((bucket.num_words,), jnp.int32, sharding=self._sharding)
        features = None
        if bucket.picture_shape is not None:
            shape = bucket.num_tokens, *bucket.picture_shape
            features = jax.ShapeDtypeStruct(shape, self.dtype, sharding=self._sharding)
        return compile_jitted(
            forward, weights, words, state.last_tokens, *cache, lora_arrays, features, *bounds
        )

    def _shape_of(self, array: jax.Array) -> jax.ShapeDtypeStruct:
        sharding = None if self._split is None else array.sharding
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    def _on_each_device(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps one device's forward pass for all devices. Plans are the same on all."""
        assert self._split is not None
        pages, states = self._split.pages_spec, self._split.states_spec
        bounds = [pages] * self._selects  # their heads are where the keys are
        return jax.shard_map(
            forward,
            mesh=self._split.mesh,
            in_specs=(
                [x.sharding.spec for x in self._shapes[0]],
                P(),
                P(),
                pages,
                pages,
                states,
                [] if self._loras is None else self._loras.specs,
                P(),
                *bounds,
            ),
            out_specs=(P(), P(), pages, pages, states, *bounds),
            check_vma=False,  # gathered logits and sums are the same on all devices
        )

    def step_seconds(self) -> float:
        """Measures the time of the smallest step: the minimum of a few runs. Call it when warm."""
        return self._seconds_of(self.buckets[0], _MEASURED_STEPS)

    def token_seconds(self) -> float:
        """Measures the time that a token of the largest step takes, without attention."""
        largest = self.buckets[-1]
        return self._seconds_of(largest, _MEASURED_LARGE_STEPS) / largest.num_tokens

    def _seconds_of(self, bucket: Bucket, num_runs: int) -> float:
        def measure() -> float:
            begin = time.perf_counter()
            batch = buckets.make_batch(bucket, (), self._slots)
            self.read(self.sample(self.forward(batch), "temperature", None))
            return time.perf_counter() - begin

        return min(measure() for _ in range(num_runs))

    def return_seconds(self) -> tuple[float, float]:
        """Measures the times in which pool_copies.PAGES pages, and a slot of states (0: there are
        none), come back from the host. For an empty cache: those numbered 0 are overwritten."""

        def measure(moves: list[Move]) -> float:
            jax.block_until_ready((self.pages, self._states))
            begin = time.perf_counter()
            self.move(moves)
            jax.block_until_ready((self.pages, self._states))
            return time.perf_counter() - begin

        def least(count: int, is_state: bool) -> float:
            self.move([Move(True, 0, 0, is_state)])
            moves = [Move(False, 0, 0, is_state)] * count
            return min(measure(moves) for _ in range(_MEASURED_STEPS))

        states = 0.0 if self._host_states is None else least(1, is_state=True)
        return least(PAGES, is_state=False), states

    def executable(self, bucket: Bucket) -> Compiled:
        return self._executables[_forward_name(bucket)]

    def use(self, bucket: Bucket, executable: Compiled) -> None:
        """Replaces the executable of a bucket, so that a benchmark can compare XLA's results."""
        self._executables[_forward_name(bucket)] = executable

    def _run_all(self) -> None:
        """Runs everything once, which loads kernels and captures graphs."""
        self.set_state(0, SamplingParams(max_tokens=1), [], 0)
        for bucket in self._usable:
            # An empty batch is legal.
            scores = self.forward(buckets.make_batch(bucket, (), self._slots))
            for kind in sampling.KINDS:
                if _sample_name(bucket.num_rows, kind) in self._executables:
                    jax.block_until_ready(self.sample(scores, kind, None))
        if self._host is not None:
            self.move([Move(True, 0, 0), Move(False, 0, 0)])
        if self._host_states is not None:
            self.move([Move(True, 0, 0, is_state=True), Move(False, 0, 0, is_state=True)])
        if self._copies_pages:
            self.move([PageCopy(0, 0)])
        self._bound([0])
        if self._rotates:
            self.rotate([Rotation(0, 1, 0)])
        if self._prompt_keys is not None:
            self.keep_keys([self._prompt_keys.empty()])


def _with_pictures(
    sizes: list[tuple[int, int]], config: DeviceConfig
) -> list[tuple[tuple[int, int], tuple[int, int] | None]]:
    """Sizes of buckets, and the picture_shape of each. Those with pictures are last.

    They are fewer, as they are for prompts alone: in steps of four.
    """
    shape = config.picture_shape
    if shape is None:
        return [(size, None) for size in sizes]
    if config.batch_invariant:  # the same shape for all steps
        return [(size, shape) for size in sizes]
    of_prompts = [size for size in sizes if size[0] > size[1]] or sizes[-1:]
    return [(size, None) for size in sizes] + [(size, shape) for size in of_prompts[::-2][::-1]]


def _split(config: models.ModelConfig, of: DeviceConfig) -> models.TensorParallel | None:
    """The split of the model and its pages over devices; None: they are on JAX's first device.

    Raises ValueError for more devices than there are.
    """
    shape = of.tensor_parallel, of.context_parallel
    num_devices = of.tensor_parallel * of.context_parallel
    if num_devices == 1 and of.devices is None:
        return None
    devices = jax.devices() if of.devices is None else [*of.devices]
    if num_devices > len(devices):
        names = "tensor_parallel" + " * context_parallel" * (of.context_parallel > 1)
        raise ValueError(
            f"EngineConfig: {names}: expected at most {len(devices)}, the devices that JAX"
            f" sees, got {num_devices}."
        )
    if jax.process_count() > 1 and num_devices < len(devices):
        raise ValueError(
            "EngineConfig: tensor_parallel * context_parallel: expected all"
            f" {len(devices)} devices of the {jax.process_count()} processes, got {num_devices}."
        )
    auto = (jax.sharding.AxisType.Auto,) * 2
    axes = "heads", "context"
    mesh = jax.make_mesh(shape, axes, devices=devices[:num_devices], axis_types=auto)
    context = "context" if shape[1] > 1 else None
    return models.TensorParallel(config, mesh, "heads", context, of.expert_parallel)


# XLA threads: autotuning is serial on the device anyway, and each thread has buffers.
_MAX_THREADS = 8

# "full" serves them, too. For 32 rows of 151,936 logits on a CPU, "temperature" takes a quarter of
# its time, and "filtered" 0.87; "greedy", which takes a thirtieth, is compiled first.
_KINDS_LATER: tuple[sampling.Kind, ...] = ("temperature", "filtered")

_ROTATIONS = 4  # pages of a call: the sinks of a sequence are mostly one

_MEASURED_STEPS = 7
_MEASURED_LARGE_STEPS = 2


def xla_options(num_tokens: int, weights: list[jax.ShapeDtypeStruct]) -> dict[str, Any]:
    """Options of XLA, which only GPUs use.

    XLA times a matmul by itself, with weights that stay in the cache, and does not count the part
    of split sums that is left to the next kernel. So for a medium number of rows it picks Triton
    where cuBLAS makes a step 3 to 4 % faster: at 64 and 128 rows on an H200, but not at 32 or 512.
    Only Triton multiplies quantized weights without writing them in a wider type first.
    """
    is_quantized = any(leaf.dtype.itemsize == 1 for leaf in weights)
    if is_quantized or not 64 <= num_tokens <= 256:
        return {}
    return {"xla_gpu_enable_triton_gemm": False}


def compile_jitted(
    function: Any, *args: Any, options: dict[str, Any] | None = None, **kwargs: Any
) -> Compiled:
    """Compiles a function made by jax.jit. options: of XLA, beside the function's own."""
    with compilations.expected():
        executable: Compiled = function.lower(*args, **kwargs).compile(compiler_options=options)
    return executable


def _forward_name(bucket: Bucket) -> str:
    return f"forward, {bucket.name}"


def _sample_name(num_rows: int, kind: sampling.Kind) -> str:
    return f"sample, {num_rows} sequences, {kind}"


def _sample_names(bucket: Bucket) -> list[str]:
    return [_sample_name(bucket.num_rows, kind) for kind in sampling.KINDS]
