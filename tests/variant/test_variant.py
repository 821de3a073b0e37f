"""Variants on a CPU: programs against the user's functions under vmap, and what is refused."""

import dataclasses
import functools
import math
import pickle
import subprocess
import sys

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import variant_functions
from hypothesis import given, settings
from hypothesis import strategies as st
from variant_functions import (
    alibi,
    dense_bias,
    documents,
    prefix_lm,
    t5_bias,
)

import jax_attn as ja
from helpers.attention_cases import E4M3, SCHEDULES, Case, build, expect
from helpers.backends import Backend
from helpers.checking import assert_close_state, assert_same_bits
from helpers.variants import (
    OPERANDS,
    RNG,
    dilated,
    nothing,
    of_lengths,
    on_every_cpu,
    packed,
    per_row,
    sigmoid,
    sinks_and_window,
    soft_cap,
    variant_of,
)
from jax_attn import _core


@jax.jit
def attend(q, k, v, plan, layer, scales, sinks, operands):
    variant = plan.spec.variant
    return ja.attention(
        q, k, v, plan, layer=layer, sinks=sinks, variant_operands=operands, **scales,
        return_lse=variant is None or variant.normalizes,
    )  # fmt: skip


def run(case, variant, operands, batch, **more):
    """(o, lse) of a case; lse None without softmax."""
    spec = ja.AttentionSpec(**(case.spec_fields() | more), variant=variant, target="cpu")
    plan = ja.plan(spec, **batch.lengths.plan_arguments())
    out = attend(
        batch.q, batch.k, batch.v, plan, batch.layer, batch.scales, batch.sinks, operands or None
    )
    return tuple(map(np.asarray, out)) if isinstance(out, tuple) else (np.asarray(out), None)


def check(case, variant, operands, repeats=2):
    """Compares with the reference in float64, twice, with equal bits."""
    for content in case.contents:
        batch = build(case, content)
        want = expect(case, batch, variant, operands)
        o, lse = run(case, variant, operands, batch)
        bound = 2 * want.o_bound  # a function may enlarge its score's rounding error
        if lse is None:
            live = np.isneginf(want.lse)
            lse = want.lse = np.where(live, -np.inf, 0)
        assert_close_state(o, lse, want.o, want.lse, bound, 4 * want.lse_bound)
        for _ in range(repeats - 1):
            again, _ = run(case, variant, operands, batch)
            assert_same_bits("o", again, o)


def boolean(at, seen):
    return seen[at.request, at.q_pos, at.kv_pos]


LOGITS = {f.__name__: f for f in (alibi, t5_bias, soft_cap, dense_bias, per_row, of_lengths)}
MASKS = {
    f.__name__: f
    for f in (documents, prefix_lm, dilated, sinks_and_window, boolean, packed, nothing)
}


@on_every_cpu
@pytest.mark.parametrize("name", [*LOGITS, *MASKS])
def test_functions(name, backend):
    variant, operands = variant_of(LOGITS.get(name), MASKS.get(name))
    check(Case(name), variant, operands)


@on_every_cpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("logits, mask", [(alibi, None), (None, dilated), (t5_bias, documents)])
def test_dtypes(dtype, logits, mask, backend):
    variant, operands = variant_of(logits, mask)
    check(Case("", dtype=dtype, contents=("normal",)), variant, operands)


@on_every_cpu
@pytest.mark.parametrize(
    "fields",
    [
        {"page_size": None},
        {"page_size": 1},
        {"page_size": 7, "num_layers": 2},
        {"schedule": "fixed_split", "kv_split": 128},
        {"schedule": "no_split"},
        {"schedule": "auto", "num_ctas": 7},
        {"num_ctas": 33},
        {"window_left": 15},
        {"causal": False, "window_left": 17, "window_right": 5},
        {"logits_soft_cap": 2.0},
        {"sm_scale": -0.1},
        {"sm_scale": 0.0},
        {"sinks": True},
        {"num_qo_heads": 4, "num_kv_heads": 4, "head_dim_qk": 24, "head_dim_vo": 80},
        {"num_qo_heads": 4, "num_kv_heads": 1},
        {"kv_dtype": E4M3, "dtype": "bfloat16"},
        {"kv_dtype": E4M3, "q_dtype": E4M3},
        {"mla": True, "num_kv_heads": 1, "head_dim_vo": 32, "sm_scale": 0.1},
        {"q_offsets": (0, 16, -3, 0, 65, 40, 170, -2, 2000)},
    ],
    ids=str,
)
@pytest.mark.parametrize("logits, mask", [(alibi, sinks_and_window), (None, documents)])
def test_plans(fields, logits, mask, backend):
    variant, operands = variant_of(logits, mask)
    check(Case("", contents=("normal",), **fields), variant, operands)


@on_every_cpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("schedule, kv_split", SCHEDULES)
@pytest.mark.parametrize("logits, mask", [(sigmoid, None), (sigmoid, dilated), (None, None)])
def test_without_softmax(logits, mask, schedule, kv_split, dtype, backend):
    variant, operands = variant_of(logits, mask, "none")
    case = Case("", contents=("normal",), schedule=schedule, kv_split=kv_split, dtype=dtype)
    check(case, variant, operands)


@on_every_cpu
def test_the_score_itself_after_a_soft_cap(backend):
    check(Case("", logits_soft_cap=2.0), *variant_of(lambda score, at: score))


