"""Beam search: the likeliest texts of one prompt, a token of every beam at a time.

Each step reads the prompt and a beam's tokens as a sequence of its own with one token of output,
whose logprobs say how the beam may go on. The prefix cache has all but a beam's last tokens.

The rules are those of transformers' `generate(num_beams=..., early_stopping="never")`. A step puts
the continuations of all beams in the order of their sums of logprobs. Those that end their text are
finished if they are among the first `width`; the first `width` others are the next beams. A text's
score is the sum of its logprobs over length ** length_penalty. The search ends when no beam can
come before the finished texts any more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, TypeAlias

from jax_attn.serve._scheduling.events import TokenEvent, TokenLogprob
from jax_attn.serve._scheduling.request import FinishReason, SamplingParams, Sequence

TextOf: TypeAlias = Callable[[Sequence, list[int]], str]  # the text of a sequence's output

_OFFERS = 20  # continuations of a beam: the most logprobs that the engine reports
MAX_WIDTH = 10  # as many continuations may end a text

# Fields of requests that have no meaning here, and the values that ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "temperature": (0, 1),
    "top_k": (0, -1),
    "top_p": (1,),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "min_tokens": (0,),
    "stop": ("", [], ()),
    "logit_bias": ({},),
    "prompt_logprobs": (),
}


def unsupported(given: Mapping[str, Any]) -> str | None:
    """The first field that asks for something beam search does not do; None: there is none.

    given: values by the names of fields; None and other names are passed over.
    """
    for name, neutral in _NEUTRAL.items():
        value = given.get(name)
        if value is not None and value not in neutral:
            return name
    return None


@dataclass(frozen=True, slots=True)
class Beam:
    """A text. Lists have an entry for each token.

    total: the sum of the logprobs, which are of the model's own logits.
    """

    tokens: list[int]
    logprobs: list[TokenLogprob]
    versions: list[str]
    total: float
    finish_reason: FinishReason | None = None  # None: the text may go on

    def then(self, token: int, logprob: float, event: TokenEvent, is_end: bool) -> Beam:
        """The text with one more token, of those that `event` offers."""
        top = _offered(event)
        return Beam(
            [*self.tokens, token],
            [*self.logprobs, TokenLogprob(token, logprob, top)],
            [*self.versions, *event.all_versions()],
            self.total + logprob,
            FinishReason.STOP if is_end else None,
        )


class BeamSearch:
    """The search for one prompt. Until `is_done`: run `sequences`, then `take` their events."""

    def __init__(
        self, prompt: Sequence, width: int, length_penalty: float, eos_tokens: Collection[int]
    ):
        """prompt: a sequence that is not run. Its params say max_tokens (at least 1), logprobs and
          what ends a text; steps have its tokens, tenant, adapter and so on.
        width: beams, 1 to MAX_WIDTH, and texts that are found.
        length_penalty: above 0 prefers long texts, below 0 short ones.
        """
        self._prompt, self._width, self._length_penalty = prompt, width, length_penalty
        self._ends = {*prompt.params.stop_token_ids}
        if not prompt.params.ignore_eos:
            self._ends.update(eos_tokens)
        self._beams = [Beam([], [], [], 0.0)]
        self._finished: list[Beam] = []  # the best, the best first
        self._num_steps = 0
        self._first: list[TokenEvent] = []  # the events of the first step
        self._failed: TokenEvent | None = None  # of a step: ended without a token
        self.is_done = False

    def sequences(self) -> list[Sequence]:
        """The sequences of the next step, one for each beam."""
        like = self._prompt
        one_token = SamplingParams(max_tokens=1, temperature=0.0, logprobs=_OFFERS, ignore_eos=True)
        return [
            Sequence(
                f"{like.id}.{self._num_steps}.{i}",
                like.request_id,
                [*like.tokens, *beam.tokens],
                one_token,
                namespace=like.namespace,
                priority=like.priority,
                deadline=like.deadline,
                arrival=like.arrival,
                tenant=like.tenant,
                adapter_name=like.adapter_name,
                pictures=like.pictures,
            )
            for i, beam in enumerate(self._beams)
        ]

    def take(self, events: Seq[TokenEvent]) -> None:
        """Goes on with the events of `sequences`, in their order, each the sum of a sequence's."""
        self._first = self._first or list(events)
        for event in events:
            if not event.logprobs:  # it ended without a token
                assert event.finish_reason is not None
                self._failed = event
                self._end(event.finish_reason)
                return
        self._num_steps += 1
        is_last = self._num_steps == self._prompt.params.max_tokens
        offers = [
            (beam.total + logprob, beam, token, logprob, event)
            for beam, event in zip(self._beams, events, strict=True)
            for token, logprob in _offered(event)
        ]
        # The sort is stable: an earlier beam's text comes before another with the same sum.
        offers.sort(key=lambda offer: offer[0], reverse=True)
        self._beams = []
        for rank, (_, beam, token, logprob, event) in enumerate(offers):
            if token in self._ends:
                if rank < self._width:
                    self._finished.append(beam.then(token, logprob, event, True))
            elif len(self._beams) < self._width and (rank < self._width or not is_last):
                self._beams.append(beam.then(token, logprob, event, False))
        self._finished = self._best(self._finished)
        if is_last or not self._beams:
            self._end(FinishReason.LENGTH)
        elif len(self._finished) == self._width:
            worst = self._score(self._finished[-1])
            self.is_done = all(self._most(beam) <= worst for beam in self._beams)

    def events(self, sequences: Seq[Sequence], text_of: TextOf) -> list[TokenEvent]:
        """The texts of a search that is done, the best first, as the output of `sequences`.

        sequences: were not run, and have the params of the prompt; at most `width`. Those without
          a text end with an error.
        """
        pairs = zip(self._finished, sequences, strict=False)
        made = [self._event(beam, seq, text_of) for beam, seq in pairs]
        if made and self._first:
            made[0].admitted = self._first[0].admitted
            made[0].num_cached_tokens = self._first[0].num_cached_tokens
        return made + [self._no_text(seq) for seq in sequences[len(made) :]]

    def _no_text(self, seq: Sequence) -> TokenEvent:
        if self._failed is not None:
            return dataclasses.replace(self._failed, seq_id=seq.id)
        return TokenEvent(
            seq.id,
            finish_reason=FinishReason.ERROR,
            error="Beam search: the model has fewer tokens that go on than n needs.",
            is_clients_fault=True,
        )

    def _event(self, beam: Beam, seq: Sequence, text_of: TextOf) -> TokenEvent:
        params, shown = seq.params, beam.tokens
        if beam.finish_reason is FinishReason.STOP and not params.include_stop:
            shown = shown[:-1]
        logprobs = None
        if params.logprobs is not None:
            logprobs = [each._replace(top=each.top[: params.logprobs]) for each in beam.logprobs]
        failed = self._failed if beam.finish_reason is FinishReason.ERROR else None
        return TokenEvent(
            seq.id,
            beam.tokens,
            text_of(seq, shown),
            logprobs,
            beam.finish_reason,
            error=failed.error if failed else None,
            is_clients_fault=failed.is_clients_fault if failed else False,
            versions=beam.versions,
        )

    def _end(self, reason: FinishReason) -> None:
        """Ends the search with what there is. reason: of the texts that might have gone on."""
        left = [dataclasses.replace(beam, finish_reason=reason) for beam in self._beams]
        self._finished = self._best([*self._finished, *left])
        self.is_done = True

    def _best(self, beams: list[Beam]) -> list[Beam]:
        return sorted(beams, key=self._score, reverse=True)[: self._width]

    def _score(self, beam: Beam) -> float:
        return beam.total / max(1, len(beam.tokens)) ** self._length_penalty

    def _most(self, beam: Beam) -> float:
        """The score that a beam can reach at most: with tokens of probability 1."""
        longest, next_one = self._prompt.params.max_tokens, len(beam.tokens) + 1
        length = longest if self._length_penalty > 0 else next_one
        return beam.total / length**self._length_penalty


def _offered(event: TokenEvent) -> tuple[tuple[int, float], ...]:
    """The likeliest tokens at the place of the one token of an event."""
    return event.logprobs[0].top if event.logprobs else ()
