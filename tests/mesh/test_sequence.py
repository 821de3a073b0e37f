"""Sequences split over a mesh axis: one device's results, bytes sent, balance."""

import re

import jax
import numpy as np
import pytest

import jax_attn as ja
from helpers.mesh_checks import MESHES, run_in_processes, run_on_cpus
from jax_attn import parallel
from jax_attn.parallel import sequence

_STEP = 9  # a test takes every ninth case, the slow tests take all


def test_cases():
    run_on_cpus(4, f"import mesh_checks as m; m.check_sequences(2, {_STEP})")


@pytest.mark.slow
@pytest.mark.timeout(4000)
@pytest.mark.parametrize("part", range(4))
def test_all_cases(part):
    program = f"import mesh_checks as m; m.check_sequences({part}, 4, True)"
    run_on_cpus(4, program, timeout=3900)


@pytest.mark.parametrize(("index", "mesh"), list(enumerate(MESHES)))
def test_listed_cases(index, mesh):
    run_on_cpus(4, f"import mesh_checks as m; m.check_listed_sequences({mesh!r}, {index}, 40)")


@pytest.mark.slow
@pytest.mark.timeout(4000)
@pytest.mark.parametrize("mesh", MESHES)
def test_all_listed_cases(mesh):
    program = f"import mesh_checks as m; m.check_listed_sequences({mesh!r}, 0, 1)"
    run_on_cpus(4, program, timeout=3900)


@pytest.mark.parametrize("what", ["sequence_bytes", "sequence_plans"])
def test(what):
    run_on_cpus(4, f"import mesh_checks as m; m.check_{what}()")


@pytest.mark.parametrize("first", range(3))
def test_dense_batches(first):
    run_on_cpus(8, f"import mesh_checks as m; m.check_dense_sequences({first}, 3)")


def test_processes():
    run_in_processes(2, 2, "import mesh_checks as m; m.check_processes()")


def _spec(tokens=960, **fields):
    sizes = {"max_batch": 8, "max_qo_tokens": tokens, "max_kv_tokens": tokens, "page_size": None}
    return ja.AttentionSpec(8, 4, 16, **(sizes | {"dtype": "float32", "target": "cpu"} | fields))


def _logits(monkeypatch, shards, indptr):
    """[steps, devices]: visible (query, key) pairs of one head."""
    counts = []

    def count(spec, rows, kv_lens, *, kv_indptr, q_offsets):
        total = 0
        for num_rows, num_keys, offset in zip(np.diff(rows), kv_lens, q_offsets, strict=True):
            p, s = offset + np.arange(num_rows)[:, None], np.arange(num_keys)
            seen = (s <= p) & ((s >= p - spec.window_left) | (spec.window_left < 0))
            total += seen.sum()
        counts.append(total)
        return plan(spec, rows, kv_lens, kv_indptr=kv_indptr, q_offsets=q_offsets)

    plan = sequence.plan
    monkeypatch.setattr(sequence, "plan", count)
    parallel.plan_sequence(shards, indptr)
    return np.reshape(counts, (len(shards.steps), shards.axis_size))


