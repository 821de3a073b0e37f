"""The parts of `models.Model` and `Embedder` that HTTP needs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

import numpy as np

from jax_attn import models
from jax_attn.models._weights.protocols import Tokenizer


class ServedModel(Protocol):
    """A model without its weights."""

    @property
    def config(self) -> models.ModelConfig: ...

    @property
    def tokenizer(self) -> Tokenizer: ...


class EmbeddingJob(Protocol):
    """The sequences of one request. See embedder.Job."""

    @property
    def vectors(self) -> np.ndarray:
        """[number of sequences, size] f32, complete when `done` is."""
        ...

    @property
    def done(self) -> Future[None]: ...

    @property
    def begun(self) -> float | None: ...

    def cancel(self) -> None: ...


class ServedEmbedder(Protocol):
    """See Embedder."""

    @property
    def name(self) -> str: ...

    @property
    def max_tokens(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def failure(self) -> BaseException | None: ...

    def start(self, on_ready: Callable[[], None]) -> None: ...

    def stop(self) -> None: ...

    def submit(
        self, tenant: str, sequences: list[list[int]], seconds: list[int] | None = None
    ) -> EmbeddingJob: ...
