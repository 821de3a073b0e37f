"""The calls that jax's own tests make of jax.nn.dot_product_attention, as a table.

Each is tried in bfloat16 or float16, with 1, 2 or 4 query heads a KV head, mapped by vmap or not,
with cotangents of o and lse in the dtype of the arrays. The truth is float32 JAX, which is also
compared with jax.nn.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_attn as ja
from helpers.backends import on_every_platform

BATCH, LENGTH, HEADS, HEAD_DIM = 2, 48, 4, 32
MASKS = {
    "nothing": {},
    "bias": {"bias": (1, HEADS, LENGTH, LENGTH)},
    "bias of each": {"bias": (BATCH, HEADS, LENGTH, LENGTH)},
    "causal": {"is_causal": True},
    "padding": {"lengths": True},
    "custom": {"mask": (1, 1, LENGTH, LENGTH)},
    "mask of keys": {"mask": (1, 1, LENGTH)},
    "causal, padding": {"is_causal": True, "lengths": True},
    "custom, padding": {"mask": (1, 1, LENGTH, LENGTH), "lengths": True},
    "bias, causal": {"bias": (1, HEADS, LENGTH, LENGTH), "is_causal": True},
    "causal, window": {"is_causal": True, "local_window_size": (3, 2)},
    "window": {"local_window_size": (3, 0)},
}
GRID = [
    (name, dtype, group, mapped)
    for i, name in enumerate(MASKS)
    for j, mapped in enumerate((False, True))
    for dtype, group in [(("bfloat16", "float16")[(i + j) % 2], (1, 2, 4)[(i + 2 * j) % 3])]
]


def truth(q, k, v, bias, mask, lengths, is_causal=False, local_window_size=None):
    """o and lse in float32."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    logits = jnp.einsum("btnd,bsnd->bnts", q, k) * q.shape[-1] ** -0.5
    logits = logits if bias is None else logits + bias
    i, j = np.arange(LENGTH)[:, None], np.arange(LENGTH)[None]
    left, right = local_window_size or (LENGTH, LENGTH)
    visible = (j >= i - left) & (j <= (i if is_causal else i + right))
    visible = jnp.broadcast_to(visible, logits.shape)
    visible = visible if mask is None else visible & mask
    live = jnp.ones((BATCH, LENGTH), bool)
    if lengths is not None:
        visible &= np.arange(LENGTH) < lengths[1][:, None, None, None]
        live = np.arange(LENGTH) < lengths[0][:, None]
    logits = jnp.where(visible, logits, -1e30)
    o = jnp.einsum("bnts,bsnd->btnd", jax.nn.softmax(logits, axis=-1), v)
    lse = jnp.moveaxis(jax.nn.logsumexp(logits, axis=-1), 1, 2)
    return o * live[..., None, None], lse, live


@on_every_platform
@pytest.mark.parametrize("name,dtype,group,mapped", GRID)
def test_case(name, dtype, group, mapped, backend):
    rng = np.random.default_rng(7)
    options = dict(MASKS[name])
    shapes = [(BATCH, LENGTH, n, HEAD_DIM) for n in (HEADS, HEADS // group, HEADS // group)]
    q, k, v = (jnp.asarray(rng.normal(size=x), dtype) for x in shapes)
    bias = None if "bias" not in options else rng.normal(size=options.pop("bias"))
    bias = None if bias is None else jnp.asarray(bias, dtype)
    mask = options.pop("mask", None)
    if mask is not None:
        mask = np.tril(np.ones(mask, bool)) if mask[-2] == LENGTH else np.ones(mask, bool)
    lengths = None
    if options.pop("lengths", False):
        lengths = np.int32([[LENGTH // 2, LENGTH // 4], [LENGTH // 4, LENGTH // 2]])

    def ours(q, k, v, bias, lengths, attend=ja.dot_product_attention, **more):
        queries, keys = (None, None) if lengths is None else lengths
        given = {"query_seq_lengths": queries, "key_value_seq_lengths": keys}
        return attend(q, k, v, bias, mask, **given, **options, **more, return_residual=True)

    attend = ours
    if mapped:  # arrays without a batch axis, which vmap maps
        of_bias = 0 if bias is not None and bias.shape[0] > 1 else None
        if mask is not None:
            mask = mask.reshape(mask.shape[-3:])
        if lengths is None:
            attend = jax.vmap(ours, (0, 0, 0, of_bias, None))
        else:  # one length for each element
            attend = jax.vmap(
                lambda q, k, v, bias, lens: ours(q, k, v, bias, lens[:, None]),
                (0, 0, 0, of_bias, 1),
            )
    got, pull = jax.vjp(lambda *x: attend(*x, lengths), q, k, v, bias)
    exact = [None if x is None else x.astype(jnp.float32) for x in (q, k, v, bias)]
    o, lse, live = truth(*exact, mask, lengths, **options)
    assert got[0].dtype == got[1].dtype == dtype
    np.testing.assert_allclose(np.float32(got[0]), o, rtol=0.02, atol=0.02)
    seen = np.asarray(live)[..., None] & np.ones(HEADS, bool)
    np.testing.assert_allclose(np.float32(got[1])[seen], lse[seen], rtol=0.01, atol=0.02)
    # jax.nn agrees with the truth.
    theirs, _ = ours(*exact, lengths, jax.nn.dot_product_attention)
    np.testing.assert_allclose(theirs, o, rtol=1e-4, atol=1e-4)

    along = [jnp.asarray(rng.normal(size=x.shape), dtype) for x in got]
    along[1] = along[1] * seen  # rows beyond the lengths have no lse
    found = pull(tuple(along))
    of_truth = functools.partial(truth, mask=mask, lengths=lengths, **options)
    _, pull = jax.vjp(lambda *x: of_truth(*x)[:2], *exact)
    want = pull(tuple(x.astype(jnp.float32) for x in along))
    for argument, a, b in zip("qkvb", found, want, strict=True):
        if b is not None:
            assert a.dtype == dtype and a.shape == b.shape, argument
            largest = float(jnp.abs(b).max())
            np.testing.assert_allclose(
                np.float32(a), b, rtol=0.03, atol=0.02 * max(1, largest), err_msg=argument
            )


def test_gradients_of_lse_are_right_where_jax_nn_has_none():
    """jax.nn stops the gradient of lse: a loss of lse has none in q and k."""
    q, k, v = np.random.default_rng(0).normal(size=(3, 2, 9, 4, 16)).astype(np.float32)

    def slopes(attend, *qkv):
        return jax.grad(lambda *x: jnp.sum(attend(*x)[1]), (0, 1))(*qkv)

    def plain(q, k, v):
        logits = jnp.einsum("btnd,bsnd->btns", q, k) / 4
        return None, jax.nn.logsumexp(logits, axis=-1)

    with jax.enable_x64(True):
        exact = slopes(plain, *(jnp.asarray(x, jnp.float64) for x in (q, k, v)))
        want = [np.asarray(x) for x in exact]
    got, theirs = (
        slopes(functools.partial(attend, return_residual=True), q, k, v)
        for attend in (ja.dot_product_attention, jax.nn.dot_product_attention)
    )
    for a, b, c in zip(got, theirs, want, strict=True):
        np.testing.assert_allclose(a, c, atol=1e-6)
        assert np.abs(c).max() > 0.4 and not np.asarray(b).any()
