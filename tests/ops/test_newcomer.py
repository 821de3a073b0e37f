"""A newcomer's mistakes: each message says what to do instead."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_attn as ja

SIZES = {"dtype": "float32", "target": "cpu", "batch_size": 2, "max_kv_len": 20}
SPEC, (K_PAGES, V_PAGES), TABLE = ja.fixed_batch(4, 2, 64, max_qo_tokens=6, **SIZES)
PLAN = ja.plan(SPEC, [0, 5, 6], [5, 9], *TABLE)
Q, NEW, COS = jnp.ones((6, 4, 64)), jnp.ones((6, 2, 64)), jnp.ones((6, 32))
QKV = jnp.ones((6, 8 * 64))
SLOPES = np.ones(4, np.float32)


def loss(new):
    pages = ja.append_kv(K_PAGES, V_PAGES, new, new, PLAN)
    return ja.attention(Q, *pages, PLAN).sum()


def rotated_loss(qkv):
    q, *pages = ja.append_rotated(qkv, COS, COS, K_PAGES, V_PAGES, PLAN)
    return ja.attention(q, *pages, PLAN).sum()


def attend(q=Q, k_pages=K_PAGES, v_pages=V_PAGES, plan=PLAN, **more):
    return ja.attention(q, k_pages, v_pages, plan, **more)


MISTAKES = {
    "spec for plan": (lambda: attend(plan=SPEC), "an AttentionPlan, which jax_attn.plan makes"),
    "batch axis of q": (lambda: attend(Q[None]), "no batch axis: the tokens of all requests are"),
    "batch axis of k_new": (
        lambda: ja.append_kv(K_PAGES, V_PAGES, NEW[None], NEW[None], PLAN),
        "no batch axis: the tokens of all requests are packed",
    ),
    "batch axis of qkv": (
        lambda: ja.append_rotated(QKV[None], COS, COS, K_PAGES, V_PAGES, PLAN),
        "no batch axis: the tokens of all requests are packed",
    ),
    "tokens of this batch only": (
        lambda: attend(Q[:5]),
        "Pad it, or make the spec with this capacity (5)",
    ),
    "another dtype": (lambda: attend(Q.astype("float16")), "Cast it: q.astype('float32')"),
    "stacked without layer": (
        lambda: attend(Q, K_PAGES[None], V_PAGES[None]),
        "pass layer for a stacked cache",
    ),
    "vmap": (lambda: jax.vmap(attend)(Q[None]), "put the batch into the plan"),
    "gradient of append_kv": (
        lambda: jax.grad(loss)(NEW),
        "in a loss, pass k and v to attention or dot_product_attention (docs/training.md)",
    ),
    "gradient of append_rotated": (
        lambda: jax.grad(rotated_loss)(QKV),
        "in a loss, pass k and v to attention or dot_product_attention (docs/training.md)",
    ),
    "forward mode of append_kv": (lambda: jax.jvp(loss, (NEW,), (NEW,)), "pass k and v to"),
    "kv_lens without the new tokens": (
        lambda: ja.plan(SPEC, [0, 5, 6], [0, 9], *TABLE),
        "kv_lens count the new tokens, too: add them",
    ),
    "rows without the new tokens": (
        lambda: ja.rows([0, 5, 6], [3, 9], 6),
        "kv_lens count the new tokens, too: add them",
    ),
    "one token too many": (
        lambda: ja.plan(SPEC, [0, 6, 7], [6, 9], *TABLE),
        "raise max_qo_tokens of the AttentionSpec",
    ),
    "one request too many": (
        lambda: ja.plan(SPEC, [0, 1, 2, 3], [1, 1, 1], [0, 1, 2, 3], [0, 1, 2]),
        "raise max_batch of the AttentionSpec",
    ),
    "page table in one": (
        lambda: ja.plan(SPEC, [0, 5, 6], [5, 9], TABLE),
        "page_indptr, page_indices: expected both",
    ),
    "an operand that is not declared": (
        lambda: ja.Variant(lambda score, at, slopes: score * slopes[at.head]),
        "declare the arrays that it reads, operands={'slopes': array}",
    ),
    "an operand of a mask that is not declared": (
        lambda: ja.Variant(mask=lambda at, doc: doc[at.q_row] == doc[at.kv_row]),
        "declare the arrays that it reads, operands={'doc': array}",
    ),
    "an array made in a variant": (
        lambda: ja.Variant(lambda score, at: score + jnp.arange(4.0)[at.head]),
        "make arrays operands, operands={name: array}, and index them, name[i]",
    ),
    "an array around a variant": (
        lambda: ja.Variant(lambda score, at: score + jnp.asarray(SLOPES)[at.head]),
        "operands={name: array}",
    ),
    "a numpy array around a variant": (
        lambda: ja.Variant(lambda score, at: score + SLOPES[at.head]),
        "make an array that they index one of the operands",
    ),
    "if in a variant": (
        lambda: ja.Variant(lambda score, at: score if at.head > 2 else -score),
        "use jnp.where",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_the_message_says_the_fix(name):
    mistake, fix = MISTAKES[name]
    with pytest.raises((ValueError, TypeError, NotImplementedError)) as caught:
        mistake()
    message = str(caught.value)
    assert fix in message
    assert "\n" not in message and len(message) < 300, "one sentence or two"


def test_the_fixes_work():
    np.testing.assert_array_equal(attend()[:6], 0)  # the empty pages of a fixed batch
    variant = ja.Variant(
        lambda score, at, slopes: score + slopes[at.head], operands={"slopes": SLOPES}
    )
    spec, *_ = ja.fixed_batch(4, 2, 64, variant=variant, **SIZES)
    plan = ja.plan(spec, [0, 1, 2], [5, 9], *TABLE)
    attend(Q[:2], plan=plan, variant_operands={"slopes": SLOPES})
    ragged = ja.AttentionSpec(
        4, 2, 64, page_size=None, max_batch=1, max_qo_tokens=6, max_kv_tokens=6,
        dtype="float32", target="cpu",
    )  # fmt: skip
    plan = ja.plan(ragged, [0, 6], [6])
    assert jax.grad(lambda new: ja.attention(Q, new, new, plan).sum())(NEW).any()
