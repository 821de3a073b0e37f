"""Linear attention over a pool of states: prompts, a checkpoint, and decodes in one executable.

A request has a slot instead of pages. The first prompt leaves a checkpoint after its first 64
tokens, from which a second request with the same beginning goes on. Then both decode in a scan that
writes the pool in place.
"""

import jax
import jax.numpy as jnp
import numpy as np

import jax_attn as ja

num_layers, qk_heads, v_heads, dim, num_slots, steps = 2, 2, 4, 64, 4, 32
sizes = {
    "num_slots": num_slots, "num_qk_heads": qk_heads, "num_v_heads": v_heads, "head_dim_k": dim,
    "head_dim_v": dim, "l2_norm": True, "dtype": "float32",
}  # fmt: skip
of_prompts = ja.LinearAttentionSpec(128, 2, max_checkpoints=1, **sizes)
of_decodes = ja.LinearAttentionSpec(2, 2, max_qo_len=1, **sizes)
pool = jnp.zeros((num_layers, *of_prompts.state_shape), of_prompts.state_dtype)


def inputs(tokens, layer):
    """q, k, v, g and beta of tokens [n]: in a model, projections of the layer's input."""
    n, keys = len(tokens), jax.random.split(jax.random.key(layer), 5)
    shapes = (qk_heads, dim), (qk_heads, dim), (v_heads, dim), (v_heads,), (v_heads,)
    tables = [jax.random.normal(k, (100, *s)) for k, s in zip(keys, shapes, strict=True)]
    q, k, v, g, beta = (table[tokens % 100].reshape(n, *table.shape[1:]) for table in tables)
    return q, k, v, -0.1 * jnp.abs(g), jax.nn.sigmoid(beta)


def step(tokens, pool, plan):
    """All layers of a batch: o of the last layer, and the pool."""
    for layer in range(num_layers):
        o, pool = ja.linear_attention(*inputs(tokens, layer), pool, plan, layer=layer)
    return o, pool


run = jax.jit(step, donate_argnums=1)
document = np.arange(100) * 7 % 100
question = np.append(document[:64], [5, 9, 31])

# The first prompt, in slot 0. The state after 64 tokens also goes to slot 3.
plan = ja.plan_linear_attention(of_prompts, [0, 100], [-1], [0], checkpoints=[(0, 64, 3)])
_, pool = run(jnp.asarray(np.resize(document, 128)), pool, plan)
# The second has 3 tokens to read: it begins with slot 3 and writes slot 1.
plan = ja.plan_linear_attention(of_prompts, [0, 3], [3], [1])
resumed, pool = run(jnp.asarray(np.resize(question[64:], 128)), pool, plan)

# The same without a checkpoint, in slot 2.
plan = ja.plan_linear_attention(of_prompts, [0, 67], [-1], [2])
whole, pool = run(jnp.asarray(np.resize(question, 128)), pool, plan)
difference = float(jnp.abs(resumed[:3] - whole[64:67]).max())
print(f"from the checkpoint or from the beginning: outputs differ by {difference:.1e}")
assert difference < 1e-4

# Decodes read and write each state once, whatever the length of the text.
decode_plan = ja.plan_linear_attention(of_decodes, [0, 1, 2], [0, 1], [0, 1])


@jax.jit
def decode(tokens, pool, plan):
    def one(carry, _):
        tokens, pool = carry
        o, pool = step(tokens, pool, plan)
        tokens = jnp.argmax(o.reshape(2, -1)[:, :100], axis=-1)  # in a model, from its logits
        return (tokens, pool), tokens

    (_, pool), made = jax.lax.scan(one, (tokens, pool), length=steps)
    return made.T, pool


made, pool = decode(jnp.array([5, 31]), pool, decode_plan)
megabytes = pool.nbytes / 2**20
print(
    f"{steps} tokens of two requests from {megabytes:.1f} MiB of states: {made[0, :8].tolist()} ..."
)
