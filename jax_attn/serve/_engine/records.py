"""Plain data that the engine keeps for a sequence and for a launched step."""

from __future__ import annotations

from dataclasses import dataclass, field

from jax_attn.serve._engine import sampling
from jax_attn.serve._engine.buckets import Batch
from jax_attn.serve._engine.device import Scores
from jax_attn.serve._grammar.token_masks import SequenceGrammar
from jax_attn.serve._scheduling.events import TokenLogprob
from jax_attn.serve._scheduling.request import Sequence
from jax_attn.serve._scheduling.step_plan import ScheduledSequence
from jax_attn.serve._text.detokenizer import Detokenizer


@dataclass(slots=True)
class LiveSequence:
    """A sequence whose last event has not been sent: the engine's data beside the scheduler's."""

    seq: Sequence
    detokenizer: Detokenizer
    grammar: SequenceGrammar | None
    stop_tokens: frozenset[int]
    needs_sampler_state: bool  # the device does not have the sequence's token counts and biases
    prompt_logprobs: list[TokenLogprob]  # collected for the first event
    at_length: bool = False  # has max_tokens tokens; its grammar says whether the text is complete


@dataclass(slots=True)
class LaunchedStep:
    """A step whose forward pass is queued on the device, and later its sampling too.

    A burst is all its steps. `batch`, `scores` and the rows are those of the first.
    """

    entries: list[ScheduledSequence]
    batch: Batch
    scores: Scores | None  # until sampling is dispatched
    samples: list[tuple[int, LiveSequence]]  # sequences that sample, with their row of the scores
    drafts: dict[int, tuple[int, ...]]  # by row, for sequences that have drafts
    # By row, for sequences with a grammar: how many of its samples have a mask. The first sample is
    # the one before the drafts.
    num_masked: dict[int, int] = field(default_factory=dict)
    sampled: list[sampling.Sampled] = field(default_factory=list)  # of each step
