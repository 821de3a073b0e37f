"""Plans in files: the spec, what the kernel was configured to, and the words of the buffer."""

from __future__ import annotations

import dataclasses
import json
import os
import zipfile
import zlib
from typing import Any

import numpy as np

from jax_attn import _core
from jax_attn.spec import AttentionSpec

_FORMAT = 1  # of the file; the buffer has a version of its own
_OP = "AttentionPlan.load"


def write(path: str | os.PathLike[str], buffer: np.ndarray, spec: AttentionSpec) -> None:
    about = {
        "format": _FORMAT,
        "plan_version": _core.plan_version,
        "spec": dataclasses.asdict(spec),
        "kernel_config": spec.kernel_config,
    }
    with open(path, "wb") as file:  # given a name, savez would append .npz to it
        np.savez_compressed(file, about=np.array(json.dumps(about)), buffer=buffer)


def read(path: str | os.PathLike[str]) -> tuple[np.ndarray, AttentionSpec]:
    """The buffer and its spec. Raises ValueError for what this library would not run as planned."""
    name = os.fspath(path)
    try:
        if not zipfile.is_zipfile(path) and os.path.exists(path):
            raise zipfile.BadZipFile("not a zip file")
        with np.load(path, allow_pickle=False) as arrays:
            about, buffer = json.loads(str(arrays["about"])), arrays["buffer"]
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(
            f"{_OP}: path: expected a file of AttentionPlan.save, got {name!r} ({error})."
        ) from None
    for word, expected in (("format", _FORMAT), ("plan_version", _core.plan_version)):
        if about.get(word) != expected:
            raise ValueError(
                f"{_OP}: {name!r}: expected {word} {expected}, got {about.get(word)}: another"
                " version of jax_attn wrote it; plan the batch again."
            )
    spec = _spec(name, about["spec"], about["kernel_config"])
    _check_buffer(name, buffer, spec)
    return buffer, spec


def _spec(name: str, fields: dict[str, Any], config: dict[str, int]) -> AttentionSpec:
    """The saved spec. Where the number of queues came from a device, it may have to be said."""
    known = {field.name for field in dataclasses.fields(AttentionSpec)}
    if set(fields) != known:
        different = ", ".join(sorted(set(fields) ^ known))
        raise ValueError(
            f"{_OP}: {name!r}: expected the fields of this version's AttentionSpec, got a"
            f" difference in {different}; plan the batch again."
        )
    spec = AttentionSpec(**fields)
    if spec.kernel_config != config:
        spec = dataclasses.replace(spec, num_ctas=config["num_ctas"])
    chosen = spec.kernel_config
    different = ", ".join(
        f"{word} {chosen.get(word)}, got {config.get(word)}"
        for word in sorted(set(chosen) | set(config))
        if chosen.get(word) != config.get(word)
    )
    if different:
        raise ValueError(
            f"{_OP}: {name!r}: expected the kernel configuration that this version chooses for its"
            f" spec, {different}; plan the batch again."
        )
    return spec


def _check_buffer(name: str, buffer: np.ndarray, spec: AttentionSpec) -> None:
    if buffer.dtype != np.int32 or buffer.shape != (spec.plan_words,):
        raise ValueError(
            f"{_OP}: {name!r}: expected a buffer of int32[{spec.plan_words}], got"
            f" {buffer.dtype}{list(buffer.shape)}."
        )
    version = tuple(buffer[spec.layout["header"] :][:2].tolist())
    if version != (_core.plan_magic, _core.plan_version):
        raise ValueError(
            f"{_OP}: {name!r}: expected a buffer that begins with"
            f" {(_core.plan_magic, _core.plan_version)}, got {version}."
        )
