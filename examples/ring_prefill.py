"""Ring attention: prefill and training of documents too long for one device.

Tokens are split over a mesh axis, and keys go around the ring. Each device attends to the keys that
it has while the next ones arrive, and merges the states.
"""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4 " + os.environ.get(
    "XLA_FLAGS", ""
)

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding

import jax_attn as ja
from jax_attn import parallel

num_devices, num_qo_heads, num_kv_heads, head_dim, tokens = 4, 8, 2, 64, 4096
mesh = jax.make_mesh(
    (num_devices,), ("seq",), devices=jax.devices("cpu")[:num_devices], axis_types=(AxisType.Auto,)
)
spec = ja.AttentionSpec(
    num_qo_heads,
    num_kv_heads,
    head_dim,
    dtype="float32",
    page_size=None,  # packed documents
    max_batch=4,
    max_qo_tokens=tokens,
    max_kv_tokens=tokens,
    target="cpu",
)
shards = parallel.SequenceShards(spec, "seq", num_devices)

# Four documents back to back. Row i of the arrays is token shards.positions[i]. Striped tokens give
# every device the same causal work, for documents of any lengths.
indptr = np.array([0, 2900, 2950, 3500, tokens])
plan = parallel.plan_sequence(shards, indptr)
keys = jax.random.split(jax.random.key(0), 3)
heads = num_qo_heads, num_kv_heads, num_kv_heads
q, k, v = (jax.random.normal(x, (tokens, n, head_dim)) for x, n in zip(keys, heads, strict=True))
by_token = NamedSharding(mesh, shards.array_spec)
placed = [jax.device_put(x[shards.positions], by_token) for x in (q, k, v)]


def loss(attend, q, k, v):
    o = attend(q, k, v)
    return jnp.sum(jnp.sin(o)), o


@jax.jit
def step(plan, *arrays):
    def attend(q, k, v):  # inside shard_map, leave out mesh
        return parallel.attend_sequence(q, k, v, plan, mesh=mesh)

    return jax.value_and_grad(lambda *x: loss(attend, *x), (0, 1, 2), has_aux=True)(*arrays)


(value, o), gradients = step(plan, *placed)
assert o.sharding.is_equivalent_to(by_token, o.ndim)

whole = ja.plan(spec, indptr, np.diff(indptr), kv_indptr=indptr)
(want_value, want), want_gradients = jax.value_and_grad(
    lambda *x: loss(lambda *y: ja.attention(*y, whole), *x), (0, 1, 2), has_aux=True
)(q, k, v)
np.testing.assert_allclose(value, want_value, rtol=1e-3)
for a, b in zip((o, *gradients), (want, *want_gradients), strict=True):
    np.testing.assert_allclose(a, b[shards.positions], rtol=1e-4, atol=1e-4)

text = step.lower(plan, *placed).compile().as_text()
assert "collective-permute" in text and "all-gather" not in text
work = [
    sum(plan.step_plan(i, device).header()["num_items"] for i in range(num_devices))
    for device in range(num_devices)
]
print(f"{tokens} tokens, {num_devices} devices, {shards.algorithm}; work items of each: {work}")
