"""Speculative decoding: attend to all drafted tokens, then append only the accepted ones."""

import functools

import jax
import numpy as np

import jax_attn as ja

cached, num_drafts, accepted = np.array([200, 37, 90]), 4, np.array([4, 0, 2])
batch_size = len(cached)
# The pages have room for all drafts, so nothing is moved or freed when some are rejected.
spec, (k_pages, v_pages), page_table = ja.fixed_batch(
    num_qo_heads=8,
    num_kv_heads=2,
    head_dim_qk=64,
    fresh_kv=True,  # k and v of the query tokens come from k_new and v_new, not from the pages
    batch_size=batch_size,
    max_kv_len=256,
    max_qo_tokens=batch_size * num_drafts,
)
keys = jax.random.split(jax.random.key(0), 3)
q = jax.random.normal(keys[0], spec.q_shape, spec.dtype)
k_new, v_new = jax.random.normal(keys[1], (2, *spec.new_kv_shapes[0]), spec.dtype)
k_pages, v_pages = jax.random.normal(keys[2], (2, *k_pages.shape), spec.dtype)

starts = num_drafts * np.arange(batch_size + 1)
drafts = ja.plan(spec, starts, cached + num_drafts, *page_table)
print(drafts.describe())

verify = jax.jit(ja.attention)
o = verify(q, k_pages, v_pages, drafts, k_new=k_new, v_new=v_new)

# Append the first `accepted` drafts of each request; their rows are packed for this.
rows = np.concatenate([starts[r] + np.arange(n) for r, n in enumerate(accepted)])
packed = np.zeros(len(q), np.int32)
packed[: len(rows)] = rows
kept = np.concatenate([[0], np.cumsum(accepted)])
stay = ja.plan(spec, kept, cached + accepted, *page_table)
append = functools.partial(jax.jit(ja.append_kv, donate_argnums=(0, 1)), plan=stay)
before = np.array(k_pages)
k_pages, v_pages = append(k_pages, v_pages, k_new[packed], v_new[packed])

assert (np.array(k_pages) != before).any((1, 2, 3)).sum() <= np.count_nonzero(accepted) * 2
flat = (kept, cached + accepted, *page_table)
expected, _ = ja.reference.attention(q[packed], k_pages, v_pages, *flat, spec=spec)
np.testing.assert_allclose(np.float32(o)[rows], np.float32(expected)[: len(rows)], atol=2e-2)
print(f"{batch_size} requests, {num_drafts} drafts each, {accepted.tolist()} of them now cached")
