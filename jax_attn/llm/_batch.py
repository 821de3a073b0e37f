"""Many sequences through the engine, with a bounded number in its queue."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

from jax_attn.llm._outputs import Completion
from jax_attn.serve._engine.async_engine import AsyncEngine
from jax_attn.serve._grammar.compiler import Closed, TooManyGrammars
from jax_attn.serve._grammar.grammar import CompiledGrammar
from jax_attn.serve._scheduling.admission import QueueFull
from jax_attn.serve._scheduling.events import TokenEvent, TokenLogprob
from jax_attn.serve._scheduling.protocols import EngineStopped
from jax_attn.serve._scheduling.request import Sequence

# Sequences that are given to the engine in one command.
_GROUP = 16
# How long to wait before a full queue is tried again; other calls may have filled it.
RETRY_SECONDS = 0.05


@dataclass(slots=True, eq=False)
class Run:
    """A sequence and what came of it so far. The engine's thread fills it."""

    seq: Sequence
    completion: Completion
    texts: list[str] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] | None = None
    num_cached: int = 0
    is_done: bool = False

    def add(self, event: TokenEvent) -> None:
        completion = self.completion
        completion.tokens += event.tokens
        completion.versions += event.all_versions()
        if event.text:
            self.texts.append(event.text)
        if event.logprobs is not None:
            self._add_logprobs(event.logprobs)
        if event.num_cached_tokens is not None:
            self.num_cached = event.num_cached_tokens
        if event.finish_reason is not None:
            completion.finish_reason, completion.error = event.finish_reason.value, event.error
            completion.text = "".join(self.texts)
            self.is_done = True

    def _add_logprobs(self, logprobs: list[TokenLogprob]) -> None:
        if self.completion.logprobs is None:
            self.completion.logprobs = []
            if self.seq.params.prompt_logprobs:  # they come first, all at once
                split = self.seq.num_prompt
                self.prompt_logprobs, logprobs = logprobs[:split], logprobs[split:]
        self.completion.logprobs += logprobs


class Batch:
    """Runs sequences. One thread calls `refill` whenever there are news, until `is_done`.

    runs: taken from the iterator as the queue has room, so making them may overlap with steps.
    on_news: called by other threads. on_run: likewise, with each run that is done.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        runs: Iterable[Run],
        on_news: Callable[[], None],
        on_run: Callable[[Run], None] = lambda run: None,
    ):
        self._engine, self._source = engine, iter(runs)
        self._on_news, self._on_run = on_news, on_run
        limits = engine.limits
        self._window = max(1, limits.max_running + limits.max_waiting // 2)
        self._waiting: deque[Run] = deque()  # taken from the source, not given to the engine
        self._in_flight: dict[str, Run] = {}
        self._grammars: dict[tuple[str, str], Future[CompiledGrammar]] = {}
        self._refused: deque[tuple[list[Run], BaseException]] = deque()
        self._is_exhausted = False
        self._lock = threading.Lock()  # guards _in_flight

    @property
    def is_done(self) -> bool:
        return self._is_exhausted and not (self._waiting or self._in_flight or self._refused)

    @property
    def must_retry(self) -> bool:
        """Whether `refill` should be called again soon, without news."""
        return bool(self._waiting) and len(self._in_flight) < self._window

    def refill(self) -> None:
        """Gives the engine as many sequences as its queue should have.

        Raises:
          EngineStopped, ValueError: the engine refuses a sequence. The others go on; see `abort`.
        """
        while self._refused:
            runs, error = self._refused.popleft()
            if not isinstance(error, QueueFull):
                raise error
            self._waiting.extendleft(reversed(runs))
        while len(self._in_flight) < self._window:
            group = list(self._take(min(_GROUP, self._window - len(self._in_flight))))
            if not group:
                return
            if not self._submit(group):
                return

    def abort(self) -> None:
        """Ends what is in flight. No more events come."""
        with self._lock:
            ids, self._in_flight = set(self._in_flight), {}
        self._engine.abort(ids)

    def _take(self, most: int) -> Iterator[Run]:
        for _ in range(most):
            if not self._waiting:
                run = next(self._source, None)
                if run is None:
                    self._is_exhausted = True
                    return
                self._waiting.append(run)
            yield self._waiting.popleft()

    def _submit(self, group: list[Run]) -> bool:
        """Returns whether the engine may take more now."""
        compiled = {}
        for run in group:
            text = run.seq.params.grammar
            if text is None:
                continue
            try:
                done = self._compiled(run.seq.tenant, text)
            except TooManyGrammars:
                done = None
            if done is None or not done.done():
                self._waiting.extendleft(reversed(group))
                return False
            try:
                compiled[run.seq.tenant, text] = done.result()
            except Closed:
                raise EngineStopped("The engine does not run.") from None
        with self._lock:
            self._in_flight |= {run.seq.id: run for run in group}
        submitted = self._engine.enqueue([run.seq for run in group], compiled, self)
        submitted.add_done_callback(lambda done: self._on_submitted(group, done))
        return True

    def _compiled(self, tenant: str, text: str) -> Future[CompiledGrammar]:
        if (tenant, text) not in self._grammars:
            future = self._engine.compile(text, tenant)
            self._grammars[tenant, text] = future
            future.add_done_callback(lambda _: self._on_news())
        return self._grammars[tenant, text]

    # ---- other threads -------------------------------------------------------------------------

    def _on_submitted(self, group: list[Run], submitted: Future[None]) -> None:
        error = submitted.exception()
        if error is None:
            return
        with self._lock:
            for run in group:
                self._in_flight.pop(run.seq.id, None)
        self._refused.append((group, error))
        self._on_news()

    def deliver(self, events: list[TokenEvent]) -> None:
        """Receives events in the engine's thread."""
        num_done = 0
        for event in events:
            run = self._in_flight.get(event.seq_id)
            if run is None:
                continue  # aborted
            run.add(event)
            if run.is_done:
                num_done += 1
                with self._lock:
                    self._in_flight.pop(event.seq_id, None)
                self._on_run(run)
        if num_done:
            self._on_news()
