"""dot_product_attention against jax.nn's and the float64 reference, values and gradients."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import o_bound
from backends import Backend, on_every_backend, on_every_platform
from checking import assert_close_state

import jax_attn as ja
from jax_attn import _core, dense, reference

# batch, T, S, N, K, head_dim
SHAPES = {
    "square": (2, 33, 33, 4, 4, 64),
    "gqa": (2, 40, 40, 8, 2, 32),
    "mqa": (1, 17, 65, 7, 1, 80),
    "more_queries": (2, 50, 20, 4, 2, 64),
    "one_query": (3, 1, 130, 4, 4, 128),
    "one_key": (2, 9, 1, 2, 2, 8),
}
OPTIONS = {
    "full": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "window": {"local_window_size": (3, 2)},
    "window_of_one_number": {"local_window_size": 5},
    "causal_window": {"is_causal": True, "local_window_size": (4, 0)},
    "window_0": {"local_window_size": 0},
}


@pytest.fixture(autouse=True)
def full_precision():
    """A GPU would round the float32 products of jax.nn, the oracle, to TF32."""
    with jax.default_matmul_precision("highest"):
        yield


def arrays(shape, dtype, seed=0):
    b, t, s, n, k, d = shape
    rng = np.random.default_rng(seed)
    shapes = ((b, t, n, d), (b, s, k, d), (b, s, k, d))
    return tuple(rng.normal(size=x).astype(jnp.dtype(dtype)) for x in shapes)


def check(got, arrays, options):
    want = reference.dot_product_attention(*(x.astype(np.float64) for x in arrays), **options)
    plain = reference.dot_product_attention(*arrays, **options)
    got = np.asarray(got)
    assert got.dtype == arrays[0].dtype and got.shape == want.shape
    rows = np.zeros(want.shape[:-1])
    bound = o_bound(want, plain, arrays[0].dtype.name)
    assert_close_state(got, rows, want, rows, bound, np.ones_like(rows))


@on_every_backend
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_values(shape, options, backend):
    for dtype in ("float32", "bfloat16"):
        operands = arrays(shape, dtype)
        check(ja.dot_product_attention(*operands, **options), operands, options)


@on_every_platform
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("shape", ["square", "gqa", "mqa"])
def test_it_is_the_one_of_jax(shape, options, backend):
    q, k, v = arrays(SHAPES[shape], "float32")
    want = jax.nn.dot_product_attention(*map(jnp.asarray, (q, k, v)), **options)
    got = jax.jit(lambda *a: ja.dot_product_attention(*a, **options))(q, k, v)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-5)


@on_every_platform
def test_sequence_lengths(backend):
    operands = arrays((4, 30, 50, 4, 2, 64), "float32")
    for options in (
        {"key_value_seq_lengths": np.array([50, 1, 17, 0])},
        {"query_seq_lengths": np.array([30, 0, 1, 29])},
        {
            "query_seq_lengths": np.array([30, 3, 1, 29]),
            "key_value_seq_lengths": np.array([2, 50, 0, 49]),
            "is_causal": True,
        },
    ):
        check(ja.dot_product_attention(*operands, **options), operands, options)


@on_every_platform
def test_keys_beyond_the_length_may_be_nan(backend):
    q, k, v = arrays((2, 5, 40, 4, 2, 64), "float32")
    lengths = np.array([17, 40])
    want = ja.dot_product_attention(q, k, v, key_value_seq_lengths=lengths)
    k[0, 17:], v[0, 17:] = np.nan, np.nan
    np.testing.assert_array_equal(
        ja.dot_product_attention(q, k, v, key_value_seq_lengths=lengths), want
    )


@on_every_platform
def test_inputs_without_a_batch(backend):
    q, k, v = arrays(SHAPES["gqa"], "bfloat16")
    want = ja.dot_product_attention(q, k, v, is_causal=True)
    for b in range(2):
        got = ja.dot_product_attention(q[b], k[b], v[b], is_causal=True)
        np.testing.assert_array_equal(got, want[b])


@on_every_platform
def test_empty_inputs(backend):
    for shape in ((0, 5, 5, 2, 2, 8), (2, 0, 5, 2, 2, 8), (2, 5, 0, 2, 2, 8)):
        got = ja.dot_product_attention(*arrays(shape, "float32"))
        assert got.shape == (shape[0], shape[1], 2, 8) and not np.asarray(got).any()


@on_every_platform
def test_the_residual_is_the_lse(backend):
    q, k, v = arrays(SHAPES["gqa"], "float32")
    o, lse = ja.dot_product_attention(q, k, v, is_causal=True, return_residual=True)
    np.testing.assert_array_equal(o, ja.dot_product_attention(q, k, v, is_causal=True))
    for b in range(2):
        visible = reference.visible_keys(40, 40, 0, -1, 0)
        operands = (x[b].astype(np.float64) for x in (q, k, v))
        want = reference.attention_dense(*operands, visible)[1]
        np.testing.assert_allclose(lse[b], want, rtol=1e-5, atol=1e-5)


def gradients(attend, operands, weights, **options):
    """Of a loss of o, and of lse if `attend` returns it."""

    def loss(q, k, v):
        o = attend(q, k, v, **options)
        o, lse = o if isinstance(o, tuple) else (o, 0)
        finite = jnp.where(jnp.isneginf(lse), 0, lse)
        return jnp.sum(weights * o) + jnp.sum(jnp.sin(finite))

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*operands)


@on_every_platform
@pytest.mark.parametrize(
    "shape,options",
    [*(("gqa", name) for name in OPTIONS), *((name, "causal") for name in SHAPES if name != "gqa")],
)
def test_gradients(shape, options, backend, monkeypatch):
    """Against those of the reference in float64: as far off as the reference is in float32."""
    options = OPTIONS[options]
    monkeypatch.setattr(dense, "_BLOCK", 16)  # several blocks, of which the last is shorter
    operands = arrays(SHAPES[shape], "float32")
    weights = np.random.default_rng(5).normal(size=operands[0].shape)
    with jax.enable_x64():
        exact = [jnp.asarray(x, jnp.float64) for x in operands]
        want = gradients(reference.dot_product_attention, exact, weights, **options)
        want = [np.asarray(x) for x in want]
    weights = weights.astype(np.float32)
    plain = gradients(
        reference.dot_product_attention, [*map(jnp.asarray, operands)], weights, **options
    )
    got = gradients(ja.dot_product_attention, operands, weights, **options)
    for name, a, b, c in zip("qkv", got, plain, want, strict=True):
        error, plain_error = np.abs(a - c).max(), np.abs(b - c).max()
        assert error <= 2 * plain_error + 1e-5 * max(1, np.abs(c).max()), name


@on_every_platform
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients_in_16_bits(dtype, backend):
    operands = [jnp.asarray(x) for x in arrays((2, 70, 70, 4, 2, 32), dtype)]
    weights = np.random.default_rng(5).normal(size=operands[0].shape).astype(np.float32)
    with jax.enable_x64():
        exact = [jnp.asarray(x, jnp.float64) for x in operands]
        want = gradients(reference.dot_product_attention, exact, weights, is_causal=True)
        want = [np.asarray(x) for x in want]
    got, plain = (
        gradients(attend, operands, weights, is_causal=True)
        for attend in (ja.dot_product_attention, reference.dot_product_attention)
    )
    for name, a, b, c in zip("qkv", got, plain, want, strict=True):
        assert a.dtype == dtype
        error, plain_error = (np.abs(np.float64(x) - c).max() for x in (a, b))
        # The reference rounds what it returns; ours weights and o, too, ahead of products.
        rounded = float(jnp.finfo(dtype).eps) / 2 * np.abs(c).max()
        assert error <= 2 * plain_error + rounded, name


@on_every_platform
def test_gradients_of_the_residual(backend, monkeypatch):
    monkeypatch.setattr(dense, "_BLOCK", 16)
    operands = arrays((2, 20, 37, 4, 2, 32), "float32")

    def plain(q, k, v):
        states = [
            reference.attention_dense(*x, reference.visible_keys(20, 37, 0, 5, 0))
            for x in zip(q, k, v, strict=True)
        ]
        return tuple(jnp.stack(x) for x in zip(*states, strict=True))

    attend = functools.partial(
        ja.dot_product_attention, is_causal=True, local_window_size=(5, 0), return_residual=True
    )
    got, want = (gradients(f, [*map(jnp.asarray, operands)], 0.3) for f in (attend, plain))
    for name, a, b in zip("qkv", got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=name)


@on_every_platform
def test_what_lies_beyond_the_lengths_has_no_part_in_gradients(backend):
    q, k, v = arrays((2, 9, 20, 2, 2, 16), "float32")
    lengths = {"query_seq_lengths": [9, 4], "key_value_seq_lengths": [20, 7]}
    weights = np.float32(1)
    want = gradients(ja.dot_product_attention, (q, k, v), weights, **lengths)
    for x, length in ((q, 4), (k, 7), (v, 7)):
        x[1, length:] = np.nan
    got = gradients(ja.dot_product_attention, (q, k, v), weights, **lengths)
    for name, a, b, length in zip("qkv", got, want, (4, 7, 7), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6, err_msg=name)
        assert not np.asarray(a[1, length:]).any()


def test_memory_of_a_backward_pass_is_linear():
    """Logits of 4,096 x 4,096 would be 67 MB a head."""
    x = jax.ShapeDtypeStruct((1, 4096, 2, 64), jnp.float32)
    loss = lambda *qkv: ja.dot_product_attention(*qkv, is_causal=True).sum()  # noqa: E731
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(x, x, x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 67e6


@on_every_platform
def test_second_derivatives(backend):
    q, k, v = (jnp.asarray(x) for x in arrays((1, 3, 4, 2, 1, 8), "float32"))

    def slope(attend):
        loss = lambda k: jnp.sum(jnp.sin(attend(q, k, v, is_causal=True)))  # noqa: E731
        return jax.grad(lambda k: jnp.sum(jax.grad(loss)(k) ** 2))(k)

    got, want = slope(ja.dot_product_attention), slope(reference.dot_product_attention)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@on_every_platform
@pytest.mark.parametrize("options", [{}, {"key_value_seq_lengths": [20, 7]}], ids=["", "lengths"])
def test_vmap(options, backend):
    """A mapped axis joins the batch; so does one of gradients."""
    q, k, v = (np.stack([x, 2 * x, x - 1]) for x in arrays((2, 9, 20, 4, 2, 16), "float32"))
    attend = functools.partial(ja.dot_product_attention, **options)
    shared_k = jax.vmap(attend, in_axes=(0, None, 0))(q, k[0], v)
    slope = jax.grad(lambda *qkv: attend(*qkv).sum(), argnums=(0, 1, 2))
    slopes = jax.jit(jax.vmap(slope))(q, k, v)
    for i in range(3):
        np.testing.assert_allclose(shared_k[i], attend(q[i], k[0], v[i]), rtol=1e-5, atol=1e-6)
        for name, a, b in zip("qkv", slopes, jax.jit(slope)(q[i], k[i], v[i]), strict=True):
            np.testing.assert_allclose(a[i], b, rtol=1e-5, atol=1e-6, err_msg=name)


@on_every_platform
def test_gradients_of_rows_that_see_nothing_are_zero(backend):
    q, k, v = (jnp.asarray(x) for x in arrays((2, 6, 9, 2, 2, 16), "float32"))
    lengths = {"query_seq_lengths": np.array([6, 3]), "key_value_seq_lengths": np.array([0, 5])}

    got, want = (
        gradients(attend, (q, k, v), 0.7, **lengths)
        for attend in (ja.dot_product_attention, reference.dot_product_attention)
    )
    for name, a, b in zip("qkv", got, want, strict=True):
        assert np.isfinite(a).all() and not np.asarray(a[0]).any(), name
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=name)


ON_CPU = pytest.mark.parametrize(
    "backend",
    [pytest.param(Backend("cpu", isa), id=isa) for isa in _core.supported_cpu_isas()],
    indirect=True,
)


@ON_CPU
@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"local_window_size": (30, 2)}], ids=str
)
@pytest.mark.parametrize("shape", ["gqa", "more_queries", "one_query", "one_key"])
def test_bias_and_mask(shape, options, backend):
    """Every broadcast shape, alone and together, with lengths."""
    for dtype in ("float32", "bfloat16"):
        q, k, v = operands = arrays(SHAPES[shape], dtype)
        full = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
        rng = np.random.default_rng(0)
        for i, axes in enumerate(itertools.product((False, True), repeat=4)):
            broadcast = tuple(n if keeps else 1 for n, keeps in zip(full, axes, strict=True))
            bias = rng.normal(size=broadcast).astype((np.float32, jnp.bfloat16, np.float16)[i % 3])
            mask = rng.random(broadcast[::-1] if i == 0 else broadcast) < 0.8
            lengths = {"key_value_seq_lengths": np.arange(full[0]) * 7 % (full[3] + 1)}
            given = ({"bias": bias}, {"mask": mask}, {"bias": bias, "mask": mask} | lengths)[i % 3]
            got = ja.dot_product_attention(*operands, **given, **options)
            check(got, operands, given | options)


@ON_CPU
def test_bias_and_mask_without_a_batch(backend):
    q, k, v = (x[0] for x in arrays(SHAPES["gqa"], "float32"))
    rng = np.random.default_rng(0)
    bias, mask = rng.normal(size=(8, 40, 40)), rng.random((1, 40, 40)) < 0.5
    want = reference.dot_product_attention(q, k, v, bias, mask)
    got = jax.jit(ja.dot_product_attention)(q, k, v, bias.astype(np.float32), mask)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@ON_CPU
def test_bias_and_mask_that_do_not_fit(backend):
    q, k, v = arrays(SHAPES["gqa"], "float32")
    for name, value in (
        ("bias", np.zeros((1, 1, 40, 39), np.float32)),
        ("bias", np.zeros((40, 40), np.float32)),
        ("bias", np.zeros((1, 1, 40, 40), np.int32)),
        ("mask", np.zeros((1, 2, 40, 40), bool)),
        ("mask", np.zeros((1, 1, 40, 40), np.float32)),
    ):
        with pytest.raises(ValueError, match=f"dot_product_attention: {name}: expected .* got"):
            ja.dot_product_attention(q, k, v, **{name: value})
    bias = np.zeros((1, 1, 40, 40), np.float32)
    with pytest.raises(NotImplementedError, match="attention: gradients"):
        jax.grad(lambda q: ja.dot_product_attention(q, k, v, bias).sum())(q)
    with pytest.raises(NotImplementedError, match="attention: vmap"):
        jax.vmap(lambda q: ja.dot_product_attention(q, k, v, bias))(q[None])


@on_every_platform
def test_what_is_not_supported_says_so(backend):
    q, k, v = arrays(SHAPES["gqa"], "float32")
    for name, value in (("implementation", "cudnn"),):
        with pytest.raises(NotImplementedError, match=f"dot_product_attention: {name}"):
            ja.dot_product_attention(q, k, v, **{name: value})
    with pytest.raises(NotImplementedError, match="key_value_seq_lengths.*host"):
        jax.jit(lambda n: ja.dot_product_attention(q, k, v, key_value_seq_lengths=n))(
            np.array([1, 2])
        )
    with pytest.raises(ValueError, match="query, key, value: expected .* got"):
        ja.dot_product_attention(q, k[:1], v[:1])
