"""The interface of an engine for HTTP: `AsyncEngine`, `RemoteEngine`, or the tests' engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol

from jax_attn.serve._scheduling.cache_events import CacheEvent
from jax_attn.serve._scheduling.events import TokenEvent
from jax_attn.serve._scheduling.request import Sequence


class EngineStopped(RuntimeError):
    """The engine does not run: not started, stopped, or failed."""


class EmbedderStopped(RuntimeError):
    """The embedding model's thread has ended, or a batch has failed."""


@dataclass(frozen=True)
class Limits:
    max_model_len: int  # prompt and output tokens of a sequence
    max_running: int
    max_waiting: int
    num_replicas: int = 1  # that share the queue out; one takes all sequences of a call


class ServedEngine(Protocol):
    """See AsyncEngine."""

    @property
    def limits(self) -> Limits: ...

    @property
    def ready(self) -> bool: ...

    @property
    def failure(self) -> BaseException | None: ...

    def start(self) -> None: ...

    async def stop(self, drain: bool) -> None: ...

    def generate(self, seqs: Seq[Sequence]) -> AsyncGenerator[TokenEvent]: ...

    async def hand_over(self, seq: Sequence, num_tokens: int, so_far: dict[str, Any]) -> bytes: ...

    def go_on(self, data: bytes, seq: Sequence) -> AsyncGenerator[TokenEvent]: ...

    def stats(self) -> dict[str, Any]: ...

    async def snapshot(self) -> dict[str, Any]: ...

    on_cache_events: Callable[[list[CacheEvent]], None]

    def watch_cache(self, on: bool) -> None: ...

    async def control(self, name: str, **options: Any) -> str: ...
