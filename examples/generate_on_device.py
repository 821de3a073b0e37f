"""Generation without the host: planning, paging, prefill in chunks, sampling and stopping inside
one executable."""

import jax
import jax.numpy as jnp
import numpy as np

import jax_attn as ja

num_layers, vocab, hidden, heads, kv_heads, head_dim, end_token = 3, 50, 64, 4, 2, 16, 0
batch_size, page_size, pages_each, num_pages = 6, 8, 5, 20  # fewer pages than 6 * 5
chunk = 5  # tokens of a prompt per step; at most page_size, so a step fills at most one page
spec = ja.AttentionSpec(
    heads, kv_heads, head_dim, dtype="float32", page_size=page_size, num_pages=num_pages,
    max_batch=batch_size, max_qo_tokens=batch_size * chunk, max_kv_pages=batch_size * pages_each,
)  # fmt: skip
keys = jax.random.split(jax.random.key(3), 4)
embedding, head = jax.random.normal(keys[0], (2, vocab, hidden))
qkv = jax.random.normal(keys[1], (num_layers, hidden, heads + 2 * kv_heads, head_dim)) / 4
out = jax.random.normal(keys[2], (num_layers, heads, head_dim, hidden)) / 4


def begin_step(s):
    """Chooses each request's tokens, takes a page if they need one, and returns plan inputs."""
    pending = jnp.maximum(s["prompt_lens"] - s["kv_lens"], 1)  # of the prompt, or the newest token
    qo_lens = jnp.where(s["active"], jnp.minimum(pending, chunk), 0)
    kv_lens = s["kv_lens"] + qo_lens
    num_used = -(-s["kv_lens"] // page_size)
    takes = kv_lens > num_used * page_size
    at = jnp.where(takes, jnp.arange(batch_size), batch_size), num_used
    pages = s["pages"].at[at].set(s["free"][s["num_free"] - jnp.cumsum(takes)], mode="drop")
    num_free = s["num_free"] - takes.sum()
    page_indptr = jnp.arange(batch_size + 1) * pages_each  # entries beyond kv_lens hold anything
    lengths = jnp.append(0, jnp.cumsum(qo_lens)), kv_lens, page_indptr, pages.reshape(-1)
    return s | {"pages": pages, "kv_lens": kv_lens, "num_free": num_free}, lengths


def finish_step(s, qo_indptr, plan):
    """Runs layers, sampling and the stop condition, and frees the pages of finished requests."""
    request, position, last = ja.rows(qo_indptr, s["kv_lens"], spec.max_qo_tokens)
    x = embedding[s["text"][request, position]]

    def layer(carry, weights):
        x, k_pages, v_pages, i = carry
        projected = jnp.einsum("th,hnd->tnd", jnp.tanh(x), weights[0])
        q, k, v = jnp.split(projected, (heads, heads + kv_heads), axis=1)
        k_pages, v_pages = ja.append_kv(k_pages, v_pages, k, v, plan, layer=i)
        o = ja.attention(q, k_pages, v_pages, plan, layer=i)
        return (x + jnp.einsum("tnd,ndh->th", o, weights[1]), k_pages, v_pages, i + 1), None

    (x, *caches, _), _ = jax.lax.scan(layer, (x, *s["caches"], 0), (qkv, out))
    token = jnp.argmax(x[last] @ head.T, axis=1)
    samples = s["active"] & (s["kv_lens"] >= s["prompt_lens"])  # the prompt is computed
    at = jnp.where(samples, jnp.arange(batch_size), batch_size), s["kv_lens"]
    ends = samples & ((token == end_token) | (s["kv_lens"] >= s["limit"]))
    used = jnp.arange(pages_each) * page_size < s["kv_lens"][:, None]
    freed = (used & ends[:, None]).reshape(-1)
    slots = jnp.where(freed, s["num_free"] + jnp.cumsum(freed) - 1, num_pages)
    return s | {
        "caches": caches, "active": s["active"] & ~ends,
        "text": s["text"].at[at].set(token, mode="drop"),
        "free": s["free"].at[slots].set(s["pages"].reshape(-1), mode="drop"),
        "num_free": s["num_free"] + freed.sum(),
    }  # fmt: skip


def step(s):
    s, lengths = begin_step(s)
    plan = ja.plan(spec, *lengths)  # traced arrays: the plan is made on the device
    return finish_step(s, lengths[0], plan)


prompt_lens = jnp.array([1, 17, 4, 9, 5, 12])
prompts = jax.random.randint(keys[3], (batch_size, 41), 1, vocab)
state = {
    "text": jnp.where(jnp.arange(41) < prompt_lens[:, None], prompts, 0),
    "prompt_lens": prompt_lens, "limit": jnp.array([9, 40, 17, 30, 8, 25]),
    "active": jnp.ones(batch_size, bool), "kv_lens": jnp.zeros(batch_size, int),
    "pages": jnp.zeros((batch_size, pages_each), int),
    "free": jnp.arange(num_pages), "num_free": jnp.array(num_pages),
    "caches": list(spec.empty_pages(num_pages, num_layers)),
}  # fmt: skip
done = jax.jit(lambda s: jax.lax.while_loop(lambda s: s["active"].any(), step, s))(state)
# The same from Python, with plans made on the host.
begin, finish = jax.jit(begin_step), jax.jit(finish_step)
while state["active"].any():
    state, lengths = begin(state)
    state = finish(state, lengths[0], ja.plan(spec, *map(np.asarray, lengths)))
assert all((done[name] == state[name]).all() for name in ("text", "kv_lens", "num_free"))
print(f"{done['kv_lens'].sum()} tokens in one call; the longest: {done['text'][1]}")