@pytest.mark.parametrize("indptr", [[0, 960], [0, 700, 701, 960], [0, 320, 640, 900]])
@pytest.mark.parametrize("num_devices", [2, 3, 4, 8])
def test_stripes_share_causal_work(monkeypatch, indptr, num_devices):
    """In every step devices have equal work, except for one key a query."""
    shards = parallel.SequenceShards(_spec(), "kv", num_devices, exchange="ring")
    count = _logits(monkeypatch, shards, indptr)
    lens = np.diff(indptr)
    assert count.sum() == (lens * (lens + 1) // 2).sum()
    assert np.ptp(count, axis=1).max() <= shards.tokens_each + 960 // num_devices
    assert np.ptp(count.sum(axis=0)) <= 0.03 * count.sum(axis=0).mean() * num_devices


def test_keys_of_a_window_do_not_leave_its_neighbourhood(monkeypatch):
    for window, hops in ((0, 0), (1, 1), (120, 1), (121, 2), (240, 2), (400, 4), (2000, 7)):
        spec = _spec(window_left=window)
        shards = parallel.SequenceShards(spec, "kv", 8, "contiguous", "ring")
        assert shards.num_hops == hops, window
        seen = np.minimum(np.arange(960), window) + 1
        with monkeypatch.context() as patch:
            counted = _logits(patch, shards, [0, 960])
        assert counted.sum() == seen.sum()


@pytest.mark.parametrize(
    ("heads", "num_devices", "window", "expected"),
    [
        ((8, 8), 2, -1, "heads"),
        ((12, 4), 2, -1, "heads"),  # twice the bytes
        ((16, 4), 2, -1, "ring"),
        ((16, 4), 4, -1, "heads"),
        ((8, 2), 4, -1, "ring"),  # fewer KV heads than devices
        ((8, 8), 4, 10, "ring"),  # one hop
    ],
)
def test_which_exchange(heads, num_devices, window, expected):
    fields = {"dtype": "float32", "target": "cpu", "page_size": None, "max_batch": 1}
    spec = ja.AttentionSpec(
        *heads, 16, max_qo_tokens=160, max_kv_tokens=160, window_left=window, **fields
    )
    assert parallel.SequenceShards(spec, "kv", num_devices, "contiguous").algorithm == expected


@pytest.mark.parametrize(
    ("num_devices", "given", "expected"), [(2, None, 124), (2, 132, 132), (1, None, 132)]
)
def test_a_ring_leaves_ctas_to_what_sends(num_devices, given, expected):
    fields = {"page_size": None, "max_batch": 1, "num_ctas": given, "target": "sm_90"}
    spec = ja.AttentionSpec(8, 2, 128, max_qo_tokens=1024, max_kv_tokens=1024, **fields)
    steps = parallel.SequenceShards(spec, "kv", num_devices, exchange="ring").steps
    assert {step.kernel_config["num_ctas"] for _, step in steps} == {expected}


def test_positions():
    shards = parallel.SequenceShards(_spec(12), "kv", 3)
    assert shards.positions.tolist() == [0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11]
    rows = parallel.SequenceShards(_spec(12), "kv", 3, "contiguous", num_rows=2)
    assert rows.positions.tolist() == [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]


def _mesh():
    return jax.make_mesh((1,), ("kv",), axis_types=(jax.sharding.AxisType.Auto,))


def _attend(shards, **options):
    plan = parallel.plan_sequence(shards)
    q, k = np.zeros((960, 8, 16), np.float32), np.zeros((960, 4, 16), np.float32)
    return parallel.attend_sequence(q, k, k, plan, **options)


def _dense(shape=(2, 4, 4, 16), axis="kv", **options):
    q = np.zeros(shape, np.float32)
    return parallel.dot_product_attention(q, q, q, mesh=_mesh(), axis_name=axis, **options)


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (
            lambda: parallel.SequenceShards(_spec(), "kv", 7),
            ValueError,
            "spec: expected max_qo_tokens that are a multiple of axis_size=7, got 960.",
        ),
        (
            lambda: parallel.SequenceShards(_spec(max_kv_tokens=961), "kv", 2),
            ValueError,
            "SequenceShards: spec: expected max_kv_tokens=max_qo_tokens=960, got 961.",
        ),
        (
            lambda: parallel.SequenceShards(_spec(), "kv", 0),
            ValueError,
            "SequenceShards: axis_size: expected a whole number of at least 1, got 0.",
        ),
        (
            lambda: parallel.SequenceShards(_spec(), "kv", 2, "zigzag"),
            ValueError,
            "SequenceShards: order: expected 'striped' or 'contiguous', got 'zigzag'.",
        ),
        (
            lambda: parallel.SequenceShards(_spec(), "kv", 3, exchange="heads"),
            ValueError,
            "SequenceShards: exchange: expected 'ring' where axis_size=3 does not divide the query",
        ),
        (
            lambda: parallel.SequenceShards(
                ja.AttentionSpec(4, 4, 16, max_kv_pages=9, target="cpu"), "kv", 2
            ),
            NotImplementedError,
            "SequenceShards: spec: page_size=None is supported, got 16.",
        ),
        (
            lambda: parallel.plan_sequence(parallel.SequenceShards(_spec(), "kv", 2), [0, 5, 4]),
            ValueError,
            "plan_sequence: indptr: expected offsets from 0 that never decrease, up to"
            " max_qo_tokens=960, got [0, 5, 4].",
        ),
        (
            lambda: parallel.plan_sequence(
                parallel.SequenceShards(_spec(), "kv", 2, num_rows=2), [0, 5]
            ),
            ValueError,
            "plan_sequence: indptr: expected None with num_rows > 1",
        ),
        (
            lambda: _attend(parallel.SequenceShards(_spec(), "kv", 2)),
            ValueError,
            "attend_sequence: mesh: expected a mesh outside of jax.shard_map over axis 'kv', got",
        ),
        (
            lambda: _attend(parallel.SequenceShards(_spec(), "kv", 2), mesh=_mesh()),
            ValueError,
            "attend_sequence: plan: expected SequenceShards of the mesh, {'kv': 1}, got axis 'kv'",
        ),
        (
            lambda: _dense(axis="rows"),
            ValueError,
            "parallel.dot_product_attention: mesh: expected an axis 'rows', got {'kv': 1}.",
        ),
        (
            lambda: _dense((2, 0, 4, 16)),
            ValueError,
            "parallel.dot_product_attention: query, key, value: expected T in a number that",
        ),
        (
            lambda: _dense((4, 4, 16)),
            ValueError,
            "parallel.dot_product_attention: query, key, value: expected [batch, T, num_qo_heads,",
        ),
        (
            lambda: _dense(local_window_size=-2),
            ValueError,
            "parallel.dot_product_attention: local_window_size: expected (left, right) or one int",
        ),
    ],
)
def test_refusals(call, error, sentence):
    with pytest.raises(error, match=re.escape(sentence)) as caught:
        call()
    assert str(caught.value).count("\n") == 0
