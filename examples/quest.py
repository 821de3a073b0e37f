"""Quest (arXiv 2406.10774): each layer attends only to the most relevant pages, selected inside
jit. Here all heads of a layer attend to the same pages."""

import jax
import jax.numpy as jnp
import numpy as np

import jax_attn as ja

layers, heads, kv_heads, dim, page_size, num_selected, pages_each = 4, 8, 2, 64, 16, 12, 64
kv_lens = np.array([1000, 700, 99, 1024])
batch_size = len(kv_lens)
used = -(-kv_lens // page_size)
selected = np.minimum(used, num_selected)  # pages attended per request; the last may be partial
spec, (k_pages, v_pages), (page_indptr, page_indices) = ja.fixed_batch(
    heads, kv_heads, dim, dtype="float32", page_size=page_size, batch_size=batch_size,
    max_kv_len=pages_each * page_size, max_kv_pages=batch_size * num_selected, num_layers=layers,
    share_prefixes=False,  # each request has its own selection
)  # fmt: skip
table = page_indices.reshape(batch_size, pages_each)
starts = np.arange(batch_size + 1)
sparse_lens = (selected - used) * page_size + kv_lens
indptr = starts * num_selected
plan = ja.plan(spec, starts, sparse_lens, indptr, table[:, :num_selected].reshape(-1))


def select(q, lows, highs):
    """Returns [batch_size * num_selected] page ids: those with the largest bounds of any logit."""
    q = q.reshape(batch_size, kv_heads, -1, dim)
    q_high, q_low = (f(q, 0) for f in (jnp.maximum, jnp.minimum))  # q k is largest at a corner
    bounds = jnp.einsum("bhgd,bphd->bp", q_high, highs[table])
    bounds += jnp.einsum("bhgd,bphd->bp", q_low, lows[table])
    page = jnp.arange(pages_each)
    bounds = jnp.where(page < used[:, None] - 1, bounds, -jnp.inf)  # never pages with unused slots
    bounds = jnp.where(page == used[:, None] - 1, jnp.inf, bounds)  # always the last page
    _, best = jax.lax.top_k(bounds, num_selected)
    best = jnp.sort(jnp.where(best < used[:, None], best, pages_each), axis=1)  # it stays last
    return jnp.take_along_axis(jnp.array(table), best.clip(max=pages_each - 1), 1).reshape(-1)


@jax.jit
def decode(q, k_pages, v_pages, lows, highs):
    def layer(_, x):
        i, q, low, high = x
        pages = select(q, low, high)
        return None, (ja.attention(q, k_pages, v_pages, plan.with_pages(pages), layer=i), pages)

    return jax.lax.scan(layer, None, (jnp.arange(layers), q, lows, highs))[1]


keys = jax.random.split(jax.random.key(0), 4)
k_pages, v_pages = jax.random.normal(keys[0], (2, *k_pages.shape))
topics = jax.random.normal(keys[1], (layers, len(page_indices), 1, 1, dim))
k_pages += topics  # keys of a page are alike, and queries match some pages
q = topics[:, table[:, 1::11]].sum(2)[:, :, 0] + jax.random.normal(
    keys[2], (layers, batch_size, heads, dim)
)
o, pages = decode(q, k_pages, v_pages, k_pages.min(2), k_pages.max(2))  # a server updates both

o, pages, q, k_pages, v_pages = map(np.asarray, (o, pages, q, k_pages, v_pages))
for i in range(layers):  # exact for the selected pages, and close to attention over all pages
    cache = k_pages[i], v_pages[i]
    expected, _ = ja.reference.attention(
        q[i], *cache, starts, sparse_lens, indptr, pages[i], spec=spec
    )
    np.testing.assert_allclose(o[i], expected, atol=1e-4)
    full, _ = ja.reference.attention(
        q[i], *cache, starts, kv_lens, page_indptr, page_indices, spec=spec
    )
    cosine = (o[i] * full).sum() / np.linalg.norm(o[i]) / np.linalg.norm(full)
    print(
        f"layer {i}: {selected.sum()} of {used.sum()} pages, cosine to full attention {cosine:.3f}"
    )
    assert cosine > 0.9
assert decode._cache_size() == 1
