"""A policy-gradient step over a group of answers to one prompt, which is computed once.

A decode loop samples the answers over shared pages. The trainer recomputes their log-probabilities,
with gradients, over the same page tables. The prompt is one request. Each answer is a request whose
table begins with the prompt's pages.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np

import jax_attn as ja

num_layers, vocab, hidden, heads, kv_heads, head_dim, page_size = 2, 64, 128, 4, 2, 32, 16
prompt_len, group, answer_len = 512, 8, 64
num_tokens = prompt_len + group * answer_len  # prompt, then answers
keys = jax.random.split(jax.random.key(0), 5)
params = {
    "embedding": jax.random.normal(keys[0], (vocab, hidden)),
    "qkv": jax.random.normal(keys[1], (num_layers, hidden, heads + 2 * kv_heads, head_dim)) / 8,
    "out": jax.random.normal(keys[2], (num_layers, heads, head_dim, hidden)) / 8,
}
prompt = jax.random.randint(keys[3], (prompt_len,), 0, vocab)

# Page tables: the trainer's key rows are the pages in order. The sampler uses the same tables.
prompt_pages = np.arange(prompt_len // page_size)
answer_pages = np.arange(prompt_len // page_size, num_tokens // page_size).reshape(group, -1)
tables = [prompt_pages, *(np.append(prompt_pages, own) for own in answer_pages)]


def make_plan(tables, qo_lens, kv_lens, dtype="float32"):
    qo_indptr, page_indptr = (np.cumsum([0, *lens]) for lens in (qo_lens, map(len, tables)))
    spec = ja.AttentionSpec(
        heads, kv_heads, head_dim, dtype=dtype, page_size=page_size, max_batch=len(tables),
        max_qo_tokens=int(qo_indptr[-1]), max_kv_pages=int(page_indptr[-1]), schedule="fixed_split",
    )  # fmt: skip
    return ja.plan(spec, qo_indptr, kv_lens, page_indptr, np.concatenate(tables))


def by_blocks(fn, *arrays):
    """Applies fn to blocks of `group` rows, so a row's bits do not depend on the number of rows."""
    blocks = [x.reshape(-1, group, *x.shape[1:]) for x in arrays]
    return jax.lax.map(lambda rows: fn(*rows), blocks).reshape(len(arrays[0]), -1)


def log_probs(params, tokens, attend):
    """Returns next tokens' log-probabilities [len(tokens), vocab]. attend(layer, q, k, v) -> o."""
    x = params["embedding"][tokens]
    for i in range(num_layers):
        into, out = (params[name][i] for name in ("qkv", "out"))
        into, out = into.reshape(hidden, -1), out.reshape(-1, hidden)
        projected = by_blocks(lambda x, w=into: jnp.tanh(x) @ w, x)
        projected = projected.reshape(len(x), -1, head_dim)
        o = attend(i, *jnp.split(projected, (heads, heads + kv_heads), axis=1))
        x = by_blocks(lambda x, o, w=out: x + o @ w, x, o.reshape(len(x), -1))
    embedding = params["embedding"].T / hidden**0.5
    return by_blocks(lambda x: jax.nn.log_softmax((x @ embedding).astype("float32")), x)


# ---- the sampler


@jax.jit
def step(params, tokens, caches, plan):
    def attend(i, q, k, v):
        caches[:] = ja.append_kv(*caches, k, v, plan, layer=i)
        return ja.attention(q, *caches, plan, layer=i)

    return log_probs(params, tokens, attend), caches


