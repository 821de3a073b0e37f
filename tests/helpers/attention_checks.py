"""Runs attention on a case on any backend and compares it with the reference."""

import jax
import numpy as np

import jax_attn as ja
from helpers.attention_cases import (
    built,
    expected,
)
from helpers.checking import assert_close_state, assert_same_bits


@jax.jit
def attend(q, k, v, plan, layer=None, sinks=None, scales=None):
    options = {"layer": layer, "sinks": sinks} | (scales or {})
    return ja.attention(q, k, v, plan, **options, return_lse=True)


def make_plan(case, backend, batch):
    return ja.plan(backend.spec(**case.spec_fields()), **batch.lengths.plan_arguments())


def run(plan, batch):
    """Runs attention and returns (o, lse) as numpy arrays."""
    arrays = batch.q, batch.k, batch.v, plan, batch.layer, batch.sinks, batch.scales
    return tuple(np.asarray(x) for x in attend(*arrays))


def check(case, backend):
    plan = None
    for content in case.contents:
        batch, want = built(case, content), expected(case, content)
        plan = plan or make_plan(case, backend, batch)
        o, lse = run(plan, batch)
        assert o.dtype == case.dtype and lse.dtype == np.float32
        try:
            assert_close_state(o, lse, want.o, want.lse, want.o_bound, want.lse_bound)
        except AssertionError as error:
            raise AssertionError(f"content {content}: {error}") from None
        for _ in range(case.repeats - 1):
            again_o, again_lse = run(plan, batch)
            assert_same_bits("o", again_o, o)
            assert_same_bits("lse", again_lse, lse)
