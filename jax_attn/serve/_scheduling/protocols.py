"""What HTTP needs of an engine and of a model: of `AsyncEngine` and `models.Model`, or of those in
tests, which compute nothing."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol

from jax_attn import models
from jax_attn.models._weights.protocols import Tokenizer
from jax_attn.serve._scheduling.events import TokenEvent
from jax_attn.serve._scheduling.request import Sequence


class EngineStopped(RuntimeError):
    """The engine does not run: not started, stopped, or failed."""


@dataclass(frozen=True)
class Limits:
    max_model_len: int  # prompt and output tokens of a sequence
    max_running: int
    max_waiting: int


class ServedModel(Protocol):
    """A model without its weights."""

    @property
    def config(self) -> models.ModelConfig: ...

    @property
    def tokenizer(self) -> Tokenizer: ...


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

    def stats(self) -> dict[str, Any]: ...

    async def snapshot(self) -> dict[str, Any]: ...
