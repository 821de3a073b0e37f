"""Many questions about one cached document: its pages are read once for all of them."""

import time

import jax
import jax.numpy as jnp
import numpy as np

import jax_attn as ja

page_size, document, answer, batch_size = 16, 2048, 128, 16
spec_fields = {
    "num_qo_heads": 16,
    "num_kv_heads": 4,
    "head_dim_qk": 64,
    "dtype": "bfloat16",
    "page_size": page_size,
    "max_batch": batch_size,
    "max_qo_tokens": batch_size,
    "max_kv_pages": batch_size * (document + answer) // page_size,
}

# Page tables as from a prefix cache: each begins with the document's pages. The planner finds the
# shared prefix in them, and deeper levels (a conversation and its forks), too.
document_pages, own_pages = document // page_size, answer // page_size
num_pages = document_pages + batch_size * own_pages
ids = np.random.default_rng(0).permutation(num_pages)
tables = [
    np.concatenate([ids[:document_pages], own])
    for own in np.split(ids[document_pages:], batch_size)
]
batch = {
    "qo_indptr": np.arange(batch_size + 1),  # a decode: one token per request
    "kv_lens": np.full(batch_size, document + answer),
    "page_indptr": np.arange(batch_size + 1) * (document_pages + own_pages),
    "page_indices": np.concatenate(tables),
}

spec = ja.AttentionSpec(**spec_fields)
plan = ja.plan(spec, **batch)
apart = ja.plan(ja.AttentionSpec(**spec_fields, share_prefixes=False), **batch)
print(plan.describe())
assert (plan.items()["num_groups"] > 1).any()

# If you know the shared prefixes, you can pass them. Inside jit on a GPU, only those are shared.
document_level = (np.array([0, batch_size]), np.array([document]))  # all requests, their prefix
make_plan = jax.jit(lambda batch, levels: ja.plan(spec, **batch, prefix_levels=levels))
told = make_plan(batch, [document_level])
assert told.queue_costs().max() == plan.queue_costs().max()

keys = jax.random.split(jax.random.key(0), 3)
q = jax.random.normal(keys[0], (batch_size, 16, 64), jnp.bfloat16)
k_pages, v_pages = (
    jax.random.normal(key, (num_pages, page_size, 4, 64), jnp.bfloat16) for key in keys[1:]
)
attend = jax.jit(ja.attention)
np.testing.assert_allclose(
    np.float32(attend(q, k_pages, v_pages, plan)),
    np.float32(attend(q, k_pages, v_pages, apart)),
    atol=1e-2,
)


def milliseconds(plan):
    begin = time.perf_counter()
    for _ in range(20):
        o = attend(q, k_pages, v_pages, plan)
    o.block_until_ready()
    return 50 * (time.perf_counter() - begin)


print(f"shared {milliseconds(plan):.2f} ms, each request by itself {milliseconds(apart):.2f} ms")
