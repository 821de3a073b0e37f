"""Generation without the host: planning, paging, sampling and stopping inside one executable."""

import jax
import jax.numpy as jnp
import numpy as np

import jax_attn as ja

num_layers, vocab, hidden, heads, kv_heads, head_dim, end_token = 3, 50, 64, 4, 2, 16, 0
batch_size, page_size, pages_each, num_pages = 6, 8, 5, 20  # fewer pages than 6 * 5
spec = ja.AttentionSpec(
    heads, kv_heads, head_dim, dtype="float32", page_size=page_size, num_pages=num_pages,
    max_batch=batch_size, max_qo_tokens=batch_size, max_kv_pages=batch_size * pages_each,
)  # fmt: skip
keys = jax.random.split(jax.random.key(3), 4)
embedding, head = jax.random.normal(keys[0], (2, vocab, hidden))
qkv = jax.random.normal(keys[1], (num_layers, hidden, heads + 2 * kv_heads, head_dim)) / 4
out = jax.random.normal(keys[2], (num_layers, heads, head_dim, hidden)) / 4


def begin_step(s):
    """Adds 1 to kv_lens, takes a free page where the last one is full, and returns plan inputs."""
    full = s["active"] & (s["kv_lens"] % page_size == 0)
    at = jnp.where(full, jnp.arange(batch_size), batch_size), s["kv_lens"] // page_size
    pages = s["pages"].at[at].set(s["free"][s["num_free"] - jnp.cumsum(full)], mode="drop")
    kv_lens, num_free = s["kv_lens"] + s["active"], s["num_free"] - full.sum()
    page_indptr = jnp.arange(batch_size + 1) * pages_each  # entries beyond kv_lens hold anything
    lengths = jnp.append(0, jnp.cumsum(s["active"])), kv_lens, page_indptr, pages.reshape(-1)
    return s | {"pages": pages, "kv_lens": kv_lens, "num_free": num_free}, lengths


def finish_step(s, plan):
    """Runs layers, sampling and the stop condition, and frees the pages of finished requests."""
    rows = jnp.where(s["active"], jnp.cumsum(s["active"]) - 1, batch_size)  # as in qo_indptr
    x = jnp.zeros((batch_size, hidden)).at[rows].set(embedding[s["token"]], mode="drop")

    def layer(carry, weights):
        x, k_pages, v_pages, i = carry
        projected = jnp.einsum("th,hnd->tnd", jnp.tanh(x), weights[0])
        q, k, v = jnp.split(projected, (heads, heads + kv_heads), axis=1)
        k_pages, v_pages = ja.append_kv(k_pages, v_pages, k, v, plan, layer=i)
        o = ja.attention(q, k_pages, v_pages, plan, layer=i)
        return (x + jnp.einsum("tnd,ndh->th", o, weights[1]), k_pages, v_pages, i + 1), None

    (x, *caches, _), _ = jax.lax.scan(layer, (x, *s["caches"], 0), (qkv, out))
    best = jnp.argmax(x @ head.T, axis=1)[rows.clip(max=batch_size - 1)]
    token = jnp.where(s["active"], best, end_token)
    active = s["active"] & (token != end_token) & (s["kv_lens"] < s["limit"])
    used = jnp.arange(pages_each) * page_size < s["kv_lens"][:, None]
    freed = (used & (s["active"] & ~active)[:, None]).reshape(-1)
    slots = jnp.where(freed, s["num_free"] + jnp.cumsum(freed) - 1, num_pages)
    return s | {
        "token": token, "active": active, "caches": caches,
        "text": s["text"].at[jnp.arange(batch_size), s["kv_lens"]].set(token),
        "free": s["free"].at[slots].set(s["pages"].reshape(-1), mode="drop"),
        "num_free": s["num_free"] + freed.sum(),
    }  # fmt: skip


def step(s):
    s, lengths = begin_step(s)
    return finish_step(s, ja.plan(spec, *lengths))  # traced arrays: the plan is made on the device


state = {
    "token": jnp.arange(1, batch_size + 1), "text": jnp.zeros((batch_size, 41), int),
    "active": jnp.ones(batch_size, bool), "kv_lens": jnp.zeros(batch_size, int),
    "limit": jnp.array([9, 40, 17, 30, 8, 25]), "pages": jnp.zeros((batch_size, pages_each), int),
    "free": jnp.arange(num_pages), "num_free": jnp.array(num_pages),
    "caches": list(jnp.zeros((2, num_layers, num_pages, page_size, kv_heads, head_dim))),
}  # fmt: skip
done = jax.jit(lambda s: jax.lax.while_loop(lambda s: s["active"].any(), step, s))(state)
# The same from Python, with plans made on the host.
begin, finish = jax.jit(begin_step), jax.jit(finish_step)
while state["active"].any():
    state, lengths = begin(state)
    state = finish(state, ja.plan(spec, *map(np.asarray, lengths)))
assert all((done[name] == state[name]).all() for name in ("text", "kv_lens", "num_free"))
print(f"{done['kv_lens'].sum()} tokens in one call; the longest: {done['text'][1]}")
