"""Tracing of a variant's Python functions to its program, through a jaxpr."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import source_info_util  # the only source of an equation's line
from jax.extend import core as jax_core

from jax_attn import _core
from jax_attn._variant.program import (
    BOOL,
    F32,
    FACTS,
    I32,
    OP,
    OPERAND_TYPES,
    At,
    Builder,
    Declared,
    refuse,
)

# ---- operands ------------------------------------------------------------------------------------


def declare(operands: Mapping[str, Any]) -> dict[str, Declared]:
    if not isinstance(operands, Mapping):
        refuse("operands", "a dict of name: array", operands)
    if len(operands) > _core.max_variant_operands:
        raise NotImplementedError(
            f"{OP}: operands: up to {_core.max_variant_operands} are supported, got"
            f" {len(operands)}."
        )
    declared = {}
    for number, (name, array) in enumerate(operands.items()):
        if not isinstance(name, str) or not name.isidentifier():
            refuse("operands", "names that are Python identifiers", name)
        if not hasattr(array, "dtype") or not hasattr(array, "shape"):
            array = np.asarray(array)
            if array.dtype.kind == "f":
                array = array.astype(np.float32)
            elif array.dtype.kind == "i":
                array = array.astype(np.int32)
        dtype, rank = jnp.dtype(array.dtype).name, len(array.shape)
        if dtype not in OPERAND_TYPES:
            raise NotImplementedError(
                f"{OP}: operands: {name}: {', '.join(OPERAND_TYPES)} are supported, got {dtype};"
                " cast it."
            )
        if rank > _core.max_operand_rank:
            raise NotImplementedError(
                f"{OP}: operands: {name}: up to {_core.max_operand_rank} axes are supported, got"
                f" {rank}."
            )
        declared[name] = Declared(number, dtype, rank)
    return declared


def operands_of(what: str, function: Callable[..., Any], operands: Mapping[str, Any]) -> list[str]:
    """The names of the operands that a function takes, from its signature."""
    own = {"mask": ["at"], "logits": ["score", "at"], "": []}
    first = own.get(what, ["x", "at"])
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    has_room = sum(p.kind in positional for p in parameters) >= len(first) or any(
        p.kind is p.VAR_POSITIONAL for p in parameters
    )
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = [p for p in parameters[len(first) :] if p.kind in keyword]
    missing = [p.name for p in named if p.name not in operands and p.default is p.empty]
    if what and (not has_room or (missing and not takes_all)):
        advice = ""
        if has_room:
            arrays = ", ".join(f"{name!r}: array" for name in missing)
            advice = f"; declare the arrays that it reads, operands={{{arrays}}}"
        raise ValueError(
            f"{OP}: {what}: expected fn({', '.join(first)}, ...), then of its operands"
            f" ({', '.join(operands) or 'none'}), got fn{signature}{advice}."
        )
    return list(operands) if takes_all else [p.name for p in named if p.name in operands]


_load_p = jax_core.Primitive("jax_attn_load")
_load_p.def_abstract_eval(
    lambda *_, operand, kind: jax.core.ShapedArray((), (jnp.float32, jnp.int32, jnp.bool_)[kind])
)
_dim_p = jax_core.Primitive("jax_attn_dim")
_dim_p.def_abstract_eval(lambda *, operand, axis: jax.core.ShapedArray((), jnp.int32))


class Operand:
    """An operand while a function is traced. It supports indexing only."""

    def __init__(self, name: str, declared: Declared) -> None:
        self._name, self._declared = name, declared
        self.ndim, self.dtype = declared.rank, jnp.dtype(declared.dtype)

    @property
    def shape(self) -> tuple[Any, ...]:
        number, _, rank = self._declared
        return tuple(_dim_p.bind(operand=number, axis=axis) for axis in range(rank))

    def __getitem__(self, indices: Any) -> Any:
        number, dtype, rank = self._declared
        indices = indices if isinstance(indices, tuple) else (indices,)
        if len(indices) != rank:
            refuse(self._name, f"{rank} indices, one an axis", f"{len(indices)} indices")
        indices = [as_index(self._name, i) for i in indices]
        return _load_p.bind(*indices, operand=number, kind=OPERAND_TYPES[dtype])

    @property
    def value(self) -> Any:
        return self if self._declared.rank else self[()]


def as_index(name: str, index: Any) -> Any:
    index = as_integers(name, index)
    if index.shape:
        refuse(name, "integer scalars as indices", index)
    return index


def as_integers(name: str, index: Any) -> Any:
    is_number = not isinstance(index, (slice, list, type(None), type(Ellipsis)))
    index = jnp.asarray(index) if is_number else index
    if not is_number or index.dtype.kind not in "iub":
        refuse(name, "integer scalars as indices", index)
    return index.astype(jnp.int32)


@contextlib.contextmanager
def tracing_errors(what: str, known: str, at: type) -> Iterator[None]:
    """Turns what JAX raises while it traces a function into errors with the user's line.

    known: a clause that says what an object of the type `at` has.
    """
    try:
        with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
            yield
    except (
        jax.errors.ConcretizationTypeError,
        jax.errors.TracerArrayConversionError,
        jax.errors.TracerIntegerConversionError,
    ) as error:
        raise NotImplementedError(
            f"{OP}: {what}: Python control flow and numpy on traced values are not supported"
            f" at {_raised_at(error)}; use jnp.where and jnp functions, and make an array that"
            " they index one of the operands."
        ) from None
    except AttributeError as error:
        if not isinstance(error.obj, (at, Operand)):
            raise
        if not isinstance(error.obj, at):
            known = "an operand has shape, ndim and dtype, and is indexed, name[i, ...]"
        raise NotImplementedError(
            f"{OP}: {what}: .{error.name} at {_raised_at(error)} is not supported; {known}."
        ) from None
    except TypeError as error:
        if Operand.__name__ not in str(error):
            raise
        raise NotImplementedError(
            f"{OP}: {what}: operands are supported where they are indexed, name[i, ...], one"
            f" element at a time, got one as a whole at {_raised_at(error)}."
        ) from None


# ---- from a function to values ------------------------------------------------------------------


def trace(
    builder: Builder, what: str, function: Callable[..., Any], declared: dict[str, Declared]
) -> int:
    """Add the values of a function to the program. Returns the number of its result.

    what: "logits" or "mask". Raises as Variant does.
    """
    wanted = operands_of(what, function, declared)
    facts = At(**{fact: jax.ShapeDtypeStruct((), jnp.int32) for fact in FACTS})
    score = jax.ShapeDtypeStruct((), jnp.float32)
    arguments = (score, facts) if what == "logits" else (facts,)

    def call(*arguments: Any) -> Any:
        operands = {name: Operand(name, declared[name]).value for name in wanted}
        result = function(*arguments, **operands)
        if result is None or isinstance(result, (tuple, list, dict)):
            refuse(what, "a function that returns a scalar", result)
        result = jnp.asarray(result)
        if result.shape:
            refuse(what, "a function that returns a scalar", result)
        if what == "mask" and result.dtype != jnp.bool_:
            refuse(what, "a function that returns a bool", str(result.dtype))
        if what == "logits" and result.dtype == jnp.bool_:
            refuse(what, "a function that returns a number", str(result.dtype))
        return result if what == "mask" else result.astype(jnp.float32)

    with tracing_errors(what, f"at has {', '.join(FACTS)}", At):
        closed = jax.make_jaxpr(call)(*arguments)
    names = ("score", *FACTS) if what == "logits" else FACTS
    values = [builder.add(name, F32 if name == "score" else I32) for name in names]
    (result,) = _run(builder, what, closed.jaxpr, closed.consts, values)
    return result


# The number of a value, or those of a vector's elements: jnp.select stacks its conditions.
_Value = int | tuple[int, ...]


def _run(
    builder: Builder, what: str, jaxpr: Any, consts: Sequence[Any], values: Sequence[_Value]
) -> Any:
    known: dict[Any, _Value] = dict(zip(jaxpr.invars, values, strict=True))
    for var, const in zip(jaxpr.constvars, consts, strict=True):
        if isinstance(const, jax.core.Tracer) or np.shape(const):
            raise NotImplementedError(
                f"{OP}: {what}: closing over {jax.typeof(const)} is not supported; make it an"
                " operand, operands={name: array}, and an argument of the function."
            )
        known[var] = builder.constant(np.asarray(const), kind_of(what, var.aval, None))

    def read(atom: Any, eqn: Any) -> _Value:
        if isinstance(atom, jax_core.Literal):
            return builder.constant(atom.val, kind_of(what, atom.aval, eqn))
        return known[atom]

    for eqn in jaxpr.eqns:
        for inner in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
            if inner in eqn.params:
                break
        if inner in eqn.params and eqn.primitive.name in CALLS:
            body = eqn.params[inner]
            closed = body if hasattr(body, "consts") else jax_core.ClosedJaxpr(body, ())
            arguments = [read(x, eqn) for x in eqn.invars]
            results = _run(builder, what, closed.jaxpr, closed.consts, arguments)
        else:
            (out,) = eqn.outvars if len(eqn.outvars) == 1 else (None,)
            vectors = [x.aval for x in (*eqn.invars, *eqn.outvars) if x.aval.shape]
            rules: Mapping[str, _Rule | _VectorRule] = _VECTOR_RULES if vectors else RULES
            rule = rules.get(eqn.primitive.name)
            if vectors and (rule is None or max(len(x.shape) for x in vectors) > 1):
                raise NotImplementedError(
                    f"{OP}: {what}: the array {vectors[-1].str_short()} at"
                    f" {source_info_util.summarize(eqn.source_info)} is not supported; make arrays"
                    " operands, operands={name: array}, and index them, name[i]."
                )
            if rule is None or out is None:
                _unsupported(what, f"the primitive {eqn.primitive.name}", eqn)
            kind = kind_of(what, out.aval, eqn)
            arguments = [read(x, eqn) for x in eqn.invars]
            value = rule(builder, kind, eqn.params, *arguments)
            if value is None:
                _unsupported(what, f"the primitive {eqn.primitive.name} with {eqn}", eqn)
            results = [value]
        known.update(zip(eqn.outvars, results, strict=True))
    return [read(x, None) for x in jaxpr.outvars]


# Primitives that are inlined.
CALLS = {
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vjp_call_jaxpr",
    "checkpoint",
    "remat",
    "remat2",
}


def kind_of(what: str, aval: Any, eqn: Any) -> int:
    kinds = {"float32": F32, "int32": I32, "bool": BOOL}
    if aval.dtype.name not in kinds:
        _unsupported(what, f"a value of {aval.str_short()}", eqn)
    return kinds[aval.dtype.name]


def _unsupported(what: str, thing: str, eqn: Any) -> NoReturn:
    known = ", ".join(name for name in sorted(RULES) if not name.startswith("jax_attn"))
    line = "" if eqn is None else f" at {source_info_util.summarize(eqn.source_info)}"
    raise NotImplementedError(
        f"{OP}: {what}: {thing}{line} is not supported; scalars of float32, int32 and bool are,"
        f" indexed operands, and the primitives {known}."
    )


def _raised_at(error: BaseException) -> str:
    found, trace = "an unknown line", error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if _is_users(file):
            found = f"{file}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


def _is_users(file: str) -> bool:
    return file != __file__ and source_info_util.is_user_filename(file)


_Rule = Callable[..., "int | None"]


def _same(op: str) -> _Rule:
    return lambda b, kind, params, *args: b.add(op, kind, *args)


def _compare(op: str, swaps: bool = False) -> _Rule:
    def rule(b: Builder, kind: int, params: Any, x: int, y: int) -> int:
        return b.add(op, BOOL, *((y, x) if swaps else (x, y)))

    return rule


def _identity(b: Builder, kind: int, params: Any, x: int, *_: int) -> int:
    return x


def _cast(b: Builder, kind: int, params: Any, x: int) -> int:
    if b.kind(x) == kind:
        return x
    if kind == F32 and (known := b.constant_of(x)) is not None:
        return b.constant(known, kind)
    return b.add("cast", kind, x)


def _select(b: Builder, kind: int, params: Any, which: int, *cases: int) -> int:
    """The case with the number `which`, or the nearest one that exists."""
    if b.kind(which) == BOOL:
        return b.select(kind, which, cases[-1], cases[0])
    *others, result = cases
    for i, case in reversed([*enumerate(others)]):
        is_it = b.add("le", BOOL, which, b.constant(i, I32))
        result = b.select(kind, is_it, case, result)
    return result


def _clamp(b: Builder, kind: int, params: Any, low: int, x: int, high: int) -> int:
    return b.add("min", kind, b.add("max", kind, low, x), high)


def _integer_pow(b: Builder, kind: int, params: Any, x: int) -> int:
    return _power(b, kind, x, params["y"])


def _power(b: Builder, kind: int, x: int, y: int) -> int:
    """x to the power of an integer, by repeated squaring."""
    power = abs(y)
    result, square = None, x
    while power:
        if power & 1:
            result = square if result is None else b.add("mul", kind, result, square)
        power >>= 1
        if power:
            square = b.add("mul", kind, square, square)
    one = b.constant(1, kind)
    result = one if result is None else result
    return result if y >= 0 else b.add("div", kind, one, result)


def _pow(b: Builder, kind: int, params: Any, x: int, y: int) -> int:
    """Powers, of constant exponents by cheaper operations where XLA does so, too."""
    known = b.constant_of(y)
    if known is not None and abs(known) <= 16 and known == int(known):
        return _power(b, kind, x, int(known))
    if known is not None and abs(known) == 0.5:
        return b.add("sqrt" if known > 0 else "rsqrt", kind, x)
    return b.add("pow", kind, x, _cast(b, F32, params, y))


def _tan(b: Builder, kind: int, params: Any, x: int) -> int:
    return b.add("div", kind, b.add("sin", kind, x), b.add("cos", kind, x))


def _atan(b: Builder, kind: int, params: Any, x: int) -> int:
    return b.add("atan2", kind, x, b.constant(1, kind))


def _opposite_leg(b: Builder, kind: int, x: int) -> int:
    """sqrt(1 - x^2), accurate also near |x| = 1."""
    one = b.constant(1, kind)
    square = b.add("mul", kind, b.add("sub", kind, one, x), b.add("add", kind, one, x))
    return b.add("sqrt", kind, square)


def _asin(b: Builder, kind: int, params: Any, x: int) -> int:
    return b.add("atan2", kind, x, _opposite_leg(b, kind, x))


def _acos(b: Builder, kind: int, params: Any, x: int) -> int:
    return b.add("atan2", kind, _opposite_leg(b, kind, x), x)


def _sinh(b: Builder, kind: int, params: Any, x: int) -> int:
    """(e^x - e^-x) / 2; the two differences from 1 have opposite signs, so nothing cancels."""
    less = b.add("expm1", kind, b.add("neg", kind, x))
    return b.add(
        "mul", kind, b.constant(0.5, kind), b.add("sub", kind, b.add("expm1", kind, x), less)
    )


def _cosh(b: Builder, kind: int, params: Any, x: int) -> int:
    up, down = b.add("exp", kind, x), b.add("exp", kind, b.add("neg", kind, x))
    return b.add("mul", kind, b.constant(0.5, kind), b.add("add", kind, up, down))


def _cbrt(b: Builder, kind: int, params: Any, x: int) -> int:
    root = b.add("pow", kind, b.add("abs", kind, x), b.constant(1 / 3, kind))
    return b.add("mul", kind, b.add("sign", kind, x), root)


def _round(b: Builder, kind: int, params: Any, x: int) -> int:
    """Round to nearest; ties away from zero (lax's default) or to even."""
    if int(params["rounding_method"]) == 1:
        return b.add("round", kind, x)
    magnitude = b.add("abs", kind, x)
    whole = b.add("floor", kind, magnitude)
    half = b.add("le", BOOL, b.constant(0.5, kind), b.add("sub", kind, magnitude, whole))
    up = b.add("select", kind, half, b.add("add", kind, whole, b.constant(1, kind)), whole)
    negative = b.add("lt", BOOL, x, b.constant(0, kind))
    return b.add("select", kind, negative, b.add("neg", kind, up), up)


def _is_finite(b: Builder, kind: int, params: Any, x: int) -> int:
    return b.add("lt", BOOL, b.add("abs", F32, x), b.constant(np.inf, F32))


def _load(b: Builder, kind: int, params: Any, *indices: int) -> int:
    return b.add("load", kind, params["operand"], *indices)


def _stop_gradient(b: Builder, kind: int, params: Any, x: int) -> int:
    """A cast to its own type, which has no derivative."""
    return b.add("cast", kind, x) if kind == F32 else x


def _dim(b: Builder, kind: int, params: Any) -> int:
    return b.add("dim", kind, params["operand"], params["axis"])


# How each primitive is translated: rule(builder, type of the result, parameters, arguments).
RULES: dict[str, _Rule] = {
    **{
        name: _same(name)
        for name in (
            *("neg", "abs", "sign", "floor", "ceil", "exp", "exp2", "log", "log1p", "tanh"),
            *("logistic", "sqrt", "rsqrt", "expm1", "sin", "cos", "erf", "erfc", "atan2"),
            *("not", "add", "sub", "mul", "div", "rem", "min", "max", "and", "or", "xor"),
        )
    },
    "shift_left": _same("shl"),
    "shift_right_arithmetic": _same("sar"),
    "shift_right_logical": _same("shr"),
    "eq": _compare("eq"),
    "ne": _compare("ne"),
    "lt": _compare("lt"),
    "le": _compare("le"),
    "gt": _compare("lt", swaps=True),
    "ge": _compare("le", swaps=True),
    "select_n": _select,
    "clamp": _clamp,
    "convert_element_type": _cast,
    "integer_pow": _integer_pow,
    "pow": _pow,
    "tan": _tan,
    "atan": _atan,
    "asin": _asin,
    "acos": _acos,
    "sinh": _sinh,
    "cosh": _cosh,
    "cbrt": _cbrt,
    "square": lambda b, kind, params, x: b.add("mul", kind, x, x),
    "round": _round,
    "is_finite": _is_finite,
    "copy": _identity,
    "copy_p": _identity,
    "squeeze": _identity,
    "reshape": _identity,
    "broadcast_in_dim": _identity,
    "stop_gradient": _stop_gradient,
    "jax_attn_load": _load,
    "jax_attn_dim": _dim,
}


def _first_true(b: Builder, kind: int, params: Any, bools: tuple[int, ...]) -> int | None:
    """argmax of bools: the number of the first that is true, 0 if none is."""
    if b.kind(bools[0]) != BOOL:
        return None
    result = b.constant(0, kind)
    for i, which in reversed([*enumerate(bools)]):
        result = b.select(kind, which, b.constant(i, kind), result)
    return result


_VectorRule = Callable[..., "_Value | None"]

# The same for equations with vectors, which hold what jnp.select chooses by.
_VECTOR_RULES: dict[str, _VectorRule] = {
    "stack": lambda b, kind, params, *xs: xs,
    "broadcast_in_dim": lambda b, kind, params, x: (x,) * params["shape"][0],
    "concatenate": lambda b, kind, params, *xs: tuple(itertools.chain(*xs)),
    "convert_element_type": lambda b, kind, params, xs: tuple(
        _cast(b, kind, params, x) for x in xs
    ),
    "argmax": _first_true,
}
