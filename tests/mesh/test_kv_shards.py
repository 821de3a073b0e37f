"""KV shards over a mesh axis: one device's results, and the bytes sent."""

import contextlib
import re

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_attn as ja
from helpers.mesh_checks import MESHES, run_on_cpus
from jax_attn import parallel
from jax_attn.parallel import _common

_PARTS = 40  # of the cases: each test takes one part, the slow tests take all


@pytest.mark.parametrize("mesh", MESHES)
def test_cases(mesh):
    part = list(MESHES).index(mesh)
    run_on_cpus(4, f"import mesh_checks as m; m.check_kv_shards({mesh!r}, {part}, {_PARTS})")


@pytest.mark.slow
@pytest.mark.timeout(4000)
@pytest.mark.parametrize("mesh", MESHES)
def test_all_cases(mesh):
    run_on_cpus(4, f"import mesh_checks as m; m.check_kv_shards({mesh!r}, 0, 1)", timeout=3900)


@pytest.mark.parametrize("mesh", MESHES)
def test_plans_in_loops(mesh):
    run_on_cpus(4, f"import mesh_checks as m; m.check_loops({mesh!r})")


@pytest.mark.parametrize(
    "what",
    ["bytes('float32')", "bytes('bfloat16')", "plans()", "latent()", "appends()", "bad_batches()"],
)
def test(what):
    run_on_cpus(4, f"import mesh_checks as m; m.check_{what}")


@pytest.mark.parametrize("explicit", [False, True])
def test_nothing_is_gathered_in_silence(explicit):
    """Checks the calls that take a mesh, including sequences."""
    run_on_cpus(4, f"import mesh_checks as m; m.check_shardings({explicit})")


