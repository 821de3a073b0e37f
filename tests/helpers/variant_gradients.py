"""Gradients of variants, and their oracle: jax.vjp of dense attention in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from variant_functions import documents

import jax_attn as ja
from helpers.attention_cases import Case, build, built
from helpers.backends import Backend
from helpers.checking import assert_same_bits
from helpers.variants import variant_of
from jax_attn import reference
from jax_attn._variant.program import At

FLOATS = ("float32", "bfloat16", "float16")


NO_VARIANT = (None, None, "softmax")


class Element:
    """An operand of the oracle; indices are clamped."""

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
            # Hidden pairs are left out: 0 times a non-finite logit would be NaN.
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


def plain_plan(case, variant, target):
    spec = ja.AttentionSpec(**case.spec_fields(), variant=variant, target=target)
    return ja.plan(spec, **built(case, "normal").lengths.plan_arguments())


def gradients_of(case, functions, operands, target="cpu", make_plan=plain_plan):
    """Gradients of q, k, v, the float operands, and sinks, by the kernels."""
    variant = None if functions == NO_VARIANT else ja.Variant(*functions, operands)
    plan = make_plan(case, variant, target)
    batch, (d_o, d_lse) = built(case, "normal"), cotangents(case)
    floats, others = split(operands)
    with_lse = functions[2] != "none"

    def attend(q, k, v, floats, sinks):
        read = {n: (floats | others)[n] for n in (variant.names if variant else ())}
        out = ja.attention(
            q, k, v, plan, layer=batch.layer, sinks=sinks, variant_operands=read or None,
            return_lse=with_lse,
        )  # fmt: skip
        return out if with_lse else (out, jnp.zeros_like(d_lse))

    inputs = batch.q, batch.k, batch.v, floats, batch.sinks
    step = jax.jit(lambda *x: jax.vjp(attend, *x)[1]((d_o, d_lse)))
    got, again = step(*inputs), step(*inputs)
    jax.tree.map(functools.partial(assert_same_bits, "again"), got, again)
    return jax.tree.map(np.asarray, got)


@functools.lru_cache(maxsize=4)
def gradients_of_oracle(case, functions, operands):
    """The same gradients by the oracle, cached for all backends. operands: made by `frozen`."""
    batch = built(case, "normal")
    floats, others = split({n: np.frombuffer(b, t).reshape(s) for n, t, s, b in operands})
    live = sum(case.qo_lens)
    with jax.enable_x64(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
        inputs = batch.q, batch.k, batch.v, floats, batch.sinks
        # Elements that no row sees hold NaN.
        wide = jax.tree.map(lambda x: np.nan_to_num(np.float64(x)), inputs)
        wants = tuple(np.float64(x[:live]) for x in cotangents(case))

        def whole(q, k, v, floats, sinks):
            read = floats | {n: jnp.asarray(x) for n, x in others.items()}
            return oracle(case, batch, functions, q, k, v, sinks, read)

        want = jax.jit(lambda wide, wants: jax.vjp(whole, *wide)[1](wants))(wide, wants)
        return jax.tree.map(np.asarray, want)


def split(operands):
    """Splits operands into those with gradients and the others."""
    floats = {n: x for n, x in operands.items() if np.asarray(x).dtype.name in FLOATS}
    return floats, {n: x for n, x in operands.items() if n not in floats}


def frozen(operands):
    """Hashable operands: (name, dtype, shape, bytes) of each."""
    arrays = {n: np.asarray(x) for n, x in operands.items()}
    return tuple((n, x.dtype, x.shape, x.tobytes()) for n, x in arrays.items())


@functools.lru_cache(maxsize=4)
def cotangents(case):
    """Cotangents of o and lse, 0 in padding rows."""
    rng = np.random.default_rng(3)
    shape = (case.spec_fields()["max_qo_tokens"], case.num_qo_heads)
    d_o = rng.normal(size=(*shape, case.head_dim_vo or case.head_dim_qk))
    d_lse = rng.normal(size=shape)
    live = sum(case.qo_lens)
    d_o[live:] = d_lse[live:] = 0
    return d_o.astype(case.dtype), d_lse.astype(np.float32)


def check(case, logits=None, mask=None, normalize="softmax", operands=None, target="cpu"):
    if operands is None:
        operands = variant_of(logits, mask, normalize)[1]
    functions = logits, mask, normalize
    got = gradients_of(case, functions, operands, target)
    return compare(case, got, gradients_of_oracle(case, functions, frozen(operands)), target)


def compare(case, got, want, target="cpu"):
    eps = 2e-5 if case.dtype == "float32" else 3 * float(jnp.finfo(case.dtype).eps)
    if target != "cpu":  # functions are within 2^-21; factors of matmuls have 16 bits
        eps *= 2
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


BEST = ja._core.supported_cpu_isas()[-1]


OPERATIONS = {
    "abs": lambda x, y: jnp.abs(x),
    "sign": lambda x, y: x * jnp.sign(y),
    "floor": lambda x, y: x + jnp.floor(y) - jnp.ceil(x) + jnp.round(y),
    "exp": lambda x, y: jnp.exp(-x * x) + jnp.exp2(0.1 * y),
    "log": lambda x, y: jnp.log(1 + x * x) + jnp.log1p(y * y),
    "tanh": lambda x, y: jnp.tanh(x * y),
    "logistic": lambda x, y: jax.nn.sigmoid(x - y),
    "sqrt": lambda x, y: jnp.sqrt(1 + x * x) - jax.lax.rsqrt(2 + y * y),
    "cast": lambda x, y: x * (1.5 * y).astype(jnp.int32) + (x > y),
    "sub": lambda x, y: x - y - (y - x) * 0.5,
    "div": lambda x, y: x / (3 + y * y) - y / (2 + x * x),
    "rem": lambda x, y: jax.lax.rem(x, 0.7 + y * y),
    "min": lambda x, y: jnp.minimum(x, y) + jnp.maximum(x * x, y),
    "ties": lambda x, y: jnp.maximum(jnp.minimum(x, x), jnp.abs(x)) + 0.0 * y,
    "select": lambda x, y: jnp.where(x < y, x * x, y) + jnp.clip(x, -0.5, 0.5),
    "power": lambda x, y: (1 + x * x) ** -2 + x**3 * 0.1,
    "pow": lambda x, y: (1 + x * x) ** (0.3 * y) + (0.5 + y * y) ** 1.3 + (x - y) ** 2.0,
    "pow_of_int": lambda x, y: (1.5 + jnp.tanh(x)) ** (2 * y).astype(jnp.int32) * y,
    "sin": lambda x, y: jnp.sin(x * y) + jnp.cos(x - y) + jnp.tan(0.3 * jnp.tanh(x)),
    "atan": lambda x, y: jnp.arctan(x * 2) + jnp.arctan2(y, 1.5 + x * x),
    "asin": lambda x, y: jnp.arcsin(0.9 * jnp.tanh(x)) - jnp.arccos(0.8 * jnp.tanh(y)),
    "erf": lambda x, y: (
        jax.lax.erf(x) * y + jax.lax.erfc(y - x) + jax.nn.gelu(x, approximate=False)
    ),
    "expm1": lambda x, y: (
        jnp.expm1(0.3 * x) + jax.nn.elu(y) + jnp.sinh(0.5 * y) - jnp.cosh(0.4 * x)
    ),
    "cbrt": lambda x, y: jnp.cbrt(2 + jnp.tanh(x)) + jnp.cbrt(-1 - y * y),
    "select_n": lambda x, y: (
        jax.lax.select_n(jnp.clip(x, 0, 2.5).astype(jnp.int32), x * y, x * x, jnp.sin(y))
        + jnp.select([x < y, y > 1.0], [x * x, y], 0.5 * x)
    ),
    "softplus": lambda x, y: jax.nn.softplus(x) + jax.nn.relu(y) + jax.nn.silu(x),
    "stop_gradient": lambda x, y: x * jax.lax.stop_gradient(x + y) + y,
    "nothing": lambda x, y: y,
}


@functools.cache
def logits_of(operation):
    def logits(score, at, x):
        return OPERATIONS[operation](score, x[at.kv_pos, at.head] + x[at.q_pos - 40, 0])

    return logits


def plan_of(case, batch, variant, **fields):
    spec = ja.AttentionSpec(**case.spec_fields() | {"target": "cpu"} | fields, variant=variant)
    return ja.plan(spec, **batch.lengths.plan_arguments())


def gradients_beside_nan(dtype, target):
    """Gradients of documents 0 and 2 of three, with and without NaN in row or key 60.

    Row and key 60 are of document 1.
    """
    variant, _ = variant_of(None, documents)
    case = Case("", (150,), (150,), page_size=None, dtype=dtype)
    batch = build(case)
    plan = plan_of(case, batch, variant, target=target)
    d_o = jnp.asarray(np.random.default_rng(0).normal(size=batch.q.shape), dtype)
    operands = {
        "q_doc": np.arange(150, dtype=np.int32) // 50,
        "kv_doc": np.arange(4000, dtype=np.int32) // 50,
    }
    run = jax.jit(
        lambda *x: jax.vjp(lambda *y: ja.attention(*y, plan, variant_operands=operands), *x)[1](d_o)
    )
    want = run(batch.q, batch.k, batch.v)
    for which in range(3):
        arrays = [np.array(x) for x in (batch.q, batch.k, batch.v)]
        arrays[which][60] = np.nan
        for a, b in zip(run(*arrays), want, strict=True):
            a, b = np.asarray(a), np.asarray(b)
            document = np.arange(len(a)) // 50
            is_other = (document == 0) | (document == 2)
            assert np.isnan(a[60].astype(np.float32)).all()
            yield a[is_other], b[is_other]


def on_gpu(test):
    gpu = pytest.mark.parametrize("backend", [Backend("gpu")], ids=["cuda"], indirect=True)
    return pytest.mark.cuda(gpu(test))
