"""A sequence until it leaves an engine for one of another server."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from jax_attn.serve._engine.hand_over import HandedOver
from jax_attn.serve._scheduling.events import TokenEvent
from jax_attn.serve._scheduling.protocols import EngineStopped
from jax_attn.serve._scheduling.request import FinishReason, Sequence


class Leaving:
    """Receives a sequence's events, in the engine's thread, and has it taken out once it has
    num_tokens tokens.

    handed: the request; without pages if it has ended before. event: its output, complete then.
    """

    def __init__(
        self,
        seq: Sequence,
        num_tokens: int,
        export: Callable[[str], Future[HandedOver]],
        ended: Callable[[Sequence], HandedOver],
    ):
        """export: takes a sequence out. ended: what stands for one that has ended."""
        self.handed: Future[HandedOver] = Future()
        self.event = TokenEvent(seq.id)
        self._seq, self._num_tokens = seq, num_tokens
        self._export, self._ended = export, ended
        self._is_asked = False

    def deliver(self, events: list[TokenEvent]) -> None:
        for event in events:
            self.event.extend(event)
        if self.event.finish_reason is not None:
            self._end()
        elif len(self.event.tokens) >= self._num_tokens and not self._is_asked:
            self._is_asked = True
            try:
                self._export(self._seq.id).add_done_callback(self._take)
            except EngineStopped as error:
                self._set(error)

    def _end(self) -> None:
        if self.event.finish_reason == FinishReason.ABORT:
            self._set(EngineStopped("The engine does not run."))
        elif self.event.finish_reason == FinishReason.ERROR and not self.event.is_clients_fault:
            self._set(RuntimeError(self.event.error))
        else:
            self._set(self._ended(self._seq))

    def _take(self, exported: Future[HandedOver]) -> None:
        error = exported.exception()
        if error is None:
            self._set(exported.result())
        elif not isinstance(error, ValueError):  # else it is about to end, and may do so here
            self._set(error)

    def _set(self, result: HandedOver | BaseException) -> None:
        if not self.handed.set_running_or_notify_cancel():
            return
        if isinstance(result, BaseException):
            self.handed.set_exception(result)
        else:
            self.handed.set_result(result)
