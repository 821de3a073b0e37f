"""short_convolution against a loop in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_attn as ja
from helpers.backends import on_every_backend, on_every_platform
from helpers.linear_cases import CASES, LinearCase

CHANNELS = 22  # vectors of every width, and a rest


def arrays_of(case, width, dtype="float32"):
    rng = np.random.default_rng(3)
    spec = case.spec
    x = rng.standard_normal((spec.max_tokens, CHANNELS)).astype(np.float32)
    x[sum(case.lens) :] = np.nan
    states = np.full((case.num_slots, width - 1, CHANNELS), np.nan, np.float32)
    for slot in set(case.read) - {-1}:
        states[slot] = rng.standard_normal((width - 1, CHANNELS))
    weight, bias = rng.standard_normal((CHANNELS, width)), rng.standard_normal(CHANNELS)
    cast = [jnp.asarray(a, dtype) for a in (x, states)]
    return cast[0], weight.astype(np.float32), bias.astype(np.float32), cast[1]


@on_every_backend
@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize(
    "name", ["mixed", "decode", "drafts", "drafts_in_order", "checkpoints", "nothing"]
)
def test_against_a_loop(name, width, backend):
    case = CASES[name]
    x, weight, bias, states = arrays_of(case, width)
    activation = "silu" if width > 2 else None
    bias = bias if width != 4 else None
    y, after = ja.short_convolution(x, weight, bias, states, case.plan(), activation=activation)
    expected = ja.reference.short_convolution(
        x, weight, bias, states, activation=activation, **case.batch
    )
    np.testing.assert_allclose(y, expected[0], atol=1e-5)
    np.testing.assert_allclose(after, expected[1], atol=1e-6)


@on_every_platform
def test_plan_of_a_state_spec_and_layers(backend):
    spec = ja.StateSpec(8, 2, 3)
    plan = ja.plan_linear_attention(spec, [0, 3, 5], [-1, 1], [0, 1])
    rng = np.random.default_rng(0)
    x = rng.standard_normal((8, CHANNELS)).astype(jnp.bfloat16)
    weight = rng.standard_normal((CHANNELS, 4)).astype(np.float32)
    pool = rng.standard_normal((2, 3, 3, CHANNELS)).astype(jnp.bfloat16)
    y, after = jax.jit(
        lambda pool, layer: ja.short_convolution(x, weight, None, pool, plan, layer=layer)
    )(pool, 1)
    expected = ja.reference.short_convolution(x, weight, None, pool[1], [0, 3, 5], [-1, 1], [0, 1])
    np.testing.assert_allclose(np.asarray(y, np.float32), expected[0], atol=0.05)
    np.testing.assert_array_equal(np.asarray(after[1], np.float64), expected[1])
    np.testing.assert_array_equal(after[0], pool[0])


def test_gradients_stay_in_the_request():
    case = LinearCase((3, 4), (0, 1), (0, 1), padding=2)
    x, weight, bias, states = arrays_of(case, 4)

    def loss(x, weight, bias, states):
        y, _ = ja.short_convolution(x, weight, bias, states, case.plan(), activation="silu")
        return y[:3].sum()

    d_x, d_weight, d_bias, d_states = jax.grad(loss, (0, 1, 2, 3))(x, weight, bias, states)
    assert (np.asarray(d_x[3:]) == 0).all() and (np.asarray(d_x[:3]) != 0).all()
    assert (np.asarray(d_states[1:]) == 0).all() and (np.asarray(d_states[0]) != 0).all()
    assert np.isfinite(d_weight).all() and np.isfinite(d_bias).all()


def test_bad_arrays():
    case = CASES["mixed"]
    x, weight, bias, states = arrays_of(case, 4)
    good = {"x": x, "weight": weight, "bias": bias, "states": states}
    for change, sentence in (
        ({"x": x[:, 0]}, "x: expected [max_tokens, num_channels]"),
        ({"weight": weight.T}, "weight: expected [22, width] floats with width 1 to 8"),
        ({"bias": bias[:2]}, "bias: expected [22], got [2]"),
        ({"states": states[:, :2]}, "states: expected float32[8, 3, 22]"),
        ({"activation": "gelu"}, 'activation: expected "silu" or None'),
    ):
        with pytest.raises(ValueError) as error:
            ja.short_convolution(**good | change, plan=case.plan())
        assert sentence in str(error.value)
