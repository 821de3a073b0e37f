"""StreamingLLM (Xiao et al., arXiv 2309.17453): sinks and a window, with positions in the cache.

Pages hold keys as the projection made them. A transform rotates them where the kernel loads them,
by their place in the request's page table. So pages in the middle of the text are dropped from the
table, and nothing is rotated again.
"""

import jax
import jax.numpy as jnp
import numpy as np

import jax_attn as ja

H, KV_H, D, PAGE = 8, 2, 64, 16
SINK_PAGES, WINDOW_PAGES, STEPS = 1, 3, 200  # 16 sinks, and a window of 33 to 48 tokens
inverse = (10000.0 ** (-np.arange(0, D, 2) / D)).astype(np.float32)
angles = np.arange((SINK_PAGES + WINDOW_PAGES) * PAGE, dtype=np.float32)[:, None] * inverse
tables = {"cos": np.cos(angles), "sin": np.sin(angles)}  # of positions in the cache: no more


def rotate(x, cos, sin):
    a, b = x[: D // 2], x[D // 2 :]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin])


variant = ja.Variant(
    q=lambda x, at, cos, sin: rotate(x, cos[at.q_pos], sin[at.q_pos]),
    k=lambda x, at, cos, sin: rotate(x, cos[at.kv_pos], sin[at.kv_pos]),
    head_dim=D,
    operands=tables,
)
num_pages = SINK_PAGES + WINDOW_PAGES
spec = ja.AttentionSpec(
    H, KV_H, D, dtype="float32", page_size=PAGE, max_batch=1, max_qo_tokens=1,
    max_kv_pages=num_pages, variant=variant, target="cpu",
)  # fmt: skip


@jax.jit
def step(k_pages, v_pages, plan, q, k, v):
    k_pages, v_pages = ja.append_kv(k_pages, v_pages, k, v, plan)
    return ja.attention(q, k_pages, v_pages, plan, variant_operands=tables), k_pages, v_pages


rng = np.random.default_rng(0)
q = rng.normal(size=(STEPS, 1, H, D)).astype(np.float32)
k, v = rng.normal(size=(2, STEPS, 1, KV_H, D)).astype(np.float32)
k_pages, v_pages = spec.empty_pages(num_pages)
table, kept = list(range(num_pages)), []  # page ids; the positions in the text that they hold
for t in range(STEPS):
    if len(kept) == num_pages * PAGE:  # drop the oldest page of the window
        table.append(table.pop(SINK_PAGES))
        del kept[SINK_PAGES * PAGE : (SINK_PAGES + 1) * PAGE]
    kept.append(t)
    pages = table[: -(-len(kept) // PAGE)]
    plan = ja.plan(
        spec, np.int32([0, 1]), np.int32([len(kept)]), np.int32([0, len(pages)]), np.int32(pages)
    )
    o, k_pages, v_pages = step(k_pages, v_pages, plan, q[t], k[t], v[t])

    if t % 37 == 0:  # the same with keys rotated anew at each step
        places = np.arange(len(kept))
        turn = jax.vmap(jax.vmap(rotate, (0, None, None)))
        keys = turn(k[kept, 0], tables["cos"][places], tables["sin"][places])
        queries = turn(q[t], tables["cos"][places[-1:]], tables["sin"][places[-1:]])
        want = jax.nn.dot_product_attention(queries[None], keys[None], v[kept, 0][None])[0]
        np.testing.assert_allclose(o, want, rtol=1e-4, atol=1e-5)
print(f"{STEPS} tokens in {num_pages} pages, as with keys rotated at every step")
