"""The static shapes of a step: compiled once, and the smallest that fits serves a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jax_attn as ja
from jax_attn import models
from jax_attn.serve.sampling import Rows
from jax_attn.serve.scheduler import ScheduledSequence, SchedulerConfig


class Bucket(NamedTuple):
    """Capacities of one compiled forward pass."""

    num_tokens: int
    num_rows: int  # sequences, and rows of logits
    specs: tuple[ja.AttentionSpec, ...]
    rows: Rows

    @property
    def name(self) -> str:
        return f"{self.num_tokens} tokens x {self.num_rows} sequences"


class Batch(NamedTuple):
    """The arguments of a forward pass, on the host and never written again: XLA may alias them.

    inputs: [3, num_tokens] i32. Token, or slot whose newest token it is (else -1), and position.
    logit_rows: [num_rows] i32. The last token of each sequence.
    plans: one for each spec of the bucket.
    """

    inputs: np.ndarray
    logit_rows: np.ndarray
    plans: tuple[ja.AttentionPlan, ...]


def sizes(max_running: int, max_step_tokens: int) -> list[tuple[int, int]]:
    """(tokens, sequences) of the buckets, ascending.

    Decodes alone, one token a sequence, in steps of four: their time is that of reading the
    weights, whatever the padding. Then steps with prompts, in steps of two: there padding costs.
    """
    decodes = [n for n in (8, 32, 128, 512, 2048) if n < max_running] + [max_running]
    tokens = [64 << i for i in range(20)]
    prompts = [n for n in tokens if max_running < n < max_step_tokens]
    if max_step_tokens > max_running:
        prompts.append(max_step_tokens)
    return [(n, n) for n in decodes] + [(n, max_running) for n in prompts]


def balanced_specs(
    config: models.ModelConfig,
    dtype: str,
    capacities: SchedulerConfig,
    num_tokens: int,
    num_rows: int,
    **kwargs: Any,
) -> tuple[ja.AttentionSpec, ...]:
    """The attention of a bucket; `kwargs` are fields of AttentionSpec."""
    pages_each = -(-config.max_positions // capacities.page_size)
    return models.attention_specs(
        config,
        dtype=dtype,
        page_size=capacities.page_size,
        num_pages=capacities.num_pages,
        max_batch=num_rows,
        max_qo_tokens=num_tokens,
        max_kv_pages=min(num_rows * pages_each, capacities.max_kv_pages_step),
        **kwargs,
    )


def invariant_specs(
    config: models.ModelConfig,
    dtype: str,
    capacities: SchedulerConfig,
    num_tokens: int,
    num_rows: int,
) -> tuple[ja.AttentionSpec, ...]:
    """Attention whose bits depend on the sequence alone.

    Four chunks of the longest sequence: enough to share a long decode between processors, and few
    enough that partial states of a whole step of long prompts have room.
    """
    longest = min(config.max_positions, capacities.page_size * capacities.num_pages)
    kv_split = _SPLIT_STEP * max(1, -(-longest // (4 * _SPLIT_STEP)))
    num_chunks = -(-longest // kv_split)
    make = partial(balanced_specs, config, dtype, capacities, num_tokens, num_rows)
    kernel = make(schedule="fixed_split", kv_split=kv_split)[0].kernel_config
    group_size = config.num_qo_heads // config.num_kv_heads
    num_tiles = num_rows + num_tokens * group_size // kernel["tile_q_0"]
    return make(
        schedule="fixed_split",
        kv_split=kv_split,
        max_items=max(2, num_tiles * config.num_kv_heads * num_chunks),
        max_partial_rows=num_tokens * config.num_qo_heads * num_chunks,
    )


_SPLIT_STEP = 1024  # tokens, a multiple of every kernel's tile_kv


def make_batch(bucket: Bucket, entries: Sequence[ScheduledSequence]) -> Batch:
    """What `forward` computes for the entries, in their order."""
    page_size = bucket.specs[0].page_size
    assert page_size is not None
    tokens: list[int] = []
    slots: list[int] = []
    positions: list[int] = []
    qo_indptr, kv_lens, page_indptr, page_indices = [0], [], [0], []
    for entry in entries:
        seq, begin, num_tokens = entry.seq, entry.seq.num_computed, entry.num_tokens
        end = begin + num_tokens
        known = seq.tokens[begin:end]
        tokens += known
        slots += [-1] * len(known)
        if len(known) < num_tokens:  # by one, the sample in flight
            tokens.append(0)
            slots.append(seq.slot)
        positions += range(begin, end)
        qo_indptr.append(len(tokens))
        kv_lens.append(end)
        page_indices += seq.pages[: -(-end // page_size)]
        page_indptr.append(len(page_indices))
    inputs = np.zeros((3, bucket.num_tokens), np.int32)
    inputs[1] = -1
    inputs[:, : len(tokens)] = tokens, slots, positions
    logit_rows = np.zeros(bucket.num_rows, np.int32)
    logit_rows[: len(entries)] = np.array(qo_indptr[1:], np.int32) - 1
    batch = [np.array(x, np.int32) for x in (qo_indptr, kv_lens, page_indptr, page_indices)]
    return Batch(inputs, logit_rows, tuple(ja.plan(spec, *batch) for spec in bucket.specs))


def make_forward(config: models.ModelConfig) -> Callable[..., Any]:
    """The jitted (params, inputs, last_tokens, k_pages, v_pages, plans, logit_rows) -> logits, ...

    See `Batch` and `models.forward`; the pages are donated.
    """

    def forward(params, inputs, last_tokens, k_pages, v_pages, plans, logit_rows):
        tokens, slots, positions = inputs
        tokens = jnp.where(slots < 0, tokens, last_tokens[slots])
        return models.forward(
            params, config, tokens, positions, k_pages, v_pages, plans, logit_rows
        )

    return jax.jit(forward, donate_argnames=("k_pages", "v_pages"))
