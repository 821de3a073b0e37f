"""Products of rows with the matrices of their groups on Hopper: when the kernel is used, and its
results.

Without a GPU jnp replaces the kernel, which tests/csrc/sm90/grouped_product_sm90_test.cc runs in
emulation.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.backends import Backend
from helpers.mesh_checks import run_on_cpus
from jax_attn import _core
from jax_attn._spec.target import default_target
from jax_attn._xla import ffi
from jax_attn.models._layers import experts
from jax_attn.models._products import grouped_cuda

NAME = "jax_attn_grouped_product"


def operands(sizes, num_rows, depth, columns, dtype="bfloat16", transposed=False):
    """x of order 1 and matrices whose products with x are of order 1."""
    random = np.random.RandomState(depth + columns)
    x = jnp.asarray(random.standard_normal((num_rows, depth)), dtype)
    shape = (len(sizes), columns, depth) if transposed else (len(sizes), depth, columns)
    weights = jnp.asarray(random.standard_normal(shape) * depth**-0.5, dtype)
    return x, weights, np.array(sizes, np.int32)


def check(got, x, weights, sizes, transposed=False):
    """Compares with float64. Sums are f32, and the result is rounded; rows of no group are 0."""
    assert got.dtype == x.dtype
    wide_x, wide = np.asarray(x, np.float64), np.asarray(weights, np.float64)
    wide = wide.swapaxes(1, 2) if transposed else wide
    got = np.asarray(got, np.float64)
    unit = 2.0 ** (-8 if x.dtype == jnp.bfloat16 else -11)
    begin = 0
    for size, matrix in zip(sizes, wide, strict=True):
        rows = wide_x[begin : begin + size]
        want, magnitude = rows @ matrix, np.abs(rows) @ np.abs(matrix)
        bound = magnitude * len(matrix) * 2.0**-24
        bound += (np.abs(want) + bound) * unit
        assert (np.abs(got[begin : begin + size] - want) <= bound + 2.0**-24).all()
        begin += size
    assert not got[begin:].any()


def stand_in(x, weights, group_sizes, *, transposed, tile_rows, tile_columns, dtype):
    assert x.shape[1] % 8 == 0 and group_sizes.dtype == jnp.int32  # the handler needs this
    assert weights.shape[1] % 8 == 0 and weights.shape[2] % 8 == 0
    matrices = weights.swapaxes(1, 2) if transposed else weights
    ends = jnp.cumsum(group_sizes)
    group = jnp.searchsorted(ends, jnp.arange(len(x)), side="right")
    own = matrices[jnp.minimum(group, len(weights) - 1)].astype(jnp.float32)
    y = jnp.einsum("ni,nio->no", x.astype(jnp.float32), own)
    return jnp.where(group[:, None] < len(weights), y, 0).astype(x.dtype)


@pytest.fixture
def on_hopper(monkeypatch):
    monkeypatch.setattr(grouped_cuda, "gpu_target", lambda: (90, 132))
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.fixture
def with_stand_in(monkeypatch, on_hopper):
    monkeypatch.setattr(ffi, "grouped_product", stand_in)


# ---- when the kernel is used -------------------------------------------------------------------


def lowered(x, weights, sizes, function=experts.grouped_matmul):
    traced = jax.jit(function).trace(x, weights, sizes)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_it_is_taken_for_hopper_alone(dtype, on_hopper, monkeypatch):
    case = operands([3, 5], 8, 64, 72, dtype)
    assert NAME in lowered(*case)
    assert NAME not in jax.jit(experts.grouped_matmul).lower(*case).as_text()  # for this CPU
    for other in ((80, 108), (100, 148), (0, 0), None):
        monkeypatch.setattr(grouped_cuda, "gpu_target", lambda other=other: other)
        jax.clear_caches()
        assert NAME not in lowered(*case)


@pytest.mark.parametrize(
    "case",
    [
        ([3, 5], 8, 64, 72, "float32"),
        ([3, 5], 8, 60, 72, "bfloat16"),  # depth
        ([3, 5], 8, 64, 74, "bfloat16"),  # columns
        ([0] * 1025, 8, 64, 72, "bfloat16"),  # groups
        ([0, 0], 0, 64, 72, "bfloat16"),
    ],
    ids=lambda case: "-".join(map(str, (len(case[0]), *case[1:]))),
)
def test_what_it_does_not_take_is_left_to_xla(case, on_hopper):
    assert NAME not in lowered(*operands(*case))


def test_matrices_of_another_type_are_left_to_xla(on_hopper):
    x, weights, sizes = operands([3, 5], 8, 64, 72)
    assert not grouped_cuda.supports(x.astype(jnp.float16), weights)


def test_the_gradient_of_x_reads_matrices_as_they_are(on_hopper):
    def gradient(x, weights, sizes):
        def loss(x):
            return experts.grouped_matmul(x, weights, sizes).astype(jnp.float32).sum()

        return jax.grad(loss)(x)

    text = lowered(*operands([3, 5], 8, 64, 72), function=gradient)
    calls = [line for line in text.splitlines() if NAME in line]
    assert any("transposed = true" in line for line in calls)
    assert "stablehlo.transpose" not in text


def test_tiles_cover_every_shape():
    for processors in (4, 114, 132):
        for num_rows in (1, 8, 64, 1024, 8192, 1 << 20):
            for groups in (1, 8, 128, 1024):
                for columns in (8, 768, 1536, 1 << 17):
                    tiles = grouped_cuda.choose_tiles(num_rows, groups, columns, processors)
                    assert tiles.rows in (64, 128) and tiles.columns in (64, 128, 256)
                    assert tiles != (128, 64)
    # The experts of Qwen3-30B-A3B: 1, 8, 128 and 8192 tokens.
    assert grouped_cuda.choose_tiles(8, 128, 1536, 132) == (64, 128)
    assert grouped_cuda.choose_tiles(8, 128, 768, 132) == (64, 64)
    assert grouped_cuda.choose_tiles(64, 128, 1536, 132) == (64, 128)
    assert grouped_cuda.choose_tiles(1024, 128, 1536, 132) == (64, 256)
    assert grouped_cuda.choose_tiles(65536, 128, 1536, 132) == (128, 256)


# ---- around the call ---------------------------------------------------------------------------


@pytest.mark.parametrize("transposed", [False, True])
def test_vmap_and_derivatives(transposed, with_stand_in):
    x, weights, sizes = operands([2, 0, 3], 6, 16, 24, "float16", transposed)

    def product(x, weights):
        return grouped_cuda.product(x, weights, sizes, transposed)

    check(jax.jit(product)(x, weights), x, weights, sizes, transposed)
    got = jax.vmap(product, (0, None))(jnp.stack([x, 2 * x]), weights)
    check(got[1], 2 * x, weights, sizes, transposed)
    _, tangent = jax.jvp(product, (x, weights), (x, weights))
    want = 2 * grouped_cuda.in_xla(x, weights, sizes, transposed)
    np.testing.assert_allclose(tangent, want, atol=2e-2)


def test_arrays_that_xla_splits():
    run_on_cpus(4, "import test_grouped_cuda as t; t.check_mesh()")


def check_mesh() -> None:
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    ffi.grouped_product = stand_in
    grouped_cuda.gpu_target = lambda: (90, 132)
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    for transposed in (False, True):
        x, weights, sizes = operands([2, 0, 3, 4], 12, 32, 48, "float16", transposed)
        call = jax.jit(lambda *a, t=transposed: grouped_cuda.product(*a, t))
        want = np.asarray(call(x, weights, sizes), np.float32)
        check(want.astype(x.dtype), x, weights, sizes, transposed)
        for of_x, groups, depth, columns in (
            (P(), None, None, "a"),
            (P("a"), None, None, ("a", "b")),
            (P(None, "a"), None, "a", "b"),
            (P(), "b", None, "a"),
            (P("b", "a"), ("a", "b"), None, None),
            (P(), "a", "b", None),
            (P(), None, ("a", "b"), None),
        ):
            split = P(groups, columns, depth) if transposed else P(groups, depth, columns)
            got = call(
                jax.device_put(x, NamedSharding(mesh, of_x)),
                jax.device_put(weights, NamedSharding(mesh, split)),
                sizes,
            )
            np.testing.assert_allclose(got, want, atol=1e-2)

        # Sizes that are no sizes are read as the kernel reads them: none, and up to the last row.
        split = NamedSharding(mesh, P(("a", "b"), None, None))
        wrong = call(x, jax.device_put(weights, split), jnp.array([2, -1, 30, 4]))
        read = call(x, weights, jnp.array([2, 0, 10, 0]))
        np.testing.assert_allclose(wrong, read, atol=1e-2)

        def own(x, weights, sizes, t=transposed):
            return grouped_cuda.product(x, weights, sizes, t)

        # Inside shard_map it is the device's own product.
        columns = P(None, "a") if transposed else P(None, None, "a")
        mapped = jax.shard_map(own, mesh=mesh, in_specs=(P(), columns, P()), out_specs=P(None, "a"))
        np.testing.assert_allclose(jax.jit(mapped)(x, weights, sizes), want, atol=1e-2)


# ---- what the kernel computes ------------------------------------------------------------------

on_gpu = pytest.mark.parametrize(
    "backend", [pytest.param(Backend("gpu"), id="cuda", marks=pytest.mark.cuda)], indirect=True
)

SIZES = {
    "odd": ([1, 0, 63, 65, 0, 130, 7], 266),
    "one": ([0, 0, 300, 0], 300),
    "none": ([0, 0, 0], 5),
    "behind": ([3, 70, 0, 1], 200),
    "many": ([(5 * g) % 7 if g % 3 else 0 for g in range(1024)], 2100),
    "tall": ([2100, 0, 200], 2300),
}


def needs_hopper():
    if default_target() != "sm_90":
        pytest.skip("needs sm_90")


@on_gpu
@pytest.mark.parametrize("shape", [(8, 8), (200, 136), (768, 2048), (2048, 1536)], ids=str)
@pytest.mark.parametrize("sizes", SIZES)
def test_on_a_gpu(sizes, shape, backend):
    needs_hopper()
    sizes, num_rows = SIZES[sizes]
    if len(sizes) * shape[0] * shape[1] > 1 << 28:
        shape = (256, 512)
    for dtype in ("bfloat16", "float16"):
        for transposed in (False, True):
            case = operands(sizes, num_rows, *shape, dtype, transposed)
            before = _core.jit_stats()["grouped_product_launches"]
            call = jax.jit(lambda *a, t=transposed: experts._plain_on_gpu(*a, t))
            got, again = (np.asarray(call(*case)) for _ in range(2))
            assert _core.jit_stats()["grouped_product_launches"] > before
            check(got, *case, transposed)
            assert (got == again).all()


@on_gpu
@pytest.mark.parametrize("tiles", [(64, 64), (64, 128), (64, 256), (128, 128), (128, 256)], ids=str)
def test_all_tiles_on_a_gpu(tiles, backend, monkeypatch):
    needs_hopper()
    monkeypatch.setattr(grouped_cuda, "choose_tiles", lambda *_: grouped_cuda.Tiles(*tiles))
    jax.clear_caches()
    for transposed in (False, True):
        for sizes in ("odd", "behind", "tall"):
            case = operands(*SIZES[sizes], 520, 328, transposed=transposed)
            check(jax.jit(grouped_cuda.product, static_argnums=3)(*case, transposed), *case,
                  transposed)  # fmt: skip
    jax.clear_caches()


@on_gpu
def test_nan_stays_in_its_rows_on_a_gpu(backend):
    needs_hopper()
    x, weights, sizes = operands([3, 70, 1, 9], 90, 200, 136)
    call = jax.jit(grouped_cuda.product)
    clean = np.asarray(call(x, weights, sizes), np.float32)
    x = x.at[3:73].set(jnp.nan).at[83:].set(jnp.inf)
    got = np.asarray(call(x, weights, sizes), np.float32)
    assert np.isnan(got[3:73]).all()
    got[3:73] = clean[3:73]
    np.testing.assert_array_equal(got, clean)


@on_gpu
def test_gradients_on_a_gpu(backend):
    needs_hopper()
    x, weights, sizes = operands([40, 0, 65, 1], 106, 256, 136)
    d_y = jnp.asarray(np.random.RandomState(1).standard_normal((106, 136)), x.dtype)
    _, pull = jax.vjp(lambda x, w: experts.grouped_matmul(x, w, sizes), x, weights)
    d_x, d_weights = jax.jit(pull)(d_y)
    check(d_x, d_y, weights, sizes, transposed=True)
    _, pull = jax.vjp(lambda w: grouped_cuda.in_xla(x, w, sizes), weights)
    np.testing.assert_array_equal(*(np.asarray(a, np.float32) for a in (d_weights, pull(d_y)[0])))
