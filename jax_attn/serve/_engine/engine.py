"""The engine: from sequences to tokens, one step of the device at a time.

    engine = Engine(model, EngineConfig(num_pages=1024))
    engine.warm_up()
    engine.submit([Sequence(...), ...])
    while engine.has_work:
        for event in engine.step():
            ...

Step n + 1 is scheduled, planned and dispatched before the tokens of step n are known: a decode
takes its token from the device's memory. While the device computes step n + 1, the host reads step
n. The life of a step, and the two calls of `Engine.step` in which it is:

    host                                                  device
    ----------------------------------------------------  --------------------------
    call n
      schedule    Scheduler.schedule: who, which tokens   computes step n - 1
      draft       the draft model's guesses, if any
      plan        Device.plan: buckets, packed arguments
      dispatch    Device.forward -------------------------> queued: forward n
                  Scheduler.launched: pages may be shared
      dispatch    Device.sample --------------------------> queued: sampling n
      wait        Device.read of step n - 1 <-------------- tokens of step n - 1
      retire      its tokens to sequences, texts, events    begins forward n
    call n + 1
      schedule .. dispatch of step n + 1                  computes step n
      wait        Device.read of step n <------------------ tokens of step n
      retire      Scheduler.append; or finish

Where a sequence of step n has a grammar, the mask of its sample depends on its token of step n - 1.
Then the sampling of step n is dispatched after step n - 1 is retired and its masks are there, while
the device computes forward n. Masks are made by other threads (see `masks`). A sequence whose mask
is late has its sample of step n retracted (Scheduler.retract): it gets no token, is held out of the
next steps until the mask is there, and its last token goes through the model again.

A step that raises is recovered from by `recover`.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jax_attn import models
from jax_attn.serve._engine import debug_view, sampling
from jax_attn.serve._engine.buckets import Batch, ScoredRows
from jax_attn.serve._engine.device import Device, Scores
from jax_attn.serve._engine.draft_model import DraftModel, ModelDrafter, have_same_tokens
from jax_attn.serve._engine.engine_config import EngineConfig, capacities, device_config
from jax_attn.serve._engine.leading_device import LeadingDevice
from jax_attn.serve._engine.processes import Processes
from jax_attn.serve._grammar.grammar import CompiledGrammar, Grammars
from jax_attn.serve._grammar.token_masks import SLOW_SECONDS, Constraint, Turn, workers
from jax_attn.serve._scheduling.drafts import NgramDrafter
from jax_attn.serve._scheduling.events import PHASES, StepStats, TokenEvent, TokenLogprob
from jax_attn.serve._scheduling.request import FinishReason, Sequence, Status
from jax_attn.serve._scheduling.scheduler import Scheduler
from jax_attn.serve._scheduling.step_plan import StepPlan
from jax_attn.serve._text.detokenizer import Detokenizer, Texts

log = logging.getLogger("jax_attn.serve")


@dataclass(slots=True)
class _Stream:
    """What the engine keeps of a sequence, beside what the scheduler does."""

    seq: Sequence
    detokenizer: Detokenizer
    constraint: Constraint | None
    stop_tokens: frozenset[int]
    needs_state: bool  # of the sampler, and the device does not have its counts and biases
    prompt_logprobs: list[TokenLogprob]  # by now, until the first event has them
    at_length: bool = False  # has all of max_tokens, and its grammar is to say if that is the end


@dataclass(slots=True)
class _Launched:
    """A step whose forward pass the device has, and in the end its sampling too."""

    batch: Batch
    scores: Scores | None  # until they are sampled
    streams: list[tuple[int, _Stream]]  # those that sample, each with its row of the scores
    drafts: dict[int, tuple[int, ...]]  # of those that have some, by row
    # Of those with a grammar, by row: samples that it has masked, before a draft and behind some.
    num_masked: dict[int, int] = field(default_factory=dict)
    sampled: sampling.Sampled | None = None


class Engine:
    """Of one thread, but for `grammars`."""

    def __init__(
        self,
        model: models.Model,
        config: EngineConfig,
        processes: Processes | None = None,
        draft_model: models.Model | None = None,
    ):
        """processes: of which this one leads, where the devices belong to several.
        draft_model: of the model's tokenizer, and in one process; it makes the drafts.

        Raises:
          ValueError: of a draft model, in one sentence.
        """
        self.config = config
        if draft_model is not None:
            _check_draft_model(draft_model, model, config, processes)
        # Without the weights: a device that has its share of them keeps no others.
        self.model = model._replace(params={})
        self.grammars = Grammars(
            model.tokenizer,
            model.config.vocab_size,
            model.config.eos_tokens,
            max_entries=config.max_grammars,
        )
        self._texts = Texts(model.tokenizer)
        core = capacities(config, model.config.max_positions)
        of_device = device_config(model.config, config)
        if processes is None:
            self.device = Device(model, of_device)
        else:
            self.device = LeadingDevice(processes, model, of_device)
        self.draft_model: DraftModel | None = None
        if draft_model is not None:
            # Its bits do not matter, so it need not pad its steps for them.
            plain = dataclasses.replace(config, batch_invariant=False, max_drafts=0)
            device = Device(draft_model, device_config(draft_model.config, plain))
            longest = draft_model.config.max_positions
            self.draft_model = DraftModel(device, longest, model.config.vocab_size, core)
        self.scheduler = Scheduler(core)
        self._streams: dict[str, _Stream] = {}
        self._events: dict[str, TokenEvent] = {}  # for the next return of `step`
        self._pending: _Launched | None = None
        self._last_plan: StepPlan | None = None
        self._masks = workers()
        self._held: dict[str, _Stream] = {}  # those that wait for their masks, and for nothing else
        self.step_stats = StepStats(0)
        self._totals = dict.fromkeys(_TOTALS, 0)
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._phases = {name: _Phase(self, name) for name in PHASES}

    def warm_up(self, progress: Callable[[int, int, str], None] | None = None) -> list[str]:
        """See Device.warm_up."""
        if self.draft_model is None:
            return self.device.warm_up(progress)
        drafting = self.draft_model.device
        names = [f"drafts: {name}" for name in drafting.warm_up(progress)]
        names += self.device.warm_up(progress)
        self.draft_model.cost = drafting.step_seconds() / self.device.step_seconds()
        log.info("a draft takes %.2f of a step", self.draft_model.cost)
        return names

    # ---- requests ------------------------------------------------------------------------------

    @property
    def max_sequence_tokens(self) -> int:
        """Prompt and max_tokens together, at most."""
        return min(self.model.config.max_positions, self.scheduler.max_sequence_tokens)

    def submit(
        self, seqs: Seq[Sequence], compiled: Mapping[tuple[str, str], CompiledGrammar] | None = None
    ) -> None:
        """Queues the sequences, all or none.

        compiled: grammars by tenant and text; others are compiled here, whatever time that takes.

        Raises:
          QueueFull: try again later.
          ValueError: a sequence that cannot run, in one sentence; GrammarError is one.
        """
        streams = [self._make_stream(seq, compiled or {}) for seq in seqs]
        self.scheduler.add(*seqs)
        self._streams |= {stream.seq.id: stream for stream in streams}

    def abort(self, seq_id: str) -> None:
        """Ends a sequence; its last event comes with the next `step`. Unknown ids are ignored."""
        if (seq := self.scheduler.abort(seq_id)) is not None:
            self._close(seq)

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do or to tell."""
        return bool(self._streams or self._events or self._pending)

    def _make_stream(
        self, seq: Sequence, compiled: Mapping[tuple[str, str], CompiledGrammar]
    ) -> _Stream:
        params, config = seq.params, self.model.config
        num_tokens = seq.num_prompt + params.max_tokens
        if num_tokens > config.max_positions:
            raise ValueError(
                f"max_tokens: expected prompt and output within the model's {config.max_positions} "
                f"tokens, got {seq.num_prompt} + {params.max_tokens}."
            )
        sampling.check(params)
        if most := self.config.max_drafts:
            if self.draft_model is None:
                seq.drafter = NgramDrafter(most)
            else:
                seq.drafter = ModelDrafter(self.draft_model, most)
        biased = [token for token, _ in params.logit_bias]
        named = (
            ("prompt", seq.tokens),
            ("logit_bias", biased),
            ("stop_token_ids", params.stop_token_ids),
        )
        for name, tokens in named:
            for extreme in (min(tokens, default=0), max(tokens, default=0)):
                if not 0 <= extreme < config.vocab_size:
                    raise ValueError(
                        f"{name}: expected tokens in [0, {config.vocab_size}), got {extreme}."
                    )
        constraint = None
        if (grammar := params.grammar) is not None:
            known = compiled.get((seq.tenant, grammar))
            matcher = known.matcher() if known else self.grammars.matcher(grammar, seq.tenant)
            # Forced tokens have no logprobs, as the model is not asked about them.
            jumps = self.config.jump_forward and params.logprobs is None
            constraint = Constraint(matcher, -(-config.vocab_size // 32), jumps)
        ends_at_eos = constraint is not None or not params.ignore_eos
        stop_tokens = {*params.stop_token_ids, *(config.eos_tokens if ends_at_eos else ())}
        return _Stream(
            seq,
            Detokenizer(self._texts, params.stop, params.skip_special_tokens, params.include_stop),
            constraint,
            frozenset(stop_tokens),
            needs_state=sampling.keeps_state(params),
            prompt_logprobs=(
                [TokenLogprob(seq.tokens[0], None, ())] if params.prompt_logprobs else []
            ),
        )

    # ---- the step ------------------------------------------------------------------------------

    def step(self) -> list[TokenEvent]:
        """Launches the next step, and tells what became of the one before."""
        self.step_stats = StepStats(self.step_stats.index + 1)
        with self._phase("retire"):
            self._take_late_turns()
        with self._phase("schedule"):
            plan = self.scheduler.schedule(time.monotonic())
        before, self._pending = self._pending, None
        self._last_plan = plan
        launched = self._pending = None if plan is None else self._launch(plan)
        # A grammar's mask is of the token before, so that it has to be known.
        needs_tokens = launched is not None and any(s.constraint for _, s in launched.streams)
        if launched is not None and not needs_tokens:
            self._sample(launched)
        if before is not None:
            self._retire(before)
        if launched is not None and needs_tokens:
            self._await_turns(launched)
            self._sample(launched)
        if plan is None and before is None and self._streams and not self._events:
            self._wait_for_held()
        return self._take_events()

    def _wait_for_held(self) -> None:
        """Where there is nothing else to do."""
        turns = [stream.constraint.turn for stream in self._held.values() if stream.constraint]
        if not turns:
            # Nothing would ever change, and the caller would call `step` for ever.
            raise RuntimeError(
                f"The scheduler has no step for {len(self.scheduler.running)} running and "
                f"{len(self.scheduler.waiting)} waiting sequences, and none is in flight."
            )
        with self._phase("wait"):
            self._masks.wait_for_any([turn for turn in turns if turn is not None], _REST_SECONDS)

    def _launch(self, plan: StepPlan) -> _Launched | None:
        """Gives the device the forward pass of a step, if there is one."""
        stats = self.step_stats
        for seq in plan.expired:
            self._close(seq)
        for seq in plan.admitted:
            self.device.set_params(seq.slot, seq.params)
            if self.draft_model is not None:
                self.draft_model.admit(seq)
            stream = self._streams[seq.id]
            stream.needs_state = sampling.keeps_state(seq.params)
            if stream.constraint is not None and stream.constraint.turn is None:
                self._masks.start(stream.constraint, [])
        stats.num_admitted, stats.num_preempted = len(plan.admitted), len(plan.preempted)
        if not plan.entries:
            return None
        if self.draft_model is not None:
            with self._phase("draft"):
                self.draft_model.draft(plan.entries, self.device.newest)
        with self._phase("plan"):
            batch = self.device.plan(plan.entries)
        with self._phase("dispatch"):
            scores = self.device.forward(batch)
        self.scheduler.launched(plan)
        stats.bucket, stats.num_sequences = batch.bucket.name, len(plan.entries)
        lengths = [entry.num_tokens for entry in plan.entries]
        stats.num_tokens, stats.num_decodes = sum(lengths), lengths.count(1)
        self._totals["steps"] += 1
        streams = [
            (row, self._streams[entry.seq.id])
            for row, entry in enumerate(plan.entries)
            if entry.samples
        ]
        drafts = {row: plan.entries[row].drafts for row in batch.drafted}
        return _Launched(batch, scores, streams, drafts)

    def _sample(self, launched: _Launched) -> None:
        """Gives the device the sampling of a step, for all that still want their token."""
        mask = None
        with self._phase("retire"):
            wanted = []
            for row, stream in launched.streams:
                if stream.seq.status is Status.FINISHED:
                    continue
                if stream.constraint is not None:
                    allowed = self._mask_of(stream)
                    if allowed is None:
                        continue
                elif stream.seq.params.min_tokens and self._may_not_stop(stream):
                    allowed = None
                else:
                    wanted.append((row, stream))
                    continue
                if mask is None:
                    bucket = launched.batch.bucket
                    mask = sampling.allow_all(bucket.num_rows, self.model.config.vocab_size)
                if allowed is not None:
                    self._fill_masks(mask, launched, row, stream, allowed)
                else:
                    sampling.forbid(mask[row], stream.stop_tokens)
                wanted.append((row, stream))
            for _, stream in wanted:
                if stream.needs_state:
                    seq, stream.needs_state = stream.seq, False
                    self.device.set_state(seq.slot, seq.params, seq.tokens, seq.num_prompt)
            launched.streams = wanted
        # Forgotten here, so that the next step's may have the same memory.
        scores, launched.scores = launched.scores, None
        if (wanted or launched.batch.scored) and scores is not None:
            with self._phase("dispatch"):
                launched.sampled = self.device.sample(scores, launched.batch.kind, mask)

    def _may_not_stop(self, stream: _Stream) -> bool:
        """Whether the sample in flight is one of the first min_tokens: it need not be known."""
        seq = stream.seq
        return seq.num_output + seq.num_in_flight - 1 < seq.params.min_tokens

    # ---- grammars ------------------------------------------------------------------------------

    def _await_turns(self, launched: _Launched) -> None:
        """Gives the masks of a step a moment, but for those whose grammar is known to be slow."""
        constraints = (s.constraint for _, s in launched.streams if s.seq.id in self._streams)
        turns = [c.turn for c in constraints if c is not None and not c.was_slow]
        with self._phase("retire"):
            self._masks.wait([turn for turn in turns if turn is not None], SLOW_SECONDS)

    def _mask_of(self, stream: _Stream) -> np.ndarray | None:
        """What may be sampled now. None: no token is wanted, as some are forced, or the sequence
        has ended or has to wait for its mask."""
        assert stream.constraint is not None and stream.constraint.turn is not None
        turn = stream.constraint.turn
        if not turn.is_done:
            self.scheduler.retract(stream.seq)
            self._held[stream.seq.id] = stream
            # The device counts the token that it samples all the same.
            stream.needs_state = sampling.keeps_state(stream.seq.params)
            return None
        return turn.mask if self._take_turn(stream, turn) else None

    def _fill_masks(
        self,
        mask: np.ndarray,
        launched: _Launched,
        row: int,
        stream: _Stream,
        allowed: np.ndarray,
    ) -> None:
        """Of a sequence's rows: behind drafts, as far as its grammar goes with them."""
        assert stream.constraint is not None
        rows, drafts = launched.batch.drafted.get(row, [row]), launched.drafts.get(row, ())
        ahead = stream.constraint.look_ahead(drafts) if drafts else []
        for each, of_row in zip(rows, [allowed, *ahead], strict=False):
            mask[each] = of_row
        launched.num_masked[row] = 1 + len(ahead)

    def _take_late_turns(self) -> None:
        for stream in list(self._held.values()):
            assert stream.constraint is not None and stream.constraint.turn is not None
            if stream.constraint.turn.is_done:
                del self._held[stream.seq.id]
                self._take_turn(stream, stream.constraint.turn)
                self.scheduler.resume(stream.seq)

    def _take_turn(self, stream: _Stream, turn: Turn) -> bool:
        """What its grammar says to a sequence. Whether the turn's mask is for the next token."""
        seq = stream.seq
        if turn.bug is not None:
            log.error("a grammar failed", exc_info=turn.bug)
            self._fail(seq, f"The grammar failed: {type(turn.bug).__name__}.")
        elif stream.at_length:  # complete, if with the last token that was left
            self._finish(seq, FinishReason.STOP if turn.is_stopped else FinishReason.LENGTH)
        elif turn.error is not None:
            assert seq.params.grammar is not None
            self.grammars.forget(seq.params.grammar, seq.tenant)
            self._event(seq).is_clients_fault = True
            self._fail(seq, turn.error)
        elif turn.forced:
            self._take_forced(stream, turn)
        elif turn.is_stopped:
            self._finish(seq, FinishReason.STOP)
        else:
            return True
        return False

    def _take_forced(self, stream: _Stream, turn: Turn) -> None:
        assert stream.constraint is not None
        seq, tokens = stream.seq, turn.forced
        self.step_stats.num_forced += len(tokens)
        self._totals["jump_forward_tokens"] += len(tokens)
        # The device's counts lack these tokens.
        stream.needs_state = sampling.keeps_state(seq.params)
        num_taken, reason = self._append(stream, tokens, num_sampled=seq.num_in_flight)
        if turn.is_stopped and num_taken == len(tokens):
            reason = FinishReason.STOP
        if reason is not None:
            self._finish(seq, reason)
        else:
            self._masks.start(stream.constraint, [])

    def _retire(self, launched: _Launched) -> None:
        """Waits for the tokens of a step and appends them to their sequences."""
        if launched.sampled is None:
            return
        with self._phase("wait"):
            sampled = self.device.read(launched.sampled)
        with self._phase("retire"):
            for scored in launched.batch.scored:
                if scored.seq.status is not Status.FINISHED:
                    self._take_scores(scored, sampled)
            tokens, drafted = sampled.tokens.tolist(), launched.batch.drafted
            for row, stream in launched.streams:
                if stream.seq.status is Status.FINISHED:
                    continue
                self.step_stats.num_sampled += 1
                if row in drafted:
                    self._take_drafts(stream, launched, row, sampled)
                else:
                    self._take_sample(stream, tokens[row], sampled, row)

    # ---- what becomes of tokens ----------------------------------------------------------------

    def _take_scores(self, scored: ScoredRows, sampled: sampling.Sampled) -> None:
        """Some may be known: of a sequence that was preempted and reads its prompt again."""
        known = self._streams[scored.seq.id].prompt_logprobs
        num_top = scored.seq.params.logprobs
        assert num_top is not None
        for position, row in enumerate(scored.rows, scored.begin):
            if sampled.tokens[row] < 0:
                self._fail(scored.seq, _NOT_NUMBERS)
                return
            if position == len(known):
                known.append(_logprob(sampled, row, num_top))

    def _take_sample(
        self, stream: _Stream, token: int, sampled: sampling.Sampled, row: int
    ) -> None:
        seq = stream.seq
        if token < 0:
            self._fail(seq, _NOT_NUMBERS)
            return
        if stream.prompt_logprobs:
            self._event(seq).logprobs, stream.prompt_logprobs = stream.prompt_logprobs, []
        if not seq.params.max_tokens:
            event = self._event(seq)
            event.num_cached_tokens, event.admitted = seq.num_cached, seq.admitted
            self._finish(seq, FinishReason.LENGTH)
            return
        if (num_top := seq.params.logprobs) is not None:
            event = self._event(seq)
            event.logprobs = [*(event.logprobs or ()), _logprob(sampled, row, num_top)]
        _, reason = self._append(stream, [token], num_sampled=1)
        self._end_or_turn(stream, [token], reason)

    def _end_or_turn(self, stream: _Stream, tokens: list[int], reason: FinishReason | None) -> None:
        """Behind tokens that were sampled, of which the last may end the sequence."""
        if reason is FinishReason.STOP or (reason is not None and stream.constraint is None):
            self._finish(stream.seq, reason)
        elif stream.constraint is not None:
            self._masks.start(stream.constraint, tokens)
            if reason is not None:
                stream.at_length = True
                self._held[stream.seq.id] = stream

    def _take_drafts(
        self, stream: _Stream, launched: _Launched, row: int, sampled: sampling.Sampled
    ) -> None:
        """The samples of a step up to the first whose draft was another token."""
        rows, drafts = launched.batch.drafted[row], launched.drafts[row]
        tokens = sampled.tokens[rows].tolist()
        num_right = next(
            (i for i, (a, b) in enumerate(zip(tokens, drafts, strict=False)) if a != b),
            len(drafts),
        )
        tokens = tokens[: min(num_right + 1, launched.num_masked.get(row, len(rows)))]
        num_right = len(tokens) - 1
        self._totals["draft_tokens"] += len(drafts)
        self._totals["draft_tokens_taken"] += num_right
        assert stream.seq.drafter is not None
        stream.seq.drafter.settle(len(drafts), num_right)
        if sampling.has_penalties(stream.seq.params):
            stream.needs_state = True  # as the device has counted what was refused
        if min(tokens) < 0:
            self._fail(stream.seq, _NOT_NUMBERS)
            return
        num_taken, reason = self._append(stream, tokens, num_sampled=1, num_right=num_right)
        if (num_top := stream.seq.params.logprobs) is not None:
            event = self._event(stream.seq)
            found = [_logprob(sampled, which, num_top) for which in rows[:num_taken]]
            event.logprobs = [*(event.logprobs or ()), *found]
        self._end_or_turn(stream, tokens[:num_taken], reason)

    def _append(
        self, stream: _Stream, tokens: list[int], num_sampled: int, num_right: int = 0
    ) -> tuple[int, FinishReason | None]:
        """The next tokens of a sequence, up to where it ends: how many, and why it does, if so.

        num_sampled: samples that were launched for them. num_right: drafts among them.
        """
        seq, event = stream.seq, self._event(stream.seq)
        num_output = seq.num_output
        if not num_output:
            event.num_cached_tokens, event.admitted = seq.num_cached, seq.admitted
        reason = None
        for num_taken, token in enumerate(tokens, 1):
            reason = self._push(stream, token, num_output + num_taken, event)
            if reason is not None:
                break
        if num_taken < len(tokens):
            tokens = tokens[:num_taken]
        event.tokens += tokens
        self._totals["generated_tokens"] += num_taken
        self.scheduler.append(seq, tokens, num_sampled, min(num_right, num_taken - 1))
        return num_taken, reason

    def _push(
        self, stream: _Stream, token: int, num_output: int, event: TokenEvent
    ) -> FinishReason | None:
        """Adds a token's text to the event; why the sequence ends with it, if it does."""
        params = stream.seq.params
        may_stop = num_output > params.min_tokens or stream.constraint is not None
        if may_stop and token in stream.stop_tokens:
            if params.include_stop:
                event.text += stream.detokenizer.push(token, may_stop=False)
            return FinishReason.STOP
        event.text += stream.detokenizer.push(token, may_stop=num_output >= params.min_tokens)
        if stream.detokenizer.stopped:
            return FinishReason.STOP
        return FinishReason.LENGTH if num_output >= params.max_tokens else None

    def _fail(self, seq: Sequence, message: str) -> None:
        self._event(seq).error = message
        self._finish(seq, FinishReason.ERROR)

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        self.scheduler.finish(seq, reason)
        self._close(seq)

    def _close(self, seq: Sequence) -> None:
        """The last event of a sequence that the scheduler has finished."""
        event = self._event(seq)
        event.finish_reason, event.admitted = seq.finish_reason, seq.admitted
        event.text += self._streams.pop(seq.id).detokenizer.flush()
        self._held.pop(seq.id, None)

    def _event(self, seq: Sequence) -> TokenEvent:
        event = self._events.get(seq.id)
        if event is None:
            event = self._events[seq.id] = TokenEvent(seq.id)
        return event

    def _take_events(self) -> list[TokenEvent]:
        events, self._events = list(self._events.values()), {}
        return events

    # ---- failures ------------------------------------------------------------------------------

    def recover(self, message: str) -> list[TokenEvent]:
        """After an exception in `step`: ends what was running with 'error', and starts afresh.

        The cache's contents may be lost with the step, so the prefix cache is emptied; the queue
        stays, unless nothing was running: then the cause is in it. Returns the last events.
        """
        self._pending = self._last_plan = None
        for seq in self.scheduler.running or self.scheduler.waiting:
            self._fail(seq, message)
        for seq in self.scheduler.waiting:
            # A token in flight when it was preempted will not come, but be sampled again.
            self.scheduler.append(seq, [], num_sampled=seq.num_in_flight)
        for stream in list(self._streams.values()):
            if stream.seq.status is Status.FINISHED:  # which the step had no time to tell
                self._close(stream.seq)
        cache = self.scheduler.cache
        cache.evict(cache.num_cached)
        self.device.reset()
        if self.draft_model is not None:
            self.draft_model.reset()
        return self._take_events()

    # ---- numbers -------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Plain numbers: gauges, totals since the start, and seconds of the thread by phase."""
        core = self.scheduler.stats()
        num_kept = core.num_free_pages + core.num_cached_pages
        return {
            "waiting": core.num_waiting,
            "running": core.num_running,
            "pages_total": self.config.num_pages,
            "pages_free": core.num_free_pages,
            "pages_cached": core.num_cached_pages,
            "pages_used": self.config.num_pages - num_kept,
            "prompt_tokens": core.num_prompt_tokens,
            "prefix_hit_tokens": core.num_prompt_tokens_cached,
            "preemptions": core.num_preemptions,
            **self._totals,
            "compilations": self.device.num_compiles_after_warm_up,
            "step_seconds": dict(self._seconds),
            "device_bytes": self._bytes_held(),
        }

    def _bytes_held(self) -> dict[int, int]:
        held = Counter(self.device.bytes_held())
        if self.draft_model is not None:
            held.update(self.draft_model.device.bytes_held())
        return dict(held)

    def snapshot(self) -> dict[str, Any]:
        """See live_view."""
        return debug_view.snapshot(self.scheduler, self.step_stats, self._last_plan)

    def _phase(self, name: str) -> _Phase:
        return self._phases[name]

    def spent(self, phase: str, seconds: float) -> None:
        self.step_stats.seconds[phase] += seconds
        self._seconds[phase] += seconds


class _Phase:
    """Measures a `with` block. A generator's context would take as long as some of the phases."""

    __slots__ = ("_engine", "_name", "_begin")

    def __init__(self, engine: Engine, name: str):
        self._engine, self._name = engine, name
        self._begin = 0.0

    def __enter__(self) -> None:
        self._begin = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._engine.spent(self._name, time.perf_counter() - self._begin)


def _check_draft_model(
    draft: models.Model, model: models.Model, config: EngineConfig, processes: Processes | None
) -> None:
    if not config.max_drafts:
        raise ValueError("EngineConfig: max_drafts: expected at least 1 with a draft model, got 0.")
    if processes is not None:
        raise ValueError("a draft model: expected a server of one process, got several.")
    if not have_same_tokens(draft, model):
        raise ValueError("a draft model: expected the tokens of the model, got others.")


_TOTALS = (
    "steps",
    "generated_tokens",
    "jump_forward_tokens",
    "draft_tokens",
    "draft_tokens_taken",
)
_REST_SECONDS = 0.01  # after which it looks whether there is something new to do
_NOT_NUMBERS = "The model's logits are not numbers."


def _logprob(sampled: sampling.Sampled, row: int, num_top: int) -> TokenLogprob:
    assert sampled.logprobs is not None
    assert sampled.top_tokens is not None and sampled.top_logprobs is not None
    tokens, logprobs = sampled.top_tokens[row, :num_top], sampled.top_logprobs[row, :num_top]
    top = tuple(zip(tokens.tolist(), logprobs.tolist(), strict=True))
    return TokenLogprob(int(sampled.tokens[row]), float(sampled.logprobs[row]), top)
