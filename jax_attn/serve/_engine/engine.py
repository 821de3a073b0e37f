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
      pictures    PictureEncoder: waits for the tower, if any
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

A step may be a burst: several steps of the same decodes, scheduled once. "plan" to "sample" are
repeated for each, with lengths that are one larger, before the host waits for the burst before, all
of whose tokens it retires together. `Scheduler.schedule` says when. Outputs are those of single
steps; tokens after one that ends a sequence are dropped. What arrives meanwhile waits for the
bursts in flight, at most two.

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
| `picture_encoder` | the vision tower, and what it made of pictures |
| `adapters` | LoRA adapters by name, and their places on the device |
| `counters` | numbers of a step, totals, seconds by phase |
| `records` | what is kept of a sequence, and of a launched step |
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

import jax

from jax_attn import models
from jax_attn.serve._engine import buckets, sampling, snapshot
from jax_attn.serve._engine.adapters import LoadedAdapters
from jax_attn.serve._engine.constrained_decoding import ConstrainedDecoding
from jax_attn.serve._engine.counters import Counters
from jax_attn.serve._engine.device import Device, Progress
from jax_attn.serve._engine.draft_model import DraftModel, have_same_tokens
from jax_attn.serve._engine.engine_config import (
    EngineConfig,
    capacities,
    device_config,
)
from jax_attn.serve._engine.expert_group import ExpertDevice
from jax_attn.serve._engine.hand_over import HandedOver
from jax_attn.serve._engine.leading_device import LeadingDevice
from jax_attn.serve._engine.mtp_drafts import MtpDevice, MtpDraftModel, check_mtp, with_hidden
from jax_attn.serve._engine.outputs import Outputs
from jax_attn.serve._engine.picture_encoder import PictureEncoder
from jax_attn.serve._engine.pool_copies import PAGES
from jax_attn.serve._engine.processes import Processes
from jax_attn.serve._engine.records import LaunchedStep, LiveSequence
from jax_attn.serve._engine.speculation import Speculation
from jax_attn.serve._grammar.grammar import CompiledGrammar, Grammars
from jax_attn.serve._grammar.token_masks import SequenceGrammar
from jax_attn.serve._scheduling.events import (
    FIRST_VERSION,
    StepStats,
    TokenEvent,
    TokenLogprob,
)
from jax_attn.serve._scheduling.file_tier import FileTier
from jax_attn.serve._scheduling.host_tier import Move, OneMove
from jax_attn.serve._scheduling.pictures import PictureNumbers
from jax_attn.serve._scheduling.prompt_policy import PromptPolicy
from jax_attn.serve._scheduling.request import (
    FinishReason,
    Sequence,
    Status,
    UnknownAdapter,
)
from jax_attn.serve._scheduling.scheduler import Scheduler
from jax_attn.serve._scheduling.step_plan import StepPlan
from jax_attn.serve._scheduling.streaming import Streaming, StreamingPages
from jax_attn.serve._text.detokenizer import Detokenizer, Texts

log = logging.getLogger("jax_attn.serve")

_FILE_SECONDS = 0.005  # at most, for files: requests may come meanwhile
_CLOSE_SECONDS = 10.0  # for what is still to be written


