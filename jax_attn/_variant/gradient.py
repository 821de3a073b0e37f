"""Derivatives of a variant's logits, as values of a program that the backward pass runs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

from jax_attn import _core
from jax_attn._variant.program import BOOL, F32, Builder, Declared
from jax_attn._variant.variant import Variant

_OP = "attention: gradients: a variant"


class Gradient(NamedTuple):
    """A variant's program with derivatives."""

    words: tuple[int, ...]  # DecodeGradient in csrc/variant/words.h
    operands: tuple[int, ...]  # numbers of the operands with derivatives


@functools.lru_cache(maxsize=256)
def gradient_of(variant: Variant, wanted: tuple[int, ...] = ()) -> Gradient:
    """Derivatives of the logit by the score and by the elements read from the operands `wanted`.

    Reverse accumulation over the program, so variants with equal programs have equal gradients.

    Raises NotImplementedError for a program that is too long with its derivatives.
    """
    declared = tuple(Declared(i, *about) for i, about in enumerate(variant.operand_types))
    builder = Builder(declared)
    instructions = variant.instructions
    values: list[int] = []  # instruction -> its value in the builder
    for x in instructions:
        own = x.args[: x.num_own_args]
        args = (values[a] for a in x.value_args)
        values.append(builder.add(x.op, x.kind, *own, *args))
    result, visible = variant.results
    slopes: dict[int, int] = {}  # instruction -> the value of d logit / d instruction
    if result >= 0:
        slopes[result] = builder.constant(1, F32)
    for i in reversed(range(len(instructions))):
        x = instructions[i]
        if i not in slopes or x.op not in _PARTS:
            continue
        parts = _PARTS[x.op](builder, slopes[i], values[i], *(values[a] for a in x.args))
        for arg, part in zip(x.args, parts, strict=True):
            if part is not None:
                known = slopes.get(arg)
                slopes[arg] = part if known is None else builder.add("add", F32, known, part)
    kept = []
    if result >= 0:
        score = next((slopes[i] for i in slopes if instructions[i].op == "score"), None)
        kept.append(builder.constant(0, F32) if score is None else score)
    loads = [
        i
        for i in sorted(slopes)
        if instructions[i].op == "load" and instructions[i].args[0] in wanted
    ]
    if len(loads) > _core.max_derivatives:
        raise NotImplementedError(
            f"{_OP}: up to {_core.max_derivatives} places where it reads operands that are"
            f" differentiated are supported, got {len(loads)}."
        )
    kept += [value for i in loads for value in (values[i], slopes[i])]
    logits, mask = (values[r] if r >= 0 else -1 for r in (result, visible))
    try:
        words, numbers = builder.words(int(variant.normalizes), logits, mask, kept)
    except NotImplementedError as error:
        raise NotImplementedError(f"{_OP}: with derivatives: {error}") from None
    if result < 0:
        numbers = [-1]
    head = [numbers[0], len(loads), *numbers[1:]]
    operands = sorted({instructions[i].args[0] for i in loads})
    return Gradient((*head, *words), tuple(operands))


# ---- derivative rules: rule(builder, d logit / d result, result, arguments) -> for each argument
# d logit / d argument, None: 0


def _times(b: Builder, x: int, y: int) -> int:
    for one, other in ((x, y), (y, x)):
        known = b.constant_of(one)
        if known is not None and abs(known) == 1:
            return other if known == 1 else b.add("neg", F32, other)
    return b.add("mul", F32, x, y)


def _scaled(b: Builder, factor: float, x: int) -> int:
    return _times(b, b.constant(factor, F32), x)


def _less(b: Builder, x: int, y: int) -> int:
    return b.add("sub", F32, x, y)


def _over(b: Builder, x: int, y: int) -> int:
    return b.add("div", F32, x, y)


def _of_product(b: Builder, g: int, z: int, x: int, y: int) -> tuple[int, int]:
    return _times(b, g, y), _times(b, g, x)


def _of_quotient(b: Builder, g: int, z: int, x: int, y: int) -> tuple[int, int]:
    of_x = _over(b, g, y)
    return of_x, b.add("neg", F32, _times(b, of_x, z))


def _of_remainder(b: Builder, g: int, z: int, x: int, y: int) -> tuple[int, int]:
    ratio = _over(b, x, y)
    whole = b.add("floor", F32, b.add("abs", F32, ratio))
    return g, b.add("neg", F32, _times(b, g, _times(b, b.add("sign", F32, ratio), whole)))


