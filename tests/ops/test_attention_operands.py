"""The record of a call's operands: what must agree with it, and what must not change."""

import dataclasses
import inspect
import typing

import jax
import pytest

import jax_attn as ja
from jax_attn._xla.attention_operands import AttentionOperands

# Names in the call; the record has other names for the plan's buffer and variant's operands.
CALLED = {"plan_buffer": "plan", "variant": "variant_operands"}


@pytest.mark.parametrize(
    "signed", [ja.attention, ja.item_times, *typing.get_overloads(ja.attention)]
)
def test_every_operand_is_in_every_signature(signed):
    fields = [CALLED.get(f.name, f.name) for f in dataclasses.fields(AttentionOperands)]
    assert set(inspect.signature(signed).parameters) - {"return_lse"} == set(fields)


def test_the_order_of_the_custom_call_stays():
    """Exported and cached executables have operands by position, so none may move."""
    names = [f.name for f in dataclasses.fields(AttentionOperands)]
    operands = AttentionOperands(**dict(zip(names, names, strict=True)) | {"variant": ("a", "b")})
    assert names[:11] == [
        *("q", "k", "v", "plan_buffer", "layer", "k_new", "v_new", "sinks"),
        *("q_scale", "k_scale", "v_scale"),
    ]
    assert jax.tree.leaves(operands) == [*names[:-1], "a", "b"]