class Engine:
    """The engine, for one thread only. `grammars` is thread-safe."""

    def __init__(
        self,
        model: models.Model,
        config: EngineConfig,
        processes: Processes | None = None,
        draft_model: models.Model | None = None,
        vision: models.VisionModel | None = None,
    ):
        """processes: the server's processes, which this one leads, if there are several.
        draft_model: has the model's tokenizer and makes the drafts; one process only. With a config
          of `models.mtp_config` it is the model's own layer for multi-token prediction.
        vision: the model's tower, for sequences with pictures; one process only.

        Raises:
          ValueError: the draft model does not fit, in one sentence.
        """
        self.config = config
        if draft_model is not None:
            _check_draft_model(draft_model, model, config, processes)
            model = with_hidden(model, draft_model)
        # Without the weights: a device that holds its share of them needs no other copy.
        self.model = model._replace(params={})
        self.grammars = Grammars(
            model.tokenizer,
            model.config.vocab_size,
            model.config.eos_tokens,
            max_entries=config.max_grammars,
        )
        self._texts = Texts(model.tokenizer)
        _check_recurrent(model.config, config, draft_model)
        beside = processes is not None, draft_model is not None, vision is not None
        _check_kv_policy(model.config, config, *beside)
        _check_kv_select(config, *beside)
        capacity = capacities(config, model.config)
        self._pictures = None
        self.picture_numbers = PictureNumbers()
        of_device = device_config(model.config, config)
        if vision is not None:
            _check_pictures(model.config, config, vision)
            if config.devices is not None:
                vision = vision.on(config.devices[0])
            self._pictures = PictureEncoder(vision)
            of_device = device_config(
                model.config, config, self._pictures.row_shape, vision.max_tokens
            )
        if processes is not None and config.num_host_pages:
            raise ValueError(
                "EngineConfig: num_host_pages: expected 0 with several processes, got"
                f" {config.num_host_pages}."
            )
        if config.expert_group is not None:
            self.device: Device = ExpertDevice(config.expert_group, model, of_device)
        elif processes is None:
            self.device = Device(model, of_device)
        else:
            self.device = LeadingDevice(processes, model, of_device)
        self.scheduler = Scheduler(capacity)
        self._counters = Counters()
        drafting: DraftModel | None = None
        if draft_model is not None:
            # Its bits do not affect the output, so its steps need no padding.
            plain = dataclasses.replace(
                config, batch_invariant=False, max_drafts=0, max_loras=0, num_host_pages=0,
                num_host_states=0, files=None,
            )  # fmt: skip
            of_draft = device_config(draft_model.config, plain)
            longest = draft_model.config.max_positions
            sizes = longest, model.config.vocab_size, capacity
            if draft_model.config.mtp:
                drafting = MtpDraftModel(MtpDevice(draft_model, of_draft, self.device), *sizes)
            else:
                drafting = DraftModel(Device(draft_model, of_draft), *sizes)
        self._speculation = Speculation(config.max_drafts, drafting, self._counters)
        self._outputs = Outputs(self.scheduler, self._counters)
        self._constrained = ConstrainedDecoding(
            self.grammars, self.scheduler, self._outputs, self._counters, model.config.vocab_size
        )
        self._pending: LaunchedStep | None = None
        self._last_plan: StepPlan | None = None
        self._num_updates = 0  # of the weights
        self._adapters = LoadedAdapters(config.max_loras)
        if config.files is not None and (host := self.scheduler.memory.host) is not None:
            copies = self.device.open_files(config.files)
            files = FileTier(copies, host, config.page_size, config.files.owners)
            self.scheduler.memory.open_files(files)

    def warm_up(self, progress: Progress | None = None) -> list[str]:
        """See Device.warm_up."""
        names = [] if self._pictures is None else self._pictures.warm_up(progress)
        names += self._speculation.warm_up(progress) + self.device.warm_up(progress)
        self._speculation.measure_cost(self.device)
        self._measure_host()
        return names

    def warm_up_first(self, progress: Progress | None = None) -> list[str]:
        """See Device.warm_up_first. With a draft model and with several processes it is `warm_up`:
        the time of the smallest step is measured, and processes call the same executables."""
        if self.draft_model is not None or isinstance(self.device, LeadingDevice):
            return self.warm_up(progress)
        names = [] if self._pictures is None else self._pictures.warm_up(progress)
        names += self.device.warm_up_first(progress)
        self._measure_host()
        return names

    def _measure_host(self) -> None:
        """Measures what a page in the host's memory costs, once the largest step is warm."""
        if (host := self.scheduler.memory.host) is not None:
            of_pages, of_state = self.device.return_seconds()
            of_token = self.device.token_seconds()
            host.call_tokens, host.page_tokens = of_pages / of_token, of_pages / of_token / PAGES
            host.state_tokens = of_state / of_token
            log.info(
                "a page comes back from the host in the time of %.2f of its %d tokens",
                host.page_tokens,
                self.config.page_size,
            )
            if (files := self.scheduler.memory.files) is not None:
                files.measure(of_token)
                log.info("and from a file in that of %.2f", files.page_tokens)

    @property
    def draft_model(self) -> DraftModel | None:
        return self._speculation.model

    # ---- requests ------------------------------------------------------------------------------

    @property
    def max_sequence_tokens(self) -> int:
        """The limit on prompt and max_tokens together."""
        most = self.scheduler.max_sequence_tokens
        if isinstance(self.config.kv_policy, Streaming):
            return most  # the model's positions are those in the cache
        return min(self.model.config.max_positions, most)

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

    def num_cached_tokens(self, seq: Sequence) -> int:
        """The tokens of a new sequence that the prefix cache has, on the device or the host.

        From any thread: an estimate, as a step may change the tree meanwhile.
        """
        try:
            adapter = self._adapters.find(seq.adapter_name)
        except UnknownAdapter:
            return 0
        return self.scheduler.memory.num_known_tokens(seq, adapter)

    # ---- requests of other engines -------------------------------------------------------------

    def export_request(self, seq_id: str) -> HandedOver:
        """Takes a request out, after `settle`. There are no more events of it.

        Raises ValueError: there is no such request, or it is about to end.
        """
        assert self._pending is None
        self.device.shapes_of_copies()  # refuses several processes
        live = self._outputs.live.get(seq_id)
        if live is None or live.at_length or live.seq.status is Status.FINISHED:
            raise ValueError(
                f"export_request: expected a request that runs or waits, got {seq_id!r}."
            )
        seq, memory = live.seq, self.scheduler.memory
        if seq.pictures:
            raise ValueError(
                f"export_request: expected a request without pictures, got {len(seq.pictures)} of"
                f" them in {seq_id!r}; it has to end here."
            )
        deadline = seq.deadline
        self.scheduler.finish(seq, FinishReason.ABORT)
        del self._outputs.live[seq_id]
        self._run_moves()
        pages, states = self.device.take(*memory.cached(seq))
        params = seq.params
        if seq.num_output:  # the prompt's have been reported
            params = dataclasses.replace(params, prompt_logprobs=False)
        return HandedOver(
            tokens=list(seq.tokens),
            num_prompt=seq.num_prompt,
            params=params,
            namespace=seq.namespace,
            tenant=seq.tenant,
            priority=seq.priority,
            adapter_name=seq.adapter_name,
            seconds_left=None if deadline is None else deadline - time.monotonic(),
            version=self.version,
            page_size=self.config.page_size,
            pages=pages,
            states=states,
        )

    def import_request(self, handed: HandedOver, seq_id: str) -> None:
        """Queues a request of another engine, between two steps. Its events are of what follows.

        Raises:
          QueueFull: try again later.
          ValueError: it does not fit this engine, in one sentence.
          jax.errors.JaxRuntimeError: no memory. The request is not queued; if the cache was to be
            written, it is emptied, and running sequences end with an error.
        """
        shapes = self.device.shapes_of_copies()
        handed.check(self.version, self.config.page_size, shapes)
        prompt, output = handed.tokens[: handed.num_prompt], handed.tokens[handed.num_prompt :]
        seq = Sequence(
            seq_id,
            seq_id,
            prompt,
            handed.params,
            handed.namespace,
            handed.priority,
            tenant=handed.tenant,
            adapter_name=handed.adapter_name,
            arrival=time.monotonic(),
        )
        if handed.seconds_left is not None:
            seq.deadline = seq.arrival + handed.seconds_left
        live = self._accept(seq, {})
        _check_tokens("tokens", output, self.model.config)
        self._outputs.replay(live, output)
        if handed.pages:
            self.device.compile_copies()
        self.scheduler.add(seq)
        pages, slots = self.scheduler.memory.adopt(seq, len(handed.pages), len(handed.states))
        of_pages = [_like(shapes[0], handed.pages[i]) for i in pages]
        of_states = [_like(shapes[1], each) for each in handed.states[: len(slots)]]
        try:
            self._run_moves()  # what had to make room
            self._speculation.forget([*pages.values()])
            self.device.put([*pages.values()], of_pages, slots, of_states)
        except Exception:
            # The cache names pages that were not written, and the pools may have been donated.
            self.scheduler.finish(seq, FinishReason.ABORT)
            self._start_over(self.scheduler.running, "The engine failed: no room for a hand-over.")
            raise
        self._outputs.live[seq.id] = live

    @property
    def has_work(self) -> bool:
        """Whether `step` has work to do or events to return."""
        return bool(self._outputs.live or self._outputs.has_news or self._pending)

    def _accept(
        self, seq: Sequence, compiled: Mapping[tuple[str, str], CompiledGrammar]
    ) -> LiveSequence:
        params, config = seq.params, self.model.config
        _check_sequence(seq, config, not isinstance(self.config.kv_policy, Streaming))
        if seq.pictures:
            if self._pictures is None:
                raise ValueError(
                    f"pictures: expected none, as this {config.family} model reads texts only."
                )
            self._pictures.check(seq)
            if params.prompt_logprobs and config.sees_pictures:
                raise ValueError(
                    "prompt_logprobs: expected False with pictures, as the tokens of one of this"
                    f" {config.family} model's go through it together."
                )
            seq.number_pictures(self.picture_numbers.of)
        seq.adapter = self._adapters.find(seq.adapter_name)
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
            Detokenizer(
                self._texts,
                params.stop,
                params.skip_special_tokens,
                params.include_stop,
                seq.tokens if params.goes_on else (),
            ),
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
        if self.device.has_lost_cache:
            self._start_over(self.scheduler.running, "A step of another engine failed.")
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
        """Waits for held sequences, or for files, if there is nothing else to do."""
        files = self.scheduler.memory.files
        if files is not None and files.num_reading:
            self.device.rest()
            files.wait(_FILE_SECONDS)
            return
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
        if not plan.entries:
            return None
        self._run_moves()
        self._speculation.draft(plan.entries, self.device)
        rows_of = None
        if self._pictures is not None:
            with counters.phases["pictures"]:
                rows_of = self._pictures.rows_of(plan.entries)
        with counters.phases["plan"]:
            batch = self.device.plan(plan.entries, rows_of)
        with counters.phases["dispatch"]:
            scores = self.device.forward(batch)
        self.scheduler.launched(plan)
        lengths = [entry.num_tokens for entry in plan.entries]
        stats.bucket, stats.num_steps = batch.bucket.name, plan.num_steps
        stats.num_tokens, stats.num_decodes = sum(lengths), lengths.count(1)
        counters.totals["steps"] += plan.num_steps
        samples = [
            (row, all_live[entry.seq.id]) for row, entry in enumerate(plan.entries) if entry.samples
        ]
        drafts = {row: plan.entries[row].drafts for row in batch.drafted}
        return LaunchedStep(plan.entries, batch, scores, samples, drafts)

    def _run_moves(self) -> None:
        """Runs the scheduler's moves of pages and states, before the step that needs them.

        Rotations come last: they read pages that moves write, and write pages that moves have read.
        """
        memory = self.scheduler.memory
        if moves := memory.moves.take():
            self._run(moves)
        if rotations := memory.take_rotations():
            with self._counters.phases["dispatch"]:
                self.device.rotate(rotations)

    def _run(self, moves: list[OneMove]) -> None:
        host = self.scheduler.memory.host
        try:
            with self._counters.phases["dispatch"]:
                self.device.move(moves)
        except Exception:
            if host is not None and any(isinstance(move, Move) for move in moves):
                host.is_open = False
                log.exception("the host has no memory for pages; it is used no more")
            raise
        self._speculation.forget([page for move in moves for page in move.pages_written])

    def _sample(self, launched: LaunchedStep) -> None:
        """Launches the sampling of a step, for all sequences that still need a token, and the
        further steps of a burst."""
        with self._counters.phases["retire"]:
            mask = self._constrained.mask_samples(launched)
            for _, live in launched.samples:
                if live.needs_sampler_state:
                    seq, live.needs_sampler_state = live.seq, False
                    self.device.set_state(seq.slot, seq.params, seq.tokens, seq.num_prompt)
        # Released here, so that the next step can use the same memory.
        scores, launched.scores = launched.scores, None
        if scores is None or not (launched.samples or launched.batch.scored):
            return
        with self._counters.phases["dispatch"]:
            launched.sampled.append(self.device.sample(scores, launched.batch.kind, mask))
        del scores
        for step in range(1, max(entry.num_steps for entry in launched.entries)):
            with self._counters.phases["plan"]:
                batch = buckets.later_batch(launched.batch, launched.entries, step)
            with self._counters.phases["dispatch"]:
                scores = self.device.forward(batch)
                launched.sampled.append(self.device.sample(scores, batch.kind, None))
                del scores

    def _retire(self, launched: LaunchedStep) -> None:
        """Waits for the tokens of a step, or of a burst, and appends them to their sequences."""
        if not launched.sampled:
            return
        with self._counters.phases["wait"]:
            sampled = sampling.joined([self.device.read(each) for each in launched.sampled])
        with self._counters.phases["retire"]:
            for scored in launched.batch.scored:
                if scored.seq.status is not Status.FINISHED:
                    self._outputs.add_prompt_logprobs(scored, sampled)
            tokens, drafted = sampled.tokens.tolist(), launched.batch.drafted
            num_rows = launched.batch.bucket.num_rows
            for row, live in launched.samples:
                if live.seq.status is Status.FINISHED:
                    continue
                num_sampled = launched.entries[row].num_steps
                if row in drafted:
                    rows: Seq[int] = drafted[row]
                    new = [tokens[each] for each in rows]
                    num_allowed = launched.num_masked.get(row, len(rows))
                    new = self._speculation.accept(live, new, launched.drafts[row], num_allowed)
                else:
                    rows = range(row, num_sampled * num_rows, num_rows)
                    new = tokens[row : num_sampled * num_rows : num_rows]
                new = self._outputs.add_samples(live, new, sampled, rows, num_sampled)
                if live.grammar is not None and live.seq.finish_reason is None:
                    self._constrained.advance(live, new)

    # ---- between steps -------------------------------------------------------------------------

    def settle(self) -> list[TokenEvent]:
        """Waits for the step in flight, and launches none. Returns the events."""
        before, self._pending = self._pending, None
        if before is not None:
            self._retire(before)
        return self._outputs.take_events()

    @property
    def version(self) -> str:
        """The name of the weights' version; see TokenEvent.versions."""
        return self._outputs.version

    def update_params(
        self,
        params: Any,
        version: str | None,
        *,
        partial: bool = False,
        donate: bool = False,
        keep_prefixes: bool = False,
    ) -> None:
        """Replaces weights, after `settle`.

        Running sequences go on: they read their tokens again, and the next are of the new weights.

        params, partial: see WeightUpdates.plan. donate: see WeightUpdates.convert.
        version: None: the number of updates so far. keep_prefixes: see KvMemory.begin_version.

        Raises:
          ValueError: nothing has changed. After any other exception the weights may be gone
            (`device.has_weights`); then no step may run before an update that has all of them.
        """
        assert self._pending is None
        updates = self.device.plan_update(params, partial=partial)
        version = str(self._num_updates + 1) if version is None else version
        if not version or "\0" in version:
            raise ValueError(f"update_params: version: expected a name, got {version!r}.")
        self._num_updates += 1
        files = self.scheduler.memory.files
        if files is not None and version == FIRST_VERSION and not keep_prefixes:
            files.is_open = False  # its entries are of weights that had this name before
        self.scheduler.begin_version("" if version == FIRST_VERSION else version, keep_prefixes)
        self._outputs.version = version
        self.device.update(updates, donate=donate)

    @property
    def lora_names(self) -> list[str]:
        return self._adapters.names

    def load_lora(self, name: str, weights: models.LoraWeights) -> None:
        """Loads an adapter, after `settle`. See LoadedAdapters.load."""
        assert self._pending is None
        live = (each.seq for each in self._outputs.live.values())
        self._adapters.load(name, weights, self.device, live)

    def unload_lora(self, name: str) -> None:
        """See LoadedAdapters.unload."""
        self._adapters.unload(name)

    def sleep(self, *, weights: bool) -> None:
        """Frees the kv cache, after `settle`, and the weights too if `weights`.

        Running sequences wait until `wake` and read their tokens again.
        """
        assert self._pending is None
        self.scheduler.begin_version(self.scheduler.memory.version, keep_prefixes=False)
        self.device.free_pages()
        self._speculation.free_pages()
        if weights:
            self.device.free_weights()

    def wake(self) -> None:
        """Makes an empty kv cache. Raises jax.errors.JaxRuntimeError if it does not fit."""
        self.device.reset()
        self._speculation.reset()

    def close(self, keep: bool = True) -> None:
        """Ends threads of its own. There is no step after it.

        keep: all that is cached goes to files, if there are any, as far as _CLOSE_SECONDS allow.
        """
        if (files := self.scheduler.memory.files) is not None:
            try:
                if keep:
                    self.settle()
                    self._run_moves()
                    self._keep_all(files)
            except Exception:
                log.exception("the prefix cache is not kept")
            files.close()
        try:
            self.device.close()
        except Exception:
            log.exception("the device is of no use to other engines")

    def _keep_all(self, files: FileTier) -> None:
        until, page_bytes = time.monotonic() + _CLOSE_SECONDS, 4 * self.config.page_size
        for namespace, key, node in self.scheduler.cache.latest_first():
            begin = len(key) // page_bytes - len(node.pages)
            for i in range(0, len(node.pages), PAGES):
                part = node.pages[i : i + PAGES]
                is_last = i + len(part) == len(node.pages)
                key_of_part = key[: (begin + i + len(part)) * page_bytes]
                if (left := until - time.monotonic()) <= 0:
                    return
                if node.on_host:
                    state = node.host_state if is_last and node.host_state >= 0 else None
                    files.store(namespace, key_of_part, part, state)
                    self._run_moves()
                    files.flush(left)
                    continue
                slots = [node.state] if is_last and node.state >= 0 else []
                pages, states = self.device.take(part, slots)
                files.put(namespace, key_of_part, pages, states)
                files.flush(left)

    # ---- failures ------------------------------------------------------------------------------

    def recover(self, message: str) -> list[TokenEvent]:
        """Recovers from an exception in `step`: ends the running sequences with 'error'.

        The step may have destroyed the cache's contents, so the prefix cache is emptied. The queue
        stays, unless nothing was running: then the cause is in the queue. Returns the last events.
        """
        self._start_over(self.scheduler.running or self.scheduler.waiting, message)
        return self._outputs.take_events()

    def _start_over(self, failed: Seq[Sequence], message: str) -> None:
        """Ends sequences with 'error', all that run among them, and empties the cache."""
        self._pending = self._last_plan = None
        for seq in failed:
            self._outputs.fail(seq, message)
        for seq in self.scheduler.waiting:
            # The token in flight at its preemption will not come; it is sampled again.
            self.scheduler.append(seq, [], num_sampled=seq.num_in_flight)
        self._outputs.close_finished()
        self.scheduler.cache.clear()
        self.device.reset()
        self._speculation.reset()

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
            self.device.num_buckets_left,
            dict(held),
        )

    def snapshot(self) -> dict[str, Any]:
        """See the module `snapshot`."""
        return snapshot.snapshot(self.scheduler, self.step_stats, self._last_plan)