def row_alone(score, at, rows):
    return rows[at.q_pos, at.kv_pos]


def added_row(score, at, rows):
    return score + rows[at.q_pos, at.kv_pos]


def positive(at, rows):
    return rows[at.q_pos, at.kv_pos] > 0


@on_every_cpu
@pytest.mark.parametrize("width", [1100, 200, 60])  # 200, 60: later keys get the last element
@pytest.mark.parametrize(
    "logits, mask", [(row_alone, None), (added_row, None), (added_row, positive), (None, positive)]
)
@pytest.mark.parametrize(
    "dtype, storage",
    [
        ("float32", "float32"),
        ("float32", "int32"),
        ("bfloat16", "float32"),
        ("bfloat16", "bfloat16"),
        ("bfloat16", "float16"),
    ],
)
def test_rows_of_operands_by_position(dtype, storage, logits, mask, width, backend):
    rows = (4 * RNG.normal(size=(150, width))).astype(jnp.dtype(storage))
    variant, operands = variant_functions.variant_of({"rows": rows}, logits, mask)
    check(Case("", contents=("normal",), dtype=dtype), variant, operands, repeats=2)


def documents_of_heads(at, q_doc, kv_doc):
    return (kv_doc[at.kv_row] + at.head) % 3 == q_doc[at.q_row] % 2


def window_of_heads(at):
    return at.q_pos - at.kv_pos < 20 * (at.head + 1)


def slopes_of_heads(at, slopes):
    return slopes[at.head] * (at.q_pos - at.kv_pos) < 5


def window_of_requests(at):
    return at.q_pos - at.kv_pos < 20 * (at.request + 1)


@on_every_cpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "mask",
    [documents_of_heads, window_of_heads, slopes_of_heads, window_of_requests],
    ids=lambda f: f.__name__,
)
def test_masks_that_rows_have_in_common(mask, causal, dtype, backend):
    """Rows that share a document, a token or a head: each sees what its own values say."""
    case = Case("", contents=("normal",), causal=causal, dtype=dtype)
    check(case, *variant_of(None, mask), repeats=1)


# ---- single operations --------------------------------------------------------------------------

SPECIAL = np.array(
    [0, -0.0, 1, -1, 0.5, -2.5, 1.5, 3e-39, 1e30, -1e30, 3e9, -3e9, 88.7, -103, 127.6, 1e-8, 2**23],
    np.float32,
)
INTEGERS = np.array([0, 1, -1, 2, 3, 7, -8, 31, 32, 33, 100, 2**31 - 1, -(2**31), 12345], np.int32)
FLOAT_OPS = {
    "neg": lambda x: -x,
    "abs": jnp.abs,
    "sign": jnp.sign,
    "floor": jnp.floor,
    "ceil": jnp.ceil,
    "round": jnp.round,
    "away": lambda x: jax.lax.round(x, jax.lax.RoundingMethod.AWAY_FROM_ZERO),
    "exp": lambda x: jnp.minimum(jnp.exp(x), 1e30),
    "exp2": lambda x: jnp.minimum(jnp.exp2(x), 1e30),
    "log": lambda x: jnp.log(jnp.abs(x) + 1e-30),
    "log1p": lambda x: jnp.log1p(jnp.abs(x)),
    "tanh": jnp.tanh,
    "logistic": jax.nn.sigmoid,
    "sqrt": lambda x: jnp.sqrt(jnp.abs(x)),
    "rsqrt": lambda x: jax.lax.rsqrt(jnp.abs(x) + 1e-30),
    "cube": lambda x: jnp.clip(x, -1e9, 1e9) ** 3,
    "inverse": lambda x: (jnp.abs(x) + 1) ** -2,
    "to_int": lambda x: x.astype(jnp.int32).astype(jnp.float32),
    "to_bool": lambda x: jnp.where(x.astype(bool), 2.0, 3.0),
    "softplus": lambda x: jax.nn.softplus(jnp.minimum(x, 1e20)),
    "finite": lambda x: jnp.isfinite(x * 1e30).astype(jnp.float32),
    "floor_divide": lambda x: jnp.clip(x, -1e4, 1e4) // 3,
    "expm1": lambda x: jnp.expm1(jnp.minimum(x, 80)),
    "sin": jnp.sin,
    "cos": jnp.cos,
    "tan": jnp.tan,
    "erf": jax.lax.erf,
    "erfc": jax.lax.erfc,
    "atan": jnp.arctan,
    "asin": lambda x: jnp.arcsin(jnp.clip(x, -1, 1)),
    "acos": lambda x: jnp.arccos(jnp.clip(x, -1, 1)),
    "sinh": lambda x: jnp.sinh(jnp.clip(x, -80, 80)),
    "cosh": lambda x: jnp.cosh(jnp.clip(x, -80, 80)),
    "cbrt": lambda x: jnp.cbrt(x * (jnp.abs(x) > 1e-30)),
    "gelu": lambda x: jax.nn.gelu(jnp.clip(x, -5, 1e9), approximate=False),
    "elu": lambda x: jax.nn.elu(jnp.minimum(x, 1e9)),
    "power": lambda x: jnp.clip(jnp.abs(x), 1e-3, 1e9) ** 1.7,
    "root": lambda x: jnp.abs(x) ** 0.5 + (jnp.abs(x) + 1) ** -0.5,
    "whole_power": lambda x: jnp.clip(x, -1e3, 1e3) ** 3.0 + 2.0 ** jnp.clip(x, -40, 40),
}
FLOAT_PAIRS = {
    "add": jnp.add,
    "sub": jnp.subtract,
    "mul": lambda x, y: jnp.clip(x, -1e9, 1e9) * jnp.clip(y, -1e9, 1e9),
    "div": lambda x, y: jnp.clip(x, -1e9, 1e9) / (jnp.abs(y) + 1),
    "rem": lambda x, y: jax.lax.rem(jnp.clip(x, -1e4, 1e4), jnp.abs(y) + 1),
    "min": jnp.minimum,
    "max": jnp.maximum,
    "eq": lambda x, y: (x == y).astype(jnp.float32),
    "ne": lambda x, y: (x != y).astype(jnp.float32),
    "lt": lambda x, y: jnp.where(x < y, x, y),
    "le": lambda x, y: jnp.where(x <= y, 1.0, 0.0),
    "atan2": lambda x, y: jnp.arctan2(jnp.where(jnp.abs(x) > 1e-30, x, 0.0), y),
    "pow": lambda x, y: jnp.clip(jnp.abs(x), 0.01, 100) ** jnp.clip(y, -9, 9),
    "pow_of_int": lambda x, y: (jnp.clip(x, -9, 9) + 0.25) ** jnp.clip(y, -9, 9).astype(jnp.int32),
    "select": lambda x, y: jnp.select([x < y, x > 1.0, y == 0.5], [x, y, x - y], 7.0),
    "select_n": lambda x, y: jax.lax.select_n(jnp.clip(x, 0, 3).astype(jnp.int32), x, y, -x, -y),
    "nan": lambda x, y: jnp.isnan(jnp.maximum(x, (y - y) / (y - y))).astype(jnp.float32),
}
INT_PAIRS = {
    "add": jnp.add,
    "sub": jnp.subtract,
    "mul": jnp.multiply,
    "div": jax.lax.div,
    "rem": jax.lax.rem,
    "floor_divide": lambda x, y: x // (y | 1),
    "mod": lambda x, y: x % (y | 1),
    "min": jnp.minimum,
    "max": jnp.maximum,
    "and": jnp.bitwise_and,
    "or": jnp.bitwise_or,
    "xor": jnp.bitwise_xor,
    "not": lambda x, y: ~x,
    "neg": lambda x, y: -x,
    "abs": lambda x, y: jnp.abs(x),
    "sign": lambda x, y: jnp.sign(x),
    "shl": jax.lax.shift_left,
    "sar": jax.lax.shift_right_arithmetic,
    "shr": jax.lax.shift_right_logical,
    "lt": lambda x, y: (x < y).astype(jnp.int32),
    "ge": lambda x, y: (x >= y).astype(jnp.int32),
    "bools": lambda x, y: ((x < y) ^ (x == 1) | ~(y > 3)).astype(jnp.int32),
}


