"""Matmuls with quantized matrices on CUDA: when the kernel is used, and its results.

Without a GPU a sum over parts of the depth in jnp replaces the kernel, which
tests/csrc/cuda/quantized_product_cuda_test.cc runs in emulation.
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
from jax_attn.models._products import quantized, quantized_cuda
from jax_attn.models._products.quantized import Quantized

GROUPS = {"int4": 128, "e2m1": 32, "e4m3": 128}


def operands(kind, num_rows, depth, columns, group_size=None, dtype="bfloat16", zeros=True):
    """x of order 1 and a matrix whose dot products with x are of order 1."""
    random = np.random.RandomState(depth + columns)
    size = group_size or GROUPS[kind]
    groups = -(-depth // size)
    codes = random.randint(0, 256, (depth // quantized.codes_per_byte(kind), columns))
    if kind == "e4m3":
        codes[(codes & 0x7F) == 0x7F] = 3
    scales = random.uniform(0.5, 1.5, (groups, columns)) * {"e4m3": 0.02}.get(kind, 0.2)
    scales = (scales * depth**-0.5).astype(np.float32)
    if kind == "e2m1":
        scales = random.randint(119, 123, (groups, columns)).astype(np.uint8)
    has_zeros = kind == "int4" and zeros
    zeros = random.randint(0, 17, scales.shape).astype(np.uint8) if has_zeros else None
    x = jnp.asarray(random.standard_normal((num_rows, depth)), dtype)
    weight = Quantized(codes.astype(np.uint8), scales, zeros, None, kind, size)
    return x, jax.tree.map(jnp.asarray, weight)


def check(got, x, weight):
    """Compares with float64. Bounds are relative to the sums of magnitudes.

    Weights are rounded to 16 bits, as in XLA's matmul, sums are f32, and the result is rounded.
    """
    wide = np.asarray(quantized.widen(weight, jnp.float32), np.float64)
    wide_x = np.asarray(x, np.float64)
    want, size = wide_x @ wide, np.abs(wide_x) @ np.abs(wide)
    unit = 2.0 ** (-8 if x.dtype == jnp.bfloat16 else -11)
    bound = size * (unit * (1 + 2**-5) + x.shape[1] * 2.0**-24)
    if got.dtype != jnp.float32:
        bound += (np.abs(want) + bound) * unit
    error = np.abs(np.asarray(got, np.float64) - want)
    assert (error <= bound).all()
    # Roundings go up as often as down.
    assert np.sqrt((error**2).mean()) < 4 * unit * np.sqrt((want**2).mean()) + 1e-7


def lowered(x, weight, **options):
    call = jax.jit(lambda x, weight: quantized.product(x, weight, **options))
    return call.trace(x, weight).lower(lowering_platforms=("cuda",)).as_text()


def stand_in(x, codes, scales, zeros, *, num_splits, dtype, x_dtype, arch, **attributes):
    assert attributes["main_loop"] == 0
    assert codes.shape[1] % 16 == 0 and x.shape[1] % 8 == 0  # the handler needs this
    kind = {code: kind for kind, code in quantized_cuda.FORMATS.items()}[attributes["format"]]
    zeros = zeros if zeros.size else None
    weight = Quantized(codes, scales, zeros, None, kind, attributes["group_size"])
    wide = quantized.widen(weight, x.dtype).astype(jnp.float32)
    steps = -(-x.shape[1] // 64)
    length = -(-steps // num_splits) * 64
    parts = [slice(i * length, (i + 1) * length) for i in range(num_splits)]
    wide_x = x.astype(jnp.float32)
    return jnp.stack([wide_x[:, part] @ wide[part] for part in parts]).astype(dtype)


@pytest.fixture
def with_stand_in(monkeypatch):
    monkeypatch.setattr(ffi, "quantized_product", stand_in)
    jax.clear_caches()
    yield
    jax.clear_caches()


# ---- when the kernel is used -------------------------------------------------------------------


@pytest.mark.parametrize("kind", GROUPS)
def test_it_is_taken_for_cuda_alone(kind):
    x, weight = operands(kind, 64, 256, 512)
    assert "jax_attn_quantized_product" in lowered(x, weight)
    assert "jax_attn_quantized_product" in lowered(x.astype(jnp.float16), weight, dtype="float32")
    on_cpu = jax.jit(quantized.product).lower(x, weight).as_text()
    assert "jax_attn_quantized_product" not in on_cpu


@pytest.mark.parametrize(
    "case",
    [
        ("int4", 257, 256, 512, 128, "bfloat16"),  # rows
        ("int4", 8, 256, 512, 128, "float32"),
        ("int4", 8, 256, 520, 128, "bfloat16"),  # columns
        ("e4m3", 8, 252, 512, 128, "bfloat16"),  # depth
        ("int4", 8, 256, 512, 16, "bfloat16"),  # groups
        ("e2m1", 8, 288, 512, 96, "bfloat16"),
        ("e4m3", 8, 256, 512, 256, "bfloat16"),  # one group: XLA's matmul
    ],
    ids=lambda case: "-".join(map(str, case)),
)
def test_what_it_does_not_take_is_left_to_xla(case):
    *shape, dtype = case
    assert "jax_attn_quantized_product" not in lowered(*operands(*shape, dtype=dtype))


def test_int8_and_scales_of_another_type_are_left_to_xla():
    x, weight = operands("e2m1", 8, 256, 512)
    scales = jnp.ones(weight.scales.shape, jnp.float32)
    assert "jax_attn_quantized_product" not in lowered(
        x, Quantized(weight.codes, scales, None, None, "e2m1", 32)
    )
    codes = jnp.zeros((256, 512), jnp.int8)
    int8 = Quantized(codes, scales[:4], None, None, "int8", 64)
    assert "jax_attn_quantized_product" not in lowered(x, int8)


def test_tiles_cover_every_shape():
    for processors in (4, 108, 132, 148):
        for num_rows in (1, 8, 9, 33, 64, 65, 256):
            for depth, columns in ((64, 16), (4096, 6144), (14336, 4096), (4096, 28672)):
                for has_wgmma, widths in ((False, (224, 256)), (True, (128, 256))):
                    tiles = quantized_cuda.choose_tiles(
                        num_rows, depth, columns, 4, processors, has_wgmma
                    )
                    assert tiles.rows in (8, 16, 32, 64) and tiles.columns in widths
                    assert 1 <= tiles.num_splits <= -(-depth // 64)
    # One wave fills the device, and each sum has few parts.
    assert quantized_cuda.choose_tiles(64, 4096, 28672, 4, 132) == (64, 224, 1)
    assert quantized_cuda.choose_tiles(64, 4096, 28672, 4, 132, True) == (64, 256, 1)
    assert quantized_cuda.choose_tiles(64, 4096, 4096, 4, 132) == (64, 256, 8)
    # The other width would be predicted to gain less than 4 %.
    assert quantized_cuda.choose_tiles(1, 2048, 6144, 4, 132) == (8, 256, 5)


# ---- around the call ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", GROUPS)
def test_sums_of_parts_are_added(kind, with_stand_in):
    for depth in (64, 1000, 2048):
        x, weight = operands(kind, 9, depth, 64)
        for dtype in ("float32", "bfloat16"):
            got = jax.jit(lambda *a, d=dtype: quantized._cuda_product(*a, d))(x, weight)
            assert got.dtype == dtype
            check(got, x, weight)


@pytest.mark.parametrize("kind", GROUPS)
def test_vmap_and_derivatives_are_those_of_xla(kind, with_stand_in):
    x, weight = operands(kind, 4, 256, 64)
    batch = jnp.stack([x, 2 * x])
    got = jax.vmap(lambda x: quantized._cuda_product(x, weight, "float32"))(batch)
    check(got[1], 2 * x, weight)

    def loss(product):
        return lambda x: (product(x, weight, "float32") ** 2).sum()

    got = jax.grad(loss(quantized._cuda_product))(x)
    want = jax.grad(loss(lambda *a: quantized._product(*a, has_float8=True)))(x)
    np.testing.assert_allclose(*(np.asarray(g, np.float32) for g in (got, want)), rtol=0.02)


def test_arrays_that_xla_splits():
    run_on_cpus(4, "import test_quantized_cuda as t; t.check_mesh()")


def check_mesh() -> None:
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    ffi.quantized_product = stand_in
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    for kind in GROUPS:
        x, weight = operands(kind, 6, 256, 96)
        for of_x, of_codes, want in (
            (P("a"), P(None, "b"), P("a", "b")),
            (P(), P(None, "a"), P(None, "a")),
            (P(), P(None, ("a", "b")), None),  # 24 columns of a device: no whole vectors
            (P(None, "a"), P("a"), None),  # parts of the depth are gathered
        ):
            split_x = jax.device_put(x, NamedSharding(mesh, of_x))
            split = jax.tree.map(
                lambda a, p=of_codes: jax.device_put(
                    a, NamedSharding(mesh, p if len(a) % 4 == 0 else P(None, *p[1:]))
                ),
                weight,
            )
            call = jax.jit(lambda *a: quantized._cuda_product(*a, "float32"))
            got = call(split_x, split)
            check(got, x, weight)
            if want is not None:
                assert got.sharding.is_equivalent_to(NamedSharding(mesh, want), 2)

        # Inside shard_map it is the device's own matmul.
        mapped = jax.shard_map(
            lambda *a: quantized._cuda_product(*a, "float32"),
            mesh=mesh,
            in_specs=(P("a"), jax.tree.map(lambda _: P(None, "b"), weight)),
            out_specs=P("a", "b"),
        )
        check(jax.jit(mapped)(x, weight), x, weight)


# ---- what the kernel computes ------------------------------------------------------------------

SHAPES = [(64, 16), (200, 80), (1024, 512), (2176, 1040), (4096, 6144)]  # depth, columns


on_gpu = pytest.mark.parametrize(
    "backend", [pytest.param(Backend("gpu"), id="cuda", marks=pytest.mark.cuda)], indirect=True
)


@on_gpu
@pytest.mark.parametrize("num_rows", [1, 8, 64, 65, 256])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", GROUPS)
def test_on_a_gpu(kind, shape, num_rows, backend):
    for dtype, group_size in (("bfloat16", GROUPS[kind]), ("float16", 64), ("bfloat16", 32)):
        x, weight = operands(kind, num_rows, *shape, group_size, dtype)
        before = _core.jit_stats()["quantized_product_launches"]
        call = jax.jit(lambda x, weight: quantized.product(x, weight, jnp.float32))
        wide, again = call(x, weight), call(x, weight)
        own = jax.jit(quantized.product)(x, weight)
        jax.block_until_ready((wide, again, own))
        launches = _core.jit_stats()["quantized_product_launches"] - before
        is_taken = len(weight.scales) > 1 or kind != "e4m3"
        assert (launches >= 2) == is_taken
        check(wide, x, weight)
        check(own, x, weight)
        assert (np.asarray(wide) == np.asarray(again)).all()
        in_xla = jax.jit(lambda *a: quantized._product(*a, jnp.float32, has_float8=True))
        check(in_xla(x, weight), x, weight)


@on_gpu
@pytest.mark.parametrize("num_rows", [1, 9, 64, 65])
@pytest.mark.parametrize("kind", GROUPS)
def test_wgmma_on_hopper(kind, num_rows, backend, monkeypatch):
    if default_target() != "sm_90":
        pytest.skip("needs sm_90")
    monkeypatch.setattr(quantized_cuda, "_fewest_wgmma_rows", 1)
    jax.clear_caches()
    for shape in SHAPES:
        for dtype, group_size in (("bfloat16", GROUPS[kind]), ("float16", 64), ("bfloat16", 32)):
            x, weight = operands(kind, num_rows, *shape, group_size, dtype)
            if len(weight.scales) > 1:
                check(jax.jit(quantized.product)(x, weight), x, weight)
    jax.clear_caches()


@on_gpu
def test_int4_without_zeros_and_with_one_group_on_a_gpu(backend):
    for size, zeros in ((128, False), (1000, True)):
        x, weight = operands("int4", 17, 1000, 272, size, zeros=zeros)
        check(jax.jit(quantized.product)(x, weight), x, weight)