def _like(shape: Any, arrays: Any) -> Any:
    """The arrays in a tree like `shape`."""
    return jax.tree.unflatten(jax.tree.structure(shape), jax.tree.leaves(arrays))


def _check_sequence(seq: Sequence, config: models.ModelConfig, is_whole: bool) -> None:
    """Raises ValueError if the model cannot run the sequence. is_whole: it is no endless text."""
    params = seq.params
    if is_whole and seq.num_prompt + params.max_tokens > config.max_positions:
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
        _check_tokens(name, tokens, config)


def _check_tokens(name: str, tokens: Seq[int], config: models.ModelConfig) -> None:
    for extreme in (min(tokens, default=0), max(tokens, default=0)):
        if not 0 <= extreme < config.vocab_size:
            raise ValueError(f"{name}: expected tokens in [0, {config.vocab_size}), got {extreme}.")


def _check_pictures(
    model: models.ModelConfig, config: EngineConfig, vision: models.VisionModel
) -> None:
    """Raises ValueError if steps cannot have pictures whose tokens see each other."""
    if not model.sees_pictures:
        return
    if config.context_parallel > 1:
        raise ValueError(
            f"EngineConfig: context_parallel: expected 1 with the pictures of this {model.family}"
            f" model, whose tokens see each other, got {config.context_parallel}."
        )
    needed = vision.max_tokens + config.max_running - 1
    if config.max_step_tokens < needed:
        raise ValueError(
            f"EngineConfig: max_step_tokens: expected at least {needed}, for all"
            f" {vision.max_tokens} tokens of a picture of this {model.family} model beside"
            f" {config.max_running - 1} decodes, got {config.max_step_tokens}."
        )


