"""A decode loop in one executable: lax.scan over plans made ahead, the cache as its carry."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import jax_attn as ja

num_layers, num_steps, batch_size, pages_each = 3, 20, 2, 4
spec = ja.AttentionSpec(
    num_qo_heads=4,
    num_kv_heads=2,
    head_dim_qk=32,
    dtype="float32",
    page_size=8,
    max_batch=batch_size,
    max_qo_tokens=batch_size,  # one token per request and step
    max_kv_pages=batch_size * pages_each,
)

# The lengths of all steps are known, so their plans are made first and stacked like any pytree.
page_indptr = np.arange(batch_size + 1) * pages_each
page_indices = np.random.default_rng(0).permutation(batch_size * pages_each)
kv_lens = [np.array([1, 8]) + step for step in range(num_steps)]
plans = [ja.plan(spec, np.arange(batch_size + 1), n, page_indptr, page_indices) for n in kv_lens]
plans = jax.tree.map(lambda *buffers: jnp.stack(buffers), *plans)


@partial(jax.jit, donate_argnames=("k_pages", "v_pages"))
def decode(x, k_pages, v_pages, plans):
    """x: [batch_size, 4, 32]. k_pages, v_pages: [num_layers, num_pages, 8, 2, 32]."""

    def step(carry, plan):
        x, k_pages, v_pages = carry
        for layer in range(num_layers):  # a model's layers, without the model
            k_new, v_new = x[:, ::2], jnp.tanh(x[:, 1::2])
            k_pages, v_pages = ja.append_kv(k_pages, v_pages, k_new, v_new, plan, layer=layer)
            q, o = x, ja.attention(x, k_pages, v_pages, plan, layer=layer)
            x = q + o
        return (x, k_pages, v_pages), (q, o)

    return jax.lax.scan(step, (x, k_pages, v_pages), plans)


keys = jax.random.split(jax.random.key(0), 2)
x = jax.random.normal(keys[0], (batch_size, 4, 32))
k_pages, v_pages = jax.random.normal(keys[1], (2, num_layers, batch_size * pages_each, 8, 2, 32))
(x, k_pages, v_pages), (q, o) = decode(x, k_pages, v_pages, plans)

# Check the last attention of the last step against the oracle.
batch = (np.arange(batch_size + 1), kv_lens[-1], page_indptr, page_indices)
expected, _ = ja.reference.attention(q[-1], k_pages[-1], v_pages[-1], *batch, spec=spec)
np.testing.assert_allclose(o[-1], expected, rtol=1e-5, atol=1e-5)
print(f"{num_steps} steps x {num_layers} layers in one call; lengths now {kv_lens[-1]}")