def weights_of(function, **operands):
    """Results of a function for rows and keys 0 ... 23: o, with the identity as values."""
    n = 24
    variant = ja.Variant(function, normalize="none", operands=operands)
    spec = ja.AttentionSpec(
        num_qo_heads=1, num_kv_heads=1, head_dim_qk=8, head_dim_vo=n, dtype="float32",
        causal=False, sm_scale=1.0, page_size=None, max_batch=1, max_qo_tokens=n, max_kv_tokens=n,
        variant=variant, target="cpu",
    )  # fmt: skip
    q, k = np.zeros((n, 1, 8), np.float32), np.zeros((n, 1, 8), np.float32)
    plan = ja.plan(spec, [0, n], [n])
    out = ja.attention(q, k, np.eye(n, dtype=np.float32)[:, None], plan, variant_operands=operands)
    return np.asarray(out)[:, 0]


# Where the operands are read: by row, by key, by distance, or the sum of both for each logit.
INDEXED = {
    "row": lambda at: (at.q_pos, at.q_pos),
    "key": lambda at: (at.kv_pos, at.kv_pos),
    "logit": lambda at: (at.q_pos, at.kv_pos),
}


OPERATIONS = {"float": FLOAT_OPS, "floats": FLOAT_PAIRS, "ints": INT_PAIRS}


@functools.cache
def operation_of(kind, per, name):
    """A function that reads a and b, the operands, and XLA's result, cached for all backends."""
    n = 24
    rng = np.random.default_rng(3)
    numbers = INTEGERS if kind == "ints" else SPECIAL
    a, b = rng.choice(numbers, n), rng.choice(numbers, n)
    a[: len(numbers)] = numbers
    op = OPERATIONS[kind][name]

    def function(score, at, a, b):
        i, j = INDEXED[per](at)
        x = jnp.where(score > 1, score, a[i]) if (kind, per) == ("float", "logit") else a[i]
        result = op(x) if kind == "float" else op(x, b[j])
        if kind != "ints":
            return result
        return (result & 0xFFF).astype(jnp.float32) + (result >> 31).astype(jnp.float32)

    rows, keys = np.meshgrid(np.arange(n), np.arange(n), indexing="ij")
    at = ja.At(**dict.fromkeys((f.name for f in dataclasses.fields(ja.At)), 0))
    at = dataclasses.replace(at, q_pos=rows, kv_pos=keys)
    at = jax.tree.map(lambda x: np.asarray(x, np.int32), at)
    operands = {"a": a, "b": b}
    variant = ja.Variant(function, operands=operands)
    want, _ = variant.apply(np.zeros((n, n), np.float32), at, operands)
    return function, operands, want


