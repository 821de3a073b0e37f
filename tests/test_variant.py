"""Variants on a CPU: programs against the user's functions under vmap, and what is refused."""

import dataclasses
import pathlib
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import E4M3, SCHEDULES, Case, build, expect
from backends import Backend, on_every_backend
from checking import assert_close_state, assert_same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

import jax_attn as ja
from jax_attn import _core

CPU = [pytest.param(Backend("cpu", isa), id=isa) for isa in _core.supported_cpu_isas()]
on_every_cpu = pytest.mark.parametrize("backend", CPU, indirect=True)


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
    """Against the reference in float64, twice, with equal bits."""
    for content in case.contents:
        batch = build(case, content)
        want = expect(case, batch, variant, operands)
        o, lse = run(case, variant, operands, batch)
        bound = 2 * want.o_bound  # a function may enlarge the rounding of its score
        if lse is None:
            live = np.isneginf(want.lse)
            lse = want.lse = np.where(live, -np.inf, 0)
        assert_close_state(o, lse, want.o, want.lse, bound, 4 * want.lse_bound)
        for _ in range(repeats - 1):
            again, _ = run(case, variant, operands, batch)
            assert_same_bits("o", again, o)


RNG = np.random.default_rng(7)
OPERANDS = {
    "slopes": RNG.uniform(0.01, 0.3, 4).astype(np.float32),
    "table": RNG.normal(size=(9, 4)).astype(jnp.bfloat16),
    "q_doc": RNG.integers(0, 3, 300).astype(np.int32),
    "kv_doc": RNG.integers(0, 3, 4000).astype(np.int32),
    "bias": RNG.normal(size=(1, 4, 150, 1100)).astype(np.float16),
    "seen": RNG.random((9, 1, 1100)) < 0.7,
    "bits": RNG.integers(0, 256, (9, 40)).astype(np.uint8),
    "temperature": np.float32(0.8),
}


def alibi(score, at, slopes):
    return score - slopes[at.head] * (at.q_pos - at.kv_pos)


def t5(score, at, table):
    distance = at.q_pos - at.kv_pos
    far = 4 + (jnp.log(jnp.maximum(distance, 1) / 4.0) * 1.7).astype(jnp.int32)
    bucket = jnp.where(distance < 4, jnp.maximum(distance, 0), jnp.minimum(far, 8))
    return score + table[bucket, at.head]


def soft_cap(score, at):
    return 3.0 * jnp.tanh(score / 3.0)


def dense_bias(score, at, bias):
    return score + bias[0, at.head, at.q_row, at.kv_pos]


def per_row(score, at, q_doc, temperature):
    return score * (temperature + 0.1 * q_doc[at.q_row])


def of_lengths(score, at, slopes):
    share = at.kv_pos.astype(jnp.float32) / jnp.maximum(at.kv_len, 1) + at.q_len * 1e-3
    return score + share * slopes[at.kv_head] + at.request * 0.01


def documents(at, q_doc, kv_doc):
    return q_doc[at.q_row] == kv_doc[at.kv_row]


def prefix_lm(at):
    return (at.kv_pos <= at.q_pos) | (at.kv_pos < 20)


def dilated(at):
    return ((at.q_pos - at.kv_pos) % 3 == 0) & (at.kv_pos <= at.q_pos)


def sinks_and_window(at):
    return (at.q_pos - at.kv_pos < 33) | (at.kv_pos < 4)


def boolean(at, seen):
    return seen[at.request, at.q_pos, at.kv_pos]


def packed(at, bits):
    return (bits[at.request, at.kv_pos // 8] >> (at.kv_pos % 8)) & 1 == 1


def nothing(at):
    return at.head < 0


LOGITS = {f.__name__: f for f in (alibi, t5, soft_cap, dense_bias, per_row, of_lengths)}
MASKS = {
    f.__name__: f
    for f in (documents, prefix_lm, dilated, sinks_and_window, boolean, packed, nothing)
}


def variant_of(logits=None, mask=None, normalize="softmax"):
    """With the operands that the functions name."""
    functions = [f for f in (logits, mask) if f is not None]
    names = {n for f in functions for n in f.__code__.co_varnames[: f.__code__.co_argcount]}
    operands = {n: OPERANDS[n] for n in OPERANDS if n in names}
    return ja.Variant(logits, mask, normalize, operands), operands


@on_every_cpu
@pytest.mark.parametrize("name", [*LOGITS, *MASKS])
def test_functions(name, backend):
    variant, operands = variant_of(LOGITS.get(name), MASKS.get(name))
    check(Case(name), variant, operands)


@on_every_cpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("logits, mask", [(alibi, None), (None, dilated), (t5, documents)])
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


def sigmoid(score, at):
    return jax.nn.sigmoid(score - 2.0)


@on_every_cpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("schedule, kv_split", SCHEDULES)
@pytest.mark.parametrize("logits, mask", [(sigmoid, None), (sigmoid, dilated), (None, None)])
def test_without_softmax(logits, mask, schedule, kv_split, dtype, backend):
    variant, operands = variant_of(logits, mask, "none")
    case = Case("", contents=("normal",), schedule=schedule, kv_split=kv_split, dtype=dtype)
    check(case, variant, operands)


# ---- single operations ---------------------------------------------------------------------------

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
    """What a function gives for rows and keys 0 ... 23: o of values that are the identity."""
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


@on_every_cpu
@pytest.mark.parametrize("per", INDEXED)
@pytest.mark.parametrize("kind", ["float", "floats", "ints"])
def test_operations(kind, per, backend):
    """Every operation on special numbers, as XLA computes it, at every level."""
    n = 24
    rng = np.random.default_rng(3)
    numbers = INTEGERS if kind == "ints" else SPECIAL
    a, b = rng.choice(numbers, n), rng.choice(numbers, n)
    a[: len(numbers)] = numbers
    ops = {"float": FLOAT_OPS, "floats": FLOAT_PAIRS, "ints": INT_PAIRS}[kind]
    rows, keys = np.meshgrid(np.arange(n), np.arange(n), indexing="ij")
    for name, op in ops.items():

        def function(score, at, a, b, op=op):
            i, j = INDEXED[per](at)
            x = jnp.where(score > 1, score, a[i]) if (kind, per) == ("float", "logit") else a[i]
            result = op(x) if kind == "float" else op(x, b[j])
            if kind != "ints":
                return result
            return (result & 0xFFF).astype(jnp.float32) + (result >> 31).astype(jnp.float32)

        got = weights_of(function, a=a, b=b)
        at = ja.At(**dict.fromkeys((f.name for f in dataclasses.fields(ja.At)), 0))
        at = dataclasses.replace(at, q_pos=rows, kv_pos=keys)
        at = jax.tree.map(lambda x: np.asarray(x, np.int32), at)
        variant = ja.Variant(function, operands={"a": a, "b": b})
        want, _ = variant.apply(np.zeros((n, n), np.float32), at, {"a": a, "b": b})
        np.testing.assert_allclose(got, want, rtol=3e-6, atol=1e-37, err_msg=name)
