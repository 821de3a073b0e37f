"""Restricts what the sequences of a step may sample: masks for grammars and for min_tokens.

Other threads make masks (see `token_masks`). If a sequence's mask is late, its sample is retracted:
the sequence is held out of the next steps until the mask is there, and its last token goes through
the model again. Tokens that a grammar forces are appended without a step.
"""

from __future__ import annotations

import logging

import numpy as np

from jax_attn.serve._engine import sampling
from jax_attn.serve._engine.counters import Counters
from jax_attn.serve._engine.outputs import Outputs
from jax_attn.serve._engine.records import LaunchedStep, LiveSequence
from jax_attn.serve._grammar.grammar import Grammars
from jax_attn.serve._grammar.token_masks import SLOW_SECONDS, MaskJob, workers
from jax_attn.serve._scheduling.request import FinishReason, Status
from jax_attn.serve._scheduling.scheduler import Scheduler

log = logging.getLogger("jax_attn.serve")

_REST_SECONDS = 0.01  # after which the engine checks for new work


class ConstrainedDecoding:
    """Advances the grammars of sequences, and tells the scheduler and `Outputs` the results."""

    def __init__(
        self,
        grammars: Grammars,
        scheduler: Scheduler,
        outputs: Outputs,
        counters: Counters,
        vocab_size: int,
    ):
        self._grammars, self._scheduler = grammars, scheduler
        self._outputs, self._counters = outputs, counters
        self._vocab_size = vocab_size
        self._workers = workers()
        # By id. Held sequences take no part in steps and wait only for their mask jobs. `take_late`
        # drops those that finish meanwhile.
        self._held: dict[str, LiveSequence] = {}

    @property
    def num_held(self) -> int:
        """The number of sequences that wait for their masks."""
        return sum(live.seq.status is not Status.FINISHED for live in self._held.values())

    def begin(self, live: LiveSequence) -> None:
        """Starts the first mask of an admitted sequence, unless it has one already."""
        if live.grammar is not None and live.grammar.job is None:
            self._workers.start(live.grammar, [])

    def advance(self, live: LiveSequence, tokens: list[int]) -> None:
        """Starts the mask after sampled tokens, if the sequence has a grammar."""
        assert live.grammar is not None
        self._workers.start(live.grammar, tokens)
        if live.at_length:
            self._held[live.seq.id] = live

    # ---- masks of a step -----------------------------------------------------------------------

    def wait_for_masks(self, launched: LaunchedStep) -> None:
        """Waits a moment for the masks of a step, except those of grammars known to be slow."""
        going_on = [live for _, live in launched.samples if live.seq.status is not Status.FINISHED]
        grammars = [live.grammar for live in going_on]
        jobs = [g.job for g in grammars if g is not None and not g.was_slow]
        self._workers.wait([job for job in jobs if job is not None], SLOW_SECONDS)

    def mask_samples(self, launched: LaunchedStep) -> np.ndarray | None:
        """Decides what the sequences of a step may sample.

        Removes from `launched.samples` the sequences that need no token now: they have finished,
        their grammar has forced tokens or ended them, or their mask is late.

        Returns [num_rows, ceil(vocab / 32)] i32, one bit per token; None: everything is allowed.
        """
        mask = None
        wanted = []
        for row, live in launched.samples:
            if live.seq.status is Status.FINISHED:
                continue
            if live.grammar is not None:
                allowed = self._mask_of(live)
                if allowed is None:
                    continue
            elif live.seq.params.min_tokens and _may_not_stop(live):
                allowed = None
            else:
                wanted.append((row, live))
                continue
            if mask is None:
                mask = sampling.allow_all(launched.batch.bucket.num_rows, self._vocab_size)
            if allowed is not None:
                _fill_rows(mask, launched, row, live, allowed)
            else:
                sampling.forbid(mask[row], live.stop_tokens)
            wanted.append((row, live))
        launched.samples = wanted
        return mask

    def _mask_of(self, live: LiveSequence) -> np.ndarray | None:
        """The mask of the next sample; None: no token is needed.

        That is so if some are forced, or if the sequence has ended or has to wait for its mask.
        """
        assert live.grammar is not None and live.grammar.job is not None
        job = live.grammar.job
        if not job.is_done:
            self._scheduler.retract(live.seq)
            self._held[live.seq.id] = live
            # The device still counts the token that it samples.
            live.needs_sampler_state = sampling.keeps_state(live.seq.params)
            return None
        return job.mask if self._take(live, job) else None

    # ---- sequences that wait -------------------------------------------------------------------

    def take_late(self) -> None:
        """Releases held sequences whose masks have come."""
        for live in list(self._held.values()):
            assert live.grammar is not None and live.grammar.job is not None
            if live.seq.status is Status.FINISHED:
                del self._held[live.seq.id]
            elif live.grammar.job.is_done:
                del self._held[live.seq.id]
                self._take(live, live.grammar.job)
                self._scheduler.resume(live.seq)

    def wait_for_any(self) -> None:
        """Returns when a held sequence has its mask, or after a moment."""
        grammars = [live.grammar for live in self._held.values()]
        jobs = [g.job for g in grammars if g is not None and g.job is not None]
        self._workers.wait_for_any(jobs, _REST_SECONDS)

    # ---- what a grammar says -------------------------------------------------------------------

    def _take(self, live: LiveSequence, job: MaskJob) -> bool:
        """Applies the result of a finished job. Returns whether its mask is for the next token."""
        seq = live.seq
        if job.bug is not None:
            log.error("a grammar failed", exc_info=job.bug)
            self._outputs.fail(seq, f"The grammar failed: {type(job.bug).__name__}.")
        elif live.at_length:  # its grammar decides whether the text is complete
            reason = FinishReason.STOP if job.is_stopped else FinishReason.LENGTH
            self._outputs.finish(seq, reason)
        elif job.error is not None:
            assert seq.params.grammar is not None
            self._grammars.forget(seq.params.grammar, seq.tenant)
            self._outputs.event(seq).is_clients_fault = True
            self._outputs.fail(seq, job.error)
        elif job.forced:
            self._append_forced(live, job)
        elif job.is_stopped:
            self._outputs.finish(seq, FinishReason.STOP)
        else:
            return True
        return False

    def _append_forced(self, live: LiveSequence, job: MaskJob) -> None:
        """Jump-forward: appends the only tokens that may follow, without sampling."""
        assert live.grammar is not None
        seq, tokens = live.seq, job.forced
        self._counters.totals["jump_forward_tokens"] += len(tokens)
        # The device's counts do not include these tokens.
        live.needs_sampler_state = sampling.keeps_state(seq.params)
        self._outputs.add_forced(live, tokens, job.is_stopped)
        if seq.finish_reason is None:
            self._workers.start(live.grammar, [])


def _may_not_stop(live: LiveSequence) -> bool:
    """Whether the sample in flight is among the first min_tokens, which cannot end the text."""
    seq = live.seq
    return seq.num_output + seq.num_in_flight - 1 < seq.params.min_tokens


def _fill_rows(
    mask: np.ndarray, launched: LaunchedStep, row: int, live: LiveSequence, allowed: np.ndarray
) -> None:
    """Writes the mask rows of a sequence.

    They are that of its next token, and those after its drafts as far as its grammar accepts them.
    """
    assert live.grammar is not None
    rows, drafts = launched.batch.drafted.get(row, [row]), launched.drafts.get(row, ())
    ahead = live.grammar.look_ahead(drafts) if drafts else []
    for each, of_row in zip(rows, [allowed, *ahead], strict=False):
        mask[each] = of_row
    launched.num_masked[row] = 1 + len(ahead)
