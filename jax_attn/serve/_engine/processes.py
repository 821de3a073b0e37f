"""Several processes that form one server: their start, the messages of process 0, and their end.

`jax.distributed` connects them. Records of steps go through its key-value store, on the host. A
collective on the devices would wait there for the step before; steps here do not wait.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import queue
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np

# The store has no public name in jax 0.10 to 0.12: jax.distributed only starts and stops it, and
# multihost_utils uses collectives of the devices (docs/notes/devices.md has the times of both).
from jax._src import distributed

log = logging.getLogger("jax_attn.serve")

_BEAT_SECONDS = 1.0
_SILENCE_SECONDS = 10.0  # after which a process counts as dead
# JAX's own watch would abort without naming the process.
_JAX_SILENCE_SECONDS = 1000
_COMPILE_SECONDS = 24 * 3600  # the other threads send heartbeats during compilation
_RECORDS_OF_FOLDER = 64  # they are deleted together
_TO_COMPRESS = 4096  # bytes; longer messages are compressed
_ROOT = "jax_attn_serve"


class ProcessesError(RuntimeError):
    """The processes cannot form one server. The message is one sentence."""


class Record(NamedTuple):
    """A call of Device: its name, plain arguments, and arrays."""

    call: str
    plain: tuple[Any, ...]
    arrays: tuple[np.ndarray, ...]


class Processes:
    """All processes of `jax.distributed`, seen from one of them.

    start_seconds: how long they wait for each other. coordinator, count and index: as for
    `jax.distributed.initialize`; None: a launcher's environment variables give them.

    Raises ProcessesError if no launcher has set anything. A process that comes too late, or whose
    runtime JAX ends, exits with status 1 and a sentence.
    """

    def __init__(
        self, coordinator: str | None, count: int | None, index: int | None, start_seconds: int
    ):
        self._last_words = (
            f"the processes did not find each other within {start_seconds} seconds; start one for"
            " each --process-id from 0 to --num-processes - 1, with the same --coordinator."
        )
        self._catch_aborts()
        try:
            jax.distributed.initialize(
                coordinator,
                count,
                index,
                initialization_timeout=start_seconds,
                heartbeat_timeout_seconds=_JAX_SILENCE_SECONDS,
            )
        except (ValueError, RuntimeError) as error:
            raise ProcessesError(f"--distributed: {error}") from None
        self.index, self.count = jax.process_index(), jax.process_count()
        self._store: Any = distributed.global_state.client
        self._last_words = "JAX's runtime has failed, or process 0 is gone."
        self._num_read = 0
        self.is_leaving = False  # it was told to end; process 0 decides when
        self.on_leave: Callable[[], None] = lambda: None
        self._ending = threading.RLock()  # held by the first thread that ends this process
        self._outgoing: queue.SimpleQueue[Record] = queue.SimpleQueue()
        self._beat()  # first: a process that knows this one expects its heartbeats
        self._set(f"name/{self.index}", f"{socket.gethostname()}, pid {os.getpid()}")
        names = (self._get(f"name/{i}", start_seconds) for i in range(self.count))
        self.names = [f"process {i} ({name})" for i, name in enumerate(names)]
        self._start(self._watch, "jax_attn watch")
        if self.leads:
            self._start(self._send_all, "jax_attn send")

    def _start(self, work: Callable[[], None], name: str) -> None:
        """Starts a thread. If it fails, all processes end; else they would wait for ever."""

        def run() -> None:
            try:
                work()
            except Exception as error:
                log.exception("%s", name)
                self.end(1, f"{self.names[self.index]}: {name}: {error}".splitlines()[0])

        threading.Thread(target=run, name=name, daemon=True).start()

    @property
    def leads(self) -> bool:
        return self.index == 0

    # ---- the beginning -------------------------------------------------------------------------

    def agree(self, own: Mapping[str, Any], choose: Callable[[list[Any]], Any], wish: Any) -> Any:
        """Returns process 0's choice from all wishes, after checking that `own` is equal in all.

        own, wish: JSON values. Raises ProcessesError in all processes for the first difference.
        """
        self._set(f"own/{self.index}", json.dumps([own, wish]))
        if self.leads:
            everybody = [json.loads(self._get(f"own/{i}")) for i in range(self.count)]
            sentence = _difference([own for own, _ in everybody])
            chosen = None if sentence else choose([wish for _, wish in everybody])
            self._set("agreed", json.dumps([sentence, chosen]))
        sentence, chosen = json.loads(self._get("agreed"))
        if sentence is not None:
            raise ProcessesError(sentence)
        return chosen

    def gather(self, name: str, value: Any) -> list[Any]:
        """Returns the values of all processes, by index. value: JSON."""
        self._set(f"{name}/{self.index}", json.dumps(value))
        return [json.loads(self._get(f"{name}/{i}")) for i in range(self.count)]

    def meet(self, name: str) -> None:
        """Returns once all processes have called it."""
        self._store.wait_at_barrier(f"{_ROOT}/{name}", 1000 * _COMPILE_SECONDS)

    # ---- steps ---------------------------------------------------------------------------------

    def send(self, call: str, *plain: Any, arrays: Sequence[np.ndarray] = ()) -> None:
        """Sends a call from process 0 to all others, in order. The arrays must not change later."""
        self._outgoing.put(Record(call, plain, tuple(arrays)))

    def records(self) -> Iterator[Record]:
        """The calls that process 0 sends. Never ends."""
        while True:
            packed = self._store.blocking_key_value_get_bytes(
                self._record_key(self._num_read), 1000 * _COMPILE_SECONDS
            )
            self._num_read += 1
            yield from unpack(packed)

    def _send_all(self) -> None:
        """Sends queued records, several at once if they come faster than the store takes them."""
        for number in range(sys.maxsize):
            records = [self._outgoing.get()]
            while not self._outgoing.empty():
                records.append(self._outgoing.get())
            self._store.key_value_set_bytes(self._record_key(number), pack(records))

    def _record_key(self, number: int) -> str:
        return f"{_ROOT}/records/{number // _RECORDS_OF_FOLDER}/{number}"

    # ---- the end -------------------------------------------------------------------------------

    def end(self, status: int, sentence: str = "") -> NoReturn:
        """Ends this process, and from process 0 all others.

        Bypasses JAX's shutdown, which would wait for dead processes. Only the first call counts:
        once process 0 reports a normal end, the others exit, and its watch must not take that for a
        failure.
        """
        self._ending.acquire()
        try:
            if self.leads:
                self._set("end/0", json.dumps([status, sentence]))
                self._await_others()
            else:
                self._set(f"gone/{self.index}", json.dumps([status, sentence]))
        finally:  # the store may be gone
            _exit(status, sentence)

    def fail(self, error: BaseException) -> NoReturn:
        """Ends all processes after an exception.

        If a collective failed because another process died, gives the watch time to find out which.
        """
        time.sleep(_SILENCE_SECONDS + 3 * _BEAT_SECONDS)
        self.end(1, f"{self.names[self.index]}: {type(error).__name__}: {error}".splitlines()[0])

    def _await_others(self) -> None:
        """Waits for the others: they would abort if the store went first."""
        deadline = time.monotonic() + 3 * _BEAT_SECONDS
        while time.monotonic() < deadline and len(self._all("gone")) < self.count - 1:
            time.sleep(0.05)

    def _catch_aborts(self) -> None:
        """Handles abort(), by which JAX ends a process whose runtime fails: exit with status 1."""

        def on_abort(_: int) -> None:
            _exit(1, self._last_words)

        self._on_abort = ctypes.CFUNCTYPE(None, ctypes.c_int)(on_abort)  # must stay alive
        # Handlers of signal.signal run in the main thread only.
        ctypes.CDLL(None).signal(6, self._on_abort)

    def _beat(self) -> None:
        text = json.dumps([time.time_ns(), self._num_read, self.is_leaving])
        self._set(f"beat/{self.index}", text)

    def _watch(self) -> None:
        """Sends heartbeats. Ends this process if another one is dead, or if process 0 says so."""
        seen: dict[int, tuple[int, float]] = {}  # process -> its heartbeat, and when it changed
        num_deleted = 0
        while True:
            self._beat()
            now = time.monotonic()
            beats = {i: json.loads(text) for i, text in self._all("beat").items()}
            for i, (beat, _, _) in beats.items():
                if seen.get(i, (None,))[0] != beat:
                    seen[i] = beat, now
            silent = [i for i, (_, when) in seen.items() if now - when > _SILENCE_SECONDS]
            if self.leads:
                for i, text in self._all("gone").items():
                    status, sentence = json.loads(text)
                    self.end(status or 1, sentence or f"{self.names[i]} has ended.")
                for i in silent:
                    self.end(1, f"{self.names[i]} is dead: silent for {_SILENCE_SECONDS:g} s.")
                if any(is_leaving for _, _, is_leaving in beats.values()):
                    self.on_leave()
                num_read = min(beats[i][1] for i in beats if i) // _RECORDS_OF_FOLDER
                for folder in range(num_deleted, num_read):
                    self._store.key_value_delete(f"{_ROOT}/records/{folder}/")
                num_deleted = num_read
            elif end := self._all("end"):
                self.end(*json.loads(end[0]))
            elif 0 in silent:
                self.end(1, f"{self.names[0]} is dead: silent for {_SILENCE_SECONDS:g} s.")
            time.sleep(_BEAT_SECONDS)

    # ---- the store -----------------------------------------------------------------------------

    def _set(self, key: str, text: str) -> None:
        self._store.key_value_set(f"{_ROOT}/{key}", text, allow_overwrite=True)

    def _get(self, key: str, seconds: float = _COMPILE_SECONDS) -> str:
        return str(self._store.blocking_key_value_get(f"{_ROOT}/{key}", int(1000 * seconds)))

    def _all(self, folder: str) -> dict[int, str]:
        """The values that processes have stored in `folder`, by process index."""
        found = self._store.key_value_dir_get(f"{_ROOT}/{folder}/")
        return {int(key.rpartition("/")[2]): text for key, text in found}


def _exit(status: int, sentence: str) -> NoReturn:
    if sentence:
        print(f"jax_attn.serve: {sentence}", file=sys.stderr, flush=True)
    os._exit(status)


def _difference(everybody: list[Mapping[str, Any]]) -> str | None:
    """The first name whose value in some process differs from that in process 0."""
    first = everybody[0]
    for i, own in enumerate(everybody):
        for name, value in own.items():
            if value != first[name]:
                return f"process {i}: {name}: expected {first[name]}, as process 0 has, got {value}"
    return None


def pack(records: Sequence[Record]) -> bytes:
    """A byte that says whether the rest is compressed, a line of JSON, then the arrays."""
    heads = [[r.call, r.plain, [[a.dtype.str, a.shape] for a in r.arrays]] for r in records]
    arrays = [np.ascontiguousarray(a).tobytes() for r in records for a in r.arrays]
    packed = b"\n".join([json.dumps(heads).encode(), b"".join(arrays)])
    return b"z" + zlib.compress(packed, 1) if len(packed) > _TO_COMPRESS else b"p" + packed


def unpack(packed: bytes) -> list[Record]:
    """The records of `pack`."""
    packed = zlib.decompress(packed[1:]) if packed[:1] == b"z" else packed[1:]
    head, _, body = packed.partition(b"\n")
    records, begin = [], 0
    for call, plain, kinds in json.loads(head):
        arrays = []
        for dtype, shape in kinds:
            end = begin + np.dtype(dtype).itemsize * int(np.prod(shape))
            arrays.append(np.frombuffer(body[begin:end], dtype).reshape(shape))
            begin = end
        records.append(Record(call, tuple(plain), tuple(arrays)))
    return records
