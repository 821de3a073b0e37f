"""The transforms of a variant that run outside the kernels, in jnp.

XLA fuses those of q and o with what makes q and reads o. Those of ragged k and v run once a row
here; in a kernel they would run once for each query tile.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jax_attn._ops import plan_jnp
from jax_attn._spec.spec import AttentionSpec
from jax_attn._xla.attention_operands import AttentionOperands


def transform_operands(
    operands: AttentionOperands[jax.Array], spec: AttentionSpec
) -> AttentionOperands[jax.Array]:
    """The operands of the call with spec.kernel_spec."""
    assert spec.variant is not None and operands.plan_buffer is not None
    changed: dict[str, Any] = {}
    for name in ("q", "k", "v"):
        transform = spec.variant.transforms.get(name)
        if transform is None or (name != "q" and spec.is_paged):
            continue
        facts, live = _facts_of_rows(name, operands.plan_buffer, spec)
        x = getattr(operands, name)
        changed[name] = plan_jnp.transform_rows(
            transform, x, spec, facts, live, 1, operands.variant
        )
    if spec.kernel_spec.variant is None:
        changed["variant"] = ()
    return dataclasses.replace(operands, **changed)


def transform_output(
    o: jax.Array, operands: AttentionOperands[jax.Array], spec: AttentionSpec
) -> jax.Array:
    """o of the call with spec.kernel_spec, after the transform of o. operands: those before it."""
    assert spec.variant is not None and operands.plan_buffer is not None
    transform = spec.variant.transforms.get("o")
    if transform is None:
        return o
    facts, live = _facts_of_rows("o", operands.plan_buffer, spec)
    return plan_jnp.transform_rows(transform, o, spec, facts, live, 0, operands.variant)


def _facts_of_rows(
    name: str, buffer: jax.Array, spec: AttentionSpec
) -> tuple[dict[str, jax.Array], jax.Array]:
    """The fields of `at` of the rows of an array, and which rows are live."""
    rows, keys = plan_jnp.batch_of(buffer, spec)
    if name in ("q", "o"):
        return plan_jnp.query_facts(rows), rows.live
    assert spec.max_kv_tokens is not None
    flat = plan_jnp.Keys(*(x.reshape(-1)[: spec.max_kv_tokens] for x in keys))
    return plan_jnp.key_facts(flat), flat.live
