"""Prefill of requests of different lengths, packed one after the other, without a page table."""

import jax
import jax.numpy as jnp
import numpy as np

import jax_attn as ja

lens = np.array([17, 0, 129, 64])  # an empty request is legal anywhere
num_tokens = int(lens.sum())
spec = ja.AttentionSpec(
    num_qo_heads=6,
    num_kv_heads=2,
    head_dim_qk=96,
    head_dim_vo=64,  # values may be narrower than keys
    dtype="float32",
    window_left=100,  # a token sees itself and the 100 before it
    page_size=None,
    max_batch=8,
    max_qo_tokens=256,
    max_kv_tokens=256,
)
keys = jax.random.split(jax.random.key(0), 3)
q = jax.random.normal(keys[0], (256, 6, 96))
k = jax.random.normal(keys[1], (256, 2, 96))
v = jax.random.normal(keys[2], (256, 2, 64))

indptr = np.concatenate([[0], np.cumsum(lens)])
plan = ja.plan(spec, indptr, lens)
o, lse = jax.jit(lambda *args: ja.attention(*args, return_lse=True))(q, k, v, plan)

for begin, end in zip(indptr[:-1], indptr[1:], strict=True):
    if begin == end:
        continue
    # jax.nn requires keys and values of equal width, so pad v with zeros.
    wide_v = jnp.pad(v[begin:end], ((0, 0), (0, 0), (0, 32)))
    expected = jax.nn.dot_product_attention(
        q[begin:end], k[begin:end], wide_v, is_causal=True, local_window_size=(100, 0)
    )[..., :64]
    np.testing.assert_allclose(o[begin:end], expected, atol=1e-4)

# Rows beyond the batch are padding: o = 0, lse = -inf, the identity of the merge.
assert not np.any(o[num_tokens:]) and np.all(lse[num_tokens:] == -np.inf)
print(f"{len(lens)} requests, {num_tokens} tokens: equal to jax.nn, one request at a time")
