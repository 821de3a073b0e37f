"""Attention over a paged KV cache inside your own jitted function."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import jax_attn as ja

# The spec is static: it selects kernels and fixes shapes. max_* are capacities: the largest batch.
spec = ja.AttentionSpec(
    num_qo_heads=8,
    num_kv_heads=2,
    head_dim_qk=64,
    dtype="bfloat16",
    page_size=16,
    max_batch=4,
    max_qo_tokens=64,
    max_kv_pages=32,
)


@partial(jax.jit, donate_argnames=("k_pages", "v_pages"))
def step(q, k_new, v_new, k_pages, v_pages, plan):
    k_pages, v_pages = ja.append_kv(k_pages, v_pages, k_new, v_new, plan)  # in place: donated
    o, lse = ja.attention(q, k_pages, v_pages, plan, return_lse=True)
    return o, lse, k_pages, v_pages


keys = jax.random.split(jax.random.key(0), 5)
q = jax.random.normal(keys[0], (64, 8, 64), jnp.bfloat16)  # [max_qo_tokens, heads, head_dim]
k_new, v_new = jax.random.normal(keys[1], (2, 64, 2, 64), jnp.bfloat16)
k_pages, v_pages = jax.random.normal(keys[2], (2, 100, 16, 2, 64), jnp.bfloat16)  # 100 pages

# One batch: a prompt of 37 tokens, 5 tokens of a prompt that has 20 in the cache, and one decode.
# Tokens of request r are rows [qo_indptr[r], qo_indptr[r + 1]) of q.
qo_indptr = np.array([0, 37, 42, 43])
kv_lens = np.array([37, 25, 91])  # including the new tokens
page_indptr = np.array([0, 3, 5, 11])  # pages of request r are page_indices[page_indptr[r] : ...]
page_indices = np.array([7, 3, 99, 12, 40, 1, 2, 50, 51, 60, 8])
plan = ja.plan(spec, qo_indptr, kv_lens, page_indptr, page_indices)
print(plan.describe())
o, lse, k_pages, v_pages = step(q, k_new, v_new, k_pages, v_pages, plan)

batch = (qo_indptr, kv_lens, page_indptr, page_indices)
expected, _ = ja.reference.attention(q, k_pages, v_pages, *batch, spec=spec)
np.testing.assert_allclose(np.float32(o), np.float32(expected), atol=2e-2)

# The next batch reuses the executable: one decode, and the first token of a new request.
plan = ja.plan(spec, np.array([0, 1, 2]), np.array([38, 1]), np.array([0, 3, 4]), page_indices[:4])
o, lse, k_pages, v_pages = step(q, k_new, v_new, k_pages, v_pages, plan)
assert step._cache_size() == 1, "new lengths must not compile anything"
print("o", o.shape, o.dtype, "lse of the two tokens", lse[:2, 0])
