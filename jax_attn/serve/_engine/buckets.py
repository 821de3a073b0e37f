"""The static shapes of a step. Each is compiled once; a batch uses the smallest one that fits."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jax_attn as ja
from jax_attn import models, parallel
from jax_attn.serve._engine.sampling import ROW_WORDS, Kind, SlotParams, as_records
from jax_attn.serve._scheduling.request import Sequence
from jax_attn.serve._scheduling.step_plan import ScheduledSequence, SchedulerConfig


@dataclass(frozen=True)
class Bucket:
    """Capacities of one compiled forward pass."""

    num_tokens: int
    num_rows: int  # of logits, and at most as many sequences
    specs: tuple[ja.AttentionSpec, ...]
    # KV shards for each spec, where pages are split over devices: each device plans its own shard.
    stripes: tuple[parallel.KvStripes, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.num_tokens} tokens x {self.num_rows} sequences"

    @cached_property
    def _bounds(self) -> tuple[int, ...]:
        """Offsets in `words` of the parts that `unpack` returns, and the end of the last."""
        plans = [spec.plan_words for spec in self.specs]
        if self.stripes:
            assert self.specs[0].max_kv_pages is not None
            n = self.num_rows
            plans = [n + 1, n, n + 1, self.specs[0].max_kv_pages]
        sizes = 2 * self.num_tokens, self.num_rows, ROW_WORDS * self.num_rows, *plans
        return tuple(itertools.accumulate(sizes, initial=0))

    @property
    def num_words(self) -> int:
        return self._bounds[-1]

    def unpack(self, words: Any) -> Arguments:
        """Views of `words` [num_words] i32, a numpy or a traced array."""
        parts = (words[begin:end] for begin, end in itertools.pairwise(self._bounds))
        inputs, logit_rows, rows, *plans = parts
        planned: tuple[ja.AttentionPlan, ...] = ()
        if not self.stripes:
            planned = tuple(ja.AttentionPlan(*plan) for plan in zip(plans, self.specs, strict=True))
        lengths = tuple(plans) if self.stripes else ()
        rows = rows.reshape(-1, ROW_WORDS)
        return Arguments(inputs.reshape(2, -1), logit_rows, rows, planned, lengths)


class Arguments(NamedTuple):
    """The inputs of a step.

    inputs: [2, num_tokens] i32. Token (or ~slot: the newest token of that slot), and position.
    logit_rows: [num_rows] i32. The last token of each sequence, then the tokens that are scored.
    rows: [num_rows, ROW_WORDS] i32. Sampling parameters of each row, words of sampling.ROW.
    plans: one for each spec of the bucket; empty with KV shards.
    lengths: with KV shards, the arguments of plan_stripes, padded to the bucket's capacities:
      [num_rows + 1], [num_rows], [num_rows + 1] and [max_kv_pages] i32.
    """

    inputs: Any
    logit_rows: Any
    rows: Any
    plans: tuple[ja.AttentionPlan, ...]
    lengths: tuple[Any, ...]


class Batch(NamedTuple):
    """The arguments of a step, packed into one array to copy to the device.

    On the device they have the same addresses in each step, so XLA need not update a captured
    graph.


    words: on the host, and never written again: XLA may alias them.
    kind: of the sampling.
    scored: where the logprobs of prompts come from.
    """

    bucket: Bucket
    words: np.ndarray
    kind: Kind
    scored: list[ScoredRows]
    drafted: dict[int, list[int]]  # entry -> rows of the token before its drafts and of each draft


class ScoredRows(NamedTuple):
    """Row rows[i] has the logprob of the sequence's token number begin + i."""

    seq: Sequence
    begin: int
    rows: list[int]


