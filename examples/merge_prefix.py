"""A shared prefix, attended once for all requests and merged with each request's own suffix."""

import jax
import numpy as np

import jax_attn as ja

prefix_len, suffix_lens = 200, np.array([3, 31, 16])
batch_size = len(suffix_lens)
heads = {"num_qo_heads": 4, "num_kv_heads": 1, "head_dim_qk": 64, "dtype": "float32"}
ragged = {"page_size": None, "max_batch": 4, "max_qo_tokens": batch_size, "max_kv_tokens": 512}

keys = jax.random.split(jax.random.key(0), 3)
q = jax.random.normal(keys[0], (batch_size, 4, 64))  # one decode token of each request
k = jax.random.normal(keys[1], (512, 1, 64))  # rows: the prefix, then the suffixes
v = jax.random.normal(keys[2], (512, 1, 64))
starts = prefix_len + np.concatenate([[0], np.cumsum(suffix_lens)])

# The prefix: one request with the query rows of all requests. Not causal: all of it is in the past.
prefix_spec = ja.AttentionSpec(**heads, **ragged, causal=False)
prefix_plan = ja.plan(prefix_spec, np.array([0, batch_size]), np.array([prefix_len]))
# The suffixes: one token of each request over its own rows.
suffix_spec = ja.AttentionSpec(**heads, **ragged)
each = np.arange(batch_size + 1)
suffix_plan = ja.plan(suffix_spec, each, suffix_lens, kv_indptr=starts)


@jax.jit
def cascade(q, k, v, prefix_plan, suffix_plan):
    prefix = ja.attention(q, k, v, prefix_plan, return_lse=True)
    suffix = ja.attention(q, k, v, suffix_plan, return_lse=True)
    return ja.merge_state(*prefix, *suffix)


o, lse = cascade(q, k, v, prefix_plan, suffix_plan)

for r in range(batch_size):
    rows = np.r_[0:prefix_len, starts[r] : starts[r + 1]]
    expected = jax.nn.dot_product_attention(q[r : r + 1], k[rows], v[rows])
    np.testing.assert_allclose(o[r : r + 1], expected, rtol=1e-5, atol=1e-5)
print(f"{batch_size} requests over a prefix of {prefix_len}: the merge equals flat attention")
