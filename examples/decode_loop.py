"""A decode loop in one executable: lax.scan over plans made ahead, the cache as its carry."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import jax_attn as ja

num_layers, num_steps, batch_size = 3, 20, 2
spec, (k_pages, v_pages), page_table = ja.fixed_batch(
    num_qo_heads=4,
    num_kv_heads=2,
    head_dim_qk=32,
    dtype="float32",
    page_size=8,
    batch_size=batch_size,
    max_kv_len=32,
    num_layers=num_layers,
)

# The lengths of all steps are known, so their plans are made first and stacked like any pytree.
kv_lens = [np.array([1, 8]) + step for step in range(num_steps)]
qo_indptr = np.arange(batch_size + 1)  # one token per request and step
plans = [ja.plan(spec, qo_indptr, n, *page_table) for n in kv_lens]
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
k_pages, v_pages = jax.random.normal(keys[1], (2, *k_pages.shape))  # earlier tokens
(x, k_pages, v_pages), (q, o) = decode(x, k_pages, v_pages, plans)

# Check the last attention of the last step against the oracle.
batch = (qo_indptr, kv_lens[-1], *page_table)
expected, _ = ja.reference.attention(q[-1], k_pages[-1], v_pages[-1], *batch, spec=spec)
np.testing.assert_allclose(o[-1], expected, rtol=1e-5, atol=1e-5)
print(f"{num_steps} steps x {num_layers} layers in one call; lengths now {kv_lens[-1]}")
