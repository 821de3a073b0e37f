"""A draft model: a smaller model that proposes next tokens for the model to verify.

Its kv cache has as many pages as the model's, under the same numbers. Both use one page table per
sequence, so shared prefixes, preemption and freed pages need no extra handling. It reads a sequence
only when drafts are wanted: first the prompt, later the tokens that came while drafting paused, a
chunk a step. It records for each page how much it has read, so a cached prefix that it read for one
sequence serves others.

It samples like the model, by the sequence's seed and positions, so with the same noise: at any
temperature a draft is right as often as both models choose the same token. The output does not
depend on it (see `drafts`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Seq

import jax

from jax_attn import models
from jax_attn.serve._engine import sampling
from jax_attn.serve._engine.device import Device, Scores
from jax_attn.serve._scheduling.drafts import Pace
from jax_attn.serve._scheduling.request import Sequence
from jax_attn.serve._scheduling.step_plan import ScheduledSequence, SchedulerConfig

# Prompt chunks that it reads in a step beside decodes: it is small, so more than one.
_READ_CHUNKS = 4
_WEIGHT = 0.05  # weight of the newest drafts in the running average
_UNKNOWN = 0  # stands for a draft until it is made, and for one that is not a token of the model


def have_same_tokens(draft: models.Model, model: models.Model) -> bool:
    """Whether both models' tokens have the same text. Matrix sizes may differ by padding."""
    return bool(draft.tokenizer.get_vocab() == model.tokenizer.get_vocab())