@on_every_cpu
@pytest.mark.parametrize("per", INDEXED)
@pytest.mark.parametrize("kind", OPERATIONS)
def test_operations(kind, per, backend):
    """Every operation on special numbers equals XLA's, at every level."""
    for name in OPERATIONS[kind]:
        function, operands, want = operation_of(kind, per, name)
        got = weights_of(function, **operands)
        np.testing.assert_allclose(got, want, rtol=3e-6, atol=1e-37, err_msg=name)


# f32 to float64, and where the arguments lie; numbers are spread evenly or by size.
EXACT = {
    "pow": (np.power, lambda x, y: x**y, (1e-3, 1e3), (-4, 4)),
    "pow_of_int": (np.power, lambda x, y: x ** jnp.round(y).astype(jnp.int32), (-9, 9), (-5, 5)),
    "expm1": (np.expm1, jnp.expm1, (-20, 20)),
    "expm1 near 0": (np.expm1, jnp.expm1, (1e-6, 1e-2)),
    "sin": (np.sin, jnp.sin, (-100, 100)),
    "cos": (np.cos, jnp.cos, (-100, 100)),
    "sin far": (np.sin, jnp.sin, (1e3, 1e30)),
    "tan": (np.tan, jnp.tan, (-1.5, 1.5)),
    "erf": (np.vectorize(math.erf), jax.lax.erf, (-4, 4)),
    "erfc": (np.vectorize(math.erfc), jax.lax.erfc, (-4, 8)),
    "atan": (np.arctan, jnp.arctan, (1e-5, 1e5)),
    "atan2": (np.arctan2, jnp.arctan2, (-5, 5), (-5, 5)),
    "asin": (np.arcsin, jnp.arcsin, (-1, 1)),
    "acos": (np.arccos, jnp.arccos, (-1, 0.999)),
    "sinh": (np.sinh, jnp.sinh, (1e-4, 20)),
    "cosh": (np.cosh, jnp.cosh, (-20, 20)),
    "cbrt": (np.cbrt, jnp.cbrt, (1e-6, 1e6)),
}


def of_elements(function, num_arguments):
    def logits(score, at, x, y):
        return function(*(of[at.q_pos, at.kv_pos] for of in (x, y)[:num_arguments]))

    return logits


@on_every_cpu
def test_functions_are_accurate(backend):
    """Against float64, at numbers that no other lane has: an error of 4 ulp, of pow and tan 8."""
    rng, n = np.random.default_rng(0), 24
    for name, (exact, function, *ranges) in EXACT.items():
        given = []
        for low, high in ranges:
            if low > 0 and high / low > 100:
                x = np.exp(rng.uniform(np.log(low), np.log(high), (n, n)))
            else:
                x = rng.uniform(low, high, (n, n))
            given.append(x.astype(np.float32))
        x, y = given[0], given[-1]
        wide = [np.float64(x) for x in given]
        if name == "pow_of_int":
            wide[1] = np.round(wide[1])
        got, want = weights_of(of_elements(function, len(ranges)), x=x, y=y), exact(*wide)
        bound = (8 if name in ("pow", "pow_of_int", "tan") else 4) * 2.0**-23
        np.testing.assert_allclose(got, want, rtol=bound, atol=1e-37, err_msg=name)


@on_every_cpu
def test_functions_of_subnormals(backend):
    """Threads of XLA treat them as 0, where functions of the C library may give NaN."""
    x = np.full((24, 24), 1e-40, np.float32)
    found = weights_of(lambda score, at, x: jnp.arctan2(x[at.q_pos, at.kv_pos], x[0, 0]), x=x)
    np.testing.assert_array_equal(found, 0)


# ---- random programs ----------------------------------------------------------------------------

FACTS = [f.name for f in dataclasses.fields(ja.At)]
BINARY_INTS = (lambda x, y: x + y, lambda x, y: x - y, jnp.minimum, jnp.maximum, lambda x, y: x & y)
COMPARE = (lambda x, y: x < y, lambda x, y: x <= y, lambda x, y: x == y, lambda x, y: x != y)
UNARY = (jnp.tanh, jax.nn.sigmoid, jnp.abs, lambda x: -x, lambda x: x * 0.5)


@st.composite
def integers(draw, depth=2):
    """fn(at, operands) -> i32"""
    kind = draw(st.integers(0, 4 if depth else 2))
    if kind == 0:
        name = draw(st.sampled_from(FACTS))
        return lambda at, of: getattr(at, name)
    if kind == 1:
        value = draw(st.sampled_from([-1, 0, 1, 2, 5, 17, 64, 300]))
        return lambda at, of: jnp.int32(value)
    if kind == 2:
        name, row = draw(st.sampled_from([("q_doc", "q_row"), ("kv_doc", "kv_row")]))
        return lambda at, of: of[name][getattr(at, row)]
    op, x, y = (
        draw(st.sampled_from(BINARY_INTS)),
        draw(integers(depth - 1)),
        draw(integers(depth - 1)),
    )
    return lambda at, of: op(x(at, of), y(at, of))


