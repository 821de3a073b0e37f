"""Training a layer of the gated delta rule to recall: which value did this key have last?

A sequence is pairs of a key and a value, with keys that come again with other values. A state that
only adds would mix old and new; the delta rule replaces. `gated_delta_rule` takes
[batch, seq, heads, dim] and is differentiable, also under jax.checkpoint and on meshes that split
batch or heads.
"""

import jax
import jax.numpy as jnp

import jax_attn as ja

num_keys, num_values, pairs, batch, heads, dim, steps = 8, 8, 24, 32, 2, 16, 50
vocab = num_keys + num_values


def sample(key):
    """tokens [batch, 2 * pairs]: key, value, key, value, ...; targets [batch, pairs]: the value
    that the key had before, or -1."""
    keys, values = jax.random.split(key)
    k = jax.random.randint(keys, (batch, pairs), 0, num_keys)
    v = jax.random.randint(values, (batch, pairs), 0, num_values)
    earlier = (k[:, :, None] == k[:, None]) & jnp.tri(pairs, k=-1, dtype=bool)
    last = pairs - 1 - jnp.argmax(earlier[..., ::-1], axis=-1)
    targets = jnp.where(earlier.any(-1), jnp.take_along_axis(v, last, axis=1), -1)
    return jnp.stack([k, num_keys + v], axis=-1).reshape(batch, -1), targets


def logits(params, tokens):
    """[batch, pairs, num_values], at the keys: before a pair's own value is read."""
    x = params["embedding"][tokens]
    before = jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]  # a convolution of width 2
    x = jnp.concatenate([x, before], axis=-1)
    q, k, v = ((x @ params[name]).reshape(*tokens.shape, heads, dim) for name in ("q", "k", "v"))
    decay = -jax.nn.softplus(x @ params["g"])
    o, _ = ja.gated_delta_rule(q, k, v, decay, jax.nn.sigmoid(x @ params["beta"]), l2_norm=True)
    return (o.reshape(*tokens.shape, -1) @ params["out"])[:, ::2]


def loss(params, tokens, targets):
    found = jax.nn.log_softmax(jax.checkpoint(logits)(params, tokens))
    chosen = jnp.take_along_axis(found, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]
    right = (jnp.argmax(found, -1) == targets).sum() / (targets >= 0).sum()
    return -jnp.sum(chosen * (targets >= 0)) / (targets >= 0).sum(), right


@jax.jit
def train(params, moments, key, rate):
    """A step of Adam without bias correction."""
    (value, right), gradient = jax.value_and_grad(loss, has_aux=True)(params, *sample(key))
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments[0], gradient)
    second = jax.tree.map(lambda m, g: 0.99 * m + 0.01 * g * g, moments[1], gradient)
    params = jax.tree.map(
        lambda p, m, s: p - rate * m / (jnp.sqrt(s) + 1e-8), params, first, second
    )
    return params, (first, second), value, right


shapes = {
    "embedding": (vocab, 32), "q": (64, heads * dim), "k": (64, heads * dim),
    "v": (64, heads * dim), "g": (64, heads), "beta": (64, heads),
    "out": (heads * dim, num_values),
}  # fmt: skip
keys = jax.random.split(jax.random.key(0), len(shapes) + steps)
params = {
    name: jax.random.normal(key, shape) * (1 if name == "embedding" else shape[0] ** -0.5)
    for key, (name, shape) in zip(keys, shapes.items(), strict=False)
}
moments = (jax.tree.map(jnp.zeros_like, params),) * 2
for i in range(steps):
    params, moments, value, right = train(params, moments, keys[len(shapes) + i], 0.02)
    if i % 10 == 0 or i == steps - 1:
        print(f"step {i:3d}: loss {value:.3f}, {100 * right:.0f} % recalled")
assert right > 0.8, right
