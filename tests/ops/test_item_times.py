"""Measured times of items, for pictures."""

import time

import jax
import numpy as np
import pytest

import jax_attn as ja
from helpers.attention_cases import Case, make_plan
from helpers.backends import on_every_platform
from jax_attn import _environment


def make_call(case, target="cpu", dtype="float32", **fields):
    plan = make_plan(case, target, dtype=dtype, **fields)
    spec = plan.spec
    keys = jax.random.split(jax.random.key(0), 3)
    lead = (spec.max_kv_tokens,)
    if spec.is_paged:
        lead = (plan.header()["max_page_id"] + 1, spec.page_size)
    shapes = (spec.q_shape, *spec.kv_shapes(*lead))
    q, k, v = (
        jax.random.normal(key, shape, spec.dtype) for key, shape in zip(keys, shapes, strict=True)
    )
    return q, k, v, plan


@on_every_platform
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("page_size", (None, 16))
def test_every_item_has_its_time_within_the_call(backend, page_size, dtype):
    case = Case("", (1, 40, 0, 1), (5000, 60, 0, 700), page_size=page_size, num_ctas=8)
    q, k, v, plan = make_call(case, "cpu" if backend.platform == "cpu" else None, dtype)
    assert len(plan.merge_groups()) > 0
    ja.item_times(q, k, v, plan)  # compiles
    with _environment.poisoned():
        start = time.perf_counter()
        times = ja.item_times(q, k, v, plan)
        wall = time.perf_counter() - start
    assert times.shape == (len(plan.items()), 2) and times.dtype == np.float64
    begin, end = times.T
    assert (begin <= end).all() and (begin > 0).all()
    assert 0 < end.max() - begin.min() < wall


def test_a_measured_picture(tmp_path):
    q, k, v, plan = make_call(Case("", (1, 40), (5000, 60), num_ctas=8))
    plan.plot(tmp_path / "measured.html", item_times=ja.item_times(q, k, v, plan))
    assert "measured time" in (tmp_path / "measured.html").read_text()


def test_recording_changes_no_bits():
    q, k, v, plan = make_call(Case("", (1, 40), (5000, 60), num_ctas=8))
    before = np.asarray(ja.attention(q, k, v, plan))
    ja.item_times(q, k, v, plan)
    np.testing.assert_array_equal(ja.attention(q, k, v, plan), before)


def test_a_batch_without_items_has_no_times():
    q, k, v, plan = make_call(Case("", (), ()))
    assert ja.item_times(q, k, v, plan).shape == (0, 2)


def test_bad_input():
    q, k, v, plan = make_call(Case("", (1,), (100,)))
    with pytest.raises(ValueError, match="item_times: q: expected"):
        ja.item_times(q[:-1], k, v, plan)
