"""Speculative decoding in a step: proposes drafts, runs the draft model, accepts right drafts.

`drafts` explains the method and has the lookup in the text; `draft_model` has the draft model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq

from jax_attn.serve._engine import sampling
from jax_attn.serve._engine.counters import Counters
from jax_attn.serve._engine.device import Device
from jax_attn.serve._engine.draft_model import DraftModel, ModelDrafter
from jax_attn.serve._engine.records import LiveSequence
from jax_attn.serve._scheduling.drafts import NgramDrafter
from jax_attn.serve._scheduling.request import Drafter, Sequence
from jax_attn.serve._scheduling.step_plan import ScheduledSequence

log = logging.getLogger("jax_attn.serve")


class Speculation:
    """The drafts of all sequences. Without a draft model, calls about it do nothing."""

    def __init__(self, max_drafts: int, model: DraftModel | None, counters: Counters):
        """max_drafts: of a sequence in a step; 0 turns speculation off."""
        self.model = model
        self._max_drafts, self._counters = max_drafts, counters

    def drafter(self) -> Drafter | None:
        """Makes a drafter for one sequence. None: no drafts."""
        if not self._max_drafts:
            return None
        if self.model is None:
            return NgramDrafter(self._max_drafts)
        return ModelDrafter(self.model, self._max_drafts)

    def accept(
        self, live: LiveSequence, tokens: list[int], drafts: Seq[int], num_allowed: int
    ) -> list[int]:
        """The samples of a step up to the first that differs from its draft.

        tokens: samples, one before each draft and one after the last; negative: the logits hold
        NaN.
        num_allowed: samples whose grammar masks are known; later ones are void.
        """
        num_right = next(
            (i for i, (a, b) in enumerate(zip(tokens, drafts, strict=False)) if a != b),
            len(drafts),
        )
        tokens = tokens[: min(num_right + 1, num_allowed)]
        num_right = len(tokens) - 1
        self._counters.totals["draft_tokens"] += len(drafts)
        self._counters.totals["draft_tokens_taken"] += num_right
        assert live.seq.drafter is not None
        live.seq.drafter.settle(len(drafts), num_right)
        if sampling.has_penalties(live.seq.params):
            live.needs_sampler_state = True  # the device has counted rejected drafts
        return tokens

    # ---- the draft model -----------------------------------------------------------------------

    def warm_up(self, progress: Callable[[int, int, str], None] | None) -> list[str]:
        """See Device.warm_up."""
        if self.model is None:
            return []
        return [f"drafts: {name}" for name in self.model.device.warm_up(progress)]

    def measure_cost(self, device: Device) -> None:
        """Measures the time of a draft in steps of the model, once both are warm."""
        if self.model is not None:
            self.model.cost = self.model.device.step_seconds() / device.step_seconds()
            log.info("a draft takes %.2f of a step", self.model.cost)

    def admit(self, seq: Sequence) -> None:
        if self.model is not None:
            self.model.admit(seq)

    def draft(self, entries: Seq[ScheduledSequence], device: Device) -> None:
        """See DraftModel.draft. device: the model's device."""
        if self.model is not None:
            with self._counters.phases["draft"]:
                self.model.draft(entries, device.newest)

    def forget(self, pages: Seq[int]) -> None:
        """See DraftModel.forget."""
        if self.model is not None:
            self.model.forget(pages)

    def reset(self) -> None:
        """See Device.reset."""
        if self.model is not None:
            self.model.reset()

    def free_pages(self) -> None:
        """See Device.free_pages."""
        if self.model is not None:
            self.model.device.free_pages()

    def bytes_held(self) -> dict[int, int]:
        """See Device.bytes_held."""
        return self.model.device.bytes_held() if self.model is not None else {}
