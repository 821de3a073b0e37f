"""Speculative decoding: drafts of a sequence's next tokens, verified many at a time.

A step computes the sequence's next token and its drafts as one chunk, and samples after each of
them. A sample depends only on its logits, its seed and its position (see `sampling`). So a draft
that equals the sample before it is the token that would have come anyway, and the sample after it
is valid too. The first draft that differs ends the step's tokens: the output is the same, token by
token, greedy or not. Penalties count the drafts before a sample, and a grammar follows the drafts
(see `token_masks`).

While such a step is in flight its number of tokens is unknown, so the sequence takes no part in the
next one, and the device waits once for the host. `Pace` learns from the number of accepted drafts
whether that pays. Drafts come from a lookup in the text, here, or from a smaller model
(`draft_model`).
"""

from __future__ import annotations

from array import array

from jax_attn.serve._scheduling.request import Sequence

_FIRST = 4  # drafts at first; more after all were right, fewer after one was wrong
_WAIT = 0.3  # in steps without drafts: time the device waits for the host after a step with some
_WEIGHT = 0.3  # weight of the newest drafts in the running average
_MAX_REST = 64  # steps without drafts, if a try costs little
_MAX_LOSS = 0.03  # share of the time lost in tries that fail
_NGRAMS = (4, 3, 2)  # tokens to match with earlier text, tried in this order
_LOOKBACK = 1 << 13  # tokens
_TRIES = 8  # at matches that are not aligned to tokens


class Pace:
    """The number of drafts of a sequence, learned from the results of earlier ones.

    A right draft saves a step. While drafts save less, on average, than they cost, the sequence
    pauses drafting, with a try of a few drafts after each pause. Each pause is twice as long as the
    last, and long enough that the loss of the last try is a small part of the time.
    """

    def __init__(self, most: int, cost: float = 0.0, expected: float = 0.0):
        """Makes a pace.

        most: drafts of a step.
        cost: of making one, in steps without drafts.
        expected: steps saved by the drafts of a step, as seen in other sequences.
        """
        self._most, self._num, self._cost = most, min(most, _FIRST), cost
        self._gain = expected  # steps that drafts save, on average
        self._rest, self._next_rest = 0, 1  # steps until the next drafts
        if expected < 0:
            self._num, self._rest, self._next_rest = 1, _MAX_REST // 2, _MAX_REST // 2

    def next(self, most: int) -> int:
        """The number of drafts to propose for this step, at most `most`. Call it once a step."""
        if self._rest:
            self._rest -= 1
            return 0
        return min(most, self._num)

    def settle(self, num_drafts: int, num_taken: int) -> float:
        """Records that num_taken of the last drafts were right.

        Returns the steps saved, -1 to 1.
        """
        self._num = min(self._most, 2 * self._num if num_taken == num_drafts else num_taken + 1)
        # Bounded, so that a long quotation is forgotten soon after its end.
        saved = num_taken - _WAIT - self._cost * num_drafts
        gain = min(max(saved, -1.0), 1.0)
        self._gain += _WEIGHT * (gain - self._gain)
        if gain > 0:
            self._next_rest = max(1, self._next_rest // 2)
        else:
            self._next_rest = min(2 * self._next_rest, _MAX_REST)
        if self._gain <= 0:
            self._rest = max(self._next_rest, int(-saved / _MAX_LOSS))
        return gain


class NgramDrafter:
    """Proposes, for one sequence, the tokens that followed when its last tokens occurred before.

    This works for text that is quoted, edited or listed. A text that the client predicts
    (Sequence.predicted) is searched first.
    """

    def __init__(self, most: int):
        self._pace = Pace(most)
        self._predicted: _Predicted | None = None

    def propose(self, seq: Sequence, most: int) -> list[int]:
        """Proposes up to `most` tokens that may follow the known ones and those in flight."""
        num = self._pace.next(most)
        if num <= 0:
            return []
        if seq.predicted and self._predicted is None:
            self._predicted = _Predicted(seq.predicted)
        found = self._predicted.lookup(seq, num) if self._predicted is not None else []
        return found or _lookup(seq, num)

    def settle(self, num_drafts: int, num_taken: int) -> None:
        self._pace.settle(num_drafts, num_taken)


class _Predicted:
    """A text that an output may repeat, from its beginning or with changes."""

    def __init__(self, tokens: list[int]):
        self._tokens, self._packed = tokens, bytes(array("i", tokens))
        self._at = 0  # where the last search has found the output's end

    def lookup(self, seq: Sequence, most: int) -> list[int]:
        """What follows the output, if its last tokens are here: near the last place, or later."""
        output = bytes(memoryview(seq.packed())[4 * seq.num_prompt :])
        at = len(output) // 4 if self._packed.startswith(output) else self._find(output)
        if at < 0:
            return []
        self._at = at
        begin = at + seq.num_in_flight
        return self._tokens[begin : begin + most]

    def _find(self, output: bytes) -> int:
        """The end of the first match of the output's last tokens behind the last end; -1: none."""
        for n in _NGRAMS:
            pattern, first = output[-4 * n :], 4 * max(0, self._at - n + 1)
            for _ in range(_TRIES if len(pattern) == 4 * n else 0):
                found = self._packed.find(pattern, first)
                if found < 0:
                    break
                if found % 4 == 0:
                    return found // 4 + n
                first = found + 1
        return -1


def _lookup(seq: Sequence, most: int) -> list[int]:
    tokens, packed = seq.tokens, seq.packed()
    num_tokens, skip = len(tokens), seq.num_in_flight
    first = 4 * max(0, num_tokens - _LOOKBACK)
    for n in _NGRAMS:
        pattern = bytes(packed[-4 * n :])
        at = _rfind(packed, pattern, first) if num_tokens > n else -1
        if at < 0:
            continue
        # After its end the text repeats from the match.
        found: list[int] = []
        for i in range(at + n, at + n + skip + most):
            found.append(tokens[i] if i < num_tokens else found[i - num_tokens])
        return found[skip:]
    return []


def _rfind(packed: bytearray, pattern: bytes, first: int) -> int:
    """The last token before the end at which the pattern occurs; -1: none."""
    end = len(packed) - 4
    for _ in range(_TRIES):
        at = packed.rfind(pattern, first, end)
        if at % 4 == 0 or at < 0:
            return at // 4
        end = at + len(pattern) - 1
    return -1
