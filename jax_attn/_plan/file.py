"""Plan files: the spec, the kernel configuration, and the words of the buffer."""

from __future__ import annotations

import dataclasses
import json
import os
import zipfile
from typing import IO, Any

import numpy as np

from jax_attn import _core
from jax_attn._spec.spec import AttentionSpec

_FORMAT = 1  # version of the file; the buffer has a separate version
_OP = "AttentionPlan.load"
_MOST_ABOUT = 1 << 18  # most bytes of the `about` text: about 2,000 characters of 4 bytes
_CHUNK = 1 << 20  # bytes decompressed at once


def write(path: str | os.PathLike[str], buffer: np.ndarray, spec: AttentionSpec) -> None:
    about = {
        "format": _FORMAT,
        "plan_version": _core.plan_version,
        "spec": spec.to_fields(),
        "kernel_config": spec.kernel_config,
    }
    with open(path, "wb") as file:  # savez would append .npz to a name
        np.savez_compressed(file, about=np.array(json.dumps(about)), buffer=buffer)


def read(path: str | os.PathLike[str]) -> tuple[np.ndarray, AttentionSpec]:
    """The buffer and spec of a plan file.

    Files are untrusted. Nothing is unpickled, at most the spec's number of words is decompressed,
    and every word that a kernel relies on is checked.

    Raises ValueError for a file that this library cannot run as planned.
    """
    name = os.fspath(path)
    with open(path, "rb") as file:
        try:
            with zipfile.ZipFile(file) as archive:
                about = json.loads(_read_text(archive, "about.npy"))
                spec = _spec(name, about)
                buffer = _read_words(archive, name, spec.plan_words)
        except _Refusal as refusal:
            raise ValueError(str(refusal)) from None
        # zipfile, numpy and json raise many kinds of exceptions for malformed files.
        except Exception as error:
            raise ValueError(
                f"{_OP}: path: expected a file of AttentionPlan.save, got {name!r}"
                f" ({type(error).__name__}: {error})."
            ) from None
    try:
        spec.problem.check_plan(buffer, -1)
    except ValueError as error:
        raise ValueError(f"{_OP}: {name!r}: {error}") from None
    return buffer, spec


class _Refusal(Exception):
    """A reason to refuse the file, as a whole sentence."""


def _open_array(
    archive: zipfile.ZipFile, member: str
) -> tuple[IO[bytes], np.dtype[Any], tuple[int, ...], int]:
    """Dtype, shape and unread byte stream of an array in the file."""
    info = archive.getinfo(member)
    stream = archive.open(info)
    if np.lib.format.read_magic(stream) != (1, 0):
        raise ValueError(f"{member}: expected an npy header of version 1.0")
    shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
    return stream, dtype, shape, info.file_size - stream.tell()


def _read_text(archive: zipfile.ZipFile, member: str) -> str:
    stream, dtype, shape, num_bytes = _open_array(archive, member)
    if dtype.kind != "U" or shape != () or num_bytes != dtype.itemsize or num_bytes > _MOST_ABOUT:
        raise ValueError(
            f"{member}: expected a string of at most {_MOST_ABOUT} bytes, got {dtype}{list(shape)}"
            f" in {num_bytes}"
        )
    return str(np.frombuffer(stream.read(), dtype)[0])


def _read_words(archive: zipfile.ZipFile, name: str, num_words: int) -> np.ndarray:
    stream, dtype, shape, num_bytes = _open_array(archive, "buffer.npy")
    if dtype != np.int32 or shape != (num_words,) or num_bytes != 4 * num_words:
        raise _Refusal(
            f"{_OP}: {name!r}: expected a buffer of int32[{num_words}], got"
            f" {dtype}{list(shape)} in {num_bytes} bytes."
        )
    buffer = np.empty(num_words, dtype)
    view = memoryview(buffer).cast("B")
    for begin in range(0, num_bytes, _CHUNK):
        part = view[begin : begin + _CHUNK]
        part[:] = stream.read(len(part))
    if stream.read(1):  # zipfile checks the checksum at the end
        raise ValueError(f"buffer.npy: expected {num_bytes} bytes, got more")
    return buffer


def _spec(name: str, about: Any) -> AttentionSpec:
    """The saved spec. num_ctas is set if this device would choose another number of queues."""
    for word, expected in (("format", _FORMAT), ("plan_version", _core.plan_version)):
        if about.get(word) != expected:
            raise _Refusal(
                f"{_OP}: {name!r}: expected {word} {expected}, got {about.get(word)!r:.50}: another"
                " version of jax_attn wrote it; plan the batch again."
            )
    fields, config = dict(about["spec"]), dict(about["kernel_config"])
    known = {field.name for field in dataclasses.fields(AttentionSpec)}
    if different := sorted(set(fields) ^ known):
        raise _Refusal(
            f"{_OP}: {name!r}: expected the fields of this version's AttentionSpec, got a"
            f" difference in {', '.join(different[:5])!s:.200}; plan the batch again."
        )
    try:
        spec = AttentionSpec.from_fields(fields)
        if spec.kernel_config != config:
            spec = dataclasses.replace(spec, num_ctas=config["num_ctas"])
        chosen = spec.kernel_config
    except (ValueError, NotImplementedError) as error:
        raise _Refusal(f"{_OP}: {name!r}: {error}") from None
    different = [
        f"{word} {chosen.get(word)}, got {config.get(word)!r:.50}"
        for word in sorted(set(chosen) | set(config))
        if chosen.get(word) != config.get(word)
    ]
    if different:
        raise _Refusal(
            f"{_OP}: {name!r}: expected the kernel configuration that this version and"
            f" JAX_ATTN_TUNING choose for its spec, {', '.join(different[:5])}; plan the batch"
            " again."
        )
    return spec
