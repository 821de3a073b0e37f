"""Calls an installed jax_attn once: two decodes over pages, compared with numpy."""

import os
import platform

import jax
import numpy as np

import jax_attn as ja

lens, page_size = np.array([5, 20]), 16
spec = ja.AttentionSpec(
    4, 2, 64, dtype="float32", page_size=page_size, max_batch=2, max_qo_tokens=2, max_kv_pages=3
)
plan = ja.plan(spec, np.arange(3), lens, np.array([0, 1, 3]), np.array([2, 0, 1]))
random = np.random.default_rng(0)
q = random.standard_normal((2, 4, 64), np.float32)
k, v = random.standard_normal((2, 3, page_size, 2, 64), np.float32)
o = jax.jit(ja.attention)(q, k, v, plan)
for request, pages in enumerate(([2], [0, 1])):
    own_k, own_v = (x[pages].reshape(-1, 2, 64)[: lens[request]].repeat(2, axis=1) for x in (k, v))
    weights = np.exp(np.einsum("hd,khd->hk", q[request], own_k) / 8)
    weights /= weights.sum(axis=1, keepdims=True)
    want = np.einsum("hk,khd->hd", weights, own_v)
    np.testing.assert_allclose(o[request], want, rtol=1e-4, atol=1e-4)
where = f"Python {platform.python_version()}, {os.confstr('CS_GNU_LIBC_VERSION')}"
print(f"jax_attn {ja.__version__} works with jax {jax.__version__} on {where}")
