"""dot_product_attention against jax.nn's and the float64 reference, values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import o_bound
from backends import on_every_backend, on_every_platform
from checking import assert_close_state

import jax_attn as ja
from jax_attn import reference

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


@on_every_platform
@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True, "scale": 0.2}, {"local_window_size": (3, 1)}], ids=str
)
def test_gradients(options, backend):
    q, k, v = (jnp.asarray(x) for x in arrays((2, 20, 20, 4, 2, 32), "float32"))
    weights = jnp.asarray(np.random.default_rng(5).normal(size=q.shape), jnp.float32)

    def gradients(attend):
        loss = lambda *qkv: jnp.sum(weights * attend(*qkv, **options))  # noqa: E731
        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v)

    got = gradients(ja.dot_product_attention)
    for name, a, b in zip("qkv", got, gradients(jax.nn.dot_product_attention), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=name)


@on_every_platform
def test_gradients_of_rows_that_see_nothing_are_zero(backend):
    q, k, v = (jnp.asarray(x) for x in arrays((2, 6, 9, 2, 2, 16), "float32"))
    lengths = {"query_seq_lengths": np.array([6, 3]), "key_value_seq_lengths": np.array([0, 5])}

    def gradients(attend):
        loss = lambda *qkv: jnp.sum(jnp.sin(attend(*qkv, **lengths)))  # noqa: E731
        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v)

    got, want = gradients(ja.dot_product_attention), gradients(reference.dot_product_attention)
    for name, a, b in zip("qkv", got, want, strict=True):
        assert np.isfinite(a).all() and not np.asarray(a[0]).any(), name
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=name)


@on_every_platform
def test_what_is_not_supported_says_so(backend):
    q, k, v = arrays(SHAPES["gqa"], "float32")
    for name, value in (
        ("bias", np.zeros((1, 1, 40, 40), np.float32)),
        ("mask", np.ones((1, 1, 40, 40), bool)),
        ("implementation", "cudnn"),
    ):
        with pytest.raises(NotImplementedError, match=f"dot_product_attention: {name}"):
            ja.dot_product_attention(q, k, v, **{name: value})
    with pytest.raises(NotImplementedError, match="key_value_seq_lengths.*host"):
        jax.jit(lambda n: ja.dot_product_attention(q, k, v, key_value_seq_lengths=n))(
            np.array([1, 2])
        )
    with pytest.raises(NotImplementedError, match="vmap"):
        jax.vmap(ja.dot_product_attention)(*(np.stack([x, x]) for x in (q, k, v)))
    with pytest.raises(ValueError, match="query, key, value: expected .* got"):
        ja.dot_product_attention(q, k[:1], v[:1])
