"""Engines that share the experts of a model: attention by data, experts over devices.

Each engine has a thread, a scheduler, a cache and a device of its own. A forward pass is one
executable over all devices (models.ExpertParallel), so the engines meet for it: those that have
work agree on a shape that holds the step of each, and the last one to come launches it. The
device of an engine that does not come computes its experts for the others, without tokens of its
own. Nobody waits long for an engine that was there the last time and is late.

After a step that failed, each engine that was in it recovers by itself. One that was not has lost
its cache with the others', and empties its prefix cache at its next step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.stages import Compiled

from jax_attn import models
from jax_attn.models._layers.weight_updates import Update as WeightUpdate
from jax_attn.serve._engine import buckets
from jax_attn.serve._engine.buckets import Batch, Bucket
from jax_attn.serve._engine.device import Device, DeviceConfig, Scores, compile_jitted, xla_options
from jax_attn.serve._scheduling.host_tier import OneMove
from jax_attn.serve._scheduling.step_plan import ScheduledSequence
from jax_attn.serve._scheduling.streaming import Rotation

_AXIS = "experts"
# How long a step waits for an engine that was in the last one. An idle engine says so at once.
_LATE_SECONDS = 0.05
# How long it waits for one that has agreed to a step, which then only packs its arguments.
_LOST_SECONDS = 20.0


class _Meeting:
    """A step from its first engine until it is launched. Engines are numbers.

    entries: of the engines that take part. bucket: None while others may still come.
    """

    def __init__(self) -> None:
        self.entries: dict[int, Sequence[ScheduledSequence]] = {}
        self.bucket: Bucket | None = None
        self.batches: dict[int, Batch] = {}
        self.scores: dict[int, Scores] | None = None
        self.error: Exception | None = None

    @property
    def is_over(self) -> bool:
        return self.scores is not None or self.error is not None


class ExpertGroup:
    """The devices of engines that share experts. Made before the engines; any thread calls it."""

    def __init__(self, model: models.Model, devices: Sequence[jax.Device]):
        """Raises ValueError: the model has no experts, or the devices do not divide them."""
        self._mesh = jax.make_mesh(
            (len(devices),), (_AXIS,), devices=devices, axis_types=(jax.sharding.AxisType.Auto,)
        )
        split = models.ExpertParallel(model.config, self._mesh, _AXIS)
        self.config, self._devices = split.config, list(devices)
        self._weights, self._tree = jax.tree.flatten(split.split_params(model.params))
        self._of: list[ExpertDevice | None] = [None] * len(devices)
        # Guards the pools of all devices, and what follows.
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self._meeting = _Meeting()
        self._meetings: dict[int, _Meeting] = {}  # of engines that have agreed, until they launch
        self._expected: set[int] = set()  # were in the last step, and have not gone to rest
        self._compiled: dict[str, Future[Compiled]] = {}
        self._empty: dict[str, np.ndarray] = {}  # by bucket: the words of a step without tokens

    def join(self, device: ExpertDevice) -> int:
        """Returns the device's number."""
        number = self._devices.index(device.jax_device)
        self._of[number] = device
        return number

    def params_of(self, device: jax.Device) -> Any:
        """The weights on one device: its experts, and all that is not of experts."""
        own = [_on(x)[device] for x in self._weights]
        return jax.tree.unflatten(self._tree, own)

    # ---- a step --------------------------------------------------------------------------------

    def agree(self, number: int, entries: Sequence[ScheduledSequence]) -> Bucket:
        """Waits for the others. Returns the bucket of the next step, which then has to be launched,
        or left."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._meeting.bucket is None, _LOST_SECONDS):
                self._meeting = _Meeting()
            meeting = self._meeting
            meeting.entries[number] = entries
            self._meetings[number] = meeting
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: meeting.bucket is not None or self._expected <= meeting.entries.keys(),
                _LATE_SECONDS,
            )
            if meeting.bucket is None:
                usable = self._device(number).buckets
                needs = [buckets.Needs.of(entries) for entries in meeting.entries.values()]
                meeting.bucket = next(x for x in usable if all(map(x.holds, needs)))
                self._expected = {*meeting.entries}
                self._changed.notify_all()
            return meeting.bucket

    def leave(self, number: int) -> None:
        """Has others go on without an engine that has agreed to a step and cannot launch it."""
        with self._changed:
            if (meeting := self._meetings.pop(number, None)) is not None:
                del meeting.entries[number]
                if not meeting.entries and self._meeting is meeting:
                    self._meeting = _Meeting()
                self._changed.notify_all()

    def rest(self, number: int) -> None:
        """Has the next steps wait no more for an engine that has no work."""
        with self._changed:
            self._expected.discard(number)
            self._changed.notify_all()

    def forward(self, number: int, batch: Batch) -> Scores:
        """Runs a step once the engines that have agreed to it are here; one that nobody has agreed
        to runs at once, without tokens of others.

        Raises RuntimeError: the step could not be launched.
        """
        with self._changed:
            meeting = self._meetings.pop(number, None)
            if meeting is None or meeting.is_over:  # the others did not wait any longer
                return self._launch(batch.bucket, {number: batch})[number]
            meeting.batches[number] = batch
            self._changed.notify_all()
            until = time.monotonic() + _LOST_SECONDS
            while not meeting.is_over:
                missing = meeting.entries.keys() - meeting.batches.keys()
                if not missing or time.monotonic() > until:
                    self._finish(meeting)
                else:
                    self._changed.wait(until - time.monotonic())
            if meeting.error is not None:
                raise RuntimeError(
                    f"a step of {len(meeting.batches)} engines that share experts: expected"
                    f" results, got {type(meeting.error).__name__}"
                ) from meeting.error
            assert meeting.scores is not None
            return meeting.scores[number]

    def _finish(self, meeting: _Meeting) -> None:
        assert meeting.bucket is not None
        try:
            meeting.scores = self._launch(meeting.bucket, meeting.batches)
        except Exception as error:
            meeting.error = error
        finally:
            if self._meeting is meeting:
                self._meeting = _Meeting()
            self._changed.notify_all()

    def _launch(self, bucket: Bucket, batches: dict[int, Batch]) -> dict[int, Scores]:
        devices = [self._device(i) for i in range(len(self._of))]
        forward = self._compiled[bucket.name].result(0)
        empty = self._empty.get(bucket.name)
        if empty is None:
            empty = self._empty[bucket.name] = devices[0].empty_words(bucket)
        words = [batches[i].words if i in batches else empty for i in range(len(devices))]
        caches = [device.cache for device in devices]
        # An engine that is not here may be sampling, which replaces its newest tokens.
        newest = [
            device.newest if i in batches else device.no_newest for i, device in enumerate(devices)
        ]
        logits, rows, *cache = forward(
            self._weights,
            np.concatenate(words),
            self._joined(newest, 0),
            *self._joined(caches, 1),
            [],
            None,
        )
        logits, rows = _on(logits), _on(rows)
        caches = self._parted(cache, caches)
        for device, own in zip(devices, caches, strict=True):
            device.cache = own
        return {i: Scores(devices[i].own(logits), devices[i].own(rows)) for i in batches}

    def _joined(self, trees: list[Any], axis: int) -> Any:
        """Arrays of each device as arrays over all, in parts along an axis, where they are."""

        def join(*parts: jax.Array) -> jax.Array:
            own = [part.addressable_shards[0].data for part in parts]
            return jax.make_array_from_single_device_arrays(*self._whole(parts[0], axis), own)

        return jax.tree.map(join, *trees)

    def _whole(
        self, part: jax.Array | jax.ShapeDtypeStruct, axis: int
    ) -> tuple[tuple[int, ...], NamedSharding]:
        """The shape and sharding of an array over all devices, of which each has such a part."""
        shape = list(part.shape)
        shape[axis] *= len(self._devices)
        return tuple(shape), NamedSharding(self._mesh, P(*[None] * axis, _AXIS))

    def _parted(self, tree: Any, like: list[Any]) -> list[Any]:
        """Undoes `_joined`. like: arrays of each device with the shardings to have."""
        parts = jax.tree.map(_on, tree)

        def part(old: jax.Array, of_all: dict[jax.Device, jax.Array]) -> jax.Array:
            (device,) = old.sharding.device_set
            own = of_all[device]
            return jax.make_array_from_single_device_arrays(own.shape, old.sharding, [own])

        return [tuple(jax.tree.map(part, own, tuple(parts))) for own in like]

    def _device(self, number: int) -> ExpertDevice:
        device = self._of[number]
        if device is None:
            raise RuntimeError(
                f"a step of engines that share experts: expected {len(self._of)} engines, got"
                f" {sum(x is not None for x in self._of)}"
            )
        return device

    def compile_forward(self, device: ExpertDevice, bucket: Bucket) -> Compiled:
        """Compiles the step of all devices, once for all of them."""
        with self.lock:
            is_first = bucket.name not in self._compiled
            compiled = self._compiled.setdefault(bucket.name, Future())
        if is_first:
            try:
                compiled.set_result(self._compile(device, bucket))
            except BaseException as error:
                compiled.set_exception(error)
        return compiled.result()

    def _compile(self, device: ExpertDevice, bucket: Bucket) -> Compiled:
        def over_all(x: jax.ShapeDtypeStruct, axis: int) -> jax.ShapeDtypeStruct:
            shape, sharding = self._whole(x, axis)
            return jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding)

        by_device, by_page = P(_AXIS), P(None, _AXIS)
        weights = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in self._weights
        ]
        of_weights = [x.sharding.spec for x in self._weights]
        forward = jax.shard_map(
            buckets.make_forward(self.config, self._tree, None, bucket),
            mesh=self._mesh,
            in_specs=(of_weights, by_device, by_device, by_page, by_page, by_page, [], P()),
            out_specs=(by_device, by_device, by_page, by_page, by_page),
            check_vma=False,
        )
        words, newest, cache = device.shapes_of_step(bucket)
        return compile_jitted(
            jax.jit(
                forward,
                donate_argnums=(3, 4, 5),
                compiler_options=xla_options(bucket.num_tokens, weights),
            ),
            weights,
            over_all(words, 0),
            over_all(newest, 0),
            *jax.tree.map(lambda x: over_all(x, 1), cache),
            [],
            None,
        )

    # ---- failures ------------------------------------------------------------------------------

    def replace_lost_caches(self, but: int | None = None) -> None:
        """Gives devices whose caches went with a failed step new ones, all but one."""
        for i, device in enumerate(self._of):
            if device is not None and i != but and not device.has_cache:
                device.lose_cache()


class ExpertDevice(Device):
    """The Device of one engine. One thread calls it, and the group for the other engines."""

    def __init__(self, group: ExpertGroup, model: models.Model, config: DeviceConfig):
        assert config.devices is not None
        (self.jax_device,) = config.devices
        self._group = group
        self._number: int | None = None
        super().__init__(model, config)
        self.no_newest = self._everywhere(np.zeros(self.newest.shape, self.newest.dtype))
        self._number = group.join(self)

    def _place(self, params: models.Params) -> models.Params:
        placed: models.Params = self._group.params_of(self.jax_device)
        return placed

    # ---- for the group, with its lock ----------------------------------------------------------

    @property
    def cache(self) -> tuple[Any, Any, Any]:
        return self._k_pages, self._v_pages, self._states

    @cache.setter
    def cache(self, new: tuple[Any, Any, Any]) -> None:
        self._k_pages, self._v_pages, self._states = new

    @property
    def has_cache(self) -> bool:
        """Whether the cache is there, once the steps in flight are done."""
        arrays = jax.tree.leaves(self.cache)
        if any(array.is_deleted() for array in arrays):
            return False
        try:
            jax.block_until_ready(arrays)
        except jax.errors.JaxRuntimeError:
            return False
        return True

    def lose_cache(self) -> None:
        """Makes an empty cache, of which the engine does not know yet."""
        super().reset()
        self.has_lost_cache = True

    def empty_words(self, bucket: Bucket) -> np.ndarray:
        return buckets.make_batch(bucket, (), self._slots).words

    def own(self, of_all: dict[jax.Device, jax.Array]) -> jax.Array:
        """This device's part, as its executables expect it."""
        array = of_all[self.jax_device]
        assert self._sharding is not None
        return jax.make_array_from_single_device_arrays(array.shape, self._sharding, [array])

    def shapes_of_step(self, bucket: Bucket) -> tuple[Any, Any, Any]:
        """Shapes of words, newest tokens and the cache of this device."""
        _, state, cache, *_ = self._shapes
        words = jax.ShapeDtypeStruct((bucket.num_words,), np.int32)
        return words, state.last_tokens, cache

    # ---- calls of the engine -------------------------------------------------------------------

    def plan(
        self, entries: Sequence[ScheduledSequence], rows_of: buckets.RowsOf | None = None
    ) -> Batch:
        self._check_cache()
        bucket = self._group.agree(self._rank, entries)
        try:
            return buckets.make_batch(bucket, entries, self._slots, rows_of)
        except BaseException:
            self._group.leave(self._rank)
            raise

    def forward(self, batch: Batch, newest: jax.Array | None = None) -> Scores:
        assert newest is None  # a draft model has its own device
        return self._group.forward(self._rank, batch)

    def rest(self) -> None:
        self._group.rest(self._rank)

    def close(self) -> None:
        """An engine that gives up does not recover, but its device computes on for the others."""
        with self._group.lock:
            self._group.rest(self._rank)
            self._group.replace_lost_caches()

    def reset(self) -> None:
        with self._group.lock:
            super().reset()
            self.has_lost_cache = False
            if self._number is not None:
                self._group.replace_lost_caches(self._number)

    def move(self, moves: Sequence[OneMove]) -> None:
        with self._group.lock:
            super().move(moves)

    def copy_pages(self, copies: list[tuple[int, int]]) -> None:
        with self._group.lock:
            super().copy_pages(copies)

    def rotate(self, rotations: Sequence[Rotation]) -> None:
        with self._group.lock:
            super().rotate(rotations)

    def take(self, pages: list[int], states: list[int]) -> tuple[list[Any], list[Any]]:
        with self._group.lock:  # no other engine's failure empties the cache behind the check
            self._check_cache()
            return super().take(pages, states)

    def put(
        self, pages: list[int], of_pages: list[Any], states: list[int], of_states: list[Any]
    ) -> None:
        with self._group.lock:
            super().put(pages, of_pages, states, of_states)

    def return_seconds(self) -> tuple[float, float]:
        with self._group.lock:  # steps of other engines, which warm up too, replace the pools
            return super().return_seconds()

    def plan_update(self, params: Any, *, partial: bool) -> list[WeightUpdate]:
        raise ValueError(
            "update_params: expected an engine with all experts, got one of several that share them"
        )

    def warm_up_first(self, progress: Any = None) -> list[str]:
        """All of them: a step of one engine may need the shape of another's."""
        return self.warm_up(progress)

    def compile_forward(self, bucket: Bucket, options: dict[str, Any] | None = None) -> Compiled:
        return self._group.compile_forward(self, bucket)

    @property
    def _rank(self) -> int:
        assert self._number is not None
        return self._number

    def _check_cache(self) -> None:
        if self.has_lost_cache:
            raise RuntimeError(
                "a step of an engine that shares experts: expected its cache, which went with a"
                " failed step of another engine"
            )


def _on(array: jax.Array) -> dict[jax.Device, jax.Array]:
    return {shard.device: shard.data for shard in array.addressable_shards}
