"""Saved plans: what comes back, and what is refused."""

import json

import jax
import numpy as np
import pytest
from attention_cases import Case, make_plan

import jax_attn as ja

CASE = Case("", (1, 40, 0), (5000, 60, 0), num_ctas=8)


@pytest.mark.parametrize("target", ("cpu", "sm_80", "sm_90:132"))
@pytest.mark.parametrize("num_ctas", (None, 3))
def test_a_loaded_plan_equals_the_saved_one(tmp_path, target, num_ctas):
    plan = make_plan(CASE, target, num_ctas=num_ctas)
    path = tmp_path / "a plan"  # as named, nothing appended
    plan.save(path)
    again = ja.AttentionPlan.load(path)
    assert again.spec == plan.spec and hash(again.spec) == hash(plan.spec)
    np.testing.assert_array_equal(again.buffer, plan.buffer)
    assert again.describe() == plan.describe()


def test_a_loaded_plan_runs(tmp_path):
    plan = make_plan(CASE, dtype="float32")
    plan.save(tmp_path / "plan.npz")
    again = ja.AttentionPlan.load(tmp_path / "plan.npz")
    spec = plan.spec
    q = jax.random.normal(jax.random.key(0), spec.q_shape)
    k, v = (
        jax.random.normal(jax.random.key(1), shape)
        for shape in spec.kv_shapes(spec.max_kv_pages, spec.page_size)
    )
    np.testing.assert_array_equal(ja.attention(q, k, v, again), ja.attention(q, k, v, plan))


def test_the_number_of_queues_is_kept_where_there_are_more_processors(tmp_path, monkeypatch):
    import os

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(5), raising=False)
    ja.spec.parse_target.cache_clear()
    plan = make_plan(CASE, num_ctas=None)
    assert plan.spec.kernel_config["num_ctas"] % 5 == 0
    plan.save(tmp_path / "plan.npz")
    monkeypatch.undo()
    ja.spec.parse_target.cache_clear()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(2), raising=False)
    again = ja.AttentionPlan.load(tmp_path / "plan.npz")
    ja.spec.parse_target.cache_clear()
    assert again.spec.num_ctas == plan.spec.kernel_config["num_ctas"]
    np.testing.assert_array_equal(again.items(), plan.items())


def rewritten(tmp_path, change):
    """A saved plan whose contents went through `change`."""
    path = tmp_path / "plan.npz"
    make_plan(CASE).save(path)
    with np.load(path) as file:
        about, buffer = json.loads(str(file["about"])), file["buffer"]
    about, buffer = change(about, buffer)
    np.savez(path, about=np.array(json.dumps(about)), buffer=buffer)
    return path


def with_magic(buffer, magic):
    return np.concatenate([np.array([magic], np.int32), buffer[1:]])


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda a, b: (a | {"format": 7}, b), ("expected format 1", "got 7")),
        (lambda a, b: (a | {"plan_version": 1}, b), ("plan_version", "got 1", "plan the batch")),
        (lambda a, b: (a | {"spec": a["spec"] | {"wings": 2}}, b), ("fields", "wings")),
        (
            lambda a, b: (a | {"kernel_config": a["kernel_config"] | {"tile_kv": 48}}, b),
            ("kernel configuration", "tile_kv", "got 48"),
        ),
        (lambda a, b: (a, b[:-1]), ("expected a buffer of int32[", "got int32[")),
        (lambda a, b: (a, b.astype(np.int64)), ("expected a buffer of int32[", "got int64[")),
        (lambda a, b: (a, with_magic(b, 5)), ("begins with", "got 5,")),
    ],
)
def test_another_version_is_refused(tmp_path, change, words):
    with pytest.raises(ValueError, match="^AttentionPlan.load: ") as refusal:
        ja.AttentionPlan.load(rewritten(tmp_path, change))
    for word in words:
        assert word in str(refusal.value)


def test_another_file_is_refused(tmp_path):
    path = tmp_path / "plan.npz"
    make_plan(CASE).save(path)
    whole = path.read_bytes()
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    np.save(tmp_path / "array.npy", np.zeros(3))
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "text").write_text("not a plan")
    (tmp_path / "cut").write_bytes(whole[: len(whole) // 2])
    middle = len(whole) // 2
    damaged = whole[:middle] + bytes(x ^ 0x55 for x in whole[middle : middle + 40])
    (tmp_path / "damaged").write_bytes(damaged + whole[middle + 40 :])
    for name in ("other.npz", "array.npy", "empty", "text", "cut", "damaged"):
        with pytest.raises(ValueError, match="expected a file of AttentionPlan.save, got"):
            ja.AttentionPlan.load(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        ja.AttentionPlan.load(tmp_path / "none")
