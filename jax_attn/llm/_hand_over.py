"""Requests that leave one LLM and go on in another: `export_request` and `import_request`."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeAlias, TypeVar

from jax_attn.llm._batch import RETRY_SECONDS, Run
from jax_attn.llm._outputs import Completion, Output
from jax_attn.llm._params import SamplingParams
from jax_attn.llm._runtime import Prompt, Request, Runtime, run_of
from jax_attn.llm._streams import ChunkQueue
from jax_attn.serve._engine.hand_over import HandedOver, read_logprobs
from jax_attn.serve._scheduling.admission import QueueFull
from jax_attn.serve._scheduling.events import TokenEvent
from jax_attn.serve._scheduling.protocols import EngineStopped

Result = TypeVar("Result")
# Done, what it gives then, and what ends it early.
Started: TypeAlias = tuple[Future[None], Callable[[], Result], Callable[[], None]]


def start_export(
    runtime: Runtime, prompt: Prompt, params: SamplingParams | None, num_tokens: int
) -> Started[HandedOver]:
    """See LLM.export_request."""
    if num_tokens < 1:
        raise ValueError(f"export_request: num_tokens: expected at least 1, got {num_tokens}.")
    found = runtime.requests("export_request", [prompt], params)
    if found[0].params.n != 1:
        raise ValueError(f"export_request: n: expected 1, got {found[0].params.n}.")
    ((_, run),) = runtime.runs(found, [0])
    leaving = _Leaving(runtime, found[0], run, num_tokens)
    return leaving.done, leaving.result, leaving.cancel


def start_import(runtime: Runtime, handed: HandedOver | bytes) -> Started[Output]:
    """See LLM.import_request."""
    if isinstance(handed, bytes):
        handed = HandedOver.from_bytes(handed)
    arriving = _Arriving(runtime, handed)
    return arriving.done, arriving.result, arriving.cancel


class _Leaving:
    """A request until it has num_tokens tokens. Other threads bring its events."""

    def __init__(self, runtime: Runtime, request: Request, run: Run, num_tokens: int):
        self.done: Future[None] = Future()
        self._engine = runtime.engine("export_request")
        self._request, self._run, self._num_tokens = request, run, num_tokens
        self._version = self._engine.version
        self._handed: HandedOver | None = None
        self._is_asked = False
        self._chunks = ChunkQueue(self._engine, [run], self._put)
        self._chunks.start()

    def _put(self, arrived: Any) -> None:
        try:
            self._chunks.take(arrived)
        except Exception as error:
            _set(self.done, error)
            return
        for event in arrived:
            self._run.add(event)
        if self._run.is_done:
            _set(self.done)
        elif len(self._run.completion.tokens) >= self._num_tokens and not self._is_asked:
            self._is_asked = True
            try:
                exported = self._engine.export_request(self._run.seq.id)
            except EngineStopped as error:
                _set(self.done, error)
                return
            exported.add_done_callback(self._take)

    def _take(self, exported: Future[HandedOver]) -> None:
        if (error := exported.exception()) is not None:
            _set(self.done, error)  # has no effect if the request has ended meanwhile
            return
        self._handed = exported.result()
        _set(self.done)

    def result(self) -> HandedOver:
        run, request, handed = self._run, self._request, self._handed
        if handed is None:  # it has ended: there is nothing to go on with
            handed = HandedOver.ended(run.seq, self._version, self._engine.page_size)
        else:
            run.completion.text = "".join(run.texts)
        handed.so_far = {
            "prompt": request.text,
            "completion": dataclasses.asdict(run.completion),
            "prompt_logprobs": run.prompt_logprobs,
            "num_cached": run.num_cached,
            "has_logprobs": request.params.num_top is not None,
        }
        return handed

    def cancel(self) -> None:
        if not self.done.done():
            self._chunks.abort()


class _Arriving:
    """A request of another LLM until it ends. Other threads bring its events."""

    def __init__(self, runtime: Runtime, handed: HandedOver):
        self.done: Future[None] = Future()
        self._engine = runtime.engine("import_request")
        self._handed = handed
        try:
            so_far = handed.so_far
            completion = Completion(**so_far["completion"])
            self._prompt_logprobs = read_logprobs(so_far["prompt_logprobs"])
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"import_request: expected what export_request has returned, got so_far: {error}."
            ) from None
        completion.logprobs = read_logprobs(completion.logprobs)
        prompt = handed.tokens[: handed.num_prompt]
        self._run = run_of(prompt, handed.params, 0, None, handed.priority, "", "")
        self._run.completion = completion
        self._run.texts = [completion.text]
        if completion.finish_reason:
            self.done.set_result(None)
        else:
            self._start()

    def _start(self) -> None:
        if self.done.done():  # cancelled before a second try
            return
        try:
            started = self._engine.import_request(self._handed, self._run.seq.id, self)
        except EngineStopped as error:
            _set(self.done, error)
            return
        started.add_done_callback(self._on_started)

    def _on_started(self, started: Future[None]) -> None:
        error = started.exception()
        if isinstance(error, QueueFull):
            threading.Timer(RETRY_SECONDS, self._start).start()
        elif error is not None:
            _set(self.done, error)

    def deliver(self, events: list[TokenEvent]) -> None:
        """Receives events in the engine's thread."""
        for event in events:
            self._run.add(event)
        if self._run.is_done:
            _set(self.done)

    def result(self) -> Output:
        run, so_far = self._run, self._handed.so_far
        if not so_far["has_logprobs"]:
            run.completion.logprobs = None
        tokens = self._handed.tokens[: self._handed.num_prompt]
        cached = so_far["num_cached"]
        return Output(so_far["prompt"], tokens, [run.completion], self._prompt_logprobs, cached)

    def cancel(self) -> None:
        if not self.done.done():
            _set(self.done)
            self._engine.abort({self._run.seq.id})


def _set(done: Future[None], error: BaseException | None = None) -> None:
    """Ends what is not done yet."""
    if done.done():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)