@st.composite
def booleans(draw, depth=2):
    kind = draw(st.integers(0, 3 if depth else 0))
    if kind < 2:
        op, x, y = draw(st.sampled_from(COMPARE)), draw(integers(1)), draw(integers(1))
        return lambda at, of: op(x(at, of), y(at, of))
    x, y = draw(booleans(depth - 1)), draw(booleans(depth - 1))
    if kind == 2:
        return lambda at, of: x(at, of) | ~y(at, of)
    return lambda at, of: x(at, of) & y(at, of)


@st.composite
def floats(draw, depth=3):
    """fn(score, at, operands) -> f32, of about the score's size and slope."""
    kind = draw(st.integers(0, 6 if depth else 2))
    if kind == 0:
        return lambda score, at, of: score
    if kind == 1:
        head = draw(integers(1))
        return lambda score, at, of: of["slopes"][head(at, of)]
    if kind == 2:
        x = draw(integers(1))
        return lambda score, at, of: jnp.tanh(x(at, of) * 0.01)
    if kind == 3:
        x, y = draw(floats(depth - 1)), draw(floats(depth - 1))
        return lambda score, at, of: x(score, at, of) - 0.5 * y(score, at, of)
    if kind == 4:
        x, y = draw(floats(depth - 1)), draw(floats(depth - 1))
        return lambda score, at, of: x(score, at, of) * jnp.tanh(y(score, at, of))
    if kind == 5:
        which, x, y = draw(booleans(1)), draw(floats(depth - 1)), draw(floats(depth - 1))
        return lambda score, at, of: jnp.where(which(at, of), x(score, at, of), y(score, at, of))
    op, x = draw(st.sampled_from(UNARY)), draw(floats(depth - 1))
    return lambda score, at, of: op(x(score, at, of))


STORAGES = [
    {"page_size": None},
    {"page_size": 16},
    {"page_size": 5, "num_qo_heads": 4, "num_kv_heads": 1},
    {"mla": True, "num_kv_heads": 1, "head_dim_vo": 32, "sm_scale": 0.1},
    {"kv_dtype": E4M3, "page_size": 16},
]
PLANS = [
    {},
    {"schedule": "fixed_split", "kv_split": 128},
    {"schedule": "no_split"},
    {"schedule": "auto", "num_ctas": 9},
]


PROGRAMS = {
    "logits": st.none() | floats(),
    "mask": st.none() | booleans(),
    "normalize": st.sampled_from(["softmax", "softmax", "none"]),
    "storage": st.sampled_from(STORAGES),
    "schedule": st.sampled_from(PLANS),
    "dtype": st.sampled_from(["float32", "float32", "bfloat16"]),
    "causal": st.booleans(),
    "isa": st.sampled_from(_core.supported_cpu_isas()),
}


def _check_program(logits, mask, normalize, storage, schedule, dtype, causal, isa):
    if logits is None and mask is None:
        return
    names = ("slopes", "q_doc", "kv_doc")
    operands = {name: OPERANDS[name] for name in names}
    variant = ja.Variant(
        None if logits is None else lambda score, at, **of: logits(score, at, of),
        None if mask is None else lambda at, **of: mask(at, of),
        normalize,
        operands,
    )
    case = Case(
        "",
        qo_lens=(1, 40, 5, 0, 1),
        kv_lens=(33, 150, 300, 7, 530),
        contents=("normal",),
        dtype=dtype,
        causal=causal,
        **storage,
        **schedule,
    )
    with Backend("cpu", isa).active():
        check(case, variant, operands)


@pytest.mark.parametrize("part", range(3))
def test_random_programs(part):
    programs = given(**PROGRAMS)(_check_program)
    hypothesis.seed(part)(settings(max_examples=11, deadline=None, derandomize=True)(programs))()


# ---- what must not matter -----------------------------------------------------------------------


@on_every_cpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("normalize", ["softmax", "none"])
@pytest.mark.parametrize("mask", [dilated, documents])
def test_what_is_hidden_has_no_influence(mask, normalize, dtype, backend):
    """A NaN in a key or value reaches exactly the rows that see it, as in the reference."""
    variant, operands = variant_of(None, mask, normalize)
    case = Case("", qo_lens=(1, 40, 5), kv_lens=(60, 150, 300), dtype=dtype, page_size=None)
    batch = build(case, "normal")
    for row in (3, 70, 200, 301):
        batch.v[row, 0, 5] = np.nan
    batch.v[100, 1, 7] = np.inf
    if normalize == "softmax":
        batch.k[71, 1, 3] = np.nan
    want = expect(case, batch, variant, operands)
    assert np.isnan(want.o).any() and np.isfinite(want.o[:46]).any()
    o, _ = run(case, variant, operands, batch)
    finite = np.isfinite(want.o)
    np.testing.assert_array_equal(np.isfinite(o.astype(np.float32)), finite)
    error = np.abs(o.astype(np.float64) - want.o)[finite]
    assert error.max() <= (1e-5 if dtype == "float32" else 0.05) * np.abs(want.o[finite]).max()


@on_every_cpu
@pytest.mark.parametrize("name", ["alibi", "dilated", "documents"])
def test_neighbours_change_no_bits(name, backend):
    """fixed_split: a request has the same bits alone and in a batch."""
    variant, operands = variant_of(LOGITS.get(name), MASKS.get(name))
    fields = {"schedule": "fixed_split", "kv_split": 128, "page_size": None}
    case = Case("", qo_lens=(40, 1, 20), kv_lens=(400, 530, 20), **fields)
    batch = build(case, "normal")
    alone = dataclasses.replace(case, qo_lens=(40,), kv_lens=(400,))
    more = {n: case.spec_fields()[n] for n in ("max_batch", "max_qo_tokens", "max_kv_tokens")}
    o, lse = run(case, variant, operands, batch)
    batch.lengths = build(alone, "normal").lengths
    alone_o, alone_lse = run(alone, variant, operands, batch, **more)
    assert_same_bits("o", alone_o[:40], o[:40])
    assert_same_bits("lse", alone_lse[:40], lse[:40])


