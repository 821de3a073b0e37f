"""From the tokens of a step to events: text, stop strings, logprobs and finish reasons.

`Detokenizer` makes the text and finds stop strings in it. `Outputs._push` decides whether a stop
string or a stop token may end the text yet.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq

from jax_attn.serve._engine.buckets import ScoredRows
from jax_attn.serve._engine.counters import Counters
from jax_attn.serve._engine.records import LiveSequence
from jax_attn.serve._engine.sampling import Sampled
from jax_attn.serve._scheduling.events import FIRST_VERSION, TokenEvent, TokenLogprob
from jax_attn.serve._scheduling.request import FinishReason, Sequence, Status
from jax_attn.serve._scheduling.scheduler import Scheduler

_NOT_NUMBERS = "The model's logits are not numbers."


class Outputs:
    """Appends tokens to sequences, ends them, and collects an event for each changed sequence.

    live: sequences whose last event has not been sent, by id.
    version: of the weights that make the tokens.
    """

    def __init__(self, scheduler: Scheduler, counters: Counters):
        self.live: dict[str, LiveSequence] = {}
        self.version = FIRST_VERSION
        self._scheduler, self._counters = scheduler, counters
        self._events: dict[str, TokenEvent] = {}  # by id, since the last `take_events`

    @property
    def has_news(self) -> bool:
        """Whether `take_events` would return any event."""
        return bool(self._events)

    def take_events(self) -> list[TokenEvent]:
        """The events since the last call: at most one for each sequence."""
        events, self._events = list(self._events.values()), {}
        return events

    def event(self, seq: Sequence) -> TokenEvent:
        """The sequence's event that the next `take_events` returns; callers may add to it."""
        event = self._events.get(seq.id)
        if event is None:
            event = self._events[seq.id] = TokenEvent(seq.id)
        return event

    # ---- tokens --------------------------------------------------------------------------------

    def add_prompt_logprobs(self, scored: ScoredRows, sampled: Sampled) -> None:
        """Keeps the logprobs of prompt tokens for the first event.

        Known positions are skipped: a preempted sequence reads its prompt again.
        """
        known = self.live[scored.seq.id].prompt_logprobs
        num_top = scored.seq.params.logprobs
        assert num_top is not None
        for position, row in enumerate(scored.rows, scored.begin):
            if sampled.tokens[row] < 0:
                self.fail(scored.seq, _NOT_NUMBERS)
                return
            if position == len(known):
                known.append(_logprob(sampled, row, num_top))

    def add_samples(
        self,
        live: LiveSequence,
        tokens: list[int],
        sampled: Sampled,
        rows: Seq[int],
        num_sampled: int = 1,
    ) -> list[int]:
        """Appends sampled tokens up to the one that ends the sequence; returns those appended.

        Finishes the sequence, unless its grammar must decide whether it ends at max_tokens: then
        `live.at_length` is set.

        tokens: accepted drafts, then samples, which are negative from where the logits hold NaN.
        rows: of `sampled`, one for each token or more.
        num_sampled: how many are samples; without drafts more than one of a burst.
        """
        seq = live.seq
        if min(tokens) < 0:
            right = list(itertools.takewhile(lambda token: token >= 0, tokens))
            if right and num_sampled > 1:
                self.add_samples(live, right, sampled, rows, len(right))
            if seq.status is not Status.FINISHED:
                self.fail(seq, _NOT_NUMBERS)
            return []
        if live.prompt_logprobs:
            self.event(seq).logprobs, live.prompt_logprobs = live.prompt_logprobs, []
        if not seq.params.max_tokens:
            event = self.event(seq)
            event.num_cached_tokens, event.admitted = seq.num_cached, seq.admitted
            self.finish(seq, FinishReason.LENGTH)
            return []
        taken, reason = self._push_all(live, tokens)
        if num_sampled == 1:
            self._scheduler.append(seq, taken, 1, len(taken) - 1)
        else:
            for token in taken:
                self._scheduler.append(seq, [token])
        if (num_top := seq.params.logprobs) is not None:
            event = self.event(seq)
            found = [_logprob(sampled, row, num_top) for row in rows[: len(taken)]]
            event.logprobs = [*(event.logprobs or ()), *found]
        if reason is not None:
            if reason is FinishReason.LENGTH and live.grammar is not None:
                live.at_length = True
            else:
                self.finish(seq, reason)
        return taken

    def add_forced(self, live: LiveSequence, tokens: list[int], is_complete: bool) -> None:
        """Appends tokens that a grammar forces, and finishes the sequence if one of them ends it.

        Samples in flight become void. is_complete: the grammar allows nothing after the tokens.
        """
        seq = live.seq
        taken, reason = self._push_all(live, tokens)
        self._scheduler.append(seq, taken, seq.num_in_flight)
        if is_complete and len(taken) == len(tokens):
            reason = FinishReason.STOP
        if reason is not None:
            self.finish(seq, reason)

    def _push_all(
        self, live: LiveSequence, tokens: list[int]
    ) -> tuple[list[int], FinishReason | None]:
        """Adds tokens and their text to the event, up to a token that ends the sequence.

        Returns the tokens added, and the reason if the sequence ends.
        """
        seq, event = live.seq, self.event(live.seq)
        num_output = seq.num_output
        if not num_output:
            event.num_cached_tokens, event.admitted = seq.num_cached, seq.admitted
        reason = None
        for num_taken, token in enumerate(tokens, 1):
            reason = self._push(live, token, num_output + num_taken, event)
            if reason is not None:
                break
        if num_taken < len(tokens):
            tokens = tokens[:num_taken]
        if self.version != FIRST_VERSION or event.versions is not None:
            event.versions = [*event.all_versions(), *[self.version] * num_taken]
        event.tokens += tokens
        self._counters.totals["generated_tokens"] += num_taken
        return tokens, reason

    def _push(
        self, live: LiveSequence, token: int, num_output: int, event: TokenEvent
    ) -> FinishReason | None:
        """Adds a token's text to the event. Returns the reason if the sequence ends with it."""
        params = live.seq.params
        may_stop = num_output > params.min_tokens or live.grammar is not None
        if may_stop and token in live.stop_tokens:
            if params.include_stop:
                event.text += live.detokenizer.push(token, may_stop=False)
            return FinishReason.STOP
        event.text += live.detokenizer.push(token, may_stop=num_output >= params.min_tokens)
        if live.detokenizer.stopped:
            return FinishReason.STOP
        return FinishReason.LENGTH if num_output >= params.max_tokens else None

    def replay(self, live: LiveSequence, tokens: Seq[int]) -> None:
        """Appends the output that another engine has made and reported, without an event."""
        for num_output, token in enumerate(tokens, live.seq.num_output + 1):
            self._push(live, token, num_output, TokenEvent(live.seq.id))
        live.seq.tokens += tokens
        if live.grammar is not None:
            for token in tokens:
                live.grammar.matcher.advance(token)

    # ---- ends ----------------------------------------------------------------------------------

    def fail(self, seq: Sequence, message: str) -> None:
        self.event(seq).error = message
        self.finish(seq, FinishReason.ERROR)

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        self._scheduler.finish(seq, reason)
        self.close(seq)

    def close(self, seq: Sequence) -> None:
        """Makes the last event of a sequence that the scheduler has finished."""
        event = self.event(seq)
        event.finish_reason, event.admitted = seq.finish_reason, seq.admitted
        event.text += self.live.pop(seq.id).detokenizer.flush()

    def close_finished(self) -> None:
        """Makes the last events that a failed step did not make."""
        for live in list(self.live.values()):
            if live.seq.status is Status.FINISHED:
                self.close(live.seq)


def _logprob(sampled: Sampled, row: int, num_top: int) -> TokenLogprob:
    assert sampled.logprobs is not None
    assert sampled.top_tokens is not None and sampled.top_logprobs is not None
    tokens, logprobs = sampled.top_tokens[row, :num_top], sampled.top_logprobs[row, :num_top]
    top = tuple(zip(tokens.tolist(), logprobs.tolist(), strict=True))
    return TokenLogprob(int(sampled.tokens[row]), float(sampled.logprobs[row]), top)
