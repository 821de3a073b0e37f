"""Runs an embedding model in a thread, with sequences of all requests in batches.

A batch is filled up to a token budget, by the tenants in turn and the requests of each in turn, so
a large request delays nobody else. It is padded to a bucket, whose executables are made at the
start. It is computed in pieces (one layer for some tokens), one piece at a time, so other work on
the device, such as the steps of a decoder, can run in between.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import numpy as np

from jax_attn import models
from jax_attn.models._embedding import embedding
from jax_attn.serve._scheduling.protocols import EmbedderStopped

log = logging.getLogger("jax_attn.serve")

# Tokens of a batch, unless one sequence has more. If a decoder's step has as many (__main__), it is
# for the same reason: others wait for the time of a step.
_CPU_TOKENS, _GPU_TOKENS = 512, 2048
# Operations of a piece. On two cores 20 to 50 ms, for which others wait.
_CPU_OPERATIONS, _GPU_OPERATIONS = 2 * 10**9, 10**12
_FEWEST_TOKENS = 32  # of the smallest bucket; each next one is twice as large, as padding costs
_MAX_ROWS = 64  # sequences of a batch
MAX_TOKENS = 8192  # of a sequence, like OpenAI's models; the memory of a layer grows with it


@dataclass(eq=False)
class Job:
    """The sequences of one request."""

    embedder: Embedder
    tenant: str
    sequences: list[list[int]]
    seconds: list[int]  # where the second text of each sequence begins, if it has one
    vectors: np.ndarray  # [number of sequences, size] f32, written by the thread
    done: Future[None] = field(default_factory=Future)
    begun: float | None = None  # time.monotonic() when its first sequence entered a batch
    num_taken: int = 0
    num_done: int = 0

    def __post_init__(self) -> None:
        self.done.set_running_or_notify_cancel()  # from now on only the thread ends it

    def cancel(self) -> None:
        """Cancels the sequences that have not begun."""
        self.embedder.cancel(self)


class _Entry(NamedTuple):
    job: Job
    row: int  # of the job's vectors


class Embedder:
    """Threads may call `submit` and `cancel`.

    on_failure: called by the thread if it cannot start; `failure` has the reason.
    """

    def __init__(self, model: models.EmbeddingModel, name: str):
        """name: of the model, for clients."""
        self.name, self._model = name, model
        self.max_tokens = min(model.max_tokens, MAX_TOKENS)
        self.size = model.size
        self.failure: BaseException | None = None
        self.on_failure: Callable[[], None] = lambda: None
        on_cpu = jax.default_backend() == "cpu"
        self._budget = _CPU_TOKENS if on_cpu else _GPU_TOKENS
        self._buckets = _buckets(max(self._budget, self.max_tokens))
        operations = _CPU_OPERATIONS if on_cpu else _GPU_OPERATIONS
        self._chunks = {size: _chunk(model, size, operations) for size in self._buckets}
        self._thread = threading.Thread(target=self._run, name="jax_attn embedder", daemon=True)
        self._wake = threading.Condition()
        self._waiting: OrderedDict[str, deque[Job]] = OrderedDict()  # by tenant; guarded by _wake
        self._stopping = False
        self._on_ready: Callable[[], None] = lambda: None

    def start(self, on_ready: Callable[[], None]) -> None:
        """Starts the thread and returns. on_ready: called by the thread once all is compiled."""
        self._on_ready = on_ready
        self._thread.start()

    def stop(self) -> None:
        """Tells all who wait. The thread ends after its batch."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()

    def submit(
        self, tenant: str, sequences: list[list[int]], seconds: list[int] | None = None
    ) -> Job:
        """Queues sequences.

        sequences: 1 to max_tokens tokens each.
        seconds: where the second text of each sequence begins; None: there are none.

        Raises EmbedderStopped.
        """
        vectors = np.empty((len(sequences), self.size), np.float32)
        job = Job(self, tenant, sequences, seconds or list(map(len, sequences)), vectors)
        with self._wake:
            if self._stopping or self.failure is not None:
                raise EmbedderStopped("The embedding model does not run.")
            self._waiting.setdefault(tenant, deque()).append(job)
            self._wake.notify()
        return job

    def cancel(self, job: Job) -> None:
        """Cancels the sequences that have not begun."""
        with self._wake:
            self._forget(job)

    # ---- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            begin = time.monotonic()
            for num_tokens in self._buckets:
                self._vectors([[0]], num_tokens)
                if self._stopping:
                    break
            log.info(
                "embedding model ready in %.1f s; batches of %s tokens",
                time.monotonic() - begin,
                ", ".join(map(str, self._buckets)),
            )
            self._on_ready()
        except BaseException as error:
            log.exception("the embedding model cannot be used")
            self.failure = error
            self.on_failure()
        while batch := self._next():
            try:
                self._compute(batch)
            except Exception as error:
                log.exception("a batch of embeddings failed")
                self._fail({entry.job for entry in batch}, type(error).__name__)
        with self._wake:
            jobs = {job for jobs in self._waiting.values() for job in jobs}
        self._fail(jobs, "the server stops")

    def _next(self) -> list[_Entry]:
        """The sequences of the next batch; []: it is time to stop."""
        with self._wake:
            while not (self._waiting or self._stopping or self.failure):
                self._wake.wait()
            batch: list[_Entry] = []
            num_tokens = 0
            while self._waiting and not self._stopping and len(batch) < _MAX_ROWS:
                tenant, jobs = next(iter(self._waiting.items()))
                job = jobs[0]
                num_tokens += len(job.sequences[job.num_taken])
                if batch and num_tokens > self._budget:
                    break
                job.begun = job.begun or time.monotonic()
                batch.append(_Entry(job, job.num_taken))
                job.num_taken += 1
                # If it has more sequences, it goes behind the others.
                jobs.rotate(-1)
                self._waiting.move_to_end(tenant)
                if job.num_taken == len(job.sequences):
                    self._forget(job)
            return batch

    def _compute(self, batch: list[_Entry]) -> None:
        sequences = [job.sequences[row] for job, row in batch]
        num_tokens = sum(map(len, sequences))
        bucket = next(size for size in self._buckets if num_tokens <= size)
        seconds = [job.seconds[row] for job, row in batch]
        vectors = self._vectors(sequences, bucket, seconds)
        for (job, row), vector in zip(batch, vectors, strict=True):
            job.vectors[row] = vector
            job.num_done += 1
            if job.num_done == len(job.sequences) and not job.done.done():
                job.done.set_result(None)

    def _vectors(
        self, sequences: list[list[int]], num_tokens: int, seconds: list[int] | None = None
    ) -> np.ndarray:
        """Computes the vectors of a batch: [number of sequences, size] f32."""
        batch = models.EmbeddingBatch.make(
            self._model, sequences, num_tokens, _MAX_ROWS, self._chunks[num_tokens], seconds
        )
        vectors = None
        for piece in embedding.pieces(self._model, batch):
            vectors = jax.block_until_ready(piece)
        return np.asarray(vectors)[: len(sequences)]

    def _forget(self, job: Job) -> None:
        """Removes a job from the queue. The caller holds _wake."""
        jobs = self._waiting.get(job.tenant, deque())
        if job in jobs:
            jobs.remove(job)
            if not jobs:
                del self._waiting[job.tenant]

    def _fail(self, jobs: set[Job], reason: str) -> None:
        for job in jobs:
            self.cancel(job)
            if not job.done.done():
                job.done.set_exception(EmbedderStopped(f"The embedding failed: {reason}."))


def _buckets(largest: int) -> list[int]:
    """Bucket sizes in tokens, ascending. They are powers of two, so that chunks divide them."""
    sizes = [_FEWEST_TOKENS]
    while sizes[-1] < largest:
        sizes.append(2 * sizes[-1])
    return sizes


def _chunk(model: models.EmbeddingModel, num_tokens: int, operations: int) -> int:
    """The number of tokens of a piece with at most `operations`, in a batch of num_tokens."""
    chunk = num_tokens
    while chunk > _FEWEST_TOKENS and chunk * model.operations(num_tokens) > operations:
        chunk //= 2
    return chunk
