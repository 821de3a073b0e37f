"""The engine's half on the device: weights, kv cache, sampler state, and compiled functions.

Every call here returns before the device is done, and the device works in the order of calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.monitoring
import numpy as np
from tqdm import tqdm

from jax_attn import models
from jax_attn.serve import buckets, sampling
from jax_attn.serve.buckets import Batch, Bucket
from jax_attn.serve.request import SamplingParams
from jax_attn.serve.scheduler import ScheduledSequence, SchedulerConfig


class Device:
    def __init__(self, model: models.Model, capacities: SchedulerConfig, batch_invariant: bool):
        self._params, self._config = model.params, model.config
        self._num_pages, self._max_running = capacities.num_pages, capacities.max_running
        sizes = buckets.sizes(capacities.max_running, capacities.max_step_tokens)
        if batch_invariant:
            # One shape for all: the order in which XLA adds up a row of a matmul depends on how
            # many rows there are, if on nothing else of them.
            sizes = sizes[-1:]
        dtype = str(model.params["embed"].dtype)
        make_specs = buckets.invariant_specs if batch_invariant else buckets.balanced_specs
        self.buckets = [
            Bucket(
                *size,
                make_specs(model.config, dtype, capacities, *size),
                sampling.Rows(size[1], capacities.max_running, model.config.vocab_size),
            )
            for size in sizes
        ]
        self._forward = buckets.make_forward(model.config)
        self._num_compiles_warm: int | None = None
        self.reset()

    def reset(self) -> None:
        """An empty kv cache and new sampler state, also after a failure that took the old ones."""
        for name in ("_k_pages", "_v_pages", "_state"):
            setattr(self, name, None)  # frees the memory that the new ones need
        self._k_pages, self._v_pages = models.init_pages(
            self._config, self.buckets[0].specs, self._num_pages
        )
        self._state = sampling.init_state(self._max_running, self._config.vocab_size)

    # ---- a step --------------------------------------------------------------------------------

    def plan(self, entries: Sequence[ScheduledSequence]) -> tuple[Bucket, Batch]:
        """The smallest bucket that holds the entries, and its arguments. On the host."""
        num_tokens = sum(entry.num_tokens for entry in entries)
        bucket = next(
            bucket
            for bucket in self.buckets
            if num_tokens <= bucket.num_tokens and len(entries) <= bucket.num_rows
        )
        return bucket, buckets.make_batch(bucket, entries)

    def forward(self, batch: Batch) -> jax.Array:
        """Logits [num_rows of the bucket, vocab] f32, row i of entry i; the kv cache grows."""
        logits, self._k_pages, self._v_pages = self._forward(
            self._params,
            batch.inputs,
            self._state.last_tokens,
            self._k_pages,
            self._v_pages,
            batch.plans,
            batch.logit_rows,
        )
        return logits

    def set_slot(
        self, slot: int, params: SamplingParams, tokens: list[int], num_prompt: int
    ) -> None:
        """Gives the sampler the biases and token counts of the sequence in `slot`."""
        arrays = sampling.slot_arrays(params, tokens, num_prompt, self._config.vocab_size)
        self._state = sampling.set_slot(self._state, np.int32(slot), *arrays)

    def sample(self, logits: jax.Array, rows: sampling.Rows) -> sampling.Sampled:
        """Samples, and starts to copy the result to the host."""
        sampled = self._sample(logits, rows.ints, rows.floats, rows.mask, rows.kind)
        for array in sampled:
            if array is not None:
                array.copy_to_host_async()
        return sampled

    def _sample(
        self, logits: jax.Array, ints: Any, floats: Any, mask: Any, kind: sampling.Kind
    ) -> sampling.Sampled:
        self._state, sampled = sampling.sample(self._state, logits, ints, floats, mask, kind=kind)
        return sampled

    # ---- compilation ---------------------------------------------------------------------------

    def warm_up(self, progress: Callable[[int, int, str], None] | None = None) -> list[str]:
        """Compiles everything that a step can need, behind a progress bar; the list of it.

        progress: called with the number of executables done, of all, and the next one's name.
        """
        tasks: list[tuple[str, Callable[[], None]]] = [("slot", self._warm_slot)]
        for bucket in self.buckets:
            tasks.append((f"forward, {bucket.name}", partial(self._warm_forward, bucket)))
        for num_rows, bucket in {bucket.num_rows: bucket for bucket in self.buckets}.items():
            for kind in sampling.KINDS:
                name = f"sample, {num_rows} sequences, {kind}"
                tasks.append((name, partial(self._warm_sample, bucket, kind)))
        with tqdm(tasks, desc="compile", unit="executable") as bar:
            for i, (name, compile_it) in enumerate(bar):
                bar.set_postfix_str(name)
                if progress is not None:
                    progress(i, len(tasks), name)
                compile_it()
        self._num_compiles_warm = len(_compile_seconds)
        return [name for name, _ in tasks]

    @property
    def num_compiles_after_warm_up(self) -> int:
        """What XLA has compiled since, in this process: 0, unless some shape was not static."""
        assert self._num_compiles_warm is not None, "warm_up comes first"
        return len(_compile_seconds) - self._num_compiles_warm

    def _warm_slot(self) -> None:
        self.set_slot(0, SamplingParams(max_tokens=1), [], 0)

    def _warm_forward(self, bucket: Bucket) -> None:
        """An empty batch is legal, and compiles what any batch needs."""
        jax.block_until_ready(self.forward(buckets.make_batch(bucket, ())))

    def _warm_sample(self, bucket: Bucket, kind: sampling.Kind) -> None:
        logits = self.forward(buckets.make_batch(bucket, ()))
        rows = bucket.rows
        for mask in (rows.mask, np.full(rows.mask.shape, -1, np.int32)):  # on the device, or not
            jax.block_until_ready(self._sample(logits, rows.ints, rows.floats, mask, kind))


_compile_seconds: list[float] = []  # one for each compilation of this process


def _on_event(event: str, duration_secs: float, **_: str | int) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        _compile_seconds.append(duration_secs)


jax.monitoring.register_event_duration_secs_listener(_on_event)
