"""Entries of the prefix cache in files: one file for a page, or for a slot of states.

    8 bytes   MAGIC
    4 bytes   length of the header, little endian
    header    JSON: "model" and "name" of the entry, "arrays": [dtype, shape] of each, "checksum"
    the rest  the bytes of the arrays, one after the other; "checksum" is their CRC-32

A file is written under a temporary name and renamed when it is whole, so a process that is killed
leaves no half of an entry. It is not flushed to the disk: after a loss of power a file may be cut
or empty, and the checksum finds that. A cache loses nothing by it but the entry.

Nothing that is read is trusted: a file of another model, or one that is damaged, is removed. Files
with names of another form are never touched.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import math
import os
import re
import struct
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes  # noqa: F401  names of dtypes such as bfloat16
import numpy as np

import jax_attn as ja

log = logging.getLogger("jax_attn.serve")

MAGIC = b"jaxattn\x01"  # the last byte is the version of the format
_LENGTH = struct.Struct("<I")
_MOST_HEADER = 1 << 16
_NAME = re.compile(r"[0-9a-f]{64}\.(page|state)")
_PART = re.compile(r"\.[0-9]+\.part$")  # behind a name that a thread is writing


class Damaged(Exception):
    """What is wrong with a file."""


class _Layout(NamedTuple):
    """What a file holds: dtypes and shapes of its arrays, and the checksum of their bytes."""

    arrays: list[tuple[np.dtype[Any], tuple[int, ...]]]
    checksum: int


class FileStore:
    """Entries by name, within a number of bytes; the least recently used go first. For any thread.

    The times of last use are the files' own, so they outlive the process. The directory is locked
    until the last user has left; a thread that still reads or writes then changes no entry.
    """

    def __init__(
        self, directory: Path, most_bytes: int, model: str, owners: Mapping[str, str] | None = None
    ):
        """model: what all entries depend on: a file that says another is foreign.
        owners: see FileTier.

        Raises ValueError: the directory cannot be used, or another server does.
        """
        self.directory, self.most_bytes = directory, most_bytes
        self._model = f"{model} of jax_attn {ja.__version__}"  # which may lay pages out otherwise
        self.owners = owners or {}
        self._num_users = 0
        self._lock, self._measuring = threading.Lock(), threading.Lock()
        self._sizes: OrderedDict[str, int] = OrderedDict()  # by name, the least recently used first
        self._num_bytes = 0
        self._num_evicted = self._num_damaged = 0
        try:
            self._open()
        except BlockingIOError:
            raise ValueError(
                f"--file-cache: expected a directory that no other server uses, got {directory}"
            ) from None
        except OSError as error:
            raise ValueError(
                f"--file-cache: expected a directory to read and write, got {directory}:"
                f" {error.strerror}"
            ) from None

    def _open(self) -> None:
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.directory.stat().st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "it is another user's")
        self.directory.chmod(0o700)
        self._held: BinaryIO = (self.directory / "lock").open("ab")
        fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found, removed = [], 0
        for entry in os.scandir(self.directory):
            name = _PART.sub("", entry.name)
            if not (_NAME.fullmatch(name) and entry.is_file(follow_symlinks=False)):
                continue
            status = entry.stat(follow_symlinks=False)
            try:
                if name != entry.name:
                    raise Damaged("a kill has cut it")
                with open(entry.path, "rb", opener=_no_link) as file:
                    self._layout(entry.name, file)
            except Damaged:
                Path(entry.path).unlink()
                removed += 1
            else:
                found.append((status.st_mtime_ns, entry.name, status.st_size))
        for _, name, size in sorted(found):
            self._sizes[name] = size
            self._num_bytes += size
        with self._lock:
            self._make_room(0)
        if removed:
            log.warning(
                "removed %d files of %s that are damaged, or of another model",
                removed,
                self.directory,
            )

    def join(self) -> bool:
        """Notes a user. Returns whether it is the first, which reports the numbers of all."""
        with self._lock:
            self._num_users += 1
            return self._num_users == 1

    def leave(self) -> None:
        """Undoes `join`; after the last user another process may have the directory."""
        with self._lock:
            self._num_users -= 1
            if not self._num_users:
                self._held.close()

    def counts(self) -> dict[str, int]:
        """Entries and their bytes, and totals of those evicted and found damaged."""
        now = {"cached": len(self._sizes), "bytes": self._num_bytes}  # without waiting for a disk
        return now | {"evicted": self._num_evicted, "damaged": self._num_damaged}

    def __contains__(self, name: str) -> bool:
        return name in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def touch(self, names: Iterable[str]) -> None:
        """Notes a use of entries, the first of them as the last."""
        for name in reversed([*names]):
            with self._lock:
                if name not in self._sizes:
                    continue
                self._sizes.move_to_end(name)
            with contextlib.suppress(OSError):
                os.utime(self.directory / name)

    def write(self, name: str, arrays: Sequence[np.ndarray]) -> None:
        """Writes an entry, in place of those that were not used for longest. One that is larger
        than all room is left out.

        Raises OSError.
        """
        raw = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays]
        checksum = 0
        for each in raw:
            checksum = zlib.crc32(each, checksum)
        header = json.dumps(
            {
                "model": self._model,
                "name": name,
                "arrays": [[array.dtype.name, array.shape] for array in arrays],
                "checksum": checksum,
            }
        ).encode()
        head = MAGIC + _LENGTH.pack(len(header)) + header
        size = len(head) + sum(each.nbytes for each in raw)
        if size > self.most_bytes:
            return
        with self._lock:
            if self._held.closed:
                return
            self._make_room(size)
        part = self.directory / f"{name}.{os.getpid()}{threading.get_ident()}.part"
        try:
            with open(part, "wb", opener=_private) as file:
                file.write(head)
                for each in raw:
                    file.write(each)
            with self._lock:
                if self._held.closed:
                    return part.unlink(missing_ok=True)
                part.rename(self.directory / name)
                self._num_bytes += size - self._sizes.pop(name, 0)
                self._sizes[name] = size
        except OSError:
            part.unlink(missing_ok=True)
            raise

    def read(self, name: str) -> list[np.ndarray] | None:
        """The arrays of an entry; None: there is none, or it was damaged and is removed now."""
        try:
            with open(self.directory / name, "rb", opener=_no_link) as file:
                arrays = _arrays(self._layout(name, file), file)
        except FileNotFoundError:
            self._forget(name)
            return None
        except OSError as error:
            self._forget(name)
            log.warning("cannot read %s of the file cache: %s", name, error)
            return None
        except Damaged as error:
            self._remove_damaged(name, error)
            return None
        self.touch([name])
        return arrays

    def read_seconds(
        self, arrays: Sequence[np.ndarray], num: int, read: Callable[[list[str]], object]
    ) -> float:
        """Measures the time in which `read` reads an entry of these arrays, of num by their names.
        They come from the disk, not from the system's cache."""
        names = [f"{i:064x}.page" for i in range(num)]
        with self._measuring:
            return self._measure(names, arrays, read)

    def _measure(
        self,
        names: list[str],
        arrays: Sequence[np.ndarray],
        read: Callable[[list[str]], object],
    ) -> float:
        try:
            for name in names:
                self.write(name, arrays)
                with (self.directory / name).open("rb") as file:
                    os.fsync(file)
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            begin = time.perf_counter()
            read(names)
            return (time.perf_counter() - begin) / len(names)
        finally:
            for name in names:
                self._forget(name)
                with contextlib.suppress(OSError):
                    (self.directory / name).unlink()

    def _make_room(self, num_bytes: int) -> None:
        """Removes entries until there is room for so many bytes, with the lock held."""
        while self._sizes and self._num_bytes + num_bytes > self.most_bytes:
            name, size = self._sizes.popitem(last=False)
            self._num_bytes -= size
            self._num_evicted += 1
            with contextlib.suppress(OSError):
                (self.directory / name).unlink()

    def _forget(self, name: str) -> None:
        with self._lock:
            self._num_bytes -= self._sizes.pop(name, 0)

    def _remove_damaged(self, name: str, error: Damaged) -> None:
        with self._lock:
            if self._held.closed:
                return
            self._num_bytes -= self._sizes.pop(name, 0)
            self._num_damaged += 1
            (self.directory / name).unlink(missing_ok=True)
        log.warning("removed %s of the file cache: %s", name, error)

    def _layout(self, name: str, file: BinaryIO) -> _Layout:
        """Reads and checks all before the arrays, and the length. Raises Damaged."""
        magic, length = file.read(len(MAGIC)), file.read(_LENGTH.size)
        if magic != MAGIC or len(length) < _LENGTH.size:
            raise Damaged("expected a file of this format")
        (num_bytes,) = _LENGTH.unpack(length)
        if num_bytes > _MOST_HEADER:
            raise Damaged(f"expected a header of at most {_MOST_HEADER} bytes, got {num_bytes}")
        try:
            header = json.loads(file.read(num_bytes))
            model, own_name, checksum = (header[key] for key in ("model", "name", "checksum"))
            layout = _Layout([_array(*each) for each in header["arrays"]], int(checksum))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise Damaged("expected a header that can be read") from None
        if model != self._model or own_name != name:
            raise Damaged(f"expected an entry of model {self._model}, got {model} {own_name}")
        expected = file.tell() + sum(dtype.itemsize * math.prod(x) for dtype, x in layout.arrays)
        if (size := os.fstat(file.fileno()).st_size) != expected:
            raise Damaged(f"expected {expected} bytes, got {size}")
        return layout


def _array(name: str, shape: list[int]) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Raises TypeError, ValueError."""
    dtype = np.dtype(name)
    if dtype.hasobject or not all(isinstance(x, int) and x >= 0 for x in shape):
        raise ValueError
    return dtype, tuple(shape)


def _arrays(layout: _Layout, file: BinaryIO) -> list[np.ndarray]:
    arrays, checksum = [], 0
    for dtype, shape in layout.arrays:
        raw = np.empty(dtype.itemsize * math.prod(shape), np.uint8)
        if file.readinto(raw) != len(raw):  # type: ignore[attr-defined]
            raise Damaged("expected more bytes")
        checksum = zlib.crc32(raw, checksum)
        arrays.append(raw.view(dtype).reshape(shape))
    if checksum != layout.checksum:
        raise Damaged("its bytes are not those that were written")
    return arrays


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