def _of_power(b: Builder, g: int, z: int, x: int, y: int) -> tuple[int, int]:
    """Derivatives of x^y; at x = 0 and at y = 0 those of jax.lax.pow."""
    zero, one = b.constant(0, F32), b.constant(1, F32)
    is_one = b.add("eq", BOOL, y, zero)
    less = b.add("pow", F32, x, b.select(F32, is_one, one, _less(b, y, one)))
    of_x = b.select(F32, is_one, zero, _times(b, _times(b, g, y), less))
    base = b.select(F32, b.add("eq", BOOL, x, zero), one, x)
    return of_x, _times(b, _times(b, g, z), b.add("log", F32, base))


def _of_angle(b: Builder, g: int, z: int, y: int, x: int) -> tuple[int, int]:
    square = b.add("add", F32, _times(b, x, x), _times(b, y, y))
    return _times(b, g, _over(b, x, square)), b.add("neg", F32, _times(b, g, _over(b, y, square)))


def _of_erf(b: Builder, g: int, x: int, sign: int) -> tuple[int]:
    bell = b.add("exp", F32, b.add("neg", F32, _times(b, x, x)))
    return (_times(b, g, _scaled(b, sign * 2 / math.sqrt(math.pi), bell)),)


def _of_choice(order: str) -> _Rule:
    """The rule of min and max: equal arguments get half each, as in JAX."""

    def rule(b: Builder, g: int, z: int, x: int, y: int) -> tuple[int, int]:
        half, zero = _scaled(b, 0.5, g), b.constant(0, F32)
        is_equal = b.add("eq", BOOL, x, y)

        def part(this: int, other: int) -> int:
            is_it = b.add("lt", BOOL, *((this, other) if order == "min" else (other, this)))
            return b.add("select", F32, is_equal, half, b.add("select", F32, is_it, g, zero))

        return part(x, y), part(y, x)

    return rule


def _of_select(b: Builder, g: int, z: int, which: int, yes: int, no: int) -> tuple[int | None, ...]:
    zero = b.constant(0, F32)
    return None, b.add("select", F32, which, g, zero), b.add("select", F32, which, zero, g)


_Rule = Callable[..., "tuple[int | None, ...]"]

# Operations that are not listed have derivative 0. A cast from f32 to f32 is jax.lax.stop_gradient.
_PARTS: dict[str, _Rule] = {
    "neg": lambda b, g, y, x: (b.add("neg", F32, g),),
    "abs": lambda b, g, y, x: (_times(b, g, b.add("sign", F32, x)),),
    "exp": lambda b, g, y, x: (_times(b, g, y),),
    "exp2": lambda b, g, y, x: (_times(b, g, _scaled(b, math.log(2), y)),),
    "log": lambda b, g, y, x: (_over(b, g, x),),
    "log1p": lambda b, g, y, x: (_over(b, g, b.add("add", F32, x, b.constant(1, F32))),),
    "tanh": lambda b, g, y, x: (_times(b, g, _less(b, b.constant(1, F32), _times(b, y, y))),),
    "logistic": lambda b, g, y, x: (_times(b, g, _times(b, y, _less(b, b.constant(1, F32), y))),),
    "expm1": lambda b, g, y, x: (_times(b, g, b.add("add", F32, y, b.constant(1, F32))),),
    "sin": lambda b, g, y, x: (_times(b, g, b.add("cos", F32, x)),),
    "cos": lambda b, g, y, x: (b.add("neg", F32, _times(b, g, b.add("sin", F32, x))),),
    "erf": lambda b, g, y, x: _of_erf(b, g, x, 1),
    "erfc": lambda b, g, y, x: _of_erf(b, g, x, -1),
    "atan2": _of_angle,
    "pow": _of_power,
    "sqrt": lambda b, g, y, x: (_over(b, _scaled(b, 0.5, g), y),),
    "rsqrt": lambda b, g, y, x: (_times(b, g, _scaled(b, -0.5, _over(b, y, x))),),
    "add": lambda b, g, z, x, y: (g, g),
    "sub": lambda b, g, z, x, y: (g, b.add("neg", F32, g)),
    "mul": _of_product,
    "div": _of_quotient,
    "rem": _of_remainder,
    "min": _of_choice("min"),
    "max": _of_choice("max"),
    "select": _of_select,
}
