"""SnapKV (arXiv 2404.14469): after a prompt each KV head keeps the keys that its last queries look
at, in pages of its own, and decodes go on over these."""

import jax
import numpy as np

import jax_attn as ja
from jax_attn import head_tables, retention

H, KV_H, D, PAGE, PROMPT, WINDOW, BUDGET, STEPS = 8, 2, 64, 16, 500, 16, 96, 5

rng = np.random.default_rng(0)
k, v = rng.normal(size=(2, PROMPT, KV_H, D)).astype(np.float32)
# Head h attends to a few keys, other ones for each head.
topics = [rng.choice(PROMPT - WINDOW, 3, replace=False) for _ in range(KV_H)]
looks_at = np.stack([k[topics[h], h].mean(0) for h in range(KV_H)]).repeat(H // KV_H, 0)
q = 8 * looks_at + rng.normal(size=(WINDOW + STEPS, H, D)).astype(np.float32)

kept = retention.snapkv(q[:WINDOW], k, BUDGET)  # [KV_H, BUDGET]
for h in range(KV_H):
    assert len(np.intersect1d(kept[h], topics[h])) == 3

pages_each = -(-(BUDGET + STEPS) // PAGE)
num_pages = KV_H * pages_each
indptr, pages = np.arange(KV_H + 1) * pages_each, np.arange(num_pages)
spec = head_tables.spec(
    H, KV_H, D, dtype="float32", page_size=PAGE, max_batch=1, max_qo_tokens=1,
    max_kv_pages=num_pages, target="cpu",
)  # fmt: skip


def filled(x):
    """The kept rows of each head at the beginning of its pages."""
    pool = np.zeros((KV_H, pages_each * PAGE, 1, D), np.float32)
    pool[:, :BUDGET, 0] = retention.compact(x, kept)
    return pool.reshape(num_pages, PAGE, 1, D)


@jax.jit
def step(k_pages, v_pages, plan, q, k, v):
    k_pages, v_pages = head_tables.append_kv(k_pages, v_pages, k, v, plan)
    return head_tables.attention(q, k_pages, v_pages, plan), k_pages, v_pages


k_pages, v_pages = filled(k), filled(v)
for i in range(STEPS):
    k_new, v_new = rng.normal(size=(2, 1, KV_H, D)).astype(np.float32)
    lens = np.full((1, KV_H), BUDGET + i + 1)
    plan = head_tables.plan(spec, [0, 1], lens, indptr, pages)
    o, k_pages, v_pages = step(k_pages, v_pages, plan, q[WINDOW + i][None], k_new, v_new)
    k, v = np.concatenate([k, k_new]), np.concatenate([v, v_new])
    everything = ja.dot_product_attention(q[None, WINDOW + i][None], k[None], v[None])[0, 0]
    error = np.linalg.norm(o[0] - everything) / np.linalg.norm(everything)
    assert error < 0.1
full = -(-(PROMPT + STEPS) // PAGE) * KV_H
print(f"{num_pages} of {full} pages, the last o differs by {error:.3f} from all keys")
