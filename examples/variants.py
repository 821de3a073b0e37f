"""A dozen published variants of attention, each a function of scalars, checked against jnp."""

import jax
import jax.numpy as jnp
import numpy as np

import jax_attn as ja
from jax_attn import reference

rng = np.random.default_rng(0)
T, H, D = 96, 4, 64
slopes = np.float32(2.0 ** -(8 / H * np.arange(1, H + 1)))
table = rng.normal(size=(32, H)).astype(np.float32)
doc = np.int32(np.arange(T) // 29)
image = np.int32(np.where((np.arange(T) % 40) < 12, np.arange(T) // 40, -1))  # -1: text
seen = np.tri(T, dtype=bool) & (rng.random((T, T)) < 0.5) | np.eye(T, dtype=bool)
temperature = np.float32(1 + 0.1 * np.log1p(np.arange(T)))
blocks = rng.random((T // 16, T // 16)) < 0.6


def alibi(score, at, slopes):  # Press et al., arXiv 2108.12409
    return score - slopes[at.head] * (at.q_pos - at.kv_pos)


def t5_bias(score, at, table):  # Raffel et al., arXiv 1910.10683
    distance = jnp.maximum(at.q_pos - at.kv_pos, 0)
    far = 16 + (jnp.log(jnp.maximum(distance, 1) / 16) / np.log(128 / 16) * 16).astype(jnp.int32)
    return score + table[jnp.where(distance < 16, distance, jnp.minimum(far, 31)), at.head]


def soft_cap(score, at):  # Gemma 2, arXiv 2408.00118
    return 20.0 * jnp.tanh(score / 20.0)


def sigmoid(score, at):  # Ramapuram et al., arXiv 2409.04431: without softmax
    return jax.nn.sigmoid(score - np.float32(np.log(T)))


def tempered(score, at, temperature):  # one temperature per position
    return score * temperature[at.q_pos]


def causal(at):
    return at.kv_pos <= at.q_pos


def documents(at, doc):  # several documents in one sequence
    return (doc[at.q_row] == doc[at.kv_row]) & (at.kv_pos <= at.q_pos)


def prefix_lm(at):  # the first 32 tokens see each other
    return (at.kv_pos < 32) | (at.kv_pos <= at.q_pos)


def dilated(at):  # Beltagy et al., arXiv 2004.05150
    distance = at.q_pos - at.kv_pos
    return (distance >= 0) & (distance < 48) & (distance % 3 == 0)


def sinks_and_window(at):  # Xiao et al., arXiv 2309.17453
    return (at.kv_pos <= at.q_pos) & ((at.kv_pos < 4) | (at.q_pos - at.kv_pos < 24))


def tree(at, seen):  # drafts that see their ancestors: any boolean array
    return seen[at.q_pos, at.kv_pos]


def images(at, image):  # Zhou et al., arXiv 2408.11039: patches of an image see each other
    same = (image[at.q_row] == image[at.kv_row]) & (image[at.q_row] >= 0)
    return same | (at.kv_pos <= at.q_pos)


def block_sparse(at, blocks):  # Child et al., arXiv 1904.10509
    return blocks[at.q_pos // 16, at.kv_pos // 16] | (at.q_pos == at.kv_pos)


VARIANTS = {
    "alibi": ja.Variant(alibi, causal, operands={"slopes": slopes}),
    "t5_bias": ja.Variant(t5_bias, causal, operands={"table": table}),
    "soft_cap": ja.Variant(soft_cap, causal),
    "sigmoid": ja.Variant(sigmoid, causal, normalize="none"),
    "tempered": ja.Variant(tempered, operands={"temperature": temperature}),
    "documents": ja.Variant(mask=documents, operands={"doc": doc}),
    "prefix_lm": ja.Variant(mask=prefix_lm),
    "dilated": ja.Variant(mask=dilated),
    "sinks_and_window": ja.Variant(mask=sinks_and_window),
    "tree": ja.Variant(mask=tree, operands={"seen": seen}),
    "images": ja.Variant(mask=images, operands={"image": image}),
    "block_sparse": ja.Variant(mask=block_sparse, operands={"blocks": blocks}),
}
OPERANDS = {
    "slopes": slopes, "table": table, "temperature": temperature, "doc": doc, "seen": seen,
    "image": image, "blocks": blocks,
}  # fmt: skip

attend = jax.jit(
    lambda q, k, v, plan, operands: ja.attention(q, k, v, plan, variant_operands=operands)
)
q, k, v = rng.normal(size=(3, T, H, D)).astype(np.float32)
qo_indptr, kv_lens = np.array([0, T], np.int32), np.array([T], np.int32)
for name, variant in VARIANTS.items():
    spec = ja.AttentionSpec(
        H, H, D, dtype="float32", causal=False, page_size=None, max_kv_tokens=T, max_qo_tokens=T,
        max_batch=1, variant=variant, target="cpu",
    )  # fmt: skip
    operands = {n: OPERANDS[n] for n in variant.names}
    o = attend(q, k, v, ja.plan(spec, qo_indptr, kv_lens), operands)
    want, _ = reference.attention(q, k, v, qo_indptr, kv_lens, spec=spec, variant_operands=operands)
    np.testing.assert_allclose(o, want, rtol=1e-4, atol=1e-5)
    print(f"{name}: {len(variant.instructions)} values, as in jnp")
