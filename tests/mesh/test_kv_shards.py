"""Keys and values striped over a mesh axis: the truth of one device, and the bytes that travel."""

import re

import numpy as np
import pytest

import jax_attn as ja
from helpers.mesh_checks import MESHES, run_on_cpus
from jax_attn import parallel

_PARTS = 40  # of the cases: each test takes one of them, the slow tests all


@pytest.mark.parametrize("mesh", MESHES)
def test_cases(mesh):
    part = list(MESHES).index(mesh)
    run_on_cpus(4, f"import mesh_checks as m; m.check_stripes({mesh!r}, {part}, {_PARTS})")


@pytest.mark.slow
@pytest.mark.timeout(4000)
@pytest.mark.parametrize("mesh", MESHES)
def test_all_cases(mesh):
    run_on_cpus(4, f"import mesh_checks as m; m.check_stripes({mesh!r}, 0, 1)", timeout=3900)


@pytest.mark.parametrize("mesh", MESHES)
def test_plans_in_loops(mesh):
    run_on_cpus(4, f"import mesh_checks as m; m.check_loops({mesh!r})")


@pytest.mark.parametrize("what", ["bytes", "plans", "latent", "appends", "bad_batches"])
def test(what):
    run_on_cpus(4, f"import mesh_checks as m; m.check_{what}()")


@pytest.mark.parametrize("explicit", [False, True])
def test_nothing_is_gathered_in_silence(explicit):
    """Of the calls that take a mesh, sequences too."""
    run_on_cpus(4, f"import mesh_checks as m; m.check_shardings({explicit})")


@pytest.mark.parametrize("num_devices", [2, 3, 4])
def test_devices_share_the_keys_that_decodes_read(num_devices):
    """No key is read twice, and none has more of a request than others but for a stripe."""
    kv_lens = np.array([20000, 1, 333, 4097])
    page_indptr = np.cumsum(np.append(0, -(-kv_lens // 48)))
    batch = np.arange(5), kv_lens, page_indptr, np.arange(page_indptr[-1])
    sizes = {"max_batch": 4, "max_qo_tokens": 4, "max_kv_pages": len(batch[3])}
    stripes = parallel.KvStripes(_spec(page_size=48, **sizes), "kv", num_devices)
    plan = parallel.plan_stripes(stripes, *batch)
    reads = []
    for device in range(num_devices):
        items = plan.attend_plan(device).items()
        by_request = np.bincount(items["request"], items["kv_end"] - items["kv_begin"], minlength=4)
        reads.append(by_request / 2)  # kv heads
    np.testing.assert_array_equal(np.sum(reads, axis=0), kv_lens)
    assert np.ptp(reads, axis=0).max() <= stripes.stripe_len


def test_a_chunk_costs_one_part_for_each_page_it_touches():
    stripes = parallel.KvStripes(_spec(max_qo_tokens=500, max_kv_pages=60), "kv", 2)
    plan = parallel.plan_stripes(stripes, [0, 500], [1000], [0, 42], np.arange(42))
    for device in range(2):
        header = plan.attend_plan(device)
        live = np.diff(header._section("qo_indptr", header.header()["batch_size"] + 1)) > 0
        assert live.sum() == 500 // 24 + 2


def _spec(**fields):
    sizes = {"head_dim_qk": 16, "page_size": 24, "max_batch": 2, "max_qo_tokens": 5}
    options = sizes | {"max_kv_pages": 9, "dtype": "float32", "target": "cpu"} | fields
    return ja.AttentionSpec(4, 2, **options)


_BATCH = [0, 1, 3], [25, 40], [0, 2, 4], np.arange(4)


def _attend(**options):
    stripes = parallel.KvStripes(_spec(), "kv", 2)
    plan = parallel.plan_stripes(stripes, *_BATCH)
    pages = np.zeros((4, 24, 2, 16), np.float32)
    return parallel.attend_stripes(np.zeros((5, 4, 16), np.float32), pages, pages, plan, **options)


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (
            lambda: parallel.KvStripes(_spec(), "kv", 5),
            ValueError,
            "KvStripes: spec: expected a page_size that is a multiple of axis_size=5, got 24.",
        ),
        (
            lambda: parallel.KvStripes(_spec(), "kv", 0),
            ValueError,
            "KvStripes: axis_size: expected the number of devices of the axis, at least 1, got 0.",
        ),
        (
            lambda: parallel.KvStripes(_spec(fresh_kv=True), "kv", 2),
            NotImplementedError,
            "KvStripes: spec: fresh_kv=False is supported, got True;",
        ),
        (
            lambda: parallel.KvStripes(
                _spec(page_size=None, max_kv_pages=None, max_kv_tokens=9), "kv", 2
            ),
            NotImplementedError,
            "KvStripes: spec: a paged cache is supported, got page_size=None.",
        ),
        (
            lambda: parallel.plan_stripes(
                parallel.KvStripes(_spec(), "kv", 2), [0, 1, 3], [25, 60], *_BATCH[2:]
            ),
            ValueError,
            "plan: ",
        ),
        (
            lambda: _attend(),
            ValueError,
            "attend_stripes: mesh: expected a mesh outside of jax.shard_map over axis 'kv', got",
        ),
        (
            lambda: _attend(mesh=ja_mesh()),
            ValueError,
            "attend_stripes: plan: expected KvStripes of the mesh, {'kv': 1}, got axis 'kv' of 2.",
        ),
        (
            lambda: _attend(mesh=ja_mesh(), scatter="columns"),
            ValueError,
            "attend_stripes: ",
        ),
    ],
)
def test_refusals(call, error, sentence):
    with pytest.raises(error, match=re.escape(sentence)) as caught:
        call()
    assert str(caught.value).count("\n") == 0


def ja_mesh():
    import jax

    return jax.make_mesh((1,), ("kv",), axis_types=(jax.sharding.AxisType.Auto,))
