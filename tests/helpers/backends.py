"""Backends that tests run on: every CPU instruction set of this machine, and its GPU, if any."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import pytest

import jax_attn as ja
from jax_attn import _core


@dataclass(frozen=True)
class Backend:
    platform: str  # "cpu" or "gpu"
    isa: str = ""  # CPU instruction set; "": the best one of the machine

    @property
    def device(self) -> jax.Device:
        return jax.local_devices(backend=self.platform)[0]

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Context in which calls run on this backend."""
        _core.set_cpu_isa(self.isa)
        try:
            with jax.default_device(self.device):
                yield
        finally:
            _core.set_cpu_isa("")

    def spec(self, **fields: Any) -> ja.AttentionSpec:
        """Makes the spec; skips if CUDA has no such kernel by design (see test_bad_input.py)."""
        if self.platform == "cpu":
            return ja.AttentionSpec(**fields, target="cpu")
        try:
            return ja.AttentionSpec(**fields)
        except NotImplementedError as refusal:
            # Only quantized formats skip, and only for an argument that the format excludes. A
            # format that CUDA supports is no reason to skip.
            argument = str(refusal).split(": ")[1]
            if fields.get("kv_dtype") is None or argument not in _BESIDE_CODES:
                raise
            pytest.skip(str(refusal))


_BESIDE_CODES = (
    *("dtype", "head_dim_qk", "head_dim_vo", "page_size", "fresh_kv"),
    "eight_bit_products",  # int8 products are for CPUs only
)
_CUDA = pytest.param(Backend("gpu"), id="cuda", marks=pytest.mark.cuda)

_ISAS = [pytest.param(Backend("cpu", isa), id=isa) for isa in _core.supported_cpu_isas()]

# All kernels. The test's `backend` argument is active when it runs.
on_every_backend = pytest.mark.parametrize("backend", [*_ISAS, _CUDA], indirect=True)
# For CPU-only features.
on_every_isa = pytest.mark.parametrize("backend", _ISAS, indirect=True)
# For results that do not depend on the instruction set.
on_every_platform = pytest.mark.parametrize(
    "backend", [pytest.param(Backend("cpu"), id="cpu"), _CUDA], indirect=True
)
