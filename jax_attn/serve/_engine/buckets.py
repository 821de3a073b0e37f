"""The static shapes of a step. Each is compiled once; a batch uses the smallest one that fits."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

import jax_attn as ja
from jax_attn import models, parallel
from jax_attn.models._layers.selected_pages import PageSelection, SelectedRows
from jax_attn.serve._engine import selected_rows
from jax_attn.serve._engine.sampling import ROW_WORDS, Kind, SlotParams, as_records
from jax_attn.serve._scheduling.pictures import Picture
from jax_attn.serve._scheduling.request import Sequence
from jax_attn.serve._scheduling.step_plan import ScheduledSequence, SchedulerConfig


class Needs(NamedTuple):
    """What a step needs of its bucket.

    longest: tokens of the sequence that has the most.
    """

    num_tokens: int
    num_rows: int
    longest: int
    num_checkpoints: int
    has_pictures: bool

    @classmethod
    def of(cls, entries: Seq[ScheduledSequence]) -> Needs:
        lengths = [entry.num_tokens for entry in entries]
        return cls(
            num_tokens=sum(lengths),
            num_rows=len(entries) + sum([entry.num_more_rows for entry in entries]),
            longest=max(lengths, default=0),
            num_checkpoints=len(_checkpoints(entries)),
            has_pictures=any(e.seq.pictures and e.pictures for e in entries),
        )


@dataclass(frozen=True)
class Bucket:
    """Capacities of one compiled forward pass."""

    num_tokens: int
    num_rows: int  # of logits, and at most as many sequences
    specs: tuple[ja.AttentionSpec, ...]
    # KV shards for each spec, where pages are split over devices: each device plans its own shard.
    kv_shards: tuple[parallel.KvShards, ...] = ()
    has_adapters: bool = False
    state_spec: ja.StateSpec | None = None  # of a model with recurrent layers
    position_parts: int = 1  # see ModelConfig.position_parts
    # [number, hidden]: the shape of what a token of a picture has; None: no token may be of one.
    picture_shape: tuple[int, int] | None = None
    selected: selected_rows.SelectedShape | None = None  # None: all rows read all their pages

    def holds(self, needs: Needs) -> bool:
        """Whether a step that needs so much fits."""
        if self.picture_shape is None and needs.has_pictures:
            return False
        if needs.num_tokens > self.num_tokens or needs.num_rows > self.num_rows:
            return False
        if self.state_spec is None:
            return True
        most = self.state_spec.max_qo_len
        assert most is not None
        return needs.num_checkpoints <= self.state_spec.max_checkpoints and needs.longest <= most

    @property
    def name(self) -> str:
        shows = "" if self.picture_shape is None else ", pictures"
        return f"{self.num_tokens} tokens x {self.num_rows} sequences{shows}"

    @cached_property
    def _bounds(self) -> tuple[int, ...]:
        """Offsets in `words` of the parts that `unpack` returns, and the end of the last."""
        plans = [spec.plan_words for spec in self.specs]
        if self.kv_shards:
            assert self.specs[0].max_kv_pages is not None
            n = self.num_rows
            plans = [n + 1, n, n + 1, self.specs[0].max_kv_pages]
        if self.selected is not None:
            plans += self.selected.sizes
        adapters = self.num_tokens if self.has_adapters else 0
        of_states = 0 if self.state_spec is None else self.state_spec.plan_words
        sizes = (
            (1 + self.position_parts) * self.num_tokens,
            self.num_rows,
            ROW_WORDS * self.num_rows,
            adapters,
            0 if self.picture_shape is None else self.num_tokens,
            of_states,
            *plans,
        )
        return tuple(itertools.accumulate(sizes, initial=0))

    @property
    def num_words(self) -> int:
        return self._bounds[-1]

    @property
    def plans_begin(self) -> int:
        """Where the attention plans begin in `words`, or the lengths that they are made of."""
        num_parts = 4 if self.kv_shards else len(self.specs)
        num_parts += 0 if self.selected is None else len(self.selected.sizes)
        return self._bounds[-1 - num_parts]

    def unpack(self, words: Any) -> Arguments:
        """Views of `words` [num_words] i32, a numpy or a traced array."""
        parts = (words[begin:end] for begin, end in itertools.pairwise(self._bounds))
        inputs, logit_rows, rows, adapters, picture_ends, of_states, *plans = parts
        selected = None
        if self.selected is not None:
            selected, plans = self.selected.unpack(*plans[-3:]), plans[:-3]
        planned: tuple[ja.AttentionPlan, ...] = ()
        if not self.kv_shards:
            planned = tuple(ja.AttentionPlan(*plan) for plan in zip(plans, self.specs, strict=True))
        lengths = tuple(plans) if self.kv_shards else ()
        rows = rows.reshape(-1, ROW_WORDS)
        state_plan = None
        if self.state_spec is not None:
            state_plan = ja.StatePlan(of_states, self.state_spec)
        inputs = inputs.reshape(1 + self.position_parts, -1)
        return Arguments(
            inputs,
            logit_rows,
            rows,
            adapters,
            picture_ends,
            planned,
            lengths,
            state_plan,
            selected,
        )


class Arguments(NamedTuple):
    """The inputs of a step.

    inputs: [1 + position_parts, num_tokens] i32. Token (or ~slot: the newest token of that slot),
      and position.
    logit_rows: [num_rows] i32. The last token of each sequence, then the tokens that are scored.
    rows: [num_rows, ROW_WORDS] i32. Sampling parameters of each row, words of sampling.ROW.
    adapters: [num_tokens] i32. The slot of each token's adapter, -1: none. [0] without adapters.
    picture_ends: [num_tokens] i32. See models.PictureRows. [0] without pictures.
    plans: one for each spec of the bucket; empty with KV shards.
    lengths: with KV shards, the arguments of plan_kv_shards, padded to the bucket's capacities:
      [num_rows + 1], [num_rows], [num_rows + 1] and [max_kv_pages] i32.
    state_plan: of recurrent states; None: the model has none.
    selected: which rows select pages; None: none does.
    """

    inputs: Any
    logit_rows: Any
    rows: Any
    adapters: Any
    picture_ends: Any
    plans: tuple[ja.AttentionPlan, ...]
    lengths: tuple[Any, ...]
    state_plan: ja.StatePlan | None = None
    selected: SelectedRows | None = None


class Batch(NamedTuple):
    """The arguments of a step, packed into one array to copy to the device.

    On the device they have the same addresses in each step, so XLA need not update a captured
    graph.


    words: on the host, and never written again: XLA may alias them.
    kind: of the sampling.
    scored: where the logprobs of prompts come from.
    features: [num_tokens, *picture_shape], see models.PictureRows; None without pictures.
    """

    bucket: Bucket
    words: np.ndarray
    kind: Kind
    scored: list[ScoredRows]
    drafted: dict[int, list[int]]  # entry -> rows of the token before its drafts and of each draft
    features: np.ndarray | None = None
    # Arguments of the plan: qo_indptr, kv_lens, page_indptr, page_indices. Pages are those of a
    # whole burst.
    lengths: tuple[np.ndarray, ...] = ()


RowsOf: TypeAlias = Callable[[Sequence, Picture], np.ndarray]
"""(sequence, picture) -> what the picture's tokens have, [number of tokens, *picture_shape]."""


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


