"""Compiles clients' grammars safely: first in a trial process, then in the server.

Each grammar is tried in a separate process (see `trial`), which ends if the grammar takes more time
or memory than allowed. Only grammars that pass are compiled here, in a thread of lowest priority,
one at a time. Tenants take turns, and each may queue a few.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
from collections import OrderedDict, deque
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from jax_attn.serve._grammar.grammar import (
    MAX_GRAMMAR_BYTES,
    MAX_GRAMMAR_SECONDS,
    CompiledGrammar,
    GrammarError,
    Grammars,
    one_line,
)

_MAX_QUEUED = 64  # grammars of one tenant
_MAX_REFUSALS = 256  # remembered, so that a repeated grammar costs nothing
# Wall-clock seconds, for a process that gets no CPU time for long.
_PATIENCE = 30.0
_NICE = 15


class Closed(RuntimeError):
    """The compiler takes no more grammars."""


class TooManyGrammars(RuntimeError):
    """A tenant has queued as many grammars as it may. It should try again later."""


class GrammarCompiler:
    """Thread-safe. Its threads start with the first grammar or by `start`, and end with `close`."""

    def __init__(self, grammars: Grammars, num_threads: int = 2):
        self._grammars, self._num_threads = grammars, num_threads
        self._lock = threading.Condition()
        # Jobs are (tenant, grammar). Tenants are in the order of their turns.
        self._queues: OrderedDict[str, deque[tuple[str, str]]] = OrderedDict()
        self._wanted: dict[tuple[str, str], list[Future[CompiledGrammar]]] = {}
        self._refused: OrderedDict[str, str] = OrderedDict()
        self._threads: list[threading.Thread] = []
        self._trials: list[_Trial] = []
        self._is_closed = False
        self._compiles_here = threading.Lock()

    def start(self) -> None:
        """Starts the threads, which start their processes."""
        with self._lock:
            while len(self._threads) < self._num_threads and not self._is_closed:
                trial = _Trial(self._grammars.description)
                self._trials.append(trial)
                thread = threading.Thread(
                    target=self._run, args=(trial,), name="jax_attn grammars", daemon=True
                )
                self._threads.append(thread)
                thread.start()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._lock.notify_all()
            trials = list(self._trials)
            left = [job for queue in self._queues.values() for job in queue]
            futures = [future for job in left for future in self._wanted.pop(job)]
            self._queues.clear()
        for trial in trials:
            trial.kill()
        for future in futures:
            if future.set_running_or_notify_cancel():
                future.set_exception(Closed())

    def compile(self, grammar: str, tenant: str) -> Future[CompiledGrammar]:
        """Compiles, or takes from the cache. The future raises GrammarError or Closed.

        Raises:
          TooManyGrammars: the tenant has too many in the queue.
        """
        future: Future[CompiledGrammar] = Future()
        job = tenant, grammar
        if (compiled := self._grammars.cached(grammar, tenant)) is not None:
            future.set_result(compiled)
            return future
        self.start()
        with self._lock:
            if (message := self._refused.get(grammar)) is not None:
                self._refused.move_to_end(grammar)
                future.set_exception(GrammarError(message))
            elif self._is_closed:
                future.set_exception(Closed())
            elif job in self._wanted:
                self._wanted[job].append(future)
            else:
                queue = self._queues.setdefault(tenant, deque())
                if len(queue) >= _MAX_QUEUED:
                    raise TooManyGrammars(
                        f"{len(queue)} grammars of a key wait to be compiled, which is all that may"
                    )
                queue.append(job)
                self._wanted[job] = [future]
                self._lock.notify()
        return future

    # ---- the threads ---------------------------------------------------------------------------

    def _run(self, trial: _Trial) -> None:
        _be_nice()
        while (job := self._next()) is not None:
            compiled: CompiledGrammar | None = None
            error: Exception | None = None
            try:
                compiled = self._compile(trial, *job)
            except Exception as reason:
                error = reason
            with self._lock:
                futures = self._wanted.pop(job)
                if isinstance(error, GrammarError):
                    self._refused[job[1]] = str(error)
                    while len(self._refused) > _MAX_REFUSALS:
                        self._refused.popitem(last=False)
            for future in futures:
                if future.set_running_or_notify_cancel():
                    if compiled is not None:
                        future.set_result(compiled)
                    else:
                        future.set_exception(error)
        trial.kill()

    def _next(self) -> tuple[str, str] | None:
        """The next job, tenant by tenant.

        Skips jobs nobody waits for. None: the compiler is closed.
        """
        with self._lock:
            while not self._is_closed:
                if not self._queues:
                    self._lock.wait()
                    continue
                tenant, queue = self._queues.popitem(last=False)
                job = queue.popleft()
                if queue:
                    self._queues[tenant] = queue  # behind all other tenants
                if all(future.cancelled() for future in self._wanted[job]):
                    del self._wanted[job]
                    continue
                return job
            return None

    def _compile(self, trial: _Trial, tenant: str, grammar: str) -> CompiledGrammar:
        num_bytes = trial.run(grammar)
        with self._compiles_here:
            return self._grammars.compile(grammar, tenant, num_bytes)


class _Trial:
    """A process that compiles a grammar and measures it.

    One thread uses it; any may call `kill`.
    """

    def __init__(self, description: dict[str, Any]):
        self._description = description
        self._process: subprocess.Popen[str] | None = None
        self._may_start = True

    def run(self, grammar: str) -> int:
        """Returns the bytes that the compiled grammar keeps. Raises GrammarError."""
        if self._process is None:
            self._start()
        answer = self._ask({"grammar": grammar})
        if answer is None:
            self._end()
            if not self._may_start:
                raise Closed
            raise GrammarError(
                f"grammar: compiling it takes more than {MAX_GRAMMAR_SECONDS:g} s or "
                f"{MAX_GRAMMAR_BYTES >> 20} MB; make it simpler."
            )
        if answer["error"]:
            raise GrammarError(f"grammar: {one_line(answer['error'])}.")
        return int(answer["bytes"])

    def kill(self) -> None:
        """Ends the process, from any thread. No other one starts."""
        self._may_start = False
        if (process := self._process) is not None:
            process.kill()

    def _start(self) -> None:
        if not self._may_start:
            raise Closed
        # -P: keeps the script's folder off sys.path, as its modules share names with others.
        script = Path(__file__).with_name("trial.py")
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # signals of the terminal are for the server only
        )
        if self._ask(self._description) is None:
            self._end()
            raise RuntimeError("the process that tries grammars does not start")

    def _ask(self, question: dict[str, Any]) -> dict[str, Any] | None:
        """Sends a question. None: the process has ended or does not answer."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
            ready, _, _ = select.select([process.stdout], [], [], _PATIENCE)
            line = process.stdout.readline() if ready else ""
        except OSError:
            return None
        return json.loads(line) if line else None

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def _be_nice() -> None:
    """Lowers this thread's priority to the minimum. On Linux priorities are per thread."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
