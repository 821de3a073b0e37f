"""Several processes that are one server: who they are, what process 0 tells the others, their ends.

`jax.distributed` connects them. Records of the steps go through its key-value store, on the host:
a collective on the devices would wait there behind the step before, which steps here do not.
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

# The store has no public name in jax 0.10 to 0.12: jax.distributed itself only begins and ends, and
# multihost_utils speaks by collectives of the devices (docs/notes/devices.md: what either takes).
from jax._src import distributed

log = logging.getLogger("jax_attn.serve")

_BEAT_SECONDS = 1.0
_SILENCE_SECONDS = 10.0  # after which a process is dead
# JAX's own watch would abort without a name.
_JAX_SILENCE_SECONDS = 1000
_COMPILE_SECONDS = 24 * 3600  # the others beat while one compiles
_RECORDS_OF_FOLDER = 64  # which are deleted at once
_TO_COMPRESS = 4096  # bytes
_ROOT = "jax_attn_serve"


class ProcessesError(RuntimeError):
    """Processes that cannot be one server, in one sentence."""


class Record(NamedTuple):
    """A call of Device: its name, plain arguments, and arrays."""

    call: str
    plain: tuple[Any, ...]
    arrays: tuple[np.ndarray, ...]


class Processes:
    """All of `jax.distributed`, seen from one of them.

    start_seconds: how long they wait for each other. coordinator, count and index as
      `jax.distributed.initialize` takes them; None: the variables of a launcher say so.

    Raises ProcessesError where no launcher has set anything. A process that comes too late, or a
    runtime that JAX ends, ends this process with exit status 1 and a sentence.
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
        self._start_seconds = start_seconds
        self._last_words = "JAX's runtime has failed, or process 0 is gone."
        self._num_read = 0
        self.is_leaving = False  # it was told to end, and process 0 is to decide
        self.on_leave: Callable[[], None] = lambda: None
        self._ending = threading.RLock()  # of the first thread that ends this process
        self._outgoing: queue.SimpleQueue[Record] = queue.SimpleQueue()
        self._beat()  # first: whoever knows a process's name counts on its beats
        self._set(f"name/{self.index}", f"{socket.gethostname()}, pid {os.getpid()}")
        names = (self._get(f"name/{i}", start_seconds) for i in range(self.count))
        self.names = [f"process {i} ({name})" for i, name in enumerate(names)]
        self._start(self._watch, "jax_attn watch")
        if self.leads:
            self._start(self._send_all, "jax_attn send")

    def _start(self, work: Callable[[], None], name: str) -> None:
        """A thread without which the processes would wait for each other for ever."""

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
        """What process 0 chooses of everybody's wishes, once all are alike in `own`.

        own, wish: of JSON. Raises ProcessesError, in all, for the first that differs.
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
        """Everybody's value, of JSON."""
        self._set(f"{name}/{self.index}", json.dumps(value))
        return [json.loads(self._get(f"{name}/{i}")) for i in range(self.count)]

    def meet(self, name: str) -> None:
        """Returns once all have come here."""
        self._store.wait_at_barrier(f"{_ROOT}/{name}", 1000 * _COMPILE_SECONDS)

    # ---- steps ---------------------------------------------------------------------------------

    def send(self, call: str, *plain: Any, arrays: Sequence[np.ndarray] = ()) -> None:
        """Of process 0, to all others, in order. The arrays are not to change any more."""
        self._outgoing.put(Record(call, plain, tuple(arrays)))

    def records(self) -> Iterator[Record]:
        """What process 0 sends, for ever."""
        while True:
            packed = self._store.blocking_key_value_get_bytes(
                self._record_key(self._num_read), 1000 * _COMPILE_SECONDS
            )
            self._num_read += 1
            yield from unpack(packed)

    def _send_all(self) -> None:
        """Several at once where they come faster than the store takes them."""
        for number in range(sys.maxsize):
            records = [self._outgoing.get()]
            while not self._outgoing.empty():
                records.append(self._outgoing.get())
            self._store.key_value_set_bytes(self._record_key(number), pack(records))

    def _record_key(self, number: int) -> str:
        return f"{_ROOT}/records/{number // _RECORDS_OF_FOLDER}/{number}"

    # ---- the end -------------------------------------------------------------------------------

    def end(self, status: int, sentence: str = "") -> NoReturn:
        """Ends this process, and with process 0 all others. Not by way of JAX, which would wait
        for those that are dead. The first call counts: once process 0 says that all is well, the
        others go, and its watch is not to take that for a failure."""
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
        """Ends all after an exception. Where a collective failed as another process died, the
        watch is given the time to find out which."""
        time.sleep(_SILENCE_SECONDS + 3 * _BEAT_SECONDS)
        self.end(1, f"{self.names[self.index]}: {type(error).__name__}: {error}".splitlines()[0])

    def _await_others(self) -> None:
        """They end at once, but an abort if the store goes first."""
        deadline = time.monotonic() + 3 * _BEAT_SECONDS
        while time.monotonic() < deadline and len(self._all("gone")) < self.count - 1:
            time.sleep(0.05)

    def _catch_aborts(self) -> None:
        """JAX ends a process whose runtime fails by abort(), from any thread: here status 1."""

        def on_abort(_: int) -> None:
            _exit(1, self._last_words)

        self._on_abort = ctypes.CFUNCTYPE(None, ctypes.c_int)(on_abort)  # is to live on
        ctypes.CDLL(None).signal(6, self._on_abort)  # signal.signal runs in the main thread alone

    def _beat(self) -> None:
        text = json.dumps([time.time_ns(), self._num_read, self.is_leaving])
        self._set(f"beat/{self.index}", text)

    def _watch(self) -> None:
        """Beats, and ends this process when another one is dead, or process 0 says so."""
        seen: dict[int, tuple[int, float]] = {}  # of each process its beat, and when it was new
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
        """What processes have put there, by their numbers."""
        found = self._store.key_value_dir_get(f"{_ROOT}/{folder}/")
        return {int(key.rpartition("/")[2]): text for key, text in found}


def _exit(status: int, sentence: str) -> NoReturn:
    if sentence:
        print(f"jax_attn.serve: {sentence}", file=sys.stderr, flush=True)
    os._exit(status)


def _difference(everybody: list[Mapping[str, Any]]) -> str | None:
    """The first of the names in which a process differs from process 0."""
    first = everybody[0]
    for i, own in enumerate(everybody):
        for name, value in own.items():
            if value != first[name]:
                return f"process {i}: {name}: expected {first[name]}, as process 0 has, got {value}"
    return None


def pack(records: Sequence[Record]) -> bytes:
    """Whether it is compressed, a line of JSON, and then the arrays."""
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