def sizes(max_running: int, max_step_tokens: int, has_drafts: bool) -> list[tuple[int, int]]:
    """(tokens, sequences) of the buckets, ascending.

    For decodes alone (one token a sequence) in steps of four: their time is that of reading the
    weights, whatever the padding. On CPUs in steps of two, from one: there arithmetic shows.
    Drafts fill the capacity of a step, so with drafts also CPUs start with a larger bucket.
    For steps with prompts in steps of two: there padding costs.
    """
    each = [8, 32, 128, 512, 2048]
    if jax.default_backend() == "cpu":
        each = [] if has_drafts else [1, 4]
        each += [8 << i for i in range(9)]
    decodes = [n for n in each if n < max_running] + [max_running]
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
    """The attention specs of a bucket; `kwargs` are fields of AttentionSpec."""
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
    **kwargs: Any,
) -> tuple[ja.AttentionSpec, ...]:
    """Specs of attention whose bits depend on the sequence alone.

    A chunk is a quarter of the longest sequence: enough chunks to share a long decode between
    processors, and few enough that the partial states of a whole step of long prompts fit.
    """
    longest = min(config.max_positions, capacities.page_size * capacities.num_pages)
    kv_split = _SPLIT_STEP * max(1, -(-longest // (4 * _SPLIT_STEP)))
    num_chunks = -(-longest // kv_split)
    make = partial(balanced_specs, config, dtype, capacities, num_tokens, num_rows, **kwargs)
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


def make_batch(bucket: Bucket, entries: Seq[ScheduledSequence], slots: SlotParams) -> Batch:
    """Packs what `forward` computes for the entries, in their order."""
    page_size = bucket.specs[0].page_size
    assert page_size is not None
    seqs, n = [entry.seq for entry in entries], len(entries)
    qo_lens = np.array([entry.num_tokens for entry in entries], np.int32)
    begins = np.array([entry.begin for entry in entries], np.int32)
    kv_lens = begins + qo_lens
    num_pages = -(-kv_lens // page_size)
    qo_indptr, page_indptr = (_indptr(lens) for lens in (qo_lens, num_pages))
    tables = [seq.pages[:num] for seq, num in zip(seqs, num_pages.tolist(), strict=True)]
    page_indices = np.frombuffer(b"".join(tables), np.int32)

    tokens: list[int] = []
    for entry, begin in zip(entries, begins.tolist(), strict=True):
        drafts = entry.drafts
        known = entry.seq.tokens[begin : begin + entry.num_tokens]
        tokens += known
        # One token is missing: the sample in flight.
        if len(known) + len(drafts) < entry.num_tokens:
            tokens.append(~entry.seq.slot)
        if drafts:
            tokens += drafts

    words = np.zeros(bucket.num_words, np.int32)
    inputs, logit_rows, rows, plans, lengths = bucket.unpack(words)
    inputs[0, : len(tokens)] = tokens
    inputs[1, : len(tokens)] = np.arange(len(tokens)) + (begins - qo_indptr[:-1]).repeat(qo_lens)
    logit_rows[:n] = qo_indptr[1:] - 1
    kind = slots.fill(
        rows,
        [entry.seq.slot if entry.samples else slots.max_running for entry in entries],
        [e.begin + e.num_tokens - len(e.drafts) - e.seq.num_prompt for e in entries],
    )
    scored = _score(entries, qo_indptr, logit_rows, rows)
    if scored:
        kind = "full"
    drafted = _draft(entries, qo_indptr, logit_rows, rows, slots.max_running)
    batch = qo_indptr, kv_lens, page_indptr, page_indices
    for plan in plans:
        ja.plan(plan.spec, *batch, buffer=plan.buffer)
    ends = qo_indptr[-1], 0, page_indptr[-1], 0
    # 0 elements without KV shards
    for room, array, rest in zip(lengths, batch, ends, strict=False):
        room[: len(array)], room[len(array) :] = array, rest  # sequences without tokens
    return Batch(bucket, words, kind, scored, drafted)


def _draft(
    entries: Seq[ScheduledSequence],
    qo_indptr: np.ndarray,
    logit_rows: np.ndarray,
    rows: np.ndarray,
    no_slot: int,
) -> dict[int, list[int]]:
    """Fills in the rows of drafts before the last, and moves the last row's position."""
    drafted: dict[int, list[int]] = {}
    drafting = [i for i, entry in enumerate(entries) if entry.drafts]
    if not drafting:
        return drafted
    num_rows = len(entries) + sum(entry.num_more_rows for entry in entries if entry.num_scored)
    fields = as_records(rows)
    for i in drafting:
        n = len(entries[i].drafts)
        more = list(range(num_rows, num_rows + n))
        logit_rows[more] = qo_indptr[i] + np.arange(n)
        rows[more] = rows[i]
        fields["slot"][more] = no_slot  # the host finds out which of them is the newest token
        fields["position"][more] += np.arange(n, dtype=np.int32)
        fields["position"][i] += n
        chain = drafted[i] = [*more, i]
        fields["chain"][chain] = i + 1
        fields["draft"][chain[1:]] = entries[i].drafts
        num_rows += n
    return drafted


def _score(
    entries: Seq[ScheduledSequence], qo_indptr: np.ndarray, logit_rows: np.ndarray, rows: np.ndarray
) -> list[ScoredRows]:
    """Fills in rows for scored tokens. The last token of a sequence uses its own row."""
    scored, num_rows = [], len(entries)
    for i, entry in enumerate(entries):
        if not (n := entry.num_scored):
            continue
        seq, begin = entry.seq, entry.begin + 1
        which = list(range(num_rows, num_rows + n))
        if n == entry.num_tokens:
            which[-1] = i
        logit_rows[which] = qo_indptr[i] + np.arange(n)
        as_records(rows)["given"][which] = seq.tokens[begin : begin + n]
        scored.append(ScoredRows(seq, begin, which))
        num_rows += entry.num_more_rows
    return scored


def _indptr(lens: np.ndarray) -> np.ndarray:
    out = np.zeros(len(lens) + 1, np.int32)
    lens.cumsum(out=out[1:])
    return out


def make_forward(config: models.ModelConfig, tree: Any, bucket: Bucket) -> Callable[..., Any]:
    """(weights, words, last_tokens, k_pages, v_pages) -> logits, rows, k_pages, v_pages.

    weights: the leaves of the model's params, whose structure is `tree`. words: Batch.words. rows:
    the rows in `words`, for `sample`. To be jitted with the pages donated.
    """

    def forward(
        weights: list[jax.Array],
        words: jax.Array,
        last_tokens: jax.Array,
        k_pages: jax.Array,
        v_pages: jax.Array | None,
    ) -> tuple[Any, ...]:
        params = jax.tree.unflatten(tree, weights)
        (tokens, positions), logit_rows, rows, planned, lengths = bucket.unpack(words)
        striped = tuple(parallel.plan_stripes(stripes, *lengths) for stripes in bucket.stripes)
        tokens = jnp.where(tokens < 0, last_tokens[~tokens], tokens)
        logits, k_pages, v_pages = models.forward(
            params, config, tokens, positions, k_pages, v_pages, striped or planned, logit_rows
        )
        return logits, rows, k_pages, v_pages

    return forward
