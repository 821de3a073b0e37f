"""compat.cached_attention in a hand-made sampler of the gemma kind, before and after.

The sampler pads prompts to one length and keeps a row of keys and values for each sequence. Before,
all sequences write at one index, so shorter prompts have a gap that a mask hides.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_attn import compat

BATCH, CACHE_LEN, HEADS, KV_HEADS, DIM, VOCAB, SIZE = 3, 32, 4, 2, 16, 40, 24
WINDOW, SOFT_CAP, SCALE = 6, 5.0, 0.3
PROMPT_LENS, PADDED, NUM_STEPS = np.int32([9, 3, 6]), 9, 14
NUM_LAYERS = 3
WINDOWS = (WINDOW, None, WINDOW)  # of the layers

MODEL = jax.tree.map(
    lambda shape: jax.random.normal(jax.random.key(len(str(shape)) + sum(shape)), shape) / 5,
    {
        "embed": (VOCAB, SIZE),
        "q": (NUM_LAYERS, SIZE, HEADS, DIM),
        "kv": (NUM_LAYERS, 2, SIZE, KV_HEADS, DIM),
        "o": (NUM_LAYERS, HEADS, DIM, SIZE),
    },
    is_leaf=lambda x: isinstance(x, tuple),
)


def rotated(x, positions):
    """x: [batch, T, heads, DIM]."""
    angles = positions[..., None, None] / 100.0 ** (jnp.arange(DIM // 2) / (DIM // 2))
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate(
        [a * jnp.cos(angles) - b * jnp.sin(angles), b * jnp.cos(angles) + a * jnp.sin(angles)], -1
    )


def attend_before(q, k, v, cache, positions, mask, window):
    at = 0, cache["end_index"], 0, 0
    k = jax.lax.dynamic_update_slice(cache["k"], k, at)
    v = jax.lax.dynamic_update_slice(cache["v"], v, at)
    of_keys = jax.lax.dynamic_update_slice(cache["positions"], positions, at[:2])
    logits = jnp.einsum("btkgh,bskh->bkgts", SCALE * q.reshape(*q.shape[:2], KV_HEADS, -1, DIM), k)
    logits = SOFT_CAP * jnp.tanh(logits / SOFT_CAP)
    if window is not None:
        mask &= of_keys[:, None] > positions[:, :, None] - window
    weights = jax.nn.softmax(jnp.where(mask[:, None, None], logits, -1e30), axis=-1)
    o = jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(q.shape)
    return o, {
        "k": k,
        "v": v,
        "positions": of_keys,
        "end_index": cache["end_index"] + q.shape[1],
    }


def attend_after(q, k, v, cache, positions, mask, window):
    o, k, v = compat.cached_attention(
        q, k, v, cache["k"], cache["v"], positions,
        sm_scale=SCALE, sliding_window=window, attn_logits_soft_cap=SOFT_CAP,
    )  # fmt: skip
    return o, cache | {"k": k, "v": v}


def forward(attend, tokens, caches, positions, mask):
    x, after = MODEL["embed"][tokens], []
    for i, window in enumerate(WINDOWS):
        q = rotated(jnp.einsum("btd,dnh->btnh", x, MODEL["q"][i]), positions)
        k, v = jnp.einsum("btd,cdkh->cbtkh", x, MODEL["kv"][i])
        o, cache = attend(q, rotated(k, positions), v, caches[i], positions, mask, window)
        x = jnp.tanh(x + jnp.einsum("btnh,nhd->btd", o, MODEL["o"][i]))
        after.append(cache)
    return x @ MODEL["embed"].T, after


def sample(attend):
    """Returns tokens [BATCH, NUM_STEPS] and the logits that each is the largest of."""
    prompts = jax.random.randint(jax.random.key(1), (BATCH, PADDED), 1, VOCAB)
    lens = jnp.asarray(PROMPT_LENS)
    is_prompt = jnp.arange(PADDED) < lens[:, None]
    prompts = jnp.where(is_prompt, prompts, 0)
    keys = jnp.arange(CACHE_LEN)
    # What each sequence may ever attend to: all but the gap behind its prompt.
    is_seen = jnp.pad(is_prompt, ((0, 0), (0, CACHE_LEN - PADDED)), constant_values=True)
    empty = {
        "k": jnp.zeros((BATCH, CACHE_LEN, KV_HEADS, DIM)),
        "v": jnp.zeros((BATCH, CACHE_LEN, KV_HEADS, DIM)),
        "positions": jnp.zeros((BATCH, CACHE_LEN), jnp.int32),
        "end_index": jnp.int32(0),
    }
    # Positions stay at the last of the prompt in the padding, as in gemma.
    positions = jnp.minimum(jnp.arange(PADDED), lens[:, None] - 1)
    mask = is_seen[:, None] & (keys <= jnp.arange(PADDED)[:, None])
    logits, caches = forward(attend, prompts, [empty] * NUM_LAYERS, positions, mask)
    logits = jnp.take_along_axis(logits, lens[:, None, None] - 1, axis=1)[:, 0]

    def step(carry, i):
        logits, caches = carry
        tokens = jnp.argmax(logits, axis=-1)
        mask = (is_seen & (keys <= PADDED + i))[:, None]
        new, caches = forward(attend, tokens[:, None], caches, (lens + i)[:, None], mask)
        return (new[:, 0], caches), (tokens, logits)

    _, (tokens, logits) = jax.lax.scan(step, (logits, caches), jnp.arange(NUM_STEPS))
    return tokens.T, logits


def test_a_sampler_says_the_same():
    tokens, logits = jax.jit(sample, static_argnums=0)(attend_after)
    expected, expected_logits = jax.jit(sample, static_argnums=0)(attend_before)
    np.testing.assert_allclose(logits, expected_logits, rtol=1e-4, atol=1e-4)
    assert tokens.tolist() == expected.tolist()
    assert len({*tokens.ravel().tolist()}) > 5  # it is no loop


def arrays(num_new, cache_len=CACHE_LEN):
    rng = np.random.default_rng(0)
    shapes = [(BATCH, num_new, HEADS, DIM)] + [(BATCH, num_new, KV_HEADS, DIM)] * 2
    shapes += [(BATCH, cache_len, KV_HEADS, DIM)] * 2
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


@pytest.mark.parametrize("num_new, cache_len", [(1, 32), (5, 21), (4, 24)])
def test_rows_have_their_own_positions(num_new, cache_len):
    q, k, v, k_cache, v_cache = arrays(num_new, cache_len)
    positions = jnp.int32([0, 7, cache_len - num_new])
    o, k_after, v_after = jax.jit(compat.cached_attention)(q, k, v, k_cache, v_cache, positions)
    for b, begin in enumerate(positions.tolist()):
        end = begin + num_new
        keys, values = k_cache[b].at[begin:end].set(k[b]), v_cache[b].at[begin:end].set(v[b])
        assert (k_after[b] == keys).all() and (v_after[b] == values).all()
        want = jax.nn.dot_product_attention(
            q[b], keys[:end], values[:end],
            mask=jnp.arange(end)[None] <= begin + jnp.arange(num_new)[:, None],
        )  # fmt: skip
        np.testing.assert_allclose(o[b], want, rtol=2e-5, atol=2e-5)


def test_layers_share_a_plan_and_write_in_place():
    """The compiled step has one plan for each kind of layer, and no copy of a cache."""

    def step(q, k, v, caches, positions):
        after = []
        for window, (k_cache, v_cache) in zip(WINDOWS, caches, strict=True):
            o, *cache = compat.cached_attention(
                q, k, v, k_cache, v_cache, positions, sliding_window=window
            )
            q = q + o
            after.append(cache)
        return q, after

    q, k, v, *cache = arrays(1)
    caches = [[x + i for x in cache] for i in range(NUM_LAYERS)]
    lowered = jax.jit(step, donate_argnums=3).lower(q, k, v, caches, jnp.int32([0, 7, 31]))
    text = lowered.compile().as_text()
    calls = re.findall(r'custom_call_target="(\w*plan\w*)"', text)
    assert len(calls) == len({*WINDOWS})
    made_by = re.findall(rf"= f32\[{BATCH},{CACHE_LEN},{KV_HEADS},{DIM}\]\S* ([\w-]+)\(", text)
    assert {*made_by} <= {"parameter", "get-tuple-element", "bitcast", "custom-call"}
    assert made_by


@pytest.mark.parametrize(
    "change, match",
    [
        ({"query": jnp.ones((BATCH, 1, 3, DIM))}, "query: expected a multiple of 2 heads, got 3"),
        ({"key": jnp.ones((BATCH, 2, 2, DIM))}, r"key: expected \[3, 1, heads, 16\]"),
        ({"v_cache": jnp.ones((BATCH, 8, 2, DIM))}, "v_cache: expected k_cache's"),
        ({"k_cache": jnp.ones((BATCH, CACHE_LEN, 2, DIM), jnp.bfloat16)},
         "k_cache: expected the query's float32, got bfloat16"),
        ({"positions": jnp.zeros(2, jnp.int32)}, r"positions: expected \[3\] or \[3, 1\]"),
        ({"positions": jnp.zeros((BATCH, 5), jnp.int32)}, r"positions: .* \[3, 1\], got \[3, 5\]"),
        ({"sliding_window": 0}, "sliding_window: expected a positive number"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)  # fmt: skip
def test_what_does_not_fit_is_refused(change, match):
    names = "query", "key", "value", "k_cache", "v_cache"
    given = dict(zip(names, arrays(1), strict=True)) | {"positions": jnp.zeros(BATCH, jnp.int32)}
    with pytest.raises(ValueError, match=f"^cached_attention: {match}"):
        compat.cached_attention(**given | change)


def test_more_new_tokens_than_places_are_refused():
    with pytest.raises(
        ValueError, match="^cached_attention: key: expected at most 4 tokens, got 5"
    ):
        compat.cached_attention(*arrays(5, 4), jnp.zeros(BATCH, jnp.int32))


def test_an_attention_layer_of_flax_nnx():
    """A layer as those of Flax's example of Gemma: a prompt of three lengths, then a token each."""
    nnx = pytest.importorskip("flax.nnx", reason="Flax is not installed")

    class Attention(nnx.Module):
        def __init__(self, attend, rngs):
            self.q = nnx.Einsum("btd,dnh->btnh", (SIZE, HEADS, DIM), rngs=rngs)
            self.kv = nnx.Einsum("btd,cdkh->cbtkh", (2, SIZE, KV_HEADS, DIM), rngs=rngs)
            self.o = nnx.Einsum("btnh,nhd->btd", (HEADS, DIM, SIZE), rngs=rngs)
            self.attend = attend

        def __call__(self, x, cache, positions, mask):
            q, (k, v) = rotated(self.q(x), positions), self.kv(x)
            o, cache = self.attend(q, rotated(k, positions), v, cache, positions, mask, WINDOW)
            return self.o(o), cache

    x = jax.random.normal(jax.random.key(0), (BATCH, PADDED + 1, SIZE))
    lens, keys = jnp.asarray(PROMPT_LENS), jnp.arange(CACHE_LEN)
    rows = {"k": jnp.zeros((BATCH, CACHE_LEN, KV_HEADS, DIM))}
    rows |= {"v": rows["k"], "positions": jnp.zeros((BATCH, CACHE_LEN), jnp.int32)}
    is_seen = (keys < lens[:, None]) | (keys >= PADDED)
    outputs = []
    for attend in (attend_before, attend_after):
        layer = Attention(attend, nnx.Rngs(0))
        run = nnx.jit(lambda layer, *x: layer(*x))
        positions = jnp.minimum(jnp.arange(PADDED), lens[:, None] - 1)
        mask = is_seen[:, None] & (keys <= jnp.arange(PADDED)[:, None])
        _, cache = run(layer, x[:, :-1], rows | {"end_index": jnp.int32(0)}, positions, mask)
        mask = (is_seen & (keys <= PADDED))[:, None]
        outputs.append(run(layer, x[:, -1:], cache, lens[:, None], mask)[0])
    np.testing.assert_allclose(outputs[1], outputs[0], rtol=1e-5, atol=1e-5)