def of_keys(score, at, slopes, kv_doc):
    return score + slopes[at.head] * kv_doc[at.kv_row]


TREE = {
    "qo_lens": (1,) * 6,
    "kv_lens": (600, 577, 900, 300, 400, 801),
    "branches": ("ab", "ab", "abc", "a", "ab", "abc"),
    "num_ctas": 3,
}


@on_every_cpu
def test_shared_prefixes(backend):
    """Sharing only if a variant depends on heads and keys alone; correct with and without it."""
    case = Case("", **TREE)
    per_key = variant_of(
        lambda score, at, slopes, kv_doc: score + slopes[at.head] * kv_doc[at.kv_row]
    )
    by_position = variant_of(alibi)
    shared = []
    for variant, operands in (per_key, by_position):
        check(case, variant, operands)
        spec = ja.AttentionSpec(**case.spec_fields(), variant=variant, target="cpu")
        batch = build(case, "normal")
        plan = ja.plan(spec, **batch.lengths.plan_arguments())
        shared.append(int((plan.items()["num_groups"] > 1).sum()))
    assert shared[0] > 0 and shared[1] == 0
    with pytest.raises(NotImplementedError, match="share_prefixes: with a variant that asks for"):
        ja.AttentionSpec(**(case.spec_fields() | {"share_prefixes": True}), variant=by_position[0])
    spec = ja.AttentionSpec(**case.spec_fields(), variant=by_position[0], target="cpu")
    with pytest.raises(ValueError, match="prefix_levels: expected None for a spec with share"):
        levels = [(np.array([0, 6]), np.array([256]))]
        ja.plan(spec, **build(case).lengths.plan_arguments(), prefix_levels=levels)


@on_every_cpu
def test_fresh_kv(backend):
    """Cache rows follow the page table, also for keys that are not read from it."""
    variant, operands = variant_of(alibi, documents)
    case = Case("", qo_lens=(1, 17, 3), kv_lens=(33, 40, 300), page_size=5)
    batch = build(case, "normal")
    o, _ = run(case, variant, operands, batch)
    spec = ja.AttentionSpec(**case.spec_fields(), variant=variant, fresh_kv=True, target="cpu")
    plan = ja.plan(spec, **batch.lengths.plan_arguments())
    k_new, v_new = np.zeros((2, spec.max_qo_tokens, 2, 64), np.float32)
    begin = 0
    for n, k, v in zip(case.qo_lens, batch.k_rows, batch.v_rows, strict=True):
        k_new[begin : begin + n], v_new[begin : begin + n] = k[len(k) - n :], v[len(v) - n :]
        begin += n
    fresh = ja.attention(
        batch.q, batch.k, batch.v, plan, k_new=k_new, v_new=v_new, variant_operands=operands
    )
    assert_same_bits("o", np.asarray(fresh), o)


def test_new_contents_compile_nothing():
    variant, operands = variant_of(dense_bias)
    case = Case("", qo_lens=(3, 20), kv_lens=(30, 40), contents=("normal",))
    batch = build(case, "normal")
    run(case, variant, operands, batch)
    before = attend._cache_size()
    for seed in range(3):
        again = ja.Variant(
            dense_bias, operands={"bias": jax.ShapeDtypeStruct((1,) * 4, np.float16)}
        )
        assert again == variant and hash(again) == hash(variant)
        bias = np.random.default_rng(seed).normal(size=operands["bias"].shape).astype(np.float16)
        run(case, again, {"bias": bias}, batch)
    assert attend._cache_size() == before


# ---- files --------------------------------------------------------------------------------------

IN_A_FRESH_PROCESS = """
import sys
import numpy as np, jax
import jax_attn as ja
folder = sys.argv[1]
arrays = dict(np.load(folder + "/arrays.npz"))
operands = {n: arrays.pop(n) for n in list(arrays) if n in ("slopes", "q_doc", "kv_doc")}
plan = ja.AttentionPlan.load(folder + "/plan.npz")
assert plan.spec.variant.logits is None and "slopes[head]" in plan.describe()
o = ja.attention(arrays["q"], arrays["k"], arrays["v"], plan, variant_operands=operands)
np.testing.assert_array_equal(np.asarray(o), arrays["o"])
with open(folder + "/exported", "rb") as file:
    exported = jax.export.deserialize(bytearray(file.read()))
o = exported.call(arrays["q"], arrays["k"], arrays["v"], plan, operands)
np.testing.assert_array_equal(np.asarray(o), arrays["o"])
"""