def _check_recurrent(
    model: models.ModelConfig, config: EngineConfig, draft_model: models.Model | None
) -> None:
    """Refuses what models with recurrent layers do not support."""
    if draft_model is not None and draft_model.config.recurrent is not None:
        raise ValueError(
            "a draft model: expected one without recurrent layers, got "
            f"{draft_model.config.family}."
        )
    if model.recurrent is None and config.num_states is not None:
        raise ValueError(
            f"EngineConfig: num_states: expected None, as {model.family} has no recurrent"
            f" layers, got {config.num_states}."
        )


def _check_kv_policy(
    model: models.ModelConfig,
    config: EngineConfig,
    has_processes: bool,
    has_draft_model: bool,
    has_pictures: bool,
) -> None:
    """Refuses what does not work with a kv policy. `capacities` refuses models."""
    policy = config.kv_policy
    if policy is None:
        return
    is_of_prompts = isinstance(policy, PromptPolicy)
    _refuse_beside(
        "kv_policy",
        ("tensor_parallel", 1, 1 if is_of_prompts else config.tensor_parallel),
        ("experts of several engines", False, is_of_prompts and config.expert_group is not None),
        ("kv_dtype", None, config.kv_dtype),
        ("context_parallel", 1, config.context_parallel),
        ("several processes", False, has_processes),
        ("a draft model", False, has_draft_model),
        ("pictures", False, has_pictures),
    )
    if isinstance(policy, PromptPolicy):
        if policy.keep >= model.max_positions:
            raise ValueError(
                f"EngineConfig: kv_policy: expected to keep fewer than the model's"
                f" {model.max_positions} tokens, got {policy.keep}."
            )
        return
    most = StreamingPages(policy, config.page_size).max_table_pages * config.page_size
    if most > model.max_positions:
        raise ValueError(
            f"EngineConfig: kv_policy: expected sinks and window within {model.max_positions}"
            f" tokens, the model's positions, got {most} with a block of the text and whole pages;"
            " use a smaller window."
        )


def _check_kv_select(
    config: EngineConfig, has_processes: bool, has_draft_model: bool, has_pictures: bool
) -> None:
    """Refuses what does not work with page selection. `capacities` refuses models."""
    if config.kv_select is None:
        return
    _refuse_beside(
        "kv_select",
        ("kv_policy", None, config.kv_policy),
        # A text that is read again, or was cached as an output, has keys of other reads.
        ("batch_invariant", False, config.batch_invariant),
        ("experts of several engines", False, config.expert_group is not None),
        ("kv_dtype", None, config.kv_dtype),
        ("context_parallel", 1, config.context_parallel),
        ("several processes", False, has_processes),
        ("a draft model", False, has_draft_model),
        ("pictures", False, has_pictures),
    )


def _refuse_beside(option: str, *refused: tuple[str, Any, Any]) -> None:
    """refused: name, the value that goes with the option, and the value."""
    for name, neutral, value in refused:
        if value != neutral:
            raise ValueError(
                f"EngineConfig: {name}: expected {neutral} with {option}, got {value}."
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
    if draft.config.mtp:
        check_mtp(draft, model, config)