def state_spec(
    config: models.ModelConfig,
    dtype: str,
    capacities: SchedulerConfig,
    num_tokens: int,
    num_rows: int,
    is_first_choice: bool,
    max_drafts: int = 0,
    batch_invariant: bool = False,
) -> ja.StateSpec | None:
    """The spec of recurrent states of a bucket.

    batch_invariant: tokens are computed one by one, so that cuts of a prompt change no bits.

    Buckets with a row for each token are for decodes alone, unless there is no other bucket for a
    step: a token a sequence, and drafts in front of it (accepted in the last step) and behind it.
    """
    of_decodes = num_tokens == num_rows and is_first_choice
    return models.state_spec(
        config,
        dtype=dtype,
        max_tokens=num_tokens,
        max_batch=num_rows,
        num_slots=capacities.num_states,
        max_qo_len=min(num_tokens, 1 + 2 * max_drafts) if of_decodes else num_tokens,
        chunk_tokens=1 if batch_invariant else None,
        max_checkpoints=0 if of_decodes else capacities.step_checkpoints,
    )


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
    if capacities.streaming is not None:
        pages_each = capacities.streaming.max_table_pages
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
    if capacities.streaming is not None:
        longest = min(longest, capacities.streaming.max_table_pages * capacities.page_size)
    kv_split = _SPLIT_STEP * max(1, -(-longest // (4 * _SPLIT_STEP)))
    num_chunks = -(-longest // kv_split)
    make = partial(balanced_specs, config, dtype, capacities, num_tokens, num_rows, **kwargs)

    def num_items(spec: ja.AttentionSpec) -> int:
        group_size = spec.num_qo_heads // spec.num_kv_heads
        num_tiles = num_rows + num_tokens * group_size // spec.kernel_config["tile_q_0"]
        return num_tiles * spec.num_kv_heads * num_chunks

    tried = make(schedule="fixed_split", kv_split=kv_split)
    return make(
        schedule="fixed_split",
        kv_split=kv_split,
        max_items=max(2, *map(num_items, tried)),
        max_partial_rows=num_tokens * config.num_qo_heads * num_chunks,
    )


_SPLIT_STEP = 1024  # tokens, a multiple of every kernel's tile_kv


def make_batch(
    bucket: Bucket,
    entries: Seq[ScheduledSequence],
    slots: SlotParams,
    rows_of: RowsOf | None = None,
) -> Batch:
    """Packs what `forward` computes for the entries, in their order."""
    page_size = bucket.specs[0].page_size
    assert page_size is not None
    seqs, n = [entry.seq for entry in entries], len(entries)
    qo_lens = np.array([entry.num_tokens for entry in entries], np.int32)
    begins = np.array([entry.begin for entry in entries], np.int32)
    # In the cache: without what a kv policy dropped.
    kv_lens = begins + qo_lens - np.array([seq.num_dropped for seq in seqs], np.int32)
    num_later = np.array([entry.num_steps - 1 for entry in entries], np.int32)
    num_pages = -(-(kv_lens + num_later) // page_size)
    qo_indptr, page_indptr = (_indptr(lens) for lens in (qo_lens, num_pages))
    tables = [seq.pages[:num] for seq, num in zip(seqs, num_pages.tolist(), strict=True)]
    page_indices = np.frombuffer(b"".join(tables), np.int32)

    tokens: list[int] = []
    for entry, begin in zip(entries, begins.tolist(), strict=True):
        drafts = entry.drafts
        first = begin + entry.num_ahead
        known = entry.seq.tokens[first : first + entry.num_tokens]
        tokens += known
        # One token is missing: the sample in flight.
        if len(known) + len(drafts) < entry.num_tokens:
            tokens.append(~entry.seq.slot)
        if drafts:
            tokens += drafts

    words = np.zeros(bucket.num_words, np.int32)
    arguments = bucket.unpack(words)
    inputs, logit_rows, rows, adapters, picture_ends, _, _, state_plan, _ = arguments
    if state_plan is not None:
        state_plan.buffer[:] = _plan_states(state_plan.spec, entries, qo_indptr).buffer
    inputs[0, : len(tokens)] = tokens
    inputs[1:, : len(tokens)] = np.arange(len(tokens)) + (begins - qo_indptr[:-1]).repeat(qo_lens)
    features = None
    if bucket.position_parts > 1:
        _place_pictures(inputs[1:], entries, qo_indptr)
    if bucket.picture_shape is not None:
        features = _show_pictures(bucket, picture_ends, entries, qo_indptr, rows_of)
    logit_rows[:n] = qo_indptr[1:] - 1
    if bucket.has_adapters:
        found = np.array([-1 if s.adapter is None else s.adapter.slot for s in seqs], np.int32)
        adapters[: len(tokens)], adapters[len(tokens) :] = found.repeat(qo_lens), -1
    kind = slots.fill(
        rows,
        [entry.seq.slot if entry.samples else slots.max_running for entry in entries],
        [e.begin + e.num_ahead + e.num_certain - e.seq.num_prompt for e in entries],
    )
    scored = _score(entries, qo_indptr, logit_rows, rows, slots)
    if scored:
        kind = "full"
    drafted = _draft(entries, qo_indptr, logit_rows, rows, slots.max_running)
    batch = qo_indptr, kv_lens, page_indptr, page_indices
    _plan_attention(arguments, batch, selected_rows.of_outputs(entries))
    return Batch(bucket, words, kind, scored, drafted, features, batch)


def later_batch(first: Batch, entries: Seq[ScheduledSequence], step: int) -> Batch:
    """A later step of a burst, which begins with `first`, the result of make_batch.

    step: from 1 on. It has the first of the entries: those with more steps. The others have all
    tokens of max_tokens, and nobody reads what is sampled in their rows.
    """
    n = sum(entry.num_steps > step for entry in entries)
    bucket, (qo_indptr, kv_lens, page_indptr, page_indices) = first.bucket, first.lengths
    words = np.empty_like(first.words)
    words[: bucket.plans_begin] = first.words[: bucket.plans_begin]
    arguments = bucket.unpack(words)
    inputs, fields = arguments.inputs, as_records(arguments.rows)
    inputs[0, :n] = ~fields["slot"][:n]
    inputs[1:, :n] += step
    fields["position"][:n] += step
    of_pages = page_indptr[: n + 1], page_indices[: page_indptr[n]]
    of_all = qo_indptr[: n + 1], kv_lens[:n] + step, *of_pages
    _plan_attention(arguments, of_all, np.ones(n, bool))  # it has tokens of outputs alone
    return first._replace(words=words)


def _plan_attention(
    arguments: Arguments, batch: tuple[np.ndarray, ...], may_select: np.ndarray
) -> None:
    """Fills in plans, or the lengths that devices make them of.

    batch: as Batch.lengths. may_select: see selected_rows.of_outputs.
    """
    if arguments.selected is not None:
        selected_rows.fill(arguments.selected, batch, may_select)
    for plan in arguments.plans:
        ja.plan(plan.spec, *batch, buffer=plan.buffer)
    qo_indptr, _, page_indptr, _ = batch
    ends = qo_indptr[-1], 0, page_indptr[-1], 0
    # 0 elements without KV shards
    for room, array, rest in zip(arguments.lengths, batch, ends, strict=False):
        room[: len(array)], room[len(array) :] = array, rest  # sequences without tokens


def _place_pictures(
    positions: np.ndarray, entries: Seq[ScheduledSequence], qo_indptr: np.ndarray
) -> None:
    """Corrects the positions of sequences with pictures. positions: [3, num_tokens], the indices of
    the tokens."""
    for i, entry in enumerate(entries):
        if not entry.seq.pictures:
            continue
        end = entry.begin + entry.num_tokens
        spans = [(x.begin, x.rows, x.columns) for x in entry.seq.pictures]
        own = slice(qo_indptr[i], qo_indptr[i + 1])
        positions[:, own] = models.picture_positions(entry.begin, end, spans)


def _show_pictures(
    bucket: Bucket,
    picture_ends: np.ndarray,
    entries: Seq[ScheduledSequence],
    qo_indptr: np.ndarray,
    rows_of: RowsOf | None,
) -> np.ndarray:
    """Fills in where pictures end, and returns what their tokens have instead of embeddings."""
    assert bucket.picture_shape is not None
    shape = bucket.num_tokens, *bucket.picture_shape
    features = np.zeros(shape, jnp.dtype(bucket.specs[0].dtype))
    for i, entry in enumerate(entries):
        for picture in entry.pictures:
            assert rows_of is not None
            begin = max(entry.begin, picture.begin)
            end = min(entry.begin + entry.num_tokens, picture.end)
            at = qo_indptr[i] - entry.begin
            rows = rows_of(entry.seq, picture)
            features[at + begin : at + end] = rows[begin - picture.begin : end - picture.begin]
            shown = picture.is_shown[begin - picture.begin : end - picture.begin]
            picture_ends[at + begin : at + end] = np.where(shown, picture.end, 0)
    return features


def _plan_states(
    spec: ja.StateSpec, entries: Seq[ScheduledSequence], qo_indptr: np.ndarray
) -> ja.StatePlan:
    return ja.plan_linear_attention(
        spec,
        qo_indptr,
        [entry.reads_state for entry in entries],
        [entry.writes_state for entry in entries],
        commit_lens=[entry.num_certain for entry in entries],
        checkpoints=np.array(_checkpoints(entries), np.int32).reshape(-1, 3),
    )


def _checkpoints(entries: Seq[ScheduledSequence]) -> list[tuple[int, int, int]]:
    """(entry, tokens of it, slot) of the states to write beside those of the entries."""
    return [
        (i, num_tokens - entry.begin, slot)
        for i, entry in enumerate(entries)
        for num_tokens, slot in entry.checkpoints
        if slot != entry.writes_state
    ]


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
        logit_rows[more] = qo_indptr[i] + entries[i].num_certain - 1 + np.arange(n)
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
    entries: Seq[ScheduledSequence],
    qo_indptr: np.ndarray,
    logit_rows: np.ndarray,
    rows: np.ndarray,
    slots: SlotParams,
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
        filled = np.zeros((n, ROW_WORDS), np.int32)
        slots.fill_scored(filled, seq.slot, seq.tokens[begin : begin + n])
        rows[which] = filled
        scored.append(ScoredRows(seq, begin, which))
        num_rows += entry.num_more_rows
    return scored


def _indptr(lens: np.ndarray) -> np.ndarray:
    out = np.zeros(len(lens) + 1, np.int32)
    lens.cumsum(out=out[1:])
    return out


def make_forward(
    config: models.ModelConfig, tree: Any, lora_tree: Any, bucket: Bucket
) -> Callable[..., Any]:
    """(weights, words, last_tokens, *cache, lora, features, *bounds) -> logits, rows, *cache,
    *bounds.

    weights: the leaves of the model's params, whose structure is `tree`. words: Batch.words. rows:
    the rows in `words`, for `sample`. cache: k_pages, v_pages and states; None without recurrent
    layers. To be jitted with the cache donated. lora: the leaves of the adapters' pools. features:
    Batch.features. bounds: of pages, if the bucket selects some: see selected_pages.init_bounds.
    """

    def forward(
        weights: list[jax.Array],
        words: jax.Array,
        last_tokens: jax.Array,
        k_pages: models.Pages,
        v_pages: models.Pages | None,
        states: models.States | None,
        lora: list[jax.Array],
        features: jax.Array | None,
        *bounds: jax.Array,
    ) -> tuple[Any, ...]:
        params = jax.tree.unflatten(tree, weights)
        (tokens, *parts), *given = bucket.unpack(words)
        logit_rows, rows, slots, picture_ends, planned, lengths, state_plan, selected = given
        selection = None if selected is None else PageSelection(bounds[0], selected)
        positions = jnp.stack(parts) if len(parts) > 1 else parts[0]
        pictures = None
        if features is not None:
            pictures = models.PictureRows(features, picture_ends)
        adapters = None
        if bucket.has_adapters:
            adapters = models.Adapters(jax.tree.unflatten(lora_tree, lora), slots)
        sharded = tuple(
            parallel.plan_kv_shards(kv_shards, *lengths) for kv_shards in bucket.kv_shards
        )
        tokens = jnp.where(tokens < 0, last_tokens[~tokens], tokens)
        cache = k_pages, v_pages, sharded or planned
        logits, k_pages, v_pages, *new = models.forward(
            params,
            config,
            tokens,
            positions,
            *cache,
            logit_rows,
            adapters,
            states,
            state_plan,
            pictures,
            selection=selection,
        )
        if selection is not None:
            bounds = (selection.bounds,)
        return logits, rows, k_pages, v_pages, *(new or [None]), *bounds

    return forward
