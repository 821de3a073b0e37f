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
the device computes forward n. Masks are made by other threads; `constrained_decoding` says
what becomes of a sequence whose mask is late.

A step that raises is recovered from by `recover`. The step and its timeline are here; beside them:

| module | holds |
| --- | --- |
| `outputs` | from tokens to events: text, stop strings, logprobs, finish reasons |
| `constrained_decoding` | masks of grammars and of min_tokens, forced tokens |
| `speculation` | drafts: who proposes them, which were right |
| `counters` | numbers of a step, totals, seconds by phase |
| `records` | what is kept of a sequence, and of a launched step |
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

from jax_attn import models
from jax_attn.serve._engine import sampling, snapshot
from jax_attn.serve._engine.constrained_decoding import ConstrainedDecoding
from jax_attn.serve._engine.counters import Counters
from jax_attn.serve._engine.device import Device
from jax_attn.serve._engine.draft_model import DraftModel, have_same_tokens
from jax_attn.serve._engine.engine_config import EngineConfig, capacities, device_config
from jax_attn.serve._engine.leading_device import LeadingDevice
from jax_attn.serve._engine.outputs import Outputs
from jax_attn.serve._engine.processes import Processes
from jax_attn.serve._engine.records import LaunchedStep, LiveSequence
from jax_attn.serve._engine.speculation import Speculation
from jax_attn.serve._grammar.grammar import CompiledGrammar, Grammars
from jax_attn.serve._grammar.token_masks import SequenceGrammar
from jax_attn.serve._scheduling.events import StepStats, TokenEvent, TokenLogprob
from jax_attn.serve._scheduling.request import Sequence, Status
from jax_attn.serve._scheduling.scheduler import Scheduler
from jax_attn.serve._scheduling.step_plan import StepPlan
from jax_attn.serve._text.detokenizer import Detokenizer, Texts


