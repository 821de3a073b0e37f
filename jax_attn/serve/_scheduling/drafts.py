"""Speculative decoding: guesses at what a sequence goes on with, verified many at a time.

A step computes the sequence's next token and its drafts as one chunk, and samples behind each of
them. A sample depends on its logits, its seed and its position alone (see `sampling`), so the draft
that equals the sample before it is what would have come anyway, and so is the sample behind it. The
first that does not ends the step's tokens: the output is the same, token by token, greedy or not.
Penalties count the drafts before a sample, and a grammar goes along with them (see `token_masks`).

While such a step is in flight it is not known how many tokens it gives, so the sequence takes no
part in the next one, and the device waits for the host once. Whether that pays is learned from how
many drafts were taken: see `Pace`. What proposes is a lookup in the text, here, or a smaller model
(`draft_model`).
"""

from __future__ import annotations

from jax_attn.serve._scheduling.request import Sequence

_FIRST = 4  # drafts; more once all of them are right, fewer once they are not
_WAIT = 0.3  # of a step without drafts: what the device waits for the host behind one with some
_WEIGHT = 0.3  # of the last drafts, in the average that decides
_MAX_REST = 64  # steps without drafts, if a try costs little
_MAX_LOSS = 0.03  # of the time, by tries that are in vain
_NGRAMS = (4, 3, 2)  # tokens that must have been there before, tried in this order
_LOOKBACK = 1 << 13  # tokens
_TRIES = 8  # at bytes that are no tokens


class Pace:
    """How many drafts a sequence has, learned from what became of those that it had.

    A draft that is right saves a step. While drafts save less, on average, than they cost, the
    sequence rests, with a try of a few drafts in between: for twice as long each time, and for as
    long as makes the loss of the last try a small part of the time.
    """

    def __init__(self, most: int, cost: float = 0.0, expected: float = 0.0):
        """most: drafts of a step. cost: of making one, in steps without drafts. expected: what the
        drafts of a step save, as far as others tell."""
        self._most, self._num, self._cost = most, min(most, _FIRST), cost
        self._gain = expected  # steps that drafts save, on average
        self._rest, self._next_rest = 0, 1  # steps until the next drafts
        if expected < 0:
            self._num, self._rest, self._next_rest = 1, _MAX_REST // 2, _MAX_REST // 2

    def next(self, most: int) -> int:
        """How many drafts to propose for this step, at most so many. Called once a step."""
        if self._rest:
            self._rest -= 1
            return 0
        return min(most, self._num)

    def settle(self, num_drafts: int, num_taken: int) -> float:
        """Of the last drafts, so many were right. Returns what that has saved, -1 to 1 steps."""
        self._num = min(self._most, 2 * self._num if num_taken == num_drafts else num_taken + 1)
        # Within bounds, so that a long quotation is forgotten soon after its end.
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
    """Of one sequence: what followed when its last tokens were there before, as text that is
    quoted, edited or listed does."""

    def __init__(self, most: int):
        self._pace = Pace(most)

    def propose(self, seq: Sequence, most: int) -> list[int]:
        """Up to `most` tokens that may follow those that are known or in flight."""
        num = self._pace.next(most)
        return _lookup(seq, num) if num > 0 else []

    def settle(self, num_drafts: int, num_taken: int) -> None:
        self._pace.settle(num_drafts, num_taken)


def _lookup(seq: Sequence, most: int) -> list[int]:
    tokens, packed = seq.tokens, seq.packed()
    num_tokens, skip = len(tokens), seq.num_in_flight
    first = 4 * max(0, num_tokens - _LOOKBACK)
    for n in _NGRAMS:
        pattern = bytes(packed[-4 * n :])
        at = _rfind(packed, pattern, first) if num_tokens > n else -1
        if at < 0:
            continue
        # Behind the end the text repeats itself.
        found: list[int] = []
        for i in range(at + n, at + n + skip + most):
            found.append(tokens[i] if i < num_tokens else found[i - num_tokens])
        return found[skip:]
    return []


def _rfind(packed: bytearray, pattern: bytes, first: int) -> int:
    """The last token before the end at which the pattern stands; -1: none."""
    end = len(packed) - 4
    for _ in range(_TRIES):
        at = packed.rfind(pattern, first, end)
        if at % 4 == 0 or at < 0:
            return at // 4
        end = at + len(pattern) - 1
    return -1