class DraftModel:
    """The draft model's device, and how much it has read.

    With `num_ahead` it reads a token so many places before the token's own, and keeps no keys and
    values of guesses that were accepted: it reads them again.
    """

    num_ahead = 0

    def __init__(
        self, device: Device, max_positions: int, vocab_size: int, capacity: SchedulerConfig
    ):
        """vocab_size: of the model. capacity: the capacities of the model's scheduler."""
        self.device = device
        self.max_positions = max_positions
        self.cost = 0.0  # of a draft, in steps of the model; measured in the warm-up
        self.gain = 0.0  # of recent drafts of all sequences: see Pace
        # Tokens of a sequence that are read in the step that makes its drafts; more are read
        # before.
        self.chunk = capacity.max_step_tokens // capacity.max_running
        self._page_size, self._vocab_size = capacity.page_size, vocab_size
        self._max_tokens = capacity.max_step_tokens
        self._read_tokens = min(_READ_CHUNKS * capacity.prefill_chunk, capacity.max_step_tokens)
        self._filled = [0] * capacity.num_pages  # number of tokens read, for each page

    def reset(self) -> None:
        """See Device.reset."""
        self.device.reset()
        self._filled = [0] * len(self._filled)

    def forget(self, pages: Seq[int]) -> None:
        """Forgets what it has read in pages that have the tokens of others now."""
        for page in pages:
            self._filled[page] = 0

    def admit(self, seq: Sequence) -> None:
        """Sets up `seq`, which has a slot from the next step on."""
        # A draft needs only parameters that shape the choice among likely tokens, without logprobs.
        params = dataclasses.replace(
            seq.params,
            logprobs=None,
            prompt_logprobs=False,
            logit_bias=(),
            repetition_penalty=1.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
        )
        self.device.set_params(seq.slot, params)

    def draft(self, entries: Seq[ScheduledSequence], newest: jax.Array) -> None:
        """Makes the drafts that drafters have proposed for the entries of a step, and reads tokens.

        newest: [max_running] i32. The newest token of each slot, which may be only on the device.
        """
        for entry in entries:
            self._forget_overwritten(entry)
        guessing = sorted((e for e in entries if e.drafts), key=lambda e: -len(e.drafts))
        batch = [self._unread(e.seq, samples=True) for e in guessing]
        num_left = min(self._read_tokens, self._max_tokens - sum(e.num_tokens for e in batch))
        for seq in (e.seq for e in entries if e.seq.drafter is not None):
            if _drafter(seq).is_behind and num_left > 0:
                entry = self._unread(seq, samples=False)
                entry.num_tokens = min(entry.num_tokens, num_left)
                num_left -= entry.num_tokens
                batch.append(entry)
        if not batch:
            return
        scores, kind = self._forward(batch, newest)
        for entry in batch:
            # With a grammar, the sample in flight may turn out to be void.
            num_unsure = entry.seq.num_in_flight if entry.seq.may_retract else 0
            self._mark(entry.seq, entry.begin + entry.num_tokens - num_unsure)
        if guessing:
            self._make(guessing, scores, kind)

    def num_cached(self, seq: Sequence) -> int:
        """The tokens that it has read in a sequence's pages, possibly for another sequence."""
        num_read = 0
        for page in seq.pages:
            num_read += self._filled[page]
            if self._filled[page] < self._page_size:
                break
        # Pages after these hold old contents.
        return min(num_read, seq.num_computed - self.num_ahead)

    def _make(self, guessing: list[ScheduledSequence], scores: Scores, kind: sampling.Kind) -> None:
        """Samples drafts one after the other until all sequences have as many as they want."""
        sampled = []
        while True:
            sampled.append(self.device.sample(scores, kind, None))
            i = len(sampled)
            more = [
                ScheduledSequence(
                    e.seq, self._end(e.seq) + i - 1, 1, samples=True, num_ahead=self.num_ahead
                )
                for e in guessing
                if len(e.drafts) > i
            ]
            if not more:
                break
            scores, kind = self._forward(more)
        tokens = [self.device.read(each).tokens for each in sampled]
        for row, entry in enumerate(guessing):
            made = [int(tokens[i][row]) for i in range(len(entry.drafts))]
            entry.drafts = tuple(t if 0 <= t < self._vocab_size else _UNKNOWN for t in made)

    def _forward(
        self, entries: Seq[ScheduledSequence], newest: jax.Array | None = None
    ) -> tuple[Scores, sampling.Kind]:
        batch = self.device.plan(entries)
        return self.device.forward(batch, newest), batch.kind

    def _unread(self, seq: Sequence, samples: bool) -> ScheduledSequence:
        begin = _drafter(seq).num_read
        num_tokens = self._end(seq) - begin
        return ScheduledSequence(seq, begin, num_tokens, samples, num_ahead=self.num_ahead)

    def _end(self, seq: Sequence) -> int:
        """The places that it has something to read for."""
        return seq.num_known - self.num_ahead

    def _mark(self, seq: Sequence, end: int) -> None:
        """Records that all tokens before `end` are read."""
        drafter, size = _drafter(seq), self._page_size
        for i in range(drafter.num_marked // size, -(-end // size)):
            self._filled[seq.pages[i]] = min(size, end - i * size)
        drafter.num_read = drafter.num_marked = end

    def _forget_overwritten(self, entry: ScheduledSequence) -> None:
        """Resets pages that the step starts to write: their record is that of a former sequence."""
        size = self._page_size
        begin = entry.begin + entry.num_again
        first, last = -(-begin // size), -(-(entry.begin + entry.num_tokens) // size)
        for page in entry.seq.pages[first:last]:
            self._filled[page] = 0


class ModelDrafter:
    """The drafter of one sequence. It only chooses the number of drafts; DraftModel makes them."""

    def __init__(self, model: DraftModel, most: int):
        self._model, self._pace = model, Pace(most, model.cost, expected=model.gain)
        self._admission = -1  # counts admissions: the pages change with each
        self.num_read = 0  # tokens whose kv the draft model has
        self.num_marked = 0  # the part of num_read that is recorded for pages
        self.is_behind = False  # it has to read more before it can draft

    def propose(self, seq: Sequence, most: int) -> list[int]:
        """Placeholders for the drafts that will be made, up to `most`."""
        self.is_behind = False
        num = min(self._pace.next(most), self._model.max_positions - seq.num_known)
        if num <= 0:
            return []
        if self._admission != seq.num_preempted:
            self._admission = seq.num_preempted
            self.num_read = self.num_marked = self._model.num_cached(seq)
        self.is_behind = seq.num_known - self.num_read > self._model.chunk
        return [] if self.is_behind else [_UNKNOWN] * num

    def settle(self, num_drafts: int, num_taken: int) -> None:
        gain = self._pace.settle(num_drafts, num_taken)
        self._model.gain += _WEIGHT * (gain - self._model.gain)
        if not self._model.num_ahead:
            self.num_read += min(num_taken, num_drafts - 1)  # the last draft was made but not read


def _drafter(seq: Sequence) -> ModelDrafter:
    assert isinstance(seq.drafter, ModelDrafter)
    return seq.drafter
