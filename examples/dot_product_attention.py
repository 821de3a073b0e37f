"""jax_attn.dot_product_attention takes the arguments of jax.nn.dot_product_attention."""

import jax
import jax.numpy as jnp
import numpy as np

import jax_attn as ja

keys = jax.random.split(jax.random.key(0), 3)
q = jax.random.normal(keys[0], (2, 50, 8, 64), jnp.bfloat16)  # [batch, qo_len, qo_heads, head_dim]
k = jax.random.normal(keys[1], (2, 70, 2, 64), jnp.bfloat16)  # [batch, kv_len, kv_heads, head_dim]
v = jax.random.normal(keys[2], (2, 70, 2, 64), jnp.bfloat16)

for options in [
    {},
    {"is_causal": True},
    {"scale": 0.3},
    {"is_causal": True, "local_window_size": (20, 0)},
    {"query_seq_lengths": jnp.array([50, 7]), "key_value_seq_lengths": jnp.array([70, 33])},
]:
    o = ja.dot_product_attention(q, k, v, **options)
    expected = jax.nn.dot_product_attention(q, k, v, **options)
    np.testing.assert_allclose(np.float32(o), np.float32(expected), atol=2e-2)
    print("equal:", options)
