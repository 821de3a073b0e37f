"""An interval holds every value that its operation may give (jax_attn/_variant/intervals.py)."""

import numpy as np
import pytest

from jax_attn._variant import intervals
from jax_attn._variant.intervals import Interval

LEAST, MOST = -(2**31), 2**31 - 1


def wrapped(x):
    return (x - LEAST) % 2**32 + LEAST


def truncated(a, b):
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


# On Python integers, as csrc/variant/program.h defines them.
OPERATIONS = {
    "abs": lambda a: wrapped(abs(a)),
    "add": lambda a, b: wrapped(a + b),
    "and": lambda a, b: a & b,
    "div": lambda a, b: -1 if b == 0 else wrapped(truncated(a, b)),
    "eq": lambda a, b: a == b,
    "le": lambda a, b: a <= b,
    "lt": lambda a, b: a < b,
    "max": max,
    "min": min,
    "mul": lambda a, b: wrapped(a * b),
    "ne": lambda a, b: a != b,
    "neg": lambda a: wrapped(-a),
    "not": lambda a: ~a,
    "rem": lambda a, b: a if b == 0 else a - truncated(a, b) * b,
    "sar": lambda a, b: a >> min(max(b, 0), 31) if 0 <= b < 32 else (-1 if a < 0 else 0),
    "sub": lambda a, b: wrapped(a - b),
}


def random_interval(rng):
    begin = int(rng.choice([LEAST, -70000, -20, -3, 0, 1, 5, 16, 50000, 2**30, MOST - 3]))
    low = min(begin + int(rng.integers(0, 4)), MOST)
    return low, min(low + int(rng.choice([0, 0, 1, 3, 40])), MOST)


def as_interval(low, high):
    return Interval(np.full((1, 1), low, np.int32), np.full((1, 1), high, np.int32))


@pytest.mark.parametrize("op", sorted(OPERATIONS))
def test_of_integers(op):
    rng, operation, exact = np.random.default_rng(0), OPERATIONS[op], 0
    num_args = operation.__code__.co_argcount if hasattr(operation, "__code__") else 2
    for _ in range(2000):
        spans = [random_interval(rng) for _ in range(num_args)]
        found = intervals._RULES[op](np, *(as_interval(*s) for s in spans))
        for _ in range(6):
            values = [int(rng.integers(low, high + 1)) for low, high in spans]
            got = operation(*values)
            low, high = found.lo.item(), found.hi.item()
            assert low <= got <= high, (op, spans, values, got, low, high)
        exact += found.lo.item() == found.hi.item()
    assert exact > 100, exact  # the intervals are not always all of i32


@pytest.mark.parametrize("op", ("and", "or", "xor", "eq", "ne", "not", "select"))
def test_of_booleans(op):
    def interval(low, high):
        return Interval(np.full((1, 1), low), np.full((1, 1), high))

    spans = ((False, False), (False, True), (True, True))
    of = {
        "and": lambda a, b, c: a and b,
        "or": lambda a, b, c: a or b,
        "xor": lambda a, b, c: a != b,
        "eq": lambda a, b, c: a == b,
        "ne": lambda a, b, c: a != b,
        "not": lambda a, b, c: not a,
        "select": lambda a, b, c: b if a else c,
    }[op]
    num_args = {"not": 1, "select": 3}.get(op, 2)
    for x in spans:
        for y in spans:
            for z in spans:
                found = intervals._RULES[op](np, *(interval(*s) for s in (x, y, z)[:num_args]))
                got = {of(a, b, c) for a in set(x) for b in set(y) for c in set(z)}
                assert (found.lo.item(), found.hi.item()) == (min(got), max(got)), (op, x, y, z)


@pytest.mark.parametrize("rank", (1, 2, 3))
def test_loads(rank):
    """Loads of any length, whatever the hint says; indices beyond the ends are clamped."""
    rng = np.random.default_rng(rank)
    shape = (3, 4, 50)[3 - rank :]
    exact = 0
    for _ in range(400):
        array = rng.integers(-1000, 1000, shape).astype(np.int32)
        indices, cuts = [], []
        for n in shape:
            low = int(rng.integers(-3, n + 3))
            is_one = rng.random() < 0.6 and len(indices) < rank - 1
            high = low + (0 if is_one else int(rng.choice([0, 1, 2, 5, 11, 60])))
            cuts.append(slice(min(max(low, 0), n - 1), min(max(high, 0), n - 1) + 1))
            hint = rng.choice([None, 0, 1, 3, 8, 49, 1000])
            x = as_interval(low, high)
            indices.append(Interval(x.lo, x.hi, hint))
        found, part = intervals._load(np, array, indices), array[tuple(cuts)]
        assert found.lo <= part.min() and part.max() <= found.hi
        exact += found.lo == part.min() and found.hi == part.max()
    assert exact > 60, exact
    several = Interval(np.zeros((7, 1), np.int32), np.full((1, 9), 2, np.int32))
    assert intervals._load(np, array, [several] * rank).lo.shape in ((7, 9), (1, 1))
