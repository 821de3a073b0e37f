"""The backward pass with variants, against jax.vjp of dense attention in float64 that calls the
user's functions."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Case, build
from backends import Backend
from checking import assert_same_bits
from test_variant import (
    OPERANDS,
    dilated,
    nothing,
    of_lengths,
    on_every_cpu,
    packed,
    per_row,
    sinks_and_window,
    soft_cap,
    variant_of,
)
from variant_functions import alibi, dense_bias, documents, prefix_lm, sigmoid_of, t5_bias

import jax_attn as ja
from jax_attn import reference
from jax_attn.variant import At

FLOATS = ("float32", "bfloat16", "float16")


class Element:
    """An operand of the oracle: indices are clamped."""

    def __init__(self, array):
        self.array, self.shape = array, array.shape

    def __getitem__(self, indices):
        indices = indices if isinstance(indices, tuple) else (indices,)
        return self.array[
            tuple(jnp.clip(i, 0, n - 1) for i, n in zip(indices, self.shape, strict=True))
        ]


def oracle(case, batch, functions, q, k, v, sinks, operands):
    """o and lse of the live rows, one request after the other."""
    logits_of, mask_of, normalize = functions
    group, cap = case.num_qo_heads // case.num_kv_heads, case.logits_soft_cap
    sm_scale = case.head_dim_qk**-0.5 if case.sm_scale is None else case.sm_scale
    k, v = (x if batch.layer is None else x[batch.layer] for x in (k, v))
    given = {name: Element(x) if x.ndim else x for name, x in operands.items()}
    lengths = batch.lengths.plan_arguments()
    fields = ("qo_indptr", "kv_lens", "page_indptr", "page_indices", "kv_indptr", "q_offsets")
    requests = reference._requests(
        *(lengths.get(name) for name in fields), k.shape[1], ja.AttentionSpec(**case.spec_fields())
    )

    def call(function, *arguments):
        code = getattr(function, "__code__", None)
        named = code.co_varnames[: code.co_argcount]
        return function(*arguments, **{n: x for n, x in given.items() if n in named})

    results = []
    for r, (rows, places, visible, offset) in enumerate(requests):
        num_rows, num_keys = visible.shape
        shape = (case.num_qo_heads, num_rows, num_keys)
        kv_row = places[0] if len(places) == 1 else places[0] * k.shape[1] + places[1]
        head, row, key = np.indices(shape).astype(np.int32)
        at = At(
            head, head // group, np.full(shape, r, np.int32), row + offset, key, row + rows.start,
            np.broadcast_to(kv_row, shape).astype(np.int32), np.full(shape, num_rows, np.int32),
            np.full(shape, num_keys, np.int32),
        )  # fmt: skip
        of_rows = q[rows].swapaxes(0, 1)
        keys, values = (jnp.repeat(x[places].swapaxes(0, 1), group, 0) for x in (k, v))
        scores = sm_scale * of_rows @ keys.swapaxes(1, 2)
        scores = cap * jnp.tanh(scores / cap) if cap else scores
        at, logits, seen = (
            jax.tree.map(jnp.ravel, at),
            scores.ravel(),
            np.ravel(visible[None] | (head < 0)),
        )
        if mask_of is not None:
            seen = seen & jax.vmap(lambda at: call(mask_of, at))(at)
        if logits_of is not None:
            # Not where hidden: 0 times what is not finite there would be NaN.
            logits = jax.vmap(lambda s, at: call(logits_of, s, at))(logits, at)
        logits, seen = logits.reshape(shape), seen.reshape(shape)
        if normalize == "none":
            o = jnp.where(seen, logits, 0) @ values
            results.append((o.swapaxes(0, 1), jnp.zeros((num_rows, case.num_qo_heads))))
            continue
        some = seen.any(-1)
        logits = jnp.where(seen, logits, -jnp.inf)
        top = jax.lax.stop_gradient(jnp.where(some, logits.max(-1, initial=-jnp.inf), 0))
        weights = jnp.where(seen, jnp.exp(logits - top[..., None]), 0)
        total = weights.sum(-1)
        if sinks is not None:
            total = total + jnp.where(some, jnp.exp(sinks[:, None] - top), 0)
        safe = jnp.where(some, total, 1)
        o = weights / safe[..., None] @ values
        lse = jnp.where(some, top + jnp.log(safe), 0)
        results.append((o.swapaxes(0, 1), lse.swapaxes(0, 1)))
    return tuple(jnp.concatenate(x) for x in zip(*results, strict=True))


def gradients_of(case, functions, operands, batch, d_o, d_lse, variant=None):
    """Of q, k, v, the operands that are floats, and sinks: by the kernels, and by the oracle."""
    logits_of, mask_of, normalize = functions
    variant = variant or ja.Variant(logits_of, mask_of, normalize, operands)
    spec = ja.AttentionSpec(**case.spec_fields(), variant=variant, target="cpu")
    plan = ja.plan(spec, **batch.lengths.plan_arguments())
    live = sum(case.qo_lens)
    floats = {n: x for n, x in operands.items() if np.asarray(x).dtype.name in FLOATS}
    others = {n: x for n, x in operands.items() if n not in floats}
    with_lse = normalize == "softmax"

    def attend(q, k, v, floats, sinks):
        read = {n: (floats | others)[n] for n in variant.names}
        out = ja.attention(
            q, k, v, plan, layer=batch.layer, sinks=sinks, variant_operands=read or None,
            return_lse=with_lse,
        )  # fmt: skip
        return out if with_lse else (out, jnp.zeros_like(d_lse))

    inputs = batch.q, batch.k, batch.v, floats, batch.sinks
    step = jax.jit(lambda *x: jax.vjp(attend, *x)[1]((d_o, d_lse)))
    got, again = step(*inputs), step(*inputs)
    jax.tree.map(functools.partial(assert_same_bits, "again"), got, again)

    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(np.float64(x)), inputs)
        # What nobody reads holds NaN.
        wide = jax.tree.map(jnp.nan_to_num, wide)
        wants = [jnp.asarray(np.float64(x[:live])) for x in (d_o, d_lse)]

        def whole(q, k, v, floats, sinks):
            read = floats | {n: jnp.asarray(x) for n, x in others.items()}
            return oracle(case, batch, functions, q, k, v, sinks, read)

        want = jax.vjp(whole, *wide)[1](tuple(wants))
        want = jax.tree.map(np.asarray, want)
    return jax.tree.map(np.asarray, got), want


def check(case, logits=None, mask=None, normalize="softmax", operands=None):
    if operands is None:
        operands = variant_of(logits, mask, normalize)[1]
    batch = build(case)
    rng = np.random.default_rng(3)
    shape = (case.spec_fields()["max_qo_tokens"], case.num_qo_heads)
    d_o = rng.normal(size=(*shape, case.head_dim_vo or case.head_dim_qk))
    d_lse = rng.normal(size=shape)
    live = sum(case.qo_lens)
    d_o[live:] = d_lse[live:] = 0
    d_o, d_lse = jnp.asarray(d_o, case.dtype), jnp.asarray(d_lse, jnp.float32)
    got, want = gradients_of(case, (logits, mask, normalize), operands, batch, d_o, d_lse)
    eps = 2e-5 if case.dtype == "float32" else 3 * float(jnp.finfo(case.dtype).eps)
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        name = jax.tree_util.keystr(path)
        own = max(eps, float(jnp.finfo(a.dtype).eps))
        error, size = np.abs(np.float64(a) - b), np.abs(b).max(initial=0)
        assert np.isfinite(b).all()
        assert (error <= own * size + 1e-30).all(), (
            f"{name}: off by {error.max()} at {np.argwhere(error == error.max())[:1]} of {size}"
        )
        assert not a[b == 0].any() or size == 0 or a.ndim < 3, name
    return got


SHORT = Case("", (37, 0, 5, 1), (90, 4, 5, 150), head_dim_qk=16)
LONG = Case("", (150, 3), (700, 130), head_dim_qk=32, head_dim_vo=24, page_size=None)
MASKS = (documents, prefix_lm, dilated, sinks_and_window, packed, nothing)


@on_every_cpu
@pytest.mark.parametrize("mask", MASKS, ids=lambda f: f.__name__)
def test_masks(mask, backend):
    for case in (SHORT, LONG):
        check(case, mask=mask)


@on_every_cpu
@pytest.mark.parametrize(
    "logits", [alibi, t5_bias, soft_cap, dense_bias, per_row, of_lengths], ids=lambda f: f.__name__
)
def test_logits(logits, backend):
    for case in (SHORT, LONG):
        check(case, logits)
