"""Masks that save work: packed documents, as one request with a mask and as one request each."""

import jax
import numpy as np

import jax_attn as ja
from jax_attn import masks

num_tokens, heads, head_dim = 2048, 4, 64
lens = np.array([700, 100, 900, 348])  # lengths of the documents
q, k, v = jax.random.normal(jax.random.key(0), (3, num_tokens, heads, head_dim))

# One request with all tokens. max_steps: capacity for the lists of kv steps that query tiles visit.
packed = masks.document_ids(np.repeat(np.arange(len(lens), dtype=np.int32), lens))
spec = ja.AttentionSpec(
    heads, heads, head_dim, dtype="float32", page_size=None, max_batch=1,
    max_qo_tokens=num_tokens, max_kv_tokens=num_tokens,
    variant=packed.variant(), max_steps=1024,
)  # fmt: skip
qo_indptr, kv_lens = np.array([0, num_tokens]), np.array([num_tokens])
block_map = packed.block_map(spec, qo_indptr, kv_lens)
plan = ja.plan(spec, qo_indptr, kv_lens, block_map=block_map)
print(plan.describe())
o = jax.jit(ja.attention)(q, k, v, plan, variant_operands=packed.operands)

# The same without a mask: one request per document.
spec = ja.AttentionSpec(
    heads, heads, head_dim, dtype="float32", page_size=None, max_batch=len(lens),
    max_qo_tokens=num_tokens, max_kv_tokens=num_tokens,
)  # fmt: skip
ragged = ja.plan(spec, np.append(0, np.cumsum(lens)), lens)
np.testing.assert_allclose(o, ja.attention(q, k, v, ragged), atol=1e-5)
print("equal to a request for each document")
