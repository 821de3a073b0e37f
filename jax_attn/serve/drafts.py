"""Speculative decoding: guesses at what a sequence goes on with, verified many at a time.

A step computes the sequence's next token and its drafts as one chunk, and samples behind each of
them. A sample depends on its logits, its seed and its position alone (see `sampling`), so the draft
that equals the sample before it is what would have come anyway, and so is the sample behind it. The
first that does not ends the step's tokens: the output is the same, token by token, greedy or not.

While such a step is in flight it is not known how many tokens it gives, so the sequence takes no
part in the next one, and the device waits for the host once. Whether that pays is learned from how
many drafts were taken.
"""

from __future__ import annotations

from jax_attn.serve.request import Sequence

_FIRST = 4  # drafts; more once all of them are right, fewer once they are not
_NGRAMS = (4, 3, 2)  # tokens that must have been there before, tried in this order
_LOOKBACK = 1 << 13  # tokens
_TRIES = 8  # at bytes that are no tokens
_MAX_REST = 64  # steps without drafts, after several that were refused


class NgramDrafter:
    """Of one sequence: what followed when its last tokens were there before, as text that is
    quoted, edited or listed does."""

    def __init__(self, most: int):
        self._most, self._num = most, min(most, _FIRST)
        self._num_refused = 0  # drafts in a row of which nothing was taken
        self._rest = 0  # steps until the next draft

    def propose(self, seq: Sequence, most: int) -> list[int]:
        """Up to `most` tokens that may follow those that are known or in flight."""
        if self._rest:
            self._rest -= 1
            return []
        return _lookup(seq, min(most, self._num)) if most > 0 else []

    def settle(self, num_drafts: int, num_taken: int) -> None:
        """Of the last drafts, so many were right."""
        self._num = min(self._most, 2 * self._num if num_taken == num_drafts else num_taken + 1)
        if num_taken:
            self._num_refused = 0
        else:
            self._num_refused += 1
            self._rest = min(1 << self._num_refused, _MAX_REST)


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
