"""Matmuls with weights in panels, on every instruction set of this machine."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import model_cases
from jax_attn import _environment, models
from jax_attn._xla import ffi
from jax_attn.models._products.panels import KERNEL_ACTIVATIONS, Panels, to_panels
from jax_attn.models._products.quantized import product

DTYPES = ("float32", "bfloat16", "float16")
# in, out: one element, partial and whole panels, and depths that a tile does not divide.
SHAPES = [(1, 1), (33, 40), (64, 32), (100, 257), (1024, 130)]
ROWS = (1, 2, 3, 4, 6, 7, 12, 13, 16, 17, 32, 33, 70)


def operands(dtype, depth, columns, num_rows):
    rng = np.random.default_rng(depth + columns)
    x, w = (rng.standard_normal(s, np.float32) for s in ((num_rows, depth), (depth, columns)))
    return jnp.asarray(x, dtype), jnp.asarray(w * depth**-0.5, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_is_the_product(dtype, shape, isa):
    x, w = operands(dtype, *shape, 37)
    with _environment.poisoned():
        wide = np.asarray(to_panels(w).product(x, jnp.float32))
        own = to_panels(w).product(x, None)
    expected = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    np.testing.assert_allclose(wide, expected, atol=2e-5, rtol=2e-5)
    assert own.dtype == dtype
    assert (np.asarray(own) == np.asarray(jnp.asarray(wide, dtype))).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_a_row_do_not_depend_on_the_others(dtype, isa):
    x, w = operands(dtype, 1000, 200, max(ROWS))
    panels = to_panels(w)
    whole = np.asarray(panels.product(x, jnp.float32))
    for n in ROWS:
        for begin in (0, len(x) - n):
            got = np.asarray(panels.product(x[begin : begin + n], jnp.float32))
            assert (got == whole[begin : begin + n]).all(), n


def test_nan_stays_in_its_row_and_column(isa):
    for dtype in DTYPES:
        x, w = operands(dtype, 70, 50, 5)
        x, w = x.at[3, 69].set(jnp.nan), w.at[0, 49].set(jnp.nan)
        got = np.isnan(np.asarray(to_panels(w).product(x, jnp.float32)))
        expected = np.zeros((5, 50), bool)
        expected[3], expected[:, 49] = True, True
        assert (got == expected).all()


ENDS = {
    None: lambda x: x,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "relu": jax.nn.relu,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ENDS)
def test_bias_and_activation_are_computed_before_rounding(dtype, activation, isa):
    assert {*ENDS} == {None, *KERNEL_ACTIVATIONS}
    x, w = operands(dtype, 100, 257, 37)
    bias = jnp.asarray(np.random.default_rng(0).standard_normal(257, np.float32), dtype)
    panels = to_panels(w)
    wide = panels.product(x, jnp.float32)
    for added, sums in ((None, wide), (bias, wide + bias.astype(jnp.float32))):
        with _environment.poisoned():
            got = panels.product(x, jnp.float32, added, activation)
            own = panels.product(x, None, added, activation)
        np.testing.assert_allclose(got, ENDS[activation](sums), atol=1e-6, rtol=1e-5)
        assert own.dtype == dtype
        assert (np.asarray(own) == np.asarray(got.astype(dtype))).all()


def test_nan_is_no_number_behind_an_activation(isa):
    x, w = operands("float32", 8, 40, 2)
    for activation in ENDS:
        got = to_panels(w).product(x.at[1].set(jnp.nan), None, None, activation)
        assert np.isnan(got).any(1).tolist() == [False, True]
        assert np.isnan(got[1]).all()


def test_no_rows():
    _, w = operands("float32", 33, 40, 1)
    assert to_panels(w).product(jnp.zeros((0, 33)), None).shape == (0, 40)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transposed", [False, True])
def test_columns_are_those_of_the_matrix(dtype, transposed):
    _, w = operands(dtype, 33, 40, 1)
    panels = to_panels(w.T if transposed else w, transposed=transposed)
    assert panels.shape == w.shape and panels.dtype == w.dtype
    which = jnp.array([39, 0, 31, 32, 0])
    assert (np.asarray(panels.columns(which)) == np.asarray(w.T[which])).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_are_those_of_the_matrix(dtype, transposed):
    """Packed inside of the differentiated function, as a trainer does."""
    x, w = operands(dtype, 33, 40, 5)
    wanted, _ = operands("float32", 40, 1, 5)
    matrix = w.T if transposed else w

    def packed(x, matrix):
        return to_panels(matrix, transposed=transposed).product(x, jnp.float32)

    def plain(x, matrix):
        w = matrix.T if transposed else matrix
        return jnp.dot(x, w, preferred_element_type=jnp.float32)

    found, expected = (
        jax.jit(jax.grad(lambda *args, of=of: jnp.vdot(wanted, of(*args)), argnums=(0, 1)))(
            x, matrix
        )
        for of in (packed, plain)
    )
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == dtype and (np.asarray(a) == np.asarray(b)).all()


@pytest.mark.parametrize("activation", ENDS)
def test_gradients_behind_a_bias_and_an_activation(activation):
    x, w = operands("float32", 33, 40, 5)
    bias = jnp.asarray(np.random.default_rng(0).standard_normal(40, np.float32))

    def packed(*args):
        x, w, bias = args
        return to_panels(w).product(x, None, bias, activation).var()

    def plain(*args):
        x, w, bias = args
        return ENDS[activation](x @ w + bias).var()

    found, expected = (jax.jit(jax.grad(of, (0, 1, 2)))(x, w, bias) for of in (packed, plain))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6, rtol=1e-5)


def test_operands_that_do_not_fit_are_refused():
    x, w = operands("bfloat16", 64, 40, 2)
    panels = to_panels(w).panels
    for got in (
        lambda: ffi.product(x[:, :32], panels, 40, "float32"),
        lambda: ffi.product(x, panels, 65, "float32"),
        lambda: ffi.product(x.astype(jnp.float32), panels, 40, "float32"),
        lambda: ffi.product(x, panels, 40, "float16"),
        lambda: ffi.product(x.astype(jnp.int32), panels, 40, "float32"),
        lambda: ffi.product(x[None], panels, 40, "float32"),
        lambda: ffi.product(x, panels, 40, "float32", jnp.zeros(39, x.dtype)),
        lambda: ffi.product(x, panels, 40, "float32", jnp.zeros(40)),
        lambda: ffi.product(x, panels, 40, "float32", None, len(KERNEL_ACTIVATIONS) + 1),
    ):
        with pytest.raises(Exception, match="product: .*expected"):
            jax.block_until_ready(got())
    with pytest.raises(Exception, match=r"got bfloat16\[1, 2, 64\] and bfloat16\[1, 40\]"):
        jax.block_until_ready(ffi.product(x[None], panels, 40, "bfloat16"))


@pytest.mark.parametrize("name", sorted(model_cases.CONFIGS))
def test_models_of_weights_in_panels(name):
    """Every family has the same logits; matrices that are multiplied as stored are in panels."""
    config = models.parse_config(model_cases.CONFIGS[name])
    params = models.random_params(config, jax.random.key(0), "float32")
    packed = models.pack_params(params, config)
    assert isinstance(packed["embed"], Panels) == config.tie_embeddings
    first = packed["layers"][0]
    # mixed_o: of a layer with a state. Layers of experts alone have a shared expert.
    name = next(each for each in ("o", "mixed_o", "down", "shared_down") if each in first)
    assert isinstance(first[name], Panels)
    again = models.pack_params(packed, config)
    assert again["layers"][0][name] is first[name]
    tokens = np.arange(11) % config.vocab_size
    expected, got = (models.reference_forward(p, config, tokens) for p in (params, packed))
    np.testing.assert_allclose(got, expected, atol=1e-4, rtol=1e-4)


def test_loading_into_panels():
    plain, loaded = (
        models.load(models.BUNDLED, "bfloat16", in_panels=x).params for x in (False, True)
    )
    config = models.load_config(models.BUNDLED)
    packed = models.pack_params(plain, config)
    assert jax.tree.structure(packed) == jax.tree.structure(loaded)
    for one, other in zip(jax.tree.leaves(packed), jax.tree.leaves(loaded), strict=True):
        assert (np.asarray(one) == np.asarray(other)).all()


def test_product_takes_either():
    x, w = operands("float32", 64, 48, 3)
    np.testing.assert_allclose(product(x, to_panels(w)), product(x, w), atol=1e-5)
