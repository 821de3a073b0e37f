"""Training steps on packed documents, on one device and data-parallel. New lengths compile nothing.

The documents of a batch are packed back to back. Each document is a request of a ragged plan, so a
token sees only its own document.
"""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2 " + os.environ.get(
    "XLA_FLAGS", ""
)

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jax_attn as ja

num_devices, heads, kv_heads, head_dim = 2, 4, 2, 32
width, max_tokens, max_documents = heads * head_dim, 256, 6  # per device
spec = ja.AttentionSpec(
    heads, kv_heads, head_dim, dtype="float32", page_size=None, target="cpu",
    max_batch=max_documents, max_qo_tokens=max_tokens, max_kv_tokens=max_tokens,
)  # fmt: skip


def loss(weights, x, y, num_tokens, attend):
    """Returns the mean loss over the batch's tokens; rows behind them are padding with o = 0."""
    projected = (x @ weights["qkv"]).reshape(max_tokens, -1, head_dim)
    o = attend(*jnp.split(projected, (heads, heads + kv_heads), axis=1)).reshape(max_tokens, width)
    errors = jnp.sum((o @ weights["o"] - y) ** 2, axis=1)
    return jnp.sum(jnp.where(jnp.arange(max_tokens) < num_tokens, errors, 0)) / num_tokens


def updated(weights, gradients):
    return jax.tree.map(lambda w, g: w - 0.003 * g, weights, gradients)


# ---- one device: the plan is an argument


@jax.jit
def step(weights, x, y, plan, num_tokens):
    def attend(q, k, v):
        return ja.attention(q, k, v, plan)

    value, gradients = jax.value_and_grad(loss)(weights, x, y, num_tokens, attend)
    return value, updated(weights, gradients)


def lengths(rng):
    """Returns lengths of documents that fill most of a batch, then zeros for unused slots."""
    lens = rng.integers(10, max_tokens // max_documents, max_documents, np.int32)
    lens[rng.integers(2, max_documents) :] = 0
    return lens


rng = np.random.default_rng(0)
weights = {
    "qkv": rng.normal(size=(width, (heads + 2 * kv_heads) * head_dim)) / width**0.5,
    "o": rng.normal(size=(width, width)) / width**0.5,
}
weights = jax.tree.map(jnp.float32, weights)
x, y = rng.normal(size=(2, max_tokens, width)).astype(np.float32)
for _ in range(3):
    lens = lengths(rng)
    plan = ja.plan(spec, np.append(0, np.cumsum(lens)), lens)
    value, weights = step(weights, x, y, plan, lens.sum())
    print(f"documents of {lens[lens > 0].tolist()} tokens: loss {value:.4f}")
assert step._cache_size() == 1, "new lengths must not compile anything"

# ---- data-parallel: each device plans its own documents, and gradients are averaged

mesh = jax.make_mesh((num_devices,), ("data",), devices=jax.devices("cpu")[:num_devices])
over_data = partial(jax.shard_map, mesh=mesh, in_specs=(P(), *[P("data")] * 3), out_specs=P())


@jax.jit
@partial(over_data, check_vma=False)  # all devices return the same values
def parallel_step(weights, x, y, lens):
    plan = ja.plan(spec, jnp.append(0, jnp.cumsum(lens)), lens)  # traced: planned in the graph
    share = lens.sum() / jax.lax.psum(lens.sum(), "data")  # this device's share of all tokens

    def attend(q, k, v):
        return ja.attention(q, k, v, plan)

    value, gradients = jax.value_and_grad(loss)(weights, x, y, lens.sum(), attend)
    value, gradients = jax.lax.psum(jax.tree.map(lambda g: share * g, (value, gradients)), "data")
    return value, updated(weights, gradients)


weights = jax.device_get(weights)
for _ in range(2):
    lens = np.stack([lengths(rng) for _ in range(num_devices)])
    x, y = rng.normal(size=(2, num_devices, max_tokens, width)).astype(np.float32)
    flat = (a.reshape(-1, *a.shape[2:]) for a in (x, y, lens))
    split = jax.device_put((*flat,), jax.sharding.NamedSharding(mesh, P("data")))
    value, new_weights = parallel_step(weights, *split)

    # The same on one device: the mean over both batches, weighted by their tokens.
    values, results = [], []
    for own_x, own_y, own in zip(x, y, lens, strict=True):
        plan = ja.plan(spec, np.append(0, np.cumsum(own)), own)
        own_value, result = step(weights, own_x, own_y, plan, own.sum())
        values.append(own_value)
        results.append(result)
    shares = lens.sum(axis=1) / lens.sum()
    np.testing.assert_allclose(value, np.dot(shares, values), rtol=1e-5)
    for name, got in new_weights.items():
        want = sum(s * result[name] for s, result in zip(shares, results, strict=True))
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
    weights = jax.device_get(new_weights)
assert parallel_step._cache_size() == 1
print(f"{num_devices} devices: loss {value:.4f}, as one device computes it")
