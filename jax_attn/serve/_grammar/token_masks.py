"""What grammars allow next, computed beside the engine's thread, which waits for it only so long.

A turn of a sequence: its grammar takes the sampled token, and says what must or may follow.
Most turns take 50 us. A bad grammar's turn takes some 50 ms, and only its own sequence waits for
it: grammars that were slow before go to a thread of low priority, where the one that has used the
least time comes first.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import os
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from jax_attn.serve._grammar.grammar import GrammarError, Matcher

SLOW_SECONDS = 0.004  # a turn of more is nobody's to wait for but its own sequence's
# Of a processor, for all turns of a sequence: so much, and so much for each token.
_BUDGET_SECONDS, _BUDGET_SECONDS_TOKEN = 2.0, 0.02
_NICE = 10


@dataclass(eq=False, slots=True)
class Turn:
    """What becomes of a grammar with more tokens; the fields below the line once `is_done`."""

    tokens: list[int]  # none: the first turn
    mask: np.ndarray  # [words] i32, a bit a token that may follow; neither forced nor stopped
    jumps: bool  # wants forced tokens; else they are but the only ones allowed

    is_done: bool = False
    forced: list[int] = field(
        default_factory=list
    )  # what must follow, which the grammar has by now
    is_stopped: bool = False  # complete: nothing may follow
    error: str | None = None  # for whoever wrote the grammar
    bug: BaseException | None = None


@dataclass(eq=False, slots=True)
class Constraint:
    """A sequence's grammar, and what it has cost. `turn` is of the engine's thread."""

    matcher: Matcher
    num_words: int
    jumps: bool
    turn: Turn | None = None
    num_turns: int = 0
    seconds: float = 0.0  # of a processor, for all turns
    was_slow: bool = False  # in its last turn

    def take(self, turn: Turn) -> None:
        begin = time.thread_time()
        try:
            self._take(turn)
        except GrammarError as error:
            turn.error = str(error)
        except BaseException as bug:
            turn.bug = bug
        seconds = time.thread_time() - begin
        self.was_slow = seconds > SLOW_SECONDS
        self.seconds += seconds
        self.num_turns += max(1, len(turn.tokens))
        budget = _BUDGET_SECONDS + _BUDGET_SECONDS_TOKEN * self.num_turns
        if self.seconds > budget and turn.error is None:
            turn.error = (
                f"grammar: to find what may follow has taken {self.seconds:.1f} s for "
                f"{self.num_turns} tokens; expected at most {budget:.1f} s: make it simpler."
            )

    def _take(self, turn: Turn) -> None:
        matcher = self.matcher
        for token in turn.tokens:
            matcher.advance(token)
        if not matcher.is_stopped:
            if turn.jumps:
                turn.forced = matcher.take_forced()
            if not turn.forced:
                matcher.fill_mask(turn.mask)
        turn.is_stopped = matcher.is_stopped

    def look_ahead(self, drafts: Sequence[int]) -> list[np.ndarray]:
        """Of the first drafts, if they are what is sampled, what may follow each: as far as the
        turn, which is done, allows them, and nothing is forced behind them or has to wait."""
        assert self.turn is not None
        masks: list[np.ndarray] = []
        begin, allowed, matcher = time.thread_time(), self.turn.mask, self.matcher.copy()
        for draft in drafts:
            spent = time.thread_time() - begin
            if self.was_slow or spent > SLOW_SECONDS or not _allows(allowed, draft):
                break
            try:
                matcher.advance(draft)
                if matcher.is_stopped or (self.jumps and matcher.is_forced):
                    break
                allowed = np.empty(self.num_words, np.int32)
                matcher.fill_mask(allowed)
            except GrammarError:  # maybe it is not sampled
                break
            masks.append(allowed)
        self.seconds += time.thread_time() - begin
        return masks


def _allows(mask: np.ndarray, token: int) -> bool:
    return bool(mask[token // 32] >> token % 32 & 1)


_Item = tuple[float, int, Constraint, Turn]


class MaskWorkers:
    """Threads that take turns of constraints. They end with the process: see `workers`."""

    def __init__(self, num_fast: int):
        """num_fast: threads of the fast lane, beside which there is one of the slow one."""
        self._condition = threading.Condition()
        self._work = threading.Condition()
        # (seconds so far, serial, constraint, turn), of the fast and of the slow.
        self._lanes: tuple[list[_Item], list[_Item]] = [], []
        self._serials = itertools.count()
        for lane in [0] * num_fast + [1]:
            threading.Thread(
                target=self._run, args=(lane,), name="jax_attn masks", daemon=True
            ).start()

    def start(self, constraint: Constraint, tokens: list[int]) -> None:
        """Begins the next turn. The one before is done."""
        mask = np.empty(constraint.num_words, np.int32)
        turn = constraint.turn = Turn(tokens, mask, constraint.jumps)
        item = (constraint.seconds, next(self._serials), constraint, turn)
        with self._work:
            heapq.heappush(self._lanes[constraint.was_slow], item)
            self._work.notify_all()

    def wait(self, turns: Iterable[Turn], seconds: float) -> None:
        """Until all are done, but not longer."""
        left = [turn for turn in turns if not turn.is_done]
        if left:
            with self._condition:
                self._condition.wait_for(lambda: all(turn.is_done for turn in left), seconds)

    def wait_for_any(self, turns: list[Turn], seconds: float) -> None:
        with self._condition:
            self._condition.wait_for(lambda: any(turn.is_done for turn in turns), seconds)

    def _run(self, lane: int) -> None:
        if lane and sys.platform == "linux":  # where priorities are of threads
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while True:
            with self._work:
                while not self._lanes[lane]:
                    self._work.wait()
                _, _, constraint, turn = heapq.heappop(self._lanes[lane])
            constraint.take(turn)
            with self._condition:
                turn.is_done = True
                self._condition.notify_all()
            del constraint, turn


@functools.cache
def workers() -> MaskWorkers:
    """Of this process."""
    return MaskWorkers(num_fast=max(1, min(8, (os.cpu_count() or 1) // 2)))