@pytest.mark.parametrize("num_devices", [2, 3, 4])
def test_devices_share_the_keys_that_decodes_read(num_devices):
    """Each key is read once, and devices' shares of a request differ by at most a stripe."""
    kv_lens = np.array([20000, 1, 333, 4097])
    page_indptr = np.cumsum(np.append(0, -(-kv_lens // 48)))
    batch = np.arange(5), kv_lens, page_indptr, np.arange(page_indptr[-1])
    sizes = {"max_batch": 4, "max_qo_tokens": 4, "max_kv_pages": len(batch[3])}
    kv_shards = parallel.KvShards(_spec(page_size=48, **sizes), "kv", num_devices)
    plan = parallel.plan_kv_shards(kv_shards, *batch)
    reads = []
    for device in range(num_devices):
        items = plan.attend_plan(device).items()
        by_request = np.bincount(items["request"], items["kv_end"] - items["kv_begin"], minlength=4)
        reads.append(by_request / 2)  # kv heads
    np.testing.assert_array_equal(np.sum(reads, axis=0), kv_lens)
    assert np.ptp(reads, axis=0).max() <= kv_shards.stripe_len


def test_a_chunk_costs_one_part_for_each_page_it_touches():
    kv_shards = parallel.KvShards(_spec(max_qo_tokens=500, max_kv_pages=60), "kv", 2)
    plan = parallel.plan_kv_shards(kv_shards, [0, 500], [1000], [0, 42], np.arange(42))
    for device in range(2):
        header = plan.attend_plan(device)
        live = np.diff(header._section("qo_indptr", header.header()["batch_size"] + 1)) > 0
        assert live.sum() == 500 // 24 + 2


def test_a_row_needs_the_pages_of_its_window():
    """Windows of 11, 14 and 31 keys touch at most 2, 2 and 3 pages of 24."""
    for fields, pages in (
        ({"causal": True}, 2),
        ({"causal": False, "window_right": 3}, 2),
        ({"causal": False, "window_right": 20}, 3),
        ({"causal": False, "window_right": -1}, 9),  # all there are
    ):
        kv_shards = parallel.KvShards(_spec(window_left=10, **fields), "kv", 2)
        spec = kv_shards.attend_spec
        assert (spec.max_batch, spec.max_kv_pages) == (5, 5 * pages)


@pytest.mark.parametrize("target", ["cpu", "sm_90"])
@pytest.mark.parametrize("window_left", [-1, 600])
def test_prefixes_are_searched_only_where_none_are_given(window_left, target):
    """The bits of a plan made on a GPU, which does not search, are those of prefix_levels=()."""
    indptr, kv_lens = np.arange(9), np.full(8, 512)
    pages = np.tile(np.arange(8), 8)  # all requests have the same pages
    spec = _spec(
        page_size=64, max_batch=8, max_qo_tokens=8, max_kv_pages=64, num_ctas=2,
        window_left=window_left, target=target,
    )  # fmt: skip
    kv_shards = parallel.KvShards(spec, "kv", 2)

    def num_shared(prefix_levels):
        plan = parallel.plan_kv_shards(
            kv_shards, indptr, kv_lens, 8 * indptr, pages, prefix_levels=prefix_levels
        )
        return [plan.attend_plan(device).header()["num_shared_tokens"] for device in range(2)]

    assert min(num_shared(None)) > 0
    assert num_shared(()) == [0, 0]
    given = num_shared([([0, 8], [448])])
    assert min(given) > 0 if window_left < 0 else given == [0, 0]


def _spec(**fields):
    sizes = {"head_dim_qk": 16, "page_size": 24, "max_batch": 2, "max_qo_tokens": 5}
    options = sizes | {"max_kv_pages": 9, "dtype": "float32", "target": "cpu"} | fields
    return ja.AttentionSpec(4, 2, **options)


_BATCH = [0, 1, 3], [25, 40], [0, 2, 4], np.arange(4)


def _attend(**options):
    kv_shards = parallel.KvShards(_spec(), "kv", 2)
    plan = parallel.plan_kv_shards(kv_shards, *_BATCH)
    pages = np.zeros((4, 24, 2, 16), np.float32)
    return parallel.attend_kv_shards(
        np.zeros((5, 4, 16), np.float32), pages, pages, plan, **options
    )


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (
            lambda: parallel.KvShards(_spec(), "kv", 5),
            ValueError,
            "KvShards: spec: expected a page_size that is a multiple of axis_size=5, got 24.",
        ),
        (
            lambda: parallel.KvShards(_spec(), "kv", 0),
            ValueError,
            "KvShards: axis_size: expected the number of devices of the axis, at least 1, got 0.",
        ),
        (
            lambda: parallel.KvShards(_spec(fresh_kv=True), "kv", 2),
            NotImplementedError,
            "KvShards: spec: fresh_kv=False is supported, got True;",
        ),
        (
            lambda: parallel.KvShards(
                _spec(page_size=None, max_kv_pages=None, max_kv_tokens=9), "kv", 2
            ),
            NotImplementedError,
            "KvShards: spec: a paged cache is supported, got page_size=None.",
        ),
        (
            lambda: parallel.KvShards(
                _spec(variant=ja.Variant(mask=lambda at: at.kv_pos // 4 == at.q_pos // 4)), "kv", 2
            ),
            NotImplementedError,
            "KvShards: spec: a variant that reads no positions, rows or lengths is supported,",
        ),
        (
            lambda: parallel.plan_kv_shards(
                parallel.KvShards(_spec(), "kv", 2), [0, 1, 3], [25, 60], *_BATCH[2:]
            ),
            ValueError,
            "plan: ",
        ),
        (
            lambda: _attend(),
            ValueError,
            "attend_kv_shards: mesh: expected a mesh outside of jax.shard_map over axis 'kv', got",
        ),
        (
            lambda: _attend(mesh=ja_mesh()),
            ValueError,
            "attend_kv_shards: plan: expected KvShards of the mesh, {'kv': 1}, got axis 'kv' of 2.",
        ),
        (
            lambda: _attend(mesh=ja_mesh(), scatter="columns"),
            ValueError,
            "attend_kv_shards: ",
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


def test_gradients_of_exchanged_states_are_refused():
    """Devices exchange integers, whose gradients JAX would take for 0."""
    mesh = jax.make_mesh((1,), ("kv",), axis_types=(jax.sharding.AxisType.Auto,))
    fields = {"dtype": "float32", "max_batch": 1, "max_qo_tokens": 2, "max_kv_pages": 2}
    shards = parallel.KvShards(ja.AttentionSpec(2, 1, 16, page_size=4, **fields), "kv", 1)
    plan = parallel.plan_kv_shards(shards, [0, 2], [6], [0, 2], [1, 0])
    q, pages = np.ones((2, 2, 16), np.float32), np.ones((2, 4, 1, 16), np.float32)

    def loss(q, pages):
        return parallel.attend_kv_shards(q, pages, pages, plan, mesh=mesh).sum()

    for of in (0, 1):
        with pytest.raises(NotImplementedError, match="^attend_kv_shards: gradients: not supp"):
            jax.jit(jax.grad(loss, of))(q, pages)


@pytest.mark.parametrize(
    ("got", "is_fine"),
    [
        (P(), True),
        (P(None, "kv", "heads"), True),
        (P(None, None, "heads"), True),  # slices of it are enough
        (P(None, "kv"), True),
        (P(None, "heads"), False),
        (P(None, "kv", None, "heads"), False),
    ],
)
def test_splits_that_slices_make(got, is_fine):
    mesh = jax.sharding.AbstractMesh((2, 2), ("heads", "kv"))
    split = _common._Split("attend", "k", mesh, P(None, "kv", "heads"))
    with (
        contextlib.nullcontext() if is_fine else pytest.raises(NotImplementedError, match="reshard")
    ):
        split.check(NamedSharding(mesh, got), 4)