class Engine:
    """The engine, for one thread only. `grammars` is thread-safe."""

    def __init__(
        self,
        model: models.Model,
        config: EngineConfig,
        processes: Processes | None = None,
        draft_model: models.Model | None = None,
    ):
        """processes: the server's processes, which this one leads, if there are several.
        draft_model: has the model's tokenizer and makes the drafts; one process only.

        Raises:
          ValueError: the draft model does not fit, in one sentence.
        """
        self.config = config
        if draft_model is not None:
            _check_draft_model(draft_model, model, config, processes)
        # Without the weights: a device that holds its share of them needs no other copy.
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
        self.scheduler = Scheduler(core)
        self._counters = Counters()
        drafting: DraftModel | None = None
        if draft_model is not None:
            # Its bits do not affect the output, so its steps need no padding.
            plain = dataclasses.replace(config, batch_invariant=False, max_drafts=0)
            device = Device(draft_model, device_config(draft_model.config, plain))
            longest = draft_model.config.max_positions
            drafting = DraftModel(device, longest, model.config.vocab_size, core)
        self._speculation = Speculation(config.max_drafts, drafting, self._counters)
        self._outputs = Outputs(self.scheduler, self._counters)
        self._constrained = ConstrainedDecoding(
            self.grammars, self.scheduler, self._outputs, self._counters, model.config.vocab_size
        )
        self._pending: LaunchedStep | None = None
        self._last_plan: StepPlan | None = None

    def warm_up(self, progress: Callable[[int, int, str], None] | None = None) -> list[str]:
        """See Device.warm_up."""
        names = self._speculation.warm_up(progress) + self.device.warm_up(progress)
        self._speculation.measure_cost(self.device)
        return names

    @property
    def draft_model(self) -> DraftModel | None:
        return self._speculation.model

    # ---- requests ------------------------------------------------------------------------------

    @property
    def max_sequence_tokens(self) -> int:
        """The limit on prompt and max_tokens together."""
        return min(self.model.config.max_positions, self.scheduler.max_sequence_tokens)

    def submit(
        self, seqs: Seq[Sequence], compiled: Mapping[tuple[str, str], CompiledGrammar] | None = None
    ) -> None:
        """Queues the sequences, all or none.

        compiled: grammars by tenant and text. Others are compiled here, however long that takes.

        Raises:
          QueueFull: try again later.
          ValueError: a sequence that cannot run, in one sentence; GrammarError is one.
        """
        accepted = [self._accept(seq, compiled or {}) for seq in seqs]
        self.scheduler.add(*seqs)
        self._outputs.live |= {live.seq.id: live for live in accepted}

    def abort(self, seq_id: str) -> None:
        """Ends a sequence; its last event comes with the next `step`. Unknown ids are ignored."""
        if (seq := self.scheduler.abort(seq_id)) is not None:
            self._outputs.close(seq)

    @property
    def has_work(self) -> bool:
        """Whether `step` has work to do or events to return."""
        return bool(self._outputs.live or self._outputs.has_news or self._pending)

    def _accept(
        self, seq: Sequence, compiled: Mapping[tuple[str, str], CompiledGrammar]
    ) -> LiveSequence:
        params, config = seq.params, self.model.config
        _check_sequence(seq, config)
        seq.drafter = self._speculation.drafter()
        constraint = None
        if (text := params.grammar) is not None:
            known = compiled.get((seq.tenant, text))
            matcher = known.matcher() if known else self.grammars.matcher(text, seq.tenant)
            # Forced tokens have no logprobs, as the model does not compute them.
            jumps = self.config.jump_forward and params.logprobs is None
            constraint = SequenceGrammar(matcher, -(-config.vocab_size // 32), jumps)
        ends_at_eos = constraint is not None or not params.ignore_eos
        stop_tokens = {*params.stop_token_ids, *(config.eos_tokens if ends_at_eos else ())}
        return LiveSequence(
            seq,
            Detokenizer(self._texts, params.stop, params.skip_special_tokens, params.include_stop),
            constraint,
            frozenset(stop_tokens),
            needs_sampler_state=sampling.keeps_state(params),
            prompt_logprobs=(
                [TokenLogprob(seq.tokens[0], None, ())] if params.prompt_logprobs else []
            ),
        )

    # ---- the step ------------------------------------------------------------------------------

    def step(self) -> list[TokenEvent]:
        """Launches the next step, and returns the events of the one before."""
        counters = self._counters
        counters.begin_step()
        with counters.phases["retire"]:
            self._constrained.take_late()
        with counters.phases["schedule"]:
            plan = self.scheduler.schedule(time.monotonic())
        before, self._pending = self._pending, None
        self._last_plan = plan
        launched = self._pending = None if plan is None else self._launch(plan)
        # A grammar's mask depends on the token before, so that token must be known.
        needs_tokens = launched is not None and any(live.grammar for _, live in launched.samples)
        if launched is not None and not needs_tokens:
            self._sample(launched)
        if before is not None:
            self._retire(before)
        if launched is not None and needs_tokens:
            with counters.phases["retire"]:
                self._constrained.wait_for_masks(launched)
            self._sample(launched)
        if plan is None and before is None and self._outputs.live and not self._outputs.has_news:
            self._wait_for_held()
        return self._outputs.take_events()

    def _wait_for_held(self) -> None:
        """Waits for held sequences if there is nothing else to do."""
        if not self._constrained.num_held:
            # The state would never change, and the caller would call `step` for ever.
            raise RuntimeError(
                f"The scheduler has no step for {len(self.scheduler.running)} running and "
                f"{len(self.scheduler.waiting)} waiting sequences, and none is in flight."
            )
        with self._counters.phases["wait"]:
            self._constrained.wait_for_any()

    def _launch(self, plan: StepPlan) -> LaunchedStep | None:
        """Launches the forward pass of a step on the device, if it has entries."""
        counters, all_live = self._counters, self._outputs.live
        stats = counters.step
        for seq in plan.expired:
            self._outputs.close(seq)
        for seq in plan.admitted:
            self.device.set_params(seq.slot, seq.params)
            self._speculation.admit(seq)
            live = all_live[seq.id]
            live.needs_sampler_state = sampling.keeps_state(seq.params)
            self._constrained.begin(live)
        stats.num_admitted, stats.num_preempted = len(plan.admitted), len(plan.preempted)
        if not plan.entries:
            return None
        self._speculation.draft(plan.entries, self.device)
        with counters.phases["plan"]:
            batch = self.device.plan(plan.entries)
        with counters.phases["dispatch"]:
            scores = self.device.forward(batch)
        self.scheduler.launched(plan)
        stats.bucket, stats.num_sequences = batch.bucket.name, len(plan.entries)
        lengths = [entry.num_tokens for entry in plan.entries]
        stats.num_tokens, stats.num_decodes = sum(lengths), lengths.count(1)
        counters.totals["steps"] += 1
        samples = [
            (row, all_live[entry.seq.id]) for row, entry in enumerate(plan.entries) if entry.samples
        ]
        drafts = {row: plan.entries[row].drafts for row in batch.drafted}
        return LaunchedStep(batch, scores, samples, drafts)

    def _sample(self, launched: LaunchedStep) -> None:
        """Launches the sampling of a step, for all sequences that still need a token."""
        with self._counters.phases["retire"]:
            mask = self._constrained.mask_samples(launched)
            for _, live in launched.samples:
                if live.needs_sampler_state:
                    seq, live.needs_sampler_state = live.seq, False
                    self.device.set_state(seq.slot, seq.params, seq.tokens, seq.num_prompt)
        # Released here, so that the next step can use the same memory.
        scores, launched.scores = launched.scores, None
        if (launched.samples or launched.batch.scored) and scores is not None:
            with self._counters.phases["dispatch"]:
                launched.sampled = self.device.sample(scores, launched.batch.kind, mask)

    def _retire(self, launched: LaunchedStep) -> None:
        """Waits for the tokens of a step and appends them to their sequences."""
        if launched.sampled is None:
            return
        with self._counters.phases["wait"]:
            sampled = self.device.read(launched.sampled)
        with self._counters.phases["retire"]:
            for scored in launched.batch.scored:
                if scored.seq.status is not Status.FINISHED:
                    self._outputs.add_prompt_logprobs(scored, sampled)
            tokens, drafted = sampled.tokens.tolist(), launched.batch.drafted
            outputs, stats = self._outputs, self._counters.step
            for row, live in launched.samples:
                if live.seq.status is Status.FINISHED:
                    continue
                stats.num_sampled += 1
                if row in drafted:
                    rows = drafted[row]
                    new = [tokens[each] for each in rows]
                    num_allowed = launched.num_masked.get(row, len(rows))
                    new = self._speculation.accept(live, new, launched.drafts[row], num_allowed)
                else:
                    rows, new = [row], [tokens[row]]
                new = outputs.add_samples(live, new, sampled, rows)
                if live.grammar is not None and live.seq.finish_reason is None:
                    self._constrained.advance(live, new)

    # ---- failures ------------------------------------------------------------------------------

    def recover(self, message: str) -> list[TokenEvent]:
        """Recovers from an exception in `step`: ends the running sequences with 'error'.

        The step may have destroyed the cache's contents, so the prefix cache is emptied. The queue
        stays, unless nothing was running: then the cause is in the queue. Returns the last events.
        """
        self._pending = self._last_plan = None
        for seq in self.scheduler.running or self.scheduler.waiting:
            self._outputs.fail(seq, message)
        for seq in self.scheduler.waiting:
            # The token in flight at its preemption will not come; it is sampled again.
            self.scheduler.append(seq, [], num_sampled=seq.num_in_flight)
        self._outputs.close_finished()
        cache = self.scheduler.cache
        cache.evict(cache.num_cached)
        self.device.reset()
        self._speculation.reset()
        return self._outputs.take_events()

    # ---- numbers -------------------------------------------------------------------------------

    @property
    def step_stats(self) -> StepStats:
        """The numbers of the last call of `step`."""
        return self._counters.step

    def stats(self) -> dict[str, Any]:
        """Plain numbers: gauges, totals since the start, and seconds of the thread by phase."""
        held = Counter(self.device.bytes_held())
        held.update(self._speculation.bytes_held())
        return self._counters.report(
            self.scheduler.stats(),
            self.config.num_pages,
            self.device.num_compiles_after_warm_up,
            dict(held),
        )

    def snapshot(self) -> dict[str, Any]:
        """See the module `snapshot`."""
        return snapshot.snapshot(self.scheduler, self.step_stats, self._last_plan)


def _check_sequence(seq: Sequence, config: models.ModelConfig) -> None:
    """Raises ValueError if the model cannot run the sequence."""
    params = seq.params
    if seq.num_prompt + params.max_tokens > config.max_positions:
        raise ValueError(
            f"max_tokens: expected prompt and output within the model's {config.max_positions} "
            f"tokens, got {seq.num_prompt} + {params.max_tokens}."
        )
    sampling.check(params)
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


def _check_draft_model(
    draft: models.Model, model: models.Model, config: EngineConfig, processes: Processes | None
) -> None:
    if not config.max_drafts:
        raise ValueError("EngineConfig: max_drafts: expected at least 1 with a draft model, got 0.")
    if processes is not None:
        raise ValueError("a draft model: expected a server of one process, got several.")
    if not have_same_tokens(draft, model):
        raise ValueError("a draft model: expected the tokens of the model, got others.")
