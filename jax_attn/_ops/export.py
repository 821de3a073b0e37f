"""Support for jax.export: allowed custom calls, serialization of a plan's spec and of Rows."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax.export

from jax_attn import _core
from jax_attn._plan.plan import AttentionPlan
from jax_attn._plan.rows import Rows
from jax_attn._plan.state_plan import StatePlan
from jax_attn._spec.spec import AttentionSpec
from jax_attn._spec.state_spec import LinearAttentionSpec, StateSpec


def export_checks() -> list[jax.export.DisabledSafetyCheck]:
    """The `disabled_checks` of jax.export.export that allow this library's custom calls.

    An exported function holds everything that its kernels are made from. It runs on machines with a
    jax_attn that reads the same plans (see AttentionPlan.load), and with plans of the same spec.
    """
    names = sorted({name for name, _, _ in _core.registrations()})
    return [jax.export.DisabledSafetyCheck.custom_call(name) for name in names]


def _write(static: Any) -> bytes:
    (spec,) = static
    return json.dumps({"plan_version": _core.plan_version, "spec": spec.to_fields()}).encode()


def _read(written: bytes | bytearray) -> Any:
    about = json.loads(bytes(written))
    if about["plan_version"] != _core.plan_version:
        raise ValueError(
            f"AttentionPlan: exported: expected plan_version {_core.plan_version}, got"
            f" {about['plan_version']}: another version of jax_attn wrote it; export again."
        )
    return (AttentionSpec.from_fields(about["spec"]),)


jax.export.register_pytree_node_serialization(
    AttentionPlan,
    serialized_name="jax_attn.AttentionPlan",
    serialize_auxdata=_write,
    deserialize_auxdata=_read,
)
jax.export.register_namedtuple_serialization(Rows, serialized_name="jax_attn.Rows")


def _write_states(auxdata: tuple[StateSpec]) -> bytes:
    (spec,) = auxdata
    about = {"kind": type(spec).__name__, "fields": dataclasses.asdict(spec)}
    return json.dumps(about).encode()


def _read_states(raw: bytes) -> tuple[StateSpec]:
    about = json.loads(raw)
    kinds = {kind.__name__: kind for kind in (StateSpec, LinearAttentionSpec)}
    return (kinds[about["kind"]](**about["fields"]),)


jax.export.register_pytree_node_serialization(
    StatePlan,
    serialized_name="jax_attn.StatePlan",
    serialize_auxdata=_write_states,
    deserialize_auxdata=_read_states,
)