def sample(params, choose):
    """Samples with choose(n, log-probabilities). Returns tokens and their log-probabilities,
    [group, answer_len] each."""
    dtype = params["embedding"].dtype.name
    plan = make_plan([prompt_pages], [prompt_len], [prompt_len], dtype)
    caches = list(plan.spec.empty_pages(num_tokens // page_size, num_layers))
    predicted, caches = step(params, prompt, caches, plan)
    predicted = jnp.broadcast_to(predicted[-1], (group, vocab))
    tokens, found = [], []
    for n in range(answer_len):
        tokens.append(choose(n, predicted))
        found.append(jnp.take_along_axis(predicted, tokens[-1][:, None], 1)[:, 0])
        plan = make_plan(tables[1:], [1] * group, [prompt_len + n + 1] * group, dtype)
        predicted, caches = step(params, tokens[-1], caches, plan)
    return jnp.stack(tokens, 1), jnp.stack(found, 1)


answers, sampled = sample(
    params, lambda n, predicted: jax.random.categorical(jax.random.fold_in(keys[4], n), predicted)
)
reward = (answers % 2 == 0).mean(axis=1)  # rewards even tokens
advantage = (reward - reward.mean()) / reward.std()

# ---- the trainer


def answer_log_probs(predicted, before, at):
    """Returns log-probabilities of the answers' tokens.

    before: row that predicts the first token. at: [group] first row of each answer.
    """
    rows = np.column_stack([before, at[:, None] + np.arange(answer_len - 1)])
    return jnp.take_along_axis(predicted[rows], answers[..., None], 2)[..., 0]


qo_lens = [prompt_len] + [answer_len] * group
kv_lens = [prompt_len] + [prompt_len + answer_len] * group
shared_plan = make_plan(tables, qo_lens, kv_lens)


def shared(params, plan=shared_plan):
    def attend(_, q, k, v):
        k, v = (x.reshape(-1, page_size, kv_heads, head_dim) for x in (k, v))
        return ja.attention(q, k, v, plan)

    predicted = log_probs(params, jnp.append(prompt, answers), attend)
    first = prompt_len + np.arange(group) * answer_len
    return answer_log_probs(predicted, np.full(group, prompt_len - 1), first)


length = prompt_len + answer_len
spec = ja.AttentionSpec(
    heads, kv_heads, head_dim, dtype="float32", page_size=None, max_batch=group,
    max_qo_tokens=group * length, max_kv_tokens=group * length,
)  # fmt: skip
whole_plan = ja.plan(spec, np.arange(group + 1) * length, np.full(group, length))


def not_shared(params):
    """Computes the same over whole sequences, each with its own copy of the prompt."""
    tokens = jnp.concatenate([jnp.tile(prompt, (group, 1)), answers], 1).reshape(-1)
    predicted = log_probs(params, tokens, lambda _, q, k, v: ja.attention(q, k, v, whole_plan))
    first = np.arange(group) * length + prompt_len
    return answer_log_probs(predicted, first - 1, first)


results = {}
for name, forward in (("shared", shared), ("not shared", not_shared)):

    def loss(params, forward=forward):
        found = forward(params)
        return -jnp.mean(advantage[:, None] * found), found

    compiled = jax.jit(jax.value_and_grad(loss, has_aux=True)).lower(params).compile()
    times = []
    for _ in range(4):
        begin = time.perf_counter()
        results[name] = jax.block_until_ready(compiled(params))
        times.append(time.perf_counter() - begin)
    megabytes = compiled.memory_analysis().temp_size_in_bytes / 1e6
    print(
        f"{name:10s} {1e3 * min(times):6.1f} ms a step, {megabytes:5.1f} MB beside the parameters"
    )

((_, found), gradient), (_, other) = results["shared"], results["not shared"]
for name, value in gradient.items():
    np.testing.assert_allclose(value, other[name], atol=1e-5, err_msg=name)
np.testing.assert_array_equal(found, sampled)  # the same bits
print("log-probabilities of sampler and trainer have the same bits")

# The same answers in bfloat16.
low = jax.tree.map(lambda w: w.astype("bfloat16"), params)
_, sampled = sample(low, lambda n, _: answers[:, n])
low_plan = make_plan(tables, qo_lens, kv_lens, "bfloat16")
for name, trainer, plan in (("bfloat16", low, low_plan), ("float32", params, shared_plan)):
    found = jax.jit(shared)(trainer, plan)
    difference = np.abs(np.asarray(found - sampled))
    print(f"sampler in bfloat16, trainer in {name}: {difference.max():.1e} apart at most")
    assert difference.max() < 0.05

params = jax.tree.map(lambda w, g: w - 0.1 * g, params, gradient)
