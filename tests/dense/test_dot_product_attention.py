"""dot_product_attention against jax.nn's and the float64 reference, values and gradients."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_attn as ja
from helpers.attention_cases import o_bound
from helpers.backends import Backend, on_every_backend, on_every_platform
from helpers.checking import assert_close_state
from jax_attn import _core, reference
from jax_attn._dense import blocks_jnp

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


def expect(arrays, options):
    """The truth, and the bound of each row."""
    want = reference.dot_product_attention(*(x.astype(np.float64) for x in arrays), **options)
    plain = reference.dot_product_attention(*arrays, **options)
    return want, o_bound(want, plain, arrays[0].dtype.name)


def check(got, arrays, options, expected=None):
    want, bound = expected or expect(arrays, options)
    got = np.asarray(got)
    assert got.dtype == arrays[0].dtype and got.shape == want.shape
    rows = np.zeros(want.shape[:-1])
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
    """Gradients of a loss of o, and of lse if `attend` returns it."""

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
    """Against float64 gradients of the reference: no further off than its float32 ones."""
    options = OPTIONS[options]
    monkeypatch.setattr(blocks_jnp, "_BLOCK", 16)  # several blocks; the last is shorter
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
        # The reference rounds its results; ours also rounds weights and o before matmuls.
        rounded = float(jnp.finfo(dtype).eps) / 2 * np.abs(c).max()
        assert error <= 2 * plain_error + rounded, name


@on_every_platform
def test_gradients_of_the_residual(backend, monkeypatch):
    monkeypatch.setattr(blocks_jnp, "_BLOCK", 16)
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
            # XLA may sum o * d_o in another order if there are more rows.
            np.testing.assert_allclose(a[i], b, rtol=1e-5, atol=4e-6, err_msg=name)


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


MASKED = [{}, {"is_causal": True}, {"local_window_size": (30, 2)}]


@functools.lru_cache(maxsize=1)
def biased_and_masked(shape, which):
    """Operands and options of one shape and MASKED[which], and the results for all backends.

    Covers every broadcast shape of a bias, of a mask, and of both with lengths. The two dtypes
    alternate: each has every pair of axes that broadcast or not, and MASKED together has all of
    them.
    """
    calls = []
    for dtype, axes in itertools.product(
        ("float32", "bfloat16"), itertools.product((False, True), repeat=4)
    ):
        if (sum(axes) + (dtype == "bfloat16") + which) % 2:
            continue
        q, k, v = operands = arrays(SHAPES[shape], dtype)
        full = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
        i = len(calls)
        rng = np.random.default_rng(i)
        broadcast = tuple(n if keeps else 1 for n, keeps in zip(full, axes, strict=True))
        bias = rng.normal(size=broadcast).astype((np.float32, jnp.bfloat16, np.float16)[i % 3])
        mask = rng.random(broadcast) < 0.8
        lengths = {"key_value_seq_lengths": np.arange(full[0]) * 7 % (full[3] + 1)}
        given = ({"bias": bias}, {"mask": mask}, {"bias": bias, "mask": mask} | lengths)[i % 3]
        options = given | MASKED[which]
        calls.append((operands, options, expect(operands, options)))
    return calls


@ON_CPU
@pytest.mark.parametrize("which", range(len(MASKED)), ids=map(str, MASKED))
@pytest.mark.parametrize("shape", ["gqa", "more_queries", "one_query", "one_key"])
def test_bias_and_mask(shape, which, backend):
    """Every broadcast shape, alone and together, with lengths."""
    for operands, options, expected in biased_and_masked(shape, which):
        check(ja.dot_product_attention(*operands, **options), operands, options, expected)


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
        ("bias", np.zeros((1, 1, 1, 40, 40), np.float32)),
        ("bias", np.zeros((1, 1, 40, 40), bool)),
        ("mask", np.zeros((1, 2, 40, 40), bool)),
        ("mask", np.zeros((1, 1, 40, 40), np.float32)),
    ):
        with pytest.raises(ValueError, match=f"dot_product_attention: {name}: expected .* got"):
            ja.dot_product_attention(q, k, v, **{name: value})


# Further calls of jax.nn's own tests and of Flax's layers: (arguments of the call, names of traced
# arguments, or None: all are).
BIASES = {
    "full": (2, 8, 40, 40),
    "of_heads": (8, 40, 40),
    "of_keys": (2, 1, 1, 40),
    "of_rows": (40, 1),
}


def asked(shape=None, *, seed=0, **options):
    """Arguments by name: a bias of the given shape, and the options."""
    rng = np.random.default_rng(seed)
    given = {} if shape is None else {"bias": rng.normal(size=shape).astype(np.float32)}
    return given | options


def some_mask(*shape):
    mask = np.random.default_rng(3).random(shape) < 0.7
    mask[..., 0] = True  # jax.nn has other values where a row sees no key
    return mask


ASKED = {
    **{f"bias_{name}": asked(shape) for name, shape in BIASES.items()},
    "bias_causal": asked((1, 8, 40, 40), is_causal=True),
    "bias_of_whole_numbers": {"bias": np.arange(40).reshape(1, 1, 1, 40) % 3},
    "bias_in_bfloat16": {"bias": asked((1, 8, 40, 40))["bias"].astype(jnp.bfloat16)},
    "mask": asked(mask=some_mask(2, 1, 40, 40)),
    "mask_of_keys": asked(mask=some_mask(40)),
    "mask_and_lengths": asked(
        mask=some_mask(1, 8, 40, 40),
        query_seq_lengths=np.int32([40, 7]),
        key_value_seq_lengths=np.int32([33, 40]),
    ),
    "all": asked(
        (2, 8, 40, 40),
        mask=some_mask(2, 8, 1, 40),
        scale=np.float32(0.3),
        local_window_size=(39, 4),
        key_value_seq_lengths=np.int32([40, 12]),
    ),
    "lengths": asked(
        query_seq_lengths=np.int32([40, 7]), key_value_seq_lengths=np.int32([3, 39]), is_causal=True
    ),
    "scale": asked(scale=np.float32(-0.7)),
}
STATIC = ("is_causal", "local_window_size")


def asked_for(name):
    """q, k, v, traced arguments, static ones, and weights of the rows.

    The weights are 0 for rows for which jax.nn has other values.
    """
    q, k, v = (jnp.asarray(x) for x in arrays(SHAPES["gqa"], "float32", seed=1))
    given = ASKED[name]
    static = {n: x for n, x in given.items() if n in STATIC}
    traced = {n: jnp.asarray(x) for n, x in given.items() if n not in STATIC}
    weights = np.random.default_rng(5).normal(size=q.shape).astype(np.float32)
    lengths = given.get("query_seq_lengths", np.int32([40, 40]))
    weights *= (np.arange(40) < lengths[:, None])[..., None, None]
    return (q, k, v), traced, static, weights


def varying(traced):
    return tuple(n for n in ("bias", "scale") if n in traced and traced[n].dtype.kind != "i")


@on_every_platform
@pytest.mark.parametrize("name", ASKED)
def test_what_jax_nn_takes(name, backend, monkeypatch):
    """Traced: values, and gradients of all differentiable arguments."""
    monkeypatch.setattr(blocks_jnp, "_BLOCK", 24)
    qkv, traced, static, weights = asked_for(name)

    def run(attend):
        def loss(qkv, floats):
            o = attend(*qkv, **rest, **floats, **static)
            return jnp.sum(weights * o), o

        floats = {n: traced[n] for n in varying(traced)}
        rest = {n: x for n, x in traced.items() if n not in floats}

        def all_of_it(qkv, floats, traced):
            nonlocal rest
            rest = traced
            return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(qkv, floats)

        ((_, o), slopes) = jax.jit(all_of_it)(qkv, floats, rest)
        return jnp.where(weights != 0, o, 0), slopes

    got, want = run(ja.dot_product_attention), run(jax.nn.dot_product_attention)
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape, path
        tolerance = 3e-2 if a.dtype == jnp.bfloat16 else 2e-5
        a, b = np.float32(a), np.float32(b)
        largest = max(1, np.abs(b).max())
        if path[-1] == jax.tree_util.DictKey("scale"):
            # Products q * dq / scale nearly cancel in the sum: half a unit in the last place of
            # their magnitudes.
            (dq, *_), _ = want[1]
            terms = np.abs(np.float32(qkv[0]) * np.float32(dq) / np.float32(traced["scale"]))
            largest = max(largest, terms.sum() * 2**-24 / tolerance)
        np.testing.assert_allclose(
            a, b, rtol=tolerance, atol=tolerance * largest, err_msg=str(path)
        )


@on_every_platform
def test_tangents(backend, monkeypatch):
    """jax.jvp, and both orders of second derivatives."""
    monkeypatch.setattr(blocks_jnp, "_BLOCK", 24)
    qkv, traced, static, weights = asked_for("all")
    rest = {n: x for n, x in traced.items() if n not in ("bias", "scale")}
    at = (*qkv, traced["bias"], traced["scale"])
    rng = np.random.default_rng(7)
    along = tuple(jnp.asarray(rng.normal(size=x.shape), x.dtype) for x in at)

    def run(attend):
        def loss(q, k, v, bias, scale):
            o = attend(q, k, v, bias, scale=scale, **rest, **static)
            return jnp.sum(weights * jnp.sin(o))

        tangent = lambda *at: jax.jvp(loss, at, along)[1]  # noqa: E731
        forward_over_reverse = jax.jvp(jax.grad(loss, argnums=(0, 1, 2, 3, 4)), at, along)[1]
        return tangent(*at), forward_over_reverse, jax.grad(tangent, argnums=(0, 1, 2, 3, 4))(*at)

    got, want = (
        jax.jit(run, static_argnums=0)(ja.dot_product_attention),
        run(jax.nn.dot_product_attention),
    )
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * max(1, float(np.abs(b).max())))


@on_every_platform
@pytest.mark.parametrize(
    "of_bias,batch", [(None, 1), (None, 2), (0, 1)], ids=["bias_of_all", "bias", "bias_of_each"]
)
def test_vmap_of_bias_mask_lengths_and_scale(of_bias, batch, backend):
    """Inside and outside of gradients. A bias that the whole batch shares is not repeated."""
    q, k, v = (np.stack([x, 2 * x, x - 1]) for x in arrays((2, 9, 20, 4, 2, 16), "float32"))
    rng = np.random.default_rng(0)
    bias = rng.normal(size=(3, batch, 4, 9, 20)).astype(np.float32)
    mask = rng.random((3, 1, 1, 9, 20)) < 0.8
    lengths, scale = np.int32([[20, 3], [1, 9], [0, 20]]), np.float32([0.2, 0.5, 0.7])
    bias = bias if of_bias == 0 else bias[0]
    axes = (0, 0, 0, of_bias, 0, 0, 0)
    operands = q, k, v, bias, mask, lengths, scale

    def attend(q, k, v, bias, mask, lengths, scale):
        o, lse = ja.dot_product_attention(
            q, k, v, bias, mask, key_value_seq_lengths=lengths, scale=scale, return_residual=True
        )
        return jnp.sin(o).sum() + jnp.where(jnp.isneginf(lse), 0, lse).sum()

    of = (0, 1, 2, 3, 6)
    each = [
        jax.jit(jax.value_and_grad(attend, of))(
            *(x if axis is None else x[i] for x, axis in zip(operands, axes, strict=True))
        )
        for i in range(3)
    ]
    want = jax.tree.map(lambda *x: jnp.stack(x), *each)
    inside = jax.jit(jax.vmap(jax.value_and_grad(attend, of), axes))(*operands)
    outside = jax.jit(jax.grad(lambda *x: jax.vmap(attend, axes)(*x).sum(), of))(*operands)
    for a, b in zip(jax.tree.leaves(inside), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    for i, a, b in zip(of, outside, want[1], strict=True):
        b = b.sum(axis=0) if axes[i] is None else b
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@on_every_platform
def test_checkpoint(backend):
    qkv, traced, _, weights = asked_for("bias_full")
    loss = lambda *x: jnp.sum(weights * ja.dot_product_attention(*x))  # noqa: E731
    of = (0, 1, 2, 3)
    got, want = (
        jax.jit(jax.grad(f, of))(*qkv, traced["bias"]) for f in (jax.checkpoint(loss), loss)
    )
    # On a GPU XLA times matmul algorithms and may pick another one each time.
    atol = 1e-6 if backend.platform == "gpu" else 0
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=atol)


def test_gradients_of_a_bias_have_the_same_bits_again():
    qkv, traced, _, weights = asked_for("bias_of_keys")
    slope = jax.jit(
        jax.grad(lambda *x: jnp.sum(weights * ja.dot_product_attention(*x)), argnums=(0, 1, 2, 3))
    )
    for a, b in zip(slope(*qkv, traced["bias"]), slope(*qkv, traced["bias"]), strict=True):
        np.testing.assert_array_equal(a, b)


@on_every_platform
def test_keys_that_a_mask_hides_from_all_may_be_nan(backend):
    q, k, v = arrays((2, 9, 20, 4, 2, 16), "float32")
    mask = np.ones((2, 1, 1, 20), bool)
    mask[1, ..., 7:] = False
    bias = np.zeros((2, 1, 1, 20), np.float32)
    slope = jax.jit(
        jax.grad(lambda *x: jnp.sin(ja.dot_product_attention(*x, mask)).sum(), (0, 1, 2, 3))
    )
    want = slope(q, k, v, bias)
    k[1, 7:], v[1, 7:], bias[1, ..., 7:] = np.nan, np.nan, np.nan
    for a, b in zip(slope(q, k, v, bias), want, strict=True):
        np.testing.assert_array_equal(a, b)


@on_every_platform
def test_any_head_dim(backend):
    for head_dim in (1, 20, 250, 264, 512):
        operands = [jnp.asarray(x) for x in arrays((2, 9, 17, 4, 2, head_dim), "float32")]
        got, want = (
            jax.jit(jax.value_and_grad(lambda *x, f=f: jnp.sin(f(*x)).sum(), (0, 1, 2)))(*operands)
            for f in (ja.dot_product_attention, jax.nn.dot_product_attention)
        )
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert a.shape == b.shape
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    operands = arrays((1, 4, 4, 2, 2, 520), "float32")
    with pytest.raises(NotImplementedError, match="product_attention: head_dim: up to 512"):
        ja.dot_product_attention(*operands)


def test_implementations_of_jax_nn():
    operands = [jnp.asarray(x) for x in arrays((2, 9, 17, 4, 2, 264), "bfloat16")]
    got, want = (
        f(*operands, bias=jnp.zeros((1, 1, 9, 17)), implementation="xla", return_residual=True)
        for f in (ja.dot_product_attention, jax.nn.dot_product_attention)
    )
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(RuntimeError, match="cuDNN"):  # jax.nn's message without cuDNN
        ja.dot_product_attention(*operands, implementation="cudnn")


@on_every_platform
def test_lse_in_another_dtype(backend):
    """In that of query, as jax.nn's, or not rounded; its cotangents have that dtype."""
    operands = [jnp.asarray(x) for x in arrays(SHAPES["gqa"], "bfloat16")]
    attend = functools.partial(ja.dot_product_attention, return_residual=True)
    (o, lse), pull = jax.vjp(attend, *operands)
    exact, pull_exact = jax.vjp(lambda *x: attend(*x, residual_dtype="float32"), *operands)
    assert (o.dtype, lse.dtype, exact[1].dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    np.testing.assert_array_equal(lse, exact[1].astype(jnp.bfloat16))
    along = jnp.asarray(np.random.default_rng(5).normal(size=lse.shape), jnp.bfloat16)
    got, want = pull((o, along)), pull_exact((o, along.astype(jnp.float32)))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


def capped(q, k, v, bias=None, scale=0.3, soft_cap=2.0):
    """Attention as Gemma 2 has it: the soft cap, then the bias and the mask."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    logits = scale * jnp.einsum("btnd,bsnd->bnts", q, k)
    logits = soft_cap * jnp.tanh(logits / soft_cap)
    logits = logits if bias is None else logits + bias
    i, j = np.arange(q.shape[1])[:, None], np.arange(k.shape[1])
    logits = jnp.where((j <= i) & (j >= i - 9), logits, -jnp.inf)
    return jnp.einsum("bnts,bsnd->btnd", jax.nn.softmax(logits, axis=-1), v)


@on_every_platform
@pytest.mark.parametrize("more", [(), ("bias",), ("scale",), ("bias", "scale")], ids=str)
def test_soft_cap(more, backend, monkeypatch):
    """Values, gradients and tangents of a layer with a soft cap and a window."""
    monkeypatch.setattr(blocks_jnp, "_BLOCK", 16)
    q, k, v = (jnp.asarray(3 * x) for x in arrays(SHAPES["gqa"], "float32"))
    given = {"bias": jnp.asarray(asked((1, 8, 1, 40))["bias"]), "scale": jnp.float32(0.3)}
    given = {name: given[name] for name in more}

    def ours(q, k, v, given):
        options = {"scale": 0.3} | given
        return ja.dot_product_attention(
            q, k, v, **options, is_causal=True, local_window_size=(9, 0), logits_soft_cap=2.0
        )

    def run(attend):
        def loss(q, k, v, given):
            o = attend(q, k, v, given)
            return jnp.sum(jnp.sin(o)), o

        at = (q, k, v, given)
        found = jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True)(*at)
        return found, jax.jvp(lambda *x: loss(*x)[0], at, at)[1]

    got = jax.jit(run, static_argnums=0)(ours)
    want = jax.jit(run, static_argnums=0)(lambda q, k, v, given: capped(q, k, v, **given))
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        largest = max(1, float(np.abs(b).max()))
        # The loss and its tangent are sums over all of o. Their errors add up as a random walk.
        terms = q.size if np.ndim(b) == 0 else 1
        atol = 2e-5 * largest * terms**0.5
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=atol, err_msg=str(path))


def test_a_program_may_put_it_in_the_place_of_jax_nn(monkeypatch):
    operands = [jnp.asarray(x) for x in arrays(SHAPES["gqa"], "float32")]
    want = jax.nn.dot_product_attention(*operands)
    monkeypatch.setattr(jax.nn, "dot_product_attention", ja.dot_product_attention)
    got = jax.nn.dot_product_attention(*operands, implementation="xla")
    np.testing.assert_array_equal(got, want)


def test_constants_at_compile_time():
    operands = [jnp.asarray(x) for x in arrays(SHAPES["gqa"], "float32")]

    @jax.jit
    def program(x):
        with jax.ensure_compile_time_eval():
            o = ja.dot_product_attention(*operands, is_causal=True)
            merged = ja.merge_state(o[0], o[0, ..., 0], o[1], o[1, ..., 0])[0]
        assert not isinstance(merged, jax.core.Tracer)
        return x + o

    want = 1 + ja.dot_product_attention(*operands, is_causal=True)
    np.testing.assert_allclose(program(jnp.float32(1)), want, rtol=1e-6)


def test_memory_with_a_bias_of_keys_is_linear():
    x = jax.ShapeDtypeStruct((1, 4096, 2, 64), jnp.float32)
    bias = jax.ShapeDtypeStruct((1, 1, 1, 4096), jnp.float32)
    loss = lambda *x: ja.dot_product_attention(*x, is_causal=True).sum()  # noqa: E731
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).lower(x, x, x, bias).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 67e6


@on_every_platform
def test_what_is_not_supported_says_so(backend):
    q, k, v = arrays(SHAPES["gqa"], "float32")
    attend = ja.dot_product_attention
    for call, match in (
        (lambda: attend(q, k, v, implementation="flash"), 'implementation: expected None, "xla"'),
        (lambda: attend(q, k[:1], v[:1]), "query, key, value: expected .* got"),
        (
            lambda: jax.jit(lambda n: attend(q, k, v, key_value_seq_lengths=n))(np.zeros(3, int)),
            r"key_value_seq_lengths: expected 2 whole numbers in \[0, 40\]",
        ),
        (lambda: jax.jit(lambda x: attend(q, k, v, scale=x))(np.ones(2)), "scale: expected a num"),
        (lambda: attend(q, k, v, logits_soft_cap=-1), "logits_soft_cap: expected None or a finite"),
        (
            lambda: attend(q, k, v, logits_soft_cap=1, implementation="xla"),
            "logits_soft_cap: expected None with implementation",
        ),
    ):
        with pytest.raises(ValueError, match=f"dot_product_attention: {match}"):
            call()