def test_export_and_saved_plan_in_a_fresh_process(tmp_path):
    variant, operands = variant_of(alibi, documents)
    case = Case("", qo_lens=(3, 20), kv_lens=(30, 40), page_size=None)
    batch = build(case, "normal")
    spec = ja.AttentionSpec(**case.spec_fields(), variant=variant, target="cpu")
    plan = ja.plan(spec, **batch.lengths.plan_arguments())

    def call(q, k, v, plan, operands):
        return ja.attention(q, k, v, plan, variant_operands=operands)

    arguments = batch.q, batch.k, batch.v, plan, operands
    o = np.asarray(jax.jit(call)(*arguments))
    exported = jax.export.export(jax.jit(call), disabled_checks=ja.export_checks())(*arguments)
    (tmp_path / "exported").write_bytes(exported.serialize())
    plan.save(tmp_path / "plan.npz")
    np.savez(tmp_path / "arrays.npz", q=batch.q, k=batch.k, v=batch.v, o=o, **operands)
    subprocess.run([sys.executable, "-c", IN_A_FRESH_PROCESS, str(tmp_path)], check=True)
    assert pickle.loads(pickle.dumps(spec)) == spec


# ---- bad input ----------------------------------------------------------------------------------


def branches_on_a_logit(score, at):
    return score if score > 0 else -score


def inverse_of_erf(score, at):
    return jax.lax.erf_inv(score)


def closes_over(score, at):
    return score * jnp.asarray(OPERANDS["slopes"])[at.head]


def indexes_numpy(score, at):
    return score * OPERANDS["slopes"][at.head]


def makes_an_array(score, at):
    return score * jnp.arange(4)[at.head]


def reads_as_a_whole(score, at, slopes):
    return score + jnp.sum(slopes)


def too_long(score, at):
    for i in range(200):
        score = score * (at.kv_pos + i)
    return score


@pytest.mark.parametrize(
    "functions, error, words",
    [
        ({"logits": branches_on_a_logit}, NotImplementedError, "control flow.*test_variant.py:"),
        (
            {"logits": inverse_of_erf},
            NotImplementedError,
            "primitive erf_inv at .*variant.py:.*primitives abs",
        ),
        ({"logits": closes_over}, NotImplementedError, "logits: .*operand"),
        ({"logits": indexes_numpy}, NotImplementedError, "numpy on .*one of the operands"),
        ({"logits": reads_as_a_whole}, NotImplementedError, "indexed.*test_variant.py:"),
        ({"logits": too_long}, NotImplementedError, "up to 128 values are supported, got"),
        ({"logits": lambda s, at: s.astype(jnp.bfloat16) * 2}, NotImplementedError, "bfloat16"),
        ({"logits": lambda s, at: jnp.stack([s, s])}, ValueError, "returns a scalar"),
        ({"logits": lambda s, at: (s, s)}, ValueError, "returns a scalar"),
        ({"logits": lambda s, at: s > 0}, ValueError, "returns a number"),
        (
            {"logits": lambda s, at, x: s},
            ValueError,
            r"fn\(score, at, ...\), then of its operands .*, operands={'x': array}\.$",
        ),
        ({"logits": makes_an_array}, NotImplementedError, r"array int32\[4\] at .*operands="),
        ({"mask": lambda s, at: s > 0}, ValueError, r"mask: expected fn\(at, ...\).*fn\(s, at\)"),
        ({"logits": lambda at: 1}, ValueError, r"expected fn\(score, at, ...\), .*fn\(at\)"),
        (
            {"logits": lambda s, at: s * at.position},
            NotImplementedError,
            r"\.position at .*test_variant.py:\d+ is .* at has head.*kv_pos",
        ),
        (
            {"logits": lambda s, at, slopes: s * slopes.sum()},
            NotImplementedError,
            r"\.sum at .*test_variant.py:\d+ is .* an operand .*indexed",
        ),
        ({"logits": lambda s, at, slopes: slopes[0, 1]}, ValueError, "1 indices, one an axis"),
        ({"logits": lambda s, at, slopes: slopes[s]}, ValueError, "integer scalars as indices"),
        ({"mask": lambda at: at.head}, ValueError, "returns a bool"),
        ({"mask": 3}, ValueError, "a function or None"),
        ({}, ValueError, "logits, mask, q, k, v, o: expected at least one function"),
        ({"mask": dilated, "normalize": "sum"}, ValueError, 'normalize: expected "softmax"'),
        (
            {"mask": dilated, "operands": {"a": np.zeros(3, complex)}},
            NotImplementedError,
            "operands: a: .*complex128",
        ),
        (
            {"mask": dilated, "operands": {"a": np.zeros((1,) * 5, np.float32)}},
            NotImplementedError,
            "up to 4 axes",
        ),
        (
            {"mask": dilated, "operands": {f"a{i}": np.zeros(1) for i in range(9)}},
            NotImplementedError,
            "up to 8 are supported",
        ),
        ({"mask": dilated, "operands": {"a b": np.zeros(1)}}, ValueError, "Python identifiers"),
    ],
)
def test_refused_while_tracing(functions, error, words):
    operands = {"slopes": np.zeros(4, np.float32)}
    with pytest.raises(error, match=f"(?s)Variant: .*{words}"):
        ja.Variant(**({"operands": operands} | functions))


