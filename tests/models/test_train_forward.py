"""The forward pass for training: logits and gradients of the dense oracle, with a shared prompt."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_attn as ja
from helpers import model_cases
from jax_attn import models
from jax_attn.models._layers.experts import grouped_matmul
from jax_attn.models._products.panels import to_panels

PAGE, NUM_ANSWERS = 4, 3


def waves(config, num_shared, num_own):
    """Plans of states: the prompt, then the answers, which go on from it."""
    n = NUM_ANSWERS
    sizes = {"dtype": "float32", "num_slots": 2}
    specs = [
        models.state_spec(config, max_tokens=num_tokens, max_batch=batch, **sizes)
        for num_tokens, batch in ((num_shared, 1), (n * num_own, n))
    ]
    if specs[0] is None:
        return ()
    first = ja.plan_linear_attention(specs[0], [0, num_shared], [-1], [1])
    answers = np.arange(n + 1) * num_own
    return first, ja.plan_linear_attention(specs[1], answers, [1] * n, [-1] * n)


# DeepSeek has experts, too, and Gemma 3n several hidden states.
@pytest.mark.parametrize(
    "name",
    ["gemma2", "qwen3", "deepseek v3", "gemma3n"]
    + ["qwen3.5", "kimi linear", "granite 4 dense, rope", "lfm2", "minimax"],
)
def test_logits_and_gradients_of_a_group(name):
    raw = model_cases._COMMON | model_cases.CONFIGS[name]
    config = models.parse_config(raw)
    layers = config.layers[:2]
    if config.recurrent is not None:  # one of each kind
        kinds = {kind.recurrent is not None: kind for kind in config.layers}
        layers = tuple(kinds.values())
    config = dataclasses.replace(config, layers=layers)
    params = models.random_params(config, jax.random.key(0), "float32")
    shared, own = 2 * PAGE, 2 * PAGE
    tokens = np.arange(shared + NUM_ANSWERS * own) * 7 % config.vocab_size
    positions = np.concatenate([np.arange(shared), *[shared + np.arange(own)] * NUM_ANSWERS])
    pages = np.arange(len(tokens) // PAGE)
    tables = [pages[:2], *(np.append(pages[:2], own) for own in pages[2:].reshape(NUM_ANSWERS, 2))]
    specs = models.train_specs(
        config, dtype="float32", page_size=PAGE, max_batch=4, max_qo_tokens=len(tokens),
        max_kv_pages=14,
    )  # fmt: skip
    lengths = [shared, *[own] * NUM_ANSWERS], [shared, *[shared + own] * NUM_ANSWERS]
    plans = tuple(
        ja.plan(
            spec,
            np.cumsum([0, *lengths[0]]),
            lengths[1],
            np.cumsum([0, *map(len, tables)]),
            np.concatenate(tables),
        )
        for spec in specs
    )

    def grouped(params):
        rows = jnp.arange(shared, len(tokens))
        arrays = jnp.asarray(tokens), jnp.asarray(positions)
        return models.train_forward(params, config, *arrays, plans, rows, state_plans)

    state_plans = waves(config, shared, own)

    def alone(params):
        found = []
        for i in range(NUM_ANSWERS):
            begin = shared + i * own
            whole = np.append(tokens[:shared], tokens[begin : begin + own])
            found.append(models.reference_forward(params, config, jnp.asarray(whole))[shared:])
        return jnp.concatenate(found)

    wanted = jax.random.normal(jax.random.key(1), (NUM_ANSWERS * own, config.vocab_size))
    results = []
    policy = jax.checkpoint_policies.save_only_these_names("linear_attention_o")
    remat = jax.checkpoint(grouped, policy=policy)
    for forward in (remat if config.recurrent is not None else grouped, alone):
        loss = lambda params, forward=forward: jnp.vdot(wanted, jnp.tanh(forward(params)))  # noqa: E731
        results.append((forward(params), jax.jit(jax.grad(loss))(params)))
    (logits, gradient), (expected, expected_gradient) = results
    np.testing.assert_allclose(logits, expected, atol=2e-4)
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected_gradient), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-3 * abs(b).max() + 1e-6)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("sizes", [[5, 0, 41, 2], [0, 0, 3], [32, 32]])
def test_gradients_of_grouped_products(sizes, packed):
    """Beside a dense product that JAX differentiates itself."""
    keys = jax.random.split(jax.random.key(0), 3)
    groups = np.repeat(np.arange(len(sizes)), sizes)
    x = jax.random.normal(keys[0], (len(groups), 6))
    weights = jax.random.normal(keys[1], (len(sizes), 6, 10))
    wanted = jax.random.normal(keys[2], (len(groups), 10))

    def grouped(x, weights):
        weights = to_panels(weights) if packed else weights
        return jnp.vdot(wanted, grouped_matmul(x, weights, jnp.array(sizes, jnp.int32)))

    def dense(x, weights):
        return jnp.vdot(wanted, jnp.einsum("ni,nio->no", x, weights[groups]))

    expected = jax.grad(dense, argnums=(0, 1))(x, weights)
    found = jax.jit(jax.grad(grouped, argnums=(0, 1)))(x, weights)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_what_does_not_fit_is_a_sentence():
    config = models.parse_config(model_cases._COMMON | model_cases.CONFIGS["llama"])
    params = models.random_params(config, jax.random.key(0), "float32")
    [spec] = models.attention_specs(
        config, dtype="float32", page_size=PAGE, max_batch=1, max_qo_tokens=8, max_kv_pages=2
    )
    plan = ja.plan(spec, [0, 8], [8], [0, 2], [0, 1])
    rows, tokens = jnp.arange(1), jnp.zeros(7, jnp.int32)
    with pytest.raises(ValueError, match="^train_forward: tokens: expected a multiple"):
        models.train_forward(params, config, tokens, tokens, (plan,), rows)
    with pytest.raises(ValueError, match="^train_forward: plans: expected 1, got 0"):
        models.train_forward(params, config, tokens, tokens, (), rows)
    hybrid = models.parse_config(model_cases._COMMON | model_cases.CONFIGS["qwen3.5"])
    of_states = waves(hybrid, PAGE, PAGE)
    with pytest.raises(ValueError, match="^train_forward: state_plans: expected none, as llama"):
        models.train_forward(params, config, tokens, tokens, (plan,), rows, of_states)
    sentence = "^train_forward: state_plans: expected plans of 7 tokens together, as qwen3_5_text"
    for some in ((), of_states):
        with pytest.raises(ValueError, match=sentence):
            models.train_forward(params, hybrid, tokens, tokens, (plan,), rows, some)
    latent = models.parse_config(model_cases._COMMON | model_cases.CONFIGS["deepseek v2"])
    sizes = {"max_batch": 1, "max_qo_tokens": 8, "max_kv_pages": 2}
    [spec] = models.attention_specs(latent, dtype="float32", page_size=PAGE, **sizes)
    plan = ja.plan(spec, [0, 8], [8], [0, 2], [0, 1])
    with pytest.raises(ValueError, match="^train_forward: plans: expected those of train_specs"):
        models.train_forward(params, latent, tokens[:4], tokens[:4], (plan,), rows)
