"""What requests may ask for and hold at once, in numbers.

Without the modules that check it, which the engine's process does not import.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_PICTURES = 16  # of a request, unless --max-pictures says otherwise
# Log-probabilities of an answer: tokens x (1 + logprobs) of all its choices, including an echoed
# prompt. The limit is 20 MB of JSON.
MAX_SCORES = 1 << 18


@dataclass(frozen=True)
class KeyLimits:
    """The limits for the requests of one key at once; without keys, for all requests."""

    requests: int
    choices: int  # sequences: prompts x n
    tokens: int = 1 << 22  # of prompts, counted for each choice; 44 bytes of memory each
    # Log-probabilities of unfinished answers that are not streams; up to 90 bytes each.
    scores: int = 8 * MAX_SCORES
    body_bytes: int = 64 << 20  # of bodies that are being received or wait to be parsed
    embedding_bytes: int = 64 << 20  # of vectors until they are sent
    picture_bytes: int = 1 << 29  # of pixels; choices share them

    @staticmethod
    def default(max_waiting: int, max_running: int) -> KeyLimits:
        """Gives each key the engine's whole capacity; under contention, keys get equal shares."""
        most = max_waiting + max_running
        return KeyLimits(requests=most, choices=most)
