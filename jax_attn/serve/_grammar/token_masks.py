"""Token masks: the tokens that grammars allow next, computed outside the engine's thread.

A `MaskJob` gives a sequence's grammar the sampled tokens, and finds what must or may follow. Most
jobs take 50 us. A bad grammar's job takes some 50 ms, and only its own sequence waits for it:
grammars that were slow before go to a thread of low priority, which runs the grammar with the least
time used first.
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

SLOW_SECONDS = 0.004  # only its own sequence waits for a slower job
# CPU budget of a sequence, for all its jobs: fixed seconds plus seconds per token.
_BUDGET_SECONDS, _BUDGET_SECONDS_TOKEN = 2.0, 0.02
_NICE = 10


@dataclass(eq=False, slots=True)
class MaskJob:
    """Gives a grammar more tokens. The fields after the empty line are valid once `is_done`."""

    tokens: list[int]  # empty: the first job, or the first after forced tokens
    mask: np.ndarray  # [words] i32, one bit per allowed token; valid if neither forced nor stopped
    jumps: bool  # return forced tokens; False: a mask that allows only them

    is_done: bool = False
    forced: list[int] = field(
        default_factory=list
    )  # tokens that must follow; the grammar has already advanced over them
    is_stopped: bool = False  # complete: nothing may follow
    error: str | None = None  # for the grammar's author
    bug: BaseException | None = None


@dataclass(eq=False, slots=True)
class SequenceGrammar:
    """A sequence's state in its grammar, and the time spent on it.

    job: the last one started; written by the engine's thread alone.
    """

    matcher: Matcher
    num_words: int
    jumps: bool
    job: MaskJob | None = None
    num_tokens: int = 0  # a job without tokens counts as one
    seconds: float = 0.0  # CPU seconds of all jobs
    was_slow: bool = False  # whether its last job was slow

    def run(self, job: MaskJob) -> None:
        begin = time.thread_time()
        try:
            self._run(job)
        except GrammarError as error:
            job.error = str(error)
        except BaseException as bug:
            job.bug = bug
        seconds = time.thread_time() - begin
        self.was_slow = seconds > SLOW_SECONDS
        self.seconds += seconds
        self.num_tokens += max(1, len(job.tokens))
        budget = _BUDGET_SECONDS + _BUDGET_SECONDS_TOKEN * self.num_tokens
        if self.seconds > budget and job.error is None:
            job.error = (
                f"grammar: to find what may follow has taken {self.seconds:.1f} s for "
                f"{self.num_tokens} tokens; expected at most {budget:.1f} s: make it simpler."
            )

    def _run(self, job: MaskJob) -> None:
        matcher = self.matcher
        for token in job.tokens:
            matcher.advance(token)
        if not matcher.is_stopped:
            if job.jumps:
                job.forced = matcher.take_forced()
            if not job.forced:
                matcher.fill_mask(job.mask)
        job.is_stopped = matcher.is_stopped

    def look_ahead(self, drafts: Sequence[int]) -> list[np.ndarray]:
        """Masks after each of the first drafts, in case these are sampled.

        Stops where the finished job's mask or a later one does not allow a draft, where tokens are
        forced, or where one would have to wait.
        """
        assert self.job is not None
        masks: list[np.ndarray] = []
        begin, allowed, matcher = time.thread_time(), self.job.mask, self.matcher.copy()
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
            except GrammarError:  # the draft may not be sampled
                break
            masks.append(allowed)
        self.seconds += time.thread_time() - begin
        return masks


def _allows(mask: np.ndarray, token: int) -> bool:
    return bool(mask[token // 32] >> token % 32 & 1)


_Item = tuple[float, int, SequenceGrammar, MaskJob]


class MaskWorkers:
    """Threads that run mask jobs. They end with the process: see `workers`."""

    def __init__(self, num_fast: int):
        """num_fast: threads of the fast queue. The slow queue always has one."""
        self._condition = threading.Condition()
        self._work = threading.Condition()
        # (seconds so far, serial, grammar, job) of the fast queue, and of the slow one.
        self._queues: tuple[list[_Item], list[_Item]] = [], []
        self._serials = itertools.count()
        for is_slow in [False] * num_fast + [True]:
            threading.Thread(
                target=self._run, args=(is_slow,), name="jax_attn masks", daemon=True
            ).start()

    def start(self, grammar: SequenceGrammar, tokens: list[int]) -> None:
        """Starts a sequence's next job. The one before must be done."""
        mask = np.empty(grammar.num_words, np.int32)
        job = grammar.job = MaskJob(tokens, mask, grammar.jumps)
        item = (grammar.seconds, next(self._serials), grammar, job)
        with self._work:
            heapq.heappush(self._queues[grammar.was_slow], item)
            self._work.notify_all()

    def wait(self, jobs: Iterable[MaskJob], seconds: float) -> None:
        """Waits until all jobs are done, at most `seconds`."""
        left = [job for job in jobs if not job.is_done]
        if left:
            with self._condition:
                self._condition.wait_for(lambda: all(job.is_done for job in left), seconds)

    def wait_for_any(self, jobs: list[MaskJob], seconds: float) -> None:
        with self._condition:
            self._condition.wait_for(lambda: any(job.is_done for job in jobs), seconds)

    def _run(self, is_slow: bool) -> None:
        if is_slow and sys.platform == "linux":  # on Linux priorities are per thread
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while True:
            with self._work:
                while not self._queues[is_slow]:
                    self._work.wait()
                _, _, grammar, job = heapq.heappop(self._queues[is_slow])
            grammar.run(job)
            with self._condition:
                job.is_done = True
                self._condition.notify_all()
            del grammar, job


@functools.cache
def workers() -> MaskWorkers:
    """The process's one MaskWorkers."""
    return MaskWorkers(num_fast=max(1, min(8, (os.cpu_count() or 1) // 2)))
