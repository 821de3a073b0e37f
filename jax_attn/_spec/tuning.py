"""Tuning files: numbers that `python -m jax_attn.tune` measured on one processor.

JAX_ATTN_TUNING names the file. It is read once, when jax_attn is imported. csrc/select uses its
numbers in place of the built-in ones (csrc/select/devices.cc) for specs of that processor.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
import platform
from typing import Any

import jax

from jax_attn import _core, _environment
from jax_attn._spec.formats import DTYPES, FORMATS

FORMAT = 1
_MOST_BYTES = 1 << 20
_KV_FORMATS = ("plain", *FORMATS[1:])  # names in files


@dataclasses.dataclass(frozen=True)
class Device:
    """The processor that was measured.

    arch: 0 for a CPU, else the compute capability, 90 for sm_90.
    name: identifies the processor: vendor, family, model and instruction set of a CPU, or JAX's
        name of a GPU.
    """

    arch: int
    name: str


@dataclasses.dataclass(frozen=True)
class IsaRule:
    """A CPU rule: items with up to `up_to_rows` query rows per KV head use `isa`, others `best`."""

    best: str
    dtype: str
    kv_format: str
    up_to_rows: int
    isa: str


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The tuned numbers of one processor. An empty Tuning keeps all built-in values.

    numbers: kernel and field of csrc/select, such as "hopper.item_cost" -> value.
    measured: times before and after, for readers: rows of
        {"batch", "dtype", "before_us", "after_us"}.
    """

    device: Device
    numbers: dict[str, int] = dataclasses.field(default_factory=dict)
    isas: tuple[IsaRule, ...] = ()
    measured: tuple[dict[str, Any], ...] = ()

    def use(self) -> None:
        """Use these numbers for specs made from now on. Raises ValueError for unknown numbers."""
        _core.set_tuning(
            self.device.arch,
            self.device.name,
            self.numbers,
            [
                (
                    rule.best,
                    DTYPES.index(rule.dtype),
                    _KV_FORMATS.index(rule.kv_format),
                    rule.up_to_rows,
                    rule.isa,
                )
                for rule in self.isas
            ],
        )

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write a file for JAX_ATTN_TUNING."""
        text = json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=2)
        pathlib.Path(path).write_text(text + "\n")


def this_cpu() -> Device:
    """The CPU on which this process runs."""
    facts: dict[str, str] = {}
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        first = cpuinfo.read_text(errors="replace").split("\n\n")[0]
        for line in first.splitlines():
            key, _, value = line.partition(":")
            facts[key.strip()] = value.strip()
    told = [facts[key] for key in ("model name", "vendor_id") if key in facts]
    told += [
        f"{key} {facts[key]}"
        for key in ("cpu family", "model", "CPU implementer", "CPU part")
        if key in facts
    ]
    name = ", ".join(told) or platform.processor() or platform.machine()
    return Device(0, f"{name}, {_core.supported_cpu_isas()[-1]}")


def this_gpu() -> Device:
    """The first GPU of this process."""
    device = jax.local_devices(backend="gpu")[0]
    return Device(int(device.compute_capability.replace(".", "")), device.device_kind)


def read(path: str) -> Tuning:
    """Read a tuning file. Raises ValueError if it is damaged or has another version."""
    try:
        with open(path, "rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ValueError(f"more than {_MOST_BYTES} bytes")
        fields = json.loads(content)
        if fields.pop("format") != FORMAT:
            raise ValueError(f"expected format {FORMAT}")
        tuning = Tuning(
            Device(**fields.pop("device")),
            fields.pop("numbers"),
            tuple(IsaRule(**rule) for rule in fields.pop("isas")),
            tuple(fields.pop("measured")),
        )
        if fields:
            raise ValueError(f"unexpected {sorted(fields)[0]!r}")
        _check(tuning)
    # json and the classes above raise many kinds of exceptions for malformed files.
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"JAX_ATTN_TUNING: expected a file of `python -m jax_attn.tune`, got {path!r}"
            f" ({type(error).__name__}: {error}); tune again, or unset it."
        ) from None
    return tuning


def _check(tuning: Tuning) -> None:
    """Check the types only; csrc/select checks kernels, fields and ranges."""

    def is_int(value: Any) -> bool:
        return type(value) is int and abs(value) < 2**62

    if not is_int(tuning.device.arch) or not isinstance(tuning.device.name, str):
        raise ValueError("expected a device with arch and name")
    for name, value in tuning.numbers.items():
        if not is_int(value):
            raise ValueError(f"{name}: expected an integer, got {value!r:.50}")
    for rule in tuning.isas:
        known = rule.dtype in DTYPES and rule.kv_format in _KV_FORMATS
        if not known or not is_int(rule.up_to_rows) or not 1 <= rule.up_to_rows <= 1024:
            raise ValueError(f"expected an instruction set for items of few rows, got {rule}")
        if not isinstance(rule.best, str) or not isinstance(rule.isa, str):
            raise ValueError(f"expected names of instruction sets, got {rule}")


def _refuse_foreign(tuning: Tuning, device: Device) -> None:
    if tuning.device.name != device.name:
        raise ValueError(
            f"JAX_ATTN_TUNING: {_environment.tuning!r}: expected numbers of {device.name!r}, got"
            f" those of {tuning.device.name!r}; run `python -m jax_attn.tune` on this machine, or"
            " unset it."
        )


@functools.cache
def refuse_foreign_gpu(arch: int) -> None:
    """Raise ValueError if the file was measured on another GPU of this architecture."""
    if _CURRENT is None or _CURRENT.device.arch != arch or jax.default_backend() != "gpu":
        return
    device = this_gpu()
    if device.arch == arch:
        _refuse_foreign(_CURRENT, device)


def _read_current() -> Tuning | None:
    if not _environment.tuning:
        return None
    tuning = read(_environment.tuning)
    if tuning.device.arch == 0:
        _refuse_foreign(tuning, this_cpu())
    try:
        isas = _core.supported_cpu_isas()
        for rule in tuning.isas:
            if rule.isa not in isas or rule.best not in isas:
                raise ValueError(f"isas: expected some of {', '.join(isas)}, got {rule}.")
        tuning.use()
    except ValueError as error:
        raise ValueError(f"JAX_ATTN_TUNING: {_environment.tuning!r}: {error}") from None
    return tuning


_CURRENT = _read_current()