def test_operands_that_do_not_fit():
    variant, operands = variant_of(alibi, documents)
    case = Case("", qo_lens=(3, 20), kv_lens=(30, 40))
    batch = build(case, "normal")
    for changed, words in (
        ({"slopes": None}, "expected an array"),
        ({"slopes": np.zeros(4, np.float16)}, r"expected float32 with 1 axes.*Cast it"),
        ({"slopes": np.zeros((4, 1), np.float32)}, "expected float32 with 1 axes"),
        ({"slopes": np.zeros(0, np.float32)}, "none of length 0"),
        ({"others": np.zeros(4, np.float32)}, r"variant_operands: expected \['slopes', 'q_doc'"),
    ):
        with pytest.raises(ValueError, match=words):
            run(case, variant, operands | changed, batch)
    with pytest.raises(ValueError, match=r"variant_operands: expected \['slopes', 'q_doc'"):
        run(case, variant, None, batch)
    plain = ja.plan(
        ja.AttentionSpec(**case.spec_fields(), target="cpu"), **batch.lengths.plan_arguments()
    )
    with pytest.raises(ValueError, match="variant_operands: expected none as the plan's variant"):
        ja.attention(batch.q, batch.k, batch.v, plain, variant_operands=operands)


def test_no_lse_and_no_sinks_without_softmax():
    variant, _ = variant_of(sigmoid, None, "none")
    case = Case("", qo_lens=(3,), kv_lens=(30,))
    batch = build(case)
    spec = ja.AttentionSpec(**case.spec_fields(), variant=variant, target="cpu")
    plan = ja.plan(spec, **batch.lengths.plan_arguments())
    with pytest.raises(ValueError, match="return_lse: expected False with a variant of norm"):
        ja.attention(batch.q, batch.k, batch.v, plan, return_lse=True)
    with pytest.raises(ValueError, match="sinks: expected None with a variant of normalize"):
        ja.attention(batch.q, batch.k, batch.v, plan, sinks=np.zeros(4, np.float32))


def test_what_is_no_variant():
    with pytest.raises(ValueError, match="variant: expected a jax_attn.Variant or None"):
        ja.AttentionSpec(**Case("").spec_fields(), variant=alibi)


def test_damaged_programs():
    """Each changed word of a program is refused in a sentence, or makes another valid program.

    The kernels then run that program within their bounds.
    """
    variant, operands = variant_of(t5_bias, documents)
    case = Case("", qo_lens=(1, 20), kv_lens=(40, 33))
    batch = build(case, "normal")
    rng = np.random.default_rng(0)
    values = (-1, 0, 1, 2, 7, 11, 40, 46, 127, 128, 2**31, 2**62, -(2**63))
    refused, ran = 0, 0
    assert ja.Variant.from_words(variant.words, variant.names) == variant
    for i in range(len(variant.words)):
        for value in values:
            words = [*variant.words]
            words[i] = value
            try:
                other = ja.Variant.from_words(words, variant.names)
            except ValueError as error:
                assert str(error).startswith("Variant: ") and "expected" in str(error)
                refused += 1
                continue
            assert str(other)
            is_same_types = other.operand_types == variant.operand_types
            if words != [*variant.words] and is_same_types and rng.random() < 0.05:
                run(case, other, operands, batch)
                ran += 1
    assert refused > 1000 and ran > 5
    for words in ([], [*variant.words][:-1], [*variant.words, 0], ["a"], [True] * 9, [2**70]):
        with pytest.raises(ValueError, match="^Variant: "):
            ja.Variant.from_words(words, variant.names)
    for names in ((), ("a",), ("slopes",) * 4, (1, 2, 3)):
        with pytest.raises(ValueError, match="^Variant: names"):
            ja.Variant.from_words(variant.words, names)


def test_describe(capsys, monkeypatch):
    variant, _ = variant_of(alibi, prefix_lm)
    monkeypatch.setattr("jax_attn._environment.print_config", True)
    spec = ja.AttentionSpec(**Case("").spec_fields(), variant=variant, target="cpu")
    lengths = build(Case("")).lengths.plan_arguments()
    described = ja.plan(spec, **lengths).describe()
    for text in (described, capsys.readouterr().out, str(variant)):
        assert "slopes[head]" in text and "per row" in text and "visible = v" in text


def test_item_times():
    variant, operands = variant_of(alibi, documents)
    case = Case("", qo_lens=(3, 20), kv_lens=(30, 40))
    batch = build(case)
    spec = ja.AttentionSpec(**case.spec_fields(), variant=variant, target="cpu")
    plan = ja.plan(spec, **batch.lengths.plan_arguments())
    times = ja.item_times(batch.q, batch.k, batch.v, plan, variant_operands=operands)
    assert len(times) == len(plan.items()) and (times[:, 1] >= times[:, 0]).all()


def test_rows_of_the_cache_fit_32_bits():
    """kv_row is an i32, which is too small for the rows of a larger pool."""
    by_row, _ = variant_of(None, documents)
    by_position, _ = variant_of(alibi)
    pages = jax.ShapeDtypeStruct((2**27, 16, 1, 8), np.float32)

    def trace(variant):
        spec = ja.AttentionSpec(
            1, 1, 8, dtype="float32", max_batch=1, max_qo_tokens=1, max_kv_pages=1,
            variant=variant, target="cpu",
        )  # fmt: skip
        plan = ja.plan(spec, [0, 1], [1], [0, 1], [0])
        operands = {n: OPERANDS[n] for n in variant.names}
        q = np.zeros((1, 1, 8), np.float32)
        return jax.eval_shape(
            lambda k, v: ja.attention(q, k, v, plan, variant_operands=operands), pages, pages
        )

    assert trace(by_position).shape == (1, 1, 8)
    with pytest.raises(NotImplementedError, match="up to 2147483647 token slots a layer"):
        trace(by_row)
